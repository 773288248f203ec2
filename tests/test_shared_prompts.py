"""Micro-batches that compute what all prompts begin with once: log-probabilities, values, scores and gradients.

The reference is a forward pass of each sequence alone. What a micro-batch holds and shares is told by hand.
test_sampling.py has the model families, and test_whole_step.py the steps of all scripts.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
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
            assert (
                max(script.common_tokens(model, part.prompts) for _, part in batches) >= BEGINNING
            )
            model.zero_grad()
            for rows, part in batches:
                found = compute(model, part)
                assert_near(found, expected[rows])
                (found * weights[rows]).sum().backward()
            assert_same_gradients(gradients_of(model), slow)


@pytest.mark.parametrize("module", [grpo, grpo_tools, grpo_lora])
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


@pytest.mark.parametrize("module", [ppo_rlhf, vapo])
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
    batches = micro_batches(grpo, rollout, shuffled, 64)
    found = [(sorted(rows), grpo.common_tokens(model, part.prompts)) for rows, part in batches]
    assert sorted(found) == expected


def test_what_the_model_is_called_with():
    """The 12 common tokens, and the rest. Or whole rows: with checkpointing, with other layers, and on a GPU."""
    model, shapes = build("Llama").train(), []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    rollout = random_rollout(grpo, [(13, [9, 4, 2, 2])])
    grpo.compute_logprobs(model, rollout, 1.0)
    model.gradient_checkpointing_enable()
    grpo.compute_logprobs(model, rollout, 1.0)
    assert shapes == [(1, 12), (4, 10), (4, 22)]
    # A reference, a copy in evaluation mode, computes the same rows.
    grpo.compute_logprobs(model.eval(), rollout, 1.0)
    assert shapes[3:] == [(4, 22)]
    model = build("Llama")
    assert grpo.common_tokens(model, rollout.prompts) == 12
    assert grpo.common_tokens(model, [[1, 5, 6], [1, 7, 6]]) == 0, "BOS alone isn't worth a pass"
    assert grpo.common_tokens(model, [[1, 5, 6], [1, 5, 7]]) == 2
    for kind in ("linear_attention", "conv", "hybrid", "chunked_attention"):
        model.config.layer_types = ["full_attention", kind]
        assert grpo.common_tokens(model, rollout.prompts) == 0
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert grpo.common_tokens(on_gpu, rollout.prompts) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("module", [grpo, grpo_lora, grpo_offpolicy])
def test_the_reference_computes_as_the_policy_does(tmp_path, monkeypatch, module, checkpointing):
    """Before the first update both are equal to the bit. If all rewards are 0, Adam makes a step of any difference.

    All prompts begin with the instructions. Both networks share them, or neither does.
    """
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
    given |= dict(model=module.BUNDLED.model, dataset=module.BUNDLED.dataset, num_prompts=4)
    module.main(tiny_args(module, tmp_path, max_prompt_tokens=128, num_steps=1, **given))
    assert found and all(found)
    assert max(shared) == 0 if checkpointing else max(shared) >= 48
