"""The images that a text encoder sees with a prompt, as the processor in the pipeline's folder leaves them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deployments.engines.llm.image_reader import ImageReader
from deployments.engines.prompt_images import PromptImage
from deployments.engines.text.loading import load_tokenizer
from weights.residency.recent import Recent

FOLDER: Final = "processor"
MAX_READERS: Final = 8


class ImageReaders:
    """The processors of pipelines by their folders, each with a tokenizer of its own. Thread-safe.

    An encoder of the same weights may be another pipeline's as well, which has another processor or none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: Recent[Path, ImageReader] = Recent(MAX_READERS)

    def read(self, skeleton: Path, config: Any, images: Sequence[npt.NDArray[np.uint8]]) -> tuple[PromptImage, ...]:
        """Return images, uint8 (height, width, 3), as the encoder of that config sees them. Blocks.

        Raises EngineError where the pipeline has no processor, or one that does not take them.
        """
        folder = skeleton / FOLDER
        with self._lock:
            reader = self._readers.used(folder, lambda: ImageReader.load(folder, load_tokenizer(folder), config))
            found = tuple(map(reader.read, images))
            for image in found:
                reader.count(image)
        return found
