"""LoRA files: what is read, and what is refused with the file's and the tensor's name."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from weights.adapters import FILE_NAME, METADATA_KEY, load_adapter
from weights.errors import AdapterError

PATH = "transformer.blocks.0.to_q"


def half(kind: str, *shape: int) -> dict[str, torch.Tensor]:
    return {f"{PATH}.lora_{kind}.weight": torch.ones(shape)}


GOOD = {**half("A", 4, 8), **half("B", 6, 4)}


def scale_of(path) -> float:
    return load_adapter(path).components["transformer"]["blocks.0.to_q"].scale


def test_pairs_by_component_and_module_path(tmp_path):
    other = {
        "text_encoder.q.lora_A.weight": torch.zeros(2, 3),
        "text_encoder.q.lora_B.weight": torch.zeros(3, 2),
    }
    save_file({**GOOD, **other}, tmp_path / FILE_NAME)
    adapter = load_adapter(tmp_path)
    assert adapter.path == tmp_path / FILE_NAME
    assert {name: list(pairs) for name, pairs in adapter.components.items()} == {
        "transformer": ["blocks.0.to_q"],
        "text_encoder": ["q"],
    }
    pair = adapter.components["transformer"]["blocks.0.to_q"]
    assert (pair.rank, pair.scale, pair.down.shape, pair.up.shape) == (4, 1.0, (4, 8), (6, 4))
    assert adapter.num_bytes == 4 * (4 * 8 + 6 * 4 + 2 * 3 + 3 * 2)


def test_moving_copies_only_what_must_change(tmp_path):
    save_file(GOOD, tmp_path / "x.safetensors")
    adapter = load_adapter(tmp_path / "x.safetensors")
    pair = adapter.components["transformer"]["blocks.0.to_q"]
    assert adapter.to("cpu").components["transformer"]["blocks.0.to_q"].down.data_ptr() == pair.down.data_ptr()
    half_precision = adapter.to("cpu", torch.bfloat16).components["transformer"]["blocks.0.to_q"]
    assert (half_precision.down.dtype, half_precision.scale) == (torch.bfloat16, pair.scale)


@pytest.mark.parametrize(
    ("config", "alpha", "expected"),
    [
        (None, None, 1.0),
        (None, 2.0, 0.5),
        ({"lora_alpha": 8}, None, 2.0),
        ({"lora_alpha": 8}, 1.0, 0.25),  # the tensor knows best
        ({"lora_alpha": 8, "alpha_pattern": {"to_q": 16}}, None, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"to_k": 16}}, None, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, None, 8 / math.sqrt(4)),
    ],
)
def test_where_the_scale_comes_from(tmp_path, config, alpha, expected):
    file = tmp_path / "x.safetensors"
    tensors = GOOD | ({f"{PATH}.alpha": torch.tensor(alpha)} if alpha is not None else {})
    metadata = (
        {METADATA_KEY: json.dumps({f"transformer.{key}": value for key, value in config.items()})} if config else None
    )
    save_file(tensors, file, metadata=metadata)
    assert scale_of(file) == expected


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        (half("A", 4, 8), f"tensor '{PATH}.lora_B.weight' is missing"),
        (half("B", 6, 4), f"tensor '{PATH}.lora_A.weight' is missing"),
        (
            {**half("A", 4, 8), **half("B", 6, 5)},
            r"'transformer.blocks.0.to_q' do not fit: lora_A \(4, 8\), lora_B \(6, 5\)",
        ),
        ({**half("A", 4), **half("B", 6, 4)}, "do not fit"),
        ({name: tensor.int() for name, tensor in GOOD.items()}, "expected floating point"),
        ({**GOOD, f"{PATH}.alpha": torch.ones(2)}, r"alpha' has shape \(2,\)"),
        ({**GOOD, f"{PATH}.alpha": torch.tensor(math.nan)}, "is nan, expected a finite number"),
        (
            {"lora_unet_mid.lora_down.weight": torch.ones(2, 2)},
            "'lora_unet_mid.lora_down.weight' is not of the diffusers/PEFT layout",
        ),
        ({**GOOD, f"{PATH}.lora_magnitude_vector": torch.ones(6)}, "lora_magnitude_vector' is not of"),
        ({"decoder.x.lora_A.weight": torch.ones(2, 2)}, "a component of transformer, unet"),
    ],
)
def test_unusable_tensors(tmp_path, tensors, message):
    file = tmp_path / "broken.safetensors"
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=message) as caught:
        load_adapter(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list, expected an object"),
        ('{"transformer.use_dora": true}', "transformer.use_dora=True: DoRA is not supported"),
        ('{"transformer.alpha_pattern": 3}', "alpha_pattern=3, expected an object"),
        ('{"transformer.alpha_pattern": {"(": 3}}', r"alpha_pattern '\(' is not a regular expression"),
        ('{"transformer.lora_alpha": "high"}', "is 'high', expected a finite number"),
    ],
)
def test_unusable_metadata(tmp_path, config, message):
    save_file(GOOD, tmp_path / FILE_NAME, metadata={METADATA_KEY: config})
    with pytest.raises(AdapterError, match=message):
        load_adapter(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(AdapterError, match=f"{FILE_NAME}: no such file"):
        load_adapter(tmp_path)


def test_not_a_safetensors_file(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"PK\x03\x04 this is a pickle")
    with pytest.raises(AdapterError, match=FILE_NAME):
        load_adapter(tmp_path)
