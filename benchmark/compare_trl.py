"""records/trl-cpu.txt, docs/speed.md's comparison with TRL: seconds per step, tokens per second, peak memory.

    pip install -r benchmark/requirements.txt
    python benchmark/compare_trl.py --workload W1  the bundled model and task, 16 x 8 samples of <= 32 tokens
    python benchmark/compare_trl.py --workload W2  a 260 K story model, lengths from 5 to 384, 16 x 8 samples
    python benchmark/compare_trl.py --workload W3  SmolLM2-135M's shape, random weights, 4 x 4 samples of 64 tokens
    python benchmark/compare_trl.py --workload W4  SmolLM2-1.7B's shape, 16 x 8 samples of 512 tokens: needs a GPU
    python benchmark/compare_trl.py --workload W5  SmolLM2-135M, problems of GSM8K in the default prompt, 4 x 8 samples
                                                   of <= 128 tokens; --model FOLDER: real weights instead of random ones

Both trainers train the same model on the same prompts, with all prompts in every step. The model is in float32; in W4
it has bf16 autocast and recomputed activations. Both use GRPO with its std, temperature 1, no top-k and no top-p, no KL
term, one update per rollout, Adam, the same reward and the same number of threads. They draw from the same
distribution, so their lengths differ only by chance. The runs alternate, and each run has a process to itself.

In W4, the trainers differ in two points. TRL samples with the float32 weights, which it rounds again at each use, and
its keys and values are in float32, too. These take 39 GB for 16 x 8 samples, grpo.py's default batch. 32 x 8 samples
would need 77 GB, which an 80 GB GPU doesn't have beside the weights. And TRL attends with torch's defaults: on a Hopper
GPU, torch tries cuDNN's attention first. grpo.py turns cuDNN's attention off.

- seconds per step: the whole wall time of a step (rollout, reward, update, logging), as the median over the steps of
  all rounds. The first step is the warm-up and isn't counted. TRL's time is from its on_step_begin to its on_step_end.
- CPU seconds per step: the time that all threads together spent on a core. If others use the machine as well, threads
  wait for each other and the wall times jump. Then this number with --threads 1 is fairer.
- tokens per second: response tokens of these steps over their wall seconds.
- peak memory: the highest resident set of the process, minus the resident set after its imports, before any model was
  loaded. On a GPU: the most memory that torch allocated there.

By default, TRL's batch is the whole rollout, which is fastest. --trl-batch-size 16, for example, makes TRL accumulate
gradients, which saves memory; 16 is the default of W4, and 8 of W5. grpo.py splits its updates by --micro-batch-tokens,
whose value for each workload is in WORKLOADS. grpo.py, too, samples the whole rollout at once (--sampling-tokens
262144).
"""

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import ROOT, memory

STORIES = ROOT.parent / "shared" / "models" / "stories260K"
STORY_PROMPTS = ROOT.parent / "shared" / "data" / "stories" / "prompts.jsonl"
# Prompts per step (B), samples per prompt (G), new tokens (R), tokens of a micro-batch of grpo.py.
WORKLOADS = {
    "W1": dict(num_prompts=16, num_generations=8, max_new_tokens=32, micro_batch_tokens=2048),
    "W2": dict(num_prompts=16, num_generations=8, max_new_tokens=384, micro_batch_tokens=2048),
    "W3": dict(num_prompts=4, num_generations=4, max_new_tokens=64, micro_batch_tokens=1024),
    "W4": dict(
        num_prompts=16,
        num_generations=8,
        max_new_tokens=512,
        micro_batch_tokens=16384,
        trl_batch_size=16,
    ),
    "W5": dict(
        num_prompts=4,
        num_generations=8,
        max_new_tokens=128,
        micro_batch_tokens=2048,
        trl_batch_size=8,  # the whole rollout needs more than 24 GB
    ),
}
GSM8K = ROOT / "tests" / "real" / "gsm8k" / "train.jsonl"
TOKENIZER = ROOT / "tests" / "real" / "smollm2"
SMOLLM2_135M = dict(
    num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3
)
SMOLLM2_135M |= dict(intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)
LEARNING_RATE = 1e-5


