"""The number that the rewards read in a text, the tags' rewards, and texts that try to break or stall the scoring."""

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from utils.data import cell_text, describe_answers
from utils.rewards import (
    accuracy_reward,
    apply_reward,
    format_reward,
    gold_number,
    lenient_accuracy_reward,
    parse_number,
)

REWARDS = [accuracy_reward, lenient_accuracy_reward, format_reward]
GSM8K = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "gsm8k"

# (text, the number in it as a fraction's text, or None if it has no number)
NUMBERS = [
    # plain
    ("18", "18"),
    ("0", "0"),
    ("007", "7"),
    ("12.50", "25/2"),
    (".5", "1/2"),
    ("$.50", "1/2"),
    ("0.1", "1/10"),
    ("+5", "5"),
    ("18.", "18"),
    ("18.00.", "18"),
    ("  18\n", "18"),
    # several numbers: the last counts
    ("3 apples and 4 pears make 7", "7"),
    ("48/2 = 24", "24"),
    ("18 out of 20", "20"),
    ("x = 3, y = 4", "4"),
    ("1.5 2.5", "5/2"),
    ("so...5", "5"),
    ("1.2.3", "3"),
    ("No.5", "5"),
    # thousands and lists
    ("1,450", "1450"),
    ("1,450,000.25", "5800001/4"),
    ("-1,450", "-1450"),
    ("1{,}450", "1450"),
    ("1,450, or so", "1450"),
    ("1,23", "23"),
    ("1,2,3", "3"),
    ("1,2345", "2345"),
    ("1234,567", "567"),
    ("1,450,23", "23"),
    ("5, 450", "450"),
    ("0,5", "5"),
    (",450", "450"),
    ("1,,450", "450"),
    # money, per cent, units, markup
    ("$18.00", "18"),
    ("€1,000", "1000"),
    ("£3.20", "16/5"),
    ("\\$18", "18"),
    ("75%", "75"),
    ("18 dollars", "18"),
    ("18kg", "18"),
    ("**18**", "18"),
    ("\\boxed{18}", "18"),
    ("25 m2", "25"),
    ("25m2", "25"),
    ("25 cm^3.", "25"),
    ("m2", None),
    ("H2", "2"),
    # thousands with spaces, mixed numbers
    ("1 000", "1000"),
    ("$1\u202f450.50", "2901/2"),
    ("12 345 678", "12345678"),
    ("1234 567", "567"),
    ("1 00", "0"),
    ("10 000/4", "2500"),
    ("1/2 300", "300"),
    ("3 1/2", "7/2"),
    ("-3 1/2 m2", "-7/2"),
    ("7 3/2", "3/2"),
    ("1.5 1/2", "1/2"),
    ("3,5", "5"),
    # LaTeX's fractions
    ("\\frac{3}{4}", "3/4"),
    ("\\boxed{\\frac{3}{4}}.", "3/4"),
    ("$x = -\\dfrac{22}{7}$ pies", "-22/7"),
    ("\\tfrac{1}{0}", None),
    ("\\frac{1}{2} of 10 is 5", "5"),
    ("1\\frac{3}{4}", "4"),
    ("2\\sqrt{3}", "3"),
    ("#### 18", "18"),
    ("(18)", "18"),
    # minus sign or dash
    ("-7", "-7"),
    ("- 7", "7"),
    ("\u22127", "-7"),
    ("\u20137", "-7"),
    ("\u20147", "7"),
    ("-$5", "-5"),
    ("-€5", "-5"),
    ("£-5", "-5"),
    ("$-5", "-5"),
    ("-\\$5", "-5"),
    ("-.5", "-1/2"),
    ("x = -7", "-7"),
    ("x=-7", "-7"),
    ("(-7)", "-7"),
    ("__-7__", "-7"),
    ("\\boxed{-7}", "-7"),
    ("3*-7", "-7"),
    ("10-7", "7"),
    ("3 - 7", "7"),
    ("3 -7", "-7"),
    ("3 - -7", "-7"),
    ("5\u20137 days", "7"),
    ("5\u22127", "7"),
    ("$10-$7", "7"),
    ("10%-7%", "7"),
    ("(3)-7", "7"),
    ("x-7", "7"),
    ("--7", "7"),
    ("-3/4", "-3/4"),
    ("-0", "0"),
    # fractions
    ("3/4", "3/4"),
    ("$3/4", "3/4"),
    ("1,000/4", "250"),
    ("0.5/2", "1/4"),
    ("0/3", "0"),
    ("3 / 4", "4"),
    ("3/x", "3"),
    ("12/25/2023", "2023"),
    ("3/0", None),
    ("5 and 3/0.0", None),
    # exponents
    ("1e3", "1000"),
    ("2.5E-1", "1/4"),
    ("1e+2", "100"),
    ("-2e0", "-2"),
    ("1e100", str(10**100)),
    ("1e101", None),
    ("1e999", None),
    ("18 or 1e-999999999999", None),
    ("0e999", None),
    ("1e", "1"),
    ("e5", "5"),
    # not numbers
    ("", None),
    ("eighteen", None),
    ("nan", None),
    ("inf", None),
    ("-Infinity", None),
    ("-", None),
    ("$", None),
    ("1" * 100, "1" * 100),
    ("1" * 101, None),
    ("7 " + "0" * 5000, None),
    ("\u0661\u0668", None),  # Arabic-Indic 18
    ("\u0967\u096e", None),  # Devanagari 18
    ("\uff11\uff18", None),  # full-width 18
    ("\u00b9\u2078", None),  # superscript 18
    ("\u2460 \u2167 \u00bd", None),  # circled 1, Roman 8, one half
    ("18 m\u00b2", "18"),
    ("18\x00", "18"),
    ("\ud83d 18 \udc00", "18"),
]


