"""variants/: each patch applies without fuzz, its formula is right, and main uses it.

Also the tables of variants/README.md. test_whole_step.py has the patches whose changes to main need whole steps in
float64.
"""

import functools
import importlib.util
import inspect
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
import tyro
from conftest import ROOT, load_patched, small_recipe
from scripts import MACHINE_PATCHES
from test_equations import double, flags_of, loss_of, make_args, ragged_batch
from test_whole_step import PATCHES as IN_WHOLE_STEPS
from transformers import AutoModelForCausalLM

import grpo_tools
from utils.rewards import accuracy_reward, format_reward

PATCHES = {path.stem for path in (ROOT / "variants").glob("*.diff")}
PATCHES = sorted(PATCHES - set(MACHINE_PATCHES))
# The patches that change policy_loss.
LOSSES = ["cispo", "dppo", "gmpo", "mdpo", "sapo", "vespo"]
load = functools.cache(load_patched)  # the patch must apply without fuzz


# ---- losses


def loss_and_gradient(script, args, logprobs, old, ref, advantages, mask, *sizes):
    """The loss of these sequences, its gradient (n, R) and the stats."""
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, stats = loss_of(script, args, logprobs, old, ref, advantages, mask, *sizes)
    loss.backward()
    return loss.item(), logprobs.grad, stats


HAND = [
    # Each row: variant, advantage, fields, loss, the gradient with respect to the two log-probabilities, and the
    # clipped terms that are logged: their number, or those below and above the range.
    # The two tokens have ratios 1.5 and 0.5. Their old probabilities are 0.3 and 0.2. dr_grpo.py's L is 10.
    ("cispo", 2.0, dict(clip_eps_high=0.2), None, (-1.2 * 2 / 2, -0.5 * 2 / 2), 1),
    # A weight is truncated whatever the sign of the advantage.
    ("cispo", -2.0, dict(clip_eps_high=0.2), None, (1.2 * 2 / 2, 0.5 * 2 / 2), 1),
    ("cispo", -2.0, dict(clip_eps_high=0.6), None, (1.5 * 2 / 2, 0.5 * 2 / 2), 0),
    # 0.3 -> 0.45 rises too far. 0.2 -> 0.1 falls, so DPPO doesn't clip it.
    ("dppo", 2.0, dict(delta=0.12), -0.5, (0.0, -0.5), 1),
    ("dppo", 2.0, dict(delta=0.16), -2.0, (-1.5, -0.5), 0),
    ("dppo", -2.0, dict(delta=0.09), 1.5, (1.5, 0.0), 1),
    ("dppo", 0.0, dict(delta=0.09), 0.0, (0.0, 0.0), 0),
    # The geometric mean of min(1.5, e^0.2) and 0.5, or of 1.5 and max(0.5, e^-0.5). An unclipped token's gradient is
    # this mean times A / 2. The clip acts above e^eps if the advantage is positive, and below e^-eps if it is negative.
    ("gmpo", 2.0, dict(clip_eps=0.2), -2 * (0.5 * math.e**0.2) ** 0.5, (0.0, -((0.5 * math.e**0.2) ** 0.5)), (0, 1)),
    ("gmpo", -2.0, dict(clip_eps=0.2), 2 * (1.5 * math.e**-0.2) ** 0.5, ((1.5 * math.e**-0.2) ** 0.5, 0.0), (1, 0)),
    ("gmpo", 2.0, dict(clip_eps=0.5), -2 * 0.75**0.5, (-(0.75**0.5),) * 2, (0, 0)),
    ("gmpo", -2.0, dict(clip_eps=0.5), 2 * (1.5 * math.e**-0.5) ** 0.5, ((1.5 * math.e**-0.5) ** 0.5, 0.0), (1, 0)),
    # l = log 0.75; the gradient is -(A - tau l) / L.
    (
        "mdpo",
        2.0,
        dict(tau=0.5),
        (0.25 * math.log(0.75) ** 2 - 2 * math.log(0.75)) / 10,
        (-(2 - 0.5 * math.log(0.75)) / 10,) * 2,
        None,
    ),
    # 4 / tau sigmoid(tau / 2) and 4 / tau sigmoid(-tau / 2); the slope is 4 s (1 - s) times the ratio.
    (
        "sapo",
        2.0,
        dict(tau_pos=2.0, tau_neg=7.0),
        -2 * (2 / (1 + math.exp(-1)) + 2 / (1 + math.exp(1))) / 2,
        tuple(-4 * r / (1 + math.exp(-1)) / (1 + math.exp(1)) for r in (1.5, 0.5)),
        None,
    ),
    # phi(0.75) = 0.75^2 e^(3/4) for A > 0, 0.75^3 e^(1/2) for A < 0.
    ("vespo", 2.0, {}, None, (-(0.75**2) * math.exp(0.75),) * 2, None),
    ("vespo", -2.0, {}, None, (0.75**3 * math.exp(0.5),) * 2, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "advantage", "fields", "loss", "gradient", "clipped"), HAND)