def length_reward(completions, **columns):
    """The number of characters / 100. It costs no time, and few groups have equal rewards, which give no signal.

    Both sides call this function: grpo.py with the columns of the data, and run_trl's reward without them.
    """
    return [len(completion) / 100 for completion in completions]


def peak_memory(options, imported: int) -> int:
    """The peak memory in bytes, as the docstring of this file defines it."""
    import torch

    return (
        torch.cuda.max_memory_allocated()
        if options.workload == "W4"
        else memory("VmHWM") - imported
    )


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def prepare(options, folder: Path) -> None:
    """Write the prompts of the workload to folder/data. Write its model to folder/model if none is on disk."""
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    import grpo

    torch.manual_seed(0)
    rng = random.Random(0)
    B = options.num_prompts
    if options.workload == "W1":
        lines = (ROOT / "assets" / "addition" / "train.jsonl").read_text().splitlines()
        questions = [json.loads(line)["question"] for line in lines[:B]]
    elif options.workload == "W2":
        # Finished stories of the model, cut at a random token, so the rest of a story can have any length.
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(STORIES),
            AutoTokenizer.from_pretrained(STORIES),
        )
        starts = [json.loads(line)["question"] for line in STORY_PROMPTS.read_text().splitlines()]
        examples = [{"prompt_ids": tokenizer(start).input_ids} for start in starts]
        args = grpo.Args(
            max_new_tokens=460 - max(len(example["prompt_ids"]) for example in examples),
            sampling_tokens=2**18,
        )
        eos_ids = torch.tensor([tokenizer.eos_token_id])
        rollout = grpo.sample_responses(
            args, model, examples, num_samples=1, temperature=1.0, eos_ids=eos_ids
        )
        questions = []
        for example, response, mask in zip(
            examples, rollout.response_ids, rollout.response_mask, strict=True
        ):
            prompt, story = example["prompt_ids"], example["prompt_ids"] + response[mask].tolist()
            if story[-1] in eos_ids and len(questions) < B:
                cut = rng.randrange(len(prompt), len(story))
                # The first token is BOS.
                start = max(1, cut - 120)
                questions.append(tokenizer.decode(story[start:cut]))
    elif options.workload == "W5":
        # A question is a chat: the worked examples of grpo.py as turns, and then the problem.
        turns = []
        for text, answer in grpo.EXAMPLES:
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": answer})
        problems = [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()[:B]]
        questions = [[*turns, {"role": "user", "content": text}] for text in problems]
        if not options.model:
            tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
            config = LlamaConfig(**SMOLLM2_135M, max_position_embeddings=8192)
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
    else:
        words = ["<pad>", "</s>"] + [f"w{i}" for i in range(49150)]
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
        )
        shape, prompt_tokens = SMOLLM2_135M | dict(max_position_embeddings=512), 64
        if options.workload == "W4":
            shape |= dict(
                num_hidden_layers=24,
                hidden_size=2048,
                num_attention_heads=32,
                num_key_value_heads=32,
            )
            shape, prompt_tokens = (
                shape | dict(intermediate_size=8192, max_position_embeddings=1024),
                256,
            )
        config = LlamaConfig(**shape, pad_token_id=0, bos_token_id=None, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        questions = [" ".join(rng.choices(words[2:], k=prompt_tokens)) for _ in range(B)]
    (folder / "data").mkdir()
    rows = "".join(
        json.dumps({"question": question, "answer": "0"}) + "\n" for question in questions
    )
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text(rows)


def run_plainrl(options, folder: Path) -> dict:
    sys.path.insert(0, str(ROOT))
    import torch

    import grpo

    torch.set_num_threads(options.threads)
    imported = memory("VmRSS")
    grpo.REWARDS = [length_reward]
    starts = []
    sample_responses = grpo.sample_responses

    # A step ends when the next step starts to sample. The last step ends when the evaluation starts to sample.
    def timed(args, model, examples, num_samples, temperature, eos_ids):
        starts.append((now(), num_samples))
        return sample_responses(args, model, examples, num_samples, temperature, eos_ids)

    grpo.sample_responses = timed
    args = dict(
        num_prompts=options.num_prompts,
        num_generations=options.num_generations,
        temperature=1.0,
        beta=0.0,
    )
    args |= dict(
        max_new_tokens=options.max_new_tokens, micro_batch_tokens=options.micro_batch_tokens
    )
    args |= dict(learning_rate=LEARNING_RATE, lr_schedule="constant_with_warmup", warmup_updates=0)
    on_gpu = options.workload == "W4"
    args |= dict(gradient_checkpointing=on_gpu, device="cuda" if on_gpu else "cpu")
    args |= dict(
        num_steps=1 + options.steps, eval_size=1, eval_every=0, save_every=0, examples=False
    )
    # grpo.py samples the whole rollout at once.
    max_prompt_tokens = {"W4": 256, "W5": 512}.get(options.workload, 128)
    args |= dict(max_prompt_tokens=max_prompt_tokens, sampling_tokens=2**18)
    args |= dict(
        model=str(options.model), dataset=str(folder / "data"), runs_dir=str(folder), run_name="run"
    )
    grpo.main(grpo.Args(**args))
    first = next(
        k for k, (_, num_samples) in enumerate(starts) if num_samples == options.num_generations
    )
    times = [moment for moment, _ in starts[first : first + 2 + options.steps]]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    # The tokens so far, at steps 0, 1, ...
    tokens = [json.loads(line)["tokens"] for line in lines]
    return dict(
        seconds=[b[0] - a[0] for a, b in zip(times[1:], times[2:], strict=False)],
        cpu_seconds=[b[1] - a[1] for a, b in zip(times[1:], times[2:], strict=False)],
        tokens=[b - a for a, b in zip(tokens[1:], tokens[2:], strict=False)],
        memory=peak_memory(options, imported),
    )


def run_trl(options, folder: Path) -> dict:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    imported = memory("VmRSS")
    begins, ends, tokens = [], [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            begins.append(now())
            tokens.append(0)

        def on_step_end(self, *args, **kwargs):
            ends.append(now())

    def reward(completions, completion_ids, **kwargs):
        tokens[-1] += sum(map(len, completion_ids))
        if isinstance(completions[0], list):  # of a chat: one message of the assistant
            completions = [message["content"] for (message,) in completions]
        return length_reward(completions)

    on_gpu = options.workload == "W4"
    num_sequences = options.num_prompts * options.num_generations
    batch_size = options.trl_batch_size or num_sequences
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        # The same algorithm as in grpo.py.
        num_generations=options.num_generations,
        max_completion_length=options.max_new_tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        loss_type="grpo",
        num_iterations=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        # One rollout and one update per step.
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=num_sequences // batch_size,
        max_steps=1 + options.steps,
        # Only the training, without logs or checkpoints.
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=on_gpu,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = load_dataset(
        "json",
        data_files=str(folder / "data" / "train.jsonl"),
        split="train",
        cache_dir=str(folder),
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        args=config,
        train_dataset=rows.rename_column("question", "prompt"),
        reward_funcs=reward,
        callbacks=[Clock()],
    )
    trainer.train()
    seconds, cpu_seconds = [
        [end[k] - begin[k] for begin, end in zip(begins, ends, strict=True)][1:] for k in (0, 1)
    ]
    return dict(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        tokens=tokens[1:],
        memory=peak_memory(options, imported),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="grpo.py against TRL's GRPOTrainer")
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch, for both trainers"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="training steps per run, after one warm-up step"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each trainer, alternating")
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="for grpo.py; default: see WORKLOADS"
    )
    parser.add_argument(
        "--trl-batch-size",
        type=int,
        help="sequences per backward pass of TRL; default: the rollout, in W4 16",
    )
    parser.add_argument("--model", help="W5: the folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--one", choices=("prepare", "plainrl", "trl"), help="run this part alone, in --folder"
    )
    parser.add_argument("--folder", type=Path, help="folder for --one")
    options = parser.parse_args()
    for name, value in WORKLOADS[options.workload].items():
        setattr(options, name, getattr(options, name, None) or value)
    if options.workload == "W2" and not (STORIES.is_dir() and STORY_PROMPTS.is_file()):
        print(f"W2 skipped: it needs the model {STORIES} and the prompts {STORY_PROMPTS}")
        return
    if options.workload == "W4" and shutil.which("nvidia-smi") is None:
        print("W4 skipped: it needs a GPU")
        return

    if options.one is not None:
        if not options.model and options.one != "prepare":
            model = {"W1": ROOT / "assets" / "addition" / "adder", "W2": STORIES}
            options.model = model.get(options.workload, options.folder / "model")
        result = {"prepare": prepare, "plainrl": run_plainrl, "trl": run_trl}[options.one](
            options, options.folder
        )
        (options.folder / f"{options.one}.json").write_text(json.dumps(result))
        return

    results = {"plainrl": [], "trl": []}
    with tempfile.TemporaryDirectory() as shared:
        settings = [
            f"--{name}={getattr(options, name)}" for name in ("workload", "threads", "steps")
        ]
        settings += [f"--micro-batch-tokens={options.micro_batch_tokens}"]
        settings += [f"--trl-batch-size={options.trl_batch_size}"] if options.trl_batch_size else []
        settings += [f"--model={options.model}"] if options.model else []
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false"}

        def run_one(name: str) -> dict:
            command = [sys.executable, __file__, *settings, f"--one={name}", f"--folder={shared}"]
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"error: the {name} run failed\n{done.stdout[-3000:]}")
            subprocess.run(["rm", "-rf", f"{shared}/run", f"{shared}/trl"], check=True)
            return json.loads(Path(shared, f"{name}.json").read_text())

        run_one("prepare")
        for k in range(options.rounds):
            for name in list(results)[:: -1 if k % 2 else 1]:
                results[name].append(run_one(name))
                print(f"round {k + 1}, {name}: {results[name][-1]}", file=sys.stderr)

    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl")
    )
    print(f"$ python benchmark/compare_trl.py {' '.join(sys.argv[1:])}")
    print(
        f"{options.workload}: {WORKLOADS[options.workload] | dict(micro_batch_tokens=options.micro_batch_tokens)}"
    )
    print(
        f"{packages}, python {sys.version.split()[0]}; {options.threads} threads of {os.cpu_count()} cores"
    )
    print(f"{options.rounds} rounds of {options.steps} steps after one of warm-up", end="")
    print(f"; TRL's batch: {options.trl_batch_size or 'the whole rollout'}")
    rows = {}
    for name, runs in results.items():
        seconds = [value for run in runs for value in run["seconds"]]
        cpu_seconds = [value for run in runs for value in run["cpu_seconds"]]
        tokens = [value for run in runs for value in run["tokens"]]
        rows[name] = [
            statistics.median(seconds),
            min(seconds),
            max(seconds),
            statistics.median(cpu_seconds),
        ]
        rows[name] += [sum(tokens) / sum(seconds), sum(tokens) / len(tokens)]
        rows[name] += [statistics.median(run["memory"] for run in runs) / 1e6]
    print(
        f"{'':8}{'s/step':>9}{'min':>9}{'max':>9}{'CPU s/step':>12}{'tokens/s':>10}{'tokens/step':>13}{'peak MB':>9}"
    )
    for name, (median, low, high, cpu, rate, tokens, peak) in rows.items():
        print(
            f"{name:8}{median:9.3f}{low:9.3f}{high:9.3f}{cpu:12.3f}{rate:10.0f}{tokens:13.0f}{peak:9.0f}"
        )
    ratios = [b / a for a, b in zip(rows["plainrl"], rows["trl"], strict=True)]
    print(
        f"plainrl is {ratios[0]:.2f} times as fast per step (by the median; {ratios[1]:.2f} by the minimum, ",
        end="",
    )
    print(f"{ratios[3]:.2f} by CPU time,")
    print(
        f"{1 / ratios[4]:.2f} in tokens per second) and needs {1 / ratios[6]:.2f} of TRL's memory"
    )


if __name__ == "__main__":
    main()
