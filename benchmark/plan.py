"""Does a run fit a card, how long does it take, and which flags fit best: by calculation, without loading any weights.

    python benchmark/plan.py --card "RTX 4090" grpo_lora.py --model SmolLM2-1.7B-Instruct --max-new-tokens 512

Write the command of the run behind `plan.py` and its own flags, with `python` or without. The card is a name in CARDS
below or its end (4090), or a number of GB (then there are no seconds). `--prompt-tokens` and `--response-tokens` are
the lengths of a usual prompt and response: 330, as GSM8K's with the examples, and --max-new-tokens, the most. Of the
model, only its config.json is read: from a folder, from MODELS below, or from the hub. A copy of a script, with your
changes, is imported for its flags, and counted as the script whose lines it shares most.

Without a command, it writes the tables of docs/gpu.md and the first one of docs/train.md.

**Memory.** Weights, averages, gradients, copies, keys and values are exact. Activations are calculated for a decoder
with a gated MLP, and are within 15 % of the peak that tests/test_cuda.py measures on an emulated GPU. What the
allocator loses between blocks, and CUDA's own half a GB, aren't counted. A card of n GB counts as n * 1e9 bytes, and
most cards have 3 to 7 % more, which are left for these.

**Time.** A decode step reads all weights, and the keys and values of all rows. It takes these bytes over 30 % of the
card's bandwidth (23 % with adapters), but counts at most an H100's bandwidth: an H200, with more, was no faster. An
update takes its FLOP over 36 % of the card's peak, and LAYER_SECONDS for five passes of a micro-batch through a layer.
These shares are from an H100 and an H200 (benchmark/records/gpu.jsonl), and `errors` compares them with the newest
steps on an H200. Other cards, and vLLM, haven't been measured. The prefill of a step's prompts isn't counted: it takes
about 1 % of a step, and some 5 % with one sample for each prompt.

A T4 and an RTX 2080 Ti have no TF32. So they compute the float32 output head without tensor cores, which takes about
half of the update if the vocabulary is large. Their default is float16. They emulate bf16: `--dtype bfloat16` is
counted as EMULATION times slower in the layers, and its larger attention scores aren't counted.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shared import FOLDER, ROOT, command_line, fill, read, table

sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from scripts import CRITICS, MACHINE_PATCHES, SCRIPTS, read_script  # noqa: E402

# GB, bytes per second, and dense FLOP per second in 16 bits (added up in float32), of the makers' data sheets.
CARDS = {
    "T4": (15, 0.32e12, 65e12),  # sold as 16 GB, of which programs see 15.6
    "RTX 2080 Ti": (11, 0.616e12, 53.8e12),
    "RTX 3090": (24, 0.94e12, 71e12),
    "RTX 4090": (24, 1.01e12, 165e12),
    "RTX 5090": (32, 1.79e12, 210e12),
    "A10": (24, 0.60e12, 125e12),
    "L4": (24, 0.30e12, 121e12),
    "L40S": (48, 0.86e12, 362e12),
    "A100 40GB": (40, 1.56e12, 312e12),
    "A100": (80, 2.04e12, 312e12),
    "H100": (80, 3.35e12, 989e12),
    "H200": (141, 4.8e12, 989e12),
    "B200": (180, 8.0e12, 2250e12),
}
# These cards have no TF32, so their output head has this rate: FLOP per second in float32.
FLOAT32 = {"T4": 8.1e12, "RTX 2080 Ti": 13.4e12}
EMULATION = 4.3  # how much slower they are in bf16: a published batch on a T4 took 1.29 s, and 0.30 s in float16
# The shares of bandwidth and FLOP that a step reaches, as the docstring explains.
DECODING_SHARE, DECODING_SHARE_LORA = 0.30, 0.23
MOST_BANDWIDTH = CARDS["H100"][1]
UPDATE_SHARE = 0.36
BUS = 16e9  # bytes per second between host and GPU, from pageable memory: 14 to 19 measured beside an H200
# Each layer's kernels have to be launched, in each micro-batch: seconds for five passes.
LAYER_SECONDS, LAYER_SECONDS_LORA = 0.003, 0.011
# These compute the old log-probabilities of all sequences in a pass. The others leave out the first minibatch.
OLD_LOGPROBS_OF_ALL = ["reinforce_baseline", "rloo", "remax", "ppo_rlhf", "vapo"]
# What a script has, and grpo_lora.py doesn't.
LOST = {
    "reinforce_baseline": "REINFORCE's baseline and loss",
    "rloo": "RLOO's advantages and loss",
    "dr_grpo": "Dr. GRPO's advantages and loss",
    "dapo": "DAPO's loss and its new samples for equal groups",
    "ppo_rlhf": "the value network and the reward model",
    "gspo": "GSPO's ratio of whole responses",
    "remax": "the greedy baseline",
    "grpo_offpolicy": "the corrections for another sampler",
    "grpo_process": "rewards for single steps",
    "distill": "the teacher",
    "self_distill": "the teacher",
    "vapo": "the value network",
    "grpo_tools": "the tool (with it: grpo_tools_lora.py of docs/extend.md)",
    "grpo_multigpu": "the other GPUs",
    "grpo_vllm": "vLLM",
    "shared_prompts": "the shared prompts",
}
# The names of a count that need more words for a reader.
WORDS = {
    "averages": "Adam's averages",
    "sampling beside": "logits, or the prefill of an evaluation",
}
PROMPT = 330


def llama(layers, width, heads, key_heads, inner, vocabulary, tied=True, **more):
    fields = dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads)
    fields |= dict(num_key_value_heads=key_heads, intermediate_size=inner, vocab_size=vocabulary)
    return dict(model_type="llama", tie_word_embeddings=tied) | fields | more


QWEN2 = dict(model_type="qwen2")
# The numbers of config.json in the repositories of HuggingFaceTB and Qwen.
MODELS = {
    "SmolLM2-135M": llama(30, 576, 9, 3, 1536, 49152),
    "SmolLM2-360M": llama(32, 960, 15, 5, 2560, 49152),
    "Qwen2.5-0.5B": llama(24, 896, 14, 2, 4864, 151936, **QWEN2),
    "Qwen3-0.6B": llama(28, 1024, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128),
    "Qwen2.5-1.5B": llama(28, 1536, 12, 2, 8960, 151936, **QWEN2),
    "SmolLM2-1.7B": llama(24, 2048, 32, 32, 8192, 49152),
    "Qwen2.5-3B": llama(36, 2048, 16, 2, 11008, 151936, **QWEN2),
    "Qwen2.5-7B": llama(28, 3584, 28, 4, 18944, 152064, tied=False, **QWEN2),
}
# The layers of these families have several shapes.
REFUSED = ("gemma3n", "gemma4")
# The rows of the table of peaks, and its columns.
IN_TABLE = ["Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen2.5-1.5B", "SmolLM2-1.7B", "Qwen2.5-3B", "Qwen2.5-7B"]
COUNTED = ["grpo", "host_adam", "grpo_lora", "ppo_rlhf"]


# The first table of docs/train.md: the GB by which a card is sold, a card of this size, and a command for it.
COMMANDS = [
    (16, "T4", "grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --sampling-tokens 98304"),
    (16, "T4", "grpo_lora.py --model SmolLM2-1.7B-Instruct"),
    (24, "RTX 4090", "grpo_lora.py --model SmolLM2-1.7B-Instruct"),
    (24, "RTX 4090", "grpo_lora.py --model Qwen/Qwen2.5-7B-Instruct --micro-batch-tokens 4096 --sampling-tokens 24576"),
    (40, "A100 40GB", "grpo.py --model SmolLM2-1.7B-Instruct"),
    (40, "A100 40GB", "grpo_lora.py --model Qwen/Qwen2.5-7B-Instruct"),
    (80, "H100", "grpo.py --model SmolLM2-1.7B-Instruct --sampling-tokens 131072"),
]


# ---- the model


def read_config(name: str) -> dict:
    """A model's config.json, as a dict: of a known model, of a folder, or of the hub."""
    known = name.split("/")[-1].removesuffix("-Instruct")
    if known in MODELS:
        return MODELS[known]
    return AutoConfig.from_pretrained(name).to_dict()


