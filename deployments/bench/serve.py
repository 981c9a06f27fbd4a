"""`atelier bench serve`: the demo cluster beside stock diffusers and transformers in one process, in one run.

Requests go to ours and to the peer in turn, so that both see the same machine; medians are reported.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve

from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from deployments.bench.peer import Peer
from deployments.client import Client
from deployments.records import ChatRequest, ImageRequest, Message
from deployments.running import APP_NAME, cluster_up

PROMPT = "a handwritten seven"
QUESTION = "What is 12 + 7?"
SDXL_GUIDANCE = 4.0
STEPS = 16


@dataclass(frozen=True)
class Line:
    """One figure: ours and the peer's in milliseconds; `ratio` is peer / ours, above 1 means that ours is faster."""

    what: str
    ours_ms: float
    stock_ms: float

    @property
    def ratio(self) -> float:
        return self.stock_ms / self.ours_ms

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "ours_ms": self.ours_ms, "stock_ms": self.stock_ms, "ratio": self.ratio}


def run(config: ClusterConfig, config_path: str, rounds: int = 15) -> dict[str, Any]:
    """All figures as one JSON-able object. Starts and stops its own cluster with a fresh store."""
    paths = {model.id: str(model.path) for model in config.models}
    with tempfile.TemporaryDirectory() as folder:
        fresh = config.model_copy(update={"store": config.store.model_copy(update={"path": Path(folder) / "store"})})
        peer, stock_start_ms = _timed(lambda: _start_peer(fresh, paths))
        start = time.perf_counter()
        with cluster_up(fresh, config_path) as url:
            lines = [Line("cold start until every model answers", (time.perf_counter() - start) * 1e3, stock_start_ms)]
            client = Client(url)
            lines += _first_and_warm(client, peer, rounds)
            lines += _switches(client, peer, paths, rounds)
            overhead = _http_overhead(client, rounds)
        peer.close()
    return {
        "figures": [line.as_dict() for line in lines],
        "http_overhead_ms": overhead,
        "rounds": rounds,
        "threads": fresh.worker.num_threads or max(1, round(fresh.worker.num_cpus)),
    }


def _start_peer(config: ClusterConfig, paths: dict[str, str]) -> Peer:
    peer = Peer(config.worker.num_threads or max(1, round(config.worker.num_cpus)))
    for model in config.models:
        if isinstance(model, ModelConfig) and model.component is None:
            peer.ask("load", model=model.id, path=paths[model.id], drop=[])
    return peer


def _first_and_warm(client: Client, peer: Peer, rounds: int) -> list[Line]:
    kinds: dict[str, tuple[Callable[[int], Any], Callable[[int], float]]] = {
        "image, Flux": (lambda n: _image(client, "digits-flux", n), lambda n: _stock_image(peer, "digits-flux", n)),
        "image, SDXL": (lambda n: _image(client, "digits-sdxl", n), lambda n: _stock_image(peer, "digits-sdxl", n)),
        "chat": (lambda _: _chat(client), lambda _: peer.ask("chat", model="adder", question=QUESTION)),
        "embedding": (
            lambda n: client.embed(model="digits-clip", input=f"the digit {n}"),
            lambda n: peer.ask("embed", model="digits-flux", text=f"the digit {n}"),
        ),
    }
    lines = []
    for kind, (ours, stock) in kinds.items():
        stock_first = stock(0)
        lines.append(Line(f"first request: {kind}", _timed(partial(ours, 0))[1], stock_first))
        pairs = [(_timed(partial(ours, n))[1], stock(n)) for n in range(1, rounds + 1)]
        lines.append(Line(f"warm request: {kind}", *_medians(pairs)))
    return lines


def _switches(client: Client, peer: Peer, paths: dict[str, str], rounds: int) -> list[Line]:
    """flux -> sdxl -> flux, and the third leg counts: the switch alone, and the whole request.

    A process with room for one pipeline also has to free the other, which for stock is a garbage collection.
    """
    switch, freeing, request = [], [], []
    for number in range(rounds):
        _image(client, "digits-flux", number)
        _image(client, "digits-sdxl", number)
        answer, ours_ms = _timed(partial(_image, client, "digits-flux", number))
        peer.ask("load", model="digits-sdxl", path=paths["digits-sdxl"], drop=["digits-flux"])
        free_ms = peer.ask("drop", models=["digits-sdxl"])
        load_ms = peer.ask("load", model="digits-flux", path=paths["digits-flux"], drop=[])
        switch_ms = float(answer.details["timings_ms"]["switch"])
        switch.append((switch_ms, load_ms))
        freeing.append((switch_ms, free_ms + load_ms))
        request.append((ours_ms, free_ms + load_ms + _stock_image(peer, "digits-flux", number)))
    return [
        Line("switch flux -> sdxl -> flux: third leg, switch alone; stock loads", *_medians(switch)),
        Line("switch flux -> sdxl -> flux: third leg, switch alone; stock frees and loads", *_medians(freeing)),
        Line("switch flux -> sdxl -> flux: third leg, whole request", *_medians(request)),
    ]


def _http_overhead(client: Client, rounds: int) -> dict[str, float]:
    """HTTP call minus handle call, medians of the same request in turn."""
    handle = serve.get_app_handle(APP_NAME)
    chat = ChatRequest(model="adder", messages=(Message(role="user", content=QUESTION),), temperature=0)
    image = ImageRequest(model="digits-flux", prompt=PROMPT, seed=1, num_inference_steps=1)
    body = {"model": "digits-flux", "prompt": PROMPT, "seed": 1, "num_inference_steps": 1}
    pairs: dict[str, list[tuple[float, float]]] = {"chat": [], "image": []}
    for _ in range(rounds * 2):
        pairs["chat"].append((_timed(lambda: _chat(client))[1], _timed(lambda: handle.chat.remote(chat).result())[1]))
        pairs["image"].append(
            (_timed(lambda: client.generate(**body))[1], _timed(lambda: handle.generate.remote(image).result())[1])
        )
    return {kind: statistics.median(http - call for http, call in samples) for kind, samples in pairs.items()}


def _image(client: Client, model: str, seed: int) -> Any:
    guidance = {"guidance_scale": SDXL_GUIDANCE} if "sdxl" in model else {}
    return client.generate(model=model, prompt=PROMPT, seed=seed, size="32x32", num_inference_steps=STEPS, **guidance)


def _stock_image(peer: Peer, model: str, seed: int) -> float:
    options: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": STEPS}
    options |= {"guidance_scale": SDXL_GUIDANCE} if "sdxl" in model else {"max_sequence_length": 16}
    return peer.ask("image", model=model, prompt=PROMPT, seed=seed, options=options)


def _chat(client: Client) -> Any:
    return client.chat(model="adder", messages=[{"role": "user", "content": QUESTION}], temperature=0)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - start) * 1e3


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    ours, stock = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(stock)
