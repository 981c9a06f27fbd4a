"""The only module of the engines that uses private names of diffusers, transformers and torch; `SHIMS` lists them.

Among them are the sources that engines have quicker code in place of: where a library's are others, its own code runs,
which gives the same more slowly, and a warning says so. `atelier doctor` prints what these libraries lack. None of
them is imported before it is asked for.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weights.platform.private_names import Shim, source_digest

if TYPE_CHECKING:
    import torch
    from torch import nn

_BERT: Final = {"bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "camembert": "Camembert"}
_BERT_PARTS: Final = {
    "SelfOutput": "0650f56bc438ef17",
    "Attention": "555fe3ce7c213544",
    "Intermediate": "889c3eb8cb652e6c",
    "Output": "0650f56bc438ef17",
    "Layer": "b3ca38e0a77897f7",
    "Encoder": "23d34a35078e881b",
    "Model": "eae997975343e6e0",
}
_BERT_ATTENTION: Final = {
    "bert": "3177ae8a5182c391",
    "roberta": "3246d93f74cfeab5",
    "xlm_roberta": "4c3dec7c071e296c",
    "camembert": "68043f9f61ac4157",
}


def _bert_forwards() -> dict[str, str]:
    """Return the digests of the forwards of BERT's parts and of those of its relatives."""
    found = {}
    for module, prefix in _BERT.items():
        for part, digest in {**_BERT_PARTS, "SelfAttention": _BERT_ATTENTION[module]}.items():
            found[f"transformers.models.{module}.modeling_{module}:{prefix}{part}.forward"] = digest
    return found


QUICK_ATTENTION: Final = {
    "diffusers.models.attention_processor:Attention.forward": "e6822ac3500626c7",
    "diffusers.models.transformers.transformer_flux:FluxAttention.forward": "b3d9909f9ecc8879",
}
QUICK_POSITIONS: Final = {
    "diffusers.models.transformers.transformer_flux:FluxPosEmbed.forward": "86699659bfe2af8b",
    "diffusers.models.embeddings:FluxPosEmbed.forward": "c0bac63d1c2b53c6",
}
QUICK_GATES: Final = {"diffusers.models.activations:GEGLU.forward": "28ea6dd13c76df98"}
QUICK_BERT: Final = _bert_forwards()
SHIMS: Final = (
    Shim(
        "quick forwards of attention, positions and gated features",
        "diffusers' own run, some 5 % slower",
        sources={**QUICK_ATTENTION, **QUICK_POSITIONS, **QUICK_GATES},
        is_needed=False,
    ),
    Shim("quick layers of BERT", "transformers' own run, slower", sources=QUICK_BERT, is_needed=False),
    Shim(
        "layers with hooks, which quick products leave alone",
        "no BERT is loaded",
        used=("torch.nn:Module._forward_hooks", "torch.nn:Module._forward_pre_hooks"),
    ),
    Shim(
        "float8 products on accelerators",
        "float8 checkpoints are not served on accelerators",
        used=("torch:_scaled_mm",),
        is_needed=False,
    ),
    Shim(
        "names of tensors in old checkpoints",
        "old checkpoints are refused",
        used=(
            "diffusers:ModelMixin._fix_state_dict_keys_on_load",
            "transformers.conversion_mapping:get_model_conversion_mapping",
            "transformers.core_model_loading:WeightRenaming",
            "transformers.core_model_loading:rename_source_key",
            "transformers:PreTrainedModel._keys_to_ignore_on_load_missing",
            "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected",
            "diffusers:ModelMixin._keys_to_ignore_on_load_unexpected",
        ),
    ),
    Shim(
        "layouts of checkpoints that transformers converts",
        "language models that transformers computes are not served",
        used=(
            "transformers.core_model_loading:WeightConverter",
            "transformers.core_model_loading:dot_natural_key",
        ),
        is_needed=False,
    ),
    Shim(
        "images of chats",
        "language models see no images",
        used=("transformers:ProcessorMixin._process_images",),
        is_needed=False,
    ),
    Shim(
        "experts of language models",
        "language models with experts that transformers computes are not served",
        used=("transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts._apply_gate",),
        is_needed=False,
    ),
    Shim(
        "language models with a cache of their own",
        "hybrid and recurrent language models are not served",
        used=(
            "transformers:GenerationMixin._prepare_cache_for_generation",
            "transformers:GenerationMixin._supports_logits_to_keep",
            "transformers:GenerationMixin._update_model_kwargs_for_generation",
        ),
        is_needed=False,
    ),
    Shim(
        "chat templates as transformers renders them",
        "no chat is served",
        used=(
            "transformers.utils.chat_template_utils:_compile_jinja_template",
            "transformers:PretrainedConfig._attn_implementation",
        ),
    ),
    Shim(
        "assistants, whose layers have no keys of their own",
        "Gemma 4's assistants draft for no model",
        changed={
            "transformers:Gemma4TextConfig.kv_sharing_modes": "transformers.models.gemma4.modeling_gemma4",
            "transformers:Gemma4UnifiedTextConfig.kv_sharing_modes": (
                "transformers.models.gemma4_unified.modeling_gemma4_unified"
            ),
        },
        is_needed=False,
    ),
    Shim(
        "tokens of a denoiser on several ranks",
        "no ranks share the tokens of a denoiser",
        used=("diffusers.models.transformers.transformer_flux:FluxTransformer2DModel._cp_plan",),
        is_needed=False,
    ),
    Shim(
        "pipelines of diffusers as they are",
        "stock pipelines are not served",
        used=("diffusers:DiffusionPipeline._get_signature_keys",),
        is_needed=False,
    ),
)

