"""The table by example: sharing, recalls, invalidated copies, prefetches and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from configs.model import _parse_bytes
from weights.residency.admission import MAX_NAMED, PATIENCE_S, Admission
from weights.residency.contents import Entry, MemoryTier
from weights.residency.entry_table import EntryTable
from weights.residency.policy import rate_class
from weights.residency.room_plan import plan_prefetch, plan_room
from weights.residency.sizes import Size, shown_bytes


class Node(MemoryTier):
    """A table with its queue, whose entries arrive at once."""

    def __init__(self, budget_bytes: int) -> None:
        self.now_s = 0.0
        self.gone: list[str] = []
        self.recalled: list[tuple[str, list[str]]] = []
        self.table: EntryTable[str] = EntryTable(budget_bytes, lambda: self.now_s, self)
        self.queue = Admission(self.table, "the node")

    def ask(self, holder: str, **wanted: Size):
        ticket = self.queue.ask(" and ".join(wanted), wanted, holder)
        for entry in ticket.fresh:
            self.table.arrive(entry, entry.key, rate_class(1.0, entry.nbytes))
        return ticket

    def idle(self, **sizes: Size) -> None:
        for key, size in sizes.items():
            self.table.use(self.table.adopt(key, size, key))

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        self.gone += [entry.key for entry in entries]

    def recall(self, holder: str, keys: Sequence[str]) -> None:
        self.recalled.append((holder, list(keys)))


def test_what_two_share_counts_once_and_goes_with_the_last() -> None:
    node = Node(100)
    vae: Mapping[str, int] = {"vae": 40}
    node.idle(a=vae | {"a": 30}, b=vae | {"b": 30})
    assert node.table.used_bytes == 100
    node.ask("h", c={"c": 30})
    assert (node.gone, node.table.used_bytes) == (["a"], 100)
    node.queue.end_ticket(node.ask("i", d=vae | {"d": 10}))
    assert node.gone == ["a", "b"]


def test_what_shares_all_with_others_frees_nothing_and_stays() -> None:
    node = Node(50)
    node.ask("h", base={"vae": 10, "unet": 20})
    node.table.arrive(node.table.expect("shared", {"vae": 10}), "", rate_class(1e-6, 10))
    node.idle(other={"x": 20})
    node.ask("i", wanted={"y": 20})
    assert node.gone == ["other"]


def test_equals_go_by_least_recent_use() -> None:
    node = Node(30)
    node.idle(b=10, c=10, a=10)
    assert [entry.key for entry in plan_room(node.table, {"d": 20}).evict] == ["b", "c"]


def test_what_nobody_measured_counts_as_the_mean_of_the_others() -> None:
    node = Node(60)
    for key, nbytes, origin in (
        ("cheap", 10, rate_class(1.0, 10)),
        ("dear", 10, rate_class(3.0, 10)),
        ("new", 40, None),
    ):
        node.table.use(node.table.adopt(key, nbytes, "", origin))
    assert [entry.key for entry in plan_room(node.table, {"d": 60}).evict] == ["cheap", "new", "dear"]


def test_what_saves_the_least_time_per_byte_goes_first() -> None:
    node = Node(30)
    for key, reload_s, num_uses in (("slow", 9.0, 1), ("popular", 1.0, 20), ("plain", 1.0, 1)):
        entry = node.table.adopt(key, {key: 10}, "", rate_class(reload_s, 10))
        for _ in range(num_uses):
            node.table.use(entry)
    assert [entry.key for entry in plan_room(node.table, {"d": {"d": 10}}).evict] == ["plain"]
    assert [entry.key for entry in plan_room(node.table, {"d": {"d": 20}}).evict] == ["plain", "slow"]


def test_what_is_not_needed_after_all_is_spared() -> None:
    node = Node(120)
    node.idle(older=20, old=10, new=90)
    node.ask("h", wanted=90)
    assert node.gone == ["new"]


def test_value_is_reload_time_times_popularity_per_byte() -> None:
    node = Node(110)
    node.table.use(node.table.adopt("small", 10, "", rate_class(2.0, 10)))
    large = node.table.adopt("large", 100, "", rate_class(2.0, 100))
    node.table.use(large)
    assert [entry.key for entry in plan_room(node.table, {"new": 10}).evict] == ["large"]
    for _ in range(11):
        node.table.use(large)
    assert [entry.key for entry in plan_room(node.table, {"new": 10}).evict] == ["small"]


def test_kept_copies_are_called_back_for_room_and_go_when_their_holder_agrees() -> None:
    node = Node(100)
    for entry in node.ask("replica", a=60, b=40).entries or ():
        node.table.mark_recallable(entry, "replica")
    waiting = node.ask("other", c=50)
    assert waiting.is_waiting
    assert (node.recalled, node.gone) == ([("replica", ["a"])], [])
    node.queue.serve()
    assert len(node.recalled) == 1  # asked once
    node.table.unlease(node.table.entries["a"], "replica")
    node.queue.serve()
    assert not waiting.is_waiting
    assert node.gone == ["a"]


def test_a_holder_that_needs_it_again_keeps_it_and_another_is_asked() -> None:
    node = Node(100)
    for entry in node.ask("replica", a=60, b=40).entries or ():
        node.table.mark_recallable(entry, "replica")
    waiting = node.ask("other", c=40)
    assert node.recalled == [("replica", ["a"])] or node.recalled == [("replica", ["b"])]
    (asked,) = node.recalled[0][1]
    node.table.make_held(node.table.entries[asked], "replica")
    node.queue.serve()
    assert [keys for _, keys in node.recalled] == [[asked], ["b" if asked == "a" else "a"]]
    node.table.end_holder("replica")  # it did not answer in time
    node.queue.serve()
    assert not waiting.is_waiting


def test_a_smaller_budget_calls_back_what_is_kept() -> None:
    node = Node(100)
    (entry,) = node.ask("replica", a=60).entries or ()
    node.table.mark_recallable(entry, "replica")
    node.table.budget_bytes = 50
    node.queue.serve()
    assert (node.recalled, node.gone) == ([("replica", ["a"])], [])
    node.table.unlease(entry, "replica")
    node.queue.serve()
    assert node.gone == ["a"]


def test_a_prefetch_takes_what_has_room_and_calls_nothing_back() -> None:
    node = Node(75)
    node.idle(cold=30)
    node.now_s = 600.0
    node.idle(hot=30)
    take, evict = plan_prefetch(node.table, {"big": 50, "next": 40, "small": 5})
    assert (take, [entry.key for entry in evict]) == (["next", "small"], ["cold"])
    cold = node.table.entries["cold"]
    node.table.lease(cold, "replica")
    node.table.mark_recallable(cold, "replica")
    assert plan_prefetch(node.table, {"next": 40, "small": 5}) == (["small"], ())


def test_an_invalidated_copy_stays_for_its_holders_only() -> None:
    node = Node(100)
    ticket = node.ask("replica", a=40)
    (entry,) = ticket.entries or ()
    node.table.invalidate(entry)
    fresh = node.ask("other", a=40)
    assert (fresh.fresh[0] is entry, node.table.used_bytes, node.gone) == (False, 80, [])
    node.queue.end_ticket(ticket)
    assert (node.gone, node.table.used_bytes) == (["a"], 40)


def test_a_refusal_says_what_was_wanted_and_who_has_the_room() -> None:
    node = Node(100)
    for number in range(MAX_NAMED + 2):
        node.ask(f"h{number}", **{f"k{number}": 10})
    node.table.pin(["k0", "later"])
    never = node.ask("x", large=95)
    assert never.refusal == (
        "the node is 100 bytes; large need 95 bytes, 65 bytes are missing (it can never fit beside the "
        "pinned entries; leased by: h0 (10 bytes), h1 (10 bytes), h2 (10 bytes), h3 (10 bytes), h4 (10 bytes) and 2 "
        "more; pinned: 10 bytes)"
    )
    late = node.ask("x", b=40)
    node.now_s = 60.0
    node.queue.end_ticket(late)
    assert "b need 40 bytes, 10 bytes are missing" in (late.refusal or "")
    assert "waited 60.0 s" in (late.refusal or "")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (2**31, "2 GiB"),
        (3_435_973_837, "3.2 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_sizes_are_shown_in_the_units_of_configs(nbytes: int, text: str) -> None:
    assert shown_bytes(nbytes) == text
    assert not nbytes or abs(_parse_bytes(text.replace("bytes", "B")) - nbytes) <= 0.05 * nbytes


@pytest.mark.parametrize(("pause_s", "passes"), [(0.0, True), (PATIENCE_S, False)])
def test_what_needs_no_room_overtakes_for_a_bounded_time(pause_s: float, passes: bool) -> None:
    node = Node(100)
    running = node.ask("a", resident=60)
    first = node.ask("b", other=50)
    node.now_s = pause_s
    newcomer = node.ask("c", resident=60)
    assert first.is_waiting
    assert newcomer.is_waiting != passes
    for ticket in (running, newcomer) if passes else (running,):
        node.queue.end_ticket(ticket)
    assert not first.is_waiting


def test_what_fits_beside_the_first_overtakes_it_however_long_it_has_waited() -> None:
    node = Node(100)
    node.ask("a", resident=30)
    blocking = node.ask("d", blocking=50)
    first = node.ask("b", other=50)
    node.now_s = 10 * PATIENCE_S
    assert not node.ask("c", resident=30).is_waiting
    node.queue.end_ticket(blocking)
    assert not first.is_waiting


def test_what_has_passed_the_first_counts_against_who_would_pass_next() -> None:
    node = Node(100)
    node.ask("a", one=30, two=30)
    node.ask("d", blocking=40)
    node.ask("b", other=60)
    node.now_s = 10 * PATIENCE_S
    assert not node.ask("c", one=30).is_waiting
    assert node.ask("e", two=30).is_waiting
    assert not node.ask("f", one=30).is_waiting  # counts once


def test_a_waiter_behind_the_first_goes_when_all_that_it_wants_is_here() -> None:
    node = Node(100)
    node.ask("a", resident=60)
    first, second = node.ask("b", large=90), node.ask("c", small=30)
    node.table.adopt("small", 30, "thing")
    node.queue.serve()
    assert (first.is_waiting, second.is_waiting, len(node.queue.waiting)) == (True, False, 1)


def test_nobody_takes_what_is_called_back_for_the_first() -> None:
    node = Node(100)
    (entry,) = node.ask("replica", a=60).entries or ()
    node.table.mark_recallable(entry, "replica")
    first = node.ask("other", b=70)
    assert node.ask("third", a=60).is_waiting
    node.table.unlease(entry, "replica")
    node.queue.serve()
    assert not first.is_waiting


def test_a_holder_passes_only_with_leases_that_the_first_may_be_waiting_for() -> None:
    node = Node(100)
    node.ask("busy", blocking=50, shared=10)
    (kept,) = node.ask("keeper", kept=30).entries or ()
    node.table.mark_recallable(kept, "keeper")
    node.ask("first", large=60)
    node.now_s = 10 * PATIENCE_S
    assert node.ask("keeper", blocking=50).is_waiting
    assert not node.ask("busy", blocking=50).is_waiting


def test_who_uses_what_it_was_asked_for_does_not_pass_the_one_who_waits_for_it() -> None:
    node = Node(100)
    node.ask("other", elsewhere=30)
    (used,) = node.ask("replica", used=60).entries or ()
    node.table.mark_recallable(used, "replica")
    first = node.ask("first", large=70)
    node.table.make_held(used, "replica")  # it is in use
    node.now_s = 10 * PATIENCE_S
    assert not node.table.has_held_leases("replica")
    assert node.ask("replica", used=60).is_waiting
    node.table.mark_recallable(used, "replica")
    node.queue.serve()
    assert node.recalled == [("replica", ["used"])] * 2  # not used any more, and asked for again
    node.table.unlease(used, "replica")
    node.queue.serve()
    assert not first.is_waiting


def test_what_is_empty_is_in_nobodys_way() -> None:
    """A tensor without elements has an extent of its own in some layouts."""
    node = Node(100)
    node.queue.end_ticket(node.ask("g", empty=0))  # the only one of its origin
    node.idle(full=100)
    node.ask("h", other=60, nothing=0)
    assert node.gone == ["full"]
    take, evict = plan_prefetch(node.table, {"next": 40, "none": 0})
    assert (take, evict) == (["next", "none"], ())
    node.table.budget_bytes = 0
    node.queue.end_ticket(node.ask("i", other=60))
    assert node.table.used_bytes == 60  # of h
