"""Access over HTTP: keys and their limits, operators, web pages and names of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CHATS,
    CONFIG,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    Held,
    client_over,
    problem,
)
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.access import AccessConfig
from configs.errors import ConfigError
from configs.http import CompatConfig
from deployments.ingress import http as http_module
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of, revoke_key
from deployments.ingress.gate import _is_same_origin, _need_of
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.records import ImageResult

USER, ADMIN = "atl_user", "atl_admin"
EVIL = "https://evil.example"
Open = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


class HeldTexts(Held):
    """Holds the second piece of a text as well; notes the tenant of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[str] = []

    async def on_stream_text(self, request: Any) -> AsyncIterator[Any]:
        async for chunk in super().on_stream_text(request):
            yield chunk
            await self.gate.wait()


class TenantNoting(Service):
    """A service that notes who asks, as code below the routes sees it."""

    tenants: list[str]

    async def generate(self, request: Any) -> ImageResult:
        self.tenants.append(current_tenant.get())
        return await super().generate(request)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    path = tmp_path / "keys"
    add_key(path, KeyEntry(name="user", sha256=hash_of(USER), tenant="team"))
    add_key(path, KeyEntry(name="root", sha256=hash_of(ADMIN), admin=True))
    return path


@pytest.fixture
def replicas() -> HeldTexts:
    held = HeldTexts()
    held.gate.set()
    return held


@pytest.fixture
def opened(replicas: HeldTexts) -> Open:
    """Return a function that makes a client of a server with settings of `access`; its service is `client.service`."""

    @asynccontextmanager
    async def client(
        http_host: str = "127.0.0.1",
        url: str = "http://localhost:8000",
        num_replicas: int = 1,
        compat: CompatConfig = CONFIG.http.compat,
        route_prefix: str = "/",
        **access: Any,
    ) -> AsyncIterator[httpx.AsyncClient]:
        update = {
            "http": CONFIG.http.model_copy(update={"compat": compat, "route_prefix": route_prefix}),
            "access": AccessConfig.model_validate(access),
            "ingress": CONFIG.ingress.model_copy(update={"num_replicas": num_replicas}),
        }
        config = CONFIG.model_copy(update=update)
        watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
        service = TenantNoting(config, watch, handle, handle)
        service.tenants = replicas.tenants
        app = create_http_app(service, config, http_host=http_host)

        @app.get("/v1/tenant")
        async def tenant() -> Any:
            return current_tenant.get()

        async with client_over(app, url, timeout=10) as http:
            yield http
        watch.close()

    return client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_keys_everything_is_open_on_loopback(opened: Open) -> None:
    async with opened() as http:
        for path in ("/healthz", "/v1/models", "/admin/cluster", "/v2", "/docs"):
            assert (await http.get(path)).status_code == 200
        assert (await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=bearer("whatever"))).status_code == 200
        assert (await http.get("/v1/tenant")).json() == ""


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {USER}"},
        {"authorization": f"Bearer {USER} {ADMIN}"},
        {"authorization": f"Bearer {USER}x"},
        {"authorization": f"Bearer {USER[:-1]}"},
        {"authorization": f"Bearer {USER.upper()}"},
        {"authorization": f"Bearer {hash_of(USER)}"},
        {"authorization": USER},
        {"authorization": f"Bearer {'x' * 60_000}"},
        {"authorization": "Bearer \xff\xfe"},
        {"x-api-key": ""},
        {"x-api-key": "wrong"},
        {"x-api-key": f"Bearer {USER}"},
        {"authorization": "Bearer wrong", "x-api-key": USER},
    ],
)
async def test_without_a_key_that_holds_nothing_is_asked_of_the_models(
    opened: Open, keys: Path, replicas: HeldTexts, headers: dict[str, str]
) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    async with opened(keys_file=keys) as http:
        answer = await http.post(f"/v1/{CHATS}", json=CHAT, headers=sent)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "retry-after" not in answer.headers
        found = problem(answer)
        assert (found["code"], found["type"]) == ("invalid_api_key", "invalid_request_error")
        other = await http.post("/v2/models/chatty/generate", json={"text_input": "x"}, headers=sent)
        assert (other.status_code, set(other.json())) == (401, {"error"})
        for path in ("/metrics", "/admin/cluster", "/v1/models", "/v1/nothing", "/nothing", "/v2"):
            assert (await http.get(path, headers=sent)).status_code == 401
        assert not replicas.requests
        for path in ("/healthz", "/v2/health/live", "/v2/health/ready"):
            assert (await http.get(path, headers=sent)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(USER),
        {"authorization": f"bearer  {USER}"},
        {"x-api-key": USER},
        {"authorization": "Basic proxy", "x-api-key": USER},
    ],
)
async def test_a_key_opens_the_models_and_no_more(opened: Open, keys: Path, headers: dict[str, str]) -> None:
    async with opened(keys_file=keys) as http:
        for path, body in ((IMAGES, IMAGE), (CHATS, CHAT), (EMBEDDINGS, EMBEDDING)):
            assert (await http.post(f"/v1/{path}", json=body, headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.post("/v2/repository/index", headers=headers)).status_code == 200
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/admin/cluster"),
            ("POST", "/admin/models"),
            ("PUT", "/admin/text-encoders/batching"),
        ):
            answer = await http.request(method, path, headers=headers)
            assert (answer.status_code, problem(answer)["code"]) == (403, "not_allowed")
            assert "--admin" in problem(answer)["message"]
        for what in ("load", "unload"):
            answer = await http.post(f"/v2/repository/models/flux/{what}", headers=headers)
            assert (answer.status_code, set(answer.json())) == (403, {"error"})


