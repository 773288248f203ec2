"""benchmark/records/gpu.jsonl: what the scripts do on a GPU. One call measures all; each part is a record of its own.

    python benchmark/gpu.py FOLDER                     all parts; FOLDER has SmolLM2-135M-Instruct
    python benchmark/gpu.py FOLDER --parts limits      some parts
    python benchmark/gpu.py FOLDER --tiny              tests this file, on a CPU or an emulated GPU

limits      bandwidth of a copy (read + write), FLOP/s of a matrix product, bandwidth of attention with one query
bundled     grpo.py without arguments, on the GPU
scripts     two steps of each of the six main scripts with the real model on problems of GSM8K
arithmetic  40 steps of grpo.py with the real model on assets/arithmetic: its curve
sampler     the sampler on random weights in the shape of SmolLM2-1.7B: graph on and off, and the length of a segment
update      the forward and backward passes of grpo.py and grpo_lora.py in that shape, by --micro-batch-tokens
steps       two steps of both, beside the peak that memory.py calculates

Random weights end few responses, so in `update` and `steps` nearly all samples have the full 300 tokens, which is the
most work that a step can cause. In `sampler`, many ids count as EOS: the lengths are geometric, with a mean of about
170 tokens. compare_trl.py measures W4, the workload for a GPU, beside TRL.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from memory import MODELS, count
from records import FOLDER, ROOT, command_line, provenance, read

sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
import grpo_lora  # noqa: E402

RECORDS = Path(os.environ.get("OUT", FOLDER), "gpu.jsonl")
GSM8K = ROOT / "tests" / "real" / "gsm8k"
TOKENIZER = ROOT / "tests" / "real" / "smollm2"
# The flags that a script needs beside --model.
SIX = {
    "grpo": [],
    "dr_grpo": [],
    "dapo": ["--overlong-cache", "60", "--max-resample", "1"],
    "rloo": [],
    "reinforce_baseline": [],
    "ppo_rlhf": ["--value-init", "policy"],
}
STEPS = {
    "default": ("grpo", {}),
    "80 GB": ("grpo", {"sampling_tokens": 131072, "micro_batch_tokens": 8192}),
    "lora": ("grpo_lora", {}),
}
# The settings of `sampler`: graph, columns of a segment, and --sampling-tokens.
SAMPLING = [(True, segment, 131072) for segment in (128, 64, 256)]
SAMPLING += [(True, 128, 49152), (False, 128, 131072)]
TINY = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2)


def write_record(part: str, **found) -> None:
    """Append a record to RECORDS, and print it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, self-test"
    record = {"part": part, "gpu": gpu, **provenance(), **found}
    RECORDS.parent.mkdir(exist_ok=True)
    with RECORDS.open("a", encoding="utf-8") as file:
        print(json.dumps(record), file=file)
    print(part, json.dumps(found)[:1500], flush=True)


