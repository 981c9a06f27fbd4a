"""LoRAs on pipelines that diffusers runs: what `load_lora_weights` makes of the same file, for one request alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from kit.seeding import seeded_rng
from kit.tiny.classes import CASES, assembled
from kit.tiny.clips import VIDEOS, wan
from kit.tiny.pipelines import PIPELINES, saved
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, hooks_of, load, one_thread, run, split

from deployments.engines.diffusion.adapted_parts import StockParts, stage_of
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters, fit_pairs
from deployments.engines.records.protocol import AdapterUse, EngineError, StockRequest
from deployments.engines.servable import why_unservable
from deployments.engines.stock.adapted import with_side_paths
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.loading import StockModel
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase
from weights.operations.adapters import LoraPair, load_adapter

__all__ = ["one_thread"]

SCALE = 0.8
Layers = Mapping[str, tuple[int, int]]
# Pipelines by their tiny makers, and a call of each.
MADE: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: PIPELINES[name]
        for name in (
            *("PixArtSigmaPipeline", "SanaPipeline", "Lumina2Pipeline", "AuraFlowPipeline", "CogView4Pipeline"),
            *("ChromaPipeline", "LatentConsistencyModelPipeline", "StableDiffusionPAGPipeline", "BriaPipeline"),
        )
    },
    **VIDEOS,
    **{
        name: (lambda name=name: assembled(name, **CASES[name].parts()), CASES[name].options)
        for name in ("HunyuanVideoPipeline", "MochiPipeline", "SkyReelsV2Pipeline")
    },
}


def denoiser_of(pipeline: Any) -> tuple[str, nn.Module]:
    return next((name, getattr(pipeline, name)) for name in ("transformer", "unet") if hasattr(pipeline, name))


def matrices(layer: nn.Module, rank: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The down and up matrices of a LoRA for a layer, which change it by about as much as it has."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    down = torch.randn(rank, *weight.shape[1:], generator=generator) / down_norm(weight)
    up = torch.randn(weight.shape[0], rank, *[1] * (weight.ndim - 2), generator=generator) / 2
    return down, up


def down_norm(weight: torch.Tensor) -> float:
    return float(weight[0].numel()) ** 0.5


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {path: part for path, part in module.named_modules() if isinstance(part, nn.Linear)}


def write_lora(file: Path, pipeline: Any, *components: str, prefix: str | None = None) -> Path:
    """Write a LoRA of all linear layers of components, as diffusers saves it.

    PEFT cannot be called as the projections of AnimateDiff's modules of motion are: by keyword.
    """
    generator, tensors = torch.Generator().manual_seed(int(seeded_rng().integers(2**32))), {}
    for name in components:
        for path, layer in linear_layers(getattr(pipeline, name)).items():
            if "motion_modules" in path and ".proj_" in path:
                continue
            down, up = matrices(layer, 2, generator)
            tensors |= {f"{prefix or name}.{path}.lora_{half}.weight": one for half, one in (("A", down), ("B", up))}
    save_file(tensors, file)
    return file


def as_stock(pipeline: Any, file: Path, scale: float = SCALE, **options: Any) -> None:
    """Let a stock pipeline have a LoRA: as diffusers loads it, or in its weights where it has no loader."""
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(load_file(file), adapter_name="x", **options)
        pipeline.set_adapters("x", scale)
        return
    tensors = load_file(file)
    for name in (one for one in tensors if ".lora_A." in one):
        component, _, path = name.removesuffix(".lora_A.weight").partition(".")
        layer = getattr(pipeline, component).get_submodule(path)
        layer.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]


def use_of(file: Path, name: str = "x", scale: float = SCALE) -> dict[str, Any]:
    return {"adapters": (AdapterUse(name, scale),), "loras": {name: load_adapter(file)}}


def stock_pixels(pipeline: Any, options: Mapping[str, Any], seed: int) -> np.ndarray:
    made = pipeline(
        PROMPT, **options, num_inference_steps=2, generator=torch.Generator("cpu").manual_seed(seed), output_type="np"
    )
    found = made.frames[0] if hasattr(made, "frames") else made.images
    return (np.asarray(found) * 255).round().astype(np.uint8)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", list(MADE))
def test_a_lora_makes_what_diffusers_makes_of_it(class_name: str, tmp_path: Path) -> None:
    build, options = MADE[class_name]
    stock = saved(build, tmp_path / "model")
    file = write_lora(tmp_path / "x.safetensors", stock, denoiser_of(stock)[0])
    engine = StockEngine(load(tmp_path / "model"))
    plain = StockRequest("plain", 3, PROMPT, **split(class_name, options))
    adapted = StockRequest("adapted", 3, PROMPT, **split(class_name, options), **use_of(file))
    found = {one.request_id: run(engine, one)[0].images for one in (plain, adapted)}
    expected = stock_pixels(stock, options, 3)
    np.testing.assert_array_equal(found["plain"], expected)
    as_stock(stock, file)
    assert np.abs(found["adapted"].astype(int) - stock_pixels(stock, options, 3)).max() <= 1
    assert np.abs(found["adapted"].astype(int) - expected).max() > 1
    np.testing.assert_array_equal(
        run(engine, StockRequest("b", 3, PROMPT, **split(class_name, options)))[0].images, expected
    )
    assert hooks_of(engine.model) == 0


@pytest.fixture(scope="module")
def wan_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, StockModel, Path]:
    folder = tmp_path_factory.mktemp("wan")
    stock = saved(two_stages, folder / "model")
    return stock, load(folder / "model"), folder


def two_stages() -> Any:
    """Wan 2.2: a denoiser for the steps of high noise, and one for those of low noise."""
    pipeline = wan()
    torch.manual_seed(1)
    other = wan().transformer
    parts = {**pipeline.components, "transformer_2": other}
    return diffusers.WanPipeline(**parts, boundary_ratio=0.9)


WAN = VIDEOS["WanPipeline"][1]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "stages"), [("x", (0, 1)), ("wan-high-noise", (0,)), ("WAN_LowNoise_v2", (1,)), ("high_low", (0, 1))]
)
def test_a_lora_is_for_each_denoiser_unless_its_name_says_which(name: str, stages: Any, wan_model: Any) -> None:
    stock, model, folder = wan_model
    stock = copy.deepcopy(stock)
    file = write_lora(folder / f"{name}.safetensors", stock, "transformer")
    request = StockRequest("r", 5, PROMPT, **split("WanPipeline", WAN), **use_of(file, name))
    found = run(StockEngine(model), request)[0].images
    for stage in stages:
        stock.load_lora_weights(load_file(file), adapter_name=f"x{stage}", load_into_transformer_2=bool(stage))
        (stock.transformer_2 if stage else stock.transformer).set_adapters(f"x{stage}", SCALE)
    assert np.abs(found.astype(int) - stock_pixels(stock, WAN, 5)).max() <= 1


def test_a_file_with_both_denoisers_says_of_each_tensor_which_it_is_of(wan_model: Any) -> None:
    stock, model, folder = wan_model
    stock = copy.deepcopy(stock)
    first = write_lora(folder / "first.safetensors", stock, "transformer")
    second = load_file(write_lora(folder / "second.safetensors", two_stages(), "transformer_2", prefix="transformer"))
    second = {name: one * 1.5 for name, one in second.items()}
    both = load_file(first) | {name.replace("transformer.", "transformer_2.", 1): one for name, one in second.items()}
    save_file(both, folder / "both.safetensors")
    request = StockRequest("r", 5, PROMPT, **split("WanPipeline", WAN), **use_of(folder / "both.safetensors"))
    found = run(StockEngine(model), request)[0].images
    for stage, tensors in enumerate((load_file(first), second)):
        stock.load_lora_weights(tensors, adapter_name=f"x{stage}", load_into_transformer_2=bool(stage))
        (stock.transformer_2 if stage else stock.transformer).set_adapters(f"x{stage}", SCALE)
    assert np.abs(found.astype(int) - stock_pixels(stock, WAN, 5)).max() <= 1


def test_requests_with_and_without_it_take_turns_within_a_forward(wan_model: Any) -> None:
    stock, model, folder = wan_model
    file = write_lora(folder / "turns.safetensors", stock, "transformer")
    requests = [
        StockRequest("plain", 7, PROMPT, **split("WanPipeline", WAN)),
        StockRequest("adapted", 7, PROMPT, **split("WanPipeline", WAN), **use_of(file)),
        StockRequest("stronger", 7, PROMPT, **split("WanPipeline", WAN), **use_of(file, scale=2.0)),
    ]
    alone = {one.request_id: run(StockEngine(model), one)[0].images for one in requests}
    engines = {one.request_id: StockEngine(model) for one in requests}
    for one in requests:
        engines[one.request_id].add_request(one)
    found: dict[str, Any] = {}
    while any(engine.has_work for engine in engines.values()):
        for engine in engines.values():
            if engine.has_work:
                found |= {output.request_id: output.images for output in engine.step() if output.is_last}
                assert not engine.failures
    for name, images in alone.items():
        np.testing.assert_array_equal(found[name], images)
    assert (alone["plain"] != alone["adapted"]).any()
    assert (alone["stronger"] != alone["adapted"]).any()


def test_a_request_that_is_dropped_leaves_nothing_of_its_lora(wan_model: Any) -> None:
    stock, model, folder = wan_model
    file, engine = write_lora(folder / "left.safetensors", stock, "transformer"), StockEngine(model)
    engine.add_request(StockRequest("left", 7, PROMPT, **split("WanPipeline", WAN), **use_of(file)))
    for _ in range(4):
        engine.step()
    engine.abort("left")
    assert not any(part._forward_hooks for module in model.modules.values() for part in module.modules())


@pytest.mark.drawn
@pytest.mark.parametrize("has_text", [False, True])
def test_text_encoders_have_their_part_and_a_strength_of_their_own(has_text: bool, tmp_path: Path) -> None:
    name = "LatentConsistencyModelPipeline"
    stock = saved(PIPELINES[name][0], tmp_path / "model")
    file = write_lora(tmp_path / "x.safetensors", stock, "text_encoder", *(["unet"] if has_text else []))
    use = use_of(file) | {"adapters": (AdapterUse("x", SCALE, 0.4 if has_text else None),)}
    found = run(
        StockEngine(load(tmp_path / "model")), StockRequest("r", 2, PROMPT, **split(name, PIPELINES[name][1]), **use)
    )[0].images
    stock.load_lora_weights(load_file(file), adapter_name="x")
    for component, scale in (("text_encoder", 0.4 if has_text else SCALE), ("unet", SCALE)):
        for part in getattr(stock, component).modules():
            if hasattr(part, "set_scale"):
                part.set_scale("x", scale)
    assert np.abs(found.astype(int) - stock_pixels(stock, PIPELINES[name][1], 2)).max() <= 1


def test_what_does_not_fit_is_a_refusal(wan_model: Any) -> None:
    stock, model, folder = wan_model
    given = split("WanPipeline", WAN)
    with pytest.raises(EngineError, match=r"unknown adapter 'y' \(known: none\)"):
        run(StockEngine(model), StockRequest("r", 1, PROMPT, **given, adapters=(AdapterUse("y"),)))
    save_file({f"transformer.nothing.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}, folder / "no.safetensors")
    with pytest.raises(EngineError, match=r"adapter targets 'nothing' .* are not in WanTransformer3DModel"):
        run(StockEngine(model), StockRequest("r", 1, PROMPT, **given, **use_of(folder / "no.safetensors")))
    assert stage_of("plain") is None
    assert with_side_paths({"transformer.forward": 3, "vae.decode": 5}, ["transformer", "vae"]) == {
        "transformer.forward": 6,
        "vae.decode": 5,
    }
    assert stock is not None


# Names of the models' own code


def native_names() -> dict[str, dict[str, list[str]]]:
    """Layers of files as the models' own code names them, by class; and of which paths they are, in order."""
    qkv = ["to_q", "to_k", "to_v"]
    return {
        "WanPipeline": {
            "blocks.0.self_attn.q": ["blocks.0.attn1.to_q"],
            "blocks.0.self_attn.o": ["blocks.0.attn1.to_out.0"],
            "blocks.0.cross_attn.k": ["blocks.0.attn2.to_k"],
            "blocks.0.ffn.0": ["blocks.0.ffn.net.0.proj"],
            "blocks.0.ffn.2": ["blocks.0.ffn.net.2"],
            "time_projection.1": ["condition_embedder.time_proj"],
            "text_embedding.0": ["condition_embedder.text_embedder.linear_1"],
            "head.head": ["proj_out"],
        },
        "LTXPipeline": {
            "patchify_proj": ["proj_in"],
            "adaln_single.emb.timestep_embedder.linear_1": ["time_embed.emb.timestep_embedder.linear_1"],
            "transformer_blocks.0.attn1.to_q": ["transformer_blocks.0.attn1.to_q"],
        },
        "HunyuanVideoPipeline": {
            "double_blocks.0.img_attn_qkv": [f"transformer_blocks.0.attn.{one}" for one in qkv],
            "double_blocks.0.txt_attn_proj": ["transformer_blocks.0.attn.to_add_out"],
            "double_blocks.0.img_mlp.fc1": ["transformer_blocks.0.ff.net.0.proj"],
            "single_blocks.0.linear1": [
                *(f"single_transformer_blocks.0.attn.{one}" for one in qkv),
                "single_transformer_blocks.0.proj_mlp",
            ],
            "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
            "txt_in.individual_token_refiner.blocks.0.self_attn_qkv": [
                f"context_embedder.token_refiner.refiner_blocks.0.attn.{one}" for one in qkv
            ],
            "txt_in.individual_token_refiner.blocks.0.mlp.fc2": [
                "context_embedder.token_refiner.refiner_blocks.0.ff.net.2"
            ],
        },
        "ChromaPipeline": {
            "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.{one}" for one in qkv],
            "double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.net.2"],
        },
        "Lumina2Pipeline": {
            "layers.0.attention.qkv": [f"layers.0.attn.{one}" for one in qkv],
            "layers.0.attention.out": ["layers.0.attn.to_out.0"],
            "layers.0.feed_forward.w2": ["layers.0.feed_forward.linear_2"],
            "noise_refiner.0.adaLN_modulation.1": ["noise_refiner.0.norm1.linear"],
        },
    }


