"""The one list of the scripts, and what tests, benchmarks and tools need to know of each.

A new script stands in SCRIPTS, and in each list below it that is true of it. Its parent isn't
listed here: the docstring of the script names it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order of the README's tables.
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
    "grpo_multigpu",
    "grpo_lora",
    "distill",
    "vapo",
    "grpo_tools",
]
# These run as several processes.
MULTI_PROCESS = ["grpo_multigpu"]
# These train a value network beside the policy.
CRITICS = ["ppo_rlhf", "vapo"]
# In these, a step hands something of their own to the next step, or a step draws something of its
# own: the tests kill and resume them, and run them twice with one seed.
OWN_STATE = [
    "reinforce_baseline",
    "dapo",
    "ppo_rlhf",
    "remax",
    "grpo_offpolicy",
    "grpo_lora",
    "vapo",
]
# These have text of their own that makes or moves tensors: the tests run them on an emulated GPU.
OWN_TENSORS = [
    "dapo",
    "ppo_rlhf",
    "remax",
    "grpo_offpolicy",
    "grpo_process",
    "grpo_lora",
    "distill",
    "vapo",
    "grpo_tools",
]


def read_script(name: str) -> str:
    """The text of the script."""
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def parent_of(name: str) -> str | None:
    """The script that the docstring names as the parent; None for the root of the family."""
    docstring = read_script(name).split('"""')[1]
    parent = re.search(r"^Parent: (\w+)", docstring, re.MULTILINE).group(1)
    return None if parent == "none" else parent
