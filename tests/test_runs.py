"""Whole runs: their files, and whether a run that was killed ends as an undisturbed one.

Also: steps without a finite gradient are skipped and counted, numbers that must not change, the order of the data,
documented metrics, gradient checkpointing, exact first ratios, W&B, learning, and the evaluation by hand. A killed run
is a real process, forked from the tests' own process.
"""

import dataclasses
import gc
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import wandb
from conftest import (
    ROOT,
    SMALL_MODEL,
    SMALL_TASK,
    default_task,
    skip_without_engine,
    small_recipe,
    use_task,
)
from scripts import CRITICS, SCRIPTS
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaMLP

from utils.rewards import accuracy_reward, format_reward

# Each script gets only the fields that it has. Most of these affect the state that one step passes to the next.
MANY_UPDATES = dict(
    num_iterations=2,
    num_minibatches=2,
    beta=0.05,
    staleness=3,
    engine_dtype="bfloat16",
    baseline="moving_average",
)
SMALL = dict(
    num_prompts=4,
    num_generations=2,
    max_new_tokens=24,
    eval_size=8,
    num_steps=5,
    save_every=2,
    device="cpu",
    num_iterations=1,
    num_minibatches=1,
    value_warmup_steps=3,
)
FORK = multiprocessing.get_context("fork")
# After this many seconds a test assumes that a process hangs.
WAIT = 120


def make_args(script, **given):
    """Args of a small run, with only the fields that this script has."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    given = small_recipe(script) | SMALL | given
    return script.Args(**{name: value for name, value in given.items() if name in known})


def read_jsonl(path: Path) -> list[dict]:
    """The records of a file, which must be strict JSON: without NaN and Infinity."""

    def refuse(constant):
        raise ValueError(f"{path} has {constant}, which isn't JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def read_checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def without_times(records: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.startswith("time/")}
        for record in records
    ]


def plain(value):
    """The value with lists for tuples and tensors, and each tensor's dtype, so that == compares all of it."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return value


def assert_same(one, other) -> None:
    """Both values are equal to the last bit, also inside dicts, lists and tuples."""
    assert plain(one) == plain(other)


def assert_same_runs(folder: Path, other: Path) -> None:
    """Both runs have the same metrics (except times), samples, checkpoint and model."""
    records = [without_times(read_jsonl(run / "metrics.jsonl")) for run in (folder, other)]
    assert [record["step"] for record in records[0]] == [record["step"] for record in records[1]]
    for one, two in zip(*records, strict=True):
        assert one == two
    for name in ("samples.jsonl", "evaluations.jsonl"):
        assert (folder / name).read_text() == (other / name).read_text()
    states = [read_checkpoint(run) for run in (folder, other)]
    for state in states:
        # metrics.jsonl contains times, so its size differs.
        del state["log_sizes"]["metrics.jsonl"]
        state["metrics"] = without_times([state["metrics"]])
    assert_same(*states)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (folder, other)]
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with only 14 training problems: a run goes through them more than once."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 14), ("test", 8)):
        path = ROOT / "assets" / "addition" / f"{split}.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]))
    return str(folder)


@pytest.fixture
def run(script, data, tmp_path):
    """Run main in this process and return the run's folder. The default is one update per rollout.

    run.metrics is what main has returned.
    """
    skip_without_engine(script)

    def call(name="run", **given):
        given = dict(runs_dir=str(tmp_path), run_name=name, dataset=data) | given
        call.metrics = script.main(make_args(script, **given))
        return tmp_path / name

    return call


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory, data):
    """For each script, the folder of an undisturbed run with several updates per rollout."""
    runs = {}

    def call(script):
        skip_without_engine(script)
        if script not in runs:
            folder = tmp_path_factory.mktemp("finished")
            given = dict(runs_dir=str(folder), run_name="run", dataset=data, **MANY_UPDATES)
            metrics = script.main(make_args(script, **given))
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            assert finite == read_jsonl(folder / "run" / "metrics.jsonl")[-1]
            runs[script] = folder / "run"
        return runs[script]

    return call


@pytest.fixture
def finished(script, finished_runs):
    return finished_runs(script)


# ---- the files of a run


