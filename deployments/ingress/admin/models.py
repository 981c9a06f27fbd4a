"""The cluster's models while it runs: register, replace, remove, prefetch, pin, and see what is resident where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Tag

from configs.batching import BatchingConfig
from configs.model import AdapterConfig, ModelConfig
from deployments.ingress.admin.cluster import model_object
from deployments.ingress.admin.operations import MAX_MODELS, MAX_NODES, Operations, Page
from deployments.ingress.api_docs import documented
from deployments.records import RequestModel


class PrefetchBody(RequestModel):
    """`host`: into the memory of every node. `device`: on into every worker, too."""

    tier: Literal["host", "device"] = "host"


def _sort_of(body: Any) -> str:
    """Only an adapter has a base, and it must have one."""
    return "adapter" if isinstance(body, AdapterConfig) or (isinstance(body, dict) and "base" in body) else "model"


EntryBody = Annotated[
    Annotated[ModelConfig, Tag("model")] | Annotated[AdapterConfig, Tag("adapter")], Discriminator(_sort_of)
]
Wait = Annotated[bool, Query(description="answer when the model is ready, or is known to be unusable")]
Purge = Annotated[bool, Query(description="take it out of the store, too; its bytes go with the next gc")]
Offset = Annotated[int, Query(ge=0, le=2**31)]
_RESTARTING = "the directory of models is restarting; try again"


def create_router(operations: Operations) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/admin/cluster", responses=documented(400))
    async def cluster(
        model_offset: Offset = 0,
        max_models: Annotated[int, Query(ge=0, le=MAX_MODELS)] = MAX_MODELS,
        node_offset: Offset = 0,
        max_nodes: Annotated[int, Query(ge=0, le=MAX_NODES)] = MAX_NODES,
    ) -> dict[str, Any]:
        """What is resident where, and who holds it; what does not answer is shown as `unreachable`.

        A page of `num_models` models, in the order in which they came, and of `num_nodes` nodes, by id.
        """
        return await operations.describe(Page(model_offset, max_models, node_offset, max_nodes))

    @router.post(
        "/admin/models",
        status_code=201,
        responses={
            200: {"description": "the model was there: this version of it is served now"},
            202: {"description": "not waited for: the model's `state` tells how it goes on"},
            **documented(
                400,
                _409="the id belongs to another sort of model",
                _422="the checkpoint cannot be used; a version before goes on serving",
                _503=_RESTARTING,
            ),
        },
    )
    async def register(entry: Annotated[EntryBody, Body()], wait: Wait = True) -> JSONResponse:
        """Serve one more model or adapter, or another version of one. Fields as in a cluster config.

        `path` is absolute, on a disk that the cluster's head sees and inside of the config's `model_roots`, or an
        s3:// URL. Requests go on with the version before until the new one is in the store.
        """
        registered = await operations.register(entry, wait=wait)
        status = (201 if registered.is_new else 200) if wait else 202
        return JSONResponse(model_object(registered.card), status)

    @router.delete(
        "/admin/models/{model}",
        responses=documented(400, 404, _409="a model of the cluster config", _503=_RESTARTING),
    )
    async def unregister(model: str, purge: Purge = False) -> dict[str, Any]:
        """Serve it no more; requests that run with it finish. `orphans` are adapters that have lost a base."""
        return {"id": model, "deleted": True, "orphans": await operations.unregister(model, purge=purge)}

    @router.post(
        "/admin/models/{model}/prefetch",
        responses=documented(400, 404, 503),
    )
    async def prefetch(model: str, body: PrefetchBody | None = None) -> dict[str, Any]:
        """Bring it nearer, into room that nothing leased or pinned needs; says by node what went wrong."""
        return await operations.prefetch(model, (body or PrefetchBody()).tier)

    @router.post("/admin/models/{model}/pin", responses=documented(404, 503))
    async def pin(model: str) -> dict[str, Any]:
        """Keep it where it is resident."""
        return await operations.pin(model, pinned=True)

    @router.delete("/admin/models/{model}/pin", responses=documented(404, 503))
    async def unpin(model: str) -> dict[str, Any]:
        """It may be evicted again."""
        return await operations.pin(model, pinned=False)

    @router.get("/admin/text-encoders/batching")
    async def batching() -> dict[str, Any]:
        """Tell how the text encoders batch requests, and what came of it, by replica."""
        return await operations.describe_batching()

    @router.put("/admin/text-encoders/batching", responses=documented(400, _503=_RESTARTING))
    async def retune(body: BatchingConfig) -> dict[str, Any]:
        """Batch requests by these values from now on, waiting ones included; says by replica what went wrong.

        Fields as in a cluster config (`text_encoder.batching`); what is left out has its default. Replicas that start
        later begin with it, until the cluster or its registry ends: write it into the config to keep it.
        """
        return await operations.retune(body)

    return router
