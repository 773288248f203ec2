"""Rows that hold a prompt and several of its responses: log-probabilities, values, scores and gradients.

The reference is a forward pass of each sequence alone. Which sequences share a row is told by hand. test_sampling.py
has the model families, and test_whole_step.py the steps of all scripts.
"""

from types import SimpleNamespace

import pytest
import torch
from families import random_model, small_config
from test_lora import adapted
from test_lora import make_args as lora_args
from test_ppo_equations import tiny_classifier
from test_sampling import V, assert_near, assert_same_gradients, build, gradients
from test_sampling import double as double  # the fixtures
from test_sampling import two_threads as two_threads

import grpo
import grpo_lora
import grpo_tools
import ppo_rlhf
import vapo

# Lengths of (prompt, its responses). One response has one token, and two groups have the same prompt. Prompts of 3 and
# 10 tokens have rows of at most 12 and 40 tokens.
GROUPS = [(10, [8, 1, 12, 9, 5]), (3, [4, 4, 6, 2, 1]), (10, [7, 30, 3, 2, 25]), (7, [6, 3, 21])]
GROUPS += [(7, [1, 2, 9])]
ROWS = [
    # 10 + 8 + 1 + 12 + 9 = 40 tokens, and the fifth response would be too much.
    (40, [0, 1, 2, 3]),
    (15, [4]),
    (11, [5, 6]),
    (12, [7, 8, 9]),  # as long as a row of this prompt may be
    (17, [10]),
    (40, [11]),
    (40, [12, 13, 14]),
    (16, [15, 16]),
    # The prompts of both last groups are equal, so this row has responses of both.
    (28, [17]),
    (19, [18, 19, 20]),
]


def make_rollout(script=grpo, groups=GROUPS):
    """A Rollout of random ids. The last two groups have the same prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts, counts = [], []
    for P, lengths in groups:
        prompt = torch.randint(0, V, (P,), generator=generator)
        prompts += [prompt] * len(lengths)
        counts += lengths
    if groups is GROUPS:
        prompts[-3:] = [prompts[-4]] * 3
    N, R, P = len(counts), max(counts), max(map(len, prompts))
    # Padding has any ids.
    prompt_ids = torch.randint(0, V, (N, P), generator=generator)
    for row, prompt in zip(prompt_ids, prompts, strict=True):
        row[P - len(prompt) :] = prompt
    prompt_mask = torch.arange(P) >= P - torch.tensor([[len(prompt)] for prompt in prompts])
    response_ids = torch.randint(0, V, (N, R), generator=generator)
    mask = torch.arange(R) < torch.tensor(counts)[:, None]
    tensors = [prompt_ids, prompt_mask, response_ids, mask]
    rest = [torch.zeros(N, R)]
    if script is grpo_tools:
        # The policy wrote three of four tokens, and all first ones.
        policy_mask = mask & (torch.arange(R) % 4 != 2)
        tensors[3], rest = policy_mask, [mask, *rest]
    return script.Rollout(*tensors, *rest)


def alone(rollout, i, outputs):
    """outputs (P + R - 1, D) of a forward pass of sequence i alone, where they predict its response's tokens (R, D)."""
    mask = getattr(rollout, "context_mask", rollout.response_mask)[i]
    prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]
    response = rollout.response_ids[i][mask]
    return outputs(torch.cat([prompt, response])[None])[0, len(prompt) - 1 : -1], response


def slow_logprobs(model, rollout, temperature):
    """(n, R), one forward pass for each sequence."""
    table = torch.zeros(rollout.response_ids.shape)
    for i in range(len(table)):
        logits, response = alone(rollout, i, lambda ids: model(ids, use_cache=False).logits)
        logprobs = (logits / temperature).log_softmax(1).gather(1, response[:, None])[:, 0]
        table[i, : len(response)] = logprobs
    return table.masked_fill(~rollout.response_mask, 0.0)


LARGE = SimpleNamespace(micro_batch_tokens=10**6)


def rows_of(args, model, rollout, sequences):
    """The packs as pairs of a length and a list of indices."""
    packs = grpo.make_packs(args, model, rollout, sequences)
    return [(pack.length, pack.members) for pack in packs]


def micro_batches(script, model, rollout, sequences, budget=100):
    return script.micro_batches(
        SimpleNamespace(micro_batch_tokens=budget), model, rollout, sequences
    )


def weights_of(rollout):
    """Random weights for a loss: its gradient needs each log-probability."""
    shape = rollout.response_mask.shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * rollout.response_mask


def assert_rows_are_shared(batches):
    assert max(max(map(part.pack_of.count, part.pack_of)) for _, part in batches) >= 2


