"""Files that cost more than they look like, and the places of requests whose images are read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import re
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import psutil
import pytest
from kit.waiting import until
from PIL import Image
from unit.deployments.ingress.http_fakes import CHAT, CHATS, IMAGE, IMAGES, Replicas

from deployments.ingress.access.callers import current_tenant
from deployments.ingress.messages import terms
from deployments.ingress.messages.terms import Terms, current_terms
from deployments.ingress.openai import image_decoders
from deployments.ingress.openai.image_decoder import MODULE
from deployments.ingress.openai.image_decoders import MAX_READERS, DecoderProcesses, ImageReaders
from deployments.ingress.openai.uploads import decode_image
from deployments.records.errors import DeadlineExceeded, InvalidRequest, QueueFull

SIDE = 64
MOST = SIDE * SIDE


def file_of(format_: str, side: int = SIDE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (200, 100, 50)).save(buffer, format_, **options)
    return buffer.getvalue()


def jpeg_with_scans(num_more: int, side: int = SIDE) -> bytes:
    """A progressive file whose last scan comes again and again: each goes over all of its blocks."""
    data = file_of("JPEG", side, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * num_more + data[-2:]


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks: bytes) -> bytes:
    data = file_of("PNG")
    return data[:33] + b"".join(chunks) + data[33:]  # behind the header


def jpeg_with(*segments: bytes) -> bytes:
    data = file_of("JPEG")
    return data[:2] + b"".join(segments) + data[2:]


def webp_with(*chunks: bytes) -> bytes:
    data = file_of("WEBP") + b"".join(chunks)
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def exif_of(num_entries: int, num_bytes: int) -> bytes:
    """A directory whose entries all have the whole block as their value: as many copies of it as there are entries."""
    entries = b"".join(struct.pack("<HHII", number, 7, num_bytes - 8, 8) for number in range(num_entries))
    block = b"II*\0" + struct.pack("<IH", 8, num_entries) + entries + bytes(4)
    return block.ljust(num_bytes, b"\0")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (jpeg_with_scans(60), "more than 64 scans"),
        (jpeg_with(b"\xff\xfe\x00\x02" * 5000), "more than 4096 segments"),
        (png_with(*[chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2**20 - 1)))] * 65), "more than 64 chunks"),
        (png_with(*[chunk(b"abCd", b"")] * 65), "more than 64 chunks"),
        (file_of("PNG")[:-12] + chunk(b"IDAT", b"") * 2**16 + file_of("PNG")[-12:], "more than 65536 chunks"),
        (webp_with(*[b"abcd" + bytes(4)] * 65), "more than 64 chunks"),
    ],
    ids=["scans", "segments", "profiles", "chunks", "pieces", "webp"],
)
def test_a_container_that_asks_for_more_work_than_its_pixels_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^image: .*{text}"):
        decode_image(data, "image", MOST)


@pytest.mark.parametrize(
    "data",
    [
        jpeg_with_scans(20),
        file_of("JPEG") + jpeg_with_scans(200),  # behind the end of the image, as phones add films
        jpeg_with(b"\xff\xe1\x10\x02" + b"\xff\xda" * 2048),  # no scans, but a thumbnail's bytes
        png_with(*[chunk(b"iTXt", b"Comment\0\0\0\0\0x")] * 20),
        file_of("PNG", save_all=True, append_images=[Image.new("RGB", (SIDE, SIDE), (n, 0, 0)) for n in range(99)]),
        file_of("WEBP", save_all=True, append_images=[Image.new("RGB", (SIDE, SIDE), (n, 0, 0)) for n in range(99)]),
    ],
    ids=["scans", "film", "thumbnail", "texts", "animated png", "animated webp"],
)
def test_files_as_cameras_and_editors_write_them_are_read(data: bytes) -> None:
    pixels = decode_image(data, "image", MOST).pixels
    assert np.abs(pixels.astype(int) - (200, 100, 50)).max() < 6, "the first image"


def decoder_processes() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if MODULE in child.cmdline()}


@pytest.fixture
def make_processes() -> Iterator[Callable[..., DecoderProcesses]]:
    made: list[DecoderProcesses] = []

    def make(**options: Any) -> DecoderProcesses:
        made.append(DecoderProcesses(**options))
        return made[-1]

    yield make
    for processes in made:
        processes.close()


def test_a_file_that_computes_too_long_ends_with_its_process(make_processes: Any) -> None:
    processes = make_processes(max_processes=1, cpu_s=0.04)
    costly, most = jpeg_with_scans(50, side=2048), 2048 * 2048
    with pytest.raises(InvalidRequest, match=r"^mask: the image takes longer to decode than its pixels need"):
        processes.decode(costly, "mask", most, most)
    reply, pixels = processes.decode(file_of("PNG"), "image", MOST, MOST)
    assert (reply.width, reply.height, len(pixels)) == (SIDE, SIDE, 3 * MOST), "the next one has another process"


def test_a_file_that_takes_too_much_memory_ends_alone(make_processes: Any) -> None:
    processes, before = make_processes(max_processes=1), decoder_processes()
    for data in (
        png_with(chunk(b"eXIf", exif_of(60_000, 2**20))),  # 63 GB of values
        b"RIFF\xff\0\0\0WEBPVP8X" + struct.pack("<I", 10) + b"\x10\0\0\0\xff\x3f\0\xff\x3f\0",  # a canvas of 1 GiB
    ):
        with contextlib.suppress(InvalidRequest):
            processes.decode(data, "image", MOST, MOST)
        (process,) = decoder_processes() - before
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) < 200 * 2**10, "of resident memory, at most"


def test_a_process_that_ended_while_idle_is_followed_by_another(make_processes: Any) -> None:
    processes, before = make_processes(max_processes=1), decoder_processes()
    processes.decode(file_of("PNG"), "image", MOST, MOST)
    (idle,) = decoder_processes() - before
    idle.kill()
    while idle.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    assert processes.decode(file_of("PNG"), "image", MOST, MOST)[0].width == SIDE


def test_a_process_that_does_not_end_is_killed(make_processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(module: str) -> tuple[subprocess.Popen[bytes], Any]:
        refuses = SimpleNamespace(send_bytes=Mock(side_effect=BrokenPipeError), close=lambda: None)
        return subprocess.Popen(["sleep", "5"]), refuses

    monkeypatch.setattr(image_decoders, "start_connected", stuck)
    monkeypatch.setattr(image_decoders, "_END_S", 0.01)
    with pytest.raises(InvalidRequest, match=r"^mask: the image cannot be read: it ended its reader by SIGKILL$"):
        make_processes().decode(file_of("PNG"), "mask", MOST, MOST)


def test_a_large_image_is_scaled_down_and_keeps_its_proportions() -> None:
    image = Image.linear_gradient("L").resize((300, 100)).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    decoded = decode_image(buffer.getvalue(), "image", 100 * 100, 300 * 100)
    assert (decoded.size, decoded.file_size) == ((173, 57), (300, 100))
    expected = np.asarray(image.resize((173, 57), Image.Resampling.LANCZOS))
    assert (decoded.pixels == expected).all()
    with pytest.raises(InvalidRequest, match="300x100 pixels, at most 29999"):
        decode_image(buffer.getvalue(), "image", 100 * 100, 29_999)


class Blocked:
    """Work that waits in its thread until it may go on."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []

    def __call__(self, name: str) -> str:
        self.begun.append(name)
        assert self.may_end.wait(30)
        return name