def test_files(script, finished):
    expected = {f"{script.__name__}.py", "task.py", "utils", "args.json", "checkpoint.pt", "model"}
    expected |= {"metrics.jsonl", "samples.jsonl", "evaluations.jsonl"}
    expected |= {"adapter"} if script.__name__ == "grpo_lora" else set()
    assert {path.name for path in finished.iterdir()} == expected
    assert (finished / f"{script.__name__}.py").read_text() == Path(script.__file__).read_text()
    assert (finished / "task.py").read_text() == (ROOT / "utils" / "task.py").read_text()
    utils = {path.name: path.read_text() for path in (ROOT / "utils").glob("*.py")}
    assert {path.name: path.read_text() for path in (finished / "utils").iterdir()} == utils

    args = json.loads((finished / "args.json").read_text())
    fields = {field.name for field in dataclasses.fields(script.Args)}
    code = {f"{script.__name__}.py", "task.py", *(f"utils/{name}" for name in utils)}
    assert set(args) == fields | code | {"rewards", "data", "precision", "versions", "device_name"}
    assert args["rewards"] == ["accuracy_reward", "format_reward"]
    # torch.__version__ may have an ending such as +cu130, which the package's version doesn't have.
    versions = {"torch": version("torch"), "transformers": transformers.__version__}
    assert args["versions"] == versions
    assert (args["device_name"], args["dtype"], args["precision"]) == ("cpu", "auto", "float32")
    assert all(re.fullmatch("[0-9a-f]{64}", args[name]) for name in [*code, "data"])
    assert args["num_prompts"] == 4

    metrics = read_jsonl(finished / "metrics.jsonl")
    N = args["num_prompts"] * args["num_generations"]
    assert [record["step"] for record in metrics] == list(range(args["num_steps"] + 1))
    assert all(isinstance(x, int | float) for record in metrics for x in record.values())
    assert all("eval/accuracy" in metrics[step] for step in (0, -1))
    group = args["num_generations"]
    # remax.py also generates one greedy response per prompt, which doesn't count as a sample.
    extra = script.__name__ == "remax"
    for record in metrics:
        # A script that replaces useless prompts has more episodes.
        assert record["episodes"] >= record["step"] * N
        assert record["episodes"] % (N + 4 * extra) == 0

    for record in read_jsonl(finished / "evaluations.jsonl"):
        accuracy = sum(record["scores"]) / len(record["scores"])
        assert accuracy == pytest.approx(metrics[record["step"]].pop("eval/accuracy"))
    assert not any("eval/accuracy" in record for record in metrics)

    samples = read_jsonl(finished / "samples.jsonl")
    steps = [sample["step"] for sample in samples]
    assert steps == sorted(steps)
    assert all(
        (group + extra) * sum(s <= record["step"] for s in steps) == record["episodes"]
        for record in metrics
    )
    for sample in samples:
        assert sample["prompt"].endswith("=") and isinstance(sample["answer"], str)
        assert all(isinstance(completion, str) for completion in sample["completions"])
        assert {len(sample[name]) for name in ("completions", "rewards", "advantages")} == {group}
        # The completions are those of this prompt, and not of another one.
        scores = accuracy_reward(sample["completions"], [sample["answer"]] * group)
        assert sample["scores"] == scores
    model = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    # A checkpoint of grpo_lora.py contains only the adapters: see tests/test_lora.py.
    if script.__name__ != "grpo_lora":
        assert_same(dict(model.state_dict()), dict(read_checkpoint(finished)["model"]))
    tokenizer, original = [
        AutoTokenizer.from_pretrained(name) for name in (finished / "model", args["model"])
    ]
    assert tokenizer("12+34=").input_ids == original("12+34=").input_ids
    assert tokenizer.eos_token_id == original.eos_token_id


def test_every_epoch_is_a_new_permutation_of_the_data(script, finished):
    """A run draws 14 problems, 4 at a time. Each appears once in the first 14 draws; then the order changes."""
    prompts = [sample["prompt"] for sample in read_jsonl(finished / "samples.jsonl")]
    assert len(set(prompts[:14])) == 14 and len(prompts) >= 20
    assert prompts[14:20] != prompts[:6] and len(set(prompts[14:20])) == 6


def test_metrics_are_the_documented_ones(script, finished):
    """docs/metrics.md names each metric once. A row that names scripts is about these scripts (or all but these)."""
    names = set(SCRIPTS)
    documented, seen = set(), []
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for line in page.split("## Every metric\n")[1].splitlines():
        cells = line.split("|")
        if len(cells) < 4 or not line.startswith("|"):
            continue
        metric = (
            r"`((?:rollout|tool|policy|value|kl|optim|eval|time)/\w+|step|episodes|tokens|batches)`"
        )
        keys = re.findall(metric, cells[1])
        if not keys or re.sub(metric, "", cells[1]).strip(" ,"):
            continue  # another table
        seen += keys
        scripts = {
            name for name in names if re.search(rf"(?<![\w/]){name}(?!\w)", "|".join(cells[2:]))
        }
        scripts = names - scripts if "all but" in cells[2] else scripts
        documented |= set(keys) if not scripts or script.__name__ in scripts else set()
    assert seen, "docs/metrics.md has no table of metrics"
    assert len(seen) == len(set(seen))
    documented.remove("time/peak_mem_gb")  # on a GPU alone
    logged = {name for record in read_jsonl(finished / "metrics.jsonl") for name in record}
    assert logged == documented


