"""`atelier bench serve`: the demo cluster beside stock diffusers and transformers in one process, in one run.

Requests go to ours and to the peer in turn, so that both see the same machine; medians are reported. Each request has
a text that was not there before, the same for both: ours would answer a known one from its cache of encodings.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from rich.console import Console
from rich.table import Table

from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from deployments.console.client import Client
from deployments.console.running import cluster_up
from deployments.engines.llm.chat import Message
from deployments.records import ChatRequest, ImageRequest
from infra.bench.command.figures import OnProgress, Parts
from infra.bench.command.peers import Peer

LOOKS = [
    "bold",
    "thin",
    "tall",
    "small",
    "round",
    "slanted",
    "neat",
    "rough",
    "dark",
    "light",
    "wide",
    "narrow",
    "old",
    "plain",
    "curly",
    "sharp",
]
WAYS = ["handwritten", "drawn", "painted", "printed", "scribbled", "written"]
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NOT_STOCK = ("texts-bert", "texts-head")  # an encoder and a head: no pipeline, and no language model
SDXL_GUIDANCE = 4.0
STEPS = 16
SEED = 0  # of the noise


@dataclass(frozen=True)
class _Line:
    """A figure: ours and the peer's in milliseconds; `ratio` is peer / ours, above 1 means that ours is faster.

    `num_cached` of the `num_answers` needed no encoder, as all their texts were in our cache; None: no encoder at all.
    """

    what: str
    ours_ms: float
    stock_ms: float
    num_answers: int = 0
    num_cached: int | None = None

    @property
    def ratio(self) -> float:
        return self.stock_ms / self.ours_ms

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "ours_ms": self.ours_ms,
            "stock_ms": self.stock_ms,
            "ratio": self.ratio,
            "answers": self.num_answers,
            "cached": self.num_cached,
        }


@dataclass(frozen=True)
class _TimedAnswer:
    """An answer of ours, and the peer's time for the same."""

    details: dict[str, Any]
    ours_ms: float
    stock_ms: float

    @property
    def is_cached(self) -> bool | None:
        """Return whether every text came from the cache; None when no text encoder was asked."""
        use = self.details.get("encoder_cache")
        return use["hits"] > 0 and use["misses"] == 0 if use else None


def _fresh_prompts(seed: int) -> Iterator[str]:
    """Yield short texts in a drawn order, each once."""
    texts = [" ".join(["a", *words]) for words in itertools.product(LOOKS, WAYS, DIGITS)]
    random.Random(seed).shuffle(texts)
    return iter(texts)


def _fresh_questions(seed: int) -> Iterator[str]:
    """Yield sums of two-digit numbers in a drawn order, each once."""
    sums = list(itertools.product(range(10, 50), repeat=2))
    random.Random(seed).shuffle(sums)
    return (f"What is {first} + {second}?" for first, second in sums)


def measure_serve(
    config: ClusterConfig, config_path: str, rounds: int = 15, seed: int = 0, progress: OnProgress | None = None
) -> dict[str, Any]:
    """Start a cluster with a fresh store, measure, stop it; returns all figures as a JSON-able object.

    `seed` is that of the texts, of which there are enough for 80 rounds.
    """
    done = Parts(5, progress).done
    prompts, questions = _fresh_prompts(seed), _fresh_questions(seed)
    paths = {model.id: str(model.path) for model in config.models}
    with tempfile.TemporaryDirectory() as folder:
        fresh = config.model_copy(update={"store": config.store.model_copy(update={"path": Path(folder) / "store"})})
        peer, stock_start_ms = done(_timed(lambda: _start_peer(fresh, paths)))
        start = time.perf_counter()
        with cluster_up(fresh, config_path) as url:
            lines = [_Line("cold start until every model answers", (time.perf_counter() - start) * 1e3, stock_start_ms)]
            client = done(Client(url))
            lines += done(_first_and_warm(client, peer, rounds, prompts, questions))
            lines += done(_switches(client, peer, paths, rounds, prompts))
            overhead = done(_http_overhead(config.name, client, rounds, prompts, questions))
        peer.close()
    return {
        "figures": [line.as_dict() for line in lines],
        "http_overhead_ms": overhead,
        "rounds": rounds,
        "seed": seed,
        "threads": fresh.worker.num_threads or max(1, round(fresh.worker.num_cpus)),
    }


def _start_peer(config: ClusterConfig, paths: dict[str, str]) -> Peer:
    peer = Peer(config.worker.num_threads or max(1, round(config.worker.num_cpus)))
    for id_ in _stock_models(config):
        peer.run_order("load_model", model=id_, path=paths[id_], drop=[])
    return peer


def _stock_models(config: ClusterConfig) -> list[str]:
    """List the whole models of the config that are a pipeline or a language model: the peer loads these."""
    whole = [model.id for model in config.models if isinstance(model, ModelConfig) and model.component is None]
    return [id_ for id_ in whole if id_ not in NOT_STOCK]


def _first_and_warm(
    client: Client, peer: Peer, rounds: int, prompts: Iterator[str], questions: Iterator[str]
) -> list[_Line]:
    kinds: dict[str, tuple[Iterator[str], Callable[[str], Any], Callable[[str], float]]] = {
        "image, Flux": (prompts, partial(_image, client, "digits-flux"), partial(_stock_image, peer, "digits-flux")),
        "image, SDXL": (prompts, partial(_image, client, "digits-sdxl"), partial(_stock_image, peer, "digits-sdxl")),
        "chat": (
            questions,
            partial(_chat, client),
            lambda text: peer.run_order("answer_question", model="adder", question=text),
        ),
        "embedding": (
            prompts,
            lambda text: client.embed(model="digits-clip", input=text),
            lambda text: peer.run_order("embed_text", model="digits-flux", text=text),
        ),
    }
    lines = []
    for kind, (texts, ours, stock) in kinds.items():
        answers = [_ask_both(text, ours, stock) for text in itertools.islice(texts, rounds + 1)]
        lines.append(_line(f"first request: {kind}", answers[:1]))
        lines.append(_line(f"warm request: {kind}", answers[1:]))
    return lines


