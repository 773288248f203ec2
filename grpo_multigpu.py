"""GRPO on several GPUs and machines, in one file: grpo.py (DeepSeekMath, Shao et al. 2024,
arXiv:2402.03300v3) with torch's FSDP2 (Zhao et al. 2023, arXiv:2304.11277), started by torchrun.

The objective and its equations are those of grpo.py:

    J(theta) = E[ 1/G sum_i 1/|o_i| sum_t ( S_it - beta KL_it ) ]                           (Eq. 3)
    S_it     = min( rho_it A_it, clip(rho_it, 1-eps, 1+eps) A_it )
    rho_it   = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)
               pi_old is the policy that sampled, not the reference
    A_it     = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)      the same for every token t  (4.1.2)
    KL_it    = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1       at the sampled token    (Eq. 4)

Parent: grpo.py. Differences: (1) each of W processes samples for its share of the prompts, with its
own noise. Then every process gets the whole rollout. Rank 0 computes the rewards for all, because a
reward may be a paid model, or differ from call to call. Every process computes the same advantages.
(2) The processes share the micro-batches of an update: each takes every W-th. All have to call the
sharded model equally often, so a process that has one micro-batch less repeats the first one of the
update. The gradient of the repeat is multiplied by 0, because rank 0 counts that micro-batch. The
loss is divided by the number of sequences in the whole minibatch, so the update doesn't depend on
the number of processes, except for rounding. (3) Weights, gradients and Adam's averages are
sharded: each process holds 1/W of them. A layer is whole only while it is computed. (4) The copy
that samples and the reference are whole on every process, so that sampling needs no communication.
(5) Rank 0 prints, logs, tracks, and saves whole checkpoints, which any number of processes can
resume. Every process reads the checkpoint, so several machines need --runs-dir on a file system
that they share. With as many processes as before, a resumed run on CPUs is bit-identical to an
uninterrupted one. With another number of processes it samples with other noise.

To stop a run with a checkpoint, press Ctrl-C. torchrun passes the signal on, and kills the
processes that still run 30 s later. If a step plus a checkpoint takes longer, start torchrun with
--shutdown-timeout 600. At the end torchrun itself exits with status 1 and a traceback.

Memory per GPU, in bytes per parameter: 4 for weights, 4 for gradients and 8 for Adam, divided by W.
The copy that samples takes 2, except its head, which takes 4 and shares no weight, even if that of
the model does. The reference (none with --beta 0) takes 2 for its linear layers, and 4 for its
embedding and head. In GB:

    1.7 B on 2 x 24 GB     13.7 + 3.8 + 3.6 = 21.1      without the reference 17.5
    8 B on 8 x 80 GB       16.1 + 17.1 + 18.2 = 51.3    (Llama 3's shape)

While the model is loaded, a process holds up to 8.5 bytes per parameter on its GPU and 4 on the
host. For a checkpoint, rank 0 holds 12 on the host. More GPU memory is needed for gathered weights:
those of embedding, head and two layers at a time. They take 12 bytes per parameter: 4 in the buffer
into which FSDP gathers them, 4 in the whole weights copied out of it, and 4 for their gradients.
With --gradient-checkpointing False, what is saved for the backward pass includes a bf16 copy of all
layers. Keys and values (--sampling-tokens) and activations (--micro-batch-tokens) need memory, too.
So 1.7 B on 2 x 24 GB needs --beta 0 and fewer sampling tokens.

Communication per process, in bytes per parameter, times (W - 1) / W: 4 for each forward pass of a
micro-batch, 8 for each backward pass (weights again, then gradients), and 4 for the sampling copy
in each step. Over NVLink that is little. Over PCIe it can take longer than the computation. Between
machines with 12 GB/s (100 Gbit/s), 8 B parameters take 8 s (8e9 * 12 bytes / 12e9 bytes per second)
for each micro-batch of each process. So --micro-batch-tokens should be as large as the memory
allows. Python objects are sent over gloo, which takes the network to which the host's name
resolves. If that is the loopback, name another one: GLOO_SOCKET_IFNAME=eth0.

Departures from the paper: those of grpo.py.

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i
belongs to prompt i//G), P prompt tokens, R response tokens, V vocabulary, D hidden units; a
micro-batch has n <= N sequences, with T response tokens in all. W is the number of processes.

    torchrun --nproc-per-node 8 grpo_multigpu.py --model SmolLM2-1.7B-Instruct
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 \
        grpo_multigpu.py ...
    torchrun --nproc-per-node 2 grpo_multigpu.py --device cpu     assets/adder, on two CPU processes
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
from datetime import timedelta
from glob import escape
from pathlib import Path
from typing import Literal, NamedTuple

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
import wandb
from torch import Tensor
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import trange
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.cache_utils import Cache, StaticLayer

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
REWARDS = [accuracy_reward, format_reward]  # they are summed, and each is logged by its name
ACCURACY = accuracy_reward  # 1.0 means right; used for all accuracies and by report.py
SHOWN = {  # metrics beside the progress bar, and their names there
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "acc",
    "rollout/response_len": "len",
    "kl/ref": "kl",
    "optim/skipped": "skip",
    "eval/accuracy": "eval",
}
SYSTEM_PROMPT = """Solve the problem step by step. Write your reasoning between <think> and \
</think>, and then the final number alone between <answer> and </answer>. For example:
A box holds 4 rows of 6 eggs, and 5 eggs are broken. How many eggs are whole?
<think>The box holds 4 * 6 = 24 eggs. 24 - 5 = 19 of them are whole.</think>
<answer>19</answer>"""
# A checkpoint has whole weights and Adam's averages instead of shards. Rank 0 gets them in the
# memory of the host; the other processes get nothing.
WHOLE = sharded_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
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
    """where to train; auto: the GPU if there is one"""
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
    sampling_tokens: int | None = None
    """tokens in a sampling batch, with padding; None: 49152, or 131072 on a GPU of 60 GB or more"""
    cuda_graph: bool = True
    """on a GPU, replay the decode step from a CUDA graph"""
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


def policy_loss(args, logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs):
    """The GRPO loss, -J of Eq. 3, of the n sequences of a micro-batch.

    logprobs, old_logprobs, ref_logprobs (n, R); advantages (n, 1); mask (n, R) bool, True for the
    tokens that count. num_seqs is the number of sequences in the whole minibatch, so that the
    losses of its micro-batches add up to the loss of the minibatch. With args.beta 0, ref_logprobs
    is not used. Returns the scalar loss, and stats: each metric summed over the tokens that count.
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape
    assert advantages.shape == (len(mask), 1)
    # Masked slots become 0, whatever the caller has put there: exp of garbage could be inf, and its
    # gradient 0 * inf = NaN.
    logratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)  # (n, R)
    ratio = logratio.exp()  # (n, R)
    clipped_ratio = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps)  # (n, R)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)  # (n, R), S in Eq. 3
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
    per_token = {
        "policy/clip_frac_low": below,
        "policy/clip_frac_high": above,
        "policy/clip_frac": below | above,
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
    sampled_logprobs: Tensor  # (N, R) float32, as the sampler computed them
    completions: list[str]  # N texts

    def select(self, rows):
        """The rollout of these sequences alone."""
        *tensors, completions = self  # only the last field is a list
        return Rollout(*[x[rows] for x in tensors], [completions[i] for i in rows])


@restore_afterwards()  # gives the caller's signal handlers and logging back
def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    W = num_processes()
    rank = process_rank()
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # rank 0 prints for all
    args, run_dir, saved = resolve_args(args)
    config, tokenizer = load_config(args)
    train_data = load_data(args, tokenizer, "train")
    test_data = load_data(args, tokenizer, "test")
    check_shares(args, test_data)
    hide_errors_of_peers()
    mesh = connect(args)
    model, eos_ids = load_model(args, config, tokenizer)
    args = choose_batch_sizes(args, model.device)
    args = gather_objects(args)[0]  # every process takes the choice of rank 0
    # The reference is the initial policy, so it's copied before a checkpoint is loaded.
    ref_model = reference_copy(model) if args.beta > 0 else None
    # Every process samples from a whole copy. Copying the reference needs less memory than copying
    # the model, because on a GPU the reference is mostly in bf16.
    sampler = inference_copy(model if ref_model is None else ref_model)
    # policy(rollout, temperature) gathers the sharded weights and calls compute_logprobs.
    policy = LogprobModel(model)
    shard(policy, mesh)

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
            # Each process reads the whole checkpoint, and keeps its shards. pop frees the memory.
            sharded_state.set_model_state_dict(model, saved.pop("model"), options=WHOLE)
            sharded_state.set_optimizer_state_dict(
                model, optimizer, saved.pop("optimizer"), options=WHOLE
            )
            scheduler.load_state_dict(saved.pop("scheduler"))
        if saved.get("data_checksum") != data_checksum:
            print("warning: the data has changed since this run started")
        refresh_sampler(sampler, model)
    metrics_file, samples_file = open_run(args, run_dir, saved, model)
    if updates_per_step == 1:  # so every ratio is 1
        print("one update per rollout: clip_frac is 0 and the loss says little; watch the reward")
    signals = catch_signals()
    if not saved:
        metrics = state | evaluate(args, sampler, tokenizer, test_data, eos_ids)
        log_metrics(args, metrics_file, metrics, [])
        accuracy = metrics["eval/accuracy"]
        print(f"before: accuracy {accuracy:.3f} on {len(test_data)} held-out problems, greedy")

    batch_indices = shuffled_batches(args, len(train_data))
    bad_updates_in_a_row = 0  # updates skipped because their gradient was not finite
    first, last = state["step"] + 1, args.num_steps
    hide_progress = True if rank > 0 else None  # None: show it if stderr is a terminal
    progress = trange(first, last + 1, initial=first - 1, total=last, disable=hide_progress)
    # With tqdm's own format, an 80-column terminal would cut off the last metrics.
    progress.bar_format = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
    for step in progress:
        # ---- 1. rollout
        start_time = time.perf_counter()
        # Each step has its own seed, so that a resumed run draws what an uninterrupted one would.
        # The factor keeps the steps of runs with neighboring seeds apart.
        step_seed = 1_000_003 * args.seed + step
        # Each process has its own noise. With the same noise, two processes that got the same
        # question would sample the same responses. The offset is larger than any number of steps.
        torch.manual_seed(step_seed + 10**12 * rank)
        batch = [train_data[i] for i in batch_indices[step - 1]]
        rollout = sample_responses(args, sampler, tokenizer, batch, G, args.temperature, eos_ids)
        # From here on all processes draw the same numbers, so that all shuffle alike.
        torch.manual_seed(step_seed)
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
        # The old log-probabilities come from the trainer, because the sampler's arithmetic differs
        # a little. The first minibatch takes them from the forward pass of its update (below). For
        # the other minibatches they are computed here, before the weights change.
        parts = first_pass[1:]
        old_logprobs = rollout_logprobs(args, policy, rollout, total_lengths, parts)  # (N, R)
        ref_logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
        if ref_model is not None:
            reference = LogprobModel(ref_model)  # not sharded, but called in the same way
            ref_logprobs = rollout_logprobs(args, reference, rollout, total_lengths, first_pass)

        # ---- 2. reward and advantage
        scores = {}  # name of the reward function -> (N,) float32
        for reward in REWARDS:
            values = ask_rank_0(reward, batch, rollout.completions)  # N
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
            for rows, is_repeat in own_micro_batches(args, minibatch, total_lengths):
                logprobs = policy(rollout.select(rows), args.temperature)  # (n, R)
                if is_repeat:
                    # Another process counts these sequences. This one only takes part in the
                    # communication of the backward pass.
                    (0.0 * logprobs.sum()).backward()
                    continue
                if update == 0:
                    # No parameter has changed yet, so these are the old log-probabilities.
                    old_logprobs[rows] = logprobs.detach()
                loss, stats = policy_loss(
                    args,
                    logprobs,
                    old_logprobs[rows],
                    ref_logprobs[rows],
                    advantages[rows],
                    response_mask[rows],
                    num_seqs=len(minibatch),
                )
                # FSDP averages the gradients of the W processes, but the update needs their sum.
                (W * loss).backward()
                total_loss += loss.detach()
                for name, value in stats.items():
                    token_sums[name] += value
            if update == 0:
                # Each row of this minibatch was computed by one process, and is 0 on the others. In
                # a later pass another process may need it, and the log needs all rows.
                first_logprobs = old_logprobs[minibatch]  # (n, R)
                dist.all_reduce(first_logprobs, dist.ReduceOp.SUM)
                old_logprobs[minibatch] = first_logprobs
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            grad_norm = grad_norm.full_tensor()  # of the shards of all processes
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
        refresh_sampler(sampler, model)
        # Each process has the sums of its own micro-batches, which are added up here. This also
        # waits for the GPU, so that update_seconds is right.
        total_loss = sum(gather_objects(float(total_loss)))
        token_sums = sum_over_processes(token_sums)
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
            accuracies = torch.tensor(ask_rank_0(ACCURACY, batch, rollout.completions))  # (N,)
        gap = (old_logprobs - rollout.sampled_logprobs).abs()[response_mask]  # (num_tokens,)
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
            metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
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
        # A signal to one process stops all of them. One that comes after this line waits for the
        # next step.
        stop_signals = [number for part in gather_objects(signals) for number in part]
        is_due = args.save_every and step % args.save_every == 0
        # The first step is saved, too, so that a folder that can't be written is noticed early.
        if stop_signals or is_due or step in (1, args.num_steps):
            save_checkpoint(args, run_dir, trained, state, metrics, data_checksum)
        if stop_signals and step < args.num_steps:
            progress.close()
            resume = shlex.join([str(SCRIPT), "--resume", str(run_dir.absolute())])
            print(f"stopped after step {step}; to go on: torchrun ... {resume}")
            # Wait until rank 0 has saved: torchrun ends all when one ends with a status above 0.
            dist.barrier()
            sys.exit(128 + stop_signals[0])

    # Rank 0 gets the whole weights and writes them. The others don't wait for it.
    weights = sharded_state.get_model_state_dict(model, options=WHOLE)
    dist.destroy_process_group()
    if rank > 0:
        return metrics
    save_model(model, weights, tokenizer, run_dir / "model")
    if args.track:
        wandb.finish()
    accuracy = metrics["eval/accuracy"]
    print(f"after: accuracy {accuracy:.3f}; model, metrics and samples are in {run_dir}")
    return metrics


# ==== sampling and log-probabilities ====
# A first reading may stop here: what follows makes the loop above fast, or sets it up.

# The cache of keys and values grows by this many columns at a time. With more, attention also reads
# many empty columns. With fewer, the cache is copied more often, and on a GPU the graph is recorded
# more often.
SEGMENT = {"cpu": 32, "cuda": 128, "mps": 32}
# In a cache of at most this many tokens (rows times columns), a decode step is so fast that
# recording a graph for fewer rows takes longer than it saves.
SMALL_CACHE = 2**15
# compute_logprobs computes at most this many logits at a time. The backward pass of each chunk also
# computes a gradient of the whole head. So larger chunks are faster, but need more memory.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26, "mps": 2**24}


@torch.no_grad()
def generate(args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each left-padded prompt (B, P), in one batch of N rows.

    Returns response_ids (N, R), response_mask (N, R) bool and the logprobs (N, R) float32 of the
    sampled tokens. It samples from the model's whole softmax at this temperature: no top-k, no
    top-p, no repetition penalty. Temperature 0 is greedy.
    """
    model.eval()
    device = prompt_ids.device
    segment = SEGMENT[device.type]
    num_rows = len(prompt_ids) * num_samples
    response_ids = torch.zeros(num_rows, args.max_new_tokens, dtype=torch.long, device=device)
    response_logprobs = torch.zeros(response_ids.shape, device=device)  # (N, R) float32

    # Prefill: compute the keys and values of each prompt once, and repeat them for its samples. A
    # static layer writes its columns in place, as a CUDA graph needs; select_rows enlarges it.
    cache = Cache(layer_class_to_replicate=lambda: StaticLayer(max_cache_len=prompt_ids.shape[1]))
    options = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (B, P), padding not counted
    logits = model(
        prompt_ids, attention_mask=prompt_mask.long(), position_ids=positions, **options
    ).logits  # (B, 1, V)
    # The bias is added to the attention scores: 0 shows a column of the cache, and a very negative
    # number masks it.
    masked = torch.finfo(model.dtype).min
    bias = torch.where(prompt_mask, 0.0, masked).to(model.dtype)[:, None, None]  # (B, 1, 1, P)
    prompt_of = torch.arange(num_rows, device=device) // num_samples  # (N,)
    select_rows(cache, prompt_of)
    logits, bias = logits[prompt_of], bias[prompt_of]  # (N, 1, V), (N, 1, 1, P)

    # The state of the unfinished rows. Finished rows are dropped now and then.
    sequence = torch.arange(num_rows, device=device)  # (rows,): which of the N sequences a row is
    token = torch.zeros_like(sequence)  # (rows,): the token sampled last
    position = prompt_mask.sum(1)[prompt_of]  # (rows,): its position, padding not counted
    finished = torch.zeros_like(sequence, dtype=torch.bool)  # (rows,)
    # The column of the cache that is written next. It is a view of the first layer's count of
    # filled columns, so it advances by itself: the model adds 1 to that tensor in place.
    next_column = cache.layers[0].cumulative_length.view(1)  # (1,)
    graph = None

    def decode():
        """Feed `token` to the model, and write the logits of the next token into `logits`."""
        # All tensors change in place, because a CUDA graph replays on the same memory. Where the
        # loop below replaces them, it drops the graph.
        bias.index_fill_(3, next_column, 0.0)  # show the column that this call writes
        outputs = model(
            token[:, None], attention_mask=bias, position_ids=position[:, None], **options
        )
        logits.copy_(outputs.logits)
        position.add_(1)

    for t in range(args.max_new_tokens):
        if graph is not None:
            graph.replay()
        elif t > 0:  # the prefill has computed the logits for t = 0
            decode()
            if args.cuda_graph and device.type == "cuda":
                # A graph needs an ordinary call as a warm-up: that was the one above. The recording
                # computes nothing, so the token is not fed twice.
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    decode()

        next_logits = logits[:, 0].float()  # (rows, V) float32
        if temperature == 0:
            logprobs = next_logits.log_softmax(1)  # (rows, V)
            token.copy_(logprobs.argmax(1))
        else:
            # Gumbel-max: the argmax of logprobs + Gumbel noise, -log(-log(uniform)), is a sample.
            logprobs = (next_logits / temperature).log_softmax(1)  # (rows, V)
            noise = torch.rand_like(logprobs).log_().neg_().log_().neg_()  # (rows, V)
            token.copy_((logprobs + noise).argmax(1))
        response_ids[sequence, t] = token
        response_logprobs[sequence, t] = logprobs.gather(1, token[:, None])[:, 0]
        finished |= torch.isin(token, eos_ids)

        # The tokens before t have been fed, so P + t columns are filled. The cache has P columns at
        # first, and gets a segment more when it is full: whenever t is a multiple of the segment.
        cache_is_full = t % segment == 0
        # Looking at `finished` waits for the device, so on a GPU do it every 16 tokens.
        if device.type == "cuda" and t % 16 > 0 and not cache_is_full:
            continue
        live = (~finished).nonzero().squeeze(1)  # (unfinished rows,)
        if len(live) == 0:
            break
        # Dropping rows copies the cache, so wait until half of the rows have finished. On a GPU it
        # also needs a new graph, so with a small cache don't drop any.
        is_small = device.type == "cuda" and len(finished) * bias.shape[3] <= SMALL_CACHE
        if cache_is_full or (len(live) <= len(finished) / 2 and not is_small):
            new_columns = min(segment, args.max_new_tokens - t) if cache_is_full else 0
            select_rows(cache, live, new_columns)
            bias = F.pad(bias[live], (0, new_columns), value=masked)  # (rows, 1, 1, columns)
            logits, token, position = logits[live], token[live], position[live]
            sequence, finished = sequence[live], finished[live]
            graph = None  # it was recorded on the old tensors

    # A finished row is still sampled until it is dropped. Tokens after an EOS token don't count.
    is_eos = torch.isin(response_ids, eos_ids).long()  # (N, R)
    num_eos_before = is_eos.cumsum(1) - is_eos  # (N, R)
    response_mask = num_eos_before == 0  # (N, R) bool
    return response_ids, response_mask, response_logprobs.masked_fill(~response_mask, 0.0)


def select_rows(cache, rows, new_columns=0):
    """Keep these rows of the cached keys and values (a row may repeat), and append columns."""
    for layer in cache.layers:
        layer.keys = F.pad(layer.keys[rows], (0, 0, 0, new_columns))  # (rows, heads, columns, size)
        layer.values = F.pad(layer.values[rows], (0, 0, 0, new_columns))


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
    model is a LogprobModel. The processes share the work, and each gets the whole result.
    """
    logprobs = torch.zeros_like(rollout.sampled_logprobs)  # (N, R)
    for minibatch in parts:
        for rows, is_repeat in own_micro_batches(args, minibatch, total_lengths):
            own_logprobs = model(rollout.select(rows), args.temperature)  # (n, R)
            if not is_repeat:
                logprobs[rows] = own_logprobs
    # Each row was computed by one process, and is 0 on the others, so the sum has all rows.
    dist.all_reduce(logprobs, dist.ReduceOp.SUM)
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


class MicroBatch(NamedTuple):
    """A micro-batch, as one process computes it."""

    rows: list[int]  # the indices of its sequences
    is_repeat: bool  # True: another process computes it, too, and counts it


def own_micro_batches(args, sequences, lengths):
    """The micro-batches of these sequences that this process computes: every W-th of all.

    All processes have to call the sharded model equally often, because each call gathers the
    weights from all. So a process that has one micro-batch less than others repeats the first one.
    """
    W = num_processes()
    split = micro_batches(sequences, lengths, args.micro_batch_tokens)
    # A repeat takes time and adds nothing. So make the micro-batches smaller, by 3 % at a time, as
    # long as no process needs more calls: then fewer are repeats.
    num_calls = math.ceil(len(split) / W)  # of each process
    max_tokens = args.micro_batch_tokens
    longest = max(lengths[i] for i in sequences.tolist())
    while W > 1 and max_tokens > longest:
        max_tokens = int(0.97 * max_tokens)
        smaller = micro_batches(sequences, lengths, max_tokens)
        if len(smaller) > num_calls * W:
            break
        split = smaller
    batches = [MicroBatch(rows, is_repeat=False) for rows in split]
    num_missing = -len(batches) % W  # with these, W divides the number of batches
    batches += [MicroBatch(batches[0].rows, is_repeat=True)] * num_missing
    return batches[process_rank() :: W]


class LogprobModel(torch.nn.Module):
    """A model whose forward is compute_logprobs.

    FSDP gathers weights only around the forward of a sharded module, and compute_logprobs calls the
    decoder and the head apart. So both have to run inside one forward: this one.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, rollout, temperature):
        return compute_logprobs(self.model, rollout, temperature)


def shard(policy, mesh):
    """Shard the weights of a LogprobModel: from here on each process of the mesh holds its share.

    FSDP gathers each layer on its own, and all other weights together.
    """
    decoder = policy.model.get_decoder()
    module_lists = [x for x in decoder.modules() if isinstance(x, torch.nn.ModuleList)]
    layers = module_lists[0]  # the outermost ModuleList of a decoder is its list of layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)  # what is left: embedding, last norm and head


@torch.no_grad()
def refresh_sampler(sampler, model):
    """Copy the weights of the sharded model into the sampler. A bf16 sampler rounds them.

    All processes have to call it. The weights are gathered one at a time, to save memory.
    """
    # A tied head shares the embedding's weight in the model, but is a copy in a bf16 sampler. So
    # both names are needed: remove_duplicate=False.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sampler.get_parameter(name).copy_(parameter.full_tensor())


def inference_copy(model):
    """A copy of the model that is not trained. On a GPU it's in bf16, except for its head.

    Sampling mostly reads weights, keys and values, so half the bytes is nearly half the time.
    """
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if model.device.type == "cuda":
        # Buffers are left alone: the rotary frequencies stay in float32.
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        # The head may share its weight with the embedding, so it's replaced by a float32 copy. The
        # hook converts its input.
        head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        copied.set_output_embeddings(head)
    return copied


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


def sample_responses(args, model, tokenizer, examples, num_samples, temperature, eos_ids):
    """Sample num_samples responses to each of B examples: a Rollout of N sequences."""
    ids = [torch.tensor(example["prompt_ids"], device=model.device) for example in examples]
    # Padding is -1 at first, because a prompt may contain any id that the tokenizer has.
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    prompt_mask = ids >= 0  # (B, P) bool
    prompt_ids = ids.clamp(min=0)  # (B, P)

    # Take as many prompts at a time as fit into --sampling-tokens when every response has its
    # maximum length. tensor_split makes the parts as equal as possible.
    tokens_per_prompt = num_samples * (prompt_ids.shape[1] + args.max_new_tokens)
    at_a_time = max(1, args.sampling_tokens // tokens_per_prompt)
    # Each process samples for its own share of the prompts.
    own_ids = prompt_ids.tensor_split(num_processes())[process_rank()]  # (own prompts, P)
    own_mask = prompt_mask.tensor_split(num_processes())[process_rank()]  # (own prompts, P) bool
    num_parts = max(1, math.ceil(len(own_ids) / at_a_time))
    parts = []
    for part_ids, part_mask in zip(
        own_ids.tensor_split(num_parts), own_mask.tensor_split(num_parts), strict=True
    ):
        parts.append(generate(args, model, part_ids, part_mask, num_samples, temperature, eos_ids))
    response_ids, response_mask, logprobs = [torch.cat(x) for x in zip(*parts, strict=True)]
    response_ids = gather_rows(response_ids)  # (N, R)
    response_mask = gather_rows(response_mask)  # (N, R) bool
    logprobs = gather_rows(logprobs)  # (N, R)

    is_text = response_mask & ~torch.isin(response_ids, eos_ids)  # (N, R): not the EOS token
    text_ids = [row[keep] for row, keep in zip(response_ids.cpu(), is_text.cpu(), strict=True)]
    return Rollout(
        prompt_ids=prompt_ids.repeat_interleave(num_samples, 0),
        prompt_mask=prompt_mask.repeat_interleave(num_samples, 0),
        response_ids=response_ids,
        response_mask=response_mask,
        sampled_logprobs=logprobs,
        completions=tokenizer.batch_decode(text_ids),
    )


def gather_objects(value):
    """A list of the values of all processes, by rank. All processes have to call it."""
    values = [None] * num_processes()
    dist.all_gather_object(values, value)
    return values


def ask_rank_0(reward, examples, completions):
    """apply_reward, called by rank 0 for all processes.

    A judge may cost money, or may not say the same twice.
    """
    values = [None] * len(completions)
    if dist.get_rank() == 0:
        values = apply_reward(reward, examples, completions)
    dist.broadcast_object_list(values, src=0)  # fills the lists of the others
    return values


def gather_rows(tensor):
    """The tensors of all processes, by rank, concatenated along dim 0. Lengths may differ."""
    parts = gather_objects(tensor.cpu())
    return torch.cat(parts).to(tensor.device)


def sum_over_processes(numbers):
    """A dict of numbers, each added up over all processes. A process may lack some of the names."""
    totals = defaultdict(float)
    for part in gather_objects({name: float(x) for name, x in numbers.items()}):
        for name, x in part.items():
            totals[name] += x
    return totals


def evaluate(args, model, tokenizer, examples, eos_ids):
    """Metrics of greedy responses to held-out examples: the mean of each reward and of ACCURACY.

    accuracy_reward reads the number in the answer tags, accuracy_lenient the last number anywhere.
    format is the share of responses with all four tags in order, eos_frac the share that ended.
    """
    rollout = sample_responses(
        args, model, tokenizer, examples, num_samples=1, temperature=0.0, eos_ids=eos_ids
    )

    def mean_of(function):
        return sum(ask_rank_0(function, examples, rollout.completions)) / len(examples)

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
    "temperature": (1e-12, 2**32),
    "sampling_tokens": (1, 2**32),
    "num_steps": (1, 2**32),
    "learning_rate": (1e-12, 2**32),
    "warmup_updates": (0, 2**32),
    "num_iterations": (1, 2**32),
    "num_minibatches": (1, 2**32),
    "micro_batch_tokens": (1, 2**32),
    "max_grad_norm": (1e-12, 2**32),
    "clip_eps": (1e-12, 1),
    "beta": (0, 2**32),
}


def process_rank():
    """The number of this process, from 0 to W - 1."""
    return int(os.environ.get("RANK", 0))  # torchrun sets it


def num_processes():
    """W. Without torchrun there is one process."""
    return int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it


def fail(message):
    """End with one line, status 2 and no traceback."""
    if process_rank() > 0:
        # Often all processes meet the same error. Rank 0 prints it and ends, and torchrun ends the
        # others with SIGTERM while they sleep here. So the line is usually printed once. A process
        # that is still alive after 5 s prints it, too: rank 0 may not have this error.
        # Without the next line, the handler of catch_signals would only note the SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
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
    # mmap: the processes of a machine share the memory of the checkpoint.
    with exit_on_error(f"--resume {run_dir}: give a folder of a run of {SCRIPT.name}"):
        saved = torch.load(
            run_dir / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True
        )
    script = saved.get("script")
    if script != SCRIPT.name:
        fail(f"--resume {run_dir}: give a folder of a run of {SCRIPT.name}, not {script}")
    with exit_on_error(f"--resume {run_dir}: a run of another version of {SCRIPT.name}", TypeError):
        return Args(**saved["args"]), run_dir, saved


def choose_batch_sizes(args, device):
    """args with numbers for --sampling-tokens and --micro-batch-tokens, which depend on the GPU.

    A resumed run keeps its numbers, also on another GPU.
    """
    args = replace(args)  # a copy
    is_large = False
    if device.type == "cuda":
        is_large = torch.cuda.get_device_properties(device).total_memory > 60e9  # bytes
    if args.sampling_tokens is None:
        args.sampling_tokens = 131072 if is_large else 49152
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


def check_shares(args, test_data):
    """End the run if the processes can't have equal shares, or one has no held-out problem."""
    W = num_processes()
    if args.num_prompts % W > 0:
        fail(f"--num-prompts {args.num_prompts}: must be divisible by the number of processes, {W}")
    if len(test_data) < W:
        fail(
            f"--eval-size {args.eval_size}: {len(test_data)} held-out problems, fewer than the {W} "
            "processes"
        )


def hide_errors_of_peers():
    """Show no traceback where a process fails only because another one has ended.

    The traceback of the one that failed first has the reason, and would be lost among the others.
    """
    show = sys.excepthook

    def show_own_error(kind, error, traceback):
        # gloo raises a RuntimeError: connection closed (or reset) by peer. An OSError with these
        # words comes from a reward's own network, and is shown.
        if not (isinstance(error, RuntimeError) and "by peer" in str(error)):
            show(kind, error, traceback)

    sys.excepthook = show_own_error


def connect(args):
    """Connect the processes, and return their mesh, with which FSDP shards.

    Making the mesh also chooses this process's GPU, so it has to be done before anything is on one.
    """
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    if on_gpu and num_local > torch.cuda.device_count():
        fail(
            f"--nproc-per-node {num_local}: this machine has {torch.cuda.device_count()} GPUs; "
            "start one process for each, or add --device cpu"
        )
    backend = "gloo"
    if on_gpu and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"  # Python objects still go over gloo
    timeout = timedelta(hours=2)  # the others wait while rank 0 saves or asks a judge
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # without torchrun
        store = dist.HashStore()
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    return dist.init_device_mesh("cuda" if on_gpu else "cpu", (num_processes(),))


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
    if device == "mps":
        print("warning: --device mps is untested; it computes in float32")
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
    """End the run if generate or compute_logprobs can't work with this kind of model.

    generate needs a model that keeps its keys and values in a static cache, and takes a 4D bias.
    compute_logprobs applies the output head itself, so the logits must not be capped or scaled.
    """
    positions = torch.arange(5, device=model.device)[None]  # (1, 5)
    ids = positions  # any ids will do
    cache = Cache(layer_class_to_replicate=lambda: StaticLayer(max_cache_len=5))
    options = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    bias = torch.zeros(1, 1, 1, 6, dtype=model.dtype, device=model.device)
    with exit_on_error(not_supported):
        logits = model(ids).logits  # (1, 5, V)
        hidden = model.base_model(ids)["last_hidden_state"]  # (1, 5, D)
        head_logits = model.get_output_embeddings()(hidden)  # (1, 5, V)
        # As in generate: prefill, make room for one column, decode.
        model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, **options)
        if not cache.layers:
            raise ValueError("it keeps no keys and values")
        for layer in cache.layers:
            layer.keys = F.pad(layer.keys, (0, 0, 0, 1))  # (1, heads, 6, size)
            layer.values = F.pad(layer.values, (0, 0, 0, 1))
        model(ids[:, :1], attention_mask=bias, position_ids=positions[:, :1] + 5, **options)
    if not torch.equal(logits, head_logits):
        fields = {name: x for name, x in vars(model.config).items() if "logit" in name}
        fail(f"{not_supported}: its logits are capped or scaled, {fields}")


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
    this script has changed. Rank 0 does all of this; the other processes get files that write to
    nowhere.
    """
    if process_rank() > 0:
        return [open(os.devnull, "w"), open(os.devnull, "w")]
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
    print(
        f"settings by device: sampling_tokens {args.sampling_tokens}, micro_batch_tokens "
        f"{args.micro_batch_tokens}"
    )
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
        # To stdout, which goes to os.devnull in the other processes: the line is printed once.
        print("\nstopping after this step, with a checkpoint; press Ctrl-C again to stop now")

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
    if args.track and process_rank() == 0:
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
    """End the run if the log-probabilities of sampler and trainer differ by too much.

    gap is their mean difference over the first rollout. The weights are the same up to rounding, so
    a large gap means that this kind of model is computed wrongly.
    """
    tolerance = 0.1 if model.device.type == "cuda" else 1e-3  # bf16 rounds more
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


def save_model(model, weights, tokenizer, folder):
    """Write a folder that from_pretrained reads, with these whole weights."""
    with exit_on_error(folder):
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def save_checkpoint(args, run_dir, trained, state, metrics, data_checksum):
    """Write a temporary file and rename it, so that checkpoint.pt is always complete.

    All processes have to call it: they send their shards to rank 0, which writes.
    """
    model_state, optimizer_state = sharded_state.get_state_dict(
        trained["model"], trained["optimizer"], options=WHOLE
    )
    if process_rank() > 0:
        return
    content = {
        "script": SCRIPT.name,
        "args": vars(args),
        "data_checksum": data_checksum,
        "state": state,
        "metrics": metrics,
        "log_sizes": {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")},
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": trained["scheduler"].state_dict(),
    }
    path = run_dir / "checkpoint.tmp"
    with exit_on_error(path), open(path, "wb") as file:
        torch.save(content, file)
        os.fsync(file)  # torch.save has flushed the file
        os.replace(path, run_dir / "checkpoint.pt")


if __name__ == "__main__":
    sys.stdout, sys.stderr = PipeSafeStream(sys.stdout), PipeSafeStream(sys.stderr)
    out_of_memory = (
        "out of memory; lower --micro-batch-tokens or --sampling-tokens, or use grpo_lora.py"
    )
    with exit_on_error(out_of_memory, torch.OutOfMemoryError):
        main(tyro.cli(Args, description=__doc__.split("\n\n")[0]))
