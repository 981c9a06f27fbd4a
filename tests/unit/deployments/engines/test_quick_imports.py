"""Replicas import diffusers and transformers without what only training, compiling and loading from disk need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("class_name", "models"),
    [
        (
            "Worker",
            "import diffusers as d; d.FluxTransformer2DModel, d.UNet2DConditionModel, d.EulerDiscreteScheduler",
        ),
        ("TextEncoderService", "import transformers as t; t.T5EncoderModel, t.CLIPTextModel, t.BertModel"),
    ],
)
def test_a_replica_imports_its_models_and_no_more(class_name: str, models: str) -> None:
    code = f"""
from deployments.services import replica_classes
found = replica_classes.{class_name}
{models}
print(json.dumps([found.__name__, sorted(set({LEFT_OUT!r}) & set(sys.modules))]))
"""
    assert seen_in_a_replica(code) == [class_name, []]


def test_what_was_left_out_is_there_for_who_asks() -> None:
    """Compiling works afterwards, solvers have their beta sigmas, and transformers its losses."""
    code = """
from deployments.engines.quick_imports import import_diffusers
import_diffusers()
import numpy as np, torch, diffusers
from transformers.loss.loss_for_object_detection import linear_sum_assignment
rows, columns = linear_sum_assignment(np.array([[4, 1, 3], [2, 0, 5], [3, 2, 2]]))
solver = diffusers.EulerDiscreteScheduler(use_beta_sigmas=True)
solver.set_timesteps(3)
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.arange(3.0))
has_dynamo = "torch._dynamo.convert_frame" in sys.modules
print(json.dumps([columns.tolist(), solver.sigmas.tolist(), compiled.tolist(), has_dynamo]))
"""
    plain = """
import diffusers
solver = diffusers.EulerDiscreteScheduler(use_beta_sigmas=True)
solver.set_timesteps(3)
print(json.dumps(solver.sigmas.tolist()))
"""
    assert seen_in_a_replica(code) == [[1, 0, 2], seen_in_a_replica(plain), [1.0, 3.0, 5.0], True]


def test_a_library_that_was_there_before_goes_on_as_it_was() -> None:
    code = """
import transformers
before = sys.modules["transformers"]
from deployments.engines.quick_imports import import_diffusers
import_diffusers()
print(json.dumps(sys.modules["transformers"] is before and transformers.BertModel.__name__ == "BertModel"))
"""
    assert seen_in_a_replica(code) is True
