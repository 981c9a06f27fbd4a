"""Orders of operators while the cluster ran, as files that survive the registry. They appear by rename only.

One small JSON file for each model that was registered, <store>/registrations/<cluster>/<id>.json, and one for what
operators order over the controller's head, <store>/overrides/<cluster>.json. The config that `atelier apply` has put in
the place of the one that the registry started with is <store>/applied/<cluster>.json.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster.records.errors import NotKept
from cluster.records.overrides import Overrides
from cluster.registry.directory import Entry
from configs.cluster import ClusterConfig
from configs.model import ModelId, StrictModel
from configs.workflow import WorkflowConfig
from weights.platform.durable import make_folder, remove_path, replaced, sync

logger = logging.getLogger("atelier.registry")
_IS_ID = TypeAdapter(ModelId)


class Registration(StrictModel):
    """A registered entry. It overrules the config's entry `replaces`, for as long as the config has that entry."""

    entry: Entry | WorkflowConfig
    replaces: Entry | None = None


class Registrations:
    """The registration files of one cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_registrations(self) -> tuple[dict[str, Registration], dict[str, str]]:
        """Return the sound registrations, and why the others cannot be used, both by id."""
        sound: dict[str, Registration] = {}
        damaged: dict[str, str] = {}
        for file in sorted(self._folder.glob("*.json")):
            if not _is_id(file.stem):
                logger.warning("%s: not a registration of a model; left alone", file)
                continue
            try:
                registration = Registration.model_validate_json(file.read_bytes())
            except (OSError, ValidationError) as error:
                damaged[file.stem] = f"{file}: damaged registration: {_reason(error)}"
                continue
            if registration.entry.id == file.stem:
                sound[file.stem] = registration
            else:
                damaged[file.stem] = f"{file}: damaged registration: it is of {registration.entry.id!r}"
        return sound, damaged

    def save(self, registration: Registration) -> None:
        """Write the file durably. Raises NotKept when the disk does not take it."""
        _write(self._file(registration.entry.id), registration)

    def remove(self, id_: str) -> None:
        """Remove the model's file, if there is one. Raises NotKept when the disk does not let it go."""
        file = self._file(id_)
        try:
            if file.exists():
                remove_path(file)
                sync(self._folder)
        except OSError as error:
            raise NotKept(f"{file}: cannot be removed: {error.strerror or error}") from error

    def _file(self, id_: str) -> Path:
        return self._folder / f"{id_}.json"


Kept = TypeVar("Kept", bound=BaseModel)


class KeptFile(Generic[Kept]):
    """A file of one cluster with what an operator has set. `refusal` is raised when it cannot be written, and
    `if_damaged` says in the log what holds when it cannot be read.
    """

    def __init__(self, file: Path, kind: type[Kept], *, if_damaged: str) -> None:
        self._file = file
        self._kind = kind
        self._if_damaged = if_damaged

    def read(self) -> Kept | None:
        """Return the file's content; None where there is no file, or a damaged one."""
        try:
            return self._kind.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            logger.warning("%s: %s: %s", self._file, self._if_damaged, _reason(error))
            return None

    def save(self, content: Kept) -> None:
        """Write the file durably. Raises NotKept when the disk does not take it."""
        _write(self._file, content)

    def remove(self) -> None:
        """Remove the file, if there is one: it is of an earlier life."""
        self._file.unlink(missing_ok=True)


def applied_file(store: Path, cluster: str) -> KeptFile[ClusterConfig]:
    """Return the file of the config that was applied to the cluster."""
    file = store / "applied" / f"{cluster}.json"
    return KeptFile(file, ClusterConfig, if_damaged="the applied config cannot be read, the first one holds")


def overrides_file(store: Path, cluster: str) -> KeptFile[Overrides]:
    """Return the file of operators' manual orders."""
    file = store / "overrides" / f"{cluster}.json"
    return KeptFile(file, Overrides, if_damaged="the orders by hand cannot be read, none hold")


def _write(target: Path, content: BaseModel) -> None:
    try:
        make_folder(target.parent)
        with replaced(target) as staged:
            staged.write_text(content.model_dump_json(exclude_defaults=True), encoding="utf-8")
            sync(staged)
        sync(target.parent)
    except OSError as error:
        raise NotKept(f"{target}: cannot be written: {error.strerror or error}") from error


def _is_id(text: str) -> bool:
    try:
        _IS_ID.validate_python(text)
    except ValidationError:
        return False
    return True


def _reason(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
