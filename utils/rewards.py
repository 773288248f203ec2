"""Rewards for answers that are one number. Standard library only.

Every reward function takes `completions` and the gold answers `answer`, two lists of N strings, and
returns N floats. It gets all columns of the data set by keyword, as TRL's rewards do, and ignores
the others. Lists of different lengths raise ValueError. No content of a text raises an error.

Which text counts. `accuracy_reward` reads the answer block. The block exists only if there is
exactly one <answer> and, after it, exactly one </answer>: with several blocks a policy could guess
repeatedly. A thought may mention the tags: if an <answer> follows the last </think>, the text
before that </think> is ignored. If a block or a gold answer has "####", only the text after the
last "####" counts.

What a number is. To pay a wrong answer is worse than to miss a right one. So the text must have
exactly one number, and each word with a digit must be a number from its first character to its
last. Otherwise the text has no number: an answer earns 0.0, and a row with this gold answer is
skipped. Numbers are compared as exact fractions.

- Read: 18, 1,450, 12.50, .5, 3/4, 3 1/2, 1e3, 1.5 x 10^6, and LaTeX's 1{,}450, 1\\,450, 1,\\! 450,
  \\frac34, 3\\frac{1}{2} and 1.5 \\times 10^6. Signs: +7, -7, -$7, $-7, - 7, minus 7, negative 7.
- Ignored: most words, $, %, degrees, units such as cm^2 and m/s^2, brackets, quotes, markdown, a
  final period, \\boxed and \\text, and the left side of a calculation. So 75% is 75, and
  48/2 = 24 is 24.
- No number: 3:4, 5-7, (3, 4), 17 or 18, 12 (3 boxes of 4), 5!, 3\\pi, 2x, 0.333..., 1011_2, 5k,
  1 million, 3 and a half, 1 450, 12,50, 5th, and 1¾: only ASCII digits are read. 48/2, too, isn't a
  number: it's a division that hasn't been carried out.

`lenient_accuracy_reward` reads the last number of the whole completion in the same way. It may
follow other numbers, unless it is connected to one, as in "3 to 4".
"""

import re
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


# ==== the rewards ====
def accuracy_reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """Strict: 1.0 if the only number of the answer block is the gold number, else 0.0."""
    rewards = []
    for completion, gold_text in zip(completions, answer, strict=True):
        gold = gold_number(gold_text)
        number = parse_number(answer_block(completion))
        rewards.append(float(gold is not None and number == gold))
    return rewards


def lenient_accuracy_reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1.0 if the last number anywhere in the completion is the gold number, else 0.0."""
    rewards = []
    for completion, gold_text in zip(completions, answer, strict=True):
        gold = gold_number(gold_text)
        rewards.append(float(gold is not None and last_number(completion) == gold))
    return rewards


def format_reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """0.1 for each of the four TAGS found in order: 0.0, 0.1, 0.2, 0.3 or 0.4.

    The search for a tag starts after the tag found before it. So a missing tag costs only its 0.1,
    and a tag that comes too early or is repeated earns nothing. Neither `answer` nor the text
    between the tags matters.
    """
    rewards = []
    for completion, _ in zip(completions, answer, strict=True):
        position = 0
        found = 0
        for tag in TAGS:
            start = completion.find(tag, position)
            if start >= 0:
                position = start + len(tag)
                found += 1
        rewards.append(found / 10)
    return rewards


def answer_block(completion: str) -> str:
    """The text of the only answer block, or "" if there isn't exactly one."""
    conclusion = completion.rpartition("</think>")[2]
    text = conclusion if "<answer>" in conclusion else completion
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return ""
    return text[text.find("<answer>") + len("<answer>") : text.find("</answer>")]


def gold_number(answer: str) -> Fraction | None:
    """The number of a gold answer. None if it doesn't have exactly one: such a row is skipped."""
    return parse_number(answer)


# For a reward function, what reads its gold answers. A row is skipped if the reader returns None. A
# reward function that isn't here takes any text.
GOLD_READERS = {accuracy_reward: gold_number, lenient_accuracy_reward: gold_number}


