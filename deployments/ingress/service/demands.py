"""The demands of requests on the admission queue: their terms, their work, and their time limits."""

from __future__ import annotations

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import Demand
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.engines.stock.known import is_stock_class
from deployments.ingress.messages.terms import Request, Terms, current_terms, demand_of, with_fields
from deployments.pipelines.records import PipelineRequest


class Demands:
    """Computes terms and demands by the present settings of the queue."""

    def __init__(self, config: ClusterConfig, queue: Dispatcher, snapshot: RegistrySnapshot) -> None:
        self._config = config
        self._queue = queue
        self._snapshot = snapshot

    def terms(self, request: Request | PipelineRequest) -> Terms:
        """Return the terms of a request by its fields and headers, within its rights. Raises InvalidRequest."""
        terms = with_fields(current_terms.get(), request).within_rights(self._queue.config)
        terms.checked(self._queue.config)
        return terms

    def demand(self, request: Request, terms: Terms) -> Demand:
        """Return what a request asks for that has its defaults."""
        timeout_s, record = self.timeout_s(terms), self._snapshot.find_model(request.model)
        is_stock = record is not None and record.kind == "diffusion" and is_stock_class(record.class_name)
        return demand_of(request, terms.checked(self._queue.config), timeout_s, self._config, is_stock=is_stock)

    def timeout_s(self, terms: Terms) -> float:
        """Return the time that is left to a request."""
        if (longest_s := terms.max_timeout_s) is not None:
            return min(longest_s, terms.timeout_s or longest_s) - terms.waited_s
        most_s = self._config.http.request_timeout_s
        timeout_s = min(most_s, terms.timeout_s or self._queue.config.default_timeout_s or most_s)
        return timeout_s - terms.waited_s
