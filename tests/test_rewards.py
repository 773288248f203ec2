"""utils/rewards.py: the number read in a text, the tags, hostile texts; and how main calls rewards (apply_rewards)."""

import json
import re
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import DATA, read_table
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from utils.math_reward import is_right, last_boxed
from utils.rewards import (
    accuracy_reward,
    format_reward,
    gold_number,
    last_number,
    lenient_accuracy_reward,
    parse_number,
)

REWARDS = [accuracy_reward, lenient_accuracy_reward, format_reward]


ANSWERS = read_table("answers.txt")


def test_an_answer_is_read_as_a_person_reads_it():
    """Right, or not at all: "-" is no number, and "?" marks a number that is left unread."""
    for heading, label, text in ANSWERS:
        is_unread = label == "-" or label.startswith("?")
        expected = None if is_unread else Fraction(label)
        assert parse_number(text) == expected, (heading, text)


# Texts that a table can't show: (text, its number as a fraction's text, or None)
STRANGE = [
    ("", None),
    ("  18\n", "18"),
    ("18\n\n", "18"),
    ("17\n18", None),
    ("1\u00a0450", "1450"),
    ("1\u2009450", "1450"),
    ("1\u202f450.50", "2901/2"),
    ("1\u00a00450", None),
    ("3\u00a01/2", "7/2"),
    ("1" * 100, "1" * 100),
    ("1" * 101, None),
    ("18 " + "x" * 1000, None),
    ("1e100", str(10**100)),
    ("1e101", None),
    ("10^" + "9" * 50, None),
    ("18 or 1e-999999999999", None),
    ("\u0661\u0668", None),  # Arabic-Indic 18
    ("18 \u0661\u0668", None),
    ("\u0967\u096e", None),  # Devanagari 18
    ("\u2460 \u2167 \u00bd", None),  # circled 1, Roman 8, one half
    ("18 \u00bd", None),
    ("0.3\u0305", None),  # an overline on the last 3
    ("18\x00", None),
    ("18\u200b", None),
    ("\ud83d 18 \udc00", "18"),
]


def test_strange_texts():
    for text, expected in STRANGE:
        assert parse_number(text) == (None if expected is None else Fraction(expected)), text


# A formula's dollar or a quote behind the number doesn't hide what changes it.
MARKED = ["$1$ million", "1$ million", "`1` million", '"1" thousand', "$3$ x", "$3$ and a half"]


def test_a_mark_behind_a_number_hides_no_multiplier():
    for text in MARKED:
        assert parse_number(text) is None and last_number(text) is None, text


# The last number of a whole completion: (text, its number or None)
LAST = [
    ("48/2 = 24 clips in May, and 48+24 = <<48+24=72>>72 altogether", "72"),
    ("3 apples and 4 pears make 7.", "7"),
    ("He earns 5 * $20 = $100 in 5 weeks, that is 20 a week", "20"),
    ("He earns $100 in 5 weeks", "5"),
    ("<Answer>18</Answer>", "18"),
    ("#### 18", "18"),
    ("12\n#### 18", "18"),
    ("12\n- 18 apples", "-18"),
    ("17 or 18", None),
    ("from 17 to 18", None),
    ("17, 18", None),
    ("$17$ or $18$", None),
    ("the answer in $: 18", "18"),
    ("(17, 18)", None),
    ("3:4", None),
    ("3 1/2", "7/2"),
    ("1 450", None),
    ("1 million", None),
    ("3 and a half", None),
    ("7 - 18", None),
    ("x = 3, y = 4", "4"),
]


def test_the_last_number_of_a_completion():
    for text, expected in LAST:
        assert last_number(text) == (None if expected is None else Fraction(expected)), text


