"""Chats of a model as token ids, with their images. Independent of steps: any thread may read one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from deployments.engines.llm.chat_prompts import NO_OPTIONS, ChatOptions, encode_rendered, render_chat
from deployments.engines.llm.image_reader import ImageReader
from deployments.engines.llm.models.vision_tower import VisionTower
from deployments.engines.records.prompt_images import PromptImage, PromptImages
from deployments.engines.records.protocol import EngineError


class ChatReader:
    """Reads chats by the tokenizer's template. `images` and `vision` are those of a model that sees."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None, vision: VisionTower | None
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._vision = vision

    def encode(self, messages: list[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> tuple[int, ...]:
        """Return the token ids of a chat by the tokenizer's template. Raises EngineError if it has none or refuses."""
        return self.read(messages, (), options)[0]

    def read_images(self, pixels: Iterable[npt.NDArray[np.uint8]]) -> list[PromptImage]:
        """Return images, uint8 (height, width, 3), in the model's form. Takes a while; uses no tokenizer.

        Raises EngineError for images if the model sees none, and for an image that it does not take.
        """
        if self._images is None:
            if list(pixels):
                raise EngineError("the model sees no images")
            return []
        return [self._images.read(one) for one in pixels]

    def render(self, messages: list[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> str:
        """Return the text of a chat by the tokenizer's template. Raises EngineError if it has none or refuses."""
        if self._images is None:
            return render_chat(self._tokenizer, messages, options)
        return self._images.render(messages, options)

    def encode_rendered(
        self, text: str, images: Sequence[PromptImage] = ()
    ) -> tuple[tuple[int, ...], PromptImages | None]:
        """Return the token ids of a rendered chat with the images of its image parts, in their order.

        Raises EngineError unless there are as many parts as images.
        """
        if self._images is None or self._vision is None:
            return encode_rendered(self._tokenizer, text), None
        token_ids = self._images.encode(self._images.expand(text, images))
        rows = self._images.place(token_ids, images)
        return token_ids, self._vision.placed(token_ids, images, rows) if images else None

    def read(
        self, messages: list[dict[str, Any]], images: Sequence[PromptImage], options: ChatOptions = NO_OPTIONS
    ) -> tuple[tuple[int, ...], PromptImages | None]:
        """Return the token ids of a chat with its images. Raises EngineError as `render` and `encode_rendered` do."""
        return self.encode_rendered(self.render(messages, options), images)
