"""self_distill.py and variants/sdpo_context.diff: how the teacher moves, and what it alone reads.

test_distill.py has the equations, whose text both scripts share.
Also: agreement with TRL (if it is installed), what is refused, and the bundled hints.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL_MODEL
from patched import load_patched
from test_distill import doubled, random_logits, tiny  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

import self_distill

HINTED = ROOT / "assets" / "hints"
TEMPLATE = "{context}\n{question}"


def make_rollout(prompts, responses, script=self_distill):
    """A rollout of these lists of ids. The tests here don't read its log-probabilities."""

    def padded(rows, side):
        width = max(map(len, rows))
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        for row, (row_ids, row_mask) in zip(rows, zip(ids, mask, strict=True), strict=True):
            place = slice(width - len(row), width) if side == "left" else slice(len(row))
            row_ids[place], row_mask[place] = torch.tensor(row), 1
        return ids, mask.bool()

    ids, mask = padded(responses, "right")
    return script.Rollout(*padded(prompts, "left"), ids, mask, torch.zeros(ids.shape))


# ---- the equations


def test_the_teacher_moves_by_the_rate(doubled):  # noqa: F811
    """By hand, from 8 towards 0: 8, then 6, then 4.5 at a rate of 0.25. The slow form has a sum over all steps."""
    teacher, model = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    teacher.weight.data.fill_(8.0)
    model.weight.data.fill_(0.0)
    for expected in (6.0, 4.5):
        self_distill.move_teacher(teacher, model, 0.25)
        assert teacher.weight.item() == expected
    assert model.weight.item() == 0.0
    rate, values = 0.05, random_logits(3, 20).tolist()
    teacher.weight.data.fill_(2.0)
    for value in values:
        model.weight.data.fill_(value)
        self_distill.move_teacher(teacher, model, rate)
    weights = [rate * (1 - rate) ** k for k in range(len(values))]
    slow = 2.0 * (1 - rate) ** 20
    slow += math.fsum(w * x for w, x in zip(weights, reversed(values), strict=True))
    assert teacher.weight.item() == pytest.approx(slow, rel=1e-12)
    for rate, expected in ((0.0, 2.0), (1.0, -3.0)):
        teacher.weight.data.fill_(2.0)
        model.weight.data.fill_(-3.0)
        self_distill.move_teacher(teacher, model, rate)
        assert teacher.weight.item() == expected


def test_the_right_responses_by_hand():
    """Two groups of three and a group of none. A right response doesn't explain itself."""
    texts = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
    right = [False, True, True, True, False, False, False, False, False]
    contexts = load_patched("sdpo_context").right_responses(texts, right, 3)
    assert contexts == ["b", "c", "b", "", "d", "d", "", "", ""]


# ---- TRL