# (completion, gold answer, strict reward, lenient reward, format reward)
COMPLETIONS = [
    ("<think>9 * 2</think><answer>18</answer>", "18", 1.0, 1.0, 0.4),
    ("<think>\n9\n* 2\n</think>\n\n<answer>\n18\n</answer>\n", "18", 1.0, 1.0, 0.4),
    ("<think>9 * 2</think><answer>19</answer>", "18", 0.0, 0.0, 0.4),
    ("<answer>18</answer>", "18", 1.0, 1.0, 0.2),
    ("<answer>it is $18.00.</answer> I checked 3 times", "18", 1.0, 0.0, 0.2),
    # Two numbers in a block are two guesses.
    ("<answer>17 or 18</answer>", "18", 0.0, 0.0, 0.2),
    ("<answer>17. No, it is 18</answer>", "18", 0.0, 1.0, 0.2),
    ("<answer>9 * 2 = 18</answer>", "18", 1.0, 1.0, 0.2),
    ("<answer>17\n#### 18</answer>", "18", 1.0, 1.0, 0.2),
    ("18", "18", 0.0, 1.0, 0.0),
    ("<answer>18", "18", 0.0, 1.0, 0.1),
    ("18</answer>", "18", 0.0, 1.0, 0.1),
    ("18</answer><answer>", "18", 0.0, 1.0, 0.1),
    ("</answer>18<answer>", "18", 0.0, 1.0, 0.1),
    ("<answer></answer>18", "18", 0.0, 1.0, 0.2),
    # Several blocks are several guesses, so the strict reward is 0.
    ("<answer>17</answer><answer>18</answer>", "18", 0.0, 1.0, 0.2),
    ("<answer>18</answer><answer>17</answer>", "18", 0.0, 0.0, 0.2),
    ("<answer>18</answer><answer>18</answer>", "18", 0.0, 1.0, 0.2),
    ("<answer><answer>18</answer></answer>", "18", 0.0, 1.0, 0.2),
    ("<answer>18</answer></answer>", "18", 0.0, 1.0, 0.2),
    # A thought may mention the tags. The answer starts after the last </think>.
    ("<think>in <answer> tags</think><answer>18</answer>", "18", 1.0, 1.0, 0.4),
    ("<think><answer>17</answer></think><answer>18</answer>", "18", 1.0, 1.0, 0.4),
    ("<answer>18</answer></think><answer>17</answer>", "18", 0.0, 0.0, 0.3),
    ("</think><answer>17</answer><answer>18</answer>", "18", 0.0, 1.0, 0.3),
    # Tags count only in their exact spelling.
    ("<ANSWER>18</ANSWER>", "18", 0.0, 1.0, 0.0),
    ("<answer >18</answer >", "18", 0.0, 1.0, 0.0),
    ("<think><answer>18</answer></think>", "18", 1.0, 1.0, 0.2),
    ("</think><answer>18</answer>", "18", 1.0, 1.0, 0.3),
    ("<think><think><think><think>", "18", 0.0, 0.0, 0.1),
    ("<think></think><think></think>", "18", 0.0, 0.0, 0.2),
    ("</answer><answer></think><think>", "18", 0.0, 0.0, 0.1),
    ("<think></think><answer></answer>", "18", 0.0, 0.0, 0.4),
    ("", "18", 0.0, 0.0, 0.0),
    # The comparison is exact, and a gold answer may have either form.
    ("<answer>0.3</answer>", "0.30", 1.0, 1.0, 0.2),
    ("<answer>0.30000000000000004</answer>", "0.3", 0.0, 0.0, 0.2),
    ("<answer>9007199254740993</answer>", "9007199254740992", 0.0, 0.0, 0.2),
    ("<answer>$1,450</answer>", "5 * 290 = 1450\n#### 1,450", 1.0, 1.0, 0.2),
    ("<answer>450</answer>", "#### 1,450", 0.0, 0.0, 0.2),
    ("<answer>7</answer>", "#### -7", 0.0, 0.0, 0.2),
    ("<answer>-7</answer>", "#### -7", 1.0, 1.0, 0.2),
    # A gold answer without a number never matches, not even a text without a number.
    ("<answer>none</answer>", "none", 0.0, 0.0, 0.2),
    ("<answer>1e999</answer>", "1e999", 0.0, 0.0, 0.2),
    ("<answer>18</answer>", "18 ####", 0.0, 0.0, 0.2),
    ("<answer>4</answer>", "12 (3 boxes of 4)", 0.0, 0.0, 0.2),
    ("<answer>(7, 4)</answer>", "(3, 4)", 0.0, 0.0, 0.2),
    ("<answer>nan</answer>", "nan", 0.0, 0.0, 0.2),
]


