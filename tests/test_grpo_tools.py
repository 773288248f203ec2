"""grpo_tools.py: the tool, the calls, the tokens that the policy sees and the tokens that it trains on."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import DATA, ROOT, default_task, use_task
from families import random_model, small_config
from test_sampling import assert_near, slow_logprobs
from test_sampling import double as in_float64  # noqa: F401
from test_whole_step import clip_gradients, double, k3, logprobs_of  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import grpo_tools
from utils.rewards import accuracy_reward, format_reward

calculator, ERROR = grpo_tools.calculator, grpo_tools.ERROR


TASK = default_task(grpo_tools)


def run_tool(tool, calls):
    """The answer of grpo_tools.run_tool to each of the calls, with this tool."""
    return [grpo_tools.run_tool(tool, call) for call in calls]


CALLER = ROOT / "assets" / "addition" / "caller"
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
        ("100.1-100", "0.1"),
        ("3*1.15-3.45", "0"),
        ("0*-1.0", "0"),
        ("123456789*987654321", "121932631112635269"),
        ("+5--3", "8"),
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
    "1;2",
    "",
    "1/0",
    "True",
    "3j",
    "9" * 5000,
    "(" * 400,
    "-" * 100000 + "1",
    "1\0",
    # 500 digits and a sign. Without its last character the answer would be a tenth of the value.
    "-1e308*9e191",
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


# ==== a policy that writes what a test tells it ====


class Policy:
    """A stand-in for a model, which writes given tokens. The rest of sampling is grpo_tools.py's own.

    It reads a row's context from the cache, whose keys are the token ids, and only where the mask shows them. Then it
    looks up the next token, whose probability is p(token). After an unknown context the next token is EOS. So a sample
    that isn't used, and a context that shouldn't be, end a response if they count.
    """

    def __init__(self, size, eos):
        sizes = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=1, head_dim=1)
        self.config = LlamaConfig(vocab_size=size, **sizes)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.size, self.eos = size, eos
        self.plan = {}  # a context, which is a tuple of ids -> the next id
        self.rows = []  # the number of rows of each forward pass

    def eval(self):
        pass

    def p(self, token):
        return 0.5 + 0.4 * token / self.size

    def tell(self, context, ids):
        """After this context write these ids."""
        for k, token in enumerate(ids):
            self.plan[(*context, *ids[:k])] = token

    def __call__(self, ids, attention_mask, position_ids, past_key_values, **options):
        keys = ids[:, None, :, None].float()  # (rows, 1 head, columns, size 1)
        keys, _ = past_key_values.update(keys, keys, 0)
        # transformers would hide the columns that are still empty.
        is_filled = torch.arange(keys.shape[2]) < past_key_values.get_seq_length()
        is_visible = attention_mask.bool() & is_filled  # (rows, columns)
        logits = torch.zeros(len(ids), 1, self.size)
        for row, (row_keys, shown) in enumerate(zip(keys[:, 0, :, 0], is_visible, strict=True)):
            context = row_keys[shown].long().tolist()
            assert position_ids[row, -1] == len(context) - 1
            token = self.plan.get(tuple(context), self.eos)
            # The other tokens have the logit 0.
            logits[row, 0, token] = math.log(self.p(token) / (1 - self.p(token)) * (self.size - 1))
        self.rows.append(len(ids))
        return SimpleNamespace(logits=logits)


def respond(policy, tokenizer, prompts, num_samples=1, **given):
    """Greedy responses of the policy: the rollout, the tool's answers, and the texts."""
    sizes = dict(max_new_tokens=40, max_prompt_tokens=64, sampling_tokens=49152)
    args = grpo_tools.Args(**sizes | given)
    problems = [{"prompt_ids": prompt} for prompt in prompts]
    eos_ids = torch.tensor([policy.eos])
    rollout, answers = grpo_tools.sample_responses(
        args, TASK, policy, tokenizer, problems, num_samples, 0.0, eos_ids
    )
    return rollout, answers, grpo_tools.response_texts(tokenizer, rollout, eos_ids)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def tell(policy, tokenizer, prompt, parts):
    """Tell the policy its parts of a response. Return the response's ids, and for each whether the policy wrote it.

    A part is a text, or a list of ids. The tool wrote the texts that begin with "{".
    """
    ids, wrote = [], []
    for part in parts:
        by_tool = isinstance(part, str) and part.startswith("{")
        new = encode(tokenizer, part.strip("{}")) if isinstance(part, str) else part
        if not by_tool:
            policy.tell(prompt + ids, new)
        ids += new
        wrote += [not by_tool] * len(new)
    return ids, wrote


