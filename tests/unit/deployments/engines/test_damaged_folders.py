"""A damaged folder is refused at import in the words in which loading it would fail, whatever is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from kit.tiny.pipelines import make
from safetensors.torch import load_file, save_file

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.libraries.config_files import read_config
from deployments.engines.llm.models.registry import load_config
from deployments.engines.llm.tokenizer import load_tokenizer as load_llm_tokenizer
from deployments.engines.records.protocol import EngineError
from deployments.engines.servable import why_unservable
from deployments.engines.stock.loading import StockModel
from deployments.engines.text.encoder import load_text_encoder
from weights.formats.checkpoint import read_checkpoint
from weights.formats.encoder_files import tokenizer_folder
from weights.formats.source import SourceComponent

DEMO = Path(__file__).resolve().parents[4] / "infra" / "demo" / "models"
OWN_CODE = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
WORDS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + "\n".join("abcdefghijk")


def changed(path: str, **more: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / path
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | more))

    return change


def written(path: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def removed(*paths: str) -> Callable[[Path], None]:
    return lambda folder: (
        [
            shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink(missing_ok=True)
            for path in paths
        ]
        and None
    )


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


def tensors_of(part: SourceComponent, folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(folder / part.folder / name) for name in part.files]
    return {name: tensor for file in files for name, tensor in file.items()}


def load(folder: Path) -> None:
    """Do what replicas do for the first request of a model."""
    checkpoint = read_checkpoint(folder)
    if checkpoint.kind == "llm":
        load_config(folder)
        load_llm_tokenizer(folder)
        return
    modules: dict[str, Any] = {}
    stock = checkpoint.class_name if folder.name.startswith("stock") else None
    for part in checkpoint.components:
        if part.library == "diffusers" or stock:
            own = tensors_of(part, folder)
            modules[part.name] = build_module(part.library, part.class_name, folder / part.folder, own)
    if stock:
        StockModel(stock, folder, modules)
    elif checkpoint.kind == "diffusion":
        DenoisePipeline(family_of(checkpoint.class_name or ""), folder, modules)
    for part in checkpoint.components:
        if part.library == "transformers" and not stock:
            where = folder / part.folder
            beside = folder / tokenizer_folder(part.folder)
            load_text_encoder(where, part.library, part.class_name, beside, tensors_of(part, folder))


def bert(folder: Path) -> Path:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertModel(transformers.BertConfig(vocab_size=16, **sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text(WORDS)
    changed("tokenizer_config.json", tokenizer_class="BertTokenizer")(folder)
    stages = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(stages))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Sound folders, by what they are."""
    root = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    make("AuraFlowPipeline", root / "stock-aura")
    make("StableDiffusionInstructPix2PixPipeline", root / "stock-pix2pix")
    return {
        "llm": DEMO / "adder",
        "sdxl": DEMO / "digits-sdxl",
        "bert": bert(root / "bert"),
        "stock-aura": root / "stock-aura",
        "stock-pix2pix": root / "stock-pix2pix",
    }


def distilled(folder: Path) -> None:
    """Make the UNet one that is told the guidance, as those of LCM are."""
    changed("unet/config.json", time_cond_proj_dim=8)(folder)
    (file,) = (folder / "unet").glob("*.safetensors")
    width = read_config(folder / "unet" / "config.json")["block_out_channels"][0]
    tensors = load_file(file)
    like = next(iter(tensors.values()))
    save_file(tensors | {"time_embedding.cond_proj.weight": torch.zeros(width, 8, dtype=like.dtype)}, file)


class Damage(NamedTuple):
    """A damage that is done to a folder, and words of the refusal."""

    model: str
    change: Callable[[Path], None]
    words: str


