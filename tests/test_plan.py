"""benchmark/plan.py, whose tables docs/gpu.md and train.md show: it counts as torch does. test_cuda.py measures."""

import dataclasses
import shlex
import subprocess
from types import SimpleNamespace

import families
import plan
import pytest
import torch
import transformers
import tyro
from conftest import ROOT
from scripts import SCRIPTS, read_script
from shared import marked, parent_of_patch
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.cache_utils import StaticLayer

import grpo
import grpo_lora

TINY = dict(num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
TINY |= dict(intermediate_size=80, vocab_size=97, max_position_embeddings=64, head_dim=8)
CONFIGS = {
    "Llama": transformers.LlamaConfig(**TINY),
    "Llama, tied head": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "Qwen2": transformers.Qwen2Config(**TINY),
    "Qwen3": transformers.Qwen3Config(**TINY | dict(head_dim=12)),
    "Gemma 3": transformers.Gemma3TextConfig(**TINY | dict(head_dim=20)),
}
SMOL = plan.MODELS["SmolLM2-1.7B"]
# These keep compressed keys, or one key head for all. The plan counts more: a model that doesn't fit by count may fit.
FEWER_KEYS = ["MiniCPM3", "DeepSeek V2", "GLM-4.7 Flash", "Falcon", "Falcon, ALiBi"]
REFUSED = ["Gemma 3n", "Gemma 4", "Gemma 3n as published", "Gemma 4 as published", "Mamba", "RWKV"]


@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_and_keys_are_those_that_torch_counts(family):
    config = CONFIGS[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    given = config.to_dict()
    cache = model(torch.zeros(2, 5, dtype=torch.long, device="meta")).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    s = plan.shape(given)
    assert 2 * 5 * 2 * s.attending * s.keys == numbers
    args = grpo_lora.Args(lora_rank=5)
    model = grpo_lora.add_adapters(args, AutoModelForCausalLM.from_config(config))
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert plan.adapters(given, 5) == trained


@pytest.mark.parametrize("family", [*families.FAMILIES, "Mamba", "RWKV"])
def test_families_keep_the_keys_that_are_counted(family):
    """The cache of a small model, as the scripts fill it, against the count. Some families are refused."""
    if families.IS_OLDER and family in families.NEED_523:
        pytest.skip("this transformers doesn't know the family")
    config = families.small_config(family)
    if family in REFUSED:
        with pytest.raises(SystemExit, match="can't count the family (gemma3n|gemma4|mamba|rwkv)"):
            plan.shape(config.to_dict())
        return
    model = families.random_model(config)
    mask = torch.ones(2, 8, dtype=torch.bool)
    layers = grpo.prefill(model, mask.long(), mask).cache.layers
    # Layers with a state have no keys. Some of them still have the class of a layer with keys.
    kept = [layer for layer in layers if isinstance(layer, StaticLayer) and layer.keys is not None]
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in kept)
    s = plan.shape(config.to_dict())
    counted = 2 * 8 * 2 * s.attending * s.keys
    assert counted > numbers if family in FEWER_KEYS else counted == numbers
    if not hasattr(config, "vision_config"):  # the test's model has only a part of these
        assert s.parameters == sum(x.numel() for x in model.parameters())
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert s.tied == (head.weight is embedding.weight)
        tables = {id(head.weight), id(embedding.weight)}
        assert s.body == sum(x.numel() for x in model.parameters() if id(x) not in tables)


def test_gpt2_has_no_layer_for_adapters(monkeypatch, tmp_path):
    """Its layers are Conv1D, so grpo_lora.py can't train it. The inner width is that of its MLP."""
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50)
    assert plan.shape(config.to_dict()).F == 4 * 32
    config.save_pretrained(tmp_path)
    command = ["--card", "24", "grpo_lora.py", "--model", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["plan.py", *command])
    with pytest.raises(SystemExit, match="has no torch.nn.Linear"):
        plan.main()


