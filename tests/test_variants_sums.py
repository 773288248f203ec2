"""benchmark/variants.py, which compares the losses on assets/sums: its runs, and what the table calls told apart.

Its runs take hours, so no test makes one.
"""

import numpy as np
import pytest
import shared
from conftest import ROOT
from scripts import MACHINE_PATCHES

import variants


def record(group, script, rate, seed, accuracy):
    made_up = {"group": group, "script": script, "rate": rate, "seed": seed}
    return made_up | {"rollout/accuracy": [accuracy] * variants.STEPS, "held_out": accuracy}


def test_every_patch_is_in_a_group():
    """All but echo, whose tool the sums don't have. Every script exists."""
    names = [name for _, _, group in variants.GROUPS.values() for name in group]
    scripts = {variants.script_of(name) for name in names}
    patches = {path.stem for path in (ROOT / "variants").glob("*.diff")}
    patches -= {"full_vocabulary", "mopd", "sdpo_context"}  # they don't learn from rewards
    patches -= set(MACHINE_PATCHES)  # they change no loss
    assert patches - scripts == {"echo"}
    assert all((ROOT / f"{script}.py").is_file() for script in scripts - patches)


def test_the_better_rate_runs_on_the_other_seeds(monkeypatch):
    """Both rates on seed 1 come first. The rate with the higher accuracy of the last steps then gets seeds 2 and 3."""
    monkeypatch.setattr(variants, "GROUPS", {"g": ("", ("1", "2"), ["a", "b"])})
    firsts = [("g", script, rate, 1) for script in "ab" for rate in "12"]
    assert variants.missing_runs({}) == firsts
    # The second rate is better for a, and the first one for b. An early lead doesn't count.
    records = {}
    for key, accuracy in zip(firsts, [0.5, 0.6, 0.6, 0.5], strict=True):
        records[key] = record(*key, accuracy)
    early = variants.STEPS - variants.LAST
    records["g", "a", "1", 1]["rollout/accuracy"][:early] = [1.0] * early
    later = [("g", "a", "2", 2), ("g", "a", "2", 3), ("g", "b", "1", 2), ("g", "b", "1", 3)]
    assert variants.missing_runs(records) == later and variants.finished_groups(records) == []
    for key, accuracy in zip(later, [0.5, 0.5, 0.25, 0.25], strict=True):
        records[key] = record(*key, accuracy)
    assert variants.missing_runs(records) == [] and variants.finished_groups(records) == ["g"]
    # Seed 1 has 0.6 for both; the other seeds have 0.25 for b and 0.5 for a.
    found = variants.differences(records, "g", "b")
    np.testing.assert_allclose(found, [0, -25, -25], atol=1e-12)


def test_told_apart_needs_all_seeds_and_more_than_three_standard_errors():
    for seeds, error, expected in (
        ((5, 6, 7), 1.9, "ahead"),
        ((-5, -6, -7), 1.9, "behind"),
        ((5, 6, 7), 2.1, "no"),
        ((9, 9, -0.1), 1.9, "no"),  # one seed disagrees
    ):
        assert variants.told_apart(np.array(seeds), error) == expected, seeds


def test_the_error_by_hand(monkeypatch):
    """The error of the differences pools the seeds of all scripts."""
    monkeypatch.setattr(variants, "GROUPS", {"g": ("", ("1", "2"), ["a", "b", "c"])})
    # In points, b - a is 1, 2, 3 for the three seeds, with a variance of 1; c - a is -3, 0, 3, with a variance of 9.
    accuracies = {"a": (0.5, 0.5, 0.5), "b": (0.51, 0.52, 0.53), "c": (0.47, 0.5, 0.53)}
    records = {}
    for script, seeds in accuracies.items():
        records["g", script, "2", 1] = record("g", script, "2", 1, 0.1)
        for seed, accuracy in enumerate(seeds, 1):
            records["g", script, "1", seed] = record("g", script, "1", seed, accuracy)
    assert variants.standard_error(records, "g") == pytest.approx(np.sqrt((1 + 9) / 2 / 3))
    row = variants.results_table(records).splitlines()[2]
    assert "| b | 1 |" in row and "| +2.0 ± 1.3 (+1.0 to +3.0) | no |" in row


def test_two_runs_at_a_time_append_their_records(tmp_path):
    """Every job gets a line. If one fails, the program ends and says why, and finished records stay."""
    path = tmp_path / "records.jsonl"
    shared.run_two_at_a_time(lambda a, b: {"sum": a + b}, [(1, 2), (3, 4), (5, 6)], path)
    assert sorted(record["sum"] for record in shared.read(path)) == [3, 7, 11]
    with pytest.raises(SystemExit, match="a run failed:\ndivision by zero"):
        shared.run_two_at_a_time(lambda a: {"sum": 1 / a}, [(0,)], path)
    assert len(shared.read(path)) == 3


def test_the_picture_shows_what_is_recorded():
    """The picture of variants/README.md is that of the records, which are whole and come from a clean tree."""
    found = variants.read_records()
    assert not any(run["dirty"] for run in found.values())
    assert variants.finished_groups(found) == list(variants.GROUPS)
    assert all(variants.command_of(*key) == run["command"] for key, run in found.items())
    assert variants.drawn_from(found) in variants.PICTURE.read_text(encoding="utf-8")
