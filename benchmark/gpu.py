"""Prints how close grpo.py comes to a GPU's limits: decoding against bandwidth, updates against matrix products.

    python benchmark/gpu.py                  random weights in the shape of SmolLM2-1.7B, one CUDA device, some minutes
    python benchmark/gpu.py --profile        also where the time goes, kernel by kernel
    python benchmark/gpu.py --vllm           instead: rollouts of grpo_vllm.py beside those of grpo.py; needs vllm
    python benchmark/gpu.py --tiny           a tiny shape, also on a CPU: tests this file, measures nothing

In a decode step, which gives each row a token, a GPU must read every weight once, and the keys and values of all rows.
So the step takes at least these bytes over the bandwidth of a device-to-device copy (read + write). The limit is the
tokens per second of such a step. generate runs all tokens of all rows here, because no token has the EOS id.

An update takes 6 FLOP per parameter and token (forward 2, backward 4). Recomputed activations, attention, and the head
for tokens of prompts aren't counted. This number over the seconds is the FLOP/s, and MFU is its share of the peak.

--vllm samples 16 x 8 responses of at most 300 tokens, and of at most 4,096, with both samplers. Their lengths are
uneven: most responses end early, and a few reach the limit.

The file answers more questions that need a GPU. Which kernel attends for one query, and how fast does it read keys and
values? How fast is decoding if query heads share a key head? What does a decode step cost without a CUDA graph? What
does recording a graph cost, in time and memory? Do the kernels ignore whole blocks of masked keys? Does a replayed
graph compute the same as single steps? How far apart are the log-probabilities of sampler and trainer?
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo
import grpo_vllm

# Dense bf16 on an H100 or H200 SXM.
NOMINAL_FLOPS = 989e12


def seconds(function, device: torch.device, repeats: int = 1) -> float:
    """The fewest wall seconds of a call, including the work on the device."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_gb(device: torch.device) -> float:
    """The most GB allocated since the last call; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def device_limits(device: torch.device, dtype: torch.dtype, tiny: bool) -> tuple[float, float]:
    """Bytes per second of a large copy (read + written), and FLOP per second of a large matrix product."""
    size, width = (2**22, 256) if tiny else (2**32, 8192)
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = source.clone()
    left, right = torch.randn(2, width, width, device=device, dtype=dtype)
    seconds(lambda: left @ right, device, 3)  # warm-up
    copied = seconds(lambda: target.copy_(source), device, 5)
    return size / copied, 2 * width**3 / seconds(lambda: left @ right, device, 20)


def attention_error(device: torch.device, dtype: torch.dtype) -> float:
    """One query over 320 keys with the first 200 masked, as in generate, against the last 120 keys alone."""
    query, key, value = torch.randn(3, 8, 32, 320, 64, device=device, dtype=dtype)
    bias = torch.zeros(8, 1, 1, 320, device=device, dtype=dtype)
    bias[..., :200] = torch.finfo(dtype).min
    attention = torch.nn.functional.scaled_dot_product_attention
    masked = attention(query[:, :, -1:], key, value, attn_mask=bias)  # (8, 32, 1, 64)
    return (
        (masked - attention(query[:, :, -1:], key[:, :, 200:], value[:, :, 200:]))
        .abs()
        .max()
        .item()
    )


def attention_bandwidth(device: torch.device, dtype: torch.dtype, tiny: bool) -> tuple[float, str]:
    """Bytes of keys and values per second for one masked query, as in generate, and the name of the longest kernel."""
    rows, columns = (2, 64) if tiny else (96, 512)
    query, key, value = torch.randn(3, rows, 32, columns, 64, device=device, dtype=dtype)
    bias = torch.zeros(rows, 1, 1, columns, device=device, dtype=dtype)

    def attend():
        # 20 calls, because launching a single one would take a large part of its time.
        for _ in range(20):
            torch.nn.functional.scaled_dot_product_attention(query[:, :, -1:], key, value, bias)

    elapsed = seconds(attend, device, 5) / 20
    with kernel_profile(device) as profile:
        seconds(attend, device)
    on_gpu = torch.profiler.ProfilerActivity.CUDA in profile.activities
    return (key.nbytes + value.nbytes) / elapsed, longest_kernel(profile.key_averages(), on_gpu)


def longest_kernel(events, on_gpu: bool) -> str:
    """The name of the GPU's longest kernel in a profile. Without a GPU, the name of the longest operator."""
    field = "self_cpu_time_total"
    if on_gpu:
        # The profile also has the operators that start the kernels, with the time of their kernels.
        events = [event for event in events if event.device_type == DeviceType.CUDA]
        field = "self_device_time_total"
    longest = max(events, key=lambda event: getattr(event, field), default=None)
    return "the profiler recorded no kernel" if longest is None else longest.key


