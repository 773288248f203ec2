"""Rebuild assets/kinds, the data of variants/mopd.diff: python assets/kinds/build_kinds.py

The first questions of assets/addition, with a third column, the kind: "carry" if the units add up to 10 or more, else
"plain". assets/addition/adder is right about the plain ones alone, and assets/addition/teacher about both.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SIZES = {"train.jsonl": 3000, "test.jsonl": 500}


def rows(name: str) -> list[dict]:
    found = []
    for line in (
        (FOLDER.parent / "addition" / name).read_text(encoding="utf-8").splitlines()[: SIZES[name]]
    ):
        row = json.loads(line)
        a, b = map(int, row["question"].rstrip("=").split("+"))
        found.append(row | {"kind": "carry" if a % 10 + b % 10 >= 10 else "plain"})
    return found


def main() -> None:
    for name in SIZES:
        text = "".join(json.dumps(row) + "\n" for row in rows(name))
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
