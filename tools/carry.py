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


def carry(child: str, base: str, parent: str) -> tuple[str, list[str]]:
    """The child with the changes from base to parent, and the changed lines that it doesn't have, or has twice.

    Where the child has the same text as base, it gets that of the parent. Its own text stays.
    """
    old, new = base.splitlines(keepends=True), parent.splitlines(keepends=True)
    missing, last_equal = [], 0
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            last_equal = a
            continue
        above = 0  # lines above the change, so that the text is unique
        while base.count("".join(old[a - above : b])) != 1 and a - above > last_equal:
            above += 1
        before, after = "".join(old[a - above : b]), "".join(new[c - above : d])
        if child.count(before) == 1:
            child = child.replace(before, after)
        else:
            missing.append(before.strip().partition("\n")[0])
    return child, missing


def tell(name: str, missing: list[str]) -> None:
    """Print the changes that a person has to look at."""
    for line in missing:
        print(f"{name} has other text, so look whether it needs the change at: {line}")


def carry_scripts() -> None:
    """Carry the changes of grpo.py since the last commit into all other scripts."""
    base, parent = last_commit("grpo.py"), (ROOT / "grpo.py").read_text(encoding="utf-8")
    for path in [ROOT / f"{name}.py" for name in SCRIPTS if name != "grpo"]:
        child, missing = carry(path.read_text(encoding="utf-8"), base, parent)
        path.write_text(child, encoding="utf-8")
        tell(path.name, missing)


def write_patch(name: str, child: str) -> None:
    """Write variants/NAME.diff: this text against the parent that its docstring names."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    before = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    after = child.splitlines(keepends=True)
    patch = difflib.unified_diff(before, after, parent, f"{name}.py")
    (ROOT / "variants" / f"{name}.diff").write_text("".join(patch), encoding="utf-8")


def carry_patches() -> None:
    """Carry the changes of the parents since the last commit into the patches."""
    for path in sorted((ROOT / "variants").glob("*.diff")):
        parent = path.read_text(encoding="utf-8").split()[1]
        base, now = last_commit(parent), (ROOT / parent).read_text(encoding="utf-8")
        if (child := patched(path, base)) is not None:
            child, missing = carry(child, base, now)
            write_patch(path.stem, child)
            tell(path.name, missing)
        elif patched(path, now) is None:  # else --patch has just made it
            print(f"variants/{path.name} doesn't fit {parent}: make it again with --patch")


def patched(path: Path, parent: str) -> str | None:
    """The parent's text with this patch. None if it doesn't fit exactly."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        before.write_text(parent, encoding="utf-8")
        done = subprocess.run(["patch", "--fuzz=0", "-o", after, before, path], capture_output=True)
        return after.read_text(encoding="utf-8") if done.returncode == 0 else None
