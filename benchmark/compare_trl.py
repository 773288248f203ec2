"""docs/measurements.md's comparison with TRL: how fast the two trainers are, and how much memory they need.

    pip install -r benchmark/requirements.txt
    python benchmark/compare_trl.py --workload W1

Each run has a process to itself, and the order of the sides alternates. So a machine that slows down is fair to both.
benchmark/tables.py makes the table from the records. benchmark/real_model.py compares how they learn. grpo.py and TRL's
GRPOTrainer train on one of these workloads:

    W1  the bundled model and task, 16 x 8 samples of <= 32 tokens
    W2  a 260 K story model, lengths from 5 to 384, 16 x 8 samples
        --model FOLDER: stories260K of karpathy/tinyllamas, in the format of transformers
    W3  SmolLM2-135M's shape, random weights, 4 x 4 samples of 64 tokens
    W4  SmolLM2-1.7B's shape, 16 x 8 samples of 512 tokens: needs a GPU
    W5  problems of GSM8K in the default prompt, 4 x 8 samples of <= 128 tokens
        --model FOLDER: SmolLM2-135M-Instruct

Both trainers train the same model on the same prompts, with all prompts in every step. The model is in float32; in W4
it has bf16 autocast and recomputed activations. Both use GRPO with its std, temperature 1, no top-k and no top-p, no KL
term, one update per rollout, Adam, the same reward and two threads. They draw from the same distribution, so their
lengths differ only by chance.

In W4, the trainers differ in two points. TRL samples with the float32 weights, which it rounds again at each use, and
its keys and values are in float32, too. These take 39 GB for 16 x 8 samples. And TRL attends with torch's defaults: on
a Hopper GPU, torch tries cuDNN's attention first. grpo.py turns cuDNN's attention off.

In W3 and W5, the patch shared_prompts takes part, too: with it, grpo.py computes once what all prompts of a micro-batch
begin with. In W5, the micro-batches of both have the size with which they are fastest.

records/trl-speed.jsonl gets a line, which replaces the old line of the workload. "seconds" is the median wall time of a
step (rollout, reward, update, logging) over all rounds. The first step is the warm-up and isn't counted. "memory_mb" is
the highest resident set of the process, minus the resident set after its imports, before any model was loaded. On a
GPU, it is the most memory that torch allocated there.
"""

import importlib.metadata
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import tyro

from plan import MODELS, llama
from shared import FOLDER, ROOT, in_place, memory, provenance, read, read_run, table, write

sys.path.insert(0, str(ROOT))

THREADS = 2
ADDITION = ROOT / "assets" / "addition"
GSM8K = ROOT / "tests" / "data" / "gsm8k" / "train.jsonl"

SPEED = FOLDER / "trl-speed.jsonl"
NAMES = "Lily Tom Ben Mia Sam Anna Max Lucy Tim Sue Jack Amy Bob Sara Leo Emma".split()
THINGS = ["red ball", "big dog", "small cat", "toy car", "blue bird"]
THINGS += ["shiny stone", "little boat", "green frog"]
# Prompts per step (B), samples per prompt (G), new tokens (R), tokens of a micro-batch of grpo.py, sequences of a batch
# of TRL: the whole rollout, which is fastest, where it fits. In W5 it needs more than 24 GB.
FIELDS = "num_prompts num_generations max_new_tokens micro_batch_tokens trl_batch_size".split()
WORKLOADS = {
    "W1": (16, 8, 32, 2048, 128),
    "W2": (16, 8, 384, 2048, 128),
    "W3": (4, 4, 64, 512, 16),
    "W4": (16, 8, 512, 16384, 16),
    "W5": (4, 8, 128, 2048, 8),
}
# The tokens of a micro-batch with the patch shared_prompts.
SHARED = {"W3": 512, "W5": 4096}
SHAPES = {"W3": llama(30, 576, 9, 3, 1536, 49152), "W4": MODELS["SmolLM2-1.7B"]}

# ---- a run of each side, in a process of its own


