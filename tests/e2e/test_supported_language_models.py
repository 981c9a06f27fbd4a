"""Every causal language model that is said to be served, tiny, beside its own `generate`."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.llm.models.stock_classes import SEEING
from infra.supported import vision_models
from infra.supported.language_models import failure, rows

pytestmark = pytest.mark.long
SERVED = [row.class_name for row in rows() if not row.way.startswith("refused") and row.class_name not in SEEING]


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products on several threads cost far more in waiting than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("class_name", SERVED)
def test_a_class_equals_its_own_generate(class_name):
    assert failure(class_name, num_tokens=64) == ""


@pytest.mark.parametrize("class_name", sorted(SEEING))
def test_a_class_that_sees_equals_its_own_generate(class_name):
    assert vision_models.failure(class_name) == ""
