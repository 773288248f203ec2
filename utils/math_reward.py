r"""A reward for answers in mathematics, such as those of MATH and AIME. It needs math-verify:

    pip install math-verify

`math_reward` compares the answer of a completion with the gold answer. The answer is the text of
the only answer block, or, if the completion has no <answer>, the content of the last \boxed{} after
the thought. `math_gold` is None for a gold answer that can't be read: such a row is skipped.

The rule. Every number, letter, word, sign, step and line of both texts counts, except for this list:

- LaTeX's layout: spaces, sizes, dollar signs, borders of formulas, bold type, thousands separators,
  \dfrac or \frac, upright or slanted letters, and a full stop at the end. Words may have capitals.
- "The answer is", "so x =" and the like before a formula, and the name of a value: x = 5 may be 5.
  But two names have to be the same, and each of several names stands for its own value.
- A unit at the very end, or the same unit after each member of a list: 5 \text{ cm} may be 5. But two
  units have to be the same. A unit is a measure, or a word in the plural that counts something. A
  single letter is a unit only in \text or \mathrm: in 5m it is a variable.
- The order of a list or a set, but not of a pair, and the brackets of a set.
- The steps before the last side, as in x = 5+6 = 11, if the other text has another number of steps.
  After \approx stands the answer, but an approximation isn't the answer if the gold answer has none.
- The form of a formula. But 10! isn't the answer 3628800: no operation may be left that the gold
  answer doesn't hold. If it has a variable, any equal form is right.

So a text is split into the members of its list, and each member into its sides. What has a word is
compared as a text. Two plain numbers are compared by the rules of utils/rewards.py. All else is read
by the parser of math-verify, which reads a side as a whole, and is compared exactly. An equation that
is to be solved, such as 2x = 6, isn't the answer 6.

A policy may write a formula that math-verify can't finish. math-verify has a timer, but this timer
works only in the main thread, and can't stop a computation inside of C code. So math-verify runs in
separate processes. There, a timer counts processor time, so a busy machine doesn't change a reward.
A process that doesn't answer is killed. An answer that takes too long counts as wrong.
"""

import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from utils.rewards import GOLD_READERS, MAX_TEXT, answer_block, parse_number

# Seconds of processor time for one comparison.
SECONDS = 3
# A decimal of so many digits counts as a number that no decimal equals, such as 1/3.
DIGITS = 12
# Seconds after which a process that doesn't answer is killed.
PATIENCE = 60
# Bytes of memory for a process.
MEMORY = 4 * 2**30
# The answer is $\frac{1}{2}$ cm.
ONE_FORMULA = re.compile(
    r"(?i:so|thus|hence|the|final|answer|solution|is|are|\b[a-z]\b|[\s:=*])*\$([^$]+)\$"
    r"(?:[\s*.]|[kcm]?m|\(in (?:simplest|lowest) (?:form|terms)\))*"
)
# What connects the boxes of one list: \boxed{1} and \boxed{2}
BETWEEN_BOXES = re.compile(r"(?:[\s$,;&}]|\\[()\[\],;]|\\q?quad|\\(?:text\w*|mbox) ?\{|and|or)*")


# ==== the reward ====
def math_reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1.0 if the answer of the completion is the gold answer, else 0.0."""
    pairs = []
    for completion, gold in zip(completions, answer, strict=True):
        pairs.append((last_boxed(gold), final_answer(completion)))
    # The samples of a group often agree, so each pair is compared once.
    different = list(dict.fromkeys(pairs))
    with ThreadPoolExecutor(len(PROCESSES)) as pool:
        verdicts = dict(zip(different, pool.map(is_right, different), strict=True))
    return [float(verdicts[pair]) for pair in pairs]


def math_gold(answer: str) -> str | None:
    r"""A gold answer, or the content of the last \boxed{} of a solution. None: it can't be read."""
    # A missing package ends the run here, when the data is loaded.
    PROCESSES[0].start()
    gold = last_boxed(answer)
    return gold if is_safe(gold) and ask(gold) else None


GOLD_READERS[math_reward] = math_gold


def final_answer(completion: str) -> str:
    r"""The answer in the only answer block or, without <answer>, in the last \boxed{}, else ""."""
    if "<answer>" in completion:
        block = answer_block(completion)
        boxes = block.count("\\boxed")
        # Two boxes in the block are two guesses, unless they are a list.
        return last_boxed(block) if boxes < 2 or boxes == len(last_boxes(block)) else ""
    conclusion = completion.rpartition("</think>")[2]
    return last_boxed(conclusion) if "\\boxed" in conclusion else ""


