"""variants/host_adam.diff: a run ends as one of the parent to the last bit, and a GPU needs less memory.

docs/gpu.md has the commands for grpo.py, and says what patch rejects for the other PARENTS.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess

import pytest
import torch
import tyro
from conftest import ROOT, count_gpus, run_on_gpu
from test_runs import (
    MANY_UPDATES,
    assert_same,
    assert_same_runs,
    make_args,
    read_jsonl,
    without_times,
)

SECTION = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
SECTION = SECTION.split("\n### All weights on a GPU of 24 GB\n")[1].split("\n## ")[0]
COMMANDS = "".join(re.findall(r"^```\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)).splitlines()
PARENTS = ["grpo", "dr_grpo", "rloo", "gspo", "dapo", "ppo_rlhf"]
# Train with grpo.py, and with host_adam.py, which is stopped after its first step and goes on. Print the peaks.
# The folder of this program has both scripts.
ON_GPU = """import gc, json, sys
sys.path += [{root!r}, {root!r} + "/tests"]
import conftest, torch
import grpo, host_adam

tops = []  # a peak before each reset
def held():
    tops.append(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()

def peak(script):
    fields = conftest.small_recipe(script) | dict(device="cuda", num_steps=3, num_prompts=4, num_generations=4)
    fields |= dict(num_minibatches=2, max_new_tokens=20, eval_size=2, save_every=1, gradient_checkpointing=True)
    fields |= dict(dtype="float16")
    gc.collect()
    before = held()
    tops.clear()
    script.main(script.Args(**fields, runs_dir=".", run_name="run_" + script.__name__))
    held()
    return max(tops) - before

def look(optimizer):
    for averages in optimizer.state.values():
        assert len(averages) == 3 and not any(x.is_cuda for x in averages.values())
    assert not any(x.is_cuda for x in copies[0].parameters())

copies, inference_copy = [], host_adam.inference_copy  # the first copy is the reference
def copy(model):
    copies.append(inference_copy(model))
    return copies[-1]

def save(folder, trained, *rest):
    look(trained["optimizer"])
    save_checkpoint(folder, trained, *rest)
    if stopped:
        raise KeyboardInterrupt

def load(args, folder, trained):
    before = held()
    found = load_checkpoint(args, folder, trained)
    assert torch.cuda.max_memory_allocated() == before, "the averages were on the GPU"
    look(trained["optimizer"])
    return found

def step(optimizer):
    before = held()
    host_step(optimizer)
    largest = max(x.numel() for group in optimizer.param_groups for x in group["params"])
    rest = 64 if torch.version.cuda is None else 2048  # a real GPU gives memory in blocks of 512 bytes
    assert torch.cuda.max_memory_allocated() - before < 8 * largest + rest, "more than one parameter's averages"

host_adam.inference_copy = copy
host_step, host_adam.HostAdam.step = host_adam.HostAdam.step, step
save_checkpoint, host_adam.save_checkpoint = host_adam.save_checkpoint, save
load_checkpoint, host_adam.load_checkpoint = host_adam.load_checkpoint, load
stopped = True
try:
    peak(host_adam)  # first, because CUDA's libraries take memory at their first use, and keep it
except KeyboardInterrupt:
    stopped = False
del copies[:]
found = [peak(grpo), peak(host_adam), sum(x.nbytes for x in copies[0].parameters())]
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the parents and the scripts that the page's command makes, and what patch printed for each."""
    folder = tmp_path_factory.mktemp("host_adam")
    for parent in PARENTS:
        shutil.copy(ROOT / f"{parent}.py", folder)
    for name in ("variants", "assets", "utils"):
        (folder / name).symlink_to(ROOT / name)
    printed = {}
    for parent in PARENTS:
        command = (
            COMMANDS[0]
            .replace("grpo.py", f"{parent}.py")
            .replace("host_adam.py", f"{made_name(parent)}.py")
        )
        options = dict(cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed[parent] = subprocess.run(shlex.split(command), **options).stdout
    # What the page says to do by hand.
    path = folder / "ppo_rlhf_host.py"
    path.write_text(
        path.read_text(encoding="utf-8").replace("torch.optim.Adam(", "HostAdam("), encoding="utf-8"
    )
    return folder, printed


def made_name(parent):
    return "host_adam" if parent == "grpo" else f"{parent}_host"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """For each parent, the folder of an undisturbed run."""
    runs = {}

    def call(name):
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp(name) / "run"
            train(__import__(name), runs[name])
        return runs[name]

    return call


def train(script, folder):
    """Three steps of four updates each, with a reference."""
    given = MANY_UPDATES | dict(num_steps=3, runs_dir=str(folder.parent), run_name=folder.name)
    script.main(make_args(script, **given))


def load(made, name):
    spec = importlib.util.spec_from_file_location(name, made[0] / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_command_rejects_only_what_the_page_says(made):
    """The docstring of another parent, and a hunk more in dapo.py (no reference) and ppo_rlhf.py (its optimizer)."""
    folder, printed = made
    assert COMMANDS[0] == "patch -o host_adam.py grpo.py variants/host_adam.diff"
    sentence = SECTION.split("It also fits ")[1].split(". ")[0]
    assert [name for name in re.findall(r"(\w+)\.py", sentence)] == PARENTS[1:]
    for parent, text in printed.items():
        name = made_name(parent)
        rejected = {"grpo": 0, "dapo": 2, "ppo_rlhf": 2}.get(parent, 1)
        counted = [f"{rejected} out of 5 hunks FAILED"] if rejected else []
        assert re.findall(r"\d out of \d hunks FAILED", text) == counted, text
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        assert "optimizer = HostAdam(" in text and "= torch.optim.Adam(" not in text, name
        assert text.count('ref_model.to("cpu")') == (parent != "dapo"), name
        rejected = folder / f"{name}.py.rej"
        assert not rejected.exists() or "@@ -1," in rejected.read_text(encoding="utf-8"), name


def test_the_command_is_accepted(made):
    (command,) = [x for x in COMMANDS if x.startswith("python")]
    script = load(made, "host_adam")
    args = tyro.cli(script.Args, args=shlex.split(command)[2:])
    assert args.model == "SmolLM2-1.7B-Instruct" and args.beta > 0


@pytest.mark.parametrize("parent", PARENTS)
def test_a_run_is_one_of_the_parent(made, finished, parent, tmp_path):
    train(load(made, made_name(parent)), tmp_path / "run")
    assert_same_runs(tmp_path / "run", finished(parent))
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert max(record["optim/grad_norm"] for record in records[1:]) > 0
    names = {"dapo": "policy/loss", "ppo_rlhf": "kl/response"}
    assert records[-1][names.get(parent, "kl/ref")] != 0


def test_a_stopped_run_goes_on(made, finished, tmp_path, monkeypatch):
    script = load(made, "host_adam")
    save_checkpoint = script.save_checkpoint

    def save(*given):
        save_checkpoint(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "save_checkpoint", save)
        train(script, tmp_path / "run")
    assert [x["step"] for x in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    train(script, tmp_path / "run")
    assert_same_runs(tmp_path / "run", finished("grpo"))


def test_on_a_gpu(made):
    """Between steps, averages and reference are on the host. Weights and metrics are those of grpo.py."""
    folder = made[0]
    (folder / "on_gpu.py").write_text(ON_GPU.format(root=str(ROOT)))
    done = run_on_gpu(["on_gpu.py"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE)
    with_grpo, with_host_adam, reference = json.loads(line)
    one, other = folder / "run_grpo", folder / "run_host_adam"
    records = [without_times(read_jsonl(run / "metrics.jsonl")) for run in (one, other)]
    states = [torch.load(run / "checkpoint.pt", map_location="cpu") for run in (one, other)]
    if count_gpus() is None:  # two runs on a real GPU may differ by rounding
        assert records[0] == records[1] and len(records[0]) == 4
        for name in ("model", "optimizer"):
            assert_same(*[state[name] for state in states])
    averages = states[0]["optimizer"]["state"].values()
    moved = reference + sum(x.nbytes for state in averages for x in state.values())
    # A real GPU's memory is given in blocks of 512 bytes.
    assert with_grpo - with_host_adam == pytest.approx(
        moved, rel=0.02 if count_gpus() is None else 0.2
    )
