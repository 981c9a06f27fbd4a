"""The switches of one replica: how many there were, the last of each model, and how fast they are.

Switches count whether a request or an order began them: the controller weighs orders by the times of switches here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from deployments.records import SwitchReport
from weights.residency.recent import Recent

__all__ = ["SwitchLog", "SwitchSpeeds"]

MAX_REPORTS: Final = 5
_NEW: Final = 0.3  # weight of a new measurement


@dataclass(slots=True)
class SwitchSpeeds:
    """The measured speeds of switches, in bytes of the budget: moving averages.

    A switch takes the time of its bytes from the node's memory, for those that the node lacks the time from storage or
    a peer, and `fixed_s`: building, and what it waits for threads and cores that others have.
    """

    fixed_s: float = 0.0
    attach_bytes_per_s: float = 10e9
    load_bytes_per_s: float = 2e9
    num_attached: int = 0
    num_loaded: int = 0

    def learn(self, nbytes: int, report: SwitchReport, filled_s: float) -> None:
        """Learn from a switch that took `nbytes` of the budget, and `filled_s` from when it had room.

        The wait for room is no part of it: it is others' work. Components that take nothing of the budget cost their
        time whatever their bytes.
        """
        if not report.built or (report.storage_bytes and not nbytes):  # the latter was mostly reading
            return
        attach_s = max(report.attach_ms / 1e3, 1e-6)
        whole_s = max(filled_s, attach_s + report.build_ms / 1e3)
        fixed_s = whole_s - (attach_s if nbytes else 0.0)
        self.fixed_s += _weight(self.num_attached + self.num_loaded) * (fixed_s - self.fixed_s)
        if report.storage_bytes:
            load_s = max(attach_s - nbytes / self.attach_bytes_per_s, 1e-6)
            self.load_bytes_per_s += _weight(self.num_loaded) * (nbytes / load_s - self.load_bytes_per_s)
            self.num_loaded += 1
            return
        if nbytes:
            self.attach_bytes_per_s += _weight(self.num_attached) * (nbytes / attach_s - self.attach_bytes_per_s)
        self.num_attached += 1


def _weight(num_measured: int) -> float:
    return _NEW if num_measured else 1.0


@dataclass(slots=True)
class SwitchLog:
    """The count, the last report of some models, the newest last, and the speeds."""

    num_switches: int = 0
    speeds: SwitchSpeeds = field(default_factory=SwitchSpeeds)
    _reports: Recent[str, SwitchReport] = field(default_factory=lambda: Recent(MAX_REPORTS))

    def note(self, model: str, nbytes: int, report: SwitchReport, filled_s: float) -> None:
        """Count a switch that took `nbytes` of the budget, and `filled_s` from when it had room."""
        self.num_switches += 1
        self.speeds.learn(nbytes, report, filled_s)
        self._reports.note(model, report)

    def describe(self) -> dict[str, Any]:
        """Return the count and the reports, JSON-able."""
        reports = {model: asdict(report) for model, report in self._reports.items()}
        return {"num_switches": self.num_switches, "last_switches": reports}
