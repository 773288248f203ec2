"""generate and compute_logprobs against plain forward passes of one unpadded sequence, on tiny random models.

families.py has all families that are tested: each is exact, or an error ends its run.

Also: the sampled distribution, where a response ends, gradients, limits of memory, repeatability, and that padding,
splits and dropout change nothing. It runs for grpo.py; test_siblings.py says where other scripts share its text.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from families import ALL, DIFFERENT, FAILING, FAMILIES, UNKNOWN_HEADS, random_model, small_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

V = 48  # vocabulary
# With four EOS ids about one token in twelve ends a response.
EOS = [2, 5, 9, 11]
TOKENIZER = SimpleNamespace(batch_decode=list)
pytestmark = pytest.mark.scripts("grpo")
# Some prompts contain EOS ids.
PROMPTS = [
    [7],
    [3, 4, 2, 30, 2, 2, 19, 41, 8],
    [2, 12, 13, 2],
    [45, 2],
    [33, 31, 29, 27, 25, 23],
]

LLAMA = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
LLAMA |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2)
LLAMA |= dict(bos_token_id=2, eos_token_id=2, pad_token_id=2)
GPT2 = dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
FALCON = dict(
    vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
)
MLA = dict(
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6, head_dim=4
)
MLA |= dict(
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1
)
WINDOW = dict(query_pre_attn_scalar=8, sliding_window=64)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SUPPORTED = {
    "Llama": ("LlamaConfig", LLAMA),
    "Llama, tied head": ("LlamaConfig", LLAMA | dict(tie_word_embeddings=True)),
    "Llama, one key head": ("LlamaConfig", LLAMA | dict(num_key_value_heads=1)),
    "Qwen2": ("Qwen2Config", LLAMA),
    "Qwen3": ("Qwen3Config", LLAMA),
    "GPT-2": ("GPT2Config", GPT2),
    "GPT-NeoX": ("GPTNeoXConfig", LLAMA),
    "Mistral": ("MistralConfig", LLAMA | dict(sliding_window=None)),
    "Mistral, long window": ("MistralConfig", LLAMA | dict(sliding_window=64)),
    "Gemma": ("GemmaConfig", LLAMA | dict(initializer_range=0.1)),
    "Gemma 3, long window": ("Gemma3TextConfig", LLAMA | WINDOW | dict(initializer_range=0.12)),
    "Phi, bias in the head": ("PhiConfig", LLAMA),
    "OLMo 2": ("Olmo2Config", LLAMA),
    "SmolLM 3": ("SmolLM3Config", LLAMA),
    "Falcon, rotary": ("FalconConfig", FALCON | dict(alibi=False)),
    "OPT, positions from 2": (
        "OPTConfig",
        LLAMA | dict(ffn_dim=48, init_std=0.2, word_embed_proj_dim=32),
    ),
    "Mixtral": ("MixtralConfig", LLAMA | dict(num_local_experts=4, sliding_window=None)),
    "DeepSeek 3": (
        "DeepseekV3Config",
        LLAMA | MLA | dict(first_k_dense_replace=1, moe_intermediate_size=16),
    ),
}
UNUSUAL = {
    "Gemma 2, head capped": (
        "Gemma2Config",
        LLAMA | dict(query_pre_attn_scalar=8, sliding_window=64, final_logit_softcapping=3.0),
    ),
    "Cohere, scaled head": ("CohereConfig", LLAMA | dict(logit_scale=0.25)),
    "MPT, ALiBi": (
        "MptConfig",
        dict(vocab_size=V, d_model=32, n_layers=2, n_heads=4, initializer_range=0.2),
    ),
    "Llama, rotary scaling by length": (
        "LlamaConfig",
        LLAMA | dict(rope_parameters=DYNAMIC, max_position_embeddings=12),
    ),
}


def build(family, **changes):
    """A random model whose logits vary by some units. Its biases and norms differ from their initial 0 and 1."""
    name, fields = (SUPPORTED | UNUSUAL)[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**fields | changes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def chain(vocab_size, logits_after):
    """A Llama without attention or MLP: after token i the logits are row i of logits_after (V, V)."""
    model = build(
        "Llama",
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        num_attention_heads=2,
        rms_norm_eps=0.0,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        # With this weight the norm doesn't change a one-hot vector.
        model.model.norm.weight.fill_(vocab_size**-0.5)
        model.lm_head.weight.copy_(logits_after.T)
    return model


def counting(vocab_size=V):
    """A model that counts: after token i comes i + 1 with a probability near 1, and after the last token comes 0."""
    return chain(vocab_size, 50.0 * torch.eye(vocab_size).roll(1, dims=1))


def make_args(script, new_tokens, temperature=1.0, samples=4, **given):
    sizes = dict(sampling_tokens=49152, micro_batch_tokens=2048) | given
    return script.Args(
        max_new_tokens=new_tokens, temperature=temperature, num_generations=samples, **sizes
    )


@pytest.fixture
def segment(script, monkeypatch):
    """Set how many decode steps lie between two allocations of memory."""
    return lambda steps: monkeypatch.setattr(script, "SEGMENT", {"cpu": steps})


def left_pad(prompts):
    """ids and mask (B, P). The padding token is also an EOS id, and some prompts contain this id."""
    P = max(map(len, prompts))
    ids = torch.tensor([[2] * (P - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[k >= P - len(prompt) for k in range(P)] for prompt in prompts])


def roll_out(
    script,
    model,
    prompts=PROMPTS,
    samples=4,
    new_tokens=14,
    temperature=1.0,
    eos_ids=EOS,
    seed=0,
    **given,
):
    """Sample like main: return the Rollout in group order and its sampled log-probabilities."""
    args = make_args(script, new_tokens, temperature, samples, **given)
    examples = [{"prompt_ids": prompt} for prompt in prompts]
    torch.manual_seed(seed)
    rollout = script.sample_responses(
        args, model, examples, samples, temperature, torch.tensor(eos_ids)
    )
    logprobs, mask = rollout.sampled_logprobs, rollout.response_mask
    shape = (len(prompts) * samples, new_tokens)
    assert rollout.response_ids.shape == mask.shape == logprobs.shape == shape
    assert mask.dtype == torch.bool and logprobs.dtype == torch.float32
    # A completion is the response without its end token.
    is_text = mask & ~torch.isin(rollout.response_ids, torch.tensor(eos_ids))
    texts = [ids[kept].tolist() for ids, kept in zip(rollout.response_ids, is_text, strict=True)]
    assert script.response_texts(TOKENIZER, rollout, torch.tensor(eos_ids)) == texts
    return rollout, logprobs


def make_rollout(script, prompt_ids, prompt_mask, response_ids, response_mask):
    """A Rollout of these tensors, with zeros for log-probabilities."""
    masks = [response_mask] * (2 if "context_mask" in script.Rollout._fields else 1)
    logprobs = torch.zeros(response_ids.shape)
    return script.Rollout(prompt_ids, prompt_mask, response_ids, *masks, logprobs)


def random_rollout(script, groups, beginning=0, vocabulary=V):
    """A Rollout of random ids. groups: pairs of a prompt's length and the lengths of its responses.

    All prompts begin with the same tokens, as many as beginning says.
    """
    generator = torch.Generator().manual_seed(0)
    N, P = sum(len(lengths) for _, lengths in groups), max(length for length, _ in groups)
    R = max(max(lengths) for _, lengths in groups)
    # Padding has any ids.
    tokens = torch.randint(0, vocabulary, (N, P + R), generator=generator)
    prompt_ids, response_ids = tokens[:, :P], tokens[:, P:]
    first = torch.randint(0, vocabulary, (beginning,), generator=generator)
    prompt_lengths, lengths = [], []
    for length, of_group in groups:
        rows = slice(len(lengths), len(lengths) + len(of_group))
        prompt_ids[rows, P - length :] = prompt_ids[rows.start, P - length :]
        prompt_ids[rows, P - length : P - length + beginning] = first
        prompt_lengths += [length] * len(of_group)
        lengths += of_group
    prompt_mask = torch.arange(P) >= P - torch.tensor(prompt_lengths)[:, None]
    mask = torch.arange(R) < torch.tensor(lengths)[:, None]
    rollout = make_rollout(script, prompt_ids, prompt_mask, response_ids, mask)
    if hasattr(rollout, "context_mask"):
        # The policy wrote three of four tokens, and all first ones.
        rollout = rollout._replace(response_mask=mask & (torch.arange(R) % 4 != 2))
    return rollout


def as_main(script, model, rollout, temperature):
    """The log-probabilities as main computes them, in micro-batches that compute a common beginning once."""
    args = make_args(script, 14, temperature)
    return script.rollout_logprobs(args, model, rollout, [torch.arange(len(rollout.prompt_ids))])


def slow_logprobs(model, rollout, temperature):
    """(n, R) float64: one forward pass per sequence, without padding, mask, position ids or cache."""
    prompt_ids, prompt_mask, response_ids, response_mask, *_ = rollout
    # In grpo_tools.py a response also has tokens of the tool.
    is_token = getattr(rollout, "context_mask", response_mask)
    table = []
    for i in range(len(response_ids)):
        prompt, response = prompt_ids[i][prompt_mask[i]], response_ids[i][is_token[i]]
        logits = (
            model(torch.cat([prompt, response])[None], use_cache=False).logits[0].double()
            / temperature
        )
        logprobs = logits.log_softmax(1)[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        table.append(
            torch.cat([logprobs, logprobs.new_zeros(response_ids.shape[1] - len(response))])
        )
    return torch.stack(table).masked_fill(~response_mask, 0.0)


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


@pytest.mark.parametrize("family", SUPPORTED)
def test_sampler_and_trainer_agree_with_a_plain_forward(script, segment, family):
    # The cache grows three times.
    segment(4)
    model = build(family)
    for temperature in (0.7, 1.0):
        rollout, sampled = roll_out(script, model, temperature=temperature, seed=4)
        lengths = rollout.response_mask.sum(1)
        # Some responses end early, so the sampler drops rows while it runs.
        assert (lengths < 10).float().mean() > 0.25 and lengths.max() == 14
        recomputed = as_main(script, model, rollout, temperature)
        with torch.no_grad():
            expected = slow_logprobs(model, rollout, temperature)
        # Nearly greedy samples would test little.
        assert expected[rollout.response_mask].mean() < -1
        assert_near(sampled, expected)
        assert_near(recomputed, expected)


def load_family(script, family, folder):
    """A small model of families.py, whose configuration load_config has read."""
    small_config(family).save_pretrained(folder)
    args = script.Args(max_prompt_tokens=9, max_new_tokens=14)
    return random_model(script.load_config(args, folder))


def exact_logprobs(model, rollout, temperature=1.0):
    """slow_logprobs with transformers' plainest attention."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected = slow_logprobs(model, rollout, temperature)
    model.set_attn_implementation(usual)
    return expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(script, segment, tmp_path, family):
    """The prompts have different lengths, rows are dropped, and the cache grows. The trainer is in training mode."""
    segment(4)
    model = load_family(script, family, tmp_path)
    script.check_head(model, "--model x")
    # Four rows, of a short and a long prompt.
    rollout, sampled = roll_out(script, model, PROMPTS[:2], samples=2, new_tokens=12, seed=1)
    assert rollout.response_mask.sum(1).max() > 4
    recomputed = as_main(script, model.train(), rollout, 1.0)
    with torch.no_grad():
        expected = exact_logprobs(model.eval(), rollout)
    assert expected[rollout.response_mask].std() > 0.02
    tolerance = 5e-4 if family.startswith("Gemma 4") else 1e-4  # Gemma 4's layers round more
    assert_near(sampled, expected, tolerance)
    assert_near(recomputed, expected, tolerance)


