"""Rewards for answers that are one number. Standard library only.

Every reward function takes `completions` and gold `answers`, two lists of N strings, and returns N
floats. Lists of different lengths raise ValueError. No text raises an error. Numbers are compared
exactly, as fractions. `apply_reward` calls a reward function for the examples of a batch.

Which number counts. `accuracy_reward` reads the last number of the answer block, and
`lenient_accuracy_reward` the last number of the whole completion. The answer block exists only if
there is exactly one <answer> and, after it, exactly one </answer>. If several blocks were allowed,
a policy could guess repeatedly and be paid for one guess. A thought may mention the tags: if an
<answer> follows the last </think>, the text before that </think> is ignored.

What a number is. Parsers that take float() of the first run of digits read "1,450" as 1 or 450 and
"-7" as 7. They reject "$18" and "12.50", and accept "nan" and Arabic digits. Here a number is made
of ASCII digits, and these rules hold:

- Commas in groups of three separate thousands: 1,450 and LaTeX's 1{,}450. Other commas separate
  numbers: the last number of "1,2,3" is 3, of "1,23" is 23, of "1234,567" is 567.
- A minus is -, U+2212 or an en dash. It belongs to a number if it touches the number or the
  number's currency sign, and follows no letter, digit, %, closing bracket or other dash. So "-7",
  "-$7", "$-7" and "3 -7" are -7. "10-7", "x-7" and "- 7" are 7.
- A point needs a digit after it: "18." is 18. ".5" is 0.5, unless a letter, digit or point is
  before it, as in "so...5", which is 5.
- "1 450" is 1450: one space, of any width, separates thousands where every group has three digits.
- "3/4" (no spaces) and LaTeX's \\frac{3}{4} are fractions, and "1e3" is 1000. "3 1/2" is a mixed
  number: a whole number, a space and a fraction less than 1.
- A number is unreadable if its denominator is zero, its exponent is beyond +-100, or it has more
  than 100 characters. Then the text has no number: an earlier number is never used instead.
- The text around a number is ignored: $, €, £, +, %, units (also m2 and cm^3), a final period,
  markdown, \\boxed{}. So 75% is 75. The rest of mathematics is ignored, too: 2\\sqrt{3} is read as
  3, and 1\\frac{3}{4} as 4. Such answers need another reward.

Cost. The policy that writes a completion is paid to find odd inputs, so all code here is linear in
the length of the text. str.find and str.count find the tags. The regex only sees the 200 characters
that end in the last digit.
"""

import inspect
import re
import sys
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# The longest number. Python's int() refuses more than 4300 digits.
MAX_CHARS = 100
MAX_EXPONENT = 100
# The largest reward. The sum of squared rewards must fit into a 32-bit float.
LARGEST = 1e18

# A plain space, a non-breaking one, a thin one, and a thin non-breaking one.
SPACES = " \u00a0\u2009\u202f"
UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
)
SPACED = rf"[0-9]{{1,3}}(?:[{SPACES}][0-9]{{3}})+(?![0-9,])(?:\.[0-9]+)?"
MINUS = r"(?P<minus>(?<![0-9A-Za-z%)\]}\u2212\u2013-])[\u2212\u2013-])?"
CURRENCY = r"(?:\\?[$€£])?"
# The whole part of a mixed number. A fraction has to follow.
WHOLE = r"(?:(?<![0-9.,/])(?P<whole>[0-9]+) (?=[1-9][0-9]*/[0-9]+(?![0-9.,/])))?"
NUMBER = re.compile(
    MINUS
    + CURRENCY
    + WHOLE
    + rf"(?P<number>{SPACED}|{UNSIGNED})"
    + rf"(?:/(?P<denominator>{UNSIGNED})|[eE](?P<exponent>[+-]?[0-9]+))?"
)
# Units whose last digit is a power. Group 1 is the number before the unit.
UNITS = re.compile(r"(?<![0-9A-Za-z])([0-9.,]*)( ?(?:[kdcm]?m|ft|in|yd)\^?[23])(?![0-9A-Za-z])")
# parse_number cuts the text after its last digit, so the last brace may be missing.
LATEX_FRACTION = re.compile(r"(?<![0-9])\\[dt]?frac\{([0-9]+)\}\{([0-9]+)(?:\}|$)")


