"""docs/speed.md's comparisons with TRL: how fast the trainers are, how much memory they need, and if they learn alike.

    pip install -r benchmark/requirements.txt
    python benchmark/compare_trl.py speed --workload W1
    python benchmark/compare_trl.py learn

Each run has a process to itself, and the order of the sides alternates. So a machine that slows down is fair to all of
them. benchmark/readme.py makes the tables and the picture from the records.

speed: grpo.py and TRL's GRPOTrainer, on one of these workloads.

    W1  the bundled model and task, 16 x 8 samples of <= 32 tokens
    W2  a 260 K story model, lengths from 5 to 384, 16 x 8 samples
        --model FOLDER: stories260K of karpathy/tinyllamas, in the format of transformers
    W3  SmolLM2-135M's shape, random weights, 4 x 4 samples of 64 tokens
    W4  SmolLM2-1.7B's shape, 16 x 8 samples of 512 tokens: needs a GPU
    W5  SmolLM2-135M, problems of GSM8K in the default prompt, 4 x 8 samples of <= 128 tokens
        --model FOLDER: real weights instead of random ones

Both trainers train the same model on the same prompts, with all prompts in every step. The model is in float32; in W4
it has bf16 autocast and recomputed activations. Both use GRPO with its std, temperature 1, no top-k and no top-p, no KL
term, one update per rollout, Adam, the same reward and the same number of threads. They draw from the same
distribution, so their lengths differ only by chance.

In W4, the trainers differ in two points. TRL samples with the float32 weights, which it rounds again at each use, and
its keys and values are in float32, too. These take 39 GB for 16 x 8 samples, grpo.py's default batch. 32 x 8 samples
would need 77 GB, which an 80 GB GPU doesn't have beside the weights. And TRL attends with torch's defaults: on a Hopper
GPU, torch tries cuDNN's attention first. grpo.py turns cuDNN's attention off.

By default, TRL's batch is the whole rollout, which is fastest, except in W4 and W5. --trl-batch-size 16, for example,
makes TRL accumulate gradients, which saves memory. grpo.py splits its updates by --micro-batch-tokens. It, too, samples
the whole rollout at once (--sampling-tokens 262144).

records/trl-speed.jsonl gets a line, which replaces the old line of the workload. For each side it has:

- seconds, lowest, highest: the whole wall time of a step (rollout, reward, update, logging), as the median over the
  steps of all rounds. The first step is the warm-up and isn't counted. TRL's time is from its on_step_begin to its
  on_step_end.
- cpu_seconds: the time that all threads together spent on a core in a step. If others use the machine as well, threads
  wait for each other and the wall times jump. Then this number with --threads 1 is fairer.
- tokens_per_second: response tokens of these steps over their wall seconds.
- memory_mb: the highest resident set of the process, minus the resident set after its imports, before any model was
  loaded. On a GPU: the most memory that torch allocated there.

learn: grpo.py, rloo.py and TRL's two trainers, for 60 steps of the bundled task. All have the same model, data (in
another order), batch, learning rate and schedule, temperature, KL coefficient and seeds, and two threads. The gradient
of the KL is the same, too: TRL 1.16 multiplies k3 by the ratio rho by default, so "TRL" turns that off, and "TRL, rho
k3" leaves it on.

records/trl-learn.jsonl gets a line for each run: the accuracy of the samples and the wall time at every step, and the
peak memory above what the imports take.
"""

import importlib.metadata
import os
import platform
import random
import shutil
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

import numpy as np
import tyro
from pictures import digest, draw_band, panels, save, smooth
from records import FOLDER, ROOT, memory, provenance, read, read_run, table, write

sys.path.insert(0, str(ROOT))

ADDITION = ROOT / "assets" / "addition"
GSM8K = ROOT / "tests" / "real" / "gsm8k" / "train.jsonl"
TOKENIZER = ROOT / "tests" / "real" / "smollm2"

