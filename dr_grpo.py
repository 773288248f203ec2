"""Dr. GRPO: GRPO Done Right, in one file. Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783v1.

For every prompt q the old policy samples G responses o_1 .. o_G, and each is scored with a reward r_i. Maximized is

    J(theta) = E[ 1/G sum_i 1/L sum_t min(rho_it A_i, clip(rho_it, 1-eps, 1+eps) A_i) ]             (Section 3.2)
    rho_it   = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)        pi_old sampled
    A_i      = r_i - mean(r_1 .. r_G)                                     the same for every token t

with a constant L. The equation tags in the code are those of DeepSeekMath (arXiv:2402.03300v3), as in grpo.py.

Parent: grpo.py. Differences: (1) the advantage is not divided by the group's std, which would give more weight to
problems that are too easy or too hard; (2) the sum over a sequence's tokens is divided by the constant L =
--max-new-tokens and not by its length |o_i|, which would punish a wrong response less the longer it is. With the first
goes beta = 0 by default, as in the paper: a verifiable reward does not call for a KL term.

Departures from the paper: none; it leaves the constant L free, and its listing divides by the maximal length, as here.
Without 1/std and with 1/L the gradient is smaller than GRPO's by a factor of about |o|/L times the std; Adam divides by
the gradient's scale, so the learning rate is the same as in grpo.py.

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i belongs to prompt i//G),
P prompt tokens, R response tokens, V vocabulary; n <= N sequences in a micro-batch, T response tokens in it.

    python dr_grpo.py                                            trains assets/adder on assets/addition, on a CPU
    python dr_grpo.py --model SmolLM2-1.7B --num-generations 8   trains on GSM8K, on one GPU
"""

import copy
import json
import logging
import os
import resource
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import datasets
import torch
import torch.nn.functional as F
import transformers
import tyro
import wandb
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.cache_utils import Cache, StaticLayer

from utils.masking import masked_sum
from utils.rewards import accuracy_reward, format_reward, gold_number, lenient_accuracy_reward

ASSETS = Path(__file__).resolve().parent / "assets"
REWARDS = [accuracy_reward, format_reward]  # their sum is the reward; each needs a name of its own
SEGMENT = {"cpu": 32, "cuda": 128}  # decode steps between two allocations of memory for keys and values
SYSTEM_PROMPT = """Solve the problem step by step. Write your reasoning between <think> and </think>, and then the \
final number alone between <answer> and </answer>. For example:
A box holds 4 rows of 6 eggs, and 5 eggs are broken. How many eggs are whole?
<think>The box holds 4 * 6 = 24 eggs. 24 - 5 = 19 of them are whole.</think>
<answer>19</answer>"""
# What a field of Args that is left at None becomes: (for any model, for the bundled one).
RECIPES = dict(dataset=("openai/gsm8k:main", str(ASSETS / "addition")), system_prompt=(SYSTEM_PROMPT, ""))
RECIPES |= dict(max_prompt_tokens=(512, 64), max_new_tokens=(300, 32), temperature=(0.9, 1.0), eval_every=(50, 20))
RECIPES |= dict(learning_rate=(1e-5, 1e-4), warmup_updates=(10, 0), gradient_checkpointing=(True, False))
RECIPES |= dict(num_steps=(200, 60), beta=(0.0, 0.0))


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
    """folder of a stopped run to go on with, from the same working directory; its arguments are used, and no others"""
    eval_every: int | None = None
    """evaluate every so many steps, besides before and after the training; 0: never between; None: by model"""
    save_every: int = 50
    """write a checkpoint every so many steps, besides after the first and the last; 0: never between"""
    track: bool = False
    """send the metrics to Weights & Biases as well, to the project in the variable WANDB_PROJECT"""
    # ---- model and data
    model: str = str(ASSETS / "adder")
    """folder or hub id of a causal language model; a name without "/" that is no folder is one of HuggingFaceTB"""
    dataset: str | None = None
    """.jsonl / .json / .csv / .parquet file, folder with train and test file, hub id or id:config; None: by model"""
    eval_dataset: str | None = None
    """held-out problems; None: the test split of a folder or hub data set, or else the last tenth of the file"""
    eval_size: int = 500
    """evaluate on so many of the held-out problems, the first ones"""
    question_column: str = "question"
    """column of the data set that holds the question"""
    answer_column: str = "answer"
    """column of the data set that holds the gold answer; if it has a "####", what follows the last one"""
    system_prompt: str | None = None
    """instructions before each question; None: by model, to think and to answer in tags"""
    max_prompt_tokens: int | None = None
    """longer prompts (P) are skipped, counted and reported; None: by model"""
    # ---- sampling
    num_prompts: int = 16
    """prompts per step (B)"""
    num_generations: int = 8
    """samples per prompt (G)"""
    max_new_tokens: int | None = None
    """a response is cut after so many tokens (R); None: by model"""
    temperature: float | None = None
    """divides the logits, in sampling and in every log-probability alike; None: by model"""
    sampling_tokens: int = 49152
    """tokens sampled at a time, prompts and padding included: memory for keys and values against speed"""
    cuda_graph: bool = True
    """on a GPU, replay the decode step from a CUDA graph"""
    # ---- optimization
    num_steps: int | None = None
    """steps in the whole run, each a rollout and its updates; None: by model"""
    learning_rate: float | None = None
    """peak learning rate of AdamW (betas 0.9 and 0.999, no weight decay); None: by model"""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """how the learning rate falls to 0 after the warm-up, or that it stays (schedules of transformers)"""
    warmup_updates: int | None = None
    """updates in which the learning rate rises linearly to its peak, from 0 in the first; None: by model"""
    num_iterations: int = 1
    """passes over each rollout (mu in DeepSeekMath's Algorithm 1)"""
    num_minibatches: int = 1
    """updates per pass: the rollout is shuffled and split into so many minibatches"""
    micro_batch_tokens: int = 2048
    """tokens, padding included, in one forward and backward pass: memory against speed, never the gradient"""
    gradient_checkpointing: bool | None = None
    """recompute activations in the backward pass: less memory, a third more time; None: by model"""
    max_grad_norm: float = 1.0
    """the norm of the gradient is clipped to this"""
    # ---- algorithm
    clip_eps: float = 0.2
    """the ratio is clipped to 1 - eps .. 1 + eps (eps in Eq. 3)"""
    beta: float | None = None
    """weight of the KL to the reference in the loss (beta in Eq. 3); 0: no reference is kept; None: by model"""


