"""Whole steps of main against an independent slow computation in float64: weights and metrics.

All scripts but grpo_tools.py (test_grpo_tools.py) and grpo_vllm.py (test_vllm.py), and nine patches.

main runs in float64. The test records its samples, its rewards and the sequences of each minibatch. The reference
computes everything else from these records, one sequence and one token at a time: log-probabilities (by a plain
forward pass), returns, advantages, losses, clipped gradients, torch's Adam and the schedule. The reference must
produce the same weights and the same metrics as main.
"""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, small_recipe
from patched import load_patched
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import grpo_process
from utils.rewards import accuracy_reward, format_reward

EOS = 2
COMMON = dict(
    num_steps=2,
    num_prompts=3,
    num_generations=4,
    max_new_tokens=21,
    temperature=1.1,
    learning_rate=2e-3,
)
COMMON |= dict(
    num_iterations=1, num_minibatches=2, micro_batch_tokens=100, max_grad_norm=0.7, warmup_updates=2
)
COMMON |= dict(
    clip_eps=0.1, clip_eps_low=0.1, clip_eps_high=0.15, beta=0.2, device="cpu", eval_size=2, seed=5
)
# The sampler's weights are up to two steps old.
STALE = dict(staleness=3, num_steps=3, num_minibatches=6, beta=0.0)
# (script or patch, fields)
CASES = [
    # All scripts share the loop over the passes, so some of them have two.
    ("grpo", dict(num_iterations=2)),
    ("grpo", dict(num_minibatches=1, lr_schedule="constant_with_warmup")),
    ("dr_grpo", dict(lr_schedule="cosine")),
    ("rloo", {}),
    ("rloo", dict(num_minibatches=1)),
    ("reinforce_baseline", dict(baseline="moving_average", num_steps=3)),
    (
        "reinforce_baseline",
        dict(baseline="batch_mean", num_minibatches=1, num_generations=1, num_prompts=12),
    ),
    ("reinforce_baseline", dict(baseline="none", beta=0.0)),
    # Two updates: the smallest number for which the old log-probabilities are computed in advance.
    ("dapo", dict(max_resample=5, overlong_cache=4, num_iterations=2, num_minibatches=1)),
    # There are fewer mixed groups than prompts, so some minibatches are empty.
    (
        "dapo",
        dict(
            max_resample=0,
            overlong_cache=4,
            num_minibatches=12,
            num_prompts=4,
            num_generations=3,
            seed=1,
        ),
    ),
    (
        "ppo_rlhf",
        dict(gamma=0.98, gae_lambda=0.9, value_learning_rate=3e-3, num_iterations=2),
    ),
    (
        "ppo_rlhf",
        dict(reward_model=None, value_learning_rate=3e-3, num_minibatches=1),
    ),
    (
        "ppo_rlhf",
        dict(
            value_init="policy",
            value_learning_rate=3e-3,
            beta=0.0,
        ),
    ),
    # Lambda is 0 in some responses. The policy doesn't change in the first step and changes in the second.
    (
        "vapo",
        dict(
            value_warmup_steps=1,
            num_iterations=2,
            gamma=0.98,
            gae_alpha=0.055,
            lm_coef=0.3,
            learning_rate=3e-4,
            value_learning_rate=3e-3,
        ),
    ),
    (
        "vapo",
        dict(
            value_warmup_steps=0,
            gae_alpha=1.0,
            num_minibatches=3,
            value_learning_rate=3e-3,
        ),
    ),
    ("gspo", dict(clip_eps_low=0.01, clip_eps_high=0.015, num_iterations=2)),
    ("gspo", dict(clip_eps_low=3e-4, clip_eps_high=4e-4, beta=0.0)),
    # With this seed, the two samples of a prompt have equal rewards, and the greedy response has another.
    ("remax", dict(num_generations=2, num_prompts=6, seed=2)),
    (
        "grpo_offpolicy",
        dict(
            staleness=2,
            num_steps=3,
            rollout_correction=1.02,
            dual_clip=1.05,
            num_iterations=2,
            seed=1,
        ),
    ),
    (
        "grpo_offpolicy",
        dict(staleness=2, num_steps=3, num_minibatches=1),
    ),
    ("grpo_offpolicy", dict(rollout_correction=0.0, beta=0.0)),
    ("grpo_multigpu", dict(num_iterations=2)),
    ("grpo_lora", dict(lora_rank=2, learning_rate=1e-2)),
    ("distill", {}),
    ("full_vocabulary", dict(num_generations=1, num_prompts=12)),
    ("self_distill", dict(teacher_rate=0.3, num_steps=3)),
    ("sdpo_context", dict(teacher_rate=1.0, learning_rate=5e-4)),
    ("grpo_process", {}),
    ("copg", dict(num_minibatches=4, beta=0.5)),
    ("p3o", dict(num_minibatches=4, beta=0.5, clip_eps=0.02)),
    ("clip_cov", dict(num_iterations=2, cov_low=0.05, cov_high=0.6, cov_share=1.0)),
    # There are two sequences per minibatch, so a mask can leave out a whole minibatch.
    ("geo_mask", dict(STALE, geo_low=0.96, geo_high=1.04, learning_rate=3e-4)),
    ("icepop", dict(STALE, icepop_low=0.9, icepop_high=1.1)),
    ("opsm", dict(STALE, opsm_delta=0.01, num_iterations=2)),
    ("kimi_kl", dict(STALE, num_minibatches=2, kl_tau=0.1, num_iterations=2)),
]
CRITICS = ("ppo_rlhf", "vapo")
DISTILLERS = ("distill", "self_distill")
# The patches of variants/ that are compared here, and the scripts that they change.
PATCHES = {"full_vocabulary": "distill", "sdpo_context": "self_distill"}
PATCHES |= {"copg": "rloo", "p3o": "rloo", "clip_cov": "grpo"}
PATCHES |= dict.fromkeys(("geo_mask", "icepop", "opsm", "kimi_kl"), "grpo_offpolicy")
RENEWING = ("copg", "p3o", "clip_cov")  # they compute the advantages before each update
LEAVING_OUT = ("p3o", "clip_cov", "geo_mask", "icepop", "opsm")  # and these leave out some


