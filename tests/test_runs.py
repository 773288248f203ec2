"""A run as a whole: what it leaves behind, that it repeats, learns, and outlives kills, signals, full disks and NaNs.

A killed or interrupted run is a real process. A server that has imported everything once forks all of them, so that
each costs no more than its steps.
"""

import copy
import dataclasses
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

MANY_UPDATES = dict(num_iterations=2, num_minibatches=2, beta=0.05)  # where the script has these fields
SMALL = dict(num_prompts=4, num_generations=2, max_new_tokens=24, eval_size=8, num_steps=6, save_every=2, device="cpu")
SMALL |= dict(num_iterations=1, num_minibatches=1)
WAIT = 120  # seconds after which a process is taken to hang


def make_args(script, **given):
    """Args of a small run, without the fields that this script does not have."""
    known = {field.name for field in dataclasses.fields(script.Args) if field.init}
    given = given if "resume" in given else SMALL | given
    return script.Args(**{name: value for name, value in given.items() if name in known})


def updates_per_rollout(args) -> int:
    return getattr(args, "num_iterations", 1) * getattr(args, "num_minibatches", 1)


def refuse_constant(text):
    raise ValueError(f"{text} is not JSON")


def read_jsonl(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def read_checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint" / "state.pt", weights_only=True)


def without_times(records: list[dict]) -> list[dict]:
    return [{name: value for name, value in record.items() if not name.startswith("time/")} for record in records]


def assert_same(one, other) -> None:
    """Equal to the last bit, through all dicts, lists and tuples."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_same_runs(folder: Path, other: Path) -> None:
    """The same metrics (times aside), samples, checkpoint and model."""
    records = [without_times(read_jsonl(run / "metrics.jsonl")) for run in (folder, other)]
    assert [record["step"] for record in records[0]] == [record["step"] for record in records[1]]
    for one, two in zip(*records, strict=True):
        assert one == two
    assert (folder / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    states = [read_checkpoint(run) for run in (folder, other)]
    for state in states:
        for name in ("runs_dir", "run_name"):
            del state["args"][name]
    assert_same(*states)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (folder, other)]
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with so few problems that a run goes through them more than once."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 18), ("test", 8)):
        lines = (ROOT / "assets" / "addition" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]))
    return str(folder)


@pytest.fixture(autouse=True)
def undisturbed():
    """A run that ends early leaves its signal handlers behind; a limit on the size of files is taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def run(script, data, tmp_path):
    """Run main in this process, by default with one update per rollout, and return the run's folder."""

    def call(name="run", **given):
        script.main(make_args(script, **{"runs_dir": str(tmp_path), "run_name": name, "dataset": data, **given}))
        return tmp_path / name

    return call


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory, data):
    """For each script the folder of a run with several updates per rollout that nothing has disturbed."""
    runs = {}

    def call(script):
        if script not in runs:
            folder = tmp_path_factory.mktemp("finished")
            given = dict(runs_dir=str(folder), run_name="run", dataset=data, **MANY_UPDATES)
            assert script.main(make_args(script, **given)) == read_jsonl(folder / "run" / "metrics.jsonl")[-1]
            runs[script] = folder / "run"
        return runs[script]

    return call


@pytest.fixture
def finished(script, finished_runs):
    return finished_runs(script)


# ---- what a run leaves behind


