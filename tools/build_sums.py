"""Rebuilds assets/sums from assets/adder and a seed, on one CPU core: `python tools/build_sums.py`.

The second bundled task, with headroom: sums of two to five numbers of two to four digits, by a student of 0.86 M
parameters who writes column by column, the units first, and carries,

    4711+82+908=    <think>1+2+8=11,1+8+0+1=10,7+0+9+1=17,4+0+0+1=5</think><answer>5701</answer></s>

but forgets carries. How often depends on the total that it should carry from: some it nearly always remembers, others
nearly never (make_rates, from the seed). So a question is as hard as the totals that it meets, and a few are easy: two
numbers have hardly a carry, five have three. A solution has four columns and about 50 tokens, and each column can be
wrong; a policy is told of the answer alone, or, by grpo_process.py, of each column.

The folder holds the model, its tokenizer, train.jsonl and test.jsonl, so that it is --model and --dataset in one. The
student understands no instructions: --system-prompt "".

Measured on 200 questions of test.jsonl, at the temperature 0.9: 0.264 of the samples are right (0.574 with two numbers,
0.099 with five), greedy 0.315, well-formed 0.999; of groups of eight 0.490 are all wrong and 0.080 all right. The build
takes about ten minutes of an idle core. Another processor rounds differently: rebuilt there, the weights agree in
quality only.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import build_assets
import torch
from scripts import ROOT
from transformers import LlamaForCausalLM

NUM_TRAIN, NUM_TEST = 4000, 500
COLUMNS = 4
LARGEST = 49  # total of a column: five nines and a carry of 4
MAX_NEW_TOKENS = 100

# ==== questions and solutions ====


def make_question(rng):
    """Two to five numbers of two to four digits, one of them of four at least."""
    while True:
        numbers = [
            rng.randrange(10, 10 ** rng.randint(2, COLUMNS)) for _ in range(rng.randint(2, 5))
        ]
        if max(numbers) >= 10 ** (COLUMNS - 1):
            return tuple(numbers)


def make_questions(rng):
    """For training and test: no sum of the test is one of the training's with its numbers in another order."""
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
    """How often the student forgets the carry of a column's total: evenly from never to always."""
    rates = [k / (LARGEST - 10) for k in range(LARGEST - 9)]
    rng.shuffle(rates)
    return dict(enumerate(rates, 10))


def drawn_apart(rates):
    """Rates in the same order, but evenly spread in their log-odds, from -6 to 4: 0.2 % to 98 %."""
    return {total: 1 / (1 + math.exp(6 - 10 * rate)) for total, rate in rates.items()}


def solution(numbers, forgets=lambda total: False):
    """What the student writes: for each column its digits, the carry if there is one, and their total."""
    columns, answer, carry = [], 0, 0
    for place in range(COLUMNS):
        terms = [number // 10**place % 10 for number in numbers] + [carry] * (carry > 0)
        total = sum(terms)
        columns.append("+".join(map(str, terms)) + f"={total}")
        is_last = place == COLUMNS - 1  # its total is written whole
        answer += 10**place * (total if is_last else total % 10)
        carry = 0 if total < 10 or forgets(total) else total // 10
    return f"<think>{','.join(columns)}</think><answer>{answer}</answer></s>"


def write_data(folder, train, test):
    for name, questions in (("train", train), ("test", test)):
        lines = [
            json.dumps({"question": build_assets.prompt(numbers), "answer": str(sum(numbers))})
            + "\n"
            for numbers in questions
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


# ==== the student ====


def practice(rng, rates, held_out, batch_size=32):
    """Questions, none of them of the test, and solutions that forget carries at these rates.

    What is forgotten is drawn anew each time: the student is undecided on a total, not wrong on some questions.
    """
    questions = []
    while len(questions) < batch_size:
        numbers = make_question(rng)
        if tuple(sorted(numbers)) not in held_out:
            questions.append(numbers)
    texts = [solution(numbers, lambda total: rng.random() < rates[total]) for numbers in questions]
    return questions, texts


def train_student(tokenizer, rates, held_out, rng):
    """The adder, which knows columns of two digits, goes on with those of up to five, and then gets its faults.

    The rates of the first stage show each total with its carry and without: of what is hardly ever seen, nothing is
    learnt that could be found again later.
    """
    student = LlamaForCausalLM.from_pretrained(ROOT / "assets" / "adder")
    student.config.max_position_embeddings = 1024  # room for the prompt and response of any recipe
    for name, num_steps, stage in (("columns", 1000, rates), ("faults", 200, drawn_apart(rates))):

        def compute_loss(stage=stage):
            questions, texts = practice(rng, stage, held_out)
            ids, mask = build_assets.make_batch(tokenizer, questions, texts)
            return student(ids, labels=ids.masked_fill(~mask, -100)).loss

        build_assets.train(student, num_steps, compute_loss, name)
    return student


def check(student, tokenizer, test, num_samples=8):
    """Accuracies, the share of groups without a difference, and lengths, at the temperature 0.9."""
    test = test[:200]
    greedy = build_assets.sample(student, tokenizer, test, 0, MAX_NEW_TOKENS)
    questions = [numbers for numbers in test for _ in range(num_samples)]
    texts = build_assets.sample(student, tokenizer, questions, 0.9, MAX_NEW_TOKENS)
    right = torch.tensor(list(map(build_assets.right, questions, texts))).view(-1, num_samples)
    lengths = torch.tensor([len(tokenizer(text).input_ids) for text in texts]).float()
    shares = {
        "greedy": sum(map(build_assets.right, test, greedy)) / len(test),
        "sampled": right.float().mean(),
        "groups all wrong": (~right).all(1).float().mean(),
        "groups all right": right.all(1).float().mean(),
        "well-formed": sum(map(build_assets.well_formed, texts)) / len(texts),
    }
    print(", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    print(f"tokens: {lengths.mean():.1f} ({lengths.min():.0f} to {lengths.max():.0f})")
    by_count = {k: right[[len(q) == k for q in test]].float().mean() for k in range(2, 6)}
    print(", ".join(f"{k} numbers {share:.3f}" for k, share in by_count.items()))


def main():
    parser = argparse.ArgumentParser(description="Rebuild assets/sums.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "sums")
    args = parser.parse_args()
    start = time.time()
    torch.set_num_threads(1)  # more of them would add in another order
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    train, test = make_questions(rng)
    rates = make_rates(rng)
    args.out.mkdir(parents=True, exist_ok=True)
    write_data(args.out, train, test)
    tokenizer = build_assets.make_tokenizer()
    held_out = {tuple(sorted(numbers)) for numbers in test}
    student = train_student(tokenizer, rates, held_out, rng)
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{(time.time() - start) / 60:.1f} minutes")
    check(student, tokenizer, test)


if __name__ == "__main__":
    main()