def test_groups_that_teach_nothing_are_counted(script, finished, run):
    """rollout/zero_std_frac counts the groups whose rewards are all equal: no token there has an advantage."""
    if script.__name__ == "remax":
        pytest.skip("it compares with the greedy response: see the next test")
    if script.__name__ in CRITICS:
        pytest.skip("a critic compares no samples of a group")
    # It has no groups, so the step is one group.
    is_one_group = script.__name__ == "reinforce_baseline"
    samples, shares = read_jsonl(finished / "samples.jsonl"), []
    for record in read_jsonl(finished / "metrics.jsonl")[1:]:
        mine = [sample for sample in samples if sample["step"] == record["step"]]
        rewards = [
            {r for steps in s["steps"] for _, r in steps} if "steps" in s else set(s["rewards"])
            for s in mine
        ]
        if is_one_group:
            rewards = [set.union(*rewards)]
        shares.append(sum(len(own) == 1 for own in rewards) / len(rewards))
        assert record["rollout/zero_std_frac"] == pytest.approx(shares[-1])
    # All responses begin with <think>, so responses of one token are equal.
    short = dict(max_new_tokens=1, num_steps=1, overlong_cache=0)
    _, cut = read_jsonl(run("cut", **short) / "metrics.jsonl")
    assert min(shares) < 1 and cut["rollout/zero_std_frac"] == 1


def test_equal_to_the_greedy_response_to_the_last_bit(tmp_path, data, monkeypatch):
    """remax.py adds up the baseline in the same order as the rewards, even with many reward functions."""
    script = __import__("remax")
    tenths = []
    for k in range(4):
        tenths.append(lambda completions, **columns: [0.1] * len(completions))
        tenths[k].__name__ = f"tenth_{k}"
    use_task(monkeypatch, script, [script.accuracy_reward, *tenths])
    given = dict(temperature=1e-3, beta=0.0, num_prompts=16, num_steps=1, dataset=data)
    script.main(make_args(script, **given, runs_dir=str(tmp_path), run_name="run"))
    record = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert record["rollout/accuracy"] > 0 and record["rollout/zero_std_frac"] == 1


def test_nothing_has_changed_that_nobody_expected(script, finished, request):
    """The loss and the gradient norm of the first steps equal the recorded ones; --golden records new ones.

    Another kind of CPU rounds differently. One rounded logit can change a sample, and the sample changes the run.
    """
    path, cpu = ROOT / "tests" / "golden.json", torch.backends.cpu.get_cpu_capability()
    golden = json.loads(path.read_text()) if path.is_file() else {}
    if script.__name__ == "grpo_offpolicy":
        pytest.skip("it samples in bf16, which rounds more")
    if script.__name__ == "grpo_vllm":
        pytest.skip("the engine chooses its kernels itself")
    if golden.get("cpu", cpu) != cpu and not request.config.getoption("--golden"):
        pytest.skip(f"recorded on {golden['cpu']}")
    names, records = ("policy/loss", "optim/grad_norm"), read_jsonl(finished / "metrics.jsonl")[1:6]
    # In vapo.py's value pretraining there is no policy/loss.
    mine = {
        name: [float(f"{record[name]:.5g}") for record in records if name in record]
        for name in names
    }
    if request.config.getoption("--golden"):
        path.write_text(json.dumps(golden | {"cpu": cpu, script.__name__: mine}, indent=1) + "\n")
        return
    for name in names:
        assert mine[name] == pytest.approx(golden[script.__name__][name], rel=1e-3, abs=1e-5), name


@pytest.mark.scripts("grpo")
def test_the_lines_that_a_run_prints(run, capsys):
    """About ten times a run, it prints metrics, the seconds of a step, the minutes that are left, and a sample."""
    folder = run(num_steps=20)
    out = capsys.readouterr().out.splitlines()
    records, samples = [read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "samples")]
    start = out.index(f"evaluating {SMALL_MODEL} on 8 held-out problems, greedy")
    assert out[start + 1] == f"before: accuracy {records[0]['eval/accuracy']:.3f}"
    number = r"[-+.e\d]+"
    pattern = rf"step (\d+): reward={number}, acc={number}, len={number}, eos={number}, "
    for i, step in enumerate([1, *range(2, 21, 2)]):
        line, sample_line = out[start + 2 + 2 * i : start + 4 + 2 * i]
        found = re.fullmatch(rf"{pattern}({number}) s, (\d+) min left", line)
        assert found and int(found[1]) == step
        seconds = sum(records[step][f"time/{part}_s"] for part in ("rollout", "reward", "update"))
        assert float(found[2]) == pytest.approx(seconds, rel=0.06)  # two digits
        assert int(found[3]) == round(seconds * (20 - step) / 60)
        sample = [x for x in samples if x["step"] == step][-1]
        shown = f"{sample['prompt']!r} -> {sample['completions'][0]!r}"
        assert sample_line == f"    {shown}, reward {sample['rewards'][0]:.2f}"
    assert out[-1].startswith(f"after: accuracy {records[-1]['eval/accuracy']:.3f}; model, ")
    assert out[-1].endswith(f" are in {folder}")


