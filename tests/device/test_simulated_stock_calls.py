"""Rehearsed calls of stock pipelines beside the counts of a simulated device, method by method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from kit.device_memory import peak_of
from kit.tiny.classes import CASES, assembled
from kit.tiny.clips import AUDIOS, VIDEOS
from kit.tiny.pipelines import PIPELINES, saved
from kit.tiny.requests import MENDED, case_of, request_to
from unit.deployments.engines.stock.test_stock_pipelines import NEED_IMAGES, PROMPT, load, run, split

from deployments.engines.records.protocol import StockRequest
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.footprints import METHODS, CallTwin, stretched
from deployments.engines.stock.loading import pipeline_class
from infra.supported.pipelines import COMPARED
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

pytestmark = pytest.mark.usefixtures("no_garbage")


def of_case(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    return lambda: assembled(name, **CASES[name].parts()), dict(CASES[name].options)


DIFFERENTIATED = "StableDiffusionAttendAndExcitePipeline"
MOVES = "LuminaPipeline"  # a tensor of the host, within a forward
STOCK: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **PIPELINES,
    **VIDEOS,
    **AUDIOS,
    **{name: of_case(name) for name in (DIFFERENTIATED, MOVES)},
}
UNPLANNED = {DIFFERENTIATED: {"__call__"}}  # it reads the attention that its denoiser had
UNREACHED = {DIFFERENTIATED: {"vae.decode"}}  # where the rehearsal ends before it
SEVERAL = ("AuraFlowPipeline", "CogView3PlusPipeline", "DDPMPipeline", "DanceDiffusionPipeline", "HunyuanDiTPipeline")
SECOND: dict[str, dict[str, Any]] = {  # of those that take no other size
    **{name: {} for name in (*SEVERAL, *NEED_IMAGES)},
    "DiTPipeline": {"class_labels": [7, 3]},
    "StableAudioPipeline": {"audio_end_in_s": 0.7},
    DIFFERENTIATED: {"height": 64, "width": 64, "attn_res": [16, 16]},
}
QUICK_STOCK = (
    *("PixArtSigmaPipeline", "StableDiffusionPAGPipeline", "Lumina2Pipeline", "WanPipeline"),
    *(DIFFERENTIATED, MOVES),
)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK_STOCK else pytest.mark.long) for one in STOCK]
)
def test_calls_of_stock_pipelines(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The rehearsal tells what each method takes at most: denoisers, VAEs, and encoders that run beside them."""
    build, first = STOCK[name]
    saved(build, tmp_path / name)
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, name, tmp_path / name, dtype="float32")
    twin = CallTwin(name, manifest.components, store.models / manifest.skeleton, device)
    # Its forwards are differentiated or not as ever, and simulated devices have no derivative of a convolution.
    if name == DIFFERENTIATED:
        monkeypatch.setattr(pipeline_class(name), "_update_latent", lambda self, latents, **_: latents)
    for number, options in enumerate((first, first | SECOND.get(name, {"height": 64, "width": 64}))):
        model, peaks = load(tmp_path / name), dict[str, int]()  # one keeps constants of its first call
        for part, module in model.modules.items():
            torch.nn.Module.to(module, device)
            for method in METHODS:
                if hasattr(module, method):
                    vars(module)[method] = measured_call(device, getattr(module, method), peaks, f"{part}.{method}")
        images = {"image": np.zeros((16 + 16 * number, 16, 3), np.uint8)} if name in NEED_IMAGES else {}
        num_images = 2 if number and name in SEVERAL else 1
        request = StockRequest("r", 1, PROMPT, images=images, num_images=num_images, **split(name, options))
        state = torch.get_rng_state()
        planned = twin.plan_call(request)
        assert torch.equal(torch.get_rng_state(), state)  # which is that of all calls
        run(StockEngine(model), request)
        assert twin.unplanned.keys() == UNPLANNED.get(name, set())
        assert planned.keys() == peaks.keys() - UNPLANNED.get(name, set()) - UNREACHED.get(name, set())
        for method, nbytes in planned.items():
            assert 1.0 <= nbytes / peaks[method] <= 1.01, (method, options, nbytes, peaks[method])


# Where a rehearsal ends, and why. What is not there is no part of what a class is asked for below.
EXPERTS = "HiDreamImagePipeline"  # how many tokens an expert has is of values
ENDS: dict[str, str] = {
    "AnyFlowFARPipeline": "no simulated device has its attention",
    "BriaFiboEditPipeline": "its texts are JSON, which longer ones are not",
    "Ideogram4Pipeline": "it runs the layers of its encoder itself",
    "JoyImageEditPipeline": "it reads what a layer of its encoder had",
    "JoyImageEditPlusPipeline": "it reads what a layer of its encoder had",
    "StableDiffusionAttendAndExcitePipeline": "it reads the attention that its denoiser had",
    "StableDiffusionSAGPipeline": "it reads the attention that its denoiser had",
}
QUICK_CLASSES = ("AceStepPipeline", "HunyuanImagePipeline", EXPERTS)  # they ask for values
OWN_GENERATOR = "LTXI2VLongMultiPromptPipeline"  # of the device: none of a simulated one
# A mask is counted that stock leaves out for texts without padding, and what is in circles until Python finds them.
MOST = {
    "text_encoder.forward": 1.18,
    "WanAnimatePipeline vae.encode": 1.2,
    "CogVideoXFunControlPipeline vae.decode": 1.3,
}


@pytest.mark.drawn
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one in QUICK_CLASSES else pytest.mark.long)
        for one in COMPARED
        if one not in (*ENDS, OWN_GENERATOR)
    ],
)
def test_calls_of_every_class(device: torch.device, tmp_path: Path, name: str) -> None:
    """One shape of each; the plan for many requests, whose texts are longer, is not below either."""
    pipeline = saved(case_of(name)[0], tmp_path / name)
    MENDED.get(name, id)(pipeline)
    store, request = WeightStore(tmp_path / "store"), request_to(name, pipeline)
    manifest = externalize(store, name, tmp_path / name, dtype="float32")
    twin = CallTwin(name, manifest.components, store.models / manifest.skeleton, device)
    planned, of_many = twin.plan_call(request), twin.plan_call(stretched(request))
    model, peaks = load(tmp_path / name), dict[str, int]()
    for part, module in model.modules.items():
        torch.nn.Module.to(module, device)
        for method in METHODS:
            if hasattr(module, method):
                vars(module)[method] = measured_call(device, getattr(module, method), peaks, f"{part}.{method}")
    run(StockEngine(model), request)
    unplanned = {"transformer.forward"} if name == EXPERTS else set()
    assert planned.keys() == of_many.keys() == peaks.keys() - unplanned, twin.unplanned
    for method, nbytes in planned.items():
        most = MOST.get(method, MOST.get(f"{name} {method}", 1.07))
        assert peaks[method] <= min(nbytes, of_many[method]), (method, peaks[method], nbytes, of_many[method])
        assert nbytes <= most * peaks[method], (method, nbytes / peaks[method])


def measured_call(
    device: torch.device, method: Callable[..., Any], peaks: dict[str, int], name: str
) -> Callable[..., Any]:
    """Return the method, whose peak is noted."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        found, is_differentiated = list[Any](), torch.is_grad_enabled()

        def run_it() -> None:
            with torch.set_grad_enabled(is_differentiated):
                found.append(method(*args, **kwargs))

        peaks[name] = max(peaks.get(name, 0), peak_of(device, run_it))
        return found[0]

    return call