def split(text):
    """ "ab{=1}c" as the parts "ab", "{=1}" and "c"."""
    return [part for part in re.split(r"(\{.*?\})", text) if part]


def assert_response(policy, rollout, i, ids, wrote):
    """Response i of the rollout has these ids, of the policy (True) and the tool (False), and their probabilities."""
    R = rollout.response_ids.shape[1]
    padding = [False] * (R - len(ids))
    assert rollout.response_ids[i][: len(ids)].tolist() == ids
    assert rollout.response_mask[i].tolist() == wrote + padding
    assert rollout.context_mask[i].tolist() == [True] * len(ids) + padding
    logprobs = [math.log(policy.p(x)) if own else 0.0 for x, own in zip(ids, wrote, strict=True)]
    expected = torch.tensor(logprobs + [0.0] * (R - len(ids)))
    # With a vocabulary of 50,000 a float32 log_softmax is off by 2e-4.
    assert_near(rollout.sampled_logprobs[i], expected, tolerance=1e-3)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """The cache grows after each 5 tokens, and drops the rows that have finished."""
    monkeypatch.setattr(grpo_tools, "SEGMENT", {"cpu": 5})


@pytest.fixture
def policy(tokenizer):
    return Policy(len(tokenizer), EOS)


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
def test_a_response_is_what_policy_and_tool_wrote(name, tokenizer, policy):
    (text,) = TURNS[name]
    prompt = encode(tokenizer, "1+1=")
    ids, wrote = tell(policy, tokenizer, prompt, split(text))
    # The policy would write more than there is room for.
    if name == "cut in a call":
        policy.tell(prompt + ids, encode(tokenizer, "11</calc>"))
    if name == "cut after it":
        policy.tell(prompt + ids, encode(tokenizer, "1" * 40))
    rollout, answers, texts = respond(policy, tokenizer, [prompt], max_calls=3)
    assert_response(policy, rollout, 0, ids, wrote)
    expected = re.findall(r"\{(.*?)\}", text)
    # The response has room for a part of this answer only.
    assert answers == [["=22"] if name == "cut in an answer" else expected]
    assert texts == [text.replace("{", "").replace("}", "").removesuffix("</s>")]
    assert len(ids) == 40 or not name.startswith("cut")


@pytest.mark.parametrize("max_calls", [0, 2])
def test_the_call_after_max_calls_ends_the_response(max_calls, tokenizer, policy, monkeypatch):
    """The tool answers max_calls calls. It never sees the next call, and this call ends the response."""
    seen = []

    def tool(call):
        seen.append(call)
        return "0"

    monkeypatch.setattr(TASK, "TOOL", tool)
    text = "{=0}".join(f"<calc>{k}</calc>" for k in range(max_calls + 1))
    prompt = encode(tokenizer, "1+1=")
    ids, wrote = tell(policy, tokenizer, prompt, split(text))
    policy.tell(prompt + ids, encode(tokenizer, "111"))  # never sampled
    # The other response goes on.
    other = encode(tokenizer, "2=")
    other_ids, other_wrote = tell(policy, tokenizer, other, ["1" * 35])
    rollout, answers, _ = respond(policy, tokenizer, [prompt, other], max_calls=max_calls)
    assert seen == [str(k) for k in range(max_calls)]
    assert answers == [["=0"] * max_calls, []]
    assert_response(policy, rollout, 0, ids, wrote)
    assert_response(policy, rollout, 1, [*other_ids, EOS], [*other_wrote, True])
    assert len(ids) < 35


