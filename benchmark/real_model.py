"""docs/real-model.md: runs of a real chat model, their records, tables and picture.

    python benchmark/real_model.py FOLDER --task arithmetic --seeds 1 2 3    three runs, one after another
    python benchmark/real_model.py FOLDER --task svamp --data ../svamp       one run of SVAMP, or of gsm8k
    python benchmark/real_model.py --draw                                    write the tables and the picture

FOLDER holds SmolLM2-135M-Instruct. benchmark/records/real-model.jsonl gets one line for each run. On two cores a run
takes some twenty minutes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from pictures import digest, draw_band, panels, save, smooth
from records import FOLDER, ROOT, fill, provenance, read, read_run, table, time_command, write

RECORDS = FOLDER / "real-model.jsonl"
PAGE = ROOT / "docs" / "real-model.md"
PICTURE = ROOT / "docs" / "real-model" / "curves.svg"
COMMON = "--device cpu --no-gradient-checkpointing --save-every 0 --num-generations 8"
# For each task: the flags, and what replaces the line of REWARDS in a copy of grpo.py.
TASKS = {
    "arithmetic": (
        "--dataset assets/arithmetic --no-examples --num-prompts 8 --max-new-tokens 32 --num-steps 60 "
        "--warmup-updates 3 --eval-every 10 --eval-size 200",
        "REWARDS = [lenient_accuracy_reward]",
    ),
    "svamp": (
        "--num-prompts 4 --max-new-tokens 64 --num-steps 20 --warmup-updates 3 --beta 0 --eval-every 0 "
        "--eval-size 60",
        None,
    ),
    "gsm8k": (
        "--num-prompts 4 --max-new-tokens 150 --num-steps 6 --warmup-updates 3 --beta 0 --eval-every 0 "
        "--eval-size 30",
        None,
    ),
}
KEPT = ["accuracy", "response_len", "eos_frac", "format_reward", "logprob_gap", "logprob_gap_max"]
KEPT = [f"rollout/{name}" for name in KEPT] + ["policy/entropy", "kl/ref"]
KEPT += ["time/rollout_s", "time/update_s"]


def record_of(task: str, seed: int, run: Path, seconds: float, peak: float, source: dict) -> dict:
    """The record of a finished run: curves, evaluations, and the first samples of its first and its last step."""
    metrics, args = read_run(run)
    steps = metrics[1:]
    samples = read(run / "samples.jsonl")
    record = {"task": task, "seed": seed, "seconds": round(seconds), "peak_mem_gb": round(peak, 2)}
    record |= source
    record["args"] = {k: x for k, x in args.items() if not k.startswith("run")}
    for name in ("model", "dataset"):
        record["args"][name] = Path(args[name]).name
    record["eval"] = {
        line["step"]: {k: round(x, 4) for k, x in line.items() if k.startswith("eval/")}
        for line in metrics
        if "eval/accuracy" in line
    }
    record["curves"] = {
        name: [float(f"{line[name]:.4g}") for line in steps] for name in KEPT if name in steps[0]
    }
    record["samples"] = {}
    for step in (1, len(steps)):
        shown = [sample for sample in samples if sample["step"] == step][:3]
        record["samples"][step] = [
            [sample["prompt"], sample["answer"], sample["completions"][:2]] for sample in shown
        ]
    return record


def run(task: str, seed: int, model: str, data: str | None) -> dict:
    """Make one run in a temporary folder, and return its record."""
    flags, rewards = TASKS[task]
    source = provenance()
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        script = Path(folder, "grpo.py")
        text = (ROOT / "grpo.py").read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        if rewards:
            lines = [f"{rewards}\n" if x.startswith("REWARDS =") else x for x in lines]
        script.write_text("".join(lines), encoding="utf-8")
        Path(folder, "utils").symlink_to(ROOT / "utils")
        Path(folder, "assets").symlink_to(ROOT / "assets")
        command = [sys.executable, str(script), "--model", model, *COMMON.split(), *flags.split()]
        command += ["--seed", str(seed), "--runs-dir", folder, "--run-name", "run"]
        if data:
            command += ["--dataset", data]
        _, seconds, peak = time_command(command, cwd=ROOT)
        return record_of(task, seed, Path(folder, "run"), seconds, peak, source)


def after_words(record: dict, name: str) -> list[float]:
    """An evaluation's value before and after training."""
    values = list(record["eval"].values())
    return [values[0][name], values[-1][name]]


