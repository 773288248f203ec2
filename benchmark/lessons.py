"""What each idea does on the bundled tasks: the runs, the tables and the pictures of docs/lessons.md.

    pip install -r benchmark/requirements.txt
    python benchmark/lessons.py clipping             make this lesson again: its runs, its table and its picture
    python benchmark/lessons.py clipping --seeds 1   the same with one seed: a third of the time
    python benchmark/lessons.py clipping --print     print its commands, and run nothing
    python benchmark/lessons.py clipping --of RUN    the columns of its table, of a run that you have made
    python benchmark/lessons.py --missing            all runs without a record, and the pages
    python benchmark/lessons.py --draw               the pages, without runs

Every run is one command: an unchanged script with flags, or a script that a patch of variants/ makes. Two runs go at a
time, each on one thread. Each gets a line in a file of records, with its command, and a command that has a record there
isn't run again: so an interrupted lesson goes on. Lessons can share a run. Your records and pictures are in
runs/lessons. Those of the pages are in benchmark/records and docs/lessons, and only --missing and --draw change them.

In a picture, a line is the mean of the seeds, smoothed over five steps, and the band goes from the lowest seed to the
highest. Some lessons have no table on the page.
"""

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np

from pictures import digest, draw_band, panels, save, smooth
from shared import (
    FOLDER,
    ROOT,
    command_line,
    fill,
    in_place,
    machine,
    parent_of_patch,
    provenance,
    python,
    read,
    read_run,
    run_two_at_a_time,
    spread,
    table,
)

RECORDS = FOLDER / "lessons.jsonl"
PICTURES = ROOT / "docs" / "lessons"
# Where a reader's own records and pictures go.
AGAIN = ROOT / "runs" / "lessons"
SEEDS = (1, 2, 3)
PPO = "ppo_rlhf.py --num-steps 20"
# The student of the lesson on length.
BUILD_STUDENT = "assets/addition/build_hesitant.py runs/hesitant"
FREE = "--model runs/hesitant --dataset runs/hesitant --no-examples --temperature 1 --max-new-tokens 128"
FREE += " --learning-rate 5e-5 --num-steps 50"
SUMS = "--model assets/sums/student --dataset assets/sums --no-examples --num-steps 40"
SUMS += " --learning-rate 5e-5 --no-gradient-checkpointing --eval-every 0 --eval-size 200"
OFTEN = "--num-steps 30 --num-minibatches 8"  # eight updates per rollout
STALE = "grpo_offpolicy.py --num-steps 40 --learning-rate 3e-4"
# --engine-memory has no effect on a CPU. It stands here because the records' commands have it.
ENGINE = "grpo_vllm.py --num-steps 40 --learning-rate 3e-4 --engine-memory 0.1"
# Each step has 16 responses.
FEW = "--num-steps 100 --learning-rate 3e-4 --eval-every 50"
BASELINE = "reinforce_baseline.py --num-steps 40"
PLAIN = "grpo.py --num-steps 40"

# The axes of a panel in words. The name of the metric stands below the words.
SAMPLED, STEPS, RATE, ACCURACY = "episodes", "step", "learning rate", "rollout/accuracy"
TOKENS, EQUAL, GAP = "rollout/response_len", "rollout/zero_std_frac", "rollout/logprob_gap"
KL, NATS, NORM, VALUES = "kl/ref", "policy/entropy", "optim/grad_norm", "value/explained_var"
WORDS = {
    SAMPLED: "responses sampled",
    STEPS: "step",
    ACCURACY: "right samples, %",
    "rollout/score": "mean score of the judge",
    "rollout/eos_frac": "responses that end, %",
    TOKENS: "tokens of a response",
    EQUAL: "groups with equal rewards, %",
    GAP: "gap to the trainer, nats",
    # The records count every ratio outside the range. Today the metric counts only where the clip acts.
    "policy/clip_frac": "outside the clip range, %",
    "policy/approx_kl": "KL to the old policy, nats",
    NATS: "entropy, nats a token",
    KL: "KL to the reference, nats a token",
    NORM: "norm of the gradient",
    VALUES: "explained variance, %",
    "length/right": "characters of a right response",
    "length/wrong": "characters of a wrong response",
    "tool/calls": "calls per response",
}
# Logged as fractions, and shown in percent.
PERCENT = {ACCURACY, "rollout/eos_frac", EQUAL, "policy/clip_frac", VALUES}
LOGARITHMIC = {"policy/approx_kl", NATS, KL, GAP}


