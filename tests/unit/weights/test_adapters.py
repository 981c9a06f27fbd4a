"""LoRA files: what is read, and what is refused with the file's and the tensor's name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from weights.formats.folder import LORA_FILE
from weights.formats.lora import METADATA_KEY, LoraConfig, read_lora_configs
from weights.operations.adapters import load_adapter
from weights.operations.externalize import externalize
from weights.records.errors import AdapterError
from weights.storage.store import WeightStore

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
    save_file({**GOOD, **other}, tmp_path / LORA_FILE)
    adapter = load_adapter(tmp_path)
    assert adapter.path == tmp_path / LORA_FILE
    assert {name: list(pairs) for name, pairs in adapter.components.items()} == {
        "transformer": ["blocks.0.to_q"],
        "text_encoder": ["q"],
    }
    pair = adapter.components["transformer"]["blocks.0.to_q"]
    assert (pair.rank, pair.scale, pair.down.shape, pair.up.shape) == (4, 1.0, (4, 8), (6, 4))
    other_pair = adapter.components["text_encoder"]["q"]
    assert (other_pair.down.shape, other_pair.up.shape) == ((2, 3), (3, 2))


def test_moving_copies_only_what_must_change(tmp_path):
    save_file(GOOD, tmp_path / "x.safetensors")
    adapter = load_adapter(tmp_path / "x.safetensors")
    pair = adapter.components["transformer"]["blocks.0.to_q"]
    assert pair.to("cpu").down.data_ptr() == pair.down.data_ptr()
    half_precision = pair.to("cpu", torch.bfloat16)
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
        ({"unet_mid.weight": torch.ones(2, 2)}, "'unet_mid.weight' is not of the diffusers/PEFT layout"),
        ({"lora_unet_" + "x" * 2000 + ".lora_down.weight": torch.ones(2, 2)}, "has a name of 2027 characters"),
        ({**GOOD, f"{PATH}.lora_magnitude_vector": torch.ones(5)}, r"is torch.float32 \(5,\), expected 6 numbers"),
        ({**GOOD, f"{PATH}.lora_magnitude_vector": torch.ones(6, dtype=torch.int8)}, "is torch.int8"),
        ({"transformer.x.weight": torch.ones(2, 2)}, "a component of transformer, unet"),
    ],
)
def test_unusable_tensors(tmp_path, tensors, message):
    file = tmp_path / "broken.safetensors"
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=message) as caught:
        load_adapter(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["unet_mid.lokr_w1", "double_blocks.0.x.lora_A.weight", "base_model.model.x.lora_B.weight"]
)
def test_other_layouts_are_read_beside_the_model(tmp_path, name):
    file, tensor = tmp_path / "style.safetensors", torch.ones(2, 2)
    save_file({name: tensor}, file, metadata={METADATA_KEY: json.dumps({"transformer.lora_alpha": 2})})
    adapter = load_adapter(file)
    assert torch.equal(adapter.raw[name], tensor)
    assert adapter.configs["transformer"].alpha == 2.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list, expected an object"),
        ('{"transformer.use_dora": 1}', "transformer.use_dora=1, expected true or false"),
        ('{"transformer.alpha_pattern": 3}', "alpha_pattern=3, expected an object"),
        ('{"transformer.alpha_pattern": {"(": 3}}', r"alpha_pattern '\(' is a regular expression"),
        ('{"transformer.lora_alpha": "high"}', "lora_alpha='high', expected a finite number"),
        ('{"transformer.lora_alpha": NaN}', "lora_alpha=nan, expected a finite number"),
        ('{"transformer.lora_alpha": -Infinity}', "lora_alpha=-inf, expected a finite number"),
        ('{"transformer.lora_alpha": 1e999}', "lora_alpha=inf, expected a finite number"),
        ('{"transformer.lora_alpha": true}', "lora_alpha=True, expected a finite number"),
        ('{"transformer.lora_alpha": %s}' % ("9" * 4000), "lora_alpha=9+.*, expected a finite number"),
        ('{"transformer.lora_alpha": %s}' % ("9" * 5000), "is not JSON"),
        ('{"transformer.alpha_pattern": {"q": "a"}}', "expected finite numbers"),
        ('{"transformer.alpha_pattern": {"q": NaN}}', "expected finite numbers"),
        ('{"transformer.alpha_pattern": {"%s": 1}}' % ("q" * 1025), "names of 1024 characters"),
        (json.dumps({"transformer.alpha_pattern": {f"q{n}": 1 for n in range(20_001)}}), "at most 20000 names"),
        ('{"transformer.alpha_pattern": {"(q|k)+": 3}}', r"alpha_pattern '\(q\|k\)\+' is a regular expression"),
        ('{"transformer.r": -4}', "transformer.r=-4, expected a positive integer"),
        ('{"transformer.r": 0}', "transformer.r=0, expected a positive integer"),
        ('{"transformer.rank_pattern": {"q": -1}}', "rank_pattern=.*expected positive integers"),
        ('{"transformer.use_rslora": "no"}', "use_rslora='no', expected true or false"),
        ("[" * 100_000, "nested too deep"),
        ('{"transformer.r": %s}' % ("[" * 300 + "]" * 300), "expected a positive integer"),
        (json.dumps({"x": "x" * 4 * 2**20}), "characters, limit"),
    ],
)
def test_unusable_metadata(tmp_path, config, message):
    """Refused when it comes in, and again by who computes with it: a store may have it from before."""
    save_file(GOOD, tmp_path / LORA_FILE, metadata={METADATA_KEY: config})
    for take in (load_adapter, lambda path: externalize(WeightStore(tmp_path / "store"), "lora", path)):
        with pytest.raises(AdapterError, match=message) as caught:
            take(tmp_path)
        assert len(str(caught.value)) < 600
        assert "\n" not in str(caught.value)


def test_a_dora_without_its_magnitudes_is_refused(tmp_path):
    save_file(GOOD, tmp_path / LORA_FILE, metadata={METADATA_KEY: '{"transformer.use_dora": true}'})
    with pytest.raises(AdapterError, match="lora_magnitude_vector' is missing, and its config says use_dora"):
        load_adapter(tmp_path)


NAME_PARTS = st.sampled_from(["blocks", "attn", "to_q", "to_k", "0", "1", "ff", "net", "proj"])
PATHS = st.lists(NAME_PARTS, min_size=1, max_size=5).map(".".join)
PATTERNS = st.one_of(
    PATHS,
    PATHS.map(lambda path: f"^{path}"),
    PATHS.map(lambda path: f"^{re.escape(path)}$"),
    PATHS.map(lambda path: rf".*\.{re.escape(path)}"),  # as peft writes what it converted
    PATHS.map(re.escape),
)


@given(alphas=st.dictionaries(PATTERNS, st.integers(1, 99), max_size=8), path=PATHS)
def test_patterns_fit_as_in_peft(alphas, path):
    metadata = {METADATA_KEY: json.dumps({"unet.lora_alpha": 7, "unet.alpha_pattern": alphas})}
    config = read_lora_configs(Path("x"), metadata)["unet"]
    assert config.alpha_of(path) == alphas.get(get_pattern_key(alphas, path), 7)


def test_one_look_up_per_part_of_a_path_however_many_patterns_there_are():
    class Counting(dict):
        looked_up = 0

        def get(self, *key):
            Counting.looked_up += 1
            return super().get(*key)

    config = LoraConfig(by_suffix=Counting({f"q{number}": (number, 1.0) for number in range(20_000)}))
    assert config.alpha_of("a.b.c.q19999") == 1.0
    assert Counting.looked_up <= 4


def test_a_hostile_pattern_is_not_run(tmp_path):
    """`re.match` with it holds the interpreter lock for years."""
    path = "transformer." + "a" * 60
    tensors = {f"{path}.lora_A.weight": torch.ones(4, 8), f"{path}.lora_B.weight": torch.ones(6, 4)}
    metadata = {METADATA_KEY: json.dumps({"transformer.alpha_pattern": {"(a+)+b": 3}})}
    save_file(tensors, tmp_path / LORA_FILE, metadata=metadata)
    with pytest.raises(AdapterError, match="regular expression"):
        load_adapter(tmp_path)


def test_a_module_of_a_very_long_name_is_refused(tmp_path):
    name = f"transformer.{'a.' * 600}q.lora_A.weight"
    save_file({name: torch.ones(4, 8)}, tmp_path / LORA_FILE)
    with pytest.raises(AdapterError, match="is not of the diffusers/PEFT layout") as caught:
        load_adapter(tmp_path)
    assert len(str(caught.value)) < 600


def test_no_file(tmp_path):
    with pytest.raises(AdapterError, match=f"{LORA_FILE}: no such file"):
        load_adapter(tmp_path)


def test_not_a_safetensors_file(tmp_path):
    (tmp_path / LORA_FILE).write_bytes(b"PK\x03\x04 this is a pickle")
    with pytest.raises(AdapterError, match=LORA_FILE):
        load_adapter(tmp_path)