# ---- the same again


@pytest.mark.scripts("grpo")
def test_another_seed_is_another_run(run, finished):
    other = run("other", seed=2, **MANY_UPDATES)
    assert (other / "samples.jsonl").read_text() != (finished / "samples.jsonl").read_text()


# ---- killed, and started again


def write_to(file: int, **options) -> None:
    """Send this process's output to the file instead of pytest."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", closefd=False, **options))
    os.close(file)


def in_child(script_name: str, given: dict, log: str, trap: dict | None) -> None:
    """The body of a forked process: run main with these fields, write the output to a file, maybe set a trap."""
    # Garbage of earlier tests must not be collected here: it may wait for threads that this process doesn't have.
    gc.freeze()
    write_to(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), buffering=1)
    script = __import__(script_name)
    if trap:
        set_trap(script, **trap)
    script.main(make_args(script, **given))


def set_trap(
    script, where: str, call: int, signals: list[int], after: bool = False, match: str = ""
) -> None:
    """Send these signals to the process at this call of a function. Only calls with `match` in an argument count.

    SIGXFSZ sets a limit on file sizes instead. The kernel then kills the process in the middle of a write.
    """
    elsewhere = {
        "replace": (os, "replace"),
        "save": (torch, "save"),
        "truncate": (os, "truncate"),
        "optimizer": (torch.optim.Adam, "step"),
    }
    owner, name = elsewhere.get(where, (script, where))
    function, calls = getattr(owner, name), []

    def strike():
        for number in signals:
            if number == signal.SIGXFSZ:
                signal.signal(number, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, resource.RLIM_INFINITY))
            else:
                os.kill(os.getpid(), number)

    def trapped(*args, **kwargs):
        counts = not match or any(match in str(value) for value in args)
        calls.append(counts)
        here = counts and sum(calls) == call
        if here and not after:
            strike()
        result = function(*args, **kwargs)
        if here and after:
            strike()
        return result

    setattr(owner, name, trapped)


@pytest.fixture
def spawn(script, data, tmp_path):
    """Start the small run with several updates per rollout in a separate process. It goes on if it has a checkpoint."""
    skip_without_engine(script)
    started = []

    def call(**trap):
        given = dict(runs_dir=str(tmp_path), run_name="run", dataset=data, **MANY_UPDATES)
        log = str(tmp_path / "run.log")
        started.append(
            FORK.Process(target=in_child, args=(script.__name__, given, log, trap), daemon=True)
        )
        started[-1].start()
        return started[-1]

    yield call
    for process in started:
        if process.is_alive():
            process.kill()
            process.join(WAIT)


def ended(process) -> int:
    """The exit status, or minus the number of the signal that killed the process."""
    process.join(WAIT)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


KILL = [signal.SIGKILL]
# Each entry: a trap that kills the run, and the step of the newest checkpoint. The run saves after steps 2, 4, 5.
# Before the first checkpoint the run begins again.
KILLS = [
    # The folder was just made and has the code, but no args.json.
    (dict(where="replace", call=1, signals=KILL, match="args"), None),
    # After the logs are opened.
    (dict(where="open_run", call=1, signals=KILL, after=True), None),
    # Halfway through writing the first checkpoint.
    (dict(where="save", call=1, signals=[signal.SIGXFSZ]), None),
    # The checkpoint was just renamed to its final name.
    (dict(where="replace", call=1, signals=KILL, match="checkpoint", after=True), 2),
    # During an update of step 3.
    (dict(where="optimizer", call=1, signals=KILL, after=True), 2),
    # At the beginning of a rollout.
    (dict(where="sample_responses", call=1, signals=KILL), 2),
    # Before, while and after the run that goes on shortens the logs. The first call shortens one of the two.
    (dict(where="load_checkpoint", call=1, signals=KILL), 2),
    (dict(where="truncate", call=1, signals=KILL, after=True), 2),
    (dict(where="load_checkpoint", call=1, signals=KILL, after=True), 2),
    (dict(where="open_run", call=1, signals=KILL, after=True), 2),
    # After the metrics are logged, before the checkpoint is written.
    (dict(where="save", call=1, signals=KILL), 2),
    # Halfway through writing the checkpoint.
    (dict(where="save", call=1, signals=[signal.SIGXFSZ]), 2),
    # After the checkpoint is written, before it gets its name.
    (dict(where="replace", call=1, signals=KILL, match="checkpoint"), 2),
    (dict(where="replace", call=1, signals=KILL, match="checkpoint", after=True), 4),
]


def test_killed_and_started_again_is_never_killed(script, spawn, finished, tmp_path):
    """Kill one run at each moment above and then at random moments, and repeat its command each time until it is done.

    The scripts share the code that these moments are in, so one script tests all of them. grpo_multigpu.py has an
    open_run of its own.
    """
    folder, log = tmp_path / "run", tmp_path / "run.log"
    thorough = script.__name__ == "grpo"
    kills = KILLS if thorough else KILLS[3:4]
    if script.__name__ == "grpo_multigpu":
        kills = [KILLS[0], *KILLS[2:4]]
    for kill, step in kills:
        status = ended(spawn(**kill))
        assert status in (-signal.SIGKILL, -signal.SIGXFSZ), (kill, log.read_text())
        assert (folder / "args.json").exists() == (kill is not KILLS[0][0])
        has_checkpoint = (folder / "checkpoint.pt").exists()
        assert (read_checkpoint(folder)["metrics"]["step"] if has_checkpoint else None) == step
        with (
            open(folder / "metrics.jsonl", "a") as metrics,
            open(folder / "samples.jsonl", "a") as samples,
            open(folder / "evaluations.jsonl", "a") as evaluations,
        ):
            # A machine that loses power can leave half a line.
            metrics.write('{"step": 3, "episo')
            samples.write('{"step": 3, "prompt": "1')
            evaluations.write('{"step": 3, "scores": [1.')
    draw = random.Random(0)
    for _ in range(3 if thorough else 0):
        size = log.stat().st_size
        process = spawn()
        while "first prompt" not in log.read_text()[size:] and process.is_alive():
            time.sleep(0.01)
        process.join(draw.uniform(0, 0.6))
        process.kill()
        assert ended(process) in (0, -signal.SIGKILL), log.read_text()
    assert ended(spawn()) == 0, log.read_text()
    assert_same_runs(folder, finished)
    kl = [record["kl/ref"] for record in read_jsonl(folder / "metrics.jsonl") if "kl/ref" in record]
    assert not kl or kl[-1] > 1e-4, (
        "the KL to the reference is 0: the reference follows the policy, or the run is too short"
    )


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize(
    ("every", "evaluated", "saved"),
    [(0, [0, 5], [5]), (2, [0, 2, 4, 5], [2, 4, 5]), (9, [0, 5], [5])],
)
def test_when_it_evaluates_and_saves(run, watch, every, evaluated, saved):
    """Before (only evaluated), after, and at multiples of --eval-every and --save-every; 0: none between."""
    steps = []

    def record(folder, trained, state, *rest):
        steps.append(state["step"])

    watch("save_checkpoint", record)
    records = read_jsonl(run(num_steps=5, eval_every=every, save_every=every) / "metrics.jsonl")
    assert [record["step"] for record in records if "eval/accuracy" in record] == evaluated
    assert steps == saved


def test_the_command_of_an_ended_run(script, finished, run, tmp_path, capsys):
    """It says that the run has ended, and returns the last metrics. It writes the model, and leaves all else alone.

    The run has moved, so the command names another folder of runs.
    """
    folder = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    flags = json.loads((folder / "args.json").read_text()) | {"runs_dir": str(tmp_path)}
    time_of_checkpoint = (folder / "checkpoint.pt").stat().st_mtime_ns
    assert run(**MANY_UPDATES) == folder
    assert f"{folder} goes on after 5 of 5 steps\n" in capsys.readouterr().out
    assert run.metrics == read_jsonl(finished / "metrics.jsonl")[-1]
    files = [path.relative_to(finished) for path in finished.rglob("*") if path.is_file()]
    assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == set(files)
    assert json.loads((folder / "args.json").read_text()) == flags
    files.remove(Path("args.json"))
    for path in files:
        assert (folder / path).read_bytes() == (finished / path).read_bytes(), path
    assert (folder / "checkpoint.pt").stat().st_mtime_ns == time_of_checkpoint


@pytest.mark.scripts("grpo", "dapo", "vapo")
def test_a_longer_run(run):
    """With a constant rate a finished run goes on, and ends as one that was as long from the start.

    With the other schedule, each rate depends on the length.
    """
    given = MANY_UPDATES | dict(lr_schedule="constant_with_warmup", value_warmup_steps=1)
    whole = run("whole", **given)
    run("part", num_steps=3, **given)
    part = run("part", **given)
    assert_same(read_checkpoint(part)["model"], read_checkpoint(whole)["model"])
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (part / name).read_bytes() == (whole / name).read_bytes()
    steps = [record["step"] for record in read_jsonl(part / "metrics.jsonl")]
    assert steps == list(range(6))
    line = "began with another num_steps; repeat its command"
    with pytest.raises(ValueError, match=f"{part} {line}"):
        run("part", num_steps=4, **given)
    given["lr_schedule"] = "linear"
    run("linear", num_steps=2, **given)
    with pytest.raises(ValueError, match=f"linear {line}"):
        run("linear", num_steps=3, **given)


@pytest.mark.scripts("grpo")
def test_a_file_of_the_user_is_left_alone(run, watch, tmp_path):
    """A run that goes on shortens only its own logs, and not every .jsonl file in its folder."""
    mine, stops = tmp_path / "run" / "mine.jsonl", [4]

    def write(folder, trained, state, metrics):
        with open(mine, "a") as file:
            file.write(f"{state['step']}\n")
        if state["step"] in stops:
            stops.clear()
            raise KeyboardInterrupt

    watch("save_checkpoint", write)
    with pytest.raises(KeyboardInterrupt):
        run()
    folder = run()
    # Step 4 is repeated, because its checkpoint is missing.
    assert mine.read_text() == "2\n4\n4\n5\n"
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == list(range(6))


# ---- failures during a run


@pytest.fixture
def watch(script, monkeypatch):
    """Call `look` with the arguments of each call to the script's function `name`, before or after the call."""

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


