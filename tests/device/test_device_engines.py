"""Engines on a device: bit for bit what the host computes (on a simulated one), in little memory as well."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from kit.captures import Card
from kit.hosting import Host, demo_store

from deployments.engines.costs.memory_limits import is_out_of_memory
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.graph.card_graphs import CardGraphs
from deployments.engines.graph.replay import Replays
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.records.protocol import ConditionedRequest, DiffusionRequest, SamplingParams, TextRequest
from deployments.modules.encoders import TextEncoderBuilder, is_text_encoder
from deployments.pipelines.edge_types import TOKENS, EdgeType
from deployments.pipelines.plans import PIPELINE_INPUT, Edge, SegmentCall, StagePlan, form_units
from deployments.pipelines.segments import SegmentRunner
from weights.storage.store import WeightStore

HOST = torch.device("cpu")
TEXTS = ("a handwritten two", "the", "x " * 40, "What is 12 + 7?", "a")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    names = ("digits-flux", "digits-sdxl", "adder", "texts-bert", "texts-head")
    return demo_store(tmp_path_factory.mktemp("engines") / "store", *names)


@pytest.fixture
def leave_free(device: torch.device, module: Any) -> Iterator[Callable[[int], None]]:
    """Take all memory of the device but so many bytes, until the test ends or takes it again."""
    ballast: list[torch.Tensor] = []

    def leave(nbytes: int) -> None:
        ballast.clear()
        free, _ = module.mem_get_info(device)
        ballast.append(torch.empty(free - nbytes, dtype=torch.uint8, device=device))

    yield leave
    ballast.clear()


def assert_equal(found: torch.Tensor, expected: torch.Tensor, device: torch.device) -> None:
    if device.type == "sim":
        assert torch.equal(found.cpu(), expected)
    else:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


# images


async def denoiser(store: WeightStore, device: torch.device, model: str) -> DenoisePipeline:
    lease = await Host(store, str(device)).use(model)
    return create_pipeline(lease.manifest.class_name or "", lease.skeleton, lease.modules, device=device)


def conditioning(pipeline: DenoisePipeline, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    width, pooled = pipeline.family.network.text_widths(pipeline.denoiser)
    tensors = {"prompt_embeds": torch.randn(1, 6, width, generator=draw)}
    if pooled is not None:
        tensors["pooled_prompt_embeds"] = torch.randn(1, pooled, generator=draw)
    return tensors | {f"negative_{name}": -tensor for name, tensor in tensors.items()}


def image_request(seed: int, side: int = 32, **options: Any) -> DiffusionRequest:
    return DiffusionRequest(
        request_id=f"r{seed}", seed=seed, width=side, height=side, num_inference_steps=2, guidance_scale=3.0, **options
    )


@pytest.mark.drawn
@pytest.mark.parametrize("model", ["digits-flux", "digits-sdxl"])
async def test_latents_are_those_of_the_host(store: WeightStore, device: torch.device, module: Any, model: str) -> None:
    seed = random.getrandbits(30)
    states = []
    for where in (HOST, device):
        pipeline = await denoiser(store, where, model)
        one = pipeline.start_request(image_request(seed), conditioning(pipeline, seed))
        two = pipeline.start_request(image_request(seed + 1, num_images=2), conditioning(pipeline, seed + 1))
        while not one.done:
            pipeline.step([one, two])
        states.append((one.latents, two.latents, pipeline.decode([one, two])))
    (one, two, images), (own_one, own_two, own_images) = states
    assert own_one.device == own_two.device == device
    assert_equal(own_one, one, device)
    assert_equal(own_two, two, device)
    for own, host in zip(own_images, images, strict=True):
        assert np.abs(own.astype(int) - host.astype(int)).max() <= (0 if device.type == "sim" else 2)


@pytest.mark.drawn
@pytest.mark.parametrize("model", ["digits-flux", "digits-sdxl"])
async def test_forwards_are_replayed_as_graphs_with_the_modules_own_bits(
    store: WeightStore, device: torch.device, module: Any, model: str
) -> None:
    """A simulated device has a double of `torch.cuda`'s graphs."""
    pipeline = await denoiser(store, device, model)
    cuda = Card() if device.type == "sim" else torch.cuda
    graphs = CardGraphs(torch.device(device.type), pipeline.denoiser, cuda=cuda)  # as a config names it
    replays = Replays(min_forwards=1, binder=graphs)
    for seeds in ((1,), (2, 3), (4,), (5, 6)):  # the larger one ends the first
        latents = []
        for pipeline._replays in (None, replays):
            states = [pipeline.start_request(image_request(n), conditioning(pipeline, n)) for n in seeds]
            while not states[0].done:
                pipeline.step(states)
            latents.append(torch.cat([state.latents for state in states]))
        assert torch.equal(*latents)
    known = replays._known.values()
    assert all(one.is_tried and not one.is_refused for one in known), known
    assert len({one.bound.graph.pool if device.type == "sim" else one.bound.graph.pool() for one in known}) == 1


