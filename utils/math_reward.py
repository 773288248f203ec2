r"""A reward for answers in mathematics, such as those of MATH and AIME. It needs math-verify:

    pip install math-verify

`math_reward` compares the answer of a completion with the gold answer. The answer is the text of
the only answer block, or, if the completion has no <answer>, the content of the last \boxed{} after
the thought. Two numbers are compared by the rules of utils/rewards.py. Everything else is compared
by math-verify: roots, intervals, sets, matrices, polynomials, words. But numbers inside of these, and
equations, are compared exactly, by agree and is_same_equation. An equation that is to be solved, such
as 2x = 6, isn't the answer 6. `math_gold` is None for a gold answer
that can't be read: such a row is skipped.

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

from utils.rewards import GOLD_READERS, MAX_TEXT, answer_block, parse_number

# Seconds of processor time for one comparison.
SECONDS = 3
# A decimal of so many digits counts as a number that no decimal equals, such as 1/3.
DIGITS = 12
# Seconds after which a process that doesn't answer is killed.
PATIENCE = 60
# Bytes of memory for a process.
MEMORY = 4 * 2**30
# math-verify reads 100 200 as 300, drops the base of 1011_2, and reads 1 million, 5k and 3i, with
# the word or the letter in \text or \mathrm, as 1, 5 and 3.
MISREAD = re.compile(
    r"[0-9] +[0-9]|[0-9]\}?_|:[^:]*:"
    r"|(?i:hundred|thousand|million|billion|trillion|dozen|squared|cubed|\btens\b|\bmil\b)"
    r"|\\(?:text|mathrm)\{ *[kKijnxyz] *\}"
)
# The answer is $\frac{1}{2}$.
ONE_FORMULA = re.compile(r"([^$0-9\\]*)\$([^$]+)\$([^$0-9\\]*)")
# Answers that are compared as texts: 1011_2 and 1011_{2}, 1:2:3, 2:30 and 2:30 p.m.
AS_TEXT = re.compile(
    r"([0-9A-F]+_\{?[0-9]+\}?|[0-9]+(?: ?: ?[0-9]+)+)"
    r"(?:[ ~\\]|text ?\{)*(?:([APap])\.?[Mm]\.?)?\}?"
)
UPRIGHT = r"(?:\\(?:mathrm|text|textrm|textnormal|operatorname) ?\{|\{\\rm )([ei])\}"
SLANTED = r"\\(?:mathbf|mathit|boldsymbol|bm|textbf|textit) ?\{([A-Za-z])\}"
# Notations that math-verify would misread or miss, and how they are rewritten before it reads them.
REWRITES = [
    # \mathrm e is \mathrm{e}.
    (r"\\(mathrm|text(?:rm|normal)?|mathbf|textbf) ([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    # \log_2 3 and \log_23
    (r"\\log_ ?([0-9]) ?([0-9]+)", r"\\log_{\1}{\2}"),
    # 32,\! 349 and 32{,}349
    (r"(?<=[0-9])(?<![0-9]{4})(?:,\\!|\{,\}|\\,) ?(?=[0-9]{3}(?![0-9]))", ""),
    # the numbers e and i in upright letters, and variables in bold or italic ones
    (rf"(?<![A-Za-z])(?:{UPRIGHT}|{SLANTED})(?![A-Za-z])", r"\1\2"),
    (rf"{UPRIGHT}|{SLANTED}", r"{\1\2}"),
    (r"\\(?:text(?:normal|rm|bf|it|sf)|mbox)(?= ?\{)", r"\\text"),
    (r"\\text ?\{ *,? *(and|or) *\}", r" \1 "),
    # a matrix that is written as an array
    (
        r"(?:\\left)?([(\[]) *\\begin\{array\} *\{[lcr ]+\}((?:(?!\\begin).)*?)\\end\{array\} *"
        r"(?:\\right)?[)\]]",
        r"\\begin{bmatrix}\2\\end{bmatrix}",
    ),
]
REWRITES = [(re.compile(pattern, re.DOTALL), new) for pattern, new in REWRITES]
# What connects the boxes of one list: \boxed{1} and \boxed{2}
BETWEEN_BOXES = re.compile(r"(?:[\s$,;&}]|\\[()\[\],;]|\\q?quad|\\text ?\{|and|or)*")
# What isn't the name of a variable: spaces, borders of formulas, words, and text.
PROSE = re.compile(
    r"[\s$]|\\[,;: ()\[\]]|\\(?:text|mathrm) ?\{[^{}]*\}"
    r"|(?<![\\A-Za-z])(?:[A-Z][a-z]+|[a-z]{3,}|is|so|we|of|be|by)(?![A-Za-z])"
)
NAME = r"(?:\\[A-Za-z]+|[A-Z]+|[a-z])(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?"
# x, \angle A, P(A) and (x, y), but not xy and x + y: x + y = 5 may be a line.
LABEL = re.compile(rf"(?:m?\\[a-z]+)?(?:{NAME})?'*(?:\([^()]*\))?")
# What separates the members of a list.
BORDER = re.compile(r"([,;]|\\[{}]|\b(?:and|or)\b)")
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
# x = in x = 1, x = 2
NAMED = re.compile(rf"(^|[,;]|\band\b|\bor\b)((?:\s|\\[,;: ]|\\q?quad)*)({NAME}) *= *")
INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:eq?|t)|neq?)(?![A-Za-z])")
# The sides before the last one in a member of a list, as in x = 5+6 = 11, but not in 10! = x.
LEFT_SIDES = re.compile(
    rf"(^|[,;])(?:(?:[^,;=<>{{}}]|\{{[^{{}}=]*\}})*=)+(?!\s*{NAME}\s*(?:$|[,;]))"
)
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
# math-verify reads a word without \text as a product of letters, and would take seat for east.
WORDS = re.compile("[A-Za-z]{3,}(?: [A-Za-z]+)*")


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
    if parse_number(gold) is not None or AS_TEXT.fullmatch(gold):
        return gold
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

    \boxed{1} and \boxed{2} are the list 1, 2. The text beside a formula is dropped only if it
    doesn't change it, as in -$5$ or $5$ million.
    """
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    if "\\boxed{" in text:
        # A box that is repeated is one answer.
        return ", ".join(dict.fromkeys(last_boxes(text)))
    text = text.rpartition("####")[2]
    if formula := ONE_FORMULA.fullmatch(text):
        before, inside, after = formula.groups()
        # If a 7 in place of the formula is read as 7, the text beside it changes nothing.
        if parse_number(f"{before}7{after}") == 7:
            text = inside
    return text.strip()


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
    gold, text = pair
    if not text or not gold:
        return False
    names = variable(gold), variable(text)
    # 5 is the answer x = 5, but not the line x + y = 5.
    if not names[1] and not LABEL.fullmatch(names[0]):
        return False
    numbers = parse_number(gold), parse_number(text)
    # y = 5 isn't x = 5.
    if None not in numbers and ("" in names or names[0] == names[1]):
        if numbers[0] == numbers[1]:
            return True
        # agree() knows whether 0.0833333333333 is 1/12.
        if abs(numbers[0] - numbers[1]) > abs(numbers[0]) / 10 ** (DIGITS - 2):
            return False
    codes = [AS_TEXT.fullmatch(x) for x in pair]
    if None not in codes:
        halves = {x[2].lower() for x in codes if x[2]}
        return len({re.sub("[{} ]", "", x[1]) for x in codes}) == 1 and len(halves) < 2
    return is_safe(gold) and is_safe(text) and ask(gold, text)


