"""The border of an engine: the `Engine` protocol, and the records that cross it. Free of Ray, of HTTP and of torch.

An engine sees these records and tensors; it never sees a handle, a socket or a config file. `LLMEngine` and
`DiffusionEngine` are engines; `deployments/replicas/step_loop.py` serves any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from configs.options import Denoising, Sampler, Sampling

if TYPE_CHECKING:  # the command line and the ingress have no torch
    import torch

    from deployments.engines.records.prompt_images import PromptImages
    from deployments.engines.records.sounds import Sound
    from weights.operations.adapters import LoraAdapter


InputType = Literal["query", "document"]  # of a text to embed: what asks, and what may answer
DiffusionKind = Literal["image", "latent", "latent_and_clean", "encoded", "decoded"]  # what a diffusion request gives
Pooling = Literal["mean", "last"]  # how a language model's hidden states become an embedding


class ClipLayer(NamedTuple):
    """The layer whose token vectors a CLIP gives: so many before its last one, and whether its final norm follows."""

    num_skipped: int
    is_normed: bool

    def before(self, clip_skip: int) -> ClipLayer:
        """Return the layer that lies `clip_skip` layers before this one."""
        return self._replace(num_skipped=self.num_skipped + clip_skip)


PENULTIMATE: Final = ClipLayer(1, is_normed=False)  # what SDXL reads
LAST: Final = ClipLayer(0, is_normed=True)  # what Stable Diffusion 1 reads


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The form in which a language model that conditions images reads a prompt, and what is taken of it.

    `layers` index its hidden states, of which there is one more than it has layers; several stand side by side in each
    token's vector. The prompt is put into `template`, whose one {} it replaces, or, without one, into the first message
    of the tokenizer's chat template, which gets `variables`. With `system` a message of the system comes first, and
    messages consist of parts, as those that may have images do; `removed` is taken out of prompts. The first
    `num_dropped` tokens give nothing. With `keeps_padding` tokens that pad the text to its limit give vectors too,
    which no token has attended to. `image` stands before the prompt for each image that is read with it: {number} is
    which one, from 1 on, and {image} what the model's processor puts in its place.
    """

    layers: tuple[int, ...]
    template: str = ""
    variables: tuple[tuple[str, bool], ...] = ()
    num_dropped: int = 0
    keeps_padding: bool = False
    system: str = ""
    removed: str = ""
    image: str = ""


class EngineError(Exception):
    """A request that the engine cannot run; the message is meant for the person who sent it."""


class PromptTooLong(EngineError):
    """A prompt has more tokens than the model reads at once."""


class ComputationFailed(Exception):
    """The model broke down on one request, which was in order: numbers that are not finite, say. Says where."""


class StepAborted(Exception):
    """Nobody wants the result of the step that ran. What it has stored so far counts for nothing."""


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise EngineError for a value that the Literal type `choices` does not have."""
    if value not in get_args(choices):
        raise EngineError(f"{name} {value!r}: expected one of {', '.join(get_args(choices))}")


class EngineRequest(Protocol):
    """A request to an engine."""

    @property
    def request_id(self) -> str:
        """Return the name that outputs and failures of this request have; unique among those under way."""


class EngineOutput(Protocol):
    """The output of one step for one request."""

    @property
    def request_id(self) -> str:
        """Return the request that this is for."""

    @property
    def is_last(self) -> bool:
        """Return whether the request has ended with this, and left the engine."""


RequestT = TypeVar("RequestT", bound=EngineRequest, contravariant=True)
OutputT = TypeVar("OutputT", bound=EngineOutput, covariant=True)


class SharedDevice(Protocol):
    """A device that several engines step on in turn, as one of them sees it."""

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody waits for the end of the step that runs. May be asked from any thread."""

    @property
    def others_step_s(self) -> float | None:
        """Return the seconds of the shortest step of another engine with work; None where no such one is known."""