def seconds(function, repeats: int = 1) -> float:
    """The median wall seconds of a call, including the work on the device."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(script: str, name: str, *flags, kill_after: int | None = None) -> dict:
    """Run a script, or kill it after a step. Return its command, its seconds in all, and all its metrics."""
    command = [f"{script}.py" if "/" not in script else script, *map(str, flags)]
    launched = [sys.executable, *command, "--run-name", name]
    if not torch.cuda.is_available():
        launched += ["--device", "cpu"]
    metrics_file = Path(flags[flags.index("--runs-dir") + 1], name, "metrics.jsonl")
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(launched, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.05)
            if kill_after and len(read(metrics_file)) > kill_after:
                process.kill()
                process.wait()
        log.seek(0)
        printed = log.read()
    found = {"command": " ".join(command), "seconds": round(time.perf_counter() - start, 1)}
    metrics = read(metrics_file)
    if not kill_after and process.returncode or len(metrics) < 2:
        return found | {"error": printed[-3000:], "metrics": metrics}
    shutil.rmtree(metrics_file.parent)  # the next run needs the disk
    return found | {"metrics": metrics}


def limits(options) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size, width = (2**20, 64) if options.tiny else (2**32, 8192)
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = source.clone()
    left, right = torch.randn(2, width, width, device=device, dtype=dtype)
    rows, columns = (2, 64) if options.tiny else (96, 512)
    query, key, value = torch.randn(3, rows, 32, columns, 64, device=device, dtype=dtype)
    mask = torch.ones(rows, 1, 1, columns, dtype=torch.bool, device=device)
    mask[..., :100] = False  # a prompt's padding

    def attend():
        for _ in range(20):  # a single call would mostly wait for its launch
            torch.nn.functional.scaled_dot_product_attention(query[:, :, -1:], key, value, mask)

    for function in (lambda: target.copy_(source), lambda: left @ right, attend):
        seconds(function, 3)  # warm-up
    write_record(
        "limits",
        copy_tb_s=size / seconds(lambda: target.copy_(source), 10) / 1e12,
        matmul_tflop_s=2 * width**3 / seconds(lambda: left @ right, 20) / 1e12,
        attention_tb_s=20 * (key.nbytes + value.nbytes) / seconds(attend, 10) / 1e12,
    )


def bundled(options) -> None:
    flags = ["--num-steps", 2] if options.tiny else []
    found = run("grpo", "bundled", "--runs-dir", options.scratch, "--save-every", 0, *flags)
    write_record("bundled", **found)


def scripts(options) -> None:
    flags = ["--runs-dir", options.scratch, "--model", options.model, "--dataset", GSM8K]
    flags += ["--num-steps", 2, "--save-every", 0]
    if options.tiny:
        flags += ["--num-prompts", 2, "--num-generations", 2, "--max-new-tokens", 64]

    for name in ["grpo"] if options.tiny else SIX:
        write_record("scripts", script=name, **run(name, name, *flags, *SIX[name]))


def arithmetic(options) -> None:
    # The copy of README.md: the reward is 1 if the last number of the response is right.
    text = (ROOT / "grpo.py").read_text(encoding="utf-8")
    copied = ROOT / "arithmetic.py"
    reward = "REWARDS = [lenient_accuracy_reward]"
    copied.write_text(re.sub("^REWARDS = .*", reward, text, flags=re.MULTILINE), encoding="utf-8")
    flags = "--no-examples --num-prompts 8 --max-new-tokens 32 --warmup-updates 3 --eval-every 10 --eval-size 200"
    flags = [*flags.split(), "--no-gradient-checkpointing", "--save-every", 0]
    flags += ["--num-steps", 1 if options.tiny else 40]
    flags += ["--model", options.model, "--dataset", "assets/arithmetic", "--runs-dir", options.scratch]
    write_record("arithmetic", **run("arithmetic", "arithmetic", *flags))
    copied.unlink()


def random_policy(options) -> Path:
    """A folder with random weights in the shape of SmolLM2-1.7B, and the tokenizer of SmolLM2."""
    folder = options.scratch / "policy"
    if not folder.exists():
        config = MODELS["SmolLM2-1.7B"] | (TINY if options.tiny else {})
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        ids = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)
        config = AutoConfig.for_model(**config, **ids, max_position_embeddings=8192)
        # Drawing the weights takes a second on a GPU, and many seconds on a CPU.
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return folder


def sampler(options) -> None:
    args = grpo.Args(model=str(random_policy(options)), dataset=str(GSM8K), eval_size=8)
    if options.tiny:
        args = replace(args, max_new_tokens=4, num_prompts=2, num_generations=2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy, _ = grpo.load_model(args, tokenizer)
    train_data, _ = grpo.load_data(args, tokenizer)
    batch = train_data[: args.num_prompts]
    model = grpo.inference_copy(policy)
    del policy
    eos_ids = torch.arange(model.config.vocab_size // 170, device=model.device)

    def sample(args):
        torch.manual_seed(0)
        return grpo.sample_responses(args, model, batch, args.num_generations, 1.0, eos_ids)

    found, texts = [], []
    for cuda_graph, segment, sampling_tokens in SAMPLING:
        grpo.SEGMENT["cuda"] = segment
        args = replace(args, cuda_graph=cuda_graph, sampling_tokens=sampling_tokens)
        rollout = sample(args)  # the warm-up
        texts.append(rollout.response_ids)
        elapsed = seconds(partial(sample, args), 1 if options.tiny else 3)
        num_tokens = int(rollout.response_mask.sum())
        row = dict(graph=cuda_graph, segment=segment, sampling_tokens=sampling_tokens)
        found.append(row | dict(seconds=elapsed, tokens=num_tokens))
    # The first and the last setting differ in the graph alone. Rounding may differ: then tokens differ from one on.
    same = (texts[0] == texts[-1]).cumprod(1).float().mean().item()
    write_record("sampler", rows=found, same_before_first_difference=same)


def backward(script, args, policy, rollout) -> None:
    """The forward and backward passes of a step's only update."""
    sequences = torch.arange(len(rollout.response_ids))
    for _, part in script.micro_batches(args, policy, rollout, sequences):
        script.compute_logprobs(policy, part, 1.0).mean().backward()


