"""Every tensor of an adapter's file is applied, in each layout, to each family.

The layers' names of the models' own code are those of `infra/bench/original_names.py`, which writes whole models so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.pipelines import make
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from deployments.engines.diffusion.families import FAMILIES, family_of
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.diffusion.lora_kinds import num_made, product_of
from deployments.engines.diffusion.lora_names import num_changed, part_of
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters, merge_pairs
from deployments.engines.records.protocol import EngineError
from infra.bench import original_names
from weights.operations.adapters import load_adapter

Tensors = dict[str, torch.Tensor]
Deltas = Mapping[str, torch.Tensor]  # what is added to each layer's weight, by its name
ALPHA = 3.0


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(seeded_rng().standard_normal(shape)).float()


class Model(NamedTuple):
    """A tiny denoiser of a family, what is to be added to its layers, and the same by the names of its own code."""

    class_name: str
    denoiser: nn.Module
    deltas: Deltas
    native: Deltas

    def pairs(self, file: Path) -> dict[str, Any]:
        family = family_of(self.class_name)
        paths = {layer: path for path, layer in self.denoiser.named_modules()}
        found = FittedLoras(family, family.denoiser_name, self.denoiser).pairs_of(load_adapter(file))
        return {paths[layer]: pair for layer, pair in found.items()}

    def applied(self, file: Path) -> Tensors:
        """Return the change that the LoRA in a file adds to each weight."""
        return {
            path: pair.scale * (pair.up.flatten(1) @ pair.down.flatten(1)).view(self.deltas[path].shape)
            for path, pair in self.pairs(file).items()
        }


def without_weight(state: Mapping[str, torch.Tensor], layers: set[str]) -> Deltas:
    prefix = "model.diffusion_model."
    return {
        key.removeprefix(prefix).removesuffix(".weight"): one
        for key, one in state.items()
        if key.endswith(".weight") and one.ndim in (2, 4) and (not layers or key.removesuffix(".weight") in layers)
    }


NATIVE: Mapping[str, Callable[[Tensors], Tensors]] = {
    "FluxPipeline": lambda state: original_names.flux(state, 1, 1),
    "StableDiffusionXLPipeline": lambda state: original_names.unet_of_ldm(state, 1),
    "StableDiffusionPipeline": lambda state: original_names.unet_of_ldm(state, 1),
    "StableDiffusion3Pipeline": lambda state: original_names.sd3(state, 2),
    "ZImagePipeline": original_names.z_image,
    "QwenImagePipeline": dict,
    "Flux2KleinPipeline": lambda state: flux_2(state),
}
_FLUX_2 = {
    "double_blocks.0.img_attn.proj": "transformer_blocks.0.attn.to_out.0",
    "double_blocks.0.txt_attn.proj": "transformer_blocks.0.attn.to_add_out",
    "double_blocks.0.img_mlp.0": "transformer_blocks.0.ff.linear_in",
    "double_blocks.0.txt_mlp.2": "transformer_blocks.0.ff_context.linear_out",
    "single_blocks.0.linear1": "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    "single_blocks.0.linear2": "single_transformer_blocks.0.attn.to_out",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "final_layer.linear": "proj_out",
    "img_in": "x_embedder",
}


def flux_2(state: Tensors) -> Tensors:
    named = {f"{new}.weight": state[f"{old}.weight"] for new, old in _FLUX_2.items()}
    for stream, parts in (("img", "to_{}"), ("txt", "add_{}_proj")):
        own = [state[f"transformer_blocks.0.attn.{parts.format(one)}.weight"] for one in "qkv"]
        named[f"double_blocks.0.{stream}_attn.qkv.weight"] = torch.cat(own)
    scale, shift = state["norm_out.linear.weight"].chunk(2)
    return named | {"final_layer.adaLN_modulation.1.weight": torch.cat([shift, scale])}


@pytest.fixture(scope="module", params=NATIVE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    class_name = request.param
    fixtures = {
        "FluxPipeline": "flux",
        "StableDiffusionXLPipeline": "sdxl",
        "StableDiffusionPipeline": "stable_diffusion",
    }
    fixtures |= {"StableDiffusion3Pipeline": "stable_diffusion_3"}
    if class_name in fixtures:
        denoiser = request.getfixturevalue(fixtures[class_name]).ours.denoiser
    else:
        denoiser = make(class_name, tmp_path_factory.mktemp("model")).transformer
    layers = {path for path, one in denoiser.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)}
    state = {key: random(*one.shape) for key, one in denoiser.state_dict().items()}
    return Model(class_name, denoiser, without_weight(state, layers), without_weight(NATIVE[class_name](state), set()))


# How a file calls a layer of the model's own code, or of diffusers; and the ends of its matrices.
KOHYA, PEFT, DEFAULT = (".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight"), (
    ".lora_A.default.weight",
    ".lora_B.default.weight",
)  # fmt: skip
LAYOUTS = {
    "sd-scripts": ("lora_unet_", True, "native", KOHYA),
    "musubi": ("lora_unet_", True, "diffusers", KOHYA),
    "OneTrainer": ("lora_transformer_", True, "diffusers", KOHYA),
    "LyCORIS": ("lycoris_", True, "diffusers", KOHYA),
    "ComfyUI": ("diffusion_model.", False, "native", PEFT),
    "ComfyUI, down and up": ("diffusion_model.", False, "native", KOHYA),
    "ComfyUI of diffusers": ("diffusion_model.", False, "diffusers", PEFT),
    "a mixture of CivitAI": ("lora_unet.", False, "native", KOHYA),
    "ai-toolkit": ("{denoiser}.", False, "diffusers", PEFT),
    "diffusers, down and up": ("{denoiser}.", False, "diffusers", KOHYA),
    "PEFT": ("base_model.model.", False, "diffusers", PEFT),
    "fal": ("base_model.model.", False, "native", PEFT),
    "PEFT in diffusers": ("{denoiser}.base_model.model.", False, "diffusers", PEFT),
    "DiffSynth": ("", False, "diffusers", DEFAULT),
    "DiffSynth, whole": ("pipe.dit.", False, "native", DEFAULT),
    "Lightning": ("", False, "diffusers", KOHYA),
    "Black Forest Labs": ("", False, "native", PEFT),
    "diffusers before PEFT": ("{denoiser}.", False, "diffusers", (".lora.down.weight", ".lora.up.weight")),
}


def factors(delta: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return down and up whose product, times a scale, is a change; one of them is of ones."""
    kernel = delta.shape[2:]
    if not kernel and delta.shape[1] < len(delta):
        return torch.eye(delta.shape[1]), delta / scale
    return delta / scale, torch.eye(len(delta)).reshape(len(delta), -1, *[1] * len(kernel))


