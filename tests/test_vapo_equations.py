"""vapo.py's lambda by length, decoupled GAE and loss on right responses, and its warm-up in main.

test_whole_step.py has whole steps.
"""

import json
import math

import pytest
import torch
from conftest import SMALL_MODEL, small_recipe
from test_ppo_equations import counted, ragged, same, slow_gae

import ppo_rlhf
import vapo

# ---- the reward at the end


def test_the_reward_stands_at_the_last_token():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = vapo.terminal_rewards(torch.tensor([1.4, -0.5], dtype=torch.float64), mask)
    same(rewards, [[0.0, 0.0, 1.4], [-0.5]], mask)
    # These shapes would broadcast silently.
    for scores in (torch.zeros(2, 1), torch.zeros(1)):
        with pytest.raises(AssertionError):
            vapo.terminal_rewards(scores, mask)


# ---- Length-Adaptive GAE


@pytest.mark.parametrize(
    ("alpha", "length", "expected"),
    [
        (0.05, 1000, 0.98),  # 1 - 1 / 50
        (0.05, 100, 0.8),
        # PPO's fixed lambda of 0.95 fits 400 tokens.
        (0.05, 400, 0.95),
        # alpha l = 1: only the next delta counts.
        (0.05, 20, 0.0),
        (0.05, 7, 0.0),  # the formula is negative here
        (1.0, 20, 0.95),
        (0.5, 3, 1 / 3),
    ],
)
def test_lambda_by_hand(alpha, length, expected):
    mask = torch.arange(1000)[None] < length  # (1, 1000)
    result = vapo.adaptive_lambda(vapo.Args(gae_alpha=alpha), mask)
    assert result.tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize(("alpha", "length"), [(0.05, 40), (0.05, 900), (0.3, 50), (2.0, 8)])
def test_the_weights_of_the_deltas_add_up_to_alpha_times_the_length(alpha, length):
    """The formula follows from this condition: 1 + lambda + lambda^2 + ... = alpha l."""
    mask = torch.ones(1, length, dtype=torch.bool)
    value = vapo.adaptive_lambda(vapo.Args(gae_alpha=alpha), mask).double().item()
    total = math.fsum(value**k for k in range(100_000))
    assert total == pytest.approx(alpha * length, rel=1e-4)


# ---- Decoupled GAE


def test_gae_by_hand():
    # With values 1, 2, 3, a final reward of 8 and gamma 1, the deltas are 1, 1, 5.
    # With lambda 1/2 the advantages are 1 + 0.5 * 3.5, 1 + 0.5 * 5, 5.
    mask = torch.tensor([[True, True, True]])
    rewards = vapo.terminal_rewards(torch.tensor([8.0]), mask).double()
    values = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    args = vapo.Args(gae_alpha=2 / 3)
    policy_lambda = vapo.adaptive_lambda(args, mask)
    assert policy_lambda.tolist() == pytest.approx([0.5])
    same(vapo.compute_gae(args, rewards, values, mask, policy_lambda), [[2.75, 3.5, 5.0]], mask)
    same(vapo.discounted_returns(args, rewards, mask), [[8.0, 8.0, 8.0]], mask)
    # With gamma 1/2 a reward halves with every token before it.
    args = vapo.Args(gamma=0.5)
    same(vapo.discounted_returns(args, rewards, mask), [[2.0, 4.0, 8.0]], mask)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_gae_with_a_lambda_of_each_response_against_the_sum_of_deltas(seed, gamma):
    mask, (rewards, values) = ragged(seed, 2)
    args = vapo.Args(gamma=gamma, gae_alpha=0.4)
    lambdas = [max(0.0, 1 - 1 / (0.4 * int(row.sum()))) for row in mask]
    assert len(set(lambdas)) > 1 and 0.0 in lambdas
    policy_lambda = vapo.adaptive_lambda(args, mask).double()
    advantages = vapo.compute_gae(
        args, rewards, values, mask, torch.tensor(lambdas, dtype=torch.float64)
    )
    rows = zip(counted(rewards, mask), counted(values, mask), lambdas, strict=True)
    same(advantages, [slow_gae(r, v, gamma, x) for r, v, x in rows], mask)
    assert policy_lambda.tolist() == pytest.approx(lambdas, abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_returns_are_monte_carlo_returns(gamma):
    """The returns also equal advantage plus value of GAE with lambda 1, for any values."""
    mask, (rewards, values, others) = ragged(3, 3)
    args = vapo.Args(gamma=gamma)
    expected = [
        [math.fsum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))]
        for row in counted(rewards, mask)
    ]
    same(vapo.discounted_returns(args, rewards, mask), expected, mask)
    for guess in (values, others):
        advantages = vapo.compute_gae(args, rewards, guess, mask, torch.ones(5).double())
        same(advantages + guess.masked_fill(~mask, 0.0), expected, mask)


