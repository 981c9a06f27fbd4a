"""Loaders: the file of a name to the registered models that have it, and what is put on them before they sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from deployments.workflows.backend import Catalog, Folder
from deployments.workflows.kinds import Input, Kind, Output, boolean, choice, file, integer, link, number
from deployments.workflows.records import Refused
from deployments.workflows.values import (
    ClipValue,
    ControlNetValue,
    ControlUse,
    Image,
    LoraUse,
    ModelValue,
    UpscalerValue,
    VaeValue,
)

_UNION_TYPES: Final = (
    *("auto", "openpose", "depth", "hed/pidi/scribble/ted", "canny/lineart/anime_lineart/mlsd", "normal"),
    *("segment", "tile", "repaint"),
)


def found_models(catalog: Catalog, folder: Folder, name: str, named: str) -> tuple[str, ...]:
    """Return the registered models of a file, one at least."""
    models = tuple(catalog.models_of(folder, name))
    if not models:
        known = ", ".join(catalog.files(folder)[:20]) or "none"
        raise Refused(f"no registered model has the file {name!r}; {folder}: {known}", named, "value_not_in_list")
    return models


def _checkpoint(catalog: Catalog, ckpt_name: str) -> tuple[ModelValue, ClipValue, VaeValue]:
    models = found_models(catalog, "checkpoints", ckpt_name, "ckpt_name")
    return ModelValue(models, file=ckpt_name), ClipValue(models), VaeValue(models)


def _unet(catalog: Catalog, unet_name: str, weight_dtype: str = "default") -> tuple[ModelValue]:
    if weight_dtype != "default":
        raise Refused("a registered model has the dtype of its config: only `default` is honoured", "weight_dtype")
    return (ModelValue(found_models(catalog, "diffusion_models", unet_name, "unet_name"), file=unet_name),)


def _clips(catalog: Catalog, **given: Any) -> tuple[ClipValue]:
    """Return the encoders of models that have all of the files."""
    names = {key: value for key, value in given.items() if key.startswith("clip_name")}
    found = [found_models(catalog, "text_encoders", name, key) for key, name in names.items()]
    models = tuple(one for one in found[0] if all(one in other for other in found))
    if not models:
        raise Refused(f"no registered model has all of {', '.join(map(repr, names.values()))}", next(iter(names)))
    return (ClipValue(models),)


def _vae(catalog: Catalog, vae_name: str) -> tuple[VaeValue]:
    return (VaeValue(found_models(catalog, "vae", vae_name, "vae_name")),)


def _lora(
    catalog: Catalog, model: ModelValue, clip: ClipValue, lora_name: str, strength_model: float, strength_clip: float
) -> tuple[ModelValue, ClipValue]:
    adapter = found_models(catalog, "loras", lora_name, "lora_name")[0]
    if strength_model != 0:
        model = replace(model, loras=(*model.loras, LoraUse(adapter, strength_model)))
    if strength_clip != 0:
        clip = replace(clip, loras=(*clip.loras, LoraUse(adapter, strength_clip)))
    return model, clip


def _lora_model(catalog: Catalog, model: ModelValue, lora_name: str, strength_model: float) -> tuple[ModelValue]:
    adapter = found_models(catalog, "loras", lora_name, "lora_name")[0]
    if strength_model == 0:
        return (model,)
    return (replace(model, loras=(*model.loras, LoraUse(adapter, strength_model))),)


def _last_layer(clip: ClipValue, stop_at_clip_layer: int) -> tuple[ClipValue]:
    return (replace(clip, last_layer=stop_at_clip_layer),)


def _normed(model: ModelValue, strength: float, pre_cfg: bool = False) -> tuple[ModelValue]:
    if pre_cfg:
        raise Refused("guidance is normed after it is computed here, and by attenuation alone", "pre_cfg")
    return (replace(model, extra=(*model.extra, ("CFGNorm", (strength,)))),)


def _differential(model: ModelValue, strength: float = 1.0) -> tuple[ModelValue]:
    if strength != 1:
        raise Refused(
            f"a strength of {strength:g}: a mask paints by its levels here, or softly, and not in between", "strength"
        )
    return (replace(model, extra=(*model.extra, ("DifferentialDiffusion", ()))),)


def _cached(model: ModelValue, device: str, dtype: str) -> tuple[ModelValue]:
    """Return the model: where its pipeline keeps keys and values of a prompt changes nothing, but for their dtype."""
    if dtype != "default":
        raise Refused(f"a cache in {dtype} changes the image: only `default` is honoured", "dtype")
    return (model,)


def _control_net(catalog: Catalog, control_net_name: str) -> tuple[ControlNetValue]:
    return (ControlNetValue(found_models(catalog, "controlnet", control_net_name, "control_net_name")[0]),)


def _model_patch(catalog: Catalog, name: str) -> tuple[ControlNetValue]:
    return (ControlNetValue(found_models(catalog, "model_patches", name, "name")[0]),)


def _patched(
    model: ModelValue, model_patch: ControlNetValue, vae: VaeValue, image: Image, strength: float, mask: Any = None
) -> tuple[ModelValue]:
    """Return a model with a ControlNet in its forwards, which reads the image by the model's own VAE."""
    if mask is not None:
        raise Refused("a mask of such a ControlNet is not honoured here", "mask")
    if not set(model.models) & set(vae.models):
        raise Refused("a ControlNet reads its image by the VAE of its model", "vae")
    if strength == 0:
        return (model,)
    use = ControlUse(model_patch, image, strength, scaling="area")
    return (replace(model, controls=(*model.controls, use)),)