@pytest.mark.parametrize("family", UNKNOWN_HEADS)
def test_an_unknown_head_is_refused(script, tmp_path, family):
    model = load_family(script, family, tmp_path)
    line = f"--model x: not supported, .* head of this family, {ALL[family][0]}$"
    with pytest.raises(ValueError, match=line):
        script.check_head(model, "--model x")


@pytest.mark.parametrize("family", DIFFERENT)
def test_what_would_train_wrongly_is_refused(script, segment, tmp_path, family):
    segment(4)
    model = load_family(script, family, tmp_path)
    script.check_head(model, "--model x")
    rollout, sampled = roll_out(script, model)
    gap = (as_main(script, model.train(), rollout, 1.0) - sampled).abs()[rollout.response_mask]
    with pytest.raises(ValueError, match="sampling and training differ"):
        script.check_gap(script.Args(), model, gap.mean())


@pytest.mark.parametrize("family", FAILING)
def test_what_can_not_be_sampled_is_an_error(script, tmp_path, family):
    model = load_family(script, family, tmp_path)
    with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError)):
        script.check_head(model, "--model x")
        roll_out(script, model)


def test_a_head_is_compared_to_the_last_digits(script):
    """A cap of 30 changes small logits by little: here by less than 0.001 nats, below any tolerance for bf16."""
    model = build("Gemma 2, head capped", final_logit_softcapping=30.0, initializer_range=0.02)
    script.check_head(model, "--model x")
    logits = model(torch.tensor([[3, 4, 5]])).logits
    model.config.final_logit_softcapping = None
    assert (model(torch.tensor([[3, 4, 5]])).logits - logits).abs().max() < 1e-3
    forward = model.forward

    def capped(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = 30.0 * torch.tanh(outputs.logits / 30.0)
        return outputs

    model.forward = capped
    with pytest.raises(ValueError, match="gemma2"):
        script.check_head(model, "--model x")


@pytest.mark.parametrize("steps", [1, 32])
@pytest.mark.parametrize(
    "prompts, samples, new_tokens", [([[7], [2], [30]], 3, 6), (PROMPTS, 2, 1), ([[3, 4, 5]], 1, 9)]
)
def test_edge_sizes(script, segment, steps, prompts, samples, new_tokens):
    """Cases: prompts of one token, responses of one token, a single sequence, prompts of equal length."""
    segment(steps)
    model = build("GPT-2")
    rollout, sampled = roll_out(script, model, prompts, samples, new_tokens)
    with torch.no_grad():
        assert_near(sampled, slow_logprobs(model, rollout, 1.0))
        assert_near(script.compute_logprobs(model, rollout, 1.0), sampled)


# ---- the distribution


def chi_squared(counts, probs):
    expected = probs * counts.sum()
    assert expected.min() > 4, "too few samples for the statistic"
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_whole_softmax_is_sampled(script, temperature):
    """For first tokens, and second tokens given the first, chi-squared stays below its mean plus five deviations."""
    vocab_size, samples = 6, 6000
    table = 1.6 * torch.rand(vocab_size, vocab_size, generator=torch.Generator().manual_seed(3))
    model, eos_ids = chain(vocab_size, table), [vocab_size - 1]
    (_, _, ids, mask, *_), _ = roll_out(
        script, model, [[1, 2], [5]], samples, 2, temperature, eos_ids
    )
    probs = (table.double() / temperature).softmax(1)
    for prompt, last in enumerate([2, 5]):
        group, group_mask = (x[prompt * samples : (prompt + 1) * samples] for x in (ids, mask))
        statistic, dof = (
            chi_squared(group[:, 0].bincount(minlength=vocab_size), probs[last]),
            vocab_size - 1,
        )
        assert statistic < dof + 5 * math.sqrt(2 * dof)
        statistic, dof = 0.0, 0
        # The last token is EOS, so no second token follows it.
        for first in range(vocab_size - 1):
            seconds = group[group_mask[:, 1] & (group[:, 0] == first), 1]
            statistic += chi_squared(seconds.bincount(minlength=vocab_size), probs[first])
            dof += vocab_size - 1
        assert statistic < dof + 5 * math.sqrt(2 * dof)


def test_the_generation_config_of_a_checkpoint_changes_nothing(script):
    model = build("Llama")
    before, logprobs_before = roll_out(script, model)
    options = dict(
        do_sample=True,
        top_k=2,
        top_p=0.5,
        repetition_penalty=2.0,
        temperature=3.0,
        max_new_tokens=2,
    )
    model.generation_config = transformers.GenerationConfig(**options, eos_token_id=[7, 8])
    after, logprobs_after = roll_out(script, model)
    assert torch.equal(before.response_ids, after.response_ids)
    assert torch.equal(logprobs_before, logprobs_after)


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_temperature_0_is_greedy(script, segment, family):
    segment(4)
    model = build(family)
    (_, _, ids, mask, *_), _ = roll_out(script, model, samples=1, temperature=0.0)
    for prompt, row, counts in zip(PROMPTS, ids, mask, strict=True):
        expected = []
        while len(expected) < 14 and (not expected or expected[-1] not in EOS):
            with torch.no_grad():
                expected.append(
                    model(torch.tensor([prompt + expected]), use_cache=False)
                    .logits[0, -1]
                    .argmax()
                    .item()
                )
        assert row[counts].tolist() == expected


def test_samples_of_a_prompt_differ(script):
    """Samples differ within a group, and between two groups with the same prompt."""
    (_, _, ids, mask, *_), _ = roll_out(script, build("Llama"), [[7, 8, 9], [7, 8, 9]], samples=6)
    assert len({tuple(row[counts].tolist()) for row, counts in zip(ids, mask, strict=True)}) == 12
    assert len(set(ids[:, 0].tolist())) > 3


def test_the_same_random_state_gives_the_same_samples(script):
    model = build("Llama")
    first = roll_out(script, model, seed=3)
    state = torch.get_rng_state()
    second = roll_out(script, model, seed=3)
    assert torch.equal(first[0].response_ids, second[0].response_ids)
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0][2][:, 0], roll_out(script, model, seed=4)[0][2][:, 0])

    args, (prompt_ids, prompt_mask) = make_args(script, 14), left_pad(PROMPTS)
    outputs = []
    for _ in range(2):
        torch.set_rng_state(state)
        outputs.append(
            script.generate(args, model, prompt_ids, prompt_mask, 4, 1.0, torch.tensor(EOS))
        )
    assert all(map(torch.equal, *outputs))
    assert not torch.equal(outputs[0][0][:, 0], first[0][2][:, 0])


