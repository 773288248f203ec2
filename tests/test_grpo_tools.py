"""grpo_tools.py: the tool, the calls, the tokens that the policy sees and the tokens that it trains on."""

import dataclasses
import json
import math
import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REAL, ROOT
from test_whole_step import clip_gradients, double, k3, logprobs_of  # noqa: F401
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo_tools
from utils.rewards import accuracy_reward, format_reward

calculator, ERROR = grpo_tools.calculator, grpo_tools.ERROR


def run_tool(tool, calls):
    """grpo_tools.run_tool with this tool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_tools, "TOOL", tool)
        return grpo_tools.run_tool(calls)


CALLER = ROOT / "assets" / "caller"
EOS = 2
EOS_IDS = torch.tensor([EOS])


# ==== the calculator and run_tool ====


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("47+38", "85"),
        (" 2*(3+4)-5 ", "9"),
        ("-7 - -3", "-4"),
        ("6/4", "1.5"),
        ("6/3", "2"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333333"),
        ("123456789*1000", "123456789000"),
        ("2-3*4/(5-6)", "14"),
        ("78.24-74.03", "4.21"),
        ("100.1-100", "0.1"),
        ("3*1.15-3.45", "0"),
        ("0*-1.0", "0"),
        ("123456789*987654321", "121932631112635269"),
        ("-1e30+1", "-999999999999999999999999999999"),
        ("1e20", "1" + "0" * 20),
    ],
)
def test_the_calculator(call, value):
    assert calculator(call) == value


HOSTILE = [
    "9**9**9",
    "9<<9**9",
    "'a'*9999999999",
    "'1e999999999'",
    "[0]*9999999999",
    "(9).real",
    "__import__('os')",
    "(lambda: 1)()",
    "1 if 1 else 2",
    "x",
    "x:=1",
    "1;2",
    "f'{1}'",
    "",
    "+",
    "1/0",
    "1<2",
    "True",
    "3j",
    "9" * 5000,
    "(" * 400,
    "-" * 100000 + "1",
    "1\0",
    "not 1",
    "1e300*1e300",
    "1e999",
    "1+1\ud800",
    # If run_tool cut this text to MAX_CHARS characters, it would compute another sum.
    "1+" * 249 + "1111",
]


@pytest.mark.parametrize("call", HOSTILE, ids=range(len(HOSTILE)))
def test_a_text_that_is_not_a_sum_is_an_error_at_once(call):
    assert run_tool(calculator, [call, "1+1"]) == [ERROR, "=2"]


def test_a_fault_of_a_tool_is_an_answer():
    found = {
        "raises": lambda: 1 / 0,
        "no text": lambda: 85,
        "nothing": lambda: None,
        "empty": lambda: "",
        "megabytes": lambda: "ab" * 10**7,
    }
    answers = run_tool(lambda call: found[call](), list(found))
    assert answers == [ERROR] * 3 + ["=", "=" + "ab" * (grpo_tools.MAX_CHARS // 2)]
    longest = "x" * grpo_tools.MAX_CHARS
    assert run_tool(lambda call: call, [longest, longest + "x"]) == ["=" + longest, ERROR]
    assert run_tool(calculator, []) == []


def test_calls_run_at_the_same_time():
    """Each call waits until all three have started."""
    barrier = threading.Barrier(3)

    def tool(call):
        barrier.wait(timeout=60)
        return call

    assert run_tool(tool, ["a", "b", "c"]) == ["=a", "=b", "=c"]


def test_a_tool_that_hangs_is_not_waited_for(monkeypatch):
    """If the tool returns later, the answers don't change."""
    monkeypatch.setattr(grpo_tools, "TOOL_SECONDS", 0.2)
    release, returned = threading.Event(), threading.Event()

    def tool(call):
        if call == "hang":
            release.wait()
            threading.Timer(0.1, returned.set).start()
        return call

    answers = run_tool(tool, ["a", "hang", "b"])
    release.set()
    returned.wait()
    assert answers == ["=a", ERROR, "=b"]


# ==== turns ====


