"""Bad input gets one line that names the flag, the value and the reason.

The script exits with status 2, prints no traceback and writes nothing. Slightly unusual data still loads: another
format, other column names, or rows that the script must skip.
"""

import csv
import dataclasses
import hashlib
import importlib.util
import json
import os
import runpy
import shutil
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import ROOT, SCRIPTS, SMALL_TASK, skip_without_engine, small_recipe

import ppo_rlhf

ADDER, JUDGE = ROOT / "assets" / "adder", ROOT / "assets" / "adder-judge"
ROWS = [
    json.loads(line)
    for line in (ROOT / "assets" / "addition" / "train.jsonl").open(encoding="utf-8")
][:40]
SMALL = dict(
    num_steps=1, num_prompts=2, num_generations=2, max_new_tokens=8, eval_size=4, warmup_updates=0
)
# Settings for a model that is as small as the bundled one but has another path.
OTHER_MODEL = dict(system_prompt="", max_prompt_tokens=64, gradient_checkpointing=False)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    """These tests don't wait for a network and don't fill the user's cache."""
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(params=["grpo", "ppo_rlhf"])
def reader(request):
    """One script of each kind: grpo.py reads one model, ppo_rlhf.py also reads a reward model."""
    return __import__(request.param)


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def snapshot(folder) -> dict:
    return {
        str(path): path.is_file() and hashlib.md5(path.read_bytes()).digest()
        for path in folder.rglob("*")
    }


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """Run main with these fields. It must exit with status 2, print one line with these words and write nothing."""
    monkeypatch.chdir(tmp_path)

    def call(script, *words, **given):
        if "resume" not in given:
            given = {"dataset": SMALL_TASK, **SMALL, "runs_dir": str(tmp_path / "runs"), **given}
            if hasattr(script, "CONTEXT_TEMPLATE"):  # the problems of the tests have no hints
                given = {"context_column": "answer", **given}
        before = snapshot(tmp_path)
        capsys.readouterr()  # what the test itself has printed, such as a progress bar
        with pytest.raises(SystemExit) as stop:
            script.main(script.Args(**given))
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1, (
            error
        )
        assert [word for word in words if word not in error] == [], error
        assert snapshot(tmp_path) == before
        return error

    return call


# ---- devices


@pytest.mark.scripts("grpo", "grpo_lora")
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an MPS device")
def test_mps_is_taken_with_a_warning(script, capsys):
    """On a machine without this device the script prints torch's reason."""
    with pytest.raises(SystemExit) as stop:
        script.main(script.Args(**{"dataset": SMALL_TASK, **SMALL, "device": "mps"}))
    out, error = capsys.readouterr()
    assert "\nwarning: --device mps is untested; it computes in float32\n" in out
    assert stop.value.code == 2 and "--device mps: not supported: " in error


@pytest.mark.scripts("grpo", "ppo_rlhf", "vapo")
def test_a_run_checks_the_memory_of_all_networks_that_it_trains(script, monkeypatch, tmp_path):
    class Checked(BaseException):
        pass

    checked = []

    def check_memory(args, *networks):
        checked.extend(networks)
        raise Checked

    monkeypatch.setattr(script, "check_memory", check_memory)
    fields = small_recipe(script) | dict(device="cpu", runs_dir=str(tmp_path))
    with pytest.raises(Checked):
        script.main(script.Args(**fields))
    kinds = [type(network).__name__ for network in checked]
    critic = ["LlamaForSequenceClassification"] if script.__name__ != "grpo" else []
    assert kinds == ["LlamaForCausalLM", *critic]


@pytest.mark.scripts("grpo", "ppo_rlhf")
def test_a_model_that_the_gpu_cannot_train_is_refused_before_the_run(script, monkeypatch, capsys):
    """A gradient and Adam's averages take 12 bytes per trained parameter, beside what the GPU holds already.

    ppo_rlhf.py trains two networks.
    """
    weight = torch.zeros(10**6, requires_grad=True)
    parameters = [weight, torch.zeros(10**6)]
    model = SimpleNamespace(device=torch.device("cuda"), parameters=lambda: parameters)
    total = SimpleNamespace(total_memory=30e6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    networks = [model, model] if script.__name__ == "ppo_rlhf" else [model]
    most = 30e6 - 12e6 * len(networks)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: most - 1e6)
    script.check_memory(script.Args(model="large"), *networks)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: most + 1e6)
    with pytest.raises(SystemExit):
        script.check_memory(script.Args(model="large"), *networks)
    error = capsys.readouterr().err
    assert error.startswith("error: --model large: training needs more than 0 GB") and (
        "the GPU has 0 GB; use grpo_lora.py or a smaller model" in error
    )


# ---- numbers


def numbers(script) -> dict:
    """The numeric fields of Args, each with a flag: must the number be an integer?"""
    found = {}
    for name, kind in typing.get_type_hints(script.Args).items():
        kinds = {kind, *typing.get_args(kind)}
        if int in kinds or float in kinds:
            found[name] = float not in kinds
    return found


def test_every_number_has_bounds(script):
    """If someone adds a field without an entry in BOUNDS, the script doesn't check the field."""
    assert set(script.BOUNDS) == set(numbers(script))
    for name, (lowest, highest) in script.BOUNDS.items():
        assert 0 <= lowest < highest, name


