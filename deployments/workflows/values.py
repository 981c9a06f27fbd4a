"""The values that go from node to node: small ones that say what a sampler will ask for. Images and latents are arrays.

Before anything runs, `check` computes all values that need no computing on a device. What is not there then, an image
or a latent, is `PENDING`: functions of nodes that hand such things on must not look into them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.backend import Backend, Report

Array: TypeAlias = npt.NDArray[np.float32]


class Pending(Enum):
    """The one value of what is computed only when the workflow runs."""

    PENDING = "pending"


PENDING = Pending.PENDING

# (number, height, width, 3 or 4), from 0 to 1. Frames of videos are bytes, until a node computes with them.
Image: TypeAlias = "Array | Pending"
Mask: TypeAlias = "Array | Pending"  # (number, height, width), from 0 to 1


@dataclass(frozen=True, slots=True)
class Shown:
    """Outputs, and what the page shows of the node beside them: `{"images": [...]}`, `{"text": [...]}`."""

    outputs: tuple[Any, ...]
    shown: Mapping[str, Any]


class Act(Protocol):
    """The work that gives the outputs of a node."""

    def __call__(self, backend: Backend, report: Report, /) -> Awaitable[tuple[Any, ...] | Shown]: ...


@dataclass(frozen=True, slots=True)
class Later:
    """The return value of a node's function where a device or a file is needed: `act` gives the outputs.

    `outputs` stand for them while the workflow is only checked.
    """

    act: Act
    outputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """The node that shifts a model's noise levels, by its kind: `ModelSamplingFlux` says its size in pixels."""

    kind: str
    shift: float = 0.0
    base_shift: float = 0.0
    max_shift: float = 0.0
    width: int = 0
    height: int = 0


@dataclass(frozen=True, slots=True)
class LoraUse:
    """An adapter that is registered, and its scale."""

    name: str
    scale: float


@dataclass(frozen=True, slots=True)
class ModelValue:
    """MODEL. `models` are the registered ones that have the file; what else is linked to a sampler decides which.

    `controls` act on its forwards, for either prompt. The name of the `file` says which of two denoisers it has, for
    much noise or for little. `extra` has what further nodes say of it, by their kinds: a sampler refuses what it does
    not know.
    """

    models: tuple[str, ...]
    loras: tuple[LoraUse, ...] = ()
    shift: Shift | None = None
    extra: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    controls: tuple[ControlUse, ...] = ()
    file: str = ""


@dataclass(frozen=True, slots=True)
class ClipValue:
    """CLIP: text encoders of registered models. `last_layer` is CLIPSetLastLayer's, -1 or less; None is the default."""

    models: tuple[str, ...]
    loras: tuple[LoraUse, ...] = ()
    last_layer: int | None = None


@dataclass(frozen=True, slots=True)
class VaeValue:
    """VAE: that of registered models."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VisionValue:
    """CLIP_VISION: the image encoder of registered models."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SeenImage:
    """CLIP_VISION_OUTPUT: the image that the encoder of registered models reads."""

    models: tuple[str, ...]
    image: Image


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """LATENT: (number, channels, height, width), or zeros of a size in pixels where `samples` are None.

    `noise_mask` is 1 where noise goes. `batch_index` are the places in a longer batch whose noise is drawn. `pixels`
    are the images that they were encoded from: pipelines that edit images take those. `decoded` are their images where
    diffusers' own code has run the model `decoded_by`: nothing else is known of such latents, which are pending.

    Those of a video have so many `frames`, the first `before` places are no part of it, and where noise is left in them
    they have `begun` by that plan, which has yet to run.
    """

    samples: Array | Pending | None = None
    batch: int = 1
    width: int = 0
    height: int = 0
    noise_mask: Mask | None = None
    batch_index: tuple[int, ...] | None = None
    pixels: Image | None = None
    decoded: Image | None = None
    decoded_by: str | None = None
    frames: int = 0
    before: int = 0
    begun: Plan | None = None

    def changed(self, **changes: Any) -> Latent:
        """Return another one with some fields changed."""
        return replace(self, **changes)


PENDING_LATENT = Latent(samples=PENDING)


@dataclass(frozen=True, slots=True)
class ControlNetValue:
    """CONTROL_NET: a registered ControlNet; `mode` is that of a union, as SetUnionControlNetType says it."""

    name: str
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class UpscalerValue:
    """UPSCALE_MODEL: a registered upscaler."""

    model: str


