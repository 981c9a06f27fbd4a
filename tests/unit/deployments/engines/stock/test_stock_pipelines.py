"""Pipelines of diffusers without a family make the images that diffusers makes of them, and take turns."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import threading
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from kit.kernels import needs_half_products
from kit.tiny.classes import CASES, Case, assembled
from kit.tiny.further import FURTHER_CASES
from kit.tiny.pipelines import PIPELINES, make, saved
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.nn import few_rows
from deployments.engines.records.protocol import ComputationFailed, EngineError, StockRequest
from deployments.engines.servable import why_unservable
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.inputs import CallInputs
from deployments.engines.stock.known import read_class
from deployments.engines.stock.loading import StockModel, component_class, pipeline_class
from weights.formats.checkpoint import read_checkpoint

STEPS = 2
PROMPT = "a cat"
NEED_IMAGES = ("StableDiffusionInstructPix2PixPipeline",)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path) -> StockModel:
    """A model as a worker has it: modules without initialization around the folder's tensors.

    HAZARD: the last bits of torch's products depend on where in memory a tensor begins. In a mapped file that is where
    its header ends, so that diffusers' own `from_pretrained` differs from the pipeline that was saved; in packs all are
    aligned, as in memory of torch's.
    """
    checkpoint = read_checkpoint(folder)
    modules = {}
    for part in checkpoint.components:
        tensors = {}
        for file in part.files:
            mapped = load_file(folder / part.folder / file)
            tensors |= {name: tensor.clone() for name, tensor in mapped.items()}
        modules[part.name] = build_module(part.library, part.class_name, folder / part.folder, tensors)
    return StockModel(checkpoint.class_name or "", folder, modules)


def split(class_name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call as a request has them."""
    fields = ("height", "width", "negative_prompt", "true_cfg_scale", "max_sequence_length")
    return {
        "fields": {name: value for name, value in options.items() if name in fields} | {"num_inference_steps": STEPS},
        "extra": {name: value for name, value in options.items() if name not in fields},
    }


def run(engine: StockEngine, request: StockRequest) -> tuple[Any, int]:
    """Run a request alone; returns its last output and its turns."""
    engine.add_request(request)
    turns = 0
    while engine.has_work:
        outputs, turns = engine.step(), turns + 1
        for error in engine.failures.values():
            raise error
    return outputs[-1], turns


def stock_images(pipeline: Any, options: dict[str, Any], seed: int) -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(seed)
    prompt = {} if type(pipeline).__name__ in ("DiTPipeline", "DDPMPipeline") else {"prompt": PROMPT}
    found = pipeline(**prompt, **options, num_inference_steps=STEPS, generator=generator, output_type="pil").images
    return np.stack([np.asarray(image) for image in found])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", [name for name in PIPELINES if name not in NEED_IMAGES])
def test_images_are_those_of_diffusers(class_name: str, tmp_path: Path) -> None:
    stock, options = make(class_name, tmp_path), PIPELINES[class_name][1]
    assert why_unservable(read_checkpoint(tmp_path)) is None
    engine = StockEngine(load(tmp_path))
    for seed in (1, 2):  # a second request finds nothing of the first
        request = StockRequest(f"r{seed}", seed, PROMPT, **split(class_name, options), reports_steps=True)
        output, turns = run(engine, request)
        np.testing.assert_array_equal(output.images, stock_images(stock, options, seed))
        assert output.images.std() > 1
        assert turns > STEPS
        assert output.step_index == output.num_steps >= STEPS


@needs_half_products
@pytest.mark.usefixtures("faster_kernels")
def test_bfloat16_is_convolved_and_attended_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near as diffusers' own in bfloat16 to those in float32."""
    name = "StableDiffusionPAGPipeline"
    stock, options = make(name, tmp_path), PIPELINES[name][1]
    used, kernels = set[str](), few_rows.load_operations()

    class Noted:
        def __getattr__(self, operation: str) -> Any:
            used.add(operation)
            return getattr(kernels, operation)

    monkeypatch.setattr(few_rows, "load_operations", Noted)
    exact = stock_images(stock, options, 1).astype(float)
    model = load(tmp_path)
    for module in model.modules.values():
        module.bfloat16()
    output, _ = run(StockEngine(model), StockRequest("r", 1, PROMPT, **split(name, options)))
    assert used >= {"conv2d", "attend"}
    theirs = stock_images(stock.to(torch.bfloat16), options, 1)
    error, usual = (np.abs(images - exact).mean() for images in (output.images, theirs))
    assert error <= 1.5 * usual + 0.5


