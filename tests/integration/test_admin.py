"""Models come, change and go while the cluster serves, over HTTP and through the death of the registry."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
import torch
from integration.harness import DEMO_MODELS, Cluster, pixels, replica_processes, shifted_adder
from kit.waiting import wait_until
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.records.actor_names import NAMESPACE, registry_name
from weights.storage.store import WeightStore

PROMPT = "What is 4"
IMAGE = {"model": "digits-flux", "prompt": "a handwritten seven", "seed": 3, "num_inference_steps": 3}


class Admin:
    """The HTTP API; what was registered through it is removed at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self.http = httpx.Client(base_url=cluster.url, timeout=120)
        self._registered: set[str] = set()

    def register(self, **entry: Any) -> httpx.Response:
        self._registered.add(entry["id"])
        return self.http.post("/admin/models", json=entry)

    def complete(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        return self.http.post("/v1/completions", json=body)

    def text(self, model: str) -> str:
        answer = self.complete(model)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def image(self, **more: Any) -> bytes:
        """Return the pixels."""
        answer = self.http.post("/v1/images/generations", json=IMAGE | more)
        assert answer.status_code == 200, answer.text
        return pixels(answer).tobytes()

    def versions(self) -> dict[str, Any]:
        """Return the store's records of each model. Whether replicas could attach it is for them to say again."""
        listed = self.http.get("/v1/models", params={"all": True}).json()["data"]
        return {model["id"]: (model["kind"], model["bytes"], model["base"], model["defaults"]) for model in listed}

    def remove_all(self) -> None:
        for id_ in self._registered:
            wait_until(lambda id_=id_: self._is_removed(id_), f"the end of {id_}")  # type: ignore[misc]

    def _is_removed(self, id_: str) -> bool:
        """Remove it. A registry that has just come back may be looking at it again, and says so."""
        answer = self.http.delete(f"/admin/models/{id_}", params={"purge": "true"})
        assert answer.status_code in (200, 404, 409, 503), answer.text
        is_removed = answer.status_code in (200, 404)
        assert not is_removed or id_ not in self.versions()  # who was told that it is gone does not find it
        return is_removed


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    made = Admin(cluster)
    yield made
    made.remove_all()


def stock_text(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_model_registered_while_the_cluster_runs_is_served(cluster: Cluster, admin: Admin, tmp_path: Path) -> None:
    folder = shifted_adder(tmp_path / "copy", shift=1)
    assert admin.complete("hot").status_code == 404
    made = admin.register(id="hot", path=str(folder), dtype="float32", description="hot", defaults={"max_tokens": 2})
    assert (made.status_code, made.json()["state"], made.json()["kind"]) == (201, "ready", "llm")
    assert admin.text("hot") == stock_text(folder)
    short = admin.http.post("/v1/completions", json={"model": "hot", "prompt": PROMPT, "temperature": 0})
    assert short.json()["usage"]["completion_tokens"] <= 2
    models = [model.id for model in cluster.openai.models.list(extra_query={"all": True})]
    assert models.index("hot") == len(cluster.config.entries)  # before the pipelines
    assert admin.register(id="hot", path=str(folder), dtype="float32").status_code == 200
    assert admin.http.delete("/admin/models/hot", params={"purge": "true"}).json()["orphans"] == []
    assert admin.complete("hot").status_code == 404
    assert "hot" not in WeightStore(cluster.config.store.path).model_names()


def test_what_no_engine_runs_is_never_ready_and_everybody_gives_the_same_reason(admin: Admin, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODELS / "adder", tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    reason = f"{folder}: there is no tokenizer"
    refused = admin.register(id="mute", path=str(folder))
    assert (refused.status_code, reason in refused.text) == (422, True)
    entry = {"id": "mute", "path": str(folder)}
    assert admin.http.post("/admin/models", json=entry, params={"wait": False}).status_code in (201, 202)
    wait_until(lambda: admin.http.get("/v1/models/mute").json()["state"] == "unavailable", "the end of its import")
    load = admin.http.post("/v2/repository/models/mute/load")
    asked = admin.complete("mute")
    assert (load.status_code, asked.status_code) == (503, 503)
    assert reason in load.json()["error"]
    assert reason in asked.json()["error"]["message"]
    (listed,) = [model for model in admin.http.post("/v2/repository/index").json() if model["name"] == "mute"]
    assert listed["state"] == "UNAVAILABLE"
    assert reason in listed["reason"]


def test_a_lora_registered_while_the_cluster_runs_is_used(admin: Admin, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    shutil.copytree(DEMO_MODELS / "bold", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: tensor * 2 if "lora_B" in name else tensor for name, tensor in tensors.items()}, file)
    made = admin.register(id="bolder", path=str(folder), base=["digits-flux"], dtype="float32")
    assert (made.status_code, made.json()["kind"]) == (201, "adapter")
    strong = admin.image(lora=[{"name": "bold", "scale": 2.0}])
    assert admin.image(lora=[{"name": "bolder"}]) == strong != admin.image()
    save_file(tensors, file)
    assert admin.register(id="bolder", path=str(folder), base=["digits-flux"], dtype="float32").status_code == 200
    assert admin.image(lora=[{"name": "bolder"}]) == admin.image(lora=[{"name": "bold"}]) != strong


def test_a_version_is_replaced_under_running_requests_without_a_failed_one(admin: Admin, tmp_path: Path) -> None:
    folder = shifted_adder(tmp_path / "copy", shift=1)
    assert admin.register(id="hot", path=str(folder), dtype="float32").status_code == 201
    known = {stock_text(folder)}
    assert {admin.text("hot")} == known
    stop = threading.Event()

    def ask_on() -> list[httpx.Response]:
        answers = []
        while not stop.is_set():
            answers.append(admin.complete("hot"))
        return answers

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on) for _ in range(4)]
        try:
            for shift in (2, 3):
                shifted_adder(folder, shift)
                known.add(newest := stock_text(folder))
                assert admin.register(id="hot", path=str(folder), dtype="float32").status_code == 200
                wait_until(lambda newest=newest: admin.text("hot") == newest, "the new version")  # type: ignore[misc]
        finally:
            stop.set()
        answers = [answer for one in asking for answer in one.result()]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == known
    (folder / "model.safetensors").write_bytes(b"torn")
    failed = admin.register(id="hot", path=str(folder), dtype="float32")
    assert (failed.status_code, failed.json()["error"]["code"]) == (422, "unusable_checkpoint")
    assert admin.text("hot") == newest
    assert "model.safetensors" in admin.http.get("/v1/models/hot").json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "", {"id": "x", "path": "/nowhere/at/all"}, 400, "outside of the folders that models may come from"),
        ("POST", "", {"id": "x", "path": "relative"}, 400, "is relative"),
        ("POST", "", {"id": "x", "path": "/x", "colour": 1}, 400, "colour: unknown field"),
        ("POST", "", {"id": "x", "path": "/x", "base": ["nope"]}, 400, "unknown nope (models: digits-flux"),
        ("POST", "", {"id": "bold", "path": "/x"}, 409, "'bold' is an adapter already"),
        ("DELETE", "/adder", None, 409, "is in the cluster config"),
        ("DELETE", "/x", None, 404, "known: digits-flux"),
        ("POST", "/truncated/prefetch", None, 503, "layer.weight"),
        ("POST", "/x/pin", None, 404, "known: digits-flux"),
    ],
)
def test_bad_admin_requests_say_why(admin: Admin, method: str, path: str, body: Any, status: int, text: str) -> None:
    before = admin.http.get("/v1/models", params={"all": True}).json()
    answer = admin.http.request(method, f"/admin/models{path}", json=body)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text
    assert admin.http.get("/v1/models", params={"all": True}).json() == before


