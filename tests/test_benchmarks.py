"""benchmark/shared.py: what it records.

plan.py, passk.py and variants.py have files of their own, and test_cuda.py runs gpu.py. test_docs.py compares the
pages with the records.
"""

import pytest


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_record_without_a_commit_counts_as_changed(monkeypatch, tmp_path, missing):
    import shared

    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(shared, "ROOT", tmp_path)
    found = shared.provenance()
    assert found["commit"] is None and found["dirty"] is True and found["machine"]["cpu"]