def test_an_option_that_is_a_pair_of_strings_is_no_component(tmp_path: Path) -> None:
    make("StableDiffusionPAGPipeline", tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text()) | {"pag_applied_layers": ["down", "mid"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert why_unservable(read_checkpoint(tmp_path)) is None
    stock = diffusers.StableDiffusionPAGPipeline.from_pretrained(tmp_path)
    assert load(tmp_path).create_pipeline().pag_applied_layers == stock.pag_applied_layers == ["down", "mid"]


@pytest.fixture(scope="module")
def aura(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, StockModel]:
    folder = tmp_path_factory.mktemp("aura")
    return make("AuraFlowPipeline", folder), load(folder)


AURA = PIPELINES["AuraFlowPipeline"][1]


def aura_request(request_id: str = "r", seed: int = 1, **more: Any) -> StockRequest:
    given = split("AuraFlowPipeline", AURA)
    return StockRequest(request_id, seed, PROMPT, **{**given, **more})


def own_threads(request_id: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith(f" {request_id}")]


def hooks_of(model: StockModel) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules.values())


def test_engines_over_the_same_modules_take_turns_and_change_nothing_for_each_other(aura: Any) -> None:
    stock, model = aura
    engines = [StockEngine(model) for _ in range(2)]
    images, order = {}, []
    for seed, engine in enumerate(engines):
        engine.add_request(aura_request(f"r{seed}", seed))
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                order.append(engine)
                images |= {output.request_id: output.images for output in engine.step() if output.is_last}
                assert not engine.failures
    assert order[:6] == engines * 3
    for seed in range(2):
        np.testing.assert_array_equal(images[f"r{seed}"], stock_images(stock, AURA, seed))


def test_requests_of_one_engine_run_one_after_the_other(aura: Any) -> None:
    engine = StockEngine(aura[1])
    for seed in (1, 2):
        engine.add_request(aura_request(f"r{seed}", seed))
    with pytest.raises(EngineError, match="request id 'r1' is in use"):
        engine.add_request(aura_request("r1"))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step()]
        assert not own_threads("r2") or ended
    assert ended == ["r1", "r2"]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_request_that_is_dropped_ends_where_it_stands(aura: Any, turns: int) -> None:
    engine = StockEngine(aura[1])
    engine.add_request(aura_request("dropped"))
    engine.add_request(aura_request("next", 5))
    for _ in range(turns):
        assert engine.step() == []
    engine.request_cancel("dropped")
    engine.abort("dropped")
    engine.abort("unknown")
    assert not own_threads("dropped")
    assert hooks_of(aura[1]) == 0
    while engine.has_work:
        (output, *_) = engine.step() or [None]
    np.testing.assert_array_equal(output.images, stock_images(aura[0], AURA, 5))


def test_a_turn_that_runs_while_nobody_wants_its_request_any_more_ends_at_the_next_module(aura: Any) -> None:
    """The caller left during the step: `request_cancel` comes from another thread than the one that steps."""
    engine, calls = StockEngine(aura[1]), []
    engine.add_request(aura_request("left"))

    def leave(*_: Any) -> None:
        calls.append(1)
        engine.request_cancel("left")

    with aura[1].modules["transformer"].register_forward_hook(leave):
        while engine.has_work:
            engine.step()
    assert len(calls) == 1
    assert "was ended" in str(engine.failures["left"])


