r"""A reward for answers in mathematics, such as those of MATH and AIME. It needs math-verify:

    pip install math-verify

`math_reward` compares the answer of a completion with the gold answer. The answer is the text of
the only answer block, or, if the completion has no <answer>, the content of the last \boxed{} after
the thought. `math_gold` is None for a gold answer that can't be read: such a row is skipped.

The rule: every number, letter, word, sign, line and step of both texts counts, except for these.
- Layout: spaces, dollar signs, sizes, fonts, \dfrac for \frac, capitals of a word, the commas of
  1,450, and a full stop at the end.
- "The answer is" and the like before an answer, and the name of a value: x = 5 may be 5. But two
  names have to be the same, and of several names each has its own value.
- A unit at the very end, and the same unit after each member of a list: 5 \text{ cm} may be 5. But
  two units have to be the same (of a measure, the first letter: cm and centimeters). A unit is a
  measure, or after a number a word in the plural. A single letter is a unit only in \text or
  \mathrm: in 5m it is a variable.
- The order of a list or a set, but not of a pair. A set may be written without its brackets.
- The steps before the last side, as in x = 5+6 = 11, if the other text has fewer or more of them.
  After \approx stands the answer. But no approximation is right if the gold answer has no \approx.
- The form of a formula. If the gold answer has a variable, any equal form is right. If it has none,
  no operation may be left that the gold answer doesn't hold: 10! isn't the answer 3628800. Letters
  are numbers, in any order (AB - BA can't be read). But the y of dy/dx depends on x, and the a_n of
  a sum over n on n.

So a text is split into the members of its list, and a member into its sides. A side with words is
compared as a text, two plain numbers by the rules of utils/rewards.py. math-verify's parser reads
any other side, as a whole, and sympy compares it exactly.

A policy may write a formula that takes hours. A timer works only in the main thread, and can't stop
a computation inside of C code. So separate processes compare the formulas. There, a timer counts
processor time, so a busy machine doesn't change a reward. A process that doesn't answer is killed.
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
import unicodedata
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
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
# The answer is $\frac{1}{2}$ cm.
BESIDE = r"(?:\b(?:so|thus|hence|therefore|we|have|the|answer|is|[A-Za-z])\b|[\s:=*,])*"
ONE_FORMULA = re.compile(rf"(?i){BESIDE}\$([^$]+)\$(?:[\s*.]|cm|\(in simplest form\))*")
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
    return gold if is_right((gold, None)) else None


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
    r"""The content of the last \boxed{} or list of them, else of the only formula, else the text."""
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
        if content is None or boxes and not BETWEEN_BOXES.fullmatch(rest[len(content) + 1 :]):
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


def is_right(pair: tuple[str, str | None]) -> bool:
    """Whether the text is the gold answer, or without a text whether the gold answer can be read."""
    texts = [x for x in pair if x is not None]
    # They have to be short, and their braces have to match.
    if not all(0 < len(x) <= MAX_TEXT and before_closing_brace(x + "}") == x for x in texts):
        return False
    # A process that is idle answers. Any thread may ask.
    process = IDLE.get()
    try:
        return process.ask(*pair)
    finally:
        IDLE.put(process)


# ==== the processes ====
class Process:
    """A process that compares answers. It's started when it's needed, and killed when it's late."""

    process = None

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


# ==== inside of a process: from a text to members and sides ====
if __name__ == "__main__":
    # Only the processes need these packages: a run itself doesn't load them.
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy.core.function import AppliedUndef

    CONFIG = ConversionConfig(lowercase_symbols=False)
    IMAGINARY = sympy.Symbol("i", real=True)  # what the parser makes of i
    DERIVATIVES = sympy.Derivative, sympy.Subs
    OPERATORS = *DERIVATIVES, sympy.Limit, sympy.Sum, sympy.Product, sympy.Integral

