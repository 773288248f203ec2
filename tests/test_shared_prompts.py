"""variants/shared_prompts.diff: the common tokens of a micro-batch's prompts are computed once, and no number changes.

The patch is tried on the parents of host_adam. test_micro_batches.py compares it with single sequences.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import patched_by
from families import FAMILIES
from test_errors import tiny_args
from test_host_adam import PARENTS
from test_micro_batches import micro_batches
from test_runs import read_jsonl
from test_sampling import (
    assert_near,
    build,
    exact_logprobs,
    gradients,
    load_family,
    random_rollout,
)
from test_sampling import double as double  # a fixture


@pytest.mark.parametrize("parent", PARENTS)
def test_a_run_is_one_of_the_parent(parent, tmp_path, monkeypatch):
    """Up to rounding. The prompts begin with the instructions, which are computed once."""
    module, original = patched_by("shared_prompts", parent), __import__(parent)
    common_tokens, shared = module.common_tokens, []

    def recorded(*call):
        shared.append(common_tokens(*call))
        return shared[-1]

    monkeypatch.setattr(module, "common_tokens", recorded)
    given = dict(instructions="1+2=3 " * 8, max_prompt_tokens=128, num_steps=2, num_minibatches=2)
    records = []
    for script in (original, module):
        folder = tmp_path / script.__name__
        script.main(tiny_args(original, folder, run_name="run", **given))
        records.append(read_jsonl(folder / "runs" / "run" / "metrics.jsonl"))
    assert max(shared) >= 40
    for one, other in zip(*records, strict=True):
        assert one.keys() == other.keys()
        for metric, value in one.items():
            if not metric.startswith("time/"):
                assert other[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_exactly(double, tmp_path, family):
    """Layers that pass on more than keys and values share nothing."""
    module = patched_by("shared_prompts", "grpo")
    model = double(load_family(family, tmp_path)).train()
    model.set_experts_implementation("eager")
    rollout = random_rollout(module, [(9, [8, 1, 5]), (7, [12, 3])], beginning=6)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    is_attention = set(layer_types) <= {"full_attention", "sliding_attention"}
    assert module.common_tokens(model, rollout.prompts) == (6 if is_attention else 0)
    if not is_attention:
        return
    weights = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(0))
    expected = exact_logprobs(model, rollout, 0.7)
    slow = gradients(model, (expected * weights).sum())
    largest = max(grad.abs().max() for grad in slow.values())
    tolerance = 5e-4 if family == "Gemma 4" else 5e-5  # Gemma 4 rounds to float32 in between
    logprobs = module.compute_logprobs(model, rollout, 0.7)
    assert_near(logprobs, expected, tolerance)
    found = gradients(model, (logprobs * weights).sum())
    for name in found.keys() & slow.keys():
        assert (found[name] - slow[name]).abs().max() <= tolerance * largest, name


# Prompts, the lengths of their responses, and the micro-batches of at most 64 tokens, with the tokens that each of them
# computes once.
CASES = {
    # 2 * 24 and 2 * 22 tokens.
    "by length": ([[1] * 20] * 2 + [[2] * 20] * 2, [4, 2, 4, 2], [([0, 2], 0), ([1, 3], 0)]),
    # Samples of one prompt stay together, though the minibatch has them in another order.
    "equal lengths": ([[1] * 20] * 2 + [[2] * 20] * 2, [4] * 4, [([0, 1], 19), ([2, 3], 19)]),
    # The second micro-batch happens to have one prompt. A single sequence has nothing to share.
    "a group": ([[1] * 20, [2] * 20, [2] * 20], [30, 4, 2], [([0], 0), ([1, 2], 19)]),
    # All begin with 12 tokens. The last token of a prompt isn't shared.
    "a beginning": ([[1] * 12 + [k] for k in range(4)], [3, 3, 3, 3], [([0, 1, 2, 3], 12)]),
    "a part of another": ([[1] * 16, [1] * 14], [16, 5], [([0, 1], 13)]),
    # The common tokens count like all others.
    "counted": ([[1] * 41 + [k] for k in (2, 3)], [22, 1], [([0], 0), ([1], 0)]),
    "too long": ([[1] * 3, [2] * 3], [80, 4], [([0], 0), ([1], 0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_by_hand(case):
    prompts, lengths, expected = CASES[case]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    module, model = patched_by("shared_prompts", "grpo"), build("Llama")
    rollout = module.Rollout(prompts, mask.long(), mask, mask.float())
    shuffled = torch.tensor([*range(0, len(prompts), 2), *range(1, len(prompts), 2)])
    batches = micro_batches(module, rollout, shuffled, 64)
    found = [(sorted(rows), module.common_tokens(model, part.prompts)) for rows, part in batches]
    assert sorted(found) == expected


def test_what_the_model_is_called_with():
    """The 12 common tokens, and the rest. Or whole rows: with checkpointing, with other layers, and on a GPU."""
    model, shapes = build("Llama").train(), []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    module = patched_by("shared_prompts", "grpo")
    rollout = random_rollout(module, [(13, [9, 4, 2, 2])])
    module.compute_logprobs(model, rollout, 1.0)
    model.gradient_checkpointing_enable()
    module.compute_logprobs(model, rollout, 1.0)
    assert shapes == [(1, 12), (4, 10), (4, 22)]
    # A reference, a copy in evaluation mode, computes the same rows.
    module.compute_logprobs(model.eval(), rollout, 1.0)
    assert shapes[3:] == [(4, 22)]
    model = build("Llama")
    assert module.common_tokens(model, rollout.prompts) == 12
    assert module.common_tokens(model, [[1, 5, 6], [1, 7, 6]]) == 0, "BOS alone isn't worth a pass"
    assert module.common_tokens(model, [[1, 5, 6], [1, 5, 7]]) == 2
    for kind in ("linear_attention", "conv", "hybrid", "chunked_attention"):
        model.config.layer_types = ["full_attention", kind]
        assert module.common_tokens(model, rollout.prompts) == 0
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert module.common_tokens(on_gpu, rollout.prompts) == 0
