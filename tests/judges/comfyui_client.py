"""Observations of comfy-api-simplified, a client of ComfyUI: a workflow by its titles, uploads, queue and history.

`asked.json` has a `workflow` whose nodes have titles, and the `title` of the one that saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api_simplified import ComfyApiWrapper, ComfyWorkflowWrapper
from observing import error_text, place, write

WHERE = place()
ASKED = WHERE.asked
CLIENT = ComfyApiWrapper(f"{WHERE.url}/")


def made(seed: int) -> list[str]:
    """Return the names of the images of a seed, which go to files."""
    workflow = ComfyWorkflowWrapper(ASKED["workflow"])
    workflow.set_node_param(ASKED["sampler"], "seed", seed)
    images = CLIENT.queue_and_wait_images(workflow, ASKED["title"])
    for name, content in images.items():
        (WHERE.folder / name).write_bytes(content)
    return sorted(images)


def unknown_model() -> str:
    workflow = ComfyWorkflowWrapper(ASKED["workflow"])
    workflow.set_node_param(ASKED["loader"], "ckpt_name", "dreams.safetensors")
    return error_text(lambda: CLIENT.queue_prompt(workflow))


def uploaded() -> dict[str, Any]:
    """Return the place of the image that was made first, sent back."""
    file = min(Path(WHERE.folder).glob("*.png"))
    return dict(CLIENT.upload_image(file, "sent"))


write(
    WHERE,
    [
        ("images", lambda: made(3)),
        ("again", lambda: made(3)),
        ("unknown_model", unknown_model),
        ("uploaded", uploaded),
        ("queue", CLIENT.get_queue),
        ("stats", CLIENT.get_system_stats),
        ("loader", lambda: CLIENT.get_object_info("CheckpointLoaderSimple")),
    ],
)