@pytest.mark.parametrize("flags", [dict(beta=0.0), dict(num_minibatches=2)])
@pytest.mark.scripts("grpo", "ppo_rlhf")
def test_gradient_checkpointing_computes_every_layer_twice(script, run, monkeypatch, flags):
    """It saves memory only in training mode, and no number changes without it. So count the layers' calls."""
    calls = []
    forward = LlamaMLP.forward

    def counted(self, x):
        calls.append(torch.is_grad_enabled())
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    counts = []
    for checkpointing in (False, True):
        calls.clear()
        run(f"{checkpointing}", num_steps=1, gradient_checkpointing=checkpointing, **flags)
        counts.append(sum(calls))
    assert counts[0] > 0 and counts[1] == 2 * counts[0]


@pytest.mark.scripts("grpo", "ppo_rlhf")
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(script, run, monkeypatch, tmp_path, factor):
    """The losses of steps 2 and 3 are spoiled. These steps are counted, and leave the weights alone."""
    policy_loss, save, states = script.policy_loss, torch.save, []

    def spoiled(*args, **count):
        loss, stats = policy_loss(*args, **count)
        # The log has a line for step 0 and one for each finished step.
        step = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
        return loss * (factor if step in (2, 3) else 1.0), stats

    def watched_save(state, file):
        states.append({name: tensor.clone() for name, tensor in state["model"].items()})
        save(state, file)

    monkeypatch.setattr(script, "policy_loss", spoiled)
    monkeypatch.setattr(torch, "save", watched_save)
    metrics = read_jsonl(run(save_every=1, num_steps=4) / "metrics.jsonl")
    assert [record.get("optim/skipped") for record in metrics] == [None, 0, 1, 1, 0]
    # A metric without a value isn't logged.
    assert ["policy/loss" in record for record in metrics] == [False, True, False, False, True]
    for step in range(2, 5):
        before, after = states[step - 2], states[step - 1]
        assert all(torch.equal(before[name], after[name]) for name in before) == (step in (2, 3))
        assert all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.scripts("grpo", "dapo", "rloo", "remax", "ppo_rlhf", "grpo_process", "grpo_multigpu")