def results_table(records: list[dict]) -> str:
    rows = []
    for record in sorted(records, key=lambda x: (list(TASKS).index(x["task"]), x["seed"])):
        curves = record["curves"]
        step_seconds = np.add(curves["time/rollout_s"], curves["time/update_s"])
        row = [record["task"], str(record["seed"]), str(len(step_seconds))]
        for name, digits in (
            ("eval/accuracy", 3),
            ("eval/accuracy_lenient", 3),
            ("eval/format_reward", 2),
            ("eval/eos_frac", 2),
            ("eval/response_len", 0),
        ):
            if name == "eval/accuracy_lenient" and name not in record["eval"]["0"]:
                name = "eval/accuracy"  # the reward of this run is the lenient one
                row[-1] = "-"
            if name not in record["eval"]["0"]:
                row.append("-")
                continue
            before, after = after_words(record, name)
            row.append(f"{before:.{digits}f} → {after:.{digits}f}")
        row.append(f"{step_seconds[0]:.0f} → {np.mean(step_seconds[-5:]):.0f}")
        row.append(f"{record['seconds'] / 60:.0f}")
        row.append(f"{record['peak_mem_gb']:.1f}")
        rows.append(row)
    header = ["task", "seed", "steps", "right", "right, lenient", "format", "ended", "tokens"]
    return table([*header, "seconds a step", "minutes", "GB"], rows)


def samples_block(record: dict) -> str:
    """The first samples of the first and of the last step, as a code block."""
    lines = ["```\n"]
    for step, shown in record["samples"].items():
        lines.append(f"step {step}\n")
        for prompt, answer, completions in shown:
            question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            lines.append(f"  {question}  ({answer})\n")
            lines += [f"      {completion!r}\n" for completion in completions]
    return "".join([*lines, "```\n"])


def draw(records: list[dict]) -> None:
    """Three panels over the steps of arithmetic: right answers, length, and entropy."""
    runs = [record for record in records if record["task"] == "arithmetic"]
    figure, axes = panels(1, 3, figsize=(13, 3.6))
    panel = {
        "rollout/accuracy": "share of right answers",
        "rollout/response_len": "tokens",
        "policy/entropy": "nats",
    }
    for ax, (name, label) in zip(axes[0], panel.items(), strict=True):
        curves = np.array([smooth(record["curves"][name]) for record in runs])
        steps = np.arange(1, curves.shape[1] + 1)
        draw_band(ax, steps, curves, "tab:blue", "samples (running mean of 5 steps)")
        title = "right answers" if name == "rollout/accuracy" else name
        ax.set(xlabel="step", ylabel=label, title=title)
    across = [int(step) for step in runs[0]["eval"]]
    greedy = np.array([[x["eval/accuracy"] for x in record["eval"].values()] for record in runs])
    draw_band(axes[0][0], across, greedy, "tab:orange", "held out, greedy")
    axes[0][0].legend(fontsize=10)
    save(figure, PICTURE, digest(runs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="the model's folder")
    parser.add_argument("--task", choices=list(TASKS))
    parser.add_argument("--data", help="the data set's folder, except for arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--draw", action="store_true", help="only write the page's tables and picture"
    )
    args = parser.parse_args()
    if not args.draw:
        for seed in args.seeds:
            record = run(args.task, seed, args.model, args.data)
            others = [x for x in read(RECORDS) if (x["task"], x["seed"]) != (args.task, seed)]
            write(RECORDS, [*others, record])
    records = read(RECORDS)
    draw(records)
    fill(PAGE, "results", results_table(records))
    first = next(x for x in records if x["task"] == "arithmetic" and x["seed"] == 1)
    fill(PAGE, "samples", samples_block(first))


if __name__ == "__main__":
    main()
