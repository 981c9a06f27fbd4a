"""The API of AUTOMATIC1111's Stable Diffusion WebUI under /sdapi/v1, over the same service.

Its server has one user, and keeps that user's model and progress. Here they are those of each API key (without keys,
everybody's), in the memory of one ingress replica: with several, requests name their model in `override_settings`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from configs.cluster import ClusterConfig, LimitsConfig
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.compat.a1111_bodies import (
    AUTOMATIC,
    NONE,
    SAMPLERS,
    SCHEDULERS,
    ExtraImageBody,
    ImageToImageBody,
    OptionsBody,
    SecondPass,
    TextToImageBody,
    WebuiError,
    WebuiImage,
    WebuiImages,
    WebuiLora,
    WebuiModel,
    WebuiOptions,
    WebuiProgress,
    WebuiSampler,
    WebuiScheduler,
    WebuiState,
    WebuiUpscaler,
    resized,
    upscalers,
)
from deployments.ingress.compat.a1111_painting import Painting
from deployments.ingress.messages.bodies import JsonRoute, warning_header
from deployments.ingress.messages.responses import INFERENCE_ERRORS, Answer, documented_as, json_response, server_timing
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.image_files import describe_image, encode_image
from deployments.ingress.service.catalog import ModelCard
from deployments.ingress.service.service import Service
from deployments.pipelines.runner import run_together
from deployments.records import ImageProgress, ImageRequest, ImageResult
from deployments.records.errors import InvalidRequest, UnknownModel
from deployments.requests.defaults import draw_seed
from weights.residency.recent import Recent

# Lists that clients fetch with the others.
_EMPTY: Final = ("sd-vae", "latent-upscale-modes", "hypernetworks", "face-restorers", "prompt-styles")
_MAX_KEPT: Final = 1024  # keys whose choice of a model is kept
_ERRORS: Final = documented_as(WebuiError, *INFERENCE_ERRORS)
_LIST_ERRORS: Final = documented_as(WebuiError, 503)


@dataclass(slots=True)
class _Job:
    """The running images of one request: the steps done by each, of `num_steps`."""

    begun_s: float
    steps: list[int]
    num_steps: int = 0
    num_done: int = 0
    is_interrupted: bool = False

    @property
    def progress(self) -> float:
        """The part that is done."""
        return sum(self.steps) / (self.num_steps * len(self.steps)) if self.num_steps else 0.0


@dataclass
class _KeySessions:
    """The choice of model and the running jobs of each key."""

    clock: Callable[[], float] = time.monotonic
    models: Recent[str, str] = field(default_factory=lambda: Recent(_MAX_KEPT))
    jobs: dict[str, list[_Job]] = field(default_factory=dict)

    def choose_model(self, model: str) -> None:
        """Keep the model of the current key's requests."""
        self.models.note(current_tenant.get(), model)

    def begin_job(self, num_images: int) -> _Job:
        """Begin a job of the current key."""
        job = _Job(self.clock(), [0] * num_images)
        self.jobs.setdefault(current_tenant.get(), []).append(job)
        return job

    def end_job(self, job: _Job) -> None:
        """End a job."""
        tenant = current_tenant.get()
        self.jobs[tenant].remove(job)
        if not self.jobs[tenant]:
            del self.jobs[tenant]

    def own_jobs(self) -> list[_Job]:
        """Return the running jobs of the current key, the oldest first."""
        return self.jobs.get(current_tenant.get(), [])


def create_a1111_router(service: Service, config: ClusterConfig, readers: ImageReaders) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/sdapi/v1", tags=["a1111"], route_class=JsonRoute)
    sessions = _KeySessions()
    _add_image_routes(router, service, sessions, readers, config.ingress.limits)
    _add_option_routes(router, service, sessions, is_alone=config.ingress.num_replicas == 1)
    _add_progress_routes(router, sessions)
    _add_list_routes(router, service)
    return router