def test_losses_by_hand(name, advantage, fields, loss, gradient, clipped):
    old = double([[0.3, 0.2, 9.0]]).log()
    logprobs = old + double([[1.5, 0.5, 7.0]]).log()
    mask = torch.tensor([[True, True, False]])
    args = make_args(load(name), beta=0.0, **fields)
    given = logprobs, old, None, double([[advantage]]), mask
    value, slope, stats = loss_and_gradient(load(name), args, *given, 1, 2)
    assert slope.tolist()[0] == pytest.approx([*gradient, 0.0], abs=1e-12)
    # If the weight is detached, only the gradient is meaningful.
    if loss is not None:
        assert value == pytest.approx(loss, abs=1e-12)
    expected = {"approx_kl": 0.5 * (math.log(1.5) ** 2 + math.log(0.5) ** 2)}
    expected["ratio_mean"] = 1.5 + 0.5
    expected["entropy"] = -math.log(0.45) - math.log(0.1)
    if clipped is not None:
        expected["clip_frac"] = clipped if isinstance(clipped, int) else sum(clipped)
    if isinstance(clipped, tuple):
        expected["clip_frac_low"], expected["clip_frac_high"] = clipped
    expected = {f"policy/{key}": value for key, value in expected.items()}
    assert {key: float(value) for key, value in stats.items()} == pytest.approx(expected)


FIELDS = dict(clip_eps_low=0.3, clip_eps_high=0.5, delta=0.1, tau=0.7, tau_pos=1.3, tau_neg=1.9)
FIELDS |= dict(k_pos=1.5, lambda_pos=2.5, k_neg=2.0, lambda_neg=1.0, clip_eps=0.4, beta=0.3)


def slow_gradient(name, logprobs, old, ref, advantages, mask, num_seqs, num_tokens):
    """d loss / d logprobs from derivatives on paper, one token at a time, and the number of clipped terms."""
    gradient, left_out = torch.zeros(mask.shape, dtype=torch.float64), 0
    for i in range(len(mask)):
        length, A = int(mask[i].sum()), advantages[i].item()
        logratios = [(logprobs[i, t] - old[i, t]).item() for t in range(length)]
        l = math.fsum(logratios)  # noqa: E741
        cut = [min(x, 0.4) if A > 0 else max(x, -0.4) for x in logratios]
        divisor = (10 if name == "mdpo" else length) * num_seqs
        if name in ("cispo", "dppo", "vespo"):
            divisor = num_tokens
        for t, x in enumerate(logratios):
            rho, out = math.exp(x), False
            if name == "cispo":
                weight, out = min(rho, 1.5), rho > 1.5
            elif name == "dppo":
                moved = math.exp(logprobs[i, t].item()) - math.exp(old[i, t].item())
                out = moved > 0.1 if A > 0 else moved < -0.1
                weight = 0.0 if out else rho
            elif name == "gmpo":
                out = cut[t] != x
                weight = 0.0 if out else math.exp(math.fsum(cut) / length)
            elif name == "mdpo":
                weight = 1 - 0.7 * l / A
            elif name == "sapo":
                tau = 1.3 if A > 0 else 1.9
                gate = 1 / (1 + math.exp(-tau * (rho - 1)))
                weight = 4 * gate * (1 - gate) * rho
            elif name == "vespo":
                k, lam = (1.5, 2.5) if A >= 0 else (2.0, 1.0)
                weight = math.exp(l) ** k * math.exp(lam * (1 - math.exp(l)))
            to_ref = ref[i, t].item() - logprobs[i, t].item()
            kl_slope = 1 - math.exp(to_ref)  # the gradient of k3
            gradient[i, t] = (-A * weight + 0.3 * kl_slope) / divisor
            left_out += out
    return gradient, left_out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_against_a_slow_loop(name, seed):
    """The batch is ragged, has garbage in the masked slots, and is a part of a minibatch."""
    logprobs, old, ref, advantages, mask = batch = ragged_batch(seed)
    sizes = (len(mask) + 2, int(mask.sum()) + 11)
    expected, left_out = slow_gradient(name, *batch, *sizes)
    assert left_out > 0 or name in ("mdpo", "sapo", "vespo")
    args = make_args(load(name), **FIELDS)
    _, gradient, stats = loss_and_gradient(load(name), args, *batch, *sizes)
    assert torch.allclose(gradient, expected, atol=1e-12, rtol=1e-10)
    assert stats.get("policy/clip_frac", left_out) == left_out
    assert ("policy/clip_frac" in stats) == (name in ("cispo", "dppo", "gmpo"))