@pytest.mark.parametrize(("text", "expected"), NUMBERS)
def test_parse_number(text, expected):
    assert parse_number(text) == (None if expected is None else Fraction(expected))


# (completion, gold answer, strict reward, lenient reward, format reward)
COMPLETIONS = [
    ("<think>9 * 2</think><answer>18</answer>", "18", 1.0, 1.0, 0.4),
    ("<think>\n9\n* 2\n</think>\n\n<answer>\n18\n</answer>\n", "18", 1.0, 1.0, 0.4),
    ("<think>9 * 2</think><answer>19</answer>", "18", 0.0, 0.0, 0.4),
    ("<answer>18</answer>", "18", 1.0, 1.0, 0.2),
    ("<answer>it is $18.00.</answer> I checked 3 times", "18", 1.0, 0.0, 0.2),
    ("<answer>17 or 18</answer>", "18", 1.0, 1.0, 0.2),
    ("<answer>18 or 17</answer>", "18", 0.0, 0.0, 0.2),
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
    ("<answer>nan</answer>", "nan", 0.0, 0.0, 0.2),
]


@pytest.mark.parametrize(("completion", "answer", "strict", "lenient", "tags"), COMPLETIONS)
def test_rewards_of_a_completion(completion, answer, strict, lenient, tags):
    assert accuracy_reward([completion], [answer]) == [strict]
    assert lenient_accuracy_reward([completion], [answer]) == [lenient]
    assert format_reward([completion], [answer]) == [tags]


@pytest.mark.parametrize("reward", REWARDS)
def test_a_list_is_scored_item_by_item_in_order(reward):
    completions, answers = [row[0] for row in COMPLETIONS], [row[1] for row in COMPLETIONS]
    assert reward(completions, answers) == [
        reward([c], [a])[0] for c, a in zip(completions, answers, strict=True)
    ]
    assert reward([], []) == []


@pytest.mark.parametrize("reward", REWARDS)
def test_lists_of_different_lengths_are_an_error(reward):
    """Without an error, zip would drop the tail, and completions would get the wrong rewards."""
    with pytest.raises(ValueError):
        reward(["18", "18"], ["18"])


# ---- scoring a batch


def examples(*prompts, answer="18"):
    return [
        {"prompt": x, "answer": answer, "columns": {"question": x, "level": 3}} for x in prompts
    ]


