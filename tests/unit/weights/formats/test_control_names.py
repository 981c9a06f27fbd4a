"""The kind of a control in one file, by the names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weights.formats.control_files import control_kind, read_control_file
from weights.formats.source import BasePipeline, Checkpoint
from weights.records.errors import FormatError

FLUX = "controlnet_x_embedder.weight"
HINTS = "zero_convs.0.0.weight"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("union", ["task_embedding", "spatial_ch_projs.weight", HINTS]),
        ("unet", ["lora_controlnet"]),
        ("unet", ["controlnet_cond_embedding.conv_in.weight"]),
        ("unet", [f"control_model.{HINTS}"]),
        ("t2i", ["adapter.body.0.block1.weight"]),
        ("t2i", ["body.11.resnets.0.block1.weight"]),
        ("t2i", ["body.3.body.0.block1.weight"]),
        ("flux", [FLUX, "controlnet_blocks.0.weight"]),
        *[(None, [one]) for one in ("task_embedding", "spatial_ch_projs.weight", "double_blocks.0.a", "body.0.weight")],
    ],
)
def test_a_kind_is_told_by_names(kind: str | None, names: list[str]) -> None:
    assert control_kind(Path("net.safetensors"), dict.fromkeys(["x.weight", *names], (1,))) == kind


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("a ControlNet of Flux in XLabs' own names", ["double_blocks.0.a", "controlnet_blocks.0.weight"]),
        ("a ControlNet of Qwen-Image, which is not", [FLUX, "transformer_blocks.0.img_mlp.net.0.proj.weight"]),
    ],
)
def test_kinds_that_are_not_read_are_named(words: str, names: list[str]) -> None:
    with pytest.raises(FormatError, match=rf"net\.safetensors: {words}.*; in one file are read: "):
        control_kind(Path("net.safetensors"), dict.fromkeys(names, (1,)))


def read(folder: Path, names: Iterable[str]) -> Checkpoint:
    """Read a file of tensors with these names, by a pipeline of Flux."""
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text("{}")
    save_file({name: np.ones((2, 2), np.float32) for name in names}, folder / "net.safetensors")
    return read_control_file(folder / "net.safetensors", BasePipeline("base", folder, "", {}))


def test_blocks_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    names = [FLUX, *(f"transformer_blocks.{number}.a" for number in range(64)), "single_transformer_blocks.3.a"]
    config = json.loads(read(tmp_path, names).headers["config.json"])
    assert (config["num_layers"], config["num_single_layers"], config["guidance_embeds"]) == (64, 1, False)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([FLUX, *(f"transformer_blocks.{number}.a" for number in range(65))], "65 blocks, expected at most 64"),
        ([FLUX, "input_hint_block.0.weight"], "a ControlNet of Flux that reads pixels"),
        ([FLUX, f"control_model.{FLUX}"], r"tensors of one name with and without control_model\. or adapter\."),
        (["x.weight"], "neither a ControlNet nor a T2I-Adapter"),
        ([HINTS], "and 'base', which it is for, has no unet"),
    ],
)
def test_files_that_a_base_cannot_read_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(FormatError, match=rf"net\.safetensors: .*{words}"):
        read(tmp_path, names)
