"""What make.py --check runs for each file, in a process of its own.

python exercises/grade.py FILE NAME,NAME,... PIPE

grades the exercises with these names, and writes a line of JSON into the pipe for each: its name,
and "right" or a sentence. A sentence of `mistakes` says which mistake gives these numbers.
"""

import importlib.util
import json
import math
import os
import statistics
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from make import EXERCISES, ROOT

# A submission can't import the files of these folders, which have solutions.
FOLDERS = [ROOT, ROOT / "tests", ROOT / "tools", ROOT / "exercises"]
sys.path[:0] = map(str, FOLDERS)

import test_equations  # noqa: E402
import test_sampling  # noqa: E402

import dapo  # noqa: E402
import dr_grpo  # noqa: E402
import gspo  # noqa: E402


class Wrong(Exception):
    """A wrong answer, with a sentence that teaches."""


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def compare(what, found, right, mistakes=None, tolerance=1e-6):
    """Raise Wrong if found isn't right. mistakes: a sentence -> what this mistake would give."""
    is_tensor = isinstance(found, torch.Tensor)

    def is_close(numbers):
        numbers = torch.as_tensor(numbers).double()
        same_shape = is_tensor and found.shape == numbers.shape
        return same_shape and torch.allclose(found.double(), numbers, tolerance, tolerance)

    if is_close(right):
        return
    for sentence, numbers in (mistakes or {}).items():
        if is_close(numbers):
            raise Wrong(sentence)
    right = torch.as_tensor(right).double().round(decimals=5).tolist()
    shown = found.double().round(decimals=5).tolist() if is_tensor else found
    raise Wrong(f"{what} should be {str(right):.150}, and is {str(shown):.150}")


def advantages_of(compute, rewards):
    """What the student's function makes of a copy of rewards, which it has to leave as it is."""
    given = rewards.clone()
    found = compute(given)
    if not torch.equal(given, rewards):
        raise Wrong("it changes its input (-= does): main logs and saves these rewards later")
    return found


def check_equal(compute):
    for size in range(2, 10):
        rewards = (torch.arange(1, 15) / 10)[:, None].expand(-1, size)  # 14 groups
        if advantages_of(compute, rewards).any():  # NaN counts as True
            raise Wrong(
                "equal rewards must give exactly 0, but float32 rounds their mean: first subtract "
                "the first reward of each group from all of its rewards"
            )


# Two groups, with the means 1 and 25.
REWARDS = double([[3, 0, 0, 1], [10, 20, 30, 40]])
CENTRED = double([[2, -1, -1, 0], [-15, -5, 5, 15]])

# Two sequences of 5 and of 10 tokens. The ratio of their last token is 10, and all others are 1.
# If the advantages are -1, nothing is clipped.
MASK = torch.arange(10) < torch.tensor([[5], [10]])  # (2, 10) bool
LOGRATIO = torch.zeros(2, 10, dtype=torch.float64)
LOGRATIO[0, 4] = LOGRATIO[1, 9] = math.log(10)


def grade_advantages(my):
    std = double([[6 / 3], [500 / 3]]).sqrt()  # the squares add up to 6 and to 500
    biased = double([[6 / 4], [500 / 4]]).sqrt()
    right = CENTRED / (std + 1e-4)
    mistakes = {
        "the std divides by G - 1 (torch's default), not by G": CENTRED / (biased + 1e-4),
        "the std is missing: divide by the std of the group": CENTRED,
        "divide by the std, not by the variance": CENTRED / (std**2 + 1e-4),
        "add 1e-4 to the std, no less (else equal rewards give 0/0) and no more": CENTRED / std,
        "a group is a row: take the mean and the std of each row, not of all rewards": (
            (REWARDS - REWARDS.mean()) / (REWARDS.std() + 1e-4)
        ),
    }
    found = advantages_of(my.compute_advantages, REWARDS)
    compare(f"A of {REWARDS.tolist()}", found, right, mistakes)
    check_equal(my.compute_advantages)
    compare("A, with 5 more for all rewards,", my.compute_advantages(REWARDS + 5), right)
    rewards, slow = torch.rand(3, 16, dtype=torch.float64), []
    rewards[1] = 0.1 * torch.eye(16)[0]  # the largest A: a bound of A would show
    for row in rewards.tolist():
        mean, std = statistics.mean(row), statistics.stdev(row)
        slow.append([(reward - mean) / (std + 1e-4) for reward in row])
    compare("A of random rewards, and of one 0.1 among 16,", my.compute_advantages(rewards), slow)


