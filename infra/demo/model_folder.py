"""The folder of the demo models, and their form: bf16, and nothing of the machine in the files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModelMixin

MODELS_DIR = Path(__file__).resolve().parent / "models"
# What the libraries note about the run that saved a file: paths, a tokenizer's last call.
RUN_TRACES = (
    "_name_or_path",
    "is_local",
    "local_files_only",
    "max_length",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "padding_side",
    "stride",
    "truncation_side",
    "truncation_strategy",
)


def store(pipeline: DiffusionPipeline, out: Path) -> None:
    """Write the pipeline in bf16, half the size of what trains; the pipeline stays float32."""
    parts = copy.deepcopy(pipeline.components)
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16)
    type(pipeline)(**parts).save_pretrained(out)
    tidy(out)


def store_model(model: ModelMixin, out: Path) -> None:
    """The same for one model of a pipeline."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tidy(out)


def tidy(folder: Path) -> None:
    """Drop traces of the run, so that equal models are equal files; make all files readable."""
    for path in folder.rglob("*"):
        if path.name in ("config.json", "tokenizer_config.json"):
            _rewrite(path, RUN_TRACES, {})
        if path.name == "tokenizer.json":
            _rewrite(path, (), {"padding": None, "truncation": None})
        if path.is_file():
            path.chmod(0o644)


def _rewrite(path: Path, drop: tuple[str, ...], replace: dict[str, None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in content.items() if name not in drop}
    text = json.dumps(kept | replace, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
