"""Recent entries, against a list in the order of use."""

from __future__ import annotations

import pytest
from kit.seeding import seeded_random

from weights.residency.recent import Recent


@pytest.mark.parametrize("most", [1, 2, 7])
def test_those_used_last_are_kept(most: int) -> None:
    rng = seeded_random()
    kept: Recent[int, int] = Recent(most)
    order: list[tuple[int, int]] = []
    for number in range(200):
        key, is_new_value = rng.randrange(2 * most + 1), rng.random() < 0.5
        before = dict(order)
        if is_new_value:
            kept.note(key, number)
        else:
            assert kept.used(key, lambda made=number: made) == before.get(key, number)  # type: ignore[misc]
        value = number if is_new_value else before.get(key, number)
        order = [*((one, known) for one, known in order if one != key), (key, value)][-most:]
        assert list(kept.items()) == order


def test_what_cannot_be_made_takes_nothing_away() -> None:
    kept: Recent[str, float] = Recent(1)
    kept.note("a", 1.0)
    with pytest.raises(ZeroDivisionError):
        kept.used("b", lambda: 1 / 0)
    assert kept == {"a": 1.0}