_logger = logging.getLogger("atelier.engines")


def has_known_forward(cls: type[Any], sources: Mapping[str, str]) -> bool:
    """Return whether the class is among `sources`, and its forward the one that our code stands in for."""
    name = f"{cls.__module__}:{cls.__qualname__}.forward"
    return name in sources and _is_unchanged(cls.forward, name, sources[name])


def has_known_layers(cls: type[Any]) -> bool:
    """Return whether the class is BERT's or a relative's, and the forwards of all its parts are the known ones."""
    module = sys.modules[cls.__module__]
    parts = {name: digest for name, digest in QUICK_BERT.items() if name.startswith(f"{module.__name__}:")}
    return has_known_forward(cls, QUICK_BERT) and all(
        _is_unchanged(getattr(getattr(module, _class_of(name), None), "forward", None), name, digest)
        for name, digest in parts.items()
    )


def _class_of(name: str) -> str:
    return name.partition(":")[2].removesuffix(".forward")


@functools.cache
def _is_unchanged(forward: Any, name: str, digest: str) -> bool:
    """Return whether a forward has this digest, and warn once when it has not."""
    if source_digest(forward) == digest:
        return True
    _logger.warning(f"{name} of this version is another one: the library's own code runs, which is slower")
    return False


def attends_by_sdpa(config: Any) -> bool:
    """Return whether a model of transformers' with this config attends by torch's scaled_dot_product_attention."""
    return bool(config._attn_implementation == "sdpa")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module does something before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def scaled_product(values: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the product of two float8 matrices with their scales (torch._scaled_mm)."""
    import torch

    product: torch.Tensor = torch._scaled_mm(values, weight, **options)
    return product


def rename_by_diffusers(module: Any, names: Collection[str]) -> dict[str, str] | None:
    """Return names as the module has them today -> as an old checkpoint has them; None for one of another library."""
    if not hasattr(module, "_fix_state_dict_keys_on_load"):  # attention blocks of old VAEs
        return None
    found = {name: name for name in names}
    module._fix_state_dict_keys_on_load(found)
    return found


def rename_by_transformers(module: Any, names: Collection[str], expected: Mapping[str, Any]) -> dict[str, str | None]:
    """Return names as an old checkpoint has them -> as the module has them today, None where the layout is another."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
    found = {}
    for name in names:
        new_name, converter = rename_source_key(name, renamings, converters, module.base_model_prefix, expected)
        found[name] = new_name if converter is None else None
    return found


class CheckpointLayout(NamedTuple):
    """The targets of a checkpoint's tensors: by the module's names those of one, and the conversions of several."""

    renamed: dict[str, str]
    merged: dict[str, tuple[Any, list[tuple[str, str]]]]  # by the first name: a converter, tensors and their patterns


def checkpoint_layout(module: Any, names: Collection[str]) -> CheckpointLayout:
    """Sort a checkpoint's names as transformers does when it loads one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    expected, prefix = module.state_dict(), module.base_model_prefix
    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    layout = CheckpointLayout({}, {})
    for name in sorted(names, key=dot_natural_key):  # experts are stacked in the order that they come in
        new_name, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if new_name not in expected and name in expected:
            new_name, pattern = name, None
        if pattern is None:
            layout.renamed[new_name] = name
        else:
            _, parts = layout.merged.setdefault(new_name, (copy.deepcopy(by_pattern[pattern]), []))
            parts.append((name, pattern))
    return layout


def generate_step(
    module: Any, ids: torch.Tensor, kept: dict[str, Any], num_known: int, all_rows: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute what is new of tokens (1, T), as `generate` does: all but the first `num_known`, of which `kept` knows.

    Return the logits (1, N, vocabulary), of the last token at least or of all new ones, and what to keep.
    """
    import torch

    if not num_known:
        module._prepare_cache_for_generation(module.generation_config, kept, None, 1, ids.shape[1])
    given = dict(kept)
    if "position_ids" in inspect.signature(module.forward).parameters:
        given["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
    inputs = module.prepare_inputs_for_generation(
        ids,
        next_sequence_length=ids.shape[1] - num_known,
        is_first_iteration=not num_known,
        use_cache=True,
        attention_mask=torch.ones_like(ids),
        **given,
    )
    if not all_rows and module._supports_logits_to_keep():
        inputs["logits_to_keep"] = 1
    output = module(**inputs, return_dict=True)
    return output.logits, module._update_model_kwargs_for_generation(output, dict(kept))


def apply_gate(experts: Any, inner: torch.Tensor) -> torch.Tensor:
    """Apply the gate of a class of experts to gates and values, (N, 2 * inner size), between its two products."""
    gated: torch.Tensor = experts._apply_gate(inner)
    return gated


def without_own_keys(config: Any) -> Any:
    """Return a decoder's config whose layers all take keys and values from elsewhere.

    transformers has classes for these, and since 5.23 an error where they are made.
    """
    kind = type(config)
    modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    found = copy.copy(config)
    found.__class__ = type(kind.__name__, (kind,), {"kv_sharing_modes": modes, "__module__": kind.__module__})
    return found


def process_image(processor: Any, image: Any, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return an image as the model of a processor takes it, and what stands for it in a text."""
    known = inspect.signature(processor._process_images).parameters
    own = {name: getattr(processor, name) for name in known if hasattr(processor, name)}  # of GOT-OCR, its rules
    inputs, texts = processor._process_images([[image]], return_tensors="pt", **(own | dict(options)))
    return inputs, texts[0]


def ignored_names(module: Any) -> tuple[list[str], list[str]]:
    """Return patterns of the tensors that a checkpoint may lack, and of those that it may have beside the module's."""
    missing = getattr(module, "_keys_to_ignore_on_load_missing", None)
    unexpected = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    return list(missing or ()), list(unexpected or ())


def chat_environment() -> Any:
    """Return the jinja environment in which transformers compiles chat templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


def pipeline_arguments(cls: Any) -> tuple[Collection[str], Collection[str]]:
    """Return the names of the parts and of the options that a pipeline class of diffusers is made of."""
    names, options = cls._get_signature_keys(cls)
    return names, options


class TokenCut(NamedTuple):
    """The dimension of a tensor's tokens, if it has so many dimensions: any other tensor has none."""

    dimension: int
    num_dimensions: int


class SequencePart(NamedTuple):
    """The cuts of tokens around modules of a path, `*` for a number: of `inputs` by name, and of `outputs` by place.

    `gathered` is the dimension of the tokens in an output that is made whole again.
    """

    path: str
    inputs: Mapping[str, TokenCut]
    outputs: Mapping[int, TokenCut]
    gathered: int | None


@functools.cache
def sequence_plan(kind: type[nn.Module]) -> tuple[SequencePart, ...]:
    """Return diffusers' plan for ranks that share a class's tokens; empty without one, or for one of another form."""
    found = []
    for path, plan in (getattr(kind, "_cp_plan", None) or {}).items():
        if isinstance(plan, Mapping):
            cuts = {key: TokenCut(one.split_dim, one.expected_dims) for key, one in plan.items()}
            inputs = {key: cut for key, cut in cuts.items() if isinstance(key, str)}
            outputs = {key: cut for key, cut in cuts.items() if isinstance(key, int)}
            if any(isinstance(key, int) != bool(one.split_output) for key, one in plan.items()):
                return ()
            found.append(SequencePart(path, inputs, outputs, None))
        elif hasattr(plan, "gather_dim"):
            found.append(SequencePart(path, {}, {}, plan.gather_dim))
        else:
            return ()
    return tuple(found)
