"""Every loss, and the advantages of the scripts with rewards per response, by hand and by slow loops.

An equation whose text is the same in several scripts, as test_siblings.py checks, is tested in the first of them.
Also: KL terms, dynamic sampling, the overlong penalty, minibatches and slices, masked slots and refused shapes.
What other scripts add is in test_child_equations.py, test_ppo_equations.py, test_vapo_equations.py and others.
"""

import dataclasses
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from scripts import SCRIPTS
from siblings import parts

import dapo
import distill
import dr_grpo
import grpo
import ppo_rlhf
import reinforce_baseline
import remax
import rloo
import vapo

# The first script with each loss.
LOSSES = list({parts(name)["policy_loss"]: name for name in reversed(SCRIPTS)}.values())[::-1]


def make_args(script, **fields):
    """Args of the script, with only the fields that this script has."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    given = {"max_new_tokens": 10, "beta": 0.0, **fields}
    return script.Args(**{name: value for name, value in given.items() if name in known})


# These scripts have one advantage per token, (n, R). The others have one per sequence, (n, 1).
PER_TOKEN = ("ppo_rlhf", "vapo", "grpo_process", "distill")


def loss_of(script, args, logprobs, old, ref, advantages, mask, num_seqs, num_tokens):
    """Call any script's policy_loss with the arguments that this script takes."""
    # The loss must not use this reference.
    if ref is None:
        ref = torch.full_like(logprobs, -1.0)
    if script.__name__ in PER_TOKEN and advantages.shape == (len(mask), 1):
        advantages = advantages.expand(mask.shape)
    given = dict(ref_logprobs=ref, teacher_logprobs=ref, sampler_weights=torch.ones_like(logprobs))
    given |= dict(num_seqs=num_seqs, num_tokens=num_tokens)
    names = inspect.signature(script.policy_loss).parameters
    given = {name: value for name, value in given.items() if name in names}
    return script.policy_loss(args, logprobs, old, advantages=advantages, mask=mask, **given)


def advantages_of(script, rewards):
    """The script's advantages. Scripts that take a baseline get the mean."""
    if script is reinforce_baseline:
        return script.compute_advantages(rewards, rewards.mean())
    if script is remax:
        return script.compute_advantages(rewards, rewards.mean(1))
    return script.compute_advantages(rewards)


def ragged_batch(seed, n=6, R=7, dtype=torch.float64):
    """Random log-probabilities, which are 0 where masked, advantages and a ragged mask."""
    generator = torch.Generator().manual_seed(seed)
    random = -2 * torch.rand(3, n, R, generator=generator, dtype=dtype)
    logprobs, old, ref = random.unbind(0)  # (n, R) each
    lengths = torch.randint(1, R + 1, (n,), generator=generator)
    lengths[0], lengths[1] = R, 1
    mask = torch.arange(R) < lengths[:, None]  # (n, R)
    advantages = torch.randn(n, 1, generator=generator, dtype=dtype)  # (n, 1)
    for tensor in (logprobs, old, ref):
        tensor[~mask] = 0.0
    return logprobs.requires_grad_(), old, ref, advantages, mask


def slow_loss(name, logprobs, old, ref, advantages, mask, beta, num_seqs, num_tokens):
    """The loss of each script, one token at a time, with max_new_tokens 10.

    The clip range is 0.8 to 1.2; the upper bound of dapo.py and vapo.py is 1.28. gspo.py clips at 0.9997 and 1.0004.
    """
    logprobs, old, ref, advantages = (
        x.detach().tolist() for x in (logprobs, old, ref, advantages.expand(mask.shape))
    )
    total = 0.0
    for i in range(len(mask)):
        length = int(mask[i].sum())
        weight = {
            "reinforce_baseline": 1 / num_seqs,
            "dr_grpo": 1 / (num_seqs * 10),
            "dapo": 1 / num_tokens,
            "ppo_rlhf": 1 / num_tokens,
            "vapo": 1 / num_tokens,
        }.get(name, 1 / (num_seqs * max(1, length)))
        for t in range(length):
            ratio, advantage = math.exp(logprobs[i][t] - old[i][t]), advantages[i][t]
            if name == "gspo":
                ratio = math.exp(
                    math.fsum(logprobs[i][k] - old[i][k] for k in range(length)) / length
                )
            low, high = {
                "dapo": (0.8, 1.28),
                "vapo": (0.8, 1.28),
                "gspo": (0.9997, 1.0004),
            }.get(name, (0.8, 1.2))
            if name == "reinforce_baseline":
                objective = advantage * logprobs[i][t]
            elif advantage > 0:
                objective = advantage * min(ratio, high)
            else:
                dual_clip = 3.0 if name == "grpo_offpolicy" else math.inf
                objective = advantage * min(max(ratio, low), dual_clip)
            if name in ("grpo", "dr_grpo", "gspo", "grpo_offpolicy", "grpo_process"):
                upside = math.exp(ref[i][t] - logprobs[i][t])  # pi_ref / pi_theta
                objective -= beta * (upside - math.log(upside) - 1)
            total -= objective * weight
    return total