async def test_below_a_path_of_its_own_a_key_opens_as_much_as_at_the_root(opened: Open, keys: Path) -> None:
    async with opened(keys_file=keys, route_prefix="/two") as http:
        assert (await http.get("/two/healthz")).status_code == 200
        for path in ("/two/v1/models", "/two/admin/cluster", "/two/nothing"):
            assert (await http.get(path)).status_code == 401
        assert (await http.post(f"/two/v1/{CHATS}", json=CHAT, headers=bearer(USER))).status_code == 200
        assert (await http.post("/two/chat/completions", json=CHAT, headers=bearer(USER))).status_code == 200
        assert (await http.get("/two/admin/cluster", headers=bearer(USER))).status_code == 403
        assert (await http.get("/two/admin/cluster", headers=bearer(ADMIN))).status_code == 200


async def test_an_admin_key_opens_all(opened: Open, keys: Path) -> None:
    async with opened(keys_file=keys) as http:
        http.headers.update(bearer(ADMIN))
        assert (await http.get("/admin/cluster")).status_code == 200
        assert (await http.post(f"/v1/{CHATS}", json=CHAT)).status_code == 200
        assert (await http.get("/anything")).status_code == 404


@pytest.mark.parametrize(
    ("path", "need"),
    [
        ("/healthz", "nothing"),
        ("/healthz/", "admin"),
        ("//healthz", "admin"),
        ("/v2/health/live", "nothing"),
        ("/v2/health/live/x", "key"),
        ("/v1/models", "key"),
        ("/v1", "admin"),
        ("/v1x/models", "admin"),
        ("/v2", "key"),
        ("/v2/models/m/infer", "key"),
        ("/v2/repository/index", "key"),
        ("/v2/repository/models/m/load", "admin"),
        ("/V2/repository/models/m/load", "admin"),
        ("/prefix/v1/models", "admin"),
        ("/admin/cluster", "admin"),
        ("/metrics", "admin"),
        ("", "admin"),
        ("/admin/live", "admin"),
    ],
)
def test_what_is_not_known_to_be_for_everybody_is_for_operators(path: str, need: str) -> None:
    assert _need_of(path) == need


@pytest.mark.parametrize(("method", "path"), [("GET", "/anything"), ("POST", "/admin/nothing"), ("GET", "/v1/nothing")])
async def test_a_path_that_nobody_has_is_not_there_for_any_key(
    opened: Open, keys: Path, method: str, path: str
) -> None:
    compat = CONFIG.http.compat.model_copy(update={"ollama": False})  # which has /
    async with opened(keys_file=keys, compat=compat) as http:
        for key in (USER, ADMIN):
            answer = await http.request(method, path, headers=bearer(key))
            assert (answer.status_code, problem(answer)["code"]) == (404, "unknown_url")
        assert (await http.request(method, path)).status_code == 401


