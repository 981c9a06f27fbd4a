"""Answers of /sdapi/v1: records of the Stable Diffusion WebUI, and errors in its form."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import Response

from deployments.ingress.errors import Failure
from deployments.ingress.responses import Answer, json_response


class WebuiError(Answer):
    """The form of every error under /sdapi."""

    error: str
    detail: str
    body: Literal[""]
    errors: str


def webui_failure_response(failure: Failure) -> Response:
    """Return `failure` in the form of the WebUI."""
    answer = WebuiError(error=failure.code, detail=failure.message, body="", errors=failure.message)
    return json_response(answer, failure.status, failure.headers)


class WebuiImages(Answer):
    """The images of a request as PNG files in base64; `info` is JSON with their seeds and what they were made of."""

    images: list[str]
    parameters: dict[str, Any]
    info: str


class WebuiImage(Answer):
    """An enlarged image as a PNG file in base64."""

    html_info: str
    image: str


class WebuiUpscaler(Answer):
    """A way to enlarge images: a filter, or the name of a model."""

    name: str
    model_name: None = None
    model_path: None = None
    model_url: None = None
    scale: None = None


class WebuiModel(Answer):
    """A diffusion model. Its title is its name here."""

    title: str
    model_name: str
    hash: str
    sha256: str
    filename: str
    config: None = None


class WebuiSampler(Answer):
    name: str
    aliases: list[str]
    options: dict[str, str]


class WebuiScheduler(Answer):
    """A way to space the steps."""

    name: str
    label: str
    aliases: None = None
    default_rho: float = -1.0
    need_inner_model: bool = False


class WebuiLora(Answer):
    """A LoRA, and the models that it is for."""

    name: str
    alias: str
    path: str
    metadata: dict[str, Any]


class WebuiOptions(Answer):
    """The options that mean something here: the model of requests that name none."""

    sd_model_checkpoint: str | None
    samples_format: Literal["png"]


class WebuiState(Answer):
    """The running work of the caller's key: job number `job_no` of `job_count`, and the step of that image."""

    skipped: bool
    interrupted: bool
    stopping_generation: bool
    job: str
    job_count: int
    job_timestamp: str
    job_no: int
    sampling_step: int
    sampling_steps: int


class WebuiProgress(Answer):
    """The part that is done of the running work, from 0 to 1, and the seconds that the rest takes at that pace."""

    progress: float
    eta_relative: float
    state: WebuiState
    current_image: None
    textinfo: None
