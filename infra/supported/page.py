"""The classes that are served: `python -m infra.supported.page` writes docs/supported.md and the command line's table.

Both come from the tables of this folder. Nothing is run; the long tests run what is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import diffusers
import transformers

from deployments.cli.models import TABLE, SupportedClass, read_table
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.llm.models.stock_classes import SEEING
from deployments.workflows.table import KINDS
from infra.supported import encoders, language_models, pipelines, workflows

PAGE: Final = Path(__file__).parents[2] / "docs" / "supported.md"
_PIPELINES: Final = {
    "batched": "fast path",
    "in turns": "stock path",
    "in turns, encodes itself": "stock path, encodes itself",
}
_LANGUAGE_MODELS: Final = {
    "our decoder": "fast path",
    "paged": "stock path with the paged cache",
    "paged, with states": "stock path with the paged cache and states",
    "own cache": "stock path with its own cache",
    "paged, with eyes": "stock path with the paged cache, sees images",
}
_TITLES: Final[Mapping[str, str]] = {
    "pipeline": "Pipelines of diffusers",
    "language model": "Language models of transformers",
    "encoder": "Encoders of transformers",
    "classifier": "Classifiers and rerankers of transformers",
}
_INTRODUCTION: Final = """# Which classes are served

`python -m infra.supported.page` writes this page for diffusers {diffusers} and transformers {transformers};
`atelier models --supported` prints the same table. For each class marked *equal*, tests compare a tiny random model
with its own library: images, videos and audio of one seed, log probabilities and greedy tokens, vectors and logits
(`make test-long`; the fast path also in `make test`). On the stock path, equal means the last bit, on one thread of a
CPU, beside a pipeline with equally aligned weights without gradients. With other alignment torch rounds otherwise: a
few pixels may differ by one step of 255. Other classes were not run; their rows follow from the library's source.

| way | meaning |
|---|---|
| fast path | our own loop or decoder: requests of one model share forwards |
| stock path with the paged cache | transformers' own code, batched by the scheduler of language models |
| ... and states | the same, with recurrent layers, whose states lie in slots |
| stock path with its own cache | transformers' own code, one sequence at a time |
| stock path | the library's own code: pipelines take turns with others from block to block, the rest run in batches |
| ..., text alone | the decoder of a model that also reads images or sound, which are refused here |
| stock path, encodes itself | the same, with the text encoders in the worker instead of the text encoder service |

Notes:

- FLUX.3 is not served: the installed diffusers has its transformer, and no pipeline class.
- Classes that draw transparency (Qwen-Image 2.1 and Layered) give it in PNG and WebP; a JPEG, a pipeline and `/v2`
  have the colors alone, and a warning.
- `ChromaInpaintPipeline`, and `clip_skip` of classes with a CLIP, fail in the installed diffusers, because an option
  and a module are missing. Here they work as in older versions.
- `LongCatAudioDiTPipeline` has its own scheduler, which diffusers neither saves nor reads. A pipeline built in Python
  with another scheduler gives other audio than its folder.

Classes that were not compared:

- Classes in diffusers' folder `deprecated` with their own parts (`AltDiffusionPipeline`, `UnCLIPPipeline`,
  `PaintByExamplePipeline`, `KarrasVePipeline`, ...): diffusers does not find the parts in a folder.
- `MusicLDMPipeline`: it does not run with the installed transformers.
- `LTX2HDRPipeline` and others with conditions as objects, and the `EasyAnimate` classes with videos as tensors:
  requests bring plain values, images, frames and audio.
- `Kandinsky5T2IPipeline` and `Kandinsky5I2IPipeline`: they draw at least a million pixels, too slow for a test.
- Classes without tiny parts in our tests (`GlmImagePipeline`, `SanaWMPipeline`, ...).

IP-Adapters need the fast path ([how](models.md#ip-adapter)): on the stock path, modules have no place for the
processors of `load_ip_adapter`.
"""


def table() -> Iterator[SupportedClass]:
    """Yield a row for each class, by kind and name."""
    for pipeline in pipelines.rows():
        is_equal = pipeline.class_name in FAMILIES or pipeline.class_name in pipelines.COMPARED
        how = _PIPELINES.get(pipeline.how, pipeline.how)
        yield SupportedClass("pipeline", pipeline.class_name, how, pipeline.makes, is_equal)
    models = {row.class_name: row.way for row in language_models.rows()} | dict.fromkeys(SEEING, "paged, with eyes")
    for name, way in sorted(models.items()):
        way, comma, alone = way.partition(", text alone")
        how = _LANGUAGE_MODELS.get(way, way) + comma + alone
        yield SupportedClass("language model", name, how, "text", not how.startswith("refused"))
    for kind, rows in (("encoder", encoders.ENCODERS), ("classifier", encoders.CLASSIFIERS)):
        for row in sorted(rows, key=lambda one: one.class_name):
            how = f"refused: {row.refused}" if row.refused else "stock path"
            yield SupportedClass(
                kind, row.class_name, how, "vectors" if kind == "encoder" else "scores", not row.refused
            )


def page(rows: Iterable[SupportedClass]) -> str:
    """Return the page of these rows."""
    found = list(rows)
    parts = [_INTRODUCTION.format(diffusers=diffusers.__version__, transformers=transformers.__version__)]
    for kind, title in _TITLES.items():
        own = [row for row in found if row.kind == kind]
        served = [row for row in own if not row.is_refused]
        num_equal = sum(row.is_equal for row in own)
        parts.append(f"\n## {title}\n\n{len(own)} classes: {len(served)} served, {num_equal} of them equal.\n\n")
        lines = [f"| `{row.class_name}` | {row.how} | {row.makes} | {'equal' * row.is_equal} |" for row in served]
        parts.append("\n".join(["| class | way | makes | |", "|---|---|---|---|", *lines]) + "\n")
        if refused := [row for row in own if row.is_refused]:
            lines = [f"| `{row.class_name}` | {_cell(row.why)} |" for row in refused]
            parts.append("\n".join(["", "| refused | why |", "|---|---|", *lines]) + "\n")
    parts.append(_nodes())
    return "".join(parts)


def _nodes() -> str:
    """Return the section of the kinds of nodes that workflows may have."""
    names = ", ".join(f"`{name}`" for name in sorted(KINDS, key=str.lower))
    counts = json.loads(workflows.COUNTS.read_text(encoding="utf-8"))
    return (
        f"\n## Nodes of ComfyUI\n\n[Workflows](workflows.md) may have {len(KINDS)} kinds of nodes: {names}.\n\n"
        "Of ComfyUI's own templates without nodes of paid services, these run over stand-ins of their models' classes\n"
        f"(`python -m infra.supported.workflows`), by the first word of their names:\n\n{workflows.table_of(counts)}"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def text_of(rows: Iterable[SupportedClass]) -> str:
    """Return the table as its file has it: a row a line."""
    values: list[Any] = [list(row) for row in rows]
    return "[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]\n"


if __name__ == "__main__":
    TABLE.write_text(text_of(table()), encoding="utf-8")
    PAGE.write_text(page(read_table()), encoding="utf-8")
