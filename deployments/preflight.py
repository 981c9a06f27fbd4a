"""Checks of a cluster config before anything starts: `atelier check`, and `atelier up` before Ray.

Headers and configs of the sources are read, and nothing else. What lies in object storage is not looked at; what the
store has already of an unchanged source was found good when it came in.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.ray_seam.ray_files import SHARED_MEMORY
from cluster.records.errors import ModelUnservable
from cluster.registry.directory import Entry, ModelRecord, misplaced, wanted_dtype
from cluster.registry.importing import base_of, base_of_control, bases_of, dtype_of, like_of, owned_program, parts_of
from cluster.registry.manifests import ModelSummary, SummaryFiles
from cluster.registry.room import Room, rank_bytes
from configs.cluster import ClusterConfig, ModelReplicaConfig
from configs.errors import Problem
from configs.hub_names import hub_hint
from configs.loading import STAND_IN_PATH, entry_of, locate_problems, read_cluster_config
from configs.model import AdapterConfig, ModelConfig
from deployments.engines.adapter_bases import check_base
from deployments.engines.needs import PartSizes, needs_of
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import EngineError
from deployments.engines.servable import why_unservable
from deployments.modules.parts import CANNOT_SPLIT
from deployments.pipelines.planning import check_pipeline
from weights.formats.checkpoint import read_checkpoint
from weights.formats.control_files import is_control_file
from weights.formats.source import AdapterBase, BasePipeline, Checkpoint
from weights.memory.layer_plan import AUTO
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import mark_settings, stored_dtypes
from weights.operations.feature_sizes import feature_sizes
from weights.operations.intake import PROGRAM_SUFFIXES
from weights.operations.source_mark import source_mark
from weights.platform.processor import auto_dtype, processor_flags
from weights.records.dtypes import cast_target, tensor_nbytes
from weights.records.errors import AdapterError, WeightsError
from weights.records.manifest import ModelKind
from weights.residency.sizes import shown_bytes
from weights.storage.store import WeightStore

Mistake = tuple[tuple[str | int, ...], str]  # keys, and what is wrong there


@dataclass(frozen=True, slots=True)
class ReadSource:
    """The facts of one entry: its record as the registry will have it, and its headers unless the store has it all."""

    record: ModelRecord
    checkpoint: Checkpoint | None


def check_config(path: Path) -> tuple[ClusterConfig | None, dict[str, ReadSource], list[Problem]]:
    """Return the config, the facts of its models and adapters by id, and every mistake that was found, by line.

    There is no config where too much is wrong. Raises ConfigFileError for a file that cannot be read.
    """
    config, problems = read_cluster_config(path)
    if config is None:
        return None, {}, sorted(problems, key=_line)
    wrong = {entry_of(_keys(problem.key)) for problem in problems}
    sources: dict[str, ReadSource] = {}
    mistakes = [*_source_mistakes(config, path, sources), *_adapter_mistakes(config, sources)]
    mistakes += [*_pipeline_mistakes(config, sources), *device_mistakes(config), *_machine_mistakes(config)]
    mistakes += [*_budget_mistakes(config, sources), *_rank_mistakes(config, sources)]
    # What is wrong in itself may be wrong with others for no other reason; but a path is wrong by itself.
    found = [(keys, text) for keys, text in mistakes if entry_of(keys) not in wrong or keys[-1] == "path"]
    return config, sources, sorted([*problems, *locate_problems(path, found)], key=_line)


def first_of_kind(config: ClusterConfig, kind: ModelKind) -> str | None:
    """Return the first model of that kind whose source is local and can be read; None without one."""
    for model in config.models:
        with contextlib.suppress(WeightsError):
            if (
                isinstance(model.path, Path)
                and _read_source(model, "auto", _like_of(config, model, None)).record.kind == kind
            ):
                return model.id
    return None


def _line(problem: Problem) -> int:
    return problem.line or 0


def _keys(dotted: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in dotted.split("."))


def _source_mistakes(config: ClusterConfig, path: Path, sources: dict[str, ReadSource]) -> Iterator[Mistake]:
    """Yield the problems of sources; put the sound ones into `sources`."""
    store, auto = _store_of(config), auto_dtype(config.worker.device, processor_flags())
    for keys, entry in _entries(config):
        if not isinstance(entry.path, Path) or Path(STAND_IN_PATH) in (entry.path, _path_of_base(config, entry)):
            continue  # told already
        try:
            if _awaits_base(config, entry, store):
                continue
            like = _like_of(config, entry, store)
            found = _kept_source(store, entry, auto, like) or _read_source(entry, auto, like)
        except WeightsError as error:
            if entry.path.exists():
                yield (*keys, "path"), str(error)
            elif store is None or not _is_kept(store, entry):
                yield (*keys, "path"), f"{entry.path}: no such folder or file{_hint(entry.path, path.parent)}"
            continue
        sources[entry.id] = found


def _store_of(config: ClusterConfig) -> WeightStore | None:
    return WeightStore(config.store.path) if config.store.path.is_dir() else None


def _entries(config: ClusterConfig) -> Iterator[tuple[tuple[str | int, ...], Entry]]:
    for index, model in enumerate(config.models):
        yield ("models", index), model
    for index, adapter in enumerate(config.adapters):
        yield ("adapters", index), adapter


def _hint(missing: Path, folder: Path) -> str:
    """Return a hint: a name on a model hub, or a neighbour of nearly that name."""
    parent = missing.parent
    is_bare = not parent.exists() and parent.parent == folder.resolve()
    if is_bare and (url := hub_hint(f"{parent.name}/{missing.name}")):
        return f"; a model of the hub is {url}"
    neighbours = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    nearest = difflib.get_close_matches(missing.name, neighbours, 1, 0.6)
    return f"; did you mean {str(parent / nearest[0])!r}?" if nearest else ""


def _is_kept(store: WeightStore, entry: Entry) -> bool:
    """Return whether the store has the model from there, and serves it without its source."""
    try:
        manifest = store.manifest(entry.id)
    except WeightsError:
        return False
    return manifest.source == str(entry.path) and store.pack_files.has_all(manifest)


def _path_of_base(config: ClusterConfig, entry: Entry) -> Path | str | None:
    """Return the path of the model that an entry's file is like, None where it names none."""
    if isinstance(entry, ModelConfig) and isinstance(entry.like, str) and (base := config.entries.get(entry.like)):
        return base.path
    return None


