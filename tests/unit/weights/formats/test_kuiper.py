"""KuiperLLama files, against a plain transcription of its writer; and what its own reader gets wrong."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest
from kit.seeding import seeded_rng

from weights.formats.kuiper import KuiperHeader, parse_kuiper, read_kuiper, write_kuiper
from weights.loading.stage_transforms import dequantize_int8, quantize_int8
from weights.records.errors import FormatError

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, SEQ, GROUP = 48, 64, 3, 4, 2, 20, 7, 64
KV_DIM = DIM // HEADS * KV_HEADS
MATRICES = {
    "wq": (DIM, DIM),
    "wk": (KV_DIM, DIM),
    "wv": (KV_DIM, DIM),
    "wo": (DIM, DIM),
    "w1": (HIDDEN, DIM),
    "w2": (DIM, HIDDEN),
    "w3": (HIDDEN, DIM),
}
Model = dict[str, np.ndarray]


def random_model(*, shared: bool) -> Model:
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (VOCAB, DIM), "norm": (DIM,)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in MATRICES.items()}
        shapes |= {f"layers.{layer}.{name}": (DIM,) for name in ("attention_norm", "ffn_norm")}
    if not shared:
        shapes["output"] = (VOCAB, DIM)
    return {name: seeded_rng().standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def as_int8(model: Model) -> bytes:
    """Write a file as `legacy_export_quant` does."""
    shared = "output" not in model
    out = struct.pack("<8i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB if shared else -VOCAB, SEQ, GROUP)
    matrices = [f"layers.{layer}.{name}" for name in MATRICES for layer in range(LAYERS)]
    for name in matrices + ([] if shared else ["output"]):
        groups = model[name].reshape(-1, GROUP)
        scales = np.abs(groups).max(1) / np.float32(127)
        out += np.round(groups / scales[:, None]).astype(np.int8).tobytes() + scales.tobytes()
    out += model["tok_embeddings"].tobytes()
    for kind in ("attention_norm", "ffn_norm"):
        out += b"".join(model[f"layers.{layer}.{kind}"].tobytes() for layer in range(LAYERS))
    return out + model["norm"].tobytes()


def as_fp32(model: Model, rope: bytes) -> bytes:
    """Write a file as `legacy_export` does; `rope` stands for both tables."""
    shared = "output" not in model
    out = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB if shared else -VOCAB, SEQ)
    out += model["tok_embeddings"].tobytes()
    for kind in ("attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3"):
        out += b"".join(model[f"layers.{layer}.{kind}"].tobytes() for layer in range(LAYERS))
    return out + model["norm"].tobytes() + rope + (b"" if shared else model["output"].tobytes())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.bin"


@pytest.mark.parametrize("shared", [False, True])
def test_every_int8_tensor_is_where_the_writer_put_it(file: Path, shared: bool) -> None:
    model = random_model(shared=shared)
    file.write_bytes(as_int8(model))
    header = read_kuiper(file)
    assert dataclasses.replace(header, tensors={}) == KuiperHeader(
        DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, SEQ, GROUP, shared
    )
    tensors = header.tensors
    assert {name.removesuffix(".weight") for name in tensors if not name.endswith(".scales")} == set(model)
    for name, expected in model.items():
        found = tensors[f"{name}.weight"]
        assert found.shape == expected.shape
        if f"{name}.scales" not in tensors:
            assert (found.dtype, found.read()) == ("F32", expected.tobytes())
            continue
        scales = np.frombuffer(tensors[f"{name}.scales"].read(), np.float32)
        values = dequantize_int8(np.frombuffer(found.read(), np.int8).reshape(found.shape), scales, GROUP)
        assert found.dtype == "I8"
        assert np.abs(values - expected).max() <= scales.max() * 0.501


@pytest.mark.parametrize("shared", [False, True])
def test_every_fp32_tensor_is_where_the_writer_put_it(file: Path, shared: bool) -> None:
    model = random_model(shared=shared)
    rope = seeded_rng().standard_normal((2, SEQ, DIM // HEADS // 2)).astype(np.float32)
    file.write_bytes(as_fp32(model, rope.tobytes()))
    header = read_kuiper(file)
    assert (header.group_size, header.shared_classifier, len(header.raw)) == (None, shared, 28)
    found = {name.removesuffix(".weight"): tensor for name, tensor in header.tensors.items()}
    assert {name: tensor.shape for name, tensor in found.items() if name.startswith("freqs")} == {
        "freqs_cos": rope[0].shape,
        "freqs_sin": rope[1].shape,
    }
    expected = model | {"freqs_cos": rope[0], "freqs_sin": rope[1]}
    assert {name: tensor.read() for name, tensor in found.items()} == {
        name: values.tobytes() for name, values in expected.items()
    }


@pytest.mark.parametrize("version", ["int8", "fp32"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_written_file_has_the_bytes_of_its_source(tmp_path: Path, file: Path, version: str, shared: bool) -> None:
    model = random_model(shared=shared)
    file.write_bytes(as_int8(model) if version == "int8" else as_fp32(model, bytes(2 * SEQ * DIM // HEADS // 2 * 4)))
    header = read_kuiper(file)
    target = tmp_path / "copy.bin"
    write_kuiper(target, parse_kuiper(header.raw), {name: tensor.read for name, tensor in header.tensors.items()})
    assert target.read_bytes() == file.read_bytes()


def test_the_writer_refuses_what_the_header_does_not_have(file: Path, tmp_path: Path) -> None:
    file.write_bytes(as_int8(random_model(shared=True)))
    header = read_kuiper(file)
    tensors = {name: tensor.read for name, tensor in header.tensors.items()}
    target = tmp_path / "copy.bin"
    others = {name: read for name, read in tensors.items() if name != "norm.weight"} | {"output.weight": bytes}
    with pytest.raises(FormatError, match=r"copy\.bin: missing or unknown tensors: norm\.weight, output\.weight"):
        write_kuiper(target, header, others)
    with pytest.raises(FormatError, match=r"'norm\.weight' takes 192 bytes, 0 came"):
        write_kuiper(target, header, {**tensors, "norm.weight": bytes})


def test_a_shared_classifier_is_the_float_embedding_and_nothing_is_read_twice(file: Path) -> None:
    """KuiperLLama takes the embedding's float bytes for the classifier's int8."""
    file.write_bytes(as_int8(random_model(shared=True)))
    tensors = read_kuiper(file).tensors
    assert "output.weight" not in tensors
    assert tensors["tok_embeddings.weight"].dtype == "F32"
    spans = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in tensors.values())
    assert spans[0][0] == 32
    assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]]


def test_groups_may_cross_rows(file: Path) -> None:
    """Rows of 48 in groups of 64: KuiperLLama's kernels want whole groups in a row, the format does not."""
    assert DIM % GROUP
    model = random_model(shared=True)
    file.write_bytes(as_int8(model))
    tensors = read_kuiper(file).tensors
    wq = tensors["layers.1.wq.weight"]
    values, scales = quantize_int8(model["layers.1.wq"], GROUP)
    assert wq.read() == values.tobytes()
    assert tensors["layers.1.wq.scales"].read() == scales.tobytes()