@pytest.mark.scripts("grpo", "reinforce_baseline", "dapo")
def test_bounds_that_a_run_depends_on(script):
    """0 turns a feature off, a group needs two samples, and a ratio's lower bound isn't negative."""
    lowest = {name: low for name, (low, _) in script.BOUNDS.items()}
    assert lowest["seed"] == lowest["eval_every"] == lowest["save_every"] == 0
    assert lowest["num_steps"] == lowest["max_new_tokens"] == lowest["micro_batch_tokens"] == 1
    assert 0 < lowest["temperature"] < 1e-6 and 0 < lowest["learning_rate"] < 1e-9
    assert lowest["num_generations"] == (1 if script.__name__ == "reinforce_baseline" else 2)
    assert lowest.get("beta", 0) == 0
    assert script.BOUNDS.get("clip_eps", (0, 1))[1] == 1
    assert script.BOUNDS.get("clip_eps_low", (0, 1))[1] == 1


def test_numbers_out_of_bounds(script, refuse):
    """The script refuses a value that is too low, too high, infinite or NaN, in every numeric field."""
    for name, whole in numbers(script).items():
        lowest, highest = script.BOUNDS[name]
        if whole:
            wrong = [lowest - 1, -(10**15), highest + 1, 10**15]
        else:
            infinite = [float("nan"), float("inf"), -float("inf")]
            wrong = [*infinite, -1.0, -1e-9, highest * 1.001]
            if lowest > 0:
                wrong.append(0.0)
        for value in wrong:
            line = f"error: {flag(name)} {value}: must be from {lowest} to {highest}\n"
            refuse(script, line, **{name: value})


@pytest.mark.parametrize("end", [0, 1])
def test_the_bounds_themselves_are_allowed(script, refuse, end):
    """Numbers exactly at their bounds pass the check. The script then refuses the model, which it reads next."""
    given = {}
    for name, whole in numbers(script).items():
        bound = script.BOUNDS[name][end]
        given[name] = bound if whole else float(bound)
    # kl_target needs a beta above 0.
    if "kl_target" in given:
        given["kl_target"] = None
    refuse(script, "error: --model ./nowhere", **given, model="./nowhere")


@pytest.mark.scripts("grpo")
def test_more_minibatches_than_sequences(script, refuse):
    refuse(script, "--num-minibatches 5: more than the 4 sequences of a step", num_minibatches=5)
    # One sequence per minibatch is allowed.
    refuse(script, "error: --model ./nowhere", num_minibatches=4, model="./nowhere")


def test_kl_target_without_a_coefficient_to_adapt(refuse):
    refuse(ppo_rlhf, "--kl-target 2.0: needs a --beta above 0", kl_target=2.0, beta=0.0)


# ---- models


@pytest.fixture
def copy_model(tmp_path):
    """Copy a bundled model to a folder that a test may break.

    The copy has no weights by default, because most refusals come before the script reads weights.
    """

    def call(source=ADDER, weights=False, **config):
        ignore = None if weights else shutil.ignore_patterns("*.safetensors")
        folder = shutil.copytree(source, tmp_path / f"{source.name}-copy", ignore=ignore)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return folder

    return call


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(jsonl(ROWS))
    return str(path)


@pytest.mark.parametrize("model", ["./nowhere", "a/b/c", "nobody/nothing", ""])
def test_unknown_model(reader, refuse, model):
    refuse(reader, f"error: --model {model}", ", not on this disk, so a hub id: ", model=model)


def test_a_copy_without_the_bundled_model(refuse, tmp_path):
    shutil.copy(ROOT / "grpo.py", tmp_path)
    spec = importlib.util.spec_from_file_location("copied", tmp_path / "grpo.py")
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    refuse(copied, f"no folder {tmp_path / 'assets'}", "or give --model and --dataset")


def test_unknown_short_name(reader, refuse):
    """If a name has no "/" and isn't a folder, the script looks for it among HuggingFaceTB's models."""
    refuse(reader, "--model HuggingFaceTB/no-such-model", model="no-such-model")


def test_folder_without_config(reader, refuse, tmp_path):
    (tmp_path / "model").mkdir()
    refuse(reader, f"--model {tmp_path / 'model'}", "config.json", model=str(tmp_path / "model"))


@pytest.mark.parametrize("content", ["garbage", "", "{}", "[1]", '{"model_type": "nonesuch"}'])
def test_garbage_for_a_config(reader, refuse, copy_model, content):
    folder = copy_model()
    (folder / "config.json").write_text(content)
    refuse(reader, f"--model {folder}", model=str(folder))


@pytest.mark.parametrize("model", ["./nowhere", "nobody/nothing"])
def test_unknown_reward_model(refuse, model):
    refuse(ppo_rlhf, f"--reward-model {model}", reward_model=model)


def test_no_tokenizer(reader, refuse, copy_model):
    folder = copy_model()
    (folder / "tokenizer.json").unlink()
    refuse(reader, f"--model {folder}", "tokenizer", model=str(folder))


def test_reward_model_with_several_labels(refuse):
    refuse(ppo_rlhf, f"--reward-model {ADDER}: has 2 labels, not 1", reward_model=str(ADDER))


