"""The equations that gspo.py, remax.py, grpo_offpolicy.py and grpo_process.py add to their parents'.

Like test_equations.py, these tests use numbers worked by hand, slow float64 loops and identities.
"""

import itertools
import json
import math

import pytest
import torch
from conftest import ROOT, SHARED, SMALL_MODEL, small_recipe
from test_equations import make_args, ragged_batch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo
import grpo_offpolicy
import grpo_process
import gspo
import reinforce_baseline
import remax

ADDER = ROOT / "assets" / "adder"


def loss_and_gradient(script, args, logprobs, old, ref, advantages, mask):
    """The loss of one whole minibatch, the gradient (n, R) and the stats."""
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, stats = script.policy_loss(args, logprobs, old, ref, advantages, mask, num_seqs=len(mask))
    loss.backward()
    return loss.item(), logprobs.grad, stats


# ---- gspo


@pytest.mark.parametrize(
    ("low", "high", "advantage", "loss", "gradient"),
    [
        # The two tokens have ratios 1.2 and 0.9, so s = sqrt(1.08) = 1.03923. Each token's gradient
        # is -s A / 2.
        (0.1, 0.1, 2.0, -2 * 1.08**0.5, -(1.08**0.5)),
        (0.1, 0.1, -2.0, 2 * 1.08**0.5, 1.08**0.5),
        # The ratio is above the clip range, so the gradient is 0.
        (0.1, 0.02, 2.0, -2 * 1.02, 0.0),
        # With a negative advantage only the lower bound clips.
        (0.1, 0.02, -2.0, 2 * 1.08**0.5, 1.08**0.5),
    ],
)
def test_gspo_by_hand(low, high, advantage, loss, gradient):
    old = torch.tensor([[-1.0, -2.0, 5.0]], dtype=torch.float64)
    logprobs = old + torch.tensor([[1.2, 0.9, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    args = make_args(gspo, beta=0.0, clip_eps_low=low, clip_eps_high=high)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    value, slope, stats = loss_and_gradient(gspo, args, logprobs, old, None, advantages, mask)
    assert value == pytest.approx(loss, abs=1e-12)
    assert slope.tolist()[0] == pytest.approx([gradient, gradient, 0.0], abs=1e-12)
    # There is one sequence, so clip_frac is 1 or 0.
    assert stats["policy/clip_frac"] == stats["policy/clip_frac_high"] == (high < 0.039)
    assert stats["policy/clip_frac_low"] == 0
    # Each of the two tokens has the ratio of the sequence.
    assert stats["policy/ratio_mean"].item() == pytest.approx(2 * 1.08**0.5, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_gspo_within_a_wide_range_against_a_slow_loop(seed):
    logprobs, old, _, advantages, mask = ragged_batch(seed)
    args = make_args(gspo, beta=0.0, clip_eps_low=0.3, clip_eps_high=0.5)
    value, slope, stats = loss_and_gradient(gspo, args, logprobs, old, None, advantages, mask)
    total, clipped = 0.0, 0
    for i in range(6):
        length = int(mask[i].sum())
        s = math.exp(math.fsum((logprobs[i, t] - old[i, t]).item() for t in range(length)) / length)
        A = advantages[i].item()
        total -= min(s * A, min(max(s, 0.7), 1.5) * A) / 6
        clipped += s < 0.7 or s > 1.5
        # An unclipped sequence's gradient is s A / |o| times the summed gradients of its
        # log-probabilities.
        active = s < 1.5 if A > 0 else s > 0.7
        assert slope[i, :length].tolist() == pytest.approx(
            [-active * s * A / length / 6] * length, abs=1e-12
        )
        assert (slope[i, length:] == 0).all()
    assert value == pytest.approx(total, abs=1e-12)
    assert 0 < clipped < 6 and stats["policy/clip_frac"] == clipped


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gspo_with_one_token_per_response_is_grpo(beta):
    logprobs, old, ref, advantages, mask = (x[:, :1] for x in ragged_batch(1))
    fields = dict(beta=beta, clip_eps=0.2, clip_eps_low=0.2, clip_eps_high=0.2)
    results = [
        loss_and_gradient(
            s, make_args(s, **fields), logprobs, old, ref if beta else None, advantages, mask
        )
        for s in (grpo, gspo)
    ]
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-12)
    for name in ("policy/clip_frac", "policy/approx_kl", "policy/ratio_mean", "policy/entropy"):
        assert float(results[0][2][name]) == pytest.approx(float(results[1][2][name]))


def test_gspo_at_the_old_policy_has_the_gradient_of_grpo():
    logprobs, _, ref, advantages, mask = ragged_batch(2)
    same = logprobs.detach().clone()
    results = [
        loss_and_gradient(s, make_args(s, beta=0.1), same, same, ref, advantages, mask)[1]
        for s in (grpo, gspo)
    ]
    assert torch.allclose(*results, atol=1e-12)
    assert results[0].abs().max() > 0.01


# ---- remax


def test_remax_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0], [1.4, 0.2]], dtype=torch.float64)
    greedy = torch.tensor([0.25, 1.4], dtype=torch.float64)
    advantages = remax.compute_advantages(make_args(remax), rewards, greedy)
    assert [x for row in advantages.tolist() for x in row] == pytest.approx(
        [0.75, -0.25, 0.0, -1.2]
    )
    for i, j in itertools.product(range(2), range(2)):
        assert advantages[i, j].item() == rewards[i, j].item() - greedy[i].item()
    for bad in (greedy[:, None], torch.tensor(0.5), torch.zeros(3)):
        with pytest.raises(AssertionError):
            remax.compute_advantages(make_args(remax), rewards, bad)


