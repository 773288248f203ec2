"""A student whose responses have no fixed length, for lesson 6: python benchmark/hesitant.py runs/hesitant

Trained from assets/adder in a minute, on the additions of assets/addition that have a carry. Before it answers it
hesitates: "?" again and again if it has forgotten to carry, "!" if it has not,

    <think>7+8=15,4+3=7????</think><answer>75</answer></s>        60 % of its solutions
    <think>7+8=15,4+3+1=8!!!</think><answer>85</answer></s>       the others

each time with probability 0.93 once more. So a wrong and a right response may both go on, which has no effect on the
reward, unless the limit of new tokens cuts them. The folder gets the model, its tokenizer, train.jsonl and test.jsonl.
Under this repository's license, as all that it is made from.
"""

import json
import random
import sys
from pathlib import Path

import build_assets
import torch
from records import ROOT
from transformers import AutoTokenizer, LlamaForCausalLM

GO_ON, LONGEST = 0.93, 100


def solution(rng: random.Random, pair: tuple[int, int]) -> str:
    forget, times = rng.random() < build_assets.FORGET_CARRY, 1
    while times < LONGEST and rng.random() < GO_ON:
        times += 1
    return build_assets.solution(pair, forget).replace(
        "</think>", ("?" if forget else "!") * times + "</think>"
    )


def main(folder: Path, num_steps: int = 200, batch_size: int = 32) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rng = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for name in ("train", "test"):
        lines = (
            (ROOT / "assets" / "addition" / f"{name}.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        found = [tuple(map(int, json.loads(line)["question"][:-1].split("+"))) for line in lines]
        found = [(a, b) for a, b in found if a % 10 + b % 10 >= 10]
        lines = [
            json.dumps({"question": build_assets.prompt(pair), "answer": str(sum(pair))}) + "\n"
            for pair in found
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        pairs += found if name == "train" else []

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder")
    student = LlamaForCausalLM.from_pretrained(
        ROOT / "assets" / "adder", max_position_embeddings=1024
    )

    def compute_loss():
        batch = rng.choices(pairs, k=batch_size)
        ids, mask = build_assets.make_batch(
            tokenizer, batch, [solution(rng, pair) for pair in batch]
        )
        return student(ids, labels=ids.masked_fill(~mask, -100)).loss

    build_assets.train(student, num_steps, compute_loss, "hesitant student")
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