# ---- speed
SPEED = FOLDER / "trl-speed.jsonl"
NAMES = "Lily Tom Ben Mia Sam Anna Max Lucy Tim Sue Jack Amy Bob Sara Leo Emma".split()
THINGS = ["red ball", "big dog", "small cat", "toy car", "blue bird"]
THINGS += ["shiny stone", "little boat", "green frog"]
# Prompts per step (B), samples per prompt (G), new tokens (R), tokens of a micro-batch of grpo.py, sequences of a batch
# of TRL. In W5, the whole rollout as one batch needs more than 24 GB.
FIELDS = "num_prompts num_generations max_new_tokens micro_batch_tokens trl_batch_size".split()
WORKLOADS = {
    "W1": (16, 8, 32, 2048, 128),
    "W2": (16, 8, 384, 2048, 128),
    "W3": (4, 4, 64, 1024, 16),
    "W4": (16, 8, 512, 16384, 16),
    "W5": (4, 8, 128, 2048, 8),
}
# Layers, width, width of the MLP, heads, and heads of keys and values.
SMOLLM2_135M, SMOLLM2_1700M = (30, 576, 1536, 9, 3), (24, 2048, 8192, 32, 32)

# ---- learn
LEARNING = FOLDER / "trl-learn.jsonl"
SEEDS, STEPS = (1, 2, 3), 60
B, G, R = 16, 8, 32
# Who trains, for each algorithm.
SIDES = {"grpo": ("PlainRL", "TRL", "TRL, rho k3"), "rloo": ("PlainRL", "TRL")}


# ---- a run of each side, in a process of its own


def in_own_process(threads: int, function, *arguments):
    """Call the function in a new process. Return its result, or raise its error."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def source() -> dict:
    """The provenance of a record, with the versions of TRL and Python."""
    found = provenance()
    found["versions"] |= {"trl": importlib.metadata.version("trl")}
    found["versions"] |= {"python": platform.python_version()}
    return found


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def peak_memory(on_gpu: bool, imported: int) -> int:
    """The peak memory in bytes, as the docstring of this file defines it."""
    import torch

    return torch.cuda.max_memory_allocated() if on_gpu else memory("VmHWM") - imported


def train_plainrl(script, threads: int, args) -> dict:
    """Train with a script. Return when it started, when each step began and ended, the metrics and the peak memory."""
    import torch
    from transformers import PreTrainedModel

    torch.set_num_threads(threads)
    imported, start, moments = memory("VmRSS"), now(), []
    sample_responses = script.sample_responses

    # The evaluation before training samples first. A step ends when the next step starts to sample. The last step ends
    # when the evaluation after training starts to sample.
    def timed(*arguments):
        moments.append(now())
        return sample_responses(*arguments)

    script.sample_responses = timed
    # As with TRL, nothing is saved: it would take longer than the steps of W4.
    unsaved = patch.object(PreTrainedModel, "save_pretrained")
    with unsaved, patch.object(script, "save_checkpoint"), tempfile.TemporaryDirectory() as folder:
        script.main(replace(args, runs_dir=folder, run_name="run"))
        metrics, _ = read_run(Path(folder, "run"))
    peak = peak_memory(args.device == "cuda", imported)
    return dict(start=start, steps=list(pairwise(moments[1:])), metrics=metrics, memory=peak)


def train_trl(name: str, threads: int, model: Path, data: Path, reward, **fields) -> dict:
    """Train with GRPOTrainer or RLOOTrainer. Return when it started, when each step began and ended, and the memory."""
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    # TRL imports a trainer when it is asked for.
    config, trainer = getattr(trl, f"{name.upper()}Config"), getattr(trl, f"{name.upper()}Trainer")
    torch.set_num_threads(threads)
    imported, start, begins, ends = memory("VmRSS"), now(), [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments, **named):
            begins.append(now())

        def on_step_end(self, *arguments, **named):
            ends.append(now())

    on_gpu = fields["bf16"]
    fields |= dict(use_cpu=not on_gpu, gradient_checkpointing=on_gpu)
    # The same algorithm as in the scripts.
    fields |= dict(temperature=1.0, top_k=0, top_p=1.0, num_iterations=1, max_grad_norm=1.0)
    if name == "grpo":
        fields["loss_type"] = "grpo"
    # Only the training, without logs or checkpoints.
    fields |= dict(report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = load_dataset("json", data_files=str(data), split="train", cache_dir=folder)
        trainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            args=config(output_dir=folder, **fields),
            train_dataset=rows.rename_column("question", "prompt"),
            reward_funcs=reward,
            callbacks=[Clock()],
        ).train()
    steps = list(zip(begins, ends, strict=True))
    return dict(start=start, steps=steps, memory=peak_memory(on_gpu, imported))


# ---- speed


def story_prompts(folder: Path, num_prompts: int) -> list[str]:
    """Finished stories of the model, cut at a random token, so the rest of a story can have any length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import grpo

    rng, questions = random.Random(0), []
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = []
    for name in NAMES:
        for thing in THINGS:
            start = (
                f"Once upon a time, there was a little child named {name}. {name} had a {thing}."
            )
            examples.append({"prompt_ids": tokenizer(start).input_ids})
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
    """Problems of GSM8K. A question is a chat: the worked examples of grpo.py as turns, and then the problem."""
    import grpo

    turns = []
    for text, answer in grpo.EXAMPLES:
        turns.append({"role": "user", "content": text})
        turns.append({"role": "assistant", "content": answer})
    problems = [row["question"] for row in read(GSM8K)[:num_prompts]]
    return [[*turns, {"role": "user", "content": text}] for text in problems]


