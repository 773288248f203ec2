# PlainRL 0.2.0, Apache-2.0
"""RLOO: REINFORCE Leave-One-Out, in one file. Kool et al. 2019 ("Buy 4 REINFORCE Samples, Get a
Baseline for Free!"); for language models Ahmadian et al. 2024, "Back to Basics",
arXiv:2402.14740v2.

For every prompt q the policy samples G responses o_1 .. o_G, and each one gets a reward r_i. We
maximize J = E[U], with a loss whose gradient is -grad J:

    grad J   = E[ 1/G sum_i (U_i - b_i) grad log pi_theta(o_i | q) ]
    U_i      = r_i - beta sum_t (log pi_theta(o_it | q, o_i<t) - log pi_ref(o_it | q, o_i<t))
    b_i      = 1/(G-1) sum_{j != i} U_j                                             (Kool et al.)

U_i is the return. It depends on theta through the KL, but the mean of grad U_i is 0, so U_i is
taken as a constant. The whole response is one action: log pi(o | q) is the sum over its tokens. The
baseline b_i of a sample is the mean return of the G - 1 others. Given the prompt, it is independent
of the sample, so the gradient stays unbiased. U_i - b_i equals G/(G-1) (U_i - mean(U_1 .. U_G)).

Parent: reinforce_baseline.py. Differences:
    (1) Several samples per prompt, G >= 2.
    (2) The baseline is the mean return of the prompt's other samples, and needs no state.

Departure from the papers: with --num-minibatches above 1, the later minibatches are off-policy, and
stay uncorrected.

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i
belongs to prompt i//G), P the length of a padded prompt, R of a padded response (--max-new-tokens),
V vocabulary, D hidden units. A minibatch has m sequences. A micro-batch has n, with T response
tokens in all. evaluate, sample_responses and generate use B and N for the prompts that they get.

    python rloo.py                                 the bundled adder, on a CPU
    python rloo.py --model SmolLM2-1.7B-Instruct   GSM8K, on one GPU
"""

import copy
import glob
import hashlib
import json
import math
import os
import shutil
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Literal, NamedTuple
from unittest import mock  # for compute_logits

import datasets
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import trange
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.cache_utils import StaticCache, StaticLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from utils.masking import masked_sum
from utils.rewards import accuracy_reward, has_gold, lenient_accuracy_reward

SCRIPT = Path(__file__).resolve()
# Nothing is clipped here. policy/clip_frac counts the tokens at which a clip of the ratio would
# act, with this eps.
CLIP_FRAC_EPS = 0.2


@dataclass
class Args:
    # These are the defaults of a command with --model, and of Args() in code. A command without
    # --model takes those of BUNDLED, below.
    # ---- run
    seed: int = 1
    """seed of everything random: the order of the data, the samples, the minibatches"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train; auto: cuda if there is one, else cpu; mps, Apple's GPU, is untested"""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """16-bit format on an NVIDIA GPU; auto: bfloat16 from Ampere on, float16 on older GPUs"""
    runs_dir: str = "runs"
    """folder that holds the runs"""
    run_name: str | None = None
    """name of the run's folder; if it has a checkpoint, the run is resumed; None: a new name"""
    eval_every: int = 50
    """steps between evaluations; 0: only before the first step and after the last"""
    save_every: int = 50
    """steps between checkpoints; 0: only after the last step"""
    track: bool = False
    """also log to Weights & Biases, to the project that WANDB_PROJECT names"""
    # ---- model and data
    # Only code that calls Args() gets this default.
    model: str = "SmolLM2-1.7B-Instruct"
    """folder or hub id; HuggingFaceTB/ is put before a name without a slash that is no folder"""
    task: str = str(SCRIPT.parent / "utils" / "task.py")
    """Python file with REWARDS, which score the responses, and EXAMPLES, for the prompt"""
    dataset: str = "openai/gsm8k:main"
    """file, folder, hub id or id:config; a tenth is held out if it has no test or validation set"""
    eval_size: int = 500
    """number of held-out problems to evaluate on (the first ones)"""
    question_column: str = "question"
    """column that holds the question: a text, or a list of chat messages"""
    answer_column: str = "answer"
    """column that holds the gold answer; if it has "####", our rewards read what follows"""
    examples: bool = True
    """begin each prompt with the task's worked EXAMPLES, as earlier turns of the chat"""
    instructions: str = ""
    """text before the question to answer, in the same message; EXAMPLES don't get it"""
    max_prompt_tokens: int = 512
    """longer prompts are skipped, counted and reported"""
    # ---- sampling
    num_prompts: int = 16
    """prompts per step (B)"""
    num_generations: int = 8
    """samples per prompt (G)"""
    max_new_tokens: int = 300
    """maximum response length in tokens (R)"""
    temperature: float = 0.9
    """divides the logits, in sampling and in the loss; evaluations are greedy"""
    sampling_tokens: int = 49152
    """maximum tokens in a sampling batch, padding included; 131072 is faster on a 60 GB GPU"""
    cuda_graph: bool = True
    """on a GPU, replay the decode step from a CUDA graph; turn off if a model doesn't allow it"""
    # ---- optimization
    num_steps: int = 200
    """steps in the whole run, each with a rollout and its updates"""
    learning_rate: float = 1e-5
    """peak learning rate of Adam (betas 0.9, 0.999; no weight decay)"""
    lr_schedule: Literal["linear", "constant_with_warmup"] = "linear"
    """after the warm-up: linear falls towards 0, constant_with_warmup stays at the peak"""
    warmup_updates: int = 10
    """updates over which the learning rate rises linearly to its peak"""
    num_minibatches: int = 1
    """updates per rollout, which is shuffled and divided among them as evenly as possible"""
    micro_batch_tokens: int = 8192
    """maximum tokens per forward and backward pass; a lower one needs less memory and more time"""
    gradient_checkpointing: bool = True
    """recompute activations: less memory, a third more time"""
    max_grad_norm: float = 1.0
    """the gradient is scaled down to this norm if it is larger"""
    # ---- algorithm
    beta: float = 0.04
    """weight of the KL to the reference in the return; 0: no reference"""


# The defaults without --model: a bundled model learns to add, in half a minute on a CPU.
BUNDLED = Args(
    eval_every=20,
    model=str(SCRIPT.parent / "assets" / "addition" / "adder"),
    dataset=str(SCRIPT.parent / "assets" / "addition"),
    examples=False,
    max_prompt_tokens=64,
    max_new_tokens=32,
    temperature=1.0,
    num_steps=60,
    learning_rate=1e-4,
    warmup_updates=0,
    micro_batch_tokens=2048,
    gradient_checkpointing=False,
    beta=0.01,
)


# ==== algorithm ====
def compute_returns(rewards, old_logprobs, ref_logprobs, mask, beta):
    """The returns (B, G): each reward (B, G) minus beta times the KL of its whole response.

    The KL is estimated by Schulman's k1: the sum of old_logprobs - ref_logprobs over the tokens.
    """
    kl = masked_sum(old_logprobs - ref_logprobs, mask, axis=1)  # (N,)
    return rewards - beta * kl.view_as(rewards)


def compute_advantages(returns):
    """(B, G) -> (B, G): each return minus the mean of the prompt's other returns. Kool 2019."""
    assert returns.ndim == 2 and returns.shape[1] >= 2, returns.shape
    # Equal returns must get advantages of exactly 0, because Adam can make a full step of a tiny
    # gradient. But the mean of equal numbers may be rounded. So the first return is subtracted:
    # then all of them are 0, and so is their mean.
    returns = returns - returns[:, :1]  # (B, G)
    others_mean = (returns.sum(1, keepdim=True) - returns) / (returns.shape[1] - 1)  # (B, G)
    return returns - others_mean