# ==== algorithm ====
def compute_advantages(args: Args, rewards: torch.Tensor) -> torch.Tensor:
    """Group-relative advantages, not divided by the std: rewards (B, G) -> (B, G). Dr. GRPO, Section 3.2."""
    assert rewards.ndim == 2 and rewards.shape[1] >= 2, rewards.shape
    rewards = rewards - rewards[:, :1]  # changes the rounding alone: equal rewards then give exactly 0
    return rewards - rewards.mean(1, keepdim=True)


def policy_loss(args, logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs, num_tokens):
    """The Dr. GRPO loss, -J, of n sequences of a minibatch; over its micro-batches it adds up to the minibatch's.

    logprobs, old_logprobs (n, R); ref_logprobs (n, R), or None without a KL term; advantages (n, R) or (n, 1); mask
    (n, R) bool; num_seqs, num_tokens: sequences and tokens of the WHOLE minibatch. Returns the scalar loss and stats:
    sums over the tokens of the n sequences, without gradient.
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape and advantages.shape in (mask.shape, (len(mask), 1))
    # Masked slots are zeroed before exp: garbage in them could otherwise reach the gradient as 0 * inf.
    logratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)  # (n, R)
    ratio = logratio.exp()  # (n, R)
    # J takes the smaller of the two surrogates for either sign of A, the loss the larger of their negatives.
    clipped_ratio = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps)  # (n, R)
    token_loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)  # (n, R), Eq. 3
    if ref_logprobs is not None:
        ref_logratio = (ref_logprobs - logprobs).masked_fill(~mask, 0.0)  # (n, R)
        kl = ref_logratio.exp() - ref_logratio - 1  # (n, R), Eq. 4
        token_loss = token_loss + args.beta * kl
    loss = masked_sum(token_loss, mask, axis=1, constant_normalizer=args.max_new_tokens).sum() / num_seqs

    stats = {"tokens": mask.sum()}
    with torch.no_grad():
        stats["clip_frac_low"] = masked_sum((ratio < 1 - args.clip_eps).float(), mask)
        stats["clip_frac_high"] = masked_sum((ratio > 1 + args.clip_eps).float(), mask)
        stats["clip_frac"] = stats["clip_frac_low"] + stats["clip_frac_high"]
        stats["approx_kl"] = masked_sum(0.5 * logratio**2, mask)
        stats["ratio_mean"] = masked_sum(ratio, mask)
        stats["entropy"] = masked_sum(-logprobs, mask)
        if ref_logprobs is not None:
            stats["kl"] = masked_sum(kl, mask)
    return loss, stats


# ==== training ====
def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    logging.disable(logging.ERROR)  # what the libraries cannot do they say in their exceptions
    datasets.disable_progress_bars(), transformers.logging.disable_progress_bar()
    script, saved = Path(__file__), None
    if args.resume is not None:
        if args != Args(resume=args.resume):
            fail(f"--resume {args.resume}: goes on with the arguments of that run; leave out all others")
        run_dir, path = Path(args.resume).resolve(), Path(args.resume, "checkpoint.pt")
        saved = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {"script": "no script"}
        if saved["script"] != script.name:
            fail(f"--resume {run_dir}: has a checkpoint of {saved['script']}; give a folder of a run of {script.name}")
        args = Args(**saved["args"])
    else:
        bundled = Path(args.model).resolve() == Path(Args.model)
        args = replace(args, **{name: values[bundled] for name, values in RECIPES.items() if vars(args)[name] is None})
        if "/" not in args.model and not Path(args.model).exists():
            args.model = f"HuggingFaceTB/{args.model}"
        run_name = f"{script.stem}__{Path(args.model).name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = Path(args.runs_dir, args.run_name or run_name)
    lowest = dict(seed=0, eval_every=0, save_every=0, warmup_updates=0, num_generations=2, beta=0)
    for name, value in vars(args).items():
        low, high = lowest.get(name, 1 if type(value) is int else 1e-12), 1 if name == "clip_eps" else 2**32
        if type(value) in (int, float) and not low <= value <= high:  # nor is NaN
            fail(f"--{name.replace('_', '-')} {value}: must be from {low} to {high}")
    N, num_updates = args.num_prompts * args.num_generations, args.num_iterations * args.num_minibatches
    if N % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches}: must divide --num-prompts x --num-generations, which is {N}")

    try:
        config, tokenizer = AutoConfig.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        fail(f"--model {args.model}: {str(error).strip().splitlines()[0]}")
    noise = [name for name, x in vars(config).items() if isinstance(x, float) and ("drop" in name or "jitter" in name)]
    config.update(dict.fromkeys(noise, 0.0))  # no dropout in RL: with it even the first ratio is not 1
    limits = ("max_position_embeddings", "sliding_window")
    context = min(getattr(config.get_text_config(), name, None) or 10**9 for name in limits)
    if args.max_prompt_tokens + args.max_new_tokens > context:
        both = f"--max-prompt-tokens {args.max_prompt_tokens} + --max-new-tokens {args.max_new_tokens}"
        fail(f"{both}: more than the {context} tokens of the model's context or attention window; lower one of them")
    train_data, test_data = load_data(args, tokenizer, "train"), load_data(args, tokenizer, "test")
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    # float32 weights: at these learning rates a bf16 weight would not move. A GPU computes in bf16 autocast.
    options = dict(config=config, dtype=torch.float32, output_loading_info=True)
    model, info = AutoModelForCausalLM.from_pretrained(args.model, **options)
    if info["missing_keys"]:
        fail(f"--model {args.model}: its files hold no weights for {', '.join(sorted(info['missing_keys']))}")
    model.to(device)
    eos_ids = model.generation_config.eos_token_id
    eos_ids = sorted({tokenizer.eos_token_id, *(eos_ids if isinstance(eos_ids, list) else [eos_ids])} - {None})
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    ref_model = inference_copy(model) if args.beta > 0 else None  # the policy's start, also in a resumed run
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    scheduler = get_scheduler(args.lr_schedule, optimizer, args.warmup_updates, args.num_steps * num_updates)

    metrics, parts = dict(step=0, episodes=0, tokens=0), dict(model=model, optimizer=optimizer, scheduler=scheduler)
    if saved:
        metrics = saved["metrics"]
        for name, part in parts.items():
            part.load_state_dict(saved.pop(name))
        for name, size in saved["log_sizes"].items():  # what was logged after the checkpoint will be logged again
            os.truncate(run_dir / name, size)
    else:
        run_dir.mkdir(parents=True)
        (run_dir / script.name).write_text(script.read_text())
        versions = {package.__name__: package.__version__ for package in (torch, transformers, datasets, tyro, wandb)}
        (run_dir / "args.json").write_text(json.dumps(vars(args) | {"versions": versions}, indent=2) + "\n")
    logs = [open(run_dir / name, "a", buffering=1, encoding="utf-8") for name in ("metrics.jsonl", "samples.jsonl")]
    tracking = dict(id=run_dir.name, resume="allow", dir=run_dir, config=vars(args)) if args.track else {}
    try:
        wandb.init(mode=None if args.track else "disabled", settings=wandb.Settings(init_timeout=20), **tracking)
    except wandb.Error:  # no network, or no key
        wandb.teardown(), wandb.init(mode="offline", **tracking)
    if device.type == "cuda":  # cuDNN's attention plans anew for every shape, and its masked gradients can be NaN
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high")  # TF32, for the heads, whose weights are float32
    sampler = inference_copy(model) if device.type == "cuda" else model
    signals = []

    def on_signal(number, frame):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)
        print("\nstopping after this step, with a checkpoint; once more stops at once", file=sys.stderr)

    signal.signal(signal.SIGINT, on_signal), signal.signal(signal.SIGTERM, on_signal)
    print(f"{script.name} on {device}: {args.model}, {model.num_parameters() / 1e6:.2f} M parameters; run: {run_dir}")
    print("by model: " + ", ".join(f"{name} {getattr(args, name)}" for name in RECIPES if name != "system_prompt"))
    print("note: with one update per rollout the ratio is 1, clip_frac 0, and the loss says little; watch the reward")
    print(f"first prompt: {train_data[0]['prompt']!r}, answer {train_data[0]['answer']!r}")
    if not saved:
        metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
        print(json.dumps(metrics), file=logs[0])
        wandb.log(metrics, step=0)
        print(f"before: accuracy {metrics['eval/accuracy']:.3f} on {len(test_data)} held-out problems, greedy")

    torch.manual_seed(args.seed)
    epochs = 1 + args.num_steps * args.num_prompts // len(train_data)
    order = torch.cat([torch.randperm(len(train_data)) for _ in range(epochs)]).tolist()  # of the training examples
    skipped_in_a_row, done = 0, metrics["step"]
    progress = tqdm(range(done + 1, args.num_steps + 1), initial=done, total=args.num_steps, disable=None)
    for step in progress:
        # 1. rollout
        start_time = time.perf_counter()
        torch.manual_seed(1_000_003 * args.seed + step)  # a resumed run needs no state of the generators
        batch = [train_data[i] for i in order[(step - 1) * args.num_prompts : step * args.num_prompts]]
        sampled = respond(args, sampler, tokenizer, batch, args.num_generations, args.temperature, eos_ids)
        rollout, sampled_logprobs, completions = sampled  # (N, P), (N, P), (N, R), (N, R); (N, R); N
        response_mask, sampled_tokens = rollout[3], int(rollout[3].sum())  # (N, R)
        lengths = (rollout[1].sum(1) + response_mask.sum(1)).tolist()  # N of them, prompt included
        ended = (torch.isin(rollout[2], torch.tensor(eos_ids, device=device)) & response_mask).any(1)  # (N,)
        rollout_seconds = time.perf_counter() - start_time

        # The old policy's log-probabilities, by the trainer's own code. A single update takes those of its own forward
        # pass, so that the ratio is exactly 1; for several they are computed here, before the first, and then stay.
        old_logprobs, ref_logprobs = torch.zeros_like(sampled_logprobs), torch.zeros_like(sampled_logprobs)  # (N, R)
        model.train(args.gradient_checkpointing)  # transformers recomputes activations only in training mode
        with torch.no_grad():
            for i in micro_batches(torch.arange(N), lengths, args.micro_batch_tokens):
                if num_updates > 1:
                    old_logprobs[i] = compute_logprobs(model, *[x[i] for x in rollout], args.temperature)
                if ref_model is not None:
                    ref_logprobs[i] = compute_logprobs(ref_model, *[x[i] for x in rollout], args.temperature)

        # 2. reward and advantage
        answers = [example["answer"] for example in batch for _ in range(args.num_generations)]
        rewards_by_name = {f.__name__: torch.tensor(f(completions, answers), device=device) for f in REWARDS}  # (N,)
        rewards = sum(rewards_by_name.values()).float().view(-1, args.num_generations)  # (B, G) float32
        advantages = compute_advantages(args, rewards).view(-1, 1)  # (N, 1)

        # 3. update
        totals = Counter()  # sums over all minibatches of the step
        shuffled = [torch.randperm(N) for _ in range(args.num_iterations)]
        for minibatch in [part for whole in shuffled for part in whole.chunk(args.num_minibatches)]:
            lr, num_tokens = scheduler.get_last_lr()[0], response_mask[minibatch].sum()
            for i in micro_batches(minibatch, lengths, args.micro_batch_tokens):
                logprobs = compute_logprobs(model, *[x[i] for x in rollout], args.temperature)  # (n, R)
                if num_updates == 1:
                    old_logprobs[i] = logprobs.detach()
                ref = None if ref_model is None else ref_logprobs[i]  # (n, R)
                fixed = (old_logprobs[i], ref, advantages[i], response_mask[i], len(minibatch), num_tokens)
                loss, stats = policy_loss(args, logprobs, *fixed)
                loss.backward()
                totals.update({"loss": loss.detach(), **stats})  # adds
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            skipped_in_a_row = 0 if torch.isfinite(grad_norm) else skipped_in_a_row + 1
            if skipped_in_a_row == 0:
                optimizer.step()
            elif skipped_in_a_row == 3:
                fail(f"--learning-rate {args.learning_rate}: three gradients in a row were not finite; lower it")
            totals.update({"grad_norm": grad_norm, "skipped": skipped_in_a_row > 0})
            scheduler.step()
            optimizer.zero_grad()
        sampler.load_state_dict(model.state_dict())  # in place; on a GPU rounded to bf16, on a CPU these are the same
        totals = {name: float(value) for name, value in totals.items()}  # waits for the device
        update_seconds = time.perf_counter() - start_time - rollout_seconds

        # 4. log
        gap = (old_logprobs - sampled_logprobs).abs()[response_mask]  # (tokens,)
        means = {"reward_mean": rewards, "accuracy": torch.tensor(accuracy_reward(completions, answers))}
        means |= {"response_len": rollout[3].sum(1), "eos_frac": ended, "logprob_gap": gap, **rewards_by_name}
        means |= {"zero_std_frac": (rewards == rewards[:, :1]).all(1)}
        metrics = {"step": step, "episodes": metrics["episodes"] + N, "tokens": metrics["tokens"] + sampled_tokens}
        metrics |= {f"rollout/{name}": values.float().mean().item() for name, values in means.items()}
        metrics |= {"rollout/reward_std": rewards.std().item(), "rollout/logprob_gap_max": gap.max().item()}
        metrics |= {f"policy/{name}": totals[name] / totals["tokens"] for name in stats if name not in ("tokens", "kl")}
        metrics |= {"kl/ref": totals["kl"] / totals["tokens"]} if ref_model is not None else {}
        metrics |= {"policy/loss": totals["loss"] / num_updates, "optim/grad_norm": totals["grad_norm"] / num_updates}
        metrics |= {"optim/lr": lr, "optim/skipped": totals["skipped"], "time/update_s": update_seconds}
        metrics |= {"time/rollout_s": rollout_seconds, "time/tokens_per_s": sampled_tokens / rollout_seconds}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        metrics["time/peak_mem_gb"] = (torch.cuda.max_memory_allocated() if device.type == "cuda" else memory) / 1e9
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
        wandb.log(metrics, step=step)
        print(json.dumps({k: v if abs(v) < float("inf") else None for k, v in metrics.items()}), file=logs[0])
        for k, example in enumerate(batch):
            group = slice(k * args.num_generations, (k + 1) * args.num_generations)
            record = {"step": step, "prompt": example["prompt"], "answer": example["answer"]}
            record |= {"completions": completions[group], "rewards": rewards[k].tolist()}
            print(json.dumps(record | {"advantages": advantages[group, 0].tolist()}), file=logs[1])
        shown = ("rollout/reward_mean", "rollout/accuracy", "rollout/response_len", "kl/ref", "eval/accuracy")
        progress.set_postfix({key: metrics[key] for key in shown if key in metrics}, refresh=False)
        if step == 1 or step % max(1, args.num_steps // 10) == 0:
            progress.write(f"step {step}: {progress.postfix}")
            progress.write(f"    {batch[0]['prompt']!r} -> {completions[0]!r}, reward {rewards[0, 0]:.2f}")
            if metrics["rollout/eos_frac"] < 0.5 or metrics["rollout/zero_std_frac"] > 0.9:
                progress.write("    warning: eos_frac < 0.5 (cut responses) or zero_std_frac > 0.9 (equal groups)")
        if step == 1 and not metrics["rollout/logprob_gap"] < (0.1 if device.type == "cuda" else 1e-3):
            fail(f"--model {args.model}: not supported, sampling and training differ by {gap.mean():.2g} nats a token")

        # 5. save: to another name, forced to the disk, renamed: at any moment there is one whole checkpoint, old or new
        if signals or step in (1, args.num_steps) or (args.save_every and step % args.save_every == 0):
            state = {"script": script.name, "args": vars(args), "metrics": metrics}
            state |= {name: part.state_dict() for name, part in parts.items()}
            state["log_sizes"] = {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")}
            with open(run_dir / "checkpoint.tmp", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")
            if signals and step < args.num_steps:
                print(f"stopped after step {step}; go on: python '{script}' --resume '{run_dir}'", file=sys.stderr)
                raise SystemExit(128 + signals[0])

    model.save_pretrained(run_dir / "model")
    tokenizer.save_pretrained(run_dir / "model")
    wandb.finish()
    print(f"after: accuracy {metrics['eval/accuracy']:.3f}; model, metrics and samples are in {run_dir}")
    return metrics


# ==== sampling and log-probabilities ====
# How it is done fast: key-value memory, CUDA graphs, padding. A first reading may stop here.
@torch.no_grad()
def generate(args: Args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids):
    """Sample num_samples responses for each left-padded prompt (B, P), all in one batch of N = B * num_samples rows.

    Returns response_ids (N, R), response_mask (N, R) bool and the logprobs (N, R) float32 of the tokens drawn. The
    distribution is the model's whole softmax at this temperature: no top-k, no top-p, no repetition penalty.
    """
    model.eval()
    device, P, N = prompt_ids.device, prompt_ids.shape[1], len(prompt_ids) * num_samples
    eos = torch.tensor(eos_ids, device=device)
    response_ids = torch.full((N, args.max_new_tokens), eos_ids[0], device=device)  # (N, R)
    response_logprobs = torch.zeros(N, args.max_new_tokens, device=device)  # (N, R) float32
    # Prefill: the keys and values of a prompt are computed once, and repeated for its samples below, at t = 0.
    cache = Cache(layer_class_to_replicate=lambda: StaticLayer(max_cache_len=P))
    inputs = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    position = (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (B, P): padding on the left is not counted
    logits = model(prompt_ids, attention_mask=prompt_mask.long(), position_ids=position, **inputs).logits  # (B, 1, V)
    logits = logits.repeat_interleave(num_samples, 0)  # (N, 1, V)
    position = prompt_mask.sum(1).repeat_interleave(num_samples)  # (N,)
    column = cache.layers[0].cumulative_length.view(1)  # the next one to write; the cache itself counts it up
    # Added to the attention scores, 0 or as good as minus infinity: every attention implementation understands this.
    blocked = torch.finfo(model.dtype).min
    bias = torch.zeros_like(prompt_mask, dtype=model.dtype).masked_fill(~prompt_mask, blocked)[:, None, None]

    def decode():
        # All state changes in place, at addresses that stay, so that a CUDA graph can replay this.
        bias.index_fill_(3, column, 0.0)
        logits.copy_(model(token[:, None], attention_mask=bias, position_ids=position[:, None], **inputs).logits)
        position.add_(1)

    sequence = torch.arange(N, device=device)  # which of the N sequences each row of the batch is
    token, finished, graph = torch.zeros_like(sequence), torch.zeros_like(sequence, dtype=torch.bool), None
    for t in range(args.max_new_tokens):
        if graph is not None:
            graph.replay()
        elif t > 0:
            decode()
            if args.cuda_graph and device.type == "cuda":  # that step was the warm-up; recording one computes nothing
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    decode()
        logprobs = (logits[:, 0].float() / (temperature or 1.0)).log_softmax(1)  # (rows, V) float32
        # Gumbel-max: the argmax of logprobs + Gumbel noise is a draw, with no cumulative sum and no host sync.
        noise = -torch.rand_like(logprobs).log_().neg_().log_() if temperature > 0 else 0.0  # greedy at 0
        token.copy_((logprobs + noise).argmax(1))  # (rows,)
        response_ids[sequence, t] = token
        response_logprobs[sequence, t] = logprobs.gather(1, token[:, None])[:, 0]
        finished |= torch.isin(token, eos)
        # To see which rows are finished the host waits for the device: a GPU is asked now and then.
        extra = min(SEGMENT[device.type], args.max_new_tokens - t) if t % SEGMENT[device.type] == 0 else 0  # columns
        if extra > 0 or device.type == "cpu" or t % 16 == 0:
            live = (~finished).nonzero().squeeze(1)
            if len(live) == 0:
                break
            if extra > 0 or len(live) <= len(finished) / 2:  # drop the finished rows, make room for the next segment
                rows = live // num_samples if t == 0 else live  # the prefill has one row for each prompt
                for layer in cache.layers:
                    layer.keys = F.pad(layer.keys[rows], (0, 0, 0, extra))  # (rows, heads, columns, width)
                    layer.values = F.pad(layer.values[rows], (0, 0, 0, extra))
                bias = F.pad(bias[rows], (0, extra), value=blocked)  # (rows, 1, 1, columns)
                token, position, logits = token[live], position[live], logits[live]
                sequence, finished, graph = sequence[live], finished[live], None
    # The EOS token counts, nothing after it does: a finished row goes on drawing tokens until it is dropped.
    is_eos = torch.isin(response_ids, eos).long()  # (N, R)
    response_mask = is_eos.cumsum(1) - is_eos == 0  # (N, R)
    return response_ids, response_mask, response_logprobs.masked_fill(~response_mask, 0.0)


def compute_logprobs(model, prompt_ids, prompt_mask, response_ids, response_mask, temperature):
    """Log-probabilities (n, R) float32 of the responses, 0 where masked, from ids and masks (n, P) and (n, R)."""
    # Right-padded to the longest, L: causal attention never looks there, so it needs no mask, and fast kernels apply.
    is_token = torch.cat([prompt_mask, response_mask], 1)  # (n, P + R)
    order = is_token.long().sort(dim=1, descending=True, stable=True).indices  # (n, P + R)
    input_ids = torch.cat([prompt_ids, response_ids], 1).gather(1, order)[:, : is_token.sum(1).max() - 1]  # (n, L - 1)
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)  # (n, L - 1)
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=input_ids.is_cuda, cache_enabled=False):
        trunk = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    # The head runs on response tokens alone: the token at column t is predicted by the hidden state one before it.
    row, column = response_mask.nonzero(as_tuple=True)  # (T,)
    hidden = trunk.last_hidden_state[row, prompt_mask.sum(1)[row] + column - 1]  # (T, D)
    head = model.get_output_embeddings()

    def chunk_logprobs(hidden, targets):
        logits = head(hidden.to(head.weight.dtype)).float().div_(temperature)  # (chunk, V) float32
        return -F.cross_entropy(logits, targets, reduction="none")

    # In chunks that are recomputed in the backward pass: of at most 16 M logits (64 MB), two or three copies at a time.
    chunk = max(1, 2**24 // head.weight.shape[0])
    chunks = zip(hidden.split(chunk), response_ids[row, column].split(chunk), strict=True)
    logprobs = [checkpoint(chunk_logprobs, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks]
    return torch.zeros(response_ids.shape, device=row.device).index_put((row, column), torch.cat(logprobs))  # (n, R)


def micro_batches(sequences: torch.Tensor, lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into micro-batches of at most max_tokens tokens with padding; sorted, so that little is padding."""
    batches = [[]]
    for i in sorted(sequences.tolist(), key=lambda i: (-lengths[i], i)):
        if batches[-1] and lengths[batches[-1][0]] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def inference_copy(model):
    """A copy that is not trained; on a GPU in bf16, half the bytes to read, but with a head in float32."""
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if model.device.type == "cuda":
        for parameter in copied.parameters():  # not the buffers, which hold the rotary frequencies
            parameter.data = parameter.data.to(torch.bfloat16)
        head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        copied.set_output_embeddings(head)
    return copied


