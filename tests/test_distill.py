"""distill.py and variants/full_vocabulary.diff: both gradients by hand and by slow loops, and a resumed run.

Also: the teachers that are refused.
"""

import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from conftest import ROOT, SMALL_TASK
from patched import load_patched
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import distill

full_vocabulary = load_patched("full_vocabulary")

ADDER, TEACHER = ROOT / "assets" / "addition" / "adder", ROOT / "assets" / "addition" / "teacher"


def make_rollout(prompt_ids, prompt_mask, response_ids, response_mask):
    """A rollout of these tokens. The tests here don't read its log-probabilities."""
    zeros = torch.zeros(response_ids.shape)
    return distill.Rollout(prompt_ids, prompt_mask, response_ids, response_mask, zeros)


def random_logits(seed, *shape):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def test_the_advantage_by_hand():
    """The student's probabilities of two tokens are 0.5 and 0.1. The teacher's are 0.25 and 0.4."""
    logprobs, teacher_logprobs = torch.tensor([[[0.5, 0.1]], [[0.25, 0.4]]]).double().log()
    advantages = distill.compute_advantages(logprobs, teacher_logprobs)
    assert advantages.tolist()[0] == pytest.approx([-math.log(2), math.log(4)])


def test_the_reverse_kl_by_hand():
    """For (0.5, 0.5) and (0.25, 0.75): 0.5 log 2 + 0.5 log(2 / 3) = 0.1438. The forward KL would be 0.1308."""
    logprobs, teacher_logprobs = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]).double().log()
    assert full_vocabulary.reverse_kl(logprobs, teacher_logprobs).tolist() == pytest.approx(
        [0.143841036]
    )
    assert full_vocabulary.reverse_kl(logprobs, logprobs).tolist() == [0.0]


def test_the_reverse_kl_is_the_sum_over_the_vocabulary():
    logprobs, teacher_logprobs = random_logits(1, 2, 5, 11).log_softmax(2)
    slow = [
        math.fsum(math.exp(p) * (p - q) for p, q in zip(*rows, strict=True))
        for rows in zip(logprobs.tolist(), teacher_logprobs.tolist(), strict=True)
    ]
    assert full_vocabulary.reverse_kl(logprobs, teacher_logprobs).tolist() == pytest.approx(
        slow, rel=1e-12
    )


def test_the_mean_of_the_sampled_gradient_is_that_of_the_whole_vocabulary():
    """The expected gradient of the sampled policy loss, over all responses of two tokens, equals the KL's gradient.

    So without sampling noise both modes are the same algorithm.
    """
    V, R = 5, 2
    # Each position has one distribution.
    logits = random_logits(1, R, V).requires_grad_()
    teacher_logprobs = random_logits(2, R, V).log_softmax(1)
    mask = torch.ones(1, R, dtype=torch.bool)
    expected = torch.zeros(R, V).double()
    for response in torch.cartesian_prod(torch.arange(V), torch.arange(V)):
        places = range(R), response
        drawn = logits.log_softmax(1)[places][None]  # (1, R)
        old = drawn.detach()
        advantages = distill.compute_advantages(old, teacher_logprobs[places][None])
        given = drawn, old, teacher_logprobs[places][None], advantages, mask
        loss, _ = distill.policy_loss(distill.Args(), *given, num_seqs=1)
        expected += old.sum().exp() * torch.autograd.grad(loss, logits)[0]
    kl = full_vocabulary.reverse_kl(logits.log_softmax(1), teacher_logprobs)[None]  # (1, R)
    loss = full_vocabulary.full_vocabulary_loss(kl, mask, num_seqs=1)
    assert loss.item() == pytest.approx(kl.mean().item())
    exact = torch.autograd.grad(loss, logits)[0]
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-12)


def tiny(seed, vocab_size, hidden_size, tied):
    torch.manual_seed(seed)
    config = dict(hidden_size=hidden_size, intermediate_size=16, num_attention_heads=2)
    config |= dict(num_hidden_layers=1, vocab_size=vocab_size, tie_word_embeddings=tied)
    model = LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.5)).double()
    return model.eval()