def _add_image_routes(
    router: APIRouter, service: Service, sessions: _KeySessions, readers: ImageReaders, limits: LimitsConfig
) -> None:
    async def respond(body: TextToImageBody) -> Response:
        model = await _model_of(service, sessions, body.model_id)
        if body.num_images > limits.max_images:
            raise InvalidRequest(f"batch_size: {body.num_images} images, at most {limits.max_images} are allowed")
        second = body.second_pass
        record, painting = await readers.read(body.to_record, model, limits)
        job = sessions.begin_job(body.num_images)
        try:
            found = await run_together(
                [
                    _make_image(service, one, second, limits, job, number)
                    for number, one in enumerate(_single_images(record))
                ]
            )
        finally:
            sessions.end_job(job)
        done = [(one, result) for one, result in found if result is not None]
        if painting is not None:
            done = [(one, await asyncio.to_thread(_finished, painting, result)) for one, result in done]
        parameters = body.model_dump(exclude_none=True, exclude={"init_images", "mask"})
        files = []
        if body.send_images is not False:
            files = await asyncio.gather(*(asyncio.to_thread(_png_base64, one, result) for one, result in done))
        answer = WebuiImages(images=files, parameters=parameters, info=json.dumps(_info(record, body, done)))
        headers = server_timing(done[0][1].timings_ms if done else {}) | warning_header(body.warnings)
        return json_response(answer, headers=headers)

    @router.post("/txt2img", response_model=WebuiImages, responses=_ERRORS)
    async def text_to_image(body: TextToImageBody) -> Response:
        """Images from a prompt."""
        return await respond(body)

    @router.post("/img2img", response_model=WebuiImages, responses=_ERRORS)
    async def image_to_image(body: ImageToImageBody) -> Response:
        """Images from a prompt and an image, or from its masked part."""
        return await respond(body)

    @router.post("/extra-single-image", response_model=WebuiImage, responses=_ERRORS)
    async def enlarge(body: ExtraImageBody) -> Response:
        """An image in another size, by a network or a filter."""
        image = await readers.read(body.pixels, limits)
        if body.upscaler_1 != NONE:
            image = body.cut(await resized(service, image, body.upscaler_1, body.size_of(image), limits))
        file = await asyncio.to_thread(encode_image, image, "png")
        return json_response(WebuiImage(html_info="", image=base64.b64encode(file).decode()))


async def _model_of(service: Service, sessions: _KeySessions, named: str | None) -> str:
    """Return the model of a request: the named one, the key's choice, or the first ready one."""
    if model := named or sessions.models.get(current_tenant.get()):
        return model
    for card in await service.listing.models():
        if card.kind == "diffusion" and card.state in ("ready", "updating"):
            return card.id
    raise UnknownModel("there is no diffusion model", "sd_model_checkpoint")


def _single_images(record: ImageRequest) -> list[ImageRequest]:
    """Return a request for each image: their seeds follow each other, where the first one's is given.

    With a variation seed it is the variation seeds that follow each other.
    """
    if (variation := record.variation) is not None:
        varied = [variation.model_copy(update={"seed": variation.seed + number}) for number in range(record.n)]
        same = {"n": 1, "reports_steps": True, "seed": draw_seed() if record.seed is None else record.seed}
        return [record.model_copy(update=same | {"variation": one}) for one in varied]
    seeds = [None if record.seed is None else record.seed + number for number in range(record.n)]
    fields = {"n": 1, "reports_steps": True}
    return [record.model_copy(update=fields | {"seed": seed}) for seed in seeds]


async def _make_image(
    service: Service, record: ImageRequest, second: SecondPass | None, limits: LimitsConfig, job: _Job, number: int
) -> tuple[ImageRequest, ImageResult | None]:
    """Return an image, after its second pass if there is one, with its request; none if the job was interrupted."""
    record, result = await _make_pass(service, record, job, number)
    if second is not None and result is not None:
        size = second.size_after(first := result.opaque("an upscaler").images[0])
        larger = await resized(service, first, second.upscaler, size, limits)
        update = {"init_image": larger, "width": size.width, "height": size.height, "strength": second.strength}
        update |= {
            **second.solver,
            "seed": result.seed,
            "num_inference_steps": second.steps or record.num_inference_steps,
        }
        record, result = await _make_pass(service, record.model_copy(update=update), job, number)
    job.num_done += result is not None
    return record, result


