"""Carry a change of grpo.py to its siblings: python tests/carry.py

Takes what git says has changed in grpo.py since the last commit, applies it to each of the other
scripts, and says what needs a hand: where the text around a change is another one there, that part
of it is left in SCRIPT.py.rej. Run it once for each change, and then tests/test_siblings.py.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    change = subprocess.run(
        ["git", "diff", "HEAD", "-U2", "grpo.py"], cwd=ROOT, capture_output=True, text=True
    )
    for path in sorted(ROOT.glob("*.py")):
        if path.name == "grpo.py" or "def policy_loss(" not in path.read_text(encoding="utf-8"):
            continue
        text = change.stdout.replace("grpo.py", path.name)
        command = ["git", "apply", "--recount", "-C1", "--reject", "-"]
        done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
        rejected = path.with_suffix(".py.rej")
        if done.returncode == 0:
            print(f"{path.name}: carried")
        elif rejected.exists():
            parts = rejected.read_text(encoding="utf-8").count("\n@@ ")
            print(f"{path.name}: {parts} by hand, see {rejected.name}")
        else:
            print(f"{path.name}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
