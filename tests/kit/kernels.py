"""Compiled kernels in tests: on a processor where they are the faster ones, or where they multiply bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

needs_half_products: Final = pytest.mark.usefixtures("half_products")


@pytest.fixture
def half_products() -> None:
    from deployments.engines.nn.few_rows import has_half_products  # loads torch

    if not has_half_products():
        pytest.skip("no products of bfloat16 on this processor")


@pytest.fixture
def faster_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor where the kernels are the faster ones, and torch's threads as they were."""
    import torch

    from deployments.engines.nn import few_rows

    before = torch.get_num_threads()
    monkeypatch.setattr(few_rows, "processor_name", lambda: "AMD EPYC 9R14")
    few_rows.are_kernels_faster.cache_clear()
    yield
    torch.set_num_threads(before)
    few_rows.are_kernels_faster.cache_clear()
