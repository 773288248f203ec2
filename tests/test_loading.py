"""Models and data from the hub's cache or a folder, recipes by model, prompts, and what importing a script does."""

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import transformers
from conftest import ROOT, SHARED
from tokenizers.processors import TemplateProcessing

NOWHERE = "http://127.0.0.1:9"  # no one listens there
ADDER = ROOT / "assets" / "adder"
STORIES = SHARED / "models" / "stories260K"
SMALL = dict(num_steps=1, num_prompts=2, num_generations=2, max_new_tokens=8, eval_size=4, warmup_updates=0)


def make_args(script, **given):
    """Args of a run of one small step, of the fields that this script has."""
    known = {field.name for field in dataclasses.fields(script.Args) if field.init}
    return script.Args(**{name: value for name, value in {**SMALL, **given}.items() if name in known})


def run_python(*arguments, cwd, **environment):
    """Run python in a process of its own, with no hub in reach."""
    hub = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in hub} | {"HF_ENDPOINT": NOWHERE, **environment}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- models and recipes


@pytest.mark.shared_text
def test_hub_cache(script, tmp_path):
    """A model that the hub's cache holds is found under its short name and trains with no network."""
    model = tmp_path / "hub" / "models--HuggingFaceTB--TinyAdder"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(ADDER, model / "snapshots" / commit)
    before = sorted(path for path in tmp_path.rglob("*"))

    flags = dict(model="TinyAdder", dataset="assets/addition/train.jsonl", num_steps=1, num_prompts=2)
    flags |= dict(num_generations=2, max_new_tokens=8, eval_size=4, runs_dir=tmp_path / "runs", run_name="run")
    known = {field.name for field in dataclasses.fields(script.Args)}
    flags = [part for k, v in flags.items() if k in known for part in (f"--{k.replace('_', '-')}", str(v))]
    ended = run_python(f"{script.__name__}.py", *flags, cwd=ROOT, HF_HUB_CACHE=str(tmp_path / "hub"))
    assert ended.returncode == 0, ended.stderr

    run = tmp_path / "runs" / "run"
    written = [path for path in tmp_path.rglob("*") if path not in before and run not in path.parents]
    assert sorted(written) == [run.parent, run]
    args = json.loads((run / "args.json").read_text(encoding="utf-8"))
    assert args["model"] == "HuggingFaceTB/TinyAdder"
    gsm8k_recipe = {"learning_rate": 1e-5, "beta": 0.04, "temperature": 0.9}
    for name in gsm8k_recipe:
        if name in script.RECIPES:
            assert args[name] == script.RECIPES[name][1]
            assert args[name] == gsm8k_recipe[name] or script.__name__ != "grpo"
    assert args["max_new_tokens"] == 8 and args["num_steps"] == 1  # given flags win
    assert len(read_jsonl(run / "metrics.jsonl")) == 2  # before the training, and its step


@pytest.mark.parametrize("model", ["assets/adder", str(ADDER), f"{ADDER}/../adder/"])
def test_bundled_recipe(script, model, tmp_path, monkeypatch):
    """Found from any working directory, and however its path is written."""
    monkeypatch.chdir(tmp_path)
    args = script.check_args(script.Args(model=model))
    assert args.model == str(ADDER)
    assert {name: getattr(args, name) for name in script.RECIPES} == {k: v[0] for k, v in script.RECIPES.items()}


def test_other_recipe(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ADDER, tmp_path / "mine")
    names = {"SmolLM2-1.7B": "HuggingFaceTB/SmolLM2-1.7B", "owner/name": "owner/name"}
    names |= {"mine": str(tmp_path / "mine"), "./mine": str(tmp_path / "mine")}
    for given, model in names.items():
        args = script.check_args(script.Args(model=given))
        assert args.model == model
        assert {name: getattr(args, name) for name in script.RECIPES} == {k: v[1] for k, v in script.RECIPES.items()}
        assert script.check_args(args) == args  # what a resumed run has saved resolves to itself


@pytest.mark.parametrize("model", ["assets/adder", "SmolLM2-1.7B"])
def test_given_flags_win(script, model):
    """Also the flags that turn something off: 0 and False are not None."""
    given = dict(dataset="mine.jsonl", max_new_tokens=5, temperature=0.7, num_steps=3, learning_rate=3e-6)
    given |= dict(warmup_updates=1, gradient_checkpointing=True, eval_every=7, beta=0.5)
    off = dict(warmup_updates=0, gradient_checkpointing=False, eval_every=0, beta=0.0)
    for chosen in (given, given | off):
        chosen = {name: value for name, value in chosen.items() if name in script.RECIPES}
        args = script.check_args(script.Args(model=model, **chosen))
        assert {name: getattr(args, name) for name in chosen} == chosen