def in_own_process(function, *arguments):
    """Call the function in a new process. Return its result, or raise its error."""
    os.environ |= {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def source() -> dict:
    """The provenance of a record, with the versions of TRL and Python."""
    found = provenance()
    found["versions"] |= {"trl": importlib.metadata.version("trl")}
    found["versions"] |= {"python": platform.python_version()}
    return found


def peak_memory(on_gpu: bool, imported: int) -> int:
    """The peak memory in bytes, as the docstring of this file defines it."""
    import torch

    return torch.cuda.max_memory_allocated() if on_gpu else memory("VmHWM") - imported


def train_plainrl(script, args) -> dict:
    """Train with a script. Return when it started, when each step began and ended, the metrics and the peak memory."""
    import torch
    from transformers import PreTrainedModel

    torch.set_num_threads(THREADS)
    imported, start, moments = memory("VmRSS"), time.perf_counter(), []
    sample_responses = script.sample_responses

    # The evaluation before training samples first. A step ends when the next step starts to sample. The last step ends
    # when the evaluation after training starts to sample.
    def timed(*arguments, **named):
        moments.append(time.perf_counter())
        return sample_responses(*arguments, **named)

    script.sample_responses = timed
    # As with TRL, nothing is saved: it would take longer than the steps of W4.
    unsaved = patch.object(PreTrainedModel, "save_pretrained")
    with unsaved, patch.object(script, "save_checkpoint"), tempfile.TemporaryDirectory() as folder:
        script.main(replace(args, runs_dir=folder, run_name="run"))
        metrics, _ = read_run(Path(folder, "run"))
    peak = peak_memory(args.device == "cuda", imported)
    return dict(start=start, steps=list(pairwise(moments[1:])), metrics=metrics, memory=peak)


def trl_trainer(name: str, fields: dict, **given):
    """GRPOTrainer or RLOOTrainer, with the algorithm of the scripts, and without logs or checkpoints."""
    import trl

    fields = dict(temperature=1.0, top_k=0, top_p=1.0, num_iterations=1, max_grad_norm=1.0) | fields
    fields |= dict(report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)
    if name == "grpo":
        fields["loss_type"] = "grpo"
    # TRL imports a trainer when it is asked for.
    config, trainer = getattr(trl, f"{name.upper()}Config"), getattr(trl, f"{name.upper()}Trainer")
    return trainer(args=config(**fields), **given)


def train_trl(name: str, model: Path, data: Path, reward, **fields) -> dict:
    """Train with TRL. Return when it started, when each step began and ended, and the peak memory."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(THREADS)
    imported, start, begins, ends = memory("VmRSS"), time.perf_counter(), [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments, **named):
            begins.append(time.perf_counter())

        def on_step_end(self, *arguments, **named):
            ends.append(time.perf_counter())

    on_gpu = fields["bf16"]
    fields |= dict(use_cpu=not on_gpu, gradient_checkpointing=on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        rows = load_dataset("json", data_files=str(data), split="train", cache_dir=folder)
        trl_trainer(
            name,
            fields | dict(output_dir=folder),
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            train_dataset=rows.rename_column("question", "prompt"),
            reward_funcs=reward,
            callbacks=[Clock()],
        ).train()
    steps = list(zip(begins, ends, strict=True))
    return dict(start=start, steps=steps, memory=peak_memory(on_gpu, imported))


# ---- speed


def story_prompts(folder: Path, num_prompts: int) -> list[str]:
    """Finished stories of the model, cut at a random token, so the rest of a story can have any length."""
    import grpo
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)  # else each comparison would have prompts of its own
    rng, questions = random.Random(0), []
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start = "Once upon a time, there was a little child named {0}. {0} had a {1}."
    texts = [start.format(name, thing) for name in NAMES for thing in THINGS]
    examples = [{"prompt_ids": tokenizer(text).input_ids} for text in texts]
    longest = max(len(example["prompt_ids"]) for example in examples)
    args = grpo.Args(max_new_tokens=460 - longest, sampling_tokens=2**18)
    eos_ids = torch.tensor([tokenizer.eos_token_id])
    rollout = grpo.sample_responses(args, model, examples, 1, 1.0, eos_ids)
    for k, example in enumerate(examples):
        prompt = example["prompt_ids"]
        story = prompt + rollout.response_ids[k, rollout.response_mask[k]].tolist()
        if story[-1] in eos_ids and len(questions) < num_prompts:
            cut = rng.randrange(len(prompt), len(story))
            # The first token is BOS.
            questions.append(tokenizer.decode(story[max(1, cut - 120) : cut]))
    return questions


def chat_prompts(num_prompts: int) -> list[list[dict]]:
    """Problems of GSM8K. A question is a chat: the worked examples as turns, and then the problem."""
    from utils.task import EXAMPLES

    turns = []
    for text, answer in EXAMPLES:
        turns.append({"role": "user", "content": text})
        turns.append({"role": "assistant", "content": answer})
    problems = [row["question"] for row in read(GSM8K)[:num_prompts]]
    return [[*turns, {"role": "user", "content": text}] for text in problems]


def random_model(folder: Path, shape: dict) -> list[str]:
    """Write a model with random weights, and a tokenizer of as many words. Return the words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<pad>", "</s>"] + [f"w{i}" for i in range(shape["vocab_size"] - 2)]
    vocabulary = {word: i for i, word in enumerate(words)}
    whole = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=whole, **special).save_pretrained(folder)
    ids = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    config = AutoConfig.for_model(**shape, **ids, max_position_embeddings=8192)
    # Drawing the weights takes a second on a GPU, and half a minute on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return words[2:]


def prepare(options, folder: Path) -> None:
    """Write the prompts of the workload to folder/data, and the model of W3 and W4."""
    if options.workload == "W1":
        rows = read(ADDITION / "train.jsonl")[: options.num_prompts]
        questions = [row["question"] for row in rows]
    elif options.workload == "W2":
        questions = story_prompts(options.model, options.num_prompts)
    elif options.workload == "W5":
        questions = chat_prompts(options.num_prompts)
    else:
        words = random_model(options.model, SHAPES[options.workload])
        rng, k = random.Random(0), 256 if options.workload == "W4" else 64
        questions = [" ".join(rng.choices(words, k=k)) for _ in range(options.num_prompts)]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"question": question, "answer": "0"} for question in questions]
        write(folder / "data" / f"{split}.jsonl", rows)


