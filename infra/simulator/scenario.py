"""The records of a simulation: models, workers, requests and faults.

A trace file has them as lines of JSON, in any order:

    {"kind": "model", "id": "flux", "components": {"vae-1": 335000000}, "service_s": 2.5, "slo": "standard"}
    {"kind": "worker", "id": "w0", "node": "n0", "budget_bytes": 80000000000, "attach_bytes_per_s": 2.5e10}
    {"kind": "request", "at_s": 0.25, "model": "flux", "priority": 1}
    {"kind": "worker_lost", "at_s": 60.0, "worker": "w0"}

Fields that have a default may be left out; `slo` is the name of a class. A line that cannot be used is named with its
number and reason, and left out.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, Final, Literal

from cluster.placement.state import BATCH, INTERACTIVE, STANDARD, Components, SloClass

FAULTS: Final = ("worker_lost", "worker_back", "worker_silent", "worker_lies", "clock_jump")
MAX_LINE: Final = 1_000_000  # characters
_CLASSES: Final = {slo.name: slo for slo in (INTERACTIVE, STANDARD, BATCH)}
_POSITIVE: Final = {"service_s", "speed", "attach_bytes_per_s", "load_bytes_per_s", "slots", "priority", "work"}


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model. A request alone takes `service_s` on a worker of speed 1; each further one of its batch adds
    `batch_growth` of that to the time of all (1: batching gains nothing). The first `num_failing_loads` loads fail.
    """

    id: str
    components: Components
    service_s: float = 1.0
    batch_growth: float = 1.0
    slo: SloClass = STANDARD
    num_failing_loads: int = 0

    def batch_service_s(self, batch_size: int) -> float:
        """Return the worker-seconds per request at a batch size."""
        return self.service_s * (1 + self.batch_growth * (batch_size - 1)) / batch_size


