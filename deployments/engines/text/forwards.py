"""The forward of each family of encoders, over texts of several lengths at once.

Texts are padded at the end to the longest of the forward. The padding stays out of their outputs in these ways:

- CLIP is causal, so a token never sees what comes after it; it needs no mask. Its positions count from the first
  token. It pools at the first end token: the filler must not be taken for one (`filler_id`).
- T5 attends both ways, under a mask. Its relative positions are differences, which padding at the end leaves alone.
- A language model that conditions images is causal, and masks padding.
- BERT and its relatives attend both ways, under a mask. Positions count from the first token; RoBERTa counts tokens
  that are not padding.

Outputs equal those of each text alone up to rounding (measured: 2e-6 of the largest value in float32, 2 units in the
last place in bfloat16), and BERT's bit for bit where the kernels compute its layers (`native_encoder.py`). Elsewhere
bitwise equality is impossible in a batch, even of equal lengths: torch chooses the kernel of a matrix product by its
number of rows. Sources: transformers 5.23, `modeling_clip.py`, `modeling_t5.py`,
`modeling_bert.py`, `modeling_roberta.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.nn import functional as F

from deployments.engines.libraries.library_seam import attends_by_sdpa, has_known_layers
from deployments.engines.nn.few_rows import multiply_few
from deployments.engines.records.protocol import LAST, PENULTIMATE, ClipLayer, EngineError
from deployments.engines.text.forward_plan import ForwardLimits
from deployments.engines.text.known import PROMPT_READERS
from deployments.engines.text.native_encoder import encoded
from deployments.engines.text.sentence_layers import Pooling
from weights.formats.classifier import SUFFIX
from weights.platform.torch_seam import is_fake

PER_TEXT = ("pooled", "embedding")  # outputs with one vector per text; the others have a row per token


def text_kind(tokens: int, *, is_padded: bool) -> Hashable:
    """Return the kind of forwards of texts of a padded length; `is_padded`: padded by stock's rule.

    Stock pads to few lengths, and each is recorded; others are interpolated.
    """
    return "texts", tokens, is_padded


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of text encoders: its `run` function, and the names of its `outputs` for any pooling.

    `run` makes outputs with a leading batch axis of a module, ids, a 0/1 mask, both (B, L), and a pooling; those of
    classifiers also take `token_type_ids`.
    """

    run: Callable[..., dict[str, torch.Tensor]]
    outputs: tuple[str, ...]
    is_clip: bool = False
    is_classifier: bool = False


def encoder_family_of(class_name: str) -> EncoderFamily:
    """Return the family of a class; an unknown one counts as giving token vectors, as BERT does."""
    return FAMILIES.get(class_name, CLASSIFIERS if class_name.endswith(SUFFIX) else SENTENCES)


def filler_id(family: EncoderFamily, config: Any, pad_id: int) -> int:
    """Return the filler of shorter texts. CLIP pools at the first end token, by old configs at the highest id.

    Decoders read their scores at the last token that is not their config's filler.
    """
    if family.is_classifier:
        own: int | None = config.get_text_config().pad_token_id
        return pad_id if own is None else own
    if not family.is_clip:
        return pad_id
    return 0 if config.eos_token_id != 0 else 1


def _run_clip(
    module: Any,
    ids_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    pooling: Pooling | None,
    layers: Collection[ClipLayer] = (PENULTIMATE,),
) -> dict[str, torch.Tensor]:
    out = module(ids_BL, output_hidden_states=True)
    pooled = out.text_embeds if hasattr(out, "text_embeds") else out.pooler_output
    return {"pooled": pooled} | {clip_layer_name(layer): _clip_layer(module, out, layer) for layer in layers}


def _clip_layer(module: Any, out: Any, layer: ClipLayer) -> torch.Tensor:
    if layer == LAST:
        return out.last_hidden_state
    vectors_BLD = out.hidden_states[-1 - layer.num_skipped]
    norm = getattr(module, "text_model", module).final_layer_norm
    return norm(vectors_BLD) if layer.is_normed else vectors_BLD


def clip_layer_name(layer: ClipLayer) -> str:
    """Return the name of a layer's vectors in a CLIP's outputs."""
    return f"layer -{layer.num_skipped}{' normed' * layer.is_normed}"


def _run_t5(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
) -> dict[str, torch.Tensor]:
    hidden_BLD = module(ids_BL, attention_mask=mask_BL).last_hidden_state
    return {"hidden": hidden_BLD} | ({"embedding": pooling(hidden_BLD, mask_BL)} if pooling else {})


def _run_sentences(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
) -> dict[str, torch.Tensor]:
    if has_bert_layers(module):
        hidden_BLD = token_vectors(module, ids_BL, mask_BL)
    else:
        hidden_BLD = module(ids_BL, attention_mask=mask_BL).last_hidden_state
    return {"embedding": (pooling or Pooling())(hidden_BLD, mask_BL)}


