"""The questions of a soak, the check of its answers, and the clients who ask all the time.

The digits that were asked for are read by the demo's classifier, sums are added, texts have their label. Whatever was
answered once has to come again: images to a level of a byte, vectors to a bit of a float, videos to what a codec loses.
"""

from __future__ import annotations

import base64
import io
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import av
import httpx
import numpy as np
from kit.waiting import wait_until
from PIL import Image
from soak.deaths import Deaths
from soak.schedule import drawn_requests

from adder_data import question, training_pairs
from digits import WORDS, Judge, load_split

TIMEOUT_S: Final = 120.0
PACE_S: Final = 0.8  # of one client, from the start of one request to that of the next
NUM_CLIENTS: Final = 3
PAUSE_S: Final = 0.5  # before who lost a connection asks again
NUM_TRIES: Final = 4
EMBEDDED: Final = ("digits-clip", "texts-bert")
DRAWING: Final = ("digits-flux", "digits-flux-inverted", "digits-sdxl")
LABELLED: Final = "so tired of this rain, who else wants to be at the beach right now :)"


@dataclass(frozen=True)
class Question:
    """A request, what is read of its answer, and how far that may be from what was answered first.

    `is_right` is asked of the first answer, and knows nothing of the cluster.
    """

    kind: str
    path: str
    body: Mapping[str, Any]
    tolerance: float
    is_right: Callable[[np.ndarray], bool]


class Lost(Exception):
    """A request without an answer, or with another one than it should have."""


class Broken(Exception):
    """A connection, stream or job that ended before its answer."""


def questions(seed: int, video: str) -> list[Question]:
    """Return the questions of a soak, drawn by its seed."""
    random_ = random.Random(f"questions {seed}")
    judge = Judge(load_split()[0])
    found = []
    for pair in random_.sample(training_pairs(), 12):
        chat = {"model": "adder", "messages": [{"role": "user", "content": question(pair)}], "max_tokens": 8}
        is_sum = _says(f"{sum(pair)}.")
        found += [Question(kind, "/v1/chat/completions", chat, 0, is_sum) for kind in ("chat", "chat stream")]
        found += [Question("left chat stream", "/v1/chat/completions", chat, 0, is_sum)]
        body = {"model": "adder", "input": question(pair), "max_output_tokens": 16}
        found += [Question("response", "/v1/responses", body, 0, is_sum)]
    for model in DRAWING:
        for digit in random_.sample(range(10), 5):
            image = {"model": model, "prompt": f"a handwritten {WORDS[digit]}", "seed": random_.getrandbits(31)}
            reads = _reads(judge, digit)
            found += [Question("image", "/v1/images/generations", image, 1, reads)]
            found += [Question("left image stream", "/v1/images/generations", image, 1, reads)]
    for model in EMBEDDED:
        for _ in range(6):
            text = f"a handwritten {random_.choice(WORDS)} beside the number {random_.randrange(100)}"
            found += [Question("embedding", "/v1/embeddings", {"model": model, "input": text}, 1e-5, _has_length)]
    classified = {"model": "text-classifier", "messages": [{"role": "user", "content": LABELLED}]}
    found += [Question("classifier", "/v1/chat/completions", classified, 0, _says("tweet"))]
    for number in range(2):
        clip = {"model": video, "prompt": "a cat", "seed": number, "num_inference_steps": 3, "num_frames": 9}
        clip |= {"width": 32, "height": 16, "max_sequence_length": 16}
        found += [Question("video", "/v1/videos", clip, 8, lambda frames: frames.shape == (9, 16, 32, 3))]
    return found


def _says(text: str) -> Callable[[np.ndarray], bool]:
    return lambda answer: bool(np.array_equal(answer, _letters(text)))


def _reads(judge: Judge, digit: int) -> Callable[[np.ndarray], bool]:
    return lambda pixels: int(judge.read([pixels.astype(np.uint8)])[0]) == digit


def _has_length(vector: np.ndarray) -> bool:
    return bool(np.isfinite(vector).all()) and float(np.abs(vector).sum()) > 0


def _letters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(int)