def shape(config: dict) -> SimpleNamespace:
    """The sizes that the counts need, from a config.json.

    parameters: all of the model. A head that is the embedding counts once. body: those without embedding and head.
    matrices: (in, out) of each linear layer of the decoder; layer_weights: the numbers in a layer's matrices, and
    largest: in the largest of them, experts included.
    Q, keys: the length of a token's queries and of its keys in one layer; attending: the layers that keep keys. (Keys
    that several heads share, or that are kept compressed, as in DeepSeek V3, are counted as if each head had its own.)
    normed: whether the model normalizes queries and keys.
    """
    return shape_of_text(json.dumps(config, default=str))


@cache
def shape_of_text(config: str) -> SimpleNamespace:
    fields = json.loads(config)
    if fields["model_type"].startswith(REFUSED):
        sys.exit(f"plan.py can't count the family {fields['model_type']}: its layers have several shapes")
    whole = AutoConfig.for_model(**fields)
    is_text = type(whole) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    with torch.device("meta"):  # without memory for the weights
        model = auto_class.from_config(whole)
    c = whole.get_text_config()
    if not hasattr(c, "num_attention_heads"):
        sys.exit(f"plan.py can't count the family {c.model_type}: it has no attention")
    decoder = model.base_model.get_decoder()
    tables = [id(x.weight) for x in decoder.modules() if isinstance(x, torch.nn.Embedding)]
    matrices = [x for x in decoder.parameters() if x.ndim > 1 and id(x) not in tables]
    linear = [x for x in decoder.modules() if isinstance(x, torch.nn.Linear)]
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    parameters = sum(weight.numel() for weight in model.parameters())
    return SimpleNamespace(
        parameters=parameters,
        body=parameters - (1 if tied else 2) * c.vocab_size * c.hidden_size,
        matrices=[(x.in_features, x.out_features) for x in linear],
        layer_weights=sum(x.numel() for x in matrices) // c.num_hidden_layers,
        largest=max(x.numel() for x in matrices),
        layers=c.num_hidden_layers,
        # A hybrid layer has a state and attention.
        attending=sum(kind == "hybrid" or "attention" in kind and "linear" not in kind for kind in kinds),
        V=c.vocab_size,
        D=c.hidden_size,
        F=getattr(c, "intermediate_size", None) or max(max(x.shape) for x in matrices),
        Q=c.num_attention_heads * head,
        keys=(getattr(c, "num_key_value_heads", None) or c.num_attention_heads) * head,
        tied=tied,
        normed=any(name.endswith("q_norm") for name, _ in decoder.named_modules()),
    )


