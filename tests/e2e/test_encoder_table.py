"""The whole table of encoders and classifiers: what it calls served equals stock, and what it calls refused is."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.seeding import seeded_random

from infra.supported.encoders import CLASSIFIERS, ENCODERS, Row, make_model, measure_difference, why_refused

pytestmark = pytest.mark.long


def test_the_table_is_as_long_as_it_is_said_to_be() -> None:
    assert len([row for row in ENCODERS if not row.refused]) >= 40


@pytest.mark.parametrize("row", [*ENCODERS, *CLASSIFIERS], ids=lambda row: row.class_name)
def test_a_class_equals_stock_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = make_model(tmp_path, row)
    if row.refused:
        assert row.refused in why_refused(tmp_path)
    else:
        assert why_refused(tmp_path) == ""
        assert measure_difference(tmp_path, module, seeded_random()) < 1e-5
