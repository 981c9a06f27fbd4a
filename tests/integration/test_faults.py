"""kill -9 of any process of the cluster, at rest and under load: every request is answered, nothing is left behind.

Beside these: test_admin.py kills the registry at rest and a worker full of images, test_keeper_faults.py keepers.
"""

from __future__ import annotations

import base64
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from integration.harness import Cluster, pixels, replica_processes
from kit.waiting import wait_until
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from cluster.records.actor_names import NAMESPACE, cluster_key, keeper_name, registry_name

NUM_CLIENTS = 6
NUM_WORKERS, NUM_REPLICAS = 2, 3  # of the cluster: one is the text encoder's
MARGIN_BYTES = 2**20  # of the object store: messages of Ray's own come and go


@dataclass(frozen=True, eq=False)
class Question:
    """`tolerance`: beside batch-mates a batch has another shape, which may change the last bit of a float."""

    path: str
    body: Mapping[str, Any]
    read: Callable[[httpx.Response], np.ndarray]
    tolerance: float


def text(answer: httpx.Response) -> np.ndarray:
    return np.frombuffer(answer.json()["choices"][0]["message"]["content"].encode(), np.uint8).astype(int)


def vector(answer: httpx.Response) -> np.ndarray:
    data = answer.json()["data"][0]["embedding"]
    return np.frombuffer(base64.b64decode(data), "<f4") if isinstance(data, str) else np.array(data, np.float32)


def image(model: str, seed: int) -> Question:
    body = {"model": model, "prompt": f"a handwritten {seed}", "seed": seed, "num_inference_steps": 6}
    return Question("/v1/images/generations", body, pixels, 1)


def chat(total: str) -> Question:
    body = {"model": "adder", "messages": [{"role": "user", "content": f"What is {total}?"}]}
    return Question("/v1/chat/completions", body, text, 0)


def embedding(model: str, words: str) -> Question:
    return Question("/v1/embeddings", {"model": model, "input": words}, vector, 1e-5)


QUESTIONS = (
    image("digits-flux", 7),
    chat("12 + 7"),
    embedding("digits-clip", "a handwritten four"),
    image("digits-sdxl", 4),  # does not fit beside the other: workers switch, and ask the keeper, all the time
    chat("41 + 38"),
    embedding("minilm", "who stays when others go?"),
)


class Watched:
    """The cluster as its users and its operator see it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.http = httpx.Client(base_url=cluster.url, timeout=120)
        self._state = get_state_from_address(ray.get_runtime_context().gcs_address)

    def ask(self, question: Question, http: httpx.Client | None = None) -> httpx.Response:
        return (http or self.http).post(question.path, json=question.body)

    def answers(self) -> list[np.ndarray]:
        """Return the answers to all questions, one after the other."""
        found = [self.ask(question) for question in QUESTIONS]
        assert [answer.status_code for answer in found] == [200] * len(QUESTIONS), [answer.text for answer in found]
        return [question.read(answer) for question, answer in zip(QUESTIONS, found, strict=True)]

    def shown(self) -> dict[str, Any]:
        return self.http.get("/admin/cluster").json()

    def node(self) -> dict[str, Any]:
        """The keeper's figures; {} while it does not answer."""
        found = self.shown()["nodes"]
        return found[0] if found and "unreachable" not in found[0] else {}

    def holders(self) -> set[str]:
        return set(self.node().get("holders", ()))

    def all_holders(self) -> set[str]:
        """Return the living holders while each replica is one, else nobody."""
        found = self.holders()
        living = found - dead_of(found)
        return living if len(living) == NUM_REPLICAS else set()

    def unaccounted_bytes(self) -> int:
        """Return the bytes in the object store beside the extents that the keeper knows of."""
        reply = get_memory_info_reply(self._state)
        return reply.store_stats.object_store_bytes_used - self.node().get("resident_bytes", 0)

    def process_id(self, victim: str) -> int:
        """Return the process of the victim, the busiest one when there are several."""
        if victim == "keeper":
            name = keeper_name(cluster_key(self._cluster.config), ray.get_runtime_context().get_node_id())
            keeper = ray.get_actor(name, namespace=NAMESPACE)
            return ray.get(keeper.__ray_call__.remote(lambda _: os.getpid()))
        if victim == "registry":
            registry = ray.get_actor(registry_name(self._cluster.config), namespace=NAMESPACE)
            return ray.get(registry.__ray_call__.remote(lambda _: os.getpid()))
        return max(replica_processes(victim), key=lambda process: process.cpu_times().user).pid

    def is_whole(self) -> bool:
        """Everything answers, and the keeper knows everybody who has leases."""
        shown = self.shown()
        workers, encoders = shown["workers"], shown["text_encoders"]
        is_each_there = len(workers) == NUM_WORKERS and len(workers + encoders) == NUM_REPLICAS
        replicas_answer = is_each_there and all("modules" in r for r in workers + encoders)
        return "registry" not in shown and bool(self.node().get("num_extents")) and replicas_answer


@pytest.fixture
def watched(cluster: Cluster) -> Iterator[Watched]:
    made = Watched(cluster)
    wait_until(made.is_whole, "the whole cluster")
    yield made
    made.http.close()


