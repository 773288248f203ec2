"""The scripts are siblings: shared parts have the same text, and docs/diffs/ shows or names all other parts.

Also that the help of a flag is one line, that each script names the version, and how changes are carried.
"""

import ast
import re
import shutil
import subprocess
import sys

import pytest
import siblings
from conftest import ROOT
from scripts import SCRIPTS, parent_of, read_script
from siblings import CHILDREN, body, diff_page, parts, patched


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


def whole_scripts():
    """The text of each script, and of what each patch makes."""
    texts = {name: read_script(name) for name in SCRIPTS}
    for path in (ROOT / "variants").glob("*.diff"):
        parent = read_script(path.read_text(encoding="utf-8").split()[1].removesuffix(".py"))
        texts[path.stem] = patched(path, parent)
    return texts


def test_every_script_names_the_version_of_the_citation():
    """A script that was copied away says what it came from. Its first line is the same in all, and in patched ones."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (version,) = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    texts = whole_scripts()
    assert len(texts) > len(SCRIPTS)
    for name, text in texts.items():
        assert text is not None, f"{name}: run tools/siblings.py --write"
        assert text.split("\n")[0] == f"# PlainRL {version}, Apache-2.0", name


def read_nowhere(text):
    """The flags that are read outside of check_args nowhere, and the parameters that a function doesn't use."""
    tree, fields, read, unused = ast.parse(text), set(), set(), []
    for part in tree.body:
        name = getattr(part, "name", "")
        if name == "Args":
            fields = {x.target.id for x in part.body if isinstance(x, ast.AnnAssign)}
        elif name != "check_args":
            attributes = [x for x in ast.walk(part) if isinstance(x, ast.Attribute)]
            read |= {x.attr for x in attributes if ast.unparse(x.value) == "args"}
        if isinstance(part, ast.FunctionDef):
            used = {x.id for x in ast.walk(part) if isinstance(x, ast.Name)}
            unused += [f"{name}({x.arg})" for x in part.args.args if x.arg not in used]
    return sorted(fields - read) + unused


def test_every_flag_is_read():
    """A flag that is accepted and has no effect trains something else than the command says."""
    assert {
        name: read_nowhere(text) for name, text in whole_scripts().items() if read_nowhere(text)
    } == {}
    lora = read_script("grpo_lora")
    for old, new, expected in (
        ("    seed: int = 1\n", "    seed: int = 1\n    adam_betas: float = 0.9\n", ["adam_betas"]),
        ("clip_eps=args.clip_eps", "clip_eps=0.2", ["clip_eps"]),
        ("lora_alpha / A.shape[0]", "2.0", ["add_low_rank(lora_alpha)"]),
    ):
        assert old in lora and read_nowhere(lora.replace(old, new)) == expected