def test_files(script, finished):
    expected = {"args.json", "versions.json", f"{script.__name__}.py", "metrics.jsonl", "samples.jsonl"}
    assert {path.name for path in finished.iterdir()} == expected | {"checkpoint", "model"}
    assert [path.name for path in (finished / "checkpoint").iterdir()] == ["state.pt"]
    assert (finished / f"{script.__name__}.py").read_text() == Path(script.__file__).read_text()

    args = json.loads((finished / "args.json").read_text())
    assert set(args) == {field.name for field in dataclasses.fields(script.Args)}
    assert args["num_prompts"] == 4 and None not in (args["learning_rate"], args["max_prompt_tokens"])
    versions = json.loads((finished / "versions.json").read_text())
    assert versions["torch"] == torch.__version__ and versions["device"] == "cpu"
    assert {"transformers", "python", "commit", "dirty"} <= set(versions)

    metrics = read_jsonl(finished / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(args["num_steps"] + 1))
    assert all(isinstance(value, int | float) for record in metrics for value in record.values())
    assert all("eval/accuracy" in metrics[step] for step in (0, -1))
    for record in metrics:  # a script that draws further prompts in place of useless ones has more of them
        assert record["episodes"] >= record["step"] * args["num_sequences"]
        assert record["episodes"] % args["num_sequences"] == 0
    assert args["num_steps"] <= metrics[-1]["tokens"] <= 24 * metrics[-1]["episodes"]

    samples = read_jsonl(finished / "samples.jsonl")
    steps = [sample["step"] for sample in samples]
    group = args["num_sequences"] // 4
    assert steps == sorted(steps)
    assert all(group * sum(s <= record["step"] for s in steps) == record["episodes"] for record in metrics)
    for sample in samples:
        assert sample["prompt"].endswith("=") and isinstance(sample["answer"], str)
        assert all(isinstance(completion, str) for completion in sample["completions"])
        assert {len(sample[name]) for name in ("completions", "rewards", "advantages")} == {group}
    for record in metrics[1:]:
        rewards = [reward for sample in samples if sample["step"] == record["step"] for reward in sample["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(record["rollout/reward_mean"], abs=1e-6)

    model = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    assert_same(dict(model.state_dict()), dict(read_checkpoint(finished)["model"]))
    tokenizer, original = [AutoTokenizer.from_pretrained(name) for name in (finished / "model", args["model"])]
    assert tokenizer("12+34=").input_ids == original("12+34=").input_ids
    assert tokenizer.eos_token_id == original.eos_token_id


def test_metrics_are_the_documented_ones(script, finished):
    """The README's table names each metric once; a row that names scripts holds for these, any other for all."""
    if not (ROOT / "README.md").is_file():
        pytest.skip("there is no README.md")
    names = {path.stem for path in ROOT.glob("*.py")}
    documented, seen = set(), []
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if len(cells) < 4 or not line.startswith("|"):
            continue
        metric = r"`((?:rollout|policy|value|kl|optim|eval|time)/\w+|step|episodes|tokens)`"
        keys = re.findall(metric, cells[1])
        if not keys or re.sub(metric, "", cells[1]).strip(" ,"):
            continue  # another table
        seen += keys
        scripts = {name for name in names if re.search(rf"(?<![\w/]){name}(?!\w)", "|".join(cells[2:]))}
        documented |= set(keys) if not scripts or script.__name__ in scripts else set()
    assert seen, "README.md has no table of metrics"
    assert len(seen) == len(set(seen))
    logged = {name for record in read_jsonl(finished / "metrics.jsonl") for name in record}
    assert logged == documented


# ---- the same again


def test_one_seed_one_run(script, run, finished, tmp_path):
    """This test's run is done anew, with its folder elsewhere and the random states of python and torch disturbed."""
    random.seed(99)
    torch.manual_seed(99)
    assert_same_runs(run("again", **MANY_UPDATES), finished)
    other = run("other", seed=2, **MANY_UPDATES)
    assert (other / "samples.jsonl").read_text() != (finished / "samples.jsonl").read_text()
    assert (other / "model" / "model.safetensors").read_bytes() != (
        finished / "model" / "model.safetensors"
    ).read_bytes()


def test_micro_batches_do_not_change_the_training(script, run):
    """Compared is Adam's mean of the gradients: a weight moves by it over its size, which turns rounding into steps."""
    sizes = dict(num_steps=2, num_prompts=8, learning_rate=1e-4)
    many, one = [run(str(t), **sizes, micro_batch_tokens=t) for t in (64, 100_000)]
    for a, b in zip(*[read_jsonl(folder / "metrics.jsonl")[1:] for folder in (many, one)], strict=True):
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4)
        assert a["policy/loss"] == pytest.approx(b["policy/loss"], abs=1e-5)
    states = [read_checkpoint(folder)["optimizer"]["state"] for folder in (many, one)]
    means = [{k: state["exp_avg"] for k, state in optimizer.items()} for optimizer in states]
    largest = max(mean.abs().max().item() for mean in means[1].values())
    assert largest > 1e-3
    for k in means[1]:
        torch.testing.assert_close(means[0][k], means[1][k], atol=1e-5 * largest, rtol=0)


# ---- killed, interrupted, resumed


def in_child(script_name: str, given: dict, log: str, trap: dict | None) -> None:
    """A forked process: main with these fields, with its output in a file, and perhaps a trap."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    script = __import__(script_name)
    if trap:
        set_trap(script, **trap)
    script.main(make_args(script, **given))


def set_trap(script, where: str, call: int, signals: list[int], after: bool = False, match: str = "") -> None:
    """At this call of a function (counting those with `match` in an argument) the process gets these signals.

    SIGXFSZ stands for a limit on the size of files: the kernel then kills the process in the middle of a write.
    """
    owner, name = {"replace": (os, "replace"), "fsync": (os, "fsync"), "optimizer": (torch.optim.AdamW, "step")}.get(
        where, (script, where)
    )
    function, calls = getattr(owner, name), []

    def strike():
        for number in signals:
            if number == signal.SIGXFSZ:
                signal.signal(number, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
            else:
                os.kill(os.getpid(), number)

    def trapped(*args, **kwargs):
        if not match or any(match in str(value) for value in args):
            calls.append(1)
        here = len(calls) == call and (not match or any(match in str(value) for value in args))
        if here and not after:
            strike()
        result = function(*args, **kwargs)
        if here and after:
            strike()
        return result

    setattr(owner, name, trapped)


@pytest.fixture(scope="module")
def server():
    """The process that all others are forked from: it has imported the scripts, and has computed nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *SCRIPTS, "transformers.models.llama.modeling_llama"])
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def spawn(server, script, data, tmp_path):
    """Start the small run of several updates per rollout, or with `resume` go on with it, in a process of its own."""
    started = []

    def call(name="run", resume=False, log=None, **trap):
        given = {"resume": str(tmp_path / name)}
        if not resume:
            given = dict(runs_dir=str(tmp_path), run_name=name, dataset=data, **MANY_UPDATES)
        log = str(log or tmp_path / f"{name}.log")
        started.append(server.Process(target=in_child, args=(script.__name__, given, log, trap), daemon=True))
        started[-1].start()
        return started[-1]

    yield call
    for process in started:
        if process.is_alive():
            process.kill()
            process.join(WAIT)


