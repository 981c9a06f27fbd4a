"""IP-Adapters from a config and from HTTP: stored, checked, leased, and at work in an image."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from PIL import Image
from unit.deployments.engines.diffusion.ip_adapter_files import Kind, write_ip_adapter
from unit.deployments.ingress.http_fakes import CONFIG, STATUSES, Replicas, client_over
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.directory import ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from configs.model import AdapterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.local import LocalModels
from deployments.preflight import check_config
from deployments.records import ImagePromptUse, ImageRequest
from deployments.records.errors import InvalidRequest, UnknownModel

pytestmark = pytest.mark.slow  # imports diffusers
MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
SDXL = "digits-sdxl"


def image_of(height: int, width: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def stock() -> Any:
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def config_of(folder: Path, style: Path) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "store": {"path": str(folder / "store")},
            "models": [{"id": SDXL, "path": str(MODELS / SDXL), "dtype": "float32"}],
            "adapters": [{"id": "style", "path": str(style), "base": [SDXL], "dtype": "float32"}],
        }
    )


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["plain", "plus", "full"])
def test_a_configured_adapter_gives_the_images_of_diffusers(stock: Any, tmp_path: Path, kind: Kind) -> None:
    style = write_ip_adapter(tmp_path / "style", stock.unet, kind)
    models, image = LocalModels(config_of(tmp_path, style)), image_of(50, 30)
    asked = {"prompt": "a handwritten five", "num_inference_steps": 3, "guidance_scale": 3.0, "width": 32, "height": 32}
    use = ImagePromptUse(name="style", image=image, scale=0.6)
    result = models.generate(ImageRequest(model=SDXL, seed=7, ip_adapter=(use,), **asked))
    assert "style" in result.switch.built
    plain = models.generate(ImageRequest(model=SDXL, seed=7, **asked))
    stock.load_ip_adapter(str(style), subfolder="", weight_name="ip-adapter.safetensors")
    stock.set_ip_adapter_scale(0.6)
    generator = torch.Generator().manual_seed(7)
    [expected] = stock(**asked, ip_adapter_image=Image.fromarray(image), generator=generator).images
    assert np.abs(result.images[0].astype(int) - np.asarray(expected)).max() <= 1
    assert np.abs(result.images[0].astype(int) - plain.images[0]).max() > 4
    with pytest.raises(UnknownModel, match=r"no IP-Adapter 'other' for 'digits-sdxl' \(known: style\)"):
        models.generate(ImageRequest(model=SDXL, ip_adapter=(ImagePromptUse(name="other", image=image),), prompt="x"))


def test_a_model_of_another_kind_is_no_base(stock: Any, tmp_path: Path) -> None:
    style = write_ip_adapter(tmp_path / "style", stock.unet)
    file = tmp_path / "c.yaml"
    flux = MODELS / "digits-flux"
    file.write_text(
        f"models: [{{id: flux, path: {flux}}}]\nadapters: [{{id: style, path: {style}, base: [flux]}}]\n"
        f"store: {{path: {tmp_path / 'store'}}}\n"
    )
    _, _, problems = check_config(file)
    assert [problem.key for problem in problems] == ["adapters.0.base.0"]
    assert "an IP-Adapter that is for a UNet, and 'flux' is one of Flux" in problems[0].text
    alone = style / "ip-adapter.safetensors"
    file.write_text(file.read_text().replace(f"path: {style}", f"path: {alone}"))
    _, _, problems = check_config(file)
    assert f"{alone}: an IP-Adapter's file: name its folder" in problems[0].text
    file.write_text(f"models: [{{id: style, path: {style}}}]\nstore: {{path: {tmp_path / 'store'}}}\n")
    _, _, problems = check_config(file)
    assert "IP-Adapter, no model: an adapter, with its models as base" in problems[0].text


async def test_bodies_of_http_bring_the_image(tmp_path: Path) -> None:
    replicas = Replicas()
    entry = AdapterConfig.model_validate({"id": "style", "path": "/s", "base": ["flux"]})
    replicas.states["flux"] = replace(STATUSES["flux"], class_name="StableDiffusionXLPipeline")
    replicas.states["other-flux"] = replace(STATUSES["other-flux"], class_name="QwenImagePipeline")
    replicas.states["style"] = ModelRecord("style", "ready", "ip_adapter", 1, "version of style", entry=entry)
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    app = create_http_app(Service(CONFIG, watch, handle, handle), CONFIG)
    Image.fromarray(pixels := image_of(20, 30)).save(buffer := io.BytesIO(), "png")
    use = {"name": "style", "image": base64.b64encode(buffer.getvalue()).decode(), "scale": 0.5}
    async with client_over(app) as http:

        async def ask(**more: Any) -> httpx.Response:
            return await http.post("/v1/images/generations", json={"model": "flux", "prompt": "x", **more})

        assert (await ask(ip_adapter=[use])).status_code == 200
        form = {"model": "flux", "prompt": "x", "ip_adapter": json.dumps([use]), "strength": "0.5"}
        edited = await http.post("/v1/images/edits", data=form, files={"image": buffer.getvalue()})
        assert edited.status_code == 200, edited.text
        for request in replicas.requests:
            [found] = request.ip_adapter
            assert (found.name, found.scale) == ("style", 0.5)
            assert np.array_equal(found.image, pixels)
            assert request.adapter_versions == {"style": "version of style"}
        for more, words in (
            ({"ip_adapter": [use | {"name": "nobody"}]}, "no IP-Adapter 'nobody' for 'flux' (known: torn, style)"),
            ({"ip_adapter": [use | {"image": "eA=="}]}, "ip_adapter.0.image"),
            ({"ip_adapter": [use] * 99}, "at most"),
            ({"lora": [{"name": "style"}]}, "no adapter 'style'"),
            ({"model": "other-flux", "ip_adapter": [use]}, "no IP-Adapters are served with QwenImagePipeline"),
        ):
            refused = await ask(**more)
            assert refused.status_code in (400, 404)
            assert words in refused.json()["error"]["message"]
    watch.close()


def test_diffusers_own_pipelines_take_none(tmp_path: Path) -> None:
    from configs.model import GenerationDefaults
    from deployments.requests.defaults import with_image_defaults

    use = ImagePromptUse(name="style", image=image_of(8, 8))
    request = ImageRequest(model="m", prompt="x", ip_adapter=(use,))
    with pytest.raises(InvalidRequest, match="ip_adapter: diffusers' own code runs a KandinskyPipeline"):
        with_image_defaults(request, GenerationDefaults(), "KandinskyPipeline")
