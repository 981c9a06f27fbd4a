"""A control plane ends when another one of its cluster has taken its place, and only then."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.registry.superseding import ASK_S, EXPECTED_S, IN_USE_S, UNUSED_S, Use, UseBook, is_superseded

USED, UNUSED = Use(0.0), Use(UNUSED_S)
LOOK_S = 5.0  # between two looks of a registry


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (UNUSED, [USED], True),
        (UNUSED, [Use(1e6), Use(IN_USE_S)], True),
        (UNUSED, [], False),
        (UNUSED, [UNUSED, Use(1e6)], False),  # Serve is away
        (Use(1e6), [Use(IN_USE_S + 0.1)], False),
        (UNUSED, [Use(0.0, is_expected=True)], False),  # it has started, and its replicas have yet to come
        (Use(UNUSED_S - 0.1), [USED], False),
        (Use(1e6, is_unclear=True), [USED], False),
        (Use(EXPECTED_S - 1, is_expected=True), [USED], False),
        (Use(EXPECTED_S, is_expected=True), [USED], True),
    ],
)
def test_one_ends_when_it_is_unused_for_long_and_another_is_in_use(own: Use, others: list[Use], expected: bool) -> None:
    assert is_superseded(own, others) is expected


def test_a_book_tells_how_long_no_replica_was_seen(clock: Clock) -> None:
    book = UseBook(clock)
    clock.now_s += 3
    assert book.use(is_unclear=True) == Use(3.0, is_expected=True, is_unclear=True)
    book.note()
    clock.now_s += 7
    assert book.use(is_unclear=False) == Use(7.0)


def test_who_watches_is_seen_all_the_time_and_the_last_one_when_it_ends(clock: Clock) -> None:
    book = UseBook(clock)
    with book.watching():
        with book.watching():
            clock.now_s += 1000
        clock.now_s += 1000
        assert book.use(is_unclear=False) == Use(0.0)
    clock.now_s += 2
    assert book.use(is_unclear=False) == Use(2.0)


def test_what_is_deployed_again_waits_for_its_replicas(clock: Clock) -> None:
    book = UseBook(clock)
    book.note()
    clock.now_s += UNUSED_S
    assert is_superseded(book.use(is_unclear=False), [USED])
    book.expect()
    clock.now_s += EXPECTED_S - 1
    assert not is_superseded(book.use(is_unclear=False), [USED])
    book.note()
    assert book.use(is_unclear=False) == Use(0.0)


class Plane:
    """A control plane of the world below: its registry, which may be started anew, and the replicas that it has."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.replicas = 0
        self.ended_s: float | None = None
        self.start()

    def start(self) -> None:
        self.book = UseBook(self._clock)

    def ask_keepers(self) -> None:
        if self.replicas:
            self.book.note()

    def use(self) -> Use:
        return self.book.use(is_unclear=False)


class World:
    """Some control planes of one cluster, each of which looks at the others every `LOOK_S`.

    Answers take up to `ASK_S`, and what happens meanwhile happens in the order of time.
    """

    def __init__(self, num_planes: int, seed: int) -> None:
        self.clock = Clock()
        self._chance = random.Random(seed)
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.planes = [Plane(self.clock) for _ in range(num_planes)]
        for plane in self.planes:
            self.later(self._chance.uniform(0, LOOK_S), lambda plane=plane: self._look(plane))  # type: ignore[misc]

    def later(self, in_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock.now_s + in_s, next(self._numbers), what))

    def run(self, for_s: float) -> None:
        until_s = self.clock.now_s + for_s
        while self._due[0][0] <= until_s:
            self.clock.now_s, _, what = heapq.heappop(self._due)
            what()
        self.clock.now_s = until_s

    @property
    def alive(self) -> list[Plane]:
        return [plane for plane in self.planes if plane.ended_s is None]

    def _look(self, plane: Plane) -> None:
        if plane.ended_s is not None:
            return
        plane.ask_keepers()
        answers: list[Use] = []
        asked = [other for other in self.alive if other is not plane]
        longest_s = self._chance.uniform(0, ASK_S)
        for other in asked:  # it is answered at some time before the last answer is here
            self.later(self._chance.uniform(0, longest_s), lambda other=other: self._answer(other, answers))  # type: ignore[misc]
        self.later(longest_s, lambda: self._decide(plane, answers))

    def _answer(self, asked: Plane, answers: list[Use]) -> None:
        if asked.ended_s is None:
            answers.append(asked.use())

    def _decide(self, plane: Plane, answers: list[Use]) -> None:
        if is_superseded(plane.use(), answers):
            assert not plane.replicas, "it ended under its replicas"
            plane.ended_s = self.clock.now_s
            assert self.alive, "the last one has ended"
        else:
            self.later(LOOK_S, lambda: self._look(plane))

    def change(self, number: int, what: str) -> None:
        """Change one of the planes that are left."""
        plane = self.alive[number % len(self.alive)]
        match what:
            case "replica comes":
                plane.replicas += 1
                plane.book.note()
            case "replicas go":
                plane.replicas = 0
            case "Serve goes away":
                for plane in self.planes:
                    plane.replicas = 0
            case "deployed":
                plane.book.expect()
            case "registry dies":
                plane.start()


CHANGES = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["replica comes", "replicas go", "Serve goes away", "deployed", "registry dies"]),
    st.one_of(st.floats(0, IN_USE_S), st.just(2 * UNUSED_S), st.just(EXPECTED_S)),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.lists(CHANGES, max_size=40))
def test_none_ends_under_its_replicas_nor_the_last_one_and_the_unused_end_beside_a_used_one(
    num_planes: int, seed: int, changes: list[tuple[int, str, float]]
) -> None:
    world = World(num_planes, seed)
    for number, what, then_s in changes:
        world.change(number, what)
        world.run(then_s)
    for plane in world.alive[1:]:
        plane.replicas = 0
    world.run(EXPECTED_S + UNUSED_S)  # Serve is away, or one is used
    world.change(0, "replica comes")
    world.run(EXPECTED_S + UNUSED_S)
    assert len(world.alive) == 1


def test_two_that_are_used_in_turn_do_not_end_each_other() -> None:
    """As long as Serve never leaves one of them alone for half a minute."""
    world = World(2, 7)
    for number in range(200):
        used, other = world.planes[number % 2], world.planes[(number + 1) % 2]
        used.replicas, other.replicas = 1, 0
        used.book.note()
        world.run(UNUSED_S - 2 * LOOK_S)
    assert len(world.alive) == 2