TOKENS = "tokenizer_config.json"
PANICKING = {
    "type": "BPE",
    "continuing_subword_prefix": "####",  # longer than the words that are merged
    "vocab": {"a": 0, "b": 1, "ab": 2},
    "merges": ["a b"],
}
DAMAGES = {
    "llm: a tokenizer of its own": Damage("llm", changed(TOKENS, **OWN_CODE), "code that comes with the model"),
    "llm: named as a text": Damage("llm", changed(TOKENS, **OWN_CODE | {"auto_map": ["own.Tokens", None]}), "own.Tok"),
    "llm: no tokenizer": Damage("llm", removed("tokenizer.json"), "there is no tokenizer"),
    "llm: cut off": Damage("llm", written("tokenizer.json", '{"version": "1.0", "mo'), "tokenizer.json: cannot be"),
    "llm: of nothing": Damage("llm", written("tokenizer.json", "{}"), "tokenizer.json: is no tokenizer"),
    "llm: of no known kind": Damage("llm", changed("tokenizer.json", model={"type": "Own"}), "is no tokenizer"),
    "llm: a vocabulary that its library panics over": Damage(
        "llm", changed("tokenizer.json", model=PANICKING), "is no tokenizer: PanicException: range end index"
    ),
    "llm: settings cut off": Damage("llm", written(TOKENS, "{"), f"{TOKENS}: cannot be read as JSON"),
    "llm: settings in a list": Damage("llm", written(TOKENS, "[]"), "expected a JSON object"),
    "llm: a length in words": Damage("llm", changed(TOKENS, model_max_length="long"), "model_max_length is 'long'"),
    "llm: a class by number": Damage("llm", changed(TOKENS, tokenizer_class=5), "tokenizer_class is 5"),
    "llm: a template by number": Damage(
        "llm", both(removed("chat_template.jinja"), changed(TOKENS, chat_template=5)), "chat_template is 5"
    ),
    "llm: a template in no code": Damage("llm", written("chat_template.jinja", b"\xff\xfe"), "jinja: is no text"),
    "llm: special tokens cut off": Damage("llm", written("special_tokens_map.json", "{"), "special_tokens_map.json"),
    "llm: sentencepiece": Damage(
        "llm",
        both(
            removed("tokenizer.json"), written("tokenizer.model", b"x"), changed(TOKENS, tokenizer_class="T5Tokenizer")
        ),
        "the package sentencepiece",
    ),
    "llm: tiktoken": Damage(
        "llm",
        both(removed("tokenizer.json"), written("a.tiktoken", b"x"), changed(TOKENS, tokenizer_class="Qwen2Tokenizer")),
        "the package tiktoken",
    ),
    "llm: an unknown class without tokenizer.json": Damage(
        "llm",
        both(removed("tokenizer.json"), written("vocab.txt", WORDS), changed(TOKENS, tokenizer_class="OwnTokenizer")),
        "has no tokenizer class 'OwnTokenizer'",
    ),
    "llm: an activation": Damage("llm", changed("config.json", hidden_act="gelu"), "activation 'gelu'"),
    "llm: layers": Damage("llm", changed("config.json", layer_types=["own"]), "layers of type 'own'"),
    "llm: a config of its own": Damage("llm", changed("config.json", model_type="own"), "model_type 'own' is not one"),
    "sdxl: its solver": Damage(
        "sdxl", changed("model_index.json", scheduler=["diffusers", "OwnScheduler"]), "solver diffusers.OwnScheduler"
    ),
    "sdxl: its VAE": Damage(
        "sdxl", changed("model_index.json", vae=["diffusers", "AutoencoderOwn"]), "no model class 'AutoencoderOwn'"
    ),
    "sdxl: its UNet": Damage(
        "sdxl", changed("model_index.json", unet=["diffusers", "UNet2DConditionOwnModel"]), "(near names: UNet2DCond"
    ),
    "sdxl: a distilled UNet": Damage("sdxl", distilled, "embedded guidance"),
    "sdxl: a text encoder": Damage(
        "sdxl", changed("model_index.json", text_encoder=["transformers", "OwnTextModel"]), "no model class 'OwnTextMo"
    ),
    "sdxl: a tokenizer of its own": Damage(
        "sdxl", changed(f"tokenizer/{TOKENS}", **OWN_CODE), "code that comes with the model"
    ),
    "sdxl: a tokenizer cut off": Damage("sdxl", written("tokenizer_2/tokenizer.json", "{"), "cannot be read as JSON"),
    "sdxl: words without merges": Damage(
        "sdxl",
        both(removed("tokenizer/tokenizer.json"), written("tokenizer/vocab.json", "{}")),
        "no merges.txt beside vocab.json",
    ),
    "sdxl: damaged words": Damage(
        "sdxl",
        both(
            removed("tokenizer/tokenizer.json"),
            written("tokenizer/vocab.json", '{"a'),
            written("tokenizer/merges.txt", ""),
        ),
        "vocab.json: is no vocabulary",
    ),
    "bert: a model of its own": Damage(
        "bert",
        changed("config.json", architectures=["OwnModel"], auto_map={"AutoModel": "own.OwnModel"}),
        "; code that comes with a model (auto_map) is never run",
    ),
    "bert: a stage of its own": Damage(
        "bert",
        written("modules.json", json.dumps([{"idx": 0, "name": "0", "path": "", "type": "own_st.Transformer"}])),
        "unknown stage 'own_st.Transformer' (known: Transformer, Pooling, Normalize, Dense); code that comes",
    ),
    "bert: an unknown pooling": Damage(
        "bert", written("1_Pooling/config.json", '{"pooling_mode": "own"}'), "unknown pooling 'own'"
    ),
    "bert: its words": Damage("bert", written("vocab.txt", b"\xff\xfe\x00"), "vocab.txt: is no vocabulary"),
    "stock: its scheduler": Damage(
        "stock-aura", changed("model_index.json", scheduler=["diffusers", "OwnScheduler"]), "component 'OwnScheduler'"
    ),
    "stock: its scheduler's config": Damage(
        "stock-aura", removed("scheduler/scheduler_config.json"), "without its scheduler_config.json"
    ),
    "stock: its tokenizer": Damage("stock-aura", removed("tokenizer/tokenizer.json"), "there is no tokenizer"),
    "stock: a part by its own code": Damage(
        "stock-aura", changed("model_index.json", tokenizer=["own", "OwnTokenizer"]), "its tokenizer is of 'own'"
    ),
    "stock: a part that is not named": Damage(
        "stock-aura", changed("model_index.json", scheduler=[None, None]), "needs a scheduler"
    ),
    "stock: its VAE": Damage(
        "stock-aura", changed("model_index.json", vae=["diffusers", "AutoencoderOwn"]), "model class 'AutoencoderOwn'"
    ),
    "stock: its image processor": Damage(
        "stock-pix2pix",
        both(
            changed("model_index.json", feature_extractor=["transformers", "CLIPImageProcessor"]),
            lambda folder: (folder / "feature_extractor").mkdir(exist_ok=True),
            removed("feature_extractor/preprocessor_config.json"),
        ),
        "a CLIPImageProcessor without its preprocessor_config.json",
    ),
}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", DAMAGES)
def test_import_refuses_a_damaged_folder_in_the_words_of_its_load(
    name: str, models: Mapping[str, Path], tmp_path: Path
) -> None:
    model, change, words = DAMAGES[name]
    folder = Path(shutil.copytree(models[model], tmp_path / model))
    change(folder)
    told = why_unservable(read_checkpoint(folder))
    with pytest.raises(EngineError) as refused:
        load(folder)
    assert told == str(refused.value)
    assert words in told


