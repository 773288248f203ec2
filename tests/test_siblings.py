"""The scripts are siblings: shared parts have the same text, and docs/diffs/ shows or names all other parts.

Also that the help of a flag is one line, and that each script names the version.
"""

import ast
import re

import pytest
from carry import patched
from conftest import ROOT
from scripts import SCRIPTS, parent_of, read_script
from siblings import CHILDREN, body, diff_page, parts


@pytest.mark.parametrize("child", CHILDREN)
def test_siblings_differ_only_as_shown(child):
    """If a character, decorator or comment differs that docs/diffs/ doesn't show, this test fails.

    Of a part that the page only names, it has a digest of the difference. If the difference is intended, write the
    pages again: python tools/siblings.py --write
    """
    page = (ROOT / "docs" / "diffs" / f"{child}.md").read_text(encoding="utf-8")
    assert page == diff_page(child)
    assert SCRIPTS.index(parent_of(child)) < SCRIPTS.index(child), "the parent comes first"
    mine = parts(child)
    theirs = parts(parent_of(child))
    # Both files have their common parts in the same order.
    assert [name for name in mine if name in theirs] == [name for name in theirs if name in mine]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_character_belongs_to_a_part(name):
    """If some text belonged to no part, a change there could hide."""
    assert sum(len(text) for text in parts(name).values()) == len(body(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_of_a_flag_is_one_line(name):
    """--help keeps a docstring's line breaks, and two lines would look ragged."""
    classes = [node for node in ast.parse(read_script(name)).body if isinstance(node, ast.ClassDef)]
    (args,) = [node for node in classes if node.name == "Args"]
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    texts = [node.value.value for node in args.body if isinstance(node, ast.Expr)]
    assert len(texts) == len(fields)
    for text in texts:
        assert "\n" not in text


def test_every_script_names_the_version_of_the_citation():
    """A script that was copied away says what it came from. Its first line is the same in all, and in patched ones."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (version,) = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    texts = {name: read_script(name) for name in SCRIPTS}
    for path in sorted((ROOT / "variants").glob("*.diff")):
        parent = re.match(r"--- (\w+)\.py\n", path.read_text(encoding="utf-8"))[1]
        texts[path.stem] = patched(path, read_script(parent))
    assert len(texts) > len(SCRIPTS)
    for name, text in texts.items():
        assert text is not None, f"{name}: run tools/siblings.py --write"
        assert text.split("\n")[0] == f"# PlainRL {version}, Apache-2.0", name


def test_the_guard_sees_a_changed_character(tmp_path, monkeypatch):
    """Each of these changes to dr_grpo.py changes the part that contains it, and the page of docs/diffs/."""
    changes = {
        "generate": ("isin(token, eos_ids)", "isin(token, eos_ids) "),
        "micro_batches": ('sequences):\n    """Split', 'sequences):\n    """ Split'),
        "inference_copy": ("def inference_copy(", "# x\ndef inference_copy("),
        "evaluate": ("def evaluate(", "@torch.no_grad()\ndef evaluate("),
        "Args.seed": ("    seed: int = 1", "    seed: int = 2"),
        "Args.top_k": (
            "    temperature: float = 0.9",
            '    top_k: int = 0\n    """x"""\n    temperature: float = 0.9',
        ),
        "Args.beta": ("weight of the KL", "weight of a KL"),
        "Args": ("    # ---- sampling", "    # ---- samples"),
        "main": ("optimizer.step()", "optimizer.step()  # x"),
        "header": ('if __name__ == "__main__":', 'if __name__ in ("__main__", "x"):'),
    }
    original = read_script("dr_grpo")
    page = diff_page("dr_grpo")
    (tmp_path / "grpo.py").write_text(read_script("grpo"), encoding="utf-8")
    monkeypatch.setattr("scripts.ROOT", tmp_path)
    for name, (old, new) in changes.items():
        assert original.count(old) >= 1, old
        (tmp_path / "dr_grpo.py").write_text(original.replace(old, new, 1), encoding="utf-8")
        assert parts("dr_grpo").get(name) != parts("grpo").get(name), name
        assert diff_page("dr_grpo") != page, name