def norm(layer, hidden):
    """Root mean square norm in the precision of the input."""
    mean = hidden.pow(2).mean(-1, keepdim=True)
    return layer.weight * hidden * torch.rsqrt(mean + layer.variance_epsilon)


@pytest.fixture
def double(monkeypatch):
    """A function that makes a script compute in float64 instead of float32."""

    def call(script):
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        # The library's norm computes in float32.
        monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
        torch.set_default_dtype(torch.float64)
        for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
            if not hasattr(script, name):
                continue
            load = partial(getattr(script, name).from_pretrained)

            def in_double(*args, load=load, **kwargs):
                return load(*args, **kwargs | {"dtype": torch.float64})

            monkeypatch.setattr(script, name, SimpleNamespace(from_pretrained=in_double))

    yield call
    torch.set_default_dtype(torch.float32)


def run(script, monkeypatch, tmp_path, given):
    """Run main. Return its args, each step's records and the checkpoint.

    The records of a step are its sequences (prompt, response), minibatches, samples and metrics.
    """
    known = {field.name for field in dataclasses.fields(script.Args)}
    given = small_recipe(script) | COMMON | given
    fields = {name: value for name, value in given.items() if name in known}
    lines = (ROOT / "assets" / "addition" / "train.jsonl").read_text().splitlines(keepends=True)
    fields["dataset"] = str(tmp_path / "few.jsonl")
    (tmp_path / "few.jsonl").write_text("".join(lines[:60]))
    args = script.Args(**fields, runs_dir=str(tmp_path), run_name="run")
    steps, generate, minibatches = [], script.generate, script.minibatches
    micro_batches, shared = script.micro_batches, []
    # Prompts are short here. So that many samples share a row, it may be longer than usual.
    monkeypatch.setattr(script, "PACK_LENGTH", 10)

    def recorded_generate(*call):
        ids, mask, logprobs = generate(*call)
        # remax.py generates greedy responses after a step's samples and before its minibatches.
        is_greedy_rollout = call[5] == 0 and bool(steps) and not steps[-1]["minibatches"]
        # The test doesn't record evaluations.
        if call[5] > 0 or is_greedy_rollout:
            prompts = [
                row[counts].tolist()
                for row, counts in zip(call[2], call[3], strict=True)
                for _ in range(call[4])
            ]
            responses = [row[counts].tolist() for row, counts in zip(ids, mask, strict=True)]
            if not steps or steps[-1]["minibatches"]:
                steps.append({"sequences": [], "greedy": [], "minibatches": []})
            kind = "greedy" if is_greedy_rollout else "sequences"
            steps[-1][kind] += zip(prompts, responses, strict=True)
        return ids, mask, logprobs

    def recorded_minibatches(*call):
        for minibatch in minibatches(*call):
            steps[-1]["minibatches"].append(minibatch.tolist())
            yield minibatch

    def recorded_micro_batches(*call):
        batches = micro_batches(*call)
        shared.extend(len(rows) - len(set(part.pack_of)) for rows, part in batches)
        return batches

    monkeypatch.setattr(script, "micro_batches", recorded_micro_batches)
    monkeypatch.setattr(script, "generate", recorded_generate)
    monkeypatch.setattr(script, "minibatches", recorded_minibatches)
    script.main(args)
    # A small minibatch may have no two samples of a prompt.
    assert sum(shared) > 0 or args.num_generations == 1 or args.num_minibatches > 2
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()][1:]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    for number, (step, metrics) in enumerate(zip(steps, records, strict=True), start=1):
        step["metrics"], step["samples"] = (
            metrics,
            [sample for sample in samples if sample["step"] == number],
        )
    args = script.Args(
        **{
            k: v
            for k, v in json.loads((tmp_path / "run" / "args.json").read_text()).items()
            if k in known
        }
    )
    return args, steps, torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)


def logprobs_of(model, sequence, temperature):
    """Log-probability of each response token (|o|,), from a plain forward pass of one sequence without padding."""
    prompt, response = sequence
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(1)[range(len(response)), response]