@dataclass(frozen=True, slots=True, eq=False)
class ControlUse:
    """A ControlNet on a conditioning or a model: the image that it reads, and how that is scaled to the latent's size,
    its strength, and from and to which percent it acts."""

    net: ControlNetValue
    image: Image
    strength: float
    start: float = 0.0
    end: float = 1.0
    scaling: str = "nearest-exact"


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """The latent that a model reads in further channels: that of a control image, or of one whose masked part is gray,
    with the mask in pixels."""

    latent: Latent
    mask: Mask | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """The pictures that a video is made from, and its size.

    `kind` "frames" begins at `start` and ends with `end`, and `seen` are those of them that an image encoder reads. Of
    "vace", `control` is a video with parts to make anew, where `masks` are 1, and `reference` shows what is in it.
    """

    kind: Literal["frames", "vace"]
    width: int
    height: int
    length: int
    start: Image | None = None
    end: Image | None = None
    seen: tuple[SeenImage, ...] = ()
    control: Image | None = None
    masks: Mask | None = None
    reference: Image | None = None
    strength: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One entry of a CONDITIONING.

    `texts` go to further encoders by their names (`t5xxl`, `clip_g`); `text` is all of them where it is empty.
    `images` are those an editing model's encoder reads, `references` latents that it appends. `zeroed` is
    ConditioningZeroOut's. `extra` has what further nodes say of it, by their kinds.
    """

    clip: ClipValue
    text: str
    texts: tuple[tuple[str, str], ...] = ()
    guidance: float | None = None
    zeroed: bool = False
    start: float = 0.0
    end: float = 1.0
    controls: tuple[ControlUse, ...] = ()
    images: tuple[Image, ...] = ()
    references: tuple[Latent, ...] = ()
    beside: Beside | None = None
    scene: Scene | None = None
    extra: tuple[tuple[str, tuple[Any, ...]], ...] = ()


Conditioning: TypeAlias = tuple[Prompt, ...]
Sigmas: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """NOISE: `seed` None is that of DisableNoise."""

    seed: int | None


@dataclass(frozen=True, slots=True)
class Sampler:
    """SAMPLER: a name of ComfyUI's, and options of the node that made it."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Guider:
    """GUIDER: BasicGuider has no negative prompt and a scale of 1."""

    kind: Literal["basic", "cfg", "dual_cfg"]
    model: ModelValue
    positive: Conditioning
    negative: Conditioning | None = None
    scale: float = 1.0
    middle: Conditioning | None = None
    scale_2: float = 1.0
    nested: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The request of a sampling node of any kind."""

    model: ModelValue
    positive: Conditioning
    negative: Conditioning | None
    cfg: float
    sampler: Sampler
    sigmas: Sigmas
    seed: int
    adds_noise: bool
    latent: Latent


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """VIDEO: frames as an image, and how many are a second."""

    frames: Image
    fps: float


@dataclass(frozen=True, slots=True)
class Unheard:
    """AUDIO: the sound of a video, which is not read."""


_CLASSES: Final[Mapping[str, type]] = {
    "MODEL": ModelValue,
    "CLIP": ClipValue,
    "VAE": VaeValue,
    "CONTROL_NET": ControlNetValue,
    "MODEL_PATCH": ControlNetValue,
    "UPSCALE_MODEL": UpscalerValue,
    "CONDITIONING": tuple,
    "SIGMAS": tuple,
    "LATENT": Latent,
    "NOISE": Noise,
    "SAMPLER": Sampler,
    "GUIDER": Guider,
    "VIDEO": Video,
    "CLIP_VISION": VisionValue,
    "CLIP_VISION_OUTPUT": SeenImage,
    "AUDIO": Unheard,
}
_AXES: Final[Mapping[str, int]] = {"IMAGE": 4, "MASK": 3}


def fits_type(type: str, value: Any) -> bool:
    """Return whether a value is of one of some of ComfyUI's types; of those without a class here, any is."""
    for one in type.split(","):
        if one in _AXES:
            if isinstance(value, np.ndarray) and value.ndim == _AXES[one]:
                return True
        elif one not in _CLASSES or isinstance(value, _CLASSES[one]):
            return True
    return False
