"""Answers of the replicas' own methods, without Serve: what they count, and who encodes where the encoder is down."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deployments.engines.text.tokens import TextPair
from deployments.records import CacheUse, EmbeddingRequest, ImageResult, ScoringRequest, SwitchReport
from deployments.records.errors import ModelUnavailable
from deployments.services import text_encoder
from deployments.services.text_encoder import TextEncoderService
from deployments.services.worker import Worker, _WorkerReporter
from deployments.text.client import EncoderDown


class Counts:
    """Metrics that remember their calls by name."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


class Images:
    """An image service whose first answers fail where the encoder is down."""

    def __init__(self, result: Any, *, is_down: bool) -> None:
        self.result, self.is_down = result, is_down
        self.asked: list[Any] = []

    async def generate(self, request: Any, condition: Any, on_progress: Any, **options: Any) -> Any:
        self.asked.append((condition, options))
        if condition == "encoder" and self.is_down:
            raise EncoderDown("no encoder runs")
        return self.result

    make_clip = generate


def worker_of(result: Any, *, is_down: bool = False, encodes_alone: bool = True) -> Any:
    worker: Any = object.__new__(Worker)
    worker._images = Images(result, is_down=is_down)
    worker._encoder, worker._fallback_encoder = (SimpleNamespace(condition=name) for name in ("encoder", "own"))
    worker._settings = SimpleNamespace(encodes_alone=encodes_alone)
    worker.counted = []
    worker._count = lambda kind, *given: worker.counted.append((kind, *given))
    return worker


def result_of(switch: Any) -> ImageResult:
    return ImageResult("m", [], 1, 4, {"total": 1.0}, switch, CacheUse(0, 0))


