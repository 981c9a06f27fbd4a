"""The backend of a workflow. The ingress implements it over its service, tests over tiny models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.records import ClipRequest, ImageRequest

# `clip` and `unet` are other names of two of them.
Folder = Literal[
    "checkpoints",
    "loras",
    "vae",
    "text_encoders",
    "diffusion_models",
    "controlnet",
    "clip_vision",
    "upscale_models",
    "embeddings",
    "model_patches",
]
Array: TypeAlias = npt.NDArray[np.float32]
Frames: TypeAlias = npt.NDArray[np.uint8]  # (number, height, width, 3)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a registered model before it is asked: its pipeline's class, the numbers of its parts'
    configs that the class's family reads, and its scheduler's config."""

    class_name: str
    variant: Mapping[str, bool | int] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file that was saved, as `/view` finds it and `/history` lists it."""

    filename: str
    subfolder: str
    type: Literal["output", "temp", "input"]


class Report(Protocol):
    """Told of the steps of the node that runs; `preview` is an image (height, width, 3) of uint8."""

    def __call__(self, value: int, max: int, preview: npt.NDArray[np.uint8] | None = None) -> None: ...


class Catalog(Protocol):
    """The registered models and files. Answers at once, and may change between two workflows, never during one."""

    def files(self, folder: Folder) -> Sequence[str]:
        """Return the names that a loader of this folder may say."""

    def models_of(self, folder: Folder, name: str) -> Sequence[str]:
        """Return the registered models (adapters for `loras` and `controlnet`, upscalers for `upscale_models`) that
        are, or have, the file of this name; none where it is not known."""

    def facts(self, model: str) -> ModelFacts:
        """Return the facts of a registered model."""


class Backend(Catalog, Protocol):
    """A cluster that works. Images are (number, height, width, channels) from 0 to 1, latents (number, channels,
    height, width) in the VAE's space; errors are `deployments.records.ServiceError`."""

    async def image(self, request: ImageRequest, report: Report) -> Array:
        """Return the request's images, or latents where its `output` is `latent`."""

    async def video(self, request: ClipRequest, report: Report) -> Frames:
        """Return the frames of the request's video."""

    async def encode(self, model: str, images: Array) -> Array:
        """Return the latents of images: the mode of the posterior."""

    async def decode(self, model: str, latents: Array) -> Array:
        """Return the images of latents."""

    async def upscale(self, model: str, images: Array) -> Array:
        """Return the images, larger by the model's own factor."""

    async def text(self, model: str, prompt: str, options: Mapping[str, Any], images: Array | None) -> str:
        """Return the text that a language model writes."""

    async def read_input(self, name: str) -> bytes:
        """Return the bytes of an uploaded file; its name may end in ` [output]` or ` [temp]`."""

    async def read_video(self, name: str) -> tuple[Frames, float]:
        """Return the frames of an uploaded video, and how many of them are a second."""

    async def save_file(self, file: bytes, prefix: str, ending: str) -> SavedFile:
        """Keep a file, named by the prefix, a number and the ending."""

    async def save(
        self, images: Sequence[npt.NDArray[np.uint8]], prefix: str, type: Literal["output", "temp"]
    ) -> list[SavedFile]:
        """Keep images (height, width, 3 or 4) as PNG files, named by the prefix and a number."""


class Events(Protocol):
    """Told how a run goes: `executing` before a node's function, `progress` during it, and `executed` after it with
    what the page shows of it, such as `{"images": [...]}`; None where it shows nothing."""

    def executing(self, node: str) -> None: ...
    def progress(self, node: str, value: int, max: int, preview: npt.NDArray[np.uint8] | None) -> None: ...
    def executed(self, node: str, output: Mapping[str, Any] | None) -> None: ...