def captures(function) -> list[float]:
    """The seconds of each recording of a CUDA graph during the call."""
    times, graph = [], torch.cuda.graph

    class TimedGraph(graph):
        def __enter__(self):
            # A recording first waits for all earlier work. So wait here, before the clock starts.
            torch.cuda.synchronize()
            self.start = time.perf_counter()
            return super().__enter__()

        def __exit__(self, *error):
            super().__exit__(*error)
            times.append(time.perf_counter() - self.start)

    torch.cuda.graph = TimedGraph
    try:
        function()
    finally:
        torch.cuda.graph = graph
    return times


def held_gb(device: torch.device) -> str:
    """What the allocator holds, and how often it had to free its blocks and try again."""
    if device.type == "cpu":
        return "0 GB reserved, 0 retries"
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    reserved = torch.cuda.memory_reserved() / 1e9
    most = torch.cuda.max_memory_reserved() / 1e9
    return f"{reserved:.1f} GB reserved, at most {most:.1f} GB, {retries} retries"


def kernel_profile(device: torch.device):
    """A profiler of the CPU, and of the GPU if there is one. An emulated GPU has no kernels to profile."""
    found = torch.profiler.supported_activities() if device.type == "cuda" else []
    gpu = torch.profiler.ProfilerActivity.CUDA
    activities = [torch.profiler.ProfilerActivity.CPU] + ([gpu] if gpu in found else [])
    return torch.profiler.profile(activities=activities)


def profiled(label: str, function, device: torch.device) -> None:
    """Print the operators and kernels of a call, sorted by their time on the device."""
    with kernel_profile(device) as profile:
        seconds(function, device)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(
        f"{label}:\n{profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70)}"
    )


def random_model(shape: dict, device: torch.device):
    """A Llama of this shape with random float32 weights and a tied head. No token ends a response."""
    config = LlamaConfig(
        **shape,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],  # vLLM reads it
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def decode_bytes(sampler, num_rows: int, context: float) -> tuple[int, float]:
    """The bytes that a decode step reads: the weights, and the keys and values of all rows."""
    config = sampler.config
    head_bytes = sampler.get_output_embeddings().weight.nbytes
    trunk_bytes = sum(p.nbytes for p in sampler.base_model.layers.parameters())
    kv_width = config.num_key_value_heads * config.head_dim
    # The keys and values of one token.
    kv_bytes = 2 * config.num_hidden_layers * kv_width * sampler.dtype.itemsize
    return trunk_bytes + head_bytes, num_rows * context * kv_bytes


def report(label: str, generate, num_rows: int, new_tokens: int, limit: float, device) -> None:
    """Time generate(new_tokens), and print its tokens per second as a share of the limit."""
    peak_gb(device)
    generate(min(new_tokens, 8))  # warm-up
    rate = num_rows * new_tokens / seconds(lambda: generate(new_tokens), device, 2)
    print(
        f"{label}: {rate:.0f} tokens/s, {rate / limit:.0%} of the limit, peak {peak_gb(device):.1f} GB",
        flush=True,
    )