def test_another_length_is_refused_and_says_what_it_should_be(file: Path) -> None:
    """KuiperLLama maps whatever is there and reads beyond the end."""
    data = as_int8(random_model(shared=False))
    for length in [0, 3, 27, 28, 31, 32, 33, len(data) // 2, len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"model\.bin: not a KuiperLLama file"):
            read_kuiper(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(FormatError, match=f"take {len(data)} bytes, the file has {len(data) + 1}"):
        read_kuiper(file)


GOOD = [DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, SEQ, GROUP]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        *[(place, bad, "expected positive sizes") for place in range(8) for bad in (0, -(2**31))],
        *[(place, -1, "expected positive sizes") for place in (0, 1, 2, 3, 4, 6, 7)],
        (2, 2**31 - 1, "1024 layers at most"),
        (3, 5, "cannot be 5 heads"),
        (3, 16, "cannot be 16 heads of even size"),
        (4, 3, "over 3 key/value heads"),
        (7, 50, r"layers\.0\.wq\.weight .* groups of 50"),
        (0, 2**30, "the file has"),
    ],
)
def test_a_damaged_header_is_refused(file: Path, place: int, value: int, words: str) -> None:
    numbers = [*GOOD]
    numbers[place] = value
    if (place, value) == (5, -(2**31)):
        words = "the file has"  # a vocabulary of 2^31 is absurd, but a number
    file.write_bytes(struct.pack("<8i", *numbers) + bytes(1000))
    with pytest.raises(FormatError, match=words):
        read_kuiper(file)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="gone"):
        read_kuiper(tmp_path / "gone.bin")
    with pytest.raises(FormatError, match="30 bytes are no header"):
        parse_kuiper(bytes(30))