FONT = r"\\(?:text(?:normal|rm|bf|it|sf)?|math(?:rm|bf|it|sf)|boldsymbol|bm|mbox)"
SHORT_UNIT = r"[kcm]?m/(?:s|h|hr|min)|[kcmnd]m|ft|in|mi|yd|[kcm]g|lbs?|oz|hrs?|mph|[AaPp][Mm]"
BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
ENGLISH = r"(?!and\b)(?=[A-Za-z]*[aeiouAEIOU])[A-Za-z]{3,}|(?i:of|at|is|to|on|no|if|sq|cu)"
BARE = r"(\\[A-Za-z]+|[0-9A-Za-z])"
ARRAY = r"\\begin\{array\} *\{[lcr ]+\}((?s:(?!\\begin).)*?)\\end\{array\}"
SIGNS = "le leq leqslant ≤ ge geq geqslant ≥ ne neq ≠ lt gt approx in equiv".split()
SIGNS = dict(zip(SIGNS, "<= <= <= <= >= >= >= >= <> <> <> < > ≈ ∈ =".split(), strict=True))
TYPED = r"√ \sqrt · \cdot ⋅ \cdot × \times ÷ \div ± \pm ∞ \infty ∑ \sum ∫ \int ∂ \partial ′ '"
TYPED += r" ∩ \cap Δ \Delta ℓ \ell ħ \hbar ⩽ \le ⩾ \ge ⁄ /"
TYPED = dict(zip(TYPED.split()[::2], TYPED.split()[1::2], strict=True))
nfkc = partial(unicodedata.normalize, "NFKC")  # 2 for ², and 1⁄2 for ½
# How a text is rewritten before it is read, in this order. Layout leaves a space: 1\!2 isn't 12.
REWRITES = [
    # what people type: x², x₁, ½, √13, λ (for Unicode a lamda) and pi
    ("[⁰¹²³⁴-⁹⁻ⁿ]+", lambda x: "^{" + nfkc(x[0]) + "}"),
    ("[₀-₉]+", lambda x: "_{" + nfkc(x[0]) + "}"),
    ("[¼-¾⅐-⅞]", lambda x: r"\frac{" + nfkc(x[0]).replace("⁄", "}{") + "}"),
    (r"√ *([0-9]+)", r"\\sqrt{\1}"),
    (f"[{''.join(TYPED)}]", lambda x: f"{TYPED[x[0]]} "),
    ("[α-ω]", lambda x: rf"\{unicodedata.name(x[0]).split()[-1].lower()} "),
    (r"\\lamda\b", r"\\lambda"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    # other names of one thing
    (r"\\varnothing|\\\{ *\\\}", r"\\emptyset "),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])\.?", " "),
    # 32,\! 349 and 32{,}349
    (r"(?<=[0-9])(?<![0-9]{4})(?:,\\!|\{,\}|\\,) ?(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\q?quad(?![A-Za-z])", "\n"),
    (r"(?<!\\)\\[,;:! ()\[\]]|\\?\$|~|(?<![\w)])\*\*|\*\*(?![\w(])", " "),
    (r"^\s*(?i:(?:so|thus|hence|therefore|the|final|answer|solutions?|is|are)\b[\s:,=]*)+", ""),
    (r"\b(?:minus|negative) (?=[0-9\\])", "-"),
    (r"(?<![A-Za-z])([AaPp])\. ?([Mm])\b\.?", r"\1\2"),
    (r"^([^=<>]*[A-Za-z])\s+(?:is|are) (?=[^=]*$)", r"\1 = "),
    (rf"\\({'|'.join(SIGNS)})(?![A-Za-z])|[≤≥≠]", lambda x: SIGNS[x[0].strip("\\")]),
    (r"(?<![\\A-Za-z])infinity\b", r"\\infty"),
    (r"\bNo\b", "no"),
    (rf"({FONT}) ([A-Za-z])(?![A-Za-z])", r"\1{\2}"),
    (r"(^[^A-Za-z\\]*[0-9])([ckm]m|kg|ft|[AaPp][Mm])\b", r"\1 \2"),
    (rf"(?<=[0-9}})\]] )({SHORT_UNIT})(?![\w({{])", r"\\text{\1}"),
    (rf"{FONT} ?\{{([^{{}}]*)\}}", lambda x: re.sub("[A-Za-z]+", r" \\text{\g<0>}", f" {x[1]} ")),
    (r"\\text\{(and|or)\}", r"\1"),
    # Three letters with a vowel are a word, unless they are a product: 2abc, abc + 1
    (rf"(?<![\\\w{{}}^)+*/-])(?<![-+*/=] )({ENGLISH})(?![\w^({{]| *[-+*/^])", r"\\text{\1}"),
    (r"\^ *\{? *\\circ *\}?|\\degree(?![A-Za-z])|°", r" \\text{degrees}"),
    (r"\\?%|\b(?:pct|percentage)\b", r" \\text{percent}"),
    (r"\\text\{(?:square|sq)\}\.?\s*(\\text\{[a-z]+\})", r"\1^2"),
    (r"\\text\{(?:cubic|cu)\}\.?\s*(\\text\{[a-z]+\})", r"\1^3"),
    (r"\\[lcd]?dots(?![A-Za-z])|\.\.\.", r" \\text{etc} "),
    (r"\b([0-9][0-9A-F]*) *_ *\{?(\w+)\}?", r"\1\\text{base}\2"),
    ("'+", lambda x: "^{" + r"\prime" * len(x[0]) + "}"),
    # Derivatives: ∂u/∂x, d^2y/dx^2, and y^{(4)} and f^{(n+1)}, which are no powers
    (r"\\partial *(?=[\\A-Za-z^}])", "d"),
    (r"\b(d(?:\^2|\^\{2\})?[A-Za-z]) */ *(d[A-Za-z](?:\^2|\^\{2\})?)(?![\w^])", r"\\frac{\1}{\2}"),
    (r"(?<=[fghuvwyFG]) *\^ *\{ *(\([0-9a-z+-]+\)) *\}", r"^{\\prime \1}"),
    # braces for arguments: \frac12, \sqrt2 and x^(2)
    (r"\\(?:[dtcs]|nice)?(frac|binom)(?![A-Za-z])", r"\\\1"),
    (rf"\\(frac|binom) *{BARE}", r"\\\1{\2}"),
    (rf"(\\(?:frac|binom) *{BRACES}) *{BARE}", r"\1{\2}"),
    (rf"\\?sqrt *(?:\(([^()]*)\)|{BARE})", r"\\sqrt{\1\2}"),
    (r"\^ *\(([^()]*)\)", r"^{\1}"),
    (r"\\log_ ?([0-9]) ?([0-9]+)", r"\\log_{\1}{\2}"),
    (rf"[(\[] *{ARRAY} *[)\]]", r"\\begin{bmatrix}\1\\end{bmatrix}"),
    (r"[\s.,;:]+$", ""),
]
# A member of a list, such as x = 5+6 = 11 cm
Member = namedtuple("Member", "sides signs unit", defaults=[[], ""])
# What separates the members of a list, and the sides of a member
BORDER = r"[,;\n]|\\\\|\b(?:and|or)\b"
RELATION = "<=|>=|<>|[<>=≈∈]"
INEQUALITY = {"<", ">", "<=", ">=", "<>"}
MEASURE = (
    r"(?:\\text\{(?:per|[kcmnd]?m|in|inch|f(?:oo|ee)?t|yd|mi|[kcm]?g|lbs?|oz|[hsNJWVLAKT]|hrs?|min|sec"
    r"|mph|rad|percent|[ap]m|[AP]M|(?:unit|inche|mile|yard|(?:centi|kilo)?(?:meter|gram)|second"
    r"|minute|hour|day)s?)\}\.?(?: *\^ *\{? *-?[0-9] *\}?)?)"
)
COUNTED = r"(?:\\text\{[a-z]+\} *)*\\text\{(?!(?:times|less|plus|minus|always)\})[a-z]+s\}"
UNIT = re.compile(
    rf"(?s)(.*?[\w)}}\]]) *({MEASURE}(?:[ /.*-]*(?:\\cdot)? *{MEASURE})*)"
    rf"|((?:[^A-Za-z]|\\(?:frac|sqrt|pi)\b)*[0-9}}]) *({COUNTED}(?: *(?:\\text\{{)?[CF]\}}?)?)"
)
# A word, but not as an index: v_{\text{max}}
WORD = re.compile(r"(?<!_\{)(?<!_\{ )\\text ?\{[^{}]*[A-Za-z]{2}")
NAME = r"(?:\\(?!sqrt)[A-Za-z]+(?:\{[A-Za-z]+\})?|[A-Z]+|[a-z])(?: *_ *(?:\w|\{[^{}]*\}))?"
GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi"
    r"|rho|sigma|tau|upsilon|(?:var)?phi|chi|psi|omega|ell|hbar)(?![A-Za-z])"
)
# x^*, A^T, f^{-1}, f'' and f^{(4)}
MARK = r"(?:\^ *(?:\*|T|\{ *(?:(?:\\prime *)+(?:\([^()]*\))?|-1|[*T]) *\}))?"
# P(1+r) is a product: probabilities and moments are of events and variables, which are capitals.
FUNCTION = rf"(?:[fghpFGH]|[DEPV](?=.*[A-Z])|(?!{GREEK}|\\pi\b)\\[a-z]+)"
# A value may be named x, m\angle A, \sigma^2, P(A), f'(x), f(x+1), (x, y) and The mean. But xy,
# x^2, x(x+1) and x + y are no names: x + y = 5 may be a line, and x^2 = 4 is to be solved.
LABEL = (
    # not x(x+1) and n(2n)
    r"(?!\\?([A-Za-z]+) *\([^()]*(?<![A-Za-z])\1(?![A-Za-z]))"
    rf"(?:(?:m? *(?!{GREEK}|\\pi\b)\\[a-z]+ *)?{NAME} *{MARK} *(?:\(-?[^()+-]*\)|\[[^][]*\])?"
    rf"|{FUNCTION} *{MARK} *\((?:[^()]|\([^()]*\))*\)"
    r"|\\sigma *\^ *(?:2|\{2\})|\([^()]*,[^()]*\)|(?:\\text\{\w+\}|[\s:])+)"
)
# \Delta x and d^2y/dx^2, which the parser would take for products
ONE_SYMBOL = (
    rf"\\[Dd]elta *(?:{GREEK}|[A-Za-z])"
    rf"|\\frac *(?=\{{ *d *\^){BRACES} *(?=\{{ *d[\\A-Za-z ]){BRACES}"
)
# y', dy/dx, u_x, and sums and the like
DERIVED = re.compile(
    r"\\(?:prime|d+ot|int|sum|prod|lim)|\\frac *\{ *d|[a-z] *_ *\{? *[xyzt]+(?!\w)"
)
MATRIX_POWER = r"[A-Z] *\^ *(?:T|\{ *(?:T|\\top|-1) *\})"
# The parser would read 100 200 as 300, 5_n as 5, x^2_1 as x^2 and gcd(n, 6) as 1, and drop a part
# of 1:2:3 and \mp. It lets the factors of a product change places, also vectors and the matrices of
# A^{-1}BA and AB - BA.
MISREAD = re.compile(
    r"[0-9]\s+[0-9]|(?:[0-9]|\^ *(?:\{[^{}]*\}|\w)) *_|:[^:]*:|\\mp(?![A-Za-z])"
    r"|(?:\\vec *\{?\w\}?|\\nabla) *\\(?:cdot|times)|\\text\{\w\} *\\times *\\text"
    rf"|\\gcd *\([^()]*[A-Za-z]|{MATRIX_POWER} *[A-Za-z]|[A-Z] *{MATRIX_POWER}"
    r"|([A-Z]) *([A-Z])\b.*\2 *\1"
)
# \$50 is neither 50 cents nor 50%.
MONEY = r"\\\$|\bdollars?\b ¢|\bcents?\b €|\beuros?\b £|\bpounds?\b ¥|\byen\b ₹|\brupees?\b".split()
MONEY += [r"\\?%"]
NUMBER_WORD = re.compile(r"(?i)\b(?:hundred|thousand|[a-z]+illion|dozen|ten)s?\b|\bmil\b")
# No operations: powers of ten, matrices, and products that UNFINISHED looks at
NOTATION = r"(?<![\d.])10\^(?:\{[-+]?\d+\}|\d)|\\(?:(?:begin|end)\{[pb]matrix\}|cdot|times|cup)"
OPERATION = r"[!^|]|(?<=\\)(?!(?:pi|infty|mathbb|emptyset|frac|text)\b)[A-Za-z]+|(?<=[\w)}\]])\+"
DIVISION = r"\\frac *\{([0-9]*)\}? *\{?([0-9]*)\}?|([0-9]*)\}? */ *\{?([0-9]*)"
# Plain numbers with a sign between them, or side by side in brackets: 3+2, 3\cdot 4, 2(3)
NUMBER = r"\(?-?[0-9.]+\)?"
UNFINISHED = (
    rf"(?:^|[-+*(\[{{,]) *{NUMBER} *[-+] *{NUMBER}(?! *[\\A-Za-z(^0-9!])"
    rf"|[0-9)] *(?:\*|\\cdot|\\times) *{NUMBER}(?![0-9])|[0-9)] *\( *-?[0-9.]+ *\)|\) *[0-9]"
)


