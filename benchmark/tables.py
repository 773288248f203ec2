"""The tables of README.md and docs/measurements.md, from the records.

    python benchmark/tables.py                 README.md, docs/measurements.md
    python benchmark/tables.py --transcript    also run grpo.py, and record what it prints

It reads these records: bundled.jsonl and bundled-sums.jsonl, which bundled.py writes, trl-speed.jsonl, which
compare_trl.py writes, and transcript.txt. The tables stand between <!-- name --> and <!-- end name -->.
tests/test_docs.py checks that they match the records.
"""

import os
import subprocess
import sys

import numpy as np

from shared import FOLDER, ROOT, fill, read, spread, table

sys.path.insert(0, str(ROOT / "tools"))

from scripts import SCRIPTS  # noqa: E402

TRANSCRIPT = FOLDER / "transcript.txt"
HOME = "/home/you/PlainRL"  # the project's folder in the transcript
WORKLOADS = {
    "W1": "assets/addition/adder, 16 x 8 samples of at most 32 tokens",
    "W2": "a 260 K story model, 16 x 8 samples of 5 to 384 tokens",
    "W3": "SmolLM2-135M's shape, random weights, 4 x 4 samples of 64 tokens",
    "W5": "SmolLM2-135M-Instruct, GSM8K in the default prompt, 4 x 8 samples of at most 128 tokens",
}


def records_of(name: str) -> list[dict]:
    return read(FOLDER / f"{name}.jsonl")


def bundled_table() -> str:
    records, rows = records_of("bundled"), []
    for script in SCRIPTS:
        mine = [record for record in records if record["script"] == script]
        row = [f"{script}.py", f"{100 * mine[0]['accuracy'][0]:.1f}"]
        row.append(spread([100 * record["accuracy"][1] for record in mine], 1))
        row.append(spread([record["seconds"] for record in mine]))
        row.append(spread([1000 * record["peak_mem_gb"] for record in mine]))
        rows.append(row)
    return table(["script", "before, %", "after, %", "seconds", "peak MB"], rows)


def speed_table() -> str:
    rows = []
    for record in records_of("trl-speed"):
        name = record["workload"]
        # W4 needs a GPU. The page has the measurements on a CPU.
        if name not in WORKLOADS:
            continue
        theirs = record["trl"]
        for side, title in (("grpo", WORKLOADS[name]), ("shared_prompts", "with shared_prompts")):
            if side not in record:
                continue
            mine = record[side]
            digits = 2 if mine["seconds"] < 1 else 1
            row = [f"{name}: {title}"]
            for numbers in (mine, theirs):
                seconds, memory = numbers["seconds"], numbers["memory_mb"] / 1e3
                row.append(f"{seconds:.{digits}f} s, {memory:.2f} GB")
            row.append(f"{theirs['seconds'] / mine['seconds']:.2f}x")
            row.append(f"{mine['memory_mb'] / theirs['memory_mb']:.2f}x")
            rows.append(row)
    return table(["workload", "grpo.py", "TRL 1.16", "speed", "memory"], rows)


def sums_table() -> str:
    """For each seed of grpo.py on assets/sums: sampled accuracy as means of ten steps, and greedy held-out accuracy."""
    records = records_of("bundled-sums")
    ends = [step for step, _ in records[0]["held_out"]]
    header = ["seed"] + [f"sampled, steps {end - 9} to {end}, %" for end in (10, *ends[1:])]
    header += [f"greedy, step {end}, %" for end in ends]
    rows = []
    for record in records:
        sampled = np.array(record["sampled_accuracy"])
        means = [sampled[end - 10 : end].mean() for end in (10, *ends[1:])]
        greedy = [accuracy for _, accuracy in record["held_out"]]
        rows.append([str(record["seed"]), *(f"{100 * share:.0f}" for share in means + greedy)])
    return table(header, rows)


def record_transcript() -> None:
    """Run `python grpo.py` with one thread, and record what it prints."""
    result = subprocess.run(
        [sys.executable, "grpo.py", "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    TRANSCRIPT.write_text(result.stdout.replace(str(ROOT), HOME), encoding="utf-8")


def short_transcript() -> str:
    """The evaluation before, the first and the last step with a sample each, and the accuracy after."""
    lines = TRANSCRIPT.read_text(encoding="utf-8").splitlines()
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    first, last = steps[0], steps[-1]
    chosen = ["...", *lines[first - 2 : first + 2], "...", *lines[last:]]
    return "```\n" + "\n".join(chosen) + "\n```\n"


# The name of the block -> the page that it stands on, and what makes it.
BLOCKS = {
    "transcript": ("README.md", short_transcript),
    "bundled": ("docs/measurements.md", bundled_table),
    "sums": ("docs/measurements.md", sums_table),
    "speed": ("docs/measurements.md", speed_table),
}


def main() -> None:
    if "--transcript" in sys.argv:
        record_transcript()
    for name, (page, make) in BLOCKS.items():
        fill(ROOT / page, name, make())


if __name__ == "__main__":
    main()
