"""masked_sum and masked_mean agree with a slow loop, and a masked slot never changes a result or a gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.masking import masked_mean, masked_sum

GARBAGE = [math.nan, math.inf, -math.inf, 1e38]


def slow_sum(row, mask):
    return math.fsum(value for value, counts in zip(row, mask, strict=True) if counts)


def slow_mean(row, mask):
    return slow_sum(row, mask) / max(1, sum(mask))


def random_case(seed, rows=4, columns=7):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    return values, mask


@st.composite
def tables(draw):
    """A rectangle of numbers, a mask, and the same rectangle with garbage in the masked slots."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    number = st.floats(-100, 100, allow_subnormal=False)
    values = draw(
        st.lists(st.lists(number, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
    mask = draw(
        st.lists(
            st.lists(st.booleans(), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
    junk = draw(st.sampled_from(GARBAGE))
    dirty = [
        [v if m else junk for v, m in zip(*pair, strict=True)]
        for pair in zip(values, mask, strict=True)
    ]
    return values, mask, dirty


@settings(max_examples=100, deadline=None)
@given(tables(), st.floats(0.5, 50))
def test_equals_a_slow_loop_whatever_stands_in_masked_slots(table, normalizer):
    values, mask, dirty = table
    x = torch.tensor(dirty, dtype=torch.float64)
    m = torch.tensor(mask)
    flat, flat_mask = sum(values, []), sum(mask, [])
    near = {"rel": 1e-12, "abs": 1e-10}

    assert masked_sum(x, m).item() == pytest.approx(slow_sum(flat, flat_mask), **near)
    assert masked_mean(x, m).item() == pytest.approx(slow_mean(flat, flat_mask), **near)
    by_row = list(zip(values, mask, strict=True))
    by_column = list(zip(zip(*values, strict=True), zip(*mask, strict=True), strict=True))
    for axis, lines in ((0, by_column), (1, by_row), (-1, by_row)):
        expected = [slow_sum(*line) / normalizer for line in lines]
        assert masked_sum(x, m, axis, constant_normalizer=normalizer).tolist() == pytest.approx(
            expected, **near
        )
        assert masked_mean(x, m, axis).tolist() == pytest.approx(
            [slow_mean(*line) for line in lines], **near
        )


def test_numbers_worked_by_hand():
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask).item() == 7.0
    assert masked_sum(values, mask, axis=1).tolist() == [3.0, 4.0]
    assert masked_sum(values, mask, axis=1, constant_normalizer=2).tolist() == [1.5, 2.0]
    # DAPO takes the mean over all tokens; GRPO takes the mean of the rows' means.
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values, mask, axis=1).mean().item() == pytest.approx((1.5 + 4.0) / 2)


@pytest.mark.parametrize("junk", GARBAGE)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_garbage_reaches_neither_value_nor_gradient(function, axis, junk):
    clean, mask = random_case(0)
    clean.requires_grad_()
    dirty = torch.where(mask, clean.detach(), junk).requires_grad_()
    # The square makes the gradient depend on the value. An upstream gradient of 1 everywhere would hide a mix-up.
    (function(clean, mask, axis) ** 2).sum().backward()
    result = function(dirty, mask, axis)
    (result**2).sum().backward()

    assert torch.equal(result, function(clean, mask, axis))
    assert torch.equal(dirty.grad, clean.grad)
    assert (dirty.grad[~mask] == 0).all() and (dirty.grad[mask] != 0).all()


@pytest.mark.parametrize("junk", [1.0, *GARBAGE])
@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_all_masked_row_is_zero_and_leaves_the_others_alone(function, junk):
    values = torch.tensor([[1.0, 2.0, 3.0], [junk] * 3], requires_grad=True)
    mask = torch.tensor([[True, True, False], [False] * 3])
    rows = function(values, mask, axis=1)
    rows.sum().backward()
    share = 0.5 if function is masked_mean else 1.0
    assert rows.tolist() == [3 * share, 0.0]
    assert values.grad.tolist() == [[share, share, 0.0], [0.0, 0.0, 0.0]]
    assert function(values, torch.zeros_like(mask)).item() == 0.0


@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_no_tokens_at_all_is_zero(function):
    assert function(torch.empty(0, 5), torch.empty(0, 5, dtype=torch.bool)).item() == 0.0
    assert (
        function(torch.empty(3, 0), torch.empty(3, 0, dtype=torch.bool), axis=1).tolist()
        == [0.0] * 3
    )


@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_gradient_equals_finite_differences(function):
    values, mask = random_case(1)
    mask[2] = False
    values.requires_grad_()
    for axis in (None, 0, 1, (0, 1)):
        assert torch.autograd.gradcheck(lambda v, axis=axis: function(v, mask, axis), (values,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_mask_of_another_dtype_is_a_yes_or_no_and_not_a_weight(function, dtype):
    values, mask = random_case(2)
    assert torch.equal(function(values, mask.to(dtype) * 3, 1), function(values, mask, 1))


@pytest.mark.parametrize("mask_shape", [(4, 1), (1, 7), (7,), (1,), (4, 6), (4, 7, 1)])
@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_a_mask_that_would_broadcast_is_refused(function, mask_shape):
    with pytest.raises(AssertionError, match="shape"):
        function(torch.ones(4, 7), torch.ones(mask_shape, dtype=torch.bool))


def test_sums_of_slices_add_up_with_a_constant_normalizer():
    """The token average of a minibatch must not depend on the split into micro-batches."""
    values, mask = random_case(3, rows=6)
    num_tokens = mask.sum()
    parts = [
        masked_sum(values[i:j], mask[i:j], constant_normalizer=num_tokens)
        for i, j in ((0, 1), (1, 4), (4, 6))
    ]
    assert sum(parts).item() == pytest.approx(masked_mean(values, mask).item(), rel=1e-12)


def test_normalizer_per_row():
    values, mask = random_case(4)
    mask[:, 0] = True
    lengths = mask.sum(1)
    torch.testing.assert_close(
        masked_sum(values, mask, 1, constant_normalizer=lengths), masked_mean(values, mask, 1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", [masked_mean, masked_sum])
def test_dtype_is_kept_and_inputs_are_not_modified(function, dtype):
    values, mask = random_case(5)
    values = torch.where(mask, values, math.nan).to(dtype)
    before, mask_before = values.clone(), mask.clone()
    assert function(values, mask, 1).dtype == dtype
    assert torch.equal(mask, mask_before)
    assert torch.equal(torch.nan_to_num(values), torch.nan_to_num(before)) and values.isnan().equal(
        before.isnan()
    )


def test_mean_of_integers_is_a_fraction():
    lengths = torch.tensor([3, 4, 100])
    assert masked_mean(lengths, torch.tensor([True, True, False])).item() == 3.5
