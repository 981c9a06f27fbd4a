"""The commands that change what a cluster serves, and the one that shows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.console import progress

LISTED = {"id": "m", "kind": "llm", "state": "ready", "error": ""}
CONFLICT = {"error": {"message": "m is in the [/red] cluster config", "code": "conflict"}}
NODE = {"node_id": "0123456789abcdef", "num_extents": 3, "resident_bytes": 2048, "leased_bytes": 1024}
NODE |= {"pinned_bytes": 512, "budget_bytes": 2**30, "read_bytes": 4096, "read_s": 0.0}
RESIDENT = {"host_bytes": 1536, "num_extents": 2, "pinned": True, "holders": ["worker-[1]"], "hits": 7}
CARD = {"nbytes": 2048, "error": "", "description": "", "base": []}
CLUSTER = {
    "cluster": "one",
    "num_models": 2,
    "num_nodes": 2,
    "models": [
        {"id": "m", "kind": "llm", "state": "updating", **CARD, "resident": {"0123456789abcdef": RESIDENT}}
        | {"last_switch": {"replica": "worker-4db2180e", "switch_ms": 12.34}}
        | {"built": [{"replica": "worker-4db2180e", "bytes": 1024, "leases": 2, "pinned": True}]},
        {"id": "idle", "kind": "llm", "state": "ready", **CARD, "resident": {"0123456789abcdef": {}}}
        | {"last_switch": None},
    ],
    "nodes": [NODE, {"node_id": "fedcba9876543210", "unreachable": "[/red] gone"}],
    "node_problems": ["node 10.0.0.3 answers no HTTP: [/red] no program"],
    "text_encoders": [{"unreachable": "the actor died"}],
    "workers": [{"name": "4db2180e", "modules": [{}] * 4, "resident_bytes": 100, "denoising": 2}],
}
CLUSTER["models"][1]["resident"]["0123456789abcdef"] = RESIDENT | {"pinned": False, "holders": []}  # type: ignore[index]
Run = Callable[..., tuple[int, str, str]]


class Answers(BaseHTTPRequestHandler):
    """A handler that keeps requests in `server.asked`, and answers from `server.answers`."""

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        server: Any = self.server
        server.asked.append((self.command, self.path, body))
        status, answer = server.answers[self.command, self.path.partition("?")[0]]
        answer = answer() if callable(answer) else answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked = []  # type: ignore[attr-defined]
        server.answers = {  # type: ignore[attr-defined]
            ("POST", "/admin/models"): (201, LISTED),
            ("DELETE", "/admin/models/m"): (200, {"id": "m", "deleted": True, "orphans": ["a", "b"]}),
            ("POST", "/admin/models/m/prefetch"): (200, {"nodes": {"n1": ""}, "workers": ["", "no room"]}),
            ("POST", "/admin/models/m/pin"): (200, {"nodes": {"n1": ""}, "workers": [""]}),
            ("DELETE", "/admin/models/m/pin"): (200, {"nodes": {"n1": ""}, "workers": [""]}),
            ("DELETE", "/admin/models/taken"): (409, CONFLICT),
            ("DELETE", "/admin/models/..%2Fx"): (409, CONFLICT),
            ("GET", "/admin/cluster"): (200, CLUSTER),
            ("GET", "/admin/imports"): (200, {"imports": []}),
        }
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(run: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return exit code, stdout and stderr of one command against the server."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: run(*arguments, "--url", f"http://127.0.0.1:{server.server_port}")


def test_register_sends_an_absolute_path_and_what_was_given(run: Run, server: Any, tmp_path: Path) -> None:
    assert run("register", "models/m", "--id", "m", "--dtype", "bfloat16") == (0, "m is ready (llm)\n", "")
    run("register", "s3://bucket/m", "--id", "m", "--base", "x", "--base", "y", "--no-wait")
    assert [asked for asked in server.asked if asked[0] == "POST"] == [
        ("POST", "/admin/models?wait=true", {"id": "m", "path": f"{tmp_path}/models/m", "dtype": "bfloat16"}),
        ("POST", "/admin/models?wait=false", {"id": "m", "path": "s3://bucket/m", "base": ["x", "y"]}),
    ]


def test_register_says_how_far_the_import_is(run: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.001)
    num_looks, is_told = 0, threading.Event()

    def look() -> dict[str, Any]:
        nonlocal num_looks
        if (num_looks := num_looks + 1) == 3:
            is_told.set()  # what the first two looks found was said
        broken = {"imports": None} if num_looks == 1 else {}
        other = {"id": "other", "done_bytes": 9, "total_bytes": 9}
        return {"imports": [other, {"id": "m", "done_bytes": 1000, "total_bytes": 4000}]} | broken

    server.answers["GET", "/admin/imports"] = (200, look)
    server.answers["POST", "/admin/models"] = (201, lambda: LISTED if is_told.wait(30) else {})
    code, out, err = run("register", "models/m", "--id", "m")
    assert (code, out) == (0, "m is ready (llm)\n")
    assert "registering m: 25%, 1.0 kB of 4.0 kB, about" in err


def test_register_does_without_a_server_that_tells_of_imports(
    run: Run, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.001)
    is_asked = threading.Event()
    missing = {"error": {"message": "no such path", "code": "not_found"}}
    server.answers["GET", "/admin/imports"] = (404, lambda: is_asked.set() or missing)
    server.answers["POST", "/admin/models"] = (201, lambda: LISTED if is_asked.wait(30) else {})
    assert run("register", "models/m", "--id", "m") == (0, "m is ready (llm)\n", "")


def test_a_path_outside_of_the_roots_is_one_line_that_names_them(run: Run, server: Any) -> None:
    why = "path: /etc: outside of the folders that models may come from (model_roots: /data/models, /data/loras)"
    server.answers["POST", "/admin/models"] = (400, {"error": {"message": why, "code": "invalid_request"}})
    assert run("register", "/etc", "--id", "m") == (1, "", f"error: {why}\n")


def test_a_bare_name_of_a_hub_is_understood(run: Run, server: Any) -> None:
    message = "/work/Qwen/Qwen3-0.6B: no such folder or file"
    server.answers["POST", "/admin/models"] = (422, {"error": {"message": message, "code": "unprocessable"}})
    code, _, error = run("register", "Qwen/Qwen3-0.6B", "--id", "m")
    assert (code, "a model of the hub is hf://Qwen/Qwen3-0.6B" in " ".join(error.split())) == (1, True)


def test_register_needs_an_id(run: Run, server: Any) -> None:
    code, out, err = run("register", "models/m")
    assert (code, out, server.asked) == (2, "", [])
    assert "--id" in err


def test_a_workflow_is_registered_by_its_file(run: Run, server: Any, tmp_path: Path) -> None:
    file, nodes = tmp_path / "poster.json", {"1": {"class_type": "SaveImage", "inputs": {}}}
    file.write_text(json.dumps(nodes))
    ports = {"inputs": {"prompt": "optional text", "seed": "optional int"}, "outputs": {"poster": "image"}}
    answer = {"id": "poster", "kind": "workflow", "state": "ready", **ports}
    server.answers["POST", "/admin/workflows"] = (201, answer)
    code, out, _ = run("register", str(file), "--id", "poster", "--description", "Posters")
    said = "poster is ready (pipeline); inputs: prompt (optional text), seed (optional int); outputs: poster (image)\n"
    assert (code, out) == (0, said)
    body = {"id": "poster", "workflow": nodes, "description": "Posters"}
    assert server.asked == [("POST", "/admin/workflows", body)]
    assert json.loads(run("register", str(file), "--id", "poster", "--json")[1])["kind"] == "workflow"
    file.write_text("{")
    code, _, error = run("register", str(file), "--id", "poster")
    assert (code, "is no JSON" in error) == (1, True)
    code, _, error = run("register", str(file), "--id", "poster", "--base", "m")
    assert (code, "--base" in error) == (2, True)


def test_unregister_names_the_adapters_that_lost_their_base(run: Run, server: Any) -> None:
    code, out, _ = run("unregister", "m", "--purge")
    assert (code, out) == (0, "m is served no more; adapters without it: a, b\n")
    assert server.asked == [("DELETE", "/admin/models/m?purge=true", None)]


@pytest.mark.parametrize("model", ["taken", "../x"])
def test_a_refusal_is_one_line(run: Run, model: str) -> None:
    code, out, err = run("unregister", model)
    assert (code, out, err) == (1, "", "error: m is in the [/red] cluster config\n")


def test_prefetch_says_who_could_not(run: Run, server: Any) -> None:
    code, out, _ = run("prefetch", "m", "--tier", "device")
    assert (code, out) == (1, "m is prefetched (2 of 3)\nworker 1: no room\n")
    assert server.asked == [("POST", "/admin/models/m/prefetch", {"tier": "device"})]
    assert run("prefetch", "m", "--tier", "disk")[0] == 2


def test_pin_and_unpin(run: Run, server: Any) -> None:
    assert run("pin", "m")[:2] == (0, "m is pinned (2 of 2)\n")
    assert run("unpin", "m")[:2] == (0, "m may be evicted (2 of 2)\n")
    assert [asked[:2] for asked in server.asked] == [
        ("POST", "/admin/models/m/pin"),
        ("DELETE", "/admin/models/m/pin"),
    ]


@pytest.mark.parametrize(
    "command", [["unregister", "m"], ["prefetch", "m"], ["pin", "m"], ["register", "/m", "--id", "m"]]
)
def test_json_is_one_object_and_nothing_else(run: Run, command: list[str]) -> None:
    _, out, err = run(*command, "--json")
    assert (isinstance(json.loads(out), dict), out.count("\n"), err) == (True, 1, "")


@pytest.mark.parametrize("options", [[], ["--wide"]])
def test_status_shows_what_is_where_and_why(run: Run, options: list[str]) -> None:
    code, out, _ = run("status", *options)
    assert code == 0
    (held, idle) = [line for line in out.splitlines() if "1.5 KiB" in line]
    more = ["  7 ", "2.0 KiB", "node 0123456789abcdef"] if options else []
    for word in ("m", "node 01234567", "pinned, worker-[1]", *more):
        assert word in held
    (built,) = [line for line in out.splitlines() if "worker-4db2180e  " in line]
    for word in ("m", "1.0 KiB", "pinned, 2 leases", "12.3 ms"):
        assert word in built
    assert "may go" in idle
    assert "unreachable: [/red] gone" in out
    assert "node 10.0.0.3 answers no HTTP: [/red] no program" in out
    assert "encoder is unreachable: the actor died" in out
    assert "worker-4db2180e: 4 modules, 100 B; 2 requests denoising" in out


def test_status_reads_well_at_80_columns(run: Run, server: Any) -> None:
    words = "Handwritten digits, 32 x 32 pixels, trained on scikit-learn's digits; shares its text encoders and its VAE"
    holders = [f"worker-{number:08x}" for number in range(4)] + ["encoder-0badcafe"]
    found = {"host_bytes": 2**34 - 1, "num_extents": 2, "pinned": True, "holders": holders, "hits": 12345}
    big = {"kind": "diffusion", "state": "unavailable", "nbytes": 2**35, "description": words, "error": "", "base": []}
    models = [
        {"id": f"digits-flux-inverted-{number}", **big, "resident": {"0123456789abcdef" * 3: found}, "built": []}
        for number in range(2)
    ]
    node = {"node_id": "0123456789abcdef" * 3, "num_extents": 12345, "read_s": 1.0}
    node |= {f"{name}_bytes": 2**38 for name in ("resident", "leased", "pinned", "budget", "read")}
    encoder = {"name": "y5dll3lg", "modules": [{}] * 12, "resident_bytes": 2**34}
    encoder["cache"] = {"entries": 10**6, "nbytes": 2**30, "local": 10**7, "joined": 1, "shared": 1, "computed": 10**6}
    answer = CLUSTER | {"models": models, "nodes": [node], "text_encoders": [encoder]}
    server.answers["GET", "/admin/cluster"] = (200, answer)
    _, out, _ = run("status")
    assert max(map(len, out.splitlines())) <= 80
    told = out.split()
    for word in [*words.split(), *(f"{holder}," for holder in holders[:-1]), holders[-1], "digits-flux-inverted-1"]:
        assert word in told, f"{word} is broken or missing"
    _, wide, _ = run("status", "--wide")
    assert any(words in line for line in wide.splitlines())
    assert any(", ".join(holders) in line for line in wide.splitlines())


def test_status_tells_of_programs_that_are_to_be_compiled(run: Run, server: Any) -> None:
    encoder = {"name": "y5dll3lg", "modules": [], "resident_bytes": 0, "cache": None}
    programs = {"graphs": 5, "compiled": 2, "compiling": 1, "not_compiled": {"0badcafe": "no C++ compiler"}}
    for found, told in (
        (programs, "no cache; programs: 2 compiled, 1 compiling, 0badcafe not compiled (no C++ compiler)"),
        (
            {"graphs": 5, "compiled": 0, "compiling": 0, "not_compiled": {}},
            "encoder-y5dll3lg: 0 modules, 0 B; no cache",
        ),
    ):
        answer = CLUSTER | {"text_encoders": [encoder | {"programs": found}]}
        server.answers["GET", "/admin/cluster"] = (200, answer)
        assert told in " ".join(run("status")[1].split())
    assert "programs:" not in run("status")[1]


def test_status_shows_the_ranks_of_a_worker_and_which_do_not_answer(run: Run, server: Any) -> None:
    worker = {"name": "w1", "modules": [], "resident_bytes": 0, "denoising": 2}
    first = {"rank": 0, "process": 7, "node": "cafe0123456789", "weights_bytes": 2**21, "sent_bytes": 5}
    processes = [first, {**first, "rank": 1, "process": 8, "sent_bytes": 4096}, {"rank": 2}]
    ranks = {"cfg": 1, "sequence": 1, "tensor": 3}
    for found, told in (
        ({}, "worker-w1: 0 modules, 0 B; 2 requests denoising"),
        ({"ranks": {**ranks, "processes": processes[:2]}}, "2 requests denoising; 2 ranks (tensor 3)"),
        ({"ranks": {**ranks, "cfg": 2, "processes": processes}}, "3 ranks (cfg 2, tensor 3), no answer of 2"),
    ):
        server.answers["GET", "/admin/cluster"] = (200, CLUSTER | {"workers": [worker | found]})
        assert told in " ".join(run("status")[1].split())
    server.answers["GET", "/admin/decisions"] = (200, {"enabled": False, "decisions": []})
    for words in (("status",), ("status", "--why")):
        rows = [line.split() for line in run(*words)[1].splitlines()]
        assert ["w1", "1", "cafe0123", "8", "2.0", "MiB", "4.0", "KiB"] in rows
        assert ["w1", "2", "no", "answer"] in rows
    found = json.loads(run("status", "--json")[1])["workers"][0]["ranks"]["processes"]
    assert found == processes


def test_status_says_what_it_leaves_out(run: Run, server: Any) -> None:
    assert "the first" not in run("status")[1]
    server.answers["GET", "/admin/cluster"] = (200, CLUSTER | {"num_models": 10_000, "num_nodes": 2})
    _, out, _ = run("status")
    assert "the first 2 of 10000 models; /admin/cluster lists the others, page by page" in out
    assert "nodes; /admin" not in out


def test_status_shows_who_waits_for_how_long_and_what_is_taken(run: Run, server: Any) -> None:
    assert "the admission queue does not answer" in run("status")[1]
    load = {"waiting": 17, "oldest_age_s": 2.34, "running": 4, "latency_s": 0.512, "started": 905, "refused": 33}
    idle = {"waiting": 0, "oldest_age_s": 0.0, "running": 0, "latency_s": 0.0, "started": 0, "refused": 0}
    replicas = [{"used": used, "is_gone": is_gone} for used, is_gone in ((0.75, False), (1.0, True), (1.0, False))]
    queue = {
        "models": [{"model": "painter"} | load, {"model": "writer"} | idle],
        "replicas": {"worker": replicas, "text_encoder": []},
    }
    server.answers["GET", "/admin/cluster"] = (200, CLUSTER | {"admission": queue})
    _, out, _ = run("status")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("painter", "writer"))}
    assert rows == {"painter": ["17", "2.3", "s", "4", "0.51", "s"], "writer": ["0", "0"]}
    assert "worker: 75%, 100% of the places taken" in out
    assert "text encoder: " not in out
    _, wide, _ = run("status", "--wide")
    (painter,) = [line.split() for line in wide.splitlines() if line.startswith("painter")]
    assert painter[-2:] == ["905", "33"]


def test_status_shows_the_templates_and_why_a_process_is_no_copy(run: Run, server: Any) -> None:
    assert "no templates: each of Ray's processes imports everything itself" in run("status")[1]
    templates = [
        {"name": "ray", "is_ready": True, "num_copies": 9},
        {"name": "worker", "is_ready": False, "num_copies": 1},
    ]
    found = {"templates": templates, "problems": ["no copy of template 'worker': it [/red] has ended"]}
    server.answers["GET", "/admin/cluster"] = (200, CLUSTER | {"templates": found})
    out = " ".join(run("status")[1].split())
    assert "processes that are copies of templates: 9 of ray; 1 of worker, which makes no more now" in out
    assert "a process was not forked from a template: no copy of template 'worker': it [/red] has ended" in out


def test_status_without_a_registry(run: Run, server: Any) -> None:
    server.answers["GET", "/admin/cluster"] = (200, CLUSTER | {"nodes": [], "registry": {"unreachable": "it died"}})
    code, out, _ = run("status")
    assert code == 0
    assert "the registry is unreachable: it died" in out


NOTHING_BY_HAND: dict[str, Any] = {"is_frozen": False, "frozen": [], "draining": [], "pins": {}}
DECISION = {"at_s": 0.0, "action": "switch", "worker": "w1", "model": "m", "evict": ["old"], "expected_s": 0.1}
DECISION |= {"took_s": 0.25, "state": "done", "reason": "2 wait without a [/red] worker"}
WORKER = {"name": "w1", "models": ["m"], "running": {"m": 3}, "switching_to": None}
WORKER |= {"resident_bytes": 1024, "budget_bytes": 2048}
DECISIONS = {
    "enabled": True,
    "policy": "latency-first",
    "age_s": 0.04,
    "overrides": NOTHING_BY_HAND | {"draining": ["w2"], "pins": {"w1": ["m", "a"]}},
    "decisions": [DECISION, DECISION | {"state": "failed: tensor t is missing", "took_s": None}],
    "backoffs": {"bad": {"retry_in_s": 4.0, "error": "tensor t is missing"}},
    "notes": ["huge: 9 bytes fit into no worker's budget"],
    "free": {"tiny": "a switch takes no time"},
    "workers": [WORKER],
}


def test_status_tells_why(run: Run, server: Any) -> None:
    server.answers["GET", "/admin/decisions"] = (200, DECISIONS)
    code, out, _ = run("status", "--why", "--wide")
    assert code == 0
    for text in (
        "latency-first, the last plan is 0.0 s old",
        "worker w2 drains (`atelier undrain w2`)",
        "worker w1 keeps a, m",
        "3 m",
        "250 ms",
        "2 wait without a [/red] worker\n",
        "(failed: tensor t is missing)",
        "bad is tried again in 4.0 s: tensor t is missing",
        "fit into no worker's budget",
        "tiny needs no order: a switch takes no time",
    ):
        assert text in out, out
    assert json.loads(run("status", "--why", "--json")[1]) == DECISIONS
    server.answers["GET", "/admin/decisions"] = (200, {"enabled": False, "decisions": []})
    assert "the controller is off" in run("status", "--why")[1]


def test_workers_are_ordered_by_hand(run: Run, server: Any) -> None:
    frozen = NOTHING_BY_HAND | {"is_frozen": True}
    server.answers |= {
        ("POST", "/admin/freeze"): (200, frozen),
        ("DELETE", "/admin/workers/w%2F1/freeze"): (200, NOTHING_BY_HAND),
        ("POST", "/admin/workers/w1/drain"): (200, NOTHING_BY_HAND | {"draining": ["w1"]}),
        ("DELETE", "/admin/workers/w1/drain"): (200, NOTHING_BY_HAND),
        ("POST", "/admin/workers/w1/models/m/pin"): (200, NOTHING_BY_HAND),
        ("DELETE", "/admin/workers/w1/models/m/pin"): (409, CONFLICT),
    }
    assert run("freeze")[:2] == (0, "frozen: no switches are ordered (`atelier thaw`)\n")
    assert json.loads(run("freeze", "--json")[1]) == frozen
    assert run("thaw", "w/1")[:2] == (0, "nothing is ordered by hand\n")
    assert run("drain", "w1")[:2] == (0, "worker w1 drains (`atelier undrain w1`)\n")
    assert run("undrain", "w1")[0] == 0
    assert run("pin", "m", "--worker", "w1")[:2] == (0, "m is pinned to worker w1\n")
    assert run("unpin", "m", "--worker", "w1") == (1, "", "error: m is in the [/red] cluster config\n")
    assert run("drain")[0] == 2


def test_a_node_is_drained_until_nothing_runs_there(run: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [WORKER | {"name": name, "address": address} for name, address in (("w1", "10.0.0.7"), ("w2", "10.0.0.8"))]
    server.answers |= {
        ("GET", "/admin/decisions"): (200, DECISIONS | {"workers": busy}),
        ("POST", "/admin/workers/w1/drain"): (200, NOTHING_BY_HAND | {"draining": ["w1"]}),
    }

    def finish(seconds: float) -> None:
        server.answers["GET", "/admin/decisions"] = (
            200,
            DECISIONS | {"workers": [one | {"running": {}} for one in busy]},
        )

    code, _, problem = run("drain", "--node", "10.0.0.7", "--timeout", "0")
    assert (code, problem) == (1, "error: requests still run after 0 s: 3 on worker w1\n")
    monkeypatch.setattr("deployments.cli.orders.time.sleep", finish)
    assert run("drain", "--node", "10.0.0.7")[:2] == (0, "nothing runs on node 10.0.0.7: w1\n")
    assert json.loads(run("drain", "--node", "10.0.0.7", "--json")[1]) == {"node": "10.0.0.7", "drained": ["w1"]}
    assert run("drain", "--node", "10.0.0.9")[2] == (
        "error: no worker is on node '10.0.0.9' (nodes with workers: 10.0.0.7, 10.0.0.8)\n"
    )
    assert run("drain", "--node", "here")[:2] == (0, "nothing runs on node here: no worker is there\n")
    own = {"eth0": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr("deployments.cli.orders.psutil.net_if_addrs", lambda: own)
    assert run("drain", "--node", "here")[:2] == (0, "nothing runs on node here: w1\n")
    assert run("drain", "w1", "--node", "here")[0] == 2
