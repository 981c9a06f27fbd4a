"""One cluster on local Ray for all integration tests: the demo models, a real MiniLM, and two that are broken."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integration.echo_functions import echo_pipelines
from integration.harness import DEMO_MODELS, MINILM, ROOT, Cluster
from safetensors.torch import load_file, save_file

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.running import cluster_up


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    config = _config(folder)
    torch.set_num_threads(1)
    with cluster_up(config, str(ROOT / "configs/clusters/demo.yaml")) as url:
        yield Cluster(url, config, folder)


def _config(folder: Path) -> ClusterConfig:
    """The demo config, two workers on one node, its own store and port, and more models."""
    demo = load_cluster_config(ROOT / "configs/clusters/demo.yaml").model_dump(mode="json")
    truncated = _truncated_model(folder / "truncated")
    ports = {"http": {"port": _free_port()}, "grpc": {"port": _free_port()}}
    demo |= {"name": "integration", **ports, "store": {"path": str(folder / "store")}}
    demo["worker"] |= {"num_replicas": 2, "num_cpus": 0.5}
    demo["models"] += [
        {"id": "minilm", "path": str(MINILM)},
        {"id": "truncated", "path": str(truncated)},
        {"id": "incomplete", "path": str(_model_that_lacks_a_tensor(folder / "incomplete")), "preload": True},
        {"id": "adder-copy", "path": str(_adder_with_other_weights(folder / "adder-copy"))},
    ]
    demo["pipelines"] += echo_pipelines()
    return ClusterConfig.model_validate(demo)


def _truncated_model(folder: Path) -> Path:
    folder.mkdir()
    save_file({"layer.weight": torch.randn(64, 64)}, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1000])
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


def _model_that_lacks_a_tensor(folder: Path) -> Path:
    """A sound file, but not the whole model."""
    shutil.copytree(DEMO_MODELS / "adder", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _adder_with_other_weights(folder: Path) -> Path:
    """A model whose bytes are in no other model's pack, so that a test may damage them."""
    shutil.copytree(DEMO_MODELS / "adder", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
