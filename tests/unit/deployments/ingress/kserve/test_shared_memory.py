"""Triton's system shared memory over real connections of this machine, and what stands against its abuse."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from multiprocessing.shared_memory import SharedMemory as File
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from google.protobuf.message_factory import GetMessageClass
from kit.serving import served
from pydantic import ValidationError

from configs.cluster import ClusterConfig, LimitsConfig, SharedMemoryConfig
from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.kserve import shared_memory
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.kserve.rest.routes import (
    create_inference_router,
    create_server_router,
    create_shared_memory_router,
)
from deployments.ingress.kserve.shared_memory import Owner, RegionStatus, SharedMemory
from deployments.ingress.kserve.tensors import InferRequest, RegionPart, SharedTensor
from deployments.records.errors import InvalidRequest, NotAllowed, Overloaded

X = np.array([[1, 2.5, -3], [4, 5, 6]], np.float32)
CONFIG = SharedMemoryConfig(max_region_bytes=4096, max_regions=2, max_read_bytes=100)
OWN = Owner(os.geteuid(), "")
SERVICE = "inference.GRPCInferenceService"


@pytest.fixture
def file() -> Iterator[File]:
    file = File(create=True, size=4096)
    yield file
    file.close()
    file.unlink()


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(CONFIG)


@pytest.fixture
def inference(service: Any, limits: LimitsConfig, memory: SharedMemory) -> Inference:
    return Inference(service, limits, shared_memory=memory)


@pytest.fixture
async def http(inference: Inference, limits: LimitsConfig, memory: SharedMemory) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(create_server_router(inference))
    app.include_router(create_inference_router(inference, limits))
    app.include_router(create_shared_memory_router(memory))
    async with served(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


def shared(name: str, region: str, nbytes: int, offset: int = 0, **more: Any) -> dict[str, Any]:
    where = {"shared_memory_region": region, "shared_memory_byte_size": nbytes, "shared_memory_offset": offset}
    return {"name": name, "parameters": where, **more}


async def register(http: httpx.AsyncClient, file: File, name: str = "r", **body: Any) -> httpx.Response:
    fields = {"key": file.name, "offset": 0, "byte_size": 4096} | body
    return await http.post(f"/v2/systemsharedmemory/region/{name}/register", json=fields)


async def test_tensors_of_rest_go_through_regions(http: httpx.AsyncClient, file: File) -> None:
    file.buf[8 : 8 + X.nbytes] = X.tobytes()
    assert (await register(http, file)).content == b""
    listed = [{"name": "r", "key": file.name, "offset": 0, "byte_size": 4096}]
    assert (await http.get("/v2/systemsharedmemory/status")).json() == listed
    assert (await http.get("/v2/systemsharedmemory/region/r/status")).json() == listed
    body = {
        "inputs": [shared("x", "r", X.nbytes, 8, datatype="FP32", shape=[2, 3])],
        "outputs": [shared("y", "r", 100, 64), {"name": "note", "parameters": {"binary_data": True}}],
    }
    answer = await http.post("/v2/models/scale/infer", json=body)
    note, y = json_part(answer)["outputs"]
    assert y == shared("y", "r", X.nbytes, 64, datatype="FP32", shape=[2, 3])
    assert note["parameters"] == {"binary_data_size": 2 * (4 + 5)}
    np.testing.assert_array_equal(np.frombuffer(file.buf, np.float32, X.size, 64).reshape(2, 3), 2 * X)
    assert (await http.post("/v2/systemsharedmemory/region/r/unregister")).status_code == 200
    assert (await http.get("/v2/systemsharedmemory/status")).json() == []
    assert "no region 'r'" in (await http.post("/v2/models/scale/infer", json=body)).json()["error"]
    assert "system_shared_memory" in (await http.get("/v2")).json()["extensions"]


def json_part(answer: httpx.Response) -> dict[str, Any]:
    length = int(answer.headers["inference-header-content-length"])
    return dict(json.loads(answer.content[:length]))


async def test_tensors_of_grpc_go_through_regions(
    inference: Inference, service: Any, file: File, memory: SharedMemory
) -> None:
    edge = {"inference": inference, "repository": Repository(service), "statistics": Statistics()}
    server = await start_grpc_server(**edge, host="127.0.0.1", port=0, max_message_bytes=10_000)  # type: ignore[arg-type]
    file.buf[: X.nbytes] = X.tobytes()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            await call(channel, "SystemSharedMemoryRegister", name="r", key=f"/{file.name}", byte_size=4096)
            found = await call(channel, "SystemSharedMemoryStatus")
            assert (found.regions["r"].key, found.regions["r"].byte_size) == (f"/{file.name}", 4096)
            tensor = {"name": "x", "datatype": "FP32", "shape": X.shape, "parameters": where("r", X.nbytes, 0)}
            wish = {"name": "y", "parameters": where("r", X.nbytes, 512)}
            answer = await call(
                channel, "ModelInfer", model_name="scale", inputs=[tensor], outputs=[wish, {"name": "half"}]
            )
            half, y = answer.outputs
            assert (half.name, y.name, len(answer.raw_output_contents)) == ("half", "y", 1)
            assert y.parameters["shared_memory_byte_size"].int64_param == X.nbytes
            np.testing.assert_array_equal(np.frombuffer(file.buf, np.float32, X.size, 512).reshape(2, 3), 2 * X)
            await call(channel, "SystemSharedMemoryUnregister")
            assert memory.list_regions(OWN) == []
    finally:
        await server.stop(0)


def where(region: str, nbytes: int, offset: int) -> dict[str, Any]:
    sizes = {"shared_memory_byte_size": nbytes, "shared_memory_offset": offset}
    return {name: {"int64_param": size} for name, size in sizes.items()} | {
        "shared_memory_region": {"string_param": region}
    }


async def call(channel: grpc.aio.Channel, method: str, **fields: Any) -> Any:
    described = POOL.FindServiceByName(SERVICE).FindMethodByName(method)
    request, answer = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
    return await channel.unary_unary(f"/{SERVICE}/{method}", request.SerializeToString, answer.FromString)(
        request(**fields), timeout=5
    )


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "/../etc/passwd", "a/b", "//a", ".", "..", "/.", "", "/", "a\0b", "x" * 300, ".hidden"]
)
async def test_a_key_is_one_word(memory: SharedMemory, key: str) -> None:
    with pytest.raises(InvalidRequest, match="key"):
        await memory.register(OWN, RegionStatus("r", key, 0, 1))
    assert memory.list_regions(OWN) == []


async def test_only_plain_files_of_the_clients_user_are_opened(tmp_path: Path) -> None:
    memory = SharedMemory(CONFIG, tmp_path)
    (tmp_path / "own").write_bytes(bytes(64))
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for key in ("link", "folder", "pipe", "nothing"):
        with pytest.raises(InvalidRequest, match=key):
            await memory.register(OWN, RegionStatus("r", key, 0, 1))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotAllowed, match="another user"):
        await memory.register(Owner(OWN.uid + 1, ""), RegionStatus("r", "own", 0, 1))
    for offset, size in ((0, 65), (1, 64), (64, 1), (2**40, 1)):
        with pytest.raises(InvalidRequest, match="has 64 bytes"):
            await memory.register(OWN, RegionStatus("r", "own", offset, size))
    assert len(os.listdir("/proc/self/fd")) == before
    await memory.register(OWN, RegionStatus("r", "own", 0, 64))


async def test_sizes_and_numbers_are_bounded(memory: SharedMemory, file: File) -> None:
    for offset, size in ((0, 0), (0, 4097), (-1, 5), (0, -5)):
        with pytest.raises(InvalidRequest, match="byte_size"):
            await memory.register(OWN, RegionStatus("r", file.name, offset, size))
    for name in ("a", "b"):
        await memory.register(OWN, RegionStatus(name, file.name, 0, 4096))
    for name, words in (("a", "registered already"), ("c", "as many as may"), ("", "name"), ("x" * 257, "name")):
        with pytest.raises(InvalidRequest, match=words):
            await memory.register(OWN, RegionStatus(name, file.name, 0, 1))
    await memory.unregister(OWN)
    assert memory.list_regions(OWN) == memory._regions.get(OWN, []) == []


async def test_regions_are_their_owners_alone(memory: SharedMemory, file: File) -> None:
    await memory.register(OWN, RegionStatus("r", file.name, 0, 8))
    other = Owner(OWN.uid, "another tenant")
    assert memory.list_regions(other) == []
    await memory.unregister(other, "r")
    asked = InferRequest("m", (), shared_inputs=(SharedTensor("x", "FP32", (2,), RegionPart("r", 0, 8)),), owner=other)
    with pytest.raises(InvalidRequest, match="no region 'r'"):
        async with memory.read_inputs(asked):
            pass
    assert [one.name for one in memory.list_regions(OWN)] == ["r"]


async def test_a_file_that_is_cut_off_is_an_error_and_no_death(memory: SharedMemory, file: File) -> None:
    await memory.register(OWN, RegionStatus("r", file.name, 0, 4096))
    os.truncate(f"/dev/shm/{file.name}", 2)
    asked = InferRequest("m", (), shared_inputs=(SharedTensor("x", "FP32", (2,), RegionPart("r", 0, 8)),), owner=OWN)
    with pytest.raises(InvalidRequest, match="shorter than when it was registered"):
        async with memory.read_inputs(asked):
            pass
    os.truncate(f"/dev/shm/{file.name}", 4096)
    async with memory.read_inputs(asked) as read:
        assert read.inputs[0].shape == (2,)


async def test_what_requests_have_read_is_bounded(memory: SharedMemory, file: File) -> None:
    await memory.register(OWN, RegionStatus("r", file.name, 0, 4096))
    tensor = SharedTensor("x", "UINT8", (60,), RegionPart("r", 0, 60))
    asked = InferRequest("m", (), shared_inputs=(tensor,), owner=OWN)
    async with memory.read_inputs(asked):
        with pytest.raises(Overloaded):
            async with memory.read_inputs(asked):
                pass
    async with memory.read_inputs(asked) as read:
        assert read.inputs[0].data.nbytes == 60


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (shared("x", "r", 24, 4090, datatype="FP32", shape=[2, 3]), "not 24 from 4090 on"),
        (shared("x", "r", 2**62, 0, datatype="FP32", shape=[2, 3]), f"not {2**62} from 0 on"),
        (shared("x", "r", 23, 0, datatype="FP32", shape=[2, 3]), "23 bytes, but FP32 of shape"),
        (shared("x", "r", -1, 0, datatype="FP32", shape=[2, 3]), "take numbers of bytes"),
        (shared("x", "r", 24, -8, datatype="FP32", shape=[2, 3]), "take numbers of bytes"),
        (shared("x", "r", 24, "8", datatype="FP32", shape=[2, 3]), "take numbers of bytes"),  # type: ignore[arg-type]
        (shared("x", "s", 24, 0, datatype="FP32", shape=[2, 3]), r"no region 's' \(registered: r\)"),
        (shared("x", "r", 24, 0, datatype="FP32", shape=[2, 3], data=[1]), "only one can be"),
    ],
)
async def test_wrong_parts_are_refused(
    http: httpx.AsyncClient, file: File, service: Any, fields: dict[str, Any], words: str
) -> None:
    assert (await register(http, file)).status_code == 200
    answer = await http.post("/v2/models/scale/infer", json={"inputs": [fields]})
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"]), answer.text
    assert service.pipelines.requests == []


async def test_an_output_that_does_not_fit_is_refused(http: httpx.AsyncClient, file: File) -> None:
    assert (await register(http, file, byte_size=64)).status_code == 200
    x = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": X.tolist()}
    answer = await http.post("/v2/models/scale/infer", json={"inputs": [x], "outputs": [shared("y", "r", 8)]})
    assert (answer.status_code, "24 bytes do not fit into 8" in answer.text) == (400, True)
    answer = await http.post("/v2/models/scale/infer", json={"inputs": [x], "outputs": [shared("y", "r", 8, 60)]})
    assert (answer.status_code, "not 8 from 60 on" in answer.text) == (400, True)


async def test_clients_elsewhere_have_no_shared_memory(http: httpx.AsyncClient, file: File) -> None:
    for headers in ({"x-forwarded-for": "10.0.0.9"}, {"x-forwarded-for": "127.0.0.1"}):
        answer = await http.get("/v2/systemsharedmemory/status", headers=headers)
        assert (answer.status_code, "on this machine" in answer.json()["error"]) == (403, True)
    for address in ("10.0.0.9:1234", "nobody", "127.0.0.1:1", "127.0.0.1:99999", ":", "[::1]:1", "1" * 10_000):
        answer = await http.get("/v2/systemsharedmemory/status", headers={"x-atelier-client": address})
        assert answer.status_code == 403, address


def test_the_proxys_word_counts_only_from_this_servers_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of another user that reaches a replica cannot speak for a third one's connection."""
    uids = {("127.0.0.1", 1): OWN.uid, ("127.0.0.1", 2): OWN.uid + 1, ("127.0.0.1", 3): OWN.uid + 2}
    monkeypatch.setattr(shared_memory, "_uid_of", uids.get)
    assert shared_memory.uid_of_client(("127.0.0.1", 1), "127.0.0.1:3") == OWN.uid + 2
    assert shared_memory.uid_of_client(("127.0.0.1", 2), "127.0.0.1:3") == OWN.uid + 1
    assert shared_memory.uid_of_client(("127.0.0.1", 2)) == OWN.uid + 1
    with pytest.raises(NotAllowed):
        shared_memory.uid_of_client(("127.0.0.1", 1), "127.0.0.1:4")


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 0100007F:D431 01 00000000:00000000 00:00000000 00000000     5        0 1 1 0 20 4 30 10 -1
   1: 0100007F:D431 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 2 1 0 20 4 30 10 -1
   2: 0100007F:D432 0100007F:1F40 06 00000000:00000000 03:00001769 00000000     0        0 0 3 0
   3: 0500000A:D433 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 2 1 0 20 4 30 10 -1
