"""Decoders from a model folder's config and tensors: the known architectures, rotary frequencies, assignment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deployments.engines.building.build import blank_language_model, build_language_model
from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.library_seam import without_own_keys
from deployments.engines.llm.models.context import max_positions
from deployments.engines.llm.models.decoder_tensors import renamed_experts
from deployments.engines.llm.models.gguf_config import MAX_EXPERTS, gguf_config, gguf_headers
from deployments.engines.llm.models.known import check_config, check_quantization, check_rope_type, named_decoder
from deployments.engines.llm.models.kuiper_config import kuiper_header, kuiper_source
from deployments.engines.llm.models.llama import (
    DecoderSpec,
    ExpertsSpec,
    LlamaForCausalLM,
    MixtureOfExperts,
    Rotary,
)
from deployments.engines.llm.models.own_cache import OwnCacheModel, create_own_cache_model
from deployments.engines.llm.models.packed import (
    PackedSource,
    compute_dtype,
    place_packed,
    uses_torch_products,
    warn_of_surplus,
)
from deployments.engines.llm.models.planned_forwards import PlannedForwards
from deployments.engines.llm.models.planned_share import check_class
from deployments.engines.llm.models.rank_share import DecoderShare, even_range, gather_columns
from deployments.engines.llm.models.stock import StockLanguageModel, create_stock_model
from deployments.engines.llm.models.stock_classes import DRAFTS_FOR, OWN_CACHE, TEXT_ALONE
from deployments.engines.llm.sequences.paged_attention import LayerAttention, Planner
from deployments.engines.nn.batch_invariant import settled_rows
from deployments.engines.nn.packed_weights import DENSE_KINDS, GROUP_INT8, Arithmetic
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import EngineError
from weights.formats.untrusted import shown
from weights.memory.devices import computes_on_host
from weights.memory.layer_plan import layer_of
from weights.platform.torch_seam import fake_mode
from weights.records.dtypes import GROUP_INT8_METHOD

T = TypeVar("T")
_DECODER_PARTS = ("embed_tokens.", "layers.", "norm.")
# The parts of a model that read images and sound.
_SENSES = re.compile(r"(model\.)?(vision_|audio_|multi_modal_projector\.|embed_(vision|audio|tokens_extend)\.)")
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its weights, ready to run. `device` has its head, and usually all of it.

    `pads_rows`: on the CPU, products of few rows round by their number, which packed kernels do not.
    """

    module: LlamaForCausalLM
    rotary: Rotary
    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    pads_rows: bool = True
    ranks: RankGroup | None = None  # that have its other slices
    share: DecoderShare | None = None  # which slices these are

    @cached_property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """Return the device where each layer computes: that of its tensors."""
        layers: Any = self.module.model.layers
        return tuple(layer.input_layernorm.weight.device for layer in layers)

    @property
    def is_split(self) -> bool:
        """Return whether layers are on several devices."""
        return any(device != self.device for device in self.layer_devices)

    def device_of(self, path: str) -> torch.device:
        """Return the device where a submodule computes."""
        layer = layer_of(f"{path}.")
        return self.device if layer is None else self.layer_devices[layer]

    def hidden_states(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, planner: Planner, check: Callable[[], None]
    ) -> torch.Tensor:
        """Return the hidden states (T, C) of a step's tokens, after the last norm."""
        angles = self.rotary.angles(positions_T, self.dtype)
        windows = self.spec.windows or (0,) * self.spec.num_layers
        plans = {window: planner(window, None) for window in set(windows)}
        attend = LayerAttention(tuple(plans[window] for window in windows), check)
        return self.module(token_ids_T, angles, attend)

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        """Return (N, vocabulary) scores of the next token."""
        return self.whole_logits(self.module.logits(hidden_NC))

    def whole_logits(self, own_NV: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens by those of the rows of the head that this rank has."""
        if self.ranks is None or not self.spec.head_rows:
            return own_NV
        count = self.ranks.size("tensor")
        ranges = [even_range(self.spec.vocab_size, rank, count) for rank in range(count)]
        return gather_columns(self.ranks, own_NV, [stop - start for start, stop in ranges])


_FEW_LAYERS: Final = 512  # allowed in a config with fewer tensors: a damaged number would be built for ever
AnyModel = LoadedModel | StockLanguageModel | OwnCacheModel


def load_config(folder: Path, *, is_draft: bool = False) -> PretrainedConfig:
    """Read the transformers config of a model folder, or make it from the metadata of its GGUF model.

    Raises:
        EngineError: no readable config.json, or no class is known for it: some only for a model that `is_draft`.
    """
    if headers := gguf_headers(folder):
        return gguf_config(headers)
    content = read_config(folder / "config.json")
    class_name = check_config(content, folder / "config.json", is_draft=is_draft)
    named = named_decoder(content)
    whole = named if named in TEXT_ALONE else class_name
    try:
        source = AutoConfig if whole in ARCHITECTURES else getattr(transformers, whole).config_class
        config = source.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if whole != class_name:
            config = _text_config(config, class_name)
    except Exception as error:  # transformers raises many kinds; all mean that this config cannot be used
        raise EngineError(f"{folder / 'config.json'} is not a valid config: {error}") from error
    if class_name in DRAFTS_FOR:
        config.text_config = without_own_keys(config.text_config)
    config.architectures, config.name_or_path = [class_name], str(folder)
    if (header := kuiper_header(folder)) is not None:
        config.packed_source = kuiper_source(header, config)
    return config


def _text_config(whole: PretrainedConfig, class_name: str) -> PretrainedConfig:
    """Return the config of a model's decoder alone, for its class (of `TEXT_ALONE`)."""
    text = whole.get_text_config()
    kind = getattr(transformers, class_name).config_class
    if not isinstance(text, kind):  # the decoder's fields are the model's own
        parts = {name: value for name, value in text.to_dict().items() if not name.endswith("_config")}
        text = kind.from_dict({**parts, "model_type": kind.model_type})
    text.tie_word_embeddings, text.name_or_path, text.is_text_alone = (
        whole.tie_word_embeddings,
        whole.name_or_path,
        True,
    )
    return text


def decoder_tensors(config: PretrainedConfig, tensors: Mapping[str, T]) -> Mapping[str, T]:
    """Return the decoder's tensors under its own names: a part of the tensors of a model that reads more than text."""
    if not is_text_alone(config):
        return tensors
    own = {name: tensor for name, tensor in tensors.items() if not _SENSES.match(name)}
    return {decoder_name(name): tensor for name, tensor in own.items()}


def decoder_name(name: str) -> str:
    """Return the decoder's own name of a tensor or layer that the model around it has under this name."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)  # of old ones, the former


def is_text_alone(config: PretrainedConfig) -> bool:
    """Return whether the model reads images or sound in unsupported ways, so that only its decoder is served."""
    return bool(getattr(config, "is_text_alone", False))


def is_stock(config: PretrainedConfig) -> bool:
    """Return whether transformers computes the model."""
    return config.architectures[0] not in ARCHITECTURES


def check_stock_tensors(folder: Path, given: Mapping[str, Sequence[int]], *, is_draft: bool = False) -> None:
    """Raise EngineError if tensors of these names and shapes do not fit a class of transformers.

    The class is built, without memory for its weights.
    """
    content = read_config(folder / "config.json")
    inner = content.get("text_config")
    for key, value in [*content.items(), *(inner.items() if isinstance(inner, dict) else ())]:
        is_count = "layer" in key and isinstance(value, int)
        if is_count and value > max(len(given), _FEW_LAYERS):  # before transformers makes a list of them
            raise EngineError(f"{folder / 'config.json'} says {key} {value}, and there are {len(given)} tensors")
    config = load_config(folder, is_draft=is_draft)
    tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in given.items()}
    try:
        build_language_model(config, dict(decoder_tensors(config, tensors)))
    except EngineError:
        raise
    except Exception as error:  # configs are believed here and there, each with errors of its own
        raise EngineError(f"{folder}: no {config.architectures[0]} can be made of this config: {error}") from error


def create_any_model(
    config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    arithmetic: Arithmetic = "fast",
    keeps_devices: bool = False,
    ranks: RankGroup | None = None,
) -> AnyModel:
    """Build our decoder, or the class of transformers if we have none. Raises EngineError as they do."""
    tensors = decoder_tensors(config, tensors)
    if not is_stock(config):
        return create_model(config, tensors, device, arithmetic=arithmetic, keeps_devices=keeps_devices, ranks=ranks)
    divided = None
    if ranks is not None and ranks.size("tensor") > 1:
        check_class(config.architectures[0])
        divided = PlannedForwards(ranks.place.tensor, ranks.size("tensor"))
    if config.architectures[0] in OWN_CACHE:
        return create_own_cache_model(config, tensors, device)
    model = create_stock_model(config, tensors, device, divided)
    if divided is not None:
        divided.ranks = ranks
    return model


def check_ranks(config: PretrainedConfig, layout: RankLayout) -> None:
    """Raise EngineError if a model cannot be computed by the ranks of a layout: how its matrices are stored aside."""
    if layout.tensor == 1:
        return
    if is_stock(config):
        check_class(config.architectures[0])
        # Without memory: a forward finds sizes that the code of a class does not divide.
        named = blank_language_model(config).state_dict()
        with fake_mode():
            fakes = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in named.items()}
        create_stock_model(config, fakes, torch.device("cpu"), PlannedForwards(0, layout.tensor))
        return
    DecoderShare(decoder_spec(config), 0, layout.tensor)


def create_model(
    config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    arithmetic: Arithmetic = "fast",
    keeps_devices: bool = False,
    ranks: RankGroup | None = None,
) -> LoadedModel:
    """Build our decoder on the meta device and assign `tensors`, of which one of several `ranks` takes its slices.

    Tensors already on `device` are used there; others are copied to it. With `keeps_devices` all of a
    layer's tensors are where it computes, and stay. Those of a GGUF or Kuiper file stay packed; `arithmetic` says how
    products with them are computed (`nn/packed_linear.py`).

    Raises:
        EngineError: the config is not supported, or the tensors do not fit it.
    """
    spec = decoder_spec(config)
    rotary = _create_rotary(config, spec.head_dim, device)
    with torch.device("meta"):
        module = LlamaForCausalLM(spec)
    packed: PackedSource | None = getattr(config, "packed_source", None)
    full_name = headed_name if packed is None else str
    placed: Mapping[str, torch.Tensor] = renamed_experts(
        {full_name(name): tensor if keeps_devices else tensor.to(device) for name, tensor in tensors.items()}
    )
    source = packed or _stored_source(config, placed, arithmetic, module.state_dict().keys())
    share = None
    if ranks is not None and ranks.size("tensor") > 1:
        share = DecoderShare.of_stored(spec, ranks.place.tensor, ranks.size("tensor"), source)
        spec = share.spec
        with torch.device("meta"):
            module = LlamaForCausalLM(spec)
        layers: Any = module.model.layers
        for layer in layers:
            layer.sum_ranks = partial(ranks.all_reduce, axis="tensor")
    if source is not None:
        rotary = _rescaled(rotary, source, placed)
        placed = place_packed(module, source, placed, arithmetic, share)
    if spec.tied_embeddings:
        placed = _with_tied(placed)
    if share is not None:
        placed = {name: share.cut(name, tensor) for name, tensor in placed.items()}
    _assign_tensors(module, placed)
    dtype = module.model.norm.weight.dtype if source is None else compute_dtype(arithmetic)
    pads_rows = uses_torch_products(module)
    place = _place(module) if keeps_devices else device
    model = LoadedModel(module.eval(), rotary, spec, dtype, place, pads_rows, ranks, share)
    for path, part in module.named_modules():
        if isinstance(part, MixtureOfExperts) and pads_rows and computes_on_host(model.device_of(path)):
            part.row_multiple = settled_rows()
    return model


def _place(module: LlamaForCausalLM) -> torch.device:
    return module.model.norm.weight.device


def _stored_source(
    config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], arithmetic: Arithmetic, known: Set[str]
) -> PackedSource | None:
    """Return the source of `known` tensors under their own names that need an arithmetic of their own; None for
    plain ones.

    These are the int8 groups of `atelier quantize`, and plain weights in "exact" arithmetic. Raises EngineError.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None and arithmetic != "exact":
        return None
    given: Any = quantization or {"quant_method": GROUP_INT8_METHOD, "group_size": 1}
    check_quantization(given)
    kinds_by_dtype = {dtype: kind for kind, dtype in DENSE_KINDS.items()} | {torch.int8: GROUP_INT8}
    scales = frozenset(name for name in tensors if name.endswith(".scales"))
    names = [name for name in tensors if name in known]
    if unknown := [name for name in names if tensors[name].dtype not in kinds_by_dtype]:
        raise EngineError(f"tensor {unknown[0]!r} is {tensors[unknown[0]].dtype}, expected int8 or a floating dtype")
    kinds = {name: kinds_by_dtype[tensors[name].dtype] for name in names}
    ignored = scales | {name for name in tensors if name.endswith(_IGNORED_SUFFIXES)}
    return PackedSource({name: name for name in names}, kinds, group_size=given["group_size"], ignored=ignored)


def headed_name(name: str) -> str:
    """Return a name in the form of decoders with a head: folders of sentence-transformers hold decoders without one."""
    return f"model.{name}" if name.startswith(_DECODER_PARTS) else name


def _rescaled(rotary: Rotary, source: PackedSource, tensors: Mapping[str, torch.Tensor]) -> Rotary:
    """Return the rotary of packed weights: their order of pairs, and the frequency factors of Llama 3."""
    frequencies = rotary.inverse_frequencies
    if source.frequency_factors is not None:
        factors = tensors.get(source.frequency_factors)
        if factors is None or factors.shape != frequencies.shape:
            raise EngineError(f"tensor {source.frequency_factors!r} does not have {len(frequencies)} factors")
        frequencies = frequencies / factors.float()
    return Rotary(frequencies, rotary.magnitude * source.rope_magnitude, is_interleaved=source.is_interleaved)


def decoder_spec(config: PretrainedConfig) -> DecoderSpec:
    """Return the sizes of a config's decoder. Raises EngineError for an unsupported one."""
    if is_stock(config):
        raise EngineError(f"a {config.architectures[0]} is computed by transformers: it is none of our decoders")
    return ARCHITECTURES[config.architectures[0]](config)


def _base_spec(config: PretrainedConfig, **differences: Any) -> DecoderSpec:
    if config.hidden_act != "silu":
        raise EngineError(f"activation {config.hidden_act!r} is not supported; supported is silu")
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        max_positions=max_positions(config),
        tied_embeddings=config.tie_word_embeddings,
        windows=_windows(config),
        **differences,
    )


