"""Changes of a cluster config, and the processes that each change replaces. Pure.

Every key is classified here once, for the plan of `atelier apply`, for the names of the actors, and for what Serve
replaces: each of them asks for the keys of its concern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from configs.cluster import ClusterConfig


class Concern(StrEnum):
    """The parties that a value concerns, from the cheapest on."""

    MODELS = "models"  # the registry, which takes in and removes models while it serves
    LIMITS = "limits"  # queues, batchers and the controller, which take others while they serve
    NUMBER = "number"  # Serve, which starts or ends some replicas
    TEXT_ENCODER = "text_encoder"
    WORKER = "worker"
    INGRESS = "ingress"
    CONTROL_PLANE = "control plane"  # registry, keepers and controller, and so everything
    RAY = "Ray"  # Ray, Serve and its proxy, which do not take other values while they run
    IDENTITY = "identity"  # which cluster it is


DONE: Final[Mapping[Concern, str]] = {
    Concern.MODELS: "registered while it serves",
    Concern.LIMITS: "set while it serves",
    Concern.NUMBER: "replicas start or end",
    Concern.TEXT_ENCODER: "text encoders are replaced one by one",
    Concern.WORKER: "workers are replaced one by one",
    Concern.INGRESS: "ingresses are replaced one by one",
    Concern.CONTROL_PLANE: "needs a new start: keepers read all weights again",
    Concern.RAY: "needs a new start of Ray and Serve",
    Concern.IDENTITY: "another cluster",
}
BEYOND: Final = frozenset({Concern.CONTROL_PLANE, Concern.RAY, Concern.IDENTITY})  # what no running cluster can take

_ENCODER_AND_INGRESS: Final = (Concern.TEXT_ENCODER, Concern.INGRESS)
_WORKER_AND_INGRESS: Final = (Concern.WORKER, Concern.INGRESS)
_MODEL_REPLICAS: Final = (Concern.TEXT_ENCODER, Concern.WORKER)
# The keys of each section. A key stands for all below it, but for those that have a line of their own.
_CONCERNS: Final[tuple[tuple[tuple[Concern, ...], str, str], ...]] = (
    ((Concern.IDENTITY,), "", "name"),
    ((Concern.MODELS,), "", "models adapters model_roots"),
    (_ENCODER_AND_INGRESS, "", "pipelines"),
    ((Concern.INGRESS,), "", "grpc"),
    ((Concern.RAY,), "http", "host port proxy route_prefix haproxy request_timeout_s"),
    ((Concern.INGRESS,), "http", "compat web"),
    (
        (Concern.INGRESS,),
        "access",
        "keys_file requests_per_s max_concurrent max_priority insecure cors_origins allowed_hosts",
    ),
    ((Concern.RAY,), "ray", "address num_cpus object_store_bytes dashboard templates"),
    ((Concern.CONTROL_PLANE,), "ray", "preallocate control_plane"),
    ((Concern.CONTROL_PLANE,), "logging", "format"),
    ((Concern.RAY,), "", "tracing"),
    ((Concern.IDENTITY,), "store", "path"),
    ((Concern.CONTROL_PLANE,), "store", "verify node_budget_bytes object_storage"),
    (
        (Concern.INGRESS,),
        "ingress",
        "num_replicas num_cpus num_gpus placement max_ongoing_requests limits image_hosts image_links image_streams "
        "stored_responses workflow_files shared_memory",
    ),
    (
        (Concern.LIMITS,),
        "admission",
        "max_waiting max_waiting_per_model default_timeout_s priority_levels default_priority max_overtakes tenants "
        "unknown_tenants max_running_pipelines",
    ),
    (
        (Concern.INGRESS,),
        "jobs",
        "keep_s max_bytes max_jobs max_unfinished max_running max_result_bytes timeout_s max_starts max_file_bytes "
        "max_files_bytes max_models_bytes keep_files_s webhooks",
    ),
    ((Concern.CONTROL_PLANE,), "controller", "enabled"),
    ((Concern.LIMITS,), "controller", "policy tick_s slo_classes models"),
    ((Concern.LIMITS, Concern.NUMBER), "controller", "scaling"),  # Serve is told whether the controller scales
    ((Concern.LIMITS,), "text_encoder", "batching"),
    (_ENCODER_AND_INGRESS, "text_encoder", "batching.max_batch_size max_running_inputs max_ongoing_requests"),
    ((Concern.NUMBER,), "text_encoder", "num_replicas"),
    (
        (Concern.TEXT_ENCODER,),
        "text_encoder",
        "num_cpus num_gpus placement device resident_bytes device_budget_bytes cache_bytes",
    ),
    ((Concern.CONTROL_PLANE,), "worker", "device"),  # models with `dtype: auto` are stored in what it computes well
    ((Concern.RAY,), "worker", "standby"),
    (
        _WORKER_AND_INGRESS,
        "worker",
        "max_running_images max_num_seqs max_ongoing_requests checkpoint_interval_s",
    ),
    ((Concern.NUMBER,), "worker", "num_replicas"),
    (
        (Concern.WORKER,),
        "worker",
        "num_cpus num_gpus placement devices ranks resident_bytes device_budget_bytes encodes_alone max_batch_rows "
        "max_batch_pixels max_decode_pixels max_vae_bytes num_threads kv_cache_bytes kv_dtype max_step_tokens "
        "max_decode_delay max_prefill_beside_decode deterministic prompt_lookup packed_arithmetic decode_threads "
        "prefill_threads replay",
    ),
    (_MODEL_REPLICAS, "simulated", "num_devices memory_bytes link_gbps unsupported_ops host_ops"),
)
RULES: Final[Mapping[str, tuple[Concern, ...]]] = {
    ".".join(filter(None, (section, key))): concerns for concerns, section, keys in _CONCERNS for key in keys.split()
}
_LISTS: Final = ("models", "adapters", "pipelines")


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs between two configs. Keys of lists have ids: `models.adder.description`.

    `before` is None for a new entry of a list or mapping, `after` for a removed one.
    """

    key: str
    before: Any
    after: Any
    concerns: tuple[Concern, ...]