async def test_the_tenant_of_the_key_wins_over_the_header(opened: Open, keys: Path, replicas: HeldTexts) -> None:
    async with opened(keys_file=keys) as http:
        forged = {"x-tenant": "other"}
        assert (await http.get("/v1/tenant", headers=bearer(USER) | forged)).json() == "team"
        assert (await http.get("/v1/tenant", headers=bearer(ADMIN) | forged)).json() == "root"
        await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=bearer(USER) | forged)
        await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=bearer(ADMIN))
    async with opened() as http:
        await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=forged)
    assert replicas.tenants == ["team", "root", ""]
    assert current_tenant.get() == ""


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("max_priority", "of_all", "asked", "had"),
    [
        (None, None, 1, 2),  # the default priority
        (None, None, None, 2),
        (None, None, 3, 3),
        (1, None, 1, 1),
        (3, None, 1, 3),
        (3, None, None, 3),  # a key for work that can wait
        (None, 1, 1, 1),
        (3, 1, 1, 3),
        (9, None, 1, 3),  # of three
    ],
)
async def test_no_request_has_a_more_urgent_priority_than_its_key(
    opened: Open,
    keys: Path,
    replicas: HeldTexts,
    max_priority: int | None,
    of_all: int | None,
    asked: int | None,
    had: int,
) -> None:
    add_key(keys, KeyEntry(name="other", sha256=hash_of("atl_other"), max_priority=max_priority))
    said = {} if asked is None else {"x-priority": str(asked)}
    async with opened(keys_file=keys, max_priority=of_all) as http:
        found = await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=bearer("atl_other") | said)
        assert found.status_code == 200
        await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=bearer(ADMIN) | {"x-priority": "1"})
    async with opened(max_priority=3) as http:
        await http.post(f"/v1/{IMAGES}", json=IMAGE, headers={"x-priority": "1"})
    seen = {id(request): request.priority or 2 for request in replicas.requests}
    assert list(seen.values()) == [had, 1, 1]


async def test_the_client_of_openai_raises_its_own_errors(opened: Open, keys: Path, replicas: HeldTexts) -> None:
    async with opened(keys_file=keys, requests_per_s=0.01) as http:

        def client(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(api_key=key, base_url="http://localhost/v1", http_client=http, max_retries=0)

        with pytest.raises(openai.AuthenticationError) as wrong:
            await client("sk-wrong").chat.completions.create(**CHAT)
        assert wrong.value.code == "invalid_api_key"
        assert (await client(USER).chat.completions.create(**CHAT)).choices[0].message.content == "Hello"
        with pytest.raises(openai.RateLimitError) as limited:
            await client(USER).chat.completions.create(**CHAT)
        assert limited.value.code == "rate_limit_exceeded"
        assert 90 <= int(limited.value.response.headers["retry-after"]) <= 100
        with pytest.raises(openai.PermissionDeniedError):
            await client(USER).get("http://localhost/admin/cluster", cast_to=object)
        assert len(replicas.requests) == 1
        for _ in range(3):  # the config's limits are not for operators
            await client(ADMIN).chat.completions.create(**CHAT)


async def test_a_limit_of_a_key_is_its_own_and_in_the_form_of_the_protocol(opened: Open, keys: Path) -> None:
    add_key(keys, KeyEntry(name="slow", sha256=hash_of("atl_slow"), requests_per_s=0.5))
    async with opened(keys_file=keys) as http:
        slow = bearer("atl_slow")
        assert (await http.get("/v1/models", headers=slow)).status_code == 200
        refused = await http.post("/v2/models/chatty/generate", json={"text_input": "x"}, headers=slow)
        assert (refused.status_code, set(refused.json()), refused.headers["retry-after"]) == (429, {"error"}, "2")
        for _ in range(5):
            assert (await http.get("/v1/models", headers=bearer(USER))).status_code == 200


async def test_requests_in_progress_are_counted_until_their_answer_is_out(
    opened: Open, keys: Path, replicas: HeldTexts
) -> None:
    replicas.gate.clear()
    async with opened(keys_file=keys, max_concurrent=5, num_replicas=2) as http:  # three here
        http.headers.update(bearer(USER))
        running = [asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE)) for _ in range(3)]
        while len(replicas.requests) < 3:
            await asyncio.sleep(0)
        refused = await http.get("/v1/models")
        assert (refused.status_code, problem(refused)["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert (await http.get("/v1/models", headers=bearer(ADMIN))).status_code == 200
        assert (await http.get("/healthz")).status_code == 200
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        assert (await http.get("/v1/models")).status_code == 200  # a client that went leaves its place
        replicas.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running[1:])] == [200, 200]
        replicas.error = ValueError("broken")
        for _ in range(4):
            assert (await http.post(f"/v1/{IMAGES}", json=IMAGE)).status_code == 500
        assert (await http.get("/v1/models")).status_code == 200


