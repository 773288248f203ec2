"""The one list of the scripts, and the facts about them that tests, benchmarks and tools need.

Add a new script to SCRIPTS, and to each list below that is true of it. Don't add its parent: the docstring of the
script names it.
"""

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order of the README's table.
SCRIPTS = [
    "reinforce_baseline",
    "rloo",
    "grpo",
    "dr_grpo",
    "dapo",
    "ppo_rlhf",
    "gspo",
    "remax",
    "grpo_offpolicy",
    "grpo_process",
    "distill",
    "self_distill",
    "vapo",
    "grpo_tools",
    "grpo_lora",
    "grpo_multigpu",
    "grpo_vllm",
]
# These run as several processes.
MULTI_PROCESS = ["grpo_multigpu"]
# These sample with vLLM, which requirements.txt doesn't have. Where vLLM's build for CPUs isn't
# installed, the tests that sample are skipped. An emulated GPU has no vLLM.
NEEDS_VLLM = ["grpo_vllm"]
# These patches change the machine and no loss, so the tables and records of losses don't have them.
# tests/test_NAME.py compares their runs with those of the parents.
MACHINE_PATCHES = ["host_adam", "shared_prompts"]
# These train a value network beside the policy.
CRITICS = ["ppo_rlhf", "vapo"]
# These have code that only they have, and that makes or moves tensors. So the tests run them on an
# emulated GPU.
OWN_TENSORS = [
    "dapo",
    "ppo_rlhf",
    "remax",
    "grpo_offpolicy",
    "grpo_process",
    "grpo_lora",
    "distill",
    "self_distill",
    "vapo",
    "grpo_tools",
]


def can_sample(name: str) -> bool:
    """Whether the packages are installed that the script needs to sample on a CPU."""
    if name not in NEEDS_VLLM:
        return True
    # vLLM's build for GPUs comes with a torch for GPUs.
    has_vllm = importlib.util.find_spec("vllm") is not None
    return has_vllm and importlib.import_module("torch").version.cuda is None


def read_script(name: str) -> str:
    """The text of the script."""
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def parent_of(name: str) -> str | None:
    """The script that the docstring names as the parent; None for the root of the family."""
    docstring = read_script(name).split('"""')[1]
    parent = re.search(r"^Parent: (\w+)", docstring, re.MULTILINE).group(1)
    return None if parent == "none" else parent
