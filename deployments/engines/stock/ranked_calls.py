"""The calls of a stock pipeline's denoiser on several ranks, which share its tokens (`sequence`) or its rows (`cfg`).

The pipeline runs on rank 0, and the arguments of a call go to the others: tensors and plain values. A pipeline that
calls its denoiser once for each branch of guidance has the second call computed beside the first one: its arguments
are guessed by the steps before, and the result is taken only where they were right. What ranks cannot divide is
computed by rank 0 alone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from deployments.engines.costs.memory_limits import is_out_of_memory
from deployments.engines.diffusion.ranked_adapters import AdapterReader, AdapterWriter
from deployments.engines.diffusion.shared_sequence import SHARED_CLASSES, CannotShare, run_shared
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters
from deployments.engines.ranks.following import TO, RankChannel
from deployments.engines.ranks.group import Plan, RankGroup, RankLost, forms_of
from deployments.engines.ranks.outcomes import gather_results
from deployments.engines.ranks.packing import TENSOR, NotPlain, packed, unpacked

Forward = Callable[..., Any]
Shape = tuple[torch.Size, ...]  # of all tensors of a call
DENOISERS: Final = ("transformer", "transformer_2", "unet")
# Classes of diffusers whose calls give by rows what one rank gives (test_ranked_calls), and those that pipelines call
# once for each branch of guidance, whose calls leave nothing for the next. Others have not been tried.
FRAMED_CLASSES: Final = frozenset({"UNetMotionModel"})  # a row has a text for each of its frames
DIVIDED_CLASSES: Final = FRAMED_CLASSES | frozenset(
    {
        *("AnyFlowTransformer3DModel", "AuraFlowTransformer2DModel"),
        *("BriaFiboTransformer2DModel", "BriaTransformer2DModel"),
        *("CogVideoXTransformer3DModel", "CogView3PlusTransformer2DModel", "DiTTransformer2DModel"),
        *("DreamLiteUNetModel", "ErnieImageTransformer2DModel", "HunyuanDiT2DModel", "I2VGenXLUNet"),
        "JoyImageEditPlusTransformer3DModel",
        *("Kandinsky3UNet", "LTX2VideoTransformer3DModel", "LTXVideoTransformer3DModel"),
        *("LatteTransformer3DModel", "LuminaNextDiT2DModel", "MochiTransformer3DModel", "PRXTransformer2DModel"),
        *("PixArtTransformer2DModel", "SD3Transformer2DModel", "SanaTransformer2DModel"),
        *("SanaVideoTransformer3DModel", "StableAudioDiTModel", "UNet2DConditionModel", "UNet3DConditionModel"),
        *("UNetControlNetXSModel", "UNetSpatioTemporalConditionModel"),
    }
)
REPEATED_CLASSES: Final = frozenset(
    {
        *("ChromaTransformer2DModel", "ChronoEditTransformer3DModel", "CogView4Transformer2DModel"),
        *("Flux2Transformer2DModel", "HeliosTransformer3DModel", "HunyuanVideo15Transformer3DModel"),
        *("HunyuanVideoFramepackTransformer3DModel", "HunyuanVideoTransformer3DModel"),
        *("JoyImageEditTransformer3DModel", "Kandinsky5Transformer3DModel", "Krea2Transformer2DModel"),
        *("LongCatAudioDiTTransformer", "Lumina2Transformer2DModel", "MotifVideoTransformer3DModel"),
        *("NucleusMoEImageTransformer2DModel", "OvisImageTransformer2DModel", "QwenImageTransformer2DModel"),
        *("SkyReelsV2Transformer3DModel", "WanAnimateTransformer3DModel"),
        *("WanTransformer3DModel", "WanVACETransformer3DModel"),
    }
)
# With one of these beside it, a pipeline makes a denoiser of its own of a plain UNet: that is rank 0's alone.
REMAKING_CLASSES: Final = frozenset({"ControlNetXSAdapter", "MotionAdapter"})
_AXIS: Final = "cfg"
_TIMESTEP: Final = "timestep"
_MAX_MISSES: Final = 3  # wrong guesses: no more follow

logger = logging.getLogger(__name__)


def computes_calls(class_name: str, cfg: int, sequence: int) -> bool:
    """Return whether ranks of these numbers have a part in the calls of a denoiser of that class."""
    is_guided = class_name in DIVIDED_CLASSES or class_name in REPEATED_CLASSES
    return (cfg > 1 and is_guided) or (sequence > 1 and class_name in SHARED_CLASSES)


class Call(NamedTuple):
    """The arguments of a call by name: plain values, with the places of `tensors` among them."""

    form: Mapping[str, Any]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module, inputs: Sequence[Any], options: Mapping[str, Any]) -> Call:
        """Return the call of a module with these arguments. Raises NotPlain."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(names, inputs, strict=False)), **options}
        tensors, order = list[torch.Tensor](), [*(name for name in names if name in given), *given]
        return cls({name: packed(given[name], tensors) for name in dict.fromkeys(order)}, tuple(tensors))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {name: unpacked(value, self.tensors) for name, value in self.form.items()}

    @property
    def num_rows(self) -> int:
        """Return the rows of its first argument, which is what is denoised; 0 where that is no tensor."""
        is_tensor = next(iter(self.form.values()), None) == {TENSOR: 0} and self.tensors[0].dim() > 0
        return len(self.tensors[0]) if is_tensor else 0

    def rows(self, start: int, stop: int, *, has_frames: bool = False) -> Call:
        """Return the call with these rows of all tensors that have as many as the first, or several for each row."""
        count, cut = self.num_rows, list[torch.Tensor]()
        for one in self.tensors:
            each, rest = divmod(len(one), count) if one.dim() else (0, 0)
            is_by_row = not rest and (each == 1 or (each > 1 and has_frames))
            cut.append(one[start * each : stop * each] if is_by_row else one)
        return self._replace(tensors=tuple(cut))

    def is_at_step_of(self, other: Call) -> bool:
        """Return whether both are alike but for their tensors, and have one timestep."""
        place = self.form.get(_TIMESTEP)
        if place is None or self.form != other.form:
            return False
        if not isinstance(place, dict):
            return True
        return _is_equal(*(call.tensors[place[TENSOR]] for call in (self, other)))

    def equals(self, other: Call) -> bool:
        """Return whether both have the same arguments."""
        return self.form == other.form and all(map(_is_equal, self.tensors, other.tensors))

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Return the tokens of the text and of what is denoised; None where the call does not have them as tokens."""
        found = [self.form.get(name) for name in ("encoder_hidden_states", "hidden_states")]
        tokens = [self.tensors[one[TENSOR]] for one in found if isinstance(one, dict) and TENSOR in one]
        is_of_tokens = len(tokens) == 2 and all(one.dim() == 3 for one in tokens)
        return (tokens[0].shape[1], tokens[1].shape[1]) if is_of_tokens else None

    @property
    def shape(self) -> Shape:
        """Return the shapes of its tensors."""
        return tuple(one.shape for one in self.tensors)


@dataclass(slots=True)
class NextCalls:
    """Guesses the second call of a step from the first: where the last step's calls were equal, it has the same."""

    _last: Call | None = None
    _others: tuple[torch.Tensor | None, ...] | None = None  # by place, None for what both calls of a step have
    _misses: int = 0

    def guess(self, call: Call) -> Call | None:
        """Return the call that will follow this one at its step."""
        if self._others is None or len(self._others) != len(call.tensors) or self._misses >= _MAX_MISSES:
            return None
        pairs = zip(self._others, call.tensors, strict=True)
        # Copies: a pipeline may write into its tensors before it makes the call.
        return call._replace(tensors=tuple(one.clone() if other is None else other for other, one in pairs))

    def note(self, call: Call) -> None:
        """Learn from a call that was not guessed."""
        last, self._last = self._last, call
        if last is not None and call.is_at_step_of(last):
            pairs = zip(last.tensors, call.tensors, strict=True)
            self._others = tuple(None if _is_equal(first, second) else second.clone() for first, second in pairs)
            self._last = None

    def note_miss(self) -> None:
        """Forget the calls of the last step: a guess by them was wrong."""
        self._others, self._misses = None, self._misses + 1


