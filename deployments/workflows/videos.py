"""Videos: what a model makes them from, files of them, and their frames."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from deployments.engines.records.clip_files import VideoFormat, encode_video
from deployments.workflows.backend import Backend, Catalog, Frames, Report
from deployments.workflows.files import as_pixels
from deployments.workflows.kinds import (
    MAX_SIDE,
    Input,
    Kind,
    Output,
    boolean,
    choice,
    file,
    integer,
    link,
    number,
    text,
)
from deployments.workflows.loading import found_models
from deployments.workflows.records import Refused
from deployments.workflows.schedules import MAX_STEPS, ltxv
from deployments.workflows.values import (
    PENDING,
    Conditioning,
    Image,
    Latent,
    Later,
    Mask,
    Pending,
    Scene,
    SeenImage,
    Shown,
    Sigmas,
    Unheard,
    VaeValue,
    Video,
    VisionValue,
)
from deployments.workflows.video_models import FRAME_RATE

_MAX_FRAMES: Final = 4_096
_MAX_PIXELS: Final = 2**27  # of a video: less than a workflow's values may take
_MAX_PREFIX: Final = 200
_MAX_FPS: Final = 120.0
_LTX_CELL: Final = 32  # pixels, and 8 frames
_SPEEDS: Final[Mapping[str, int]] = {"default": 4, "fastest": 0, "slowest": 6}  # of WebP


def _latent(width: int, height: int, length: int, batch_size: int, frames: int = 4) -> Latent:
    """Return zeros for a video, of as many whole groups of frames, and one more."""
    number = (length - 1) // frames * frames + 1
    if number * height * width > _MAX_PIXELS:
        raise Refused(f"{number} frames of {width}x{height} pixels: at most {_MAX_PIXELS} pixels together", "length")
    return Latent(batch=batch_size, width=width, height=height, frames=number)


def _empty(width: int, height: int, length: int, batch_size: int) -> tuple[Latent]:
    return (_latent(width, height, length, batch_size),)


def _empty_ltxv(width: int, height: int, length: int, batch_size: int) -> tuple[Latent]:
    wide, high = (side // _LTX_CELL * _LTX_CELL for side in (width, height))
    return (_latent(wide, high, length, batch_size, frames=8),)


def _begun(
    vae: VaeValue, width: int, height: int, length: int, batch_size: int, start_image: Image | None = None
) -> tuple[Latent]:
    if start_image is not None:
        raise Refused("this model is run from noise to a video here, and not from a picture", "start_image")
    return (_latent(width, height, length, batch_size),)


def _with_scene(conditioning: Conditioning, scene: Scene) -> Conditioning:
    return tuple(replace(one, scene=scene) for one in conditioning)


def _staged(
    pictures: Mapping[str, Any],
    before: int,
    positive: Conditioning,
    negative: Conditioning,
    vae: VaeValue,
    width: int,
    height: int,
    length: int,
    batch_size: int,
) -> tuple[Conditioning, Conditioning, Latent]:
    """Return both prompts with a scene of these pictures, and its latent."""
    latent = _latent(width, height, length, batch_size).changed(before=before)
    scene = Scene(width=width, height=height, length=latent.frames, **pictures)
    return _with_scene(positive, scene), _with_scene(negative, scene), latent


def _from_pictures(
    start_image: Image | None = None,
    end_image: Image | None = None,
    clip_vision_output: SeenImage | None = None,
    clip_vision_start_image: SeenImage | None = None,
    clip_vision_end_image: SeenImage | None = None,
    **given: Any,
) -> tuple[Conditioning, Conditioning, Latent]:
    read = (clip_vision_output, clip_vision_start_image, clip_vision_end_image)
    seen = tuple(one for one in read if one is not None)
    return _staged({"kind": "frames", "start": start_image, "end": end_image, "seen": seen}, 0, **given)


def _from_control(
    strength: float,
    control_video: Image | None = None,
    control_masks: Mask | None = None,
    reference_image: Image | None = None,
    **given: Any,
) -> tuple[Conditioning, Conditioning, Latent, int]:
    before = 0 if reference_image is None else 1
    pictures = {"control": control_video, "masks": control_masks, "reference": reference_image, "strength": strength}
    return (*_staged({"kind": "vace", **pictures}, before, **given), before)


def _trimmed(samples: Latent, trim_amount: int) -> tuple[Latent]:
    """Return latents without the places that are no part of the video: its pipeline has left them out."""
    if trim_amount != samples.before:
        shown = f"{trim_amount} places: the pipeline leaves out the {samples.before} that are no part of the video"
        raise Refused(shown, "trim_amount")
    return (samples.changed(before=0),)


def _rated(positive: Conditioning, negative: Conditioning, frame_rate: float) -> tuple[Conditioning, Conditioning]:
    extra = (FRAME_RATE, (frame_rate,))
    both = [tuple(replace(one, extra=(*one.extra, extra)) for one in side) for side in (positive, negative)]
    return both[0], both[1]


def _ltxv_sigmas(
    steps: int, max_shift: float, base_shift: float, stretch: bool, terminal: float, latent: Latent | None = None
) -> tuple[Sigmas]:
    tokens = 4096
    if latent is not None:
        if not latent.frames:
            raise Refused("expected the latent of a video", "latent")
        cells = (latent.width // _LTX_CELL) * (latent.height // _LTX_CELL)
        tokens = cells * ((latent.frames - 1) // 8 + 1)
    return (ltxv(steps, tokens, (base_shift, max_shift), terminal if stretch else None),)


def _vision(catalog: Catalog, clip_name: str) -> tuple[VisionValue]:
    return (VisionValue(found_models(catalog, "clip_vision", clip_name, "clip_name")),)


def _seen(clip_vision: VisionValue, image: Image, crop: str) -> tuple[SeenImage]:
    return (SeenImage(clip_vision.models, image),)


def _created(images: Image, fps: float, audio: Unheard | None = None) -> tuple[Video]:
    if audio is not None:
        raise Refused("videos are saved without sound here", "audio")
    return (Video(images, fps),)


def _loaded(file: str) -> Later:
    async def act(backend: Backend, report: Report) -> tuple[Video]:
        frames: Any
        frames, fps = await backend.read_video(file)
        return (Video(frames, fps),)

    return Later(act, (Video(PENDING, 1.0),))


def _known(video: Video | Pending) -> Video:
    return video if isinstance(video, Video) else Video(PENDING, 1.0)


def _parts(video: Video | Pending) -> tuple[Image, Unheard, float | Pending]:
    video = _known(video)
    return video.frames, Unheard(), PENDING if video.frames is PENDING else video.fps


def _prefixed(prefix: str) -> str:
    if len(prefix) > _MAX_PREFIX:
        raise Refused(f"a prefix of {len(prefix)} characters: at most {_MAX_PREFIX}", "filename_prefix")
    return prefix


def _as_frames(images: Image) -> Frames:
    assert isinstance(images, np.ndarray)
    frames: Any = images if images.dtype == np.uint8 else np.stack(as_pixels(images))
    found: Frames = np.ascontiguousarray(frames)
    return found


def _saved(write: Any, images: Image, prefix: str, ending: str) -> Later:
    """Return the saving of a file that `write` makes of frames, in a thread."""
    prefix = _prefixed(prefix)

    async def act(backend: Backend, report: Report) -> Shown:
        data = await asyncio.to_thread(lambda: write(_as_frames(images)))
        kept = await backend.save_file(data, prefix, ending)
        shown = {"filename": kept.filename, "subfolder": kept.subfolder, "type": kept.type}
        return Shown((), {"images": [shown], "animated": [True]})

    return Later(act, ())


def _written(format_: VideoFormat, fps: float, **quality: float) -> Any:
    def write(frames: Frames) -> bytes:
        _, height, width, _ = frames.shape
        if height % 2 or width % 2:
            raise Refused(f"frames of {width}x{height} pixels: sides of a video are even")
        return encode_video(np.ascontiguousarray(frames[..., :3]), fps, format_, **quality)

    return write


def _save_video(video: Video | Pending, filename_prefix: str, format: str = "auto", codec: str = "auto") -> Later:
    if format not in ("auto", "mp4", "webm"):
        raise Refused(f"{format}: videos are saved as mp4 or webm", "format")
    if codec not in ("auto", "vp9"):
        raise Refused(f"{codec}: videos are saved in VP9, which needs no licence", "codec")
    video = _known(video)
    container: VideoFormat = "webm" if format == "webm" else "mp4"
    return _saved(_written(container, video.fps), video.frames, filename_prefix, container)


def _save_webm(images: Image, filename_prefix: str, codec: str, fps: float, crf: float) -> Later:
    if codec != "vp9":
        raise Refused(f"{codec}: videos are saved in VP9", "codec")
    return _saved(_written("webm", fps, quality=crf), images, filename_prefix, "webm")


def _save_webp(images: Image, filename_prefix: str, fps: float, lossless: bool, quality: int, method: str) -> Later:
    options = {"lossless": lossless, "quality": quality, "method": _SPEEDS[method]}
    return _saved(lambda frames: _animation(frames, "WEBP", fps, options), images, filename_prefix, "webp")


def _save_png(images: Image, filename_prefix: str, fps: float, compress_level: int) -> Later:
    options = {"compress_level": compress_level}
    return _saved(lambda frames: _animation(frames, "PNG", fps, options), images, filename_prefix, "png")


def _animation(frames: Frames, format_: str, fps: float, options: Mapping[str, Any]) -> bytes:
    import PIL.Image

    first, *others = map(PIL.Image.fromarray, frames)
    file = io.BytesIO()
    first.save(file, format_, save_all=True, append_images=others, duration=int(1000 / fps), **options)
    return file.getvalue()


_POSITIVE, _NEGATIVE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING")
_VAE: Final = link("vae", "VAE")
_OUT: Final = (Output("LATENT"),)
_BOTH: Final = (Output("CONDITIONING", "positive"), Output("CONDITIONING", "negative"))
_SCENE: Final = (*_BOTH, Output("LATENT", "latent"))
_FRAMES: Final = replace(link("images", "IMAGE"), takes_bytes=True)
_LATENT: Final = replace(link("samples", "LATENT"), takes_decoded=True, takes_videos=True)


def _sizes(width: int, height: int, length: int) -> tuple[Input, ...]:
    return (
        *(integer("width", width, 16), integer("height", height, 16)),
        *(integer("length", length, 1, MAX_SIDE), integer("batch_size", 1, 1, _MAX_FRAMES)),
    )


def _picture(name: str) -> Input:
    return replace(link(name, "IMAGE", required=False), takes_bytes=True)


def _seen_by(name: str) -> Input:
    return link(name, "CLIP_VISION_OUTPUT", required=False)


def _scene(name: str, *further: Input) -> Kind:
    inputs = (_POSITIVE, _NEGATIVE, _VAE, *_sizes(832, 480, 81), *further)
    return Kind(name, inputs, _SCENE, _from_pictures, is_opaque=True, category="conditioning/video_models")


def _output(name: str, *inputs: Input, function: Any) -> Kind:
    return Kind(name, inputs, (), function, is_output=True, is_opaque=True, category="image/video")


VIDEOS: Final = (
    Kind("EmptyHunyuanLatentVideo", _sizes(848, 480, 25), _OUT, _empty, category="latent/video"),
    Kind("EmptyLTXVLatentVideo", _sizes(768, 512, 97), _OUT, _empty_ltxv, category="latent/video"),
    Kind(
        "Wan22ImageToVideoLatent",
        (_VAE, *_sizes(1280, 704, 49), _picture("start_image")),
        _OUT,
        _begun,
        is_opaque=True,
        category="conditioning/inpaint",
    ),
    _scene("WanImageToVideo", _seen_by("clip_vision_output"), _picture("start_image")),
    _scene(
        "WanFirstLastFrameToVideo",
        *(_seen_by("clip_vision_start_image"), _seen_by("clip_vision_end_image")),
        *(_picture("start_image"), _picture("end_image")),
    ),
    _scene("WanFunInpaintToVideo", _seen_by("clip_vision_output"), _picture("start_image"), _picture("end_image")),
    Kind(
        "WanVaceToVideo",
        (
            *(_POSITIVE, _NEGATIVE, _VAE, *_sizes(832, 480, 81), number("strength", 1.0, 0.0, 1000.0)),
            *(_picture("control_video"), link("control_masks", "MASK", required=False), _picture("reference_image")),
        ),
        (*_SCENE, Output("INT", "trim_latent")),
        _from_control,
        is_opaque=True,
        category="conditioning/video_models",
    ),
    Kind(
        "TrimVideoLatent",
        (_LATENT, integer("trim_amount", 0, 0, 99_999)),
        _OUT,
        _trimmed,
        is_opaque=True,
        category="latent/video",
    ),
    Kind(
        "LTXVConditioning",
        (_POSITIVE, _NEGATIVE, number("frame_rate", 25.0, 0.0, 1000.0)),
        _BOTH,
        _rated,
        category="conditioning/video_models",
    ),
    Kind(
        "LTXVScheduler",
        (
            *(integer("steps", 20, 1, MAX_STEPS), number("max_shift", 2.05, 0.0, 100.0)),
            *(number("base_shift", 0.95, 0.0, 100.0), boolean("stretch", True), number("terminal", 0.1, 0.0, 0.99)),
            replace(link("latent", "LATENT", required=False), takes_videos=True),
        ),
        (Output("SIGMAS"),),
        _ltxv_sigmas,
        is_opaque=True,
        category="sampling/custom_sampling",
    ),
    Kind(
        "CLIPVisionLoader",
        (file("clip_name", "clip_vision"),),
        (Output("CLIP_VISION"),),
        _vision,
        reads_catalog=True,
        category="loaders",
    ),
    Kind(
        "CLIPVisionEncode",
        (
            *(link("clip_vision", "CLIP_VISION"), replace(link("image", "IMAGE"), takes_bytes=True)),
            choice("crop", ("center", "none")),
        ),
        (Output("CLIP_VISION_OUTPUT"),),
        _seen,
        is_opaque=True,
        category="conditioning",
    ),
    Kind(
        "CreateVideo",
        (_FRAMES, number("fps", 30.0, 1.0, _MAX_FPS), link("audio", "AUDIO", required=False)),
        (Output("VIDEO"),),
        _created,
        is_opaque=True,
        category="image/video",
    ),
    Kind("LoadVideo", (Input("file", "COMBO"),), (Output("VIDEO"),), _loaded, is_opaque=True, category="image/video"),
    Kind(
        "GetVideoComponents",
        (link("video", "VIDEO"),),
        (Output("IMAGE", "images"), Output("AUDIO", "audio"), Output("FLOAT", "fps")),
        _parts,
        is_opaque=True,
        category="image/video",
    ),
    _output(
        "SaveVideo",
        link("video", "VIDEO"),
        text("filename_prefix", "video/ComfyUI"),
        Input("format", "COMBO", "auto", choices=("auto", "mp4", "webm"), required=False),
        Input("codec", "COMBO", "auto", choices=("auto", "vp9", "h264"), required=False),
        function=_save_video,
    ),
    _output(
        "SaveWEBM",
        *(_FRAMES, text("filename_prefix", "ComfyUI"), choice("codec", ("vp9", "av1"))),
        *(number("fps", 24.0, 1.0, _MAX_FPS), number("crf", 32.0, 0.0, 63.0)),
        function=_save_webm,
    ),
    _output(
        "SaveAnimatedWEBP",
        *(_FRAMES, text("filename_prefix", "ComfyUI"), number("fps", 6.0, 1.0, _MAX_FPS), boolean("lossless", True)),
        *(integer("quality", 80, 0, 100), choice("method", tuple(_SPEEDS))),
        function=_save_webp,
    ),
    _output(
        "SaveAnimatedPNG",
        *(_FRAMES, text("filename_prefix", "ComfyUI"), number("fps", 6.0, 1.0, _MAX_FPS)),
        integer("compress_level", 4, 0, 9),
        function=_save_png,
    ),
)
