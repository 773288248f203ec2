"""Carry a change from a script to those that are made from it: used by tools/siblings.py."""

import difflib
import re
import subprocess
import tempfile
from pathlib import Path

from scripts import ROOT, SCRIPTS


def carry_scripts() -> bool:
    """Merge the changes of grpo.py since the last commit into all other scripts. True: without a conflict."""
    command = ["git", "show", "HEAD:./grpo.py"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    in_conflict = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "before")
        base.write_text(shown.stdout, encoding="utf-8")
        for name in SCRIPTS:
            if name == "grpo":
                continue
            merge = ["git", "merge-file", "--diff3", f"{name}.py", base, "grpo.py"]
            if subprocess.run(merge, cwd=ROOT).returncode != 0:
                in_conflict.append(f"{name}.py")
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
    """Make all patches again, against their current parents.

    Each patch is applied with any fuzz, and written so that it needs none. If a parent changed the same lines as a
    patch, the patch stays, NAME.py gets the lines that `patch` could place, and NAME.py.rej the others.
    """
    for path in sorted((ROOT / "variants").glob("*.diff")):
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        parent = first_line.split()[1]
        with tempfile.TemporaryDirectory() as folder:
            child = Path(folder, f"{path.stem}.py")
            command = ["patch", "--fuzz=3", "-o", child, ROOT / parent, path]
            if subprocess.run(command, capture_output=True).returncode == 0:
                write_patch(path.stem, child.read_text(encoding="utf-8"))
                continue
            for left in Path(folder).iterdir():
                (ROOT / left.name).write_bytes(left.read_bytes())
        print(
            f"merge {path.stem}.py and {path.stem}.py.rej by hand, and run --patch {path.stem}.py"
        )
