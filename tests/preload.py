"""Imported by the process that runs are forked from (see `server` in test_runs.py)."""

import transformers.models.llama.modeling_llama  # noqa: F401
from conftest import SCRIPTS
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for name in SCRIPTS:
    __import__(name)
get_checkpoint_conversion_mapping("llama")  # a thousand patterns: half of a small run's time
