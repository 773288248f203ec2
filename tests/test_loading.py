"""Loading models, recipes, hub data sets, prompts and a real model, and importing the scripts."""

import ast
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import ROOT, SCRIPTS, SHARED
from scripts import NEEDS_VLLM
from test_runs import FORK, ended
from tokenizers.processors import TemplateProcessing
from transformers import (
    # This import triggers the side effects of the libraries themselves.
    get_scheduler as get_scheduler,
)

ADDER = ROOT / "assets" / "adder"
STORIES = SHARED / "models" / "stories260K"
SMALL = dict(
    num_steps=1, num_prompts=2, num_generations=2, max_new_tokens=8, eval_size=4, warmup_updates=0
)
# Settings for a model that is as small as the bundled one but has another path.
OTHER_MODEL = dict(system_prompt="", max_prompt_tokens=64, gradient_checkpointing=False)

# For any other model than the bundled one, distill.py needs another teacher, by default from the hub.
NO_TEACHER = pytest.mark.scripts(*[script for script in SCRIPTS if script != "distill"])
# The heads of the story model have 8 dimensions. vLLM has no such kernel for a CPU.
SAMPLES_STORIES = [script for script in SCRIPTS if script not in ("distill", *NEEDS_VLLM)]


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch, tmp_path_factory):
    """These tests don't wait for a network and don't fill the user's cache."""
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def run_python(*arguments, cwd, **environment):
    """Run Python in a separate process that can't reach the hub."""
    hub = (
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_HUB_CACHE",
        "HF_HOME",
        "HF_DATASETS_CACHE",
    )
    environment = {k: v for k, v in os.environ.items() if k not in hub} | {
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Loaded(Exception):
    """Ends a run as soon as it loads the training data. By then the script has resolved the arguments."""


@pytest.fixture
def start(monkeypatch):
    """Run main until it loads the training data. Return the resolved arguments and, on request, the examples."""

    def call(script, examples=False, **given):
        seen = []

        def stop(args, tokenizer, split):
            seen[:] = [args, original(args, tokenizer, split) if examples else None]
            raise Loaded

        args = script.Args(**given)
        with monkeypatch.context() as patch:
            original = script.load_data
            patch.setattr(script, "load_data", stop)
            with pytest.raises(Loaded):
                script.main(args)
        # main must not change the caller's Args.
        assert args == script.Args(**given)
        return seen

    return call


# ---- models and recipes


@pytest.mark.scripts("grpo")
def test_hub_cache(script, tmp_path):
    """The script finds a model in the hub's cache by its short name and trains it without a network."""
    model = tmp_path / "hub" / "models--HuggingFaceTB--TinyAdder"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(ADDER, model / "snapshots" / commit)
    before = sorted(path for path in tmp_path.rglob("*"))

    flags = dict(
        model="TinyAdder", dataset="assets/addition/train.jsonl", num_steps=1, num_prompts=2
    )
    flags |= dict(
        num_generations=2, max_prompt_tokens=64, max_new_tokens=8, eval_size=4, system_prompt=""
    )
    flags |= dict(runs_dir=tmp_path / "runs", run_name="run")
    flags = [part for k, v in flags.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    environment = dict(
        HF_HUB_CACHE=str(tmp_path / "hub"), HF_DATASETS_CACHE=str(tmp_path / "datasets")
    )
    process = run_python(f"{script.__name__}.py", *flags, cwd=ROOT, **environment)
    assert process.returncode == 0, process.stderr

    run, cache = tmp_path / "runs" / "run", tmp_path / "datasets"
    written = [
        path
        for path in tmp_path.rglob("*")
        if path not in before and not {run, cache} & {*path.parents}
    ]
    assert sorted(written) == sorted([run.parent, run, cache])
    args = json.loads((run / "args.json").read_text(encoding="utf-8"))
    assert (
        args["model"] == "HuggingFaceTB/TinyAdder"
        and args["versions"]["transformers"] == transformers.__version__
    )
    for name, value in {
        "learning_rate": 1e-5,
        "beta": 0.04,
        "temperature": 0.9,
        "warmup_updates": 10,
    }.items():
        assert args[name] == script.RECIPES[name][0] == value
    # The user's flags override the recipe.
    assert args["max_new_tokens"] == 8 and args["num_steps"] == 1 and args["system_prompt"] == ""
    # One line before the training and one for its only step.
    assert len(read_jsonl(run / "metrics.jsonl")) == 2


@pytest.mark.parametrize("model", ["assets/adder", str(ADDER), f"{ADDER}/../adder/"])
def test_bundled_recipe(script, start, model, tmp_path, monkeypatch):
    """Any spelling of the bundled model's path gets its recipe. An absolute or default path works in any directory."""
    monkeypatch.chdir(ROOT if model == "assets/adder" else tmp_path)
    model = model.replace("adder", Path(script.Args.model).name)
    for given in (dict(model=model), dict()):
        args, _ = start(script, **given)
        assert {name: getattr(args, name) for name in script.RECIPES} == {
            k: v[1] for k, v in script.RECIPES.items()
        }
        data = "hinted" if script.__name__ == "self_distill" else "addition"
        assert args.system_prompt == "" and args.dataset == str(ROOT / "assets" / data)


@pytest.mark.scripts("grpo")
def test_bundled_recipe_behind_a_link(script, tmp_path, monkeypatch):
    """A copy of a script may find its assets through a link."""
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.setattr(script.Args, "model", str(tmp_path / "assets" / "adder"))
    given = script.Args(model=script.Args.model, runs_dir=str(tmp_path))
    args, _, _ = script.resolve_args(given)
    assert args.max_new_tokens == script.RECIPES["max_new_tokens"][1]


@NO_TEACHER
def test_other_recipe(script, start, tmp_path, monkeypatch):
    """A folder gets the recipe for other models, with or without "/" in its name, even a copy of the bundled model."""
    monkeypatch.chdir(tmp_path)
    copy_adder(tmp_path / "mine", max_position_embeddings=2048)
    for model in ("mine", "./mine", str(tmp_path / "mine")):
        args, _ = start(script, model=model)
        assert args.model == str(tmp_path / "mine")
        assert {name: getattr(args, name) for name in script.RECIPES} == {
            k: v[0] for k, v in script.RECIPES.items()
        }
        assert args.system_prompt == script.SYSTEM_PROMPT and args.dataset == "openai/gsm8k:main"


def test_recipes_are_of_fields_that_are_none(script):
    """Only some fields may stay None without a recipe. A recipe can't set a field that has another default."""
    nothing = {field.name for field in dataclasses.fields(script.Args) if field.default is None}
    assert nothing - set(script.RECIPES) <= {
        "run_name",
        "sampling_tokens",
        "micro_batch_tokens",
        "resume",
        "eval_dataset",
        "kl_target",
    }
    assert set(script.RECIPES) <= nothing


@pytest.mark.parametrize("model", [str(ADDER), "mine"])
def test_given_flags_win(script, start, model, tmp_path, monkeypatch):
    """The user's flags override the recipe, even if they turn a feature off: 0, False and "" are not None."""
    monkeypatch.chdir(tmp_path)
    copy_adder(tmp_path / "mine")
    given = dict(
        dataset="mine.jsonl", max_prompt_tokens=9, max_new_tokens=5, temperature=0.7, num_steps=3
    )
    given |= dict(
        warmup_updates=1, gradient_checkpointing=True, eval_every=7, beta=0.5, learning_rate=3e-6
    )
    given |= dict(system_prompt="think", overlong_cache=3, value_learning_rate=2e-6, gae_alpha=0.5)
    judge = str(tmp_path / "judge")
    given |= dict(teacher=str(ADDER), value_warmup_steps=1, reward_model=judge)
    given |= dict(context_column="x", context_template="{context}{question}", max_teacher_tokens=9)
    shutil.copytree(ROOT / "assets" / "adder-judge", tmp_path / "judge")
    off = dict(
        warmup_updates=0,
        gradient_checkpointing=False,
        eval_every=0,
        beta=0.0,
        system_prompt="",
        reward_model="",
    )
    assert set(script.RECIPES) <= set(given)
    for chosen in (given, given | off):
        chosen = {name: value for name, value in chosen.items() if name in script.RECIPES}
        args, _ = start(script, model=model, **chosen)
        assert {name: getattr(args, name) for name in chosen} == chosen


def copy_adder(folder, **config):
    """Copy the bundled model without its weights to another folder and change its configuration."""
    shutil.copytree(ADDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | config), encoding="utf-8")


@pytest.mark.scripts("grpo")
def test_hub_data_sets(script, monkeypatch):
    """A data set is a hub id, or id:config if it has several configurations.

    The script reads the splits train and test, and only the test split of an --eval-dataset.
    """
    asked, answers = [], {("openai/gsm8k", "main"): "34", ("owner/other",): "56"}

    def load(*names):
        asked.append(names)
        rows = [
            datasets.Dataset.from_list([{"question": "1+2=", "answer": x}]) for x in answers[names]
        ]
        return datasets.DatasetDict(zip(["train", "test"], rows, strict=True))

    monkeypatch.setattr(script.datasets, "load_dataset", load)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    given = dict(dataset="openai/gsm8k:main", max_prompt_tokens=9)
    read = []
    for args in (script.Args(**given), script.Args(**given, eval_dataset="owner/other")):
        for split in ("train", "test"):
            [example] = script.load_data(args, tokenizer, split)
            assert example["prompt"] == "1+2="
            read.append(example["answer"])
    assert asked == [("openai/gsm8k", "main")] * 3 + [("owner/other",)] and read == list("3436")


# ---- prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)


def make_tokenizer(folder, chat_template=None):
    """The adder's tokenizer, changed to put a BOS token before every text, like Llama's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    vocabulary = json.loads((ADDER / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    # The BOS token is already in the vocabulary, so the adder's embedding has a row for it.
    tokenizer.add_special_tokens({"bos_token": "!"})
    assert tokenizer.bos_token_id == vocabulary["!"]
    special_tokens = [("!", vocabulary["!"])]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A", special_tokens=special_tokens
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # Without a BOS token the tests below would test nothing.
    assert tokenizer("1").input_ids == [vocabulary["!"], vocabulary["1"]]
    return tokenizer


@pytest.fixture
def first_prompt(script, tmp_path):
    """The first training example of load_data on one question."""
    (tmp_path / "rows.jsonl").write_text('{"question": "12+34=", "answer": "46"}\n' * 10)

    def call(tokenizer, **given):
        args = script.Args(dataset=str(tmp_path / "rows.jsonl"), max_prompt_tokens=200, **given)
        return script.load_data(args, tokenizer, "train")[0]

    return call


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("system", ["", "think first"])
def test_chat_template(first_prompt, tmp_path, system):
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    example = first_prompt(tokenizer, system_prompt=system)
    assert (
        example["prompt"]
        == "!" + (f"[system:{system}]" if system else "") + "[user:12+34=][assistant:"
    )
    # The template already writes BOS. Tokenizing with special tokens would add a second BOS.
    assert example["prompt_ids"] == tokenizer(example["prompt"], add_special_tokens=False).input_ids
    assert example["prompt_ids"].count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in example["prompt_ids"]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("system", ["", "think first"])
def test_no_chat_template(first_prompt, tmp_path, system):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    example = first_prompt(tokenizer, system_prompt=system)
    assert example["prompt"] == (f"{system}\n12+34=\n" if system else "12+34=")
    # The prompt starts with exactly one BOS.
    assert tokenizer.decode(example["prompt_ids"]) == "!" + example["prompt"]
    assert tokenizer.eos_token_id not in example["prompt_ids"]


NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m['role'] }}:{{ m['content'] }}>{% endfor %}"
)
# This template drops a system message without an error.
SILENT = NO_SYSTEM.replace("{{ raise_exception('no system') }}{% endif %}", "{% else %}") + ""
SILENT = SILENT.replace("{% endfor %}", "{% endif %}{% endfor %}")


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT], ids=["refuses", "drops"])
def test_a_template_without_a_system_message_gets_the_instructions_in_the_users(
    first_prompt, tmp_path, template
):
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    assert first_prompt(tokenizer, system_prompt="think")["prompt"] == "<user:think\n\n12+34=>"
    assert first_prompt(tokenizer, system_prompt="")["prompt"] == "<user:12+34=>"


MESSAGES = [{"role": "user", "content": "12+34="}]


@pytest.mark.scripts("grpo")
def test_a_column_of_chat_messages(first_prompt, tmp_path):
    """Most chat data sets have a column of messages. If a row has a system message, the script adds no second one."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": MESSAGES, "answer": 46}) + "\n" + path.read_text()[:0])
    path.write_text(path.read_text() * 10)
    expected = "![system:think][user:12+34=][assistant:"
    assert first_prompt(tokenizer, system_prompt="think")["prompt"] == expected
    several = [
        {"role": "system", "content": "add"},
        *MESSAGES,
        {"role": "assistant", "content": "?"},
        *MESSAGES,
    ]
    path.write_text((json.dumps({"question": several, "answer": 46}) + "\n") * 10)
    expected = "![system:add][user:12+34=][assistant:?][user:12+34=][assistant:"
    assert first_prompt(tokenizer, system_prompt="think")["prompt"] == expected