def ended(process) -> int:
    """The exit status; minus the number of the signal that killed the process."""
    process.join(WAIT)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


KILL = [signal.SIGKILL]
KILLS = [  # each kills the run at one moment; a checkpoint is due after steps 2, 4 and 6, and at the start
    dict(where="draw", call=1, signals=KILL),  # at the beginning of a rollout
    dict(where="optimizer", call=2, signals=KILL, after=True),  # in an update
    dict(where="save_checkpoint", call=1, signals=KILL),  # the metrics are logged, the checkpoint is not written
    dict(where="save_checkpoint", call=1, signals=[signal.SIGXFSZ]),  # the checkpoint is half written
    dict(where="replace", call=1, signals=KILL, match="state.pt"),  # it is written, and has not got its name
    dict(where="replace", call=1, signals=KILL, match="metrics.jsonl"),  # the logs are being shortened
    dict(where="replace", call=1, signals=KILL, match="state.pt", after=True),  # it has just got its name
    dict(where="replace", call=1, signals=KILL, match="samples.jsonl"),  # one of them is
]


def test_killed_and_resumed_is_never_killed(spawn, finished, tmp_path):
    """One run that is killed again and again, at the moments above and then at random ones, until it is done."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    for number, kill in enumerate(KILLS):
        status = ended(spawn(resume=number > 0, **kill))
        assert status in (-signal.SIGKILL, -signal.SIGXFSZ), (kill, log.read_text())
        assert read_checkpoint(folder)["done"]["steps"] == (0 if number < 6 else 2)
        if number == 4:  # a machine that loses power can leave half a line
            with open(folder / "metrics.jsonl", "a") as metrics, open(folder / "samples.jsonl", "a") as samples:
                metrics.write('{"step": 3, "episo')
                samples.write('{"step": 3, "prompt": "1')
    draw = random.Random(0)
    for _ in range(3):
        size = log.stat().st_size
        process = spawn(resume=True)
        while "resumed" not in log.read_text()[size:] and process.is_alive():
            time.sleep(0.01)
        process.join(draw.uniform(0, 0.6))
        process.kill()
        assert ended(process) in (0, -signal.SIGKILL), log.read_text()
    assert ended(spawn(resume=True)) == 0, log.read_text()
    assert_same_runs(folder, finished)
    kl = [record["kl/ref"] for record in read_jsonl(folder / "metrics.jsonl") if "kl/ref" in record]
    assert not kl or kl[-1] > 1e-4, "the reference follows the policy, or the test's run is too short to tell"


SIGNALS = [  # at the second call of a function
    ("policy_loss", [signal.SIGINT]),
    ("policy_loss", [signal.SIGTERM]),
    ("policy_loss", [signal.SIGINT, signal.SIGINT]),
    ("draw", [signal.SIGINT]),  # at the beginning of the rollout of step 2
    ("fsync", [signal.SIGTERM]),  # while the checkpoint of step 2 is written
]


@pytest.mark.parametrize("where, signals", SIGNALS, ids=[f"{where}-{len(s)}-{s[0].name}" for where, s in SIGNALS])
def test_signals(script, spawn, finished, tmp_path, where, signals):
    """The first finishes the step, saves and tells how to go on; the second stops at once."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    assert ended(spawn(where=where, call=2, signals=signals)) == 128 + signals[-1], log.read_text()
    assert "Traceback" not in log.read_text()
    steps = [record["step"] for record in read_jsonl(folder / "metrics.jsonl")]
    saved = read_checkpoint(folder)["done"]["steps"]
    command = re.search(r"python (\S+) --resume (.+)", log.read_text())
    if len(signals) == 1:
        assert saved == steps[-1] and 1 <= saved < 6
        assert command.groups() == (f"{script.__name__}.py", str(folder))
        assert not (folder / "model").exists()
    else:
        assert saved == 0 and steps[-1] <= 1 and command is None
    assert ended(spawn(resume=True)) == 0, log.read_text()
    assert_same_runs(folder, finished)