def test_returns_do_not_modify_the_rewards_and_refuse_other_shapes():
    mask, (rewards,) = ragged(8, 1)
    before = rewards.clone()
    vapo.discounted_returns(vapo.Args(), rewards, mask).add_(1.0)
    assert torch.equal(before.nan_to_num(), rewards.nan_to_num())
    with pytest.raises(AssertionError):
        vapo.discounted_returns(vapo.Args(), rewards[:, :1], mask)


@pytest.mark.parametrize("value", [0.0, 0.7, 1.0])
def test_one_lambda_for_all_is_the_parents_gae(value):
    mask, (rewards, values) = ragged(4, 2)
    lambdas = torch.full((5,), value, dtype=torch.float64)
    mine = vapo.compute_gae(vapo.Args(), rewards, values, mask, lambdas)
    args = ppo_rlhf.Args(gae_lambda=value)
    theirs, returns = ppo_rlhf.compute_gae(args, rewards, values, mask)
    assert torch.equal(mine, theirs)
    if value == 1.0:
        assert torch.allclose(vapo.discounted_returns(vapo.Args(), rewards, mask), returns)


def test_lambdas_of_a_shape_that_would_broadcast_are_refused():
    mask = torch.ones(3, 3, dtype=torch.bool)
    for lambdas in (torch.ones(1), torch.ones(3, 1), torch.tensor(1.0)):
        with pytest.raises(AssertionError):
            vapo.compute_gae(vapo.Args(), torch.zeros(3, 3), torch.zeros(3, 3), mask, lambdas)


# ---- the language-modelling loss on right responses


def test_nll_loss_by_hand():
    # The first response (2 tokens) and the third (1 token) are right: -(-1 - 2 - 6) / 3 = 3.
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [-4.0, -5.0], [-6.0, math.nan]], dtype=torch.float64)
    logprobs.requires_grad_()
    is_right = torch.tensor([True, False, True])
    loss = vapo.nll_loss(logprobs, is_right, mask, 3)
    loss.backward()
    assert loss.item() == pytest.approx(3.0)
    expected = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [-1.0, 0.0]]).double() / 3
    assert torch.allclose(logprobs.grad, expected)


def test_slices_of_the_nll_loss_add_up_to_a_slow_sum():
    mask, (logprobs,) = ragged(5, 1)
    is_right = torch.tensor([True, False, True, True, False])
    tokens = sum(int(row.sum()) for row, right in zip(mask, is_right, strict=True) if right)
    total = 0.0
    for row, right in zip(counted(logprobs, mask), is_right.tolist(), strict=True):
        total -= math.fsum(row) * right
    parts = [
        vapo.nll_loss(logprobs[i], is_right[i], mask[i], tokens) for i in ([0], [4, 1], [2, 3])
    ]
    assert sum(parts).item() == pytest.approx(total / tokens)


def test_where_no_response_is_right_there_is_no_nll_loss():
    mask, (logprobs,) = ragged(6, 1)
    logprobs.requires_grad_()
    wrong = torch.zeros(5, dtype=torch.bool)
    loss = vapo.nll_loss(logprobs, wrong, mask, wrong.sum())
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all()


# ---- main


