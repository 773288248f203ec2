"""masked_sum and masked_mean agree with a slow loop, and a masked slot never changes a result or a gradient."""

import math

import pytest
import torch

from utils.masking import masked_mean, masked_sum

GARBAGE = [math.nan, math.inf, -math.inf, 1e38]
both = pytest.mark.parametrize("function", [masked_mean, masked_sum])


def random_case(seed, rows=4, columns=7):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    return values, mask


def slow_sum(values, mask):
    return math.fsum(x for x, counts in zip(values.tolist(), mask.tolist(), strict=True) if counts)


def test_numbers_worked_by_hand():
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask).item() == 7.0
    assert masked_sum(values, mask, axis=1).tolist() == [3.0, 4.0]
    assert masked_sum(values, mask, axis=1, constant_normalizer=2).tolist() == [1.5, 2.0]
    # DAPO takes the mean over all tokens; GRPO takes the mean of the rows' means.
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values, mask, axis=1).mean().item() == pytest.approx((1.5 + 4.0) / 2)
    # The mean of integers is a fraction.
    assert masked_mean(torch.tensor([3, 4, 100]), torch.tensor([True, True, False])).item() == 3.5


@pytest.mark.parametrize("seed", range(10))
def test_equals_a_slow_loop(seed):
    values, mask = random_case(seed, rows=1 + seed % 4, columns=1 + seed % 5)
    lines = {0: (values.T, mask.T), 1: (values, mask), None: (values.view(1, -1), mask.view(1, -1))}
    for axis, (rows, masks) in lines.items():
        sums = [slow_sum(*pair) for pair in zip(rows, masks, strict=True)]
        counts = [max(1, int(row.sum())) for row in masks]
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        found = masked_sum(values, mask, axis, constant_normalizer=2.5).view(-1)
        assert found.tolist() == pytest.approx([total / 2.5 for total in sums], abs=1e-12)
        assert masked_mean(values, mask, axis).view(-1).tolist() == pytest.approx(means, abs=1e-12)
        # A normalizer may have a number for each row.
        normalizer = torch.tensor(counts) if axis is not None else counts[0]
        found = masked_sum(values, mask, axis, constant_normalizer=normalizer).view(-1)
        assert found.tolist() == pytest.approx(means, abs=1e-12)


@pytest.mark.parametrize("junk", GARBAGE)
@pytest.mark.parametrize("axis", [None, 0, 1])
@both
def test_garbage_reaches_neither_value_nor_gradient(function, axis, junk):
    """Nor are the inputs modified."""
    clean, mask = random_case(0)
    clean.requires_grad_()
    dirty = torch.where(mask, clean.detach(), junk).requires_grad_()
    before = dirty.detach().clone()
    # The square makes the gradient depend on the value. An upstream gradient of 1 everywhere would hide a mix-up.
    (function(clean, mask, axis) ** 2).sum().backward()
    result = function(dirty, mask, axis)
    (result**2).sum().backward()

    assert torch.equal(result, function(clean, mask, axis))
    assert torch.equal(dirty.grad, clean.grad)
    assert (dirty.grad[~mask] == 0).all() and (dirty.grad[mask] != 0).all()
    assert torch.equal(dirty.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("junk", [1.0, *GARBAGE])
@both
def test_all_masked_row_is_zero_and_leaves_the_others_alone(function, junk):
    values = torch.tensor([[1.0, 2.0, 3.0], [junk] * 3], requires_grad=True)
    mask = torch.tensor([[True, True, False], [False] * 3])
    rows = function(values, mask, axis=1)
    rows.sum().backward()
    share = 0.5 if function is masked_mean else 1.0
    assert rows.tolist() == [3 * share, 0.0]
    assert values.grad.tolist() == [[share, share, 0.0], [0.0, 0.0, 0.0]]
    assert function(values, torch.zeros_like(mask)).item() == 0.0
    # No tokens at all.
    assert function(torch.empty(0, 5), torch.empty(0, 5, dtype=torch.bool)).item() == 0.0


@both
def test_gradient_equals_finite_differences(function):
    values, mask = random_case(1)
    mask[2] = False
    values.requires_grad_()
    for axis in (None, 0, 1, (0, 1)):
        assert torch.autograd.gradcheck(lambda v, axis=axis: function(v, mask, axis), (values,))


@both
def test_a_mask_of_another_dtype_is_a_yes_or_no_and_not_a_weight(function):
    """The result has the dtype of the values."""
    values, mask = random_case(2)
    for dtype in (torch.int64, torch.float32):
        assert torch.equal(function(values, mask.to(dtype) * 3, 1), function(values, mask, 1))
    assert function(values.bfloat16(), mask, 1).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(4, 1), (1, 7), (7,), (4, 6), (4, 7, 1)])
@both
def test_a_mask_that_would_broadcast_is_refused(function, shape):
    with pytest.raises(AssertionError, match="shape"):
        function(torch.ones(4, 7), torch.ones(shape, dtype=torch.bool))