def has_gold(answer: str, functions: list) -> bool:
    """Whether all of the functions can read this gold answer."""
    readers = {GOLD_READERS[function] for function in functions if function in GOLD_READERS}
    return all(read(answer) is not None for read in readers)


# ==== reading a number ====
# A longer text isn't read. Otherwise a policy might find a text that takes hours to read.
MAX_TEXT = 1000
# The longest number. Python's int() refuses more than 4300 digits.
MAX_CHARS = 100
MAX_EXPONENT = 100

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"  # 1,450 or 1450
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
MONEY = "$€£¥₹"
QUOTES = "\"'“”‘’`"
# The places right after and right before a number, as in 3, $3$ and $3. Both match no characters.
AFTER_NUMBER = rf"(?:(?<=[0-9%)}}&])|(?<=[0-9%)}}&][{MONEY}{QUOTES}]))"
BEFORE_NUMBER = rf"(?=[-+{MONEY}({{&]*\.?[0-9])"

# An argument of \frac: a number in braces, or one digit.
ARGUMENT = rf" ?(?:\{{ ?(-?{DECIMAL}) ?\}}|([0-9]))"
# LaTeX's commands that show their argument.
SHOW = r"\\(?:boxed|fbox|text|textbf|textnormal|textrm|mathrm|mathbf|mbox)"
# A letter alone is a variable, or k for thousand. "a" and "I" are words.
LETTER = "[b-zB-HJ-Z]"
# Words that change the number before them, and words that change the number after them.
DIGIT = "(?:one|two|three|four|five|six|seven|eight|nine)"
ILLION = "(?:m|b|tr|quadr|quint|z)illion"
# Parts of a whole. But 18 eleventh graders are whole, so the larger ones are plurals.
PART = "(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
PART = rf"(?:{PART}|(?:eleven|twelf|[a-z]+teen|[a-z]+tie|{ILLION})ths)"
MULTIPLIER = (
    rf"(?:(?i:(?:[a-z]+-)?{PART}|(?:hundred|thousand|{ILLION}|lakh|crore|dozen)s?|half|halves|"
    rf"quarters? of|(?:and|&) (?:an?|half|{DIGIT})|point (?:zero|oh|{DIGIT})|tens|bn|mn|mil|grand|"
    rf"squared|cubed|factorial|repeating|recurring|pi|sqrt)|{LETTER})"
)
MODIFIER = (
    rf"(?:(?i:sqrt|log|ln|sin|cos|tan|root of|half|(?:(?:half|quarters?|{PART}) of|twice|double|"
    rf"thrice|triple|quadruple|times)(?: the)?|not|more than|less than|fewer than)|{LETTER},?)"
)
# A unit of one letter needs a space before it: 5m may be 5 million, and 3s may be 3 times s. With a
# space after it, "in" is the word.
UNIT = (
    "(?:[kcdm]m|in(?! )|inch|inches|ft|foot|feet|yd|yards?|mi|miles?|meters?|metres?|units?|"
    "kg|mg|lbs?|oz|ml|mL|hrs?|mins?|secs?|mph|day|week|month|year|hour|minute|second)"
)
# In 6ft2in, the 2 is no power.
POWER = r"(?:\^-?[123]|[23](?![A-Za-z0-9]))?"
FIRST_UNIT = rf"(?: ?{UNIT}{POWER}| m{POWER}| [gshlL]|m[23]\b|m(?=/s)| ?/ ?{UNIT}{POWER})"
NEXT_UNIT = rf"(?:(?: ?[/*] ?| )(?:{UNIT}|[mgshlL]){POWER})"
# A character on the left side of a calculation.
LEFT_SIDE = rf"(?:[-+*/÷^0-9.()%{{}}&{MONEY}]|,(?=[0-9]{{3}}))"

