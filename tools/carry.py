"""Carry a change from a script to those that are made from it: used by tools/siblings.py."""

import difflib
import re
import subprocess
import tempfile
from pathlib import Path

from scripts import ROOT, SCRIPTS


def last_commit(name: str) -> str:
    """The text of a file at the top of the repository, in the last commit."""
    command = ["git", "show", f"HEAD:./{name}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def merge(child: Path, base: str, parent: Path) -> bool:
    """Merge the changes from base to parent into child. False: with conflict markers."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        before.write_text(base, encoding="utf-8")
        return subprocess.run(["git", "merge-file", "--diff3", child, before, parent]).returncode == 0


def carry_scripts() -> bool:
    """Merge the changes of grpo.py since the last commit into all other scripts. True: without a conflict."""
    base = last_commit("grpo.py")
    others = [ROOT / f"{name}.py" for name in SCRIPTS if name != "grpo"]
    in_conflict = [path.name for path in others if not merge(path, base, ROOT / "grpo.py")]
    if in_conflict:
        print(f"resolve the conflicts in {', '.join(in_conflict)}, and then run --write")
    return not in_conflict


def write_patch(name: str, child: str) -> None:
    """Write variants/NAME.diff: this text against the parent that its docstring names."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    before = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    after = child.splitlines(keepends=True)
    patch = difflib.unified_diff(before, after, parent, f"{name}.py")
    (ROOT / "variants" / f"{name}.diff").write_text("".join(patch), encoding="utf-8")


def carry_patches() -> None:
    """Merge the changes of the parents since the last commit into the patches.

    If a parent changed the same lines as a patch, the patch stays, and NAME.py gets the whole script with conflict
    markers.
    """
    for path in sorted((ROOT / "variants").glob("*.diff")):
        parent = path.read_text(encoding="utf-8").split()[1]
        base = last_commit(parent)
        with tempfile.TemporaryDirectory() as folder:
            child = Path(folder, f"{path.stem}.py")
            before = Path(folder, parent)
            before.write_text(base, encoding="utf-8")
            command = ["patch", "--fuzz=0", "-o", child, before, path]
            if subprocess.run(command, capture_output=True).returncode != 0:
                # It isn't of the last commit's parent. Then it must be of the current one: --patch has just made it.
                command = ["patch", "--fuzz=0", "-o", child, ROOT / parent, path]
                if subprocess.run(command, capture_output=True).returncode != 0:
                    print(f"variants/{path.name} doesn't fit {parent}: make it again with --patch")
                continue
            if merge(child, base, ROOT / parent):
                write_patch(path.stem, child.read_text(encoding="utf-8"))
            else:
                (ROOT / child.name).write_bytes(child.read_bytes())
                print(f"resolve the conflicts in {child.name}, and then run --patch {child.name}")
