"""Whole steps of main against an independent slow computation in float64: weights and metrics.

All scripts but grpo_tools.py (test_grpo_tools.py) and grpo_vllm.py (test_vllm.py), and nine patches.

main runs in float64. The test records its samples and the sequences of each minibatch. The function `reference`
computes everything else from these records, one sequence and one token at a time: log-probabilities (by a plain
forward pass), rewards, advantages, losses, clipped gradients, torch's Adam and the schedule. It must produce the same
weights and the same metrics as main.

`reference` knows no algorithm. ALGORITHMS gives it the functions of each script and patch, in one section per script.
"""

import contextlib
import dataclasses
import io
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_patched, small_recipe
from scripts import SCRIPTS
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import grpo_process
from utils.rewards import accuracy_reward, format_reward

EOS = 2
TEACHER, ADDER = (str(ROOT / "assets" / "addition" / name) for name in ("teacher", "adder"))
COMMON = dict(num_steps=2, num_prompts=3, num_generations=4, max_new_tokens=21, temperature=1.1)
COMMON |= dict(learning_rate=2e-3, warmup_updates=2, max_grad_norm=0.7)
COMMON |= dict(num_iterations=1, num_minibatches=2, micro_batch_tokens=100)
COMMON |= dict(clip_eps=0.1, clip_eps_low=0.1, clip_eps_high=0.15, beta=0.2)
COMMON |= dict(device="cpu", eval_size=2, seed=5, save_every=2)
# The sampler's weights are up to two steps old.
STALE = dict(staleness=3, num_steps=3, num_minibatches=6, beta=0.0)
# (script or patch, fields)
CASES = [
    # All scripts share the loop over the passes, so some of them have two.
    ("grpo", dict(num_iterations=2)),
    # The last update comes after the warm-up, and not directly after it. There the schedules differ.
    (
        "grpo",
        dict(num_minibatches=1, lr_schedule="constant_with_warmup", num_steps=3, warmup_updates=1),
    ),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("rloo", dict(num_minibatches=1)),
    ("reinforce_baseline", dict(baseline="moving_average", num_steps=3)),
    (
        "reinforce_baseline",
        dict(baseline="batch_mean", num_minibatches=1, num_generations=1, num_prompts=12),
    ),
    ("reinforce_baseline", dict(baseline="none", beta=0.0)),
    # The first update has all sequences, so it supplies all log-probabilities of the old policy.
    ("dapo", dict(max_resample=5, overlong_cache=4, num_iterations=2, num_minibatches=1)),
    # There are fewer mixed groups than prompts, so some minibatches are empty. In one step there are none.
    (
        "dapo",
        dict(
            max_resample=1,
            overlong_cache=4,
            num_minibatches=6,
            num_prompts=2,
            num_generations=3,
            num_steps=3,
            seed=34,
        ),
    ),
    ("ppo_rlhf", dict(gamma=0.98, gae_lambda=0.9, value_learning_rate=3e-3, num_iterations=2)),
    # The value network's gradient is clipped in one of its two updates. If it were clipped in both, a wrong factor of
    # its loss would change nothing.
    (
        "ppo_rlhf",
        dict(reward_model=None, value_learning_rate=3e-3, num_minibatches=1, max_grad_norm=2.0),
    ),
    ("ppo_rlhf", dict(value_init="policy", value_learning_rate=3e-3, beta=0.0)),
    # Lambda is 0 in some responses. The policy doesn't change in the first step and changes in the second.
    (
        "vapo",
        dict(
            value_warmup_steps=1,
            num_iterations=2,
            gamma=0.98,
            gae_alpha=0.055,
            lm_coef=0.3,
            learning_rate=3e-4,
            value_learning_rate=3e-3,
        ),
    ),
    (
        "vapo",
        dict(value_warmup_steps=0, gae_alpha=1.0, num_minibatches=3, value_learning_rate=3e-3),
    ),
    ("gspo", dict(clip_eps_low=0.01, clip_eps_high=0.015, num_iterations=2, seed=1)),
    ("gspo", dict(clip_eps_low=3e-4, clip_eps_high=4e-4, beta=0.0)),
    # With this seed, the two samples of a prompt have equal rewards, and the greedy response has another.
    ("remax", dict(num_generations=2, num_prompts=6, seed=2)),
    (
        "grpo_offpolicy",
        dict(
            staleness=2,
            num_steps=3,
            rollout_correction=1.02,
            dual_clip=1.05,
            num_iterations=2,
            seed=1,
        ),
    ),
    ("grpo_offpolicy", dict(staleness=2, num_steps=3, num_minibatches=1, sequence_cap=1.001)),
    ("grpo_offpolicy", dict(rollout_correction=0.0, beta=0.0)),
    ("grpo_multigpu", dict(num_iterations=2)),
    ("grpo_lora", dict(lora_rank=2, learning_rate=1e-2)),
    ("distill", {}),
    ("mopd", dict(num_minibatches=2, teachers={"odd": TEACHER, "even": ADDER})),
    ("full_vocabulary", dict(num_generations=1, num_prompts=12)),
    # Some contexts are too long for the teacher.
    ("self_distill", dict(teacher_rate=0.3, num_steps=3, max_teacher_tokens=9, seed=1)),
    # With this seed, a group has only one right response.
    ("sdpo_context", dict(teacher_rate=1.0, learning_rate=5e-4, seed=2)),
    ("grpo_process", dict(seed=1)),
    ("p3o", dict(num_minibatches=4, beta=0.5, clip_eps=0.02)),
    ("clip_cov", dict(num_iterations=2, cov_low=0.05, cov_high=0.6, cov_share=1.0)),
    # There are two sequences per minibatch, so a mask can leave out a whole minibatch.
    ("geo_mask", dict(STALE, geo_low=0.96, geo_high=1.04, learning_rate=3e-4)),
    ("icepop", dict(STALE, icepop_low=0.9, icepop_high=1.1)),
    ("opsm", dict(STALE, opsm_delta=0.01, num_iterations=2)),
    ("kimi_kl", dict(STALE, num_minibatches=2, kl_tau=0.1, num_iterations=2)),
]
# The patches of variants/ that are compared here.
PATCHES = {name for name, _ in CASES} - set(SCRIPTS)


def norm(layer, hidden):
    """Root mean square norm in the precision of the input."""
    mean = hidden.pow(2).mean(-1, keepdim=True)
    return layer.weight * hidden * torch.rsqrt(mean + layer.variance_epsilon)


@pytest.fixture
def double(monkeypatch):
    """A function that makes a script compute in float64 instead of float32."""

    def call(script):
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        # The library's norm computes in float32.
        monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
        torch.set_default_dtype(torch.float64)
        for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
            if not hasattr(script, name):
                continue
            load = partial(getattr(script, name).from_pretrained)

            def in_double(*args, load=load, **kwargs):
                return load(*args, **kwargs | {"dtype": torch.float64})

            monkeypatch.setattr(script, name, SimpleNamespace(from_pretrained=in_double))

    yield call
    torch.set_default_dtype(torch.float32)


