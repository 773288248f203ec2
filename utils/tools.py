"""Tools that a policy can call, and run_tool, which runs them. Standard library only.

A tool is a function from text to text. The policy writes the text of a call, and a policy that is
paid for odd inputs will find them. So run_tool turns every fault of a tool into an answer:

- The answer is ERROR if the tool raises, takes too long or returns something that isn't text.
- The answer is ERROR if the call has more than MAX_CHARS characters.
- run_tool cuts an answer after MAX_CHARS characters.
"""

import ast
import operator
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from threading import Thread

ERROR = "=error"
# The limit for a call, and for the text that a tool returns.
MAX_CHARS = 500
# All calls of a turn run at the same time and share this limit.
SECONDS = 5.0

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(call: str) -> str:
    """The value, to 15 digits, of an expression with Python's numbers, + - * / and brackets.

    Any other text raises an error. Python's ast parses the text and never executes it. Fractions
    are exact, so 100.1-100 is 0.1. There are no powers, so MAX_CHARS characters can't make a number
    that takes long to compute.
    """
    expression = ast.parse(call.strip(), mode="eval").body
    # float raises if the value is too large for it.
    return f"{float(exact_value(expression)):.15g}"


def exact_value(node: ast.expr) -> Fraction:
    """The value of a parsed expression. An operator that isn't in OPERATORS raises KeyError."""
    if isinstance(node, ast.Constant):
        # isinstance would accept True, which is an int, too.
        if type(node.value) not in (int, float):
            raise ValueError(f"{node.value!r} is not a number")
        # Fraction(0.1) would be the binary fraction next to 0.1. The text "0.1" is exact. Python
        # reads 1e999 as inf, and Fraction raises an error for the text "inf".
        return Fraction(repr(node.value))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](exact_value(node.operand))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](exact_value(node.left), exact_value(node.right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def run_tool(tool: Callable[[str], str], calls: list[str]) -> list[str]:
    """The answer to each call: "=" and what the tool returns, or ERROR.

    Each call runs in a thread. Python can't stop a thread, so a late thread goes on in the
    background, and its answer is lost. A tool that may compute forever should start a process:
    subprocess.run has a timeout.
    """
    answers = [ERROR] * len(calls)

    def answer(k):
        if len(calls[k]) > MAX_CHARS:
            return
        with suppress(Exception):  # answers[k] stays ERROR
            answers[k] = "=" + tool(calls[k])[:MAX_CHARS]

    # The program can end while a daemon thread still runs.
    threads = [Thread(target=answer, args=[k], daemon=True) for k in range(len(calls))]
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    # A late thread can't change the copy.
    return list(answers)
