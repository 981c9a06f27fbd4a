"""The actor of shared encodings and its client, wired together in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from cluster.encodings import ray_tier
from cluster.encodings.actor import SharedEncodings
from cluster.encodings.packed import ByteArray, Layout, TensorPlace
from cluster.encodings.ray_tier import RaySharedTier
from cluster.encodings.records import INLINE_BYTES, Publication, SharedEncoding
from cluster.errors import ClusterError
from cluster.keeper.object_store import StoreFull

SMALL, LARGE = 100, INLINE_BYTES + 1
CLAIM_S = 3.0


class Store:
    """Keeps what is put; what is not kept any more is gone."""

    def __init__(self, capacity_bytes: int = 100 * 2**20) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_puts = 0
        self.full = False

    def put(self, array: ByteArray) -> tuple[Any, ByteArray]:
        if self.full:
            raise StoreFull("full")
        self.num_puts += 1
        return array.copy(), array


class Handle:
    """An actor's: `handle.method.remote(...)`. Counts calls; `hang` and `dead` are what Ray may do."""

    def __init__(self, actor: SharedEncodings) -> None:
        self.actor = actor
        self.calls: Counter[str] = Counter()
        self.arguments: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.hang = self.dead = False

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Awaitable[Any]:
                return self.call(method, arguments)

        return Method

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls[method] += 1
        self.arguments[method].append(arguments)
        if self.dead:
            raise RuntimeError("the actor died")
        if self.hang:
            await asyncio.Event().wait()
        return await getattr(self.actor, method)(*arguments)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    """The actor's."""
    return Clock()


@pytest.fixture
def handle(store: Store, clock: Clock) -> Handle:
    return Handle(SharedEncodings(2**20, claim_s=CLAIM_S, store=store, clock=clock))


def tier(handle: Handle, **options: Any) -> RaySharedTier:
    return RaySharedTier(lambda: handle, put=lambda array: array, **({"renew_s": 0.05, "wait_s": 0.1} | options))


def published(digest: str, nbytes: int) -> tuple[list[Publication], list[ByteArray]]:
    """Return what `publish` is given for one encoding."""
    layout, data = encoding(nbytes)
    return [Publication(digest, layout, 1.0, False)], [data]


async def find_or_claim(client: RaySharedTier, digest: str) -> SharedEncoding | None:
    """The encoding, at last; None: the caller has to compute it."""
    (answer,) = await client.find_or_claim([digest])
    return await client.receive(digest, answer)


async def told(client: RaySharedTier, _: None) -> None:
    """Wait until the actor was told what the client has just been given to tell."""
    while client._telling:
        await asyncio.wait(client._telling)
    await asyncio.sleep(0)


def encoding(nbytes: int) -> tuple[Layout, ByteArray]:
    data = np.random.default_rng().integers(0, 256, nbytes, np.uint8)
    return (TensorPlace("t", "uint8", (nbytes,), 0, nbytes),), data


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("nbytes", "num_puts"), [(SMALL, 0), (LARGE, 1)])
async def test_what_one_publishes_all_find(handle: Handle, store: Store, nbytes: int, num_puts: int) -> None:
    first, second = tier(handle), tier(handle)
    assert await find_or_claim(first, "d") is None
    waiting = asyncio.ensure_future(find_or_claim(second, "d"))
    await until(lambda: handle.calls["wait"])
    layout, data = encoding(nbytes)
    await told(first, first.publish([Publication("d", layout, 0.5, False)], [data]))
    for found in (await waiting, await find_or_claim(first, "d")):
        assert isinstance(found, SharedEncoding)
        assert (found.layout, found.data.tobytes(), found.cost_s) == (layout, data.tobytes(), 0.5)
    assert store.num_puts == num_puts
    stats = await first.stats()
    assert (stats.entries, stats.claimed, stats.in_flight) == (1, 1, 0)
    assert nbytes < stats.nbytes < nbytes + 5000


