"""A request for a clip in the terms of the stock engine: seconds and frame rates become parameters of its class."""

from __future__ import annotations

from typing import Any, Final

from cluster.request_ids import part_id
from deployments.engines.protocol import EngineError, StockRequest
from deployments.engines.stock.inputs import FIELDS
from deployments.engines.stock.known import PipelineSource
from deployments.records import ClipRequest

_FRAMES: Final = ("num_frames", "video_length")
_RATES: Final = ("frame_rate", "fps")
_SECONDS: Final = ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration")
_USUAL_FPS: Final = 10  # of diffusers' own `export_to_video`


def clip_request(request: ClipRequest, class_name: str, source: PipelineSource) -> StockRequest:
    """Return the request as the stock engine takes it: what it leaves open is left to the class.

    Raises EngineError for a duration where the class takes none, and for what it cannot do both.
    """
    return StockRequest(
        request_id=part_id(),
        seed=request.seed or 0,
        prompt=request.prompt,
        fields={name: value for name in FIELDS if name != "prompt" and (value := getattr(request, name)) is not None},
        images=request.images,
        extra={**_timing(request, class_name, source), **request.extra},
        scheduler=request.scheduler,
        scheduler_options=request.scheduler_options,
        reports_steps=request.reports_steps,
        audio=request.audio,
    )


def frame_rate(request: ClipRequest, source: PipelineSource) -> float:
    """Return the frames per second of a video: the request's, else those of the class, or of its own example."""
    named = [value for name in _RATES if isinstance(value := source.defaults.get(name), int | float)]
    return request.fps or next((float(value) for value in named if value > 0), float(source.fps or _USUAL_FPS))


def num_frames(request: ClipRequest, source: PipelineSource) -> int | None:
    """Return how many frames a request says, None where it leaves that to the class.

    Most classes make one frame more than whole groups of 4 or 8, as their default shows.
    """
    if request.num_frames is not None or request.seconds is None:
        return request.num_frames
    usual = next((source.defaults[name] for name in _FRAMES if name in source.defaults), 0)
    is_odd = isinstance(usual, int) and usual % 2 == 1
    return max(1, round(request.seconds * frame_rate(request, source))) + is_odd


def _timing(request: ClipRequest, class_name: str, source: PipelineSource) -> dict[str, Any]:
    """Return the parameters of the class that say how long the clip is, and how fast."""
    if request.num_frames is not None and request.seconds is not None:
        raise EngineError("num_frames: give either num_frames or seconds")
    found: dict[str, Any] = {}
    rate = next((name for name in _RATES if name in source.parameters), None)
    if request.fps is not None and rate is not None:
        found[rate] = int(request.fps) if request.fps.is_integer() else request.fps
    said = num_frames(request, source) if source.makes == "video" else request.seconds
    if said is not None:
        names = _FRAMES if source.makes == "video" else _SECONDS
        name = next((name for name in names if name in source.parameters), None)
        if name is None:
            asked = "seconds" if request.num_frames is None else "num_frames"
            raise EngineError(f"{asked}: {class_name} takes no duration")
        found[name] = said
    if both := found.keys() & request.extra.keys():
        raise EngineError(f"extra: {min(both)!r} is said by a field of the request, too")
    return found