class LeadingCalls:
    """The calls of one pipeline's denoiser, on rank 0: its own `forward`, to which calls of it within `run` come.

    There the adapters of `spans` are in place, on all rows; the other ranks put in those that change this denoiser.
    """

    def __init__(self, ranks: RankChannel, module: Any, spans: Sequence[AdaptedSpan] = ()) -> None:
        self._ranks, self._module = ranks, module
        uses, layers = [use for span in spans for use in span.uses if use[1]], {*module.modules()}
        self._adapters = [(pairs, strength) for pairs, strength in uses if next(iter(pairs)) in layers]
        self._writer = AdapterWriter(ranks, module)
        self._forward: Forward = module.forward
        self._processors = _processors_of(module)
        self._guesses = NextCalls()
        self._ahead: tuple[Call, torch.Tensor] | None = None  # a guessed call, and its results
        self._unshared: set[Shape] = set()  # shapes whose tokens ranks cannot divide
        self._as_asked: Callable[[torch.Tensor], Any]  # the last answer's form

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Return `forward(*inputs, **options)`, of which ranks compute a part each.

        Raises the forward's error, or another rank's; RankLost when the group has ended.
        """
        ahead, self._ahead = self._ahead, None
        call = self._call_of(inputs, options)
        if call is None:
            return self._forward(*inputs, **options)
        if ahead is not None and ahead[0].equals(call):
            return self._as_asked(ahead[1])
        if ahead is not None:
            self._guesses.note_miss()
        group, kind = self._ranks.group, type(self._module).__name__
        parts, guess = [call], None
        if group.size(_AXIS) > 1 and kind in DIVIDED_CLASSES and call.num_rows > 1:
            middle, has_frames = call.num_rows // 2, kind in FRAMED_CLASSES
            ends = (0, middle), (middle, call.num_rows)
            parts = [call.rows(*part, has_frames=has_frames) for part in ends]
        elif group.size(_AXIS) > 1 and kind in REPEATED_CLASSES:
            guess = self._guesses.guess(call)
            parts += [] if guess is None else [guess]
            if guess is None:
                self._guesses.note(call)
        shares = group.size("sequence") > 1 and kind in SHARED_CLASSES and call.shape not in self._unshared
        if len(parts) == 1 and not shares:
            return self._forward(*inputs, **options)
        found = self._compute(call.shape, parts, shares=shares)
        if guess is None:
            return self._as_asked(torch.cat(found))
        self._ahead = guess, found[1]
        return self._as_asked(found[0])

    def _call_of(self, inputs: Sequence[Any], options: Mapping[str, Any]) -> Call | None:
        """Return a call that other ranks can compute; None for one that they cannot.

        Where a pipeline has put other processors into the module, the other ranks have the old ones.
        """
        if _processors_of(self._module) != self._processors:
            return None
        try:
            call = Call.of(self._module, inputs, options)
        except NotPlain:
            return None
        is_cast = any(torch.is_autocast_enabled(one.device.type) for one in call.tensors)
        return None if is_cast or not call.tensors else call

    def _compute(self, shape: Shape, parts: Sequence[Call], *, shares: bool) -> list[torch.Tensor]:
        """Return the results of the parts of a call of that shape; each is computed by one rank of `cfg`."""
        tensors = list({id(one): one for part in parts for one in part.tensors}.values())
        places = {id(one): place for place, one in enumerate(tensors)}
        said = [[part.form, [places[id(one)] for one in part.tensors]] for part in parts]
        adapters, (uses,) = self._writer.plan([self._adapters], tensors)
        plan = {"forms": forms_of(tensors), "parts": said, "adapters": adapters, "uses": uses, "shares": shares}
        self._ranks.say({**plan, "threads": torch.get_num_threads()})
        self._ranks.group.spread(tensors)
        own = _Share(self._ranks, self._module, parts)
        found = own.results(self._own_call, shares=shares)
        if shares and not own.is_shared:
            self._unshared.add(shape)
        return found

    def _own_call(self, **options: Any) -> Any:
        found = self._module(**options)  # not its `forward` alone: tokens are cut by hooks
        names = None if isinstance(found, tuple) else tuple(found)
        self._as_asked = partial(_as_asked, type(found), names, [one.shape[1:] for one in _outputs_of(found)])
        return found


class CallsFollower:
    """The calls of a denoiser on another rank than 0. Call it with each plan of its channel."""

    def __init__(self, group: RankGroup, module: Any) -> None:
        self._group, self._module = group, module
        self.adapters = AdapterReader(module)

    def __call__(self, plan: Plan) -> None:
        """Compute this rank's part of a call. An error of its own is rank 0's to know. Raises RankLost."""
        group, device = self._group, self._module.device
        tensors = [one.to(device) for one in group.receive(plan["forms"])]
        self.adapters.read(plan["adapters"], tensors)
        if group.place.cfg >= len(plan["parts"]) or (group.place.sequence and not plan["shares"]):
            return
        if torch.get_num_threads() != plan["threads"]:
            torch.set_num_threads(plan["threads"])
        parts = [Call(form, tuple(tensors[place] for place in places)) for form, places in plan["parts"]]
        spans = [AdaptedSpan(self.adapters.uses(plan["uses"]))]
        try:
            with torch.no_grad(), applied_adapters(spans, by_keyword=True):
                share = _Share(RankChannel(group, plan[TO]), self._module, parts)
                share.results(self._module, shares=plan["shares"])
        except RankLost:
            raise
        except Exception as error:
            logger.warning("a call of another rank failed: %s", error)


class _Share:
    """One rank's share of a call, whose `parts` the ranks of `cfg` compute."""

    def __init__(self, ranks: RankChannel, module: Any, parts: Sequence[Call]) -> None:
        self._ranks, self._module, self._parts = ranks, module, parts
        self._own = parts[ranks.group.place.cfg]
        self.is_shared = False  # its tokens, by the ranks of `sequence`

    def results(self, run: Forward, *, shares: bool) -> list[torch.Tensor]:
        """Return the results of all parts, of which `run` computes the own one.

        Raises RankLost; RankFailed for another rank's error, which ends nothing.
        """
        compute = partial(self._computed_by_all if shares else self._computed, run)
        if len(self._parts) == 1:
            return [compute()]
        return gather_results(self._ranks.group, _AXIS, compute, is_out_of_memory)

    def _computed_by_all(self, run: Forward) -> torch.Tensor:
        """Return the result of the own part, by all ranks that share its tokens; by each, where they cannot."""
        try:
            found = run_shared(self._module, self._ranks, partial(self._computed, run), self._own.lengths)
        except CannotShare:  # all of them find it at the same place
            return self._computed(run)
        self.is_shared = True
        return found

    def _computed(self, run: Forward) -> torch.Tensor:
        return _joined(_outputs_of(run(**self._own.arguments())))


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _processors_of(module: nn.Module) -> list[Any]:
    return [part.processor for part in module.modules() if hasattr(part, "processor")]


