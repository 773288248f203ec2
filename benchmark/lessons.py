"""What each idea does, seen on the bundled task: the runs and the pictures of docs/lessons.md.

    pip install -r benchmark/requirements.txt
    python benchmark/lessons.py 4      runs what lesson 4 lacks, and draws its picture
    python benchmark/lessons.py        all of them
    python benchmark/lessons.py --draw draws from the records alone

Every run is one command of an unchanged script, with flags only, which the record states and docs/lessons.md prints.
Runs go two at a time, each on one thread. benchmark/records/lessons.jsonl gets one line for each: command, commit (and
"dirty", if the tree had changes), versions, args, wall time, the evaluations, and a curve over the steps for every
metric. A command that has its record is not run again; a lesson may use a run of another one. A run that fails ends
all, with its output. Pictures: docs/lessons/<number>.svg; a line is the mean of the seeds, smoothed over five steps,
the band goes from the lowest seed to the highest. Commands and tables are written into docs/lessons.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from pictures import GRAY, WINDOW, digest, draw_band, panels, save, smooth
from records import FOLDER, ROOT, fill, provenance, read, read_run, spread, table
from tqdm import tqdm

RECORDS = FOLDER / "lessons.jsonl"
PICTURES = ROOT / "docs" / "lessons"
SEEDS = (1, 2, 3)
PPO = "ppo_rlhf.py --num-steps 20"
FREE = "--model runs/hesitant --dataset runs/hesitant --system-prompt= --temperature 1 --max-new-tokens 128"
FREE += " --learning-rate 5e-5 --num-steps 50"

# Number -> title, {arm: command without its seed}, [panels: (x, y) of a curve; "groups" are bars].
SAMPLED, STEPS, ACCURACY = "responses sampled", "step", "rollout/accuracy"
LABELS = {f"length/{kind}": f"characters in a {kind} response" for kind in ("right", "wrong")}
LESSONS = {
    1: (
        "Baselines",
        {
            "no baseline": "reinforce_baseline.py --num-steps 40 --baseline none",
            "moving average": "reinforce_baseline.py --num-steps 40 --baseline moving_average",
            "batch mean": "reinforce_baseline.py --num-steps 40",
            "RLOO": "rloo.py --num-steps 40",
            "ReMax": "remax.py --num-steps 40",
        },
        [(SAMPLED, ACCURACY), (STEPS, "optim/grad_norm")],
    ),
    2: (
        "Reusing a rollout",
        {f"mu = {mu}": f"grpo.py --num-steps 30 --num-iterations {mu}" for mu in (1, 2, 4, 8)},
        [(SAMPLED, ACCURACY), (STEPS, "policy/clip_frac"), (STEPS, "policy/approx_kl")],
    ),
    3: (
        "Why clip",
        {
            "clipped, 1e-4": "grpo.py --num-steps 30 --num-minibatches 8 --beta 0",
            "not clipped, 1e-4": "rloo.py --num-steps 30 --num-minibatches 8 --beta 0",
            "clipped, 3e-4": "grpo.py --num-steps 30 --num-minibatches 8 --beta 0 --learning-rate 3e-4",
            "not clipped, 3e-4": "rloo.py --num-steps 30 --num-minibatches 8 --beta 0 --learning-rate 3e-4",
        },
        [(SAMPLED, ACCURACY), (STEPS, "policy/approx_kl")],
    ),
    4: (
        "The KL leash",
        {
            f"beta = {beta}": f"grpo.py --num-steps 40 --beta {beta}"
            for beta in (0.001, 0.01, 0.1, 1)
        },
        [(SAMPLED, ACCURACY), ("kl/ref", ACCURACY)],
    ),
    5: (
        "Dividing by the std",
        {"GRPO": "grpo.py --num-steps 40 --beta 0", "Dr. GRPO": "dr_grpo.py --num-steps 40"},
        ["groups", (SAMPLED, ACCURACY)],
    ),
    6: (
        "Length",
        {
            "1/length (GRPO)": f"grpo.py {FREE} --beta 0",
            "constant (Dr. GRPO)": f"dr_grpo.py {FREE}",
            "token mean (DAPO)": f"dapo.py {FREE} --max-resample 0 --overlong-cache 1",
        },
        [(STEPS, "length/wrong"), (STEPS, "length/right")],
    ),
    7: (
        "Dynamic sampling",
        {"GRPO": "grpo.py --num-steps 40 --beta 0", "DAPO": "dapo.py --num-steps 30"},
        [(STEPS, "rollout/zero_std_frac"), (STEPS, ACCURACY), (SAMPLED, ACCURACY)],
    ),
    8: (
        "Clip-Higher",
        {
            f"eps_high = {high}": "dapo.py --num-steps 30 --max-resample 0 --num-iterations 2 --num-minibatches 4 "
            f"--learning-rate 3e-4 --clip-eps-high {high}"
            for high in (0.2, 0.28, 0.4)
        },
        [(SAMPLED, ACCURACY), (STEPS, "policy/entropy")],
    ),
    9: (
        "One ratio per sequence or per token",
        {
            "GRPO, 1e-4": "grpo.py --num-steps 30 --num-minibatches 8 --beta 0",
            "GSPO, 1e-4": "gspo.py --num-steps 30 --num-minibatches 8",
            "GRPO, 3e-4": "grpo.py --num-steps 30 --num-minibatches 8 --beta 0 --learning-rate 3e-4",
            "GSPO, 3e-4": "gspo.py --num-steps 30 --num-minibatches 8 --learning-rate 3e-4",
        },
        [(SAMPLED, ACCURACY), (STEPS, "policy/clip_frac"), (STEPS, "policy/approx_kl")],
    ),
    10: (
        "The critic",
        {
            "lambda 0": f"{PPO} --gae-lambda 0",
            "lambda 0.95": PPO,
            "lambda 1": f"{PPO} --gae-lambda 1",
            "0.95, critic from the policy": f"{PPO} --value-init policy",
        },
        [(SAMPLED, ACCURACY), (STEPS, "value/explained_var")],
    ),
    11: (
        "Goodhart's law",
        {
            f"beta = {beta}": f"{PPO} --learning-rate 5e-4 --beta {beta}"
            for beta in (0, 0.05, 0.2, 1)
        },
        [(SAMPLED, "rollout/score"), (SAMPLED, ACCURACY), (STEPS, "kl/response")],
    ),
    12: (
        "Group size",
        {
            f"G = {G}": f"grpo.py --num-steps 40 --num-generations {G} --num-prompts {128 // G}"
            for G in (2, 4, 8, 16, 32)
        },
        [(SAMPLED, ACCURACY), (STEPS, "rollout/zero_std_frac")],
    ),
    13: (
        "Stale and rounded samplers",
        {
            f"{name}{', not corrected' if off else ''}": "grpo_offpolicy.py --num-steps 40 --learning-rate 3e-4"
            + flags
            + (" --rollout-correction 0" if off else "")
            for name, flags in {
                "K = 1": "",
                "bf16": " --sampler-dtype bfloat16",
                "K = 4": " --staleness 4",
                "K = 16": " --staleness 16",
            }.items()
            for off in ((False, True) if name != "K = 1" else (False,))
        },
        [(SAMPLED, ACCURACY), (STEPS, "rollout/logprob_gap"), (STEPS, "rollout/truncated_frac")],
    ),
    14: (
        "Credit for steps",
        {"outcome (grpo)": "grpo.py --num-steps 40", "process": "grpo_process.py --num-steps 40"},
        [(SAMPLED, ACCURACY), (STEPS, "optim/grad_norm")],
    ),
    15: (
        "What the metrics look like when something is wrong",
        {
            "healthy": "grpo.py --num-steps 40",
            "learning rate too high": "grpo.py --num-steps 40 --learning-rate 2e-3",
            "responses cut": "grpo.py --num-steps 40 --max-new-tokens 18",
            "sampled too cold": "grpo.py --num-steps 40 --temperature 0.1",
            "PPO": PPO,
            "PPO, critic that does not learn": f"{PPO} --value-init policy --value-learning-rate 1e-9",
            "PPO, collapsed": "ppo_rlhf.py --num-steps 40 --learning-rate 3e-3 --beta 0",
        },
        [
            (STEPS, ACCURACY),
            (STEPS, "policy/entropy"),
            (STEPS, "kl/ref"),
            (STEPS, "rollout/eos_frac"),
            (STEPS, "rollout/zero_std_frac"),
            (STEPS, "value/explained_var"),
        ],
    ),
}


def lengths_and_groups(folder: Path) -> tuple[dict, dict]:
    """From the samples: mean characters of right and wrong responses per step; {right of a group: [groups, |A|]}."""
    lengths, groups = defaultdict(lambda: defaultdict(list)), defaultdict(lambda: [0, 0.0])
    for line in (folder / "samples.jsonl").open(encoding="utf-8"):
        sample = json.loads(line)
        right = [reward >= 1 for reward in sample["rewards"]]
        for text, is_right in zip(sample["completions"], right, strict=True):
            lengths["right" if is_right else "wrong"][sample["step"]].append(len(text))
        number = groups[sum(right)]
        number[0] += 1
        advantages = [np.atleast_1d(values) for values in sample["advantages"]]  # of tokens, or one
        number[1] += float(np.mean(np.abs(np.concatenate(advantages))))
    last = max(max(steps) for steps in lengths.values())
    curves = {}
    for name, steps in lengths.items():
        curves[f"length/{name}"] = [
            round(float(np.mean(steps[k])), 2) if steps[k] else None for k in range(1, last + 1)
        ]
    return curves, {
        str(k): [count, round(total / count, 4)] for k, (count, total) in sorted(groups.items())
    }


def run(command: str, seed: int) -> dict:
    """Run a script in a folder of its own; its record."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        full = f"{command} --device cpu --seed {seed}"
        start = time.perf_counter()
        arguments = [sys.executable, *full.split(), "--runs-dir", folder, "--run-name", "run"]
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"python {full}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
        seconds, folder = time.perf_counter() - start, Path(folder, "run")
        metrics, args = read_run(folder)
        lengths, groups = lengths_and_groups(folder)
    curves = {}
    for name in metrics[1]:
        if name not in ("step", "tokens") and not name.startswith(("time/", "eval/")):
            curves[name] = [
                line[name] if line[name] is None else float(f"{line[name]:.4g}")
                for line in metrics[1:]
            ]
    record = {
        "command": command,
        "seed": seed,
        "seconds": round(seconds, 1),
        **provenance(),
        "versions": args.pop("versions"),
        "args": {name: value for name, value in args.items() if not name.startswith("run")},
    }
    paths = [name for name in ("model", "dataset", "reward_model") if name in args]
    record["args"] |= {name: Path(args[name]).name for name in paths}
    record["eval"] = {
        line["step"]: line["eval/accuracy"] for line in metrics if "eval/accuracy" in line
    }
    return record | {"curves": curves | lengths, "groups": groups}


