"""The directory of models: one record per model, and its changes by revision. Pure: no Ray, no clock, no I/O.

Every change is one revision, so that a reader who knows revision n is sent only what came after. The `epoch` names one
life of the registry: revisions of another life mean nothing, and everything is sent anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from cluster.records.errors import RegistrationConflict, RegistrationRefused
from configs.model import AdapterConfig, GenerationDefaults, ModelConfig
from configs.workflow import WorkflowConfig
from weights.formats.learned_words import WORDS_CLASS
from weights.formats.lora import PEFT_CLASS
from weights.formats.source import Checkpoint
from weights.memory.needs import Needs
from weights.operations.feature_sizes import FeatureSizes
from weights.programs.signature import ProgramSignature
from weights.records.errors import listed
from weights.records.manifest import ModelKind

MAX_REMEMBERED_REMOVALS: Final = 10_000
ADAPTERS: Final[Mapping[str, str]] = {"adapter": "LoRA", "controlnet": "ControlNet", "ip_adapter": "IP-Adapter"}

Entry = ModelConfig | AdapterConfig


def wanted_dtype(entry: Entry, auto_dtype: str) -> str:
    """Return an entry's dtype; `auto` means `auto_dtype`."""
    return auto_dtype if entry.dtype == "auto" else entry.dtype


def rests_on(entry: Entry) -> tuple[str, ...]:
    """Return the ids of the models that an entry is like or an adapter of: they come before it."""
    if isinstance(entry, AdapterConfig):
        return entry.base
    return (entry.like,) if isinstance(entry.like, str) else ()