async def _make_pass(
    service: Service, record: ImageRequest, job: _Job, number: int
) -> tuple[ImageRequest, ImageResult | None]:
    """Return an image with its request; none if the job was interrupted before."""
    result: ImageResult | None = None
    async with service.generate_stream(record) as pieces:
        async for piece in pieces:
            if isinstance(piece, ImageProgress):
                job.steps[number], job.num_steps = piece.step, piece.num_steps
                if job.is_interrupted:
                    return record, None
            else:
                result = piece
    job.steps[number] = job.num_steps
    return record, result


def _finished(painting: Painting, result: ImageResult) -> ImageResult:
    """Return a result with its image laid into the painting."""
    return replace(result, images=[painting.finished(image) for image in result.images])


def _png_base64(record: ImageRequest, result: ImageResult) -> str:
    """Return the image of a result as a PNG file in base64."""
    file = encode_image(result.images[0], "png", description=describe_image(record, result, 0))
    return base64.b64encode(file).decode()


def _info(
    record: ImageRequest, body: TextToImageBody, done: Sequence[tuple[ImageRequest, ImageResult]]
) -> dict[str, Any]:
    """Return the WebUI's `info` of images."""
    seeds = [result.seed for _, result in done]
    subseeds = [one.variation.seed for one, _ in done if one.variation]
    infotexts = [describe_image(one, result, 0).parameters for one, result in done]
    height, width = done[0][1].images[0].shape[:2] if done else (record.height, record.width)
    return {
        "prompt": body.prompt or "",
        "all_prompts": [body.prompt or ""] * len(done),
        "negative_prompt": body.negative_prompt or "",
        "seed": seeds[0] if seeds else None,
        "all_seeds": seeds,
        "subseed": subseeds[0] if subseeds else None,
        "all_subseeds": subseeds,
        "subseed_strength": body.subseed_strength,
        "width": width,
        "height": height,
        "sampler_name": body.sampler_name or body.sampler_index or AUTOMATIC,
        "cfg_scale": body.cfg_scale,
        "steps": done[0][1].num_inference_steps if done else body.steps,
        "batch_size": body.batch_size or 1,
        "sd_model_name": record.model,
        "denoising_strength": record.strength,
        "infotexts": infotexts,
        "warnings": [*body.warnings, *(warning for _, result in done for warning in result.warnings)],
    }


def _add_option_routes(router: APIRouter, service: Service, sessions: _KeySessions, *, is_alone: bool) -> None:
    @router.get("/options", response_model=WebuiOptions, responses=documented_as(WebuiError, 404, 503))
    async def options() -> Response:
        """The options of the caller's key."""
        model = await _model_of(service, sessions, None)
        return json_response(WebuiOptions(sd_model_checkpoint=model, samples_format="png"))

    @router.post("/options", response_model=None, responses=documented_as(WebuiError, 400, 404, 503))
    async def set_options(body: OptionsBody) -> Response:
        """Choose the model of the caller's requests that name none."""
        if model := body.sd_model_checkpoint:
            card = await service.listing.model(model)
            if card.kind != "diffusion":
                raise InvalidRequest(f"sd_model_checkpoint: {model!r} ({card.kind}) makes no images")
            if not is_alone:
                text = "there are several ingress replicas; name the model in override_settings of each request"
                raise InvalidRequest(f"sd_model_checkpoint: {text}", "sd_model_checkpoint")
            sessions.choose_model(model)
        return json_response(b"null")