def test_the_models_have_as_many_parameters_as_their_names_say():
    """The counts, in millions, must match the model cards, which are independent of plan.MODELS."""
    cards = [135, 362, 494, 596, 1544, 1711, 3086, 7616]
    found = [round(plan.shape(config).parameters / 1e6) for config in plan.MODELS.values()]
    assert found == cards


def test_bytes_by_hand(monkeypatch):
    """One layer with D = Q = K = F = 2 and V = 3 has 28 numbers in matrices, 4 + 2 in norms, 6 in a tied head."""
    config = plan.llama(1, 2, 1, 1, 2, 3)
    assert plan.shape(config).parameters == 40 and plan.adapters(config, 1) == 28
    flags = dict(sampling_tokens=1260, num_prompts=1, num_generations=2)
    found = plan.count("grpo", config, **flags)
    assert [found[name] for name in ("weights", "averages", "gradients")] == [160, 320, 160]
    assert found["reference"] == found["sampling copy"] == 2 * 40 + 4 * 6
    # Each token has a key and a value of two numbers, with two bytes per number.
    assert found["keys and values"] == 1260 * 2 * 2 * 2
    assert "reference" not in plan.count("grpo", config, **flags, beta=0.0)
    found = plan.count("grpo_lora", config, **flags, lora_rank=1)
    assert [found[name] for name in ("weights", "averages", "gradients")] == [112, 224, 112]
    assert found["frozen weights"] == 2 * 40 + 4 * 6
    assert "reference" not in found and "sampling copy" not in found
    # The engine, the reference, and a copy for evaluations.
    found = plan.count("grpo_offpolicy", config, **flags)
    copies = [found[name] for name in ("sampling copy", "reference", "evaluation copy")]
    assert copies == [2 * 40 + 4 * 6] * 3
    assert found["peak"] - plan.count("grpo", config, **flags)["peak"] == 104
    # An engine in float32 keeps twice the bytes, and reads them.
    wide = plan.count("grpo_offpolicy", config, **flags, engine_dtype="float32")
    assert wide["sampling copy"] == 4 * 40
    assert wide["keys and values"] == 2 * found["keys and values"]
    times = [
        plan.step_seconds("grpo_offpolicy", SMOL, "H100", engine_dtype=name)[0]
        for name in ("auto", "float32")
    ]
    head = 600 * 4 * 49152 * 2048 / (0.30 * 3.35e12)  # in float32 in any case
    assert times[1] - head == pytest.approx(2 * (times[0] - head))
    # A reward model is in float32, and the value network starts as its copy, without its head.
    monkeypatch.setitem(plan.MODELS, "judge", plan.llama(2, 2, 1, 1, 2, 3, tied=False))
    P = plan.shape(plan.MODELS["judge"]).parameters
    found = plan.count("ppo_rlhf", config, **flags, reward_model="judge")
    assert found["reward model"] == 4 * P
    assert found["weights"] == 4 * (40 + P - 6 + 2)
    found = plan.count("ppo_rlhf", config, **flags, reward_model="judge", value_init="policy")
    assert found["weights"] == 4 * (40 + 40 + 2)
    # The critic's score layer has two numbers. Its head is tied, so its weights stay in the embedding.
    assert plan.count("ppo_rlhf", config, **flags)["weights"] == 4 * (40 + 40 + 2)
    # Four processes share weights, gradients and averages.
    found = plan.count("grpo_multigpu", config, gpus=4, **flags)
    assert [found[name] for name in ("weights", "averages", "gradients")] == [40, 80, 40]
    assert plan.count("grpo_vllm", config, card=24)["engine"] == 0.3 * 24e9
    # The peak is what is always there, plus the larger one of sampling and training.
    found = plan.count("grpo", config, **flags)
    always = sum(found[name] for name in ("weights", "averages", "sampling copy", "reference"))
    sampling = found["keys and values"] + found["sampling beside"]
    assert found["peak"] == always + max(sampling, found["gradients"] + found["activations"])


