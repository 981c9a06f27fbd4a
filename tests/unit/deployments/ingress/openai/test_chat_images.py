"""Images in chats over HTTP, and what is fetched of addresses that chats name."""

from __future__ import annotations

import asyncio
import base64
import datetime
import io
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kit.seeding import seeded_rng
from kit.waiting import until
from PIL import Image
from unit.deployments.ingress.http_fakes import CONFIG, Replicas
from unit.deployments.ingress.openai.test_image_uploads import png_of

from deployments.ingress.messages import outer_hosts
from deployments.ingress.messages.outer_hosts import is_inner
from deployments.ingress.openai import chat_images
from deployments.ingress.openai.chat_images import ImageFetcher, image_hosts
from deployments.records import ChatRequest
from deployments.records.errors import InvalidRequest

LIMITS = CONFIG.ingress.limits
TEXT = {"type": "text", "text": "what"}
SEEING = "Gemma3ForConditionalGeneration"
Pixels = npt.NDArray[np.uint8]


def drawn(height: int = 5, width: int = 7) -> Pixels:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def base64_of(pixels: Pixels, format_: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format_)
    return base64.b64encode(buffer.getvalue()).decode()


def part(text: str, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": text, **options}}


def url_of(pixels: Pixels) -> str:
    return f"data:image/png;base64,{base64_of(pixels)}"


@pytest.fixture(autouse=True)
def seer(replicas: Replicas) -> None:
    replicas.states["chatty"] = replace(replicas.states["chatty"], class_name=SEEING)


def content_of(replicas: Replicas) -> Any:
    (request,) = replicas.requests
    assert isinstance(request, ChatRequest)
    return request.messages[-1].content


async def test_openai_parts_in_their_order(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    pixels = [drawn(), drawn(3, 4)]
    parts: Any = [TEXT, part(url_of(pixels[0]), detail="high"), {"type": "text", "text": "b"}]
    parts.append(part(base64_of(pixels[1])))  # without the head of a data URL
    await client.chat.completions.create(model="chatty", messages=[{"role": "user", "content": parts}])
    first, image, second, other = content_of(replicas)
    assert (first, second) == ("what", "b")
    assert np.array_equal(image, pixels[0])
    assert np.array_equal(other, pixels[1])


async def test_low_detail_has_few_pixels(http: httpx.AsyncClient, replicas: Replicas, monkeypatch: Any) -> None:
    monkeypatch.setattr("deployments.ingress.openai.chat_images._LOW_PIXELS", 64)
    content = [part(url_of(drawn(16, 32)), detail="low"), part(url_of(drawn(16, 32)))]
    answer = await http.post("/v1/chat/completions", json=chat_with(content))
    assert answer.status_code == 200, answer.text
    low, auto = content_of(replicas)
    assert (low.shape, auto.shape) == ((5, 11, 3), (16, 32, 3))


def chat_with(content: Any) -> dict[str, Any]:
    return {"model": "chatty", "messages": [{"role": "user", "content": content}]}


ASKED: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "an address alone": lambda data: (
        "/v1/chat/completions",
        chat_with(
            [{"type": "image_url", "image_url": f"data:image/png;base64,{data}"}, {"type": "text", "text": "what"}]
        ),
    ),
    "responses": lambda data: (
        "/v1/responses",
        {
            "model": "chatty",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
                        {"type": "input_text", "text": "what"},
                    ],
                }
            ],
        },
    ),
    "anthropic": lambda data: (
        "/v1/messages",
        {
            "model": "chatty",
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                        TEXT,
                    ],
                }
            ],
        },
    ),
    "ollama": lambda data: (
        "/api/chat",
        {"model": "chatty", "messages": [{"role": "user", "content": "what", "images": [data]}]},
    ),
    "a tool's result, responses": lambda data: (
        "/v1/responses",
        {
            "model": "chatty",
            "input": [
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [
                        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
                        {"type": "input_text", "text": "what"},
                    ],
                },
            ],
        },
    ),
    "ollama's prompt": lambda data: ("/api/generate", {"model": "chatty", "prompt": "what", "images": [data]}),
}


@pytest.mark.parametrize("edge", ASKED)
async def test_other_protocols(edge: str, http: httpx.AsyncClient, replicas: Replicas) -> None:
    pixels = drawn()
    path, body = ASKED[edge](base64_of(pixels))
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    image, text = content_of(replicas)
    assert text == "what"
    assert np.array_equal(image, pixels)


async def test_tokens_of_a_chat_with_an_image(http: httpx.AsyncClient, replicas: Replicas) -> None:
    answer = await http.post("/tokenize", json=chat_with([part(url_of(drawn()))]))
    assert answer.status_code == 200, answer.text
    ((request, _),) = replicas.tokenized
    assert len(request.messages[0].images) == 1