@dataclass(frozen=True, slots=True)
class SimWorker:
    """A worker: how many bytes it holds, how many requests it runs at once, how fast it and its tiers are."""

    id: str
    node: str
    budget_bytes: int
    slots: int = 4
    speed: float = 1.0
    fixed_switch_s: float = 0.0
    attach_bytes_per_s: float = 10e9
    load_bytes_per_s: float = 2e9


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request of a trace; times count from its start. `work` is in requests of its model's usual size.

    A recorded one says when it was started and when it ended, None where it did not, on which worker, and how long it
    waited there for its model; the simulation ignores all four.
    """

    at_s: float
    model: str
    priority: int = 1
    work: float = 1.0
    started_s: float | None = None
    ended_s: float | None = None
    worker: str | None = None
    switch_s: float | None = None


_RECORDS: Final[dict[str, type[Any]]] = {"model": SimModel, "worker": SimWorker, "request": SimRequest}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, or right again, at a moment.

    A *silent* worker works on, but its heartbeats stop. One that *lies* reports models that it does not have and
    figures that are no numbers. At a *clock jump* all ages of one observation are `amount_s` off.
    """

    at_s: float
    kind: Literal["worker_lost", "worker_back", "worker_silent", "worker_lies", "clock_jump"]
    worker: str = ""
    amount_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and its requests. With `nodes_hold_all`, nodes hold the components of every model from the start."""

    models: tuple[SimModel, ...]
    workers: tuple[SimWorker, ...]
    requests: tuple[SimRequest, ...]
    faults: tuple[Fault, ...] = ()
    nodes_hold_all: bool = True

    @property
    def duration_s(self) -> float:
        """The time from the start to the last request."""
        return max((request.at_s for request in self.requests), default=0.0)


def read_trace(lines: Iterable[str]) -> tuple[Scenario, list[str]]:
    """Return the records of the lines, and the problems of those left out. Never raises for what a line says."""
    models: dict[str, SimModel] = {}
    workers: dict[str, SimWorker] = {}
    timed: list[tuple[int, SimRequest | Fault]] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record_of(line)
            if isinstance(record, SimRequest | Fault):
                timed.append((number, record))
                continue
            known: dict[str, Any] = models if isinstance(record, SimModel) else workers
            if record.id in known:
                raise ValueError(f"{record.id!r} is repeated; the first counts")
            known[record.id] = record
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"line {number}: {str(error) or type(error).__name__}")
    requests, faults = [], []
    for number, one in timed:
        if isinstance(one, SimRequest):
            if models and one.model not in models:
                problems.append(f"line {number}: model {one.model!r} has no line of its own")
            else:
                requests.append(one)
        elif workers and one.kind != "clock_jump" and one.worker not in workers:
            problems.append(f"line {number}: worker {one.worker!r} has no line of its own")
        else:
            faults.append(one)
    requests.sort(key=attrgetter("at_s"))
    return Scenario(tuple(models.values()), tuple(workers.values()), tuple(requests), tuple(faults)), problems


def trace_lines(scenario: Scenario) -> Iterator[str]:
    """Yield the lines of a scenario, each with its line end; `read_trace` returns the same records."""
    for kind, records in (("model", scenario.models), ("worker", scenario.workers), ("request", scenario.requests)):
        yield from (_line(kind, record) for record in records)
    yield from (_line(fault.kind, fault) for fault in scenario.faults)


def _line(kind: str, record: SimModel | SimWorker | SimRequest | Fault) -> str:
    values: dict[str, Any] = {"kind": kind}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name == "components":
            value = dict(value.sizes)
        elif field.name == "slo":
            value = value.name
        if field.name != "kind":
            values[field.name] = value
    return json.dumps(values) + "\n"


def _record_of(line: str) -> SimModel | SimWorker | SimRequest | Fault:
    if len(line) > MAX_LINE:
        raise ValueError(f"{len(line)} characters; a line has at most {MAX_LINE}")
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    kind = values.pop("kind", None)
    if kind not in _RECORDS and kind not in FAULTS:
        raise ValueError(f"kind {kind!r}; known: {', '.join([*_RECORDS, *FAULTS])}")
    made = _RECORDS.get(kind, Fault)
    known = {field.name: field for field in fields(made)}
    if kind in FAULTS:
        values["kind"] = kind
    if unknown := values.keys() - known.keys():
        raise ValueError(f"unknown {sorted(unknown)}; known: {', '.join(known)}")
    for name, field in known.items():
        if name in values:
            values[name] = _value_of(name, str(field.type), values[name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    record: SimModel | SimWorker | SimRequest | Fault = made(**values)
    return record


def _value_of(name: str, type_: str, value: Any) -> Any:
    if name == "components":
        if not isinstance(value, dict):
            raise ValueError(f"components is {value!r}; expected bytes by component")
        return Components(value)
    if name == "slo":
        if not isinstance(value, str) or value not in _CLASSES:
            raise ValueError(f"slo is {value!r}; known: {', '.join(_CLASSES)}")
        return _CLASSES[value]
    if value is None and type_.endswith("None"):
        return None
    type_ = type_.removesuffix(" | None")
    if type_ in ("int", "float"):
        is_number = isinstance(value, int if type_ == "int" else int | float) and not isinstance(value, bool)
        least = 1e-9 if name in _POSITIVE else -1e15 if name == "amount_s" else 0
        if not is_number or not least <= value <= 1e15 or not math.isfinite(value):
            raise ValueError(
                f"{name} is {value!r}; expected a{'n integer' if type_ == 'int' else ' number'} from {least} on"
            )
        return value
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected a string")
    return value


def zipf_shares(models: Sequence[str], exponent: float = 1.0) -> dict[str, float]:
    """Return the share of each model's requests: the k-th gets 1 / k^exponent of the first's."""
    weights = [1.0 / rank**exponent for rank in range(1, len(models) + 1)]
    return {model: weight / sum(weights) for model, weight in zip(models, weights, strict=True)}


def poisson(rate: float, shares: Mapping[str, float], duration_s: float, chance: random.Random) -> list[SimRequest]:
    """Return requests of a constant rate (per second)."""
    return _thinned(lambda _: rate, rate, shares, duration_s, chance)


def diurnal(
    mean_rate: float,
    swing: float,
    period_s: float,
    shares: Mapping[str, float],
    duration_s: float,
    chance: random.Random,
) -> list[SimRequest]:
    """Return requests whose rate goes up and down by `swing` (0 to 1) of its mean, as a sine of the given period."""

    def rate_at(at_s: float) -> float:
        return mean_rate * (1 + swing * math.sin(2 * math.pi * at_s / period_s))

    return _thinned(rate_at, mean_rate * (1 + swing), shares, duration_s, chance)


def bursts(
    size: int, every_s: float, models: Sequence[str], duration_s: float, chance: random.Random, spread_s: float = 1.0
) -> list[SimRequest]:
    """Return bursts of one model each, models in turn: `size` requests within `spread_s`."""
    requests = []
    for number in range(math.ceil(duration_s / every_s)):
        model = models[number % len(models)]
        requests += [SimRequest(number * every_s + chance.uniform(0, spread_s), model) for _ in range(size)]
    return sorted(requests, key=lambda request: request.at_s)


def _thinned(
    rate_at: Callable[[float], float],
    max_rate: float,
    shares: Mapping[str, float],
    duration_s: float,
    chance: random.Random,
) -> list[SimRequest]:
    """Return a Poisson process of a changing rate, by thinning (Lewis and Shedler 1979). Models are drawn by share."""
    models, weights = list(shares), list(shares.values())
    at_s, requests = 0.0, []
    while max_rate > 0 and models:
        at_s += chance.expovariate(max_rate)
        if at_s > duration_s:
            break
        if chance.random() * max_rate <= rate_at(at_s):
            requests.append(SimRequest(at_s, chance.choices(models, weights)[0]))
    return requests