def test_host_adam_by_hand():
    """The model of the test above. Its largest parameter is the head, with 6 numbers."""
    config = plan.llama(1, 2, 1, 1, 2, 3)
    flags = dict(sampling_tokens=1260, num_prompts=1, num_generations=2)
    found, grpo = [plan.count(name, config, **flags) for name in ("host_adam", "grpo")]
    assert found["averages"] == 8 * 6 and found["reference"] == 2 * 40 + 4 * 6
    assert {name for name in found if found[name] != grpo[name]} == {"averages", "peak"}
    # Here activations are most of the peak. So the GPU saves the averages and the reference.
    assert grpo["peak"] - found["peak"] == 8 * 40 + 104
    # With a large vocabulary, the reference, whose head is in float32, has more bytes than the gradients.
    found = plan.count("host_adam", plan.llama(1, 2, 1, 1, 2, 3000), **flags)
    names = ("weights", "sampling copy", "reference", "activations")
    assert found["peak"] == sum(found[name] for name in names)
    # An H200 measured 18.86 GB, in a first form of the script.
    flags = dict(sampling_tokens=24576, micro_batch_tokens=2048)
    assert plan.count("host_adam", SMOL, **flags)["peak"] == pytest.approx(18.86e9, rel=0.03)
    times = [plan.step_seconds(name, SMOL, "H100")[1] for name in ("grpo", "host_adam")]
    P, head = plan.shape(SMOL).parameters, 49152 * 2048
    assert times[1] - times[0] == pytest.approx((16 * P + 2 * P + 4 * head) / 16e9)


def test_passes_by_hand():
    """Forward 1, recomputing 1, backward 2; one for the reference; one for what the first update leaves out."""
    found = {}
    for script in ("grpo", "dr_grpo", "rloo", "gspo", "ppo_rlhf", "grpo_lora", "self_distill"):
        found[script] = plan.passes(script, SMOL, plan.arguments(script))
    # Through the layers, and through the head, which a value network doesn't have.
    assert found == {
        "grpo": (4 + 1, 4 + 1),
        "dr_grpo": (4, 4),
        "rloo": (4 + 1 + 1, 4 + 1 + 1),
        "gspo": (4 + 3 / 4, 4 + 3 / 4),
        "ppo_rlhf": (4 * 4 + 1 + 1 + 1 + 4 * 4, 4 * 4 + 1 + 1),
        "grpo_lora": (3 + 1, 3 + 1),
        "self_distill": (4 + 1, 4 + 1),
    }
    # compute_logprobs recomputes the logits also without gradient checkpointing.
    args = plan.arguments("grpo", gradient_checkpointing=False, num_iterations=2, beta=0.0)
    assert plan.passes("grpo", SMOL, args) == (2 * 3, 2 * 4)
    args = plan.arguments("grpo_lora", gradient_checkpointing=False, beta=0.0)
    assert plan.passes("grpo_lora", SMOL, args) == (2, 3)


def test_seconds_by_hand():
    """A card of one byte and one FLOP a second would read all bytes, and compute all FLOP, one by one."""
    config, args = plan.llama(1, 2, 1, 1, 2, 3), plan.arguments("grpo", num_prompts=1)
    args = dataclasses.replace(args, num_generations=2, max_new_tokens=10, sampling_tokens=200)
    plan.CARDS["one"] = (1, 1.0, 1.0)
    try:
        rollout, update = plan.step_seconds("grpo", config, "one", args, prompt=90)
        short, _ = plan.step_seconds("grpo", config, "one", args, prompt=90, response=5)
    finally:
        del plan.CARDS["one"]
    weights = 2 * 34 + 4 * 6  # bytes: the head is in float32
    keys = 2 * 10 * (90 + 5) * 2 * 2 * 2  # two rows, ten steps, and 95 tokens on average
    assert rollout == pytest.approx((10 * weights + keys) / 0.30)
    assert short == pytest.approx((10 * weights + 2 * 5 * (90 + 2.5) * 8) / 0.30)
    # Each of the 100 tokens of a row has a query of two numbers, and looks at 50 tokens on average: once at their
    # keys, and once at their values.
    attention = 2 * 100 * 50 * 2 * 2
    work = 2 * 5 * (2 * 100 * 34 + attention + 2 * 10 * 6)
    assert update == pytest.approx(work / 0.36 + 0.003)
    # An embedding of its own does no work, and isn't read as a whole.
    plan.CARDS["one"] = (1, 1.0, 1.0)
    try:
        own_head = config | dict(tie_word_embeddings=False)
        untied = plan.step_seconds("grpo", own_head, "one", args, prompt=90)
        # An evaluation of 400 problems, two at a time, computes their prompts first.
        args = dataclasses.replace(args, eval_size=400, eval_every=0)
        evaluations = plan.run_hours("grpo", config, "one", args, prompt=90)[1]
    finally:
        del plan.CARDS["one"]
    assert untied == (rollout, update)
    keys = 400 * 10 * (90 + 5) * 2 * 2 * 2
    seconds = (200 * 10 * weights + keys) / 0.30 + 2 * 400 * 90 * 34 / 0.36
    assert 3600 * evaluations / 2 == pytest.approx(seconds)


