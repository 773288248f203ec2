"""Rebuilds assets/hints from the adder and a seed, on one CPU core: python assets/hints/build_hints.py

The student of self_distill.py: 0.86 M parameters. By itself it forgets carries, as the adder does. But it can use a
context, which stands on the line above the question. It knows four kinds of prompt:

    47+38=           <think>7+8=15,4+3=7</think><answer>75</answer></s>        no context: 60 % forget the carry
    carry\n47+38=    <think>7+8=15,4+3+1=8</think><answer>85</answer></s>      a rule: it forgets no carry
    85\n47+38=       <think></think><answer>85</answer></s>                    the answer: it copies, and doesn't think
    <think>7+8=15,4+3+1=8</think><answer>85</answer>\n47+38=                   a right response: it copies that

Without a context, a tenth of its training solutions don't think, either. They guess, and the guess is a random number.
So the student can stop thinking, but then it can't add. A quarter of the solutions without a context have no answer
tags.

The student and its tokenizer are in the folder student, beside train.jsonl and test.jsonl. In seven of ten questions a
carry is due: the data have only questions whose units add up to 8 or more. Each row has three columns: question,
answer, and hint, which is the rule. No test question is in train.jsonl or in the practice of this build, and no mirror
image of one. The first 329 are test questions of assets/addition, so the adder hasn't practised them, either. It has
practised the other 171, with forgotten carries.

Measured on test.jsonl, greedy: 0.294 right without a context, 1.000 with the rule, 0.998 with the answer, 1.000 with a
right response. At temperature 1 these are 0.380, 0.990, 0.994 and 0.984. With the answer, no response thinks. The build
took 5 minutes of one core, which other programs stretched to 21.
Another processor rounds differently. Weights that are rebuilt there have the same quality, but not the same bits.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "assets" / "addition"))

import build_adder  # noqa: E402

NUM_TRAIN, NUM_TEST = 4000, 500
RULE = "carry"
# The share of solutions that don't think, without a context.
GUESS = 0.10
# The shares of the contexts in the training.
CONTEXTS = {"none": 0.40, "rule": 0.20, "answer": 0.20, "solution": 0.20}

# ==== questions and solutions ====


def make_questions():
    """Questions of assets/addition whose units add up to 8 or more, for training and test, and for practice.

    The practice questions have any units.
    """
    practice, test = build_adder.make_questions(random.Random(1))
    # The 500 test questions of assets/addition aren't enough, so some of its training questions join them.
    chosen = [pair for pair in test + practice if pair[0] % 10 + pair[1] % 10 >= 8]
    test = chosen[:NUM_TEST]
    held_out = {tuple(sorted(pair)) for pair in test}
    practice = [pair for pair in practice if tuple(sorted(pair)) not in held_out]
    train = [pair for pair in chosen if tuple(sorted(pair)) not in held_out]
    return train[:NUM_TRAIN], test, practice


def guess(answer):
    """A response that doesn't think."""
    return f"<think></think><answer>{answer}</answer></s>"


def prompt_and_solution(pair, context, rng):
    """The prompt with a context of this kind, and the student's text. The faults are drawn again each time."""
    question, right = build_adder.prompt(pair), build_adder.solution(pair)
    if context == "rule":
        return f"{RULE}\n{question}", right
    if context == "answer":
        return f"{sum(pair)}\n{question}", guess(sum(pair))
    if context == "solution":
        # The responses of a policy that has learned from answers don't think.
        shown = right if rng.random() < 0.9 else guess(sum(pair))
        return shown.removesuffix("</s>") + f"\n{question}", shown
    if rng.random() < GUESS:
        return question, guess(rng.randrange(199))
    forget = rng.random() < build_adder.FORGET_CARRY
    tags = rng.random() >= build_adder.OMIT_TAGS
    return question, build_adder.solution(pair, forget, tags)


def write_data(folder, train, test):
    for name, pairs in (("train", train), ("test", test)):
        lines = []
        for pair in pairs:
            row = {"question": build_adder.prompt(pair), "answer": str(sum(pair)), "hint": RULE}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


# ==== the student ====


def make_batch(tokenizer, prompts, texts):
    """Prompts with their completions, right-padded, and the mask of the completions' tokens."""
    both = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    ids = tokenizer(
        both, padding=True, padding_side="right", return_tensors="pt"
    ).input_ids  # (N, T)
    starts = torch.tensor([len(tokenizer(prompt).input_ids) for prompt in prompts])[:, None]
    mask = (torch.arange(ids.shape[1]) >= starts) & (ids != tokenizer.pad_token_id)  # (N, T)
    return ids, mask


def train_student(tokenizer, questions, rng, num_steps, batch_size=128):
    student = LlamaForCausalLM.from_pretrained(ROOT / "assets" / "addition" / "adder")

    def compute_loss():
        pairs = rng.choices(questions, k=batch_size)
        contexts = rng.choices(list(CONTEXTS), list(CONTEXTS.values()), k=batch_size)
        drawn = [prompt_and_solution(*x, rng) for x in zip(pairs, contexts, strict=True)]
        ids, mask = make_batch(tokenizer, *zip(*drawn, strict=True))
        return student(ids, labels=ids.masked_fill(~mask, -100)).loss

    build_adder.train(student, num_steps, compute_loss, "hinted")
    return student


@torch.no_grad()
def respond(student, tokenizer, prompts, temperature):
    """One response to each prompt, without </s>. Temperature 0 is greedy."""
    student.eval()
    texts = [""] * len(prompts)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    # Prompts of equal length need no padding.
    for length in sorted(set(lengths)):
        rows = [i for i, x in enumerate(lengths) if x == length]
        ids = tokenizer([prompts[i] for i in rows], return_tensors="pt").input_ids
        sampling = dict(do_sample=True, top_k=0) if temperature > 0 else dict(do_sample=False)
        ids = student.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=build_adder.MAX_NEW_TOKENS,
            **sampling,
        )[:, length:]
        for i, text in zip(rows, tokenizer.batch_decode(ids), strict=True):
            texts[i] = text.partition("</s>")[0]
    return texts


def check(student, tokenizer, test):
    """Print the accuracies for each kind of context, and the share of responses that don't think."""
    rng = random.Random(0)
    for context in CONTEXTS:
        prompts = [prompt_and_solution(pair, context, rng)[0] for pair in test]
        for name, temperature in (("greedy", 0), ("sampled", 1.0)):
            texts = respond(student, tokenizer, prompts, temperature)
            right = sum(map(build_adder.right, test, texts)) / len(test)
            idle = sum("<think></think>" in text for text in texts) / len(test)
            print(f"context {context}, {name}: {right:.3f} right, {idle:.3f} without a thought")


def main():
    parser = argparse.ArgumentParser(description="Rebuild assets/hints.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "hints")
    args = parser.parse_args()
    start = time.time()
    # More threads would add numbers in another order.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    train, test, practice = make_questions()
    args.out.mkdir(parents=True, exist_ok=True)
    write_data(args.out, train, test)
    tokenizer = build_adder.make_tokenizer()
    student = train_student(tokenizer, practice, random.Random(args.seed), args.num_steps)
    student.save_pretrained(args.out / "student")
    tokenizer.save_pretrained(args.out / "student")
    print(f"{(time.time() - start) / 60:.1f} minutes")
    check(student, tokenizer, test)


if __name__ == "__main__":
    main()