async def test_what_nobody_can_wait_for_is_published_later_in_one_call(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tier, "PUBLISH_EVERY_S", 0.01)
    client, other = tier(handle), tier(handle)
    encodings = {f"d{number}": encoding(SMALL) for number in range(20)}
    for digest, (layout, data) in encodings.items():
        await told(
            client, client.publish([Publication(digest, layout, 0.5, False)], [data])
        )  # the actor was never asked for it
    assert not handle.calls, "it was never asked for any of them"
    await until(lambda: handle.calls["publish"])
    await until(lambda: handle.actor._ledger.stats().entries == 20)
    for digest, (layout, data) in encodings.items():
        found = await find_or_claim(other, digest)
        assert isinstance(found, SharedEncoding)
        assert (found.layout, found.data.tobytes(), found.cost_s) == (layout, data.tobytes(), 0.5)
    assert handle.calls["publish"] == 1
    await told(client, client.publish(*published("large", LARGE)))
    assert handle.calls["publish"] == 2, "the actor has it: it does not lie here"
    await told(client, client.publish(*published("again", SMALL)))
    await until(lambda: handle.calls["publish"] == 3)


async def test_what_is_forgotten_is_not_published_later(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tier, "PUBLISH_EVERY_S", 0.01)
    client, other = tier(handle), tier(handle)
    await told(client, client.publish(*published("mine", SMALL)))
    await told(client, client.forget_all())
    await told(client, client.publish(*published("sound", SMALL)))
    await until(lambda: handle.calls["publish"])
    assert [one.digest for one in handle.arguments["publish"][0][0]] == ["sound"]

    assert await find_or_claim(client, "asked") is None  # from now on it hears of what others forget
    await until(lambda: client.generation is not None)
    monkeypatch.setattr(ray_tier, "PUBLISH_EVERY_S", 0.2)
    await told(client, client.publish(*published("theirs", SMALL)))
    generation = client.generation
    await told(other, other.forget_all())
    await until(lambda: client.generation != generation)
    assert client._publishing is not None
    await client._publishing
    assert handle.calls["publish"] == 1


async def test_all_keys_of_a_request_go_in_one_call(handle: Handle) -> None:
    client = tier(handle)
    assert [answer.state for answer in await client.find_or_claim(["a", "b", "c"])] == ["yours"] * 3
    assert handle.calls["find_or_claim"] == 1


async def test_use_of_own_copies_is_told_with_the_next_question(handle: Handle) -> None:
    client = tier(handle)
    for digest in "aab":
        client.note_use(digest)
    for digest in "cd":
        await find_or_claim(client, digest)
    assert [sorted(used) for _, _, used in handle.arguments["find_or_claim"]] == [["a", "b"], []]


async def test_a_long_computation_keeps_its_claim_and_a_silent_one_loses_it(handle: Handle, clock: Clock) -> None:
    alive, silent, other = tier(handle), tier(handle, renew_s=60.0), tier(handle)
    assert await find_or_claim(alive, "long") is None
    assert await find_or_claim(silent, "lost") is None
    long, lost = (asyncio.ensure_future(find_or_claim(other, digest)) for digest in ("long", "lost"))
    clock.now_s = 2.0
    renewed = handle.calls["renew"]
    await until(lambda: handle.calls["renew"] >= renewed + 2)
    clock.now_s = 4.0
    assert await lost is None  # its turn
    assert not long.done()
    await told(alive, alive.publish(*published("long", SMALL)))
    assert await long
    assert (await other.stats()).lost_claims == 1


async def test_an_abandoned_computation_is_the_next_ones(handle: Handle) -> None:
    first, second = tier(handle), tier(handle)
    assert await find_or_claim(first, "d") is None
    waiting = asyncio.ensure_future(find_or_claim(second, "d"))
    await until(lambda: handle.calls["wait"])
    await told(first, first.abandon(["d"]))
    assert await waiting is None
    [(_, abandoned_by)] = handle.arguments["abandon"]
    handle.arguments["renew"].clear()
    await until(lambda: handle.arguments["renew"])
    assert [renewed for renewed, holder in handle.arguments["renew"] if holder != abandoned_by] == [["d"]]