def is_label(member):
    """Whether the first side is a name that the last side may go without, as x and dy/dx are."""
    side = member.sides[0]
    value, result = parse(side), parse(member.sides[-1])
    # y' = z', du/dt = d^2u/dx^2 and u_t = u_{xx} are to be solved.
    if all(map(DERIVED.search, member.sides)):
        return False
    is_integral = isinstance(value, sympy.Integral) and len(value.limits[0]) == 1  # no bounds
    if is_integral or isinstance(value, (*DERIVATIVES, sympy.Limit)):
        return True
    is_symbol = isinstance(value, sympy.Symbol)
    if not is_symbol and not re.fullmatch(LABEL, side):
        return False
    # a_{n+1} = 2a_n is a rule for all n, and a determinant of 0 is an equation.
    if (is_symbol and "+" in value.name) or (r"\det" in side and result == 0):
        return False
    # \sin A = \frac{1}{2} and \ln 1 = 0, but neither \sin y = x nor \ln x = 5
    if isinstance(value, sympy.Function | sympy.exp) and not value.atoms(AppliedUndef):
        is_log = isinstance(value, sympy.log | sympy.exp)
        return not value.free_symbols or (not is_log and getattr(result, "is_number", False))
    # Words can't be read. And y' may be 2x/y, as dy/dx may.
    head = parse(side.partition("(")[0])  # the f of f(x)
    if None in (value, result, head) or (r"\prime" in side and head == value):
        return True
    # x = 2x - 3 is to be solved, f(x) = f(-x) isn't f(-x), and \dot{x} = x isn't x.
    names = {x.name for x in head.free_symbols} - {"prime"}
    names |= {re.sub(r"\w+\{\\?(.*)\}", r"\1", x) for x in names}
    return names.isdisjoint(x.name for x in result.atoms(sympy.Symbol, AppliedUndef))