@pytest.mark.parametrize("segment", [1, 4, 100])
def test_responses_of_a_batch_are_separate(segment, tokenizer, policy, monkeypatch):
    """Each response continues from its text until it ends. Rows that have finished are dropped."""
    monkeypatch.setattr(grpo_tools, "SEGMENT", {"cpu": segment})
    texts = {
        "1+1=": "<calc>1+1</calc>{=2}</s>",
        "47+38=": "85</s>",
        "2=": "<calc>2</calc>{=2}<calc>3*1.5</calc>{=4.5}9</s>",
    }
    prompts = [encode(tokenizer, prompt) for prompt in texts]
    responses = []
    for prompt, text in zip(prompts, texts.values(), strict=True):
        responses.append(tell(policy, tokenizer, prompt, split(text)))
    expected = ["<calc>1+1</calc>=2", "85", "<calc>2</calc>=2<calc>3*1.5</calc>=4.59"]
    for sampling_tokens in (49152, 1):  # all prompts at a time, or one
        policy.rows.clear()
        rollout, answers, completions = respond(
            policy, tokenizer, prompts, num_samples=2, sampling_tokens=sampling_tokens
        )
        for i in range(6):
            assert_response(policy, rollout, i, *responses[i // 2])
            assert rollout.prompts[i] == prompts[i // 2]
        assert answers == [["=2"], ["=2"], [], [], ["=2", "=4.5"], ["=2", "=4.5"]]
        assert completions == [text for text in expected for _ in range(2)]
        if sampling_tokens == 1:
            assert set(policy.rows) == {1, 2}
        else:
            # The prefill has a row for each prompt.
            assert set(policy.rows) == ({3, 6} if segment == 100 else {3, 6, 4, 2})


def test_a_text_of_the_tool_ends_nothing_and_counts_for_nothing(tokenizer, policy, monkeypatch):
    """If the tool writes EOS or the end of a call, both are ordinary text."""
    monkeypatch.setattr(TASK, "TOOL", lambda call: "</s></calc>" if call == "1" else "")
    prompt = encode(tokenizer, "1=")
    text = "<calc>1</calc>{=</s></calc>}<calc></calc>{=}5</s>"
    ids, wrote = tell(policy, tokenizer, prompt, split(text))
    rollout, answers, texts = respond(policy, tokenizer, [prompt])
    assert_response(policy, rollout, 0, ids, wrote)
    assert answers == [["=</s></calc>", "="]]
    assert texts == ["<calc>1</calc>=</s></calc><calc></calc>=5"]
    counted = rollout.response_ids[rollout.response_mask]
    assert tokenizer.decode(counted) == "<calc>1</calc><calc></calc>5</s>"


def test_an_eos_token_of_the_tool_is_no_end_in_the_evaluation(monkeypatch, tokenizer):
    """The policy has ended one of two responses. In the other one, only the tool has written an EOS token."""
    ids = torch.tensor([[5, EOS], [5, EOS]])  # (N, R)
    policy_mask = torch.tensor([[True, True], [True, False]])  # (N, R)
    rollout = grpo_tools.Rollout([[3], [3]], ids, policy_mask, ids > 0, torch.zeros(2, 2))
    sampled = rollout, [[], []]
    monkeypatch.setattr(grpo_tools, "sample_responses", lambda *args, **given: sampled)
    problems = [{"prompt": "8+77=", "columns": {"answer": "85"}}] * 2
    model = SimpleNamespace(device="cpu")
    found, _ = grpo_tools.evaluate(grpo_tools.Args(), TASK, model, tokenizer, problems, EOS_IDS)
    assert found["eval/eos_frac"] == 0.5 and found["eval/response_len"] == 1.5
    assert grpo_tools.response_texts(tokenizer, rollout, EOS_IDS) == ["<answer>", "<answer></s>"]


# ==== calls in other tokenizers ====


@pytest.fixture(scope="module")
def smollm2():
    return AutoTokenizer.from_pretrained(DATA / "smollm2_tokenizer")


@pytest.mark.parametrize("after", ["=24</think>", ", so", ".", ""])
def test_a_call_that_ends_inside_a_token(smollm2, after):
    """SmolLM2 spells the end of a call with ">=", ">," or ">.": the answer follows the call at once all the same."""
    written = encode(smollm2, f"It holds <calc>4*6</calc>{after}")
    length = 1  # up to the token that ends the call
    while "</calc>" not in smollm2.decode(written[:length]):
        length += 1
    policy, prompt = Policy(len(smollm2), smollm2.eos_token_id), [5, 6]
    # A token that goes on after the call gives way to the tool.
    sampled, parts = written[:length], [written[:length], "{=24}"]
    if after:
        parts = [written[: length - 1], "{>=24}"]
    ids, wrote = tell(policy, smollm2, prompt, [*parts, " eggs.<|im_end|>"])
    policy.tell(prompt, sampled)
    rollout, answers, texts = respond(policy, smollm2, [prompt])
    assert_response(policy, rollout, 0, ids, wrote)
    assert texts == ["It holds <calc>4*6</calc>=24 eggs."]
    assert answers == [["=24"]]
    trained = smollm2.decode(rollout.response_ids[0][rollout.response_mask[0]])
    assert trained == f"It holds <calc>4*6</calc{'' if after else '>'} eggs.<|im_end|>"


@pytest.mark.parametrize("case", ["a call too many", "no room", "room for one token"])
def test_where_the_tool_does_not_answer_the_token_stands(smollm2, case):
    written = encode(smollm2, "<calc>4*6</calc>=")
    assert smollm2.decode(written[-1]) == ">="
    policy, prompt = Policy(len(smollm2), smollm2.eos_token_id), [5, 6]
    ids, wrote = tell(policy, smollm2, prompt, [written])
    given = {"a call too many": dict(max_calls=0), "no room": dict(max_new_tokens=len(ids))}
    if case == "room for one token":
        # The tool writes ">=" in place of the policy, and then the first token of its answer.
        given[case] = dict(max_new_tokens=len(ids) + 1)
        ids, wrote = ids[:-1] + encode(smollm2, ">=24")[:2], wrote[:-1] + [False] * 2
    rollout, answers, _ = respond(policy, smollm2, [prompt], **given[case])
    assert_response(policy, rollout, 0, ids, wrote)
    assert answers == [["=24"] if case == "room for one token" else []]


def bytes_tokenizer():
    """A tokenizer of single letters that spells other text in bytes, and begins a text with BOS, like Llama 2's."""
    bytes_as_words = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_as_words, *"<>/=+calc012345"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    bpe = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>"), vocab


def test_the_answer_begins_without_a_space():
    """Some tokenizers begin each text with a space, and the examples of the prompt have none there."""
    characters = sorted({*"\u2581\n<>/=+0123456789calc"})
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(characters)}, []))
    letters.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    letters.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    ids = tokenizer("<calc>12+12</calc>").input_ids
    caller, args = grpo_tools.Caller(TASK), grpo_tools.Args(max_new_tokens=100)
    for t, token in enumerate(ids):
        assert caller.take_sample(args, tokenizer, token, t) is None
    assert tokenizer.decode(ids + caller.waiting) == "<calc>12+12</calc>=24"


