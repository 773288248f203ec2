"""What each idea does on the bundled tasks: the runs and the pictures of docs/lessons.md.

    pip install -r benchmark/requirements.txt
    python benchmark/lessons.py 4      make the missing runs of lesson 4, and draw its picture
    python benchmark/lessons.py        all lessons
    python benchmark/lessons.py --draw draw from the records, without runs

Every run is one command: an unchanged script with flags. The record contains the command, and docs/lessons.md prints
it. Two runs go at a time, each on one thread. benchmark/records/lessons.jsonl gets one line for each run: command,
commit (and "dirty", if the tree had changes), versions, args, wall time, the evaluations, and a curve over the steps
for every metric. A command that has a record isn't run again, and lessons can share a run. If a run fails, all runs
end, and its output is printed.

The pictures are docs/lessons/<number>.svg. A line is the mean of the seeds, smoothed over five steps, and the band goes
from the lowest seed to the highest. The script writes the commands and tables into docs/lessons.md. Every measured
number in the text of that page must be in the table of its lesson; tests/test_docs.py checks this.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import memory
import numpy as np
from pictures import GRAY, digest, draw_band, panels, save, smooth
from records import FOLDER, ROOT, fill, provenance, read, read_run, spread, table
from tqdm import tqdm

RECORDS = FOLDER / "lessons.jsonl"
PICTURES = ROOT / "docs" / "lessons"
SEEDS = (1, 2, 3)
PPO = "ppo_rlhf.py --num-steps 20"
# The first five steps train only the value network.
VAPO = "vapo.py --num-steps 25"
FREE = "--model runs/hesitant --dataset runs/hesitant --system-prompt= --temperature 1 --max-new-tokens 128"
FREE += " --learning-rate 5e-5 --num-steps 50"
SUMS = "--model assets/sums --dataset assets/sums --system-prompt= --num-steps 40"
SUMS += " --learning-rate 5e-5 --gradient-checkpointing False --eval-every 0 --eval-size 200"
OFTEN = "--num-steps 30 --num-minibatches 8"  # eight updates per rollout
CLIPS = "dapo.py --num-steps 30 --max-resample 0 --num-iterations 2 --num-minibatches 4 --learning-rate 3e-4"
STALE = "grpo_offpolicy.py --num-steps 40 --learning-rate 3e-4"
# Two engines share the memory of one machine.
ENGINE = "grpo_vllm.py --num-steps 40 --learning-rate 3e-4 --engine-memory 0.1"
# Each step has 16 responses.
FEW = "--num-steps 100 --learning-rate 3e-4 --eval-every 50"
BASELINE = "reinforce_baseline.py --num-steps 40"

# The axes of a panel in words. The name of the metric stands below the words.
SAMPLED, STEPS, RATE, ACCURACY = "episodes", "step", "learning rate", "rollout/accuracy"
WORDS = {
    SAMPLED: "responses sampled",
    STEPS: "step",
    ACCURACY: "share of right samples",
    "rollout/score": "mean score of the judge",
    "rollout/eos_frac": "share of responses that end",
    "rollout/zero_std_frac": "share of groups with equal rewards",
    "rollout/logprob_gap": "gap between sampler and trainer, nats",
    "rollout/truncated_frac": "share of tokens with a cut weight",
    "policy/clip_frac": "share clipped",
    "policy/approx_kl": "KL to the old policy, nats a token",
    "policy/entropy": "entropy, nats a token",
    "kl/ref": "KL to the start, nats a token",
    "kl/response": "KL to the start, nats a response",
    "optim/grad_norm": "norm of the gradient",
    "value/explained_var": "explained variance",
    "length/right": "characters in a right response",
    "length/wrong": "characters in a wrong response",
    "tool/calls": "calls per response",
}
LOGARITHMIC = {"policy/approx_kl", "policy/entropy", "kl/ref", "kl/response", "rollout/logprob_gap"}


def over(metric: str, first: int, last: int, percent: bool = False) -> Callable[[dict], float]:
    """A record's mean of a metric over the steps from first to last. Negative steps count from the end."""

    def value(record):
        # A run without a critic has none of the critic's metrics.
        values = record["curves"].get(metric, [None])
        first_, last_ = (k if k > 0 else len(values) + 1 + k for k in (first, last))
        chosen = [x for x in values[first_ - 1 : last_] if x is not None]
        return float(np.mean(chosen)) * (100 if percent else 1) if chosen else np.nan

    return value