def name_of(member):
    """The x of x = 5+6 = 11, but not the 5+6 of 5+6 = 11."""
    if not member.signs:
        return ""
    side = member.sides[0]
    sides = [parse(x) for x in (side, member.sides[-1])]
    if None in sides:
        letters = re.sub(rf"\{{.?matrix\}}|(?!{GREEK})\\[A-Za-z]+", "", side)
        is_unknown = re.search("[A-Za-z]", letters) is not None
    else:
        symbols = set().union(*(x.free_symbols | x.atoms(AppliedUndef) for x in sides))
        is_unknown = bool(symbols - {IMAGINARY})
        # A sum of k from 1 to n is n(n+1)/2.
        if is_unknown and isinstance(sides[0], OPERATORS) and is_equal(*sides):
            return ""
    if is_unknown or re.fullmatch(LABEL, side):
        return side
    # e and i are numbers in e^0 = 1, i^2 = -1 and e^2 = 7.39, but names in e^2 + 1 = 5. What can't
    # be read as a number is None or raises TypeError.
    if re.search(r"(?<![\\A-Za-z])[ei]", side):
        with suppress(AttributeError, TypeError):
            a, b = (complex(x.subs(IMAGINARY, sympy.I)) for x in sides)
            return "" if abs(a - b) < 0.01 else side
    return ""


