"""GSPO: Group Sequence Policy Optimization, in one file. Zheng et al. 2025, arXiv:2507.18071v2.

The policy samples G responses o_1 .. o_G to every prompt q, and each one gets a reward r_i. We
maximize J, so the loss is -J:

    J(theta) = E[ 1/G sum_i min(s_i A_i, clip(s_i, 1-eps_low, 1+eps_high) A_i) ]            (Eq. 5)
    A_i      = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)                                   (Eq. 6)
    s_i      = (pi_theta(o_i | q) / pi_old(o_i | q))^(1/|o_i|)                              (Eq. 7)
             = exp( 1/|o_i| sum_t log (pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)) )

The reward belongs to the whole response, and so does the ratio: a sequence has one ratio, and is
clipped as a whole or not at all. The gradient of s_i is s_i/|o_i| times the sum of the gradients of
the log-probabilities of its tokens. So all tokens of a response have the same weight in the
gradient, while GRPO gives each token its own ratio as its weight.

Parent: grpo.py. Differences: (1) each sequence has one ratio, the geometric mean of its tokens'
ratios. This mean moves much less than the ratio of one token, so its clip range is smaller: 1 -
3e-4 .. 1 + 4e-4 instead of 1 - 0.2 .. 1 + 0.2; (2) beta is 0 by default; (3) each rollout serves
four updates (--num-minibatches 4), as in the paper's experiments; (4) policy/clip_frac is a share
of the sequences, not of the tokens. With one update per rollout (1) changes nothing: the ratio is
1, and the gradient is that of GRPO without a KL.

Departures from the paper: Eq. 5 has a single eps. The paper's experiments use a different eps below
and above 1, so this script has eps_low and eps_high. 1e-4 is added to the std, because equal
rewards would give 0/0. With --beta above 0 the loss adds beta times the k3 estimate of the KL to
the reference (DeepSeekMath, Eq. 4), which the paper leaves out.

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i
belongs to prompt i//G), P and R tokens of a prompt and a response with their padding, V vocabulary,
D hidden units. A micro-batch has n sequences, and T response tokens in all.

    python gspo.py                                 the bundled adder, on a CPU
    python gspo.py --model SmolLM2-1.7B-Instruct   GSM8K, on one GPU
"""

import copy
import json
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from unittest import mock

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
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from utils.masking import masked_mean, masked_sum
from utils.rewards import accuracy_reward, format_reward, has_gold, lenient_accuracy_reward

SCRIPT = Path(__file__).resolve()
# The rewards are summed. The first has to give 1.0 for a right answer. Its mean is logged as the
# accuracy, so any other answer should get 0.0.
REWARDS = [accuracy_reward, format_reward]
# Worked examples, each a question and its answer. With --examples they stand before each question.
# A small model imitates an example better than it follows a description. If you change REWARDS or
# the task, change the examples, too.
EXAMPLES = [
    (
        "Tom has 12 apples. He buys 5 more, and then he eats 2. How many apples does he have now?",
        "<think>After buying, he has 12 + 5 = 17 apples. After eating, he has 17 - 2 = 15.</think>"
        "\n<answer>15</answer>",
    ),
    (
        "A box holds 4 rows of 6 eggs. How many eggs does it hold?",
        "<think>It holds 4 * 6 = 24 eggs.</think>\n<answer>24</answer>",
    ),
    (
        "Mia has 15 stickers and gives 7 of them to Ben. How many stickers does she have left?",
        "<think>She has 15 - 7 = 8 stickers left.</think>\n<answer>8</answer>",
    ),
]


@dataclass
class Args:
    # These defaults hold with --model. Without --model, those of BUNDLED, below, hold.
    # ---- run
    seed: int = 1
    """seed of everything random: the order of the data, the samples, the minibatches"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train; auto: cuda if there is one, else cpu; mps, Apple's GPU, is untested"""
    runs_dir: str = "runs"
    """folder that holds the runs"""
    run_name: str | None = None
    """name of the run's folder; if it has a checkpoint, the run is resumed; None: a new name"""
    eval_every: int = 50
    """steps between evaluations (always before and after); 0: none between"""
    save_every: int = 50
    """steps between checkpoints (always after the last step); 0: none between"""
    track: bool = False
    """also log to Weights & Biases, to the project that WANDB_PROJECT names"""
    # ---- model and data
    model: str = "SmolLM2-1.7B-Instruct"
    """folder or hub id; X alone is HuggingFaceTB/X; without this flag, the bundled model"""
    dataset: str = "openai/gsm8k:main"
    """file, folder, hub id or id:config; without a test or validation split, a tenth is held out"""
    eval_size: int = 500
    """number of held-out problems to evaluate on (the first ones)"""
    question_column: str = "question"
    """column that holds the question: a text, or a list of chat messages"""
    answer_column: str = "answer"
    """column that holds the gold answer; if it contains "####", only what follows counts"""
    examples: bool = True
    """begin each prompt with the worked EXAMPLES, as earlier turns of the chat"""
    instructions: str = ""
    """text before each question"""
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
    """divides the logits, in sampling and in every log-probability"""
    sampling_tokens: int = 49152
    """maximum tokens in a sampling batch, padding included; 131072 is faster if a GPU has 60 GB"""
    cuda_graph: bool = True
    """on a GPU, replay the decode step from a CUDA graph; a few families can't be recorded"""
    # ---- optimization
    num_steps: int = 200
    """steps in the whole run, each with a rollout and its updates"""
    learning_rate: float = 1e-5
    """peak learning rate of Adam (betas 0.9, 0.999; no weight decay)"""
    lr_schedule: Literal["linear", "constant_with_warmup"] = "linear"
    """after the warm-up: linear falls towards 0, constant_with_warmup stays at the peak"""
    warmup_updates: int = 10
    """updates over which the learning rate rises linearly; the last of them has the peak rate"""
    num_iterations: int = 1
    """passes over each rollout (mu in DeepSeekMath's Algorithm 1)"""
    num_minibatches: int = 4
    """updates per pass; the rollout is shuffled and divided among them as evenly as possible"""
    micro_batch_tokens: int = 2048
    """most tokens per forward and backward pass; 8192 is faster on a GPU and needs more memory"""
    gradient_checkpointing: bool = True
    """recompute activations: less memory, a third more time"""
    max_grad_norm: float = 1.0
    """the gradient is scaled down to this norm if it is larger"""
    # ---- algorithm
    clip_eps_low: float = 3e-4
    """eps_low: a sequence's ratio is clipped to at least 1 - eps_low"""
    clip_eps_high: float = 4e-4
    """eps_high: a sequence's ratio is clipped to at most 1 + eps_high"""
    beta: float = 0.0
    """weight of the KL to the reference in the loss; 0: no reference"""


