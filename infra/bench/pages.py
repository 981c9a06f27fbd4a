"""`infra.bench pages`: what the pages cost: bytes of script, first paint, and the live view of the cluster at each end.

First paint and the cost of viewers are measured on a cluster; 64 workers with 200 models are made up, and served by a
process of their own. Processor time is told, not the time that passes, as far as it can be: machines are shared.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import multiprocessing
import random
import re
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import httpx
import psutil
from pydantic_core import to_json

from configs.cluster import ClusterConfig
from deployments.console.output import Column, print_line, print_table
from deployments.console.running import cluster_up
from deployments.ingress.admin.picture import Chronicle, Picture, changes_of, nearness_of, picture_of
from deployments.ingress.messages.responses import event_of
from deployments.ingress.web_pages import FOLDER, PAGES, imports_of

NUM_VIEWERS: Final = 10
NUM_WORKERS, NUM_MODELS, MODULES_EACH = 64, 200, 12
UPDATES_PER_S: Final = 60
WINDOW_S: Final = 20.0
ROUNDS: Final = 7
COLUMNS: Final = (Column("figure", "text"), Column("measured", align="right"), Column("target", align="right"))


def measure_pages(config: ClusterConfig, source: str) -> dict[str, Any]:
    """Return all figures. Starts a headless Chromium, and the cluster of a config.

    The viewers have an event loop of their own, for which playwright has to be gone from this thread.
    """
    found: dict[str, Any] = {"script_bytes": _script_bytes(), "look_ms": _look_ms()}
    with _browser() as browser:
        found["large_view_cpu"] = _browser_share(browser)
    with cluster_up(config, source) as url:
        with _browser() as browser:
            found["first_paint_ms"] = {path: _first_paint_ms(browser, url + path) for path in PAGES}
        found["ingress_cpu"] = _ingress_share(url)
    return found


def print_pages_figures(found: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_line(json.dumps(found, indent=2))
        return
    scripts, paint, look = found["script_bytes"], found["first_paint_ms"], found["look_ms"]
    rows = [
        ["script, gzipped, all pages", f"{scripts['all'] / 1e3:.1f} kB", "150 kB"],
        *([f"script of {path}", f"{scripts[path] / 1e3:.1f} kB", ""] for path in PAGES),
        *([f"first contentful paint of {path}", f"{ms:.0f} ms", "1000 ms"] for path, ms in paint.items()),
        [f"ingress with {NUM_VIEWERS} viewers, more than with none", f"{found['ingress_cpu']:.2%} of a core", "1 %"],
        [f"one look, {NUM_WORKERS} workers x {NUM_MODELS} models", f"{look['ms']:.1f} ms", "10 ms (1 a second)"],
        ["its change, as sent", f"{look['change_bytes'] / 1e3:.0f} kB", ""],
        [f"browser, {UPDATES_PER_S} changes/s of that", f"{found['large_view_cpu']:.1%} of a core", "15 %"],
    ]
    print_table(COLUMNS, rows, title="pages")


def _script_bytes() -> dict[str, int]:
    sources = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*.js")}
    sizes = {name: len(gzip.compress(content, 9)) for name, content in sources.items()}
    found = {path: sum(sizes[name] for name in imports_of(f"{page}.js", sources)) for path, page in PAGES.items()}
    return {**found, "all": sum(sizes.values())}


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def _first_paint_ms(browser: Any, url: str) -> float:
    """Return the median over visits with an empty cache."""
    times = []
    for _ in range(ROUNDS):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        times.append(page.wait_for_function(script).json_value())
        context.close()
    return statistics.median(times)


def _ingress_share(url: str) -> float:
    """Return the share of a core that the ingress replica takes with viewers, less that without."""
    below = psutil.Process().children(recursive=True)
    ingress = next(one for one in below if re.match(r"ray::ServeReplica:[^:]+:ingress", _title(one)))
    before = _cpu_share(ingress)
    return asyncio.run(_with_viewers(url, ingress)) - before


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended just now
        return ""


def _cpu_share(process: psutil.Process) -> float:
    start, began_s = process.cpu_times(), time.monotonic()
    time.sleep(WINDOW_S)
    end = process.cpu_times()
    return (end.user + end.system - start.user - start.system) / (time.monotonic() - began_s)


async def _with_viewers(url: str, ingress: psutil.Process) -> float:
    limits = httpx.Limits(max_connections=NUM_VIEWERS)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:

        async def view(started: asyncio.Event) -> None:
            async with client.stream("GET", f"{url}/admin/live") as response:
                async for _ in response.aiter_bytes():
                    started.set()

        started = [asyncio.Event() for _ in range(NUM_VIEWERS)]
        viewers = [asyncio.create_task(view(one)) for one in started]
        await asyncio.gather(*(one.wait() for one in started))
        share = await asyncio.to_thread(_cpu_share, ingress)
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
        return share


def _look_ms(rounds: int = 50) -> dict[str, float]:
    """Return the processor time of one look at a large cluster: its picture, the change, and its JSON."""
    clusters, chronicle = _large_clusters(random.Random(0)), Chronicle()
    described = [copy.deepcopy(next(clusters)) for _ in range(8)]
    picture, sizes = _looked_at(described[0], chronicle, 0.0), []
    began_s = time.process_time()
    for number in range(rounds):
        newer = _looked_at(described[number % 8], chronicle, float(number))
        sizes.append(len(to_json(changes_of(picture, newer))))
        picture = newer
    return {"ms": (time.process_time() - began_s) / rounds * 1e3, "change_bytes": statistics.median(sizes)}


def _looked_at(described: tuple[dict[str, Any], dict[str, Any]], chronicle: Chronicle, at_s: float) -> Picture:
    return picture_of(*described, nearness_of(*described), chronicle, at_s)


def _large_clusters(rng: random.Random) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the answers of /admin/cluster and /admin/decisions of a made-up cluster, some workers changed each time."""
    models = [_model(f"model-{number}") for number in range(NUM_MODELS)]
    workers = [_worker(f"w{number:07}", rng) for number in range(NUM_WORKERS)]
    cluster = {"cluster": "large", "num_models": NUM_MODELS, "num_nodes": 0, "nodes": [], "text_encoders": []}
    planned = {"switching_to": None, "fixed_switch_s": 0.1, "attach_bytes_per_s": 1e10, "load_bytes_per_s": 2e9}
    while True:
        for place in rng.sample(range(NUM_WORKERS), 8):
            workers[place] = _worker(workers[place]["name"], rng)
        plans = [{"name": one["name"], "node": "", "models": [], **planned} for one in workers]
        yield {**cluster, "models": models, "workers": list(workers)}, {"workers": plans, "decisions": []}


