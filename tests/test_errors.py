"""Wrong flags, models, data, rewards and folders of runs: each ends in an error that says why, and no run is lost.

The last line of the traceback has the words of the table. It may be the script's, a library's or Python's. Also:
unreadable gold answers are skipped and counted, a run goes on only with its own flags, code and data, a checkpoint runs
no code, and --help shows the values in use.
"""

import dataclasses
import itertools
import json
import math
import os
import pickle
import re
import runpy
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from conftest import ROOT, SMALL_MODEL, default_task, skip_without_engine, small_recipe, use_task
from safetensors.torch import load_file, save_file
from test_runs import FORK, ended, write_to

import grpo
import ppo_rlhf

TINY = dict(
    value_warmup_steps=0,
    num_prompts=2,
    num_generations=2,
    eval_size=2,
    num_steps=2,
    save_every=1,
    device="cpu",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """These tests don't wait for a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def tiny_args(script, tmp_path, **given):
    fields = {field.name for field in dataclasses.fields(script.Args)}
    given = small_recipe(script) | TINY | dict(runs_dir=str(tmp_path / "runs")) | given
    return script.Args(**{name: value for name, value in given.items() if name in fields})


def contents(folder):
    """Every file below the folder, as bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- values of flags
WRONG_VALUES = [
    (dict(num_generations=1), ValueError, "--num-generations"),
    (dict(temperature=0.0), ValueError, "--temperature must be positive"),
    (dict(temperature=float("nan")), ValueError, "--temperature must be positive"),
    (dict(clip_eps=0.0), ValueError, "--clip-eps must be positive"),
    (dict(max_grad_norm=0.0), ValueError, "--max-grad-norm must be positive"),
    (dict(beta=-0.04), ValueError, "--beta must not be negative"),
    (dict(num_minibatches=5), ValueError, "--num-minibatches"),
    (dict(max_new_tokens=256 - 64 + 1), ValueError, "256 tokens of the context"),
    (dict(model="./nowhere"), OSError, "nowhere"),
    (dict(model="nothing"), OSError, "HuggingFaceTB/nothing|internet connection"),
    (dict(dataset="nowhere.jsonl"), Exception, "nowhere.jsonl"),
    (dict(question_column="q"), ValueError, r"'q'.*'question', 'answer'"),
    (dict(answer_column="a"), ValueError, r"'a'.*'question', 'answer'"),
    (dict(learning_rate=-1.0), ValueError, "learning rate"),
]
# torch sees no GPU here. What it says depends on its build, and on the driver.
WRONG_VALUES.append((dict(device="cuda"), (AssertionError, RuntimeError), "CUDA|NVIDIA"))


@pytest.mark.parametrize("given, kind, words", WRONG_VALUES, ids=lambda x: str(x)[:40])
def test_wrong_value(tmp_path, given, kind, words):
    """The last line says what is wrong, and no run is made."""
    args = tiny_args(grpo, tmp_path, **given)
    with pytest.raises(kind) as caught:
        grpo.main(args)
    assert re.search(words, str(caught.value), re.DOTALL), caught.value
    assert not (tmp_path / "runs").exists()


def test_a_context_that_just_fits(tmp_path):
    grpo.check_args(tiny_args(grpo, tmp_path))
    grpo.load_config(tiny_args(grpo, tmp_path, max_new_tokens=256 - 64), SMALL_MODEL)


def test_every_script_refuses_what_would_train_something_else(script, tmp_path):
    """The numbers that scale or bound a gradient must be positive, whatever they're called in this script."""
    names = {field.name for field in dataclasses.fields(script.Args)}
    scales = {"temperature", "max_grad_norm", "clip_eps", "clip_eps_low", "clip_eps_high"}
    scales |= {"value_clip_eps", "gae_alpha"}
    for name in sorted(names & scales):
        args = tiny_args(script, tmp_path, **{name: 0.0})
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be positive"):
            script.check_args(args)
    for name in sorted(names & {"beta", "warmup_updates"}):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must not be negative"):
            script.check_args(tiny_args(script, tmp_path, **{name: -1}))
    if "max_calls" in names:
        with pytest.raises(ValueError, match="--max-calls must not be negative"):
            script.check_args(tiny_args(script, tmp_path, max_calls=-1))
    # 0 switches a correction or a cap off. A small one would cut off what needs no correction: where
    # trainer and sampler agree, every weight is 1.
    for name, too_small in (("rollout_correction", 0.9), ("sequence_cap", 1.0)):
        if name in names:
            script.check_args(tiny_args(script, tmp_path, **{name: 0.0}))
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be 0 or"):
                script.check_args(tiny_args(script, tmp_path, **{name: too_small}))
    for name, too_small in (("staleness", 0), ("lora_rank", 0), ("value_warmup_steps", -1)):
        if name in names:
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be at least"):
                script.check_args(tiny_args(script, tmp_path, **{name: too_small}))
    if "teacher_rate" in names:  # beyond 1 the teacher runs away
        with pytest.raises(ValueError, match="--teacher-rate must be from 0 to 1"):
            script.check_args(tiny_args(script, tmp_path, teacher_rate=1.1))
    with pytest.raises(ValueError, match="--num-minibatches"):
        script.check_args(tiny_args(script, tmp_path, num_minibatches=10**6))
    compares_samples = script.__name__ not in ("distill", "self_distill", "vapo")
    if compares_samples and script.BUNDLED.num_generations > 1:
        with pytest.raises(ValueError, match="--num-generations"):
            script.check_args(tiny_args(script, tmp_path, num_generations=1))
    script.check_args(tiny_args(script, tmp_path))


def test_a_temperature_that_vllm_would_replace(tmp_path):
    """Below 0.01 vLLM samples at 0.01, and only warns."""
    script = __import__("grpo_vllm")
    script.check_args(tiny_args(script, tmp_path, temperature=0.01))
    with pytest.raises(ValueError, match="--temperature must be at least 0.01"):
        script.check_args(tiny_args(script, tmp_path, temperature=0.009))


def test_the_mean_of_one_return_is_no_baseline(tmp_path):
    """All advantages would be 0."""
    script = __import__("reinforce_baseline")
    one = dict(num_prompts=1, num_generations=1, num_minibatches=1)
    with pytest.raises(ValueError, match="--baseline batch_mean needs two or more sequences"):
        script.check_args(tiny_args(script, tmp_path, **one))
    script.check_args(tiny_args(script, tmp_path, **one, baseline="moving_average"))
    script.check_args(tiny_args(script, tmp_path, **one | {"num_prompts": 2}))


def test_dapo_refuses_a_penalty_for_every_response(tmp_path):
    """Its default, 60 tokens, is longer than short responses: one token would lose 0.48."""
    script = __import__("dapo")
    for tokens in (-1, 32, 60):
        with pytest.raises(ValueError, match="--overlong-cache must be at least 0 and less than"):
            script.check_args(tiny_args(script, tmp_path, max_new_tokens=32, overlong_cache=tokens))
    script.check_args(tiny_args(script, tmp_path, max_new_tokens=32, overlong_cache=31))


# ---- the task
GOOD_TASK = "from utils.rewards import *\nREWARDS = [accuracy_reward]\nEXAMPLES = []\n"


def write_task(folder, text, name="my_task.py"):
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_every_script_refuses_two_rewards_of_one_name(script, tmp_path):
    """The scores are logged by name, so the second reward would replace the first."""
    text = GOOD_TASK + "REWARDS.append(lambda completions, **columns: [0.0])\n"
    task = write_task(tmp_path, f"{text}REWARDS[1].__name__ = 'accuracy_reward'\n")
    args = tiny_args(script, tmp_path, task=task)
    with pytest.raises(ValueError, match="my_task.py: two functions in REWARDS have the same name"):
        script.load_task(args)
    assert len(script.load_task(tiny_args(script, tmp_path)).REWARDS) == 2


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        (None, FileNotFoundError, "No such file or directory: .*my_task"),
        ("EXAMPLES = []", AttributeError, "'task' has no attribute 'REWARDS'"),
        ("REWARDS = []\nEXAMPLES = []", IndexError, "list index out of range"),
        (GOOD_TASK.partition("EXAMPLES")[0], AttributeError, "'task' has no attribute 'EXAMPLES'"),
        (f"{GOOD_TASK}EXAMPLES = ('1+2=', '3')", ValueError, "my_task: an example must be a pair"),
        ("REWARDS = [my_reward]", NameError, "name 'my_reward' is not defined"),
        ("from utils.rewards import no_reward", ImportError, "cannot import name 'no_reward'"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("def f(:", SyntaxError, r"my_task, line 1"),
    ],
)
def test_a_wrong_task(tmp_path, text, kind, line):
    """Python says what is wrong with it. The name of the file needs no ending."""
    task = str(tmp_path / "my_task")
    if text is not None:
        task = write_task(tmp_path, text, "my_task")
    with pytest.raises(kind, match=line):
        grpo.main(tiny_args(grpo, tmp_path, task=task))
    assert not (tmp_path / "runs").exists() or kind is IndexError