@pytest.mark.parametrize("model", ["llm", "sdxl", "bert", "stock-aura", "stock-pix2pix"])
def test_a_sound_folder_is_loaded_and_imported(model: str, models: Mapping[str, Path]) -> None:
    assert why_unservable(read_checkpoint(models[model])) is None
    load(models[model])


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "OwnTokenizer"},  # tokenizer.json says all
        {"auto_map": OWN_CODE["auto_map"], "tokenizer_class": "PreTrainedTokenizerFast"},  # code that nobody needs
        {"model_max_length": int(1e30)},
        {"chat_template": "{% for broken"},  # plain prompts need none; a chat is told
    ],
)
def test_what_loads_is_imported(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO / "adder", tmp_path / "llm"))
    changed(TOKENS, **settings)(folder)
    load(folder)
    assert why_unservable(read_checkpoint(folder)) is None


def test_the_classes_that_the_sources_name_are_those_of_the_libraries() -> None:
    from deployments.engines.libraries.library_classes import has_model_class, has_model_type, has_part_class

    for name in ("CLIPTextModelWithProjection", "T5EncoderModel", "BertModel", "ModernBertForSequenceClassification"):
        assert has_model_class("transformers", name) == hasattr(transformers, name)
    for name in ("CLIPTokenizer", "CLIPTokenizerFast", "ByT5Tokenizer", "CLIPImageProcessor", "Qwen2Tokenizer"):
        assert has_part_class("transformers", name) == hasattr(transformers, name)
    for name in ("DDIMScheduler", "VaeImageProcessor", "OwnScheduler"):
        assert has_part_class("diffusers", name) == hasattr(__import__("diffusers"), name)
    assert not has_model_class("transformers", "CLIPTokenizer")
    assert not has_model_class("transformers", "OwnModel")
    assert not has_model_class("os", "system")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert all(has_model_type(name) for name in known)
    assert not has_model_type("own")
    assert read_config(DEMO / "adder" / "config.json")["model_type"] == "llama"
