"""WeightRegistry: the cluster's directory of models. A named, detached actor.

It brings checkpoints into the store, says which models are ready and which are not and why, knows which node holds
which extents, and gives each node its keeper. It never holds weights or references to them, and nothing is lost with
it: the models come back from the config and the registration files, what is resident where from the keepers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import ray

from cluster.actor_names import NAMESPACE, cluster_key, registry_name
from cluster.keeper.records import KeeperStats
from cluster.peers.messages import Located, Question, ResidencyReport
from cluster.registry.directory import DirectoryChange, Entry, ModelRecord
from cluster.registry.import_process import ImportProcess
from cluster.registry.importing import ImportSettings
from cluster.registry.node_keepers import NodeKeepers, alive_nodes, nodes_with_keeper
from cluster.registry.registrations import Registrations
from cluster.registry.residency import cluster_residency
from cluster.registry.served_models import ServedModels, Unregistered
from cluster.registry.summaries import ModelSummary
from configs.cluster import ClusterConfig
from configs.merging import MergeConfig
from weights.errors import FormatError
from weights.formats.folder import check_inside
from weights.manifest import Manifest
from weights.sources.mirrors import SOURCES_FOLDER, mirror_folder, remove_mirror
from weights.store import WeightStore

NODE_POLL_S: Final = 5.0
MAX_WATCH_S: Final = 60.0
SECRET_BYTES: Final = 32
IMPORT_MEMORY_SHARE: Final = 0.5  # of the machine's
# At once, of each group: who watches or waits for a model costs a coroutine, and takes no turn from the other calls.
MAX_CALLS: Final = 10_000
WATCHING: Final = "watching"
WAITING: Final = "waiting"

logger = logging.getLogger("atelier.registry")

Method = Callable[..., Coroutine[Any, Any, Any]]


def in_group(group: str) -> Callable[[Method], Method]:
    """A method whose calls count among their own. Ray runs each group on a loop of its own; the registry has one."""

    def grouped(method: Method) -> Method:
        # HAZARD: Ray looks for the group at the innermost function; `wraps` copies it to the one that is called.
        @functools.wraps(ray.method(concurrency_group=group)(method))
        async def on_registrys_loop(self: WeightRegistry, *arguments: Any, **options: Any) -> Any:
            call = method(self, *arguments, **options)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

        return on_registrys_loop

    return grouped


class WeightRegistry:
    """An async actor: whoever waits holds no thread."""

    async def __init__(self, config: ClusterConfig, peer_secret: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        self._loop = asyncio.get_running_loop()
        store = WeightStore(config.store.path)
        memory_bytes = int(psutil.virtual_memory().total * IMPORT_MEMORY_SHARE)
        options = config.store.object_storage.options()
        settings = ImportSettings(store=store.path, options=options, memory_bytes=memory_bytes)
        # As ServedModels has them: what is downloaded never holds up what is here.
        here, away = ImportProcess(settings), ImportProcess(settings)

        allowed = tuple(root.resolve() for root in config.allowed_roots)

        def roots_of(entry: Entry) -> tuple[Path, ...] | None:
            return None if config.trusts(entry) else allowed

        def check_source(entry: Entry) -> None:
            with contextlib.suppress(FormatError):  # not there: said when it is brought in
                if isinstance(entry.path, Path):
                    check_inside(entry.path, roots_of(entry))

        def take_in(entry: Entry) -> ModelSummary:
            return (here if isinstance(entry.path, Path) else away).bring_in(entry, roots_of(entry))

        registrations = Registrations(store.path / "registrations" / config.name)
        self._models = ServedModels(
            config.entries,
            store,
            registrations,
            take_in,
            epoch=uuid.uuid4().hex,
            check_source=check_source,
            forget_source=lambda url: remove_mirror(mirror_folder(store.path / SOURCES_FOLDER, url)),
        )
        self._keepers = NodeKeepers(
            str(store.packs),
            config.store.node_budget_bytes,
            registry_name(config),
            _keeper_options(config),
            key=cluster_key(config),
            extents_of=self._models.extents,
        )
        self._peer_secret = peer_secret
        self._encoder_merging: MergeConfig | None = None
        await self._models.start()
        self._polling = asyncio.ensure_future(self._follow_nodes(config))

    # models

    @in_group(WAITING)
    async def register(self, entry: Entry, wait: bool = True) -> ModelRecord:
        """See `ServedModels.register`; so for the methods after it."""
        return await self._models.register(entry, wait=wait)

    @in_group(WAITING)
    async def unregister(self, model: str, purge: bool = False) -> Unregistered:
        removed = await self._models.unregister(model, purge=purge)
        await self._keepers.pin(model, False)
        return removed

    async def statuses(self) -> list[ModelRecord]:
        return list(self._models.directory)

    @in_group(WAITING)
    async def status(self, model: str) -> ModelRecord:
        return await self._models.status(model)

    async def manifest(self, model: str, version: str | None = None) -> Manifest:
        return await self._models.manifest(model, version)

    async def report_attach(self, model: str, error: str | None) -> None:
        self._models.report_attach(model, error)

    @in_group(WATCHING)
    async def watch(self, revision: int, epoch: str, timeout_s: float) -> DirectoryChange:
        """What came after `revision` of `epoch`, at once or as soon as there is something; empty after `timeout_s`."""
        try:
            async with asyncio.timeout(min(timeout_s, MAX_WATCH_S)):
                while not (change := self._models.directory.changes_since(revision, epoch)):
                    await self._models.changed()
        except TimeoutError:
            pass
        return change

    # how text encoders merge requests

    async def set_encoder_merging(self, merging: MergeConfig) -> None:
        """For text encoders that start from now on. Ends with this process: the config counts again then."""
        self._encoder_merging = merging

    async def encoder_merging(self) -> MergeConfig | None:
        """None as long as it is the config's."""
        return self._encoder_merging

    # nodes

    async def keeper(self, node_id: str) -> Any:
        """See `NodeKeepers.get`."""
        return self._keepers.get(node_id)

    async def keepers(self) -> dict[str, Any]:
        """All of them, by node."""
        return dict(self._keepers.handles())

    async def keeper_stats(self) -> list[KeeperStats]:
        """Of those that answer."""
        answers = (await self._keepers.ask("stats")).values()
        return [stats for stats in answers if not isinstance(stats, BaseException)]

    async def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        """See `ResidencyMap.apply_report`."""
        self._keepers.apply_report(node_id, report)

    async def peer_secret(self) -> bytes:
        """What keepers know each other by."""
        return self._peer_secret

    async def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        """See `ExtentDirectory.locate`."""
        return self._keepers.locate(node_id, question, load)

    @in_group(WAITING)
    async def prefetch(self, model: str) -> dict[str, str]:
        """Into the memory of every node. What went wrong by node, "" for nothing."""
        manifest = await self._models.manifest(model)
        return _errors(await self._keepers.ask("prefetch", list(manifest.extents.values()), timeout_s=MAX_WATCH_S))

    async def pin(self, model: str, pinned: bool = True) -> dict[str, str]:
        """Keep it in the memory of every node that has it, or no longer. What went wrong by node, "" for nothing.

        A pin follows the model to its next version, and ends with it.
        """
        await (self._models.manifest(model) if pinned else self._models.status(model))
        return _errors(await self._keepers.pin(model, pinned))

    async def evict(self, model: str) -> list[str]:
        """Out of the memory of every node, but for what other models have as well. Returns the names of those who
        hold some of it, by lease or pin; without any, the model counts as unloaded until it is wanted again.
        """
        await self._models.manifest(model)
        holders = await self._keepers.drop(self._models.extents_of_no_other(model))
        if not holders:
            self._models.set_loaded(model, False)
        return holders

    async def want(self, model: str) -> None:
        """It is asked for again after it was evicted."""
        self._models.set_loaded(model, True)

    async def residency(self, models: Sequence[str], node_offset: int, max_nodes: int) -> dict[str, Any]:
        """Some nodes with their figures, and of these models what is resident there, as JSON-able values.

        `num_nodes` are there in all, in the order of their ids.
        """
        all_nodes = self._keepers.nodes()
        nodes = all_nodes[node_offset : node_offset + max_nodes]
        ask = self._keepers.ask
        stats, residents = await asyncio.gather(ask("stats", nodes=nodes), ask("residents", nodes=nodes))
        extents = self._models.extents()
        wanted = {model: extents[model] for model in models if model in extents}
        found = await asyncio.to_thread(cluster_residency, stats, residents, wanted)
        return {"num_nodes": len(all_nodes), **found}

    async def process_id(self) -> int:
        return os.getpid()

    async def _follow_nodes(self, config: ClusterConfig) -> None:
        # A private Ray has one node, which will have replicas: its keeper starts while they do.
        to_start = config.ray.address is None
        while ray.is_initialized():
            try:
                alive = await asyncio.to_thread(alive_nodes)
                running = alive if to_start else await asyncio.to_thread(nodes_with_keeper, cluster_key(config))
                await self._keepers.follow(alive, running)
                to_start = False
            except Exception:  # Ray's own: the next round may do better
                logger.exception("the nodes could not be looked at")
            await asyncio.sleep(NODE_POLL_S)


def _keeper_options(config: ClusterConfig) -> dict[str, Any]:
    # A private Ray has one node: nobody else's business.
    host = "127.0.0.1" if config.ray.address is None else None
    return {"host": host, "populate": config.ray.preallocate, "verify": config.store.verify}


def _errors(answers: Mapping[str, Any]) -> dict[str, str]:
    return {
        node: str(answer) or type(answer).__name__ if isinstance(answer, BaseException) else ""
        for node, answer in answers.items()
    }


def registry_class(max_calls: int = MAX_CALLS) -> Any:
    """WeightRegistry as an actor class: those who watch or wait, however many, leave the other calls their turn."""
    groups = {WATCHING: max_calls, WAITING: max_calls}
    return ray.remote(concurrency_groups=groups, max_concurrency=max_calls)(WeightRegistry)


def connect_registry(config: ClusterConfig) -> Any:
    """The cluster's registry; the first caller starts it."""
    actor = registry_class().options(
        name=registry_name(config),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    )
    # A restarted actor gets the arguments of the first one: the secret stays.
    return actor.remote(config, secrets.token_bytes(SECRET_BYTES))