def last_boxed(text: str) -> str:
    r"""The content of the last \boxed{}. Without one, the only formula of the text, or the text.

    \boxed{1} and \boxed{2} are the list 1, 2.
    """
    if "\\boxed{" in text:
        # A box that is repeated is one answer.
        return ", ".join(dict.fromkeys(last_boxes(text)))
    text = text.rpartition("####")[2].strip()
    formula = ONE_FORMULA.fullmatch(text) if len(text) <= MAX_TEXT else None
    return formula[1].strip() if formula else text


def last_boxes(text: str) -> list[str]:
    r"""The content of the last \boxed{}, after those of the boxes that are in one list with it."""
    boxes = []
    for rest in reversed(text.split("\\boxed{")[1:]):
        content = before_closing_brace(rest[:MAX_TEXT])
        # Without the brace, the text has been cut off.
        if content is None:
            break
        if boxes and not BETWEEN_BOXES.fullmatch(rest[len(content) + 1 :]):
            break
        boxes.append(content.strip())
    return boxes[::-1]


def before_closing_brace(text: str) -> str | None:
    """The text up to the brace that closes one opened before it, or None without this brace."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return None


def is_right(pair: tuple[str, str]) -> bool:
    """Whether the second text is the same answer as the first, the gold answer."""
    return all(text and is_safe(text) for text in pair) and ask(*pair)


def is_safe(text: str) -> bool:
    """Whether a text may be read: it is short, and its braces match."""
    return len(text) <= MAX_TEXT and before_closing_brace(text + "}") == text


# ==== the processes ====
class Process:
    """A process that compares answers. It's started when it's needed, and killed when it's late."""

    def __init__(self):
        self.process = None

    def start(self):
        if self.process is not None:
            return
        if find_spec("math_verify") is None:
            raise ModuleNotFoundError("math_reward needs a package: pip install math-verify")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "utils.math_reward", str(SECONDS)],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run alone
        )
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError("math-verify doesn't start; the lines above say why")

    def ask(self, gold: str, text: str | None) -> bool:
        """Whether the text is the gold answer, or without a text whether the gold can be read."""
        self.start()
        with suppress(OSError):  # the process has died
            self.process.stdin.write(json.dumps([gold, text]).encode() + b"\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], PATIENCE)[0]:
                reply = self.process.stdout.readline()
                if reply:
                    return reply == b"yes\n"
        self.process.kill()
        self.process.wait()
        self.process = None
        return False


PROCESSES = [Process() for _ in range(min(8, os.cpu_count() or 1))]
IDLE = SimpleQueue()
for process in PROCESSES:
    IDLE.put(process)


def ask(gold: str, text: str | None = None) -> bool:
    """The answer of a process that is idle. Any thread may ask."""
    process = IDLE.get()
    try:
        return process.ask(gold, text)
    finally:
        IDLE.put(process)


# ==== inside of a process: from a text to members and sides ====
WRAPPER = r"\\(text(?:normal|rm|bf|it|sf)?|math(?:rm|bf|it|sf)|boldsymbol|bm|mbox|operatorname(?= ?\{[ei]\}))"
SLANTED = ("textbf", "textit", "mathbf", "mathit", "boldsymbol", "bm")
SHORT_UNIT = r"[kcm]?m/(?:s|h|hr|min)|[kcmnd]m|ft|in|mi|yd|[kcm]g|lbs?|oz|hrs?|mph|[AaPp][Mm]"
# An argument in braces, and one without them
BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
BARE = r"(\\[A-Za-z]+|[0-9A-Za-z])"


def upright(match):
    r"""\text{square} \text{feet} for \text{square feet}. A slanted letter, e and i are no words."""
    command, content = match.groups()
    if len(content) == 1 and (command in SLANTED or content in "ei"):
        return f" {content} "
    words = re.sub("[A-Za-z]+", r"\\text{\g<0>}", content)
    return re.sub(r"\\text\{(and|or)\}", r"\1", f" {words} ")


# How a text is rewritten before it is read. Layout leaves a space, so that no two numbers become one.
REWRITES = [
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])\.?", " "),
    # 32,\! 349 and 32{,}349
    (r"(?<=[0-9])(?<![0-9]{4})(?:,\\!|\{,\}|\\,) ?(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\q?quad(?![A-Za-z])", "\n"),
    (r"(?<!\\)\\[,;:! ()\[\]]|\\?\$|~|(?<![0-9A-Za-z)])\*\*|\*\*(?![0-9A-Za-z(])", " "),
    (r"^\s*(?i:(?:so|thus|hence|therefore|the|final|answer|solutions?|is|are)\b[\s:,=]*)+", ""),
    (r"\b(?:minus|negative) (?=[0-9\\])", "-"),
    (r"\b([AaPp])\. ?([Mm])\b\.?", r"\1\2"),
    (r"^([^=<>]*[A-Za-z]) (?:is|are) (?=[^=]*$)", r"\1 = "),
    (r"\\l(?:eq?|eqslant|eqq)(?![A-Za-z])|<=", "≤"),
    (r"\\g(?:eq?|eqslant|eqq)(?![A-Za-z])|>=", "≥"),
    (r"\\neq?(?![A-Za-z])", "≠"),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\approx(?![A-Za-z])", "≈"),
    (r"\\in(?![A-Za-z])", "∈"),
    (r"(?<![\\A-Za-z])infinity\b", r"\\infty"),
    # \mathrm e and {\rm e}
    (rf"{WRAPPER} ([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
    (r"\{\\rm ([A-Za-z]+)\}", r"\\mathrm{\1}"),
    (rf"(^[-+0-9.,/ ]*[0-9] ?|(?<=[0-9}})\]] ))({SHORT_UNIT})(?![\w({{])", r"\1\\text{\2}"),
    (rf"{WRAPPER} ?\{{ *([^{{}}]*?) *\}}", upright),
    # Three letters are a word, unless they are a product: 2abc, abc + 1, xyz
    (
        r"(?<![\\\w{}^)+*/-])(?<![-+*/=] )(?=[A-Za-z]*[aeiouAEIOU])[A-Za-z]{3,}(?![\w^({]| *[-+*/^])",
        lambda match: match[0] if match[0] == "and" else rf"\text{{{match[0]}}}",
    ),
    (r"\^ *\{? *\\circ *\}?|\\degree(?![A-Za-z])|°", r" \\text{degrees}"),
    (r"\\?%", r" \\text{percent}"),
    (r"\\[lcd]?dots(?![A-Za-z])|\.\.\.", r" \\text{etc} "),
    ("'+", lambda match: r"^{\prime}" if len(match[0]) == 1 else r"^{\prime \prime}"),
    (r"(?<=[0-9]) ?[xX] ?(?=10\^)", r"\\times "),
    (r"\\[dtc]?(frac|binom)(?![A-Za-z])", r"\\\1"),
    (rf"\\(frac|binom) *{BARE}", r"\\\1{\2}"),
    (rf"(\\(?:frac|binom) *{BRACES}) *{BARE}", r"\1{\2}"),
    (rf"\\sqrt *{BARE}", r"\\sqrt{\1}"),
    (r"\\?sqrt *\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\^ *\(([^()]*)\)", r"^{\1}"),
    # \log_2 3 and \log_23
    (r"\\log_ ?([0-9]) ?([0-9]+)", r"\\log_{\1}{\2}"),
    # a matrix that is written as an array
    (
        r"[(\[] *\\begin\{array\} *\{[lcr ]+\}((?:(?!\\begin).)*?)\\end\{array\} *[)\]]",
        r"\\begin{bmatrix}\1\\end{bmatrix}",
    ),
    (r"[\s.,;:]+$", ""),
]
REWRITES = [(re.compile(pattern, re.DOTALL), new) for pattern, new in REWRITES]
THOUSANDS = r"(?<=[0-9])(?<![0-9]{4}),(?=[0-9]{3}(?![0-9]))"
# What separates the members of a list, and the sides of a member
BORDER = r"[,;\n]|\\\\|\b(?:and|or)\b"
RELATION = "[=≈∈<>≤≥≠]"
INEQUALITY = set("<>≤≥≠")
MEASURE = (
    r"\\text\{(?:square|sq|cubic|cu|per|[kcmnd]?m|in|ft|yd|mi|[kcm]?g|lbs?|oz|[hsNJWVL]|hrs?|min|sec|mph|"
    r"rad|percent|[aApP][mM]|degrees?|inch(?:es)?|foot|feet|yards?|miles?|units?|days?|hours?|minutes?|"
    r"seconds?|pounds?|(?:milli|centi|kilo)?(?:meter|metre|gram|liter)s?)\}\.?(?: *\^ *\{? *-?[0-9] *\}?)?"
)
COUNTED = r"(?:\\text\{[a-z]+\} *)*\\text\{(?!(?:times|less|plus|minus|always)\})[a-z]+s\}"
UNIT = re.compile(
    rf"(.*?[\w)}}\]]) *({MEASURE}(?:[ /.*-]*(?:\\cdot)? *{MEASURE})*(?: *\\text\{{[CF]\}}| *[CF])?)"
    rf"|((?:[^A-Za-z]|\\(?:frac|sqrt|pi)(?![A-Za-z]))*[0-9}}]) *({COUNTED})",
    re.DOTALL,
)
WORD = re.compile(r"(?<!_\{)(?<!_\{ )\\text ?\{[^{}]*[A-Za-z]{2}")
NAME = r"(?:\\[A-Za-z]+|[A-Z]+|[a-z]|\\(?:bar|vec|hat|overline)\{[^{}]*\})(?: *_(?:\w|\{[^{}]*\}))?"
# x, \angle A, P(A), f'(x) and (x, y), but not xy and x + y: x + y = 5 may be a line. The mean
LABEL = re.compile(
    rf"(?:m? *\\[a-z]+ *)?(?:{NAME})? *(?:\^\{{[^{{}}]*\}})? *(?:\([^()]*\))?"
    r"|(?:\\text\{[A-Za-z]+\}|\b[a-z]{2}\b|[\s:])+"
)
# What must not be in a side that the parser reads: it reads 100 200 as 300, and drops the base of 1011_2.
MISREAD = re.compile(r"[0-9]\s+[0-9]|[0-9]\}? *_|:[^:]*:|\\mp|[0-9]\}? *\^\{\\prime")
NUMBER_WORD = re.compile(
    r"(?i)\\text\{(?:hundred|thousand|million|billion|trillion|dozen|ten)s?\}|\bmil\b"
)
# 1011_2, 1:2:3 and 2:30 are compared as texts.
CODE = re.compile(r"[0-9A-F]+ *_ *(?:[0-9]|\{[0-9]+\})|[0-9]+(?: *: *[0-9]+)+")