@pytest.fixture
def doubled(monkeypatch):
    """Make the scripts compute in float64 instead of float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("more", [0, 3])
def test_the_kl_of_models_is_that_of_plain_forwards(doubled, more):
    """KL and gradient agree on ragged sequences. The teacher is wider, and heads may be padded beyond the vocabulary.

    So the teacher's head may have more rows than the student's, or fewer.
    """
    temperature = 1.3
    model, teacher = tiny(1, 11, 8, True), tiny(2, 11 + more, 12, False).requires_grad_(False)
    prompts, responses = [[3, 4], [5]], [[6, 7, 2], [1, 2]]
    rollout = make_rollout(
        torch.tensor([[3, 4], [0, 5]]),
        torch.tensor([[True, True], [False, True]]),
        torch.tensor([[6, 7, 2], [1, 2, 0]]),
        torch.tensor([[True] * 3, [True, True, False]]),
    )
    kl = full_vocabulary.compute_reverse_kl(model, teacher, rollout, temperature)  # (2, 3)
    assert kl.shape == (2, 3) and kl[1, 2] == 0
    gradients = torch.autograd.grad(kl.sum(), list(model.parameters()))
    total = 0.0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = torch.tensor([prompt + response])
        p, q = [
            (x(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(1)
            for x in (model, teacher)
        ]
        for t in range(len(response)):
            slow = sum(p[t, v].exp() * (p[t, v] - q[t, v]) for v in range(11))
            assert kl[i, t].item() == pytest.approx(slow.item(), rel=1e-6)
            total = total + slow
    expected = torch.autograd.grad(total, list(model.parameters()))
    # The norms compute in float32, hence the tolerance.
    for gradient, slow in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-4, atol=1e-5)


def test_the_full_vocabulary_loss_by_hand():
    """Average each response's KL over its tokens. Divide the sum by the number of sequences in the minibatch."""
    kl = torch.tensor([[1.0, 2.0, 6.0], [4.0, 8.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert full_vocabulary.full_vocabulary_loss(kl, mask, num_seqs=4).item() == (3 + 6) / 4


def test_the_kl_is_computed_in_chunks(monkeypatch):
    """The script never holds all logits: each head gets at most CHUNK_LOGITS / V states at a time."""
    monkeypatch.setitem(full_vocabulary.CHUNK_LOGITS, "cpu", 2**17)
    seen = []
    V = 2**14
    model = tiny(1, V, 4, True).float()
    model.get_output_embeddings().register_forward_hook(lambda f, x, y: seen.append(y.shape))
    mask = torch.ones(5, 4, dtype=torch.bool)
    rollout = make_rollout(torch.full((5, 1), 3), mask[:, :1], torch.full((5, 4), 4), mask)
    with torch.no_grad():
        full_vocabulary.compute_reverse_kl(model, model, rollout, 1.0)
    assert max(shape[0] for shape in seen) == 8 and sum(shape[0] for shape in seen) == 40


# ---- runs

SMALL = dict(num_steps=2, num_prompts=4, num_generations=1, eval_size=2, device="cpu", eval_every=0)


@pytest.fixture
def small(tmp_path):
    """The fields of a small run on 40 problems."""
    lines = (ROOT / "assets" / "addition" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:40]))
    return SMALL | dict(dataset=str(tmp_path / "few.jsonl"), runs_dir=str(tmp_path))


def test_a_resumed_run_ends_in_the_same_weights(small, tmp_path):
    """The run has one sample per prompt. A resumed run loads the teacher again: the checkpoint doesn't contain it."""
    given = small | dict(save_every=1)
    distill.main(bundled(**given, run_name="whole"))
    write = distill.save_checkpoint

    class Killed(Exception):
        pass

    def killed(*call):
        write(*call)
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(distill, "save_checkpoint", killed)
        distill.main(bundled(**given, run_name="killed"))
    distill.main(bundled(**given, run_name="killed"))
    ends = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "killed")
    ]
    assert set(ends[0]["model"]) == set(
        AutoModelForCausalLM.from_pretrained(ADDER, dtype=torch.float32).state_dict()
    )
    for name, weights in ends[0]["model"].items():
        assert torch.equal(weights, ends[1]["model"][name])


def test_equal_rewards_are_no_reason_to_warn(small, capsys):
    """With one sample per prompt, every group has equal rewards, but distillation doesn't need different rewards."""
    metrics = distill.main(bundled(**small))
    assert metrics["rollout/zero_std_frac"] == 1.0 and metrics["optim/grad_norm"] > 0
    assert "warning" not in capsys.readouterr().out