def split(text, pattern):
    """The pieces of a text and what is between them, outside of all brackets. []: none match."""
    pieces, depth, start = [], 0, 0
    for match in re.finditer(rf"({pattern})|(\\begin|[(\[{{])|\\end|[)\]}}]", text):
        if not match[1]:
            depth += 1 if match[2] else -1
        elif depth == 0:
            pieces += [text[start : match.start()].strip(), match[1]]
            start = match.end()
        if depth < 0:
            return []
    return [*pieces, text[start:].strip()]


def read(text):
    """The members of a list."""
    numbers = split(text, r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])")
    text = " ".join(x.replace(",", "") if i % 2 else x for i, x in enumerate(numbers))
    # the list of a set, and of equations in brackets
    inside = re.fullmatch(r"(?s)(|.*[=∈] *)(?:\\?\{|\[(?=.*=))(.+?)(?:\\?\}|\])", text)
    if inside and split(inside[2], ","):
        text = inside[1] + inside[2]
    pieces = [piece for piece in split(text, BORDER)[::2] if piece]
    members, bare = [], []
    for i, piece in enumerate(pieces):
        # 1 + x and 1 - x for 1 \pm x
        if 0 < piece.count(r"\pm") < 4:
            pieces[i + 1 : i + 1] = [piece.replace(r"\pm", sign, 1) for sign in "+-"]
            continue
        chain = split(piece, RELATION)
        sides, signs = chain[::2], chain[1::2]
        # x = 1, 2 is x = 1, x = 2.
        if not signs and members and len(members[-1].signs) == 1:
            sides, signs = [members[-1].sides[0], *sides], members[-1].signs
        # 5 = x is x = 5.
        if signs == ["="] and re.fullmatch(NAME, sides[1]) and not re.fullmatch(NAME, sides[0]):
            sides = sides[::-1]
        members.append(Member(sides, signs))
        bare.append(members[-1])
        match = UNIT.fullmatch(sides[-1])
        if match and not WORD.search(match[1] or match[3]):
            # Of a measure its first letter counts: cm is centimeters.
            unit = re.sub("(?<=[a-z])[a-z]+", "", plain(match[2] or "")) or plain(match[4])
            bare[-1] = Member([*sides[:-1], match[1] or match[3]], signs, unit)
    # 3 feet and 2 inches keep their units.
    members = bare if len({x.unit for x in bare} - {""}) < 2 else members
    return solution_set(members, text) or members


def plain(text):
    """A text without its layout. Two numbers stay two numbers."""
    text = re.sub(r"\\text\{(\w+)\}", lambda x: x[1].lower() if len(x[1]) > 2 else x[1], text)
    text = re.sub(r"([_^]) *\{ *(\w) *\}", r"\1\2", text)
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def brackets(text):
    """The brackets of a pair such as (1, 2], and its members. None: it's no pair."""
    match = re.fullmatch(r"(?s)([(\[]|\\\{)(.*)([)\]]|\\\})", text)
    members = split(match[2], "[,;]")[::2] if match else []
    return (match[1] + match[3], members) if len(members) > 1 else None


