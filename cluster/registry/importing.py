"""Imports of checkpoints into the store, in a process of their own, so that none can stall the registry or end it.

A file that crashes its reader, makes it compute for ever or fill the memory ends that process, and fails that model's
import alone; the next import gets another process. `python -m cluster.registry.importing FD PARENT` is that process; it
talks over the socket FD. It imports neither Ray nor, until a program or a class of transformers comes, torch.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import psutil

import cluster.records.errors as cluster_errors
import weights.records.errors as weights_errors
from cluster.process.processes import start_connected
from cluster.records.errors import ImportFailed, ModelUnservable
from cluster.registry.directory import Entry, misplaced, wanted_dtype
from cluster.registry.manifests import ModelSummary, SummaryFiles, summarize
from configs.model import AdapterConfig, ModelConfig, StrictModel
from weights.formats.checkpoint import is_controlnet, read_checkpoint, recognise
from weights.formats.control_files import is_control_file
from weights.formats.folder import check_inside
from weights.formats.pipeline_parts import denoiser_dtype
from weights.formats.source import AdapterBase, BasePipeline, Checkpoint
from weights.memory.needs import Needs
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import cast_types, mark_settings, stored_dtypes, unpacked_types
from weights.operations.intake import PROGRAM_SUFFIXES, import_model, origin_of
from weights.operations.source_mark import source_mark
from weights.platform.panics import panics_as_errors
from weights.records.errors import FormatError, WeightsError
from weights.records.manifest import Manifest
from weights.sources.mirrors import SOURCES_FOLDER
from weights.sources.object_storage import localized
from weights.storage.store import WeightStore

__all__ = ["ImportLimits", "ImportProcess", "ImportProgress", "ImportSettings", "import_checkpoint"]

IDLE_S: Final = 60.0  # an import process without work ends after this
POLL_S: Final = 1.0
Check = Callable[[Checkpoint, Sequence[AdapterBase], str], str | None]
Measure = Callable[[Manifest], Needs]

MODULE: Final = "cluster.registry.importing"
_STARTS: Final = 2  # a process that has gone idle may end just when it is asked
_PR_SET_PDEATHSIG: Final = 1


class ImportSettings(StrictModel):
    """The store to import into, the object storage options (see `localized`), and the process's memory limit.

    `auto_dtype` is what the dtype `auto` means (`weights/platform/processor.py`). `check` is `module:function`: it
    returns why a Checkpoint cannot be served, or does not fit the bases that it is for with its dtype; or None. Without
    one all can. `measure` is one too: it returns the `Needs` of a manifest.
    """

    store: Path
    options: dict[str, str]
    memory_bytes: int
    auto_dtype: str = "auto"
    check: str = ""
    measure: str = ""


class _ImportJob(StrictModel):
    """A model to import. `roots` are the folders that a local checkpoint must lie in; None trusts it."""

    entry: Entry
    roots: tuple[Path, ...] | None = None


class _ImportFailure(StrictModel):
    """An error as text: nothing from a process that has read hostile files is unpickled."""

    error: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the error as text."""
        return cls(error=type(error).__name__, text=str(error))

    def error_itself(self) -> Exception:
        """Return the error itself where its class is ours or Python's and takes a text, otherwise ImportFailed."""
        for module in (weights_errors, cluster_errors, builtins):
            class_ = getattr(module, self.error, None)
            if isinstance(class_, type) and issubclass(class_, Exception):
                with contextlib.suppress(TypeError):
                    return class_(self.text)
        return ImportFailed(f"{self.error}: {self.text}")


class _Report(StrictModel):
    """One message of an import process: it has begun, has read so many bytes, is done, or has failed."""

    begun: bool = False
    done_bytes: int | None = None
    total_bytes: int = 0
    summary: ModelSummary | None = None
    failure: _ImportFailure | None = None


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """The progress of a model's import: bytes that are read, of a download or of its files."""

    id: str
    done_bytes: int
    total_bytes: int


