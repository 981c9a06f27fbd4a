"""The adapters that are read, by layout and kind for each pipeline: `python -m infra.supported.adapters` writes the
tables into docs/models.md.

For each cell a tiny file is made, of the names that the layout gives to one layer of a denoiser, and of the shapes that
the kind has; registration's own check says whether it is read. Denoisers have shapes and no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import diffusers
import torch
from torch import nn

from deployments.engines.diffusion.adapted_parts import AdaptedParts, StockParts
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.diffusion.lora_names import layer_names
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import check_class, class_names, takes_image_prompts
from weights.operations.adapters import parse_adapter
from weights.records.errors import AdapterError

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN: Final = "<!-- `python -m infra.supported.adapters` writes this table -->"
END: Final = "<!-- end of the table -->"
RANK: Final = 2
Tensors = dict[str, torch.Tensor]


class Denoiser(NamedTuple):
    """A denoiser of a pipeline's class: `title` in the tables, its own class, and how it is made small."""

    title: str
    pipeline: str
    class_name: str
    options: Mapping[str, Any]


_ONE: Final = {"num_layers": 1}
_TWO_KINDS: Final = {"num_layers": 1, "num_single_layers": 1}
_UNET: Final = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 2,
    "cross_attention_dim": 32,
}
_UNET_XL: Final = {
    **_UNET,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}
DENOISERS: Final = (
    Denoiser("SD 1, 2", "StableDiffusionPipeline", "UNet2DConditionModel", _UNET),
    Denoiser("SDXL", "StableDiffusionXLPipeline", "UNet2DConditionModel", _UNET_XL),
    Denoiser("SD 3", "StableDiffusion3Pipeline", "SD3Transformer2DModel", {"num_layers": 2}),
    Denoiser("Flux", "FluxPipeline", "FluxTransformer2DModel", _TWO_KINDS),
    Denoiser("FLUX.2", "Flux2KleinPipeline", "Flux2Transformer2DModel", _TWO_KINDS),
    Denoiser("Qwen-Image", "QwenImagePipeline", "QwenImageTransformer2DModel", _ONE),
    Denoiser("Z-Image", "ZImagePipeline", "ZImageTransformer2DModel", {"n_layers": 1, "n_refiner_layers": 1}),
    Denoiser("Wan", "WanPipeline", "WanTransformer3DModel", _ONE),
    Denoiser("LTX", "LTXPipeline", "LTXVideoTransformer3DModel", _ONE),
    Denoiser("HunyuanVideo", "HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", _TWO_KINDS),
    Denoiser("Chroma", "ChromaPipeline", "ChromaTransformer2DModel", _TWO_KINDS),
    Denoiser("Lumina 2", "Lumina2Pipeline", "Lumina2Transformer2DModel", {**_ONE, "num_refiner_layers": 1}),
    Denoiser("PixArt", "PixArtSigmaPipeline", "PixArtTransformer2DModel", _ONE),
    Denoiser("Sana", "SanaPipeline", "SanaTransformer2DModel", _ONE),
)
# Whose own code calls the layers of attention as diffusers does.
_SAME_NAMES: Final = ("QwenImageTransformer2DModel", "LTXVideoTransformer3DModel")


class Layout(NamedTuple):
    """A file's names of layers: `prefix` and the name in the model's own code or in diffusers, perhaps with an
    underscore for each dot; and the ends of its two matrices."""

    prefix: str
    is_flat: bool
    has_own_names: bool
    ends: tuple[str, str]


_DOWN_UP: Final = (".lora_down.weight", ".lora_up.weight")
_A_B: Final = (".lora_A.weight", ".lora_B.weight")
_DEFAULT: Final = (".lora_A.default.weight", ".lora_B.default.weight")
LAYOUTS: Final[Mapping[str, Layout]] = {
    "sd-scripts": Layout("lora_unet_", True, True, _DOWN_UP),
    "musubi-tuner": Layout("lora_unet_", True, False, _DOWN_UP),
    "OneTrainer": Layout("lora_transformer_", True, False, _DOWN_UP),
    "LyCORIS, SimpleTuner": Layout("lycoris_", True, False, _DOWN_UP),
    "ComfyUI": Layout("diffusion_model.", False, True, _A_B),
    "ComfyUI (down, up)": Layout("diffusion_model.", False, True, _DOWN_UP),
    "mixtures of CivitAI": Layout("lora_unet.", False, True, _DOWN_UP),
    "diffusers, ai-toolkit": Layout("{denoiser}.", False, False, _A_B),
    "diffusers before PEFT": Layout("{denoiser}.", False, False, (".lora.down.weight", ".lora.up.weight")),
    "PEFT": Layout("base_model.model.", False, False, _A_B),
    "fal": Layout("base_model.model.", False, True, _A_B),
    "DiffSynth": Layout("", False, False, _DEFAULT),
    "DiffSynth (pipe.dit.)": Layout("pipe.dit.", False, True, _DEFAULT),
    "Lightning": Layout("", False, False, _DOWN_UP),
    "Black Forest Labs": Layout("", False, True, _A_B),
}