def test_the_loss_is_trls():
    """TRL's loss of a sampled token has the gradient of the first update."""
    utils = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    n, R, V = 3, 5, 7
    student, teacher = random_logits(1, n, R, V).requires_grad_(), random_logits(2, n, R, V)
    ids = torch.randint(V, (n, R), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(R) < torch.tensor([5, 2, 0])[:, None]  # (n, R); TRL's rows have a mean, too

    def trl_mean(per_token):
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

    theirs = utils.compute_sampled_token_self_distillation_loss(
        student, teacher, ids, distillation_alpha=1.0
    )
    expected = torch.autograd.grad(trl_mean(theirs), student)[0]
    logprobs, ref = [
        x.log_softmax(2).gather(2, ids[:, :, None])[:, :, 0] for x in (student, teacher)
    ]
    args, old = self_distill.Args(), logprobs.detach()
    advantages = self_distill.compute_advantages(old, ref)
    loss, _ = self_distill.policy_loss(args, logprobs, old, ref, advantages, mask, num_seqs=n)
    gradient = torch.autograd.grad(loss, student)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    assert gradient.abs().max() > 0.01


def test_the_teachers_weights_are_trls():
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    model, mine, theirs = [tiny(seed, 11, 8, True) for seed in (1, 2, 2)]
    self_distill.move_teacher(mine, model, 0.05)
    # TRL's callback for SDPO's teacher calls this function with teacher_update_rate.
    callbacks.SyncRefModelCallback._sync_target_model(model, theirs, 0.05)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_contexts_of_a_group_are_trls():
    """TRL's builder chooses the same demonstrations, and the same responses without one."""
    module = pytest.importorskip("trl.experimental.sdpo.sdpo_trainer")
    G, right = 4, [0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    texts = [f"r{i}" for i in range(len(right))]
    shown = []

    class Text:
        """A completion that stands for its ids."""

        def __init__(self, text):
            self.text = text

        def __getitem__(self, mask):
            return self

        def __ne__(self, other):
            return True

    class Accelerator(SimpleNamespace):
        def gather(self, x):
            return x

        def pad_across_processes(self, x, dim, pad_index):
            return x

    settings = dict(success_reward_threshold=1.0, dont_reprompt_on_self_success=True)
    settings |= dict(environment_feedback_only_without_solution=True)
    settings |= dict(include_environment_feedback=False, use_successful_as_teacher=True)
    settings |= dict(remove_thinking_from_demonstration=False, max_reprompt_len=99)
    settings |= dict(solution_template="{successful_previous_attempt}", feedback_template="")
    settings |= dict(reprompt_template="{solution}{feedback}")
    trainer = SimpleNamespace(
        accelerator=Accelerator(device="cpu", process_index=0),
        model=SimpleNamespace(training=True),
        num_generations=G,
        args=SimpleNamespace(**settings),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        processing_class=SimpleNamespace(decode=lambda x, skip_special_tokens: x.text),
    )
    trainer._tokenize_prompts_untruncated = lambda rows: shown.extend(rows) or [[1]] * len(rows)
    ids = torch.ones(len(right), 1, dtype=torch.long)
    built = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gather_object", lambda x: x)
        builder = module.SuccessfulRolloutTeacherContextBuilder(trainer)
        trainer.accelerator.pad_across_processes = lambda x, dim, pad_index: list(map(Text, texts))
        output = dict(completion_ids=ids, completion_mask=ids)
        built = builder.build(output, ["question"] * len(right), torch.tensor(right).float())
    mine = load_patched("sdpo_context").right_responses(texts, [x == 1 for x in right], G)
    assert [text or "question" for text in mine] == shown
    assert [float(text != "") for text in mine] == built["self_distillation_mask"].tolist()


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
    examples, read, used, prompts = [], [], [], []
    # The teacher's prompts would have 6, 6, 8 and 10 tokens.
    for question, context, is_used in (
        ("1+2=", "3", True),
        ("1+2=", " ", False),
        ("30+4=", "34", True),
        ("30+4=", "{x}+", False),
    ):
        messages = [{"role": "user", "content": question}]
        examples.append({"chat": messages, "prompt_ids": tokens(question), "context": context})
        prompts += [tokens(question)] * 2
        read += [tokens(f"{context}\n{question}" if is_used else question)] * 2
        used += [is_used] * 2
    rollout = make_rollout(prompts, [[5, 2]] * 8)
    told, has_context = self_distill.add_contexts(args, tokenizer, rollout, examples)
    assert has_context.tolist() == used
    rows = zip(told.prompt_ids, told.prompt_mask, strict=True)
    assert [ids[mask].tolist() for ids, mask in rows] == read
    assert told.prompt_mask[:, -1].all(), "padding stands on the left"
    assert told.response_ids is rollout.response_ids


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
    examples = [{"chat": messages, "prompt_ids": [1], "context": "{question}"}]
    self_distill.add_contexts(args, Tokenizer(), rollout, examples)
    assert seen == ["a|b|think\n\n{context}? {{question}}"]


# ---- runs

SMALL = dict(num_steps=2, num_prompts=4, num_generations=2, eval_size=2, device="cpu", eval_every=0)
SMALL |= dict(model=SMALL_MODEL, examples=False, max_prompt_tokens=64, max_new_tokens=24)
SMALL |= dict(max_teacher_tokens=128, context_template=TEMPLATE, gradient_checkpointing=False)
SMALL |= dict(learning_rate=1e-3, warmup_updates=0)


def write_task(path, hints):
    """40 problems with these hints, in turn."""
    rows = []
    for i in range(40):
        rows.append({"question": f"{i}+7=", "answer": str(i + 7), "hint": hints[i % len(hints)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(tmp_path, hints, **given):
    """Run main on problems with these hints. Return the metrics of each step and the checkpoint."""
    fields = SMALL | dict(dataset=write_task(tmp_path / "task.jsonl", hints)) | given
    fields = {"context_column": "hint", "runs_dir": str(tmp_path), "run_name": "run"} | fields
    self_distill.main(self_distill.Args(**fields))
    folder = tmp_path / fields["run_name"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()][1:]
    return records, torch.load(folder / "checkpoint.pt", weights_only=True)


def test_a_teacher_that_reads_the_same_has_nothing_to_teach(tmp_path, monkeypatch):
    """If the context doesn't change the prompt, loss and gradient are 0, up to rounding."""
    monkeypatch.setattr(self_distill, "check_args", lambda args: None)
    (metrics,), _ = train(tmp_path, ["x"], num_steps=1, context_template="{question}")
    assert metrics["rollout/context_frac"] == 1.0
    assert abs(metrics["kl/ref"]) < 1e-6 and abs(metrics["policy/loss"]) < 1e-5
    assert metrics["optim/grad_norm"] < 1e-4


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


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_teacher_follows_by_the_rate(tmp_path, rate):
    """After one step the saved teacher is (1 - rate) of the initial weights and rate of the new ones."""
    _, saved = train(tmp_path, ["5"], num_steps=1, teacher_rate=rate)
    for name, start in AutoModelForCausalLM.from_pretrained(SMALL_MODEL).state_dict().items():
        expected = start + rate * (saved["model"][name] - start)
        torch.testing.assert_close(saved["teacher"][name], expected, rtol=1e-6, atol=1e-7)


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


def test_a_teachers_prompt_that_just_fits_keeps_its_context(tmp_path):
    """The teacher's prompt is the hint, a line break and the question."""
    longest = max(len(tokens(f"5\n{i}+7=")) for i in range(36))
    for limit, share in ((longest, 1.0), (longest - 1, 0.0)):
        records, _ = train(
            tmp_path, ["5"], num_steps=1, max_teacher_tokens=limit, run_name=str(limit)
        )
        fits = records[0]["rollout/context_frac"]
        assert fits == 1.0 if share else fits < 1.0


def test_a_data_set_without_the_column(tmp_path):
    with pytest.raises(ValueError, match="'nonesuch'.*'question', 'answer', 'hint'"):
        train(tmp_path, ["5"], context_column="nonesuch")


def test_a_column_without_a_text(tmp_path):
    with pytest.raises(ValueError, match="--context-column hint: no cell holds a text"):
        train(tmp_path, ["", None])


@pytest.mark.parametrize("template", ["{question}", "{context}", ""])
def test_a_template_that_leaves_something_out(tmp_path, template):
    with pytest.raises(ValueError, match="must contain {question} and {context}"):
        train(tmp_path, ["5"], context_template=template)


@pytest.mark.parametrize("name", ["max_prompt_tokens", "max_teacher_tokens"])
def test_a_prompt_has_to_fit_into_the_context(name):
    """The model's context has 256 tokens, and a response 24."""
    args = self_distill.Args(**SMALL | {name: 232})
    assert self_distill.load_config(args, SMALL_MODEL).max_position_embeddings == 256
    args = self_distill.Args(**SMALL | {name: 233})
    with pytest.raises(ValueError, match="--max-teacher-tokens.*256 tokens"):
        self_distill.load_config(args, SMALL_MODEL)


# ---- the bundled student and its task


def test_the_bundled_data_have_hints():
    tokenizer = AutoTokenizer.from_pretrained(HINTED)
    for split, number in (("train", 4000), ("test", 500)):
        rows = [json.loads(line) for line in (HINTED / f"{split}.jsonl").open()]
        assert len(rows) == number and {row["hint"] for row in rows} == {"carry"}
        for row in rows:
            a, b = map(int, row["question"].removesuffix("=").split("+"))
            assert int(row["answer"]) == a + b and a % 10 + b % 10 >= 8
    assert tokenizer.unk_token_id not in tokenizer("carry\n47+38=").input_ids
