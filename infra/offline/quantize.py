"""`atelier quantize`: a Hugging Face folder in a smaller form, and what that has cost."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.filesize import decimal

from deployments.cli.weights import DEFAULT_STORE, StorePath, working_folder
from deployments.console.output import Column, Json, OptionError, Wide, print_json, print_line, print_table
from deployments.console.progress import OnProgress, progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from infra.offline.folders import QuantizationReport, QuantizedTensor
    from infra.offline.fp8_pipeline import Scales

app = typer.Typer()


_FormName = Literal[
    "kuiper-int8",
    "gguf-f32",
    "gguf-f16",
    "gguf-bf16",
    "gguf-q8_0",
    "gguf-q4_0",
    "int8-group",
    "fp8-row",
    "fp8-tensor",
]
_OF_PIPELINES: Final = ("fp8-row", "fp8-tensor")
_MAX_TEXT_BYTES: Final = 64 * 2**20
_COLUMNS: Final = (
    Column("tensor", "name"),
    Column("type"),
    Column("elements", align="right"),
    Column("bits", align="right"),
    Column("rms error", align="right"),
    Column("max error", align="right"),
    Column("note", "text"),
)


@app.command()
def quantize(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face folder: a language model's or, for fp8, a pipeline's.")
    ],
    target: Annotated[Path, typer.Argument(help="A new file for GGUF, a new folder for the other forms.")],
    to: Annotated[_FormName, typer.Option("--to", help="The form; int8-group and fp8 keep Hugging Face's names.")],
    group_size: Annotated[int, typer.Option(help="Elements with one scale, in both int8 forms.")] = 64,
    text: Annotated[Path | None, typer.Option(help="A text to measure the change of perplexity on.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="How much of that text is read.")] = 4096,
    prompt: Annotated[list[str], typer.Option(help="Measure the change of its image, for fp8; repeatable.")] = [],  # noqa: B006
    size: Annotated[int | None, typer.Option(min=8, help="Pixels of these images' sides.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of these images.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Also import it into the store, by this name.")
    ] = None,
    store: StorePath = DEFAULT_STORE,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Write a language model, or a pipeline's denoiser (fp8), in a smaller form, and say what that has cost."""
    source, target = source.expanduser(), target.expanduser()
    if text is not None and to in _OF_PIPELINES:
        raise OptionError(f"--text: perplexity is a language model's, and {to} is for pipelines")
    if prompt and to not in _OF_PIPELINES:
        raise OptionError(f"--prompt: {to} is for language models, which make no images")
    content = None if text is None else _read_text(text.expanduser())
    # Before the long work: it tells too whether the engine knows such a model, and whether the text is one.
    before = None if content is None else _perplexity("before", source, content, max_tokens, as_json)
    with progress_bar("quantize", "share", quiet=as_json) as progress:
        report = _quantized(source, target, to, group_size, progress)
    record: dict[str, Any] = {
        "source": str(source),
        "target": str(target),
        "form": to,
        "bits_per_weight": report.bits_per_weight,
        "nbytes": _nbytes(target),
        "tensors": [asdict(tensor) for tensor in report.tensors],
    }
    if content is not None and before is not None:
        after = _perplexity("after", target, content, max_tokens, as_json)
        record["perplexity"] = {"before": before, "after": after, "change": after / before - 1}
    if prompt:
        with progress_bar("images", "steps", quiet=as_json) as progress:
            record["images"] = _image_change(source, target, prompt, size, steps, progress)
    if model is not None:
        record["model"] = _import_into_store(target, model, store)
    if as_json:
        print_json(record)
        return
    matrices = [tensor for tensor in report.tensors if wide or tensor.note or tensor.kind not in ("F32", "BF16", "F16")]
    print_table(_COLUMNS, [_row(tensor) for tensor in matrices], wide=wide)
    print_line(f"{target}: {decimal(record['nbytes'])}, {report.bits_per_weight:.2f} bits per weight")
    if content is not None:
        print_line(_perplexity_line(record["perplexity"]))
    if prompt:
        print_line(_images_line(record["images"]))