class Engine(Protocol[RequestT, OutputT]):
    """A model that moves many requests on together, step by step. Requests join and leave between steps.

    HAZARD: an engine has no locks. `add_request`, `abort` and `step` are called by one thread at a time, the one that
    may touch the device; `has_work` and `failures` may be read by any while none of the three runs. `request_cancel`
    alone may be called by any thread at any time.

    What a request gets depends on the requests that share its steps by rounding at most (the engines say how far), and
    one that fails takes no other with it.
    """

    @property
    def has_work(self) -> bool:
        """Return whether a request is under way, so that `step` has something to do."""

    @property
    def failures(self) -> Mapping[str, Exception]:
        """Return the requests that the last `step` gave up, by id, and why. They have left, without a last output.

        ComputationFailed is the model's; an error of the device's memory, or another, is passed on as it came.
        """

    def add_request(self, request: RequestT) -> None:
        """Take a request in; it joins the next step.

        Raises:
            EngineError: the request cannot run, or its id is that of one under way. Nothing of it stays.
        """

    def request_cancel(self, request_id: str) -> None:
        """Tell the engine that nobody wants a request any more, so that a step that runs may end early.

        `abort` follows as soon as it has.
        """

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it held at once; no output of it follows. Unknown ids are ignored."""

    def yield_device(self, device: SharedDevice) -> None:
        """Look, before each step, whether others want the device, so that it need not hold them up for long."""

    def step(self) -> Sequence[OutputT]:
        """Move requests on, and return what they got: nothing for those that were in no batch or have nothing to tell.

        Raises only what is no single request's fault; the caller then aborts them all.
        """


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One LoRA of a request: its name and its strength; `text_scale` is that in text encoders, if another."""

    name: str
    scale: float = 1.0
    text_scale: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ControlUse:
    """One ControlNet of a request, and the image that it reads: uint8 (height, width, 3), of the request's size.

    Its residuals are multiplied by `scale`, and added in the steps between the parts `start` and `end` of all steps.
    `mode` is the one of a union that the image is for.
    """

    name: str
    image: npt.NDArray[np.uint8]
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePromptUse:
    """One IP-Adapter of a request, the image that it reads, uint8 (height, width, 3) of any size, and its strength."""

    name: str
    image: npt.NDArray[np.uint8]
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class DiffusionRequest(Denoising):
    """The plain half of a diffusion request: all but tensors.

    `guidance_scale` means what the stock pipeline of the family means by it: classifier-free guidance for
    SDXL, the embedded guidance for guidance-distilled Flux. `true_cfg_scale` > 1 with a negative prompt is
    classifier-free guidance for Flux. `seed` gives the latents of
    `torch.Generator("cpu").manual_seed(seed)`, for all `num_images` from one generator, as stock does.

    `init_image`, uint8 (height, width, 3), makes it image-to-image: `strength` (0 to 1] is the part of the steps that
    run. `mask_image`, uint8 (height, width), makes that inpainting: what is 128 or more is painted anew. `control` are
    its ControlNets, `image_prompts` its IP-Adapters. `scheduler` is a class of diffusers, in place of the pipeline's
    own, and `scheduler_options` stand in place of those of its config (`use_karras_sigmas`, say). `sigmas` or
    `timesteps` are the schedule, as in stock: `num_inference_steps` of them. `deterministic`: the same bits whatever
    else runs. `merges_adapter`: its one adapter is merged into private weights, which is equal but for rounding, and
    faster. `references`, uint8 (height, width, 3), are images of any size that a family reads beside its latents.

    With a `sampler`, `latents`, float32 (num_images, C, h, w) in the VAE's space, are what it begins at (None: zeros),
    and `noise_mask`, float32 (num_images or 1, any h, any w), is 1 where it paints. `reference_latents`, float32
    (1, C, any h, any w), are read beside them, by a family whose references take latents. `output` "latent" gives such
    latents in place of images, "latent_and_clean" also what the last step found without noise, behind them. "encoded"
    and "decoded" are the VAE's work alone: latents of `pixels`, float32 (num_images, height, width, 3) from 0 to 1, and
    pixels of `latents`.
    """

    request_id: str
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    num_images: int = 1
    adapters: tuple[AdapterUse, ...] = ()
    init_image: npt.NDArray[np.uint8] | None = None
    mask_image: npt.NDArray[np.uint8] | None = None
    control: tuple[ControlUse, ...] = ()
    image_prompts: tuple[ImagePromptUse, ...] = ()
    scheduler_options: Mapping[str, bool | float | str] = field(default_factory=dict)
    merges_adapter: bool = False
    references: tuple[npt.NDArray[np.uint8], ...] = ()
    latents: npt.NDArray[np.float32] | None = None
    noise_mask: npt.NDArray[np.float32] | None = None
    reference_latents: tuple[npt.NDArray[np.float32], ...] = ()
    pixels: npt.NDArray[np.float32] | None = None
    output: DiffusionKind = "image"

    @property
    def ends_with_latents(self) -> bool:
        """Return whether its steps give latents in place of images."""
        return self.output in ("latent", "latent_and_clean")


