"""A GGUF model: one file, or a split set `<name>-00001-of-0000N.gguf` that belongs together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weights.errors import FormatError
from weights.formats.gguf import GgufHeader, GgufValue, read_gguf
from weights.formats.tensors import FileTensor
from weights.formats.untrusted import shown

_MAX_SPLITS = 9999
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Beginnings of `general.architecture` that mean a text generator; the rest are encoders, projectors, image models.
# fmt: off
_LLM_FAMILIES = (
    "afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bitnet", "bloom", "chatglm",
    "codeshell", "cohere2", "command-r", "dbrx", "deci", "deepseek", "dots1", "ernie4_5", "exaone", "falcon",
    "gemma", "glm", "gpt-oss", "gpt2", "gptj", "gptneox", "granite", "grok", "grovemoe", "hunyuan", "internlm2",
    "jais", "jamba", "kimi-linear", "lfm2", "llama", "maincoder", "mamba", "mimo2", "minicpm", "minimax-m2",
    "mistral", "mpt", "nemotron", "olmo", "openelm", "orion", "pangu-embedded", "phi", "plamo", "plm", "qwen",
    "refact", "rwkv", "seed_oss", "smallthinker", "smollm3", "stablelm", "starcoder", "step35", "xverse",
)
# fmt: on
# `general.architecture` of denoisers, as ComfyUI's files have it -> the classes of diffusers that such a file may be.
DENOISERS: Final[Mapping[str, tuple[str, ...]]] = {
    "flux": ("FluxTransformer2DModel", "Flux2Transformer2DModel"),
    "sd3": ("SD3Transformer2DModel",),
    "qwen_image": ("QwenImageTransformer2DModel",),
    "lumina2": ("ZImageTransformer2DModel", "Lumina2Transformer2DModel"),
}
_NOT_LLMS = {"gemma-embedding", "llama-embed"}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The files of a model in their order, and what their headers say together."""

    headers: Mapping[Path, GgufHeader]
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, FileTensor]

    @property
    def architecture(self) -> str | None:
        """Name of the architecture in the metadata; None without one."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None

    @property
    def is_llm(self) -> bool:
        """Return whether the file is a language model, and not an adapter or a projector."""
        name = self.architecture or ""
        return name not in _NOT_LLMS and name.startswith(_LLM_FAMILIES)


def gguf_set(path: Path) -> list[Path]:
    """Return the files that `path`, one of a split set, stands for, in order. Raises FormatError if one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MAX_SPLITS:
        raise FormatError(f"{path}: split {match['number']} of {match['count']} cannot be")
    files = [path.parent / f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise FormatError(f"{file}: missing, one of the {count} files of {path.name}")
    return files


def folder_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder holding one model; none without. Raises FormatError for several models."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("."))
    if not files:
        return []
    first = gguf_set(files[0])
    others = [file.name for file in files if file not in first]
    if others:
        raise FormatError(f"{folder}: several GGUF models ({first[0].name}, {', '.join(others)}); name one file")
    return first


def read_gguf_model(files: list[Path]) -> GgufModel:
    """Read the headers of a set. Raises FormatError when the files do not belong together."""
    headers = {file: read_gguf(file) for file in files}
    tensors: dict[str, FileTensor] = {}
    for number, (file, header) in enumerate(headers.items()):
        _check_split(file, header, number, len(files))
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise FormatError(f"{file}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    first = headers[files[0]]
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and not _equals(total, len(tensors)):
        raise FormatError(f"{files[0]}: split.tensors.count is {shown(total)}, the files have {len(tensors)} tensors")
    return GgufModel(headers, first.metadata, tensors)


def _check_split(file: Path, header: GgufHeader, number: int, count: int) -> None:
    found = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
    if not (_equals(found[0], number) and (_equals(found[1], count) or (count == 1 and _equals(found[1], 0)))):
        raise FormatError(f"{file}: says split.no {shown(found[0])} of {shown(found[1])}, expected {number} of {count}")


def _equals(value: GgufValue, number: int) -> bool:
    return type(value) is int and value == number
