"""A control plane has ended users when there were some, and Ray knows none of them any more."""

from __future__ import annotations

from kit.seeding import seeded_random

from cluster.registry.users import Users


def test_one_that_nobody_has_asked_yet_stays_unless_a_process_before_it_was_asked() -> None:
    assert not Users().have_ended([])
    assert Users(had_some=True).have_ended([])
    nobody = Users()
    nobody.add(None)
    nobody.add("")  # an actor without a name
    assert not nobody.have_ended([])


def test_it_ends_with_the_last_one_whatever_the_order_in_which_they_come_and_end() -> None:
    chance = seeded_random()
    for _ in range(200):
        users, running, ended_once = Users(), set[str](), set[str]()
        for number in range(chance.randrange(1, 20)):
            if running and chance.random() < 0.5:
                ended = set(chance.sample(sorted(running), chance.randrange(1, len(running) + 1)))
                running -= ended
                ended_once |= ended
                assert users.have_ended(ended) == (not running)
            else:
                users.add(f"r{number}")
                running.add(f"r{number}")
                assert not users.have_ended(ended_once)
            assert users.names == running
