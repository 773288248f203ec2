"""ppo_rlhf.py's whitening, rewards per token, GAE, value loss, explained variance and one-label networks.

Also what main passes to them, and that no dropout is active. test_whole_step.py has whole steps.
"""

import json
import math
import shutil

import pytest
import torch
from conftest import SMALL_JUDGE, SMALL_MODEL, small_recipe
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3_5TextConfig,
    Qwen3_5TextForSequenceClassification,
)

import ppo_rlhf

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]


def ragged(seed, count, n=5, R=6):
    """A ragged mask, and `count` tensors (n, R) with garbage in the masked slots.

    One row of the mask is full and one has a single token.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, R + 1, (n,), generator=generator)
    lengths[0], lengths[1] = R, 1
    mask = torch.arange(R) < lengths[:, None]  # (n, R)
    tensors = torch.randn(count, n, R, generator=generator, dtype=torch.float64)  # (count, n, R)
    return mask, [spoil(tensor, mask, k) for k, tensor in enumerate(tensors)]


def spoil(tensor, mask, shift=0):
    """The tensor with garbage in the masked slots. Each shift gives other garbage."""
    spoiled, slots = tensor.clone(), int((~mask).sum())
    garbage = [GARBAGE[(k + shift) % len(GARBAGE)] for k in range(slots)]
    spoiled[~mask] = torch.tensor(garbage, dtype=tensor.dtype)
    return spoiled


def counted(tensor, mask):
    """For each row, the list of its unmasked values."""
    return [row[keep].tolist() for row, keep in zip(tensor, mask, strict=True)]


def same(tensor, rows, mask):
    """The unmasked slots hold these numbers, and the masked slots are exactly 0."""
    assert tensor.shape == mask.shape
    for row, expected in zip(counted(tensor, mask), rows, strict=True):
        assert row == pytest.approx(expected, abs=1e-10)
    assert (tensor[~mask] == 0).all()


# ---- whiten


def test_whiten_by_hand():
    # The unmasked values 1, 3, 5 have mean 3 and biased variance 8/3.
    values = torch.tensor([[1.0, 3.0, 100.0], [5.0, math.nan, -math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    z = 2 / math.sqrt(8 / 3 + 1e-8)
    same(ppo_rlhf.whiten(values, mask), [[-z, 0.0], [z]], mask)


def test_the_epsilon_of_whiten_stands_in_the_root():
    # The variance of 0 and 2e-4 is also 1e-8. An epsilon outside the root would vanish beside the std of 1e-4.
    values, mask = (
        torch.tensor([[0.0, 2e-4]], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bool),
    )
    same(ppo_rlhf.whiten(values, mask), [[-1 / math.sqrt(2), 1 / math.sqrt(2)]], mask)


@pytest.mark.parametrize("seed", range(3))
def test_whiten_against_a_slow_loop(seed):
    mask, (values,) = ragged(seed, 1)
    flat = [x for row in counted(values, mask) for x in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat) + 1e-8)
    expected = [[(x - mean) / std for x in row] for row in counted(values, mask)]
    same(ppo_rlhf.whiten(values, mask), expected, mask)


def test_whitened_values_have_their_moments_over_the_tokens_that_count():
    mask, (values,) = ragged(3, 1)
    whitened = ppo_rlhf.whiten(5 * values + 2, mask)[mask]
    assert whitened.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert whitened.var(correction=0).item() == pytest.approx(1.0)


# ---- rewards per token


def test_rewards_by_hand():
    args = ppo_rlhf.Args(beta=0.1)
    mask = torch.tensor(
        [[True, True, True], [True, False, False], [True, True, False], [False, False, False]]
    )
    old = torch.tensor(
        [[-1.0, -2.0, -3.0], [-1.0, 9.0, 9.0], [-0.5, -0.5, math.inf], [math.nan, 1.0, 1.0]]
    ).double()
    ref = torch.tensor(
        [[-2.0, -1.0, -3.0], [-3.0, math.nan, 9.0], [-0.5, -1.5, 9.0], [9.0, 9.0, 9.0]]
    ).double()
    scores = torch.tensor([10.0, 20.0, -30.0, 40.0], dtype=torch.float64)
    # Every token gets -0.1 (old - ref). The last unmasked token also gets the score.
    expected = [[-0.1, 0.1, 10.0], [20.0 - 0.2], [0.0, -30.0 - 0.1], []]
    same(ppo_rlhf.kl_rewards(args, scores, old, ref, mask), expected, mask)
    # With beta 0 there is no reference, only the score.
    rewards = ppo_rlhf.kl_rewards(ppo_rlhf.Args(beta=0.0), scores, old, None, mask)
    same(rewards, [[0.0, 0.0, 10.0], [20.0], [0.0, -30.0], []], mask)


@pytest.mark.parametrize("seed", range(3))
def test_rewards_against_a_slow_loop(seed):
    mask, (old, ref) = ragged(seed, 2)
    scores = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = [
        [
            -0.3 * (p - q) + (float(score) if t == len(a) - 1 else 0.0)
            for t, (p, q) in enumerate(zip(a, b, strict=True))
        ]
        for a, b, score in zip(counted(old, mask), counted(ref, mask), scores, strict=True)
    ]
    rewards = ppo_rlhf.kl_rewards(ppo_rlhf.Args(beta=0.3), scores, old, ref, mask)
    same(rewards, expected, mask)
    # A response's rewards add up to its score minus beta times its KL, so the score counts once.
    total = scores - 0.3 * (old - ref).masked_fill(~mask, 0.0).sum(1)
    assert torch.allclose(rewards.sum(1), total, atol=1e-12)


def test_scores_of_a_shape_that_would_broadcast_are_refused():
    mask, old = torch.ones(3, 3, dtype=torch.bool), torch.zeros(3, 3)
    for scores in (torch.zeros(3, 1), torch.zeros(3, 3), torch.zeros(1)):
        with pytest.raises(AssertionError):
            ppo_rlhf.kl_rewards(ppo_rlhf.Args(beta=0.1), scores, old, old, mask)


# ---- generalized advantage estimation


def test_gae_by_hand():
    # With gamma 0.5, lambda 0.5, values 1, 2, 3 and a final reward of 8:
    # delta = 0 + 1 - 1, 0 + 1.5 - 2, 8 + 0 - 3 = 0, -0.5, 5;  A = 0 + 0.25 * 0.75, -0.5 + 0.25 * 5, 5.
    # In the second row, a masked reward and a masked value follow the only unmasked token.
    args = ppo_rlhf.Args(gamma=0.5, gae_lambda=0.5)
    rewards = torch.tensor([[0.0, 0.0, 8.0], [8.0, 100.0, math.nan]], dtype=torch.float64)
    values = torch.tensor([[1.0, 2.0, 3.0], [3.0, 100.0, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = ppo_rlhf.compute_gae(args, rewards, values, mask)
    same(advantages, [[0.1875, 0.75, 5.0], [5.0]], mask)
    same(returns, [[1.1875, 2.75, 8.0], [8.0]], mask)


def slow_gae(rewards, values, gamma, lambda_):
    """A_t = sum_k (gamma lambda)^k delta_(t+k) for one row of unmasked tokens, with each sum written out."""
    T = len(rewards)
    delta = [
        rewards[t] + (gamma * values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)
    ]
    return [
        math.fsum((gamma * lambda_) ** k * delta[t + k] for k in range(T - t)) for t in range(T)
    ]


@pytest.mark.parametrize(
    ("gamma", "lambda_"), [(1.0, 0.95), (0.99, 0.9), (0.9, 1.0), (1.0, 1.0), (0.7, 0.0), (0.0, 0.5)]
)
@pytest.mark.parametrize("seed", range(2))
def test_gae_against_the_sum_of_deltas(seed, gamma, lambda_):
    mask, (rewards, values) = ragged(seed, 2)
    args = ppo_rlhf.Args(gamma=gamma, gae_lambda=lambda_)
    advantages, returns = ppo_rlhf.compute_gae(args, rewards, values, mask)
    rows = list(zip(counted(rewards, mask), counted(values, mask), strict=True))
    expected = [slow_gae(r, v, gamma, lambda_) for r, v in rows]
    same(advantages, expected, mask)
    same(
        returns,
        [
            [a + x for a, x in zip(e, v, strict=True)]
            for e, (_, v) in zip(expected, rows, strict=True)
        ],
        mask,
    )


def test_gae_at_lambda_1_is_what_is_still_to_come_minus_the_value():
    mask, (rewards, values) = ragged(5, 2)
    args = ppo_rlhf.Args(gamma=1.0, gae_lambda=1.0)
    advantages, returns = ppo_rlhf.compute_gae(args, rewards, values, mask)
    clean = rewards.masked_fill(~mask, 0.0)  # (n, R)
    to_come = clean.flip(1).cumsum(1).flip(1).masked_fill(~mask, 0.0)  # (n, R)
    assert torch.allclose(returns, to_come, atol=1e-12)
    assert torch.allclose(advantages, (to_come - values).masked_fill(~mask, 0.0), atol=1e-12)


def test_nothing_depends_on_padding():
    # Other garbage in more masked slots must not change a bit of the results.
    mask, (rewards, values) = ragged(7, 2)
    args = ppo_rlhf.Args()
    wider = torch.nn.functional.pad(mask, (0, 3))
    for shift in (1, 2, 3):
        dirty = [
            spoil(torch.nn.functional.pad(tensor, (0, 3)), wider, shift)
            for tensor in (rewards, values)
        ]
        for one, other in zip(
            ppo_rlhf.compute_gae(args, rewards, values, mask),
            ppo_rlhf.compute_gae(args, *dirty, wider),
            strict=True,
        ):
            assert torch.equal(one, other[:, :6]) and (other[:, 6:] == 0).all()
        assert torch.allclose(
            ppo_rlhf.whiten(values, mask), ppo_rlhf.whiten(dirty[1], wider)[:, :6], atol=1e-12
        )


def test_gae_does_not_modify_its_inputs():
    mask, (rewards, values) = ragged(8, 2)
    before = [tensor.clone() for tensor in (rewards, values, mask)]
    advantages, returns = ppo_rlhf.compute_gae(ppo_rlhf.Args(), rewards, values, mask)
    # Changing the outputs must not change the inputs.
    advantages.add_(1.0)
    returns.add_(1.0)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(before, (rewards, values, mask), strict=True)
    )
    with pytest.raises(AssertionError):
        ppo_rlhf.compute_gae(ppo_rlhf.Args(), rewards, values[:, :1], mask)


# ---- the value loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        # 0.5 max((V - R)^2, (clip(V, old - 0.2, old + 0.2) - R)^2)
        (1.1, 1.0, 2.0, 0.5 * 0.81, -0.9, 0),  # inside the clip
        # The value moves towards the target, past the clip at 1.2: no gradient.
        (1.5, 1.0, 2.0, 0.5 * 0.64, 0.0, 1),
        # The value moves away from the target: the unclipped error is larger.
        (0.5, 1.0, 2.0, 0.5 * 2.25, -1.5, 0),
        (0.5, 1.0, 0.0, 0.5 * 0.64, 0.0, 1),
        (1.5, 1.0, 0.0, 0.5 * 2.25, 1.5, 0),
        # The value moves past the target: the unclipped error is 1, the clipped error is 0.8.
        (3.0, 1.0, 2.0, 0.5 * 1.0, 1.0, 0),
        (2.0, 2.0, 2.0, 0.0, 0.0, 0),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, target = (
        torch.tensor([[old]], dtype=torch.float64),
        torch.tensor([[target]], dtype=torch.float64),
    )
    args = ppo_rlhf.Args(value_clip_eps=0.2)
    result, stats = ppo_rlhf.value_loss(
        args, values, old, target, torch.ones(1, 1, dtype=torch.bool), 4
    )
    result.backward()
    assert result.item() == pytest.approx(loss / 4)
    assert values.grad.item() == pytest.approx(gradient / 4)
    assert stats["value/loss"].item() == pytest.approx(loss)  # a sum
    assert stats["value/clip_frac"] == clipped


def slow_value_loss(values, old, returns, mask, eps, num_tokens):
    total = 0.0
    for v_row, o_row, r_row in zip(
        *(counted(x, mask) for x in (values, old, returns)), strict=True
    ):
        for v, o, r in zip(v_row, o_row, r_row, strict=True):
            near = min(max(v, o - eps), o + eps)
            total += 0.5 * max((v - r) ** 2, (near - r) ** 2)
    return total / num_tokens


@pytest.mark.parametrize("seed", range(4))
def test_value_loss_and_gradient_against_a_slow_loop(seed):
    mask, (values, old, returns) = ragged(seed, 3)
    args = ppo_rlhf.Args(value_clip_eps=0.5)
    values.requires_grad_()
    rest = (old, returns, mask, 0.5, 40)
    loss, _ = ppo_rlhf.value_loss(args, values, old, returns, mask, 40)
    loss.backward()
    assert loss.item() == pytest.approx(slow_value_loss(values.detach(), *rest), abs=1e-12)
    assert (values.grad[~mask] == 0).all()
    for i, t in mask.nonzero().tolist():
        up, down = values.detach().clone(), values.detach().clone()
        up[i, t] += 1e-6
        down[i, t] -= 1e-6
        slope = (slow_value_loss(up, *rest) - slow_value_loss(down, *rest)) / 2e-6
        assert values.grad[i, t].item() == pytest.approx(slope, abs=1e-6)


def test_slices_of_the_value_loss_add_up():
    mask, (values, old, returns) = ragged(4, 3)
    args, num_tokens = ppo_rlhf.Args(), int(mask.sum())
    values.requires_grad_()
    whole, stats = ppo_rlhf.value_loss(args, values, old, returns, mask, num_tokens)
    (gradient,) = torch.autograd.grad(whole, values)
    rows = ([0], [4, 1], [2, 3])
    parts = [
        ppo_rlhf.value_loss(args, values[i], old[i], returns[i], mask[i], num_tokens) for i in rows
    ]
    total = sum(loss for loss, _ in parts)
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(total, values)[0], gradient, atol=1e-12)
    for name, value in stats.items():
        assert sum(float(part[name]) for _, part in parts) == pytest.approx(float(value))


def test_value_loss_refuses_shapes_that_would_broadcast():
    values, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    for bad in (torch.zeros(3), torch.zeros(3, 1), torch.zeros(1, 3)):
        with pytest.raises(AssertionError):
            ppo_rlhf.value_loss(ppo_rlhf.Args(), values, values, bad, mask, 9)
        with pytest.raises(AssertionError):
            ppo_rlhf.value_loss(ppo_rlhf.Args(), bad, values, values, mask, 9)


# ---- the explained variance of the values


def test_explained_variance_by_hand():
    # The returns 0, 2, 4 have variance 4. The errors 1, 0, -1 have variance 1.
    mask = torch.tensor([[True, True, False], [True, False, False]])
    returns = torch.tensor([[0.0, 2.0, math.nan], [4.0, math.inf, 9.0]], dtype=torch.float64)
    values = torch.tensor([[-1.0, 2.0, math.inf], [5.0, 7.0, math.nan]], dtype=torch.float64)
    assert ppo_rlhf.explained_variance(values, returns, mask).item() == pytest.approx(0.75)
    assert ppo_rlhf.explained_variance(returns, returns, mask).item() == 1
    constant = torch.full((2, 3), 17.0, dtype=torch.float64)
    assert ppo_rlhf.explained_variance(constant, returns, mask).item() == pytest.approx(0.0)


def test_equal_returns_have_no_variance_to_explain():
    # The computed mean of equal returns has a rounding error. The explained variance must be null,
    # for values with any error.
    returns, mask = torch.full((3, 7), 1.1), torch.ones(3, 7, dtype=torch.bool)
    for scale in (0.0, 1e-7, 1.0):
        values = returns + scale * torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
        assert not math.isfinite(ppo_rlhf.explained_variance(values, returns, mask))


# ---- the networks with one label


def tiny_classifier(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=None,
        # A large range gives different outputs at each position.
        initializer_range=0.3,
    )
    return LlamaForSequenceClassification(config).eval()


def ragged_rollout(seed=0):
    """Prompts and responses as lists, and as a padded Rollout. They also contain the padding token, 0."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for P, R in [(1, 6), (7, 1), (3, 4), (7, 6), (2, 2)]:
        ids = torch.randint(0, 30, (P + R,), generator=generator).tolist()
        # Pad, BOS and EOS have the same id, so the script can't compute masks from ids.
        ids[0] = ids[-1] = 0
        pairs.append((ids[:P], ids[P:]))
    prompts = [[0] * (7 - len(prompt)) + prompt for prompt, _ in pairs]
    responses = [response + [0] * (6 - len(response)) for _, response in pairs]
    prompt_mask = torch.arange(7) >= 7 - torch.tensor([[len(prompt)] for prompt, _ in pairs])
    response_mask = torch.arange(6) < torch.tensor([[len(response)] for _, response in pairs])
    rollout = ppo_rlhf.Rollout(
        prompt_ids=torch.tensor(prompts),
        prompt_mask=prompt_mask,
        response_ids=torch.tensor(responses),
        response_mask=response_mask,
        sampled_logprobs=torch.zeros(5, 6),
    )
    return pairs, rollout


