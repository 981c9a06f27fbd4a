"""Calls of stock pipelines' denoisers on several ranks, beside the same calls on one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.tiny.pipelines import saved
from kit.tiny.requests import case_of, request_to
from torch import nn
from unit.deployments.engines.stock.test_stock_adapters import denoiser_of, use_of, write_lora
from unit.deployments.engines.stock.test_stock_pipelines import load

from deployments.engines.diffusion.ranked_tiles import VIDEO_CLASSES, TilesFollower
from deployments.engines.diffusion.shared_sequence import SHARED_CLASSES
from deployments.engines.nn.feature_maps import Gains, MappedPair, Mixed, Turns
from deployments.engines.nn.lora import AdaptedSpan, FittedPairs, applied_adapters
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.ranks.outcomes import RankFailed
from deployments.engines.stock import ranked_calls
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.ranked_calls import (
    DENOISERS,
    DIVIDED_CLASSES,
    REPEATED_CLASSES,
    CallsFollower,
    LeadingCalls,
    computes_calls,
)
from weights.operations.adapters import LoraPair

PAIR = RankLayout(cfg=2)
# A pipeline of each class of denoisers whose calls ranks divide.
GUIDED = {
    "AnyFlowTransformer3DModel": "AnyFlowPipeline",
    "AuraFlowTransformer2DModel": "AuraFlowPipeline",
    "BriaFiboTransformer2DModel": "BriaFiboPipeline",
    "BriaTransformer2DModel": "BriaPipeline",
    "ChromaTransformer2DModel": "ChromaImg2ImgPipeline",
    "ChronoEditTransformer3DModel": "ChronoEditPipeline",
    "CogVideoXTransformer3DModel": "CogVideoXFunControlPipeline",
    "CogView3PlusTransformer2DModel": "CogView3PlusPipeline",
    "CogView4Transformer2DModel": "CogView4ControlPipeline",
    "DiTTransformer2DModel": "DiTPipeline",
    "DreamLiteUNetModel": "DreamLitePipeline",
    "ErnieImageTransformer2DModel": "ErnieImagePipeline",
    "Flux2Transformer2DModel": "Flux2KleinPipeline",
    "HeliosTransformer3DModel": "HeliosPipeline",
    "HunyuanDiT2DModel": "HunyuanDiTControlNetPipeline",
    "HunyuanVideo15Transformer3DModel": "HunyuanVideo15Pipeline",
    "HunyuanVideoFramepackTransformer3DModel": "HunyuanVideoFramepackPipeline",
    "HunyuanVideoTransformer3DModel": "HunyuanSkyreelsImageToVideoPipeline",
    "I2VGenXLUNet": "I2VGenXLPipeline",
    "JoyImageEditPlusTransformer3DModel": "JoyImageEditPlusPipeline",
    "JoyImageEditTransformer3DModel": "JoyImageEditPipeline",
    "Kandinsky3UNet": "Kandinsky3Pipeline",
    "Kandinsky5Transformer3DModel": "Kandinsky5I2VPipeline",
    "Krea2Transformer2DModel": "Krea2Pipeline",
    "LTX2VideoTransformer3DModel": "LTX2Pipeline",
    "LTXVideoTransformer3DModel": "LTXConditionPipeline",
    "LatteTransformer3DModel": "LattePipeline",
    "LongCatAudioDiTTransformer": "LongCatAudioDiTPipeline",
    "Lumina2Transformer2DModel": "Lumina2Pipeline",
    "LuminaNextDiT2DModel": "LuminaPipeline",
    "MochiTransformer3DModel": "MochiPipeline",
    "MotifVideoTransformer3DModel": "MotifVideoPipeline",
    "NucleusMoEImageTransformer2DModel": "NucleusMoEImagePipeline",
    "OvisImageTransformer2DModel": "OvisImagePipeline",
    "PRXTransformer2DModel": "PRXPipeline",
    "PixArtTransformer2DModel": "PixArtAlphaPipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "SD3Transformer2DModel": "StableDiffusion3ControlNetPipeline",
    "SanaTransformer2DModel": "SanaControlNetPipeline",
    "SanaVideoTransformer3DModel": "SanaImageToVideoPipeline",
    "SkyReelsV2Transformer3DModel": "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    "StableAudioDiTModel": "StableAudioPipeline",
    "UNet2DConditionModel": "CycleDiffusionPipeline",
    "UNet3DConditionModel": "TextToVideoSDPipeline",
    "UNetControlNetXSModel": "StableDiffusionControlNetXSPipeline",
    "UNetMotionModel": "AnimateDiffPipeline",
    "UNetSpatioTemporalConditionModel": "StableVideoDiffusionPipeline",
    "WanAnimateTransformer3DModel": "WanAnimatePipeline",
    "WanTransformer3DModel": "LucyEditPipeline",
    "WanVACETransformer3DModel": "WanVACEPipeline",
}
SHARED = (
    *("WanPipeline", "LTXPipeline", "ChronoEditPipeline", "FluxControlPipeline", "Flux2KleinPipeline"),
    *("LTX2Pipeline", "HeliosPipeline"),
)
SLOW = ("JoyImageEditPlusTransformer3DModel", "JoyImageEditTransformer3DModel")  # 15 s each
# What a request asks for beside its case: guidance, and frames of long ago that are an even number of tokens.
ASKED: dict[str, dict[str, Any]] = {
    "AnyFlowPipeline": {"negative_prompt": "dull", "guidance_scale": 4.0},
    "HeliosPipeline": {"height": 64, "width": 64},
    "HunyuanSkyreelsImageToVideoPipeline": {"negative_prompt": "dull", "guidance_scale": 4.0, "true_cfg_scale": 3.0},
    "HunyuanVideoFramepackPipeline": {"negative_prompt": "dull", "true_cfg_scale": 3.0},
    "NucleusMoEImagePipeline": {"negative_prompt": "dull", "guidance_scale": 4.0},
    "WanAnimatePipeline": {"negative_prompt": "dull", "guidance_scale": 4.0},
}
STEPS = 3  # the second one is the first whose calls can be guessed


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The greatest difference of each call of rank 0 from the same call on it alone, as a part of its largest value."""
    run, found = LeadingCalls.run, list[float]()

    def compared(self: LeadingCalls, *inputs: Any, **options: Any) -> Any:
        output, expected = run(self, *inputs, **options), self._forward(*inputs, **options)
        assert (type(output), len(output)) == (type(expected), len(expected))
        for one, other in ((output[place], expected[place]) for place in range(len(expected))):
            assert one.shape == other.shape
            found.append(float((one - other).abs().max() / other.abs().max()))
        return output

    monkeypatch.setattr(LeadingCalls, "run", compared)
    return found