def respond(args: Args, model, tokenizer, examples: list[dict], num_samples: int, temperature: float, eos_ids):
    """Sample responses to examples: rollout (prompt_ids, prompt_mask (N, P), response_ids, response_mask (N, R)),
    the logprobs (N, R) of the tokens drawn, and the N completions (text)."""
    ids = [torch.tensor(example["prompt_ids"], device=model.device) for example in examples]
    mask = [torch.ones_like(prompt, dtype=torch.bool) for prompt in ids]  # from lengths: any id may be in a prompt
    prompts = [pad_sequence(rows, batch_first=True, padding_side="left") for rows in (ids, mask)]  # (B, P) each
    # So many prompts at a time that the keys and values of their samples have room, even if none ends early.
    size = max(1, args.sampling_tokens // (num_samples * (prompts[0].shape[1] + args.max_new_tokens)))
    chunks = zip(*[tensor.split(size) for tensor in prompts], strict=True)
    parts = [generate(args, model, *chunk, num_samples, temperature, eos_ids) for chunk in chunks]
    ids, mask, logprobs = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]  # (N, R) each
    texts = tokenizer.batch_decode([x[m] for x, m in zip(ids.cpu(), mask.cpu(), strict=True)], skip_special_tokens=True)
    return [*[tensor.repeat_interleave(num_samples, 0) for tensor in prompts], ids, mask], logprobs, texts


