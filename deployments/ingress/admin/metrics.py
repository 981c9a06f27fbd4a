"""The metrics of a cluster as Prometheus text, made on request, and the admission queue for operators.

Metrics show residency, the exports of all nodes, and waiting and running requests; the queue's state is JSON as well.

An ended replica is missing from the next page; counted in its own process, it would stay on Ray's for a while. A
node with a missing exporter costs the page that node's part, and is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, NamedTuple

import httpx
from fastapi import APIRouter, Query
from starlette.responses import Response

from cluster.admission.records import AdmissionSnapshot
from cluster.placement.serving.link import QueuesAway
from cluster.process.telemetry import Exporter, with_measured_sums
from configs.admission import AdmissionConfig
from deployments.ingress.messages.responses import Answer, call_aside, documented, json_response
from deployments.ingress.service.operations import Operations, Page
from deployments.ingress.service.queues import AdmissionAnswer, Queues, describe_admission
from deployments.records.errors import NoReplica
from deployments.records.tasks import shared_task

_Labels = dict[str, str]
_LOOK_S: Final = 5.0  # Prometheus gives up after 10 s

_PAGE_S: Final = 5.0  # for all nodes together: Prometheus gives up after 10 s
_MAX_PAGE_BYTES: Final = 2**25  # of one node; a node with 16 replicas and 300 models has 4 MB
_MAX_CONNECTIONS: Final = 16
_UP: Final = "atelier_node_metrics_up"
_HEAD: Final = f"# HELP {_UP} Whether the node's exporter answered for this page.\n# TYPE {_UP} gauge\n"
_AWAY = "the controller is restarting; try again"


class _Metric(NamedTuple):
    name: str
    kind: str
    text: str


_NODE: Final = _Metric("node_weights_bytes", "gauge", "Weights in a node's memory, by what holds them there.")
_NODE_BUDGET: Final = _Metric("node_budget_bytes", "gauge", "Weights that a node may keep in memory.")
_NODE_READ: Final = _Metric("node_read_bytes_total", "counter", "Weights that a node has read, by where from.")
_NODE_EVICTED: Final = _Metric("node_evicted_total", "counter", "Extents that left a node's memory for others.")
_REPLICA: Final = _Metric("replica_modules_bytes", "gauge", "Built modules of a replica, by what holds them there.")
_REPLICA_BUDGET: Final = _Metric("replica_budget_bytes", "gauge", "Modules that a replica may keep.")
_DEVICE: Final = _Metric("device_bytes", "gauge", "Weights on a replica's device, by what holds them there.")
_SWITCHES: Final = _Metric("replica_switches_total", "counter", "Switches of a replica to another model.")
_KV: Final = _Metric("kv_blocks", "gauge", "Blocks of a language model's KV cache on a replica.")
_SENT: Final = _Metric("rank_sent_bytes_total", "counter", "Bytes that a rank of a replica has sent to the others.")
_METRICS: Final = (
    *(_NODE, _NODE_BUDGET, _NODE_READ, _NODE_EVICTED),
    *(_REPLICA, _REPLICA_BUDGET, _DEVICE, _SWITCHES, _KV, _SENT),
)


class ResidencyMetrics:
    """The page's part by the answer of /admin/cluster. Simultaneous calls share one look."""

    def __init__(self, operations: Operations, look_s: float = _LOOK_S) -> None:
        self._operations = operations
        self._look_s = look_s
        self._looking: asyncio.Task[str] | None = None

    async def page(self) -> str:
        """Return the part; the empty text where the cluster cannot be described in time."""
        if self._looking is None or self._looking.done():
            self._looking = shared_task(self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(self._look_s):
                cluster = await self._operations.describe_cluster(Page(max_models=0))
                return residency_metrics(cluster.model_dump(mode="json", exclude_unset=True))
        except TimeoutError:
            return ""


def residency_metrics(cluster: Mapping[str, Any]) -> str:
    """Return the answer of /admin/cluster as Prometheus text, without the parts that did not answer."""
    samples: dict[_Metric, list[tuple[_Labels, float]]] = {metric: [] for metric in _METRICS}
    for node in _answered(cluster["nodes"]):
        for metric, labels, value in _of_node(node):
            samples[metric].append((labels, value))
    for service in ("workers", "text_encoders"):
        for replica in _answered(cluster[service]):
            for metric, labels, value in _of_replica(replica):
                samples[metric].append(({"service": service, "replica": replica["name"], **labels}, value))
    return "".join(f"{line}\n" for metric, found in samples.items() for line in _lines(metric, found))


def _label(value: str) -> str:
    """Return a label's value as Prometheus quotes it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _answered(found: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (one for one in found if "unreachable" not in one)


def _of_node(node: Mapping[str, Any]) -> Iterator[tuple[_Metric, _Labels, float]]:
    name = {"node": node["node_id"]}
    for state in ("resident", "leased", "pinned"):
        yield _NODE, {**name, "state": state}, node[f"{state}_bytes"]
    yield _NODE_BUDGET, name, node["budget_bytes"]
    yield _NODE_READ, {**name, "source": "storage"}, node["read_bytes"]
    yield _NODE_READ, {**name, "source": "peers"}, node["peer_bytes"]
    yield _NODE_EVICTED, name, node["num_evicted"]


def _of_replica(replica: Mapping[str, Any]) -> Iterator[tuple[_Metric, _Labels, float]]:
    for state in ("resident", "leased"):
        yield _REPLICA, {"state": state}, replica[f"{state}_bytes"]
    yield _REPLICA_BUDGET, {}, replica["budget_bytes"]
    yield _SWITCHES, {}, replica["num_switches"]
    for arena in filter(None, (replica.get("arena"), *replica.get("other_arenas", ()))):
        for state in ("resident", "leased", "pinned", "lingering", "budget"):
            yield _DEVICE, {"device": arena["device"], "state": state}, arena[f"{state}_bytes"]
    for rank in replica.get("ranks", {}).get("processes", ()):
        if "sent_bytes" in rank:  # one that does not answer has none
            yield _SENT, {"rank": str(rank["rank"])}, rank["sent_bytes"]
    for module in replica["modules"]:
        if blocks := module.get("kv_blocks"):
            for state in ("used", "total"):
                yield _KV, {"model": ",".join(module["models"]), "state": state}, blocks[state]


def _lines(metric: _Metric, found: Iterable[tuple[_Labels, float]]) -> Iterator[str]:
    yield f"# HELP atelier_{metric.name} {metric.text}"
    yield f"# TYPE atelier_{metric.name} {metric.kind}"
    for labels, value in found:
        inside = ",".join(f"{name}={_label(text)}" for name, text in labels.items())
        yield f"atelier_{metric.name}{{{inside}}} {value}"


class NodeMetrics:
    """Fetches the pages of the nodes that `find_exporters` returns, by their ids.

    While Ray does not list the nodes, those of the last list are asked.
    """

    def __init__(
        self,
        find_exporters: Callable[[], Mapping[str, Exporter]],
        page_s: float = _PAGE_S,
        max_page_bytes: int = _MAX_PAGE_BYTES,
    ) -> None:
        self._find_exporters = find_exporters
        self._page_s = page_s
        self._max_page_bytes = max_page_bytes
        self._known: Mapping[str, Exporter] = {}

    async def page(self, transport: httpx.AsyncBaseTransport | None = None) -> str:
        """Return the nodes' pages behind a gauge that is 0 for each whose page is missing."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._page_s
        with contextlib.suppress(Exception):  # Ray's head is away, which shows in many errors
            async with asyncio.timeout_at(end_s - self._page_s / 2):
                self._known = await asyncio.to_thread(self._find_exporters)
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
        # The pages are plain HTTP: to read the certificates of all authorities would hold the event loop up for 15 ms.
        nobody_trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        async with httpx.AsyncClient(
            timeout=self._page_s, limits=limits, transport=transport, trust_env=False, verify=nobody_trusted
        ) as client:
            fetching = (self._fetched(client, one.url, end_s) for one in self._known.values())
            pages = await asyncio.gather(*fetching)
        ups = (
            f'{_UP}{{node="{node}",address="{exporter.address}"}} {int(page is not None)}\n'
            for (node, exporter), page in zip(self._known.items(), pages, strict=True)
        )
        return "".join((_HEAD, *ups, *(page for page in pages if page is not None)))

    async def _fetched(self, client: httpx.AsyncClient, url: str, end_s: float) -> str | None:
        """Return a node's page; None for one that is missing, late or too large."""
        found = bytearray()
        try:
            async with asyncio.timeout_at(end_s), client.stream("GET", url) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    found += piece
                    if len(found) > self._max_page_bytes:
                        return None
            text = found.decode()
        except (httpx.HTTPError, TimeoutError, UnicodeDecodeError):
            return None
        return await call_aside(len(found), with_measured_sums, text if text.endswith("\n") else f"{text}\n")


class EndedAnswer(Answer):
    """Requests that have ended, oldest first, with the seconds of their arrival, start and end."""

    requests: list[dict[str, Any]]
    next_number: int
    now_s: float


def add_admission_routes(
    router: APIRouter, queue: Queues, retune: Callable[[AdmissionConfig], Awaitable[AdmissionAnswer]]
) -> None:
    """Add the routes. `retune` sets the values of a PUT."""

    @router.get("/admin/admission", response_model=AdmissionAnswer, responses=documented(_503=_AWAY))
    async def admission() -> Response:
        """Show the settings of the admission queue, its waiting and running requests, and measured times."""
        with _as_unavailable():
            return json_response(await describe_admission(queue))

    @router.get("/admin/requests", response_model=EndedAnswer, responses=documented(400, _503=_AWAY))
    async def ended_requests(after: Annotated[int | None, Query(ge=0, le=2**53)] = None) -> Response:
        """Show the requests that have left their replicas lately, from number `after` on; without it, none.

        `next_number` asks for the following ones. Times are seconds of the queue's clock, which says `now_s` now.
        """
        with _as_unavailable():
            found = await queue.ended_requests(after)
        requests = [asdict(one) for one in found.requests]
        return json_response(EndedAnswer(requests=requests, next_number=found.next_number, now_s=found.now_s))

    @router.put("/admin/admission", response_model=AdmissionAnswer, responses=documented(400, _503=_AWAY))
    async def set_admission(body: AdmissionConfig) -> Response:
        """Set bounds, deadlines, priorities and tenants from now on; waiting requests stay.

        Fields as in a cluster config (`admission`); omitted ones have their defaults. Ingress replicas that start later
        begin with it as well, for as long as the registry lives: write it into the config to keep it.
        """
        with _as_unavailable():
            return json_response(await retune(body))


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    try:
        yield
    except QueuesAway as error:
        raise NoReplica(str(error)) from None


def admission_metrics(snapshot: AdmissionSnapshot) -> str:
    """Return the queue as Prometheus text."""
    return "".join(f"{line}\n" for line in _metric_lines(snapshot))


def _metric_lines(snapshot: AdmissionSnapshot) -> Iterator[str]:
    metrics = (
        ("waiting", "gauge", "Requests that wait for a place.", "waiting"),
        ("oldest_age_seconds", "gauge", "Age of the request that waits longest.", "oldest_age_s"),
        ("running", "gauge", "Requests that have a place.", "running"),
        ("arrivals_per_second", "gauge", "Arrivals of late.", "rate_short"),
        ("service_seconds", "gauge", "Replica seconds of a mean request.", "service_s"),
        ("latency_seconds", "gauge", "Time in a replica of a mean request.", "latency_s"),
        ("started_total", "counter", "Requests that got a place.", "started"),
        ("refused_total", "counter", "Requests that were refused.", "refused"),
    )
    for name, kind, text, field in metrics:
        yield f"# HELP atelier_admission_{name} {text}"
        yield f"# TYPE atelier_admission_{name} {kind}"
        for load in snapshot.models:
            labels = f"pool={_label(load.pool)},model={_label(load.model)}"
            yield f"atelier_admission_{name}{{{labels}}} {getattr(load, field):g}"