def written(model: Model, layout: str, *, has_alpha: bool = True) -> Tensors:
    prefix, is_flat, names, (down_end, up_end) = LAYOUTS[layout]
    prefix = prefix.format(denoiser=family_of(model.class_name).denoiser_name)
    tensors: Tensors = {}
    for name, delta in (model.native if names == "native" else model.deltas).items():
        path = prefix + (name.replace(".", "_") if is_flat else name)
        down, up = factors(delta, 1.0)
        scale = ALPHA / len(down) if has_alpha else 1.0
        down, up = factors(delta, scale)
        tensors |= {path + down_end: down, path + up_end: up}
        tensors |= {f"{path}.alpha": torch.tensor(ALPHA)} if has_alpha else {}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.mark.drawn(12)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_each_family_is_applied(model: Model, layout: str, tmp_path: Path) -> None:
    save_file(written(model, layout), tmp_path / "a.safetensors")
    found = model.applied(tmp_path / "a.safetensors")
    native = "" if LAYOUTS[layout][2] == "diffusers" else "native"
    assert found.keys() == model.deltas.keys() if not native or model.class_name != "Flux2KleinPipeline" else found
    for path, delta in found.items():
        assert torch.allclose(delta, model.deltas[path], atol=1e-4), path


def test_without_an_alpha_the_scale_is_one(model: Model, tmp_path: Path) -> None:
    save_file(written(model, "ComfyUI", has_alpha=False), tmp_path / "a.safetensors")
    for path, delta in model.applied(tmp_path / "a.safetensors").items():
        assert torch.allclose(delta, model.deltas[path], atol=1e-4), path


def test_the_config_in_the_metadata_has_a_word(model: Model, tmp_path: Path) -> None:
    name = family_of(model.class_name).denoiser_name
    said = json.dumps({f"{name}.lora_alpha": 5.0, f"{name}.use_rslora": True})
    file = tmp_path / "a.safetensors"
    save_file(written(model, "DiffSynth", has_alpha=False), file, metadata={"lora_adapter_metadata": said})
    for path, pair in model.pairs(file).items():
        assert pair.scale == pytest.approx(5.0 / len(pair.down) ** 0.5), path


