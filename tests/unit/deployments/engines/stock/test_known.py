"""Pipeline classes are told from diffusers' source as diffusers itself tells them when it is imported."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys

import diffusers
import pytest

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import check_class

CLASSES = sorted(name for name in dir(diffusers) if name.endswith("Pipeline") and not name.startswith("Auto"))


def why_not(class_name: str) -> str:
    with pytest.raises(EngineError) as caught:
        check_class(class_name)
    return str(caught.value)


@pytest.mark.parametrize(
    "class_name", ["PixArtSigmaPipeline", "DiTPipeline", "KandinskyV22CombinedPipeline", "QwenImagePipeline"]
)
def test_what_a_class_needs_is_what_its_signatures_say(class_name: str) -> None:
    cls = getattr(diffusers, class_name)
    found = check_class(class_name)
    components, _ = cls._get_signature_keys(cls)
    assert sorted(found.components) == sorted(set(components) - set(cls._optional_components))
    call = inspect.signature(cls.__call__).parameters.values()
    needed = [one.name for one in call if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    assert ["self", *found.needs] == needed


@pytest.mark.parametrize("names", [[*FAMILIES], pytest.param(CLASSES, marks=pytest.mark.long)], ids=["own", "all"])
def test_most_classes_can_be_told_and_those_of_families_make_images(names: list[str]) -> None:
    served = []
    for name in names:
        try:
            served.append((name, check_class(name)))
        except EngineError:
            continue
    assert len(served) > 150 or names is not CLASSES
    assert set(FAMILIES) <= {name for name, _ in served}


@pytest.mark.parametrize(
    ("class_name", "words"),
    [
        (
            "PixartSigmaPipeline",
            r"diffusers 0.42.1 has no pipeline class 'PixartSigmaPipeline' (near names: PixArtSigmaPipeline",
        ),
        ("os", "has no pipeline class 'os'"),
        ("KandinskyV22PriorPipeline", "KandinskyV22PriorPipeline returns image_embeds; of diffusers' pipelines, those"),
        ("MarigoldDepthPipeline", "MarigoldDepthPipeline returns prediction; of"),
        ("KandinskyV22Pipeline", "needs image_embeds (torch.Tensor | list[torch.Tensor]), which no request can bring"),
    ],
)
def test_classes_that_cannot_be_served_say_why(class_name: str, words: str) -> None:
    assert words in why_not(class_name)


@pytest.mark.parametrize(
    ("class_name", "package"),
    [("Cosmos2TextToImagePipeline", "cosmos_guardrail"), ("OmniGenPipeline", "torchvision")],
)
def test_packages_that_a_class_only_seems_to_do_without_are_needed(
    class_name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else present(name))
    assert why_not(class_name) == f"{class_name} needs {package}, which is not installed here"


def test_a_class_whose_packages_are_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else present(name))
    assert why_not("KolorsPipeline") == "KolorsPipeline needs sentencepiece, which is not installed here"


def test_video_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.util.find_spec
    assert check_class("WanPipeline").makes == "video"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "av" else present(name))
    assert "WanPipeline makes video, which needs the package av" in why_not("WanPipeline")


@pytest.mark.parametrize(
    ("class_name", "makes", "fps"),
    [
        ("WanPipeline", "video", 16),
        ("CogVideoXPipeline", "video", 8),
        ("StableAudioPipeline", "audio", None),
        ("KandinskyV22CombinedPipeline", "images", None),
        ("QwenImagePipeline", "images", None),
    ],
)
def test_what_a_class_makes_and_how_fast_its_example_shows_it(class_name: str, makes: str, fps: int | None) -> None:
    found = check_class(class_name)
    assert (found.makes, found.fps) == (makes, fps)


@pytest.mark.parametrize("class_name", ["WanPipeline", "DiTPipeline", "StableDiffusionPAGPipeline"])
def test_parameters_and_defaults_are_those_of_the_call(class_name: str) -> None:
    found, call = check_class(class_name), inspect.signature(getattr(diffusers, class_name).__call__).parameters
    assert ["self", *found.parameters] == [name for name, one in call.items() if one.kind is not one.VAR_KEYWORD]
    plain = (bool, int, float, str)
    assert found.defaults == {name: one.default for name, one in call.items() if type(one.default) in plain}


def test_base_classes_are_no_pipelines() -> None:
    assert "has no pipeline class 'DiffusionPipeline'" in why_not("DiffusionPipeline")


def test_neither_torch_nor_diffusers_is_needed_to_tell() -> None:
    code = "from deployments.engines.stock.known import check_class; import sys; check_class('SanaPipeline')"
    code += "; sys.exit(', '.join({'torch', 'transformers', 'diffusers'} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