def make_model(folder: Path, tokenizer, shape: tuple) -> None:
    """Write a model of SmolLM2's shape with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads".split()
    fields = dict(zip([*names, "num_key_value_heads"], shape, strict=True))
    fields |= dict(vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192)
    fields |= {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = LlamaConfig(**fields)
    # Drawing the weights takes a second on a GPU, and half a minute on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(options, folder: Path) -> None:
    """Write the prompts of the workload to folder/data. Write its model to folder/model if none is on disk."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    torch.manual_seed(0)
    if options.workload == "W1":
        questions = [row["question"] for row in read(ADDITION / "train.jsonl")]
        questions = questions[: options.num_prompts]
    elif options.workload == "W2":
        questions = story_prompts(options.model, options.num_prompts)
    elif options.workload == "W5":
        questions = chat_prompts(options.num_prompts)
        if options.model == folder / "model":
            make_model(options.model, AutoTokenizer.from_pretrained(TOKENIZER), SMOLLM2_135M)
    else:
        on_gpu = options.workload == "W4"
        words = ["<pad>", "</s>"] + [f"w{i}" for i in range(49150)]
        vocabulary = {word: i for i, word in enumerate(words)}
        whole = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = dict(pad_token="<pad>", eos_token="</s>")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, **special)
        make_model(folder / "model", tokenizer, SMOLLM2_1700M if on_gpu else SMOLLM2_135M)
        rng, k = random.Random(0), 256 if on_gpu else 64
        questions = [" ".join(rng.choices(words[2:], k=k)) for _ in range(options.num_prompts)]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"question": question, "answer": "0"} for question in questions]
        write(folder / "data" / f"{split}.jsonl", rows)


def length_reward(completions, **columns):
    """The number of characters / 100. It costs no time, and few groups have equal rewards, which give no signal."""
    return [len(completion) / 100 for completion in completions]


