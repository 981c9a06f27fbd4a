"""Simulated accelerators in a cluster's config: which of them a service may name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.cluster import ClusterConfig
from configs.simulated import parse_simulated


def config(**given: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"models": [{"id": "m", "path": "m"}]} | given)


def test_a_service_names_a_simulated_device_that_is_there() -> None:
    found = config(worker={"device": "sim:1"}, simulated={"num_devices": 2, "memory_bytes": "1 GiB"})
    assert (found.worker.device, found.simulated.memory_bytes) == ("sim:1", 2**30)
    with pytest.raises(
        ValidationError, match=r"text_encoder\.device\n +no device 'sim:2': simulated\.num_devices is 2"
    ):
        config(text_encoder={"device": "sim:2"}, simulated={"num_devices": 2})


@pytest.mark.parametrize("device", ["tpu", "sim:", "sim:-1", "sim:x", "sim:99999", "SIM", "cuda:0,1"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ValidationError, match=r"worker\.device\n.*not a device: .*expected 'cpu'"):
        config(worker={"device": device})


@pytest.mark.parametrize(
    "simulated", [{"memory_bytes": 0}, {"link_gbps": 0}, {"link_gbps": float("nan")}, {"num_devices": 0}, {"cores": 3}]
)
def test_what_no_device_can_have_is_refused(simulated: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(simulated))):
        config(simulated=simulated)


def test_devices_are_read_from_one_line() -> None:
    found = parse_simulated(" num_devices=2, memory_bytes=512MiB,link_gbps=0.5,unsupported_ops=add+mul,")
    assert (found.num_devices, found.memory_bytes, found.link_gbps) == (2, 2**29, 0.5)
    assert found.unsupported_ops == {"add", "mul"}
    assert parse_simulated("") == type(found)()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_devices", r"'num_devices': expected key=value \(keys: num_devices, "),
        ("cores=3", r"cores=3: .* \(known: num_devices, "),
        ("num_devices=0", r"num_devices=0: [^(]*greater than or equal to 1$"),
        ("link_gbps=fast", r"link_gbps=fast: [^(]*number"),
    ],
)
def test_a_wrong_line_is_told_by_its_key(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as told:
        parse_simulated(text)
    assert "\n" not in str(told.value)