class Scaler(torch.amp.GradScaler):
    """torch's scaler, on a CPU and with gradients in float64."""

    def __init__(self):
        super().__init__("cpu", init_scale=2.0**9)

    def _unscale_grads_(self, optimizer, inv_scale, *rest):
        # The fixture `double` has made inv_scale a double, which torch refuses.
        return super()._unscale_grads_(optimizer, inv_scale.to(torch.float32), *rest)


def kind_of(answer):
    return "odd" if int(answer) % 2 else "even"


def run_main(script, monkeypatch, tmp_path, given):
    """Run main. Return its args, each step's records and the checkpoint.

    The records of a step are its sequences (prompt, response), minibatches, samples and metrics.
    """
    known = {field.name for field in dataclasses.fields(script.Args)}
    given = small_recipe(script) | COMMON | given
    fields = {name: value for name, value in given.items() if name in known}
    lines = (ROOT / "assets" / "addition" / "train.jsonl").read_text().splitlines(keepends=True)
    # The seeds of CASES are chosen for these.
    lines = [line for line in lines if line.startswith('{"question": "8')]
    fields["dataset"] = str(tmp_path / "few.jsonl")
    rows = [json.loads(line) for line in lines[:60]]
    rows = [row | {"kind": kind_of(row["answer"])} for row in rows]  # for the teachers of mopd
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = script.Args(**fields, runs_dir=str(tmp_path), run_name="run")
    steps, saved, seeds = [], [], []
    generate, minibatches = script.generate, script.minibatches
    compute_logprobs, save_checkpoint = script.compute_logprobs, script.save_checkpoint

    def recorded_generate(*call):
        ids, mask, logprobs = generate(*call)
        prompt_ids, prompt_mask, G, temperature = call[2:6]
        prompts = []
        for row, counts in zip(prompt_ids, prompt_mask, strict=True):
            prompts += [row[counts].tolist()] * G
        responses = [row[counts].tolist() for row, counts in zip(ids, mask, strict=True)]
        if not steps or steps[-1]["minibatches"]:
            steps.append({"sequences": [], "greedy": [], "minibatches": []})
            seeds.append(torch.initial_seed())
        kind = "greedy" if temperature == 0 else "sequences"  # remax.py generates both
        steps[-1][kind] += zip(prompts, responses, strict=True)
        return ids, mask, logprobs

    def recorded_minibatches(*call):
        for minibatch in minibatches(*call):
            steps[-1]["minibatches"].append(minibatch.tolist())
            yield minibatch

    def recorded_compute_logprobs(model, *call):
        assert model.training or not torch.is_grad_enabled(), "else nothing would be recomputed"
        return compute_logprobs(model, *call)

    def recorded_save_checkpoint(*call):
        save_checkpoint(*call)
        saved.append((len(steps), call[2]["step"], call[3]["step"]))

    monkeypatch.setattr(script, "save_checkpoint", recorded_save_checkpoint)
    monkeypatch.setattr(script, "generate", recorded_generate)
    monkeypatch.setattr(script, "minibatches", recorded_minibatches)
    monkeypatch.setattr(script, "compute_logprobs", recorded_compute_logprobs)
    # It changes nothing, and would take a third of the time. test_runs.py has it by hand.
    monkeypatch.setattr(script, "evaluate", lambda *call: ({"eval/accuracy": 0.0}, []))
    # Gradients are scaled as with float16 on a GPU. The scale is a power of two, so nothing is rounded.
    monkeypatch.setattr(torch.amp, "GradScaler", lambda enabled: Scaler())
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script.main(args)
    seconds = time.perf_counter() - start
    assert "step 1: " in printed.getvalue() and f"step {args.num_steps}: " in printed.getvalue()
    # A checkpoint follows every second step and the last step, and says which step it follows.
    due = [n for n in range(1, args.num_steps + 1) if n % 2 == 0 or n == args.num_steps]
    assert saved == [(n, n, n) for n in due]
    assert len(set(seeds)) == args.num_steps, "each step must draw from a seed of its own"
    run_dir = tmp_path / "run"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()][1:]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").open()]
    for step, metrics in zip(steps, records, strict=True):
        for part in ("rollout", "reward", "update"):
            assert metrics[f"time/{part}_s"] > 0
            seconds -= metrics[f"time/{part}_s"]
        step["metrics"] = metrics
        step["samples"] = [sample for sample in samples if sample["step"] == metrics["step"]]
    assert seconds > 0, "the steps can't take more seconds than the run"
    fields = json.loads((run_dir / "args.json").read_text())
    args = script.Args(**{name: value for name, value in fields.items() if name in known})
    return args, steps, torch.load(run_dir / "checkpoint.pt", weights_only=True)


# ---- the reference: the same for all scripts


def load(name):
    """The language model of this name, in float64."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64).eval()


def load_classifier(name):
    """The network of this name with a head of one label, in float64."""
    kind = AutoModelForSequenceClassification
    return kind.from_pretrained(name, num_labels=1, dtype=torch.float64).eval()


def logprobs_of(model, sequence, temperature):
    """Log-probability of each response token (|o|,), from a plain forward pass of one sequence without padding."""
    prompt, response = sequence
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(1)[range(len(response)), response]


def outputs_of(network, sequence):
    """The head's output after the prompt and after each response token (|o| + 1,)."""
    prompt, response = sequence
    hidden = network.base_model(torch.tensor([prompt + response])).last_hidden_state[
        0, len(prompt) - 1 :
    ]
    return network.score(hidden)[:, 0]


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def std(numbers):
    """The standard deviation with Bessel's correction."""
    center = mean(numbers)
    return math.sqrt(math.fsum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))


def clip_gradients(model, limit):
    """Scale all gradients so that their norm is at most the limit. Return the norm before scaling."""
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    for parameter in model.parameters():
        parameter.grad *= min(1.0, limit / (norm + 1e-6))
    return norm


def rate(args, update, num_updates):
    """The learning rate of this update (counted from 0), divided by the peak rate."""
    if update < 0:
        return 0.0
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    if args.lr_schedule == "constant_with_warmup":
        return 1.0
    return 1 - (update - args.warmup_updates) / (num_updates - args.warmup_updates)


# What most scripts have in common. Algorithm names it as its defaults.


def one_bound(args):
    return args.clip_eps, args.clip_eps


def drift(run, o, t):
    """Metrics of the log-probabilities."""
    return {"policy/approx_kl": 0.5 * (o.now[t] - o.old[t]) ** 2, "policy/entropy": -o.now[t]}


def clips(run, ratio, advantage):
    """Metrics of the clip. It acts where the ratio has moved out of its range in the direction of the advantage."""
    low = advantage < 0 and ratio < 1 - run.low
    high = advantage > 0 and ratio > 1 + run.high
    return {
        "policy/clip_frac_low": low,
        "policy/clip_frac_high": high,
        "policy/clip_frac": low or high,
    }


