"""Each file of the tables of adapters: what registers has an effect on a request, the rest is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.tiny.pipelines import make
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.reader_pairs import ReaderPair

from deployments.engines.records.protocol import AdapterUse, DiffusionRequest
from deployments.engines.servable import why_unservable
from infra.supported.adapters import DENOISERS, KINDS, LAYOUTS, file_of, form_of
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase
from weights.operations.adapters import load_adapter


def first_step(pipeline: Any, request: Any, conditioning: Any, adapters: Any) -> torch.Tensor:
    state = pipeline.start_request(request, conditioning, adapters)
    pipeline.step([state])
    return state.latents


def check_file(
    row: str, pipeline: Any, class_name: str, folder: Path, file: Path, make_request: Any, conditioning: Any
) -> None:
    denoiser = next(one for one in DENOISERS if one.pipeline == class_name)
    tensors = file_of(denoiser, pipeline.denoiser, *form_of(row))
    save_file(tensors, file)
    parts = {part.name: part for part in read_checkpoint(folder).components}
    base = AdapterBase("base", "diffusion", class_name, folder, parts)
    if refusal := why_unservable(read_checkpoint(file), (base,)):
        assert str(file) in refusal
        assert any(name in refusal for name in tensors), "it names the tensor"
        return
    used = make_request(adapters=(AdapterUse("style", 0.8),))
    found = first_step(pipeline, used, conditioning(used), {"style": load_adapter(file)})
    assert found.isfinite().all()
    plain = make_request()
    assert not torch.equal(found, first_step(pipeline, plain, conditioning(plain), None))


@pytest.mark.drawn(8)
@pytest.mark.parametrize("row", [*LAYOUTS, *KINDS])
def test_what_registers_answers_a_request(
    pair: Any, row: str, make_request: Callable[..., Any], tmp_path: Path
) -> None:
    check_file(
        row,
        pair.ours,
        pair.ours.family.class_name,
        pair.folder,
        tmp_path / "style.safetensors",
        lambda **more: make_request(guidance_scale=2.0, **more),
        lambda request: pair.conditioning(negative=True),
    )


READERS = ["QwenImagePipeline", "ZImagePipeline", "Flux2KleinPipeline"]


@pytest.fixture(scope="module", params=READERS)
def reader_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReaderPair:
    folder = tmp_path_factory.mktemp("pair")
    return ReaderPair(make(request.param, folder), folder)


@pytest.mark.drawn
@pytest.mark.parametrize("row", [*LAYOUTS, *KINDS])
def test_the_same_beside_prompts_that_a_language_model_reads(reader_pair: ReaderPair, row: str, tmp_path: Path) -> None:
    sizes = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 7, "guidance_scale": 2.0}
    check_file(
        row,
        reader_pair.ours,
        reader_pair.class_name,
        reader_pair.folder,
        tmp_path / "style.safetensors",
        lambda **more: DiffusionRequest("r", **sizes, **more),
        lambda request: reader_pair.conditioning(request, "make it blue", None),
    )
