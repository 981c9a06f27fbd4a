"""Registered workflows: checked when they come, and run as pipelines, whose images come and go with the request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from cluster.admission.fair_slots import FairSlots
from configs.model import ModelId
from configs.workflow import WorkflowConfig
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.comfy.backend import ServiceCatalog, ServiceModels, png_file
from deployments.ingress.messages.bodies import JsonRoute, body_bytes
from deployments.ingress.messages.responses import call_aside, documented, json_response
from deployments.ingress.service.catalog import Catalog, ModelCard
from deployments.ingress.service.model_answers import ModelAnswer
from deployments.ingress.service.service import Service
from deployments.pipelines.runner import WorkflowResult
from deployments.records import RequestModel
from deployments.records.errors import Conflict, InvalidRequest, ModelUnavailable, ServiceError, UnknownModel
from deployments.workflows.backend import Frames, SavedFile
from deployments.workflows.checking import check
from deployments.workflows.named_nodes import find_ports, with_values
from deployments.workflows.reading import api_form, read_workflow
from deployments.workflows.records import NodeError, Workflow, WorkflowError
from deployments.workflows.running import NodeFailed, run

PATH: Final = "/admin/workflows"
MAX_RUNNING: Final = 8  # workflows that run at once in one ingress: each may hold images; tenants take turns
MAX_WAITING: Final = 16_384  # as many as there may be jobs
_MAX_ASKED: Final = 64  # models of one workflow
_MAX_DESCRIPTION: Final = 4096


class WorkflowBody(RequestModel):
    """A workflow to serve as a pipeline."""

    id: ModelId
    workflow: dict[str, Any] = Field(description="in the API's form, or as the page saves it")
    description: str = Field("", max_length=_MAX_DESCRIPTION)


class WorkflowAnswer(ModelAnswer):
    """A registered workflow, and the types of its inputs and outputs by name."""

    inputs: dict[str, str]
    outputs: dict[str, str]

    @classmethod
    def of_workflow(cls, card: ModelCard, config: WorkflowConfig) -> WorkflowAnswer:
        """Return the object of a workflow."""
        outputs = {name: one.type for name, one in config.outputs.items()}
        model = ModelAnswer.of(card).model_dump(exclude_unset=True)
        return cls(**model, inputs=config.as_pipeline().inputs, outputs=outputs)


async def catalog_for(service: Service, workflow: Workflow | None = None) -> ServiceCatalog:
    """Return the registered models, with all that a workflow asks about them. Raises ModelUnavailable."""
    models = Catalog(service.snapshot)
    found = ServiceCatalog(await models.all_records(), {})
    named = sorted(found.named_in(workflow))[:_MAX_ASKED] if workflow is not None else []
    configs = await asyncio.gather(*map(models.solver_config, named))
    return ServiceCatalog(found.records.values(), dict(zip(named, configs, strict=True)))


def create_workflows_router(service: Service) -> APIRouter:
    """Return the route of operators."""
    router = APIRouter(tags=["operations"], route_class=JsonRoute)

    @router.post(
        PATH,
        status_code=201,
        response_model=WorkflowAnswer,
        responses={
            200: {"model": WorkflowAnswer, "description": "the workflow was there: this version of it is served now"},
            **documented(400, 413, _409="the id is that of a model or of a pipeline", _503="the registry is away"),
        },
    )
    async def register(body: WorkflowBody) -> Response:
        """Serve a workflow of ComfyUI as a pipeline.

        Its inputs are the nodes with a title of one word, its outputs what it saves or shows. DELETE
        /admin/models/{model} removes it.
        """
        try:
            workflow = await call_aside(body_bytes.get(), read_workflow, body.workflow)
            catalog = await catalog_for(service, workflow)
            config = await asyncio.to_thread(_checked, body, workflow, catalog)
        except WorkflowError as error:
            raise InvalidRequest(f"workflow: {error}", "workflow") from None
        if body.id in service.pipelines.configured:
            raise Conflict(f"{body.id!r} is a pipeline of the cluster config: a workflow needs another id", "id")
        registered = await service.operations.register_workflow(config)
        return json_response(WorkflowAnswer.of_workflow(registered.card, config), 201 if registered.is_new else 200)

    return router


def _checked(body: WorkflowBody, workflow: Workflow, catalog: ServiceCatalog) -> WorkflowConfig:
    """Return the config of a workflow of which all can run. Raises WorkflowError."""
    if errors := check(workflow, catalog).errors:
        raise WorkflowError("the workflow cannot run", "prompt_outputs_failed_validation", errors)
    inputs, outputs = find_ports(workflow)
    return WorkflowConfig(
        id=body.id, nodes=api_form(workflow), inputs=inputs, outputs=outputs, description=body.description
    )


class RegisteredWorkflows:
    """Runs registered workflows, as `deployments.ingress.service.service.Workflows`. `slots` bound how many at once."""

    def __init__(self, service: Service, slots: FairSlots) -> None:
        self._service = service
        self._slots = slots

    async def run(self, workflow: str, inputs: Mapping[str, Any], /) -> WorkflowResult:
        """Run a workflow for one item. Raises UnknownModel, InvalidRequest for a bad value, other ServiceErrors."""
        record = self._service.snapshot.find_model(workflow)
        if record is None or record.workflow is None:
            raise UnknownModel(f"no workflow {workflow!r}", "model")
        config, images = record.workflow, dict[str, npt.NDArray[np.uint8]]()
        values: dict[tuple[str, str], Any] = {}
        for name, value in inputs.items():
            one = config.inputs[name]
            if one.type == "image":
                images[name] = value
            values[one.node, one.input] = name if one.type == "image" else value
        nodes = with_values(await asyncio.to_thread(read_workflow, config.nodes), values)
        catalog = await catalog_for(self._service, nodes)
        ends = [one.node for one in config.outputs.values()]
        if errors := (await asyncio.to_thread(check, nodes, catalog, ends)).errors:
            raise _refusal(config, errors, inputs)
        backend = _RequestBackend(catalog, self._service, images)
        await self._slots.acquire(current_tenant.get())
        try:
            shown = await run(nodes, backend, _Silent(), ends)
        except NodeFailed as failed:
            if isinstance(failed.__cause__, ServiceError):
                raise failed.__cause__ from None
            raise _refusal(config, [failed.error], inputs) from None
        finally:
            self._slots.release()
        return _result_of(config, shown, backend)


class _RequestBackend(ServiceModels):
    """A cluster that works for one request: images are read from it, and what is saved is its answer."""

    def __init__(self, catalog: ServiceCatalog, service: Service, images: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        super().__init__(catalog, service)
        self._images = images
        self.made: list[npt.NDArray[np.uint8]] = []

    async def read_input(self, name: str) -> bytes:
        if name not in self._images:
            raise InvalidRequest(f"the workflow reads a file {name[:80]!r}: a pipeline's images come with its requests")
        return await asyncio.to_thread(png_file, self._images[name], {}, level=1)

    async def save(
        self, images: Sequence[npt.NDArray[np.uint8]], prefix: str, type: Literal["output", "temp"]
    ) -> list[SavedFile]:
        first = len(self.made)
        self.made += images
        return [SavedFile(str(number), "", type) for number in range(first, len(self.made))]

    async def read_video(self, name: str) -> tuple[Frames, float]:
        raise InvalidRequest(f"the workflow reads a video {name[:80]!r}: a pipeline's requests bring images alone")

    async def save_file(self, file: bytes, prefix: str, ending: str) -> SavedFile:
        raise InvalidRequest(f"the workflow saves a file {ending!r}: a pipeline answers with images and texts alone")


class _Silent:
    """Nobody hears of the nodes: a pipeline tells of its stages."""

    def executing(self, node: str) -> None: ...
    def progress(self, node: str, value: int, max: int, preview: npt.NDArray[np.uint8] | None) -> None: ...
    def executed(self, node: str, output: Mapping[str, Any] | None) -> None: ...


def _result_of(
    config: WorkflowConfig, shown: Mapping[str, Mapping[str, Any]], backend: _RequestBackend
) -> WorkflowResult:
    outputs: dict[str, Any] = {}
    warnings = []
    for name, one in config.outputs.items():
        if one.type == "text":
            outputs[name] = "\n".join(map(str, shown[one.node]["text"]))
            continue
        files = shown[one.node]["images"]
        if len(files) > 1:
            warnings.append(f"{name}: the first of {len(files)} images: a pipeline gives one for each item")
        outputs[name] = np.ascontiguousarray(backend.made[int(files[0]["filename"])][..., :3])
    return WorkflowResult(outputs, tuple(warnings))


def _refusal(config: WorkflowConfig, errors: Sequence[NodeError], given: Mapping[str, Any]) -> ServiceError:
    """Return the fault of an input that was given, or of the workflow: its models may be gone."""
    for error in errors:
        for name in given:
            if (config.inputs[name].node, config.inputs[name].input) == (error.node, error.input):
                return InvalidRequest(f"{name}: {error.message} {error.details}".strip(), name)
    return ModelUnavailable(f"workflow {config.id!r} cannot run: {'; '.join(map(str, errors))}", "model")
