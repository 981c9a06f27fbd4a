"""A client of an ingress over fake replicas, which keeps jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from unit.deployments.ingress.http_fakes import Replicas
from unit.deployments.ingress.jobs.job_fakes import ingress_over

from cluster.jobs.owner import JobOwner


@pytest.fixture
async def http(as_described: Any, replicas: Replicas, owner: JobOwner) -> AsyncIterator[httpx.AsyncClient]:
    async with ingress_over(replicas, owner, as_described) as client:
        yield client