def made_on(layout: RankLayout, class_name: str, folder: Path) -> tuple[Any, dict[Any, int]]:
    """Return the result of a tiny pipeline of that class, and the bytes that rank 0 has sent, by axis."""
    results, sent, _ = all_made_on(layout, class_name, folder, saved(case_of(class_name)[0], folder), [dict])
    return results[-1], sent


def all_made_on(
    layout: RankLayout, class_name: str, folder: Path, pipeline: Any, uses: list[Callable[[], Mapping[str, Any]]]
) -> tuple[list[Any], dict[Any, int], int]:
    """Return the results of the same request with other fields each time, the bytes that rank 0 has sent, by axis, and
    the number of adapters that the others still have."""
    request = request_to(class_name, pipeline)
    if "num_inference_steps" in request.fields:
        request = replace(request, fields={**request.fields, "num_inference_steps": STEPS, **ASKED.get(class_name, {})})
    models = [load(folder) for _ in range(layout.size)]

    def rank_of(group: RankGroup) -> Any:
        own = models[group.rank].modules
        modules = {name: one for name, one in own.items() if name in DENOISERS or type(one).__name__ in VIDEO_CLASSES}
        if group.rank:
            calls = {name: CallsFollower(group, module) for name, module in modules.items() if name in DENOISERS}
            tiles = {name: TilesFollower(group, module) for name, module in modules.items() if name not in calls}
            follow(group, {**calls, **tiles})
            return sum(len(one.adapters.kept) for one in calls.values())
        engine = StockEngine(models[0], ranks={name: RankChannel(group, name) for name in modules})
        results = []
        for use in uses:
            gc.collect()
            engine.add_request(replace(request, **use()))
            outputs: list[Any] = []
            while engine.has_work:
                outputs = engine.step()
                for error in engine.failures.values():
                    raise error
            results.append(outputs[-1])
        group.close()
        return results, dict(group.sent_bytes)

    (results, sent), *kept = run_ranks(layout, rank_of)
    return results, sent, sum(kept)


