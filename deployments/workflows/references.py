"""Images that a model reads beside a prompt, to change them, and latents that it reads beside its own.

The pipeline of an editing model scales images as diffusers does: to sides of multiples of 32, by Lanczos' filter.
ComfyUI's sides are multiples of 8, so its edits of the same seed differ in detail. Latents are read as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from deployments.engines.diffusion.families import FAMILIES
from deployments.records import MAX_NAMED_IMAGES
from deployments.workflows.records import Refused
from deployments.workflows.values import Prompt

EDITS: Final = "edits"  # what the nodes of an editing model's prompt say, and whether a VAE is linked
METHOD: Final = "reference_latents_method"
READ: Final = (EDITS, METHOD)


def check_references(prompts: Sequence[Prompt], class_name: str, variant: Mapping[str, bool | int]) -> None:
    """Raise Refused where the images of prompts, positive and negative, are not those that a request can have."""
    references = FAMILIES[class_name].references
    most = references.most
    for side, prompt in zip(("positive", "negative"), prompts, strict=False):
        given = prompt.images or (() if references.takes_latents else prompt.references)
        own, positive = ([id(image) for image in (*one.images, *one.references)] for one in (prompt, prompts[0]))
        why = None
        if given and not most:
            why = f"images beside a prompt are not read by a {class_name} here"
        elif most and not prompt.images:
            why = f"a {class_name} changes images, and its prompt has none"
        elif prompt.references and not references.takes_latents:
            why = "latents are not read as references: link the images to the prompt's node"
        elif given and (EDITS, (True,)) not in prompt.extra:
            why = "an editing model's VAE reads the images, too: link it to the prompt's node"
        elif own != positive:
            why = "both prompts are read beside the same images"
        elif len(own) > (most or MAX_NAMED_IMAGES):
            why = f"{len(own)} images: a {class_name} reads {most or MAX_NAMED_IMAGES}"
        usual = "index_timestep_zero" if variant.get("zero_cond_t") else "index"
        for kind, values in prompt.extra:
            if kind == METHOD and values != (usual,):
                why = why or f"this model reads images by the method {usual}"
        if why is not None:
            raise Refused(why, side)


def reference_pixels(prompt: Prompt) -> tuple[npt.NDArray[np.uint8], ...]:
    """Return the images of a prompt as bytes; none while they are not there."""
    arrays = [image for image in prompt.images if isinstance(image, np.ndarray)]
    for image in arrays:
        if len(image) != 1:
            raise Refused(f"a batch of {len(image)} images beside a prompt: expected one at each input", "positive")
    return tuple(np.rint(np.clip(image[0, :, :, :3], 0, 1) * 255).astype(np.uint8) for image in arrays)


def reference_latents(prompt: Prompt) -> tuple[npt.NDArray[np.float32], ...]:
    """Return the latents that a prompt's model reads beside its own; none while they are not there."""
    if any(latent.samples is None for latent in prompt.references):
        raise Refused("an empty latent is no image beside a prompt: encode one", "positive")
    arrays = [latent.samples for latent in prompt.references if isinstance(latent.samples, np.ndarray)]
    for samples in arrays:
        if len(samples) != 1:
            raise Refused(f"a batch of {len(samples)} latents beside a prompt: expected one at a time", "positive")
    return tuple(arrays)