def test_rewards_of_completions():
    completions, answers, strict, lenient, tags = zip(*COMPLETIONS, strict=True)
    assert accuracy_reward(completions, answers) == list(strict)
    assert lenient_accuracy_reward(completions, answers) == list(lenient)
    assert format_reward(completions, answers) == list(tags)


@pytest.mark.parametrize("reward", REWARDS)
def test_lists_of_different_lengths_are_an_error(reward):
    """Without an error, zip would drop the tail, and completions would get the wrong rewards."""
    with pytest.raises(ValueError):
        reward(["18", "18"], ["18"])
    assert reward([], []) == []


# ---- scoring a batch


@pytest.fixture
def score():
    """The scores that grpo.apply_rewards gets from this reward function, two responses to each prompt."""

    def call(reward, completions, *prompts):
        columns = [{"question": x, "answer": "18", "level": 3} for x in prompts]
        rows = [
            {"prompt": x, "columns": c, "answer": "18"}
            for x, c in zip(prompts, columns, strict=True)
        ]
        task = SimpleNamespace(REWARDS=[reward])
        return grpo.apply_rewards(task, completions, rows, "cpu")[reward.__name__].tolist()

    return call


def test_a_reward_gets_all_columns_as_trl_passes_them(score):
    seen = {}

    def trl_style(completions, level, **rest):
        seen.update(rest)
        return [len(text) + x for text, x in zip(completions, level, strict=True)]

    assert score(trl_style, ["x", "xx", "", "xxx"], "a", "b") == [4.0, 5.0, 3.0, 6.0]
    assert seen == {"answer": ["18"] * 4, "question": [*"aabb"]}
    assert score(accuracy_reward, ["<answer>18</answer>", ""], "a", "b") == [1.0, 0.0]


def test_a_tag_that_the_prompt_has_opened_counts(score):
    """Reasoning models' templates end in <think>, so the completion needs only the closing tag.

    A second <think> earns no more. For the other prompt the opening tag is missing.
    """
    text = "so 18</think><answer>18</answer>"
    opened, missing = torch.tensor([0.4, 0.3]).tolist()  # in float32
    assert score(format_reward, [text, text], "q<think>\n", "q") == [opened, missing]
    assert score(format_reward, ["<think>" + text], "q<think>\n") == [opened]


# tests/test_errors.py has the values that are refused.
GOOD_VALUES = [
    [1, 0],
    [True, False],
    iter([1.0, 0.0]),
    np.array([1, 0], dtype=np.int8),
    torch.tensor([1.0, 0.0]),
    [torch.tensor(1.0), torch.tensor(0)],
    [Fraction(1), Decimal(0)],
]


def test_numbers_of_any_kind_are_floats(score):
    for values in GOOD_VALUES:

        def reward(completions, values=values, **columns):
            return values

        assert score(reward, ["", ""], "a", "b") == [1.0, 0.0]


# For math_reward: a formula that is the answer in spite of the text beside it, or isn't the answer.
BESIDE = ["The answer is $5$.", "x = $5$ cm", "**$5$**", "so y is $5$ (in simplest form)."]
CHANGED = ["-$5$", "minus $5$", "negative $5$", "half of $5$", "not $5$", "x > $5$", "±$5$"]
CHANGED += ["$5$ million", "$5$!", "$5$π", "$5$ x", "$5$ and a half", "$5$/x"]


def test_the_text_beside_the_only_formula():
    """It is dropped, unless it may change the formula, which alone would then pay a wrong answer: -$5$ isn't 5."""
    for text in BESIDE + CHANGED:
        for formula in ("5", r"2\sqrt{3}"):
            found = last_boxed(text.replace("5", formula))
            assert (found == formula) == (text in BESIDE), text
    assert is_right(("-5", last_boxed("-$5$"))) and is_right((last_boxed("-$5$"), "-5"))