def circle_of(entry: Entry, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """Return the ids by which an entry rests on itself, its own at both ends; empty for one that does not.

    HAZARD: on such a way, a wait for all that an entry rests on waits for itself.
    """
    seen = set[str]()
    ways: list[tuple[str, ...]] = [(entry.id, id_) for id_ in rests_on(entry)]
    while ways:
        way = ways.pop()
        if way[-1] == entry.id:
            return way
        if way[-1] not in seen and (other := entries.get(way[-1])):
            seen.add(way[-1])
            ways += [(*way, id_) for id_ in rests_on(other)]
    return ()


def misplaced(entry: Entry, checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint does not match its entry of a config; None if it does."""
    is_adapter = checkpoint.kind in ADAPTERS
    if isinstance(entry, ModelConfig):
        what = ADAPTERS.get(checkpoint.kind, "")
        return f"{checkpoint.path}: a {what}, no model: an adapter, with its models as base" if is_adapter else None
    if (
        any(
            name.startswith(("ip_adapter.", "ip_adapter_proj_model."))
            for part in checkpoint.components
            for name in part.tensors
        )
        and not is_adapter
    ):
        return f"{checkpoint.path}: an IP-Adapter's file: name its folder, in which its image_encoder lies beside it"
    if not is_adapter:
        kinds = ", ".join(ADAPTERS.values())
        return f"{checkpoint.path}: a model of kind {checkpoint.kind!r}, no adapter (known: {kinds})"
    if entry.merged_scale is not None and (
        checkpoint.kind != "adapter" or checkpoint.class_name in (PEFT_CLASS, WORDS_CLASS)
    ):
        return f"{checkpoint.path}: merged_scale is for LoRAs of diffusion pipelines, which this is not"
    return None


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model or adapter as the registry and every registry snapshot know it.

    `fingerprint` names the version that is served, "" before there is one. `error` is for the operator: it names the
    file and the tensor. An unavailable model without `kind` never came into the store; one with `kind` did, but could
    not be attached. A ready one with `error` serves the version before an update that failed. `entry` is None when the
    registration file is damaged. `class_name` is the pipeline's, "" without one, and `variant` tells
    pipelines of one class apart. A registered `workflow` is no model: it has no entry, no kind and no bytes.
    """

    id: str
    # "unloaded": in the store and nowhere else, because an operator evicted it; the next request brings it back.
    # "does_not_fit": in the store, and larger than the budgets of this cluster; `error` has the numbers.
    state: Literal["registering", "updating", "ready", "unloaded", "unavailable", "does_not_fit"]
    kind: ModelKind | None = None
    nbytes: int = 0
    fingerprint: str = ""
    error: str = ""
    entry: Entry | None = None
    features: FeatureSizes = field(default_factory=FeatureSizes)
    class_name: str = ""
    variant: Mapping[str, bool | int] = field(default_factory=dict)
    revision: int = 0
    widened: tuple[str, ...] = ()  # as in its summary
    signature: ProgramSignature | None = None  # of a program
    needs: Needs = field(default_factory=Needs)
    workflow: WorkflowConfig | None = None

    @property
    def base(self) -> tuple[str, ...]:
        """The models that an adapter is for; empty for a model."""
        return self.entry.base if isinstance(self.entry, AdapterConfig) else ()

    @property
    def defaults(self) -> GenerationDefaults:
        """The defaults of requests that the config gives; empty for an adapter."""
        return self.entry.defaults if isinstance(self.entry, ModelConfig) else GenerationDefaults()

    @property
    def description(self) -> str:
        """The config's description, "" without one."""
        if self.workflow is not None:
            return self.workflow.description
        return self.entry.description if isinstance(self.entry, ModelConfig) else ""

    @property
    def serves(self) -> bool:
        """Return whether some version of it is in the store."""
        return self.kind is not None


@dataclass(frozen=True, slots=True)
class DirectoryChange:
    """The changes of a directory up to `revision` of `epoch`. With `full`, `changed` is the whole directory."""

    revision: int
    epoch: str
    changed: tuple[ModelRecord, ...] = ()
    removed: tuple[str, ...] = ()
    full: bool = False

    def __bool__(self) -> bool:
        return self.full or bool(self.changed or self.removed)


class Directory:
    """Model records by id, in the order in which they came. Not thread-safe."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.revision = 0
        self._records: dict[str, ModelRecord] = {}
        # Ids by the revision of their last change, oldest first: new ones are found from the end.
        self._changed: dict[str, int] = {}
        self._removed: dict[str, int] = {}
        self._complete_since = 0

    @property
    def records(self) -> Mapping[str, ModelRecord]:
        """The records by id, as they are now."""
        return self._records

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(self._records.values())

    def __contains__(self, id_: object) -> bool:
        return id_ in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, id_: str) -> ModelRecord | None:
        """Return the record of that id, or None."""
        return self._records.get(id_)

    def apply(self, record: ModelRecord) -> ModelRecord:
        """Put the record in place of the one before. Return it with its revision."""
        self.revision += 1
        record = replace(record, revision=self.revision)
        self._records[record.id] = record
        self._removed.pop(record.id, None)
        self._changed.pop(record.id, None)
        self._changed[record.id] = self.revision
        return record

    def remove(self, id_: str) -> None:
        """Remove the record. Raises KeyError without one."""
        del self._records[id_], self._changed[id_]
        self.revision += 1
        self._removed[id_] = self.revision
        if len(self._removed) > MAX_REMEMBERED_REMOVALS:
            oldest = next(iter(self._removed))
            self._complete_since = self._removed.pop(oldest)

    def changes_since(self, revision: int, epoch: str) -> DirectoryChange:
        """Return the changes after `revision`; the whole directory when `epoch` is another life's."""
        if epoch != self.epoch or not self._complete_since <= revision <= self.revision:
            return DirectoryChange(self.revision, self.epoch, tuple(self._records.values()), full=True)
        changed = [self._records[id_] for id_ in _after(self._changed, revision)]
        return DirectoryChange(self.revision, self.epoch, tuple(changed), tuple(_after(self._removed, revision)))

    def absorb(self, change: DirectoryChange) -> None:
        """Apply the changes of another directory to this copy of it.

        A registry that has just started reports models as `registering` before it has looked at them: a version that is
        known to be in the store goes on serving meanwhile.
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
            self._changed[record.id] = record.revision
        self.epoch, self.revision, self._complete_since = change.epoch, change.revision, change.revision


def check_entry(directory: Directory, entry: Entry) -> None:
    """Raise unless the entry fits beside the registered ones, by the rules of a cluster config.

    Raises RegistrationRefused naming the field, RegistrationConflict when the id is of another sort.
    """
    if isinstance(entry.path, Path) and not entry.path.is_absolute():
        problem = f"{str(entry.path)!r} is relative; expected an absolute path, an s3:// or an hf:// URL"
        raise RegistrationRefused(problem, "path")
    record = directory.get(entry.id)
    if record and record.workflow:
        raise RegistrationConflict(f"{entry.id!r} is a workflow already; a model needs another id", "id")
    if record and record.entry and type(record.entry) is not type(entry):
        is_adapter = isinstance(record.entry, AdapterConfig)
        was, now = ("an adapter", "a model") if is_adapter else ("a model", "an adapter")
        raise RegistrationConflict(f"{entry.id!r} is {was} already; {now} needs another id", "id")
    if isinstance(entry, ModelConfig) and entry.like is not None:
        _check_like(directory, entry.id, entry.like)
    for name, path in entry.own_parts.items() if isinstance(entry, ModelConfig) else ():
        if not path.is_absolute():
            raise RegistrationRefused(f"{str(path)!r} is relative; expected an absolute path", name)
    if isinstance(entry, AdapterConfig):
        found = {id_: directory.get(id_) for id_ in entry.base}
        unknown = sorted(id_ for id_, base in found.items() if not base or not _is_model(base))
        if unknown:
            models = [record.id for record in directory if _is_model(record)]
            raise RegistrationRefused(f"unknown {', '.join(unknown)} (models: {listed(models)})", "base")


def _is_model(record: ModelRecord) -> bool:
    return record.workflow is None and not isinstance(record.entry, AdapterConfig)


def _check_like(directory: Directory, id_: str, like: Path | str) -> None:
    if isinstance(like, Path):
        if not like.is_absolute():
            raise RegistrationRefused(f"{str(like)!r} is relative; expected an absolute path, or a model's id", "like")
        return
    whole = [record.id for record in directory if isinstance(record.entry, ModelConfig) and not record.entry.like]
    models = [other for other in whole if other != id_]
    if like not in models:  # two entries that are `like` others could wait for each other
        what = "this model itself" if like == id_ else "no pipeline with configs of its own"
        raise RegistrationRefused(f"{like!r} is {what} (models: {listed(models)})", "like")


def _after(revisions: dict[str, int], revision: int) -> list[str]:
    """Return the ids that changed after `revision`, oldest first."""
    found = []
    for id_ in reversed(revisions):
        if revisions[id_] <= revision:
            break
        found.append(id_)
    return found[::-1]
