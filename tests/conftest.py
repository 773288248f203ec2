"""What all tests share: which scripts a test runs for, small models and tasks, --golden, and cleaning up.

Also: one CPU thread, the same kernels on every x86 machine, and the order of the files.
"""

import contextlib
import functools
import importlib.util
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# The recorded runs are the same on every x86 machine only if all use the same kernels. torch reads
# this when it is imported.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
for folder in ("addition", "arithmetic", "hints", "kinds", "sums"):
    sys.path.insert(0, str(ROOT / "assets" / folder))
for folder in ("benchmark", "tools", "report", "."):
    sys.path.insert(0, str(ROOT / folder))

from scripts import SCRIPTS, can_sample  # noqa: E402

DATA = ROOT / "tests" / "data"
SMALL_MODEL, SMALL_JUDGE = str(DATA / "policy"), str(DATA / "judge")
SMALL_TASK = str(DATA / "task")  # the first problems of assets/addition
# These files take longest. They run first, so that the two processes of pytest end together.
LONG = ["test_runs", "test_cuda", "test_whole_step", "test_report", "test_sampling"]
LONG += [
    "test_exercises",
    "test_multigpu",
    "test_math_reward",
    "test_errors",
    "test_grpo_tools",
    "test_loading",
]

# More threads don't make such small models faster, and on a busy machine they make them slower.
threads = os.environ.get("PLAINRL_THREADS", "1")
torch.set_num_threads(int(threads))
os.environ["OMP_NUM_THREADS"] = threads  # for the programs that the tests start


def read_table(name):
    """The rows of a table of answers in this folder: (heading, first word, rest of the line)."""
    heading, rows = "", []
    for line in (ROOT / "tests" / name).read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line and not line.startswith("# "):
            rows.append((heading, *line.split(None, 1)))
    return rows


FOLDERS = []  # of patched scripts, removed when the tests end


def load_patched(name: str):
    """The module of a patch of variants/."""
    patch = ROOT / "variants" / f"{name}.diff"
    parent = patch.read_text(encoding="utf-8").split()[1]
    FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(FOLDERS[-1].name)
    for part in ("assets", "utils"):
        (folder / part).symlink_to(ROOT / part)
    path = folder / f"{name}.py"
    command = ["patch", "-s", "--fuzz=0", "-o", path, ROOT / parent, patch]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{done.stdout}run tools/siblings.py --write"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def patched_by(patch: str, parent: str):
    """The module that a patch for another parent makes of this one. patch may reject the docstring alone."""
    FOLDERS.append(tempfile.TemporaryDirectory())
    folder, name = Path(FOLDERS[-1].name), f"{parent}_{patch}"
    (folder / "utils").symlink_to(ROOT / "utils")
    shutil.copy(ROOT / f"{parent}.py", folder)
    command = ["patch", "-o", f"{name}.py", f"{parent}.py", ROOT / "variants" / f"{patch}.diff"]
    printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True).stdout
    is_parent = f"--- {parent}.py\n" in (ROOT / "variants" / f"{patch}.diff").read_text("utf-8")
    failed = re.findall(r"(\d) out of \d hunks FAILED", printed)
    assert failed == ([] if is_parent else ["1"]), printed
    assert is_parent or "\n@@ -1," in (folder / f"{name}.py.rej").read_text("utf-8"), printed
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BUNDLED = __import__(parent).BUNDLED  # whose folders are those of the repository
    return module


def small_recipe(script):
    """The fields of Args that train the tests' own policy on the tests' own problems.

    Such a run costs a third of the script's bundled run, and loads at once.
    """
    general = vars(script.Args())
    fields = {name: x for name, x in vars(script.BUNDLED).items() if x != general[name]}
    fields["dataset"] = SMALL_TASK
    if Path(script.BUNDLED.model).name in ("adder", "student"):
        fields["model"] = SMALL_MODEL
    if "context_column" in fields:
        fields["context_column"] = "answer"  # these problems have no hints
    if "reward_model" in fields:
        fields["reward_model"] = SMALL_JUDGE
    return fields


def default_task(script):
    """The module that this script makes of its default --task."""
    return script.load_task(script.BUNDLED)


def use_task(monkeypatch, script, rewards, **others):
    """Let the script's main take these REWARDS, and other attributes of a task, instead of the file's."""
    task = default_task(script)
    task.REWARDS = rewards
    for name, value in others.items():
        setattr(task, name, value)
    monkeypatch.setattr(script, "load_task", lambda args: task)
    return task


def small_flags(name):
    """small_recipe of the script of this name, as flags of a command line."""
    flags = []
    for field, value in small_recipe(__import__(name)).items():
        flag = field.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def skip_without_engine(script):
    """Skip a test that samples, if this script samples with vLLM and vllm isn't installed."""
    if not can_sample(script.__name__):
        pytest.skip("vllm is not installed")


EMULATED = ROOT / "tests" / "emulated_cuda"


@functools.cache
def count_gpus() -> int | None:
    """How many GPUs torch sees. None: it's built without them, so one can be emulated."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, env=with_gpus(), stdout=subprocess.PIPE, check=True).stdout)


def with_gpus() -> dict[str, str]:
    """The environment of a program that may use the GPUs."""
    found = {name: x for name, x in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    given = os.environ["PLAINRL_GPUS"]
    return found if given == "all" else found | {"CUDA_VISIBLE_DEVICES": given}


def run_on_gpu(lines, folder, **environment):
    """Run command lines in a process with a GPU, or with an emulated one. Skip the test if there is neither."""
    gpus, environment = count_gpus(), with_gpus() | environment
    if gpus == 0 or gpus is None and (shutil.which("g++") is None or sys.platform != "linux"):
        pytest.skip(
            "torch sees no GPU; emulating one needs Linux, g++, and a torch built without CUDA"
        )
    if gpus is None:
        device = runpy.run_path(str(EMULATED / "__main__.py"))["build"]()
        environment["LD_PRELOAD"] = str(device)  # else the emulator would start itself again
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, EMULATED, *lines]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def free_port() -> int:
    """A port below those that the system gives to connections.

    A process that waits for rank 0 connects again and again. From a port of the system's range it can connect to
    itself, and then it waits for ever.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):  # the port is in use
            listener.bind(("127.0.0.1", port))
            return port


def pytest_addoption(parser):
    parser.addoption(
        "--golden",
        action="store_true",
        help="write tests/golden.json instead of comparing with it",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "scripts(*names): run the test for these scripts alone")
    # The tests may run in the background, where Python ignores SIGINT. They need it as in a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # All tests run on the CPU, except those that use run_on_gpu, which needs the value from before. So torch must see
    # no GPU, also in the programs that the tests start.
    os.environ.setdefault("PLAINRL_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_generate_tests(metafunc):
    """Run a test that has the fixture `script` once for each script.

    The mark @pytest.mark.scripts("grpo") chooses among them. Text that all scripts share is the
    same in all, as test_siblings.py checks, so that its tests run for grpo.py alone. Other scripts
    are added where their own text plays a part.
    """
    if "script" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("scripts")
        names = mark.args if mark else SCRIPTS
        metafunc.parametrize("script", names, indirect=True)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


@pytest.fixture
def script(request):
    """The module of each script in turn."""
    return __import__(request.param)


@pytest.fixture(autouse=True)
def nothing_left():
    """Close the connection of grpo_multigpu.py, which a failed test leaves open."""
    yield
    # vLLM closes its own connection, and fails if somebody else has closed it.
    if torch.distributed.is_initialized() and "vllm" not in sys.modules:
        torch.distributed.destroy_process_group()
