"""Checkpoints that no engine runs are refused before their weights are read, in the words of their first request."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy as np
import pytest
import torch
import transformers
from kit.tiny.parts import byte_tokenizer
from safetensors.torch import save_file

from deployments.engines.llm.models.gguf_config import BLOCK_KINDS, CLASS_NAMES, FLOAT_KINDS
from deployments.engines.llm.models.registry import ARCHITECTURES, load_config
from deployments.engines.llm.tokenizer import load_tokenizer
from deployments.engines.nn.packed_weights import DENSE_KINDS, UNPACKED_KINDS
from deployments.engines.records.protocol import EngineError
from deployments.engines.servable import why_unservable
from deployments.engines.text.encoder import load_text_encoder
from deployments.engines.text.forwards import FAMILIES
from deployments.engines.text.known import ENCODER_CLASSES, PROMPT_READERS
from weights.formats.checkpoint import read_checkpoint

DEMO = Path(__file__).resolve().parents[4] / "infra" / "demo" / "models"


def reason(path: Path, component: str | None = None) -> str | None:
    return why_unservable(read_checkpoint(path, component=component))


def words_of(call: Callable[[], Any]) -> str:
    with pytest.raises(EngineError) as caught:
        call()
    return str(caught.value)


def copy(name: str, target: Path, *leave_out: str) -> Path:
    return shutil.copytree(DEMO / name, target, ignore=shutil.ignore_patterns(*leave_out))


def changed_config(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def write_gguf(
    file: Path, architecture: str, packed: gguf.GGMLQuantizationType | None = None, **tokenizer: str
) -> Path:
    """A model of one layer, whose header says all that a language model's does."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer.get("model", "gpt2"))
    writer.add_tokenizer_pre(tokenizer.get("pre", "qwen2"))
    writer.add_token_list(["a", "b"])
    layer = ["attn_norm", "ffn_norm", *(f"attn_{part}" for part in ("q", "k", "v", "output"))]
    layer += [f"ffn_{part}" for part in ("gate", "up", "down")]
    if packed is not None:
        layer.remove("attn_k")
    for name in ("token_embd", "output_norm", *(f"blk.0.{part}" for part in layer)):
        rows = 2 if name == "token_embd" else 32
        writer.add_tensor(f"{name}.weight", np.zeros((32,) if "norm" in name else (rows, 32), np.float32))
    for part in "qkv":
        writer.add_tensor(f"blk.0.attn_{part}.bias", np.zeros(32, np.float32))
    if packed is not None:
        nbytes = gguf.GGML_QUANT_SIZES[packed][1]
        writer.add_tensor("blk.0.attn_k.weight", np.zeros((2, nbytes), np.uint8), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    "model", sorted(path.name for path in DEMO.iterdir() if path.is_dir() or path.suffix == ".gguf")
)
def test_every_demo_model_can_be_served(model: str) -> None:
    assert reason(DEMO / model) is None


def test_an_encoder_of_a_pipeline_alone_can_be_served() -> None:
    assert reason(DEMO / "digits-flux", "text_encoder") is None


def test_a_gguf_of_an_unknown_architecture_is_refused_in_the_words_of_its_first_request(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "mamba")
    assert reason(file) == words_of(lambda: load_config(tmp_path))
    assert "GGUF architecture 'mamba' is not supported" in (reason(file) or "")


def test_a_denoiser_in_gguf_without_its_pipeline_is_refused(tmp_path: Path) -> None:
    words = str(reason(write_gguf(tmp_path / "flux.gguf", "flux")))
    assert "flux.gguf: a denoiser alone (GGUF architecture 'flux'): name the pipeline that it is `like`" in words