# ---- advantages


@pytest.mark.parametrize("member", [rloo, grpo, dr_grpo])
def test_advantages_stay_within_their_group(member):
    rewards = torch.tensor([[0.0, 1.0, 0.5], [10.0, 20.0, 30.0]])
    together = advantages_of(member, rewards)
    apart = torch.cat([advantages_of(member, row[None]) for row in rewards])
    assert torch.equal(together, apart)
    assert together.mean(1).abs().max() < 1e-6
    if member is grpo:
        assert torch.allclose(together.std(1), torch.ones(2), atol=1e-3)


@pytest.mark.parametrize("member", [reinforce_baseline, rloo, grpo, dr_grpo])
def test_advantages_refuse_a_flat_vector(member):
    with pytest.raises(AssertionError):
        advantages_of(member, torch.rand(8))


@pytest.mark.parametrize("member", [rloo, grpo, dr_grpo])
def test_a_group_of_one_is_refused(member):
    # A group of one has no other samples and no std: the advantage would be 0 or NaN.
    with pytest.raises(AssertionError):
        advantages_of(member, torch.rand(8, 1))


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        # Rewards 3, 0, 0, 1 have mean 1. The means of the other three are 1/3, 4/3, 4/3, 1.
        # The squared deviations are 4, 1, 1, 0, so Bessel's std is sqrt(2).
        (reinforce_baseline, [2.0, -1.0, -1.0, 0.0]),
        (rloo, [8 / 3, -4 / 3, -4 / 3, 0.0]),
        (dr_grpo, [2.0, -1.0, -1.0, 0.0]),
        (grpo, [x / (math.sqrt(2) + 1e-4) for x in (2.0, -1.0, -1.0, 0.0)]),
    ],
)
def test_advantages_of_each_script_by_hand(member, expected):
    rewards = torch.tensor([[3.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    assert advantages_of(member, rewards).tolist()[0] == pytest.approx(expected, abs=1e-12)


def random_rewards(seed, B=4, G=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, G, generator=generator, dtype=torch.float64)  # (B, G)


@pytest.mark.parametrize("member", [rloo, grpo, dr_grpo])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_against_a_slow_loop(member, seed):
    rewards = random_rewards(seed).tolist()
    advantages = advantages_of(member, random_rewards(seed))
    for group, row in zip(rewards, advantages.tolist(), strict=True):
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (len(group) - 1))
        for i, x in enumerate(group):
            others = group[:i] + group[i + 1 :]
            expected = {
                rloo: x - math.fsum(others) / len(others),
                dr_grpo: x - mean,
                grpo: (x - mean) / (std + 1e-4),
            }[member]
            assert row[i] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("baseline", [0.0, 0.7, torch.tensor(0.7, dtype=torch.float64)])
def test_the_baseline_is_one_scalar_subtracted_from_all(baseline):
    rewards = random_rewards(2)
    expected = [[x - float(baseline) for x in row] for row in rewards.tolist()]
    assert reinforce_baseline.compute_advantages(rewards, baseline).tolist() == expected
    # One baseline per prompt would be another algorithm.
    with pytest.raises(AssertionError):
        reinforce_baseline.compute_advantages(rewards, rewards.mean(1, keepdim=True))


def test_a_batch_of_one_sample_per_prompt_has_advantages_under_reinforce():
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    assert advantages_of(reinforce_baseline, rewards).tolist() == [[0.5], [-0.5], [-0.5], [0.5]]


# ---- the return and the baseline, if the KL is part of the reward


def test_returns_by_hand():
    script = reinforce_baseline
    # The log-ratios of the counted tokens add up to a KL of 1 - 3 = -2 and 2 + 0.5 = 2.5.
    # The return is the reward minus half of the KL.
    old = torch.tensor([[-1.0, -1.0, 9.0], [-1.0, -0.5, math.nan]], dtype=torch.float64)
    ref = torch.tensor([[-2.0, 2.0, 5.0], [-3.0, -1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    rewards = torch.tensor([[1.0, 4.0]], dtype=torch.float64)
    returns = script.compute_returns(make_args(script, beta=0.5), rewards, old, ref, mask)
    assert returns.tolist() == [[1.0 - 0.5 * -2.0, 4.0 - 0.5 * 2.5]]
    assert torch.equal(
        script.compute_returns(make_args(script, beta=0.0), rewards, old, ref, mask), rewards
    )


def test_returns_against_a_slow_loop():
    script = reinforce_baseline
    _, old, ref, _, mask = ragged_batch(3)
    rewards = random_rewards(4, 3, 2)
    returns = script.compute_returns(make_args(script, beta=0.3), rewards, old, ref, mask)
    for i, (reward, result) in enumerate(
        zip(rewards.flatten().tolist(), returns.flatten().tolist(), strict=True)
    ):
        kl = math.fsum(float(old[i, t] - ref[i, t]) for t in range(old.shape[1]) if mask[i, t])
        assert result == pytest.approx(reward - 0.3 * kl, abs=1e-12)
    # A positive KL lowers the return.
    assert (returns < rewards)[
        ((old - ref).masked_fill(~mask, 0.0).sum(1) > 0).view_as(rewards)
    ].all()


def test_baselines_by_hand():
    # This step's baseline is the average so far, 10. The next step's average is 0.9 * 10 + 0.1 * 2.
    returns = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    for name, expected in {"batch_mean": 2.0, "moving_average": 10.0, "none": 0.0}.items():
        args = make_args(reinforce_baseline, baseline=name)
        assert reinforce_baseline.compute_baseline(args, returns, 10.0) == expected
    assert reinforce_baseline.update_average(10.0, returns) == pytest.approx(9.2)


def test_the_moving_average_of_constant_returns_is_constant_and_of_others_a_sum_of_powers():
    average = 4.0
    assert reinforce_baseline.update_average(average, torch.full((2, 3), 4.0)) == pytest.approx(4.0)
    means = [1.0, -2.0, 7.0]
    for mean in means:
        average = reinforce_baseline.update_average(average, torch.full((2, 3), mean))
    expected = 0.9**3 * 4.0 + sum(0.1 * 0.9 ** (2 - k) * mean for k, mean in enumerate(means))
    assert average == pytest.approx(expected)


# ---- dynamic sampling


def test_mixed_groups_by_hand():
    rows = [[0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0]]
    accuracy = torch.tensor(rows, dtype=torch.float32)
    for count, expected in ((16, [1, 3, 4]), (3, [1, 3, 4]), (2, [1, 3]), (1, [1])):
        assert dapo.mixed_groups(make_args(dapo, num_prompts=count), accuracy).tolist() == expected
    assert dapo.mixed_groups(make_args(dapo), accuracy[[0, 2]]).tolist() == []
    # A grade below 1 isn't right.
    graded = torch.tensor([[0.5, 0.0, 0.2], [1.0, 0.5, 0.5], [1.0, 1.0, 1.0]])
    assert dapo.mixed_groups(make_args(dapo), graded).tolist() == [1]


def test_a_mixed_group_is_one_with_an_advantage():
    accuracy = torch.randint(0, 2, (40, 3), generator=torch.Generator().manual_seed(0)).float()
    mixed = dapo.mixed_groups(make_args(dapo, num_prompts=40), accuracy).tolist()
    assert mixed == [
        k for k, row in enumerate(advantages_of(dapo, accuracy)) if row.abs().max() > 0
    ]
    assert 0 < len(mixed) < 40


@pytest.mark.parametrize(
    ("num_right", "max_resample", "num_batches", "kept"),
    [
        # Each number says how many of a group's two responses are right. A batch has two groups.
        ([1, 1, 1, 1], 3, 1, [0, 1]),
        ([0, 1, 1, 1], 3, 2, [1, 2]),  # one more than it needs: the last is dropped
        ([0, 1, 2, 0, 0, 1], 3, 3, [1, 5]),
        ([0, 1, 2, 0, 0, 0, 1, 0], 2, 3, [1]),  # no batch is left to sample
        ([0, 2, 2, 0, 1, 1], 1, 2, [0, 1]),  # no group is mixed: the first ones
        ([0, 1, 1, 1], 0, 1, [1]),
    ],
)
def test_dynamic_sampling_by_hand(monkeypatch, num_right, max_resample, num_batches, kept):
    """It samples batches until two groups are mixed, and trains on the first two."""

    def sample(args, model, batch, G, temperature, eos_ids):
        ids = torch.tensor([x for x in batch for _ in range(G)])[:, None]
        # Each batch has longer prompts than the last one, so that the prompts have to be padded.
        prompts = ids.expand(-1, 1 + batch[0])
        return dapo.Rollout(prompts, prompts >= 0, ids, ids >= 0, ids.double())

    def rewards(completions, batch, device):
        values = [float(j < num_right[x]) for x in batch for j in range(2)]
        return {"accuracy_reward": torch.tensor(values, device=device)}

    monkeypatch.setattr(dapo, "sample_responses", sample)
    monkeypatch.setattr(
        dapo,
        "response_texts",
        lambda tokenizer, rollout, eos_ids: list("x" * len(rollout.response_ids)),
    )
    monkeypatch.setattr(dapo, "apply_rewards", rewards)
    args = make_args(dapo, num_prompts=2, num_generations=2, max_resample=max_resample)
    data = list(range(len(num_right)))
    unused = torch.tensor(data).split(2)
    model = SimpleNamespace(device="cpu")
    found = dapo.sample_mixed_groups(args, model, None, data, unused, None)
    assert found.examples == data[: 2 * num_batches]
    assert found.kept.tolist() == [2 * k + j for k in kept for j in range(2)]
    of_each = [k for k in found.examples for _ in range(2)]
    assert found.rollout.response_ids[:, 0].tolist() == of_each
    assert found.rollout.prompt_ids[:, -1].tolist() == of_each
    lengths = [1 + k - k % 2 for k in of_each]
    assert found.rollout.prompt_mask.sum(1).tolist() == lengths
    assert list(found.scores) == ["accuracy_reward"]
    expected = rewards(None, found.examples, "cpu")["accuracy_reward"]
    assert torch.equal(found.scores["accuracy_reward"], expected)
    assert found.completions == ["x"] * len(of_each)


# ---- the overlong penalty


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (1, 0.0),
        (40, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (150, -1.0),
    ],
)
def test_overlong_penalty_by_hand(length, penalty, dtype):
    # L_max is 100 and L_cache is 20: no penalty up to 80 tokens, then 1/20 per token, and -1 from 100 on.
    args = make_args(dapo, max_new_tokens=100, overlong_cache=20)
    result = dapo.overlong_penalty(args, torch.tensor([length], dtype=dtype))
    assert result.shape == (1,) and result.is_floating_point()
    assert result.item() == pytest.approx(penalty, abs=1e-6)


def test_without_a_cache_there_is_no_penalty():
    args = make_args(dapo, max_new_tokens=100, overlong_cache=0)
    assert (dapo.overlong_penalty(args, torch.arange(1, 101)) == 0).all()


# ---- the loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "token_loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        # A positive advantage above the upper bound is clipped and has no gradient.
        (1.5, 2.0, -2.4, 0.0),
        # Below the range the unclipped objective is the smaller one.
        (0.5, 2.0, -1.0, -1.0),
        # A negative advantage swaps these two cases.
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.2 - 1e-9, 2.0, -2.4, -2.4),  # just inside
    ],
)
@pytest.mark.parametrize("member", [grpo, dr_grpo, ppo_rlhf])
def test_clipping_by_hand(member, ratio, advantage, token_loss, gradient):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    args = make_args(member, beta=0.0, max_new_tokens=1)
    loss, _ = loss_of(member, args, logprobs, old, None, advantages, mask, 1, 1)
    loss.backward()
    assert loss.item() == pytest.approx(token_loss, abs=1e-7)
    # d ratio / d logprob = ratio
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize(
    # of_grpo and of_dapo are pairs (loss, gradient).
    ("ratio", "advantage", "of_grpo", "of_dapo"),
    [
        # Clip-Higher: between 1.2 and 1.28 the token still learns.
        (1.25, 2.0, (-2.4, 0.0), (-2.5, -2.5)),
        (1.3, 2.0, (-2.4, 0.0), (-2.56, 0.0)),
        (1.3, -2.0, (2.6, 2.6), (2.6, 2.6)),
        # dapo.py has grpo.py's lower bound: 0.8, not 0.72.
        (0.75, -2.0, (1.6, 0.0), (1.6, 0.0)),
        (0.75, 2.0, (-1.5, -1.5), (-1.5, -1.5)),
    ],
)
def test_clip_higher_by_hand(ratio, advantage, of_grpo, of_dapo):
    cases = (grpo, of_grpo), (dapo, of_dapo), (vapo, of_dapo)
    for script, (token_loss, gradient) in cases:
        logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
        advantages, args = (
            torch.tensor([[advantage]], dtype=torch.float64),
            make_args(script, beta=0.0),
        )
        loss, stats = loss_of(script, args, logprobs, old, None, advantages, mask, 1, 1)
        loss.backward()
        assert loss.item() == pytest.approx(token_loss, abs=1e-9)
        assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-9)
        assert stats["policy/clip_frac_high"] == (ratio > (1.2 if script is grpo else 1.28))
        assert stats["policy/clip_frac_low"] == (ratio < 0.8)


