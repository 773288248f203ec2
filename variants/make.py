"""Make variants/NAME.diff: from a working copy, or all of them anew after their parents changed.

    patch -o cispo.py grpo.py variants/cispo.diff    a working copy, to be changed
    python variants/make.py cispo.py                 the patch of it, against the parent it names
    python variants/make.py                          all patches, against the parents of today

The last takes what patch can place, with any fuzz, and writes patches that need none. Where a parent
changed the very lines that a patch changes, the patch stays as it is, and what could be placed is left
in NAME.py, with the rest in NAME.py.rej, for your hand and the second command.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent


def write_patch(name: str, child: str) -> None:
    """The patch of this text against its parent, which its docstring names."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    lines = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    patch = difflib.unified_diff(lines, child.splitlines(keepends=True), parent, f"{name}.py")
    (FOLDER / f"{name}.diff").write_text("".join(patch), encoding="utf-8")
    print(f"{name}.diff: against {parent}")


def main(copies: list[str]) -> None:
    for copy in map(Path, copies):
        write_patch(copy.stem, copy.read_text(encoding="utf-8"))
    for path in [] if copies else sorted(FOLDER.glob("*.diff")):
        parent = path.read_text(encoding="utf-8").split("\n", 1)[0].split()[1]
        with tempfile.TemporaryDirectory() as folder:
            child = Path(folder, f"{path.stem}.py")
            command = ["patch", "--fuzz=3", "-o", child, ROOT / parent, path]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                write_patch(path.stem, child.read_text(encoding="utf-8"))
                continue
            for left in Path(folder).iterdir():
                (ROOT / left.name).write_bytes(left.read_bytes())
        print(f"{path.name}: by hand, see {path.stem}.py and {path.stem}.py.rej")


if __name__ == "__main__":
    main(sys.argv[1:])