def outputs_of(network, sequence):
    """The head's output after the prompt and after each response token (|o| + 1,)."""
    prompt, response = sequence
    hidden = network.base_model(torch.tensor([prompt + response])).last_hidden_state[
        0, len(prompt) - 1 :
    ]
    return network.score(hidden)[:, 0]


class WithAdapters(torch.nn.ParameterList):
    """grpo_lora.py's policy. Its parameters are A and B of each linear layer of the trunk, in order.

    Each call first computes every W + (alpha / rank) B A.
    """

    def __init__(self, base, args):
        super().__init__()
        self.base, self.names, self.scale = [base], [], args.lora_alpha / args.lora_rank
        torch.manual_seed(args.seed)
        for name, layer in base.named_modules():
            if isinstance(layer, torch.nn.Linear) and layer is not base.get_output_embeddings():
                self.names.append(f"{name}.weight")
                self.append(torch.nn.Linear(layer.in_features, args.lora_rank).weight.detach())
                self.append(torch.zeros(layer.out_features, args.lora_rank))

    def __call__(self, ids):
        (base,) = self.base
        pairs = zip(self.names, list(self)[::2], list(self)[1::2], strict=True)
        weights = {name: base.get_parameter(name) + self.scale * B @ A for name, A, B in pairs}
        return functional_call(base, weights, (ids,))


def reverse_kl_of(model, teacher, sequence, teacher_sequence, temperature):
    """KL of the model to the teacher before each response token (|o|,), one token of the vocabulary at a time."""
    rows = []
    for network, (prompt, response) in ((model, sequence), (teacher, teacher_sequence)):
        logits = network(torch.tensor([prompt + response])).logits
        rows.append(logits[0, len(prompt) - 1 : -1] / temperature)
    p, q = [row.softmax(1) for row in rows]  # (|o|, V) each
    return sum(p[:, v] * (p[:, v] / q[:, v].detach()).log() for v in range(p.shape[1]))


def contexts_of(args, sample):
    """For each response of self_distill.py's sample, the context that its teacher reads."""
    if hasattr(args, "context_column"):
        return [sample["answer"]] * args.num_generations
    contexts = []
    for i in range(args.num_generations):
        right = [
            text
            for j, text in enumerate(sample["completions"])
            if j != i and accuracy_reward([text], [sample["answer"]]) == [1.0]
        ]
        contexts.append(right[0] if right else "")
    return contexts


def k3(ref, logprob):
    return math.exp(ref - logprob) - (ref - logprob) - 1


def clip_gradients(model, limit):
    """Scale all gradients so that their norm is at most the limit. Return the norm before scaling."""
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    for parameter in model.parameters():
        parameter.grad *= min(1.0, limit / (norm + 1e-6))
    return norm


def rate(args, update, per_rollout, pretraining=0):
    """The learning rate of this update (counted from 0), divided by the peak rate.

    vapo.py doesn't train the policy in the first steps, the pretraining. The policy's schedule begins after them.
    """
    update -= pretraining * per_rollout
    if update < 0:
        return 0.0
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    if args.lr_schedule == "constant_with_warmup":
        return 1.0
    total = (args.num_steps - pretraining) * per_rollout
    done = (update - args.warmup_updates) / (total - args.warmup_updates)
    return (1 + math.cos(math.pi * done)) / 2 if args.lr_schedule == "cosine" else 1 - done


def rewards_of_the_greedy(model, step, args, tokenizer):
    """For each sample of remax.py, the reward of the greedy response to the same prompt."""
    rewards = []
    for (prompt, response), sample in zip(step["greedy"], step["samples"], strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(1).tolist() == response
        text = [tokenizer.decode(response, skip_special_tokens=True)]
        reward = (
            accuracy_reward(text, [sample["answer"]])[0]
            + format_reward(text, [sample["answer"]])[0]
        )
        rewards += [reward] * args.num_generations
    return rewards


def process_advantages(step, G, tokenizer):
    """Each token's advantage in grpo_process.py, from the steps in the samples file."""
    advantages, sequences = [], iter(step["sequences"])
    for sample in step["samples"]:
        expected = grpo_process.step_rewards(sample["completions"], [sample["answer"]] * G)
        assert sample["steps"] == [[list(x) for x in steps] for steps in expected]
        flat = [reward for steps in sample["steps"] for _, reward in steps]
        mean = math.fsum(flat) / len(flat)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
        for text, steps in zip(sample["completions"], sample["steps"], strict=True):
            *column_steps, (last_end, last_reward) = steps
            assert last_end == len(text)
            _, response = next(sequences)
            row = []
            for t in range(len(response)):
                start = len(tokenizer.decode(response[:t], skip_special_tokens=True))
                # Every token, including EOS, counts the last step's reward.
                rewards = [last_reward]
                if start < len(text):
                    rewards += [reward for end, reward in column_steps if start < end]
                row.append(math.fsum((reward - mean) / (std + 1e-4) for reward in rewards))
            advantages.append(row)
    return advantages


def group_advantages(name, returns, G, args, memory):
    """One advantage per sequence from one return per sequence, in group order."""
    if name == "reinforce_baseline":
        mean = math.fsum(returns) / len(returns)
        before = memory.get("average", mean)
        memory["average"] = 0.9 * before + 0.1 * mean
        baseline = {"batch_mean": mean, "moving_average": before, "none": 0.0}[args.baseline]
        return [value - baseline for value in returns]
    advantages = []
    for start in range(0, len(returns), G):
        group = returns[start : start + G]
        mean = math.fsum(group) / G
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (G - 1))
        divisor = {"rloo": (G - 1) / G, "dr_grpo": 1.0}.get(name, std + 1e-4)
        advantages += [(x - mean) / divisor for x in group]
    return advantages


