"""A real chat model: the default prompt earns rewards, and scripts train, resume and save it.

Needs the folder of SmolLM2-135M-Instruct in PLAINRL_REAL_MODEL, and takes two minutes. Otherwise all is skipped.
"""

import json
import os

import pytest
import torch
from conftest import DATA, ROOT, skip_without_engine
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from utils.rewards import lenient_accuracy_reward

FOLDER = os.environ.get("PLAINRL_REAL_MODEL")
pytestmark = pytest.mark.skipif(not FOLDER, reason="PLAINRL_REAL_MODEL names no folder")
SMALL = dict(
    model=FOLDER, dataset=str(ROOT / "assets" / "arithmetic"), examples=False, device="cpu"
)
SMALL |= dict(num_steps=2, num_prompts=2, num_generations=2, num_minibatches=2, max_new_tokens=12)
SMALL |= dict(eval_size=1, eval_every=0, save_every=1, gradient_checkpointing=False)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The folder of a reward model: the chat model with a random head of one score."""
    folder = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(0)  # of the head
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def train(script, reward_model, tmp_path):
    """Train the real model in a run of this name, and return the folder."""
    own = dict(teacher=FOLDER, reward_model=reward_model, context_column="answer")
    own |= dict(value_warmup_steps=1, max_teacher_tokens=200, overlong_cache=4)

    def call(name, **given):
        fields = vars(script.Args())
        given = {field: x for field, x in (SMALL | own | given).items() if field in fields}
        given |= dict(runs_dir=str(tmp_path), run_name=name)
        script.main(script.Args(**given))
        return tmp_path / name

    return call


@pytest.mark.scripts("grpo")
def test_the_default_prompt_earns_the_format_reward(script):
    """With the instructions of an older version, which described the format, this was 0.003 of 0.4."""
    args = script.Args(model=FOLDER, dataset=str(DATA / "gsm8k"), max_new_tokens=100, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model, eos_ids = script.load_model(args, tokenizer)
    task = script.load_task(args)
    train_data, _ = script.load_data(args, task, tokenizer)
    metrics, _ = script.evaluate(args, task, model, tokenizer, train_data[:6], eos_ids)
    assert metrics["eval/format_reward"] >= 0.15
    # A base model, which has no template, sees the examples in a plain text.
    tokenizer.chat_template = None
    plain_data, _ = script.load_data(args, task, tokenizer)
    metrics, _ = script.evaluate(args, task, model, tokenizer, plain_data[:6], eos_ids)
    assert metrics["eval/format_reward"] >= 0.1 and metrics["eval/eos_frac"] >= 0.5


@pytest.mark.scripts("ppo_rlhf")
def test_two_steps(script, train, monkeypatch):
    """Sampler and trainer agree, the first ratios are exactly 1, and the saved model still answers."""
    skip_without_engine(script)
    first_calls, policy_loss = [], script.policy_loss

    def watched(logprobs, *rest, **given):
        if script.__name__ not in ("distill", "self_distill") and not first_calls:
            first_calls.append((logprobs.detach(), rest[0]))
        return policy_loss(logprobs, *rest, **given)

    monkeypatch.setattr(script, "policy_loss", watched)
    run = train("run", learning_rate=1e-6, save_every=0)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3
    assert max(record["rollout/logprob_gap_max"] for record in records[1:]) < 1e-4
    for logprobs, old_logprobs in first_calls:
        assert torch.equal(logprobs, old_logprobs), "a ratio of the first pass isn't 1"

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert lenient_accuracy_reward([answer], ["5"]) == [1.0], answer


@pytest.mark.scripts("grpo")
def test_a_run_that_was_stopped_goes_on_bit_for_bit(script, train, tmp_path, monkeypatch):
    """The run stops after the checkpoint of its first step."""
    whole = train("whole")
    save_checkpoint = script.save_checkpoint

    def stop(*given):
        save_checkpoint(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        train("stopped")
    monkeypatch.setattr(script, "save_checkpoint", save_checkpoint)
    train("stopped")
    models = [
        AutoModelForCausalLM.from_pretrained(whole.parent / name / "model")
        for name in ("whole", "stopped")
    ]
    first, second = [model.state_dict() for model in models]
    assert all(torch.equal(first[name], second[name]) for name in first)
