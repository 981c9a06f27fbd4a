"""A template runs over stand-ins, or the tool names the node that lacks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.supported.workflows import COUNTS, Finding, class_of, counted, finding, table_of


def painting(unet: str, **sampler: Any) -> dict[str, Any]:
    """Return a workflow in the API's form that draws with a model."""
    fields = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": ["1", 0], "positive": ["4", 0], "negative": ["4", 0], "latent_image": ["5", 0]}
    kinds = {
        "1": ("UNETLoader", {"unet_name": unet, "weight_dtype": "default"}),
        "2": ("CLIPLoader", {"clip_name": "a.safetensors", "type": "x"}),
        "3": ("VAELoader", {"vae_name": "b.safetensors"}),
        "4": ("CLIPTextEncode", {"text": "a cat", "clip": ["2", 0]}),
        "5": ("EmptySD3LatentImage", {"width": 64, "height": 64, "batch_size": 1}),
        "6": ("KSampler", {**fields, **links, **sampler}),
        "7": ("VAEDecode", {"samples": ["6", 0], "vae": ["3", 0]}),
        "8": ("SaveImage", {"images": ["7", 0], "filename_prefix": "x"}),
    }
    return {id: {"class_type": kind, "inputs": inputs} for id, (kind, inputs) in kinds.items()}


def test_a_workflow_of_a_served_class_runs() -> None:
    assert finding("one", painting("z_image_turbo_bf16.safetensors")).lacks == ""


def test_what_lacks_is_named() -> None:
    document = painting("z_image.safetensors")
    document["9"] = {"class_type": "SaveSound", "inputs": {"audio": ["7", 0]}}
    assert finding("one", document).lacks == "node SaveSound"
    assert "sampler_name" in finding("one", painting("z_image.safetensors", sampler_name="magic")).lacks
    assert "KSampler, input 'model'" in finding("one", painting("unheard_of.safetensors")).lacks
    assert finding("one", {"1": {"class_type": "SaveSound", "inputs": {}}}).lacks == "node SaveSound"
    late = painting("z_image.safetensors")
    late["9"] = {"class_type": "ImageToMask", "inputs": {"image": ["10", 0], "channel": "alpha"}}
    late["10"] = {"class_type": "LoadImage", "inputs": {"image": "a.png"}}
    late["11"] = {"class_type": "MaskPreview", "inputs": {"mask": ["9", 0]}}
    del late["8"]
    assert "no channel alpha" in finding("one", late).lacks


def test_numbers_are_by_the_first_words_of_names_and_add_up() -> None:
    names = ["image_a", "image-b", "Image_c", *(f"word{number}_x" for number in range(12))]
    counts = counted([Finding(name, "" if name.endswith(("a", "c", "x")) else "a node") for name in names])
    assert counts["image"] == [3, 2]
    assert sum(number for number, _ in counts.values()) == len(names)
    assert counts["others"] == [1, 1]
    assert "14 of 15 run." in table_of(counts)
    stored = json.loads(COUNTS.read_text(encoding="utf-8"))
    assert all(run <= number for number, run in stored.values())


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("qwen_image_edit_2511_bf16.safetensors", "QwenImageEditPlusPipeline"),
        ("split/qwen_image_fp8.safetensors", "QwenImagePipeline"),
        ("flux1-dev-kontext_fp8.safetensors", "FluxKontextPipeline"),
        ("flux1-dev.safetensors", "FluxPipeline"),
        ("longcat_image_bf16.safetensors", "LongCatImagePipeline"),
        ("longcat_image_edit_bf16.safetensors", "LongCatImageEditPipeline"),
        ("flux-2-klein-4b.safetensors", "Flux2KleinPipeline"),
        ("sd_xl_base_1.0.safetensors", "StableDiffusionXLPipeline"),
        ("hidream_i1_dev_fp8.safetensors", "HiDreamImagePipeline"),
        ("wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", "WanImageToVideoPipeline"),
        ("wan2.1_vace_14B_fp16.safetensors", "WanVACEPipeline"),
    ],
)
def test_files_belong_to_classes(file: str, expected: str) -> None:
    assert class_of(file) == expected
