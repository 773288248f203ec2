"""Models, data and prompts load as a user gives them, and a response ends where the model ends it.

Also: imports have no side effect, and every flag is read.
"""

import ast
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import (
    DATA,
    ROOT,
    SMALL_MODEL,
    SMALL_TASK,
    default_task,
    skip_without_engine,
    use_task,
)
from families import random_model, small_config
from scripts import SCRIPTS, read_script
from test_runs import FORK, ended
from tokenizers.processors import TemplateProcessing

import grpo
import grpo_tools
from utils.rewards import answer_block, format_reward, parse_number

ADDER = ROOT / "assets" / "addition" / "adder"
SMALL = dict(
    num_steps=1, num_prompts=2, num_generations=2, max_new_tokens=8, eval_size=4, warmup_updates=0
)
# Settings for a model that is as small as the bundled one but has another path.
LENGTHS = dict(max_prompt_tokens=64, max_new_tokens=8)
OTHER_MODEL = dict(examples=False, max_prompt_tokens=64, gradient_checkpointing=False)


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch, tmp_path_factory):
    """These tests don't wait for a network and don't fill the user's cache."""
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load(dataset, **given):
    """The train and the test split of these files, as the adder reads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    args = grpo.Args(dataset=str(dataset), examples=False, **given)
    return grpo.load_data(args, grpo.load_task(args), tokenizer)


def answers_of(problems):
    return [problem["columns"]["answer"] for problem in problems]


# ---- models and recipes


def test_hub_cache(tmp_path, monkeypatch):
    """The script finds a model in the hub's cache by its short name and trains it without a network."""
    model = tmp_path / "hub" / "models--HuggingFaceTB--TinyAdder"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(ADDER, model / "snapshots" / commit)
    before = set(tmp_path.rglob("*"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    given = SMALL | dict(model="TinyAdder", dataset=SMALL_TASK, max_prompt_tokens=64, device="cpu")
    runs = dict(examples=False, runs_dir=str(tmp_path / "runs"), run_name="run")
    grpo.main(grpo.Args(**given | runs))

    run = tmp_path / "runs" / "run"
    written = {path for path in tmp_path.rglob("*") if run not in path.parents}
    assert written - before == {run.parent, run}
    # One line before the training and one for its only step.
    assert len(read_jsonl(run / "metrics.jsonl")) == 2


def test_hub_data_sets(monkeypatch):
    """A data set is a hub id, or id:config if it has several configurations."""
    asked = []

    def from_hub(*names):
        asked.append(names)
        splits = datasets.DatasetDict()
        for split, answer in (("train", "34"), ("test", "56")):
            splits[split] = datasets.Dataset.from_list([{"question": "1+2=", "answer": answer}])
        return splits

    monkeypatch.setattr(grpo.datasets, "load_dataset", from_hub)
    for name in ("openai/gsm8k:main", "owner/other"):
        found = [answers_of(split) for split in load(name, max_prompt_tokens=9)]
        assert found == [["34"], ["56"]]
    assert asked == [("openai/gsm8k", "main"), ("owner/other",)]


def test_a_model_with_a_vision_part(tmp_path):
    """AutoModelForCausalLM refuses Ministral 3. The run trains its text part, and writes the whole model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    tokenizer.save_pretrained(tmp_path / "model")
    config = small_config("Ministral 3")
    config.text_config.vocab_size = len(tokenizer)
    config.text_config.max_position_embeddings = 128
    random_model(config).save_pretrained(tmp_path / "model")
    given = SMALL | OTHER_MODEL | dict(dataset=SMALL_TASK, device="cpu", runs_dir=str(tmp_path))
    metrics = grpo.main(grpo.Args(model=str(tmp_path / "model"), run_name="run", **given))
    assert metrics["rollout/logprob_gap"] < 1e-5
    before, after = [
        transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "model", tmp_path / "run" / "model")
    ]
    assert before.keys() == after.keys()
    for name, weight in before.items():
        is_unused = "vision" in name or "projector" in name
        assert torch.equal(weight, after[name]) == is_unused, name


FORMATS = ["jsonl", "json", "csv", "parquet"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_formats(tmp_path, suffix):
    """All formats load the same problems, under any column names. The last tenth is held out."""
    rows = datasets.Dataset.from_list([{"q": f"{i}+1=", "a": i + 1} for i in range(20)])
    path = tmp_path / f"data.{suffix}"
    write = dict(jsonl=rows.to_json, json=rows.to_json, csv=rows.to_csv, parquet=rows.to_parquet)
    write[suffix](path)
    train, test = load(path, question_column="q", answer_column="a")
    pairs = list(zip([x["prompt"] for x in train + test], answers_of(train + test), strict=True))
    assert pairs == [(f"{i}+1=", str(i + 1)) for i in range(20)] and len(test) == 2


def test_a_folder_with_two_splits(tmp_path):
    """The test file is held out, and --eval-size says how much of it is used."""
    for split, count in (("train", 7), ("test", 5)):
        lines = [json.dumps({"question": f"{i}+1=", "answer": split[0]}) for i in range(count)]
        lines = [line.replace('"t"', str(count)) for line in lines]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    train, test = load(tmp_path, eval_size=3)
    assert answers_of(train) == ["7"] * 7 and answers_of(test) == ["5"] * 3


def test_long_prompts_are_skipped_and_counted(tmp_path, capsys):
    questions = ["1" * (i + 1) + "=" for i in range(18)] + ["2=", "3="]
    lines = [json.dumps({"question": question, "answer": "1"}) for question in questions]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    train, test = load(tmp_path / "data.jsonl", max_prompt_tokens=11)
    assert [len(x["prompt_ids"]) for x in train] == list(range(2, 12)) and len(test) == 2
    line = "train data: 12 problems, 8 skipped: longer than --max-prompt-tokens"
    assert capsys.readouterr().out.splitlines()[0] == line


def write_splits(folder, **questions):
    """A folder with a file for each split, of problems with these questions."""
    folder.mkdir()
    for split, texts in questions.items():
        lines = [json.dumps({"question": text, "answer": 1}) + "\n" for text in texts]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return str(folder)


def test_no_question_is_in_both_parts_of_a_file(tmp_path, capsys):
    """The last tenth of the questions is held out, with all rows of each. Otherwise the policy is trained on them."""
    questions = [f"{i}+1=" for i in range(20)]
    chats = [[USER | {"content": question}] for question in questions]
    for name, rows in (("texts", questions * 10), ("chats", chats * 10)):
        folder = write_splits(tmp_path / name, train=rows)
        train, test = load(folder)
        assert [x["prompt"] for x in train] == questions[:18] * 10
        assert [x["prompt"] for x in test] == questions[18:] * 10
        assert "tenth of the questions is held out, 20 problems" in capsys.readouterr().out


def test_test_problems_that_are_trained_on_are_counted(tmp_path, capsys):
    splits = dict(train=["1+1=", "2+1=", "3+1="], test=["2+1=", "4+1=", "1+1=", "5+1="])
    folder = write_splits(tmp_path / "data", **splits)
    train, test = load(folder)
    assert [len(train), len(test)] == [3, 4]
    assert "test data: 2 of its problems are also in the train data" in capsys.readouterr().out


def test_a_validation_split_is_held_out(tmp_path):
    """Without a test split. With a test split, it isn't read."""
    splits = dict(train=["1+1="], validation=["2+1="])
    for name, more, expected in (("a", {}, "2+1="), ("b", dict(test=["3+1="]), "3+1=")):
        folder = write_splits(tmp_path / name, **splits, **more)
        train, test = load(folder)
        assert [x["prompt"] for x in train + test] == ["1+1=", expected]


@pytest.mark.parametrize("form", ["text", "chat"])
def test_rows_without_a_question_are_skipped_and_counted(tmp_path, capsys, form):
    """A template writes a missing text as the word None."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    questions = ["1+1=", None, "", " \n", "2+1=", "3+1="]
    if form == "chat":
        questions = [[USER | {"content": text}] for text in questions] + [[]]
        # A missing system message is also a missing text, and an empty one isn't.
        questions += [[{"role": "system", "content": x}, *questions[0]] for x in (None, "")]
    folder = write_splits(
        tmp_path / "data", train=questions, test=["4+1="] if form == "text" else [questions[0]]
    )
    train, _ = grpo.load_data(
        grpo.Args(dataset=folder, examples=False), default_task(grpo), tokenizer
    )
    prompts = [x["prompt"].removeprefix("![").removesuffix("][assistant:") for x in train]
    more = ["system:][user:1+1="] if form == "chat" else []
    assert prompts == ["user:1+1=", "user:2+1=", "user:3+1=", *more]
    num_problems, num_skipped = (4, 5) if form == "chat" else (3, 3)
    line = f"train data: {num_problems} problems, {num_skipped} skipped: without a question"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_rows_without_an_answer_are_skipped_and_counted(tmp_path, capsys, monkeypatch):
    """A reward of one's own would get the word None, or an empty text, which is in every completion.

    At the end of a file, such rows aren't the held-out part.
    """
    answers = ["x"] * 20 + [None, "", " \n", None, ""]
    lines = [{"question": f"{i}+1=", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    use_task(monkeypatch, grpo, [lambda completions, **columns: [0.0] * len(completions)])
    train, test = load(tmp_path / "data.jsonl")
    assert [x["prompt"] for x in test] == ["18+1=", "19+1="] and len(train) == 18
    line = "train data: 20 problems, 5 skipped: without a readable answer"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_every_reason_is_counted_once(tmp_path, capsys):
    """A row with several faults counts for the first of them: question, answer, length."""
    long = "1" * 30 + "="
    rows = [("1+1=", 2), ("", None), (long, 1), ("", 1), (long, "x"), (long, 2), ("2+1=", 3)]
    lines = [{"question": question, "answer": str(answer)} for question, answer in rows]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    load(tmp_path / "data.jsonl", max_prompt_tokens=20)
    counts = "2 skipped: without a question, 2 skipped: longer than --max-prompt-tokens"
    counts += ", 1 skipped: without a readable answer"
    assert capsys.readouterr().out.splitlines()[0] == f"train data: 2 problems, {counts}"


# ---- data that can't be split or found


def test_one_question_alone(tmp_path):
    """Nothing would be left to train on. With a test split, one question is enough."""
    folder = write_splits(tmp_path / "one", train=["1+1="] * 3)
    with pytest.raises(ValueError, match=f"--dataset {folder}: one question alone, so none can"):
        load(folder)
    folder = write_splits(tmp_path / "two", train=["1+1=", "2+1="])
    assert [len(split) for split in load(folder)] == [1, 1]
    folder = write_splits(tmp_path / "both", train=["1+1="] * 3, test=["2+1="])
    assert [len(split) for split in load(folder)] == [3, 1]


def test_a_test_split_alone(tmp_path):
    folder = write_splits(tmp_path / "data", test=["1+1=", "2+1="])
    with pytest.raises(ValueError, match=f"--dataset {folder}: no train split, only test"):
        load(folder)


def test_a_path_that_looks_like_a_pattern(tmp_path):
    """datasets takes such a path as a pattern, which stands for other files."""
    folder = tmp_path / "x [1]"
    folder.mkdir()
    names = {"data1": "1", "data[12]": "2", "data?": "3", "data*": "4"}
    for name, digit in names.items():
        rows = [{"question": f"{i}+{digit}=", "answer": i} for i in range(10)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for place in (tmp_path, folder):
            (place / f"{name}.jsonl").write_text(text)
    for name, digit in names.items():
        for place in (tmp_path, folder):
            train, test = load(place / f"{name}.jsonl")
            assert [x["prompt"] for x in train + test] == [f"{i}+{digit}=" for i in range(10)]
    for name in ("x [1]", "x*", "x?"):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="a path with .* is a pattern; rename it") as caught:
            load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


# ---- prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)


def make_tokenizer(folder, chat_template=None):
    """The adder's tokenizer, changed to put a BOS token before every text, like Llama's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    # The BOS token is already in the vocabulary, so the adder's embedding has a row for it.
    bos = tokenizer.get_vocab()["!"]
    tokenizer.add_special_tokens({"bos_token": "!"})
    special_tokens = [("!", bos)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A", special_tokens=special_tokens
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # Without a BOS token the tests below would test nothing.
    assert tokenizer("1").input_ids == [bos, tokenizer.get_vocab()["1"]]
    return tokenizer


def write_rows(path, *rows):
    """A file of these rows and of some ordinary problems, of which the last one is held out."""
    others = [rows[0] | {"question": f"{i}+1="} for i in range(9)]
    if isinstance(rows[0]["question"], list):  # all rows of a file have the same form
        others = [row | {"question": [USER | {"content": row["question"]}]} for row in others]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *others]))


