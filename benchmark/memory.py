"""The tables of docs/train.md on memory and time, by calculation: python benchmark/memory.py

The first has the peak of each model with each script, the second the seconds of a step on each card. No weights are
loaded: the shapes from each model's config.json are in MODELS below. For the parts of one peak, or for other flags:

    python benchmark/memory.py grpo_lora SmolLM2-1.7B --sampling-tokens 24576
    python benchmark/memory.py grpo path/to/model        a folder with a config.json

Weights, averages, gradients, copies, keys and values are exact. Activations are calculated for a decoder with a gated
MLP, and are within 15 % of the peak that tests/test_cuda.py measures on an emulated GPU.
Two things aren't counted: the memory that the allocator loses between blocks, and CUDA's context of half a GB. A card
of n GB counts as n * 1e9 bytes. Most cards report 3 to 7 % more, and these bytes are left for both.
"""

import json
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from records import ROOT, command_line, fill, table

# Tokens of a long prompt in the recipe: the examples, a GSM8K question and a template.
PROMPT = 330
# The scripts whose memory this file counts.
COUNTED = ["grpo", "grpo_lora", "ppo_rlhf"]
# GB, bytes per second, and dense FLOP per second in bf16, of the makers' data sheets.
CARDS = {
    "A10": (24, 0.60e12, 125e12),
    "RTX 4090": (24, 1.01e12, 165e12),
    "A100": (80, 2.04e12, 312e12),
    "H100": (80, 3.35e12, 989e12),
}
# How much of these a step reaches, and what a layer costs in each micro-batch besides. They are from what SmolLM2-1.7B
# took on an H100 (records/gpu.jsonl): sampling with adapters is slower, and their many small products cost launches.
DECODING_SHARE = {"grpo": 0.30, "grpo_lora": 0.23, "ppo_rlhf": 0.30, "grpo_vllm": 0.30}
UPDATE_SHARE = 0.36
LAYER_SECONDS = {"grpo": 0.003, "grpo_lora": 0.011, "ppo_rlhf": 0.003, "grpo_vllm": 0.003}
# How often the tokens of a step go through a network. A forward pass counts 1; a backward pass 2, or 1 if only the
# activations need gradients; recomputing 1. grpo.py has the reference and an update, and grpo_vllm.py the old
# log-probabilities, too. ppo_rlhf.py has these, the old values, and four updates of policy and critic.
PASSES = {"grpo": 1 + 4, "grpo_lora": 1 + 3, "ppo_rlhf": 2 + 1 + 4 * (4 + 4), "grpo_vllm": 2 + 4}
# The names of a count that need more words for a reader.
WORDS = {
    "averages": "Adam's averages",
    "sampling beside": "logits, or the prefill of an evaluation",
}
FLAGS = dict(
    sampling_tokens=49152,
    micro_batch_tokens=8192,
    beta=0.04,
    lora_rank=16,
    num_prompts=16,
    num_generations=8,
    max_new_tokens=300,
    gradient_checkpointing=True,
)


def llama(layers, width, heads, key_heads, inner, vocabulary, tied=True, **more):
    fields = dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads)
    fields |= dict(num_key_value_heads=key_heads, intermediate_size=inner, vocab_size=vocabulary)
    return dict(model_type="llama", tie_word_embeddings=tied) | fields | more


QWEN2 = dict(model_type="qwen2")
# The numbers of config.json in the repositories of HuggingFaceTB and Qwen.
MODELS = {
    "Qwen2.5-0.5B": llama(24, 896, 14, 2, 4864, 151936, **QWEN2),
    "Qwen3-0.6B": llama(28, 1024, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128),
    "Qwen2.5-1.5B": llama(28, 1536, 12, 2, 8960, 151936, **QWEN2),
    "SmolLM2-1.7B": llama(24, 2048, 32, 32, 8192, 49152),
    "Qwen2.5-3B": llama(36, 2048, 16, 2, 11008, 151936, **QWEN2),
    "Qwen2.5-7B": llama(28, 3584, 28, 4, 18944, 152064, tied=False, **QWEN2),
}


def shape(config: dict) -> SimpleNamespace:
    """The sizes that the counts need, from the config.json of a model with a list of decoder layers, such as Llama.

    parameters: all of the model. A head that is the embedding counts once.
    matrices: (in, out) of each linear layer of a decoder layer.
    Q, keys: the length of a token's queries and of its keys in one layer.
    normed: whether the model normalizes queries and keys.
    """
    return shape_of_text(json.dumps(config))