# ==== inside of a process: comparing ====
def compare(gold, text):
    """Whether the text is the gold answer, or without a text whether the gold answer can be read."""
    texts = [gold] if text is None else [gold, text]
    money = [{i for i, unit in enumerate(MONEY) if re.search(unit, x)} for x in texts]
    if all(money) and money[0].isdisjoint(money[-1]):
        return False
    for pattern, new in REWRITES:
        texts = [re.sub(pattern, new, x) for x in texts]
    golds = read(texts[0])
    values = [x.sides[-1] for x in golds]
    is_read = [":" in x or WORD.search(x) or parse(x) is not None for x in values]
    if not is_read or not all(is_read) or any(map(NUMBER_WORD.search, texts)):
        return False
    if text is None:
        return True
    if "_" not in texts[0]:
        # The values of x may be called x_1 and x_2.
        texts[1] = re.sub(r"([A-Za-z]) *_ *\{?[0-9]\}?(?= *[=≈])", r"\1", texts[1])
    answers = read(texts[1])
    for named, bare in ((golds, answers), (answers, golds)):
        names = {plain(x.sides[0]) for x in named if x.signs}
        if len(names) == len(named) > 1 and not any(x.signs for x in bare):
            # In the order of x = 1, y = 2, the values 1, 2 are a pair.
            pair = brackets(bare[0].sides[0]) if len(bare) == 1 else None
            bare[:] = [Member([x]) for x in pair[1]] if pair else bare
            return len(golds) == len(answers) and all(map(is_same_member, golds, answers))
    return are_matched(is_same_member, golds, answers)


def are_matched(is_same, golds, texts):
    """Whether the members are the same in any order."""
    if not golds:
        return not texts
    i = next((i for i, text in enumerate(texts) if is_same(golds[0], text)), None)
    return i is not None and are_matched(is_same, golds[1:], texts[:i] + texts[i + 1 :])


def is_same_member(gold, text):
    """Whether two members have the same value, and the same name, unit and steps if both have them."""
    if gold.unit and text.unit and gold.unit != text.unit:
        return False
    if gold.signs == text.signs and [*map(plain, gold.sides)] == [*map(plain, text.sides)]:
        return True
    if INEQUALITY & {*gold.signs, *text.signs}:
        return are_matched(is_same_relation, relations(gold), relations(text))
    if "≈" in gold.signs:
        # x = \sqrt{2} \approx 1.41 has an exact answer, too. But \sin 5 \approx -0.96 is a question.
        end = gold.signs.index("≈") + 1
        exact = Member(gold.sides[:end], gold.signs[: end - 1], gold.unit)
        is_answer = end > 1 or not re.search(r"\\(?!frac|sqrt|pi)|\^", exact.sides[0])
        if is_answer and is_same_member(exact, text):
            return True
    elif "≈" in text.signs:
        return False
    name, other = name_of(gold), name_of(text)
    steps = gold.sides[bool(name) : -1], text.sides[bool(other) : -1]
    if len(gold.sides) == len(text.sides) and not all(map(is_same_value, *steps)):
        return False
    if len(gold.sides) != len(text.sides) and not all(is_step(x, gold.sides[-1]) for x in steps[0]):
        return False
    a, b = plain(name), plain(other)
    # y' may be dy/dx, and y(x) = 2x may be y = 2x.
    if (r"\prime" in a) != (r"\prime" in b):
        a, b = (re.sub(r"\\frac\{d(\w)\}\{d\w\}|(\w)\^\{\\prime\}", r"\1\2'", x) for x in (a, b))
    if ("(" in a) != ("(" in b):
        for letter in re.findall(r"\(([a-z]|\\[a-z]+)\)$", a if "(" in a else b):
            if letter in gold.sides[-1]:
                a, b = (x.removesuffix(f"({letter})") for x in (a, b))
    if name and other and a != b and not WORD.search(name + other):
        a, b = (relations(Member([x.sides[0], x.sides[-1]], ["="]))[0] for x in (gold, text))
        # x = 3 is solved: it isn't 2x = 6.
        is_solved = a is not None and a.lhs.is_Symbol and not a.rhs.free_symbols
        return not is_solved and is_same_relation(a, b)
    # The area may be called A.
    if name and other and a != b and (min(len(a), len(b)) > 1 or a[0].lower() != b[0].lower()):
        return False
    # For x + y = 5, 5 isn't right: it may be a line. For 6, x + y = 6 is, but not 2x = 6, which is
    # to be solved.
    if bool(name) != bool(other) and not is_label(gold if name else text):
        if name or re.search("[0-9]", other):
            return False
    return is_same_value(gold.sides[-1], text.sides[-1])