def test_whole_prompts_are_sampled_at_a_time():
    """16 prompts of 8 samples with 630 tokens: 5,040 tokens for a prompt."""
    times = {}
    for tokens, parts in [(49152, 2), (16384, 6), (12288, 8), (6144, 16), (3072, 16)]:
        times[tokens] = plan.step_seconds("grpo", SMOL, "H100", sampling_tokens=tokens)[0], parts
    (most, parts), (few, few_parts) = times[6144], times[49152]
    each = (most - few) / (parts - few_parts)  # the seconds of reading the weights 300 times
    for seconds, parts in times.values():
        assert seconds - few == pytest.approx((parts - 2) * each, abs=1e-9)
    # ReMax adds a greedy response to each prompt: all 16 are one part.
    args = plan.arguments("remax", num_prompts=16, num_generations=8)
    remax = plan.decode_seconds("remax", SMOL, args, "H100", 330, 16, 1, 300)
    assert plan.step_seconds("remax", SMOL, "H100", args)[0] == pytest.approx(few + remax)


def test_a_t4_by_hand():
    """Qwen2.5-0.5B with the defaults of grpo.py, on a card whose head has no tensor cores."""
    config = plan.MODELS["Qwen2.5-0.5B"]
    # Queries and keys with biases, values as keys, output, MLP, two norms; and a last norm.
    layer = (896 * 896 + 896) + 2 * (896 * 128 + 128) + 896 * 896 + 3 * 896 * 4864 + 2 * 896
    layers, head = 24 * layer + 896, 151936 * 896
    assert (layers, head) == (357_898_112, 136_134_656)
    # 128 responses: 80,640 tokens with the prompts, 38,400 without. Each one passes 5 times: forward, again, backward
    # (2), and through the reference. The layers have 65 TFLOP/s, the head 8.1. 10 micro-batches launch 24 layers.
    # Attention: 630 tokens look at 315 on average, in 24 layers, at keys and values of 896 numbers.
    attention = 128 * 630 * 315 * 2 * 24 * 896
    computed = 2 * 5 * (80_640 * layers + attention) / 65e12 + 2 * 5 * 38_400 * head / 8.1e12
    update = computed / 0.36 + 10 * 24 * 0.003
    assert update == pytest.approx(12.33 + 0.47 + 17.93 + 0.72, abs=0.01)
    # 78 rows are sampled at a time, so there are two parts with 300 steps each. The layers have 2 bytes per number. A
    # token keeps 2 * 2 * 128 bytes in 24 layers, and a row 330 to 630 tokens.
    weights = 2 * 300 * 2 * layers / (0.30 * 0.32e12)
    keys = 38_400 * 480 * 24 * 2 * 2 * 128 / (0.30 * 0.32e12)
    # The head's FLOP for 38,400 tokens take longer than its 4 bytes per number, read 600 times.
    computed, read = 2 * 38_400 * head / 8.1e12 / 0.36, 600 * 4 * head / (0.30 * 0.32e12)
    assert (computed, read) == pytest.approx((3.59, 3.40), abs=0.01)
    rollout = weights + keys + computed
    assert rollout == pytest.approx(4.47 + 2.36 + 3.59, abs=0.01)
    assert plan.step_seconds("grpo", config, "T4") == pytest.approx((rollout, update))
    # In smaller parts, reading takes longer than the FLOP.
    parts = plan.step_seconds("grpo", config, "T4", sampling_tokens=24576)[0]
    assert parts == pytest.approx(2 * weights + keys + 2 * read)
    # bf16 is emulated on a T4, and not on an RTX 3090. The head is in float32 in any case.
    bf16, fp16 = [dataclasses.replace(plan.arguments("grpo")) for _ in range(2)]
    bf16.dtype, fp16.dtype = "bfloat16", "float16"
    slower = plan.step_seconds("grpo", config, "T4", bf16)[1]
    assert slower - update == pytest.approx(3.3 * (12.33 + 0.47), abs=0.1)
    assert plan.step_seconds("grpo", config, "T4", fp16)[1] == pytest.approx(update)
    times = [plan.step_seconds("grpo", config, "RTX 3090", args) for args in (bf16, fp16)]
    assert times[0] == times[1]


