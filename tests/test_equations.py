"""The equations of all scripts: numbers worked by hand, slow loops in float64, and identities.

An equation whose text is the same in several scripts, as test_siblings.py checks, is tested in the first of them.
Other files have what one script alone adds: test_process.py, test_distill.py, test_self_distill.py and test_lora.py.
The patches are in test_variants.py, and whole steps of main in test_whole_step.py.
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
import dr_grpo
import grpo
import grpo_offpolicy
import gspo
import ppo_rlhf
import reinforce_baseline
import remax
import rloo
import vapo
from utils.rewards import accuracy_reward

# The first script with each loss.
LOSSES = list({parts(name)["policy_loss"]: name for name in reversed(SCRIPTS)}.values())[::-1]
# These scripts have one advantage per token, (n, R). The others have one per sequence, (n, 1).
PER_TOKEN = ("ppo_rlhf", "vapo", "grpo_process", "distill")
NO_KL = ("dapo", "ppo_rlhf", "vapo")  # their losses don't get the reference
NAN, INF = math.nan, math.inf


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def make_args(script, **fields):
    """Args of the script, with only the fields that this script has."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    given = {"max_new_tokens": 10, "beta": 0.0, **fields}
    return script.Args(**{name: value for name, value in given.items() if name in known})


def flags_of(function, args):
    """The numbers that main hands to this equation: its parameters that are flags, by keyword."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in names}


def loss_of(script, args, logprobs, old, ref, advantages, mask, num_seqs, num_tokens):
    """Call any script's policy_loss with the arguments and the flags that this script takes."""
    if ref is None:
        ref = torch.full_like(logprobs, -1.0)  # the loss must not use it
    if script.__name__ in PER_TOKEN and advantages.shape == (len(mask), 1):
        advantages = advantages.expand(mask.shape)
    given = dict(ref_logprobs=ref, teacher_logprobs=ref, sampler_weights=torch.ones_like(logprobs))
    given |= dict(num_seqs=num_seqs, num_tokens=num_tokens)
    names = inspect.signature(script.policy_loss).parameters
    given = {name: value for name, value in given.items() if name in names}
    given |= flags_of(script.policy_loss, args)
    return script.policy_loss(logprobs, old, advantages=advantages, mask=mask, **given)


