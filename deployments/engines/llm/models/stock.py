"""Language models computed by transformers' classes, around shared tensors: any class whose attention can be ours.

The class itself runs, with the tokens of all sequences of a step as one batch of one row. Its calls of the
attention interface that `_register_functions` names go to the paged KV cache: the n-th call of a step has the n-th
layer of the cache. Its masks are not made, but kept as the functions that would make them.

Products of tokens of completions are computed by the kernels, which read a weight in place and give a row the same
bits in any batch; those of prompts by torch, as all else, over rows padded to a number for which that
holds. The choice depends on the token alone.

Step inputs are stored on the attention's module, not in a global, so engines do not mix. Not all classes pass the
arguments of their forward on to their layers.

Suffixes: T tokens of a step, N tokens with logits, H query heads, K key/value heads, D head dimension, C hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from deployments.engines.building.build import build_language_model
from deployments.engines.llm.models.context import max_positions
from deployments.engines.llm.models.planned_forwards import PlannedForwards
from deployments.engines.llm.models.planned_share import PlannedShare
from deployments.engines.llm.models.recurrent import (
    RecurrentSpec,
    StateForm,
    StateName,
    StateProbe,
    StepStates,
    mix_by_steps,
    piece_tokens,
)
from deployments.engines.llm.models.step_rows import (
    STEP_INPUTS,
    OtherProducts,
    StepInputs,
    StepLinear,
    StepRows,
    compute_experts,
    padded_multiple,
    step_inputs_of,
)
from deployments.engines.llm.models.stock_classes import RECURRENT, SEEING, WHOLE_PROMPTS
from deployments.engines.llm.models.vision_tower import Seen, VisionTower
from deployments.engines.llm.sequences.kv_cache import KvHeads
from deployments.engines.llm.sequences.paged_attention import Planner, Scores, StepAttention, Visible
from deployments.engines.ranks.group import RankGroup
from deployments.engines.records.protocol import EngineError
from weights.memory.devices import computes_on_host
from weights.platform.torch_seam import with_child

OURS: Final = "atelier"  # the name of our functions in transformers' registries
# Arguments of attention, beside queries, keys and values, that would change its result if ignored.
_UNKNOWN: Final = ("indices", "block_indices", "position_bias", "sinks")


@dataclass(frozen=True, slots=True)
class StockSpec:
    """The sizes of a model of transformers for the engine."""

    vocab_size: int
    max_positions: int
    kv_layers: tuple[KvHeads, ...]
    recurrent: RecurrentSpec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepMask:
    """A mask as the function that would make it, and the length of its window, 0 for all."""

    visible: Visible
    window: int

    def __getitem__(self, _: Any) -> StepMask:
        """Return itself: where layers share keys, Gemma 4 goes on with the rows that get logits, which are all here."""
        return self


@dataclass(slots=True, eq=False)
class _StockStep:
    """The step of one forward's attention. `check` may end the step before any layer."""

    planner: Planner
    check: Callable[[], None]
    plans: dict[StepMask, StepAttention] = field(default_factory=dict)
    num_calls: int = 0

    def attend(
        self, mask: StepMask, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        self.check()
        if mask not in self.plans:
            self.plans[mask] = self.planner(mask.window, mask.visible)
        self.num_calls += 1
        return self.plans[mask](self.num_calls - 1, q_THD, k_TKD, v_TKD, scores)


@dataclass(slots=True, eq=False)
class _Probe:
    """Finds the shapes of keys and values, and attends to nothing."""

    layers: list[KvHeads] = field(default_factory=list)

    def attend(
        self, mask: StepMask, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        if bool(mask.visible(torch.tensor(0), torch.tensor(1))):
            raise EngineError("its tokens see those behind them, so that none can be added")
        self.layers.append(KvHeads(k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2]))
        return q_THD.new_zeros(*q_THD.shape[:2], v_TKD.shape[2])


def _register_functions() -> None:
    """Register `OURS` with transformers. A second call changes nothing: the functions hold no state."""
    ALL_EXPERTS_FUNCTIONS.register(OURS, compute_experts)
    ALL_ATTENTION_FUNCTIONS.register(OURS, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OURS, _mask)


def _mask(*, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any) -> StepMask:
    """Return the mask of a step of any sequences; transformers has neither their number nor their lengths."""
    first = torch.tensor(0)  # for batch and heads
    return StepMask(lambda queries, keys: mask_function(first, first, queries, keys), local_size or 0)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with (1, H, T, D), (1, K, T, D) and (1, K, T, D), by the step in `others`; the result is (1, T, H, D)."""
    step, name = step_inputs_of(module).attention, type(module).__name__
    if unknown := [one for one in _UNKNOWN if others.get(one) is not None]:
        raise EngineError(f"{name}: attention with {unknown[0]!r} is not supported")
    if step is None or not isinstance(attention_mask, StepMask) or others.get("is_causal") is False:
        raise EngineError(f"{name}: its attention is not one over a causal mask")
    scores = Scores(scaling, softcap, s_aux)
    q_THD, k_TKD, v_TKD = (one[0].transpose(0, 1) for one in (query, key, value))
    return step.attend(attention_mask, q_THD, k_TKD, v_TKD, scores)[None], None


class _Given(nn.Module):
    """A stand-in for a decoder that returns the hidden states given as its embeddings."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._decoders = (decoder,)  # in a tuple it is no part of this one

    def __getattr__(self, name: str) -> Any:
        """Return the decoder's attribute of that name (Falcon-H1's factor of the logits)."""
        return getattr(vars(self)["_decoders"][0], name)

    @property
    def decoder(self) -> _Given:
        """Return itself, for classes that call a part of their base model (OPT)."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """The output of a decoder, with hidden states alone."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass(frozen=True, slots=True)
class StockLanguageModel:
    """A class of transformers with its weights, ready to run over the paged KV cache. Some have `vision`."""

    module: Any
    head: Any  # the module with `_Given` in the place of its decoder
    spec: StockSpec
    dtype: torch.dtype
    device: torch.device
    pads_rows: bool = True
    pads_completions: bool = True  # unless all products are linear layers', which kernels compute
    row_multiple: int = 1
    vision: VisionTower | None = None
    divided: PlannedForwards | None = None  # of one of several ranks

    def hidden_states(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        planner: Planner,
        check: Callable[[], None],
        rows: StepRows | None = None,
        seen: Seen | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Return the hidden states (T, C) of a step's tokens, behind the last norm, with what was `seen` among them.

        The kernels compute the products of `rows`. If the class counts rows and columns of images, the positions may be
        (3, T). Recurrent layers have `states`.
        """
        with turn(self.module, rows=rows if self.has_kernels else None, states=states):
            return _hidden_states(self.module, token_ids_T, positions_T, _StockStep(planner, check), seen)

    @property
    def ranks(self) -> RankGroup | None:
        """Return the ranks that have its other slices."""
        return None if self.divided is None else self.divided.ranks

    @property
    def share(self) -> PlannedShare | None:
        """Return the share of this rank."""
        return None if self.divided is None else self.divided.share

    @property
    def has_kernels(self) -> bool:
        """Return whether kernels may compute its products; without kernels all rows are treated alike."""
        return self.device.type == "cpu" and self.dtype == torch.float32

    def lora_scope(self) -> str | None:
        """Return the module that requests' LoRAs may change, beside the head; None for all modules."""
        if self.vision is None:
            return None
        decoder = self.module.get_decoder()
        return next(name for name, module in self.module.named_modules() if module is decoder)

    def logits(self, hidden_NC: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return (N, vocabulary) scores of the next token, with all changes by the class.

        The first `num_rows` count, the rest is padding.
        """
        rows = StepRows((1, len(hidden_NC)), num_rows, self.row_multiple)
        with turn(self.module, rows=rows if self.has_kernels else None):
            logits: torch.Tensor = self.head(inputs_embeds=hidden_NC[None], use_cache=False).logits
        return logits[0]


@contextlib.contextmanager
def turn(module: Any, **given: Any) -> Iterator[None]:
    """Set these fields of all modules' step inputs within the block."""
    inputs = step_inputs_of(module)
    for name, value in given.items():
        setattr(inputs, name, value)
    try:
        yield
    finally:  # the inputs refer to the tensors of masks
        for name in given:
            setattr(inputs, name, None)


def _base_name(module: Any) -> str:
    """Return the name of a class's decoder, which is not always its `base_model_prefix`."""
    name: str = module.base_model_prefix
    children = dict(module.named_children())
    if name in children:
        return name
    return next(name for name, child in children.items() if isinstance(child, PreTrainedModel))


def _hidden_states(
    module: Any,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    step: _StockStep | _Probe,
    seen: Seen | None = None,
) -> torch.Tensor:
    with turn(module, attention=step):
        output = getattr(module, _base_name(module))(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None] if positions_T.ndim == 1 else positions_T[:, None],
            # Without a mask, jumps of the positions are taken for the borders of whole sequences.
            attention_mask=torch.ones_like(token_ids_T[None]),
            use_cache=False,
            **({"mm_encoder_outputs": {"image": seen}} if seen is not None else {}),
        )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0]


def create_stock_model(
    config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    divided: PlannedForwards | None = None,
) -> StockLanguageModel:
    """Build the class that a config names first around `tensors`, of which a `divided` one takes its rank's slices.

    Raises:
        EngineError: the tensors do not fit the config, or the class does not compute as expected.
    """
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    module: Any = (
        build_language_model(config, placed, divided.divide) if divided else build_language_model(config, placed)
    )
    sees = config.architectures[0] in SEEING
    # A tower's tokens are all in the batch, and all see each other.
    run_by_steps(module, {"text_config": OURS} if sees else OURS)
    if computes_on_host(device):  # elsewhere transformers' function for all experts at once is faster
        module.set_experts_implementation(OURS)
    mixers = mix_by_steps(module) if config.architectures[0] in RECURRENT else []
    base = _base_name(module)
    head = with_child(module, base, _Given(getattr(module, base)))
    products = OtherProducts(module)
    with products:
        layers, states = _probe(module, head, device)
    recurrent = None
    if mixers:
        is_whole = config.architectures[0] in WHOLE_PROMPTS
        recurrent = RecurrentSpec(tuple(states), 0 if is_whole else piece_tokens(mixers))
    model = StockLanguageModel(
        module,
        head,
        StockSpec(config.get_text_config().vocab_size, max_positions(config), layers, recurrent),
        module.get_input_embeddings().weight.dtype,
        device,
        row_multiple=padded_multiple(module),
        vision=VisionTower(getattr(module, base), config, device) if sees else None,
        divided=divided,
    )
    return replace(model, pads_completions=products.found or not model.has_kernels)


def run_by_steps(module: Any, attention: str | dict[str, str] = OURS) -> None:
    """Let a model's attention and linear layers compute by the inputs of each step (`turn`)."""
    _register_functions()
    module.set_attn_implementation(attention)
    inputs = StepInputs()
    for part in module.modules():
        setattr(part, STEP_INPUTS, inputs)
        if type(part) is nn.Linear:
            part.__class__ = StepLinear


@torch.inference_mode()
def _probe(
    module: Any, head: Any, device: torch.device
) -> tuple[tuple[KvHeads, ...], list[Mapping[StateName, StateForm]]]:
    """Return the key/value heads of each layer and the states of each mixer, found by running one token."""
    probe, states = _Probe(), StateProbe()
    try:
        first = torch.zeros(1, dtype=torch.long, device=device)
        with turn(module, states=states):
            hidden = _hidden_states(module, first, first, probe)
        head(inputs_embeds=hidden[None], use_cache=False)
    except EngineError:
        raise
    except Exception as error:  # configs are believed here and there, each with errors of its own
        raise EngineError(f"{type(module).__name__} does not compute with this config: {error}") from error
    return tuple(probe.layers), list(states.mixers)
