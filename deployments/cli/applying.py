"""Applies a config to a running cluster: its registry learns of the config, and Serve replaces replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import ray

from cluster.process.ray_calls import call_actor, get, named_actors
from cluster.ray_seam.serve_control import DeployedApp, ServeReplicas, deployed_app
from cluster.records.actor_names import names_of_cluster, registry_name
from cluster.records.errors import SessionError
from cluster.registry.actor import WeightRegistry, find_registry
from cluster.start.session_records import note_applied, record_folder
from configs.changes import Concern, changes, with_live_values
from configs.cluster import ClusterConfig

if TYPE_CHECKING:
    from cluster.registry.directory import ModelRecord

_CALL_S: Final = 30.0
_POLL_S: Final = 0.2
NO_ROOM_S: Final = 30.0
NO_START_S: Final = 300.0  # of a process that has a place, on a machine with a lot else to do
REPLACED: Final = frozenset({Concern.NUMBER, Concern.TEXT_ENCODER, Concern.WORKER, Concern.INGRESS})


def running_config(wanted: ClusterConfig) -> tuple[Any, ClusterConfig]:
    """Return the registry of the named cluster, and its present config.

    Raises SessionError when it does not answer.
    """
    found = [name for name in names_of_cluster(wanted.name, named_actors()) if name.startswith("registry:")]
    own = registry_name(wanted)
    registry = find_registry(own if own in found else found[0]) if found else None
    if registry is None:
        raise SessionError(f"the registry of cluster {wanted.name!r} is restarting; try again")
    return registry, _ask(registry, WeightRegistry.config)


def carry_out(
    registry: Any, running: ClusterConfig, wanted: ClusterConfig, say: Callable[[str], None]
) -> Sequence[str]:
    """Change a running cluster from one config to another; return the problems. Blocks until all is done.

    All changes must be possible in a running cluster. The registry stores the rest of the new config once Serve has it.
    Raises SessionError.
    """
    concerns = {concern for change in changes(running, wanted) for concern in change.concerns}
    problems, present = [], running
    if concerns & {Concern.MODELS, Concern.LIMITS}:
        taken = with_live_values(running, wanted)
        _configure(registry, present, taken)
        present = taken
        problems += _await_models(registry, running, wanted, say)
        problems += _follow(running, wanted)
        say("models, adapters, limits and how models are placed are those of the config")
    if concerns & REPLACED:
        _replace(running, wanted)
        _configure(registry, present, wanted)
        _await_replicas(wanted)
        say("replicas are those of the config")
    return problems


def _configure(registry: Any, before: ClusterConfig, after: ClusterConfig) -> None:
    """Make the registry store another config, which `atelier up` then compares its own with. Raises SessionError."""
    _ask(registry, WeightRegistry.configure, after)
    note_applied(record_folder(), before, after)


def _ask(registry: Any, method: Any, *arguments: Any) -> Any:
    try:
        return get(call_actor(registry, method, *arguments), _CALL_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise SessionError(f"the registry does not answer ({type(error).__name__}); try again") from None


def _await_models(
    registry: Any, running: ClusterConfig, wanted: ClusterConfig, say: Callable[[str], None]
) -> list[str]:
    """Wait until all new or changed models are in the store or known to be unusable; return the unusable ones."""
    ids = {id_ for id_, entry in wanted.entries.items() if running.entries.get(id_) != entry}
    while True:
        records: Sequence[ModelRecord] = _ask(registry, WeightRegistry.list_models)
        mine = [record for record in records if record.id in ids]
        if not any(record.state in ("registering", "updating") for record in mine):
            break
        time.sleep(_POLL_S)
    gone = running.entries.keys() - wanted.entries.keys()
    if orphans := [record.id for record in records if not gone.isdisjoint(record.base)]:
        say(f"adapters of models that are gone, registered beside the config: {', '.join(orphans)}")
    return [f"{record.id}: {record.error}" for record in mine if record.error]


def _follow(running: ClusterConfig, wanted: ClusterConfig) -> list[str]:
    """Update the ingresses, and through them the replicas. Return the problems."""
    from ray import serve

    try:
        followed = serve.get_app_handle(wanted.name).follow.remote(running, wanted)
        problems: list[str] = followed.result(timeout_s=_CALL_S)
    except (TimeoutError, ray.exceptions.RayError) as error:
        return [f"the ingress does not follow: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"]
    return problems


def _replace(running: ClusterConfig, wanted: ClusterConfig) -> None:
    """Make Serve replace the changed deployments. If the controller scales, the number of workers stays.

    Raises SessionError.
    """
    from deployments.app import versioned_app
    from deployments.console.running import run_application

    app = _deployed(wanted)
    if not app.replicas:
        raise SessionError(f"Serve runs no application {wanted.name!r} now; `atelier up` starts it")
    if wanted.controller.scaling is not None:
        worker = wanted.worker.model_copy(update={"num_replicas": max(1, app.replicas["worker"].num_wanted)})
        wanted = wanted.model_copy(update={"worker": worker})
    elif running.controller.scaling is not None:
        _set_workers(wanted)
    run_application(wanted, versioned_app(wanted, app.environments))


def _set_workers(wanted: ClusterConfig) -> None:
    """Request the config's number of workers, in place of the controller. Raises SessionError.

    Serve compares a number with the deployed one, not with later requests.
    """
    try:
        asyncio.run(ServeReplicas(wanted.name, "worker").set_target(wanted.worker.num_replicas))
    except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise SessionError(f"Serve does not answer ({type(error).__name__}); try again") from None


def _deployed(wanted: ClusterConfig) -> DeployedApp:
    """Return the application. Raises SessionError if Serve does not answer."""
    try:
        return deployed_app(wanted.name)
    except (ValueError, ray.exceptions.RayError) as error:
        raise SessionError(f"Serve does not answer ({type(error).__name__}); try again") from None


def _await_replicas(wanted: ClusterConfig, no_room_s: float = NO_ROOM_S, no_start_s: float = NO_START_S) -> None:
    """Wait until Serve has replaced all. Raises SessionError if it cannot, or no node has room for one more replica.

    A replica without a process may only be slow: Ray's pending demands show whether it waits for room.
    """
    from deployments.console.running import unplaced_lines

    moved_s, last = time.monotonic(), None
    while True:
        app = _deployed(wanted)
        if app.failure:
            raise SessionError(f"replicas could not be replaced: {app.failure}")
        if app.is_settled:
            return
        waited_s = time.monotonic() - moved_s
        if app.replicas != last or not any(count.num_unplaced for count in app.replicas.values()):
            moved_s, last = time.monotonic(), app.replicas
        elif waited_s >= no_room_s and (lines := unplaced_lines(wanted, app).values()):
            raise SessionError("\n".join(["the replicas before serve on until there is room for one more", *lines]))
        elif waited_s >= no_start_s:
            raise SessionError(f"the replicas before serve on: no process of another has begun for {no_start_s:g} s")
        time.sleep(_POLL_S)
