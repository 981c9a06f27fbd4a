"""Files that `atelier quantize` writes, against gguf-py and transformers on the dequantized weights."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.perplexity import perplexity
from deployments.engines.llm.sequences.block_manager import blocks_for
from deployments.engines.llm.sequences.sequence import Chunk, Sequence
from deployments.engines.llm.tokenizer import load_tokenizer
from deployments.engines.nn.packed_linear import PackedLinear
from deployments.engines.records.protocol import EngineError
from infra.offline.checkpoints import quantize_checkpoint
from weights.formats.gguf import read_gguf
from weights.loading.views import mapped_tensors
from weights.records.errors import FormatError, StoreError, WeightsError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3-head": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = "What is 12 + 7? Ünïcödé 👍 and <|user|> a  few\n\nlines. " * 3


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tiny: Callable[..., Any]) -> Any:
    return saved(tiny, request.param)


def saved(tiny: Callable[..., Any], name: str) -> Any:
    family, overrides = MODELS[name]
    found = tiny(family, **(SIZES | overrides))
    found.stock.save_pretrained(found.folder)
    return found


def originals(model: Any) -> dict[str, np.ndarray]:
    """The tensors as they are on disk: each expert has its own."""
    return {name: tensor.numpy() for name, tensor in load_file(model.folder / "model.safetensors").items()}


def with_values(stock: Any, values: dict[str, np.ndarray], folder: Path) -> Any:
    """The stock model with `values` in place of its weights, by their names on disk."""
    tensors = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in values.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stock.config.save_pretrained(folder)
    return type(stock).from_pretrained(folder).eval()


@torch.inference_mode()
def check_logits(model: Any, values: dict[str, np.ndarray], target: Path, tmp_path: Path) -> None:
    """Our logits on the packed file are those of transformers with `values` in place of the original weights."""
    (tmp_path / "reference").mkdir()
    reference = with_values(model.stock, originals(model) | values, tmp_path / "reference")
    ids = torch.randint(0, 260, (40,))
    expected = reference(ids[None]).logits[0]
    assert (expected - model.stock(ids[None]).logits[0]).abs().max() > 1e-3  # quantized weights are others
    folder, tensors, _ = mapped_tensors(target)
    for arithmetic, limit in {"exact": 1e-4, "fast": 0.1}.items():
        ours = create_model(load_config(folder), tensors, torch.device("cpu"), arithmetic=arithmetic)  # type: ignore[arg-type]
        runner = ModelRunner(ours, 8)
        got = torch.cat([last_logits(runner, ids[:length].tolist()) for length in (40, 23, 1)])
        wanted = expected[[39, 22, 0]]
        error = (got - wanted).abs().max() if arithmetic == "exact" else (got - wanted).norm()
        scale = wanted.abs().max() if arithmetic == "exact" else wanted.norm()
        if arithmetic == "fast" and ours.spec.experts is not None:
            limit = 1.0  # a router that hesitates may choose otherwise
        assert float(error / scale) < limit
    assert any(isinstance(module, PackedLinear) for module in ours.module.modules())


def last_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    sequence = Sequence("r", prompt, len(prompt))
    sequence.block_table = list(range(blocks_for(len(prompt))))
    return runner.run([Chunk(sequence, 0, len(prompt), is_last=True)])


def hf_name(family: str, stored: str) -> str:
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    layer = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    stem, _, leaf = stored.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{leaf}"
    _, number, kind = stem.split(".")
    if kind in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        what = kind.split("_")[1]
        if family == "mixtral":
            places = {"gate": "experts.*.w1", "down": "experts.*.w2", "up": "experts.*.w3"}
            place = f"block_sparse_moe.{'gate' if 'inp' in kind else places[what]}"
        else:
            place = f"mlp.{'gate' if 'inp' in kind else f'experts.*.{what}_proj'}"
        return f"model.layers.{number}.{place}.{leaf}"
    if kind not in layer:
        group, _, what = kind.partition("_")
        layer[kind] = f"mlp.{what}_proj" if group == "ffn" else f"self_attn.{what}{'' if 'norm' in what else '_proj'}"
    return f"model.layers.{number}.{layer[kind]}.{leaf}"


@pytest.mark.drawn(3)
def test_files_of_one_folder_are_not_taken_for_each_other(model: Any, tmp_path: Path) -> None:
    """A GGUF file is described by its own header, whatever stands beside it."""
    types = {}
    for kind in ("Q8_0", "Q4_0"):
        quantize_checkpoint(model.folder, tmp_path / f"{kind}.gguf", f"gguf-{kind.lower()}")
    for kind in ("Q8_0", "Q4_0"):
        described, tensors, _ = mapped_tensors(tmp_path / f"{kind}.gguf")
        ours = create_model(load_config(described), tensors, torch.device("cpu"))
        types[kind] = {part.packed.kind for part in ours.module.modules() if isinstance(part, PackedLinear)}
    assert "Q8_0" in types["Q8_0"]
    assert "Q4_0" not in types["Q8_0"]
    assert "Q4_0" in types["Q4_0"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_matrices_without_blocks_are_rounded_as_gguf_py_does(model: Any, kind: str, tmp_path: Path) -> None:
    for form in ("gguf-f32", f"gguf-{kind.lower()}"):
        quantize_checkpoint(model.folder, tmp_path / f"{form}.gguf", form)  # type: ignore[arg-type]
    wide, brief = (gguf.GGUFReader(tmp_path / f"gguf-{name}.gguf").tensors for name in ("f32", kind.lower()))
    for before, after in zip(wide, brief, strict=True):
        is_kept = before.data.ndim == 1 or "gate_inp" in after.name
        assert after.tensor_type.name == ("F32" if is_kept else kind), after.name
        assert np.array_equal(after.data, gguf.quants.quantize(before.data, after.tensor_type)), after.name
    folder, tensors, _ = mapped_tensors(tmp_path / f"gguf-{kind.lower()}.gguf")
    ours = create_model(load_config(folder), tensors, torch.device("cpu"))
    ids = torch.randint(0, 260, (23,))
    with torch.inference_mode():
        expected = model.stock(ids[None]).logits[0, -1]
    found = last_logits(ModelRunner(ours, 8), ids.tolist())[0].float()
    assert float((found - expected).norm() / expected.norm()) < (1.0 if ours.spec.experts is not None else 0.05)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_files_as_gguf_py_and_our_engine_read_them(model: Any, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "tiny.gguf"
    seen: list[tuple[int, int]] = []
    report = quantize_checkpoint(
        model.folder,
        target,
        f"gguf-{kind.lower()}",
        progress=lambda *done: seen.append(done),  # type: ignore[arg-type]
    )
    assert (
        seen[-1][0] <= seen[-1][1] == sum(t.numel() * 4 for t in load_file(model.folder / "model.safetensors").values())
    )
    reader = gguf.GGUFReader(target)
    state = originals(model)
    config, values = model.stock.config, {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
            scaled = model.stock.model.rotary_emb.inv_freq.numpy()
            assert np.allclose(plain / tensor.data, scaled, rtol=1e-6)
            continue
        name = hf_name(config.model_type, tensor.name)
        names = [name]
        if "*" in name:
            names = [name.replace("*", str(expert)) for expert in range(config.num_local_experts)]
        given = np.stack([state[one] for one in names]) if "*" in name else state[name]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
            tensor.name.split(".")[-2]
        )
        is_turned = heads and config.model_type in ("llama", "mistral", "mixtral")
        if is_turned:
            given = given.reshape(heads, 2, -1, *given.shape[1:]).swapaxes(1, 2).reshape(given.shape)
        is_head = tensor.name == "output.weight" or ("token_embd" in tensor.name and config.tie_word_embeddings)
        expected = "F32" if given.ndim == 1 or "gate_inp" in tensor.name else "Q8_0" if is_head else kind
        assert tensor.tensor_type.name == expected
        if expected != "F32":
            assert np.array_equal(tensor.data, gguf.quants.quantize(given, tensor.tensor_type)), tensor.name
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if is_turned:
            value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        values |= dict(zip(names, value if "*" in name else [value], strict=True))
    assert set(values) == set(state)
    check_logits(model, values, target, tmp_path)
    rows = {row.name: row for row in report.tensors}
    name = "model.layers.1.self_attn.v_proj.weight"
    errors, size = values[name] - state[name], np.sqrt(np.mean(state[name] ** 2))
    row = rows["blk.1.attn_v.weight"]
    assert row.rms_error == pytest.approx(np.sqrt(np.mean(errors**2)) / size, rel=1e-4)
    assert row.max_error == pytest.approx(np.abs(errors).max() / size, rel=1e-4)
    assert row.bits_per_weight == {"Q8_0": 8.5, "Q4_0": 4.5}[kind]
    written = [(int(tensor.n_bytes), int(tensor.n_elements)) for tensor in reader.tensors if "rope" not in tensor.name]
    num_elements = sum(elements for _, elements in written)
    assert report.bits_per_weight == pytest.approx(8 * sum(nbytes for nbytes, _ in written) / num_elements, rel=1e-3)
    stock_ids = load_tokenizer(model.folder)(TEXT)["input_ids"]
    assert load_tokenizer(tmp_path)(TEXT)["input_ids"] == stock_ids
    assert load_tokenizer(tmp_path).chat_template == load_tokenizer(model.folder).chat_template


@pytest.mark.drawn(3)
def test_int8_groups_under_their_own_names(model: Any, tmp_path: Path) -> None:
    target = tmp_path / "int8"
    report = quantize_checkpoint(model.folder, target, "int8-group")
    stored = load_file(target / "model.safetensors")
    values = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scales = stored[f"{name.removesuffix('.weight')}.scales"]
            groups = torch.from_numpy(originals(model)[name]).reshape(-1, 64)
            assert torch.equal(scales, groups.abs().amax(1) / 127)
            values[name] = (tensor.reshape(-1, 64) * scales[:, None]).reshape(tensor.shape).numpy()
    assert any("down_proj" in name or ".w2" in name for name in values)
    assert ("model.embed_tokens.weight" in values) == model.stock.config.tie_word_embeddings
    assert not any(name.endswith(".gate.weight") for name in values)
    check_logits(model, values, target, tmp_path)
    assert {row.bits_per_weight for row in report.tensors if row.kind == "I8"} == {8.5}


def test_1024_weights_take_1024_bytes_and_64_of_scales(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = saved(tiny, "llama")
    quantize_checkpoint(model.folder, tmp_path / "int8", "int8-group")
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    matrix, scales = (stored[f"model.layers.0.self_attn.k_proj.{leaf}"] for leaf in ("weight", "scales"))
    assert (matrix.shape, matrix.nbytes, scales.nbytes) == ((32, 64), 2 * 1024, 2 * 64)


def test_rows_of_no_whole_blocks_stay_float16(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("llama", hidden_size=48, intermediate_size=64)
    model.stock.save_pretrained(model.folder)
    report = quantize_checkpoint(model.folder, tmp_path / "tiny.gguf", "gguf-q4_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.0.ffn_down.weight"]) == ("F16", "Q4_0")
    notes = {row.name: row.note for row in report.tensors}
    assert notes["blk.0.ffn_up.weight"] == "rows of 48 are no whole number of blocks of 32"
    assert notes["blk.0.ffn_down.weight"] == ""


@torch.inference_mode()
def test_perplexity_is_that_of_transformers(tiny: Callable[..., Any]) -> None:
    model = saved(tiny, "llama")
    folder, tensors, _ = mapped_tensors(model.folder)
    text = "".join(seeded_rng().choice(list("abc 12\n"), 562))
    size = model.stock.config.max_position_embeddings
    told: list[tuple[int, int]] = []
    for max_tokens in (400, 2):
        ids = load_tokenizer(model.folder)(text)["input_ids"][:max_tokens]
        losses = []
        for start in range(0, len(ids), size):
            part = torch.tensor(ids[start : start + size])
            losses.append(F.cross_entropy(model.stock(part[None]).logits[0, :-1], part[1:], reduction="none"))
        expected = float(torch.cat(losses).mean().exp())
        told.clear()
        found = perplexity(folder, tensors, text, max_tokens=max_tokens, progress=lambda *pair: told.append(pair))
        assert found == pytest.approx(expected, rel=1e-4)
        assert told == [(min(start + size, len(ids)), len(ids)) for start in range(0, len(ids), size)]
    with pytest.raises(EngineError, match="the text has 1 tokens"):
        perplexity(folder, tensors, "a", max_tokens=400)


def test_the_engine_names_a_quantization_that_it_does_not_know(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = saved(tiny, "llama")
    quantize_checkpoint(model.folder, tmp_path / "int8", "int8-group")
    file = tmp_path / "int8" / "config.json"
    config = json.loads(file.read_text())
    for change in ({"quant_method": "hqq"}, {"quant_method": "int8-group"}):
        file.write_text(json.dumps(config | {"quantization_config": change}))
        folder, tensors, _ = mapped_tensors(tmp_path / "int8")
        with pytest.raises(
            EngineError, match=r"quantization_config .* is not supported; supported are int8-group, awq"
        ):
            create_model(load_config(folder), tensors, torch.device("cpu"))
    with pytest.raises(FormatError, match="quantized already"):
        quantize_checkpoint(tmp_path / "int8", tmp_path / "again", "int8-group")


@pytest.mark.parametrize("form", ["gguf-q8_0", "kuiper-int8", "int8-group"])
def test_what_fails_leaves_nothing(
    form: Any, tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = tiny("llama", **SIZES), tmp_path / "out" / "model"
    model.stock.save_pretrained(model.folder)

    def full_disk(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreError, match=r"disk full: .* were needed"):
        quantize_checkpoint(model.folder, target, form, progress=full_disk)
    assert list(target.parent.iterdir()) == []
    target.write_text("mine")
    with pytest.raises(FormatError, match="exists already"):
        quantize_checkpoint(model.folder, target, form)
    assert [file.name for file in target.parent.iterdir()] == ["model"]
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "gguf-q8_0",
            {"model_type": "mamba"},
            r"model_type 'mamba' cannot be written as GGUF; known are llama, mistral",
        ),
        ("kuiper-int8", {"model_type": "qwen3"}, "model_type 'qwen3'; a Kuiper file holds llama, qwen2"),
        ("gguf-q4_0", {"num_hidden_layers": 1}, r"tensor 'model.layers.1.* has no name in GGUF"),
        ("gguf-q4_0", {"hidden_size": "wide"}, "hidden_size is 'wide', expected a positive integer"),
        (
            "gguf-q8_0",
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope type 'longrope'; GGUF files are written for",
        ),
        ("gguf-q8_0", {"rope_parameters": {"rope_type": "yarn"}}, "factor is None, expected a number"),
        (
            "gguf-q8_0",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 64}},
            "beta_fast 64 has no place in GGUF",
        ),
    ],
)
def test_what_a_form_cannot_hold_is_named(
    form: Any, change: dict[str, Any], message: str, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny("llama", **SIZES)
    model.stock.save_pretrained(model.folder)
    source = tmp_path / "source"
    source.mkdir()
    for file in model.folder.iterdir():
        (source / file.name).symlink_to(file)
    (source / "config.json").unlink()
    config = json.loads((model.folder / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(FormatError, match=message):
        quantize_checkpoint(source, tmp_path / "target", form)
    assert not (tmp_path / "target").exists()


def test_infinities_and_no_models_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no Hugging Face folder"):
        quantize_checkpoint(tmp_path, tmp_path / "target", "int8-group")
    with pytest.raises(WeightsError, match="group size 0, expected 1 to"):
        quantize_checkpoint(tmp_path, tmp_path / "target", "int8-group", group_size=0)
    model = tiny("llama", seed=9, **SIZES)
    model.stock.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    model.stock.save_pretrained(model.folder)
    for form, name in (("gguf-q4_0", "blk.1.ffn_down.weight"), ("int8-group", "model.layers.1.mlp.down_proj.weight")):
        with pytest.raises(WeightsError, match=f"tensor {name}: .*cannot express"):
            quantize_checkpoint(model.folder, tmp_path / "target", form)  # type: ignore[arg-type]


def test_the_header_is_as_strict_readers_want_it(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = saved(tiny, "llama")
    quantize_checkpoint(model.folder, tmp_path / "tiny.gguf", "gguf-q8_0")
    header, reader = read_gguf(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert header.version == 3
    assert len(header.raw) % 32 == 0
    assert {key: _plain(value) for key, value in header.metadata.items()} == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert header.metadata["llama.rope.freq_base"] == 500000.0


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else list(value)