def _like_of(config: ClusterConfig, entry: Entry, store: WeightStore | None) -> BasePipeline | None:
    """Return the pipeline that an entry's file is like, as the store has it, or as it will come there."""
    if isinstance(entry, ModelConfig) and isinstance(entry.like, str):
        base = config.entries[entry.like]
        if (store is None or store.find_manifest(entry.like) is None) and isinstance(base.path, Path):
            return open_base(base.path, store)
    if isinstance(entry, AdapterConfig) and isinstance(entry.path, Path):
        return base_of_control(entry, entry.path, store, config.entries[entry.base[0]].path)
    return like_of(entry, store)


def _awaits_base(config: ClusterConfig, entry: Entry, store: WeightStore | None) -> bool:
    """Return whether an entry is a ControlNet in one file, and the model by whose configs it is read is elsewhere."""
    if not isinstance(entry, AdapterConfig) or not isinstance(entry.path, Path) or not is_control_file(entry.path):
        return False
    source = config.entries[entry.base[0]].path
    is_folder = isinstance(source, Path) and source.is_dir()
    return not is_folder and (store is None or store.find_manifest(entry.base[0]) is None)


def _kept_source(store: WeightStore | None, entry: Entry, auto: str, like: BasePipeline | None) -> ReadSource | None:
    """Return the stored facts of an unchanged source. Raises FormatError."""
    assert isinstance(entry.path, Path)
    if entry.path.suffix in PROGRAM_SUFFIXES:
        return _kept_program(store, entry) if entry.path.exists() else None
    if store is None:
        return None
    bases = bases_of(entry, store)
    dtype = dtype_of(entry, entry.path, bases, auto)
    found = SummaryFiles(store).find(
        entry.id,
        source_mark(entry.path, mark_settings(_component(entry), dtype, like, parts_of(entry))),
        bases,
    )
    return None if found is None else _of_summary(entry, found)


def _kept_program(store: WeightStore | None, entry: Entry) -> ReadSource:
    """Raises WeightsError for a program that the store's owner has not brought in."""
    assert isinstance(entry.path, Path)
    try:
        return _of_summary(entry, owned_program(store, entry, entry.path))
    except ModelUnservable as error:
        raise WeightsError(str(error)) from None


def _of_summary(entry: Entry, found: ModelSummary) -> ReadSource:
    return ReadSource(ModelRecord(entry.id, "ready", entry=entry, **found.facts), None)


def _component(entry: Entry) -> str | None:
    return entry.component if isinstance(entry, ModelConfig) else None


