"""What the README says of the code is so."""

import ast
import difflib
import re

import pytest
from conftest import ROOT, SCRIPTS
from test_siblings import PAIRS, body, changed_lines

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_lesson_is_the_current_diff():
    """The diff of grpo.py and dr_grpo.py shown in the README: each change with the function it stands in."""
    lines = {name: body(name).splitlines() for name in ("grpo", "dr_grpo")}
    diff = difflib.unified_diff(lines["grpo"], lines["dr_grpo"], n=0, lineterm="")
    lesson = [line for line in diff if line[:3] not in ("---", "+++")]
    lesson = ["" if line.startswith("@@") else line for line in lesson][1:]
    shown = re.search(r"```diff\n(.*?)\n```", README, re.DOTALL).group(1)
    assert shown == "\n".join(lesson)


def table_row(name: str) -> list[str]:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| [{name}.py]")]
    return [cell.strip() for cell in row.split("|")[1:-1]]


@pytest.mark.parametrize(("child", "parent"), PAIRS)
def test_the_table_counts_the_changed_lines(child, parent):
    cells = table_row(child)
    assert cells[2] == parent
    assert cells[4] == str(changed_lines(parent, child))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_table_gives_the_size(name):
    size = (ROOT / f"{name}.py").stat().st_size
    assert table_row(name)[3] == f"{size / 1000:.0f}"


def test_every_script_is_in_the_table_and_no_other():
    assert re.findall(r"^\| \[(\w+)\.py\]", README, re.MULTILINE) == SCRIPTS


def test_the_two_commands_stand_in_it():
    """Continuous integration reads its commands from these two lines."""
    commands = re.findall(r"^pip install -r .*$", README, re.MULTILINE)
    assert commands == [
        "pip install -r requirements.txt && python grpo.py",
        "pip install -r tests/requirements.txt && python -m pytest -q",
    ]


def test_every_flag_in_it_exists():
    fields = set()
    for script in SCRIPTS:
        tree = ast.parse((ROOT / f"{script}.py").read_text(encoding="utf-8"))
        (args,) = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"
        ]
        nodes = [node for node in args.body if isinstance(node, ast.AnnAssign)]
        fields |= {node.target.id for node in nodes}
        fields |= {
            f"no_{node.target.id}" for node in nodes if ast.unparse(node.annotation) == "bool"
        }
    pages = README.split("## Speed")[0] + (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"--([a-z][a-z-]+)", pages)) - {
        "help",
        "nproc-per-node",
        "shutdown-timeout",
    }
    assert flags - {field.replace("_", "-") for field in fields} == set()


def test_only_the_five_run_time_packages_are_required():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert [line.split("==")[0] for line in lines] == [
        "torch",
        "transformers",
        "datasets",
        "tyro",
        "wandb",
    ]
    assert lines[0] == "torch==2.13.0"