def _add_progress_routes(router: APIRouter, sessions: _KeySessions) -> None:
    @router.get("/progress", response_model=WebuiProgress)
    async def progress() -> Response:
        """The progress of the caller's oldest running request."""
        jobs = sessions.own_jobs()
        job = jobs[0] if jobs else _Job(sessions.clock(), [])
        done = job.progress
        eta_s = (sessions.clock() - job.begun_s) * (1 - done) / done if done else 0.0
        state = WebuiState(
            skipped=False,
            interrupted=job.is_interrupted,
            stopping_generation=job.is_interrupted,
            job="images" if jobs else "",
            job_count=len(job.steps),
            job_timestamp="",
            job_no=min(job.num_done, max(0, len(job.steps) - 1)),
            sampling_step=max(job.steps, default=0),
            sampling_steps=job.num_steps,
        )
        return json_response(
            WebuiProgress(progress=done, eta_relative=eta_s, state=state, current_image=None, textinfo=None)
        )

    @router.post("/interrupt", response_model=None)
    async def interrupt() -> Response:
        """End the caller's running requests after their present step; they answer with the images they have."""
        for job in sessions.own_jobs():
            job.is_interrupted = True
        return json_response({})


def _add_list_routes(router: APIRouter, service: Service) -> None:
    @router.get("/sd-models", response_model=list[WebuiModel], responses=_LIST_ERRORS)
    async def models() -> Response:
        """The diffusion models."""
        return _listed(_model(card) for card in await service.listing.models() if card.kind == "diffusion")

    @router.get("/loras", response_model=list[WebuiLora], responses=_LIST_ERRORS)
    async def loras() -> Response:
        """The LoRAs of diffusion models; `<lora:name:0.8>` in a prompt uses one."""
        cards = await service.listing.models()
        diffusion = {card.id for card in cards if card.kind == "diffusion"}
        adapters = (card for card in cards if card.kind == "adapter" and not diffusion.isdisjoint(card.base))
        return _listed(
            WebuiLora(name=card.id, alias=card.id, path=card.id, metadata={"base": list(card.base)})
            for card in adapters
        )

    @router.get("/upscalers", response_model=list[WebuiUpscaler], responses=_LIST_ERRORS)
    async def upscaler_names() -> Response:
        """List the values of `upscaler_1` and `hr_upscaler`."""
        return _listed(WebuiUpscaler(name=name) for name in await upscalers(service))

    @router.get("/samplers", response_model=list[WebuiSampler])
    async def samplers() -> Response:
        """The samplers; a model takes those that fit its own sampler."""
        names = (AUTOMATIC, *SAMPLERS)
        return _listed(WebuiSampler(name=one, aliases=[one.lower().replace(" ", "_")], options={}) for one in names)

    @router.get("/schedulers", response_model=list[WebuiScheduler])
    async def schedulers() -> Response:
        """The ways to space steps."""
        return _listed(WebuiScheduler(name=one.replace(" ", "_").lower(), label=one) for one in SCHEDULERS)

    _add_empty_routes(router)


def _add_empty_routes(router: APIRouter) -> None:
    """Add further lists that clients ask for and that are empty here."""

    @router.get("/scripts", response_model=dict[str, list[str]])
    async def scripts() -> Response:
        """The scripts of each task: none."""
        return json_response({"txt2img": [], "img2img": []})

    @router.post("/refresh-checkpoints", response_model=None)
    @router.post("/refresh-loras", response_model=None)
    async def refresh() -> Response:
        """Do nothing: lists are always up to date."""
        return json_response(b"null")

    for name in _EMPTY:
        router.add_api_route(f"/{name}", _no_entries, methods=["GET"], response_model=list[str], name=name)


def _model(card: ModelCard) -> WebuiModel:
    digest = card.fingerprint
    return WebuiModel(title=card.id, model_name=card.id, hash=digest[:10], sha256=digest, filename=card.id)


def _listed(found: Iterable[Answer]) -> Response:
    return json_response([one.model_dump() for one in found])


async def _no_entries() -> Response:
    """Nothing of this kind is here."""
    return json_response([])