@pytest.mark.parametrize("member", [grpo, dr_grpo])
def test_kl_term_by_hand(member):
    # pi = 0.5, pi_ref = 0.25: pi_ref / pi - log(pi_ref / pi) - 1 = 0.5 + log 2 - 1. The loss ADDS this term.
    logprobs = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    ref, mask = (
        torch.tensor([[math.log(0.25)]], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
    )
    advantages = torch.zeros(1, 1, dtype=torch.float64)
    args = make_args(member, beta=0.1, max_new_tokens=1)
    loss, stats = loss_of(member, args, logprobs, logprobs.detach(), ref, advantages, mask, 1, 1)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * (0.5 + math.log(2) - 1))
    assert stats["kl/ref"].item() == pytest.approx(0.5 + math.log(2) - 1)
    # d kl / d logprob = 1 - pi_ref / pi
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - 0.5))


def test_where_the_kl_is_in_the_reward_the_loss_has_none():
    script = reinforce_baseline
    logprobs, old, ref, advantages, mask = ragged_batch(0)
    results = []
    for reference in (None, ref):
        args = make_args(script, beta=0.5)
        loss, stats = loss_of(
            script, args, logprobs, old, reference, advantages, mask, 6, int(mask.sum())
        )
        results.append((loss.item(), *torch.autograd.grad(loss, logprobs)[0].flatten().tolist()))
    assert results[0] == results[1]
    upside = (ref - logprobs)[mask].exp()
    assert stats["kl/ref"].item() == pytest.approx((upside - upside.log() - 1).sum().item())