async def test_a_request_that_is_too_large_fails_alone_in_the_middle_of_a_merged_step(
    store: WeightStore, device: torch.device, module: Any, leave_free: Callable[[int], None]
) -> None:
    pipeline = await denoiser(store, device, "digits-sdxl")

    def run(*requests: DiffusionRequest) -> tuple[dict[str, np.ndarray], dict[str, Exception]]:
        engine, images, failures = DiffusionEngine(pipeline), {}, {}
        for request in requests:
            engine.add_request(ConditionedRequest(request, conditioning(pipeline, request.seed), {}))
        while engine.has_work:
            for output in engine.step():
                if output.images is not None:
                    images[output.request_id] = output.images
            failures |= engine.failures
        return images, failures

    def peak(request: DiffusionRequest) -> int:
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        run(request)
        taken: int = module.max_memory_allocated(device) - before
        return taken

    small, large, other = image_request(1), image_request(2, side=128), image_request(3)
    alone = {request.request_id: run(request)[0][request.request_id] for request in (small, other)}
    small_bytes, large_bytes = peak(small), peak(large)
    assert large_bytes > 8 * small_bytes
    leave_free(large_bytes // 2)
    assert not run(large)[1], "its image is decoded in tiles"
    leave_free(3 * small_bytes)
    images, failures = run(small, large, other)
    assert failures.keys() == {"r2"}
    assert is_out_of_memory(failures["r2"])
    for name, image in alone.items():
        assert np.abs(images[name].astype(int) - image.astype(int)).max() <= 2
    leave_free(2 * large_bytes)
    assert not run(small, large)[1]


async def test_a_module_of_another_device_is_found_out(
    store: WeightStore, device: torch.device, second_device: torch.device, module: Any
) -> None:
    lease = await Host(store, str(second_device)).use("digits-sdxl")
    pipeline = create_pipeline(lease.manifest.class_name or "", lease.skeleton, lease.modules, device=device)
    state = pipeline.start_request(image_request(1), conditioning(pipeline, 1))
    with pytest.raises(RuntimeError, match="same device"):
        pipeline.step([state])


# text


def generated(
    engine: LLMEngine, questions: list[str], temperature: float = 0.8, num_tokens: int = 12, *, ignore_eos: bool = False
) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {}
    for number, question in enumerate(questions):
        prompt = engine.chats.encode([{"role": "user", "content": question}])
        sampling = SamplingParams(num_tokens, temperature, seed=number, ignore_eos=ignore_eos)
        engine.add_request(TextRequest(question, prompt, sampling))
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] = (*tokens.get(delta.request_id, ()), *delta.token_ids)
        assert not engine.failures
    return tokens


async def test_tokens_and_logits_are_those_of_the_host(store: WeightStore, device: torch.device, module: Any) -> None:
    questions = [f"What is {n} + {random.randrange(100)}?" for n in random.sample(range(100), 9)]
    found = []
    for where in (HOST, device):
        engine = (await Host(store, str(where), kv_cache_bytes=2**20).use("adder")).modules["model"]
        if where is HOST:
            engine._runner._decoder = None  # layer by layer, as on a device
        rows: list[torch.Tensor] = []
        run = engine._runner.run
        engine._runner.run = lambda *step, run=run, rows=rows: rows.append(run(*step).cpu()) or rows[-1]
        found.append((generated(engine, questions, 0.0), rows))
        del engine._runner.run, engine, run
    (tokens, logits), (own_tokens, own_logits) = found
    if device.type == "sim":
        assert own_tokens == tokens
        assert all(torch.equal(own, host) for own, host in zip(own_logits, logits, strict=True))
    else:
        torch.testing.assert_close(own_logits[0], logits[0], rtol=1e-3, atol=1e-3)


