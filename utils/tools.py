"""Tools that a policy can call, and run_tool, which runs them. Standard library only.

A tool is a function from text to text. The policy writes the text of a call, and a policy that is
paid for odd inputs will find them. So run_tool turns every fault of a tool into an answer:

- The answer is ERROR if the tool raises, takes too long or returns something that isn't text.
- The answer is ERROR if the call has more than MAX_CHARS characters.
- A longer answer than MAX_CHARS characters is cut.
"""

import ast
import operator
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from threading import Thread

ERROR = "=error"
MAX_CHARS = 500  # of a call, and of what a tool returns
SECONDS = 5.0  # for all calls of a turn together, because they run at the same time

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(call: str) -> str:
    """The value, to 15 digits, of Python's numbers with + - * / and brackets.

    Raises for everything else. Python's ast parses the text, and nothing of it is ever executed.
    Fractions are exact, so 100.1-100 is 0.1. There are no powers, so MAX_CHARS characters can't
    make a number that takes long to compute.
    """
    expression = ast.parse(call.strip(), mode="eval").body
    # float raises if the value is too large for it.
    return f"{float(exact_value(expression)):.15g}"


def exact_value(node: ast.expr) -> Fraction:
    """The value of a parsed expression; raises KeyError for any other operator than OPERATORS."""
    if isinstance(node, ast.Constant):
        # Not isinstance: True is an int, too.
        if type(node.value) not in (int, float):
            raise ValueError(f"{node.value!r} is not a number")
        # Fraction(0.1) would be the binary fraction next to 0.1. The text "0.1" is exact. Fraction
        # raises for "inf", which is how Python reads 1e999.
        return Fraction(repr(node.value))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](exact_value(node.operand))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](exact_value(node.left), exact_value(node.right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def run_tool(tool: Callable[[str], str], calls: list[str]) -> list[str]:
    """The answer to each call: "=" and what the tool returns, or ERROR.

    Each call runs in a thread. Python can't stop a thread, so a late one goes on in the background,
    and what it returns is lost. A tool that may compute forever should start a process, for which
    subprocess.run has a timeout.
    """
    answers = [ERROR] * len(calls)

    def answer(k):
        if len(calls[k]) > MAX_CHARS:
            return
        with suppress(Exception):  # answers[k] stays ERROR
            answers[k] = "=" + tool(calls[k])[:MAX_CHARS]

    # A daemon thread doesn't keep the program alive at its end.
    threads = [Thread(target=answer, args=[k], daemon=True) for k in range(len(calls))]
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return list(answers)  # a copy, which a late thread can't change