def test_each_class_whose_calls_are_divided_is_judged() -> None:
    assert GUIDED.keys() == DIVIDED_CLASSES | REPEATED_CLASSES
    assert not DIVIDED_CLASSES & REPEATED_CLASSES


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.long if one in SLOW else ()) for one in GUIDED])
def test_guidance_on_two_ranks_is_that_of_one(kind: str, tmp_path: Path, differences: list[float]) -> None:
    """A call of its own for each branch has the bits of one rank; rows of one call are other products of a library."""
    _, sent = made_on(PAIR, GUIDED[kind], tmp_path)
    assert max(differences) <= (0 if kind in REPEATED_CLASSES else 1e-5)
    assert sent["cfg"] > 0


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", SHARED)
@pytest.mark.parametrize("layout", [RankLayout(sequence=2), RankLayout(cfg=2, sequence=2)])
def test_tokens_of_a_call_are_shared(
    layout: RankLayout, class_name: str, tmp_path: Path, differences: list[float]
) -> None:
    _, sent = made_on(layout, class_name, tmp_path)
    assert max(differences) <= 1e-5
    assert sent["sequence"] > 0


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("class_name", "layout"),
    [
        *(("CogView4Pipeline", PAIR), ("LTXPipeline", PAIR), ("PixArtSigmaPipeline", PAIR)),
        *(("WanPipeline", RankLayout(sequence=2)), ("WanPipeline", RankLayout(cfg=2, sequence=2))),
    ],
)
def test_a_lora_is_on_all_ranks_for_its_request_alone(
    class_name: str, layout: RankLayout, tmp_path: Path, differences: list[float]
) -> None:
    """Rank 0 says it once, and the others let go of it when rank 0 does."""
    pipeline = saved(case_of(class_name)[0], tmp_path / "model")
    files = [write_lora(tmp_path / f"{name}.safetensors", pipeline, denoiser_of(pipeline)[0]) for name in "ab"]
    loras = [lambda file=file: use_of(file) for file in files]
    results, sent, num_kept = all_made_on(layout, class_name, tmp_path / "model", pipeline, [dict, *loras, dict])
    plain, first, second, last = (one.images.astype(int) for one in results)
    assert max(differences) <= (0 if layout == PAIR and class_name == "CogView4Pipeline" else 1e-5)
    assert all(sent[axis] > 0 for axis in ("cfg", "sequence") if getattr(layout, axis) > 1)
    assert (plain == last).all()
    assert all((one != other).any() for one, other in ((plain, first), (plain, second), (first, second)))
    assert num_kept == 0


def test_tokens_that_cannot_be_divided_are_computed_by_each_and_told_once(
    tmp_path: Path, differences: list[float]
) -> None:
    """Two heads are no multiple of three."""
    _, sent = made_on(RankLayout(sequence=3), "WanPipeline", tmp_path)
    assert max(differences) == 0
    assert len(differences) == 2 * STEPS
    assert sent.get("sequence", 0) == 0
    assert sent[None] < 3 * 2 * 30_000  # one call, and the end