def run(tmp_path, **given):
    """Run main on the bundled task for a few small steps. Return the records of its metrics and samples."""
    fields = dict(num_steps=3, num_prompts=4, num_generations=4, eval_size=2, max_new_tokens=24)
    fields |= dict(runs_dir=str(tmp_path), run_name="run", device="cpu", save_every=1)
    vapo.main(vapo.Args(**small_recipe(vapo) | fields | given))
    return [
        [json.loads(line) for line in (tmp_path / "run" / f"{name}.jsonl").open()]
        for name in ("metrics", "samples")
    ]


def test_in_the_warm_up_the_policy_stays_and_the_values_learn(tmp_path, monkeypatch):
    states, save = [], torch.save

    def watched_save(content, file):
        names = ("model", "value_model")
        states.append([{k: x.clone() for k, x in content[name].items()} for name in names])
        save(content, file)

    has_graph, compute_logprobs = [], vapo.compute_logprobs

    def watched_logprobs(*call):
        logprobs = compute_logprobs(*call)
        has_graph.append(logprobs.requires_grad)
        return logprobs

    monkeypatch.setattr(torch, "save", watched_save)
    monkeypatch.setattr(vapo, "compute_logprobs", watched_logprobs)
    metrics, _ = run(tmp_path, value_warmup_steps=2, num_minibatches=2, warmup_updates=0)
    # Each step computes the old log-probabilities of two minibatches. The third step also has two updates of the
    # policy. In the pretraining the policy needs no further forward pass.
    assert has_graph == [False] * 6 + [True] * 2
    start = vapo.AutoModelForCausalLM.from_pretrained(SMALL_MODEL).state_dict()
    policies, critics = zip(*states, strict=True)
    same_as_start = [all(torch.equal(state[k], start[k]) for k in start) for state in policies]
    assert same_as_start == [True, True, False]
    assert all(
        any(not torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(critics[:-1], critics[1:], strict=True)
    )
    assert [record["optim/grad_norm"] > 0 for record in metrics[1:]] == [False, False, True]
    # Nothing of the policy's loss is logged before it exists.
    policy = [[name for name in record if name.startswith("policy/")] for record in metrics[1:]]
    assert policy[0] == policy[1] == [] and "policy/loss" in policy[2]
    assert all(record["value/loss"] > 0 for record in metrics[1:])


def test_a_run_in_which_the_policy_never_moves_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="--value-warmup-steps must be at least 0 and below --num-steps"
    ):
        run(tmp_path, num_steps=1, value_warmup_steps=1)


def test_the_advantages_follow_from_what_is_written(tmp_path):
    """The test recomputes the advantages from the recorded values and rewards: delta, lambda by length, whitening."""
    metrics, samples = run(tmp_path, value_warmup_steps=1, gae_alpha=0.1, value_learning_rate=1e-2)
    for step in (1, 2, 3):
        mine, raw = [s for s in samples if s["step"] == step], []
        lambdas = []
        for sample in mine:
            for reward, values in zip(sample["rewards"], sample["values"], strict=True):
                lambdas.append(max(0.0, 1 - 1 / (0.1 * len(values))))
                rewards = [0.0] * (len(values) - 1) + [reward]
                raw.append(slow_gae(rewards, values, 1.0, lambdas[-1]))
        flat = [x for row in raw for x in row]
        mean = math.fsum(flat) / len(flat)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat) + 1e-8)
        written = [row for sample in mine for row in sample["advantages"]]
        for row, expected in zip(written, raw, strict=True):
            assert row == pytest.approx([(x - mean) / std for x in expected], abs=1e-4)
        mean_lambda = math.fsum(lambdas) / len(lambdas)
        assert metrics[step]["rollout/lambda"] == pytest.approx(mean_lambda, abs=1e-5)


def test_with_equal_rewards_there_is_nothing_to_explain(tmp_path):
    """All responses are cut, so all returns are 0. The explained variance is no ratio of rounding errors."""
    metrics, samples = run(tmp_path, num_steps=2, value_warmup_steps=1, max_new_tokens=2)
    assert len({reward for sample in samples for reward in sample["rewards"]}) == 1
    assert not any(math.isfinite(record["value/explained_var"]) for record in metrics[1:])
