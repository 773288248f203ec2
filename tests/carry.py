"""Carry a change of grpo.py to its siblings: python tests/carry.py

Merges what git says has changed in grpo.py since the last commit into each of the other scripts
(git merge-file: their own text stays). Where both have changed the same lines, the script gets
conflict markers for a hand to resolve. Run it once for each change, and then
tests/test_siblings.py.
"""

import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    command = ["git", "show", "HEAD:./grpo.py"]
    before = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "before")
        base.write_text(before, encoding="utf-8")
        for path in sorted(ROOT.glob("*.py")):
            if path.name == "grpo.py" or "def policy_loss(" not in path.read_text(encoding="utf-8"):
                continue
            merge = ["git", "merge-file", "--diff3", path.name, base, "grpo.py"]
            conflicts = subprocess.run(merge, cwd=ROOT).returncode
            print(f"{path.name}: {f'{conflicts} by hand' if conflicts else 'carried'}")


if __name__ == "__main__":
    main()
