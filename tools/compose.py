"""Find out which differences compose: put the difference of one script from grpo.py on another script.

    python tools/compose.py            print what happens with each pair
    python tools/compose.py --train    also train each pair that composes for two steps
    python tools/compose.py --write    also write the table in docs/extend.md

It needs GNU patch. A pair composes under these conditions:

1. patch rejects hunks of the docstring alone, and puts every other hunk at its place.
2. The composed script is valid Python and has no undefined names.
3. The composed script does what both scripts say.

The program checks the first two conditions. If the table has a new pair, check the third one: read the composed
script, train it with --train, and add the pair to WRONG if it doesn't do what both scripts say.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT, SCRIPTS, parent_of
from siblings import replace_between

PAGE = "docs/extend.md"
START, END = "<!-- compose -->", "<!-- end compose -->"
TARGETS = [name for name in SCRIPTS if parent_of(name) == "grpo"]
VARIANTS = [
    path.stem
    for path in sorted((ROOT / "variants").glob("*.diff"))
    if path.read_text(encoding="utf-8").startswith("--- grpo.py\n")
]
DIFFERENCES = TARGETS + VARIANTS
# One line of context. With diff's three lines, patch rejects many hunks because of a line nearby.
CONTEXT = "-U1"
# Pairs (difference, target) that pass the first two conditions, and not the third one.
ONE_ADVANTAGE = (
    "gspo.py and gmpo.py use the first token's advantage for the whole response, so it no longer "
    "matters which step was right."
)
WRONG = {
    ("gspo", "grpo_process"): ONE_ADVANTAGE,
    ("grpo_process", "gspo"): ONE_ADVANTAGE,
    ("gmpo", "grpo_process"): ONE_ADVANTAGE,
    ("reinforce_pp", "grpo_process"): (
        "grpo_process.py normalizes one group at a time, so the std is still that of the group."
    ),
    ("reinforce_pp", "dapo"): (
        "The std is that of all sampled groups. It includes the groups that dapo.py drops."
    ),
    ("gdpo", "grpo_tools"): "The advantages leave out --tool-cost.",
    ("clip_cov", "grpo_multigpu"): (
        "It stops in the first update. Its new call of rollout_logprobs needs policy, not model."
    ),
    ("distill", "grpo_tools"): (
        "The bundled teacher and the bundled model have different vocabularies. --tool-cost has no "
        "effect, because distill.py doesn't train on rewards."
    ),
}


class Change(NamedTuple):
    """A hunk of a diff."""

    start: int  # its first line in the old file
    length: int  # its number of lines in the old file
    growth: int  # the number of lines by which the new file is longer


class Result(NamedTuple):
    """What patch and Python say about a pair."""

    problem: str  # "" if there is none
    fuzz: bool  # whether patch ignored the context of a hunk


def output_name(difference: str, target: str) -> str:
    return f"{difference}_on_{target}"


def last_line_of_docstring(script: Path) -> int:
    docstring, _, _ = script.read_text(encoding="utf-8").partition('"""\n\nimport')
    return docstring.count("\n") + 1


