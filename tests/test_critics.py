"""The networks with one label of ppo_rlhf.py and vapo.py: values and scores, other families, and no dropout.

test_equations.py has the equations, and test_whole_step.py whole steps.
"""

import json
import shutil

import pytest
import torch
from conftest import SMALL_JUDGE, small_recipe, use_task
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3_5TextConfig,
    Qwen3_5TextForSequenceClassification,
)

import ppo_rlhf
import vapo


def tiny_classifier(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=None,
        # A large range gives different outputs at each position.
        initializer_range=0.3,
    )
    return LlamaForSequenceClassification(config).eval()


def ragged_rollout(seed=0):
    """Prompts and responses as lists, and as a padded Rollout. They also contain the padding token, 0."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for P, R in [(1, 6), (7, 1), (3, 4), (7, 6), (2, 2)]:
        ids = torch.randint(0, 30, (P + R,), generator=generator).tolist()
        # Pad, BOS and EOS have the same id, so the script can't compute masks from ids.
        ids[0] = ids[-1] = 0
        pairs.append((ids[:P], ids[P:]))
    responses = [response + [0] * (6 - len(response)) for _, response in pairs]
    response_mask = torch.arange(6) < torch.tensor([[len(response)] for _, response in pairs])
    rollout = ppo_rlhf.Rollout(
        prompts=[prompt for prompt, _ in pairs],
        response_ids=torch.tensor(responses),
        response_mask=response_mask,
        sampled_logprobs=torch.zeros(5, 6),
    )
    return pairs, rollout


def plain_outputs(network, pair):
    """The head's output after each token of prompt and response, from a forward pass of one sequence."""
    ids = torch.tensor([sum(pair, [])])
    with torch.no_grad():
        hidden = network.base_model(ids).last_hidden_state
        return network.score(hidden)[0, :, 0].tolist()


@pytest.mark.parametrize("bias", [False, True])
def test_values_are_those_of_a_plain_forward_pass_at_the_states_before_each_token(bias):
    network, (pairs, rollout) = tiny_classifier(), ragged_rollout()
    if bias:
        network.score = torch.nn.Linear(32, 1, bias=True)
        torch.nn.init.constant_(network.score.bias, 3.0)
    with torch.no_grad():
        values = ppo_rlhf.compute_values(network, rollout)
        scores = ppo_rlhf.compute_scores(network, rollout)
    assert values.shape == (5, 6) and values.dtype == torch.float32
    assert scores.shape == (5,) and scores.dtype == torch.float32
    for row, score, (prompt, response) in zip(values.tolist(), scores.tolist(), pairs, strict=True):
        expected = plain_outputs(network, (prompt, response))[len(prompt) - 1 :]
        assert [*row[: len(response)], score] == pytest.approx(expected, abs=1e-5)
        assert row[len(response) :] == [0.0] * (6 - len(response))


# ---- main


def run(tmp_path, **given):
    """Run main for one small step, and return its metrics."""
    fields = dict(num_steps=1, num_prompts=4, num_iterations=1, max_new_tokens=18, eval_size=2)
    fields |= dict(device="cpu", runs_dir=str(tmp_path), run_name="run")
    return ppo_rlhf.main(ppo_rlhf.Args(**small_recipe(ppo_rlhf) | fields | given))


def test_the_rules_only_say_what_is_right_where_a_reward_model_scores(tmp_path, monkeypatch):
    def rule(completions, answer, **columns):
        return [0.25] * len(completions)

    use_task(monkeypatch, ppo_rlhf, [rule])
    metrics = run(tmp_path / "judge")
    assert "rollout/score" in metrics and "rollout/rule" not in metrics
    assert metrics["rollout/accuracy"] == 0.25
    metrics = run(tmp_path / "rules", reward_model=None, missing_eos_penalty=0.0)
    assert "rollout/score" not in metrics and metrics["rollout/rule"] == 0.25
    assert metrics["rollout/reward_mean"] == 0.25


def test_a_value_network_of_another_family_has_rows_of_its_own(tmp_path, monkeypatch):
    """Here it has linear attention. Its values are those of single sequences."""
    judge = shutil.copytree(SMALL_JUDGE, tmp_path / "judge")
    torch.manual_seed(0)
    given = json.loads((judge / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id", "head_dim")
    shape = {name: given[name] for name in (*names, "num_attention_heads", "num_key_value_heads")}
    shape |= dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    shape |= dict(linear_num_key_heads=2, linear_num_value_heads=2)
    network = Qwen3_5TextForSequenceClassification(Qwen3_5TextConfig(**shape, num_labels=1))
    network.save_pretrained(judge)
    values = []
    compute_values = ppo_rlhf.compute_values

    def recorded_values(network, rollout):
        values.append((rollout, compute_values(network, rollout)))
        return values[-1][1]

    monkeypatch.setattr(ppo_rlhf, "compute_values", recorded_values)
    given = dict(num_generations=4, max_new_tokens=8, micro_batch_tokens=64)
    run(tmp_path, reward_model=str(judge), **given)
    rollout, found = values[0]
    for i, row in enumerate(found.tolist()):
        prompt = rollout.prompts[i]
        response = rollout.response_ids[i][rollout.response_mask[i]].tolist()
        expected = plain_outputs(network, (prompt, response))[len(prompt) - 1 : -1]
        assert row[: len(response)] == pytest.approx(expected, abs=1e-5)


def test_no_dropout_anywhere_under_gradient_checkpointing(tmp_path, monkeypatch):
    """transformers recomputes activations only in training mode. Dropout in this mode would make values random."""
    judge = shutil.copytree(SMALL_JUDGE, tmp_path / "judge")
    torch.manual_seed(0)
    vocab_size = json.loads((judge / "config.json").read_text())["vocab_size"]
    shape = dict(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    shape |= dict(pad_token_id=0, num_labels=1, resid_pdrop=0.5, embd_pdrop=0.5)
    GPT2ForSequenceClassification(GPT2Config(**shape)).save_pretrained(judge)
    calls, compute_values = [], ppo_rlhf.compute_values

    def twice(network, rollout):
        first, second = compute_values(network, rollout), compute_values(network, rollout)
        assert torch.equal(first, second)
        calls.append(network.training)
        return first

    monkeypatch.setattr(ppo_rlhf, "compute_values", twice)
    run(tmp_path, reward_model=str(judge), gradient_checkpointing=True)
    assert True in calls


def test_a_run_in_which_the_policy_never_moves_is_refused():
    args = vapo.Args(num_steps=1, value_warmup_steps=1)
    with pytest.raises(ValueError, match="--value-warmup-steps must be at least 0 and below"):
        vapo.main(args)