@pytest.fixture
def work() -> Iterator[Blocked]:
    blocked = Blocked()
    yield blocked
    blocked.may_end.set()


async def begin(readers: ImageReaders, tenant: str, work: Any, *arguments: Any) -> asyncio.Task[Any]:
    async def read() -> Any:
        current_tenant.set(tenant)
        return await readers.read(work, *arguments)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    return task


async def test_tenants_take_turns_and_the_one_with_the_most_is_refused_first(work: Blocked) -> None:
    readers = ImageReaders(max_readers=1, max_waiting=3)
    tasks = [await begin(readers, "many", work, f"many {number}") for number in range(4)]
    with pytest.raises(QueueFull):
        await (await begin(readers, "many", work, "one too many"))
    few = await begin(readers, "few", work, "few 0")
    with pytest.raises(QueueFull):
        await tasks[3]  # the newest of the tenant that has the most
    work.may_end.set()
    assert await asyncio.gather(*tasks[:3], few) == ["many 0", "many 1", "many 2", "few 0"]
    assert work.begun.index("few 0") <= 2, "it waited for one of the others, not for all"


async def test_a_request_that_is_gone_takes_no_place(work: Blocked) -> None:
    readers = ImageReaders(max_readers=1, max_waiting=2)
    running = await begin(readers, "", work, "running")
    gone = await begin(readers, "", work, "gone")
    last = await begin(readers, "", work, "last")
    gone.cancel()
    running.cancel()  # its thread goes on, and has its place until then
    await asyncio.wait([gone, running])
    assert work.begun == ["running"]
    work.may_end.set()
    assert await last == "last"
    assert work.begun == ["running", "last"]
    again = [await begin(readers, "", work, name) for name in ("a", "b")]
    assert await asyncio.gather(*again) == ["a", "b"], "no place was lost"


async def test_the_turn_ends_first_and_the_wait_is_a_part_of_the_time(
    work: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers, num_ended = ImageReaders(max_readers=1), itertools.count()
    monkeypatch.setattr(terms, "release_read_slot", lambda: next(num_ended))
    held = await begin(readers, "", work, "held")
    current_terms.set(Terms(timeout_s=0.05))
    late = [await begin(readers, "", work, "late") for _ in range(5)]
    assert next(num_ended) == 6, "who waits for a reader holds up nobody at the gate"
    found = await asyncio.gather(*late, return_exceptions=True)
    assert all(isinstance(error, DeadlineExceeded) for error in found)
    work.may_end.set()
    assert await held == "held"
    current_terms.set(Terms(timeout_s=5.0, waited_s=0.5))
    assert await readers.read(work, "timely") == "timely"
    assert current_terms.get().waited_s > 0.5


async def test_a_chat_is_answered_while_images_are_read(
    http: httpx.AsyncClient, replicas: Replicas, work: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = DecoderProcesses.decode
    monkeypatch.setattr(DecoderProcesses, "decode", lambda *args, **_: decode(*args, is_base64=bool(work("x"))))
    body = {**IMAGE, "init_image": base64.b64encode(file_of("PNG", 16)).decode()}
    assert len(json.dumps(body)) < 2**16, "a body that takes a turn"
    edits = [asyncio.create_task(http.post(f"/v1/{IMAGES}", json=body)) for _ in range(8)]
    await until(lambda: len(work.begun) >= MAX_READERS)
    answer = await http.post(f"/v1/{CHATS}", json=CHAT)
    assert answer.status_code == 200
    assert not any(edit.done() for edit in edits)
    work.may_end.set()
    assert {edit.status_code for edit in await asyncio.gather(*edits)} == {200}
