"""The progress of a command: a bar on a terminal, a line now and then anywhere else; and the progress of a start.

A start shows the parts of a cluster that are up. It ends when every startable part is up, or nothing progresses.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self

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
from rich.text import Text

from cluster.records.errors import SessionError

OnProgress = Callable[[int, int], None]  # done, total
Unit = Literal["bytes", "steps", "share"]
LINE_EVERY_S: Final = 10.0
LOOK_EVERY_S: Final = 0.5
_COLUMNS: Final[dict[Unit, Callable[[], tuple[ProgressColumn, ...]]]] = {
    "bytes": lambda: (DownloadColumn(), TransferSpeedColumn()),
    "steps": lambda: (MofNCompleteColumn(),),
    "share": lambda: (TextColumn("{task.percentage:.0f} %"),),
}

_STATES: Final = {
    "registering": "entering the store",
    "updating": "entering the store",
    "ready": "in the store",
    "does_not_fit": "does not fit",
}
_BAR: Final = 20
MAX_MODELS: Final = 8  # that are named on a terminal at once

UNPLACED_S: Final = 10.0  # without a place for a replica, before that is said
STALL_S: Final = 300.0  # without any change, though no model is entering the store: imports have limits of their own
_USABLE: Final = ("ready", "updating", "unloaded")
_ENTERING: Final = ("registering", "updating")
_MAX_NODES: Final = 4  # that are described
_KEYS: Final = {"CPU": "num_cpus", "GPU": "num_gpus"}


@contextlib.contextmanager
def progress_bar(
    what: str,
    unit: Unit = "bytes",
    *,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnProgress]:
    """Yield a reporter of progress, in `unit`s. `quiet` shows nothing; `console` is stderr by default."""
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
    """Report the progress of the body: `look`, in a thread, returns done and total, or None."""
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
    """Progress as lines of a log; short work writes none."""

    def __init__(self, what: str, unit: Unit, console: Console, clock: Callable[[], float]) -> None:
        self._what = what
        self._unit = unit
        self._console = console
        self._clock = clock
        self._start_s = self._next_s = clock()
        self._next_s += LINE_EVERY_S

    def note(self, done: int, total: int) -> None:
        """Take a report, and print it if the last line is old."""
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


@dataclass(frozen=True, slots=True)
class StartState:
    """The state of a cluster that starts: running and wanted replicas by deployment, and the state of models.

    `problems` has an error by model, `imports` done and all bytes by model, and `unplaced` a line by deployment with
    replicas that no node has room for. `health` is what /healthz says, "" without an answer. Before Ray is up, nothing
    is known but the `step`.
    """

    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    health: str = ""
    step: str = ""


def _progress_lines(state: StartState, rate: float = 0.0) -> list[str]:
    """Return the whole state: a line per deployment, then the models that are not in the store yet.

    `rate` is in imported bytes per second, 0 when nobody knows it.
    """
    lines = [*filter(None, [state.step]), *(_replica_line(name, *count) for name, count in state.replicas.items())]
    there = [model for model, found in state.models.items() if found == "ready"]
    others = [_model_line(state, model, rate) for model in state.models if model not in there]
    lines += state.unplaced.values()
    if state.models:
        answering = ": those can be asked" if state.health == "loading" else ""
        lines.append(f"models: {len(there)} of {len(state.models)} in the store{answering}")
    if len(others) > MAX_MODELS:
        others = [*others[: MAX_MODELS - 1], f"… and {len(others) - MAX_MODELS + 1} more"]
    return lines + others


def usable_line(state: StartState) -> str:
    """Return the number of usable models, and the reasons of the others; "" if all are usable."""
    lacking = [model for model, found in state.models.items() if found not in _USABLE]
    if not lacking:
        return ""
    shown = [_model_line(state, model).removeprefix("model ") for model in lacking[:MAX_MODELS]]
    more = [f"and {len(lacking) - MAX_MODELS} more"] if len(lacking) > MAX_MODELS else []
    return f"{len(state.models) - len(lacking)} of {len(state.models)} models usable; not {'; '.join(shown + more)}"


def _progress_news(before: StartState, after: StartState) -> list[str]:
    """Return a line for every deployment and model that has changed since `before`."""
    replicas = [
        _replica_line(name, *count) for name, count in after.replicas.items() if before.replicas.get(name) != count
    ]
    models = [_model_line(after, model) for model, found in after.models.items() if before.models.get(model) != found]
    unplaced = [line for name, line in after.unplaced.items() if before.unplaced.get(name) != line]
    step = [after.step] if after.step and after.step != before.step else []
    return step + replicas + unplaced + models


def _replica_line(name: str, num_running: int, num_wanted: int) -> str:
    if num_wanted == 1:
        return f"{name}: {'running' if num_running else 'starting'}"
    return f"{name}: {num_running} of {num_wanted} replicas running"


def _model_line(state: StartState, model: str, rate: float = 0.0) -> str:
    found = state.models[model]
    more = state.problems.get(model, "").partition("\n")[0]
    if model in state.imports:
        done_bytes, all_bytes = state.imports[model]
        filled = round(_BAR * min(1.0, done_bytes / max(1, all_bytes)))
        left = f", {(all_bytes - done_bytes) / rate:.0f} s left" if rate > 0 and all_bytes > done_bytes else ""
        more = f"{'━' * filled}{'╌' * (_BAR - filled)} {decimal(done_bytes)} of {decimal(all_bytes)}{left}"
    return f"model {model}: {_STATES.get(found, found)}{f': {more}' if more else ''}"


class StartDisplay:
    """Shows the states of one start: the newest on a terminal, the changes with their time anywhere else."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._console = console
        self._clock = clock
        self._start_s = clock()
        self._last = StartState()
        self._rates: dict[str, tuple[float, int]] = {}  # when an import was first seen, and how far it was
        self._status = console.status(Text(title))

    @property
    def last(self) -> StartState:
        """The state that was shown last."""
        return self._last

    @property
    def elapsed_s(self) -> float:
        """The seconds since this display was made."""
        return self._clock() - self._start_s

    def show(self, state: StartState) -> None:
        """Show a state. Called by one thread at a time."""
        if self._console.is_terminal:
            self._status.update(
                Text("\n".join([self._title, *(f"  {line}" for line in _progress_lines(state, self._rate(state)))]))
            )
        else:
            for line in _progress_news(self._last, state):
                self._console.print(f"{self.elapsed_s:6.1f} s  {line}", markup=False, highlight=False, soft_wrap=True)
        self._last = state

    def _rate(self, state: StartState) -> float:
        """Return the bytes per second of running imports, 0 while unknown."""
        now_s = self._clock()
        for model, (done_bytes, _) in state.imports.items():
            self._rates.setdefault(model, (now_s, done_bytes))
        seen = [
            (now_s - self._rates[model][0], done - self._rates[model][1]) for model, (done, _) in state.imports.items()
        ]
        return sum(done / seconds for seconds, done in seen if seconds > 0)

    def close(self) -> None:
        """Take the display off the terminal; twice does nothing."""
        self._status.stop()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StartWatch:
    """Follows the states of one start.

    `timeout_s` bounds the whole of it. `is_private`: nobody adds nodes to this Ray.
    """

    def __init__(self, begun_s: float, *, is_private: bool, timeout_s: float | None = None) -> None:
        self._is_private = is_private
        self._timeout_s = timeout_s
        self._start_s = self._changed_s = begun_s
        self._last = StartState()
        self._unplaced_s: dict[str, float] = {}

    def look(self, state: StartState, now_s: float) -> StartState:
        """Return the state with only the lines on unplaced replicas that are old enough to report."""
        if state != self._last:
            self._last, self._changed_s = state, now_s
        self._unplaced_s = {name: self._unplaced_s.get(name, now_s) for name in state.unplaced}
        old = {name: line for name, line in state.unplaced.items() if now_s - self._unplaced_s[name] >= UNPLACED_S}
        return replace(state, unplaced=old)

    def is_over(self, state: StartState, now_s: float) -> bool:
        """Return whether the start is over, after a look at that state.

        Replicas without a place are not awaited if the rest can serve. Raises SessionError for a failed start.
        """
        missing = {name for name, (num_running, num_wanted) in state.replicas.items() if num_running < num_wanted}
        is_entering = any(found in _ENTERING for found in state.models.values())
        # Without any replica of a kind, its models cannot be asked, and /healthz does not say more.
        is_partial = any(state.replicas.get(name, (1, 1))[0] == 0 for name in state.unplaced) and not is_entering
        can_serve = state.health in ("ok", "degraded") or (state.health != "" and is_partial)
        if can_serve and state.replicas and missing <= state.unplaced.keys():
            return True
        without_door = state.replicas.get("ingress", (1, 1))[0] == 0 and "ingress" in state.unplaced
        if without_door and self._is_private:
            raise SessionError(f"the cluster cannot answer: {state.unplaced['ingress']}")
        if self._timeout_s is not None and now_s - self._start_s >= self._timeout_s:
            raise SessionError(f"the cluster was not ready within {self._timeout_s:g} s: {_shown(state)}")
        if not is_entering and now_s - self._changed_s >= STALL_S:
            raise SessionError(f"nothing has changed for {STALL_S:g} s: {_shown(state)}")
        return False