def script_model(monkeypatch, tokenizer, turns, sizes):
    """Replace generate by a function that looks up `turns`: the context's text -> a text or token ids.

    Each call of generate appends the number of its sequences to `sizes`.
    """

    def generate(args, model, ids, mask, num_samples, temperature, eos_ids, tokenizer):
        rows = []
        for row, counts in zip(ids, mask, strict=True):
            written = turns[tokenizer.decode(row[counts])]
            if isinstance(written, str):
                written = tokenizer(written, add_special_tokens=False).input_ids
            rows += [torch.tensor(written[: args.max_new_tokens])] * num_samples
        sizes.append(len(rows))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=EOS)
        lengths = torch.tensor([[len(row)] for row in rows])
        return ids, torch.arange(ids.shape[1]) < lengths, -0.01 * ids.float()

    monkeypatch.setattr(grpo_tools, "generate", generate)


def respond(tokenizer, prompts, num_samples=1, **given):
    sizes = dict(max_new_tokens=40, max_prompt_tokens=64, sampling_tokens=49152)
    args = grpo_tools.Args(**sizes | given)
    examples = [
        {"prompt_ids": tokenizer(text, add_special_tokens=False).input_ids} for text in prompts
    ]
    model = SimpleNamespace(device=torch.device("cpu"))
    return grpo_tools.sample_responses(args, model, tokenizer, examples, num_samples, 1.0, EOS_IDS)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CALLER)


# The tool wrote the text between { and }.
TURNS = {
    "a call": ["<calc>4+7</calc>{=11}</think></s>"],
    "no call": ["<think>4</s>"],
    "two calls": ["<calc>4+7</calc>{=11},<calc>2*3</calc>{=6}</s>"],
    "a call without an end": ["<calc>4+7</s>"],
    "an end without a call": ["4+7</calc>{=11}</s>"],
    "a call in a call": ["<calc>1+<calc>4+7</calc>{=11}</calc>{=error}</s>"],
    "an empty call": ["<calc></calc>{=error}</s>"],
    "a second end": ["<calc>4+7</calc>{=11}</calc>{=error}1</s>"],
    "a call too many": ["<calc>1</calc>{=1}<calc>2</calc>{=2}<calc>3</calc>{=3}<calc>4</calc>"],
    "cut in a call": ["<calc>" + "1" * 39],
    "cut after a call": ["<calc>" + "1" * 38 + "</calc>"],
    "cut in an answer": ["<calc>11+11" + " " * 31 + "</calc>{=2}"],
    "cut after an answer": ["<calc>11+11" + " " * 30 + "</calc>{=22}"],
    "cut after it": ["<calc>11+11" + " " * 29 + "</calc>{=22}1"],
}


@pytest.mark.parametrize("name", TURNS)
def test_a_response_is_what_policy_and_tool_wrote(name, tokenizer, monkeypatch):
    (text,) = TURNS[name]
    parts = text.replace("{", "|{").replace("}", "|").split("|")
    turns, ids, wrote, answers = {}, [], [], []
    for part in filter(None, parts):
        by_tool = part.startswith("{")
        written = part.strip("{}")
        if by_tool:
            answers.append("=22" if name == "cut in an answer" else written)
        else:
            # Here the policy writes more than the response has room for.
            too_much = "1" * 40 if name == "cut after it" else ""
            turns["1+1=" + tokenizer.decode(ids)] = written + too_much
        new = tokenizer(written).input_ids
        ids += new
        wrote += [not by_tool] * len(new)
    if name == "cut in a call":
        turns["1+1="] += "11</calc>"
    script_model(monkeypatch, tokenizer, turns, [])
    rollout = respond(tokenizer, ["1+1="], max_calls=3)
    assert rollout.response_ids.tolist() == [ids]
    assert rollout.response_mask.tolist() == [wrote]
    assert rollout.context_mask.all()
    assert rollout.tool_answers == [answers]
    assert rollout.completions == [text.replace("{", "").replace("}", "").removesuffix("</s>")]
    expected = torch.tensor([[-0.01 * i * own for i, own in zip(ids, wrote, strict=True)]])
    torch.testing.assert_close(rollout.sampled_logprobs, expected)