def report_grouped_queries(
    shape: dict, prompt_ids, num_samples: int, new_tokens: int, bandwidth: float
) -> None:
    """Time the decoding of a model in which query heads share a key head.

    In a decode step, transformers 5.19 copies the keys and values for each query head, and 5.23 doesn't.
    """
    device = prompt_ids.device
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    num_rows = len(prompt_ids) * num_samples
    # The mean number of keys of a row, over the steps.
    context = prompt_ids.shape[1] + new_tokens / 2
    sampler = grpo.inference_copy(random_model(shape, device))
    limit = num_rows * bandwidth / sum(decode_bytes(sampler, num_rows, context))
    # No token has this id.
    eos_ids = torch.tensor([shape["vocab_size"]], device=device)

    def sample(new_tokens: int) -> None:
        args = grpo.Args(max_new_tokens=new_tokens)
        grpo.generate(args, sampler, prompt_ids, prompt_mask, num_samples, 1.0, eos_ids)

    heads = f"{shape['num_attention_heads']} query and {shape['num_key_value_heads']} key heads"
    label = (
        f"generate, CUDA graph, {heads}, {num_rows} rows, transformers {transformers.__version__}"
    )
    report(label, sample, num_rows, new_tokens, limit, device)


def time_rollout(script, args, source, examples, eos_ids: torch.Tensor) -> None:
    """Sample 8 responses to each example with the script's sampler, from a model or an engine, and print the speed."""
    lengths = torch.zeros(0)

    def sample():
        nonlocal lengths
        rollout = script.sample_responses(args, source, examples, 8, 1.0, eos_ids)
        lengths = rollout.response_mask.sum(1).float()  # (N,)

    sample()  # warm-up
    elapsed = seconds(sample, eos_ids.device, 2)
    print(f"{script.__name__}.py, at most {args.max_new_tokens} tokens: {elapsed:.2f} s,", end=" ")
    print(
        f"{lengths.mean():.0f} tokens a response, {lengths.sum() / elapsed:.0f} tokens/s",
        flush=True,
    )