@pytest.mark.parametrize("member", [reinforce_baseline, grpo, dr_grpo])
def test_k3_estimates_the_kl_from_policy_to_reference(member):
    # The expectation of k3 under the policy is KL(pi || ref), not KL(ref || pi).
    policy, reference = (
        torch.tensor([0.7, 0.2, 0.1]).double(),
        torch.tensor([0.2, 0.3, 0.5]).double(),
    )
    expectation = 0.0
    for token in range(3):
        logprobs, ref = policy[token].log().view(1, 1), reference[token].log().view(1, 1)
        one = torch.ones(1, 1, dtype=torch.bool)
        args = make_args(member, beta=1.0)
        _, stats = loss_of(member, args, logprobs, logprobs, ref, torch.zeros(1, 1), one, 1, 1)
        expectation += policy[token].item() * stats["kl/ref"].item()
    assert expectation == pytest.approx((policy * (policy / reference).log()).sum().item())


@pytest.mark.scripts(*[name for name in LOSSES if name not in ("dapo", "ppo_rlhf", "vapo")])
@pytest.mark.parametrize("difference", [1e-3, -1e-4, 1e-5])
def test_k3_keeps_its_digits_where_the_policies_are_close(script, difference):
    """In float32, exp(x) - x - 1 is 5 % off at 1e-3, and 0 below 1e-4."""
    logprobs, ref = torch.zeros(1, 1), torch.full((1, 1), difference)
    one = torch.ones(1, 1, dtype=torch.bool)
    args = make_args(script, beta=1.0)
    _, stats = loss_of(script, args, logprobs, logprobs, ref, torch.zeros(1, 1), one, 1, 1)
    exact = difference**2 / 2 + difference**3 / 6
    assert stats["kl/ref"].item() == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        # One sequence has 5 tokens with a summed loss of 14, the other 10 tokens with 19: together 15 tokens and 33.
        # The mean within each sequence, then over sequences: 2.35.
        (grpo, (14 / 5 + 19 / 10) / 2),
        # Dr. GRPO divides by max_new_tokens, 20, not by the lengths: 0.825.
        (dr_grpo, (14 / 20 + 19 / 20) / 2),
        (dapo, 33 / 15),  # mean over tokens: 2.2
        (ppo_rlhf, 33 / 15),
        (vapo, 33 / 15),
    ],
)
def test_means_by_hand(member, expected):
    # With advantages of -1, ratios above 1 are not clipped, so the loss of a token is its ratio.
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 5:] = False
    logprobs = torch.zeros(2, 10, dtype=torch.float64)
    logprobs[0, 4] = logprobs[1, 9] = math.log(10)
    old, advantages = torch.zeros_like(logprobs), -torch.ones(2, 1, dtype=torch.float64)
    args = make_args(member, beta=0.0, max_new_tokens=20)
    loss, _ = loss_of(member, args, logprobs, old, None, advantages, mask, 2, 15)
    assert loss.item() == pytest.approx(expected)