def test_reward_model_with_another_vocabulary(refuse, copy_model):
    """The reward model scores token ids. In another vocabulary the same ids would be different tokens."""
    folder = copy_model(JUDGE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    line = f"--reward-model {folder}: must have the vocabulary of --model {ADDER}\n"
    refuse(ppo_rlhf, line, reward_model=str(folder))


def test_reward_model_without_the_head_that_is_scored_with(refuse, tmp_path, data, capsys):
    """BERT calls its head "classifier", not "score", and reads the first token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)
    folder = tmp_path / "bert"
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    capsys.readouterr()
    words = f"error: --reward-model {folder}: not supported", "score"
    refuse(ppo_rlhf, *words, reward_model=str(folder), dataset=data)


def spoil_weights(folder, word, model_class):
    """Save the model again without the weights whose names contain this word."""
    model = model_class.from_pretrained(folder)
    state = {name: value for name, value in model.state_dict().items() if word not in name}
    assert len(state) < len(model.state_dict())
    model.save_pretrained(folder, state_dict=state)


def test_weights_that_are_not_in_the_files(reader, refuse, copy_model, data):
    """from_pretrained fills missing weights with random numbers, so the script must refuse them."""
    folder = copy_model(weights=True)
    spoil_weights(folder, ".layers.2.", transformers.AutoModelForCausalLM)
    refuse(
        reader,
        f"--model {folder}",
        "model.layers.2.mlp.up_proj",
        model=str(folder),
        dataset=data,
        **OTHER_MODEL,
    )


@pytest.mark.parametrize(
    "word, value_init",
    [(word, init) for word in (".layers.2.", "score") for init in ("reward_model", "policy")],
)
def test_reward_model_without_all_weights(refuse, copy_model, data, word, value_init):
    folder = copy_model(JUDGE, weights=True)
    spoil_weights(folder, word, transformers.AutoModelForSequenceClassification)
    given = dict(reward_model=str(folder), value_init=value_init, dataset=data)
    refuse(ppo_rlhf, f"--reward-model {folder}", word, **given)


def test_policy_without_all_weights_beside_a_reward_model(refuse, copy_model, data):
    """The value network starts from the complete reward model, so only the policy lacks weights."""
    folder = copy_model(weights=True)
    spoil_weights(folder, ".layers.2.", transformers.AutoModelForCausalLM)
    given = dict(model=str(folder), reward_model=str(JUDGE), dataset=data, **OTHER_MODEL)
    refuse(ppo_rlhf, f"--model {folder}", "model.layers.2.mlp.up_proj", **given)


@pytest.mark.parametrize(
    "given", [dict(max_prompt_tokens=200, max_new_tokens=57), dict(max_new_tokens=193)]
)
def test_longer_than_the_context(reader, refuse, given):
    """The bundled model has a context of 256 tokens and prompts of at most 64. Exactly 256 tokens are allowed."""
    flags = [f"{flag(name)} {value}" for name, value in given.items()]
    refuse(reader, "--max-prompt-tokens", *flags, "256 tokens", **given)
    fitting = given | {"max_new_tokens": given["max_new_tokens"] - 1}
    refuse(reader, "--dataset nowhere.jsonl", dataset="nowhere.jsonl", **fitting)


def test_longer_than_the_sliding_window(reader, refuse, copy_model):
    """Beyond the window a model can't see its prompt, and the sampler's cache would have to drop tokens."""
    config = dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=50)
    refuse(reader, "50 tokens", model=str(copy_model(**config)), **OTHER_MODEL)


@pytest.mark.parametrize("value_init", ["reward_model", "policy"])
def test_longer_than_the_context_of_the_reward_model(refuse, copy_model, value_init):
    folder = copy_model(JUDGE, max_position_embeddings=60)
    words = "60 tokens", f"--reward-model {folder}"
    refuse(ppo_rlhf, *words, reward_model=str(folder), value_init=value_init)


CAPPED = dict(final_logit_softcapping=30.0, attn_logit_softcapping=None, query_pre_attn_scalar=16)
# configuration class -> (its fields, the field that the error must name)
HEADS = {
    "Gemma2Config": (CAPPED, "final_logit_softcapping': 30.0"),
    "CohereConfig": (dict(logit_scale=0.25), "logit_scale': 0.25"),
    "GraniteConfig": (dict(logits_scaling=4.0), "logits_scaling': 4.0"),
}


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("name", HEADS)
def test_a_model_that_does_more_to_its_logits_is_refused_at_load(
    script, refuse, tmp_path, data, monkeypatch, capsys, name
):
    """The script refuses such a model before it samples, even if a cap of 30 has little effect."""
    fields, word = HEADS[name]
    fields = fields | dict(
        vocab_size=57, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    fields |= dict(head_dim=8, intermediate_size=32, num_key_value_heads=4, initializer_range=0.2)
    config = getattr(transformers, name)(**fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ADDER).save_pretrained(folder)
    capsys.readouterr()
    monkeypatch.setattr(script, "generate", None)
    words = f"error: --model {folder}, --device auto: not supported", word
    refuse(script, *words, model=str(folder), dataset=data, **OTHER_MODEL)


# These families have no key-value cache, or one of another form.
FAMILIES = {
    "MambaConfig": dict(hidden_size=32, num_hidden_layers=2, state_size=4),
    "BloomConfig": dict(hidden_size=32, n_layer=2, n_head=4),
    "T5Config": dict(d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=4),
}


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_is_not_supported_is_refused_at_load(
    script, refuse, tmp_path, data, capsys, name
):
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)
    config = getattr(transformers, name)(
        vocab_size=len(tokenizer), eos_token_id=2, **FAMILIES[name]
    )
    folder = tmp_path / "model"
    classes = (
        transformers.AutoModelForSeq2SeqLM
        if name == "T5Config"
        else transformers.AutoModelForCausalLM
    )
    classes.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    capsys.readouterr()
    words = f"error: --model {folder}, --device auto: not supported"
    refuse(script, words, model=str(folder), dataset=data, **OTHER_MODEL)


def test_a_model_without_a_vocabulary(reader, refuse, copy_model):
    """A model of images may come with a tokenizer, too."""
    folder = copy_model()
    transformers.ViTConfig().save_pretrained(folder)
    refuse(reader, f"--model {folder}", "vocab_size", model=str(folder))


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_weights_that_cannot_be_read(script, refuse, copy_model, data, content):
    """The weights file is empty, or a Git LFS pointer, or from a model of another shape."""
    folder = copy_model(weights=True, **({} if content is not None else {"hidden_size": 64}))
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    refuse(
        script, f"--model {folder}", "not supported", model=str(folder), dataset=data, **OTHER_MODEL
    )


@pytest.mark.scripts("grpo")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_such_device(script, refuse, data):
    refuse(script, "--device cuda", device="cuda", dataset=data)


@pytest.mark.scripts("grpo")
def test_no_token_that_ends_a_text(script, refuse, copy_model, data):
    folder = copy_model(weights=True, eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    refuse(script, f"--model {folder}", "EOS token", model=str(folder), dataset=data, **OTHER_MODEL)


def test_a_tokenizer_larger_than_the_model(reader, refuse, copy_model, data):
    folder = copy_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = transformers.AutoConfig.from_pretrained(folder).vocab_size
    tokenizer.add_tokens([f"<{k}>" for k in range(1 + size - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    words = f"--model {folder}", f"{size + 1} tokens", "more than the model"
    refuse(reader, *words, model=str(folder), dataset=data, **OTHER_MODEL)


@pytest.mark.scripts("grpo")
def test_a_broken_chat_template(script, refuse, copy_model, data):
    folder = copy_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}"
    tokenizer.save_pretrained(folder)
    words = f"--model {folder}: its chat template", "endfor"
    refuse(script, *words, model=str(folder), dataset=data, **OTHER_MODEL)


# ---- data

GOOD = '{"question": "1+2=", "answer": "3"}\n'
# (file name, its text or bytes, further fields, words of the error besides --dataset and the file's path)
DATA = [
    ("empty.jsonl", "", {}, ["(train)", "an empty file"]),
    ("blank.jsonl", "\n\n", {}, ["(train)", "no data"]),
    ("empty.json", "", {}, ["(train)", "an empty file"]),
    ("empty_list.json", "[]", {}, ["(train)", "no data"]),
    ("empty.csv", "", {}, ["(train)", "No columns"]),
    ("header.csv", "question,answer\n", {}, ["(train)", "no data"]),
    ("empty.parquet", "", {}, ["(train)", "0 bytes"]),
    ("broken.parquet", "PAR1 and no more", {}, ["not a parquet file"]),
    ("text.json", "not JSON", {}, ["JSON parse error"]),
    ("cut.jsonl", GOOD * 2 + '{"question": "1+', {}, ["JSON parse error", "row 2"]),
    ("middle.jsonl", GOOD + "\n" + "nonsense\n" + GOOD, {}, ["JSON parse error", "row 1"]),
    (
        "strings.json",
        '["1+2=", "3"]',
        {},
        ["--question-column question", "--answer-column answer", "not in"],
    ),
    (
        "lists.jsonl",
        '["1+2=", "3"]\n',
        {},
        ["--question-column question", "--answer-column answer", "not in"],
    ),
    (
        "latin1.jsonl",
        GOOD.encode() + '{"question": "é1+2=", "answer": "3"}\n'.encode("latin-1"),
        {},
        ["utf-8"],
    ),
    ("latin1.csv", "question,answer\né1+2=,3\n".encode("latin-1"), {}, ["utf-8"]),
    # European spreadsheets separate columns with semicolons.
    ("semicolons.csv", "question;answer\n" + "1+2=;3\n" * 20, {}, ["'question;answer'"]),
    (
        "no_number.jsonl",
        GOOD.replace('"3"', '"three"') * 20,
        {},
        ["train data has 0 problems", "18 without a question or a readable answer"],
    ),
    (
        "null_answer.jsonl",
        GOOD.replace('"3"', "null") * 20,
        {},
        ["train data has 0 problems", "18 without a question or a readable answer"],
    ),
    (
        "too_long.jsonl",
        GOOD * 20,
        dict(max_prompt_tokens=2),
        ["train data has 0 problems", "18 longer than --max-prompt-tokens"],
    ),
    # The columns are right, but one row leaves none to hold out.
    ("one_row.jsonl", GOOD, {}, ["(train)", "the resulting train set will be empty"]),
    ("one_row.json", GOOD, {}, ["(train)", "the resulting train set will be empty"]),
    ("one_row.csv", "question,answer\n1+2=,3\n", {}, ["(train)", "train set will be empty"]),
    # If a column is missing, this is the reason, also where the rows are too few.
    ("wrapped.json", '{"data": [' + GOOD + "]}", {}, ["dataset: ['data']"]),
    ("one_other_row.jsonl", GOOD.replace("answer", "a"), {}, ["dataset: ['question', 'a']"]),
    ("notes.txt", GOOD, {}, ["(train)", "found on this disk", "--question-column"]),
    ("rows.JSONL", GOOD * 20, {}, ["(train)", "any supported extension"]),
    # These values are neither text nor messages. The script must not use Python's str() of them.
    ("dict.jsonl", GOOD.replace('"1+2="', '{"text": "1+2="}') * 20, {}, ["train data has 0"]),
    ("list.jsonl", GOOD.replace('"1+2="', '["1+2="]') * 20, {}, ["--question-column question"]),
    ("answers.jsonl", GOOD.replace('"3"', '["3", "three"]') * 20, {}, ["train data has 0"]),
    ("bool.jsonl", GOOD.replace('"3"', "true") * 20, {}, ["train data has 0"]),
    ("blank.jsonl", GOOD.replace("1+2=", " \\n ") * 20, {}, ["train data has 0"]),
    ("no_chat.jsonl", GOOD.replace('"1+2="', "[]") * 20, {}, ["train data has 0"]),
    # pandas would read the first column as row names and shift every value by one column.
    ("comma.csv", "question,answer\n600+634=,1,234\n1+2=,3,4\n", {}, ["more values than"]),
    ("empty_end.csv", "question,answer\n1+2=,3,\n2+2=,4,\n", {}, ["more values than"]),
    # Otherwise the prompt would contain the answer.
    (
        "chat.jsonl",
        jsonl(
            [{"question": [dict(role="user", content="1+2="), dict(role="assistant", content="3")]}]
        ).replace("]}", '], "answer": "3"}')
        * 20,
        {},
        ["the last message is the assistant's"],
    ),
    (
        "other_chat.jsonl",
        GOOD.replace('"1+2="', '[{"from": "human", "value": "1+2="}]') * 20,
        {},
        ["messages need a role and a content", "'from': 'human'"],
    ),
    (
        "no_role.jsonl",
        GOOD.replace('"1+2="', '[{"content": "1+2="}]') * 20,
        {},
        ["messages need a role and a content"],
    ),
    (
        "null_chat.jsonl",
        GOOD.replace('"1+2="', '[{"role": "user", "content": null}]') * 20,
        {},
        ["messages need a role and a content"],
    ),
]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("name, content, given, words", DATA, ids=[case[0] for case in DATA])
def test_dataset(script, refuse, tmp_path, name, content, given, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(script, f"error: --dataset {path}", *words, dataset=str(path), **given)


COLUMNS = [
    (
        '{"prompt": "1+2=", "answer": "3"}\n' * 9,
        {},
        ["--question-column question", "'prompt', 'answer'"],
    ),
    (
        '{"question": "1+2=", "solution": "3"}\n' * 9,
        {},
        ["--answer-column answer", "'question', 'solution'"],
    ),
    (GOOD * 9, dict(question_column="q"), ["--question-column q", "'question', 'answer'"]),
    (GOOD * 9, dict(answer_column="a"), ["--answer-column a", "'question', 'answer'"]),
]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("content, given, words", COLUMNS)
def test_missing_column(script, refuse, tmp_path, content, given, words):
    (tmp_path / "rows.jsonl").write_text(content)
    refuse(script, "error: --dataset", *words, dataset=str(tmp_path / "rows.jsonl"), **given)


NOWHERE = [
    "nowhere.jsonl",
    "nowhere.csv",
    "nowhere.parquet",
    "./nowhere",
    "/nowhere/at/all",
    "nobody/nothing",
]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("name", [*NOWHERE, "nobody/nothing:main"])
def test_missing_dataset(script, refuse, name):
    error = refuse(script, f"error: --dataset {name} (train)", dataset=name)
    # The reason must name the data set, too.
    assert error.count(name.split(":")[0]) >= 2, error


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize(
    "files, words", [([], ["any data files"]), (["test.jsonl"], ["(train)", "'train'"])]
)
def test_folder_without_training_data(script, refuse, tmp_path, files, words):
    (tmp_path / "data").mkdir()
    for name in files:
        (tmp_path / "data" / name).write_text(jsonl(ROWS))
    refuse(script, f"--dataset {tmp_path / 'data'}", *words, dataset=str(tmp_path / "data"))


def asks_for_a_column(completions, difficulty):
    return [0.0] * len(completions)


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_reward_that_asks_for_another_column(script, refuse, tmp_path, monkeypatch, split):
    """The script refuses it before it loads the model. So the message isn't about the model without weights."""
    monkeypatch.setattr(script, "REWARDS", [asks_for_a_column])
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ADDER / name, tmp_path / "model")
    (tmp_path / "test.jsonl").write_text(jsonl(ROWS))
    known = ROWS if split == "train" else [row | {"difficulty": 1} for row in ROWS]
    (tmp_path / "train.jsonl").write_text(jsonl(known))
    given = dict(dataset=str(tmp_path / "train.jsonl"), eval_dataset=str(tmp_path / "test.jsonl"))
    words = "error: the reward asks_for_a_column asks for difficulty; it can have", "question"
    refuse(script, *words, model=str(tmp_path / "model"), **given, **OTHER_MODEL)