@pytest.mark.parametrize("max_calls", [1, 2, 4])
def test_the_call_after_max_calls_ends_the_response(max_calls, tokenizer, monkeypatch):
    """The tool answers max_calls calls. It never sees the next call, and this call ends the response."""
    seen = []

    def tool(call):
        seen.append(call)
        return "0"

    monkeypatch.setattr(grpo_tools, "TOOL", tool)
    turns, text = {}, "1+1="
    for k in range(max_calls + 1):
        turns[text] = f"<calc>{k}</calc>"
        text += f"<calc>{k}</calc>=0"
    # The policy only gets here if the tool answers one call too many.
    turns[text] = "</s>"
    sizes = []
    script_model(monkeypatch, tokenizer, turns, sizes)
    rollout = respond(tokenizer, ["1+1="], max_calls=max_calls)
    assert seen == [str(k) for k in range(max_calls)]
    assert rollout.tool_answers == [["=0"] * max_calls]
    (completion,) = rollout.completions
    assert completion == text.removeprefix("1+1=").removesuffix("=0")
    assert sizes == [1] * (max_calls + 1)
    # The response isn't full, so max_calls ended it.
    assert rollout.context_mask.shape[1] < 40


def test_responses_of_a_batch_go_on_together(tokenizer, monkeypatch):
    """Each response continues from its text until it ends."""
    turns = {
        "1+1=": "<calc>1+1</calc>",
        "1+1=<calc>1+1</calc>=2": "</s>",
        "47+38=": "85</s>",
        "2=": "<calc>2</calc>",
        "2=<calc>2</calc>=2": "<calc>3</calc>",
        "2=<calc>2</calc>=2<calc>3</calc>=3": "9</s>",
    }
    sizes = []
    script_model(monkeypatch, tokenizer, turns, sizes)
    rollout = respond(tokenizer, ["1+1=", "47+38=", "2="], num_samples=2)
    assert sizes == [6, 4, 2]
    texts = ["<calc>1+1</calc>=2", "85", "<calc>2</calc>=2<calc>3</calc>=39"]
    assert rollout.completions == [text for text in texts for _ in range(2)]
    assert rollout.tool_answers == [["=2"], ["=2"], [], [], ["=2", "=3"], ["=2", "=3"]]
    lengths = [len(tokenizer(text + "</s>").input_ids) for text in texts for _ in range(2)]
    assert rollout.context_mask.sum(1).tolist() == lengths
    prompts = [x[mask] for x, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    assert tokenizer.batch_decode(prompts) == [
        x for x in ("1+1=", "47+38=", "2=") for _ in range(2)
    ]


def test_a_text_of_the_tool_ends_nothing_and_counts_for_nothing(tokenizer, monkeypatch):
    """If the tool writes EOS or the end of a call, both are ordinary text."""
    monkeypatch.setattr(grpo_tools, "TOOL", lambda call: "</s></calc>" if call == "1" else "")
    turns = {
        "1=": "<calc>1</calc>",
        "1=<calc>1</calc>=</s></calc>": "<calc></calc>",
        "1=<calc>1</calc>=</s></calc><calc></calc>=": "5</s>",
    }
    script_model(monkeypatch, tokenizer, turns, [])
    rollout = respond(tokenizer, ["1="])
    assert rollout.tool_answers == [["=</s></calc>", "="]]
    assert rollout.completions == ["<calc>1</calc>=</s></calc><calc></calc>=5"]
    counted = rollout.response_ids[rollout.response_mask]
    assert tokenizer.decode(counted) == "<calc>1</calc><calc></calc>5</s>"


def test_an_eos_token_of_the_tool_is_no_end_in_the_evaluation(monkeypatch):
    """The policy has ended one of two responses. In the other one, only the tool has written an EOS token."""
    ids = torch.tensor([[5, EOS], [5, EOS]])  # (N, R)
    mask = torch.tensor([[True, True], [True, False]])  # (N, R)
    nothing = torch.zeros(2, 1)
    rollout = grpo_tools.Rollout(nothing, nothing, ids, mask, mask, nothing, ["", ""], [[], []])
    monkeypatch.setattr(grpo_tools, "sample_responses", lambda *args, **given: rollout)
    examples = [{"prompt": "8+77=", "answer": "85", "columns": {"answer": "85"}}] * 2
    found = grpo_tools.evaluate(grpo_tools.Args(), None, None, examples, torch.tensor([EOS]))
    assert found["eval/eos_frac"] == 0.5


def test_the_tokens_trained_on_are_those_sampled(monkeypatch):
    """A text has several tokenizations. The policy samples one that differs from the tokenizer's."""
    special, letters = ["<pad>", "<unk>", "</s>"], list("<>/=+calc0123456789")
    merged = ["</", "ca", "lc", "calc", "<calc", "lc>", "47", "85"]
    words = special + letters + merged
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [
        ("<", "/"),
        ("c", "a"),
        ("l", "c"),
        ("ca", "lc"),
        ("<", "calc"),
        ("lc", ">"),
        ("4", "7"),
        ("8", "5"),
    ]
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.decoder = decoders.Fuse()
    bpe = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<pad>")
    first = [vocab[x] for x in ["<", "calc", ">", "4", "7", "+", "3", "8", "<", "/", "ca", "lc>"]]
    rest = [vocab[x] for x in ["8", "5", "</s>"]]
    answer = bpe("=85").input_ids
    context = bpe.decode(bpe("47=").input_ids + first + answer)
    script_model(monkeypatch, bpe, {"47=": [*first, *rest], context: rest}, [])
    rollout = respond(bpe, ["47="])
    assert rollout.response_ids.tolist() == [first + answer + rest]
    assert rollout.response_mask.tolist() == [[True] * 12 + [False] * len(answer) + [True] * 3]
    assert rollout.completions == ["<calc>47+38</calc>=8585"]
    again = bpe(rollout.completions[0]).input_ids
    assert again != (first + answer + rest)[:-1] and bpe.decode(again) == rollout.completions[0]


# ==== with the student ====


@pytest.fixture(scope="module")
def student():
    return AutoModelForCausalLM.from_pretrained(CALLER, dtype=torch.float32)


@pytest.mark.parametrize("after", ["=24</think>", ", so", ".", ""])
def test_a_call_that_ends_inside_a_token(monkeypatch, after):
    """SmolLM2 spells the end of a call with ">=", ">," or ">.": the answer follows the call at once all the same."""
    tokenizer = AutoTokenizer.from_pretrained(REAL / "smollm2")
    eos_ids = torch.tensor([tokenizer.eos_token_id])
    written = tokenizer(f"It holds <calc>4*6</calc>{after}").input_ids
    turns = iter([written, [*tokenizer(" eggs.").input_ids, tokenizer.eos_token_id]])

    def generate(args, model, prompt_ids, *rest):
        ids = torch.tensor([next(turns)])
        return ids, torch.ones_like(ids, dtype=torch.bool), torch.full(ids.shape, -1.0)

    monkeypatch.setattr(grpo_tools, "generate", generate)
    args = grpo_tools.Args(max_new_tokens=40)
    model = SimpleNamespace(device=torch.device("cpu"))
    given = args, model, tokenizer, [{"prompt_ids": [5, 6]}], 1, 1.0, eos_ids
    rollout = grpo_tools.sample_responses(*given)
    assert rollout.completions == ["It holds <calc>4*6</calc>=24 eggs."]
    assert rollout.tool_answers == [["=24"]]
    # A token that goes on after the call is not the policy's any more, so it isn't trained.
    trained = tokenizer.decode(rollout.response_ids[0][rollout.response_mask[0]])
    assert trained == f"It holds <calc>4*6</calc{'' if after else '>'} eggs.<|im_end|>"
    assert (rollout.sampled_logprobs[0] == -1.0).tolist() == rollout.response_mask[0].tolist()


@pytest.mark.parametrize("end", ["</calc>", "85", "k><answer>8", "nothing"])
def test_sampling_stops_where_a_call_ends(student, tokenizer, monkeypatch, end):
    """Any tokens may spell the end of a call. Columns after this end don't count."""
    monkeypatch.setattr(grpo_tools, "CALL_END", end)
    args = grpo_tools.Args(max_prompt_tokens=64, max_new_tokens=24)
    asked = "47+38=<think><calc>47+38" + "</calc>=85" * (end != "</calc>")
    ids = tokenizer(asked, return_tensors="pt").input_ids
    given = args, student, ids, ids >= 0, 1, 0.0, EOS_IDS, tokenizer
    response, mask, _ = grpo_tools.generate(*given)
    text = "</calc>" if end == "</calc>" else "</think><answer>85</answer></s>"
    ids, *_ = grpo_tools.cut_at_call(tokenizer, response[mask].tolist())
    n = len(ids)
    monkeypatch.setattr(grpo_tools, "CALL_END", "\0")
    freely = grpo_tools.generate(*given)[0]
    assert tokenizer.decode(freely[0]).startswith(text), tokenizer.decode(freely[0])
    assert response[0, :n].tolist() == freely[0, :n].tolist()
    assert mask[0].tolist() == [True] * n + [False] * (24 - n)
    if end != "nothing":
        assert end in tokenizer.decode(response[0, :n])
        assert end not in tokenizer.decode(response[0, : n - 1])


def test_a_slot_that_was_never_drawn_does_not_count(student, tokenizer):
    """generate looks for a call in the last tokens, and may drop a row for a call that the whole text doesn't have.

    A tokenizer with byte fallback does this: the same byte tokens have another text if an invalid byte precedes them.
    """
    args = grpo_tools.Args(max_prompt_tokens=64, max_new_tokens=24)
    ids = tokenizer(["47+38=", "12+51="], return_tensors="pt").input_ids
    looks = []

    def batch_decode(rows):
        looks.append(len(rows))
        return [grpo_tools.CALL_END if len(looks) == 4 and i == 0 else "" for i in range(len(rows))]

    windows = SimpleNamespace(batch_decode=batch_decode)
    _, mask, logprobs = grpo_tools.generate(args, student, ids, ids >= 0, 1, 0.0, EOS_IDS, windows)
    assert looks[3:5] == [2, 1]  # the fourth look dropped the first row
    assert mask[0].tolist() == [True] * 4 + [False] * 20
    assert mask[1].sum() > 4 and (logprobs[mask] < 0).all() and (logprobs[~mask] == 0).all()


# ==== whole runs ====

COMMON = dict(
    num_steps=2,
    num_prompts=4,
    num_generations=4,
    max_new_tokens=21,
    temperature=1.1,
    learning_rate=2e-3,
    num_iterations=2,
    num_minibatches=2,
    micro_batch_tokens=100,
    max_grad_norm=0.7,
    clip_eps=0.1,
    beta=0.2,
    tool_cost=0.25,
    eval_size=2,
    seed=4,
)


def train(tmp_path, name="run", **given):
    lines = (ROOT / "assets" / "addition" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:60]))
    fields = dict(dataset=str(tmp_path / "few.jsonl"), runs_dir=str(tmp_path), run_name=name)
    fields |= COMMON | dict(device="cpu") | given
    args = dataclasses.replace(grpo_tools.BUNDLED, **fields)
    grpo_tools.main(args)
    return args, tmp_path / name