def import_checkpoint(
    store: WeightStore,
    entry: Entry,
    options: Mapping[str, str] = MappingProxyType({}),
    roots: Sequence[Path] | None = None,
    progress: Callable[[int, int], None] | None = None,
    auto_dtype: str = "auto",
    why_unservable: Check | None = None,
    needs_of: Measure | None = None,
) -> ModelSummary:
    """Import a checkpoint, or find it unchanged in the store: then its manifest is not opened.

    Raises what `weights.operations.intake.import_model` raises, and ModelUnservable, before any weights are read, where
    `why_unservable` gives a reason. An adapter is compared with those of its bases that are in the store.
    """
    component = entry.component if isinstance(entry, ModelConfig) else None
    like, parts = like_of(entry, store, roots), parts_of(entry)
    files, bases, widened = SummaryFiles(store), bases_of(entry, store), tuple[str, ...]()
    dtype = wanted_dtype(entry, auto_dtype)
    with localized(entry.path, store.path / SOURCES_FOLDER, options=options, progress=progress) as local:
        if local.path.suffix not in PROGRAM_SUFFIXES:
            origin = origin_of(local, roots)
            check_inside(local.path, origin.roots)
            recognise(local.path)
            like = like or base_of_control(entry, local.path, store)
            dtype = dtype_of(entry, local.path, bases, auto_dtype)
            if reason := _why_not_merged(entry, local.path):
                raise ModelUnservable(reason)
            mark = source_mark(
                local.path, mark_settings(component, dtype, like, parts, roots), roots=origin.roots, etags=origin.etags
            )
            if found := files.find(entry.id, mark, bases):
                return found
            checkpoint = read_checkpoint(local.path, component=component, like=like, parts=parts)
            if why_unservable and (reason := misplaced(entry, checkpoint) or why_unservable(checkpoint, bases, dtype)):
                raise ModelUnservable(reason)
            widened = cast_types(checkpoint, dtype) if entry.dtype == "auto" else ()
            widened += unpacked_types(checkpoint)
        elif why_unservable is not None:
            return owned_program(store, entry, local.path)
        manifest = import_model(
            store,
            entry.id,
            local,
            component=component,
            dtype=dtype,
            like=like,
            parts=parts,
            roots=roots,
            progress=progress,
        )
    summary = summarize(manifest, store.skeleton(manifest), widened)
    if needs_of is not None:
        summary = replace(summary, needs=needs_of(manifest))
    files.save(entry.id, manifest, summary, bases)
    return summary


def owned_program(store: WeightStore | None, entry: Entry, path: Path) -> ModelSummary:
    """Return the summary of a program that the store's owner has imported from there under that id.

    HAZARD: opening one can run its code, so no registration opens any. Raises ModelUnservable.
    """
    if isinstance(entry, AdapterConfig):
        raise ModelUnservable(f"{path}: a program, no adapter: neither a LoRA nor a ControlNet")
    is_onnx = path.suffix == ".onnx"
    if is_onnx and importlib.util.find_spec("onnxruntime") is None:
        raise ModelUnservable(f"{path}: an ONNX model needs onnxruntime: pip install 'atelier-serve[onnx]'")
    manifest = store.find_manifest(entry.id) if store else None
    if not store or not manifest or manifest.kind != "program" or Path(manifest.source) not in (path, path.resolve()):
        options = ("" if is_onnx else " --allow-torch") + (f" --store {store.path}" if store else "")
        why = "may take any time and memory" if is_onnx else "may run code"
        raise ModelUnservable(
            f"{path}: a program {why} when it is opened, so only the store's owner brings it in: "
            f"atelier weights externalize {path} --model {entry.id}{options}"
        )
    if not store.pack_files.has_all(manifest):
        raise ModelUnservable(f"{path}: the store has lost its weights; import it again")
    try:
        return summarize(manifest, store.skeleton(manifest))
    except FormatError as error:
        raise ModelUnservable(f"{path}: {error}") from None


def like_of(entry: Entry, store: WeightStore | None, roots: Sequence[Path] | None = None) -> BasePipeline | None:
    """Return the pipeline that the single file of an entry is like, None for other entries. Raises WeightsError."""
    if not isinstance(entry, ModelConfig) or entry.like is None:
        return None
    return open_base(entry.like, store, roots)


def base_of_control(
    entry: Entry, path: Path, store: WeightStore | None, source: Path | str = ""
) -> BasePipeline | None:
    """Return the pipeline by whose configs an adapter is read that is a ControlNet in one file; None for others.

    `path` is the local checkpoint. A base that is not in the store yet is looked for at its `source`, if that is a
    folder. Raises WeightsError, also for one that is not found.
    """
    if not isinstance(entry, AdapterConfig) or not is_control_file(path):
        return None
    is_stored = store is not None and store.find_manifest(entry.base[0]) is not None
    if not is_stored and isinstance(source, Path) and source.is_dir():
        return open_base(source, store)
    return open_base(entry.base[0], store)