@pytest.mark.scripts("grpo")
def test_a_reason_of_many_lines(script, refuse, tmp_path):
    """Two files of one split have different columns. The library prints a page about this; the script prints a line."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-0.jsonl").write_text(jsonl(ROWS))
    (tmp_path / "data" / "train-1.jsonl").write_text('{"q": "1+2=", "answer": "3"}\n' * 9)
    refuse(script, f"--dataset {tmp_path / 'data'} (train)", dataset=str(tmp_path / "data"))


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize(
    "content", ["", "nonsense", '{"q": "1+2=", "answer": "3"}\n', GOOD.replace("3", "three")]
)
def test_eval_dataset(script, refuse, tmp_path, data, content):
    """An error in the held-out problems must not blame the training data."""
    path = tmp_path / "held_out.jsonl"
    path.write_text(content)
    error = refuse(script, f"dataset {path}", "test", dataset=data, eval_dataset=str(path))
    assert data not in error


# ---- resume


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_resume_without_checkpoint(script, refuse, tmp_path, name):
    words = f"--resume {tmp_path / name}", f"give a folder of a run of {script.__name__}.py"
    refuse(script, *words, resume=str(tmp_path / name))


def test_resume_of_another_script(script, refuse, tmp_path):
    for other in (*SCRIPTS, "another"):
        if other != script.__name__:
            torch.save({"script": f"{other}.py", "args": {}}, tmp_path / "checkpoint.pt")
            words = f"a run of {script.__name__}.py, not {other}.py"
            refuse(script, f"--resume {tmp_path}", *words, resume=str(tmp_path))


def test_resume_with_other_arguments(script, refuse, tmp_path):
    """--resume refuses every other argument, even False or 0, before it reads the checkpoint."""
    for field in dataclasses.fields(script.Args):
        if field.name != "resume":
            value = not field.default if isinstance(field.default, bool) else 0
            value = 1 if field.default == 0 and value == 0 else value
            words = f"--resume {tmp_path}", "takes no other flags"
            refuse(script, *words, resume=str(tmp_path), **{field.name: value})


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("content", [b"", b"PK", None], ids=["empty", "cut", "older"])
def test_a_checkpoint_that_cannot_be_read(script, refuse, tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    if content is None:
        torch.save({"script": "grpo.py", "args": {"flag_of_another_version": 1}}, path)
    else:
        path.write_bytes(content)
    refuse(script, f"--resume {tmp_path}", resume=str(tmp_path))


@pytest.mark.scripts("grpo")
def test_a_runs_folder_that_cannot_be_written(script, refuse, tmp_path, data):
    (tmp_path / "file").write_text("no folder")
    refuse(
        script,
        f"{tmp_path / 'file'}",
        "cannot be written",
        runs_dir=str(tmp_path / "file"),
        dataset=data,
    )


# The pickle of this class runs code when it is read.
class Unsafe:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.scripts("grpo")
def test_a_checkpoint_runs_no_code(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"script": f"{script.__name__}.py", "args": Unsafe()}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit) as stop:
        script.main(script.Args(resume=str(tmp_path)))
    assert stop.value.code == 2 and "error: --resume" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


# ---- a user's mistake in an edited script


def edited(script, tmp_path, old, new):
    """Import a copy of the script in which `new` replaces `old`."""
    source = (ROOT / f"{script.__name__}.py").read_text(encoding="utf-8")
    assert source.count(old) >= 1, old
    path = tmp_path / f"{script.__name__}.py"
    path.write_text(source.replace(old, new, 1), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"edited_{script.__name__}", path)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# function -> (its code, the same code with a typo, the exception that the typo raises)
MISTAKES = {
    "generate": ("logits[:, 0].float()", "logits[:, 0].flaot()", AttributeError),
    "render": ("    first = messages[0]\n", "    first = massages[0]\n", NameError),
}
MORE_MISTAKES = {  # in text that all scripts share, so that one script is enough
    "response_states": ("response_mask.nonzero(", "respons_mask.nonzero(", AttributeError),
    "load_model": ('if info["missing_keys"]:', 'if info["missing"]:', KeyError),
    "load_config": (
        "if limit and args.max_prompt_tokens",
        "if limit and args.max_promt",
        AttributeError,
    ),
    "read_rows": ("splits.select_columns(", "splitss.select_columns(", NameError),
    "check_model": (
        "layer.keys = F.pad(layer.keys,",
        "layer.keys = F.pad(layer.kyes,",
        AttributeError,
    ),
    "save_checkpoint": ('"args": vars(args),', '"args": vars(arg),', NameError),
}


def shows_its_traceback(script, tmp_path, old, new, kind):
    """Run a copy with this mistake. The traceback must end at the line that has it."""
    module = edited(script, tmp_path, old, new)
    # The edited copy has no assets folder beside it, so it needs the model's full path.
    given = dict(model=script.Args.model, runs_dir=str(tmp_path), device="cpu", beta=0.1)
    given |= small_recipe(script) | SMALL
    known = {field.name for field in dataclasses.fields(script.Args)}
    args = module.Args(**{name: value for name, value in given.items() if name in known})
    with pytest.raises(kind) as mistake:
        module.main(args)
    last = mistake.traceback[-1]
    assert Path(last.path).name == f"{script.__name__}.py" and new.strip() in str(last.statement)


@pytest.mark.parametrize("function", MISTAKES)
def test_a_mistake_in_the_code_shows_its_traceback(script, function, tmp_path):
    """A typo must not produce a line that blames a flag."""
    if not hasattr(script, function):
        pytest.skip(f"{script.__name__}.py has no {function}")
    shows_its_traceback(script, tmp_path, *MISTAKES[function])


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("function", MORE_MISTAKES)
def test_a_mistake_in_shared_code_shows_its_traceback(script, function, tmp_path):
    shows_its_traceback(script, tmp_path, *MORE_MISTAKES[function])


def test_a_mistake_in_a_reward_shows_its_traceback(script, tmp_path, monkeypatch):
    skip_without_engine(script)

    def broken(completions, answers):
        return [completions[10**6]]

    monkeypatch.setattr(script, "REWARDS", [broken])
    given = small_recipe(script) | SMALL | dict(runs_dir=str(tmp_path), device="cpu")
    given["reward_model"] = ""
    known = {field.name for field in dataclasses.fields(script.Args)}
    with pytest.raises(IndexError) as mistake:
        script.main(script.Args(**{name: x for name, x in given.items() if name in known}))
    assert "completions[10**6]" in str(mistake.traceback[-1].statement)


# ---- from the command line


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize(
    "flags",
    [
        ("--learning-rate", "abc"),
        ("--no-such-flag",),
        ("--lr-schedule", "step"),
        ("--device", "tpu"),
        ("--seed", "-1"),
    ],
)
def test_command_line(script, tmp_path, monkeypatch, capsys, flags):
    """The parser refuses an unknown flag or a malformed value. The script refuses a value out of bounds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(script.__file__, run_name="__main__")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert all(word in error for word in flags), error
    assert list(tmp_path.iterdir()) == []


