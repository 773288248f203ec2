"""Equal rewards teach nothing: their advantages are exactly 0, in every script and patch, and main moves no weight.

After other steps, Adam's average gradient moves the weights without a gradient, as docs/algorithms.md says.
"""

import dataclasses

import pytest
import torch
from conftest import ROOT, load_patched, small_recipe, use_task
from scripts import SCRIPTS
from transformers import AutoModelForCausalLM

import grpo
import grpo_process
import ppo_rlhf
import reinforce_baseline

# float32 has no 0.05. Its sums of some of these numbers are rounded, and those of others aren't.
REWARDS = [step / 20 for step in range(-8, 30)]
GROUPS = [torch.full((2, size), x) for x in REWARDS for size in (2, 3, 4, 5, 7, 8, 16, 48, 64, 128)]
# These scripts' advantages don't compare the rewards of a group.
OTHER = ["reinforce_baseline", "remax", "distill", "self_distill", "ppo_rlhf", "vapo"]
# The patches that change compute_advantages.
PATCHES = ["reinforce_pp", "gdpo", "p3o"]


@pytest.mark.parametrize("name", ["first", *[name for name in SCRIPTS if name not in OTHER]])
def test_advantages_of_equal_rewards_are_exactly_0(name):
    script = __import__(name)
    for rewards in GROUPS:
        assert (script.compute_advantages(rewards) == 0).all(), rewards


@pytest.mark.parametrize("name", PATCHES)
def test_patches_give_equal_rewards_exactly_0(name):
    script = load_patched(name)
    for rewards in GROUPS:
        if name == "gdpo":
            rewards = torch.stack([rewards, rewards + 0.3])  # (K, B, G)
        if name == "p3o":
            logratio = torch.linspace(-1, 1, rewards.numel()).view_as(rewards)
            found = script.compute_advantages(rewards, logratio, clip_eps=0.2)
        else:
            found = script.compute_advantages(rewards)
        assert (found == 0).all(), rewards


def test_one_equal_group_beside_another_one_is_exactly_0():
    scores = torch.rand(2, 3, 8)  # (K, B, G)
    scores[:, 1] = torch.tensor([[0.3], [0.7]])
    assert (load_patched("gdpo").compute_advantages(scores)[1] == 0).all()


@pytest.mark.parametrize("baseline", ["batch_mean", "moving_average"])
def test_the_baselines_of_equal_returns_are_exactly_these(baseline):
    for returns in GROUPS:
        average = reinforce_baseline.mean_return(returns)
        for _ in range(5):  # steps with the same return
            found = reinforce_baseline.compute_baseline(returns, average, baseline)
            assert (reinforce_baseline.compute_advantages(returns, found) == 0).all(), returns
            average = reinforce_baseline.update_average(average, returns)


def test_equal_rewards_of_steps_and_tokens_are_exactly_0():
    ends = [[0, 1], [0, 1, 2], [0]]
    mask = torch.arange(7) < torch.tensor([7, 3, 1])[:, None]  # (3, 7) bool
    for reward in REWARDS:
        steps = [[grpo_process.Step(3, reward)] * len(own) for own in ends]
        assert (grpo_process.token_advantages(steps, ends, max_new_tokens=4) == 0).all(), reward
        advantages = torch.full(mask.shape, reward).masked_fill(~mask, 0.0)
        assert (ppo_rlhf.whiten(advantages, mask) == 0).all(), reward


def constant_reward(completions, **columns):
    return [0.3] * len(completions)


# One script for each loss without a critic, and those that compute other baselines or rewards.
@pytest.mark.scripts(
    "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_baseline", "remax", "grpo_tools"
)
def test_a_step_of_equal_rewards_moves_no_weight(script, monkeypatch, tmp_path):
    use_task(monkeypatch, script, [constant_reward])
    monkeypatch.setattr(script, "evaluate", lambda *call: ({"eval/accuracy": 0.0}, []))
    fields = small_recipe(script) | dict(beta=0.0, num_steps=1, num_prompts=4, num_generations=8)
    fields |= dict(eval_size=1, runs_dir=str(tmp_path), run_name="run", warmup_updates=0)
    fields |= dict(tool_cost=0.0, overlong_cache=1, max_resample=0)
    known = {field.name for field in dataclasses.fields(script.Args)}
    args = script.Args(**{key: value for key, value in fields.items() if key in known})
    metrics = script.main(args)
    assert metrics["optim/grad_norm"] == 0.0 and metrics["optim/lr"] > 0
    before = AutoModelForCausalLM.from_pretrained(args.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[x], after[x]) for x in before)


def test_without_a_gradient_adam_goes_on(monkeypatch, tmp_path):
    """Six ordinary steps, then three with equal rewards: the gradient is 0, and the updates only shrink slowly."""
    moves, step = [], torch.optim.Adam.step

    def recorded_step(self, *given):
        weights = [x for group in self.param_groups for x in group["params"]]
        before = [x.detach().clone() for x in weights]
        result = step(self, *given)
        pairs = zip(weights, before, strict=True)
        moves.append(sum((x.detach() - old).square().sum() for x, old in pairs).sqrt().item())
        return result

    def reward(completions, **columns):
        is_equal = len(moves) >= 6
        return [0.3 if is_equal else float(len(text)) for text in completions]

    monkeypatch.setattr(torch.optim.Adam, "step", recorded_step)
    use_task(monkeypatch, grpo, [reward])
    fields = small_recipe(grpo) | dict(beta=0.0, num_steps=9, num_prompts=4, num_generations=8)
    fields |= dict(eval_size=1, eval_every=0, warmup_updates=0, lr_schedule="constant_with_warmup")
    metrics = grpo.main(grpo.Args(**fields, runs_dir=str(tmp_path), run_name="run"))
    assert metrics["optim/grad_norm"] == 0.0 and len(moves) == 9
    assert moves[5] > moves[6] > moves[7] > moves[8] > 0.5 * moves[5]


def test_how_far_adam_goes_without_a_gradient():
    """The number of docs/algorithms.md, in steps of the learning rate."""
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer, places = torch.optim.Adam([weight], lr=1.0), []
    for gradient in [-1.0] * 8 + [0.0] * 3:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        places.append(weight.item())
    assert places[7] == pytest.approx(8)
    assert places[10] - places[7] == pytest.approx(2.39, abs=0.005)
    text = " ".join((ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split())
    assert "took eight full steps goes 2.4 steps further in the next three updates" in text
