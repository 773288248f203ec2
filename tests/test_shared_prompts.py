"""variants/shared_prompts.diff: the common tokens of a micro-batch's prompts are computed once, and no number changes.

The patch is tried on the parents of host_adam. test_micro_batches.py has the same comparison without the patch.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FOLDERS, ROOT
from families import FAMILIES
from test_critics import tiny_classifier
from test_errors import tiny_args
from test_host_adam import PARENTS
from test_micro_batches import GROUPS, N, compare, micro_batches
from test_runs import read_jsonl
from test_sampling import (
    assert_near,
    build,
    exact_logprobs,
    gradients,
    load_family,
    random_rollout,
    slow_logprobs,
)
from test_sampling import double as double  # a fixture

import grpo

BEGINNING = 11


@functools.cache
def patched(parent):
    """The module that the patch makes of this parent. patch may reject the docstring alone."""
    FOLDERS.append(tempfile.TemporaryDirectory())
    folder = FOLDERS[-1].name
    shutil.copy(ROOT / f"{parent}.py", folder)
    name = f"{parent}_shared"
    command = ["patch", "-o", f"{name}.py", f"{parent}.py", ROOT / "variants/shared_prompts.diff"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    failed = re.findall(r"\d out of \d hunks FAILED", done.stdout)
    assert failed == ([] if parent == "grpo" else ["1 out of 4 hunks FAILED"]), done.stdout
    if failed:
        assert "\n@@ -1," in Path(folder, f"{name}.py.rej").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BUNDLED = __import__(parent).BUNDLED  # whose folders are those of the repository
    return module


@pytest.mark.parametrize("parent", PARENTS)
def test_a_run_is_one_of_the_parent(parent, tmp_path):
    """Up to rounding. The prompts begin with the instructions, which are computed once."""
    module, original = patched(parent), __import__(parent)
    shared = []
    common_tokens = module.common_tokens

    def recorded(*call):
        shared.append(common_tokens(*call))
        return shared[-1]

    module.common_tokens = recorded
    given = dict(instructions="1+2=3 " * 8, max_prompt_tokens=128, num_steps=2, num_minibatches=2)
    records = []
    for script in (original, module):
        folder = tmp_path / script.__name__
        script.main(tiny_args(original, folder, run_name="run", **given))
        records.append(read_jsonl(folder / "runs" / "run" / "metrics.jsonl"))
    module.common_tokens = common_tokens
    assert max(shared) >= 40
    for one, other in zip(*records, strict=True):
        assert one.keys() == other.keys()
        for metric, value in one.items():
            if not metric.startswith("time/"):
                assert other[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric


def test_log_probabilities_and_gradients_are_those_of_single_sequences(double):
    module, model = patched("grpo"), double(build("Llama, tied head"))
    rollout = random_rollout(module, GROUPS, beginning=BEGINNING)
    assert module.common_tokens(model, rollout.prompts) == BEGINNING
    expected = slow_logprobs(model, rollout, 0.7)
    compare(module, model, rollout, lambda *call: module.compute_logprobs(*call, 0.7), expected)


def test_values_and_gradients_are_those_of_single_sequences(double):
    module, network = patched("ppo_rlhf"), double(tiny_classifier())
    rollout = random_rollout(module, GROUPS, beginning=BEGINNING, vocabulary=30)
    assert module.common_tokens(network, rollout.prompts) == BEGINNING
    values = []
    for i in range(N):
        prompt = torch.tensor(rollout.prompts[i])
        response = rollout.response_ids[i][rollout.response_mask[i]]
        text = torch.cat([prompt, response])[None]
        states = network.base_model(text).last_hidden_state[0, len(prompt) - 1 : -1]
        padding = rollout.response_ids.shape[1] - len(response)
        values.append(torch.nn.functional.pad(network.score(states)[:, 0], (0, padding)))
    compare(module, network, rollout, module.compute_values, torch.stack(values))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_exactly(double, tmp_path, family):
    """Layers that pass on more than keys and values share nothing."""
    module, model = patched("grpo"), double(load_family(family, tmp_path)).train()
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
    # The second micro-batch happens to have one prompt.
    "a group": ([[1] * 20, [2] * 20, [2] * 20], [30, 4, 2], [([0], 19), ([1, 2], 19)]),
    # All begin with 12 tokens. The last token of a prompt isn't shared.
    "a beginning": ([[1] * 12 + [k] for k in range(4)], [3, 3, 3, 3], [([0, 1, 2, 3], 12)]),
    "a part of another": ([[1] * 16, [1] * 14], [16, 5], [([0, 1], 13)]),
    # The common tokens count like all others.
    "counted": ([[1] * 41 + [k] for k in (2, 3)], [22, 1], [([0], 41), ([1], 41)]),
    "too long": ([[1] * 3, [2] * 3], [80, 4], [([0], 2), ([1], 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_by_hand(case):
    prompts, lengths, expected = CASES[case]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rollout = grpo.Rollout(prompts, mask.long(), mask, mask.float())
    model = build("Llama")
    shuffled = torch.tensor([*range(0, len(prompts), 2), *range(1, len(prompts), 2)])
    module = patched("grpo")
    batches = micro_batches(module, rollout, shuffled, 64)
    found = [(sorted(rows), module.common_tokens(model, part.prompts)) for rows, part in batches]
    assert sorted(found) == expected


def test_what_the_model_is_called_with():
    """The 12 common tokens, and the rest. Or whole rows: with checkpointing, with other layers, and on a GPU."""
    model, shapes = build("Llama").train(), []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    module = patched("grpo")
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


def test_the_gradient_is_the_same_to_the_last_bit_with_two_threads():
    """The rows of a micro-batch add up in the states of the common tokens, too."""
    module = patched("grpo")
    model = build("Llama", hidden_size=128, head_dim=64, num_key_value_heads=4)
    rollout = random_rollout(module, [(400, [3] * 120)])
    torch.set_num_threads(2)
    try:
        first = gradients(model, module.compute_logprobs(model, rollout, 1.0).sum())
        again = gradients(model, module.compute_logprobs(model, rollout, 1.0).sum())
        assert all(torch.equal(again[name], grad) for name, grad in first.items())
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_reference_computes_as_the_policy_does(tmp_path, monkeypatch, checkpointing):
    """Before the first update both are equal to the bit. If all rewards are 0, Adam makes a step of any difference.

    All prompts begin with the instructions. Both networks share them, or neither does.
    """
    module = patched("grpo")
    policy_loss, common_tokens, found, shared = module.policy_loss, module.common_tokens, [], []

    def recorded_loss(args, logprobs, old_logprobs, ref_logprobs, *rest, **named):
        found.append(torch.equal(logprobs, ref_logprobs))
        return policy_loss(args, logprobs, old_logprobs, ref_logprobs, *rest, **named)

    def recorded_shared(*call):
        shared.append(common_tokens(*call))
        return shared[-1]

    monkeypatch.setattr(module, "policy_loss", recorded_loss)
    monkeypatch.setattr(module, "common_tokens", recorded_shared)
    given = dict(instructions="1+2=3 " * 8, beta=0.1, gradient_checkpointing=checkpointing)
    # In a smaller model the bits would be equal by chance.
    given |= dict(model=grpo.BUNDLED.model, dataset=grpo.BUNDLED.dataset, num_prompts=4)
    module.main(tiny_args(module, tmp_path, max_prompt_tokens=128, num_steps=1, **given))
    assert found and all(found)
    assert max(shared) == 0 if checkpointing else max(shared) >= 48