def read_records() -> dict:
    """(command, seed) -> record."""
    return {(record["command"], record["seed"]): record for record in read(RECORDS)}


def run_missing(numbers: list[int]) -> None:
    """Run what the lessons lack, two at a time, and append each record as it comes."""
    have = read_records()
    commands = dict.fromkeys(
        command for number in numbers for command in LESSONS[number][1].values()
    )
    missing = [
        (command, seed) for seed in SEEDS for command in commands if (command, seed) not in have
    ]
    student = ROOT / "runs" / "hesitant" / "model.safetensors"  # of lesson 6
    if any("runs/hesitant" in command for command, _ in missing) and not student.exists():
        subprocess.run(
            [sys.executable, "benchmark/hesitant.py", "runs/hesitant"], cwd=ROOT, check=True
        )
    with ThreadPoolExecutor(2) as pool, tqdm(total=len(missing), desc="runs") as progress:
        waiting = {pool.submit(run, *key) for key in missing}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_EXCEPTION, timeout=1)
            for future in done:
                if future.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                    raise SystemExit(f"a run failed:\n{future.exception()}")
                with RECORDS.open("a", encoding="utf-8") as file:
                    print(json.dumps(future.result()), file=file)
                progress.update()


def draw_curve(ax, records: list[list[dict]], arms: list[str], x: str, y: str) -> None:
    for color, (arm, runs) in enumerate(zip(arms, records, strict=True)):
        if any(y not in record["curves"] for record in runs):
            continue
        curves = np.stack([smooth(record["curves"][y]) for record in runs])  # (seeds, steps)
        if x == SAMPLED:
            across = np.mean([record["curves"]["episodes"] for record in runs], axis=0)
        elif x == STEPS:
            across = np.arange(1, curves.shape[1] + 1)
        else:  # one metric against another: a path
            across = np.mean([smooth(record["curves"][x]) for record in runs], axis=0)
            ax.plot(across, curves.mean(0), color=f"C{color}", label=arm, marker=".")
            continue
        draw_band(ax, across, curves, f"C{color}", arm)
    ax.set_xlabel(x)
    ax.set_ylabel(LABELS.get(y, y))