def has_bert_layers(module: Any) -> bool:
    """Return whether `token_vectors` equals this module's forward.

    True for classes with the same parts in the same order; stock computes their positions, in which they differ.
    """
    return has_known_layers(type(module)) and not module.config.is_decoder and attends_by_sdpa(module.config)


def token_vectors(module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Return the last layer's vectors (B, L, D) of ids and a 0/1 mask, both (B, L). Not for training.

    Of a short text's forward, transformers' own Python is a tenth to a sixth (5.23): masks, signatures looked up anew,
    a dozen calls of modules that only call others, and a pooler whose result no embedding needs. The parts with weights
    are called as stock calls them, and the results are the same, bit for bit, but for products of few rows
    (`nn/few_rows.py`), and where the kernels have all layers (`native_encoder.py`).
    """
    hidden_BLD: torch.Tensor = module.embeddings(input_ids=ids_BL)
    if (found := encoded(module, hidden_BLD, mask_BL)) is not None:
        return found
    # The only text of a forward has no padding; for a recorded one this is unknown.
    is_whole = len(mask_BL) == 1 or (not is_fake(mask_BL) and bool(mask_BL.all()))
    attended_B11L = None if is_whole else mask_BL[:, None, None, :].bool()
    for layer in module.encoder.layer:
        hidden_BLD = _attend(layer.attention, hidden_BLD, attended_B11L)
        inner_BLD = layer.intermediate.intermediate_act_fn(multiply_few(layer.intermediate.dense, hidden_BLD))
        hidden_BLD = layer.output.LayerNorm(multiply_few(layer.output.dense, inner_BLD) + hidden_BLD)
    return hidden_BLD


def _attend(attention: Any, hidden_BLD: torch.Tensor, attended_B11L: torch.Tensor | None) -> torch.Tensor:
    heads, output = attention.self, attention.output
    split = (*hidden_BLD.shape[:2], -1, heads.attention_head_size)
    query, key, value = (
        multiply_few(product, hidden_BLD).view(split).transpose(1, 2)
        for product in (heads.query, heads.key, heads.value)
    )
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=attended_B11L, scale=heads.scaling)
    attended_BLD = multiply_few(output.dense, found.transpose(1, 2).flatten(2))
    result: torch.Tensor = output.LayerNorm(attended_BLD + hidden_BLD)
    return result


def _run_nothing(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
) -> dict[str, torch.Tensor]:
    raise EngineError(f"a {type(module).__name__} is asked for layers of its hidden states, and gives nothing else")


def _run_classifier(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None, **types: torch.Tensor
) -> dict[str, torch.Tensor]:
    return {"embedding": module(ids_BL, attention_mask=mask_BL, **types).logits.float()}


def run_layers(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, layers: Sequence[int], **seen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return hidden states (B, L, D) of a language model by `layer_name`. Its head is not computed.

    `seen` are the inputs of its vision tower. Raises EngineError for a missing layer.
    """
    base = getattr(module, module.base_model_prefix, module)
    options = {"output_hidden_states": True, "use_cache": False}
    states = base(input_ids=ids_BL, attention_mask=mask_BL, **options, **seen).hidden_states
    if beyond := [layer for layer in layers if not -len(states) <= layer < len(states)]:
        raise EngineError(f"a text encoder of {len(states) - 1} layers has no hidden states number {beyond[0]}")
    return {layer_name(layer): states[layer] for layer in layers}


def layer_name(layer: int) -> str:
    """Return the name of the hidden states of a layer among an encoder's outputs."""
    return f"layer {layer}"


# Models that mix tokens despite a mask: by Fourier transforms, convolutions, hashes or landmarks. Found by running tiny
# random models of transformers' classes alone and with padding after them.
_MIXING: Final = frozenset(("convbert", "fnet", "funnel", "longformer", "nystromformer", "reformer", "xlnet", "yoso"))


def limits_of(module: Any, family: EncoderFamily, limits: ForwardLimits) -> ForwardLimits:
    """Return limits within which a text's outputs do not depend on the texts that share its forward."""
    config = module.config
    if family.is_classifier and config.get_text_config().pad_token_id is None:
        return replace(limits, max_tokens=1)  # a decoder would not find the last token of a text before its filler
    return replace(limits, max_padding=0.0) if config.model_type in _MIXING else limits


CLIP = EncoderFamily(_run_clip, ("pooled", "penultimate"), is_clip=True)
FAMILIES: Mapping[str, EncoderFamily] = {
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": CLIP,
    "T5EncoderModel": EncoderFamily(_run_t5, ("hidden",)),
    **dict.fromkeys(PROMPT_READERS, EncoderFamily(_run_nothing, ())),
}
SENTENCES = EncoderFamily(_run_sentences, ("embedding",))
CLASSIFIERS = EncoderFamily(_run_classifier, ("embedding",), is_classifier=True)  # their one vector are the logits