async def test_a_kept_response_has_its_images(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    body = ASKED["responses"](base64_of(drawn()))[1]
    first = await client.responses.create(**body)
    await client.responses.create(model="chatty", input="and?", previous_response_id=first.id)
    messages = replicas.requests[-1].messages
    assert [len(message.images) for message in messages] == [1, 0, 0]


async def test_models_tell_whether_they_see(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    listed = {model.id: model.to_dict()["sees"] async for model in client.models.list()}
    assert {name for name, sees in listed.items() if sees} == {"chatty"}
    shown = (await http.post("/api/show", json={"model": "chatty"})).json()
    assert "vision" in shown["capabilities"]


BAD: dict[str, tuple[Any, str, str]] = {
    "no image": (part("data:image/png;base64,eA=="), "messages.0.content.1", "no PNG, JPEG or WebP"),
    "no base64": (part("data:image/png;base64,!"), "messages.0.content.1", "expected an image file in base64"),
    "a file": (part("file:///etc/passwd"), "messages.0.content.1", "expected an image file in base64"),
    "too large": (
        part(base64.b64encode(png_of(6000, 6001)).decode()),
        "messages.0.content.1",
        "6000x6001 pixels, at most 36000000",
    ),
    "detail": (part("eA==", detail="ultra"), "messages.0.content.1.image_url.detail", "'auto', 'low' or 'high'"),
    "no url": ({"type": "image_url", "image_url": {}}, "messages.0.content.1.image_url.url", "[Ff]ield required"),
    "sound": ({"type": "input_audio", "input_audio": {}}, "messages.0.content.1", "'text', .*'image_url'"),
    "no host": (part("http://169.254.169.254/latest"), "messages.0.content.1", "ingress.image_hosts: none"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_images(case: str, http: httpx.AsyncClient, replicas: Replicas) -> None:
    given, field, words = BAD[case]
    answer = await http.post("/v1/chat/completions", json=chat_with([TEXT, given]))
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == field
    assert re.search(words, error["message"]), error["message"]
    assert not replicas.requests


async def test_too_many(http: httpx.AsyncClient, replicas: Replicas) -> None:
    answer = await http.post("/v1/chat/completions", json=chat_with([part(url_of(drawn()))] * (LIMITS.max_images + 1)))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "messages: 5 images, at most 4 are allowed")


async def test_a_model_without_eyes(http: httpx.AsyncClient, replicas: Replicas) -> None:
    body = chat_with([part("http://named.example/a.png")]) | {"model": "plain"}  # it is not fetched either
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "model 'plain' sees no images; models that do: chatty"


async def test_a_large_body_is_for_images_alone(http: httpx.AsyncClient, replicas: Replicas) -> None:
    noise = base64_of(drawn(1000, 900))
    assert len(noise) > LIMITS.max_body_bytes
    content = [part(f"data:image/png;base64,{noise}")]
    assert (await http.post("/v1/chat/completions", json=chat_with(content))).status_code == 200
    content.append({"type": "text", "text": "x" * LIMITS.max_body_bytes})
    content[0] = part(url_of(drawn()))
    answer = await http.post("/v1/chat/completions", json=chat_with(content))
    assert (answer.status_code, "beside its images" in answer.text) == (413, True)


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "2001:db8::1"),
    ],
)
def test_inner_addresses(address: str) -> None:
    assert is_inner(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert not is_inner(address)


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Yield the port of a server on this machine, and the heads of the requests that reach it."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await answer(writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        yield listening.sockets[0].getsockname()[1], heads


def sending(head: str, body: bytes = b"") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()

    return answer


async def resolve_here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


@pytest.fixture
def open_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine for the public network."""
    monkeypatch.setattr(outer_hosts, "is_inner", lambda address: False)


@pytest.mark.usefixtures("open_addresses")
async def test_a_named_host_is_asked_at_the_address_that_was_looked_at() -> None:
    async with server(sending("200 OK", b"pixels")) as (port, heads):
        fetcher = ImageFetcher(image_hosts([f"images.example:{port}"], resolve_here), 100)
        assert await fetcher.fetch(f"http://IMAGES.example:{port}/a%20b.png?c=d", "f") == b"pixels"
    assert heads[0].startswith(b"GET /a%20b.png?c=d HTTP/1.1\r\n")
    assert f"\r\nHost: images.example:{port}\r\n".encode() in heads[0]


def certificate_of(host: str, folder: Path) -> Path:
    """Return a file with a key and a certificate of this host, signed by itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path = folder / "certificate.pem"
    path.write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()) + made.public_bytes(pem))
    return path