PREFIXES = ("diffusion_model.", "transformer.", "lora_unet_", "lora_unet__")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("class_name", list(native_names()))
def test_layers_may_have_the_names_of_the_models_own_code(class_name: str, prefix: str, tmp_path: Path) -> None:
    """Each layer is changed by scale * up @ down, whose rows follow one another where it is fused."""
    transformer = MADE[class_name][0]().transformer
    is_flat, generator = prefix.startswith("lora_"), torch.Generator().manual_seed(3)
    tensors, expected = {}, {}
    for name, paths in native_names()[class_name].items():
        layers = [transformer.get_submodule(path) for path in paths]
        down = torch.randn(3, layers[0].in_features, generator=generator)
        up = torch.randn(sum(one.out_features for one in layers), 3, generator=generator)
        whole = prefix + (name.replace(".", "_") if is_flat else name)
        ends = ("lora_down", "lora_up") if is_flat else ("lora_A", "lora_B")
        tensors |= {f"{whole}.{ends[0]}.weight": down, f"{whole}.{ends[1]}.weight": up}
        tensors[f"{whole}.alpha"] = torch.tensor(1.5)
        rows = up.split([one.out_features for one in layers])
        expected |= {path: 0.5 * own @ down for path, own in zip(paths, rows, strict=True)}
    save_file(tensors, tmp_path / "x.safetensors")
    parts = StockParts(class_name, "transformer", {})
    found = FittedLoras(parts, "transformer", transformer).pairs_of(load_adapter(tmp_path / "x.safetensors"))
    paths_of = {layer: path for path, layer in transformer.named_modules()}
    assert {paths_of[layer] for layer in found} == set(expected)
    for layer, pair in found.items():
        torch.testing.assert_close(pair.scale * pair.up @ pair.down, expected[paths_of[layer]])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", ["PixArtSigmaPipeline", "WanPipeline", "StableDiffusionPAGPipeline"])
