"""The model of the denoise bench: what is counted and compared is what it says."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.costs.step_costs import StepCosts
from infra.bench.denoise import PARTS, DenoiseSettings, _measure_mixed, _play, print_part
from infra.bench.denoise_loras import measure_loras
from infra.bench.denoise_models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.drawn(1, of="file")]  # slow: imports diffusers


def test_all_ways_make_the_same_latents_and_arrivals_are_all_served() -> None:
    with make_model(0) as model:
        ours, plain = ({type(part).__name__ for part in one.denoiser.modules()} for one in (model.ours, model.plain))
        assert "_BatchInvariantLinear" in ours
        assert not any("BatchInvariant" in name for name in plain)
        states = []
        for pipeline in (model.ours, model.plain):
            request = model.request(2, seed=3)
            states.append(pipeline.start_request(request.request, request.conditioning))
            while not states[-1].done:
                pipeline.step([states[-1]])
        torch.testing.assert_close(states[0].latents, states[1].latents, rtol=0, atol=1e-4)
        mixed = _measure_mixed(model, DenoiseSettings(num_steps=1), seed=1)
        assert 1 <= mixed["lengths_forwards_per_step"] <= mixed["lengths_distinct"] <= 16
        assert len(_play(model, [(0.0, model.request(1, seed=0)), (0.01, model.request(2, seed=1))], StepCosts())) == 2


def test_loras_share_forwards_and_are_counted_once() -> None:
    with make_model(0) as model:
        figures = measure_loras(model, num_steps=1, seconds=0.0)
    assert {row["forwards_per_step"] for row in figures["steps"]} == {1.0}
    assert [row["loras"] for row in figures["steps"] if row["num_requests"] == 8] == [
        "none",
        "one of rank 16",
        "one of rank 16, merged",
        "eight of rank 16",
    ]
    memory = figures["memory"]
    rank, changed = 16, memory["merged_layers_bytes"] // 4
    assert 0 < memory["lora_bytes"] < memory["merged_layers_bytes"] < memory["merged_checkpoint_bytes"]
    assert memory["lora_bytes"] // 4 > rank * 2 * changed**0.5 / 44  # rank (in + out) is least where in equals out


def test_each_part_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    way = {"images_per_s": 2.0, "mean_latency_s": 0.5}
    single = {"side_px": 16, "ours_steps_per_s": 20.0, "stock_steps_per_s": 10.0, "ratio": 2.0}
    concurrent = {"num_requests": 8, "side_px": 16, "ours": way, "serial": way, "one_batch": way}
    figures = {
        "single": [single],
        "concurrent": [concurrent | {"ours_over_serial": 1.5}],
        "mixed": {
            f"{name}_{what}": 2.0
            for name in ("lengths", "lengths_and_sizes")
            for what in ("distinct", "forwards_per_step")
        },
        "arrivals": [{"load": 0.5, "ours_p50_s": 1.0, "ours_p99_s": 2.0, "fifo_p50_s": 3.0, "fifo_p99_s": 4.0}],
        "stream": {"progress_overhead": 0.01},
        "invariance": [{"rows": 1, "ours_ms": 1.0, "plain_ms": 1.0, "cost": 0.0}],
        "checkpoint": {"bytes": 7, "resume_ms": 1.5},
        "loras": {
            "steps": [
                {"num_requests": 8, "loras": "none", "step_ms": 4.0, "cost": 0.123, "forwards_per_step": 1.0},
            ],
            "memory": {
                "num_loras": 32,
                "rank": 16,
                "lora_bytes": 2_290_000,
                "merged_layers_bytes": 25_200_000,
                "merged_checkpoint_bytes": 36_700_000,
                "merge_s": 0.25,
            },
        },
        "offload": [{"share": 0.3, "steps_per_s": 4.5, "uploaded_bytes_per_step": 3.2e6}],
        "room": [
            {"bound": "at most 2", "halvings": 0, "rounds": 5, "steps_per_cpu_s": 4.0, "to_planned": 0.975},
            {"bound": "planned", "halvings": 0, "rounds": 5, "steps_per_cpu_s": 3.9, "to_planned": 1.0},
        ],
        "replay": [{"model": "m", "num_requests": 1, "eager_ms": 4.0, "replayed_ms": 3.0, "ratio": 0.75}],
    }
    assert tuple(figures) == PARTS
    shown = {
        "single": "2.00 x",
        "concurrent": "1.50 x",
        "stream": "+1.0%",
        "loras": "2.29 MB each",
        "offload": "30%",
        "room": "0.975",
        "replay": "0.75",
    }
    for name, part in figures.items():
        print_part(name, part)
        assert shown.get(name, "") in (out := capsys.readouterr().out)
        assert out