def test_what_is_prefetched_and_pinned_is_shown(admin: Admin) -> None:
    def resident() -> dict[str, Any]:
        models = admin.http.get("/admin/cluster").json()["models"]
        (found,) = next(model["resident"] for model in models if model["id"] == "adder").values() or [{}]
        return found

    assert set(admin.http.post("/admin/models/adder/prefetch").json()["nodes"].values()) == {""}
    wait_until(lambda: resident().get("host_bytes", 0) > 0, "the prefetched model")
    assert set(admin.http.post("/admin/models/adder/pin").json()["nodes"].values()) == {""}
    assert resident()["pinned"]
    assert set(admin.http.delete("/admin/models/adder/pin").json()["nodes"].values()) == {""}
    assert not resident()["pinned"]


def test_requests_go_on_while_the_registry_is_killed_and_it_comes_back_whole(
    cluster: Cluster, admin: Admin, tmp_path: Path
) -> None:
    folder = shifted_adder(tmp_path / "copy", shift=1)
    admin.register(id="hot", path=str(folder), dtype="float32")
    expected = admin.text("hot")
    before = admin.versions()
    registry = ray.get_actor(registry_name(cluster.config), namespace=NAMESPACE)
    os.kill(ray.get(registry.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    for _ in range(10):
        assert admin.text("hot") == expected

    def is_back() -> bool:
        shown = admin.http.get("/admin/cluster").json()
        return "registry" not in shown and shown["nodes"][0].get("num_extents", 0) > 0

    wait_until(is_back, "the restarted registry")

    def directory() -> dict[str, Any]:
        """The models of the new registry: the ingress shows what it knew before until it has heard of the new one."""
        return {record.id: (record.kind, record.nbytes) for record in ray.get(registry.list_models.remote())}

    pipelines = {pipeline.id for pipeline in cluster.config.pipelines}
    known = {id_: version[:2] for id_, version in before.items() if id_ not in pipelines}
    wait_until(lambda: directory() == known, "its directory")
    wait_until(lambda: admin.versions() == before, "its directory")
    assert admin.text("hot") == expected
    assert admin.register(id="later", path=str(folder), dtype="float32").status_code == 201


@pytest.mark.faults
def test_requests_whose_worker_is_killed_are_answered_by_another(cluster: Cluster, admin: Admin) -> None:
    def workers() -> list[dict[str, Any]]:
        return admin.http.get("/admin/cluster").json()["workers"]

    def image(seed: int) -> httpx.Response:
        body = IMAGE | {"seed": seed, "num_inference_steps": 40}
        return admin.http.post("/v1/images/generations", json=body)

    expected = [pixels(image(seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(image, seed) for seed in range(8)]
        wait_until(lambda: any(worker.get("denoising", 0) for worker in workers()), "the requests' start")
        victim = max(replica_processes("worker"), key=lambda process: process.cpu_times().user)
        victim.kill()
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [200] * 8
    for answer, alone in zip(found, expected, strict=True):
        assert np.abs(pixels(answer) - alone).max() <= 1  # of 255: batch-mates may change the last bit of a float
    wait_until(lambda: sum("denoising" in worker for worker in workers()) == 2, "a worker in its place")
