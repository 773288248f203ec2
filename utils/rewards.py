"""Rewards for answers that are one number. Standard library only.

Every reward function takes `completions` and `answers` (gold), two lists of N strings, and returns
N floats; lists of different lengths raise ValueError, no text does. Numbers are compared exactly,
as fractions. `apply_reward` calls one for the examples of a batch.

Which number counts. The last one of the answer block (`accuracy_reward`) or of the whole completion
(`lenient_accuracy_reward`). The answer block exists only if there is exactly one <answer> and,
after it, exactly one </answer>: were the first or the last of several blocks taken, a policy could
guess repeatedly and be paid for one. A thought may speak of the tags: if an <answer> follows the
last </think>, what is before it is not looked at.

What a number is. Parsers that take float() of the first run of digits read "1,450" as 1 or 450,
"-7" as 7, reject "$18" and "12.50", and accept "nan" and Arabic digits. Here a number is made of
ASCII digits, and

- commas separate thousands where they stand in groups of three (1,450 and LaTeX's 1{,}450),
  otherwise they separate numbers: the last one of "1,2,3" is 3, of "1,23" is 23, of "1234,567" is
  567;
- a minus (-, or U+2212, or an en dash) belongs to the number if it touches it, or its currency
  sign, and follows no letter, digit, %, closing bracket or other dash: "-7", "-$7", "$-7", "3 -7"
  are -7; "10-7", "x-7", "- 7" are 7;
- a point needs a digit after it ("18." is 18), and ".5" is 0.5 unless a letter, digit or point is
  before it ("so...5");
- "1 450" is 1450: one space, of any width, separates thousands where every group has three digits;
- "3/4" (no spaces), LaTeX's \\frac{3}{4} and "1e3" are read as fractions and as 1000, "3 1/2" as a
  mixed number: a whole one, a space and a fraction less than 1. A zero
  denominator, an exponent beyond +-100, and a number of more than 100 characters are unreadable:
  the verdict is "no number", never an earlier number of the text;
- what stands around it is ignored: $, €, £, +, %, units (also m2 and cm^3), a final period,
  markdown, \\boxed{}. Hence 75% is 75. So is the rest of mathematics: the number of 2\\sqrt{3} is
  3, that of 1\\frac{3}{4} is 4. Such answers need another reward.

Cost. A completion is text from a policy that is paid to find odd inputs, so nothing here may be
slower than linear: tags are found by str.find and str.count, and the regex only ever sees the 200
characters that end in the last digit.
"""

import inspect
import re
import sys
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MAX_CHARS = 100  # of one number; also keeps int() far below Python's limit of 4300 digits
MAX_EXPONENT = 100
LARGEST = 1e18  # of a reward: the sum of its squares has to fit into a float of 32 bits

SPACES = " \u00a0\u2009\u202f"  # also those that do not break a line, and thin ones
UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
)
SPACED = rf"[0-9]{{1,3}}(?:[{SPACES}][0-9]{{3}})+(?![0-9,])(?:\.[0-9]+)?"
NUMBER = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z%)\]}\u2212\u2013-])[\u2212\u2013-])?(?:\\?[$€£])?"
    r"(?:(?<![0-9.,/])(?P<whole>[0-9]+) (?=[1-9][0-9]*/[0-9]+(?![0-9.,/])))?"
    rf"(?P<number>{SPACED}|{UNSIGNED})"
    rf"(?:/(?P<denominator>{UNSIGNED})|[eE](?P<exponent>[+-]?[0-9]+))?"
)
UNITS = re.compile(r"(?<![0-9A-Za-z])([0-9.,]*)( ?(?:[kdcm]?m|ft|in|yd)\^?[23])(?![0-9A-Za-z])")


def find_numbers(text: str) -> list[re.Match]:
    """Matches of NUMBER, in units and LaTeX's signs that are written without their digits."""
    text = text.replace("{,}", ",")
    text = re.sub(r"(?<![0-9])\\[dt]?frac\{([0-9]+)\}\{([0-9]+)(?:\}|$)", r"\1/\2", text)
    return list(NUMBER.finditer(UNITS.sub(r"\1", text)))