def adapters(config: dict, rank: int) -> int:
    """The number of parameters in A (rank, in) and B (out, rank) of all layers."""
    return sum(rank * (width + out) for width, out in shape(config).matrices)


def in_16_bits(config: dict) -> int:
    """Bytes of a copy in bf16 or float16, with a separate head in float32."""
    s = shape(config)
    head = s.V * s.D
    return 2 * s.parameters + 4 * head - (0 if s.tied else 2 * head)


# ---- memory


def activations(script: str, config: dict, tokens: int, checkpointing: bool = True) -> int:
    """Bytes of one micro-batch at the worst moment of its backward pass on a GPU, on top of the gradients made so far.

    A hidden state is kept for each layer, in float32 if the weights are in float32, else in 16 bits. The worst moment
    is one of three:

    - the MLP of a layer: four tensors of width F are kept and three are made, in 16 bits;
    - the attention of a layer: queries, keys and values, before and after the rotation, and their gradients;
    - a chunk of logits.

    The factors of D and of the queries are fitted to peaks on the emulated GPU. While a layer runs, its float32 weights
    are cast to 16 bits. Their gradient is made in 16 bits and then cast to float32.
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
    cast = 0 if frozen else 2 * s.layer_weights + 6 * s.largest
    kept = 8 * s.F + 18 * s.D + 4 * queries if frozen else 8 * s.F + 26 * s.D + 4 * queries
    others = 0 if checkpointing else (s.layers - 1) * (tokens * kept + cast)
    # A chunk's logits, log-probabilities and gradient in float32, and the gradient of the head.
    logits = 12 * min(2**26, tokens * s.V) + (0 if frozen else 4 * s.V * s.D)
    layer = tokens * max(mlp, attention) + cast
    return between + (max(layer, logits) if checkpointing else others + layer + logits // 4)


def sampler_bytes(args) -> int:
    """Bytes of a weight, a key or a value of the policy that samples."""
    return 4 if getattr(args, "engine_dtype", "auto") == "float32" else 2


def sampling(config: dict, args, prompt: int) -> dict[str, int]:
    """Bytes while sampling: the keys and values of the most tokens sampled at a time, and everything beside them."""
    s = shape(config)
    columns = prompt + args.max_new_tokens
    # The keys and values of a token.
    each = 2 * sampler_bytes(args) * s.attending * s.keys
    # An evaluation has one row for each problem. A rollout has whole groups, so it may have fewer.
    rows = max(args.num_generations, args.sampling_tokens // columns)
    rows = min(rows, max(args.num_prompts * args.num_generations, args.eval_size))
    cache = rows * columns * each
    # Six tensors in float32: logits, noise, the steps between them, and the tensors that the graph keeps.
    logits = 6 * 4 * min(rows, args.num_prompts * args.num_generations) * s.V
    # The keys and values of a layer are copied when they grow.
    growing = cache // max(1, s.attending)
    # An evaluation prefills one prompt per row: three tensors of width F and six of width D in 16 bits, and the last
    # token's logits. At that moment it has only the keys and values of the prompts, so the whole cache is subtracted.
    prefill = rows * prompt * (3 * 2 * s.F + 6 * 2 * s.D + each) + 4 * rows * s.V
    return {"keys and values": cache, "sampling beside": max(logits + growing, prefill - cache)}


def load(path: str):
    """The script as which a file is counted, and the module of the file.

    The file may be a script, a copy with changes, or what a patch of variants/ makes.
    """
    name, known = path.removesuffix(".py"), [*SCRIPTS, *MACHINE_PATCHES]
    file = Path(path)
    if not file.is_file():
        if name not in known:
            sys.exit(f"{path}: there is no such file, and it is none of the scripts: {', '.join(known)}")
        return name, module_of(name)
    text = file.read_text(encoding="utf-8")
    if not re.search(r"^class Args\b", text, re.MULTILINE) or "def find_model(" not in text:
        sys.exit(f"{path} isn't a copy of a script: it has no class Args, or no function find_model")
    script = file.stem
    if script not in known:
        script = max(SCRIPTS, key=lambda name: len(long_lines(text) & long_lines(read_script(name))))
        if "def add_adapters(args, model):" in text:
            script = "grpo_lora"  # adapters decide how much memory is needed, whatever else a copy has
    sys.path.insert(0, str(file.resolve().parent))  # for the modules beside it
    spec = importlib.util.spec_from_file_location("planned", file)
    module = sys.modules["planned"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return script, module


def long_lines(text: str) -> set[str]:
    """The lines that say more than "beta," or "):", which stand in different places."""
    return {line for line in text.splitlines() if len(line.strip()) > 20}


def module_of(script: str):
    """The module of a script. The patches of MACHINE_PATCHES have the flags of grpo.py."""
    return importlib.import_module("grpo" if script in MACHINE_PATCHES else script)


def teachers(args) -> list[dict]:
    """The config.json of distill.py's teacher, or of the several that the patch mopd has."""
    names = [args.teacher] if hasattr(args, "teacher") else args.teachers.values()
    return [read_config(name) for name in names]