def measure_speed(side: str, options, data: Path) -> dict:
    """The wall seconds, CPU seconds and tokens of each step after the first, and the peak memory."""
    on_gpu = options.workload == "W4"
    common = dict(num_generations=options.num_generations, beta=0.0, learning_rate=1e-5)
    if side == "plainrl":
        import grpo

        grpo.REWARDS = [length_reward]
        args = grpo.Args(
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
            micro_batch_tokens=options.micro_batch_tokens,
            gradient_checkpointing=on_gpu,
            eval_size=1,
            eval_every=0,
            save_every=0,
        )
        run = train_plainrl(grpo, options.threads, args)
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
            options.threads,
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
    steps = run["steps"][1:]
    seconds, cpu_seconds = [[end[k] - begin[k] for begin, end in steps] for k in (0, 1)]
    return dict(seconds=seconds, cpu_seconds=cpu_seconds, tokens=tokens[1:], memory=run["memory"])


def summary(runs: list[dict]) -> dict:
    """What a record says about one side."""
    seconds, cpu_seconds, tokens = [
        [value for run in runs for value in run[name]]
        for name in ("seconds", "cpu_seconds", "tokens")
    ]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "lowest": round(min(seconds), 3),
        "highest": round(max(seconds), 3),
        "cpu_seconds": round(statistics.median(cpu_seconds), 3),
        "tokens_per_second": round(sum(tokens) / sum(seconds)),
        "tokens_per_step": round(sum(tokens) / len(tokens)),
        "memory_mb": round(statistics.median(run["memory"] for run in runs) / 1e6),
    }