def update(options) -> None:
    for script in (grpo, grpo_lora):
        args = script.Args(model=str(random_policy(options)), dataset=str(GSM8K))
        if options.tiny:
            args = replace(args, max_new_tokens=12, num_prompts=2)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        policy, eos_ids = script.load_model(args, tokenizer)
        batch = script.load_data(args, tokenizer)[0][: args.num_prompts]
        given = (batch, args.num_generations, 1.0, eos_ids)
        rollout = grpo.sample_responses(args, grpo.inference_copy(policy), *given)
        if script is grpo_lora:
            policy = script.add_adapters(args, policy)
        policy.train()
        rows = []
        for tokens in (2048, 4096, 8192, 16384):
            args = replace(args, micro_batch_tokens=tokens)
            call = partial(backward, script, args, policy, rollout)
            call()  # the warm-up
            policy.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            row = dict(micro_batch_tokens=tokens, seconds=seconds(call))
            rows.append(row | dict(peak_gb=torch.cuda.max_memory_allocated() / 1e9))
        write_record("update", script=script.__name__, rows=rows)


def steps(options) -> None:
    model = random_policy(options)
    for name, (script, more) in STEPS.items():
        flags = ["--runs-dir", options.scratch, "--model", model, "--dataset", GSM8K]
        flags += ["--eval-size", 8, *[f"--{key}={value}" for key, value in more.items()]]
        if options.tiny:
            flags += ["--num-prompts", 2, "--max-new-tokens", 12]
        calculated = count(script, MODELS["SmolLM2-1.7B"], **more)["peak"] / 1e9
        found = run(script, "steps", *flags, kill_after=2)
        write_record("steps", name=name, script=script, calculated_gb=calculated, **found)


PARTS = [limits, bundled, scripts, arithmetic, sampler, update, steps]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, help="a folder with SmolLM2-135M-Instruct")
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--parts", nargs="*", choices=names, default=names)
    parser.add_argument("--tiny", action="store_true", help="self-test")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device; --tiny tests this file on a CPU")
    os.environ["HF_HUB_OFFLINE"] = "1"
    options.model = options.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        options.scratch = Path(folder)
        for part in PARTS:
            if part.__name__ in options.parts:
                try:
                    part(options)
                except Exception as error:  # the other parts are measured all the same
                    write_record(part.__name__, error=f"{type(error).__name__}: {error}")
                torch.cuda.empty_cache()  # of the part's models; nothing without a GPU


if __name__ == "__main__":
    main()
