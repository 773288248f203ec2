"""benchmark/lessons.py, records.py, gamed.py and compare_trl.py: what they compute and record.

memory.py, passk.py and variants.py have files of their own, and test_cuda.py runs gpu.py. test_docs.py compares the
pages with the records.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch

import grpo


def test_the_columns_of_the_lessons_by_hand(monkeypatch):
    """What the tables say of a record of ten steps with eight responses each, worked out by hand."""
    import lessons
    import records

    curves = {
        "episodes": [8 * k for k in range(1, 11)],
        "rollout/accuracy": [k / 10 for k in range(10)],
        "kl/ref": [None, 2.0, 4.0, *[1.0] * 7],
        "policy/entropy": [-math.inf, 2.0, math.nan, 4.0, *[1.0] * 6],
        "length/right": [None, *[10.0] * 9],
        "length/wrong": [20.0] * 10,
    }
    record = {"curves": curves, "eval": {"0": 0.1, "10": 0.55}}
    assert lessons.over("rollout/accuracy", 2, 4)(record) == pytest.approx(20)
    assert lessons.over("rollout/accuracy", -5, -1)(record) == pytest.approx(70)
    assert lessons.over("kl/ref", 1, 3)(record) == 3
    assert lessons.over("policy/entropy", 1, 4)(record) == 3
    assert math.isnan(lessons.over("kl/ref", 11, 20)(record))
    assert math.isnan(lessons.over("value/explained_var", 1, 5)(record))
    assert lessons.highest("kl/ref")(record) == 4
    assert lessons.held_out(record) == pytest.approx(55)
    # Responses 17 to 40: steps 3, 4 and 5.
    assert lessons.between(16, 40)(record) == pytest.approx(30)
    # Response 56 is in step 7: steps 3 to 7.
    assert lessons.accuracy_at(record, 56) == pytest.approx(40)
    # Step 6: half are right.
    assert lessons.curve(record, "length/all")[5] == pytest.approx(15)

    def run(values):
        return {"curves": {"x": values}}

    others = {("plain", 1): run([0.0] * 13), ("plain", 2): run([1.0] * 13)}
    others[("plain", 3)] = run([2.0] * 13)
    monkeypatch.setattr(lessons, "read_records", lambda: others)
    parts_at = lessons.parts_at("x", "plain")
    assert parts_at(run([1, 3, 1, *[3] * 5, *[-1] * 5])) == 4
    assert math.isnan(parts_at(run([1, *[3] * 9, 2, 3, 3])))
    assert records.spread([math.nan, 1, 3], 1) == "2.0 (1.0 to 3.0) in 2 of 3 runs"
    assert records.spread([math.nan] * 3) == "-" and records.spread([1, 2, 6]) == "3 (1 to 6)"
    assert records.spread([-0.3, 0.1]) == "0 (0 to 0)"


def test_the_gamed_reward_counts_characters(monkeypatch):
    """benchmark/gamed.py adds its weight for each character to grpo.py's rewards, and passes on all other flags."""
    import gamed

    runs, rewards = [], grpo.REWARDS
    monkeypatch.setattr(grpo, "main", runs.append)
    monkeypatch.setattr(grpo, "REWARDS", rewards)
    monkeypatch.setattr(grpo, "SCRIPT", grpo.SCRIPT)
    monkeypatch.setattr(sys, "argv", ["gamed.py", "--num-steps", "3", "--weight", "0.5"])
    gamed.main()
    assert runs == [replace(grpo.BUNDLED, num_steps=3)] and grpo.REWARDS[:-1] == rewards
    row = {"question": "47+38=", "answer": "85"}
    examples = [{"prompt": "47+38=", "answer": "85", "columns": row}] * 2
    scores = grpo.apply_rewards(["", "abc"], examples, "cpu")
    assert scores["length_reward"].tolist() == [0, 1.5]
    assert grpo.SCRIPT.name == "gamed.py"


@pytest.fixture
def compare_trl(monkeypatch):
    """The module. What a run changes is put back afterwards."""
    import compare_trl

    monkeypatch.setattr(grpo, "REWARDS", grpo.REWARDS)
    monkeypatch.setattr(grpo, "sample_responses", grpo.sample_responses)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return compare_trl


def test_the_side_of_plainrl_trains_the_bundled_task(compare_trl, monkeypatch):
    """compare_trl.py learn runs a script with its bundled defaults, and times each of its steps."""
    monkeypatch.setattr(grpo, "BUNDLED", replace(grpo.BUNDLED, num_prompts=2))
    monkeypatch.setattr(compare_trl, "STEPS", 2)
    record = compare_trl.measure_learning("PlainRL", "grpo", 1)
    assert len(record["accuracy"]) == len(record["seconds"]) == 2
    assert 0 < record["seconds"][0] < record["seconds"][1]


def test_the_speed_of_a_workload_replaces_its_record(compare_trl, monkeypatch, tmp_path):
    """compare_trl.py speed: grpo.py's side runs in this process. TRL's side gets made-up numbers."""
    import readme
    import records

    def call(function, *arguments):
        if arguments[0] != "trl":
            return function(*arguments)
        return dict(seconds=[2.0, 1.0], tokens=[10, 20], memory=5e8)

    monkeypatch.setattr(compare_trl, "SPEED", tmp_path / "trl-speed.jsonl")
    monkeypatch.setattr(readme, "FOLDER", tmp_path)
    monkeypatch.setattr(compare_trl, "in_own_process", call)
    monkeypatch.setattr(compare_trl, "source", dict)  # needs trl
    monkeypatch.setitem(compare_trl.WORKLOADS, "W1", (2, 2, 4, 2048, 4))
    records.write(compare_trl.SPEED, [{"workload": "W1"}, {"workload": "W4"}])
    compare_trl.speed("W1", steps=2, rounds=1)
    record, other = records.read(compare_trl.SPEED)
    assert other == {"workload": "W4"}
    assert (record["workload"], record["num_prompts"], record["trl_batch_size"]) == ("W1", 2, 4)
    assert record["trl"] == dict(seconds=1.5, tokens_per_step=15, memory_mb=500)
    # Four responses of at most four tokens.
    assert 0 < record["plainrl"]["seconds"] and 4 <= record["plainrl"]["tokens_per_step"] <= 16
    (line,) = [line for line in readme.speed_table().splitlines() if "W1" in line]
    assert " s, 0.50 GB |" in line


def test_a_record_has_the_state_of_the_machine():
    import records

    machine = records.provenance()["machine"]
    assert machine["cpu"] and machine["cores"] >= 1 and machine["load"] >= 0


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_record_without_a_commit_counts_as_changed(monkeypatch, tmp_path, missing):
    import records

    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(records, "ROOT", tmp_path)
    found = records.provenance()
    assert found["commit"] is None and found["dirty"] is True and found["machine"]["cpu"]