def test_kimi_kl_by_hand():
    """The log-ratios to the sampler are 0.5 and -0.2. The advantage is 0, so only the penalty is left."""
    script, mask = load("kimi_kl"), torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    sampled = double([[-1.5, -1.8, 0.0]])
    args, old, zero = make_args(script, kl_tau=0.1), logprobs.detach(), torch.zeros(1, 1)
    given = dict(sampler_weights=torch.ones(1, 3), mask=mask, num_seqs=1)
    given |= flags_of(script.policy_loss, args)
    loss, stats = script.policy_loss(logprobs, old, sampled, None, zero, **given)
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(0.1 * (0.25 + 0.04) / 2, abs=1e-12)
    assert slope.tolist()[0] == pytest.approx([0.1 * 0.5, -0.1 * 0.2, 0.0], abs=1e-12)
    assert stats["kl/sampler"].item() == pytest.approx((0.25 + 0.04) / 2)
    for bad in (torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(3)):
        with pytest.raises(AssertionError):
            script.policy_loss(logprobs, old, bad, None, zero, **given)


def test_echo_by_hand():
    """The tool wrote two tokens of the first response, none of the second, and one of the third."""
    logprobs = torch.tensor([[-1.0, -0.5, math.nan], [math.inf, -1.0, -1.0], [-3.0, -9.0, -9.0]])
    logprobs = logprobs.double().requires_grad_()
    tool_mask = torch.tensor([[True, True, False], [False] * 3, [True, False, False]])
    loss = load("echo").tool_loss(logprobs, tool_mask, num_seqs=5, echo_coef=0.4)
    assert loss.item() == pytest.approx(0.4 * (0.75 + 0.0 + 3.0) / 5, abs=1e-12)
    (slope,) = torch.autograd.grad(loss, logprobs)
    expected = [[-0.4 / 2 / 5, -0.4 / 2 / 5, 0.0], [0.0] * 3, [-0.4 / 5, 0.0, 0.0]]
    assert torch.allclose(slope, double(expected), atol=1e-12)


# ---- advantages


def test_advantages_by_hand():
    rewards = double([[1, 0, 0, 0], [1, 1, 0, 0], [0] * 4, [1] * 4])
    # The centred rewards are 3/4, three times -1/4, twice 1/2, twice -1/2, and zeros. Their squares add up to
    # 3/4 + 1. The std divides this sum by 16 - 1.
    std = (1.75 / 15) ** 0.5 + 1e-4
    centred = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4, [0.0] * 4]
    expected = double(centred) / std
    assert torch.allclose(load("reinforce_pp").compute_advantages(rewards), expected, atol=1e-12)


def test_p3o_by_hand():
    """Only the first response is right. The log-ratios are 0.1, 0 and 0.3."""
    script = load("p3o")
    returns = double([[1.0, 0.0, 0.0]])
    logratio = double([[0.1, 0.0, 0.3]])
    near, far = math.exp(0.1 + 0.0), math.exp(0.1 + 0.3)

    def advantages(eps, moved=logratio):
        return script.compute_advantages(returns, moved, clip_eps=eps)[0].tolist()

    assert advantages(0.11) == pytest.approx([(near + far) / 2, -near / 2, -far / 2], abs=1e-12)
    # The first response has gained 0.1 on the second one, and lost 0.2 to the third one.
    assert advantages(0.09) == pytest.approx([far / 2, 0.0, -far / 2], abs=1e-12)
    # Now it has lost 0.1 to the second one, and gained 0.2 on the third one.
    assert advantages(0.15, -logratio) == pytest.approx([1 / near / 2, -1 / near / 2, 0.0])
    for bad in (torch.zeros(3, 1), torch.zeros(1, 1), torch.zeros(3)):
        with pytest.raises(AssertionError):
            script.compute_advantages(returns, bad, clip_eps=0.2)


