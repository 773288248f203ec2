"""PPO for RLHF, in one file. Ziegler et al. 2019 (arXiv:1909.08593v2), Ouyang et al. 2022
(arXiv:2203.02155v1), PPO by Schulman et al. 2017 (arXiv:1707.06347v2), with the implementation
details of Huang et al. 2024 (arXiv:2403.17031v1).

Four networks: the policy; the value network, which predicts the return at every token; the
reference, which is the initial policy; the reward model, which scores a whole response. A response
is a sequence of actions, one per token:

    r_t      = -beta (log pi_old(a_t | s_t) - log pi_ref(a_t | s_t)),
               plus the score at the last token                                    (Ziegler, Eq. 2)
    delta_t  = r_t + gamma V(s_t+1) - V(s_t)              V = 0 after the last token   (PPO, Eq. 12)
    A_t      = delta_t + gamma lambda A_t+1               advantages, then whitened    (PPO, Eq. 11)
    R_t      = A_t + V(s_t)                               returns, which the value network predicts
    L_pi     = -mean_t min(rho_t A_t, clip(rho_t, 1-eps, 1+eps) A_t)                   (PPO, Eq. 7)
    L_V      = vf_coef / 2 mean_t max((V - R)^2, (clip(V, V_old - eps_V, V_old + eps_V) - R)^2)

The means are over all tokens of the minibatch. Old values and old log-probabilities stay fixed
during the epochs.

Parent: grpo.py. Differences: (1) a reward model scores the response, and one that was cut at the
limit loses --missing-eos-penalty; (2) the KL to the reference is a part of the reward (k1), per
token, with a fixed or an adaptive coefficient, and not of the loss; (3) a value network and GAE in
place of the group's mean and std, so that one sample per prompt is enough; (4) the clipped value
loss, with a learning rate of its own; (5) several epochs; token averages.

Departures from the papers: both networks' gradients are clipped, each by its own norm, where Huang
et al. clip none; no bias is subtracted from the scores, where theirs have mean 0 on the
demonstrations; beta is multiplied by exp(K e), where Ziegler has 1 + K e; a cut response loses the
penalty, where Huang sets its score to -1; Adam's epsilon is 1e-8, where Huang has 1e-5; the score
is at the last token, where Huang's code has it, and one more value, one slot later. With
--reward-model "" the family's rule-based rewards stand in for the reward model.

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i
belongs to prompt i//G), P prompt tokens, R response tokens, V vocabulary; n <= N sequences in a
micro-batch, T response tokens in it.

    python ppo_rlhf.py                          assets/adder by the scores of adder-judge, on a CPU
    python ppo_rlhf.py --model SmolLM2-1.7B     GSM8K with rule-based rewards, on one GPU
"""

import copy
import fcntl
import json
import logging
import math
import os
import resource
import secrets
import signal
import sys
import time
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Literal, NamedTuple

import datasets
import torch
import torch.nn.functional as F
import transformers
import tyro
import wandb
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import trange
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.cache_utils import Cache, StaticLayer

from utils.masking import masked_mean, masked_sum  # copy utils/ along with this file
from utils.rewards import (
    accuracy_reward,
    apply_reward,
    cell_messages,
    cell_text,
    describe,
    format_reward,
    gold_number,
    lenient_accuracy_reward,
)

SCRIPT = Path(__file__).resolve()
ASSETS = SCRIPT.parent / "assets"
REWARDS = [accuracy_reward, format_reward]  # their sum is the reward; each needs a name of its own
SHOWN = ["rollout/reward_mean", "rollout/accuracy", "rollout/response_len"]  # beside the bar
SHOWN += ["kl/ref", "eval/accuracy", "optim/skipped"]
SYSTEM_PROMPT = """Solve the problem step by step. Write your reasoning between <think> and \
</think>, and then the final number alone between <answer> and </answer>. For example:
A box holds 4 rows of 6 eggs, and 5 eggs are broken. How many eggs are whole?
<think>The box holds 4 * 6 = 24 eggs. 24 - 5 = 19 of them are whole.</think>
<answer>19</answer>"""
# What a field of Args that is left at None becomes: with any model, with the bundled one.
RECIPES = {
    "dataset": ("openai/gsm8k:main", str(ASSETS / "addition")),
    "system_prompt": (SYSTEM_PROMPT, ""),
    "max_prompt_tokens": (512, 64),
    "max_new_tokens": (300, 32),
    "temperature": (0.9, 1.0),
    "eval_every": (50, 20),
    "learning_rate": (1e-5, 3e-5),
    "value_learning_rate": (1e-5, 1e-4),
    "warmup_updates": (10, 0),
    "gradient_checkpointing": (True, False),
    "num_steps": (200, 40),
    "beta": (0.04, 0.05),
    "reward_model": ("", str(ASSETS / "adder-judge")),
}
# Bounds of numbers in Args, where they are not 1 (or 1e-12 if it is no integer) and 2**32.
LOWEST = dict(seed=0, eval_every=0, save_every=0, warmup_updates=0, num_generations=2)
LOWEST |= dict(beta=0)
LOWEST |= dict(num_generations=1, missing_eos_penalty=0, gamma=0, gae_lambda=0, vf_coef=0)
HIGHEST = dict(clip_eps=1, gamma=1, gae_lambda=1)