# LaTeX that asks for no operation: units, degrees, powers of ten, and commands that only name a thing
# or change how a text looks.
NOTATION = re.compile(
    r"\\(?:text|mathrm|mbox) ?\{[^{}]*\}(?:\^\{?-?[0-9]\}?)?"
    r"|\^ ?\{? ?\\circ ?\}?"
    r"|(?<![0-9.])10\^(?:\{[-+]?[0-9]+\}|[0-9])"
    r"|\\(?:begin|end)\{[pb]?matrix\}"
    r"|\\(?:boxed|left|right|displaystyle|degree|quad|qquad|cdot|times|cup|in)(?![A-Za-z])"
)
# Other commands that are no operation. is_carried_out looks at divisions.
CONSTANTS = {"pi", "infty", "mathbb", "emptyset", "varnothing", "frac", "dfrac", "tfrac", "cfrac"}
# \frac{6}{2} and 6/2
DIVISION = re.compile(r"\\[dtc]?frac *\{?([0-9]*)\}? *\{?([0-9]*)\}?|([0-9]*)\}? */ *\{?([0-9]*)")
# Plain numbers with a sign between them, or side by side in brackets: 3+2, 3\cdot 4, 2(3)
NUMBER = r"\(?-?[0-9.]+\)?"
UNFINISHED = re.compile(
    rf"(?:^|[-+*(\[{{,=]) *{NUMBER} *[-+] *{NUMBER}(?! *[\\A-Za-z(^0-9!])"
    rf"|[0-9)] *(?:\*|\\cdot|\\times) *{NUMBER}(?![0-9])"
    r"|[0-9)] *\( *-?[0-9.]+ *\)|\) *[0-9]"
)


