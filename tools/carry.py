"""Carry a change of grpo.py to the other scripts: python tools/carry.py

It takes the changes in grpo.py since the last commit, and merges them into each of the other scripts (git merge-file).
It leaves the other text of a script alone. If both have changed the same lines, the script gets conflict markers, and
you resolve them. Run it once for each change, and then run tests/test_siblings.py.
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
