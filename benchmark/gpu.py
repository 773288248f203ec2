"""benchmark/records/gpu.jsonl: what the scripts do on a GPU. One call measures all; each part is a record of its own.

    python benchmark/gpu.py FOLDER                                  all parts; FOLDER has SmolLM2-135M-Instruct
    python benchmark/gpu.py FOLDER --parts steps --only float16     some parts; of these, some scripts or steps
    python benchmark/gpu.py FOLDER --tiny                           tests this file, on a CPU or an emulated GPU

limits      bandwidth of a copy (read + write), FLOP/s of a matrix product, bandwidth of attention with one query
bundled     every script without arguments, on the GPU; several at a time
scripts     two steps of every script with the real model on problems of GSM8K; several at a time
steps       three steps in the shape of SmolLM2-1.7B with random weights, with the flags of plan.STEPS
arithmetic  60 steps of grpo.py with the real model on assets/arithmetic, in both precisions; several at a time
decode      where the time of a decode step goes in the shape of SmolLM2-1.7B, and with one kernel for RMSNorm
sampler     the sampler in that shape: graph on and off, and the length of a segment
update      the forward and backward passes of grpo.py and grpo_lora.py in that shape, by --micro-batch-tokens
launches    the update of the small real model: by --micro-batch-tokens, compiled, and as one CUDA graph

Random weights end few responses, so in `update` and `steps` nearly all samples have the full 300 tokens, which is the
most work that a step can cause. In `sampler`, many ids count as EOS: the lengths are geometric, with a mean of about
170 tokens. compare_trl.py measures W4, the workload for a GPU, beside TRL.
"""

import gc
import importlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from plan import MODELS, PROMPT, STEPS, count
from shared import FOLDER, ROOT, command_line, provenance, read

sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import grpo  # noqa: E402
import grpo_lora  # noqa: E402
from scripts import MULTI_PROCESS, NEEDS_VLLM, SCRIPTS  # noqa: E402

