"""What the cluster knows of its models, as values. Pure: no Ray, no clock, no I/O.

A `Directory` counts every change as one revision, so that whoever knows revision n is told only what came after. The
`epoch` names one life of the registry: revisions of another life mean nothing, and everything is told anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from configs.model import AdapterConfig, GenerationDefaults, ModelConfig
from weights.feature_sizes import FeatureSizes
from weights.manifest import ModelKind

MAX_REMEMBERED_REMOVALS: Final = 10_000

Entry = ModelConfig | AdapterConfig
# "unloaded": in the store and nowhere else, because somebody said so; the next request brings it back.
ModelState = Literal["registering", "updating", "ready", "unloaded", "unavailable"]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model or adapter. `error` is for the operator: it names the file and the tensor.

    `fingerprint` names the version that is served; "" before there is one. An unavailable model without `kind` never
    made it into the store; one with `kind` did, but could not be attached. A ready one with `error` serves the
    version before an update that failed. `entry` is None when its registration file is damaged. `class_name` is the
    pipeline's; "" for what is none.
    """

    id: str
    state: ModelState
    kind: ModelKind | None = None
    nbytes: int = 0
    fingerprint: str = ""
    error: str = ""
    entry: Entry | None = None
    features: FeatureSizes = field(default_factory=FeatureSizes)
    class_name: str = ""
    revision: int = 0

    @property
    def base(self) -> tuple[str, ...]:
        """The models that an adapter is for; nothing for a model."""
        return self.entry.base if isinstance(self.entry, AdapterConfig) else ()

    @property
    def defaults(self) -> GenerationDefaults:
        return self.entry.defaults if isinstance(self.entry, ModelConfig) else GenerationDefaults()

    @property
    def description(self) -> str:
        return self.entry.description if isinstance(self.entry, ModelConfig) else ""

    @property
    def serves(self) -> bool:
        """Whether some version of it is in the store."""
        return self.kind is not None


@dataclass(frozen=True, slots=True)
class DirectoryChange:
    """What became of the directory up to `revision` of `epoch`; `full`: `changed` is all there is."""

    revision: int
    epoch: str
    changed: tuple[ModelRecord, ...] = ()
    removed: tuple[str, ...] = ()
    full: bool = False

    def __bool__(self) -> bool:
        return self.full or bool(self.changed or self.removed)


class Directory:
    """Records by id, in the order in which they came. Not thread-safe."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.revision = 0
        self._records: dict[str, ModelRecord] = {}
        # Ids by the revision of their last change, oldest first: what is new is found from the end.
        self._changed: dict[str, int] = {}
        self._removed: dict[str, int] = {}
        self._complete_since = 0

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(self._records.values())

    def __contains__(self, id_: object) -> bool:
        return id_ in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, id_: str) -> ModelRecord | None:
        return self._records.get(id_)

    def apply(self, record: ModelRecord) -> ModelRecord:
        """Put the record in place of the one before. Returns it with its revision."""
        self.revision += 1
        record = replace(record, revision=self.revision)
        self._records[record.id] = record
        self._removed.pop(record.id, None)
        self._changed.pop(record.id, None)
        self._changed[record.id] = self.revision
        return record

    def remove(self, id_: str) -> None:
        """Raises KeyError."""
        del self._records[id_], self._changed[id_]
        self.revision += 1
        self._removed[id_] = self.revision
        if len(self._removed) > MAX_REMEMBERED_REMOVALS:
            oldest = next(iter(self._removed))
            self._complete_since = self._removed.pop(oldest)

    def changes_since(self, revision: int, epoch: str) -> DirectoryChange:
        """What somebody who knows `revision` of `epoch` has to hear; everything when that is of another life."""
        if epoch != self.epoch or not self._complete_since <= revision <= self.revision:
            return DirectoryChange(self.revision, self.epoch, tuple(self._records.values()), full=True)
        changed = [self._records[id_] for id_ in _after(self._changed, revision)]
        return DirectoryChange(self.revision, self.epoch, tuple(changed), tuple(_after(self._removed, revision)))

    def absorb(self, change: DirectoryChange) -> None:
        """Follow another directory.

        A registry that has just started says `registering` of models that it has not looked at yet: a version that
        is known to be in the store goes on serving meanwhile.
        """
        known = self._records
        if change.full:
            self._records, self._changed, self._removed = {}, {}, {}
        for id_ in change.removed:
            self._records.pop(id_, None)
            self._changed.pop(id_, None)
            self._removed[id_] = change.revision
        for record in change.changed:
            before = known.get(record.id)
            if record.state == "registering" and before is not None and before.serves:
                record = replace(before, state="updating", entry=record.entry, revision=record.revision)
            self._records[record.id] = record
            self._changed.pop(record.id, None)
            self._changed[record.id] = record.revision
        self.epoch, self.revision, self._complete_since = change.epoch, change.revision, change.revision


def _after(revisions: dict[str, int], revision: int) -> list[str]:
    """The ids that changed later, oldest first."""
    found = []
    for id_ in reversed(revisions):
        if revisions[id_] <= revision:
            break
        found.append(id_)
    return found[::-1]