USER = {"role": "user"}


@pytest.fixture
def first_prompt(script, tmp_path):
    """The first training problem of load_data. Its question is "12+34=" until a test writes other rows."""
    write_rows(tmp_path / "rows.jsonl", {"question": "12+34=", "answer": 46})

    def call(tokenizer, **given):
        given = dict(max_prompt_tokens=200, examples=False) | given
        args = script.Args(dataset=str(tmp_path / "rows.jsonl"), **given)
        return script.load_data(args, default_task(script), tokenizer)[0][0]

    return call


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("instructions", ["", "think first"])
def test_chat_template(first_prompt, tmp_path, instructions):
    """The instructions stand in the user's message, because some templates take no system message."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    problem = first_prompt(tokenizer, instructions=instructions)
    question = f"{instructions}\n\n12+34=" if instructions else "12+34="
    assert problem["prompt"] == f"![user:{question}][assistant:"
    # The template already writes BOS. Tokenizing with special tokens would add a second BOS.
    assert problem["prompt_ids"] == tokenizer(problem["prompt"], add_special_tokens=False).input_ids
    assert problem["prompt_ids"].count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in problem["prompt_ids"]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("instructions", ["", "think first"])
def test_no_chat_template(first_prompt, tmp_path, instructions):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    problem = first_prompt(tokenizer, instructions=instructions)
    assert problem["prompt"] == (f"{instructions}\n\n12+34=" if instructions else "12+34=")
    # The prompt starts with exactly one BOS.
    assert tokenizer.decode(problem["prompt_ids"]) == "!" + problem["prompt"]
    assert tokenizer.eos_token_id not in problem["prompt_ids"]


@pytest.mark.scripts("grpo", "grpo_tools")
def test_the_examples_earn_every_reward(script):
    """The policy imitates the examples. So each of them is worth the full reward, and its sums and calls are right."""
    assert script.Args().examples and not script.BUNDLED.examples
    for _, answer in default_task(script).EXAMPLES:
        assert format_reward([answer], [""]) == [0.4]
        assert parse_number(answer_block(answer)) is not None
        plain = answer.replace("<calc>", "").replace("</calc>", "").replace(" ", "")
        sums = re.findall(r"([0-9]+)([-+*])([0-9]+)=([0-9]+)", plain)
        assert sums and float(sums[-1][3]) == parse_number(answer_block(answer))
        assert answer.count("</calc>=") == (len(sums) if script is grpo_tools else 0)  # all of them
        for left, operator, right, result in sums:
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator]
            assert value(int(left), int(right)) == int(result)


@pytest.mark.scripts("grpo", "grpo_tools")
def test_examples_are_turns_of_the_chat(script, first_prompt, tmp_path):
    """Each example is a question of the user and an answer of the assistant. A system message stands before them."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    turns = "".join(
        f"[user:{text}][assistant:{answer}]" for text, answer in default_task(script).EXAMPLES
    )
    given = dict(examples=True, max_prompt_tokens=2000)
    assert first_prompt(tokenizer, **given)["prompt"] == f"!{turns}[user:12+34=][assistant:"
    chat = [{"role": "system", "content": "add"}, *MESSAGES]
    chat += [{"role": "assistant", "content": "46"}, *MESSAGES]
    write_rows(tmp_path / "rows.jsonl", {"question": chat, "answer": 46})
    expected = f"![system:add]{turns}[user:12+34=][assistant:46][user:why? 12+34=][assistant:"
    prompt = first_prompt(tokenizer, instructions="why?", **given)["prompt"]
    assert prompt.replace("why?\n\n", "why? ") == expected


