"""The load generator of `infra.bench door`: a process of its own, so that the client's work delays nobody else.

Run as a program. Each line in is an order as JSON, each line out its outcomes. The line `stop` ends a watch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from infra.bench.door_client import Answer, Client

REFUSED: Final = 429
GONE: Final = 0  # the status of a request whose connection broke
CANCELLED: Final = -1  # the status of a request that its caller gave up
PROBE_SHARE: Final = 0.1  # of the time in Retry-After, between two questions of a prober
MAX_PROBE_SHARE: Final = 2.0  # of that time; who is refused even then is counted as admitted at that moment
MAX_PROBLEM: Final = 120  # characters of an error that are kept
TIMEOUT_HEADER: Final = "x-request-timeout-seconds"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send. `at_s`: after the start, in an open loop. `cancel_s`: when its caller gives up."""

    kind: str
    path: str
    body: dict[str, Any] | None = None
    at_s: float = 0.0
    timeout_s: float | None = None
    cancel_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's end. Times are seconds after the start of the load; `gaps_s` lie between the pieces of a stream.

    `first_s` is the first byte of the body. `admitted_after_s` is the time from a refusal to the first admission of a
    prober who asked again and again; None without one.
    """

    kind: str
    status: int
    sent_s: float
    first_s: float
    done_s: float
    timeout_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    retry_after_s: float | None = None
    admitted_after_s: float | None = None
    problem: str = ""

    @property
    def latency_s(self) -> float:
        return self.done_s - self.sent_s

    @property
    def is_good(self) -> bool:
        """Return whether it was answered, and within its deadline where it had one."""
        return self.status == 200 and (self.timeout_s is None or self.latency_s <= self.timeout_s)


class _Sender:
    """Sends requests by a client. `counts_connecting`: as a part of the time that a request takes."""

    def __init__(self, client: Client, counts_connecting: bool) -> None:
        self._client = client
        self._counts_connecting = counts_connecting
        self._start_s = time.perf_counter()

    async def run_closed(self, asks: Iterable[Ask], num_callers: int, max_s: float | None = None) -> list[Outcome]:
        """Send each request once, by the first caller that is free; no new ones after `max_s`."""
        rest, outcomes = iter(asks), list[Outcome]()

        async def caller() -> None:
            for ask in rest:
                outcomes.append(await self._send(ask))
                if max_s is not None and self._now_s() >= max_s:
                    return

        await asyncio.gather(*(caller() for _ in range(num_callers)))
        return outcomes

    async def run_open(self, asks: Sequence[Ask], probe_every: int) -> list[Outcome]:
        """Send each request at its time, whatever became of the others. Every `probe_every`th that is refused asks
        again until it is admitted; 0: none does.
        """
        refused = itertools.count()

        async def one(ask: Ask) -> Outcome:
            await asyncio.sleep(ask.at_s - self._now_s())
            outcome = await self._send(ask)
            is_prober = outcome.status == REFUSED and bool(probe_every) and next(refused) % probe_every == 0
            return await self._probe(ask, outcome) if is_prober else outcome

        return await asyncio.gather(*(one(ask) for ask in asks))

    async def watch(self, ask: Ask, period_s: float, stop: asyncio.Event) -> list[Outcome]:
        """Send the request every `period_s`, or as often as it is answered, until told to stop."""
        outcomes = list[Outcome]()
        while not stop.is_set():
            outcomes.append(await self._send(ask))
            await asyncio.sleep(outcomes[-1].sent_s + period_s - self._now_s())
        return outcomes

    async def _probe(self, ask: Ask, outcome: Outcome) -> Outcome:
        """Ask again, ten times within the time that the server gave, and so on, until admitted."""
        told_s = outcome.retry_after_s
        if told_s is None:
            return outcome
        for number in range(1, round(MAX_PROBE_SHARE / PROBE_SHARE) + 1):
            asked_s = outcome.done_s + number * PROBE_SHARE * told_s
            await asyncio.sleep(asked_s - self._now_s())
            again = await self._send(ask)
            if again.status != REFUSED:
                return replace(outcome, admitted_after_s=again.sent_s - outcome.done_s)
        return replace(outcome, admitted_after_s=MAX_PROBE_SHARE * told_s)

    async def _send(self, ask: Ask) -> Outcome:
        asked_s = self._now_s()
        answer, problem, status = Answer(), "", GONE
        headers = {} if ask.timeout_s is None else {TIMEOUT_HEADER: f"{ask.timeout_s:g}"}
        try:
            async with asyncio.timeout(ask.cancel_s):
                answer = await self._client.ask(ask.path, ask.body, headers)
            status = answer.status
            if status not in (200, REFUSED):
                problem = answer.text.decode(errors="replace")
        except TimeoutError:
            status, problem = (CANCELLED, "") if ask.cancel_s is not None else (GONE, "no answer in time")
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        pieces_s = [piece_s - self._start_s for piece_s in answer.pieces_s]
        done_s = answer.done_s - self._start_s if answer.status else self._now_s()
        retry_after = answer.headers.get(b"retry-after", b"").decode()
        return Outcome(
            ask.kind,
            status,
            # A thousand connections at once take a client a while, which is not the server's time.
            answer.sent_s - self._start_s if answer.status and not self._counts_connecting else asked_s,
            pieces_s[0] if pieces_s else done_s,
            done_s,
            ask.timeout_s,
            tuple(after_s - before_s for before_s, after_s in itertools.pairwise(pieces_s)),
            float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else None,
            None,
            problem[:MAX_PROBLEM],
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


async def _run_order(order: dict[str, Any], stop: asyncio.Event) -> list[Outcome]:
    """Run one order: `do` is closed, open or watch, the other fields are arguments of `_Sender`'s methods.

    A watch opens a connection for each request, as a prober from outside does, and counts it as the request's time. The
    others keep theirs open.
    """
    do, asks = order["do"], [Ask(**fields) for fields in order["asks"]]
    with closing(Client(order["url"], keeps_open=do != "watch")) as client:
        sender = _Sender(client, counts_connecting=do == "watch")
        if do == "closed":
            return await sender.run_closed(asks, order["num_callers"], order.get("max_s"))
        if do == "open":
            return await sender.run_open(asks, order["probe_every"])
        return await sender.watch(asks[0], order["period_s"], stop)


class LoadGenerator:
    """The driver's end of a load generator. One order at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "infra.bench.door_load"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin_order(self, do: str, url: str, asks: Sequence[Ask], **options: Any) -> None:
        """Start an order: see `_run_order`."""
        self._write(json.dumps({"do": do, "url": url, "asks": [asdict(ask) for ask in asks], **options}))

    def finish_order(self) -> list[Outcome]:
        """Wait for the end of the order. Raises RuntimeError when the generator broke down."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended; its error is above")
        return [Outcome(**(fields | {"gaps_s": tuple(fields["gaps_s"])})) for fields in json.loads(line)]

    def stop(self) -> list[Outcome]:
        """End a watch."""
        self._write("stop")
        return self.finish_order()

    def run(self, do: str, url: str, asks: Sequence[Ask], **options: Any) -> list[Outcome]:
        self.begin_order(do, url, asks, **options)
        return self.finish_order()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


async def _serve_orders() -> None:
    loop = asyncio.get_running_loop()
    line = await loop.run_in_executor(None, sys.stdin.readline)
    while line:
        stop = asyncio.Event()
        running = asyncio.create_task(_run_order(json.loads(line), stop))
        following = asyncio.ensure_future(loop.run_in_executor(None, sys.stdin.readline))
        await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():  # `stop`, or the end of the input
            stop.set()
            if not following.result():
                running.cancel()
                return
        sys.stdout.write(json.dumps([asdict(outcome) for outcome in await running]) + "\n")
        sys.stdout.flush()
        line = await following
        if line == "stop\n":
            line = await loop.run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve_orders())