def test_the_seconds_of_a_step_by_part(script, run, monkeypatch):
    """By a clock that only this test moves: 1 s for each sampling, 100 s for each judgment, 0.01 s for each pass."""
    clock = [0.0]
    times = SimpleNamespace(perf_counter=lambda: clock[0], strftime=time.strftime)

    def takes(seconds, function):
        def call(*args, **kwargs):
            clock[0] += seconds
            return function(*args, **kwargs)

        return call

    def judge(completions, **columns):
        clock[0] += 100
        return [0.5] * len(completions)

    monkeypatch.setattr(script, "time", times)
    use_task(monkeypatch, script, [script.accuracy_reward, judge])
    for name, seconds in (("sample_responses", 1), ("compute_logprobs", 0.01)):
        monkeypatch.setattr(script, name, takes(seconds, getattr(script, name)))
    given = dict(num_steps=1, eval_size=2, max_new_tokens=8, overlong_cache=0)
    record = read_jsonl(run(**given) / "metrics.jsonl")[-1]
    # dapo.py samples batch after batch, and remax.py a greedy response, too.
    calls = record.get("batches", 2 if script.__name__ == "remax" else 1)
    assert record["time/rollout_s"] == pytest.approx(calls)
    assert record["time/reward_s"] == pytest.approx(100 * calls)
    assert 0 < record["time/update_s"] < 1


