"""`dtype: auto` means float32 for the types that the processor does not compute with, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.weights.formats.test_published_quantization import save

from cluster.registry.importing import import_checkpoint
from configs.model import AdapterConfig, ModelConfig
from weights.operations.externalize import externalize, unpacked_bytes
from weights.platform.processor import auto_dtype
from weights.storage.store import WeightStore

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"
NO_F16, NEITHER = "auto without F16", "auto without BF16 and F16"
SKYLAKE = {"avx2", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cpu", {"avx2", "fma", "f16c"}, NEITHER),
        ("cpu-private", SKYLAKE, NO_F16),
        ("cpu", SKYLAKE | {"avx512_bf16"}, NO_F16),
        ("cpu", SKYLAKE | {"avx512_bf16", "avx512_fp16"}, "auto"),
        ("cpu", {"avx2", "amx_bf16", "amx_tile"}, NO_F16),
        ("cpu", {"fp", "asimd", "asimdhp", "bf16"}, "auto"),  # ARM
        ("cpu", {"fp", "asimd"}, NEITHER),
        ("cpu", set(), "auto"),  # nothing is known
        ("cuda", {"avx2"}, "auto"),
        ("cuda:1", {"avx2"}, "auto"),
        ("sim", {"avx2"}, "auto"),
    ],
)
def test_what_auto_means_follows_from_the_processor(device: str, flags: set[str], expected: str) -> None:
    assert auto_dtype(device, flags) == expected


def _in_dtype(source: Path, target: Path, dtype: torch.dtype) -> Path:
    shutil.copytree(source, target)
    for file in target.rglob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    return target


def _types(store: WeightStore, model: str) -> set[str]:
    components = store.manifest(model).components.values()
    return {ref.dtype for component in components for ref in component.tensors.values()}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("model", "stored", "dtype", "expected"),
    [
        ("digits-flux", torch.float16, NO_F16, "F32"),
        ("digits-flux", torch.bfloat16, NO_F16, "BF16"),
        ("digits-flux", torch.bfloat16, NEITHER, "F32"),
        ("digits-flux", torch.float16, "auto", "F16"),
        ("digits-flux", torch.float16, "float16", "F16"),
        ("adder", torch.float16, NEITHER, "F32"),
        ("adder", torch.bfloat16, NEITHER, "BF16"),  # the kernels read it as it is
        ("texts-bert", torch.bfloat16, NEITHER, "F32"),
        ("bold", torch.float16, NEITHER, "F16"),  # a LoRA is cast to its model where it is fitted
    ],
)
def test_what_a_checkpoint_is_stored_in(
    tmp_path: Path, model: str, stored: torch.dtype, dtype: str, expected: str
) -> None:
    folder = _in_dtype(MODELS / model, tmp_path / model, stored)
    store = WeightStore(tmp_path / "store")
    externalize(store, model, folder, dtype=dtype)
    assert _types(store, model) - {"I64"} == {expected}


def test_a_packed_model_keeps_its_types(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = WeightStore(tmp_path / "store")
    externalize(store, "tiny", file, dtype=NEITHER)
    assert _types(store, "tiny") == {"F16"}


def test_an_import_says_which_types_were_widened(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    folder = _in_dtype(MODELS / "digits-flux", tmp_path / "flux", torch.float16)
    entry = ModelConfig(id="flux", path=str(folder))
    for _ in range(2):  # imported, and found unchanged
        assert import_checkpoint(store, entry, auto_dtype=NEITHER).widened == ("F16",)
    assert _types(store, "flux") == {"F32"}
    assert import_checkpoint(store, entry).widened == ()  # on a card, say
    assert _types(store, "flux") == {"F16"}
    asked = ModelConfig(id="asked", path=str(folder), dtype="float16")
    assert import_checkpoint(store, asked, auto_dtype=NEITHER).widened == ()
    assert _types(store, "asked") == {"F16"}
    bold = AdapterConfig(id="bold", path=str(MODELS / "bold"), base=("flux",))
    assert import_checkpoint(store, bold, auto_dtype=NEITHER).widened == ()


def test_the_line_at_start_names_the_models_and_the_way_out() -> None:
    from cluster.registry.directory import ModelRecord
    from deployments.console.running import widened_line

    records = [ModelRecord("plain", "ready"), ModelRecord("sd15", "ready", widened=("F16",))]
    assert widened_line(records[:1]) is None
    line = widened_line(records)
    assert line is not None
    assert line.startswith("sd15: run in float32, for this processor computes float16 about ten times slower")
    assert "dtype: float16 keeps" in line
    many = [ModelRecord(f"m{number}", "ready", widened=("BF16",)) for number in range(20)]
    assert "and 12 more" in str(widened_line(many))
    assert json.dumps(widened_line(many)).count("bfloat16") == 2


def test_the_line_about_unpacked_weights_says_their_bytes(store: WeightStore, tmp_path: Path) -> None:
    from cluster.registry.directory import ModelRecord
    from deployments.console.running import unpacked_line, widened_line

    parts = {"qweight": np.zeros((4, 8), np.int32), "qzeros": np.zeros((2, 1), np.int32)}
    parts |= {"scales": np.ones((2, 8), np.float16), "g_idx": np.arange(32, dtype=np.int32) % 2}
    save(tmp_path / "m", {"quant_method": "gptq", "bits": 4, "desc_act": True}, parts)
    summary = import_checkpoint(store, ModelConfig(id="m", path=str(tmp_path / "m")))
    assert unpacked_bytes(summary.widened) == 8 * 32 * 2
    record = ModelRecord("m", "ready", nbytes=summary.nbytes, widened=summary.widened)
    assert summary.nbytes == 8 * 32 * 2 + 8 * 2
    assert str(unpacked_line([record])).startswith("m (512 bytes): quantized in a way that nothing here computes with")
    assert widened_line([record]) is None
    assert unpacked_line([ModelRecord("plain", "ready")]) is None
