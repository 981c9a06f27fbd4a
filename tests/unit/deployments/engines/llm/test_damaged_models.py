"""Language models in files with other numbers than they were written with: each is refused as one, or answers."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from fuzz.header_parsers import with_other_numbers
from fuzz.model_parsers import MODELS, valid_models

from deployments.engines.records.protocol import EngineError
from weights.records.errors import WeightsError

pytestmark = pytest.mark.slow
NUM_FILES = 60  # `make fuzz` tries some hundred a second


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return valid_models(tmp_path_factory.mktemp("seeds"))


@pytest.mark.drawn
@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_model_is_refused_or_answers(tmp_path: Path, inputs: dict[str, bytes], name: str) -> None:
    MODELS[name](tmp_path, inputs[name])
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for number in range(NUM_FILES):
        data = with_other_numbers(inputs[name], draw)
        try:
            with contextlib.suppress(WeightsError, EngineError):
                MODELS[name](tmp_path, data)
        except Exception as error:
            raise AssertionError(f"file {number} of seed {seed}") from error