def test_reinforce_by_hand():
    script = reinforce_baseline
    # A = 2 on two tokens of -0.5 and A = -1 on four of -0.25: -(2 * -1 + -1 * -1) / 2.
    # The loss doesn't divide by the lengths.
    logprobs = torch.tensor(
        [[-0.5, -0.5, -9.0, -9.0], [-0.25] * 4], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64)
    loss, _ = loss_of(
        script, make_args(script), logprobs, logprobs.detach(), None, advantages, mask, 2, 6
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    assert logprobs.grad.tolist() == [[-1.0, -1.0, 0.0, 0.0], [0.5] * 4]


@pytest.mark.scripts(*LOSSES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_gradient_against_a_slow_loop(script, seed, beta):
    # The minibatch is larger than this slice: it has 8 sequences and 11 more tokens.
    logprobs, old, ref, advantages, mask = ragged_batch(seed)
    args, num_tokens = make_args(script, beta=beta), int(mask.sum()) + 11
    loss, _ = loss_of(
        script, args, logprobs, old, ref if beta else None, advantages, mask, 8, num_tokens
    )
    loss.backward()
    values, rest = logprobs.detach(), (old, ref, advantages, mask, beta, 8, num_tokens)
    assert loss.item() == pytest.approx(slow_loss(script.__name__, values, *rest), abs=1e-12)
    assert (logprobs.grad[~mask] == 0).all()
    for i, t in mask.nonzero().tolist():
        up, down = values.clone(), values.clone()
        up[i, t] += 1e-6
        down[i, t] -= 1e-6
        slope = (
            slow_loss(script.__name__, up, *rest) - slow_loss(script.__name__, down, *rest)
        ) / 2e-6
        assert logprobs.grad[i, t].item() == pytest.approx(slope, abs=1e-6)


def test_at_ratio_one_the_gradient_is_reinforce():
    logprobs, _, _, advantages, mask = ragged_batch(0)
    args = grpo.Args(beta=0.0)
    loss, stats = loss_of(
        grpo, args, logprobs, logprobs.detach(), None, advantages, mask, 6, int(mask.sum())
    )
    loss.backward()
    gradient = logprobs.grad.clone()
    logprobs.grad = None
    reinforce = -(advantages * logprobs).masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
    (reinforce.sum() / 6).backward()
    assert torch.allclose(gradient, logprobs.grad.nan_to_num(), atol=1e-12)
    assert (
        stats["policy/clip_frac_low"]
        == stats["policy/clip_frac_high"]
        == stats["policy/approx_kl"]
        == 0
    )


@pytest.mark.parametrize("member", [dr_grpo, dapo, ppo_rlhf, vapo])
def test_at_ratio_one_every_token_of_a_sequence_of_any_length_weighs_the_same(member):
    # The gradient is -A divided by a number that doesn't depend on the response's length.
    logprobs, _, _, advantages, mask = ragged_batch(1)
    args, num_tokens = make_args(member, beta=0.0), int(mask.sum())
    loss, _ = loss_of(
        member, args, logprobs, logprobs.detach(), None, advantages, mask, 6, num_tokens
    )
    loss.backward()
    divisor = 6 * 10 if member is dr_grpo else num_tokens
    expected = (-advantages / divisor).expand(mask.shape).masked_fill(~mask, 0.0)
    assert torch.allclose(logprobs.grad, expected, atol=1e-12)


def test_reinforce_knows_no_ratio():
    script = reinforce_baseline
    # REINFORCE neither clips nor reweights: the gradient is -A / num_seqs, whichever policy sampled.
    logprobs, old, _, advantages, mask = ragged_batch(2)
    loss, _ = loss_of(
        script, make_args(script), logprobs, old, None, advantages, mask, 6, int(mask.sum())
    )
    loss.backward()
    expected = (-advantages / 6).expand(mask.shape).masked_fill(~mask, 0.0)
    assert torch.allclose(logprobs.grad, expected, atol=1e-12)


def of_a_full_group(script, logprobs, old, rewards, **fields):
    """The loss and gradient of a script on one group with rewards (G,), whose responses all have the full length."""
    logprobs = logprobs.detach().clone().requires_grad_()
    args = make_args(script, beta=0.0, max_new_tokens=logprobs.shape[1], **fields)
    advantages, mask = (
        advantages_of(script, rewards[None]).view(-1, 1),
        torch.ones_like(logprobs, dtype=torch.bool),
    )
    loss, _ = loss_of(script, args, logprobs, old, None, advantages, mask, len(mask), mask.numel())
    loss.backward()
    return torch.cat([loss.detach().view(1), logprobs.grad.flatten()])


@pytest.mark.parametrize("seed", range(3))
def test_scripts_agree_where_they_must(seed):
    generator = torch.Generator().manual_seed(seed)
    random = -torch.rand(2, 6, 5, generator=generator, dtype=torch.float64)
    logprobs, old = random.unbind(0)  # (G, R) each
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)  # (G,)

    # At full lengths Dr. GRPO and GRPO differ only by the std.
    of_grpo = of_a_full_group(grpo, logprobs, old, rewards)
    assert torch.allclose(
        of_a_full_group(dr_grpo, logprobs, old, rewards),
        of_grpo * (rewards.std() + 1e-4),
        atol=1e-12,
    )
    # At equal lengths DAPO and GRPO differ only by the upper bound. Many ratios here are above 1.2.
    equal = of_a_full_group(dapo, logprobs, old, rewards, clip_eps_low=0.2, clip_eps_high=0.2)
    assert torch.allclose(equal, of_grpo, atol=1e-12)
    higher = of_a_full_group(dapo, logprobs, old, rewards)
    assert not torch.allclose(higher, of_grpo, atol=1e-3)
    # In one group RLOO equals REINFORCE with the mean as baseline, times G / (G - 1).
    of_reinforce = of_a_full_group(reinforce_baseline, logprobs, old, rewards)
    assert torch.allclose(
        of_a_full_group(rloo, logprobs, old, rewards), 6 / 5 * of_reinforce, atol=1e-12
    )


@pytest.mark.scripts("grpo", "reinforce_baseline")
@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (3, [3, 2, 2]), (9, [1] * 7 + [0, 0])])
def test_minibatches_are_even_shares_of_what_was_sampled(script, count, sizes):
    shares = list(script.minibatches(make_args(script, num_minibatches=count), 7))
    assert [len(share) for share in shares] == sizes
    assert sorted(torch.cat(shares).tolist()) == list(range(7))


