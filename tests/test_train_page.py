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
from conftest import ROOT, SMALL_JUDGE, SMALL_MODEL, default_task, small_recipe
from scripts import MACHINE_PATCHES, SCRIPTS, read_script
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import grpo
import grpo_lora
import ppo_rlhf
import report
from utils.rewards import format_reward

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
            flags = match[2].replace("$rate", "1e-5").replace("$seed", "1").rstrip(" &")
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


def changed_script(monkeypatch, name, pattern, replacement):
    """The module of a script, in which one line or more are replaced."""
    changed, count = re.subn(pattern, lambda _: replacement, read_script(name), flags=re.MULTILINE)
    assert count == 1
    module = types.ModuleType("mine")
    module.__file__ = str(ROOT / "mine.py")
    # A dataclass looks up its module here.
    monkeypatch.setitem(sys.modules, "mine", module)
    exec(compile(changed, module.__file__, "exec"), module.__dict__)
    module.SCRIPT = ROOT / f"{name}.py"  # a run copies its script
    return module


@pytest.fixture
def near_task(tmp_path):
    """The path of the page's task."""
    (block,) = [block for block in code("python") if "REWARDS =" in block]
    path = tmp_path / "near_task.py"
    path.write_text(block, encoding="utf-8")
    return str(path)


def line_of_page(start):
    """The line for a copy of a script that begins so."""
    (line,) = re.findall(rf"`({re.escape(start)}[^`]*)`", PROSE)
    return " ".join(line.split())


