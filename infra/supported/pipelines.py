"""Every pipeline class of the installed diffusers, and how it is served: `python infra/supported/pipelines.py`.

The rows come from diffusers' source, by the rules that registration asks; nothing of it is run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.library_classes import version
from deployments.engines.protocol import EngineError
from deployments.engines.stock.known import check_class, class_names
from deployments.engines.stock.text_parts import text_parts

# Classes that the long tests run with tiny random parts beside diffusers, which make the same; families beside them.
COMPARED: Final = (
    "AnimateDiffPAGPipeline",
    "AnimateDiffPipeline",
    "AuraFlowPipeline",
    "BriaPipeline",
    "ChromaImg2ImgPipeline",
    "ChromaPipeline",
    "CogVideoXPipeline",
    "CogView3PlusPipeline",
    "CogView4Pipeline",
    "ConsistencyModelPipeline",
    "DDIMPipeline",
    "DDPMPipeline",
    "DanceDiffusionPipeline",
    "DiTPipeline",
    "Flux2KleinInpaintPipeline",
    "FluxKontextInpaintPipeline",
    "FluxKontextPipeline",
    "HunyuanDiTPAGPipeline",
    "HunyuanDiTPipeline",
    "KandinskyV22CombinedPipeline",
    "KandinskyV22Img2ImgCombinedPipeline",
    "LDMTextToImagePipeline",
    "LTXConditionPipeline",
    "LTXImageToVideoPipeline",
    "LTXPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
    "LatentConsistencyModelPipeline",
    "Lumina2Pipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
    "SanaPAGPipeline",
    "SanaPipeline",
    "SemanticStableDiffusionPipeline",
    "StableAudioPipeline",
    "StableDiffusionInstructPix2PixPipeline",
    "StableDiffusionModelEditingPipeline",
    "StableDiffusionPAGImg2ImgPipeline",
    "StableDiffusionPAGInpaintPipeline",
    "StableDiffusionPAGPipeline",
    "StableDiffusionPanoramaPipeline",
    "StableDiffusionSAGPipeline",
    "StableDiffusionXLPAGImg2ImgPipeline",
    "StableDiffusionXLPAGInpaintPipeline",
    "StableDiffusionXLPAGPipeline",
    "WanPipeline",
)


class Row(NamedTuple):
    """A class; how it is served: "batched", "in turns", "in turns, encodes itself" or "refused: why"; what it makes.

    One that "encodes itself" has its text encoders in the worker. What is refused makes "".
    """

    class_name: str
    how: str
    makes: str


def rows() -> Iterator[Row]:
    """Yield a row for each class."""
    for name in class_names():
        try:
            source = check_class(name)
        except EngineError as error:
            yield Row(name, f"refused: {error}", "")
            continue
        how = "batched" if name in FAMILIES else "in turns" if text_parts(name) else "in turns, encodes itself"
        yield Row(name, how, source.makes or "")


def main() -> None:
    """Print the rows and their counts."""
    found = list(rows())
    width = max(len(row.class_name) for row in found)
    for row in found:
        print(f"{row.class_name:{width}}  {row.makes:6}  {row.how}")
    counts = Counter((row.how.partition(":")[0], row.makes) for row in found)
    shown = ", ".join(f"{count} {how} {makes}".rstrip() for (how, makes), count in sorted(counts.items()))
    print(f"diffusers {version('diffusers')}: {len(found)} classes: {shown}", file=sys.stderr)


if __name__ == "__main__":
    main()
