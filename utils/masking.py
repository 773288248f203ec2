"""Sums and means over the tokens that count.

A masked slot may hold anything: padding, or NaN and inf that a kernel left there. These functions
replace such a value with 0. They don't multiply it by 0, because NaN * 0 is NaN in the value and in
the gradient. The gradient of a masked slot is exactly 0. But if an earlier operation has an
infinite derivative there, such as exp at inf, the chain rule still gives 0 * inf.
"""

import torch


def masked_sum(values, mask, axis=None, constant_normalizer=1.0):
    """Sum of `values` where `mask` is True, divided by `constant_normalizer`.

    values: any shape.
    mask: the same shape, bool or castable to bool. Another shape raises AssertionError, because a
        broadcast mask counts tokens twice.
    axis: int, tuple of ints, or None for all axes.
    constant_normalizer: float, or a tensor that broadcasts with the result.

    Returns `values` summed over `axis`. Where no token counts, the sum and its gradient are 0.
    """
    assert values.shape == mask.shape, (
        f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape"
    )
    return torch.where(mask.bool(), values, 0).sum(axis) / constant_normalizer


def masked_mean(values, mask, axis=None):
    """Mean of `values` where `mask` is True. Arguments and errors are those of `masked_sum`.

    Returns the mean over `axis`. Where no token counts, the mean and its gradient are 0, not 0 / 0.
    """
    return masked_sum(values, mask, axis, constant_normalizer=mask.bool().sum(axis).clamp(min=1))
