"""Rebuild assets/sums from assets/addition/adder and a seed, on one CPU core, and build a teacher for its model.

    python assets/sums/build_sums.py
    python assets/sums/build_sums.py --teacher runs/sums-teacher

The second bundled task, with headroom: sums of two to five numbers of two to four digits. The student has 0.86 M
parameters. It writes column by column, the units first, with carries:

    4711+82+908=    <think>1+2+8=11,1+8+0+1=10,7+0+9+1=17,4+0+0+1=5</think><answer>5701</answer></s>

But it forgets some carries. How often depends on the total of the column: it nearly always carries from some totals,
and nearly never from others (make_rates, from the seed). So the totals in a question decide how hard it is. A few
questions are easy: with two numbers a carry is rare, with five numbers there are three. A solution has four columns and
about 50 tokens, and each column can be wrong. A policy learns only whether the answer is right. With grpo_process.py it
learns this for each column.

The student and its tokenizer are in the folder student, beside train.jsonl and test.jsonl. The student understands no
examples, so use --no-examples.

Measured on 200 questions of test.jsonl, at temperature 0.9: 0.264 of the samples are right (0.574 with two numbers,
0.099 with five), and 0.999 are well-formed. Greedy, 0.315 are right. Of the groups of eight, 0.490 are all wrong and
0.080 all right. The build takes about ten minutes of an idle core.
Another processor rounds differently. Weights that are rebuilt there have the same quality, but not the same bits.

The lesson on pass@k distills the teacher into the student. The teacher is the student, trained further for a minute or
two on solutions that forget no carry, of questions that are drawn anew and aren't in test.jsonl in any order.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "assets" / "addition"))

import build_adder  # noqa: E402

NUM_TRAIN, NUM_TEST = 4000, 500
COLUMNS = 4
# The largest total of a column: five nines and a carry of 4.
LARGEST = 49
MAX_NEW_TOKENS = 100

# ==== questions and solutions ====


def make_question(rng):
    """Two to five numbers of two to four digits. At least one number has four digits."""
    while True:
        numbers = [
            rng.randrange(10, 10 ** rng.randint(2, COLUMNS)) for _ in range(rng.randint(2, 5))
        ]
        if max(numbers) >= 10 ** (COLUMNS - 1):
            return tuple(numbers)


def make_questions(rng):
    """The questions for training and test. No test question is a training question in another order."""
    test = {
        tuple(sorted(question)): question
        for question in (make_question(rng) for _ in range(NUM_TEST))
    }
    train = {}
    while len(train) < NUM_TRAIN:
        question = make_question(rng)
        if tuple(sorted(question)) not in test:
            train[question] = None
    return list(train), list(test.values())


def make_rates(rng):
    """For each total of a column, how often the student forgets its carry: evenly from never to always."""
    rates = [k / (LARGEST - 10) for k in range(LARGEST - 9)]
    rng.shuffle(rates)
    return dict(enumerate(rates, 10))


def drawn_apart(rates):
    """Rates in the same order, but evenly spread in log-odds from -6 to 4, which is 0.2 % to 98 %."""
    return {total: 1 / (1 + math.exp(6 - 10 * rate)) for total, rate in rates.items()}


def solution(numbers, forgets=lambda total: False):
    """The student's text: for each column its digits, the carry if there is one, and their total."""
    columns, answer, carry = [], 0, 0
    for place in range(COLUMNS):
        terms = [number // 10**place % 10 for number in numbers] + [carry] * (carry > 0)
        total = sum(terms)
        columns.append("+".join(map(str, terms)) + f"={total}")
        # The last column's total is written whole.
        is_last = place == COLUMNS - 1
        answer += 10**place * (total if is_last else total % 10)
        carry = 0 if total < 10 or forgets(total) else total // 10
    return f"<think>{','.join(columns)}</think><answer>{answer}</answer></s>"


def write_data(folder, train, test):
    for name, questions in (("train", train), ("test", test)):
        lines = [
            json.dumps({"question": build_adder.prompt(numbers), "answer": str(sum(numbers))})
            + "\n"
            for numbers in questions
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


# ==== the student ====


def practice(rng, rates, held_out, batch_size=32):
    """Questions that aren't in the test, and solutions that forget carries at these rates.

    The forgotten carries are drawn again each time. So the student is undecided on a total, instead of wrong on some
    questions.
    """
    questions = []
    while len(questions) < batch_size:
        numbers = make_question(rng)
        if tuple(sorted(numbers)) not in held_out:
            questions.append(numbers)
    texts = [solution(numbers, lambda total: rng.random() < rates[total]) for numbers in questions]
    return questions, texts


def train_student(tokenizer, rates, held_out, rng):
    """Train the adder, which knows columns of two digits, on columns of up to five digits. Then train its faults.

    In the first stage, each total comes with its carry and without. The student can't learn a text that it rarely sees,
    and then no later training would find that text.
    """
    student = LlamaForCausalLM.from_pretrained(ROOT / "assets" / "addition" / "adder")
    # Room for the prompt and response of any recipe.
    student.config.max_position_embeddings = 1024
    for name, num_steps, stage in (("columns", 1000, rates), ("faults", 200, drawn_apart(rates))):

        def compute_loss(stage=stage):
            questions, texts = practice(rng, stage, held_out)
            ids, mask = build_adder.make_batch(tokenizer, questions, texts)
            return student(ids, labels=ids.masked_fill(~mask, -100)).loss

        build_adder.train(student, num_steps, compute_loss, name)
    return student


def check(student, tokenizer, test, num_samples=8):
    """Print accuracies, the shares of groups that are all wrong or all right, and lengths, at temperature 0.9."""
    test = test[:200]
    greedy = build_adder.sample(student, tokenizer, test, 0, MAX_NEW_TOKENS)
    questions = [numbers for numbers in test for _ in range(num_samples)]
    texts = build_adder.sample(student, tokenizer, questions, 0.9, MAX_NEW_TOKENS)
    right = torch.tensor(list(map(build_adder.right, questions, texts))).view(-1, num_samples)
    lengths = torch.tensor([len(tokenizer(text).input_ids) for text in texts]).float()
    shares = {
        "greedy": sum(map(build_adder.right, test, greedy)) / len(test),
        "sampled": right.float().mean(),
        "groups all wrong": (~right).all(1).float().mean(),
        "groups all right": right.all(1).float().mean(),
        "well-formed": sum(map(build_adder.well_formed, texts)) / len(texts),
    }
    print(", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    print(f"tokens: {lengths.mean():.1f} ({lengths.min():.0f} to {lengths.max():.0f})")
    by_count = {k: right[[len(q) == k for q in test]].float().mean() for k in range(2, 6)}
    print(", ".join(f"{k} numbers {share:.3f}" for k, share in by_count.items()))


# ==== the teacher ====


def build_teacher(folder, num_steps=300):
    torch.manual_seed(2)
    # Seed 1 has drawn the questions of assets/sums.
    _, test = make_questions(random.Random(1))
    held_out = {tuple(sorted(numbers)) for numbers in test}
    rng = random.Random(2)
    rates = dict.fromkeys(range(10, LARGEST + 1), 0.0)  # it never forgets a carry
    student = ROOT / "assets" / "sums" / "student"
    tokenizer = AutoTokenizer.from_pretrained(student)
    teacher = LlamaForCausalLM.from_pretrained(student)

    def compute_loss():
        questions, texts = practice(rng, rates, held_out)
        ids, mask = build_adder.make_batch(tokenizer, questions, texts)
        return teacher(ids, labels=ids.masked_fill(~mask, -100)).loss

    build_adder.train(teacher, num_steps, compute_loss, "teacher")
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check(teacher, tokenizer, test)


def main():
    parser = argparse.ArgumentParser(description="Rebuild assets/sums, or build a teacher for it.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "sums")
    parser.add_argument("--teacher", type=Path, help="build only the teacher, in this folder")
    args = parser.parse_args()
    start = time.time()
    # More threads would add numbers in another order.
    torch.set_num_threads(1)
    if args.teacher:
        build_teacher(args.teacher)
        return
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    train, test = make_questions(rng)
    rates = make_rates(rng)
    args.out.mkdir(parents=True, exist_ok=True)
    write_data(args.out, train, test)
    tokenizer = build_adder.make_tokenizer()
    held_out = {tuple(sorted(numbers)) for numbers in test}
    student = train_student(tokenizer, rates, held_out, rng)
    student.save_pretrained(args.out / "student")
    tokenizer.save_pretrained(args.out / "student")
    print(f"{(time.time() - start) / 60:.1f} minutes")
    check(student, tokenizer, test)


if __name__ == "__main__":
    main()