@pytest.mark.scripts(*LOSSES)
def test_slices_add_up_to_the_minibatch(script):
    # micro_batch_tokens cuts a minibatch into slices. This must not change the loss, the gradient or the sums.
    logprobs, old, ref, advantages, mask = ragged_batch(3)
    args = make_args(script, beta=0.1)
    whole, stats = loss_of(script, args, logprobs, old, ref, advantages, mask, 6, int(mask.sum()))
    (gradient,) = torch.autograd.grad(whole, logprobs)
    total, sums = 0.0, dict.fromkeys(stats, 0.0)
    for rows in ([0], [4, 1, 5], [2, 3]):
        loss, part = loss_of(
            script,
            args,
            logprobs[rows],
            old[rows],
            ref[rows],
            advantages[rows],
            mask[rows],
            6,
            int(mask.sum()),
        )
        total = total + loss
        sums = {name: sums[name] + part[name] for name in sums}
    (sliced,) = torch.autograd.grad(total, logprobs)
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(sliced, gradient, atol=1e-12)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {name: float(value) for name, value in stats.items()}
    )


@pytest.mark.scripts(*LOSSES)
def test_stats_are_sums_over_tokens_that_count(script):
    logprobs = torch.tensor([[0.5, -0.5, 0.1, 9.0], [-0.1, 0.0, 7.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    old = torch.zeros_like(logprobs)
    _, stats = loss_of(
        script, make_args(script, beta=0.0), logprobs, old, None, torch.ones(2, 1), mask, 2, 5
    )
    # exp(0.5) is above 1.2 and exp(-0.5) is below 0.8. In gspo.py the first sequence's ratio is above
    # the range and the second sequence's ratio is below the range.
    assert stats["policy/clip_frac_high"] == 1
    assert stats["policy/clip_frac_low"] == 1
    assert stats["policy/approx_kl"].item() == pytest.approx(0.5 * (0.25 + 0.25 + 0.01 + 0.01))
    logratios = (
        (0.1 / 3,) * 3 + (-0.05,) * 2 if script.__name__ == "gspo" else (0.5, -0.5, 0.1, -0.1, 0.0)
    )
    assert stats["policy/ratio_mean"].item() == pytest.approx(sum(map(math.exp, logratios)))
    assert stats["policy/entropy"].item() == pytest.approx(-(0.5 - 0.5 + 0.1 - 0.1 + 0.0))


@pytest.mark.scripts(*LOSSES)
def test_shapes_that_would_broadcast_silently_are_refused(script):
    values, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    good = (3, 3) if script.__name__ in PER_TOKEN else (3, 1)
    for bad in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(3, 2), torch.zeros(1, 1)):
        with pytest.raises(AssertionError):
            loss_of(script, make_args(script, beta=0.0), values, values, None, bad, mask, 3, 9)
    with pytest.raises(AssertionError):
        loss_of(
            script,
            make_args(script, beta=0.0),
            values,
            values[:1],
            None,
            torch.zeros(good),
            mask,
            3,
            9,
        )


@pytest.mark.scripts(*LOSSES)
def test_a_fully_masked_sequence_counts_nothing(script):
    logprobs, old, _, advantages, mask = ragged_batch(5)
    mask = mask.clone()
    mask[2] = False
    args = make_args(script, beta=0.0)
    loss, _ = loss_of(script, args, logprobs, old, None, advantages, mask, 6, int(mask.sum()))
    loss.backward()
    assert math.isfinite(loss.item())
    assert (logprobs.grad[2] == 0).all()


@pytest.mark.scripts(*LOSSES)
def test_inputs_are_not_modified(script):
    logprobs, old, ref, advantages, mask = ragged_batch(6)
    before = [tensor.detach().clone() for tensor in (logprobs, old, ref, advantages, mask)]
    loss_of(
        script,
        make_args(script, beta=0.1),
        logprobs,
        old,
        ref,
        advantages,
        mask,
        6,
        int(mask.sum()),
    )
    rewards = torch.rand(2, 4)
    rewards_before = rewards.clone()
    # distill.py computes advantages from log-probabilities.
    if script is distill:
        script.compute_advantages(old, ref)
    elif script not in (ppo_rlhf, vapo):
        advantages_of(script, rewards)
    after = [tensor.detach() for tensor in (logprobs, old, ref, advantages, mask)]
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )
    assert torch.equal(rewards, rewards_before)