@pytest.mark.parametrize("gone", ["", "model"])
def test_resume_of_a_finished_run(script, finished, tmp_path, gone):
    """It changes nothing and returns the last metrics; a model that was not written any more is written."""
    folder = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns(gone))
    metrics = script.main(make_args(script, resume=str(folder)))
    assert metrics == read_jsonl(finished / "metrics.jsonl")[-1]
    assert_same_runs(folder, finished)
    for name in ("metrics.jsonl", "args.json", "versions.json"):
        assert (folder / name).read_text() == (finished / name).read_text()


@pytest.mark.shared_text
def test_checkpoint_reaches_the_disk_before_its_name(script, tmp_path, monkeypatch):
    """All of it is forced to the disk while the old one is still in place; only then it gets the name."""
    path, events = tmp_path / "checkpoint" / "state.pt", []
    script.save_checkpoint(path, {"number": torch.zeros(9)})
    fsync, replace = os.fsync, os.replace

    def watch_fsync(file):
        fsync(file)
        events.append(("fsync", os.fstat(file).st_ino, os.fstat(file).st_size))
        assert torch.load(path)["number"][0] == 0

    def watch_replace(source, target):
        events.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    script.save_checkpoint(path, {"number": torch.ones(9)})
    status = path.stat()
    assert ("fsync", status.st_ino, status.st_size) in events
    assert events[-1] == ("replace", status.st_ino, status.st_size)
    assert torch.load(path)["number"][0] == 1


