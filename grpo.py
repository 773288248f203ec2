"""GRPO: Group Relative Policy Optimization, in one file. DeepSeekMath, Shao et al. 2024, arXiv:2402.03300v3.

For every prompt q the old policy samples G responses o_1 .. o_G, and each is scored with a reward r_i. Maximized is

    J(theta) = E[ 1/G sum_i 1/|o_i| sum_t ( min(rho_it A_it, clip(rho_it, 1-eps, 1+eps) A_it) - beta KL_it ) ]   (Eq. 3)
    rho_it   = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)        pi_old sampled; it is not the reference
    A_it     = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)                 the same for every token t   (Section 4.1.2)
    KL_it    = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1             at the sampled token         (Eq. 4)

The script minimizes -J: the loss is the policy term PLUS beta times the KL term.

Parent: rloo.py. Differences: (1) the advantage is divided by the group's std; (2) the ratio is clipped per token, so
that one rollout can serve several updates (--num-iterations, --num-minibatches); (3) tokens are averaged within each
sequence; (4) the KL to the reference is a term of the loss (k3) instead of a part of the reward (k1).

Departures from the paper: 1e-4 is added to the std, because a group with nearly equal rewards would otherwise get huge
advantages out of rounding; the reference stays the initial model (the paper's outer loop, Algorithm 1, renews it).

Shapes: B prompts per step, G samples per prompt, N = B*G sequences in group order (sequence i belongs to prompt i//G),
P prompt tokens, R response tokens, V vocabulary; n <= N sequences in a micro-batch, T response tokens in it.

    python grpo.py                                                trains assets/adder on assets/addition, on a CPU
    python grpo.py --model SmolLM2-1.7B --num-generations 8       trains on GSM8K, on one GPU

The first goes from 0.542 to 1.000, 1.000, 1.000 (greedy, 500 held-out additions, seeds 1, 2, 3) in 27 to 31 s on 2
CPU cores: benchmark/records/bundled.jsonl.

The GSM8K recipe follows a published run on one 40 GB GPU (accuracy 0.29 -> 0.44; TRL 0.51), begun with a tuned model,
SmolLM2-1.7B-Instruct. Three of its values are changed: no top-k and no top-p, because the truncated distribution that
it sampled from is not the one that it differentiated; a learning rate of 1e-5 instead of 5e-5, which is high for all
the weights of such a model; 16 prompts per update instead of 4, because 4 groups often hold none with mixed rewards.
We have not run the recipe. Its memory is planned for 40 GB (1.7 B parameters): float32 weights 6.8 GB, Adam 13.7, bf16
copy 3.8, reference 3.4, and then either gradients 6.8 and activations 2 or the keys and values of a rollout, 10.
"""

import contextlib
import copy
import csv
import dataclasses
import errno
import importlib.metadata
import json
import math
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NoReturn

import datasets
import huggingface_hub
import torch
import torch.nn.functional as F
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from utils.masking import masked_mean, masked_sum
from utils.rewards import accuracy_reward, format_reward, gold_number, lenient_accuracy_reward

HERE = Path(__file__).resolve().parent
REWARDS = [accuracy_reward, format_reward]  # their sum is the reward of a completion
SEGMENT = 32  # decode steps between two allocations of memory for keys and values

RECIPES = {  # what a field of Args that is left at None becomes: for the bundled model, for any other
    "dataset": (str(HERE / "assets" / "addition"), "openai/gsm8k"),
    "max_new_tokens": (32, 300),
    "temperature": (1.0, 0.9),
    "num_steps": (60, 200),
    "learning_rate": (1e-4, 1e-5),
    "warmup_updates": (0, 10),
    "gradient_checkpointing": (False, True),
    "eval_every": (20, 50),
    "beta": (0.01, 0.04),
}

SYSTEM_PROMPT = """Solve the problem step by step. Write your reasoning between <think> and </think>, and then the \
final number alone between <answer> and </answer>. For example:
A box holds 4 rows of 6 eggs, and 5 eggs are broken. How many eggs are whole?
<think>The box holds 4 * 6 = 24 eggs. 24 - 5 = 19 of them are whole.</think>
<answer>19</answer>"""


