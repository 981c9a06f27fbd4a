"""Diffusers' pipelines written as one file, in the names and forms of the models' original code."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensors = dict[str, torch.Tensor]
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def unet_of_ldm(state: Mapping[str, torch.Tensor], layers_per_block: int) -> Tensors:
    """The UNet of Stable Diffusion 1, 2 and XL: blocks counted through, down and up."""
    result = {}
    for key, tensor in state.items():
        place, name, leaf = _split(key)
        parts = place.split(".")
        attentions_in_up = (
            any(other.startswith(f"up_blocks.{parts[1]}.attentions") for other in state) if len(parts) > 1 else False
        )
        match parts:
            case ["down_blocks", block, kind, layer]:
                number = 1 + int(block) * (layers_per_block + 1)
                if kind == "downsamplers":
                    new = f"input_blocks.{number + layers_per_block}.0.op"
                else:
                    new = f"input_blocks.{number + int(layer)}.{'01'[kind == 'attentions']}"
            case ["up_blocks", block, kind, layer]:
                number = int(block) * (layers_per_block + 1)
                if kind == "upsamplers":
                    new = f"output_blocks.{number + layers_per_block}.{1 + attentions_in_up}.conv"
                else:
                    new = f"output_blocks.{number + int(layer)}.{'01'[kind == 'attentions']}"
            case ["mid_block", kind, layer]:
                new = "middle_block." + ("1" if kind == "attentions" else str(2 * int(layer)))
            case _:
                new, name = _UNET_ENDS[place], ""
        if "resnets" in parts:
            name = _RESNET[name]
        if "samplers" in place:
            name = ""
        result["model.diffusion_model." + ".".join(filter(None, (new, name, leaf)))] = tensor
    return result


def _split(key: str) -> tuple[str, str, str]:
    """Return block, layer within it, and weight or bias."""
    module, _, leaf = key.rpartition(".")
    parts = module.split(".")
    length = {"down_blocks": 4, "up_blocks": 4, "mid_block": 3}.get(parts[0], len(parts))
    return ".".join(parts[:length]), ".".join(parts[length:]), leaf


def vae_of_ldm(state: Mapping[str, torch.Tensor], num_blocks: int, prefix: str = "first_stage_model.") -> Tensors:
    """The autoencoder of latent diffusion; its attention is made of 1x1 convolutions, its decoder counts backwards."""
    result = {}
    for key, tensor in state.items():
        new = key.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
        new = new.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_norm_out", "norm_out")
        for block in range(num_blocks):
            new = new.replace(f"down_blocks.{block}.resnets", f"down.{block}.block")
            new = new.replace(f"down_blocks.{block}.downsamplers.0", f"down.{block}.downsample")
            new = new.replace(f"up_blocks.{block}.resnets", f"up.{num_blocks - 1 - block}.block")
            new = new.replace(f"up_blocks.{block}.upsamplers.0", f"up.{num_blocks - 1 - block}.upsample")
        if "attn_1" in new:
            for name, original in _ATTENTION.items():
                new = new.replace(f"attn_1.{name}.", f"attn_1.{original}.")
            if tensor.ndim == 2:
                tensor = tensor[:, :, None, None]
        result[prefix + new.replace("conv_shortcut", "nin_shortcut")] = tensor
    return result


def open_clip(state: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    """OpenCLIP's text tower: queries, keys and values in one matrix, the projection transposed."""
    result = {}
    layers: dict[str, Tensors] = {}
    for key, tensor in state.items():
        new = key.removeprefix("text_model.")
        new = new.replace("embeddings.token_embedding.weight", "token_embedding.weight")
        new = new.replace("embeddings.position_embedding.weight", "positional_embedding")
        new = new.replace("final_layer_norm", "ln_final").replace("encoder.layers.", "transformer.resblocks.")
        new = new.replace("layer_norm1", "ln_1").replace("layer_norm2", "ln_2")
        new = (
            new.replace("mlp.fc1", "mlp.c_fc")
            .replace("mlp.fc2", "mlp.c_proj")
            .replace("self_attn.out_proj", "attn.out_proj")
        )
        if ".self_attn." in new:
            place, _, rest = new.partition(".self_attn.")
            layers.setdefault(place, {})[rest] = tensor
        elif new == "text_projection.weight":
            result[prefix + "text_projection"] = tensor.T.contiguous()
        else:
            result[prefix + new] = tensor
    for place, parts in layers.items():
        for leaf in ("weight", "bias"):
            joined = torch.cat([parts[f"{name}_proj.{leaf}"] for name in "qkv"])
            result[f"{prefix}{place}.attn.in_proj_{leaf}"] = joined
    return result


_SD3_ENDS = {
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
}
_SD3_BLOCK = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "attn.to_add_out": "context_block.attn.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}


