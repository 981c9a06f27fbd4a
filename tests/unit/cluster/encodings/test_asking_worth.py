"""Questions to the shared tier of encodings, beside what is best for a known stream of texts."""

from __future__ import annotations

import random

import pytest

from cluster.encodings.worth import ASK_EVERY, AskingWorth


def share_asked(worth: AskingWorth, module: str, answer_s: float, cost_s: float, found: float, number: int) -> float:
    """Return the part of `number` texts for which the tier was asked; it has each with the probability `found`."""
    rng, num_asked = random.Random(f"{module} {found}"), 0
    for _ in range(number):
        if worth.is_worth_asking([module]):
            num_asked += 1
            is_found = rng.random() < found
            worth.note_answers([(module, is_found)], answer_s)
        worth.note_computed(module, cost_s)
    return num_asked / number


@pytest.mark.parametrize(
    ("answer_s", "cost_s", "found", "is_asked"),
    [
        (0.003, 0.005, 0.0, False),  # a sentence of its own, a small encoder
        (0.003, 0.005, 0.2, False),
        (0.003, 0.005, 0.95, True),
        (0.003, 0.5, 0.0, False),  # a large one
        (0.003, 0.5, 0.1, True),
        (0.003, 0.001, 1.0, False),
    ],
)
def test_it_is_asked_where_that_is_less_than_what_it_spares(
    answer_s: float, cost_s: float, found: float, is_asked: bool
) -> None:
    worth = AskingWorth()
    share_asked(worth, "m", answer_s, cost_s, found, 400)  # it learns
    share = share_asked(worth, "m", answer_s, cost_s, found, 800)
    if is_asked:
        assert share >= 0.8
    else:
        assert share <= 0.3
        assert share >= 1 / (ASK_EVERY + 1)  # to hear whether that has changed


def test_before_anything_is_known_it_is_asked_and_a_change_is_heard_of() -> None:
    worth = AskingWorth()
    assert worth.is_worth_asking(["m"])
    share_asked(worth, "m", 0.003, 0.02, 0.0, 400)
    assert share_asked(worth, "m", 0.003, 0.02, 0.0, 160) <= 0.1
    share_asked(worth, "m", 0.003, 0.02, 1.0, 480)
    assert share_asked(worth, "m", 0.003, 0.02, 1.0, 160) == 1.0


def test_one_slow_answer_is_no_reason_to_compute_what_another_has() -> None:
    worth = AskingWorth()
    worth.note_answers([("m", True)], 5.0)  # the actor had to start
    worth.note_answers([("m", True)], 0.003)
    worth.note_computed("m", 0.2)
    assert all(worth.is_worth_asking(["m"]) for _ in range(ASK_EVERY))


def test_modules_are_told_apart_and_the_dearest_of_a_request_decides() -> None:
    worth = AskingWorth()
    share_asked(worth, "small", 0.003, 0.002, 0.5, 400)
    share_asked(worth, "large", 0.003, 0.5, 0.5, 400)
    asked = [worth.is_worth_asking(["small"]) for _ in range(ASK_EVERY)]
    assert sum(asked) == 1
    assert all(worth.is_worth_asking(["small", "large"]) for _ in range(ASK_EVERY))