class Asker:
    """Asks questions as a client with one connection, and reads their answers."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def close(self) -> None:
        self.http.close()

    def ask(self, one: Question) -> np.ndarray | None:
        """Return the content of the answer, None of a stream that was left. Raises Lost, Broken, HTTPError."""
        if one.kind == "video":
            return self._video(one)
        if one.kind.endswith("stream"):
            return self._stream(one)
        answer = self.http.post(one.path, json=one.body)
        if answer.status_code != 200:
            raise Lost(f"{answer.status_code} {answer.text[:300]}")
        return _read(one, answer.json())

    def _stream(self, one: Question) -> np.ndarray | None:
        body = {**one.body, "stream": True}
        if one.path.endswith("generations"):
            body |= {"partial_images": 3}
        said = ""
        with self.http.stream("POST", one.path, json=body) as answer:
            if answer.status_code != 200:
                raise Lost(f"{answer.status_code} {answer.read().decode()[:300]}")
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if one.kind.startswith("left"):
                    return None
                if line == "data: [DONE]":
                    return _letters(said)
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Broken(line)
                said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        raise Broken(f"a stream ended after {said!r}")

    def _video(self, one: Question) -> np.ndarray:
        begun = self.http.post(one.path, json=one.body)
        if begun.status_code != 200:
            raise (Broken if begun.status_code == 502 else Lost)(f"{begun.status_code} {begun.text[:300]}")
        where = f"{one.path}/{begun.json()['id']}"
        job: dict[str, Any] = {}

        def is_over() -> bool:
            answer = self.http.get(where)
            if answer.status_code != 200:
                raise Broken(f"{answer.status_code} {answer.text[:300]}")
            job.update(answer.json())
            return job["status"] in ("completed", "failed")

        wait_until(is_over, "a video", TIMEOUT_S)
        if job["status"] == "failed":
            raise Broken(f"the job failed: {job['error']}")
        content = self.http.get(f"{where}/content")
        if content.status_code != 200:
            raise Broken(f"{content.status_code} {content.text[:300]}")
        self.http.delete(where)
        with av.open(io.BytesIO(content.content)) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(int)


def _read(one: Question, answer: Any) -> np.ndarray:
    if one.kind == "response":
        return _letters(answer["output"][0]["content"][0]["text"])
    if "choices" in answer:
        return _letters(answer["choices"][0]["message"]["content"])
    if one.kind == "image":
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))).astype(int)
    return np.array(answer["data"][0]["embedding"], np.float32)


def first_answers(url: str, asked: Sequence[Question]) -> tuple[dict[int, np.ndarray], list[str]]:
    """Ask each question once, at rest. Return the answers by the questions' places, and which are not right.

    A stream has the answer of the question that is not one.
    """
    asker, answers, wrong = Asker(url), dict[int, np.ndarray](), list[str]()
    for place, one in enumerate(asked):
        if one.kind.startswith("left"):
            continue
        found = asker.ask(one)
        assert found is not None
        if one.is_right(found):
            answers[place] = found
        else:
            wrong.append(f"{one.kind} {one.body}")
    asker.close()
    return answers, wrong


def is_same(found: np.ndarray, expected: np.ndarray, one: Question) -> bool:
    """Return whether an answer is the one that was given first, but for what its kind may differ by."""
    if found.shape != expected.shape:
        return False
    distance = np.abs(found - expected)
    # A codec is lossy here and there; all else is bounded everywhere.
    return bool((distance.mean() if one.kind == "video" else distance.max(initial=0)) <= one.tolerance)


@dataclass
class Outcome:
    """The outcomes of the requests. `again`: asked once more, because a process that held their connection died."""

    right: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Load:
    """Clients who ask drawn questions at their pace for the length of the block, but while they are told to rest."""

    def __init__(
        self,
        url: str,
        seed: int,
        asked: Sequence[Question],
        answers: Mapping[int, np.ndarray],
        deaths: Deaths,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._pause_s = pause_s
        self._url, self._seed, self._asked, self._answers, self._deaths = url, seed, asked, answers, deaths
        self._stop, self._may_ask = threading.Event(), threading.Event()
        self._lock, self._num_asking = threading.Lock(), 0
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(NUM_CLIENTS)]
        self.outcome = Outcome()

    def __enter__(self) -> Self:
        self._may_ask.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._may_ask.set()
        for thread in self._threads:
            thread.join()

    @property
    def num_answers(self) -> int:
        return sum(self.outcome.right.values())

    def rest(self) -> None:
        """Return once nobody waits for an answer; nobody asks until `go_on`."""
        self._may_ask.clear()
        wait_until(lambda: not self._num_asking, "answers to all", 2 * TIMEOUT_S)

    def go_on(self) -> None:
        self._may_ask.set()

    def _ask_on(self, number: int) -> None:
        asker = Asker(self._url)
        for kind, draw in drawn_requests(self._seed, number):
            self._may_ask.wait()
            if self._stop.is_set():
                break
            start_s = time.monotonic()
            with self._lock:
                self._num_asking += 1
            try:
                self.ask(asker, kind, draw)
            except Exception as error:  # a client that ends unseen would ask for nothing more
                self.outcome.problems.append(f"{kind}: {error!r}")
            finally:
                with self._lock:
                    self._num_asking -= 1
            self._stop.wait(max(0.0, start_s + PACE_S - time.monotonic()))
        asker.close()

    def ask(self, asker: Asker, kind: str, draw: int) -> None:
        """Ask a question of the kind, again where a death has ended it, and count what came of it."""
        place = self._place_of(kind, draw)
        one, start_s = self._asked[place], time.monotonic()
        for _ in range(NUM_TRIES):
            try:
                found = asker.ask(one)
            except (Broken, httpx.TransportError) as error:
                what = "job" if kind == "video" else "stream" if kind.endswith("stream") else "answer"
                if self._deaths.explain(what, start_s):
                    self.outcome.again[kind] += 1
                    time.sleep(self._pause_s)
                    continue
                return self._note(one, start_s, repr(error))
            except Lost as error:
                return self._note(one, start_s, str(error))
            if found is None or is_same(found, self._answers[place], one):
                self.outcome.right[kind] += 1
                return None
            return self._note(one, start_s, f"WRONG: {str(found)[:200]} instead of {str(self._answers[place])[:200]}")
        return self._note(one, start_s, f"no answer in {NUM_TRIES} tries")

    def _place_of(self, kind: str, draw: int) -> int:
        places = [n for n, one in enumerate(self._asked) if one.kind == kind and (n in self._answers or "left" in kind)]
        return places[draw % len(places)]

    def _note(self, one: Question, start_s: float, what: str) -> None:
        took_s = time.monotonic() - start_s
        self.outcome.problems.append(f"{one.kind} {one.body['model']} after {took_s:.1f} s: {what}")


def probes(asked: Sequence[Question], answers: Mapping[int, np.ndarray]) -> Iterator[Question]:
    """Yield the questions that latency is measured with, in turn: the same ones each time, of few kinds."""
    wanted = [
        one
        for number, one in enumerate(asked)
        if number in answers
        and (one.kind in ("chat", "embedding") or (one.kind == "image" and one.body["model"] == DRAWING[0]))
    ]
    by_kind = {kind: [one for one in wanted if one.kind == kind] for kind in ("chat", "embedding", "image")}
    number = 0
    while True:
        for those in by_kind.values():
            yield those[number % len(those)]
        number += 1