class Member(NamedTuple):
    """A member of a list, such as x = 5+6 = 11 cm: its sides, the signs between them, its unit."""

    sides: list
    signs: str = ""
    unit: str = ""

    def name(self):
        """The x of x = 5+6 = 11, but not the 5+6 of 5+6 = 11."""
        side = self.sides[0] if self.signs else ""
        letters = re.sub(r"\\(?:begin|end) *\{\w+\}(?:\{\w+\})?|\\[A-Za-z]+|[ei]", "", side)
        return side if re.search("[A-Za-z]", letters) or LABEL.fullmatch(side) else ""

    def steps(self):
        return self.sides[1 if self.name() else 0 : -1]


def split(text, pattern):
    """As re.split does, the pieces and what is between them, but only outside of all brackets."""
    pieces, depth, start = [], 0, 0
    for match in re.finditer(rf"({pattern})|(\\begin|[(\[{{])|\\end|[)\]}}]", text):
        if match[1]:
            if depth == 0:
                pieces += [text[start : match.start()].strip(), match[1]]
                start = match.end()
            continue
        depth += 1 if match[2] else -1
        # The brackets don't match.
        if depth < 0:
            return []
    return [*pieces, text[start:].strip()]


def read(text):
    """The members of a list."""
    text = "".join(split(text, THOUSANDS)[::2])
    # The list of a set, and of equations in brackets
    inside = re.fullmatch(r"(|.*[=∈] *)\\\{(.*)\\\}|()\[(.*=.*)\]", text, re.DOTALL)
    if inside and split(inside[2] or inside[4] or "", ","):
        text = (inside[1] or "") + (inside[2] or inside[4])
    members = []
    for piece in filter(None, split(text, BORDER)[::2]):
        for one_sign in with_both_signs(piece):
            chain = split(one_sign, RELATION)
            sides, signs = chain[::2], "".join(chain[1::2])
            # x = 1, 2 is x = 1, x = 2.
            if not signs and members and members[-1].signs in ("=", "∈", "≈"):
                sides, signs = [members[-1].sides[0], *sides], members[-1].signs
            # 5 = x is x = 5.
            if signs == "=" and re.fullmatch(NAME, sides[1]) and not re.fullmatch(NAME, sides[0]):
                sides = sides[::-1]
            members.append(Member(sides, signs))
    return without_units(members)