async def test_a_revoked_key_finishes_its_stream_and_begins_no_other_request(
    opened: Open, keys: Path, replicas: HeldTexts
) -> None:
    replicas.gate.clear()
    async with opened(keys_file=keys, max_concurrent=2) as http:
        body = CHAT | {"stream": True}
        stream = asyncio.create_task(http.post(f"/v1/{CHATS}", json=body, headers=bearer(USER)))
        while not replicas.requests:
            await asyncio.sleep(0)
        revoke_key(keys, "user")
        refused = await http.post(f"/v1/{CHATS}", json=CHAT, headers=bearer(USER))
        assert (refused.status_code, problem(refused)["code"]) == (401, "invalid_api_key")
        replicas.gate.set()
        answer = await stream
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        add_key(keys, KeyEntry(name="user", sha256=hash_of(USER)))
        assert (await http.post(f"/v1/{CHATS}", json=CHAT, headers=bearer(USER))).status_code == 200


async def test_an_unusable_keys_file_lets_the_last_good_keys_in_and_nobody_before_there_were_any(
    opened: Open, keys: Path
) -> None:
    async with opened(keys_file=keys.with_name("gone")) as http:
        assert (await http.get("/v1/models", headers=bearer(USER))).status_code == 401
    async with opened(keys_file=keys) as http:
        assert (await http.get("/v1/models", headers=bearer(USER))).status_code == 200
        keys.write_bytes(b"\x00garbage")
        assert (await http.get("/v1/models", headers=bearer(USER))).status_code == 200
        assert (await http.get("/v1/models", headers=bearer("x"))).status_code == 401


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.:8000", 200),
        ("app.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:8000", 200),
        ("", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("notlocalhost", 403),
        ("[evil]", 403),
        ("0x7f.1", 403),
        ("\xff" * 300, 403),
    ],
)
async def test_a_name_that_somebody_else_chose_is_refused(
    opened: Open, replicas: HeldTexts, host: str, status: int
) -> None:
    async with opened() as http:
        headers = {"host": host.encode("latin-1")}
        answer = await http.get("/v1/models", headers=headers)
        assert answer.status_code == status
        assert (await http.post(f"/v1/{CHATS}", json=CHAT, headers=headers)).status_code == status
        assert bool(replicas.requests) == (status == 200)
        if status == 403:
            assert "allowed_hosts" in problem(answer)["message"]
            assert (await http.get("/healthz", headers=headers)).status_code == 200


async def test_names_of_the_config_and_where_names_do_not_matter(opened: Open, keys: Path) -> None:
    async def status(name: str, headers: dict[str, str] | None = None, **settings: Any) -> int:
        async with opened(**settings) as http:
            return (await http.get("/v1/models", headers=(headers or {}) | {"host": name})).status_code

    names = {"allowed_hosts": ["Atelier.example", "*.my.example"]}
    for settings in (names, names | {"http_host": "0.0.0.0", "insecure": True}):
        assert await status("atelier.example:80", **settings) == 200
        assert await status("a.b.my.example", **settings) == 200
        for other in ("my.example", "xmy.example", "atelier.example.evil"):
            assert await status(other, **settings) == 403
    assert await status("any.example", bearer(USER), keys_file=keys) == 200
    assert await status("any.example", http_host="0.0.0.0", insecure=True) == 200
    assert await status("any.example", bearer(USER), keys_file=keys, **names) == 403


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://a.example", "a.example", True),
        ("https://a.example", "a.example:443", True),
        ("http://a.example:80", "a.example", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://localhost", "localhost:8000", False),
        ("https://evil.example", "localhost:8000", False),
        ("http://localhost:8000@evil.example", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("null", "null", False),
        ("file://", "localhost:8000", False),
        ("http://", "", False),
        ("http://[", "localhost", False),
        ("http://localhost:x", "localhost", False),
        ("chrome-extension://localhost", "localhost", False),
    ],
)
async def test_a_web_page_from_elsewhere_cannot_change_anything(
    opened: Open, replicas: HeldTexts, origin: str, host: str, same: bool
) -> None:
    assert _is_same_origin(origin, host) == same
    if host.startswith(("localhost", "127", "[")):
        async with opened() as http:
            headers = {"origin": origin, "host": host}
            simple = {"content-type": "text/plain"}  # a request that browsers send without asking first
            answer = await http.post(f"/v1/{IMAGES}", json=IMAGE, headers=headers | simple)
            assert (answer.status_code == 403) == (not same)
            deleted = await http.delete("/admin/models/nothing", headers=headers)
            assert (deleted.status_code == 403) == (not same)
            assert same or not replicas.requests
            assert (await http.get("/v1/models", headers=headers)).status_code == 200  # it cannot read the answer
            assert "access-control-allow-origin" not in answer.headers


