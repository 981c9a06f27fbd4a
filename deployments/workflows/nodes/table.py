"""The table of kinds."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from deployments.workflows.nodes.conditioning import CONDITIONING
from deployments.workflows.nodes.files import FILES
from deployments.workflows.nodes.filters import FILTERS
from deployments.workflows.nodes.images import IMAGES
from deployments.workflows.nodes.latents import LATENTS
from deployments.workflows.nodes.loading import LOADERS
from deployments.workflows.nodes.logic import LOGIC
from deployments.workflows.nodes.masks import MASKS
from deployments.workflows.nodes.texts import TEXTS
from deployments.workflows.nodes.writing import WRITING
from deployments.workflows.sampling import SAMPLING

KINDS: Final = MappingProxyType(
    {
        kind.name: kind
        for group in (LOADERS, CONDITIONING, SAMPLING, LATENTS, FILES, IMAGES, FILTERS, MASKS, TEXTS, WRITING, LOGIC)
        for kind in group
    }
)
