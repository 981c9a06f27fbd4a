"""Images of chats, read by a model's own processor, which also makes their placeholders in a text. Suffix: P tokens."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from deployments.engines.libraries.library_seam import process_image
from deployments.engines.libraries.processors import load_image_processor
from deployments.engines.llm.chat_prompts import NO_OPTIONS, ChatOptions, render_chat
from deployments.engines.llm.tokenizer import checked_characters
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import EngineError
from weights.platform.panics import panics_as_errors

# Its own processor needs a package that spells numbers, for videos alone. Images have the same placeholders.
_STAND_INS: Final = {"SmolVLMProcessor": "Idefics3Processor"}
_PROBE: Final = "one two"


class ImageReader:
    """The image processor of a model's folder, and the placeholders of images in its prompts."""

    def __init__(self, processor: Any, image_token_id: int) -> None:
        """`processor` is transformers' for the model's class; its videos and sounds are not used."""
        self._processor = processor
        self._image_token_id = image_token_id
        self._options = dict(getattr(processor, "images_kwargs", None) or {})
        self._rules = repr(processor.image_processor)  # all of its config
        self._shows_texts = _shows_texts(processor.tokenizer)
        # The images of running requests: a repeated image is neither read nor seen again.
        self._known: weakref.WeakValueDictionary[bytes, PromptImage] = weakref.WeakValueDictionary()

    @classmethod
    def load(cls, folder: Path, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> ImageReader:
        """Read the processor of a folder. Raises EngineError when none can be read.

        Templates of chats that are the processor's become the tokenizer's.
        """
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING  # only here: most models have none

        try:
            found = PROCESSOR_MAPPING[type(config)]
            class_ = getattr(transformers, _STAND_INS.get(found.__name__, found.__name__))
            with panics_as_errors():
                processor = load_image_processor(class_, folder, tokenizer)
        except Exception as error:  # transformers raises many kinds; all mean that the files are not a processor
            raise EngineError(f"no image processor could be read from {folder}: {error}") from error
        if processor.chat_template:
            tokenizer.chat_template = processor.chat_template
        return cls(processor, config.image_token_id)

    def read(self, pixels: npt.NDArray[np.uint8]) -> PromptImage:
        """Return an image, uint8 (height, width, 3), in the model's form. Raises EngineError for an unfit one.

        It takes a while, and uses no tokenizer: `expand` finds the number of its tokens.
        """
        digest = hashlib.blake2b(f"{pixels.shape} {self._rules}".encode(), digest_size=32)
        digest.update(np.ascontiguousarray(pixels).data)
        key = digest.digest()
        if (known := self._known.get(key)) is not None:
            return known
        try:
            with panics_as_errors():
                inputs, text = process_image(self._processor, Image.fromarray(pixels), self._options)
        except Exception as error:  # of sizes that it does not take, say
            height, width = pixels.shape[:2]
            raise EngineError(f"the model takes no image of {width}x{height} pixels: {error}") from error
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        image = PromptImage(key, text, tensors, grid=tensors.get("image_grid_thw"))
        self._known[key] = image
        return image

    def render(self, messages: Sequence[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> str:
        """Return a chat as text, as `render_chat` does. Raises EngineError as it does.

        Some templates of these models only take contents in parts.
        """
        if not self._shows_texts:
            messages = [message | {"content": _in_parts(message["content"])} for message in messages]
        return render_chat(self._processor.tokenizer, messages, options)

    def expand(self, text: str, images: Sequence[PromptImage]) -> str:
        """Return a chat with each image's single placeholder expanded to all of its tokens.

        Raises EngineError unless there are as many places as images: the template may have none, or the text more.
        """
        token = self._processor.image_token
        if (count := text.count(token)) != len(images):
            raise EngineError(
                f"the chat has {len(images)} images and {count} places for them: its template passes over images, or "
                f"a text has {token!r}, which stands for one"
            )
        for image in images:
            self.count(image)
        expanded, _ = self._processor.get_text_with_replacements([text], [image.text for image in images])
        return str(expanded[0])

    def count(self, image: PromptImage) -> None:
        """Set the number of an image's tokens. Raises EngineError if it has none."""
        image.num_rows = image.num_rows or self._num_rows(image.text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a chat: with the special tokens that the tokenizer adds, unless it has the first one.

        Processors do it in this way, but not tokenizers, whose templates have all of them.
        """
        tokenizer = self._processor.tokenizer
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return tuple(tokenizer(checked_characters(text), add_special_tokens=not begins)["input_ids"])

    def place(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> torch.Tensor:
        """Return for each token the row of all images' features that it stands for, (P,), -1 for text.

        Raises EngineError for tokens that stand for no image.
        """
        is_image = torch.tensor(token_ids) == self._image_token_id
        num_rows = sum(image.num_rows for image in images)
        if (count := int(is_image.sum())) != num_rows:
            raise EngineError(
                f"the prompt has {count} tokens that stand for images, expected {num_rows}: no text may have them"
            )
        return (is_image.cumsum(0) - 1).masked_fill(~is_image, -1)

    def _num_rows(self, text: str) -> int:
        token_ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        count = token_ids.count(self._image_token_id)
        if not count:
            raise EngineError("nothing stands for an image in the model's prompts: its tokenizer lacks the token")
        return int(count)


def _shows_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template of chats shows a content that is a plain text."""
    try:
        return _PROBE in render_chat(tokenizer, [{"role": "user", "content": _PROBE}])
    except EngineError:
        return False


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
