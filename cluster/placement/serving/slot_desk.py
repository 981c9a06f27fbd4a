"""The controller's side of slots: ingresses report here and wait for their parts.

It works at the pace of reports, not of decisions, because an ingress waits for a slot of another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import Final

from cluster.admission.outcomes import EndedLog
from cluster.placement.reports import SlotAnswer, SlotReport, SlotUpdate
from cluster.placement.slot_book import TICK_S, SlotBook
from cluster.process.processes import ProcessMark, is_alive
from configs.admission import AdmissionConfig

GAP_S: Final = 0.002  # between two splits, however many reports come
CONFIRM_S: Final = 2.0

logger = logging.getLogger("atelier.controller")


def _is_running(mark: ProcessMark) -> bool:
    process = mark.seen()
    return process is not None and is_alive(process)


class SlotDesk:
    """The slots of the ingresses of one controller. Lives on its event loop, until `close`."""

    def __init__(self) -> None:
        self.ended = EndedLog()
        self._book = SlotBook(uuid.uuid4().hex, _is_running)
        self._news: dict[str, asyncio.Event] = {}
        self._confirmed: dict[str, str] = {}  # by ingress: the revision of its settings
        self._next_ended: dict[str, int] = {}
        self._config: AdmissionConfig | None = None
        self._settings = ""
        self._is_due = asyncio.Event()
        self._has_reported = asyncio.Event()
        self._has_ticked = False
        self._tasks = [asyncio.ensure_future(work) for work in (self._tick(), self._divide())]

    def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()

    async def report_slots(self, name: str, report: SlotReport) -> SlotAnswer:
        """Take in a report. A new split follows at once."""
        answer = self._book.report(name, report, asyncio.get_running_loop().time())
        self._confirmed[name] = report.settings
        self._note_ended(name, report)
        self._is_due.set()
        self._has_reported.set()
        return SlotAnswer(answer.session, answer.keeps, self._next_ended.get(name))

    async def receive_slots(self, name: str, session: str, revision: int, settings: str, wait_s: float) -> SlotUpdate:
        """Return the split and settings once one is newer than the given, or the same again after `wait_s`."""
        news = self._news.setdefault(name, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._has_newer(name, session, revision, settings):
                    news.clear()
                    await news.wait()
        config = self._config if settings != self._settings else None
        return SlotUpdate(self._book.split_of(name), self._settings, config)

    async def retune(self, config: AdmissionConfig) -> bool:
        """Set bounds and weights of all ingresses; return whether all confirmed them in time."""
        self._config, self._settings = config, uuid.uuid4().hex
        for news in self._news.values():
            news.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_S):
                while not self._is_confirmed():
                    self._has_reported.clear()
                    await self._has_reported.wait()
        return self._is_confirmed()

    def _is_confirmed(self) -> bool:
        return all(self._confirmed.get(name) == self._settings for name in self._book.names)

    def _has_newer(self, name: str, session: str, revision: int, settings: str) -> bool:
        split = self._book.split_of(name)
        is_newer = split is not None and (split.session != session or split.revision > revision)
        return settings != self._settings or is_newer

    def _note_ended(self, name: str, report: SlotReport) -> None:
        """Take over ended requests, by this clock. Those of an earlier report are not taken again."""
        ended = report.ended
        if ended is None or ended.next_number <= self._next_ended.get(name, 0):
            return
        self.ended.take_over(ended, asyncio.get_running_loop().time(), self._next_ended.get(name, 0))
        self._next_ended[name] = ended.next_number

    async def _tick(self) -> None:
        """Count ticks of this loop, not time: when it stood still, reports may wait that it has not read."""
        while True:
            if not self._book.names:  # one ingress alone has all slots, and reports none
                self._has_reported.clear()
                await self._has_reported.wait()
            await asyncio.sleep(TICK_S)
            try:
                gone = self._book.tick()
            except Exception:  # from the look at a process; the next tick looks again
                logger.exception("the check of ingresses failed")
                continue
            for name in gone:
                logger.warning("an ingress is gone with its slots")
                self._news.pop(name, None)
                self._confirmed.pop(name, None)
                self._next_ended.pop(name, None)
            if self._book.has_news:
                self._has_ticked = True
                self._is_due.set()
            self._has_reported.set()

    async def _divide(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            is_tick, self._has_ticked = self._has_ticked, False
            try:
                for name in self._book.divide(asyncio.get_running_loop().time(), is_tick=is_tick):
                    if name in self._news:
                        self._news[name].set()
            except Exception:  # the ingresses keep their slots, and the next split may succeed
                logger.exception("no split of slots")
            await asyncio.sleep(GAP_S)
