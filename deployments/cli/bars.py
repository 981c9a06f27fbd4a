"""The progress of a command: a bar with an estimate on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

OnProgress = Callable[[int, int], None]  # done, total
Unit = Literal["bytes", "steps", "share"]
LINE_EVERY_S: Final = 10.0
LOOK_EVERY_S: Final = 0.5
_COLUMNS: Final[dict[Unit, Callable[[], tuple[ProgressColumn, ...]]]] = {
    "bytes": lambda: (DownloadColumn(), TransferSpeedColumn()),
    "steps": lambda: (MofNCompleteColumn(),),
    "share": lambda: (TextColumn("{task.percentage:.0f} %"),),
}


@contextlib.contextmanager
def progress_bar(
    what: str,
    unit: Unit = "bytes",
    *,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnProgress]:
    """Yield what is told how far the work is, in `unit`s. `quiet` shows nothing; `console` is stderr by default."""
    console = console or Console(stderr=True)
    if not quiet and not console.is_terminal:
        yield _Lines(what, unit, console, clock).note
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *_COLUMNS[unit](), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def followed(look: Callable[[], tuple[int, int] | None], on_progress: OnProgress) -> Iterator[None]:
    """Ask `look` in a thread how far the work of the body is, done and total, and tell that; None tells nothing."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            if (far := look()) is not None and not is_over.is_set():
                on_progress(*far)

    # Not waited for at the end: a look at a server that hangs holds nobody up.
    threading.Thread(target=follow, name="progress", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class _Lines:
    """Says how far the work is as lines of a log: none for what is done soon."""

    def __init__(self, what: str, unit: Unit, console: Console, clock: Callable[[], float]) -> None:
        self._what = what
        self._unit = unit
        self._console = console
        self._clock = clock
        self._start_s = self._next_s = clock()
        self._next_s += LINE_EVERY_S

    def note(self, done: int, total: int) -> None:
        """Take a report, and say it where the last one was long ago."""
        now_s = self._clock()
        if now_s < self._next_s or total <= 0:
            return
        self._next_s = now_s + LINE_EVERY_S
        elapsed_s = now_s - self._start_s
        far = {"bytes": f"{decimal(done)} of {decimal(total)}", "steps": f"{done} of {total}", "share": ""}[self._unit]
        # Of less than a hundredth it says nothing: what comes before the first byte takes its time as well.
        left = f"about {elapsed_s * (total - done) / done:.0f} s left" if total <= 100 * done < 100 * total else ""
        text = ", ".join(part for part in (f"{self._what}: {done / total:.0%}", far, left) if part)
        self._console.print(f"{elapsed_s:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)
