"""Gemma 3 270M with its published weights, beyond its window of 512 tokens.

It runs if the environment variable PLAINRL_REAL_GEMMA names a folder with the model. It takes a minute and 4 GB.
"""

import os

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer

import grpo

FOLDER = os.environ.get("PLAINRL_REAL_GEMMA")
pytestmark = pytest.mark.skipif(not FOLDER, reason="PLAINRL_REAL_GEMMA names no folder")


def test_beyond_its_window_gemma_samples_and_trains_what_a_plain_forward_computes():
    sizes = dict(max_prompt_tokens=560, max_new_tokens=40)
    args = grpo.Args(model=FOLDER, device="cpu", gradient_checkpointing=False, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model, eos_ids = grpo.load_model(args, tokenizer)
    assert model.config.sliding_window == 512
    ids = tokenizer((ROOT / "docs" / "train.md").read_text(encoding="utf-8")).input_ids
    # The window of the first prompt ends within the prompt. That of the second one ends within the response.
    problems = [{"prompt_ids": ids[:560]}, {"prompt_ids": ids[:500]}]
    torch.manual_seed(1)
    rollout = grpo.sample_responses(args, model, problems, 1, 1.0, eos_ids)
    assert rollout.response_mask.sum() > 40
    with torch.no_grad():
        recomputed = grpo.compute_logprobs(model, rollout, 1.0)
        # All layers see everything here, so this would be another result.
        model.config.sliding_window, window = 4096, model.config.sliding_window
        assert (grpo.compute_logprobs(model, rollout, 1.0) - recomputed).abs().max() > 0.01
        model.config.sliding_window = window
        model.set_attn_implementation("eager")
        for i in range(2):
            prompt = torch.tensor(rollout.prompts[i])
            response = rollout.response_ids[i][rollout.response_mask[i]]
            text = torch.cat([prompt, response])[None]
            logits = model(text, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
            expected = logits.log_softmax(1).gather(1, response[:, None])[:, 0]
            for found in (rollout.sampled_logprobs[i], recomputed[i]):
                assert (found[rollout.response_mask[i]] - expected).abs().max() < 1e-4
    gap = (rollout.sampled_logprobs - recomputed).abs()[rollout.response_mask]
    print(f"gap {gap.mean():.1e}, largest {gap.max():.1e}")