async def test_prompts_that_do_not_fit_together_run_in_smaller_forwards(
    store: WeightStore, device: torch.device, module: Any, leave_free: Callable[[int], None]
) -> None:
    questions = [f"What is {n} + {n + 1}?" for n in range(40)]
    engine = (await Host(store, str(device), kv_cache_bytes=2**20).use("adder")).modules["model"]
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    expected = generated(engine, questions)
    most = module.max_memory_allocated(device) - before
    leave_free(most // 4)
    found = generated(engine, questions)
    assert engine._memory.allowed(max(engine._memory._limits)) < math.inf
    if device.type == "sim":
        assert found == expected


async def encoder(store: WeightStore, device: torch.device, model: str, name: str) -> Any:
    lease = await Host(store, str(device), builder=TextEncoderBuilder()).use(model, is_text_encoder)
    return lease.modules[name]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("digits-flux", "text_encoder"),
        ("digits-flux", "text_encoder_2"),
        ("digits-sdxl", "text_encoder_2"),
        ("texts-bert", "model"),
    ],
)
async def test_encodings_are_those_of_the_host(
    store: WeightStore,
    device: torch.device,
    module: Any,
    model: str,
    name: str,
    leave_free: Callable[[int], None],
    products_of_torch: None,
) -> None:
    outputs = []
    for where in (HOST, device):
        own = (await encoder(store, where, model, name)).encoder
        texts = own.tokenize(TEXTS, as_embedding=model == "texts-bert")
        outputs.append(own.encode(texts))
    for found, expected in zip(outputs[1], outputs[0], strict=True):
        assert found.keys() == expected.keys()
        for key in found:
            assert_equal(found[key], expected[key], device)
    many = own.tokenize([f"{number % 10} a" for number in range(16)], as_embedding=model == "texts-bert")
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    expected = own.encode(many)
    leave_free((module.max_memory_allocated(device) - before) // 2)
    for one, whole in zip(own.encode_each(many), expected, strict=True):
        assert not isinstance(one, Exception), one
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, whole[key], rtol=1e-3, atol=1e-4)
    assert own._memory._limits


@pytest.mark.parametrize("is_planned", [False, True])
async def test_heads_score_as_the_host_does(
    store: WeightStore, device: torch.device, module: Any, is_planned: bool
) -> None:
    heads = [(await encoder(store, where, "texts-head", "model")) for where in (HOST, device)]
    features = torch.randn(random.randrange(1, 9), heads[0].in_features)
    if is_planned:  # into memory that was planned
        outs = [torch.empty(len(features), heads[0].out_features, device=where) for where in (HOST, device)]
        expected, found = (head.apply(features.to(out.device), out) for head, out in zip(heads, outs, strict=True))
        assert found is outs[1]
    else:
        expected, found = (head.apply(features) for head in heads)
        assert found.device == HOST
    assert_equal(found, expected, device)


async def test_a_segments_tensors_stay_on_the_device(
    store: WeightStore, device: torch.device, module: Any, products_of_torch: None
) -> None:
    """Text -> ids -> vector -> scores, in memory that was planned on the device; the same as a segment of the host."""
    given, ids, vector = Edge(PIPELINE_INPUT, "text"), Edge("ids", "tokens"), Edge("vector", "embedding")
    scores, found, met = Edge("scores", "output"), [], []

    class Ops:
        def __init__(self, encoder: Any, head: Any) -> None:
            self.encoder, self.dense = encoder, head

        async def tokenize(self, model: str, texts: Any, first: int) -> list[tuple[int, ...]]:
            return [text.token_ids for text in self.encoder.tokenize(texts, as_embedding=True)]

        async def encode(self, model: str, texts: Any, first: int) -> list[torch.Tensor]:
            return [one["embedding"] for one in self.encoder.encode([self.encoder.accept_ids(text) for text in texts])]

        async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            met.append(features.device)
            return self.dense.apply(features, out)

        def take_warnings(self) -> list[str]:
            return []

    def fp32(size: int) -> EdgeType:
        return EdgeType("FP32", (-1, size))

    for where in (HOST, device):
        head = await encoder(store, where, "texts-head", "model")
        ops = Ops((await encoder(store, where, "texts-bert", "model")).encoder, head)
        stages = [
            StagePlan("ids", "tokenize", "m", {"text": given}, {}, {"tokens": TOKENS}),
            StagePlan("vector", "embed", "m", {"tokens": ids}, {}, {"embedding": fp32(head.in_features)}),
            StagePlan("scores", "head", "h", {"features": vector}, {}, {"output": fp32(head.out_features)}),
        ]
        (plan,) = form_units("p", stages, [vector, scores], 4)
        result = await SegmentRunner(where).run_segment(SegmentCall(plan, {given: list(TEXTS)}, len(TEXTS)), (), ops)
        found.append([torch.from_numpy(result.outputs[edge]) for edge in (vector, scores)])
    assert met == [HOST, HOST, device, device]
    for own, expected in zip(found[1], found[0], strict=True):
        assert_equal(own, expected, device)
