"""Named tensors to calls of the service and back, over a service that answers by formulas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest
from kit.seeding import seeded_rng
from kit.waiting import until
from unit.counting import operations
from unit.deployments.ingress.kserve.conftest import number_of

from configs.cluster import LimitsConfig
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.tensors import InferRequest, InferResponse, OutputWish, classify_output
from deployments.ingress.service.catalog import ModelCard
from deployments.pipelines.records import NUMPY_DTYPES, Datatype, TensorValue, text_tensor
from deployments.records import CacheUse, ChatRequest, CompletionRequest, EmbeddingRequest, EmbeddingResult, LoraUse
from deployments.records.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable, ServiceError, UnknownModel


def tensor(name: str, datatype: Datatype, data: Any) -> TensorValue:
    if datatype == "BYTES":
        return text_tensor(name, data)
    return TensorValue(name, datatype, np.array(data, NUMPY_DTYPES[datatype]))


def image_request(*more: TensorValue, prompts: list[str] | None = None, **fields: Any) -> InferRequest:
    return InferRequest("flux", (text_tensor("prompt", prompts or ["a", "b", "c"]), *more), **fields)


def text_request(*more: TensorValue, prompts: list[str] | None = None, **fields: Any) -> InferRequest:
    return InferRequest("adder", (text_tensor("text_input", prompts or ["1 + 1"]), *more), **fields)


def by_name(response: InferResponse) -> dict[str, Any]:
    return {value.name: value.data.tolist() for value in response.outputs}


class Book:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def succeeded(self, model: str, **figures: Any) -> None:
        self.lines.append((model, figures))

    def failed(self, model: str, total_ms: float) -> None:
        self.lines.append((model, total_ms))


async def test_images_begin_at_images(inference: Inference, service: Any) -> None:
    """One for all prompts or one for each; without a size asked for, theirs."""
    chance = np.random.default_rng(0)
    image = TensorValue("init_image", "UINT8", chance.integers(0, 256, (3, 8, 16, 3), np.uint8))
    mask = TensorValue("mask_image", "UINT8", chance.integers(0, 256, (1, 8, 16), np.uint8))
    await inference.infer(image_request(image, mask, tensor("strength", "FP32", [0.7])))
    for asked, pixels in zip(service.requests, image.data, strict=True):
        assert np.array_equal(asked.init_image, pixels)
        assert np.array_equal(asked.mask_image, mask.data[0])
        assert (asked.strength, asked.width, asked.height) == (0.7, None, None)
    two = TensorValue("init_image", "UINT8", image.data[:2])
    grey = TensorValue("init_image", "UINT8", image.data[..., :1])
    for wrong, message in [
        (image_request(two), "init_image: 2 elements for 3 prompts"),
        (image_request(grey), r"'init_image' is UINT8 \[3, 8, 16, 1\], expected"),
        (image_request(parameters={"init_image": "x"}), "init_image: an input of UINT8"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            await inference.infer(wrong)


async def test_images_are_prompts_to_adapters(inference: Inference, service: Any) -> None:
    """One image for all prompts, or one for each; an empty name is none."""
    chance = seeded_rng()
    image = TensorValue("ip_adapter_image", "UINT8", chance.integers(0, 256, (3, 9, 7, 3), np.uint8))
    syntax = text_tensor("prompt_syntax", ["compel"])
    await inference.infer(image_request(image, syntax, text_tensor("ip_adapter", ["look:0.5", "", "other"])))
    first, none, last = (asked.ip_adapter for asked in service.requests)
    assert [(use.name, use.scale) for use in (*first, *last)] == [("look", 0.5), ("other", 1.0)]
    assert none == ()
    assert np.array_equal(first[0].image, image.data[0])
    assert np.array_equal(last[0].image, image.data[2])
    assert {asked.prompt_syntax for asked in service.requests} == {"compel"}
    named = {"ip_adapter": "look"}
    for wrong, message in [
        (image_request(image), "ip_adapter: missing beside ip_adapter_image"),
        (image_request(parameters=named), "ip_adapter_image: missing beside ip_adapter"),
        (image_request(image, parameters={"ip_adapter": "look:much"}), "ip_adapter: expected name:scale"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            await inference.infer(wrong)


async def test_images_come_in_the_order_of_their_prompts(inference: Inference, service: Any) -> None:
    names = ["num_inference_steps", "width", "height"]
    more = [tensor("num_inference_steps", "INT32", [2, 3, 4])]
    more += [tensor("guidance_scale", "FP32", [0.7]), tensor("seed", "INT64", [5, 6, 7])]
    more += [tensor("width", "INT32", [8]), tensor("height", "INT32", [5] * 3)]
    more += [text_tensor("negative_prompt", ["no"]), text_tensor("lora", ["bold:0.5, thin", "", "bold"])]
    more += [text_tensor("scheduler", ["DDIMScheduler"])]
    response = await inference.infer(image_request(*more, id="42", parameters={"priority": 3, "timeout": 2_000_000}))
    assert (response.model, response.version, response.id) == ("flux", "1", "42")
    images, seed = response.outputs
    assert (images.datatype, images.shape) == ("UINT8", (3, 5, 8, 3))
    assert images.data[:, 0, 0, 0].tolist() == [crc32(prompt) % 251 for prompt in (b"a", b"b", b"c")]
    assert seed.data.tolist() == [5, 6, 7]
    assert [[getattr(asked, name) for name in names] for asked in service.requests] == [[s, 8, 5] for s in (2, 3, 4)]
    assert [asked.lora for asked in service.requests] == [
        (LoraUse(name="bold", scale=0.5), LoraUse(name="thin")),
        (),
        (LoraUse(name="bold"),),
    ]
    assert {(asked.guidance_scale, asked.negative_prompt) for asked in service.requests} == {(0.7, "no")}
    assert {asked.scheduler for asked in service.requests} == {"DDIMScheduler"}
    assert {(asked.priority, asked.timeout_s) for asked in service.requests} == {(3, 2.0)}
    assert response.timings_ms["denoise"] == 5.0  # that of the slowest of the three


async def test_prompts_run_side_by_side_and_fail_together(inference: Inference, service: Any, refused: Any) -> None:
    service.gate.clear()
    running = asyncio.create_task(inference.infer(image_request()))
    await until(lambda: len(service.requests) == 3)  # all have arrived, none is answered
    service.gate.set()
    await running
    service.requests.clear()
    service.error = lambda request: refused(request) if request.prompt == "b" else None
    with pytest.raises(InvalidRequest, match="does not like"):
        await inference.infer(image_request())


async def test_a_failure_cancels_what_still_runs(inference: Inference, service: Any, refused: Any) -> None:
    real = service.generate

    async def one_fails(request: Any) -> Any:
        if request.prompt == "c":
            await until(lambda: len(service.requests) == 2)
            raise InvalidRequest("no c")
        return await real(request)

    service.generate = one_fails
    service.gate.clear()
    with pytest.raises(InvalidRequest, match="no c"):
        await inference.infer(image_request())
    assert service.num_cancelled == 2


async def test_texts_are_continued_or_answered(inference: Inference, service: Any) -> None:
    more = (tensor("chat", "BOOL", [True, False]), text_tensor("stop", ["x", "y", "z"]))
    more += (text_tensor("lora", ["polite:0.5", ""]),)
    response = await inference.infer(text_request(*more, prompts=["a", "ü"], parameters={"temperature": 0}))
    assert by_name(response) == {
        "text_output": [b"chat:a", "more:ü".encode()],
        "finish_reason": [b"stop", b"length"],
        "num_input_tokens": [2, 2],
        "num_output_tokens": [3, 3],
    }
    assert [type(asked) for asked in service.requests] == [ChatRequest, CompletionRequest]
    assert {(asked.stop, asked.temperature) for asked in service.requests} == {(("x", "y", "z"), 0.0)}
    assert [asked.lora for asked in service.requests] == [(LoraUse(name="polite", scale=0.5),), ()]


async def test_texts_or_token_ids_are_embedded_in_one_call(inference: Inference, service: Any) -> None:
    parameters = {"priority": 2, "timeout": 3_000_000, "whatever": "is opaque"}
    request = InferRequest("minilm", (text_tensor("text", ["a", "b"]),), parameters=parameters)
    (embedding,) = (await inference.infer(request)).outputs
    assert (embedding.name, embedding.datatype, embedding.shape) == ("embedding", "FP32", (2, 4))
    ids = InferRequest("minilm", (tensor("input_ids", "INT64", [[1, 2], [3, 4]]),))
    assert (await inference.infer(ids)).outputs[0].data[:, 0].tolist() == [3.0, 7.0]
    texts, tokens = service.requests
    assert (texts.input, texts.priority, texts.timeout_s) == (("a", "b"), 2, 3.0)
    assert (tokens.input, tokens.priority, tokens.timeout_s) == (((1, 2), (3, 4)), 0, None)


async def test_embeddings_of_different_sizes_are_no_tensor(
    inference: Inference, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def embed(request: EmbeddingRequest) -> EmbeddingResult:
        vectors = [np.zeros(size, np.float32) for size in (2, 3)]
        return EmbeddingResult(request.model, vectors, 5, {}, CacheUse(0, 1))

    monkeypatch.setattr(service, "embed", embed)
    with pytest.raises(InvalidRequest, match="embeddings of different sizes; ask one by one"):
        await inference.infer(InferRequest("minilm", (text_tensor("text", ["a", "b"]),)))


async def test_a_language_model_embeds_where_that_is_asked_for_alone(inference: Inference, service: Any) -> None:
    wish = (OutputWish("embedding"),)
    parameters = {"pooling": "mean", "priority": 2}
    request = text_request(prompts=["a", "b"], outputs=wish, parameters=parameters)
    (embedding,) = (await inference.infer(request)).outputs
    assert (embedding.name, embedding.datatype, embedding.shape) == ("embedding", "FP32", (2, 4))
    (asked,) = service.requests
    assert (asked.input, asked.pooling, asked.priority) == (("a", "b"), "mean", 2)
    pieces = [piece async for piece in inference.infer_stream(text_request(outputs=wish))]
    assert [list(by_name(piece)) for piece in pieces] == [["embedding"]]
    assert service.requests[-1].pooling is None
    refused = {
        "embedding is asked for alone": text_request(outputs=(OutputWish("text_output"), *wish)),
        "max_tokens: an embedding takes text_input alone": text_request(
            tensor("max_tokens", "INT32", [3]), outputs=wish
        ),
        "pooling": text_request(outputs=wish, parameters={"pooling": "max"}),
    }
    for reason, one in refused.items():
        with pytest.raises(InvalidRequest, match=reason):
            await inference.infer(one)


async def test_pipelines_get_their_tensors(inference: Inference, service: Any) -> None:
    x = seeded_rng().normal(size=(2, 3)).astype(np.float32)
    inputs = (TensorValue("x", "FP32", x), tensor("factor", "FP64", [3.0]))
    request = InferRequest("scale", inputs, parameters={"priority": 1, "timeout": 500_000})
    response = await inference.infer(request)
    np.testing.assert_allclose(response.outputs[0].data, x * 3, rtol=1e-6)
    (asked,) = service.pipelines.requests
    assert (asked.pipeline, asked.priority, asked.timeout_s, list(asked.inputs)) == ("scale", 1, 0.5, ["x", "factor"])
    with pytest.raises(InvalidRequest, match=r"x: 9 items, from 1 to 8"):
        await inference.infer(InferRequest("scale", (tensor("x", "FP32", np.zeros((9, 3))),)))


async def test_outputs_are_those_asked_for_in_that_order(inference: Inference) -> None:
    wishes = (OutputWish("seed"), OutputWish("images"))
    response = await inference.infer(image_request(outputs=wishes))
    assert [value.name for value in response.outputs] == ["seed", "images"]
    for names, reason in ((["image"], "unknown output 'image'.* gives images UINT8"), (["seed", "seed"], "twice")):
        with pytest.raises(InvalidRequest, match=reason):
            await inference.infer(image_request(outputs=tuple(OutputWish(name) for name in names)))


async def test_classification_of_an_output(inference: Inference) -> None:
    request = InferRequest("minilm", (text_tensor("text", ["a", "b"]),), outputs=(OutputWish("embedding", False, 2),))
    (classes,) = (await inference.infer(request)).outputs
    rows = [dict(enumerate([float(crc32(text) % 251), 0.1, -3.0, 2.0])) for text in (b"a", b"b")]
    for row, cells in zip(rows, classes.data, strict=True):
        best = sorted(row, key=lambda index: -row[index])[:2]
        assert [cell.decode() for cell in cells] == [f"{np.float32(row[index])}:{index}" for index in best]
    with pytest.raises(InvalidRequest, match="is text"):
        await inference.infer(text_request(outputs=(OutputWish("text_output", num_classes=1),)))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64, ml_dtypes.bfloat16, np.float16, np.bool_])
@pytest.mark.parametrize("shape", [(3, 5), (1, 2, 3), (4,), (0, 3), (3, 0)])
def test_classes_are_the_highest_first(dtype: Any, shape: tuple[int, ...]) -> None:
    data = seeded_rng().integers(0, 4, shape).astype(dtype)  # few values: many are equal
    cells = classify_output(TensorValue("y", "FP32", data), 4).data
    rows = [list(np.ravel(item)) for item in data]
    expected = [sorted(range(len(row)), key=lambda index: (-float(row[index]), index))[:4] for row in rows]
    assert [[int(cell.split(b":")[1]) for cell in row] for row in cells] == expected
    assert [[float(cell.split(b":")[0]) for cell in row] for row in cells] == [
        [float(row[index]) for index in order] for row, order in zip(rows, expected, strict=True)
    ]


def test_what_is_no_number_is_no_class_before_others() -> None:
    data = np.array([[np.nan, -5.0, np.inf]], np.float32)
    assert classify_output(TensorValue("y", "FP32", data), 2).data.tolist() == [[b"inf:2", b"-5.0:1"]]


WRONG: list[tuple[InferRequest, str]] = [
    (InferRequest("flux", ()), "missing input 'prompt'; model 'flux' takes prompt BYTES"),
    (image_request(tensor("steps", "INT32", [1])), "unknown input 'steps'; model 'flux' takes .*num_inference_steps"),
    (image_request(tensor("seed", "INT32", [1])), r"'seed' is INT32 \[1\], expected INT64 \[-1\]"),
    (image_request(tensor("seed", "INT64", [[1]])), r"'seed' is INT64 \[1, 1\], expected INT64 \[-1\]"),
    (image_request(tensor("seed", "INT64", [1, 2])), "seed: 2 elements for 3 prompts, expected 1 or 3"),
    (image_request(tensor("seed", "INT64", [])), "seed: 0 elements"),
    (image_request(tensor("seed", "INT64", [1]), tensor("seed", "INT64", [1])), "given twice"),
    (image_request(tensor("seed", "INT64", [-1])), "seed: Input should be greater"),
    (image_request(tensor("seed", "INT64", [1]), parameters={"seed": 1}), "as an input and as a parameter"),
    (image_request(parameters={"seed": 1.5}), "seed: expected a whole number, got 1.5"),
    (image_request(parameters={"seed": True}), "seed: expected a whole number, got True"),
    (image_request(parameters={"guidance_scale": "x"}), "guidance_scale: expected a number, got 'x'"),
    (image_request(tensor("guidance_scale", "FP32", [np.nan])), "guidance_scale"),
    (image_request(tensor("width", "INT32", [1, 2, 3])), "width: the images of one request"),
    (image_request(parameters={"lora": "bold:x"}), "lora: expected name:scale"),
    (image_request(parameters={"lora": "bold," * 100_000}), "lora: 100001 adapters, at most 256 are allowed"),
    (image_request(parameters={"lora": "bold:99"}), "lora: expected name:scale"),
    (image_request(prompts=["a"] * 5), "prompt: 5 items, from 1 to 4 are allowed"),
    (InferRequest("adder", (text_tensor("text_input", ["a"] * 6),)), "text_input: 6 items, from 1 to 5 are allowed"),
    (InferRequest("minilm", (text_tensor("text", ["a"] * 7),)), "text: 7 items, from 1 to 6 are allowed"),
    (image_request(prompts=[""]), "prompt: String should have at least 1 character"),
    (InferRequest("flux", (text_tensor("prompt", []),)), "prompt: 0 items"),
    (InferRequest("flux", (TensorValue("prompt", "BYTES", np.array([b"\xff"], object)),)), "prompt: not UTF-8"),
    (InferRequest("flux", (text_tensor("prompt", ["a"]),), id="x" * 1025), "id: 1025 characters, at most 1024"),
    (image_request(parameters={str(key): 0 for key in range(257)}), "parameters: 257 of them, at most 256"),
    (image_request(parameters={"priority": -1}), "priority: expected a whole number from 0 to 100, got -1"),
    (image_request(parameters={"priority": 101}), "priority"),
    (image_request(parameters={"priority": 1.0}), "priority"),
    (image_request(parameters={"timeout": float("nan")}), "timeout: expected a whole number .* microseconds, got nan"),
    (image_request(parameters={"timeout": -5}), "timeout"),
    (image_request(parameters={"timeout": 2**63}), "timeout"),
    (image_request(parameters={"timeout": True}), "timeout"),
    (image_request(parameters={"sequence_id": 7}), "sequence_id: no model here keeps a state"),
    (image_request(parameters={"sequence_start": True}), "sequence_start"),
    (InferRequest("minilm", ()), "either text or input_ids, got 0"),
    (InferRequest("minilm", (text_tensor("text", ["a"]), tensor("input_ids", "INT64", [[1]]))), "got 2"),
    (InferRequest("minilm", (tensor("input_ids", "INT64", [1]),)), r"expected INT64 \[-1, -1\]"),
    (text_request(text_tensor("stop", ["a"] * 65)), "stop"),
    (InferRequest("bold", ()), r"'bold' \(adapter\) answers no requests"),
]


@pytest.mark.parametrize(("request_", "reason"), WRONG, ids=[reason[:40] for _, reason in WRONG])
async def test_a_wrong_request_says_what_is_wrong(
    inference: Inference, service: Any, request_: InferRequest, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await inference.infer(request_)
    assert service.requests == []  # nobody was asked


@pytest.mark.parametrize(
    ("model", "version", "error", "reason"),
    [
        ("nobody", "", UnknownModel, "known: flux"),
        ("flux", "2", UnknownModel, "has no version '2'"),
        ("broken", "", ModelUnavailable, "tensor 'w' is torn"),
    ],
)
async def test_models_that_cannot_be_asked(
    inference: Inference, model: str, version: str, error: type[ServiceError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await inference.infer(InferRequest(model, (), version))
    with pytest.raises(error, match=reason):
        await inference.metadata(model, version)


async def test_a_timeout_ends_what_runs(inference: Inference, service: Any) -> None:
    service.gate.clear()
    with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.005 s"):
        await inference.infer(image_request(parameters={"timeout": 5_000}))
    assert service.num_cancelled == 3
    with pytest.raises(DeadlineExceeded):
        async for _ in inference.infer_stream(text_request(parameters={"timeout": 5_000})):
            pass


async def test_a_timeout_error_of_somebody_else_is_not_the_requests(inference: Inference, service: Any) -> None:
    service.error = lambda request: TimeoutError("of a socket")
    with pytest.raises(TimeoutError, match="of a socket"):
        await inference.infer(image_request(parameters={"timeout": 60_000_000}))


async def test_text_comes_piece_by_piece(inference: Inference, service: Any) -> None:
    request = text_request(id="9", outputs=(OutputWish("text_output"), OutputWish("num_output_tokens")))
    pieces = [piece async for piece in inference.infer_stream(request)]
    assert [by_name(piece)["text_output"] for piece in pieces] == [[b"Hel"], ["lö".encode()], [b""]]
    assert [by_name(piece)["num_output_tokens"] for piece in pieces] == [[1], [2], [3]]
    assert [piece.parameters["triton_final_response"] for piece in pieces] == [False, False, True]
    assert {piece.id for piece in pieces} == {"9"}
    with pytest.raises(InvalidRequest, match="2 prompts, a stream answers one"):
        await anext(inference.infer_stream(text_request(prompts=["a", "b"])))
    with pytest.raises(InvalidRequest, match="missing input"):
        await anext(inference.infer_stream(InferRequest("adder", ())))


async def test_a_stream_of_another_kind_has_one_piece(inference: Inference) -> None:
    pieces = [piece async for piece in inference.infer_stream(image_request())]
    assert [(piece.outputs[0].shape, dict(piece.parameters)) for piece in pieces] == [
        ((3, 4, 6, 3), {"triton_final_response": True})
    ]


async def test_every_request_for_a_model_is_recorded_once(service: Any, limits: LimitsConfig, refused: Any) -> None:
    book = Book()
    inference = Inference(service, limits, book)
    await inference.infer(image_request())
    (model, figures) = book.lines.pop()
    assert (model, figures["batch_size"], figures["cache_hits"], figures["cache_misses"]) == ("flux", 3, 3, 6)
    assert figures["timings_ms"].keys() >= {"queue", "denoise", "total"}
    _ = [piece async for piece in inference.infer_stream(text_request())]
    assert [line[0] for line in book.lines] == ["adder"]
    book.lines.clear()
    service.error = refused
    for ask in (inference.infer(image_request()), anext(inference.infer_stream(text_request()))):
        with pytest.raises(InvalidRequest):
            await ask
    assert [(name, spent > 0) for name, spent in book.lines] == [("flux", True), ("adder", True)]
    book.lines.clear()
    with pytest.raises(UnknownModel):
        await inference.infer(InferRequest("nobody", ()))
    assert book.lines == []  # names that anybody can think of take no memory


async def test_readiness_and_metadata(inference: Inference, service: Any) -> None:
    assert [await inference.ready(name) for name in ("flux", "minilm", "scale")] == [True] * 3
    assert [await inference.ready(name) for name in ("broken", "bold")] == [False] * 2
    assert await inference.server_ready()
    for card in list(service.cards.values()):
        service.cards[card.id] = replace(card, state="unloaded")
    assert not await inference.ready("flux")
    assert await inference.server_ready()  # the next request brings a model back
    service.cards["late"] = ModelCard("late", None, "registering")
    assert not await inference.ready("late")
    assert await inference.server_ready()  # the others can be asked meanwhile
    cards, service.cards = service.cards, {"late": service.cards["late"]}
    assert not await inference.server_ready()
    service.cards = cards
    for name, version in (("nobody", ""), ("flux", "7")):
        with pytest.raises(UnknownModel):
            await inference.ready(name, version)
    metadata = await inference.metadata("scale", "1")
    assert (metadata.platform, metadata.versions) == ("atelier_pipeline", ("1",))
    assert [spec.name for spec in metadata.outputs] == ["y", "half", "note"]
    assert (await inference.metadata("flux")).parameters == {"kind": "diffusion", "description": "images"}


async def test_options_of_another_number_are_refused_before_they_are_read(inference: Inference) -> None:
    many = tensor("guidance_scale", "FP32", [0.5] * 50_000)

    async def refused() -> None:
        with pytest.raises(InvalidRequest, match="guidance_scale: 50000 elements for 3 prompts"):
            await inference.infer(image_request(many))

    step = refused().__await__()
    assert operations(lambda: list(step)) < 50_000


async def test_texts_are_scored_beside_one_query_or_their_own(inference: Inference, scoring: Any) -> None:
    for queries in (["q"], ["q", "r", "s"]):
        inputs = (text_tensor("text", ["a", "b", "ü"]), text_tensor("query", queries))
        response = await inference.infer(InferRequest("ranker", inputs, parameters={"priority": 2}))
        asked = scoring.requests[-1]
        assert asked.input == tuple(zip(queries * 3, ["a", "b", "ü"], strict=False))
        assert (asked.priority, asked.raw) == (2, False)
        (score,) = response.outputs
        assert (score.name, score.datatype, score.shape) == ("score", "FP32", (3,))
        assert score.data.tolist() == [number_of(query) + number_of(text) for query, text in asked.input]


async def test_texts_get_classes_and_their_names(inference: Inference, scoring: Any) -> None:
    given = (text_tensor("text", ["a", "b"]),)
    request = InferRequest("sorter", given, parameters={"use_activation": False})
    (scores,) = (await inference.infer(request)).outputs
    assert scoring.requests[-1].raw
    assert (scores.name, scores.shape) == ("scores", (2, 2))
    wishes = (OutputWish("scores", num_classes=1),)
    (best,) = (await inference.infer(InferRequest("sorter", given, outputs=wishes))).outputs
    assert best.data.tolist() == [[f"{float(number_of(text))}:0:odd".encode()] for text in "ab"]
    assert (await inference.configuration("sorter"))["dynamic_batching"]["preferred_batch_size"] == [4]


@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "message"),
    [
        ("ranker", {"text": ["a"]}, {}, "missing input 'query'; model 'ranker' takes text BYTES"),
        ("ranker", {"text": ["a"] * 3, "query": ["q"] * 2}, {}, "query: 2 elements for 3 texts, expected 1 or 3"),
        ("ranker", {"text": ["a"] * 3, "query": []}, {}, "query: 0 elements for 3 texts"),
        ("ranker", {"text": ["a"] * 7, "query": ["q"]}, {}, "text: 7 items, from 1 to 6 are allowed"),
        ("sorter", {"text": ["a"], "query": ["q"]}, {}, "unknown input 'query'"),
        ("sorter", {"text": ["a"]}, {"use_activation": 1}, "use_activation: expected true or false, got 1"),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    inference: Inference,
    scoring: Any,
    model: str,
    inputs: dict[str, list[str]],
    parameters: dict[str, Any],
    message: str,
) -> None:
    given = tuple(text_tensor(name, texts) for name, texts in inputs.items())
    with pytest.raises(InvalidRequest, match=message):
        await inference.infer(InferRequest(model, given, parameters=parameters))
