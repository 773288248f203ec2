"""benchmark/passk.py: the estimator, a whole command on a small model, and the lesson's table and picture."""

import json
import math
import shutil
import sys
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import passk
import pytest
import torch
from conftest import ROOT, SMALL_MODEL, SMALL_TASK
from shared import read
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo


@pytest.fixture
def small_run(tmp_path):
    """The folder of a run whose model is the one that it began with.

    Any script may have made the run. distill.py takes one sample per prompt, and has a field of its own.
    """
    run = tmp_path / "run"
    saved = vars(grpo.Args()) | {"teacher": "x", "num_generations": 1, "model": SMALL_MODEL}
    saved |= {"dataset": SMALL_TASK, "examples": False, "temperature": 1.0}
    saved |= {"max_prompt_tokens": 64, "max_new_tokens": 24}
    run.mkdir()
    (run / "args.json").write_text(json.dumps(saved), encoding="utf-8")
    (run / "model").symlink_to(SMALL_MODEL)
    shutil.copy(ROOT / "grpo.py", run)
    shutil.copytree(ROOT / "utils", run / "utils")
    shutil.copy(ROOT / "utils" / "task.py", run)
    return run


# ==== the estimator ====


def test_pass_at_k_by_hand():
    # Of the 6 pairs among 4 responses, 3 have the one right response.
    assert passk.pass_at_k(4, 1, 2) == 0.5
    # Of the 10 pairs among 5 responses, 1 pair has none of the 3 right ones.
    assert passk.pass_at_k(5, 3, 2) == 0.9
    # Of the 120 triples among 10 responses, 56 have none of the 2 right ones.
    assert passk.pass_at_k(10, 2, 3) == pytest.approx(1 - 56 / 120, abs=1e-16)
    # One right response of 128 is in half of all sets of 64.
    assert passk.pass_at_k(128, 1, 64) == 0.5


def test_pass_at_k_counts_the_subsets():
    """For all n up to 8, all c and all k: the share of the sets of k that have a right response."""
    for n in range(1, 9):
        for c in range(n + 1):
            is_right = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(is_right, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert passk.pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15), (n, c, k)


def test_pass_at_k_identities():
    """k = 1 gives the mean, k = n says whether any is right. Fewer than k wrong responses always give 1."""
    n = 128
    for c in range(n + 1):
        assert passk.pass_at_k(n, c, 1) == c / n
        assert passk.pass_at_k(n, c, n) == (c > 0)
        values = [passk.pass_at_k(n, c, k) for k in range(1, n + 1)]
        assert values == sorted(values)
        assert all(value == 1 for k, value in enumerate(values, 1) if k > n - c)
        # The product that avoids large integers: 1 - (1 - k / i) over the last c values of i.
        for k in (2, 17, 64):
            product = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if k <= n - c else 0
            assert passk.pass_at_k(n, c, k) == pytest.approx(1 - product, abs=1e-14)


def test_pass_at_k_of_many_samples_is_finite_and_refuses_the_impossible():
    assert passk.pass_at_k(20_000, 1, 10_000) == 0.5
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError):
            passk.pass_at_k(n, c, k)


def test_the_standard_error_is_over_the_problems():
    # Problems with 0, 1/2 and 1: mean 1/2, variance 1/4, and 1/4 divided by 3 problems.
    mean, error = passk.mean_and_error(passk.curves(4, [0, 2, 4], [1, 4]))
    assert mean == pytest.approx([1 / 2, 2 / 3])
    assert error == pytest.approx([math.sqrt(1 / 12), 1 / 3])


# ==== the command ====


def call(monkeypatch, *flags):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["passk.py", *map(str, flags)])
    passk.main()


