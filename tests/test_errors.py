"""Bad input gets one line that names the flag, the value and the mend: status 2, no traceback, nothing written.

Data that is a little unusual (another format, other columns, rows that must be skipped) is read all the same.
"""

import csv
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import ROOT

NOWHERE = "http://127.0.0.1:9"  # no one listens there: whoever asks the hub is refused at once
ROWS = [json.loads(line) for line in (ROOT / "assets" / "addition" / "train.jsonl").open(encoding="utf-8")][:40]
SMALL = dict(num_steps=1, num_prompts=2, num_generations=2, max_new_tokens=8, eval_size=4, warmup_updates=0)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    """Nothing here waits for a network, switches off the hub for other tests, or fills the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", huggingface_hub.constants.HF_HUB_OFFLINE)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", datasets.config.HF_HUB_OFFLINE)


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_args(script, **given):
    """Args of a run of one small step; skips the test if this script has no such field."""
    known = {field.name for field in dataclasses.fields(script.Args) if field.init}
    if not set(given) <= known:
        pytest.skip(f"{script.__name__} has no {', '.join(set(given) - known)}")
    return script.Args(
        **{name: value for name, value in SMALL.items() if name in known and "resume" not in given} | given
    )


def snapshot(folder) -> dict:
    return {str(path): path.is_file() and hashlib.md5(path.read_bytes()).digest() for path in folder.rglob("*")}


@pytest.fixture
def refuse(script, tmp_path, monkeypatch, capsys):
    """Run main with these fields: it must end with status 2 and one line that holds these words, and write nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*words, **given):
        if "resume" not in given:
            given = {"runs_dir": str(tmp_path / "runs"), **given}
        args, before = make_args(script, **given), snapshot(tmp_path)
        with pytest.raises(SystemExit) as stop:
            script.main(args)
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1, error
        assert [word for word in words if word not in error] == [], error
        assert snapshot(tmp_path) == before
        return error

    return call


# ---- arguments that contradict themselves: the culprit is the first field, and its flag and value are named

NAN, INF = float("nan"), float("inf")
ARGUMENTS = [
    (dict(seed=-1), "must be"),
    (dict(seed=10**15), "must be"),  # the order of the data is drawn from a multiple of it, of 64 bits
    (dict(num_prompts=0), "must be"),
    (dict(num_prompts=-3), "must be"),
    (dict(num_generations=0), "must be"),
    (dict(num_generations=1), "must be"),  # where the other samples of the prompt are the baseline
    (dict(max_new_tokens=0), "must be"),
    (dict(max_prompt_tokens=0), "must be"),
    (dict(eval_size=0), "must be"),
    (dict(eval_every=-1), "must be"),
    (dict(save_every=-1), "must be"),
    (dict(num_steps=0), "must be"),
    (dict(num_iterations=0), "must be"),
    (dict(num_minibatches=0), "must be"),
    (dict(num_minibatches=7), "must divide"),
    (dict(micro_batch_tokens=0), "must be"),
    (dict(warmup_updates=-1), "must be"),
    (dict(warmup_updates=10**6), "must not exceed"),
    *((dict(learning_rate=value), "must be") for value in (-1e-5, 0.0, NAN, INF)),
    *((dict(temperature=value), "must be") for value in (-1.0, 0.0, NAN, INF)),
    *((dict(clip_eps=value), "must be") for value in (-0.2, 0.0, 1.0, 1.5, NAN, INF)),
    *((dict(max_grad_norm=value), "must be") for value in (-1.0, 0.0, NAN, INF)),
    *((dict(beta=value), "must be") for value in (-1.0, NAN, INF)),
    *((dict(clip_eps_low=value), "must be") for value in (-0.2, 0.0, 1.0, NAN)),
    *((dict(clip_eps_high=value), "must be") for value in (-0.2, 0.0, NAN, INF)),
    *((dict(baseline_decay=value), "must be") for value in (-0.1, 1.0, NAN)),
    (dict(max_resample=-1), "must be"),
    (dict(overlong_cache=0), "must be"),
    *((dict(value_learning_rate=value), "must be") for value in (-1e-5, 0.0, NAN, INF)),
    *((dict(value_clip_eps=value), "must be") for value in (-0.2, 0.0, NAN)),
    *((dict(gamma=value), "must be") for value in (-0.1, 1.1, NAN)),
    *((dict(gae_lambda=value), "must be") for value in (-0.1, 1.1, NAN)),
    *((dict(kl_target=value), "must be") for value in (-1.0, 0.0, NAN)),
    (dict(kl_horizon=0), "must be"),
    *((dict(vf_coef=value), "must be") for value in (-1.0, NAN)),
    *((dict(missing_eos_penalty=value), "must be") for value in (-1.0, NAN)),
    (dict(reward_model="./nowhere"), "check"),
    (dict(max_prompt_tokens=200, max_new_tokens=200), "lower"),  # the bundled model has a context of 256
    (dict(max_new_tokens=300), "lower"),
    (dict(run_name="a/b"), "--runs-dir"),
    (dict(run_name=".."), "--runs-dir"),
    (dict(run_name=""), "must be"),
    (dict(model="./nowhere"), "give"),
    (dict(model="a/b/c"), "give"),
    (dict(model=""), "give"),
]


