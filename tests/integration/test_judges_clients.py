"""The cluster as KServe's clients, OpenAI's client, aiperf and schemathesis see it."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from integration.harness import Cluster
from integration.judging import JUDGES, Observed, digit_judge, held_out_texts, judge
from PIL import Image

METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
LEFT_OUT = {"POST /admin/models/{model}/pin", "POST /admin/freeze"}  # by tests/judges/schemathesis.toml


@pytest.fixture(scope="module")
def kserve(cluster: Cluster, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("kserve")
    return judge("kserve_clients", "protocol", cluster.url, cluster.grpc, folder, asked)


@pytest.fixture(scope="module")
def observe_load(
    cluster: Cluster, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Each load once, when the first test asks for it."""

    @functools.cache
    def observe(name: str) -> Any:
        folder: Path = tmp_path_factory.mktemp("aiperf")
        return judge("aiperf_loads", "aiperf", cluster.url, cluster.grpc, folder, asked | {"load": name})[name]

    return observe


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_kserve_finds_server_and_model_ready(kserve: Observed, transport: str) -> None:
    assert kserve[f"{transport}.live"] is kserve[f"{transport}.ready"] is kserve[f"{transport}.model_ready"] is True


@pytest.mark.parametrize("name", ["rest.chat", "rest.chat_as_json", "grpc.chat"])
def test_kserve_gets_sums(kserve: Observed, name: str) -> None:
    assert kserve[name] == ["19."]


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_kserve_gets_the_embeddings_of_the_openai_route(
    kserve: Observed, transport: str, cluster: Cluster, asked: dict[str, Any]
) -> None:
    answer = cluster.openai.embeddings.create(model="minilm", input=asked["texts"], encoding_format="float")
    theirs = np.array([item.embedding for item in answer.data], np.float32)
    np.testing.assert_allclose(kserve.array(f"{transport}.embeddings", f"kserve_{transport}"), theirs, atol=1e-5)


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_kserve_hears_what_is_wrong(kserve: Observed, transport: str) -> None:
    assert "unknown input 'text_input'; model 'minilm' takes text BYTES [-1]" in kserve[f"{transport}.refusal"]


def test_openai_gets_images_of_sums(cluster: Cluster, asked: dict[str, Any]) -> None:
    def image(prompt: str, seed: int) -> np.ndarray:
        answer = cluster.openai.images.generate(model="sum-to-digit", prompt=prompt, extra_body={"seed": seed})
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))

    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(image, asked["digit_sums"], asked["digit_seeds"]))
    read = digit_judge().read(images)
    assert (read == np.array(asked["digits"])).mean() >= 0.95, read


def test_openai_gets_the_kinds_of_texts(cluster: Cluster) -> None:
    def label(text: str) -> str | None:
        messages = [{"role": "user", "content": text}]
        return (
            cluster.openai.chat.completions.create(model="text-classifier", messages=messages)
            .choices[0]
            .message.content
        )

    texts, kinds = held_out_texts(15)
    with ThreadPoolExecutor(4) as pool:
        labels = list(pool.map(label, texts))
    right = [label == kind for label, kind in zip(labels, kinds, strict=True)]
    assert len(right) == 60
    assert sum(right) / len(right) >= 0.85


@pytest.mark.long  # as the next one: most of a load is the start of aiperf's processes
@pytest.mark.parametrize("load", ["chat_stream", "embeddings", "images"])
def test_aiperf_meets_no_error(observe_load: Callable[[str], Any], load: str) -> None:
    found = observe_load(load)
    assert found["request_count"] == 10
    assert found["error_request_count"] == 0
    assert found["error_summary"] == []
    assert found["is_complete"]
    assert not found["was_cancelled"]


@pytest.mark.long
def test_aiperf_sees_a_stream_begin_before_it_ends(observe_load: Callable[[str], Any]) -> None:
    found = observe_load("chat_stream")
    assert 0 < found["time_to_first_token"] < found["request_latency"]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("paths", "num_examples"),
    [("^/v1/", 1), ("^/admin/", 1), ("^/(?!v1/|admin/)", 1), pytest.param("^/", 5, marks=pytest.mark.long)],
)
def test_schemathesis_finds_what_the_openapi_page_says(
    cluster: Cluster, tmp_path: Path, paths: str, num_examples: int
) -> None:
    """tests/judges/schemathesis.toml says what is checked, and why what is left out is left out."""
    page = httpx.get(f"{cluster.url}/openapi.json", timeout=30).json()
    wanted = {f"{method.upper()} {path}" for path, one in page["paths"].items() for method in one.keys() & METHODS}
    wanted = {name for name in wanted - LEFT_OUT if re.search(paths, name.partition(" ")[2])}
    shutil.copy(JUDGES / "schemathesis.toml", tmp_path)
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{cluster.url}/openapi.json"]
    command += ["--seed", str(random.getrandbits(32)), "--max-examples", str(num_examples)]
    command += ["--include-path-regex", paths]
    with _settings_kept(cluster):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    tested = re.search(r"Selected: (\d+)/\d+\s+Tested: (\d+)", done.stdout)
    assert tested is not None
    selected, asked = map(int, tested.groups())
    assert selected == asked == len(wanted)


@contextlib.contextmanager
def _settings_kept(cluster: Cluster) -> Iterator[None]:
    """Undo what a valid request may change for every other test: a timeout of 1e-256 s, a queue of one, an unload."""
    settings = {
        f"{cluster.url}/admin/admission": "admission",
        f"{cluster.url}/admin/text-encoders/batching": "batching",
    }
    before = {url: httpx.get(url, timeout=30).json() for url in settings}
    try:
        yield
    finally:
        for url, name in settings.items():
            httpx.put(url, json=before[url][name], timeout=30).raise_for_status()
        _load_all(cluster)


def _load_all(cluster: Cluster) -> None:
    for entry in httpx.post(f"{cluster.url}/v2/repository/index", timeout=30).json():
        if entry["reason"] == "unloaded":
            answer = httpx.post(f"{cluster.url}/v2/repository/models/{entry['name']}/load", timeout=60)
            assert answer.status_code == 200, answer.text
