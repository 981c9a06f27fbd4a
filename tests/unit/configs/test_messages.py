"""Values in messages are short; bounds of two settings are met at both sides."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.admission import AdmissionConfig, ScalingConfig
from configs.errors import shown
from configs.ranks import RanksConfig


def test_a_value_is_shown_in_400_characters() -> None:
    for text in ("x" * 198, "x" * 199, "x" * 5000):
        found = shown(text)
        assert (found == repr(text)) is (len(text) <= 198)
        assert len(found) <= 200
    entries = ["x" * 120] * 3
    assert shown(entries) == repr(entries)
    for length in range(118, 130):  # of lists of three, and of their beginnings
        entries = ["x" * length] * 3
        text = repr(entries)
        assert shown(entries) == (text if len(text) <= 400 else f"{text[:400]}...")


def test_equal_bounds_fit_and_turned_ones_do_not() -> None:
    assert AdmissionConfig(priority_levels=3, default_priority=3).default_priority == 3
    with pytest.raises(ValidationError, match="default_priority 4 is beyond priority_levels 3"):
        AdmissionConfig(priority_levels=3, default_priority=4)
    assert ScalingConfig(min_workers=2, max_workers=2).max_workers == 2
    with pytest.raises(ValidationError, match="min_workers is 3, more than max_workers, 2"):
        ScalingConfig(min_workers=3, max_workers=2)
    assert RanksConfig(tensor=64).size == 64