def _read_source(entry: Entry, auto: str, like: BasePipeline | None) -> ReadSource:
    """Return the facts from headers and configs. Raises WeightsError, also for an unservable model."""
    assert isinstance(entry.path, Path)
    checkpoint = read_checkpoint(entry.path, component=_component(entry), like=like, parts=parts_of(entry))
    if reason := misplaced(entry, checkpoint) or why_unservable(checkpoint):
        raise WeightsError(reason)
    parts = {part.name: part for part in checkpoint.components}
    dtypes = stored_dtypes(checkpoint, wanted_dtype(entry, auto))
    tensor_bytes = {
        name: {key: tensor_nbytes(cast_target(t.dtype, dtypes[name]), t.shape) for key, t in part.tensors.items()}
        for name, part in parts.items()
    }
    sizes_of = {name: PartSizes(part.library, tensor_bytes[name]) for name, part in parts.items()}
    sizes = feature_sizes(checkpoint.kind, checkpoint.components, checkpoint.root)
    record = ModelRecord(
        entry.id,
        "ready",
        kind=checkpoint.kind,
        nbytes=sum(sum(part.tensors.values()) for part in sizes_of.values()),
        entry=entry,
        features=sizes,
        class_name=checkpoint.class_name or "",
        needs=needs_of(checkpoint.kind, checkpoint.class_name or "", sizes_of),
    )
    return ReadSource(record, checkpoint)


def _adapter_mistakes(config: ClusterConfig, sources: Mapping[str, ReadSource]) -> Iterator[Mistake]:
    store, auto = _store_of(config), auto_dtype(config.worker.device, processor_flags())
    for index, adapter in enumerate(config.adapters):
        if adapter.id not in sources or (checkpoint := sources[adapter.id].checkpoint) is None:
            continue
        stored = {base.model: base for base in bases_of(adapter, store)}
        bases: dict[str, AdapterBase] = {}
        for id_ in adapter.base:
            if id_ in sources and (read := sources[id_].checkpoint):
                bases[id_] = base_of(id_, read, wanted_dtype(config.entries[id_], auto))
            elif id_ in sources and id_ in stored:
                bases[id_] = stored[id_]
        dtype = dtype_of(adapter, checkpoint.path, [*bases.values()], auto)
        for place, id_ in enumerate(adapter.base):
            try:
                if id_ in bases:
                    check_base(checkpoint, bases[id_], dtype)
            except AdapterError as error:
                yield ("adapters", index, "base", place), str(error)


def _pipeline_mistakes(config: ClusterConfig, sources: Mapping[str, ReadSource]) -> Iterator[Mistake]:
    known = {id_: source.record for id_, source in sources.items()}
    models: dict[str, ModelRecord | None] = {id_: known.get(id_) for id_ in config.entries}
    for index, pipeline in enumerate(config.pipelines):
        for problem in check_pipeline(pipeline, models):
            yield ("pipelines", index, *problem.location), problem.text


def device_mistakes(config: ClusterConfig) -> Iterator[Mistake]:
    """Yield devices that replicas could not open. Only of a private Ray is it known: other nodes have other devices."""
    names = config.named_devices
    if config.ray.address is not None or all(name.startswith("cpu") for name in names.values()):
        return
    from weights.memory.devices import check_device  # it needs torch

    for keys, name in names.items():
        try:
            check_device(name, config.simulated)
        except WeightsError as error:
            yield keys, str(error)


def _machine_mistakes(config: ClusterConfig) -> Iterator[Mistake]:
    """Yield the resources of a private Ray that this machine lacks."""
    if config.ray.address is not None:
        return
    memory_bytes = psutil.virtual_memory().total
    shared_bytes = psutil.disk_usage(SHARED_MEMORY).total if os.path.isdir(SHARED_MEMORY) else memory_bytes
    asked_bytes = config.ray.object_store_bytes
    for has_bytes, what in ((memory_bytes, "memory"), (shared_bytes, f"{SHARED_MEMORY}")):
        if asked_bytes > has_bytes:
            text = f"{shown_bytes(asked_bytes)} are asked for; this machine has {shown_bytes(has_bytes)} of {what}"
            yield ("ray", "object_store_bytes"), text
            break
    for section, settings in _services(config):
        if settings.resident_bytes > memory_bytes:
            text = f"{shown_bytes(settings.resident_bytes)}; this machine has {shown_bytes(memory_bytes)} of memory"
            yield (section, "resident_bytes"), text
    roles = {"ingress": config.ingress, "text_encoder": config.text_encoder, "worker": config.worker}
    wanted = {name: role.num_replicas * role.num_processes * role.num_cpus for name, role in roles.items()}
    available = config.ray.num_cpus or os.cpu_count() or 1
    if sum(wanted.values()) > available:
        each = ", ".join(f"{name} {count:g}" for name, count in wanted.items())
        text = f"replicas take {sum(wanted.values()):g} CPUs ({each}), Ray has {available:g}: some would wait for ever"
        yield ("ray", "num_cpus"), text