@pytest.mark.scripts("grpo")
def test_examples_of_a_base_model_end_with_eos(first_prompt, tmp_path):
    """A model without a chat template gets a plain text. After each example stands the token that ends a response."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    problem = first_prompt(tokenizer, examples=True, max_prompt_tokens=2000)
    examples = default_task(grpo).EXAMPLES
    shown = "".join(f"{text}\n{answer}{tokenizer.eos_token}\n" for text, answer in examples)
    assert problem["prompt"] == f"{shown}12+34=\n"
    num_eos = problem["prompt_ids"].count(tokenizer.eos_token_id)
    assert num_eos == len(examples), "the tokenizer reads the EOS token as one token"


@pytest.mark.scripts("grpo")
def test_a_tokenizer_without_eos_adds_no_word(first_prompt, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.eos_token = None
    prompt = first_prompt(tokenizer, examples=True, max_prompt_tokens=2000)["prompt"]
    assert prompt.count("</answer>\n") == len(default_task(grpo).EXAMPLES) and "None" not in prompt


MESSAGES = [{"role": "user", "content": "12+34="}]


@pytest.mark.scripts("grpo")
def test_a_column_of_chat_messages(first_prompt, tmp_path):
    """Most chat data sets have a column of messages. The instructions stand before the last one."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    path = tmp_path / "rows.jsonl"
    write_rows(path, {"question": MESSAGES, "answer": 46})
    expected = "![user:think\n\n12+34=][assistant:"
    assert first_prompt(tokenizer, instructions="think")["prompt"] == expected
    several = [{"role": "system", "content": "add"}, *MESSAGES]
    several += [{"role": "assistant", "content": "?"}, *MESSAGES]
    write_rows(path, {"question": several, "answer": 46})
    expected = "![system:add][user:12+34=][assistant:?][user:think\n\n12+34=][assistant:"
    assert first_prompt(tokenizer, instructions="think")["prompt"] == expected
    # A model without a template can't continue a chat of several messages.
    with pytest.raises(ValueError, match="--model .*: a chat needs a model with a chat template"):
        first_prompt(make_tokenizer(tmp_path / "plain"))


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("place", [0, 2])
def test_a_content_that_is_a_list_ends_the_run(first_prompt, tmp_path, place):
    """It isn't written into the prompt as Python writes a list, in no message."""
    chat = [
        USER | {"content": "1+1="},
        {"role": "assistant", "content": "2"},
        USER | {"content": "2+2="},
    ]
    chat[place]["content"] = [{"type": "text", "text": "1+1="}]
    rows = [json.dumps({"question": chat, "answer": 4}) + "\n"] * 10
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    with pytest.raises((AttributeError, TypeError), match="list"):
        first_prompt(make_tokenizer(tmp_path / "tokenizer", TEMPLATE))