def _checked_experts(num_experts: int, *others: Any) -> ExpertsSpec:
    if type(num_experts) is not int or not 0 < num_experts <= MAX_EXPERTS:
        raise EngineError(f"the config says {shown(num_experts)} experts, expected 1 to {MAX_EXPERTS}")
    return ExpertsSpec(num_experts, *others)


def _windows(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none. Raises EngineError for a kind of layer that is not supported."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral and its like have one window in all layers
        kinds = ("sliding_attention",) * config.num_hidden_layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise EngineError(f"layers of type {min(unknown)!r} are not supported")
    if not 0 < window < config.max_position_embeddings or "sliding_attention" not in kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _llama(config: PretrainedConfig) -> DecoderSpec:
    bias = config.attention_bias
    return _base_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _qwen2(config: PretrainedConfig) -> DecoderSpec:
    return _base_spec(config, qkv_bias=True)


def _qwen3(config: PretrainedConfig) -> DecoderSpec:
    bias = config.attention_bias
    return _base_spec(config, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _mistral(config: PretrainedConfig) -> DecoderSpec:
    return _base_spec(config)


def _mixtral(config: PretrainedConfig) -> DecoderSpec:
    layers = frozenset(range(config.num_hidden_layers))
    experts = _checked_experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, layers)
    return _base_spec(config, experts=experts)


def _qwen3_moe(config: PretrainedConfig) -> DecoderSpec:
    layers = frozenset(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )
    experts = _checked_experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, layers, config.norm_topk_prob
    )
    bias = config.attention_bias
    return _base_spec(config, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts)