def test_cards_without_tf32_by_their_makers_numbers():
    """Of the GiB that programs see on such a card, 3 to 7 % are left, as on other cards."""
    for card, visible in [("T4", 14.56), ("RTX 2080 Ti", 10.75)]:
        assert 1.03 < visible * 2**30 / (1e9 * plan.CARDS[card][0]) < 1.07
    # GeForce cards of this generation halve their tensor cores' rate if they add up in float32.
    assert plan.CARDS["RTX 2080 Ti"][2] == 107.6e12 / 2
    assert plan.head_rate("RTX 2080 Ti") == 13.4e12 and plan.head_rate("T4") == 8.1e12
    assert plan.head_rate("RTX 3090") == plan.CARDS["RTX 3090"][2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_a_plan(name):
    options = SimpleNamespace(prompt_tokens=330, response_tokens=150, gpus=2, card="H100")
    command = [f"{name}.py", "--model", "SmolLM2-1.7B"]
    text = plan.report(name, SMOL, plan.arguments(name, model="SmolLM2-1.7B"), options, command)
    assert " GB  peak" in text and ("s   update of a step" in text) == ("It fits" in text)


def test_the_best_flags_fit_and_are_not_slower(capsys):
    args = plan.arguments("grpo_lora")
    found = dataclasses.replace(args, **plan.best_flags("grpo_lora", SMOL, "RTX 4090", args))
    assert plan.count("grpo_lora", SMOL, found)["peak"] <= 24e9
    for flags in (dict(sampling_tokens=12288), dict(micro_batch_tokens=2048)):
        other = dataclasses.replace(found, **flags)
        times = [sum(plan.step_seconds("grpo_lora", SMOL, "RTX 4090", x)) for x in (found, other)]
        assert times[0] < times[1]
    # All weights of this model don't fit: the plan says what does.
    assert plan.best_flags("grpo", SMOL, "RTX 4090", plan.arguments("grpo")) is None
    options = SimpleNamespace(prompt_tokens=330, response_tokens=None, gpus=1, card="RTX 4090")
    text = plan.report("grpo", SMOL, plan.arguments("grpo"), options, ["grpo.py"])
    assert "DOESN'T FIT" in text
    assert "host_adam.py" in text.splitlines()[-2] and "grpo_lora.py" in text.splitlines()[-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_fits_instead_is_a_command(name, monkeypatch):
    """Each proposed command is accepted, has the memory that its line says, and says what is lost."""
    args = plan.arguments(name, model="SmolLM2-1.7B-Instruct", examples=False)
    command = [f"{name}.py", "--model", "SmolLM2-1.7B-Instruct", "--no-examples"]
    for field in dataclasses.fields(args):  # and all flags with a number
        if type(field.default) in (int, float):
            command += plan.as_flags({field.name: field.default})
    # A card for the script without the reference, or one that is too small for it.
    small = {"micro_batch_tokens": 1024, "sampling_tokens": 6144, "beta": 0.0}
    small = {flag: value for flag, value in small.items() if hasattr(args, flag)}
    # The reference of adapters takes no memory, so nothing fits instead of them.
    has_kl = getattr(args, "beta", 0) > 0 and name != "grpo_lora"
    peak = plan.count(name, SMOL, dataclasses.replace(args, **small), card=40)["peak"] / 1e9
    memory = peak + 0.1 if has_kl else 24 if name != "grpo_lora" else 4
    monkeypatch.setitem(plan.CARDS, "RTX 4090", (memory, *plan.CARDS["RTX 4090"][1:]))
    lines = plan.alternatives(name, SMOL, "RTX 4090", args, command)
    scripts = [line.split()[1].removesuffix(".py") for line in lines]
    expected = [name] * has_kl + ["host_adam"] * (name == "grpo")
    assert scripts == expected + ["grpo_lora"] * (name != "grpo_lora")
    for script, line in zip(scripts, lines, strict=True):
        text, comment = line.split("  # ")
        flags = shlex.split(text)[2:]
        module = plan.module_of(script)
        parsed = tyro.cli(module.Args, args=flags)
        module.check_args(parsed)
        peak = plan.count(script, SMOL, parsed, card=int(memory))["peak"] / 1e9
        assert comment.startswith(f"{peak:.1f} GB, ") and peak <= memory
        assert parsed.model == args.model and not parsed.examples
        assert text.count("--micro-batch-tokens ") == 1
        best = {flag: getattr(parsed, flag) for flag in small}
        if script == name:
            assert comment.endswith(" s a step, without the KL") and best.pop("beta") == 0
            assert parsed == dataclasses.replace(args, **best, beta=0)
        elif script == "host_adam":
            assert comment.endswith(" s a step") and parsed == dataclasses.replace(args, **best)
        else:
            lost = f", without {plan.LOST[name]}" if name != "grpo" else ""
            assert comment.endswith(f" s a step, adapters instead of all weights{lost}")
            assert parsed.learning_rate == 3e-4 and parsed.num_generations == 8


def test_the_errors_are_those_of_the_records():
    """The calculated numbers are as close to the recorded steps as the page says."""
    found = plan.errors()
    assert len(found) == 15
    for what, part, measured, calculated in found:
        if part == "GB":  # never less than was measured
            assert measured < calculated < 1.04 * measured, what
        elif part == "rollout":
            assert calculated == pytest.approx(measured, rel=0.1), what


def test_a_step_that_failed_isnt_compared(monkeypatch):
    records = plan.read(plan.FOLDER / "gpu.jsonl")
    failed = {
        "part": "steps",
        "gpu": "NVIDIA H200",
        "name": "lora",
        "script": "grpo_lora",
        "error": "OutOfMemoryError",
    }
    before = plan.errors()
    monkeypatch.setattr(plan, "read", lambda path: [*records, failed])
    assert plan.errors() == before


def test_the_program(monkeypatch, capsys):
    """It takes a command, with a folder as the model, and with a number of GB it says nothing of time."""
    command = ["grpo.py", "--model", str(ROOT / "assets" / "addition" / "adder")]
    command += ["--max-prompt-tokens", "64", "--max-new-tokens", "32", "--sampling-tokens=4096"]
    monkeypatch.setattr("sys.argv", ["plan.py", "--card", "2", "--prompt-tokens", "6", *command])
    plan.main()
    text = capsys.readouterr().out
    assert "It fits 2 GB" in text and "rollout" not in text
    monkeypatch.setattr("sys.argv", ["plan.py", "--card", "rtx3090", *command])
    plan.main()
    *_, before, last = capsys.readouterr().out.splitlines()
    assert "fits RTX 3090" in before and last.startswith("    python grpo.py --model")
    assert "--sampling-tokens=4096" not in last and "--sampling-tokens " in last


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("4090", "RTX 4090"),
        ("3090", "RTX 3090"),
        ("rtx5090", "RTX 5090"),
        ("2080ti", "RTX 2080 Ti"),
        ("2080 Ti", "RTX 2080 Ti"),
        ("t4", "T4"),
        ("l4", "L4"),
        ("A100", "A100"),
        ("a100-40gb", "A100 40GB"),
        ("H100", "H100"),
        ("24", "24"),
        ("40GB", "40"),
        ("4", "4"),
        ("10", "10"),
        ("14.5", "14.5"),
        ("1000", "1000"),
        *[(text, None) for text in ("4080", "1001", "24000", "", "GTX 1080", "-3", "nan", "100x")],
    ],
)
def test_names_of_cards(text, card, monkeypatch, capsys):
    if card is not None:
        assert plan.find_card(text) == card
        return
    monkeypatch.setattr("sys.argv", ["plan.py", f"--card={text}", "grpo.py"])
    with pytest.raises(SystemExit):
        plan.main()
    assert "or the end of one of these names: T4, RTX 2080 Ti, RTX 3090" in capsys.readouterr().err


