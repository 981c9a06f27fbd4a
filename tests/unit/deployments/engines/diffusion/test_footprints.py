"""A pipeline's twin: forwards recorded without weights, as often as they are asked for."""

from __future__ import annotations

import torch
from unit.deployments.engines.diffusion.conftest import Pair

from deployments.engines.building.build import build_skeleton
from deployments.engines.diffusion.footprints import PipelineTwin
from deployments.engines.diffusion.rows import BatchBounds, decode_kind, memory_kind, parts_of
from deployments.engines.records.protocol import DiffusionRequest


def test_footprints_have_the_kinds_of_requests(flux: Pair) -> None:
    modules = {"transformer": flux.ours.denoiser, "vae": flux.ours._codec.vae}
    blank = {}
    for name, module in modules.items():
        shapes = {weight: tuple(tensor.shape) for weight, tensor in module.state_dict().items()}
        blank[name] = build_skeleton("diffusers", None, flux.folder / name, shapes).module
    twin = PipelineTwin(flux.ours.family, flux.folder, blank, torch.device("cpu"))
    found = twin.footprints(32, 48, 5, BatchBounds(max_rows=12))
    request = DiffusionRequest("r", height=32, width=48, num_inference_steps=2, guidance_scale=1.0, seed=0)
    (part,) = parts_of([flux.ours.start_request(request, flux.conditioning())])
    assert found.keys() == {memory_kind(part), decode_kind(32, 48)}
    peaks = [found[memory_kind(part)].bytes_of(rows) for rows in (1, 2, 12)]
    assert 0 < peaks[0] < peaks[1] < peaks[2]
    again = twin.record_denoise(32, 48, part.branch.prompt.shape[1], 2)
    assert again.eager_peak() == peaks[1]
    assert any(node.layer.startswith("transformer.single_transformer_blocks.0") for node in again.nodes)