# The defaults without --model: a bundled model learns to add, in a minute or so on a CPU.
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
    gradient_checkpointing=False,
)


# ==== algorithm ====
def compute_advantages(rewards):
    """Group-relative: rewards (B, G) -> (B, G). DeepSeekMath 4.1.2; the std is torch's (Bessel)."""
    assert rewards.ndim == 2 and rewards.shape[1] >= 2, rewards.shape
    # Equal rewards must give exactly 0. But their mean may have a rounding error, and Adam can make
    # a full step of a tiny gradient. So a group's first reward is subtracted first, which changes
    # no advantage.
    rewards = rewards - rewards[:, :1]  # (B, G)
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def minibatches(args, num_seqs):
    """Yield the sequence indices of each update. Each pass shuffles all and splits them evenly."""
    for _ in range(args.num_iterations):  # mu in DeepSeekMath's Algorithm 1
        yield from torch.randperm(num_seqs).tensor_split(args.num_minibatches)


def lr_factor(args, update, num_updates):
    """The learning rate of an update (0, 1, .. num_updates - 1), as a share of the peak."""
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    if args.lr_schedule == "constant_with_warmup":
        return 1.0
    return (num_updates - update) / (num_updates - args.warmup_updates)  # from 1 towards 0


def policy_loss(args, logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs):
    """The GSPO loss, -J of Eq. 5, of the n sequences of a micro-batch.

    mask (n, R) bool is True for the tokens that count; logprobs, old_logprobs and ref_logprobs
    (n, R) are 0 elsewhere; advantages (n, 1). num_seqs is the number of sequences in the whole
    minibatch, so that the losses of its micro-batches add up to the loss of the minibatch. With
    args.beta 0, ref_logprobs is not used. Returns the scalar loss, and stats: each metric summed
    over the tokens that count, except the clip fractions, which are summed over the n sequences.
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape
    assert advantages.shape == (len(mask), 1)
    logratio = logprobs - old_logprobs  # (n, R)
    ratio = masked_mean(logratio, mask, axis=1).exp()  # (n,), s in Eq. 7
    clipped_ratio = ratio.clamp(1 - args.clip_eps_low, 1 + args.clip_eps_high)  # (n,)
    seq_advantages = advantages[:, 0]  # (n,)
    surrogate = torch.minimum(ratio * seq_advantages, clipped_ratio * seq_advantages)  # (n,), Eq. 5
    seq_loss = -surrogate  # (n,)
    if args.beta > 0:
        ref_logratio = ref_logprobs - logprobs  # (n, R)
        # Eq. 4 is Schulman's k3. It estimates KL(pi || ref), but its gradient estimates that of
        # KL(ref || pi). See docs/algorithms.md.
        kl = torch.expm1(ref_logratio) - ref_logratio  # (n, R), Eq. 4
        seq_loss = seq_loss + args.beta * masked_mean(kl, mask, axis=1)
    loss = seq_loss.sum() / num_seqs  # added up over micro-batches: the mean over the minibatch

    # The clip fractions count every ratio outside the range, even where the minimum takes the
    # unclipped term and the gradient flows.
    below = ratio < 1 - args.clip_eps_low  # (n,) bool
    above = ratio > 1 + args.clip_eps_high  # (n,) bool
    per_token = {
        "policy/approx_kl": 0.5 * logratio**2,  # estimates KL(old || new), Schulman's k2
        # The log averages over tokens, so each token gets the ratio of its sequence.
        "policy/ratio_mean": ratio[:, None].expand_as(mask),
        # Its mean estimates the entropy. After the first update of a step it's a cross-entropy,
        # because the tokens are samples of pi_old.
        "policy/entropy": -logprobs,
    }
    if args.beta > 0:
        per_token["kl/ref"] = kl
    stats = {name: masked_sum(values.detach(), mask) for name, values in per_token.items()}
    stats["policy/clip_frac_low"] = below.sum()
    stats["policy/clip_frac_high"] = above.sum()
    stats["policy/clip_frac"] = (below | above).sum()
    return loss, stats


# ==== training ====
class Rollout(NamedTuple):
    """N prompts with their sampled responses; row i of each tensor belongs to sequence i."""

    prompt_ids: Tensor  # (N, P), padded on the left
    prompt_mask: Tensor  # (N, P) bool
    response_ids: Tensor  # (N, R)
    response_mask: Tensor  # (N, R) bool: the EOS token counts, nothing after it does
    sampled_logprobs: Tensor  # (N, R) float32, as the sampler computed them

    def select(self, indices):
        """The rollout of these sequences alone."""
        return Rollout(*[tensor[indices] for tensor in self])


def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    check_args(args)
    tokenizer = AutoTokenizer.from_pretrained(find_model(args))
    train_data, test_data = load_data(args, tokenizer)
    model, eos_ids = load_model(args, tokenizer)
    # The reference is the initial policy, so it's copied before a checkpoint is loaded. On a GPU it
    # is in bf16, so kl/ref is small, but not 0, before the first update.
    ref_model = inference_copy(model) if args.beta > 0 else None
    # A GPU samples from a copy in bf16, which is faster.
    sampler = inference_copy(model) if model.device.type == "cuda" else model

    G = args.num_generations
    N = args.num_prompts * G
    updates_per_step = args.num_iterations * args.num_minibatches
    num_updates = args.num_steps * updates_per_step
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    trained = {  # a checkpoint has the state_dict of each
        "model": model,
        "optimizer": optimizer,
    }

    run_dir = name_run(args)
    metrics_file, samples_file = open_run(args, run_dir)
    if (run_dir / "checkpoint.pt").exists():
        state, metrics = load_checkpoint(args, run_dir, trained)
        if sampler is not model:
            sampler.load_state_dict(model.state_dict())
    else:
        state = {"step": 0, "episodes": 0, "tokens": 0}
        metrics = state | evaluate(args, sampler, tokenizer, test_data, eos_ids)
        log_metrics(args, metrics_file, metrics)
        accuracy = metrics["eval/accuracy"]
        print(f"before: accuracy {accuracy:.3f} on {len(test_data)} held-out problems, greedy")

    batch_indices = shuffled_batches(args, len(train_data))
    first_step = state["step"] + 1
    # disable=None: no bar if the output isn't a terminal.
    progress = trange(first_step, args.num_steps + 1, disable=None)
    for step in progress:
        # ---- 1. rollout
        start_time = time.perf_counter()
        # Each step has its own seed, so that a resumed run draws what an uninterrupted one would.
        # The factor keeps step 2 of seed 1 and step 1 of seed 2 apart.
        torch.manual_seed(1_000_003 * args.seed + step)
        batch = [train_data[i] for i in batch_indices[step - 1].tolist()]  # B examples
        rollout = sample_responses(args, sampler, batch, G, args.temperature, eos_ids)
        completions = response_texts(tokenizer, rollout, eos_ids)  # N texts
        response_mask = rollout.response_mask  # (N, R)
        response_lengths = response_mask.sum(1)  # (N,)
        ended = eos_mask(rollout, eos_ids).any(1)  # (N,) bool
        rollout_seconds = time.perf_counter() - start_time

        # ---- 2. old and reference log-probabilities
        # from_pretrained and sampling leave a model in evaluation mode. Gradient checkpointing
        # needs training mode. Nothing else changes in it: load_config sets all dropout to 0.
        model.train()
        # pi_old is the policy before the first update of this step. The trainer computes its
        # log-probabilities itself, because the sampler rounds differently. Rounding also depends on
        # which sequences share a micro-batch. So the micro-batches are those of the first pass, and
        # every ratio is exactly 1 before the first update.
        step_minibatches = list(minibatches(args, N))  # the sequences of each update
        first_pass = step_minibatches[: args.num_minibatches]  # together, every sequence once
        if updates_per_step > 1:
            old_logprobs = rollout_logprobs(args, model, rollout, first_pass)  # (N, R)
        else:
            # In the only update, pi_old is pi_theta: part 4 copies its log-probabilities to here.
            old_logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
        ref_logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R), 0 without a reference
        if ref_model is not None:
            ref_logprobs = rollout_logprobs(args, ref_model, rollout, first_pass)

        # ---- 3. reward and advantage
        scores = apply_rewards(completions, batch, model.device)  # name -> (N,) float32
        rewards = sum(scores.values()).view(-1, G)  # (B, G) float32
        advantages = compute_advantages(rewards).view(-1, 1)  # (N, 1)

        # ---- 4. update
        # Sums over the updates of this step, for the log.
        total_loss = 0.0
        total_grad_norm = 0.0
        num_skipped = 0
        stat_sums = defaultdict(float)  # name of a metric -> sum over tokens or sequences
        first_update = (step - 1) * updates_per_step  # the number of updates before this step
        for update, minibatch in enumerate(step_minibatches, start=first_update):
            lr = args.learning_rate * lr_factor(args, update, num_updates)
            optimizer.param_groups[0]["lr"] = lr
            for indices, micro_batch in micro_batches(args, model, rollout, minibatch):
                logprobs = compute_logprobs(model, micro_batch, args.temperature)  # (n, R)
                if updates_per_step == 1:
                    old_logprobs[indices] = logprobs.detach()
                loss, stats = policy_loss(
                    args,
                    logprobs,
                    old_logprobs[indices],
                    ref_logprobs[indices],
                    advantages[indices],
                    response_mask[indices],
                    num_seqs=len(minibatch),
                )
                loss.backward()
                total_loss += loss.detach()
                for name, value in stats.items():
                    stat_sums[name] += value
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            total_grad_norm += grad_norm
            if torch.isfinite(grad_norm):
                optimizer.step()
            else:
                num_skipped += 1
            optimizer.zero_grad()
        if sampler is not model:
            # This rounds the new weights to bf16, except for the head.
            sampler.load_state_dict(model.state_dict())
        total_loss = float(total_loss)  # waits for the GPU, so that update_seconds is right
        update_seconds = time.perf_counter() - start_time - rollout_seconds

        # ---- 5. log
        num_tokens = int(response_lengths.sum())
        tokens_trained = num_tokens * args.num_iterations  # in all passes
        stat_means = {}
        for name, total in stat_sums.items():
            # The clip fractions are shares of the sequences, all others are means over the tokens.
            is_share = name.startswith("policy/clip_frac")
            stat_means[name] = total / (N * args.num_iterations if is_share else tokens_trained)
        state["step"] = step
        state["episodes"] += N
        state["tokens"] += num_tokens
        right = scores[REWARDS[0].__name__]  # (N,) float32
        gap = (old_logprobs - rollout.sampled_logprobs).abs()[response_mask]  # (num_tokens,)
        metrics = {
            "rollout/reward_mean": rewards.mean(),
            "rollout/reward_std": rewards.std(),  # of all N, not of a group
            "rollout/zero_std_frac": (rewards == rewards[:, :1]).all(1).float().mean(),
            **{f"rollout/{name}": score.mean() for name, score in scores.items()},
            "rollout/accuracy": right.mean(),
            "rollout/response_len": response_lengths.float().mean(),
            "rollout/eos_frac": ended.float().mean(),
            "rollout/logprob_gap": gap.mean(),
            "rollout/logprob_gap_max": gap.max(),
            **stat_means,
            "policy/loss": total_loss / updates_per_step,
            "optim/grad_norm": total_grad_norm / updates_per_step,
            "optim/lr": lr,  # of the last update
            "optim/skipped": num_skipped,
            "time/rollout_s": rollout_seconds,
            "time/update_s": update_seconds,  # of parts 2 to 4
            "time/tokens_per_s": num_tokens / rollout_seconds,
        }
        if model.device.type == "cuda":
            metrics["time/peak_mem_gb"] = torch.cuda.max_memory_allocated() / 1e9
        metrics = state | {name: float(value) for name, value in metrics.items()}
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
        log_metrics(args, metrics_file, metrics)
        for k, example in enumerate(batch):
            group = slice(k * G, (k + 1) * G)
            samples = {
                "step": step,
                "prompt": example["prompt"],
                "answer": example["answer"],
                "completions": completions[group],
                "rewards": rewards[k].tolist(),
                "right": (right[group] == 1).tolist(),
                "advantages": advantages[group, 0].tolist(),
                "ended": ended[group].tolist(),
            }
            print(json.dumps(samples), file=samples_file)
        show_progress(args, progress, metrics, samples)  # samples: of the last prompt
        if step == first_step:  # after the log, so that the log shows the gap
            check_gap(args, model, gap.mean())

        # ---- 6. save
        if step == args.num_steps or (args.save_every and step % args.save_every == 0):
            save_checkpoint(run_dir, trained, state, metrics)

    model.save_pretrained(run_dir / "model")
    tokenizer.save_pretrained(run_dir / "model")
    accuracy = metrics["eval/accuracy"]
    print(f"after: accuracy {accuracy:.3f}; model, metrics and samples are in {run_dir}")
    return metrics


# ==== sampling and log-probabilities ====
# A first reading may stop here: the rest are the functions that main calls.


def sample_responses(args, model, examples, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each of B examples: a Rollout of N sequences."""
    prompts = [torch.tensor(example["prompt_ids"], device=model.device) for example in examples]
    # Padding is -1 at first, because a prompt may contain any id that the tokenizer has.
    ids = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    prompt_mask = ids >= 0  # (B, P) bool
    prompt_ids = ids.clamp(min=0)  # (B, P)

    # Sample as many prompts at a time as fit into --sampling-tokens if every response has its
    # maximum length, but at least one.
    tokens_per_prompt = num_samples * (prompt_ids.shape[1] + args.max_new_tokens)
    at_a_time = max(1, args.sampling_tokens // tokens_per_prompt)
    parts = zip(prompt_ids.split(at_a_time), prompt_mask.split(at_a_time), strict=True)
    results = [
        generate(args, model, part_ids, part_mask, num_samples, temperature, eos_ids)
        for part_ids, part_mask in parts
    ]
    # A triple for each part -> three tensors with the rows of all parts.
    response_ids, response_mask, sampled_logprobs = map(torch.cat, zip(*results, strict=True))
    return Rollout(
        prompt_ids=prompt_ids.repeat_interleave(num_samples, 0),
        prompt_mask=prompt_mask.repeat_interleave(num_samples, 0),
        response_ids=response_ids,
        response_mask=response_mask,
        sampled_logprobs=sampled_logprobs,
    )


def response_texts(tokenizer, rollout, eos_ids):
    """The N responses as texts, without the EOS token."""
    is_text = rollout.response_mask & ~eos_mask(rollout, eos_ids)  # (N, R) bool
    return tokenizer.batch_decode(unpadded(rollout.response_ids, is_text))


def eos_mask(rollout, eos_ids):
    """(N, R) bool: True for the EOS tokens of the responses."""
    return rollout.response_mask & torch.isin(rollout.response_ids, eos_ids)


# How generate works: prefill computes each prompt once, and Decoding.select copies its keys and
# values for its samples. Then tokens are decoded, in segments of this length. Before each segment,
# Decoding.select drops the finished rows, and Decoding.grow appends an empty column to the cache
# for each token to come. On a GPU, a graph of one decode step is then recorded and replayed. In
# longer segments, attention reads more empty columns. With shorter ones, the cache is copied, and a
# graph recorded, more often.
SEGMENT = {"cpu": 32, "cuda": 64, "mps": 32}


@dataclass
class Decoding:
    """The state of sampling between two tokens.

    A CUDA graph replays on the memory that it was recorded on. So decoding writes in place. Only
    select and grow make new tensors, and after them a new graph is needed.
    """

    cache: StaticCache  # keys and values, with a row for each sequence that is sampled
    mask: Tensor  # (rows, columns) bool: False hides the padding of a prompt
    logits: Tensor  # (rows, V): those of the next token
    token: Tensor  # (rows,): the next token, once it is drawn; a graph reads it from here
    position: Tensor  # (rows,): its position, padding not counted

    def select(self, rows):
        """Go on with these rows alone. A row may repeat."""
        self.cache.reorder_cache(rows)  # keys[rows] and values[rows] of each layer
        self.mask = self.mask[rows]
        self.logits = self.logits[rows]
        self.token = self.token[rows]
        self.position = self.position[rows]

    def grow(self, columns):
        """Append empty columns to the cache."""
        for layer in self.cache.layers:
            # Keys and values are (rows, heads, columns, size). Layers with linear attention or a
            # convolution have a state of fixed size, which needs no columns.
            if isinstance(layer, StaticLayer):
                layer.keys = F.pad(layer.keys, (0, 0, 0, columns))
                layer.values = F.pad(layer.values, (0, 0, 0, columns))
                layer.max_cache_len += columns
        # The mask is True there: transformers itself hides the columns that are still empty.
        self.mask = F.pad(self.mask, (0, columns), value=True)


@torch.no_grad()
def generate(args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each left-padded prompt (B, P), in one batch of N rows.

    Returns response_ids (N, R), response_mask (N, R) bool and the logprobs (N, R) float32 of the
    sampled tokens. It samples from the model's whole softmax at this temperature: no top-k, no
    top-p, no repetition penalty. Temperature 0 is greedy.

    transformers' own generate would be slower: it computes a prompt again for each sample, and
    keeps finished responses in the batch.
    """
    model.eval()
    device = prompt_ids.device
    N = len(prompt_ids) * num_samples
    decoding = prefill(model, prompt_ids, prompt_mask)
    # Which of the N sequences each row samples: at first row i samples sequence i.
    seq_of_row = torch.arange(N, device=device)  # (rows,)
    finished = torch.zeros_like(seq_of_row, dtype=torch.bool)  # (rows,)
    # The rows of `decoding` to go on with: at first each prompt's, for each of its samples.
    keep = seq_of_row // num_samples  # (rows,)
    shape = (N, args.max_new_tokens)
    response_ids = torch.zeros(shape, dtype=torch.long, device=device)  # (N, R)
    response_mask = torch.zeros(shape, dtype=torch.bool, device=device)  # (N, R)
    sampled_logprobs = torch.zeros(shape, device=device)  # (N, R) float32
    scale = temperature if temperature > 0 else 1.0  # greedy: the logprobs are those at 1
    segment = SEGMENT[device.type]
    for start in range(0, args.max_new_tokens, segment):
        decoding.select(keep)
        end = min(start + segment, args.max_new_tokens)
        decoding.grow(end - start)
        graph = None
        for t in range(start, end):
            logprobs = (decoding.logits.float() / scale).log_softmax(1)  # (rows, V) float32
            if temperature == 0:
                token = logprobs.argmax(1)  # (rows,)
            else:
                # Gumbel-max: the argmax of logprobs + Gumbel noise is a sample of the softmax.
                # torch.multinomial would wait for the GPU.
                noise = -torch.log(-torch.log(torch.rand_like(logprobs)))  # (rows, V), Gumbel
                token = (logprobs + noise).argmax(1)  # (rows,)
            response_ids[seq_of_row, t] = token
            sampled_logprobs[seq_of_row, t] = logprobs.gather(1, token[:, None])[:, 0]
            # `finished` doesn't know this token yet. So EOS counts, and what follows it doesn't.
            response_mask[seq_of_row, t] = ~finished
            finished |= torch.isin(token, eos_ids)
            # After the last token, or when all rows have finished, there is nothing to decode.
            # Looking at `finished` waits for the device, so on a GPU it's done every 16 tokens.
            may_look = device.type != "cuda" or t % 16 == 0
            if t + 1 == args.max_new_tokens or (may_look and finished.all()):
                break

            decoding.token.copy_(token)
            if graph is not None:
                graph.replay()
            else:
                decode(model, decoding)
                if args.cuda_graph and device.type == "cuda":
                    # The call above was the warm-up that a graph needs. Recording computes nothing.
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        decode(model, decoding)
        keep = (~finished).nonzero().squeeze(1)  # (unfinished rows,)
        if len(keep) == 0:
            break
        seq_of_row, finished = seq_of_row[keep], finished[keep]

    return response_ids, response_mask, sampled_logprobs.masked_fill(~response_mask, 0.0)


def prefill(model, prompt_ids, prompt_mask):
    """The Decoding after the prompts (B, P), with a row for each of them."""
    # A StaticLayer writes keys and values in place, and its count of filled columns is a tensor, so
    # that the replay of a CUDA graph goes on to the next column.
    cache = StaticCache(model.config, max_cache_len=prompt_ids.shape[1])
    for i, is_sliding in enumerate(cache.is_sliding):
        if is_sliding:
            # transformers' layer for a sliding window holds the window alone, in columns that move,
            # so it couldn't grow. A StaticLayer holds all columns, and transformers' own mask hides
            # those outside of the window.
            cache.layers[i] = StaticLayer(max_cache_len=prompt_ids.shape[1])
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (B, P), padding not counted
    return Decoding(
        cache=cache,
        mask=prompt_mask,  # (B, P)
        logits=feed(model, cache, prompt_ids, prompt_mask, positions),  # (B, V)
        token=torch.zeros_like(prompt_ids[:, 0]),  # (B,), none is drawn yet
        position=prompt_mask.sum(1),  # (B,)
    )


def decode(model, decoding):
    """Feed the drawn tokens to the model, and write the logits of the next ones."""
    token, position = decoding.token[:, None], decoding.position[:, None]  # (rows, 1)
    decoding.logits.copy_(feed(model, decoding.cache, token, decoding.mask, position))
    decoding.position.add_(1)


def feed(model, cache, ids, mask, positions):
    """Feed tokens (rows, tokens) to the model: the logits (rows, V) after the last ones."""
    outputs = model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return outputs.logits[:, -1]


# compute_logprobs computes at most this many logits at a time. The backward pass of each chunk
# writes a gradient of the whole head. So few large chunks are faster, but need more memory.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26, "mps": 2**24}


def compute_logprobs(model, rollout, temperature):
    """Log-probabilities (n, R) float32 of n responses; 0 where response_mask is False."""
    states = response_states(model, rollout)  # (T, D)
    targets = rollout.response_ids[rollout.response_mask]  # (T,), in the same order

    def chunk_logprobs(chunk_states, chunk_targets):
        logits = compute_logits(model, chunk_states) / temperature  # (chunk, V) float32
        return -F.cross_entropy(logits, chunk_targets, reduction="none")

    # All logits at once would be the largest tensor. So they are computed for one chunk of tokens
    # at a time, and again in the backward pass.
    vocabulary_size = model.get_output_embeddings().weight.shape[0]
    chunk_size = max(1, CHUNK_LOGITS[states.device.type] // vocabulary_size)
    logprobs = []
    for chunk in zip(states.split(chunk_size), targets.split(chunk_size), strict=True):
        part = checkpoint(chunk_logprobs, *chunk, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(part)  # (chunk,)
    # masked_scatter fills row by row, in the order of targets.
    zeros = torch.zeros(rollout.response_mask.shape, device=states.device)  # (n, R)
    return zeros.masked_scatter(rollout.response_mask, torch.cat(logprobs))


def response_states(model, rollout):
    """The hidden states (T, D) from which the model predicts the T response tokens of n sequences.

    The order is that of rollout.response_ids[rollout.response_mask].
    """
    prompts = unpadded(rollout.prompt_ids, rollout.prompt_mask)  # n lists
    responses = unpadded(rollout.response_ids, rollout.response_mask)  # n lists
    rows = []
    predicts = []
    for prompt, response in zip(prompts, responses, strict=True):
        rows.append(torch.tensor(prompt + response))
        # The state at a token predicts the next one. So the last token of the prompt predicts the
        # first of the response, and the last of the response predicts none of it.
        flags = [False] * (len(prompt) - 1) + [True] * len(response) + [False]
        predicts.append(torch.tensor(flags))
    # Padding is on the right: no token sees a later one, so a mask isn't needed.
    device = rollout.prompt_ids.device
    rows = pad_sequence(rows, batch_first=True).to(device)  # (n, length)
    predicts = pad_sequence(predicts, batch_first=True).to(device)  # (n, length) bool

    decoder = model.base_model.get_decoder()  # without the head, and without a vision part
    common = shared_tokens(prompts, rows.shape[1]) if can_share(model) else 0
    # cache_enabled=False: else autocast would hold a bf16 copy of every weight at the same time.
    with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda, cache_enabled=False):
        if common == 0:
            states = decoder(rows, use_cache=False).last_hidden_state  # (n, length, D)
        else:
            states = states_after(decoder, rows, common)  # (n, length - common, D)
    return states[predicts[:, common:]]  # the first `common` flags are all False


def unpadded(values, mask):
    """The rows of values (n, length) as lists, only where the mask is True."""
    return [row[keep].tolist() for row, keep in zip(values.cpu(), mask.cpu(), strict=True)]


class DecoderOutput(BaseModelOutputWithPast):
    """Hidden states, and None in each other field that the code of a model may read."""

    def __getattr__(self, name):
        return None


def compute_logits(model, states):
    """The logits (chunk, V) float32 of hidden states (chunk, D)."""
    # Families of models differ in what follows the head: some scale or cap the logits. So the
    # model's own forward is called, but with a decoder that ignores its input and returns these
    # states. The head is in float32 (TF32 on a GPU), so that no logit is rounded to bf16.
    states = states.float()[None]  # (1, chunk, D)
    output = DecoderOutput(last_hidden_state=states)
    decoder = model.base_model.get_decoder()
    with mock.patch.object(decoder, "forward", lambda *_, **__: output):
        logits = model(inputs_embeds=states, use_cache=False).logits  # (1, chunk, V)
    return logits.squeeze(0)


@torch.no_grad()
def rollout_logprobs(args, model, rollout, update_batches):
    """compute_logprobs (N, R) of these updates' sequences, without gradient; 0 for all others.

    update_batches is a list of minibatches, each a tensor of sequence indices (m,). Each one is
    split into the same micro-batches as in its update.
    """
    logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
    for minibatch in update_batches:
        for indices, micro_batch in micro_batches(args, model, rollout, minibatch):
            logprobs[indices] = compute_logprobs(model, micro_batch, args.temperature)
    return logprobs


def micro_batches(args, model, rollout, sequences):
    """Split sequence indices (m,) into micro-batches: pairs of indices and their rollout.

    A micro-batch has at most --micro-batch-tokens tokens, padding included. A sequence that is
    longer than the maximum is alone. Tokens that all of a micro-batch share count once.
    """
    lengths = (rollout.prompt_mask.sum(1) + rollout.response_mask.sum(1)).tolist()  # N

    def padded_tokens(batch):
        return len(batch) * max(lengths[i] for i in batch)

    if can_share(model):
        batches = sharing_batches(args, rollout, lengths, sequences.tolist())
    else:
        batches = fill_batches(args, lengths, sequences.tolist(), padded_tokens)
    return [(batch, rollout.select(batch)) for batch in batches]


def fill_batches(args, lengths, indices, num_tokens):
    """Fill one micro-batch after another. Sorted by length, neighbours need little padding.

    num_tokens gives the number of tokens of a micro-batch, a list of sequence indices.
    """
    batches = []
    for i in sorted(indices, key=lambda i: lengths[i], reverse=True):
        if batches and num_tokens([*batches[-1], i]) <= args.micro_batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


# ---- what all prompts of a micro-batch begin with
# A token sees none after it. So the keys and values of the tokens with which all rows begin are the
# same in every row, and can be computed once. This is done on a CPU only, if gradient checkpointing
# is off. It saves time: if can_share always returned False, the numbers would be the same up to
# rounding.


def can_share(model):
    """Whether the model computes once what all prompts of a micro-batch begin with."""
    # On a GPU, a pass for the beginning takes longer than the tokens that it saves (docs/speed.md).
    if model.device.type != "cpu":
        return False
    # With gradient checkpointing, transformers' layers ignore a cache.
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return False
    # A layer with linear attention or a convolution passes on more than keys and values. Without
    # layer_types, all layers have full attention.
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    return set(layer_types) <= {"full_attention", "sliding_attention"}


def shared_tokens(prompts, longest):
    """The number of tokens with which all n prompts begin; 0 if it doesn't pay to share them.

    longest is the number of tokens of the longest prompt with its response.
    """
    # The last token of a prompt isn't shared, because it predicts the first of each response.
    common = len(os.path.commonprefix([prompt[:-1] for prompt in prompts]))  # takes lists, too
    # With a cache, attention needs a mask and is slower. So a fifth of the tokens must be saved.
    saved = (len(prompts) - 1) * common
    total = len(prompts) * longest
    return common if saved > total / 5 else 0


def states_after(decoder, rows, common):
    """The hidden states (n, length - common, D) of rows (n, length) after their common tokens."""
    cache = DynamicCache()
    decoder(rows[:1, :common], past_key_values=cache, use_cache=True)
    # The gradients of all rows flow back through these keys and values.
    cache.batch_repeat_interleave(len(rows))
    return decoder(rows[:, common:], past_key_values=cache, use_cache=True).last_hidden_state


def sharing_batches(args, rollout, lengths, sequences):
    """The micro-batches, lists of sequence indices, for a model that shares: see micro_batches.

    lengths has the tokens of each of the N sequences, prompt and response together.
    """
    prompts = unpadded(rollout.prompt_ids, rollout.prompt_mask)  # N lists

    def num_tokens(batch):
        """The tokens that response_states computes for these sequences, padding included."""
        longest = max(lengths[i] for i in batch)
        common = shared_tokens([prompts[i] for i in batch], longest)
        return common + len(batch) * (longest - common)

    def cost(batches):
        """Tokens, and for each pass a fixed cost, as of 1/32 of a full micro-batch."""
        return sum(map(num_tokens, batches)) + len(batches) * args.micro_batch_tokens / 32

    # The cheaper one of two: all sequences by length, which pads least, or each prompt's alone,
    # which shares most.
    by_length = fill_batches(args, lengths, sequences, num_tokens)
    groups = defaultdict(list)  # prompt -> its sequences
    for i in sequences:
        groups[tuple(prompts[i])].append(i)
    by_prompt = []
    for group in groups.values():
        by_prompt += fill_batches(args, lengths, group, num_tokens)
    return min(by_length, by_prompt, key=cost)


# ==== evaluation and rewards ====
def evaluate(args, model, tokenizer, examples, eos_ids):
    """Metrics of greedy responses to held-out examples."""
    rollout = sample_responses(
        args, model, examples, num_samples=1, temperature=0.0, eos_ids=eos_ids
    )
    completions = response_texts(tokenizer, rollout, eos_ids)
    ended = eos_mask(rollout, eos_ids).any(1)  # (N,) bool
    scores = apply_rewards(completions, examples, model.device)  # name -> (N,) float32
    means = {name: score.mean().item() for name, score in scores.items()}
    metrics = {
        "eval/reward_mean": sum(means.values()),
        **{f"eval/{name}": mean for name, mean in means.items()},
        "eval/accuracy": means[REWARDS[0].__name__],
        "eval/response_len": rollout.response_mask.sum().item() / len(examples),
        "eval/eos_frac": ended.float().mean().item(),
    }
    if accuracy_reward in REWARDS:
        # The lenient accuracy reads the last number of a response, with or without tags. If it is
        # far above the accuracy, the policy computes well and misses the format.
        answers = [example["answer"] for example in examples]
        lenient = lenient_accuracy_reward(completions, answers)
        metrics["eval/accuracy_lenient"] = sum(lenient) / len(lenient)
    return metrics


def apply_rewards(completions, examples, device):
    """The scores of N completions: the name of each reward function -> (N,) float32.

    A function gets the completions, and the columns of the data set as lists of N values. `answer`
    is the data set's answer as a text.
    """
    samples_per_example = len(completions) // len(examples)
    rows = [example for example in examples for _ in range(samples_per_example)]  # N
    columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
    texts = []
    for row, completion in zip(rows, completions, strict=True):
        # A reasoning model's chat template may open the <think> that the completion closes.
        opened = row["prompt"].rstrip().endswith("<think>")
        texts.append("<think>" + completion if opened else completion)
    scores = {}
    for reward in REWARDS:
        values = [float(score) for score in reward(completions=texts, **columns)]
        if len(values) != len(texts):
            raise ValueError(
                f"{reward.__name__} returned {len(values)} scores for {len(texts)} completions"
            )
        scores[reward.__name__] = torch.tensor(values, device=device)
    return scores


# ==== data and model ====
def load_splits(args):
    """The splits of --dataset, a DatasetDict. A validation split stands in for a missing test."""
    path = Path(args.dataset).absolute()  # load_dataset would read "." as a name of the hub
    if path.is_file():
        splits = datasets.load_dataset(str(path.parent), data_files=path.name)
    elif path.is_dir():
        splits = datasets.load_dataset(str(path))
    else:  # id or id:config of the hub
        splits = datasets.load_dataset(*args.dataset.split(":"))
    # The result isn't used. If a column is missing, this raises an error that names the columns.
    splits.select_columns([args.question_column, args.answer_column])
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits["validation"]
    return splits


def load_data(args, tokenizer):
    """The train and the test split, each a list of examples."""
    splits = load_splits(args)
    train_data = read_examples(args, tokenizer, splits, "train")
    if "test" in splits:
        test_data = read_examples(args, tokenizer, splits, "test")
        train_prompts = {example["prompt"] for example in train_data}
        num_shared = sum(example["prompt"] in train_prompts for example in test_data)
        print(f"test data: {num_shared} of its problems are also in the train data")
    else:
        prompts = list(dict.fromkeys(example["prompt"] for example in train_data))
        held_out = set(prompts[len(prompts) * 9 // 10 :])  # equal questions stay in one split
        test_data = [example for example in train_data if example["prompt"] in held_out]
        train_data = [example for example in train_data if example["prompt"] not in held_out]
        print(
            f"{args.dataset} has no test split: the last tenth of its questions is held out, "
            f"{len(test_data)} problems"
        )
    print(f"first prompt: {train_data[0]['prompt']!r}, answer {train_data[0]['answer']!r}")
    return train_data, test_data[: args.eval_size]


def read_examples(args, tokenizer, splits, split):
    """The examples of a split. Prints how many rows are skipped, and raises an error if all are.

    An example is a dict of prompt and answer (texts), prompt_ids (a list) and columns: the row of
    the data set, with the answer as a text, for the rewards.
    """
    examples = []
    num_too_long = num_unreadable = num_empty = 0
    for row in splits[split]:
        chat = read_chat(args, row[args.question_column])
        if chat is None:
            num_empty += 1
            continue
        prompt = render(args, tokenizer, chat)
        ids = tokenize(tokenizer, prompt)
        if len(ids) > args.max_prompt_tokens:
            num_too_long += 1
            continue
        answer = row[args.answer_column]
        if answer is None or not has_gold(str(answer), REWARDS):
            num_unreadable += 1  # no reward could judge a response
            continue
        answer = str(answer)
        columns = row | {"answer": answer}
        examples.append({"prompt": prompt, "prompt_ids": ids, "answer": answer, "columns": columns})
    counts = (
        f"{split} data: {len(examples)} problems; skipped: {num_too_long} longer than "
        f"--max-prompt-tokens, {num_unreadable} without a readable {args.answer_column}, "
        f"{num_empty} without a {args.question_column}"
    )
    if not examples:
        raise ValueError(f"--dataset {args.dataset}: {counts}")
    print(counts)
    return examples


def read_chat(args, question):
    """The question, a text or a chat, as a list of messages.

    None if there is no message, if the last one is blank, or if any content is None.
    """
    chat = question if isinstance(question, list) else [{"role": "user", "content": question}]
    contents = [message["content"] for message in chat]
    if not chat or None in contents or not contents[-1].strip():
        return None
    if chat[-1]["role"] != "user":
        raise ValueError(
            f"--question-column {args.question_column}: the last message of a chat must be from "
            f"the user, but one is from the {chat[-1]['role']}"
        )
    return chat


def render(args, tokenizer, chat):
    """The text that the policy continues: the chat in the model's template, or a plain text."""
    *earlier, last = chat
    if args.instructions:
        # The instructions stand in the user's message, because some templates refuse a system
        # message.
        last = last | {"content": f"{args.instructions}\n\n{last['content']}"}
    shown = EXAMPLES if args.examples else []
    # Without a template, a single message becomes a plain text. Earlier messages can't be shown in
    # this way: apply_chat_template, below, then raises its own error.
    if not tokenizer.chat_template and not earlier:
        if not shown:
            return last["content"]  # to be continued as it is, such as "12+7="
        text = ""
        for question, answer in shown:
            # With the EOS token after each answer, the model ends its own answer, too.
            text += f"{question}\n{answer}{tokenizer.eos_token or ''}\n"
        return text + last["content"] + "\n"
    turns = []
    for question, answer in shown:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    num_system = 1 if chat[0]["role"] == "system" else 0  # a system message has to stay the first
    messages = [*earlier[:num_system], *turns, *earlier[num_system:], last]
    return fill_template(tokenizer, messages, add_generation_prompt=True)


def fill_template(tokenizer, chat, **options):
    """The chat as a text, in the model's template, with each message word for word.

    Some templates change the messages: they delete the thoughts of earlier turns. So the template
    is filled with placeholders, which the messages replace afterwards.
    """
    texts = {}  # placeholder -> the message's content
    marked = []
    for i, message in enumerate(chat):
        mark = f"[[[message {i}]]]"
        texts[mark] = message["content"]
        marked.append(message | {"content": mark})
    filled = tokenizer.apply_chat_template(marked, tokenize=False, **options)
    for mark, text in texts.items():
        if mark not in filled:
            raise ValueError(f"--model: its chat template drops the message {text!r}")
    # All in one pass: a message may contain what looks like a placeholder.
    return re.sub(r"\[\[\[message \d+\]\]\]", lambda found: texts[found[0]], filled)


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


def shuffled_batches(args, num_examples):
    """The indices (B,) of each step's examples; every epoch shuffles all of them anew."""
    generator = torch.Generator().manual_seed(args.seed)
    num_epochs = 1 + args.num_steps * args.num_prompts // num_examples
    epochs = [torch.randperm(num_examples, generator=generator) for _ in range(num_epochs)]
    # A batch may hold the end of one epoch and the start of the next.
    return torch.cat(epochs).split(args.num_prompts)


def find_model(args):
    """The folder or hub id of --model."""
    if "/" in args.model or os.path.exists(args.model):
        return args.model
    return f"HuggingFaceTB/{args.model}"


def load_model(args, tokenizer):
    """The policy on its device, and the ids of all tokens that end a response.

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
    name = find_model(args)
    config = load_config(args, name)
    # Ministral 3 and others are published with a vision part, which a run neither uses nor trains.
    is_text_model = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText
    model, info = auto_class.from_pretrained(
        name, config=config, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"]))
        raise ValueError(f"--model {name}: its files have no weights for {missing}")
    model.to(device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    eos_ids = find_eos_ids(model, tokenizer)  # a list
    # They are saved with the model, so that other programs also end a response there. No other
    # setting for sampling is kept: the policy is trained without top-k and repetition penalty.
    model.generation_config = GenerationConfig(
        eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id
    )
    return model, torch.tensor(eos_ids, dtype=torch.long, device=device)


def load_config(args, name):
    """A model's configuration, without dropout. Raises an error if a sequence could be too long."""
    config = AutoConfig.from_pretrained(name)
    text_config = config.get_text_config()
    # The noise of dropout would change the ratios. The names of its fields all contain "drop".
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
    """The ids of all tokens that end a response, sorted.

    These are the EOS tokens of the tokenizer and of the model's generation config, and the token
    with which the chat template ends a turn, if it is an added token. All three may differ.
    """
    eos_ids = {tokenizer.eos_token_id}
    model_eos = model.generation_config.eos_token_id
    eos_ids |= set(model_eos) if isinstance(model_eos, list) else {model_eos}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
        rendered = fill_template(tokenizer, turns)  # after the answer, it may have "<|im_end|>\n"
        end_of_turn = rendered.rpartition("answer")[2].strip()
        first = tokenizer(end_of_turn, add_special_tokens=False).input_ids[:1]
        # Ordinary text after an answer, such as a line break, must not end a response.
        eos_ids |= set(first) & set(tokenizer.added_tokens_decoder)
    return sorted(eos_ids - {None})


def inference_copy(model):
    """A frozen copy of the model: the reference, or the sampler of a GPU.

    On a GPU all its weights except the head are in bf16. Sampling spends most of its time reading
    weights, keys and values, and in bf16 they have half as many bytes.
    """
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if model.device.type == "cuda":
        # Buffers are left alone: the rotary frequencies stay in float32.
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        # The copied head is bf16 by now, like the embedding whose weight it may share. So it's
        # replaced by a copy of the original head, in float32, and the hook converts its input.
        head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        copied.set_output_embeddings(head)
    return copied


# ==== runs ====
def check_args(args):
    """Raise an error for values that would silently train something else."""
    if args.num_generations < 2:
        raise ValueError("--num-generations must be at least 2, to compare the samples of a group")
    for name in ("temperature", "clip_eps_low", "clip_eps_high", "max_grad_norm"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    if args.num_minibatches > args.num_prompts * args.num_generations:
        raise ValueError("--num-minibatches must be at most the number of sequences of a step")
    if len({reward.__name__ for reward in REWARDS}) < len(REWARDS):
        raise ValueError("two functions in REWARDS have the same name")


def check_gap(args, model, gap):
    """Raise an error if sampler and trainer differ by too many nats a token.

    They have the same weights up to rounding, so a large gap means that generate or
    compute_logprobs computes this kind of model wrongly.
    """
    tolerance = 0.1 if model.device.type == "cuda" else 1e-3  # bf16 rounds more
    if not gap < tolerance:  # NaN is refused, too
        raise ValueError(
            f"--model {args.model}: sampling and training differ by {gap:.2g} nats a token: this "
            "family isn't supported, or generate and compute_logprobs in this file disagree"
        )


def name_run(args):
    """The folder of the run."""
    when = time.strftime("%Y%m%d-%H%M%S")
    name = args.run_name or f"{SCRIPT.stem}__{Path(args.model).name}__{args.seed}__{when}"
    return Path(args.runs_dir, name)


def open_run(args, run_dir):
    """Create or reopen the run's folder, and return the open metrics.jsonl and samples.jsonl.

    If the command of a run with a name is repeated, that run goes on from its checkpoint. Without a
    checkpoint it begins again, with empty log files. With --track, this also starts W&B.
    """
    is_repeated = args.run_name is not None and run_dir.exists()
    if is_repeated:
        check_same_run(args, run_dir)
    if args.track:  # before the folder is made: if W&B fails, there is no run yet
        import wandb  # here, so that only a tracked run needs it

        Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
        wandb.init(
            id=run_dir.name,
            name=run_dir.name,
            dir=args.runs_dir,
            config=vars(args),
            resume="allow" if is_repeated else "never",  # never into another run of the same name
            reinit="finish_previous",  # a run that failed in the same process may still be open
        )
    run_dir.mkdir(parents=True, exist_ok=is_repeated)  # an error if another run has this name
    # Written again for a repeated command, because --num-steps may have grown.
    content = vars(args) | {"rewards": [reward.__name__ for reward in REWARDS]}
    (run_dir / "args.tmp").write_text(json.dumps(content, indent=2))
    os.replace(run_dir / "args.tmp", run_dir / "args.json")
    if not is_repeated:
        shutil.copy(SCRIPT, run_dir)
    mode = "a" if (run_dir / "checkpoint.pt").exists() else "w"
    names = ("metrics.jsonl", "samples.jsonl")
    return [open(run_dir / name, mode, buffering=1) for name in names]


def check_same_run(args, run_dir):
    """Raise an error if the folder's run began with another script or with other flags."""
    flag = f"--run-name {args.run_name}"
    copied = run_dir / SCRIPT.name
    if not copied.exists() or copied.read_bytes() != SCRIPT.read_bytes():
        raise ValueError(
            f"{flag}: {run_dir} has no copy of this {SCRIPT.name}, so its run began with another "
            "script, or with another version of it; choose another name"
        )
    saved = json.loads((run_dir / "args.json").read_text())
    may_differ = ["runs_dir", "run_name"]
    if args.lr_schedule == "constant_with_warmup" and args.num_steps > saved["num_steps"]:
        may_differ.append("num_steps")  # the learning rate doesn't depend on it
    changed = []
    for name, value in vars(args).items():
        if name not in may_differ and value != saved.get(name):
            changed.append("--" + name.replace("_", "-"))
    if changed:
        raise ValueError(
            f"{flag}: this run began with other values of {', '.join(changed)}; repeat its command "
            "to go on with it, or choose another name for a new run"
        )


def log_metrics(args, file, metrics):
    """Write the metrics as one line, and with --track to W&B."""
    print(json.dumps(metrics), file=file)
    if args.track:
        import wandb

        wandb.log(metrics, step=metrics["step"])


def show_progress(args, progress, metrics, samples):
    """Put metrics beside the bar, and about ten times a run print them and the first sample."""
    names = {"reward": "reward_mean", "acc": "accuracy", "len": "response_len", "eos": "eos_frac"}
    progress.set_postfix({word: metrics[f"rollout/{name}"] for word, name in names.items()})
    step = metrics["step"]
    if step == 1 or step % max(1, args.num_steps // 10) == 0:
        prompt, completion = samples["prompt"][-60:], samples["completions"][0]
        progress.write(f"step {step}: {progress.postfix}")
        progress.write(f"    {prompt!r} -> {completion!r}, reward {samples['rewards'][0]:.2f}")


def save_checkpoint(run_dir, trained, state, metrics):
    """Write a temporary file and rename it, so that checkpoint.pt is always complete."""
    content = {name: part.state_dict() for name, part in trained.items()}
    content |= {"state": state, "metrics": metrics}
    content["log_sizes"] = {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")}
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
    has_model = any(flag.split("=")[0] == "--model" for flag in sys.argv)
    defaults = Args() if has_model else BUNDLED
    main(tyro.cli(Args, default=defaults, description=__doc__.split("\n\n")[0]))