def test_a_task_of_two_files(tmp_path, monkeypatch):
    """It may import a file beside it, but not hide one of ours. Pickle and dataclasses find what it defines."""
    text = "from __future__ import annotations\nimport colorsys, dataclasses, pickle, my_half, utils.masking\n"
    text += "@dataclasses.dataclass\nclass Case:\n    x: int\nassert pickle.loads(pickle.dumps(Case(1))).x == 1\n"
    text += "def mine(completions, **columns):\n    return [my_half.HALF] * len(completions)\n"
    folder = tmp_path / "tasks"
    folder.mkdir()
    task = write_task(folder, f"{text}REWARDS, EXAMPLES = [mine], []\n")
    write_task(folder, "HALF = 0.5\n", "my_half.py")
    write_task(folder, "1 / 0\n", "colorsys.py")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # so that it's looked for
    monkeypatch.chdir(folder)
    args = tiny_args(grpo, tmp_path, task="my_task.py", run_name="a", num_steps=1)
    assert grpo.main(args)["rollout/mine"] == 0.5
    # The copy in the run's folder is the same task. A task of another path goes on, one of another content doesn't.
    saved = tmp_path / "runs" / "a" / "task.py"
    assert saved.read_bytes() == Path(task).read_bytes()
    grpo.main(dataclasses.replace(args, task=str(saved)))
    write_task(folder, f"{text}REWARDS, EXAMPLES = [mine], [('1+2=', '3')]\n")
    refused(args, tmp_path / "runs" / "a", "task.py")


