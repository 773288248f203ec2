"""Build a teacher for the model of assets/sums: python tools/build_sums_teacher.py runs/sums-teacher

The lesson on pass@k distills this teacher into assets/sums. The script trains assets/sums further, in a minute or two,
on solutions that forget no carry. The questions are drawn anew, and none of them is a question of test.jsonl in any
order. The script writes the model and its tokenizer into the folder. They have the license of this repository, like
everything that they are made from. At the end it prints the accuracy on 200 questions of test.jsonl.
"""

import argparse
import random
from pathlib import Path

import build_assets
import build_sums
import torch
from scripts import ROOT
from transformers import AutoTokenizer, LlamaForCausalLM

# For each total of a column, how often the teacher forgets its carry: never.
RATES = dict.fromkeys(range(10, build_sums.LARGEST + 1), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a teacher for assets/sums.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(2)
    # Seed 1 has drawn the questions of assets/sums.
    _, test = build_sums.make_questions(random.Random(1))
    held_out = {tuple(sorted(numbers)) for numbers in test}
    rng = random.Random(2)
    student = ROOT / "assets" / "sums"
    tokenizer = AutoTokenizer.from_pretrained(student)
    teacher = LlamaForCausalLM.from_pretrained(student)

    def compute_loss():
        questions, texts = build_sums.practice(rng, RATES, held_out)
        ids, mask = build_assets.make_batch(tokenizer, questions, texts)
        return teacher(ids, labels=ids.masked_fill(~mask, -100)).loss

    build_assets.train(teacher, args.num_steps, compute_loss, "teacher")
    args.folder.mkdir(parents=True, exist_ok=True)
    teacher.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    build_sums.check(teacher, tokenizer, test)


if __name__ == "__main__":
    main()