def minibatches(args, num_seqs):
    """The sequence indices of each update: all N, shuffled and split evenly."""
    return torch.randperm(num_seqs).tensor_split(args.num_minibatches)


def lr_factor(args, update, num_updates):
    """The learning rate of an update (0 .. num_updates - 1), as a fraction of the peak."""
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    if args.lr_schedule == "constant_with_warmup":
        return 1.0
    return (num_updates - update) / (num_updates - args.warmup_updates)  # from 1 towards 0


def policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs, beta):
    """The REINFORCE loss of the n sequences of a micro-batch. Its gradient estimates that of -J.

    mask (n, R) bool is True for the tokens to train on. logprobs, old_logprobs and ref_logprobs
    (n, R) are 0 elsewhere. advantages (n, 1). num_seqs is the number of sequences in the whole
    minibatch, so that the losses of its micro-batches add up to its loss. old_logprobs,
    ref_logprobs and beta serve the metrics alone: with beta 0, there is no reference. Returns the
    scalar loss, and the sum of each metric over these tokens.
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape
    assert advantages.shape == (len(mask), 1)
    token_loss = -advantages * logprobs  # (n, R)
    seq_loss = masked_sum(token_loss, mask, axis=1)  # (n,): log pi(o | q) is a sum over tokens
    loss = seq_loss.sum() / num_seqs  # this micro-batch's share of the minibatch's mean

    # ---- metrics
    # The loss has no ratio, and the KL is a part of the return: these are for the log alone.
    logratio = logprobs - old_logprobs  # (n, R)
    ratio = logratio.exp()  # (n, R)
    clipped_low = (ratio < 1 - CLIP_FRAC_EPS) & (advantages < 0)  # (n, R) bool
    clipped_high = (ratio > 1 + CLIP_FRAC_EPS) & (advantages > 0)  # (n, R) bool
    per_token = {
        "policy/clip_frac_low": clipped_low,
        "policy/clip_frac_high": clipped_high,
        "policy/clip_frac": clipped_low | clipped_high,
        "policy/approx_kl": 0.5 * logratio**2,  # estimates KL(pi_old || pi), Schulman's k2
        "policy/ratio_mean": ratio,
        "policy/entropy": -logprobs,  # estimates the entropy, without bias while pi is pi_old
    }
    if beta > 0:
        ref_logratio = ref_logprobs - logprobs  # (n, R)
        per_token["kl/ref"] = torch.expm1(ref_logratio) - ref_logratio  # k3; the return has k1
    stats = {name: masked_sum(values.detach(), mask) for name, values in per_token.items()}
    return loss, stats


# ==== training ====
class Rollout(NamedTuple):
    """N prompts with their sampled responses; row i of each tensor belongs to sequence i."""

    prompts: list[list[int]]  # N lists of token ids
    response_ids: Tensor  # (N, R); any ids where response_mask is False
    response_mask: Tensor  # (N, R) bool: True up to and including the EOS token
    sampled_logprobs: Tensor  # (N, R) float32, as the sampler computed them

    def select(self, indices):
        """Only these sequences, in this order."""
        return Rollout(
            prompts=[self.prompts[i] for i in indices],
            response_ids=self.response_ids[indices],
            response_mask=self.response_mask[indices],
            sampled_logprobs=self.sampled_logprobs[indices],
        )


def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    check_args(args)
    task = load_task(args)
    tokenizer = AutoTokenizer.from_pretrained(find_model(args))
    train_data, test_data = load_data(args, task, tokenizer)  # lists of problems
    model, eos_ids = load_model(args, tokenizer)
    # The reference is the initial policy, so it's copied before a checkpoint is loaded. (On a GPU
    # it's rounded to 16 bits, except its head, so even the first KL isn't exactly 0.)
    ref_model = inference_copy(model) if args.beta > 0 else None
    # A GPU samples from a 16-bit copy, which is faster.
    sampler = inference_copy(model) if model.device.type == "cuda" else model

    G = args.num_generations
    N = args.num_prompts * G
    updates_per_step = args.num_minibatches
    num_updates = args.num_steps * updates_per_step
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    # In float16, small gradients would be 0. So the scaler multiplies the loss by a large number,
    # and unscale_ divides the gradients by it. After an overflow, scaler.update halves the number.
    # In other formats the scaler does nothing. In all formats, main leaves out an update whose
    # gradient isn't finite, and counts it. So it calls optimizer.step, and not scaler.step.
    scaler = torch.amp.GradScaler(enabled=find_dtype(args) == "float16")
    trained = {  # a checkpoint saves the state_dict of each
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
    }

    run_dir = name_run(args)
    metrics_file, samples_file, evals_file = open_run(args, task, run_dir, train_data + test_data)
    if (run_dir / "checkpoint.pt").exists():
        state, metrics = load_checkpoint(args, run_dir, trained)
        if sampler is not model:
            sampler.load_state_dict(model.state_dict())
    else:
        state = {"step": 0, "episodes": 0, "tokens": 0}  # steps, responses, response tokens
        print(f"evaluating {args.model} on {len(test_data)} held-out problems, greedy")
        evaluation, eval_scores = evaluate(args, task, sampler, tokenizer, test_data, eos_ids)
        metrics = state | evaluation
        print(json.dumps({"step": 0, "scores": eval_scores}), file=evals_file)
        log_metrics(args, metrics_file, metrics)
        print(f"before: accuracy {metrics['eval/accuracy']:.3f}")

    batches = shuffled_batches(args, len(train_data))  # for each step, the indices of its problems
    first_step = state["step"] + 1
    # disable=None: no bar if the output isn't a terminal.
    progress = trange(first_step, args.num_steps + 1, disable=None)
    for step in progress:
        # ---- 1. rollout
        step_start = time.perf_counter()
        # Each step has its own seed, so that a resumed run draws what an uninterrupted one would.
        # The factor keeps step 2 of seed 1 and step 1 of seed 2 apart.
        torch.manual_seed(1_000_003 * args.seed + step)
        batch = [train_data[i] for i in batches[step - 1].tolist()]  # B problems
        rollout = sample_responses(args, sampler, batch, G, args.temperature, eos_ids)
        completions = response_texts(tokenizer, rollout, eos_ids)  # N texts
        response_mask = rollout.response_mask  # (N, R)
        response_lengths = response_mask.sum(1)  # (N,)
        ended = eos_mask(rollout, eos_ids).any(1)  # (N,) bool
        rollout_end = time.perf_counter()  # response_texts has waited for the GPU

        # ---- 2. reward
        scores = apply_rewards(task, completions, batch, model.device)  # name -> (N,) float32
        reward_end = time.perf_counter()
        rewards = sum(scores.values()).view(-1, G)  # (B, G) float32

        # ---- 3. old and reference log-probabilities; return and advantage
        # generate has set the other mode, and gradient checkpointing needs this one. Both compute
        # the same, because load_config has set all dropout to 0.
        model.train()
        step_minibatches = list(minibatches(args, N))  # sequence indices, a tensor for each update
        # pi_old is the policy as it is now. (The sampler rounds differently, so its numbers don't
        # serve.) All rows are computed before any update, because the returns contain the KL to the
        # reference.
        old_logprobs = rollout_logprobs(args, model, rollout, step_minibatches)  # (N, R)
        ref_logprobs = torch.zeros_like(old_logprobs)  # (N, R), 0 without a reference
        if ref_model is not None:
            ref_logprobs = rollout_logprobs(args, ref_model, rollout, step_minibatches)
        # (B, G): the rewards minus beta times the KL to the reference.
        returns = compute_returns(rewards, old_logprobs, ref_logprobs, response_mask, args.beta)
        advantages = compute_advantages(returns).view(-1, 1)  # (N, 1)

        # ---- 4. update
        # Sums and counts over the updates of this step, for the log.
        total_loss = 0.0
        total_grad_norm = 0.0
        num_skipped = 0
        token_sums = defaultdict(float)  # name of a metric -> sum over tokens
        first_update = (step - 1) * updates_per_step  # updates count from 0 over the whole run
        for update, minibatch in enumerate(step_minibatches, start=first_update):
            lr = args.learning_rate * lr_factor(args, update, num_updates)
            optimizer.param_groups[0]["lr"] = lr
            for indices, micro_batch in micro_batches(args, rollout, minibatch):
                logprobs = compute_logprobs(model, micro_batch, args.temperature)  # (n, R)
                loss, stats = policy_loss(
                    logprobs,
                    old_logprobs[indices],
                    ref_logprobs[indices],
                    advantages[indices],
                    response_mask[indices],
                    num_seqs=len(minibatch),
                    beta=args.beta,
                )
                scaler.scale(loss).backward()
                total_loss += loss.detach()
                for name, value in stats.items():
                    token_sums[name] += value
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            total_grad_norm += grad_norm
            if torch.isfinite(grad_norm):  # else the update is left out, and counted
                optimizer.step()
            else:
                num_skipped += 1
            scaler.update()
            optimizer.zero_grad()
        if sampler is not model:
            sampler.load_state_dict(model.state_dict())
        total_loss = float(total_loss)  # waits for the GPU, so that the time is right
        update_end = time.perf_counter()

        # ---- 5. log
        num_tokens = int(response_lengths.sum())
        state["step"] = step
        state["episodes"] += N
        state["tokens"] += num_tokens
        first_scores = scores[task.REWARDS[0].__name__]  # (N,) float32: 1 if right, or a grade
        gap = (old_logprobs - rollout.sampled_logprobs).abs()[response_mask]  # (num_tokens,)
        metrics = {
            "rollout/reward_mean": rewards.mean(),
            "rollout/reward_std": rewards.std(),  # of all N, not of a group
            "rollout/zero_std_frac": (rewards == rewards[:, :1]).all(1).float().mean(),
            **{f"rollout/{name}": score.mean() for name, score in scores.items()},
            "rollout/accuracy": first_scores.mean(),
            "rollout/response_len": response_lengths.float().mean(),
            "rollout/eos_frac": ended.float().mean(),
            "rollout/logprob_gap": gap.mean(),
            "rollout/logprob_gap_max": gap.max(),
            **{name: total / num_tokens for name, total in token_sums.items()},
            "policy/loss": total_loss / updates_per_step,
            "optim/grad_norm": total_grad_norm / updates_per_step,  # before it is scaled down
            "optim/lr": optimizer.param_groups[0]["lr"],  # of the last update
            "optim/skipped": num_skipped,
            "time/rollout_s": rollout_end - step_start,
            "time/reward_s": reward_end - rollout_end,
            "time/update_s": update_end - reward_end,  # with the log-probabilities of part 3
            "time/tokens_per_s": num_tokens / (rollout_end - step_start),
        }
        if model.device.type == "cuda":
            metrics["time/peak_mem_gb"] = torch.cuda.max_memory_allocated() / 1e9
        metrics = state | {name: float(value) for name, value in metrics.items()}
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            evaluation, eval_scores = evaluate(args, task, sampler, tokenizer, test_data, eos_ids)
            metrics |= evaluation
            print(json.dumps({"step": step, "scores": eval_scores}), file=evals_file)
        log_metrics(args, metrics_file, metrics)
        for k, problem in enumerate(batch):
            group = slice(k * G, (k + 1) * G)
            record = {
                "step": step,
                "prompt": problem["prompt"],
                "answer": problem["columns"]["answer"],
                "completions": completions[group],
                "rewards": rewards[k].tolist(),
                "scores": first_scores[group].tolist(),
                "advantages": advantages[group, 0].tolist(),
                "ended": ended[group].tolist(),
            }
            print(json.dumps(record), file=samples_file)
        show_progress(args, progress, metrics, record)  # the record of the last prompt
        # The check comes after the logs, so that a run that ends here has its samples. In step 1 it
        # finds a model that is computed wrongly. Later, rounding alone may widen the gap. So then
        # only NaN (an overflow) ends the run.
        if step == 1 or gap.isnan().any():
            check_gap(args, gap.mean())

        # ---- 6. save
        if step == args.num_steps or (args.save_every and step % args.save_every == 0):
            save_checkpoint(run_dir, trained, state, metrics)

    model.save_pretrained(run_dir / "model")
    tokenizer.save_pretrained(run_dir / "model")
    after = metrics["eval/accuracy"]
    print(f"after: accuracy {after:.3f}; model, metrics and samples are in {run_dir}")
    return metrics


# ==== sampling and log-probabilities ====
# A first reading may stop here: the rest is what main calls.


def sample_responses(args, model, problems, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each of B problems: a Rollout of N sequences."""
    prompts = [torch.tensor(problem["prompt_ids"], device=model.device) for problem in problems]
    ones = [torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts]  # before padding
    prompt_ids = pad_sequence(prompts, batch_first=True, padding_side="left")  # (B, P)
    prompt_mask = pad_sequence(ones, batch_first=True, padding_side="left")  # (B, P) bool

    # A batch takes as many prompts as fit into --sampling-tokens if all responses get the maximum
    # length, but at least one.
    tokens_per_prompt = num_samples * (prompt_ids.shape[1] + args.max_new_tokens)
    at_a_time = max(1, args.sampling_tokens // tokens_per_prompt)
    sampled = []
    for ids, mask in zip(prompt_ids.split(at_a_time), prompt_mask.split(at_a_time), strict=True):
        sampled.append(generate(args, model, ids, mask, num_samples, temperature, eos_ids))
    response_ids, response_masks, logprobs = zip(*sampled, strict=True)
    return Rollout(
        prompts=[problem["prompt_ids"] for problem in problems for _ in range(num_samples)],
        response_ids=torch.cat(response_ids),
        response_mask=torch.cat(response_masks),
        sampled_logprobs=torch.cat(logprobs),
    )


def response_texts(tokenizer, rollout, eos_ids):
    """The completions: the N responses as texts, without the EOS token."""
    is_text = rollout.response_mask & ~eos_mask(rollout, eos_ids)  # (N, R) bool
    return tokenizer.batch_decode(unpadded(rollout.response_ids, is_text))


def eos_mask(rollout, eos_ids):
    """(N, R) bool: True for the EOS tokens of the responses."""
    return rollout.response_mask & torch.isin(rollout.response_ids, eos_ids)


# generate samples the responses in segments of this many tokens. Before each segment, it drops the
# rows that have finished, and appends the segment's columns to the cache. With shorter segments,
# the cache is copied (and a CUDA graph recorded) more often. With longer ones, attention reads more
# columns that are still empty.
SEGMENT = {"cpu": 32, "cuda": 64, "mps": 32}
# Every so many tokens, generate asks whether all rows have finished. On a GPU, asking makes the CPU
# wait. SEGMENT must be a multiple of this, so that it asks before each segment, which needs a row.
CHECK_EVERY = {"cpu": 1, "cuda": 16, "mps": 1}


@torch.no_grad()
def generate(args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each left-padded prompt (B, P), in one batch of N rows.

    Returns response_ids (N, R), response_mask (N, R) bool and the logprobs (N, R) float32 of the
    sampled tokens. It samples from the model's whole softmax at this temperature, which is the
    distribution of the loss: no top-k, top-p or repetition penalty. Temperature 0 is greedy.

    Example, with two prompts, num_samples 1, --max-new-tokens 4 and the EOS token 2. The 0 is
    padding, and ? can be any id:

        prompt_ids [[5, 6, 7],    response_ids [[3, 4, 2, ?],    response_mask [[1, 1, 1, 0],
                    [0, 8, 9]]                  [3, 3, 4, 3]]                   [1, 1, 1, 1]]
    """
    model.eval()
    device = prompt_ids.device
    use_graph = args.cuda_graph and device.type == "cuda"
    segment, check_every = SEGMENT[device.type], CHECK_EVERY[device.type]
    N = len(prompt_ids) * num_samples
    shape = (N, args.max_new_tokens)
    response_ids = torch.zeros(shape, dtype=torch.long, device=device)  # (N, R)
    response_mask = torch.zeros(shape, dtype=torch.bool, device=device)  # (N, R)
    sampled_logprobs = torch.zeros(shape, device=device)  # (N, R) float32

    decoding = prefill(model, prompt_ids, prompt_mask)  # a row for each prompt
    sequences = torch.arange(N, device=device)  # (rows,): the sequence that each row samples
    decoding.select(sequences // num_samples)  # now a row for each sequence
    finished = torch.zeros_like(sequences, dtype=torch.bool)  # (rows,): EOS was drawn
    for t in range(args.max_new_tokens):
        if t % check_every == 0 and finished.all():
            break
        if t % segment == 0:
            if finished.any():
                unfinished = (~finished).nonzero().squeeze(1)  # row indices
                decoding.select(unfinished)
                sequences, finished = sequences[unfinished], finished[unfinished]
            decoding.grow(min(segment, args.max_new_tokens - t))
        if t > 0:  # the logits of the first token come from the prompt
            decoding.advance(model, use_graph)
        token, logprobs = draw(decoding.logits, temperature)  # (rows,) each
        decoding.token.copy_(token)  # in place, because the graph reads this tensor
        response_ids[sequences, t] = token
        sampled_logprobs[sequences, t] = logprobs
        response_mask[sequences, t] = ~finished  # before EOS is looked for, so that EOS counts
        finished |= torch.isin(token, eos_ids)
    return response_ids, response_mask, sampled_logprobs.masked_fill(~response_mask, 0.0)


def draw(logits, temperature):
    """Draw a token from each row of logits (rows, V): tokens and their logprobs, (rows,) each."""
    scale = temperature if temperature > 0 else 1.0  # greedy: log-probabilities at temperature 1
    logprobs = (logits.float() / scale).log_softmax(1)  # (rows, V) float32
    if temperature == 0:
        token = logprobs.argmax(1)  # (rows,)
    else:
        # Gumbel-max: the argmax of logprobs + Gumbel noise is a sample of the softmax.
        # (torch.multinomial samples the same softmax, but waits for the GPU.) Float32 noise is at
        # most about 16.6, so a token with a probability far below 1e-7 is never drawn.
        noise = -torch.log(-torch.log(torch.rand_like(logprobs)))  # (rows, V), Gumbel
        token = (logprobs + noise).argmax(1)  # (rows,)
    return token, logprobs.gather(1, token[:, None]).squeeze(1)


@dataclass
class Decoding:
    """What the model reads and writes for the next token, with a row for each sequence."""

    cache: StaticCache  # keys and values, written in place
    mask: Tensor  # (rows, columns) bool: False hides the padding of a prompt
    logits: Tensor  # (rows, V): after the token that was fed last
    token: Tensor  # (rows,): drawn last, fed next
    position: Tensor  # (rows,): the position where it is fed, padding not counted
    graph: torch.cuda.CUDAGraph | None = None  # feed_token, recorded with these very tensors

    def select(self, rows):
        """Keep these rows, in this order. A row may repeat."""
        self.graph = None  # it uses the old tensors
        self.cache.reorder_cache(rows)  # keys[rows] and values[rows] of each layer
        self.mask = self.mask[rows]
        self.logits = self.logits[rows]
        self.token = self.token[rows]
        self.position = self.position[rows]

    def grow(self, columns):
        """Append empty columns to the cache."""
        self.graph = None
        for layer in self.cache.layers:
            # Keys and values are (rows, heads, columns, size). Layers with linear attention or a
            # convolution have a state of fixed size, which needs no columns.
            if isinstance(layer, StaticLayer):
                layer.keys = F.pad(layer.keys, (0, 0, 0, columns))
                layer.values = F.pad(layer.values, (0, 0, 0, columns))
                layer.max_cache_len += columns
        # True, though they are empty: transformers itself hides the columns that aren't filled yet.
        self.mask = F.pad(self.mask, (0, columns), value=True)

    def advance(self, model, use_graph):
        """Feed the token, so that the logits are those of the next one. Replay the graph if any."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.feed_token(model)  # computes, and is the warm-up that CUDA needs before it records
        if use_graph:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records, and computes nothing
                self.feed_token(model)

    def feed_token(self, model):
        """Feed the token. This writes in place, because a graph's replay uses the same memory."""
        token, position = self.token[:, None], self.position[:, None]  # (rows, 1)
        self.logits.copy_(feed(model, self.cache, token, self.mask, position))
        self.position.add_(1)


def prefill(model, prompt_ids, prompt_mask):
    """The Decoding after the prompts (B, P), with a row for each of them."""
    # A StaticCache is written in place, as a CUDA graph requires. Its layers for a sliding window
    # can't grow, so ordinary ones replace them. The model's own mask still hides what is outside of
    # the window.
    cache = StaticCache(model.config, max_cache_len=prompt_ids.shape[1])
    for i, is_sliding in enumerate(cache.is_sliding):
        if is_sliding:
            cache.layers[i] = StaticLayer(max_cache_len=prompt_ids.shape[1])
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (B, P), padding not counted
    logits = feed(model, cache, prompt_ids, prompt_mask, positions)  # (B, V); fills the cache
    return Decoding(
        cache=cache,
        mask=prompt_mask,  # (B, P)
        logits=logits,
        token=torch.zeros_like(prompt_ids[:, 0]),  # (B,), until one is drawn
        position=prompt_mask.sum(1),  # (B,)
    )


def feed(model, cache, ids, mask, positions):
    """Feed tokens (rows, tokens) to the model: the logits (rows, V) after the last of each row."""
    outputs = model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return outputs.logits[:, -1]


@torch.no_grad()
def rollout_logprobs(args, model, rollout, some_minibatches):
    """Log-probabilities (N, R) of the sequences in some minibatches, without gradient.

    The rows of all other sequences are NaN, so that no loss can use them unnoticed. Rounding
    depends on which sequences share a micro-batch. So this splits as the updates of the first pass
    do: then equal weights give equal log-probabilities, to the last bit.
    """
    logprobs = torch.full_like(rollout.sampled_logprobs, math.nan)  # (N, R)
    for minibatch in some_minibatches:
        for indices, micro_batch in micro_batches(args, rollout, minibatch):
            logprobs[indices] = compute_logprobs(model, micro_batch, args.temperature)
    return logprobs


def micro_batches(args, rollout, minibatch):
    """Split a minibatch (m,) into micro-batches. Yield the indices of each, and their Rollout.

    A micro-batch has at most --micro-batch-tokens tokens, padding included. A sequence that is
    longer than the maximum is alone.
    """
    response_lengths = rollout.response_mask.sum(1).tolist()  # N numbers
    pairs = zip(rollout.prompts, response_lengths, strict=True)
    lengths = [len(prompt) + response_length for prompt, response_length in pairs]  # N numbers
    # From the longest to the shortest, because neighbours of similar length need little padding.
    # Ties are in the order of the rollout, so with one minibatch all passes are split alike.
    remaining = sorted(minibatch.tolist(), key=lambda i: (-lengths[i], i))
    while remaining:
        # The first one is the longest of its micro-batch. The others are padded to its length.
        size = max(1, args.micro_batch_tokens // lengths[remaining[0]])
        indices, remaining = remaining[:size], remaining[size:]
        yield indices, rollout.select(indices)


# compute_logprobs computes at most this many logits at a time. In the backward pass, each chunk of
# them writes a gradient as large as the head. So larger chunks are faster, but need more memory.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26, "mps": 2**24}


def compute_logprobs(model, micro_batch, temperature):
    """Log-probabilities (n, R) float32 of n responses; 0 where response_mask is False."""
    mask = micro_batch.response_mask  # (n, R) bool
    states = response_states(model, micro_batch)  # (T, D)
    targets = micro_batch.response_ids[mask]  # (T,), in the order of the states

    # All logits at once would be the largest tensor. So they are computed for a chunk of tokens at
    # a time. They aren't kept: with checkpoint, the backward pass computes them again.
    vocabulary_size = model.get_output_embeddings().weight.shape[0]
    size = max(1, CHUNK_LOGITS[states.device.type] // vocabulary_size)
    logprobs = []
    for chunk, chunk_targets in zip(states.split(size), targets.split(size), strict=True):
        inputs = (model, chunk, chunk_targets, temperature)
        part = checkpoint(chunk_logprobs, *inputs, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(part)  # (chunk,)
    # masked_scatter fills row by row, in the order of targets.
    zeros = torch.zeros(mask.shape, device=states.device)  # (n, R)
    return zeros.masked_scatter(mask, torch.cat(logprobs))


def chunk_logprobs(model, states, targets, temperature):
    """Log-probabilities (chunk,) float32 of tokens, from the states (chunk, D) before them."""
    logits = compute_logits(model, states) / temperature  # (chunk, V) float32
    return -F.cross_entropy(logits, targets, reduction="none")


def response_states(model, micro_batch):
    """The hidden states (T, D) from which the model predicts the T response tokens of n sequences.

    The order is that of micro_batch.response_ids[micro_batch.response_mask].

    Example: the prompt [5, 6, 7] has the response [3, 2], and [8] has [3, 4, 2]. Then T is 5, for
    the states of 7 and 3, and of 8, 3 and 4:

        rows [[5, 6, 7, 3, 2],    predicts [[0, 0, 1, 1, 0],
              [8, 3, 4, 2, 0]]              [1, 1, 1, 0, 0]]
    """
    device = micro_batch.response_ids.device
    rows, predicts = [], []
    responses = unpadded(micro_batch.response_ids, micro_batch.response_mask)  # n lists
    for prompt, response in zip(micro_batch.prompts, responses, strict=True):
        rows.append(torch.tensor(prompt + response))
        # The state at a token predicts the next one. So the last token of the prompt predicts the
        # first of the response, and the last of the response predicts no token that counts.
        flags = [False] * (len(prompt) - 1) + [True] * len(response) + [False]
        predicts.append(torch.tensor(flags))
    # Padding is on the right: no token sees a later one, so an attention mask isn't needed.
    rows = pad_sequence(rows, batch_first=True).to(device)  # (n, length)
    predicts = pad_sequence(predicts, batch_first=True).to(device)  # (n, length) bool

    decoder = model.base_model.get_decoder()  # without the head, and without a vision part
    # load_model has set the format. Autocast's cache would hold all weights in 16 bits at the same
    # time, so it's off.
    with torch.autocast("cuda", enabled=rows.is_cuda, cache_enabled=False):
        states = decoder(rows, use_cache=False).last_hidden_state  # (n, length, D)
    return states[predicts]


def unpadded(values, mask):
    """The rows of values (n, length) as lists of what the mask keeps."""
    return [row[keep].tolist() for row, keep in zip(values.cpu(), mask.cpu(), strict=True)]


class DecoderOutput(BaseModelOutputWithPast):
    """Hidden states alone. Any other attribute is None: GPT-2 asks for cross_attentions."""

    def __getattr__(self, name):
        return None


def compute_logits(model, states):
    """The logits (chunk, V) float32 of hidden states (chunk, D).

    In most models these are model.get_output_embeddings()(states). But some families also scale or
    cap them, in the model's own forward. So this calls that forward, with the decoder replaced by a
    function that returns these states at once.
    """
    states = states.float()[None]  # (1, chunk, D), float32 because 16-bit logits are rounded

    def return_states(*inputs, **options):
        return DecoderOutput(last_hidden_state=states)

    # Most models call base_model before the head. OPT calls its decoder. So both are replaced. (In
    # most models they are the same module, which is then replaced twice.)
    base_model, decoder = model.base_model, model.base_model.get_decoder()
    with (
        mock.patch.object(base_model, "forward", return_states),
        mock.patch.object(decoder, "forward", return_states),
    ):
        # The states come from return_states. The forward only wants some input.
        logits = model(inputs_embeds=states, use_cache=False).logits  # (1, chunk, V)
    return logits.squeeze(0)


# ==== evaluation and rewards ====
def evaluate(args, task, model, tokenizer, problems, eos_ids):
    """Metrics of greedy responses to N held-out problems, and their scores by the first reward."""
    rollout = sample_responses(
        args, model, problems, num_samples=1, temperature=0.0, eos_ids=eos_ids
    )
    completions = response_texts(tokenizer, rollout, eos_ids)
    ended = eos_mask(rollout, eos_ids).any(1)  # (N,) bool
    scores = apply_rewards(task, completions, problems, model.device)  # name -> (N,) float32
    first_scores = scores[task.REWARDS[0].__name__]  # (N,) float32: 1 if right, or a grade
    means = {name: score.mean().item() for name, score in scores.items()}
    metrics = {
        "eval/reward_mean": sum(means.values()),
        **{f"eval/{name}": mean for name, mean in means.items()},
        "eval/accuracy": first_scores.mean().item(),
        "eval/response_len": rollout.response_mask.sum().item() / len(completions),
        "eval/eos_frac": ended.float().mean().item(),
    }
    if accuracy_reward in task.REWARDS:
        # The lenient accuracy reads the last number of a response, with or without tags. If it is
        # far above the accuracy, the policy computes well and misses the format.
        answers = [problem["columns"]["answer"] for problem in problems]
        lenient = lenient_accuracy_reward(completions, answers)
        metrics["eval/accuracy_lenient"] = sum(lenient) / len(lenient)
    return metrics, first_scores.tolist()


def apply_rewards(task, completions, problems, device):
    """The scores of N completions: the name of each reward function -> (N,) float32.

    A function gets the completions, and the columns of the data set as lists of N values. The
    column `answer` has the text of --answer-column.
    """
    samples_per_problem = len(completions) // len(problems)
    repeated = [problem for problem in problems for _ in range(samples_per_problem)]  # N
    rows = [problem["columns"] for problem in repeated]  # N
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    texts = []
    for problem, completion in zip(repeated, completions, strict=True):
        if problem["prompt"].rstrip().endswith("<think>"):  # the template has opened the thought
            completion = "<think>" + completion
        texts.append(completion)
    scores = {}
    for reward in task.REWARDS:
        values = [float(score) for score in reward(completions=texts, **columns)]
        if len(values) != len(texts) or not all(map(math.isfinite, values)):
            raise ValueError(
                f"{reward.__name__} must return a number for each completion: {values}"
            )
        scores[reward.__name__] = torch.tensor(values, device=device)
    return scores


# ==== task, data and model ====
def load_task(args):
    """The module of --task. It may import utils, and other files of its own folder."""
    # Its folder comes last, so that no file of it hides another module.
    sys.path.append(str(Path(args.task).absolute().parent))
    loader = SourceFileLoader("task", args.task)  # the file's name needs no ending
    task = module_from_spec(spec_from_loader("task", loader))
    sys.modules["task"] = task  # dataclasses and pickle look for it there
    loader.exec_module(task)
    # The scores are kept by the names of the functions.
    if len({reward.__name__ for reward in task.REWARDS}) < len(task.REWARDS):
        raise ValueError(f"--task {args.task}: two functions in REWARDS have the same name")
    if not all(len(example) == 2 for example in task.EXAMPLES):
        raise ValueError(f"--task {args.task}: an example must be a pair, question and answer")
    return task


def load_splits(args):
    """The splits of --dataset, a DatasetDict. A validation split stands in for a missing test."""
    path = Path(args.dataset).absolute()  # load_dataset takes "." for a name of the hub
    if path.is_file():
        # Escaped, because "data[1].jsonl" is a pattern that stands for data1.jsonl.
        splits = datasets.load_dataset(str(path.parent), data_files=glob.escape(str(path)))
    elif path.is_dir():
        if any(symbol in str(path) for symbol in "*?["):
            raise ValueError(f"--dataset {path}: a path with *, ? or [ is a pattern; rename it")
        splits = datasets.load_dataset(str(path))
    else:  # id or id:config of the hub
        splits = datasets.load_dataset(*args.dataset.split(":"))
    if "train" not in splits:
        raise ValueError(f"--dataset {args.dataset}: no train split, only {', '.join(splits)}")
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits["validation"]
    return splits


def load_data(args, task, tokenizer):
    """The problems to train on, and the first --eval-size held-out ones: two lists.

    A problem is a dict of prompt (a text), prompt_ids (its tokens, a list) and columns: the row of
    the data set, for the rewards, with the gold answer as a text in the column "answer".
    """
    splits = load_splits(args)
    train_data = read_problems(args, task, tokenizer, splits, "train")
    if "test" in splits:
        test_data = read_problems(args, task, tokenizer, splits, "test")
        train_prompts = {problem["prompt"] for problem in train_data}
        num_shared = sum(problem["prompt"] in train_prompts for problem in test_data)
        print(f"test data: {num_shared} of its problems are also in the train data")
    else:
        train_data, test_data = hold_out(args, train_data)
    first = train_data[0]
    print(f"first prompt: {first['prompt']!r}, answer {first['columns']['answer']!r}")
    return train_data, test_data[: args.eval_size]


def hold_out(args, problems):
    """Hold out the last tenth of the questions, each with all of its rows."""
    prompts = list(dict.fromkeys(problem["prompt"] for problem in problems))  # each one once
    if len(prompts) == 1:
        raise ValueError(f"--dataset {args.dataset}: one question alone, so none can be held out")
    train_prompts = set(prompts[: len(prompts) * 9 // 10])
    train_data = [problem for problem in problems if problem["prompt"] in train_prompts]
    test_data = [problem for problem in problems if problem["prompt"] not in train_prompts]
    print(f"no test split: the last tenth of the questions is held out, {len(test_data)} problems")
    return train_data, test_data


def read_problems(args, task, tokenizer, splits, split):
    """The problems of a split. Prints how many rows are skipped, and raises an error if all are."""
    # The result isn't used. If a column is missing, this raises an error that names all columns.
    splits[split].select_columns([args.question_column, args.answer_column])
    problems = []
    skipped = Counter()  # reason -> number of rows
    for row in splits[split]:
        chat = read_chat(args, row[args.question_column])
        if not chat:
            skipped[f"without a {args.question_column}"] += 1
            continue
        answer = row[args.answer_column]
        answer = "" if answer is None else str(answer)
        if not answer.strip() or not has_gold(answer, task.REWARDS):
            skipped[f"without a readable {args.answer_column}"] += 1
            continue
        prompt = render(args, task, tokenizer, chat)
        prompt_ids = tokenize(tokenizer, prompt)
        if len(prompt_ids) > args.max_prompt_tokens:
            skipped["longer than --max-prompt-tokens"] += 1
            continue
        columns = row | {"answer": answer}
        problems.append({"prompt": prompt, "prompt_ids": prompt_ids, "columns": columns})
    counts = "".join(f", {count} skipped: {reason}" for reason, count in skipped.items())
    print(f"{split} data: {len(problems)} problems{counts}")
    if not problems:
        raise ValueError(f"--dataset {args.dataset}: no problem is left{counts}")
    return problems


def read_chat(args, question):
    """The question, a text or a chat, as a list of messages; [] if its text is missing or blank."""
    chat = question if isinstance(question, list) else [{"role": "user", "content": question}]
    texts = [message["content"] for message in chat]
    if not texts or None in texts or not texts[-1].strip():
        return []
    if chat[-1]["role"] != "user":
        raise ValueError(
            f"--question-column {args.question_column}: the last message of a chat must be from "
            f"the user, but one is from the {chat[-1]['role']}"
        )
    return chat


def render(args, task, tokenizer, chat):
    """The text that the policy continues: a system message if any, EXAMPLES, then the chat's rest.

    --instructions are in the last message, before the question.
    """
    *earlier, last = chat
    if args.instructions:  # in the user's message, because some templates refuse a system message
        last = last | {"content": f"{args.instructions}\n\n{last['content']}"}
    examples = []
    if args.examples:
        for question, answer in task.EXAMPLES:
            examples.append({"role": "user", "content": question})
            examples.append({"role": "assistant", "content": answer})
    if tokenizer.chat_template:
        messages = [*examples, *earlier, last]
        if chat[0]["role"] == "system":  # it stays the first
            messages = [chat[0], *examples, *earlier[1:], last]
        return fill_template(tokenizer, messages, add_generation_prompt=True)
    if earlier:
        raise ValueError(f"--model {args.model}: a chat needs a model with a chat template")
    if not examples:
        return last["content"]  # to be continued as it is, such as "12+7="
    # With the EOS token after each answer, the model ends its own answer, too.
    eos = tokenizer.eos_token or ""
    ends = {"user": "\n", "assistant": f"{eos}\n"}
    return "".join(message["content"] + ends[message["role"]] for message in [*examples, last])


def fill_template(tokenizer, chat, **options):
    """The chat as a text, in the model's template, with each message word for word.

    A template may drop a message, which is an error here, or change one: many delete the thoughts
    of earlier turns. So it is filled twice, with the messages and with a placeholder (mark) for
    each. If a message was changed, the second text is taken, and the messages replace the marks.
    (Else the first is kept: a template may look for a switch in a message, such as /no_think.)
    """
    options["tokenize"] = False
    text = tokenizer.apply_chat_template(chat, **options)
    contents = [message["content"] for message in chat]
    # A placeholder is a message's number between two private-use characters, which no message has.
    # An empty message gets an empty one, because some templates leave an empty message out.
    marks = [f"\ue000{i}\ue000" if content else "" for i, content in enumerate(contents)]
    marked = [message | {"content": mark} for message, mark in zip(chat, marks, strict=True)]
    filled = tokenizer.apply_chat_template(marked, **options)
    # A short content may also be a part of another message, so here the marks are looked for.
    for mark, content in zip(marks, contents, strict=True):
        if mark not in filled:
            raise ValueError(f"--model: its chat template drops the message {content!r}")
    if all(content in text for content in contents):  # the usual case: no message is changed
        return text
    if chat[0]["role"] == "system":
        # The system message goes in as it is, because it may have such a switch.
        filled = tokenizer.apply_chat_template([chat[0], *marked[1:]], **options)
    for mark, content in zip(marks, contents, strict=True):
        filled = filled.replace(mark, content)
    return filled


def tokenize(tokenizer, prompt):
    """The ids of a prompt, a list."""
    if tokenizer.chat_template:
        # The template writes the BOS token itself: the tokenizer would add a second one.
        return tokenizer(prompt, add_special_tokens=False).input_ids
    ids = tokenizer(prompt).input_ids
    if ids[-1] == tokenizer.eos_token_id:
        # Some tokenizers end each text with EOS, but the response has yet to come.
        ids.pop()
    return ids


def shuffled_batches(args, num_problems):
    """For each step, the indices (B,) of its problems. Every epoch shuffles all of them anew."""
    generator = torch.Generator().manual_seed(args.seed)
    num_epochs = 1 + args.num_steps * args.num_prompts // num_problems
    epochs = [torch.randperm(num_problems, generator=generator) for _ in range(num_epochs)]
    # A batch may hold the end of one epoch and the start of the next.
    return torch.cat(epochs).split(args.num_prompts)


def find_model(args):
    """The folder or hub id of --model."""
    if "/" in args.model or os.path.exists(args.model):
        return args.model
    return f"HuggingFaceTB/{args.model}"


def load_model(args, tokenizer):
    """The policy on its device, and a tensor of the ids of all tokens that end a response.

    The weights are float32: at these learning rates most updates are too small to change a 16-bit
    weight. On a GPU, autocast computes matrix products in 16 bits (--dtype).
    """
    # transformers 5.24 warns that past_key_values and other arguments will be renamed. This file
    # keeps the old names, because 5.19 knows only those.
    warnings.simplefilter("ignore", FutureWarning)
    name = find_model(args)
    config = load_config(args, name)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto_class = AutoModelForCausalLM
    else:  # a model with a vision part, such as Ministral 3; a run doesn't use or train that part
        auto_class = AutoModelForImageTextToText
    model, info = auto_class.from_pretrained(
        name, config=config, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"]))
        raise ValueError(f"--model {name}: its files have no weights for {missing}")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    eos_ids = find_eos_ids(model, tokenizer)
    # Saved with the model, so that other programs end a response as here. A top-k or a repetition
    # penalty that came with the model isn't kept, because training samples without them.
    model.generation_config = GenerationConfig(
        eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id
    )
    device = find_device(args)
    if device == "cuda":
        # cuDNN's attention makes a new plan for every shape, which is slow. So it's off.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high")  # TF32 (from Ampere on), for the output head
        # response_states and inference_copy read this.
        torch.set_autocast_dtype("cuda", getattr(torch, find_dtype(args)))
    return model.to(device), torch.tensor(eos_ids, dtype=torch.long, device=device)


def find_device(args):
    """The name of the device to train on."""
    if args.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return args.device


def find_dtype(args):
    """The format of the matrix products except the head's: 16 bits with cuda, else float32."""
    if find_device(args) != "cuda":
        return "float32"
    if args.dtype == "auto":
        # Before Ampere (8.0), GPUs only emulate bf16, which is slow.
        return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    return args.dtype


def load_config(args, name):
    """A model's configuration, without dropout. Refuses lengths that don't fit into its context."""
    config = AutoConfig.from_pretrained(name)
    text_config = config.get_text_config()
    # The noise of dropout would change the ratios. Fields with its rate have "drop" in their name.
    for part in (config, text_config):
        for key, value in vars(part).items():
            if isinstance(value, float) and "drop" in key:
                setattr(part, key, 0.0)
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit and args.max_prompt_tokens + args.max_new_tokens > limit:
        raise ValueError(
            f"--max-prompt-tokens + --max-new-tokens: more than the {limit} tokens of the context "
            f"of {name}; lower one of them"
        )
    return config


def find_eos_ids(model, tokenizer):
    """The ids of all tokens that end a response, a sorted list.

    These are the EOS tokens of the tokenizer and of the model's generation config, and the token
    with which the chat template ends a turn. All three may differ.
    """
    eos_ids = [tokenizer.eos_token_id]  # an id or None
    model_eos = model.generation_config.eos_token_id  # a list of ids, an id or None
    eos_ids += model_eos if isinstance(model_eos, list) else [model_eos]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
        text = fill_template(tokenizer, turns)  # ends with "answer<|im_end|>\n", for example
        end_of_turn = text.rpartition("answer")[2].strip()
        first = tokenizer(end_of_turn, add_special_tokens=False).input_ids[:1]
        # Only if it's an added token: ordinary text after an answer must not end a response.
        eos_ids += [token for token in first if token in tokenizer.added_tokens_decoder]
    return sorted(set(eos_ids) - {None})


def inference_copy(model):
    """A frozen copy of the model: the reference, or on a GPU the sampler.

    On a GPU all its weights except the head have 16 bits. Sampling spends most of its time reading
    weights, keys and values, which then have half as many bytes.
    """
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if model.device.type != "cuda":
        return copied

    # The head stays in float32, so the states are converted for it.
    def float_states(module, inputs, output):
        output.last_hidden_state = output.last_hidden_state.float()
        return output

    copied.base_model.get_decoder().register_forward_hook(float_states)
    # In many models the head shares its weight with the embedding, which is rounded below. So the
    # head gets a copy.
    head = copied.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
    for parameter in copied.base_model.parameters():  # buffers (rotary frequencies) stay float32
        parameter.data = parameter.data.to(torch.get_autocast_dtype("cuda"))
    return copied


# ==== runs ====
# A run appends a line to metrics.jsonl for each step, to samples.jsonl for each prompt, and to
# evaluations.jsonl for each evaluation.
LOGS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")


def check_args(args):
    """Refuse values with which the run would not do what its flags say."""
    if args.num_generations < 2:
        raise ValueError(
            "--num-generations must be at least 2: the prompt's other samples give the baseline"
        )
    for name in ("temperature", "max_grad_norm"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    for name in ("beta", "warmup_updates"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must not be negative")
    if args.num_minibatches > args.num_prompts * args.num_generations:
        raise ValueError("--num-minibatches must be at most the number of sequences of a step")


def check_gap(args, gap):
    """Raise an error if sampler and trainer differ by too many nats a token.

    They have the same weights up to rounding, so a large gap means that generate or
    compute_logprobs computes this kind of model wrongly, or that float16 can't hold its numbers.
    """
    dtype = find_dtype(args)
    # SmolLM2-135M's gaps, from rounding: 2e-6 (float32), 0.004 (float16), 0.03 (bfloat16).
    tolerance = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}[dtype]
    hint = " or needs --dtype bfloat16" if dtype == "float16" else ""
    if not gap < tolerance:  # NaN is refused, too
        raise ValueError(
            f"--model {args.model}: sampling and training differ by {gap:.2g} nats a token: this "
            f"family isn't supported{hint}, or generate and compute_logprobs in this file disagree"
        )


def name_run(args):
    """The folder of the run."""
    when = time.strftime("%Y%m%d-%H%M%S")
    name = args.run_name or f"{SCRIPT.stem}__{Path(args.model).name}__{args.seed}__{when}"
    return Path(args.runs_dir, name)


def open_run(args, task, run_dir, problems):
    """Open the run's logs. A new run gets a folder, with a copy of its code.

    A repeated command with --run-name goes on from the checkpoint and appends to the logs. Without
    a checkpoint, it starts over with empty logs. With --track, this also starts W&B. The problems
    go into the digest of the data.
    """
    run = describe_run(args, task, problems)
    is_repeated = args.run_name is not None and (run_dir / "args.json").exists()
    if is_repeated:
        check_same_run(args, run_dir, run)
    if args.track:  # before the folder is made: if W&B fails, there is no run yet
        start_wandb(args, run_dir, run, is_repeated)
    if not is_repeated:
        # A named folder without args.json may be from a command that was killed before it wrote
        # this file. Such a folder is used again.
        run_dir.mkdir(parents=True, exist_ok=args.run_name is not None)
        (run_dir / "utils").mkdir(exist_ok=True)
        for name, path in code_files(args).items():
            shutil.copy(path, run_dir / name)
    # Written again for a repeated command, because --num-steps may have grown.
    (run_dir / "args.tmp").write_text(json.dumps(run, indent=2))
    os.replace(run_dir / "args.tmp", run_dir / "args.json")
    mode = "a" if (run_dir / "checkpoint.pt").exists() else "w"
    return [open(run_dir / name, mode, buffering=1) for name in LOGS]


def code_files(args):
    """The files of a run's code: the name of each in the run's folder -> its path.

    What the task imports from its own folder isn't among them.
    """
    files = {SCRIPT.name: SCRIPT, "task.py": Path(args.task)}
    for path in sorted((SCRIPT.parent / "utils").glob("*.py")):
        files[f"utils/{path.name}"] = path
    return files


def describe_run(args, task, problems):
    """What args.json holds: flags, names of rewards, digests of code and data, and the machine."""
    code = {}  # name of a file -> its digest
    for name, path in code_files(args).items():
        code[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    rows = [problem["columns"] for problem in problems]
    # JSON has no images or other objects. Of these, only the type counts.
    data = json.dumps(rows, default=lambda value: str(type(value)))
    device = find_device(args)
    return vars(args) | {
        "rewards": [reward.__name__ for reward in task.REWARDS],
        **code,  # "task.py" is the digest of the file, "task" its path, a flag
        "data": hashlib.sha256(data.encode()).hexdigest(),
        "precision": find_dtype(args),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "device_name": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def check_same_run(args, run_dir, run):
    """Refuse to go on with a run that began with other flags, code, data or precision."""
    saved = json.loads((run_dir / "args.json").read_text())
    # --task may be another path: "task.py", its digest, compares the content. --dtype may be
    # another word: "precision" compares what it means on this machine.
    may_differ = ["runs_dir", "run_name", "task", "dtype", "versions", "device_name"]
    if args.lr_schedule == "constant_with_warmup" and args.num_steps > saved["num_steps"]:
        may_differ.append("num_steps")  # the learning rate doesn't depend on it
    changed = [name for name in run if name not in may_differ and run[name] != saved.get(name)]
    if changed:
        raise ValueError(
            f"{run_dir} began with another {', '.join(changed)}; repeat its command to go on with "
            "it (its folder has its flags and code), or choose another --run-name"
        )


def start_wandb(args, run_dir, run, is_repeated):
    """Start the run's log at W&B."""
    import wandb  # here, so that only a tracked run needs it

    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    wandb.init(
        id=run_dir.name,
        name=run_dir.name,
        dir=args.runs_dir,
        config=run,
        resume="allow" if is_repeated else "never",  # a new run must not join an old one
        reinit="finish_previous",  # a run that failed in the same process may still be open
    )


def log_metrics(args, file, metrics):
    """Write the metrics that have a value as one line, and with --track to W&B."""
    # JSON has no NaN and no infinity.
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    print(json.dumps(metrics), file=file)
    if args.track:
        import wandb  # as above

        wandb.log(metrics, step=metrics["step"])


def show_progress(args, progress, metrics, record):
    """Put metrics beside the bar, and about ten times a run print them with a response."""
    names = {"reward": "reward_mean", "acc": "accuracy", "len": "response_len", "eos": "eos_frac"}
    progress.set_postfix({word: metrics[f"rollout/{name}"] for word, name in names.items()})
    step = metrics["step"]
    if step == 1 or step % max(1, args.num_steps // 10) == 0:
        seconds = metrics["time/rollout_s"] + metrics["time/reward_s"] + metrics["time/update_s"]
        left = seconds * (args.num_steps - step) / 60
        progress.write(f"step {step}: {progress.postfix}, {seconds:.2g} s, {left:.0f} min left")
        prompt, completion = record["prompt"][-60:], record["completions"][0]
        progress.write(f"    {prompt!r} -> {completion!r}, reward {record['rewards'][0]:.2f}")


def save_checkpoint(run_dir, trained, state, metrics):
    """Save what load_checkpoint needs. Thanks to the rename, checkpoint.pt is always complete."""
    content = {name: part.state_dict() for name, part in trained.items()}
    content |= {"state": state, "metrics": metrics}  # main returns the metrics if no step is left
    content["log_sizes"] = {name: (run_dir / name).stat().st_size for name in LOGS}
    torch.save(content, run_dir / "checkpoint.tmp")
    os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")


def load_checkpoint(args, run_dir, trained):
    """Load the run's checkpoint into the trained parts, and return its state and metrics."""
    saved = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    for name, part in trained.items():
        part.load_state_dict(saved.pop(name))  # pop: its memory can be freed
    # The steps after the checkpoint are repeated, so their lines are cut off. The files are open in
    # append mode, so writing goes on at the new end.
    for name, size in saved["log_sizes"].items():
        os.truncate(run_dir / name, size)
    state = saved["state"]
    print(f"{run_dir} goes on after {state['step']} of {args.num_steps} steps")
    return state, saved["metrics"]


if __name__ == "__main__":
    # --model decides the defaults, so it is looked for before tyro reads the flags.
    if any(flag.split("=")[0] == "--model" for flag in sys.argv):
        defaults = Args()
        hint = "These are the defaults with --model."
    else:
        defaults = BUNDLED
        hint = "These are the bundled task's defaults. For those of a model: --model NAME --help"
    title = __doc__.split("\n\n")[0]
    main(tyro.cli(Args, default=defaults, description=f"{title}\n\n{hint}"))