def compare(script, model, rollout, parameters=None):
    """Log-probabilities and gradients of whole rollouts and of halves that split groups, against single sequences."""
    weights, N = weights_of(rollout), len(rollout.prompt_ids)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    for sequences in (torch.arange(N), shuffled[: N // 2], shuffled[:1]):
        batches = micro_batches(script, model, rollout, sequences)
        if len(sequences) > 1:
            assert_rows_are_shared(batches)
        assert sorted(sum([rows for rows, _ in batches], [])) == sorted(sequences.tolist())
        chosen = rollout.select(sequences.tolist())
        expected = slow_logprobs(model, chosen, 0.7)
        slow = gradients(model, (expected * weights[sequences]).sum())
        model.zero_grad()
        logprobs = torch.zeros(rollout.response_ids.shape)
        for rows, part in batches:
            found = script.compute_logprobs(model, part, 0.7)
            (found * weights[rows]).sum().backward()
            logprobs[rows] = found.detach()
        assert_near(logprobs[sequences], expected)
        fast = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert_same_gradients(fast, slow)


@pytest.mark.parametrize("module", [grpo, grpo_tools])
@pytest.mark.parametrize("family", ["Llama, tied head", "GPT-2", "GPT-J"])
def test_log_probabilities_and_gradients_are_those_of_single_sequences(double, module, family):
    # GPT-J's attention is its own code, which adds a mask of truth values as 0 and 1.
    model = random_model(small_config("GPT-J")) if family == "GPT-J" else build(family)
    compare(module, double(model), make_rollout(module))


def test_with_gradient_checkpointing(double):
    model = double(build("Llama"))
    model.gradient_checkpointing_enable(dict(use_reentrant=False, preserve_rng_state=False))
    compare(grpo, model.train(), make_rollout())


def test_the_gradients_of_adapters(double):
    model = adapted(lora_args(), build("Llama"))
    compare(grpo_lora, double(model), make_rollout(grpo_lora))
    assert {name[-6:] for name, p in model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }


@pytest.mark.parametrize("module", [ppo_rlhf, vapo])
def test_values_and_their_gradients(double, module):
    network = double(tiny_classifier())
    rollout = make_rollout(module)
    rollout = rollout._replace(
        prompt_ids=rollout.prompt_ids % 30, response_ids=rollout.response_ids % 30
    )
    weights = weights_of(rollout)

    def outputs(ids):
        return network.score(network.base_model(ids).last_hidden_state)

    expected = torch.zeros(weights.shape)
    for i in range(len(weights)):
        values, response = alone(rollout, i, outputs)
        expected[i, : len(response)] = values[:, 0]
    slow = gradients(network, (expected * weights).sum())
    network.zero_grad()
    batches = micro_batches(module, network, rollout, torch.arange(len(weights)))
    assert_rows_are_shared(batches)
    for rows, part in batches:
        values = module.compute_values(network, part)
        (values * weights[rows]).sum().backward()
        assert_near(values, expected[rows])
    fast = {name: p.grad.clone() for name, p in network.named_parameters()}
    assert_same_gradients(fast, slow)
    if module is ppo_rlhf:
        scores = ppo_rlhf.rollout_scores(ppo_rlhf.Args(micro_batch_tokens=100), network, rollout)
        for i, score in enumerate(scores):
            tokens = [rollout.prompt_ids[i][rollout.prompt_mask[i]]]
            tokens += [rollout.response_ids[i][rollout.response_mask[i]]]
            assert_near(score, network(torch.cat(tokens)[None]).logits[0, 0])


# ---- which sequences share a row


def test_rows_by_hand():
    rollout, model = make_rollout(), build("Llama")
    rows = rows_of(LARGE, model, rollout, torch.arange(21))
    assert rows == sorted(ROWS, key=lambda row: -row[0])  # rows of equal length in their order
    # Neighbors are those of a minibatch, in any order.
    rows = rows_of(LARGE, model, rollout, torch.tensor([20, 4, 0, 15, 2, 9]))
    assert rows == [(35, [0, 2, 4]), (22, [15, 20]), (4, [9])]


@pytest.mark.parametrize("module", [grpo, grpo_tools])
def test_micro_batches_keep_to_the_budget(module):
    """A micro-batch's rows times its longest row is at most --micro-batch-tokens, unless it has one sequence."""
    rollout, model = make_rollout(module), build("Llama")
    # A tool's tokens take memory, too.
    mask = getattr(rollout, "context_mask", rollout.response_mask)
    prompt_lengths, response_lengths = rollout.prompt_mask.sum(1), mask.sum(1)
    for budget in (1, 30, 40, 99, 10**6):
        batches = micro_batches(module, model, rollout, torch.arange(21), budget)
        assert sorted(sum([rows for rows, _ in batches], [])) == list(range(21))
        for rows, part in batches:
            lengths = []
            for r in range(part.pack_of[-1] + 1):
                members = [i for i, row in zip(rows, part.pack_of, strict=True) if row == r]
                lengths.append(prompt_lengths[members[0]] + response_lengths[members].sum())
            assert len(rows) == 1 or len(lengths) * max(lengths) <= budget
            assert torch.equal(part.response_ids, rollout.response_ids[rows])
    assert len(batches) == 1


WINDOW = dict(sliding_window=40)
ALONE = {
    "linear attention": dict(layer_types=["full_attention", "linear_attention"]),
    "a convolution": dict(layer_types=["conv", "full_attention"]),
    "attention beside a state": dict(layer_types=["hybrid", "hybrid"]),
    "attention in chunks": dict(layer_types=["chunked_attention", "full_attention"]),
    # The longest sequence has 40 tokens.
    "a window": dict(sliding_window=39),
    "a window in one layer": dict(
        sliding_window=39, layer_types=["sliding_attention", "full_attention"]
    ),
    "GPT-Neo's window": dict(window_size=39),
    "Doge's window": dict(keep_window_size=39),
}


def model_of(**fields):
    """What make_packs asks a model: its configuration, and whether it takes positions."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**fields))
    network = SimpleNamespace(forward=lambda input_ids, position_ids: None)
    return SimpleNamespace(config=config, base_model=network)


@pytest.mark.parametrize("name", ALONE)
def test_what_the_mask_can_not_hide_keeps_its_own_row(name):
    model = model_of(**ALONE[name])
    rows = rows_of(LARGE, model, make_rollout(), torch.arange(21))
    assert [row for _, row in rows if len(row) > 1] == []


def test_a_model_that_counts_columns_keeps_its_own_rows():
    """MPT takes no positions: its attention measures distances in columns."""
    model = random_model(small_config("MPT"))
    rows = rows_of(LARGE, model, make_rollout(), torch.arange(21))
    assert [row for _, row in rows if len(row) > 1] == []
    assert any(
        len(row) > 1 for _, row in rows_of(LARGE, build("Llama"), make_rollout(), torch.arange(21))
    )


def test_a_row_may_be_longer_than_the_context():
    """GPT-2 has a weight for each position. The padding of a shorter row takes none beyond the context."""
    rollout = make_rollout(groups=[(10, [9, 8, 9]), (8, [2, 2])])
    longest = int((rollout.prompt_mask.sum(1) + rollout.response_mask.sum(1)).max())
    model = build("GPT-2", n_positions=longest)
    ((rows, part),) = micro_batches(grpo, model, rollout, torch.arange(5), 10**6)
    # Each prompt has a row, and the first is longer than the context.
    assert part.pack_of == [0, 0, 0, 1, 1]
    found = grpo.compute_logprobs(model, part, 0.7)
    assert_near(found, slow_logprobs(model, rollout.select(rows), 0.7))


def test_a_row_fits_into_the_window():
    model = model_of(sliding_window=24, layer_types=None)
    rollout = make_rollout(groups=[(10, [5, 5, 4, 1, 14])])
    rows = rows_of(LARGE, model, rollout, torch.arange(5))
    assert rows == [(24, [0, 1, 2]), (24, [4]), (11, [3])]


# ---- rows with one response


def test_without_shared_rows_nothing_changes_to_the_last_bit():
    """One sample a prompt: the model gets the padded sequences, positions 0, 1, .. and no mask, as it did before."""
    model = build("Llama")
    rollout = make_rollout(groups=[(10, [8]), (3, [1]), (7, [12]), (5, [2])])
    N, R = rollout.response_ids.shape
    called = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, inputs, given: called.append(given), with_kwargs=True
    )
    ((rows, part),) = micro_batches(grpo, model, rollout, torch.arange(N), 10**6)
    logprobs = grpo.compute_logprobs(model, part, 0.7)
    fast = gradients(model, logprobs.sum())
    hook.remove()
    assert rows == [2, 0, 3, 1]  # the longest first
    (given,) = called
    assert given["attention_mask"] is None
    sequences = []
    for i in rows:
        tokens = [rollout.prompt_ids[i][rollout.prompt_mask[i]]]
        sequences.append(torch.cat([*tokens, rollout.response_ids[i][rollout.response_mask[i]]]))
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)[:, :-1]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    assert torch.equal(given["position_ids"], positions)
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    states, targets = [], []
    for k, i in enumerate(rows):
        P, length = int(rollout.prompt_mask[i].sum()), int(rollout.response_mask[i].sum())
        states.append(hidden.last_hidden_state[k, P - 1 : P + length - 1])
        targets.append(sequences[k][P:])
    logits = model.lm_head(torch.cat(states)) / 0.7
    expected = -torch.nn.functional.cross_entropy(logits, torch.cat(targets), reduction="none")
    assert torch.equal(logprobs[part.response_mask], expected)
    slow = gradients(model, expected.sum())
    assert all(torch.equal(fast[name], grad) for name, grad in slow.items())


def test_the_gradient_is_the_same_to_the_last_bit_with_two_threads(two_threads):
    """The responses of a row add their gradients to one state of the prompt, in an order that no thread changes."""
    model = build("Llama", hidden_size=128, head_dim=64, num_key_value_heads=4)
    rollout = make_rollout(groups=[(400, [3] * 120)])
    ((_, part),) = micro_batches(grpo, model, rollout, torch.arange(120), 10**6)
    assert part.response_mask.sum() * 128 > 2**15  # threads share the work on larger tensors

    def gradient():
        return gradients(model, grpo.compute_logprobs(model, part, 1.0).sum())

    first = gradient()
    for _ in range(3):
        again = gradient()
        assert all(torch.equal(again[name], grad) for name, grad in first.items())