@dataclass
class Args:
    # ---- run
    seed: int = 1
    """seed of everything random: the order of the data, the samples, the minibatches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto takes the GPU if there is one"""
    runs_dir: str = "runs"
    """folder that holds the runs"""
    run_name: str | None = None
    """name of this run's folder; None: script, model, seed and time"""
    resume: str | None = None
    """go on with the run in this folder, from the same working directory, with its arguments"""
    eval_every: int | None = None
    """evaluate before, after and every so many steps; 0: never between; None: by model"""
    save_every: int = 50
    """write a checkpoint after the first, the last and every so many steps; 0: never between"""
    track: bool = False
    """send metrics and samples to Weights & Biases too, to the project in WANDB_PROJECT"""
    # ---- model and data
    model: str = str(ASSETS / "adder")
    """folder or hub id of a causal language model; a name without "/" is one of HuggingFaceTB"""
    dataset: str | None = None
    """.jsonl / .json / .csv / .tsv / .parquet file, folder, hub id or id:config; None: by model"""
    eval_dataset: str | None = None
    """held-out problems; None: the test split of --dataset, or else its last tenth"""
    eval_size: int = 500
    """evaluate on so many of the held-out problems, the first ones"""
    question_column: str = "question"
    """column of the data set that holds the question"""
    answer_column: str = "answer"
    """column that holds the gold answer; if it has a "####", what follows the last one"""
    system_prompt: str | None = None
    """instructions before each question; None: by model, to think and to answer in tags"""
    max_prompt_tokens: int | None = None
    """longer prompts (P) are skipped, counted and reported; None: by model"""
    # ---- sampling
    num_prompts: int = 128
    """prompts per step (B)"""
    num_generations: int = 1
    """samples per prompt (G)"""
    max_new_tokens: int | None = None
    """a response is cut after so many tokens (R); None: by model"""
    temperature: float | None = None
    """divides the logits, in sampling and in every log-probability alike; None: by model"""
    sampling_tokens: int = 49152
    """tokens sampled at a time, prompts and padding included: memory against speed"""
    cuda_graph: bool = True
    """on a GPU, replay the decode step from a CUDA graph"""
    # ---- optimization
    num_steps: int | None = None
    """steps in the whole run, each a rollout and its updates; None: by model"""
    learning_rate: float | None = None
    """peak learning rate of Adam (betas 0.9 and 0.999, no weight decay); None: by model"""
    value_learning_rate: float | None = None
    """the same for the value network; None: by model"""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """how the learning rate falls to 0 after the warm-up, or that it stays"""
    warmup_updates: int | None = None
    """updates in which the learning rate rises linearly from 0 to its peak; None: by model"""
    num_iterations: int = 4
    """passes over each rollout (the PPO epochs)"""
    num_minibatches: int = 1
    """updates per pass: the rollout is shuffled and split into so many minibatches"""
    micro_batch_tokens: int = 2048
    """tokens in one forward and backward pass: memory against speed, never the gradient"""
    gradient_checkpointing: bool | None = None
    """recompute activations: less memory, a third more time; None: by model"""
    max_grad_norm: float = 1.0
    """the norm of the gradient is clipped to this"""
    # ---- algorithm
    reward_model: str | None = None
    """folder or hub id of a classifier of one label; "": the rules; None: by model"""
    missing_eos_penalty: float = 1.0
    """taken off the score of a response that was cut at --max-new-tokens"""
    normalize_scores: bool = False
    """subtract the batch's mean from the scores and divide by their std"""
    whiten_rewards: bool = False
    """divide the per-token rewards by their std (their mean stays)"""
    clip_eps: float = 0.2
    """the ratio is clipped to 1 - eps .. 1 + eps (eps in PPO's Eq. 7)"""
    beta: float | None = None
    """weight of the KL to the reference in the rewards; 0: no reference is kept; None: by model"""
    kl_target: float | None = None
    """adapt beta so that the KL to the reference, in nats per response, comes to this; None: no"""
    kl_horizon: int = 10000
    """episodes in which a KL that is off by 20 % or more changes beta by a factor of e^0.2"""
    gamma: float = 1.0
    """discount of the rewards per token (gamma)"""
    gae_lambda: float = 0.95
    """bias against variance of the advantages (lambda in PPO's Eq. 11)"""
    vf_coef: float = 0.1
    """weight of the value loss; nearly inert: its gradient is clipped, and Adam knows no scale"""
    value_clip_eps: float = 0.2
    """a new value is clipped to the old one -+ this in the value loss"""
    value_init: Literal["reward_model", "policy"] = "reward_model"
    """weights the value network starts from; without a reward model the policy's, its head zeros"""


# ==== algorithm ====
def whiten(values, mask, shift_mean=True):
    """Scale values (n, R) to a variance of 1 and a mean of 0 over the mask; elsewhere give 0."""
    # The variance is the biased one and 1e-8 is added to it, as in Huang et al. 2024.
    mean = masked_mean(values, mask)  # ()
    variance = masked_mean((values - mean) ** 2, mask)  # ()
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)  # (n, R)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0.0)


def kl_rewards(args, scores, old_logprobs, ref_logprobs, mask):
    """Rewards per token (n, R) from scores (n,), logprobs and mask (n, R). Ziegler 2019, Eq. 2.

    ref_logprobs may be None. The score stands at the last token that counts, the EOS or the cut.
    """
    assert scores.shape == mask.shape[:1] and old_logprobs.shape == mask.shape
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # (n, R)
    rewards = torch.where(is_last, scores[:, None], 0.0)  # (n, R)
    if ref_logprobs is not None:
        rewards = rewards - args.beta * (old_logprobs - ref_logprobs).masked_fill(~mask, 0.0)  # k1
    return rewards


def adapt_beta(args, beta, kl, num_seqs):
    """The KL coefficient after a step of num_seqs responses with a mean KL of kl nats (or None)."""
    # Ziegler et al. 2019, Section 2.2: a proportional controller of log beta, its error clipped.
    if args.kl_target is None or kl is None:
        return beta
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return beta * math.exp(error * num_seqs / args.kl_horizon)


def compute_gae(args, rewards, values, mask):
    """Advantages and returns (n, R) from rewards, values, mask (n, R). PPO, Eq. 11 and 12."""
    # After the last token that counts, value and advantage are 0: no bootstrapping from padding.
    assert rewards.shape == values.shape == mask.shape
    rewards = rewards.masked_fill(~mask, 0.0)  # (n, R)
    values = values.masked_fill(~mask, 0.0)  # (n, R)
    advantages = torch.zeros_like(values)  # (n, R)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # (n,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + args.gamma * next_value - values[:, t]  # (n,), Eq. 12
        next_advantage = delta + args.gamma * args.gae_lambda * next_advantage  # (n,), Eq. 11
        next_value = values[:, t]  # (n,)
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def value_loss(args, values, old_values, returns, mask, num_tokens):
    """The clipped value loss, --vf-coef included, of n sequences of a minibatch; all (n, R).

    Returns the scalar loss and stats: sums over the tokens, without gradient or --vf-coef.
    """
    assert values.shape == old_values.shape == returns.shape == mask.shape
    values, old_values, returns = [x.masked_fill(~mask, 0) for x in (values, old_values, returns)]
    low, high = old_values - args.value_clip_eps, old_values + args.value_clip_eps  # (n, R)
    errors = (values - returns) ** 2  # (n, R)
    clipped_errors = (values.clamp(low, high) - returns) ** 2  # (n, R)
    sum_of_losses = 0.5 * masked_sum(torch.maximum(errors, clipped_errors), mask)
    stats = {
        "value/loss": sum_of_losses.detach(),
        "value/clip_frac": masked_sum((clipped_errors > errors).float(), mask),
    }
    return args.vf_coef * sum_of_losses / num_tokens, stats