def _outputs_of(answer: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a call's answer. Raises TypeError for another kind of answer."""
    found = answer if isinstance(answer, tuple) else answer.to_tuple()
    if not found or not all(isinstance(one, torch.Tensor) for one in found):
        raise TypeError(f"{type(answer).__name__} of {len(found)} came, expected tensors")
    return tuple(found)


def _joined(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors of an answer as one, whose rows have those of all of them. Raises TypeError."""
    if len(outputs) == 1:
        return outputs[0]
    if len({one.dtype for one in outputs}) > 1:
        raise TypeError(f"{', '.join(str(one.dtype) for one in outputs)} came, expected tensors of one type")
    return torch.cat([one.flatten(1) for one in outputs], dim=1)


def _as_asked(kind: Any, names: Sequence[str] | None, shapes: Sequence[torch.Size], joined: torch.Tensor) -> Any:
    """Return `joined` as tensors with rows of these shapes: a tuple, or a record of that kind with these `names`."""
    outputs = [joined]
    if len(shapes) > 1:
        parts = torch.split(joined, [shape.numel() for shape in shapes], dim=1)
        outputs = [part.reshape(len(joined), *shape) for part, shape in zip(parts, shapes, strict=True)]
    return tuple(outputs) if names is None else kind(**dict(zip(names, outputs, strict=True)))
