"""What all tests share: the scripts, and one CPU thread."""

import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real data and a real model, used where they are at hand
SCRIPTS = ["reinforce_baseline", "rloo", "grpo", "dr_grpo", "dapo", "ppo_rlhf"]
SCRIPTS += ["gspo", "remax", "grpo_offpolicy", "grpo_process", "grpo_multigpu", "grpo_lora"]
SCRIPTS += ["distill", "vapo", "grpo_tools"]
SMALL_MODEL, SMALL_JUDGE = str(ROOT / "tests" / "small"), str(ROOT / "tests" / "small-judge")
SMALL_TASK = str(ROOT / "tests" / "small-task")  # the first problems of assets/addition
# Files that take longest, run first, so that the two processes of the tests end at about the same time.
LONG = ["test_runs", "test_multigpu", "test_cuda", "test_whole_step", "test_loading"]

sys.path.insert(0, str(ROOT))
torch.set_num_threads(
    1
)  # models this small gain nothing from more, and lose much on a busy machine


def small_recipe(script):
    """The fields of Args that make of a script's bundled run one with the tests' own policy and problems: it costs a
    third, and is loaded in no time."""
    fields = {name: bundled for name, (_, bundled) in script.RECIPES.items()}
    fields["dataset"] = SMALL_TASK
    if Path(script.Args.model).name == "adder":
        fields["model"] = SMALL_MODEL
    if "reward_model" in fields:
        fields["reward_model"] = SMALL_JUDGE
    return fields


def small_flags(name):
    """small_recipe of the script of this name, for a command line."""
    fields = small_recipe(__import__(name)).items()
    return [x for name, value in fields for x in ("--" + name.replace("_", "-"), str(value))]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def pytest_addoption(parser):
    parser.addoption(
        "--golden",
        action="store_true",
        help="write tests/golden.json anew instead of comparing with it",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "scripts(*names): only of these is the tested text their own"
    )
    # Signals as in a terminal, also where the tests were started by nohup or in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_generate_tests(metafunc):
    """A test that asks for a script runs for each of them, or, with the mark, for those whose text differs there.

    What is shared is the same text, as test_siblings.py says, and is tested in grpo.py alone.
    """
    if "script" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("scripts")
        metafunc.parametrize("script", mark.args if mark else SCRIPTS, indirect=True)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


@pytest.fixture
def script(request):
    """The module of each script in turn."""
    return __import__(request.param)


@pytest.fixture(autouse=True)
def nothing_left():
    """A run leaves its signal handlers behind, and grpo_multigpu.py, if it ended early, the connection of processes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