def test_the_ratio_moves_in_a_default_run_of_dapo(tmp_path, data):
    """With one update per rollout every ratio would be 1, and Clip-Higher would never act."""
    script = __import__("dapo")
    given = small_recipe(script) | dict(dataset=data, num_steps=1, eval_size=8, max_resample=0)
    metrics = script.main(script.Args(**given, runs_dir=str(tmp_path), run_name="run"))
    assert metrics["policy/approx_kl"] > 0


# ---- Weights & Biases


@pytest.fixture
def offline(monkeypatch):
    """W&B for a user without an account or a network."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", os.devnull)


@pytest.mark.scripts("grpo")
def test_track_without_a_network(run, offline):
    folder = run(num_steps=2, track=True)
    # W&B writes the last block to the file when the process ends; teardown() does the same.
    wandb.teardown()
    [record] = folder.parent.rglob("offline-run-*/*.wandb")
    # The file consists of blocks, and a block's end can split a name. So one of three names is enough.
    names = [b"rollout/reward_mean", b"policy/loss", b"optim/lr"]
    assert any(name in record.read_bytes() for name in names), record.stat()
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.scripts("grpo")
def test_only_a_tracked_run_needs_wandb(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it weren't installed
    run("one", num_steps=1)
    with pytest.raises(ImportError):
        run("two", num_steps=1, track=True)
    assert not (tmp_path / "two").exists()


@pytest.mark.scripts("grpo")
def test_a_tracked_run_goes_on_in_its_wandb_run(run, watch, offline, monkeypatch):
    """A new run never writes into another W&B run of its name. One that goes on may: it is its own."""
    init, asked = wandb.init, []

    def recorded(**given):
        asked.append((given["id"], given["resume"]))
        return init(**given)

    def stop(folder, trained, state, metrics):
        if state["step"] == 4 and len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(wandb, "init", recorded)
    watch("save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run(track=True)
    folder = run(track=True)
    wandb.teardown()
    assert asked == [("run", "never"), ("run", "allow")]
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == list(range(6))


@pytest.mark.scripts("grpo")
@pytest.mark.parametrize("track", [True, False])
def test_a_run_after_a_tracked_run_that_failed(run, watch, offline, track):
    """In one process, the second run must not write into the first one's W&B run. The first one has failed."""
    tracked = []

    def fail_once(*args):
        tracked.append(wandb.run.name if wandb.run else None)
        if len(tracked) == 1:
            raise ValueError("a mistake in a reward")

    watch("policy_loss", fail_once)
    with pytest.raises(ValueError, match="a mistake"):
        run("one", num_steps=1, track=True)
    two = run("two", num_steps=1, track=track)
    wandb.teardown()
    assert tracked == (["one", "two"] if track else ["one", "one"])
    assert len(list(two.parent.rglob("offline-run-*-two"))) == track


# ---- ratios


@pytest.mark.scripts("grpo", "rloo")
@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_the_ratio_of_the_first_update_is_exactly_1(
    script, run, watch, monkeypatch, num_minibatches
):
    """The first update takes its own log-probabilities as the old ones, and needs no other forward pass.

    rloo.py needs them before it, for the KL in the return.
    """
    same, passes, exact = [], [], script.compute_logprobs
    passes_before = num_minibatches - (script.__name__ == "grpo")

    def counted(*args):
        passes.append(torch.is_grad_enabled())
        return exact(*args)

    monkeypatch.setattr(script, "compute_logprobs", counted)
    watch("policy_loss", lambda new, old, *rest: same.append(torch.equal(new.detach(), old)))
    numbers = dict(num_iterations=1, num_minibatches=num_minibatches, num_steps=1, num_prompts=8)
    run(**numbers, learning_rate=1e-3, beta=0.0)
    assert len(same) == num_minibatches and same[0] and not any(same[1:])
    assert passes == passes_before * [False] + num_minibatches * [True]


@pytest.mark.scripts("grpo", "grpo_tools", "ppo_rlhf", "self_distill", "vapo")
def test_all_ratios_of_the_first_pass_are_exactly_1_while_the_weights_stay(
    script, run, watch, monkeypatch
):
    """The old log-probabilities come from the micro-batches of the updates: bf16 rounds another batch differently.

    Here a difference that depends on the batch's sequences stands for this rounding.
    """
    differences, exact = [], script.compute_logprobs

    def rounded_logprobs(model, rollout, temperature):
        rounding = 1e-4 * torch.sin(rollout.response_ids.sum().float())
        return exact(model, rollout, temperature) + rounding

    def record(logprobs, old_logprobs, *rest, **count):
        differences.append((logprobs - old_logprobs).detach().abs().max().item())

    monkeypatch.setattr(script, "compute_logprobs", rounded_logprobs)
    watch("policy_loss", record)
    given = dict(num_steps=1, num_generations=8, learning_rate=0.0)
    given |= dict(max_new_tokens=4, micro_batch_tokens=30)
    given["value_warmup_steps"] = 0
    run(num_minibatches=4, num_iterations=1, **given)
    # There are 4 updates of more than one micro-batch.
    assert len(differences) > 4 and set(differences) == {0.0}, differences