def highest(metric: str) -> Callable[[dict], float]:
    """A record's largest value of a metric in a single step."""
    return lambda record: max(x for x in record["curves"][metric] if x is not None)


def between(first: int, last: int) -> Callable[[dict], float]:
    """A record's sampled accuracy in percent, over the responses after the `first` and up to the `last`."""

    def value(record):
        pairs = zip(record["curves"][SAMPLED], record["curves"][ACCURACY], strict=True)
        return 100 * float(np.mean([x for sampled, x in pairs if first < sampled <= last]))

    return value


def memory_needed(record: dict) -> float:
    """GB for the record's script and rank with SmolLM2-1.7B on a GPU, as memory.py counts them."""
    rank = {name: value for name, value in record["args"].items() if name == "lora_rank"}
    script = "grpo_lora" if rank else "grpo"
    return memory.count(script, memory.MODELS["SmolLM2-1.7B"], **rank)["peak"] / 1e9


def lowest_accuracy(record: dict) -> float:
    return 100 * min(record["curves"][ACCURACY])


def held_out(record: dict) -> float:
    return 100 * list(record["eval"].values())[-1]


@dataclass
class Lesson:
    title: str
    arms: dict[str, str]  # name: command without its seed
    panels: list  # (x, y) of curves; ("advantages", None) are bars
    # More columns of the table than the usual ones: (function, digits).
    columns: dict = field(default_factory=dict)
    # Draw a row of panels for each arm, with a line for each seed and a point for each step.
    by_seed: bool = False
    # The arms that the picture shows. Empty: all arms.
    drawn: tuple[str, ...] = ()