# ---- unusual but valid data


@pytest.fixture
def load(tmp_path):
    """Call load_data on a data set in tmp_path. Return lists of (prompt, answer): training, then held out."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ADDER)

    def call(script, name, **given):
        given = {"max_prompt_tokens": 200, "eval_size": 500, "system_prompt": "", **given}
        if "eval_dataset" in given:
            given["eval_dataset"] = str(tmp_path / given["eval_dataset"])
        args = script.Args(dataset=str(tmp_path / name), **given)
        found = [script.load_data(args, tokenizer, split) for split in ("train", "test")]
        return [
            [(example["prompt"], example["answer"]) for example in examples] for examples in found
        ]

    return call


def pairs(rows) -> list:
    return [(row["question"], row["answer"]) for row in rows]


def write(path, rows):
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(
            json.dumps(rows) if path.suffix == ".json" else jsonl(rows), encoding="utf-8"
        )


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_formats(script, load, tmp_path, suffix):
    """All four formats load the same examples, under any column names. The last tenth is held out."""
    expected = [
        [(row["question"], row["answer"]) for row in part] for part in (ROWS[:36], ROWS[36:])
    ]
    for question, answer in (("question", "answer"), ("q", "a")):
        path = tmp_path / f"{question}.{suffix}"
        write(path, [{"n": 1, question: row["question"], answer: row["answer"]} for row in ROWS])
        assert load(script, path.name, question_column=question, answer_column=answer) == expected


AWKWARD = [
    # str.splitlines would cut this row.
    {"question": 'Ann\u2028says\u2029"1,\x85 2"\nand: 1+2=', "answer": "a\x0b\x0c\x1c\n#### 3"},
    {"question": "  ünï — 漢字 🙂 1+2=\r\n\r\n", "answer": "3"},
    {"question": "'; \\n \\ {} %s 1+2=", "answer": "-1,234.5"},
]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_awkward_strings(script, load, tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    write(path, AWKWARD)
    assert load(script, path.name, eval_dataset=path.name) == [pairs(AWKWARD)] * 2
    # JSON Lines may also have unescaped characters and blank lines.
    if suffix == "jsonl":
        text = "\n".join(json.dumps(row, ensure_ascii=False) + "\n" for row in AWKWARD) + "\n \n"
        path.write_text(text, encoding="utf-8")
        assert load(script, path.name, eval_dataset=path.name) == [pairs(AWKWARD)] * 2


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_byte_order_mark(script, load, tmp_path, suffix):
    """Some editors start a UTF-8 file with a byte order mark. The reader must skip the mark."""
    path = tmp_path / f"rows.{suffix}"
    write(path, ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(script, path.name) == [pairs(ROWS[:36]), pairs(ROWS[36:])]


@pytest.mark.scripts("grpo")
def test_a_path_is_the_file_that_it_names(script, load, tmp_path):
    """A path may look like a glob pattern that matches another file, or be a link to a file without a suffix."""
    (tmp_path / "a1.jsonl").write_text(GOOD * 20)
    (tmp_path / "a[1].jsonl").write_text(jsonl(ROWS))
    assert load(script, "a[1].jsonl") == [pairs(ROWS[:36]), pairs(ROWS[36:])]
    (tmp_path / "blob").write_text(jsonl(ROWS))
    (tmp_path / "link.jsonl").symlink_to("blob")
    assert load(script, "link.jsonl") == [pairs(ROWS[:36]), pairs(ROWS[36:])]


@pytest.mark.scripts("grpo")
def test_a_parquet_file_may_name_its_rows(script, load, tmp_path):
    """pandas writes an index column after a selection of rows. In a .csv file such a column means shifted values."""
    write(tmp_path / "rows.parquet", [row | {"__index_level_0__": k} for k, row in enumerate(ROWS)])
    assert load(script, "rows.parquet") == [pairs(ROWS[:36]), pairs(ROWS[36:])]


@pytest.mark.scripts("grpo")
def test_crlf(script, load, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS).replace("\n", "\r\n").encode())
    assert load(script, "rows.jsonl") == [pairs(ROWS[:36]), pairs(ROWS[36:])]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_numbers_are_read_as_text(script, load, tmp_path, suffix):
    """Prompts and gold answers become text, even if the file stores them as numbers."""
    for answers in ([5, 0, -7], [5.5, 0.25, -7.5]):
        rows = [{"question": k, "answer": answer} for k, answer in enumerate(answers)]
        write(tmp_path / f"rows.{suffix}", rows)
        expected = [(str(row["question"]), str(row["answer"])) for row in rows]
        assert load(script, f"rows.{suffix}", eval_dataset=f"rows.{suffix}") == [expected] * 2


@pytest.mark.scripts("grpo")
def test_an_integer_that_the_library_rounds_is_skipped(script, load, tmp_path):
    """JSON has the integer 10**24 + 1, and the library reads 10**24. So the script must not take it for the gold."""
    rows = [row | {"answer": int(row["answer"])} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text(jsonl([{"question": "?", "answer": 10**24 + 1}, *rows]))
    assert load(script, "rows.jsonl", eval_dataset="rows.jsonl")[0] == pairs(ROWS)


@pytest.mark.scripts("grpo")
def test_held_out_problems(script, load, tmp_path):
    """Held-out problems come from --eval-dataset, else the folder's test file, else the last tenth of the file.

    The script evaluates the first --eval-size of these problems.
    """
    (tmp_path / "all.jsonl").write_text(jsonl(ROWS))
    assert load(script, "all.jsonl") == [pairs(ROWS[:36]), pairs(ROWS[36:])]
    assert load(script, "all.jsonl", eval_size=3) == [pairs(ROWS[:36]), pairs(ROWS[36:39])]

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(jsonl(ROWS[:30]))
    (tmp_path / "data" / "test.jsonl").write_text(jsonl(ROWS[30:35]))
    (tmp_path / "other.jsonl").write_text(jsonl(ROWS[35:]))
    assert load(script, "data") == [pairs(ROWS[:30]), pairs(ROWS[30:35])]
    assert load(script, "data", eval_size=2) == [pairs(ROWS[:30]), pairs(ROWS[30:32])]
    assert load(script, "data", eval_dataset="other.jsonl") == [pairs(ROWS[:30]), pairs(ROWS[35:])]
    assert load(script, "all.jsonl", eval_dataset="data") == [pairs(ROWS), pairs(ROWS[30:35])]
    # A path to one file in the folder loads only this file.
    assert load(script, "data/train.jsonl") == [pairs(ROWS[:27]), pairs(ROWS[27:30])]
    # A folder without a test file behaves like one file: without --eval-dataset, its last tenth is held out.
    (tmp_path / "data" / "test.jsonl").unlink()
    assert load(script, "data") == [pairs(ROWS[:27]), pairs(ROWS[27:30])]
    assert load(script, "data", eval_dataset="other.jsonl") == [pairs(ROWS[:30]), pairs(ROWS[35:])]
    assert load(script, "other.jsonl", eval_dataset="data") == [pairs(ROWS[35:]), pairs(ROWS[:30])]


@pytest.mark.scripts("grpo")
def test_a_validation_split_is_held_out(script, load, tmp_path):
    """The script takes the validation split where there is no test split, and never trains on it."""
    for folder, name in (("data", "validation"), ("other", "dev")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(jsonl(ROWS[:30]))
        (tmp_path / folder / f"{name}.jsonl").write_text(jsonl(ROWS[30:35]))
        (tmp_path / "all.jsonl").write_text(jsonl(ROWS))
        assert load(script, folder) == [pairs(ROWS[:30]), pairs(ROWS[30:35])]
        assert load(script, "all.jsonl", eval_dataset=folder)[1] == pairs(ROWS[30:35])
        (tmp_path / folder / "test.jsonl").write_text(jsonl(ROWS[35:]))
        assert load(script, folder) == [pairs(ROWS[:30]), pairs(ROWS[35:])]


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("folder", ["grpo", "a:b"])
def test_a_folder_of_any_name(script, load, tmp_path, monkeypatch, folder):
    """datasets would take a folder that holds a script of its own name for a data set's script."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{folder}.py").write_text("")
    (tmp_path / folder / "train.jsonl").write_text(jsonl(ROWS[:30]))
    (tmp_path / folder / "test.jsonl").write_text(jsonl(ROWS[30:]))
    assert load(script, f"{folder}/train.jsonl") == [pairs(ROWS[:27]), pairs(ROWS[27:30])]
    assert load(script, folder) == [pairs(ROWS[:30]), pairs(ROWS[30:])]
    # A name without a slash, too.
    monkeypatch.chdir(tmp_path)
    args = script.Args(dataset=folder)
    assert script.read_rows(args, "--dataset", folder, "train") == ROWS[:30]


