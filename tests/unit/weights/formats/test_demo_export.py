"""The adder as GGUF and as a KuiperLLama file: the same weights, as independent readers see them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from weights.formats.checkpoint import read_checkpoint
from weights.formats.gguf import read_gguf
from weights.formats.kuiper import read_kuiper
from weights.loading.stage_transforms import dequantize_int8

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[4] / "infra" / "demo"
ADDER = DEMO / "models" / "adder"


@pytest.fixture(scope="module")
def exporter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("export_adder", DEMO / "export_adder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def originals() -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in load_file(ADDER / "model.safetensors").items()}


def halves(pairs: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of q or k back in rotate_half's order, one by one."""
    head_dim = len(pairs) // num_heads
    order = [
        head * head_dim + 2 * (place % (head_dim // 2)) + place // (head_dim // 2)
        for head in range(num_heads)
        for place in range(head_dim)
    ]
    return pairs[order]


def test_the_gguf_file_has_the_weights_within_its_precision(
    exporter: ModuleType, originals: dict[str, np.ndarray], tmp_path: Path
) -> None:
    file = tmp_path / "adder.gguf"
    exporter.export_gguf(ADDER, file)
    config = json.loads((ADDER / "config.json").read_text())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = {f"{ours}.weight": f"{module}.weight" for module, (ours, _) in exporter.names(config).items()}
    assert set(names) == set(tensors)
    assert set(names.values()) == set(originals)
    for name, original_name in names.items():
        restored = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        original = originals[original_name]
        if "attn_q" in name or "attn_k" in name:
            heads = config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            restored = halves(restored, heads)
        if original.ndim == 1:
            assert np.array_equal(restored, original)
            continue
        # Half a step of absmax/127, and the scale is rounded to float16.
        absmax = np.abs(original.reshape(-1, 32)).max(1)
        error = np.abs(restored - original).reshape(-1, 32).max(1)
        assert np.all(error <= absmax * (0.5 / 127 + 2**-11 + 1e-6))


def test_our_reader_sees_what_gguf_py_sees(exporter: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "adder.gguf"
    exporter.export_gguf(ADDER, file)
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    assert [(name, t.dtype, t.shape, t.offset) for name, t in header.tensors.items()] == [
        (t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data_offset) for t in reader.tensors
    ]
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == theirs.keys()
    for key, value in header.metadata.items():
        assert (value if isinstance(value, str | int | float) else list(value)) == theirs[key], key
    vocab = json.loads((ADDER / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    assert {token: number for number, token in enumerate(tokens)} == vocab
    assert header.metadata["tokenizer.chat_template"] == (ADDER / "chat_template.jinja").read_text()
    assert (read_checkpoint(file).kind, read_checkpoint(file).class_name) == ("llm", "llama")


def test_the_kuiper_file_has_the_weights_within_its_precision(
    exporter: ModuleType, originals: dict[str, np.ndarray], tmp_path: Path
) -> None:
    file = tmp_path / "adder.bin"
    exporter.export_kuiper(ADDER, file)
    header = read_kuiper(file)
    assert (header.num_layers, header.num_kv_heads, header.group_size, header.shared_classifier) == (4, 2, 64, False)
    config = json.loads((ADDER / "config.json").read_text())
    for module, (_, name) in exporter.names(config).items():
        weight, original = header.tensors[f"{name}.weight"], originals[f"{module}.weight"]
        if weight.dtype == "F32":
            assert np.array_equal(np.frombuffer(weight.read(), np.float32).reshape(weight.shape), original)
            continue
        scales = np.frombuffer(header.tensors[f"{name}.scales"].read(), np.float32)
        restored = dequantize_int8(np.frombuffer(weight.read(), np.int8).reshape(weight.shape), scales)
        assert np.all(np.abs(restored - original).reshape(-1, 64) <= scales[:, None] * 0.5001)