def sd3(state: Mapping[str, torch.Tensor], num_layers: int) -> Tensors:
    """Stable Diffusion 3's transformer: fused products, and shift before scale where a block ends without a gate."""
    result = {"pos_embed": state["pos_embed.pos_embed"]}
    for leaf in ("weight", "bias"):
        result |= {f"{new}.{leaf}": state[f"{old}.{leaf}"] for old, new in _SD3_ENDS.items()}
        result[f"final_layer.adaLN_modulation.1.{leaf}"] = _shift_first(state[f"norm_out.linear.{leaf}"])
        for number in range(num_layers):
            old, new = f"transformer_blocks.{number}.", f"joint_blocks.{number}."
            for ours, theirs in _SD3_BLOCK.items():
                if f"{old}{ours}.{leaf}" in state:  # the last block has no way back to the text
                    result[f"{new}{theirs}.{leaf}"] = state[f"{old}{ours}.{leaf}"]
            for ours, theirs in (
                ("attn.to_{}", "x_block.attn"),
                ("attn2.to_{}", "x_block.attn2"),
                ("attn.add_{}_proj", "context_block.attn"),
            ):
                if f"{old}{ours.format('q')}.{leaf}" in state:
                    parts = [state[f"{old}{ours.format(name)}.{leaf}"] for name in "qkv"]
                    result[f"{new}{theirs}.qkv.{leaf}"] = torch.cat(parts)
        last = f"joint_blocks.{num_layers - 1}.context_block.adaLN_modulation.1.{leaf}"
        result[last] = _shift_first(result[last])
    return {f"model.diffusion_model.{name}": tensor for name, tensor in result.items()}


def _shift_first(tensor: torch.Tensor) -> torch.Tensor:
    scale, shift = tensor.chunk(2)
    return torch.cat([shift, scale])


_FLUX_ENDS = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}
_FLUX_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
_FLUX_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
_FLUX_NORMS = {
    "norm_q": "img_attn.norm.query_norm",
    "norm_k": "img_attn.norm.key_norm",
    "norm_added_q": "txt_attn.norm.query_norm",
    "norm_added_k": "txt_attn.norm.key_norm",
}


def flux(state: Mapping[str, torch.Tensor], num_double: int, num_single: int) -> Tensors:
    """Flux's transformer: queries, keys and values in one matrix, in single blocks the feed forward's too."""
    result: Tensors = {}
    for leaf in ("weight", "bias"):
        ends = {new: f"{old}.{leaf}" for old, new in _FLUX_ENDS.items() if f"{old}.{leaf}" in state}
        result |= {f"{new}.{leaf}": state[old] for new, old in ends.items()}
        result[f"final_layer.adaLN_modulation.1.{leaf}"] = _shift_first(state[f"norm_out.linear.{leaf}"])
        for number in range(num_double):
            old, new = f"transformer_blocks.{number}.", f"double_blocks.{number}."
            result |= {f"{new}{theirs}.{leaf}": state[f"{old}{ours}.{leaf}"] for ours, theirs in _FLUX_DOUBLE.items()}
            for ours, theirs in (("to_{}", "img_attn"), ("add_{}_proj", "txt_attn")):
                parts = [state[f"{old}attn.{ours.format(name)}.{leaf}"] for name in "qkv"]
                result[f"{new}{theirs}.qkv.{leaf}"] = torch.cat(parts)
        for number in range(num_single):
            old, new = f"single_transformer_blocks.{number}.", f"single_blocks.{number}."
            result |= {f"{new}{theirs}.{leaf}": state[f"{old}{ours}.{leaf}"] for ours, theirs in _FLUX_SINGLE.items()}
            parts = [state[f"{old}{name}.{leaf}"] for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
            result[f"{new}linear1.{leaf}"] = torch.cat(parts)
    for number in range(num_double):
        for ours, theirs in _FLUX_NORMS.items():
            scale = state[f"transformer_blocks.{number}.attn.{ours}.weight"]
            result[f"double_blocks.{number}.{theirs}.scale"] = scale
    for number in range(num_single):
        for ours, theirs in (("norm_q", "query_norm"), ("norm_k", "key_norm")):
            scale = state[f"single_transformer_blocks.{number}.attn.{ours}.weight"]
            result[f"single_blocks.{number}.norm.{theirs}.scale"] = scale
    return result


def z_image(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Z-Image's transformer: queries, keys and values in one matrix."""
    result: Tensors = {}
    for key, tensor in state.items():
        new = key.replace("all_final_layer.2-1.", "final_layer.").replace("all_x_embedder.2-1.", "x_embedder.")
        new = new.replace(".attention.to_out.0.", ".attention.out.")
        new = new.replace(".attention.norm_k.", ".attention.k_norm.").replace(
            ".attention.norm_q.", ".attention.q_norm."
        )
        if ".attention.to_" in new:
            place = new.partition(".attention.")[0]
            parts = [state[f"{place}.attention.to_{name}.weight"] for name in "qkv"]
            result[f"{place}.attention.qkv.weight"] = torch.cat(parts)
        else:
            result[new] = tensor
    return result