def ratios(run, o, t):
    ratio = math.exp(o.now[t] - o.old[t])
    return clips(run, ratio, o.A[t]) | {"policy/ratio_mean": ratio}


def k3(ref, logprob):
    return math.exp(ref - logprob) - (ref - logprob) - 1


def kl_to_reference(run, o, t):
    return {"kl/ref": k3(o.ref[t], o.now[t])} if run.args.beta > 0 else {}


class Response:
    """A response o. Its lists have a number for each of its tokens.

    The algorithm sets `advantages`. `A` has the advantages of one update: the same, unless `renew` changes them.
    """

    def __init__(self, run, sequence, text, answer):
        self.run, self.sequence, self.text, self.answer = run, sequence, text, answer
        self.prompt, self.tokens = sequence
        self.length = len(self.tokens)
        self.ended = self.tokens[-1] == EOS
        self.is_right = accuracy_reward([text], [answer]) == [1.0]
        self.counted = range(self.length)  # the tokens that have a loss
        self.told = sequence  # what the reference reads
        with torch.no_grad():
            self.old = logprobs_of(run.policy, sequence, run.args.temperature).tolist()

    @cached_property
    def ref(self):
        """The log-probabilities of the reference."""
        with torch.no_grad():
            return logprobs_of(self.run.reference, self.told, self.run.args.temperature).tolist()

    @cached_property
    def sampled(self):
        """The log-probabilities of the engine, unless the test has recorded them."""
        with torch.no_grad():
            return logprobs_of(self.run.engine, self.sequence, self.run.args.temperature).tolist()


@dataclass
class Algorithm:
    """What distinguishes a script. run is a Run, groups are lists of Responses, o is one of them, t a token's index."""

    # (run, groups): sets the advantages of each response. Returns metrics of the rollout.
    advantages: Callable
    # (run, batch, o, t): the part of token t of o in the loss of the minibatch `batch`.
    loss: Callable
    # (run, o, t) each: metrics, whose means over all tokens are logged.
    metrics: tuple = (drift, ratios, kl_to_reference)
    # (args): how far the clip range reaches below and above 1.
    bounds: Callable = one_bound
    # (run, o): the reward of a response.
    reward: Callable = lambda run, o: rule_reward(o)
    # (o): the advantages in samples.jsonl: one number for each response, or a list for its tokens.
    logged: Callable = lambda o: o.advantages[0]
    # (args): the policy before the first step.
    policy: Callable = lambda args: load(args.model)
    # (run): loads more networks.
    prepare: Callable = lambda run: None
    # (run, groups): the responses on which the step trains.
    kept: Callable = lambda run, groups: sum(groups, [])
    # (run, groups, batch): changes the advantages A before an update, or computes what only this loss needs.
    renew: Callable = lambda run, groups, batch: None
    # (run, number of the step): changes other networks after a step. Returns metrics of the updates, if there are any.
    after: Callable = lambda run, number: None


class Learner:
    """A network that is trained: the policy, or a critic's value network.

    read(run, o) computes what the loss needs of the network. The names are those under which the loss and the norm of
    the gradient are logged. In the first `waits` steps the network doesn't learn.
    """

    def __init__(self, args, network, peak, read, loss, metrics, names=()):
        self.args, self.network, self.peak, self.names = args, network, peak, names
        self.read, self.loss, self.metrics = read, loss, metrics
        self.waits, self.history = 0, []
        self.optimizer = torch.optim.Adam(network.parameters())

    def set_rate(self, update, per_step):
        """The schedule begins when the network begins to learn."""
        start, end = self.waits * per_step, self.args.num_steps * per_step
        self.lr = self.peak * rate(self.args, update - start, end - start)
        self.optimizer.param_groups[0]["lr"] = self.lr

    def update(self, total):
        """Minimize the loss of a minibatch, which is None if the minibatch is empty."""
        if total is None:
            self.history.append((0.0, 0.0))
            return
        self.optimizer.zero_grad()
        # If every token is clipped, the loss has no gradient. The zero term adds one.
        (total + 0.0 * sum(p.sum() for p in self.network.parameters())).backward()
        self.history.append((total.item(), clip_gradients(self.network, self.args.max_grad_norm)))
        self.optimizer.step()

    def report(self, per_step):
        """The means over the last step's updates."""
        means = [math.fsum(x) / per_step for x in zip(*self.history[-per_step:], strict=True)]
        return dict(zip(self.names, means, strict=False))


class Run:
    """The networks of a run, and what a step leaves to the next one."""

    def __init__(self, algorithm, args):
        self.algorithm, self.args = algorithm, args
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.low, self.high = algorithm.bounds(args)
        self.policy, self.reference = algorithm.policy(args), load(args.model)
        given = args.learning_rate, read_logprobs, algorithm.loss, algorithm.metrics
        self.learners = [Learner(args, self.policy, *given, ("policy/loss", "optim/grad_norm"))]
        self.saved = {"model": self.policy}  # name in the checkpoint -> network
        self.metrics = []  # of each step
        self.counts = defaultdict(int)  # metrics that the next step goes on with
        self.seen = defaultdict(set)  # what must be True in some places and False in others
        algorithm.prepare(self)


def read_logprobs(run, o):
    """The policy's log-probabilities, as a tensor with gradient and as numbers."""
    o.logprobs = logprobs_of(run.policy, o.sequence, run.args.temperature)
    o.now = o.logprobs.tolist()


def text_of(run, tokens):
    """The text without the EOS token."""
    return run.tokenizer.decode([token for token in tokens if token != EOS])


def rule_reward(o):
    given = [o.text], [o.answer]
    return accuracy_reward(*given)[0] + format_reward(*given)[0]


def read_rollout(run, step):
    """The groups of responses of a step."""
    run.greedy, groups = step["greedy"], []
    sequences = iter(step["sequences"])
    for sample in step["samples"]:
        group = []
        for text, reward in zip(sample["completions"], sample["rewards"], strict=True):
            o = Response(run, next(sequences), text, sample["answer"])
            assert o.prompt == run.tokenizer(sample["prompt"]).input_ids
            assert o.text == text_of(run, o.tokens)
            o.reward = run.algorithm.reward(run, o)
            assert o.reward == pytest.approx(reward, abs=1e-9)
            o.sample, o.number = sample, len(group)  # its place in the group
            group.append(o)
        groups.append(group)
    assert next(sequences, None) is None
    if "sampled" in step:
        for o, logprobs in zip(sum(groups, []), step["sampled"], strict=True):
            o.sampled = logprobs
    return groups


