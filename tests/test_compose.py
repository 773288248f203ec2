"""tools/compose.py: the pairs that compose do so today, and the composed scripts do what both scripts say."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import compose
import pytest
import torch
from compose import Change
from conftest import ROOT, small_recipe
from test_equations import loss_of, make_args, ragged_batch

import dr_grpo

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Two differences in one script\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all composed scripts, and what they need to run."""
    return tmp_path_factory.mktemp("compose")


@pytest.fixture(scope="module")
def results(folder):
    return compose.compose_all(folder)


@pytest.fixture
def load(folder, results, monkeypatch):
    """A function that returns the module of a script in the folder."""

    def module(name):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        script = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, script)
        spec.loader.exec_module(script)
        return script

    return module


def docstring_and_rest(path: Path) -> tuple[str, str]:
    docstring, _, rest = path.read_text(encoding="utf-8").partition('"""\n\nimport')
    return docstring, rest


def test_the_table_is_what_patch_says_today(results):
    """If this fails, run `python tools/compose.py --write`, and read its docstring about new pairs."""
    assert f"{compose.START}\n{compose.table(results)}\n{compose.END}\n" in SECTION


def test_each_wrong_pair_still_applies(results):
    """A pair in WRONG that patch rejects today needs no reason any more."""
    assert not [pair for pair in compose.WRONG if results[pair].problem]


def test_the_commands_of_the_page(folder, results):
    """The commands make the scripts that tools/compose.py makes. patch rejects hunks of the docstring alone."""
    (folder / "variants").symlink_to(ROOT / "variants")
    blocks = re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert commands.pop(1) == "python dr_grpo_lora.py"
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == int(command.startswith("diff")), done.stdout
    for name, difference, target in (
        ("dr_grpo_lora", "dr_grpo", "grpo_lora"),
        ("cispo_tools", "cispo", "grpo_tools"),
    ):
        docstring, rest = docstring_and_rest(folder / f"{name}.py")
        assert docstring == docstring_and_rest(folder / f"{target}.py")[0]
        same = folder / f"{compose.output_name(difference, target)}.py"
        assert rest == docstring_and_rest(same)[1]
        rejected = compose.changes((folder / f"{name}.py.rej").read_text(encoding="utf-8"))
        last_line = compose.last_line_of_docstring(folder / "grpo.py")
        assert rejected[0].start == 1 and max(hunk.start for hunk in rejected) <= last_line


def functions(path: Path) -> dict[str, str]:
    """The text of each function and class by its name, with its comments and decorators."""
    found = {}
    without_headings = re.sub(r"^# ====.*\n", "", docstring_and_rest(path)[1], flags=re.MULTILINE)
    for text in without_headings.split("\n\n\n"):
        match = re.search(r"^(?:def|class) (\w+)", text, re.MULTILINE)
        if match:
            found[match.group(1)] = text.strip()
    return found


def test_what_one_script_changes_is_taken_from_it(folder, results):
    """If only one script of a pair changes a function, the composed script has this change, word for word."""
    names = ["grpo", *compose.TARGETS, *compose.VARIANTS]
    of_script = {name: functions(folder / f"{name}.py") for name in names}
    parent = of_script["grpo"]
    changed_by_both = {}
    for pair in compose.working(results):
        difference, target = (of_script[name] for name in pair)
        composed = functions(folder / f"{compose.output_name(*pair)}.py")
        for name in parent.keys() | difference.keys() | target.keys() | composed.keys():
            before = parent.get(name)
            if difference.get(name) == before:
                assert composed.get(name) == target.get(name), (pair, name)
            elif target.get(name) == before:
                assert composed.get(name) == difference.get(name), (pair, name)
            else:
                changed_by_both.setdefault(name, set()).add(pair)
    # The tests below compare these losses.
    assert changed_by_both.keys() == {"main", "Args", "policy_loss", "check_args"}
    steps = "grpo_process"
    assert changed_by_both["policy_loss"] == {
        ("dr_grpo", steps),
        (steps, "dr_grpo"),
        ("sapo", steps),
        ("unbiased_kl", "dr_grpo"),
        ("unbiased_kl", "grpo_offpolicy"),
        ("unbiased_kl", steps),
    }


