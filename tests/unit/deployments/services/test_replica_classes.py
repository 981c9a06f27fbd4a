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

pytestmark = pytest.mark.long  # processes that import torch


def seen_in_a_replica(code: str) -> Any:
    """Return the JSON that `code` prints in a process of its own."""
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


IMPORTS = """
import os
os.environ["OMP_NUM_THREADS"] = "1"
found = []

def look(replica):
    imported = sorted(set(LEFT_OUT) & set(sys.modules))
    found.append([replica.__name__, imported, len(os.listdir("/proc/self/task"))])

encoders = replica_classes.TextEncoderService
import diffusers, transformers
transformers.T5EncoderModel, transformers.CLIPTextModel, transformers.BertModel
look(encoders)
worker = replica_classes.Worker
diffusers.FluxTransformer2DModel, diffusers.UNet2DConditionModel, diffusers.ModelMixin
look(worker)
before = diffusers.UNet2DConditionModel
from deployments.engines.stock.loading import pipeline_class
names = [pipeline_class(name).__module__.rsplit(".")[-1] for name in ("SanaPipeline", "StableDiffusionPAGPipeline")]
import diffusers
print(json.dumps([found, names, before is diffusers.UNet2DConditionModel]))
"""


def test_replicas_import_their_models_and_nothing_that_they_do_not_use() -> None:
    """A worker has the pipelines of diffusers beside, and its models stay as they were.

    Both in one process, one after the other: what a worker does not want, no text encoder has loaded.
    """
    found, names, is_same = seen_in_a_replica(f"LEFT_OUT = {LEFT_OUT!r}\n{IMPORTS}")
    assert [one[:2] for one in found] == [["TextEncoderService", []], ["Worker", []]]
    assert [one[2] for one in found] == [1, 1], "or their template could not be copied"
    assert (names, is_same) == (["pipeline_sana", "pipeline_pag_sd"], True)


def test_libraries_that_were_there_before_go_on_as_they_were() -> None:
    code = """
import accelerate, diffusers
replica_classes.Worker
print(json.dumps([sys.modules["accelerate"] is accelerate, "peft" in sys.modules and sys.modules["peft"] is None]))
"""
    assert seen_in_a_replica(code) == [True, False]


def test_replicas_of_texts_do_not_load_what_makes_images() -> None:
    code = "from deployments.services import text_encoder\nprint(json.dumps('diffusers' in sys.modules))"
    assert not seen_in_a_replica(code)
