"""A client of ComfyUI's protocol over fake replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.deployments.ingress.comfy.comfy_fakes import Comfy, comfy_over
from unit.deployments.ingress.http_fakes import Replicas

from cluster.jobs.owner import JobOwner


@pytest.fixture
async def comfy(replicas: Replicas, owner: JobOwner, tmp_path: Path) -> AsyncIterator[Comfy]:
    async with comfy_over(replicas, owner, tmp_path / "files") as found:
        yield found
