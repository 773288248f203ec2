"""Compare the losses on assets/sums: the runs, a table, and the picture of variants/README.md.

    pip install -r benchmark/requirements.txt
    python benchmark/variants.py           make the missing runs, print the table, and draw the picture
    python benchmark/variants.py --draw    only print and draw the records; groups with missing runs are left out

Every script trains for 30 steps, on 128 responses per step. The runs form three groups, because some losses differ from
grpo.py only if a rollout is used for many updates, or only if the sampler is not the policy:

    one update     one update per rollout, sampled by the policy itself
    eight updates  eight updates per rollout, sampled by the policy itself
    stale sampler  eight updates per rollout, sampled by the policy of up to seven steps ago

Each script runs with two learning rates on seed 1. The rate with the higher sampled accuracy in the last ten steps then
runs on seeds 2 and 3. Two runs go at a time, each on one thread. benchmark/records/variants-sums.jsonl gets a line for
each run.

In one group, the runs of one seed get the same problems at the same step. So the table compares each script with the
first script of its group seed by seed, and the difficulty of the problems drops out. dapo.py is an exception: it
samples more responses than it trains on, so its problems differ.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from pictures import GRAY, digest, panels, save
from shared import (
    FOLDER,
    ROOT,
    command_line,
    in_place,
    machine,
    provenance,
    python,
    read,
    read_run,
    run_two_at_a_time,
    table,
)

RECORDS = FOLDER / "variants-sums.jsonl"
PICTURE = ROOT / "variants" / "sums.svg"
SEEDS = (1, 2, 3)
STEPS, LAST = 30, 10  # the table is about the last ten steps
COMMON = "--model assets/sums/student --dataset assets/sums --no-examples --no-gradient-checkpointing"
COMMON += f" --eval-every 0 --eval-size 200 --num-steps {STEPS} --device cpu"
# Group: (flags, learning rates, names). A name is the script, and may have more words behind it. The table compares the
# others with the first one.
GROUPS = {
    "one update": (
        "--num-minibatches 1",
        ("5e-5", "1.5e-4"),
        "grpo dr_grpo dapo rloo reinforce_pp gdpo clip_cov".split(),
    ),
    "eight updates": (
        "--num-minibatches 8",
        ("1.5e-5", "5e-5"),
        "grpo dr_grpo dapo gspo rloo cispo dppo sapo gmpo vespo mdpo".split() + ["p3o", "grpo with a KL"],
    ),
    "stale sampler": (
        "--num-minibatches 8 --staleness 8",
        ("1.5e-5", "5e-5"),
        "grpo_offpolicy geo_mask icepop kimi_kl opsm".split(),
    ),
}
# The formula of p3o has a KL. So rloo, its parent, keeps its KL in their group, too, and a second run of grpo shows
# what a KL changes.
WITH_KL = {"rloo", "p3o", "grpo with a KL"}
# The metrics of a record. Some losses don't clip.
KEPT = ["episodes", "rollout/accuracy", "rollout/response_len"]
KEPT += ["policy/clip_frac", "policy/approx_kl"]


def script_of(name: str) -> str:
    return name.split()[0]


def command_of(group: str, name: str, rate: str, seed: int) -> str:
    flags = GROUPS[group][0]
    # dapo.py has no KL, and so no --beta.
    if name != "dapo" and (group != "eight updates" or name not in WITH_KL):
        flags += " --beta 0"
    return f"{script_of(name)}.py {COMMON} {flags} --learning-rate {rate} --seed {seed}"


def run(group: str, script: str, rate: str, seed: int, source: dict) -> dict:
    """Train with one script in a temporary folder, and return the record, with `source` as its provenance."""
    command = command_of(group, script, rate, seed)
    with tempfile.TemporaryDirectory() as folder:
        seconds = python(f"{command} --runs-dir {folder} --run-name run")
        metrics, _ = read_run(Path(folder, "run"))
    record = dict(group=group, script=script, rate=rate, seed=seed, command=command)
    # The machine after the run, instead of the one in `source`.
    record |= {"seconds": round(seconds, 1), **source, "machine": machine()}
    record["held_out"] = metrics[-1]["eval/accuracy"]
    for name in KEPT:
        if name in metrics[-1]:
            # One number for each step, with four significant digits.
            record[name] = [float(f"{line[name]:.4g}") for line in metrics[1:]]
    return record


def key(record: dict) -> tuple:
    return record["group"], record["script"], record["rate"], record["seed"]


def last_accuracy(record: dict) -> float:
    """Sampled accuracy in percent, the mean of the last ten steps."""
    return 100 * float(np.mean(record["rollout/accuracy"][-LAST:]))


def better_rate(records: dict, group: str, script: str) -> str | None:
    """The learning rate that was better on seed 1, or None if a run is missing."""
    rates = GROUPS[group][1]
    if any((group, script, rate, SEEDS[0]) not in records for rate in rates):
        return None
    return max(rates, key=lambda rate: last_accuracy(records[group, script, rate, SEEDS[0]]))


def missing_runs(records: dict) -> list[tuple]:
    """The runs that can be made now: both rates on seed 1, then the better rate on the other seeds."""
    wanted = []
    for group, (_, rates, scripts) in GROUPS.items():
        for script in scripts:
            wanted += [(group, script, rate, SEEDS[0]) for rate in rates]
            rate = better_rate(records, group, script)
            if rate is not None:
                wanted += [(group, script, rate, seed) for seed in SEEDS[1:]]
    return [arguments for arguments in wanted if arguments not in records]


def finished_groups(records: dict) -> list[str]:
    """The groups whose runs are all recorded."""
    unfinished = {group for group, *_ in missing_runs(records)}
    return [group for group in GROUPS if group not in unfinished]


def run_missing() -> None:
    """Make the missing runs, two at a time, and append each record at the end of its run."""
    scripts = {script_of(name) for _, _, names in GROUPS.values() for name in names}
    # Asked before the scripts of the patches are made, which would count as changes.
    source = provenance()
    with in_place(scripts):
        while missing := missing_runs(read_records()):
            run_two_at_a_time(partial(run, source=source), missing, RECORDS)


def read_records() -> dict:
    """(group, script, rate, seed) -> record."""
    return {key(record): record for record in read(RECORDS)}


def best_runs(records: dict, group: str, script: str) -> list[dict]:
    """The script's records with its better rate, one for each seed."""
    rate = better_rate(records, group, script)
    return [records[group, script, rate, seed] for seed in SEEDS]


