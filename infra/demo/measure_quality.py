"""Measure the diffusion demo models with stock pipelines: can a judge read what they paint?

Exit code 1 if a model is read less often than 90 %, bold less than 85 %, or bold is not bolder.
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
from diffusers import DiffusionPipeline, FluxPipeline, StableDiffusionXLPipeline
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from digits import IMAGE_SIZE, Judge, canonical_prompt, ink_of_images, load_split
from ink_statistics import compare_ink, ink_areas, stroke_width
from model_folder import MODELS_DIR

NAMES = ("digits-flux", "digits-flux-inverted", "digits-sdxl", "bold")
MIN_ACCURACY = {name: 0.85 if name == "bold" else 0.90 for name in NAMES}
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
    """Stock loading, float32; bold is digits-flux with the adapter at strength 1."""
    if name == "digits-sdxl":
        return StableDiffusionXLPipeline.from_pretrained(folder / name, torch_dtype=torch.float32)
    base = "digits-flux" if name == "bold" else name
    pipeline = FluxPipeline.from_pretrained(folder / base, torch_dtype=torch.float32)
    if name == "bold":
        pipeline.load_lora_weights(folder / name)
    return pipeline


def call_options(pipeline: DiffusionPipeline) -> dict[str, Any]:
    if isinstance(pipeline, FluxPipeline):
        return {"max_sequence_length": 16, "guidance_scale": 0.0}
    return {"guidance_scale": SDXL_GUIDANCE}


def paint(name: str, pipeline: DiffusionPipeline, steps: int) -> list[Image.Image]:
    """20 pictures of each digit, 0 to 9; the n-th of every digit starts from seed n."""
    pipeline.set_progress_bar_config(disable=True)
    jobs = [(label, seed) for label in range(10) for seed in SEEDS]
    images: list[Image.Image] = []
    console = Console(stderr=True)
    for start in track(range(0, len(jobs), BATCH), description=name, console=console):
        batch = jobs[start : start + BATCH]
        images += pipeline(
            [canonical_prompt(label) for label, _ in batch],
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed) for _, seed in batch],
            **call_options(pipeline),
        ).images
    return images


def measure(judge: Judge, ink: np.ndarray) -> Measurement:
    labels = np.repeat(np.arange(10), len(SEEDS))
    right = judge.read_ink(ink) == labels
    return Measurement(
        accuracy=float(right.mean()),
        accuracy_per_digit=right.reshape(10, -1).mean(axis=1).tolist(),
        ink_area=float(ink_areas(ink).mean()),
        stroke_width=float(np.mean([stroke_width(picture) for picture in ink])),
    )


def contact_sheet(images: list[Image.Image], scale: int = 3) -> Image.Image:
    """Ten rows, a digit each, enlarged."""
    rows = np.stack([np.asarray(image) for image in images])
    rows = rows.reshape(10, len(SEEDS), IMAGE_SIZE, IMAGE_SIZE, 3).transpose(0, 2, 1, 3, 4)
    sheet = Image.fromarray(rows.reshape(10 * IMAGE_SIZE, len(SEEDS) * IMAGE_SIZE, 3))
    return sheet.resize((sheet.width * scale, sheet.height * scale), Image.Resampling.BICUBIC)


def failures(models: dict[str, Measurement], bold: dict[str, float] | None) -> list[str]:
    found = [
        f"{name}: accuracy {result.accuracy:.3f}, expected at least {MIN_ACCURACY[name]}"
        for name, result in models.items()
        if result.accuracy < MIN_ACCURACY[name]
    ]
    if bold and not (bold["ink_ratio"] > 1.1 and bold["paired_t"] > 3):
        found.append(f"bold is not bolder: {bold}")
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=MODELS_DIR, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets (PNG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser.parse_args()


def paint_all(arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    """(200, 32, 32) ink for each model asked for; bold brings its base along."""
    names = list(dict.fromkeys(arguments.models))
    if "bold" in names and "digits-flux" not in names:
        names.insert(0, "digits-flux")
    inks = {}
    for name in names:
        images = paint(name, load(name, arguments.folder), arguments.steps)
        inks[name] = ink_of_images(images)
        if arguments.sheets:
            arguments.sheets.mkdir(parents=True, exist_ok=True)
            contact_sheet(images).save(arguments.sheets / f"{name}.png")
    return inks


def main() -> int:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(arguments.threads)
    train, held_out = load_split()
    judge = Judge(train)
    inks = paint_all(arguments)
    models = {name: measure(judge, ink) for name, ink in inks.items()}
    bold = compare_ink(inks["digits-flux"], inks["bold"]) if "bold" in inks else None
    held_out_right = judge.read_ink(held_out.ink.numpy()) == held_out.labels.numpy()
    report = {
        "held_out_accuracy": float(held_out_right.mean()),
        "models": {name: asdict(result) for name, result in models.items()},
        "bold_against_base": bold,
        "failures": failures(models, bold),
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