# ---- where a response ends


@pytest.mark.parametrize("steps", [1, 2, 32])
def test_responses_end_with_any_eos_token_and_count_it(script, segment, steps):
    """The model's continuations are certain, so the test knows every response, its mask and its prompt.

    The pad id is also an EOS id, and prompts contain it.
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
        # The whole prompt has the pad id.
        (10,): [11, 12, 13, 14, 15],
        (30, 16): [17, 18, 19, 20],
    }
    prompts, samples = [list(prompt) for prompt in expected], 3
    rollout, sampled = roll_out(script, counting(), prompts, samples, 5, eos_ids=eos_ids)
    recomputed = script.compute_logprobs(counting(), rollout, 1.0)
    prompt_ids, prompt_mask, ids, mask, *_ = rollout
    assert ids.shape == (len(prompts) * samples, 5)
    for i in range(len(ids)):
        prompt = prompts[i // samples]  # group order
        assert prompt_ids[i][prompt_mask[i]].tolist() == prompt
        response = expected[tuple(prompt)]
        assert mask[i].tolist() == [True] * len(response) + [False] * (5 - len(response))
        assert ids[i][mask[i]].tolist() == response
    # Masked entries are exactly 0; the others are log 1.
    assert (sampled[~mask] == 0).all() and (recomputed[~mask] == 0).all()
    assert sampled.abs().max() < 1e-6 and recomputed.abs().max() < 1e-6


def test_prompts_are_masked_by_length_and_not_by_id(script):
    """Some prompts contain the pad id, even as their first token."""
    prompts = [[0, 2, 3], [0], [4, 0]]
    (ids, mask, *_), _ = roll_out(script, counting(), prompts, 1, 1)
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert [row[counts].tolist() for row, counts in zip(ids, mask, strict=True)] == prompts


# ---- changes that must not matter


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_padding_and_order_do_not_matter(script, family):
    model = build(family)
    rollout, _ = roll_out(script, model)
    prompt_ids, prompt_mask, ids, mask, *_ = rollout
    junk = torch.randint(0, V, (len(ids), 3), generator=torch.Generator().manual_seed(5))
    no = torch.zeros(len(ids), 3, dtype=torch.bool)
    with torch.no_grad():
        expected = script.compute_logprobs(model, rollout, 1.0)
        wider_prompt = torch.cat([junk, prompt_ids], 1), torch.cat([no, prompt_mask], 1)
        wide = script.compute_logprobs(model, make_rollout(script, *wider_prompt, ids, mask), 1.0)
        assert_near(wide, expected, 1e-6)
        wider_response = torch.cat([ids, junk], 1), torch.cat([mask, no], 1)
        wide_rollout = make_rollout(script, prompt_ids, prompt_mask, *wider_response)
        wide = script.compute_logprobs(model, wide_rollout, 1.0)
        assert_near(wide[:, :-3], expected, 1e-6)
        assert (wide[:, -3:] == 0).all()
        other_ids = torch.where(prompt_mask, prompt_ids, 18), torch.where(mask, ids, 17)
        other = make_rollout(script, other_ids[0], prompt_mask, other_ids[1], mask)
        assert_near(script.compute_logprobs(model, other, 1.0), expected, 1e-6)
        order = torch.randperm(len(ids))
        shuffled = script.compute_logprobs(model, rollout.select(order), 1.0)
        assert_near(shuffled, expected[order], 1e-5)
        alone = []
        for i in range(len(ids)):
            alone.append(script.compute_logprobs(model, rollout.select([i]), 1.0))
        assert_near(torch.cat(alone), expected, 1e-5)

    def greedy(prompt_ids, prompt_mask):
        out, counts, _ = script.generate(
            make_args(script, 14), model, prompt_ids, prompt_mask, 1, 0.0, torch.tensor(EOS)
        )
        return [row[count].tolist() for row, count in zip(out, counts, strict=True)]

    prompt_ids, prompt_mask = left_pad(PROMPTS)
    expected = greedy(prompt_ids, prompt_mask)
    junk, no = junk[: len(PROMPTS)], no[: len(PROMPTS)]
    assert greedy(torch.cat([junk, prompt_ids], 1), torch.cat([no, prompt_mask], 1)) == expected
    order = [3, 1, 4, 0, 2]
    assert greedy(prompt_ids[order], prompt_mask[order]) == [expected[i] for i in order]


def test_sampling_in_parts_changes_nothing(script):
    """The sampler needs as few parts as --sampling-tokens allows. A part has at least one prompt."""
    model, sizes, generate = build("Llama"), [], script.generate
    whole, logprobs = roll_out(script, model, samples=2, temperature=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            script, "generate", lambda *args: sizes.append(len(args[2])) or generate(*args)
        )
        # A row has at most 9 prompt tokens and 14 new ones.
        for budget in (1, 2 * 2 * (9 + 14), 4 * 2 * (9 + 14)):
            parts, part_logprobs = roll_out(
                script, model, samples=2, temperature=0.0, sampling_tokens=budget
            )
            assert all(map(torch.equal, parts[:2], whole[:2])) and torch.equal(parts[3], whole[3])
            assert torch.equal(parts[2][parts[3]], whole[2][whole[3]])
            assert_near(part_logprobs, logprobs)
    # The parts are as equal as possible: where 4 prompts fit, 5 are sampled as 3 and 2.
    assert sizes == [1] * 5 + [2, 2, 1] + [3, 2]


@pytest.mark.parametrize("steps", [4, 32])
def test_keys_and_values_keep_to_sampling_tokens(script, segment, steps):
    """With segments of any length, the sampler allocates no more columns than prompt and response can fill."""
    segment(steps)
    model, sizes = build("Llama"), []
    model.register_forward_pre_hook(
        lambda _, ids, inputs: sizes.append(inputs["attention_mask"].shape), with_kwargs=True
    )
    # No row ever ends.
    roll_out(script, model, samples=2, sampling_tokens=2 * 2 * (9 + 14), eos_ids=[V])
    assert max(shape[0] * shape[-1] for shape in sizes) == 2 * 2 * (9 + 14)


@pytest.fixture
def double(monkeypatch):
    """A function that switches the model and the script to float64."""

    def call(model):
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        return model.double()

    yield call
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_micro_batch_budget_never_changes_the_gradient(script, double, beta):
    model = build("Llama")
    rollout, _ = roll_out(script, model)
    double(model)
    mask, generator = rollout.response_mask, torch.Generator().manual_seed(0)
    with torch.no_grad():
        expected = script.compute_logprobs(model, rollout, 0.8)
    # Some ratios lie below the clip range and some above.
    old_logprobs = expected + 0.3 * torch.randn(expected.shape, generator=generator)
    ref_logprobs = expected + 0.3 * torch.randn(expected.shape, generator=generator)
    advantages = torch.randn(len(mask), 1, generator=generator)
    args = make_args(script, 14, 0.8)
    args.beta = beta

    def summed_gradient(budget):
        model.zero_grad()
        total, count = 0.0, 0
        args.micro_batch_tokens = budget
        for i, part in script.micro_batches(args, model, rollout, torch.arange(len(mask))):
            logprobs = script.compute_logprobs(model, part, 0.8)
            slices = (old_logprobs[i], ref_logprobs[i], advantages[i], mask[i])
            loss, _ = script.policy_loss(args, logprobs, *slices, num_seqs=len(mask))
            loss.backward()
            total, count = total + loss.item(), count + 1
        return {name: p.grad.clone() for name, p in model.named_parameters()}, total, count

    whole, loss, count = summed_gradient(10**6)
    assert count == 1
    # With the least budget each of the 15 rows is alone.
    for budget, least in ((1, 15), (60, 4)):
        parts, sum_of_losses, count = summed_gradient(budget)
        assert count >= least
        assert sum_of_losses == pytest.approx(loss, abs=1e-5)
        assert_same_gradients(parts, whole)


# ---- the gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_exactly(script, double, tmp_path, family):
    """In training mode, without and with gradient checkpointing. The prompts begin alike with 6 tokens.

    A micro-batch of all sequences computes them once, or 4 of them. Smaller ones compute any number of tokens once.
    """
    model = load_family(script, family, tmp_path)
    # Ring 2.5 has float32 in its code.
    if not family.startswith("Bailing"):
        double(model).set_experts_implementation("eager")
    rollout = random_rollout(script, [(9, [8, 1, 5]), (7, [12, 3])], beginning=6)
    weights = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(0))
    expected = exact_logprobs(model, rollout, 0.7)
    slow = gradients(model, (expected * weights).sum())
    largest = max(grad.abs().max() for grad in slow.values())
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    is_attention = set(layer_types) <= {"full_attention", "sliding_attention"}
    # Gemma 4 rounds to float32 in between.
    tolerance = 5e-4 if family.startswith(("Bailing", "Gemma 4")) else 5e-5
    model.train()
    for checkpointing in (False, True):
        if checkpointing and not model.supports_gradient_checkpointing:
            with pytest.raises(ValueError, match="does not support activation checkpointing"):
                script.use_checkpointing(model)
            break
        if checkpointing:
            script.use_checkpointing(model)
        splits = []
        for budget in (50, 10**6):
            args = make_args(script, 12, micro_batch_tokens=budget)
            splits.append(script.micro_batches(args, model, rollout, torch.arange(5)))
        assert len(splits[0]) > 1 == len(splits[1])
        assert splits[1][0][1].common == (6 if is_attention else 0)
        splits.append([(list(range(5)), rollout._replace(common=4 if is_attention else 0))])
        for batches in splits:
            model.zero_grad(set_to_none=False)
            for rows, part in batches:
                logprobs = script.compute_logprobs(model, part, 0.7)
                assert_near(logprobs, expected[rows], tolerance)
                (logprobs * weights[rows]).sum().backward()
            for name, parameter in model.named_parameters():
                if name in slow:
                    assert (parameter.grad - slow[name]).abs().max() <= tolerance * largest, name


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_gradient_is_the_same_to_the_last_bit_with_two_threads(script, two_threads):
    """A run on two threads must also be repeatable, so the order of the threads must not change any sum."""
    model = build("Llama", hidden_size=128, head_dim=64, num_key_value_heads=4)
    rollout, _ = roll_out(script, model, samples=16)
    order = torch.randperm(len(rollout.prompt_ids), generator=torch.Generator().manual_seed(0))
    # Without shuffling each thread would have whole groups.
    rollout = rollout.select(order)
    first = gradients(model, script.compute_logprobs(model, rollout, 1.0).sum())
    for _ in range(3):
        again = gradients(model, script.compute_logprobs(model, rollout, 1.0).sum())
        assert all(torch.equal(again[name], grad) for name, grad in first.items())


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, including backward passes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_logits_exist_only_in_chunks_and_are_not_kept_for_the_backward_pass(script, monkeypatch):
    """With this limit and this vocabulary, the logits of at most 16 tokens may exist at a time."""
    monkeypatch.setitem(script.CHUNK_LOGITS, "cpu", 2**20)
    vocab_size = 2**16
    sizes = dict(
        hidden_size=4, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=4
    )
    model = build("Llama", vocab_size=vocab_size, **sizes)
    prompt_ids, prompt_mask = left_pad([[3], [4, 5]])
    ids = torch.randint(0, vocab_size, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(11) < torch.tensor([[11], [9]])
    rollout = make_rollout(script, prompt_ids, prompt_mask, ids, mask)
    saved = []

    def pack(x):
        saved.append(x.numel())
        return x

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logprobs = script.compute_logprobs(model, rollout, 0.7)
        actual = gradients(model, logprobs.sum())
    assert largest.elements <= 2**20 < rollout.response_mask.sum() * vocab_size
    assert max(saved) < 2**20
    expected = [slow_logprobs(model, rollout.select([i]), 0.7) for i in range(2)]
    assert_near(logprobs, torch.cat(expected))
    assert_same_gradients(actual, gradients(model, torch.cat(expected).sum()))


# ---- training mode


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_a_model_in_training_mode_with_checkpointing_is_sampled_as_in_evaluation(script, family):
    """In training mode, gradient checkpointing drops the key-value cache, and GPT-2's dropout is active."""
    model = build(family)
    expected_rollout, expected = roll_out(script, model)
    model.gradient_checkpointing_enable()
    model.train()
    rollout, sampled = roll_out(script, model)
    assert torch.equal(rollout.response_ids, expected_rollout.response_ids)
    assert torch.equal(sampled, expected)
    with torch.no_grad():
        assert_near(sampled, slow_logprobs(model.eval(), rollout, 1.0))


def test_dropout_is_off_in_a_rollout(script):
    model = build("GPT-2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    rollout, sampled = roll_out(script, model)
    model.eval()
    with torch.no_grad():
        assert_near(sampled, script.compute_logprobs(model, rollout, 1.0))
        assert_near(sampled, slow_logprobs(model, rollout, 1.0))
