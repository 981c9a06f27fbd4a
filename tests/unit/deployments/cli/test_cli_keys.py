"""`atelier keys`, the key that other commands send, and the refusal to listen openly without keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.cluster import ClusterConfig
from deployments.ingress.access.keys import read_key_store

Run = Callable[..., tuple[int, str, str]]

HEAD = Path(__file__).parents[4] / "infra" / "demo" / "models" / "texts-head"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a cluster YAML with the given sections, and its path."""

    def write(**sections: Any) -> str:
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(sections | {"models": [{"id": "m", "path": str(HEAD)}]}, sort_keys=False))
        return str(file)

    return write


def test_a_key_is_printed_once_and_only_its_hash_is_kept(run: Run, config: Any, tmp_path: Path) -> None:
    where = ("--config", config(access={"keys_file": "secret/keys"}))
    code, out, err = run(
        "keys", "add", "alice", "--tenant", "team", "--rate", "2.5", "--concurrency", "3", "--max-priority", "3", *where
    )
    key = out.strip()
    assert (code, out.count("\n"), len(key)) == (0, 1, 47)
    assert str(tmp_path / "secret/keys") in err
    assert key not in err
    assert key not in (tmp_path / "secret/keys").read_text()
    entry = read_key_store(tmp_path / "secret/keys").find(key)
    assert entry is not None
    assert (entry.name, entry.admin, entry.share) == ("alice", False, "team")
    assert (entry.requests_per_s, entry.max_concurrent, entry.max_priority) == (2.5, 3, 3)
    code, out, _ = run("keys", "add", "root", "--admin", "--json", *where)
    assert code == 0
    assert read_key_store(tmp_path / "secret/keys").find(json.loads(out)["key"]).admin

    code, out, err = run("keys", "list", *where)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:6] == ["alice", "user", "team", "2.5", "3", "3"]
    assert rows[2][:3] == ["root", "admin", "root"]
    assert key not in out

    assert run("keys", "revoke", "alice", *where)[0] == 0
    code, out, _ = run("keys", "list", "--json", *where)
    assert [found["name"] for found in json.loads(out)["keys"]] == ["root"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add", "two words"], "name"),
        (["add", ""], "name"),
        (["add", "a", "--rate", "0"], "greater than 0"),
        (["add", "a", "--rate", "nan"], "requests_per_s"),
        (["add", "a", "--concurrency", "0"], "max_concurrent"),
        (["add", "a", "--max-priority", "0"], "max_priority"),
        (["add", "a", "--tenant", ""], "tenant"),
        (["add", "a", "--tenant", "x\ny"], "tenant"),
        (["add", "taken"], "a key 'taken' already"),
        (["revoke", "nobody"], "no key 'nobody' (known: taken)"),
        (["list", "--file", "gone"], "gone: the keys cannot be read: No such file"),
        (["add", "a", "--file", "/proc/none/keys"], "cannot be changed"),
    ],
)
def test_a_mistake_is_one_line(run: Run, tmp_path: Path, arguments: list[str], words: str) -> None:
    assert run("keys", "add", "taken", "--file", "keys")[0] == 0
    where = [] if "--file" in arguments else ["--file", "keys"]
    code, out, err = run("keys", *arguments, *where)
    assert code in (1, 2)
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1
    assert len(read_key_store(tmp_path / "keys").entries) == 1


def test_a_config_without_a_keys_file(run: Run, config: Any) -> None:
    code, out, err = run("keys", "list", "--config", config())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "keys_file" in err
    assert "--file" in err


def test_broken_lines_are_listed_and_the_exit_code_says_so(run: Run, tmp_path: Path) -> None:
    run("keys", "add", "a", "--file", "keys")
    with (tmp_path / "keys").open("a") as file:
        file.write("torn\n")
    code, out, err = run("keys", "list", "--file", "keys")
    assert code == 1
    assert "a  " in out
    assert f"{tmp_path / 'keys'}:3: " in err