def is_step(side, result):
    """Whether an answer may leave out this side before the result, unlike the y of x = y = 3."""
    a, b = parse(side), parse(result)
    if a is None or b is None:
        return True
    if isinstance(a, sympy.Symbol | AppliedUndef):
        return False
    # In A = ab = 12, ab is a formula of the number 12. But x = 2y = 4z isn't x = 4z.
    return not a.free_symbols or not b.free_symbols - {IMAGINARY} or is_equal(a, b)


def is_same_value(gold, text):
    """Whether two sides are the same formula, number, pair or text."""
    if plain(gold) == plain(text):
        return True
    # 2:30 isn't 1:15.
    if ":" in gold and ":" in text:
        return False
    pairs = brackets(gold), brackets(text)
    if None not in pairs:
        (kind, golds), (other, texts) = pairs
        return kind == other and len(golds) == len(texts) and all(map(is_same_value, golds, texts))
    a, b = parse(gold), parse(text)
    return None not in (a, b) and is_carried_out(gold, a, text) and is_equal(a, b)


@lru_cache(maxsize=1000)
def parse(text):
    """An object of sympy with exact numbers, or None."""
    is_letter = re.search(r"(?<![\\A-Za-z])[A-DF-Za-df-z]", text)
    if WORD.search(text):
        return None
    if not is_letter and parse_number(text) is not None:
        return sympy.Rational(parse_number(text))
    if MISREAD.search(text):
        return None
    text = re.sub(r"\\text *\{([A-Za-z])\}", r" \1 ", text)
    # The parser takes \gamma + 1 for a function of 1, I_1 for the number i, and x^T for x. With an
    # accent such as \breve it takes anything for one symbol.
    text = re.sub(r"\\([gG]amma)(?![A-Za-z]| *\()", r"\\breve{\1}", text)
    text = re.sub(r"(?<!\\)I", r"\\hslash ", text)
    text = re.sub(ONE_SYMBOL, lambda x: f"\\breve{{{re.sub('[^A-Za-z0-9]', '', x[0])}}}", text)
    text = re.sub(r"\^ *(?:T|\{T\})", "^{(T)}", text)
    with suppress(Exception):
        parsed = latex2sympy(text, None, True, False, None, CONFIG)
        # Only an interval is computed anew: a power may be huge.
        with sympy.evaluate(isinstance(parsed, sympy.Interval | sympy.Union)):
            parsed = parsed.replace(lambda x: isinstance(x, OPERATORS), depend)
            # In dx/dy at x = 1, the parser would derive 1.
            if any(x.expr.is_number for x in parsed.atoms(sympy.Derivative)):
                return None
            # 0.5 is 1/2.
            return parsed.xreplace({x: sympy.Rational(str(x)) for x in parsed.atoms(sympy.Float)})


def depend(operator):
    """The operator with y(x) for the y of dy/dx, and with a_n(n) for the a_n of a sum over n.

    For sympy a symbol is a constant, so dy/dx would be 0, and the sum a multiple of a_n.
    """
    body, limit = operator.args[:2]
    variables = [limit] if isinstance(operator, sympy.Limit) else operator.variables
    names = {x: x.name for x in body.free_symbols.difference(variables)}
    # Under d/dx, all symbols depend on x. Else those with the index x do, and in an integral or a
    # limit also the usual names of functions: the integral of c is cx, but that of y isn't yx.
    if not isinstance(operator, sympy.Derivative):
        dependent = ".*_.*(?:" + "|".join(re.escape(x.name) for x in variables) + ")"
        if isinstance(operator, sympy.Integral | sympy.Limit):
            dependent += r"|[fuvwyFP](?![a-z])|psi|.*\{"
        names |= {x: x.name for x in body.atoms(AppliedUndef)}
        names = {x: name for x, name in names.items() if re.match(dependent, name)}
    # dy/dx at x = 1 isn't dy/dt at t = 1, so the function's name has its variable. The symbol is an
    # argument, too, so that it stays free.
    functions = {x: sympy.Function(f"{name} of {variables}") for x, name in names.items()}
    return operator.xreplace({x: f(*variables, x) for x, f in functions.items()})


