"""Replicas import diffusers and transformers without libraries that inference does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
LEFT_OUT = ("peft.tuners", "accelerate.state", "sklearn.metrics")

pytestmark = pytest.mark.slow  # processes that import torch


def seen_in_a_replica(code: str) -> Any:
    """Return what `code` prints as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\nfrom deployments.services import replica_classes\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PIPELINES = """
before = diffusers.UNet2DConditionModel
from deployments.engines.stock.loading import pipeline_class
names = [pipeline_class(name).__module__.rsplit(".")[-1] for name in ("SanaPipeline", "StableDiffusionPAGPipeline")]
import diffusers
more = [names, before is diffusers.UNet2DConditionModel]
"""


@pytest.mark.parametrize(
    ("name", "uses", "then", "more"),
    [
        (
            "Worker",
            "diffusers.FluxTransformer2DModel, diffusers.UNet2DConditionModel, diffusers.ModelMixin",
            PIPELINES,
            [["pipeline_sana", "pipeline_pag_sd"], True],
        ),
        (
            "TextEncoderService",
            "transformers.T5EncoderModel, transformers.CLIPTextModel, transformers.BertModel",
            "more = []",
            [],
        ),
    ],
)
def test_a_replica_imports_its_models_and_nothing_that_it_does_not_use(
    name: str, uses: str, then: str, more: list[Any]
) -> None:
    """A worker has the pipelines of diffusers beside, and its models stay as they were."""
    code = f"""
found = replica_classes.{name}
import diffusers, transformers
{uses}
imported = sorted(set({LEFT_OUT!r}) & set(sys.modules))
num_threads = len(__import__("os").listdir("/proc/self/task"))
{then}
print(json.dumps([found.__name__, imported, num_threads, more]))
"""
    found, imported, num_threads, then_found = seen_in_a_replica(
        f"__import__('os').environ['OMP_NUM_THREADS'] = '1'\n{code}"
    )
    assert (found, imported) == (name, [])
    assert num_threads == 1, "or its template could not be copied"
    assert then_found == more


def test_libraries_that_were_there_before_go_on_as_they_were() -> None:
    code = """
import accelerate, diffusers
replica_classes.Worker
print(json.dumps([sys.modules["accelerate"] is accelerate, "peft" in sys.modules and sys.modules["peft"] is None]))
"""
    assert seen_in_a_replica(code) == [True, False]
