"""Processors of transformers without their parts that read videos and sound, which need libraries of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_image_processor(class_: Any, folder: Path, tokenizer: Any) -> Any:
    """Return the processor of a folder, of a class of processors, with its reader of images and this tokenizer.

    Raises what transformers does for files that are no processor.
    """
    # Only then: most models have none.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    alone: Any = type(class_.__name__, (class_,), {"check_argument_for_proper_class": lambda *_: None})
    given, _ = alone.get_processor_dict(folder, local_files_only=True)
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    return alone.from_args_and_dict([parts.get(name) for name in alone.get_attributes()], given)
