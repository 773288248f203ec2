"""Look at runs: curves and samples, in one HTML file that needs no network and no server.

    python report/report.py runs/A            one run, finished or not: runs/A/report.html
    python report/report.py runs/A runs/B     several runs in the same charts: runs/report.html
    python report/report.py runs              all runs in this folder

For a paper, instead of the page, a table (in Markdown, or with "latex" in LaTeX) and a figure:

    python report/report.py runs/A-* runs/B-* --table latex
    python report/report.py runs/A-* runs/B-* --figure eval/accuracy rollout/reward_mean --out fig.pdf

It reads args.json, metrics.jsonl, samples.jsonl and evaluations.jsonl of each run. The page shows
them, and says what is missing or unreadable. Runs whose args.json differ only in the seed (or in
their names, and in how often they evaluate and save), and whose copies of the script are equal, are
one configuration, drawn as mean and band. The page is made from page.html. plotly draws its curves,
and matplotlib the figure.

Each configuration is compared with the first one, problem by problem, if their held-out problems
are the same: args.json has the same digest of the data and the same eval_size. Older runs have no
evaluations.jsonl, so they have no standard errors and aren't compared."""

import hashlib
import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

import tyro

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from utils.rewards import accuracy_reward  # noqa: E402

PAGE = HERE / "page.html"
# The six metrics to watch first.
FIRST = ["rollout/reward_mean", "rollout/accuracy", "rollout/eos_frac", "rollout/zero_std_frac"]
FIRST += ["policy/entropy", "kl/ref"]
# The marks of a broken run.
BROKEN = {
    "rollout/eos_frac": ("below", 0.5, "most responses are cut"),
    "rollout/zero_std_frac": ("above", 0.9, "most groups have equal rewards"),
    "optim/skipped": ("above", 0, "gradients that are not finite"),
}
# A shorter run isn't judged: it's a trial.
FEWEST_STEPS = 20
# What belongs to a run, and not to its configuration.
OF_A_RUN = ["seed", "run_name", "runs_dir", "resume", "track", "eval_every", "save_every"]
# What args.json has beside the flags and the digests of the code's files. "code" is that of an older run.
NOT_FLAGS = ["script", "copy", "code", "data", "rewards", "precision", "versions", "device_name"]
# The columns of the comparison: what --columns calls them, and their headings. A column without an
# entry is left out.
COLUMNS = {
    "seeds": "seeds",
    "steps": "steps",
    "problems": "problems",
    "before": "accuracy before",
    "after": "accuracy after",
    "seed-error": "s.e. over seeds",
    "difference": "difference (95 % interval)",
    "won-lost": "won, lost",
    "sign-test": "sign test",
    "per-seed": "difference per seed",
    "over-seeds": "difference over seeds",
    "seconds": "seconds",
    "torch": "torch",
    "transformers": "transformers",
    "device": "device",
}
# Those that compare a configuration with the first one.
COMPARING = {"difference", "won-lost", "sign-test", "per-seed", "over-seeds"}
# By default, a table for a paper has neither these columns, nor those of CONDITIONS whose entry is
# the same in all rows. The conditions are then a note.
LEFT_OUT = ["won-lost", "per-seed", "seconds"]
CONDITIONS = ["seeds", "steps", "problems", "before", "torch", "transformers", "device"]
# The least width and the height of a panel in the figure for a paper, in inches. A figure that is
# twice as wide has two panels in a row.
PANEL_WIDTH, PANEL_HEIGHT = 2.6, 1.8
FORMATS = [".pdf", ".svg", ".png"]
# Okabe and Ito's colors. Without them, 20 curves still differ: 4 lines and 5 markers repeat together
# after 20.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
LINE_STYLES, MARKERS = ["-", "--", ":", "-."], "osD^v"
# What the axis of a figure says instead of the name of a metric.
AXES = {
    "eval/accuracy": "held-out accuracy",
    "eval/response_len": "held-out length (tokens)",
    "rollout/accuracy": "sampled accuracy",
    "rollout/reward_mean": "mean reward",
    "rollout/response_len": "length (tokens)",
    "policy/entropy": "entropy (nats)",
    "kl/ref": "KL to the reference (nats)",
}


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]]
    """folders of runs, or folders that contain runs; they stand before the options"""
    out: Path | None = None
    """file to write; None: report.html or figure.pdf, in the folder that contains all the runs"""
    table: list[Literal["markdown", "latex"]] | None = None
    """print a table for a paper instead of writing the page; without a value: in Markdown"""
    columns: list[Literal[tuple(COLUMNS)]] | None = None
    """columns of the table; None: those that differ, as far as they fit the width of a page"""
    figure: list[str] | None = None
    """draw these metrics for a paper instead of writing the page: a .pdf, .svg or .png, as --out says;
    without a value: eval/accuracy and rollout/reward_mean"""
    width: float = 3.15
    """width of the figure in inches: a column; the width of a page is 5.5 to 7"""
    smooth: int = 5
    """each point of the figure is the mean of this many steps, except in evaluations; 1: of one"""
    labels: list[str] | None = None
    """names of the configurations in the table and the figure, in the order of the runs"""