@pytest.fixture
def kill(watched: Watched, record_property: Callable[[str, object], None]) -> Callable[[str], Callable[[], None]]:
    """kill -9. What it returns waits until all is as before."""

    def strike(victim: str) -> Callable[[], None]:
        process_id, generation = watched.process_id(victim), watched.node()["generation"]
        start_s = time.monotonic()
        os.kill(process_id, signal.SIGKILL)

        def is_replaced() -> bool:
            if victim == "keeper":
                return watched.node().get("generation", generation) != generation
            return watched.process_id(victim) != process_id

        def recovered() -> None:
            wait_until(lambda: not alive(process_id), f"the end of the {victim}")
            wait_until(lambda: succeeds(is_replaced) and watched.is_whole(), f"a {victim} in its place")
            record_property("recovery_ms", round((time.monotonic() - start_s) * 1e3))

        return recovered

    return strike


def dead_of(holders: set[str]) -> set[str]:
    """Return the holders whose replicas do not live: a holder is a kind and a replica's id."""
    living = {actor["name"].rpartition("#")[2] for actor in ray.util.list_named_actors(all_namespaces=True)}
    return {holder for holder in holders if holder.rpartition("-")[2] not in living}


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def succeeds(condition: Callable[[], bool]) -> bool:
    """False while an actor that is asked is restarting, or no replica is there."""
    try:
        return condition()
    except (ray.exceptions.RayActorError, ValueError):
        return False


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for question, one, other in zip(QUESTIONS, found, expected, strict=True):
        assert np.array_equal(one, other), question.body


def assert_close(question: Question, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape, question.body
    assert np.abs(found - expected).max() <= question.tolerance, question.body


def test_a_keeper_killed_at_rest_gets_back_what_replicas_hold_without_reading(
    watched: Watched, kill: Callable[[str], Callable[[], None]]
) -> None:
    expected = watched.answers()
    spare_bytes = watched.unaccounted_bytes()
    before = watched.node()
    kill("keeper")()
    # Each replica offers on its own; one worker's extents may all be the other's too, so bytes alone say nothing.
    wait_until(lambda: watched.node()["holders"] == before["holders"], "every holder's leases")
    after = watched.node()
    assert after["leased_bytes"] == before["leased_bytes"]
    assert (after["read_bytes"], after["adopted_bytes"]) == (0, before["leased_bytes"])
    assert_equal(watched.answers(), expected)
    wait_until(lambda: watched.unaccounted_bytes() <= spare_bytes + MARGIN_BYTES, "the memory of before")


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["worker", "text_encoder"])
def test_after_a_replica_was_killed_at_rest_another_answers_the_same_and_its_leases_end(
    watched: Watched, kill: Callable[[str], Callable[[], None]], victim: str
) -> None:
    expected, before = watched.answers(), watched.holders()
    watched.http.post("/v1/completions", json={"model": "incomplete", "prompt": "x"})  # a new worker preloads it, too
    spare_bytes, read_bytes = watched.unaccounted_bytes(), watched.node()["read_bytes"]
    kill(victim)()
    wait_until(lambda: len(before - watched.holders()) == 1, "the end of the dead one's leases")
    (dead,) = before - watched.holders()
    assert dead.startswith({"worker": "worker-", "text_encoder": "encoder-"}[victim])
    assert_equal(watched.answers(), expected)
    assert watched.node()["read_bytes"] == read_bytes  # what it had mapped is with the keeper
    wait_until(lambda: watched.unaccounted_bytes() <= spare_bytes + MARGIN_BYTES, "the memory of before")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("victim", ["keeper", "registry", "worker", "text_encoder"])
def test_every_request_is_answered_right_while_a_process_is_killed(
    watched: Watched, kill: Callable[[str], Callable[[], None]], victim: str
) -> None:
    expected = dict(zip(QUESTIONS, watched.answers(), strict=True))
    spare_bytes = watched.unaccounted_bytes()
    answers: list[tuple[Question, httpx.Response]] = []
    stop = threading.Event()

    def ask_on(first: int) -> None:
        with httpx.Client(base_url=watched.http.base_url, timeout=120) as http:
            for question in itertools.islice(itertools.cycle(QUESTIONS), first, None):
                if stop.is_set():
                    return
                answers.append((question, watched.ask(question, http)))

    def wait_for_round(what: str) -> None:
        num_before = len(answers)
        wait_until(lambda: len(answers) >= num_before + 2 * len(QUESTIONS), what)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asking = [pool.submit(ask_on, first) for first in range(NUM_CLIENTS)]
        try:
            wait_for_round("answers before the fault")
            # The busiest worker dies, and a worker between two models may have no leases for a moment.
            before = wait_until(watched.all_holders, "leases of all replicas")
            recovered = kill(victim)
            wait_for_round("answers after the fault")
        finally:
            stop.set()
        for client in asking:
            client.result()
    recovered()
    assert {answer.status_code for _, answer in answers} == {200}, [a.text for _, a in answers if a.status_code != 200]
    for question, answer in answers:
        assert_close(question, question.read(answer), expected[question])
    if victim in ("worker", "text_encoder"):
        assert len(dead_of(before)) == 1
        # Others may have given theirs back meanwhile: there is no room for all models.
        wait_until(lambda: not dead_of(watched.holders()), "the end of the dead one's leases")
    wait_until(lambda: watched.unaccounted_bytes() <= spare_bytes + MARGIN_BYTES, "the memory of before")