# ==== what a table shows of a record ====
def curve(record: dict, metric: str) -> np.ndarray | None:
    """A record's metric at each step, fractions in percent. None if no step has the metric.

    NaN where it is missing or not finite: the explained variance is -inf if all returns are equal.
    """
    curves = record["curves"]
    if metric not in curves:
        return None
    values = np.array([np.nan if value is None else value for value in curves[metric]], dtype=float)
    values[~np.isfinite(values)] = np.nan
    return 100 * values if metric in PERCENT else values


def over(metric: str, first: int, last: int) -> Callable[[dict], float]:
    """A record's mean of a metric over the steps from first to last. Negative steps count from the end."""

    def value(record):
        # A run without a critic has none of the critic's metrics.
        values = curve(record, metric)
        if values is None:
            return np.nan
        first_, last_ = (k if k > 0 else len(values) + 1 + k for k in (first, last))
        chosen = values[first_ - 1 : last_]
        return np.nan if np.isnan(chosen).all() else float(np.nanmean(chosen))

    return value


def highest(metric: str) -> Callable[[dict], float]:
    """A record's largest value of a metric in a single step."""
    return lambda record: float(np.nanmax(curve(record, metric)))


def held_out(record: dict) -> float:
    return 100 * list(record["eval"].values())[-1]


def between(first: int, last: int) -> Callable[[dict], float]:
    """A record's sampled accuracy over the responses after the `first` and up to the `last`."""

    def value(record):
        sampled = curve(record, SAMPLED)
        return float(np.mean(curve(record, ACCURACY)[(first < sampled) & (sampled <= last)]))

    return value


# ==== the lessons ====
@dataclass
class Panel:
    """A picture's panel. x is a metric, SAMPLED, STEPS or RATE; y is a metric."""

    x: str
    y: str
    # The panel shows the arms whose names begin like this, or like one of these. Empty: all arms.
    arms: str | tuple[str, ...] = ""
    title: str = ""
    # With RATE: the steps of which y is the mean.
    steps: tuple[int, int] = (-5, -1)


HELD_OUT = {"held out, %": (held_out, 1)}
LAST = {"sampled, last five steps, %": (over(ACCURACY, -5, -1), 1)}


@dataclass
class Lesson:
    title: str  # the heading of its section
    # Name: command without its seed. "1e-4: GRPO" is drawn as "GRPO", in a panel of arms="1e-4".
    arms: dict[str, str]
    panels: list[Panel]
    # The columns of the table: (function of a record, digits).
    columns: dict[str, tuple[Callable[[dict], float], int]] = field(default_factory=lambda: LAST)
    rows: int = 1  # of panels


USUAL = HELD_OUT | LAST
HALFWAY = {"steps 13 to 17, %": (over(ACCURACY, 13, 17), 0)}
GROUPS = {"equal groups, last five, %": (over(EQUAL, -5, -1), 0)}
CLIPPED = {"outside the clip range, first five, %": (over("policy/clip_frac", 1, 5), 1)}
EXPLAINED = {"explained, last five, %": (over(VALUES, -5, -1), 0)}
ENTROPY = {"entropy, last five": (over(NATS, -5, -1), 3)}

