"""Rewards for answers that are one number. Standard library only.

Every reward function takes `completions` and `answers` (gold), two lists of N strings, and returns
N floats; lists of different lengths raise ValueError, no text does. Numbers are compared exactly,
as fractions.

Which number counts. The last one of the answer block (`accuracy_reward`) or of the whole completion
(`lenient_accuracy_reward`). The answer block exists only if there is exactly one <answer> and,
after it, exactly one </answer>: were the first or the last of several blocks taken, a policy could
guess repeatedly and be paid for one.

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
- "3/4" (no spaces), LaTeX's \\frac{3}{4} and "1e3" are read as fractions and as 1000. A zero
  denominator, an exponent beyond +-100, and a number of more than 100 characters are unreadable:
  the verdict is "no number", never an earlier number of the text;
- what stands around it is ignored: $, €, £, +, %, units, a final period, markdown, \\boxed{}.
  Hence 75% is 75. So is the rest of mathematics: the number of 2\\sqrt{3} is 3, that of 1\\frac{3}{4} is
  4. Such answers need another reward.

Cost. A completion is text from a policy that is paid to find odd inputs, so nothing here may be
slower than linear: tags are found by str.find and str.count, and the regex only ever sees the 200
characters that end in the last digit.
"""

import re
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MAX_CHARS = 100  # of one number; also keeps int() far below Python's limit of 4300 digits
MAX_EXPONENT = 100

UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
)
NUMBER = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z%)\]}\u2212\u2013-])[\u2212\u2013-])?(?:\\?[$€£])?"
    rf"(?P<number>{UNSIGNED})(?:/(?P<denominator>{UNSIGNED})|[eE](?P<exponent>[+-]?[0-9]+))?"
)


def parse_number(text: str) -> Fraction | None:
    """The last number of `text` by the rules above, exact; None without one, or if unreadable."""
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    if end == 0:
        return None
    # Twice the longest number: of a longer one is left what is still too long to be read.
    window = text[max(0, end - 2 * MAX_CHARS) : end].replace("{,}", ",")
    window = re.sub(r"(?<![0-9])\\[dt]?frac\{([0-9]+)\}\{([0-9]+)(?:\}|$)", r"\1/\2", window)
    *_, match = NUMBER.finditer(window)
    exponent = match["exponent"] or "0"
    if len(match[0]) > MAX_CHARS or abs(int(exponent)) > MAX_EXPONENT:
        return None
    denominator = Fraction((match["denominator"] or "1").replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(match["number"].replace(",", "")) / denominator * Fraction(10) ** int(exponent)
    return -value if match["minus"] else value


def gold_number(answer: str) -> Fraction | None:
    """The number of a gold answer: after the last "####" if there is one (GSM8K), else the last."""
    return parse_number(answer.rsplit("####", 1)[-1])


def answer_block(completion: str) -> str:
    """The text of the only answer block, "" if there is not exactly one."""
    if completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return ""
    return completion[completion.find("<answer>") + len("<answer>") : completion.find("</answer>")]


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