def test_a_reward_is_given_what_it_names():
    """A reward gets its arguments by keyword, like in TRL. A reward with only two lists also works."""
    seen = {}

    def trl_style(completions, level, **rest):
        seen.update(rest)
        return [len(text) + x for text, x in zip(completions, level, strict=True)]

    rows = examples("a", "b")
    assert apply_reward(trl_style, rows, ["x", "xx", "", "xxx"]) == [4, 5, 3, 6]
    assert seen == {"prompts": ["a", "a", "b", "b"], "answers": ["18"] * 4, "question": [*"aabb"]}
    assert apply_reward(lambda completions, answers: [True, 0], rows, ["", ""]) == [1.0, 0.0]
    assert apply_reward(accuracy_reward, rows, ["<answer>18</answer>", ""]) == [1.0, 0.0]


def test_a_tag_that_the_prompt_has_opened_counts():
    """Reasoning models' templates end in <think>, so the completion needs only the closing tag.

    A second <think> earns no more. For the other prompt the opening tag is missing.
    """
    rows = examples("q<think>\n", "q")
    text = "so 18</think><answer>18</answer>"
    assert apply_reward(format_reward, rows, [text, text]) == [0.4, 0.3]
    assert apply_reward(format_reward, rows[:1], ["<think>" + text]) == [0.4]


BAD_VALUES = [
    [1.0],
    [1.0] * 4,
    1.0,
    None,
    [[1.0], [1.0]],
    ["a", "b"],
    [1.0, None],
    [1.0, float("nan")],
    # Its square is inf in 32 bits.
    [1.0, 1e19],
    [1.0, 10**400],
    # This tensor prints as several lines.
    torch.tensor([[[1.0, 2.0], [3.0, 4.0]]] * 3),
]


@pytest.mark.parametrize("values", BAD_VALUES)
def test_a_reward_that_does_not_give_a_number_each_is_named(values, capsys):
    def strange(completions, answers):
        return values

    with pytest.raises(SystemExit) as stop:
        apply_reward(strange, examples("a", "b"), ["", ""])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: the reward strange must return 2 ")
    assert error.count("\n") == 1


def test_a_reward_that_asks_for_a_column_that_is_not_there(capsys):
    def strange(completions, tests, difficulty=1, **rest):
        return [0.0 for _ in completions]

    with pytest.raises(SystemExit) as stop:
        apply_reward(strange, examples("a", "b"), ["", ""])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith("error: the reward strange asks for tests; it can have answers, ")


def test_a_fault_in_a_reward_keeps_its_traceback():
    def faulty(completions, answers):
        return [float(text) for text in completions]

    with pytest.raises(ValueError, match="could not convert"):
        apply_reward(faulty, examples("a"), ["x"])


CELLS = [("18", "18"), (18, "18"), (10**18 + 1, "1000000000000000001"), (0.5, "0.5"), (85.0, "85")]
# A file stored the second number in 32 bits. The third number has lost digits.
CELLS += [(0.1, "0.1"), (0.10000000149011612, ""), (1.2345678901234568e17, "")]
CELLS += [(None, ""), (True, ""), (["18"], ""), ({"a": 1}, ""), (b"18", "")]


@pytest.mark.parametrize("cell, text", CELLS)
def test_a_cell_is_the_text_that_was_written_or_none(cell, text):
    assert cell_text(cell) == text


def test_how_gold_answers_are_read_is_described():
    text = describe_answers(["#### 3 1/2", "18 (p. 4)", "3,5", "7"])
    read = "'#### 3 1/2' is 7/2, '18 (p. 4)' is 4, '3,5' is 5"
    assert text == f"gold answers: {read}; 2 answers contain several numbers; the last is used"


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


@settings(max_examples=500, deadline=None)
@given(SOUP, SOUP)
def test_any_text_gets_an_allowed_reward(completion, answer):
    for reward in (accuracy_reward, lenient_accuracy_reward):
        assert reward([completion], [answer])[0] in (0.0, 1.0)
    assert format_reward([completion], [answer])[0] in (0.0, 0.1, 0.2, 0.3, 0.4)