def test_a_student_that_is_the_teacher_has_nothing_to_learn(small):
    metrics = distill.main(bundled(**small | dict(num_steps=1), teacher=str(ADDER)))
    assert abs(metrics["kl/ref"]) < 1e-6 and metrics["optim/grad_norm"] < 1e-4


# ---- errors


def bundled(**given):
    return dataclasses.replace(distill.BUNDLED, **given)


def refuse(words, **given):
    with pytest.raises(Exception, match=re.escape(words)):
        distill.main(bundled(**SMALL | dict(dataset=SMALL_TASK) | given))


def test_a_teacher_with_another_vocabulary(tmp_path):
    """If the teacher's ids differ, it would score the wrong tokens without an error."""
    folder = tmp_path / "teacher"
    AutoModelForCausalLM.from_pretrained(ADDER).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ADDER).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(content))
    line = f"--teacher {folder}: must have the vocabulary of --model {ADDER}"
    refuse(line, teacher=str(folder))


def test_a_teacher_with_a_narrower_head(tmp_path):
    """The student's padded head could sample a token for which the teacher has no probability."""
    folder = str(tmp_path / "student")
    model = AutoModelForCausalLM.from_pretrained(ADDER)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ADDER).save_pretrained(folder)
    given = dict(model=folder, teacher=str(TEACHER), max_prompt_tokens=64)
    refuse(f"--teacher {TEACHER}: must have the vocabulary of --model {folder}", **given)


def test_a_teacher_that_is_not_there(tmp_path):
    folder = str(tmp_path / "nowhere")
    refuse(folder, teacher=folder)


def test_a_teacher_without_all_its_weights(tmp_path):
    """Random weights in place of the missing ones would teach nonsense without an error."""
    folder = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(ADDER)
    weights = {name: x for name, x in model.state_dict().items() if "layers.0.mlp" not in name}
    model.save_pretrained(folder, state_dict=weights)
    AutoTokenizer.from_pretrained(ADDER).save_pretrained(folder)
    line = f"--teacher {folder}: its files have no weights for model.layers.0.mlp."
    refuse(line, teacher=str(folder))


def save_teacher(folder, kind, **fields):
    """A random teacher of another family than the student's, with a tied head of eight more rows."""
    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    fields |= dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
    fields |= dict(num_hidden_layers=1, num_key_value_heads=1, vocab_size=len(tokenizer) + 8)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_teacher_with_capped_logits(tmp_path):
    """The teacher's log-probabilities are those of its own logits, which it caps."""
    model = save_teacher(tmp_path, "gemma2", final_logit_softcapping=0.5, initializer_range=0.5)
    args = bundled(teacher=str(tmp_path), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    student, _ = distill.load_model(args, tokenizer)
    teacher = distill.load_teacher(args, student, tokenizer)
    mask = torch.ones(1, 3, dtype=torch.bool)
    prompt, response = torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7, 8]])
    rollout = make_rollout(prompt, mask, response, mask)
    expected = model.eval()(torch.cat([prompt, response], 1)).logits[0].log_softmax(1)[[2, 3, 4]]
    found = distill.compute_logprobs(teacher, rollout, 1.0)
    torch.testing.assert_close(found[0], expected.gather(1, response.T)[:, 0])
    # The patch of the whole vocabulary caps them, too: a model has no KL to itself.
    uncapped = copy.deepcopy(teacher)
    uncapped.config.final_logit_softcapping = None
    assert full_vocabulary.compute_reverse_kl(teacher, uncapped, rollout, 1.0).min() > 0.01
    assert full_vocabulary.compute_reverse_kl(teacher, teacher, rollout, 1.0).abs().max() < 1e-6


def test_a_teacher_with_an_unknown_head(tmp_path):
    """The teacher doesn't sample, so no gap would show that its log-probabilities are wrong."""
    save_teacher(tmp_path, "hyperclovax", logits_scaling=0.5)
    line = f"--teacher {tmp_path}: not supported, because compute_logits doesn't know the head"
    refuse(line, teacher=str(tmp_path))


def test_a_teacher_with_a_shorter_context(tmp_path):
    folder = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(ADDER)
    model.config.max_position_embeddings = 60
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ADDER).save_pretrained(folder)
    refuse("more than the 60 tokens", teacher=str(folder))


def test_the_bundled_teacher_is_small_and_has_the_tokenizer_of_the_student():
    assert sum(path.stat().st_size for path in TEACHER.iterdir()) < 4e6
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TEACHER / name).read_bytes() == (ADDER / name).read_bytes()