@pytest.mark.scripts("grpo")
def test_a_chat_that_ends_with_the_answer(first_prompt, tmp_path):
    """The answer would stand in the prompt."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    for role in ("assistant", "system"):
        last = {"role": role, "content": "<answer>46</answer>"}
        chat = [*MESSAGES, last] if role == "assistant" else [last]
        write_rows(tmp_path / "rows.jsonl", {"question": chat, "answer": 46})
        with pytest.raises(ValueError, match=f"--question-column question: .* {role}"):
            first_prompt(tokenizer)


@pytest.mark.scripts("grpo", "self_distill")
@pytest.mark.parametrize("examples", [False, True])
def test_a_prompt_does_not_end_with_eos(script, first_prompt, tmp_path, examples):
    """Some tokenizers end each text with EOS. The bundled model then got 0.04 of the problems right, instead of 0.56.

    The EOS tokens of the examples stay.
    """
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    given = dict(examples=examples, max_prompt_tokens=2000)
    if script.__name__ == "self_distill":
        given["context_column"] = "answer"
    expected = first_prompt(tokenizer, **given)["prompt_ids"]
    eos = tokenizer.eos_token
    special_tokens = [("!", tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"! $A {eos}", special_tokens=special_tokens
    )
    assert tokenizer("1").input_ids[-1] == tokenizer.eos_token_id
    assert first_prompt(tokenizer, **given)["prompt_ids"] == expected
    if script.__name__ == "self_distill":
        problem = first_prompt(tokenizer, **given) | {"context": "46"}
        nothing = torch.zeros(1, 1)
        rollout = script.Rollout([problem["prompt_ids"]], nothing, nothing, nothing)
        args = script.Args(examples=examples, max_teacher_tokens=2000)
        teacher, has_context = script.add_contexts(
            args, default_task(script), tokenizer, rollout, [problem]
        )
        assert has_context.tolist() == [True] and teacher.prompts != rollout.prompts
        assert teacher.prompts[0][-1] != tokenizer.eos_token_id


@pytest.mark.scripts("grpo")
def test_all_columns_reach_the_rewards(first_prompt, tmp_path):
    """`answer` is the gold answer as a text, whatever its column is called."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    row = {"question": "12+34=", "gold": 46, "level": 3, "tests": ["a", "b"]}
    write_rows(tmp_path / "rows.jsonl", row)
    columns = first_prompt(tokenizer, answer_column="gold", examples=False)["columns"]
    assert columns == row | {"answer": "46"}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %} </s>{% endif %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEXT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}=\n{% endfor %}"
