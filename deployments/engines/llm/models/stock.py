"""Language models as transformers computes them, around shared tensors: any class whose attention can be ours.

The class itself runs, with the tokens of all sequences of a step as one batch of one row. What it passes to the
attention interface that `_register_attention` names goes to the paged KV cache: the n-th call of a step has the n-th
layer of the cache. Its masks are not made, but kept as the functions that they would be made with.

Products of tokens of completions are computed by the kernels, which read a weight where it lies and give a row the same
bits whatever is beside it; those of prompts by torch, as all else, over rows that are padded to a number for which that
holds. Which it is follows from the token alone.

What a step needs, the attention finds at the module that calls it, which belongs to one model of one engine: not all
classes pass on to their layers what their forward is given.

Suffixes: T tokens of a step, N tokens with logits, H query heads, K key/value heads, D head dimension, C hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from deployments.engines.build import build_language_model
from deployments.engines.llm.models.eyes import Eyes, Seen
from deployments.engines.llm.models.llama import KvHeads
from deployments.engines.llm.models.stock_classes import SEEING
from deployments.engines.llm.paged_attention import Planner, Scores, StepAttention, Visible
from deployments.engines.nn.few_rows import multiply_rows
from deployments.engines.protocol import EngineError
from weights.torch_seam import with_child

ATTENTION_NAME: Final = "atelier"
TURN: Final = "atelier_turn"
# Of what classes pass to their attention beside queries, keys and values, what would change its result unheard.
_UNKNOWN: Final = ("indices", "block_indices", "position_bias", "sinks")
_DEFAULT_POSITIONS: Final = 32768  # of a class whose config names no bound


@dataclass(frozen=True, slots=True)
class StockSpec:
    """The sizes that the engine has to know of a model of transformers."""

    vocab_size: int
    max_positions: int
    kv_layers: tuple[KvHeads, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _StepMask:
    """A mask as the function that it would be made with, and how far back it sees at most, 0 for all."""

    visible: Visible
    window: int


@dataclass(slots=True, eq=False)
class _StockStep:
    """The step that the attention of one forward serves. `check` may end the step before any layer."""

    planner: Planner
    check: Callable[[], None]
    plans: dict[_StepMask, StepAttention] = field(default_factory=dict)
    num_calls: int = 0

    def attend(
        self, mask: _StepMask, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scores: Scores
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
        self, mask: _StepMask, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        if bool(mask.visible(torch.tensor(0), torch.tensor(1))):
            raise EngineError("its tokens see those behind them, so that none can be added")
        self.layers.append(KvHeads(k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2]))
        return q_THD.new_zeros(*q_THD.shape[:2], v_TKD.shape[2])


@dataclass(frozen=True, slots=True, eq=False)
class KernelRows:
    """The rows of a batch (1, T, ...) whose products the kernels compute: numbers, or None for all up to `last`."""

    num_rows: int  # T, with those that pad it
    last: int
    numbers: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    """The step that a model runs, if it runs one: all its modules have it, under the name `TURN`."""

    step: _StockStep | _Probe | None = None
    rows: KernelRows | None = None


class _StepLinear(nn.Linear):
    """A linear layer of a decoder. Batches of other shapes, those of experts say, are torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: KernelRows | None = getattr(self, TURN).rows
        if rows is None or input.shape[:-1] != (1, rows.num_rows):
            return super().forward(input)
        if rows.numbers is None:
            found = multiply_rows(self, input[0, : rows.last], rows.num_rows - rows.last)
            return super().forward(input) if found is None else found[None]
        result, found = super().forward(input), multiply_rows(self, input[0, rows.numbers])
        if found is not None:
            result[0, rows.numbers] = found
        return result


def _register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Doing so again changes nothing: the functions hold no state."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _mask)


def _mask(*, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any) -> _StepMask:
    """Return the mask of a step of any sequences; transformers knows neither their number nor their lengths."""
    first = torch.tensor(0)  # of the batch, and of the heads
    return _StepMask(lambda queries, keys: mask_function(first, first, queries, keys), local_size or 0)


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
    step, name = getattr(module, TURN).step, type(module).__name__
    if unknown := [one for one in _UNKNOWN if others.get(one) is not None]:
        raise EngineError(f"{name}: attention with {unknown[0]!r} is not supported")
    if step is None or not isinstance(attention_mask, _StepMask) or others.get("is_causal") is False:
        raise EngineError(f"{name}: its attention is not one over a causal mask")
    scores = Scores(scaling, softcap, s_aux)
    q_THD, k_TKD, v_TKD = (one[0].transpose(0, 1) for one in (query, key, value))
    return step.attend(attention_mask, q_THD, k_TKD, v_TKD, scores)[None], None