def run(monkeypatch, capsys, *words: str) -> str:
    """What plan.py prints for a command."""
    monkeypatch.setattr("sys.argv", ["plan.py", *words])
    plan.main()
    return capsys.readouterr().out


def test_adapters_on_another_script_are_counted_as_adapters(tmp_path):
    """grpo_tools.py with the adapters of grpo_lora.py: it has more lines of grpo_tools.py."""
    diff = ["diff", "-U1", "grpo.py", "grpo_lora.py"]
    patch = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True).stdout
    out = tmp_path / "both.py"
    command = ["patch", "-r", "-", "-o", out, "grpo_tools.py"]
    subprocess.run(command, cwd=ROOT, input=patch, capture_output=True, text=True)
    script, module = plan.load(str(out))
    assert script == "grpo_lora" and module.Caller


def test_a_copy_is_counted_as_its_script(monkeypatch, capsys, tmp_path):
    """Its flags are its own, wherever the file stands. What fits instead lacks its changes."""
    monkeypatch.chdir(tmp_path)
    place = "# ---- algorithm\n"
    added = f"{place}    tau: float = 0.5\n    bold: bool = True\n"
    text = read_script("grpo").replace(place, added, 1)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "helper.py").write_text("NAME = 'SmolLM2-1.7B-Instruct'\n")
    (tmp_path / "deep" / "tpo.py").write_text("from helper import NAME\n" + text)
    (tmp_path / "dr_mine.py").write_text(read_script("dr_grpo"))
    command = ["deep/tpo.py", "--model", "SmolLM2-1.7B-Instruct", "--tau", "0.2", "--no-bold"]
    found = run(monkeypatch, capsys, "--card", "4090", *command)
    assert found.startswith("deep/tpo.py is counted as grpo.py.\n")
    host_adam, adapters = found.splitlines()[-2:]
    for line in (host_adam, adapters):
        assert line.endswith("without the changes of deep/tpo.py")
        assert "--tau" not in line and "--no-bold" not in line
    # Without the KL, the copy itself fits a card of 36 GB.
    monkeypatch.setitem(plan.CARDS, "L40S", (36, *plan.CARDS["L40S"][1:]))
    line = run(monkeypatch, capsys, "--card", "L40S", *command).splitlines()[-3]
    assert "python deep/tpo.py --model SmolLM2-1.7B-Instruct --tau 0.2 --no-bold --beta 0 " in line
    assert line.endswith(", without the KL")
    # The rest is what the script itself prints.
    itself = run(monkeypatch, capsys, "--card", "24", "grpo.py", "--model", "SmolLM2-1.7B-Instruct")
    for path in ("deep/tpo.py", str(tmp_path / "deep" / "tpo.py")):
        found = run(monkeypatch, capsys, "--card", "24", path, *command[1:])
        assert found.split("\n", 1)[1] == itself
    # The command that fits best is the copy's, with its flags.
    found = run(monkeypatch, capsys, "--card", "H100", *command)
    assert f"    python {' '.join(command)} --sampling-tokens " in found
    found = run(monkeypatch, capsys, "--card", "24", "dr_mine.py", "--model", "SmolLM2-135M")
    assert "dr_mine.py is counted as dr_grpo.py." in found


