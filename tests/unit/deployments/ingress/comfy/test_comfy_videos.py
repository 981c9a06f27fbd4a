"""Videos of workflows through the ingress: uploaded, made by a worker, saved, and seen by /history and /view."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from unit.deployments.ingress.comfy.comfy_fakes import Comfy, comfy_over
from unit.deployments.ingress.http_fakes import STATUSES, SWITCH, Replicas

from cluster.jobs.owner import JobOwner
from deployments.engines.records.clip_files import encode_video
from deployments.records import ClipRequest, ClipResult, ImageProgress

pytestmark = pytest.mark.usefixtures("quick_jobs")
SIZE = {"width": 32, "height": 16, "length": 5, "batch_size": 1}


class Filming(Replicas):
    """Replicas with a Wan, whose frames are as bright as their number."""

    def __init__(self) -> None:
        super().__init__()
        self.states["wan"] = replace(STATUSES["flux"], id="wan", class_name="WanPipeline")

    async def on_stream_clip(self, request: ClipRequest) -> AsyncIterator[ImageProgress | ClipResult]:
        self._arrived(request)
        yield ImageProgress(1, 2)
        shape = (request.num_frames or 0, request.height or 0, request.width or 0, 3)
        frames = np.broadcast_to((40 * np.arange(shape[0], dtype=np.uint8))[:, None, None, None], shape)
        sizes = (shape[0], 16.0, shape[2], shape[1])
        yield ClipResult("wan", b"", "video/mp4", *sizes, request.seed, 2, {}, SWITCH, frames=frames.copy())


def film() -> dict[str, Any]:
    steps = {"seed": 5, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": ["1", 0], "positive": ["4", 0], "negative": ["4", 0], "latent_image": ["5", 0]}
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "wan", "weight_dtype": "default"}},
        "2": {"class_type": "CLIPLoader", "inputs": {"clip_name": "wan", "type": "wan"}},
        "3": {"class_type": "VAELoader", "inputs": {"vae_name": "wan"}},
        "4": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat", "clip": ["2", 0]}},
        "5": {"class_type": "EmptyHunyuanLatentVideo", "inputs": SIZE},
        "6": {"class_type": "KSampler", "inputs": steps | links},
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["3", 0]}},
        "8": {"class_type": "CreateVideo", "inputs": {"images": ["7", 0], "fps": 16.0}},
        "9": {"class_type": "SaveVideo", "inputs": {"video": ["8", 0], "filename_prefix": "video/cat"}},
    }


async def test_a_video_is_made_saved_and_read_again(owner: JobOwner, tmp_path: Path) -> None:
    replicas = Filming()
    async with comfy_over(replicas, owner, tmp_path / "files") as comfy:
        entry = await comfy.ended(await comfy.begin(film()))
        assert entry["status"]["status_str"] == "success", entry["status"]
        [request] = replicas.requests
        assert (request.output, request.num_frames, request.sampler.noise_seed) == ("frames", 5, 5)
        [file] = entry["outputs"]["9"]["images"]
        assert file == {"filename": "cat_00001_.mp4", "subfolder": "video", "type": "output"}
        assert entry["outputs"]["9"]["animated"] == [True]
        answer = await comfy.http.get("/view", params=file)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
        with av.open(io.BytesIO(answer.content)) as video:
            means = [frame.to_ndarray(format="rgb24").mean() for frame in video.decode(video=0)]
        assert means == pytest.approx([0, 40, 80, 120, 160], abs=6)
        again = await reread(comfy, answer.content)
        assert again == pytest.approx(120, abs=6)


async def reread(comfy: Comfy, content: bytes) -> float:
    """Return the mean of the fourth frame of a video that was uploaded."""
    sent = await comfy.http.post("/upload/image", files={"image": ("cat.mp4", content)})
    assert sent.json() == {"name": "cat.mp4", "subfolder": "", "type": "input"}
    workflow = {
        "1": {"class_type": "LoadVideo", "inputs": {"file": "cat.mp4"}},
        "2": {"class_type": "GetVideoComponents", "inputs": {"video": ["1", 0]}},
        "3": {"class_type": "ImageFromBatch", "inputs": {"image": ["2", 0], "batch_index": 3, "length": 1}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "one"}},
    }
    entry = await comfy.ended(await comfy.begin(workflow))
    [file] = entry["outputs"]["4"]["images"]
    return float(np.asarray(await comfy.image(file)).mean())


async def test_what_is_no_video_is_refused_by_the_node(comfy: Comfy) -> None:
    film_file = encode_video(np.zeros((2, 16, 16, 3), np.uint8), 8, "webm")
    torn = await comfy.http.post("/upload/image", files={"image": ("a.webm", film_file[:300])})
    assert torn.status_code == 400, torn.text
    workflow = film()
    for node, name in (("1", "unet_name"), ("2", "clip_name"), ("3", "vae_name")):
        workflow[node]["inputs"][name] = "flux"
    refused = await comfy.http.post("/prompt", json={"prompt": workflow})
    assert refused.status_code == 400
    [found] = refused.json()["node_errors"].values()
    assert "a FluxPipeline makes images here" in found["errors"][0]["message"]
