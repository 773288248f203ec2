"""first.py computes what grpo.py computes, and it learns."""

import importlib.util
import re

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, SMALL_TASK
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.generation.utils import GenerationMixin

import grpo
from utils.rewards import accuracy_reward

PATH = ROOT / "first.py"
ROWS = [
    {"question": "2+9=", "answer": "11"},
    {"question": "47+38=", "answer": "85"},
    {"question": "9+58=", "answer": "67"},
]


@pytest.fixture
def first(tmp_path_factory):
    """A fresh module, so that a test may change its constants. It has a small model and few problems."""
    spec = importlib.util.spec_from_file_location("first", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MODEL, module.ASSETS = SMALL_MODEL, tmp_path_factory.mktemp("assets")
    (module.ASSETS / "addition").symlink_to(SMALL_TASK)
    return module


def test_the_advantages_are_those_of_grpo(first):
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards[0] = 1.0  # equal rewards
    expected = grpo.compute_advantages(rewards)
    torch.testing.assert_close(first.compute_advantages(rewards), expected, rtol=0, atol=1e-12)


def test_a_sampled_batch_has_the_gradient_of_grpo(first):
    """Prompts of three lengths, responses with and without an EOS token, and the gradient of every weight.

    Ratios leave the clip range on both sides, for advantages of either sign.
    """
    temperature, G = 0.7, 8
    first.TEMPERATURE, first.MAX_NEW_TOKENS = temperature, 20
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    rows = [row for row in ROWS for _ in range(G)]
    sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    rewards, texts, ids, mask, response_mask = first.rollout(model, tokenizer, rows, **sampling)

    # The mask, the texts and the rewards, one response at a time.
    R = response_mask.shape[1]
    P = ids.shape[1] - R
    lengths = []
    for i, row in enumerate(rows):
        prompt = tokenizer(row["question"]).input_ids
        assert mask[i, :P].tolist() == [0] * (P - len(prompt)) + [1] * len(prompt)
        assert ids[i, P - len(prompt) : P].tolist() == prompt
        response = ids[i, P:].tolist()
        ended = tokenizer.eos_token_id in response
        length = response.index(tokenizer.eos_token_id) + 1 if ended else R
        lengths.append(length)
        assert response_mask[i].tolist() == [1] * length + [0] * (R - length)
        assert texts[i] == tokenizer.decode(response[: length - ended])
    assert torch.equal(mask[:, P:], response_mask)
    assert min(lengths) < R and any(tokenizer.eos_token_id not in x for x in ids.tolist())
    assert rewards.tolist() == accuracy_reward(texts, [row["answer"] for row in rows])
    assert 0 < rewards.mean() < 1

    is_response = response_mask.bool()
    prompts = grpo.unpadded(ids[:, :P], mask[:, :P].bool())
    rollout = grpo.Rollout(prompts, ids[:, P:], is_response, None)
    expected_logprobs = grpo.compute_logprobs(model, rollout, temperature)
    logprobs = first.compute_logprobs(model, ids, mask, response_mask)
    torch.testing.assert_close(
        logprobs[is_response], expected_logprobs[is_response], rtol=0, atol=2e-5
    )
    advantages = first.compute_advantages(rewards.view(-1, G)).view(-1, 1)
    shift = 0.3 * torch.sin(torch.arange(len(rows) * R)).view(len(rows), R)
    for sign in (-1, 1):
        moved = shift[is_response & (advantages * sign > 0)].exp()
        assert moved.min() < 1 - first.CLIP_EPS and moved.max() > 1 + first.CLIP_EPS
    theirs, _ = grpo.policy_loss(
        expected_logprobs,
        expected_logprobs.detach() - shift,
        None,
        advantages,
        is_response,
        num_seqs=len(rows),
        clip_eps=first.CLIP_EPS,
        beta=0.0,
    )
    mine = first.policy_loss(logprobs, logprobs.detach() - shift, advantages, response_mask)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    expected = torch.autograd.grad(theirs, list(model.parameters()))
    found = torch.autograd.grad(mine, list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert max(gradient.abs().max() for gradient in found) > 0.01


def test_padding_changes_nothing(first):
    """GPT-2 counts positions from the start, so wrong position ids would show. Each row is compared without padding."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5
    )
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(20, (4, 9))  # (N, P + R)
    prompt_lengths, response_lengths, P, R = [5, 2, 4, 1], [4, 1, 2, 4], 5, 4
    columns = torch.arange(P + R)
    mask = torch.stack(
        [
            (columns >= P - p) & (columns < P + r)
            for p, r in zip(prompt_lengths, response_lengths, strict=True)
        ]
    ).long()  # (N, P + R)
    logprobs = first.compute_logprobs(model, ids, mask, mask[:, P:])
    assert logprobs.shape == (4, R)
    for i, (p, r) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        row = ids[i : i + 1, P - p : P + r]  # (1, p + r)
        alone = model(row).logits.log_softmax(2)[0, p - 1 : -1]  # (r, V)
        expected = alone.gather(1, row[0, p:, None])[:, 0]  # (r,)
        torch.testing.assert_close(logprobs[i, :r], expected, rtol=0, atol=5e-5)


def test_it_samples_from_the_whole_softmax(first, monkeypatch):
    """generate divides the logits by the temperature, and changes nothing else. Each group has one question."""
    seen, sample = [], GenerationMixin._sample

    def spy(self, input_ids, logits_processor, **options):
        names = [type(processor).__name__ for processor in logits_processor]
        seen.append((options["generation_config"].do_sample, names, input_ids))
        return sample(self, input_ids, logits_processor=logits_processor, **options)

    monkeypatch.setattr(GenerationMixin, "_sample", spy)
    first.NUM_STEPS, first.TEMPERATURE = 1, 0.7
    first.main()
    found = [(do_sample, names) for do_sample, names, _ in seen]
    assert found == [(False, []), (True, ["TemperatureLogitsWarper"]), (False, [])]
    prompts = seen[1][2].view(first.B, first.G, -1)  # (B, G, P)
    assert (prompts == prompts[:, :1]).all() and len(prompts[:, 0].unique(dim=0)) > 1


def test_it_learns(first, capsys, tmp_path, monkeypatch):
    """It starts in any folder, and writes nothing there."""
    monkeypatch.chdir(tmp_path)
    first.NUM_STEPS = 8
    first.main()
    before, after = re.findall(r": accuracy (\S+)", capsys.readouterr().out)
    assert float(after) > float(before) + 0.2
    assert not list(tmp_path.iterdir())


def test_the_printed_metrics_are_those_of_grpo(first, capsys, monkeypatch):
    """Of each step's last update, with a rate at which ratios leave the range on both sides of either advantage."""
    first.NUM_STEPS, first.LEARNING_RATE = 3, 1e-3
    updates, loss = [], first.policy_loss

    def spy(*given):
        updates.append([tensor.detach() for tensor in given])
        return loss(*given)

    monkeypatch.setattr(first, "policy_loss", spy)
    first.main()
    printed = re.findall(r"clip_frac=(\S+), approx_kl=(\S+)", capsys.readouterr().out)
    flags = dict(clip_eps=first.CLIP_EPS, beta=0.0)
    outside = 0
    assert len(printed) == 3
    for numbers, (logprobs, old_logprobs, advantages, mask) in zip(
        printed, updates[1::2], strict=True
    ):
        given = (logprobs, old_logprobs, None, advantages, mask.bool())
        _, sums = grpo.policy_loss(*given, num_seqs=len(mask), **flags)
        clip_frac, approx_kl = (
            sums[f"policy/{name}"] / mask.sum() for name in ("clip_frac", "approx_kl")
        )
        assert numbers == (f"{clip_frac:.4f}", f"{approx_kl:.5f}")
        ratio = (logprobs - old_logprobs).exp()[mask.bool()]
        outside += ((ratio - 1).abs() > first.CLIP_EPS).float().mean() - clip_frac
    assert outside > 0.001  # some ratios are outside, where the clip doesn't act