def rollout_metrics(run, step, responses):
    """The metrics that all scripts log of their samples."""
    generated = step["sequences"] + step["greedy"]
    run.counts["step"] += 1
    run.counts["episodes"] += len(generated)
    run.counts["tokens"] += sum(len(tokens) for _, tokens in generated)
    return {
        "rollout/reward_mean": mean([o.reward for o in responses]),
        "rollout/reward_std": std([o.reward for o in responses]),
        "rollout/accuracy": mean([o.is_right for o in responses]),
        "rollout/response_len": mean([o.length for o in responses]),
        "rollout/eos_frac": mean([o.ended for o in responses]),
    }


def take_signs_of_zeros(o):
    """Rounding decides the sign of an advantage that should be 0, and so whether the clip acts. Take main's."""
    logged = o.sample["advantages"][o.number]
    logged = logged if isinstance(logged, list) else [logged] * o.length
    pairs = zip(o.advantages, logged, strict=True)
    o.advantages = [y if max(abs(x), abs(y)) < 1e-9 else x for x, y in pairs]


def divide(args, kept, numbers):
    """The minibatches as lists of responses. Each pass takes every kept response once, and divides them evenly.

    numbers are the recorded minibatches: the places of their responses among those that are kept.
    """
    parts, passes = args.num_minibatches, getattr(args, "num_iterations", 1)
    assert len(numbers) == passes * parts
    for k in range(passes):
        one_pass = numbers[k * parts : (k + 1) * parts]
        assert sorted(sum(one_pass, [])) == list(range(len(kept)))
        assert max(map(len, one_pass)) - min(map(len, one_pass)) <= 1
    return [[kept[i] for i in part] for part in numbers]


def reference(algorithm, args, steps):
    """The Run after all steps, with its networks and the metrics of each step."""
    run = Run(algorithm, args)
    for number, step in enumerate(steps, start=1):
        # ---- rollout
        groups = read_rollout(run, step)
        responses = sum(groups, [])
        metrics = rollout_metrics(run, step, responses) | algorithm.advantages(run, groups)
        # ---- updates
        for o in responses:
            take_signs_of_zeros(o)
        updates = divide(args, algorithm.kept(run, groups), step["minibatches"])
        learners = [learner for learner in run.learners if number > learner.waits]
        values = defaultdict(list)  # name of a metric -> its value for each token
        for update, batch in enumerate(updates, start=(number - 1) * len(updates)):
            for learner in run.learners:
                learner.set_rate(update, len(updates))
            for o in batch:
                o.A = o.advantages
                for learner in learners:
                    learner.read(run, o)
            algorithm.renew(run, groups, batch)
            for learner in learners:
                total = torch.zeros(()) if batch else None
                for o in batch:
                    for t in o.counted:
                        total = total + learner.loss(run, batch, o, t)
                        for metric in learner.metrics:
                            for name, value in metric(run, o, t).items():
                                values[name].append(value)
                learner.update(total)
        metrics |= algorithm.after(run, number) or {}
        # ---- log
        metrics |= run.counts | {name: mean(x) for name, x in values.items()}
        metrics |= {"optim/lr": run.learners[0].lr, "optim/grad_norm": 0.0}
        for learner in learners:
            metrics |= learner.report(len(updates))
        run.metrics.append(metrics)
        for o in responses:
            logged = o.sample["advantages"][o.number]
            assert logged == pytest.approx(algorithm.logged(o), rel=1e-6, abs=1e-9)
    return run


# ---- what several scripts have in common


def two_bounds(args):
    return args.clip_eps_low, args.clip_eps_high


def for_the_metrics_alone(args):
    """A script that clips no ratio counts where a clip to 0.8 .. 1.2 would act."""
    return 0.2, 0.2


def clipped(run, ratio, advantage):
    """The loss of a token, -min(ratio A, clip(ratio) A), before it is averaged. PPO, Eq. 7."""
    if advantage > 0 and ratio >= 1 + run.high:
        return -advantage * (1 + run.high)
    if advantage <= 0 and ratio <= 1 - run.low:
        return -advantage * (1 - run.low)
    return -advantage * ratio


def ratio_of(o, t):
    return (o.logprobs[t] - o.old[t]).exp()


def kl_penalty(run, o, t):
    """beta times the KL to the reference at a token, DeepSeekMath, Eq. 4."""
    if run.args.beta == 0:
        return 0.0  # there is no reference
    upside = o.ref[t] - o.logprobs[t]
    return run.args.beta * (upside.exp() - upside - 1)


def tokens_of(batch):
    """The number of tokens in a minibatch."""
    return sum(o.length for o in batch)


def mean_over_tokens(run, batch, o, t):
    """PPO's clipped loss. All tokens of the minibatch have the same weight."""
    return clipped(run, ratio_of(o, t), o.A[t]) / tokens_of(batch)


def zero_std(groups):
    """The share of the groups whose rewards are all equal."""
    equal = [all(o.reward == group[0].reward for o in group) for group in groups]
    return {"rollout/zero_std_frac": mean(equal)}


# ---- reinforce_baseline.py


def return_of(run, o, logprobs):
    """U = r - beta sum_t (log pi - log pi_ref)."""
    kl = math.fsum(p - q for p, q in zip(logprobs, o.ref, strict=True))
    return o.reward - run.args.beta * kl


def reinforce_advantages(run, groups):
    """U - b, with one baseline b for all responses of the step."""
    responses = sum(groups, [])
    returns = [return_of(run, o, o.old) for o in responses]
    before = run.counts.get("rollout/return_average", mean(returns))
    run.counts["rollout/return_average"] = 0.9 * before + 0.1 * mean(returns)
    baselines = {"batch_mean": mean(returns), "moving_average": before, "none": 0.0}
    for o, value in zip(responses, returns, strict=True):
        o.advantages = [value - baselines[run.args.baseline]] * o.length
    return zero_std([responses])


def reinforce_loss(run, batch, o, t):
    """The sum over the tokens, and the mean over the responses."""
    return -o.A[t] * o.logprobs[t] / len(batch)


ALGORITHMS = {}
REINFORCE = ALGORITHMS["reinforce_baseline"] = Algorithm(
    advantages=reinforce_advantages, loss=reinforce_loss, bounds=for_the_metrics_alone
)

# ---- rloo.py, and p3o


def leave_one_out(returns):
    """Each return minus the mean of the others."""
    total = math.fsum(returns)
    return [own - (total - own) / (len(returns) - 1) for own in returns]


def rloo_advantages(run, groups):
    for group in groups:
        returns = [return_of(run, o, o.old) for o in group]
        for o, advantage in zip(group, leave_one_out(returns), strict=True):
            o.advantages = [advantage] * o.length
    return zero_std(groups)


def current(run, o, batch):
    """The log-probabilities of any response, before an update with this minibatch."""
    if o in batch:
        return o.now
    with torch.no_grad():
        return logprobs_of(run.policy, o.sequence, run.args.temperature).tolist()


