"""The progress of a start: what of a cluster is there already, on a terminal or as plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

_STATES: Final = {"registering": "entering the store", "updating": "entering the store", "ready": "in the store"}
_BAR: Final = 20
MAX_MODELS: Final = 8  # that are named on a terminal at once


@dataclass(frozen=True, slots=True)
class StartState:
    """The state of a cluster that starts: running and wanted replicas by deployment, and the state of models.

    `problems` has an error by model, `imports` done and all bytes by model, and `unplaced` a line by deployment with
    replicas that no node has room for. `health` is what /healthz says, "" without an answer. Before Ray is up, nothing
    is known.
    """

    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    health: str = ""


def _progress_lines(state: StartState, rate: float = 0.0) -> list[str]:
    """Return the whole state: a line per deployment, then the models that are not in the store yet.

    `rate` is in imported bytes per second, 0 when nobody knows it.
    """
    lines = [_replica_line(name, *count) for name, count in state.replicas.items()]
    there = [model for model, found in state.models.items() if found == "ready"]
    others = [_model_line(state, model, rate) for model in state.models if model not in there]
    lines += state.unplaced.values()
    if state.models:
        answering = ": those can be asked" if state.health == "loading" else ""
        lines.append(f"models: {len(there)} of {len(state.models)} in the store{answering}")
    if len(others) > MAX_MODELS:
        others = [*others[: MAX_MODELS - 1], f"… and {len(others) - MAX_MODELS + 1} more"]
    return lines + others


def _progress_news(before: StartState, after: StartState) -> list[str]:
    """Return a line for every deployment and every model of which `before` said something else."""
    replicas = [
        _replica_line(name, *count) for name, count in after.replicas.items() if before.replicas.get(name) != count
    ]
    models = [_model_line(after, model) for model, found in after.models.items() if before.models.get(model) != found]
    unplaced = [line for name, line in after.unplaced.items() if before.unplaced.get(name) != line]
    return replicas + unplaced + models


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
        """Return the bytes per second of the imports that run, 0 before there is anything to tell it by."""
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
