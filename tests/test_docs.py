"""What the pages under docs/ say of the code and of the records is so."""

import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
PAGES += [ROOT / "variants" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    """Files, and headings of a page as GitHub names them."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(
        r"\]\((?!https?:)([^)]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings
            }, target


def test_the_lines_beside_the_formulas_are_the_scripts():
    """Every line of code in docs/algorithms.md stands in the script that its block names."""
    text, seen = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"), set()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        first, *lines = block.splitlines()
        name = first.removeprefix("# ")
        script = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert lines and all(line in script for line in lines), [
            line for line in lines if line not in script
        ]
        seen.add(Path(name).stem)
    assert seen >= set(SCRIPTS) - {"grpo_multigpu"}


def test_the_family_tree_is_the_one_of_the_siblings():
    from test_siblings import PAIRS

    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^  (\w+) --> (\w+)$", text, re.MULTILINE)) == {
        (parent, child) for child, parent in PAIRS
    }


def test_the_differences_shown_are_real():
    """docs/extend.md: what stands in a difference as context or as removed is grpo.py's text, and the result is
    Python; the other one is an excerpt of a patch, lines that follow one another there."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    shown, excerpt = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert shown.startswith("--- grpo.py\n+++ words.py\n")
    changed = (ROOT / "grpo.py").read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", shown, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] != "+")
        new = "\n".join(line[1:] for line in lines if line[:1] != "-")
        assert changed.count(old) == 1, old
        changed = changed.replace(old, new)
    compile(changed, "words", "exec")
    assert excerpt in (ROOT / "variants" / "cispo.diff").read_text(encoding="utf-8")
    count = len(list((ROOT / "variants").glob("*.diff")))
    assert count == 14 and "has fourteen such patches" in text


def test_the_lessons_state_what_is_recorded():
    """Commands, pictures and tables of docs/lessons.md and docs/metrics.md are those of the records; no record is of a
    tree with changes."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import lessons

    text = "".join(
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("lessons", "metrics")
    )
    for number in lessons.LESSONS:
        assert (
            f"<!-- lesson {number} -->\n{lessons.block(number)}<!-- end lesson {number} -->\n"
            in text
        ), number
        picture = (ROOT / "docs" / "lessons" / f"{number:02}.svg").read_text(encoding="utf-8")
        assert lessons.drawn_from(number) in picture, (
            f"lesson {number} was drawn from other records"
        )
    records = lessons.read_records()
    assert {command for command, _ in records} == {
        c for _, arms, _ in lessons.LESSONS.values() for c in arms.values()
    }
    assert not any(record["dirty"] for record in records.values())


def test_the_readme_states_what_is_recorded():
    """Its tables and pictures are those of the records: all scripts with five seeds, of a tree without changes."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import readme

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, make in readme.TABLES.items():
        assert f"<!-- {name} -->\n{make()}<!-- end {name} -->\n" in text, name
    for name, picture in readme.PICTURES.items():
        assert readme.digest(readme.records_of(name)) in picture.read_text(encoding="utf-8"), name
        assert str(picture.relative_to(ROOT)) in text
    records = readme.records_of("bundled")
    assert {(record["script"], record["seed"]) for record in records} == {
        (s, k) for s in SCRIPTS for k in range(1, 6)
    }
    emulated = readme.records_of("bundled-emulated")
    low, high = [100 * bound(record["accuracy"][1] for record in emulated) for bound in (min, max)]
    assert {record["script"] for record in emulated} == set(SCRIPTS) and len(emulated) == len(
        SCRIPTS
    )
    assert f"all scripts reach {low:.1f} to {high:.0f} % there" in text
    assert max(record["logprob_gap"] for record in emulated) < 0.002 and "stays below 0.002" in text
    assert not any(record["dirty"] for record in records + emulated)
