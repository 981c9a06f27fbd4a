"""Models that change images, which a language model sees with the prompt: what they make is what diffusers makes."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import assembled
from kit.tiny.pipelines import make, saved
from kit.tiny.seeing import edit_small_areas, qwen_edit
from unit.deployments.engines.diffusion.reader_pairs import Image, ReaderPair, create_ours

from configs.options import Sampler
from deployments.engines.building.build import build_skeleton
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.footprints import PipelineTwin
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.rows import BatchBounds, memory_kind, parts_of
from deployments.engines.records.protocol import ConditionedRequest, DiffusionRequest, EngineError
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint

EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
SQUARE, WIDE = (64, 64), (64, 128)  # height and width; sides are multiples of 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_pair(class_name: str, folder: Path, **transformer: Any) -> ReaderPair:
    def build() -> Any:
        parts = qwen_edit()
        net = parts["transformer"]
        return assembled(class_name, **parts | {"transformer": type(net).from_config(net.config, **transformer)})

    return ReaderPair(saved(build, folder), folder)


def drawn(height: int, width: int) -> Image:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def request_of(*images: Image, size: tuple[int, int] = SQUARE, **options: Any) -> DiffusionRequest:
    settings = {"request_id": "r", "num_inference_steps": 2, "seed": 7, "guidance_scale": 1.0, "true_cfg_scale": 2.5}
    height, width = size
    return DiffusionRequest(height=height, width=width, references=images, **(settings | options))  # type: ignore[arg-type]


# The transformer of the newer one reads its images as if their time were over.
VARIANTS = {"edit": (EDIT, {}), "plus": (PLUS, {}), "plus of 2511": (PLUS, {"zero_cond_t": True})}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReaderPair:
    class_name, transformer = VARIANTS[request.param]
    return make_pair(class_name, tmp_path_factory.mktemp("pair"), **transformer)


@pytest.fixture
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    edit_small_areas(monkeypatch)


@pytest.mark.drawn
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize(("size", "negative"), [(SQUARE, None), (WIDE, "a dull dog")])
def test_images_are_those_of_stock(pair: ReaderPair, size: tuple[int, int], negative: str | None) -> None:
    images = [drawn(70, 90), drawn(90, 50)][: pair.family.references.most]
    request = request_of(*images, size=size, num_images=2)
    conditioning = pair.conditioning(request, "make it blue", negative)
    stock = pair.stock_run(request, "make it blue", negative)
    pair.assert_equal_to_stock(pair.ours.start_request(request, conditioning), stock)


@pytest.mark.drawn(2)
def test_the_prompt_is_read_with_its_images_as_stock_does(pair: ReaderPair) -> None:
    images = [drawn(48, 48), drawn(48, 96)][: pair.family.references.most]
    request = request_of(*images, true_cfg_scale=1.0)
    seen = [PIL.Image.fromarray(pair.family.references.seen(image)) for image in images]
    for prompt in ("x", "a long text, " * 90):
        (expected, _) = pair.stock.encode_prompt(prompt, image=seen if len(seen) > 1 else seen[0])
        found = pair.conditioning(request, prompt, None)["prompt_embeds"]
        num_tokens = found.shape[1]
        torch.testing.assert_close(found, expected[:, :num_tokens], rtol=1e-4, atol=1e-5)
        # Stock takes any length; here the end of a text beyond 1024 tokens and its images is cut.
        assert num_tokens == expected.shape[1] if prompt == "x" else 1024 < num_tokens < expected.shape[1]


@pytest.mark.drawn
@pytest.mark.usefixtures("small_areas")
def test_a_sampler_over_stocks_levels_makes_stocks_image(pair: ReaderPair) -> None:
    images = [drawn(70, 90), drawn(90, 50)][: pair.family.references.most]
    request = request_of(*images, true_cfg_scale=1.0)
    conditioning = pair.conditioning(request, "make it blue", None)
    stock = pair.stock_run(request, "make it blue", None)
    sigmas = tuple(float(sigma) for sigma in pair.stock.scheduler.sigmas)
    sampler = Sampler(name="euler", sigmas=sigmas)
    sampled = replace(request, sampler=sampler, num_inference_steps=sampler.num_steps)
    pair.assert_equal_to_stock(pair.ours.start_request(sampled, conditioning), stock)


@pytest.mark.usefixtures("small_areas")
def test_the_key_of_an_encoding_tells_what_was_seen(pair: ReaderPair) -> None:
    (item,) = pair.family.texts.plan({}, "x", None, use_negative=False)
    config = pair.encoder.module.config

    def key(image: Image) -> str:
        images = pair.readers.read(pair.folder, config, [image])
        (text,) = pair.encoder.tokenize([item.text], item.max_length, form=item.form, images=images)
        return pair.encoder.variant(text)

    image = drawn(56, 56)
    other = image.copy()
    other[0, 0, 0] ^= 1
    assert key(image) == key(image.copy())
    assert len({key(image), key(other), key(image.reshape(28, 112, 3))}) == 3


@pytest.mark.drawn
@pytest.mark.usefixtures("small_areas")
def test_a_request_has_the_same_bits_in_any_batch(pair: ReaderPair, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded_rng()
    alike = [drawn(64, 64) for _ in range(2)]
    conditioned = {}
    for number in range(6):
        images = [drawn(40, 80)] if number == 5 else alike[number % 2 :][: pair.family.references.most]
        request = request_of(
            *images,
            request_id=f"r{number}",
            seed=int(rng.integers(1 << 30)),
            # What the first and the third are to avoid is the same for both, and so shares a forward.
            true_cfg_scale=2.5 if number in (0, 2) else float(rng.choice([1.0, 2.5])),
            num_inference_steps=int(rng.integers(1, 4)),
        )
        conditioned[f"r{number}"] = ConditionedRequest(request, pair.conditioning(request, "!" * (number + 1), "dull"))
    alone = {name: pair.ours.generate(one.request, one.conditioning) for name, one in conditioned.items()}
    engine, found, widest = DiffusionEngine(pair.ours), {}, 0
    predict = pair.family.network.predict_noise

    def counted(denoiser: Any, rows: Any, size: Any) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, len({row.tobytes() for row in rows.latents.numpy()}))
        return predict(denoiser, rows, size)

    monkeypatch.setattr(pair.family.network, "predict_noise", counted)
    for one in conditioned.values():
        engine.add_request(one)
    while engine.has_work:
        for output in engine.step():
            if output.is_last:
                found[output.request_id] = output.images
    assert widest > 1, "no request shared a forward"
    assert found.keys() == alone.keys()
    assert all(np.array_equal(found[name], alone[name]) for name in alone)


@pytest.mark.usefixtures("small_areas")
def test_where_denoiser_and_vae_are_apart_one_encodes_for_the_other(pair: ReaderPair) -> None:
    request = request_of(drawn(70, 90))
    conditioning = pair.conditioning(request, "x", None)
    told = pair.ours.encode_inputs(request, conditioning, {})
    vae = copy.deepcopy(pair.ours._codec.vae).to("meta")
    blank = DenoisePipeline(pair.family, pair.folder, {"transformer": pair.ours.denoiser, "vae": vae})
    apart, both = blank.start_request(request, conditioning, {}, told), pair.ours.start_request(request, conditioning)
    assert apart.extra_channels is not None
    assert both.extra_channels is not None
    assert torch.equal(apart.extra_channels, both.extra_channels)


@pytest.mark.drawn
def test_what_is_seen_and_encoded_of_an_image_and_the_sides_of_the_result_are_those_of_stock(
    pair: ReaderPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    asked: dict[str, Any] = {}

    def encode_prompt(image: Any, **_: Any) -> tuple[torch.Tensor, None]:
        asked["seen"] = image
        return torch.zeros(1, 4, 16), None

    def prepare_latents(images: Any, count: int, channels: int, height: int, width: int, *_: Any) -> None:
        asked.update(encoded=images, sides=(width, height))
        raise Asked

    monkeypatch.setattr(pair.stock, "encode_prompt", encode_prompt)
    monkeypatch.setattr(pair.stock, "prepare_latents", prepare_latents)
    for height, width in seeded_rng().integers(40, 400, (5, 2)).tolist():
        image = drawn(height, width)
        with pytest.raises(Asked):
            pair.stock(image=PIL.Image.fromarray(image), prompt="x")
        (seen,), (encoded,) = (one if isinstance(one, list) else [one] for one in (asked["seen"], asked["encoded"]))
        assert pair.family.references.sides([image], 64) == asked["sides"]
        assert np.array_equal(pair.family.references.seen(image), np.asarray(seen))
        ours = pair.family.references.encoded(image, 64)
        expected = ((encoded[0, :, 0] + 1) / 2 * 255).round().permute(1, 2, 0)
        assert np.array_equal(ours, expected.numpy())


@pytest.mark.usefixtures("small_areas")
def test_what_cannot_be_changed_is_refused_in_words(pair: ReaderPair) -> None:
    image = drawn(64, 64)
    conditioning = pair.conditioning(request_of(image), "x", None)
    most = pair.family.references.most
    with pytest.raises(EngineError, match=f"0 references, and a {pair.family.class_name} reads 1"):
        pair.ours.start_request(request_of(), conditioning)
    with pytest.raises(EngineError, match=f"{most + 1} references, and a {pair.family.class_name} reads"):
        pair.ours.start_request(request_of(*[image] * (most + 1)), conditioning)
    with pytest.raises(EngineError, match="170x10 pixels: no side may be more than 16 times the other"):
        pair.ours.start_request(request_of(np.zeros((10, 170, 3), np.uint8)), conditioning)
    assert pair.family.references.sides([np.zeros((10, 160, 3), np.uint8)], 64)
    with pytest.raises(EngineError, match="the prompt has 2 tokens that stand for images: it may have none"):
        pair.conditioning(request_of(image), "a <|image_pad|> b <|image_pad|>", None)


@pytest.mark.drawn
@pytest.mark.usefixtures("small_areas")
def test_footprints_are_those_of_a_request_for_an_image_of_the_sides_of_its_reference(pair: ReaderPair) -> None:
    blank = {}
    for name, module in (("transformer", pair.ours.denoiser), ("vae", pair.ours._codec.vae)):
        shapes = {weight: tuple(tensor.shape) for weight, tensor in module.state_dict().items()}
        blank[name] = build_skeleton("diffusers", None, pair.folder / name, shapes).module
    twin = PipelineTwin(pair.family, pair.folder, blank, torch.device("cpu"))
    request = request_of(drawn(64, 64), size=(128, 128))
    conditioning = pair.conditioning(request, "x", None)
    (part,) = parts_of([pair.ours.start_request(request, conditioning)])
    found = twin.footprints(
        128, 128, conditioning["prompt_embeds"].shape[1], BatchBounds(max_rows=2, max_decode_pixels=128 * 128)
    )
    assert memory_kind(part) in found
    alone = twin.record_denoise(128, 128, part.branch.prompt.shape[1], 1).eager_peak()
    assert 0 < alone <= found[memory_kind(part)].bytes_of(1)


def test_only_editing_models_read_references(tmp_path: Path) -> None:
    make("QwenImagePipeline", tmp_path)
    plain = create_ours("QwenImagePipeline", tmp_path)
    with pytest.raises(EngineError, match="1 references, and a QwenImagePipeline reads none"):
        plain.start_request(request_of(drawn(64, 64)), {"prompt_embeds": torch.zeros(1, 4, 16)})
    edits = {"zero_cond_t": True}
    assert plain.family.network.refusal(edits) == "a Qwen-Image transformer for edits is not supported"
    assert family_of(PLUS).network.refusal(edits) is None


def test_what_import_reads_of_it_can_be_served(pair: ReaderPair, tmp_path: Path) -> None:
    assert why_unservable(read_checkpoint(pair.folder)) is None
    without = shutil.copytree(pair.folder, tmp_path / "m")
    for file in (without / "processor").glob("*processor_config.json"):
        file.unlink()
    assert "has no image processor" in (why_unservable(read_checkpoint(without)) or "")


def test_classes_are_those_of_the_installed_diffusers() -> None:
    for name in (EDIT, PLUS):
        stock = assembled(name, **qwen_edit())
        form = family_of(name).texts.encoders(None, "truncate")[0].form
        assert form is not None
        template = form.template
        if name == EDIT:  # whose template has the image
            template = template.replace("{}", form.image.format(image="<|image_pad|>") + "{}")
        assert stock.prompt_template_encode == template
        assert stock.prompt_template_encode_start_idx == form.num_dropped
