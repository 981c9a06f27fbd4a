"""Every pipeline class of the installed diffusers, and how it is served: `python infra/supported/pipelines.py`.

The rows come from diffusers' source, by the rules that registration asks; nothing of it is run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.libraries.library_classes import version
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import check_class, class_names
from deployments.engines.stock.text_parts import text_parts

# Classes that the long tests run with tiny random parts beside diffusers, which make the same; families beside them.
COMPARED: Final = (
    "AceStepPipeline",
    "AllegroPipeline",
    "AmusedImg2ImgPipeline",
    "AmusedInpaintPipeline",
    "AmusedPipeline",
    "AnimateDiffControlNetPipeline",
    "AnimateDiffPAGPipeline",
    "AnimateDiffPipeline",
    "AnimateDiffSDXLPipeline",
    "AnimateDiffSparseControlNetPipeline",
    "AnimateDiffVideoToVideoControlNetPipeline",
    "AnimateDiffVideoToVideoPipeline",
    "AnyFlowFARPipeline",
    "AnyFlowPipeline",
    "AudioLDMPipeline",
    "AuraFlowPipeline",
    "BriaFiboEditPipeline",
    "BriaFiboPipeline",
    "BriaPipeline",
    "ChromaImg2ImgPipeline",
    "ChromaInpaintPipeline",
    "ChromaPipeline",
    "ChronoEditPipeline",
    "CogVideoXFunControlPipeline",
    "CogVideoXImageToVideoPipeline",
    "CogVideoXPipeline",
    "CogVideoXVideoToVideoPipeline",
    "CogView3PlusPipeline",
    "CogView4ControlPipeline",
    "CogView4Pipeline",
    "ConsistencyModelPipeline",
    "CycleDiffusionPipeline",
    "DDIMPipeline",
    "DDPMPipeline",
    "DanceDiffusionPipeline",
    "DiTPipeline",
    "DreamLiteMobilePipeline",
    "DreamLitePipeline",
    "ErnieImagePipeline",
    "Flux2KleinInpaintPipeline",
    "Flux2KleinKVPipeline",
    "FluxControlImg2ImgPipeline",
    "FluxControlInpaintPipeline",
    "FluxControlNetImg2ImgPipeline",
    "FluxControlNetInpaintPipeline",
    "FluxControlNetPipeline",
    "FluxControlPipeline",
    "FluxFillPipeline",
    "FluxKontextInpaintPipeline",
    "FluxKontextPipeline",
    "HeliosPipeline",
    "HeliosPyramidPipeline",
    "HiDreamImagePipeline",
    "HunyuanDiTControlNetPipeline",
    "HunyuanDiTPAGPipeline",
    "HunyuanDiTPipeline",
    "HunyuanImagePipeline",
    "HunyuanSkyreelsImageToVideoPipeline",
    "HunyuanVideo15Pipeline",
    "HunyuanVideoFramepackPipeline",
    "HunyuanVideoPipeline",
    "I2VGenXLPipeline",
    "IFImg2ImgPipeline",
    "IFImg2ImgSuperResolutionPipeline",
    "IFInpaintingPipeline",
    "IFInpaintingSuperResolutionPipeline",
    "IFPipeline",
    "IFSuperResolutionPipeline",
    "Ideogram4Pipeline",
    "JoyImageEditPipeline",
    "JoyImageEditPlusPipeline",
    "Kandinsky3Img2ImgPipeline",
    "Kandinsky3Pipeline",
    "Kandinsky5I2VPipeline",
    "Kandinsky5T2VPipeline",
    "KandinskyCombinedPipeline",
    "KandinskyImg2ImgCombinedPipeline",
    "KandinskyInpaintCombinedPipeline",
    "KandinskyV22CombinedPipeline",
    "KandinskyV22Img2ImgCombinedPipeline",
    "KandinskyV22InpaintCombinedPipeline",
    "Krea2Pipeline",
    "LDMPipeline",
    "LDMSuperResolutionPipeline",
    "LDMTextToImagePipeline",
    "LTX2ConditionPipeline",
    "LTX2DFRPipeline",
    "LTX2ImageToVideoPipeline",
    "LTX2InContextPipeline",
    "LTX2LatentUpsamplePipeline",
    "LTX2Pipeline",
    "LTXConditionPipeline",
    "LTXI2VLongMultiPromptPipeline",
    "LTXImageToVideoPipeline",
    "LTXLatentUpsamplePipeline",
    "LTXPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
    "LatentConsistencyModelPipeline",
    "LattePipeline",
    "LongCatAudioDiTPipeline",
    "LongCatImageEditPipeline",
    "LongCatImagePipeline",
    "LucyEditPipeline",
    "Lumina2Pipeline",
    "LuminaPipeline",
    "MochiPipeline",
    "MotifVideoPipeline",
    "NucleusMoEImagePipeline",
    "OvisImagePipeline",
    "PIAPipeline",
    "PNDMPipeline",
    "PRXPipeline",
    "PRXPixelPipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPAGPipeline",
    "PixArtSigmaPipeline",
    "QwenImage21Pipeline",
    "QwenImageControlNetInpaintPipeline",
    "QwenImageControlNetPipeline",
    "QwenImageEditInpaintPipeline",
    "QwenImageLayeredPipeline",
    "RePaintPipeline",
    "SanaControlNetPipeline",
    "SanaImageToVideoPipeline",
    "SanaPAGPipeline",
    "SanaPipeline",
    "SanaSprintImg2ImgPipeline",
    "SanaSprintPipeline",
    "SanaVideoPipeline",
    "ScoreSdeVePipeline",
    "SemanticStableDiffusionPipeline",
    "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    "SkyReelsV2DiffusionForcingPipeline",
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "SkyReelsV2Pipeline",
    "StableAudio3AudioToAudioPipeline",
    "StableAudio3InpaintPipeline",
    "StableAudio3Pipeline",
    "StableAudioPipeline",
    "StableDiffusion3ControlNetInpaintingPipeline",
    "StableDiffusion3ControlNetPipeline",
    "StableDiffusion3PAGImg2ImgPipeline",
    "StableDiffusion3PAGPipeline",
    "StableDiffusionAdapterPipeline",
    "StableDiffusionAttendAndExcitePipeline",
    "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionControlNetPAGInpaintPipeline",
    "StableDiffusionControlNetPAGPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionControlNetXSPipeline",
    "StableDiffusionDepth2ImgPipeline",
    "StableDiffusionGLIGENPipeline",
    "StableDiffusionGLIGENTextImagePipeline",
    "StableDiffusionImageVariationPipeline",
    "StableDiffusionInstructPix2PixPipeline",
    "StableDiffusionLatentUpscalePipeline",
    "StableDiffusionModelEditingPipeline",
    "StableDiffusionPAGImg2ImgPipeline",
    "StableDiffusionPAGInpaintPipeline",
    "StableDiffusionPAGPipeline",
    "StableDiffusionPanoramaPipeline",
    "StableDiffusionParadigmsPipeline",
    "StableDiffusionSAGPipeline",
    "StableDiffusionUpscalePipeline",
    "StableDiffusionXLAdapterPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline",
    "StableDiffusionXLControlNetInpaintPipeline",
    "StableDiffusionXLControlNetPAGImg2ImgPipeline",
    "StableDiffusionXLControlNetPAGPipeline",
    "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLControlNetUnionImg2ImgPipeline",
    "StableDiffusionXLControlNetUnionInpaintPipeline",
    "StableDiffusionXLControlNetUnionPipeline",
    "StableDiffusionXLControlNetXSPipeline",
    "StableDiffusionXLInstructPix2PixPipeline",
    "StableDiffusionXLPAGImg2ImgPipeline",
    "StableDiffusionXLPAGInpaintPipeline",
    "StableDiffusionXLPAGPipeline",
    "StableUnCLIPImg2ImgPipeline",
    "StableUnCLIPPipeline",
    "StableVideoDiffusionPipeline",
    "TextToVideoSDPipeline",
    "TextToVideoZeroPipeline",
    "TextToVideoZeroSDXLPipeline",
    "VersatileDiffusionImageVariationPipeline",
    "VideoToVideoSDPipeline",
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
    "ZImageControlNetInpaintPipeline",
    "ZImageControlNetPipeline",
    "ZImageOmniPipeline",
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