# ---- models
def copy_model(folder, **config):
    shutil.copytree(SMALL_MODEL, folder)
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_weights_that_are_not_in_the_files(tmp_path):
    """from_pretrained fills missing weights with random numbers."""
    model = copy_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    gone = next(name for name in weights if "mlp" in name)
    weights.pop(gone)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"no weights for {re.escape(gone)}"):
        grpo.main(tiny_args(grpo, tmp_path, model=str(model)))


def test_a_sliding_window_is_no_limit(tmp_path):
    """A prompt and a response may be longer than the window. They must fit into the context."""
    fields = dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=20)
    model = str(copy_model(tmp_path / "model", **fields, max_position_embeddings=90))
    grpo.main(tiny_args(grpo, tmp_path, model=model, max_new_tokens=90 - 64, run_name="a"))
    with pytest.raises(ValueError, match="90 tokens of the context"):
        grpo.load_config(tiny_args(grpo, tmp_path, max_new_tokens=90 - 63), model)


@pytest.mark.scripts(
    "grpo", "grpo_lora", "grpo_tools", "grpo_offpolicy", "ppo_rlhf", "vapo", "grpo_vllm"
)
def test_sampler_and_trainer_that_disagree_stop_the_run(script, tmp_path, monkeypatch):
    """Such a run would train on wrong probabilities. After step 1 a gap is only logged, in a resumed run, too."""
    skip_without_engine(script)
    exact = script.compute_logprobs

    def shifted(model, rollout, temperature, *more):
        return exact(model, rollout, 1.5 * temperature, *more)

    args = tiny_args(script, tmp_path, run_name="a")
    with monkeypatch.context() as patch:
        patch.setattr(script, "compute_logprobs", shifted)
        with pytest.raises(ValueError, match="differ by .* nats"):
            script.main(args)
    if script is grpo:
        args = tiny_args(grpo, tmp_path, run_name="b")
        save_checkpoint = grpo.save_checkpoint

        def save_and_stop(*given):
            save_checkpoint(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(grpo, "save_checkpoint", save_and_stop)
            with pytest.raises(KeyboardInterrupt):
                grpo.main(args)
        monkeypatch.setattr(grpo, "compute_logprobs", shifted)
        assert grpo.main(args)["rollout/logprob_gap"] > 0.01


# ---- rewards
def too_few(completions, **columns):
    return [1.0] * (len(completions) - 1)


def one_in_a_list(completions, **columns):
    return [1.0]


def one_too_many(completions, **columns):
    return [1.0] * (len(completions) + 1)


def words(completions, **columns):
    return ["good"] * len(completions)


def none_at_the_end(completions, **columns):
    return [1.0] * (len(completions) - 1) + [None]


@pytest.mark.scripts("grpo", "grpo_offpolicy")
def test_a_sampler_that_overflows_later_ends_the_run(script, tmp_path, monkeypatch):
    """In float16 this may happen in any step, and all tokens would be the same from then on."""
    sample_responses = script.sample_responses

    def overflow(args, model, problems, num_samples, temperature, eos_ids):
        rollout = sample_responses(args, model, problems, num_samples, temperature, eos_ids)
        if len(problems) == args.num_prompts and next(steps) == 2:
            rollout.sampled_logprobs[1, 0] = math.nan
        return rollout

    steps = itertools.count(1)
    monkeypatch.setattr(script, "sample_responses", overflow)
    args = tiny_args(script, tmp_path, num_prompts=2, eval_size=3, num_steps=3, run_name="run")
    with pytest.raises(ValueError, match="sampling and training differ by nan nats a token"):
        script.main(args)
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_reward_model_that_overflows_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "compute_scores", lambda model, batch: torch.tensor(math.inf))
    with pytest.raises(ValueError, match="--reward-model: a score isn't finite; float16 may need"):
        ppo_rlhf.main(tiny_args(ppo_rlhf, tmp_path))


