"""The bundled data: builders reproduce it.

Test questions of sums and hints aren't in their training data. The weights of the bundled models aren't rebuilt.
"""

import json
import random
from pathlib import Path

import build_adder
import build_arithmetic
import build_hints
import build_kinds
import build_sums
import pytest
from conftest import ROOT, SMALL_TASK

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
    assert not {row["question"] for row in splits[0]} & {row["question"] for row in splits[1]}


def test_the_tests_own_task_is_the_beginning_of_the_additions():
    for name, length in (("train.jsonl", 400), ("test.jsonl", 40)):
        whole = (ASSETS / "addition" / name).read_text(encoding="utf-8").splitlines()
        assert Path(SMALL_TASK, name).read_text(encoding="utf-8").splitlines() == whole[:length]


def test_the_kinds_are_the_builders():
    for name in build_kinds.SIZES:
        lines = (ASSETS / "kinds" / name).read_text(encoding="utf-8").splitlines()
        assert list(map(json.loads, lines)) == build_kinds.rows(name)
    kinds = {row["question"]: row["kind"] for row in build_kinds.rows("test.jsonl")}
    assert kinds["87+9="] == "carry" and kinds["85+73="] == "plain"


def test_the_sums_are_the_builders(tmp_path):
    """The builder reproduces the files byte by byte. No test question repeats training numbers, in any order."""
    train, test = build_sums.make_questions(random.Random(1))
    build_sums.write_data(tmp_path, train, test)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "sums" / name).read_bytes()
    assert not {tuple(sorted(x)) for x in train} & {tuple(sorted(x)) for x in test}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((4711, 82, 908), "1+2+8=11,1+8+0+1=10,7+0+9+1=17,4+0+0+1=5</think><answer>5701"),
        ((9999, 9999), "9+9=18,9+9+1=19,9+9+1=19,9+9+1=19</think><answer>19998"),
    ],
)
def test_a_solution_by_hand(numbers, text):
    assert build_sums.solution(numbers) == f"<think>{text}</answer></s>"


def test_the_hints_data_are_the_builders(tmp_path):
    """The builder reproduces the files byte by byte. No test question is practised, or its mirror image."""
    train, test, practice = build_hints.make_questions()
    build_hints.write_data(tmp_path, train, test)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "hints" / name).read_bytes()
    assert not {tuple(sorted(x)) for x in train + practice} & {tuple(sorted(x)) for x in test}


def test_the_hints_solutions_by_hand():
    pair, rng = (47, 38), random.Random(4)
    by_hand = {
        "rule": ("carry\n47+38=", "<think>7+8=15,4+3+1=8</think><answer>85</answer></s>"),
        "answer": ("85\n47+38=", "<think></think><answer>85</answer></s>"),
    }
    for context, expected in by_hand.items():
        assert build_hints.prompt_and_solution(pair, context, rng) == expected
    prompt, text = build_hints.prompt_and_solution(pair, "solution", rng)
    assert prompt == text.removesuffix("</s>") + "\n47+38=" and "<answer>85<" in text