@dataclass
class Args:
    # ---- run
    seed: int = 1
    """seed of python, of torch and of the order of the data"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto takes the GPU if there is one"""
    runs_dir: str = "runs"
    """folder that holds the runs"""
    run_name: str | None = None
    """name of this run's folder; None: script, model, seed and time"""
    resume: str | None = None
    """folder of a stopped run, runs/<name>, to go on with; its arguments are used, and no others may be given"""
    eval_every: int | None = None
    """evaluate every so many steps, besides before and after the training; 0: never between; None: by model"""
    save_every: int = 50
    """write a checkpoint every so many steps, besides the first and the last; 0: never between"""
    track: bool = False
    """send the metrics to Weights & Biases as well"""
    wandb_project: str = "plainrl"
    """W&B project that gets the metrics with --track"""

    # ---- model and data
    model: str = "assets/adder"
    """folder or hub id of a causal language model; a name without "/" that is no folder is one of HuggingFaceTB"""
    dataset: str | None = None
    """hub id, .jsonl / .json / .csv / .parquet file, or a folder with a train and a test file; None: by model"""
    dataset_config: str | None = None
    """configuration of a hub data set; None: main for openai/gsm8k, else the only one"""
    eval_dataset: str | None = None
    """held-out problems; None: the test split, the test file beside a train file, or else the last tenth of the file"""
    eval_size: int = 500
    """evaluate on so many of the held-out problems, the first ones"""
    question_column: str = "question"
    """column of the data set that holds the question"""
    answer_column: str = "answer"
    """column of the data set that holds the gold answer; if it has a "####", what follows the last one"""
    system_prompt: str | None = None
    """instructions before each question; None: to think and answer in tags, for chat models and openai/gsm8k alone"""
    max_prompt_tokens: int | None = None
    """longer prompts (P) are skipped, counted and reported; None: 512, or what the model's context leaves"""

    # ---- sampling
    num_prompts: int = 16
    """prompts per step (B)"""
    num_generations: int = 8
    """samples per prompt (G)"""
    max_new_tokens: int | None = None
    """a response is cut after so many tokens (R); None: by model"""
    temperature: float | None = None
    """divides the logits, in sampling and in every log-probability alike; None: by model"""
    cuda_graph: bool = True
    """on a GPU, replay the decode step from a CUDA graph"""

    # ---- optimization
    num_steps: int | None = None
    """rollouts in the whole run; None: by model"""
    learning_rate: float | None = None
    """peak learning rate of AdamW (betas 0.9 and 0.999, no weight decay); None: by model"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """how the learning rate falls to 0 after the warm-up, or that it stays"""
    warmup_updates: int | None = None
    """updates in which the learning rate rises linearly to its peak; None: by model"""
    num_iterations: int = 1
    """passes over each rollout (mu in Algorithm 1)"""
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
    """weight of the KL to the reference in the loss (beta in Eq. 3); 0: no reference is loaded; None: by model"""

    # ---- computed
    num_sequences: int = field(init=False, default=0)
    """sequences per step (N = B*G)"""
    num_updates: int = field(init=False, default=0)
    """optimizer updates in the whole run"""


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line and no traceback: status 2 for bad input, 1 for what goes wrong later."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: Exception) -> bool:
    """A GPU reports it as OutOfMemoryError, a CPU as a RuntimeError of torch, python as MemoryError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def explained_errors():
    """Turn running out of memory or of disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        fail(f"--runs-dir: {error}; make room; the last checkpoint is still in place for --resume", 1)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        knobs = "--micro-batch-tokens, --num-prompts or --max-new-tokens, or give --gradient-checkpointing True"
        fail(f"out of memory: lower {knobs} ({first_line(error)})", 1)


def check_args(args: Args) -> Args:
    """A copy of the arguments with the fields that are None by model filled in; refuses what cannot work."""
    args, given = dataclasses.replace(args), args
    bundled = args.model == Args.model
    folder = HERE / args.model if bundled else Path(args.model).expanduser()
    bundled = folder.resolve() == (HERE / Args.model).resolve()
    if folder.is_dir() and not (folder / "config.json").is_file():
        fail(f"--model {args.model}: the folder has no config.json; give one that save_pretrained has written")
    if not folder.is_dir() and (bundled or args.model.count("/") > 1 or args.model[:1] in ("", ".", "/", "~")):
        fail(f"--model {args.model!r}: no such folder; give a folder or a hub id (owner/name)")
    if folder.is_dir():
        args.model = str(folder.resolve())
    elif "/" not in args.model:
        args.model = f"HuggingFaceTB/{args.model}"
    for name, (bundled_value, other_value) in RECIPES.items():
        if getattr(args, name) is None:
            setattr(args, name, bundled_value if bundled else other_value)
    for name in ("dataset", "eval_dataset"):  # a resumed run may start in another folder
        if getattr(args, name) and Path(getattr(args, name)).expanduser().exists():
            setattr(args, name, str(Path(getattr(args, name)).expanduser().resolve()))

    at_least = dict(seed=0, eval_every=0, save_every=0, eval_size=1, max_prompt_tokens=1, max_new_tokens=1)
    at_least |= dict(num_prompts=1, num_generations=2, num_steps=1, warmup_updates=0, num_iterations=1)
    at_least |= dict(num_minibatches=1, micro_batch_tokens=1, beta=0)
    for name, low in at_least.items():
        value = getattr(args, name)
        if value is not None and not low <= value < math.inf:
            fail(f"--{name.replace('_', '-')} {value}: must be a number not below {low}")
    if args.seed >= 2**32:
        fail(f"--seed {args.seed}: must be below 2**32")
    for name in ("temperature", "learning_rate", "max_grad_norm", "clip_eps"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            fail(f"--{name.replace('_', '-')} {value}: must be a number above 0")
    if args.clip_eps >= 1:
        fail(f"--clip-eps {args.clip_eps}: must be below 1; at 1 the lower bound of the ratio is gone")

    args.num_sequences = args.num_prompts * args.num_generations
    args.num_updates = args.num_steps * args.num_iterations * args.num_minibatches
    if args.num_sequences % args.num_minibatches:
        fail(
            f"--num-minibatches {args.num_minibatches}: must divide the {args.num_sequences} sequences of a step, "
            f"--num-prompts {args.num_prompts} x --num-generations {args.num_generations}"
        )
    if given.warmup_updates is None:
        args.warmup_updates = min(args.warmup_updates, args.num_updates)
    if args.warmup_updates > args.num_updates:
        fail(f"--warmup-updates {args.warmup_updates}: must not exceed the {args.num_updates} updates of the run")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; give --device cpu")
    if args.run_name is not None and (args.run_name in ("", "..") or Path(args.run_name).name != args.run_name):
        fail(f"--run-name {args.run_name!r}: must be a plain folder name; the folder above it is --runs-dir")
    return args


def go_offline_if_unreachable() -> None:
    """Without a network the hub libraries retry for a minute; ask once, and use what is cached if no answer comes."""
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # an answer, whatever it says
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def load_pretrained(auto_class, name: str, flag: str, **kwargs):
    """auto_class.from_pretrained(name), or one line that names the flag and the reason."""
    try:
        if "dtype" not in kwargs:
            return auto_class.from_pretrained(name, **kwargs)
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **kwargs)
        if info["missing_keys"]:
            raise ValueError(f"the files hold no weights for {', '.join(sorted(info['missing_keys'])[:3])}")
        return model
    except Exception as error:  # the libraries below raise a dozen types
        fail(f"{flag} {name}: cannot be loaded; check the name, the files and the network ({first_line(error)})")


def read_rows(args: Args, source: str, split: str, flag: str) -> list[dict]:
    """Rows of a .jsonl / .json / .csv / .parquet file, of a folder's file for the split, or of a hub data set."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = next(iter(sorted(path.glob(f"{split}.*"))), path / f"{split}.jsonl")
    kind = path.suffix.lower()
    try:
        if kind not in (".jsonl", ".json", ".csv", ".parquet"):
            if path.exists() or source[:1] in ("", ".", "/", "~"):
                raise ValueError("no such file; give .jsonl, .json, .csv or .parquet, a folder of them, or a hub id")
            config = args.dataset_config or ("main" if source == "openai/gsm8k" else None)
            rows = list(datasets.load_dataset(source, config, split=split))
        elif not path.is_file():
            raise FileNotFoundError("no such file")
        elif kind == ".parquet":
            rows = list(datasets.Dataset.from_parquet(str(path), keep_in_memory=True))
        elif kind == ".csv":
            with open(path, newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file))
        elif kind == ".json":
            rows = json.loads(path.read_text(encoding="utf-8-sig"))
        else:
            rows = []
            for k, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
                try:
                    rows += [json.loads(line)] if line.strip() else []
                except ValueError:
                    raise ValueError(f"line {k} is not JSON") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is not a list of records with named fields")
        if not rows:
            raise ValueError("it is empty")
        return rows
    except Exception as error:  # pyarrow, csv, json and the hub raise a dozen types
        fail(f"{flag} {path if path.suffix else source}: the {split} data cannot be read ({first_line(error)})")


