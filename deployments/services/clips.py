"""Clips in the terms of the stock engine: seconds and frame rates of a request become parameters of its class."""

from __future__ import annotations

from typing import Any, Final

from cluster.ray_seam.request_ids import part_id
from deployments.engines.records.protocol import AdapterUse, EngineError, StockRequest
from deployments.engines.stock.inputs import FIELDS
from deployments.engines.stock.known import PipelineSource
from deployments.records import ClipRequest

_FRAMES: Final = ("num_frames", "video_length")
_RATES: Final = ("frame_rate", "fps")
_SECONDS: Final = ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration")
_USUAL_FPS: Final = 10  # of diffusers' own `export_to_video`


def clip_request(request: ClipRequest, class_name: str, source: PipelineSource) -> StockRequest:
    """Return the request in the stock engine's form. Options left open take the class's defaults.

    Raises EngineError for a duration where the class takes none, and for options that exclude each other.
    """
    return StockRequest(
        request_id=part_id(),
        seed=_seed_of(request),
        prompt=request.prompt,
        fields={name: value for name in FIELDS if name != "prompt" and (value := getattr(request, name)) is not None},
        images=request.images,
        extra={**_timing(request, class_name, source), **request.extra},
        scheduler=request.scheduler,
        scheduler_options=request.scheduler_options,
        sampler=request.sampler,
        second_from=request.second_from,
        reports_steps=request.reports_steps,
        audio=request.audio,
        adapters=tuple(AdapterUse(use.name, use.scale, use.text_scale) for use in request.lora),
    )


def _seed_of(request: ClipRequest) -> int:
    """Return the seed of a request's noise."""
    own = None if request.sampler is None else request.sampler.noise_seed
    return (request.seed or 0) if own is None else own


def frame_rate(request: ClipRequest, source: PipelineSource) -> float:
    """Return the frames per second of a video: the request's, else those of the class, or of its own example."""
    named = [value for name in _RATES if isinstance(value := source.defaults.get(name), int | float)]
    return request.fps or next((float(value) for value in named if value > 0), float(source.fps or _USUAL_FPS))


def _num_frames(request: ClipRequest, source: PipelineSource) -> int | None:
    """Return the number of frames that a request asks for, None to take the class's default.

    Most classes make one frame more than whole groups of 4 or 8, as their default shows.
    """
    if request.num_frames is not None or request.seconds is None:
        return request.num_frames
    usual = next((source.defaults[name] for name in _FRAMES if name in source.defaults), 0)
    is_odd = isinstance(usual, int) and usual % 2 == 1
    return max(1, round(request.seconds * frame_rate(request, source))) + is_odd


def _timing(request: ClipRequest, class_name: str, source: PipelineSource) -> dict[str, Any]:
    """Return the class's parameters for the length and the rate of the clip."""
    if request.num_frames is not None and request.seconds is not None:
        raise EngineError("num_frames: give either num_frames or seconds")
    found: dict[str, Any] = {}
    rate = next((name for name in _RATES if name in source.parameters), None)
    if request.fps is not None and rate is not None:
        found[rate] = int(request.fps) if request.fps.is_integer() else request.fps
    said = _num_frames(request, source) if source.makes == "video" else request.seconds
    if said is not None:
        names = _FRAMES if source.makes == "video" else _SECONDS
        name = next((name for name in names if name in source.parameters), None)
        if name is None:
            asked = "seconds" if request.num_frames is None else "num_frames"
            raise EngineError(f"{asked}: {class_name} takes no duration")
        found[name] = said
    if both := found.keys() & request.extra.keys():
        raise EngineError(f"extra: {min(both)!r} is set by a field of the request, too")
    return found
