"""The parts of a model that each service builds, and so the memory that they need there at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.llm.models.known import has_own_layers
from deployments.engines.llm.models.stock_classes import PAGED
from deployments.engines.stock.known import is_stock_class, knows_class
from deployments.engines.stock.text_parts import text_parts
from weights.formats.own_draft import DRAFT, PREFIX
from weights.memory.layer_plan import DecoderSizes, decoder_sizes, layer_of
from weights.memory.needs import Needs
from weights.records.manifest import Manifest, ModelKind

_DENOISERS: Final = frozenset(family.denoiser_name for family in FAMILIES.values())
_TEXTS: Final = ("embedding", "reranker", "classifier", "head")
_WHOLE: Final = ("llm", "upscaler")


class PartSizes(NamedTuple):
    """A component: the library of its class, and the bytes of its tensors as the store has them."""

    library: str
    tensors: Mapping[str, int]


def needs_of_manifest(manifest: Manifest) -> Needs:
    """Return the needs of a model in the store."""
    parts = {
        name: PartSizes(part.library, {key: tensor.nbytes for key, tensor in part.tensors.items()})
        for name, part in manifest.components.items()
    }
    return needs_of(manifest.kind, manifest.class_name or "", parts)


def needs_of(kind: ModelKind, class_name: str, parts: Mapping[str, PartSizes]) -> Needs:
    """Return the needs of a model with these components."""
    is_stock = kind == "diffusion" and is_stock_class(class_name)
    texts = text_parts(class_name) if is_stock and knows_class(class_name) else frozenset()
    services: dict[str, dict[str, int]] = {"worker": {}, "text_encoder": {}}
    for name, part in parts.items():
        if is_stock:
            section = "text_encoder" if name in texts else "worker"
        elif kind in _TEXTS or name.startswith("text_encoder"):
            section = "text_encoder"
        elif kind in _WHOLE or part.library == "diffusers":
            section = "worker"
        else:
            continue
        services[section][name] = sum(part.tensors.values())
    decoder = divided = None
    if kind == "llm" and "model" in parts:
        of_draft = {f"{PREFIX}{name}": size for name, size in parts[DRAFT].tensors.items()} if DRAFT in parts else {}
        has_layers = has_own_layers(class_name)
        divided = _layers_of({**parts["model"].tensors, **of_draft}) if has_layers or class_name in PAGED else None
        decoder = divided if has_layers else None
    return Needs(services, tuple(sorted(_DENOISERS & parts.keys())), decoder, divided)


def _layers_of(tensors: Mapping[str, int]) -> DecoderSizes:
    """Return the sizes of a decoder without KV caches."""
    num_layers = 1 + max((layer for name in tensors if (layer := layer_of(name)) is not None), default=-1)
    return decoder_sizes(tensors, num_layers, [0] * (num_layers + 1))
