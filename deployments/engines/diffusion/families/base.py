"""The contract of a family: all that is specific to one pipeline class of diffusers, beside the loop over steps.

`Family`, the last class here, is made of rules, a class for each subject. Their defaults are those of most
pipelines: classifier-free guidance by `guidance_scale`, latents as images, noise scaled by the solver, text that is
truncated at the tokenizer's own length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol

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
_PIXELS_PER_LATENT: Final = 8  # of stock's VAEs, unless the pipeline's configs have it
NO_SKIPS: Final[Mapping[Role, int]] = {}
NoNegative = Literal["unguided", "empty text", "zeros"]


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """The defaults of the stock pipeline's `__call__` (diffusers 0.42) without the size, see `Defaults.sides`.

    `max_sequence_length` None leaves it to `Texts.encoders`. `true_cfg_scale` is for families that have
    one.
    """

    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int | None = None
    true_cfg_scale: float = 1.0


Task = Literal["text-to-image", "image-to-image", "inpainting"]


@dataclass(frozen=True, slots=True)
class EditDefaults:
    """The defaults of the stock image-to-image pipeline's `__call__`."""

    strength: float
    guidance_scale: float
    num_inference_steps: int


class ImageSize(NamedTuple):
    """Height and width of an image in pixels, and of its latents; and those of its reference images."""

    height: int
    width: int
    latent_height: int
    latent_width: int
    references: tuple[ImageSize, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """One text condition of a request, (1, L, D) and perhaps (1, P), on the denoiser's device and in its dtype.

    `mask` (1, L) is False where the prompt is padding, after its `num_tokens`; both are None without padding.
    """

    prompt: torch.Tensor
    pooled: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ControlRows:
    """One ControlNet's share of a forward: its image inputs, (B, …) each, scales (B,), and the texts that it
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
        """Return the images of a network without other image inputs."""
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
        """Return the net's inputs and its scales."""
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
    False where a prompt is padding, and None without any padding; only a family whose texts have `masks` gets one.
    `adapters` are those of rows that have any, `modulation` outputs computed ahead (`Modulation.rows_of`). `sizes` has
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
        spans: tuple[AdaptedSpan | PromptedSpan, ...] = (*self.adapters, *self.image_prompts)
        return [one for span in spans for one in span.tensors]

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
    """The defaults of options that a request leaves open: `usual`, or those of its task in `edits`.

    `sample_size` is the default side of an image in latents. With `reads_sample_size` stock
    takes it from the denoiser's config.
    """

    usual: ImageDefaults
    edits: Mapping[Task, EditDefaults] = field(default_factory=dict)
    sample_size: int = 128
    reads_sample_size: bool = False

    def of(self, variant: Mapping[str, bool | int]) -> ImageDefaults:
        """Return the defaults of a checkpoint by its configs (`weights/formats/pipeline_parts.py`)."""
        return self.usual

    def sides(self, variant: Mapping[str, bool | int]) -> tuple[int, int]:
        """Return the default width and height of a checkpoint's images in pixels, by its configs."""
        factor = int(variant.get("pixels_per_latent", _PIXELS_PER_LATENT))
        own_sizes = variant if self.reads_sample_size else {}
        width, height = (
            min(int(own_sizes.get(name, self.sample_size)) * factor, MAX_SIDE_PX)
            for name in ("sample_width", "sample_height")
        )
        return width, height


class Texts(ABC):
    """The way from prompts to conditioning: the encoders that read them, and the join of their outputs."""

    masks: ClassVar[bool] = False  # `predict_noise` applies a mask, so that texts may be padded
    counts_tokens: ClassVar[bool] = False  # `predict_noise` leaves out padding, by `Rows.lengths`
    takes_clip_skip: ClassVar[bool] = False  # its CLIPs may give the vectors of earlier layers
    refused_rules: ClassVar[Mapping[str, str]] = {}  # values of `text_padding` and `long_text`, and why not

    @abstractmethod
    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        """Return the encoders that every text goes to, and those of `lacking` that stock has a substitute for.

        `lacking` are the encoders that the pipeline lacks. Raises EngineError for a length that one cannot have.
        """

    def stand_in(self, item: EncodeItem, denoiser_config: Mapping[str, Any], like: torch.Tensor) -> Encoded | None:
        """Return stock's substitute for the output of a missing encoder, on the device and in the dtype of `like`.

        None for a required encoder.
        """
        return None

    @abstractmethod
    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        """Return one text's conditioning from its encodings by component: "prompt_embeds" (1, L, D) and, for a family
        that has pooled text, "pooled_prompt_embeds" (1, P). Raises EngineError for outputs that are missing.
        """

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        """Return the stock pipeline's negative conditioning for a request without a negative prompt."""
        return "empty text"

    def zeroed(self, conditioning: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a text's conditioning without what its encoders said."""
        return {name: one.new_zeros(one.shape) for name, one in conditioning.items()}

    def padded_length(self, num_tokens: int) -> int:
        """Return the length of a text in a forward: a power of two that depends on its own length alone.

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
        """Plan the texts to encode. Nothing runs, so a plan can be made and cached anywhere.

        Items of `lacking_encoders` are not encoded: they have a `stand_in`.

        A negative prompt of None is replaced by `no_negative`; an empty *string* is a text and is encoded.
        `max_sequence_length` is for families whose prompt has a length of its own (Flux's T5); others ignore it.
        `text_padding` "trimmed" gives the rows of the prompt's own tokens, computed under a mask. `long_text` is for
        texts beyond the limit. `clip_skips` has by role the number of CLIP layers to leave out, for families that
        take it. Raises EngineError for options that the pipeline cannot take.
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
        """Return the tensors for `DenoisePipeline.start`: those of `join`, and the same with
        `negative_` in front if guidance has a negative condition.

        `outputs` maps the plan's items to outputs of `TextEncoder.encode`. `use_negative` False saves the zeros of a
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

    rule: ClassVar[str] = "guidance_scale > 1"  # for messages: the condition of guidance

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        """Return whether the stock pipeline runs classifier-free guidance for this request."""
        return request.guidance_scale > 1

    def scale(self, request: DiffusionRequest) -> float:
        """Return the scale of classifier-free guidance."""
        return request.guidance_scale

    def combine(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the guided prediction made of those for a negative prompt and a prompt."""
        return negative + scale * (prompt - negative)


class PlainGuidance(Guidance):
    """Guidance of a request with a sampler: by its `cfg`, as ComfyUI has it for any model."""

    rule: ClassVar[str] = "a sampler whose cfg is not 1"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.sampler is not None and request.sampler.cfg != 1

    def scale(self, request: DiffusionRequest) -> float:
        return 1.0 if request.sampler is None else request.sampler.cfg


class Latents(ABC):
    """The forms of latents: for the VAE, for the denoiser, before the first step, and in requests and results."""

    upcasts_vae: ClassVar[bool] = False  # stock encodes images in float32 if the VAE's config has `force_upcast`
    are_float32: ClassVar[bool] = False  # stock draws and steps in float32 whatever the denoiser's dtype
    patch: ClassVar[int] = 1  # latents on a side of what requests and results have: more are patches, normalized

    @abstractmethod
    def size_multiple(self, pixels_per_latent: int) -> int:
        """Return the pixels that width and height must be multiples of."""

    def multiple_of(self, variant: Mapping[str, bool | int]) -> int:
        """Return the `size_multiple` of a checkpoint by its configs."""
        return self.size_multiple(int(variant.get("pixels_per_latent", _PIXELS_PER_LATENT)))

    def channels(self, denoiser_config: Mapping[str, Any]) -> int:
        """Return the channels of a latent image."""
        return int(denoiser_config["in_channels"])

    def noise_shape(self, denoiser_config: Mapping[str, Any], size: ImageSize) -> tuple[int, int, int]:
        """Return the shape (C, h, w) in which stock draws the noise of an image."""
        return self.channels(denoiser_config), size.latent_height, size.latent_width

    def first(self, noise_BCHW: torch.Tensor, solver: Any) -> torch.Tensor:
        """Return the latent images before the first step of a request without an image, (B, C, h, w)."""
        return noise_BCHW * solver.init_noise_sigma

    def pack(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return latent images in the denoiser's form, (B, …)."""
        return images_BCHW

    def unpack(self, latents: torch.Tensor, size: ImageSize) -> torch.Tensor:
        """Undo `pack`: return latent images (B, C, h, w)."""
        return latents

    def scale(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latents of the VAE at the scale at which they are denoised."""
        return vae_latents * vae.config["scaling_factor"]

    def unscale(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latent images at the scale of the VAE."""
        return latents_BCHW / vae.config["scaling_factor"]

    def taken_in(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latents of a request, the VAE's or patches, at the scale at which they are denoised."""
        return self.scale(latents_BCHW, vae) if self.patch == 1 else latents_BCHW

    def handed_out(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latent images as results have them: undo `taken_in`."""
        return self.unscale(latents_BCHW, vae) if self.patch == 1 else latents_BCHW

    def pixels_per_cell(self, variant: Mapping[str, bool | int]) -> int:
        """Return the pixels of a side of an image for each place in a request's latents."""
        return self.patch * int(variant.get("pixels_per_latent", _PIXELS_PER_LATENT))

    def batch_shape(self, size: ImageSize) -> Hashable:
        """Return the key of images that share a forward of the denoiser at equal cost each."""
        return size.height, size.width


class Steps:
    """The schedule of a request, and the step at which one with an image begins."""

    refines_only: ClassVar[bool] = False  # it needs an image to begin at
    inpaints_from_noise: ClassVar[bool] = True  # at strength 1 stock begins at noise alone, scaled as without an image
    attends_to_image: ClassVar[bool] = False  # an image to begin at is read beside the latents, and no noise hides it

    def solver_changes(self, request: DiffusionRequest, solver_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes that stock's pipeline for the request makes to its solver's config."""
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


class EncodeImages(Protocol):
    """Makes latents of images from -1, at the scale at which they are denoised; without the VAE's shift, if asked, and
    the most likely ones where none are to be drawn.
    """

    def __call__(self, images_B3HW: torch.Tensor, /, *, shifts: bool = True, draws: bool = True) -> torch.Tensor: ...


class Adapters:
    """The additions that the denoiser takes: LoRAs, ControlNets, images as prompts."""

    # The text encoders that a LoRA may change, each with its names in trainers and UIs.
    lora_encoders: ClassVar[Mapping[str, Sequence[str]]] = {}
    repeats_rows: ClassVar[bool] = False  # layers with several vectors of each row get all rows repeatedly
    takes_image_prompts: ClassVar[bool] = False  # its cross-attentions may read images beside the text
    # The classes of its ControlNets, each with the config keys that must equal the denoiser's.
    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {}
    controls_read_prompt: ClassVar[bool] = False  # also beside a negative prompt
    draws_controls_apart: ClassVar[bool] = False  # not from the stream that the first noise comes of
    encodes_controls: ClassVar[bool] = False  # `control_inputs` may encode, so that the VAE is needed

    def control_inputs(self, net: Any, pixels_B3HW: torch.Tensor, encode: EncodeImages) -> tuple[torch.Tensor, ...]:
        """Return images from 0 to 1 as a ControlNet reads them; `encode` makes latents of images from -1.

        Raises EngineError for a size that the ControlNet cannot read.
        """
        return (pixels_B3HW,)

    def control_refusal(
        self, class_name: str, config: Mapping[str, Any], denoiser_config: Mapping[str, Any], pixels_per_latent: int
    ) -> str | None:
        """Return why `predict_noise` cannot call a ControlNet of this class and config, or None."""
        return None

    def num_modes(self, net: Any) -> int:
        """Return the number of modes of a union of ControlNets, of which a request names one; 0 for a single net."""
        return 0

    def why_not_together(self, nets: Sequence[Any]) -> str | None:
        """Return why the ControlNets of one request cannot go together, or None."""
        return None


class References:
    """Images read beside the latents, uint8 (height, width, 3). A family with `most` above 0 needs at least one.

    A family that `takes_latents` also reads those of a request with a sampler, which has them or not.
    """

    most: ClassVar[int] = 0
    takes_latents: ClassVar[bool] = False

    def sides(self, references: Sequence[npt.NDArray[np.uint8]], multiple: int) -> tuple[int, int]:
        """Return the default width and height of an image made from references.

        Raises EngineError for references that it cannot read.
        """
        raise NotImplementedError

    def seen(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a reference in the size for the prompt's encoder. Raises EngineError."""
        raise NotImplementedError

    def encoded(self, pixels: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
        """Return a reference in the size for the VAE. Raises EngineError."""
        raise NotImplementedError


class Network(ABC):
    """The call of the denoiser. It may be modulated by embeddings of time and text, which are known beforehand."""

    keeps_precision: ClassVar[Sequence[str]] = ()  # patterns of matrices that stay unquantized in every float8 form
    embedding_parts: ClassVar[Sequence[str]] = ()  # the parts run by `embed_times`, which modulate the denoiser
    modulated_layers: ClassVar[str] = ""  # a pattern of the layers whose only input is the SiLU of their sum
    text_layers: ClassVar[str] = ""  # a pattern of such a denoiser's layers whose only input is the prompt

    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        """Return why `predict_noise` cannot call a denoiser of this config, or None."""
        return None

    def num_extra_channels(self, config: Mapping[str, Any]) -> int:
        """Return the number of channels that the denoiser reads beside the latents': 5 for inpainting UNets."""
        return 0

    @abstractmethod
    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        """Return the (D, P) of the conditioning that the denoiser takes; P is None where it takes no pooled text."""

    def is_modulated(self, denoiser: Any) -> bool:
        """Return whether `embedding_parts`, `modulated_layers` and `text_layers` are true of this variant."""
        return bool(self.embedding_parts)

    def changes_times(self, control: Any) -> bool:
        """Return whether a ControlNet changes what `embed_times` returns."""
        return False

    def embed_times(self, denoiser: Any, rows: Rows, size: ImageSize) -> Sequence[torch.Tensor]:
        """Return the output of each of `embedding_parts` for rows, as within `predict_noise`: (B, D) each.

        Latents and prompts of the rows have no elements.
        """
        raise NotImplementedError

    @abstractmethod
    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        """Run the denoiser, and return its prediction in the shape of `rows.latents`."""


class LatentReferences(References):
    """Latents of images, which only a sampler's request has."""

    takes_latents: ClassVar[bool] = True


_GUIDANCE: Final = Guidance()
_PLAIN_GUIDANCE: Final = PlainGuidance()
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

    def guidance_of(self, request: DiffusionRequest) -> Guidance:
        """Return the guidance of a request: a sampler has its own."""
        return self.guidance if request.sampler is None else _PLAIN_GUIDANCE

    def variant(self, model_index: Mapping[str, Any]) -> Family:
        """Return the family's variant for a checkpoint, by its model_index.json."""
        return self

    def control_misfit(
        self,
        class_name: str,
        config: Mapping[str, Any],
        denoiser_config: Mapping[str, Any],
        pixels_per_latent: int,
        model: str | None = None,
    ) -> str | None:
        """Return why a ControlNet of this class and config cannot go with the denoiser of `model`; None if it can.

        A key that only one of the configs has is no reason: files of older versions have fewer keys.
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
    """Return a config's value in JSON's types."""
    return list(value) if isinstance(value, tuple) else value


def task_of(*, has_image: bool, has_mask: bool) -> Task:
    """Return the task of a request by its images."""
    if has_mask:
        return "inpainting"
    return "image-to-image" if has_image else "text-to-image"


def sum_residuals(
    rows: Rows, run: Callable[[ControlRows], Sequence[Sequence[torch.Tensor] | None]]
) -> list[list[torch.Tensor]] | None:
    """Return the residuals of all ControlNets, added up in their order; None without one.

    `run` returns those of one ControlNet, as lists of one or more kinds; None is an empty list.
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