ENDS = [(CHATML, {"<|im_end|>"}), (LLAMA_2, {"</s>"}), (PLAIN, set()), (TEXT, set()), (None, set())]


@pytest.mark.parametrize("template, ends", ENDS, ids=["ChatML", "Llama 2", "plain", "text", "none"])
def test_the_token_that_ends_a_turn_ends_a_response(tmp_path, template, ends):
    """A base model's chat template may end a turn with a token that neither the tokenizer nor the model names."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "</s>"], special_tokens=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(ADDER)
    found = set(grpo.find_eos_ids(model, tokenizer))
    assert found == {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ends))}


@pytest.mark.scripts("grpo", "grpo_lora")
@pytest.mark.parametrize("has_file", [True, False], ids=["file", "no file"])
def test_the_saved_model_knows_what_ended_its_responses(script, tmp_path, has_file):
    """vLLM and transformers end a response at the ids of generation_config.json, and would run on without them.

    The old file has a temperature without do_sample. transformers loads such a file, and refuses to save it with other
    EOS ids. Its top-k would change what the policy has learned.
    """
    tokenizer = make_tokenizer(tmp_path / "model", CHATML)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 2}')
    if not has_file:
        path.unlink()
    args = script.Args(model=str(tmp_path / "model"), device="cpu", **LENGTHS)
    model, eos_ids = script.load_model(args, tokenizer)
    model.save_pretrained(tmp_path / "saved")
    saved = transformers.GenerationConfig.from_pretrained(tmp_path / "saved")
    expected = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert set(expected) <= set(saved.eos_token_id) and saved.eos_token_id == eos_ids.tolist()
    assert saved.temperature is None and saved.top_k is None


def test_completions_are_what_was_sampled_but_for_the_end(tmp_path, monkeypatch):
    """Decoding drops only the end token. It keeps tags that the tokenizer calls special."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.add_tokens(["<mark>"], special_tokens=True)
    mark, eos = tokenizer.convert_tokens_to_ids("<mark>"), tokenizer.eos_token_id
    ids = torch.tensor([[mark, *tokenizer("12", add_special_tokens=False).input_ids, eos, eos]])
    mask = torch.tensor([[True, True, True, True, False]])
    monkeypatch.setattr(grpo, "generate", lambda *args: (ids, mask, torch.zeros(1, 5)))
    args = grpo.Args(max_new_tokens=5, sampling_tokens=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(ADDER)
    eos_ids = torch.tensor([eos])
    rollout = grpo.sample_responses(args, model, [{"prompt_ids": [5]}], 1, 1.0, eos_ids)
    assert grpo.response_texts(tokenizer, rollout, eos_ids) == ["<mark>12"]


# ---- real text


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory):
    """The folder of a random Llama of width 32 with SmolLM2's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DATA / "smollm2_tokenizer")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, head_dim=32)  # the least that vLLM has on a CPU
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **ids
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# These have a load_data, examples or a sampler of their own.
@pytest.mark.scripts("grpo", "ppo_rlhf", "self_distill", "grpo_tools", "grpo_vllm")
def test_gsm8k_with_the_default_prompt(script, tiny_chat, tmp_path, capsys):
    """The recipe's data, tokenizer, template and prompt: one step whose sampler and trainer agree."""
    skip_without_engine(script)
    given = dict(model=str(tiny_chat), dataset=str(DATA / "gsm8k"), device="cpu")
    given |= dict(runs_dir=str(tmp_path), run_name="run") | SMALL
    if script.__name__ == "ppo_rlhf":
        given |= dict(reward_model=None)
    if script.__name__ == "self_distill":
        given |= dict(context_column="answer", max_teacher_tokens=1000)
    metrics = script.main(script.Args(**given))
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert script.Args().max_prompt_tokens == 512
    # A problem of 985 characters fits, too.
    out = capsys.readouterr().out
    assert "train data: 40 problems\n" in out
    sample = read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    assert sample["prompt"].count("<|im_start|>system") == 1
    assert sample["prompt"].count("<|im_start|>user") == 1 + len(default_task(script).EXAMPLES)
    assert sample["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")


