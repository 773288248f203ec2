"""grpo_vllm.py: every weight reaches the engine, engine and trainer agree, samples are fair, whole steps are right.

Also: errors and Ctrl-C leave nothing behind. All tests need vllm, and are skipped without it; CONTRIBUTING.md says how
to install it for a CPU. Other files test a run's files, and kill runs.
"""

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import (
    ROOT,
    SMALL_MODEL,
    SMALL_TASK,
    default_task,
    small_flags,
    small_recipe,
    use_task,
)
from scripts import can_sample
from test_whole_step import ALGORITHMS, COMMON, double, reference
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import grpo_vllm

assert double  # a fixture

ENGINE = pytest.mark.skipif(not can_sample("grpo_vllm"), reason="vllm is not installed")
WAIT = 240  # seconds after which a test assumes that a process hangs

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, head_dim=32, max_position_embeddings=512)
# name -> (class of the configuration, fields)
FAMILIES = {
    "Llama": ("LlamaConfig", dict(tie_word_embeddings=False)),
    "Qwen2": ("Qwen2Config", dict(tie_word_embeddings=False)),
    "Qwen3": ("Qwen3Config", dict(tie_word_embeddings=True)),
    "Gemma": ("GemmaConfig", dict(tie_word_embeddings=True)),
    # vLLM has no SmolLM3 of its own, and runs that of transformers.
    "SmolLM3": ("SmolLM3Config", dict(tie_word_embeddings=True)),
}
FIELDS = dict(dataset=SMALL_TASK, examples=False, max_prompt_tokens=200, max_new_tokens=24)
FIELDS |= dict(temperature=1.0, gradient_checkpointing=False, device="cpu")


def save_model(folder, name, **fields):
    """Write a random model of this family, with the bundled model's tokenizer, and return the folder's name."""
    kind, own = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(grpo_vllm.BUNDLED.model)
    given = SIZES | own | dict(bos_token_id=1, eos_token_id=2, pad_token_id=0) | fields
    torch.manual_seed(3)
    config = getattr(transformers, kind)(vocab_size=len(tokenizer), **given)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # A bias or a norm that is 0 or 1 everywhere could be lost without an effect.
        parameter.data += 0.1 * torch.randn(parameter.shape)
    # vLLM must not use these settings.
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---- whole runs


def run_main(tmp_path, name="run", **given):
    """Run main on the tests' model and return the run's folder."""
    fields = small_recipe(grpo_vllm) | dict(device="cpu", runs_dir=str(tmp_path), run_name=name)
    grpo_vllm.main(grpo_vllm.Args(**fields | given))
    return tmp_path / name


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def in_double(double, monkeypatch):
    """Let main compute in float64, except in calls of vLLM, which has no float64."""
    exact, rounded = torch.Tensor.double, torch.Tensor.float
    double(grpo_vllm)

    def in_single(function):
        def call(*args, **kwargs):
            torch.Tensor.float = rounded
            torch.set_default_dtype(torch.float32)
            try:
                return function(*args, **kwargs)
            finally:
                torch.Tensor.float = exact
                torch.set_default_dtype(torch.float64)

        return call

    for name in ("load_engine", "refresh_engine", "sample_responses"):
        monkeypatch.setattr(grpo_vllm, name, in_single(getattr(grpo_vllm, name)))


# (fields, whether some weights must be truncated)
STEPS = [
    (dict(engine_dtype="bfloat16", rollout_correction=1.002, dual_clip=1.05, seed=1), True),
    (dict(num_iterations=1, num_minibatches=1, rollout_correction=2.0), False),
]


