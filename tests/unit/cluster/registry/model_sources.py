"""The sources of a test's models."""

from __future__ import annotations

from collections.abc import Callable

from cluster.registry.directory import Entry
from cluster.registry.manifests import ModelSummary
from cluster.registry.publishing import ModelSources

ImportModel = Callable[[Entry], ModelSummary]


class Sources(ModelSources):
    """Sources that do as the functions given."""

    def __init__(
        self,
        import_model: ImportModel,
        check_source: Callable[[Entry], None] = lambda entry: None,
        forget_source: Callable[[str], None] = lambda url: None,
    ) -> None:
        self.import_model = import_model  # type: ignore[method-assign]
        self.check_source = check_source  # type: ignore[method-assign]
        self.forget_source = forget_source  # type: ignore[method-assign]