def plain_outputs(network, pair):
    """The head's output after each token of prompt and response, from a forward pass of one sequence."""
    with torch.no_grad():
        return network.score(network.base_model(torch.tensor([sum(pair, [])])).last_hidden_state)[
            0, :, 0
        ].tolist()


@pytest.mark.parametrize("bias", [False, True])
def test_values_are_those_of_a_plain_forward_pass_at_the_states_before_each_token(bias):
    network, (pairs, rollout) = tiny_classifier(), ragged_rollout()
    if bias:
        network.score = torch.nn.Linear(32, 1, bias=True)
        torch.nn.init.constant_(network.score.bias, 3.0)
    with torch.no_grad():
        values = ppo_rlhf.compute_values(network, rollout)
        scores = ppo_rlhf.compute_scores(network, rollout)
    assert values.shape == (5, 6) and values.dtype == torch.float32
    assert scores.shape == (5,) and scores.dtype == torch.float32
    for row, score, (prompt, response) in zip(values.tolist(), scores.tolist(), pairs, strict=True):
        expected = plain_outputs(network, (prompt, response))[len(prompt) - 1 :]
        assert [*row[: len(response)], score] == pytest.approx(expected, abs=1e-5)
        assert row[len(response) :] == [0.0] * (6 - len(response))