@pytest.mark.scripts("grpo")
def test_all_columns_reach_the_rewards(first_prompt, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    row = {"question": "12+34=", "answer": "46", "level": 3, "tests": ["a", "b"]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 10)
    assert first_prompt(tokenizer, system_prompt="")["columns"] == row


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %} </s>{% endif %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ENDS = [(CHATML, {"<|im_end|>"}), (LLAMA_2, {"</s>"}), (PLAIN, set()), (None, set())]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("template, ends", ENDS, ids=["ChatML", "Llama 2", "plain", "none"])
def test_the_token_that_ends_a_turn_ends_a_response(script, tmp_path, template, ends):
    """A base model's chat template may end a turn with a token that neither the tokenizer nor the model names."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "</s>"], special_tokens=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(ADDER)
    found = set(script.find_eos_ids(script.Args(), model, tokenizer))
    assert found == {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ends))}


@pytest.mark.scripts("grpo")
def test_completions_are_what_was_sampled_but_for_the_end(script, tmp_path, monkeypatch):
    """Decoding drops only the end token. It keeps tags that the tokenizer calls special."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.add_tokens(["<mark>"], special_tokens=True)
    mark, eos = tokenizer.convert_tokens_to_ids("<mark>"), tokenizer.eos_token_id
    ids = torch.tensor([[mark, *tokenizer("12", add_special_tokens=False).input_ids, eos, eos]])
    mask = torch.tensor([[True, True, True, True, False]])
    monkeypatch.setattr(script, "generate", lambda *args: (ids, mask, torch.zeros(1, 5)))
    args = script.Args(max_new_tokens=5, sampling_tokens=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(ADDER)
    given = args, model, tokenizer, [{"prompt_ids": [5]}], 1, 1.0, torch.tensor([eos])
    assert script.sample_responses(*given).completions == ["<mark>12"]


@NO_TEACHER
@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_default_system_prompt(script, start, tmp_path, template):
    """Any model except the bundled one gets instructions about the tags, with or without a chat template.

    --system-prompt replaces these instructions. The test reads a file: the prompt doesn't depend on the data's source.
    """
    # The default system prompt is long.
    copy_adder(tmp_path / "model", max_position_embeddings=2048)
    make_tokenizer(tmp_path / "model", template)
    (tmp_path / "rows.jsonl").write_text('{"question": "12+34=", "answer": "46"}\n' * 10)
    given = dict(
        model=str(tmp_path / "model"), dataset=str(tmp_path / "rows.jsonl"), max_prompt_tokens=1500
    )
    if template is None:
        expected = f"{script.SYSTEM_PROMPT}\n12+34=\n", "12+34="
    else:
        expected = (
            f"![system:{script.SYSTEM_PROMPT}][user:12+34=][assistant:",
            "![user:12+34=][assistant:",
        )
    assert all(
        tag in script.SYSTEM_PROMPT for tag in ("<think>", "</think>", "<answer>", "</answer>")
    )
    for system, prompt in zip(({}, {"system_prompt": ""}), expected, strict=True):
        _, examples = start(script, examples=True, **given, **system)
        assert {example["prompt"] for example in examples} == {prompt}


# ---- a real model and real data, if this machine has them


@pytest.mark.skipif(
    not (STORIES.is_dir() and (SHARED / "data" / "stories").is_dir()),
    reason="stories are not at hand",
)
@pytest.mark.scripts(*SAMPLES_STORIES)
def test_stories(script, tmp_path):
    dataset = SHARED / "data" / "stories" / "prompts.jsonl"
    given = SMALL | OTHER_MODEL | dict(max_new_tokens=24, runs_dir=str(tmp_path), run_name="run")
    if script.__name__ == "self_distill":
        given["max_teacher_tokens"] = 128  # the model's context has 512 tokens
    metrics = script.main(script.Args(model=str(STORIES), dataset=str(dataset), **given))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {sample["prompt"] for sample in samples} <= {
        row["question"] for row in read_jsonl(dataset)
    }
    assert samples[0]["prompt"].startswith("Once upon a time")
    # A language model continues in words. With wrong positions or two BOS tokens it would not.
    words = " ".join(text for sample in samples for text in sample["completions"]).split()
    assert metrics["rollout/response_len"] > 5 and len(words) > 20


@pytest.mark.scripts("grpo")
@pytest.mark.skipif(
    not (STORIES.is_dir() and (SHARED / "data" / "gsm8k").is_dir()), reason="GSM8K is not at hand"
)
def test_gsm8k(script, tmp_path, capsys):
    """All 7,473 training answers and 1,319 test answers have a number, and the script counts the long prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
    args = script.Args(dataset=str(SHARED / "data" / "gsm8k"), max_prompt_tokens=300)
    for split, count in (("train", 7473), ("test", 1319)):
        examples = script.load_data(args, tokenizer, split)
        pattern = (
            rf"{split} data: (\d+) problems; skipped: (\d+) longer than .*, 0 without a question"
        )
        usable, too_long = map(int, re.search(pattern, capsys.readouterr().out).groups())
        assert usable + too_long == count and usable > 0.9 * count and too_long > 0
        assert len(examples) == (usable if split == "train" else args.eval_size)


# ---- the script itself


def state_of_the_process() -> tuple:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seeds = torch.initial_seed(), torch.get_rng_state().tolist(), random.getstate()
    modes = torch.get_default_dtype(), torch.cuda.is_initialized()
    return dict(os.environ), handlers, seeds, modes, os.getcwd(), os.listdir(".")


def import_anew(folder: str) -> None:
    """The body of a forked process. It imports the scripts in an empty folder, with arguments that aren't flags."""

    def audit(event, arguments):
        assert event not in ("socket.connect", "socket.getaddrinfo"), event
        assert event != "open" or arguments[1] in (None, "r", "rb"), arguments

    for name in [x for x in sys.modules if x in SCRIPTS or x.startswith("utils.")]:
        del sys.modules[name]
    os.chdir(folder)
    sys.argv = ["-c", "--garbage", "-x", "]"]
    sys.dont_write_bytecode = True
    sys.addaudithook(audit)
    for name in SCRIPTS:
        before = state_of_the_process()
        __import__(name)
        assert state_of_the_process() == before, name


def test_import_has_no_side_effect(tmp_path):
    """Notebooks also import the scripts. An import must not parse arguments, use the network, write files, touch a
    device or change the random state or environment."""
    process = FORK.Process(target=import_anew, args=(str(tmp_path),), daemon=True)
    process.start()
    assert ended(process) == 0


def test_every_argument_is_documented_and_read(script):
    """Each field of Args has a docstring below it, and the script reads the field by its name."""
    tree = ast.parse((ROOT / f"{script.__name__}.py").read_text(encoding="utf-8"))
    [definition] = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"
    ]
    documented = set()
    for node, below in zip(definition.body, definition.body[1:] + [None], strict=True):
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), (
                f"{name}: no docstring"
            )
            text = below.value.value
            assert isinstance(text, str) and len(text.split()) >= 3, f"{name}: {text!r}"
            documented.add(name)
    assert documented == {field.name for field in dataclasses.fields(script.Args)}

    read = set()
    for node in [node for top in tree.body if top is not definition for node in ast.walk(top)]:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id == "args":
                read.add(node.attr)
    assert documented - read == set()
    assert read - documented == set()