RECORDS = Path(os.environ.get("OUT", FOLDER), "gpu.jsonl")
GSM8K = ROOT / "tests" / "data" / "gsm8k"
TOKENIZER = ROOT / "tests" / "data" / "smollm2_tokenizer"
# The flags that a script needs beside --model. A teacher is the model itself.
NEEDED = {
    "dapo": ["--overlong-cache", "60", "--max-resample", "1"],
    "vapo": ["--value-warmup-steps", "1"],
    "distill": ["--teacher", "MODEL"],
}
# These scripts take one sample of each prompt.
FLAGS = {"ppo_rlhf": ["--num-prompts", "32"], "reinforce_baseline": ["--num-prompts", "32"]}
FLAGS |= {"remax": ["--num-prompts", "32"]}
# This many scripts run at a time. Each needs 3 to 8 GB.
AT_A_TIME = 9
# The runs of `arithmetic`: name -> its flags.
ARITHMETIC = {
    f"{dtype}-{seed}": ["--dtype", dtype, "--seed", seed] for seed in (1, 2, 3) for dtype in ("bfloat16", "float16")
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


def run(options, script: str, *flags, name: str | None = None) -> dict:
    """Run a script, or a copy in the scratch folder. Return its command, its seconds in all, and all its metrics."""
    name = name or script
    copied = options.scratch / f"{script}.py"
    command = [str(copied) if copied.exists() else f"{script}.py", *map(str, flags)]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
    launched = [sys.executable, *(launcher if script in MULTI_PROCESS else []), *command]
    launched += ["--runs-dir", options.scratch, "--run-name", name, "--save-every", "0"]
    if not torch.cuda.is_available():
        launched += ["--device", "cpu"]
    start = time.perf_counter()
    done = subprocess.run(launched, cwd=ROOT, capture_output=True, text=True)
    found = {"command": shlex.join(command), "seconds": round(time.perf_counter() - start, 1)}
    folder = options.scratch / name
    metrics = read(folder / "metrics.jsonl")
    shutil.rmtree(folder, ignore_errors=True)  # the next run needs the disk
    if done.returncode:
        return found | {"error": (done.stdout + done.stderr)[-3000:], "metrics": metrics}
    return found | {"metrics": metrics}


def is_wanted(options, name: str) -> bool:
    return not options.only or name in options.only


def run_all(part: str, options, flags_of: dict[str, list], script: str | None = None) -> None:
    """Run the script once for each name, AT_A_TIME at once. By default, the name is the script.

    A record of each is written as soon as it has ended.
    """
    names = [name for name in flags_of if is_wanted(options, name)]
    at_a_time = min(2 if options.tiny else AT_A_TIME, len(names))
    with ThreadPoolExecutor(max(1, at_a_time)) as pool:

        def record(name):
            found = run(options, script or name, *flags_of[name], name=name)
            write_record(part, script=script or name, name=name, at_a_time=at_a_time, **found)

        list(pool.map(record, names))


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
    names = ["grpo"] if options.tiny else [name for name in SCRIPTS if name not in NEEDS_VLLM]
    run_all("bundled", options, {name: ["--num-steps", 2] if options.tiny else [] for name in names})


def scripts(options) -> None:
    model = random_policy(options) if options.tiny else options.model
    common = ["--model", model, "--dataset", GSM8K, "--num-steps", 2, "--eval-size", 32]
    if options.tiny:
        common += ["--num-generations", 2, "--max-new-tokens", 64]
    flags_of = {}
    for name in SCRIPTS:
        if name not in NEEDS_VLLM:
            needed = [model if x == "MODEL" else x for x in NEEDED.get(name, [])]
            size = ["--num-prompts", 2] if options.tiny else FLAGS.get(name, ["--num-prompts", 4])
            flags_of[name] = [*common, *needed, *size]
    run_all("scripts", options, flags_of)


def arithmetic(options) -> None:
    flags = "--no-examples --num-prompts 8 --max-new-tokens 32 --warmup-updates 3 --eval-every 10"
    flags = [*flags.split(), "--no-gradient-checkpointing", "--dataset", "assets/arithmetic"]
    # The reward is 1 if the last number of the response is right.
    flags += ["--task", "assets/arithmetic/task.py"]
    if options.tiny:
        flags += ["--num-steps", 1, "--eval-size", 4, "--model", random_policy(options)]
    else:
        flags += ["--num-steps", 60, "--eval-size", 200, "--model", options.model]
    names = list(ARITHMETIC)[:2] if options.tiny else ARITHMETIC
    run_all("arithmetic", options, {name: [*flags, *ARITHMETIC[name]] for name in names}, "grpo")


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
    train_data, _ = grpo.load_data(args, grpo.load_task(args), tokenizer)
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


def decode(options) -> None:
    args = grpo.Args(model=str(random_policy(options)), dataset=str(GSM8K))
    rows = 2 if options.tiny else 96
    policy, _ = grpo.load_model(args, AutoTokenizer.from_pretrained(args.model))
    model = grpo.inference_copy(policy)
    del policy
    prompts = torch.randint(model.config.vocab_size, (rows, PROMPT), device=model.device)
    mask = torch.ones_like(prompts, dtype=torch.bool)
    mask[1:, :100] = False  # padding
    before, found = decode_step(model, prompts, mask)
    write_record("decode", one_kernel_for_rms_norm=False, rows=rows, **found)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(rms_norm, module)
    after, found = decode_step(model, prompts, mask)
    # Rounding alone makes a difference.
    difference = ((after - before).norm() / before.norm()).item()
    write_record("decode", one_kernel_for_rms_norm=True, rows=rows, difference=difference, **found)


@torch.no_grad()
def decode_step(model, prompts, mask) -> tuple[torch.Tensor, dict]:
    """The logits after the prompts, and milliseconds of a decode step after them.

    step_ms: the replay of its graph. kernels: name, calls and milliseconds of each kernel in the graph. head_ms: the
    head, a part of the graph. draw_ms: the draw, which comes after it.
    """
    on_gpu = torch.cuda.is_available()
    decoding = grpo.prefill(model, prompts, mask)
    logits = decoding.logits.clone()
    decoding.grow(128)  # 81 tokens are fed below
    decoding.advance(model, on_gpu)  # records the graph
    states = torch.randn(len(prompts), model.config.hidden_size, device=model.device)
    found = {
        "step_ms": milliseconds(decoding.advance, model, on_gpu),
        "head_ms": milliseconds(model.get_output_embeddings(), states),
        "draw_ms": milliseconds(grpo.draw, decoding.logits, 1.0),
    }
    with torch.profiler.profile() as profile:
        for _ in range(20):
            decoding.advance(model, on_gpu)
    events = [x for x in profile.key_averages() if x.device_type.name == "CUDA"]
    events.sort(key=lambda event: -event.self_device_time_total)
    kernels = [(x.key[:90], x.count / 20, x.self_device_time_total / 20 / 1e3) for x in events]
    found |= {"kernels_ms": sum(ms for *_, ms in kernels), "kernels": kernels[:25]}
    return logits, found


def milliseconds(function, *given) -> float:
    """The median milliseconds of a call, of three times 20 calls without a pause."""

    def calls():
        for _ in range(20):
            function(*given)

    return 1e3 * seconds(calls, 3) / 20


def rms_norm(module, states):
    """What transformers' RMSNorm computes, in one kernel."""
    return torch.nn.functional.rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)


def backward(script, args, policy, rollout) -> None:
    """The forward and backward passes of a step's only update."""
    sequences = torch.arange(len(rollout.response_ids))
    for _, part in script.micro_batches(args, rollout, sequences):
        script.compute_logprobs(policy, part, 1.0).mean().backward()


def update(options) -> None:
    for script in (grpo, grpo_lora):
        args = script.Args(model=str(random_policy(options)), dataset=str(GSM8K))
        if options.tiny:
            args = replace(args, max_new_tokens=12, num_prompts=2)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        policy, eos_ids = script.load_model(args, tokenizer)
        batch = script.load_data(args, script.load_task(args), tokenizer)[0][: args.num_prompts]
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


class Enough(Exception):
    """Raised after the steps that are measured."""