@pytest.mark.parametrize("kind", [{"model": "rwkv"}, {"pre": "no-such-split"}])
def test_a_gguf_of_an_unknown_tokenizer_is_refused_in_the_words_of_its_first_request(
    tmp_path: Path, kind: dict[str, str]
) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen2", **kind)
    assert reason(file) == words_of(lambda: load_tokenizer(tmp_path))
    assert reason(write_gguf(tmp_path / "known.gguf", "qwen2")) is None


def test_a_gguf_of_packed_types_that_nothing_computes_with_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen2", packed=gguf.GGMLQuantizationType.TQ1_0)
    assert reason(file) == words_of(lambda: load_config(tmp_path))
    assert "tensor 'blk.0.attn_k.weight' is TQ1_0, which is not supported" in (reason(file) or "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantization_config {'bits': 4, 'quant_method'"),
        ({"architectures": ["Mamba3ForCausalLM"], "model_type": "mamba"}, "; the nearest is Mamba"),
        ({"architectures": ["Olmo2ForCausalLM"], "quantization_config": {}}, "quantized weights of a Olmo2ForCausalLM"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' in "),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_a_language_models_config_that_is_not_supported_is_refused_in_the_words_of_its_first_request(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder = changed_config(copy("adder", tmp_path / "m"), **config)
    assert words in (reason(folder) or "")
    assert reason(folder) == words_of(lambda: load_config(folder))


def test_a_language_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = copy("adder", tmp_path / "m", "tokenizer*")
    assert reason(folder) == words_of(lambda: load_tokenizer(folder))
    assert "there is no tokenizer" in (reason(folder) or "")


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path: Path) -> None:
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=384, d_model=8, d_ff=8, d_kv=4, num_heads=2))
    model.save_pretrained(tmp_path)
    assert "there is no tokenizer" in (reason(tmp_path) or "")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    assert reason(tmp_path) is None


@pytest.mark.parametrize(("missing", "words"), [("tokenizer", "has no tokenizer"), ("scheduler", "has no solver")])
def test_a_pipeline_that_lacks_a_part_is_refused(tmp_path: Path, missing: str, words: str) -> None:
    folder = copy("digits-sdxl", tmp_path / "m", missing)
    assert words in (reason(folder) or "")


def wan(folder: Path) -> Path:
    vae = diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1], num_res_blocks=1, temperal_downsample=[])
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=8,
        num_layers=1,
    )  # fmt: skip
    solver = diffusers.FlowMatchEulerDiscreteScheduler()
    text_encoder = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1)
    )
    pipeline = diffusers.WanPipeline(byte_tokenizer(), text_encoder, vae, solver, transformer)
    pipeline.save_pretrained(folder)
    return folder


def changed_index(folder: Path, **more: Any) -> Path:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def test_pipelines_that_diffusers_code_runs_are_served_or_say_why_not(tmp_path: Path) -> None:
    folder = wan(tmp_path)
    assert reason(folder) is None
    for more, words in [
        (
            {"_class_name": "WanVidPipeline"},
            "diffusers 0.42.1 has no pipeline class 'WanVidPipeline' (near names: WanPipe",
        ),
        ({"_class_name": ["pipeline", "Mine"]}, "a pipeline by code that comes with the model, which is never run"),
        (
            {"_class_name": "WanPipeline", "tokenizer": ["mine", "Tokens"]},
            "its tokenizer is of 'mine', code that comes",
        ),
        ({"tokenizer": [None, None]}, "WanPipeline needs a tokenizer, and model_index.json names none"),
    ]:
        assert words in (reason(changed_index(folder, **more)) or "")
    changed_index(folder, tokenizer=["transformers", "PreTrainedTokenizerFast"])
    assert reason(folder) is None
    changed_config(folder / "text_encoder", quantization_config={"quant_method": "bitsandbytes"})
    assert "quantized text encoders are not supported (bitsandbytes)" in (reason(folder) or "")


def test_a_solver_that_is_none_of_diffusers_is_refused(tmp_path: Path) -> None:
    folder = copy("digits-sdxl", tmp_path / "m")
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scheduler": ["mine", "Solver"]}))
    assert "solver mine.Solver; expected one of diffusers" in (reason(folder) or "")


