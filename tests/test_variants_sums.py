"""benchmark/variants.py, which compares the losses on assets/sums: its runs, and what the table calls told apart.

Its runs take hours, so no test makes one.
"""

import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

import records  # noqa: E402

import variants  # noqa: E402


def record(group, script, rate, seed, accuracy):
    steps = [accuracy] * variants.STEPS
    return {"group": group, "script": script, "rate": rate, "seed": seed, "rollout/accuracy": steps}


def test_every_patch_is_in_a_group():
    """All but echo, whose tool the sums don't have. Every script exists."""
    names = [name for _, _, group in variants.GROUPS.values() for name in group]
    scripts = {variants.file_of(name).removesuffix(".py") for name in names}
    patches = {path.stem for path in (ROOT / "variants").glob("*.diff")}
    assert patches - scripts == {"echo"}
    assert all((ROOT / f"{script}.py").is_file() for script in scripts - patches)


def test_the_better_rate_runs_on_the_other_seeds(monkeypatch):
    """Both rates on seed 1 come first. The rate with the higher accuracy of the last steps then gets seeds 2 and 3."""
    monkeypatch.setattr(variants, "GROUPS", {"g": ("", ("1", "2"), {"a": "", "b": ""})})
    firsts = [("g", script, rate, 1) for script in "ab" for rate in "12"]
    assert variants.missing_runs({}) == firsts
    # The second rate is better for a, and the first one for b.
    accuracies = [0.5, 0.6, 0.6, 0.5]
    records = {}
    for key, accuracy in zip(firsts, accuracies, strict=True):
        records[key] = record(*key, accuracy)
    assert variants.better_rate(records, "g", "a") == "2"
    assert variants.better_rate(records, "g", "b") == "1"
    later = [("g", "a", "2", 2), ("g", "a", "2", 3), ("g", "b", "1", 2), ("g", "b", "1", 3)]
    assert variants.missing_runs(records) == later
    # An early lead doesn't count.
    early = record("g", "a", "1", 1, 0.5)
    early["rollout/accuracy"][: -variants.LAST] = [1.0] * (variants.STEPS - variants.LAST)
    records["g", "a", "1", 1] = early
    assert variants.better_rate(records, "g", "a") == "2"
    for key, accuracy in zip(later, [0.5, 0.5, 0.25, 0.25], strict=True):
        records[key] = record(*key, accuracy)
    assert variants.missing_runs(records) == []
    # Seed 1 has 0.6 for both; the other seeds have 0.25 for b and 0.5 for a.
    found = variants.differences(records, "g", "b").mean(1)
    np.testing.assert_allclose(found, [0, -25, -25], atol=1e-12)


@pytest.mark.parametrize(
    "seeds, noise, expected",
    [
        ((5, 6, 7), 2, "ahead"),
        ((-5, -6, -7), 2, "behind"),
        ((5, 6, -0.1), 2, "no"),  # one seed disagrees
        ((0.1, 0.2, 0.3), 8, "no"),  # within the noise of the steps
    ],
)
def test_told_apart_needs_all_seeds_and_more_than_the_noise(seeds, noise, expected):
    steps = np.array(seeds)[:, None] + noise * np.resize([1, -1], variants.LAST)
    assert variants.told_apart(steps) == expected


def test_the_standard_error_by_hand():
    steps = np.array([[1.0, 3.0], [5.0, 7.0]])
    # The deviations from 4 are 3, 1, 1, 3: a variance of 20 / 3, and four values.
    assert variants.standard_error(steps) == pytest.approx(np.sqrt(20 / 3 / 4))


def test_two_runs_at_a_time_append_their_records(tmp_path):
    """Every job gets a line. If one fails, the program ends and says why, and finished records stay."""
    path = tmp_path / "records.jsonl"
    records.run_two_at_a_time(lambda a, b: {"sum": a + b}, [(1, 2), (3, 4), (5, 6)], path)
    assert sorted(record["sum"] for record in records.read(path)) == [3, 7, 11]
    with pytest.raises(SystemExit, match="a run failed:\ndivision by zero"):
        records.run_two_at_a_time(lambda a: {"sum": 1 / a}, [(0,)], path)
    assert len(records.read(path)) == 3