async def test_a_page_that_the_config_names_may_ask_and_sees_refusals(opened: Open, keys: Path) -> None:
    page = "https://app.example"
    for keys_file in (None, keys):
        async with opened(cors_origins=[page.upper().replace("HTTPS", "https")], keys_file=keys_file) as http:
            preflight = {"origin": page, "access-control-request-method": "POST"}
            preflight |= {"access-control-request-headers": "authorization, content-type"}
            answer = await http.options(f"/v1/{CHATS}", headers=preflight)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == page
            assert "authorization" in answer.headers["access-control-allow-headers"]
            answer = await http.post(f"/v1/{CHATS}", json=CHAT, headers={"origin": page} | bearer(USER))
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
            evil = await http.options(f"/v1/{CHATS}", headers=preflight | {"origin": EVIL})
            assert (evil.status_code, "access-control-allow-origin" in evil.headers) == (400, False)
            answer = await http.post(f"/v1/{CHATS}", json=CHAT, headers={"origin": EVIL} | bearer("wrong"))
            assert answer.status_code == (401 if keys_file else 403)
            assert "access-control-allow-origin" not in answer.headers
    async with opened(cors_origins=[page], keys_file=keys) as http:
        refused = await http.post(f"/v1/{CHATS}", json=CHAT, headers={"origin": page})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)


async def test_every_page_may_ask_where_the_config_says_so(opened: Open) -> None:
    async with opened(cors_origins=["*"]) as http:
        answer = await http.post(f"/v1/{CHATS}", json=CHAT, headers={"origin": EVIL})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


async def test_the_page_of_the_api_asks_for_a_key_where_one_is_needed(opened: Open, keys: Path) -> None:
    async with opened() as http:
        page = (await http.get("/openapi.json")).json()
        assert "securitySchemes" not in page["components"]
        assert "401" not in page["paths"]["/v1/models"]["get"]["responses"]
    async with opened(keys_file=keys) as http:
        for _ in range(2):  # the page is kept
            page = (await http.get("/openapi.json")).json()
        assert page["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in page["paths"].items():
            for method, operation in operations.items():
                refused = (await http.request(method, path.replace("{", "").replace("}", ""))).status_code == 401
                assert ("security" in operation) == ("401" in operation["responses"]) == refused, path
        for path, status, name in (
            ("/v1/chat/completions", "429", "ErrorAnswer"),
            ("/v2/models/{model}/infer", "401", "ProtocolError"),
            ("/v2/repository/models/{model}/load", "403", "ProtocolError"),
        ):
            answer = page["paths"][path]["post"]["responses"][status]
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith(f"/{name}")
            assert name in page["components"]["schemas"]


@pytest.mark.parametrize(
    ("door", "serve_host", "config_host", "refused"),
    [
        ("", "127.0.0.1", "0.0.0.0", False),
        ("", "0.0.0.0", "127.0.0.1", True),
        ("", None, "127.0.0.1", False),
        ("127.0.0.1:8000", "127.0.0.1", "127.0.0.1", False),
        ("0.0.0.0:8000", "127.0.0.1", "0.0.0.0", True),
        ("::1:8000", "127.0.0.1", "::1", False),
    ],
)
def test_a_replica_refuses_to_start_where_others_reach_it_without_keys(
    monkeypatch: pytest.MonkeyPatch, door: str, serve_host: str | None, config_host: str, refused: bool
) -> None:
    """The settings of Serve and HAProxy count: `serve run` does not ask the config."""
    monkeypatch.setattr(http_module, "proxy_host", lambda: serve_host)
    monkeypatch.setenv("ATELIER_HTTP_ADDRESS", door)
    http = CONFIG.http.model_copy(update={"host": config_host})

    def start(**access: Any) -> str:
        config = CONFIG.model_copy(update={"http": http, "access": AccessConfig.model_validate(access)})
        return http_module._checked_host(config)

    if refused:
        with pytest.raises(ConfigError, match=r"http\.host: other machines reach 0\.0\.0\.0.*--insecure"):
            start()
    else:
        assert start() == (door.rpartition(":")[0] or serve_host or config_host)
    assert start(insecure=True)
    assert start(keys_file="keys")
