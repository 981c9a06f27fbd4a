"""The pipeline that docs/pipelines.md adds, as it stands there: its function, its config, and its image."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.deployments.engine_loops import AskedModels

from configs.cluster import LimitsConfig
from deployments.local import LocalModels
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.records import PipelineRequest, TensorValue, text_tensor
from deployments.pipelines.stage_functions import find_function
from deployments.preflight import check_config
from deployments.records import ImageRequest
from deployments.records.errors import InvalidRequest

ROOT = Path(__file__).parents[4]
PROMPT, SEED = "a handwritten five", 3

pytestmark = pytest.mark.slow  # loads the demo's Flux pipeline


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one who follows the page: a checkout with two files more."""
    text = (ROOT / "docs/pipelines.md").read_text()
    section = text[text.index("## Add one") : text.index("## Stages")]
    for language, name in (("python", "frames.py"), ("yaml", "frames.yaml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block)
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "frames", raising=False)
    find_function.cache_clear()
    return tmp_path / "frames.yaml"


async def test_the_pages_pipeline_frames_what_its_model_draws(config_file: Path, tmp_path: Path) -> None:
    config, sources, problems = check_config(config_file)
    assert (config is not None, problems) == (True, [])
    assert config is not None
    models = LocalModels(config.model_copy(update={"store": config.store.model_copy(update={"path": tmp_path / "s"})}))
    ask: Any = AskedModels(models)
    records = {id_: source.record for id_, source in sources.items()}
    pipelines = Pipelines(config.pipelines, ask, SimpleNamespace(records=records), limits=LimitsConfig())

    async def asked(**numbers: int) -> np.ndarray:
        given = {name: TensorValue(name, "INT64", np.array([number])) for name, number in numbers.items()}
        result = await pipelines.run_pipeline(
            PipelineRequest("framed-digit", given | {"prompt": text_tensor("prompt", [PROMPT])})
        )
        [image] = np.asarray(result.outputs["image"].data)
        return image

    request = ImageRequest(
        model="digits-flux", prompt=PROMPT, seed=SEED, **config.models[0].defaults.model_dump(exclude_unset=True)
    )
    [plain] = (await asyncio.to_thread(models.generate, request)).images
    for numbers, width in (({}, 4), ({"width": 8}, 8)):
        image = await asked(seed=SEED, **numbers)
        expected = np.full((32 + 2 * width, 32 + 2 * width, 3), 255, np.uint8)
        expected[width:-width, width:-width] = plain
        assert np.array_equal(image, expected)
    with pytest.raises(InvalidRequest, match="a frame of 65 pixels: expected 1 to 64"):
        await asked(seed=SEED, width=65)


def test_a_mistake_in_it_is_found_at_its_line(config_file: Path) -> None:
    text = config_file.read_text().replace("image: $digit", "picture: $digit")
    config_file.write_text(text)
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "frames:framed" in one)
    problems = check_config(config_file)[2]
    assert line in {problem.line for problem in problems if "picture" in problem.text}, problems
