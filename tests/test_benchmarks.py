"""benchmark/records.py, gamed.py and compare_trl.py: what they compute and record.

memory.py, passk.py and variants.py have files of their own, and test_cuda.py runs gpu.py. test_docs.py compares the
pages with the records.
"""

import sys
from dataclasses import replace

import pytest
import torch

import grpo


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


def test_the_side_of_plainrl_trains_the_bundled_task(monkeypatch):
    """compare_trl.py learn runs a script with its bundled defaults, and times each of its steps."""
    import compare_trl

    # What the run changes is put back afterwards.
    monkeypatch.setattr(grpo, "REWARDS", grpo.REWARDS)
    monkeypatch.setattr(grpo, "sample_responses", grpo.sample_responses)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(grpo, "BUNDLED", replace(grpo.BUNDLED, num_prompts=2))
    monkeypatch.setattr(compare_trl, "STEPS", 2)
    record = compare_trl.measure_learning("PlainRL", "grpo", 1)
    assert len(record["accuracy"]) == len(record["seconds"]) == 2
    assert 0 < record["seconds"][0] < record["seconds"][1]


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_record_without_a_commit_counts_as_changed(monkeypatch, tmp_path, missing):
    import records

    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(records, "ROOT", tmp_path)
    found = records.provenance()
    assert found["commit"] is None and found["dirty"] is True and found["machine"]["cpu"]