def p3o_renew(run, groups, batch):
    """The mean of D_ij over the other responses. A pair that is clipped counts as 0."""
    for group in groups:
        returns = [return_of(run, o, o.old) for o in group]
        moved = [math.fsum(current(run, o, batch)) - math.fsum(o.old) for o in group]
        for i, o in enumerate(group):
            total = 0.0
            for j in range(len(group)):
                gain, gained = returns[i] - returns[j], moved[i] - moved[j]
                left_out = (gained if gain > 0 else -gained) > run.args.clip_eps
                run.seen["p3o leaves out a pair"].add(left_out)
                total += 0.0 if left_out else gain * math.exp(moved[i] + moved[j])
            o.A = [total / (len(group) - 1)] * o.length


ALGORITHMS["rloo"] = dataclasses.replace(REINFORCE, advantages=rloo_advantages)
ALGORITHMS["p3o"] = dataclasses.replace(
    ALGORITHMS["rloo"],
    renew=p3o_renew,
    logged=lambda o: o.A[0],  # of the last update
)

# ---- remax.py


def remax_advantages(run, groups):
    """U minus the reward of the greedy response to the same prompt."""
    greedy_rewards, equal = [], []
    for (prompt, tokens), group in zip(run.greedy, groups, strict=True):
        assert prompt == group[0].prompt
        logits = run.policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(1).tolist() == tokens
        text = text_of(run, tokens)
        greedy = rule_reward(SimpleNamespace(text=text, answer=group[0].answer))
        for o in group:
            o.advantages = [return_of(run, o, o.old) - greedy] * o.length
        greedy_rewards.append(greedy)
        equal.append(all(o.reward == greedy for o in group))
    return {
        "rollout/greedy_reward": mean(greedy_rewards),
        "rollout/zero_std_frac": mean(equal),
    }


ALGORITHMS["remax"] = dataclasses.replace(REINFORCE, advantages=remax_advantages)

# ---- grpo.py, grpo_multigpu.py, grpo_lora.py, and clip_cov


def grpo_advantages(run, groups):
    """(r - mean) / std, over the group."""
    for group in groups:
        rewards = [o.reward for o in group]
        for o in group:
            o.advantages = [(o.reward - mean(rewards)) / (std(rewards) + 1e-4)] * o.length
    return zero_std(groups)


def grpo_loss(run, batch, o, t):
    """The mean over the tokens of a response, and then over the responses."""
    token_loss = clipped(run, ratio_of(o, t), o.A[t]) + kl_penalty(run, o, t)
    return token_loss / o.length / len(batch)


class WithAdapters(torch.nn.ParameterList):
    """grpo_lora.py's policy. Its parameters are A and B of each linear layer of the trunk, in order.

    Each call first computes every W + (alpha / rank) B A.
    """

    def __init__(self, base, args):
        super().__init__()
        self.base, self.names, self.scale = [base], [], args.lora_alpha / args.lora_rank
        torch.manual_seed(args.seed)
        for name, layer in base.named_modules():
            if isinstance(layer, torch.nn.Linear) and layer is not base.get_output_embeddings():
                self.names.append(f"{name}.weight")
                self.append(torch.nn.Linear(layer.in_features, args.lora_rank).weight.detach())
                self.append(torch.zeros(layer.out_features, args.lora_rank))

    def __call__(self, ids):
        (base,) = self.base
        pairs = zip(self.names, list(self)[::2], list(self)[1::2], strict=True)
        weights = {name: base.get_parameter(name) + self.scale * B @ A for name, A, B in pairs}
        return functional_call(base, weights, (ids,))


def clip_cov_renew(run, groups, batch):
    """Tokens whose covariance lies between two bounds have no advantage. All of them, because the share is 1."""
    mean_logprob = math.fsum(sum((o.now for o in batch), [])) / tokens_of(batch)
    mean_advantage = math.fsum(sum((o.advantages for o in batch), [])) / tokens_of(batch)
    for o in batch:
        o.A = []
        for logprob, advantage in zip(o.now, o.advantages, strict=True):
            covariance = (logprob - mean_logprob) * (advantage - mean_advantage)
            left_out = run.args.cov_low < covariance < run.args.cov_high
            run.seen["clip_cov leaves out a token"].add(left_out)
            o.A.append(0.0 if left_out else advantage)


ALGORITHMS["grpo"] = ALGORITHMS["grpo_multigpu"] = Algorithm(
    advantages=grpo_advantages,
    loss=grpo_loss,
)
ALGORITHMS["grpo_lora"] = dataclasses.replace(
    ALGORITHMS["grpo"], policy=lambda args: WithAdapters(load(args.model), args)
)
ALGORITHMS["clip_cov"] = dataclasses.replace(ALGORITHMS["grpo"], renew=clip_cov_renew)

# ---- dr_grpo.py


def dr_grpo_advantages(run, groups):
    """r - mean, over the group."""
    for group in groups:
        for o in group:
            o.advantages = [o.reward - mean([other.reward for other in group])] * o.length
    return zero_std(groups)


def dr_grpo_loss(run, batch, o, t):
    """The sum over the tokens of a response divided by a constant, and the mean over the responses."""
    token_loss = clipped(run, ratio_of(o, t), o.A[t]) + kl_penalty(run, o, t)
    return token_loss / run.args.max_new_tokens / len(batch)


ALGORITHMS["dr_grpo"] = Algorithm(advantages=dr_grpo_advantages, loss=dr_grpo_loss)

# ---- dapo.py


def dapo_reward(run, o):
    """The rules, and the punishment of a response that comes close to the limit. DAPO, Eq. 13."""
    start = run.args.max_new_tokens - run.args.overlong_cache
    run.seen["dapo punishes a length"].add(o.length > start)
    return rule_reward(o) - max(0, o.length - start) / run.args.overlong_cache


def dapo_kept(run, groups):
    """The first mixed groups. If no group is mixed, the first ones."""
    B, G = run.args.num_prompts, run.args.num_generations
    run.counts["batches"] += len(groups) // B
    mixed = [group for group in groups if 0 < sum(o.is_right for o in group) < G]
    if run.args.max_resample == 1:
        run.seen["dapo finds a mixed group"].add(len(mixed) > 0)
    # It samples until there are enough of them. Before the last batch there were too few.
    assert len(mixed) >= B or len(groups) == (1 + run.args.max_resample) * B
    assert sum(group in mixed for group in groups[:-B]) < B
    kept = mixed[:B] or groups[:B]
    run.counts["rollout/mixed_groups"] = len(mixed[:B])
    for group in groups:
        assert group[0].sample["kept"] == (group in kept)
    return sum(kept, [])


ALGORITHMS["dapo"] = Algorithm(
    reward=dapo_reward,
    advantages=grpo_advantages,
    kept=dapo_kept,
    loss=mean_over_tokens,
    metrics=(drift, ratios),
    bounds=two_bounds,
)

# ---- gspo.py


def sequence_ratio(o):
    """The geometric mean of the ratios of a response."""
    return (o.logprobs - torch.tensor(o.old)).mean().exp()