def test_a_run_and_its_first_model_of_the_same_weights_give_the_same_counts(
    small_run, monkeypatch, capsys
):
    """A run's settings come from its args.json, and its weights from model/. The counts don't depend on --problems."""
    run, out = small_run, small_run.parent / "folder" / "out.jsonl"
    small = ("--device", "cpu", "--samples", 16, "--k", 1, 16, "--out", out)
    call(monkeypatch, run, "--before", "--problems", 4, *small)
    of_model, of_run = read(out)
    assert of_model["model"] == f"{run}, before" and of_model["right"] == of_run["right"]
    call(monkeypatch, run, "--problems", 6, *small)
    assert read(out)[1]["right"][:4] == of_run["right"]
    capsys.readouterr()
    call(monkeypatch, run, "--problems", 4, *small)
    of_model, of_run = read(out)
    assert of_run["problems"] == 4
    assert of_run["settings"] == of_model["settings"]
    assert of_run["settings"]["dataset"] == "tests/data/task"
    assert 0 < sum(of_run["right"]) < 64
    assert {"commit", "dirty", "machine", "torch"} <= of_run.keys()
    assert {"cpu", "cores", "load"} == of_run["machine"].keys()
    # pass@1 is the share of right samples, pass@16 that of problems with one.
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {run}")]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2].startswith(f"{100 * sum(of_run['right']) / 64:.1f} ±")
    assert cells[3].startswith(f"{100 * sum(c > 0 for c in of_run['right']) / 4:.1f} ±")
    assert cells[4] == f"{100 * of_run['right'].count(0) / 4:.1f}"
    # A sample with the same seed replaces the record, and one with another seed is another record.
    for seed in (1, 2):
        call(monkeypatch, run, "--problems", 4, "--seed", seed, *small)
    assert [record["sampling_seed"] for record in read(out)] == [1, 1, 2]
    assert read(out)[1]["right"] == of_run["right"] != read(out)[2]["right"]


def test_the_counts_are_those_of_the_samples():
    """A problem's count is the number of its own responses with the gold answer, at the run's temperature."""
    args = grpo.Args(model=SMALL_MODEL, dataset=SMALL_TASK, examples=False, max_new_tokens=24)
    args.max_prompt_tokens, args.temperature, args.device, args.eval_size = 64, 1.0, "cpu", 5
    task = grpo.load_task(args)
    counts = passk.count_right(grpo, task, args, 12, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    _, problems = grpo.load_data(args, task, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    eos_ids = torch.tensor([tokenizer.eos_token_id])
    for number, (problem, count) in enumerate(zip(problems, counts, strict=True)):
        torch.manual_seed(3_000_009 + number)
        rollout = grpo.sample_responses(args, model, [problem], 12, 1.0, eos_ids)
        texts = grpo.response_texts(tokenizer, rollout, eos_ids)
        gold = f"<answer>{problem['columns']['answer']}</answer>"
        right = [gold in text for text in texts]
        assert sum(right) == count
    # At a temperature near 0 all responses are the greedy one.
    args.temperature = 1e-4
    assert set(passk.count_right(grpo, task, args, 12, seed=3)) <= {0, 12}


def test_a_run_is_judged_by_its_own_copy(small_run, tmp_path):
    """By its task, with its utils/ and what else the task imports. This process keeps its own utils."""
    (small_run / "grpo.py").rename(small_run / "mine.py")
    text = "import utils.own\nfrom beside import lenient_accuracy_reward\n"
    text += 'REWARDS = [lenient_accuracy_reward]\nEXAMPLES = [("Ann has 12 apples.", "12")]\n'
    (small_run / "task.py").write_text(text, encoding="utf-8")
    (small_run / "utils" / "own.py").write_text("")
    (tmp_path / "beside.py").write_text("from utils.rewards import lenient_accuracy_reward\n")
    with open(small_run / "utils" / "rewards.py", "a", encoding="utf-8") as file:
        file.write(
            "\n\ndef lenient_accuracy_reward(completions, **columns):\n    return [1.0] * len(completions)\n"
        )
    args = passk.args_of_run(small_run, "cpu", 3)
    args.task = str(tmp_path / "my_task.py")  # where it was when the run began
    script, task = passk.code_of_run(small_run, args)
    assert passk.count_right(script, task, args, 4, seed=1) == [4, 4, 4]
    assert task.EXAMPLES[0][0].startswith("Ann has 12 apples")
    assert sys.modules["utils.rewards"].accuracy_reward is grpo.accuracy_reward
    assert not {str(small_run), str(tmp_path)} & {*sys.path} and "utils.own" not in sys.modules
    # Another run's task may have a file of the same name beside it.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "beside.py").write_text("def lenient_accuracy_reward(**columns): ...\n")
    args.task = str(tmp_path / "other" / "my_task.py")
    _, task = passk.code_of_run(small_run, args)
    assert task.REWARDS[0](completions=[], answer=[]) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give folders of runs"),
        (["two"], "2 files of Python, and not one copy of a script"),
        (["runs/x"], "runs/x: give the folder of a finished run, with args.json and model/"),
        (["run", "--samples", "63"], "--samples 63: pass@64 needs at least 64"),
        (["run", "--k", "0"], "--k 0: must be at least 1"),
        (["run", "--problems", "1"], "--problems 1: a standard error needs at least 2"),
        (["run", "--problems", "41"], "--problems 41: there are 40 held-out problems"),
    ],
)
def test_mistakes_get_one_line(flags, message, small_run, monkeypatch, capsys):
    if flags == ["two"]:
        (small_run / "other.py").write_text("")
    with pytest.raises(SystemExit) as exit:
        call(monkeypatch, *[small_run if flag in ("run", "two") else flag for flag in flags])
    assert exit.value.code == 2
    # datasets may show its progress before, when it reads a file for the first time.
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"error: {message}") or line.endswith(f": {message}")