def test_the_guard_sees_a_changed_character(tmp_path, monkeypatch):
    """Each of these changes to dr_grpo.py changes the part that contains it, and the page of docs/diffs/."""
    changes = {
        "generate": ("isin(token, eos_ids)", "isin(token, eos_ids) "),
        "micro_batches": ('minibatch):\n    """Split', 'minibatch):\n    """ Split'),
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


# ---- changes that are carried


def commit_copies(folder, monkeypatch, *names):
    """Let the tool work in this folder: a repository with these files alone, all of them committed."""
    monkeypatch.setattr(siblings, "ROOT", folder)
    (folder / "variants").mkdir()
    for name in names:
        shutil.copy(ROOT / name, folder / name)
    named = ["-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], [*named, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_patches_are_made_again_when_the_parent_changed(tmp_path, monkeypatch, capsys):
    """The tool updates a patch if the parent changes near a patched line.

    If the patched line itself changes, the patch keeps its own, and a person is told.
    """
    commit_copies(tmp_path, monkeypatch, "grpo.py", "variants/cispo.diff")

    def applied():
        """The patched text, or False if the patch needs fuzz."""
        command = ["patch", "--fuzz=0", "-o", "out.py", "grpo.py", "variants/cispo.diff"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True)
        return done.returncode == 0 and (tmp_path / "out.py").read_text(encoding="utf-8")

    before = applied()
    near = "SCRIPT = Path(__file__).resolve()", "SCRIPT = Path(__file__).absolute()"
    change(tmp_path / "grpo.py", *near)
    assert not applied()
    siblings.carry_patches()
    assert applied() == before.replace(*near)
    shutil.copy(ROOT / "variants" / "cispo.diff", tmp_path / "variants")
    assert not capsys.readouterr().out
    clamp = "    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)  # (n, R)\n"
    change(tmp_path / "grpo.py", clamp, clamp.replace("1 - ", "1.0 - "))
    siblings.carry_patches()
    assert applied() == before.replace(*near)
    told = "cispo.diff has other text, so look whether it needs the change in: policy_loss\n"
    assert capsys.readouterr().out == f"{told}    {clamp}"
    # A person makes it from the whole script.
    (tmp_path / "cispo.py").write_text(before.replace(*near), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["siblings.py", "--patch", str(tmp_path / "cispo.py")])
    siblings.main()
    assert applied() == before.replace(*near)
    assert capsys.readouterr().out == "wrote variants/cispo.diff\n"


def test_a_script_gets_what_changed_in_its_parent():
    """Parts move, come and go as in the parent. The script's own parts and lines stay, and a person is told."""
    base = "X = 1\n\n\ndef f():\n    a\n    b\n    c\n\n\ndef g():\n    d\n\n\ndef h():\n    e\n"
    parent = (
        "X = 1\n\n\ndef h():\n    e\n\n\ndef new():\n    n\n\n\ndef f():\n    a\n    b\n    cc\n"
    )
    child = base.replace("    a\n", "    aa\n").replace("def h", "def own():\n    o\n\n\ndef h")
    expected = parent.replace("    a\n", "    aa\n") + "\n\ndef own():\n    o\n"
    assert siblings.carry(child, base, parent) == (expected, {})
    # Both changed the same line, and the child has changed what the parent removes.
    child = base.replace("    c\n", "    x\n").replace("    d\n", "    y\n")
    found, missing = siblings.carry(child, base, parent)
    # A part that the parent no longer has is told by its first lines.
    assert missing == {"f": ["    c\n"], "g": ["def g():\n", "    y\n"]}
    assert "    x\n" in found and "cc" not in found and "    y\n" in found


# The base is the lines a, b, c, d. Each row: what the child has instead, what the parent changes it to, what the child
# gets, and the lines of the base that it has in another form.
CARRIED = {
    "beside another form": ("a x c d", "a b C d", "a x C d", ""),
    "beside a line of its own": ("a b x c d", "a b C d", "a b x C d", ""),
    "around a line of its own": ("a b x c d", "a B C d", "a B x C d", ""),
    "more lines": ("x a b c d", "a b C1 C2 C3 d", "x a b C1 C2 C3 d", ""),
    "fewer lines": ("a b c d x", "A d", "A d x", ""),
    "deleted": ("x a b c d", "a c d", "x a c d", ""),
    "deleted beside another form": ("a b x d", "a c d", "a x d", ""),
    "deleted around a line of its own": ("a b x c d", "a c d", "a x c d", ""),
    "inserted": ("x a b c d", "a b new c d", "x a b new c d", ""),
    "inserted after another form": ("a x c d", "a b new c d", "a x new c d", ""),
    "inserted before another form": ("a b x d", "a b new c d", "a b new x d", ""),
    "inserted first": ("a b c x", "new a b c d", "new a b c x", ""),
    "inserted last": ("x b c d", "a b c d new", "x b c d new", ""),
    "another form": ("a x c d", "a B c d", "a x c d", "b"),
    "another form beside it": ("a x c d", "a B C d", "a x C d", "b"),
    "another form of what is deleted": ("a x c d", "a c d", "a x c d", "b"),
    "no change": ("a x c d", "a b c d", "a x c d", ""),
    "no line of its own": ("a b c d", "A b new d", "A b new d", ""),
}


def function_of(words, name="f"):
    return f"def {name}():\n" + "".join(f"    {word}\n" for word in words.split())


@pytest.mark.parametrize("case", CARRIED)
def test_each_line_is_carried_or_told(case):
    child, parent, expected, told = CARRIED[case]
    # An other part isn't touched, and not told.
    child, base, parent, expected = (
        function_of(words) + "\n\n" + function_of("a", "g")
        for words in (child, "a b c d", parent, expected)
    )
    missing = {"f": [f"    {word}\n" for word in told.split()]} if told else {}
    assert siblings.carry(child, base, parent) == (expected, missing)
    assert siblings.carry(expected, base, parent)[0] == expected  # a second time changes nothing


def test_each_script_has_a_docstring_of_its_own(capsys):
    """Its equal lines are carried, as that of the version, and a person is told to read it: it may be nonsense now."""
    base = '# 1.0\n"""A loss.\n\nShapes: N\n"""\n\nX = 1\n'
    parent = '# 2.0\n"""One loss.\n\nShapes: N, R\n"""\n\nX = 2\n'
    child = base.replace("A loss", "Another loss")
    found, missing = siblings.carry(child, base, parent)
    assert found == parent.replace("One loss", "Another loss") and list(missing) == ["docstring"]
    siblings.tell("x.py", missing)
    assert capsys.readouterr().out == "x.py: its docstring has changed, too. Read it.\n"
    assert siblings.carry(child, base, base.replace("X", "Y"))[1] == {}


def test_a_change_of_grpo_reaches_the_scripts_once(tmp_path, monkeypatch, capsys):
    """Without a change since the last commit there is nothing to carry: it may have been committed too early."""
    commit_copies(tmp_path, monkeypatch, "grpo.py", "dr_grpo.py")
    monkeypatch.setattr(siblings, "SCRIPTS", ["grpo", "dr_grpo"])
    before = (tmp_path / "dr_grpo.py").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="no change since the last commit"):
        siblings.carry_scripts()
    assert (tmp_path / "dr_grpo.py").read_text(encoding="utf-8") == before
    # In dr_grpo.py another line follows this one.
    line = "        token_loss = token_loss + beta * kl\n"
    change(tmp_path / "grpo.py", line, line + "    pass\n")
    siblings.carry_scripts()
    expected = before.replace(line, line + "    pass\n")
    assert (tmp_path / "dr_grpo.py").read_text(encoding="utf-8") == expected != before
    siblings.carry_scripts()
    assert (tmp_path / "dr_grpo.py").read_text(encoding="utf-8") == expected
    assert not capsys.readouterr().out