class _Given(nn.Module):
    """Stand-in for a decoder whose result is the hidden states that it is given as embeddings."""

    @property
    def decoder(self) -> _Given:
        """Return it, for classes that ask a part of their base model (OPT)."""
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
class StockModel:
    """A class of transformers with its weights, ready to run over the paged KV cache. Some have `eyes`."""

    module: Any
    head: Any  # the module with `_Given` in the place of its decoder
    spec: StockSpec
    dtype: torch.dtype
    device: torch.device
    pads_rows: bool = True
    eyes: Eyes | None = None

    def hidden_states(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        planner: Planner,
        check: Callable[[], None],
        rows: KernelRows | None = None,
        seen: Seen | None = None,
    ) -> torch.Tensor:
        """Return the hidden states (T, C) of a step's tokens, behind the last norm, with what was `seen` among them.

        Products of `rows` are the kernels'. Where the class counts the rows and columns of images, the positions may be
        (3, T).
        """
        with _turn(self.module, rows=rows if self._has_kernels else None):
            return _hidden_states(self.module, token_ids_T, positions_T, _StockStep(planner, check), seen)

    @property
    def _has_kernels(self) -> bool:
        """Return whether there may be kernels for its products: elsewhere no rows are told from the others."""
        return self.device.type == "cpu" and self.dtype == torch.float32

    def lora_scope(self) -> str | None:
        """Return the module that LoRAs of requests may change, beside the head; None for all of them."""
        if self.eyes is None:
            return None
        decoder = self.module.get_decoder()
        return next(name for name, module in self.module.named_modules() if module is decoder)

    def logits(self, hidden_NC: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return (N, vocabulary) scores of the next token, with all that the class does to them.

        The first `num_rows` count, what is behind them is padding.
        """
        with _turn(self.module, rows=KernelRows(len(hidden_NC), num_rows) if self._has_kernels else None):
            logits: torch.Tensor = self.head(inputs_embeds=hidden_NC[None], use_cache=False).logits
        return logits[0]


@contextlib.contextmanager
def _turn(module: Any, **given: Any) -> Iterator[None]:
    """Give all modules these fields of their turn for the length of the block."""
    turn: _Turn = getattr(module, TURN)
    for name, value in given.items():
        setattr(turn, name, value)
    try:
        yield
    finally:  # it has the tensors of its masks
        for name in given:
            setattr(turn, name, None)


def _base_name(module: Any) -> str:
    """Return what a class calls its decoder: not all have the name that its base model should have."""
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
    with _turn(module, step=step):
        output = getattr(module, _base_name(module))(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None] if positions_T.ndim == 1 else positions_T[:, None],
            # Without one, jumps of the positions are taken for the borders of sequences that are all here.
            attention_mask=torch.ones_like(token_ids_T[None]),
            use_cache=False,
            **({"mm_encoder_outputs": {"image": seen}} if seen is not None else {}),
        )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0]


def create_stock_model(
    config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> StockModel:
    """Build the class that a config names first around `tensors`.

    Raises:
        EngineError: the tensors do not fit the config, or the class does not compute as it is known to.
    """
    _register_attention()
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    module: Any = build_language_model(config, placed)
    sees = config.architectures[0] in SEEING
    # A tower's tokens are all here, and all see each other.
    module.set_attn_implementation({"text_config": ATTENTION_NAME} if sees else ATTENTION_NAME)
    turn = _Turn()
    for part in module.modules():
        setattr(part, TURN, turn)
        if type(part) is nn.Linear:
            part.__class__ = _StepLinear
    head = with_child(module, _base_name(module), _Given())
    spec = StockSpec(config.get_text_config().vocab_size, max_positions(config), _probe(module, device))
    eyes = Eyes(getattr(module, _base_name(module)), config, device) if sees else None
    return StockModel(module, head, spec, module.get_input_embeddings().weight.dtype, device, eyes=eyes)


@torch.inference_mode()
def _probe(module: Any, device: torch.device) -> tuple[KvHeads, ...]:
    """Return the key/value heads of each layer, as one token shows them."""
    probe = _Probe()
    try:
        first = torch.zeros(1, dtype=torch.long, device=device)
        _hidden_states(module, first, first, probe)
    except EngineError:
        raise
    except Exception as error:  # configs are believed here and there, each with errors of its own
        raise EngineError(f"{type(module).__name__} does not compute with this config: {error}") from error
    return tuple(probe.layers)


def max_positions(config: PretrainedConfig) -> int:
    """Return the longest sequence that is computed as the class means it.

    Rotary frequencies that change behind a length would depend on the longest sequence of a step: there they end.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    named = getattr(text, "max_position_embeddings", None)
    bounds = [named if type(named) is int and named > 0 else _DEFAULT_POSITIONS]
    for one in (rope, *rope.values()):  # one for all layers, or one for each kind of them
        if isinstance(one, dict) and one.get("rope_type") in ("dynamic", "longrope"):
            bounds.append(one.get("original_max_position_embeddings") or bounds[0])
    return int(min(bounds))