# Full weights and adapters at several rates. The default rank is 16.
ADDER_RATES = {
    "3e-5": f"{PLAIN} --learning-rate 3e-5",
    "1e-4": PLAIN,
    "3e-4": f"{PLAIN} --learning-rate 3e-4",
    "1e-3": f"{PLAIN} --learning-rate 1e-3",
}
ADDER_RANKS = {
    f"adder, {rate}: rank {rank}": f"grpo_lora.py --lora-rank {rank} --num-steps 40 --learning-rate {rate}"
    for rank in (1, 4, 16, 64)
    for rate in ("3e-4", "1e-3", "3e-3")
}
SUMS_RATES = {rate: f"grpo.py {SUMS} --beta 0".replace("5e-5", rate) for rate in ("5e-5", "1.5e-4", "5e-4")}
SUMS_RANKS = {
    f"sums, {rate}: rank {rank}": f"grpo_lora.py {SUMS} --beta 0".replace("5e-5", rate)
    + (f" --lora-rank {rank}" if rank != 16 else "")
    for rank in (1, 4, 16, 64)
    for rate in ("1.5e-4", "5e-4", "1.5e-3")
}

# The page has no table of these.
PRINTED = "reuse adapters critic groups samplers baselines".split()
# In the order of the page. "broken" is on docs/metrics.md.
LESSONS = {
    "length": Lesson(
        "Dividing by length makes wrong answers grow",
        {
            "1/length (GRPO)": f"grpo.py {FREE} --beta 0",
            "constant (Dr. GRPO)": f"dr_grpo.py {FREE}",
            "token mean (DAPO)": f"dapo.py {FREE} --num-minibatches 1 --max-resample 0 --overlong-cache 1",
        },
        [Panel(STEPS, "length/wrong"), Panel(STEPS, "length/right")],
        LAST
        | {
            f"{kind}, {when}, characters": (over(f"length/{kind}", *steps), 0)
            for kind in ("wrong", "right")
            for when, steps in {"first five": (1, 5), "last five": (-5, -1)}.items()
        },
    ),
    "reuse": Lesson(
        "Up to four passes over a rollout help",
        {f"mu = {mu}": f"grpo.py --num-steps 30 --num-iterations {mu}" for mu in (1, 2, 4, 8)},
        [
            Panel(SAMPLED, ACCURACY),
            Panel(STEPS, "policy/clip_frac"),
            Panel(STEPS, "policy/approx_kl"),
        ],
        LAST | HALFWAY,
    ),
    "goodhart": Lesson(
        "Without a KL penalty, the judge's score hides wrong answers",
        {f"beta = {beta}": f"{PPO} --learning-rate 5e-4 --beta {beta}" for beta in (0, 0.05, 0.2, 1)},
        [Panel(STEPS, "rollout/score"), Panel(STEPS, ACCURACY)],
        USUAL | {"score, last five": (over("rollout/score", -5, -1), 2)},
    ),
    "teacher": Lesson(
        "A teacher is better than a reward where samples are few",
        {
            "distilled, 16": f"distill.py {FEW} --num-prompts 16 --num-generations 1",
            "whole vocabulary, 16": f"full_vocabulary.py {FEW} --num-prompts 16 --num-generations 1",
            "GRPO, 16": f"grpo.py {FEW} --num-prompts 2",
            "GRPO, 16, at 1e-4": f"grpo.py {FEW.replace('3e-4', '1e-4')} --num-prompts 2",
            "distilled, 128": "distill.py --num-steps 40 --learning-rate 3e-4",
            "GRPO, 128": ADDER_RATES["3e-4"],
        },
        [Panel(SAMPLED, ACCURACY)],
        HELD_OUT
        | {
            f"responses {first + 1} to {last}, %": (between(first, last), 0) for first, last in ((0, 640), (1280, 1600))
        },
    ),
    "self_distillation": Lesson(
        "A policy learns from itself with a rule, and not from itself with the answer",
        {
            "a rule": "self_distill.py",
            "the answer": "self_distill.py --context-column answer",
            "a right response": "sdpo_context.py",
        },
        [Panel(STEPS, ACCURACY), Panel(STEPS, KL), Panel(STEPS, TOKENS)],
        HELD_OUT
        | {
            "KL to the teacher, first five, nats": (over(KL, 1, 5), 2),
            "last five": (over(KL, -5, -1), 3),
            "tokens, first five": (over(TOKENS, 1, 5), 1),
            "tokens, last five": (over(TOKENS, -5, -1), 1),
        },
    ),
    "tool": Lesson(
        "With a price on its calls, the policy learns to add",
        {"a call is free": "grpo_tools.py", "a call costs 0.1": "grpo_tools.py --tool-cost 0.1"},
        [Panel(STEPS, ACCURACY), Panel(STEPS, "tool/calls")],
        USUAL
        | {
            "calls, highest in a step": (highest("tool/calls"), 2),
            "calls, last five steps": (over("tool/calls", -5, -1), 2),
        },
    ),
    "adapters": Lesson(
        "The rank of an adapter makes no difference, and the learning rate does",
        ADDER_RANKS
        | {f"adder, {rate}: all weights": command for rate, command in ADDER_RATES.items()}
        | SUMS_RANKS
        | {f"sums, {rate}: all weights": command for rate, command in SUMS_RATES.items()},
        [
            Panel(RATE, ACCURACY, "adder", "adder, last five steps"),
            Panel(RATE, ACCURACY, "sums", "sums, steps 21 to 30", steps=(21, 30)),
            Panel(RATE, ACCURACY, "sums", "sums, last five steps"),
        ],
    ),
    "clipping": Lesson(
        "Clipping tokens makes no difference at a learning rate that works",
        {
            f"{rate}: {name}": f"{command} --learning-rate {rate}".replace(" --learning-rate 1e-4", "")
            for rate in ("3e-5", "1e-4", "3e-4")
            for name, command in {
                "GRPO, eps = 0.2": f"grpo.py {OFTEN} --beta 0",
                "GRPO, eps = 1": f"grpo.py {OFTEN} --beta 0 --clip-eps 1",
                "GSPO": f"gspo.py {OFTEN}",
            }.items()
            if (rate, name) != ("3e-5", "GRPO, eps = 1")
        },
        [
            Panel(RATE, ACCURACY, title="last five steps"),
            Panel(SAMPLED, ACCURACY, "3e-4", "learning rate 3e-4"),
            Panel(STEPS, "policy/clip_frac", "1e-4", "learning rate 1e-4"),
        ],
        LAST | HALFWAY | CLIPPED,
    ),
    "critic": Lesson(
        "Advantages that come from the critic alone hurt",
        {
            "adder: lambda 0": f"{PPO} --gae-lambda 0",
            "adder: lambda 0.95": PPO,
            "adder: lambda 1": f"{PPO} --gae-lambda 1",
            "adder: lambda 0.95, critic from the policy": f"{PPO} --value-init policy",
            "sums: lambda 0": f"ppo_rlhf.py {SUMS} --beta 0 --value-learning-rate 1e-4 --gae-lambda 0",
            "sums: lambda 0.95": f"ppo_rlhf.py {SUMS} --beta 0 --value-learning-rate 1e-4",
            "sums: lambda 1": f"ppo_rlhf.py {SUMS} --beta 0 --value-learning-rate 1e-4 --gae-lambda 1",
            "sums: GRPO": SUMS_RATES["5e-5"],
        },
        [
            Panel(SAMPLED, ACCURACY, "adder", "adder"),
            Panel(STEPS, VALUES, "adder", "adder"),
            Panel(SAMPLED, ACCURACY, "sums", "sums"),
            Panel(STEPS, VALUES, "sums", "sums"),
        ],
        USUAL | {"steps 11 to 20, %": (over(ACCURACY, 11, 20), 1)} | EXPLAINED,
        rows=2,
    ),
    "broken": Lesson(
        "What they look like when something is wrong",
        {
            "healthy": PLAIN,
            "learning rate too high": f"{PLAIN} --learning-rate 2e-3",
            "responses cut": f"{PLAIN} --max-new-tokens 18",
            "sampled too cold": f"{PLAIN} --temperature 0.1",
            "PPO, healthy": PPO,
            "PPO, critic that does not learn": f"{PPO} --value-init policy --value-learning-rate 1e-9",
            "PPO, collapsed": "ppo_rlhf.py --num-steps 40 --learning-rate 3e-3 --beta 0",
        },
        [
            Panel(STEPS, KL, ("healthy", "learning rate"), "learning rate too high"),
            Panel(STEPS, ACCURACY, ("healthy", "learning rate"), "learning rate too high"),
            Panel(STEPS, "rollout/eos_frac", ("healthy", "responses cut"), "responses cut"),
            Panel(STEPS, EQUAL, ("healthy", "sampled"), "sampled too cold"),
            Panel(STEPS, NATS, ("PPO, healthy", "PPO, collapsed"), "PPO, collapsed"),
            Panel(STEPS, VALUES, ("PPO, healthy", "PPO, critic"), "PPO, useless critic"),
        ],
        USUAL
        | {"kl/ref, step 3": (over(KL, 3, 3), 3), "entropy, first five": (over(NATS, 1, 5), 3)}
        | ENTROPY
        | {
            "ended, all steps, %": (over("rollout/eos_frac", 1, -1), 0),
            "equal groups, all steps, %": (over(EQUAL, 1, -1), 0),
        }
        | EXPLAINED,
        rows=2,
    ),
    "groups": Lesson(
        "Of larger groups a larger share teaches, and the accuracy changes little",
        {f"G = {G}": f"{PLAIN} --num-generations {G} --num-prompts {128 // G}" for G in (2, 4, 8, 16, 32)},
        [Panel(SAMPLED, ACCURACY), Panel(STEPS, EQUAL)],
        LAST | GROUPS,
    ),
    "samplers": Lesson(
        "A stale sampler is behind at first, and a rounded one is not",
        {
            "stale: K = 1": STALE,
            "stale: K = 4": f"{STALE} --staleness 4",
            "stale: K = 4, not corrected": f"{STALE} --staleness 4 --rollout-correction 0",
            "stale: K = 16": f"{STALE} --staleness 16",
            "stale: K = 16, not corrected": f"{STALE} --staleness 16 --rollout-correction 0",
            "engine: float32": ENGINE,
            "engine: bf16": f"{ENGINE} --engine-dtype bfloat16",
            "engine: bf16, not corrected": f"{ENGINE} --engine-dtype bfloat16 --rollout-correction 0",
        },
        [
            Panel(STEPS, ACCURACY, "stale", "stale"),
            Panel(STEPS, GAP, "stale", "stale"),
            Panel(STEPS, ACCURACY, "engine", "engine"),
            Panel(STEPS, GAP, "engine", "engine"),
        ],
        LAST
        | {f"steps {first} to {last}, %": (over(ACCURACY, first, last), 0) for first, last in ((1, 5), (11, 15))}
        | {"logprob_gap, highest": (highest(GAP), 4)},
        rows=2,
    ),
    "baselines": Lesson(
        "No baseline raises the accuracy of the additions",
        {
            "no baseline": f"{BASELINE} --baseline none",
            "moving average": f"{BASELINE} --baseline moving_average",
            "batch mean": BASELINE,
            "RLOO": "rloo.py --num-steps 40",
            "ReMax": "remax.py --num-steps 40",
        },
        [Panel(SAMPLED, ACCURACY), Panel(STEPS, NORM)],
    ),
}


