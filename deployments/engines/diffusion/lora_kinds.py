"""The two matrices that each kind of adapter adds to a layer, made of the tensors that a file has for it.

A LoRA, a LoHa, a LoKr and a difference all are products of an `up` (out, rank, 1, 1) and a `down` (rank, in, ...):
for the last three, of their combined factors. The layer's own weights are not needed. A GLoRA, an OFT, a
BOFT and an IA3 are, or have beside a product, a map of the layer's features.

Sources: LyCORIS, `lycoris/functional/`; peft 0.21, `tuners/lora/`; ComfyUI, `comfy/weight_adapter/`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from deployments.engines.diffusion.lora_names import ALPHA, DOWN, LENGTHS, OF_LYCORIS, UP, part_of
from deployments.engines.nn.feature_maps import FeatureMap, Gains, Mixed, Turns
from deployments.engines.records.protocol import EngineError
from weights.formats.lora import is_finite

Parts = Mapping[str, tuple[str, torch.Tensor]]  # the tensor's role -> its name in the file, and the tensor


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """scale * up @ down, with further parts of a file's layer. `bias` (out,) is added unscaled.

    `lengths` are a DoRA's, as in the file; `names` are the tensors' names, for messages. Beside a map of
    `features` the matrices may have no elements.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    lengths: torch.Tensor | None
    bias: torch.Tensor | None
    names: Mapping[str, str]
    features: FeatureMap | None = None

    @property
    def has_lengths_of_inputs(self) -> bool:
        """True if the lengths of a DoRA are those of inputs. Raises EngineError for lengths that no layer has."""
        if self.lengths is None:
            return False
        shape, outputs, inputs = tuple(self.lengths.shape), len(self.up), self.down.shape[1]
        is_of_lycoris = self.names[LENGTHS].endswith(OF_LYCORIS)
        by_input = shape[:1] == (1,) != (outputs,) if is_of_lycoris else shape == (1, inputs)
        if self.lengths.numel() != (inputs if by_input else outputs):
            raise EngineError(f"{self.names[LENGTHS]} has the shape {shape}, which no layer of its LoRA has")
        return by_input


def product_of(layer: str, parts: Parts, alpha: float | None, use_rslora: bool = False) -> Product:
    """Return the product that the tensors of one layer of a file add to it.

    `alpha` is the file's metadata's, for a layer without one of its own; with neither the scale is 1. Raises
    EngineError: half a pair, shapes that do not match, a tensor foreign to its kind, one that is no float.
    """
    names = {what: name for what, (name, _) in parts.items()}
    for what, (name, tensor) in parts.items():
        if not tensor.is_floating_point() and what not in (ALPHA, "on_input"):
            raise EngineError(f"tensor {name} is {tensor.dtype}, expected floating point")
    tensors = {what: tensor for what, (_, tensor) in parts.items()}
    find, of_kind = _kind_of(layer, names)
    known = {*of_kind, ALPHA, *(() if find in _WITH_MAPS else (LENGTHS, "up bias", "down bias"))}
    if foreign := next((name for what, name in names.items() if what not in known), None):
        raise EngineError(f"tensor {foreign} does not go with {names[of_kind[0]]}: they are of different kinds")
    try:
        up, down, rank, features = find(tensors)
    except (RuntimeError, IndexError, ValueError, KeyError):
        first, *others = (f"{names[what]} {list(tensors[what].shape)}" for what in of_kind if what in names)
        said = first.replace(" [", " has shape [", 1)
        raise EngineError(f"tensor {said}, and {', '.join(others)}: they do not go together") from None
    scale = _scale(tensors, names, alpha, rank, use_rslora)
    bias = _bias(tensors, names, up, scale)
    if bias is not None and LENGTHS in tensors:
        raise EngineError(f"tensor {names.get('up bias') or names['down bias']}: a bias of a DoRA, which is not read")
    return Product(down, up, scale, tensors.get(LENGTHS), bias, names, features)