def test_two_steps_of_main(double, monkeypatch, tmp_path):  # noqa: F811
    """A float64 reference computes weights and metrics token by token, only from the policy's tokens."""
    double(grpo_tools)
    rollouts, updates = [], []
    sample_responses, minibatches = grpo_tools.sample_responses, grpo_tools.minibatches

    def recorded_sample_responses(*call, **named):
        rollout = sample_responses(*call, **named)
        if call[5] > 0:  # the temperature: an evaluation is greedy
            rollouts.append(rollout)
            updates.append([])
        return rollout

    def recorded_minibatches(*call):
        for minibatch in minibatches(*call):
            updates[-1].append(minibatch.tolist())
            yield minibatch

    monkeypatch.setattr(grpo_tools, "sample_responses", recorded_sample_responses)
    monkeypatch.setattr(grpo_tools, "minibatches", recorded_minibatches)
    args, folder = train(tmp_path)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()][1:]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    gold = [[x["answer"] for x in samples if x["step"] == k for _ in range(4)] for k in (1, 2)]

    model, start = (
        AutoModelForCausalLM.from_pretrained(CALLER, dtype=torch.float64) for _ in range(2)
    )
    adam = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    planned = 0
    for rollout, parts, answers, metrics in zip(rollouts, updates, gold, records, strict=True):
        N = len(rollout.completions)
        pairs, wrote = [], []
        for i in range(N):
            seen = rollout.context_mask[i]
            prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist()
            pairs.append((prompt, rollout.response_ids[i][seen].tolist()))
            wrote.append(rollout.response_mask[i][seen].tolist())
        with torch.no_grad():
            old = [logprobs_of(model, pair, args.temperature).tolist() for pair in pairs]
            ref = [logprobs_of(start, pair, args.temperature).tolist() for pair in pairs]
        calls = [len(x) for x in rollout.tool_answers]
        right = accuracy_reward(rollout.completions, answers)
        form = format_reward(rollout.completions, answers)
        rewards = [a + b - 0.25 * n for a, b, n in zip(right, form, calls, strict=True)]
        advantages = []
        for k in range(0, N, 4):
            group = rewards[k : k + 4]
            mean = math.fsum(group) / 4
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / 3)
            advantages += [(x - mean) / (std + 1e-4) for x in group]
        clipped, k3s, entropy, count = 0, 0.0, 0.0, 0
        for part in parts:
            total = torch.zeros(())
            for i in part:
                logprobs = logprobs_of(model, pairs[i], args.temperature)
                own = [t for t in range(len(logprobs)) if wrote[i][t]]
                for t in own:
                    ratio = (logprobs[t] - old[i][t]).exp()
                    bounded = min(max(ratio, torch.tensor(0.9)), torch.tensor(1.1))
                    surrogate = min(ratio * advantages[i], bounded * advantages[i])
                    upside = ref[i][t] - logprobs[t]
                    kl = upside.exp() - upside - 1
                    total = total - (surrogate - args.beta * kl) / len(own) / len(part)
                    clipped += not 0.9 <= ratio.item() <= 1.1
                    k3s += k3(ref[i][t], logprobs[t].item())
                    entropy -= logprobs[t].item()
                    count += 1
            adam.zero_grad()
            adam.param_groups[0]["lr"] = args.learning_rate * (1 - planned / 8)
            total.backward()
            clip_gradients(model, args.max_grad_norm)
            adam.step()
            planned += 1
        with_calls = [x for x, n in zip(right, calls, strict=True) if n > 0]
        lengths = [sum(x) for x in wrote]
        ends = [pair[1][-1] == EOS and own[-1] for pair, own in zip(pairs, wrote, strict=True)]
        errors = sum(x.count(ERROR) for x in rollout.tool_answers)
        expected = {
            "rollout/reward_mean": math.fsum(rewards) / N,
            "rollout/response_len": sum(lengths) / N,
            "rollout/eos_frac": sum(ends) / N,
            "tool/calls": sum(calls) / N,
            "tool/error_frac": errors / sum(calls),
            "tool/call_accuracy": sum(with_calls) / len(with_calls),
            "policy/clip_frac": clipped / count,
            "policy/entropy": entropy / count,
            "kl/ref": k3s / count,
        }
        assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert 0 < sum(ends) < N and 0 < len(with_calls) < N and clipped > 0
    assert records[-1]["tokens"] == sum(int(x.response_mask.sum()) for x in rollouts)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(saved[name], weights, rtol=1e-6, atol=1e-8)


