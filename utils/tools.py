"""Tools that a policy can call, and what runs them. Standard library only.

A tool is a function from text to text. What it is given is written by a policy that is paid to find
odd inputs, so `run_tool` keeps every fault of a tool inside the response: a tool that raises, takes
too long or returns no text has answered `ERROR`, and so has one that is called with more than
MAX_CHARS characters; a longer answer is cut.
"""

import ast
import operator
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from threading import Thread

ERROR = "=error"
MAX_CHARS = 500  # of a call and of an answer
SECONDS = 5.0  # for the calls of a turn, which run at the same time

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.USub: operator.neg}
OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculator(call: str) -> str:
    """The value of Python's numbers with + - * / and brackets, to 15 digits; anything else raises.

    The text is parsed by Python's ast and never evaluated. Fractions are exact, so that 100.1-100 is
    0.1; there are no powers, so that no value of MAX_CHARS characters takes long.
    """

    def value(node):
        if isinstance(node, ast.Constant):
            if type(node.value) not in (int, float):
                raise ValueError(f"{node.value!r} is no number")
            return Fraction(repr(node.value))  # inf raises
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](value(node.operand))
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    number = value(ast.parse(call.strip(), mode="eval").body)
    return f"{float(number):.15g}"  # too large raises


def run_tool(tool: Callable[[str], str], calls: list[str]) -> list[str]:
    """The answer to each call, "=" and what the tool returns, or ERROR. Each has a thread.

    A thread cannot be stopped: one that is late is left alone, and what it returns is lost. A tool
    that may compute for ever belongs in a process of its own (subprocess.run has a timeout).
    """
    answers = [ERROR] * len(calls)

    def answer(k):
        with suppress(Exception):
            if len(calls[k]) <= MAX_CHARS:
                answers[k] = "=" + tool(calls[k])[:MAX_CHARS]

    threads = [Thread(target=answer, args=[k], daemon=True) for k in range(len(calls))]
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(answers)  # as they are now