def gspo_loss(run, batch, o, t):
    """The ratio of the response stands at each of its tokens."""
    token_loss = clipped(run, sequence_ratio(o), o.A[t]) + kl_penalty(run, o, t)
    return token_loss / o.length / len(batch)


def gspo_ratios(run, o, t):
    """Each token has the ratio of its response."""
    ratio = sequence_ratio(o).item()
    return {"policy/ratio_mean": ratio} | clips(run, ratio, o.A[t])


ALGORITHMS["gspo"] = Algorithm(
    advantages=grpo_advantages,
    loss=gspo_loss,
    metrics=(drift, gspo_ratios, kl_to_reference),
    bounds=two_bounds,
)

# ---- grpo_offpolicy.py (and grpo_vllm.py, in test_vllm.py), and geo_mask, icepop, opsm and kimi_kl


def load_engine(run):
    run.engine = run.saved["engine"] = load(run.args.model)


def refresh_engine(run, number):
    """The engine gets the policy's weights every few steps."""
    if number % run.args.staleness == 0:
        run.engine.load_state_dict(run.policy.state_dict())


def compare_with_engine(responses):
    """o.to_engine: the log of pi_old / pi_s at each token."""
    for o in responses:
        o.to_engine = [p - q for p, q in zip(o.old, o.sampled, strict=True)]
    return {"rollout/logprob_gap": mean([abs(x) for o in responses for x in o.to_engine])}


def offpolicy_advantages(run, groups):
    """GRPO's advantages. A token's weight is pi_old / pi_s, up to a limit."""
    responses, limit = sum(groups, []), run.args.rollout_correction or math.inf
    metrics = grpo_advantages(run, groups) | compare_with_engine(responses)
    cap = getattr(run.args, "sequence_cap", 0.0) or math.inf  # geo_mask has none
    truncated, capped = [], []
    for o in responses:
        raw = [math.exp(x) for x in o.to_engine]
        capped.append(math.prod(raw) > cap)
        o.weights = [min(x, limit) if limit < math.inf else 1.0 for x in raw]
        o.weights = [0.0] * o.length if capped[-1] else o.weights
        truncated += [x > limit for x in raw]
    if cap < math.inf:
        run.seen["the cap leaves out a response"].update(capped)
        metrics |= {"rollout/capped_frac": mean(capped)}
    return metrics | {"rollout/truncated_frac": mean(truncated)}


def offpolicy_loss(run, batch, o, t):
    """GRPO's loss, weighted. If the advantage is negative, the ratio counts as at most c, the dual clip."""
    ratio = ratio_of(o, t)
    if is_dual_clipped(run, ratio, o.A[t]):
        surrogate_loss = -o.A[t] * run.args.dual_clip
    else:
        surrogate_loss = clipped(run, ratio, o.A[t])
    token_loss = o.weights[t] * surrogate_loss + kl_penalty(run, o, t)
    return token_loss / o.length / len(batch)


def is_dual_clipped(run, ratio, advantage):
    return bool(advantage < 0 and ratio > run.args.dual_clip)


def dual_clips(run, o, t):
    ratio = math.exp(o.now[t] - o.old[t])
    return {"policy/dual_clip_frac": is_dual_clipped(run, ratio, o.A[t])}


def geo_mask_advantages(run, groups):
    """A response has no weight if the geometric mean of its pi_old / pi_s is outside of the bounds."""
    metrics, left_out = offpolicy_advantages(run, groups), []
    for o in sum(groups, []):
        left_out.append(not run.args.geo_low <= math.exp(mean(o.to_engine)) <= run.args.geo_high)
        o.weights = [0.0] * o.length if left_out[-1] else o.weights
    run.seen["geo_mask leaves out a response"].update(left_out)
    return metrics | {"rollout/masked_frac": mean(left_out)}


def icepop_advantages(run, groups):
    """A token has no weight if its pi_old / pi_s is outside of the bounds. No weight is truncated."""
    responses, left_out = sum(groups, []), []
    metrics = grpo_advantages(run, groups) | compare_with_engine(responses)
    for o in responses:
        o.weights = []
        for raw in map(math.exp, o.to_engine):
            left_out.append(not run.args.icepop_low <= raw <= run.args.icepop_high)
            o.weights.append(0.0 if left_out[-1] else raw)
    run.seen["icepop leaves out a token"].update(left_out)
    return metrics | {"rollout/masked_frac": mean(left_out)}


def opsm_renew(run, groups, batch):
    """A bad response is left out if the current policy is too far from the engine. DeepSeek-V3.2, Eq. 9."""
    for o in batch:
        distance = (math.fsum(o.sampled) - math.fsum(o.now)) / o.length
        o.is_left_out = o.A[0] < 0 and distance > run.args.opsm_delta
        run.seen["opsm leaves out a response"].add(o.is_left_out)


def opsm_loss(run, batch, o, t):
    if o.is_left_out:
        return kl_penalty(run, o, t) / o.length / len(batch)
    return offpolicy_loss(run, batch, o, t)


def opsm_masks(run, o, t):
    return {"policy/masked_frac": o.is_left_out}


def kimi_loss(run, batch, o, t):
    """The loss of grpo_offpolicy.py, and tau log^2 (pi / pi_s)."""
    penalty = run.args.kl_tau * (o.logprobs[t] - o.sampled[t]) ** 2
    return offpolicy_loss(run, batch, o, t) + penalty / o.length / len(batch)


def kl_to_sampler(run, o, t):
    return {"kl/sampler": 0.5 * (o.now[t] - o.sampled[t]) ** 2}


OFFPOLICY = ALGORITHMS["grpo_offpolicy"] = Algorithm(
    prepare=load_engine,
    advantages=offpolicy_advantages,
    loss=offpolicy_loss,
    metrics=(drift, ratios, kl_to_reference, dual_clips),
    after=refresh_engine,
)
ALGORITHMS["geo_mask"] = dataclasses.replace(OFFPOLICY, advantages=geo_mask_advantages)
ALGORITHMS["icepop"] = dataclasses.replace(OFFPOLICY, advantages=icepop_advantages)
ALGORITHMS["opsm"] = dataclasses.replace(
    OFFPOLICY, renew=opsm_renew, loss=opsm_loss, metrics=(*OFFPOLICY.metrics, opsm_masks)
)
ALGORITHMS["kimi_kl"] = dataclasses.replace(
    OFFPOLICY, loss=kimi_loss, metrics=(*OFFPOLICY.metrics, kl_to_sampler)
)

# ---- grpo_process.py