def test_a_call_that_only_the_last_tokens_spell():
    """The byte C3 makes the bytes after it invalid. So only the last tokens alone spell </calc>."""
    bytewise, vocab = bytes_tokenizer()
    spelled = [vocab[f"<0x{byte:02X}>"] for byte in b"</calc>"]
    no_call = [vocab["<0xC3>"], *spelled]
    assert bytewise.decode(spelled) == "</calc>" and "c" not in bytewise.decode(no_call)
    policy, prompt = Policy(len(vocab), vocab["</s>"]), encode(bytewise, "1=")
    parts = [no_call, "<calc>1+1", spelled, "{=2}", "2</s>"]
    ids, wrote = tell(policy, bytewise, prompt, parts)
    rollout, answers, texts = respond(policy, bytewise, [prompt])
    assert_response(policy, rollout, 0, ids, wrote)
    assert answers == [["=2"]]
    assert texts == ["\N{REPLACEMENT CHARACTER}" * 8 + "<calc>1+1</calc>=22"]


# ==== with random weights ====


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Gemma 3, short window", "Qwen3.5"])
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(
    family,
    tokenizer,
    monkeypatch,
    in_float64,  # noqa: F811
):
    """The reference is one forward pass of the whole text of policy and tool, without cache, mask or padding."""
    monkeypatch.setattr(grpo_tools, "SEGMENT", {"cpu": 3})
    # A tenth of the tokens contain the letter a. Some, such as <calc>, go on after it.
    monkeypatch.setattr(TASK, "CALL_START", "1")
    monkeypatch.setattr(TASK, "CALL_END", "a")
    monkeypatch.setattr(TASK, "TOOL", lambda call: "a</s>" + "0" * (len(call) % 4))
    kept, select = [], grpo_tools.Decoding.select

    def counted(decoding, rows):
        kept.append(len(rows))
        select(decoding, rows)

    monkeypatch.setattr(grpo_tools.Decoding, "select", counted)
    # In float64, because processors round differently.
    model = in_float64(random_model(small_config(family, vocab_size=len(tokenizer))))
    args = grpo_tools.Args(max_new_tokens=40, max_calls=3, temperature=0.8)
    prompts = [encode(tokenizer, text) for text in ("1+1=", "2", "47+38=", "</s>5")]
    problems = [{"prompt_ids": prompt} for prompt in prompts]
    eos_ids = torch.tensor([EOS, 20, 21])
    torch.manual_seed(0)
    rollout, answers = grpo_tools.sample_responses(
        args, TASK, model, tokenizer, problems, 12, args.temperature, eos_ids
    )
    with torch.no_grad():
        expected = slow_logprobs(model, rollout, args.temperature)
    trained = grpo_tools.rollout_logprobs(args, model, rollout, [torch.arange(48)])
    # Qwen3.5's linear attention rounds to float32 inside: by 4e-5 here, ten times less than the tolerance.
    tolerance = 4e-4 if family == "Qwen3.5" else 1e-5
    assert_near(rollout.sampled_logprobs, expected, tolerance)
    assert_near(trained, expected, tolerance)

    gave_way = 0  # calls whose end the tool wrote
    for i in range(48):
        length = int(rollout.context_mask[i].sum())
        assert rollout.context_mask[i, :length].all()
        ids, own = rollout.response_ids[i, :length], rollout.response_mask[i, :length]
        assert not rollout.response_mask[i, length:].any()
        # EOS tokens of the policy are the last ones. Those of the tool end nothing.
        assert not torch.isin(ids[:-1][own[:-1]], eos_ids).any()
        by_tool = tokenizer.decode(ids[~own])
        whole, cut = "".join(answers[i]), length == 40
        # Where the tool wrote the end of a call, too, its text has one more letter.
        gave_way += by_tool.count("a") - whole.count("a") > 0
        assert cut or by_tool.count("=") == len(answers[i])
    assert gave_way > 3 and max(map(len, answers)) == 3
    assert len(set(rollout.context_mask.sum(1).tolist())) > 10
    # Each time that the cache grows it drops the rows that have finished.
    assert len(set(kept)) > 4


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
        sampled = sample_responses(*call, **named)
        if "temperature" not in named:  # an evaluation names it
            rollouts.append(sampled)
            updates.append([])
        return sampled

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
    tokenizer = AutoTokenizer.from_pretrained(CALLER)
    for sampled, parts, answers, metrics in zip(rollouts, updates, gold, records, strict=True):
        rollout, tool_answers = sampled
        N = len(tool_answers)
        pairs, wrote = [], []
        for i in range(N):
            seen = rollout.context_mask[i]
            pairs.append((rollout.prompts[i], rollout.response_ids[i][seen].tolist()))
            wrote.append(rollout.response_mask[i][seen].tolist())
        with torch.no_grad():
            old = [logprobs_of(model, pair, args.temperature).tolist() for pair in pairs]
            ref = [logprobs_of(start, pair, args.temperature).tolist() for pair in pairs]
        calls = [len(x) for x in tool_answers]
        texts = [tokenizer.decode(response).removesuffix("</s>") for _, response in pairs]
        right = accuracy_reward(texts, answers)
        form = format_reward(texts, answers)
        rewards = [a + b - 0.25 * n for a, b, n in zip(right, form, calls, strict=True)]
        advantages = []
        for k in range(0, N, 4):
            group = rewards[k : k + 4]
            mean = math.fsum(group) / 4
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / 3)
            advantages += [(x - mean) / (std + 1e-4) for x in group]
        low, high, k3s, entropy, count = 0, 0, 0.0, 0.0, 0
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
                    low += ratio.item() < 0.9 and advantages[i] < 0
                    high += ratio.item() > 1.1 and advantages[i] > 0
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
        errors = sum(x.count(ERROR) for x in tool_answers)
        expected = {
            "rollout/reward_mean": math.fsum(rewards) / N,
            "rollout/response_len": sum(lengths) / N,
            "rollout/eos_frac": sum(ends) / N,
            "tool/calls": sum(calls) / N,
            "tool/error_frac": errors / sum(calls),
            "tool/call_accuracy": sum(with_calls) / len(with_calls),
            "policy/clip_frac": (low + high) / count,
            "policy/clip_frac_low": low / count,
            "policy/clip_frac_high": high / count,
            "policy/entropy": entropy / count,
            "kl/ref": k3s / count,
        }
        assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert 0 < sum(ends) < N and 0 < len(with_calls) < N and low > 0 < high
    assert records[-1]["tokens"] == sum(int(x.response_mask.sum()) for x, _ in rollouts)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(saved[name], weights, rtol=1e-6, atol=1e-8)