def whitened(rows):
    """The rows, shifted to mean 0 and scaled to variance 1 over all numbers."""
    flat = [x for row in rows for x in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def gae(rewards, values, gamma, lambda_):
    T = len(rewards)
    delta = [
        rewards[t] + (gamma * values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)
    ]
    return [
        math.fsum((gamma * lambda_) ** (k - t) * delta[k] for k in range(t, T)) for t in range(T)
    ]


def token_loss(name, args, logprob, logratio, advantage):
    """The loss of one token as a tensor with gradient, before averaging and without the KL."""
    if name in ("reinforce_baseline", "rloo", "remax"):
        return -advantage * logprob
    ratio = logratio.exp()
    low, high = bounds_of(args)
    if advantage > 0:
        objective = advantage * ratio if ratio < 1 + high else torch.tensor(advantage * (1 + high))
    else:
        objective = advantage * ratio if ratio > 1 - low else torch.tensor(advantage * (1 - low))
        if ratio > getattr(args, "dual_clip", math.inf):
            objective = torch.tensor(advantage * args.dual_clip)
    return -objective


def bounds_of(args):
    """The distances of the clip range's bounds from 1. Scripts that don't clip get 0.2."""
    if hasattr(args, "clip_eps_low"):
        return args.clip_eps_low, args.clip_eps_high
    return (getattr(args, "clip_eps", 0.2),) * 2


def weight(name, args, minibatch, length, counted):
    """The factor of a token's loss."""
    tokens = sum(counted)
    return {
        "reinforce_baseline": 1 / len(minibatch),
        "rloo": 1 / len(minibatch),
        "remax": 1 / len(minibatch),
        "grpo": 1 / (len(minibatch) * length),
        "gspo": 1 / (len(minibatch) * length),
        "grpo_offpolicy": 1 / (len(minibatch) * length),
        "grpo_process": 1 / (len(minibatch) * length),
        "distill": 1 / (len(minibatch) * length),
        "self_distill": 1 / (len(minibatch) * length),
        "dr_grpo": 1 / (len(minibatch) * args.max_new_tokens),
        "dapo": 1 / max(1, tokens),
        "ppo_rlhf": 1 / max(1, tokens),
        "vapo": 1 / max(1, tokens),
    }[name]


def renewed_advantages(patch, args, minibatch, rewards, advantages, memory, *logprobs):
    """The advantages per token that copg, p3o and clip_cov compute before an update.

    The last three arguments are the log-probabilities of the old policy, of the reference and of the current policy.
    """
    old, ref, current = logprobs
    G = args.num_generations
    if patch == "clip_cov":
        places = [(i, t) for i in minibatch for t in range(len(old[i]))]
        mean_logprob = math.fsum(current[i][t] for i, t in places) / len(places)
        mean_advantage = math.fsum(advantages[i][t] for i, t in places) / len(places)
        kept = [list(row) for row in advantages]
        for i, t in places:
            covariance = (current[i][t] - mean_logprob) * (advantages[i][t] - mean_advantage)
            left_out = args.cov_low < covariance < args.cov_high
            kept[i][t] = 0.0 if left_out else kept[i][t]
            memory["left_out"].add(left_out)
        return kept
    of_return = current if patch == "copg" else old
    returns = [
        reward - args.beta * (math.fsum(row) - math.fsum(ref_row))
        for reward, row, ref_row in zip(rewards, of_return, ref, strict=True)
    ]
    if patch == "copg":
        per_sequence = group_advantages("rloo", returns, G, args, memory)
    else:
        moved = [math.fsum(x) - math.fsum(y) for x, y in zip(current, old, strict=True)]
        per_sequence = []
        for i in range(len(returns)):
            total = 0.0
            for j in range(i - i % G, i - i % G + G):
                gain, gained = returns[i] - returns[j], moved[i] - moved[j]
                left_out = gained > args.clip_eps if gain > 0 else -gained > args.clip_eps
                total += 0.0 if left_out else gain * math.exp(moved[i] + moved[j])
                memory["left_out"].add(left_out)
            per_sequence.append(total / (G - 1))
    return [[a] * len(row) for a, row in zip(per_sequence, old, strict=True)]


def reference(name, args, steps, patch=None):
    """The weights after all steps, and each step's metrics, computed from its tokens and rewards.

    With a patch, name is the script that the patch changes.
    """
    load = dict(dtype=torch.float64)
    model, ref_model, sampler = [
        AutoModelForCausalLM.from_pretrained(args.model, **load).eval() for _ in range(3)
    ]
    if hasattr(args, "lora_rank"):
        model = WithAdapters(model, args)
    if name == "distill":
        ref_model = AutoModelForCausalLM.from_pretrained(args.teacher, **load).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    networks, rates = [model], [args.learning_rate]
    if name in CRITICS:
        judge = args.model
        if name == "ppo_rlhf" and args.reward_model and args.value_init == "reward_model":
            judge = args.reward_model
        value_model = AutoModelForSequenceClassification.from_pretrained(
            judge, num_labels=1, **load
        ).eval()
        if judge == args.model:
            value_model.score.weight.data.zero_()
        networks, rates = [model, value_model], [args.learning_rate, args.value_learning_rate]
    # Every update sets the learning rate.
    optimizers = [torch.optim.Adam(n.parameters(), lr=1.0) for n in networks]
    G, memory, all_metrics = args.num_generations, {"left_out": set()}, []
    beta = getattr(args, "beta", 0.0)
    per_rollout = getattr(args, "num_iterations", 1) * args.num_minibatches
    # p3o's --clip-eps bounds no token's ratio.
    planned, (low, high) = 0, (0.2, 0.2) if patch == "p3o" else bounds_of(args)
    for number_of_step, step in enumerate(steps, start=1):
        sampled_now = step["sequences"] + step["greedy"]
        memory["episodes"] = memory.get("episodes", 0) + len(sampled_now)
        memory["tokens"] = memory.get("tokens", 0) + sum(len(x) for _, x in sampled_now)
        if name == "remax":
            greedy_rewards = rewards_of_the_greedy(model, step, args, tokenizer)
        sequences = step["sequences"]
        lengths = [len(response) for _, response in sequences]
        told = sequences  # what the reference reads
        if name == "self_distill":
            contexts = [text for sample in step["samples"] for text in contexts_of(args, sample)]
            logged = []
            for sample in step["samples"]:
                logged += sample["contexts"] if patch else [sample["context"]] * G
            assert contexts == logged
            questions = [sample["prompt"] for sample in step["samples"] for _ in range(G)]
            told = [
                (tokenizer(f"{context}\n{question}" if context else question).input_ids, response)
                for context, question, (_, response) in zip(
                    contexts, questions, sequences, strict=True
                )
            ]
            memory.setdefault("told", set()).update(map(bool, contexts))
        ended = [response[-1] == EOS for _, response in sequences]
        rewards = [reward for sample in step["samples"] for reward in sample["rewards"]]
        with torch.no_grad():
            old = [logprobs_of(model, s, args.temperature).tolist() for s in sequences]
            ref = [logprobs_of(ref_model, s, args.temperature).tolist() for s in told]
        kl = [
            math.fsum(p - q for p, q in zip(*pair, strict=True))
            for pair in zip(old, ref, strict=True)
        ]
        metrics = {
            "rollout/reward_mean": math.fsum(rewards) / len(rewards),
            "rollout/eos_frac": sum(ended) / len(ended),
        }
        metrics |= {"rollout/response_len": sum(lengths) / len(lengths), "tokens": memory["tokens"]}
        metrics["episodes"] = memory["episodes"]

        # ---- advantages per token
        if name in CRITICS:
            with torch.no_grad():
                old_values = [outputs_of(value_model, s)[:-1].tolist() for s in sequences]
            token_rewards = [
                [-beta * (p - q) for p, q in zip(*pair, strict=True)]
                for pair in zip(old, ref, strict=True)
            ]
            for row, reward in zip(token_rewards, rewards, strict=True):
                row[-1] += reward
            pairs = list(zip(token_rewards, old_values, strict=True))
            if name == "vapo":
                lambdas = [max(0.0, 1 - 1 / (args.gae_alpha * n)) for n in lengths]
                metrics["rollout/lambda"] = math.fsum(lambdas) / len(lambdas)
                memory.setdefault("lambdas", set()).update(lambdas)
            else:
                lambdas = [args.gae_lambda] * len(pairs)
            raw = [gae(*pair, args.gamma, x) for pair, x in zip(pairs, lambdas, strict=True)]
            targets = [gae(*pair, args.gamma, 1.0) for pair in pairs] if name == "vapo" else raw
            returns = [
                [a + v for a, v in zip(*pair, strict=True)]
                for pair in zip(targets, old_values, strict=True)
            ]
            advantages = whitened(raw)
            flat = torch.tensor([x for row in returns for x in row])
            errors = flat - torch.tensor([x for row in old_values for x in row])
            metrics["value/explained_var"] = float(1 - errors.var() / flat.var())
            if beta > 0:
                metrics["kl/response"] = math.fsum(kl) / len(kl)
        else:
            k1 = name in ("reinforce_baseline", "rloo", "remax")
            returns = [
                reward - beta * value * k1 for reward, value in zip(rewards, kl, strict=True)
            ]
            if name == "remax":
                per_sequence = [a - b for a, b in zip(returns, greedy_rewards, strict=True)]
                metrics["rollout/greedy_reward"] = math.fsum(greedy_rewards) / len(greedy_rewards)
                equal = [a == b for a, b in zip(rewards, greedy_rewards, strict=True)]
                equal = [all(equal[k : k + G]) for k in range(0, len(equal), G)]
                metrics["rollout/zero_std_frac"] = sum(equal) / len(equal)
            elif name in DISTILLERS:
                # Other values replace these below.
                per_sequence = returns
            else:
                per_sequence = group_advantages(name, returns, G, args, memory)
            advantages = [[a] * length for a, length in zip(per_sequence, lengths, strict=True)]
        if name in DISTILLERS:
            advantages = [
                [q - p for p, q in zip(*pair, strict=True)] for pair in zip(old, ref, strict=True)
            ]
            if name == "self_distill":
                for i, context in enumerate(contexts):
                    advantages[i] = advantages[i] if context else [0.0] * lengths[i]
                metrics["rollout/context_frac"] = sum(map(bool, contexts)) / len(contexts)
            logged = [row for sample in step["samples"] for row in sample["advantages"]]
            assert logged == [pytest.approx(row, abs=1e-9) for row in advantages]
        if name == "grpo_process":
            advantages = process_advantages(step, G, tokenizer)
            flat, equal = [], []
            for sample in step["samples"]:
                group_rewards = [reward for steps in sample["steps"] for _, reward in steps]
                flat += group_rewards
                equal.append(len(set(group_rewards)) == 1)
                memory.setdefault("steps", set()).update(map(len, sample["steps"]))
            metrics["rollout/step_reward"] = math.fsum(flat) / len(flat)
            metrics["rollout/steps"] = len(flat) / len(sequences)
            metrics["rollout/zero_std_frac"] = sum(equal) / len(equal)
        if name == "grpo_offpolicy":
            # The script multiplies each token's advantage by the token's weight.
            # A test of vLLM records what the engine said. Otherwise the sampler computes it here.
            sampled = step.get("sampled")
            if sampled is None:
                with torch.no_grad():
                    rows = [logprobs_of(sampler, s, args.temperature) for s in sequences]
                sampled = [row.tolist() for row in rows]
            cap = getattr(args, "rollout_correction", 0.0)  # icepop has none
            gaps, truncated, weighted, masked = [], [], [], []
            for i, length in enumerate(lengths):
                logratios = [p - q for p, q in zip(old[i], sampled[i], strict=True)]
                geometric_mean = math.exp(math.fsum(logratios) / length)
                in_bounds = patch != "geo_mask" or args.geo_low <= geometric_mean <= args.geo_high
                if patch == "geo_mask":
                    masked.append(not in_bounds)
                weighted.append([])
                for t in range(length):
                    raw_weight = math.exp(logratios[t])
                    sampler_weight = min(raw_weight, cap) if cap > 0 else 1.0
                    if patch == "icepop":
                        in_bounds = args.icepop_low <= raw_weight <= args.icepop_high
                        sampler_weight = raw_weight
                        masked.append(not in_bounds)
                    weighted[i].append(advantages[i][t] * sampler_weight * in_bounds)
                    gaps.append(abs(logratios[t]))
                    truncated.append(raw_weight > cap > 0)
            advantages = weighted
            metrics["rollout/logprob_gap"] = math.fsum(gaps) / len(gaps)
            if patch != "icepop":
                metrics["rollout/truncated_frac"] = sum(truncated) / len(truncated)
            if masked:
                metrics["rollout/masked_frac"] = sum(masked) / len(masked)
                memory["left_out"].update(masked)

        # ---- the sequences in the minibatches and the tokens that count
        kept, counted = list(range(len(sequences))), lengths
        # The policy doesn't change in these steps.
        fixed = number_of_step <= getattr(args, "value_warmup_steps", 0)
        is_right = [
            x == 1
            for sample in step["samples"]
            for x in accuracy_reward(sample["completions"], [sample["answer"]] * G)
        ]
        memory.setdefault("right", set()).update(is_right)
        if name == "dapo":
            groups = [sample["completions"] for sample in step["samples"]]
            answers = [[sample["answer"]] * G for sample in step["samples"]]
            right = [sum(accuracy_reward(*pair)) for pair in zip(groups, answers, strict=True)]
            mixed = [k for k, number in enumerate(right) if 0 < number < G][: args.num_prompts]
            kept = [G * k + j for k in mixed or range(args.num_prompts) for j in range(G)]
            assert (
                len(mixed) == args.num_prompts
                or len(groups) == (1 + args.max_resample) * args.num_prompts
            )
            # The minibatches index the kept sequences. This converts them to indices of all sequences.
            step["minibatches"] = [[kept[i] for i in part] for part in step["minibatches"]]
            memory["batches"] = memory.get("batches", 0) + len(groups) // args.num_prompts
            metrics["batches"] = memory["batches"]
        if name == "self_distill":
            counted = [n if context else 0 for n, context in zip(lengths, contexts, strict=True)]
        iterations = getattr(args, "num_iterations", 1)
        # With fewer sequences than minibatches, the last ones are empty.
        parts = args.num_minibatches
        assert len(step["minibatches"]) == iterations * parts
        for k in range(iterations):
            one_pass = step["minibatches"][k * parts : (k + 1) * parts]
            assert sorted(sum(one_pass, [])) == kept
            assert max(map(len, one_pass)) - min(map(len, one_pass)) <= 1

        # ---- updates
        sums, losses, norms = (
            dict.fromkeys(
                (
                    "low",
                    "high",
                    "kl2",
                    "ratio",
                    "entropy",
                    "k3",
                    "value",
                    "vclip",
                    "n",
                    "dual",
                    "clips",
                    "masked",
                    "sampler",
                ),
                0.0,
            ),
            [],
            [],
        )
        for number, minibatch in enumerate(step["minibatches"]):
            total = torch.zeros(())
            used = advantages
            if patch in RENEWING:
                with torch.no_grad():
                    rows = [logprobs_of(model, s, args.temperature) for s in sequences]
                given = rewards, advantages, memory, old, ref, [row.tolist() for row in rows]
                used = renewed_advantages(patch, args, minibatch, *given)
            for i in minibatch:
                if counted[i] == 0:
                    continue
                logprobs = logprobs_of(model, sequences[i], args.temperature)
                row = used[i]
                if patch == "opsm":
                    distance = (math.fsum(sampled[i]) - logprobs.sum().item()) / lengths[i]
                    left_out = row[0] < 0 and distance > args.opsm_delta
                    row = [0.0] * lengths[i] if left_out else row
                    sums["masked"] += left_out * lengths[i]
                    memory["left_out"].add(left_out)
                if patch == "full_vocabulary":
                    kls = reverse_kl_of(model, ref_model, sequences[i], told[i], args.temperature)
                scale = weight(name, args, minibatch, lengths[i], [counted[j] for j in minibatch])
                # The sequence's mean log-ratio.
                mean = (logprobs - torch.tensor(old[i])).mean()
                for t in range(lengths[i]):
                    logratio = mean if name == "gspo" else logprobs[t] - old[i][t]
                    total = total + scale * (
                        kls[t]
                        if patch == "full_vocabulary"
                        else token_loss(name, args, logprobs[t], logratio, row[t])
                    )
                    if patch == "kimi_kl":
                        to_sampler = logprobs[t] - sampled[i][t]
                        total = total + scale * args.kl_tau * to_sampler**2
                        sums["sampler"] += 0.5 * to_sampler.item() ** 2
                    if (
                        name in ("grpo", "dr_grpo", "gspo", "grpo_offpolicy", "grpo_process")
                        and args.beta > 0
                    ):
                        upside = ref[i][t] - logprobs[t]
                        total = total + scale * args.beta * (upside.exp() - upside - 1)
                    ratio = math.exp(logratio.item())
                    # In gspo.py a sequence has one ratio, so the test counts this ratio once.
                    if name != "gspo" or t == 0:
                        sums["low"] += ratio < 1 - low
                        sums["high"] += ratio > 1 + high
                        sums["clips"] += 1
                    sums["dual"] += ratio > getattr(args, "dual_clip", math.inf) and row[t] < 0
                    sums["kl2"] += 0.5 * (logprobs[t].item() - old[i][t]) ** 2
                    sums["ratio"] += ratio
                    sums["entropy"] -= logprobs[t].item()
                    sums["k3"] += k3(ref[i][t], logprobs[t].item())
                    sums["n"] += 1
            right = [i for i in minibatch if name == "vapo" and is_right[i]]
            for i in right:
                logprobs = logprobs_of(model, sequences[i], args.temperature)
                share = args.lm_coef / sum(lengths[j] for j in right)
                total = total - share * logprobs.sum()
            value_total = torch.zeros(())
            for i in minibatch if name in CRITICS else []:
                values = outputs_of(value_model, sequences[i])
                for t in range(lengths[i]):
                    near = min(
                        max(values[t], old_values[i][t] - args.value_clip_eps),
                        old_values[i][t] + args.value_clip_eps,
                    )
                    errors = (values[t] - returns[i][t]) ** 2, (near - returns[i][t]) ** 2
                    value_total = value_total + 0.5 * max(errors)
                    sums["vclip"] += bool(errors[1] > errors[0])
            tokens = sum(counted[i] for i in minibatch)
            pretraining = getattr(args, "value_warmup_steps", 0)
            factors = [
                rate(args, planned + number, per_rollout, pretraining),
                rate(args, planned + number, per_rollout),  # of the critic
            ]
            metrics["optim/lr"] = args.learning_rate * factors[0]
            memory.setdefault("emptied", set()).add(tokens == 0)
            if tokens == 0:
                continue
            losses.append(total.item())
            for optimizer, peak, factor in zip(optimizers, rates, factors, strict=False):
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = peak * factor
            if fixed:
                norms.append(0.0)
            else:
                # If every token is clipped, the loss has no gradient. The zero term adds one.
                (total + 0.0 * sum(p.sum() for p in model.parameters())).backward()
                norms.append(clip_gradients(model, args.max_grad_norm))
            if name in CRITICS:
                sums["value"] += value_total.item()
                value_total = value_total + 0.0 * sum(p.sum() for p in value_model.parameters())
                (value_total / tokens).backward()
                memory.setdefault("value_norms", []).append(
                    clip_gradients(value_model, args.max_grad_norm)
                )
            for optimizer in optimizers:
                optimizer.step()
        planned += per_rollout
        count = max(1, sums["n"])
        metrics |= {
            "policy/loss": math.fsum(losses) / per_rollout,
            "optim/grad_norm": math.fsum(norms) / per_rollout,
        }
        clips = max(1, sums["clips"])
        metrics |= {
            "policy/clip_frac_low": sums["low"] / clips,
            "policy/clip_frac_high": sums["high"] / clips,
        }
        metrics |= {
            "policy/clip_frac": (sums["low"] + sums["high"]) / clips,
            "policy/approx_kl": sums["kl2"] / count,
        }
        if patch == "opsm":
            metrics["policy/masked_frac"] = sums["masked"] / count
        if patch == "kimi_kl":
            metrics["kl/sampler"] = sums["sampler"] / count
        if patch in RENEWING[:2]:
            logged = [a for sample in step["samples"] for a in sample["advantages"]]
            assert logged == pytest.approx([row[0] for row in used], abs=1e-9)
        if name == "grpo_offpolicy":
            metrics["policy/dual_clip_frac"] = sums["dual"] / count
            # Every `staleness` steps the sampler gets the model's weights.
            if number_of_step % args.staleness == 0:
                sampler.load_state_dict(model.state_dict())
        metrics |= {
            "policy/ratio_mean": sums["ratio"] / count,
            "policy/entropy": sums["entropy"] / count,
        }
        if name == "self_distill":
            weights = zip(ref_model.parameters(), model.parameters(), strict=True)
            for teacher_weight, policy_weight in weights:
                r = args.teacher_rate
                teacher_weight.data = (1 - r) * teacher_weight.data + r * policy_weight.data
        if name in DISTILLERS or (beta > 0 and name not in CRITICS):
            metrics["kl/ref"] = sums["k3"] / count
        if name in CRITICS:
            metrics |= {
                "value/loss": sums["value"] / count,
                "value/clip_frac": sums["vclip"] / count,
            }
        if fixed:  # then the policy has no loss
            metrics = {key: x for key, x in metrics.items() if not key.startswith("policy/")}
            assert not any(key.startswith("policy/") for key in step["metrics"])
        all_metrics.append(metrics)
    if name in CRITICS:
        assert max(memory["value_norms"]) > args.max_grad_norm, "some gradient must be clipped"
    if name == "vapo" and args.value_warmup_steps > 0:
        assert min(memory["lambdas"]) == 0 < max(memory["lambdas"])
    if name == "vapo":
        assert memory["right"] == {True, False}, "some responses must be right and some wrong"
    if name == "grpo_process" and args.beta > 0:
        assert len(memory["steps"]) > 1, "the responses must have different numbers of steps"
    if patch in LEAVING_OUT:
        assert memory["left_out"] == {True, False}
    if name == "self_distill":
        assert memory["told"] == ({True} if hasattr(args, "context_column") else {True, False})
        networks.append(ref_model)
    # Only the dapo.py case without resampling have empty minibatches.
    empties = getattr(args, "max_resample", 1) == 0
    assert memory["emptied"] == ({True, False} if empties else {False})
    return networks, all_metrics


@pytest.mark.parametrize(
    "name, given", CASES, ids=[f"{name}-{k}" for k, (name, _) in enumerate(CASES)]
)
def test_two_steps_of_main(name, given, double, monkeypatch, tmp_path):
    script = load_patched(name) if name in PATCHES else __import__(name)
    double(script)
    args, steps, saved = run(script, monkeypatch, tmp_path, given)
    known_as = "grpo" if name in ("grpo_multigpu", "grpo_lora") else PATCHES.get(name, name)
    networks, expected = reference(known_as, args, steps, patch=name if name in PATCHES else None)
    lengths = [len(response) for step in steps for _, response in step["sequences"]]
    assert len(set(lengths)) > 3, "the responses must have different lengths"
    for step, metrics in zip(steps, expected, strict=True):
        assert {key: step["metrics"][key] for key in metrics} == pytest.approx(
            metrics, rel=1e-6, abs=1e-9
        )
    clipped = sum(metrics.get("policy/clip_frac", 0.0) for metrics in expected)
    assert clipped > 0 or len(steps[0]["minibatches"]) == 1, (
        "the updates must be large enough to clip some ratios"
    )
    second = "teacher" if known_as == "self_distill" else "value_model"
    for key, network in zip(("model", second), networks, strict=False):
        for parameter, weights in network.state_dict().items():
            torch.testing.assert_close(saved[key][parameter], weights, rtol=1e-6, atol=1e-8)
        start = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float64)
        start = WithAdapters(start, args) if name == "grpo_lora" else start
        moved = max((saved["model"][key] - x).abs().max() for key, x in start.state_dict().items())
        assert moved > 1e-4