def evaluate(args: Args, model, tokenizer, examples: list[dict], eos_ids: list[int]) -> dict:
    """Greedy accuracy on the held-out examples: strict (in the answer tags), lenient (last number), and the format."""
    rollout, _, completions = respond(args, model, tokenizer, examples, 1, 0.0, eos_ids)
    answers = [example["answer"] for example in examples]
    scores = {"accuracy": accuracy_reward(completions, answers), "response_len": rollout[3].sum(1).tolist()}
    scores["accuracy_lenient"] = lenient_accuracy_reward(completions, answers)
    scores["format"] = [score == 0.4 for score in format_reward(completions, answers)]  # all four tags, in order
    return {f"eval/{name}": sum(values) / len(examples) for name, values in scores.items()}


# ==== data ====
def load_data(args: Args, tokenizer, split: str) -> list[dict]:
    """Examples of the train or the test split: dicts of prompt (text), prompt_ids (list of ids) and answer (text)."""
    own = args.eval_dataset if split == "test" else None
    flag, source = ("--dataset", args.dataset) if own is None else ("--eval-dataset", own)
    columns = [args.question_column, args.answer_column]
    kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(source).suffix)
    try:
        if kind is None:  # a folder or a hub data set
            rows = datasets.load_dataset(*source.split(":"), split=split)
        else:  # the last tenth of a file is held out
            part = "train" if args.eval_dataset else {"train": "train[:90%]", "test": "train[90%:]"}[split]
            rows = datasets.load_dataset(kind, data_files=source, split=part)
        rows = list(rows.select_columns(columns))
    except Exception as error:  # the formats and the hub raise a dozen types
        reason = str(error.__cause__ or error).strip().split("\n")[0] or "it is empty"
        fail(f"{flag} {source} ({split}), --question-column {columns[0]}, --answer-column {columns[1]}: {reason}")
    examples = []
    for question, answer in [[str(row[c]) for c in columns] for row in rows if row[columns[0]] not in (None, "")]:
        prompt = f"{args.system_prompt}\n{question}\n" if args.system_prompt else question
        if tokenizer.chat_template:
            messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
            messages += [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # A chat template writes the BOS token itself: tokenizing with special tokens would double it.
        prompt_ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
        examples.append({"prompt": prompt, "prompt_ids": prompt_ids, "answer": answer})
    numbered = [example for example in examples if gold_number(example["answer"]) is not None]
    usable = [example for example in numbered if len(example["prompt_ids"]) <= args.max_prompt_tokens]
    found = f"{len(usable)} problems, {len(numbered) - len(usable)} too long for --max-prompt-tokens and "
    found += f"{len(rows) - len(numbered)} without a question or a number in {args.answer_column} skipped"
    if not usable:
        fail(f"{flag} {source}: the {split} data has {found}")
    print(f"{split} data: {found}")
    return usable if split == "train" else usable[: args.eval_size]


# ==== set-up ====
def fail(message: str) -> NoReturn:
    """End with one line, status 2 and no traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(tyro.cli(Args))