def arguments(script: str, **flags):
    """The Args of a script, as its command with --model has them."""
    return dataclasses.replace(module_of(script).Args(), **flags)


def count(script: str, config: dict, args=None, prompt: int = PROMPT, card: int = 80, gpus: int = 1, **flags):
    """Bytes by purpose: a dict, for one GPU. "peak" is the most at any moment.

    card is its number of GB, of which vLLM takes a share, and gpus how many grpo_multigpu.py uses.
    """
    args = args or arguments(script, **flags)
    s = shape(config)
    P, head = s.parameters, s.V * s.D
    copied = in_16_bits(config)
    found = {}
    if script == "grpo_lora":
        trained = adapters(config, args.lora_rank)
        found["frozen weights"] = copied
    else:
        trained = P
    if script in CRITICS:
        # The value network has a score of D numbers instead of the head. It may start as the reward model.
        network = s
        if getattr(args, "reward_model", None) and args.value_init == "reward_model":
            network = shape(read_config(args.reward_model))
        trained += network.parameters - (0 if network.tied else network.V * network.D) + network.D
    shards = gpus if script == "grpo_multigpu" else 1
    found["weights"] = 4 * trained // shards
    found["averages"] = 8 * trained // shards
    found["gradients"] = 4 * trained // shards
    if script == "grpo_multigpu":  # the embedding, the head and two layers at a time
        found["gathered"] = 12 * ((1 if s.tied else 2) * head + 2 * s.layer_weights)
    if script not in ("grpo_lora", "grpo_vllm"):
        found["sampling copy"] = 4 * P if sampler_bytes(args) == 4 else copied
    if script == "grpo_offpolicy":  # its sampler is another policy, so an evaluation has a copy of its own
        found["evaluation copy"] = copied
    if getattr(args, "beta", 0) > 0 and script != "grpo_lora":
        found["reference"] = copied
    if script == "distill":
        found["teacher"] = sum(in_16_bits(config) for config in teachers(args))
    if script == "self_distill":
        found["teacher"] = 4 * P
    if getattr(args, "reward_model", None):
        found["reward model"] = 4 * shape(read_config(args.reward_model)).parameters
    always = [name for name in found if name != "gradients"]
    # The moments at which the most memory may be in use, and the parts that are there besides.
    moments = [("gradients", "activations")]
    if script == "grpo_vllm":
        found["engine"] = round(args.engine_memory * card * 1e9)
        moments.append(("engine",))
    else:
        found |= sampling(config, args, prompt)
        moments.append(("keys and values", "sampling beside"))
    found["activations"] = activations(script, config, args.micro_batch_tokens, args.gradient_checkpointing)
    if script == "host_adam":
        # The GPU has the reference before there are gradients, and one parameter's averages while it is updated.
        # The reference's activations are fewer than those of an update.
        found["averages"] = 8 * max(s.largest, head)
        always = [name for name in always if name not in ("averages", "reference")]
        moments += [("reference", "activations"), ("gradients", "averages")]
    return found | {"peak": max(sum(found.get(name, 0) for name in (*always, *parts)) for parts in moments)}


