"""grpo_lora.py: the adapters' computation, the layers that have adapters, and the files for other libraries."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, SMALL_MODEL, small_recipe
from peft import PeftModel
from test_sampling import build
from torch.func import functional_call
from transformers import AutoModelForCausalLM

import grpo_lora

ADDER = ROOT / "assets" / "addition" / "adder"
FAMILIES = ["Llama", "Llama, tied head", "Qwen2", "GPT-NeoX", "Gemma 3, long window"]
FAMILIES += ["Phi, bias in the head", "OPT, positions from 2"]
IDS = torch.tensor([[3, 4, 30, 2, 19], [41, 8, 7, 45, 12]])


def make_args(rank=3, alpha=5, seed=1, model="base"):
    return SimpleNamespace(lora_rank=rank, lora_alpha=alpha, seed=seed, model=model)


def trained(model):
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def adapted(args, model):
    """The model with adapters like after some training: no B is 0."""
    copied = grpo_lora.add_adapters(args, model)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, x in trained(copied).items():
            x += 0.2 * torch.randn_like(x) if name.endswith("lora_B") else 0.0
    return copied


def explicit(args, adapters, weights):
    """All weights of the model by name. W + (alpha / rank) B A replaces each W that has adapters."""
    merged = dict(weights)
    for name, A in adapters.items():
        if name.endswith(".lora_A"):
            layer = name.removesuffix(".lora_A")
            product = adapters[f"{layer}.lora_B"] @ A
            weight = weights[f"{layer}.weight"]
            merged[f"{layer}.weight"] = weight + args.lora_alpha / args.lora_rank * product
    return merged


def test_low_rank_by_hand():
    """x = (1, 2), A = ((3, 4), (5, 6)), B = ((1, 0), (0, 1), (1, 1)): A x = (11, 17), B A x = (11, 17, 28)."""
    A = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    B = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x, output = torch.tensor([[1.0, 2.0]]), torch.ones(1, 3)
    found = grpo_lora.add_low_rank(output, x, A, B, lora_alpha=6)
    # alpha / rank is 6 / 2. The output of the layer itself is 1.
    assert found.tolist() == [[34.0, 52.0, 85.0]] and output.tolist() == [[1.0, 1.0, 1.0]]
    wide = grpo_lora.add_low_rank(torch.ones(2, 1, 3), x.expand(2, 1, 2), A, B, lora_alpha=6)
    assert wide.tolist() == [[[34.0, 52.0, 85.0]]] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_merged_weight(family):
    """In float64 the adapted model equals a model with weights W + (alpha / rank) B A, computed with autograd."""
    args, base = make_args(), build(family).double()
    torch.set_default_dtype(torch.float64)
    try:
        model = adapted(args, base)
    finally:
        torch.set_default_dtype(torch.float32)
    direction = torch.randn(*IDS.shape, base.config.vocab_size, dtype=torch.float64)
    mine = trained(model)
    logits = model(IDS).logits
    (logits * direction).sum().backward()
    theirs = {name: x.detach().clone().requires_grad_() for name, x in mine.items()}
    merged = explicit(args, theirs, dict(base.named_parameters()))
    expected = functional_call(base, merged, (IDS,)).logits
    (expected * direction).sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for name in mine:
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, rtol=1e-7, atol=1e-9)
        assert theirs[name].grad.abs().max() > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_each_linear_layer_of_the_trunk_has_adapters(family):
    base = build(family)
    model = grpo_lora.add_adapters(make_args(), base)
    layers = {
        name: layer for name, layer in base.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    head = {name for name, layer in layers.items() if layer is base.get_output_embeddings()}
    assert len(head) == 1 and len(layers) > 4
    found = {name: tuple(x.shape) for name, x in trained(model).items()}
    expected = {}
    for name in layers.keys() - head:
        out, width = layers[name].weight.shape
        expected |= {f"{name}.lora_A": (3, width), f"{name}.lora_B": (out, 3)}
    assert found == expected


def test_the_start():
    """The seed draws A uniformly within 1 / sqrt(in). B is 0, so policy and reference are equal bit by bit."""
    base = build("Llama")
    before = base(IDS).logits
    models = {seed: grpo_lora.add_adapters(make_args(rank=8, seed=seed), base) for seed in (1, 2)}
    torch.rand(3)
    again = trained(grpo_lora.add_adapters(make_args(rank=8), base))
    assert torch.equal(models[1](IDS).logits, before) and torch.equal(base(IDS).logits, before)
    for name, x in trained(models[1]).items():
        assert x.dtype == torch.float32 and torch.equal(x, again[name])
        if name.endswith("lora_B"):
            assert not x.any()
        else:
            bound = x.shape[1] ** -0.5
            assert 0.9 * bound < x.abs().max() <= bound
            assert x.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
            assert not torch.equal(x, trained(models[2])[name])


def test_the_reference_has_the_same_weights_and_no_adapters():
    """Policy and reference share the weights, and the adapters don't change the reference."""
    base = build("Qwen2")
    before = base(IDS).logits
    model = adapted(make_args(), base)
    assert (model(IDS).logits - before).abs().max() > 0.1
    assert torch.equal(base(IDS).logits, before)
    own = dict(model.named_parameters())
    for name, x in base.named_parameters():
        assert own[name].data_ptr() == x.data_ptr() and not x.requires_grad