@cache
def shape_of_text(config: str) -> SimpleNamespace:
    c = AutoConfig.for_model(**json.loads(config))
    with torch.device("meta"):  # without memory for the weights
        model = AutoModelForCausalLM.from_config(c)
    layer = model.base_model.layers[0]
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return SimpleNamespace(
        parameters=sum(weight.numel() for weight in model.parameters()),
        matrices=[(x.in_features, x.out_features) for x in layer.modules() if isinstance(x, torch.nn.Linear)],
        layers=c.num_hidden_layers,
        V=c.vocab_size,
        D=c.hidden_size,
        F=c.intermediate_size,
        Q=c.num_attention_heads * head,
        keys=c.num_key_value_heads * head,
        tied=c.tie_word_embeddings,
        normed=hasattr(layer.self_attn, "q_norm"),
    )


def adapters(config: dict, rank: int) -> int:
    """The number of parameters in A (rank, in) and B (out, rank) of all layers."""
    s = shape(config)
    return s.layers * sum(rank * (width + out) for width, out in s.matrices)


def activations(script: str, config: dict, tokens: int, checkpointing: bool = True) -> int:
    """Bytes of one micro-batch at the worst moment of its backward pass on a GPU, on top of the gradients made so far.

    A hidden state is kept for each layer, in float32 if the weights are in float32, else in bf16. The worst moment is
    one of three:

    - the MLP of a layer: four tensors of width F are kept and three are made, in bf16;
    - the attention of a layer: queries, keys and values, before and after the rotation, and their gradients;
    - a chunk of logits.

    The factors of D and of the queries are fitted to peaks on the emulated GPU. While a layer runs, its float32 weights
    are cast to bf16. Their gradient is made in bf16 and then cast to float32.
    """
    s = shape(config)
    frozen = script == "grpo_lora"
    between = s.layers * tokens * s.D * (2 if frozen else 4)
    # The length of a token's queries, keys and values together.
    queries = s.Q + 2 * s.keys
    mlp = 16 * s.F + 26 * s.D + 4 * queries if frozen else 14 * s.F + 42 * s.D + 6 * queries
    attention = 12 * queries + 27 * s.D if frozen else 14 * queries + 42 * s.D
    # Normed queries and keys are in float32.
    attention += 8 * queries if s.normed else 0
    sizes = [width * out for width, out in s.matrices]
    cast = 0 if frozen else 2 * sum(sizes) + 6 * max(sizes)
    kept = 8 * s.F + 18 * s.D + 4 * queries if frozen else 8 * s.F + 26 * s.D + 4 * queries
    others = 0 if checkpointing else (s.layers - 1) * (tokens * kept + cast)
    # A chunk's logits, log-probabilities and gradient in float32, and the gradient of the head.
    logits = 12 * min(2**26, tokens * s.V) + (0 if frozen else 4 * s.V * s.D)
    layer = tokens * max(mlp, attention) + cast
    return between + (max(layer, logits) if checkpointing else others + layer + logits // 4)


def sampling(config: dict, f: SimpleNamespace) -> dict[str, int]:
    """Bytes while sampling: the keys and values of the most tokens sampled at a time, and everything beside them."""
    s = shape(config)
    columns = PROMPT + f.max_new_tokens
    # The keys and values of a token, in bf16.
    each = 2 * 2 * s.layers * s.keys
    rows = max(f.num_generations, f.sampling_tokens // columns)
    cache = rows * columns * each
    # Six tensors in float32: logits, noise, the steps between them, and the tensors that the graph keeps.
    logits = 6 * 4 * min(rows, f.num_prompts * f.num_generations) * s.V
    # The keys of a layer are copied when they grow.
    growing = 2 * rows * columns * each // (2 * s.layers)
    # An evaluation prefills one prompt per row. At that moment it has only the keys and values of the prompts.
    prefill = rows * PROMPT * (3 * 2 * s.F + 6 * 2 * s.D + each) + 4 * rows * s.V
    return {"keys and values": cache, "sampling beside": max(logits + growing, prefill - cache)}


def count(script: str, config: dict, **flags) -> dict[str, int]:
    """Bytes by purpose, for the script with these flags on one GPU. "peak" is the most at any moment."""
    f = SimpleNamespace(**FLAGS | flags)
    s = shape(config)
    P = s.parameters
    head = s.V * s.D
    # The model in bf16, with a separate head in float32.
    in_bf16 = 2 * P + 4 * head - (0 if s.tied else 2 * head)
    if script == "grpo_lora":
        trained = adapters(config, f.lora_rank)
        found = {
            "weights": in_bf16 + 4 * trained,
            "averages": 8 * trained,
            "gradients": 4 * trained,
        }
    elif script in ("grpo", "ppo_rlhf"):
        trained = P
        if script == "ppo_rlhf":
            # The value network has a score of D numbers instead of the head.
            trained += (P if s.tied else P - head) + s.D
        found = {"weights": 4 * trained, "averages": 8 * trained, "gradients": 4 * trained}
        reference = in_bf16 if f.beta else 0
        found |= {"sampling copy": in_bf16, "reference": reference}
    else:
        raise ValueError(f"{script}: memory.py doesn't know its copies of the model")
    found |= sampling(config, f)
    found["activations"] = activations(script, config, f.micro_batch_tokens, f.gradient_checkpointing)
    while_sampling = found["keys and values"] + found["sampling beside"]
    while_training = found["gradients"] + found["activations"]
    always = sum(found.get(name, 0) for name in ("weights", "averages", "sampling copy", "reference"))
    return found | {"peak": always + max(while_sampling, while_training)}


def step_seconds(script: str, config: dict, card: str, **flags) -> tuple[float, float]:
    """Seconds of a step's rollout and of its update on one card, if all responses have the full length.

    A decode step gives each row a token. It reads all weights, and the keys and values of all rows, and takes these
    bytes over DECODING_SHARE of the bandwidth. A token takes 2 FLOP per parameter in each of PASSES. An update takes
    its FLOP over UPDATE_SHARE of the peak, and LAYER_SECONDS for each layer of each micro-batch with five passes.
    """
    f = SimpleNamespace(**FLAGS | flags)
    if script == "ppo_rlhf":
        f.num_prompts, f.num_generations = 128, 1  # the script's own defaults
    s = shape(config)
    P = s.parameters
    _, bandwidth, flops = CARDS[card]
    head = s.V * s.D
    N, R = f.num_prompts * f.num_generations, f.max_new_tokens
    columns = PROMPT + R
    # vLLM's engine samples all rows at once.
    parts = 1 if script == "grpo_vllm" else math.ceil(N * columns / f.sampling_tokens)
    weights = 2 * (P - head) + 4 * head
    keys = N * (PROMPT + R / 2) * 2 * 2 * s.layers * s.keys
    rollout = R * (parts * weights + keys) / bandwidth / DECODING_SHARE[script]

    tokens = N * columns
    passes = PASSES[script] if f.gradient_checkpointing else PASSES[script] - 1
    work = 2 * passes * (tokens * (P - head) + N * R * head)
    batches = math.ceil(tokens / f.micro_batch_tokens)
    launches = batches * s.layers * LAYER_SECONDS[script] * passes / 5
    return rollout, work / flops / UPDATE_SHARE + launches


def fits(script: str, config: dict, memory: int, **flags) -> bool:
    """Whether the peak is at most the memory, in GB. An engine keeps 0.3 of the card for itself (--engine-memory)."""
    if script == "grpo_vllm":
        counts = count("grpo", config, **flags)
        names = ("weights", "averages", "gradients", "reference", "activations")
        return sum(counts[name] for name in names) <= 0.7e9 * memory
    return count(script, config, **flags)["peak"] <= 1e9 * memory


def seconds_table() -> str:
    rows = []
    for model, script, flags in [
        ("Qwen2.5-0.5B", "grpo", {}),
        ("SmolLM2-1.7B", "grpo_lora", {}),
        ("SmolLM2-1.7B", "grpo", dict(micro_batch_tokens=2048)),
        ("SmolLM2-1.7B", "grpo", {}),
        ("SmolLM2-1.7B", "grpo", dict(sampling_tokens=131072)),
        ("SmolLM2-1.7B", "grpo_vllm", {}),
        ("SmolLM2-1.7B", "ppo_rlhf", {}),
        ("Qwen2.5-7B", "grpo_lora", {}),
    ]:
        given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
        cells = []
        for card, (memory, *_) in CARDS.items():
            rollout, update = step_seconds(script, MODELS[model], card, **flags)
            can = fits(script, MODELS[model], memory, **flags)
            cells.append(f"{rollout:.0f} + {update:.0f}" if can else "-")
        rows.append([f"{script}.py, {model} {given}".strip(), *cells])
    return table(["seconds of rollout + update", *CARDS], rows)


def peaks_table() -> str:
    rows = []
    for model, config in MODELS.items():
        peaks = [count(script, config)["peak"] / 1e9 for script in COUNTED]
        rows.append([model, *(f"{peak:.1f}" for peak in peaks)])
    return table(["GB", *(f"{script}.py" for script in COUNTED)], rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("script", nargs="?", choices=COUNTED)
    known = ", ".join(MODELS)
    parser.add_argument(
        "model",
        nargs="?",
        default="SmolLM2-1.7B",
        help=f"a folder with a config.json, or one of: {known}",
    )
    for name, value in FLAGS.items():
        kind = int if isinstance(value, bool) else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    options = vars(parser.parse_args())
    script, model = options.pop("script"), options.pop("model")
    if script is None:
        fill(ROOT / "docs" / "train.md", "memory", peaks_table())
        fill(ROOT / "docs" / "train.md", "seconds", seconds_table())
        return
    if model in MODELS:
        config = MODELS[model]
    else:
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    for name, size in count(script, config, **options).items():
        print(f"{size / 1e9:7.2f} GB  {WORDS.get(name, name)}")


if __name__ == "__main__":
    main()