@ENGINE
@pytest.mark.parametrize("given, truncated", STEPS, ids=["bfloat16", "float32"])
def test_whole_steps(given, truncated, in_double, monkeypatch, tmp_path):
    """Three steps of main produce the weights and metrics of a computation that goes token by token, in float64.

    The test records the samples of the engine with their log-probabilities. The reference computes the rest.
    """
    steps, sample, split = [], grpo_vllm.sample_responses, grpo_vllm.minibatches

    def recorded_sample(args, engine, problems, num_samples, temperature, eos_ids):
        # The trainer's head is in float32. A head in bf16 rounds its logits.
        assert engine.llm_engine.vllm_config.model_config.head_dtype == torch.float32
        rollout = sample(args, engine, problems, num_samples, temperature, eos_ids)
        rollout = rollout._replace(sampled_logprobs=rollout.sampled_logprobs.double())
        if temperature > 0:
            sequences, sampled = [], []
            for i in range(len(rollout.response_ids)):
                counts = rollout.response_mask[i]
                prompt = rollout.prompts[i]
                assert prompt == problems[i // num_samples]["prompt_ids"]
                sequences.append((prompt, rollout.response_ids[i][counts].tolist()))
                sampled.append(rollout.sampled_logprobs[i][counts].tolist())
            new = {"sequences": sequences, "sampled": sampled, "greedy": [], "minibatches": []}
            steps.append(new)
        return rollout

    def recorded_split(*call):
        for minibatch in split(*call):
            steps[-1]["minibatches"].append(minibatch.tolist())
            yield minibatch

    monkeypatch.setattr(grpo_vllm, "sample_responses", recorded_sample)
    monkeypatch.setattr(grpo_vllm, "minibatches", recorded_split)
    known = {field.name for field in dataclasses.fields(grpo_vllm.Args)}
    common = {name: value for name, value in COMMON.items() if name in known}
    folder = run_main(tmp_path, **common | dict(num_steps=3) | given)

    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    for number, step in enumerate(steps, start=1):
        step["samples"] = [sample for sample in samples if sample["step"] == number]
    fields = json.loads((folder / "args.json").read_text())
    args = SimpleNamespace(**fields, staleness=1)
    found = reference(ALGORITHMS["grpo_offpolicy"], args, steps)
    for metrics, of_reference in zip(read_metrics(folder)[1:], found.metrics, strict=True):
        assert {key: metrics[key] for key in of_reference} == pytest.approx(
            of_reference, rel=1e-6, abs=1e-9
        )
    assert any(metrics["rollout/truncated_frac"] > 0 for metrics in found.metrics) == truncated
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    start = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float64).state_dict()
    for name, weights in found.saved["model"].state_dict().items():
        torch.testing.assert_close(saved[name], weights, rtol=1e-6, atol=1e-8)
    assert max((saved[name] - start[name]).abs().max() for name in start) > 1e-4
    # The gap is large only if the engine's weights are stale, or rounded.
    gaps = [metrics["rollout/logprob_gap"] for metrics in found.metrics]
    assert max(gaps) < (0.02 if truncated else 1e-5) and min(gaps) > 0


@ENGINE
def test_evaluated_are_the_current_weights(tmp_path):
    """The last evaluation equals that of the saved model, sampled by grpo.py."""
    folder = run_main(tmp_path, num_steps=2, learning_rate=2e-3, num_prompts=4, eval_size=100)
    fields = json.loads((folder / "args.json").read_text())
    known = {field.name for field in dataclasses.fields(grpo.Args)}
    args = grpo.Args(**{name: value for name, value in fields.items() if name in known})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    task = default_task(grpo)
    problems = grpo.load_data(args, task, tokenizer)[1]
    last = read_metrics(folder)[-1]
    for model, same in ((str(folder / "model"), True), (args.model, False)):
        policy = AutoModelForCausalLM.from_pretrained(model)
        found, _ = grpo.evaluate(args, task, policy, tokenizer, problems, torch.tensor([2]))
        assert (found == {name: last[name] for name in found}) == same


@ENGINE
def test_a_wrong_temperature_ends_the_run(tmp_path, monkeypatch):
    """Even under bf16, the first step tells a wrong temperature from rounding."""
    whole = grpo_vllm.sample_responses

    def wrong(args, engine, problems, num_samples, temperature, eos_ids):
        return whole(args, engine, problems, num_samples, 0.9 * temperature, eos_ids)

    given = dict(engine_dtype="bfloat16", num_steps=1, eval_size=4)
    run_main(tmp_path, **given)
    monkeypatch.setattr(grpo_vllm, "sample_responses", wrong)
    with pytest.raises(ValueError, match="sampling and training differ"):
        run_main(tmp_path, name="wrong", **given)


@ENGINE
def test_a_failed_run_leaves_no_engine(tmp_path, monkeypatch):
    """A notebook keeps the last exception, whose frames refer to the engine."""

    def fail(completions, **columns):
        raise ZeroDivisionError

    use_task(monkeypatch, grpo_vllm, [fail])
    with pytest.raises(ZeroDivisionError) as kept:
        run_main(tmp_path, num_steps=1, eval_size=4)
    gc.unfreeze()  # vLLM hides its tensors from gc
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    assert max(x.untyped_storage().nbytes() for x in tensors) < 2**29
    assert kept.value is not None