def test_a_run_with_a_tool_is_refused(tmp_path, capsys):
    """Also one of a copy of grpo_tools.py."""
    (tmp_path / "model").mkdir()
    (tmp_path / "args.json").write_text('{"max_calls": 4}', encoding="utf-8")
    with pytest.raises(SystemExit):
        passk.args_of_run(tmp_path, "cpu", 2)
    assert "a run with a tool; this program samples without one" in capsys.readouterr().err


# ==== the lesson ====


def made_up(arm, seed, right, chances):
    record = {"arm": arm, "seed": seed, "samples": 4, "problems": 4}
    return record | {"right": right, "chances": chances}


def test_the_table_by_hand(tmp_path, monkeypatch):
    """Four problems with four samples each, and pass@1 and pass@4."""
    records = [
        made_up("before", 1, [0, 0, 2, 4], [0.001, 0.003, 0.5, 1]),
        made_up("GRPO", 2, [0, 4, 4, 4], [0.1, 0.9, 1, 1]),
        made_up("GRPO", 1, [0, 2, 0, 4], [0.1, 0.3, 0, 1]),
    ]
    path = tmp_path / "passk.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    monkeypatch.setattr(passk, "RECORDS", path)
    monkeypatch.setattr(passk, "SHOWN", (1, 4))
    _, _, before, after = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in passk.lesson_table().splitlines()
    ]
    # Before: pass@1 is 0, 0, 1/2, 1, and pass@4 is 0, 0, 1, 1. Two of four problems are never right.
    error = 100 * np.std([0, 0, 0.5, 1], ddof=1) / 2
    assert before[:2] == ["before", f"37.5 ± {error:.1f}"]
    assert before[2].startswith("50.0 ±")
    assert before[3:] == ["50.0", "0.0"]
    # The seeds have pass@1 of 37.5 and 75 %, and pass@4 of 50 and 75 %. The problems have 0, 3/4, 1/2 and 1.
    error = 100 * np.std([0, 0.75, 0.5, 1], ddof=1) / 2
    assert after[1] == f"56.2 (37.5 to 75.0) ± {error:.1f}"
    assert after[2].startswith("62.5 (50.0 to 75.0) ±")
    # Never right: 2 of 4 and 1 of 4. Both seeds solve the second problem.
    assert after[3:] == ["37.5 (25.0 to 50.0)", "25.0 (25.0 to 25.0)"]


def test_the_own_right_samples_have_accuracy_alone_as_reward():
    task = grpo.load_task(SimpleNamespace(task=str(ROOT / passk.RIGHT_ALONE)))
    assert task.REWARDS == [grpo.accuracy_reward] and task.EXAMPLES == []


def test_the_lesson_states_what_is_recorded():
    """Table and picture are those of the records, which come from a clean tree."""
    block = f"<!-- passk -->\n{passk.block()}<!-- end passk -->\n"
    assert block in passk.PAGE.read_text(encoding="utf-8")
    assert passk.drawn_from() in passk.PICTURE.read_text(encoding="utf-8")
    records = read(passk.RECORDS)
    keys = {(record["arm"], record["seed"]) for record in records}
    whole = {(arm, seed) for arm in passk.TRAINED for seed in passk.SEEDS}
    whole |= {(arm, 1) for arm in passk.UNTRAINED}
    assert keys == whole
    assert len(keys) == len(records) and not any(record["dirty"] for record in records)
    for record in records:
        assert record["samples"] == passk.SAMPLES and len(record["right"]) == passk.PROBLEMS
        assert record.get("command") == passk.TRAINED.get(record["arm"])
        # The same problems and the same way of sampling, whatever the model. The records are of several dates:
        # a flag that has come or gone since isn't in all of them, and is off in the others.
        off = {"eval_dataset": None, "system_prompt": "", "examples": False, "instructions": ""}
        assert off | record["settings"] == off | records[0]["settings"]