def differences(records: dict, group: str, script: str) -> np.ndarray:
    """For each seed, the script's sampled accuracy minus that of the group's first script, in points: (seeds,)."""
    first = GROUPS[group][2][0]
    mine, theirs = [[last_accuracy(record) for record in best_runs(records, group, name)] for name in (script, first)]
    return np.array(mine) - np.array(theirs)


def standard_error(records: dict, group: str) -> float:
    """The standard error of a script's mean difference over the seeds, in points.

    Three seeds are too few to estimate a variance for each script. So it is pooled: the mean of the variances of all
    scripts of the group.
    """
    _, *others = GROUPS[group][2]
    variances = [differences(records, group, script).var(ddof=1) for script in others]
    return float(np.sqrt(np.mean(variances) / len(SEEDS)))


def told_apart(by_seed: np.ndarray, error: float) -> str:
    """Return "ahead", "behind" or "no", given each seed's difference and the standard error of their mean.

    "ahead" and "behind" mean that all seeds agree, and that the mean is more than three errors from 0.
    """
    mean = by_seed.mean()
    if abs(mean) <= 3 * error or (np.sign(by_seed) != np.sign(mean)).any():
        return "no"
    return "ahead" if mean > 0 else "behind"


def results_table(records: dict) -> str:
    """One row a script, best first in its group."""
    rows = []
    for group in finished_groups(records):
        first, *others = GROUPS[group][2]
        error = standard_error(records, group)
        found = []  # (mean sampled accuracy, cells) of each script
        for script in (first, *others):
            mine = best_runs(records, group, script)
            sampled = np.mean([last_accuracy(record) for record in mine])
            cells = [group, script, mine[0]["rate"], f"{sampled:.1f}", "", ""]
            if script != first:
                seeds = differences(records, group, script)
                lowest_to_highest = f"({seeds.min():+.1f} to {seeds.max():+.1f})"
                cells[4] = f"{seeds.mean():+.1f} ± {error:.1f} {lowest_to_highest}"
                cells[5] = told_apart(seeds, error)
            found.append((sampled, cells))
        rows += [cells for _, cells in sorted(found, key=lambda pair: -pair[0])]
    return table(["", "script", "rate", "sampled, %", "minus grpo, points", "told apart"], rows)


def draw(records: dict) -> None:
    """Draw a panel for each group, with the difference to the first script, its seeds, and three standard errors."""
    groups = finished_groups(records)
    most = max(len(GROUPS[group][2]) for group in groups)
    figure, axes = panels(1, len(groups), figsize=(4.2 * len(groups), 1.1 + 0.33 * most))
    for ax, group in zip(axes.flat, groups, strict=True):
        first, *others = GROUPS[group][2]
        others.sort(key=lambda script: differences(records, group, script).mean())
        error = standard_error(records, group)
        for height, script in enumerate(others):
            seeds = differences(records, group, script)
            color = {"ahead": "C2", "behind": "C3", "no": GRAY}[told_apart(seeds, error)]
            ax.errorbar(seeds.mean(), height, xerr=3 * error, color=color, marker="s", capsize=3)
            ax.plot(seeds, [height] * len(SEEDS), ".", color=color, alpha=0.6)
        ax.axvline(0, color=GRAY, linewidth=1)
        ax.set_yticks(range(len(others)), others)
        ax.set_title(group, fontsize=13)
        ax.set_xlabel(f"minus {first}.py, points")
    save(figure, PICTURE, drawn_from(records))


def drawn_from(records: dict) -> str:
    """The name of these records that the picture contains."""
    return digest([records[name] for name in sorted(records)])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--draw", action="store_true", help="make no runs; draw from the records")
    args = parser.parse_args()
    if not args.draw:
        run_missing()
    records = read_records()
    for group in GROUPS:
        if group not in finished_groups(records):
            print(f"{group}: runs are missing, so the table and the picture leave this group out")
    draw(records)
    print(results_table(records))


if __name__ == "__main__":
    main()
