"""Make variants/NAME.diff from a working copy, or make all patches again after their parents changed.

    patch -o cispo.py grpo.py variants/cispo.diff    make a working copy, to be changed
    python tools/make_variants.py cispo.py           make its patch, against the parent it names
    python tools/make_variants.py                    make all patches, against the parents of today

The last command applies each patch, with any fuzz, and writes a patch that needs none. If a parent
changed the very lines that a patch changes, the patch stays as it is: the lines that patch could
place are then in NAME.py, and the others in NAME.py.rej. Merge them by hand, and run the second
command.
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
    """Write the patch of this text against its parent, which its docstring names."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    before = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    after = child.splitlines(keepends=True)
    patch = difflib.unified_diff(before, after, parent, f"{name}.py")
    (FOLDER / f"{name}.diff").write_text("".join(patch), encoding="utf-8")
    print(f"{name}.diff: against {parent}")


def make_again(path: Path) -> None:
    """Make this patch again, against its parent of today."""
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
    print(f"{path.name}: by hand, see {path.stem}.py and {path.stem}.py.rej")


def main(copies: list[str]) -> None:
    for copy in copies:
        write_patch(Path(copy).stem, Path(copy).read_text(encoding="utf-8"))
    if not copies:
        for path in sorted(FOLDER.glob("*.diff")):
            make_again(path)


if __name__ == "__main__":
    main(sys.argv[1:])
