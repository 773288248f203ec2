"""grpo_process.py: the steps of a response and their rewards, in hostile texts too, their tokens and advantages."""

import math

import pytest
from conftest import DATA, ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo_process

ADDER = ROOT / "assets" / "addition" / "adder"


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
    answers = ["85"] * len(texts)
    # The hundreds are a digit, too.
    hundreds = "<think>2+2=4,6+7=13,0+0+1=1</think><answer>134</answer>"
    texts[hundreds] = [(12, 1.0), (19, 1.0), (27, 1.0), (len(hundreds), 1.0)]
    found = grpo_process.step_rewards(list(texts), [*answers, "134"])
    for (text, expected), steps in zip(texts.items(), found, strict=True):
        assert [step.end for step in steps] == [end for end, _ in expected], text
        assert [step.reward for step in steps] == [reward for _, reward in expected], text


@pytest.mark.parametrize(
    "text", ["1+" * 50000, "1+1=" * 25000, "<think>" + "9" * 10**5 + "</think>", "1+1=2," * 20000]
)
def test_steps_of_a_hostile_completion(text):
    for whole in (text, f"<think>{text}</think>"):
        (steps,) = grpo_process.step_rewards([whole], ["134"])
        ends = [step.end for step in steps]
        assert ends[-1] == len(whole)
        assert ends[0] >= 0 and ends == sorted(ends)


def byte_tokenizer():
    """A tokenizer with a token for each byte."""
    vocabulary = {c: k for k, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("name", ["adder", "bytes", "smollm2"])
def test_the_token_of_every_character(name):
    """The result must match the offsets that the tokenizer reports when it encodes a text."""
    folders = {"adder": ADDER, "smollm2": DATA / "smollm2_tokenizer"}
    text = "<think>7+8=15,4+3+1=8</think><answer>85</answer>"
    if name != "adder":
        text = "Once upon a time, 7+8=15.\n\nTim said: “Ça va?猫 and🙂!”  Then 4+3+1=8" + text
    tokenizer = (
        byte_tokenizer() if name == "bytes" else AutoTokenizer.from_pretrained(folders[name])
    )
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


def test_the_token_of_steps_that_are_not_in_the_text():
    """A step beyond the text ends with the response. A response of an EOS token alone has one step."""
    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    ids = tokenizer("7+8=15").input_ids
    steps = [grpo_process.Step(end, 0.0) for end in (3, 99, 6)]
    assert grpo_process.step_tokens(tokenizer, ids, steps) == [2, len(ids) - 1, len(ids) - 1]
    steps = [grpo_process.Step(0, 0.0)]
    assert grpo_process.step_tokens(tokenizer, [tokenizer.eos_token_id], steps) == [0]


def test_process_advantages_by_hand():
    """The three rewards are 1, 0 and 1. Their mean is 2/3, and Bessel's std is sqrt((1 + 4 + 1) / 9 / 2)."""
    steps = [[grpo_process.Step(-1, x) for x in rewards] for rewards in ([1.0, 0.0], [1.0])]
    advantages = grpo_process.token_advantages(steps, [[1, 3], [2]], max_new_tokens=5)
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
    advantages = grpo_process.token_advantages(steps, last_tokens, max_new_tokens=5)
    assert (advantages == 0).all()