USUAL = {
    "held out, %": (held_out, 1),
    "sampled, last five steps, %": (over(ACCURACY, -5, -1, percent=True), 1),
}
HALFWAY = {"steps 13 to 17, %": (over(ACCURACY, 13, 17, percent=True), 0)}
GROUPS = {"equal groups, last five, %": (over("rollout/zero_std_frac", -5, -1, percent=True), 0)}
CLIPPED = {"clipped, first five, %": (over("policy/clip_frac", 1, 5, percent=True), 1)}
MOVED = {"approx_kl, highest": (highest("policy/approx_kl"), 3)}
LESSONS = {
    1: Lesson(
        "Baselines",
        {
            "no baseline": f"{BASELINE} --baseline none",
            "moving average": f"{BASELINE} --baseline moving_average",
            "batch mean": BASELINE,
            "RLOO": "rloo.py --num-steps 40",
            "ReMax": "remax.py --num-steps 40",
        },
        [(SAMPLED, ACCURACY), (STEPS, "optim/grad_norm")],
        {
            "gradient's norm, first five": (over("optim/grad_norm", 1, 5), 1),
            "last five": (over("optim/grad_norm", -5, -1), 1),
        },
    ),
    2: Lesson(
        "Reusing a rollout",
        {f"mu = {mu}": f"grpo.py --num-steps 30 --num-iterations {mu}" for mu in (1, 2, 4, 8)},
        [(SAMPLED, ACCURACY), (STEPS, "policy/clip_frac"), (STEPS, "policy/approx_kl")],
        HALFWAY | CLIPPED | MOVED,
    ),
    3: Lesson(
        "Why clip",
        {
            "eps = 0.2, 1e-4": f"grpo.py {OFTEN} --beta 0",
            "eps = 1, 1e-4": f"grpo.py {OFTEN} --beta 0 --clip-eps 1",
            "eps = 0.2, 3e-4": f"grpo.py {OFTEN} --beta 0 --learning-rate 3e-4",
            "eps = 1, 3e-4": f"grpo.py {OFTEN} --beta 0 --clip-eps 1 --learning-rate 3e-4",
        },
        [(SAMPLED, ACCURACY), (STEPS, "policy/approx_kl")],
        MOVED | {"lowest, %": (lowest_accuracy, 0)},
    ),
    4: Lesson(
        "The KL leash",
        {
            f"beta = {beta}": f"grpo.py --num-steps 40 --beta {beta}"
            for beta in (0.001, 0.01, 0.1, 1)
        },
        [(SAMPLED, ACCURACY), ("kl/ref", ACCURACY)],
        {"KL to the start, last five, nats a token": (over("kl/ref", -5, -1), 3)},
    ),
    5: Lesson(
        "Dividing by the std",
        {"GRPO": f"grpo.py {SUMS} --beta 0", "Dr. GRPO": f"dr_grpo.py {SUMS}"},
        [("advantages", None), (SAMPLED, ACCURACY)],
        {"steps 21 to 30, %": (over(ACCURACY, 21, 30, percent=True), 1)} | GROUPS,
    ),
    6: Lesson(
        "Length",
        {
            "1/length (GRPO)": f"grpo.py {FREE} --beta 0",
            "constant (Dr. GRPO)": f"dr_grpo.py {FREE}",
            "token mean (DAPO)": f"dapo.py {FREE} --max-resample 0 --overlong-cache 1",
        },
        [(STEPS, "length/wrong"), (STEPS, "length/right")],
        {
            f"{kind}, {when}, characters": (over(f"length/{kind}", *steps), 0)
            for kind in ("wrong", "right")
            for when, steps in {"first five": (1, 5), "last five": (-5, -1)}.items()
        }
        | {"ended, last five, %": (over("rollout/eos_frac", -5, -1, percent=True), 0)},
    ),
    7: Lesson(
        "Dynamic sampling",
        {
            "as sampled": "dapo.py --num-steps 30 --max-resample 0",
            "equal groups replaced": "dapo.py --num-steps 30",
        },
        [(STEPS, "rollout/zero_std_frac"), (STEPS, ACCURACY), (SAMPLED, ACCURACY)],
        {
            "responses": (lambda record: record["curves"][SAMPLED][-1], 0),
            "at 3,840 responses, %": (lambda record: accuracy_at(record, 3840), 1),
        }
        | GROUPS,
    ),
    8: Lesson(
        "Clip-Higher",
        {f"eps_high = {high}": f"{CLIPS} --clip-eps-high {high}" for high in (0.2, 0.28, 0.4)},
        [(SAMPLED, ACCURACY), (STEPS, "policy/entropy")],
        {
            "entropy, first five": (over("policy/entropy", 1, 5), 3),
            "last five": (over("policy/entropy", -5, -1), 3),
            "above the bound, %": (over("policy/clip_frac_high", 1, -1, percent=True), 2),
        },
    ),
    9: Lesson(
        "One ratio per sequence or per token",
        {
            f"{name}, {rate}": f"{command} --learning-rate {rate}".replace(
                " --learning-rate 1e-4", ""
            )
            for rate in ("3e-5", "1e-4", "3e-4")
            for name, command in {
                "GRPO": f"grpo.py {OFTEN} --beta 0",
                "GSPO": f"gspo.py {OFTEN}",
            }.items()
        },
        [(STEPS, "policy/clip_frac"), (RATE, ACCURACY)],
        HALFWAY | CLIPPED,
        drawn=("GRPO, 1e-4", "GSPO, 1e-4"),
    ),
    10: Lesson(
        "The critic",
        {
            "lambda 0": f"{PPO} --gae-lambda 0",
            "lambda 0.95": PPO,
            "lambda 1": f"{PPO} --gae-lambda 1",
            "0.95, critic from the policy": f"{PPO} --value-init policy",
        },
        [(SAMPLED, ACCURACY), (STEPS, "value/explained_var")],
        {
            "lowest, %": (lowest_accuracy, 0),
            "explained, last five, %": (over("value/explained_var", -5, -1, percent=True), 0),
        },
    ),
    11: Lesson(
        "Goodhart's law",
        {
            f"beta = {beta}": f"{PPO} --learning-rate 5e-4 --beta {beta}"
            for beta in (0, 0.05, 0.2, 1)
        },
        [(STEPS, "rollout/score"), (STEPS, ACCURACY)],
        {
            "lowest, %": (lowest_accuracy, 0),
            "score, steps 1 and 2": (over("rollout/score", 1, 2), 2),
            "score, last five": (over("rollout/score", -5, -1), 2),
        },
        by_seed=True,
        drawn=("beta = 0", "beta = 0.2"),
    ),
    12: Lesson(
        "Group size",
        {
            f"G = {G}": f"grpo.py --num-steps 40 --num-generations {G} --num-prompts {128 // G}"
            for G in (2, 4, 8, 16, 32)
        },
        [(SAMPLED, ACCURACY), (STEPS, "rollout/zero_std_frac")],
        GROUPS,
    ),
    13: Lesson(
        "Stale samplers",
        {
            "K = 1": STALE,
            "K = 4": f"{STALE} --staleness 4",
            "K = 4, not corrected": f"{STALE} --staleness 4 --rollout-correction 0",
            "K = 16": f"{STALE} --staleness 16",
            "K = 16, not corrected": f"{STALE} --staleness 16 --rollout-correction 0",
        },
        [(STEPS, ACCURACY), (STEPS, "rollout/logprob_gap")],
        {
            "sampled, first five, %": (over(ACCURACY, 1, 5, percent=True), 0),
            "steps 11 to 15, %": (over(ACCURACY, 11, 15, percent=True), 0),
            "steps 16 to 20, %": (over(ACCURACY, 16, 20, percent=True), 0),
            "held out, step 20, %": (lambda record: 100 * record["eval"]["20"], 1),
        },
    ),
    14: Lesson(
        "Credit for steps",
        {
            "outcome (grpo)": f"grpo.py {SUMS} --beta 0",
            "process": f"grpo_process.py {SUMS} --beta 0",
        },
        [(SAMPLED, ACCURACY), (STEPS, "optim/grad_norm")],
        {
            f"steps {first} to {last}, %": (over(ACCURACY, first, last, percent=True), 1)
            for first, last in ((11, 20), (21, 30))
        },
    ),
    15: Lesson(
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
        [],  # draw_broken
        {
            "kl/ref, step 3": (over("kl/ref", 3, 3), 3),
            "entropy, first five": (over("policy/entropy", 1, 5), 3),
            "last five": (over("policy/entropy", -5, -1), 3),
            "ended, %": (over("rollout/eos_frac", 1, -1, percent=True), 0),
            "equal groups, %": (over("rollout/zero_std_frac", 1, -1, percent=True), 0),
            "explained, last five, %": (over("value/explained_var", -5, -1, percent=True), 0),
        },
    ),
    16: Lesson(
        "Low-rank adapters",
        {
            f"rank {rank}, {rate}": f"grpo_lora.py --lora-rank {rank} --num-steps 40 --learning-rate {rate}"
            for rank in (1, 4, 16, 64)
            for rate in ("3e-4", "1e-3", "3e-3")
        }
        | {
            "full, 3e-5": "grpo.py --num-steps 40 --learning-rate 3e-5",
            "full, 1e-4": "grpo.py --num-steps 40",
            "full, 3e-4": "grpo.py --num-steps 40 --learning-rate 3e-4",
            "full, 1e-3": "grpo.py --num-steps 40 --learning-rate 1e-3",
        },
        [(RATE, ACCURACY), (RATE, "policy/entropy")],
        {"SmolLM2-1.7B, GB, computed": (memory_needed, 1)},
    ),
    17: Lesson(
        "VAPO's five changes",
        {
            "VAPO": VAPO,
            "no value pretraining": "vapo.py --num-steps 20 --value-warmup-steps 0",
            "lambda 1": f"{VAPO} --gae-alpha 1e9",
            "eps_high = 0.2": f"{VAPO} --clip-eps-high 0.2",
            "no loss on right responses": f"{VAPO} --lm-coef 0",
            "PPO, reward by rules": f"{PPO} --reward-model=",
            "GRPO": "grpo.py --num-steps 20",
        },
        [(SAMPLED, ACCURACY), (STEPS, "value/explained_var")],
        {
            "steps 6 to 10 of the policy, %": (lambda record: after_pretraining(record, 6, 10), 0),
            "entropy, last five": (over("policy/entropy", -5, -1), 3),
        },
        drawn=("VAPO", "no value pretraining", "lambda 1", "no loss on right responses", "GRPO"),
    ),
    18: Lesson(
        "A teacher instead of a reward",
        {
            "distilled, 16": f"distill.py {FEW} --num-prompts 16 --num-generations 1",
            "whole vocabulary, 16": f"distill.py {FEW} --num-prompts 16 --num-generations 1 --full-vocabulary",
            "GRPO, 16": f"grpo.py {FEW} --num-prompts 2",
            "distilled, 128": "distill.py --num-steps 40 --learning-rate 3e-4",
            "GRPO, 128": "grpo.py --num-steps 40 --learning-rate 3e-4",
        },
        [(SAMPLED, ACCURACY)],
        {
            f"responses {first + 1} to {last}, %": (between(first, last), 0)
            for first, last in ((0, 640), (640, 1280), (1280, 1600))
        },
    ),
    19: Lesson(
        "A tool, and what it costs",
        {
            "a call is free": "grpo_tools.py",
            "a call costs 0.1": "grpo_tools.py --tool-cost 0.1",
        },
        [(STEPS, ACCURACY), (STEPS, "tool/calls")],
        {
            "calls, first five": (over("tool/calls", 1, 5), 2),
            "highest in a step": (highest("tool/calls"), 2),
            "last five": (over("tool/calls", -5, -1), 2),
        },
    ),
    20: Lesson(
        "Side by side",
        {
            "GRPO": f"grpo.py {SUMS} --beta 0",
            "Dr. GRPO": f"dr_grpo.py {SUMS}",
            "process rewards": f"grpo_process.py {SUMS} --beta 0",
            "LoRA, rank 16": f"grpo_lora.py {SUMS} --beta 0".replace("5e-5", "5e-4"),
            "LoRA, rank 1": f"grpo_lora.py {SUMS} --beta 0 --lora-rank 1".replace("5e-5", "5e-4"),
            "GRPO, 1.5e-4": f"grpo.py {SUMS} --beta 0".replace("5e-5", "1.5e-4"),
        },
        [(SAMPLED, ACCURACY)],
        {"steps 21 to 30, %": (over(ACCURACY, 21, 30, percent=True), 1)},
        drawn=("GRPO", "Dr. GRPO", "process rewards", "LoRA, rank 16", "GRPO, 1.5e-4"),
    ),
    21: Lesson(
        "An engine in bf16",
        {
            "float32": ENGINE,
            "bf16": f"{ENGINE} --engine-dtype bfloat16",
            "bf16, not corrected": f"{ENGINE} --engine-dtype bfloat16 --rollout-correction 0",
        },
        [(STEPS, ACCURACY), (STEPS, "rollout/logprob_gap")],
        {"logprob_gap, highest": (highest("rollout/logprob_gap"), 4)},
    ),
    22: Lesson(
        "Low-rank adapters, fifty tokens",
        {
            f"rank {rank}, {rate}": f"grpo_lora.py {SUMS} --beta 0".replace("5e-5", rate)
            + (f" --lora-rank {rank}" if rank != 16 else "")
            for rank in (1, 4, 16, 64)
            for rate in ("1.5e-4", "5e-4", "1.5e-3")
        }
        | {
            f"full, {rate}": f"grpo.py {SUMS} --beta 0".replace("5e-5", rate)
            for rate in ("5e-5", "1.5e-4", "5e-4")
        },
        [(RATE, ACCURACY), (RATE, "policy/entropy")],
        {"steps 21 to 30, %": (over(ACCURACY, 21, 30, percent=True), 1)},
    ),
    23: Lesson(
        "The critic, fifty tokens",
        {
            "lambda 0": f"ppo_rlhf.py {SUMS} --beta 0 --value-learning-rate 1e-4 --gae-lambda 0",
            "lambda 0.95": f"ppo_rlhf.py {SUMS} --beta 0 --value-learning-rate 1e-4",
            "lambda 1": f"ppo_rlhf.py {SUMS} --beta 0 --value-learning-rate 1e-4 --gae-lambda 1",
            "GRPO": f"grpo.py {SUMS} --beta 0",
        },
        [(SAMPLED, ACCURACY), (STEPS, "value/explained_var")],
        {
            "steps 11 to 20, %": (over(ACCURACY, 11, 20, percent=True), 1),
            "explained, last five, %": (over("value/explained_var", -5, -1, percent=True), 0),
        },
    ),
}