def test_clip_cov_by_hand():
    """Two responses have advantages 3 and -1 (mean 1) and log-probabilities -1, -5 and -3, -3 (mean -3)."""
    logprobs = double([[-1.0, -5.0, math.nan], [-3.0, -3.0, -4.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    advantages = double([[3.0], [-1.0]])
    script = load("clip_cov")
    # The covariances are 2 * 2 = 4, -2 * 2 = -4, 0 and 0. The last slot, which doesn't count, would have 2.
    for low, high, left in (
        (1.0, 5.0, (0, 0)),
        (-5.0, -1.0, (0, 1)),
        (4.0, 9.0, None),
        (1.0, 4.0, None),
    ):
        bounds = dict(cov_low=low, cov_high=high)
        kept = script.clip_cov(logprobs, advantages, mask, cov_share=2e-4, **bounds)
        expected = advantages.expand(2, 3).clone()
        if left:
            expected[left] = 0.0
        assert torch.equal(kept, expected)
    # clip_cov must not change its input.
    assert advantages.tolist() == [[3.0], [-1.0]]


@pytest.mark.parametrize(("share", "count"), [(0.1, 2), (1e-6, 1)])
def test_clip_cov_draws_so_many_tokens_between_the_bounds(share, count):
    """With a share of 1 it leaves out all of them, and test_whole_step.py computes which these are."""
    logprobs, _, _, advantages, mask = ragged_batch(1)
    logprobs, script, left_out = logprobs.detach(), load("clip_cov"), []
    given = dict(logprobs=logprobs, advantages=advantages, mask=mask, cov_low=0.05, cov_high=0.6)
    between = script.clip_cov(**given, cov_share=1.0) != advantages
    assert 2 < between.sum() < mask.sum() and count == max(1, int(share * mask.sum()))
    for seed in range(60):
        torch.manual_seed(seed)
        kept = script.clip_cov(**given, cov_share=share)
        left_out.append(kept != advantages)
        assert left_out[-1].sum() == count and (kept[left_out[-1]] == 0).all()
    # The draws are random, so 60 seeds draw every token.
    assert torch.equal(torch.stack(left_out).any(0), between)


R = 1 / 1.21
# Each row: variant, fields, advantage, and the weights of the tokens of four responses. Their ratios are 1.2, 0.9; 4,
# 1/4; 0.8; and three times R. The geometric means are 1.0392, 1, 0.8 and 0.8264.
MASKS = [
    # The product of the first two ratios, 1.08, is out of the bounds. Their geometric mean isn't.
    ("geo_mask", dict(geo_low=0.9, geo_high=1.04), 1.0, [1.2, 0.9, 2, 1 / 4, 0, 0, 0, 0]),
    ("geo_mask", dict(geo_low=0.9, geo_high=1.03), 1.0, [0, 0, 2, 1 / 4, 0, 0, 0, 0]),
    ("geo_mask", dict(geo_low=1.0, geo_high=1.0), 1.0, [0, 0, 2, 1 / 4, 0, 0, 0, 0]),
    ("geo_mask", dict(geo_low=0.81, rollout_correction=0.0), 1.0, [0, 0, 1, 1, 0, 1, 1, 1]),
    ("icepop", {}, 1.0, [1.2, 0.9, 4, 0, 0.8, R, R, R]),
    ("icepop", dict(icepop_low=0.85, icepop_high=3.9), 1.0, [1.2, 0.9, 0, 0, 0, 0, 0, 0]),
    # The parent's cap on the product of a response still works.
    ("icepop", dict(sequence_cap=1.07), 1.0, [0, 0, 4, 0, 0.8, R, R, R]),
    # The last response's mean log-ratio is -0.19, and the sum is three times as large.
    ("opsm", dict(opsm_delta=0.05), -1.0, [1, 1, 1, 1, 0, 0, 0, 0]),
    ("opsm", dict(opsm_delta=0.2), -1.0, [1, 1, 1, 1, 0, 1, 1, 1]),
    ("opsm", dict(opsm_delta=0.3), -1.0, [1, 1, 1, 1, 1, 1, 1, 1]),
    # Only bad responses are left out. An advantage of 0 isn't bad.
    ("opsm", dict(opsm_delta=0.05), 1.0, [1, 1, 1, 1, 1, 1, 1, 1]),
    ("opsm", dict(opsm_delta=0.05), 0.0, [1, 1, 1, 1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("name", "fields", "advantage", "expected"), MASKS)
def test_masks_by_hand(name, fields, advantage, expected):
    ratios = [[1.2, 0.9, 1], [4, 1 / 4, 1], [0.8, 1, 1], [R] * 3]  # 1 where masked
    mask = torch.arange(3) < torch.tensor([2, 2, 1, 3])[:, None]  # (4, 3)
    current = double(ratios).log().requires_grad_()  # (4, 3)
    script, sampled = load(name), torch.zeros(4, 3, dtype=torch.float64)
    args = make_args(script, **fields)
    if name == "opsm":
        advantages = torch.full((4, 1), advantage)
        given = dict(mask=mask, opsm_delta=args.opsm_delta)
        weights = script.off_policy_mask(current, sampled, advantages, **given).expand(4, 3)
        for bad in (torch.zeros(4), torch.zeros(1, 4), torch.zeros(4, 4)):
            with pytest.raises(AssertionError):
                script.off_policy_mask(current, sampled, bad, **given)
    else:
        given = flags_of(script.compute_sampler_weights, args)
        weights = script.compute_sampler_weights(current, sampled, mask, **given)
    assert weights[mask].tolist() == pytest.approx(expected, abs=1e-12)
    assert weights.isfinite().all() and not weights.requires_grad


# ---- main


def recorded(function, calls):
    """The function. It also appends each of its calls to the list: arguments, named arguments and result."""

    def call(*given, **named):
        result = function(*given, **named)
        calls.append((given, named, result))
        return result

    return call


def run(script, monkeypatch, folder, **given):
    """Train on the small task. Return the last metrics, all samples, and the calls of two functions."""
    fields = dict(num_steps=2, num_prompts=3, num_generations=4, num_minibatches=2, seed=3)
    fields |= dict(max_new_tokens=21, learning_rate=1e-3, micro_batch_tokens=100, device="cpu")
    fields |= dict(eval_size=1, runs_dir=str(folder), run_name=script.__name__)
    calls = {"sample_responses": [], "policy_loss": []}
    with monkeypatch.context() as patch:
        for name, seen in calls.items():
            patch.setattr(script, name, recorded(getattr(script, name), seen))
        # All scripts share the evaluation, and it would take half of the time.
        patch.setattr(script, "evaluate", lambda *call: ({"eval/accuracy": 0.0}, []))
        metrics = script.main(make_args(script, **small_recipe(script) | fields | given))
    lines = (folder / script.__name__ / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return metrics, [json.loads(line) for line in lines], calls


def expected_advantages(name, samples):
    """The advantages (B, G) of a step, computed from the recorded rewards with the formulas of the docstrings."""
    rewards = double([sample["rewards"] for sample in samples])
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    if name == "gdpo":
        texts = [sample["completions"] for sample in samples]
        answers = [[sample["answer"]] * 4 for sample in samples]
        table = []
        for function in (accuracy_reward, format_reward):
            scores = map(function, texts, answers)
            table.append(double(list(scores)))  # (B, G)
        normal = [(x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4) for x in table]
        return (sum(normal) - sum(normal).mean()) / (sum(normal).std() + 1e-4)
    if name == "reinforce_pp":
        return (rewards - mean) / ((rewards - mean).std() + 1e-4)
    return (rewards - mean) / (1.0 if name == "mdpo" else std + 1e-4)


@pytest.mark.parametrize("name", [name for name in PATCHES if name not in IN_WHOLE_STEPS])
def test_two_steps(name, monkeypatch, tmp_path):
    metrics, samples, calls = run(load(name), monkeypatch, tmp_path)
    assert metrics["step"] == 2 and metrics["optim/skipped"] == 0 and metrics["optim/grad_norm"] > 0
    assert all(math.isfinite(x) for x in metrics.values())
    for step in (1, 2):
        records = [sample for sample in samples if sample["step"] == step]
        logged = double([sample["advantages"] for sample in records])
        expected = expected_advantages(name, records)
        assert torch.allclose(logged, expected, atol=1e-5) and logged.abs().max() > 0.01
    # The losses of an update's micro-batches have its size as their divisor.
    shares = [
        mask.sum().item() / named["num_tokens"]
        if "num_tokens" in named
        else len(mask) / named["num_seqs"]
        for (*_, mask), named, _ in calls["policy_loss"]
    ]
    assert len(shares) > 4 and math.fsum(shares) == pytest.approx(4)


def test_echo_without_its_term_is_grpo_tools(monkeypatch, tmp_path):
    """compute_logprobs computes more tokens, which may round differently. Otherwise nothing changes."""
    for script in (load("echo"), grpo_tools):
        run(script, monkeypatch, tmp_path, echo_coef=0.0, num_steps=1)
    one, other = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"]
        for name in ("echo", "grpo_tools")
    ]
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


def test_echo_adds_the_cross_entropy_of_a_plain_forward_pass(monkeypatch, tmp_path):
    """At the old policy GRPO's loss is minus the mean advantage, 0. What is left of the loss is ECHO's term."""
    given = dict(num_steps=1, num_prompts=8, num_minibatches=1, temperature=1.0)
    given |= dict(echo_coef=0.7, beta=0.0)
    metrics, _, calls = run(load("echo"), monkeypatch, tmp_path, **given)
    ((_, _, (rollout, _)),) = calls["sample_responses"]
    model = AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "addition" / "caller")
    terms, logprobs_of_tool = [], []
    for i in range(32):
        prompt = torch.tensor(rollout.prompts[i])
        is_token = rollout.context_mask[i]
        response, by_policy = rollout.response_ids[i][is_token], rollout.response_mask[i][is_token]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1).gather(-1, response[:, None])[:, 0]
        of_tool = logprobs[~by_policy].tolist()
        logprobs_of_tool += of_tool
        terms.append(-math.fsum(of_tool) / len(of_tool) if of_tool else 0.0)
    assert 0 < sum(term == 0.0 for term in terms) < 32
    assert metrics["policy/loss"] == pytest.approx(0.7 * sum(terms) / 32, abs=1e-5)
    expected = -math.fsum(logprobs_of_tool) / len(logprobs_of_tool)
    assert metrics["tool/cross_entropy"] == pytest.approx(expected, abs=1e-5)


# ---- variants/README.md


def test_the_page_lists_every_patch_with_its_parent():
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.diff\) \|[^|]*\| (\w+) \|", text, re.MULTILINE)
    expected = []
    for name in PATCHES:
        patch = (ROOT / "variants" / f"{name}.diff").read_text(encoding="utf-8")
        expected.append((name, name, re.match(r"--- (\w+)\.py\n", patch).group(1)))
    assert sorted(rows) == expected


def test_the_commands_of_scalerl(tmp_path, monkeypatch):
    """They make a script with cispo's loss and reinforce_pp's advantages. Only the docstring's hunks are rejected."""
    text = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
    section = text.split("## ScaleRL's recipe\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    *patches, command = block.splitlines()
    shutil.copy(ROOT / "grpo.py", tmp_path / "grpo.py")
    (tmp_path / "variants").symlink_to(ROOT / "variants")
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    codes = [subprocess.run(["bash", "-c", x], cwd=tmp_path).returncode for x in patches]
    assert codes == [0, 1]
    spec = importlib.util.spec_from_file_location("scalerl", tmp_path / "scalerl.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scalerl", script)
    spec.loader.exec_module(script)
    for function, name in (("policy_loss", "cispo"), ("compute_advantages", "reinforce_pp")):
        theirs = getattr(load(name), function)
        assert inspect.getsource(getattr(script, function)) == inspect.getsource(theirs)
    args = tyro.cli(script.Args, args=command.split()[2:])
    assert args.num_minibatches == 8 and args.clip_eps_high == 4.0 and args.beta == 0.0