def test_without_a_call_it_has_no_accuracy(tmp_path, monkeypatch):
    use_task(monkeypatch, grpo_tools, TASK.REWARDS, CALL_END="\0")
    _, folder = train(tmp_path, num_steps=1)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-1]
    assert metrics["tool/calls"] == metrics["tool/error_frac"] == 0
    assert "tool/call_accuracy" not in metrics


def test_the_search_of_the_docs(tmp_path, monkeypatch):
    """Run the search tool of docs/extend.md unchanged."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n([^`]*\nPASSAGES.*?)```", text, re.DOTALL)
    (tmp_path / "my_task.py").write_text(source, encoding="utf-8")
    (tmp_path / "passages.txt").write_text("the carp is a fish\n\nthe ox\n\nthe carp and the ox")
    monkeypatch.chdir(tmp_path)
    task = grpo_tools.load_task(grpo_tools.Args(task="my_task.py"))
    calls = ["An ox?", "a FISH", "carp, ox and eel", "eel"]
    expected = ["=the ox", "=the carp is a fish", "=the carp and the ox", ERROR]
    assert run_tool(task.TOOL, calls) == expected
    (reward,) = task.REWARDS
    texts = ["<answer> THE ox</answer>", "<answer>ox</answer>", "the ox"]
    assert reward(completions=texts, answer=["the ox"] * 3) == [1.0, 0.0, 0.0]
    # It trains. The bundled caller never calls this tool.
    _, folder = train(tmp_path, num_steps=1, task="my_task.py")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-1]
    assert metrics["tool/calls"] == 0 and "rollout/text_reward" in metrics


def test_a_task_without_a_tool_gets_the_calculator(tmp_path):
    """Then it keeps its own examples, unless it has others for a tool. A task with a tool keeps this tool."""
    text = "REWARDS, EXAMPLES = [], [('1', '2')]\n"
    more = {"": None, "TOOL_EXAMPLES = [('3', '4')]": None}
    more["TOOL, CALL_START, CALL_END = len, '(', ')'"] = len
    for k, (lines, tool) in enumerate(more.items()):
        path = tmp_path / f"task{k}.py"
        path.write_text(text + lines, encoding="utf-8")
        task = grpo_tools.load_task(grpo_tools.Args(task=str(path)))
        marks = ("(", ")") if tool else ("<calc>", "</calc>")
        assert task.TOOL is (tool or calculator) and (task.CALL_START, task.CALL_END) == marks
        assert task.EXAMPLES == ([("3", "4")] if "TOOL_EXAMPLES" in lines else [("1", "2")])