def test_the_score_is_the_classifiers_own_output_for_the_unpadded_response():
    network, (pairs, rollout) = tiny_classifier(1), ragged_rollout(1)
    with torch.no_grad():
        scores = ppo_rlhf.compute_scores(network, rollout)
        for score, (prompt, response) in zip(scores, pairs, strict=True):
            expected = network(torch.tensor([prompt + response])).logits.item()
            assert score.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("compute", [ppo_rlhf.compute_values, ppo_rlhf.compute_scores])
def test_values_and_scores_do_not_depend_on_what_stands_in_padding(compute):
    network, (_, rollout) = tiny_classifier(2), ragged_rollout(2)
    other = rollout._replace(
        prompt_ids=rollout.prompt_ids.masked_fill(~rollout.prompt_mask, 17),
        response_ids=rollout.response_ids.masked_fill(~rollout.response_mask, 23),
    )
    with torch.no_grad():
        before = compute(network, rollout)
        after = compute(network, other)
    assert torch.allclose(before, after, atol=1e-6)


def test_the_value_network_gets_its_gradient_from_the_states_that_count():
    network, (pairs, rollout) = tiny_classifier(3), ragged_rollout(3)
    mask = rollout.response_mask
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    values = ppo_rlhf.compute_values(network, rollout)  # (n, R)
    (values * weights).masked_fill(~mask, 0.0).sum().backward()
    gradient = network.score.weight.grad.clone()
    network.zero_grad()
    for row, (prompt, response) in zip(weights, pairs, strict=True):
        states = network.model(torch.tensor([prompt + response])).last_hidden_state[0]
        # The state before each response token, (|o|, D).
        states = states[len(prompt) - 1 : -1]
        (network.score(states)[:, 0] * row[: len(states)]).sum().backward()
    assert torch.allclose(gradient, network.score.weight.grad, atol=1e-4)


