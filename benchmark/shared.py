"""Shared by all benchmarks: runs, records with their provenance, and tables in marked places of pages.

A record is a line of JSON in benchmark/records. In a page, a table stands between <!-- name --> and <!-- end name -->.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmark" / "records"


def machine() -> dict:
    """The CPU's model, the number of cores that this process may use, and the load average of the last minute."""
    models, cores = [], os.cpu_count()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cores = len(os.sched_getaffinity(0))
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores,
        "load": round(os.getloadavg()[0], 2),
    }


def provenance() -> dict:
    """The commit, whether the code has changes that aren't committed, the versions, and the machine now.

    Without git, or outside a repository, the commit is None, and the code counts as changed.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    changes = git("status", "--porcelain", "--", "*.py", "utils", "assets", "variants/*.diff")
    packages = ("torch", "transformers", "datasets", "tyro")
    return {
        "commit": commit,
        "dirty": commit is None or changes != "",
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def read(path: Path) -> list[dict]:
    """The records of a file. Without the file, there are no records."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_run(folder: Path) -> tuple[list[dict], dict]:
    """The metrics of a run, and its args.

    The first line of the metrics is the evaluation before training.
    """
    args = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    return read(folder / "metrics.jsonl"), args


def time_command(command: list, **options) -> tuple[str, float, float]:
    """Run a command, and return what it printed, its wall seconds and the peak of its memory in GB."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)
        # wait4 also gives the largest resident set of the process and of its children, in KiB.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if process.returncode != 0:
        raise RuntimeError(f"{command}\n{printed[-3000:]}")
    return printed, seconds, usage.ru_maxrss * 1024 / 1e9


def python(command: str) -> float:
    """Run a program of this repository on one thread, and return its wall seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return time_command([sys.executable, *command.split()], cwd=ROOT, env=environment)[1]


def parent_of_patch(script: str) -> str | None:
    """The file that a patch of variants/ changes. None if the script isn't made by a patch."""
    patch = ROOT / "variants" / f"{script}.diff"
    return patch.read_text(encoding="utf-8").split()[1] if patch.is_file() else None


@contextmanager
def in_place(scripts: Iterable[str]):
    """Make those of the scripts that have a patch, beside their parents, and delete them at the end."""
    made = {script: parent for script in scripts if (parent := parent_of_patch(script))}
    for script in made:
        if (ROOT / f"{script}.py").exists():
            raise SystemExit(f"{script}.py exists, and may be your own: move it away")
    try:
        for script, parent in made.items():
            files = ["-o", f"{script}.py", parent, f"variants/{script}.diff"]
            subprocess.run(["patch", "-s", *files], cwd=ROOT, check=True)
        yield
    finally:
        for script in made:
            (ROOT / f"{script}.py").unlink(missing_ok=True)


def command_line(docstring: str) -> argparse.ArgumentParser:
    """A parser whose --help shows a program's docstring as it is."""
    as_written = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=docstring, formatter_class=as_written)


def marked(name: str, text: str) -> str:
    return f"<!-- {name} -->\n{text}<!-- end {name} -->\n"


def fill(page: Path, name: str, text: str) -> None:
    """Write the text into its marked place in a page."""
    before, rest = page.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- end {name} -->\n")
    page.write_text(before + marked(name, text) + after, encoding="utf-8")


def memory(field: str) -> int:
    """VmRSS (memory now) or VmHWM (peak) of this process in bytes.

    The peak of getrusage would include the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run_two_at_a_time(run: Callable[..., dict], jobs: list[tuple], path: Path) -> None:
    """Call run(*job) for every job, and append each record to the file as soon as its run ends.

    If a run fails, or after Ctrl-C, no further job starts. The program waits for the runs that have started, drops
    their records, and ends with the error.
    """
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(run, *job) for job in jobs]
        try:
            for future in tqdm(as_completed(waiting), total=len(jobs), desc="runs"):
                record = future.result()
                with path.open("a", encoding="utf-8") as file:
                    print(json.dumps(record), file=file)
        except Exception as error:
            raise SystemExit(f"a run failed:\n{error}") from None
        finally:
            pool.shutdown(cancel_futures=True)


def spread(values: list[float], digits: int = 0) -> str:
    """The mean, with the lowest and the highest value in parentheses, if there are several. NaN: a run has no value.

    If some runs have no value, the text says how many have one. If no run has a value, the text is a dash.
    """
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return "-"
    if len(values) == 1:
        return f"{known[0]:z.{digits}f}"
    text = f"{np.mean(known):z.{digits}f} ({min(known):z.{digits}f} to {max(known):z.{digits}f})"
    return text if len(known) == len(values) else f"{text} in {len(known)} of {len(values)} runs"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
