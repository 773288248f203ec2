"""What all tests share: the scripts, small models, and a few CPU threads."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real data and a real model, used where they are at hand
SCRIPTS = ["grpo", "dr_grpo", "rloo", "reinforce_baseline"]

sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # models this small gain nothing from more, and lose much on a busy machine


@pytest.fixture(params=SCRIPTS)
def script(request):
    """The module of each script in turn."""
    return __import__(request.param)
