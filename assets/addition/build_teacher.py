"""Rebuild assets/addition/teacher, or tests/data/policy and judge, from a seed: build_teacher.py teacher (or small)

Both have the network and the questions of assets/addition/adder, and other training solutions or another size.

- teacher: assets/addition/teacher, the teacher of distill.py. Its solutions forget no carry and leave out no tags.
  Measured on the questions of test.jsonl: 1.000 right greedy and 0.996 at temperature 1. The build took 15 minutes on a
  machine with two cores and six such processes.
- small: tests/data/policy and tests/data/judge. The tests train this policy where any policy will do. It is half as
  wide as the adder and has one layer instead of four, so a run takes a third of the time. It makes the adder's
  mistakes.
  Measured: 0.528 right greedy and 0.502 at temperature 1; 1.000 and 0.760 are well-formed. The build took two minutes.
  The judge is this network with a score instead of the vocabulary, and the score's weights are random.

Another processor rounds differently. Weights that are rebuilt there have the same quality, but not the same bits.
"""

import random
import sys
import time
from pathlib import Path

import build_adder
import torch
from transformers import LlamaForSequenceClassification

ROOT = Path(__file__).resolve().parents[2]
SMALL = dict(hidden_size=64, num_hidden_layers=1)


def main():
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in ("teacher", "small"):
        raise SystemExit("build_teacher.py teacher, or build_teacher.py small")
    start = time.time()
    folder = (
        ROOT / "assets" / "addition" / "teacher" if name == "teacher" else ROOT / "tests" / "data"
    )
    # Seed 1 has the first weights of assets/addition/adder, so the teacher has another one.
    seed = 2 if name == "teacher" else 1
    args, questions, test, tokenizer = build_adder.prepare(
        description=f"Rebuild {folder}.", seed=seed, out=folder
    )
    rng = random.Random(args.seed)
    if name == "teacher":
        policy = build_adder.train_adder(tokenizer, questions, rng, forget_carry=0, omit_tags=0)
        models = {"": policy}
    else:
        policy = build_adder.train_adder(tokenizer, questions, rng, 1500, **SMALL)
        config = build_adder.llama_config(tokenizer, **SMALL, num_labels=1)
        judge = LlamaForSequenceClassification(config)
        judge.model.load_state_dict(policy.model.state_dict())
        torch.nn.init.normal_(judge.score.weight)
        models = {"policy": policy, "judge": judge}
    for part, model in models.items():
        model.save_pretrained(args.out / part)
        tokenizer.save_pretrained(args.out / part)
    print(f"{(time.time() - start) / 60:.1f} minutes")
    build_adder.check_adder(policy, tokenizer, test)


if __name__ == "__main__":
    main()