def process_advantages(run, groups):
    """A token's advantage is the sum over the steps that end with it or after it. DeepSeekMath 4.1.3."""
    counts, means, equal = [], [], []
    for group in groups:
        # test_process.py checks what step_rewards finds.
        steps = [grpo_process.step_rewards([o.text], [o.answer])[0] for o in group]
        assert group[0].sample["steps"] == [[list(step) for step in own] for own in steps]
        rewards = [reward for own in steps for _, reward in own]
        center, scale = mean(rewards), std(rewards) + 1e-4
        for o, own in zip(group, steps, strict=True):
            o.advantages = []
            for t in range(o.length):
                start = len(text_of(run, o.tokens[:t]))
                # The last step is the whole response, with the EOS token.
                ahead = [reward for end, reward in own[:-1] if start < end] + [own[-1][1]]
                o.advantages.append(math.fsum((x - center) / scale for x in ahead))
            run.seen["grpo_process.py finds only one step"].add(len(own) == 1)
        counts += [len(own) for own in steps]
        means += rewards
        equal.append(len(set(rewards)) == 1)
    return {
        "rollout/steps": mean(counts),
        "rollout/step_reward": mean(means),
        "rollout/zero_std_frac": mean(equal),
    }


ALGORITHMS["grpo_process"] = Algorithm(
    advantages=process_advantages,
    logged=lambda o: o.advantages,
    loss=grpo_loss,
)

# ---- ppo_rlhf.py


def add_critic(run, network):
    """Train a value network, too."""
    given = run.args.value_learning_rate, read_values, value_loss, (value_metrics,)
    run.learners.append(Learner(run.args, network, *given))
    run.value_model = run.saved["value_model"] = network


def policy_with_zeros(args):
    """The policy with a head of zeros."""
    network = load_classifier(args.model)
    network.score.weight.data.zero_()
    return network


def ppo_prepare(run):
    run.judge = load_classifier(run.args.reward_model) if run.args.reward_model else None
    if run.judge and run.args.value_init == "reward_model":
        add_critic(run, load_classifier(run.args.reward_model))
    else:
        add_critic(run, policy_with_zeros(run.args))


def ppo_reward(run, o):
    """The judge's score of the whole response, or the rules. A cut response costs a penalty."""
    with torch.no_grad():
        score = outputs_of(run.judge, o.sequence)[-1].item() if run.judge else rule_reward(o)
    if run.judge:
        run.seen["a response ends before the limit"].add(o.ended)
    return score if o.ended else score - run.args.missing_eos_penalty


def gae(rewards, values, gamma, lambda_):
    """A_t = sum_k (gamma lambda)^(k - t) delta_k. PPO, Eq. 11 and 12."""
    T = len(rewards)
    delta = [
        rewards[t] + (gamma * values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)
    ]
    return [
        math.fsum((gamma * lambda_) ** (k - t) * delta[k] for k in range(t, T)) for t in range(T)
    ]


def read_old_values(run, responses):
    with torch.no_grad():
        for o in responses:
            o.old_values = outputs_of(run.value_model, o.sequence)[:-1].tolist()
            assert o.sample["values"][o.number] == pytest.approx(o.old_values, abs=1e-9)


def whiten(responses):
    """Shift the advantages to mean 0 and scale them to variance 1, over all tokens."""
    flat = [x for o in responses for x in o.advantages]
    variance = mean([(x - mean(flat)) ** 2 for x in flat])
    for o in responses:
        o.advantages = [(x - mean(flat)) / math.sqrt(variance + 1e-8) for x in o.advantages]


def explained_variance(responses):
    returns = [x for o in responses for x in o.returns]
    values = [x for o in responses for x in o.old_values]
    errors = [x - y for x, y in zip(returns, values, strict=True)]
    return {"value/explained_var": 1 - (std(errors) / std(returns)) ** 2}


def ppo_advantages(run, groups):
    """A token's reward is -beta (log pi_old - log pi_ref), and at the last token also the response's reward."""
    args, responses = run.args, sum(groups, [])
    read_old_values(run, responses)
    kls = []
    for o in responses:
        kl = [p - q for p, q in zip(o.old, o.ref, strict=True)]
        rewards = [-args.beta * x for x in kl]
        rewards[-1] += o.reward
        o.advantages = gae(rewards, o.old_values, args.gamma, args.gae_lambda)
        o.returns = [a + v for a, v in zip(o.advantages, o.old_values, strict=True)]
        kls.append(math.fsum(kl))
    whiten(responses)
    return explained_variance(responses) | ({"kl/response": mean(kls)} if args.beta > 0 else {})


def read_values(run, o):
    o.values = outputs_of(run.value_model, o.sequence)[:-1]


def value_errors(run, o, t, value):
    """The squared error of a value, and that of the value clipped to the old one's neighbourhood."""
    low = o.old_values[t] - run.args.value_clip_eps
    high = o.old_values[t] + run.args.value_clip_eps
    near = min(max(value, low), high)
    return (value - o.returns[t]) ** 2, (near - o.returns[t]) ** 2


def value_loss(run, batch, o, t):
    """Half of the larger error, and the mean over all tokens of the minibatch."""
    return 0.5 * max(value_errors(run, o, t, o.values[t])) / tokens_of(batch)


def value_metrics(run, o, t):
    error, clipped_error = value_errors(run, o, t, o.values[t].item())
    return {
        "value/loss": 0.5 * max(error, clipped_error),
        "value/clip_frac": clipped_error > error,
    }


ALGORITHMS["ppo_rlhf"] = Algorithm(
    prepare=ppo_prepare,
    reward=ppo_reward,
    advantages=ppo_advantages,
    logged=lambda o: o.advantages,
    loss=mean_over_tokens,
    metrics=(drift, ratios),
)

# ---- vapo.py


def vapo_prepare(run):
    """In the first steps the value network alone is trained."""
    add_critic(run, policy_with_zeros(run.args))
    run.nll = 0.0  # L_NLL, summed over a step's updates
    run.learners[0].waits = run.args.value_warmup_steps


def vapo_advantages(run, groups):
    """Each response has its lambda. The value network learns the plain returns."""
    args, responses = run.args, sum(groups, [])
    read_old_values(run, responses)
    lambdas = [max(0.0, 1 - 1 / (args.gae_alpha * o.length)) for o in responses]
    for o, lambda_ in zip(responses, lambdas, strict=True):
        rewards = [0.0] * (o.length - 1) + [o.reward]
        o.advantages = gae(rewards, o.old_values, args.gamma, lambda_)
        o.returns = [args.gamma ** (o.length - 1 - t) * o.reward for t in range(o.length)]
        run.seen["a response of vapo.py is right"].add(o.is_right)
        if args.gae_alpha < 1:  # otherwise the formula is never negative
            run.seen["lambda is 0"].add(lambda_ == 0)
    whiten(responses)
    return explained_variance(responses) | {"rollout/lambda": mean(lambdas)}


def vapo_loss(run, batch, o, t):
    """PPO's loss, and mu times the mean of -log pi over the tokens of the right responses. VAPO, Eq. 10."""
    loss = mean_over_tokens(run, batch, o, t)
    if o.is_right:
        nll = -o.logprobs[t] / tokens_of([other for other in batch if other.is_right])
        run.nll += nll.item()
        loss = loss + run.args.lm_coef * nll
    return loss


