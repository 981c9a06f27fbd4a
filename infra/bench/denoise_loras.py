"""The part of `infra.bench denoise` about LoRAs: what side path and merged copies take of a step, and of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.records.protocol import AdapterUse
from infra.bench.denoise_models import BenchModel
from weights.operations.adapters import LoraAdapter, LoraPair

_NUM_REQUESTS: Final = 8
_NUM_HOT: Final = 32
_RANKS: Final = (4, 16, 64)
_HOT_RANK: Final = 16
_SIDE_PX: Final = 16
_MAX_ROUNDS: Final = 60
_Way = tuple[int, str]  # requests, and their LoRAs
_TARGETS: Final = ("attn.", ".ff", ".proj_mlp", ".proj_out")  # what diffusers' trainers adapt


def measure_loras(model: BenchModel, num_steps: int, seconds: float) -> dict[str, Any]:
    """Measure for about so long: steps with and without LoRAs in turn, and the bytes of many that are at hand."""
    return {"steps": _measure_steps(model, num_steps, seconds), "memory": _measure_memory(model)}


def _measure_steps(model: BenchModel, num_steps: int, seconds: float) -> list[dict[str, Any]]:
    """Time steps of one request and of eight: without, all with one LoRA, merged too, each with its own."""
    own = [_lora(model, _HOT_RANK, seed) for seed in range(_NUM_REQUESTS)]
    merged = f"one of rank {_HOT_RANK}, merged"
    ways: dict[_Way, Sequence[LoraAdapter]] = {
        (1, "none"): (),
        **{(1, f"one of rank {rank}"): [_lora(model, rank, seed=0)] for rank in _RANKS},
        (1, merged): own[:1],
        (_NUM_REQUESTS, "none"): (),
        (_NUM_REQUESTS, f"one of rank {_HOT_RANK}"): own[:1] * _NUM_REQUESTS,
        (_NUM_REQUESTS, merged): own[:1] * _NUM_REQUESTS,
        (_NUM_REQUESTS, f"eight of rank {_HOT_RANK}"): own,
    }
    times: dict[_Way, list[float]] = {way: [] for way in ways}
    forwards: dict[_Way, float] = {}
    end_s, round_ = time.perf_counter() + seconds, 0
    while round_ < 2 or (time.perf_counter() < end_s and round_ < _MAX_ROUNDS):
        order = list(ways)
        for way in order[round_ % len(order) :] + order[: round_ % len(order)]:
            states = _start(model, way[0], ways[way], num_steps, is_merged=way[1] == merged)
            with model.counting_forwards() as count:
                for _ in range(num_steps):
                    begin_s = time.perf_counter()
                    model.ours.step(states)
                    times[way].append(time.perf_counter() - begin_s)
            forwards[way] = count() / num_steps
        round_ += 1
    return [
        {
            "num_requests": way[0],
            "loras": way[1],
            "step_ms": statistics.median(own_s) * 1e3,
            "cost": statistics.median(one / other for one, other in zip(own_s, times[way[0], "none"], strict=True)) - 1,
            "forwards_per_step": forwards[way],
        }
        for way, own_s in times.items()
    ]


def _measure_memory(model: BenchModel) -> dict[str, Any]:
    """Count the bytes that LoRAs add to a pipeline that has started a request with each, and those of merged copies."""
    loras = [_lora(model, _HOT_RANK, seed) for seed in range(_NUM_HOT)]
    states = [_start(model, 1, [lora], num_steps=1)[0] for lora in loras]
    fitted = [
        tensor for state in states for pairs, _ in state.adapters for p in pairs.values() for tensor in (p.down, p.up)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in fitted}
    denoiser = model.ours.denoiser
    changed = [denoiser.get_submodule(path).weight for path in loras[0].components["transformer"]]
    begin_s = time.perf_counter()
    _start(model, 1, loras[:1], num_steps=1, is_merged=True)
    merge_s = time.perf_counter() - begin_s
    return {
        "num_loras": _NUM_HOT,
        "rank": _HOT_RANK,
        "lora_bytes": sum(storages.values()) // _NUM_HOT,
        "merge_s": merge_s,
        "merged_layers_bytes": sum(weight.nbytes for weight in changed),
        "merged_checkpoint_bytes": sum(parameter.nbytes for parameter in denoiser.parameters()),
    }


def _start(
    model: BenchModel, count: int, loras: Sequence[LoraAdapter], num_steps: int, *, is_merged: bool = False
) -> list[DenoiseState]:
    states = []
    for number in range(count):
        request = model.request(num_steps, seed=number, side_px=_SIDE_PX)
        uses = (AdapterUse("lora"),) if loras else ()
        known = {"lora": loras[number]} if loras else {}
        asked = replace(request.request, adapters=uses, merges_adapter=is_merged)
        states.append(model.ours.start_request(asked, request.conditioning, known))
    return states


def _lora(model: BenchModel, rank: int, seed: int) -> LoraAdapter:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        path: LoraPair(
            torch.randn(rank, layer.in_features, generator=generator) * 0.01,
            torch.randn(layer.out_features, rank, generator=generator) * 0.01,
            1.0,
        )
        for path, layer in model.ours.denoiser.named_modules()
        if isinstance(layer, torch.nn.Linear) and any(target in path for target in _TARGETS)
    }
    return LoraAdapter(Path(f"lora-{seed}"), {"transformer": pairs})