# ==== the runs ====
def lengths(folder: Path, num_steps: int) -> dict[str, list]:
    """The mean characters of the right and of the wrong responses of each step, from the samples."""
    found = {"length/right": [], "length/wrong": []}
    steps = [defaultdict(list) for _ in range(num_steps)]
    for sample in read(folder / "samples.jsonl"):
        scores = sample.get("scores") or sample["right"]  # older runs say "right"
        for text, score in zip(sample["completions"], scores, strict=True):
            steps[sample["step"] - 1]["right" if score == 1 else "wrong"].append(len(text))
    for step in steps:
        for kind in ("right", "wrong"):
            found[f"length/{kind}"].append(round(float(np.mean(step[kind])), 2) if step[kind] else None)
    return found


def record_of(folder: Path) -> dict:
    """A run's args, its evaluations, and its curves: all that a lesson shows."""
    metrics, args = read_run(folder)
    curves = lengths(folder, len(metrics) - 1)
    # In vapo.py's value pretraining, the steps have no metrics of the policy.
    for name in dict.fromkeys(name for line in metrics[1:] for name in line):
        if name not in ("step", "tokens") and not name.startswith(("time/", "eval/")):
            values = [line.get(name) for line in metrics[1:]]
            curves[name] = [x if x is None else float(f"{x:.4g}") for x in values]
    record = {"args": {name: value for name, value in args.items() if not name.startswith("run")}}
    for name in ("model", "task", "dataset", "reward_model", "teacher"):
        if args.get(name):
            record["args"][name] = Path(args[name]).name
    record["eval"] = {line["step"]: line["eval/accuracy"] for line in metrics if "eval/accuracy" in line}
    return record | {"curves": curves}


