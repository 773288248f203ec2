"""Look at runs: curves and samples, in one HTML file that needs no network and no server.

    python report/report.py runs/A            one run, finished or not: runs/A/report.html
    python report/report.py runs/A runs/B     several runs in the same charts: runs/report.html
    python report/report.py runs              all runs in this folder

It reads args.json, metrics.jsonl and samples.jsonl of each run. The page shows them, and says what
is missing or unreadable. Runs whose args.json differ only in the seed, and whose copies of the
script are equal, are one configuration, drawn as mean and band. The page is made from
page.html, and plotly draws the curves."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]]
    """folders of runs, or folders that contain runs"""
    out: Path | None = None
    """file to write; None: report.html in the folder that contains all the runs"""


def read_json(text):
    """JSON with six digits per number: float32 has no more. NaN and 1e999 become strings."""

    def number(x):
        return float(f"{float(x):.6g}") if abs(float(x)) < float("inf") else x

    return json.loads(text, parse_float=number, parse_constant=str)


def read_records(path, needed, kind):
    """The records of a .jsonl file with a step and the field `needed`, and lines on the gaps."""
    if not path.is_file():
        return [], [f"{path.name} is missing"]
    # The text after the last line break is empty, or a line that the run is still writing.
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for line in lines:
        try:
            record = read_json(line)
            if isinstance(record["step"], int) and isinstance(record[needed], kind):
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


def read_run(folder, name):
    """The data of a run for the page: name, args, metrics, samples, marks and gaps."""
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
        args["script"] = path.name
        args["copy"] = hashlib.sha256(path.read_bytes()).hexdigest()[:7]
    metrics, metrics_gaps = read_records(folder / "metrics.jsonl", "step", int)
    samples, samples_gaps = read_records(folder / "samples.jsonl", "completions", list)
    for group in samples:
        texts = [str(text) for text in group["completions"]]
        right = group.get("right")
        if not isinstance(right, list) or len(right) != len(texts):
            # An older run didn't write what is right.
            right = accuracy_reward(texts, [str(group.get("answer"))] * len(texts))
        right = [float(x == 1) for x in right]
        cut = [not ended for ended in group.get("ended") or []]
        group |= {"completions": texts, "right": right, "cut": cut}
    run = {"name": name, "args": args, "metrics": metrics, "samples": samples}
    return run | {"marks": marks(metrics, args), "gaps": gaps + metrics_gaps + samples_gaps}


def series(metrics, name):
    """The steps and the values of a metric, without values that aren't numbers."""
    return [(x["step"], x[name]) for x in metrics if isinstance(x.get(name), int | float)]


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


def main(args: Args) -> Path:
    """Write the page, and return its path."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        fail("report.py needs plotly for its curves: pip install plotly==7.1.0")
    folders = [folder.resolve() for folder in find_runs(args.runs)]
    home = Path(os.path.commonpath(folders))
    runs, blocks = [], []
    for k, folder in enumerate(folders):
        run = read_run(folder, str(folder.relative_to(home.parent)))
        blocks.append(block(f"samples-{k}", run.pop("samples")))
        runs.append(run)
    blocks.append(block("data", {"runs": runs, "first": FIRST, "broken": BROKEN}))
    page = PAGE.read_text(encoding="utf-8").replace("<!-- data -->", "".join(blocks))
    out = args.out or home / "report.html"
    try:
        out.write_text(page.replace("<!-- plotly -->", get_plotlyjs()), encoding="utf-8")
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    print(out)
    return out


if __name__ == "__main__":
    main(tyro.cli(Args))
