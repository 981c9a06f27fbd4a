"""Denoisers of GGUF files make the images of stock pipelines whose weights are what gguf-py makes of those files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from unit.deployments.engines.diffusion import conftest, test_prompt_readers
from unit.weights.formats.gguf_files import packed_bytes, under_diffusers_names, write_denoiser

from deployments.engines.building.build import build_module
from deployments.engines.building.skeletons import blank_module
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.nn.lora import fit_pairs
from deployments.engines.nn.packed_linear import _PackedLayer
from deployments.engines.nn.packed_weights import Arithmetic
from deployments.engines.records.protocol import ConditionedRequest, DiffusionRequest
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.adapters import LoraPair
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

PIPELINES = {"qwen_image": "QwenImagePipeline", "lumina2": "ZImagePipeline"}


class Packed:
    """A stock pipeline over the values of a GGUF file, and that file in a store, beside a folder that it is like."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self.architecture = architecture
        self.pair: Any
        if architecture in PIPELINES:
            self.pair = test_prompt_readers.make_pair(PIPELINES[architecture], folder / "base")
        else:
            make = conftest.make_flux if architecture == "flux" else conftest.make_stable_diffusion_3
            self.pair = make(folder / "base")
        self.file = folder / "denoiser.gguf"
        self.stock = self.pair.stock.transformer
        state = self.stock.state_dict()
        values = write_denoiser(self.file, architecture, state)
        self.stock.load_state_dict(under_diffusers_names(architecture, state, values))
        self.store = WeightStore(folder / "store")
        base = open_base(self.pair.folder, self.store)
        self.manifest = externalize(self.store, "packed", self.file, like=base, dtype="float32")
        self.component = self.manifest.components["transformer"]
        self.tensors = load_model(self.manifest, LocalExtents(self.store.packs))

    def pipeline(self, arithmetic: Arithmetic) -> DenoisePipeline:
        family, folder = self.pair.ours.family, self.pair.folder
        modules = {
            "transformer": self.build(arithmetic),
            "vae": build_module("diffusers", None, folder / "vae", self.tensors["vae"]),
        }
        return DenoisePipeline(family, folder, modules)

    def build(self, arithmetic: Arithmetic) -> Any:
        kinds = self.component.block_types
        folder = self.pair.folder / "transformer"
        return build_module("diffusers", None, folder, self.tensors["transformer"], kinds=kinds, arithmetic=arithmetic)

    def run(self, request: DiffusionRequest) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, np.ndarray]]:
        """Return a request's conditioning, and stock's latents and images."""
        if self.architecture in PIPELINES:
            return self.pair.conditioning(request, "a cat", None), self.pair.stock_run(request, "a cat", None)
        conditioning = self.pair.conditioning()
        return conditioning, self.pair.stock_outputs(request, conditioning)


@pytest.fixture(scope="module", params=["flux", "sd3", *PIPELINES])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(request.param, tmp_path_factory.mktemp(request.param))


def latents_of(ours: DenoisePipeline, request: DiffusionRequest, conditioning: Any) -> torch.Tensor:
    state = ours.start_request(request, conditioning)
    while not state.done:
        ours.step([state])
    return state.latents


@pytest.mark.drawn(2)
def test_latents_are_those_of_the_values_that_gguf_py_reads(packed: Packed, make_request: Any) -> None:
    request = make_request(guidance_scale=0.0 if packed.architecture == "lumina2" else 1.0)
    conditioning, (expected, _) = packed.run(request)
    ours = packed.pipeline("exact")
    found = latents_of(ours, request, conditioning)
    assert (found - expected).abs().max() <= 3e-5 * max(1.0, float(expected.abs().max()))
    assert sum(isinstance(layer, _PackedLayer) for layer in ours.denoiser.modules()) == len(
        packed.component.block_types
    )
    assert ours.denoiser.dtype == torch.float32


@pytest.mark.drawn(2)
def test_int8_products_are_near(packed: Packed, make_request: Any) -> None:
    request = make_request(guidance_scale=0.0 if packed.architecture == "lumina2" else 1.0)
    conditioning, (expected, _) = packed.run(request)
    found = latents_of(packed.pipeline("fast"), request, conditioning)
    assert 0 < (found - expected).norm() / expected.norm() < 0.1


def test_the_bytes_are_those_of_the_file(packed: Packed) -> None:
    stored = sum(packed.component.tensors[name].nbytes for name in packed.component.block_types)
    assert stored == packed_bytes(packed.file)
    module = packed.build("fast")
    assert stored == sum(one.nbytes for one in module.parameters() if one.dtype == torch.uint8)
    wide = sum(one.nbytes for one in packed.stock.parameters())
    assert sum(one.nbytes for one in module.parameters()) < wide / 2


@pytest.mark.drawn(2)
@pytest.mark.parametrize("arithmetic", ["fast", "exact"])
def test_a_request_has_the_same_bits_in_any_batch(packed: Packed, make_request: Any, arithmetic: Arithmetic) -> None:
    ours = packed.pipeline(arithmetic)
    requests = [make_request(request_id=f"r{n}", seed=n, num_inference_steps=2 + n % 2) for n in range(3)]
    conditioning, _ = packed.run(requests[0])
    alone = {one.request_id: ours.generate(one, conditioning) for one in requests}
    engine = DiffusionEngine(ours)
    for one in requests:
        engine.add_request(ConditionedRequest(one, conditioning))
    found = {}
    while engine.has_work:
        found |= {output.request_id: output.images for output in engine.step() if output.is_last}
    assert found.keys() == alone.keys()
    assert all(np.array_equal(found[name], alone[name]) for name in alone)


def test_loras_and_blank_modules(packed: Packed) -> None:
    """A LoRA is added beside a packed layer, in the type of the others; a module without weights knows that type."""
    module = packed.build("exact")
    name = next(iter(packed.component.block_types)).removesuffix(".weight")
    layer = module.get_submodule(name)
    pair = LoraPair(torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2), 0.5)
    (fitted,) = fit_pairs(module, {name: pair}).values()
    assert fitted.down.dtype == torch.float32
    blank = blank_module(packed.component, packed.pair.folder / "transformer")
    assert blank.dtype == module.dtype
    assert torch.equal(torch.cat(list(layer.weight_tiles())), packed.stock.get_submodule(name).weight)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("packed", ["sd3", *PIPELINES], indirect=True)
def test_latents_are_those_of_diffusers_own_gguf(packed: Packed, make_request: Any) -> None:
    """But for its unpacking, which rounds to half precision. Of Flux, diffusers reads the size of FLUX.1 alone."""
    cls = type(packed.stock)
    config = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    stock = cls.from_single_file(
        str(packed.file), config=str(packed.pair.folder), subfolder="transformer", quantization_config=config,
        torch_dtype=torch.float32,
    )  # fmt: skip
    request = make_request(guidance_scale=0.0 if packed.architecture == "lumina2" else 1.0)
    before = packed.pair.stock.transformer
    packed.pair.stock.transformer = stock
    try:
        conditioning, (expected, _) = packed.run(request)
    finally:
        packed.pair.stock.transformer = before
    found = latents_of(packed.pipeline("exact"), request, conditioning)
    assert (found - expected).norm() / expected.norm() < 2e-3