@pytest.mark.parametrize("target", ["grpo_lora", "grpo_process"])
def test_dr_grpo_stays_dr_grpo(target, load):
    script = load(f"dr_grpo_on_{target}")
    rewards = torch.rand(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    args = make_args(script)
    expected = dr_grpo.compute_advantages(args, rewards)
    assert torch.equal(script.compute_advantages(args, rewards), expected)
    same_loss_and_gradient(script, dr_grpo, target)


def test_sapo_stays_sapo_with_an_advantage_for_each_token(load):
    same_loss_and_gradient(load("sapo_on_grpo_process"), load("sapo"), "grpo_process")


@pytest.mark.parametrize("target", ["dr_grpo", "grpo_offpolicy", "grpo_process"])
def test_unbiased_kl_changes_only_the_kl(target, load):
    """It changes the target's gradient as it changes that of grpo.py. dr_grpo.py has another divisor."""
    logprobs, old, ref, advantages, mask = ragged_batch(1)
    gradients = {}
    for name in ("grpo", "unbiased_kl", target, f"unbiased_kl_on_{target}"):
        script = load(name)
        per_token = name.endswith(("grpo_offpolicy", "grpo_process"))
        given = advantages.expand(mask.shape) if per_token else advantages
        args = make_args(script, beta=0.1, max_new_tokens=10)
        loss, _ = loss_of(script, args, logprobs, old, ref, given, mask, 9, 30)
        (gradients[name],) = torch.autograd.grad(loss, logprobs)
    expected = gradients["unbiased_kl"] - gradients["grpo"]
    if target == "dr_grpo":
        expected = expected * mask.sum(1, keepdim=True) / 10
    change = gradients[f"unbiased_kl_on_{target}"] - gradients[target]
    assert torch.allclose(change, expected, atol=1e-12) and change.abs().max() > 1e-3


def same_loss_and_gradient(script, parent, target):
    logprobs, old, ref, advantages, mask = ragged_batch(1)
    found = []
    for module in (script, parent):
        given = advantages
        if module is script and target == "grpo_process":
            given = advantages.expand(mask.shape)
        args = make_args(module, beta=0.1)
        counts = dict(num_seqs=9, num_tokens=30)
        loss, stats = loss_of(module, args, logprobs, old, ref, given, mask, **counts)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        found.append((loss, gradient, stats))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and found[0][1].abs().max() > 0.01
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize(
    "name", ["dr_grpo_on_grpo_lora", "cispo_on_grpo_tools", "grpo_process_on_grpo_multigpu"]
)
def test_two_steps(name, load, tmp_path):
    script = load(name)
    args = small_recipe(script) | dict(num_steps=2, num_prompts=4, num_generations=4)
    args |= dict(eval_size=2, device="cpu", runs_dir=str(tmp_path), run_name=name)
    metrics = script.main(script.Args(**args))
    assert metrics["step"] == 2 and metrics["optim/skipped"] == 0 and metrics["optim/grad_norm"] > 0
    for line in (tmp_path / name / "metrics.jsonl").open():
        assert all(math.isfinite(value) for value in json.loads(line).values())


def test_where_a_hunk_may_go():
    """The target inserts 3 lines above line 5, changes line 10 to 2 lines, and removes lines 20 and 21."""
    diff = "@@ -4,0 +5,3 @@\n@@ -10 +13,2 @@\n@@ -20,2 +23,0 @@\n"
    target = compose.changes(diff)
    assert target == [Change(5, 0, 3), Change(10, 1, 1), Change(20, 2, -2)]
    assert compose.right_offsets(Change(1, 3, 0), target) == {0}
    # The insertion is at the upper edge of the first hunk, and at the lower edge of the second one.
    assert compose.right_offsets(Change(5, 3, 0), target) == {3}
    assert compose.right_offsets(Change(2, 3, 0), target) == {0, 3}
    # The changed line 10 is inside the hunk.
    assert compose.right_offsets(Change(9, 3, 0), target) == {3, 4}
    assert compose.right_offsets(Change(12, 3, 0), target) == {4}
    assert compose.right_offsets(Change(30, 3, 0), target) == {2}


def test_a_hunk_at_a_wrong_place_is_noticed(tmp_path):
    """The target changes "b", so patch ignores the context and puts "new" at the old line number, two too high."""
    head = ['"""Text.', '"""', "", "import os", "import re"]
    scripts = {
        "grpo": [*head, "a", "b", "c", "d", "e"],
        "difference": [*head, "a", "new", "b", "c", "d", "e"],
        "target": [*head, "one", "two", "a", "other", "c", "d", "e"],
    }
    for name, lines in scripts.items():
        (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n")
    result = compose.compose(tmp_path, "difference", "target")
    assert result == compose.Result("patch puts 1 of 1 hunks at a wrong place", True)
    composed = (tmp_path / "difference_on_target.py").read_text().splitlines()
    assert composed == [*head, "one", "new", "two", "a", "other", "c", "d", "e"]