def _union_type(control_net: ControlNetValue, type: str) -> tuple[ControlNetValue]:
    return (replace(control_net, mode=None if type == "auto" else type),)


def _upscaler(catalog: Catalog, model_name: str) -> tuple[UpscalerValue]:
    return (UpscalerValue(found_models(catalog, "upscale_models", model_name, "model_name")[0]),)


def _clip_kind(name: str, number_of_files: int, *further: Input) -> Kind:
    names = ["clip_name"] if number_of_files == 1 else [f"clip_name{place + 1}" for place in range(number_of_files)]
    files = tuple(file(one, "text_encoders") for one in names)
    return Kind(name, (*files, *further), (Output("CLIP"),), _clips, reads_catalog=True, category="loaders")


def _loader(name: str, inputs: tuple[Input, ...], outputs: tuple[Output, ...], function: Any) -> Kind:
    return Kind(name, inputs, outputs, function, reads_catalog=True, category="loaders")


# Which encoders there are follows from the registered model; the words grow with every model that ComfyUI learns.
_TYPE: Final = Input("type", "COMBO", "stable_diffusion")
_DEVICE: Final = choice("device", ("default", "cpu"), required=False)
_STRENGTH: Final = number("strength_model", 1.0, -100.0, 100.0)
_MODEL: Final = link("model", "MODEL")
_CLIP: Final = link("clip", "CLIP")

LOADERS: Final = (
    _loader(
        "CheckpointLoaderSimple",
        (file("ckpt_name", "checkpoints"),),
        (Output("MODEL"), Output("CLIP"), Output("VAE")),
        _checkpoint,
    ),
    _loader(
        "UNETLoader",
        (file("unet_name", "diffusion_models"), Input("weight_dtype", "COMBO", "default")),
        (Output("MODEL"),),
        _unet,
    ),
    _clip_kind("CLIPLoader", 1, _TYPE, _DEVICE),
    _clip_kind("DualCLIPLoader", 2, _TYPE, _DEVICE),
    _clip_kind("TripleCLIPLoader", 3),
    _clip_kind("QuadrupleCLIPLoader", 4),
    _loader("VAELoader", (file("vae_name", "vae"),), (Output("VAE"),), _vae),
    _loader(
        "LoraLoader",
        (_MODEL, _CLIP, file("lora_name", "loras"), _STRENGTH, number("strength_clip", 1.0, -100.0, 100.0)),
        (Output("MODEL"), Output("CLIP")),
        _lora,
    ),
    _loader("LoraLoaderModelOnly", (_MODEL, file("lora_name", "loras"), _STRENGTH), (Output("MODEL"),), _lora_model),
    Kind(
        "CFGNorm",
        (_MODEL, number("strength", 1.0, 0.0, 100.0), boolean("pre_cfg", required=False)),
        (Output("MODEL"),),
        _normed,
    ),
    Kind("DifferentialDiffusion", (_MODEL, number("strength", 1.0, required=False)), (Output("MODEL"),), _differential),
    Kind(
        "QwenImage21Cache",
        (_MODEL, choice("device", ("auto", "gpu", "cpu", "off")), choice("dtype", ("default", "int8", "int4"))),
        (Output("MODEL"),),
        _cached,
    ),
    Kind("CLIPSetLastLayer", (_CLIP, integer("stop_at_clip_layer", -1, -24, -1)), (Output("CLIP"),), _last_layer),
    _loader("ControlNetLoader", (file("control_net_name", "controlnet"),), (Output("CONTROL_NET"),), _control_net),
    _loader("ModelPatchLoader", (file("name", "model_patches"),), (Output("MODEL_PATCH"),), _model_patch),
    Kind(
        "QwenImageDiffsynthControlnet",
        (
            *(_MODEL, link("model_patch", "MODEL_PATCH"), link("vae", "VAE"), link("image", "IMAGE")),
            *(number("strength", 1.0, -10.0, 10.0), link("mask", "MASK", required=False)),
        ),
        (Output("MODEL"),),
        _patched,
        is_opaque=True,
    ),
    Kind(
        "SetUnionControlNetType",
        (link("control_net", "CONTROL_NET"), choice("type", _UNION_TYPES)),
        (Output("CONTROL_NET"),),
        _union_type,
    ),
    _loader("UpscaleModelLoader", (file("model_name", "upscale_models"),), (Output("UPSCALE_MODEL"),), _upscaler),
)
