"""What gspo.py, remax.py, grpo_offpolicy.py and grpo_process.py add to their parents' equations.

Also how grpo_process.py finds steps and their tokens, in hostile texts too. variants/ is in test_variants.py.
"""

import itertools
import math

import pytest
import torch
from conftest import REAL, ROOT
from test_equations import make_args
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo_offpolicy
import grpo_process
import gspo
import remax

ADDER = ROOT / "assets" / "addition" / "adder"


def loss_and_gradient(script, args, logprobs, old, ref, advantages, mask):
    """The loss of one whole minibatch, the gradient (n, R) and the stats."""
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, stats = script.policy_loss(args, logprobs, old, ref, advantages, mask, num_seqs=len(mask))
    loss.backward()
    return loss.item(), logprobs.grad, stats


# ---- gspo


@pytest.mark.parametrize(
    ("low", "high", "advantage", "loss", "gradient"),
    [
        # The two tokens have ratios 1.2 and 0.9, so s = sqrt(1.08) = 1.03923. Each token's gradient
        # is -s A / 2.
        (0.1, 0.1, 2.0, -2 * 1.08**0.5, -(1.08**0.5)),
        (0.1, 0.1, -2.0, 2 * 1.08**0.5, 1.08**0.5),
        # The ratio is above the clip range, so the gradient is 0.
        (0.1, 0.02, 2.0, -2 * 1.02, 0.0),
        # With a negative advantage only the lower bound clips.
        (0.1, 0.02, -2.0, 2 * 1.08**0.5, 1.08**0.5),
    ],
)
def test_gspo_by_hand(low, high, advantage, loss, gradient):
    old = torch.tensor([[-1.0, -2.0, 5.0]], dtype=torch.float64)
    logprobs = old + torch.tensor([[1.2, 0.9, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    args = make_args(gspo, beta=0.0, clip_eps_low=low, clip_eps_high=high)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    value, slope, stats = loss_and_gradient(gspo, args, logprobs, old, None, advantages, mask)
    assert value == pytest.approx(loss, abs=1e-12)
    assert slope.tolist()[0] == pytest.approx([gradient, gradient, 0.0], abs=1e-12)
    # There is one sequence, so clip_frac is 1 or 0.
    assert stats["policy/clip_frac"] == stats["policy/clip_frac_high"] == (high < 0.039)
    assert stats["policy/clip_frac_low"] == 0
    # Each of the two tokens has the ratio of the sequence.
    assert stats["policy/ratio_mean"].item() == pytest.approx(2 * 1.08**0.5, abs=1e-12)


# ---- remax


def test_remax_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0], [1.4, 0.2]], dtype=torch.float64)
    greedy = torch.tensor([0.25, 1.4], dtype=torch.float64)
    advantages = remax.compute_advantages(rewards, greedy)
    assert [x for row in advantages.tolist() for x in row] == pytest.approx(
        [0.75, -0.25, 0.0, -1.2]
    )
    for i, j in itertools.product(range(2), range(2)):
        assert advantages[i, j].item() == rewards[i, j].item() - greedy[i].item()
    for bad in (greedy[:, None], torch.tensor(0.5), torch.zeros(3)):
        with pytest.raises(AssertionError):
            remax.compute_advantages(rewards, bad)


# ---- grpo_offpolicy