def test_remax_with_equal_greedy_rewards_is_reinforce_with_that_baseline():
    rewards = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    greedy = torch.full((5,), 0.3, dtype=torch.float64)
    mine = remax.compute_advantages(make_args(remax), rewards, greedy)
    assert torch.equal(
        mine, reinforce_baseline.compute_advantages(make_args(reinforce_baseline), rewards, 0.3)
    )


def test_the_greedy_baseline_leaves_the_gradient_unbiased():
    """With one prompt and three responses of one token, the expected gradient equals the exact gradient."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.4, 0.2], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    greedy = rewards[logits.argmax()].view(1)
    expected = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        logprobs = logits.log_softmax(0)[token].view(1, 1)
        advantages = remax.compute_advantages(make_args(remax), rewards[token].view(1, 1), greedy)
        one = torch.ones(1, 1, dtype=torch.bool)
        loss, _ = remax.policy_loss(
            make_args(remax, beta=0.0),
            logprobs,
            logprobs.detach(),
            None,
            advantages,
            one,
            num_seqs=1,
        )
        (gradient,) = torch.autograd.grad(-loss, logits)
        expected += logprobs.exp().item() * gradient
    assert torch.allclose(expected, exact, atol=1e-12)


def first_step(script, folder, **fields):
    """Run main for one step. Return the step's metrics and samples."""
    given = small_recipe(script)
    given |= dict(num_prompts=8, num_generations=3, num_steps=1, eval_size=2, beta=0.0)
    given |= fields
    script.main(script.Args(**given, runs_dir=str(folder), run_name=script.__name__))
    records = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = (folder / script.__name__ / name).read_text().splitlines()
        records.append([json.loads(line) for line in lines])
    metrics, samples = records
    return metrics[-1], samples


