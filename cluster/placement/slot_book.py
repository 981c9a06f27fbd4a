"""The controller's book of the splits that it sent, and so of each ingress's slots. Pure: silence is counted in ticks.

An ingress may hold the slots that it uses, those of its last report, and those of all splits sent since. No ingress
gets a slot that another may hold: a split shrinks at once, and grows when the losers of a slot have reported the loss.
So messages may be lost, late or doubled.

A session is the shared knowledge of an ingress and a controller. An ingress silent for `SILENT_S` is gone with
its slots, and begins another session with none when it speaks again; one at rest may be silent for `SLOT_REST_S` more.
If its process is seen to run it may be busy until `STALLED_S`. A new controller knows of no slots: it sends no split
for as long as a living ingress may need to report its slots. An ingress at rest does, too: it sees the end of
the controller before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.admission.records import PoolClaims, PoolPart, ReplicaPart
from cluster.admission.service_times import faded
from cluster.placement.reports import SlotAnswer, SlotReport, SlotSplit
from cluster.placement.slot_split import split_pool
from cluster.process.processes import ProcessMark

TICK_S: Final = 0.125
SILENT_S: Final = 1.5
SLOT_REST_S: Final = 2.0  # between two reports of an ingress at rest
STALLED_S: Final = 10.0
_NUM_TICKS: Final = round(SILENT_S / TICK_S)
_NUM_STALLED_TICKS: Final = round((STALLED_S - SILENT_S) / TICK_S)
_MAX_UNCONFIRMED: Final = 8  # splits on the way to one ingress
_EVEN_PART: Final = 0.25  # of the bounds is shared evenly, and the rest by the ingresses' requests
_ROUNDING: Final = 1e-9
_NEWS: Final = 0.01  # of a pool or of the bounds: a smaller change is not sent

_Limits = Mapping[str, Mapping[str, float]]  # by pool and replica


@dataclass(slots=True, eq=False)
class _Member:
    """An ingress. `report` is its last one in a joined session, `sent` the splits that it may not know."""

    session: str
    keeps: bool
    is_joined: bool = False
    number: int = -1  # of its last report
    num_ticks_left: int = 0  # until it counts as silent; below 0 afterwards
    report: SlotReport | None = None
    reported_s: float = 0.0
    sent: list[tuple[int, _Limits]] = field(default_factory=list)
    split: SlotSplit | None = None
    overtaken: dict[str, int] = field(default_factory=dict)  # by pool: other ingresses' starts since its last one

    def claims(self, pool: str) -> PoolClaims | None:
        return self.report.pools.get(pool) if self.report else None

    def requests_per_s(self, now_s: float) -> float:
        return faded(self.report.requests_per_s, now_s - self.reported_s) if self.report else 0.0

    def may_hold(self, pool: str, replica: str) -> float:
        claims = self.claims(pool)
        use = claims.replicas.get(replica) if claims else None
        own = max(use.used, use.limit) if use else 0.0
        return max([own, *(limits.get(pool, {}).get(replica, 0.0) for _, limits in self.sent)])


def lease_s(report: SlotReport) -> float:
    """Return the seconds after a report during which an ingress may use its slots without another report."""
    return SILENT_S + SLOT_REST_S * report.is_at_rest


class SlotBook:
    """The book of one controller, whose sessions begin with `epoch`. `is_running` tells whether a process runs."""

    def __init__(self, epoch: str, is_running: Callable[[ProcessMark], bool]) -> None:
        self._epoch = epoch
        self._is_running = is_running
        self._members: dict[str, _Member] = {}
        self._num_sessions = 0
        self._num_ticks_closed = _NUM_TICKS
        self.has_news = False  # since the last division at a tick

    @property
    def _is_closed(self) -> bool:
        """True while it is too early to send a split: an ingress may not have reported its slots yet."""
        return self._num_ticks_closed > 0

    @property
    def names(self) -> Iterable[str]:
        """The known ingresses."""
        return self._members.keys()

    def report(self, name: str, report: SlotReport, now_s: float) -> SlotAnswer:
        """Take in a report, and return the ingress's session. A report that comes after a later one is ignored."""
        member = self._members.get(name)
        if member is None or (report.session == member.session and not self._may_join(member)):
            member = self._begin_session(name, member)
        if report.number <= member.number:
            return SlotAnswer(member.session, member.keeps)
        member.number, self.has_news = report.number, True
        # At least as long as after the last report: the ingress may not know that this one has come.
        member.num_ticks_left = max(member.num_ticks_left, round(lease_s(report) / TICK_S))
        if report.session != member.session:
            if not member.is_joined:  # the slots that it has until it knows
                member.report = report
            return SlotAnswer(member.session, member.keeps)
        if not member.is_joined:
            member.is_joined, member.sent, member.split = True, [], None
        self._count_starts(name, member, report)
        member.report, member.reported_s = report, now_s
        member.sent = [(revision, limits) for revision, limits in member.sent if revision > report.revision]
        return SlotAnswer(member.session, member.keeps)

    def tick(self) -> list[str]:
        """Count a tick, and return the ingresses that are gone."""
        self._num_ticks_closed = max(0, self._num_ticks_closed - 1)
        gone = []
        for name, member in self._members.items():
            member.num_ticks_left -= 1
            if member.num_ticks_left >= 0:
                continue
            is_seen = member.report is not None and self._is_running(member.report.process)
            if member.num_ticks_left < -_NUM_STALLED_TICKS or not is_seen:
                gone.append(name)
        for name in gone:
            del self._members[name]
            self.has_news = True
        return gone

    def split_of(self, name: str) -> SlotSplit | None:
        """Return the last split of an ingress, in its last joined session."""
        member = self._members.get(name)
        return member.split if member and member.is_joined else None

    def divide(self, now_s: float, *, is_tick: bool) -> list[str]:
        """Split all slots anew, and return the ingresses that have a new split.

        If only other ingresses' requests changed, splits go out only at a tick, and none is needed without `has_news`.
        """
        members = {name: member for name, member in self._members.items() if member.is_joined and member.report}
        if self._is_closed or not members:
            return []
        self.has_news &= not is_tick
        parts: dict[str, dict[str, PoolPart]] = {name: {} for name in members}
        for pool in {pool for member in members.values() if member.report for pool in member.report.pools}:
            for name, part in self._divide_pool(pool, members, now_s).items():
                parts[name][pool] = part
        bounds = _bound_parts({name: member.requests_per_s(now_s) for name, member in members.items()})
        return [
            name
            for name, member in members.items()
            if _post(member, SlotSplit(member.session, 0, parts[name], bounds[name]), is_tick)
        ]

    def _divide_pool(self, pool: str, members: Mapping[str, _Member], now_s: float) -> dict[str, PoolPart]:
        claims_by_name = {name: found for name, member in members.items() if (found := member.claims(pool)) is not None}
        waited_s = {name: max(0.0, now_s - members[name].reported_s) for name in claims_by_name}
        claims = {
            name: replace(one, share_per_s=faded(one.share_per_s, waited_s[name]))
            for name, one in claims_by_name.items()
        }
        overtaken = {
            name
            for name in claims
            if (report := members[name].report) and members[name].overtaken.get(pool, 0) > report.max_overtakes
        }
        wanted = split_pool(claims, waited_s, overtaken)
        granted: dict[str, dict[str, float]] = {}
        for name in claims:
            granted[name] = {
                replica: self._granted(pool, replica, name, limit, granted)
                for replica, limit in wanted.limits[name].items()
            }
        waiting = {name for name, each in claims.items() if each.waiting}
        return {
            name: PoolPart(_replica_parts(claims, name, granted[name]), wanted.capacity[name], bool(waiting - {name}))
            for name in claims
        }

    def _granted(
        self, pool: str, replica: str, name: str, wanted: float, granted: Mapping[str, Mapping[str, float]]
    ) -> float:
        """Return the part of a replica that an ingress may have now: at most what others are known to leave."""
        member = self._members[name]
        part = member.split.pools.get(pool) if member.split else None
        before = part.replicas[replica].limit if part and replica in part.replicas else 0.0
        if member.split is None and (claims := member.claims(pool)) and replica in claims.replicas:
            before = claims.replicas[replica].limit  # from the previous controller
        if wanted <= before:
            return wanted
        others = [
            max(other.may_hold(pool, replica), granted.get(other_name, {}).get(replica, 0.0))
            for other_name, other in self._members.items()
            if other_name != name
        ]
        return max(before, min(wanted, 1.0 - sum(others)))

    def _may_join(self, member: _Member) -> bool:
        """Return whether a session still holds: slots from before this controller are reported while it is closed."""
        return member.is_joined or not member.keeps or self._is_closed

    def _begin_session(self, name: str, before: _Member | None) -> _Member:
        """Begin a session. The ingress may hold its slots of the previous session until it has joined this one."""
        self._num_sessions += 1
        member = before or _Member("", keeps=False)
        member.session, member.keeps = f"{self._epoch}:{self._num_sessions}", self._is_closed
        member.is_joined = False
        self._members[name] = member
        return member

    def _count_starts(self, name: str, member: _Member, report: SlotReport) -> None:
        """Count how often each ingress with waiting requests was overtaken by another one."""
        for pool, claims in report.pools.items():
            before = member.claims(pool)
            num_started = max(0, claims.num_started - (before.num_started if before else 0))
            if num_started or not claims.waiting:
                member.overtaken[pool] = 0
            for other_name, other in self._members.items():
                found = other.claims(pool)
                if num_started and other_name != name and found and found.waiting:
                    other.overtaken[pool] = other.overtaken.get(pool, 0) + num_started