def test_what_a_pipeline_has_changed_in_its_denoiser_is_rank_0s(tmp_path: Path, differences: list[float]) -> None:
    """It puts processors of its own in, which the other ranks have not."""
    _, sent = made_on(PAIR, "StableDiffusionPAGPipeline", tmp_path)
    assert set(differences) == {0}
    assert "cfg" not in sent


def test_a_long_video_is_decoded_by_all_ranks(tmp_path: Path) -> None:
    """Diffusers' own code decodes it in tiles."""
    name = "HunyuanVideoPipeline"
    pipeline = saved(case_of(name)[0], tmp_path)
    longer = [lambda: {"extra": {**request_to(name, pipeline).extra, "num_frames": 33}}]
    (expected,), *_ = all_made_on(RankLayout(), name, tmp_path, pipeline, longer)
    (found,), sent, _ = all_made_on(PAIR, name, tmp_path, pipeline, longer)
    assert found.images.shape == expected.images.shape == (33, *expected.images.shape[1:])
    assert (found.images == expected.images).all()
    assert sent["cfg"] > 0


class Doubled(nn.Module):
    """A denoiser whose output tells its arguments."""

    device = torch.device("cpu")

    def forward(self, hidden_states: torch.Tensor, timestep: Any = None, text: Any = None, **_: Any) -> Any:
        if text is not None and text.isnan().any():
            raise ValueError("no number")
        return (hidden_states * 2 + (0 if text is None else text),)


def led(lead: Callable[[LeadingCalls, RankGroup], Any], *kinds: frozenset[str]) -> Any:
    """Return the result of `lead` on rank 0 of two."""

    def rank_of(group: RankGroup) -> Any:
        module = Doubled()
        if group.rank:
            return follow(group, {"tiny": CallsFollower(group, module)})
        found = lead(LeadingCalls(RankChannel(group, "tiny"), module), group)
        group.close()
        return found

    return run_ranks(PAIR, rank_of)[0]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_calls, "REPEATED_CLASSES", frozenset({"Doubled"}))


def test_a_wrong_guess_is_computed_anew_and_after_three_no_more_are_made(repeated: None) -> None:
    """Here the text of the second branch is another one at each step."""

    def lead(calls: LeadingCalls, group: RankGroup) -> list[int]:
        sent = []
        for step in range(8):
            latents, timestep = torch.randn(1, 3), torch.tensor([step])
            for text in (torch.ones(3), torch.randn(3)):
                (found,) = calls.run(latents, timestep=timestep, text=text)
                assert torch.equal(found, latents * 2 + text)
            sent.append(group.sent_bytes["cfg"])
        return sent

    sent = led(lead)
    assert sent[0] == 0 < sent[1]
    assert sent[-1] == sent[-2]


def test_a_guess_is_of_what_the_arguments_were(repeated: None) -> None:
    """A pipeline may write into a tensor between the two calls."""

    def lead(calls: LeadingCalls, group: RankGroup) -> int:
        for step in range(3):
            latents, timestep = torch.randn(1, 3), torch.tensor([step])
            for text in (torch.ones(3), torch.zeros(3)):
                (found,) = calls.run(latents, timestep=timestep, text=text)
                assert torch.equal(found, latents * 2 + text)
                if step == 2:
                    latents += 1
        return group.sent_bytes["cfg"]

    assert led(lead) > 0


@pytest.mark.parametrize(
    "options",
    [{"other": object()}, {"other": {1: torch.ones(1)}}, {"other": torch.float32}, {"timestep": None}],
)
def test_calls_with_other_values_are_rank_0s(options: dict[str, Any], repeated: None) -> None:
    def lead(calls: LeadingCalls, group: RankGroup) -> int:
        for _ in range(3):
            for text in (torch.ones(3), torch.zeros(3)):
                (found,) = calls.run(torch.ones(1, 3), text=text, **options)
                assert torch.equal(found, 2 + text[None])
        return group.sent_bytes["cfg"]

    assert led(lead) == 0