def _shown(state: StartState) -> str:
    """Return the state in one line: running parts, then missing ones."""
    replicas = [f"{name} {num_running} of {num_wanted}" for name, (num_running, num_wanted) in state.replicas.items()]
    entering = sum(found in _ENTERING for found in state.models.values())
    parts = [
        f"replicas that run: {', '.join(replicas) or 'none'}",
        f"models entering the store: {entering} of {len(state.models)}",
        f"/healthz says {state.health!r}" if state.health else "/healthz does not answer",
        *state.unplaced.values(),
    ]
    return "; ".join(parts)


def unplaced_line(
    name: str, num_unplaced: int, demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> str:
    """Return a line on replicas of deployment `name`, each of which takes `demand` of a node's resources.

    `nodes` are the total resources of each node.
    """
    lacking = sorted(_lacking(demand, nodes))
    keys = [f"{name}.{_KEYS.get(resource, 'placement')}" for resource in lacking] or [f"{name}.num_replicas"]
    why = "no node has as much" if lacking else "all of it is taken"
    replicas = "1 replica finds" if num_unplaced == 1 else f"{num_unplaced} replicas find"
    return (
        f"{name}: {replicas} no place: each takes {_amounts(demand, demand)}, {why} ({_nodes(demand, nodes)}). "
        f"Lower {' or '.join(dict.fromkeys(keys))}, or add a node"
    )


def _lacking(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield the resources of which no single node has enough."""
    for resource, amount in demand.items():
        if all(node.get(resource, 0.0) < amount for node in nodes):
            yield resource


def _nodes(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    shown = ", ".join(f"{_amounts(demand, node)}" for node in nodes[:_MAX_NODES])
    further = f" and {len(nodes) - _MAX_NODES} more" if len(nodes) > _MAX_NODES else ""
    return f"{len(nodes)} node{'s have' if len(nodes) != 1 else ' has'} {shown or 'nothing'}{further}"


def _amounts(demand: Mapping[str, float], amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amounts.get(resource, 0.0):g} {resource}" for resource in demand) or "nothing"