"""
TABLE_6 = """  sl  local_address                         remote_address                        st tx rx tr tm retr   uid
   0: 00000000000000000000000001000000:D434 00000000000000000000000001000000:1F40 01 0:0 0:0 0  1001 0 2
   1: 0000000000000000FFFF00000100007F:D435 0000000000000000FFFF00000100007F:1F40 01 0:0 0:0 0  1002 0 2
"""


@pytest.mark.parametrize(
    ("peer", "uid"),
    [
        (("127.0.0.1", 0xD431), 1000),
        (("127.0.0.1", 0x1F40), 5),
        (("127.0.0.1", 0xD432), None),  # closed: its user is not known any more
        (("10.0.0.5", 0xD433), None),
        (("127.0.0.1", 0xD436), None),
        (("::1", 0xD434), 1001),
        (("127.0.0.1", 0xD435), 1002),
        (("::ffff:127.0.0.1", 0xD435), 1002),
        (("localhost", 0xD431), None),
        (None, None),
    ],
)
def test_the_user_of_a_connection(tmp_path: Path, peer: Any, uid: int | None) -> None:
    tables = tmp_path / "tcp", tmp_path / "tcp6"
    for path, text in zip(tables, (TABLE, TABLE_6), strict=True):
        path.write_text(text)
    assert shared_memory._uid_of(peer, tables) == uid
    assert shared_memory._uid_of(peer, (tmp_path / "none", *tables)) == uid


def test_peers_of_grpc() -> None:
    parse = shared_memory.parse_grpc_peer
    assert parse("ipv4:127.0.0.1:4321") == ("127.0.0.1", 4321)
    assert parse("ipv6:%5B::1%5D:4321") == ("::1", 4321)
    assert parse("unix:/tmp/x") is parse("ipv4:127.0.0.1") is None


async def test_it_is_off_unless_the_config_wants_it(service: Any, limits: LimitsConfig) -> None:
    off = Inference(service, limits)
    request = InferRequest("scale", (), shared_inputs=(SharedTensor("x", "FP32", (2,), RegionPart("r", 0, 8)),))
    with pytest.raises(InvalidRequest, match="switched off"):
        await off.infer(request)
    assert "system_shared_memory" not in off.server_metadata().extensions
    models = {"models": [{"id": "m", "path": "/m"}]}
    assert ClusterConfig.model_validate(models).ingress.shared_memory is None
    with pytest.raises(ValidationError, match="num_replicas must be 1"):
        ClusterConfig.model_validate(models | {"ingress": {"shared_memory": {}, "num_replicas": 2}})


async def test_a_stream_takes_inputs_from_regions_and_writes_none(
    inference: Inference, memory: SharedMemory, file: File
) -> None:
    text = b"\x02\x00\x00\x00hi"
    file.buf[: len(text)] = text
    await memory.register(OWN, RegionStatus("r", file.name, 0, 4096))
    tensor = SharedTensor("text_input", "BYTES", (1,), RegionPart("r", 0, len(text)))
    asked = InferRequest("adder", (), shared_inputs=(tensor,), owner=OWN)
    pieces = [piece async for piece in inference.infer_stream(asked)]
    assert [bytes(piece.outputs[0].data[0]).decode() for piece in pieces] == ["Hel", "lö", ""]