def parts_of(entry: Entry) -> Mapping[str, Path]:
    """Return the VAEs and the draft model that an entry brings, by the component that each becomes."""
    return entry.own_parts if isinstance(entry, ModelConfig) else {}


def bases_of(entry: Entry, store: WeightStore | None) -> tuple[AdapterBase, ...]:
    """Return an adapter's base models in the store; missing ones are left out."""
    found = []
    for id_ in entry.base if store and isinstance(entry, AdapterConfig) else ():
        with contextlib.suppress(WeightsError):
            if store and (base := store.find_manifest(id_)):
                folder = store.skeleton(base)
                parts, class_name = base.components, base.class_name
                dtype = denoiser_dtype(class_name, parts, {})
                found.append(AdapterBase(id_, base.kind, class_name, folder, parts, base.fingerprint, dtype))
    return tuple(found)


def base_of(model: str, checkpoint: Checkpoint, wanted: str) -> AdapterBase:
    """Return a model that an adapter is for, as it will be in the store with that dtype."""
    parts, class_name = {part.name: part for part in checkpoint.components}, checkpoint.class_name
    dtype = denoiser_dtype(class_name, parts, stored_dtypes(checkpoint, wanted))
    return AdapterBase(model, checkpoint.kind, class_name, checkpoint.root, parts, dtype=dtype)


def dtype_of(entry: Entry, path: Path, bases: Sequence[AdapterBase], auto_dtype: str) -> str:
    """Return an entry's dtype: a ControlNet without its own has its base models' dtype, if these agree.

    `path` is the local checkpoint. Raises FormatError.
    """
    dtypes = {base.dtype for base in bases} - {""}
    if entry.dtype == "auto" and len(dtypes) == 1 and is_controlnet(path):
        return dtypes.pop()
    return wanted_dtype(entry, auto_dtype)