@settings(max_examples=200, deadline=None)
@given(SOUP, SOUP)
@example("a1", "000")
def test_only_the_last_number_is_read(before, text):
    """Lines before a text with a number don't change the result.

    The test uses a new line: a space could join two numbers to one with a thousands separator.
    """
    if any(digit in text for digit in "0123456789"):
        assert parse_number(before * 20 + "\n" + text) == parse_number(text)


@settings(max_examples=200, deadline=None)
@given(SOUP, st.text(st.characters(exclude_characters="0123456789,{}"), max_size=300))
def test_text_without_digits_after_the_number_is_ignored(text, after):
    assert parse_number(text + after) == parse_number(text)


@st.composite
def written_numbers(draw):
    """A decimal, and one of its spellings."""
    units = draw(st.integers(-(10**12), 10**12))
    places = draw(st.integers(0, 4))
    value = Decimal(units).scaleb(-places)
    size = abs(value)
    text = f"{size:,f}" if draw(st.booleans()) else f"{size:f}"
    if "." in text:
        text += "0" * draw(st.integers(0, 3))
        if text.startswith("0.") and draw(st.booleans()):
            text = text[1:]
    else:
        text = (
            draw(st.sampled_from(["", "0", "00"])) * ("," not in text)
            + text
            + draw(st.sampled_from(["", ".", ".00"]))
        )
    minus = (
        draw(st.sampled_from(["-", "\u2212"])) if value < 0 else draw(st.sampled_from(["", "+"]))
    )
    money = draw(st.sampled_from([(minus, ""), (minus, "$"), ("$" + minus, "")]))
    text = money[0] + money[1] + text
    before = draw(
        st.sampled_from(
            ["", " ", "= ", "=", "It is ", "from 3 to ", "**", "\\boxed{", "1,000, ", "2 - "]
        )
    )
    after = draw(
        st.sampled_from(["", " ", ".", " dollars", "%", "**.", "}", "\n", ", I think", "-ish"])
    )
    return Fraction(value), before + text + after


@settings(max_examples=500, deadline=None)
@given(written_numbers(), st.integers(-(10**6), 10**6).filter(bool))
def test_a_number_survives_every_way_of_writing_it(written, error):
    value, text = written
    completion = f"<think>12 - 5 = 7</think><answer>{text}</answer>"
    # The gold answer is the plain decimal of the same number, computed without the code under test.
    right = f"#### {Decimal(value.numerator) / Decimal(value.denominator):f}"
    for gold in (right, right.removeprefix("#### ")):
        assert accuracy_reward([completion], [gold]) == [1.0]
        assert lenient_accuracy_reward([completion], [gold]) == [1.0]
    near_miss = value + Fraction(error, 10**4)
    wrong = f"#### {Decimal(near_miss.numerator) / Decimal(near_miss.denominator):f}"
    assert accuracy_reward([completion], [wrong]) == [0.0]
    assert lenient_accuracy_reward([completion], [wrong]) == [0.0]


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
    assert lenient_accuracy_reward([text + " 5"], ["5"]) == [1.0]
    assert lenient_accuracy_reward(["5"], [text]) == [0.0]
    assert format_reward([text], ["5"])[0] in (0.0, 0.1, 0.2)


@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_gsm8k(split, size):
    path = GSM8K / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    golds = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(golds) == size
    written = [gold.split("####")[1].strip() for gold in golds]
    values = [int(text.replace(",", "")) for text in written]
    assert [gold_number(gold) for gold in golds] == values
    assert gold_number(golds[0].split("####")[0] + "####") is None

    def completions(numbers):
        return [f"<think>so 2 * 3 = 6</think>\n<answer>{number}</answer>" for number in numbers]

    assert accuracy_reward(completions(written), golds) == [1.0] * size
    assert accuracy_reward(completions(f"${value:,}.00" for value in values), golds) == [1.0] * size
    assert accuracy_reward(completions(value + 1 for value in values), golds) == [0.0] * size
    # The data set's solutions end with the answer and have no tags.
    assert lenient_accuracy_reward(golds, golds) == [1.0] * size
    assert accuracy_reward(golds, golds) == [0.0] * size
