"""A registered language model can answer; a folder that cannot is refused before, with the reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from kit.scripted_llm import BEGIN, save_scripted_llm
from safetensors.torch import load_file, save_file

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.registry import create_any_model, load_config
from deployments.engines.nn.packed_weights import Arithmetic
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.engines.servable import why_unservable
from infra.offline.checkpoints import quantize_checkpoint
from infra.supported.language_models import save_tiny, tiny_model
from weights.formats.checkpoint import read_checkpoint
from weights.formats.gguf import encode_gguf_header, read_gguf, write_gguf
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

ADDITION = "<s><|user|>2+3<|end|><|assistant|>"
DEMO = Path(__file__).resolve().parents[5] / "infra" / "demo" / "models"


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed


def with_config(**fields: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | fields
        written = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(written))

    return changed


def with_generation(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "generation_config.json").write_text(text) and None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_tensors(lambda t: t.update({"model.layers.0.self_attn.masked_bias": torch.tensor(-1e9)})), None),
        (with_tensors(lambda t: t.update({"v_head.summary.weight": torch.zeros(1, 64)})), None),
        (with_tensors(lambda t: t.pop("lm_head.weight")), "'lm_head.weight' is missing"),
        (with_tensors(lambda t: t.pop("model.norm.weight")), "'model.norm.weight' is missing"),
        (with_tensors(lambda t: t.pop("model.layers.0.self_attn.k_proj.weight")), "k_proj.weight' is missing"),
        (with_generation('{"eos_token_id": 1,'), "generation_config.json: cannot be read as JSON"),
        (with_generation('{"do_sample": false, "top_p": 0.0}'), None),
        (with_generation('{"temperature": -1, "repetition_penalty": 0, "max_new_tokens": 0}'), None),
        (with_tensors(lambda t: t.pop("model.layers.0.mlp.up_proj.weight")), "up_proj.weight' is missing"),
        (with_tensors(lambda t: t.pop("model.layers.0.input_layernorm.weight")), "input_layernorm.weight' is missing"),
        (with_config(num_hidden_layers=10**12), "'model.layers.1.input_layernorm.weight' is missing"),
        (with_config(attention_bias=True), "q_proj.bias' is missing"),
        (with_config(vocab_size=9), "'model.embed_tokens.weight' has shape "),
        (with_config(intermediate_size=32), "gate_proj.weight' has shape [64, 320], expected [32, 320]"),
        (with_config(pad_token_id=-1), None),
        (with_config(pad_token_id=10**6), None),
        (with_config(architectures=None), None),
    ],
)
def test_what_is_ready_answers(change: Callable[[Path], None], reason: str | None, tmp_path: Path) -> None:
    save_scripted_llm(tmp_path, ["ok"], "{{ messages }}" + BEGIN)
    change(tmp_path)
    refused = why_unservable(read_checkpoint(tmp_path))
    if reason is not None:
        assert reason in str(refused)
        return
    assert refused is None
    assert answer(tmp_path, load_file(tmp_path / "model.safetensors"), BEGIN) == "ok"


def answer(model: Path, tensors: Mapping[str, torch.Tensor], prompt: str, arithmetic: Arithmetic = "fast") -> str:
    engine = LLMEngine(model, tensors, LLMEngineConfig(kv_cache_bytes=2**22, arithmetic=arithmetic))
    sampling = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, **engine.generation_defaults})
    engine.add_request(TextRequest("r", engine.encode_text(prompt), sampling))
    text = ""
    while engine.has_work:
        text += "".join(delta.text for delta in engine.step())
    return text


def test_what_is_left_out_is_left_out_of_exact_arithmetic_too(tmp_path: Path) -> None:
    save_scripted_llm(tmp_path, ["ok"], "{{ messages }}" + BEGIN)
    surplus = {"model.layers.0.self_attn.masked_bias": torch.tensor(-1e9), "v_head.weight": torch.zeros(1, 64)}
    surplus["model.position_ids"] = torch.arange(3)
    tensors = load_file(tmp_path / "model.safetensors") | surplus
    assert answer(tmp_path, tensors, BEGIN, "exact") == "ok"


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(scope="module")
def gguf_adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "adder.gguf"
    quantize_checkpoint(DEMO / "adder", file, "gguf-f32")
    return file


def dropped(*names: str) -> Callable[[Tensors, dict[str, Any]], Any]:
    return lambda tensors, metadata: [tensors.pop(name) for name in names]


def added(name: str, *shape: int) -> Callable[[Tensors, dict[str, Any]], Any]:
    return lambda tensors, metadata: tensors.update({name: ("F32", shape, bytes(4 * math.prod(shape)))})


def keyed(name: str, value: Any) -> Callable[[Tensors, dict[str, Any]], Any]:
    return lambda tensors, metadata: metadata.update({name: value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors, metadata: None, None),
        (dropped("blk.0.ffn_up.weight"), "'blk.0.ffn_up.weight' is missing"),
        (dropped("blk.1.attn_q.weight"), "'blk.1.attn_q.weight' is missing"),
        (dropped("blk.0.attn_norm.weight"), "'blk.0.attn_norm.weight' is missing"),
        (dropped("output_norm.weight"), "'output_norm.weight' is missing"),
        (added("blk.0.ffn_up.weight", 8, 8), "'blk.0.ffn_up.weight' has shape [8, 8], expected"),
        (added("blk.0.attn_q.scale", 1), "'blk.0.attn_q.scale' has no place in a "),
        (added("blk.0.attn_output.bias", 128), "'blk.0.attn_output.bias' has no place in a "),
        (added("v_head.summary.weight", 1, 8), None),
        (added("blk.0.attn.masked_bias", 1), None),
        (added("blk.99.attn_q.weight", 8, 8), None),
        (keyed("tokenizer.ggml.padding_token_id", -1), None),
        (keyed("tokenizer.ggml.padding_token_id", 10**6), None),
        (keyed("tokenizer.ggml.bos_token_id", 2**32 - 1), None),
        (keyed("tokenizer.ggml.token_type", np.ones(3, np.int32)), "tokenizer.ggml.token_type is"),
        (keyed("tokenizer.ggml.tokens", ("a", "a")), "has a token twice"),
    ],
)
def test_a_gguf_file_that_is_ready_answers(
    change: Callable[[Tensors, dict[str, Any]], Any], reason: str | None, gguf_adder: Path, tmp_path: Path
) -> None:
    header, content = read_gguf(gguf_adder), gguf_adder.read_bytes()
    tensors: Tensors = {
        name: (tensor.dtype, tuple(tensor.shape), content[tensor.offset : tensor.offset + tensor.nbytes])
        for name, tensor in header.tensors.items()
    }
    metadata = dict(header.metadata)
    change(tensors, metadata)
    infos = {name: (kind, shape) for name, (kind, shape, _) in tensors.items()}
    readers = [(len(data), lambda data=data: data) for _, _, data in tensors.values()]
    file = tmp_path / "model.gguf"
    write_gguf(file, encode_gguf_header(metadata, infos), readers)
    refused = why_unservable(read_checkpoint(file))
    if reason is not None:
        assert reason in str(refused)
        return
    assert refused is None
    given = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
        for name, (_, shape, data) in tensors.items()
    }
    assert answer(file, given, ADDITION) == "5."


@pytest.mark.parametrize(("most", "few"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_a_decoder_of_several_types_is_stored_in_that_of_most_of_it(
    most: torch.dtype, few: torch.dtype, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tensors = save_scripted_llm(folder, ["ok"], "{{ messages }}" + BEGIN)
    mixed = {name: tensor.to(few if "norm" in name else most) for name, tensor in tensors.items()}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    assert why_unservable(read_checkpoint(folder)) is None
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "mixed", folder)
    stored = load_model(manifest, LocalExtents(store.packs))["model"]
    assert {tensor.dtype for tensor in stored.values()} == {most}
    assert answer(store.skeleton(manifest), stored, BEGIN) == "ok"


def with_doubled(name: str) -> Callable[[Path], None]:
    """Name a tensor a second time in its file's header."""

    def changed(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + size].decode().rstrip()
        again = json.dumps({name: json.loads(header)[name]})
        doubled = f"{header[:-1]}, {again[1:]}".encode()
        file.write_bytes(len(doubled).to_bytes(8, "little") + doubled + content[8 + size :])

    return changed