def accuracy_at(record: dict, responses: int) -> float:
    """A record's sampled accuracy in percent after this number of responses, over five steps."""
    episodes = record["curves"][SAMPLED]
    step = next((k for k, x in enumerate(episodes, 1) if x >= responses), len(episodes))
    return over(ACCURACY, max(1, step - 4), step, percent=True)(record)


def after_pretraining(record: dict, first: int, last: int) -> float:
    """over(), with steps counted from the first update of the policy."""
    waited = record["args"].get("value_warmup_steps", 0)
    return over(ACCURACY, waited + first, waited + last, percent=True)(record)


def lengths_and_groups(folder: Path) -> tuple[dict, dict]:
    """Two results from the samples: the mean characters of right and of wrong responses per step, and
    {number of right responses in a group: [number of such groups, mean |A|]}.
    """
    lengths, groups = defaultdict(lambda: defaultdict(list)), defaultdict(lambda: [0, 0.0])
    for line in (folder / "samples.jsonl").open(encoding="utf-8"):
        sample = json.loads(line)
        for text, is_right in zip(sample["completions"], sample["right"], strict=True):
            lengths["right" if is_right else "wrong"][sample["step"]].append(len(text))
        number = groups[sum(sample["right"])]
        number[0] += 1
        # A response has one advantage, or one for each token.
        advantages = [np.atleast_1d(values) for values in sample["advantages"]]
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
    """Run a script in a temporary folder, and return its record."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # The machine's state before the run: the run itself is not a part of its load.
    source = provenance()
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
        **source,
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
    """Make the missing runs of the lessons, two at a time, and append each record at the end of its run."""
    have = read_records()
    commands = dict.fromkeys(
        command for number in numbers for command in LESSONS[number].arms.values()
    )
    missing = [
        (command, seed) for seed in SEEDS for command in commands if (command, seed) not in have
    ]
    # The student of lesson 6.
    student = ROOT / "runs" / "hesitant" / "model.safetensors"
    if any("runs/hesitant" in command for command, _ in missing) and not student.exists():
        subprocess.run(
            [sys.executable, "tools/build_hesitant.py", "runs/hesitant"], cwd=ROOT, check=True
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


def across_and_curves(records: list[dict], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """For the seeds of one arm: where the points are on the x axis, and the values there, (seeds, points)."""
    curves = np.stack([smooth(record["curves"][y]) for record in records])
    if x == STEPS:
        return np.arange(1, curves.shape[1] + 1), curves
    if x == SAMPLED:
        return np.mean([record["curves"][SAMPLED] for record in records], axis=0), curves
    # x is a metric, too, so the line is a path.
    return np.mean([smooth(record["curves"][x]) for record in records], axis=0), curves


def draw_curve(ax, records: dict[str, list[dict]], x: str, y: str) -> None:
    for color, (arm, runs) in enumerate(records.items()):
        if any(y not in record["curves"] for record in runs):
            # An arm without a critic has no explained variance.
            continue
        across, curves = across_and_curves(runs, x, y)
        if x in (STEPS, SAMPLED):
            draw_band(ax, across, curves, f"C{color}", arm)
        else:
            ax.plot(across, curves.mean(0), color=f"C{color}", label=arm, marker=".")


def draw_rates(ax, records: dict[str, list[dict]], y: str) -> None:
    """The last five steps against the learning rate. Arms that differ only in the rate share a line."""
    lines = defaultdict(list)
    for arm, runs in records.items():
        ends = [over(y, -5, -1)(record) for record in runs]
        lines[arm.split(",")[0]].append((runs[0]["args"]["learning_rate"], ends))
    for color, (name, points) in enumerate(lines.items()):
        rates = [rate for rate, _ in points]
        ends = np.array([values for _, values in points]).T  # (seeds, rates)
        draw_band(ax, rates, ends, f"C{color}", name)
        ax.plot(rates, ends.mean(0), color=f"C{color}", marker="o", linewidth=0)
    rates = sorted({rate for points in lines.values() for rate, _ in points})
    ax.set_xscale("log")
    names = [f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-") for rate in rates]
    ax.set_xticks(rates, names)
    ax.minorticks_off()


def draw_advantages(ax, records: dict[str, list[dict]]) -> None:
    """Mean size of an advantage against the number of right responses in its group."""
    width = 0.8 / len(records)
    for color, (arm, runs) in enumerate(records.items()):
        for right in range(9):
            found = [
                record["groups"][str(right)] for record in runs if str(right) in record["groups"]
            ]
            if found:
                heights = [size for _, size in found]
                place = right + (color - (len(records) - 1) / 2) * width
                error = [[np.mean(heights) - min(heights)], [max(heights) - np.mean(heights)]]
                style = dict(
                    yerr=error, ecolor=GRAY, color=f"C{color}", label=arm if right == 4 else None
                )
                ax.bar(place, np.mean(heights), width, **style)
    ax.set_xlabel("right responses in a group of 8")
    ax.set_ylabel("mean size of its advantages")


def name_axes(ax, x: str, y: str) -> None:
    """Label each axis with words, and below them with the name of the metric."""
    for axis, name in ((ax.xaxis, x), (ax.yaxis, y)):
        axis.set_label_text(WORDS.get(name, name) + (f"\n{name}" if "/" in name else ""))
        axis.label.set_linespacing(1.3)
    if x != RATE:
        ax.set_xscale("log" if x in LOGARITHMIC else "linear")
    ax.set_yscale("log" if y in LOGARITHMIC else "linear")
    # The explained variance has no lower bound, so a bad critic would flatten all other curves.
    if y == "value/explained_var":
        ax.set_ylim(bottom=max(-0.5, ax.get_ylim()[0]))


def records_of(number: int) -> dict[str, list[dict]]:
    """The records of a lesson: for each arm, one record for each seed."""
    have, lesson = read_records(), LESSONS[number]
    return {arm: [have[c, seed] for seed in SEEDS] for arm, c in lesson.arms.items()}


def drawn_from(number: int) -> str:
    runs = [record for records in records_of(number).values() for record in records]
    return digest([[record["curves"], record["groups"]] for record in runs])


def draw_panels(number: int):
    """Draw a panel for each pair of axes, with a line for each arm."""
    lesson, records = LESSONS[number], records_of(number)
    chosen = {arm: runs for arm, runs in records.items() if arm in (lesson.drawn or lesson.arms)}
    # The rate is an axis here, so the names leave it out.
    if (RATE, ACCURACY) in lesson.panels:
        chosen = {arm.split(",")[0]: runs for arm, runs in chosen.items()}
    figure, axes = panels(1, len(lesson.panels), figsize=(12, 4.4))
    for ax, (x, y) in zip(axes.flat, lesson.panels, strict=True):
        if x == "advantages":
            draw_advantages(ax, chosen)
            continue
        if x == RATE:
            draw_rates(ax, records, y)
        else:
            draw_curve(ax, chosen, x, y)
        name_axes(ax, x, y)
    labels = {}
    for ax in axes.flat:
        handles, names = ax.get_legend_handles_labels()
        labels |= {name: handle for name, handle in zip(names, handles, strict=True)}
    figure.legend(
        labels.values(), labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=12
    )
    return figure


def draw_by_seed(number: int):
    """Draw a row for each arm, a panel for each seed and a point for each step, unsmoothed."""
    lesson, records = LESSONS[number], records_of(number)
    (_, x), (_, y) = lesson.panels
    figure, axes = panels(
        len(lesson.drawn), len(SEEDS), figsize=(12, 7), sharex="row", sharey="row"
    )
    for row, arm in zip(axes, lesson.drawn, strict=True):
        for ax, record in zip(row, records[arm], strict=True):
            across, up = record["curves"][x], record["curves"][y]
            ax.plot(across, up, color=GRAY, linewidth=0.8)
            points = ax.scatter(across, up, c=np.arange(1, len(up) + 1), cmap="viridis", zorder=2)
            ax.set_title(f"{arm}, seed {record['seed']}", fontsize=12)
    figure.colorbar(points, ax=axes, label="step")
    figure.supxlabel(f"{WORDS[x]} ({x})", fontsize=12)
    figure.supylabel(f"{WORDS[y]} ({y})", fontsize=12)
    return figure


# (broken, healthy, the metric that shows the fault)
BROKEN = [
    ("learning rate too high", "healthy", "kl/ref"),
    ("learning rate too high", "healthy", ACCURACY),
    ("responses cut", "healthy", "rollout/eos_frac"),
    ("sampled too cold", "healthy", "rollout/zero_std_frac"),
    ("PPO, collapsed", "PPO", "policy/entropy"),
    ("PPO, critic that does not learn", "PPO", "value/explained_var"),
]


def draw_broken(number: int):
    """Draw a panel for each broken run beside a healthy one, with a line for each seed."""
    records = records_of(number)
    figure, axes = panels(2, 3, figsize=(12, 7.5))
    for ax, (broken, healthy, y) in zip(axes.flat, BROKEN, strict=True):
        for arm, color, label in ((healthy, GRAY, "healthy"), (broken, "C3", "broken")):
            for record in records[arm]:
                values = [np.nan if x is None else x for x in record["curves"][y]]
                ax.plot(range(1, len(values) + 1), values, color=color, label=label)
                label = None
        ax.set_title(broken.removeprefix("PPO, "), fontsize=13)
        name_axes(ax, STEPS, y)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=12)
    return figure


def draw(number: int) -> None:
    draw_it = draw_by_seed if LESSONS[number].by_seed else draw_panels
    figure = draw_broken(number) if number == 15 else draw_it(number)
    save(figure, PICTURES / f"{number:02}.svg", drawn_from(number))


def block(number: int) -> str:
    """The generated part of a lesson's page: commands, picture, and a table with the results of its arms."""
    lesson = LESSONS[number]
    columns, rows, total = USUAL | lesson.columns, [], 0.0
    for arm, runs in records_of(number).items():
        cells = [spread([f(record) for record in runs], digits) for f, digits in columns.values()]
        seconds = [record["seconds"] for record in runs]
        total += sum(seconds)
        rows.append([arm, *cells, f"{np.mean(seconds):.0f} s"])
    commands = "\n".join(f"python {command}" for command in lesson.arms.values())
    results = table(["", *columns, "a run"], rows)
    picture = f"![{lesson.title}](lessons/{number:02}.svg)"
    cost = f"{len(rows) * len(SEEDS)} runs, {total / 60:.0f} minutes of one core."
    return f"```\n{commands}\n```\n\n{picture}\n\n{results}\n{cost}\n"


def page_of(number: int) -> Path:
    return ROOT / "docs" / ("metrics.md" if number == 15 else "lessons.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "lessons", nargs="*", type=int, help="numbers of lessons; default: all lessons"
    )
    parser.add_argument("--draw", action="store_true", help="make no runs; draw from the records")
    args = parser.parse_args()
    numbers = args.lessons or list(LESSONS)
    if not args.draw:
        run_missing(numbers)
    for number in numbers:
        draw(number)
        print(f"{number}. {LESSONS[number].title}\n\n{block(number)}")
        fill(page_of(number), f"lesson {number}", block(number))


if __name__ == "__main__":
    main()
