"""grpo_multigpu.py on several CPU processes: the same update on any number of them, one judge for all, a NaN on one,
a kill and the same command again. Also the rewards for other libraries that docs/extend.md shows.
"""

import json
import math
import os
import random
import re
import shutil
import signal
from multiprocessing import connection
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, default_task, free_port
from test_runs import (
    FORK,
    KILL,
    MANY_UPDATES,
    WAIT,
    assert_same,
    assert_same_runs,
    ended,
    in_child,
    make_args,
    read_checkpoint,
    read_jsonl,
    set_trap,
    without_times,
)
from test_runs import data as data  # the fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import grpo_multigpu

EOS = 2


def one_of_several(rank: int, world: int, port: int, given: dict, log: str, how: dict) -> None:
    """Run main in a forked process, like torchrun. `how` lists the changes to this process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if "rollouts" in how:
        given_rollouts(how["rollouts"], how["gradients"] if rank == 0 else None)
    if how.get("spoiled") == rank:
        spoil_second_step()
    if how.get("trapped") == rank:
        set_trap(grpo_multigpu, **how["trap"])
    if "judge" in how:
        task = SimpleNamespace(REWARDS=[judge(how["judge"], rank)])
        grpo_multigpu.load_task = lambda args: task
    if "bytes" in how:
        count_bytes(f"{how['bytes']}{rank}")
    in_child("grpo_multigpu", given, f"{log}.{rank}", None)


def judge(path: str, rank: int):
    """A random reward that also records which rank calls it."""

    def score(completions, **columns):
        with open(path, "a") as file:
            file.write(str(rank))
        return [random.SystemRandom().random() for _ in completions]

    return score


def given_rollouts(path: str, gradients: str | None) -> None:
    """Compute in float64, load the rollouts from a file and save the first gradient."""
    rollouts = torch.load(path)
    sample_responses = grpo_multigpu.sample_responses
    clip = torch.nn.utils.clip_grad_norm_
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    load = AutoModelForCausalLM.from_pretrained

    def load_double(*args, **given):
        return load(*args, **given | {"dtype": torch.float64})

    grpo_multigpu.AutoModelForCausalLM = SimpleNamespace(from_pretrained=load_double)
    saved = []

    def recorded(args, model, problems, num_samples, temperature, eos_ids):
        if temperature == 0:
            return sample_responses(args, model, problems, num_samples, temperature, eos_ids)
        *fields, logprobs = rollouts[len(saved)]
        saved.append(1)
        return grpo_multigpu.Rollout(*fields, logprobs.double())

    def clip_and_save(parameters, limit):
        parameters = list(parameters)
        whole = [parameter.grad.full_tensor() for parameter in parameters]
        if gradients is not None and not os.path.exists(gradients):
            torch.save(whole, gradients)
        return clip(parameters, limit)

    grpo_multigpu.sample_responses = recorded
    torch.nn.utils.clip_grad_norm_ = clip_and_save


def spoil_second_step() -> None:
    """Make the loss of every micro-batch of the second step NaN, only in this process."""
    policy_loss, refresh_sampler = grpo_multigpu.policy_loss, grpo_multigpu.refresh_sampler
    steps = []

    def spoiled(*args, **count):
        loss, stats = policy_loss(*args, **count)
        return loss * (math.nan if len(steps) == 1 else 1.0), stats

    def counted(*args):
        steps.append(1)
        refresh_sampler(*args)

    grpo_multigpu.policy_loss = spoiled
    grpo_multigpu.refresh_sampler = counted


def count_bytes(path: str) -> None:
    """Write the bytes of this process's weights, gradients and Adam averages to a file."""
    step = torch.optim.Adam.step

    def counted(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        tensors = [p for group in self.param_groups for p in group["params"]]
        tensors += [p.grad for p in tensors]
        for state in self.state.values():
            tensors += [x for name, x in state.items() if name != "step"]
        shares = [x.to_local() for x in tensors]
        with open(path, "w") as file:
            file.write(str(sum(x.numel() * x.element_size() for x in shares)))
        return result

    torch.optim.Adam.step = counted


@pytest.fixture
def start(data, tmp_path):
    """A function that starts a small run on `world` processes and returns the processes."""
    started = []

    def call(world, name="run", how=None, **given):
        fixed = dict(runs_dir=str(tmp_path), run_name=name, dataset=data, **MANY_UPDATES)
        given = fixed | given
        port, log = free_port(), str(tmp_path / f"{name}.log")
        for rank in range(world):
            arguments = (rank, world, port, given, log, how or {})
            started.append(FORK.Process(target=one_of_several, args=arguments, daemon=True))
            started[-1].start()
        return started[-world:]

    yield call
    for process in started:
        if process.is_alive():
            process.kill()


@pytest.fixture
def several(start, tmp_path):
    """A function that finishes a small run on `world` processes and returns the run's folder."""

    def call(world, name="run", **given):
        processes = start(world, name, **given)
        # A process waits for one that has failed, so look for the first that fails.
        codes = [None] * world
        while None in codes and not any(codes):
            pairs = zip(processes, codes, strict=True)
            running = [process.sentinel for process, code in pairs if code is None]
            assert connection.wait(running, WAIT), "the processes hang"
            codes = [process.exitcode for process in processes]
        texts = [(tmp_path / f"{name}.log.{rank}").read_text() for rank in range(world)]
        assert codes == [0] * world, "\n".join(texts)
        # Only rank 0 prints.
        for rank in range(1, world):
            assert "step" not in (tmp_path / f"{name}.log.{rank}").read_text()
        return tmp_path / name

    return call


@pytest.fixture
def rollouts(tmp_path, data):
    """A file with grpo.py's rollouts of two steps, with ragged lengths."""
    given = dict(temperature=1.5, max_prompt_tokens=64, examples=False, sampling_tokens=49152)
    args = make_args(grpo, dataset=data, **given)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    problems, steps = grpo.load_data(args, default_task(grpo), tokenizer)[0], []
    torch.manual_seed(args.seed)
    order = torch.randperm(len(problems)).tolist()  # main's
    torch.manual_seed(4)
    for step in range(2):
        batch = [problems[i] for i in order[4 * step : 4 * step + 4]]
        rollout = grpo.sample_responses(args, model, batch, 3, 1.5, torch.tensor([EOS]))
        steps.append(tuple(rollout))
    lengths = torch.stack([response_mask.sum(1) for _, _, response_mask, _ in steps])
    assert lengths.unique().numel() > 5
    torch.save(steps, tmp_path / "rollouts.pt")
    return str(tmp_path / "rollouts.pt")


# ---- the same update on any number of processes


GIVEN = dict(num_prompts=4, num_generations=3, num_steps=2, temperature=1.5, learning_rate=1e-3)
UPDATES = {
    "one": dict(num_iterations=1, num_minibatches=1, beta=0.0),
    "four": dict(num_iterations=2, num_minibatches=2, beta=0.1, gradient_checkpointing=True),
    # Each update has one sequence, so the second process only repeats the first process's micro-batch.
    "twelve": dict(num_iterations=1, num_minibatches=12, beta=0.1),
}


def numbers_of_repeats(monkeypatch, world, tokens, rollout):
    """How many micro-batches of an update with all sequences each process repeats."""
    args, numbers = grpo_multigpu.Args(micro_batch_tokens=tokens), []
    for rank in range(world):
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(world))
            patch.setenv("RANK", str(rank))
            own = grpo_multigpu.own_micro_batches(args, rollout, torch.arange(12))
        assert not own[0][2]  # it also has some of its own
        numbers.append(sum(is_repeat for _, _, is_repeat in own))
    return numbers