def test_modules_are_as_before_when_a_pipeline_that_changes_them_ends(tmp_path: Path) -> None:
    make("StableDiffusionPAGPipeline", tmp_path)
    model = load(tmp_path)
    before = {name: id(processor) for name, processor in model.modules["unet"].attn_processors.items()}
    engine = StockEngine(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    hook = model.modules["unet"].register_forward_hook(fail)
    options = split("StableDiffusionPAGPipeline", PIPELINES["StableDiffusionPAGPipeline"][1])
    with pytest.raises(ComputationFailed, match="StableDiffusionPAGPipeline: a kernel failed"):
        run(engine, StockRequest("r", 1, PROMPT, **options))
    hook.remove()
    assert {name: id(processor) for name, processor in model.modules["unet"].attn_processors.items()} == before


def test_weights_that_a_pipeline_casts_are_the_shared_ones_again(aura: Any) -> None:
    """Pipelines make a VAE float32 and float16 again, and leave it with copies."""
    weights = next(aura[1].modules["vae"].parameters())
    before = weights.data_ptr()

    def cast(*_: Any) -> None:
        aura[1].modules["vae"].to(torch.float64).to(torch.float32)
        assert weights.data_ptr() != before

    with aura[1].modules["transformer"].register_forward_hook(cast):
        run(StockEngine(aura[1]), aura_request())
    assert weights.data_ptr() == before


def test_progress_is_told_step_by_step(aura: Any) -> None:
    engine = StockEngine(aura[1])
    engine.add_request(aura_request(reports_steps=True, fields={**AURA, "num_inference_steps": 3}))
    told = []
    while engine.has_work:
        told += [(output.step_index, output.num_steps, output.is_last) for output in engine.step()]
    assert told == [(1, 3, False), (2, 3, False), (3, 3, False), (3, 3, True)]


def test_images_go_to_the_parameters_of_their_names(tmp_path: Path) -> None:
    stock = make("StableDiffusionInstructPix2PixPipeline", tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    options = {"image_guidance_scale": 1.2, "guidance_scale": 3.0}
    generator = torch.Generator("cpu").manual_seed(4)
    found = stock(
        PROMPT, image=PIL.Image.fromarray(image), num_inference_steps=2, generator=generator,
        num_images_per_prompt=2, **options,
    )  # fmt: skip
    request = StockRequest(
        "r",
        4,
        PROMPT,
        2,
        {"guidance_scale": 3.0, "num_inference_steps": 2},
        {"image": image},
        {"image_guidance_scale": 1.2},
    )
    output, _ = run(StockEngine(load(tmp_path)), request)
    np.testing.assert_array_equal(output.images, np.stack([np.asarray(one) for one in found.images]))
    with pytest.raises(EngineError, match=r"mask_image: .* takes no such image \(images that it takes: image"):
        StockEngine(load(tmp_path)).add_request(replace(request, images={"mask_image": image[:, :, 0]}))


def assembled_case(class_name: str, folder: Path, cases: Mapping[str, Case] = CASES) -> tuple[Any, StockModel]:
    stock = saved(lambda: assembled(class_name, **cases[class_name].parts()), folder)
    return stock, load(folder)


def test_what_a_pipeline_draws_without_its_generator_is_of_the_seed_as_well(tmp_path: Path) -> None:
    """This class samples the latents of its control image so."""
    stock, model = assembled_case("StableDiffusion3ControlNetPipeline", tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    fields = {"height": 32, "width": 32, "num_inference_steps": STEPS}
    engines = [StockEngine(model) for _ in range(2)]
    for seed, engine in enumerate(engines):
        engine.add_request(StockRequest(f"r{seed}", seed, PROMPT, 1, fields, {"control_image": image}))
    before, found = torch.get_rng_state(), {}
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                found |= {output.request_id: output.images for output in engine.step() if output.is_last}
                assert not engine.failures
    assert torch.equal(torch.get_rng_state(), before)
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            generator = torch.Generator("cpu").manual_seed(seed)
            given = {**fields, "control_image": PIL.Image.fromarray(image), "output_type": "pil"}
            expected = stock(PROMPT, **given, generator=generator).images
        np.testing.assert_array_equal(found[f"r{seed}"], np.stack([np.asarray(one) for one in expected]))


def test_an_image_is_one_by_its_name_where_the_annotation_says_tensor(tmp_path: Path) -> None:
    model = assembled_case("FluxFillPipeline", tmp_path)[1]
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    fields = {"height": 32, "width": 32, "num_inference_steps": STEPS, "max_sequence_length": 16}
    halves = np.where(np.arange(32) < 16, 255, 0).astype(np.uint8)[:, None].repeat(32, 1)
    made = [
        run(StockEngine(model), StockRequest("r", 1, PROMPT, 1, fields, {"image": image, "mask_image": mask}))[0]
        for mask in (halves, 255 - halves)
    ]
    assert (made[0].images != made[1].images).any()
    with pytest.raises(EngineError, match="masked_image_latents: FluxFillPipeline takes no such image"):
        StockEngine(model).add_request(StockRequest("r", 1, PROMPT, 1, fields, {"masked_image_latents": image}))


def test_a_tuple_of_one_type_may_have_any_length() -> None:
    """`attn_res: tuple[int]` is a height and a width."""
    inputs = CallInputs(diffusers.StableDiffusionAttendAndExcitePipeline)
    given = inputs.arguments_of(StockRequest("r", 1, PROMPT, extra={"token_indices": [1], "attn_res": [8, 8]}))
    assert given["attn_res"] == (8, 8)
    with pytest.raises(EngineError, match="extra: attn_res is "):
        inputs.arguments_of(StockRequest("r", 1, PROMPT, extra={"token_indices": [1], "attn_res": [8, "8"]}))


def test_one_annotation_that_cannot_be_told_hides_no_other() -> None:
    cls = diffusers.LTXI2VLongMultiPromptPipeline
    with pytest.raises(TypeError):
        typing.get_type_hints(inspect.unwrap(cls.__call__))
    assert "temporal_tile_size = 80" in CallInputs(cls).describe()


def test_texts_need_no_package_to_mend_them() -> None:
    module = sys.modules[pipeline_class("WanVACEPipeline").__module__]
    assert module.prompt_clean("  a &amp; b  c ") == "a & b c"


def test_a_folder_may_lack_the_safety_checker_that_its_class_requires(tmp_path: Path) -> None:
    assert "safety_checker" in read_class("TextToVideoZeroPipeline").components
    model = assembled_case("TextToVideoZeroPipeline", tmp_path)[1]
    assert model.create_pipeline().safety_checker is None


def test_a_request_may_choose_the_scheduler(aura: Any) -> None:
    stock, model = aura
    other = diffusers.FlowMatchHeunDiscreteScheduler.from_config(stock.scheduler.config, shift=3.0)
    usual, stock.scheduler = stock.scheduler, other
    try:
        expected = stock_images(stock, AURA, 1)
    finally:
        stock.scheduler = usual
    chosen = {"scheduler": "FlowMatchHeunDiscreteScheduler", "scheduler_options": {"shift": 3.0}}
    output, _ = run(StockEngine(model), aura_request(**chosen))
    np.testing.assert_array_equal(output.images, expected)
    with pytest.raises(EngineError, match="scheduler 'PNDMScheduler': expected one that fits"):
        run(StockEngine(model), aura_request(scheduler="PNDMScheduler"))


@pytest.mark.parametrize("solver", ["EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"])
def test_a_flow_takes_the_names_of_solvers_of_noise(aura: Any, solver: str) -> None:
    _, model = aura
    fields = {**aura_request().fields, "num_inference_steps": 5}
    usual, _ = run(StockEngine(model), aura_request(fields=fields))
    output, _ = run(StockEngine(model), aura_request(fields=fields, scheduler=solver))
    again, _ = run(StockEngine(model), aura_request(fields=fields, scheduler=solver))
    np.testing.assert_array_equal(output.images, again.images)
    assert np.array_equal(output.images, usual.images) == (solver == "EulerDiscreteScheduler")


def test_a_class_with_a_scheduler_of_its_own_lets_no_request_choose(tmp_path: Path) -> None:
    """Diffusers neither saves nor reads this one's: it has a default, as options have."""
    model = assembled_case("LongCatAudioDiTPipeline", tmp_path, FURTHER_CASES)[1]
    for chosen in ({"scheduler": "FlowMatchHeunDiscreteScheduler"}, {"scheduler_options": {"shift": 3.0}}):
        with pytest.raises(EngineError, match="scheduler: a LongCatAudioDiTPipeline has its own"):
            run(StockEngine(model), StockRequest("r", 1, PROMPT, **chosen))


@pytest.mark.drawn
@pytest.mark.parametrize("skip", [{}, {"clip_skip": 2}, {"clip_skip": None}])
def test_layers_of_a_clip_are_skipped_though_it_lacks_what_diffusers_asks_it_for(skip: Any, tmp_path: Path) -> None:
    """The text that diffusers is given instead is that of the layer before the last, or two before, behind the norm."""
    stock, model = assembled_case("I2VGenXLPipeline", tmp_path, FURTHER_CASES)
    with pytest.raises(AttributeError, match="text_model"):
        stock(PROMPT, PIL.Image.new("RGB", (32, 32)), 32, 32, clip_skip=1)
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    layer = skip.get("clip_skip", 1) or 0
    embeds = []
    for text in (PROMPT, ""):
        most = stock.tokenizer.model_max_length
        tokens = stock.tokenizer(text, padding="max_length", max_length=most, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = stock.text_encoder(tokens.input_ids, output_hidden_states=True).hidden_states
            embeds.append(stock.text_encoder.final_layer_norm(states[-1 - layer]))
    torch.manual_seed(7)  # the latents of the image are drawn without the generator
    expected = stock(
        image=PIL.Image.fromarray(image), height=32, width=32, num_frames=3, num_inference_steps=STEPS,
        generator=torch.Generator("cpu").manual_seed(7), prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1],
        output_type="np",
    ).frames[0]  # fmt: skip
    fields = {"height": 32, "width": 32, "num_inference_steps": STEPS}
    output, _ = run(
        StockEngine(model), StockRequest("r", 7, PROMPT, 1, fields, {"image": image}, {"num_frames": 3, **skip})
    )
    np.testing.assert_array_equal(output.images, (expected * 255).round().astype(np.uint8))
    weights = model.modules["text_encoder"].state_dict()  # which has no end where a part is a part of itself
    assert weights.keys() == stock.text_encoder.state_dict().keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": {"guidance": 3}}, r"extra: AuraFlowPipeline takes no 'guidance'; it takes prompt, .*n, seed"),
        ({"extra": {"latents": [1.0]}}, "extra: AuraFlowPipeline takes no 'latents'"),
        ({"extra": {"output_type": "pil"}}, "extra: AuraFlowPipeline takes no 'output_type'"),
        ({"extra": {"height": 16}}, "extra: 'height' is a field of the request"),
        ({"extra": {"num_images_per_prompt": 2}}, "extra: 'num_images_per_prompt' is a field of the request"),
        ({"extra": {"attention_kwargs": 3}}, r"extra: attention_kwargs is 3, expected dict\[str, Any\] \| None"),
        ({"extra": {"attention_kwargs": {1, 2}}}, "extra: attention_kwargs: Object of type set"),
        ({"extra": {"attention_kwargs": {"a": float("nan")}}}, "extra: attention_kwargs: Out of range"),
        ({"fields": {"max_sequence_length": 10**9}}, "max_sequence_length: 1000000000 tokens, at most 4096"),
        ({"fields": {"strength": 0.5}}, "strength: AuraFlowPipeline takes none; it takes prompt"),
        ({"fields": {"height": 13}}, "AuraFlowPipeline: .*height.*divisible by"),  # in the class's own words
    ],
)
def test_what_a_class_does_not_take_is_refused_with_what_it_takes(aura: Any, change: Any, words: str) -> None:
    engine = StockEngine(aura[1])
    with pytest.raises(EngineError, match=words):
        run(engine, aura_request(**change))
    assert not engine.has_work


def test_a_class_without_a_prompt(tmp_path: Path) -> None:
    make("DiTPipeline", tmp_path)
    engine = StockEngine(load(tmp_path))
    needed = (
        r"DiTPipeline needs class_labels; it takes guidance_scale, num_inference_steps, seed; in extra: class_labels"
    )
    with pytest.raises(EngineError, match=needed):
        run(engine, StockRequest("r", 1, PROMPT))
    with pytest.raises(EngineError, match=r"extra: class_labels is \[\"cat\"\], expected list\[int\]"):
        run(engine, StockRequest("r", 1, extra={"class_labels": ["cat"]}))
    with pytest.raises(EngineError, match="n: 2 images; DiTPipeline makes one at a time"):
        run(engine, StockRequest("r", 1, num_images=2, extra={"class_labels": [1]}))
    assert engine.inputs.ignored(StockRequest("r", 1, PROMPT)) == ("prompt had no effect: DiTPipeline takes none",)
    assert engine.inputs.ignored(StockRequest("r", 1, " ")) == ()


def test_images_that_are_not_finite_are_no_answer(aura: Any) -> None:
    def spoil(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * float("nan"), *output[1:])

    with (
        aura[1].modules["transformer"].register_forward_hook(spoil),
        pytest.raises(ComputationFailed, match="the image that it made is not finite"),
    ):
        run(StockEngine(aura[1]), aura_request())


def test_errors_of_memory_are_passed_on_as_they_came(aura: Any) -> None:
    def fill(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with aura[1].modules["transformer"].register_forward_hook(fill), pytest.raises(torch.OutOfMemoryError):
        run(StockEngine(aura[1]), aura_request())


def test_a_folder_that_lacks_a_component_is_refused(tmp_path: Path) -> None:
    make("AuraFlowPipeline", tmp_path)
    modules = load(tmp_path).modules
    with pytest.raises(EngineError, match="its transformer, a AuraFlowTransformer2DModel, has no weights"):
        StockModel("AuraFlowPipeline", tmp_path, {name: one for name, one in modules.items() if name != "transformer"})
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(EngineError, match="there is no tokenizer"):
        StockModel("AuraFlowPipeline", tmp_path, modules)


def test_components_of_other_code_are_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="of 'os', code that comes with a model, which is never run"):
        component_class("os", "system", tmp_path)
    with pytest.raises(EngineError, match="diffusers has no component 'logging'"):
        component_class("diffusers", "logging", tmp_path)
