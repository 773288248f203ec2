"""Shared by all benchmarks: records with their provenance, the marked places of pages, memory, spread.

A record is a line of JSON in benchmark/records. In a page, a table stands between <!-- name --> and <!-- end name -->.
"""

import json
import os
import platform
import subprocess
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmark" / "records"


def provenance() -> dict:
    """The commit, and whether the code has changes that aren't committed."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--", "*.py", "utils", "assets")
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(changes)}


def machine() -> dict:
    """The CPU's model, the number of its cores, and the load average of the last one, five and fifteen minutes."""
    cpuinfo, model = Path("/proc/cpuinfo"), platform.processor()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    load = [round(x, 1) for x in os.getloadavg()]
    return {"cpu": model, "cores": os.cpu_count(), "load": load}


def read(path: Path) -> list[dict]:
    """The records of a file. Without the file, there are no records."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_run(folder: Path) -> tuple[list[dict], dict]:
    """The metrics of a run, and its args with the versions of the packages. The evaluation before training is first."""
    args = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    return read(folder / "metrics.jsonl"), args


def marked(name: str, text: str) -> str:
    return f"<!-- {name} -->\n{text}<!-- end {name} -->\n"


def fill(page: Path, name: str, text: str) -> None:
    """Write the text into its marked place in a page."""
    before, rest = page.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- end {name} -->\n")
    page.write_text(before + marked(name, text) + after, encoding="utf-8")


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes. getrusage would also count the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def spread(values: list[float], digits: int = 0) -> str:
    """Mean, lowest and highest; a dash if there are no values."""
    if np.isnan(values).all():
        return "-"
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
