"""benchmark/memory.py, whose tables docs/train.md shows: it counts as torch does. test_cuda.py measures its peaks."""

import memory
import pytest
import torch
import transformers
from conftest import ROOT
from records import marked
from transformers import AutoModelForCausalLM

import grpo_lora

TINY = dict(num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
TINY |= dict(intermediate_size=80, vocab_size=97, max_position_embeddings=64, head_dim=8)
CONFIGS = {
    "Llama": transformers.LlamaConfig(**TINY),
    "Llama, tied head": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "Qwen2": transformers.Qwen2Config(**TINY),
    "Qwen3": transformers.Qwen3Config(**TINY | dict(head_dim=12)),
    "Gemma 3": transformers.Gemma3TextConfig(**TINY | dict(head_dim=20)),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_and_keys_are_those_that_torch_counts(family):
    config = CONFIGS[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    given = config.to_dict()
    cache = model(torch.zeros(2, 5, dtype=torch.long, device="meta")).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    s = memory.shape(given)
    assert 2 * 5 * 2 * s.layers * s.keys == numbers
    args = grpo_lora.Args(lora_rank=5)
    model = grpo_lora.add_adapters(args, AutoModelForCausalLM.from_config(config))
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert memory.adapters(given, 5) == trained


def test_the_models_have_as_many_parameters_as_their_names_say():
    """The counts, in millions, must match the model cards, which are independent of memory.MODELS."""
    cards = [494, 596, 1544, 1711, 3086, 7616]
    assert [round(memory.shape(c).parameters / 1e6) for c in memory.MODELS.values()] == cards


def test_bytes_by_hand():
    """One layer with D = Q = K = F = 2 and V = 3 has 28 numbers in matrices, 4 + 2 in norms, 6 in a tied head."""
    config = memory.llama(1, 2, 1, 1, 2, 3)
    assert memory.shape(config).parameters == 40 and memory.adapters(config, 1) == 28
    flags = dict(sampling_tokens=1260, num_prompts=1, num_generations=2)
    found = memory.count("grpo", config, **flags)
    assert [found[name] for name in ("weights", "averages", "gradients")] == [160, 320, 160]
    assert found["reference"] == found["sampling copy"] == 2 * 40 + 4 * 6
    # Each token has a key and a value of two numbers, with two bytes per number.
    assert found["keys and values"] == 1260 * 2 * 2 * 2
    assert memory.count("grpo", config, **flags, beta=0)["reference"] == 0
    found = memory.count("grpo_lora", config, **flags, lora_rank=1)
    assert [found[name] for name in ("weights", "averages", "gradients")] == [216, 224, 112]
    assert "reference" not in found and "sampling copy" not in found
    # The critic's score layer has two numbers. Its head is tied, so its weights stay in the embedding.
    assert memory.count("ppo_rlhf", config, **flags)["weights"] == 4 * (40 + 40 + 2)


def test_the_tables_are_those_of_the_program():
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    assert marked("memory", memory.peaks_table()) in text
    assert marked("seconds", memory.seconds_table()) in text