# ---- as a program


def start_program(tmp_path, *flags):
    """Start python grpo_vllm.py with these flags as a user would, and return the process."""
    command = [sys.executable, str(ROOT / "grpo_vllm.py"), *map(str, flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)


@ENGINE
def test_a_program_that_is_interrupted_goes_on_and_ends(tmp_path):
    """Ctrl-C ends the run and leaves no process. It goes on from its last checkpoint."""
    folder = tmp_path / "run"
    flags = [*small_flags("grpo_vllm"), "--num-prompts", 4, "--eval-size", 8, "--device", "cpu"]
    flags += ["--runs-dir", tmp_path, "--run-name", "run"]
    flags += ["--save-every", 1]
    process = start_program(tmp_path, *flags, "--num-steps", 100000)
    deadline = time.monotonic() + WAIT
    while not (folder / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):  # nothing is left of its process group
        os.killpg(process.pid, 0)

    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["metrics"] in read_metrics(folder)
    # Let the run end after one more step.
    fields = json.loads((folder / "args.json").read_text())
    fields["num_steps"] = saved["state"]["step"] + 1
    (folder / "args.json").write_text(json.dumps(fields))
    process = start_program(tmp_path, *flags, "--num-steps", fields["num_steps"])
    out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 0 and "after: accuracy" in out, err
    # At the start the engine's weights are random. The first hand-over replaces them.
    assert read_metrics(folder)[-1]["rollout/logprob_gap"] < 1e-5


# ---- the engine against the trainer


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    """Args, engine, model, tokenizer and EOS ids of a random model of the family request.param."""
    folder = save_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    args = grpo_vllm.Args(model=folder, **FIELDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, eos_ids = grpo_vllm.load_model(args, tokenizer)
    engine = grpo_vllm.load_engine(args, model)
    yield args, engine, model, tokenizer, eos_ids
    del engine
    gc.collect()


def some_prompts(count, length):
    """Problems with random prompts of this many tokens."""
    torch.manual_seed(length)
    return [{"prompt_ids": row} for row in torch.randint(3, 16, (count, length)).tolist()]


def sample(started, problems, num_samples=2, temperature=1.0, **given):
    args, engine, _, _, eos_ids = started
    args = dataclasses.replace(args, **given)
    return grpo_vllm.sample_responses(args, engine, problems, num_samples, temperature, eos_ids)


def largest_gap(started, rollout, temperature=1.0):
    """The largest difference between the log-probabilities of engine and trainer."""
    _, _, model, _, _ = started
    with torch.no_grad():
        exact = grpo_vllm.compute_logprobs(model, rollout, temperature)
    return (exact - rollout.sampled_logprobs).abs().max().item()


def all_families(function):
    return ENGINE(pytest.mark.parametrize("started", FAMILIES, indirect=True)(function))


def one_family(function):
    return ENGINE(pytest.mark.parametrize("started", ["Gemma"], indirect=True)(function))


@all_families
def test_every_parameter_reaches_the_engine(started):
    """After each hand-over, engine and trainer agree, whichever parameter has changed.

    Prompts of 150 tokens fill a block of 128 keys and values, which the engine would use again.
    """
    _, engine, model, _, _ = started
    problems = some_prompts(4, 9) + some_prompts(2, 150)
    grpo_vllm.refresh_engine(engine, model)
    rollout = sample(started, problems)
    assert largest_gap(started, rollout) < 1e-5
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter += 0.05 * torch.randn(parameter.shape)
        # Otherwise the engine couldn't be caught with the old parameter.
        assert largest_gap(started, rollout) > 1e-4, name
        grpo_vllm.refresh_engine(engine, model)
        rollout = sample(started, problems)
        assert largest_gap(started, rollout) < 1e-5, name


@all_families
def test_log_probabilities_are_those_at_the_temperature(started):
    _, engine, model, _, _ = started
    grpo_vllm.refresh_engine(engine, model)
    for temperature in (0.6, 1.7):
        rollout = sample(started, some_prompts(8, 12), temperature=temperature)
        assert largest_gap(started, rollout, temperature) < 1e-5
        assert largest_gap(started, rollout, 1.0) > 0.1


@one_family
def test_keys_and_values_that_are_still_in_use_are_an_error(started, monkeypatch):
    _, engine, model, _, _ = started
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="old weights"):
        grpo_vllm.refresh_engine(engine, model)


@pytest.fixture
def uniform(started):
    """The model with a head of zeros: all tokens have the same probability."""
    _, engine, model, _, _ = started
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    grpo_vllm.refresh_engine(engine, model)
    yield
    model.load_state_dict(before)
    grpo_vllm.refresh_engine(engine, model)


@one_family
def test_samples_share_no_random_numbers(started, uniform):
    """No two of 128 responses to one prompt, asked 16 times, begin alike; the step's seed decides them all.

    With one seed for all prompts, each response would come 16 times.
    """
    [prompt] = some_prompts(1, 5)

    def begin_with(seed):
        torch.manual_seed(seed)
        rollout = sample(started, [prompt] * 16, num_samples=8)
        rows = zip(rollout.response_ids, rollout.response_mask, strict=True)
        responses = [row[mask].tolist() for row, mask in rows]
        return [tuple(response[:8]) for response in responses if len(response) >= 8]

    first, again, other = begin_with(1), begin_with(1), begin_with(2)
    assert len(first) > 32 and len(set(first)) == len(first)
    assert first == again and not set(first) & set(other)


@one_family
def test_each_prompt_has_a_seed_from_the_seed_of_the_step(started, monkeypatch):
    """On a GPU, the engine has a random state of its own, with which a run that goes on couldn't go on."""
    asked, generate = [], started[1].generate

    def recorded(prompts, options, **more):
        asked.append([option.seed for option in options])
        return generate(prompts, options, **more)

    monkeypatch.setattr(started[1], "generate", recorded)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        sample(started, [{"prompt_ids": [3, 4, 5]}] * 6)
    assert asked[0] == asked[1] and None not in asked[0]
    assert len(set(asked[0] + asked[2])) == 12


@one_family
def test_all_tokens_are_drawn_equally_often(started, uniform):
    """2,000 tokens of a uniform distribution: no top-k, and no bias of the seeds.

    The statistic is chi-square. For V - 1 degrees of freedom it has mean V - 1 and variance 2 (V - 1).
    """
    torch.manual_seed(0)
    rollout = sample(started, some_prompts(250, 3), num_samples=8, max_new_tokens=1)
    counts = torch.bincount(rollout.response_ids[:, 0]).double()
    V, expected = len(counts), 2000 / len(counts)
    assert len(started[3]) == V
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (V - 1)) < 5 * (2 * (V - 1)) ** 0.5


