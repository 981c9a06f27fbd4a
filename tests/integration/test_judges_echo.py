"""Random tensors of every datatype through tritonclient and back: nothing changes on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from integration.echo_functions import TYPES
from integration.echo_server import echo_server
from integration.harness import Cluster
from integration.judging import Observed, judge
from kit.seeding import seeded_rng

from deployments.pipelines.records import Datatype

RAW_ONLY = ("FP16", "BF16")  # JSON and gRPC's typed contents have no notation for them
SPOKEN = [
    (way, datatype)
    for way in ("http_raw", "http_json", "grpc_raw", "grpc_contents")
    for datatype in get_args(Datatype)
    if way.endswith("raw") or datatype not in RAW_ONLY
]


@pytest.fixture(scope="module")
def echoes(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    seed = int(seeded_rng().integers(2**31))
    with echo_server() as (url, grpc):
        return judge("triton_echo", "protocol", url, grpc, tmp_path_factory.mktemp("echo"), {"seed": seed})


@pytest.mark.parametrize(("way", "datatype"), SPOKEN)
def test_tensors_come_back_bit_for_bit(echoes: Observed, way: str, datatype: str) -> None:
    """No dimension, none of a size, several, and a large one."""
    found = echoes[f"{way}.{datatype}"]
    assert found["sent"] == 8
    assert not found["differences"]


def _draws(rng: np.random.Generator) -> dict[str, Callable[[int], list[Any]]]:
    """JSON data and shape of one item, for each type that the steps of a pipeline know."""
    return {
        "echo-text": lambda n: ["".join(rng.choice(list('ab ß☃🎉"\\\n'), 12)) for _ in range(n)],
        "echo-int": lambda n: rng.integers(-(2**63), 2**63 - 1, n, endpoint=True).tolist(),
        "echo-float": lambda n: rng.standard_normal(n).astype(np.float32).tolist(),
        "echo-bool": lambda n: rng.integers(0, 2, n).astype(bool).tolist(),
        "echo-tokens": lambda n: rng.integers(0, 2**31, (n, 5)).tolist(),
        "echo-vector": lambda n: rng.standard_normal((n, 7)).astype(np.float32).tolist(),
        "echo-image": lambda n: rng.integers(0, 256, (n, 16, 8, 3)).tolist(),
    }


@pytest.mark.parametrize("pipeline", [name.replace("_", "-") for name in TYPES])
@pytest.mark.parametrize("num_items", [1, 3])
def test_pipelines_of_the_cluster_give_back_what_they_got(cluster: Cluster, pipeline: str, num_items: int) -> None:
    data = _draws(seeded_rng())[pipeline](num_items)
    answer = httpx.get(f"{cluster.url}/v2/models/{pipeline}", timeout=30)
    assert answer.status_code == 200, answer.text
    (spec,) = answer.json()["inputs"]
    tensor = {"name": "value", "datatype": spec["datatype"], "shape": np.shape(data), "data": data}
    answer = httpx.post(f"{cluster.url}/v2/models/{pipeline}/infer", json={"inputs": [tensor]}, timeout=60).json()
    (output,) = answer["outputs"]
    assert (output["datatype"], tuple(output["shape"])) == (spec["datatype"], np.shape(data))
    assert output["data"] == np.array(data, dtype=object).reshape(-1).tolist()


def test_a_large_image_passes_a_pipeline(cluster: Cluster) -> None:
    image = seeded_rng().integers(0, 256, (1, 591, 591, 3), dtype=np.uint8)  # a mebibyte
    parameters = {"binary_data_size": image.nbytes}
    tensor = {"name": "value", "datatype": "UINT8", "shape": image.shape, "parameters": parameters}
    head = httpx.Request("POST", cluster.url, json={"inputs": [tensor], "parameters": {"binary_data_output": True}})
    length = "Inference-Header-Content-Length"
    answer = httpx.post(
        f"{cluster.url}/v2/models/echo-image/infer",
        content=head.content + image.tobytes(),
        headers={length: str(len(head.content))},
        timeout=60,
    )
    assert answer.content[int(answer.headers[length]) :] == image.tobytes()