# Random text from pieces that matter to the parser, mixed with any Unicode characters.
PIECES = st.sampled_from(
    [
        *"0123456789.,-+/$%eE{}()\\ \n",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "####",
        "\u2212",
        "1,450",
        "\u0663",
    ]
)
SOUP = st.lists(st.one_of(PIECES, st.characters()), max_size=60).map("".join)


@settings(max_examples=200, deadline=None)
@given(SOUP, SOUP)
def test_any_text_gets_an_allowed_reward(completion, answer):
    for reward in (accuracy_reward, lenient_accuracy_reward):
        assert reward([completion], [answer])[0] in (0.0, 1.0)
    assert format_reward([completion], [answer])[0] in (0.0, 0.1, 0.2, 0.3, 0.4)


@settings(max_examples=100, deadline=None)
@given(SOUP, SOUP)
def test_lines_before_the_last_number_do_not_change_it(before, text):
    if any(digit in text for digit in "0123456789"):
        assert last_number(before * 20 + "\n" + text) == last_number(text)


# How people and models write a decimal number, "#". It is read in all of these texts.
READ = ["#", "$#", "$#$", r"\boxed{#}.", "**#**", "x = #", "3 + 4 = #", "The answer is # apples."]
READ += [r"#\text{ cm}^2", "# m/s^2", r"#\%"]
# In these texts the number is another one, or none, so it isn't read.
UNREAD = ["#:30", "30:#", "(#, 4)", "(4, #)", "17 or #", "# or 17", "17-#", "17 - #", "x > #", "±#"]
UNREAD += ["1012 (3 boxes of #)", r"#\pi", r"# \sqrt{x}", r"\sqrt{#}", "#!", "# million"]
UNREAD += ["#k", "#x", "# + x", "#^2", "#_7", "#¾", "# and a half", "#..."]
NUMBERS = ["0", "7", "-7", "18", "1450", "-1234567", "0.5", "-0.25", "3/4", "7/2", "-22/7", "12.34"]


def as_decimal(value):
    """The decimal number, or None if it has no end."""
    digits = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{digits:f}" if Fraction(digits) == value else None


def notations(value):
    """Texts in which this number is read, and texts in which it isn't."""
    read, unread = [], []
    sign, (whole, rest) = "-" * (value < 0), divmod(abs(value), 1)
    text = as_decimal(value)
    if text is not None:
        read += [template.replace("#", text) for template in READ]
        unread += [template.replace("#", text) for template in UNREAD]
        read.append(text + ("0" if "." in text else ".00"))
        read += [text.replace("-", minus) for minus in ("\u2212", "- ", "minus ", "-$ ")]
        thousandfold = as_decimal(1000 * value)
        read += [f"{thousandfold}{power}" for power in ("e-3", " x 10^-3", r" \times 10^{-3}")]
    if value.denominator == 1:
        grouped = f"{value.numerator:,}"
        separators = (",", "{,}", ",\\!", ",\\! ", "\\,", "\u00a0")
        read += [grouped.replace(",", separator) for separator in separators]
        unread += [grouped.replace(",", separator) for separator in " '" if "," in grouped]
        unread.append(f"{3 * value.numerator}/3")  # a division, not a number
    else:
        forms = [
            "%d/%d",
            "%d / %d",
            r"\frac{%d}{%d}",
            r"\dfrac{ %d }{ %d }",
            r"\boxed{\frac{%d}{%d}}",
        ]
        read += [form % (value.numerator, value.denominator) for form in forms]
        unread.append(f"{value.numerator} over {value.denominator}")
        if abs(value.numerator) < 10 and value.denominator < 10:
            read.append(rf"{sign}\frac{abs(value.numerator)}{value.denominator}")
    if whole and rest:
        parts = whole, rest.numerator, rest.denominator
        forms = ["%d %d/%d", r"%d\frac{%d}{%d}", r"%d \dfrac{%d}{%d} hours"]
        read += [sign + form % parts for form in forms]
        unread.append(f"{sign}{whole} and {rest}")
    return read, unread


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_paid_in_every_notation_that_is_read(number):
    read, unread = notations(Fraction(number))
    assert [text for text in read if gold_number(text) != Fraction(number)] == []
    assert [text for text in unread if parse_number(text) is not None] == []
    for text in read:
        strict = accuracy_reward([f"<answer>{text}</answer>"] * len(read), read)
        lenient = lenient_accuracy_reward([f"9 * 2 is\n{text}"] * len(read), read)
        assert set(strict) == set(lenient) == {1.0}, text