@pytest.mark.drawn(5)
@pytest.mark.parametrize("section", ["http", "grpc"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "my.example", "127.0.0.1.example"])
@pytest.mark.parametrize("detach", [[], ["--detach"]], ids=["attached", "detached"])
def test_up_is_refused_beyond_this_machine_without_keys(
    run: Run, config: Any, section: str, host: str, detach: list[str]
) -> None:
    path = config(name="c", **{section: {"port": 8123, "host": host}})
    code, out, err = run("up", path, *detach)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{path}:4: {section}.host: other machines reach {host}" in err
    for way_out in ("atelier keys add", "keys_file", "--insecure"):
        assert way_out in err


@pytest.mark.parametrize("content", [None, "", "torn\n"])
def test_up_is_refused_when_its_keys_cannot_be_read(run: Run, config: Any, tmp_path: Path, content: str | None) -> None:
    path = config(http={"host": "0.0.0.0"}, access={"keys_file": "keys"})
    if content is not None:
        (tmp_path / "keys").write_text(content)
        (tmp_path / "keys").chmod(0o600 if content else 0o666)
    code, out, err = run("up", path)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{path}:" in err
    assert "access.keys_file: " in err
    assert str(tmp_path / "keys") in err
    assert err.endswith("; `atelier keys add NAME --admin` makes a key\n")


def test_where_a_cluster_may_listen() -> None:
    def why_not(actual: str | None = None, **sections: Any) -> dict[str, str]:
        return ClusterConfig.model_validate(sections | {"models": [{"id": "m", "path": "m"}]}).open_hosts(actual)

    everywhere = {"http": {"host": "0.0.0.0"}, "grpc": {"host": "::"}}
    assert set(why_not(**everywhere)) == {"http.host", "grpc.host"}
    replicas = {"haproxy": {"replica_host": "0.0.0.0"}}
    assert set(why_not(http=replicas)) == {"http.haproxy.replica_host"}
    assert why_not(http=replicas | {"proxy": "serve"}) == {}
    assert why_not(**everywhere, access={"keys_file": "k"}) == {}
    assert why_not(**everywhere, access={"insecure": True}) == {}
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"):
        assert why_not(http={"host": host}, grpc={"host": host}) == {}
    assert set(why_not("0.0.0.0")) == {"http.host"}  # `serve run` does not ask the config
    assert why_not("127.0.0.1", http={"host": "0.0.0.0"}) == {}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "access",
    [
        {"cors_origins": ["app.example"]},
        {"cors_origins": ["https://app.example/"]},
        {"cors_origins": ["https://*.example"]},
        {"allowed_hosts": ["http://x"]},
        {"allowed_hosts": ["x:80"]},
        {"allowed_hosts": ["*"]},
        {"requests_per_s": 0},
        {"requests_per_s": float("inf")},
        {"max_concurrent": 0},
        {"keys": "k"},
    ],
)
def test_a_mistake_in_the_section_is_found(run: Run, config: Any, access: dict[str, Any]) -> None:
    code, out, err = run("up", config(access=access))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"access.{next(iter(access))}" in err


class KeyNoting(BaseHTTPRequestHandler):
    """Lists no models, and notes the header with the key."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": []}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), KeyNoting) as server:
        server.keys = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def test_commands_send_the_key_of_the_option_or_of_the_environment(
    run: Run, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = ("--url", f"http://127.0.0.1:{server.server_port}")
    assert run("models", *url)[0] == 0
    assert run("models", *url, "--key", "given")[0] == 0
    monkeypatch.setenv("ATELIER_API_KEY", "around")
    assert run("models", *url)[0] == 0
    assert run("models", *url, "--key", "given")[0] == 0
    assert server.keys == [None, "Bearer given", "Bearer around", "Bearer given"]


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_what_is_no_key_is_one_line_that_does_not_show_it(run: Run, server: Any, key: str) -> None:
    code, out, err = run("models", "--url", f"http://127.0.0.1:{server.server_port}", "--key", key)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "no key has" in err
    assert key.split()[0] not in err
    assert server.keys == []
