"""ComfyUI's own templates, and which of them run: `make judge-templates`, then `python -m infra.supported.workflows`.

A template passes where the check finds nothing to refuse at any of its outputs, over stand-ins: for each file that it
names, a model of the pipeline's class that the file belongs to. Nothing is computed. Otherwise the first node, or the
model, that lacks is printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from deployments.workflows.backend import Folder, ModelFacts
from deployments.workflows.checking import check
from deployments.workflows.nodes.table import KINDS
from deployments.workflows.reading import read_workflow
from deployments.workflows.records import Workflow, WorkflowError

FOLDER: Final = Path(".judges/comfy_templates")
_PAID: Final = "api_"  # templates of services that are paid for

# Which pipeline of diffusers a file of a denoiser belongs to, by what its name has in it; the first one that fits.
CLASSES: Final[Mapping[str, str]] = {
    r"qwen_image_edit_25\d\d|firered-image-edit": "QwenImageEditPlusPipeline",
    r"qwen_image_edit": "QwenImageEditPipeline",
    r"qwen_image_layered": "QwenImageLayeredPipeline",
    r"qwen_image_2\.1": "QwenImage21Pipeline",
    r"qwen_image": "QwenImagePipeline",
    r"z_image": "ZImagePipeline",
    r"flux-2-klein": "Flux2KleinPipeline",
    r"flux2_dev|flux-2": "Flux2Pipeline",
    r"flux1-fill|flux\.1-fill": "FluxFillPipeline",
    r"flux1-(canny|depth)": "FluxControlPipeline",
    r"kontext": "FluxKontextPipeline",
    r"^flux1-": "FluxPipeline",
    r"sd_xl_refiner": "StableDiffusionXLImg2ImgPipeline",
    r"sd_xl": "StableDiffusionXLPipeline",
    r"sd3": "StableDiffusion3Pipeline",
    r"v1-5|dreamshaper": "StableDiffusionPipeline",
}
_NOT_FOUND: Final = "another class"


class Finding(NamedTuple):
    """The outcome of a template: `lacks` is empty where it passes."""

    name: str
    lacks: str


class StandIns:
    """A catalog with a model for each file of a workflow. Encoders and VAEs belong to all of its denoisers."""

    def __init__(self, workflow: Workflow) -> None:
        self._files: dict[Folder, set[str]] = {}
        for node in workflow.nodes.values():
            kind = KINDS.get(node.kind)
            for one in kind.inputs if kind is not None else ():
                name = node.inputs.get(one.name)
                if one.folder is not None and isinstance(name, str):
                    self._files.setdefault(one.folder, set()).add(name)
        self._models = sorted(self._files.get("checkpoints", set()) | self._files.get("diffusion_models", set()))

    def files(self, folder: Folder) -> Sequence[str]:
        return sorted(self._files.get(folder, ()))

    def models_of(self, folder: Folder, name: str) -> Sequence[str]:
        return self._models if folder in ("text_encoders", "vae") else [name]

    def facts(self, model: str) -> ModelFacts:
        return ModelFacts(class_of(model), {"guidance_embeds": "schnell" not in model})


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
    return Finding(name, str(found.errors[0]).splitlines()[0] if found.errors else "")


def templates(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and document of each template without nodes of paid services."""
    for path in sorted(folder.rglob("comfyui_workflow_templates_json/**/*.json")):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict) and "nodes" in document and not path.name.startswith(_PAID):
            yield path.stem, document


def main() -> int:
    """Print a line for each template, and what lacks most."""
    findings = [finding(name, document) for name, document in templates(FOLDER)]
    if not findings:
        sys.stderr.write(f"no templates in {FOLDER}: make judge-templates\n")
        return 2
    for one in findings:
        sys.stdout.write(f"{one.name}: {one.lacks or 'passes'}\n")
    groups = Counter(one.name.partition("_")[0].partition("-")[0].lower() for one in findings)
    passed = Counter(one.name.partition("_")[0].partition("-")[0].lower() for one in findings if not one.lacks)
    sys.stdout.write("\n| group | templates | pass the check |\n|---|---|---|\n")
    for group, number in groups.most_common(12):
        sys.stdout.write(f"| {group} | {number} | {passed[group]} |\n")
    sys.stdout.write(f"\n{sum(passed.values())} of {len(findings)} pass the check.\n\nWhat lacks most:\n")
    lacks = Counter(re.sub(r"^node [^,]*, ", "", one.lacks)[:120] for one in findings if one.lacks)
    for what, number in lacks.most_common(40):
        sys.stdout.write(f"{number:4} {what}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