# ---- the format of a GPU's numbers


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes torch believe in a GPU of this compute capability."""

    def call(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return call


DTYPES = [
    # A T4, an A100 and an H100.
    (7, 5, "auto", "float16"),
    (8, 0, "auto", "bfloat16"),
    (9, 0, "auto", "bfloat16"),
    (7, 5, "bfloat16", "bfloat16"),
    (9, 0, "float16", "float16"),
]


@pytest.mark.parametrize("major, minor, dtype, expected", DTYPES)
def test_a_gpu_computes_in_16_bits(gpu, major, minor, dtype, expected):
    gpu(major, minor)
    assert grpo.find_dtype(grpo.Args(dtype=dtype)) == expected
    assert grpo.find_dtype(grpo.Args(dtype=dtype, device="cpu")) == "float32"


@pytest.mark.scripts("grpo", "grpo_offpolicy")
def test_the_gap_of_the_first_step_may_be_that_of_rounding(script, gpu):
    gpu(7, 5)
    engine = [SimpleNamespace(dtype=torch.float32)] * (script.__name__ == "grpo_offpolicy")
    limits = {"float16": 0.05, "bfloat16": 0.1}
    for dtype, limit in limits.items():
        args = script.Args(dtype=dtype)
        script.check_gap(args, *engine, torch.tensor(0.9 * limit))
        for gap in (1.1 * limit, math.nan):
            with pytest.raises(ValueError, match="sampling and training differ") as caught:
                script.check_gap(args, *engine, torch.tensor(gap))
            hint = r"this family isn't supported or needs (--dtype )?bfloat16, or generate"
            assert bool(re.search(hint, str(caught.value))) == (dtype == "float16")
    with pytest.raises(ValueError, match="isn't supported, or generate"):
        script.check_gap(script.Args(device="cpu"), *engine, torch.tensor(0.002))


# ---- the script itself


def state_of_the_process() -> tuple:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seeds = torch.get_rng_state().tolist(), random.getstate()
    devices = torch.get_default_dtype(), torch.cuda.is_initialized()
    return dict(os.environ), handlers, seeds, devices, os.getcwd(), os.listdir(".")


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
    sys.modules |= dict(fcntl=None, resource=None)  # as on Windows, which lacks them
    before = state_of_the_process()
    for name in SCRIPTS:
        __import__(name)
        assert state_of_the_process() == before, name


def test_import_has_no_side_effect(tmp_path):
    """An import parses no arguments, uses no network, writes no file, touches no device, and leaves the environment.

    It also works without the modules that Windows lacks.
    """
    process = FORK.Process(target=import_anew, args=(str(tmp_path),), daemon=True)
    process.start()
    assert ended(process) == 0


def test_every_flag_is_read(script):
    reads = set()
    for node in ast.walk(ast.parse(read_script(script.__name__))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id == "args":
                reads.add(node.attr)
    assert reads == {field.name for field in dataclasses.fields(script.Args)}


@pytest.mark.scripts("grpo", "ppo_rlhf", "self_distill")
def test_an_answer_of_zero_is_an_answer(script, tmp_path):
    rows = [{"question": f"{k}-{k}=", "answer": 0, "hint": "x"} for k in range(20)]
    path = tmp_path / "zeros.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args = dataclasses.replace(script.BUNDLED, dataset=str(path))
    if script.__name__ == "ppo_rlhf":
        args = dataclasses.replace(args, reward_model=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    train_data, test_data = script.load_data(args, default_task(script), tokenizer)
    assert answers_of(train_data + test_data) == ["0"] * 20
