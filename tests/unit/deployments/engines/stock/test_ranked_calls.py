"""Calls of stock pipelines' denoisers on several ranks, beside the same calls on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.tiny.pipelines import saved
from kit.tiny.requests import case_of, request_to
from torch import nn
from unit.deployments.engines.stock.test_stock_pipelines import load

from deployments.engines.diffusion.shared_sequence import SHARED_CLASSES
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

PAIR = RankLayout(cfg=2)
# A pipeline of each class of denoisers whose calls ranks divide.
GUIDED = {
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
    "I2VGenXLUNet": "I2VGenXLPipeline",
    "Kandinsky3UNet": "Kandinsky3Pipeline",
    "Kandinsky5Transformer3DModel": "Kandinsky5I2VPipeline",
    "Krea2Transformer2DModel": "Krea2Pipeline",
    "LTXVideoTransformer3DModel": "LTXConditionPipeline",
    "LatteTransformer3DModel": "LattePipeline",
    "LongCatAudioDiTTransformer": "LongCatAudioDiTPipeline",
    "Lumina2Transformer2DModel": "Lumina2Pipeline",
    "LuminaNextDiT2DModel": "LuminaPipeline",
    "MochiTransformer3DModel": "MochiPipeline",
    "MotifVideoTransformer3DModel": "MotifVideoPipeline",
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
    "UNetSpatioTemporalConditionModel": "StableVideoDiffusionPipeline",
    "WanTransformer3DModel": "LucyEditPipeline",
    "WanVACETransformer3DModel": "WanVACEPipeline",
}
SHARED = ("WanPipeline", "LTXPipeline", "ChronoEditPipeline", "FluxControlPipeline", "Flux2KleinPipeline")
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
        assert (type(output), output[0].shape) == (type(expected), expected[0].shape)
        found.append(float((output[0] - expected[0]).abs().max() / expected[0].abs().max()))
        return output

    monkeypatch.setattr(LeadingCalls, "run", compared)
    return found


def made_on(layout: RankLayout, class_name: str, folder: Path) -> tuple[Any, dict[Any, int]]:
    """Return the result of a tiny pipeline of that class, and the bytes that rank 0 has sent, by axis."""
    pipeline = saved(case_of(class_name)[0], folder)
    request = request_to(class_name, pipeline)
    if "num_inference_steps" in request.fields:
        request.fields["num_inference_steps"] = STEPS  # type: ignore[index]
    models = [load(folder) for _ in range(layout.size)]

    def rank_of(group: RankGroup) -> Any:
        modules = {name: one for name, one in models[group.rank].modules.items() if name in DENOISERS}
        if group.rank:
            return follow(group, {name: CallsFollower(group, module) for name, module in modules.items()})
        engine = StockEngine(models[0], ranks={name: RankChannel(group, name) for name in modules})
        engine.add_request(request)
        outputs: list[Any] = []
        while engine.has_work:
            outputs = engine.step()
            for error in engine.failures.values():
                raise error
        group.close()
        return outputs[-1], dict(group.sent_bytes)

    return run_ranks(layout, rank_of)[0]


def test_each_class_whose_calls_are_divided_is_judged() -> None:
    assert GUIDED.keys() == DIVIDED_CLASSES | REPEATED_CLASSES
    assert not DIVIDED_CLASSES & REPEATED_CLASSES


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", GUIDED)
def test_guidance_on_two_ranks_is_that_of_one(kind: str, tmp_path: Path, differences: list[float]) -> None:
    """A call of its own for each branch has the bits of one rank; rows of one call are other products of a library."""
    _, sent = made_on(PAIR, GUIDED[kind], tmp_path)
    assert max(differences) <= (0 if kind in REPEATED_CLASSES else 1e-5)
    assert sent["cfg"] > 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", SHARED)
@pytest.mark.parametrize("layout", [RankLayout(sequence=2), RankLayout(cfg=2, sequence=2)])
def test_tokens_of_a_call_are_shared(
    layout: RankLayout, class_name: str, tmp_path: Path, differences: list[float]
) -> None:
    _, sent = made_on(layout, class_name, tmp_path)
    assert max(differences) <= 1e-5
    assert sent["sequence"] > 0


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
