"""Build assets/arithmetic, a task for a small chat model: python assets/arithmetic/build_arithmetic.py

900 different questions in words, such as "What is 47 - 38?": sums and differences of numbers up to 50, and products of
numbers up to 10. 700 are for training, and 200 are held out.
"""

import json
import random
from pathlib import Path


def make_questions() -> tuple[list[dict], list[dict]]:
    """The training and the held-out questions."""
    rows = []
    for a in range(1, 51):
        for b in range(1, 51):
            rows.append({"question": f"What is {a} + {b}?", "answer": str(a + b)})
            if a >= b:
                rows.append({"question": f"What is {a} - {b}?", "answer": str(a - b)})
            if a <= 10 and b <= 10:
                rows.append({"question": f"What is {a} times {b}?", "answer": str(a * b)})
    rows = random.Random(0).sample(rows, 900)
    return rows[:700], rows[700:]


def main() -> None:
    folder = Path(__file__).resolve().parent
    for name, part in zip(("train", "test"), make_questions(), strict=True):
        lines = [json.dumps(row) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
