"""benchmark/passk.py: the estimator, a whole command on a small model, and the lesson's table and picture."""

import json
import math
import sys
from itertools import combinations

import numpy as np
import passk
import pytest
import torch
from conftest import ROOT, SMALL_MODEL, SMALL_TASK
from records import read
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo

SMALL = ["--model", SMALL_MODEL, "--dataset", SMALL_TASK, "--no-examples"]
SMALL += "--max-prompt-tokens 64 --max-new-tokens 24 --temperature 1 --device cpu".split()


# ==== the estimator ====


def test_pass_at_k_counts_the_subsets():
    """For all n up to 8, all c and all k: the share of the sets of k that have a right response."""
    for n in range(1, 9):
        for c in range(n + 1):
            is_right = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(is_right, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert passk.pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15), (n, c, k)


def test_pass_at_k_of_many_samples():
    """One right response of n is in half of all sets of n / 2. k = 1 gives the mean. No number overflows."""
    assert passk.pass_at_k(128, 1, 64) == 0.5
    assert passk.pass_at_k(20_000, 1, 10_000) == 0.5
    assert passk.pass_at_k(20_000, 123, 1) == 123 / 20_000
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


def test_a_model_and_a_run_of_the_same_weights_give_the_same_counts(tmp_path, monkeypatch, capsys):
    """A run's settings come from its args.json, and its weights from model/. The counts don't depend on --problems."""
    run = tmp_path / "run"
    # Any script may have made the run. distill.py takes one sample per prompt, and has a field of its own.
    saved = vars(grpo.Args()) | {"teacher": "x", "num_generations": 1}
    saved |= {"dataset": SMALL_TASK, "examples": False, "temperature": 1.0}
    saved |= {"max_prompt_tokens": 64, "max_new_tokens": 24}
    run.mkdir()
    (run / "args.json").write_text(json.dumps(saved), encoding="utf-8")
    (run / "model").symlink_to(SMALL_MODEL)
    out = tmp_path / "folder" / "out.jsonl"
    small = ("--samples", 8, "--k", 1, 8, "--out", out)
    call(monkeypatch, *SMALL, "--problems", 4, *small)
    capsys.readouterr()
    call(monkeypatch, run, "--device", "cpu", "--problems", 3, *small)
    of_model, of_run = read(out)
    assert of_model["right"][:3] == of_run["right"] and of_run["problems"] == 3
    assert of_run["settings"] == of_model["settings"]
    assert of_run["settings"]["dataset"] == "tests/small-task"
    assert 0 < sum(of_run["right"]) < 24
    # pass@1 is the share of right samples, pass@8 that of problems with one.
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {run}")]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2].startswith(f"{100 * sum(of_run['right']) / 24:.1f} ±")
    assert cells[3].startswith(f"{100 * sum(c > 0 for c in of_run['right']) / 3:.1f} ±")
    assert cells[4] == f"{100 * of_run['right'].count(0) / 3:.1f}"
    # A sample with the same seed replaces the record, and one with another seed is another record.
    for seed in (1, 2):
        call(monkeypatch, run, "--device", "cpu", "--problems", 3, "--seed", seed, *small)
    assert [record["sampling_seed"] for record in read(out)] == [1, 1, 2]
    assert read(out)[1]["right"] == of_run["right"] != read(out)[2]["right"]


def test_the_counts_are_those_of_the_samples():
    """A problem's count is the number of its own responses with the gold answer, at the run's temperature."""
    args = grpo.Args(model=SMALL_MODEL, dataset=SMALL_TASK, examples=False, max_new_tokens=24)
    args.max_prompt_tokens, args.temperature, args.device, args.eval_size = 64, 1.0, "cpu", 3
    counts = passk.count_right(args, 8, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    _, examples = grpo.load_data(args, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    eos_ids = torch.tensor([tokenizer.eos_token_id])
    for number, (example, count) in enumerate(zip(examples, counts, strict=True)):
        torch.manual_seed(3_000_009 + number)
        rollout = grpo.sample_responses(args, model, [example], 8, 1.0, eos_ids)
        texts = grpo.response_texts(tokenizer, rollout, eos_ids)
        assert sum(f"<answer>{example['answer']}</answer>" in text for text in texts) == count
    # At a temperature near 0 all responses are the greedy one.
    args.temperature = 1e-4
    assert set(passk.count_right(args, 8, seed=3)) <= {0, 8}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give folders of runs, or a model with --model, and not both"),
        (["runs/x", *SMALL], "give folders of runs, or a model with --model, and not both"),
        (["runs/x", "--temperature", "1"], "--temperature: only with --model; a run has its own"),
        (["runs/x"], "runs/x: give the folder of a finished run, with args.json and model/"),
        ([*SMALL, "--samples", "63"], "--samples 63: pass@64 needs at least 64 samples"),
        ([*SMALL, "--k", "0"], "--k 0: must be at least 1"),
        ([*SMALL, "--problems", "1"], "--problems 1: a standard error needs at least 2"),
        ([*SMALL, "--problems", "41"], "--problems 41: there are 40 held-out problems"),
    ],
)
def test_mistakes_get_one_line(flags, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        call(monkeypatch, *flags)
    assert exit.value.code == 2
    # datasets may show its progress before, when it reads a file for the first time.
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"error: {message}")


def test_a_run_with_a_tool_is_refused(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    for name in ("args.json", "grpo_tools.py"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit):
        passk.args_of_run(tmp_path, "cpu", 2)
    assert "samples without a tool" in capsys.readouterr().err


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


def test_the_chance_of_a_solution(tmp_path):
    """The product of the softmaxes of a plain forward pass, in float64, at a temperature that isn't 1."""
    sums = ROOT / "assets" / "sums"
    for name in ("train.jsonl", "test.jsonl"):
        lines = (sums / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:2]), encoding="utf-8")
    args = grpo.Args(model=str(sums), dataset=str(tmp_path), examples=False, temperature=0.7)
    args.device = "cpu"
    found = passk.chances(args)
    tokenizer = AutoTokenizer.from_pretrained(sums)
    model = AutoModelForCausalLM.from_pretrained(sums).double()
    for example, chance in zip(grpo.load_data(args, tokenizer)[1], found, strict=True):
        numbers = [int(x) for x in example["prompt"][:-1].split("+")]
        solution = passk.build_sums.solution(numbers)
        assert solution.endswith(f"<answer>{example['answer']}</answer></s>")
        prompt, response = example["prompt_ids"], tokenizer(solution).input_ids
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        tokens = (logits / 0.7).softmax(1)[range(len(response)), response]
        assert chance == pytest.approx(tokens.prod().item(), rel=2e-3)
    assert max(found) > 0.1


def test_the_own_right_samples_have_accuracy_alone_as_reward():
    """The copy differs from its parent in one line."""
    parent = (ROOT / "reinforce_baseline.py").read_text(encoding="utf-8").splitlines()
    copied = passk.text_of_copy().splitlines()
    changed = [pair for pair in zip(parent, copied, strict=True) if pair[0] != pair[1]]
    assert [new for _, new in changed] == ["REWARDS = [accuracy_reward]"]


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
        # A sample is right more often than it is the solution, up to the noise of 128 samples.
        of_samples = np.array(record["right"]) / passk.SAMPLES
        chances = np.array(record["chances"])
        noise = np.sqrt(chances * (1 - chances) / passk.SAMPLES)
        assert (of_samples - chances > -5 * noise - 1 / passk.SAMPLES).all()
        assert abs(of_samples.mean() - chances.mean()) < 0.03
        # The same problems and the same way of sampling, whatever the model.
        assert record["settings"] == records[0]["settings"]