ARCHITECTURES: dict[str, Callable[[PretrainedConfig], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


def _create_rotary(config: PretrainedConfig, head_dim: int, device: torch.device) -> Rotary:
    """Return the rotary of `config`, with its frequencies on `device`.

    Raises:
        EngineError: the kind of scaling is not one of `ROPE_TYPES`, or it turns only a part of the head.
    """
    parameters = config.rope_parameters
    rope_type = parameters["rope_type"]
    check_rope_type(rope_type)
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        frequencies, magnitude = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        try:
            frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope_type](config)
        except (ArithmeticError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise EngineError(f"rope parameters {parameters} cannot be computed with: {error!r}") from None
    if not bool(frequencies.isfinite().all()):
        raise EngineError(f"rope parameters {parameters} make frequencies that are not finite")
    if 2 * len(frequencies) != head_dim or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"rope must turn the whole head ({head_dim} dimensions), got {parameters}")
    return Rotary(frequencies.to(device), magnitude)


# Buffers that old checkpoints saved and that are computed from the config instead.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def _with_tied(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors with the embedding's as the head's, if it has none of its own."""
    taken = {name: tensors[source] for name, source in _TIED.items() if source in tensors}
    return {**taken, **tensors}


def _assign_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make `tensors` the parameters of `module`, which was built on the meta device.

    The memory of the tensors is shared, not copied, and never written; it may be read-only.

    Raises:
        EngineError: a tensor is missing, unknown, of another shape, or not of the one floating dtype.
    """
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith(_IGNORED_SUFFIXES)}
    expected = module.state_dict()
    given = _named(given, expected)
    _check_tensors(given, expected)
    module.load_state_dict(given, assign=True)
    module.requires_grad_(False)


def _named(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that a model has. Others are left out with a warning, as transformers does.

    Raises EngineError for a missing one.
    """
    missing = [name for name in expected if name not in given]
    if missing:
        name = missing[0]
        raise EngineError(
            f"tensor {name!r} of shape {tuple(expected[name].shape)} is missing{_and_others(missing)}: "
            f"{len(given)} tensors given, the model has {len(expected)}"
        )
    if unknown := [name for name in given if name not in expected]:
        warn_of_surplus(unknown)
    return {name: tensor for name, tensor in given.items() if name in expected}


def _check_tensors(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    first, reference = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.shape != expected[name].shape:
            raise EngineError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise EngineError(f"tensor {name!r} is {tensor.dtype}, expected a floating-point dtype")
        if tensor.dtype != reference.dtype:
            raise EngineError(f"tensor {name!r} is {tensor.dtype}, expected {reference.dtype} as {first!r} is")


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
