"""How long a rollout takes if several query heads share a key head: python benchmark/grouped.py

In a decode step, transformers 5.19 copies the keys and values for each query head that shares them, and 5.23 doesn't.
So run this program with each version, on an idle machine. The record in benchmark/records/grouped.jsonl has the
shortest time of three rollouts for each number of key heads. A new record replaces the one of the same version.
"""

import sys
import time
from pathlib import Path

import torch
import transformers
from records import FOLDER, provenance, read, write
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402

THREADS = 2
QUERY_HEADS = 14
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 32, 200, 64


def rollout_seconds(key_heads: int) -> float:
    """The shortest time of three rollouts of a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=896,
        intermediate_size=2432,
        num_hidden_layers=4,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=key_heads,
        vocab_size=2000,
    )
    model = LlamaForCausalLM(config)
    prompt_ids = torch.randint(config.vocab_size, (PROMPTS, PROMPT_TOKENS))
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    no_eos = torch.tensor([config.vocab_size])  # no token has this id
    args = grpo.Args(max_new_tokens=RESPONSE_TOKENS)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        grpo.generate(args, model, prompt_ids, prompt_mask, SAMPLES, 1.0, no_eos)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    torch.set_num_threads(THREADS)
    record = {"transformers": transformers.__version__, "torch": torch.__version__, **provenance()}
    record["seconds"] = {heads: round(rollout_seconds(heads), 1) for heads in (2, QUERY_HEADS)}
    print(record)
    path = FOLDER / "grouped.jsonl"
    others = [x for x in read(path) if x["transformers"] != transformers.__version__]
    write(path, sorted([*others, record], key=lambda x: x["transformers"]))


if __name__ == "__main__":
    main()