def test_evaluated_are_the_weights_of_the_trainer(tmp_path, data, monkeypatch):
    """grpo_offpolicy.py's last evaluation uses the saved model's weights, even if the engine is stale."""
    script = __import__("grpo_offpolicy")
    evaluate, evaluated = script.evaluate, []

    def watched(args, task, model, *rest):
        evaluated.append({name: x.clone() for name, x in model.state_dict().items()})
        return evaluate(args, task, model, *rest)

    monkeypatch.setattr(script, "evaluate", watched)
    given = dict(staleness=100, num_steps=2, learning_rate=2e-3, dataset=data)
    script.main(make_args(script, **given, runs_dir=str(tmp_path), run_name="run"))
    saved = read_checkpoint(tmp_path / "run")
    assert_same(evaluated[-1], dict(saved["model"]))
    assert plain(evaluated[0]) == plain(dict(saved["engine"])) != plain(evaluated[-1])


def test_a_run_that_goes_on_with_a_stale_engine(tmp_path, data, monkeypatch):
    """Its gap is no mistake: grpo_offpolicy.py checks only the gap of a fresh engine."""
    script = __import__("grpo_offpolicy")
    given = dict(staleness=100, num_steps=2, save_every=1, learning_rate=2e-3, dataset=data)
    args = make_args(script, **given, runs_dir=str(tmp_path), run_name="run")
    with monkeypatch.context() as patch:
        equations = iter([script.compute_advantages])  # of step 1 alone
        patch.setattr(script, "compute_advantages", lambda rewards: next(equations)(rewards))
        with pytest.raises(StopIteration):
            script.main(args)
    script.main(args)
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 2 and last["rollout/logprob_gap"] > 0.01  # on a CPU 0.001 is an error


# ---- learning


@pytest.mark.scripts("grpo")
def test_it_learns(script, tmp_path):
    """The test halves the script's prompts per step. The learning rate is high enough to show in a few steps."""
    given = dict(dataset=SMALL_TASK, eval_size=2, num_steps=8)
    given |= dict(num_prompts=script.Args().num_prompts // 2)
    given |= dict(learning_rate=2e-4, lr_schedule="constant_with_warmup")
    given |= dict(runs_dir=str(tmp_path), run_name="run", device="cpu")
    script.main(dataclasses.replace(script.BUNDLED, **given))
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    accuracy = [record["rollout/accuracy"] for record in records]
    assert sum(accuracy[-2:]) / 2 >= sum(accuracy[:2]) / 2 + 0.1


# ---- the evaluation


@pytest.mark.scripts("grpo")
def test_an_evaluation_by_hand(script, monkeypatch):
    """One of four responses is right in its tags, three have all tags in order, all end with the right number.

    Two have an EOS token.
    """
    completions = [
        "<think>7+8=15</think><answer>85</answer>",
        "<think>7+8=15</think><answer>75</answer> 85",
        "<think></think><answer>9</answer>85",
        "<answer>75</answer><think></think>85",
    ]
    mask = torch.arange(6) < torch.tensor([[5], [2], [6], [3]])  # (N, R)
    ids = torch.zeros(4, 6, dtype=torch.long)  # (N, R)
    ids[0, 4], ids[1, 1] = 2, 2  # the EOS token
    rollout = script.Rollout([[8]] * 4, ids, mask, torch.zeros(4, 6))
    asked = []

    def sampled(args, model, problems, num_samples, temperature, eos_ids):
        asked.append((num_samples, temperature))
        return rollout

    monkeypatch.setattr(script, "sample_responses", sampled)
    monkeypatch.setattr(script, "response_texts", lambda *args: completions)
    problem = {"prompt": "8+77=", "columns": {"answer": "85"}}
    model = SimpleNamespace(device="cpu")
    task = default_task(script)
    given = script.Args(), task, model, None, [problem] * 4, torch.tensor([2])
    found, scores = script.evaluate(*given)
    assert asked == [(1, 0.0)]  # one response, greedy
    assert scores == [1, 0, 0, 0]
    assert found == {
        "eval/reward_mean": pytest.approx(0.25 + 0.35),
        "eval/accuracy_reward": 0.25,
        "eval/format_reward": pytest.approx(0.35),
        "eval/accuracy": 0.25,
        "eval/response_len": 4.0,
        "eval/eos_frac": 0.5,
        "eval/accuracy_lenient": 1.0,
    }
    # Grades stay grades.
    task.REWARDS = [format_reward]
    found, scores = script.evaluate(*given)
    assert found["eval/accuracy"] == pytest.approx(0.35) == sum(scores) / 4
    assert any(0 < score < 1 for score in scores)