def first_steps(script, args, num_steps: int) -> list[dict]:
    """The metrics of the first steps of the script's main, which then ends: nothing is saved."""
    found = []

    def log_metrics(args, file, metrics):
        found.append(metrics)
        if metrics["step"] == num_steps:
            raise Enough

    with mock.patch.object(script, "log_metrics", log_metrics):
        try:
            script.main(args)
        except Enough:
            return found


def steps(options) -> None:
    patched = options.scratch / "host_adam.py"
    subprocess.run(["patch", "-s", "-o", patched, "grpo.py", "variants/host_adam.diff"], cwd=ROOT, check=True)
    sys.path.append(str(options.scratch))
    for name, (script, flags) in STEPS.items():
        if not is_wanted(options, name):
            continue
        try:
            metrics = three_steps(options, name, importlib.import_module(script), flags)
            calculated = count(script, MODELS["SmolLM2-1.7B"], eval_size=8, **flags)["peak"] / 1e9
            found = dict(calculated_gb=calculated, metrics=metrics)
        except Exception as error:  # such as too little memory: the others are measured all the same
            found = dict(error=f"{type(error).__name__}: {error}")
        write_record("steps", name=name, script=script, flags=flags, **found)
        gc.collect()  # the traceback of Enough held the model
        torch.cuda.empty_cache()


def three_steps(options, name: str, script, flags: dict) -> list[dict]:
    """The metrics of three steps of this script. The first one also warms up."""
    args = script.Args(model=str(random_policy(options)), dataset=str(GSM8K), eval_size=8)
    args = replace(args, runs_dir=str(options.scratch / "steps"), run_name=name, **flags)
    if options.tiny:
        args = replace(args, num_prompts=2, max_new_tokens=12)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return first_steps(script, args, 3)


def launches(options) -> None:
    """Rows of 32 tokens: for so few, starting the kernels takes longer than the kernels themselves."""
    model = random_policy(options) if options.tiny else options.model
    args = grpo.Args(model=str(model), dataset=str(ROOT / "assets" / "arithmetic"), examples=False)
    args = replace(args, num_prompts=8, max_new_tokens=32, gradient_checkpointing=False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy, eos_ids = grpo.load_model(args, tokenizer)
    batch = grpo.load_data(args, grpo.load_task(args), tokenizer)[0][: args.num_prompts]
    sampler = grpo.inference_copy(policy)
    rollout = grpo.sample_responses(args, sampler, batch, args.num_generations, 1.0, eos_ids)
    policy.train()
    rows = []
    for compiled in (False, True):
        if compiled:  # in place, so that the scripts' own functions call the compiled layers
            if options.tiny:
                break
            for layer in policy.base_model.layers:
                layer.compile(dynamic=True)
        for tokens in (2048, 8192):
            args = replace(args, micro_batch_tokens=tokens)
            call = partial(backward, grpo, args, policy, rollout)
            first = seconds(call)
            rows.append(dict(compiled=compiled, micro_batch_tokens=tokens, first=first, seconds=seconds(call, 3)))
    found = dict(rows=rows, tokens=int(rollout.response_mask.sum()))
    write_record("launches", **found)
    if torch.cuda.is_available():
        write_record("launches", **decoder_graph(args, tokenizer, rollout))


def decoder_graph(args, tokenizer, rollout) -> dict:
    """Seconds of the decoder's forward and backward pass in one micro-batch, without and with a CUDA graph."""
    policy, _ = grpo.load_model(args, tokenizer)
    decoder = policy.base_model.get_decoder()
    ids = torch.randint(0, 1000, (len(rollout.response_ids), 96), device=policy.device)

    def both_passes():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            decoder(ids, use_cache=False).last_hidden_state.float().mean().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both_passes()
    torch.cuda.current_stream().wait_stream(stream)
    eager = seconds(both_passes, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both_passes()
    graph.replay()
    return dict(name="decoder", rows=len(ids), columns=96, eager=eager, graph=seconds(graph.replay, 5))


PARTS = [limits, bundled, scripts, steps, arithmetic, decode, sampler, update, launches]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, help="a folder with SmolLM2-135M-Instruct")
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--parts", nargs="*", choices=names, default=names)
    wanted = [*SCRIPTS, *STEPS, *ARITHMETIC]
    parser.add_argument("--only", nargs="*", choices=wanted, metavar="NAME", help="; ".join(wanted))
    parser.add_argument("--tiny", action="store_true", help="self-test")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device; --tiny tests this file on a CPU")
    os.environ["HF_HUB_OFFLINE"] = "1"
    options.model = options.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        # Copies of scripts are made here: in ROOT they would be changes, and records of changed files are refused.
        options.scratch = Path(folder)
        shutil.copytree(ROOT / "utils", options.scratch / "utils")
        for part in PARTS:
            if part.__name__ in options.parts:
                try:
                    part(options)
                except Exception as error:  # the other parts are measured all the same
                    write_record(part.__name__, error=f"{type(error).__name__}: {error}")
                torch.cuda.empty_cache()  # of the part's models; nothing without a GPU


if __name__ == "__main__":
    main()
