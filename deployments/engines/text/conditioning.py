"""What each pipeline class wants from its text encoders, as data.

A service goes: `plan_conditioning` -> tokenize each item, into chunks if so planned, and `level_chunks` ->
look up or encode each (component weights, token ids) once -> `join_chunks` -> `assemble_conditioning`.
Nothing here runs a model, so the plan can be made and cached anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from configs.model import LongText, TextPadding
from deployments.engines.protocol import DiffusionRequest, EngineError
from deployments.engines.text.tokens import check_rule

Role = Literal["prompt", "negative"]
PIPELINE_CLASSES = ("FluxPipeline", "StableDiffusionXLPipeline")
MAX_T5_TOKENS = 512  # FluxPipeline's default and upper bound
Encoded = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """One text for one component. `max_length` None is the tokenizer's own."""

    component: str
    text: str
    max_length: int | None
    role: Role
    padding: TextPadding = "stock"
    long_text: LongText = "truncate"


def uses_negative(class_name: str, request: DiffusionRequest, negative_prompt: str | None) -> bool:
    """Whether the stock pipeline would run classifier-free guidance for this request."""
    if _check_class(class_name) == "FluxPipeline":
        return request.true_cfg_scale > 1 and negative_prompt is not None
    return request.guidance_scale > 1


def plan_conditioning(
    class_name: str,
    model_index: Mapping[str, Any],
    prompt: str,
    negative_prompt: str | None,
    *,
    max_sequence_length: int | None = None,
    use_negative: bool,
    text_padding: TextPadding = "stock",
    long_text: LongText = "truncate",
) -> tuple[EncodeItem, ...]:
    """What to encode. `max_sequence_length` is the T5 length of Flux; SDXL has none and ignores it.

    As in stock, a negative prompt of None means no guidance for Flux, and for SDXL either zeros (no item)
    or the empty text, by `force_zeros_for_empty_prompt` of `model_index`; an empty *string* is a text and
    is encoded.

    `text_padding` "trimmed" gives Flux the rows of the prompt's own tokens, computed under a mask; its CLIP's
    pooled row does not depend on padding. `long_text` is for texts beyond the limit. "chunk" is for SDXL, which
    takes any number of CLIP's 77-token pieces. Flux's CLIP, whose one vector only tints what T5 says, always
    truncates. Raises EngineError for what a pipeline cannot take.
    """
    _check_class(class_name)
    _check_rules(class_name, text_padding, long_text)
    t5_tokens = MAX_T5_TOKENS if max_sequence_length is None else max_sequence_length
    if not 1 <= t5_tokens <= MAX_T5_TOKENS:
        raise EngineError(f"max_sequence_length {t5_tokens}: expected 1 to {MAX_T5_TOKENS}")
    texts: list[tuple[Role, str]] = [("prompt", prompt)]
    if use_negative:
        if negative_prompt is not None:
            texts.append(("negative", negative_prompt))
        elif class_name == "StableDiffusionXLPipeline" and not _zeros_for_no_prompt(model_index):
            texts.append(("negative", ""))
    parts: tuple[tuple[str, int | None, LongText], ...]
    if class_name == "FluxPipeline":
        parts = (("text_encoder", None, "truncate"), ("text_encoder_2", t5_tokens, long_text))
    else:
        parts = (("text_encoder", None, long_text), ("text_encoder_2", None, long_text))
    return tuple(
        EncodeItem(component, text, max_length, role, text_padding, rule)
        for role, text in texts
        for component, max_length, rule in parts
    )


def assemble_conditioning(
    class_name: str,
    model_index: Mapping[str, Any],
    outputs: Mapping[EncodeItem, Encoded],
    *,
    use_negative: bool = True,
) -> dict[str, torch.Tensor]:
    """The tensors that a pipeline's `start` takes: prompt_embeds (1, L, D), pooled_prompt_embeds (1, P),
    and the same with `negative_` in front where guidance has something to guide away from.

    `outputs` maps the plan's items to what `TextEncoder.encode` gave. `use_negative` False saves SDXL's
    zeros.
    """
    _check_class(class_name)
    by_role: dict[Role, dict[str, Encoded]] = {}
    for item, encoded in outputs.items():
        by_role.setdefault(item.role, {})[item.component] = encoded
    join = _join_flux if class_name == "FluxPipeline" else _join_sdxl
    conditioning = dict(zip(("prompt_embeds", "pooled_prompt_embeds"), join("prompt", by_role), strict=True))
    negative_names = ("negative_prompt_embeds", "negative_pooled_prompt_embeds")
    if "negative" in by_role:
        conditioning |= zip(negative_names, join("negative", by_role), strict=True)
    elif use_negative and class_name == "StableDiffusionXLPipeline" and _zeros_for_no_prompt(model_index):
        conditioning |= zip(negative_names, [torch.zeros_like(t) for t in conditioning.values()], strict=True)
    return conditioning


def _join_flux(role: Role, by_role: Mapping[Role, Mapping[str, Encoded]]) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = _output(by_role, role, "text_encoder_2", "hidden")
    pooled = _output(by_role, role, "text_encoder", "pooled")
    return hidden.unsqueeze(0), pooled.unsqueeze(0)


def _join_sdxl(role: Role, by_role: Mapping[Role, Mapping[str, Encoded]]) -> tuple[torch.Tensor, torch.Tensor]:
    first = _output(by_role, role, "text_encoder", "penultimate")
    second = _output(by_role, role, "text_encoder_2", "penultimate")
    pooled = _output(by_role, role, "text_encoder_2", "pooled")
    if len(first) != len(second):
        raise EngineError(
            f"text_encoder gave {len(first)} tokens and text_encoder_2 {len(second)}: "
            "StableDiffusionXLPipeline needs tokenizers of one length"
        )
    return torch.cat([first, second.to(first.device)], dim=-1).to(second.dtype).unsqueeze(0), pooled.unsqueeze(0)


def _output(by_role: Mapping[Role, Mapping[str, Encoded]], role: Role, component: str, name: str) -> torch.Tensor:
    encoded = by_role.get(role, {}).get(component, {})
    if name not in encoded:
        raise EngineError(f"the {role} has no {name!r} of {component!r} (given: {', '.join(encoded) or 'nothing'})")
    return encoded[name]


def _check_rules(class_name: str, text_padding: str, long_text: str) -> None:
    check_rule("text_padding", text_padding, TextPadding)
    check_rule("long_text", long_text, LongText)
    if class_name == "FluxPipeline" and long_text == "chunk":
        raise EngineError(
            f"long_text 'chunk' is for CLIP, and FluxPipeline reads prompts with T5, which takes up to {MAX_T5_TOKENS} "
            "tokens in one piece; use truncate or error"
        )
    if class_name == "StableDiffusionXLPipeline" and text_padding == "trimmed":
        raise EngineError(
            "text_padding 'trimmed' is for T5: the UNet of StableDiffusionXLPipeline was trained on CLIP's padding; "
            "use stock"
        )


def _zeros_for_no_prompt(model_index: Mapping[str, Any]) -> bool:
    return bool(model_index.get("force_zeros_for_empty_prompt", True))


def _check_class(class_name: str) -> str:
    if class_name not in PIPELINE_CLASSES:
        raise EngineError(f"unknown pipeline class {class_name!r} (known: {', '.join(PIPELINE_CLASSES)})")
    return class_name