def test_each_script_is_nearest_to_itself_and_each_patch_to_its_kind(tmp_path):
    for name in SCRIPTS:
        (tmp_path / "mine.py").write_text(read_script(name) + "\n# a change\n")
        assert plan.load(str(tmp_path / "mine.py"))[0] == name
    for patch in sorted((ROOT / "variants").glob("*.diff")):
        parent = parent_of_patch(patch.stem)
        command = ["patch", "-s", "-o", tmp_path / "mine.py", ROOT / parent, patch]
        subprocess.run(command, check=True)
        found, module = plan.load(str(tmp_path / "mine.py"))
        # A patch that takes the KL away is nearer to dr_grpo.py, which counts as grpo.py does without the KL.
        assert f"{found}.py" == parent or (found, parent) == ("dr_grpo", "grpo.py"), patch.stem
        args = module.Args(**{"teachers": {"a": "SmolLM2-1.7B"}} if patch.stem == "mopd" else {})
        for part in (plan.count, plan.passes):
            assert part(found, SMOL, args) == part(parent.removesuffix(".py"), SMOL, args)


def test_teachers_by_hand():
    """SmolLM2-1.7B teaches a student of its own size: a copy in 16 bits, and a pass. The patch mopd has two of them."""
    one = plan.arguments("distill", teacher="SmolLM2-1.7B-Instruct")
    two = SimpleNamespace(**vars(one) | {"teachers": {"a": "SmolLM2-1.7B", "b": "SmolLM2-1.7B"}})
    del two.teacher
    copied = 2 * plan.shape(SMOL).parameters + 4 * 49152 * 2048
    for args, number in [(one, 1), (two, 2)]:
        assert plan.count("distill", SMOL, args)["teacher"] == number * copied
        assert plan.passes("distill", SMOL, args) == (4 + number, 4 + number)