def test_sampler_weights_by_hand():
    old = torch.tensor([[0.0, 0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    sampled = -torch.tensor([[1.5, 3.0, 0.5, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True, False]])
    args = make_args(grpo_offpolicy)
    weights = grpo_offpolicy.compute_sampler_weights(args, old, sampled, mask)
    assert weights.tolist()[0] == pytest.approx([1.5, 2.0, 0.5, 1.0])
    assert not weights.requires_grad
    args.rollout_correction = 0.0
    weights = grpo_offpolicy.compute_sampler_weights(args, old, sampled, mask)
    assert weights.tolist() == [[1.0] * 4]


def test_sequences_far_from_the_sampler_are_left_out_by_hand():
    """The sequences' ratios are 3, 4.5 and 1 / 8. A sequence above the cap gets weights of 0."""
    sampled = -torch.tensor([[1.5, 2.0, 1.0], [1.5, 3.0, 1.0], [0.5, 0.5, 0.5]]).log()
    mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    args = make_args(grpo_offpolicy, sequence_cap=3.001)
    weights = grpo_offpolicy.compute_sampler_weights(args, torch.zeros(3, 3), sampled, mask)
    expected = torch.tensor([[1.5, 2.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    torch.testing.assert_close(weights, expected)
    args.rollout_correction = 0.0
    weights = grpo_offpolicy.compute_sampler_weights(args, torch.zeros(3, 3), sampled, mask)
    assert weights.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


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
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    old = torch.zeros(1, 1, dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    args = make_args(grpo_offpolicy, beta=0.0, dual_clip=dual_clip)
    for weight in (1.0, 0.25, 0.0):
        logprobs = logprobs.detach().requires_grad_()
        weights = torch.full_like(old, weight)
        value, stats = grpo_offpolicy.policy_loss(
            args, logprobs, old, None, advantages, weights, mask, num_seqs=1
        )
        (slope,) = torch.autograd.grad(value, logprobs)
        expected = (weight * loss, weight * gradient)
        assert (value.item(), slope.item()) == pytest.approx(expected, abs=1e-12)
        # Whatever its weight, the token counts.
        assert stats["policy/dual_clip_frac"] == (advantage < 0 and ratio > dual_clip)


def test_the_kl_has_no_sampler_weight():
    """pi is 1/2 and pi_ref 1/8, so k3 is 1/4 - 1 + log 4. The token's weight is 0."""
    logprobs, ref = (torch.tensor([[x]]).double().log() for x in (1 / 2, 1 / 8))
    args, one = make_args(grpo_offpolicy, beta=0.1), torch.ones(1, 1, dtype=torch.float64)
    loss, _ = grpo_offpolicy.policy_loss(
        args, logprobs, logprobs, ref, one, torch.zeros(1, 1), one.bool(), num_seqs=1
    )
    assert loss.item() == pytest.approx(0.1 * (math.log(4) - 3 / 4), abs=1e-12)


# ---- grpo_process


def test_steps_of_an_addition_by_hand():
    texts = {
        "<think>7+8=15,4+3+1=8</think><answer>85</answer>": [(13, 1.0), (21, 1.0), (48, 1.0)],
        # The second sum is true, but it lacks the carry.
        "<think>7+8=15,4+3=7</think><answer>75</answer>": [(13, 1.0), (19, 0.0), (46, 0.0)],
        # The first sum is false.
        "<think>7+8=14,4+3+1=8</think>85": [(13, 0.0), (21, 1.0), (31, 0.0)],
        # The first sum is false, although it ends in the right digit.
        "<think>7+8=25,4+3+1=8</think>85": [(13, 0.0), (21, 1.0), (31, 0.0)],
        # All sums are true, but they don't give the digits of 85, and 85 has no third digit.
        "<think>0+0=0,0+0=0,0+0=0</think>85": [(12, 0.0), (18, 0.0), (24, 0.0), (34, 0.0)],
        # The sum isn't between the tags.
        "7+8=15<think></think><answer>85</answer>7+8=15": [(46, 1.0)],
        # The closing tag is missing or comes first.
        "<think>7+8=15,4+3+1=8": [(21, 0.0)],
        "<think>7+8=15<think>,4+3+1=8</think>": [(36, 0.0)],
        "</think>7+8=15<think>": [(21, 0.0)],
        # The only <think> is at the end.
        "7+8=15</think><think>": [(21, 0.0)],
        # None of these is a sum of digits.
        "<think>17+8=25,7+8=151,1+1=</think>": [(14, 0.0), (22, 0.0), (27, 0.0), (35, 0.0)],
        "<think>7+8=015,4+3+1=8,,</think>": [(14, 0.0), (22, 1.0), (23, 0.0), (24, 0.0), (32, 0.0)],
        # Text that isn't a sum of digits has no steps.
        "<think>7 + 8 = 15, 4+3+1=8</think><answer>85</answer>": [(53, 1.0)],
        "<think>So 7+8=15.</think>": [(25, 0.0)],
        # The prompt contains the opening tag.
        "7+8=15,4+3=7</think>85": [(6, 1.0), (12, 0.0), (22, 0.0)],
        "": [(0, 0.0)],
    }
    found = grpo_process.step_rewards(list(texts), ["85"] * len(texts))
    for (text, expected), steps in zip(texts.items(), found, strict=True):
        assert [step.end for step in steps] == [end for end, _ in expected], text
        assert [step.reward for step in steps] == [reward for _, reward in expected], text


def test_the_hundreds_are_a_digit_too():
    (steps,) = grpo_process.step_rewards(
        ["<think>2+2=4,6+7=13,0+0+1=1</think><answer>134</answer>"], ["134"]
    )
    assert [step.reward for step in steps] == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "text", ["1+" * 50000, "1+1=" * 25000, "<think>" + "9" * 10**5 + "</think>", "1+1=2," * 20000]
)
def test_steps_of_a_hostile_completion(text):
    for whole in (text, f"<think>{text}</think>"):
        (steps,) = grpo_process.step_rewards([whole], ["134"])
        ends = [step.end for step in steps]
        assert ends[-1] == len(whole)
        assert ends[0] >= 0 and ends == sorted(ends)


def tokenizers():
    """Name -> tokenizer: the bundled model's, one with a token per byte, and SmolLM2's."""
    byte_level = Tokenizer(
        models.BPE(
            vocab={c: k for k, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
        )
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    found = {"adder": AutoTokenizer.from_pretrained(ADDER)}
    found["bytes"] = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    found["smollm2"] = AutoTokenizer.from_pretrained(REAL / "smollm2")
    return found


@pytest.mark.parametrize("name", ["adder", "bytes", "smollm2"])
def test_the_token_of_every_character(name):
    """The result must match the offsets that the tokenizer reports when it encodes a text."""
    tokenizer = tokenizers()[name]
    text = "<think>7+8=15,4+3+1=8</think><answer>85</answer>"
    if name != "adder":
        text = "Once upon a time, 7+8=15.\n\nTim said: “Ça va?猫 and🙂!”  Then 4+3+1=8" + text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded.input_ids, encoded.offset_mapping
    assert tokenizer.decode(ids) == text and len(ids) < 1.5 * len(text)
    # If a character has several tokens, the last of these tokens completes it.
    last = {end: t for t, (_, end) in enumerate(offsets)}
    ends = list(range(1, len(text) + 1))
    expected = [min(t for end, t in last.items() if end >= e) for e in ends]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    steps = [grpo_process.Step(end, 0.0) for end in ends]
    # The last step ends with the response.
    expected[-1] = len(ids + eos) - 1
    assert grpo_process.step_tokens(tokenizer, ids + eos, steps) == expected


def test_a_step_beyond_the_text_ends_with_the_response():
    tokenizer = tokenizers()["adder"]
    ids = tokenizer("7+8=15").input_ids
    steps = [grpo_process.Step(end, 0.0) for end in (3, 99, 6)]
    assert grpo_process.step_tokens(tokenizer, ids, steps) == [2, len(ids) - 1, len(ids) - 1]


def test_a_response_of_an_eos_token_alone_has_one_step():
    tokenizer = tokenizers()["adder"]
    steps = [grpo_process.Step(0, 0.0)]
    assert grpo_process.step_tokens(tokenizer, [tokenizer.eos_token_id], steps) == [0]


def test_process_advantages_by_hand():
    """The three rewards are 1, 0 and 1. Their mean is 2/3, and Bessel's std is sqrt((1 + 4 + 1) / 9 / 2)."""
    steps = [[grpo_process.Step(-1, x) for x in rewards] for rewards in ([1.0, 0.0], [1.0])]
    args = make_args(grpo_process, max_new_tokens=5)
    advantages = grpo_process.token_advantages(args, steps, [[1, 3], [2]])
    up, down = (1 / 3) / (math.sqrt(1 / 3) + 1e-4), (-2 / 3) / (math.sqrt(1 / 3) + 1e-4)
    expected = [[up + down, up + down, down, down, 0.0], [up, up, up, 0.0, 0.0]]
    for row, mine in zip(advantages.tolist(), expected, strict=True):
        assert row == pytest.approx(mine, abs=1e-6)


@pytest.mark.parametrize("other", ["<think>7+8=15,4+3+1=8</think>", "<think></think>", ""])
def test_a_group_of_right_responses_learns_nothing_from_how_many_steps_they_have(other):
    """Steps and outcome have the same scale, so the number of steps doesn't matter."""
    perfect = "<think>7+8=15,4+3+1=8</think><answer>85</answer>"
    texts = [perfect] * 7 + [f"{other}<answer>85</answer>"]
    steps = grpo_process.step_rewards(texts, ["85"] * 8)
    last_tokens = [list(range(len(response_steps))) for response_steps in steps]
    args = make_args(grpo_process, max_new_tokens=5)
    assert (grpo_process.token_advantages(args, steps, last_tokens) == 0).all()