# These rules rewrite a text, in this order, before it is split into words. A "&" joins the parts of
# a fraction or a mixed number. A ";" joins what isn't one number, because a word with a ";" inside
# isn't read.
RULES = [
    # GSM8K's annotations: <<48/2=24>>
    ("<<[^<>]*>>", ""),
    # MATH writes 1,\! 450.
    (r",\\! (?=[0-9]{3}(?![0-9]))", ","),
    # LaTeX that shows nothing
    (r"\\!|\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
    # a minus sign and an en dash
    ("[\u2212\u2013]", "-"),
    # thousands: 1{,}450 and 1\,450, and with no-break and thin spaces
    ("(?<=[0-9])(?:\\{,\\}|\\\\,|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ","),
    # LaTeX's spaces, and the borders of its formulas
    (r"\\[,;: ()\[\]]|\\q?quad(?![A-Za-z])|(?<=[0-9{}])~", " "),
    # \$, \% and \#
    (r"\\([$%#])", r"\1"),
    # powers: ^{-3} is ^-3
    (r"\^\{ ?([-+]?[0-9]+) ?\}", r"^\1"),
    ("\u00b2", "^2"),
    ("\u00b3", "^3"),
    # degrees
    (r"\^(?:\\circ|\{\\circ\})|°[CF]", "°"),
    # times
    (r"\\(?:times|cdot)(?![A-Za-z])|[×·]", " * "),
    # Python's power, and bold type
    (r"(?<=[0-9])\*\*(?=-?[0-9])", "^"),
    (r"\*\*|__", " "),
    # spaces, but not line breaks
    (r"[^\S\n]+", " "),
    # \frac{3}{4} and \frac34 are &3/4&
    (rf"\\[dtc]?frac{ARGUMENT}{ARGUMENT}", r"&\1\2/\3\4&"),
    # \text{ cm} is cm
    (rf" ?{SHOW} ?\{{ ?([^{{}}]*?) ?\}}", r" \1"),
    (rf"{SHOW}(?![A-Za-z])", " "),
    # any other command changes what is beside it: 3 \pi
    (r" ?(\\[A-Za-z]*) ?", r"\1"),
    # ( 7 ) is (7)
    (r"(?<=[(\[{]) | (?=[)\]}])", ""),
    # minus 7 and $ 7
    (rf"\b(?i:minus|negative) {BEFORE_NUMBER}", "-"),
    (rf"(?<=[{MONEY}]) {BEFORE_NUMBER}", ""),
    # units after a number: cm^2, m/s^2, /hour
    (rf"(?<=[0-9&$)}}]){FIRST_UNIT}{NEXT_UNIT}{{0,2}}(?![A-Za-z0-9^_{{(])", ""),
    # 1.5 x 10^6
    (rf"{AFTER_NUMBER} ?[xX] ?(?=[{MONEY}]?[0-9])", "*"),
    # operators join words: 3 + 4, x >= 5, 5 !, 3 - x
    ("[<>!]=", "<"),
    (r" ?([*+/÷^<>≤≥≠≈~±√π∞]) ?| (!)", r"\1\2"),
    (rf" ?- (?:{BEFORE_NUMBER}|(?=[A-Za-z]\b))", "-"),
    # twice 3 and log 3
    (rf"(?<![\w'’]){MODIFIER} {BEFORE_NUMBER}", ";"),
    # 1 million and 3 (half)
    (rf"{AFTER_NUMBER},?(?: -?|-)[(\[{{]?(?={MULTIPLIER}\b)", ";"),
    # 3, 4 and 3 to 4
    (rf"{AFTER_NUMBER},? ?(?:[,;:]|(?i:and|or|to|by|of|out of|over|base)) {BEFORE_NUMBER}", ";"),
    # the left side of a calculation: 48/2 = 24. An operator follows a number.
    (rf"(?<![^\s=])(?={LEFT_SIDE}*?[0-9)}}%&][-+*/÷^]){LEFT_SIDE}+ ?=", " "),
    # 3 1/2
    (rf"{AFTER_NUMBER} {BEFORE_NUMBER}", "&"),
    # x = 7 and Answer:7
    (r"=|(?<=[A-Za-z]):", " "),
]
RULES = [(re.compile(pattern), new) for pattern, new in RULES]
# A word with a digit has to be a number as a whole, and so has a word with one of these.
MATHEMATICS = "\\^+|√π∞±"

CLOSE = rf"[*_)\]}}%°¢{QUOTES}{MONEY}]*"
# A word that is a number, such as (-$7.50). or **&3/4&**
WORD = re.compile(
    rf"(?P<open>[*_#(\[{{{QUOTES}{MONEY}]*)(?P<sign>[-+]?)[{MONEY}]?"
    rf"(?P<number>[0-9.&](?:[-+0-9.,/*^eE&]*[0-9&])?){CLOSE}(?:[.,;:]{CLOSE})?"
)
# 1.5e6, 1.5*10^6 and 10^6
SCIENTIFIC = re.compile(rf"(?:({DECIMAL})[eE]|(?:({DECIMAL})\*)?10\^)([-+]?[0-9]+)")
# 3/4 and &3/4&, and after a whole number 1&3/4 and 1&3/4&
FRACTION = re.compile(rf"(?:({INTEGER})&+|&?)(-?{DECIMAL})/(-?{DECIMAL})&?")
# <answer>, </b> and <|im_end|>
ANY_TAG = re.compile(r"</?[A-Za-z|][^<>\n]*>")


def parse_number(text: str) -> Fraction | None:
    """The number of a text, or of what follows its last "####". None if it hasn't exactly one."""
    text = text.rpartition("####")[2]
    numbers = find_numbers(text) if len(text) <= MAX_TEXT else []
    return numbers[0] if len(numbers) == 1 else None


def last_number(completion: str) -> Fraction | None:
    """The last number of a completion. None if there is no number, or if it isn't read."""
    end = 1 + max(completion.rfind(digit) for digit in "0123456789")
    text = completion[max(0, end - MAX_TEXT) : end + MAX_CHARS]
    numbers = find_numbers(ANY_TAG.sub("\n", text))
    return numbers[-1] if numbers else None


def find_numbers(text: str) -> list[Fraction | None]:
    """For each word with a digit or a sign of mathematics, in order: its number, or None."""
    for pattern, new in RULES:
        text = pattern.sub(new, text)
    numbers = []
    for word in text.split():
        # The digits of all scripts are numeric, and so are characters such as ¾.
        if any(x.isnumeric() or x in MATHEMATICS for x in word):
            numbers.append(read_word(word))
    return numbers


def read_word(word: str) -> Fraction | None:
    """The number of a word, or None if the word as a whole isn't a number."""
    match = WORD.fullmatch(word) if len(word) <= MAX_CHARS else None
    # (3,400) may be a pair.
    if match is None or ("," in match["number"] and match["open"].endswith(("(", "["))):
        return None
    value = read_unsigned(match["number"])
    return -value if value is not None and match["sign"] == "-" else value


def read_unsigned(number: str) -> Fraction | None:
    """The value of a decimal, a power of ten, a fraction or a mixed number, or None."""
    if re.fullmatch(DECIMAL, number):
        return to_fraction(number)
    if match := SCIENTIFIC.fullmatch(number):
        factor = match[1] or match[2] or "1"
        exponent = int(match[3])
        if abs(exponent) > MAX_EXPONENT:
            return None
        return to_fraction(factor) * Fraction(10) ** exponent
    if match := FRACTION.fullmatch(number):
        whole, top, bottom = match.groups()
        if to_fraction(bottom) == 0:
            return None
        value = to_fraction(top) / to_fraction(bottom)
        if whole is None:
            # 48/2 is a division that hasn't been carried out.
            return value if value.denominator > 1 else None
        # 2 5/3 isn't a mixed number.
        return to_fraction(whole) + value if 0 < value < 1 else None
    return None


def to_fraction(decimal: str) -> Fraction:
    """The exact value of a decimal such as -1,450.5."""
    return Fraction(decimal.replace(",", ""))
