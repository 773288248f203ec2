"""The reward for answers in mathematics: its judgements, its limits, and texts that try to stall it."""

import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from conftest import read_table

from utils import math_reward as module
from utils.math_reward import final_answer, last_boxed, math_gold, math_reward

# The longest comparison of these tests takes a sixth of a second.
module.SECONDS = 1
installed = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify")
CASES = []
for heading, label, pair in read_table("math_answers.txt"):
    gold, _, text = pair.partition(" |")
    CASES.append((heading, float(label), gold, text))
# Each is another answer than every other.
DIFFERENT = r"""
\frac{1}{2^{99}} | \frac{1}{2^{98}} | 0 | -7 | \pm 7 | \sqrt{2} | -\sqrt{2} | 1-\frac{1}{e} | 6-5i
12\% | 1011_2 | \frac{1+\sqrt{5}}{2} | \frac{1 \pm \sqrt{5}}{2} | 1, 2 | (1, 2) | (2, 1) | [1, 2) | [1, 2]
x < 2 | x \le 2 | (1, 2), (3, 4) | (1, 4), (3, 2) | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix} | y = 2x + 3 | 2x + 3y - 5 = 0 | x^2 + y^2 = 4 | xy = 3
y^2 = 4x | x^2 - 1 | a^2b | R - r | x = 8 | y = 8 | x = 8, y = 9 | \text{east} | \text{(A)} | \text{(B)}
\infty | \mathbb{R} | 2:30
"""
DIFFERENT = DIFFERENT.strip().replace("\n", " | ").split(" | ")
# math-verify would compute these for hours, or reads them in none.
HOSTILE = [
    "9^{9^{9^9}}",
    "(" * 400 + "1" + ")" * 400,
    r"\frac{1}{" * 100 + "1" + "}" * 100,
    r"\boxed{" * 100_000,
    "{" * 100_000,
    "1" * 100_000,
    "\x00\ud83d",
]


def block(text):
    return f"<think>so</think><answer>{text}</answer>"


@installed
def test_answers_are_judged_as_a_person_judges_them():
    """All at once, so they are also judged in their order."""
    golds = [gold for _, _, gold, _ in CASES]
    assert [gold for gold in set(golds) if math_gold(gold) is None] == []
    judged = math_reward([block(text) for *_, text in CASES], golds)
    assert [case for case, label in zip(CASES, judged, strict=True) if case[1] != label] == []
    assert math_reward([], []) == []
    with pytest.raises(ValueError):
        math_reward(["1"], [])


@installed
def test_an_answer_is_only_equal_to_itself():
    pairs = []
    for i, gold in enumerate(DIFFERENT):
        # Of each two answers, one is the gold answer: comparing both ways would take twice as long.
        pairs += [(gold, text) for k, text in enumerate(DIFFERENT) if (i + k) % 2 == (i < k)]
    assert len(pairs) == len(DIFFERENT) * (len(DIFFERENT) + 1) / 2
    judged = math_reward([block(text) for _, text in pairs], [gold for gold, _ in pairs])
    assert [x for x, label in zip(pairs, judged, strict=True) if label != (x[0] == x[1])] == []


@installed
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_text_that_takes_for_ever_is_wrong(text):
    """An honest answer beside it is still right."""
    # This gold answer has the same operations, so math-verify computes the text.
    gold = r"9^{9} + 5! + \sum_{n=1}^{3} \int_0^1 \sin(x) dx"
    texts, golds = [block(text), text, block(r"\sqrt{8}")], [gold, gold, r"2\sqrt{2}"]
    for process in module.PROCESSES:
        process.start()
    started = [process.process for process in module.PROCESSES]
    assert math_reward(texts, golds) == [0.0, 0.0, 1.0]
    # The time was up inside of the process. It wasn't killed.
    assert [process.poll() for process in started] == [None] * len(started)


@installed
def test_a_thread_may_ask():
    """A signal reaches the main thread only, so the time limit can't be a signal."""
    handler = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGPROF)
    with ThreadPoolExecutor(1) as pool:
        texts, golds = [block(HOSTILE[0]), block(r"\sqrt{8}")], [r"2\sqrt{2}"] * 2
        assert pool.submit(math_reward, texts, golds).result() == [0.0, 1.0]
    assert handler == (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGPROF))


@installed
def test_a_process_that_is_late_or_dead_is_replaced(monkeypatch):
    question = [block("\\sqrt{8}")], ["2\\sqrt{2}"]
    assert math_reward(*question) == [1.0]
    with monkeypatch.context() as patch:
        patch.setattr(module, "PATIENCE", 0.1)
        assert math_reward([block(HOSTILE[0])], [r"2^{\sqrt{2}}"]) == [0.0]
        # It was killed. Otherwise it would go on for the second that it has.
        assert any(process.process is None for process in module.PROCESSES)
    for process in module.PROCESSES:
        process.start()
        process.process.kill()
        process.process.wait()
    assert [math_reward(*question)[0] for _ in module.PROCESSES] == [0.0] * len(module.PROCESSES)
    assert math_reward(*question) == [1.0]


@installed
def test_gold_answers_that_cannot_be_read():
    assert math_gold(r"so it is \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert math_gold("9 * 2\n#### 18") == "18"
    for gold in (
        "",
        "0.\\overline{3}",
        "\\frac{1",
        "5 million",
        "x" * 2000,
        "\\boxed{5",
        "9^{9^{9^9}}!(",
        # math-verify alone reads a half.
        "\\frac{1}{2}, \\frac{1 \\mp \\sqrt{5}}{2}",
    ):
        assert math_gold(gold) is None, gold
        assert math_reward([block(gold)], [gold]) == [0.0]


def test_the_answer_of_a_completion():
    assert final_answer(block("18")) == "18"
    assert final_answer(block("it is \\boxed{18}")) == "18"
    assert final_answer("<answer>17</answer><answer>18</answer>") == ""
    assert final_answer("<answer>\\boxed{18}") == ""
    assert (
        final_answer("\\boxed{17}</think>So \\boxed{\\frac{1}{\\sqrt{2}}}.")
        == "\\frac{1}{\\sqrt{2}}"
    )
    assert final_answer("\\boxed{17}</think>18") == ""
    assert final_answer("so $\\boxed{17}$ and $\\boxed{18}$.") == "17, 18"
    assert final_answer(block("\\boxed{17}, no, \\boxed{18}")) == ""
    assert final_answer(block("\\boxed{18}, \\boxed{18}")) == "18"
    assert final_answer("18") == ""
    assert last_boxed("\\boxed{17}, no, \\boxed{18}") == "18"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "PROCESSES", [module.Process()])
    with pytest.raises(ModuleNotFoundError, match="pip install math-verify"):
        math_gold("18")