# ---- what goes wrong on the way


@pytest.fixture
def watch(script, monkeypatch):
    """Let a function look at the arguments of each call of the script's function `name`, before or after it."""

    def call(name, look, after=False):
        function = getattr(script, name)

        def watched(*args, **kwargs):
            if not after:
                look(*args)
            result = function(*args, **kwargs)
            if after:
                look(*args)
            return result

        monkeypatch.setattr(script, name, watched)

    return call


@pytest.fixture
def stops(script, run, capsys):
    """Run main in this process; it must end with status 1 and one line that holds these words."""

    def call(*words, **given):
        with pytest.raises(SystemExit) as stop:
            run(**given)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        error = capsys.readouterr().err
        assert stop.value.code == 1
        assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1, error
        assert [word for word in words if word not in error] == [], error

    return call


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.shared_text
@pytest.mark.parametrize("full", ["first checkpoint", "checkpoint", "metrics", "model"])
def test_full_disk(script, watch, stops, finished, tmp_path, full):
    """Files that cannot grow are like a full disk: one line, and what was saved before is whole and can be resumed."""
    folder, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    saves = []

    def before_save(path, state):
        saves.append(state["done"]["steps"])
        if full == "first checkpoint" or full == "checkpoint" and saves[-1] == 4:
            limit_files(10**6)

    def before_loss(*args):
        if full == "metrics" and saves[-1] == 2:
            limit_files(metrics.stat().st_size + 10)

    def after_save(path, state):
        if full == "model" and saves[-1] == 6:
            limit_files(10**6)

    watch("save_checkpoint", before_save)
    watch("save_checkpoint", after_save, after=True)
    watch("policy_loss", before_loss)
    stops("--runs-dir", *[str(folder)] * ("checkpoint" in full), **MANY_UPDATES)
    assert list(folder.rglob("*.tmp")) == []
    if full == "first checkpoint":
        assert not (folder / "checkpoint" / "state.pt").exists()
        return
    assert read_checkpoint(folder)["done"]["steps"] == {"checkpoint": 2, "metrics": 2, "model": 6}[full]
    full = ""
    script.main(make_args(script, resume=str(folder)))
    assert_same_runs(folder, finished)


@pytest.fixture
def spoil(script, watch, monkeypatch, tmp_path):
    """Spoil the loss of these steps with a factor; returns the states that were saved, which is after every step."""

    def call(steps, factor):
        policy_loss, states = script.policy_loss, []

        def spoiled(*args):
            loss, stats = policy_loss(*args)
            step = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")  # a line for step 0, and so on
            return loss * (factor if step in steps else 1.0), stats

        monkeypatch.setattr(script, "policy_loss", spoiled)
        watch("save_checkpoint", lambda path, state: states.append(copy.deepcopy(state)))
        return states

    return call


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(run, spoil, factor):
    states = spoil([2, 3, 5], factor)
    folder = run(save_every=1, num_steps=6)
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [record.get("optim/skipped") for record in metrics] == [None, 0, 1, 1, 0, 1, 0]
    assert len(states) == 7
    for step in range(1, 7):
        before, after = states[step - 1]["model"], states[step]["model"]
        assert all(torch.equal(before[name], after[name]) for name in before) == (step in (2, 3, 5))
        assert all(tensor.isfinite().all() for tensor in after.values())


def test_the_third_in_a_row_stops_the_run(script, run, spoil, stops, tmp_path):
    spoiled = [3, 4, 5]
    states = spoil(spoiled, float("nan"))
    stops("step 5", "three", "--learning-rate", str(tmp_path / "run" / "checkpoint"), save_every=1)
    saved = read_checkpoint(tmp_path / "run")
    assert saved["done"]["steps"] == 4
    assert_same(dict(saved["model"]), dict(states[2]["model"]))  # the state after step 2
    with pytest.raises(SystemExit):  # the two before it are remembered
        script.main(make_args(script, resume=str(tmp_path / "run")))
    spoiled.clear()
    metrics = script.main(make_args(script, resume=str(tmp_path / "run")))
    assert metrics["step"] == 6 and metrics["optim/skipped"] == 0


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 8 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to allocate"),
    MemoryError("Unable to allocate 2 GiB"),
    MemoryError(),
]


