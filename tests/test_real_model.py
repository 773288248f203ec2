"""A real chat model: the default prompt earns rewards, and ppo_rlhf.py trains and saves it.

Needs the folder of SmolLM2-135M-Instruct in PLAINRL_REAL_MODEL, and takes two minutes. Otherwise all is skipped.
"""

import json
import os

import pytest
import torch
from conftest import REAL, ROOT
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import grpo
import ppo_rlhf
from utils.rewards import lenient_accuracy_reward

FOLDER = os.environ.get("PLAINRL_REAL_MODEL")
pytestmark = pytest.mark.skipif(not FOLDER, reason="PLAINRL_REAL_MODEL names no folder")
SMALL = dict(
    model=FOLDER, dataset=str(ROOT / "assets" / "arithmetic"), examples=False, device="cpu"
)
SMALL |= dict(num_steps=2, num_prompts=2, num_generations=2, num_minibatches=2, max_new_tokens=12)
SMALL |= dict(eval_size=1, eval_every=0, save_every=0, gradient_checkpointing=False)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The folder of a reward model: the chat model with a random head of one score."""
    folder = tmp_path_factory.mktemp("reward-model")
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return str(folder)


def test_the_default_prompt_earns_the_format_reward():
    """With the instructions of an older version, which described the format, this was 0.003 of 0.4."""
    args = grpo.Args(model=FOLDER, dataset=str(REAL / "gsm8k"), max_new_tokens=100, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model, eos_ids = grpo.load_model(args, tokenizer)
    train_data, _ = grpo.load_data(args, tokenizer)
    metrics = grpo.evaluate(args, model, tokenizer, train_data[:6], eos_ids)
    assert metrics["eval/format_reward"] >= 0.15
    # A base model, which has no template, sees the examples in a plain text.
    tokenizer.chat_template = None
    plain_data, _ = grpo.load_data(args, tokenizer)
    metrics = grpo.evaluate(args, model, tokenizer, plain_data[:6], eos_ids)
    assert metrics["eval/format_reward"] >= 0.1 and metrics["eval/eos_frac"] >= 0.5


def test_two_steps(reward_model, monkeypatch, tmp_path):
    """Sampler and trainer agree, the first ratios are exactly 1, and the saved model still answers."""
    calls, policy_loss = [], ppo_rlhf.policy_loss

    def watched(args, logprobs, old_logprobs, *rest, **given):
        calls.append((logprobs.detach(), old_logprobs))
        return policy_loss(args, logprobs, old_logprobs, *rest, **given)

    monkeypatch.setattr(ppo_rlhf, "policy_loss", watched)
    given = SMALL | dict(reward_model=reward_model, runs_dir=str(tmp_path), run_name="run")
    ppo_rlhf.main(ppo_rlhf.Args(**given, learning_rate=1e-6))
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3
    assert max(record["rollout/logprob_gap_max"] for record in records[1:]) < 1e-4
    assert torch.equal(*calls[0]), "a ratio of the first pass isn't 1"

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert lenient_accuracy_reward([answer], ["5"]) == [1.0], answer
