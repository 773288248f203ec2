"""The bundled data: builders reproduce it, rewards read its solutions, and faults come at the builders' rates.

Test questions of sums and hints aren't in their training data. The weights of the bundled models aren't rebuilt.
"""

import json
import random
from pathlib import Path

import build_adder
import build_arithmetic
import build_caller
import build_hints
import build_sums
import pytest
from conftest import ROOT, SMALL_TASK

import grpo_process
from utils.rewards import accuracy_reward, format_reward

ASSETS = ROOT / "assets"


def test_the_additions_are_the_builders():
    splits = build_adder.make_questions(random.Random(1))
    for name, pairs in zip(("train", "test"), splits, strict=True):
        lines = (ASSETS / "addition" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        expected = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
        assert list(map(json.loads, lines)) == expected


def test_the_arithmetic_is_the_builders():
    splits = build_arithmetic.make_questions()
    for name, rows in zip(("train", "test"), splits, strict=True):
        lines = (ASSETS / "arithmetic" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert list(map(json.loads, lines)) == rows
    held_out = {row["question"] for row in splits[1]}
    assert len(held_out) == 200 and not held_out & {row["question"] for row in splits[0]}


def test_the_tests_own_task_is_the_beginning_of_the_additions():
    for name, length in (("train.jsonl", 400), ("test.jsonl", 40)):
        whole = (ASSETS / "addition" / name).read_text(encoding="utf-8").splitlines()
        assert Path(SMALL_TASK, name).read_text(encoding="utf-8").splitlines() == whole[:length]


def test_the_sums_are_the_builders(tmp_path):
    """The builder reproduces the files byte by byte. No test question repeats training numbers, in any order."""
    train, test = build_sums.make_questions(random.Random(1))
    build_sums.write_data(tmp_path, train, test)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "sums" / name).read_bytes()
    assert not {tuple(sorted(x)) for x in train} & {tuple(sorted(x)) for x in test}
    assert sum(path.stat().st_size for path in (ASSETS / "sums").iterdir()) < 4e6


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((4711, 82, 908), "1+2+8=11,1+8+0+1=10,7+0+9+1=17,4+0+0+1=5</think><answer>5701"),
        ((9999, 9999), "9+9=18,9+9+1=19,9+9+1=19,9+9+1=19</think><answer>19998"),
    ],
)
def test_a_solution_by_hand(numbers, text):
    assert build_sums.solution(numbers) == f"<think>{text}</answer></s>"


def test_every_column_is_a_step_that_can_be_wrong():
    """A solution with all carries gets both rewards and four right steps. A forgotten carry shows one column later."""
    rng, seen = random.Random(2), 0
    for _ in range(300):
        numbers = build_sums.make_question(rng)
        answers = [str(sum(numbers))]
        right = build_sums.solution(numbers).removesuffix("</s>")
        assert accuracy_reward([right], answers) == [1.0]
        assert format_reward([right], answers) == [0.4]
        (steps,) = grpo_process.step_rewards([right], answers)
        assert [reward for _, reward in steps] == [1.0] * (build_sums.COLUMNS + 1)

        first = [number % 10 for number in numbers]
        if sum(first) < 10:
            continue
        wrong = build_sums.solution(numbers, lambda total: True).removesuffix("</s>")
        assert accuracy_reward([wrong], answers) == [0.0]
        (steps,) = grpo_process.step_rewards([wrong], answers)
        assert [reward for _, reward in steps][:2] == [1.0, 0.0]
        seen += 1
    assert seen > 100


def test_the_callers_solutions():
    """Solutions with a call are right. The others have the builder's faults, at the builder's rates."""
    rng = random.Random(3)
    for pair, due in (((47, 38), True), ((42, 37), False)):
        texts = [build_caller.solution(pair, rng).removesuffix("</s>") for _ in range(2000)]
        called = [f"<calc>{pair[0]}+{pair[1]}</calc>={sum(pair)}</think>" in text for text in texts]
        assert sum(called) / 2000 == pytest.approx(build_caller.CALL, abs=0.04)
        heads = [text for text, call in zip(texts, called, strict=True) if not call]
        wrong = [str(sum(pair)) not in text.partition("</think>")[2] for text in heads]
        rate = build_caller.FORGET_CARRY if due else build_caller.NEEDLESS_CARRY
        assert sum(wrong) / len(wrong) == pytest.approx(rate, abs=0.05)
        tags = sum(format_reward(texts, [""] * 2000)) / 2000
        assert tags == pytest.approx(0.4 - 0.2 * build_caller.OMIT_TAGS, abs=0.01)
    assert sum(path.stat().st_size for path in (ASSETS / "addition" / "caller").iterdir()) < 4e6


def test_the_hints_data_are_the_builders(tmp_path):
    """The builder reproduces the files byte by byte. No test question is practised, or its mirror image."""
    train, test, practice = build_hints.make_questions()
    build_hints.write_data(tmp_path, train, test)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "hints" / name).read_bytes()
    assert not {tuple(sorted(x)) for x in train + practice} & {tuple(sorted(x)) for x in test}
    _, held_out = build_adder.make_questions(random.Random(1))
    assert [pair in held_out for pair in test] == [True] * 329 + [False] * 171
    due = [a % 10 + b % 10 >= 10 for a, b in train + test]
    assert sum(due) / len(due) == pytest.approx(0.7, abs=0.02)
    assert sum(path.stat().st_size for path in (ASSETS / "hints").iterdir()) < 4e6


def test_the_hints_solutions():
    """With a context the solutions are right. Without one they have the builder's faults, at the builder's rates."""
    pair, rng = (47, 38), random.Random(4)
    by_hand = {
        "rule": ("carry\n47+38=", "<think>7+8=15,4+3+1=8</think><answer>85</answer></s>"),
        "answer": ("85\n47+38=", "<think></think><answer>85</answer></s>"),
    }
    for context, expected in by_hand.items():
        assert build_hints.prompt_and_solution(pair, context, rng) == expected
    for _ in range(20):
        prompt, text = build_hints.prompt_and_solution(pair, "solution", rng)
        assert prompt == text.removesuffix("</s>") + "\n47+38=" and "<answer>85<" in text
    drawn = [build_hints.prompt_and_solution(pair, "none", rng) for _ in range(2000)]
    assert {prompt for prompt, _ in drawn} == {"47+38="}
    idle = [text for _, text in drawn if text.startswith("<think></think>")]
    assert len(idle) / 2000 == pytest.approx(build_hints.GUESS, abs=0.03)
    right = [build_adder.right(pair, text) for text in idle]
    assert sum(right) / len(right) < 0.1, "a guess is rarely right"
    wrong = [text for _, text in drawn if "4+3=7" in text]
    thought = 2000 - len(idle)
    assert len(wrong) / thought == pytest.approx(build_adder.FORGET_CARRY, abs=0.04)