# ---- main


def run(tmp_path, **given):
    """Run main on the bundled task, by default for one small step."""
    fields = dict(
        runs_dir=str(tmp_path),
        device="cpu",
        num_steps=1,
        num_prompts=4,
        eval_size=2,
        num_iterations=1,
    )
    fields |= dict(max_new_tokens=18, run_name="run")
    ppo_rlhf.main(ppo_rlhf.Args(**small_recipe(ppo_rlhf) | fields | given))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


def test_each_response_is_scored_by_the_judge_at_its_last_token(tmp_path, monkeypatch):
    scored, kl_rewards = [], ppo_rlhf.kl_rewards

    def recorded(args, scores, old_logprobs, ref_logprobs, mask):
        scored.append((scores, mask))
        return kl_rewards(args, scores, old_logprobs, ref_logprobs, mask)

    monkeypatch.setattr(ppo_rlhf, "kl_rewards", recorded)
    run(tmp_path, num_prompts=16, missing_eos_penalty=0.5)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    judge = LlamaForSequenceClassification.from_pretrained(SMALL_JUDGE)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    ((scores, mask),) = scored
    ended = []
    for sample, score, counts in zip(samples, scores.tolist(), mask, strict=True):
        (completion,) = sample["completions"]
        response = tokenizer(completion, add_special_tokens=False).input_ids
        # The text doesn't contain the EOS token.
        ended.append(len(response) < int(counts.sum()))
        pair = (
            tokenizer(sample["prompt"]).input_ids,
            response + [tokenizer.eos_token_id] * ended[-1],
        )
        assert score == pytest.approx(
            plain_outputs(judge, pair)[-1] - 0.5 * (not ended[-1]), abs=1e-4
        )
        assert sample["rewards"] == [score]
    assert set(ended) == {True, False}, "some responses must be cut and some not"


