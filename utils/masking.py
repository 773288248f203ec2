"""Sums and means over the tokens that count.

What stands in a masked slot (padding, whatever a kernel left there) may be anything, NaN and inf
included, so it is replaced and not multiplied by 0: NaN * 0 is NaN, in the value and in the
gradient. The gradient handed back to a masked slot is exactly 0; an operation before it with an
infinite derivative there, such as exp at inf, still makes 0 * inf.
"""

import torch


def masked_sum(values, mask, axis=None, constant_normalizer=1.0):
    """Sum of `values` where `mask` is True, divided by `constant_normalizer`.

    values: any shape. mask: the same shape, bool or castable to it; another shape is an
    AssertionError, because a broadcast mask counts tokens twice. axis: int, tuple of ints, or None
    for all of them. constant_normalizer: float or a tensor that broadcasts with the result. Returns
    `values` summed over `axis`; 0, with a gradient of 0, where nothing counts.
    """
    assert values.shape == mask.shape, (
        f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape"
    )
    return torch.where(mask.bool(), values, 0).sum(axis) / constant_normalizer


def masked_mean(values, mask, axis=None):
    """Mean of `values` where `mask` is True; arguments and errors as in `masked_sum`.

    Returns the mean over `axis`; 0, with a gradient of 0 and not 0 / 0, where nothing counts.
    """
    return masked_sum(values, mask, axis, constant_normalizer=mask.bool().sum(axis).clamp(min=1))