def read_json(text):
    """JSON with six digits per number, for a small page. NaN and 1e999 become strings."""

    def number(x):
        return float(f"{float(x):.6g}") if abs(float(x)) < float("inf") else x

    return json.loads(text, parse_float=number, parse_constant=str)


def read_records(path, is_record):
    """The records of a .jsonl file that have a step and pass a check, and lines on the gaps."""
    if not path.is_file():
        return [], [f"{path.name} is missing"]
    # The text after the last line break is empty, or a line that the run is still writing.
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for line in lines:
        try:
            record = read_json(line)
            if isinstance(record["step"], int) and is_record(record):
                records.append(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            # The unreadable lines are counted below.
            pass
    gaps = [] if records else [f"{path.name} has no record"]
    if len(records) < len(lines):
        gaps.append(f"{path.name}: {len(lines) - len(records)} unreadable lines are left out")
    if rest:
        gaps.append(f"{path.name}: the last line is half-written and left out")
    return records, gaps


def has_completions(record):
    return isinstance(record["completions"], list)


def scores_of(record):
    """The first reward's scores in a record, or None. An older run has true or false, as right."""
    return record.get("scores", record.get("right"))


def has_scores(record):
    """Whether a record of samples or of an evaluation holds numbers as scores."""
    scores = scores_of(record)
    return isinstance(scores, list) and bool(scores) and all(map(is_number, scores))


def is_number(value):
    return isinstance(value, int | float)


def read_run(folder, name):
    """The data of a run: name, args, metrics, samples, evaluations, marks and gaps."""
    gaps = []
    try:
        args = dict(read_json((folder / "args.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        # The name keeps the run from looking like another run with another seed.
        args = {"args.json": f"none in {name}"}
        gaps.append("args.json is missing or unreadable")
    # The folder of a run has a copy of its script. Copies of one name may differ, in a reward for
    # example.
    args["script"] = args["copy"] = "?"
    for path in folder.glob("*.py"):
        if path.name != "task.py":
            args["script"] = path.name
            args["copy"] = hashlib.sha256(path.read_bytes()).hexdigest()[:7]
            args.pop(path.name, None)  # the same digest
    # Two tasks may have one name, and a task may lie elsewhere when a run is resumed.
    if "task.py" in args:
        args["task"] = f"{Path(args['task']).stem} {args.pop('task.py')[:7]}"
    metrics, metrics_gaps = read_records(folder / "metrics.jsonl", lambda record: True)
    samples, samples_gaps = read_records(folder / "samples.jsonl", has_completions)
    evaluations, evaluations_gaps = read_records(folder / "evaluations.jsonl", has_scores)
    if not (folder / "evaluations.jsonl").is_file():
        # An older run has none.
        evaluations_gaps = []
    gaps += metrics_gaps + samples_gaps + evaluations_gaps
    for group in samples:
        texts = [str(text) for text in group["completions"]]
        if has_scores(group) and len(scores_of(group)) == len(texts):
            scores = scores_of(group)
        else:  # a run that is older still
            scores = accuracy_reward(texts, [str(group.get("answer"))] * len(texts))
        is_cut = [not ended for ended in group.get("ended") or []]
        group |= {"completions": texts, "scores": [float(x) for x in scores], "cut": is_cut}
    run = {"name": name, "args": args, "metrics": metrics, "samples": samples}
    return run | {"evaluations": evaluations, "marks": marks(metrics, args), "gaps": gaps}


def series(metrics, name):
    """The steps and the values of a metric, without values that aren't numbers."""
    return [(x["step"], x[name]) for x in metrics if is_number(x.get(name))]


def marks(metrics, args):
    """The marks of a broken run that these metrics show."""
    found = []
    if not metrics or metrics[-1]["step"] < FEWEST_STEPS:
        return found
    for name, (side, limit, meaning) in BROKEN.items():
        if name == "rollout/zero_std_frac" and ("teacher" in args or "teacher_rate" in args):
            # distill.py and self_distill.py don't learn from rewards.
            continue
        sign = 1 if side == "above" else -1
        pairs = series(metrics, name)
        if name == "optim/skipped" and args.get("precision") == "float16":
            # In its first updates, the scaler may still lower its scale.
            pairs = [(step, value) for step, value in pairs if step > 5]
        steps = [step for step, value in pairs if sign * (value - limit) > 0]
        if steps:
            when = f"in {len(steps)} of {len(pairs)} steps, first in step {steps[0]}"
            found.append(f"{name} is {side} {limit} ({meaning}) {when}")
    entropy = series(metrics, "policy/entropy")
    solved = {step for step, value in series(metrics, "rollout/accuracy") if value >= 0.9}
    for k in range(len(entropy) - 4):
        low = [step for step, value in entropy[k : k + 5] if value < entropy[0][1] / 10]
        if len(low) == 5 and not solved & set(low):
            text = "policy/entropy has collapsed: below a tenth of its first value for five steps"
            return [*found, f"{text}, first in steps {entropy[k][0]} to {entropy[k + 4][0]}"]
    return found


# ---- configurations: runs that differ only in the seed


def configurations(runs):
    """The configurations of these runs, in their order: settings, runs, label and short name."""
    groups = {}
    for run in runs:
        args = sorted(run["args"].items())
        settings = {name: text_of(value) for name, value in args if name not in OF_A_RUN}
        key = json.dumps(settings)
        # Two runs with one seed aren't two seeds of a configuration.
        while key in groups and seed_of(run) in map(seed_of, groups[key]["runs"]):
            key += " again"
        groups.setdefault(key, {"settings": settings, "runs": []})["runs"].append(run)
    configs = list(groups.values())
    for config in configs:
        # Named by the script, by what sets it apart from others of this script, and by the seeds.
        settings = config["settings"]
        script = settings["script"]
        siblings = [other for other in configs if other["settings"]["script"] == script]
        own = {name: settings.get(name, "-") for name in separating(siblings)}
        parts = [script, *[f"{name} {cut(value, 24)}" for name, value in own.items()]]
        if any(other["settings"] == settings for other in configs if other is not config):
            parts.append(" ".join(run["name"] for run in config["runs"]))
        seeds = [seed_of(run) for run in config["runs"]]
        parts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
        config["label"] = ", ".join(parts)
        # The box of a chart has room for some thirty letters, so it shows the values alone.
        short = [script.removesuffix(".py"), *[cut(value, 12) for value in own.values()]]
        config["name"] = ", ".join(short)[:30]
    return configs


def seed_of(run):
    return text_of(run["args"].get("seed"))


def text_of(value):
    """A setting as a text."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, float):
        # 1e-4, as 3e-5, and not 0.0001.
        return f"{Decimal(str(value)):e}" if 0 < abs(value) < 1e-3 else f"{value:g}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def cut(text, length):
    """A text of this length at most. The end of a path says more than its beginning."""
    if len(text) <= length:
        return text
    return "…" + text[1 - length :] if "/" in text else text[:length]


def differing(configs):
    """The names of the settings that differ."""
    names = dict.fromkeys(name for config in configs for name in config["settings"])
    values = {name: {config["settings"].get(name, "-") for config in configs} for name in names}
    return [name for name in names if len(values[name]) > 1]


def separating(configs):
    """Three settings that differ. Each tells apart as many as possible that are still equal."""
    chosen, left = [], differing(configs)

    def number_of_kinds(name):
        names = [*chosen, name]
        return len({tuple(config["settings"].get(x, "-") for x in names) for config in configs})

    while left and len(chosen) < 3:
        best = max(left, key=number_of_kinds)
        left.remove(best)
        chosen.append(best)
    return chosen


# ---- statistics


def mean_and_error(values):
    """The mean of n numbers, and its standard error: their std, which divides by n - 1, over sqrt(n).

    If the numbers are 1 (right) and 0 (wrong), with the mean p, this is sqrt(p (1 - p) / (n - 1)).
    A single number has no standard error: None.
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, None
    variance = sum((x - mean) ** 2 for x in values) / (n - 1)
    return mean, math.sqrt(variance / n)


def sign_test(won, lost):
    """The exact two-sided sign test.

    If the toss of a coin had decided whether each of these problems is won or lost, the result
    would be the probability of a split that is at least as uneven.
    """
    n = won + lost
    smaller_side = sum(math.comb(n, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * smaller_side / 2**n)


def problem_means(evaluations):
    """The mean score of each problem over these evaluations."""
    columns = zip(*map(scores_of, evaluations), strict=True)
    return [sum(column) / len(column) for column in columns]


# ---- configurations compared

ERROR_NOTE = (
    "± beside an accuracy is the standard error over the n held-out problems. Each has a score: 1 if "
    "right, 0 if wrong, or a grade, and with several seeds their mean. ± is the std of these scores, "
    "over sqrt(n). With one seed, no grades and an accuracy of p, it is sqrt(p (1 - p) / (n - 1))."
)
PAIRED_NOTE = (
    "Each configuration is compared with the first, problem by problem. The difference is the mean "
    "over the problems. Its interval, 1.96 standard errors to each side, says how far it could "
    "change with other problems."
)
TEST_NOTE = (
    "A problem is won if its score is higher than in the first configuration, and lost if it is "
    "lower. The sign test of these two numbers is exact."
)
FEW_NOTE = "{}: won {} and lost {} problems. With so few, trust the test, not the rough interval."
ONE_SEED_NOTE = "Only more seeds show how far a difference could change with other seeds."
SEVERAL_SEEDS_TEST_NOTE = (
    "The test counts problems, whatever the size of the change, so it may disagree with the sign of "
    "the difference."
)
SEVERAL_SEEDS_NOTE = (
    "A problem counts with its mean over the seeds. The standard error over the seeds says how far a "
    "mean could change with other seeds. A 95 % interval has 12.7 of these errors to each side with "
    "two seeds, 4.3 with three, and 2.8 with five."
)
OVER_SEEDS_NOTE = "± beside a difference over seeds is this standard error."
SHARED_NOTE = (
    "Runs of different configurations with the same seed ({}) share prompts and random numbers, so "
    "their curves coincide at first. The final difference of held-out accuracies is about as precise "
    "as with different seeds."
)
SECONDS_NOTE = (
    "The seconds are those of sampling, rewards and updates until the last evaluation, of all seeds "
    "together."
)


def evaluated(config, after):
    """The last evaluation of each seed after training began, or the one before: {seed: record}.

    Seeds without such an evaluation are left out. Lists of several lengths can't be averaged, so
    then the result is empty.
    """
    found = {}
    for run in config["runs"]:
        for record in run["evaluations"]:
            if (record["step"] > 0) == after:
                found[seed_of(run)] = record
    sizes = {len(scores_of(record)) for record in found.values()}
    return found if len(sizes) == 1 else {}


def obstacle(first, config):
    """Why two configurations can't be compared problem by problem. Empty if they can."""
    for side in (first, config):
        if not evaluated(side, after=True):
            return f"{side['label']} has no usable evaluation after step 0 in evaluations.jsonl"
    for name in ("data", "eval_size"):
        one, two = first["settings"].get(name), config["settings"].get(name)
        if one is None or one != two:
            return f"args.json doesn't have the same {name}, so the held-out problems may differ"
    one, two = [len(problem_means(evaluated(side, True).values())) for side in (first, config)]
    return "" if one == two else f"the evaluations have {one} and {two} problems"


def compare(first, config):
    """The paired differences of the last evaluations of two configurations: config minus first.

    Over the problems: their mean, its standard error and 95 % interval, the numbers of problems
    with a higher score (won) and with a lower one (lost), and the sign test of these two numbers.
    Over the seeds, if both have the same ones: the difference per seed, their mean and its
    standard error.
    """
    old, new = evaluated(first, after=True), evaluated(config, after=True)
    pairs = zip(problem_means(old.values()), problem_means(new.values()), strict=True)
    differences = [y - x for x, y in pairs]
    mean, error = mean_and_error(differences)
    won = sum(x > 0 for x in differences)
    lost = sum(x < 0 for x in differences)
    result = {"difference": mean, "error": error, "won": won, "lost": lost}
    result["interval"] = None if error is None else (mean - 1.96 * error, mean + 1.96 * error)
    result["p"] = sign_test(won, lost)
    result["per_seed"], result["over_seeds"] = {}, None
    if set(old) == set(new):
        for seed in old:
            old_mean, _ = mean_and_error(scores_of(old[seed]))
            new_mean, _ = mean_and_error(scores_of(new[seed]))
            result["per_seed"][seed] = new_mean - old_mean
        result["over_seeds"] = mean_and_error(list(result["per_seed"].values()))
    return result


def plus_minus(mean, error, sign=""):
    """A mean as a text, with its standard error if it has one."""
    text = f"{mean:{sign}z.3f}"
    return text if error is None else f"{text} ± {error:.3f}"


def accuracy_text(config, runs, after):
    """The held-out accuracy after or before training, with its standard error over the problems.

    An older run has it in its metrics alone, so without a standard error.
    """
    records = evaluated(config, after)
    if records:
        return plus_minus(*mean_and_error(problem_means(records.values())))
    values = []
    for run in runs:
        found = [x for step, x in series(run["metrics"], "eval/accuracy") if (step > 0) == after]
        values += found[-1:]
    return plus_minus(sum(values) / len(values), None) if values else "-"


def last_step(run):
    """The step of a run's last evaluation."""
    steps = [record["step"] for record in run["evaluations"]]
    steps = steps or [step for step, _ in series(run["metrics"], "eval/accuracy")] or [0]
    return steps[-1]


def seconds_of(run):
    """The seconds of sampling, rewards and updates until the run's last evaluation."""
    names = ("time/rollout_s", "time/reward_s", "time/update_s")
    parts = [series(run["metrics"], name) for name in names]
    return sum(seconds for part in parts for step, seconds in part if step <= last_step(run))


def row_of(first, config):
    """What a paper says about a configuration: {column: text}, with "-" for what isn't known."""
    row = dict.fromkeys(COLUMNS, "-")
    last = evaluated(config, after=True)
    # A seed that has only begun doesn't count.
    runs = [run for run in config["runs"] if seed_of(run) in last] or config["runs"]
    row["seeds"] = ", ".join(seed_of(run) for run in runs)
    row["steps"] = ", ".join(str(step) for step in sorted({last_step(run) for run in runs}))
    row["before"] = accuracy_text(config, runs, after=False)
    row["after"] = accuracy_text(config, runs, after=True)
    if last:
        row["problems"] = str(len(problem_means(last.values())))
    if len(last) > 1:
        means = [mean_and_error(scores_of(record))[0] for record in last.values()]
        _, error = mean_and_error(means)
        row["seed-error"] = f"{error:.3f}"
    if config is not first and not obstacle(first, config):
        row |= comparison_texts(compare(first, config))
    row["seconds"] = f"{sum(seconds_of(run) for run in runs):.0f}"
    args = runs[0]["args"]
    if isinstance(args.get("versions"), dict):
        row |= {name: str(args["versions"].get(name, "-")) for name in ("torch", "transformers")}
    row["device"] = text_of(args.get("device_name", "-"))
    return row


def comparison_texts(result):
    """The cells of a row that hold a comparison."""
    difference = f"{result['difference']:+z.3f}"
    if result["interval"]:
        low, high = result["interval"]
        difference += f" ({low:+z.3f} to {high:+z.3f})"
    texts = {"difference": difference}
    texts["won-lost"] = f"{result['won']}, {result['lost']}"
    texts["sign-test"] = "p < 0.001" if result["p"] < 0.001 else f"p = {result['p']:.3f}"
    if len(result["per_seed"]) > 1:
        per_seed = [f"{x:+z.3f} (seed {seed})" for seed, x in result["per_seed"].items()]
        texts["per-seed"] = ", ".join(per_seed)
        texts["over-seeds"] = plus_minus(*result["over_seeds"], "+")
    return texts


def notes_on(configs, columns):
    """What these columns of the comparison mean, and what isn't compared and why."""
    first, *others = configs
    compared = [config for config in others if not obstacle(first, config)]
    several_seeds = any(len(evaluated(config, after=True)) > 1 for config in configs)
    if COMPARING.isdisjoint(columns):
        compared = []
    notes = [PAIRED_NOTE] if compared else []
    if compared and ("won-lost" in columns or "sign-test" in columns):
        notes.append(TEST_NOTE)
        if several_seeds:
            notes.append(SEVERAL_SEEDS_TEST_NOTE)
        for config in compared:
            result = compare(first, config)
            if not several_seeds and result["won"] + result["lost"] < 10:
                notes.append(FEW_NOTE.format(config["label"], result["won"], result["lost"]))
    if several_seeds:
        notes.append(SEVERAL_SEEDS_NOTE)
        if compared and "over-seeds" in columns:
            notes.append(OVER_SEEDS_NOTE)
    elif compared:
        notes.append(ONE_SEED_NOTE)
    for config in others:
        if obstacle(first, config):
            notes.append(f"Not compared: {config['label']}, because {obstacle(first, config)}.")
    for config in compared:
        one, two = first_reward(first), first_reward(config)
        if one != two:
            notes.append(f"{config['label']}: the accuracy is that of {two}, in the first {one}.")
        elif first["settings"].get("task") != config["settings"].get("task"):
            notes.append(
                f"{config['label']}: another task than the first one's. Do both have the same {one}? "
                "Else their accuracies don't compare."
            )
        if set(evaluated(first, True)) != set(evaluated(config, True)) and several_seeds:
            notes.append(
                f"{config['label']}: other seeds than the first, so no difference per seed."
            )
    for config in configs:
        last = evaluated(config, after=True)
        waiting = [seed_of(run) for run in config["runs"] if seed_of(run) not in last]
        if last and waiting:
            seeds = ", ".join(waiting)
            notes.append(f"{config['label']}: seed {seeds} is left out, without an evaluation yet.")
        for run in config["runs"]:
            step, end = last_step(run), run["args"].get("num_steps")
            if seed_of(run) in last and is_number(end) and step < end:
                seed = f"{config['label']}: seed {seed_of(run)}"
                notes.append(
                    f"{seed} isn't finished. Its last evaluation is after step {step} of {end}."
                )
    seeds = ", ".join(shared_seeds(configs))
    if seeds:
        notes.append(SHARED_NOTE.format(seeds))
    if "seconds" in columns:
        notes.append(SECONDS_NOTE)
    return notes


def first_reward(config):
    """The name of the reward whose mean is the accuracy."""
    rewards = config["runs"][0]["args"].get("rewards")
    return text_of(rewards[0]) if isinstance(rewards, list) and rewards else "?"


def shared_seeds(configs):
    """The seeds with which several configurations draw the same first samples of the same prompts."""
    names = ("data", "dataset", "num_prompts", "num_generations", "model", "temperature")
    counts = Counter()
    for config in configs:
        order = [config["settings"].get(name) for name in names]
        for run in config["runs"]:
            counts[(seed_of(run), *order)] += 1
    return list(dict.fromkeys(key[0] for key, count in counts.items() if count > 1))


def comparison(configs):
    """The columns that have an entry, and for each configuration a row, {column: text}."""
    rows = [row_of(configs[0], config) for config in configs]
    return [name for name in COLUMNS if any(row[name] != "-" for row in rows)], rows


# ---- names for a paper


def flags_of(config, configs):
    """The flags of a configuration that have another value elsewhere, without their hyphens."""
    words = []
    for name in differing(configs):
        values = {other["settings"][name] for other in configs if name in other["settings"]}
        if name not in config["settings"] or name in NOT_FLAGS or len(values) == 1:
            continue
        if name.endswith(".py"):
            continue
        value = config["runs"][0]["args"][name]
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"no-{flag}")
        else:
            text = text_of(value)
            if text.startswith("/"):  # a paper doesn't say where files are on this disk
                text = text.rpartition("/")[2]
            words.append(f"{flag} {cut(text, 40)}")
    return words


def names_for_paper(configs):
    """What differs between the configurations: the script, the flags, or else the runs."""
    scripts = {config["settings"]["script"] for config in configs}
    names = []
    for config in configs:
        words = flags_of(config, configs)
        if len(scripts) > 1 or not words:
            words.insert(0, config["settings"]["script"])
        names.append(", ".join(words))
    unique = []
    for config, name in zip(configs, names, strict=True):
        if names.count(name) > 1:
            # Something else differs, such as the code. So the runs' names tell them apart.
            name += f" ({', '.join(run['name'] for run in config['runs'])})"
        unique.append(name)
    return unique


def name_for_paper(configs, given):
    """Label the configurations with the given names, or else by what differs between them.

    (In the page, a label also has the script and the seeds.)
    """
    names = given or names_for_paper(configs)
    if len(names) != len(configs):
        found = "; ".join(config["label"] for config in configs)
        fail(f"--labels: {len(names)} names for {len(configs)} configurations: {found}")
    if len(set(names)) < len(names) or any(name.startswith("_") for name in names):
        fail("--labels: the names must differ, and matplotlib takes none that begins with _")
    for config, name in zip(configs, names, strict=True):
        config["label"] = name
        # Only a given name may have a formula, such as $\\beta = 0$.
        config["has_formula"] = bool(given) and "$" in name


# ---- a table for a paper


def columns_for_paper(columns, rows, wanted):
    """The columns for which a page has room, or the wanted ones. And what else all rows share."""
    same = [name for name in CONDITIONS if len({row[name] for row in rows}) == 1]
    if len(rows) == 1:  # these say something about a single row, too
        same = [name for name in same if name not in ("seeds", "before")]
    if wanted is None:
        wanted = [name for name in columns if name not in [*LEFT_OUT, *same]]
        if "over-seeds" in columns:  # it says more than these two
            wanted = [name for name in wanted if name not in ("sign-test", "seed-error")]
    same = [name for name in same if name in columns and name not in wanted]
    return wanted, [f"{COLUMNS[name]} {rows[0][name]}" for name in same]


def table_for_paper(configs, form, wanted=None):
    """The comparison as a table in Markdown or LaTeX, with the notes."""
    columns, rows = comparison(configs)
    columns, conditions = columns_for_paper(columns, rows, wanted)
    scripts = {config["settings"]["script"] for config in configs}
    if len(scripts) == 1:
        conditions = [*scripts, *conditions]
    table = [["configuration", *[COLUMNS[name] for name in columns]]]
    for config, row in zip(configs, rows, strict=True):
        table.append([config["label"], *[row[column] for column in columns]])
    # A line break would end a row or a comment.
    table = [[" ".join(cell.split()) for cell in row] for row in table]
    notes = [f"All rows: {'; '.join(conditions)}."] if conditions else []
    accuracies = [row[name] for row in rows for name in ("before", "after") if name in columns]
    if "±" in str([*conditions, *accuracies]):
        notes.append(ERROR_NOTE)
    notes = [" ".join(note.split()) for note in [*notes, *notes_on(configs, columns)]]
    formulas = [config["label"] for config in configs if config.get("has_formula")]
    if form == "latex":
        return latex(table, notes, formulas)
    return markdown(table, notes, formulas)


def markdown(table, notes, formulas):
    """A Markdown table, and the notes below it. Formulas are kept."""
    table = [[cell if cell in formulas else plain(cell) for cell in row] for row in table]
    table.insert(1, ["---"] * len(table[0]))
    return "\n".join([f"| {' | '.join(row)} |" for row in table] + ["", *notes])


def plain(text):
    """A text for Markdown."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def latex(table, notes, formulas):
    """A LaTeX tabular for the package booktabs, and the notes above it as comments."""
    table = [[cell if cell in formulas else tex(cell) for cell in row] for row in table]
    header, *rows = [f"{' & '.join(row)} \\\\" for row in table]
    begin = f"\\begin{{tabular}}{{@{{}}{'l' * len(table[0])}@{{}}}}"
    lines = [f"% {note}" for note in [*notes, r"In the preamble: \usepackage{booktabs}"]]
    lines += [begin, "\\toprule", header, "\\midrule", *rows, "\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines)


# The characters that TeX reads in its own way.
TEX = {x: f"\\{x}" for x in "&%$#_{}"}
TEX |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
TEX |= {"|": r"\textbar{}", "<": "$<$", ">": "$>$", "±": r"$\pm$", "…": r"\ldots{}"}


def tex(text):
    """A text for LaTeX. A number keeps its minus, and two hyphens don't become a dash."""
    text = "".join(TEX.get(x, x) for x in text)
    text = re.sub(r"(?<![\w-])-(?=\d)", "$-$", text)
    return re.sub("-(?=-)", "-{}", text)


# ---- a figure for a paper


def curves_of(config, metric, smooth):
    """The curve of each seed that has this metric: {seed: {step: value}}."""
    curves = {}
    for run in config["runs"]:
        pairs = series(run["metrics"], metric)
        if not metric.startswith("eval/"):
            steps, values = [step for step, _ in pairs], [value for _, value in pairs]
            parts = [values[max(0, k - smooth + 1) : k + 1] for k in range(len(values))]
            pairs = zip(steps, [sum(part) / len(part) for part in parts], strict=True)
        if curve := dict(pairs):
            curves[seed_of(run)] = curve
    return curves


def legend_label(config):
    """The label of a configuration in a legend, in lines of 48 characters."""
    text = config["label"]
    if not config.get("has_formula"):
        text = text.replace("$", r"\$")  # else matplotlib would read a formula
    return textwrap.fill(text, 48, break_on_hyphens=False)


def draw_panel(panel, configs, metric, smooth):
    """Draw a metric: for each configuration the mean of its seeds, and a band. Returns notes."""
    notes = []
    panel.set_ylabel(AXES.get(metric, metric))
    for k, config in enumerate(configs):
        curves = curves_of(config, metric, smooth)
        if not curves:
            notes.append(f"{config['label']}: no {metric}.")
            continue
        # Only steps that all seeds have: the mean would jump where a seed ends.
        steps = sorted(set.intersection(*map(set, curves.values())))
        values = [[curve[step] for curve in curves.values()] for step in steps]  # (steps, seeds)
        color = COLORS[k % len(COLORS)]
        panel.plot(
            steps,
            [sum(row) / len(row) for row in values],
            label=legend_label(config),
            color=color,
            linestyle=LINE_STYLES[k % len(LINE_STYLES)],
            marker=MARKERS[k % len(MARKERS)],
            markevery=marked_points(k, len(configs), len(steps)),
        )
        if len(curves) > 1:
            lowest, highest = [min(row) for row in values], [max(row) for row in values]
            panel.fill_between(steps, lowest, highest, color=color, alpha=0.2, linewidth=0)
        for seed in map(seed_of, config["runs"]):
            if seed not in curves:
                notes.append(f"{config['label']}: seed {seed} has no {metric} yet.")
        most = max(map(len, curves.values()))
        if len(steps) < most:
            some = f"{len(steps)} of {most} steps, which all seeds have"
            notes.append(f"{config['label']}: {metric} is drawn at {some}.")
    return notes


def marked_points(k, num_curves, num_points):
    """The first point with a marker, and the distance to the next, for the k-th curve.

    Curves that lie on each other have their markers at different points.
    """
    between = max(1, num_points // 8)
    return k * between // num_curves, between


def figure_for_paper(configs, metrics, width, smooth, out):
    """Write a figure with a panel for each metric. Returns it, and notes for its caption."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    in_a_row = min(len(metrics), max(1, int(width / PANEL_WIDTH)))
    rows = math.ceil(len(metrics) / in_a_row)
    labels = [legend_label(config) for config in configs]
    columns = in_a_row * (2 if max(map(len, labels)) <= 14 else 1)
    lines = sum(label.count("\n") + 1 for label in labels) / columns
    height = PANEL_HEIGHT * rows + 0.16 * lines + 0.3
    style = {"font.size": 8, "lines.linewidth": 1.2, "lines.markersize": 3.5, "axes.grid": True}
    style |= {"grid.alpha": 0.3, "grid.linewidth": 0.5, "axes.linewidth": 0.6}
    # Type 42 are fonts that conferences accept. Matplotlib's own choice is Type 3.
    style |= {"pdf.fonttype": 42, "ps.fonttype": 42, "savefig.dpi": 300}
    notes, handles = [], {}
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, in_a_row, sharex=True, squeeze=False)
        panels = grid.flatten()[: len(metrics)]
        for panel in grid.flatten()[len(metrics) :]:
            panel.remove()
        for panel, metric in zip(panels, metrics, strict=True):
            notes += draw_panel(panel, configs, metric, smooth)
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        for panel in panels[-in_a_row:]:
            panel.set_xlabel("step")
            panel.tick_params(labelbottom=True)
            panel.locator_params(axis="x", integer=True)
        shape = {"loc": "outside lower center", "ncols": columns, "handlelength": 3.5}
        figure.legend(handles.values(), handles, frameon=False, **shape)
        figure.savefig(out)
    caption = []
    if any(panel.collections for panel in panels):
        caption.append("Lines are means over seeds. Bands go from the lowest to the highest seed.")
    smoothed = [metric for metric in metrics if not metric.startswith("eval/")]
    if smooth > 1 and smoothed:
        smoothed = ", ".join(smoothed)
        caption.append(f"{smoothed}: for each seed the mean of the last {smooth} steps.")
    return figure, caption + notes


def block(name, data):
    """Data inside the page. The data have no "<", so no text of a model can end the block."""
    text = json.dumps(data).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def find_runs(paths):
    """The folders of runs among these paths, and in those folders that aren't runs themselves.

    Files are left out: runs/* includes an earlier report. Ends the program if there is no run.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        fail(f"not a folder: {' '.join(missing)}")
    folders = []
    for path in paths:
        if is_run(path):
            folders.append(path)
        elif path.is_dir():
            folders += sorted(folder for folder in path.iterdir() if is_run(folder))
    if not folders:
        given = " ".join(str(path) for path in paths) or "nothing"
        fail(f"no run in {given}; give folders of runs, such as runs/<name>, or runs")
    return folders


def is_run(path):
    return any((path / name).is_file() for name in ("args.json", "metrics.jsonl", "samples.jsonl"))


def fail(message):
    """End the program with one line, status 2 and no traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def page_data(runs):
    """What the page shows of the runs, besides their samples."""
    configs = configurations(runs)
    data = {"runs": [], "arms": [], "compared": None, "first": FIRST, "broken": BROKEN}
    data["note"] = ERROR_NOTE if any(run["evaluations"] for run in runs) else ""
    for run in runs:
        shown = {name: run[name] for name in ("name", "args", "metrics", "marks", "gaps")}
        if run["evaluations"]:
            scores = [scores_of(record) for record in run["evaluations"]]
            shown["first"] = plus_minus(mean_and_error(scores[0])[0], None)
            shown["last"] = f"{plus_minus(*mean_and_error(scores[-1]))} (n = {len(scores[-1])})"
        data["runs"].append(shown)
    for config in configs:
        places = [k for k, run in enumerate(runs) if any(run is one for one in config["runs"])]
        data["arms"].append(config | {"runs": places})
    if len(configs) > 1 and data["note"]:
        columns, rows = comparison(configs)
        header = ["", *[config["label"] for config in configs]]
        # The page has a column for each configuration.
        cells = [[COLUMNS[name], *[row[name] for row in rows]] for name in columns]
        notes = notes_on(configs, columns)
        data["compared"] = {"header": header, "rows": cells, "notes": notes}
    return data


def write_figure(runs, configs, metrics, width, smooth, out):
    """Write the figure, and print its file and the notes."""
    if out.suffix not in FORMATS:
        fail(f"--out {out}: a figure is one of {', '.join(FORMATS)}")
    known = {name for run in runs for record in run["metrics"] for name in record if "/" in name}
    for metric in metrics:
        if metric not in known:
            fail(f"--figure {metric}: no run has it; the metrics are {', '.join(sorted(known))}")
    try:
        _, notes = figure_for_paper(configs, metrics, width, smooth, out)
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    except ValueError as error:  # a formula in a label that matplotlib can't read
        fail(f"--figure: {' '.join(str(error).split())}")
    print(out, *notes, sep="\n")


def main(args: Args) -> Path | None:
    """Write the page, and return its path. With --table or --figure, make these instead."""
    is_page = args.table is None and args.figure is None
    needs = "plotly" if is_page else "matplotlib"
    try:
        if is_page:
            from plotly.offline import get_plotlyjs
        elif args.figure is not None:
            import matplotlib  # noqa: F401
    except ImportError:
        fail(f"report.py draws with {needs}: pip install -r report/requirements.txt")
    if args.smooth < 1 or args.width < 1:
        fail("--smooth and --width must be at least 1")
    if args.columns is not None and args.table is None:
        fail("--columns chooses the columns of a table: add --table")
    if args.columns == []:
        fail("--columns needs the name of a column")
    if args.labels and is_page:
        fail("--labels names what a table or a figure shows: add --table or --figure")
    if args.out and args.table is not None and args.figure is None:
        fail("--out: a table is printed; write it to a file with > FILE")
    folders = list(dict.fromkeys(folder.resolve() for folder in find_runs(args.runs)))
    home = Path(os.path.commonpath(folders))
    runs = [read_run(folder, str(folder.relative_to(home.parent))) for folder in folders]
    if not is_page:
        configs = configurations(runs)
        name_for_paper(configs, args.labels)
        if args.table is not None:
            for form in args.table or ["markdown"]:
                print(table_for_paper(configs, form, args.columns))
        if args.figure is not None:
            metrics = args.figure or ["eval/accuracy", "rollout/reward_mean"]
            out = args.out or home / "figure.pdf"
            write_figure(runs, configs, metrics, args.width, args.smooth, out)
        return None
    blocks = [block(f"samples-{k}", run["samples"]) for k, run in enumerate(runs)]
    blocks.append(block("data", page_data(runs)))
    page = PAGE.read_text(encoding="utf-8").replace("<!-- data -->", "".join(blocks))
    out = args.out or home / "report.html"
    try:
        out.write_text(page.replace("<!-- plotly -->", get_plotlyjs()), encoding="utf-8")
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    print(out)
    return out


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