def prepare(folder: Path) -> None:
    """Fill the folder with grpo.py, the targets, the patched variants, and what they need to run."""
    for name in ["grpo", *TARGETS]:
        (folder / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    for name in VARIANTS:
        patch = ROOT / "variants" / f"{name}.diff"
        command = ["patch", "--silent", "-o", f"{name}.py", "grpo.py", patch]
        subprocess.run(command, cwd=folder, check=True)
    for name in ("utils", "assets"):
        (folder / name).symlink_to(ROOT / name)


def make_diff(folder: Path, name: str, context: str) -> str:
    """The difference of this script from grpo.py."""
    command = ["diff", context, "grpo.py", f"{name}.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def changes(diff: str) -> list[Change]:
    """The hunks of a diff."""
    found = []
    for match in re.finditer(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", diff, re.MULTILINE):
        # A missing length is 1.
        start, old_length, new_length = [int(number or 1) for number in match.groups()]
        # For an insertion without context, diff names the line before it.
        if old_length == 0:
            start += 1
        found.append(Change(start, old_length, new_length - old_length))
    return found


def right_offsets(hunk: Change, target_changes: list[Change]) -> set[int]:
    """The numbers of lines by which the hunk may move in the target.

    A hunk moves by the lines that the target has added above it. If the target has also changed
    lines inside the hunk or at its edge, the hunk may be above or below each of these changes.
    """
    offset = 0
    near = []
    for change in target_changes:
        if change.start + change.length <= hunk.start:
            offset += change.growth
        elif change.start <= hunk.start + hunk.length:
            near.append(change)
    offsets = {offset}
    for change in near:
        offset += change.growth
        offsets.add(offset)
    return offsets


def compose(folder: Path, difference: str, target: str) -> Result:
    """Patch the target with the difference, and write the composed script into the folder."""
    diff = make_diff(folder, difference, CONTEXT)
    output = f"{output_name(difference, target)}.py"
    done = subprocess.run(
        ["patch", "--verbose", "--reject-file=-", "-o", output, f"{target}.py"],
        cwd=folder,
        input=diff,
        capture_output=True,
        text=True,
        env=os.environ | {"LC_ALL": "C"},
    )
    # Such as: Hunk #5 succeeded at 197 with fuzz 1 (offset 19 lines).
    verdicts = re.findall(
        r"^Hunk #\d+ (FAILED|succeeded) at \d+( with fuzz \d)?(?: \(offset (-?\d+) lines?\))?",
        done.stdout,
        re.MULTILINE,
    )
    hunks = changes(diff)
    assert len(verdicts) == len(hunks), done.stdout + done.stderr

    end_of_docstring = last_line_of_docstring(folder / "grpo.py")
    target_changes = changes(make_diff(folder, target, "-U0"))
    num_rejected = num_misplaced = 0
    any_fuzz = False
    for hunk, (verdict, fuzz, offset) in zip(hunks, verdicts, strict=True):
        if hunk.start <= end_of_docstring:
            continue
        if verdict == "FAILED":
            num_rejected += 1
        elif int(offset or 0) not in right_offsets(hunk, target_changes):
            num_misplaced += 1
        if fuzz:
            any_fuzz = True
    problem = ""
    if num_rejected > 0:
        problem = f"patch rejects {num_rejected} of {len(hunks)} hunks"
    elif num_misplaced > 0:
        problem = f"patch puts {num_misplaced} of {len(hunks)} hunks at a wrong place"
    return Result(problem, any_fuzz)


def errors_of_names(folder: Path) -> dict[str, str]:
    """A script in the folder -> its first undefined name or syntax error. Scripts without one are left out."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "F821",
    ]
    command += ["--output-format", "concise", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    errors = {}
    for name, error in re.findall(r"^(\w+)\.py:\d+:\d+: (.*)$", done.stdout, re.MULTILINE):
        errors.setdefault(name, error)
    return errors


def compose_all(folder: Path) -> dict[tuple[str, str], Result]:
    """Compose all pairs in this empty folder: (difference, target) -> Result."""
    prepare(folder)
    results = {}
    for difference in DIFFERENCES:
        for target in TARGETS:
            if target != difference:
                results[difference, target] = compose(folder, difference, target)
    errors = errors_of_names(folder)
    for pair, result in results.items():
        error = errors.get(output_name(*pair))
        if error is not None and not result.problem:
            results[pair] = Result(error, result.fuzz)
    return results


def working(results: dict[tuple[str, str], Result]) -> list[tuple[str, str]]:
    """The pairs that compose."""
    return [pair for pair in results if not results[pair].problem and pair not in WRONG]


def cell(results: dict[tuple[str, str], Result], difference: str, target: str) -> str:
    if difference == target:
        return "-"
    result = results[difference, target]
    if result.problem:
        return "no"
    if (difference, target) in WRONG:
        return "but"
    return "fuzz" if result.fuzz else "yes"


def table(results: dict[tuple[str, str], Result]) -> str:
    """The table of the page, the scripts that are left out, and the reason for each "but"."""
    pairs = working(results)
    rows = [name for name in DIFFERENCES if any(name == difference for difference, _ in pairs)]
    columns = [name for name in TARGETS if any(name == target for _, target in pairs)]
    lines = [
        f"| difference | {' | '.join(columns)} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for row in rows:
        cells = [cell(results, row, column) for column in columns]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    others = [f"{name}.py" for name in TARGETS if name not in rows and name not in columns]
    lines += ["", f"Nothing composes with {', '.join(others)}."]
    lines += ["", "patch accepts these pairs, but the new script is wrong:", ""]
    pairs_of_reason = {}
    for (difference, target), reason in WRONG.items():
        pairs_of_reason.setdefault(reason, []).append(f"{difference} on {target}")
    for reason, names in pairs_of_reason.items():
        item = f"- {', '.join(names)}: {reason}"
        lines += textwrap.wrap(item, 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def train(folder: Path, name: str) -> str:
    """Train this script for two steps. Return "" or what went wrong."""
    command = [sys.executable, f"{name}.py", "--device", "cpu", "--run-name", name]
    command += ["--num-steps", "2", "--num-prompts", "4", "--eval-size", "8"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode > 0:
        return done.stderr.strip().split("\n")[-1]
    # What isn't finite is written as null.
    for line in (folder / "runs" / name / "metrics.jsonl").open():
        for metric, value in json.loads(line).items():
            if value is None:
                return f"{metric} is not finite"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = compose_all(folder)
        for (difference, target), result in results.items():
            reason = result.problem or WRONG.get((difference, target), "")
            print(f"{difference} on {target}: {cell(results, difference, target)} {reason}".strip())
        if options.train:
            for pair in working(results):
                problem = train(folder, output_name(*pair))
                print(f"{' on '.join(pair)}: {problem or 'trained for two steps'}", flush=True)
    if options.write:
        replace_between(PAGE, START, table(results), END)


if __name__ == "__main__":
    main()