def _quantized(
    source: Path, target: Path, to: _FormName, group_size: int, progress: Callable[[int, int], None]
) -> QuantizationReport:
    if to != "fp8-row" and to != "fp8-tensor":
        from infra.offline.checkpoints import quantize_checkpoint

        return quantize_checkpoint(source, target, to, group_size=group_size, progress=progress)
    from deployments.engines.diffusion.families import family_of
    from deployments.engines.records.protocol import EngineError
    from infra.offline.fp8_pipeline import export_fp8
    from weights.formats.folder import read_json

    class_name = read_json(source / "model_index.json").get("_class_name")
    try:
        family = family_of(str(class_name))
    except EngineError as error:
        raise OptionError(f"--to {to}: {source}: {error}") from None
    scales: Scales = "row" if to == "fp8-row" else "tensor"
    return export_fp8(source, target, family.denoiser_name, family.network.keeps_precision, scales, progress)


def _row(tensor: QuantizedTensor) -> list[str]:
    errors = [f"{error:.2%}" for error in (tensor.rms_error, tensor.max_error)]
    return [tensor.name, tensor.kind, f"{tensor.num_elements:,}", f"{tensor.bits_per_weight:.2f}", *errors, tensor.note]


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text: {file} cannot be read as text: {error}") from None


def _perplexity(when: str, model: Path, text: str, max_tokens: int, as_json: bool) -> float:
    """Return the perplexity under a checkpoint as it is, with products in float32."""
    from deployments.engines.llm.perplexity import perplexity
    from deployments.engines.records.protocol import EngineError
    from weights.loading.views import mapped_tensors

    with tempfile.TemporaryDirectory() as alone, progress_bar(f"perplexity {when}", "share", quiet=as_json) as progress:
        if model.is_file():  # the engine takes all GGUF files of a folder for one model
            link = Path(alone) / model.name
            link.symlink_to(model.resolve())
            model = link
        folder, tensors, _ = mapped_tensors(model)
        try:
            return perplexity(folder, tensors, text, max_tokens=max_tokens, progress=progress)
        except EngineError as error:
            raise OptionError(f"--text: {error}") from error


def _perplexity_line(found: dict[str, Any]) -> str:
    return f"perplexity: {found['before']:.4f} before, {found['after']:.4f} after ({found['change']:+.2%})"


def _image_change(
    source: Path, target: Path, prompts: Sequence[str], size: int | None, steps: int | None, progress: OnProgress
) -> dict[str, Any]:
    """Make an image of each prompt, with equal seeds, by both pipelines; return how far they are apart, of 255.

    The store is beside the target: both pipelines lie in it for a while, what they share once.
    """
    import numpy as np

    from configs.cluster import ClusterConfig
    from deployments.local import LocalModels
    from deployments.records import ImageRequest

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".images-") as store:
        models = [{"id": name, "path": str(path.resolve())} for name, path in (("before", source), ("after", target))]
        local = LocalModels(ClusterConfig.model_validate({"store": {"path": store}, "models": models}))

        def images(model: str) -> npt.NDArray[np.float64]:
            asked = {"width": size, "height": size, "num_inference_steps": steps}
            found = []
            for number, prompt in enumerate(prompts):
                request = ImageRequest(model=model, prompt=prompt, seed=number, **asked)
                found.append(local.generate(request).images[0])
                progress(len(found) + (len(prompts) if model == "before" else 0), 2 * len(prompts))
            return np.stack(found).astype(np.float64)

        difference = np.abs(images("after") - images("before"))
    mean_square = float(np.square(difference).mean())
    return {
        "num_images": len(prompts),
        "psnr_db": 10 * math.log10(255**2 / mean_square) if mean_square else None,
        "mean_difference": float(difference.mean()),
        "max_difference": int(difference.max()),
    }


def _images_line(found: dict[str, Any]) -> str:
    psnr = "equal" if found["psnr_db"] is None else f"PSNR {found['psnr_db']:.1f} dB"
    mean, most = found["mean_difference"], found["max_difference"]
    return f"images of {found['num_images']} prompts: {psnr}, apart by {mean:.2f} of 255 in the mean, {most} at most"


def _import_into_store(target: Path, model: str, store: Path) -> str:
    from weights.operations.intake import import_model
    from weights.storage.store import WeightStore

    with working_folder(None) as folder:
        import_model(WeightStore(store.expanduser()), model, target.resolve(), weight_dir=folder)
    return model


def _nbytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
