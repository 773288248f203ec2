"""README.md, .ci/run and the flags that pages name agree with the code."""

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import siblings
import torch
import tyro
from conftest import ROOT, small_recipe
from scripts import SCRIPTS

import grpo
import grpo_vllm
import report

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_lesson_is_the_current_diff():
    """README.md shows the diff from grpo.py to dr_grpo.py. `python tools/siblings.py --write` updates this diff."""
    shown = re.search(r"```diff\n(.*?)\n```", README, re.DOTALL).group(1)
    assert shown == siblings.lesson()


def test_the_loop_shown_is_that_of_the_first_script():
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "for step" in code
    ]
    *functions, loop = block.split("\n\n\n")
    script = (ROOT / "first.py").read_text(encoding="utf-8")
    assert len(functions) == 2 and all(f"\n\n\n{text}\n\n\n" in script for text in functions)
    assert "".join(f"    {line}\n" for line in loop.splitlines()) in script


def test_a_task_of_your_own(tmp_path, monkeypatch):
    """The file of the page trains two scripts, with their flags alone. Its reward reads the whole response."""
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "REWARDS" in code
    ]
    (tmp_path / "my_task.py").write_text(block, encoding="utf-8")
    rows = [
        {"question": f"Which word is the longest: a, {'b' * k}?", "answer": "b" * k}
        for k in range(2, 42)
    ]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"```\n([^`]*--task my_task.py.*?)```", README, re.DOTALL)
    assert "dr_grpo.py" in commands
    for command in commands.splitlines():
        name, _, *flags = command.removeprefix("python ").split()
        script = __import__(name.removesuffix(".py"))
        given = tyro.cli(script.Args, args=flags[1:])
        fields = small_recipe(script) | dict(dataset=given.dataset, task=given.task, num_prompts=2)
        fields |= dict(num_steps=1, max_prompt_tokens=200, examples=True, device="cpu")
        script.main(script.Args(**fields, run_name=name))
        samples = Path("runs", name, "samples.jsonl").read_text().splitlines()
        assert all(
            "pear, banana, fig?\nbanana" in json.loads(sample)["prompt"] for sample in samples
        )
    (reward,) = script.load_task(given).REWARDS
    assert reward(completions=[" Banana\n", "a banana", "fig"], answer=["banana"] * 3) == [
        1.0,
        0.0,
        0.0,
    ]


def test_the_sample_output_is_todays(tmp_path, capsys):
    """grpo.py prints the first lines of the recorded output, down to the first sample.

    Another kind of CPU rounds differently, which can change a sample. `python benchmark/tables.py --transcript` records
    the output again.
    """
    import tables

    recorded_on = json.loads((ROOT / "tests" / "golden.json").read_text())["cpu"]
    if torch.backends.cpu.get_cpu_capability() != recorded_on:
        pytest.skip(f"recorded on {recorded_on}")
    args = replace(grpo.BUNDLED, num_steps=1, eval_size=20, device="cpu", runs_dir=str(tmp_path))
    grpo.main(args)
    texts = tables.TRANSCRIPT.read_text(encoding="utf-8"), capsys.readouterr().out
    # This run evaluates on fewer problems.
    lines = "\n".join(texts).replace(str(ROOT), tables.HOME).splitlines()
    lines = [line for line in lines if not line.startswith(("test data:", "evaluating", "before:"))]
    lines = [re.sub(r", [0-9.e-]+ s, [0-9]+ min left$", "", line) for line in lines]
    starts = [k for k, line in enumerate(lines) if line.startswith("train data:")]
    recorded, printed = (lines[k : k + 4] for k in starts)
    assert recorded[2].startswith("step 1: ")
    assert printed == recorded


def test_continuous_integration_runs_the_commands_of_the_pages():
    """.ci/run begins with README.md's two lines and CONTRIBUTING.md's tests. The workflow has the two lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The tests")[1]
    both, tests = [
        re.search(r"```\n(pip .*?)```", x, re.DOTALL)[1].splitlines() for x in (README, page)
    ]
    commands = [command for line in both for command in line.split(" && ")]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    first = lines.index("pip install -r requirements.txt")
    steps = [line for line in lines[first:] if line and not line.startswith("#")]
    assert commands[2:] == tests[:2] and len(tests) == 4
    assert steps[:6] == commands + tests[2:]
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert all(f"- run: {line}\n" in workflow for line in both)


def test_the_packages_are_the_same_for_pip_and_for_uv():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = [(ROOT / x / "requirements.txt").read_text().splitlines() for x in (".", "tests")]
    assert project["project"]["dependencies"] == lists[0]
    assert ["-r ../requirements.txt", *project["dependency-groups"]["dev"]] == lists[1]
    assert set((ROOT / "report" / "requirements.txt").read_text().splitlines()) <= set(lists[1])
    assert f"# PlainRL {project['project']['version']}, " in (ROOT / "grpo.py").read_text(
        encoding="utf-8"
    )


def test_the_version_of_vllm_is_the_same_everywhere():
    """.ci/run and CONTRIBUTING.md install the version that grpo_vllm.py asks for."""
    for page in (ROOT / ".ci" / "run", ROOT / "CONTRIBUTING.md"):
        versions = re.findall(r"vllm(?:-cpu)?==([\d.]+\d)", page.read_text(encoding="utf-8"))
        assert set(versions) == {"0.32.0"}, page
    assert "vllm 0.32.0" in grpo_vllm.__doc__


def test_every_flag_in_it_exists():
    flags = {field.name for field in fields(report.Args)} | {"help"}
    for name in SCRIPTS:
        for part, text in siblings.parts(name).items():
            if part.startswith("Args."):
                flag = part.removeprefix("Args.").replace("_", "-")
                flags.add(flag)
                if ": bool = " in text:
                    flags.add(f"no-{flag}")
    pages = [ROOT / "docs" / f"{name}.md" for name in ("train", "metrics")]
    # Alone or with a value in a code span; a longer span is a command.
    spans = [re.findall(r"`--([a-z-]+)[^`]*`", x.read_text(encoding="utf-8")) for x in pages]
    of_others = {"generation-config", "max-lora-rank"}  # vLLM's
    used = set(re.findall(r"--([a-z][a-z-]+)", README)).union(*spans) - of_others
    assert len(used) > 25 and used <= flags