@pytest.mark.parametrize("updates", UPDATES)
def test_the_update_does_not_depend_on_the_number_of_processes(
    several, rollouts, tmp_path, monkeypatch, updates
):
    """In float64, 1, 2 and 4 processes compute the same results from one rollout.

    The test compares gradients, weights after two steps, metrics, samples and the evaluation.
    """
    runs, gradients, rollout = [], [], grpo_multigpu.Rollout(*torch.load(rollouts)[0])
    worlds = (1, 4) if updates == "one" else (1, 2)
    # Some processes have a micro-batch less than the others, and repeat one.
    tokens = next(
        n for n in range(30, 200) if any(numbers_of_repeats(monkeypatch, worlds[1], n, rollout))
    )
    for world in worlds:
        how = {"rollouts": rollouts, "gradients": str(tmp_path / f"gradients{world}.pt")}
        given = GIVEN | dict(micro_batch_tokens=tokens) | UPDATES[updates]
        runs.append(several(world, f"run{world}", how=how, **given))
        gradients.append(torch.load(how["gradients"]))
    assert max(x.abs().max() for x in gradients[0]) > 1e-3
    for run, gradient in zip(runs[1:], gradients[1:], strict=True):
        for one, other in zip(gradients[0], gradient, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        states = [read_checkpoint(folder)["model"] for folder in (runs[0], run)]
        for name, weights in states[0].items():
            torch.testing.assert_close(weights, states[1][name], rtol=1e-7, atol=1e-10)
        records = [without_times(read_jsonl(folder / "metrics.jsonl")) for folder in (runs[0], run)]
        for one, other in zip(*records, strict=True):
            assert one == pytest.approx(other, rel=1e-7, abs=1e-10)
        assert (runs[0] / "samples.jsonl").read_text() == (run / "samples.jsonl").read_text()
    assert (records[0][1]["policy/clip_frac"] > 0) == (updates != "one")


def test_one_process_samples_and_updates_as_grpo_does(several, tmp_path, data):
    """With one update per rollout the order of the sequences doesn't matter, so both scripts agree."""
    given = dict(num_iterations=1, num_minibatches=1, num_steps=2)
    mine = several(1, **given)
    fields = MANY_UPDATES | dict(runs_dir=str(tmp_path), run_name="grpo", dataset=data) | given
    grpo.main(make_args(grpo, **fields))
    assert (mine / "samples.jsonl").read_text() == (tmp_path / "grpo" / "samples.jsonl").read_text()
    records = [
        without_times(read_jsonl(folder / "metrics.jsonl")) for folder in (mine, tmp_path / "grpo")
    ]
    for one, other in zip(*records, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_every_process_has_its_own_noise(several, tmp_path, data):
    """All prompts of a step are equal. If both processes had the same noise, their samples would be equal, too."""
    (tmp_path / "one").mkdir()
    for split in ("train", "test"):
        line = '{"question": "47+38=", "answer": "85"}\n'
        (tmp_path / "one" / f"{split}.jsonl").write_text(line * 20)
    given = dict(dataset=str(tmp_path / "one"), num_steps=1, temperature=1.5, num_generations=4)
    samples = read_jsonl(several(2, **given) / "samples.jsonl")
    completions = [sample["completions"] for sample in samples]
    assert len(completions) == 4 and completions[:2] != completions[2:]


# ---- killed, and started again


def test_killed_and_started_again(several, start, tmp_path):
    """After a kill, the same number of processes goes on with the run bit by bit."""
    given = dict(num_steps=3, save_every=1)
    whole = several(2, "whole", **given)
    metrics, samples = read_jsonl(whole / "metrics.jsonl"), read_jsonl(whole / "samples.jsonl")
    assert [record["step"] for record in metrics] == list(range(4)) and len(samples) == 12
    # The kill hits rank 0 after it writes the checkpoint of step 2, before the checkpoint gets its name.
    trap = dict(where="replace", call=2, signals=KILL, match="checkpoint")
    processes = start(2, how={"trapped": 0, "trap": trap}, **given)
    assert ended(processes[0]) == -signal.SIGKILL
    # torchrun also kills the other processes.
    for process in processes:
        process.kill()
        process.join()
    assert read_checkpoint(tmp_path / "run")["metrics"]["step"] == 1
    assert_same_runs(several(2, **given), whole)


def test_other_flags_end_all_processes(several, start, tmp_path):
    """No process waits for another one, and each says why."""
    folder = several(2, num_steps=1)
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    for process in start(2, num_steps=1, seed=7, beta=0.5):
        assert ended(process) == 1
    for rank in (0, 1):
        text = (tmp_path / f"run.log.{rank}").read_text()
        assert f"{folder} began with another seed, beta; repeat its command" in text
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


def test_another_number_of_processes_goes_on_with_the_same_weights(several, tmp_path, data):
    """A run of two processes has ended. Its command, on one process, writes the model from the checkpoint."""
    folder = several(2, num_steps=2)
    before = read_checkpoint(folder)["model"]
    shutil.rmtree(folder / "model")
    given = MANY_UPDATES | dict(runs_dir=str(tmp_path), run_name="run", dataset=data, num_steps=2)
    metrics = grpo_multigpu.main(make_args(grpo_multigpu, **given))
    assert metrics == read_jsonl(folder / "metrics.jsonl")[-1]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert_same(dict(model.state_dict()), {name: before[name] for name in model.state_dict()})


def test_what_one_process_does_for_all(several, tmp_path, monkeypatch):
    """Rank 0 calls the judge once per step, and once per evaluation: before the first step and after the last.

    If every rank called a noisy judge, the advantages would differ. Rank 0 alone logs to Weights & Biases. And each
    rank holds its share of weights, gradients and averages. The processes take 3 and 2 of the 5 prompts.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    how = {"judge": str(tmp_path / "asked"), "bytes": str(tmp_path / "bytes")}
    folder = several(2, how=how, num_prompts=5, num_steps=2, track=True)
    assert (tmp_path / "asked").read_text() == "0000"
    means = [record["rollout/score"] for record in read_jsonl(folder / "metrics.jsonl")[1:]]
    samples = read_jsonl(folder / "samples.jsonl")
    assert len(samples) == 10
    for step, mean in enumerate(means, 1):
        rewards = [x for sample in samples if sample["step"] == step for x in sample["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(mean)
    assert len(list(tmp_path.rglob("offline-run-*"))) == 1
    held = [int((tmp_path / f"bytes{rank}").read_text()) for rank in (0, 1)]
    parameters = AutoModelForCausalLM.from_pretrained(SMALL_MODEL).num_parameters()
    assert sum(held) == 16 * parameters and max(held) < 0.51 * sum(held)


def test_a_gradient_that_is_not_finite_on_one_process_is_skipped_on_all(several):
    given = dict(num_iterations=1, num_minibatches=1, num_steps=3, save_every=1)
    # With small micro-batches, the second process doesn't only repeat others.
    folder = several(2, how={"spoiled": 1}, micro_batch_tokens=60, **given)
    records = read_jsonl(folder / "metrics.jsonl")
    assert [record.get("optim/skipped") for record in records] == [None, 0, 1, 0]
    assert all(weights.isfinite().all() for weights in read_checkpoint(folder)["model"].values())


@pytest.mark.parametrize("given", [dict(num_prompts=3), dict(eval_size=3)])
def test_sizes_that_do_not_fit_the_processes(monkeypatch, data, given):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="--num-prompts and --eval-size must be at least"):
        grpo_multigpu.check_args(make_args(grpo_multigpu, dataset=data, **given))


# ---- rewards in other libraries: the adapters of docs/extend.md


def adapters() -> dict:
    """Run the code of docs/extend.md's section on other libraries and return its names."""
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    section = page.split("## Your rewards in another library")[1]
    found = {}
    for block in re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL):
        exec(block, found)
    return found


def test_the_adapter_for_trl():
    """TRL calls a reward with keywords: prompts, completions (texts or messages) and the data set's columns."""
    reward = adapters()["trl_reward"]
    texts = ["<think></think><answer>7</answer>", "<answer>8</answer>", "none"]
    rest = dict(prompts=["q"] * 3, completion_ids=[[1]] * 3, trainer_state=None, log_extra=None)
    expected = [1.4, 0.2, 0.0]
    assert reward(completions=texts, answer=["7", "#### 7", "7"], **rest) == pytest.approx(expected)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(completions=messages, answer=["7", "#### 7", "7"], **rest) == pytest.approx(
        expected
    )


def test_the_adapter_for_verl():
    """verl calls compute_score for one response at a time."""
    score = adapters()["compute_score"]
    given = dict(data_source="openai/gsm8k", ground_truth="7", extra_info={"index": 0})
    assert score(solution_str="<think></think><answer>7</answer>", **given) == pytest.approx(1.4)
    assert json.dumps(score(solution_str="nothing", **given)) == "0.0"