N = 1_000_000
HOSTILE = {
    "digits": "1" * N,
    "zeros after a point": "0." + "0" * N,
    "zeros in an exponent": "1e" + "0" * N,
    "zeros in a denominator": "1/" + "0" * N,
    "thousands": "1" + ",000" * (N // 4),
    "LaTeX thousands": "1" + "{,}000" * (N // 6),
    "commas": "," * N,
    "list": "1," * (N // 2),
    "fractions": "1/" * (N // 2),
    "points": "1." * (N // 2),
    "exponents": "1e" * (N // 2),
    "minus": "-" * N,
    "differences": "1-" * (N // 2),
    "dollars": "$" * N,
    "spaced digits": "1 " * (N // 2),
    "Arabic digits": "\u0661" * N,
    "emoji": "\U0001f600" * N,
    "number, then nothing": "1" + "x" * N,
    "opening tags": "<answer>" * (N // 8),
    "closing tags": "</answer>" * (N // 9),
    "think tags": "<think>" * (N // 7),
    "blocks": "<answer>1</answer>" * (N // 18),
    "nested blocks": "<answer>" * (N // 17) + "</answer>" * (N // 17),
    "almost tags": "<answer" * (N // 7),
    "brackets": "<" * N,
    "hashes": "#" * N,
    "newlines": "\n" * N,
    "think, no end": "<think>" + "</think" * (N // 7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_million_hostile_characters(name):
    """Code slower than linear time would hang here. Linear code takes milliseconds."""
    text = HOSTILE[name]
    block = f"<answer>{text}</answer>"
    assert accuracy_reward([text, block], ["5", "5"]) == [0.0, 0.0]
    assert lenient_accuracy_reward([text, block], ["5", "5"]) == [0.0, 0.0]
    # The attack must not hide an honest answer after it, and must not pass as a gold answer.
    assert lenient_accuracy_reward([text + "\n5"], ["5"]) == [1.0]
    assert lenient_accuracy_reward(["5"], [text]) == [0.0]
    assert format_reward([text], ["5"])[0] in (0.0, 0.1, 0.2)


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k(split):
    """Answers of GSM8K are read and paid in several notations."""
    lines = (DATA / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    size = len(golds)
    assert any("," in gold.rpartition("####")[2] for gold in golds)
    written = [gold.split("####")[1].strip() for gold in golds]
    values = [int(text.replace(",", "")) for text in written]
    assert [gold_number(gold) for gold in golds] == values
    assert gold_number(golds[0].split("####")[0] + "####") is None

    def completions(numbers):
        return [f"<think>so 2 * 3 = 6</think>\n<answer>{number}</answer>" for number in numbers]

    assert accuracy_reward(completions(written), golds) == [1.0] * size
    assert accuracy_reward(completions(f"${value:,}.00" for value in values), golds) == [1.0] * size
    assert accuracy_reward(completions(value + 1 for value in values), golds) == [0.0] * size
    # The data set's solutions end with the answer and have no tags. They contain calculations.
    assert lenient_accuracy_reward(golds, golds) == [1.0] * size
    plain = [re.sub("<<.*?>>", "", gold) for gold in golds]
    assert lenient_accuracy_reward(plain, golds) == [1.0] * size
    assert accuracy_reward([f"<answer>{gold}</answer>" for gold in golds], golds) == [1.0] * size
    assert accuracy_reward(golds, golds) == [0.0] * size
