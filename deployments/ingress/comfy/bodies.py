"""Bodies of ComfyUI's routes, and the form of its errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.responses import Response

from deployments.ingress.messages.responses import Answer, Failure, json_response
from deployments.records import RequestModel
from deployments.workflows.checking import dependent_outputs
from deployments.workflows.records import NodeError, Workflow, WorkflowError

MAX_IDS: Final = 1000  # of one request
PromptId = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
ClientId = Annotated[str, StringConstraints(max_length=128)]


class ComfyErrorBody(Answer):
    """The fault, for programs and for a person."""

    type: str
    message: str
    details: str
    extra_info: dict[str, Any]


class ComfyError(Answer):
    """The form of errors of ComfyUI's routes. `node_errors` are those of a workflow, by node."""

    error: ComfyErrorBody
    node_errors: dict[str, Any]


class PromptBody(RequestModel, extra="ignore"):
    """A workflow to run, in API form or as the page saves it. `front` asks for the most urgent priority."""

    prompt: dict[str, Any] | None = None
    client_id: ClientId | None = None
    prompt_id: PromptId | None = None
    front: bool = False
    extra_data: dict[str, Any] = Field({}, description="`extra_pnginfo` is written into PNG files")
    partial_execution_targets: list[str] | None = Field(None, max_length=MAX_IDS, description="output nodes; null: all")


class ChangeBody(RequestModel, extra="ignore"):
    """Prompts to take out of the queue, or of the history: all, or those of these ids."""

    clear: bool = False
    delete: list[PromptId] = Field([], max_length=MAX_IDS)


class InterruptBody(RequestModel, extra="ignore"):
    """The prompt to end; without one, all that run."""

    prompt_id: PromptId | None = None


class PromptTaken(Answer):
    """A prompt that will run. `node_errors` are those of outputs that cannot."""

    prompt_id: str
    number: int
    node_errors: dict[str, Any]


def comfy_failure_response(failure: Failure) -> Response:
    """Return `failure` in the form of ComfyUI."""
    body = ComfyErrorBody(type=failure.code, message=failure.message, details="", extra_info={})
    return json_response(ComfyError(error=body, node_errors={}), failure.status, failure.headers)


def workflow_error_response(error: WorkflowError, workflow: Workflow | None) -> Response:
    """Return the faults of a workflow, which is None where it could not be read."""
    details = "\n".join(map(str, error.errors))
    body = ComfyErrorBody(type=error.type, message=error.message, details=details, extra_info={})
    return json_response(ComfyError(error=body, node_errors=node_errors(error.errors, workflow)), 400)


def node_errors(errors: Iterable[NodeError], workflow: Workflow | None) -> dict[str, Any]:
    """Return errors by node, as ComfyUI's clients read them."""
    found: dict[str, Any] = {}
    for one in errors:
        if one.node not in found:
            outputs = dependent_outputs(workflow, one.node) if workflow is not None else []
            found[one.node] = {"errors": [], "dependent_outputs": outputs, "class_type": one.kind}
        extra = {"input_name": one.input} if one.input else {}
        found[one.node]["errors"].append(
            {"type": one.type, "message": one.message, "details": one.details or str(one), "extra_info": extra}
        )
    return found