@pytest.mark.scripts("grpo")
def test_a_file_that_has_changed_is_read_again(script, load, tmp_path):
    """The datasets library caches files, so the script must notice that a file has changed."""
    for rows in (ROWS[:10], ROWS[10:30]):
        (tmp_path / "rows.jsonl").write_text(jsonl(rows))
        assert load(script, "rows.jsonl") == [
            pairs(rows[: len(rows) * 9 // 10]),
            pairs(rows[len(rows) * 9 // 10 :]),
        ]


BAD = [
    {"question": "1+1=", "answer": "two"},
    {"question": "2+2=", "answer": ""},
    {"question": "3+3="},
]
NO_QUESTION = [{"question": None, "answer": "3"}, {"question": "", "answer": "3"}]


@pytest.mark.scripts("grpo")
def test_skipped_rows_are_counted(script, load, tmp_path, capsys):
    """The script skips, counts and reports rows without a number, without an answer or with too long a prompt."""
    long = [{"question": "1+" * 20 + "1=", "answer": "21"}]
    (tmp_path / "train.jsonl").write_text(
        jsonl(BAD[:1] + ROWS[:4] + long + BAD[1:] + ROWS[4:6] + NO_QUESTION)
    )
    (tmp_path / "test.jsonl").write_text(jsonl(ROWS[6:7] + BAD[:1] + ROWS[7:9]))
    # Each character is one token. A prompt may be exactly as long as the limit.
    longest = max(len(row["question"]) for row in ROWS[:6])
    found = load(
        script, "train.jsonl", eval_dataset="test.jsonl", max_prompt_tokens=longest, eval_size=2
    )
    assert found == [pairs(ROWS[:6]), pairs(ROWS[6:8])]
    text = (
        "data: {} problems; skipped: {} longer than --max-prompt-tokens, {} without a question or "
    )
    text += "a readable answer"
    expected = ["train " + text.format(6, 1, 5), "test " + text.format(3, 0, 1)]
    assert [line for line in capsys.readouterr().out.splitlines() if "data: " in line] == expected


def test_a_reward_model_needs_no_numbers(load, tmp_path):
    """A reward model can score any prompt. Only the rule-based rewards need a gold number."""
    (tmp_path / "rows.jsonl").write_text(jsonl(BAD[:2] + ROWS[:4]))
    for reward_model, rows in (("judge", BAD[:2] + ROWS[:4]), ("", ROWS[:4])):
        found = load(ppo_rlhf, "rows.jsonl", eval_dataset="rows.jsonl", reward_model=reward_model)
        assert found == [pairs(rows)] * 2


@pytest.mark.scripts("grpo")
def test_a_model_too_large_for_the_gpu_is_not_called_unsupported(script):
    """The message about memory names the flags to lower, so no other handler may take this error."""
    with pytest.raises(torch.OutOfMemoryError), script.exit_on_error("--model x: not supported"):
        raise torch.OutOfMemoryError("CUDA out of memory")