@one_family
def test_responses_end_at_each_eos_id_or_at_the_limit(started, uniform):
    """The EOS token counts. 2 is the EOS token of the model, but it doesn't end a response unless it's in eos_ids."""
    for eos_ids in ([2, 7], [9]):
        mine = (*started[:4], torch.tensor(eos_ids))
        rollout = sample(mine, some_prompts(32, 4), num_samples=4, max_new_tokens=10)
        assert rollout.response_ids.shape == rollout.sampled_logprobs.shape == (128, 10)
        lengths, drawn = set(), set()
        for ids, mask in zip(rollout.response_ids, rollout.response_mask, strict=True):
            tokens = ids[mask].tolist()
            assert mask[: len(tokens)].all()
            assert not set(tokens[:-1]) & set(eos_ids)
            assert tokens[-1] in eos_ids or len(tokens) == 10
            lengths.add(len(tokens))
            drawn |= set(tokens)
        assert len(lengths) > 4 and 10 in lengths and {*eos_ids, 2} <= drawn
        assert (rollout.sampled_logprobs[~rollout.response_mask] == 0).all()


@one_family
def test_the_rollout_is_in_group_order_and_padded_as_documented(started):
    """Sequence i belongs to prompt i // G. Responses are padded on the right; texts have no EOS token."""
    tokenizer = started[3]
    problems = [*some_prompts(2, 9), *some_prompts(1, 3), *some_prompts(2, 6)]
    torch.manual_seed(0)
    rollout = sample(started, problems, num_samples=3)
    completions = grpo_vllm.response_texts(tokenizer, rollout, started[4])
    for i in range(15):
        assert rollout.prompts[i] == problems[i // 3]["prompt_ids"]
        mask = rollout.response_mask[i]
        tokens = rollout.response_ids[i][mask].tolist()
        assert mask[: len(tokens)].all()
        text_ids = tokens[:-1] if tokens[-1] == 2 else tokens
        assert completions[i] == tokenizer.decode(text_ids)
    assert [len(prompt) for prompt in rollout.prompts] == [9] * 6 + [3] * 3 + [6] * 6