def test_the_rules_only_say_what_is_right_where_a_reward_model_scores(tmp_path, monkeypatch):
    def rule(completions, answer, **columns):
        return [0.25] * len(completions)

    monkeypatch.setattr(ppo_rlhf, "REWARDS", [rule])
    (metrics,) = run(tmp_path / "judge")
    assert "rollout/score" in metrics and "rollout/rule" not in metrics
    assert metrics["rollout/accuracy"] == 0.25
    (metrics,) = run(tmp_path / "rules", reward_model=None, missing_eos_penalty=0.0)
    assert "rollout/score" not in metrics and metrics["rollout/rule"] == 0.25
    assert metrics["rollout/reward_mean"] == 0.25


def test_the_values_move_and_the_old_ones_stay(tmp_path, monkeypatch):
    moved, value_loss = [], ppo_rlhf.value_loss

    def recorded(args, values, old_values, *rest, **counts):
        moved.append((values - old_values).abs().max().item())
        return value_loss(args, values, old_values, *rest, **counts)

    monkeypatch.setattr(ppo_rlhf, "value_loss", recorded)
    run(tmp_path, num_iterations=3, value_learning_rate=1e-2)
    assert moved[0] < 1e-5 and moved[-1] > 1e-2


def test_a_value_network_of_another_family_has_rows_of_its_own(tmp_path, monkeypatch):
    """The policy computes once what its prompts begin with. A value network with linear attention can't do so."""
    judge = shutil.copytree(SMALL_JUDGE, tmp_path / "judge")
    torch.manual_seed(0)
    given = json.loads((judge / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id", "head_dim")
    shape = {name: given[name] for name in (*names, "num_attention_heads", "num_key_value_heads")}
    shape |= dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    shape |= dict(linear_num_key_heads=2, linear_num_value_heads=2)
    network = Qwen3_5TextForSequenceClassification(Qwen3_5TextConfig(**shape, num_labels=1))
    network.save_pretrained(judge)
    common, values = {"logprobs": [], "values": []}, []
    compute_logprobs, compute_values = ppo_rlhf.compute_logprobs, ppo_rlhf.compute_values

    def recorded_logprobs(model, rollout, temperature):
        common["logprobs"].append(rollout.common)
        return compute_logprobs(model, rollout, temperature)

    def recorded_values(network, rollout):
        common["values"].append(rollout.common)
        values.append((rollout, compute_values(network, rollout)))
        return values[-1][1]

    monkeypatch.setattr(ppo_rlhf, "compute_logprobs", recorded_logprobs)
    monkeypatch.setattr(ppo_rlhf, "compute_values", recorded_values)
    given = dict(num_generations=4, max_new_tokens=8, micro_batch_tokens=64)
    run(tmp_path, reward_model=str(judge), **given)
    assert max(common["logprobs"]) > 0 and max(common["values"]) == 0
    rollout, found = values[0]
    for i, row in enumerate(found.tolist()):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist()
        response = rollout.response_ids[i][rollout.response_mask[i]].tolist()
        expected = plain_outputs(network, (prompt, response))[len(prompt) - 1 : -1]
        assert row[: len(response)] == pytest.approx(expected, abs=1e-5)


def test_no_dropout_anywhere_under_gradient_checkpointing(tmp_path, monkeypatch):
    """transformers recomputes activations only in training mode. Dropout in this mode would make values random."""
    judge = shutil.copytree(SMALL_JUDGE, tmp_path / "judge")
    torch.manual_seed(0)
    vocab_size = json.loads((judge / "config.json").read_text())["vocab_size"]
    shape = dict(
        vocab_size=vocab_size,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=128,
        pad_token_id=0,
        num_labels=1,
    )
    GPT2ForSequenceClassification(
        GPT2Config(**shape, resid_pdrop=0.5, embd_pdrop=0.5)
    ).save_pretrained(judge)
    calls, compute_values = [], ppo_rlhf.compute_values

    def twice(network, rollout):
        first, second = compute_values(network, rollout), compute_values(network, rollout)
        assert torch.equal(first, second)
        calls.append(network.training)
        return first

    monkeypatch.setattr(ppo_rlhf, "compute_values", twice)
    run(tmp_path, reward_model=str(judge), gradient_checkpointing=True)
    assert True in calls