def speed(
    workload: Literal["W1", "W2", "W3", "W4", "W5"] = "W1",
    threads: int = 2,
    steps: int = 3,
    rounds: int = 2,
    micro_batch_tokens: int | None = None,
    trl_batch_size: int | None = None,
    model: Path | None = None,
) -> None:
    """The speed and memory of grpo.py and of TRL's GRPOTrainer; writes records/trl-speed.jsonl.

    Args:
        workload: what they train on; the docstring of the file lists the workloads
        threads: threads of torch, for both trainers
        steps: training steps per run, after one warm-up step
        rounds: runs of each trainer, alternating
        micro_batch_tokens: for grpo.py; the default depends on the workload
        trl_batch_size: sequences per backward pass of TRL; default: the rollout, in W4 16, in W5 8
        model: W2: the folder of stories260K; W5: of SmolLM2-135M-Instruct, by default random weights
    """
    if workload == "W2" and model is None:
        print("W2 skipped: it needs --model FOLDER")
        return
    if workload == "W4" and shutil.which("nvidia-smi") is None:
        print("W4 skipped: it needs a GPU")
        return
    fields = dict(workload=workload, threads=threads, steps=steps)
    fields |= zip(FIELDS, WORKLOADS[workload], strict=True)
    if micro_batch_tokens is not None:
        fields["micro_batch_tokens"] = micro_batch_tokens
    if trl_batch_size is not None:
        fields["trl_batch_size"] = trl_batch_size
    record = fields | dict(rounds=rounds, model=model and model.name) | source()
    if workload == "W4":
        import torch

        # In another process, because CUDA would keep memory in this one.
        record["machine"]["gpu"] = in_own_process(threads, torch.cuda.get_device_name)
    runs = {"plainrl": [], "trl": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = model or (ADDITION / "adder" if workload == "W1" else folder / "model")
        options = SimpleNamespace(**fields, model=model)
        in_own_process(threads, prepare, options, folder)
        for k in range(rounds):
            for side in list(runs)[:: -1 if k % 2 else 1]:
                run = in_own_process(threads, measure_speed, side, options, folder / "data")
                runs[side].append(run)
                print(f"round {k + 1}, {side}: {run}", flush=True)
    record |= {side: summary(runs[side]) for side in runs}
    others = [other for other in read(SPEED) if other["workload"] != workload]
    write(SPEED, sorted([*others, record], key=lambda other: other["workload"]))
    rows = [[side, *map(str, record[side].values())] for side in runs]
    print(table([workload, *record["trl"]], rows))


# ---- learn


def measure_learning(side: str, name: str, seed: int) -> dict:
    """The accuracy of the samples and the wall seconds since the start at every step, and the peak memory.

    A script has its bundled defaults, except that it evaluates one problem, and only before and after.
    """
    if side == "PlainRL":
        script = __import__(name)
        fields = dict(seed=seed, num_steps=STEPS, device="cpu", eval_every=0, eval_size=1)
        run = train_plainrl(script, 2, replace(script.BUNDLED, **fields))
        accuracy = [record["rollout/accuracy"] for record in run["metrics"][1:]]
    else:
        from utils.rewards import accuracy_reward, format_reward

        accuracy = []

        def reward(completions, answer, **columns):
            right = accuracy_reward(completions, answer)
            accuracy.append(sum(right) / len(right))
            return [a + b for a, b in zip(right, format_reward(completions, answer), strict=True)]

        fields = dict(num_generations=G, max_completion_length=R, beta=0.01, seed=seed, bf16=False)
        fields |= dict(per_device_train_batch_size=B * G, gradient_accumulation_steps=1)
        fields |= dict(learning_rate=1e-4, lr_scheduler_type="linear", max_steps=STEPS)
        if name == "grpo":
            fields["use_bias_correction_kl"] = side == "TRL, rho k3"
        run = train_trl(name, 2, ADDITION / "adder", ADDITION / "train.jsonl", reward, **fields)
    return dict(
        accuracy=[round(value, 4) for value in accuracy],
        seconds=[round(end[0] - run["start"][0], 4) for _, end in run["steps"]],
        memory=run["memory"],
    )


def label(side: str, name: str) -> str:
    if side == "PlainRL":
        return f"{name}.py"
    return f"{name.upper()}Trainer of TRL 1.16" + side.removeprefix("TRL")


def to_reach(record: dict, level: float = 0.9) -> tuple[float, int]:
    """Seconds and responses until the mean accuracy of five steps reaches the level; NaN and 0 if it never does."""
    for k in range(4, len(record["accuracy"])):
        if sum(record["accuracy"][k - 4 : k + 1]) / 5 >= level:
            return record["seconds"][k], (k + 1) * B * G
    return float("nan"), 0


def draw(records: list[dict]) -> None:
    figure, axes = panels(1, 2, figsize=(8, 3.2), sharey=True)
    for ax, name in zip(axes[0], SIDES, strict=True):
        for color, side in enumerate(SIDES[name]):
            mine = [x for x in records if (x["name"], x["side"]) == (name, side)]
            curves = np.stack([smooth(record["accuracy"]) for record in mine])  # (seeds, steps)
            draw_band(ax, B * G * np.arange(1, STEPS + 1), curves, f"C{color}", label(side, name))
        ax.set_xlabel("responses sampled")
        ax.legend()
    axes[0, 0].set_ylabel("accuracy of the samples")
    save(figure, LEARNING.with_suffix(".svg"), digest(records))


def learn() -> None:
    """The learning curves of grpo.py, rloo.py and TRL's two trainers; writes records/trl-learn.jsonl."""
    records = []
    for seed in SEEDS:
        for name in SIDES:
            for side in SIDES[name][:: 1 if seed % 2 else -1]:
                record = dict(side=side, name=name, seed=seed, **source())
                record |= in_own_process(2, measure_learning, side, name, seed)
                records.append(record)
                last, (seconds, responses) = sum(record["accuracy"][-5:]) / 5, to_reach(record)
                print(
                    f"{name:5} {side:11} seed {seed}: last five steps {last:.3f}; 0.9 after ",
                    end="",
                )
                print(
                    f"{seconds:.1f} s, {responses} responses; all {record['seconds'][-1]:.1f} s, ",
                    end="",
                )
                print(f"{record['memory'] / 1e6:.0f} MB", flush=True)
    write(LEARNING, records)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"speed": speed, "learn": learn}, description=__doc__)