def nan_at_the_end(completions, **columns):
    return [1.0] * (len(completions) - 1) + [float("nan")]


def infinite_at_first(completions, **columns):
    return [-float("inf")] + [1.0] * (len(completions) - 1)


NUMBERS = "must return a number for each completion:"


@pytest.mark.parametrize(
    "reward, kind, line",
    [
        (too_few, ValueError, rf"too_few {NUMBERS} \[1.0\]"),
        (one_in_a_list, ValueError, rf"one_in_a_list {NUMBERS} \[1.0\]"),
        (one_too_many, ValueError, rf"one_too_many {NUMBERS} \[1.0, 1.0, 1.0\]"),
        (nan_at_the_end, ValueError, rf"nan_at_the_end {NUMBERS} \[1.0, nan\]"),
        (infinite_at_first, ValueError, rf"infinite_at_first {NUMBERS} \[-inf, 1.0\]"),
        (words, ValueError, "could not convert string to float"),
        (none_at_the_end, TypeError, "float.*NoneType"),
    ],
)
def test_wrong_reward(tmp_path, monkeypatch, reward, kind, line):
    """A score that isn't one number per completion must not be broadcast. One NaN would make a whole group NaN."""
    use_task(monkeypatch, grpo, [grpo.accuracy_reward, reward])
    with pytest.raises(kind, match=line):
        grpo.main(tiny_args(grpo, tmp_path))
    metrics = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert [path.read_text() for path in metrics] == [""]