def with_both_signs(text):
    r"""1 + x and 1 - x for 1 \pm x."""
    texts = [text]
    while re.search(r"\\pm(?![A-Za-z])", texts[0]) and len(texts) < 8:
        texts = [re.sub(r"\\pm(?![A-Za-z])", sign, x, count=1) for x in texts for sign in "+-"]
    return texts


def without_units(members):
    """The members without their unit. If they have different units, as in 3 feet, 2 inches, it stays."""
    done = []
    for member in members:
        match = UNIT.fullmatch(member.sides[-1])
        value, unit = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
        if unit and not WORD.search(value):
            member = Member([*member.sides[:-1], value], member.signs, plain(unit))
        done.append(member)
    return done if len({x.unit for x in done} - {""}) < 2 else members


def plain(text):
    """A text without its layout. Two numbers stay two numbers."""
    text = re.sub(r"\\text\{([A-Za-z]+)\}", lambda match: match[1].lower(), text)
    text = re.sub(r"([_^]) *\{ *(\w) *\}", r"\1\2", text)
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


# ==== inside of a process: comparing ====
def compare(gold, text):
    """Whether the text is the gold answer, or without a text whether the gold answer can be read."""
    texts = [x for x in (gold, text) if x is not None]
    for i in range(len(texts)):
        for pattern, new in REWRITES:
            texts[i] = pattern.sub(new, texts[i])
    if any(NUMBER_WORD.search(x) for x in texts):
        return False
    golds = read(texts[0])
    if not golds or not all(map(is_read, golds)):
        return False
    if text is None or plain(texts[0]) == plain(texts[1]):
        return True
    if "_" not in texts[0]:
        # The values of x may be called x_1 and x_2.
        texts[1] = re.sub(r"([A-Za-z]) *_ *[0-9](?= *[=≈])", r"\1", texts[1])
    answers = read(texts[1])
    if any(INEQUALITY & set(x.signs) for x in golds + answers):
        sets = solution_set(golds, texts[0]), solution_set(answers, texts[1])
        if None not in sets:
            (name, values), (other, found) = sets
            is_same = not name or not other or plain(name) == plain(other)
            return is_same and is_carried_out(texts[0], values, texts[1]) and equal(values, found)
    for named, bare in ((golds, answers), (answers, golds)):
        names = {plain(x.sides[0]) for x in named if x.signs}
        if len(names) == len(named) > 1 and not any(x.signs for x in bare):
            # In the order of x = 1, y = 2, the values 1, 2 are a pair.
            pair = brackets(bare[0].sides[0]) if len(bare) == 1 else None
            bare[:] = [Member([x]) for x in pair[1]] if pair else bare
            return len(golds) == len(answers) and all(map(is_same_member, golds, answers))
    return are_matched(is_same_member, golds, answers)


