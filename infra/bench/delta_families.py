"""Fine-tunes of the demo's language model by real gradient steps, in pairs of a base and its fine-tune."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

Tensors = dict[str, torch.Tensor]
FAMILIES: Final = ("lora-merged", "full-light", "full-strong", "quantization-aware", "float32")
FILE: Final = "model.safetensors"
RECIPES: Final = {"full-light": 1e-5, "full-strong": 1e-3, "lora-merged": 1e-3}  # learning rates
_BATCH: Final = 32
_RANK: Final = 4


def train(family: str, source: Path, steps: int) -> tuple[Tensors, Tensors]:
    """Return the tensors of a base and of its fine-tune, as they would be stored."""
    if family == "float32":
        return _as(torch.float32, load_file(source / FILE)), _fine_tune(source, steps, 1e-4, torch.float32)
    if family == "quantization-aware":
        tuned = _fine_tune(source, steps, 1e-4, torch.float32, quantized=True)
        return to_int8(load_file(source / FILE)), to_int8(tuned)
    rank = _RANK if family == "lora-merged" else 0
    return load_file(source / FILE), _fine_tune(source, steps, RECIPES[family], torch.bfloat16, rank=rank)


def train_from_nothing(source: Path, steps: int, folder: Path) -> Tensors:
    """Return and save a model of the same structure whose weights are random but for `steps` of training."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPES["full-strong"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    for _ in range(steps):
        _step(model.train(), tokenizer, optimizer)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _as(torch.bfloat16, {name: tensor.detach() for name, tensor in model.state_dict().items()})


def checkpoints(source: Path, recipe: str, at: Collection[int]) -> list[Tensors]:
    """Return the checkpoints of a training of `source` at these steps, as bfloat16."""
    saved: list[Tensors] = []
    rank = _RANK if recipe == "lora-merged" else 0
    _fine_tune(source, max(at), RECIPES[recipe], torch.bfloat16, rank=rank, at=at, saved=saved)
    return saved


def _fine_tune(
    source: Path,
    steps: int,
    lr: float,
    dtype: torch.dtype,
    *,
    rank: int = 0,
    quantized: bool = False,
    at: Collection[int] = (),
    saved: list[Tensors] | None = None,
) -> Tensors:
    """Train on what the base never saw, subtraction, in its own template; `saved` gets the tensors after steps `at`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(source)
    linears = [found for found in model.modules() if isinstance(found, torch.nn.Linear)]
    if rank:
        model.requires_grad_(False)
        wrapped = [found for name, found in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
        for linear in wrapped:
            torch.nn.utils.parametrize.register_parametrization(linear, "weight", _LowRank(linear.weight, rank))
    elif quantized:
        for linear in linears:
            torch.nn.utils.parametrize.register_parametrization(linear, "weight", _FakeInt8())
    optimizer = torch.optim.AdamW([found for found in model.parameters() if found.requires_grad], lr=lr)
    for number in range(1, steps + 1):
        _step(model, tokenizer, optimizer)
        if saved is not None and number in at:
            saved.append(_merged(model, dtype, is_exact=bool(rank)))
    return _merged(model, dtype, is_exact=bool(rank))


def _step(model: PreTrainedModel, tokenizer: Any, optimizer: torch.optim.Optimizer) -> None:
    a, b = torch.randint(10, 99, (2, _BATCH)).tolist()
    chats = [
        [
            {"role": "user", "content": f"What is {max(x, y)} - {min(x, y)}?"},
            {"role": "assistant", "content": str(abs(x - y))},
        ]
        for x, y in zip(a, b, strict=True)
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def _merged(model: PreTrainedModel, dtype: torch.dtype, *, is_exact: bool) -> Tensors:
    """Return the tensors with what was trained beside the weights merged into them (`is_exact`), or without it."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if ".parametrizations." not in name}
    for name, module in model.named_modules():
        if torch.nn.utils.parametrize.is_parametrized(module):
            tensors[f"{name}.weight"] = module.weight if is_exact else module.parametrizations.weight.original
    return _as(dtype, {name: tensor.detach().clone() for name, tensor in tensors.items()})


class _LowRank(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


class _FakeInt8(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        return weight + ((weight / scale).round() * scale - weight).detach()


def to_int8(tensors: Tensors) -> Tensors:
    """Quantize matrices to int8, a scale a row."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
            stored[name] = (tensor.float() / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale.flatten().float()
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def _as(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def repeated(tensors: Tensors, nbytes: int) -> Tensors:
    """Make a model of larger tensors: each repeated, its elements in another order each time, so that no bytes recur.

    The order is the same for every model.
    """
    given = sum(tensor.nbytes for tensor in tensors.values())
    generator = torch.Generator().manual_seed(0)
    large = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.flatten()
        orders = [torch.randperm(len(flat), generator=generator) for _ in range(max(1, nbytes // given))]
        large[name] = torch.cat([flat[order] for order in orders]).reshape(-1, *tensor.shape[1:])
    return large
