"""Make variants/NAME.diff from a working copy, or make all patches again after their parents changed.

    patch -o cispo.py grpo.py variants/cispo.diff    make a working copy, to be changed
    python tools/make_variants.py cispo.py           make its patch, against the parent it names
    python tools/make_variants.py                    make all patches, against the current parents

The last command applies each patch, with any fuzz, and writes a patch that needs no fuzz. If a parent changed the same
lines as a patch, the patch stays unchanged. Then NAME.py contains the lines that `patch` could place, and NAME.py.rej
the other lines. Merge them by hand, and run the second command.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import ROOT

FOLDER = ROOT / "variants"


def write_patch(name: str, child: str) -> None:
    """Write the patch of this text against the parent that its docstring names."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    before = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    after = child.splitlines(keepends=True)
    patch = difflib.unified_diff(before, after, parent, f"{name}.py")
    (FOLDER / f"{name}.diff").write_text("".join(patch), encoding="utf-8")
    print(f"{name}.diff: against {parent}")


def make_again(path: Path) -> None:
    """Make this patch again, against its current parent."""
    first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    parent = first_line.split()[1]
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder, f"{path.stem}.py")
        command = ["patch", "--fuzz=3", "-o", child, ROOT / parent, path]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            write_patch(path.stem, child.read_text(encoding="utf-8"))
            return
        for left in Path(folder).iterdir():
            (ROOT / left.name).write_bytes(left.read_bytes())
    print(f"{path.name}: merge {path.stem}.py and {path.stem}.py.rej by hand")


def main(copies: list[str]) -> None:
    for copy in copies:
        write_patch(Path(copy).stem, Path(copy).read_text(encoding="utf-8"))
    if not copies:
        for path in sorted(FOLDER.glob("*.diff")):
            make_again(path)


if __name__ == "__main__":
    main(sys.argv[1:])