def are_matched(is_same, golds, texts):
    """Whether the gold members are the same as those of the text, in any order."""
    texts = list(texts)
    for gold in golds:
        found = next((x for x in texts if is_same(gold, x)), None)
        if found is None:
            return False
        texts.remove(found)
    return not texts


def is_read(member):
    """Whether a member can be read. A text with words needn't be."""
    if any(map(WORD.search, member.sides)):
        return True
    sides = member.sides if INEQUALITY & set(member.signs) else member.sides[-1:]
    for side in sides:
        pair = brackets(side)
        if pair and all(is_read(Member([x])) for x in pair[1]) or CODE.fullmatch(side):
            continue
        if number(side) is None and parse(side) is None:
            return False
    return True


def brackets(text):
    """The brackets of a pair such as (1, 2], and its members. None: it's no pair."""
    match = re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text, re.DOTALL)
    members = split(match[2], "[,;]")[::2] if match else []
    return (match[1] + match[3], members) if len(members) > 1 else None


def number(text):
    """The number that a text is by the rules of utils/rewards.py, but 5 m has a variable."""
    text = re.sub("(?<=[0-9])[eE](?=[-+]?[0-9])", "e", text)
    letters = re.sub(r"\\[A-Za-z]+|(?<=[0-9])e(?=[-+]?[0-9])", "", text)
    return None if re.search("[A-Za-z]", letters) else parse_number(text)


def is_same_member(gold, text):
    """Whether two members are the same: their values and units, and what both have of names and steps."""
    if gold.unit and text.unit and not is_same_unit(gold.unit, text.unit):
        return False
    if gold.signs == text.signs and all(plain(x) == plain(y) for x, y in zip(gold.sides, text.sides)):
        return True
    if "≈" in text.signs and "≈" not in gold.signs:
        return False
    kinds = [bool(INEQUALITY & set(x.signs)) for x in (gold, text)]
    if any(kinds):
        return all(kinds) and are_matched(is_same_relation, relations(gold), relations(text))
    if "≈" in gold.signs:
        # The exact form counts, too: x = \sqrt{2} in x = \sqrt{2} \approx 1.41. \sin 5 may be the question.
        end = gold.signs.index("≈")
        exact = Member(gold.sides[: end + 1], gold.signs[:end], gold.unit)
        if (end or operations(exact.sides[0]) <= {"sqrt"}) and is_same_member(exact, text):
            return True
    if len(gold.sides) == len(text.sides) and not all(map(is_same_value, gold.steps(), text.steps())):
        return False
    name, other = gold.name(), text.name()
    if name and other and plain(name) != plain(other):
        # The area may be called A.
        is_word = [bool(WORD.search(x)) for x in (name, other)]
        if is_word[0] == is_word[1]:
            return not any(is_word) and is_same_equation(gold, text)
    # 5 is the answer x = 5, but not the line x + y = 5.
    if name and not other and not LABEL.fullmatch(name):
        return False
    # 2x = 6 is to be solved.
    if other and not name and re.search("[0-9]", other) and not LABEL.fullmatch(other):
        return False
    return is_same_value(gold.sides[-1], text.sides[-1])


def is_same_unit(a, b):
    """Whether two units are the same, or one is short for the other, such as cm for centimeters."""
    for pattern, new in [("(?:square|sq)(.*)", r"\1^2"), ("(?:cubic|cu)(.*)", r"\1^3")]:
        a, b = (re.sub(f"^{pattern}$", new, x.replace(".", "")) for x in (a, b))
    short, long = sorted((a, b), key=len)
    if short == long or short + "s" == long:
        return True
    is_short = re.match(".*".join(map(re.escape, short)), long) and len(long) > 4
    return bool(is_short) and re.sub("[a-z]", "", short) == re.sub("[a-z]", "", long)


