"""Texts that a language model writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from deployments.workflows.backend import Backend, Catalog, Report
from deployments.workflows.images import joined
from deployments.workflows.kinds import (
    MAX_SEED,
    Choice,
    Kind,
    Output,
    boolean,
    choice,
    dynamic,
    growing,
    integer,
    link,
    number,
    text,
)
from deployments.workflows.records import Refused
from deployments.workflows.values import PENDING, ClipValue, Image, Later

_MAX_TOP_K: Final = 1000
_THOUGHT_END: Final = "</think>"


def _write(
    catalog: Catalog,
    clip: ClipValue,
    prompt: str,
    max_length: int,
    sampling_mode: Choice,
    images: Mapping[str, Image],
    thinking: bool = False,
    use_default_template: bool = True,
    mtp: str = "auto",
    system_prompt: str = "",
    image: Image | None = None,
    video: Any = None,
    audio: Any = None,
) -> Later:
    """Return the answer of a model, whose words the cluster draws from the same distribution."""
    if video is not None or audio is not None:
        raise Refused("language models are given texts and images here", "video" if video is not None else "audio")
    if not use_default_template:
        raise Refused("prompts are put into the model's own template", "use_default_template")
    if system_prompt:
        raise Refused("the model's own system prompt is used", "system_prompt")
    writers = [one for one in clip.models if not catalog.facts(one).class_name.endswith("Pipeline")]
    if not writers:
        raise Refused(f"no language model: {', '.join(clip.models)}", "clip")
    options: dict[str, Any] = {"max_tokens": max_length, "enable_thinking": thinking, **_sampling(sampling_mode)}
    shown = [one for one in (image, *images.values()) if one is not None]

    async def act(backend: Backend, report: Report) -> tuple[str, str]:
        arrays = [one for one in shown if isinstance(one, np.ndarray)]
        written = await backend.text(writers[0], prompt, options, joined(arrays) if arrays else None)
        thought, found, answer = written.partition(_THOUGHT_END)
        if not found:
            thought, answer = "", written
        return answer.strip(), thought.replace("<think>", "", 1).strip()

    return Later(act, (PENDING, PENDING))


def _sampling(mode: Choice) -> dict[str, Any]:
    if mode.name == "off":
        return {"temperature": 0.0}
    options = dict(mode.values)
    options["seed"] = options["seed"] % 2**63
    return options


_SAMPLED: Final = (
    number("temperature", 0.7, 0.01, 2.0),
    integer("top_k", 64, 0, _MAX_TOP_K),
    number("top_p", 0.95),
    number("min_p", 0.05),
    number("repetition_penalty", 1.05, 0.0, 5.0),
    integer("seed", 0, 0, MAX_SEED),
    number("presence_penalty", 0.0, 0.0, 5.0, required=False),
)

WRITING: Final = (
    Kind(
        "TextGenerate",
        (
            *(link("clip", "CLIP"), text("prompt", multiline=True, picks=True)),
            growing("images", "IMAGE", tuple(f"image_{at}" for at in range(9)), 0),
            *(
                link(name, kind, required=False)
                for name, kind in (("image", "IMAGE"), ("video", "IMAGE"), ("audio", "AUDIO"))
            ),
            integer("max_length", 512, 1, 32_768),
            dynamic("sampling_mode", {"on": _SAMPLED, "off": ()}),
            *(boolean("thinking", required=False), boolean("use_default_template", True, required=False)),
            choice("mtp", ("auto", "off", "2", "3", "4", "5"), required=False),
            link("system_prompt", "STRING", required=False),
        ),
        (Output("STRING", "generated_text"), Output("STRING", "thinking")),
        _write,
        is_opaque=True,
        reads_catalog=True,
        category="text",
    ),
)