def compare_rollouts(model, config, tiny: bool) -> None:
    """Time rollouts of grpo.py's sampler and of vLLM, and the hand-over of the weights. vLLM's start isn't timed.

    A random model draws all tokens about equally often. So the length of a response is about geometric, with mean
    V / (number of EOS ids).
    """
    num_prompts, prompt_tokens = (2, 8) if tiny else (16, 212)
    sizes = [(12, 6), (40, 12)] if tiny else [(300, 170), (4096, 1450)]
    prompts = torch.randint(config.vocab_size, (num_prompts, prompt_tokens)).tolist()
    examples = [{"prompt_ids": prompt} for prompt in prompts]
    for max_new_tokens, mean_tokens in sizes:
        eos_ids = torch.arange(config.vocab_size // mean_tokens, device=model.device)
        limits = dict(max_prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens)
        args = grpo.Args(**limits)
        time_rollout(grpo, args, grpo.inference_copy(model), examples, eos_ids)

        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            args = grpo_vllm.Args(**limits)
            model.name_or_path = folder  # vLLM reads the configuration there
            engine = grpo_vllm.load_engine(args, model)
        elapsed = seconds(lambda e=engine: grpo_vllm.refresh_engine(e, model), model.device, 3)
        print(f"hand-over of the weights: {elapsed:.2f} s", flush=True)
        time_rollout(grpo_vllm, args, engine, examples, eos_ids)
        engine.llm_engine.engine_core.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="grpo.py against the limits of a GPU")
    parser.add_argument("--tiny", action="store_true", help="self-test, also on a CPU")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--cudnn",
        action="store_true",
        help="use cuDNN's attention, which the scripts turn off",
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile 16 decode steps and an update"
    )
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="rollouts of vLLM and of grpo.py, instead of decoding and updates",
    )
    parser.add_argument(
        "--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True
    )
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print(
            "error: torch finds no CUDA device; --tiny runs a self-test on the CPU",
            file=sys.stderr,
        )
        raise SystemExit(2)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The dtype of the sampling copy.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    B, G, P, R = options.prompts, options.samples, options.prompt_tokens, options.new_tokens
    shape = dict(
        num_hidden_layers=24, hidden_size=2048, num_attention_heads=32, intermediate_size=8192
    )
    shape |= dict(vocab_size=49152, num_key_value_heads=32, max_position_embeddings=8192)
    # Qwen2.5-0.5B's, without the biases of its queries, keys and values.
    grouped = dict(
        num_hidden_layers=24, hidden_size=896, num_attention_heads=14, intermediate_size=4864
    )
    grouped |= dict(vocab_size=151936, num_key_value_heads=2, max_position_embeddings=8192)
    if options.tiny:
        B, G, P, R = 2, 4, 8, 16
        shape = dict(
            num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=64
        )
        shape |= dict(vocab_size=101, num_key_value_heads=2, max_position_embeddings=128)
        grouped = shape | dict(num_key_value_heads=1)
    N = B * G
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn)
    torch.set_float32_matmul_precision("high")

    bandwidth, matmul_flops = device_limits(device, dtype, options.tiny)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, self-test"
    print(f"{name}, torch {torch.__version__}; {N} rows of {P} prompt and {R} new tokens")
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s, {str(dtype)[6:]} matmul {matmul_flops / 1e12:.3g} TFLOP/s"
    )
    print(
        f"attention over a masked block of keys: off by {attention_error(device, dtype):.2g}",
        flush=True,
    )

    bytes_per_second, kernel = attention_bandwidth(device, dtype, options.tiny)
    print(f"attention of one query: {bytes_per_second / 1e12:.2f} TB/s, {kernel}", flush=True)

    prompt_ids = torch.randint(shape["vocab_size"], (B, P), device=device)  # (B, P)
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)  # (B, P)
    if not options.vllm:
        report_grouped_queries(grouped, prompt_ids[:16], G, R, bandwidth)

    # ---- the model and its sampling copy, as in grpo.py's main, but without EOS, so every row runs to the end
    model = random_model(shape, device)
    config = model.config
    peak_gb(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    # No token has this id.
    eos_ids = torch.tensor([config.vocab_size], device=device)
    if options.vllm:
        compare_rollouts(model, config, options.tiny)
        return

    # ---- decoding
    sampler = grpo.inference_copy(model)
    print(
        f"{num_parameters / 1e6:.2f} M parameters; to hold and to copy them: {peak_gb(device):.1f} GB",
        flush=True,
    )
    weight_bytes, kv_bytes = decode_bytes(sampler, N, P + R / 2)
    limit = N * bandwidth / (weight_bytes + kv_bytes)
    print(
        f"decoding limit: {limit:.0f} tokens/s ({weight_bytes / 1e9:.3g} GB of weights and", end=" "
    )
    print(f"{kv_bytes / 1e9:.3g} GB of keys and values per step)")

    def plain(new_tokens: int, cuda_graph: bool):
        args = grpo.Args(max_new_tokens=new_tokens, cuda_graph=cuda_graph)
        return grpo.generate(args, sampler, prompt_ids, prompt_mask, G, 1.0, eos_ids)

    @torch.no_grad()
    def transformers_generate(new_tokens: int):
        lengths = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0)
        sampling = dict(do_sample=True, top_k=0, top_p=1.0, num_return_sequences=G)
        sampler.generate(prompt_ids, attention_mask=prompt_mask.long(), **lengths, **sampling)

    # ---- what is not known before the first run on a GPU
    plain(min(R, 8), False)  # warm-up
    steps = min(R, 32)
    one = seconds(lambda: plain(1, False), device)  # the prefill and no decode step
    eager = (seconds(lambda: plain(steps, False), device) - one) / (steps - 1)
    print(f"a decode step without a graph: {1e3 * eager:.2f} ms", flush=True)
    times = captures(lambda: plain(R, True))
    if times:
        # Not the mean: the first recording is slower.
        median = 1e3 * statistics.median(times)
        print(f"{len(times)} recordings of a graph in {R} steps, {median:.0f} ms in the median")
        # Does each recording leak memory? One row is enough to see this, and takes less time.
        again = 2 if options.tiny else 500
        for number in range(1 + again):
            grpo.generate(
                grpo.Args(max_new_tokens=2),
                sampler,
                prompt_ids[:1],
                prompt_mask[:1],
                1,
                1.0,
                eos_ids,
            )
            if number == 0:
                print(f"a recording for one row: {held_gb(device)}; ", end="")
        print(f"{again} recordings later {held_gb(device)}", flush=True)
    # The same prompts, with more columns of padding than a block of keys has.
    padded_ids = torch.cat([torch.zeros_like(prompt_ids), prompt_ids], 1)  # (B, 2 * P)
    padded_mask = torch.cat([torch.zeros_like(prompt_mask), prompt_mask], 1)  # (B, 2 * P)
    few = grpo.Args(max_new_tokens=min(R, 8), cuda_graph=False)
    greedy = [
        grpo.generate(few, sampler, *prompts, 1, 0.0, eos_ids)
        for prompts in ((prompt_ids, prompt_mask), (padded_ids, padded_mask))
    ]
    finite = all(bool(x[2].isfinite().all()) for x in greedy)
    off = (greedy[0][2][:, 0] - greedy[1][2][:, 0]).abs().max()
    print(
        f"{P} columns of padding: log-probabilities finite: {finite}, off by {off:.2g}", flush=True
    )

    report("generate, CUDA graph", lambda new_tokens: plain(new_tokens, True), N, R, limit, device)
    report("generate, no graph", lambda new_tokens: plain(new_tokens, False), N, R, limit, device)
    samples = []
    for cuda_graph in (True, False):
        torch.manual_seed(0)
        samples.append(plain(R, cuda_graph))
    same = (samples[0][0] == samples[1][0]).cumprod(1).bool()  # (N, R)
    gap = (samples[0][2] - samples[1][2]).abs()  # (N, R)
    print(
        f"graph and no graph: {same.float().mean():.1%} of the tokens come before the first that differs, ",
        end="",
    )
    print(f"log-probabilities off by {gap[same].max():.2g} at most there", flush=True)
    if options.profile:
        profiled("16 decode steps", lambda: plain(min(R, 16), False), device)

    # ---- one update on a rollout
    # Three tensors, (N, R) each.
    sampled = plain(R, True)
    response_mask = sampled[1]  # (N, R)
    prompts = [x.repeat_interleave(G, 0) for x in (prompt_ids, prompt_mask)]  # (N, P) each
    rollout = grpo.Rollout(*prompts, *sampled)
    advantages = torch.randn(N, 1, device=device)  # (N, 1)
    if options.gradient_checkpointing:
        # As in grpo.py's load_model.
        model.gradient_checkpointing_enable(dict(use_reentrant=False, preserve_rng_state=False))
    model.train(options.gradient_checkpointing)
    matmul = torch.backends.cuda.matmul
    for reduced in (True, False):
        matmul.allow_bf16_reduced_precision_reduction = reduced
        with torch.no_grad():
            logprobs = grpo.compute_logprobs(model, rollout.select([0, 1]), 1.0)
        mean_gap = (logprobs - rollout.sampled_logprobs[:2]).abs().mean()
        print(f"sampler against trainer, reduced bf16 sums {reduced}: {mean_gap:.2g} nats a token")
    matmul.allow_bf16_reduced_precision_reduction = True  # torch's default
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)
    args = grpo.Args(beta=0.0, micro_batch_tokens=options.micro_batch_tokens)

    def update() -> None:
        for rows, part in grpo.micro_batches(args, model, rollout, torch.arange(N)):
            logprobs = grpo.compute_logprobs(model, part, 1.0)  # (n, R)
            loss, _ = grpo.policy_loss(
                args,
                logprobs,
                logprobs.detach(),
                logprobs.detach(),
                advantages[rows],
                response_mask[rows],
                num_seqs=N,
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    update()
    peak_gb(device)
    elapsed, tokens = seconds(update, device, 2), N * (P + R)
    head_parameters = model.get_output_embeddings().weight.numel()
    flops = 6 * ((num_parameters - head_parameters) * tokens + head_parameters * N * R) / elapsed
    print(
        f"update: {tokens / elapsed:.0f} tokens/s (prompts included), {flops / 1e12:.3g} TFLOP/s, MFU ",
        end="",
    )
    print(
        f"{flops / matmul_flops:.0%} of the measured matmul, {flops / NOMINAL_FLOPS:.0%} of 989 TFLOP/s, ",
        end="",
    )
    print(
        f"peak {peak_gb(device):.1f} GB, micro-batches of {args.micro_batch_tokens} tokens, gradient checkpointing "
        f"{'on' if options.gradient_checkpointing else 'off'}"
    )
    if options.profile:
        profiled("an update", update, device)
    print(f"allocator: {held_gb(device)}", flush=True)
    # model.generate comes last, because it may run out of memory. Nothing needs Adam's averages any more.
    optimizer.state.clear()
    torch.cuda.empty_cache()
    report("model.generate", transformers_generate, N, R, limit, device)


if __name__ == "__main__":
    main()