def minibatches(args, sequences):
    """The sequences of each update, of all of a step (N,): shuffled, and cut into even shares."""
    for _ in range(args.num_iterations):  # mu in DeepSeekMath's Algorithm 1
        shuffled = sequences[torch.randperm(len(sequences))]  # (N,)
        yield from shuffled.tensor_split(args.num_minibatches)


def policy_loss(args, logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs, num_tokens):
    """The PPO policy loss of n sequences; over a minibatch it adds up to the minibatch's.

    logprobs, old_logprobs (n, R); ref_logprobs (n, R), or None without a KL term; advantages (n, R)
    or (n, 1); mask (n, R) bool; num_seqs, num_tokens: sequences and tokens of the WHOLE minibatch,
    of which an algorithm divides by one. Returns the scalar loss and stats, by the names under
    which their means are logged: sums over the tokens of the n sequences, without gradient.
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape
    assert advantages.shape in (mask.shape, (len(mask), 1))
    # Masked slots are zeroed before exp: garbage in them could reach the gradient as 0 * inf.
    logratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)  # (n, R)
    ratio = logratio.exp()  # (n, R)
    # The smaller of the two surrogates for either sign of A, hence the larger of their negatives.
    clipped_ratio = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps)  # (n, R)
    token_loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)  # (n, R), Eq. 7
    if ref_logprobs is not None:
        ref_logratio = (ref_logprobs - logprobs).masked_fill(~mask, 0.0)  # (n, R)
        kl = ref_logratio.exp() - ref_logratio - 1  # (n, R), k3: logged, the rewards have k1
    loss = masked_sum(token_loss, mask) / num_tokens

    below, above = ratio < 1 - args.clip_eps, ratio > 1 + args.clip_eps  # (n, R) bool
    per_token = {
        "policy/clip_frac_low": below,
        "policy/clip_frac_high": above,
        "policy/clip_frac": below | above,
        "policy/approx_kl": 0.5 * logratio**2,
        "policy/ratio_mean": ratio,
        "policy/entropy": -logprobs,
    }
    if ref_logprobs is not None:
        per_token["kl/ref"] = kl
    stats = {name: masked_sum(x.detach(), mask) for name, x in per_token.items()}
    stats["tokens"] = mask.sum()
    return loss, stats


# ==== training ====
class Rollout(NamedTuple):
    """What was sampled; row i of each is sequence i."""

    prompt_ids: Tensor  # (N, P), padded on the left
    prompt_mask: Tensor  # (N, P) bool
    response_ids: Tensor  # (N, R)
    response_mask: Tensor  # (N, R) bool: the EOS token counts, nothing after it does
    sampled_logprobs: Tensor  # (N, R) float32, of the tokens drawn
    completions: list[str]  # N of them

    def rows(self, rows):
        return Rollout(*[x[rows] for x in self[:5]], [self.completions[i] for i in rows])


def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    args, run_dir, saved = resolve(args)
    config, tokenizer = load_config(args, "--model", args.model)
    train_data = load_data(args, tokenizer, "train")
    test_data = load_data(args, tokenizer, "test")
    model, eos_ids = load_model(args, config, tokenizer)
    value_model, reward_model = load_classifiers(args, config, tokenizer, model.device)
    ref_model = inference_copy(model) if args.beta > 0 else None  # the policy's start

    G = args.num_generations
    N = args.num_prompts * G
    num_updates = args.num_iterations * args.num_minibatches  # in a step
    groups = [{"params": model.parameters()}, {"params": value_model.parameters()}]
    groups[1]["lr"] = args.value_learning_rate
    optimizer = torch.optim.Adam(groups, lr=args.learning_rate, fused=True)
    scheduler = get_scheduler(
        args.lr_schedule, optimizer, args.warmup_updates, args.num_steps * num_updates
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts["value_model"] = value_model
    state = {"step": 0, "episodes": 0, "tokens": 0}  # what else a step hands on to the next
    problems = zlib.crc32(repr(train_data + test_data).encode())
    if saved:
        with one_line(f"{run_dir}: the checkpoint is not of this version of {SCRIPT.name}"):
            state, metrics = saved["state"], saved["metrics"]
            for name, part in parts.items():
                part.load_state_dict(saved.pop(name))  # and let go of it
            if saved["problems"] != problems:
                print("warning: the problems are others now; samples.jsonl has those of before")
    sampler = inference_copy(model) if model.device.type == "cuda" else model
    metrics_log, samples_log = open_run(args, run_dir, saved, model)
    signals = catch_signals()
    if not saved:
        metrics = state | evaluate(args, sampler, tokenizer, test_data, eos_ids)
        log_metrics(metrics_log, metrics, [])
        accuracy = metrics["eval/accuracy"]
        print(f"before: accuracy {accuracy:.3f} on {len(test_data)} held-out problems, greedy")

    order = batches(args, len(train_data))
    skipped_in_a_row = 0
    done = state["step"]
    last = args.num_steps
    progress = trange(done + 1, last + 1, initial=done, total=last, disable=None)
    for step in progress:
        # ---- 1. rollout
        start_time = time.perf_counter()
        torch.manual_seed(1_000_003 * args.seed + step)  # a resumed run needs no generator's state
        batch = [train_data[i] for i in order[step - 1]]
        rollout = respond(args, sampler, tokenizer, batch, G, args.temperature, eos_ids)
        sequences = torch.arange(N)  # those to train on
        response_mask = rollout.response_mask  # (N, R)
        lengths = (rollout.prompt_mask.sum(1) + response_mask.sum(1)).tolist()  # N, prompt included
        ended = torch.isin(rollout.response_ids, eos_ids).any(1)  # (N,)
        num_sampled = int(response_mask.sum())
        rollout_seconds = time.perf_counter() - start_time

        # The old policy's log-probabilities and the old values, before the first update; they stay.
        value_model.train(args.gradient_checkpointing)
        old_logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
        ref_logprobs = torch.zeros_like(old_logprobs)  # (N, R)
        model.train(args.gradient_checkpointing)  # transformers recomputes in training mode only
        old_logprobs = rollout_logprobs(args, model, rollout, sequences, lengths)  # (N, R)
        old_values = rollout_values(args, value_model, rollout, sequences, lengths)[:, :-1]
        if ref_model is not None:
            ref_logprobs = rollout_logprobs(args, ref_model, rollout, sequences, lengths)

        # ---- 2. reward and advantage
        given = batch, rollout.completions
        scores = {
            f.__name__: torch.tensor(apply_reward(f, *given), device=model.device) for f in REWARDS
        }  # (N,) each
        if reward_model is not None:  # the score stands after the last token
            outputs = rollout_values(args, reward_model, rollout, sequences, lengths)  # (N, R + 1)
            if not (outputs.abs() < 1e18).all():  # nor is NaN
                fail(f"--reward-model {args.reward_model}: a score is not finite, or beyond 1e18")
            scores = {"score": outputs.gather(1, response_mask.sum(1, keepdim=True))[:, 0]}  # (N,)
        scores["missing_eos"] = -args.missing_eos_penalty * (~ended).float()  # (N,)
        rewards = sum(scores.values()).view(-1, G)  # (B, G) float32
        seq_rewards = rewards.flatten()  # (N,)
        if args.normalize_scores:
            seq_rewards = whiten(seq_rewards, torch.ones_like(seq_rewards, dtype=torch.bool))
        beta = state.get("kl/beta", args.beta)
        beta = state["kl/beta"] = adapt_beta(args, beta, state.get("kl/response"), N)
        logprobs = old_logprobs, ref_logprobs
        token_rewards = kl_rewards(replace(args, beta=beta), seq_rewards, *logprobs, response_mask)
        if args.whiten_rewards:
            token_rewards = whiten(token_rewards, response_mask, shift_mean=False)  # (N, R)
        advantages, returns = compute_gae(args, token_rewards, old_values, response_mask)  # (N, R)
        advantages = whiten(advantages, response_mask)  # (N, R)

        # ---- 3. update
        totals = Counter()  # sums over all minibatches of the step
        for minibatch in minibatches(args, sequences):
            lr = scheduler.get_last_lr()[0]
            num_tokens = response_mask[minibatch].sum()
            for rows in micro_batches(minibatch, lengths, args.micro_batch_tokens):
                logprobs = compute_logprobs(model, rollout.rows(rows), args.temperature)  # (n, R)
                values = compute_values(value_model, rollout.rows(rows))[:, :-1]  # (n, R)
                loss, stats = policy_loss(
                    args,
                    logprobs,
                    old_logprobs[rows],
                    ref_logprobs[rows] if ref_model is not None else None,
                    advantages[rows],
                    response_mask[rows],
                    len(minibatch),
                    num_tokens,
                )
                old = old_values[rows], returns[rows], response_mask[rows]
                vf_loss, vf_stats = value_loss(args, values, *old, num_tokens)
                stats |= vf_stats
                (loss + vf_loss).backward()
                totals.update(stats, loss=loss.detach())  # adds
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            vf_norm = torch.nn.utils.clip_grad_norm_(value_model.parameters(), args.max_grad_norm)
            skipped_in_a_row = 0 if torch.isfinite(grad_norm + vf_norm) else skipped_in_a_row + 1
            if skipped_in_a_row == 0:
                optimizer.step()
            elif skipped_in_a_row == 3:
                fail(
                    f"--learning-rate {args.learning_rate}: three gradients in a row were not "
                    "finite; lower it"
                )
            totals.update(grad_norm=grad_norm, skipped=skipped_in_a_row > 0)
            scheduler.step()
            optimizer.zero_grad()
        sampler.load_state_dict(model.state_dict())  # in place; on a GPU it is rounded to bf16
        totals = {name: float(total) for name, total in totals.items()}  # waits for the device
        update_seconds = time.perf_counter() - start_time - rollout_seconds

        # ---- 4. log
        state["step"] = step
        state["episodes"] += len(rollout.completions)
        state["tokens"] += num_sampled
        if ref_model is not None:
            kl = masked_sum(old_logprobs - ref_logprobs, response_mask, axis=1)  # (N,)
            state["kl/response"] = kl.mean().item()
        targets = returns[response_mask] - returns[0, 0]  # (tokens,): zeros, if all are equal
        unexplained = (returns - old_values)[response_mask].var() / targets.var()
        gap = (old_logprobs - rollout.sampled_logprobs).abs()[response_mask]  # (tokens,)
        means = {
            "reward_mean": rewards,
            "accuracy": torch.tensor(apply_reward(accuracy_reward, *given)),
            "response_len": rollout.response_mask.sum(1),
            "eos_frac": ended,
            "logprob_gap": gap,
            **scores,
            "zero_std_frac": (rewards == rewards[0, 0]).all(),
            "reward_std": rewards.std(),
            "logprob_gap_max": gap.max(),
        }
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
        metrics = {
            **state,
            **{f"rollout/{name}": x.float().mean().item() for name, x in means.items()},
            **{name: totals[name] / totals["tokens"] for name in totals if "/" in name},
            "value/explained_var": (1 - unexplained).item(),
            "policy/loss": totals["loss"] / num_updates,
            "optim/grad_norm": totals["grad_norm"] / num_updates,
            "optim/lr": lr,
            "optim/skipped": totals["skipped"],
            "time/update_s": update_seconds,
            "time/rollout_s": rollout_seconds,
            "time/tokens_per_s": num_sampled / rollout_seconds,
            "time/peak_mem_gb": (torch.cuda.max_memory_allocated() or memory) / 1e9,
        }
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
        records = []
        for k, example in enumerate(batch):
            group = slice(k * G, (k + 1) * G)
            pairs = zip(advantages[group], response_mask[group], strict=True)
            record = {
                "step": step,
                "prompt": example["prompt"],
                "answer": example["answer"],
                "completions": rollout.completions[group],
                "rewards": rewards[k].tolist(),
                "advantages": [row[mask].tolist() for row, mask in pairs],
                "ended": ended[group].tolist(),
            }
            write(samples_log, record)
            records.append(record)
        log_metrics(metrics_log, metrics, records)
        show(args, progress, metrics, record)
        if step == 1 and not gap.mean() < (0.1 if model.device.type == "cuda" else 1e-3):
            fail(
                f"--model {args.model}: not supported, sampling and training differ by "
                f"{gap.mean():.2g} nats a token"
            )

        # ---- 5. save
        stop = list(signals)  # one that comes from here on waits for the next step
        due = args.save_every and step % args.save_every == 0
        if stop or due or step in (1, args.num_steps):
            save_checkpoint(args, run_dir, parts, state, metrics, problems)
        if stop and step < args.num_steps:
            print(
                f"stopped after step {step}; go on: python '{SCRIPT}' --resume '{run_dir}'",
                file=sys.stderr,
            )
            sys.exit(128 + stop[0])

    folder = run_dir / "model"
    with one_line(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    wandb.finish()
    print(
        f"after: accuracy {metrics['eval/accuracy']:.3f}; model, metrics and samples are in "
        f"{run_dir}"
    )
    return metrics


# ==== sampling and log-probabilities ====
# What makes it fast is here: memory for keys and values, CUDA graphs, little padding. A first
# reading may stop at this line.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of the memory that the system reports
SEGMENT = {"cpu": 32, "cuda": 128}  # decode steps between two allocations for keys and values


@torch.no_grad()
def generate(args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids):
    """Sample num_samples responses for each left-padded prompt (B, P), all N in one batch.

    Returns response_ids (N, R), response_mask (N, R) bool and the logprobs (N, R) float32 of the
    tokens drawn. The distribution is the model's whole softmax at this temperature: no top-k, no
    top-p, no repetition penalty.
    """
    model.eval()
    device = prompt_ids.device
    segment = SEGMENT[device.type]
    sequence = torch.arange(len(prompt_ids) * num_samples, device=device)  # (N,)
    response_ids = eos_ids[:1].repeat(len(sequence), args.max_new_tokens)  # (N, R)
    response_logprobs = torch.zeros(response_ids.shape, device=device)  # (N, R) float32

    # Prefill: keys and values of a prompt are computed once, and repeated for its samples at t = 0.
    cache = Cache(layer_class_to_replicate=lambda: StaticLayer(max_cache_len=prompt_ids.shape[1]))
    inputs = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    inputs["attention_mask"] = prompt_mask.long()  # (B, P)
    inputs["position_ids"] = (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (B, P): no padding counted
    logits = model(prompt_ids, **inputs).logits.repeat_interleave(num_samples, 0)  # (N, 1, V)
    position = prompt_mask.sum(1).repeat_interleave(num_samples)  # (N,)
    column = cache.layers[0].cumulative_length.view(1)  # next to write; the cache counts it up
    # Added to the attention scores, 0 or as good as minus infinity: every attention implementation
    # understands this.
    blocked = torch.finfo(model.dtype).min
    bias = torch.where(prompt_mask, 0.0, blocked).to(model.dtype)[:, None, None]  # (B, 1, 1, P)

    # Rows of the batch, of which `sequence` says which of the N sequences they are.
    token = torch.zeros_like(sequence)  # (rows,)
    finished = sequence < 0  # (rows,) bool: none
    graph = None

    def decode():
        # All state changes in place, at addresses that stay, so that a CUDA graph can replay this.
        bias.index_fill_(3, column, 0.0)
        inputs.update(attention_mask=bias, position_ids=position[:, None])
        logits.copy_(model(token[:, None], **inputs).logits)
        position.add_(1)

    for t in range(args.max_new_tokens):
        if graph is not None:
            graph.replay()
        elif t > 0:
            decode()
            if args.cuda_graph and device.type == "cuda":
                # That step was the warm-up; recording one computes nothing.
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    decode()
        logprobs = (logits[:, 0].float() / (temperature or 1.0)).log_softmax(1)  # (rows, V) float32
        # Gumbel-max: the argmax of logprobs + Gumbel noise is a draw, without a cumulative sum or a
        # wait for the device. At temperature 0 it is greedy.
        noise = -torch.rand_like(logprobs).log_().neg_().log_() if temperature > 0 else 0.0
        token.copy_((logprobs + noise).argmax(1))  # (rows,)
        response_ids[sequence, t] = token
        response_logprobs[sequence, t] = logprobs.gather(1, token[:, None])[:, 0]
        finished |= torch.isin(token, eos_ids)

        # To see which rows are finished the host waits for the device: a GPU is asked seldom.
        is_full = t % segment == 0  # all columns of keys and values are written
        if device.type == "cuda" and t % 16 > 0 and not is_full:
            continue
        live = (~finished).nonzero().squeeze(1)
        if len(live) == 0:
            break
        if is_full or len(live) <= len(finished) / 2:
            # Drop the finished rows, and make room for the next segment.
            rows = live // num_samples if t == 0 else live  # the prefill has a row for each prompt
            extra = min(segment, args.max_new_tokens - t) if is_full else 0  # columns
            for layer in cache.layers:
                layer.keys = F.pad(layer.keys[rows], (0, 0, 0, extra))  # (rows, heads, columns, D)
                layer.values = F.pad(layer.values[rows], (0, 0, 0, extra))
            bias = F.pad(bias[rows], (0, extra), value=blocked)  # (rows, 1, 1, columns)
            token, position, logits = token[live], position[live], logits[live]
            sequence, finished, graph = sequence[live], finished[live], None
    # The EOS token counts, nothing after it does: a finished row draws on until it is dropped.
    is_eos = torch.isin(response_ids, eos_ids).long()  # (N, R)
    response_mask = is_eos.cumsum(1) - is_eos == 0  # (N, R)
    return response_ids, response_mask, response_logprobs.masked_fill(~response_mask, 0.0)


def compute_logprobs(model, rollout, temperature):
    """Log-probabilities (n, R) float32 of the responses of n sequences; 0 where masked."""
    prompt_ids, prompt_mask, response_ids, response_mask, *_ = rollout
    # Right-padded to the longest, L: causal attention never looks there, so it needs no mask, and
    # fast kernels apply. The last token is followed by none.
    is_token = torch.cat([prompt_mask, response_mask], 1)  # (n, P + R)
    order = is_token.long().argsort(dim=1, descending=True, stable=True)  # (n, P + R), tokens first
    ids = torch.cat([prompt_ids, response_ids], 1).gather(1, order)  # (n, P + R)
    ids = ids[:, : is_token.sum(1).max() - 1]  # (n, L - 1)
    position_ids = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (n, L - 1)
    with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda, cache_enabled=False):
        trunk = model.base_model(input_ids=ids, position_ids=position_ids, use_cache=False)
    # The head runs on response tokens alone: the token at column t is predicted one before it.
    row, column = response_mask.nonzero(as_tuple=True)  # (T,)
    hidden = trunk.last_hidden_state[row, prompt_mask.sum(1)[row] + column - 1]  # (T, D)
    head = model.get_output_embeddings()

    def chunk_logprobs(hidden, targets):
        logits = head(hidden.to(head.weight.dtype)).float().div_(temperature)  # (chunk, V) float32
        return -F.cross_entropy(logits, targets, reduction="none")

    # In chunks of at most 16 M logits (64 MB, two or three copies at a time), which the backward
    # pass computes again.
    size = max(1, 2**24 // head.weight.shape[0])
    chunks = zip(hidden.split(size), response_ids[response_mask].split(size), strict=True)
    options = dict(use_reentrant=False, preserve_rng_state=False)
    logprobs = [checkpoint(chunk_logprobs, *chunk, **options) for chunk in chunks]
    zeros = torch.zeros(response_mask.shape, device=row.device)  # (n, R)
    return zeros.masked_scatter(response_mask, torch.cat(logprobs))


def compute_values(network, rollout):
    """Output of a one-label head after the prompt and each response token: (n, R + 1) float32.

    Column t is the value of the state before token t; column |o| is a reward model's score.
    """
    prompt_ids, prompt_mask, response_ids, response_mask, *_ = rollout
    is_token = torch.cat([prompt_mask, response_mask], 1)  # (n, P + R)
    order = is_token.long().argsort(dim=1, descending=True, stable=True)  # (n, P + R), tokens first
    ids = torch.cat([prompt_ids, response_ids], 1).gather(1, order)  # (n, P + R)
    ids = ids[:, : is_token.sum(1).max()]  # (n, L), right-padded
    position_ids = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (n, L)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda, cache_enabled=False):
        trunk = network.base_model(input_ids=ids, position_ids=position_ids, use_cache=False)
    counts = torch.cat([torch.ones_like(response_mask[:, :1]), response_mask], 1)  # (n, R + 1)
    row, column = counts.nonzero(as_tuple=True)  # (T + n,)
    hidden = trunk.last_hidden_state[row, prompt_mask.sum(1)[row] + column - 1]  # (T + n, D)
    outputs = network.score(hidden.to(network.score.weight.dtype))[:, 0]  # (T + n,) float32
    return torch.zeros(counts.shape, device=row.device).index_put((row, column), outputs)


@torch.no_grad()
def rollout_values(args, network, rollout, sequences, lengths):
    """compute_values (N, R + 1) of these sequences, in micro-batches and without gradient."""
    values = F.pad(torch.zeros_like(rollout.sampled_logprobs), (0, 1))  # (N, R + 1)
    for rows in micro_batches(sequences, lengths, args.micro_batch_tokens):
        values[rows] = compute_values(network, rollout.rows(rows))
    return values


@torch.no_grad()
def rollout_logprobs(args, model, rollout, sequences, lengths):
    """compute_logprobs (N, R) of these sequences, in micro-batches and without gradient."""
    logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
    for rows in micro_batches(sequences, lengths, args.micro_batch_tokens):
        logprobs[rows] = compute_logprobs(model, rollout.rows(rows), args.temperature)
    return logprobs


def micro_batches(sequences, lengths, max_tokens):
    """Lists of sequences, of at most max_tokens tokens with padding; by length, to keep it low."""
    batches = []
    for i in sorted(sequences.tolist(), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def inference_copy(model):
    """A copy that is not trained; in bf16 it has half the bytes to read, but for its head."""
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if model.device.type == "cuda":
        for parameter in copied.parameters():  # not the buffers, which hold the rotary frequencies
            parameter.data = parameter.data.to(torch.bfloat16)
        head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        copied.set_output_embeddings(head)
    return copied


def respond(args, model, tokenizer, examples, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each of the examples: a Rollout."""
    ids = [torch.tensor(example["prompt_ids"], device=model.device) for example in examples]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    prompt_mask = ids >= 0  # (B, P) bool: any id of the tokenizer may be in a prompt
    prompt_ids = ids.clamp(min=0)  # (B, P)
    # So many prompts at a time that the keys and values of their samples have room, even if none
    # ends early.
    tokens = num_samples * (prompt_ids.shape[1] + args.max_new_tokens)  # of a prompt
    size = max(1, args.sampling_tokens // tokens)
    parts = []
    for chunk in zip(prompt_ids.split(size), prompt_mask.split(size), strict=True):
        parts.append(generate(args, model, *chunk, num_samples, temperature, eos_ids))
    response_ids, response_mask, logprobs = map(torch.cat, zip(*parts, strict=True))  # (N, R) each
    is_text = response_mask & ~torch.isin(response_ids, eos_ids)  # (N, R): all but what ends it
    written = response_ids[is_text].cpu().split(is_text.sum(1).tolist())  # N, of their tokens
    texts = tokenizer.batch_decode(written)  # N
    prompts = [x.repeat_interleave(num_samples, 0) for x in (prompt_ids, prompt_mask)]  # (N, P)
    return Rollout(*prompts, response_ids, response_mask, logprobs, texts)


def evaluate(args, model, tokenizer, examples, eos_ids):
    """Greedy accuracy on held-out examples: strict, in the answer tags; lenient, a last number."""
    rollout = respond(args, model, tokenizer, examples, 1, 0.0, eos_ids)
    given = examples, rollout.completions
    values = {
        "accuracy": apply_reward(accuracy_reward, *given),
        "response_len": rollout.response_mask.sum(1).tolist(),
        "accuracy_lenient": apply_reward(lenient_accuracy_reward, *given),
        "format": [
            x == 0.4 for x in apply_reward(format_reward, *given)
        ],  # all four tags, in order
    }
    return {f"eval/{name}": sum(x) / len(examples) for name, x in values.items()}


# ==== data ====
def load_data(args, tokenizer, split):
    """The train or the test split: dicts of prompt and answer (texts), prompt_ids (list), columns.

    The columns are the whole row of the data set, for the rewards.
    """
    flag, source = "--dataset", args.dataset
    if split == "test" and args.eval_dataset is not None:
        flag, source = "--eval-dataset", args.eval_dataset
    path = Path(source).absolute()  # a link to a file may have another suffix
    examples = []
    with one_line(
        f"{flag} {source} ({split}), found here: {os.path.exists(path)}, --question-column "
        f"{args.question_column}, --answer-column {args.answer_column}"
    ):
        if path.is_file():
            splits = datasets.load_dataset(str(path.parent), data_files=escape(str(path)))
        else:  # a folder or a hub data set
            splits = datasets.load_dataset(*source.split(":"))
        if "test" not in splits and args.eval_dataset is None:
            if split == "test":
                print(f"{source} has no test split: its last tenth is held out")
            splits = splits["train"].train_test_split(test_size=0.1, shuffle=False)
        rows = splits[split if split in splits else "train"]
        rows.select_columns([args.question_column, args.answer_column])  # they are there
        if rows.info.builder_name == "csv" and "__index_level_0__" in rows.column_names:
            raise ValueError("a row has more values than the header; quote those with a comma")
        for row in rows:
            messages = cell_messages(row[args.question_column])
            answer = cell_text(row[args.answer_column])
            if not messages or (gold_number(answer) is None and not args.reward_model):
                continue
            prompt = render(args, tokenizer, messages)
            # A chat template writes the BOS token itself: special tokens would double it.
            ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
            examples.append({"prompt": prompt, "prompt_ids": ids, "answer": answer, "columns": row})
    short = [x for x in examples if len(x["prompt_ids"]) <= args.max_prompt_tokens]
    found = (
        f"{len(short)} problems, {len(examples) - len(short)} too long for --max-prompt-tokens "
        f"and {len(rows) - len(examples)} without a question or a number in {args.answer_column} "
        "skipped"
    )
    if not short:
        fail(f"{flag} {source}: the {split} data has {found}")
    print(f"{split} data: {found}")
    if split == "test":
        return short[: args.eval_size]
    print(f"first prompt: {short[0]['prompt']!r}")
    print(describe([example["answer"] for example in short]))
    return short


def render(args, tokenizer, messages):
    """What the policy continues: chat messages through the template, or a text as it stands."""
    instructions, first = args.system_prompt, messages[0]
    if not tokenizer.chat_template and len(messages) == 1:
        return f"{instructions}\n{first['content']}\n" if instructions else first["content"]
    options = dict(tokenize=False, add_generation_prompt=True)
    if instructions and first["role"] != "system":
        with suppress(Exception):  # that a template without a place for them may raise
            told = [{"role": "system", "content": instructions}, *messages]
            prompt = tokenizer.apply_chat_template(told, **options)
            if instructions.strip() in prompt:
                return prompt
        messages = [first | {"content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return tokenizer.apply_chat_template(messages, **options)


def batches(args, size):
    """The training examples of each step, of so many: every epoch is a permutation of its own."""
    torch.manual_seed(args.seed)
    epochs = 1 + args.num_steps * args.num_prompts // size
    order = torch.cat([torch.randperm(size) for _ in range(epochs)])
    return order.split(args.num_prompts)


# ==== set-up ====
def fail(message):
    """End with one line, status 2 and no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)  # not raise SystemExit, by which W&B would take the run as finished


@contextmanager
def one_line(what, kinds=Exception):
    """Whatever a library raises inside ends the run with one line: what it is about, and why."""
    try:
        yield
    except kinds as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0][:300]
        fail(f"{what}: {reason or 'it is empty'}")


def print_safely():
    """Lines appear as they are printed, and a closed pipe (| tee, | head) costs no run."""
    for stream in (sys.stdout, sys.stderr):

        def write(text, stream=stream, write=stream.write):
            try:  # a letter that the terminal does not know gets a number
                write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
                stream.flush()
            except OSError:  # nobody reads it any more
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

        stream.write = write


def resolve(args):
    """The arguments with nothing left to the model, the run's folder, the checkpoint to resume."""
    logging.disable()  # what the libraries cannot do they say in their exceptions
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if args.resume is not None:
        if args != Args(resume=args.resume):
            fail(f"--resume {args.resume}: goes on with that run's arguments; leave out all others")
        run_dir = Path(args.resume).resolve()
        with one_line(f"--resume {run_dir}: give a folder of a run of {SCRIPT.name}"):
            saved = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
            if saved["script"] != SCRIPT.name:
                raise ValueError(f"this one has a checkpoint of {saved['script']}")
            return Args(**saved["args"]), run_dir, saved

    args = replace(args)  # a copy
    bundled = Path(args.model).resolve() == Path(Args.model).resolve()
    for name, (for_any_model, for_the_bundled) in RECIPES.items():
        if getattr(args, name) is None:
            setattr(args, name, for_the_bundled if bundled else for_any_model)
    if "/" not in args.model and not os.path.exists(args.model):
        args.model = f"HuggingFaceTB/{args.model}"
    for name, value in vars(args).items():
        low = LOWEST.get(name, 1 if type(value) is int else 1e-12)
        high = HIGHEST.get(name, 2**32)
        if type(value) in (int, float) and not low <= value <= high:  # nor is NaN
            fail(f"--{name.replace('_', '-')} {value}: must be from {low} to {high}")
    if args.kl_target is not None and args.beta == 0:
        fail(f"--kl-target {args.kl_target}: needs a --beta above 0 to start from")
    N = args.num_prompts * args.num_generations
    if args.num_minibatches > N:
        fail(f"--num-minibatches {args.num_minibatches}: more than the {N} sequences of a step")
    if len({f.__name__ for f in REWARDS}) != max(1, len(REWARDS)):
        fail("REWARDS: none, or two of one name, under which they are logged; name them apart")
    run_name = args.run_name or (
        f"{SCRIPT.stem}__{Path(args.model).name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        f"-{secrets.token_hex(3)}"
    )
    run_dir = Path(args.runs_dir, run_name)
    if os.path.exists(run_dir / "checkpoint.pt"):
        fail(f"--run-name {run_name}: exists; take another name, or go on with --resume {run_dir}")
    return args, run_dir, None


def load_config(args, flag, source):
    """A model's configuration, into whose context prompt and response fit, and its tokenizer."""
    with one_line(f"{flag} {source}, found here: {os.path.exists(source)}"):
        config = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
    if len(tokenizer) > config.get_text_config().vocab_size:
        fail(f"{flag} {source}: its tokenizer has {len(tokenizer)} tokens, more than the model")
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)  # no dropout in RL: with it even the first ratio is not 1
    for name in ("max_position_embeddings", "sliding_window", "window_size"):
        limit = getattr(config.get_text_config(), name, None)
        if limit and args.max_prompt_tokens + args.max_new_tokens > limit:
            fail(
                f"--max-prompt-tokens {args.max_prompt_tokens} + --max-new-tokens "
                f"{args.max_new_tokens}: more than the {limit} tokens of the context or attention "
                f"window of {flag} {source}; lower one of them"
            )
    return config, tokenizer


def load_model(args, config, tokenizer):
    """The policy on its device, and the ids of all tokens that end a response.

    In float32: at these learning rates a bf16 weight would not move. A GPU computes in autocast.
    """
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        # cuDNN's attention plans anew for every shape, and its masked gradients can be NaN.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high")  # TF32, for the heads, whose weights are float32
    with one_line(f"--model {args.model}, --device {args.device}: not supported"):
        ids = torch.arange(5, device=device)[None]  # (1, 5)
        model, info = AutoModelForCausalLM.from_pretrained(
            args.model, config=config, dtype=torch.float32, output_loading_info=True
        )
        if info["missing_keys"]:
            raise ValueError(f"no weights for {', '.join(sorted(info['missing_keys']))}")
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable()
        model.to(device)
        eos_ids = torch.tensor(find_eos_ids(model, tokenizer), device=device)
        # compute_logprobs applies the head by hand: a model that does more after it is refused.
        by_hand = model.get_output_embeddings()(model.base_model(ids).last_hidden_state)
        if not torch.equal(model(ids).logits, by_hand):  # (1, 5, V) each
            fields = {name: x for name, x in vars(config).items() if "logit" in name}
            raise ValueError(f"its logits are capped or scaled, {fields}")
        # Two tokens show whether it can sample with keys and values.
        two = replace(args, max_new_tokens=2, cuda_graph=False)
        generate(two, model, ids, ids >= 0, 1, 0.0, eos_ids)
    return model, eos_ids


def find_eos_ids(model, tokenizer):
    """All tokens that end a response: the tokenizer's, the model's, and the chat template's."""
    ids = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        end = rendered.rpartition("answer")[2].strip()  # what a turn is ended with
        first = tokenizer(end, add_special_tokens=False).input_ids[:1]
        ids |= {*first} & {*tokenizer.added_tokens_decoder}
    if ids == {None}:
        raise ValueError("neither its tokenizer nor its generation config has an EOS token")
    return sorted(ids - {None})


def load_classifier(args, flag, source, config, device):
    """A network with a head of one label, which starts from zeros on the trunk of the policy."""
    config.num_labels = 1
    with one_line(f"{flag} {source}: not supported"):
        network, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            source, config=config, dtype=torch.float32, output_loading_info=True
        )
        head = network.score.weight  # (1, D); models like BERT have none of this name
        if flag == "--model":
            torch.nn.init.zeros_(head)
        elif info["missing_keys"]:
            raise ValueError(f"no weights for {', '.join(sorted(info['missing_keys']))}")
        if args.gradient_checkpointing:
            network.activation_checkpointing_enable()
        return network.to(device)


def load_classifiers(args, config, tokenizer, device):
    """The value network and the reward model, or None without one."""
    policy = "--model", args.model, copy.deepcopy(config), device
    if not args.reward_model:
        return load_classifier(args, *policy), None
    flag, source = "--reward-model", args.reward_model
    reward_config, reward_tokenizer = load_config(args, flag, source)
    if reward_config.num_labels != 1 or reward_tokenizer.get_vocab() != tokenizer.get_vocab():
        fail(f"{flag} {source}: must have one label, and the vocabulary of --model")
    reward_model = load_classifier(args, flag, source, reward_config, device)
    if args.value_init == "reward_model":
        return copy.deepcopy(reward_model), reward_model
    return load_classifier(args, *policy), reward_model


def open_run(args, run_dir, saved, model):
    """The run's logs, of metrics and of samples, in its folder."""
    logs = []
    with one_line(f"{run_dir}: cannot be written, or another process is writing it"):
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl"):
            log = open(run_dir / name, "a", buffering=1)
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            size = saved["log_sizes"].get(name, 0) if saved else 0
            log.truncate(min(size, log.tell()))  # what came after it will be logged again
            logs.append(log)
        if not saved:
            (run_dir / SCRIPT.name).write_text(SCRIPT.read_text())
            packages = (torch, transformers, datasets, tyro, wandb)
            versions = {package.__name__: package.__version__ for package in packages}
            content = vars(args) | {"versions": versions, "id": secrets.token_hex(8)}
            (run_dir / "args.json").write_text(json.dumps(content, indent=2))
    if args.track:
        run_id = json.loads((run_dir / "args.json").read_text())["id"]
        options = dict(id=run_id, name=run_dir.name, resume="allow", dir=run_dir, config=vars(args))
        with one_line("--track"):
            try:
                wandb.init(**options)
            except wandb.Error:  # no network, or no key
                wandb.teardown()
                wandb.init(mode="offline", **options)
    print(
        f"{SCRIPT.name} on {model.device}: {args.model}, "
        f"{model.num_parameters() / 1e6:.2f} M parameters; run: {run_dir}"
    )
    chosen = [f"{name} {getattr(args, name)}" for name in RECIPES if name != "system_prompt"]
    print(f"by model: {', '.join(chosen)}")
    print(
        "note: with one update per rollout the ratio is 1, clip_frac 0, and the loss says little; "
        "watch the reward"
    )
    return logs


def catch_signals():
    """A list of the signals to stop: the first ends the run after its step, the second at once."""
    signals = []

    def on_signal(number, frame):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)
        print(
            "\nstopping after this step, with a checkpoint; once more stops at once",
            file=sys.stderr,
        )

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, on_signal)
    return signals


