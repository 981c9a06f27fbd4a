"""Names of weight files as each library looks for them, and files that cannot be written without their headers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weights.records.errors import FormatError
from weights.storage.stock import _header, _num_tensors, as_safetensors, writable


def component_of(**fields: Any) -> Any:
    plain = {"format": "pickle", "folder": ".", "files": ("a/net.ckpt",), "library": "spandrel", "metadata": {}}
    found = SimpleNamespace(**plain | fields)
    found.model_copy = lambda update: component_of(**{**vars(found), **update})
    return found


@pytest.mark.parametrize(
    ("fields", "file"),
    [
        ({}, "a/net.safetensors"),
        ({"library": "diffusers"}, "diffusion_pytorch_model.safetensors"),
        ({"library": "transformers"}, "model.safetensors"),
        ({"folder": "vae", "library": "diffusers"}, "diffusion_pytorch_model.safetensors"),
        ({"folder": "encoder"}, "model.safetensors"),
        ({"files": ("a.bin", "b.bin")}, "model.safetensors"),
    ],
)
def test_a_pickle_is_written_under_the_name_that_its_library_looks_for(fields: dict[str, Any], file: str) -> None:
    found = as_safetensors(component_of(**fields))
    assert (found.format, found.files, found.metadata) == ("safetensors", (file,), {"format": "pt"})
    told = as_safetensors(component_of(**fields, metadata={"format": "own", "a": "b"}))
    assert told.metadata == {"format": "own", "a": "b"}
    kept = component_of(format="gguf", **fields)
    assert writable(kept) is kept
    assert writable(component_of(**fields)).format == "safetensors"


def test_a_gguf_files_header_says_how_many_tensors_it_has(tmp_path: Path) -> None:
    header = b"GGUF\3\0\0\0" + (300).to_bytes(8, "little") + (7).to_bytes(8, "little")
    (tmp_path / "m.gguf.header").write_bytes(header)
    assert _num_tensors(tmp_path, "m.gguf") == 300
    with pytest.raises(FormatError, match=r"gone: No such file or directory; a weight file cannot be written without"):
        _header(tmp_path / "gone")