def tiny_bert(class_: Any, folder: Path, **more: Any) -> Path:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    class_(transformers.BertConfig(vocab_size=16, **sizes, **more)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijk"]))
    return folder


def test_a_model_that_labels_every_token_is_refused(tmp_path: Path) -> None:
    folder = tiny_bert(transformers.BertForTokenClassification, tmp_path / "tagger", num_labels=2)
    assert reason(folder) == words_of(lambda: load_text_encoder(folder, "transformers", None, folder, {}))
    assert "BertForTokenClassification" in (reason(folder) or "")


def test_encoders_and_rerankers_can_be_served(tmp_path: Path) -> None:
    assert reason(tiny_bert(transformers.BertForSequenceClassification, tmp_path / "reranker", num_labels=1)) is None
    assert reason(tiny_bert(transformers.BertModel, tmp_path / "encoder")) is None


def test_models_that_read_no_text_or_two_are_no_encoders(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
    }
    transformers.ViTModel(transformers.ViTConfig(patch_size=4, **vision)).save_pretrained(tmp_path / "vit")
    assert "has no vocabulary of its own" in (reason(tmp_path / "vit") or "")
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = dict.fromkeys(names, 1)
    config = transformers.BartConfig(vocab_size=16, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes)
    transformers.BartModel(config).save_pretrained(tmp_path / "bart")
    assert "needs a second text" in (reason(tmp_path / "bart") or "")


def test_a_quantized_encoder_is_refused(tmp_path: Path) -> None:
    folder = changed_config(tiny_bert(transformers.BertModel, tmp_path), quantization_config={"quant_method": "gptq"})
    assert "quantized text encoders are not supported (gptq)" in (reason(folder) or "")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [("model.diffusion_model.input_blocks.0.0.weight", "a whole model in one file"), ("w", "bare tensors")],
)
def test_a_file_of_tensors_is_refused_with_the_remedy(tmp_path: Path, tensor: str, words: str) -> None:
    file = tmp_path / "all.safetensors"
    save_file({tensor: torch.zeros(2)}, file)
    found = reason(file) or ""
    assert words in found
    assert "`like`" in found


def test_a_controlnet_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    folder = copy("outline", tmp_path / "m")
    assert reason(folder) is None
    changed_config(folder, _class_name="HunyuanDiT2DControlNetModel")
    assert "a HunyuanDiT2DControlNetModel, which is not served as an adapter" in (reason(folder) or "")


def test_a_head_of_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    (head,) = [path for path in DEMO.rglob("config.json") if "in_features" in path.read_text()][:1]
    folder = shutil.copytree(head.parent, tmp_path / "m")
    assert reason(folder) is None
    changed_config(folder, activation_function="os.system")
    assert "unknown activation_function 'os.system'" in (reason(folder) or "")


def test_the_names_that_are_known_without_torch_are_those_of_the_engines() -> None:
    assert set(CLASS_NAMES.values()) == set(ARCHITECTURES)
    assert set(FLOAT_KINDS) == set(DENSE_KINDS)
    assert set(BLOCK_KINDS) == set(UNPACKED_KINDS)
    assert {*ENCODER_CLASSES, *PROMPT_READERS} == set(FAMILIES)


def test_neither_torch_nor_transformers_nor_ray_is_needed_to_tell() -> None:
    asked = "from pathlib import Path; from weights.formats.checkpoint import read_checkpoint"
    asked += "; from deployments.engines.servable import why_unservable; import sys"
    models = [DEMO / name for name in ("adder", "digits-sdxl", "outline")]
    asked += f"; [why_unservable(read_checkpoint(Path(p))) for p in {list(map(str, models))}]"
    asked += "; sys.exit(', '.join({'torch', 'transformers', 'diffusers', 'ray'} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
