"""self_distill.py and variants/sdpo_context.diff: how the teacher moves, and what it alone reads.

test_distill.py has the equations that both scripts share, and test_whole_step.py whole steps. Also: what is
refused.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL_MODEL, default_task, load_patched
from test_distill import make_rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

import self_distill

TEMPLATE = "{context}\n{question}"


# ---- the equations


def test_the_teacher_moves_by_the_rate():
    """From 8 towards 0, at a rate of 0.25: 8, then 6, then 4.5."""
    teacher, model = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    teacher.weight.data.fill_(8.0)
    model.weight.data.fill_(0.0)
    for rate, expected in ((0.25, 6.0), (0.25, 4.5), (0.0, 4.5), (1.0, 0.0)):
        self_distill.move_teacher(teacher, model, rate)
        assert teacher.weight.item() == expected and model.weight.item() == 0.0


def test_the_right_responses_by_hand():
    """Two groups of three and a group of none. A right response doesn't explain itself."""
    texts = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
    right = [False, True, True, True, False, False, False, False, False]
    contexts = load_patched("sdpo_context").right_responses(texts, right, 3)
    assert contexts == ["b", "c", "b", "", "d", "d", "", "", ""]


# ---- the teacher's prompts


def tokens(text):
    return AutoTokenizer.from_pretrained(SMALL_MODEL)(text).input_ids


def test_the_teachers_prompts_by_hand():
    """All samples of a prompt get its context. A blank one and one that is too long count as none.

    Then the teacher reads the student's prompt.
    """
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    given = dict(context_template=TEMPLATE, max_teacher_tokens=8)
    args = self_distill.Args(**given, examples=False)
    problems, read, used, prompts = [], [], [], []
    # The teacher's prompts would have 6, 6, 8 and 10 tokens.
    for question, context, is_used in (
        ("1+2=", "3", True),
        ("1+2=", " ", False),
        ("30+4=", "34", True),
        ("30+4=", "{x}+", False),
    ):
        messages = [{"role": "user", "content": question}]
        problems.append({"chat": messages, "prompt_ids": tokens(question), "context": context})
        prompts += [tokens(question)] * 2
        read += [tokens(f"{context}\n{question}" if is_used else question)] * 2
        used += [is_used] * 2
    rollout = make_rollout(prompts, [[5, 2]] * 8)
    told, has_context = self_distill.add_contexts(
        args, default_task(self_distill), tokenizer, rollout, problems
    )
    assert has_context.tolist() == used
    assert told.prompts == read and rollout.prompts == prompts
    assert all(x is y for x, y in zip(told[1:], rollout[1:], strict=True))


def test_a_template_with_a_chat_changes_only_the_last_message():
    """The instructions stand in the last message. Braces in a question or a context are text."""
    seen = []

    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, messages, **options):
            return "|".join(message["content"] for message in messages)

        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            seen.append(text)
            return SimpleNamespace(input_ids=[1] * len(text))

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "{context}?"})
    args = self_distill.Args(
        examples=False,
        instructions="think",
        context_template="{question} {{{context}}}",
        max_teacher_tokens=99,
    )
    rollout = make_rollout([[1]], [[5, 2]])
    problems = [{"chat": messages, "prompt_ids": [1], "context": "{question}"}]
    self_distill.add_contexts(args, default_task(self_distill), Tokenizer(), rollout, problems)
    assert seen == ["a|b|think\n\n{context}? {{question}}"]


# ---- runs

SMALL = dict(num_steps=2, num_prompts=4, num_generations=2, eval_size=2, device="cpu", eval_every=0)
SMALL |= dict(model=SMALL_MODEL, examples=False, max_prompt_tokens=64, max_new_tokens=24)
SMALL |= dict(max_teacher_tokens=128, context_template=TEMPLATE, gradient_checkpointing=False)
SMALL |= dict(learning_rate=1e-3, warmup_updates=0)


def train(tmp_path, hints, **given):
    """Run main on 40 problems with these hints, in turn. Return the metrics of each step and the checkpoint."""
    rows = []
    for i in range(40):
        rows.append({"question": f"{i}+7=", "answer": str(i + 7), "hint": hints[i % len(hints)]})
    task = tmp_path / "task.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = dict(dataset=str(task), context_column="hint", runs_dir=str(tmp_path), run_name="run")
    fields = SMALL | fields | given
    self_distill.main(self_distill.Args(**fields))
    folder = tmp_path / fields["run_name"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()][1:]
    return records, torch.load(folder / "checkpoint.pt", weights_only=True)


def test_without_a_context_there_is_no_loss(tmp_path):
    """No response of these steps has a context, so the weights don't change, and means over tokens are 0."""
    hints = ["9" * 200]  # longer than --max-teacher-tokens
    records, saved = train(tmp_path, hints)
    for metrics in records:
        assert metrics["rollout/context_frac"] == 0.0
        assert metrics["kl/ref"] == metrics["policy/ratio_mean"] == 0.0
        assert metrics["policy/loss"] == 0.0 and metrics["optim/grad_norm"] == 0.0
    for name, weights in AutoModelForCausalLM.from_pretrained(SMALL_MODEL).state_dict().items():
        assert torch.equal(saved["model"][name], weights)


def test_a_share_of_the_responses_has_a_context(tmp_path):
    """Every second problem has a hint. An empty cell and a cell without a text count as none."""
    records, _ = train(tmp_path, ["5", "", "5", None], num_prompts=40, num_steps=1)
    # A tenth of the 40 problems, two of them with a hint, is held out.
    assert records[0]["rollout/context_frac"] == 0.5


def test_contexts_do_not_reach_the_students_prompt(tmp_path):
    """The student's samples and the held-out accuracy don't depend on the hints before the first update."""
    for run, hints in (("a", ["1"]), ("b", ["2"])):
        train(tmp_path, hints, num_steps=1, run_name=run)
    samples = [
        [json.loads(line) for line in (tmp_path / run / "samples.jsonl").open()] for run in "ab"
    ]
    for a, b in zip(*samples, strict=True):
        assert a["completions"] == b["completions"] and a["prompt"] == b["prompt"]
        assert a["context"] == "1" and b["context"] == "2"
        assert a["advantages"] != b["advantages"]


# ---- errors


@pytest.mark.parametrize(
    ("hints", "given", "words"),
    [
        (["5"], dict(context_column="nonesuch"), "'nonesuch'.*'question', 'answer', 'hint'"),
        (["", None], {}, "--context-column hint: no cell holds a text"),
        (
            ["5", [{"role": "assistant", "content": "add"}]],
            {},
            "--context-column hint: .*'add'}] is no text",
        ),
        (["5"], dict(context_template="{question}"), "must contain {question} and {context}"),
        (["5"], dict(context_template="{context}"), "must contain {question} and {context}"),
    ],
)
def test_mistakes(tmp_path, hints, given, words):
    with pytest.raises(ValueError, match=words):
        train(tmp_path, hints, **given)


@pytest.mark.parametrize("name", ["max_prompt_tokens", "max_teacher_tokens"])
def test_a_prompt_has_to_fit_into_the_context(name):
    """The model's context has 256 tokens, and a response 24."""
    args = self_distill.Args(**SMALL | {name: 232})
    assert self_distill.load_config(args, SMALL_MODEL).max_position_embeddings == 256
    args = self_distill.Args(**SMALL | {name: 233})
    with pytest.raises(ValueError, match="--max-teacher-tokens.*256 tokens"):
        self_distill.load_config(args, SMALL_MODEL)