def run(command: str, seed: int, source: dict) -> dict:
    """Run a script in a temporary folder, and return its record, with `source` as its provenance."""
    # The machine's state before the run: the run itself is not a part of its load.
    source = source | {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--device cpu --seed {seed} --runs-dir {folder} --run-name run"
        seconds = python(f"{command} {flags}")
        record = record_of(Path(folder, "run"))
    return {"command": command, "seed": seed, "seconds": round(seconds, 1), **source, **record}


@cache
def read_records(path: Path = RECORDS) -> dict:
    """(command, seed) -> record."""
    return {(record["command"], record["seed"]): record for record in read(path)}


def run_missing(names: list[str], path: Path, seeds: Sequence[int]) -> None:
    """Make the runs of the lessons that have no record in path, two at a time. A run's record is written at its end."""
    have = read_records(path)
    commands = dict.fromkeys(command for name in names for command in LESSONS[name].arms.values())
    missing = [(command, seed) for seed in seeds for command in commands if (command, seed) not in have]
    if len(missing) < len(commands) * len(seeds):
        print(f"{path} has a record of the other {len(commands) * len(seeds) - len(missing)} runs")
    if not missing:
        return
    student = ROOT / "runs" / "hesitant" / "model.safetensors"
    if any("runs/hesitant" in command for command, _ in missing) and not student.exists():
        subprocess.run([sys.executable, *BUILD_STUDENT.split()], cwd=ROOT, check=True)
    # The scripts of the patches count as changes of the tree. So look at the tree first.
    source = provenance()
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_place({script_of(command) for command, _ in missing}):
        run_two_at_a_time(partial(run, source=source), missing, path)
    read_records.cache_clear()


def script_of(command: str) -> str:
    return command.partition(".py")[0]


def commands(name: str) -> str:
    """The commands of a lesson, one a line, after those that make its student and the scripts of its patches."""
    lines = []
    if any("runs/hesitant" in command for command in LESSONS[name].arms.values()):
        lines.append(f"python {BUILD_STUDENT}")
    for script in dict.fromkeys(map(script_of, LESSONS[name].arms.values())):
        if parent := parent_of_patch(script):
            lines.append(f"patch -o {script}.py {parent} variants/{script}.diff")
    return "\n".join([*lines, *(f"python {command}" for command in LESSONS[name].arms.values())])


# ==== the pictures ====
def label(arm: str) -> str:
    """What a picture calls an arm: the name without the task or the learning rate before the colon."""
    return arm.split(": ")[-1]


def draw_curve(ax, arms: dict[str, list[dict]], colors: dict[str, str], panel: Panel) -> None:
    for arm, runs in arms.items():
        if curve(runs[0], panel.y) is None:
            # An arm without a critic has no explained variance.
            continue
        up = np.stack([smooth(curve(record, panel.y)) for record in runs])  # (seeds, steps)
        name = label(arm)
        if panel.x == STEPS:
            draw_band(ax, np.arange(1, up.shape[1] + 1), up, colors[name], name)
        else:
            across = np.mean([curve(record, SAMPLED) for record in runs], axis=0)  # (steps,)
            draw_band(ax, across, up, colors[name], name)


def draw_rates(ax, arms: dict[str, list[dict]], colors: dict[str, str], panel: Panel) -> None:
    """y against the learning rate. Arms that differ only in the rate share a line."""
    lines = defaultdict(list)
    for arm, runs in arms.items():
        values = [over(panel.y, *panel.steps)(record) for record in runs]
        lines[label(arm)].append((runs[0]["args"]["learning_rate"], values))
    for name, points in lines.items():
        rates = [rate for rate, _ in points]
        values = np.array([values for _, values in points]).T  # (seeds, rates)
        draw_band(ax, rates, values, colors[name], name)
        ax.plot(rates, values.mean(0), color=colors[name], marker="o", linewidth=0)
    rates = sorted({rate for points in lines.values() for rate, _ in points})
    ax.set_xscale("log")
    ax.set_xticks(rates, [rate_name(rate) for rate in rates], rotation=60 if len(rates) > 4 else 0)
    ax.minorticks_off()


def rate_name(rate: float) -> str:
    """1.5e-4, as in a command."""
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")


def name_axes(ax, x: str, y: str) -> None:
    """Label each axis with words, and below them with the name of the metric."""
    for axis, name in ((ax.xaxis, x), (ax.yaxis, y)):
        is_metric = "/" in name and not name.startswith("length/")
        axis.set_label_text(WORDS.get(name, name) + (f"\n{name}" if is_metric else ""))
        axis.label.set_linespacing(1.3)
    if x != RATE:
        ax.set_xscale("log" if x in LOGARITHMIC else "linear")
    ax.set_yscale("log" if y in LOGARITHMIC else "linear")
    if x == STEPS:
        ax.xaxis.get_major_locator().set_params(integer=True)
    # The explained variance has no lower bound, so a bad critic would flatten all other curves.
    if y == VALUES:
        ax.set_ylim(bottom=max(-50, ax.get_ylim()[0]))


def records_of(name: str, path: Path = RECORDS, seeds: Sequence[int] = SEEDS) -> dict[str, list[dict]]:
    """The records of a lesson: for each arm, one record for each seed."""
    have = read_records(path)
    return {arm: [have[c, seed] for seed in seeds] for arm, c in LESSONS[name].arms.items()}


def drawn_from(records: dict[str, list[dict]]) -> str:
    runs = [record for of_arm in records.values() for record in of_arm]
    # Older records also have the sizes of the advantages.
    return digest([[record["curves"], record.get("groups")] for record in runs])


def draw(name: str, records: dict[str, list[dict]], path: Path) -> None:
    """Draw the panels of a lesson, with a line for each arm."""
    lesson = LESSONS[name]
    names = dict.fromkeys(label(arm) for arm in records)
    colors = {name: f"C{k}" for k, name in enumerate(names)}
    columns = len(lesson.panels) // lesson.rows
    figure, axes = panels(lesson.rows, columns, figsize=(12, 4.4 if lesson.rows == 1 else 7.6))
    for ax, panel in zip(axes.flat, lesson.panels, strict=True):
        arms = {arm: runs for arm, runs in records.items() if arm.startswith(panel.arms)}
        (draw_rates if panel.x == RATE else draw_curve)(ax, arms, colors, panel)
        name_axes(ax, panel.x, panel.y)
        ax.set_title(panel.title, fontsize=13)
    handles = {}
    for ax in axes.flat:
        found, found_names = ax.get_legend_handles_labels()
        handles |= dict(zip(found_names, found, strict=True))
    figure.legend(
        [handles[name] for name in names if name in handles],
        [name for name in names if name in handles],
        loc="outside lower center",
        ncols=len(handles) if len(handles) < 6 else 4,
        fontsize=12,
    )
    save(figure, path, drawn_from(records))


# ==== the page ====
def table_of(name: str, records: dict[str, list[dict]]) -> str:
    """The lesson's columns, and a row for each arm."""
    columns, rows = LESSONS[name].columns, []
    for arm, runs in records.items():
        cells = [spread([f(x) for x in runs], digits) for f, digits in columns.values()]
        rows.append([arm, *cells])
    return table(["", *columns], rows)


def block(name: str) -> str:
    """The generated part of a lesson: a picture, and a table with the results of its arms."""
    text = f"![{LESSONS[name].title}](lessons/{name}.svg)\n"
    return text if name in PRINTED else f"{text}\n{table_of(name, records_of(name))}"


def costs() -> str:
    """The generated table of what each lesson took. Two runs went at a time."""
    lessons = {name: set(lesson.arms.values()) for name, lesson in LESSONS.items()}
    lessons["all, shared runs once"] = set.union(*lessons.values())
    rows = []
    for name, commands in lessons.items():
        seconds = [record["seconds"] for (command, _), record in read_records().items() if command in commands]
        rows.append([name, str(len(seconds)), f"{sum(seconds) / 2 / 60:.0f}"])
    return table(["NAME", "runs", "minutes on two cores"], rows)


def page_of(name: str) -> Path:
    return ROOT / "docs" / ("metrics.md" if name == "broken" else "lessons.md")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("lessons", nargs="*", help=f"one or more of {', '.join(LESSONS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="SEED", help="default: 1 2 3")
    parser.add_argument("--print", action="store_true", help="print the commands, and do nothing")
    parser.add_argument("--of", nargs="+", type=Path, metavar="RUN", help="a row of the lesson's table for each run")
    parser.add_argument("--missing", action="store_true", help="make the runs without a record, and the pages")
    parser.add_argument("--draw", action="store_true", help="make the pages, without runs")
    args = parser.parse_args()
    if not (args.lessons or args.missing or args.draw or args.print):
        parser.error(f"name a lesson: {', '.join(LESSONS)}")
    names = args.lessons or list(LESSONS)
    unknown = [name for name in names if name not in LESSONS]
    if unknown:
        parser.error(f"no lesson {', '.join(unknown)}; choose from {', '.join(LESSONS)}")
    if args.print:
        for name in names:
            print(f"# {name}: the commands, each with --seed {' and '.join(map(str, args.seeds))}\n{commands(name)}\n")
    elif args.of:
        runs = {}
        for folder in args.of:
            record = record_of(folder)
            done, planned = len(record["curves"]["length/right"]), record["args"]["num_steps"]
            note = f" ({done} of {planned} steps)" if done < planned else ""
            runs[f"{folder}{note}"] = [record]
        for name in names:
            print(f"{name}: {LESSONS[name].title}\n\n{table_of(name, runs)}")
    elif args.missing or args.draw:
        if args.missing:
            run_missing(names, RECORDS, SEEDS)
        for name in names:
            draw(name, records_of(name), PICTURES / f"{name}.svg")
            fill(page_of(name), f"lesson {name}", block(name))
        fill(page_of("length"), "cost", costs())
    else:
        path = AGAIN / "records.jsonl"
        run_missing(names, path, args.seeds)
        for name in names:
            records = records_of(name, path, args.seeds)
            draw(name, records, AGAIN / f"{name}.svg")
            print(f"{name}: {LESSONS[name].title}\n\n{table_of(name, records)}")
            print(f"The picture is {AGAIN / name}.svg. The records are {path}.")


if __name__ == "__main__":
    main()
