"""A pipeline's twin: forwards recorded without weights, as often as they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.conftest import Pair

from deployments.engines.building.build import build_skeleton
from deployments.engines.diffusion.footprints import PipelineTwin
from deployments.engines.diffusion.rows import BatchBounds, decode_kind, memory_kind, parts_of
from deployments.engines.records.protocol import AdapterUse, DiffusionRequest, EngineError
from weights.operations.adapters import load_adapter


@pytest.fixture(scope="module")
def twin(flux: Pair) -> PipelineTwin:
    modules = {"transformer": flux.ours.denoiser, "vae": flux.ours._codec.vae}
    blank = {}
    for name, module in modules.items():
        shapes = {weight: tuple(tensor.shape) for weight, tensor in module.state_dict().items()}
        blank[name] = build_skeleton("diffusers", None, flux.folder / name, shapes).module
    return PipelineTwin(flux.ours.family, flux.folder, blank, torch.device("cpu"))


def test_footprints_have_the_kinds_of_requests(flux: Pair, twin: PipelineTwin) -> None:
    found = twin.footprints(32, 48, 5, BatchBounds(max_rows=12))
    request = DiffusionRequest("r", height=32, width=48, num_inference_steps=2, guidance_scale=1.0, seed=0)
    (part,) = parts_of([flux.ours.start_request(request, flux.conditioning())])
    assert found.keys() == {memory_kind(part), decode_kind(32, 48)}
    peaks = [found[memory_kind(part)].bytes_of(rows) for rows in (1, 2, 12)]
    assert 0 < peaks[0] < peaks[1] < peaks[2]
    again = twin.record_denoise(32, 48, part.branch.prompt.shape[1], 2)
    assert again.eager_peak() == peaks[1]
    assert any(node.layer.startswith("transformer.single_transformer_blocks.0") for node in again.nodes)


def test_a_size_that_no_request_can_have_is_refused(twin: PipelineTwin) -> None:
    twin.check_size(32, 48)
    with pytest.raises(EngineError, match=r"width 47: expected a multiple of \d+"):
        twin.check_size(32, 47)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["OFT", "GLoRA", "IA3"])
def test_what_turns_or_mixes_features_is_recorded(flux: Pair, twin: PipelineTwin, kind: str, tmp_path: Path) -> None:
    layer, size = (
        "lycoris_transformer_blocks_0_attn_to_q",
        flux.ours.denoiser.transformer_blocks[0].attn.to_q.in_features,
    )
    tensors = {
        "OFT": {"oft_blocks": torch.randn(size // 4, 4, 4)},
        "GLoRA": {
            f"{half}{place}.weight": torch.randn(*((size, 2) if place == 1 else (2, size)))
            for half in "ab"
            for place in (1, 2)
        },
        "IA3": {"weight": torch.randn(size), "on_input": torch.tensor(0)},
    }[kind]
    save_file({f"{layer}.{end}": one for end, one in tensors.items()}, tmp_path / "a.safetensors")
    request = DiffusionRequest(
        "r", height=32, width=48, num_inference_steps=2, guidance_scale=1.0, seed=0, adapters=(AdapterUse("a"),)
    )
    shapes = flux.ours.adapter_shapes(request, {"a": load_adapter(tmp_path / "a.safetensors")})
    plain, adapted = (len(twin.record_denoise(32, 48, 5, 2, one).nodes) for one in ((), shapes))
    assert adapted > plain