def parse_number(text: str) -> Fraction | None:
    """The last number of `text` by the rules above, exact; None without one, or if unreadable."""
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    # Twice the longest number: of a longer one is left what is still too long to be read.
    matches = find_numbers(text[max(0, end - 2 * MAX_CHARS) : end])
    if not matches:
        return None
    match = matches[-1]
    exponent = match["exponent"] or "0"
    if len(match[0]) > MAX_CHARS or abs(int(exponent)) > MAX_EXPONENT:
        return None
    number, denominator = [
        Fraction(re.sub(f"[,{SPACES}]", "", part or "1"))
        for part in (match["number"], match["denominator"])
    ]
    if denominator == 0:
        return None
    value = number / denominator * Fraction(10) ** int(exponent)
    if match["whole"] and value < 1:
        value += int(match["whole"])
    return -value if match["minus"] else value


def gold_number(answer: str) -> Fraction | None:
    """The number of a gold answer: after the last "####" if there is one (GSM8K), else the last."""
    return parse_number(answer.rsplit("####", 1)[-1])


def answer_block(completion: str) -> str:
    """The text of the only answer block, "" if there is not exactly one."""
    conclusion = completion.rpartition("</think>")[2]
    text = conclusion if "<answer>" in conclusion else completion
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return ""
    return text[text.find("<answer>") + len("<answer>") : text.find("</answer>")]


def matches_gold(text: str, answer: str) -> float:
    """1.0 if the last number of `text` is the gold number, else 0.0; without one nothing matches."""
    gold = gold_number(answer)
    return float(gold is not None and parse_number(text) == gold)


def accuracy_reward(completions: list[str], answers: list[str]) -> list[float]:
    """Strict: 1.0 if the last number of the answer block is the gold number, else 0.0."""
    return [
        matches_gold(answer_block(text), answer)
        for text, answer in zip(completions, answers, strict=True)
    ]


def lenient_accuracy_reward(completions: list[str], answers: list[str]) -> list[float]:
    """1.0 if the last number anywhere in the completion is the gold number, else 0.0."""
    return [matches_gold(text, answer) for text, answer in zip(completions, answers, strict=True)]


def format_reward(completions: list[str], answers: list[str]) -> list[float]:
    """0.1 for each of the four TAGS found in order: 0.0, 0.1, 0.2, 0.3 or 0.4.

    Each tag is searched after the one found before it. A missing tag costs its own 0.1 only; a tag
    before its turn is not seen, and a repeated one gives nothing. What the tags enclose, and
    `answers`, play no part.
    """
    rewards = []
    for completion, _ in zip(completions, answers, strict=True):
        position, found = 0, 0
        for tag in TAGS:
            start = completion.find(tag, position)
            if start >= 0:
                position, found = start + len(tag), found + 1
        rewards.append(found / 10)
    return rewards


def apply_reward(reward, examples: list[dict], completions: list[str]) -> list[float]:
    """The numbers that a reward function gives to N completions, N / len(examples) of each example.

    An example has a prompt, an answer and the columns of its row in the data set. The function is
    given, by keyword, whatever it names of prompts, completions, answers and the columns, as lists
    of N; with a **rest, all of them (a reward written for TRL's plain texts runs as it is). If it
    names another, or does not return N finite numbers, the run ends with a line that names it.
    """
    rows = [row for row in examples for _ in range(len(completions) // len(examples))]  # N
    given = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
    given["prompts"] = [row["prompt"] for row in rows]
    given["answers"] = [row["answer"] for row in rows]
    # The tag that a reasoning model's chat template has opened counts as the completion's.
    opened = ["<think>" * prompt.rstrip().endswith("<think>") for prompt in given["prompts"]]
    given["completions"] = [tag + text for tag, text in zip(opened, completions, strict=True)]
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters)
    names = {x.name for x in parameters if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)}
    for x in parameters:
        if x.name in names - set(given) and x.default is x.empty:
            refuse(reward, f"asks for {x.name}, and there are {', '.join(sorted(given))}")
    if not takes_all:
        given = {name: values for name, values in given.items() if name in names}

    values = reward(**given)
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):  # no list, or not of numbers
        numbers = []
    if len(numbers) != len(completions) or not all(abs(x) < LARGEST for x in numbers):
        text = " ".join(repr(values).split())[:200]
        refuse(
            reward,
            f"must return {len(completions)} finite numbers below {LARGEST:g}, one for each "
            f"completion, and returned {text}",
        )
    return numbers


def refuse(reward, why: str) -> None:
    """End the run with one line, status 2 and no traceback."""
    print(f"error: the reward {reward.__name__} {why}", file=sys.stderr)
    sys.exit(2)  # W&B marks a run as failed after sys.exit, but not after raise SystemExit
