"""Classes of diffusers with tiny random weights, through the stock engine: what they make is what diffusers makes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.tiny.pipelines import saved
from kit.tiny.requests import BUILDERS, CASES, DERIVED, MENDED, case_of, request_to
from unit.deployments.engines.stock.test_stock_pipelines import load, run

from deployments.cli.models import read_table
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.records.protocol import StockRequest
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.known import OUTPUTS
from deployments.engines.stock.loading import StockModel
from deployments.engines.stock.text_parts import text_parts
from deployments.engines.stock.texts import CalledEncoders, TextPlanner, weightless_modules
from deployments.modules.stock_parts import is_stock_text, with_stock_parts
from infra.supported.page import table
from infra.supported.pipelines import COMPARED, Row, rows
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def as_pil(pixels: Any) -> Any:
    return [as_pil(one) for one in pixels] if isinstance(pixels, tuple) else PIL.Image.fromarray(pixels)


@functools.cache
def rows_by_name() -> dict[str, Row]:
    return {row.class_name: row for row in rows()}


def made(output: Any, makes: Any) -> np.ndarray:
    """Return the output of diffusers, as the engine rounds it: the images, the frames or the samples."""
    found = next(output[name] for name in OUTPUTS[makes] if name in output)
    if makes == "audio":
        return np.asarray(found[0])
    pixels = np.asarray(found[0])[..., :3] if makes == "video" else np.asarray(found)
    return pixels if pixels.dtype == np.uint8 else (pixels * 255).round().astype(np.uint8)


def test_the_table_is_the_one_that_is_printed() -> None:
    assert list(table()) == read_table()


def test_all_that_the_table_calls_compared_is() -> None:
    assert sorted({*BUILDERS, *DERIVED, *CASES} - FAMILIES.keys()) == list(COMPARED)


@pytest.mark.parametrize("class_name", COMPARED)
def test_a_class_makes_what_diffusers_makes(class_name: str, tmp_path: Path) -> None:
    row = rows_by_name()[class_name]
    assert row.how.startswith("in turns")
    build, options, _ = case_of(class_name)
    pipeline = saved(build, tmp_path)
    MENDED.get(class_name, id)(pipeline)
    request = request_to(class_name, pipeline)
    output, turns = run(StockEngine(load(tmp_path)), request)
    given = {name: as_pil(pixels) for name, pixels in request.images.items()}
    given |= {name: torch.from_numpy(one.samples)[None] for name, one in request.audio.items()}
    takes = inspect.signature(pipeline.__call__).parameters
    usual = {"prompt": "a cat", "output_type": "np", "generator": torch.Generator("cpu").manual_seed(5)}
    usual = {name: value for name, value in {**usual, **request.fields}.items() if name in takes}
    torch.manual_seed(5)  # for what a pipeline draws without the generator
    expected = made(pipeline(**{**usual, **options, **given}), row.makes)
    found = output.samples if row.makes == "audio" else output.images
    rounding = 1e-6 if row.makes == "audio" else 0  # weights that are stored as a direction and a norm
    np.testing.assert_allclose(np.squeeze(found), np.squeeze(expected.astype(found.dtype)), rtol=0, atol=rounding)
    assert turns > 1
    if text_parts(class_name):
        again = run_apart(tmp_path, request)
        np.testing.assert_array_equal(again.samples if row.makes == "audio" else again.images, found)


def run_apart(folder: Path, request: StockRequest) -> Any:
    """Run a request whose texts are encoded where nothing else has weights; returns its last output."""
    store, model = WeightStore(folder / "store"), load(folder)
    manifest = with_stock_parts(externalize(store, "m", folder, dtype="float32"))
    class_name, skeleton, parts = manifest.class_name or "", store.skeleton(manifest), manifest.components
    texts = {name: model.modules[name] for name, part in parts.items() if is_stock_text(part)}
    assert texts.keys() <= text_parts(class_name)
    blank = weightless_modules({name: parts[name] for name in model.modules}, skeleton, torch.device("cpu"))
    planner = TextPlanner(StockModel(class_name, skeleton, blank))
    encoders = CalledEncoders(class_name, skeleton, texts, parts, torch.device("cpu"))
    found: dict[str, Any] = {}
    while (call := planner.next_text(request, found)) is not None:
        found[call.key] = encoders.encode(call.arguments)
    assert found
    others = {name: module for name, module in model.modules.items() if name not in texts}
    blank = {name: planner.model.modules[name] for name in texts}
    return run(StockEngine(planner.model.over(others, blank)), replace(request, texts=found))[0]


def test_every_class_is_served_or_says_why_not() -> None:
    found = list(rows())
    assert all(
        row.how in ("batched", "in turns", "in turns, encodes itself") or row.how.startswith("refused: ")
        for row in found
    )
    assert sum(not row.how.startswith("refused") for row in found) > 250
