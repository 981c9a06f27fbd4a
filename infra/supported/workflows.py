"""ComfyUI's own templates, and which of them run: `make judge-templates`, then `python -m infra.supported.workflows`.

A template runs where all of its outputs are reached over stand-ins: for each file that it names, a model of the
pipeline's class that the file belongs to, whose samplers and VAEs give zeros of the right shapes. So all nodes run,
every request is made and held against its class's rules, and no model is. Otherwise the node that lacks is printed.
The numbers go to `templates.json`, and with `python -m infra.supported.page` to docs/supported.md.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from deployments.engines.diffusion.families import FAMILIES
from deployments.records import ChatRequest, ClipRequest, ImageRequest, as_record
from deployments.workflows.backend import Array, Folder, Frames, ModelFacts, Report, SavedFile
from deployments.workflows.checking import check
from deployments.workflows.reading import read_workflow
from deployments.workflows.records import Workflow, WorkflowError
from deployments.workflows.running import NodeFailed, run
from deployments.workflows.table import KINDS

FOLDER: Final = Path(".judges/comfy_templates")
COUNTS: Final = Path(__file__).with_name("templates.json")
_MOST_GROUPS: Final = 12
_PAID: Final = "api_"  # templates of services that are paid for

# Which pipeline of diffusers a file of a denoiser belongs to, by what its name has in it; the first one that fits.
CLASSES: Final[Mapping[str, str]] = {
    r"qwen_image_edit_25\d\d|firered-image-edit": "QwenImageEditPlusPipeline",
    r"qwen_image_edit": "QwenImageEditPipeline",
    r"qwen_image_layered": "QwenImageLayeredPipeline",
    r"qwen_image_2\.1": "QwenImage21Pipeline",
    r"qwen_image": "QwenImagePipeline",
    r"z_image": "ZImagePipeline",
    r"krea2": "Krea2Pipeline",
    r"ernie-image(?!-prompt)": "ErnieImagePipeline",
    r"lumina|netayume": "Lumina2Pipeline",
    r"flux-2-klein": "Flux2KleinPipeline",
    r"flux2_dev|flux-2": "Flux2Pipeline",
    r"flux1-fill|flux\.1-fill": "FluxFillPipeline",
    r"flux1-(canny|depth)": "FluxControlPipeline",
    r"kontext": "FluxKontextPipeline",
    r"longcat_image_edit": "LongCatImageEditPipeline",
    r"longcat_image": "LongCatImagePipeline",
    r"^flux1-": "FluxPipeline",
    r"sd_xl_refiner": "StableDiffusionXLImg2ImgPipeline",
    r"sd_xl": "StableDiffusionXLPipeline",
    r"sd3": "StableDiffusion3Pipeline",
    r"hidream_i1": "HiDreamImagePipeline",
    r"ovis_image": "OvisImagePipeline",
    r"v1-5|dreamshaper": "StableDiffusionPipeline",
    r"wan2\.\d_(i2v|flf2v|fun_inp)": "WanImageToVideoPipeline",
    r"wan2\.1_vace": "WanVACEPipeline",
    r"wan2\.\d_t2v|wan2\.2_ti2v": "WanPipeline",
    r"hunyuan_video_t2v": "HunyuanVideoPipeline",
    r"ltx-video-2b-v0\.9\.s": "LTXPipeline",
}
_PIXELS_PER_CELL: Final = 8
_CHANNELS: Final = 16
_INPUT_SIZE: Final = (384, 256)
_INPUT_FRAMES: Final = 81
_NOT_FOUND: Final = "another class"
_SECOND_VAE: Final = "alpha_channel"  # in the name of a VAE beside that of the model


class Finding(NamedTuple):
    """The outcome of a template: `lacks` is empty where it runs."""

    name: str
    lacks: str


class StandIns:
    """A backend with a model for each file of a workflow. Encoders and VAEs belong to all of its denoisers."""

    def __init__(self, workflow: Workflow) -> None:
        self._files: dict[Folder, set[str]] = {}
        for node in workflow.nodes.values():
            kind = KINDS.get(node.kind)
            for one in kind.inputs if kind is not None else ():
                name = node.inputs.get(one.name)
                if one.folder is not None and isinstance(name, str):
                    self._files.setdefault(one.folder, set()).add(name)
        self._models = sorted(
            map(_model_of, self._files.get("checkpoints", set()) | self._files.get("diffusion_models", set()))
        )

    def files(self, folder: Folder) -> Sequence[str]:
        return sorted(self._files.get(folder, ()))

    def models_of(self, folder: Folder, name: str) -> Sequence[str]:
        is_shared = folder in ("text_encoders", "vae", "clip_vision") and _SECOND_VAE not in name
        return [*self._models, name] if is_shared else [_model_of(name)]

    def facts(self, model: str) -> ModelFacts:
        return ModelFacts(class_of(model), {"guidance_embeds": "schnell" not in model, "zero_cond_t": "2511" in model})

    def _pixels_per_cell(self, model: str) -> int:
        family = FAMILIES.get(class_of(model))
        return _PIXELS_PER_CELL if family is None else family.latents.pixels_per_cell({})

    async def image(self, request: ImageRequest, report: Report) -> Array:
        if request.output == "image":
            return np.zeros((request.n, request.height or 0, request.width or 0, 3), np.float32)
        cell = self._pixels_per_cell(request.model)
        if request.latents is not None:
            latents = np.zeros_like(request.latents)
        else:
            assert request.height is not None
            assert request.width is not None
            latents = np.zeros((request.n, _CHANNELS, request.height // cell, request.width // cell), np.float32)
        return np.concatenate([latents, latents]) if request.output == "latent_and_clean" else latents

    async def video(self, request: ClipRequest, report: Report) -> Frames:
        return np.zeros((request.num_frames or 0, request.height or 0, request.width or 0, 3), np.uint8)

    async def encode(self, model: str, images: Array) -> Array:
        number, height, width, _ = images.shape
        cell = self._pixels_per_cell(model)
        return np.zeros((number, _CHANNELS, height // cell, width // cell), np.float32)

    async def decode(self, model: str, latents: Array) -> Array:
        number, _, height, width = latents.shape
        cell = self._pixels_per_cell(model)
        return np.zeros((number, height * cell, width * cell, 3), np.float32)

    async def upscale(self, model: str, images: Array) -> Array:
        return images.repeat(2, 1).repeat(2, 2)

    async def text(self, model: str, prompt: str, options: Mapping[str, Any], images: Array | None) -> str:
        as_record(ChatRequest, {"model": model, "messages": ({"role": "user", "content": prompt},), **options})
        return prompt

    async def read_input(self, name: str) -> bytes:
        file = io.BytesIO()
        Image.new("RGBA", _INPUT_SIZE, (200, 100, 50, 128)).save(file, "PNG")
        return file.getvalue()

    async def read_video(self, name: str) -> tuple[Frames, float]:
        return np.zeros((_INPUT_FRAMES, *_INPUT_SIZE[::-1], 3), np.uint8), 16.0

    async def save_file(self, file: bytes, prefix: str, ending: str) -> SavedFile:
        return SavedFile(f"{prefix}_00001_.{ending}", "", "output")

    async def save(
        self, images: Sequence[npt.NDArray[np.uint8]], prefix: str, type: Literal["output", "temp"]
    ) -> list[SavedFile]:
        return [SavedFile(f"{prefix}_{at:05}_.png", "", type) for at in range(len(images))]


class _Unheard:
    """Events that nobody hears."""

    def executing(self, node: str) -> None: ...
    def progress(self, node: str, value: int, max: int, preview: npt.NDArray[np.uint8] | None) -> None: ...
    def executed(self, node: str, output: Mapping[str, Any] | None) -> None: ...


def _model_of(file: str) -> str:
    """Return the model of a file: one has both denoisers, that for much noise and that for little."""
    return re.sub("_(high|low)_noise(?=.*_fp8_scaled)", "", file)


def class_of(file: str) -> str:
    """Return the pipeline's class of a denoiser's file."""
    name = file.replace("\\", "/").rpartition("/")[2].lower()
    return next((found for pattern, found in CLASSES.items() if re.search(pattern, name)), _NOT_FOUND)


def finding(name: str, document: Any) -> Finding:
    """Return the outcome of a template."""
    try:
        workflow = read_workflow(document)
        found = check(workflow, StandIns(workflow))
    except WorkflowError as error:
        unknown = sorted({one.kind for one in error.errors})
        return Finding(name, f"node {', '.join(unknown)}" if unknown else error.message)
    unknown = sorted({one.kind for one in found.errors if one.type == "missing_node_type"})
    if unknown:
        return Finding(name, f"node {', '.join(unknown)}")
    if found.errors:
        return Finding(name, str(found.errors[0]).splitlines()[0])
    try:
        asyncio.run(run(workflow, StandIns(workflow), _Unheard(), found.outputs))
    except NodeFailed as failed:
        return Finding(name, str(failed).splitlines()[0])
    return Finding(name, "")


def templates(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and document of each template without nodes of paid services."""
    for path in sorted(folder.rglob("comfyui_workflow_templates_json/**/*.json")):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict) and "nodes" in document and not path.name.startswith(_PAID):
            yield path.stem, document