def variable(text: str) -> str:
    """The side of an equation that has letters, such as x, P(A) or 2x+y, without words. Or ""."""
    sides = [PROSE.sub("", side) for side in text.split("=", 1)]
    return next((x for x in sides if len(sides) > 1 and re.search("[A-Za-z]", x)), "")


def is_safe(text: str) -> bool:
    """Whether math-verify may read the text: it's short, its braces match, it isn't misread."""
    if len(text) > MAX_TEXT or MISREAD.search(text):
        return False
    return before_closing_brace(text + "}") == text


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


# ==== inside of a process ====
@lru_cache(maxsize=1000)
def parse(text):
    """What math-verify reads, an object of sympy with exact numbers, or None."""
    from latex2sympy2_extended.logic import And
    from math_verify import LatexExtractionConfig
    from math_verify import parse as math_parse
    from sympy import Eq

    if WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"
    # The first match is the whole text. math-verify would go on, and take a fraction out of it.
    found = math_parse(
        rf"\boxed{{{text}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not found:
        return None
    parsed = found[0]
    equations = parsed._unsorted_args if isinstance(parsed, And) else [parsed]
    if not all(isinstance(x, Eq) for x in equations):
        return exact(parsed)
    # x = 5+6 = 11 is x = 11, and 5 = x is x = 5.
    left, right = exact(equations[0].lhs), exact(equations[-1].rhs)
    if len(equations) == 1 and right.is_Symbol and not left.is_Symbol:
        left, right = right, left
    return Eq(left, right, evaluate=False)


def exact(parsed):
    """0.5 as 1/2. Only an interval is computed anew: a power may be huge."""
    from sympy import FiniteSet, Float, Interval, Rational, Tuple, Union, evaluate, ordered

    members = getattr(parsed, "_unsorted_args", ())
    # As a set, 1, 1, 2 would be 1, 2, 2.
    if isinstance(parsed, FiniteSet) and len(members) > len(parsed):
        parsed = FiniteSet(Tuple(*ordered(members)))
    with evaluate(isinstance(parsed, Interval | Union)):
        return parsed.xreplace({x: Rational(str(x)) for x in parsed.atoms(Float)})


def value_of(parsed):
    """The 5 of x = 5, f(2) = 5 and x + y = 5. Anything else is its own value.

    2x = 6 and x^2 = 4 have no value: they are to be solved.
    """
    from sympy import Eq, Number

    if not isinstance(parsed, Eq):
        return parsed
    has_value = not parsed.lhs.free_symbols or parsed.lhs.atoms(Number) <= {-1}
    return parsed.rhs if has_value else parsed


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
    # Only the last side of 5+6 = 11 counts.
    text = INEQUALITY.sub("<", re.sub(r"\b(?:and|or)\b", ",", text))
    text = LEFT_SIDES.sub(r"\1", text)
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


def compare(gold, text):
    """Whether the text is the gold answer, or without a text whether the gold answer can be read."""
    from math_verify import verify
    from sympy import Eq, FiniteSet, Set

    gold = with_both_signs(gold)
    if text is None:
        return parse(with_one_name(gold)) is not None
    gold, text = with_same_names(gold, with_both_signs(text))
    a, b = parse(gold), parse(text)
    if a is None or b is None:
        return False
    sets = solution_set(a, gold), solution_set(b, text)
    if all(isinstance(value_of(x), Set) for x in sets):
        a, b = sets
    values = value_of(a), value_of(b)
    if isinstance(a, Eq) and isinstance(b, Eq):
        if a.lhs != b.lhs or values[0] is a:
            # 2x = 6 isn't x = 3: it hasn't been solved.
            is_solved = a.lhs.is_Symbol and not a.rhs.free_symbols
            return not is_solved and is_same_equation(a, b)
    elif isinstance(values[0], Eq) or isinstance(values[1], Eq):
        return False
    a, b = values
    if not is_carried_out(gold, a, text):
        return False
    # math-verify takes the set {1, 2} for the pair (1, 2), and x = 1, y = 2 for 1, 2.
    kinds = [(isinstance(x, FiniteSet), isinstance(x, FiniteSet) and x.has(Eq)) for x in (a, b)]
    if kinds[0] != kinds[1]:
        return False
    return verify([a], [b], timeout_seconds=None)


def with_both_signs(text):
    r"""The list 1 + x, 1 - x for 1 \pm x. math-verify reads no \pm inside of a fraction or a pair."""
    done = member = ""
    for i, piece in enumerate([*BORDER.split(text), ","]):
        # The comma of a pair is no border.
        is_border = i % 2 and all(member.count(x) == member.count(y) for x, y in ["()", "[]", "{}"])
        if not is_border or r"\mp" in member or len(PLUS_MINUS.findall(member)) > 3:
            member += piece
            continue
        members = [member]
        while PLUS_MINUS.search(members[0]):
            members = [PLUS_MINUS.sub(sign, x, count=1) for x in members for sign in "+-"]
        done += ",".join(members) + piece
        member = ""
    return (done + member)[:-1]


def with_one_name(text):
    """x = 1, 2 for x = 1, x = 2, which math-verify reads as two equations."""
    names = [match[3] for match in NAMED.finditer(text)]
    if len(names) < 2 or len(names) != text.count("=") or INEQUALITY.search(text):
        return text
    return f"{names[0]} = " + NAMED.sub(r"\1", text) if len(set(names)) == 1 else text


def with_same_names(gold, text):
    """The two texts, written so that math-verify can compare their lists of values."""
    if "_" not in gold:
        # The values of x may be called x_1 and x_2.
        text = re.sub(r"([A-Za-z])_[0-9](?= *=)", r"\1", text)
    for named, bare in ((gold, text), (text, gold)):
        if "=" in bare or INEQUALITY.search(bare):
            continue
        names = [match[3] for match in NAMED.finditer(named)]
        # In the order of x = 1, y = 2, the values 1, 2 are a pair.
        if len(set(names)) > 1 and len(names) == named.count("="):
            values = [NAMED.sub(r"\1", x) for x in (gold, text)]
            return [x if re.fullmatch(r"\([^()]*\)", x) else f"({x})" for x in values]
    return with_one_name(gold), with_one_name(text)


def solution_set(parsed, text):
    """For inequalities that have been solved for x: x in a set. Anything else stays as it is."""
    from sympy import Eq, FiniteSet, Intersection, Union, evaluate
    from sympy.core.relational import Relational

    members = parsed.args if isinstance(parsed, FiniteSet) else [parsed]
    # -1 < x < 2 has two relations.
    relations = [x for member in members for x in getattr(member, "_unsorted_args", [member])]
    # x > 5 is solved, but neither 2x > 10 nor x > 2x - 5 is.
    solved = [
        isinstance(x, Relational)
        and (x.lhs.is_Symbol or x.rhs.is_Symbol)
        and not (x.lhs.free_symbols and x.rhs.free_symbols)
        for x in relations
    ]
    if not all(solved) or all(isinstance(x, Eq) for x in relations) or len(parsed.free_symbols) > 1:
        return parsed
    sets = [member.as_set() for member in members]
    # Without a word between them, all hold at the same time, if they can.
    values = Intersection(*sets)
    if re.search(r"\bor\b", text) or (values.is_empty and not re.search(r"\band\b", text)):
        values = Union(*sets)
    with evaluate(False):
        return Eq(*parsed.free_symbols, values)


def is_same_equation(a, b):
    """Whether an equation is a multiple of the other, as 2x + 4y = 6 is of y = (3 - x)/2."""
    from sympy import cancel, fraction, radsimp, simplify, together

    sides = [fraction(cancel(together(x.lhs - x.rhs)))[0] for x in (a, b)]
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
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import grader, parser

    grader.sympy_numeric_eq = agree
    convert, config = parser.latex2sympy, ConversionConfig(lowercase_symbols=False)
    # R isn't r, and the i of 5i and of 5 i is the same symbol.
    parser.latex2sympy = lambda text, **options: convert(
        text, conversion_config=config, **options | {"is_real": True}
    )
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