def _services(config: ClusterConfig) -> tuple[tuple[str, ModelReplicaConfig], ...]:
    return ("text_encoder", config.text_encoder), ("worker", config.worker)


def _budget_mistakes(config: ClusterConfig, sources: Mapping[str, ReadSource]) -> Iterator[Mistake]:
    """Yield models of which a service needs more at once than its budget, or a node's."""
    room = Room.of(config)
    for keys, entry in _entries(config):
        if entry.id not in sources or isinstance(entry, AdapterConfig):
            continue
        if entry.gpu_layers != AUTO and (reason := _why_whole(config, sources[entry.id])):
            yield (*keys, "gpu_layers"), reason
            continue
        for lack in room.shortages(entry.id, sources[entry.id].record.needs, entry.gpu_layers):
            yield (*keys, "gpu_layers") if lack.is_wish else keys, lack.text


def _rank_mistakes(config: ClusterConfig, sources: Mapping[str, ReadSource]) -> Iterator[Mistake]:
    """Yield language models that the ranks of a worker cannot divide among them."""
    ranks = config.worker.ranks
    if ranks.tensor == 1:
        return
    from deployments.engines.llm.models.registry import check_ranks, load_config  # it needs torch

    for keys, entry in _entries(config):
        if entry.id not in sources or sources[entry.id].record.kind != "llm" or not isinstance(entry.path, Path):
            continue
        if isinstance(entry, ModelConfig) and entry.draft is not None:
            yield (*keys, "draft"), f"worker.ranks: tensor is {ranks.tensor}, expected 1 for a model with a draft"
        folder = entry.path if entry.path.is_dir() or entry.path.suffix == ".gguf" else entry.path.parent
        try:
            if folder.exists():
                check_ranks(load_config(folder), RankLayout(ranks.cfg, ranks.sequence, ranks.tensor))
        except EngineError as error:
            yield (*keys, "path"), f"worker.ranks: {error}"


def weights_of_ranks(config: ClusterConfig, sources: Mapping[str, ReadSource]) -> Iterator[tuple[str, int, int]]:
    """Yield the models that ranks divide: the bytes of weights that each of them has, and those of all."""
    for id_, source in sources.items():
        decoder = source.record.needs.divided
        if decoder is not None and config.worker.ranks.tensor > 1:
            whole = decoder.rest_bytes + sum(decoder.layers)
            yield id_, rank_bytes(decoder, config.worker.ranks.tensor), whole


def computed_by_rank_0(config: ClusterConfig, sources: Mapping[str, ReadSource]) -> Iterator[str]:
    """Yield image and video models that one rank of a worker computes alone, with the reason."""
    ranks = config.worker.ranks
    if ranks.cfg * ranks.sequence == 1:
        return
    from deployments.engines.diffusion.families import FAMILIES
    from deployments.engines.diffusion.shared_sequence import SHARED_CLASSES  # it needs torch
    from deployments.engines.stock.ranked_calls import DENOISERS, REMAKING_CLASSES, computes_calls

    for id_, source in sources.items():
        checkpoint = source.checkpoint
        if checkpoint is None or checkpoint.kind != "diffusion":
            continue
        family = FAMILIES.get(checkpoint.class_name or "")
        names = DENOISERS if family is None else (family.denoiser_name,)
        classes = {one.class_name or "" for one in checkpoint.components if one.name in names}
        if family is None:
            alone = {name for name in classes if not computes_calls(name, ranks.cfg, ranks.sequence)}
        else:
            alone = classes - SHARED_CLASSES if ranks.cfg == 1 else set()
        parts = {one.class_name for one in checkpoint.components}
        if family is None and "UNet2DConditionModel" in classes and parts & REMAKING_CLASSES:
            yield f"{id_} (a {checkpoint.class_name} makes a denoiser of its own)"
        elif not classes:
            yield f"{id_} (a {checkpoint.class_name} has no denoiser that ranks know)"
        elif alone:
            yield f"{id_} (no plan divides the {'tokens' if ranks.cfg == 1 else 'calls'} of a {alone.pop()})"


def _why_whole(config: ClusterConfig, source: ReadSource) -> str | None:
    """Return why a model has no layers to choose from."""
    if config.worker.torch_device == "cpu":
        return f"worker.device is {config.worker.device}: all layers are computed on the host"
    needs = source.record.needs
    is_counted = source.checkpoint is not None or needs.services
    return CANNOT_SPLIT if is_counted and needs.decoder is None else None