def length_reward(completions, **columns):
    """The number of characters / 100. It costs no time, and few groups have equal rewards, which give no signal."""
    return [len(completion) / 100 for completion in completions]


def measure_speed(side: str, options, data: Path) -> dict:
    """The wall seconds and tokens of each step after the first, and the peak memory."""
    on_gpu = options.workload == "W4"
    common = dict(num_generations=options.num_generations, beta=0.0, learning_rate=1e-5)
    if side != "trl":
        script = importlib.import_module(side)
        task = SimpleNamespace(REWARDS=[length_reward])
        script.load_task = lambda args: task
        budget = options.micro_batch_tokens if side == "grpo" else SHARED[options.workload]
        args = script.Args(
            **common,
            device="cuda" if on_gpu else "cpu",
            model=str(options.model),
            dataset=str(data),
            max_prompt_tokens={"W4": 256, "W5": 512}.get(options.workload, 128),
            examples=False,
            num_prompts=options.num_prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=1.0,
            sampling_tokens=2**18,  # the whole rollout
            num_steps=1 + options.steps,
            lr_schedule="constant_with_warmup",
            warmup_updates=0,
            micro_batch_tokens=budget,
            gradient_checkpointing=on_gpu,
            eval_size=1,
            eval_every=0,
            save_every=0,
        )
        run = train_plainrl(script, args)
        # The metrics count the tokens of all steps so far.
        tokens = [after["tokens"] - before["tokens"] for before, after in pairwise(run["metrics"])]
    else:
        tokens = []

        def reward(completions, completion_ids, **columns):
            tokens.append(sum(map(len, completion_ids)))
            if isinstance(completions[0], list):  # of a chat: one message of the assistant
                completions = [message["content"] for (message,) in completions]
            return length_reward(completions)

        num_sequences = options.num_prompts * options.num_generations
        run = train_trl(
            "grpo",
            options.model,
            data / "train.jsonl",
            reward,
            **common,
            bf16=on_gpu,
            max_completion_length=options.max_new_tokens,
            lr_scheduler_type="constant",
            # One rollout and one update per step.
            per_device_train_batch_size=options.trl_batch_size,
            gradient_accumulation_steps=num_sequences // options.trl_batch_size,
            max_steps=1 + options.steps,
        )
    seconds = [end - begin for begin, end in run["steps"][1:]]
    return dict(seconds=seconds, tokens=tokens[1:], memory=run["memory"])


def summary(runs: list[dict]) -> dict:
    """What a record says about one side."""
    seconds, tokens = [[x for run in runs for x in run[name]] for name in ("seconds", "tokens")]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "tokens_per_step": round(sum(tokens) / len(tokens)),
        "memory_mb": round(statistics.median(run["memory"] for run in runs) / 1e6),
    }


def speed(
    workload: Literal["W1", "W2", "W3", "W4", "W5"] = "W1",
    steps: int = 3,
    rounds: int = 2,
    model: Path | None = None,
) -> None:
    """The speed and memory of grpo.py and of TRL's GRPOTrainer; writes records/trl-speed.jsonl.

    Args:
        workload: what they train on; the docstring of the file lists the workloads
        steps: training steps per run, after one warm-up step
        rounds: runs of each trainer, alternating
        model: W2: the folder of stories260K; W5: of SmolLM2-135M-Instruct
    """
    if workload in ("W2", "W5") and model is None:
        sys.exit(f"{workload} needs --model FOLDER")
    fields = dict(workload=workload, threads=THREADS, steps=steps)
    fields |= zip(FIELDS, WORKLOADS[workload], strict=True)
    record = fields | dict(rounds=rounds, model=model and model.name) | source()
    if workload == "W4":
        import torch

        # In another process, because CUDA would keep memory in this one.
        record["machine"]["gpu"] = in_own_process(torch.cuda.get_device_name)
    runs = {"grpo": [], "trl": []}
    if workload in SHARED:
        runs |= {"shared_prompts": []}
    with tempfile.TemporaryDirectory() as temporary, in_place(runs):
        folder = Path(temporary)
        model = model or (ADDITION / "adder" if workload == "W1" else folder / "model")
        options = SimpleNamespace(**fields, model=model)
        in_own_process(prepare, options, folder)
        for k in range(rounds):
            for side in list(runs)[:: -1 if k % 2 else 1]:
                run = in_own_process(measure_speed, side, options, folder / "data")
                runs[side].append(run)
                print(f"round {k + 1}, {side}: {run}", flush=True)
    record |= {side: summary(runs[side]) for side in runs}
    others = [other for other in read(SPEED) if other["workload"] != workload]
    write(SPEED, sorted([*others, record], key=lambda other: other["workload"]))
    rows = [[side, *map(str, record[side].values())] for side in runs]
    print(table([workload, *record["trl"]], rows))


if __name__ == "__main__":
    tyro.cli(speed, description=__doc__)