def test_an_error_of_another_rank_is_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_calls, "DIVIDED_CLASSES", frozenset({"Doubled"}))

    def lead(calls: LeadingCalls, group: RankGroup) -> torch.Tensor:
        text = torch.zeros(2, 3)
        text[1] = torch.nan
        with pytest.raises(RankFailed, match="rank 1: ValueError: no number"):
            calls.run(torch.ones(2, 3), text=text)
        (found,) = calls.run(torch.ones(2, 3), text=torch.eye(2, 3))
        return found

    assert torch.equal(led(lead), 2 + torch.eye(2, 3))


class Matrix(nn.Module):
    """A denoiser of one layer."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return (self.layer(hidden_states),)


def pairs_of_each_kind() -> dict[str, LoraPair]:
    down, up, turns = torch.randn(2, 4), torch.randn(4, 2), torch.linalg.qr(torch.randn(1, 2, 2, 2)).Q
    empty = torch.empty(0, 4), torch.empty(4, 0), 0.5
    return {
        "with a bias": LoraPair(down, up, 0.5, bias=torch.randn(4)),
        "by rows": LoraPair(down, up, 0.5, magnitude=torch.rand(4) + 1),
        "by columns": LoraPair(down, up, 0.5, magnitude=torch.rand(4) + 1, by_input=True),
        "gains": MappedPair(*empty, features=Gains(torch.randn(4), of_inputs=True)),
        "turns": MappedPair(*empty, features=Turns(turns, torch.rand(4))),
        "mixed": MappedPair(down, up, 0.5, features=Mixed(torch.randn(2, 4), torch.randn(4, 2))),
    }


@pytest.mark.parametrize("kind", pairs_of_each_kind())
def test_each_kind_of_adapter_goes_to_the_other_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_calls, "DIVIDED_CLASSES", frozenset({"Matrix"}))
    module, pair, latents = Matrix(), pairs_of_each_kind()[kind], torch.randn(2, 4)
    modules = [module, copy.deepcopy(module)]

    def rank_of(group: RankGroup) -> Any:
        own = modules[group.rank]
        if group.rank:
            return follow(group, {"tiny": CallsFollower(group, own)})
        spans = [AdaptedSpan([(FittedPairs({own.layer: pair}), 0.8)])]
        with applied_adapters(spans):
            expected = own(latents)[0]
            (found,) = LeadingCalls(RankChannel(group, "tiny"), own, spans).run(latents)
        group.close()
        return found, expected

    found, expected = run_ranks(PAIR, rank_of)[0]
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, module.layer(latents))


def while_there_is_work(engine: StockEngine) -> None:
    while engine.has_work:
        engine.step()


def test_a_lost_rank_ends_the_engines_step(tmp_path: Path) -> None:
    """It is no failure of the request: whoever steps hears of it, and ends the replica."""
    folder = tmp_path
    request = request_to("LTXPipeline", saved(case_of("LTXPipeline")[0], folder))
    model = load(folder)

    def rank_of(group: RankGroup) -> None:
        if group.rank:
            return group.leave()
        engine = StockEngine(model, ranks={"transformer": RankChannel(group, "tiny")})
        engine.add_request(request)
        with pytest.raises(RankLost):
            while_there_is_work(engine)
        return None

    run_ranks(PAIR, rank_of)


def test_a_class_without_a_plan_has_no_ranks() -> None:
    assert computes_calls("WanTransformer3DModel", 2, 1)
    assert computes_calls("UNet2DConditionModel", 2, 4)
    assert not computes_calls("UNet2DConditionModel", 1, 4)
    assert not computes_calls("AllegroTransformer3DModel", 2, 4)
    assert {"WanTransformer3DModel", "LTXVideoTransformer3DModel"} <= SHARED_CLASSES
