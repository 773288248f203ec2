"""distill.py and variants/full_vocabulary.diff: the equations, the KL of two models, and the teachers that are refused.

test_whole_step.py has whole steps.
"""

import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from conftest import ROOT, SMALL_TASK, load_patched
from torch.nn.utils.rnn import pad_sequence
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


def make_rollout(prompts, responses):
    """A rollout of these lists of ids. The tests here don't read its log-probabilities."""

    ids = [torch.tensor(response) for response in responses]
    mask = [torch.ones(len(response), dtype=torch.bool) for response in responses]
    ids, mask = [pad_sequence(rows, batch_first=True) for rows in (ids, mask)]
    return distill.Rollout(prompts, ids, mask, torch.zeros(ids.shape))


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
        loss, _ = distill.policy_loss(*given, num_seqs=1, clip_eps=0.2)
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
    model = LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.5))
    return model.eval()


@pytest.mark.parametrize("more", [0, 3])
def test_the_kl_of_models_is_that_of_plain_forwards(more):
    """KL and gradient agree on ragged sequences. The teacher is wider, and heads may be padded beyond the vocabulary.

    So the teacher's head may have more rows than the student's, or fewer.
    """
    temperature = 1.3
    model, teacher = tiny(1, 11, 8, True), tiny(2, 11 + more, 12, False).requires_grad_(False)
    prompts, responses = [[3, 4], [5]], [[6, 7, 2], [1, 2]]
    rollout = make_rollout(prompts, responses)
    kl = full_vocabulary.compute_reverse_kl(model, teacher, rollout, temperature)  # (2, 3)
    assert kl.shape == (2, 3) and kl[1, 2] == 0
    gradients = torch.autograd.grad(kl.sum(), list(model.parameters()))
    total = 0.0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        rows = []
        for network in (model, teacher):
            logits = network(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            rows.append((logits / temperature).log_softmax(1))
        p, q = rows
        for t in range(len(response)):
            slow = sum(p[t, v].exp() * (p[t, v] - q[t, v]) for v in range(11))
            assert kl[i, t].item() == pytest.approx(slow.item(), rel=1e-4)
            total = total + slow
    expected = torch.autograd.grad(total, list(model.parameters()))
    for gradient, slow in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-4, atol=1e-5)


def test_the_kl_is_computed_in_chunks(monkeypatch):
    """The script never holds all logits: each head gets at most CHUNK_LOGITS / V states at a time."""
    monkeypatch.setitem(full_vocabulary.CHUNK_LOGITS, "cpu", 2**17)
    seen = []
    V = 2**14
    model = tiny(1, V, 4, True).float()
    model.get_output_embeddings().register_forward_hook(lambda f, x, y: seen.append(y.shape[1]))
    rollout = make_rollout([[3]] * 5, [[4] * 4] * 5)
    with torch.no_grad():
        full_vocabulary.compute_reverse_kl(model, model, rollout, 1.0)
    assert max(seen) == 8 and sum(seen) == 40


# ---- the teachers

SMALL = dict(num_steps=2, num_prompts=4, num_generations=1, eval_size=2, device="cpu", eval_every=0)


def refuse(words, **given):
    fields = SMALL | dict(dataset=SMALL_TASK) | given
    with pytest.raises(Exception, match=re.escape(words)):
        distill.main(dataclasses.replace(distill.BUNDLED, **fields))


def save(folder, model, **options):
    """Save the model, with the tokenizer of the adder."""
    model.save_pretrained(folder, **options)
    AutoTokenizer.from_pretrained(ADDER).save_pretrained(folder)


def test_a_teacher_with_another_vocabulary(tmp_path):
    """If the teacher's ids differ, it would score the wrong tokens without an error."""
    save(tmp_path, AutoModelForCausalLM.from_pretrained(ADDER))
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(content))
    line = f"--teacher {tmp_path}: must have the vocabulary of --model {ADDER}"
    refuse(line, teacher=str(tmp_path))


def test_a_teacher_with_a_narrower_head(tmp_path):
    """The student's padded head could sample a token for which the teacher has no probability."""
    model = AutoModelForCausalLM.from_pretrained(ADDER)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    save(tmp_path, model)
    given = dict(model=str(tmp_path), teacher=str(TEACHER), max_prompt_tokens=64)
    refuse(f"--teacher {TEACHER}: must have the vocabulary of --model {tmp_path}", **given)


def test_a_teacher_without_all_its_weights(tmp_path):
    """Random weights in place of the missing ones would teach nonsense without an error."""
    model = AutoModelForCausalLM.from_pretrained(ADDER)
    weights = {name: x for name, x in model.state_dict().items() if "layers.0.mlp" not in name}
    save(tmp_path, model, state_dict=weights)
    line = f"--teacher {tmp_path}: its files have no weights for model.layers.0.mlp."
    refuse(line, teacher=str(tmp_path))


def test_a_teacher_with_a_shorter_context(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(ADDER)
    model.config.max_position_embeddings = 60
    save(tmp_path, model)
    refuse("more than the 60 tokens", teacher=str(tmp_path))


def other_family(kind, **fields):
    """A random teacher of another family than the student's, with a tied head of eight more rows."""
    fields |= dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
    fields |= dict(num_hidden_layers=1, num_key_value_heads=1)
    fields |= dict(vocab_size=len(AutoTokenizer.from_pretrained(ADDER)) + 8)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))


def test_a_teacher_with_capped_logits(tmp_path):
    """The teacher's log-probabilities are those of its own logits, which it caps."""
    model = other_family("gemma2", final_logit_softcapping=0.5, initializer_range=0.5)
    save(tmp_path, model)
    args = dataclasses.replace(distill.BUNDLED, teacher=str(tmp_path), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    student, _ = distill.load_model(args, tokenizer)
    teacher = distill.load_teacher(args, student, tokenizer)
    rollout = make_rollout([[3, 4, 5]], [[6, 7, 8]])
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    expected = model.eval()(ids).logits[0].log_softmax(1)[[2, 3, 4], [6, 7, 8]]
    found = distill.compute_logprobs(teacher, rollout, 1.0)
    torch.testing.assert_close(found[0], expected)
    # The patch of the whole vocabulary caps them, too: a model has no KL to itself.
    uncapped = copy.deepcopy(teacher)
    uncapped.config.final_logit_softcapping = None
    assert full_vocabulary.compute_reverse_kl(teacher, uncapped, rollout, 1.0).min() > 0.01
    assert full_vocabulary.compute_reverse_kl(teacher, teacher, rollout, 1.0).abs().max() < 1e-6


def test_each_kind_needs_a_teacher():
    """mopd: a problem without a teacher would teach nothing, so it is refused."""
    mopd = load_patched("mopd")
    problems = [{"columns": {"kind": kind}} for kind in ("math", "code", "math")]
    mopd.check_kinds(mopd.Args(teachers={"math": "a", "code": "b"}), problems)
    with pytest.raises(ValueError, match="--teachers: none for code$"):
        mopd.check_kinds(mopd.Args(teachers={"math": "a"}), problems)
