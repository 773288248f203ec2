"""Write the tables of README.md and variants/README.md from the records: python benchmark/readme.py

It reads these records: bundled.jsonl, bundled-sums.jsonl and variants.jsonl, which bundled.py writes, trl-learn.jsonl,
and trl-cpu.txt, which compare_trl.py prints. It also draws the picture of trl-learn.jsonl, and README's first picture,
which shows three lessons. The tables stand between <!-- name --> and <!-- end name -->. tests/test_docs.py checks that
tables and pictures match the records.
"""

import re
import sys

import lessons
import numpy as np
from learn_trl import draw as draw_learning
from learn_trl import to_reach
from pictures import WINDOW, digest, panels, save
from records import FOLDER, ROOT, fill, read, spread, table

sys.path.insert(0, str(ROOT / "tools"))

from scripts import SCRIPTS  # noqa: E402

PICTURES = {name: FOLDER / f"{name}.svg" for name in ("apart", "trl-learn")}
RATES = ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3")
# The panels of the first picture: title, lesson, arms and (x, y).
APART = [
    (
        "grpo_lora.py: adapters",
        16,
        [f"{name}, {rate}" for name in ("rank 1", "rank 64", "full") for rate in RATES],
        (lessons.RATE, lessons.ACCURACY),
    ),
    (
        "distill.py: a teacher",
        18,
        ["distilled, 16", "GRPO, 16"],
        (lessons.SAMPLED, lessons.ACCURACY),
    ),
    (
        "grpo_tools.py: a tool",
        19,
        ["a call is free", "a call costs 0.1"],
        (lessons.SAMPLED, "tool/calls"),
    ),
]
WORKLOADS = {
    "W1": "assets/adder, 16 x 8 samples of at most 32 tokens",
    "W2": "a 260 K story model, 16 x 8 samples of 5 to 384 tokens",
    "W3": "SmolLM2-135M's shape, random weights, 4 x 4 samples of 64 tokens",
}


def chosen_records(number: int, arms: list[str]) -> dict[str, list[dict]]:
    return {arm: runs for arm, runs in lessons.records_of(number).items() if arm in arms}


def records_of(name: str) -> list[dict]:
    if name == "apart":
        chosen = [chosen_records(number, arms) for _, number, arms, _ in APART]
        return [run for records in chosen for runs in records.values() for run in runs]
    return read(FOLDER / f"{name}.jsonl")


def bundled_table() -> str:
    records, rows = records_of("bundled"), []
    for script in SCRIPTS:
        mine = [record for record in records if record["script"] == script]
        if not mine:
            continue
        row = [f"{script}.py", f"{100 * mine[0]['accuracy'][0]:.1f}"]
        row += [
            spread([100 * record[name][1] for record in mine], 1)
            for name in ("accuracy", "accuracy_lenient")
        ]
        row += [
            spread([record["seconds"] for record in mine]),
            spread([1000 * r["peak_mem_gb"] for r in mine]),
        ]
        rows.append(row)
    return table(
        ["script", "before, %", "after, strict, %", "after, lenient, %", "seconds", "peak MB"], rows
    )


def learning_table() -> str:
    records, rows = records_of("trl-learn"), []
    for name in ("grpo", "rloo"):
        for side in ("PlainRL", "TRL"):
            mine = [
                record for record in records if (record["name"], record["side"]) == (name, side)
            ]
            last = [100 * float(np.mean(record["accuracy"][-WINDOW:])) for record in mine]
            reached = [spread([to_reach(record)[k] for record in mine]) for k in (0, 1)]
            who = f"{name}.py" if side == "PlainRL" else f"{name.upper()}Trainer of TRL 1.16"
            rows.append([who, spread(last, 1), *reached, spread([r["memory"] / 1e6 for r in mine])])
    header = ["", "right, last five steps, %", "seconds to 90 %", "responses to 90 %", "peak MB"]
    return table(header, rows)


def speed_table() -> str:
    rows = []
    for part in (FOLDER / "trl-cpu.txt").read_text(encoding="utf-8").split("$ python ")[1:]:
        name = re.search(r"--workload (W\d)", part)[1]
        sides = [
            re.search(rf"^{side} +(.*)$", part, re.MULTILINE)[1].split()
            for side in ("plainrl", "trl")
        ]
        (seconds, memory), (their_seconds, their_memory) = [
            (float(row[0]), float(row[-1]) / 1e3) for row in sides
        ]
        digits = 2 if seconds < 1 else 1
        row = [f"{name}: {WORKLOADS[name]}", f"{seconds:.{digits}f} s, {memory:.2f} GB"]
        row += [f"{their_seconds:.{digits}f} s, {their_memory:.2f} GB"]
        rows.append([*row, f"{their_seconds / seconds:.2f}x", f"{memory / their_memory:.2f}x"])
    return table(["workload", "grpo.py", "TRL 1.16", "speed", "memory"], rows)


def sums_table() -> str:
    """For each seed of grpo.py on assets/sums: sampled accuracy as means of ten steps, and greedy held-out accuracy."""
    records = records_of("bundled-sums")
    ends = [step for step, _ in records[0]["held_out"]]
    header = ["seed"] + [f"sampled, steps to {end}, %" for end in (10, *ends[1:])]
    header += [f"greedy, step {end}, %" for end in ends] + ["tokens"]
    rows = []
    for record in records:
        row = [str(record["seed"])]
        for end in (10, *ends[1:]):
            row.append(f"{100 * np.mean(record['sampled_accuracy'][end - 10 : end]):.0f}")
        row += [f"{100 * accuracy:.0f}" for _, accuracy in record["held_out"]]
        row.append(f"{np.mean(record['response_len']):.0f}")
        rows.append(row)
    return table(header, rows)


def variants_table() -> str:
    records, rows = records_of("variants"), []
    for name in sorted({record["script"] for record in records}):
        mine = [record for record in records if record["script"] == name]
        last = [100 * float(np.mean(record["sampled_accuracy"][-WINDOW:])) for record in mine]
        reached = ", ".join(f"{100 * record['accuracy'][1]:.1f}" for record in mine)
        rows.append([name, reached, spread(last, 1)])
    return table(["variant", "held out, %, seeds 1, 2, 3", "sampled, last five steps, %"], rows)


TABLES = {
    "bundled": bundled_table,
    "sums": sums_table,
    "speed": speed_table,
    "learning": learning_table,
}


def draw_apart() -> None:
    figure, axes = panels(1, len(APART), figsize=(12, 4.4))
    for ax, (title, number, arms, (x, y)) in zip(axes.flat, APART, strict=True):
        if x == lessons.RATE:
            lessons.draw_rates(ax, chosen_records(number, arms), y)
        else:
            lessons.draw_curve(ax, chosen_records(number, arms), x, y)
        lessons.name_axes(ax, x, y)
        ax.set_title(title, fontsize=12)
        ax.legend(fontsize=11)
    save(figure, PICTURES["apart"], digest(records_of("apart")))


def main() -> None:
    for name, make in TABLES.items():
        fill(ROOT / "README.md", name, make())
    fill(ROOT / "variants" / "README.md", "variants", variants_table())
    draw_apart()
    draw_learning(records_of("trl-learn"))


if __name__ == "__main__":
    main()
