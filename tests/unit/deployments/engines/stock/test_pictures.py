"""Images, lists of images and videos go to the parameters that take them; processors that see are read from folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from kit.tiny.seeing import processor, seeing_tokenizer

from deployments.engines.libraries.processors import load_image_processor
from deployments.engines.records.protocol import EngineError, StockRequest
from deployments.engines.stock.inputs import CallInputs


def arguments(cls: Any, **images: Any) -> dict[str, Any]:
    return CallInputs(cls).arguments_of(StockRequest("r", 0, "a cat", images=images))


def drawn(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (4, 6, 3), np.uint8)


def pixels(given: Any) -> Any:
    return [pixels(one) for one in given] if isinstance(given, list) else np.asarray(given)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (diffusers.WanVideoToVideoPipeline, "video"),  # list[Image]
        (diffusers.AnimateDiffVideoToVideoPipeline, "video"),  # a list of lists of unions
        (diffusers.VideoToVideoSDPipeline, "video"),  # arrays or a tensor, by its annotation
        (diffusers.CogVideoXFunControlPipeline, "control_video"),
        (diffusers.QwenImageEditPlusPipeline, "image"),  # one or several
    ],
)
def test_frames_become_a_list_of_images(cls: Any, name: str) -> None:
    rng = np.random.default_rng(1)
    frames = tuple(drawn(rng) for _ in range(3))
    np.testing.assert_array_equal(pixels(arguments(cls, **{name: frames})[name]), np.stack(frames))


def test_a_list_of_one_is_made_where_only_lists_are_taken() -> None:
    image = drawn(np.random.default_rng(2))
    found = arguments(diffusers.WanVideoToVideoPipeline, video=image)["video"]
    np.testing.assert_array_equal(pixels(found), image[None])
    assert isinstance(arguments(diffusers.QwenImageEditPlusPipeline, image=image)["image"], PIL.Image.Image)


@pytest.mark.parametrize(
    ("cls", "name", "words"),
    [
        (diffusers.HunyuanVideoImageToVideoPipeline, "image", "image: 2 images; Hunyuan.* takes one"),
        (diffusers.WanPipeline, "video", r"video: WanPipeline takes no such image \(images that it takes: none\)"),
    ],
)  # fmt: skip
def test_what_a_class_does_not_take_is_refused(cls: Any, name: str, words: str) -> None:
    image = drawn(np.random.default_rng(3))
    with pytest.raises(EngineError, match=words):
        arguments(cls, **{name: (image, image)})


def test_a_processor_is_read_without_its_reader_of_videos(tmp_path: Path) -> None:
    own = processor()
    own.save_pretrained(tmp_path)
    read = load_image_processor(transformers.Qwen2VLProcessor, tmp_path, seeing_tokenizer())
    image = PIL.Image.fromarray(np.random.default_rng(4).integers(0, 256, (40, 60, 3), np.uint8))
    options = {"text": ["a <|image_pad|> b"], "images": [image], "return_tensors": "pt"}
    found, expected = read(**options), own(**options)
    assert found.keys() == expected.keys() >= {"pixel_values", "image_grid_thw", "input_ids"}
    for name in ("pixel_values", "image_grid_thw", "input_ids"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