def counted(findings: Sequence[Finding]) -> dict[str, list[int]]:
    """Return the number of templates, and of those that run, by the first word of their names; the rest last."""
    words = [re.split(r"[_-]", one.name, maxsplit=1)[0].lower() for one in findings]
    known = [word for word, _ in Counter(words).most_common(_MOST_GROUPS)]
    counts = {group: [0, 0] for group in (*known, "others")}
    for word, one in zip(words, findings, strict=True):
        group = counts[word if word in known else "others"]
        group[0] += 1
        group[1] += not one.lacks
    return counts


def table_of(counts: Mapping[str, Sequence[int]]) -> str:
    """Return the table of `counted`, and its sums below it."""
    lines = [f"| {group} | {number} | {run} |" for group, (number, run) in counts.items() if number]
    number, run = (sum(one[place] for one in counts.values()) for place in (0, 1))
    return "\n".join(["| templates | number | run |", "|---|---|---|", *lines, "", f"{run} of {number} run.", ""])


def main() -> int:
    """Print a line for each template, and what lacks most."""
    findings = [finding(name, document) for name, document in templates(FOLDER)]
    if not findings:
        sys.stderr.write(f"no templates in {FOLDER}: make judge-templates\n")
        return 2
    for one in findings:
        sys.stdout.write(f"{one.name}: {one.lacks or 'runs'}\n")
    counts = counted(findings)
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n" + table_of(counts) + "\nWhat lacks most:\n")
    lacks = Counter(re.sub(r"^node [^,]*, ", "", one.lacks)[:120] for one in findings if one.lacks)
    for what, number in lacks.most_common(40):
        sys.stdout.write(f"{number:4} {what}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