def _ask_both(text: str, ours: Callable[[str], Any], stock: Callable[[str], float]) -> _TimedAnswer:
    stock_ms = stock(text)
    details, ours_ms = _timed(partial(ours, text))
    return _TimedAnswer(details, ours_ms, stock_ms)


def _line(what: str, answers: list[_TimedAnswer]) -> _Line:
    cached = [answer.is_cached for answer in answers if answer.is_cached is not None]
    ours_ms, stock_ms = _medians([(answer.ours_ms, answer.stock_ms) for answer in answers])
    return _Line(what, ours_ms, stock_ms, len(answers), sum(cached) if cached else None)


def _switches(client: Client, peer: Peer, paths: dict[str, str], rounds: int, prompts: Iterator[str]) -> list[_Line]:
    """Measure the third leg of flux -> sdxl -> flux: the switch alone, and the whole request.

    A process with room for one pipeline also has to free the other, which for stock is a garbage collection: its
    time stands apart.
    """
    switch, request = "flux -> sdxl -> flux: third leg, switch alone", "flux -> sdxl -> flux: third leg, whole request"
    found: dict[str, list[_TimedAnswer]] = {}
    for _ in range(rounds):
        _image(client, "digits-flux", next(prompts))
        _image(client, "digits-sdxl", next(prompts))
        prompt = next(prompts)
        details, ours_ms = _timed(partial(_image, client, "digits-flux", prompt))
        peer.run_order("load_model", model="digits-sdxl", path=paths["digits-sdxl"], drop=["digits-flux"])
        free_ms = peer.run_order("drop_models", models=["digits-sdxl"])
        load_ms = peer.run_order("load_model", model="digits-flux", path=paths["digits-flux"], drop=[])
        image_ms = _stock_image(peer, "digits-flux", prompt)
        switch_ms = float(details["timings_ms"]["switch"])
        for what, ours, stock in (
            (f"{switch}; stock loads", switch_ms, load_ms),
            (f"{switch}; stock frees and loads", switch_ms, free_ms + load_ms),
            (f"{request}; stock loads", ours_ms, load_ms + image_ms),
            (f"{request}; stock frees and loads", ours_ms, free_ms + load_ms + image_ms),
        ):
            found.setdefault(what, []).append(_TimedAnswer(details, ours, stock))
    return [_line(what, answers) for what, answers in found.items()]


def _http_overhead(
    app: str, client: Client, rounds: int, prompts: Iterator[str], questions: Iterator[str]
) -> dict[str, float]:
    """Return medians of HTTP calls minus handle calls, in turn, of requests that differ in text only."""
    handle = serve.get_app_handle(app)
    pairs: dict[str, list[tuple[float, float]]] = {"chat": [], "image": []}
    for _ in range(rounds * 2):
        by_http = _timed(partial(_chat, client, next(questions)))[1]
        message = Message(role="user", content=next(questions))
        chat = ChatRequest(model="adder", messages=(message,), temperature=0)
        pairs["chat"].append((by_http, _timed(partial(_call_handle, handle.chat, chat))[1]))
        options: dict[str, Any] = {"model": "digits-flux", "seed": SEED, "num_inference_steps": 1}
        by_http = _timed(partial(client.generate, prompt=next(prompts), **options))[1]
        image = ImageRequest(prompt=next(prompts), **options)
        pairs["image"].append((by_http, _timed(partial(_call_handle, handle.generate, image))[1]))
    return {kind: statistics.median(http - call for http, call in samples) for kind, samples in pairs.items()}


def _call_handle(method: Any, record: Any) -> Any:
    return method.remote(record).result()


def _image(client: Client, model: str, prompt: str) -> dict[str, Any]:
    guidance = {"guidance_scale": SDXL_GUIDANCE} if "sdxl" in model else {}
    asked = {"model": model, "prompt": prompt, "seed": SEED, "size": "32x32", "num_inference_steps": STEPS}
    return client.generate(**asked, **guidance).details


def _stock_image(peer: Peer, model: str, prompt: str) -> float:
    options: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": STEPS}
    options |= {"guidance_scale": SDXL_GUIDANCE} if "sdxl" in model else {"max_sequence_length": 16}
    return peer.run_order("make_image", model=model, prompt=prompt, seed=SEED, options=options)


def _chat(client: Client, question: str) -> dict[str, Any]:
    return client.chat(model="adder", messages=[{"role": "user", "content": question}], temperature=0)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - start) * 1e3


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    ours, stock = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(stock)


def print_serve_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of ours beside stock, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("what", "Atelier ms", "stock ms", "stock / Atelier", "of ours from the cache")
    for line in figures["figures"]:
        cached = "" if line["cached"] is None else f"{line['cached']} of {line['answers']}"
        row = (f"{line['ours_ms']:.1f}", f"{line['stock_ms']:.1f}", f"{line['ratio']:.2f}", cached)
        table.add_row(line["what"], *row)
    console = Console()
    console.print(table)
    overhead = "  ".join(f"{kind} {ms:.1f} ms" for kind, ms in figures["http_overhead_ms"].items())
    console.print(f"HTTP over the handle call: {overhead}   (medians of {figures['rounds']} rounds or more)")