@dataclass(frozen=True, slots=True, eq=False)
class ConditionedRequest:
    """A diffusion request with its text conditioning (see `Family.texts.assemble`), ready for the engine.

    `adapters` has what the request names: a LoraAdapter for each of its adapters, a module for each of its ControlNets.
    Requests share a batch when they use the same objects: another version of an adapter is another object.

    Outputs before the last one are sent for what was asked: `reports_steps`, one at every step; `num_previews`, so many
    previews spread over the steps; `checkpoint_steps` and `checkpoint_interval_s`, a checkpoint every so many steps or
    seconds (0: none). `resume_from` is the checkpoint to go on from; `conditioning` is then what
    `checkpoints.conditioning_of` reads from it. A request that would otherwise not end within `timeout_s` goes before
    others, if that helps. `posteriors` are those of `DenoisePipeline.encode_inputs`, for a pipeline without its VAE.
    """

    request: DiffusionRequest
    conditioning: Mapping[str, torch.Tensor]
    adapters: Mapping[str, LoraAdapter | torch.nn.Module] = field(default_factory=dict)
    reports_steps: bool = False
    num_previews: int = 0
    checkpoint_steps: int = 0
    checkpoint_interval_s: float = 0.0
    resume_from: bytes | None = None
    timeout_s: float | None = None
    posteriors: tuple[torch.Tensor, ...] = ()

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True, slots=True, eq=False)
class BesideLatents:
    """Latents of an image that a model reads in channels beside its own: float32 (1, C, h, w) in the VAE's space.

    To fill in a part of the image, the model has a `mask` (1, height, width), 1 where it paints.
    """

    latents: npt.NDArray[np.float32]
    mask: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StockRequest:
    """A request to a stock pipeline of diffusers.

    `fields` are those that the request has, by the names of `__call__`'s parameters; what is not there is left to the
    class. `images` (uint8, (height, width, 3), or (height, width) of a mask; several of one name, or the frames of a
    video, are a tuple) and `audio` go to the parameters of their names, and so do the values of `extra`. `scheduler`
    and `scheduler_options` are those of a DiffusionRequest. `texts` are what its calls of `encode_prompt` return
    (`stock/texts.py`), None where the pipeline encodes its text itself. So many `num_previews` are spread over the
    steps, if the class can show any. `forward_bytes` are what methods of modules take of the device at most, by names
    as "vae.decode" (`stock/footprints.py`); one that is not there takes what there is. `loras` are those of its
    `adapters`, by name, and `prompters` the IP-Adapters of its `image_prompts`. A `sampler` is in place of the
    scheduler; its `noise_seed` is `seed`. From its step `second_from` on, the second of two denoisers runs; None leaves
    that to the model. `beside` are latents that the model reads in further channels. Of the `latents` (1, C, h, w) in
    the VAE's space a sampler keeps what is 0 in the `noise_mask` (1, any h, any w).
    """

    request_id: str
    seed: int
    prompt: str = ""
    num_images: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, npt.NDArray[np.uint8] | tuple[npt.NDArray[np.uint8], ...]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_options: Mapping[str, bool | float | str] = field(default_factory=dict)
    sampler: Sampler | None = None
    reports_steps: bool = False
    texts: Mapping[str, Mapping[str, torch.Tensor]] | None = None
    num_previews: int = 0
    audio: Mapping[str, Sound] = field(default_factory=dict)
    forward_bytes: Mapping[str, int] = field(default_factory=dict)
    adapters: tuple[AdapterUse, ...] = ()
    loras: Mapping[str, LoraAdapter] = field(default_factory=dict)
    image_prompts: tuple[ImagePromptUse, ...] = ()
    prompters: Mapping[str, Any] = field(default_factory=dict)
    second_from: int | None = None
    beside: BesideLatents | None = None
    latents: npt.NDArray[np.float32] | None = None
    noise_mask: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class DenoiseTimes:
    """Seconds that one request waited for its first step, denoised and decoded."""

    queue_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DiffusionOutput:
    """The progress of a request and, at its end, its images: uint8 (num_images, height, width, 3), or 4 with
    transparency.

    Those of a pipeline that makes video are its frames; one that makes audio ends with `samples`, float32 (channels,
    number), of which `sample_rate` are a second. A request for latents ends with them, on the host. A pipeline without
    its VAE ends with `latents` in the denoiser's form, for another one to decode or hand out.

    `preview` has the images that the step before expects, in the same form; it is number `preview_index` from 0 on.
    `checkpoint` is all that the request needs to go on after `step_index` steps, in any process, bit for bit. One that
    `is_moved` ends here: it goes on from its checkpoint elsewhere, or begins anew without one.
    """

    request_id: str
    step_index: int
    num_steps: int
    images: npt.NDArray[np.uint8] | None = None
    latents: torch.Tensor | None = None
    times: DenoiseTimes = DenoiseTimes()
    preview: npt.NDArray[np.uint8] | None = None
    preview_index: int | None = None
    checkpoint: bytes | None = None
    is_moved: bool = False
    samples: npt.NDArray[np.float32] | None = None
    sample_rate: int = 0

    @property
    def is_last(self) -> bool:
        made = (self.images, self.latents, self.samples)
        return self.is_moved or any(one is not None for one in made)


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """The parameters of sampling. `temperature` 0 is greedy; 0 of `top_k` and `min_p`, and 1 of `top_p` and `typical_p`
    switch those filters off, as 1 does the repetition penalty and 0 the other two.

    `seed` None draws a fresh one. `stop` strings and `stop_token_ids` end the text and are not part of it. `logit_bias`
    has (token id, addition) pairs. `num_logprobs` asks for the log probability of each token and of as many of the
    best ones; None for none at all.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log probability of a token, and (token id, log probability) of the best ones in its place.

    The first token of a prompt, which follows nothing, has None.
    """

    token_id: int
    logprob: float | None
    best: tuple[tuple[int, float], ...] = ()