def find_numbers(text: str) -> list[re.Match]:
    """All matches of NUMBER in `text`, after LaTeX is made plain and units are removed."""
    text = text.replace("{,}", ",")
    text = LATEX_FRACTION.sub(r"\1/\2", text)
    text = UNITS.sub(r"\1", text)
    return list(NUMBER.finditer(text))


def to_fraction(digits: str) -> Fraction:
    """A fraction from digits that may contain a point, commas and spaces."""
    return Fraction(re.sub(f"[,{SPACES}]", "", digits))


def parse_number(text: str) -> Fraction | None:
    """The last number of `text`, exact, by the rules above. None if it is missing or unreadable."""
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    # A number longer than this window is cut, but the rest is still too long to be read.
    matches = find_numbers(text[max(0, end - 2 * MAX_CHARS) : end])
    if not matches:
        return None
    match = matches[-1]
    exponent = match["exponent"] or "0"
    if len(match[0]) > MAX_CHARS or abs(int(exponent)) > MAX_EXPONENT:
        return None
    number = to_fraction(match["number"])
    denominator = to_fraction(match["denominator"] or "1")
    if denominator == 0:
        return None
    value = number / denominator * Fraction(10) ** int(exponent)
    if match["whole"] and value < 1:
        value += int(match["whole"])
    return -value if match["minus"] else value


def gold_number(answer: str) -> Fraction | None:
    """The last number after the last "####" of a gold answer (GSM8K), or of the whole answer."""
    return parse_number(answer.rsplit("####", 1)[-1])


def answer_block(completion: str) -> str:
    """The text of the only answer block, or "" if there isn't exactly one."""
    conclusion = completion.rpartition("</think>")[2]
    text = conclusion if "<answer>" in conclusion else completion
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return ""
    return text[text.find("<answer>") + len("<answer>") : text.find("</answer>")]


def matches_gold(text: str, answer: str) -> float:
    """1.0 if the last number of `text` is the gold number. 0.0 if not, or without a gold number."""
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

    The search for a tag starts behind the last tag found. So a missing tag costs only its 0.1, and
    a tag that comes too early or is repeated earns nothing. The text between the tags and `answers`
    don't matter.
    """
    rewards = []
    for completion, _ in zip(completions, answers, strict=True):
        position = 0
        found = 0
        for tag in TAGS:
            start = completion.find(tag, position)
            if start >= 0:
                position = start + len(tag)
                found += 1
        rewards.append(found / 10)
    return rewards


def apply_reward(reward, examples: list[dict], completions: list[str]) -> list[float]:
    """The numbers that a reward function gives to N completions, N / len(examples) per example.

    An example has a prompt, an answer and the columns of its row in the data set. The function gets
    lists of N by keyword: those of prompts, completions, answers and the columns that its
    parameters name. With a **rest it gets all of them, so a reward written for TRL's plain texts
    runs unchanged. The run ends with one line if the function names an unknown parameter, or
    doesn't return N finite numbers.
    """
    per_example = len(completions) // len(examples)
    rows = [row for row in examples for _ in range(per_example)]  # N
    given = {}
    for name in rows[0]["columns"]:
        given[name] = [row["columns"][name] for row in rows]
    given["prompts"] = [row["prompt"] for row in rows]
    given["answers"] = [row["answer"] for row in rows]
    given["completions"] = []
    for prompt, text in zip(given["prompts"], completions, strict=True):
        # A reasoning model's chat template may open the <think> that the completion closes.
        opened = prompt.rstrip().endswith("<think>")
        given["completions"].append("<think>" + text if opened else text)

    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters)
    named = [x for x in parameters if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    for x in named:
        if x.name not in given and x.default is x.empty:
            refuse(reward, f"asks for {x.name}; it can have {', '.join(sorted(given))}")
    if not takes_all:
        names = [x.name for x in named]
        given = {name: values for name, values in given.items() if name in names}

    values = reward(**given)
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        # The function returned no list, or a list of other things than numbers.
        numbers = []
    if len(numbers) != len(completions) or not all(abs(x) < LARGEST for x in numbers):
        text = " ".join(repr(values).split())[:200]
        refuse(
            reward,
            f"must return {len(completions)} finite numbers below {LARGEST:g}, one for each "
            f"completion; it returned {text}",
        )
    return numbers


def refuse(reward, why: str) -> None:
    """End the run with one line, status 2 and no traceback."""
    print(f"error: the reward {reward.__name__} {why}", file=sys.stderr)
    # W&B marks a run as failed after sys.exit, but not after raise SystemExit.
    sys.exit(2)
