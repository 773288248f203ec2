"""Build the student of docs/lessons.md whose responses have no fixed length.

    python assets/addition/build_hesitant.py runs/hesitant

The script trains it from the adder in a minute, on the additions of assets/addition that have a carry. The student
hesitates before it answers. It writes "?" if it has forgotten to carry, and "!" if it has carried:

    <think>7+8=15,4+3=7????</think><answer>75</answer></s>        60 % of its solutions
    <think>7+8=15,4+3+1=8!!!</think><answer>85</answer></s>       40 %

After each mark it writes another one with probability 0.93. So both wrong and right responses may go on. This has no
effect on the reward, unless the limit of new tokens cuts the response. The script writes the model, its tokenizer,
train.jsonl and test.jsonl into the folder. They have the license of this repository, like everything that they are made
from.
"""

import argparse
import json
import random
from pathlib import Path

import build_adder
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]

# The probability of one more "?" or "!".
GO_ON = 0.93
LONGEST = 100


def solution(rng: random.Random, pair: tuple[int, int]) -> str:
    forget = rng.random() < build_adder.FORGET_CARRY
    times = 1
    while times < LONGEST and rng.random() < GO_ON:
        times += 1
    mark = "?" if forget else "!"
    return build_adder.solution(pair, forget).replace("</think>", mark * times + "</think>")


def write_data(folder: Path) -> list[tuple[int, int]]:
    """Write the additions that have a carry, and return those for training."""
    pairs = {}
    for name in ("train", "test"):
        text = (ROOT / "assets" / "addition" / f"{name}.jsonl").read_text(encoding="utf-8")
        pairs[name] = []
        lines = []
        for line in text.splitlines():
            a, b = json.loads(line)["question"].removesuffix("=").split("+")
            pair = (int(a), int(b))
            if pair[0] % 10 + pair[1] % 10 >= 10:
                row = {"question": build_adder.prompt(pair), "answer": str(sum(pair))}
                pairs[name].append(pair)
                lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return pairs["train"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the student of the lesson on length.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rng = random.Random(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    pairs = write_data(args.folder)
    adder = ROOT / "assets" / "addition" / "adder"
    tokenizer = AutoTokenizer.from_pretrained(adder)
    student = LlamaForCausalLM.from_pretrained(adder, max_position_embeddings=1024)

    def compute_loss():
        batch = rng.choices(pairs, k=32)
        texts = [solution(rng, pair) for pair in batch]
        ids, mask = build_adder.make_batch(tokenizer, batch, texts)
        return student(ids, labels=ids.masked_fill(~mask, -100)).loss

    build_adder.train(student, args.num_steps, compute_loss, "hesitant student")
    student.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
