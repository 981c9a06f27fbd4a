"""The ranks of a worker's replica: how many processes, and which replicas cannot have any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.cluster import ClusterConfig
from configs.errors import ConfigError
from configs.loading import load_cluster_config


def worker(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "config.yaml"
    path.write_text(f"name: ranks\nworker: {{{text}}}\nmodels: [{{id: m, path: m}}]\n")
    return load_cluster_config(path).worker


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("num_cpus: 1", 1),
        ("ranks: {tensor: 2}", 2),
        ("ranks: {cfg: 2, sequence: 4, tensor: 8}", 64),
        ("ranks: {tensor: 2}, device: cuda, num_gpus: 1, num_cpus: 0", 2),
        ("ranks: {tensor: 3, strategy: PACK}, device: sim:0", 3),
        ("ranks: {tensor: 1}, devices: [sim:0, cpu]", 1),
    ],
)
def test_a_replica_has_a_process_for_each_rank(tmp_path: Path, text: str, size: int) -> None:
    found = worker(tmp_path, text)
    assert (found.ranks.size, found.num_processes) == (size, size)
    config = ClusterConfig.model_validate({"worker": found, "models": [{"id": "m", "path": "m"}]})
    assert ClusterConfig.model_validate(config.model_dump(mode="json", exclude_defaults=True)) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks: {tensor: 0}", "worker.ranks.tensor"),
        ("ranks: {cfg: 3}", "worker.ranks.cfg"),
        ("ranks: {tensor: 2.5}", "worker.ranks.tensor"),
        ("ranks: {tensors: 2}", "worker.ranks.tensors"),
        ("ranks: {strategy: SPREAD}", "'STRICT_PACK' or 'PACK', got 'SPREAD'"),
        ("ranks: {timeout_s: 0}", "worker.ranks.timeout_s"),
        ("ranks: {timeout_s: .inf}", "worker.ranks.timeout_s"),
        ("ranks: {sequence: 16, tensor: 8}", "cfg 1 x sequence 16 x tensor 8 are 128 ranks, at most 64"),
        ("ranks: {tensor: 2}, devices: [sim:0, cpu]", "2 devices are for one process"),
        ("ranks: {tensor: 2}, num_cpus: 0", "takes a CPU or a GPU"),
        ("ranks: {tensor: 2}, device: cuda, num_gpus: 0.5", "0.5 with device cuda: each of 2 ranks has a GPU"),
        ("ranks: {tensor: 2}, device: cuda, num_gpus: 2", "2 with device cuda: each of 2 ranks has a GPU"),
        ("ranks: {tensor: 2}, device: cuda:1, num_gpus: 1", "1 with device cuda:1: each of 2 ranks has a GPU"),
    ],
)
def test_ranks_that_cannot_be_are_refused_at_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        worker(tmp_path, text)
    assert words in str(caught.value)
    assert "config.yaml:2" in str(caught.value)
