"""Each file of the tables of adapters, for pipelines that diffusers runs: what registers has an effect on a request,
the rest is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.tiny.classes import CASES, assembled
from kit.tiny.clips import VIDEOS
from kit.tiny.pipelines import PIPELINES, saved
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.test_adapter_tables import READERS
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, load, one_thread, run, split

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.records.protocol import AdapterUse, StockRequest
from deployments.engines.servable import why_unservable
from deployments.engines.stock.engine import StockEngine
from infra.supported.adapters import DENOISERS, KINDS, LAYOUTS, Denoiser, file_of, form_of
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase
from weights.operations.adapters import load_adapter

__all__ = ["one_thread"]

pytestmark = pytest.mark.slow  # imports diffusers
STOCK = [denoiser for denoiser in DENOISERS if denoiser.pipeline not in FAMILIES]


class Served(NamedTuple):
    """A pipeline with what a request to it needs, and what it makes without an adapter."""

    denoiser: Denoiser
    engine: StockEngine
    base: AdapterBase
    options: dict[str, Any]
    plain: np.ndarray

    def made(self, **more: Any) -> np.ndarray:
        request = StockRequest("r", 3, PROMPT, **split(self.denoiser.pipeline, self.options), **more)
        found: np.ndarray = run(self.engine, request)[0].images
        return found


def builder_of(class_name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    if class_name in CASES:
        return lambda: assembled(class_name, **CASES[class_name].parts()), dict(CASES[class_name].options)
    return (PIPELINES | VIDEOS)[class_name]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    made: dict[str, Served] = {}

    def served_of(title: str) -> Served:
        if title not in made:
            denoiser = next(one for one in STOCK if one.title == title)
            build, options = builder_of(denoiser.pipeline)
            folder = tmp_path_factory.mktemp("model")
            saved(build, folder)
            parts: dict[str, Any] = {
                part.name: SimpleNamespace(
                    name=part.name, library=part.library, class_name=part.class_name, tensors=part.tensors
                )
                for part in read_checkpoint(folder).components
            }
            base = AdapterBase("base", "diffusion", denoiser.pipeline, folder, parts)
            one = Served(denoiser, StockEngine(load(folder)), base, options, np.zeros(0))
            made[title] = one._replace(plain=one.made())
        return made[title]

    return served_of


@pytest.mark.drawn(4)
@pytest.mark.parametrize("row", [*LAYOUTS, *KINDS])
@pytest.mark.parametrize("title", [denoiser.title for denoiser in STOCK])
def test_what_registers_answers_a_request(
    served: Callable[[str], Served], title: str, row: str, tmp_path: Path
) -> None:
    one = served(title)
    module = one.engine.model.modules["transformer"]
    tensors = file_of(one.denoiser, module, *form_of(row))
    if not tensors:  # the names of its own code are not known, and the table says so
        return
    file = tmp_path / "style.safetensors"
    save_file({name: tensor * 4 if tensor.numel() > 1 else tensor for name, tensor in tensors.items()}, file)
    if refusal := why_unservable(read_checkpoint(file), (one.base,)):
        assert str(file) in refusal
        assert any(name in refusal for name in tensors), "it names the tensor"
        return
    loras = {"style": load_adapter(file)}
    # What a layer far from the image adds may be rounded off of a tiny one.
    made = (one.made(adapters=(AdapterUse("style", strength),), loras=loras) for strength in (1.0, 30.0, 300.0))
    assert any((found != one.plain).any() for found in made)
    np.testing.assert_array_equal(one.made(), one.plain)


def test_these_tests_try_every_column_of_the_table() -> None:
    with_fixtures = {"StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline"}
    tried = with_fixtures | {*READERS} | {denoiser.pipeline for denoiser in STOCK}
    assert tried == {denoiser.pipeline for denoiser in DENOISERS}
    assert torch.get_num_threads() == 1
