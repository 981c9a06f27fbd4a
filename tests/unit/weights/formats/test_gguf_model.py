"""Split GGUF models, written by gguf-py."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import MODEL_ARCH_NAMES

from weights.formats.checkpoint import read_checkpoint
from weights.formats.gguf import GgufModel, gguf_set, read_gguf_model
from weights.records.errors import FormatError

NAMES = [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Five tensors in three files, as gguf-py splits them."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full((2, 8), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sorted(file.name for file in tmp_path.glob("*.gguf")) == NAMES
    return tmp_path


@pytest.mark.parametrize("name", [".", *NAMES])
def test_a_split_model_is_one_component_of_several_files(split: Path, name: str) -> None:
    checkpoint = read_checkpoint(split / name)
    (component,) = checkpoint.components
    assert (checkpoint.kind, component.files) == ("llm", tuple(NAMES))
    assert set(checkpoint.headers) == {f"{file}.header" for file in NAMES}
    assert {name: np.frombuffer(t.read(), np.float32)[0] for name, t in component.tensors.items()} == {
        f"t{number}": number for number in range(5)
    }


def test_a_missing_file_is_named(split: Path) -> None:
    (split / NAMES[1]).unlink()
    with pytest.raises(FormatError, match=rf"{NAMES[1]}: missing, one of the 3 files"):
        read_checkpoint(split)


def test_a_file_in_anothers_place_is_refused(split: Path) -> None:
    (split / NAMES[1]).write_bytes((split / NAMES[2]).read_bytes())
    with pytest.raises(FormatError, match=rf"{NAMES[1]}: has split\.no 2 of 3, expected 1 of 3"):
        read_checkpoint(split)


def test_a_renamed_part_is_not_a_model(split: Path) -> None:
    (split / NAMES[0]).rename(split / "whole.gguf")
    with pytest.raises(FormatError, match=r"whole\.gguf: has split\.no 0 of 3, expected 0 of 1"):
        read_checkpoint(split / "whole.gguf")


def patch(key: str, value: int, kind: str) -> Callable[[bytes], bytes]:
    """Another value for an integer key of a header."""

    def change(data: bytes) -> bytes:
        at = data.index(key.encode()) + len(key) + 4
        return data[:at] + struct.pack(kind, value) + data[at + struct.calcsize(kind) :]

    return change


def test_the_number_of_tensors_must_be_the_declared_one(split: Path) -> None:
    first = split / NAMES[0]
    first.write_bytes(patch("split.tensors.count", 6, "<i")(first.read_bytes()))
    with pytest.raises(FormatError, match=r"split\.tensors\.count is 6, the files have 5 tensors"):
        read_checkpoint(split)


def test_a_tensor_in_two_files_is_refused(split: Path) -> None:
    second = split / NAMES[1]
    second.write_bytes(second.read_bytes().replace(b"t2", b"t0"))
    with pytest.raises(FormatError, match=rf"{NAMES[1]}: tensor 't0' is also in {NAMES[0]}"):
        read_checkpoint(split)


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_impossible_numbers_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=name):
        gguf_set(tmp_path / name)


def test_which_architectures_generate_text() -> None:
    def is_llm(architecture: str) -> bool:
        return GgufModel({}, {"general.architecture": architecture}, {}).is_llm

    encoders = {name for name in MODEL_ARCH_NAMES.values() if not is_llm(name)}
    assert encoders == {
        "clip", "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
        "eurobert", "gemma-embedding", "llama-embed", "t5", "t5encoder", "wavtokenizer-dec", "chameleon", "dream",
        "llada", "llada-moe", "rnd1", "cogvlm", "paddleocr",
    }  # fmt: skip
    assert not any(is_llm(name) for name in ("flux", "sd3", "sdxl", "wan", ""))
    assert not GgufModel({}, {"general.architecture": 3}, {}).is_llm


def test_a_single_file_needs_no_split_keys(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert list(read_gguf_model(gguf_set(tmp_path / "x.gguf")).tensors) == ["w"]
