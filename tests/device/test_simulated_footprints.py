"""Predicted peaks beside those that a simulated device has counted: never below, and hardly above."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("diffusers")

from kit.device_memory import peak_of
from unit.deployments.engines.diffusion import conftest as tiny
from unit.deployments.engines.diffusion import test_prompt_readers as readers
from unit.deployments.engines.diffusion.control_nets import flux_union, t2i_adapter, union
from unit.deployments.engines.diffusion.ip_adapter_files import Kind, write_ip_adapter
from unit.deployments.engines.diffusion.test_controlnets import make_net
from unit.deployments.engines.diffusion.test_image_prompts import opened
from unit.deployments.engines.upscaler_files import compact, rrdb

from deployments.engines.building.build import build_skeleton
from deployments.engines.diffusion.footprints import PipelineTwin
from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.diffusion.rows import adapter_names, parts_of
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.graph.recording import Recorder, fake_weights, record
from deployments.engines.graph.workspace import Workspace
from deployments.engines.llm.engine import plan_runner
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.footprints import StepTwin
from deployments.engines.llm.models.registry import create_any_model, load_config
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE
from deployments.engines.llm.sequences.sequence import Chunk
from deployments.engines.llm.sequences.sequence import Sequence as TokenSequence
from deployments.engines.nn.lora import fit_pairs
from deployments.engines.records.protocol import ControlUse, DiffusionRequest, ImagePromptUse
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.footprints import EncoderTwin, TextFootprints
from deployments.engines.text.forward_plan import EncodeCounter, ForwardLimits
from deployments.engines.text.forwards import text_kind
from deployments.engines.text.tokens import TokenizedText
from deployments.engines.upscaling import build_upscaler, pixel_bytes
from infra.supported.language_models import save_tiny, tiny_model
from weights.formats.own_draft import PREFIX
from weights.memory.device_arena import DeviceArena
from weights.operations.adapters import LoraPair
from weights.platform.torch_seam import fake_mode

pytestmark = pytest.mark.usefixtures("no_garbage")

MOST_ROWS = 24
SHAPES = ((64, 96, 32), (32, 32, 64), (96, 64, 96))  # height, width, tokens
MAKERS: dict[str, Callable[[Path], Any]] = {
    "flux": tiny.make_flux,
    "sdxl": tiny.make_sdxl,
    "stable_diffusion": tiny.make_stable_diffusion,
    "inpainting": lambda folder: tiny.make_stable_diffusion(folder, in_channels=9),
    "stable_diffusion_3": tiny.make_stable_diffusion_3,
    **{name: lambda folder, name=name: readers.make_pair(name, folder) for name in readers.CLASSES},
}


QUICK = ("sdxl", "ZImagePipeline")
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in MAKERS]
SIZES = [pytest.param(shape, marks=pytest.mark.long if number else ()) for number, shape in enumerate(SHAPES)]


@pytest.fixture(scope="module", params=FAMILIES)
def pipelines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[DenoisePipeline, PipelineTwin]:
    """Return a tiny random pipeline of a family on the device, and its twin."""
    folder = tmp_path_factory.mktemp("pipeline")
    ours = MAKERS[request.param](folder).ours
    modules = {ours.family.denoiser_name: ours.denoiser, "vae": ours._codec.vae}
    blank = {}
    for name, module in modules.items():
        shapes = {weight: tuple(tensor.shape) for weight, tensor in module.state_dict().items()}
        blank[name] = build_skeleton("diffusers", None, folder / name, shapes).module
        torch.nn.Module.to(module, device)
    on_device = create_pipeline(ours.family.class_name, folder, modules, device=device)
    return on_device, PipelineTwin(ours.family, folder, blank, device)


def conditioning(pipeline: DenoisePipeline, length: int) -> dict[str, torch.Tensor]:
    width, pooled = pipeline.family.network.text_widths(pipeline.denoiser)
    tensors = {"prompt_embeds": torch.randn(1, length, width)}
    return tensors | ({} if pooled is None else {"pooled_prompt_embeds": torch.randn(1, pooled)})


def begin(pipeline: DenoisePipeline, height: int, width: int, length: int, count: int) -> list[DenoiseState]:
    """Return requests for an image each."""
    options: dict[str, Any] = {"num_inference_steps": 20, "guidance_scale": 0.0}
    if pipeline.family.network.num_extra_channels(pipeline.denoiser.config):
        mask = np.full((height, width), 255, np.uint8)
        options |= {"init_image": np.zeros((height, width, 3), np.uint8), "mask_image": mask, "strength": 1.0}
    return [
        pipeline.start_request(
            DiffusionRequest(str(n), height=height, width=width, seed=n, **options), conditioning(pipeline, length)
        )
        for n in range(count)
    ]


@pytest.mark.drawn
@pytest.mark.parametrize("shape", SIZES)
def test_denoisers(
    pipelines: tuple[DenoisePipeline, PipelineTwin], device: torch.device, shape: tuple[int, int, int]
) -> None:
    pipeline, twin = pipelines
    height, width, length = shape
    found = None
    for rows in (1, 2, random.randint(3, MOST_ROWS - 1), MOST_ROWS):
        parts = parts_of(begin(pipeline, height, width, length, rows))
        padded = parts[0].branch.prompt.shape[1]
        found = found or twin.denoise_footprint(height, width, padded, MOST_ROWS)
        measured = peak_of(device, lambda parts=parts: pipeline._predict(parts))
        is_recorded = rows in (1, 2, MOST_ROWS)
        assert 1.0 <= found.bytes_of(rows) / measured <= (1.01 if is_recorded else 1.05), (rows, measured, found)


@pytest.mark.drawn
@pytest.mark.parametrize("shape", SIZES)
def test_loras(
    pipelines: tuple[DenoisePipeline, PipelineTwin], device: torch.device, shape: tuple[int, int, int]
) -> None:
    """Those of all rows take what was predicted, and those of some rows less."""
    pipeline, twin = pipelines
    height, width, length = shape
    layers = [(path, one) for path, one in pipeline.denoiser.named_modules() if type(one).__name__.endswith("Linear")]
    pairs = {
        path: LoraPair(torch.randn(rank, one.in_features), torch.randn(one.out_features, rank), 1.0)
        for (path, one), rank in zip(layers, itertools.cycle((4, 16)))
        if random.random() < 0.7 and "embed" not in path
    }
    fitted, shapes = (
        fit_pairs(pipeline.denoiser, pairs),
        [("style", {path: one.to("meta") for path, one in pairs.items()})],
    )
    found = None
    for rows, num_adapted in ((1, 1), (2, 2), (7, 7), (7, 3)):
        states = begin(pipeline, height, width, length, rows)
        padded = states[0].branches[0].prompt.shape[1]
        found = found or twin.denoise_footprint(height, width, padded, 7, shapes)
        for state in states[:num_adapted]:
            state.adapters = ((fitted, 0.7),)
        measured = peak_of(device, lambda states=states: pipeline._predict(parts_of(states)))
        assert 1.0 <= found.bytes_of(rows) / measured <= (1.01 if num_adapted == rows else 2.0), (rows, num_adapted)


CONTROLLED = [one for one in FAMILIES if one.values[0] in ("flux", "sdxl", "stable_diffusion", "inpainting")]
PROMPTED = [one for one in CONTROLLED if one.values[0] != "flux"]


def begin_adapted(
    pipeline: DenoisePipeline, shape: tuple[int, int, int], counts: Sequence[int], adapters: Any, **uses: Any
) -> list[DenoiseState]:
    """Return requests with adapters for so many images each."""
    plain = begin(pipeline, *shape, 1)[0].request
    return [
        pipeline.start_request(replace(plain, num_images=n, **uses), conditioning(pipeline, shape[2]), adapters)
        for n in counts
    ]


@pytest.mark.parametrize("pipelines", CONTROLLED, indirect=True)
@pytest.mark.parametrize("shape", SIZES)
def test_control_nets(
    pipelines: tuple[DenoisePipeline, PipelineTwin], device: torch.device, shape: tuple[int, int, int]
) -> None:
    """One, and two of which one acts from the fifth step of twenty on: until then less is taken.

    So do several images of a request, whose texts are one.
    """
    pipeline, twin = pipelines
    pair = SimpleNamespace(ours=pipeline)
    nets = {name: torch.nn.Module.to(make_net(pair, seed), device) for seed, name in enumerate("ab")}
    image = np.zeros((*shape[:2], 3), np.uint8)
    one, later = ControlUse("a", image), ControlUse("b", image, start=0.2)
    for uses in ((one,), (one, later)):
        found = None
        for counts, step in (([1], 4), ([1] * 2, 4), ([1] * 7, 4), ([7], 4), ([1] * 7, 0)):
            states = begin_adapted(pipeline, shape, counts, nets, control=uses)
            shapes = pipeline.adapter_shapes(states[0].request, nets)
            assert [name for name, _ in shapes] == list(adapter_names(states[0].request))
            found = found or twin.denoise_footprint(*shape, 7, shapes)
            for state in states:
                state.step_index = step
            measured = peak_of(device, lambda states=states: pipeline._predict(parts_of(states)))
            most = 1.01 if len(states[0].acting_controls) == len(uses) else 1.15
            most = most if len(counts) == sum(counts) else 1.6  # the host computes once ahead what is of their text
            assert 1.0 <= found.bytes_of(sum(counts)) / measured <= most, (uses, counts, step)
        (plain,) = begin(pipeline, *shape, 1)
        assert found is not None
        assert found.bytes_of(1) > peak_of(device, lambda plain=plain: pipeline._predict(parts_of([plain])))


@pytest.mark.drawn
@pytest.mark.parametrize("pipelines", [one for one in CONTROLLED if one.values[0] in ("flux", "sdxl")], indirect=True)
@pytest.mark.parametrize("shape", SIZES)
def test_unions_and_t2i_adapters(
    pipelines: tuple[DenoisePipeline, PipelineTwin], device: torch.device, shape: tuple[int, int, int]
) -> None:
    """Several modes take what was predicted; a T2I-Adapter computes before the first step."""
    pipeline, twin = pipelines
    is_flux = hasattr(pipeline.denoiser, "single_transformer_blocks")
    made = {"u": flux_union(pipeline.denoiser) if is_flux else union(pipeline.denoiser)}
    made |= {} if is_flux else {"t": t2i_adapter("full_adapter_xl", (8, 16))}
    nets = {name: torch.nn.Module.to(net, device) for name, net in made.items()}
    image = np.zeros((*shape[:2], 3), np.uint8)
    for name in nets:
        found = None
        for count in (1, 2, 7):
            states = [
                begin_adapted(pipeline, shape, [1], nets, control=(ControlUse(name, image, mode=mode),))[0]
                for mode in ([place % 3 for place in range(count)] if name == "u" else [None] * count)
            ]
            shapes = pipeline.adapter_shapes(states[0].request, nets)
            found = found or twin.denoise_footprint(*shape, 7, shapes)
            measured = peak_of(device, lambda states=states: pipeline._predict(parts_of(states)))
            assert 1.0 <= found.bytes_of(count) / measured <= 1.6, (name, count)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("pipelines", "kind"),
    [
        *((one.values[0], kind) for one in PROMPTED for kind in ("plain", "plus", "full")),
        ("flux", "flux"),
    ],
    indirect=["pipelines"],
)
@pytest.mark.parametrize("shape", SIZES)
def test_images_as_prompts(
    pipelines: tuple[DenoisePipeline, PipelineTwin],
    device: torch.device,
    shape: tuple[int, int, int],
    kind: Kind,
    tmp_path: Path,
) -> None:
    """Requests for an image each take what was predicted, and those for several no more."""
    pipeline, twin = pipelines
    own = opened(write_ip_adapter(tmp_path / "a", pipeline.denoiser, kind))
    tensors = {name: tensor.to(device) for name, tensor in own.tensors.items()}
    adapters = {"a": replace(own, encoder=torch.nn.Module.to(own.encoder, device), tensors=tensors)}
    uses = (ImagePromptUse("a", np.zeros((8, 8, 3), np.uint8)),)
    found = None
    for counts in ([1], [1] * 2, [1] * 7, [7], [3, 4]):
        states = begin_adapted(pipeline, shape, counts, adapters, image_prompts=uses)
        length, shapes = (
            states[0].branches[0].prompt.shape[1],
            pipeline.adapter_shapes(states[0].request, adapters),
        )
        found = found or twin.denoise_footprint(*shape[:2], length, 7, shapes)
        measured = peak_of(device, lambda states=states: pipeline._predict(parts_of(states)))
        most = 1.01 if len(counts) == sum(counts) else 2.0
        assert 1.0 <= found.bytes_of(sum(counts)) / measured <= most, (counts, measured, found)


@pytest.mark.drawn
@pytest.mark.parametrize("shape", SIZES)
def test_vaes(
    pipelines: tuple[DenoisePipeline, PipelineTwin], device: torch.device, shape: tuple[int, int, int]
) -> None:
    pipeline, twin = pipelines
    height, width, length = shape
    found = twin.decode_footprint(height, width, MOST_ROWS)
    for rows in (1, 3, 7):
        latents = [state.latents for state in begin(pipeline, height, width, length, rows)]
        images = torch.cat(latents)
        measured = peak_of(
            device, lambda images=images: pipeline._codec.decode(pipeline._decoder.latent_images(images, height, width))
        )
        assert 1.0 <= found.bytes_of(rows) / measured <= 1.01, (rows, measured, found)


@pytest.mark.parametrize("shape", SIZES)
def test_what_a_pixel_takes_chooses_tiles(
    pipelines: tuple[DenoisePipeline, PipelineTwin], device: torch.device, shape: tuple[int, int, int]
) -> None:
    """An image goes in one piece up to the bytes that it was measured to take, and a hundredth more for its shape.

    What is no larger than a tile goes in one piece whatever it takes.
    """
    codec, (height, width, _) = pipelines[0]._codec, shape
    if max(height, width) <= (codec.vae.config.get("sample_size") or 0):
        assert not ImageCodec(codec.vae, 1)._is_large(codec.vae, height, width)
        return
    latents = torch.cat([one.latents for one in begin(pipelines[0], height, width, 32, 1)])
    images = pipelines[0]._decoder.latent_images(latents, height, width)
    measured = peak_of(device, lambda: codec.pixels(images))
    assert ImageCodec(codec.vae, measured * 0.98)._is_large(codec.vae, height, width)
    assert not ImageCodec(codec.vae, measured * 1.02)._is_large(codec.vae, height, width)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tensors", [rrdb(), rrdb(ups=1), rrdb(num_read=12), compact()])
def test_upscalers(device: torch.device, tensors: dict[str, torch.Tensor]) -> None:
    module = torch.nn.Module.to(build_upscaler(Path("x"), tensors), device)
    image = torch.rand(1, 3, 96, 128, device=device)
    measured = peak_of(device, lambda: module(image))
    assert 0.99 <= pixel_bytes(module) * 96 * 128 / measured <= 1.02


def test_a_device_without_its_index_is_the_current_one(device: torch.device) -> None:
    module, mode = torch.nn.Linear(8, 8), fake_mode()
    fake_weights(module, mode, device)
    with mode:
        given = torch.empty(64, 8, device=device)
    found = [
        record(lambda: module(given), Recorder(named, is_fake=True), {}, mode).eager_peak()
        for named in (device, torch.device(device.type))
    ]
    assert found == [64 * 8 * 4] * 2


# text encoders, as `encode_each` runs them


class NoTokenizer:
    """A tokenizer whose texts have their ids already, as far as a text encoder asks."""

    model_max_length, pad_token_id, padding_side = 512, 0, "right"


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["T5EncoderModel", "CLIPTextModel", "CLIPTextModelWithProjection", "BertModel"])
def test_text_encoders(device: torch.device, name: str) -> None:
    """A length that was recorded has its bytes; one between two of them a little more, never less.

    A mask is counted that stock leaves out for texts of one length.
    """
    encoder = TextEncoder(torch.nn.Module.to(small(name, 256), device), NoTokenizer())
    footprints = TextFootprints(lambda: EncoderTwin(small(name, 256), device))
    for texts, tokens in ((1, 77), (3, 64), (13, 96), (20, 32), (random.randint(2, 9), random.randint(33, 127))):
        ids = [TokenizedText((3,) * (tokens - at % 2)) for at in range(texts)]
        measured = peak_of(device, lambda ids=ids: encoder.encode_each(ids, limits=ForwardLimits(max_padding=0.9)))
        for is_padded, most in ((True, 1.01 if texts > 1 else 1.03), (False, 1.12)):
            found = footprints.get(text_kind(tokens, is_padded=is_padded))
            assert found is not None
            assert 1.0 <= found.bytes_of(texts) / measured <= most, (texts, tokens, is_padded, measured)


def test_forwards_of_texts_are_as_large_as_their_room(device: torch.device) -> None:
    module = torch.nn.Module.to(small("BertModel", 256), device)
    footprints = TextFootprints(lambda: EncoderTwin(small("BertModel", 256), device))
    footprints.learn_default()
    kind = text_kind(64, is_padded=True)
    found = footprints.get(kind)
    assert found is not None
    texts, counter = [TokenizedText((3,) * 64, padded_length=64) for _ in range(8)], EncodeCounter()
    memory = DeviceArena(str(device), found.bytes_of(3) + 512).forwards
    memory._beside_bytes = 0.0  # as on a device without other memory
    TextEncoder(module, NoTokenizer()).encode_each(texts, counter=counter, workspace=Workspace(memory, footprints))
    assert counter.encode_stats().max_texts == 3
    assert footprints.least_bytes > found.bytes_of(1)  # of a text as long as it reads


# language models


@pytest.mark.drawn
@pytest.mark.parametrize("context", [64, 256])
def test_steps_of_a_language_model(device: torch.device, tmp_path: Path, context: int) -> None:
    """Prompts, completions and both, at the longest texts there are."""
    module = small("LlamaForCausalLM", 128)
    module.save_pretrained(tmp_path)
    weights = {name: tensor.to(device) for name, tensor in module.state_dict().items()}
    config = LLMEngineConfig(device=device, max_num_seqs=7, max_num_batched_tokens=96, max_model_len=context)
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    twin = StepTwin(tmp_path, forms, config)
    runner = plan_runner(create_any_model(load_config(tmp_path), weights, device), config)[1]
    largest = twin.step_bytes()
    last = context - 1, context
    for step in ([(0, 48)], [(context - 60, context)], [last] * 7, [(9, 10)] * 3 + [(context - 40, context)]):
        chunks = []
        for start, end in step:
            num_prompt_tokens, blocks = end if end - start > 1 else start, list(range(-(-end // BLOCK_SIZE)))[::-1]
            sequence = TokenSequence("s", [3] * end, num_prompt_tokens, block_table=blocks)
            chunks.append(Chunk(sequence, start, end, is_last=True))
        measured = peak_of(device, lambda chunks=chunks: runner.run(chunks))
        predicted = twin.record(step).eager_peak()
        most = 1.01 if step[0] != last else 1.02  # the kernel for completions may spare a copy of what it gives
        assert 1.0 <= predicted / measured <= most, (step, predicted, measured)
        assert largest >= measured


def test_steps_of_a_draft_model_count(device: torch.device, tmp_path: Path) -> None:
    forms = {}
    for folder, prefix, width in ((tmp_path, "", 64), (tmp_path / "draft", PREFIX, 256)):
        module = small("LlamaForCausalLM", width)
        module.save_pretrained(folder)
        forms |= {f"{prefix}{name}": (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()}
    own = {name: form for name, form in forms.items() if not name.startswith(PREFIX)}
    config = LLMEngineConfig(device=device, max_num_seqs=7, max_num_batched_tokens=96, max_model_len=64)
    assert StepTwin(tmp_path, forms, config).step_bytes() > 1.5 * StepTwin(tmp_path, own, config).step_bytes() > 0


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "most"), [("Qwen3_5ForCausalLM", 1.01), ("GptOssForCausalLM", 1.5)])
def test_steps_of_a_stock_language_model(device: torch.device, tmp_path: Path, name: str, most: float) -> None:
    """Recurrent layers are counted as they run; experts as if all tokens chose the same one."""
    torch.manual_seed(0)
    weights = {
        key: tensor.to(device)
        for key, tensor in save_tiny(tiny_model(name, max_position_embeddings=256), tmp_path).items()
    }
    config = LLMEngineConfig(device=device, max_num_seqs=7, max_num_batched_tokens=128, max_model_len=160)
    forms = {key: (tensor.dtype, tensor.shape) for key, tensor in weights.items()}
    twin = StepTwin(tmp_path, forms, config)
    runner = plan_runner(create_any_model(load_config(tmp_path), weights, device), config)[1]
    largest = twin.step_bytes()
    for step in ([(0, 100)], [(64, 160)], [(159, 160)] * 7, [(9, 10)] * 3 + [(0, 90)]):
        chunks = []
        for start, end in step:
            num_prompt_tokens, blocks = end if end - start > 1 else start, list(range(-(-end // BLOCK_SIZE)))[::-1]
            sequence = TokenSequence("s", [3] * end, num_prompt_tokens, block_table=blocks)
            chunks.append(Chunk(sequence, start, end, True, 0 if start else None, ((end, 1),)))
        measured = peak_of(device, lambda chunks=chunks: runner.run(chunks))
        predicted = twin.record(step).eager_peak()
        assert 1.0 <= predicted / measured <= most, (step, predicted, measured)
        assert largest >= measured


# encoders and decoders of transformers, as they come


def small(name: str, width: int = 64) -> Any:
    inner = 5 * width // 2
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if name == "T5EncoderModel":
        kv = width // 4
        config = transformers.T5Config(d_model=width, d_ff=inner, d_kv=kv, num_layers=2, num_heads=4, vocab_size=100)
    elif name.startswith("CLIPTextModel"):
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        config = transformers.CLIPTextConfig(**sizes, vocab_size=100, max_position_embeddings=128, **special)
    elif name == "BertModel":
        config = transformers.BertConfig(**sizes, vocab_size=100)
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=100)
    return getattr(transformers, name)(config).eval().requires_grad_(False)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["T5EncoderModel", "CLIPTextModel", "BertModel", "LlamaForCausalLM"])
def test_recordings_of_encoders_and_decoders(device: torch.device, name: str) -> None:
    """Never below what was counted, and a hundredth above at most."""
    module, twin, mode = small(name), small(name), fake_mode()
    torch.nn.Module.to(module, device)
    fake_weights(twin, mode, device)
    for rows, tokens in ((2, 40), (4, 33), (8, 64)):
        ids = torch.full([rows, tokens], 3, device=device)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # without padding, some leave the mask out, which fake tensors cannot see
        measured = peak_of(device, lambda ids=ids, mask=mask: module(ids, attention_mask=mask))
        with mode:
            fakes = [torch.empty(rows, tokens, dtype=torch.long, device=device) for _ in range(2)]
        recorder = Recorder(device, is_fake=True)
        found = record(lambda fakes=fakes: twin(fakes[0], attention_mask=fakes[1]), recorder, {"net": twin}, mode)
        step = 512  # of a device's allocator, in what is small here
        assert measured <= found.eager_peak() <= 1.01 * measured + step, (rows, tokens, measured)