@pytest.mark.parametrize("given, mend", ARGUMENTS, ids=[str(given) for given, _ in ARGUMENTS])
def test_argument(script, refuse, given, mend):
    name, value = next(iter(given.items()))
    if name == "num_generations" and value == 1 and script.Args().num_generations == 1:
        pytest.skip("one sample per prompt is the default of this script")
    error = refuse(mend, **given)
    assert re.search(rf"--{name.replace('_', '-')} '?{re.escape(str(value))}(?!\w)", error) or value == "", error
    assert f"--{name.replace('_', '-')} " in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda(refuse):
    refuse("--device cuda", "--device cpu", device="cuda")


def test_run_name_is_taken(refuse, tmp_path):
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    refuse("--run-name taken", "--resume", run_name="taken")


def test_runs_dir_cannot_be_made(refuse, tmp_path):
    (tmp_path / "file").write_text("")
    refuse(f"--runs-dir {tmp_path / 'file'}", "choose", runs_dir=str(tmp_path / "file"))


# ---- models


@pytest.fixture
def copy_adder(tmp_path):
    """The bundled model in a folder of its own, to be spoiled; without weights, as most refusals come before them."""

    def call(weights=False):
        ignore = None if weights else shutil.ignore_patterns("*.safetensors")
        return shutil.copytree(ROOT / "assets" / "adder", tmp_path / "model", ignore=ignore)

    return call


