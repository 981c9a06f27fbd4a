"""`infra.bench workflows`: eight users' workflows of ComfyUI at once, beside the same workflows in one queue.

The same cluster runs both, in turn, in an order that is drawn for each round. One queue is what a ComfyUI server has: a
prompt begins when the one before it has ended. Every prompt is a KSampler workflow with a seed of its own, on one of
the models, in turn; images per second are those of a whole round, and figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp

from configs.cluster import ClusterConfig
from deployments.console.output import Column, print_json, print_table
from deployments.console.running import cluster_up

Way = Literal["at once", "one queue"]

WAYS: Final[tuple[Way, ...]] = ("at once", "one queue")
_COLUMNS: Final = (Column("way", "text"), Column("images/s", align="right"), Column("p50 ms", align="right"))
_FAILURES: Final = ("execution_error", "execution_interrupted")
_BOUND_S: Final = 300.0  # of a prompt


@dataclass(frozen=True, slots=True)
class WorkflowSettings:
    """The users, the prompts of each in a round, and the rounds of each way; what a workflow asks for."""

    models: Sequence[str] = ("digits-flux", "digits-flux-inverted")
    users: int = 8
    prompts: int = 4
    rounds: int = 5
    steps: int = 16
    side: int = 32


@dataclass(frozen=True, slots=True)
class Round:
    """The images per second of a round, and the seconds of each prompt from its sending on."""

    images_per_s: float
    took_s: Sequence[float]


def workflow(model: str, seed: int, settings: WorkflowSettings) -> dict[str, Any]:
    """Return a workflow in the API's form: a prompt, a KSampler and its image."""
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "model": ("CheckpointLoaderSimple", {"ckpt_name": model}),
        "text": ("CLIPTextEncode", {"text": "a handwritten five", "clip": ["model", 1]}),
        "empty": ("EmptySD3LatentImage", {"width": settings.side, "height": settings.side, "batch_size": 1}),
        "sample": (
            "KSampler",
            {
                **{"model": ["model", 0], "positive": ["text", 0], "negative": ["text", 0]},
                **{"latent_image": ["empty", 0], "seed": seed, "steps": settings.steps, "cfg": 1.0, "denoise": 1.0},
                **{"sampler_name": "euler", "scheduler": "simple"},
            },
        ),
        "decode": ("VAEDecode", {"samples": ["sample", 0], "vae": ["model", 2]}),
        "save": ("PreviewImage", {"images": ["decode", 0]}),
    }
    return {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}


def measure_workflows(config: ClusterConfig, source: str, settings: WorkflowSettings, seed: int) -> dict[str, Any]:
    """Return the figures of both ways. Starts the cluster of a config."""
    with cluster_up(config, source) as url:
        return asyncio.run(_measured(url, settings, random.Random(seed)))


def print_workflows(found: dict[str, Any], as_json: bool) -> None:
    """Print the figures of `measure_workflows`."""
    if as_json:
        print_json(found)
        return
    rows = [[way, f"{one['images_per_s']:.2f}", f"{one['p50_ms']:.0f}"] for way, one in found["ways"].items()]
    print_table(_COLUMNS, rows, title=f"{found['users']} users of workflows: at once / one queue {found['ratio']:.2f}")


async def _measured(url: str, settings: WorkflowSettings, chance: random.Random) -> dict[str, Any]:
    async with aiohttp.ClientSession(url) as session:
        return await compare(session, settings, chance)


async def compare(session: aiohttp.ClientSession, settings: WorkflowSettings, chance: random.Random) -> dict[str, Any]:
    """Return the figures of both ways, after a first round of each that is not counted."""
    seeds = itertools.count(chance.randrange(2**40))
    found: dict[Way, list[Round]] = {way: [] for way in WAYS}
    for number in range(settings.rounds + 1):
        for way in chance.sample(WAYS, len(WAYS)):
            done = await run_round(session, settings, way, seeds)
            if number:
                found[way].append(done)
    ways = {
        way: {
            "images_per_s": statistics.median(one.images_per_s for one in rounds),
            "p50_ms": 1e3 * statistics.median(took for one in rounds for took in one.took_s),
        }
        for way, rounds in found.items()
    }
    ratio = ways["at once"]["images_per_s"] / ways["one queue"]["images_per_s"]
    return {"users": settings.users, "ways": ways, "ratio": ratio}


async def run_round(
    session: aiohttp.ClientSession, settings: WorkflowSettings, way: Way, seeds: Iterator[int]
) -> Round:
    """Run the prompts of all users, who each wait for one before they send the next."""
    queue = asyncio.Lock() if way == "one queue" else None
    took: list[float] = []

    async def use(user: int) -> None:
        async with session.ws_connect("/ws", params={"clientId": f"user-{user}"}) as socket:
            for number in range(settings.prompts):
                model = settings.models[(user + number) % len(settings.models)]
                prompt = {"prompt": workflow(model, next(seeds), settings), "client_id": f"user-{user}"}
                sent_s = time.perf_counter()
                async with queue or _no_queue():
                    await run_prompt(session, socket, prompt)
                took.append(time.perf_counter() - sent_s)

    begun_s = time.perf_counter()
    await asyncio.gather(*(use(user) for user in range(settings.users)))
    return Round(len(took) / (time.perf_counter() - begun_s), took)


@contextlib.asynccontextmanager
async def _no_queue() -> AsyncIterator[None]:
    yield


async def run_prompt(
    session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, prompt: dict[str, Any]
) -> None:
    """Send a prompt and read its client's socket until it has made its image. Raises OSError for one that failed."""
    async with asyncio.timeout(_BOUND_S):
        async with session.post("/prompt", json=prompt) as answer:
            if not answer.ok:
                raise OSError(f"/prompt answered {answer.status}: {(await answer.text())[:300]}")
            prompt_id = (await answer.json())["prompt_id"]
        async for message in socket:
            event = message.json()
            if event["data"].get("prompt_id") != prompt_id:
                continue
            if event["type"] in _FAILURES:
                raise OSError(f"a workflow failed: {event}")
            if event["type"] == "executing" and event["data"]["node"] is None:
                return
    raise OSError("/ws ended before a workflow did")
