"""benchmark/plan.py, whose tables docs/gpu.md and train.md show: it counts as torch does. test_cuda.py measures."""

import dataclasses
from types import SimpleNamespace

import plan
import pytest
import torch
import transformers
import tyro
from conftest import ROOT
from scripts import SCRIPTS
from shared import marked
from transformers import AutoModelForCausalLM

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


def test_the_models_have_as_many_parameters_as_their_names_say():
    """The counts, in millions, must match the model cards, which are independent of plan.MODELS."""
    cards = [135, 362, 494, 596, 1544, 1711, 3086, 7616]
    found = [round(plan.shape(config).parameters / 1e6) for config in plan.MODELS.values()]
    assert found == cards


def test_bytes_by_hand():
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
    assert found == {
        "grpo": 4 + 1,
        "dr_grpo": 4,
        "rloo": 4 + 1 + 1,
        "gspo": 4 + 3 / 4,
        "ppo_rlhf": 4 * 4 + 1 + 1 + 1 + 4 * 4,
        "grpo_lora": 3 + 1,
        "self_distill": 4 + 1,
    }
    args = plan.arguments("grpo", gradient_checkpointing=False, num_iterations=2, beta=0.0)
    assert plan.passes("grpo", SMOL, args) == 2 * 3


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
    work = 2 * 5 * (2 * 100 * 34 + 2 * 10 * 6)
    assert update == pytest.approx(work / 0.36 + 0.003)


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


def test_the_errors_are_those_of_the_records():
    """The calculated numbers are as close to the recorded steps as the page says."""
    found = plan.errors()
    assert len(found) == 15
    for what, part, measured, calculated in found:
        if part == "GB":  # never less than was measured
            assert measured < calculated < 1.25 * measured, what
        elif part == "rollout":
            assert calculated == pytest.approx(measured, rel=0.1), what


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


def test_the_tables_are_those_of_the_program():
    for name, (page, make) in plan.TABLES.items():
        assert marked(name, make()) in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_the_commands_fit_their_cards():
    for memory, card, command in plan.COMMANDS:
        path, *flags = command.split()
        script = path.removesuffix(".py")
        args = tyro.cli(plan.module_of(script).Args, args=flags)
        assert plan.CARDS[card][0] >= memory
        assert plan.fits(script, plan.read_config(args.model), memory, args), command