def test_the_reward(near_task):
    task = grpo.load_task(grpo.Args(task=near_task))
    (reward, _) = task.REWARDS
    assert task.EXAMPLES == default_task(grpo).EXAMPLES
    texts = ["<answer>1.4</answer>", "<answer>1.42</answer>", "<answer>1.43</answer>", "1.41", "-"]
    assert reward(texts, ["1.41"] * 5, [0.01] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward(["<answer>72</answer>"] * 2, ["3 * 24 #### 72", "71"], [0, 0]) == [1.0, 0.0]


def test_the_data_and_the_reward_train(tmp_path, problems, near_task, capsys):
    """The command with which the page tries data and reward on a CPU, with the tests' small model."""
    (flags,) = [x for _, x in commands() if "near_task.py" in x and "--num-steps" in x]
    assert ("grpo", flags[2:]) in commands() and flags[:2] == ["--task", "near_task.py"]
    given = tyro.cli(grpo_lora.Args, args=flags)
    fields = ["question_column", "answer_column", "max_prompt_tokens", "num_steps"]
    fields = {name: getattr(given, name) for name in fields}
    fields |= dict(dataset=str(problems), task=near_task)
    metrics, folder = run(grpo_lora, tmp_path, "near", **fields)
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


@pytest.fixture
def chat_run(tmp_path):
    """The folder of a run on chats with a system prompt and a task with an example, for a model with a template."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(SMALL_MODEL).save_pretrained(tmp_path / "base")
    chat = [{"role": "system", "content": "3+4"}, {"role": "user", "content": "12+34="}]
    row = {"question": chat, "answer": 46}
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps(row) * 3)
    given = dict(model=str(tmp_path / "base"), dataset=str(tmp_path / "data"), examples=True)
    task = tmp_path / "my_task.py"
    task.write_text(
        'from utils.task import REWARDS\nEXAMPLES = [("1+2=", "3")]\n', encoding="utf-8"
    )
    folder = run(grpo, tmp_path, "chats", **given, task=str(task))[1]
    task.unlink()  # the run's folder has a copy
    return folder


def test_ask_keeps_the_system_prompt(chat_run, capsys):
    source, _ = [block for block in code("python") if "from_pretrained" in block]
    question = re.search(r"^question = .*$", source, re.MULTILINE)[0]
    source = source.replace(question, 'question = "5+6="').replace("runs/first", str(chat_run))
    names = {}
    exec(source, names)
    assert names["prompt"] == "s3+4u1+2=a3u5+6="


def test_a_chat(chat_run, monkeypatch, capsys):
    """The page's loop answers until the question is empty, with the run's system prompt and examples."""
    (source,) = [block for block in code("python") if "pipeline(" in block]
    questions = iter(["12+34=", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(questions))
    names = {}
    exec(source.replace("runs/first", str(chat_run)), names)
    roles = [message["role"] for message in names["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    *texts, answer = [message["content"] for message in names["messages"]]
    assert texts == ["3+4", "1+2=", "3", "12+34="] and answer in capsys.readouterr().out


def test_a_base_model_with_a_chat_template_gets_plain_text(tmp_path, monkeypatch, capsys):
    """The page's line in a copy. The saved tokenizer has no template, either, so that ask.py asks as the run did."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    tokenizer.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(SMALL_MODEL).save_pretrained(tmp_path / "base")
    start = "    tokenizer = AutoTokenizer.from_pretrained(find_model(args))\n"
    line = line_of_page("tokenizer.chat_template = ")
    plain = changed_script(monkeypatch, "grpo", re.escape(start), f"{start}    {line}\n")
    prompts = []
    for name, script in (("chat", grpo), ("plain", plain)):
        _, folder = run(script, tmp_path, name, model=str(tmp_path / "base"))
        prompts.append(re.findall(r"first prompt: '(.*?)', answer", capsys.readouterr().out)[0])
    assert prompts[0] == f"<{prompts[1]}>"
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template is None


def test_a_response_that_runs_on_into_an_example_loses_its_1():
    (question, answer), (_, right), _ = default_task(grpo).EXAMPLES
    texts = [right, f"{right}\n{question}", f"{right}\n{question}\n{answer}"]
    gold = re.findall(r"<answer>(.*)</answer>", right) * 3
    assert grpo.accuracy_reward(texts, gold) == [1.0, 1.0, 0.0]
    assert format_reward(texts, gold) == pytest.approx([0.4] * 3)


def test_a_reward_model_of_another_scale(tmp_path, monkeypatch):
    """Its head divided by 10, as the page says: the run is that of the judge it was made from."""
    judge = AutoModelForSequenceClassification.from_pretrained(SMALL_JUDGE)
    judge.score.weight.data *= 10
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(SMALL_JUDGE).save_pretrained(tmp_path / "judge")
    end = "    return reward_model\n"
    line = line_of_page("reward_model.score.weight.data")
    divided = changed_script(monkeypatch, "ppo_rlhf", f"^{end}", f"    {line}\n{end}")
    given = dict(num_steps=2, num_iterations=3)
    expected, _ = run(ppo_rlhf, tmp_path, "judge_1", **given)
    whole, _ = run(ppo_rlhf, tmp_path, "judge_10", reward_model=str(tmp_path / "judge"), **given)
    found, _ = run(divided, tmp_path, "divided", reward_model=str(tmp_path / "judge"), **given)
    names = [name for name in expected if not name.startswith("time/")]
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert whole["value/clip_frac"] > expected["value/clip_frac"] + 0.1


def test_a_fixed_score_for_cut_responses(tmp_path, monkeypatch):
    """The page's line for Huang's rule, with responses of which some are cut."""
    line = line_of_page('scores["score"]')
    scored = r"^        scores, first_scores = score_responses\(\n.*\n        \)\n"
    (start,) = re.findall(scored, read_script("ppo_rlhf"), re.MULTILINE)
    huang = changed_script(monkeypatch, "ppo_rlhf", re.escape(start), f"{start}        {line}\n")
    _, folder = run(
        huang, tmp_path, "huang", missing_eos_penalty=0.0, max_new_tokens=18, num_prompts=16
    )
    rewards, ended = [], []
    for sample in map(json.loads, (folder / "samples.jsonl").open()):
        rewards += sample["rewards"]
        ended += sample["ended"]
    assert 0 < sum(ended) < len(ended)
    assert {r for r, e in zip(rewards, ended, strict=True) if not e} == {-1.0}
    assert len({r for r, e in zip(rewards, ended, strict=True) if e}) > 5
