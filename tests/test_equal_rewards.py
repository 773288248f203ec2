"""Equal rewards teach nothing: their advantages are exactly 0, in every script and patch, and main moves no weight."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import small_recipe
from patched import load_patched
from scripts import SCRIPTS
from transformers import AutoModelForCausalLM

import first
import grpo_process
import ppo_rlhf
import reinforce_baseline

# float32 has no 0.05. Its sums of some of these numbers are rounded, and those of others aren't.
REWARDS = [step / 20 for step in range(-8, 30)]
SIZES = [2, 3, 4, 5, 7, 8, 16, 48, 64, 128]
# One argument, the rewards or returns of a group. The patches that don't change this function are left out.
ONE_ARGUMENT = [
    name
    for name in SCRIPTS
    if name not in ("reinforce_baseline", "remax", "distill", "self_distill")
]
ONE_ARGUMENT = [name for name in ONE_ARGUMENT if name not in ("ppo_rlhf", "vapo")]
PATCHES = ["maxrl", "reinforce_pp", "opo", "gdpo", "p3o", "copg"]


def groups():
    """Pairs of a description and equal rewards (2, G)."""
    for reward in REWARDS:
        for size in SIZES:
            yield f"reward {reward}, G {size}", torch.full((2, size), reward)


@pytest.mark.parametrize("name", ["first", *ONE_ARGUMENT])
def test_advantages_of_equal_rewards_are_exactly_0(name):
    script = first if name == "first" else __import__(name)
    for case, rewards in groups():
        assert (script.compute_advantages(rewards) == 0).all(), case


@pytest.mark.parametrize("name", PATCHES)
def test_patches_give_equal_rewards_exactly_0(name):
    patched = load_patched(name)
    for case, rewards in groups():
        more = []
        if name == "gdpo":
            rewards = torch.stack([rewards, rewards + 0.3])  # (K, B, G)
        if name == "opo":
            more = [torch.arange(1, rewards.numel() + 1).view_as(rewards)]  # lengths
        if name == "p3o":
            logratio = torch.linspace(-1, 1, rewards.numel()).view_as(rewards)
            found = patched.compute_advantages(SimpleNamespace(clip_eps=0.2), rewards, logratio)
        else:
            found = patched.compute_advantages(rewards, *more)
        assert (found == 0).all(), case


def test_one_equal_group_beside_another_one_is_exactly_0():
    patched = load_patched("gdpo")
    scores = torch.rand(2, 3, 8)  # (K, B, G)
    scores[:, 1] = torch.tensor([[0.3], [0.7]])
    assert (patched.compute_advantages(scores)[1] == 0).all()


@pytest.mark.parametrize("baseline", ["batch_mean", "moving_average"])
def test_the_baselines_of_equal_returns_are_exactly_these(baseline):
    args = reinforce_baseline.Args(baseline=baseline)
    for case, returns in groups():
        average = reinforce_baseline.mean_return(returns)
        for _ in range(5):  # steps with the same return
            found = reinforce_baseline.compute_baseline(args, returns, average)
            assert (reinforce_baseline.compute_advantages(returns, found) == 0).all(), case
            average = reinforce_baseline.update_average(average, returns)


def test_equal_step_rewards_are_exactly_0():
    for reward in REWARDS:
        steps = [[grpo_process.Step(3, reward)] * count for count in (2, 3, 1)]
        ends = [list(range(count)) for count in (2, 3, 1)]
        args = SimpleNamespace(max_new_tokens=4)
        assert (grpo_process.token_advantages(args, steps, ends) == 0).all(), reward


def test_whitening_equal_advantages_gives_exactly_0():
    mask = torch.arange(7) < torch.tensor([7, 3, 1])[:, None]  # (3, 7) bool
    for reward in REWARDS:
        advantages = torch.full(mask.shape, reward).masked_fill(~mask, 0.0)
        assert (ppo_rlhf.whiten(advantages, mask) == 0).all(), reward


def constant_reward(completions, **columns):
    return [0.3] * len(completions)


@pytest.mark.parametrize(
    "name",
    "grpo dr_grpo dapo gspo rloo reinforce_baseline remax grpo_offpolicy grpo_lora grpo_tools".split(),
)
def test_a_step_of_equal_rewards_moves_no_weight(name, monkeypatch, tmp_path):
    script = __import__(name)
    monkeypatch.setattr(script, "REWARDS", [constant_reward])
    fields = small_recipe(script) | dict(beta=0.0, num_steps=1, num_prompts=4, num_generations=8)
    fields |= dict(
        eval_size=2, save_every=0, runs_dir=str(tmp_path), run_name="run", warmup_updates=0
    )
    known = {field.name for field in dataclasses.fields(script.Args)}
    fields |= {key: 0.0 for key in ("tool_cost",) if key in known}
    fields |= {key: 1 for key in ("overlong_cache",) if key in known}
    args = script.Args(**{key: value for key, value in fields.items() if key in known})
    metrics = script.main(args)
    assert metrics["optim/grad_norm"] == 0.0 and metrics["optim/lr"] > 0
    before = AutoModelForCausalLM.from_pretrained(args.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[x], after[x]) for x in before)