def draw_groups(ax, records: list[list[dict]], arms: list[str]) -> None:
    """Mean size of an advantage against how many of its group's responses are right."""
    width = 0.8 / len(arms)
    for color, (arm, runs) in enumerate(zip(arms, records, strict=True)):
        for right in range(9):
            found = [
                record["groups"][str(right)] for record in runs if str(right) in record["groups"]
            ]
            if found:
                heights = [size for _, size in found]
                place = right + (color - (len(arms) - 1) / 2) * width
                error = [[np.mean(heights) - min(heights)], [max(heights) - np.mean(heights)]]
                style = dict(
                    yerr=error, ecolor=GRAY, color=f"C{color}", label=arm if right == 4 else None
                )
                ax.bar(place, np.mean(heights), width, **style)
    ax.set_xlabel("right responses in a group of 8")
    ax.set_ylabel("mean size of its advantages")


def records_of(number: int) -> list[list[dict]]:
    """Of a lesson: for each arm, one record for each seed."""
    have = read_records()
    return [[have[command, seed] for seed in SEEDS] for command in LESSONS[number][1].values()]


def drawn_from(number: int) -> str:
    return digest(
        [[record["curves"], record["groups"]] for runs in records_of(number) for record in runs]
    )


def draw(number: int) -> None:
    title, arms, plots = LESSONS[number]
    records = records_of(number)
    log = {"policy/approx_kl", "policy/entropy", "kl/ref", "rollout/logprob_gap", "kl/response"}
    rows, columns = -(-len(plots) // 3), min(3, len(plots))
    figure, axes = panels(rows, columns, figsize=(4 * columns, 3.2 * rows))
    for ax, plot in zip(axes.flat, plots, strict=True):
        if plot == "groups":
            draw_groups(ax, records, list(arms))
        else:
            draw_curve(ax, records, list(arms), *plot)
            ax.set_xscale("log" if plot[0] in log else "linear")
            ax.set_yscale("log" if plot[1] in log else "linear")
            if plot[1] == "value/explained_var":  # without a lower bound, where all is lost
                ax.set_ylim(bottom=max(-0.5, ax.get_ylim()[0]))
    handles, labels = axes.flat[-1 if number == 5 else 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8
    )
    figure.suptitle(f"{number}. {title}")
    save(figure, PICTURES / f"{number:02}.svg", drawn_from(number))


def block(number: int) -> str:
    """What the page of a lesson holds: commands, picture, a table of what its arms came to."""
    title, arms, _ = LESSONS[number]
    rows, total = [], 0.0
    for arm, runs in zip(arms, records_of(number), strict=True):
        held_out = [100 * list(record["eval"].values())[-1] for record in runs]
        sampled = [100 * float(np.mean(record["curves"][ACCURACY][-WINDOW:])) for record in runs]
        seconds = [record["seconds"] for record in runs]
        total += sum(seconds)
        rows.append([arm, spread(held_out, 1), spread(sampled, 1), f"{np.mean(seconds):.0f} s"])
    commands = "\n".join(f"python {command}" for command in arms.values())
    results = table(["", "held out, %", "sampled, last five steps, %", "a run"], rows)
    picture = f"![{title}](lessons/{number:02}.svg)"
    cost = f"{len(rows) * len(SEEDS)} runs, {total / 60:.0f} minutes of one core."
    return f"```\n{commands}\n```\n\n{picture}\n\n{results}\n{cost}\n"


def page_of(number: int) -> Path:
    return ROOT / "docs" / ("metrics.md" if number == 15 else "lessons.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "lessons", nargs="*", type=int, help="numbers; all of them if there is none"
    )
    parser.add_argument("--draw", action="store_true", help="run nothing")
    args = parser.parse_args()
    numbers = args.lessons or list(LESSONS)
    if not args.draw:
        run_missing(numbers)
    for number in numbers:
        draw(number)
        print(f"{number}. {LESSONS[number][0]}\n\n{block(number)}")
        fill(page_of(number), f"lesson {number}", block(number))


if __name__ == "__main__":
    main()