def _why_not_merged(entry: Entry, path: Path) -> str | None:
    """Return why an adapter cannot have its `merged_scale`, which the mark of its source does not count in."""
    is_merged = isinstance(entry, AdapterConfig) and entry.merged_scale is not None
    return misplaced(entry, read_checkpoint(path)) if is_merged else None


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Limits of an import without progress, which is to read, to write or to have hashed more.

    `computing_s` is processor time of all its threads: no sound file takes so long to compute on. `silent_s` is
    wall-clock time: it may wait for another writer of the store.
    """

    computing_s: float = 120.0
    silent_s: float = 1800.0


DEFAULT_LIMITS: Final = ImportLimits()


@dataclass(slots=True)
class _LastSign:
    """The last sign of progress: its counters, when it was, and the processor time by then."""

    sign: tuple[int, ...]
    at_s: float
    cpu_s: float

    def limit_passed(self, sign: tuple[int, ...], now_s: float, cpu_s: float, limits: ImportLimits) -> str:
        """Return the limit that is passed, "" for none."""
        if sign != self.sign:
            self.sign, self.at_s, self.cpu_s = sign, now_s, cpu_s
        if cpu_s - self.cpu_s > limits.computing_s:
            return f"it computed for {limits.computing_s:.0f} s without reading or writing anything"
        if now_s - self.at_s > limits.silent_s:
            return f"nothing was read or written for {limits.silent_s:.0f} s"
        return ""


class ImportProcess:
    """An import process, started with the first import and again after it has ended. Thread-safe: one import at a time.

    HAZARD: the process ends with the thread that started it. The threads of `asyncio.to_thread` stay.
    """

    def __init__(self, settings: ImportSettings, limits: ImportLimits = DEFAULT_LIMITS) -> None:
        self._settings = settings
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.progress: ImportProgress | None = None  # of the import that runs

    def import_model(self, entry: Entry, roots: tuple[Path, ...] | None = None) -> ModelSummary:
        """Import the checkpoint; block until that is done. Raises as `import_checkpoint` does, and ImportFailed."""
        with self._lock:
            try:
                report = self._await_outcome(self._send_job(_ImportJob(entry=entry, roots=roots)), entry.id)
            finally:
                self.progress = None
        if report.summary is None:
            raise report.failure.error_itself() if report.failure else ImportFailed("its import ended without a result")
        return report.summary

    def close(self) -> None:
        """Kill the process, even during an import: `atelier weights gc` removes its rests in the store."""
        process = self._process
        if process is not None:
            process.kill()

    def _send_job(self, job: _ImportJob) -> Connection:
        how = ""
        for _ in range(_STARTS):
            try:
                connection = self._connection or self._start()
                connection.send_bytes(job.model_dump_json().encode())
                if _received(connection).begun:
                    return connection
            except (EOFError, OSError):
                how = self._ended()
        raise ImportFailed(f"the import process does not start: it {how}")

    def _await_outcome(self, connection: Connection, id_: str) -> _Report:
        """Return the last report. Raises ImportFailed when the process ended, or was killed for passing a limit."""
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        done_bytes, last = 0, _LastSign((), time.monotonic(), 0.0)
        try:
            while True:
                if not connection.poll(POLL_S):
                    sign = (done_bytes, *_transferred(process))
                    if problem := last.limit_passed(sign, time.monotonic(), sum(process.cpu_times()[:2]), self._limits):
                        self._process.kill()
                        self._ended()
                        raise ImportFailed(f"its import was stopped: {problem}")
                elif (report := _received(connection)).done_bytes is None:
                    return report
                else:
                    done_bytes = report.done_bytes
                    self.progress = ImportProgress(id_, done_bytes, report.total_bytes)
        except (EOFError, OSError, psutil.NoSuchProcess):
            raise ImportFailed(f"the process that imported it {self._ended()}") from None

    def _start(self) -> Connection:
        self._process, self._connection = start_connected(MODULE, os.getpid())
        self._connection.send_bytes(self._settings.model_dump_json().encode())
        return self._connection

    def _ended(self) -> str:
        """Wait for the process to end, and return how it did."""
        assert self._connection is not None
        assert self._process is not None
        self._connection.close()
        self._connection = None
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (perhaps because memory was short)" if name == "SIGKILL" else "")


def _received(connection: Connection) -> _Report:
    return _Report.model_validate_json(connection.recv_bytes())


def _transferred(process: psutil.Process) -> tuple[int, ...]:
    """Return the bytes read and written, by calls and by pages of mapped files.

    Empty where the system does not tell.
    """
    try:
        counts = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):
        return ()
    return (counts.read_chars, counts.write_chars, counts.read_bytes, counts.write_bytes)


def _serve_imports(connection: Connection, settings: ImportSettings) -> None:
    """Receive jobs until there are none; for each report its begin, the bytes done now and then, and the outcome."""
    store = WeightStore(settings.store)
    sending = threading.Lock()  # progress comes from the threads that hash

    def send_report(report: _Report) -> None:
        with sending:
            connection.send_bytes(report.model_dump_json(exclude_defaults=True).encode())

    while connection.poll(IDLE_S):
        try:
            job = _ImportJob.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        send_report(_Report(begun=True))
        try:
            with panics_as_errors():
                summary = import_checkpoint(
                    store,
                    job.entry,
                    settings.options,
                    job.roots,
                    lambda done, total: send_report(_Report(done_bytes=done, total_bytes=total)),
                    settings.auto_dtype,
                    _import_function(settings.check),
                    _import_function(settings.measure),
                )
            answer = _Report(summary=summary)
        except MemoryError:
            text = f"to import it takes more than {settings.memory_bytes} bytes of memory"
            answer = _Report(failure=_ImportFailure.of(ImportFailed(text)))
        except Exception as error:
            answer = _Report(failure=_ImportFailure.of(error))
        send_report(answer)


def _import_function(path: str) -> Any:
    """Return the function `module:function`; None for no name."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name) if module else None


def _limit_process(memory_bytes: int, parent: int) -> None:
    """End this process with its parent, bound its memory, and make it the first victim when memory is short.

    HAZARD: to Linux the parent is the thread that started this process. It must live as long as this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported; a core file of 50 GB is of no use
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _main(descriptor: int, parent: int) -> None:
    """Run an import process that talks over the socket `descriptor` and ends with the process `parent`."""
    connection = Connection(descriptor)
    settings = ImportSettings.model_validate_json(connection.recv_bytes())
    _limit_process(settings.memory_bytes, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the parent
    _serve_imports(connection, settings)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
