"""IP-Adapters on pipelines that diffusers runs: what `load_ip_adapter` makes of them, for one request alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from kit.tiny.pipelines import PIPELINES, saved
from kit.tiny.requests import case_of, request_to
from PIL import Image
from unit.deployments.engines.diffusion.ip_adapter_files import Kind, opened, write_ip_adapter
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, hooks_of, load, one_thread, run, split

from deployments.engines.records.protocol import EngineError, ImagePromptUse, StockRequest
from deployments.engines.servable import why_unservable
from deployments.engines.stock.engine import StockEngine
from infra.supported.adapters import prompted_classes
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase

__all__ = ["one_thread"]

pytestmark = pytest.mark.slow  # imports diffusers

# Without guidance, and with rows of a third kind beside it.
SEVERAL = ("LatentConsistencyModelPipeline", "StableDiffusionPAGPipeline")
USES = {"a": 0.7, "b": 0.4}


def picture(height: int, width: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def base_of(folder: Path, class_name: str) -> AdapterBase:
    parts = {
        part.name: SimpleNamespace(tensors=part.tensors, format=part.format)
        for part in read_checkpoint(folder).components
    }
    return AdapterBase("base", "diffusion", class_name, folder, parts)


def check_prompted(class_name: str, kinds: tuple[Kind, ...], tmp_path: Path, num_images: int = 1) -> None:
    stock = saved(case_of(class_name)[0], tmp_path / "model")
    uses = [ImagePromptUse(name, picture(40, 50), scale) for (name, scale), _ in zip(USES.items(), kinds, strict=False)]
    folders = {
        use.name: write_ip_adapter(tmp_path / use.name, stock.unet, kind) for use, kind in zip(uses, kinds, strict=True)
    }
    for folder in folders.values():
        if folder != folders["a"]:  # stock has one encoder for all
            shutil.copytree(folders["a"] / "image_encoder", folder / "image_encoder", dirs_exist_ok=True)
        assert why_unservable(read_checkpoint(folder), (base_of(tmp_path / "model", class_name),)) is None
    engine = StockEngine(load(tmp_path / "model"))
    asked = replace(request_to(class_name, stock), num_images=num_images)
    prompters = {name: opened(folder) for name, folder in folders.items()}
    prompted_by = replace(asked, image_prompts=tuple(uses), prompters=prompters)
    plain, prompted, again = (run(engine, one)[0].images.astype(int) for one in (asked, prompted_by, asked))
    np.testing.assert_array_equal(plain, again)
    assert hooks_of(engine.model) == 0
    stock.load_ip_adapter(
        [str(folder) for folder in folders.values()],
        subfolder="",
        weight_name=["ip-adapter.safetensors"] * len(folders),
    )
    stock.set_ip_adapter_scale([use.scale for use in uses])
    given = engine.inputs.arguments_of(asked)
    made = stock(**given, ip_adapter_image=[Image.fromarray(use.image) for use in uses]).images
    assert np.abs(prompted - (made * 255).round()).max() <= 1
    assert np.abs(prompted - plain).max() > 1


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", prompted_classes())
def test_an_image_as_a_prompt_makes_what_diffusers_makes_of_it(class_name: str, tmp_path: Path) -> None:
    check_prompted(class_name, ("plain",), tmp_path)


@pytest.mark.drawn(over="class_name")
@pytest.mark.parametrize("kinds", [("plus",), ("full", "plain")], ids=" and ".join)
@pytest.mark.parametrize("class_name", SEVERAL)
def test_so_do_other_kinds_and_several_of_them(class_name: str, kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    check_prompted(class_name, kinds, tmp_path, num_images=2)


@pytest.fixture(scope="module")
def lcm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("lcm")
    return saved(PIPELINES["LatentConsistencyModelPipeline"][0], folder / "model"), folder


def test_requests_with_and_without_it_take_turns_within_a_forward(lcm: Any) -> None:
    stock, folder = lcm
    prompters = {"a": opened(write_ip_adapter(folder / "a", stock.unet))}
    model, rest = (
        load(folder / "model"),
        split("LatentConsistencyModelPipeline", PIPELINES["LatentConsistencyModelPipeline"][1]),
    )
    image = picture(32, 32)
    requests = [
        StockRequest(
            f"r{scale}",
            7,
            PROMPT,
            **rest,
            image_prompts=(ImagePromptUse("a", image, scale),) * (scale > 0),
            prompters=prompters,
        )
        for scale in (0.0, 0.5, 1.0)
    ]
    alone = {one.request_id: run(StockEngine(model), one)[0].images for one in requests}
    engines = [StockEngine(model) for _ in requests]
    for engine, one in zip(engines, requests, strict=True):
        engine.add_request(one)
    found: dict[str, Any] = {}
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                found |= {output.request_id: output.images for output in engine.step() if output.is_last}
                assert not engine.failures
    for name, images in alone.items():
        np.testing.assert_array_equal(found[name], images)
    assert len({images.tobytes() for images in alone.values()}) == len(requests)


def test_what_does_not_fit_is_a_refusal(lcm: Any, tmp_path: Path) -> None:
    stock, folder = lcm
    engine = StockEngine(load(folder / "model"))
    rest = split("LatentConsistencyModelPipeline", PIPELINES["LatentConsistencyModelPipeline"][1])
    request = StockRequest("r", 7, PROMPT, **rest, image_prompts=(ImagePromptUse("a", picture(8, 8)),))
    with pytest.raises(EngineError, match="'a' is no known IP-Adapter"):
        run(engine, request)
    assert not any(part._forward_hooks for part in engine.model.modules["unet"].modules())
    other = saved(PIPELINES["PixArtSigmaPipeline"][0], tmp_path / "other")
    written = write_ip_adapter(tmp_path / "b", stock.unet)
    base = base_of(tmp_path / "other", type(other).__name__)
    assert "an IP-Adapter, and none are served with 'base', PixArtSigmaPipeline" in (
        why_unservable(read_checkpoint(written), (base,)) or ""
    )