def write(file, record):
    """One line of a log."""
    with one_line(file.name):
        print(json.dumps(record), file=file)


def log_metrics(file, metrics, records):
    """One record, with null for what is not finite; to W&B also samples, where it is evaluated."""
    write(file, {name: x if abs(x) < float("inf") else None for name, x in metrics.items()})
    if wandb.run is not None:
        if records and "eval/accuracy" in metrics:
            rows = [list(record.values()) for record in records]
            metrics = metrics | {"samples": wandb.Table(columns=list(records[0]), data=rows)}
        wandb.log(metrics, step=metrics["step"])


def show(args, progress, metrics, record):
    """Put the first metrics beside the bar, and ten times in a run print them with a sample."""
    step, sample = record["step"], record["completions"][0]
    progress.set_postfix({x: metrics[x] for x in SHOWN if x in metrics})
    if step == 1 or step % max(1, args.num_steps // 10) == 0:
        progress.write(f"step {step}: {progress.postfix}")
        progress.write(f"    {record['prompt']!r} -> {sample!r}, reward {record['rewards'][0]:.2f}")
        if metrics["rollout/eos_frac"] < 0.5:
            answered = sum("</answer>" in text for text in record["completions"])
            progress.write(
                f"    warning: eos_frac < 0.5, cut responses; {answered} of these "
                f"{len(record['completions'])} had answered: what goes on after that has yet to "
                "learn to stop, the others may need a higher --max-new-tokens"
            )
        if metrics["rollout/zero_std_frac"] > 0.9:
            progress.write("    warning: zero_std_frac > 0.9: equal rewards teach nothing")


def save_checkpoint(args, run_dir, parts, state, metrics, problems):
    """To another name, forced to the disk, renamed: there is one whole checkpoint at any moment."""
    content = {
        "script": SCRIPT.name,
        "args": vars(args),
        "problems": problems,
        "state": state,
        "metrics": metrics,
        "log_sizes": {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")},
        **{name: part.state_dict() for name, part in parts.items()},
    }
    path = run_dir / "checkpoint.tmp"
    with one_line(path), open(path, "wb", buffering=0) as file:
        torch.save(content, file)
        os.fsync(file)
        os.replace(path, run_dir / "checkpoint.pt")


if __name__ == "__main__":
    print_safely()
    recipes = [
        f"{name} {x}, bundled {y}" for name, (x, y) in RECIPES.items() if name != "system_prompt"
    ]
    about = __doc__.split("\n\n")[0] + "\n\nNone by model: " + "; ".join(recipes)
    lower = "out of memory; lower --micro-batch-tokens or --sampling-tokens, or use grpo_lora.py"
    with one_line(lower, torch.OutOfMemoryError):
        main(tyro.cli(Args, description=about))
