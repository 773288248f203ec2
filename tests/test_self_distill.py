"""self_distill.py: its equations by hand, by slow loops and against TRL, its contexts, and its errors.

test_whole_step.py compares whole steps of main with float64.
"""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, SMALL_TASK
from test_distill import doubled, random_logits, tiny  # noqa: F401
from test_errors import refuse  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

import distill
import self_distill

HINTED = ROOT / "assets" / "hinted"
TEMPLATE = "{context}\n{question}"


def make_rollout(prompts, responses, script=self_distill):
    """A rollout of these lists of ids. The tests here don't read its last two fields."""

    def padded(rows, side):
        width = max(map(len, rows))
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        for row, (row_ids, row_mask) in zip(rows, zip(ids, mask, strict=True), strict=True):
            place = slice(width - len(row), width) if side == "left" else slice(len(row))
            row_ids[place], row_mask[place] = torch.tensor(row), 1
        return ids, mask.bool()

    ids, mask = padded(responses, "right")
    texts = [""] * len(responses)
    return script.Rollout(*padded(prompts, "left"), ids, mask, torch.zeros(ids.shape), texts)


# ---- the equations


def test_the_advantage_by_hand():
    """The student's probabilities of two tokens are 0.5 and 0.1. With the context they are 0.25 and 0.4."""
    logprobs, ref_logprobs = torch.tensor([[[0.5, 0.1]], [[0.25, 0.4]]]).double().log()
    advantages = self_distill.compute_advantages(self_distill.Args(), logprobs, ref_logprobs)
    assert advantages.tolist()[0] == pytest.approx([-math.log(2), math.log(4)])


def test_the_reverse_kl_by_hand():
    """For (0.5, 0.5) and (0.25, 0.75): 0.5 log 2 + 0.5 log(2 / 3) = 0.1438. The forward KL would be 0.1308."""
    logprobs, ref_logprobs = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]).double().log()
    assert self_distill.reverse_kl(logprobs, ref_logprobs).tolist() == pytest.approx([0.143841036])
    assert self_distill.reverse_kl(logprobs, logprobs).tolist() == [0.0]


def test_the_equations_are_distills():
    """The two scripts differ only in who the teacher is and what it reads."""
    logprobs, old, ref = [random_logits(seed, 4, 6, 11).log_softmax(2) for seed in (1, 2, 3)]
    kl = self_distill.reverse_kl(logprobs[0], ref[0])
    assert torch.equal(kl, distill.reverse_kl(logprobs[0], ref[0]))
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 0])[:, None]  # (4, 6)
    results = []
    for script in (self_distill, distill):
        drawn = logprobs[:, :, 0].clone().requires_grad_()
        args = script.Args(clip_eps=0.1)
        advantages = script.compute_advantages(args, old[:, :, 0], ref[:, :, 0])
        given = drawn, old[:, :, 0], ref[:, :, 0], advantages, mask
        loss, stats = script.policy_loss(args, *given, num_seqs=4)
        exact = script.full_vocabulary_loss(drawn, mask, num_seqs=4)
        gradient = torch.autograd.grad(loss, drawn)[0]
        results.append((loss.detach(), exact.detach(), gradient, *stats.values()))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_the_teacher_keeps_no_activations(doubled, monkeypatch):  # noqa: F811
    """Gradient checkpointing makes the embeddings require gradients, also in the teacher, a copy of the policy."""
    model = tiny(1, 11, 8, True).train()
    model.enable_input_require_grads()  # gradient checkpointing does this
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    rollout, states = make_rollout([[3, 4], [5]], [[6, 7, 2], [1, 2]]), []
    response_states = self_distill.response_states
    assert response_states(teacher, rollout).requires_grad

    def watched(*args):
        states.append(response_states(*args))
        return states[-1]

    monkeypatch.setattr(self_distill, "response_states", watched)
    self_distill.compute_reverse_kl(model, teacher, rollout, rollout, 1.0).sum().backward()
    assert [state.requires_grad for state in states] == [True, False]