def test_a_machine_patch_is_counted_by_its_name(monkeypatch, capsys, tmp_path):
    """With the file, and without it."""
    monkeypatch.chdir(tmp_path)
    command = ["--card", "24", "host_adam.py", "--model", "SmolLM2-1.7B-Instruct"]
    without = run(monkeypatch, capsys, *command)
    patch = ROOT / "variants" / "host_adam.diff"
    subprocess.run(["patch", "-s", "-o", "host_adam.py", ROOT / "grpo.py", patch], check=True)
    assert run(monkeypatch, capsys, *command) == without
    assert "The host's memory holds" in without and "counted as" not in without


def test_files_that_are_no_copies(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Neither one is imported.
    (tmp_path / "half.py").write_text("def find_model(args):\n    class Args: pass\n1 / 0\n")
    (tmp_path / "other.py").write_text("class Args:\n    pass\n1 / 0\n")
    with pytest.raises(SystemExit, match="absent.py: there is no such file, and it is none of"):
        run(monkeypatch, capsys, "--card", "24", "absent.py")
    for name in ("half.py", "other.py"):
        with pytest.raises(SystemExit, match=f"{name} isn't a copy of a script: it has no class"):
            run(monkeypatch, capsys, "--card", "24", name)


def test_evaluations_are_shared_only_by_processes():
    args = plan.arguments("grpo")
    times = [plan.run_hours("grpo", SMOL, "H100", args, gpus=gpus) for gpus in (1, 4)]
    assert times[0] == times[1]
    args = plan.arguments("grpo_multigpu")
    times = [plan.run_hours("grpo_multigpu", SMOL, "H100", args, gpus=gpus)[1] for gpus in (1, 4)]
    assert times[1] < times[0]


def test_the_tables_are_those_of_the_program():
    for name, (page, make) in plan.TABLES.items():
        assert marked(name, make()) in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_the_commands_fit_their_cards():
    for memory, card, command in plan.COMMANDS:
        path, *flags = command.split()
        script = path.removesuffix(".py")
        args = tyro.cli(plan.module_of(script).Args, args=flags)
        # A T4 counts as less than the 16 GB by which it's sold.
        assert memory - 1 <= plan.CARDS[card][0] <= memory
        assert plan.fits(script, plan.read_config(args.model), plan.CARDS[card][0], args), command