def edit_json(path, **changes):
    """Set these keys, or drop those whose new value is None."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")


def test_folder_without_config(refuse, tmp_path):
    (tmp_path / "model").mkdir()
    refuse("--model", str(tmp_path / "model"), "config.json", "give", model=str(tmp_path / "model"))


@pytest.mark.shared_text
@pytest.mark.parametrize("content", ["garbage", "", "{}", "[1]", '{"model_type": "nonesuch"}'])
def test_garbage_for_a_config(refuse, copy_adder, content):
    folder = copy_adder()
    (folder / "config.json").write_text(content)
    refuse(f"--model {folder}", "check", model=str(folder))


@pytest.mark.shared_text
def test_tokenizer_without_eos(refuse, copy_adder):
    folder = copy_adder()
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = [token for token in tokenizer["added_tokens"] if token["content"] != "</s>"]
    edit_json(folder / "tokenizer.json", added_tokens=added)
    refuse(f"--model {folder}", "EOS", "set eos_token", model=str(folder))


@pytest.mark.shared_text
def test_no_tokenizer(refuse, copy_adder):
    folder = copy_adder()
    (folder / "tokenizer.json").unlink()
    refuse(f"--model {folder}", "check", model=str(folder))


@pytest.mark.shared_text
@pytest.mark.parametrize("damage", ["missing", "truncated", "incomplete", "another model's"])
def test_weights(refuse, copy_adder, tmp_path, damage):
    """Weights that are not in the file must not be made up: from_pretrained fills them with random numbers."""
    folder = copy_adder(weights=True)
    path = folder / "model.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "incomplete":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        state = {name: value for name, value in model.state_dict().items() if ".layers.2." not in name}
        model.save_pretrained(folder, state_dict=state)
    else:
        edit_json(folder / "config.json", hidden_size=64)
    data = tmp_path / "rows.jsonl"
    data.write_text(jsonl(ROWS))
    refuse(f"--model {folder}", model=str(folder), dataset=str(data))


@pytest.mark.shared_text
def test_tokenizer_of_a_larger_model(refuse, copy_adder, tmp_path):
    """A token id beyond the embedding is an IndexError on a CPU and an assert inside a kernel on a GPU."""
    folder = copy_adder(weights=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["+1", "+2"])
    tokenizer.save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    refuse("--model", str(folder), model=str(folder), dataset=str(tmp_path / "rows.jsonl"))


# ---- data

GOOD = '{"question": "1+2=", "answer": "3"}\n'
DATA = [  # file name, its text or bytes, further fields, what the line must say besides --dataset and the file's path
    ("empty.jsonl", "", {}, ["empty"]),
    ("blank.jsonl", "\n\n", {}, ["empty"]),
    ("empty.json", "[]", {}, ["empty"]),
    ("empty.csv", "", {}, ["empty"]),
    ("header.csv", "question,answer\n", {}, ["empty"]),
    ("empty.parquet", "", {}, ["cannot be read"]),
    ("broken.parquet", "PAR1 and no more", {}, ["cannot be read"]),
    ("text.json", "not JSON", {}, ["cannot be read"]),
    ("cut.jsonl", GOOD * 2 + '{"question": "1+', {}, ["line 3 is not JSON"]),
    ("middle.jsonl", GOOD + "\n" + "nonsense\n" + GOOD, {}, ["line 3 is not JSON"]),
    ("record.json", GOOD, {}, ["list of records"]),
    ("strings.json", '["1+2=", "3"]', {}, ["list of records"]),
    ("lists.jsonl", '["1+2=", "3"]\n', {}, ["list of records"]),
    ("latin1.jsonl", GOOD.encode() + '{"question": "é1+2=", "answer": "3"}\n'.encode("latin-1"), {}, ["utf-8"]),
    ("latin1.csv", "question,answer\né1+2=,3\n".encode("latin-1"), {}, ["utf-8"]),
    ("null_question.jsonl", GOOD + '{"question": null, "answer": "3"}\n' + GOOD * 9, {}, ["row 2", "question"]),
    ("blank_question.jsonl", GOOD * 2 + '{"question": " ", "answer": "3"}\n' + GOOD * 9, {}, ["row 3", "question"]),
    ("no_number.jsonl", '{"question": "1+2=", "answer": "three"}\n' * 20, {}, ["number in answer"]),
    ("null_answer.jsonl", '{"question": "1+2=", "answer": null}\n' * 20, {}, ["number in answer"]),
    ("one_row.jsonl", GOOD, {}, ["train"]),  # it is held out, and none is left to train on
    ("too_long.jsonl", GOOD * 20, dict(max_prompt_tokens=2), ["--max-prompt-tokens 2"]),
    ("notes.txt", GOOD, {}, [".jsonl"]),
]


@pytest.mark.shared_text
@pytest.mark.parametrize("name, content, given, words", DATA, ids=[case[0] for case in DATA])
def test_dataset(refuse, tmp_path, name, content, given, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(f"--dataset {path}", *words, dataset=str(path), **given)


COLUMNS = [
    ('{"prompt": "1+2=", "answer": "3"}\n' * 2, {}, ["--question-column question", "prompt, answer"]),
    ('{"question": "1+2=", "solution": "3"}\n' * 2, {}, ["--answer-column answer", "question, solution"]),
    (GOOD * 2, dict(question_column="q"), ["--question-column q", "question, answer"]),
    (GOOD * 2, dict(answer_column="a"), ["--answer-column a", "question, answer"]),
    (GOOD * 5 + '{"question": "1+2="}\n' + GOOD * 20, {}, ["--answer-column answer"]),
]


@pytest.mark.shared_text
@pytest.mark.parametrize("content, given, words", COLUMNS)
def test_missing_column(refuse, tmp_path, content, given, words):
    (tmp_path / "rows.jsonl").write_text(content)
    refuse(*words, dataset=str(tmp_path / "rows.jsonl"), **given)


@pytest.mark.shared_text
@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.csv", "nowhere.parquet", "./nowhere", "/nowhere/at/all"])
def test_missing_dataset(refuse, name):
    refuse(f"--dataset {name}", "no such file", dataset=name)


@pytest.mark.shared_text
def test_folder_without_data(refuse, tmp_path):
    (tmp_path / "data").mkdir()
    refuse("--dataset", str(tmp_path / "data"), "train", dataset=str(tmp_path / "data"))


@pytest.mark.shared_text
@pytest.mark.parametrize("content", ["", "nonsense", '{"question": " ", "answer": "3"}\n', GOOD.replace("3", "three")])
def test_eval_dataset(refuse, tmp_path, content):
    """What is wrong with the held-out problems is not blamed on --dataset."""
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    path = tmp_path / "held_out.jsonl"
    path.write_text(content)
    refuse(f"--eval-dataset {path}", dataset=str(tmp_path / "rows.jsonl"), eval_dataset=str(path))


# ---- resume


@pytest.fixture(scope="module")
def one_step_run(tmp_path_factory):
    """The folder of a finished run of one step, made once for each script."""
    runs = {}

    def call(script):
        if script not in runs:
            folder = tmp_path_factory.mktemp("run")
            (folder / "rows.jsonl").write_text(jsonl(ROWS))
            script.main(make_args(script, runs_dir=str(folder), run_name="done", dataset=str(folder / "rows.jsonl")))
            runs[script] = folder / "done"
        return runs[script]

    return call


@pytest.fixture
def spoiled_run(script, one_step_run, tmp_path, capsys):
    """A copy of that run, and the path of its checkpoint, to be spoiled."""
    folder = shutil.copytree(one_step_run(script), tmp_path / "done", ignore=shutil.ignore_patterns("model"))
    capsys.readouterr()
    return folder, folder / "checkpoint" / "state.pt"


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_resume_without_checkpoint(refuse, tmp_path, name):
    refuse(f"--resume {tmp_path / name}", "state.pt", "give", resume=str(tmp_path / name))


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:-100], lambda b: b"garbage", lambda b: b""]
)
def test_resume_damaged(refuse, spoiled_run, damage):
    folder, path = spoiled_run
    path.write_bytes(damage(path.read_bytes()))
    refuse(f"--resume {folder}", "damaged", resume=str(folder))


class Unsafe:  # a pickle that runs code when it is read; what it makes in the working directory would be noticed
    def __reduce__(self):
        return os.mkdir, ("made",)


FOREIGN = ["tensor", "code", "weights", "script", "script and args"]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_resume_foreign(refuse, spoiled_run, script, foreign):
    """What another program has saved, or an early version of the script, with some of the keys."""
    folder, path = spoiled_run
    state = torch.load(path, weights_only=True)
    contents = [torch.zeros(3), Unsafe(), state["model"], {"script": state["script"]}]
    contents += [{"script": state["script"], "args": state["args"]}]
    torch.save(contents[FOREIGN.index(foreign)], path)
    refuse(f"--resume {folder}", "not one of ours", resume=str(folder))


def test_resume_of_another_script(refuse, spoiled_run):
    folder, path = spoiled_run
    torch.save(torch.load(path, weights_only=True) | {"script": "another.py"}, path)
    refuse(f"--resume {folder}", "another.py", resume=str(folder))


@pytest.mark.parametrize("given", [dict(seed=2), dict(num_steps=7), dict(learning_rate=0.5), dict(save_every=9)])
def test_resume_with_other_arguments(refuse, spoiled_run, given):
    folder, path = spoiled_run
    [(name, value)] = given.items()
    saved = torch.load(path, weights_only=True)["args"][name]
    refuse(f"--{name.replace('_', '-')} {value}", f"has {saved}", "leave it out", resume=str(folder), **given)


# ---- from the command line


def run_script(script, tmp_path, *flags):
    """Run the script in a folder and a process of its own, with no hub in reach, and return how it ended."""
    hub = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hub}
    environment |= {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path / "hub"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / f"{script.__name__}.py"), "--runs-dir", str(tmp_path / "runs"), *flags]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()
    return ended


@pytest.mark.shared_text
@pytest.mark.parametrize("flag, name", [("--model", "no-such-model"), ("--dataset", "nobody/nothing")])
def test_hub_out_of_reach(script, tmp_path, flag, name):
    """One line, soon: the hub libraries alone would print their retries for a minute."""
    error = run_script(script, tmp_path, flag, name).stderr
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert flag in error and name in error


@pytest.mark.shared_text
def test_hub_out_of_reach_for_the_held_out_problems(script, tmp_path):
    """Everything but these is on the disk, and still the hub must be found to be out of reach."""
    error = run_script(script, tmp_path, "--eval-dataset", "nobody/nothing").stderr
    assert error.startswith("error: --eval-dataset nobody/nothing") and error.count("\n") == 1, error


@pytest.mark.shared_text
@pytest.mark.parametrize("flags", [("--learning-rate", "abc"), ("--no-such-flag",)])
def test_command_line(script, tmp_path, flags):
    error = run_script(script, tmp_path, *flags).stderr
    assert all(word in error for word in flags), error


# ---- what is unusual but good


@pytest.fixture
def load(script, tmp_path):
    """load_data of a data set in tmp_path, as lists of (prompt, answer) for the training and the held-out examples."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "assets" / "adder")

    def call(name, **given):
        given = {"max_prompt_tokens": 200, "eval_size": 500, **given}
        args = script.check_args(make_args(script, dataset=str(tmp_path / name), **given))
        return [[(e["prompt"], e["answer"]) for e in examples] for examples in script.load_data(args, tokenizer)]

    return call