def test_the_kl_of_models_is_that_of_plain_forwards(doubled):  # noqa: F811
    """Model and teacher read prompts of different lengths before the same ragged responses."""
    temperature = 1.3
    model, teacher = tiny(1, 11, 8, True), tiny(2, 11, 8, True).requires_grad_(False)
    prompts, teacher_prompts = [[3, 4], [5]], [[3, 4], [9, 8, 7, 5]]
    responses = [[6, 7, 2], [1, 2]]
    rollouts = [make_rollout(x, responses) for x in (prompts, teacher_prompts)]
    kl = self_distill.compute_reverse_kl(model, teacher, *rollouts, temperature)  # (2, 3)
    assert kl.shape == (2, 3) and kl[1, 2] == 0
    gradients = torch.autograd.grad(kl.sum(), list(model.parameters()))
    total = 0.0
    for i, response in enumerate(responses):
        p, q = [
            (x(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature)
            for x, prompt in ((model, prompts[i]), (teacher, teacher_prompts[i]))
        ]
        p, q = p.log_softmax(1), q.log_softmax(1)
        for t in range(len(response)):
            slow = sum(p[t, v].exp() * (p[t, v] - q[t, v]) for v in range(11))
            assert kl[i, t].item() == pytest.approx(slow.item(), rel=1e-6)
            total = total + slow
    expected = torch.autograd.grad(total, list(model.parameters()))
    # The norms compute in float32, hence the tolerance.
    for gradient, slow in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-4, atol=1e-5)


