"""Carry a change of grpo.py to the other scripts: python tools/carry.py

It merges what git says has changed in grpo.py since the last commit into each of the other scripts
(git merge-file), and leaves their own text alone. Where both have changed the same lines, the
script gets conflict markers, for you to resolve. Run it once for each change, and then
tests/test_siblings.py.
"""

import subprocess
import tempfile
from pathlib import Path

from scripts import ROOT, SCRIPTS


def main() -> None:
    command = ["git", "show", "HEAD:./grpo.py"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "before")
        base.write_text(shown.stdout, encoding="utf-8")
        for name in SCRIPTS:
            if name == "grpo":
                continue
            merge = ["git", "merge-file", "--diff3", f"{name}.py", base, "grpo.py"]
            conflicts = subprocess.run(merge, cwd=ROOT).returncode
            if conflicts == 0:
                print(f"{name}.py: carried")
            else:
                print(f"{name}.py: conflicts to resolve by hand: {conflicts}")


if __name__ == "__main__":
    main()
