"""The contract of a family: all that one pipeline class of diffusers has to itself, beside the loop over steps.

`Family`, the last class here, is made of rules, a class for each subject. What these do by themselves is what most
pipelines do: classifier-free guidance by `guidance_scale`, latents as images, noise scaled by the solver, text that is
truncated at the tokenizer's own length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from configs.model import LongText, TextPadding
from deployments.engines.diffusion.families.texts import Encoded, EncodeItem, EncoderUse, Role, lacking_encoders
from deployments.engines.records.protocol import DiffusionRequest, EngineError, check_choice

if TYPE_CHECKING:  # the ingress has no torch
    import numpy as np
    import numpy.typing as npt
    import torch

    from deployments.engines.diffusion.families.prompted import PromptedSpan
    from deployments.engines.nn.lora import AdaptedSpan

MIN_TEXT_LENGTH: Final = 16
MAX_SIDE_PX: Final = 4096
_PIXELS_PER_LATENT: Final = 8  # of stock's VAEs, where the pipeline's configs do not say
NO_SKIPS: Final[Mapping[Role, int]] = {}
NoNegative = Literal["unguided", "empty text", "zeros"]


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """The defaults of the stock pipeline's `__call__` (diffusers 0.42), but for the size: `Defaults.sides`.

    `max_sequence_length` None is what `Texts.encoders` makes of it. `true_cfg_scale` is that of families that have
    one.
    """

    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int | None = None
    true_cfg_scale: float = 1.0


Task = Literal["text-to-image", "image-to-image", "inpainting"]


@dataclass(frozen=True, slots=True)
class EditDefaults:
    """The defaults of the `__call__` of the stock pipeline that begins at an image."""

    strength: float
    guidance_scale: float
    num_inference_steps: int


class ImageSize(NamedTuple):
    """Height and width of an image in pixels, and of its latents; and those of the images that stand beside it."""

    height: int
    width: int
    latent_height: int
    latent_width: int
    references: tuple[ImageSize, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """One text condition of a request, (1, L, D) and perhaps (1, P), on the denoiser's device and in its dtype.

    `mask` (1, L) is False where the prompt is padding, behind its `num_tokens`; both are None where nothing is.
    """

    prompt: torch.Tensor
    pooled: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ControlRows:
    """One ControlNet's share of a forward: what it reads of images, (B, …) each, scales (B,), and the texts that it
    reads, as in `Rows`. `modes` (B,) are those of a union.
    """

    net: Any
    inputs: tuple[torch.Tensor, ...]
    scales: torch.Tensor
    prompts: torch.Tensor
    pooled: torch.Tensor | None = None
    modes: torch.Tensor | None = None

    @property
    def images(self) -> torch.Tensor:
        """Return the images of a network that reads nothing else."""
        (images,) = self.inputs
        return images

    def part(self, start: int, stop: int) -> ControlRows:
        """Return the rows `start` to `stop`, as views."""
        here = slice(start, stop)
        pooled = None if self.pooled is None else self.pooled[here]
        modes = None if self.modes is None else self.modes[here]
        inputs = tuple(one[here] for one in self.inputs)
        return ControlRows(self.net, inputs, self.scales[here], self.prompts[here], pooled, modes)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return what it reads, and its scales."""
        return [*self.inputs, *(one for one in (self.scales, self.prompts, self.pooled, self.modes) if one is not None)]

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> ControlRows:
        """Return the rows with others in the place of their `tensors`, taken in that order."""
        return ControlRows(
            self.net,
            tuple(next(tensors) for _ in self.inputs),
            next(tensors),
            next(tensors),
            None if self.pooled is None else next(tensors),
            None if self.modes is None else next(tensors),
        )

    def scaled(self, residuals: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """Return residuals times the scales of their rows, multiplied in float32 as stock's scalars are."""
        return [
            (residual * self.scales.view(-1, *[1] * (residual.ndim - 1))).to(residual.dtype)
            for residual in residuals or ()
        ]


@dataclass(frozen=True, slots=True)
class Rows:
    """The input of one forward: latents (B, …), timesteps (B,), prompts (B, L, D), guidance scales (B,), pooled (B, P).

    `pooled` is None for a family that has no pooled text. `controls` are the ControlNets of all rows. `mask` (B, L) is
    False where a prompt is padding, and None where no prompt is; only a family whose texts have `masks` gets one.
    `adapters` are those of rows that have any, `modulation` what is known already (`Modulation.rows_of`). `sizes` has
    each row's, which have one `Latents.batch_shape`. `image_prompts` are those of rows that have any. `lengths` are the
    tokens of each row's prompt that are no padding.
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    prompts: torch.Tensor
    guidance: torch.Tensor
    pooled: torch.Tensor | None = None
    controls: tuple[ControlRows, ...] = ()
    mask: torch.Tensor | None = None
    adapters: tuple[AdaptedSpan, ...] = ()
    modulation: tuple[torch.Tensor, ...] = ()
    sizes: tuple[ImageSize, ...] = ()
    image_prompts: tuple[PromptedSpan, ...] = ()
    lengths: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.latents)

    def part(self, start: int, stop: int) -> Rows:
        """Return the rows `start` to `stop`, as views."""
        here = slice(start, stop)
        pooled = None if self.pooled is None else self.pooled[here]
        controls = tuple(control.part(start, stop) for control in self.controls)
        mask = None if self.mask is None else self.mask[here]
        adapters = tuple(own for span in self.adapters if (own := span.part(start, stop)) is not None)
        prompted = tuple(one for images in self.image_prompts if (one := images.part(start, stop)) is not None)
        return Rows(
            self.latents[here],
            self.timesteps[here],
            self.prompts[here],
            self.guidance[here],
            pooled,
            controls,
            mask,
            adapters,
            tuple(output[here] for output in self.modulation),
            self.sizes[here],
            prompted,
            self.lengths[here],
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of this step: all but those of adapters and of images as prompts."""
        found = (self.latents, self.timesteps, self.prompts, self.guidance, self.pooled, self.mask, *self.modulation)
        return [one for one in (*found, *(part for net in self.controls for part in net.tensors)) if one is not None]

    def lasting_tensors(self) -> list[torch.Tensor]:
        """Return those of adapters and of images as prompts: the same objects, and values, in each step."""
        loras = (one for span in self.adapters for one in span.tensors)
        return [*loras, *(one for span in self.image_prompts for one in span.tensors)]

    def form(self) -> Hashable:
        """Return all but the values of the tensors and the ControlNets: rows of one form go through the same layers."""
        tensors = tuple((one.shape, one.dtype) for one in self.tensors())
        optional = self.pooled is None, self.mask is None, len(self.modulation)
        controls = tuple((len(net.inputs), net.pooled is None, net.modes is None) for net in self.controls)
        spans = tuple(one.form for one in self.adapters), tuple(one.form for one in self.image_prompts)
        return tensors, optional, self.sizes, controls, spans

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> Rows:
        """Return the rows with others in the place of `tensors()` and, behind them, `lasting_tensors()`."""
        left = iter(tensors)
        return replace(
            self,
            latents=next(left),
            timesteps=next(left),
            prompts=next(left),
            guidance=next(left),
            pooled=None if self.pooled is None else next(left),
            mask=None if self.mask is None else next(left),
            modulation=tuple(next(left) for _ in self.modulation),
            controls=tuple(net.with_tensors(left) for net in self.controls),
            adapters=tuple(span.with_tensors(left) for span in self.adapters),
            image_prompts=tuple(span.with_tensors(left) for span in self.image_prompts),
        )


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets that leaves something open: `usual`, or those of the task among `edits`.

    `sample_size` is how many latents are on a side of an image whose size nobody says. With `reads_sample_size` stock
    takes that from the denoiser's config.
    """

    usual: ImageDefaults
    edits: Mapping[Task, EditDefaults] = field(default_factory=dict)
    sample_size: int = 128
    reads_sample_size: bool = False

    def of(self, variant: Mapping[str, bool | int]) -> ImageDefaults:
        """Return the defaults of a checkpoint by what its configs say (`weights/formats/pipeline_parts.py`)."""
        return self.usual

    def sides(self, variant: Mapping[str, bool | int]) -> tuple[int, int]:
        """Return the width and height of an image whose request says none, by what a checkpoint's configs say."""
        factor = int(variant.get("pixels_per_latent", _PIXELS_PER_LATENT))
        told = variant if self.reads_sample_size else {}
        width, height = (
            min(int(told.get(name, self.sample_size)) * factor, MAX_SIDE_PX)
            for name in ("sample_width", "sample_height")
        )
        return width, height


class Texts(ABC):
    """How prompts become conditioning: which encoders read them, and what is made of what these give."""

    masks: ClassVar[bool] = False  # whether `predict_noise` heeds a mask, so that texts may be padded
    counts_tokens: ClassVar[bool] = False  # `predict_noise` leaves out what is padding, by `Rows.lengths`
    takes_clip_skip: ClassVar[bool] = False  # its CLIPs may give the vectors of earlier layers
    refused_rules: ClassVar[Mapping[str, str]] = {}  # values of `text_padding` and `long_text`, and why not

    @abstractmethod
    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        """Return the encoders that every text goes to, and those of `lacking` for which stock takes a stand-in.

        `lacking` are the encoders that the pipeline has not. Raises EngineError for a length that one cannot have.
        """

    def stand_in(self, item: EncodeItem, denoiser_config: Mapping[str, Any], like: torch.Tensor) -> Encoded | None:
        """Return what stock takes for a text whose encoder the pipeline lacks, in the place and dtype of `like`.

        None for an encoder that it must have.
        """
        return None

    @abstractmethod
    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        """Return one text's conditioning from its encodings by component: "prompt_embeds" (1, L, D) and, for a family
        that has pooled text, "pooled_prompt_embeds" (1, P). Raises EngineError for outputs that are missing.
        """

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        """Return what the stock pipeline guides away from when the request has no negative prompt at all."""
        return "empty text"

    def padded_length(self, num_tokens: int) -> int:
        """Return the length that a text has in a forward: a power of two that follows from its own length alone.

        So texts of many lengths share forwards, and none depends on its batch-mates. The usual lengths of T5 are such
        powers.
        """
        return max(MIN_TEXT_LENGTH, 1 << (num_tokens - 1).bit_length())

    def plan(
        self,
        model_index: Mapping[str, Any],
        prompt: str,
        negative_prompt: str | None,
        *,
        use_negative: bool,
        max_sequence_length: int | None = None,
        text_padding: TextPadding = "stock",
        long_text: LongText = "truncate",
        clip_skips: Mapping[Role, int] = NO_SKIPS,
    ) -> tuple[EncodeItem, ...]:
        """Plan what is encoded. Nothing runs, so a plan can be made and cached anywhere.

        Items of `lacking_encoders` are not encoded: they have a `stand_in`.

        A negative prompt of None is what `no_negative` says; an empty *string* is a text and is encoded.
        `max_sequence_length` is for families whose prompt has a length of its own (Flux's T5); others ignore it.
        `text_padding` "trimmed" gives the rows of the prompt's own tokens, computed under a mask. `long_text` is for
        texts beyond the limit. `clip_skips` says by role how many layers of its CLIPs are left out, for families that
        take it. Raises EngineError for what the pipeline cannot take.
        """
        check_choice("text_padding", text_padding, TextPadding)
        check_choice("long_text", long_text, LongText)
        for rule in (text_padding, long_text):
            if rule in self.refused_rules:
                raise EngineError(self.refused_rules[rule])
        texts: list[tuple[Role, str]] = [("prompt", prompt)]
        if use_negative and negative_prompt is not None:
            texts.append(("negative", negative_prompt))
        elif use_negative and self.no_negative(model_index) == "empty text":
            texts.append(("negative", ""))
        uses = self.encoders(max_sequence_length, long_text, lacking_encoders(model_index))
        skips = clip_skips if self.takes_clip_skip else NO_SKIPS
        return tuple(
            EncodeItem(
                use.component,
                text,
                use.max_length,
                role,
                text_padding,
                use.long_text,
                use.layer.before(skips.get(role, 0)),
                use.form,
            )
            for role, text in texts
            for use in uses
        )

    def assemble(
        self, model_index: Mapping[str, Any], outputs: Mapping[EncodeItem, Encoded], *, use_negative: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that `DenoisePipeline.start` takes: those of `join`, and the same with
        `negative_` in front where guidance has something to guide away from.

        `outputs` maps the plan's items to what `TextEncoder.encode` gave. `use_negative` False saves the zeros of a
        family that has them.
        """
        by_role: dict[Role, dict[str, Encoded]] = {"prompt": {}}
        for item, encoded in outputs.items():
            by_role.setdefault(item.role, {})[item.component] = encoded
        prompt = self.join("prompt", by_role["prompt"])
        negative: dict[str, torch.Tensor] = {}
        if "negative" in by_role:
            negative = self.join("negative", by_role["negative"])
        elif use_negative and self.no_negative(model_index) == "zeros":
            negative = {name: tensor.new_zeros(tensor.shape) for name, tensor in prompt.items()}
        return prompt | {f"negative_{name}": tensor for name, tensor in negative.items()}


class Guidance:
    """Classifier-free guidance: by `guidance_scale`, unless the family has another option for it."""

    rule: ClassVar[str] = "guidance_scale > 1"  # for people: when guidance is on

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        """Return whether the stock pipeline runs classifier-free guidance for this request."""
        return request.guidance_scale > 1

    def scale(self, request: DiffusionRequest) -> float:
        """Return the scale of classifier-free guidance."""
        return request.guidance_scale

    def combine(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        """Return one prediction, made of those for a negative prompt and a prompt."""
        return negative + scale * (prompt - negative)


class Latents(ABC):
    """How latents look: to the VAE, to the denoiser, and before the first step."""

    upcasts_vae: ClassVar[bool] = False  # stock encodes images in float32 where the VAE's config has `force_upcast`
    are_float32: ClassVar[bool] = False  # stock draws and steps in float32 whatever the denoiser's dtype

    @abstractmethod
    def size_multiple(self, pixels_per_latent: int) -> int:
        """Return the pixels that width and height must be multiples of."""

    def multiple_of(self, variant: Mapping[str, bool | int]) -> int:
        """Return the `size_multiple` of a checkpoint by what its configs say."""
        return self.size_multiple(int(variant.get("pixels_per_latent", _PIXELS_PER_LATENT)))

    def channels(self, denoiser_config: Mapping[str, Any]) -> int:
        """Return the channels of a latent image."""
        return int(denoiser_config["in_channels"])

    def noise_shape(self, denoiser_config: Mapping[str, Any], size: ImageSize) -> tuple[int, int, int]:
        """Return the shape (C, h, w) in which stock draws the noise of an image."""
        return self.channels(denoiser_config), size.latent_height, size.latent_width

    def num_extra_channels(self, denoiser_config: Mapping[str, Any]) -> int:
        """Return the channels that the denoiser reads beside those of the latents; those of inpainting UNets are 5."""
        return 0

    def first(self, noise_BCHW: torch.Tensor, solver: Any) -> torch.Tensor:
        """Return the latent images before the first step of a request without an image, (B, C, h, w)."""
        return noise_BCHW * solver.init_noise_sigma

    def pack(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return latent images as the denoiser takes them, (B, …)."""
        return images_BCHW

    def unpack(self, latents: torch.Tensor, size: ImageSize) -> torch.Tensor:
        """Return what `pack` packed: (B, C, h, w)."""
        return latents

    def scale(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latents of the VAE at the scale at which they are denoised."""
        return vae_latents * vae.config["scaling_factor"]

    def unscale(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latent images at the scale of the VAE."""
        return latents_BCHW / vae.config["scaling_factor"]

    def batch_shape(self, size: ImageSize) -> Hashable:
        """Return what images must have in common to share a forward of the denoiser, and cost the same in it."""
        return size.height, size.width


class Steps:
    """The schedule of a request, and where one with an image begins."""

    refines_only: ClassVar[bool] = False  # it makes no image without one to begin at
    inpaints_from_noise: ClassVar[bool] = True  # at strength 1 stock begins at noise alone, scaled as without an image
    attends_to_image: ClassVar[bool] = False  # an image to begin at is read beside the latents, and no noise hides it

    def solver_changes(self, request: DiffusionRequest, solver_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the constructor of the stock pipeline for a request changes of its solver's config."""
        return {}

    def schedule(self, request: DiffusionRequest, solver_config: Mapping[str, Any], size: ImageSize) -> dict[str, Any]:
        """Return the arguments of the solver's `set_timesteps`."""
        if request.sigmas is not None:
            return {"sigmas": list(request.sigmas)}
        if request.timesteps is not None:
            return {"timesteps": list(request.timesteps)}
        return {"num_inference_steps": request.num_inference_steps}

    def first(self, num_inference_steps: int, strength: float) -> int:
        """Return the step at which a request with an image begins: rounding is the stock pipeline's."""
        return num_inference_steps - min(int(num_inference_steps * strength), num_inference_steps)


class Adapters:
    """What may be added to the denoiser: LoRAs, ControlNets, images as prompts."""

    # The text encoders that a LoRA may change, each with what trainers and UIs call it.
    lora_encoders: ClassVar[Mapping[str, Sequence[str]]] = {}
    repeats_rows: ClassVar[bool] = False  # layers with several vectors of each row get all rows again and again
    takes_image_prompts: ClassVar[bool] = False  # its cross-attentions may read images beside the text
    # The classes of its ControlNets, each with what their configs must have in common with the denoiser's.
    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {}
    controls_read_prompt: ClassVar[bool] = False  # also beside a negative prompt
    encodes_controls: ClassVar[bool] = False  # `control_image` may encode, so that the VAE is needed

    def control_image(
        self,
        net: Any,
        pixels_B3HW: torch.Tensor,
        encode: Callable[[torch.Tensor], torch.Tensor],
        vae: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return images from 0 to 1 as a ControlNet reads them; `encode` makes the VAE's latents of images from -1.

        Raises EngineError for a size that it cannot read.
        """
        return (pixels_B3HW,)

    def control_refusal(
        self, class_name: str, config: Mapping[str, Any], denoiser_config: Mapping[str, Any], pixels_per_latent: int
    ) -> str | None:
        """Return why `predict_noise` cannot call a ControlNet of this class and config, or None."""
        return None

    def num_modes(self, net: Any) -> int:
        """Return how many modes a union of ControlNets has, of which a request says one; 0 for a net of one."""
        return 0


class References:
    """Images that are read beside the latents, uint8 (height, width, 3). A family that has `most` needs one of them."""

    most: ClassVar[int] = 0

    def sides(self, references: Sequence[npt.NDArray[np.uint8]], multiple: int) -> tuple[int, int]:
        """Return the width and height of an image beside references where nobody says them.

        Raises EngineError for references that it cannot read.
        """
        raise NotImplementedError

    def seen(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a reference in the size in which the reader of the prompt sees it. Raises EngineError."""
        raise NotImplementedError

    def encoded(self, pixels: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
        """Return a reference in the size in which the VAE encodes it. Raises EngineError."""
        raise NotImplementedError


class Network(ABC):
    """How the denoiser is called. It may be modulated by embeddings of time and text, which are known beforehand."""

    keeps_precision: ClassVar[Sequence[str]] = ()  # matrices of the denoiser that no float8 form has, as patterns
    embedding_parts: ClassVar[Sequence[str]] = ()  # the parts that `embed_times` runs, of a denoiser that they modulate
    modulated_layers: ClassVar[str] = ""  # a pattern of the layers that see the SiLU of their sum, and nothing else
    text_layers: ClassVar[str] = ""  # a pattern of the layers of such a denoiser that see the prompt and nothing else

    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        """Return why `predict_noise` cannot call a denoiser of this config, or None."""
        return None

    @abstractmethod
    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        """Return the (D, P) of the conditioning that the denoiser takes; P is None where it takes no pooled text."""

    def is_modulated(self, denoiser: Any) -> bool:
        """Return whether `embedding_parts`, `modulated_layers` and `text_layers` are what they say in this variant."""
        return bool(self.embedding_parts)

    def embed_times(self, denoiser: Any, rows: Rows, size: ImageSize) -> Sequence[torch.Tensor]:
        """Return what each of `embedding_parts` makes of rows, as `predict_noise` has it: (B, D) each.

        Latents and prompts of the rows have no elements.
        """
        raise NotImplementedError

    @abstractmethod
    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        """Run the denoiser: its prediction, of the shape of `rows.latents`."""


_GUIDANCE: Final = Guidance()
_STEPS: Final = Steps()
_ADAPTERS: Final = Adapters()
_REFERENCES: Final = References()


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A pipeline class of diffusers. Stateless: modules, configs and requests come as arguments.

    `class_name` is that in model_index.json; `other_class_names` are stock pipelines of the same components, for other
    tasks. `denoiser_name` is the component that predicts noise.
    """

    class_name: str
    other_class_names: Sequence[str] = ()
    denoiser_name: str
    defaults: Defaults
    network: Network
    texts: Texts
    latents: Latents
    guidance: Guidance = _GUIDANCE
    steps: Steps = _STEPS
    adapters: Adapters = _ADAPTERS
    references: References = _REFERENCES

    @property
    def lora_encoders(self) -> Mapping[str, Sequence[str]]:
        """Return the text encoders that a LoRA may change: a family is the `AdaptedParts` of its pipelines."""
        return self.adapters.lora_encoders

    def variant(self, model_index: Mapping[str, Any]) -> Family:
        """Return the family as a checkpoint has it, by its model_index.json."""
        return self

    def control_misfit(
        self,
        class_name: str,
        config: Mapping[str, Any],
        denoiser_config: Mapping[str, Any],
        pixels_per_latent: int,
        model: str | None = None,
    ) -> str | None:
        """Return why a ControlNet of this class and config cannot go with a denoiser, that of `model`; None if it can.

        What only one of the configs says is no reason: files of older versions say less.
        """
        known = self.adapters.control_keys
        if not known:
            return f"cannot be used: no ControlNets are served with {self.class_name}"
        if class_name not in known:
            taker = f"{model!r} ({self.class_name})" if model else self.class_name
            return f"is a {class_name}, and {taker} takes a {' or '.join(known)}"
        for key in known[class_name]:
            own, expected = (_plain(one.get(key)) for one in (config, denoiser_config))
            if own != expected and key in config and key in denoiser_config:
                return (
                    f"has {key} {own}, and {repr(model) if model else 'the model'} {expected}: it is of another family"
                )
        return self.adapters.control_refusal(class_name, config, denoiser_config, pixels_per_latent)


def _plain(value: Any) -> Any:
    """Return a config's value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def task_of(*, has_image: bool, has_mask: bool) -> Task:
    """Return the task of a request by the images that it brings."""
    if has_mask:
        return "inpainting"
    return "image-to-image" if has_image else "text-to-image"


def sum_residuals(
    rows: Rows, run: Callable[[ControlRows], Sequence[Sequence[torch.Tensor] | None]]
) -> list[list[torch.Tensor]] | None:
    """Return the residuals of all ControlNets, added up in their order; None without one.

    `run` gives those of one, as lists of one or more kinds; None is an empty list.
    """
    total: list[list[torch.Tensor]] = []
    for control in rows.controls:
        own = [control.scaled(kind) for kind in run(control)]
        if not total:
            total = own
            continue
        total = [
            [a + b for a, b in zip(sums, kind, strict=False)] if sums and kind else sums or kind
            for sums, kind in zip(total, own, strict=True)
        ]
    return total or None
