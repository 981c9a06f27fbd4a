"""KuiperLLama's group-wise int8: w = q * scale, one float32 scale per `group_size` elements of the row-major tensor.

Groups are flat: they cross rows where these are no whole number of groups. Source: tools/export.py, `quantize_q80`,
but for groups of zeros, which have scale 0 here and give NaN there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weights.errors import WeightsError

DEFAULT_GROUP_SIZE = 64


def quantize(
    array: npt.NDArray[np.float32], group_size: int = DEFAULT_GROUP_SIZE
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """`array` as int8 of the same shape and scales [size / group_size]: absmax / 127, rounded half to even.

    Raises WeightsError for a tensor that is no whole number of groups, or has infinities or NaNs.
    """
    _check_groups(array.size, group_size)
    groups = np.ascontiguousarray(array, np.float32).reshape(-1, group_size)
    absmax = np.abs(groups).max(axis=1, initial=0)
    if not np.isfinite(absmax).all():
        raise WeightsError(f"int8 cannot express the infinities or NaNs of a tensor of shape {list(array.shape)}")
    scales = absmax / np.float32(127)
    # Where the scale is 0 so is the group, or too small for a scale; near there a rounded scale may give 128.
    quotients = np.divide(groups, scales[:, None], out=np.zeros_like(groups), where=scales[:, None] > 0)
    return np.rint(quotients).clip(-127, 127).astype(np.int8).reshape(array.shape), scales


def dequantize(
    values: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], group_size: int = DEFAULT_GROUP_SIZE
) -> npt.NDArray[np.float32]:
    """float32 of the shape of `values`. Raises WeightsError when the scales are not one per group."""
    _check_groups(values.size, group_size)
    num_groups = values.size // group_size
    if scales.size != num_groups:
        raise WeightsError(f"{num_groups} groups of {group_size} elements take as many scales, {scales.size} came")
    groups = values.reshape(-1, group_size).astype(np.float32)
    return (groups * scales.reshape(-1, 1)).reshape(values.shape)


def _check_groups(size: int, group_size: int) -> None:
    if group_size <= 0 or size % group_size:
        raise WeightsError(f"{size} elements are no whole number of groups of {group_size}")
