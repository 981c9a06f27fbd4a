"""Images that a model reads beside a prompt, to change them.

The model's pipeline scales them as diffusers does: to sides of multiples of 32, by Lanczos' filter. ComfyUI's sides are
multiples of 8, so its edits of the same seed differ in detail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from deployments.engines.diffusion.families import FAMILIES
from deployments.workflows.records import Refused
from deployments.workflows.values import Prompt

EDITS: Final = "edits"  # what the nodes of an editing model's prompt say, and whether a VAE is linked
METHOD: Final = "reference_latents_method"
READ: Final = (EDITS, METHOD)


def check_references(prompts: Sequence[Prompt], class_name: str, variant: Mapping[str, bool | int]) -> None:
    """Raise Refused where the images of prompts, positive and negative, are not those that a request can have."""
    most = FAMILIES[class_name].references.most
    for side, prompt in zip(("positive", "negative"), prompts, strict=False):
        given = prompt.images or prompt.references
        own, positive = ([id(image) for image in one.images] for one in (prompt, prompts[0]))
        why = None
        if given and not most:
            why = f"images beside a prompt are not read by a {class_name} here"
        elif most and not prompt.images:
            why = f"a {class_name} changes images, and its prompt has none"
        elif prompt.references:
            why = "latents are not read as references: link the images to the prompt's node"
        elif given and (EDITS, (True,)) not in prompt.extra:
            why = "an editing model's VAE reads the images, too: link it to the prompt's node"
        elif own != positive:
            why = "both prompts are read beside the same images"
        elif len(own) > most:
            why = f"{len(own)} images: a {class_name} reads {most}"
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
