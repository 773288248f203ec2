r"""A reward for answers in mathematics, such as those of MATH and AIME. It needs math-verify:

    pip install math-verify

`math_reward` compares the answer of a completion with the gold answer. The answer is the text of
the only answer block, or, if the completion has no <answer>, the content of the last \boxed{} after
the thought. Two numbers are compared by the rules of utils/rewards.py. Everything else is compared
by math-verify: roots, intervals, sets, matrices, equations, polynomials, words. `math_gold` is None
for a gold answer that can't be read: such a row is skipped.

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
# Seconds after which a process that doesn't answer is killed.
PATIENCE = 60
# Bytes of memory for a process.
MEMORY = 4 * 2**30
# math-verify reads 100 200 as 300, drops the base of 1011_2, and reads 1 million, 5k and 3i, with
# the word or the letter in \text or \mathrm, as 1, 5 and 3.
MISREAD = re.compile(
    r"[0-9] +[0-9]|[0-9]\}?_"
    r"|(?i:hundred|thousand|million|billion|trillion|dozen|squared|cubed|\btens\b|\bmil\b)"
    r"|\\(?:text|mathrm)\{ *[kKi] *\}"
)
# The answer is $\frac{1}{2}$.
ONE_FORMULA = re.compile(r"([^$0-9\\]*)\$([^$]+)\$([^$0-9\\]*)")
# 1011_2 and 1011_{2}
BASE = re.compile(r"([0-9A-F]+)_\{?([0-9]+)\}?")
# \log_2 3 and \log_23 are \log_{2}{3}.
LOG_BASE = re.compile(r"\\log_ ?([0-9]) ?([0-9]+)")
# LaTeX that asks for no operation: units, degrees, powers of ten, and commands that only name a thing
# or change how a text looks.
NOTATION = re.compile(
    r"\\(?:text|mathrm|mbox) ?\{[^{}]*\}(?:\^\{?-?[0-9]\}?)?"
    r"|\^ ?\{? ?\\circ ?\}?"
    r"|(?<![0-9.])10\^(?:\{[-+]?[0-9]+\}|[0-9])"
    r"|\\(?:begin|end)\{[pb]?matrix\}"
    r"|\\(?:boxed|left|right|displaystyle|degree|quad|qquad|cdot|times|pm|cup|in)(?![A-Za-z])"
)
CONSTANTS = {"pi", "infty", "mathbb", "emptyset", "varnothing"}
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
    if parse_number(gold) is not None or BASE.fullmatch(gold):
        return gold
    return gold if is_safe(gold) and ask(gold) else None


GOLD_READERS[math_reward] = math_gold


def final_answer(completion: str) -> str:
    r"""The answer in the only answer block or, without <answer>, in the last \boxed{}, else ""."""
    if "<answer>" in completion:
        block = answer_block(completion)
        # Two boxes in the block are two guesses.
        return last_boxed(block) if block.count("\\boxed") < 2 else ""
    conclusion = completion.rpartition("</think>")[2]
    return last_boxed(conclusion) if "\\boxed" in conclusion else ""


def last_boxed(text: str) -> str:
    r"""The content of the last \boxed{}. Without one, the only formula of the text, or the text.

    The text beside a formula is dropped only if it doesn't change it, as in -$5$ or $5$ million.
    """
    text = LOG_BASE.sub(r"\\log_{\1}{\2}", text)
    _, box, rest = text.rpartition("\\boxed{")
    if not box:
        text = text.rpartition("####")[2]
        if formula := ONE_FORMULA.fullmatch(text):
            before, inside, after = formula.groups()
            # If a 7 in place of the formula is read as 7, the text beside it changes nothing.
            if parse_number(f"{before}7{after}") == 7:
                text = inside
        return text.strip()
    depth = 1
    for i, character in enumerate(rest[:MAX_TEXT]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i].strip()
    # The brace is missing: the text has been cut off.
    return ""


def is_right(pair: tuple[str, str]) -> bool:
    """Whether the second text is the same answer as the first, the gold answer."""
    gold, text = pair
    if not text or not gold:
        return False
    numbers = parse_number(gold), parse_number(text)
    if None not in numbers:
        return numbers[0] == numbers[1]
    bases = BASE.fullmatch(gold), BASE.fullmatch(text)
    if None not in bases:
        return bases[0].groups() == bases[1].groups()
    return is_safe(gold) and is_safe(text) and ask(gold, text)


def is_safe(text: str) -> bool:
    """Whether math-verify may read the text: it's short, its braces match, it isn't misread."""
    if len(text) > MAX_TEXT or MISREAD.search(text):
        return False
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


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
    """What math-verify reads: a list that is empty, or has one object of sympy."""
    from math_verify import LatexExtractionConfig
    from math_verify import parse as math_parse

    if WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"
    return math_parse(
        rf"\boxed{{{text}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def operations(text):
    """The kinds of operation that a text asks for, such as {"!", "^", "sqrt", "+"}."""
    text = NOTATION.sub(" ", text)
    kinds = set(re.findall(r"[!^|⌊⌈√]|[a-z]{2,}(?= *\()", text))
    kinds |= set(re.findall(r"\\([A-Za-z]+)", text)) - CONSTANTS
    kinds -= {"frac", "dfrac", "tfrac", "cfrac"}  # is_carried_out looks at divisions
    if re.search(r"[0-9A-Za-z})\]] *[-+]", text):
        kinds.add("+")
    return kinds


def is_carried_out(gold, golds, text):
    """Whether a text asks for no operation that the gold answer doesn't hold.

    Otherwise a policy would earn the reward by copying the question: 10! for 3628800. A gold answer
    with a variable may be written in any form. golds is what math-verify reads in gold.
    """
    from sympy import Eq

    values = [x.rhs if isinstance(x, Eq) else x for x in golds]  # x = 5 is 5
    if any(getattr(value, "free_symbols", None) for value in values):
        return True
    if not operations(text) <= operations(gold):
        return False
    if UNFINISHED.search(text) and not UNFINISHED.search(gold):
        return False
    if DIVISION.search(gold):
        return True
    # 3/4 is a number, but 6/2 is a division. So is any division whose value is a whole number.
    divisions = DIVISION.findall(NOTATION.sub(" ", text))
    if any(getattr(value, "is_integer", False) for value in values):
        return not divisions
    fractions = [[int(number) for number in numbers if number] for numbers in divisions]
    return not any(len(x) == 2 and x[1] > 0 and x[0] % x[1] == 0 for x in fractions)


def compare(gold, text):
    """Whether math-verify finds that the text is the gold answer."""
    from math_verify import verify
    from sympy import FiniteSet

    golds = parse(gold)
    if text is None or not golds:
        return bool(golds)
    texts = parse(text)
    # math-verify takes the set {1, 2} for the pair (1, 2).
    if [isinstance(x, FiniteSet) for x in golds] != [isinstance(x, FiniteSet) for x in texts]:
        return False
    if not is_carried_out(gold, golds, text):
        return False
    # Decimals are compared to 12 places: 0.333333 isn't 1/3.
    return verify(golds, texts, float_rounding=12, timeout_seconds=None)


class Late(BaseException):
    """The time is up. The packages catch every Exception, but not this."""


def on_timer(number, frame):
    raise Late


def work(seconds):
    """Answer every line of stdin, the JSON of [gold, text], with yes or no."""
    import math_verify  # noqa: F401

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