def _model(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": name, "kind": "diffusion", "state": "ready", "error": "", "nbytes": 7 << 30}
    return answer | {"resident": {}, "built": []}


def _worker(name: str, rng: random.Random) -> dict[str, Any]:
    modules = [
        {
            "component": rng.choice(("transformer", "vae", "text_encoder")),
            "models": [f"model-{rng.randrange(NUM_MODELS)}"],
            "bytes": rng.randrange(1 << 28, 1 << 33),
            "leases": rng.randrange(2),
            "pinned": False,
            "key": f"{rng.getrandbits(256):064x}",
        }
        for _ in range(MODULES_EACH)
    ]
    answer = {"name": name, "device": "cuda", "budget_bytes": 80 << 30, "charged_bytes": 0, "resident_bytes": 0}
    return answer | {"modules": modules, "num_switches": 1, "last_switches": {}}


def _browser_share(browser: Any) -> float:
    """Return the share of a core that the page's thread takes for a large cluster that changes often."""
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=_serve_large, args=(port,), daemon=True)
    server.start()
    try:
        page = browser.new_context(viewport={"width": 1600, "height": 1000}).new_page()
        page.goto(f"http://127.0.0.1:{port.get(timeout=60)}/cluster")
        page.get_by_text("live", exact=True).wait_for()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        start, began_s = _task_s(session), time.monotonic()
        page.wait_for_timeout(WINDOW_S * 1e3)
        share = (_task_s(session) - start) / (time.monotonic() - began_s)
        page.context.close()
        return share
    finally:
        server.kill()
        server.join()


def _task_s(session: Any) -> float:
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def _serve_large(port: multiprocessing.Queue[int]) -> None:
    import socket

    import uvicorn
    from fastapi import FastAPI
    from starlette.responses import StreamingResponse

    from deployments.ingress.web_pages import create_web_router

    app = FastAPI()
    app.include_router(create_web_router())
    clusters, chronicle = _large_clusters(random.Random(0)), Chronicle()
    pictures: list[Picture] = [_looked_at(copy.deepcopy(next(clusters)), chronicle, time.time()) for _ in range(64)]

    @app.get("/admin/live")
    async def live() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            yield event_of(to_json(pictures[0]).decode(), "picture")
            number = 0
            while True:
                changes = changes_of(pictures[number % 64], pictures[(number + 1) % 64])
                changes["totals"] = {"at_s": time.time()}
                number += 1
                yield event_of(to_json(changes).decode(), "change")
                await asyncio.sleep(1 / UPDATES_PER_S)

        return StreamingResponse(events(), media_type="text/event-stream")

    listening = socket.create_server(("127.0.0.1", 0))
    port.put(listening.getsockname()[1])
    asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listening]))
