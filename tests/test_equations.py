"""The equations of each script: by numbers worked by hand, against slow float64 loops, and by identities."""

import math

import pytest
import torch

import grpo


def ragged_batch(seed, n=6, R=7, dtype=torch.float64):
    """Random log-probabilities, advantages and a ragged mask, with garbage where it is masked."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, ref = (-2 * torch.rand(3, n, R, generator=generator, dtype=dtype)).unbind(0)  # (n, R) each
    lengths = torch.randint(1, R + 1, (n,), generator=generator)
    lengths[0], lengths[1] = R, 1
    mask = torch.arange(R) < lengths[:, None]  # (n, R)
    advantages = torch.randn(n, 1, generator=generator, dtype=dtype)  # (n, 1)
    for tensor in (logprobs, old, ref):
        tensor[~mask] = torch.tensor([math.nan, math.inf, -1e30], dtype=dtype).repeat(n * R)[: int((~mask).sum())]
    return logprobs.requires_grad_(), old, ref, advantages, mask


def slow_grpo(logprobs, old, ref, advantages, mask, eps, beta, num_seqs):
    """Eq. 3 of DeepSeekMath, negated, one token at a time."""
    total = 0.0
    for i in range(len(mask)):
        length = int(mask[i].sum())
        for t in range(length):
            ratio = math.exp(logprobs[i, t] - old[i, t])
            clipped = min(max(ratio, 1 - eps), 1 + eps)
            objective = min(ratio * float(advantages[i, 0]), clipped * float(advantages[i, 0]))
            if beta:
                upside = math.exp(ref[i, t] - logprobs[i, t])  # pi_ref / pi_theta
                objective -= beta * (upside - math.log(upside) - 1)
            total -= objective / length / num_seqs
    return total


# ---- advantages


def test_advantages_by_hand():
    # Rewards 1, 0, 0, 1: mean 0.5, Bessel's std sqrt(4 * 0.25 / 3) = 0.57735.
    advantages = grpo.compute_advantages(grpo.Args(), torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64))
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages.tolist()[0] == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 1.4, 1 / 3, -7.7])
@pytest.mark.parametrize("G", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(script, reward, G):
    # In float32 the mean of equal rewards can be off by an ulp; over a tiny std that would be a large advantage.
    assert (script.compute_advantages(script.Args(), torch.full((2, G), reward)) == 0).all()


def test_advantages_stay_within_their_group():
    rewards = torch.tensor([[0.0, 1.0, 0.5], [10.0, 20.0, 30.0]])
    together = grpo.compute_advantages(grpo.Args(), rewards)
    apart = torch.cat([grpo.compute_advantages(grpo.Args(), row[None]) for row in rewards])
    assert torch.equal(together, apart)
    assert together.mean(1).abs().max() < 1e-6
    assert torch.allclose(together.std(1), torch.ones(2), atol=1e-3)


def test_advantages_refuse_a_flat_vector():
    with pytest.raises(AssertionError):
        grpo.compute_advantages(grpo.Args(), torch.rand(8))


# ---- the loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "token_loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # above the upper bound with a positive advantage: clipped, no gradient
        (0.5, 2.0, -1.0, -1.0),  # below it, the objective is the smaller one: the unclipped
        (1.5, -2.0, 3.0, 3.0),  # a negative advantage turns it around
        (0.5, -2.0, 1.6, 0.0),
        (1.2 - 1e-9, 2.0, -2.4, -2.4),  # just inside
    ],
)
def test_clipping_by_hand(ratio, advantage, token_loss, gradient):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss, _ = grpo.policy_loss(grpo.Args(beta=0.0), logprobs, old, None, advantages, mask, 1, 1)
    loss.backward()
    assert loss.item() == pytest.approx(token_loss, abs=1e-7)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-7)  # d ratio / d logprob = ratio


def test_kl_term_by_hand():
    # pi = 0.5, pi_ref = 0.25: pi_ref / pi - log(pi_ref / pi) - 1 = 0.5 + log 2 - 1. It is ADDED to the loss.
    logprobs = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.tensor([[math.log(0.25)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.zeros(1, 1, dtype=torch.float64)
    loss, stats = grpo.policy_loss(grpo.Args(beta=0.1), logprobs, logprobs.detach(), ref, advantages, mask, 1, 1)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * (0.5 + math.log(2) - 1))
    assert stats["kl"].item() == pytest.approx(0.5 + math.log(2) - 1)
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - 0.5))  # d kl / d logprob = 1 - pi_ref / pi


def test_k3_estimates_the_kl_from_policy_to_reference():
    # Its expectation under the policy is KL(pi || ref), and not the other direction.
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    expectation = 0.0
    for token in range(3):
        logprobs, ref = policy[token].log().view(1, 1), reference[token].log().view(1, 1)
        one = torch.ones(1, 1, dtype=torch.bool)
        _, stats = grpo.policy_loss(grpo.Args(beta=1.0), logprobs, logprobs, ref, torch.zeros(1, 1), one, 1, 1)
        expectation += policy[token].item() * stats["kl"].item()
    assert expectation == pytest.approx((policy * (policy / reference).log()).sum().item())


def test_means_by_hand():
    # Losses 1,1,1,1,10 and nine 1s and a 10: per sequence (2.8 + 1.9) / 2 = 2.35; over tokens it would be 2.2.
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 5:] = False
    advantages = -torch.ones(2, 10, dtype=torch.float64)
    advantages[0, 4], advantages[1, 9] = -10.0, -10.0
    zeros = torch.zeros(2, 10, dtype=torch.float64)
    loss, _ = grpo.policy_loss(grpo.Args(beta=0.0), zeros, zeros, None, advantages, mask, 2, 15)
    assert loss.item() == pytest.approx((14 / 5 + 19 / 10) / 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_gradient_against_a_slow_loop(seed, beta):
    logprobs, old, ref, advantages, mask = ragged_batch(seed)
    args = grpo.Args(clip_eps=0.2, beta=beta)
    num_tokens = int(mask.sum())
    loss, _ = grpo.policy_loss(args, logprobs, old, ref if beta else None, advantages, mask, 6, num_tokens)
    loss.backward()
    values = logprobs.detach()
    assert loss.item() == pytest.approx(slow_grpo(values, old, ref, advantages, mask, 0.2, beta, 6), abs=1e-12)
    assert (logprobs.grad[~mask] == 0).all()
    for i, t in mask.nonzero().tolist():
        up, down = values.clone(), values.clone()
        up[i, t] += 1e-6
        down[i, t] -= 1e-6
        slope = slow_grpo(up, old, ref, advantages, mask, 0.2, beta, 6)
        slope -= slow_grpo(down, old, ref, advantages, mask, 0.2, beta, 6)
        assert logprobs.grad[i, t].item() == pytest.approx(slope / 2e-6, abs=1e-6)


def test_at_ratio_one_the_gradient_is_reinforce():
    logprobs, _, _, advantages, mask = ragged_batch(0)
    args = grpo.Args(beta=0.0)
    loss, stats = grpo.policy_loss(args, logprobs, logprobs.detach(), None, advantages, mask, 6, int(mask.sum()))
    loss.backward()
    gradient = logprobs.grad.clone()
    logprobs.grad = None
    reinforce = -(advantages * logprobs).masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
    (reinforce.sum() / 6).backward()
    assert torch.allclose(gradient, logprobs.grad.nan_to_num(), atol=1e-12)
    assert stats["clip_frac_low"] == stats["clip_frac_high"] == stats["approx_kl"] == 0


def test_slices_add_up_to_the_minibatch(script):
    # The memory knob cuts a minibatch into slices; loss, gradient and sums must not notice.
    logprobs, old, ref, advantages, mask = ragged_batch(3)
    args = script.Args(beta=0.1)
    whole, stats = script.policy_loss(args, logprobs, old, ref, advantages, mask, 6, int(mask.sum()))
    (gradient,) = torch.autograd.grad(whole, logprobs)
    total, sums = 0.0, dict.fromkeys(stats, 0.0)
    for rows in ([0], [4, 1, 5], [2, 3]):
        loss, part = script.policy_loss(
            args, logprobs[rows], old[rows], ref[rows], advantages[rows], mask[rows], 6, int(mask.sum())
        )
        total = total + loss
        sums = {name: sums[name] + part[name] for name in sums}
    (sliced,) = torch.autograd.grad(total, logprobs)
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(sliced, gradient, atol=1e-12)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {name: float(value) for name, value in stats.items()}
    )


def test_stats_are_sums_over_tokens_that_count(script):
    logprobs = torch.tensor([[0.5, -0.5, 0.1, 9.0], [-0.1, 0.0, 7.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    old = torch.zeros_like(logprobs)
    _, stats = script.policy_loss(script.Args(beta=0.0), logprobs, old, None, torch.ones(2, 1), mask, 2, 5)
    assert stats["tokens"] == 5
    assert stats["clip_frac_high"] == 1  # exp(0.5) is above 1.2
    assert stats["clip_frac_low"] == 1  # exp(-0.5) is below 0.8
    assert stats["approx_kl"].item() == pytest.approx(0.5 * (0.25 + 0.25 + 0.01 + 0.01))
    assert stats["ratio_mean"].item() == pytest.approx(sum(math.exp(x) for x in (0.5, -0.5, 0.1, -0.1, 0.0)))
    assert stats["entropy"].item() == pytest.approx(-(0.5 - 0.5 + 0.1 - 0.1 + 0.0))


def test_advantages_per_sequence_or_per_token_are_the_same(script):
    logprobs, old, ref, advantages, mask = ragged_batch(4)
    args, num_tokens = script.Args(beta=0.1), int(mask.sum())
    column, _ = script.policy_loss(args, logprobs, old, ref, advantages, mask, 6, num_tokens)
    full, _ = script.policy_loss(args, logprobs, old, ref, advantages.expand(6, 7), mask, 6, num_tokens)
    assert column.item() == full.item()


def test_shapes_that_would_broadcast_silently_are_refused(script):
    values, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    for bad in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(3, 2)):
        with pytest.raises(AssertionError):
            script.policy_loss(script.Args(beta=0.0), values, values, None, bad, mask, 3, 9)
    with pytest.raises(AssertionError):
        script.policy_loss(script.Args(beta=0.0), values, values[:1], None, torch.zeros(3, 1), mask, 3, 9)


def test_a_fully_masked_sequence_counts_nothing(script):
    logprobs, old, _, advantages, mask = ragged_batch(5)
    mask = mask.clone()
    mask[2] = False
    loss, _ = script.policy_loss(script.Args(beta=0.0), logprobs, old, None, advantages, mask, 6, int(mask.sum()))
    loss.backward()
    assert math.isfinite(loss.item())
    assert (logprobs.grad[2] == 0).all()


def test_inputs_are_not_modified(script):
    logprobs, old, ref, advantages, mask = ragged_batch(6)
    before = [tensor.detach().clone() for tensor in (logprobs, old, ref, advantages, mask)]
    script.policy_loss(script.Args(beta=0.1), logprobs, old, ref, advantages, mask, 6, int(mask.sum()))
    rewards = torch.rand(2, 4)
    rewards_before = rewards.clone()
    script.compute_advantages(script.Args(), rewards)
    after = [tensor.detach() for tensor in (logprobs, old, ref, advantages, mask)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    assert torch.equal(rewards, rewards_before)


# ---- the schedule


def test_learning_rate_by_hand(script):
    args = script.Args(lr_schedule="linear", warmup_updates=4)
    args.num_updates = 12
    factors = [script.lr_factor(args, update) for update in range(12)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0] + [1 - k / 8 for k in range(8)])
    args.lr_schedule = "cosine"
    assert script.lr_factor(args, 8) == pytest.approx(0.5)
    args.lr_schedule = "constant"
    assert script.lr_factor(args, 11) == 1.0


# ---- the order of the data


def test_every_epoch_is_a_new_permutation_and_a_position_is_enough(script):
    walk = script.draw(10, seed=1, position=0, count=30)
    assert [sorted(walk[k : k + 10]) for k in (0, 10, 20)] == [list(range(10))] * 3
    assert walk[:10] != walk[10:20]
    assert script.draw(10, seed=1, position=7, count=16) == walk[7:23]
    assert script.draw(10, seed=2, position=0, count=30) != walk
    assert script.draw(3, seed=1, position=2, count=5) == script.draw(3, seed=1, position=0, count=7)[2:]
