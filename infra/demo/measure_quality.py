"""Measure the diffusion demo models with stock pipelines: can a judge read what they paint?

Exit code 1 if a model is read less often than 90 %, bold less than 85 %, bold is not bolder, or images that were made
with outline do not lie in their outlines.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    DiffusionPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxPipeline,
    StableDiffusionXLPipeline,
)
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from digits import (
    IMAGE_SIZE,
    DigitSet,
    Judge,
    canonical_prompt,
    first_of_each,
    ink_of_images,
    load_split,
    outline,
    to_image,
)
from ink_statistics import compare_ink, ink_areas, ink_overlaps, stroke_width
from model_folder import MODELS_DIR

CHANCE = "digits-flux, no digit named"  # beside which ControlNets are seen
NAMES = ("digits-flux", "digits-flux-inverted", "digits-sdxl", "bold", "outline", "outline, no digit named", CHANCE)
BASES = dict.fromkeys(NAMES[3:], "digits-flux")  # of what is no pipeline by itself
MIN_ACCURACY = dict.fromkeys(NAMES, 0.9) | {"bold": 0.85, CHANCE: 0.0}
NEUTRAL_PROMPT = "a handwritten digit"
MIN_OVERLAP = 0.7
SEEDS = range(20)
BATCH = 50
SDXL_GUIDANCE = 4.0


@dataclass(frozen=True)
class Measurement:
    accuracy: float
    accuracy_per_digit: list[float]
    ink_area: float
    stroke_width: float


def load(name: str, folder: Path) -> DiffusionPipeline:
    """Stock loading, float32; bold and outline are digits-flux with them at strength 1."""
    if name == "digits-sdxl":
        return StableDiffusionXLPipeline.from_pretrained(folder / name, torch_dtype=torch.float32)
    pipeline = FluxPipeline.from_pretrained(folder / BASES.get(name, name), torch_dtype=torch.float32)
    if is_controlled(name):
        net = FluxControlNetModel.from_pretrained(folder / "outline", torch_dtype=torch.float32)
        return FluxControlNetPipeline(**pipeline.components, controlnet=net)
    if name == "bold":
        pipeline.load_lora_weights(folder / name)
    return pipeline


def is_controlled(name: str) -> bool:
    return name.startswith("outline")


def call_options(pipeline: DiffusionPipeline) -> dict[str, Any]:
    if isinstance(pipeline, FluxPipeline | FluxControlNetPipeline):
        return {"max_sequence_length": 16, "guidance_scale": 0.0}
    return {"guidance_scale": SDXL_GUIDANCE}


def paint(name: str, pipeline: DiffusionPipeline, steps: int, samples: DigitSet) -> list[Image.Image]:
    """20 images of each digit, 0 to 9; the n-th of every digit starts from seed n.

    With outline, the n-th of a digit also gets the outline of the n-th of `samples`.
    """
    pipeline.set_progress_bar_config(disable=True)
    jobs = [(label, seed) for label in range(10) for seed in SEEDS]
    outlines = [to_image(ink) for ink in outline(samples.ink)] if is_controlled(name) else []
    images: list[Image.Image] = []
    console = Console(stderr=True)
    for start in track(range(0, len(jobs), BATCH), description=name, console=console):
        batch = jobs[start : start + BATCH]
        options = {"control_image": outlines[start : start + BATCH]} if outlines else {}
        images += pipeline(
            [NEUTRAL_PROMPT if "no digit" in name else canonical_prompt(label) for label, _ in batch],
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed) for _, seed in batch],
            **call_options(pipeline),
            **options,
        ).images
    return images


def measure(judge: Judge, ink: np.ndarray) -> Measurement:
    labels = np.repeat(np.arange(10), len(SEEDS))
    right = judge.read_ink(ink) == labels
    return Measurement(
        accuracy=float(right.mean()),
        accuracy_per_digit=right.reshape(10, -1).mean(axis=1).tolist(),
        ink_area=float(ink_areas(ink).mean()),
        stroke_width=float(np.mean([stroke_width(image) for image in ink])),
    )


def contact_sheet(images: list[Image.Image], scale: int = 3) -> Image.Image:
    """Ten rows, a digit each, enlarged."""
    rows = np.stack([np.asarray(image) for image in images])
    rows = rows.reshape(10, len(SEEDS), IMAGE_SIZE, IMAGE_SIZE, 3).transpose(0, 2, 1, 3, 4)
    sheet = Image.fromarray(rows.reshape(10 * IMAGE_SIZE, len(SEEDS) * IMAGE_SIZE, 3))
    return sheet.resize((sheet.width * scale, sheet.height * scale), Image.Resampling.BICUBIC)


def failures(models: dict[str, Measurement], bold: dict[str, float] | None, overlaps: dict[str, float]) -> list[str]:
    found = [
        f"{name}: accuracy {result.accuracy:.3f}, expected at least {MIN_ACCURACY[name]}"
        for name, result in models.items()
        if result.accuracy < MIN_ACCURACY[name]
    ]
    if bold and not (bold["ink_ratio"] > 1.1 and bold["paired_t"] > 3):
        found.append(f"bold is not bolder: {bold}")
    found += [
        f"{name}: overlap {overlap:.2f} with the digits of the outlines, expected at least {MIN_OVERLAP}"
        for name, overlap in overlaps.items()
        if is_controlled(name) and overlap < MIN_OVERLAP
    ]
    return found


def show(report: dict[str, Any]) -> None:
    table = Table("model", "read by the judge", "ink area", "stroke width")
    table.add_row("real digits (held out)", f"{report['held_out_accuracy']:.1%}", "", "")
    for name, result in report["models"].items():
        width = f"{result['stroke_width']:.2f} px"
        table.add_row(name, f"{result['accuracy']:.1%}", f"{result['ink_area']:.1%}", width)
    Console().print(table)
    if report["bold_against_base"]:
        Console().print("bold against base:", report["bold_against_base"])
    if report["overlap_with_outlined_digits"]:
        Console().print("overlap with the digits of the outlines:", report["overlap_with_outlined_digits"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=MODELS_DIR, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets (PNG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser.parse_args()


def paint_all(arguments: argparse.Namespace, samples: DigitSet) -> dict[str, np.ndarray]:
    """(200, 32, 32) ink for each model asked for; bold and outline bring their base along."""
    names = list(dict.fromkeys(arguments.models))
    if BASES.keys() & names and "digits-flux" not in names:
        names.insert(0, "digits-flux")
    inks = {}
    for name in names:
        images = paint(name, load(name, arguments.folder), arguments.steps, samples)
        inks[name] = ink_of_images(images)
        if arguments.sheets:
            arguments.sheets.mkdir(parents=True, exist_ok=True)
            contact_sheet(images).save(arguments.sheets / f"{name.replace(', ', '-').replace(' ', '-')}.png")
    return inks


def main() -> int:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(arguments.threads)
    train, held_out = load_split()
    judge = Judge(train)
    samples = first_of_each(held_out, len(SEEDS))
    inks = paint_all(arguments, samples)
    models = {name: measure(judge, ink) for name, ink in inks.items()}
    bold = compare_ink(inks["digits-flux"], inks["bold"]) if "bold" in inks else None
    # The base, which sees no outline, is what chance gives.
    compared = [name for name in inks if is_controlled(name)]
    overlaps = {
        name: float(ink_overlaps(inks[name], samples.ink.numpy()).mean())
        for name in (("digits-flux", *compared) if compared else ())
    }
    held_out_right = judge.read_ink(held_out.ink.numpy()) == held_out.labels.numpy()
    report = {
        "held_out_accuracy": float(held_out_right.mean()),
        "models": {name: asdict(result) for name, result in models.items()},
        "bold_against_base": bold,
        "overlap_with_outlined_digits": overlaps,
        "failures": failures(models, bold, overlaps),
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        show(report)
    for failure in report["failures"]:
        print(failure, file=sys.stderr)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