Write = Callable[[int, int], Tensors]  # of a layer with so many outputs and inputs, without its name


def _low_rank(outputs: int, inputs: int) -> Tensors:
    return {"lora_down.weight": _of(RANK, inputs), "lora_up.weight": _of(outputs, RANK), "alpha": torch.tensor(1.0)}


def _of(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.1


def _loha(outputs: int, inputs: int) -> Tensors:
    halves = {"a": (outputs, RANK), "b": (RANK, inputs)}
    return {f"hada_w{one}_{half}": _of(*shape) for one in (1, 2) for half, shape in halves.items()}


def _glora(outputs: int, inputs: int) -> Tensors:
    sizes = {"a1": (inputs, RANK), "a2": (RANK, inputs), "b1": (outputs, RANK), "b2": (RANK, inputs)}
    return {f"{name}.weight": _of(*shape) for name, shape in sizes.items()} | {"alpha": torch.tensor(1.0)}


KINDS: Final[Mapping[str, Write]] = {
    "LoRA": _low_rank,
    "DoRA": lambda outputs, inputs: {**_low_rank(outputs, inputs), "dora_scale": _of(outputs, 1) + 1},
    "LoHa": _loha,
    "LoKr": lambda outputs, inputs: {"lokr_w1": _of(2, 2), "lokr_w2": _of(outputs // 2, inputs // 2)},
    "full difference": lambda outputs, inputs: {"diff": _of(outputs, inputs)},
    "GLoRA": _glora,
    "IA3": lambda outputs, inputs: {"weight": _of(outputs), "on_input": torch.tensor(False)},
    "OFT": lambda outputs, inputs: {"oft_blocks": _of(outputs // 4, 4, 4), "alpha": torch.tensor(0.0)},
    "BOFT": lambda outputs, inputs: {"oft_blocks": _of(2, outputs // 4, 4, 4), "alpha": torch.tensor(0.0)},
    "OFT (PEFT)": lambda outputs, inputs: {"oft_R.weight": _of(inputs // 4, 6)},
}
_KINDS_LAYOUT: Final = Layout("lycoris_", True, False, _DOWN_UP)


# What controls an image: the class of diffusers by that of the denoiser, and what its config says beside that one's.
_UNET_NAME, _FLUX_NAME, _SD3_NAME = "UNet2DConditionModel", "FluxTransformer2DModel", "SD3Transformer2DModel"
CONTROLS: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]]] = {
    "ControlNet": (
        {
            _UNET_NAME: "ControlNetModel",
            _FLUX_NAME: "FluxControlNetModel",
            _SD3_NAME: "SD3ControlNetModel",
            "QwenImageTransformer2DModel": "QwenImageControlNetModel",
            "ZImageTransformer2DModel": "ZImageControlNetModel",
        },
        {"control_in_dim": 16, "control_layers_places": (0,)},
    ),
    "union (ControlNet++, Union Pro)": (
        {_UNET_NAME: "ControlNetUnionModel", _FLUX_NAME: "FluxControlNetModel"},
        {"addition_embed_type": "text_time", "num_mode": 5},
    ),
    "Control-LoRA, `difference` file": ({_UNET_NAME: "ControlNetModel"}, {}),
    "T2I-Adapter: full, light, XL": (
        {_UNET_NAME: "T2IAdapter"},
        {"adapter_type": "full_adapter", "channels": _UNET["block_out_channels"]},
    ),
    "ControlNet-XS": (
        {_UNET_NAME: "ControlNetXSAdapter"},
        {"base_block_out_channels": _UNET["block_out_channels"], "down_block_types": _UNET["down_block_types"]},
    ),
}
IP_ADAPTER: Final = "IP-Adapter"
BESIDE: Final = (*CONTROLS, IP_ADAPTER)
_PIXELS_PER_LATENT: Final = 8


class Cell(NamedTuple):
    """A file of one layer, for a denoiser, by what it is in the tables. `refusal` is what registration says, or ""."""

    row: str
    column: str
    tensors: Tensors
    refusal: str


TABLES: Final[Mapping[str, Collection[str]]] = {"layout of a LoRA": LAYOUTS, "kind": KINDS, "beside LoRAs": BESIDE}


def parts_of(denoiser: Denoiser) -> AdaptedParts:
    """Return a pipeline as LoRAs see it."""
    family = FAMILIES.get(denoiser.pipeline)
    return family if family is not None else StockParts(denoiser.pipeline, "transformer", {})


@cache
def _blank(place: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = getattr(diffusers, DENOISERS[place].class_name)(**DENOISERS[place].options)
    return model


def file_of(denoiser: Denoiser, module: nn.Module, layout: Layout, write: Write) -> Tensors:
    """Return the tensors of a file for one layer of a denoiser, none where its own code's names are not known."""
    layers = {path: one for path, one in module.named_modules() if isinstance(one, nn.Linear)}
    path = next(path for path in layers if path.endswith(".to_q"))
    name = _own_name(denoiser.class_name, path, layers) if layout.has_own_names else path
    if not name:
        return {}
    paths = layer_names(denoiser.class_name, layers)[name].paths
    outputs = sum(layers[one].out_features for one in paths)
    prefix = layout.prefix.format(denoiser=parts_of(denoiser).denoiser_name)
    ends = dict(zip(("lora_down.weight", "lora_up.weight"), layout.ends, strict=True))
    whole = prefix + (name.replace(".", "_") if layout.is_flat else name)
    found = write(outputs, layers[path].in_features)
    return {whole + ends.get(end, f".{end}"): tensor.contiguous() for end, tensor in found.items()}


def _own_name(class_name: str, path: str, layers: Mapping[str, nn.Module]) -> str:
    if class_name in _SAME_NAMES:
        return path
    names = layer_names(class_name, layers)
    older = ("_lora", ".processor.")
    own = [
        name
        for name, layer in names.items()
        if path in layer.paths and "." in name and name not in layers and not any(one in name for one in older)
    ]
    return next((name for name in own if not name.startswith("sformer_")), "")


def _refusal(denoiser: Denoiser, module: nn.Module, tensors: Tensors) -> str:
    if not tensors:
        return "the names of its own code are not known"
    parts = parts_of(denoiser)
    blank = {key: one if one.numel() == 1 and one.ndim < 2 else one.to("meta") for key, one in tensors.items()}
    try:
        adapter = parse_adapter(Path("adapter.safetensors"), blank, {})
        FittedLoras(parts, parts.denoiser_name, module).check(adapter)
    except (EngineError, AdapterError) as error:
        return str(error)
    return ""


def form_of(row: str) -> tuple[Layout, Write]:
    """Return layout and kind of a row of either table."""
    if row in LAYOUTS:
        return LAYOUTS[row], KINDS["LoRA"]
    return _KINDS_LAYOUT, KINDS[row]


def cell(row: str, denoiser: Denoiser) -> Cell:
    """Return the cell of a row for a denoiser."""
    module = _blank(DENOISERS.index(denoiser))
    tensors = file_of(denoiser, module, *form_of(row))
    return Cell(row, denoiser.title, tensors, _refusal(denoiser, module, tensors))


def is_served(row: str, denoiser: Denoiser) -> bool:
    """Return whether registration takes what a row of any table is, for a denoiser."""
    if row not in BESIDE:
        return not cell(row, denoiser).refusal
    family = FAMILIES.get(denoiser.pipeline)
    if row == IP_ADAPTER:
        return family.adapters.takes_image_prompts if family else takes_image_prompts(denoiser.pipeline)
    classes, config = CONTROLS[row]
    if family is None or denoiser.class_name not in classes:
        return False
    own: Any = _blank(DENOISERS.index(denoiser)).config
    return family.control_misfit(classes[denoiser.class_name], config, own, _PIXELS_PER_LATENT) is None


def prompted_classes() -> list[str]:
    """Return the pipelines that diffusers runs with which IP-Adapters are served."""
    return [name for name in class_names() if name not in FAMILIES and takes_image_prompts(name) and _runs(name)]


def _runs(class_name: str) -> bool:
    try:
        check_class(class_name)
    except EngineError:  # a package is not installed
        return False
    return True


def tables() -> str:
    """Return the tables, and the pipelines that diffusers runs of one kind that none of them has a column for."""
    parts = []
    for title, rows in TABLES.items():
        marks = [["✓" if is_served(row, denoiser) else "" for denoiser in DENOISERS] for row in rows]
        lines = [f"| {' | '.join([row, *found])} |" for row, found in zip(rows, marks, strict=True)]
        titles = [title, *(denoiser.title for denoiser in DENOISERS)]
        parts.append("\n".join([f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *lines]))
    names = ", ".join(name.removesuffix("Pipeline") for name in prompted_classes())
    return "\n\n".join(
        [*parts, f"Of pipelines that diffusers runs, these read IP-Adapters (each `…Pipeline`): {names}."]
    )


def with_tables(page: str) -> str:
    """Return a page with these tables in the place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
