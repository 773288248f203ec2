"""first.py computes what grpo.py computes, and it learns."""

import importlib.util
import re

import pytest
import torch
from conftest import ROOT, SMALL_MODEL
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
def first():
    """A fresh module, so that a test may change its constants."""
    spec = importlib.util.spec_from_file_location("first", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MODEL = SMALL_MODEL
    return module


def test_the_advantages_are_those_of_grpo(first):
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards[0] = 1.0  # equal rewards
    expected = grpo.compute_advantages(rewards)
    torch.testing.assert_close(first.compute_advantages(rewards), expected, rtol=0, atol=1e-12)


def test_the_loss_and_its_gradient_are_those_of_grpo(first):
    """Ratios leave the clip range on both sides, for advantages of either sign."""
    generator = torch.Generator().manual_seed(1)
    n, R = 12, 7
    logprobs = -2 * torch.rand(n, R, generator=generator, dtype=torch.float64)  # (n, R)
    old_logprobs = logprobs + 0.5 * torch.randn(n, R, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n, 1, generator=generator, dtype=torch.float64)  # (n, 1)
    lengths = torch.arange(n) % R + 1  # (n,): 1 to R
    mask = torch.arange(R) < lengths[:, None]  # (n, R)
    args = grpo.Args(beta=0.0, clip_eps=first.CLIP_EPS)

    def value_and_gradient(loss_of):
        x = logprobs.clone().requires_grad_()
        loss = loss_of(x)
        return loss.detach(), *torch.autograd.grad(loss, x)

    expected = value_and_gradient(
        lambda x: grpo.policy_loss(args, x, old_logprobs, None, advantages, mask, num_seqs=n)[0]
    )
    found = value_and_gradient(
        lambda x: first.policy_loss(x, old_logprobs, advantages, mask.long())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    ratio = (logprobs - old_logprobs).exp()
    for sign in (-1, 1):
        of_sign = mask & (advantages * sign > 0)
        assert (ratio[of_sign] < 1 - first.CLIP_EPS).any()
        assert (ratio[of_sign] > 1 + first.CLIP_EPS).any()
    assert (found[1][mask] == 0).any() and (found[1][~mask] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_sampled_batch_has_the_gradient_of_grpo(first, temperature):
    """Prompts of three lengths, responses with and without an EOS token, and the gradient of every weight."""
    first.TEMPERATURE, first.MAX_NEW_TOKENS, G = temperature, 20, 8
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

    def gradient(logprobs, loss_of):
        advantages = first.compute_advantages(rewards.view(-1, G)).view(-1, 1)
        loss = loss_of(logprobs, logprobs.detach() + 0.3 * torch.sin(torch.arange(R)), advantages)
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    args = grpo.Args(beta=0.0, clip_eps=first.CLIP_EPS)
    is_response = response_mask.bool()
    rollout = grpo.Rollout(ids[:, :P], mask[:, :P].bool(), ids[:, P:], is_response, None)
    expected_logprobs = grpo.compute_logprobs(model, rollout, temperature)
    logprobs = first.compute_logprobs(model, ids, mask, response_mask)
    torch.testing.assert_close(
        logprobs[is_response], expected_logprobs[is_response], rtol=0, atol=2e-5
    )
    expected = gradient(
        expected_logprobs,
        lambda x, old, A: grpo.policy_loss(args, x, old, None, A, is_response, num_seqs=len(rows))[
            0
        ],
    )
    found = gradient(logprobs, lambda x, old, A: first.policy_loss(x, old, A, response_mask))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert max(g.abs().max() for g in found[1]) > 0.01


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
    first.NUM_STEPS = 10
    first.main()
    before, after = re.findall(r": accuracy (\S+)", capsys.readouterr().out)
    assert float(after) > float(before) + 0.2
    assert not list(tmp_path.iterdir())
