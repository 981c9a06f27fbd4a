"""`infra.bench single-file`: an all-in-one file brought into a store, beside diffusers' `from_single_file`.

The model is of Stable Diffusion 1.5's classes and sizes, with random weights in half precision: 2.1 GB. Its files are
in the page cache, as after a download. `from_single_file` makes modules in memory, each time anew; an import hashes
each byte and writes it, once.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
import transformers
from safetensors.torch import save_file

from deployments.console.output import Column, print_json, print_line, print_table
from infra.bench.original_names import unet_of_ldm, vae_of_ldm
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import externalize
from weights.operations.maintenance import totals
from weights.storage.store import WeightStore

_TOKENIZER: Final = Path(__file__).parents[1] / "demo" / "models" / "digits-sdxl" / "tokenizer"
_TEXT: Final = "cond_stage_model.transformer."
_LAYERS: Final = 2  # of a block of the UNet


@dataclass(frozen=True, slots=True)
class Sizes:
    """The widths of a Stable Diffusion's blocks and text encoder; those of 1.5 without any."""

    unet: tuple[int, ...] = (320, 640, 1280, 1280)
    vae: tuple[int, ...] = (128, 256, 512, 512)
    text: int = 768
    text_layers: int = 12


def measure_single_file(sizes: Sizes, seed: int, rounds: int) -> dict[str, Any]:
    """Return bytes, and medians of seconds on the wall and of the processor, each way in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-single-file-") as name:
        folder = Path(name)
        file = _write_model(folder, sizes, seed)
        ways: dict[str, Callable[[], Any]] = {
            "import": lambda: _import_alone(folder, file),
            "import beside the folder form": lambda: _import_beside(folder, file),
            "from_single_file": lambda: _load_stock(folder, file),
        }
        _import_folder(folder)
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        found: dict[str, Any] = {}
        for _ in range(rounds):
            for way, run in ways.items():
                gc.collect()
                begun = time.perf_counter(), time.process_time()
                found[way] = run()
                seconds[way].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
        return {
            "file_bytes": file.stat().st_size,
            "added_bytes": found["import beside the folder form"],
            "ways": [
                {
                    "way": way,
                    "wall_s": statistics.median(wall for wall, _ in times),
                    "processor_s": statistics.median(cpu for _, cpu in times),
                }
                for way, times in seconds.items()
            ],
        }


def _write_model(folder: Path, sizes: Sizes, seed: int) -> Path:
    """Write a random model as a folder, as its configs alone, and as one file, which is returned."""
    pipeline = _pipeline(sizes, seed)
    pipeline.save_pretrained(folder / "folder")
    shutil.copytree(folder / "folder", folder / "configs", ignore=shutil.ignore_patterns("*.safetensors"))
    text = pipeline.text_encoder.state_dict()
    prefix = _TEXT if any(key.startswith("text_model.") for key in text) else f"{_TEXT}text_model."
    tensors = (
        unet_of_ldm(pipeline.unet.state_dict(), layers_per_block=_LAYERS)
        | vae_of_ldm(pipeline.vae.state_dict(), num_blocks=len(sizes.vae))
        | {prefix + key: tensor for key, tensor in text.items()}
    )
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "all-in-one.safetensors")
    return folder / "all-in-one.safetensors"


def _pipeline(sizes: Sizes, seed: int) -> Any:
    last = len(sizes.unet) - 1
    config = transformers.CLIPTextConfig(
        hidden_size=sizes.text,
        intermediate_size=4 * sizes.text,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=sizes.text // 64,
        projection_dim=sizes.text,
    )
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=sizes.unet,
            down_block_types=("CrossAttnDownBlock2D",) * last + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * last,
            layers_per_block=_LAYERS,
            cross_attention_dim=sizes.text,
        )
        vae = diffusers.AutoencoderKL(
            block_out_channels=sizes.vae,
            down_block_types=("DownEncoderBlock2D",) * len(sizes.vae),
            up_block_types=("UpDecoderBlock2D",) * len(sizes.vae),
            layers_per_block=2,
        )
        text = transformers.CLIPTextModel(config)
    torch.manual_seed(seed)
    return diffusers.StableDiffusionPipeline(
        unet=_filled(unet),
        vae=_filled(vae),
        text_encoder=_filled(text),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(_TOKENIZER),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _filled(module: Any) -> Any:
    """Give a module of `meta` random weights in half precision."""
    module = module.half().to_empty(device="cpu").eval().requires_grad_(False)
    for weights in module.parameters():
        weights.normal_(0, 0.02)
    return module


def _import_folder(folder: Path) -> None:
    externalize(WeightStore(folder / "store"), "folder", folder / "folder")


def _import_alone(folder: Path, file: Path) -> None:
    """Bring the file into a store that has nothing."""
    shutil.rmtree(folder / "other", ignore_errors=True)
    store = WeightStore(folder / "other")
    externalize(store, "file", file, like=open_base(folder / "configs", store))


def _import_beside(folder: Path, file: Path) -> int:
    """Bring the file into a store that has the folder form, for the first time each time; return the bytes added."""
    store = WeightStore(folder / "store")
    before, name = totals(store).stored_bytes, f"file-{time.monotonic_ns()}"
    externalize(store, name, file, like=open_base("folder", store))
    return totals(store).stored_bytes - before


def _load_stock(folder: Path, file: Path) -> None:
    diffusers.StableDiffusionPipeline.from_single_file(
        str(file), config=str(folder / "configs"), torch_dtype=torch.float16, local_files_only=True, safety_checker=None
    )


def print_single_file_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of ways, or one JSON object."""
    if as_json:
        print_json(figures)
        return
    columns = [Column("way"), Column("wall s", align="right"), Column("processor s", align="right")]
    rows = [(row["way"], f"{row['wall_s']:.2f}", f"{row['processor_s']:.2f}") for row in figures["ways"]]
    print_table(columns, rows, title=f"an all-in-one file of {figures['file_bytes'] / 1e9:.2f} GB")
    share = figures["added_bytes"] / figures["file_bytes"]
    print_line(f"bytes that it adds to a store with the folder form: {figures['added_bytes']:,} ({share:.2%})")