@pytest.mark.shared_text
def test_configuration_of_a_hub_data_set(script, monkeypatch):
    """openai/gsm8k has two and gets main, whether it is trained or evaluated on; others get what is given, or none."""
    asked = []
    monkeypatch.setattr(script.datasets, "load_dataset", lambda *args, **kwargs: asked.append(args) or [{"a": 1}])
    for args in (script.Args(), script.Args(dataset_config="socratic")):
        for source in ("openai/gsm8k", "owner/other"):
            assert script.read_rows(args, source, "test", "--eval-dataset") == [{"a": 1}]
    assert asked == [
        ("openai/gsm8k", "main"),
        ("owner/other", None),
        ("openai/gsm8k", "socratic"),
        ("owner/other", "socratic"),
    ]


@pytest.mark.shared_text
def test_check_args_leaves_its_argument_alone(script):
    args = script.Args()
    script.check_args(args)
    assert args == script.Args()


@pytest.mark.shared_text
def test_machine_without_git(script, tmp_path, monkeypatch):
    """The commit is a note in versions.json: a copy of the script on a machine without git runs all the same."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n' * 10)
    monkeypatch.setenv("PATH", str(tmp_path))
    script.main(
        make_args(script, dataset=str(tmp_path / "rows.jsonl"), runs_dir=str(tmp_path / "runs"), run_name="run")
    )
    assert "torch" in json.loads((tmp_path / "runs" / "run" / "versions.json").read_text())


# ---- prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)


def make_tokenizer(folder, chat_template=None):
    """The adder's tokenizer with a BOS token that it puts before every text, as Llama's does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    vocabulary = json.loads((ADDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokenizer.add_special_tokens({"bos_token": "!"})  # a token of the vocabulary, so that the adder's embedding has it
    assert tokenizer.bos_token_id == vocabulary["!"]
    special_tokens = [("!", vocabulary["!"])]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=special_tokens)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("1").input_ids == [vocabulary["!"], vocabulary["1"]]  # or nothing below tests anything
    return tokenizer


@pytest.fixture
def first_prompt(script, tmp_path):
    """The first training example of load_data on one question."""
    (tmp_path / "rows.jsonl").write_text('{"question": "12+34=", "answer": "46"}\n' * 10)

    def call(tokenizer, **given):
        args = make_args(script, dataset=str(tmp_path / "rows.jsonl"), max_prompt_tokens=200, **given)
        return script.load_data(script.check_args(args), tokenizer)[0][0]

    return call


@pytest.mark.shared_text
@pytest.mark.parametrize("system", [None, "", "think first"])
def test_chat_template(first_prompt, tmp_path, system):
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    example = first_prompt(tokenizer, system_prompt=system)
    assert example["prompt"] == "!" + (f"[system:{system}]" if system else "") + "[user:12+34=][assistant:"
    # The template has written BOS; tokenizing with special tokens would put a second one before it.
    assert example["prompt_ids"] == tokenizer(example["prompt"], add_special_tokens=False).input_ids
    assert (
        example["prompt_ids"].count(tokenizer.bos_token_id) == 1 and tokenizer.eos_token_id not in example["prompt_ids"]
    )


@pytest.mark.shared_text
@pytest.mark.parametrize("system", [None, "", "think first"])
def test_no_chat_template(first_prompt, tmp_path, system):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    example = first_prompt(tokenizer, system_prompt=system)
    assert example["prompt"] == (f"{system}\n12+34=\n" if system else "12+34=")
    assert tokenizer.decode(example["prompt_ids"]) == "!" + example["prompt"]  # BOS, once
    assert tokenizer.eos_token_id not in example["prompt_ids"]


@pytest.mark.shared_text
def test_default_system_prompt(script, tmp_path):
    """A model with a chat template is told about the tags, unless --system-prompt says otherwise."""
    folder = shutil.copytree(ADDER, tmp_path / "model")
    make_tokenizer(folder, TEMPLATE)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))  # the text is long
    rows = [{"question": f"{k}+34=", "answer": str(k + 34)} for k in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = dict(model=str(folder), dataset=str(tmp_path / "rows.jsonl"), runs_dir=str(tmp_path / "runs"))
    for system, expected in ((None, f"[system:{script.SYSTEM_PROMPT}]"), ("", "")):
        name = f"given-{system is not None}"
        script.main(make_args(script, run_name=name, system_prompt=system, max_prompt_tokens=1500, **given))
        samples = read_jsonl(tmp_path / "runs" / name / "samples.jsonl")
        assert len(samples) == 2
        for sample in samples:
            assert re.fullmatch(re.escape(f"!{expected}[user:") + r"\d\+34=\]\[assistant:", sample["prompt"])


# ---- a real model and real data, where they are at hand


@pytest.mark.skipif(not (STORIES.is_dir() and (SHARED / "data" / "stories").is_dir()), reason="stories are not at hand")
def test_stories(script, tmp_path):
    dataset = SHARED / "data" / "stories" / "prompts.jsonl"
    given = dict(model=str(STORIES), dataset=str(dataset), max_new_tokens=24, runs_dir=str(tmp_path), run_name="run")
    metrics = script.main(make_args(script, **given))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {sample["prompt"] for sample in samples} <= {row["question"] for row in read_jsonl(dataset)}
    assert samples[0]["prompt"].startswith("Once upon a time")
    # A model of English goes on in English; with wrong positions or a doubled BOS it would not.
    words = " ".join(text for sample in samples for text in sample["completions"]).split()
    assert metrics["rollout/response_len"] > 5 and len(words) > 20


@pytest.mark.shared_text
@pytest.mark.skipif(not (STORIES.is_dir() and (SHARED / "data" / "gsm8k").is_dir()), reason="GSM8K is not at hand")
def test_gsm8k(script, tmp_path, capsys):
    """Every one of the 7,473 training answers has a number; the long prompts are counted."""
    dataset = SHARED / "data" / "gsm8k" / "train.jsonl"
    given = dict(model=str(STORIES), dataset=str(dataset), runs_dir=str(tmp_path), run_name="run")
    metrics = script.main(make_args(script, **given))
    pattern = r"train data: (\d+) problems; skipped: (\d+) longer than --max-prompt-tokens \d+, 0 without a number"
    usable, too_long = map(int, re.search(pattern, capsys.readouterr().out).groups())
    assert usable + too_long == 7473 and usable > 7000
    assert metrics["step"] == 1 and metrics["rollout/response_len"] <= 8


# ---- the script itself

IMPORT = """
import os, random, signal, socket, sys, threading
import torch
def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    torch_state = (torch.initial_seed(), torch.get_rng_state().tolist(), torch.get_default_dtype())
    return dict(os.environ), handlers, torch_state, random.getstate(), os.getcwd(), os.listdir(".")
def audit(event, arguments):
    assert event not in ("socket.connect", "socket.getaddrinfo"), event
sys.addaudithook(audit)
before = state()
import {name}
assert [a == b for a, b in zip(before, state())] == [True] * 6
assert "wandb" not in sys.modules
assert not torch.cuda.is_initialized()
assert os.listdir(".") == []
"""


def test_import_has_no_side_effect(script, tmp_path):
    """No parsing, network, file, device, random state, environment variable or W&B: notebooks import it too."""
    (tmp_path / "cwd").mkdir()
    code = IMPORT.format(name=script.__name__)
    environment = {"HF_HOME": str(tmp_path / "home")}
    ended = run_python("-c", code, "--garbage", "-x", "]", cwd=tmp_path / "cwd", **environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "" and not (tmp_path / "home").exists()


def test_every_argument_is_documented_and_read(script):
    """Each field of Args has a docstring below it, and something other than its own check reads it."""
    tree = ast.parse((ROOT / f"{script.__name__}.py").read_text(encoding="utf-8"))
    [definition] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    documented = set()
    for node, below in zip(definition.body, definition.body[1:] + [None], strict=True):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), (
                f"{node.target.id}: no docstring"
            )
            text = below.value.value
            assert isinstance(text, str) and len(text.split()) >= 3, f"{node.target.id}: {text!r}"
            documented.add(node.target.id)
    assert documented == {field.name for field in dataclasses.fields(script.Args)}

    read = set()
    for top in tree.body:
        if top is not definition and getattr(top, "name", "") != "check_args":
            for node in ast.walk(top):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    if isinstance(node.value, ast.Name) and node.value.id == "args":
                        read.add(node.attr)
    assert documented - read == set()
    assert read - documented == set()