# ---- time


def head_rate(card: str) -> float:
    """FLOP per second of the output head, at its peak."""
    return FLOAT32.get(card, CARDS[card][2])


def decode_seconds(script, config, args, card, prompt: int, prompts: float, samples: int, response: int) -> float:
    """Seconds to sample responses of the mean length `response`, `samples` to each prompt.

    The longest has --max-new-tokens.
    """
    s = shape(config)
    head = s.V * s.D
    rows = prompts * samples
    if script == "grpo_vllm":  # its engine samples all rows at once
        parts = 1
    else:
        prompts_at_a_time = max(1, args.sampling_tokens // (samples * (prompt + args.max_new_tokens)))
        parts = math.ceil(prompts / prompts_at_a_time)
    read = args.max_new_tokens * parts  # times that the weights are read
    keys = rows * response * (prompt + response / 2) * 2 * sampler_bytes(args) * s.attending * s.keys
    share = DECODING_SHARE_LORA if script == "grpo_lora" else DECODING_SHARE
    bandwidth = share * min(CARDS[card][1], MOST_BANDWIDTH)
    layers = (sampler_bytes(args) * read * s.body + keys) / bandwidth
    # With many rows and without tensor cores, the head's FLOP take longer than its bytes.
    return layers + max(4 * read * head / bandwidth, 2 * rows * response * head / head_rate(card) / UPDATE_SHARE)


def passes(script: str, config: dict, args) -> tuple[float, float]:
    """How often the tokens of a step go through the layers, and how often through the head, in the update.

    The passes of all networks are added up. A forward pass counts 1, recomputing 1, and a backward pass 2, or 1 if only
    the activations need gradients. The logits are recomputed in each backward pass, with any flags.
    """
    backward = 1 if script == "grpo_lora" else 2
    update = backward + (2 if args.gradient_checkpointing else 1)
    epochs = getattr(args, "num_iterations", 1)
    forward = 1 - (0 if script in OLD_LOGPROBS_OF_ALL else 1 / args.num_minibatches)
    if getattr(args, "beta", 0) > 0 or script == "self_distill":
        forward += 1  # the reference, or the teacher
    if script == "distill":
        forward += sum(shape(teacher).parameters for teacher in teachers(args)) / shape(config).parameters
    # The old values, and the updates of the value network, which has no head.
    values = 1 + epochs * update if script in CRITICS else 0
    return epochs * update + forward + values, epochs * (backward + 2) + forward


def step_seconds(script: str, config: dict, card: str, args=None, prompt=PROMPT, response=None, gpus=1, **flags):
    """Seconds of a step's rollout and of its update: (rollout, update)."""
    args = args or arguments(script, **flags)
    response = response or args.max_new_tokens
    s = shape(config)
    shards = gpus if script == "grpo_multigpu" else 1
    prompts, samples = args.num_prompts / shards, args.num_generations
    rollout = decode_seconds(script, config, args, card, prompt, prompts, samples, response)
    if script == "remax":  # its baseline is a greedy response to each prompt
        rollout += decode_seconds(script, config, args, card, prompt, prompts, 1, response)
    N, length, head = prompts * samples, prompt + response, s.V * s.D
    tokens = N * length
    # Multiplications of a forward pass: one for each weight and token. In attention, each number of a token's query is
    # multiplied for each earlier token, and so is each number of that token's value. A token has length / 2 earlier
    # ones on average.
    forward = tokens * s.body + N * length**2 * s.Q * s.attending
    layer_passes, head_passes = passes(script, config, args)
    emulated = card in FLOAT32 and getattr(args, "dtype", "auto") == "bfloat16"
    rate = CARDS[card][2] / (EMULATION if emulated else 1)
    computing = 2 * layer_passes * forward / rate
    computing += 2 * head_passes * N * response * head / head_rate(card)
    launch = LAYER_SECONDS_LORA if script == "grpo_lora" else LAYER_SECONDS
    launches = math.ceil(tokens / args.micro_batch_tokens) * s.layers * launch * layer_passes / 5
    update = computing / UPDATE_SHARE + launches
    if script == "host_adam":  # the averages go over the bus and back in each update, and the reference once
        updates = args.num_iterations * args.num_minibatches
        update += (16 * s.parameters * updates + in_16_bits(config)) / BUS
    return rollout, update


def run_hours(script, config, card, args, prompt=PROMPT, response=None, gpus=1) -> tuple[float, float]:
    """Hours of all steps, and of all evaluations."""
    step = sum(step_seconds(script, config, card, args, prompt, response, gpus))
    # Before and after the training, and in between.
    times = 2 + ((args.num_steps - 1) // args.eval_every if args.eval_every else 0)
    prompts = args.eval_size / (gpus if script == "grpo_multigpu" else 1)
    evaluation = decode_seconds(script, config, args, card, prompt, prompts, 1, response or args.max_new_tokens)
    evaluation += 2 * prompts * prompt * shape(config).body / CARDS[card][2] / UPDATE_SHARE  # the prefill
    return args.num_steps * step / 3600, times * evaluation / 3600


# ---- what was measured


# What benchmark/gpu.py measures in SmolLM2-1.7B's shape: name -> (script, flags).
STEPS = {
    "8192": ("grpo", {"micro_batch_tokens": 8192}),  # the default
    "float16": ("grpo", {"micro_batch_tokens": 8192, "dtype": "float16"}),
    "host_adam": ("host_adam", {"micro_batch_tokens": 8192}),
    "lora": ("grpo_lora", {"micro_batch_tokens": 8192}),
    "8192, all at once": ("grpo", {"micro_batch_tokens": 8192, "sampling_tokens": 131072}),
    "2048": ("grpo", {"micro_batch_tokens": 2048}),
    "4096": ("grpo", {"micro_batch_tokens": 4096}),
    "8192, no graph": ("grpo", {"micro_batch_tokens": 8192, "cuda_graph": False}),
}


def errors() -> list[tuple[str, str, float, float]]:
    """(script and flags, part, measured, calculated) of the newest steps of SmolLM2-1.7B's shape on an H200.

    The parts are GB, and the seconds of rollout and update: of the last step, because the first one also warms up.
    """
    newest = {}
    for record in read(FOLDER / "gpu.jsonl"):
        if record["part"] == "steps" and "H200" in record["gpu"] and "error" not in record:
            newest[record["name"]] = record
    found = []
    for name, record in newest.items():
        script, flags = STEPS[name]
        if name == "8192, no graph":
            continue  # the default has a graph
        config, last = MODELS["SmolLM2-1.7B"], record["metrics"][-1]
        rollout, update = step_seconds(script, config, "H200", **flags)
        peak = count(script, config, eval_size=8, **flags)["peak"] / 1e9
        words = [f"--{flag.replace('_', '-')} {value}" for flag, value in flags.items()]
        what = ", ".join([f"{script}.py", *words])
        found.append((what, "GB", last["time/peak_mem_gb"], peak))
        found.append((what, "rollout", last["time/rollout_s"], rollout))
        found.append((what, "update", last["time/update_s"], update))
    return found


def error_range(part: str) -> str:
    """Such as "-4 to +24 %": the least and the most that a calculated number is above the measured one."""
    found = [100 * (calculated / measured - 1) for _, name, measured, calculated in errors() if name == part]
    return f"{min(found):+.0f} to {max(found):+.0f} %"


# ---- the flags that fit best


def fits(script: str, config: dict, memory: float, args=None, prompt=PROMPT, gpus=1, **flags) -> bool:
    """Whether the peak is at most the memory, in GB."""
    return count(script, config, args, prompt, int(memory), gpus, **flags)["peak"] <= 1e9 * memory


def best_flags(script, config, card, args, prompt=PROMPT, response=None, gpus=1) -> dict | None:
    """The fastest --sampling-tokens and --micro-batch-tokens that fit the card, as a dict, or None.

    Of equally fast ones, those with the smallest peak.
    """
    memory = CARDS[card][0]
    largest = args.num_prompts * args.num_generations * (prompt + args.max_new_tokens)
    choices = [{}]  # grpo_vllm.py has no --sampling-tokens
    if hasattr(args, "sampling_tokens"):
        sizes = [2**k * 6144 for k in range(10) if 2 ** (k - 1) * 6144 < largest]
        choices = [dict(sampling_tokens=size) for size in sizes]
    found = []
    for choice in choices:
        for size in (1024, 2048, 4096, 8192, 16384):
            flags = choice | dict(micro_batch_tokens=size)
            tried = dataclasses.replace(args, **flags)
            peak = count(script, config, tried, prompt, memory, gpus)["peak"]
            if peak <= 1e9 * memory:
                seconds = sum(step_seconds(script, config, card, tried, prompt, response, gpus))
                found.append((round(seconds, 1), peak, flags))
    return min(found, key=lambda each: each[:2])[2] if found else None


def alternatives(script, config, card, args, command, prompt=PROMPT, response=None, gpus=1) -> list[str]:
    """Other ways to train the model, which fit a card that is too small for the command, and what each one loses."""
    path, *flags = command
    changed = [] if Path(path).stem == script else [f"the changes of {path}"]
    ways = []  # (script, its file, its class Args, flags that change, what is lost)
    if getattr(args, "beta", 0) > 0:
        ways.append((script, path, type(args), {"beta": 0}, ["the KL"]))
    if script == "grpo":
        ways.append(("host_adam", "host_adam.py", module_of("host_adam").Args, {}, changed))
    if script != "grpo_lora" and shape(config).matrices:
        lost = [LOST[script]] if script in LOST else []
        ways.append(("grpo_lora", "grpo_lora.py", module_of("grpo_lora").Args, {}, lost + changed))
    found = []
    for other, file, args_class, changes, lost in ways:
        # A flag with another default means something else there, such as the learning rate of adapters.
        defaults = {field.name: field.default for field in dataclasses.fields(args_class)}
        foreign = {x.name for x in dataclasses.fields(args) if x.name not in defaults or defaults[x.name] != x.default}
        kept = without(flags, {"model", "sampling_tokens", "micro_batch_tokens", *foreign, *changes})
        kept = ["--model", args.model, *kept, *as_flags(changes)]
        tried = tyro.cli(args_class, args=kept)
        if best := best_flags(other, config, card, tried, prompt, response, gpus):
            tried = dataclasses.replace(tried, **best)
            peak = count(other, config, tried, prompt, CARDS[card][0], gpus)["peak"] / 1e9
            seconds = sum(step_seconds(other, config, card, tried, prompt, response, gpus))
            text = f"python {shlex.join([file, *kept, *as_flags(best)])}  # {peak:.1f} GB, {seconds:.0f} s a step"
            text += ", adapters instead of all weights" if other == "grpo_lora" else ""
            found.append(text + (f", without {' and '.join(lost)}" if lost else ""))
    return found


# ---- what a user sees


def report(script: str, config: dict, args, options, command: list[str]) -> str:
    """The plan of one command, as lines of text."""
    prompt, response, gpus = options.prompt_tokens, options.response_tokens, options.gpus
    named = options.card in CARDS
    memory = CARDS[options.card][0] if named else float(options.card)
    counts = count(script, config, args, prompt, int(memory), gpus)
    lines = [] if Path(command[0]).stem == script else [f"{command[0]} is counted as {script}.py."]
    lines += [f"{size / 1e9:8.2f} GB  {WORDS.get(name, name)}" for name, size in counts.items()]
    verdict = "fits" if counts["peak"] <= 1e9 * memory else "DOESN'T FIT"
    lines.append(f"It {verdict} {memory:g} GB. (On an H200, calculated minus measured was {error_range('GB')}.)")
    if script == "host_adam":
        host = 8 * shape(config).parameters + counts.get("reference", 0)
        lines.append(f"The host's memory holds {host / 1e9:.1f} GB of averages and reference.")
    if not named:
        return "\n".join(lines)
    if counts["peak"] <= 1e9 * memory:
        rollout, update = step_seconds(script, config, options.card, args, prompt, response, gpus)
        steps, evaluations = run_hours(script, config, options.card, args, prompt, response, gpus)
        whole = steps + evaluations
        duration = f"{60 * whole:8.0f} min" if whole < 1 else f"{whole:8.1f} h  "
        lines += [
            "",
            f"{rollout:8.1f} s   rollout of a step ({error_range('rollout')})",
            f"{update:8.1f} s   update of a step ({error_range('update')})",
            f"{duration} {args.num_steps} steps, with {60 * evaluations:.0f} min of evaluations",
        ]
        if script == "dapo":
            lines.append(f"Each batch that dapo.py samples in the place of equal groups takes {rollout:.1f} s more.")
    best = best_flags(script, config, options.card, args, prompt, response, gpus)
    lines.append("")
    if best is None:
        given = (script, config, options.card, args, command, prompt, response, gpus)
        others = alternatives(*given) or ["a smaller model, or more GPUs with grpo_multigpu.py"]
        lines.append(f"No --sampling-tokens and --micro-batch-tokens fit {options.card}. These would:")
        lines += [f"    {text}" for text in others]
    else:
        tried = dataclasses.replace(args, **best)
        seconds = sum(step_seconds(script, config, options.card, tried, prompt, response, gpus))
        peak = count(script, config, tried, prompt, int(memory), gpus)["peak"] / 1e9
        lines.append(f"The fastest that fits {options.card}, {seconds:.1f} s a step and {peak:.1f} GB:")
        lines.append(f"    python {shlex.join([*without(command, best), *as_flags(best)])}")
    return "\n".join(lines)


def without(command: list[str], names) -> list[str]:
    """The words of a command without the flags of these names, which are those of Args, and without their values."""
    kept, keep = [], True
    for word in command:
        if word.startswith("--"):
            name = word.removeprefix("--").removeprefix("no-").split("=")[0]
            keep = name.replace("-", "_") not in names
        if keep:
            kept.append(word)
    return kept


def as_flags(values: dict) -> list[str]:
    """The words of a command that give these values to fields of Args."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def commands_table() -> str:
    rows = []
    for memory, card, command in COMMANDS:
        path, *flags = command.split()
        script = path.removesuffix(".py")
        args = tyro.cli(module_of(script).Args, args=flags)
        config = read_config(args.model)
        peak = count(script, config, args, card=CARDS[card][0])["peak"] / 1e9
        hours = sum(run_hours(script, config, card, args))
        rows.append([f"{memory} GB", f"`python {command}`", f"{peak:.1f}", f"{hours:.1f} h, {card}"])
    return table(["GPU", "command", "GB", "200 steps"], rows)


def seconds_table() -> str:
    rows, cards = [], ["T4", "RTX 3090", "RTX 4090", "A100", "H100"]
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
        given = " ".join(as_flags(flags))
        cells = []
        for card in cards:
            rollout, update = step_seconds(script, MODELS[model], card, **flags)
            can = fits(script, MODELS[model], CARDS[card][0], **flags)
            cells.append(f"{rollout:.0f} + {update:.0f}" if can else "-")
        rows.append([f"{script}.py, {model} {given}".strip(), *cells])
    return table(["seconds of rollout + update", *cards], rows)


def peaks_table() -> str:
    rows = []
    for model in IN_TABLE:
        peaks = [count(script, MODELS[model])["peak"] / 1e9 for script in COUNTED]
        rows.append([model, *(f"{peak:.1f}" for peak in peaks)])
    return table(["GB", *(f"{script}.py" for script in COUNTED)], rows)


def errors_table() -> str:
    rows = {}
    for what, part, measured, calculated in errors():
        unit = "GB" if part == "GB" else "s"
        rows.setdefault(what, [what]).append(f"{calculated:.1f}, {measured:.1f} {unit}")
    return table(["calculated, measured", "peak", "rollout", "update"], list(rows.values()))


def example() -> str:
    """What the first command of docs/gpu.md prints."""
    command = ["grpo_lora.py", "--model", "SmolLM2-1.7B-Instruct"]
    args = arguments("grpo_lora", model=command[-1])
    options = SimpleNamespace(card="RTX 4090", gpus=1, prompt_tokens=PROMPT, response_tokens=None)
    return f"```\n{report('grpo_lora', read_config(args.model), args, options, command)}\n```\n"


TABLES = {  # name -> page, program
    "commands": ("train", commands_table),
    "example": ("gpu", example),
    "memory": ("gpu", peaks_table),
    "seconds": ("gpu", seconds_table),
    "errors": ("gpu", errors_table),
}


def find_card(text: str) -> str:
    """The name in CARDS, or the number of GB, that the flag --card means.

    4090, rtx4090 and RTX-4090 are the end of one card's name.
    """
    number = re.fullmatch(r"(\d+\.?\d*) ?(gb)?", text.lower())
    if number and float(number[1]) <= 1000:
        return number[1]
    end = re.sub(r"[ _-]", "", text.lower())
    found = [name for name in CARDS if name.lower().replace(" ", "").endswith(end)]
    if len(found) != 1:
        names = ", ".join(CARDS)
        raise argparse.ArgumentTypeError(f"{text}: write GB, at most 1000, or the end of one of these names: {names}")
    return found[0]


def main() -> None:
    parser = command_line(__doc__)
    names = f"GB, or one of: {', '.join(CARDS)}"
    parser.add_argument("--card", type=find_card, default="H100", help=names)
    parser.add_argument("--gpus", type=int, default=1, help="for grpo_multigpu.py")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--response-tokens", type=int, help="on average; by default --max-new-tokens")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="SCRIPT.py and its flags")
    options = parser.parse_args()
    if not options.command:
        for name, (page, make) in TABLES.items():
            fill(ROOT / "docs" / f"{page}.md", name, make())
        return
    path, *flags = [word for word in options.command if word != "python"]
    script, module = load(path)
    args = tyro.cli(module.Args, args=flags, prog=path)
    config = read_config(module.find_model(args))
    if script == "grpo_lora" and not shape(config).matrices:  # GPT-2 has Conv1D layers
        sys.exit(f"{path}: --model {args.model} has no torch.nn.Linear, so there's nothing to put adapters beside")
    print(report(script, config, args, options, [path, *flags]))


if __name__ == "__main__":
    main()