# ==== losses ====
# A loss is a function of (logprobs, old, advantages, mask, *sizes, **fields). sizes: num_tokens, or
# num_seqs and what may come after it.
def grpo_loss(my):
    """policy_loss as such a function: without a KL, and without the metrics."""

    def loss(logprobs, old, advantages, mask, num_seqs, clip_eps):
        return my.policy_loss(logprobs, old, None, advantages, mask, num_seqs, clip_eps, 0.0)[0]

    return loss


def loss_and_slope(function, logratio, old, advantages, mask, *sizes, **fields):
    """The loss of logprobs = old + logratio, and its gradient by the unmasked logprobs (n, R)."""
    leaf = (old + logratio).requires_grad_()  # (n, R)
    given = leaf.clone(), old.clone(), advantages.clone(), mask.clone()  # it may change its input
    loss = function(*given, *sizes, **fields)
    if not isinstance(loss, torch.Tensor) or loss.shape != ():
        raise Wrong(f"return the loss, a scalar tensor: it is {str(loss):.150}")
    if not loss.requires_grad:
        raise Wrong("the loss has no gradient: logprobs and the ratio must be in it, not detached")
    (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope * mask


# Minibatches of one token each, with these ratios and advantages. Each log pi_old is -1.
RATIO = double([1.5, 1.25, 0.5, 1.5, 0.5, 20, 0.01])
A = double([2, 2, 2, -2, -2, -2, 2])


def one_token_each(function, *sizes, **fields):
    """The loss of each of these minibatches (7,), and its gradient by log pi (7,)."""
    losses, slopes = [], []
    for ratio, advantage in zip(RATIO.view(-1, 1, 1), A.view(-1, 1, 1), strict=True):
        given = ratio.log(), double([[-1]]), advantage, torch.ones(1, 1).bool(), *sizes
        loss, slope = loss_and_slope(function, *given, **fields)
        losses.append(loss)
        slopes.append(slope[0, 0])
    return torch.stack(losses), torch.stack(slopes)


def two_sequences(function, *sizes, **fields):
    """The loss of LOGRATIO's two sequences, with an advantage of -1, and its gradient (2, 10)."""
    given = LOGRATIO, -MASK.double(), double([[-1], [-1]]), MASK
    return loss_and_slope(function, *given, *sizes, **fields)


def clipped_loss(eps_low, eps_high, ratio=RATIO):
    """The loss of each of the minibatches of one token (7,)."""
    return -torch.minimum(ratio * A, ratio.clamp(1 - eps_low, 1 + eps_high) * A)


def grade_clip(function, *sizes, low, high, more=None, **fields):
    """With these fields, the ratio of a token is clipped to 1 - low .. 1 + high.

    more: the mistakes that this exercise alone has, as in compare.
    """
    right, clipped = clipped_loss(low, high), RATIO.clamp(1 - low, 1 + high) * A
    mistakes = (more or {}) | {
        "the loss is -J: the minus is missing": -right,
        "min, not clip alone: with A < 0 and a large ratio the loss must still have a gradient": (
            -clipped
        ),
        "the clip is missing: the other term of min is clip(rho, 1 - eps, 1 + eps) A": -RATIO * A,
        "the min of the two products, not the max": -torch.maximum(RATIO * A, clipped),
        "the ratio is upside down: it is pi_theta / pi_old": clipped_loss(low, high, 1 / RATIO),
        "the upper bound is 1 + eps_high": clipped_loss(low, low),
        "the lower bound is 1 - eps_low": clipped_loss(high, high),
        "eps_low belongs to the lower bound, and eps_high to the upper": clipped_loss(high, low),
    }
    losses, slopes = one_token_each(function, *sizes, **fields)
    case = f"rho = {RATIO.tolist()}, A = {A.tolist()}, {fields}"
    compare(f"the loss at {case}", losses, right, mistakes)
    # Where the clip doesn't act, the gradient of -rho A by log pi is -rho A itself.
    slope = torch.where(right == -RATIO * A, right, 0)
    compare(f"the gradient by log pi at {case}", slopes, slope)


def metrics_and_slope(my, logprobs, ref, advantage, beta):
    """policy_loss of one sequence, whose log pi_old are -1: the metrics, and the gradient (1, R)."""
    logprobs = logprobs.clone().requires_grad_()  # (1, R)
    old, mask = -torch.ones_like(logprobs), torch.ones_like(logprobs).bool()
    given = logprobs, old, ref, double([[advantage]]), mask, 1, 0.2, beta
    loss, stats = my.policy_loss(*given)
    return stats, torch.autograd.grad(loss, logprobs)[0]


def compare_metrics(my, beta):
    """The metrics of one token: log pi is log(1.5) - 1, log pi_old -1 and log pi_ref -2."""
    x = math.log(1.5)
    stats, _ = metrics_and_slope(my, double([[x - 1]]), double([[-2]]), 2, beta)
    right = {"clip_frac_low": 0, "clip_frac_high": 1, "clip_frac": 1, "ratio_mean": 1.5}
    right |= {"approx_kl": x**2 / 2, "entropy": 1 - x}
    what = "logratio, ratio and logprobs are needed after your lines, as they are: policy/"
    for name, number in right.items():
        compare(what + name, stats["policy/" + name].double(), number)


def compare_with_slow_loss(my, beta):
    *given, mask = test_equations.ragged_batch(0)
    loss, _ = my.policy_loss(*(x.clone() for x in given), mask, 8, clip_eps=0.2, beta=beta)
    slow = test_equations.slow_loss("grpo", *given, mask, beta, 8, mask.sum())
    compare("the loss of random responses", loss.detach(), slow)


def grade_loss(my):
    loss, right = grpo_loss(my), clipped_loss(0.2, 0.2)
    more = {"surrogate is S, without a minus: the next line has the minus": -right}
    grade_clip(loss, 1, low=0.2, high=0.2, clip_eps=0.2, more=more)
    more = {"clip_eps = 0.1 has no effect: take clip_eps for eps, and no number": right}
    grade_clip(loss, 1, low=0.1, high=0.1, clip_eps=0.1, more=more)
    compare_metrics(my, 0.0)
    # Two of a minibatch's four sequences: the losses of their tokens are 14 and 19 in all.
    found, slope = two_sequences(loss, 4, clip_eps=0.2)
    mistakes = {
        "the mean over tokens comes before the mean over sequences": 33 / 15,
        "take the mean over the tokens of a sequence, not their sum": 33 / 4,
        "padding doesn't count: the mask says which tokens do": (1.9 + 1.9) / 4,
        "divide by the length of the response, not by R": (1.4 + 1.9) / 4,
        "divide by num_seqs: this call sees a part of the minibatch's sequences": (2.8 + 1.9) / 2,
    }
    compare("the loss of (14 / 5 + 19 / 10) / 4", found, (2.8 + 1.9) / 4, mistakes)
    right = LOGRATIO.exp() * MASK / MASK.sum(1, keepdim=True) / 4
    mistakes = {
        "a ratio between the bounds needs its whole gradient: don't detach the clip": (
            torch.where(LOGRATIO == 0, right / 2, right)
        )
    }
    compare("the gradient of this loss by log pi", slope, right, mistakes)
    parts = []
    for i in range(2):
        row = LOGRATIO[[i]], -MASK[[i]].double(), double([[-1]]), MASK[[i]]
        parts.append(loss_and_slope(loss, *row, 4, clip_eps=0.2)[0])
    compare("the sum of the losses of two micro-batches", sum(parts), found)
    compare_with_slow_loss(my, 0.0)


def grade_kl(my):
    half, fifth, log = double([[0.5]]).log(), double([[0.2]]).log(), math.log(0.4)
    right = 0.4 - 1 - log  # x = pi_ref / pi is 0.4
    stats, slope = metrics_and_slope(my, half, fifth, 0, beta=0.5)
    mistakes = {
        "KL(ref||pi) instead: the ratio is upside down, x is pi_ref / pi_theta": 2.5 - 1 + log,
        "this is k1, which is negative for many tokens: k3 adds x - 1": -log,
        "this is k2: k3 is x - 1 - log x": 0.5 * log**2,
        "the - 1 is missing: if the policies are equal, kl must be 0": 0.4 - log,
        "the sign is wrong: k3 is never negative": -right,
        "beta doesn't belong to kl: the next line has it": 0.5 * right,
    }
    compare("kl at pi = 1/2, pi_ref = 1/5", stats["kl/ref"], right, mistakes)
    mistakes = {"kl is a term of the loss: don't detach it": [[0.0]]}
    compare("the gradient of beta kl by log pi, beta (1 - x),", slope, [[0.5 * 0.6]], mistakes)
    far = double([[-13, 11]])  # with pi = 1/e, log x is -12 and 12
    stats, _ = metrics_and_slope(my, torch.full_like(far, -1), far, 0, beta=1.0)
    what = "the sum of kl at log x = -12 and 12, without any bound,"
    compare(what, stats["kl/ref"], math.exp(-12) + math.exp(12) - 2)
    compare_metrics(my, 1.0)
    try:
        test_equations.test_k3_estimates_the_kl_from_policy_to_reference(my)
    except AssertionError:
        raise Wrong("float32 loses digits of x - 1 where x is near 1: use torch.expm1") from None
    compare_with_slow_loss(my, 0.04)


def grade_states(my):
    def decoder(rows, use_cache):  # the state at a token is the token's id
        return SimpleNamespace(last_hidden_state=rows[..., None])

    base_model = SimpleNamespace(get_decoder=lambda: decoder)
    model = SimpleNamespace(base_model=base_model, device=SimpleNamespace(type="none"))
    ids, mask = torch.tensor([[3, 2, 0], [3, 4, 2]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    rows = torch.tensor([[5, 6, 7, 3, 2], [8, 3, 4, 2, 0]])  # what the decoder reads: its states
    mistakes = {
        "the state of the LAST prompt token predicts the first response token": [3, 2, 3, 4, 2],
        "the last token of the prompt also predicts one: the first of the response": [3, 3, 4],
        "the last token of the response predicts no token that counts": [7, 3, 2, 8, 3, 4, 2],
        "of the prompt, only the last token predicts one of the response": [5, 6, 7, 3, 8, 3, 4],
        "flags are True and False: torch takes numbers for indices": (
            rows[[0, 0, 1, 1, 0, 1, 1, 1, 0, 0]].flatten()
        ),
    }
    found = my.response_states(model, my.Rollout([[5, 6, 7], [8]], ids, mask, None)).flatten()
    compare("the states of the docstring's example", found, [7, 3, 8, 3, 4], mistakes)
    lengths = [(1, [4, 2]), (5, [1, 6]), (6, [5, 3])]
    model, rollout = (
        test_sampling.build("Llama"),
        test_sampling.random_rollout(my, lengths, vocabulary=2),
    )
    found = my.compute_logprobs(model, rollout, 0.7).detach()
    slow = test_sampling.slow_logprobs(model, rollout, 0.7).detach()  # one sequence at a time
    compare("the log-probabilities of random sequences", found, slow, tolerance=1e-4)


def grade_draw(my):
    p, count = double([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]), 20_000
    logits = (p.log() + 7).float().repeat(count, 1)  # (2 * count, 3), two rows in turn
    token, logprobs = my.draw(logits.clone(), 0.5)
    right = double([[25, 9, 4], [4, 4, 36]]) / double([[38], [44]])  # at 1/2: p squared
    root = p.sqrt() / p.sqrt().sum(1, keepdim=True)  # at 2

    def of_token(table):
        return table.repeat(count, 1).gather(1, token.view(-1, 1))[:, 0]  # (rows,)

    mistakes = {
        "return the log-probabilities at the temperature that sampled": of_token(p.log()),
        "divide the logits by the temperature, don't multiply": of_token(root.log()),
        "a logit isn't a log-probability: take the log_softmax": of_token(2 * (p.log() + 7)),
        "return log-probabilities, not probabilities": of_token(right),
    }
    compare("the log-probabilities", logprobs, of_token(right.log()), mistakes, 1e-4)
    often = torch.stack([token[row::2].bincount(minlength=3) / count for row in range(2)])
    mistakes = {
        "draw the token, don't take the likeliest one": [[1, 0, 0], [0, 0, 1]],
        "draw the token at the temperature, too": p,
    }
    compare("how often each token is drawn", often, right, mistakes, 0.02)
    token, logprobs = my.draw(logits[:2].clone(), 0.0)
    if token.tolist() != [0, 2] or not torch.allclose(logprobs.exp().double(), p.amax(1)):
        raise Wrong("temperature 0 takes the likeliest token, with its log-probability at 1")
    token, logprobs = my.draw(torch.full((1, 50), 200.0), 1.0)  # exp(200) is infinite in float32
    if (token.shape, token.dtype, logprobs.dtype) != ((1,), torch.int64, torch.float32):
        raise Wrong("for one row, too, tokens and logprobs are (1,): int64 and float32")
    what = "the log-probability of one of 50 equal logits of 200"
    compare(what, logprobs, [-math.log(50)], None, 1e-4)
    first, second = (my.draw(torch.zeros(200, 50), 1.0)[0] for _ in range(2))
    if torch.equal(first, second):
        raise Wrong("each call draws anew: don't set a seed")
    logits = torch.randn(1, 6)
    weights = [math.exp(logit / 1.7) for logit in logits[0].tolist()]
    slow = double(weights) / sum(weights)
    token, logprobs = my.draw(logits.repeat(count, 1), 1.7)
    compare("the log-probabilities", logprobs, slow.log()[token], None, 1e-4)
    compare("how often each token is drawn", token.bincount(minlength=6) / count, slow, None, 0.02)


def grade_leave_one_out(my):
    right = 4 / 3 * CENTRED  # the identity A = G / (G - 1) (U - mean)
    others = REWARDS - right
    mistakes = {
        "the own sample must not be in the baseline": CENTRED,
        "this is the baseline: subtract it from the return": others,
        "the return minus the baseline, not the baseline minus the return": -right,
        "divide the sum of the others by their number, G - 1": REWARDS - 3 / 4 * others,
        "RLOO doesn't divide by the std": right / (REWARDS.std(1, keepdim=True) + 1e-4),
    }
    found = advantages_of(my.leave_one_out, REWARDS)
    compare(f"A of {REWARDS.tolist()}", found, right, mistakes)
    check_equal(my.leave_one_out)
    returns, slow = torch.rand(3, 5, dtype=torch.float64), []
    for row in returns.tolist():
        slow.append([u - statistics.mean(row[:i] + row[i + 1 :]) for i, u in enumerate(row)])
    compare("A of random returns", my.leave_one_out(returns), slow)


# ==== exercises 7 to 9 ====
# The references: functions of the scripts, and for CISPO the formula, one token at a time.
def right_dapo(logprobs, old, advantages, mask, num_tokens, eps_low=0.2, eps_high=0.28):
    return dapo.policy_loss(logprobs, old, advantages, mask, num_tokens, eps_low, eps_high)[0]


def right_dr_grpo(logprobs, old, advantages, mask, num_seqs, max_tokens, clip_eps=0.2):
    given = logprobs, old, None, advantages, mask, num_seqs, max_tokens
    return dr_grpo.policy_loss(*given, clip_eps, beta=0.0)[0]


def right_gspo(logprobs, old, advantages, mask, num_seqs, eps_low=3e-4, eps_high=4e-4):
    given = logprobs, old, None, advantages, mask, num_seqs
    return gspo.policy_loss(*given, eps_low, eps_high, beta=0.0)[0]


def right_cispo(logprobs, old, advantages, mask, num_tokens, eps_high=4.0):
    loss = 0.0
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(logprobs[i, t].item() - old[i, t].item())  # a number has no gradient
        loss = loss - min(ratio, 1 + eps_high) * advantages[i, 0] * logprobs[i, t] / num_tokens
    return loss


def grade_random(function, reference, *sizes, **fields):
    """Random responses. Some of their ratios are inside the bounds, and some outside."""
    logprobs, old, _, advantages, mask = test_equations.ragged_batch(0)
    given = (logprobs - old).detach(), old, advantages, mask
    right_loss, right_slope = loss_and_slope(reference, *given, *sizes, **fields)
    loss, slope = loss_and_slope(function, *given, *sizes, **fields)
    compare("the loss of random responses", loss, right_loss)
    compare("the gradient of random responses", slope, right_slope)
    parts = []
    for i in range(len(mask)):
        row = [tensor[[i]] for tensor in given]
        parts.append(loss_and_slope(function, *row, *sizes, **fields)[0])
    compare("the sum of the losses of micro-batches", sum(parts), right_loss)


def grade_dapo(my):
    for low, high in ((0.2, 0.28), (0.1, 0.4)):
        grade_clip(my.dapo_loss, 1, low=low, high=high, eps_low=low, eps_high=high)
    # The losses of the tokens of the two sequences are 14 and 19 in all, and their means 2.8 and 1.9.
    mistakes = {
        "divide by num_tokens: this call sees a part of the minibatch's tokens": 33 / 15,
        "each token has the same weight: take no mean within a sequence": (2.8 + 1.9) / 2,
        "padding doesn't count: the mask says which tokens do": 38 / 40,
        "divide by num_tokens": 33,
    }
    compare("the loss of (14 + 19) / 40", two_sequences(my.dapo_loss, 40)[0], 33 / 40, mistakes)
    grade_random(my.dapo_loss, right_dapo, 50)


def grade_dr_grpo(my):
    for eps in (0.2, 0.4):
        grade_clip(my.dr_grpo_loss, 1, 1, low=eps, high=eps, clip_eps=eps)
    mistakes = {
        "divide by max_tokens (L), not by R": 33 / 10 / 4,
        "divide by max_tokens (L), not by the length of the response": (2.8 + 1.9) / 4,
        "divide by num_seqs: this call sees a part of the minibatch's sequences": 33 / 30 / 2,
        "divide by max_tokens (L), too": 33 / 4,
        "divide by num_seqs, too": 33 / 30,
        "padding doesn't count: the mask says which tokens do": 38 / 30 / 4,
    }
    loss, _ = two_sequences(my.dr_grpo_loss, 4, 30)
    compare("the loss of (14 / 30 + 19 / 30) / 4", loss, 33 / 30 / 4, mistakes)
    grade_random(my.dr_grpo_loss, right_dr_grpo, 9, 12)


def grade_averages(my):
    for name, grade in {"dapo_loss": grade_dapo, "dr_grpo_loss": grade_dr_grpo}.items():
        try:
            grade(my)
        except Wrong as error:
            raise Wrong(f"{name}: {error}") from None


def grade_gspo(my):
    for low, high in ((0.2, 0.3), (0.1, 0.4)):
        grade_clip(my.gspo_loss, 1, low=low, high=high, eps_low=low, eps_high=high)
    # Two tokens with the ratios 1.44 and 1, and four with 0.9: s is 1.2 and 0.9.
    ratio = double([[1.44, 1, 1, 1], [0.9, 0.9, 0.9, 0.9]])
    mask = torch.arange(4) < torch.tensor([[2], [4]])
    given = ratio.log(), -mask.double(), double([[2], [-1]]), mask, 4
    fields = dict(eps_low=0.2, eps_high=0.3)
    loss, slope = loss_and_slope(my.gspo_loss, *given, **fields)
    mistakes = {
        "the root is missing: s is the geometric mean of the ratios": (-2 * 1.3 + 0.8) / 4,
        "s is the geometric mean of the ratios, not the arithmetic one": (-2 * 1.22 + 0.9) / 4,
        "a sequence has one ratio s; this has a ratio for each token": (-(1.3 + 1) + 0.9) / 4,
        "the exponent is 1 / |o|: don't count the padding": (-2 * 1.44**0.25 + 0.9) / 4,
        "a sequence has one term: don't add up its tokens": (-2 * 2.4 + 4 * 0.9) / 4,
        "s is (n,) and advantages (n, 1), so this has each s times each A": (
            (-2 * (1.2 + 0.9) + (1.2 + 0.9)) / 4
        ),
        "divide by num_seqs: this call sees a part of the minibatch's sequences": (-2.4 + 0.9) / 2,
    }
    compare("the loss of (-2 * 1.2 + 0.9) / 4", loss, (-2.4 + 0.9) / 4, mistakes)
    right = double([[-1.2], [0.9 / 4]]) * mask / 4
    compare("the gradient of this loss by log pi", slope, right)
    grade_random(my.gspo_loss, right_gspo, 9, eps_low=0.1, eps_high=0.2)
    grade_random(my.gspo_loss, right_gspo, 9)


def grade_cispo(my):
    logprobs = RATIO.log() - 1
    for eps in (0.2, 0.4):
        weight = RATIO.clamp(max=1 + eps)
        right = -weight * A * logprobs
        mistakes = {
            "the loss is -J: the minus is missing": -right,
            "log pi is missing: the ratio is only the weight of log pi": -weight * A,
            "the ratio is a weight: the other factor is log pi": -weight * A * RATIO,
            "the bound is 1 + eps_high": -RATIO.clamp(max=eps) * A * logprobs,
            "the weight isn't clipped at 1 + eps_high": -RATIO * A * logprobs,
            "the weight has no lower bound": -RATIO.clamp(1 - eps, 1 + eps) * A * logprobs,
            "the weight is clipped for both signs of A: take no min of two products": (
                -torch.minimum(RATIO * A, weight * A) * logprobs
            ),
        }
        losses, slopes = one_token_each(my.cispo_loss, 1, eps_high=eps)
        case = f"rho = {RATIO.tolist()}, A = {A.tolist()}, eps_high = {eps}"
        compare(f"the loss at {case}", losses, right, mistakes)
        slope = weight + torch.where(RATIO > 1 + eps, 0, weight * logprobs)
        mistakes = {"the weight has no gradient: detach it": -slope * A}
        compare(f"the gradient by log pi at {case}", slopes, -weight * A, mistakes)
    # A is -1. The weights of both ratios of 10 are 2, and their log pi is log(10) - 1.
    first, second = 4 * -1 + 2 * (math.log(10) - 1), 9 * -1 + 2 * (math.log(10) - 1)
    mistakes = {
        "divide by num_tokens: this call sees a part of the minibatch's tokens": (
            (first + second) / 15
        ),
        "each token has the same weight: take no mean within a sequence": (
            (first / 5 + second / 10) / 2
        ),
        "divide by num_tokens": first + second,
    }
    loss, _ = two_sequences(my.cispo_loss, 40, eps_high=1.0)
    compare("the loss of 15 of 40 tokens", loss, (first + second) / 40, mistakes)
    grade_random(my.cispo_loss, right_cispo, 50, eps_high=0.5)


GRADERS = [grade_advantages, grade_loss, grade_kl, grade_states, grade_draw, grade_leave_one_out]
GRADERS += [grade_averages, grade_gspo, grade_cispo]
GRADES = dict(zip(EXERCISES, GRADERS, strict=True))


# ==== one file ====
def load(path):
    """The module in this file."""
    spec = importlib.util.spec_from_file_location("my_grpo", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_grpo"] = module  # hidden if it's in ROOT, and a dataclass looks for it
    spec.loader.exec_module(module)
    return module


def hide_solutions():
    """Let every later import of a file in FOLDERS fail."""
    for folder in FOLDERS:
        for path in folder.glob("*.py"):
            sys.modules[path.stem] = None


def explain(error):
    """The error in a sentence, with its place: the last frame outside the installed packages."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # this has its line
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = [frame for frame in frames if "site-packages" not in frame.filename]
    where = f"{frame.name}, {Path(frame.filename).name} line {frame.lineno}"
    # hide_solutions put None there.
    if isinstance(error, ImportError) and sys.modules.get(error.name, error) is None:
        error.msg = f"{error.name} has solutions: write your own lines"
    return f"{type(error).__name__} in {where}: {error}"


def verdict(my, grade):
    """Grade an exercise, and return "right" or a sentence."""
    torch.manual_seed(0)
    try:
        grade(my)
    except Wrong as error:
        return f"not yet: {error}"
    except (Exception, SystemExit) as error:  # a student's code can fail in any way
        # torch has this error, too.
        if isinstance(error, NotImplementedError) and str(error).startswith("exercise "):
            return f"a hole is left: {error}"
        return f"not yet: {explain(error)}"
    return "right"


def main():
    path, names, pipe = sys.argv[1:]

    def write(name, text):
        os.write(int(pipe), json.dumps([name, text[:500]]).encode() + b"\n")

    hide_solutions()
    write("started", "")
    try:
        my = load(path)
    except (Exception, SystemExit) as error:
        write("error", explain(error))
        return
    write("loaded", "")
    for name in names.split(","):
        write(name, verdict(my, GRADES[name]))


if __name__ == "__main__":
    main()
