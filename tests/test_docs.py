"""The pages: links lead somewhere, and quoted code, tables and pictures are those of scripts and records.

Also: records come from clean trees.
"""

import inspect
import re
import sys
import types
from pathlib import Path

import pytest
from conftest import ROOT
from scripts import MACHINE_PATCHES, MULTI_PROCESS, NEEDS_VLLM, SCRIPTS

import grpo

PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
PAGES += [ROOT / folder / "README.md" for folder in ("variants", "exercises")]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    """Links lead to existing files, and anchors to headings, with GitHub's names for them."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            names = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in names, target


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_fence_stands_on_a_line_of_its_own(page):
    """Else the page shows a formula or a command as text, such as "```math x = 1 ```"."""
    fences = re.findall(r"^.*```.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(re.fullmatch(r" *```\w*", line) for line in fences) and len(fences) % 2 == 0, fences


def test_the_lines_beside_the_formulas_are_the_scripts():
    """The code in docs/algorithms.md is in the script that the block names, with "..." for what is left out."""
    text, seen = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"), set()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        first, code = block.split("\n", 1)
        name = first.removeprefix("# ")
        script = [x.strip() for x in (ROOT / name).read_text(encoding="utf-8").splitlines()]
        script = "\n".join(["", *script, ""])
        for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
            lines = "\n".join(["", *(x.strip() for x in part.splitlines()), ""])
            assert lines in script, lines
        seen.add(Path(name).stem)
    assert seen >= set(SCRIPTS) - set(MULTI_PROCESS)


def test_the_skeleton_of_main_is_main():
    """The lines of main in docs/algorithms.md are in grpo.main, in this order. A line may end early, in `...`."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(model, .*?)```", text, re.DOTALL)
    main = "".join(inspect.getsource(grpo.main).split())
    end = 0
    for line in block.splitlines():
        line = re.sub(r"  # .*$", "", line) if "# ----" not in line else line
        line = "".join(line.removesuffix("...)").split())
        assert line in main[end:], line
        end = main.index(line, end) + len(line)


def differences(page: str) -> dict[str, str]:
    """Apply each diff on a page to grpo.py. Return the script's name -> its source."""
    text, sources = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), {}
    blocks = re.findall(r"```diff\n--- grpo.py\n\+\+\+ (\w+).py\n(.*?)```", text, re.DOTALL)
    for name, block in blocks:
        source = (ROOT / "grpo.py").read_text(encoding="utf-8")
        _, *hunks = re.split(r"^@@ @@\n", block, flags=re.MULTILINE)
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[:1] != "+")
            new = "".join(line[1:] for line in lines if line[:1] != "-")
            assert source.count(old) == 1, (name, old)
            source = source.replace(old, new)
        sources[name] = source
    return sources


def load(monkeypatch, name: str, source: str):
    """A module with this source and with a path beside grpo.py."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")
    # A dataclass looks up its module here.
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    module.SCRIPT = ROOT / "grpo.py"  # a run copies its script
    return module


def test_the_worked_examples_are_the_scripts():
    """The scripts' functions reproduce the tables of docs/algorithms.md and the picture of the clip."""
    import explain

    text = explain.PAGE.read_text(encoding="utf-8")
    for name, make in explain.TABLES.items():
        assert f"<!-- {name} -->\n{make()}<!-- end {name} -->\n" in text, name
    assert explain.drawn_from() in explain.PICTURE.read_text(encoding="utf-8")


def test_the_page_on_the_real_model_states_what_is_recorded():
    """Tables, samples and pictures of docs/real-model.md are those of the records."""
    import real_model

    page = real_model.PAGE.read_text(encoding="utf-8")
    for name, text in real_model.blocks().items():
        assert f"<!-- {name} -->\n{text}<!-- end {name} -->\n" in page, name
    for name, records in real_model.drawn().items():
        picture = (real_model.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert real_model.digest(records) in picture, f"{name}: the picture shows other records"


def test_the_lessons_state_what_is_recorded():
    """Pictures and tables of docs/lessons.md and docs/metrics.md are those of the records, from a clean tree."""
    import lessons

    for name in lessons.LESSONS:
        page = lessons.page_of(name).read_text(encoding="utf-8")
        block = f"<!-- lesson {name} -->\n{lessons.block(name)}<!-- end lesson {name} -->\n"
        assert block in page, name
        picture = (ROOT / "docs" / "lessons" / f"{name}.svg").read_text(encoding="utf-8")
        assert lessons.drawn_from(lessons.records_of(name)) in picture, (
            f"{name}: the picture shows other records"
        )
    assert f"<!-- cost -->\n{lessons.costs()}<!-- end cost -->\n" in (
        ROOT / "docs" / "lessons.md"
    ).read_text("utf-8")
    pictures = {path.stem for path in (ROOT / "docs" / "lessons").glob("*.svg")}
    assert pictures == {*lessons.LESSONS, "passk"}  # benchmark/passk.py draws the last one
    records = lessons.read_records()
    commands = {command for lesson in lessons.LESSONS.values() for command in lesson.arms.values()}
    assert {command for command, _ in records} == commands
    assert not any(record["dirty"] for record in records.values())


def test_no_record_tells_where_the_project_was_on_a_disk():
    for path in (ROOT / "benchmark" / "records").glob("*.jsonl"):
        assert not re.search(r'"/[^"]*/[^"]*"', path.read_text(encoding="utf-8")), path.name


def test_every_script_and_patch_has_recorded_seeds():
    """Five of each script and three of each patch, from clean trees; one of each script on the emulated GPU."""
    import tables

    bundled = tables.records_of("bundled")
    expected = {(script, seed) for script in SCRIPTS for seed in range(1, 6)}
    assert {(record["script"], record["seed"]) for record in bundled} == expected
    variants = tables.records_of("variants")
    names = {path.stem for path in (ROOT / "variants").glob("*.diff")}
    names -= {"full_vocabulary", "sdpo_context"}  # docs/lessons.md has their runs
    names -= set(MACHINE_PATCHES)  # their runs are those of the parent
    expected = {(name, seed) for name in names for seed in (1, 2, 3)}
    assert {(record["script"], record["seed"]) for record in variants} == expected
    assert min(record["accuracy"][1] for record in variants) >= 0.95
    emulated = tables.records_of("bundled-emulated")
    found = sorted(record["script"] for record in emulated)
    assert found == sorted(set(SCRIPTS) - set(NEEDS_VLLM))
    assert not any(record["dirty"] for record in bundled + variants + emulated)


def test_the_tables_show_the_records():
    """The tables and the sample output of README.md and of other pages are those of the records."""
    import tables

    for name, (page, make) in tables.BLOCKS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"<!-- {name} -->\n{make()}<!-- end {name} -->\n" in text, name