def test_outputs_may_be_turned_and_inputs_mixed(class_name: str, tmp_path: Path) -> None:
    """An OFT of all linear layers, a GLoRA of one and an IA3 of another: what a model with such weights makes."""
    build, options = MADE[class_name]
    stock = saved(build, tmp_path / "model")
    name, denoiser = denoiser_of(stock)
    generator, tensors = torch.Generator().manual_seed(int(seeded_rng().integers(2**32))), dict[str, torch.Tensor]()
    changed = {}
    for place, (path, layer) in enumerate(linear_layers(denoiser).items()):
        flat = f"lycoris_{path.replace('.', '_')}"
        weight, (out, size) = layer.weight.detach(), layer.weight.shape
        if place == 1:
            a, b = torch.randn(size, 2, generator=generator), torch.randn(2, size, generator=generator) / size
            tensors |= {f"{flat}.a1.weight": a, f"{flat}.a2.weight": b, f"{flat}.alpha": torch.tensor(2.0)}
            tensors |= {f"{flat}.b1.weight": torch.zeros(out, 2), f"{flat}.b2.weight": torch.zeros(2, size)}
            changed[path] = weight + SCALE * weight @ a @ b
        elif place == 2:
            gains = torch.randn(out, generator=generator)
            tensors |= {f"{flat}.weight": gains, f"{flat}.on_input": torch.tensor(0)}
            changed[path] = weight * (1 + SCALE * gains[:, None])
        else:
            blocks = torch.randn(out // 2, 2, 2, generator=generator) * 0.3
            tensors |= {f"{flat}.oft_blocks": blocks, f"{flat}.alpha": torch.tensor(0.0)}
            skew, one = blocks - blocks.mT, torch.eye(2)
            turn = torch.block_diag(*((one + skew) @ torch.inverse(one - skew)).mT)
            changed[path] = weight + SCALE * (turn - torch.eye(out)) @ weight
    save_file(tensors, tmp_path / "x.safetensors")
    engine = StockEngine(load(tmp_path / "model"))
    found = run(
        engine, StockRequest("a", 3, PROMPT, **split(class_name, options), **use_of(tmp_path / "x.safetensors"))
    )
    plain = stock_pixels(stock, options, 3)
    with torch.no_grad():
        for path, weight in changed.items():
            getattr(stock, name).get_submodule(path).weight.copy_(weight)
    assert np.abs(found[0].images.astype(int) - stock_pixels(stock, options, 3)).max() <= 1
    assert np.abs(found[0].images.astype(int) - plain).max() > 1


WORDS = ["LatentConsistencyModelPipeline", "StableDiffusionPAGPipeline"]


@pytest.mark.drawn
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("class_name", WORDS)
def test_a_learned_word_is_read_as_diffusers_reads_it(class_name: str, count: int, tmp_path: Path) -> None:
    build, options = PIPELINES[class_name]
    stock = saved(build, tmp_path / "model")
    vectors = torch.randn(count, stock.text_encoder.get_input_embeddings().embedding_dim)
    other = torch.randn(1, vectors.shape[1])
    for name, tensor in (("toy", vectors), ("hue", other)):
        save_file({"emb_params": tensor}, tmp_path / f"{name}.safetensors")
    loras = {name: load_adapter(tmp_path / f"{name}.safetensors") for name in ("toy", "hue")}
    # In whatever case, for a tokenizer that has none; diffusers looks for words of several vectors as they are written.
    engine, prompt = StockEngine(load(tmp_path / "model")), f"a {'TOY' if count == 1 else 'toy'} and a Hue"
    uses = {"both": ("toy", "hue"), "one": ("hue",), "none": ()}
    requests = [
        StockRequest(key, 3, prompt, **split(class_name, options), adapters=tuple(map(AdapterUse, names)), loras=loras)
        for key, names in uses.items()
    ]
    found = {one.request_id: run(engine, one)[0].images for one in requests}
    assert hooks_of(engine.model) == 0
    assert not engine.model.modules["text_encoder"].get_input_embeddings()._forward_hooks
    for key in ("none", "one", "both"):
        if key != "none":
            word = "hue" if key == "one" else "toy"
            stock.load_textual_inversion({"emb_params": {"hue": other, "toy": vectors}[word]}, token=word)
        made = stock(
            prompt, **options, num_inference_steps=2, generator=torch.Generator().manual_seed(3), output_type="np"
        ).images
        assert np.abs(found[key].astype(int) - (made * 255).round().astype(np.uint8)).max() <= 1, key
    assert (found["both"] != found["one"]).any()
    assert (found["one"] != found["none"]).any()


def test_words_of_what_reads_none_are_refused(wan_model: Any) -> None:
    _, model, folder = wan_model
    save_file({"emb_params": torch.ones(1, 8)}, folder / "word.safetensors")
    with pytest.raises(EngineError, match="a WanPipeline reads no textual inversions of a text_encoder"):
        run(
            StockEngine(model),
            StockRequest("r", 1, PROMPT, **split("WanPipeline", WAN), **use_of(folder / "word.safetensors")),
        )


def test_words_are_checked_when_they_come_in(wan_model: Any, tmp_path: Path) -> None:
    name = "LatentConsistencyModelPipeline"
    stock = saved(PIPELINES[name][0], tmp_path / "model")
    width = stock.text_encoder.get_input_embeddings().embedding_dim
    base, wan_base = base_of(tmp_path / "model", name), base_of(wan_model[2] / "model", "WanPipeline")
    reasons = []
    for place, (size, of) in enumerate([(width, base), (width + 1, base), (width, wan_base)]):
        file = tmp_path / f"word{place}.safetensors"
        save_file({"emb_params": torch.ones(2, size)}, file)
        reasons.append(why_unservable(read_checkpoint(file), (of,)))
    assert reasons[0] is None
    assert f"has vectors of {width + 1} numbers" in (reasons[1] or "")
    assert "a textual inversion, and none are served with 'base', a WanPipeline" in (reasons[2] or "")


# Registration


def base_of(folder: Path, class_name: str) -> AdapterBase:
    checkpoint = read_checkpoint(folder)
    parts = {
        part.name: SimpleNamespace(**{key: getattr(part, key) for key in ("name", "library", "class_name", "tensors")})
        for part in checkpoint.components
    }
    return AdapterBase("base", "diffusion", class_name, folder, parts)


def test_it_is_checked_when_it_comes_in(wan_model: Any) -> None:
    stock, _, folder = wan_model
    base = base_of(folder / "model", "WanPipeline")

    def refusal(tensors: Mapping[str, torch.Tensor]) -> str | None:
        save_file(dict(tensors), folder / "in.safetensors")
        return why_unservable(read_checkpoint(folder / "in.safetensors"), (base,))

    width = stock.transformer.blocks[0].attn1.to_q.in_features
    pair = {"lora_A.weight": torch.zeros(2, width), "lora_B.weight": torch.zeros(width, 2)}
    for name in (
        "transformer.blocks.0.attn1.to_q",
        "transformer.blocks.0.self_attn.q",
        "diffusion_model.blocks.0.self_attn.q",
    ):
        assert refusal({f"{name}.{end}": one for end, one in pair.items()}) is None
    said = refusal({f"transformer.blocks.7.attn1.to_q.{end}": one for end, one in pair.items()}) or ""
    assert "adapter targets 'blocks.7.attn1.to_q' (1 of 1) are not in WanTransformer3DModel" in said
    assert "expected a LoRA for 'base', a WanPipeline" in said
    wide = {"lora_A.weight": torch.zeros(2, 2 * width), "lora_B.weight": torch.zeros(width, 2)}
    said = refusal({f"transformer.blocks.0.attn1.to_q.{end}": one for end, one in wide.items()}) or ""
    assert f"matrices of (in, out) sizes ({2 * width}, {width}) do not fit" in said
    assert "a textual inversion, and none are served with 'base'" in (refusal({"emb_params": torch.zeros(2, 8)}) or "")


def test_a_layer_may_be_called_by_keyword() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    pair = LoraPair(torch.randn(1, 3), torch.randn(2, 1), 1.0)
    with torch.no_grad(), applied_adapters([AdaptedSpan([({layer: pair}, SCALE)])], by_keyword=True):
        found = [layer(x), layer(input=x)]
    expected = F.linear(x, layer.weight + SCALE * pair.up @ pair.down, layer.bias)
    for one in found:
        torch.testing.assert_close(one, expected)
    assert not layer._forward_hooks
    assert not layer._forward_hooks_with_kwargs


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_convolutions_of_any_dimensions_have_side_paths(axes: int) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](3, 4, (2,) * axes, padding=1)
    x, generator = torch.randn(2, 3, *(5,) * axes), torch.Generator().manual_seed(1)
    down = torch.randn(2, 3, *(2,) * axes, generator=generator)
    up = torch.randn(4, 2, *(1,) * axes, generator=generator)
    pairs = fit_pairs(nn.Sequential(layer), {"0": LoraPair(down, up, 0.5)})
    with torch.no_grad(), applied_adapters([AdaptedSpan([(pairs, SCALE)])]):
        found = layer(x)
    changed = layer.weight + SCALE * 0.5 * (up.flatten(1) @ down.flatten(1)).view_as(layer.weight)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    torch.testing.assert_close(found, convolve(x, changed, layer.bias, padding=1))


NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(6), (2, 5, 6)),
    "layer of two axes": (lambda: nn.LayerNorm((2, 3)), (4, 2, 3)),
    "group": (lambda: nn.GroupNorm(2, 6), (2, 6, 3, 3)),
    "rms": (lambda: nn.RMSNorm(6), (2, 5, 6)),
    "rms of diffusers": (lambda: DiffusersRMSNorm(6, eps=1e-3, bias=True), (2, 5, 6)),
}


@pytest.mark.parametrize("kind", list(NORMS))
@pytest.mark.parametrize("end", ["diff", "w_norm"])
def test_changed_norms_are_the_norms_with_what_is_added(kind: str, end: str, tmp_path: Path) -> None:
    build, shape = NORMS[kind]
    norm, x = build().requires_grad_(False), torch.randn(shape)
    norm.weight.copy_(torch.randn(norm.weight.shape))
    added = torch.randn(norm.weight.numel())
    tensors = {f"diffusion_model.norm.{end}": added}
    bias = None if getattr(norm, "bias", None) is None or kind == "layer of two axes" else torch.randn(6)
    if bias is not None:
        tensors[f"diffusion_model.norm.{'diff_b' if end == 'diff' else 'b_norm'}"] = bias
    save_file(tensors, tmp_path / "x.safetensors")
    module = nn.ModuleDict({"norm": norm, "linear": nn.Linear(2, 2)})
    pairs = FittedLoras(StockParts("X", "transformer", {}), "transformer", module).pairs_of(
        load_adapter(tmp_path / "x.safetensors")
    )
    with applied_adapters([AdaptedSpan([(pairs, SCALE), (pairs, 0.5)])]):
        found = norm(x)
    norm.weight += (SCALE + 0.5) * added.view(norm.weight.shape)
    if bias is not None:
        norm.bias += (SCALE + 0.5) * bias
    torch.testing.assert_close(found, norm(x))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"norm.diff": torch.ones(5)}, r"adapter target 'norm': 5 elements do not fit a LayerNorm of 6 elements"),
        ({"rms.diff": torch.ones(6), "rms.diff_b": torch.ones(6)}, "6 elements do not fit a RMSNorm of no bias"),
        ({"linear.diff": torch.ones(6)}, r"diffusion_model\.linear\.diff has one axis, and is of Linear"),
    ],
)
def test_what_is_no_change_of_a_norm_is_refused(tensors: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    save_file({f"diffusion_model.{name}": one for name, one in tensors.items()}, tmp_path / "x.safetensors")
    module = nn.ModuleDict({"norm": nn.LayerNorm(6), "rms": nn.RMSNorm(6), "linear": nn.Linear(6, 6)})
    with pytest.raises(EngineError, match=said):
        FittedLoras(StockParts("X", "transformer", {}), "transformer", module).pairs_of(
            load_adapter(tmp_path / "x.safetensors")
        )