def token_loss(script, args, ratio, advantage):
    """The loss of a minibatch of one token with this ratio, its gradient and the stats."""
    logprobs, old = double([[math.log(ratio)]]).requires_grad_(), double([[0.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, stats = loss_of(script, args, logprobs, old, None, double([[advantage]]), mask, 1, 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.item(), stats


def ragged_batch(seed, n=6, R=7):
    """Random log-probabilities, which are 0 where masked, advantages and a ragged mask."""
    generator = torch.Generator().manual_seed(seed)
    random = -2 * torch.rand(3, n, R, generator=generator, dtype=torch.float64)
    logprobs, old, ref = random.unbind(0)  # (n, R) each
    lengths = torch.randint(1, R + 1, (n,), generator=generator)
    lengths[0], lengths[1] = R, 1
    mask = torch.arange(R) < lengths[:, None]  # (n, R)
    advantages = torch.randn(n, 1, generator=generator, dtype=torch.float64)  # (n, 1)
    for tensor in (logprobs, old, ref):
        tensor[~mask] = 0.0
    return logprobs.requires_grad_(), old, ref, advantages, mask


def ragged_tensors(seed, count, n=5, R=6):
    """A ragged mask, and `count` random tensors (n, R) with garbage in the masked slots."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, R + 1, (n,), generator=generator)
    lengths[0], lengths[1] = R, 1
    mask = torch.arange(R) < lengths[:, None]  # (n, R)
    tensors = torch.randn(count, n, R, generator=generator, dtype=torch.float64)
    garbage = double([NAN, INF, -INF, 1e30]).repeat(n * R)[: n * R].view(n, R)
    return mask, [torch.where(mask, tensor, garbage) for tensor in tensors]


def same(tensor, rows, mask):
    """The unmasked slots hold these numbers, and the masked slots are exactly 0."""
    assert tensor.shape == mask.shape
    for row, counts, expected in zip(tensor, mask, rows, strict=True):
        assert row[counts].tolist() == pytest.approx(expected, abs=1e-10)
    assert (tensor[~mask] == 0).all()


# ---- returns, baselines and advantages of whole responses


def test_advantages_by_hand():
    """The first group has mean 1 and squared deviations 4, 1, 1, 0; the second mean 25 and 225, 25, 25, 225."""
    rewards = double([[3.0, 0.0, 0.0, 1.0], [10.0, 20.0, 30.0, 40.0]])
    centred = double([[2.0, -1.0, -1.0, 0.0], [-15.0, -5.0, 5.0, 15.0]])
    assert dr_grpo.compute_advantages(rewards).tolist() == centred.tolist()
    # Bessel's std divides by 3.
    std = double([[(6 / 3) ** 0.5], [(500 / 3) ** 0.5]])
    torch.testing.assert_close(grpo.compute_advantages(rewards), centred / (std + 1e-4))
    # The mean of the three others: 1/3, 4/3, 4/3 and 1 in the first group.
    torch.testing.assert_close(rloo.compute_advantages(rewards), 4 / 3 * centred)
    assert rloo.compute_advantages(rewards)[0].tolist() == pytest.approx([8 / 3, -4 / 3, -4 / 3, 0])
    # One baseline for all.
    assert reinforce_baseline.compute_advantages(rewards, 13.0)[0].tolist() == [-10, -13, -13, -12]
    # One baseline per prompt.
    of_remax = remax.compute_advantages(rewards, double([0.5, 10.0]))
    assert of_remax.tolist() == [[2.5, -0.5, -0.5, 0.5], [0.0, 10.0, 20.0, 30.0]]


def test_returns_by_hand():
    """The log-ratios of the counted tokens add up to a KL of 1 - 3 = -2 and 2 + 0.5 = 2.5. beta is 0.5."""
    old, ref = double([[-1.0, -1.0, 9.0], [-1.0, -0.5, NAN]]), double([[-2, 2, 5], [-3, -1, 1]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    rewards = double([[1.0, 4.0]])
    returns = reinforce_baseline.compute_returns(rewards, old, ref, mask, beta=0.5)
    assert returns.tolist() == [[1.0 - 0.5 * -2.0, 4.0 - 0.5 * 2.5]]


def test_baselines_by_hand():
    """This step's baseline is the average so far, 10. The next step's average is 0.9 * 10 + 0.1 * 2."""
    returns = double([[1.0], [2.0], [3.0]])
    for name, expected in {"batch_mean": 2.0, "moving_average": 10.0, "none": 0.0}.items():
        assert reinforce_baseline.compute_baseline(returns, 10.0, name) == expected
    assert reinforce_baseline.update_average(10.0, returns) == pytest.approx(9.2)


# ---- dapo.py's dynamic sampling and penalty


def test_mixed_groups_by_hand():
    accuracy = double([[0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0]])
    for count, expected in ((16, [1, 3, 4]), (3, [1, 3, 4]), (2, [1, 3]), (1, [1])):
        assert dapo.mixed_groups(accuracy, num_prompts=count).tolist() == expected
    assert dapo.mixed_groups(accuracy[[0, 2]], num_prompts=16).tolist() == []
    # A grade below 1 isn't right.
    graded = double([[0.5, 0.0, 0.2], [1.0, 0.5, 0.5], [1.0, 1.0, 1.0]])
    assert dapo.mixed_groups(graded, num_prompts=16).tolist() == [1]


@pytest.mark.parametrize(
    ("num_right", "max_resample", "num_batches", "mixed"),
    [
        # Each number says how many of a group's two responses are right. A batch has two groups.
        ([1, 1, 1, 1], 3, 1, [0, 1]),
        ([0, 1, 1, 1], 3, 2, [1, 2]),  # one more than it needs: the last is dropped
        ([0, 1, 2, 0, 0, 1], 3, 3, [1, 5]),
        ([0, 1, 2, 0, 0, 0, 1, 0], 2, 3, [1]),  # no batch is left to sample
        ([0, 2, 2, 0, 1, 1], 1, 2, []),  # test_whole_step.py has what main then trains on
        ([0, 1, 1, 1], 0, 1, [1]),
    ],
)
def test_dynamic_sampling_by_hand(monkeypatch, num_right, max_resample, num_batches, mixed):
    """It samples batches until two groups are mixed. It returns all batches, and which groups are mixed."""

    def sample(args, model, batch, G, temperature, eos_ids):
        of_each = [x for x in batch for _ in range(G)]
        ids = torch.tensor(of_each)[:, None]
        # Each batch has longer prompts than the last one.
        prompts = [[x] * (1 + batch[0]) for x in of_each]
        return dapo.Rollout(prompts, ids, ids % 3 > 0, ids.double() / 2)

    def rewards(task, completions, batch, device):
        values = [float(j < num_right[x]) for x in batch for j in range(2)]
        return {"accuracy_reward": torch.tensor(values)}

    def texts(tokenizer, rollout, eos_ids):
        return ["x"] * len(rollout.response_ids)

    monkeypatch.setattr(dapo, "sample_responses", sample)
    monkeypatch.setattr(dapo, "response_texts", texts)
    monkeypatch.setattr(dapo, "apply_rewards", rewards)
    args = make_args(dapo, num_prompts=2, num_generations=2, max_resample=max_resample)
    data = list(range(len(num_right)))
    batches, model = torch.tensor(data).split(2), SimpleNamespace(device="cpu")
    task = SimpleNamespace(REWARDS=[accuracy_reward])
    found = dapo.sample_mixed_groups(args, task, model, None, data, batches, None)
    assert found.problems == data[: 2 * num_batches]
    assert found.mixed.tolist() == mixed
    of_each = [k for k in found.problems for _ in range(2)]
    assert found.rollout.prompts == [[k] * (1 + k - k % 2) for k in of_each]
    assert found.rollout.response_ids[:, 0].tolist() == of_each
    assert found.rollout.response_mask[:, 0].tolist() == [k % 3 > 0 for k in of_each]
    assert found.rollout.sampled_logprobs[:, 0].tolist() == [k / 2 for k in of_each]
    assert found.completions == ["x"] * len(of_each)
    expected = rewards(None, None, found.problems, "cpu")["accuracy_reward"]
    assert found.scores.keys() == {"accuracy_reward"}
    assert torch.equal(found.scores["accuracy_reward"], expected)


def test_overlong_penalty_by_hand():
    """L_max is 100 and L_cache is 20: no penalty up to 80 tokens, then 1/20 per token, and -1 from 100 on."""
    lengths = torch.tensor([1, 79, 80, 81, 90, 99, 100, 150])
    expected = [0.0, 0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0]
    assert dapo.overlong_penalty(lengths, 100, 20).tolist() == pytest.approx(expected, abs=1e-6)
    assert dapo.overlong_penalty(lengths, 100, 0).tolist() == [0.0] * 8


# ---- the policy loss


@pytest.mark.parametrize(
    # Pairs (loss, gradient) with a clip range of 0.8 .. 1.2, and of 0.8 .. 1.28.
    ("ratio", "advantage", "symmetric", "clip_higher"),
    [
        (1.0, 2.0, (-2.0, -2.0), (-2.0, -2.0)),
        # A positive advantage above the upper bound is clipped and has no gradient.
        (1.5, 2.0, (-2.4, 0.0), (-2.56, 0.0)),
        # Below the range the unclipped objective is the smaller one.
        (0.5, 2.0, (-1.0, -1.0), (-1.0, -1.0)),
        # A negative advantage swaps these two cases.
        (1.5, -2.0, (3.0, 3.0), (3.0, 3.0)),
        (0.5, -2.0, (1.6, 0.0), (1.6, 0.0)),
        # Between 1.2 and 1.28 a token of dapo.py still learns. Both have the lower bound 0.8.
        (1.25, 2.0, (-2.4, 0.0), (-2.5, -2.5)),
        (0.75, -2.0, (1.6, 0.0), (1.6, 0.0)),
        (1.25, -2.0, (2.5, 2.5), (2.5, 2.5)),
        (0.75, 2.0, (-1.5, -1.5), (-1.5, -1.5)),
        # just inside
        (1.2 - 1e-9, 2.0, (-2.4, -2.4), (-2.4, -2.4)),
        (0.8 + 1e-9, -2.0, (1.6, 1.6), (1.6, 1.6)),
    ],
)
def test_clipping_by_hand(ratio, advantage, symmetric, clip_higher):
    """The clip fractions count the tokens without a gradient: those at which the clip acts."""
    bounds = {grpo: 1.2, dr_grpo: 1.2, ppo_rlhf: 1.2, dapo: 1.28, vapo: 1.28}
    for script, bound in bounds.items():
        args = make_args(script, max_new_tokens=1)
        loss, gradient, stats = token_loss(script, args, ratio, advantage)
        expected = symmetric if bound == 1.2 else clip_higher
        assert (loss, gradient) == pytest.approx(expected, abs=1e-7)
        is_clipped = expected[1] == 0.0
        assert stats["policy/clip_frac"] == is_clipped
        assert stats["policy/clip_frac_high"] == (is_clipped and ratio > 1)
        assert stats["policy/clip_frac_low"] == (is_clipped and ratio < 1)


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
    """With advantages of -1, ratios above 1 are not clipped, so the loss of a token is its ratio."""
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 5:] = False
    logprobs = torch.zeros(2, 10, dtype=torch.float64)
    logprobs[0, 4] = logprobs[1, 9] = math.log(10)
    old, advantages = torch.zeros_like(logprobs), double([[-1.0], [-1.0]])
    args = make_args(member, max_new_tokens=20)
    loss, _ = loss_of(member, args, logprobs, old, None, advantages, mask, 2, 15)
    assert loss.item() == pytest.approx(expected)


def test_reinforce_by_hand():
    """A = 2 on two tokens of -0.5 and A = -1 on four of -0.25: -(2 * -1 + -1 * -1) / 2, whatever the old policy."""
    logprobs = double([[-0.5, -0.5, -9.0, -9.0], [-0.25] * 4]).requires_grad_()
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    args, given = make_args(reinforce_baseline), (double([[2.0], [-1.0]]), mask, 2, 6)
    for old in (logprobs.detach(), logprobs.detach() - 3):
        loss, _ = loss_of(reinforce_baseline, args, logprobs, old, None, *given)
        assert loss.item() == pytest.approx(0.5)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert gradient.tolist() == [[-1.0, -1.0, 0.0, 0.0], [0.5] * 4]


@pytest.mark.parametrize(
    ("ratios", "low", "high", "advantage", "loss", "gradient", "clipped"),
    [
        # s = sqrt(1.2 * 0.9) = sqrt(1.08) = 1.03923. Each token's gradient is -s A / 2.
        ((1.2, 0.9), 0.1, 0.1, 2.0, -2 * 1.08**0.5, -(1.08**0.5), None),
        ((1.2, 0.9), 0.1, 0.1, -2.0, 2 * 1.08**0.5, 1.08**0.5, None),
        # The ratio is above the clip range, so the gradient is 0.
        ((1.2, 0.9), 0.1, 0.02, 2.0, -2 * 1.02, 0.0, "high"),
        # With a negative advantage only the lower bound clips.
        ((1.2, 0.9), 0.1, 0.02, -2.0, 2 * 1.08**0.5, 1.08**0.5, None),
        # s = sqrt(0.8 * 1.1) = sqrt(0.88) = 0.93808, below the clip range, and then inside of it.
        ((0.8, 1.1), 0.05, 0.1, -2.0, 2 * 0.95, 0.0, "low"),
        ((0.8, 1.1), 0.05, 0.1, 2.0, -2 * 0.88**0.5, -(0.88**0.5), None),
        ((0.8, 1.1), 0.07, 0.1, -2.0, 2 * 0.88**0.5, 0.88**0.5, None),
    ],
)
def test_gspo_by_hand(ratios, low, high, advantage, loss, gradient, clipped):
    old = double([[-1.0, -2.0, 5.0]])
    logprobs = (old + double([[*ratios, 1.0]]).log()).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    args = make_args(gspo, clip_eps_low=low, clip_eps_high=high)
    value, stats = loss_of(gspo, args, logprobs, old, None, double([[advantage]]), mask, 1, 2)
    (slope,) = torch.autograd.grad(value, logprobs)
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert slope.tolist()[0] == pytest.approx([gradient, gradient, 0.0], abs=1e-12)
    # Both of its tokens count for the sequence.
    assert stats["policy/clip_frac"] == 2 * (clipped is not None)
    assert stats["policy/clip_frac_high"] == 2 * (clipped == "high")
    assert stats["policy/clip_frac_low"] == 2 * (clipped == "low")


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient"),
    [
        (4.0, -1.0, 3.0, 3.0, 0.0),  # counts as 3
        (2.5, -1.0, 3.0, 2.5, 2.5),
        # A positive advantage has no dual clip.
        (4.0, 1.0, 3.0, -1.2, 0.0),
        (0.5, -1.0, 3.0, 0.8, 0.0),
        # A dual clip also works inside the clip range.
        (1.1, -2.0, 1.05, 2.1, 0.0),
        (1.04, -2.0, 1.05, 2.08, 2.08),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, dual_clip, loss, gradient):
    logprobs = double([[math.log(ratio)]]).requires_grad_()
    one, advantages = torch.ones(1, 1, dtype=torch.bool), double([[advantage]])
    for weight in (1.0, 0.25, 0.0):
        value, stats = grpo_offpolicy.policy_loss(
            logprobs,
            double([[0]]),
            None,
            advantages,
            double([[weight]]),
            one,
            num_seqs=1,
            clip_eps=0.2,
            dual_clip=dual_clip,
            beta=0.0,
        )
        (slope,) = torch.autograd.grad(value, logprobs)
        expected = (weight * loss, weight * gradient)
        assert (value.item(), slope.item()) == pytest.approx(expected, abs=1e-12)
        # Whatever its weight, the token counts.
        is_dual_clipped = advantage < 0 and ratio > dual_clip
        assert stats["policy/dual_clip_frac"] == is_dual_clipped
        # The dual clip isn't one of the clip fractions.
        is_clipped = gradient == 0.0 and not is_dual_clipped
        assert stats["policy/clip_frac"] == is_clipped
        assert stats["policy/clip_frac_high"] == (is_clipped and ratio > 1)
        assert stats["policy/clip_frac_low"] == (is_clipped and ratio < 1)


def test_sampler_weights_by_hand():
    """The sequences' ratios are 3, 4.5 and 1 / 8. A sequence above the cap gets weights of 0."""
    sampled = -double([[1.5, 2.0, 9.0], [1.5, 3.0, 1.0], [0.5, 0.5, 0.5]]).log()
    mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    old = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    # A token's weight is at most rollout_correction. If that is 0, it is 1.
    for correction, cap, expected in (
        (2.0, 0.0, [[1.5, 2.0, 1.0], [1.5, 2.0, 1.0], [0.5] * 3]),
        (2.0, 3.001, [[1.5, 2.0, 1.0], [0.0] * 3, [0.5] * 3]),
        (0.0, 3.001, [[1.0] * 3, [0.0] * 3, [1.0] * 3]),
        (0.0, 0.0, [[1.0] * 3] * 3),
    ):
        weights = grpo_offpolicy.compute_sampler_weights(old, sampled, mask, correction, cap)
        torch.testing.assert_close(weights, double(expected))
        assert not weights.requires_grad


def test_kl_term_by_hand():
    """pi = 1/2 and pi_ref = 1/4: k3 is 1/2 + log 2 - 1, and the loss adds it. Its slope is 1 - pi_ref / pi."""
    logprobs, ref = double([[0.5]]).log().requires_grad_(), double([[0.25]]).log()
    old, zero, one = logprobs.detach(), double([[0.0]]), torch.ones(1, 1, dtype=torch.bool)
    for script in (grpo, dr_grpo, gspo, grpo_offpolicy):
        args = make_args(script, beta=0.1, max_new_tokens=1)
        loss, stats = loss_of(script, args, logprobs, old, ref, zero, one, 1, 1)
        assert loss.item() == pytest.approx(0.1 * (0.5 + math.log(2) - 1))
        assert stats["kl/ref"].item() == pytest.approx(0.5 + math.log(2) - 1)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert slope.item() == pytest.approx(0.1 * (1 - 0.5))
    # A sampler weight of 0 leaves the KL as it is.
    loss, _ = grpo_offpolicy.policy_loss(logprobs, old, ref, zero, zero, one, 1, 0.2, 3.0, beta=0.1)
    assert loss.item() == pytest.approx(0.1 * (0.5 + math.log(2) - 1))


@pytest.mark.scripts(*[name for name in LOSSES if name not in NO_KL])
def test_k3_estimates_the_kl_from_policy_to_reference(script):
    """Its expectation under the policy is KL(pi || ref). In float32 it keeps its digits where the two are close."""
    one = torch.ones(1, 1, dtype=torch.bool)

    def k3(logprobs, ref):
        args = make_args(script, beta=1.0)
        zero = torch.zeros(1, 1)
        _, stats = loss_of(script, args, logprobs, logprobs, ref, zero, one, 1, 1)
        return stats["kl/ref"].item()

    policy, reference = double([0.7, 0.2, 0.1]), double([0.2, 0.3, 0.5])
    kl = (policy * (policy / reference).log()).sum().item()
    pairs = zip(policy, reference, strict=True)
    expectation = sum(p.item() * k3(p.log().view(1, 1), q.log().view(1, 1)) for p, q in pairs)
    assert expectation == pytest.approx(kl)
    # exp(x) - x - 1 would be 5 % off at 1e-3, and 0 below 1e-4.
    for x in (1e-3, -1e-4, 1e-5):
        exact = x**2 / 2 + x**3 / 6
        assert k3(torch.zeros(1, 1), torch.full((1, 1), x)) == pytest.approx(exact, rel=0.02)


def slow_loss(name, logprobs, old, ref, advantages, mask, beta, num_seqs, num_tokens):
    """The loss of each script, one token at a time, with max_new_tokens 10.

    The clip range is 0.8 to 1.2; the upper bound of dapo.py and vapo.py is 1.28. gspo.py clips at 0.9997 and 1.0004.
    """
    logprobs, old, ref, advantages = (x.tolist() for x in (logprobs, old, ref, advantages))
    total = 0.0
    for i in range(len(mask)):
        length, (advantage,) = int(mask[i].sum()), advantages[i]
        weight = {
            "reinforce_baseline": 1 / num_seqs,
            "dr_grpo": 1 / (num_seqs * 10),
            "dapo": 1 / num_tokens,
            "ppo_rlhf": 1 / num_tokens,
            "vapo": 1 / num_tokens,
        }.get(name, 1 / (num_seqs * length))
        bounds = {"dapo": (0.8, 1.28), "vapo": (0.8, 1.28), "gspo": (0.9997, 1.0004)}
        low, high = bounds.get(name, (0.8, 1.2))
        logratios = [logprobs[i][t] - old[i][t] for t in range(length)]
        for t, logratio in enumerate(logratios):
            ratio = math.exp(logratio)
            if name == "gspo":
                ratio = math.exp(math.fsum(logratios) / length)
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


@pytest.mark.scripts(*LOSSES)
@pytest.mark.parametrize(("seed", "beta"), [(0, 0.0), (1, 0.04), (2, 0.04)])
def test_loss_and_gradient_against_a_slow_loop(script, seed, beta):
    """The minibatch is larger than these sequences: it has 8, and 11 more tokens."""
    logprobs, old, ref, advantages, mask = ragged_batch(seed)
    args, sizes = make_args(script, beta=beta), (8, int(mask.sum()) + 11)
    loss, _ = loss_of(script, args, logprobs, old, ref if beta else None, advantages, mask, *sizes)
    loss.backward()

    def slow(x):
        return slow_loss(script.__name__, x, old, ref, advantages, mask, beta, *sizes)

    values = logprobs.detach()
    assert loss.item() == pytest.approx(slow(values), abs=1e-12)
    assert (logprobs.grad[~mask] == 0).all()
    for i, t in mask.nonzero().tolist():
        up, down = values.clone(), values.clone()
        up[i, t] += 1e-6
        down[i, t] -= 1e-6
        slope = (slow(up) - slow(down)) / 2e-6
        assert logprobs.grad[i, t].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.scripts(*LOSSES)
def test_slices_add_up_to_the_minibatch(script):
    """micro_batch_tokens cuts a minibatch into slices. This must not change loss, gradient, stats or inputs.

    A sequence without a token that counts adds nothing.
    """
    logprobs, old, ref, advantages, mask = ragged_batch(3)
    mask[2] = False
    given = (logprobs, old, ref, advantages, mask)
    before = [tensor.detach().clone() for tensor in given]
    args, sizes = make_args(script, beta=0.1), (6, int(mask.sum()))
    whole, stats = loss_of(script, args, *given, *sizes)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    total, sums = 0.0, dict.fromkeys(stats, 0.0)
    for rows in ([0], [4, 1, 5], [2, 3]):
        loss, part = loss_of(script, args, *[tensor[rows] for tensor in given], *sizes)
        total = total + loss
        sums = {name: sums[name] + float(part[name]) for name in sums}
    (sliced,) = torch.autograd.grad(total, logprobs)
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(sliced, gradient, atol=1e-12) and (gradient[2] == 0).all()
    assert sums == pytest.approx({name: float(value) for name, value in stats.items()})
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


@pytest.mark.scripts(*LOSSES)
def test_stats_are_sums_over_tokens_that_count(script):
    logprobs = double([[0.5, -0.5, 0.1, 0.4, 9.0], [-0.5, 0.5, -0.4, -9.0, 9.0]])
    mask = torch.tensor([[True] * 4 + [False], [True] * 3 + [False] * 2])
    old = torch.zeros_like(logprobs)
    # exp(0.5) and exp(0.4) are above 1.28, and exp(-0.5) and exp(-0.4) below 0.8. So the first sequence has two tokens
    # above the range and one below it, and the second one has one and two. The clip acts above the range if the
    # advantage is positive, and below it if the advantage is negative. In gspo.py the first sequence's ratio is above
    # the range, and the second one's below it: all four or three of its tokens count.
    of_tokens = {(1.0, -1.0): (2, 2), (-1.0, 1.0): (1, 1), (1.0, 1.0): (3, 0), (-1.0, -1.0): (0, 3)}
    of_seqs = {(1.0, -1.0): (4, 3), (-1.0, 1.0): (0, 0), (1.0, 1.0): (4, 0), (-1.0, -1.0): (0, 3)}
    for signs, expected in (of_seqs if script is gspo else of_tokens).items():
        advantages = double([[sign] for sign in signs])
        given = logprobs, old, None, advantages, mask, 2, 7
        _, stats = loss_of(script, make_args(script), *given)
        found = stats["policy/clip_frac_high"], stats["policy/clip_frac_low"]
        assert found == expected and stats["policy/clip_frac"] == sum(expected)
    _, stats = loss_of(script, make_args(script), logprobs, old, None, 0 * advantages, mask, 2, 7)
    for name in ("clip_frac", "clip_frac_high", "clip_frac_low"):
        assert stats[f"policy/{name}"] == 0
    logratios = ratio_logs = [0.5, -0.5, 0.1, 0.4, -0.5, 0.5, -0.4]
    if script is gspo:
        ratio_logs = [0.5 / 4] * 4 + [-0.4 / 3] * 3
    approx_kl = 0.5 * sum(x**2 for x in logratios)
    assert stats["policy/approx_kl"].item() == pytest.approx(approx_kl)
    assert stats["policy/ratio_mean"].item() == pytest.approx(sum(map(math.exp, ratio_logs)))
    assert stats["policy/entropy"].item() == pytest.approx(-0.1)


def of_a_full_group(script, advantages, logprobs, old, **fields):
    """The loss and gradient of a group whose responses all have the full length."""
    logprobs = logprobs.clone().requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    args = make_args(script, max_new_tokens=mask.shape[1], **fields)
    given = advantages.view(-1, 1), mask, len(mask), mask.numel()
    loss, _ = loss_of(script, args, logprobs, old, None, *given)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return torch.cat([loss.detach().view(1), gradient.flatten()])


def test_scripts_agree_where_they_must():
    generator = torch.Generator().manual_seed(0)
    logprobs, old = -torch.rand(2, 6, 5, generator=generator, dtype=torch.float64)  # (G, R) each
    rewards = torch.randn(1, 6, generator=generator, dtype=torch.float64)  # (1, G)
    of_grpo = of_a_full_group(grpo, grpo.compute_advantages(rewards), logprobs, old)

    def agrees(script, advantages, expected, **fields):
        found = of_a_full_group(script, advantages, logprobs, old, **fields)
        return torch.allclose(found, expected, atol=1e-12)

    # At full lengths Dr. GRPO and GRPO differ only by the std.
    std = rewards.std() + 1e-4
    assert agrees(dr_grpo, dr_grpo.compute_advantages(rewards), of_grpo * std)
    # At equal lengths DAPO and GRPO differ only by the upper bound. Many ratios here are above 1.2.
    of_dapo = dapo.compute_advantages(rewards)
    assert agrees(dapo, of_dapo, of_grpo, clip_eps_high=0.2) and not agrees(dapo, of_dapo, of_grpo)
    # In one group RLOO equals REINFORCE with the mean as baseline, times G / (G - 1).
    centred = reinforce_baseline.compute_advantages(rewards, rewards.mean())
    of_reinforce = of_a_full_group(reinforce_baseline, centred, logprobs, old)
    assert agrees(rloo, rloo.compute_advantages(rewards), 6 / 5 * of_reinforce)
    # At ratio 1, GRPO has REINFORCE's gradient, divided by the length.
    advantages = grpo.compute_advantages(rewards)
    at_one = of_a_full_group(grpo, advantages, logprobs, logprobs)[1:]
    reinforce = of_a_full_group(reinforce_baseline, advantages, logprobs, logprobs)[1:]
    assert torch.allclose(at_one, reinforce / 5, atol=1e-12)


@pytest.mark.scripts("grpo", "reinforce_baseline")
@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (3, [3, 2, 2]), (9, [1] * 7 + [0, 0])])
def test_minibatches_are_even_shares_of_what_was_sampled(script, count, sizes):
    shares = list(script.minibatches(make_args(script, num_minibatches=count), 7))
    assert [len(share) for share in shares] == sizes
    assert sorted(torch.cat(shares).tolist()) == list(range(7))


@pytest.mark.scripts("grpo", "grpo_tools")
def test_select_by_hand(script):
    """A rollout's select takes a list or a tensor of indices, in any order, and selects from each field."""
    tensors = torch.arange(3 * 2).view(3, 2)
    names = [name for name in script.Rollout._fields if name != "prompts"]
    fields = {name: tensors + 10 * k for k, name in enumerate(names)}
    rollout = script.Rollout(prompts=[[5], [6, 7], [8]], **fields)
    for indices in ([2, 0], torch.tensor([2, 0])):
        selected = rollout.select(indices)
        assert selected.prompts == [[8], [5]]
        for k, name in enumerate(names):
            expected = [[10 * k + 4, 10 * k + 5], [10 * k, 10 * k + 1]]
            assert getattr(selected, name).tolist() == expected, name


# ---- the rewards, advantages and values of tokens: ppo_rlhf.py and vapo.py


def test_whiten_by_hand():
    """The unmasked values 1, 3, 5 have mean 3 and biased variance 8/3."""
    values = double([[1.0, 3.0, 100.0], [5.0, NAN, -INF]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    z = 2 / math.sqrt(8 / 3 + 1e-8)
    same(ppo_rlhf.whiten(values, mask), [[-z, 0.0], [z]], mask)
    # The variance of 0 and 2e-4 is also 1e-8. An epsilon outside the root would vanish beside the std of 1e-4.
    mask = torch.ones(1, 2, dtype=torch.bool)
    z = 1 / math.sqrt(2)
    same(ppo_rlhf.whiten(double([[0.0, 2e-4]]), mask), [[-z, z]], mask)


def test_token_rewards_by_hand():
    """Every token gets -0.1 (old - ref), and the last unmasked token also gets the score."""
    mask = torch.tensor([[True] * 3, [True, False, False], [True, True, False], [False] * 3])
    old = double([[-1.0, -2.0, -3.0], [-1.0, 9.0, 9.0], [-0.5, -0.5, INF], [NAN, 1.0, 1.0]])
    ref = double([[-2.0, -1.0, -3.0], [-3.0, NAN, 9.0], [-0.5, -1.5, 9.0], [9.0, 9.0, 9.0]])
    scores = double([10.0, 20.0, -30.0, 40.0])
    rewards = ppo_rlhf.kl_rewards(scores, old, ref, mask, beta=0.1)
    same(rewards, [[-0.1, 0.1, 10.0], [20.0 - 0.2], [0.0, -30.0 - 0.1], []], mask)
    # Without a KL only the score is left.
    only_scores = [[0.0, 0.0, 10.0], [20.0], [0.0, -30.0], []]
    same(ppo_rlhf.kl_rewards(scores, old, None, mask, beta=0.0), only_scores, mask)
    same(vapo.terminal_rewards(scores, mask), only_scores, mask)


def test_gae_by_hand():
    """With gamma 0.5, lambda 0.5, values 1, 2, 3 and a final reward of 8, the deltas are 0 + 1 - 1, 0 + 1.5 - 2, 8 - 3.

    A = 0 + 0.25 * 0.75, -0.5 + 0.25 * 5, 5. In the second row, garbage follows the only unmasked token.
    """
    rewards, values = (
        double([[0.0, 0.0, 8.0], [8.0, 100.0, NAN]]),
        double([[1, 2, 3], [3, 100, INF]]),
    )
    mask = torch.tensor([[True, True, True], [True, False, False]])
    before = [tensor.clone() for tensor in (rewards, values)]
    advantages, returns = ppo_rlhf.compute_gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    same(advantages, [[0.1875, 0.75, 5.0], [5.0]], mask)
    same(returns, [[1.1875, 2.75, 8.0], [8.0]], mask)
    same(vapo.discounted_returns(rewards, mask, gamma=0.5), [[2.0, 4.0, 8.0], [8.0]], mask)
    # Changing the outputs must not change the inputs.
    advantages.add_(1.0)
    returns.add_(1.0)
    for tensor, copy in zip((rewards, values), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_of_both_scripts_agrees(gamma):
    """In vapo.py each response has a lambda of its own. At lambda 1, advantage plus value is the plain return."""
    mask, (rewards, values) = ragged_tensors(2, 2)
    lambdas = double([0.0, 0.7, 1.0, 0.95, 0.5])
    advantages = vapo.compute_gae(rewards, values, mask, gamma, lambdas)
    for i, value in enumerate(lambdas.tolist()):
        theirs, _ = ppo_rlhf.compute_gae(rewards, values, mask, gamma, value)
        assert torch.equal(advantages[i], theirs[i])
    _, returns = ppo_rlhf.compute_gae(rewards, values, mask, gamma, gae_lambda=1.0)
    expected = []
    for row, counts in zip(rewards, mask, strict=True):
        own = row[counts].tolist()
        expected.append([sum(gamma**k * r for k, r in enumerate(own[t:])) for t in range(len(own))])
    same(returns, expected, mask)
    same(vapo.discounted_returns(rewards, mask, gamma), expected, mask)


def test_adaptive_lambda_by_hand():
    """lambda is 1 - 1 / (alpha l), or 0: PPO's fixed 0.95 fits 400 tokens. Its powers add up to alpha l."""
    for alpha, length, expected in (
        (0.05, 1000, 0.98),
        (0.05, 400, 0.95),
        (0.05, 20, 0.0),  # alpha l = 1: only the next delta counts
        (0.05, 7, 0.0),  # the formula is negative here
        (0.5, 3, 1 / 3),
    ):
        mask = torch.arange(1000)[None] < length  # (1, 1000)
        (found,) = vapo.adaptive_lambda(mask, alpha).tolist()
        assert found == pytest.approx(expected, abs=1e-6)
        if alpha * length >= 1:
            total = math.fsum(found**k for k in range(10_000))
            assert total == pytest.approx(alpha * length, rel=1e-4)


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
    """The minibatch has four tokens. The second slot here is masked, and its numbers don't count."""
    values = double([[value, 9.0]]).requires_grad_()
    given = double([[old, 7.0]]), double([[target, -5.0]]), torch.tensor([[True, False]]), 4
    result, stats = ppo_rlhf.value_loss(values, *given, value_clip_eps=0.2)
    (slope,) = torch.autograd.grad(result, values)
    assert result.item() == pytest.approx(loss / 4)
    assert slope.tolist()[0] == pytest.approx([gradient / 4, 0.0])
    assert stats["value/loss"].item() == pytest.approx(loss)  # a sum
    assert stats["value/clip_frac"] == clipped


def test_slices_of_value_and_nll_loss_add_up():
    mask, (values, old, returns) = ragged_tensors(4, 3)
    is_right = torch.tensor([True, False, True, True, False])
    num_tokens, num_right = int(mask.sum()), int(mask[is_right].sum())

    def losses(rows):
        given = values[rows], old[rows], returns[rows], mask[rows]
        loss, stats = ppo_rlhf.value_loss(*given, num_tokens, value_clip_eps=0.2)
        nll = vapo.nll_loss(values[rows], is_right[rows], mask[rows], num_right)
        return torch.stack([loss, nll, *[stats[name] for name in sorted(stats)]])

    parts = losses([0]) + losses([4, 1]) + losses([2, 3])
    torch.testing.assert_close(parts, losses([0, 1, 2, 3, 4]))


def test_nll_loss_by_hand():
    """The first response (2 tokens) and the third (1 token) are right: -(-1 - 2 - 6) / 3 = 3."""
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    logprobs = double([[-1.0, -2.0], [-4.0, -5.0], [-6.0, NAN]]).requires_grad_()
    right = torch.tensor([True, False, True])
    loss = vapo.nll_loss(logprobs, right, mask, 3)
    assert loss.item() == pytest.approx(3.0)
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(slope, double([[-1.0, -1.0], [0.0, 0.0], [-1.0, 0.0]]) / 3)
    # Without a right response there is no loss.
    wrong = torch.zeros(3, dtype=torch.bool)
    loss = vapo.nll_loss(logprobs, wrong, mask, wrong.sum())
    assert loss.item() == 0 and not torch.autograd.grad(loss, logprobs)[0].any()


def test_explained_variance_by_hand():
    """The returns 0, 2, 4 have variance 4. The errors 1, 0, -1 have variance 1."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    returns = double([[0.0, 2.0, NAN], [4.0, INF, 9.0]])
    values = double([[-1.0, 2.0, INF], [5.0, 7.0, NAN]])
    assert ppo_rlhf.explained_variance(values, returns, mask).item() == pytest.approx(0.75)
    assert ppo_rlhf.explained_variance(returns, returns, mask).item() == 1
    constant = torch.full_like(returns, 17.0)
    assert ppo_rlhf.explained_variance(constant, returns, mask).item() == pytest.approx(0.0)
    # Equal returns have no variance to explain, although their computed mean has a rounding error.
    returns, mask = torch.full((3, 7), 1.1), torch.ones(3, 7, dtype=torch.bool)
    for scale in (0.0, 1e-7, 1.0):
        values = returns + scale * torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
        assert not math.isfinite(ppo_rlhf.explained_variance(values, returns, mask))


# ---- shapes that would broadcast silently are refused

WIDE, FLAT = torch.zeros(3, 3), torch.zeros(3)
COLUMN, SINGLE = torch.zeros(3, 1), torch.zeros(1)
ALL = torch.ones(3, 3, dtype=torch.bool)
# Each row is a function, arguments that it takes, and the place and the value of an argument that it refuses.
REFUSED = [
    *[(script.compute_advantages, (WIDE,), 0, FLAT) for script in (grpo, dr_grpo, rloo)],
    # A group of one has no other samples and no std: the advantage would be 0 or NaN.
    *[(script.compute_advantages, (WIDE,), 0, COLUMN) for script in (grpo, dr_grpo, rloo)],
    (reinforce_baseline.compute_advantages, (WIDE, 0.5), 0, FLAT),
    # One baseline per prompt would be another algorithm.
    (reinforce_baseline.compute_advantages, (WIDE, 0.5), 1, COLUMN),
    *[(remax.compute_advantages, (WIDE, FLAT), 1, bad) for bad in (COLUMN, SINGLE, SINGLE[0])],
    *[(ppo_rlhf.kl_rewards, (FLAT, WIDE, WIDE, ALL, 0.1), 0, bad) for bad in (COLUMN, WIDE, SINGLE)],
    *[(vapo.terminal_rewards, (FLAT, ALL), 0, bad) for bad in (COLUMN, SINGLE)],
    (ppo_rlhf.compute_gae, (WIDE, WIDE, ALL, 0.9, 0.9), 1, COLUMN),
    (vapo.compute_gae, (WIDE, WIDE, ALL, 0.9, FLAT), 1, COLUMN),
    *[(vapo.compute_gae, (WIDE, WIDE, ALL, 0.9, FLAT), 4, bad) for bad in (SINGLE, COLUMN, SINGLE[0])],
    (vapo.discounted_returns, (WIDE, ALL, 0.9), 0, COLUMN),
    *[(ppo_rlhf.value_loss, (WIDE, WIDE, WIDE, ALL, 9, 0.2), k, FLAT) for k in (0, 1, 2)],
]  # fmt: skip


@pytest.mark.parametrize(("function", "good", "place", "bad"), REFUSED, ids=range(len(REFUSED)))
def test_shapes_that_would_broadcast_are_refused(function, good, place, bad):
    function(*good)
    with pytest.raises(AssertionError):
        function(*good[:place], bad, *good[place + 1 :])


@pytest.mark.scripts(*LOSSES)
def test_a_loss_refuses_shapes_that_would_broadcast(script):
    args, sizes = make_args(script), (3, 9)
    good = WIDE if script.__name__ in PER_TOKEN else COLUMN
    loss_of(script, args, WIDE, WIDE, None, good, ALL, *sizes)
    for bad in (FLAT, FLAT[None], WIDE[:, :2], torch.zeros(1, 1)):
        with pytest.raises(AssertionError):
            loss_of(script, args, WIDE, WIDE, None, bad, ALL, *sizes)
    with pytest.raises(AssertionError):
        loss_of(script, args, WIDE, WIDE[:1], None, good, ALL, *sizes)
