"""The devices of a worker's replica: the first is its main one, and what Ray reserves follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.cluster import ClusterConfig
from configs.errors import ConfigError
from configs.loading import load_cluster_config


def worker(tmp_path: Path, text: str, num_devices: int = 3) -> Any:
    path = tmp_path / "config.yaml"
    models = "models: [{id: m, path: m}]"
    path.write_text(f"worker: {{{text}}}\nsimulated: {{num_devices: {num_devices}}}\n{models}\n")
    return load_cluster_config(path).worker


@pytest.mark.parametrize(
    ("text", "device", "others", "num_gpus", "has_host"),
    [
        ("devices: [cuda:0, cuda:1, cpu]", "cuda:0", ("cuda:1",), 2, True),
        ("devices: [cuda:1, cuda:0], num_gpus: 2", "cuda:1", ("cuda:0",), 2, False),
        ("devices: [cuda], device: cuda", "cuda", (), 1, False),
        ("devices: [sim:0, sim:2]", "sim:0", ("sim:2",), 0, False),
        ("device: sim:1", "sim:1", (), 0, True),
        ("device: cuda, num_gpus: 0.5", "cuda", (), 0.5, True),
    ],
)
def test_what_follows_from_the_devices(
    tmp_path: Path, text: str, device: str, others: tuple[str, ...], num_gpus: float, has_host: bool
) -> None:
    found = worker(tmp_path, text)
    assert (found.device, found.other_devices, found.num_gpus) == (device, others, num_gpus)
    assert found.host_bytes == (found.resident_bytes if has_host else None)
    config = ClusterConfig.model_validate(
        {"worker": found, "simulated": {"num_devices": 3}, "models": [{"id": "m", "path": "m"}]}
    )
    assert ClusterConfig.model_validate(config.model_dump(mode="json", exclude_defaults=True)) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devices: [sim:0, sim:1, sim:0]", "sim:0 is there twice"),
        ("devices: [cuda, cuda:0]", "cuda:0 is there twice"),
        ("devices: [sim:0, cuda:0]", "expected devices of one kind, cuda or sim, and perhaps cpu as the last one"),
        ("devices: [sim:0, cpu, sim:1]", "expected devices of one kind"),
        ("devices: [cpu]", "expected devices of one kind"),
        ("devices: [sim:0, cpu-private]", "expected devices of one kind"),
        ("devices: [sim:0, sim:1], device: sim:1", "the first one is sim:0, but device is sim:1"),
        ("devices: [cuda:0, cuda:2]", "cuda:0, cuda:2 with num_gpus 2 is not cuda:0 to cuda:1 with num_gpus 2"),
        (
            "devices: [cuda:0, cuda:1], num_gpus: 1",
            "cuda:0, cuda:1 with num_gpus 1 is not cuda:0 to cuda:1 with num_gpus 2",
        ),
        ("devices: [sim:0, sim:3]", "no device 'sim:3': simulated.num_devices is 3"),
        ("devices: [sim:0, tpu]", "not a device: 'tpu'"),
        ("devices: sim:0", "worker.devices"),
        ("devices: {a: 1}", "worker.devices"),
        ("devices: [1]", "worker.devices"),
    ],
)
def test_devices_that_cannot_be_are_refused_at_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        worker(tmp_path, text)
    assert words in str(caught.value)
    assert "config.yaml:1" in str(caught.value)