@pytest.mark.drawn(2)
def test_nothing_of_a_file_is_dropped_in_silence(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each tensor in turn gets a name that nothing has: it stands in the refusal, or in the log."""
    tensors = written(model, "sd-scripts")
    for name in list(tensors)[:: max(1, len(tensors) // 12)]:
        changed = {key: one for key, one in tensors.items() if key != name}
        save_file(changed | {f"{name}.more": tensors[name]}, tmp_path / "a.safetensors")
        with pytest.raises(EngineError, match=f"tensor '{name}.more' has a name that no kind of adapter has; read are"):
            model.pairs(tmp_path / "a.safetensors")
    absent = {"lora_unet_nowhere.lora_down.weight": random(2, 3), "lora_unet_nowhere.lora_up.weight": random(3, 2)}
    save_file(tensors | absent, tmp_path / "b.safetensors")
    assert model.pairs(tmp_path / "b.safetensors").keys() == model.applied(tmp_path / "b.safetensors").keys()
    assert "have no effect ('nowhere')" in caplog.text


# Kinds, by LyCORIS's formulas.

R, A = 2, 3.0
Weights = tuple[Tensors, torch.Tensor]  # a file's tensors without the layer's name, and what they add to the weight


def low_rank(out: int, inputs: tuple[int, ...]) -> Weights:
    down, up = random(R, *inputs), random(out, R, *[1] * (len(inputs) - 1))
    delta = A / R * torch.einsum("orxy,rikl->oikl", up, down) if len(inputs) > 1 else A / R * up @ down
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(A)}, delta


def with_middle(out: int, inputs: tuple[int, ...]) -> Weights:
    down, mid, up = random(R, inputs[0], 1, 1), random(R, R, *inputs[1:]), random(out, R, 1, 1)
    delta = A / R * torch.einsum("pqkl,op,qi->oikl", mid, up[..., 0, 0], down[..., 0, 0])
    names = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up}
    return names | {"alpha": torch.tensor(A)}, delta


def loha(out: int, inputs: tuple[int, ...]) -> Weights:
    columns = int(torch.tensor(inputs).prod())
    parts = {
        f"hada_w{one}_{half}": random(*shape) for one in "12" for half, shape in (("a", (out, R)), ("b", (R, columns)))
    }
    whole = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    kernels = {name: one.view(R, *inputs) if name.endswith("b") else one for name, one in parts.items()}
    return kernels | {"alpha": torch.tensor(A)}, A / R * whole.view(out, *inputs)


def loha_tucker(out: int, inputs: tuple[int, ...]) -> Weights:
    parts: Tensors = {}
    halves = []
    for one in "12":
        core, first, second = random(R, R, *inputs[1:]), random(R, out), random(R, inputs[0])
        parts |= {f"hada_t{one}": core, f"hada_w{one}_a": first, f"hada_w{one}_b": second}
        halves.append(torch.einsum("pqkl,po,qi->oikl", core, first, second))
    return parts | {"alpha": torch.tensor(A)}, A / R * halves[0] * halves[1]


def kronecker(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    kernel = [1] * (second.ndim - 2)
    return torch.kron(first.reshape(*first.shape, *kernel), second.contiguous())


def lokr(forms: str) -> Callable[[int, tuple[int, ...]], Weights]:
    """Return a maker of a LoKr whose two matrices are whole ("w"), products ("p") or in Tucker's form ("t")."""

    def make_lokr(out: int, inputs: tuple[int, ...]) -> Weights:
        parts: Tensors = {}
        whole = []
        shapes = ((2, 2), (out // 2, inputs[0] // 2, *inputs[1:]))
        for one, form, (rows, *columns) in zip("12", forms, shapes, strict=True):
            count = int(torch.tensor(columns).prod())
            if form == "w":
                parts[f"lokr_w{one}"] = random(rows, *columns)
                whole.append(parts[f"lokr_w{one}"])
            elif form == "t":
                core, first, second = random(R, R, *columns[1:]), random(R, rows), random(R, columns[0])
                parts |= {"lokr_t2": core, "lokr_w2_a": first, "lokr_w2_b": second}
                whole.append(torch.einsum("pqkl,po,qi->oikl", core, first, second))
            else:
                first, second = random(rows, R), random(R, count)
                parts |= {f"lokr_w{one}_a": first, f"lokr_w{one}_b": second.view(R, *columns)}
                whole.append((first @ second).view(rows, *columns))
        scale = 1.0 if forms == "ww" else A / R
        return parts | {"alpha": torch.tensor(A)}, scale * kronecker(*whole)

    return make_lokr


def difference(out: int, inputs: tuple[int, ...]) -> Weights:
    delta = random(out, *inputs)
    return {"diff": delta}, delta


LINEAR = {"LoRA": low_rank, "LoHa": loha, "difference": difference} | {
    f"LoKr {one}": lokr(one) for one in ("ww", "wp", "pp")
}
CONVOLUTION = LINEAR | {"LoCon with a middle": with_middle, "LoHa, Tucker": loha_tucker, "LoKr wt": lokr("wt")}


@pytest.mark.parametrize(
    ("class_name", "layer", "kind"),
    [("FluxPipeline", "double_blocks_0_img_attn_qkv", kind) for kind in LINEAR]
    + [("StableDiffusionXLPipeline", "mid_block_resnets_0_conv1", kind) for kind in CONVOLUTION]
    + [("StableDiffusionXLPipeline", "middle_block_1_transformer_blocks_0_attn2_to_k", kind) for kind in LINEAR],
)
def test_each_kind_is_its_formula(
    request: pytest.FixtureRequest, tmp_path: Path, class_name: str, layer: str, kind: str
) -> None:
    pair = request.getfixturevalue("flux" if class_name.startswith("Flux") else "sdxl")
    paths = {
        "double_blocks_0_img_attn_qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
        "mid_block_resnets_0_conv1": ["mid_block.resnets.0.conv1"],
        "middle_block_1_transformer_blocks_0_attn2_to_k": ["mid_block.attentions.0.transformer_blocks.0.attn2.to_k"],
    }[layer]
    layers: list[Any] = [pair.ours.denoiser.get_submodule(path) for path in paths]
    out, inputs = sum(len(one.weight) for one in layers), tuple(layers[0].weight.shape[1:])
    tensors, delta = CONVOLUTION[kind](out, inputs)
    bias = random(out)
    named = {f"lora_unet_{layer}.{end}": one.contiguous() for end, one in tensors.items()}
    assert num_changed({part_of(name)[1]: one.shape for name, one in named.items()}) == delta.numel()
    product = product_of(layer, {part_of(name)[1]: (name, one) for name, one in named.items()}, None)
    in_file = {one.untyped_storage().data_ptr() for one in named.values()}
    made = [one for one in (product.down, product.up) if one.untyped_storage().data_ptr() not in in_file]
    assert num_made({name: one.shape for name, one in named.items()}) >= sum(one.numel() for one in made)
    assert num_made({name: one.shape for name, one in named.items()}) <= product.down.numel() + product.up.numel()
    assert (num_made({name: one.shape for name, one in named.items()}) == 0) == (kind == "LoRA")
    save_file(named | {f"lora_unet_{layer}.diff_b": bias}, tmp_path / "a.safetensors")
    family = pair.ours.family
    pairs = FittedLoras(family, family.denoiser_name, pair.ours.denoiser).pairs_of(
        load_adapter(tmp_path / "a.safetensors")
    )
    assert list(pairs) == layers
    rows = [len(one.weight) for one in layers]
    parts = zip(layers, delta.split(rows), bias.split(rows), strict=True)
    merged = merge_pairs(pairs, 0.7)
    for one, added, more in parts:
        x = random(2, 5, inputs[0]) if len(inputs) == 1 else random(2, inputs[0], 6, 6)
        with torch.no_grad():
            plain = one(x)
            own = torch.nn.functional
            weight = one.weight + 0.7 * added.reshape(one.weight.shape)
            shift = 0.7 * more + (0 if one.bias is None else one.bias)
            expected = own.linear(x, weight, shift) if len(inputs) == 1 else own.conv2d(x, weight, shift, padding=1)
            with applied_adapters([AdaptedSpan([(pairs, 0.7)])]):
                beside = one(x)
            assert torch.allclose(beside, expected, atol=1e-3, rtol=1e-4)
            assert torch.allclose(merged.forwards[one](x), expected, atol=1e-3, rtol=1e-4)
            assert torch.equal(one(x), plain)


# What turns, weighs or mixes features. `Changed` is what a layer's weight becomes at a strength.

Changed = Callable[[torch.Tensor, float], torch.Tensor]


def cayley(blocks: torch.Tensor, limit: float) -> torch.Tensor:
    skew = blocks - blocks.mT
    if 0 < limit < skew.norm():
        skew = skew * (limit / skew.norm())
    one = torch.eye(blocks.shape[-1])
    return (one + skew) @ torch.inverse(one - skew)


def oft(size: int, alpha: float = 0.0, *, is_rescaled: bool = False) -> Callable[..., tuple[Tensors, Changed]]:
    def make_oft(out: int, inputs: tuple[int, ...]) -> tuple[Tensors, Changed]:
        blocks = random(out // size, size, size) * 0.5
        lengths = 1 + 0.3 * random(out, *[1] * len(inputs)) if is_rescaled else torch.ones(out, *[1] * len(inputs))
        turn = torch.block_diag(*cayley(blocks, alpha * out).mT)

        def changed(weight: torch.Tensor, strength: float) -> torch.Tensor:
            here = strength * turn + (1 - strength) * torch.eye(out)
            weighed = strength * (turn - torch.eye(out)) @ weight.flatten(1)  # LyCORIS' lengths know no strength
            found = lengths.flatten(1) * weighed + lengths.flatten(1) * weight.flatten(1)
            assert is_rescaled or torch.allclose(found, here @ weight.flatten(1), atol=1e-4)
            return found.view(weight.shape)

        return {
            "oft_blocks": blocks, "alpha": torch.tensor(alpha), **({"rescale": lengths} if is_rescaled else {})
        }, changed  # fmt: skip

    return make_oft


def butterfly(size: int, stages: int, *, is_rescaled: bool = False) -> Callable[..., tuple[Tensors, Changed]]:
    def make_boft(out: int, inputs: tuple[int, ...]) -> tuple[Tensors, Changed]:
        blocks = random(stages, out // size, size, size) * 0.5
        lengths = 1 + 0.3 * random(out, *[1] * len(inputs))
        turns = torch.stack([cayley(one, 0.0) for one in blocks])

        def changed(weight: torch.Tensor, strength: float) -> torch.Tensor:
            found = weight.flatten(1)
            for stage, turn in enumerate(turns):
                apart = 2**stage * (size // 2)
                order = torch.arange(out).view(-1, 2, apart).transpose(1, 2).flatten()
                here = torch.block_diag(*(strength * turn + (1 - strength) * torch.eye(size)))
                found = (here @ found[order])[torch.argsort(order)]
            return (found * (lengths.flatten(1) if is_rescaled else 1)).view(weight.shape)

        return {
            "oft_blocks": blocks, "alpha": torch.tensor(0.0), **({"rescale": lengths} if is_rescaled else {})
        }, changed  # fmt: skip

    return make_boft


def ia3(*, on_input: bool) -> Callable[..., tuple[Tensors, Changed]]:
    def make_ia3(out: int, inputs: tuple[int, ...]) -> tuple[Tensors, Changed]:
        size = inputs[0] if on_input else out
        weights = random(size) if len(inputs) == 1 else random(1, size, 1, 1)
        axis = [1, size] if on_input else [size, 1]

        def changed(weight: torch.Tensor, strength: float) -> torch.Tensor:
            return weight * (1 + strength * weights.flatten().view(*axis, *[1] * (weight.ndim - 2)))

        return {"weight": weights, "on_input": torch.tensor(int(on_input))}, changed

    return make_ia3


def glora(*, is_old: bool = False) -> Callable[..., tuple[Tensors, Changed]]:
    def make_glora(out: int, inputs: tuple[int, ...]) -> tuple[Tensors, Changed]:
        ones = [1] * (len(inputs) - 1)
        a1, a2 = random(inputs[0], R, *ones), random(R, inputs[0], *ones)
        b1, b2 = random(out, R, *ones), random(R, *inputs)

        def changed(weight: torch.Tensor, strength: float) -> torch.Tensor:
            mixed = torch.einsum("oi...,ij->oj...", weight, a1.flatten(1) @ a2.flatten(1))
            product = (b1.flatten(1) @ b2.flatten(1)).view(weight.shape)
            return weight + strength * A / R * (mixed + product)

        named = dict(
            zip(("a2", "a1", "b2", "b1") if is_old else ("a1", "a2", "b1", "b2"), (a1, a2, b1, b2), strict=True)
        )
        return {f"{name}.weight": one for name, one in named.items()} | {"alpha": torch.tensor(A)}, changed

    return make_glora


def peft_oft(size: int, *, is_shared: bool = False) -> Callable[..., tuple[Tensors, Changed]]:
    def make_peft(out: int, inputs: tuple[int, ...]) -> tuple[Tensors, Changed]:
        count = 1 if is_shared else inputs[0] // size
        above = random(count, size * (size - 1) // 2) * 0.1
        turns = []
        for row in above:
            skew = torch.zeros(size, size)
            skew[torch.ones(size, size).triu(1).bool()] = row
            skew = skew - skew.T
            turns.append(
                torch.eye(size) + 2 * skew + 2 * skew @ skew + 2 * skew @ skew @ skew + skew @ skew @ skew @ skew
            )
        turn = torch.block_diag(*(turns * (inputs[0] // size) if is_shared else turns))

        def changed(weight: torch.Tensor, strength: float) -> torch.Tensor:
            return weight @ (strength * turn + (1 - strength) * torch.eye(inputs[0])).T

        return {"oft_R.weight": above}, changed

    return make_peft


MAPS = {
    "OFT of few blocks": oft(8),
    "OFT of many blocks": oft(2),
    "OFT with a limit": oft(4, 0.01),
    "OFT with lengths": oft(4, is_rescaled=True),
    "BOFT": butterfly(4, 3),
    "BOFT with lengths": butterfly(2, 2, is_rescaled=True),
    "IA3": ia3(on_input=False),
    "IA3 of inputs": ia3(on_input=True),
    "GLoRA": glora(),
    "GLoRA of old": glora(is_old=True),
}
OF_LINEAR = {"OFT of PEFT": peft_oft(4), "OFT of PEFT, one block": peft_oft(4, is_shared=True)}


@pytest.mark.parametrize(
    ("fixture", "layer", "paths", "kind"),
    [("sdxl", "middle_block_0_in_layers_2", ["mid_block.resnets.0.conv1"], kind) for kind in MAPS]
    + [
        ("sdxl", f"middle_block_1_{place.replace('.', '_')}", [f"mid_block.attentions.0.{place}"], kind)
        for place in ("transformer_blocks.0.attn2.to_k", "transformer_blocks.0.ff.net.2")
        for kind in MAPS | OF_LINEAR
    ]
    + [
        ("flux", "double_blocks_0_img_attn_qkv", [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"], kind)
        for kind in MAPS | OF_LINEAR
        if "BOFT" not in kind
    ],
)
def test_each_map_of_features_is_its_formula(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, layer: str, paths: list[str], kind: str
) -> None:
    pair = request.getfixturevalue(fixture)
    layers: list[Any] = [pair.ours.denoiser.get_submodule(path) for path in paths]
    whole = torch.cat([one.weight for one in layers]).detach()
    tensors, changed = (MAPS | OF_LINEAR)[kind](len(whole), tuple(whole.shape[1:]))
    named = {f"lora_unet_{layer}.{end}": one.contiguous() for end, one in tensors.items()}
    save_file(named, tmp_path / "a.safetensors")
    save_file(
        {
            f"lora_unet_{layer}.{end}": one.contiguous()
            for end, one in low_rank(len(whole), tuple(whole.shape[1:]))[0].items()
        },
        tmp_path / "b.safetensors",
    )
    family = pair.ours.family
    made = num_made({name: one.shape for name, one in named.items()})
    fitted = FittedLoras(family, family.denoiser_name, pair.ours.denoiser)
    pairs, other = (fitted.pairs_of(load_adapter(tmp_path / f"{name}.safetensors")) for name in "ab")
    assert list(pairs) == layers
    assert made > 0 or "OFT" not in kind
    rows = [len(one.weight) for one in layers]
    merged = merge_pairs(pairs, 0.7)
    assert merged.beside == pairs
    for one, expected_weight in zip(layers, changed(whole, 0.7).split(rows), strict=True):
        x = random(2, 5, whole.shape[1]) if whole.ndim == 2 else random(2, whole.shape[1], 6, 6)
        compute: Any = nn.functional.linear if whole.ndim == 2 else nn.functional.conv2d
        padding = {} if whole.ndim == 2 else {"padding": 1}
        with torch.no_grad():
            plain, expected = one(x), compute(x, expected_weight, one.bias, **padding)
            with applied_adapters([AdaptedSpan([(pairs, 0.7)])]):
                alone = one(x)
            with applied_adapters([AdaptedSpan([(other, 1.0)])]):
                others = one(x) - plain
            with applied_adapters([AdaptedSpan([(other, 1.0), (pairs, 0.7)])]):
                both = one(x)
            with applied_adapters([AdaptedSpan([(pairs, 0.7)], 1, 2)]):
                mixed = one(x)
        assert torch.allclose(alone, expected, atol=1e-3, rtol=1e-3)
        assert torch.allclose(both, expected + others, atol=1e-3, rtol=1e-3)
        assert torch.equal(mixed[:1], plain[:1])
        assert torch.equal(mixed[1:], alone[1:])


def test_a_butterfly_does_not_lie_across_layers(flux: Any, tmp_path: Path) -> None:
    whole = 3 * len(flux.ours.denoiser.transformer_blocks[0].attn.to_q.weight)
    save_file(
        {"lora_unet_double_blocks_0_img_attn_qkv.oft_blocks": random(2, whole // 4, 4, 4)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(EngineError, match="oft_blocks: blocks of 4 outputs lie across the layers of 0 to"):
        FittedLoras(flux.ours.family, "transformer", flux.ours.denoiser).pairs_of(
            load_adapter(tmp_path / "a.safetensors")
        )


# Text encoders

CLIP = CLIPTextConfig(vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
T5 = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
CLIP_LAYER, T5_LAYER = "text_model.encoder.layers.0.self_attn.q_proj", "encoder.block.0.layer.0.SelfAttention.q"
ENCODERS = [
    ("StableDiffusionPipeline", "text_encoder", ("lora_te_", "lora_te1_")),
    ("StableDiffusionXLPipeline", "text_encoder", ("lora_te1_", "text_encoders.clip_l.transformer.")),
    ("StableDiffusionXLPipeline", "text_encoder_2", ("lora_te2_", "text_encoders.clip_g.transformer.")),
    ("FluxPipeline", "text_encoder", ("lora_te1_", "text_encoders.clip_l.")),
    (
        "FluxPipeline",
        "text_encoder_2",
        ("lora_te2_", "lora_te3_", "text_encoders.t5xxl.transformer.", "text_encoder_2."),
    ),
    ("StableDiffusion3Pipeline", "text_encoder", ("lora_te1_", "text_encoder.")),
    ("StableDiffusion3Pipeline", "text_encoder_2", ("lora_te2_", "text_encoder_2.")),
    ("StableDiffusion3Pipeline", "text_encoder_3", ("lora_te3_", "text_encoder_3.")),
]


def encoder_of(class_name: str, component: str) -> tuple[nn.Module, str]:
    if component == ("text_encoder_3" if "3" in class_name else "text_encoder_2") and "XL" not in class_name:
        return T5EncoderModel(T5), T5_LAYER
    return (CLIPTextModelWithProjection if component == "text_encoder_2" else CLIPTextModel)(CLIP), CLIP_LAYER


def encoder_cases() -> Iterator[tuple[str, str, str]]:
    yield from ((name, component, prefix) for name, component, prefixes in ENCODERS for prefix in prefixes)


@pytest.mark.parametrize(("class_name", "component", "prefix"), encoder_cases())
def test_each_text_encoder_has_its_part(class_name: str, component: str, prefix: str, tmp_path: Path) -> None:
    encoder, layer = encoder_of(class_name, component)
    name = prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)
    ends = PEFT if prefix.endswith(".") and "encoders" not in prefix else KOHYA
    down, up = random(R, 8), random(8, R)
    save_file({name + ends[0]: down, name + ends[1]: up, f"{name}.alpha": torch.tensor(A)}, tmp_path / "a.safetensors")
    adapter = load_adapter(tmp_path / "a.safetensors")
    family = family_of(class_name)
    ((found, pair),) = FittedLoras(family, component, encoder).pairs_of(adapter).items()
    place = dict(encoder.named_modules())
    assert found is place.get(layer, place.get(layer.removeprefix("text_model.")))
    assert torch.allclose(pair.scale * pair.up @ pair.down, A / R * up @ down)
    assert not FittedLoras(family, family.denoiser_name, nn.Sequential(nn.Linear(2, 2))).pairs_of(adapter)


@pytest.mark.parametrize("class_name", dict.fromkeys(family.class_name for family in FAMILIES.values()))
def test_what_a_family_cannot_adapt_is_named(class_name: str, tmp_path: Path) -> None:
    family = family_of(class_name)
    name = "lora_te4_model_layers_0_self_attn_q_proj"
    tensors = {f"lora_te4_{name}.lora_down.weight": random(2, 4), f"lora_te4_{name}.lora_up.weight": random(4, 2)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(EngineError, match=r"lora_te4_.* \(1 of 1\) are not in Sequential|is of te4"):
        FittedLoras(family, family.denoiser_name, nn.Sequential(nn.Linear(2, 2))).pairs_of(
            load_adapter(tmp_path / "a.safetensors")
        )
    foreign = {"text_encoders.llama.model.layers.0.q.lora_A.weight": random(2, 4)}
    save_file(foreign, tmp_path / "b.safetensors")
    with pytest.raises(EngineError, match=f"of a {class_name}, {family.denoiser_name}.* can be adapted"):
        FittedLoras(family, family.denoiser_name, nn.Sequential(nn.Linear(2, 2))).pairs_of(
            load_adapter(tmp_path / "b.safetensors")
        )


K = "lora_unet_mid_block_attentions_0_proj_in"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{K}.boft_R": (2, 4, 4)}, f"tensor '{K}.boft_R' is a BOFT of PEFT, which is not read; read are LoRA, DoRA"),
        ({f"{K}.ia3_l": (4, 2)}, "is an IA3 of PEFT, which is not read"),
        ({f"{K}.oft_blocks": (2, 4, 4)}, f"{K}.oft_blocks is for 8 features, and .*proj_in has 16"),
        ({f"{K}.oft_blocks": (2, 4, 3)}, rf"{K}.oft_blocks has shape \[2, 4, 3\], and .* do not"),
        ({f"{K}.oft_blocks": (4, 4, 4), f"{K}.diff_b": (16,)}, f"{K}.diff_b does not go with {K}.oft_blocks"),
        ({f"{K}.a1.weight": (16, 2)}, f"tensor {K}.a1.weight has shape"),
        ({f"{K}.on_input": ()}, f"tensor {K}.on_input is alone"),
        ({f"{K}.oft_R.weight": (4, 5)}, f"tensor {K}.oft_R.weight has shape"),
        ({f"{K}.set_weight": (8,)}, "is a replaced weight, which is not read"),
        ({"bundle_emb.cat.clip_l": (1, 8)}, "is an embedding of new words beside a LoRA, which is not read"),
        ({f"{K}.lora_down.weight": (2, 8)}, rf"{K}.lora_down.weight is there, .* pair \(up\) is"),
        ({f"{K}.lora_up.weight": (2, 8)}, rf"{K}.lora_up.weight is there, .* pair \(down\) is"),
        ({f"{K}.alpha": ()}, f"tensor {K}.alpha is alone"),
        ({f"{K}.hada_w1_a": (8, 2), f"{K}.hada_w1_b": (2, 8)}, rf"{K}.hada_w1_a has shape \[8, 2\], and .* do not"),
        ({f"{K}.lokr_w1": (2, 2)}, f"tensor {K}.lokr_w1 has shape"),
        ({f"{K}.lokr_w1": (2, 2), f"{K}.diff": (8, 8)}, f"tensor {K}.diff does not go with {K}.lokr_w1"),
        ({f"{K}.diff": (16, 16), f"{K}.diff_b": (7,)}, r"diff_b has shape \[7\], its layer 16 outputs"),
        ({f"{K}.diff": (8, 9)}, r"sizes \(9, 8\) do not fit a \w*Linear"),
        ({f"{K}.lora_A.weight": (2, 8), f"{K}.lora_down.weight": (2, 8)}, "are both the down of a layer"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_tensor_and_its_kind(sdxl: Any, tmp_path: Path, tensors: Any, words: str) -> None:
    good = {
        f"lora_unet_mid_block_attentions_0_proj_out.lora_{half}.weight": random(*shape)
        for half, shape in (("down", (2, 16)), ("up", (16, 2)))
    }
    save_file({name: random(*shape) for name, shape in tensors.items()} | good, tmp_path / "a.safetensors")
    family = sdxl.ours.family
    with pytest.raises(EngineError, match=words):
        FittedLoras(family, family.denoiser_name, sdxl.ours.denoiser).pairs_of(load_adapter(tmp_path / "a.safetensors"))