async def test_what_the_store_has_no_room_for_reaches_who_waits(handle: Handle, store: Store) -> None:
    first, second = tier(handle), tier(handle)
    await find_or_claim(first, "d")
    waiting = asyncio.ensure_future(find_or_claim(second, "d"))
    await until(lambda: handle.calls["wait"])
    store.full = True
    layout, data = encoding(LARGE)
    await told(first, first.publish([Publication("d", layout, 0.5, False)], [data]))
    found = await waiting
    assert found is not None
    assert found.data.tobytes() == data.tobytes()
    stats = await first.stats()
    assert (stats.entries, stats.refused, stats.nbytes) == (0, 1, 0)


async def test_the_budget_is_at_most_a_tenth_of_the_store() -> None:
    small = SharedEncodings(2**20, store=Store(capacity_bytes=10_000))
    assert (await small.stats()).max_bytes == 1000


@pytest.mark.parametrize("how", ["hang", "dead"])
async def test_an_actor_that_does_not_answer_is_left_alone_for_a_while(handle: Handle, how: str) -> None:
    clock = Clock()
    client = tier(handle, timeout_s=0.05, quiet_s=5.0, clock=clock)
    setattr(handle, how, True)
    with pytest.raises(TimeoutError if how == "hang" else RuntimeError):
        await client.find_or_claim(["a", "b"])
    setattr(handle, how, False)
    clock.now_s = 4.9
    with pytest.raises(ClusterError, match="asked again"):
        await find_or_claim(client, "a")
    await told(client, client.publish(*published("a", SMALL)))
    await told(client, client.abandon(["a"]))
    assert client.num_untold == 2
    assert (handle.calls["publish"], handle.calls["abandon"]) == (0, 0)
    assert handle.calls["find_or_claim"] == 1
    clock.now_s = 5.1
    assert await find_or_claim(client, "c") is None


async def test_who_waits_notices_that_the_actor_is_gone(handle: Handle) -> None:
    first, second = tier(handle), tier(handle, timeout_s=0.05)
    await find_or_claim(first, "d")
    waiting = asyncio.ensure_future(find_or_claim(second, "d"))
    await until(lambda: handle.calls["wait"])
    handle.hang = True
    with pytest.raises(TimeoutError):
        await waiting


async def test_when_there_is_no_actor_to_be_had_asking_fails() -> None:
    def connect() -> Any:
        raise ValueError("no such actor")

    with pytest.raises(ValueError, match="no such actor"):
        await find_or_claim(RaySharedTier(connect), "d")


async def test_all_hear_at_once_that_everything_was_forgotten(handle: Handle) -> None:
    first, second = tier(handle), tier(handle)
    assert (first.generation, await find_or_claim(first, "d")) == (None, None)
    await told(first, first.publish(*published("d", SMALL)))
    found = await find_or_claim(second, "d")
    assert found is not None
    await until(lambda: first.generation and second.generation)
    assert first.generation == second.generation == found.generation
    await told(first, first.forget_all())
    await until(lambda: found.generation not in (first.generation, second.generation))
    await until(lambda: first.generation == second.generation)
    assert await find_or_claim(second, "d") is None
    await told(second, second.publish(*published("d", SMALL)))
    again = await find_or_claim(first, "d")
    assert again is not None
    assert again.generation == first.generation


async def test_an_actor_that_started_anew_has_another_generation(handle: Handle, store: Store) -> None:
    client = tier(handle, wait_s=0.01)
    await find_or_claim(client, "d")
    await until(lambda: client.generation)
    before = client.generation
    handle.dead = True
    await handle.actor.forget_all()  # ends the standing question
    handle.actor, handle.dead = SharedEncodings(2**20, store=store), False
    await until(lambda: client.generation == handle.actor.generation)
    assert client.generation != before


async def test_what_is_being_put_while_everything_is_forgotten_is_not_kept(handle: Handle, store: Store) -> None:
    client = tier(handle)
    await find_or_claim(client, "d")
    put, go = store.put, threading.Event()
    store.put = lambda array: put(array) if go.wait(10) else None  # type: ignore[method-assign, return-value]
    client.publish(*published("d", LARGE))
    publishing = next(iter(client._telling))
    await until(lambda: handle.calls["publish"])
    client.forget_all()
    await until(lambda: handle.calls["forget_all"])
    go.set()
    await publishing
    assert (await client.stats()).entries == 0