def is_carried_out(gold, value, text):
    """Whether a text asks for no operation that gold, which stands for value, doesn't hold."""
    if value.free_symbols or parse_number(text) is not None:
        return True
    kinds = []
    for side, is_whole in ((gold, True), (text, getattr(value, "is_integer", False))):
        found = {"*"} if re.search(UNFINISHED, side) else set()
        side = re.sub(r"\s*[-+]", "+", re.sub(NOTATION, " ", side))
        found.update(re.findall(OPERATION, side))
        # 3/4 is a number. But 6/2 is a division, and so is any whose value is a whole number.
        for groups in re.findall(DIVISION, side):
            numbers = [int(x) for x in groups if x]
            if is_whole or len(numbers) == 2 and numbers[0] % numbers[1] == 0:
                found.add("/")
        kinds.append(found)
    return kinds[1] <= kinds[0]


def relations(member):
    """Each relation of a chain: -1 < x < 2 has two. None: it can't be read."""
    sides = [parse(side) for side in member.sides]
    if None in sides or {"≈", "∈"} & set(member.signs):
        return [None]
    signs = ["==" if sign == "=" else sign for sign in member.signs]
    return [sympy.Rel(*sides[i : i + 2], sign, evaluate=False) for i, sign in enumerate(signs)]


def is_same_relation(gold, text):
    """Whether a relation is a multiple of the other, as 2x + 4y = 6 is of y = (3 - x)/2."""
    if gold is None or text is None:
        return False
    gold, text = (x.reversed if ">" in x.rel_op else x for x in (gold, text))
    sides = [x.lhs - x.rhs for x in (gold, text)]
    if gold.rel_op == "==":
        sides = [sympy.fraction(sympy.cancel(sympy.together(x)))[0] for x in sides]
    ratio = sympy.simplify(sympy.radsimp(sympy.simplify(sides[0] / sides[1])))
    if gold.rel_op != text.rel_op or not gold.free_symbols or not ratio.is_number:
        return False
    return bool(ratio.is_positive or gold.rel_op in ("==", "!=") and ratio.is_negative)


def solution_set(members, text):
    """The set of inequalities that have been solved, as a member. None: they haven't."""
    chains = [relations(x) if INEQUALITY & set(x.signs) else [None] for x in members]
    names = set()
    for x in sum(chains, []):
        # x > 5 is solved, but neither 2x > 10 nor x > 2x - 5 is.
        ends = [] if x is None else [x.lhs, x.rhs]
        if sorted(y.is_Symbol + 2 * y.is_number for y in ends) != [1, 2]:
            return None
        names |= x.free_symbols
    if len(names) != 1:
        return None
    # Without a word between them, all hold at the same time, if they can.
    values = sympy.And(*sum(chains, [])).as_set()
    if re.search(r"\bor\b", text) or (values.is_empty and not re.search(r"\band\b", text)):
        values = sympy.Or(*(sympy.And(*chain) for chain in chains)).as_set()
    latex = re.sub(r"\\(?:left|right)", "", sympy.latex(values))
    return [Member([sympy.latex(names.pop()), latex], ["∈"], members[-1].unit)]


def is_equal(a, b):
    """Whether two objects of sympy are equal, or one is a long decimal of the other."""
    if a == b:
        return True
    if isinstance(a, sympy.Set) and isinstance(b, sympy.Set):
        return bool(a.symmetric_difference(b).is_empty)
    if a.is_Matrix and b.is_Matrix:
        a, b = a.doit(), b.doit()
        return a.shape == b.shape and all(map(is_equal, a.flat(), b.flat()))
    if a.is_Matrix or b.is_Matrix or not all(isinstance(x, sympy.Expr) for x in (a, b)):
        return False
    difference = a - b
    if difference.free_symbols:
        return sympy.simplify(difference) == 0
    try:
        # This computes two digits of the difference, from up to 1000 digits of the numbers.
        difference = difference.evalf(2, maxn=1000, strict=True)
    except sympy.core.evalf.PrecisionExhausted:
        # They are equal to 1000 digits, or contain something that isn't computed so exactly.
        return difference.evalf(15, chop=True) == 0
    # How many digits follow the point of a decimal? None: no decimal is this number, such as 1/3.
    ends = []
    for x in (a, b):
        powers = range(x.q.bit_length()) if x.is_Rational else []
        ends.append(next((n for n in powers if pow(10, n, x.q) == 0), None))
    if difference == 0 or (ends[0] is None) == (ends[1] is None):
        return difference == 0
    # All digits of the decimal are right: it is rounded or cut off.
    decimal, digits = (b, ends[1]) if ends[0] is None else (a, ends[0])
    is_long = digits > 0 and abs(decimal) * 10**digits >= 10 ** (DIGITS - 1)
    return bool(is_long and abs(difference) * 10**digits < 1)


def work(seconds):
    """Answer every line of stdin, the JSON of [gold, text], with yes or no."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()
    # When the time is up, this raises KeyboardInterrupt. The packages catch every Exception.
    signal.signal(signal.SIGPROF, signal.default_int_handler)
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