def write(path, rows):
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else jsonl(rows), encoding="utf-8")


@pytest.mark.shared_text
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_formats(script, load, tmp_path, suffix):
    """All four formats give the same, with whatever the columns are called; the last tenth is held out."""
    examples = [(row["question"], row["answer"]) for row in ROWS]
    for question, answer in (("question", "answer"), ("q", "a")):
        path = tmp_path / f"{question}.{suffix}"
        rows = [{question: row["question"], answer: row["answer"]} for row in ROWS]
        write(path, rows)
        assert script.read_rows(make_args(script), str(path), "train", "--dataset") == rows
        assert load(path.name, question_column=question, answer_column=answer) == [examples[:36], examples[36:]]


AWKWARD = [
    {
        "question": 'Ann\u2028says\u2029"1,\x85 2"\nand: 1+2=',
        "answer": "a\x0b\x0c\x1c\n#### 3",
    },  # str.splitlines cuts these
    {"question": "  ünï — 漢字 🙂 1+2=\r\n\r\n", "answer": "3"},
    {"question": "'; \\n \\ {} %s 1+2=", "answer": "-1,234.5"},
]


@pytest.mark.shared_text
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_awkward_strings(script, tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    write(path, AWKWARD)
    if suffix == "jsonl":  # once more unescaped, with blank lines between and at the end
        path.write_text(
            "\n".join(json.dumps(r, ensure_ascii=False) + "\n" for r in AWKWARD) + "\n \n", encoding="utf-8"
        )
    assert script.read_rows(make_args(script), str(path), "train", "--dataset") == AWKWARD


@pytest.mark.shared_text
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_byte_order_mark(script, tmp_path, suffix):
    """Some editors and spreadsheets begin a UTF-8 file with one; it is neither JSON nor part of the first column."""
    path = tmp_path / f"rows.{suffix}"
    write(path, ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert script.read_rows(make_args(script), str(path), "train", "--dataset") == ROWS


@pytest.mark.shared_text
def test_crlf(script, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS).replace("\n", "\r\n").encode())
    assert script.read_rows(make_args(script), str(tmp_path / "rows.jsonl"), "train", "--dataset") == ROWS


@pytest.mark.shared_text
def test_numbers_are_read_as_text(load, tmp_path):
    rows = [{"question": 7, "answer": 7.5}, {"question": 0, "answer": 0}]
    (tmp_path / "rows.jsonl").write_text(jsonl(rows))
    assert load("rows.jsonl") == [[("7", "7.5")], [("0", "0")]]


@pytest.mark.shared_text
def test_held_out_problems(load, tmp_path):
    """The test file beside a train file, a folder's two files, another file that is named, or the last tenth."""
    examples = [(row["question"], row["answer"]) for row in ROWS]
    (tmp_path / "all.jsonl").write_text(jsonl(ROWS))
    assert load("all.jsonl") == [examples[:36], examples[36:]]
    assert load("all.jsonl", eval_size=3) == [examples[:36], examples[36:39]]

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(jsonl(ROWS[:30]))
    (tmp_path / "data" / "test.jsonl").write_text(jsonl(ROWS[30:35]))
    (tmp_path / "other.jsonl").write_text(jsonl(ROWS[35:]))
    for name in ("data", "data/train.jsonl"):
        assert load(name) == [examples[:30], examples[30:35]]
        assert load(name, eval_dataset=str(tmp_path / "other.jsonl")) == [examples[:30], examples[35:]]
    # The test file itself as training data must not be evaluated on.
    assert load("data/test.jsonl") == [examples[30:34], examples[34:35]]


@pytest.mark.shared_text
def test_skipped_rows_are_counted(script, tmp_path, capsys):
    """Rows without a number or with too long a prompt are counted and skipped, and the run goes on with the others."""
    bad = [{"question": "1+1=", "answer": "two"}, {"question": "2+2=", "answer": ""}]
    long = [{"question": "1+" * 20 + "1=", "answer": "21"}]
    (tmp_path / "train.jsonl").write_text(jsonl(bad[:1] + ROWS[:4] + long + bad[1:] + ROWS[4:6]))
    (tmp_path / "test.jsonl").write_text(jsonl(bad[:1] + ROWS[6:9]))
    given = dict(runs_dir=str(tmp_path / "runs"), run_name="run", dataset=str(tmp_path / "train.jsonl"))
    script.main(make_args(script, max_prompt_tokens=8, num_prompts=6, **given))
    out = capsys.readouterr().out
    assert re.search(r"train data: 6 problems.* 1 longer than --max-prompt-tokens 8, 2 without a number in answer", out)
    assert re.search(r"test data: 3 problems.* 0 longer than --max-prompt-tokens 8, 1 without a number in answer", out)
    samples = [json.loads(line) for line in (tmp_path / "runs" / "run" / "samples.jsonl").open(encoding="utf-8")]
    assert sorted(sample["prompt"] for sample in samples) == sorted(row["question"] for row in ROWS[:6])