def _concerns_of(key: str) -> tuple[Concern, ...]:
    """Return the parties of a key, by its longest matching rule. Raises KeyError for a key without a rule."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (found := RULES.get(".".join(parts[:length]))) is not None:
            return found
    raise KeyError(key)


def changes(before: ClusterConfig, after: ClusterConfig) -> list[Change]:
    """Return the values that differ, in the order of the config's keys."""
    old, new = dict(_values(before)), dict(_values(after))
    found = [change for key in old if old[key] != new[key] for change in _value_changes(key, old[key], new[key])]
    for kind in _LISTS:
        found += _entry_changes(kind, getattr(before, kind), getattr(after, kind))
    return found


def with_live_values(before: ClusterConfig, after: ClusterConfig) -> ClusterConfig:
    """Return the old config with the new values that a running cluster takes without replacing a replica."""
    keys = [key for key, concerns in RULES.items() if {*concerns} <= {Concern.MODELS, Concern.LIMITS}]
    update: dict[str, Any] = {}
    for section, _, name in (key.rpartition(".") for key in keys):
        if section:
            held = update.get(section, getattr(before, section))
            update[section] = held.model_copy(update={name: getattr(getattr(after, section), name)})
        else:
            update[name] = getattr(after, name)
    return before.model_copy(update=update)


def values_of(config: ClusterConfig, *concerns: Concern) -> dict[str, Any]:
    """Return the values that concern one of these parties, JSON-able, by key. The same in every process."""
    wanted = set(concerns)
    found = {key: value for key, value in _values(config) if wanted.intersection(_concerns_of(key))}
    lists = [kind for kind in _LISTS if wanted.intersection(_concerns_of(kind))]
    return found | {kind: [_plain(entry) for entry in getattr(config, kind)] for kind in lists}


def _values(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values, sections opened; lists of entries are left out."""
    for name, field in type(config).model_fields.items():
        key, value = f"{prefix}{name}", getattr(config, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _values(value, f"{key}.")
        elif key not in _LISTS:
            yield key, _plain(value)


def _value_changes(key: str, before: Any, after: Any) -> Iterator[Change]:
    """Yield the differences of a value; of two mappings, each entry that differs."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield Change(key, before, after, _concerns_of(key))
        return
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name), after.get(name)
        if was != now:
            yield from _value_changes(f"{key}.{name}", was, now)


def _entry_changes(kind: str, before: Iterable[Any], after: Iterable[Any]) -> Iterator[Change]:
    concerns = _concerns_of(kind)
    old, new = {entry.id: entry for entry in before}, {entry.id: entry for entry in after}
    for id_ in dict.fromkeys([*old, *new]):
        was, now = old.get(id_), new.get(id_)
        if was is None or now is None:
            yield Change(f"{kind}.{id_}", _plain(was), _plain(now), concerns)
            continue
        for name in type(now).model_fields:
            if (given := getattr(was, name)) != (wanted := getattr(now, name)):
                yield Change(f"{kind}.{id_}.{name}", _plain(given), _plain(wanted), concerns)


def _plain(value: Any) -> Any:
    """Return a value in JSON types. Sets are sorted."""
    if isinstance(value, frozenset):
        return sorted(value)
    return to_jsonable_python(value)
