"""docs/train.md, models.md, gpu.md and machines.md: commands are accepted, and examples run.

Of docs/real-model.md it checks the command of the public curve.
"""

import json
import re
import shlex
import sys
import types
from pathlib import Path

import datasets
import huggingface_hub
import plan
import pytest
import tyro
from conftest import ROOT, SMALL_MODEL, small_recipe
from scripts import MACHINE_PATCHES, SCRIPTS, read_script
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import grpo_lora
import report

PAGE = "".join(
    (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    for name in ("train", "models", "gpu", "machines")
)
CURVE = (ROOT / "docs" / "real-model.md").read_text(encoding="utf-8").split("## A public curve")[1]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
TINY = dict(num_steps=1, num_prompts=2, num_generations=2, eval_size=2, device="cpu")


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch, tmp_path_factory):
    """These tests don't wait for a network and don't fill the user's cache."""
    cache = str(tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def code(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands() -> list[tuple[str, list[str]]]:
    """The name and the flags of each command of a script, from blocks and from the text."""
    spans = re.findall(r"`(python \w+\.py [^`]*)`", PROSE)
    lines = "\n".join([*code(""), *spans, CURVE]).replace("\\\n", " ").splitlines()
    # The plan of a command takes the command.
    lines = [
        re.sub(r"python benchmark/plan\.py .*?(\w+\.py)", r"python \1", line) for line in lines
    ]
    found = []
    for line in lines:
        match = re.search(r"\b(?:python|torchrun .*?) (\w+)\.py\b(.*)", line)
        if match and match[1] in [*SCRIPTS, *MACHINE_PATCHES, "mine"] and "--help" not in line:
            flags = match[2].replace("$rate", "1e-5").rstrip(" &")
            found.append((match[1], shlex.split(flags)))
    return found


def parse(name: str, flags: list[str]):
    """The Args of the command. `mine` is the page's copy of grpo_lora.py. host_adam.py has grpo.py's."""
    script = grpo_lora if name == "mine" else plan.module_of(name)
    args = tyro.cli(script.Args, args=flags)
    script.check_args(args)
    return args


def run(script, folder, name, **fields):
    """The metrics of a run of the small policy, and its folder."""
    args = small_recipe(script) | TINY | fields
    metrics = script.main(script.Args(**args, runs_dir=str(folder), run_name=name))
    return metrics, folder / name


# ---- commands and quoted lines


def test_every_command_is_accepted():
    found = commands()
    assert len(found) > 10
    for name, flags in found:
        parse(name, flags)


@pytest.mark.parametrize("heading", ["| the line says |", "| line | what to check |"])
def test_the_lines_that_it_quotes_are_printed(heading):
    """The first column of a table quotes what grpo.py prints. A name or a number may stand at its start or end."""
    table = PAGE.split(heading)[1].split("\n\n")[0]
    lines = re.findall(r"^\| `([^`]*)`", table, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        fixed = re.sub(r"^(train|test)(?= )|(?<= )\d+:$", "", line)
        assert fixed in read_script("grpo"), line


# ---- the notebook's cells


def test_the_cells_of_a_notebook(tmp_path, monkeypatch, capsys):
    """Colab's cells, with the small policy on a CPU: all run again after a disconnect, and the report."""
    pytest.importorskip("plotly", reason="plotly: pip install -r tests/requirements.txt")
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    section = page.split("\n## Colab\n")[1].split("\n## ")[0]
    cells = "".join(re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    drive = "/content/drive/MyDrive/runs"
    lines = cells.replace("\\\n", " ").replace(drive, str(tmp_path)).splitlines()
    lines = [shlex.split(x.removeprefix("!python ")) for x in lines if x.startswith("!python ")]
    assert [path for path, *_ in lines] == [
        "grpo.py",
        "grpo.py",
        "grpo_lora.py",
        "report/report.py",
    ]
    for _ in range(2):
        for path, *flags in lines[1:3]:
            script = {"grpo.py": grpo, "grpo_lora.py": grpo_lora}[path]
            args = parse(script.__name__, flags)
            assert args.device == "cuda" and args.save_every > 0
            run(script, Path(args.runs_dir), args.run_name)
    assert capsys.readouterr().out.count("goes on after 1 of 1 steps") == 2
    (folder,) = lines[3][1:]
    assert report.main(tyro.cli(report.Args, args=[folder])) == Path(folder, "report.html")


def test_the_commands_for_a_t4_take_what_the_page_says():
    """Hours, and GB of each GPU."""
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    lines = page.replace("\\\n", " ").splitlines()
    for name, gpus in (("first", 1), ("lora", 1), ("both", 2)):
        line = next(line for line in lines if line.endswith(f"--run-name {name}"))
        script, flags = re.search(r"(\w+)\.py (.*)", line).groups()
        args = parse(script, shlex.split(flags))
        config = plan.read_config(args.model)
        peak = plan.count(script, config, args, card=15, gpus=gpus)["peak"] / 1e9
        hours = sum(plan.run_hours(script, config, "T4", args, gpus=gpus))
        assert f"It takes {hours:.1f} hours, and {peak:.1f} GB of" in page


# ---- the examples


@pytest.fixture
def problems(tmp_path):
    """The page's data set."""
    (lines,) = code("json")
    path = tmp_path / "problems.jsonl"
    path.write_text(lines, encoding="utf-8")
    return path


def mine(monkeypatch):
    """grpo_lora.py with the page's reward in the place of its own."""
    (reward,) = [block for block in code("python") if "REWARDS =" in block]
    source = read_script("grpo_lora")
    changed, count = re.subn(r"^REWARDS = .*\n", lambda _: reward, source, flags=re.MULTILINE)
    assert count == 1
    module = types.ModuleType("mine")
    module.__file__ = str(ROOT / "mine.py")
    # A dataclass looks up its module here.
    monkeypatch.setitem(sys.modules, "mine", module)
    exec(compile(changed, module.__file__, "exec"), module.__dict__)
    module.SCRIPT = ROOT / "grpo_lora.py"  # a run copies its script
    return module


def test_the_reward(monkeypatch):
    (reward, _) = mine(monkeypatch).REWARDS
    texts = ["<answer>1.4</answer>", "<answer>1.42</answer>", "<answer>1.43</answer>", "1.41", "-"]
    assert reward(texts, ["1.41"] * 5, [0.01] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward(["<answer>72</answer>"] * 2, ["3 * 24 #### 72", "71"], [0, 0]) == [1.0, 0.0]


def test_the_data_and_the_reward_train(monkeypatch, tmp_path, problems, capsys):
    """The command with which the page tries data and reward on a CPU, with the tests' small model."""
    (flags,) = [x for name, x in commands() if name == "mine" and "--num-steps" in x]
    assert ("grpo", flags) in commands()
    script = mine(monkeypatch)
    given = tyro.cli(script.Args, args=flags)
    fields = ["question_column", "answer_column", "max_prompt_tokens", "num_steps"]
    fields = {name: getattr(given, name) for name in fields}
    metrics, folder = run(script, tmp_path, "mine", **fields, dataset=str(problems))
    assert metrics["step"] == 2
    shares = metrics["rollout/near_reward"] + metrics["rollout/format_reward"]
    assert metrics["rollout/reward_mean"] == pytest.approx(shares)
    printed = capsys.readouterr().out
    assert "train data: 3 problems\n" in printed
    assert "is held out, 1 problems" in printed
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    assert {sample["answer"] for sample in samples} <= {"3 * 24 #### 72", "1.41"}


def test_a_chat_is_a_question(tmp_path):
    (chat,) = re.findall(r"`(\[\{[^`]*\}\])`", PROSE)
    row = {"question": json.loads(chat), "answer": 86400}
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps(row) * 3)
    assert run(grpo, tmp_path, "chat", dataset=str(tmp_path / "data"))[0]["step"] == 1


def test_using_the_model_and_the_adapter(tmp_path, monkeypatch, capsys):
    """The page's code answers a question, with the merged model and with the adapter on the first one."""
    pytest.importorskip("peft")
    _, folder = run(grpo_lora, tmp_path, "lora", learning_rate=0.1)
    whole, adapter = [block for block in code("python") if "from_pretrained" in block]
    whole = whole.replace("runs/first", str(folder))
    line = next(x for x in whole.splitlines(True) if x.startswith("model = "))
    capsys.readouterr()
    answers = []
    for source in (whole, whole.replace(line, adapter)):
        names = {}
        exec(source, names)
        answers.append(capsys.readouterr().out)
        assert names["prompt"] == names["question"]  # no chat template, no instructions
        with names["torch"].no_grad():
            logits = names["model"](names["ids"]).logits
        answers.append(logits)
    assert answers[0] and answers[2]
    # Merged in float32 and rounded to bf16, or added in bf16.
    assert (answers[1] - answers[3]).abs().mean() < 0.05 * answers[1].abs().mean()


def test_a_chat(tmp_path, monkeypatch, capsys):
    """The page's loop answers until the question is empty."""
    (source,) = [block for block in code("python") if "pipeline(" in block]
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(SMALL_MODEL).save_pretrained(tmp_path)
    questions = iter(["12+34=", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(questions))
    exec(source.replace("runs/first/model", str(tmp_path)), {})
    assert "<answer>" in capsys.readouterr().out
