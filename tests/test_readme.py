"""README.md agrees with the code."""

import re

import siblings
from conftest import ROOT
from scripts import SCRIPTS, parent_of

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_lesson_is_the_current_diff():
    """README.md shows the diff from grpo.py to dr_grpo.py. `python tools/siblings.py --write` updates this diff."""
    shown = re.search(r"```diff\n(.*?)\n```", README, re.DOTALL).group(1)
    assert shown == siblings.lesson()


def test_the_tables_have_every_script_with_its_parent():
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\w+\.py\) \|[^|]*\| ([-\w]+) \|", README, re.MULTILINE)
    assert rows == [(name, parent_of(name) or "-") for name in SCRIPTS]


def test_continuous_integration_runs_the_two_commands():
    """.ci/run has the same commands as README.md, one per line instead of joined by &&."""
    commands = re.findall(r"^pip install -r .*requirements.txt && .*$", README, re.MULTILINE)
    assert len(commands) == 2
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    first = lines.index("pip install -r requirements.txt")
    steps = [line for line in lines[first:] if line]
    assert steps[:4] == commands[0].split(" && ") + commands[1].split(" && ")
    assert steps[4:] == ["ruff check .", "ruff format --check ."]


def test_every_flag_in_it_exists():
    flags = set()
    for name in SCRIPTS:
        for part, text in siblings.parts(name).items():
            if part.startswith("Args."):
                flag = part.removeprefix("Args.").replace("_", "-")
                flags.add(flag)
                if ": bool = " in text:
                    flags.add(f"no-{flag}")
    runs = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    pages = README.split("## Speed")[0] + runs
    of_others = {"help", "nproc-per-node", "shutdown-timeout"}
    assert set(re.findall(r"--([a-z][a-z-]+)", pages)) - of_others <= flags


def test_only_the_five_run_time_packages_are_required():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    names = [line.split("==")[0] for line in lines]
    assert names == ["torch", "transformers", "datasets", "tyro", "wandb"]
    assert lines[0] == "torch==2.13.0"