class TokenConstraint(Protocol):
    """Says which tokens may come next in one text, and follows those that came."""

    @property
    def is_complete(self) -> bool:
        """Return whether nothing can follow."""

    @property
    def is_free(self) -> bool:
        """Return whether any token may come next, so that no mask is needed."""

    def fork(self) -> TokenConstraint:
        """Return the constraint of another text, which begins as this one stands."""

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, the lowest bit of `mask[0]` for token 0."""

    def advance(self, token_id: int) -> None:
        """Note that this token came. Raises ComputationFailed when nothing can follow it."""


@dataclass(frozen=True, slots=True)
class TextLora:
    """A LoRA of a text request and its strength. `key` is the identity of its weights, and decides on the order."""

    key: str
    adapter: LoraAdapter
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt as token ids, ready for the scheduler; `n` completions of it are asked for.

    Completion `i` of a seed is the same whatever `n` is. All of them keep to a fork of `constraint`. `scores_prompt`
    asks for the log probabilities of the prompt's own tokens, with as many of the best ones as those of the completion.
    With `pooling`, the prompt's embedding is asked for instead of a completion. Some of its tokens stand for `images`.
    Special tokens give no text, or only those of `hidden_token_ids` give none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    constraint: TokenConstraint | None = None
    loras: tuple[TextLora, ...] = ()
    scores_prompt: bool = False
    pooling: Pooling | None = None
    images: PromptImages | None = None
    hidden_token_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that one step added to completion `index` of one request.

    `text` may be empty (an unfinished UTF-8 sequence or the possible beginning of a stop string is held
    back). `finish_reason` is None while the completion runs, else "stop" or "length"; `stopped_by` is the stop string,
    or the token, of those that the request names. `num_others` completions of the request run beside this one.
    `num_cached_tokens` of the prompt were in the KV cache when the request came. The first delta of each completion has
    `prompt_logprobs`, one for each token of the prompt, where they were asked for. A request with `pooling` has one
    delta, with the `embedding`: float32 (hidden size,), of length 1.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str | None = None
    index: int = 0
    num_others: int = 0
    num_cached_tokens: int = 0
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: npt.NDArray[np.float32] | None = None
    stopped_by: str | int | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None and not self.num_others