def vapo_metrics(run, number):
    """The mean of L_NLL over a step's updates, once the policy is trained."""
    nll, run.nll = run.nll / (run.args.num_iterations * run.args.num_minibatches), 0.0
    return {"policy/nll_loss": nll} if number > run.args.value_warmup_steps else {}


ALGORITHMS["vapo"] = Algorithm(
    prepare=vapo_prepare,
    advantages=vapo_advantages,
    logged=lambda o: o.advantages,
    loss=vapo_loss,
    metrics=(drift, ratios),
    bounds=two_bounds,
    after=vapo_metrics,
)

# ---- distill.py, full_vocabulary and mopd


def load_teacher(run):
    run.reference = load(run.args.teacher)


def gains(o):
    """By how much the teacher finds each token more probable."""
    return [q - p for p, q in zip(o.old, o.ref, strict=True)]


def distill_advantages(run, groups):
    for o in sum(groups, []):
        o.advantages = gains(o)
    return zero_std(groups)


def distill_loss(run, batch, o, t):
    """GRPO's loss without the KL."""
    return clipped(run, ratio_of(o, t), o.A[t]) / o.length / len(batch)


def kl_to_teacher(run, o, t):
    return {"kl/ref": k3(o.ref[t], o.now[t])}


def read_reverse_kl(run, groups, batch):
    """o.kl: the KL of the policy to the teacher at each token, one token of the vocabulary at a time."""
    for o in batch:
        rows = []
        for network in (run.policy, run.reference):
            logits = network(torch.tensor([o.prompt + o.tokens])).logits
            rows.append(logits[0, len(o.prompt) - 1 : -1] / run.args.temperature)
        p, q = [row.softmax(1) for row in rows]  # (|o|, V) each
        o.kl = sum(p[:, v] * (p[:, v] / q[:, v].detach()).log() for v in range(p.shape[1]))


def reverse_kl_loss(run, batch, o, t):
    return o.kl[t] / o.length / len(batch)


ALGORITHMS["distill"] = Algorithm(
    prepare=load_teacher,
    advantages=distill_advantages,
    logged=lambda o: o.advantages,
    loss=distill_loss,
    metrics=(drift, ratios, kl_to_teacher),
)


def mopd_advantages(run, groups):
    """Each response has the teacher of its kind as the reference."""
    kl = defaultdict(list)
    for o in sum(groups, []):
        kind = kind_of(o.answer)
        run.reference = load(run.args.teachers[kind])
        o.advantages = gains(o)
        kl[f"kl/ref_{kind}"] += [p - q for p, q in zip(o.old, o.ref, strict=True)]
    return zero_std(groups) | {name: mean(values) for name, values in kl.items()}


ALGORITHMS["mopd"] = dataclasses.replace(
    ALGORITHMS["distill"], prepare=lambda run: None, advantages=mopd_advantages
)
ALGORITHMS["full_vocabulary"] = dataclasses.replace(
    ALGORITHMS["distill"], renew=read_reverse_kl, loss=reverse_kl_loss
)

# ---- self_distill.py, and sdpo_context


def save_teacher(run):
    """The teacher starts as the policy."""
    run.saved["teacher"] = run.reference


def move_teacher(run, number):
    r = run.args.teacher_rate
    pairs = zip(run.reference.parameters(), run.policy.parameters(), strict=True)
    for teacher_weight, policy_weight in pairs:
        teacher_weight.data = (1 - r) * teacher_weight.data + r * policy_weight.data


def answer_as_context(run, o, group):
    """--context-column is the answer."""
    assert o.sample["context"] == o.answer
    return o.answer


def right_response_as_context(run, o, group):
    """The first right one among the other responses of the group, or nothing."""
    right = [other.text for other in group if other.is_right and other is not o]
    context = right[0] if right else ""
    assert o.sample["contexts"][o.number] == context
    return context


def self_distill_advantages(run, groups, context_of=answer_as_context):
    """distill.py's, with a teacher that reads the context before the question. No context, no loss."""
    found = []
    for group in groups:
        for o in group:
            context = context_of(run, o, group)
            told = run.tokenizer(f"{context}\n{o.sample['prompt']}").input_ids
            found.append(context != "" and len(told) <= run.args.max_teacher_tokens)
            if found[-1]:
                o.told = told, o.tokens
                o.advantages = gains(o)
            else:
                o.counted, o.advantages = range(0), [0.0] * o.length
    run.seen["a response has a context"].update(found)
    return zero_std(groups) | {"rollout/context_frac": mean(found)}


ALGORITHMS["self_distill"] = dataclasses.replace(
    ALGORITHMS["distill"],
    prepare=save_teacher,
    advantages=self_distill_advantages,
    after=move_teacher,
)
ALGORITHMS["sdpo_context"] = dataclasses.replace(
    ALGORITHMS["self_distill"],
    advantages=partial(self_distill_advantages, context_of=right_response_as_context),
)


# ---- the test


def of_the_loss(metrics):
    """The names of the metrics that the losses bring."""
    return {name for name in metrics if name.startswith(("policy/", "value/", "kl/"))}


@pytest.mark.parametrize(
    "name, given", CASES, ids=[f"{name}-{k}" for k, (name, _) in enumerate(CASES)]
)
def test_two_steps_of_main(name, given, double, monkeypatch, tmp_path):
    script = load_patched(name) if name in PATCHES else __import__(name)
    double(script)
    args, steps, saved = run_main(script, monkeypatch, tmp_path, given)
    found = reference(ALGORITHMS[name], args, steps)
    lengths = [len(response) for step in steps for _, response in step["sequences"]]
    assert len(set(lengths)) > 3, "the responses must have different lengths"
    # Only dapo.py with too little resampling has empty minibatches.
    are_empty = {not part for step in steps for part in step["minibatches"]}
    assert are_empty == ({True, False} if given.get("max_resample") == 1 else {False})
    for step, metrics in zip(steps, found.metrics, strict=True):
        assert {key: step["metrics"][key] for key in metrics} == pytest.approx(
            metrics, rel=1e-6, abs=1e-9
        )
        assert of_the_loss(step["metrics"]) == of_the_loss(metrics)
    clipped = sum(metrics.get("policy/clip_frac", 0.0) for metrics in found.metrics)
    assert clipped > 0 or len(steps[0]["minibatches"]) == 1, (
        "the updates must be large enough to clip some ratios"
    )
    start = ALGORITHMS[name].policy(args).state_dict()
    moved = max((saved["model"][key] - x).abs().max() for key, x in start.items())
    assert moved > 1e-4
    for key, network in found.saved.items():
        for parameter, weights in network.state_dict().items():
            torch.testing.assert_close(saved[key][parameter], weights, rtol=1e-6, atol=1e-8)
    for what, happened in found.seen.items():
        assert happened == {True, False}, what
    for learner in found.learners[1:]:
        norms = [norm for _, norm in learner.history]
        assert max(norms) > args.max_grad_norm, "some gradient must be clipped"
