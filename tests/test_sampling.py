"""generate and compute_logprobs against plain forward passes of one unpadded sequence, on tiny random models.

families.py has all families that are tested: each is exact, or an error ends its run.

Also: the sampled distribution, where a response ends, limits of memory, gradients, repeatability, and that dropout
changes nothing. It tests grpo.py; test_siblings.py says where other scripts share its text.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import patched_by
from families import (
    DIFFERENT,
    FAILING,
    FAMILIES,
    IS_OLDER,
    NEED_523,
    V,
    random_model,
    small_config,
)
from torch.utils._python_dispatch import TorchDispatchMode

import grpo

# With four EOS ids about one token in twelve ends a response.
EOS = [2, 5, 9, 11]
TOKENIZER = SimpleNamespace(batch_decode=list)
# Some prompts contain EOS ids.
PROMPTS = [
    [7],
    [3, 4, 2, 30, 2, 2, 19, 41, 8],
    [2, 12, 13, 2],
    [45, 2],
    [33, 31, 29, 27, 25, 23],
]


def build(family, **changes):
    """A random model of this family, with these fields in its configuration."""
    return random_model(small_config(family, **changes))


def chain(vocab_size, logits_after):
    """A Llama without attention or MLP: after token i the logits are row i of logits_after (V, V)."""
    sizes = dict(vocab_size=vocab_size, hidden_size=vocab_size, num_attention_heads=2)
    model = build("Llama", **sizes, rms_norm_eps=0.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        # With this weight the norm doesn't change a one-hot vector.
        model.model.norm.weight.fill_(vocab_size**-0.5)
        model.lm_head.weight.copy_(logits_after.T)
    return model


def counting():
    """A model that counts: after token i comes i + 1 with a probability near 1, and after the last token comes 0."""
    return chain(V, 50.0 * torch.eye(V).roll(1, dims=1))


def make_args(new_tokens, temperature=1.0, samples=4, **given):
    sizes = dict(sampling_tokens=49152, micro_batch_tokens=2048) | given
    return grpo.Args(
        max_new_tokens=new_tokens, temperature=temperature, num_generations=samples, **sizes
    )


@pytest.fixture
def segment(monkeypatch):
    """Set how many decode steps lie between two allocations of memory."""
    return lambda steps: monkeypatch.setattr(grpo, "SEGMENT", {"cpu": steps})


def left_pad(prompts):
    """ids and mask (B, P). The padding token is also an EOS id, and some prompts contain this id."""
    P = max(map(len, prompts))
    ids = torch.tensor([[2] * (P - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[k >= P - len(prompt) for k in range(P)] for prompt in prompts])


def roll_out(
    model, prompts=PROMPTS, samples=4, new_tokens=14, temperature=1.0, eos_ids=EOS, seed=0, **given
):
    """Sample like main: return the Rollout in group order and its sampled log-probabilities."""
    args = make_args(new_tokens, temperature, samples, **given)
    problems = [{"prompt_ids": prompt} for prompt in prompts]
    torch.manual_seed(seed)
    eos_ids = torch.tensor(eos_ids)
    rollout = grpo.sample_responses(args, model, problems, samples, temperature, eos_ids)
    logprobs, mask = rollout.sampled_logprobs, rollout.response_mask
    shape = (len(prompts) * samples, new_tokens)
    assert rollout.response_ids.shape == mask.shape == logprobs.shape == shape
    assert mask.dtype == torch.bool and logprobs.dtype == torch.float32
    # A completion is the response without its end token.
    is_text = mask & ~torch.isin(rollout.response_ids, eos_ids)
    texts = [ids[kept].tolist() for ids, kept in zip(rollout.response_ids, is_text, strict=True)]
    assert grpo.response_texts(TOKENIZER, rollout, eos_ids) == texts
    return rollout, logprobs


def random_rollout(script, groups, beginning=0, vocabulary=V):
    """A script's Rollout of random ids. groups: pairs of a prompt's length and the lengths of its responses.

    All prompts begin with the same tokens, as many as beginning says.
    """
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, vocabulary, (beginning,), generator=generator).tolist()
    prompts, lengths = [], []
    for length, of_group in groups:
        rest = torch.randint(0, vocabulary, (length - beginning,), generator=generator).tolist()
        prompts += [first + rest] * len(of_group)
        lengths += of_group
    N, R = len(lengths), max(lengths)
    response_ids = torch.randint(0, vocabulary, (N, R), generator=generator)  # padding has any ids
    mask = torch.arange(R) < torch.tensor(lengths)[:, None]
    masks = [mask]
    if "context_mask" in script.Rollout._fields:
        # The policy wrote three of four tokens, and all first ones.
        masks = [mask & (torch.arange(R) % 4 != 2), mask]
    return script.Rollout(prompts, response_ids, *masks, torch.zeros(N, R))


def as_main(model, rollout, temperature):
    """The log-probabilities as main computes them, in micro-batches."""
    args = make_args(14, temperature)
    return grpo.rollout_logprobs(args, model, rollout, [torch.arange(len(rollout.prompts))])


def slow_logprobs(model, rollout, temperature):
    """(n, R) float64: one forward pass per sequence, without padding, mask, position ids or cache."""
    prompts, response_ids, response_mask, *_ = rollout
    # In grpo_tools.py a response also has tokens of the tool.
    is_token = getattr(rollout, "context_mask", response_mask)
    table = []
    for i in range(len(response_ids)):
        prompt = torch.tensor(prompts[i], device=response_ids.device)
        response = response_ids[i][is_token[i]]
        logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
        logprobs = (logits.double() / temperature).log_softmax(1)[len(prompt) - 1 : -1]
        logprobs = logprobs.gather(1, response[:, None])[:, 0]
        padding = response_ids.shape[1] - len(response)
        table.append(torch.nn.functional.pad(logprobs, (0, padding)))
    return torch.stack(table).masked_fill(~response_mask, 0.0)


def exact_logprobs(model, rollout, temperature=1.0):
    """slow_logprobs with transformers' plainest attention."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected = slow_logprobs(model, rollout, temperature)
    model.set_attn_implementation(usual)
    return expected