@pytest.mark.parametrize("temperature", [1.3, 1e-6])
def test_the_baseline_is_the_reward_of_a_greedy_response(temperature, tmp_path):
    """At step 1 the policy is the model on disk, so the test can compute its greedy responses."""
    metrics, samples = first_step(remax, tmp_path, temperature=temperature, max_new_tokens=30)
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    greedy_rewards = []
    advantages = []
    for sample in samples:
        prompt_ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        ids = model.generate(prompt_ids, do_sample=False, max_new_tokens=30)
        text = tokenizer.decode(ids[0, prompt_ids.shape[1] :], skip_special_tokens=True)
        scores = [reward([text], [sample["answer"]])[0] for reward in remax.REWARDS]
        greedy_rewards.append(sum(scores))
        expected = [reward - sum(scores) for reward in sample["rewards"]]
        assert sample["advantages"] == pytest.approx(expected, abs=1e-6)
        # At a temperature near 0 the samples are also greedy.
        if temperature == 1e-6:
            assert sample["completions"] == [text] * 3
        advantages += sample["advantages"]
    assert metrics["rollout/greedy_reward"] == pytest.approx(sum(greedy_rewards) / 8, abs=1e-6)
    assert len(set(greedy_rewards)) > 1
    assert any(advantages) == (temperature == 1.3)
    # Sampler and policy agree on the samples' log-probabilities at this temperature.
    if temperature == 1.3:
        assert metrics["rollout/logprob_gap_max"] < 1e-4


def test_the_greedy_responses_change_no_sample(tmp_path):
    """remax.py draws the same samples as reinforce_baseline.py and counts B more responses."""
    parent, samples = first_step(reinforce_baseline, tmp_path)
    child, samples_of_child = first_step(remax, tmp_path)
    assert [x["completions"] for x in samples] == [x["completions"] for x in samples_of_child]
    assert child["episodes"] == parent["episodes"] + 8
    assert parent["tokens"] < child["tokens"] <= parent["tokens"] + 8 * 32
    for name in ("rollout/response_len", "rollout/eos_frac", "rollout/accuracy"):
        assert child[name] == parent[name]


# ---- grpo_offpolicy


def test_sampler_weights_by_hand():
    old = torch.tensor([[0.0, 0.0, 0.0, math.nan]], dtype=torch.float64, requires_grad=True)
    sampled = -torch.tensor([[1.5, 3.0, 0.5, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True, False]])
    args = make_args(grpo_offpolicy)
    weights = grpo_offpolicy.compute_sampler_weights(args, old, sampled, mask)
    assert weights.tolist()[0] == pytest.approx([1.5, 2.0, 0.5, 1.0])
    assert not weights.requires_grad
    args.rollout_correction = 0.0
    weights = grpo_offpolicy.compute_sampler_weights(args, old, sampled, mask)
    assert weights.tolist() == [[1.0] * 4]