@pytest.mark.parametrize("family", FAMILIES[1::2])
def test_peft_loads_the_adapters_and_transformers_the_merged_model(family, tmp_path):
    base = build(family)
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    args = make_args(rank=4, alpha=12, model=str(tmp_path / "base"))
    model = adapted(args, base)
    with torch.no_grad():
        before, expected = base(IDS).logits, model(IDS).logits
        weights = explicit(args, trained(model), dict(base.named_parameters()))
        weights = {name: x.clone() for name, x in weights.items()}
        grpo_lora.save_adapters(args, model, tmp_path / "adapter")
        grpo_lora.merge_adapters(args, model)
        # No hook adds the adapters a second time.
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        model.save_pretrained(tmp_path / "model")
        start = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        of_peft = PeftModel.from_pretrained(start, str(tmp_path / "adapter"))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert (expected - before).abs().max() > 0.1
        torch.testing.assert_close(of_peft(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    state = dict(merged.named_parameters())
    assert state.keys() == weights.keys() and merged.dtype == torch.float32
    for name, x in weights.items():
        torch.testing.assert_close(state[name], x)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert config["base_model_name_or_path"] == args.model


def run(tmp_path, **given):
    small = dict(num_steps=2, num_prompts=2, num_generations=4, eval_size=2, device="cpu")
    small |= dict(runs_dir=str(tmp_path / "runs"), run_name="run")
    args = grpo_lora.Args(**small_recipe(grpo_lora) | small | given)
    grpo_lora.main(args)
    return tmp_path / "runs" / "run"


def test_what_a_run_keeps(tmp_path):
    """The checkpoint has 12 bytes for each number in A and B, and doesn't contain the model's weights."""
    folder = run(tmp_path, lora_rank=2, learning_rate=1e-2)
    base = AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    model = grpo_lora.add_adapters(make_args(rank=2), base)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    for x, y in zip(trained(model).values(), saved["model"].values(), strict=True):
        assert not torch.equal(x, y), "training must change the adapters"
        x.data = y
    args = make_args(rank=2, alpha=32)
    expected = explicit(args, trained(model), dict(base.named_parameters()))
    written = AutoModelForCausalLM.from_pretrained(folder / "model")
    for name, x in written.named_parameters():
        torch.testing.assert_close(x, expected[name])
    numbers = sum(x.numel() for x in trained(model).values())
    tensors = [*saved["model"].values()]
    tensors += [x for state in saved["optimizer"]["state"].values() for x in state.values()]
    kept = sum(x.numel() * x.element_size() for x in tensors if x.ndim)
    assert kept == 12 * numbers < (folder / "checkpoint.pt").stat().st_size < 12 * numbers + 150_000


def test_without_a_reference(tmp_path):
    records = [json.loads(line) for line in (run(tmp_path, beta=0.0) / "metrics.jsonl").open()]
    assert "kl/ref" not in records[-1] and records[-1]["optim/grad_norm"] > 0


def test_a_model_without_linear_layers_is_refused(tmp_path):
    """GPT-2's layers are Conv1D, except the head. No weight would be trained, in silence."""
    fields = dict(n_embd=32, n_layer=1, n_head=2, n_positions=128)
    config = transformers.GPT2Config(vocab_size=57, **fields, eos_token_id=2, bos_token_id=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    for path in ADDER.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "gpt2")
    with pytest.raises(ValueError, match="empty parameter list"):
        run(tmp_path, model=str(tmp_path / "gpt2"), max_new_tokens=32)
    assert not (tmp_path / "runs").exists()
