"""Micro-batches: what they hold. Log-probabilities, values, scores and gradients are those of single sequences.

The reference is a forward pass of each sequence alone. test_sampling.py has the model families, test_whole_step.py the
steps of all scripts, and test_shared_prompts.py more on the patch that computes common tokens once.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import patched_by
from test_critics import tiny_classifier
from test_errors import tiny_args
from test_lora import adapted
from test_lora import make_args as lora_args
from test_sampling import assert_near, assert_same_gradients, build, random_rollout, slow_logprobs
from test_sampling import double as double  # a fixture

import grpo
import grpo_lora
import grpo_offpolicy
import grpo_tools
import ppo_rlhf
import vapo

# Lengths of prompts and of their responses. One response has one token.
GROUPS = [(14, [8, 1, 12, 9, 5]), (12, [4, 4, 6, 2, 1]), (14, [7, 30, 3, 2, 25]), (13, [6, 3, 21])]
N, BEGINNING = 18, 11
SHARED = {name: patched_by("shared_prompts", name) for name in ("grpo", "ppo_rlhf")}


def micro_batches(script, rollout, sequences, budget):
    args = SimpleNamespace(micro_batch_tokens=budget)
    batches = list(script.micro_batches(args, rollout, sequences))
    assert sorted(sum([rows for rows, _ in batches], [])) == sorted(sequences.tolist())
    return batches


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(script, model, rollout, compute, expected):
    """What compute returns for micro-batches, and the gradients, against expected (N, R), which has a gradient.

    The sequences are all of a rollout, or half of them, which splits groups, in any order.
    """
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    weights *= rollout.response_mask
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    for sequences in (torch.arange(N), shuffled, shuffled[: N // 2]):
        model.zero_grad()
        (expected * weights)[sequences].sum().backward(retain_graph=True)
        slow = gradients_of(model)
        for budget in (100, 10**6):
            batches = micro_batches(script, rollout, sequences, budget)
            if script in SHARED.values():
                common = [script.common_tokens(model, part.prompts) for _, part in batches]
                assert max(common) >= BEGINNING
            model.zero_grad()
            for rows, part in batches:
                found = compute(model, part)
                assert_near(found, expected[rows])
                (found * weights[rows]).sum().backward()
            assert_same_gradients(gradients_of(model), slow)


@pytest.mark.parametrize("module", [grpo, grpo_tools, grpo_lora, SHARED["grpo"]])
def test_log_probabilities_and_gradients_are_those_of_single_sequences(double, module):
    model = build("Llama, tied head")
    if module is grpo_lora:
        model = adapted(lora_args(), model)
    double(model)
    rollout = random_rollout(module, GROUPS, beginning=BEGINNING)
    expected = slow_logprobs(model, rollout, 0.7)

    def compute(model, part):
        return module.compute_logprobs(model, part, 0.7)

    compare(module, model, rollout, compute, expected)
    names = {name[-6:] for name, p in model.named_parameters() if p.grad is not None}
    assert module is not grpo_lora or names == {"lora_A", "lora_B"}


@pytest.mark.parametrize("module", [ppo_rlhf, vapo, SHARED["ppo_rlhf"]])
def test_values_scores_and_gradients_are_those_of_single_sequences(double, module):
    network = double(tiny_classifier())
    rollout = random_rollout(module, GROUPS, beginning=BEGINNING, vocabulary=30)
    texts, values = [], []
    for i in range(N):
        prompt = torch.tensor(rollout.prompts[i])
        response = rollout.response_ids[i][rollout.response_mask[i]]
        texts.append(torch.cat([prompt, response])[None])
        states = network.base_model(texts[-1]).last_hidden_state[0, len(prompt) - 1 : -1]
        padding = rollout.response_ids.shape[1] - len(response)
        values.append(torch.nn.functional.pad(network.score(states)[:, 0], (0, padding)))
    compare(module, network, rollout, module.compute_values, torch.stack(values))
    if module is ppo_rlhf:
        scores = ppo_rlhf.rollout_scores(ppo_rlhf.Args(micro_batch_tokens=100), network, rollout)
        assert_near(scores, torch.cat([network(text).logits[0] for text in texts]))


@pytest.mark.parametrize("module", [grpo, grpo_tools])
def test_micro_batches_keep_to_the_budget(module):
    """A micro-batch has at most --micro-batch-tokens tokens, padding included, unless it has one sequence."""
    rollout = random_rollout(module, GROUPS)
    # A tool's tokens take memory, too.
    mask = getattr(rollout, "context_mask", rollout.response_mask)
    prompt_lengths = torch.tensor([len(prompt) for prompt in rollout.prompts])
    lengths = (prompt_lengths + mask.sum(1)).tolist()
    for budget in (1, 30, 40, 99, 10**6):
        batches = micro_batches(module, rollout, torch.arange(N), budget)
        for rows, part in batches:
            longest = max(lengths[i] for i in rows)
            assert len(rows) == 1 or len(rows) * longest <= budget
            assert torch.equal(part.response_ids, rollout.response_ids[rows])
            assert part.prompts == [rollout.prompts[i] for i in rows]
        # A next sequence wouldn't fit, and neighbours are of similar length.
        for (rows, _), (following, _) in pairwise(batches):
            assert (len(rows) + 1) * max(lengths[i] for i in rows) > budget
            assert min(lengths[i] for i in rows) >= max(lengths[i] for i in following)
        assert budget > 1 or len(batches) == N
    assert len(batches) == 1


def test_rows_that_are_not_computed_are_nan():
    """A loss that uses them before main has computed them must not take them for log-probabilities."""
    model = build("Llama")
    rollout = random_rollout(grpo, GROUPS)
    computed = torch.tensor([3, 0, 11])
    args = SimpleNamespace(micro_batch_tokens=30, temperature=1.0)
    logprobs = grpo.rollout_logprobs(args, model, rollout, [computed[:2], computed[2:]])
    others = torch.ones(N, dtype=torch.bool)
    others[computed] = False
    assert logprobs[others].isnan().all() and logprobs[computed].isfinite().all()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("module", [grpo, grpo_lora, grpo_offpolicy, SHARED["grpo"]])
def test_the_reference_computes_as_the_policy_does(tmp_path, monkeypatch, module, checkpointing):
    """Before the first update both are equal to the bit. If all rewards are 0, Adam makes a step of any difference.

    All prompts begin with the instructions, which the patch shares in both networks.
    """
    policy_loss, found = module.policy_loss, []

    def recorded_loss(logprobs, old_logprobs, ref_logprobs, *rest, **named):
        found.append(torch.equal(logprobs, ref_logprobs))
        return policy_loss(logprobs, old_logprobs, ref_logprobs, *rest, **named)

    monkeypatch.setattr(module, "policy_loss", recorded_loss)
    given = dict(instructions="1+2=3 " * 8, beta=0.1, gradient_checkpointing=checkpointing)
    # In a smaller model the bits would be equal by chance.
    given |= dict(model=module.BUNDLED.model, dataset=module.BUNDLED.dataset, num_prompts=4)
    module.main(tiny_args(module, tmp_path, max_prompt_tokens=128, num_steps=1, **given))
    assert found and all(found)