def assert_near(actual, expected, tolerance=5e-5):
    """The tolerance is ten times what float32 rounds here, because each processor rounds differently."""
    assert actual.shape == expected.shape
    assert (actual.detach().double() - expected.detach().double()).abs().max() <= tolerance


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected, tolerance=1e-5):
    """The tolerance is relative to the model's largest gradient: some, say of a key bias, are 0 up to rounding."""
    largest = max(grad.abs().max() for grad in expected.values())
    assert actual.keys() == expected.keys() and largest > 1e-3
    for name, grad in expected.items():
        assert (actual[name] - grad).abs().max() <= tolerance * largest, name


# ---- model families


def load_family(family, folder):
    """A small model of families.py, whose configuration load_config has read."""
    if IS_OLDER and family in NEED_523:
        pytest.skip("docs/models.md says to take transformers 5.23 or 5.24 for this family")
    small_config(family).save_pretrained(folder)
    args = grpo.Args(max_prompt_tokens=9, max_new_tokens=14)
    return random_model(grpo.load_config(args, folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(segment, tmp_path, family):
    """The prompts have different lengths, rows are dropped, and the cache grows. The trainer is in training mode."""
    segment(4)
    model = load_family(family, tmp_path)
    # Six rows, of a short and two long prompts.
    rollout, sampled = roll_out(
        model, PROMPTS[:3], samples=2, new_tokens=12, temperature=0.7, seed=1
    )
    assert rollout.response_mask.sum(1).max() > 4
    recomputed = as_main(model.train(), rollout, 0.7)
    with torch.no_grad():
        expected = exact_logprobs(model.eval(), rollout, 0.7)
    assert expected[rollout.response_mask].std() > 0.02
    tolerance = 5e-4 if family == "Gemma 4" else 1e-4  # Gemma 4's layers round more
    assert_near(sampled, expected, tolerance)
    assert_near(recomputed, expected, tolerance)


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_that_end_are_dropped(segment, family, temperature):
    """The cache grows three times. Some responses end before that, and others go on."""
    segment(4)
    model = build(family)
    rollout, sampled = roll_out(model, temperature=temperature, seed=4)
    lengths = rollout.response_mask.sum(1)
    assert (lengths < 10).float().mean() > 0.25 and lengths.max() == 14
    with torch.no_grad():
        expected = slow_logprobs(model, rollout, temperature)
    # Nearly greedy samples would test little.
    assert expected[rollout.response_mask].mean() < -1
    assert_near(sampled, expected)
    assert_near(as_main(model, rollout, temperature), expected)


@pytest.mark.parametrize("family", DIFFERENT)
def test_what_would_train_wrongly_is_refused(segment, tmp_path, family):
    segment(4)
    model = load_family(family, tmp_path)
    rollout, sampled = roll_out(model)
    gap = (as_main(model.train(), rollout, 1.0) - sampled).abs()[rollout.response_mask]
    with pytest.raises(ValueError, match="sampling and training differ"):
        grpo.check_gap(grpo.Args(), gap.mean())


@pytest.mark.parametrize("family", FAILING)
def test_what_can_not_be_sampled_is_an_error(tmp_path, family):
    model = load_family(family, tmp_path)
    with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError)):
        roll_out(model)


