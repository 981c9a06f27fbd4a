"""Names of files, as ComfyUI's loaders say them, to registered models. Pure.

ComfyUI's loaders name a denoiser, text encoders and a VAE by their files, and a cluster has one model of all of them.
Each is known by its id, by its own file, and by the names that its entry lists (`file_names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from cluster.registry.directory import ModelRecord
from configs.model import ModelConfig
from deployments.workflows.backend import Folder
from weights.formats.learned_words import WORDS_CLASS

FOLDERS: Final[tuple[Folder, ...]] = (
    *("checkpoints", "loras", "vae", "text_encoders", "diffusion_models", "controlnet", "clip_vision"),
    *("upscale_models", "embeddings", "model_patches"),
)
ALIASES: Final[Mapping[str, Folder]] = {
    "clip": "text_encoders",
    "unet": "diffusion_models",
    "t2i_adapter": "controlnet",
}
_ENDINGS: Final = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
_PLAIN: Final = _ENDINGS[0]  # of a model that has a folder and no file
_FOLDERS_OF: Final[Mapping[str, tuple[Folder, ...]]] = {
    "diffusion": ("checkpoints", "diffusion_models", "text_encoders", "vae", "clip_vision"),
    "llm": ("text_encoders",),
    "adapter": ("loras",),
    "controlnet": ("controlnet", "model_patches"),
    "upscaler": ("upscale_models",),
}


class ModelFiles:
    """The names of the models that can be asked now."""

    def __init__(self, records: Iterable[ModelRecord]) -> None:
        self._models: dict[Folder, dict[str, list[str]]] = {folder: {} for folder in FOLDERS}
        for record in records:
            if record.serves and record.state != "does_not_fit":
                for folder in _folders_of(record):
                    for name in _names_of(record, folder):
                        known = self._models[folder].setdefault(name, [])
                        if record.id not in known:
                            known.append(record.id)

    def names(self, folder: Folder) -> Sequence[str]:
        """Return the names that a loader of this folder may say."""
        return list(self._models[folder])

    def models(self, folder: Folder, name: str) -> Sequence[str]:
        """Return the models that have a file of this name."""
        return self._models[folder].get(name, ())


def _folders_of(record: ModelRecord) -> tuple[Folder, ...]:
    if record.class_name == WORDS_CLASS:
        return ("embeddings",)
    return _FOLDERS_OF.get(record.kind or "", ())


def _names_of(record: ModelRecord, folder: Folder) -> Iterator[str]:
    """Yield the names of a model's file in a folder, the first as people know it."""
    entry = record.entry
    own = PurePosixPath(str(entry.path).rstrip("/")).name if entry is not None else ""
    if isinstance(entry, ModelConfig) and folder == "vae":
        own = entry.vae.name if entry.vae is not None else ""
    if own.lower().endswith(_ENDINGS) and folder != "text_encoders":
        yield own
    if entry is not None:
        yield from entry.file_names
    if not record.id.lower().endswith(_ENDINGS):
        yield record.id + _PLAIN
    yield record.id