def is_same_value(gold, text):
    """Whether two sides are the same formula, number, pair or text."""
    if plain(gold) == plain(text):
        return True
    if WORD.search(gold) or WORD.search(text) or CODE.fullmatch(gold) and CODE.fullmatch(text):
        return False
    pairs = brackets(gold), brackets(text)
    if None not in pairs:
        (kind, golds), (other, texts) = pairs
        if kind == r"\{\}":
            return kind == other and are_matched(is_same_value, golds, texts)
        return kind == other and len(golds) == len(texts) and all(map(is_same_value, golds, texts))
    numbers = number(gold), number(text)
    if None not in numbers:
        if numbers[0] == numbers[1]:
            return True
        # agree() knows whether 0.0833333333333 is 1/12.
        if abs(numbers[0] - numbers[1]) > abs(numbers[0]) / 10 ** (DIGITS - 2):
            return False
    a, b = parse(gold), parse(text)
    return None not in (a, b) and is_carried_out(gold, a, text) and equal(a, b)


def equal(a, b):
    from math_verify import verify

    return verify([a], [b], timeout_seconds=None)


@lru_cache(maxsize=1000)
def parse(text):
    """What the parser of math-verify reads, an object of sympy with exact numbers, or None."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Basic, MatrixBase

    if MISREAD.search(text):
        return None
    text = re.sub(r"\\text *\{([A-Za-z])\}", r" \1 ", text)
    # The parser would take \gamma + 1 for a function of 1, and x^T for x.
    text = re.sub(r"\\([gG]amma)(?![A-Za-z]| *\()", r"\\breve{\1}", text)
    text = re.sub(r"\^ *(?:T|\{T\})", "^{(T)}", text)
    config = ConversionConfig(lowercase_symbols=False)
    try:
        parsed = latex2sympy(
            text, is_real=True, normalization_config=None, conversion_config=config
        )
    except Exception:
        return None
    return exact(parsed) if isinstance(parsed, Basic | MatrixBase) else None


def exact(parsed):
    """0.5 as 1/2. Only an interval is computed anew: a power may be huge."""
    from sympy import Float, Interval, Rational, Union, evaluate

    with evaluate(isinstance(parsed, Interval | Union)):
        return parsed.xreplace({x: Rational(str(x)) for x in parsed.atoms(Float)})


def operations(text):
    """The kinds of operation that a text asks for, such as {"!", "^", "sqrt", "+"}."""
    text = NOTATION.sub(" ", text)
    kinds = set(re.findall(r"[!^|⌊⌈√]|[a-z]{2,}(?= *\()", text))
    kinds |= set(re.findall(r"\\([A-Za-z]+)", text)) - CONSTANTS
    if re.search(r"[0-9A-Za-z})\]] *[-+]", text):
        kinds.add("+")
    return kinds


def is_carried_out(gold, value, text):
    """Whether a text asks for no operation that the gold answer doesn't hold.

    Otherwise a policy would earn the reward by copying the question: 10! for 3628800. A gold answer
    with a variable may be written in any form. value is what math-verify reads in gold.
    """
    if getattr(value, "free_symbols", None):
        return True
    text = re.sub(rf"{RELATION}|\\b(?:and|or)\\b", ",", text)
    if not operations(text) <= operations(gold):
        return False
    if UNFINISHED.search(text) and not UNFINISHED.search(gold):
        return False
    if DIVISION.search(gold):
        return True
    # 3/4 is a number, but 6/2 is a division. So is any division whose value is a whole number.
    divisions = DIVISION.findall(NOTATION.sub(" ", text))
    if getattr(value, "is_integer", False):
        return not divisions
    fractions = [[int(number) for number in numbers if number] for numbers in divisions]
    return not any(len(x) == 2 and x[1] > 0 and x[0] % x[1] == 0 for x in fractions)


def solution_set(members, text):
    """x and its set, for inequalities that have been solved for x. A set has no name. Or None."""
    from sympy import Eq, Ge, Gt, Intersection, Le, Lt, Ne, Set, Union

    kinds = {"<": Lt, "≤": Le, ">": Gt, "≥": Ge, "≠": Ne}
    if len(members) == 1 and not INEQUALITY & set(members[0].signs):
        parsed = parse(members[0].sides[-1])
        return (members[0].name(), parsed) if isinstance(parsed, Set) else None
    names, sets = set(), []
    for member in members:
        sides = [parse(side) for side in member.sides]
        if None in sides or not set(member.signs) <= set(kinds):
            return None
        relations = []
        for a, sign, b in zip(sides, member.signs, sides[1:]):
            # x > 5 is solved, but neither 2x > 10 nor x > 2x - 5 is.
            if not (a.is_Symbol or b.is_Symbol) or a.free_symbols and b.free_symbols:
                return None
            relations.append(kinds[sign](a, b, evaluate=False).as_set())
        names |= {x for side in sides for x in side.free_symbols}
        sets.append(Intersection(*relations))
    if len(names) != 1:
        return None
    # Without a word between them, all hold at the same time, if they can.
    values = Intersection(*sets)
    if re.search(r"\bor\b", text) or (values.is_empty and not re.search(r"\band\b", text)):
        values = Union(*sets)
    return str(names.pop()), values


def relations(member):
    """Each relation of a chain as a sign and the difference of its sides: y - x < 0 for x > y."""
    found = []
    for a, sign, b in zip(member.sides, member.signs, member.sides[1:]):
        a, b = parse(a), parse(b)
        if a is None or b is None:
            return [None]
        found.append((sign, a - b) if sign in "<≤≠=" else ("<" if sign == ">" else "≤", b - a))
    return found


def is_same_relation(gold, text):
    from sympy import simplify

    if gold is None or text is None or gold[0] != text[0]:
        return False
    ratio = simplify(gold[1] / text[1])
    return bool(ratio.is_number and (ratio.is_positive or gold[0] == "≠" and ratio.is_nonzero))


def is_same_equation(gold, text):
    """Whether an equation is a multiple of the other, as 2x + 4y = 6 is of y = (3 - x)/2."""
    from sympy import cancel, fraction, radsimp, simplify, together

    ends = [parse(side) for x in (gold, text) for side in (x.sides[0], x.sides[-1])]
    # x = 3 is solved: it isn't 2x = 6.
    if None in ends or ends[0].is_Symbol and not ends[1].free_symbols:
        return False
    sides = [fraction(cancel(together(a - b)))[0] for a, b in (ends[:2], ends[2:])]
    ratio = simplify(radsimp(simplify(sides[0] / sides[1])))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def agree(a, b, *precision):
    """Whether two numbers are equal, or one is a long decimal of the other.

    It replaces math-verify's comparison, which takes numbers that differ by less than 1e-15 for equal.
    """
    from math_verify.grader import get_pct_val
    from sympy import MatrixBase, MatrixExpr
    from sympy.core.evalf import PrecisionExhausted

    # 50% is 50.
    a, b = get_pct_val(a, a), get_pct_val(b, b)
    if isinstance(a, MatrixBase | MatrixExpr) and isinstance(b, MatrixBase | MatrixExpr):
        a, b = a.doit(), b.doit()
        return a.shape == b.shape and all(map(agree, a.flat(), b.flat()))
    difference = a - b
    if difference.free_symbols:
        return False
    try:
        # This computes two digits of the difference, from up to 1000 digits of the numbers.
        difference = difference.evalf(2, maxn=1000, strict=True)
    except PrecisionExhausted:
        # They are equal to 1000 digits, or contain something that isn't computed so exactly.
        return difference.evalf(15, chop=True) == 0
    ends = places(a), places(b)
    if difference == 0 or (ends[0] is None) == (ends[1] is None):
        return difference == 0
    # All digits of the decimal are right: it is rounded or cut off.
    decimal, digits = (b, ends[1]) if ends[0] is None else (a, ends[0])
    is_long = digits > 0 and abs(decimal) * 10**digits >= 10 ** (DIGITS - 1)
    return bool(is_long and abs(difference) * 10**digits < 1)


def places(number):
    """The number of digits after the point of a decimal, None if no decimal is this number."""
    if not number.is_Rational:
        return None
    powers = range(number.q.bit_length())
    return next((n for n in powers if pow(10, n, number.q) == 0), None)


class Late(BaseException):
    """The time is up. The packages catch every Exception, but not this."""


def on_timer(number, frame):
    raise Late


def work(seconds):
    """Answer every line of stdin, the JSON of [gold, text], with yes or no."""
    from math_verify import grader

    grader.sympy_numeric_eq = agree
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()
    signal.signal(signal.SIGPROF, on_timer)
    print("ready", file=replies)
    # Packages print warnings.
    sys.stdout = sys.stderr = open(os.devnull, "w")
    for line in sys.stdin:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            verdict = compare(*json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
        except BaseException:
            signal.setitimer(signal.ITIMER_PROF, 0)
            verdict = False
        print("yes" if verdict else "no", file=replies)


if __name__ == "__main__":
    work(float(sys.argv[1]))
