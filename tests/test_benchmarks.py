"""benchmark/records.py, gamed.py and compare_trl.py: what they compute and record.

memory.py, passk.py and variants.py have files of their own, and test_cuda.py runs gpu.py. test_docs.py compares the
pages with the records.
"""

import sys
from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_record_without_a_commit_counts_as_changed(monkeypatch, tmp_path, missing):
    import records

    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(records, "ROOT", tmp_path)
    found = records.provenance()
    assert found["commit"] is None and found["dirty"] is True and found["machine"]["cpu"]