@pytest.mark.usefixtures("open_addresses")
async def test_a_certificate_has_to_be_the_named_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = certificate_of("images.example", tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(path)
    monkeypatch.setattr(outer_hosts, "_tls", lambda: ssl.create_default_context(cafile=path))
    async with server(sending("200 OK", b"pixels"), tls) as (port, heads):
        fetcher = ImageFetcher(image_hosts([f"images.example:{port}", f"other.example:{port}"], resolve_here), 100)
        assert await fetcher.fetch(f"https://images.example:{port}/", "f") == b"pixels"
        with pytest.raises(InvalidRequest, match=r"(?i)certificate verify failed"):
            await fetcher.fetch(f"https://other.example:{port}/", "f")
    assert len(heads) == 1


async def test_an_inner_address_is_not_asked() -> None:
    async with server(sending("200 OK", b"pixels")) as (port, heads):
        fetcher = ImageFetcher(image_hosts([f"images.example:{port}", f"127.0.0.1:{port}"], resolve_here), 100)
        with pytest.raises(InvalidRequest, match=r"f: images\.example is at an inner address"):
            await fetcher.fetch(f"http://images.example:{port}/", "f")
        with pytest.raises(InvalidRequest, match="inner address"):
            await ImageFetcher(image_hosts([f"127.0.0.1:{port}"]), 100).fetch(f"http://127.0.0.1:{port}/", "f")

        async def resolve_both(host: str, port: int) -> list[str]:
            return ["93.184.215.14", "127.0.0.1"]

        with pytest.raises(InvalidRequest, match="inner address"):
            await ImageFetcher(image_hosts(["a.example"], resolve_both), 100).fetch("http://a.example/", "f")
        assert not heads


@pytest.mark.parametrize(
    "url",
    [
        *("http://other.example/a", "http://named.example:81/a", "https://named.example.evil/a"),
        *("http://named.example@other.example/a", "http://user:secret@named.example/a", "http://named.example/a b"),
        *("http://named.example\r\nX: y/a", "http://[named.example/a", "http://named.example:99999/a", "http:///a"),
    ],
)
async def test_other_hosts_are_not_resolved(url: str) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise AssertionError(host)

    with pytest.raises(InvalidRequest, match=r"^f: "):
        await ImageFetcher(image_hosts(["named.example"], resolve), 100).fetch(url, "f")


@pytest.mark.usefixtures("open_addresses")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            sending("302 Found\r\nLocation: http://127.0.0.1/"),
            r"a\.example answered 302 \(redirects are not followed\)",
        ),
        (sending("404 Not Found"), "answered 404"),
        (sending("200 OK", b"x" * 101), r"at a\.example has more bytes, at most 100"),
        (sending("nonsense"), "could be fetched"),
    ],
)
async def test_answers_that_are_no_image(answer: Answer, words: str) -> None:
    async with server(answer) as (port, heads):
        with pytest.raises(InvalidRequest, match=words):
            await ImageFetcher(image_hosts([f"a.example:{port}"], resolve_here), 100).fetch(
                f"http://a.example:{port}/", "f"
            )
        assert len(heads) == 1


@pytest.mark.usefixtures("open_addresses")
async def test_a_host_that_sends_for_ever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_images, "_FETCH_S", 0.2)
    gone = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:  # a head that never ends
                writer.write(b"X-A: b\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            gone.set()

    async with server(answer) as (port, _):
        fetcher = ImageFetcher(image_hosts([f"a.example:{port}"], resolve_here), 100)
        with pytest.raises(InvalidRequest, match=r"did not send the image in 0.2 s|could be fetched"):
            await fetcher.fetch(f"http://a.example:{port}/", "f")
        await asyncio.wait_for(gone.wait(), 10)


async def test_a_caller_who_goes_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()

    async def resolve(host: str, port: int) -> list[str]:
        started.set()
        await asyncio.Event().wait()
        return []

    fetcher = ImageFetcher(image_hosts(["a.example"], resolve), 100)
    task = asyncio.create_task(fetcher.fetch("https://a.example/", "f"))
    await started.wait()
    task.cancel()
    await until(task.done)
    assert fetcher._slots._num_free == chat_images._MAX_FETCHING


@pytest.mark.usefixtures("open_addresses")
async def test_a_chat_with_an_address(open_http: Any, replicas: Replicas) -> None:
    pixels = drawn()
    async with (
        server(sending("200 OK", base64.b64decode(base64_of(pixels)))) as (port, heads),
        open_http(replicas, image_hosts=(f"localhost:{port}",)) as http,
    ):
        content = [part(f"http://localhost:{port}/"), TEXT]
        answer = await http.post("/v1/chat/completions", json=chat_with(content))
    assert answer.status_code == 200, answer.text
    assert len(heads) == 1
    assert np.array_equal(content_of(replicas)[0], pixels)