def test_without_a_call_it_has_no_accuracy(tmp_path, monkeypatch):
    """The first run finds no call. In the second run every call is an error, and the run continues."""
    with monkeypatch.context() as changed:
        changed.setattr(grpo_tools, "CALL_END", "\0")
        _, folder = train(tmp_path, "none", num_steps=1)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-1]
    found = [metrics[f"tool/{name}"] for name in ("calls", "error_frac", "call_accuracy")]
    assert found[:2] == [0, 0] and math.isnan(found[2])
    monkeypatch.setattr(grpo_tools, "TOOL", lambda call: 1 / 0)
    _, folder = train(tmp_path, "raises", num_steps=1)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-1]
    assert metrics["tool/calls"] > 0 and metrics["tool/error_frac"] == 1


def test_the_search_of_the_docs(tmp_path, monkeypatch):
    """Run the search tool of docs/extend.md unchanged."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(PASSAGES.*?)```", text, re.DOTALL)
    (tmp_path / "passages.txt").write_text("the carp is a fish\n\nthe ox\n\nthe carp and the ox")
    monkeypatch.chdir(tmp_path)
    module = {"re": re, "Path": Path, "Counter": Counter}
    exec(source, module)
    calls = ["An ox?", "a FISH", "carp, ox and eel", "eel"]
    expected = ["=the ox", "=the carp is a fish", "=the carp and the ox", ERROR]
    assert run_tool(module["TOOL"], calls) == expected
