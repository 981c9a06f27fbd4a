"""A language model and its draft model as the one component that a replica builds: they share steps and blocks."""

from __future__ import annotations

from weights.formats.own_draft import DRAFT, PREFIX
from weights.records.manifest import Manifest


def with_draft_parts(manifest: Manifest) -> Manifest:
    """Return the manifest as replicas use it: a draft model's tensors are among the model's, under names of their own.

    In the store the two are apart, each shared with equal models.
    """
    draft, model = (manifest.components.get(name) for name in (DRAFT, "model"))
    if draft is None or model is None or manifest.kind != "llm":
        return manifest
    tensors = {**model.tensors, **{f"{PREFIX}{name}": ref for name, ref in draft.tensors.items()}}
    config_hash = f"{model.config_hash}+{draft.config_hash}"
    both = model.model_copy(update={"tensors": tensors, "config_hash": config_hash})
    others = {name: part for name, part in manifest.components.items() if part is not draft}
    return manifest.model_copy(update={"components": {**others, "model": both}})