def _replica_parts(
    claims: Mapping[str, PoolClaims], name: str, limits: Mapping[str, float]
) -> Mapping[str, ReplicaPart]:
    parts = {}
    for replica, limit in limits.items():
        uses = [each.replicas[replica] for other, each in claims.items() if other != name and replica in each.replicas]
        running = Counter[str]()
        for use in uses:
            running.update(use.running)
        parts[replica] = ReplicaPart(limit, running, sum([use.used for use in uses]), sum([use.load_s for use in uses]))
    return parts


def _bound_parts(rates: Mapping[str, float]) -> dict[str, float]:
    """Return each ingress's part of the queue's bounds: by recent arrivals, with some for an ingress without any."""
    total, even = sum(rates.values()), 1 / len(rates)
    return {
        name: _EVEN_PART * even + (1 - _EVEN_PART) * rate / total if total > _ROUNDING else even
        for name, rate in rates.items()
    }


def _limits(split: SlotSplit) -> _Limits:
    return {pool: {name: each.limit for name, each in part.replicas.items()} for pool, part in split.pools.items()}


def _post(member: _Member, split: SlotSplit, is_tick: bool) -> bool:
    """Send a split if it has changed."""
    before = member.split
    if len(member.sent) >= _MAX_UNCONFIRMED:
        return False
    if before is not None:
        split = replace(split, revision=before.revision)
        is_same = _limits(split) == _limits(before) and _wanted(split) == _wanted(before)
        if is_same and (not is_tick or _is_close(split, before)):
            return False
    revision = before.revision + 1 if before else 1
    member.split = replace(split, revision=revision)
    member.sent.append((revision, _limits(split)))
    return True


def _is_close(split: SlotSplit, before: SlotSplit) -> bool:
    """Return whether two splits of the same limits hardly differ, except in fields that change with time alone."""
    pairs = [(part, before.pools[pool]) for pool, part in split.pools.items()]
    return abs(split.bound_part - before.bound_part) <= _NEWS and all(
        part.replicas == known.replicas and abs(part.capacity - known.capacity) <= _NEWS * len(part.replicas)
        for part, known in pairs
    )


def _wanted(split: SlotSplit) -> dict[str, bool]:
    return {pool: part.is_wanted for pool, part in split.pools.items()}
