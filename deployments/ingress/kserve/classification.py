"""Triton's classification extension: instead of an output, its highest values with their places, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.errors import InvalidRequest
from deployments.pipelines.records import TensorValue, text_tensor


def classified(value: TensorValue, num_classes: int, labels: Sequence[str] = ()) -> TensorValue:
    """`value:index` of the `num_classes` highest elements of each item: BYTES (items, at most num_classes).

    With `labels`, one for each element of an item, `value:index:label`. The first dimension counts items; the others
    are one row of classes. Of equal values the earlier comes first, and what is not a number comes last.
    """
    if value.datatype == "BYTES":
        raise InvalidRequest(f"output {value.name!r} is text: it has no highest values", value.name)
    num_items = value.shape[0] if value.shape else 1
    data = value.data.astype(np.uint8) if value.data.dtype == np.bool_ else value.data
    rows = data.reshape(num_items, -1) if data.size else data.reshape(num_items, 0)
    best = [_descending(row)[:num_classes] for row in rows]
    named = [f":{label}" for label in labels] if len(labels) == rows.shape[1] else [""] * rows.shape[1]
    cells = [f"{row[index]}:{index}{named[index]}" for row, order in zip(rows, best, strict=True) for index in order]
    found = text_tensor(value.name, cells)
    return TensorValue(value.name, "BYTES", found.data.reshape(num_items, min(num_classes, rows.shape[1])))


def _descending(row: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    if row.dtype.kind not in "biu":  # bfloat16 is of no kind that numpy knows
        row = row.astype(np.float64)
        row = np.where(np.isnan(row), -np.inf, row)
    # Ascending and stable from the end: reversed, that is descending with the earlier of equal values first.
    return (len(row) - 1 - np.argsort(row[::-1], kind="stable"))[::-1]