@pytest.mark.parametrize("steps", [1, 32])
@pytest.mark.parametrize(
    "prompts, samples, new_tokens", [([[7], [2], [30]], 3, 6), (PROMPTS, 2, 1), ([[3, 4, 5]], 1, 9)]
)
def test_edge_sizes(segment, steps, prompts, samples, new_tokens):
    """Cases: prompts of one token, responses of one token, a single sequence, prompts of equal length."""
    segment(steps)
    model = build("GPT-2")
    rollout, sampled = roll_out(model, prompts, samples, new_tokens)
    with torch.no_grad():
        assert_near(sampled, slow_logprobs(model, rollout, 1.0))
        assert_near(grpo.compute_logprobs(model, rollout, 1.0), sampled)


# ---- the distribution


def chi_squared(counts, probs):
    expected = probs * counts.sum()
    assert expected.min() > 4, "too few samples for the statistic"
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_whole_softmax_is_sampled(temperature):
    """For first tokens, and second tokens given the first, chi-squared stays below its mean plus five deviations."""
    vocab_size, samples = 6, 6000
    table = 1.6 * torch.rand(vocab_size, vocab_size, generator=torch.Generator().manual_seed(3))
    model, eos_ids = chain(vocab_size, table), [vocab_size - 1]
    rollout, _ = roll_out(model, [[1, 2], [5]], samples, 2, temperature, eos_ids)
    ids, mask = rollout.response_ids, rollout.response_mask
    probs = (table.double() / temperature).softmax(1)
    for prompt, last in enumerate([2, 5]):
        rows = slice(prompt * samples, (prompt + 1) * samples)
        group, group_mask = ids[rows], mask[rows]
        statistic = chi_squared(group[:, 0].bincount(minlength=vocab_size), probs[last])
        dof = vocab_size - 1
        assert statistic < dof + 5 * math.sqrt(2 * dof)
        statistic, dof = 0.0, 0
        # The last token is EOS, so no second token follows it.
        for first in range(vocab_size - 1):
            seconds = group[group_mask[:, 1] & (group[:, 0] == first), 1]
            statistic += chi_squared(seconds.bincount(minlength=vocab_size), probs[first])
            dof += vocab_size - 1
        assert statistic < dof + 5 * math.sqrt(2 * dof)


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_temperature_0_is_greedy(segment, family):
    segment(4)
    model = build(family)
    rollout, logprobs = roll_out(model, samples=1, temperature=0.0)
    assert_near(logprobs, exact_logprobs(model, rollout, 1.0), 1e-4)
    for prompt, row, counts in zip(
        PROMPTS, rollout.response_ids, rollout.response_mask, strict=True
    ):
        expected = []
        while len(expected) < 14 and (not expected or expected[-1] not in EOS):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + expected]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
        assert row[counts].tolist() == expected


def test_samples_of_a_prompt_differ():
    """Samples differ within a group, and between two groups with the same prompt."""
    (_, ids, mask, _), _ = roll_out(build("Llama"), [[7, 8, 9], [7, 8, 9]], samples=6)
    assert len({tuple(row[counts].tolist()) for row, counts in zip(ids, mask, strict=True)}) == 12
    assert len(set(ids[:, 0].tolist())) > 3


