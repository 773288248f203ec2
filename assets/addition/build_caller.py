"""Rebuilds the caller from the adder and a seed, on one CPU core: python assets/addition/build_caller.py

The student of grpo_tools.py: 0.86 M parameters, and two tokens more than the adder, <calc> and </calc>. Either it adds
in its head and makes mistakes, or it calls a calculator, which writes "=85":

    47+38=    <think>7+8=15,4+3+1=8</think><answer>85</answer></s>
    47+38=    <think><calc>47+38</calc>=85</think><answer>85</answer></s>

Its training solutions called in 20 % of the cases. The others forgot 65 % of the carries that were due, and carried in
20 % of the cases where none was due. A quarter of all solutions have no answer tags. So calling is better on every
question, and much better with a carry, but the student rarely does it. The calculator's answer isn't a target of the
training, only its context. The data are assets/addition.

Measured: 0.542 right on test.jsonl, greedy. Of the 128 samples of grpo_tools.py's first step, at temperature 1, 0.45
are right and 0.13 call. The build took three minutes of a busy core.
Another processor rounds differently. Weights that are rebuilt there have the same quality, but not the same bits.
"""

import argparse
import random
import time
from pathlib import Path

import build_adder
import torch
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]

# The share of solutions that call the calculator.
CALL = 0.20
# The share of wrong solutions among those in the head, if a carry is due and if none is due.
FORGET_CARRY = 0.65
NEEDLESS_CARRY = 0.20
# The share of all solutions that have no answer tags.
OMIT_TAGS = 0.25
CALL_TAGS = ["<calc>", "</calc>"]


def in_the_head(pair, carries):
    """The thought and the answer, with a carry if `carries`."""
    (a_tens, a_units), (b_tens, b_units) = divmod(pair[0], 10), divmod(pair[1], 10)
    units = a_units + b_units
    tens = a_tens + b_tens + carries
    thought = f"{a_units}+{b_units}={units},{a_tens}+{b_tens}{'+1' if carries else ''}={tens}"
    return thought, 10 * tens + units % 10


def solution(pair, rng):
    """The student's text, with the calculator's answer. Calls, faults and tags are drawn again each time."""
    if rng.random() < CALL:
        thought, answer = f"<calc>{pair[0]}+{pair[1]}</calc>={sum(pair)}", sum(pair)
    else:
        is_due = pair[0] % 10 + pair[1] % 10 >= 10
        is_wrong = rng.random() < (FORGET_CARRY if is_due else NEEDLESS_CARRY)
        thought, answer = in_the_head(pair, is_due != is_wrong)
    tags = rng.random() >= OMIT_TAGS
    return f"<think>{thought}</think>" + (
        f"<answer>{answer}</answer></s>" if tags else f"{answer}</s>"
    )


def train_student(tokenizer, questions, rng, num_steps, batch_size=128):
    student = LlamaForCausalLM.from_pretrained(ROOT / "assets" / "addition" / "adder")
    student.resize_token_embeddings(len(tokenizer))
    end_of_call, think_end = tokenizer.convert_tokens_to_ids(["</calc>", "</think>"])

    def compute_loss():
        pairs = rng.choices(questions, k=batch_size)
        texts = [solution(pair, rng) for pair in pairs]
        ids, mask = build_adder.make_batch(tokenizer, pairs, texts)  # (N, T)
        after_call = (ids == end_of_call).cumsum(1) - (ids == end_of_call).long()  # (N, T)
        by_tool = (after_call > 0) & ((ids == think_end).cumsum(1) == 0)  # (N, T)
        return student(ids, labels=ids.masked_fill(~mask | by_tool, -100)).loss

    build_adder.train(student, num_steps, compute_loss, "caller")
    return student


def main():
    parser = argparse.ArgumentParser(description="Rebuild assets/addition/caller.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "addition" / "caller")
    args = parser.parse_args()
    start = time.time()
    # More threads would add numbers in another order.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    # The same seed gives the questions of assets/addition.
    questions, _ = build_adder.make_questions(random.Random(1))
    rng = random.Random(args.seed)
    tokenizer = build_adder.make_tokenizer(CALL_TAGS, "</?calc>|" + build_adder.TOKEN)
    student = train_student(tokenizer, questions, rng, args.num_steps)
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{(time.time() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
