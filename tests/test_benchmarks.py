"""benchmark/shared.py: what it records; lessons.py, when a reader makes a lesson again; and a run of real_model.py.

plan.py, passk.py and variants.py have files of their own, and test_cuda.py runs gpu.py. test_docs.py compares the
pages with the records.
"""

import dataclasses
import re
import shutil
import sys

import lessons
import pytest
import real_model
import shared
from conftest import ROOT, SMALL_MODEL, SMALL_TASK


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_record_without_a_commit_counts_as_changed(monkeypatch, tmp_path, missing):
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(shared, "ROOT", tmp_path)
    found = shared.provenance()
    assert found["commit"] is None and found["dirty"] is True and found["machine"]["cpu"]


def write_run(folder, steps):
    """A run whose steps have these completions, as (text, score)."""
    folder.mkdir()
    metrics = [{"step": 0, "eval/accuracy": 0.5}]
    samples = []
    for step, pairs in enumerate(steps, 1):
        metrics.append(
            {
                "step": step,
                "episodes": 4 * step,
                "rollout/accuracy": step / 10,
                "eval/accuracy": 0.75,
            }
        )
        texts, scores = zip(*pairs, strict=True)
        samples.append({"step": step, "completions": texts, "scores": scores})
    for name, records in {"metrics": metrics, "samples": samples}.items():
        shared.write(folder / f"{name}.jsonl", records)
    (folder / "args.json").write_text('{"model": "assets/a", "num_steps": 12, "run_name": "x"}')


def lesson(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lessons.py", *map(str, arguments)])
    lessons.main()


def test_a_lessons_columns_of_ones_own_run(tmp_path, monkeypatch, capsys):
    """The means over the first and the last five steps, of the characters of wrong and of right responses."""
    early, late = (
        [("123", 1), ("12345", 1), ("1", 0), ("1234567", 0)],
        [("1", 1), ("12", 0), ("1234", 0.9)],
    )
    write_run(tmp_path / "run", [early] * 5 + [[("1", 1)]] + [late] * 5)
    lesson(monkeypatch, "length", "--of", tmp_path / "run")
    _, _, header, _, row, _ = capsys.readouterr().out.splitlines()
    columns = ["wrong, first five", "wrong, last five", "right, first five", "right, last five"]
    assert (
        header
        == f"|  | sampled, last five steps, % | {' | '.join(f'{x}, characters' for x in columns)} |"
    )
    assert row == f"| {tmp_path}/run (11 of 12 steps) | 90.0 | 4 | 3 | 4 | 1 |"


def test_a_lesson_is_made_again(tmp_path, monkeypatch, capsys):
    """Its runs are made and drawn, once. The records and the pages of the project stay as they are."""
    command = f"grpo.py --model {SMALL_MODEL} --dataset {SMALL_TASK} --no-examples --num-steps 2"
    command += " --max-new-tokens 4 --max-prompt-tokens 64"
    small = dataclasses.replace(lessons.LESSONS["length"], arms={"small": command})
    monkeypatch.setitem(lessons.LESSONS, "length", small)
    monkeypatch.setattr(lessons, "AGAIN", tmp_path / "again")
    kept = [lessons.RECORDS, lessons.page_of("length"), lessons.PICTURES / "length.svg"]
    before = [path.read_bytes() for path in kept]
    for _ in range(2):
        lesson(monkeypatch, "length", "--seeds", 3)
        assert re.search(r"^\| small \| [\d.]+ \| \d+ ", capsys.readouterr().out, re.M)
        (record,) = shared.read(tmp_path / "again" / "records.jsonl")
        assert (record["command"], record["seed"], record["args"]["seed"]) == (command, 3, 3)
        assert len(record["curves"]["length/wrong"]) == 2
        assert (tmp_path / "again" / "length.svg").is_file()
    assert before == [path.read_bytes() for path in kept]
    with pytest.raises(SystemExit):
        lesson(monkeypatch)
    assert "name a lesson" in capsys.readouterr().err


def test_a_script_of_ones_own_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    shutil.copytree(ROOT / "variants", tmp_path / "variants")
    (tmp_path / "cispo.py").write_text("my work")
    with pytest.raises(SystemExit, match="may be your own"), shared.in_place(["cispo"]):
        pass
    assert (tmp_path / "cispo.py").read_text() == "my work"


def test_an_arm_of_the_real_model_has_its_task(tmp_path, monkeypatch):
    """A run of grpo.py, with the patch for a CPU, whose only reward is the arm's own."""
    flags = f"--dataset {SMALL_TASK} --no-examples --max-prompt-tokens 32 --max-new-tokens 8 --eval-size 4"
    flags += " --num-prompts 2 --num-generations 2 --num-steps 2 --warmup-updates 0 --device cpu"
    monkeypatch.setitem(real_model.RUNS, "anywhere", ("grpo", flags, real_model.ANYWHERE))
    monkeypatch.setattr(real_model, "RUNS_DIR", tmp_path)
    record = real_model.run("anywhere", 3, SMALL_MODEL, "")
    assert (
        record["args"]["rewards"] == ["anywhere_reward"]
        and record["seed"] == record["args"]["seed"] == 3
    )
    assert record["eval"].keys() == {0, 2} and len(record["curves"]["last_number"]) == 2
