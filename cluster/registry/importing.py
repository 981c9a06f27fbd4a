"""What runs in an import process: checkpoints -> the store, one after the other, and what came of each.

`python -m cluster.registry.importing FD PARENT` speaks over the socket FD; `import_process.py` starts it. Light: it
imports neither Ray nor, until a program comes, torch.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import cluster.errors
import weights.errors
from cluster.errors import ImportFailed
from cluster.registry.directory import Entry
from cluster.registry.summaries import ModelSummary, SummaryFiles, summarize
from configs.model import ModelConfig, StrictModel
from weights.formats.checkpoint import recognise
from weights.formats.folder import check_inside
from weights.intake import PROGRAM_SUFFIXES, bring_in, origin_of
from weights.source_mark import source_mark
from weights.sources.mirrors import SOURCES_FOLDER
from weights.sources.object_storage import localized
from weights.store import WeightStore

IDLE_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1


class ImportSettings(StrictModel):
    """Where to, and how: `options` are of object storage, see `localize`. `memory_bytes` of its own at most."""

    store: Path
    options: dict[str, str]
    memory_bytes: int


class Job(StrictModel):
    """A model to bring in. `roots`: the folders that a local checkpoint must lie in; None trusts it."""

    entry: Entry
    roots: tuple[Path, ...] | None = None


class Failure(StrictModel):
    """An error as text: what comes from a process that has read hostile files is not unpickled."""

    error: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        return cls(error=type(error).__name__, text=str(error))

    def raised(self) -> Exception:
        """The error itself where its class is one of ours or Python's, and takes a text."""
        for module in (weights.errors, cluster.errors, builtins):
            class_ = getattr(module, self.error, None)
            if isinstance(class_, type) and issubclass(class_, Exception):
                with contextlib.suppress(TypeError):
                    return class_(self.text)
        return ImportFailed(f"{self.error}: {self.text}")


class Report(StrictModel):
    """What an import process says, one at a time: it has begun, has read so many bytes, is done, or has failed."""

    begun: bool = False
    done_bytes: int | None = None
    summary: ModelSummary | None = None
    failure: Failure | None = None


def import_model(
    store: WeightStore,
    entry: Entry,
    options: Mapping[str, str] = MappingProxyType({}),
    roots: Sequence[Path] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelSummary:
    """Bring a checkpoint in, or find that it is there unchanged: then its manifest is not opened.

    Raises what `bring_in` raises.
    """
    component = entry.component if isinstance(entry, ModelConfig) else None
    files = SummaryFiles(store)
    with localized(entry.path, store.path / SOURCES_FOLDER, options=options, progress=progress) as local:
        if local.path.suffix not in PROGRAM_SUFFIXES:
            origin = origin_of(local, roots)
            check_inside(local.path, origin.roots)
            recognise(local.path)
            settings = {"component": component, "dtype": entry.dtype}
            mark = source_mark(local.path, settings, roots=origin.roots, etags=origin.etags)
            if found := files.find(entry.id, mark):
                return found
        manifest = bring_in(
            store, entry.id, local, component=component, dtype=entry.dtype, roots=roots, progress=progress
        )
    summary = summarize(manifest, store.skeleton(manifest))
    files.save(entry.id, manifest, summary)
    return summary


def serve(connection: Connection, settings: ImportSettings) -> None:
    """Jobs in; for each a report that it has begun, bytes done now and then, and what came of it out."""
    store = WeightStore(settings.store)
    sending = threading.Lock()  # progress comes from the threads that hash

    def tell(report: Report) -> None:
        with sending:
            connection.send_bytes(report.model_dump_json(exclude_defaults=True).encode())

    while connection.poll(IDLE_S):
        try:
            job = Job.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        tell(Report(begun=True))
        try:
            summary = import_model(
                store, job.entry, settings.options, job.roots, lambda done_bytes, _: tell(Report(done_bytes=done_bytes))
            )
            answer = Report(summary=summary)
        except MemoryError:
            text = f"to import it takes more than {settings.memory_bytes} bytes of memory"
            answer = Report(failure=Failure.of(ImportFailed(text)))
        except Exception as error:
            answer = Report(failure=Failure.of(error))
        tell(answer)


def limit_process(memory_bytes: int, parent: int) -> None:
    """End with the parent, whatever this process is doing then; take no more than this; go first when memory is short.

    HAZARD: to Linux the parent is the thread that started this process. It must live as long as that is needed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is said; nobody wants to find 50 GB on the disk
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(descriptor: int, parent: int) -> None:
    connection = Connection(descriptor)
    settings = ImportSettings.model_validate_json(connection.recv_bytes())
    limit_process(settings.memory_bytes, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for those who serve
    serve(connection, settings)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
