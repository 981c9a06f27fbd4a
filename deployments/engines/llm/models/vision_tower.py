"""The vision tower of a language model of transformers, run once per image, and the places of its rows.

Suffixes: T tokens of a step, M tokens of it that stand for images, C hidden size, P tokens of a prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from deployments.engines.llm.models.stock_classes import SEES_ITSELF
from deployments.engines.records.prompt_images import ImageFeatures, PromptImage, PromptImages, runs_of
from deployments.engines.records.protocol import EngineError
from weights.memory.devices import computes_on_host


@dataclass(frozen=True, slots=True)
class Seen:
    """The features of a step's images, in the form that the class takes."""

    pooler_output: torch.Tensor | list[torch.Tensor]
    deepstack_features: list[list[torch.Tensor]]


class VisionTower:
    """The vision tower of a model, and its way of counting and masking image tokens."""

    def __init__(self, base: Any, config: PretrainedConfig, device: torch.device) -> None:
        """`base` is the class's model without its head."""
        self._base, self._device = base, device
        self.token_id: int = config.image_token_id
        self._takes = frozenset(inspect.signature(base.get_image_features).parameters)
        text: Any = config.get_text_config()
        # Among images, a text token is what the class makes of it without any.
        self._blank_id = text.pad_token_id if hasattr(base, "get_per_layer_input_embeddings") else self.token_id
        self._sees_itself = SEES_ITSELF.get(config.architectures[0], "")
        if self._sees_itself == "windows" and text.use_bidirectional_attention != "vision":
            self._sees_itself = ""
        if not 0 <= self.token_id < text.vocab_size:
            raise EngineError(f"the token {self.token_id} of images is not in the vocabulary of {text.vocab_size}")

    def sees_itself(self, window: int) -> bool:
        """Return whether the tokens of an image see each other in layers of this window, 0 for none."""
        return self._sees_itself == "everywhere" or (self._sees_itself == "windows" and window > 0)

    def placed(self, token_ids: Sequence[int], images: Sequence[PromptImage], rows_P: torch.Tensor) -> PromptImages:
        """Return the images of a prompt, with the class's positions and spans of its tokens."""
        positions = None
        if hasattr(self._base, "get_rope_index"):
            grids = [image.grid for image in images if image.grid is not None]
            kinds = (rows_P >= 0).int()[None]
            found, _ = self._base.get_rope_index(torch.tensor([token_ids]), kinds, torch.cat(grids))
            positions = found[:, 0]
        return PromptImages(tuple(images), rows_P, positions, runs_of(rows_P) if self._sees_itself else ())

    def look_at(self, images: Iterable[PromptImage]) -> None:
        """Run the tower for new images. On the host each goes alone: batches change rounding.

        Raises EngineError if its number of rows differs from the number of tokens.
        """
        groups: dict[Any, list[PromptImage]] = {}
        for image in dict.fromkeys(images):
            if image.features is None:
                shapes = id(image) if computes_on_host(self._device) else _shapes(image)
                groups.setdefault(shapes, []).append(image)
        for group in groups.values():
            names = [name for name in group[0].inputs if name in self._takes]
            given = {name: torch.cat([one.inputs[name] for one in group]).to(self._device) for name in names}
            output = self._base.get_image_features(**given, return_dict=True)
            sizes = [image.num_rows for image in group]
            rows = _feature_rows(output.pooler_output)
            if len(rows) != sum(sizes):
                raise EngineError(f"{sum(sizes)} tokens stand for images of which the vision tower makes {len(rows)}")
            deep = [
                torch.split(_feature_rows(layer), sizes) for layer in getattr(output, "deepstack_features", None) or ()
            ]
            is_tensor = isinstance(output.pooler_output, torch.Tensor)
            for place, (image, own) in enumerate(zip(group, torch.split(rows, sizes), strict=True)):
                image.features = ImageFeatures(own, tuple(layer[place] for layer in deep), is_tensor)
                image.inputs = {}

    def seen(self, token_ids_T: torch.Tensor, shown: Sequence[tuple[int, int, int, PromptImages]]) -> Seen | None:
        """Return the embeddings for all placeholders of a step; None where none of them stands for an image.

        `shown` are the first row of the step, the tokens (start, end) of a prompt, and its images. A placeholder that
        stands for no image keeps its own embedding.
        """
        parts = [
            (first + tokens, image, rows)
            for first, start, end, images in shown
            for image, tokens, rows in images.among(start, end)
        ]
        if not parts:
            return None
        self.look_at(image for _, image, _ in parts)
        is_image_T = token_ids_T == self.token_id
        places_T, count = is_image_T.cumsum(0) - 1, int(is_image_T.sum())
        blank = self._base.get_input_embeddings()(torch.tensor([self._blank_id], device=self._device))
        sample = parts[0][1].features
        assert sample is not None
        rows_MC = blank.to(sample.rows.dtype).repeat(count, 1)
        deep = [layer.new_zeros(count, layer.shape[1]) for layer in sample.deep]
        for tokens, image, rows in parts:
            own, places = image.features, places_T[tokens.to(self._device)]
            assert own is not None
            for target, source in zip((rows_MC, *deep), (own.rows, *own.deep), strict=True):
                target[places] = source[rows.to(self._device)]
        return Seen(rows_MC if sample.is_tensor else [rows_MC], [[layer] for layer in deep])


def _shapes(image: PromptImage) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in image.inputs.items())


def _feature_rows(features: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    """Return features as rows, (R, C)."""
    joined = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return joined.reshape(-1, joined.shape[-1])
