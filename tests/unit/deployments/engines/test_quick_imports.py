"""Replicas import diffusers and transformers without what only training, compiling and loading from disk need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import transformers

from deployments.engines.quick_imports import import_diffusers, import_transformers

ROOT = Path(__file__).resolve().parents[4]
LEFT_OUT = (
    "torch._dynamo.convert_frame",
    "scipy.optimize._optimize",
    "peft.tuners",
    "accelerate.state",
    "sklearn.metrics",
)

pytestmark = pytest.mark.slow  # processes that import torch


def seen_in_a_replica(code: str) -> Any:
    """Return what `code` prints as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_worker_imports_its_models_and_no_more_and_what_was_left_out_is_there_for_who_asks() -> None:
    """Compiling works afterwards, solvers have their beta sigmas, and transformers its losses."""
    code = f"""
from deployments.services import replica_classes
found = replica_classes.Worker
import diffusers
diffusers.FluxTransformer2DModel, diffusers.UNet2DConditionModel, diffusers.EulerDiscreteScheduler
imported = sorted(set({LEFT_OUT!r}) & set(sys.modules))

import numpy as np, torch
from transformers.loss.loss_for_object_detection import linear_sum_assignment
rows, columns = linear_sum_assignment(np.array([[4, 1, 3], [2, 0, 5], [3, 2, 2]]))
solver = diffusers.EulerDiscreteScheduler(use_beta_sigmas=True)
solver.set_timesteps(3)
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.arange(3.0))
has_dynamo = "torch._dynamo.convert_frame" in sys.modules
afterwards = [columns.tolist(), solver.sigmas.tolist(), compiled.tolist(), has_dynamo]
print(json.dumps([found.__name__, imported, afterwards]))
"""
    plain = diffusers.EulerDiscreteScheduler(use_beta_sigmas=True)
    plain.set_timesteps(3)
    afterwards = [[1, 0, 2], plain.sigmas.tolist(), [1.0, 3.0, 5.0], True]
    assert seen_in_a_replica(code) == ["Worker", [], afterwards]


def test_a_text_encoder_imports_its_models_and_no_more() -> None:
    code = f"""
from deployments.services import replica_classes
found = replica_classes.TextEncoderService
import transformers
transformers.T5EncoderModel, transformers.CLIPTextModel, transformers.BertModel
print(json.dumps([found.__name__, sorted(set({LEFT_OUT!r}) & set(sys.modules))]))
"""
    assert seen_in_a_replica(code) == ["TextEncoderService", []]


def test_libraries_that_were_there_before_go_on_as_they_were() -> None:
    """They are here: this process has imported both as everybody does."""
    assert transformers.BertModel.__name__ == "BertModel"
    before = dict(sys.modules)
    import_diffusers()
    import_transformers()
    assert sys.modules == before