def load_data(args: Args, tokenizer) -> tuple[list[dict], list[dict]]:
    """Training and held-out examples: dicts of prompt (text), prompt_ids (list of ids) and answer (text)."""
    rows = {"train": read_rows(args, args.dataset, "train", "--dataset")}
    path = Path(args.dataset).expanduser()
    twin = path.with_name(path.name.replace("train", "test", 1))
    if args.eval_dataset is not None:
        rows["test"] = read_rows(args, args.eval_dataset, "test", "--eval-dataset")
    elif not path.is_file():
        rows["test"] = read_rows(args, args.dataset, "test", "--dataset")
    elif twin != path and twin.is_file():
        rows["test"] = read_rows(args, str(twin), "test", "--dataset")
    else:
        cut = max(1, len(rows["train"]) // 10)
        rows = {"train": rows["train"][:-cut], "test": rows["train"][-cut:]}

    examples = {}
    for split in rows:
        source = f"--dataset {args.dataset}"
        if split == "test" and args.eval_dataset is not None:
            source = f"--eval-dataset {args.eval_dataset}"
        examples[split], too_long, no_number = [], 0, 0
        for k, row in enumerate(rows[split], start=1):
            for flag, column in (("--question-column", args.question_column), ("--answer-column", args.answer_column)):
                if column not in row:
                    fail(f"{flag} {column}: the {split} data has no such column, but {', '.join(map(str, row))}")
            question = "" if row[args.question_column] is None else str(row[args.question_column])
            answer = str(row[args.answer_column])
            if not question.strip():
                fail(f"{source}: row {k} of the {split} data has an empty {args.question_column}")
            if tokenizer.chat_template:
                system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
                messages = [*system, {"role": "user", "content": question}]
                prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            else:
                prompt = f"{args.system_prompt}\n{question}\n" if args.system_prompt else question
            # A chat template writes the BOS token itself: tokenizing with special tokens would double it.
            prompt_ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
            if gold_number(answer) is None:
                no_number += 1
            elif len(prompt_ids) > args.max_prompt_tokens:
                too_long += 1
            else:
                examples[split].append({"prompt": prompt, "prompt_ids": prompt_ids, "answer": answer})
            if split == "test" and len(examples[split]) == args.eval_size:
                break
        print(f"{split} data: {len(examples[split])} problems", end="")
        print(f"; skipped: {too_long} longer than --max-prompt-tokens {args.max_prompt_tokens}", end="")
        print(f", {no_number} without a number in {args.answer_column}")
        if not examples[split]:
            fail(
                f"{source}: no usable problem is left in the {split} data: {too_long} longer than --max-prompt-tokens "
                f"{args.max_prompt_tokens}, {no_number} without a number in {args.answer_column}"
            )
    return examples["train"], examples["test"]


def draw(num_examples: int, seed: int, position: int, count: int) -> list[int]:
    """Indices of the examples at position .. position + count - 1 of an endless walk, a new permutation every epoch.

    Nothing but the position is needed to go on after a resume.
    """
    indices = []
    for epoch in range(position // num_examples, (position + count - 1) // num_examples + 1):
        order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
        start = max(0, position - epoch * num_examples)
        indices += order[start : position + count - epoch * num_examples].tolist()
    return indices


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any length -> ids (B, P) and mask (B, P). The mask is made from lengths: a prompt may hold pad_id."""
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer: after the prefill, a decode step writes its column into memory allocated before."""

    column = None  # (1,) int64: the column to write, one tensor for all layers; None during the prefill

    def update(self, keys, values, *args, **kwargs):
        if self.column is None:
            return super().update(keys, values)
        self.keys.index_copy_(2, self.column, keys)  # (rows, heads, columns, width)
        self.values.index_copy_(2, self.column, values)
        return self.keys, self.values

    def regroup(self, rows: torch.Tensor, extra: int) -> None:
        """Keep these rows, which may repeat, and allocate extra columns."""
        self.keys = F.pad(self.keys[rows], (0, 0, 0, extra))
        self.values = F.pad(self.values[rows], (0, 0, 0, extra))


def sample(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (n,) drawn from the softmax of logits (n, V) / temperature, and their log-probabilities; 0 is greedy.

    Gumbel-max: the argmax of logprobs + Gumbel noise is an exact draw that needs no cumulative sum and no host sync.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(1)  # (n, V) float32
    noise = -torch.rand_like(logprobs).log_().neg_().log_() if temperature > 0 else 0.0
    tokens = (logprobs + noise).argmax(1)  # (n,)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


@torch.no_grad()
def generate(args: Args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids):
    """Sample num_samples responses for each left-padded prompt (B, P), all in one batch of N = B * num_samples rows.

    Returns response_ids (N, R), response_mask (N, R) bool and the logprobs (N, R) float32 of the tokens drawn. The
    distribution is the model's whole softmax at this temperature: no top-k, no top-p, no repetition penalty.
    """
    model.eval()
    device, (B, P), N = prompt_ids.device, prompt_ids.shape, len(prompt_ids) * num_samples
    eos = torch.tensor(eos_ids, device=device)
    response_ids = torch.full((N, args.max_new_tokens), eos_ids[0], device=device)  # (N, R)
    response_mask = torch.zeros(N, args.max_new_tokens, dtype=torch.bool, device=device)  # (N, R)
    response_logprobs = torch.zeros(N, args.max_new_tokens, device=device)  # (N, R) float32

    # Prefill: the keys and values of a prompt are computed once and repeated for its samples.
    cache = Cache(layer_class_to_replicate=InPlaceLayer)
    inputs = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    mask = prompt_mask.long()  # (B, P)
    position = (mask.cumsum(1) - 1).clamp(min=0)  # (B, P): padding on the left is not counted
    logits = model(prompt_ids, attention_mask=mask, position_ids=position, **inputs).logits[:, -1]  # (B, V)
    rows = torch.arange(B, device=device).repeat_interleave(num_samples)  # (N,)
    column = torch.tensor([P], device=device)
    for layer in cache.layers:
        layer.regroup(rows, SEGMENT)
        layer.column = column
    # Added to the attention scores, 0 or as good as minus infinity: every attention implementation understands this.
    blocked = torch.finfo(model.dtype).min
    attention_mask = torch.zeros_like(prompt_mask, dtype=model.dtype).masked_fill(~prompt_mask, blocked)[rows]
    attention_mask = F.pad(attention_mask[:, None, None, :], (0, SEGMENT), value=blocked)  # (N, 1, 1, P + SEGMENT)
    position = prompt_mask.sum(1)[rows]  # (N,)
    token, logprob = sample(logits[rows], temperature)  # (N,)

    def decode():
        # All state changes in place, at addresses that stay, so that a CUDA graph can replay this.
        attention_mask.index_fill_(3, column, 0.0)
        mask, next_position = attention_mask, position[:, None]
        logits = model(token[:, None], attention_mask=mask, position_ids=next_position, **inputs).logits[:, -1]
        for state, new in zip((token, logprob), sample(logits, temperature), strict=True):
            state.copy_(new)
        position.add_(1)
        column.add_(1)

    sequence = torch.arange(N, device=device)  # which of the N sequences each row of the batch is
    finished = torch.zeros(N, dtype=torch.bool, device=device)
    graph = None
    for t in range(args.max_new_tokens):
        response_ids[sequence, t], response_logprobs[sequence, t] = token, logprob
        response_mask[sequence, t] = ~finished  # the EOS token counts, nothing after it does
        finished |= torch.isin(token, eos)
        if t + 1 == args.max_new_tokens:
            break
        # To look at which rows are finished, the host waits for the device: on a GPU it looks once in a segment.
        if device.type == "cpu" or t % SEGMENT == 0:
            live, full = (~finished).nonzero().squeeze(1), P + t == attention_mask.shape[3]
            if len(live) == 0:
                break
            if full or len(live) <= 0.75 * len(finished):  # drop the finished rows, make room for the next segment
                extra = SEGMENT if full else 0
                for layer in cache.layers:
                    layer.regroup(live, extra)
                attention_mask = F.pad(attention_mask[live], (0, extra), value=blocked)
                token, logprob, position = token[live], logprob[live], position[live]
                sequence, finished, graph = sequence[live], finished[live], None
        if graph is not None:
            graph.replay()
            continue
        decode()
        if args.cuda_graph and device.type == "cuda":  # that step was the warm-up; recording one computes nothing
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decode()
    # A finished row goes on drawing tokens until it is dropped: they are not part of the response.
    response_ids = response_ids.masked_fill(~response_mask, eos_ids[0])
    response_logprobs = response_logprobs.masked_fill(~response_mask, 0.0)
    R = int(response_mask.any(0).sum())
    return response_ids[:, :R], response_mask[:, :R], response_logprobs[:, :R]


def compute_logprobs(model, prompt_ids, prompt_mask, response_ids, response_mask, temperature):
    """Log-probabilities (n, R) float32 of the responses, 0 where masked, from ids and masks (n, P) and (n, R)."""
    prompt_lengths = prompt_mask.sum(1)  # (n,)
    # The head runs on response tokens alone: the token at column t is predicted by the hidden state one before it.
    row, column = response_mask.nonzero(as_tuple=True)  # (T,)
    # The b different prompts (b, P, 2), ids beside masks because token 0 is no padding; and which a row has, (n,).
    prompts, which = torch.stack([prompt_ids * prompt_mask, prompt_mask], 2).unique(dim=0, return_inverse=True)
    recomputed = model.training and model.is_activation_checkpointing  # such layers cannot read a cache
    with torch.autocast(prompt_ids.device.type, torch.bfloat16, enabled=prompt_ids.is_cuda):
        if 2 * len(prompts) <= len(prompt_ids) and not recomputed:
            # The samples of one prompt share its forward and backward pass: each prompt is run once, and its keys and
            # values are repeated for its responses. By index_select, whose gradient is summed in one order on a CPU.
            cache = DynamicCache()
            inputs = dict(past_key_values=cache, use_cache=True)
            ids, mask = prompts[:, -prompt_lengths.max() :].unbind(2)  # (b, P)
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)  # (b, P)
            trunk = model.base_model(ids, attention_mask=mask, position_ids=position_ids, **inputs)
            last = trunk.last_hidden_state[:, -1:].index_select(0, which)  # (n, 1, D)
            cache.reorder_cache(which)
            count = max(1, response_mask.sum(1).max() - 1)  # R - 1: the last token predicts none of these
            mask = torch.cat([mask[which], response_mask[:, :count].long()], 1)  # (n, P + R - 1)
            position_ids = prompt_lengths[:, None] + torch.arange(count, device=mask.device)  # (n, R - 1)
            trunk = model.base_model(response_ids[:, :count], attention_mask=mask, position_ids=position_ids, **inputs)
            hidden = torch.cat([last, trunk.last_hidden_state], 1)[row, column]  # (T, D)
        else:
            # Right padding: causal attention never looks at it from the left, so no mask is needed, and the fastest
            # kernels apply.
            is_token = torch.cat([prompt_mask, response_mask], 1)  # (n, P + R)
            order = is_token.long().sort(dim=1, descending=True, stable=True).indices  # (n, P + R)
            order = order[:, : is_token.sum(1).max() - 1]  # (n, L - 1), L the longest sequence
            input_ids = torch.cat([prompt_ids, response_ids], 1).gather(1, order)  # (n, L - 1)
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            trunk = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            hidden = trunk.last_hidden_state[row, prompt_lengths[row] + column - 1]  # (T, D)
    targets = response_ids[row, column]  # (T,)
    head = model.get_output_embeddings()

    def chunk_logprobs(hidden, targets):
        bias = None if head.bias is None else head.bias.float()
        logits = F.linear(hidden.float(), head.weight.float(), bias).div_(temperature)  # (chunk, V) float32
        return -F.cross_entropy(logits, targets, reduction="none")

    # In chunks that are recomputed in the backward pass: of at most 16 M logits (64 MB), two or three copies at a time.
    chunk = max(1, 2**24 // head.weight.shape[0])
    chunks = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    logprobs = [checkpoint(chunk_logprobs, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks]
    zeros = torch.zeros(response_ids.shape, device=response_ids.device)  # (n, R) float32
    return zeros.index_put((row, column), torch.cat(logprobs))  # (n, R)


def check_model(args: Args, model, device: torch.device) -> None:
    """Stop if this file computes the log-probabilities of this family wrongly: a scaled or capped head, recurrence, ...

    Sampling, training and the model's own plain forward, one sequence at a time, must agree on a few greedy tokens.
    """
    prompts, gaps = [[0], [0, 1, 2, 3]], []
    prompt_ids, prompt_mask = left_pad(prompts, 0, device)  # (2, 4)
    graph = "; try --no-cuda-graph" if device.type == "cuda" and args.cuda_graph else ""
    try:
        with torch.no_grad():
            probe = dataclasses.replace(args, max_new_tokens=8)
            ids, mask, sampled = generate(probe, model, prompt_ids, prompt_mask, 2, 0.0, [-1])  # (4, 8)
            rollout = (prompt_ids.repeat_interleave(2, 0), prompt_mask.repeat_interleave(2, 0), ids, mask)
            for i, prompt in zip((0, 2), prompts, strict=True):
                sequence = torch.cat([torch.tensor(prompt, device=device), ids[i]])  # (P + 8,)
                plain = model(sequence[None]).logits[0, -9:-1].float().log_softmax(1).gather(1, ids[i, :, None])[:, 0]
                gaps.append(sampled[i] - plain)  # (8,)
                for training in (False, args.gradient_checkpointing):
                    model.train(training)
                    shared = compute_logprobs(model, *rollout, 1.0)  # (4, 8)
                    alone = compute_logprobs(model, *[x[i : i + 1] for x in rollout], 1.0)  # (1, 8)
                    gaps += [shared[i] - plain, alone[0] - plain]
                model.eval()
    except Exception as error:  # each family fails in a way of its own
        if is_out_of_memory(error):
            raise
        fail(f"--model {args.model}: this family is not supported ({type(error).__name__}: {first_line(error)}){graph}")
    gap = torch.stack(gaps).abs().max().item()  # NaN if one of them is
    if not gap < (0.1 if device.type == "cuda" else 1e-3):
        fail(f"--model {args.model}: this family is not supported (log-probabilities are off by up to {gap:.2g})")


def for_inference(model):
    """Turn training off; on a GPU the weights become bf16, but not the buffers, which hold the rotary frequencies."""
    for parameter in model.eval().requires_grad_(False).parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if parameter.is_cuda else torch.float32)
    return model


def micro_batches(sequences: torch.Tensor, lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into micro-batches of at most max_tokens tokens with padding; sorted, so that little is padding."""
    batches = [[]]
    for i in sorted(sequences.tolist(), key=lambda i: (-lengths[i], i)):
        if batches[-1] and lengths[batches[-1][0]] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def respond(args: Args, model, tokenizer, batch: list[dict], num_samples: int, temperature: float, eos_ids: list[int]):
    """Sample num_samples responses to each example: a list of N records, in group order.

    A record holds prompt_ids, response_ids and logprobs (lists, of the tokens that count) and completion (the text).
    """
    prompt_ids, prompt_mask = left_pad([example["prompt_ids"] for example in batch], eos_ids[0], model.device)  # (B, P)
    sampled = generate(args, model, prompt_ids, prompt_mask, num_samples, temperature, eos_ids)  # (N, R) each
    records = []
    for k, (ids, mask, logprobs) in enumerate(zip(*(tensor.cpu() for tensor in sampled), strict=True)):
        record = {"prompt_ids": batch[k // num_samples]["prompt_ids"], "response_ids": ids[mask].tolist()}
        completion = tokenizer.decode(record["response_ids"], skip_special_tokens=True)
        records.append(record | {"logprobs": logprobs[mask].tolist(), "completion": completion})
    return records


def collate(records: list[dict], pad_id: int, device: torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Records -> rollout, which is prompt ids and mask (N, P), response ids and mask (N, R); and logprobs (N, R)."""
    prompt_ids, prompt_mask = left_pad([record["prompt_ids"] for record in records], pad_id, device)  # (N, P)
    responses = [torch.tensor(record["response_ids"]) for record in records]
    response_ids = pad_sequence(responses, batch_first=True, padding_value=pad_id).to(device)  # (N, R)
    lengths = torch.tensor([len(response) for response in responses], device=device)  # (N,)
    response_mask = torch.arange(response_ids.shape[1], device=device) < lengths[:, None]  # (N, R)
    logprobs = pad_sequence([torch.tensor(record["logprobs"]) for record in records], batch_first=True).to(device)
    return (prompt_ids, prompt_mask, response_ids, response_mask), logprobs


def evaluate(args: Args, model, tokenizer, examples: list[dict], eos_ids: list[int]) -> dict:
    """Greedy accuracy on the held-out examples: strict (in the answer tags), lenient (last number), and the format."""
    records, answers = [], [example["answer"] for example in examples]
    for start in range(0, len(examples), args.num_sequences):
        records += respond(args, model, tokenizer, examples[start : start + args.num_sequences], 1, 0.0, eos_ids)
    completions = [record["completion"] for record in records]
    sums = {
        "eval/accuracy": sum(accuracy_reward(completions, answers)),
        "eval/accuracy_lenient": sum(lenient_accuracy_reward(completions, answers)),
        "eval/format": sum(score == 0.4 for score in format_reward(completions, answers)),
        "eval/response_len": sum(len(record["response_ids"]) for record in records),
    }
    return {name: value / len(examples) for name, value in sums.items()}


def lr_factor(args: Args, update: int) -> float:
    """Learning rate of this update (counted from 0) as a share of its peak."""
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    progress = (update - args.warmup_updates) / max(1, args.num_updates - args.warmup_updates)  # 0 .. 1
    if args.lr_schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if args.lr_schedule == "cosine" else 1.0


def save_checkpoint(path: Path, state: dict) -> None:
    """Write to another name, force it to the disk, rename: at any moment `path` is one whole checkpoint, old or new."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        kept = f"the checkpoint before it is intact: make room and --resume {path.parent.parent}"
        fail(f"--runs-dir: cannot write {path} ({first_line(error)}); {kept if path.exists() else 'make room'}", 1)


def load_checkpoint(folder: Path) -> dict:
    """The state that save_checkpoint wrote for this script into runs/<name>, or one line that says what is there."""
    path = folder / "checkpoint" / "state.pt"
    if not path.is_file():
        fail(f"--resume {folder}: there is no checkpoint/state.pt in it; give a folder runs/<name> of a stopped run")
    try:
        state = dict(torch.load(path, map_location="cpu", weights_only=True))
        script, _ = state["script"], [state[k] for k in ("args", "model", "optimizer", "done", "random_states")]
    except Exception as error:  # truncated or foreign files raise half a dozen types
        fail(f"--resume {folder}: its checkpoint is damaged or not one of ours ({type(error).__name__})")
    if script != Path(__file__).name:
        fail(f"--resume {folder}: its checkpoint was written by {script}; resume it with that script")
    return state


# ==== algorithm ====


def compute_advantages(args: Args, rewards: torch.Tensor) -> torch.Tensor:
    """Group-relative advantages: rewards (B, G) -> (B, G). DeepSeekMath Section 4.1.2; the std is torch's (Bessel)."""
    assert rewards.ndim == 2 and rewards.shape[1] >= 2, rewards.shape
    rewards = rewards - rewards[:, :1]  # changes the rounding alone: equal rewards then give exactly 0
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def policy_loss(args, logprobs, old_logprobs, ref_logprobs, advantages, mask, num_seqs, num_tokens):
    """The GRPO loss, -J of Eq. 3, of n sequences of a minibatch; summed over its slices it is the minibatch's loss.

    logprobs, old_logprobs (n, R); ref_logprobs (n, R), or None without a KL term; advantages (n, R) or (n, 1); mask
    (n, R) bool; num_seqs, num_tokens: sequences and tokens of the WHOLE minibatch. Returns the scalar loss and stats:
    sums over the tokens of the slice, without gradient.
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
    loss = masked_mean(token_loss, mask, axis=1).sum() / num_seqs

    stats = {"tokens": mask.sum()}
    with torch.no_grad():
        stats["clip_frac_low"] = masked_sum((ratio < 1 - args.clip_eps).float(), mask)
        stats["clip_frac_high"] = masked_sum((ratio > 1 + args.clip_eps).float(), mask)
        stats["approx_kl"] = masked_sum(0.5 * logratio**2, mask)
        stats["ratio_mean"] = masked_sum(ratio, mask)
        stats["entropy"] = masked_sum(-logprobs, mask)
        if ref_logprobs is not None:
            stats["kl"] = masked_sum(kl, mask)
    return loss, stats


# ==== training ====


@explained_errors()
def main(args: Args) -> dict:
    """Train, and return the metrics of the last step."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    script = Path(__file__).name

    # ---- arguments
    saved = None
    if args.resume is not None:
        saved, given = load_checkpoint(Path(args.resume)), args
        args = dataclasses.replace(Args(), resume=given.resume)
        for name, value in saved["args"].items():
            setattr(args, name, value)
        for name, default in vars(Args(resume=given.resume)).items():
            value = getattr(given, name)
            if value != default and value != getattr(args, name):
                fail(f"--{name.replace('_', '-')} {value}: the run in --resume has {getattr(args, name)}; leave it out")
    else:
        args = check_args(args)
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    # ---- model and data; everything that can be wrong with them is found before any weights are loaded
    if not all(Path(source).expanduser().exists() for source in (args.model, args.dataset, args.eval_dataset or ".")):
        go_offline_if_unreachable()
    config = load_pretrained(AutoConfig, args.model, "--model")
    tokenizer = load_pretrained(AutoTokenizer, args.model, "--model")
    if tokenizer.eos_token_id is None:
        fail(f"--model {args.model}: its tokenizer has no EOS token, so no response could end; set eos_token there")
    if len(tokenizer) > config.get_text_config().vocab_size:
        fail(f"--model {args.model}: its tokenizer has {len(tokenizer)} tokens, more than the vocab_size of its config")
    for name, value in vars(config).items():  # no dropout and no noise in RL: with it even the first ratio is not 1
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    if args.system_prompt is None:
        instruct = tokenizer.chat_template or args.dataset == "openai/gsm8k"
        args.system_prompt = SYSTEM_PROMPT if instruct else ""
    limits = ("max_position_embeddings", "sliding_window", "window_size")
    context = min(getattr(config.get_text_config(), name, None) or 10**9 for name in limits)
    if args.max_prompt_tokens is None:
        args.max_prompt_tokens = max(1, min(512, context - args.max_new_tokens))
    if args.max_prompt_tokens + args.max_new_tokens > context:
        both = f"--max-prompt-tokens {args.max_prompt_tokens} + --max-new-tokens {args.max_new_tokens}"
        fail(f"{both}: more than the {context} tokens of the model's context or attention window; lower one of them")
    train_data, test_data = load_data(args, tokenizer)

    # float32 weights: at these learning rates a bf16 weight would not move. A GPU computes in bf16 autocast.
    model = load_pretrained(AutoModelForCausalLM, args.model, "--model", config=config, dtype=torch.float32).to(device)
    eos_ids = model.generation_config.eos_token_id
    eos_ids = sorted({tokenizer.eos_token_id, *(eos_ids if isinstance(eos_ids, list) else [eos_ids])} - {None})
    if args.gradient_checkpointing:
        try:
            model.activation_checkpointing_enable()
        except ValueError as error:
            fail(f"--gradient-checkpointing True: {first_line(error)}; give --gradient-checkpointing False")
    check_model(args, model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    if saved:
        model.load_state_dict(saved.pop("model"))
        optimizer.load_state_dict(saved.pop("optimizer"))
    ref_model = None
    if args.beta > 0:  # the policy's start, also in a resumed run; bf16 on a GPU, where kl/ref begins at rounding
        ref_model = load_pretrained(AutoModelForCausalLM, args.model, "--model", config=config, dtype=torch.float32)
        ref_model = for_inference(ref_model.to(device))

    # A GPU samples from a bf16 copy, half the bytes to read, with a head in float32; a CPU samples from the model.
    sampler = model
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        sampler = for_inference(copy.deepcopy(model))
        head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        sampler.set_output_embeddings(head)

    # ---- run folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run_name = args.run_name or f"{Path(script).stem}__{Path(args.model).name}__{args.seed}__{stamp}"
    run_dir = Path(args.resume) if saved else Path(args.runs_dir).expanduser() / run_name
    state_path = run_dir / "checkpoint" / "state.pt"
    done = SimpleNamespace(steps=0, prompts=0, updates=0, episodes=0, tokens=0, skipped_in_a_row=0)
    if saved:
        done = SimpleNamespace(**saved["done"])
        random.setstate(saved["random_states"]["python"])
        torch.set_rng_state(saved["random_states"]["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state_all(saved["random_states"]["cuda"])
        for name in ("metrics.jsonl", "samples.jsonl"):  # what was logged after the checkpoint will be logged again
            lines = (run_dir / name).read_text(encoding="utf-8").split("\n")[:-1]
            kept = [line for line in lines if json.loads(line)["step"] <= done.steps]
            (run_dir / f"{name}.tmp").write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(run_dir / f"{name}.tmp", run_dir / name)
    else:
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            fail(f"--run-name {run_name}: {run_dir} exists; choose another name, or give --resume {run_dir}")
        except OSError as error:
            fail(f"--runs-dir {args.runs_dir}: {run_dir} cannot be made ({error.strerror}); choose another folder")
        git = "git rev-parse HEAD && git status --porcelain"
        commit, *changes = subprocess.getoutput(f"cd '{HERE}' && {git}").splitlines()
        packages = ("torch", "transformers", "datasets", "tyro", "wandb")
        versions = {name: importlib.metadata.version(name) for name in packages} | {"python": sys.version}
        versions |= {"device": str(device), "commit": commit, "dirty": bool(changes)}
        (run_dir / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
        (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
        shutil.copy(__file__, run_dir / script)

    def current_state() -> dict:
        random_states = {"python": random.getstate(), "torch": torch.get_rng_state()}
        random_states["cuda"] = torch.cuda.get_rng_state_all() if device.type == "cuda" else []
        return {
            "script": script,
            "args": {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name != "resume"},
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "done": vars(done),
            "random_states": random_states,
        }

    def finite(value):  # JSON has no NaN
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def log(name: str, *records: dict) -> None:
        records = [{key: finite(value) for key, value in record.items()} for record in records]
        with open(run_dir / name, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))

    tracker = None
    if args.track:
        import wandb

        options = dict(project=args.wandb_project, id=run_dir.name, resume="allow", dir=run_dir, config=vars(args))
        try:
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
            tracker = wandb.init(mode=mode, settings=wandb.Settings(init_timeout=15), **options)
        except Exception as error:
            print(f"W&B is out of reach ({type(error).__name__}): recording offline, to be sent later by wandb sync")
            tracker = wandb.init(mode="offline", **options)

    # ---- what a person should know before it starts
    updates_per_rollout = args.num_iterations * args.num_minibatches
    print(f"{script} on {device}: {args.model}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    print("by model: " + ", ".join(f"{name} {getattr(args, name)}" for name in [*RECIPES, "max_prompt_tokens"]))
    print(
        f"a step: {args.num_prompts} prompts x {args.num_generations} samples = {args.num_sequences} sequences -> "
        f"minibatches of {args.num_sequences // args.num_minibatches} -> updates per rollout: {updates_per_rollout}"
    )
    if updates_per_rollout == 1:
        print("note: one update per rollout: the ratio is 1, clip_frac 0, and a loss near 0 no fault; watch the reward")
    print(f"first prompt: {train_data[0]['prompt']!r}, answer {train_data[0]['answer']!r}")
    print(f"run folder: {run_dir}" + (f", resumed after step {done.steps}" if saved else ""))

    # Ctrl-C or SIGTERM ends the run after the step, with a checkpoint; the second one ends it at once.
    signals, warned = [], set()

    def on_signal(number, frame):
        signals.append(number)
        if len(signals) > 1:
            raise SystemExit(128 + number)
        print("\nstopping after this step, with a checkpoint; once more stops at once", file=sys.stderr)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    if not saved:
        metrics = {"step": 0, "episodes": 0, "tokens": 0}
        metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
        log("metrics.jsonl", metrics)
        log("samples.jsonl")
        if tracker is not None:
            tracker.log(metrics, step=0)
        save_checkpoint(state_path, current_state())  # a disk that is too small shows now and not in an hour
        print(f"before: accuracy {metrics['eval/accuracy']:.3f} on {len(test_data)} held-out problems, greedy")
    progress = tqdm(total=args.num_steps, initial=done.steps, unit="step", dynamic_ncols=True, disable=None)

    while done.steps < args.num_steps and not signals:
        # 1. rollout
        start_time = time.perf_counter()
        batch = [train_data[i] for i in draw(len(train_data), args.seed, done.prompts, args.num_prompts)]
        records = respond(args, sampler, tokenizer, batch, args.num_generations, args.temperature, eos_ids)
        done.prompts += len(batch)
        done.episodes += len(records)
        done.tokens += sum(len(record["response_ids"]) for record in records)
        rollout, sampled_logprobs = collate(records, eos_ids[0], device)  # (N, P), (N, P), (N, R), (N, R); (N, R)
        rollout_seconds = time.perf_counter() - start_time

        # 2. reward
        completions = [record["completion"] for record in records]
        answers = [example["answer"] for example in batch for _ in range(args.num_generations)]
        rewards_by_name = {reward.__name__: torch.tensor(reward(completions, answers)) for reward in REWARDS}  # (N,)
        rewards = sum(rewards_by_name.values()).view(-1, args.num_generations)  # (B, G) float32

        # The old policy's log-probabilities by the trainer's own code: before a single update they are the policy's
        # own, so that its ratio is exactly 1; before several updates they are computed here and then stay.
        start_time = time.perf_counter()
        response_mask = rollout[3]  # (N, R)
        lengths = (rollout[1].sum(1) + response_mask.sum(1)).tolist()  # N of them, prompt included
        old_logprobs = torch.zeros_like(sampled_logprobs)  # (N, R)
        ref_logprobs = torch.zeros_like(sampled_logprobs)  # (N, R)
        model.train(args.gradient_checkpointing)  # transformers recomputes activations only in training mode
        with torch.no_grad():
            for i in micro_batches(torch.arange(len(lengths)), lengths, args.micro_batch_tokens):
                if updates_per_rollout > 1:
                    old_logprobs[i] = compute_logprobs(model, *[x[i] for x in rollout], args.temperature)
                if ref_model is not None:
                    ref_logprobs[i] = compute_logprobs(ref_model, *[x[i] for x in rollout], args.temperature)

        # 3. advantage
        advantages = compute_advantages(args, rewards).view(-1, 1).to(device)  # (N, 1)

        # 4. update
        totals = defaultdict(float)  # sums over all minibatches of the step
        shuffled = [torch.randperm(len(lengths)) for _ in range(args.num_iterations)]
        for minibatch in [part for order in shuffled for part in order.chunk(args.num_minibatches)]:
            num_tokens = response_mask[minibatch].sum()
            for i in micro_batches(minibatch, lengths, args.micro_batch_tokens):
                logprobs = compute_logprobs(model, *[x[i] for x in rollout], args.temperature)  # (n, R)
                if updates_per_rollout == 1:
                    old_logprobs[i] = logprobs.detach()
                ref = None if ref_model is None else ref_logprobs[i]  # (n, R)
                fixed = (old_logprobs[i], ref, advantages[i], response_mask[i], len(minibatch), num_tokens)
                loss, stats = policy_loss(args, logprobs, *fixed)
                loss.backward()
                for name, value in {"loss": loss.detach(), **stats}.items():
                    totals[name] += value
            lr = args.learning_rate * lr_factor(args, done.updates)
            for group in optimizer.param_groups:
                group["lr"] = lr
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            if torch.isfinite(grad_norm):
                optimizer.step()
                totals["grad_norm"] += grad_norm
                done.skipped_in_a_row = 0
            else:
                totals["skipped"] += 1
                done.skipped_in_a_row += 1
            optimizer.zero_grad(set_to_none=True)
            done.updates += 1
            if done.skipped_in_a_row == 3:
                advice = f"lower --learning-rate {args.learning_rate}; the last good checkpoint is {state_path}"
                fail(f"step {done.steps + 1}: three updates in a row had a gradient that is not finite; {advice}", 1)
        if sampler is not model:
            weights = dict(model.named_parameters(remove_duplicate=False))
            with torch.no_grad():
                for name, parameter in sampler.named_parameters():
                    parameter.copy_(weights[name])  # in place: a CUDA graph goes on reading the same memory
        totals = {name: float(value) for name, value in totals.items()}  # waits for the device
        count = max(1.0, totals["tokens"])
        update_seconds = time.perf_counter() - start_time

        # 5. log
        done.steps += 1
        gap = (old_logprobs - sampled_logprobs).abs()[response_mask]  # (tokens,)
        host_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        metrics = {"step": done.steps, "episodes": done.episodes, "tokens": done.tokens}
        metrics |= {f"rollout/{name}": value.mean().item() for name, value in rewards_by_name.items()}
        metrics |= {
            "rollout/reward_mean": rewards.mean().item(),
            "rollout/reward_std": rewards.std().item(),
            "rollout/accuracy": sum(accuracy_reward(completions, answers)) / len(completions),
            "rollout/response_len": sum(len(record["response_ids"]) for record in records) / len(records),
            "rollout/eos_frac": sum(record["response_ids"][-1] in eos_ids for record in records) / len(records),
            "rollout/zero_std_frac": (rewards == rewards[:, :1]).all(1).float().mean().item(),
            "rollout/logprob_gap": gap.mean().item(),
            "rollout/logprob_gap_max": gap.max().item(),
            "policy/loss": totals["loss"] / updates_per_rollout,
            "policy/clip_frac": (totals["clip_frac_low"] + totals["clip_frac_high"]) / count,
            "optim/lr": lr,
            "optim/grad_norm": totals.get("grad_norm", 0.0) / max(1, updates_per_rollout - totals.get("skipped", 0)),
            "optim/skipped": totals.get("skipped", 0.0),
            "time/rollout_s": rollout_seconds,
            "time/update_s": update_seconds,
            "time/tokens_per_s": sum(len(record["response_ids"]) for record in records) / rollout_seconds,
            "time/peak_mem_gb": (torch.cuda.max_memory_allocated() if device.type == "cuda" else host_memory) / 1e9,
        }
        for name in ("clip_frac_low", "clip_frac_high", "approx_kl", "ratio_mean", "entropy"):
            metrics[f"policy/{name}"] = totals[name] / count
        if ref_model is not None:
            metrics["kl/ref"] = totals["kl"] / count
        if done.steps == args.num_steps or (args.eval_every and done.steps % args.eval_every == 0):
            metrics |= evaluate(args, sampler, tokenizer, test_data, eos_ids)
        log("metrics.jsonl", metrics)
        samples = []
        for k, example in enumerate(batch):
            group = slice(k * args.num_generations, (k + 1) * args.num_generations)
            samples.append({"step": done.steps, "prompt": example["prompt"], "answer": example["answer"]})
            samples[-1] |= {"completions": completions[group], "rewards": rewards[k].tolist()}
            samples[-1] |= {"advantages": advantages[group, 0].tolist()}
        log("samples.jsonl", *samples)
        if tracker is not None:
            tracker.log(metrics, step=done.steps)

        shown = {"reward": metrics["rollout/reward_mean"], "accuracy": metrics["rollout/accuracy"]}
        shown |= {"length": metrics["rollout/response_len"], "kl": metrics.get("kl/ref", metrics["policy/approx_kl"])}
        shown |= {"held-out": metrics["eval/accuracy"]} if "eval/accuracy" in metrics else {}
        progress.set_postfix({name: f"{value:.3g}" for name, value in shown.items()}, refresh=False)
        progress.update()
        if done.steps == 1 or done.steps % max(1, args.num_steps // 10) == 0:
            progress.write(f"step {done.steps}: " + ", ".join(f"{name} {value:.3g}" for name, value in shown.items()))
            progress.write(f"    {batch[0]['prompt']!r} -> {completions[0]!r}, reward {rewards[0, 0]:.2f}")
        warnings = {
            "eos_frac < 0.5: most responses are cut; raise --max-new-tokens": metrics["rollout/eos_frac"] < 0.5,
            "zero_std_frac > 0.9: groups of equal rewards teach nothing": metrics["rollout/zero_std_frac"] > 0.9,
            "logprob_gap > 0.05: sampling and training disagree": metrics["rollout/logprob_gap"] > 0.05,
        }
        for warning in [text for text, holds in warnings.items() if holds and text not in warned]:
            progress.write(f"warning: {warning}")
            warned.add(warning)
        # What check_model has found on a few tokens must hold on the real ones.
        if done.steps == 1 and not metrics["rollout/logprob_gap"] < (0.1 if device.type == "cuda" else 1e-3):
            gaps = f"mean {metrics['rollout/logprob_gap']:.2g}, max {metrics['rollout/logprob_gap_max']:.2g}"
            fail(f"--model {args.model}: not supported, sampling and training disagree on log-probabilities ({gaps})")

        # 6. save
        if signals or done.steps == args.num_steps or (args.save_every and done.steps % args.save_every == 0):
            save_checkpoint(state_path, current_state())
    progress.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if tracker is not None:
        tracker.finish()
    if done.steps < args.num_steps:
        command = f"python {script} --resume {shlex.quote(str(run_dir))}"
        print(f"stopped after step {done.steps}; go on with: {command}", file=sys.stderr)
        raise SystemExit(128 + signals[0])

    try:
        model.save_pretrained(run_dir / "model")
        tokenizer.save_pretrained(run_dir / "model")
    except Exception as error:  # safetensors has an error type of its own
        fail(f"--runs-dir: cannot write the model ({first_line(error)}); make room and --resume {run_dir}", 1)
    first, *_, last = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    print(
        f"before: accuracy {first['eval/accuracy']:.3f}; after: {last['eval/accuracy']:.3f}, on the held-out problems"
    )
    print(f"model: {run_dir / 'model'}; metrics and samples: {run_dir}")
    return last


if __name__ == "__main__":
    main(tyro.cli(Args))