async def pieces_of(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


SWITCH = SwitchReport("m", 1.0, 0.5, 0.5, 10, ("vae",), ())


async def test_images_and_clips_are_counted_once_they_have_ended() -> None:
    done, going_on = result_of(SWITCH), result_of(None)
    worker = worker_of(done)
    assert await pieces_of(worker.stream_images("r", b"checkpoint")) == [done]
    assert worker.counted == [("image", done.timings_ms, SWITCH)]
    assert worker._images.asked == [("encoder", {"checkpoint": b"checkpoint"})]
    worker = worker_of(going_on)  # migrated: another worker counts it
    assert await pieces_of(worker.stream_images("r")) == [going_on]
    assert worker.counted == []
    worker = worker_of(done)
    assert await pieces_of(worker.stream_clip("r")) == [done]
    assert worker.counted == [("clip", done.timings_ms, SWITCH)]


@pytest.mark.parametrize("method", ["stream_images", "stream_clip"])
async def test_a_worker_encodes_itself_where_no_encoder_runs_and_it_may(method: str) -> None:
    done = result_of(SWITCH)
    worker = worker_of(done, is_down=True)
    assert await pieces_of(getattr(worker, method)("r")) == [done]
    assert worker._images.asked[1:] == [("own", {"encode_first": True})]
    worker = worker_of(done, is_down=True, encodes_alone=False)
    with pytest.raises(ModelUnavailable, match="no encoder runs"):
        await pieces_of(getattr(worker, method)("r"))
    assert len(worker._images.asked) == 1


async def test_orders_and_health_go_to_those_that_there_are() -> None:
    models, images, ranks = Counts(), Counts(), Counts()
    _WorkerReporter(models, images).apply(SimpleNamespace(migrate=("m",)))  # type: ignore[arg-type]
    assert [name for name, *_ in models.calls + images.calls] == ["apply", "migrate_out"]
    worker: Any = object.__new__(Worker)
    await worker.check_health()
    worker._note_load("m", "1", None)

    async def check() -> None:
        ranks.checked()

    worker._ranks, worker._ordered = SimpleNamespace(check=check), models
    await worker.check_health()
    worker._note_load("m", "1", "no room")
    assert (ranks.calls, models.calls[-1]) == ([("checked",)], ("note_load", "m", "1", "no room"))


async def test_vectors_of_a_language_model_are_counted() -> None:
    worker = worker_of(None)
    answer = SimpleNamespace(timings_ms={"total": 2.0})
    worker._texts = SimpleNamespace(embed=lambda request: asyncio.sleep(0, answer))
    assert await worker.embed("r") is answer
    assert worker.counted == [("embedding", {"total": 2.0})]


class Encoder:
    """An encoder whose vectors are shortened, scored and prompted so that each can be seen."""

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self.prompts = SimpleNamespace(before=lambda name, kind: f"{name} {kind}: ")
        self.scoring = SimpleNamespace(labels=labels) if labels else None

    def shortened(self, vector: torch.Tensor, size: int) -> torch.Tensor:
        return vector[:size]

    def scored(self, logits: torch.Tensor, *, raw: bool) -> torch.Tensor:
        return logits if raw else logits + 100


class Replica:
    """A text encoder's replica around fakes. `asked` are the options of each call of the encoders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoder: Any) -> None:
        self.asked: list[Any] = []
        self.service: Any = object.__new__(TextEncoderService)
        self.service._metrics = self.counts = Counts()
        self.service._encoders = SimpleNamespace(embed=self._embed)
        self.service._module_cache = SimpleNamespace(lease=self._lease)
        self.modules = {"model": encoder}
        monkeypatch.setattr(text_encoder, "text_modules", lambda modules: (SimpleNamespace(encoder=encoder), None))
        monkeypatch.setattr(text_encoder, "embedding_of", lambda output: output)

    @asynccontextmanager
    async def _lease(self, *given: Any, **options: Any) -> Any:
        yield SimpleNamespace(modules=self.modules, report=SimpleNamespace(switch_ms=7.0))

    async def _embed(self, modules: Any, texts: Any, **options: Any) -> Any:
        self.asked.append((list(texts), options))
        cache = SimpleNamespace(hits=2, misses=3)
        outputs = [torch.arange(4.0) for _ in texts]
        return SimpleNamespace(outputs=outputs, cache=cache, num_tokens=9, warnings=("w",))


async def test_vectors_are_shortened_prompted_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch, Encoder())
    whole = await replica.service.embed(EmbeddingRequest(model="m", input=("a", "b")))
    assert [vector.tolist() for vector in whole.embeddings] == [[0, 1, 2, 3]] * 2
    assert (whole.num_tokens, whole.labels, whole.warnings) == (9, (), ("w",))
    assert replica.counts.calls == [("count_encodings", 2, 3)]
    times = whole.timings_ms
    assert times["switch"] == 7.0
    assert times["encode"] + 7.0 == pytest.approx(times["total"])
    assert 0 < times["total"] < 60_000
    request = EmbeddingRequest(
        model="m", input=("a",), dimensions=2, prompt_name="query", long_text="chunk", input_type="document"
    )
    short = await replica.service.embed(request)
    assert [vector.tolist() for vector in short.embeddings] == [[0, 1]]
    first, second = (options for _, options in replica.asked)
    assert (first["long_text"], second["long_text"]) == ("truncate", "chunk")
    assert (first["before"], second["before"]) == ("None None: ", "query document: ")
    await replica.service.embed(EmbeddingRequest(model="m", input=((1, 2),)))
    assert replica.asked[-1][1]["before"] == ""  # tokens have their prompt


async def test_scores_are_raw_or_not_of_texts_and_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch, Encoder(("no", "yes")))
    scored = await replica.service.score(ScoringRequest(model="m", input=(("a", "d"), ("b", "c")), max_second_tokens=5))
    assert [vector.tolist() for vector in scored.embeddings] == [[100, 101, 102, 103]] * 2
    assert scored.labels == ("no", "yes")
    texts, options = replica.asked[0]
    assert (texts, options["max_second"], options["long_text"]) == (
        [TextPair("a", "d"), TextPair("b", "c")],
        5,
        "truncate",
    )
    raw = await replica.service.score(ScoringRequest(model="m", input=("a",), raw=True))
    assert (raw.embeddings[0].tolist(), replica.asked[1][0]) == ([0, 1, 2, 3], ["a"])


async def test_a_head_and_a_program_answer_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch, SimpleNamespace(apply=lambda features: features * 2))
    features = np.ones((2, 3), np.float32)
    found = await replica.service.apply_head(SimpleNamespace(model="m", model_version=None, features=features))
    np.testing.assert_array_equal(found, features * 2)
    asked: list[Any] = []

    async def run_rows(*given: Any) -> list[str]:
        asked.append(given)
        return ["rows"]

    replica.service._run_rows = run_rows
    monkeypatch.setattr(text_encoder, "_jobs_of_arrays", lambda program, inputs: [inputs])
    monkeypatch.setattr(text_encoder, "answer_of", lambda program, rows: {"out": rows})
    request = SimpleNamespace(model="m", model_version=None, inputs="in", priority=2, timeout_s=3.0)
    result = await replica.service.run_program(request)
    assert (asked, result.outputs) == ([(["in"], 2, 3.0)], {"out": ["rows"]})
    times = result.timings_ms
    assert times["switch"] == 7.0
    assert times["run"] + 7.0 == pytest.approx(times["total"])
    assert 0 < times["total"] < 60_000


async def test_a_conditioning_is_counted_and_a_priority_is_one_that_batches_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(monkeypatch, Encoder())
    found = SimpleNamespace(cache=SimpleNamespace(hits=1, misses=0))
    replica.service._encoders.condition = lambda *given: asyncio.sleep(0, found)
    assert await replica.service.condition("r") is found
    assert replica.counts.calls == [("count_encodings", 1, 0)]
    asked: list[Any] = []
    replica.service._batching = SimpleNamespace(priority_levels=2)
    replica.service._serve_adapter = SimpleNamespace(submit=lambda jobs, **options: asked.append(options))
    job = SimpleNamespace(keyed=object(), num_tokens=4, group="g", length=6)
    replica.service._run_batch([job, job], 9, None)
    replica.service._run_rows([job], 1, 2.0)
    assert asked == [
        {"group": id(job.keyed), "costs": [4, 4], "priority": 2, "timeout_s": None},
        {"group": "g", "costs": [6], "priority": 1, "timeout_s": 2.0},
    ]