def test_sequences_far_from_the_sampler_are_left_out_by_hand():
    """The sequences' ratios are 3, 4.5 and 1 / 8. A sequence above the cap gets weights of 0."""
    sampled = -torch.tensor([[1.5, 2.0, 9.0], [1.5, 3.0, 1.0], [0.5, 0.5, 0.5]]).log()
    mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    args = make_args(grpo_offpolicy, sequence_cap=3.001)
    weights = grpo_offpolicy.compute_sampler_weights(args, torch.zeros(3, 3), sampled, mask)
    expected = torch.tensor([[1.5, 2.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    torch.testing.assert_close(weights, expected)
    args.rollout_correction = 0.0
    weights = grpo_offpolicy.compute_sampler_weights(args, torch.zeros(3, 3), sampled, mask)
    assert weights.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("cap", [0.0, 1.2, 2.0, 50.0])
def test_sampler_weights_against_a_slow_loop(cap):
    _, old, sampled, _, mask = ragged_batch(0)
    args = make_args(grpo_offpolicy, rollout_correction=cap)
    weights = grpo_offpolicy.compute_sampler_weights(args, old, sampled, mask)
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(old[i, t].item() - sampled[i, t].item())
        assert weights[i, t].item() == pytest.approx(min(ratio, cap) if cap else 1.0, abs=1e-12)
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient"),
    [
        (4.0, -1.0, 3.0, 3.0, 0.0),  # counts as 3
        (2.5, -1.0, 3.0, 2.5, 2.5),
        # A positive advantage has no dual clip.
        (4.0, 1.0, 3.0, -1.2, 0.0),
        (0.5, -1.0, 3.0, 0.8, 0.0),
        # A dual clip also works inside the clip range.
        (1.1, -2.0, 1.05, 2.1, 0.0),
        (1.04, -2.0, 1.05, 2.08, 2.08),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, dual_clip, loss, gradient):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    old = torch.zeros(1, 1, dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    args = make_args(grpo_offpolicy, beta=0.0, dual_clip=dual_clip)
    value, slope, stats = loss_and_gradient(
        grpo_offpolicy, args, logprobs, old, None, advantages, mask
    )
    assert (value, slope.item()) == pytest.approx((loss, gradient), abs=1e-12)
    assert stats["policy/dual_clip_frac"] == (advantage < 0 and ratio > dual_clip)


def test_where_the_dual_clip_does_not_bind_it_is_grpo():
    logprobs, old, ref, advantages, mask = ragged_batch(3)
    results = []
    # grpo_offpolicy.py has one advantage per token, (n, R). grpo.py has one per sequence, (n, 1).
    for script, shaped in ((grpo, advantages), (grpo_offpolicy, advantages.expand_as(mask))):
        args = make_args(script, beta=0.1, dual_clip=1e9)
        results.append(loss_and_gradient(script, args, logprobs, old, ref, shaped, mask))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_the_loss_takes_one_advantage_per_token():
    """Advantages of shape (n, 1) can't include token weights, so the loss refuses them."""
    logprobs, old, ref, advantages, mask = ragged_batch(3)
    args = make_args(grpo_offpolicy, beta=0.1)
    with pytest.raises(AssertionError):
        loss_and_gradient(grpo_offpolicy, args, logprobs, old, ref, advantages, mask)


def test_weights_scale_the_policy_term_of_their_token_and_nothing_else():
    """Weights in the advantages scale a token's policy loss but not its KL."""
    logprobs, old, ref, advantages, mask = ragged_batch(4)
    generator = torch.Generator().manual_seed(0)
    weights = 2 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    args = make_args(grpo_offpolicy, beta=0.1)
    weighted = loss_and_gradient(
        grpo_offpolicy, args, logprobs, old, ref, weights * advantages, mask
    )
    total = 0.0
    for i, t in mask.nonzero().tolist():
        ratio, A = math.exp(logprobs[i, t].item() - old[i, t].item()), advantages[i].item()
        policy = min(ratio * A, min(max(ratio, 0.8), 1.2) * A)
        policy = max(policy, 3.0 * A) if A < 0 else policy
        upside = math.exp(ref[i, t].item() - logprobs[i, t].item())
        kl = upside - math.log(upside) - 1
        total -= (weights[i, t].item() * policy - 0.1 * kl) / int(mask[i].sum()) / len(mask)
    assert weighted[0] == pytest.approx(total, abs=1e-12)


# A response has two tokens from a vocabulary of four.
V, R = 4, 2


def tiny_policy(seed):
    """Logits of the first token (V,), and of the second token after each first token (V, V)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((V,), (V, V))
    ]


def response_logprobs(policy, response):
    first, second = policy
    return torch.stack(
        [first.log_softmax(0)[response[0]], second[response[0]].log_softmax(0)[response[1]]]
    )[None]


def mean_gradient(sampler, policy, advantages, correction):
    """The expected gradient of main's loss for one response, under the sampler's probabilities."""
    policy = [logits.clone().requires_grad_() for logits in policy]
    args = make_args(grpo_offpolicy, beta=0.0, rollout_correction=correction)
    mask = torch.ones(1, R, dtype=torch.bool)
    total = 0.0
    for response, advantage in zip(itertools.product(range(V), repeat=R), advantages, strict=True):
        logprobs = response_logprobs(policy, response)
        old = logprobs.detach()
        sampled = response_logprobs(sampler, response)
        weights = grpo_offpolicy.compute_sampler_weights(args, old, sampled, mask)
        loss, _ = grpo_offpolicy.policy_loss(
            args, logprobs, old, None, weights * advantage, mask, num_seqs=1
        )
        total = total + sampled.sum().exp() * loss
    return torch.cat([x.flatten() for x in torch.autograd.grad(total, policy)])


def sampler_of(policy, seed, how):
    """A sampler that differs from the policy: rounded to bfloat16, or one random step older."""
    if how == "rounded":
        return [logits.bfloat16().double() for logits in policy]
    return [
        logits - 0.3 * noise for logits, noise in zip(policy, tiny_policy(seed + 100), strict=True)
    ]


@pytest.mark.parametrize("how", ["rounded", "stale"])
def test_the_corrected_gradient_is_nearer_to_the_exact_one(how):
    """The correction lowers the mean squared error over 40 random policies.

    For a single policy the correction may fail: a token's weight doesn't correct for the tokens before it.
    """
    errors = {0.0: 0.0, 2.0: 0.0}
    for seed in range(40):
        policy = tiny_policy(seed)
        sampler = sampler_of(policy, seed, how)
        advantages = torch.randn(
            V**R, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).tolist()
        exact = mean_gradient(policy, policy, advantages, 0.0)
        for correction in errors:
            errors[correction] += (
                mean_gradient(sampler, policy, advantages, correction) - exact
            ).norm().item() ** 2
    assert errors[2.0] < 0.6 * errors[0.0]


@pytest.mark.parametrize("how", ["rounded", "stale"])
def test_where_the_last_token_alone_matters_the_correction_is_exact(how):
    """The first token has only one choice, so the second token's weight is the full correction."""
    policy = tiny_policy(7)
    policy[0] = torch.tensor([0.0, -1e9, -1e9, -1e9], dtype=torch.float64)
    sampler = [policy[0], sampler_of(policy, 7, how)[1]]
    advantages = torch.randn(
        V**R, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    ).tolist()
    exact = mean_gradient(policy, policy, advantages, 0.0)
    assert torch.allclose(mean_gradient(sampler, policy, advantages, 100.0), exact, atol=1e-12)
    assert not torch.allclose(mean_gradient(sampler, policy, advantages, 0.0), exact, atol=1e-5)


# ---- grpo_process


def test_steps_of_an_addition_by_hand():
    texts = {
        "<think>7+8=15,4+3+1=8</think><answer>85</answer>": [(13, 1.0), (21, 1.0), (48, 1.0)],
        # The second sum is true, but it lacks the carry.
        "<think>7+8=15,4+3=7</think><answer>75</answer>": [(13, 1.0), (19, 0.0), (46, 0.0)],
        # The first sum is false.
        "<think>7+8=14,4+3+1=8</think>85": [(13, 0.0), (21, 1.0), (31, 0.0)],
        # The first sum is false, although it ends in the right digit.
        "<think>7+8=25,4+3+1=8</think>85": [(13, 0.0), (21, 1.0), (31, 0.0)],
        # All sums are true, but they don't give the digits of 85, and 85 has no third digit.
        "<think>0+0=0,0+0=0,0+0=0</think>85": [(12, 0.0), (18, 0.0), (24, 0.0), (34, 0.0)],
        # The sum isn't between the tags.
        "7+8=15<think></think><answer>85</answer>7+8=15": [(46, 1.0)],
        # The closing tag is missing or comes first.
        "<think>7+8=15,4+3+1=8": [(21, 0.0)],
        "<think>7+8=15<think>,4+3+1=8</think>": [(36, 0.0)],
        "</think>7+8=15<think>": [(21, 0.0)],
        # The only <think> is at the end.
        "7+8=15</think><think>": [(21, 0.0)],
        # None of these is a sum of digits.
        "<think>17+8=25,7+8=151,1+1=</think>": [(14, 0.0), (22, 0.0), (27, 0.0), (35, 0.0)],
        "<think>7+8=015,4+3+1=8,,</think>": [(14, 0.0), (22, 1.0), (23, 0.0), (24, 0.0), (32, 0.0)],
        # Text that isn't a sum of digits has no steps.
        "<think>7 + 8 = 15, 4+3+1=8</think><answer>85</answer>": [(53, 1.0)],
        "<think>So 7+8=15.</think>": [(25, 0.0)],
        # The prompt contains the opening tag.
        "7+8=15,4+3=7</think>85": [(6, 1.0), (12, 0.0), (22, 0.0)],
        "": [(0, 0.0)],
    }
    found = grpo_process.step_rewards(list(texts), ["85"] * len(texts))
    for (text, expected), steps in zip(texts.items(), found, strict=True):
        assert [step.end for step in steps] == [end for end, _ in expected], text
        assert [step.reward for step in steps] == [reward for _, reward in expected], text


def test_the_hundreds_are_a_digit_too():
    (steps,) = grpo_process.step_rewards(
        ["<think>2+2=4,6+7=13,0+0+1=1</think><answer>134</answer>"], ["134"]
    )
    assert [step.reward for step in steps] == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "text", ["1+" * 50000, "1+1=" * 25000, "<think>" + "9" * 10**5 + "</think>", "1+1=2," * 20000]
)
def test_steps_of_a_hostile_completion(text):
    for whole in (text, f"<think>{text}</think>"):
        (steps,) = grpo_process.step_rewards([whole], ["134"])
        ends = [step.end for step in steps]
        assert ends[-1] == len(whole)
        assert ends[0] >= 0 and ends == sorted(ends)


def tokenizers():
    """Name -> tokenizer: the bundled model's, one with a token per byte, and the story model's."""
    byte_level = Tokenizer(
        models.BPE(
            vocab={c: k for k, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
        )
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    found = {"adder": AutoTokenizer.from_pretrained(ADDER)}
    found["bytes"] = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    if (SHARED / "models" / "stories260K").is_dir():
        found["stories"] = AutoTokenizer.from_pretrained(SHARED / "models" / "stories260K")
    return found


@pytest.mark.parametrize("name", ["adder", "bytes", "stories"])
def test_the_token_of_every_character(name):
    """The result must match the offsets that the tokenizer reports when it encodes a text."""
    if name not in tokenizers():
        pytest.skip("the story model is not here")
    tokenizer = tokenizers()[name]
    text = "<think>7+8=15,4+3+1=8</think><answer>85</answer>"
    if name != "adder":
        text = "Once upon a time, 7+8=15.\n\nTim said: “Ça va? 猫 and 🙂!”  Then 4+3+1=8" + text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded.input_ids, encoded.offset_mapping
    assert tokenizer.decode(ids) == text and len(ids) < 1.5 * len(text)
    # If a character has several tokens, the last of these tokens completes it.
    last = {end: t for t, (_, end) in enumerate(offsets)}
    ends = list(range(1, len(text) + 1))
    expected = [min(t for end, t in last.items() if end >= e) for e in ends]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    steps = [grpo_process.Step(end, 0.0) for end in ends]
    # The last step ends with the response.
    expected[-1] = len(ids + eos) - 1
    assert grpo_process.step_tokens(tokenizer, ids + eos, steps) == expected


def test_a_step_beyond_the_text_ends_with_the_response():
    tokenizer = tokenizers()["adder"]
    ids = tokenizer("7+8=15").input_ids
    steps = [grpo_process.Step(end, 0.0) for end in (3, 99, 6)]
    assert grpo_process.step_tokens(tokenizer, ids, steps) == [2, len(ids) - 1, len(ids) - 1]


def test_a_response_of_an_eos_token_alone_has_one_step():
    tokenizer = tokenizers()["adder"]
    steps = [grpo_process.Step(0, 0.0)]
    assert grpo_process.step_tokens(tokenizer, [tokenizer.eos_token_id], steps) == [0]


def token_advantages(rewards, ends, length):
    """Advantages (B, G, R) of padded steps.

    rewards and ends (B, G, K) are the reward and the last token of each step. Padding has the last token -1.
    """
    args = make_args(grpo_process, max_new_tokens=length)
    found = []
    torch.set_default_dtype(rewards.dtype)
    for group_rewards, group_ends in zip(rewards.tolist(), ends.tolist(), strict=True):
        steps, last_tokens = [], []
        for response_rewards, response_ends in zip(group_rewards, group_ends, strict=True):
            pairs = list(zip(response_rewards, response_ends, strict=True))
            # token_advantages doesn't use Step.end, which counts characters.
            steps.append([grpo_process.Step(-1, reward) for reward, end in pairs if end >= 0])
            last_tokens.append([end for _, end in pairs if end >= 0])
        found.append(grpo_process.token_advantages(args, steps, last_tokens))
    torch.set_default_dtype(torch.float32)
    return torch.stack(found)


def test_process_advantages_by_hand():
    # The three rewards are 1, 0 and 1. Their mean is 2/3, and Bessel's std is sqrt((1 + 4 + 1) / 9 / 2).
    rewards = torch.tensor([[[1.0, 0.0], [1.0, -9.0]]], dtype=torch.float64)
    ends = torch.tensor([[[1, 3], [2, -1]]])
    advantages = token_advantages(rewards, ends, 5)
    up, down = (1 / 3) / (math.sqrt(1 / 3) + 1e-4), (-2 / 3) / (math.sqrt(1 / 3) + 1e-4)
    expected = [[up + down, up + down, down, down, 0.0], [up, up, up, 0.0, 0.0]]
    for row, mine in zip(advantages[0].tolist(), expected, strict=True):
        assert row == pytest.approx(mine, abs=1e-12)


def random_steps(seed, B=3, G=4, K=5, R=9):
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(1, K + 1, (B, G, 1), generator=generator)
    ends = torch.randint(0, R, (B, G, K), generator=generator).sort(2).values
    ends = torch.where(torch.arange(K) < count, ends, -1)
    return torch.randn(B, G, K, generator=generator, dtype=torch.float64), ends, R


@pytest.mark.parametrize("seed", range(4))
def test_process_advantages_against_a_slow_loop(seed):
    rewards, ends, length = random_steps(seed)
    advantages = token_advantages(rewards, ends, length)
    for b in range(len(rewards)):
        steps = [
            (i, ends[b, i, j].item(), rewards[b, i, j].item())
            for i in range(4)
            for j in range(5)
            if ends[b, i, j] >= 0
        ]
        mean = math.fsum(r for *_, r in steps) / len(steps)
        std = math.sqrt(math.fsum((r - mean) ** 2 for *_, r in steps) / (len(steps) - 1))
        for i, t in itertools.product(range(4), range(length)):
            expected = math.fsum(
                (r - mean) / (std + 1e-4) for k, end, r in steps if k == i and end >= t
            )
            assert advantages[b, i, t].item() == pytest.approx(expected, abs=1e-10)


def test_with_one_step_per_response_it_is_grpo():
    rewards = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends = torch.randint(0, 7, (3, 4, 1), generator=torch.Generator().manual_seed(2))
    advantages = token_advantages(rewards[..., None], ends, 7)
    expected = grpo.compute_advantages(make_args(grpo), rewards)[..., None] * (
        torch.arange(7) <= ends
    )
    assert torch.allclose(advantages, expected, atol=1e-12)


@pytest.mark.parametrize("other", ["<think>7+8=15,4+3+1=8</think>", "<think></think>", ""])
def test_a_group_of_right_responses_learns_nothing_from_how_many_steps_they_have(other):
    """Steps and outcome have the same scale, so the number of steps doesn't matter."""
    perfect = "<think>7+8=15,4+3+1=8</think><answer>85</answer>"
    texts = [perfect] * 7 + [f"{other}<answer>85</answer>"]
    steps = grpo_process.step_rewards(texts, ["85"] * 8)
    last_tokens = [list(range(len(response_steps))) for response_steps in steps]
    args = make_args(grpo_process, max_new_tokens=5)
    assert (grpo_process.token_advantages(args, steps, last_tokens) == 0).all()


def test_equal_steps_give_exactly_zero():
    _, ends, length = random_steps(0)
    rewards = torch.full(ends.shape, 0.1).masked_fill(ends < 0, math.nan)
    advantages = token_advantages(rewards, ends, length)
    assert (advantages == 0).all()