# ---- data
def test_gold_answers_that_are_no_numbers_are_skipped_and_counted(tmp_path, capsys):
    """true, false and None are texts without a number. As an empty text they would be right for any reward of text."""
    answers = ["4", "True", "False", None, "twelve", "", "1.5", "#### 7", "10,000"] * 3
    lines = [{"question": f"{i}+2=", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    args = tiny_args(grpo, tmp_path, dataset=str(tmp_path / "data.jsonl"), max_prompt_tokens=20)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL_MODEL)
    train, test = grpo.load_data(args, default_task(grpo), tokenizer)
    found = {problem["columns"]["answer"] for problem in train + test}
    assert found == {"4", "1.5", "#### 7", "10,000"}
    line = "train data: 12 problems, 15 skipped: without a readable answer\n"
    assert line in capsys.readouterr().out


def test_a_split_that_is_not_used_may_lack_a_column(tmp_path, monkeypatch):
    """Such as questions without answers, on the hub."""
    rows = {"train": {"question": "2+2=", "answer": "4"}, "unlabelled": {"question": "3+3="}}
    splits = {name: datasets.Dataset.from_list([row]) for name, row in rows.items()}
    splits = datasets.DatasetDict(splits | {"test": splits["train"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    args = tiny_args(grpo, tmp_path, max_prompt_tokens=20, dataset="on/hub")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL_MODEL)
    train, test = grpo.load_data(args, default_task(grpo), tokenizer)
    assert [problem["prompt"] for problem in train + test] == ["2+2=", "2+2="]
    splits["test"] = splits["unlabelled"]
    with pytest.raises(ValueError, match="'answer'"):
        grpo.load_data(args, default_task(grpo), tokenizer)


def test_no_problem_is_left(tmp_path, capsys):
    """The error has the counts, and the line before it names the split."""
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        for name in ("train", "test"):
            row = {"question": "2+2=", "answer": "four" if name == split else "4"}
            (folder / f"{name}.jsonl").write_text(json.dumps(row) * 3)
        counts = ", 3 skipped: without a readable answer"
        with pytest.raises(ValueError, match=f"--dataset {folder}: no problem is left{counts}$"):
            grpo.main(tiny_args(grpo, tmp_path, dataset=str(folder)))
        assert capsys.readouterr().out.endswith(f"{split} data: 0 problems{counts}\n")
    assert not (tmp_path / "runs").exists()


# ---- runs
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    grpo.main(tiny_args(grpo, folder, run_name="a"))
    return folder


def test_two_runs_of_the_same_second(tmp_path, monkeypatch):
    """Without --run-name, they have the same name. The second run fails."""
    monkeypatch.setattr(grpo.time, "strftime", lambda form: "now")
    args = tiny_args(grpo, tmp_path)
    folder = grpo.name_run(args)
    assert folder == tmp_path / "runs" / "grpo__policy__1__now"
    grpo.open_run(args, default_task(grpo), folder, [])
    before = contents(tmp_path)
    with pytest.raises(FileExistsError):
        grpo.main(args)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_refuses_other_flags(finished, tmp_path, has_checkpoint):
    """They are neither ignored in silence, nor do they change a run in its middle."""
    run = shutil.copytree(finished / "runs" / "a", tmp_path / "runs" / "a")
    if not has_checkpoint:
        (run / "checkpoint.pt").unlink()
    before = contents(tmp_path)
    args = tiny_args(grpo, tmp_path, run_name="a", num_steps=9, track=True, beta=0.0)
    line = f"{run} began with another track, num_steps, beta; repeat its command to go on with it"
    line += " (its folder has its flags and code), or choose another --run-name"
    with pytest.raises(ValueError, match=re.escape(line)):
        grpo.main(args)
    assert contents(tmp_path) == before


def test_everything_is_compared(tmp_path):
    """All flags, rewards, code and data. Only folders, the versions and the machine may change."""
    args = tiny_args(grpo, tmp_path, run_name="a")
    run = grpo.describe_run(args, default_task(grpo), [])
    code = set(grpo.code_files(args))
    assert {"grpo.py", "task.py", "utils/rewards.py"} <= code
    rest = {"rewards", "data", "precision", "versions", "device_name"}
    assert run.keys() == vars(args).keys() | code | rest
    # Whatever --dtype was: the precision must be the same.
    free = ("runs_dir", "run_name", "task", "dtype", "versions", "device_name")
    names = [name for name in run if name not in free]
    for changed in (names[:1], names[1:4], names[::2], ["rewards"], ["grpo.py", "data"], names):
        saved = {name: "another" if name in changed else x for name, x in run.items()}
        saved |= dict(runs_dir="elsewhere", run_name=None, versions="others", device_name="other")
        saved |= dict(dtype="float16", task="elsewhere.py")
        (tmp_path / "args.json").write_text(json.dumps(saved))
        with pytest.raises(ValueError) as caught:
            grpo.check_same_run(args, tmp_path, run)
        (found,) = re.findall(r" began with another (.*); repeat its command", str(caught.value))
        assert found.split(", ") == changed
    (tmp_path / "args.json").write_text(json.dumps(run | {"versions": "others"}))
    grpo.check_same_run(args, tmp_path, run)


def test_a_run_without_a_name_goes_on_under_the_name_of_its_folder(tmp_path, capsys):
    grpo.main(tiny_args(grpo, tmp_path))
    (folder,) = (tmp_path / "runs").iterdir()
    before = contents(folder)
    capsys.readouterr()
    grpo.main(tiny_args(grpo, tmp_path, run_name=folder.name))
    assert f"{folder} goes on after 2 of 2 steps" in capsys.readouterr().out
    flags = json.loads(before.pop(folder / "args.json")) | {"run_name": folder.name}
    assert contents(folder) == before | {folder / "args.json": json.dumps(flags, indent=2).encode()}


def refused(args, run, changed):
    """The run's command ends in the error that names what has changed, and all files stay as they are."""
    before = contents(run)
    line = f"{run} began with another {changed}; repeat its command to go on with it"
    with pytest.raises(ValueError, match=line):
        grpo.main(args)
    assert contents(run) == before


# What to change in a file of the code, and what is refused then. A comment may not matter, but nobody can tell.
CHANGES = {
    "the strict reward": ("utils/rewards.py", "number == gold)", "number != gold)"),
    "a file that no reward reads": ("utils/masking.py", "import torch", "import torch  # so"),
    "the loss": ("grpo.py", "token_loss = -surrogate", "token_loss = surrogate"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_of_other_code_is_refused(finished, tmp_path, monkeypatch, change):
    """Of the script or of utils: the run began with another loss or other rewards."""
    run = shutil.copytree(finished / "runs" / "a", tmp_path / "runs" / "a")
    code = tmp_path / "code"
    shutil.copytree(ROOT / "utils", code / "utils")
    shutil.copy(ROOT / "grpo.py", code)
    monkeypatch.setattr(grpo, "SCRIPT", code / "grpo.py")
    args = tiny_args(grpo, tmp_path, run_name="a")
    grpo.main(args)  # the same code in another folder
    name, old, new = CHANGES[change]
    text = (code / name).read_text(encoding="utf-8")
    assert old in text
    (code / name).write_text(text.replace(old, new), encoding="utf-8")
    refused(args, run, name)
    # The rewards of a task have names, too.
    use_task(monkeypatch, grpo, [grpo.lenient_accuracy_reward])
    refused(args, run, f"rewards, {name}")


def test_a_run_of_another_script_is_refused(tmp_path):
    """Its checkpoint has other parts, or was trained by another loss."""
    script = __import__("dr_grpo")
    script.main(tiny_args(script, tmp_path, run_name="a", num_steps=1))
    run = tmp_path / "runs" / "a"
    args = tiny_args(grpo, tmp_path, run_name="a", num_steps=1, beta=script.BUNDLED.beta)
    refused(args, run, "grpo.py")


@pytest.mark.parametrize(
    "split, column", [("train", "answer"), ("train", "level"), ("test", "level")]
)
def test_a_run_of_other_data_is_refused(tmp_path, split, column):
    """Also if the change is in a row that no step has drawn yet, or in a column that only rewards read."""
    data = tmp_path / "data"
    data.mkdir()
    for name, digit in (("train", 1), ("test", 2)):
        rows = [{"question": f"{i}+{digit}=", "answer": i, "level": 1} for i in range(9)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = tiny_args(grpo, tmp_path, run_name="a", dataset=str(data), eval_size=9)
    grpo.main(args)
    path = data / f"{split}.jsonl"
    *rows, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows, json.dumps(json.loads(last) | {column: 3})]))
    refused(args, tmp_path / "runs" / "a", "data")


def test_a_template_that_writes_the_time(tmp_path, capsys):
    """Such a run goes on, although its prompts differ from those with which it began."""
    model = shutil.copytree(SMALL_MODEL, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    now = "{{ strftime_now('%S.%f') }}"
    tokenizer.chat_template = now + "{% for m in messages %}:{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    given = dict(model=str(model), run_name="a", lr_schedule="constant_with_warmup")
    prompts = []
    for num_steps in (2, 3):
        grpo.main(tiny_args(grpo, tmp_path, **given, num_steps=num_steps))
        (line,) = re.findall(r"^first prompt: .*$", capsys.readouterr().out, re.MULTILINE)
        prompts.append(line)
    assert prompts[0] != prompts[1]
    metrics = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 2, 3]


@pytest.mark.parametrize("left", [[], ["utils/rewards.py", "grpo.py", "args.tmp"]])
def test_a_folder_without_flags_is_used_again(finished, tmp_path, left):
    """A command that was killed at its start leaves such a folder. The copies in it may be cut."""
    run = tmp_path / "runs" / "a"
    (run / "utils").mkdir(parents=True)
    for name in left:
        (run / name).write_text("cut")
    grpo.main(tiny_args(grpo, tmp_path, run_name="a"))
    expected = finished / "runs" / "a"
    names = {path.relative_to(expected) for path in contents(expected)}
    assert {path.relative_to(run) for path in contents(run)} == names
    for name in ("grpo.py", "utils/rewards.py", "samples.jsonl"):
        assert (run / name).read_bytes() == (expected / name).read_bytes()


def run_own_copy(run, flags, log):
    """The body of a forked process: the run's own copy of the script, as `python runs/a/grpo.py FLAGS` starts it."""
    write_to(os.open(log, os.O_WRONLY | os.O_CREAT))
    for name in [x for x in sys.modules if x.split(".")[0] in ("grpo", "utils")]:
        del sys.modules[name]
    sys.path = [str(run), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.argv = [str(run / "grpo.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert sys.modules["utils.rewards"].__file__ == str(run / "utils" / "rewards.py")


def test_the_own_copy_of_a_run_goes_on_with_it(finished, tmp_path):
    """The copy has all that it needs but model and data, and counts as the same code."""
    run = shutil.copytree(finished / "runs" / "a", tmp_path / "runs" / "a")
    flags = []
    for name, value in vars(tiny_args(grpo, tmp_path, run_name="a")).items():
        flag = name.replace("_", "-")
        is_switch = isinstance(value, bool)
        flags += [f"--{'' if value else 'no-'}{flag}"] if is_switch else [f"--{flag}", str(value)]
    log = tmp_path / "log"
    process = FORK.Process(target=run_own_copy, args=(run, flags, str(log)), daemon=True)
    process.start()
    assert ended(process) == 0, log.read_text()
    assert f"{run} goes on after 2 of 2 steps" in log.read_text()


@pytest.mark.parametrize("content", [b"", b"PK"], ids=["empty", "cut"])
def test_a_checkpoint_that_cannot_be_read(tmp_path, content):
    """All files of its run stay as they are."""
    args = tiny_args(grpo, tmp_path, run_name="a")
    grpo.main(args)
    run = tmp_path / "runs" / "a"
    (run / "checkpoint.pt").write_bytes(content)
    before = contents(run)
    with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
        grpo.main(args)
    assert contents(run) == before


class Attack:
    def __reduce__(self):
        return (open, ("attacked", "w"))


def test_a_checkpoint_runs_no_code(finished, tmp_path, monkeypatch):
    run = shutil.copytree(finished / "runs" / "a", tmp_path / "runs" / "a")
    torch.save({"args": Attack()}, run / "checkpoint.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="weights_only|Weights only"):
        grpo.main(tiny_args(grpo, tmp_path, run_name="a"))
    assert not (tmp_path / "attacked").exists()


# ---- the command line
@pytest.mark.parametrize("flags", [[], ["--model", "x"], ["--model=x"]])
def test_help_shows_the_values_that_will_be_used(flags, monkeypatch, capsys):
    """Without --model the bundled run's, with it those for any model. It says which."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", *flags, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "grpo.py"), run_name="__main__")
    text = capsys.readouterr().out
    args = grpo.Args() if flags else grpo.BUNDLED
    assert ("These are the defaults with --model." in text) == bool(flags)
    assert ("For those of a model: --model NAME --help" in text) == (not flags)
    for field in ("max_new_tokens", "num_steps", "beta", "temperature"):
        flag = f"--{field.replace('_', '-')}"
        line = next(x for x in text.splitlines() if f" {flag} " in x)
        below = text[text.index(line) :].split("--", 2)[1]
        assert f"(default: {getattr(args, field)})" in below, field