def num_made(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of elements of matrices computed for an adapter, beside its file's tensors of these shapes.

    A LoRA's matrices are the file's own. An unreadable layer counts 0.
    """
    layers = dict[str, dict[str, tuple[str, torch.Tensor]]]()
    for name, shape in shapes.items():
        with contextlib.suppress(EngineError):
            layer, what = part_of(name, shapes)
            tensor = torch.ones(()) if what == ALPHA else torch.empty(tuple(shape), device="meta")
            layers.setdefault(layer, {})[what] = name, tensor
    found = 0
    for layer, parts in layers.items():
        if DOWN in parts and "mid" not in parts:
            continue
        with contextlib.suppress(EngineError):
            product = product_of(layer, parts, None)
            own = [tensor for _, tensor in parts.values()]
            made = [product.down, product.up, *(product.features.tensors if product.features is not None else ())]
            found += sum(one.numel() for one in made if not any(one is other for other in own))
    return found


class _Found(NamedTuple):
    """Matrices, the rank by which alpha is divided, if any, and a map of features, if any."""

    up: torch.Tensor
    down: torch.Tensor
    rank: int | None
    features: FeatureMap | None = None


_Find = Callable[[Mapping[str, torch.Tensor]], _Found]


def _kind_of(layer: str, names: Mapping[str, str]) -> tuple[_Find, list[str]]:
    """Return the function that makes the product of such tensors, and the kinds that it takes. Raises EngineError."""
    has = names.keys()
    if has & {UP, DOWN}:
        for what in (DOWN, UP):
            if what not in has:
                other = names[UP if what == DOWN else DOWN]
                raise EngineError(f"tensor {other} is there, and the other half of its pair ({what}) is missing")
        return _of_lora, [DOWN, UP, "mid"]
    if any(what.startswith("hada_") for what in has):
        return _of_loha, [what for what in has if what.startswith("hada_")]
    if any(what.startswith("lokr_") for what in has):
        return _of_lokr, [what for what in has if what.startswith("lokr_")]
    if any(what.startswith("glora_") for what in has):
        return _of_glora, [what for what in has if what.startswith("glora_")]
    if "oft_blocks" in has:
        return _of_oft, [what for what in ("oft_blocks", "rescale") if what in has]
    if "oft_R" in has:
        return _of_peft_oft, ["oft_R"]
    if "ia3" in has and "on_input" in has:
        return _of_ia3, ["ia3", "on_input"]
    if "difference" in has:
        return _of_difference, ["difference"]
    if "up bias" in has:
        return _of_bias, ["up bias"]
    raise EngineError(f"tensor {next(iter(names.values()))} is alone: nothing of {layer!r} goes with it")


def _of_lora(tensors: Mapping[str, torch.Tensor]) -> _Found:
    down, up = tensors[DOWN], tensors[UP]
    rank = down.shape[0]
    if not rank or up.shape[1] != (tensors["mid"].shape[0] if "mid" in tensors else rank) or up.ndim != down.ndim:
        raise ValueError
    if "mid" in tensors:
        down = _through(tensors["mid"], down.flatten(1))
    if not 2 <= up.ndim <= 5 or any(size != 1 for size in up.shape[2:]):
        raise ValueError
    return _Found(up, down, rank)


def _through(core: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the product of a kernel (p, q, ...) and rows (q, in): (p, in, ...)."""
    return torch.einsum("pq...,qi->pi...", core.float(), down.float()).contiguous()


def _of_loha(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return the elementwise product of two products: of rank r * r, or of the layer's own rank."""
    halves = []
    for number in "12":
        first, second = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"]
        core = tensors.get(f"hada_t{number}")
        halves.append((first, second) if core is None else (first.T, _through(core, second)))
    (up_1, down_1), (up_2, down_2) = halves
    if down_1.shape != down_2.shape or len(up_1) != len(up_2) or up_1.shape[1] != len(down_1):
        raise ValueError
    rank, outputs = tensors["hada_w1_b"].shape[0], len(up_1)
    if len(down_1) * len(down_2) >= min(outputs, down_1[0].numel()):
        whole = (up_1.float() @ down_1.float().flatten(1)) * (up_2.float() @ down_2.float().flatten(1))
        return _Found(*_factors(whole.view(outputs, *down_1.shape[1:])), rank)
    up = (up_1.float().unsqueeze(2) * up_2.float().unsqueeze(1)).flatten(1)
    down = (down_1.float().unsqueeze(1) * down_2.float().unsqueeze(0)).flatten(0, 1)
    return _Found(_like_layer(up, down), down, rank)


def _of_lokr(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return the Kronecker product of two matrices, of which each may be a product itself."""
    if not _has_whole(tensors, "1") or not _has_whole(tensors, "2"):
        raise ValueError
    up_1, down_1 = (
        _factors(tensors["lokr_w1"]) if "lokr_w1" in tensors else (tensors["lokr_w1_a"], tensors["lokr_w1_b"])
    )
    if "lokr_w2" in tensors:
        up_2, down_2 = _factors(tensors["lokr_w2"])
    elif "lokr_t2" in tensors:
        up_2, down_2 = tensors["lokr_w2_a"].T, _through(tensors["lokr_t2"], tensors["lokr_w2_b"])
    else:
        up_2, down_2 = tensors["lokr_w2_a"], tensors["lokr_w2_b"]
    if down_1.ndim != 2 or up_1.shape[1] != len(down_1) or up_2.shape[1] != len(down_2):
        raise ValueError
    up = torch.kron(up_1.float().flatten(1).contiguous(), up_2.float().flatten(1).contiguous())
    down = torch.kron(down_1.float().reshape(*down_1.shape, *[1] * (down_2.ndim - 2)), down_2.float().contiguous())
    ranks = [tensors[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in tensors]
    return _Found(_like_layer(up, down), down, next(iter(ranks), None))  # alpha has no meaning for two whole ones


def _has_whole(tensors: Mapping[str, torch.Tensor], number: str) -> bool:
    name = f"lokr_w{number}"
    return (name in tensors) != (f"{name}_a" in tensors and f"{name}_b" in tensors)


def _of_difference(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return the difference of a weight; a norm's has one axis, and no inputs."""
    whole = tensors["difference"]
    if whole.ndim == 1:
        return _Found(whole[:, None], whole.new_zeros(1, 0), None)
    return _Found(*_factors(tensors["difference"]), None)


def _of_bias(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return an empty product for a layer whose bias alone changes: its number of inputs is not known."""
    bias = tensors["up bias"]
    return _Found(bias.new_zeros(len(bias), 1), bias.new_zeros(1, 0), None)


def _of_glora(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return b1 @ b2, and the mixture a1 @ a2 of the inputs; older files have both in the reverse order."""
    first, second = tensors["glora_a1"].flatten(1), tensors["glora_a2"].flatten(1)
    up, down = tensors["glora_b1"], tensors["glora_b2"]
    if len(first) < first.shape[1]:
        first, second, up, down = second, first, down, up
    if first.shape != second.T.shape:
        raise ValueError
    core = {"mid": tensors["glora_bm"]} if "glora_bm" in tensors else {}
    found = _of_lora({UP: up, DOWN: down, **core})
    if found.rank != first.shape[1]:
        raise ValueError
    return found._replace(features=Mixed(second, first))


def _of_oft(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return turns of the outputs: (I + Q) (I - Q)^-1 of each block, Q = B - B^T no longer than alpha * outputs."""
    blocks, lengths = tensors["oft_blocks"].float(), tensors.get("rescale")
    if blocks.ndim not in (3, 4) or blocks.shape[-1] != blocks.shape[-2] or not blocks.numel():
        raise ValueError
    is_butterfly = blocks.ndim == 4
    skew = blocks - blocks.mT
    outputs = blocks.shape[-3] * blocks.shape[-1]
    if is_butterfly and (blocks.shape[-1] % 2 or outputs % (2 ** (len(blocks) - 1) * blocks.shape[-1])):
        raise ValueError
    limit = tensors[ALPHA].item() * outputs if ALPHA in tensors else 0.0
    if limit > 0:
        skew = skew * (limit / (skew.norm() + 1e-8)).clamp(max=1)
    one = torch.eye(blocks.shape[-1], device=blocks.device)
    turns = (one + skew) @ torch.linalg.inv(one - skew)
    if lengths is not None and lengths.numel() != outputs:
        raise ValueError
    lengths = None if lengths is None else lengths.float().flatten()
    stages = turns.mT if is_butterfly else turns[None]  # a butterfly's act from the left
    return _only(Turns(stages.contiguous(), lengths, is_butterfly))


def _of_peft_oft(tensors: Mapping[str, torch.Tensor]) -> _Found:
    """Return turns of the inputs by Q's elements above the diagonal: I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4, as trained."""
    above = tensors["oft_R"].float()
    size = (1 + math.isqrt(1 + 8 * above.shape[1])) // 2
    if above.ndim != 2 or size * (size - 1) // 2 != above.shape[1] or not above.numel():
        raise ValueError
    skew = above.new_zeros(len(above), size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    skew[:, rows, columns] = above
    skew = skew - skew.mT
    square = skew @ skew
    one = torch.eye(size, device=above.device)
    return _only(Turns((one + 2 * (skew + square + square @ skew) + square @ square)[None], of_inputs=True))


def _of_ia3(tensors: Mapping[str, torch.Tensor]) -> _Found:
    return _only(Gains(tensors["ia3"].float().flatten(), of_inputs=bool(tensors["on_input"].item())))


def _only(features: FeatureMap) -> _Found:
    return _Found(torch.empty(0, 0), torch.empty(0, 0), None, features)


_WITH_MAPS: Final = (_of_glora, _of_oft, _of_peft_oft, _of_ia3)


def _factors(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix or kernel (out, in, ...) as `up` and `down`, one of which is of ones."""
    if whole.ndim == 2 and whole.shape[1] < len(whole):
        return whole, torch.eye(whole.shape[1], dtype=whole.dtype, device=whole.device)
    one = torch.eye(len(whole), dtype=whole.dtype, device=whole.device)
    return _like_layer(one, whole), whole


def _like_layer(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return `up` with the kernel axes of `down`, which are 1."""
    return up.reshape(*up.shape[:2], *[1] * (down.ndim - 2))


def _scale(
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    alpha: float | None,
    rank: int | None,
    use_rslora: bool,
) -> float:
    if rank is None:
        return 1.0
    if ALPHA in tensors:
        if tensors[ALPHA].numel() != 1:
            raise EngineError(f"tensor {names[ALPHA]} has shape {tuple(tensors[ALPHA].shape)}, expected one number")
        alpha = tensors[ALPHA].item()
        if not is_finite(alpha):
            raise EngineError(f"tensor {names[ALPHA]} is {alpha!r}, expected a finite number")
    return 1.0 if alpha is None else alpha / (rank**0.5 if use_rslora else rank)


def _bias(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], up: torch.Tensor, scale: float
) -> torch.Tensor | None:
    """Return the bias added to a layer's outputs: that of `up`, and `up`'s product with that of `down`."""
    found = tensors.get("up bias")
    if found is not None and tuple(found.shape) != (len(up),):
        raise EngineError(f"tensor {names['up bias']} has shape {list(found.shape)}, its layer {len(up)} outputs")
    if "down bias" in tensors:
        inner = tensors["down bias"]
        if inner.ndim != 1 or len(inner) != up.shape[1]:
            raise EngineError(f"tensor {names['down bias']} has shape {list(inner.shape)}, expected [{up.shape[1]}]")
        own = scale * (up.flatten(1).float() @ inner.float())
        found = own if found is None else found.float() * scale + own
    elif found is not None and names["up bias"].endswith(".bias"):
        found = found.float() * scale
    return found