STOCK: Final = "Gemma2ForCausalLM", "GPT2LMHeadModel", "DeepseekV3ForCausalLM", "BloomForCausalLM"


@pytest.fixture(scope="module")
def stock_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in STOCK:
        folders[name] = tmp_path_factory.mktemp(name)
        save_tiny(tiny_model(name), folders[name])
    return folders


def tensor_of(folder: Path, part: str) -> str:
    """Return the name of a tensor of the second layer."""
    return next(name for name in load_file(folder / "model.safetensors") if ".1." in name and part in name)


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", STOCK)
def test_what_is_ready_of_transformers_own_classes_can_be_made(
    class_name: str, stock_folders: dict[str, Path], tmp_path: Path
) -> None:
    """Surplus, missing, doubled and misshapen tensors, broken defaults, odd padding ids: one after the other."""
    norm = tensor_of(stock_folders[class_name], "norm" if class_name != "GPT2LMHeadModel" else "ln_1")
    inner = tensor_of(stock_folders[class_name], "mlp")
    cases: list[tuple[Callable[[Path], None], str | None]] = [
        (lambda folder: None, None),
        (with_tensors(lambda t: t.update({"v_head.summary.weight": torch.zeros(1, 8)})), None),
        (with_tensors(lambda t: t.update({"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)})), None),
        (with_tensors(lambda t: t.pop(norm)), norm.removeprefix("transformer.")),
        (with_tensors(lambda t: t.pop(inner)), ""),
        (with_tensors(lambda t: t.update({norm: torch.ones(3)})), "shape"),
        (with_doubled(norm), norm),
        (with_generation('{"eos_token_id": 1,'), "generation_config.json: cannot be read as JSON"),
        (with_generation('{"top_p": 0.0, "temperature": -1}'), None),
        (with_config(pad_token_id=-1), None),
        (with_config(num_hidden_layers=10**9, n_layer=10**9), "000"),
    ]
    for number, (change, reason) in enumerate(cases):
        folder = shutil.copytree(stock_folders[class_name], tmp_path / str(number))
        change(folder)
        try:
            refused = why_unservable(read_checkpoint(folder))
        except FormatError as error:
            refused = str(error)
        if reason is None:
            assert refused is None, number
            tensors = load_file(folder / "model.safetensors")
            create_any_model(load_config(folder), tensors, torch.device("cpu"))
        else:
            assert reason in str(refused), number
            assert refused is not None, number


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: None, None),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "up_proj.weight' is missing"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.scales"), "up_proj.weight' has no scales"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.scales": torch.ones(3)}), "up_proj.scales' is for 192"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "'model.norm.weight' has shape [3]"),
        (lambda t: t.update({"v_head.summary.weight": torch.zeros(1, 64)}), None),
    ],
)
def test_a_quantized_model_that_is_ready_answers(
    change: Callable[[dict[str, torch.Tensor]], Any], reason: str | None, int8_adder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(int8_adder, tmp_path / "model")
    with_tensors(change)(folder)
    refused = why_unservable(read_checkpoint(folder))
    if reason is not None:
        assert reason in str(refused)
        return
    assert refused is None
    assert answer(folder, load_file(folder / "model.safetensors"), ADDITION) == "5."


@pytest.fixture(scope="module")
def int8_adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "adder"
    quantize_checkpoint(DEMO / "adder", folder, "int8-group")
    return folder


def test_a_kuiper_file_beside_the_config_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kuiper"
    quantize_checkpoint(DEMO / "adder", folder, "kuiper-int8")
    assert why_unservable(read_checkpoint(folder)) is None
    (file,) = folder.glob("*.bin")
    config = (folder / "config.json").read_text()
    for key, value in (("vocab_size", 9), ("num_hidden_layers", 10**6), ("tie_word_embeddings", None)):
        changed = json.loads(config) | {key: not json.loads(config).get(key) if value is None else value}
        (folder / "config.json").write_text(json.dumps(changed))
        assert f"config.json says {key} " in str(why_unservable(read_checkpoint(folder)))
    (folder / "config.json").write_text(config)
    file.write_bytes(file.read_bytes()[:-4])  # a tensor that is not whole
    with pytest.raises(FormatError):
        read_checkpoint(folder)