@pytest.mark.shared_text
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "python", "python-silent"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "in-training"])
def test_out_of_memory(watch, stops, error, at_once):
    def throw(*args):
        if at_once or torch.is_grad_enabled():
            raise error

    watch("compute_logprobs", throw)
    stops("out of memory", "--micro-batch-tokens", num_steps=1)


@pytest.mark.shared_text
def test_any_other_error_keeps_its_traceback(watch, run):
    def throw(*args):
        if torch.is_grad_enabled():
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    watch("compute_logprobs", throw)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(num_steps=1)


# ---- what a run says


@pytest.mark.shared_text
def test_warnings_come_once(run, capsys):
    """Responses of two tokens are never finished and all get the same reward."""
    folder = run(max_new_tokens=2, overlong_cache=1, num_steps=3)
    out = capsys.readouterr().out
    metrics = read_jsonl(folder / "metrics.jsonl")
    equal = any(record.get("rollout/zero_std_frac", 0) > 0.9 for record in metrics)
    assert equal or "accuracy_reward" not in str(metrics)  # a reward model tells even such responses apart
    assert [out.count(name) for name in ("eos_frac < 0.5", "zero_std_frac > 0.9")] == [1, equal]
    assert out.count("warning: ") == 1 + equal


@pytest.mark.parametrize("given", [{}, dict(num_iterations=2), dict(num_minibatches=2)])
def test_note_about_the_loss(script, run, capsys, given):
    run(num_steps=1, **given)
    noted = "a loss near 0 no fault" in capsys.readouterr().out
    assert noted == (updates_per_rollout(make_args(script, **given)) == 1)


@pytest.mark.parametrize("kl_target, factor", [(1e9, 0.8), (1e-9, 1.2)])
def test_adaptive_kl_coefficient(script, run, kl_target, factor):
    """Ziegler et al. 2019, Section 2.2, with the error clipped to 0.2, and a horizon of one step: * 0.8 or * 1.2."""
    if not hasattr(script.Args, "kl_target"):
        pytest.skip("this script has no target for the KL")
    # The learning rate is so high that the KL is positive from the second step on; in the first one it is 0.
    folder = run(num_steps=3, beta=0.05, kl_target=kl_target, kl_horizon=8, learning_rate=1e-3)
    logged = [record["kl/beta"] for record in read_jsonl(folder / "metrics.jsonl")[1:]]
    assert logged == pytest.approx([0.05, 0.05 * 0.8, 0.05 * 0.8 * factor])


@pytest.mark.shared_text
def test_track_offline(run, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "API_KEY": None}.items():
        monkeypatch.setenv(f"WANDB_{name}", value) if value else monkeypatch.delenv(f"WANDB_{name}", raising=False)
    try:
        folder = run(num_steps=2, track=True)
    except wandb.errors.CommError as error:
        pytest.skip(f"W&B cannot start here: {error}")
    [record] = folder.rglob("offline-run-*/*.wandb")
    names = [b"rollout/reward_mean", b"policy/loss", b"optim/lr"]  # the file is cut into blocks, and so may a name be
    assert any(name in record.read_bytes() for name in names), record.stat()
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2]


# ---- learning


def test_it_learns(script, tmp_path):
    """The script's own values, only fewer steps."""
    num_steps = 9 if script.__name__ == "ppo_rlhf" else 12  # four passes over each of its rollouts take their time
    script.main(script.Args(runs_dir=str(tmp_path), run_name="run", num_steps=num_steps, eval_size=100, device="cpu"))
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["eval/accuracy"] >= metrics[0]["eval/accuracy"] + 0.2
