"""The table of kinds."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from deployments.workflows.conditioning import CONDITIONING
from deployments.workflows.files import FILES
from deployments.workflows.filters import FILTERS
from deployments.workflows.images import IMAGES
from deployments.workflows.latents import LATENTS
from deployments.workflows.loading import LOADERS
from deployments.workflows.logic import LOGIC
from deployments.workflows.masks import MASKS
from deployments.workflows.samplers import SAMPLERS
from deployments.workflows.sigmas import SIGMA_KINDS
from deployments.workflows.texts import TEXTS
from deployments.workflows.videos import VIDEOS
from deployments.workflows.writing import WRITING

KINDS: Final = MappingProxyType(
    {
        kind.name: kind
        for group in (
            *(LOADERS, CONDITIONING, SAMPLERS, SIGMA_KINDS, LATENTS),
            *(FILES, IMAGES, FILTERS, MASKS, TEXTS, WRITING, LOGIC, VIDEOS),
        )
        for kind in group
    }
)