def test_the_same_random_state_gives_the_same_samples():
    model = build("Llama")
    (first, logprobs), (again, same_logprobs) = roll_out(model, seed=3), roll_out(model, seed=3)
    assert torch.equal(first.response_ids, again.response_ids)
    assert torch.equal(logprobs, same_logprobs)
    other, _ = roll_out(model, seed=4)
    assert not torch.equal(first.response_ids[:, 0], other.response_ids[:, 0])


# ---- where a response ends


@pytest.mark.parametrize("steps", [1, 2, 32])
def test_responses_end_with_any_eos_token_and_count_it(segment, steps):
    """The model's continuations are certain, so the test knows every response, its mask and its prompt.

    Prompts contain EOS ids, and the id of padding, which is 0.
    """
    segment(steps)
    eos_ids = [10, 20]
    expected = {
        # The prompt contains EOS tokens; the response ends with the first EOS id.
        (10, 10, 7): [8, 9, 10],
        (18,): [19, 20],  # the second EOS id
        (3, 9): [10],  # EOS at once
        # The sampler cuts this response at max_new_tokens.
        (20, 10, 20, 10, 21): [22, 23, 24, 25, 26],
        (10,): [11, 12, 13, 14, 15],
        (30, 16): [17, 18, 19, 20],
        (0, 2, 3): [4, 5, 6, 7, 8],
        (0,): [1, 2, 3, 4, 5],
    }
    prompts, samples = [list(prompt) for prompt in expected], 3
    rollout, sampled = roll_out(counting(), prompts, samples, 5, eos_ids=eos_ids)
    recomputed = grpo.compute_logprobs(counting(), rollout, 1.0)
    rollout_prompts, ids, mask, _ = rollout
    assert ids.shape == (len(prompts) * samples, 5)
    for i in range(len(ids)):
        prompt = prompts[i // samples]  # group order
        assert rollout_prompts[i] == prompt
        response = expected[tuple(prompt)]
        assert mask[i].tolist() == [True] * len(response) + [False] * (5 - len(response))
        assert ids[i][mask[i]].tolist() == response
    # Masked entries are exactly 0; the others are log 1.
    assert (sampled[~mask] == 0).all() and (recomputed[~mask] == 0).all()
    assert sampled.abs().max() < 1e-6 and recomputed.abs().max() < 1e-6


# ---- limits of memory


def test_sampling_in_parts_changes_nothing(monkeypatch):
    """The sampler needs as few parts as --sampling-tokens allows. A part has at least one prompt."""
    model, sizes, generate = build("Llama"), [], grpo.generate
    whole, logprobs = roll_out(model, samples=2, temperature=0.0)

    def counted(*args):
        sizes.append(len(args[2]))
        return generate(*args)

    monkeypatch.setattr(grpo, "generate", counted)
    # A row has at most 9 prompt tokens and 14 new ones.
    for budget in (1, 2 * 2 * (9 + 14), 4 * 2 * (9 + 14)):
        parts, part_logprobs = roll_out(model, samples=2, temperature=0.0, sampling_tokens=budget)
        assert parts.prompts == whole.prompts
        mask = parts.response_mask
        assert torch.equal(mask, whole.response_mask)
        assert torch.equal(parts.response_ids[mask], whole.response_ids[mask])
        assert_near(part_logprobs, logprobs)
    assert sizes == [1] * 5 + [2, 2, 1] + [4, 1]


@pytest.mark.parametrize("steps", [4, 32])
def test_keys_and_values_keep_to_sampling_tokens(segment, steps):
    """With segments of any length, the sampler allocates no more columns than prompt and response can fill."""
    segment(steps)
    model, sizes = build("Llama"), []
    model.register_forward_pre_hook(
        lambda _, ids, inputs: sizes.append(inputs["attention_mask"].shape), with_kwargs=True
    )
    # No row ever ends.
    roll_out(model, samples=2, sampling_tokens=2 * 2 * (9 + 14), eos_ids=[V])
    assert max(shape[0] * shape[-1] for shape in sizes) == 2 * 2 * (9 + 14)


# ---- the gradient


@pytest.fixture
def double(monkeypatch):
    """A function that switches the model and the script to float64."""

    def call(model):
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        return model.double()

    yield call
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_exactly(double, tmp_path, family):
    """In training mode, without and with gradient checkpointing, in one micro-batch and in several."""
    model = double(load_family(family, tmp_path))
    model.set_experts_implementation("eager")
    rollout = random_rollout(grpo, [(9, [8, 1, 5]), (7, [12, 3])])
    weights = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(0))
    expected = exact_logprobs(model, rollout, 0.7)
    slow = gradients(model, (expected * weights).sum())
    largest = max(grad.abs().max() for grad in slow.values())
    tolerance = 5e-4 if family == "Gemma 4" else 5e-5  # Gemma 4 rounds to float32 in between
    model.train()
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        splits = []
        for budget in (50, 10**6):
            args = make_args(12, micro_batch_tokens=budget)
            splits.append(list(grpo.micro_batches(args, rollout, torch.arange(5))))
        assert len(splits[0]) > 1 == len(splits[1])
        for batches in splits:
            model.zero_grad(set_to_none=False)
            for rows, part in batches:
                logprobs = grpo.compute_logprobs(model, part, 0.7)
                assert_near(logprobs, expected[rows], tolerance)
                (logprobs * weights[rows]).sum().backward()
            for name, parameter in model.named_parameters():
                if name in slow:
                    assert (parameter.grad - slow[name]).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_gradient_is_the_same_to_the_last_bit_with_two_threads(is_shared):
    """A run on two threads must also be repeatable, so the order of the threads must not change any sum.

    The rows of a prompt add up in the embedding, and with the patch shared_prompts in its states, too.
    """
    script = patched_by("shared_prompts", "grpo") if is_shared else grpo
    model = build("Llama", hidden_size=128, head_dim=64, num_key_value_heads=4)
    rollout = random_rollout(script, [(400, [3] * 120)] if is_shared else [(9, [14] * 8)] * 5)
    # Without shuffling each thread would have whole groups.
    order = torch.randperm(len(rollout.prompts), generator=torch.Generator().manual_seed(0))
    rollout = rollout.select(order)
    assert rollout.response_mask.sum() * 128 > 2**15  # threads share the work on larger tensors
    torch.set_num_threads(2)
    try:
        first = gradients(model, script.compute_logprobs(model, rollout, 1.0).sum())
        for _ in range(2):
            again = gradients(model, script.compute_logprobs(model, rollout, 1.0).sum())
            assert all(torch.equal(again[name], grad) for name, grad in first.items())
    finally:
        torch.set_num_threads(1)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, including backward passes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_logits_exist_only_in_chunks_and_are_not_kept_for_the_backward_pass(monkeypatch):
    """With this limit and this vocabulary, the logits of at most 16 tokens may exist at a time."""
    monkeypatch.setitem(grpo.CHUNK_LOGITS, "cpu", 2**20)
    sizes = dict(hidden_size=4, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1)
    model = build("Llama", vocab_size=2**16, **sizes, head_dim=4)
    rollout = random_rollout(grpo, [(1, [11]), (2, [9])], vocabulary=2**16)
    saved = []

    def pack(x):
        saved.append(x.numel())
        return x

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logprobs = grpo.compute_logprobs(model, rollout, 0.7)
        actual = gradients(model, logprobs.sum())
    assert largest.elements <= 2**20 < rollout.response_mask.sum() * 2**16
    assert max(saved) < 2**20
    expected = slow_logprobs(model, rollout, 0.7)
    assert_near(logprobs, expected)
    assert_same_gradients(actual, gradients(model, expected.sum()))


# ---- training mode


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_a_rollout_is_sampled_in_evaluation_mode(family):
    """In training mode, gradient checkpointing drops the key-value cache, and GPT-2's dropout is active."""
    dropout = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5) if family == "GPT-2" else {}
    model = build(family, **dropout)
    expected_rollout, expected = roll_out(model)
    model.gradient_checkpointing_enable()
    model.train()
    rollout, sampled = roll_out(model)
    assert torch.equal(rollout.response_ids, expected_rollout.response_ids)
    assert torch.equal(sampled, expected)
    with torch.no_grad():
        assert_near(sampled, slow_logprobs(model.eval(), rollout, 1.0))
