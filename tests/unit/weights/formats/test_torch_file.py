"""Torch's checkpoint files: tensors as torch.load gives them, and no code of the file is ever run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from weights.conversion.torch_file import read_torch_file
from weights.formats.checkpoint import read_checkpoint
from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.records.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore:.*weights_only Unpickler might not support", "ignore:.*deprecated")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def as_bytes(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def check(file: Path, expected: dict[str, torch.Tensor]) -> None:
    found = read_torch_file(file)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        entry = found[name]
        assert (TORCH_DTYPES[entry.dtype], entry.shape, entry.file) == (tensor.dtype, tuple(tensor.shape), file)
        data = entry.read()
        assert (len(data), bytes(data)) == (entry.nbytes, as_bytes(tensor))


@pytest.mark.parametrize("zipped", [True, False])
def test_every_dtype_and_shape(file: Path, zipped: bool) -> None:
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        if not zipped and name.startswith(("F8", "U16", "U32", "U64")):
            continue  # younger than the bare pickles
        for shape in [(), (0,), (3, 2)]:
            data = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            tensors[f"{name}{shape}"] = data.view(dtype).reshape(shape)
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    check(file, tensors)


def test_views_and_tied_tensors_become_bytes_of_their_own(file: Path) -> None:
    base = torch.randn(64, 32)
    tensors = {
        "base": base,
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "row": base[5],
        "tied": base,
        "expanded": torch.randn(1, 4).expand(8, 4),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
    }
    torch.save(tensors, file)
    check(file, tensors)


@pytest.mark.parametrize("nest", ["state_dict", "model"])
def test_weights_beside_a_trainers_state(file: Path, nest: str) -> None:
    tensors = OrderedDict(a=torch.randn(2), b=torch.randn(3))
    torch.save({nest: tensors, "epoch": 3, "optimizer": {"lr": 0.1}}, file)
    check(file, tensors)


def test_a_tensor_called_model_is_a_tensor(file: Path) -> None:
    tensors = {"model": torch.randn(2), "other": torch.randn(1)}
    torch.save(tensors, file)
    check(file, tensors)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": torch.ones(2), "epoch": 3}, "'epoch' is a int, expected a tensor"),
        ({"a": {"b": torch.ones(2)}}, "'a' is a dict, expected a tensor"),
        ({"a": [torch.ones(2)]}, "'a' is a list"),
        ({3: torch.ones(2)}, "entry 3 has no name"),
        ({"": torch.ones(2)}, "entry '' has no name"),
        ([torch.ones(2)], "holds a list, expected a dict"),
        (torch.ones(2), "holds a Tensor"),
        ({"a": torch.eye(3).to_sparse()}, "tensor 'a' is torch.sparse_coo"),
        ({"a": torch.empty(3, device="meta")}, "tensor 'a' is meta"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "tensor 'a': unknown dtype torch.complex128"),
        ({"a": torch.ones(1).expand(10**9)}, "'a' repeats its elements to 4000000000 bytes"),
    ],
)
def test_what_is_no_dense_tensor_is_named(file: Path, value: Any, words: str) -> None:
    torch.save(value, file)
    with pytest.raises(FormatError, match=words.replace(".", r"\.")):
        read_torch_file(file)


def test_a_quantized_tensor_is_refused(file: Path) -> None:
    torch.save({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, file)
    with pytest.raises(FormatError, match="'a' is quantized"):
        read_torch_file(file)


class Malicious:
    """To unpickle it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare pickle"])
def test_code_is_never_run(file: Path, tmp_path: Path, kind: str) -> None:
    trap = tmp_path / "trap"
    value = {"a": torch.ones(2) if kind != "bare pickle" else 1, "b": Malicious(trap)}
    if kind == "bare pickle":
        file.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(FormatError, match=r"model\.pt: not a file of plain tensors, refused without running"):
        read_torch_file(file)
    assert not trap.exists()
    if kind == "bare pickle":
        pickle.loads(file.read_bytes())
        assert trap.exists(), "the trap works where it is let"


def test_a_compressed_record_is_refused(file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.pt"
    torch.save({"a": torch.zeros(1000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(FormatError, match=r"'.*' is compressed"):
        read_torch_file(file)


def test_a_bare_pickles_tensor_cannot_claim_more_than_the_file_has(file: Path) -> None:
    data = saved({"a": torch.zeros(7, 11)}, zipped=False)
    sizes = b"K\x07K\x0b\x86"  # the pickled shape (7, 11)
    assert data.count(sizes) == 1
    file.write_bytes(data.replace(sizes, b"M\xff\xffK\x0b\x86"))
    with pytest.raises(FormatError):
        read_torch_file(file)


def saved(value: Any, *, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.mark.parametrize("zipped", [True, False])
def test_damage_is_refused_or_read_within_the_file(file: Path, zipped: bool) -> None:
    data = saved({"a": torch.randn(6, 5), "b": torch.arange(4)}, zipped=zipped)
    for length in range(0, len(data), 31):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_torch_file(file)
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    for _ in range(100):
        place, bit = (int(torch.randint(high, (), generator=generator)) for high in (len(data), 8))
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        file.write_bytes(changed)
        try:
            entries = read_torch_file(file)
        except FormatError:
            continue
        assert all(len(entry.read()) == entry.nbytes for entry in entries.values())


def test_a_single_file_is_a_checkpoint_only_when_allowed(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    with pytest.raises(FormatError, match=r"model\.pt: a pickle.*allow_torch"):
        read_checkpoint(file)
    checkpoint = read_checkpoint(file, allow_torch=True)
    (component,) = checkpoint.components
    assert (checkpoint.kind, component.name, component.format, component.files) == (
        "tensors",
        "model",
        "torch",
        ("model.pt",),
    )
    assert bytes(component.tensors["a"].read()) == as_bytes(torch.ones(2))