def test_the_best_student_is_the_geometric_mean_of_its_teachers():
    """The student reads one question, and its teachers read two answers. No student has a KL of 0 to both.

    The mean of the two KLs is smallest at the normalized geometric mean. Its value is -log of the normalizer.
    """
    teachers = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05]]).double().log()
    logits = torch.zeros(3).double().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(500):
        logprobs = logits.log_softmax(0).expand(2, 3)
        loss = self_distill.reverse_kl(logprobs, teachers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    means = teachers.mean(0).exp()  # sqrt(0.045) twice, and 0.05
    expected = [math.sqrt(0.045), math.sqrt(0.045), 0.05]
    assert means.tolist() == pytest.approx(expected)
    assert logits.softmax(0).tolist() == pytest.approx((means / means.sum()).tolist(), abs=1e-5)
    assert loss.item() == pytest.approx(-math.log(sum(expected)), abs=1e-6)


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
    contexts = self_distill.right_responses(texts, right, 3)
    assert contexts == ["b", "c", "b", "", "d", "d", "", "", ""]


# ---- TRL


def test_the_losses_are_trls():
    """TRL's loss of a sampled token has the gradient of the first update, and its KL is the whole vocabulary's."""
    utils = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    n, R, V = 3, 5, 7
    student, teacher = random_logits(1, n, R, V).requires_grad_(), random_logits(2, n, R, V)
    ids = torch.randint(V, (n, R), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(R) < torch.tensor([5, 2, 0])[:, None]  # (n, R); TRL's rows have a mean, too

    def trl_mean(per_token):
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

    theirs = utils.compute_full_logit_self_distillation_loss(
        student, teacher, distillation_alpha=1.0
    )
    rows = [x.log_softmax(2).view(-1, V) for x in (student, teacher)]
    mine = self_distill.reverse_kl(*rows).view(n, R)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    both = trl_mean(theirs), self_distill.full_vocabulary_loss(mine, mask, num_seqs=n)
    assert both[0].item() == pytest.approx(both[1].item(), rel=1e-12) and both[0] > 0.1

    theirs = utils.compute_sampled_token_self_distillation_loss(
        student, teacher, ids, distillation_alpha=1.0
    )
    expected = torch.autograd.grad(trl_mean(theirs), student)[0]
    logprobs, ref = [
        x.log_softmax(2).gather(2, ids[:, :, None])[:, :, 0] for x in (student, teacher)
    ]
    args, old = self_distill.Args(), logprobs.detach()
    advantages = self_distill.compute_advantages(args, old, ref)
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
    mine = self_distill.right_responses(texts, [x == 1 for x in right], G)
    assert [text or "question" for text in mine] == shown
    assert [float(text != "") for text in mine] == built["self_distillation_mask"].tolist()


# ---- the teacher's prompts


def tokens(text):
    return AutoTokenizer.from_pretrained(SMALL_MODEL)(text).input_ids


def test_the_teachers_prompts_by_hand():
    """A blank context and one that is too long leave the student's prompt, and count as none."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    given = dict(num_generations=2, context_template=TEMPLATE, max_teacher_tokens=8)
    args = self_distill.Args(**given, system_prompt="")
    examples = []
    for question in ("1+2=", "30+4="):
        messages = [{"role": "user", "content": question}]
        examples.append({"messages": messages, "prompt_ids": tokens(question)})
    # The teacher's prompts would have 6, 6, 8 and 10 tokens.
    contexts = ["3", " ", "34", "{x}+"]
    rollout = make_rollout([tokens("1+2=")] * 2 + [tokens("30+4=")] * 2, [[5, 2]] * 4)
    told, has_context = self_distill.add_contexts(args, tokenizer, rollout, examples, contexts)
    assert has_context.tolist() == [True, False, True, False]
    expected = [tokens("3\n1+2="), tokens("1+2="), tokens("34\n30+4="), tokens("30+4=")]
    rows = zip(told.prompt_ids, told.prompt_mask, strict=True)
    assert [ids[mask].tolist() for ids, mask in rows] == expected
    assert told.prompt_mask[:, -1].all(), "padding stands on the left"
    assert told.response_ids is rollout.response_ids


def test_a_template_with_a_chat_changes_only_the_last_message():
    """The earlier messages and the system message stay. Braces in a question or a context are text."""
    seen = []

    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, messages, **options):
            seen.append([message["content"] for message in messages])
            return "system" + messages[-1]["content"]

        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return SimpleNamespace(input_ids=[1] * len(text))

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "{context}?"})
    args = self_distill.Args(
        num_generations=1,
        system_prompt="system",
        context_template="{question} {{{context}}}",
        max_teacher_tokens=99,
    )
    rollout = make_rollout([[1]], [[5, 2]])
    examples = [{"messages": messages, "prompt_ids": [1]}]
    self_distill.add_contexts(args, Tokenizer(), rollout, examples, ["{question}"])
    assert seen == [["system", "a", "b", "{context}? {{question}}"]]


# ---- runs

SMALL = dict(num_steps=2, num_prompts=4, num_generations=2, eval_size=2, device="cpu", eval_every=0)
SMALL |= dict(model=SMALL_MODEL, system_prompt="", max_prompt_tokens=64, max_new_tokens=24)
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


@pytest.mark.parametrize("full_vocabulary", [False, True])
def test_a_teacher_that_reads_the_same_has_nothing_to_teach(tmp_path, full_vocabulary, monkeypatch):
    """If the context doesn't change the prompt, loss and gradient are 0, up to rounding."""
    given = dict(full_vocabulary=full_vocabulary, num_steps=1)
    monkeypatch.setattr(self_distill, "check_args", lambda args: None)
    (metrics,), _ = train(tmp_path, ["x"], **given, context_template="{question}")
    assert metrics["rollout/context_frac"] == 1.0
    assert abs(metrics["kl/ref"]) < 1e-6 and abs(metrics["policy/loss"]) < 1e-5
    assert metrics["optim/grad_norm"] < 1e-4


def test_without_a_context_there_is_no_loss(tmp_path, capsys):
    """No response of these steps has a context, so the weights don't change, and means over tokens are null."""
    hints = ["9" * 200]  # longer than --max-teacher-tokens
    records, saved = train(tmp_path, hints)
    for metrics in records:
        assert metrics["rollout/context_frac"] == 0.0 and metrics["kl/ref"] is None
        assert metrics["policy/loss"] == 0.0 and metrics["optim/grad_norm"] == 0.0
    text = "".join(capsys.readouterr())
    assert "warning: no response has a context to learn from; raise --max-teacher-tokens" in text
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
        assert a["contexts"] == ["1"] * 2 and b["contexts"] == ["2"] * 2
        assert a["advantages"] != b["advantages"]


# ---- errors


def test_a_data_set_without_the_column(refuse):  # noqa: F811
    words = "--context-column hint: --dataset", "has only the columns question, answer", "choose"
    refuse(self_distill, *words, context_column="hint")


def test_a_column_without_a_text(refuse, tmp_path):  # noqa: F811
    data = write_task(tmp_path / "task.jsonl", [""])
    words = "--context-column hint: no cell of --dataset", "--context group"
    refuse(self_distill, *words, dataset=data, context_column="hint")


@pytest.mark.parametrize(
    "template, words",
    [
        ("{question}", ("must contain {question} and {context}",)),
        ("{context} {question} {solution}", ("'solution'",)),
        ("{context} {question} {", ("Single '{'",)),
        ("{context} {question} {0}", ("index",)),
        ("{context} {question.x}", ("no other field: 'str' object",)),
    ],
)
def test_a_template_that_cannot_be_filled(refuse, template, words):  # noqa: F811
    words = (f"--context-template {template!r}: ", *words)
    refuse(self_distill, *words, context_template=template, dataset=SMALL_TASK)


def test_a_group_of_one_has_no_other_response(refuse):  # noqa: F811
    refuse(self_distill, "--context group: --num-generations", context="group", num_generations=1)


def test_a_teachers_prompt_that_leaves_no_room(refuse):  # noqa: F811
    words = "--max-teacher-tokens 250 + --max-new-tokens 8: more than the 256 tokens", "lower one"
    refuse(self_distill, *words, max_teacher_tokens=250)


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
