"""Clusters from outside: the command line, `serve run`, the demo. Each test leaves the machine as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import yaml
from kit.waiting import wait_until

from infra.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DEMO = ROOT / "configs/clusters/demo.yaml"
START_TIMEOUT_S = 180.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Records and logs of clusters go to a folder of the test's own."""
    folders = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    return os.environ | folders | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """One language model: the fastest cluster there is."""
    config = {
        "name": "small",
        "http": {"port": free_port()},
        "ray": {"num_cpus": 4, "object_store_bytes": "256 MiB"},
        "store": {"path": str(tmp_path / "store")},
        "models": [{"id": "adder", "path": str(ROOT / "infra/demo/models/adder"), "dtype": "float32"}],
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(autouse=True)
def machine_stays_clean() -> Iterator[None]:
    """No process of Ray and no shared memory file is left behind."""
    before = shared_memory_files()
    yield
    wait_until(lambda: not ray_processes(), "the end of Ray's processes", START_TIMEOUT_S)
    # Waited for: the files of tests that run beside this one come and go.
    wait_until(lambda: shared_memory_files() <= before, "the end of its files in shared memory", START_TIMEOUT_S)


def test_up_talk_down(environment: dict[str, str], small_config: Path) -> None:
    """With the demo's models, which answer right."""
    port = str(yaml.safe_load(small_config.read_text())["http"]["port"])
    up = atelier("up", str(DEMO), "--port", port, "--detach", env=environment)
    assert up.returncode == 0, up.stderr
    assert "is up at http://127.0.0.1:" in up.stdout
    with ThreadPoolExecutor(3) as pool:  # most of a command is the start of its process

        def begin(*arguments: str) -> Future[subprocess.CompletedProcess[str]]:
            return pool.submit(atelier, *arguments, env=environment)

        listed, chat = begin("models", "--json"), begin("chat", "What is 12 + 7?")
        again = begin("up", str(DEMO), "--port", port)
        refused = {
            "no model 'nope' (known: ": begin("generate", "x", "-m", "nope"),
            "cluster 'demo' is already up": begin("up", str(DEMO), "--port", str(free_port())),
            "cannot listen on 127.0.0.1:": begin("up", str(small_config)),
        }
    models = json.loads(listed.result().stdout)["models"]
    assert ("adder", "ready") in [(model["id"], model["state"]) for model in models]
    assert chat.result().stdout.strip() == "19."
    assert (again.result().returncode, "is already up at" in again.result().stdout) == (0, True), again.result().stderr
    assert "digits-flux-inverted" in again.result().stdout
    for reason, command in refused.items():
        assert command.result().returncode == 1
        assert reason in command.result().stderr
    assert " modules" in atelier("status", env=environment).stdout
    asking = [sys.executable, "infra/demo/run_demo.py", "--url", f"http://127.0.0.1:{port}"]
    asked = subprocess.run(
        asking, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    assert asked.returncode == 0, asked.stdout
    assert "WRONG" not in asked.stdout
    for name in ("digits", "digits-inverted", "digits-bold", "digits-sdxl"):
        assert (ROOT / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")
    down = atelier("down", env=environment)
    assert (down.returncode, down.stdout.strip()) == (0, "cluster 'demo' is down"), down.stderr
    gone = atelier("status", env=environment)
    assert gone.returncode == 1
    assert "no answer from" in gone.stderr


@pytest.mark.long
def test_two_clusters_are_up_at_once_each_on_a_ray_of_its_own(environment: dict[str, str], small_config: Path) -> None:
    up = atelier("up", str(small_config), "--detach", env=environment)
    assert up.returncode == 0, up.stderr
    other, port = small_config.with_name("other.yaml"), free_port()
    other.write_text(small_config.read_text().replace("name: small", "name: other"))
    try:
        beside = atelier("up", str(other), "--port", str(port), "--detach", env=environment)
        assert beside.returncode == 0, beside.stderr
        asked = atelier("chat", "What is 12 + 8?", "--url", f"http://127.0.0.1:{port}", env=environment)
        assert asked.stdout.strip() == "20."
        down = atelier("down", "other", env=environment)
        assert (down.returncode, down.stdout.strip()) == (0, "cluster 'other' is down"), down.stderr
        assert atelier("chat", "What is 12 + 7?", env=environment).stdout.strip() == "19."
    finally:
        assert atelier("down", "small", env=environment).returncode == 0


@pytest.mark.long
def test_a_cluster_with_keys_asks_everybody_for_one(
    environment: dict[str, str], small_config: Path, tmp_path: Path
) -> None:
    """Through the door that `up` starts, and with a key that is made and revoked while it is up."""
    keys = str(tmp_path / "keys")
    tmp_path.chmod(0o700)
    config = yaml.safe_load(small_config.read_text()) | {"access": {"keys_file": keys}}
    config["grpc"] = {"port": free_port()}
    small_config.write_text(yaml.safe_dump(config))
    refused = atelier("up", str(small_config), env=environment)
    assert refused.returncode == 2
    assert "No such file" in refused.stderr

    def add(*options: str) -> dict[str, str]:
        done = atelier("keys", "add", *options, "--config", str(small_config), env=environment)
        return environment | {"ATELIER_API_KEY": done.stdout.strip()}

    admin = add("root", "--admin")
    up = atelier("up", str(small_config), "--detach", env=environment)
    assert up.returncode == 0, up.stderr
    try:
        nobody = atelier("models", env=environment)
        assert (nobody.returncode, nobody.stdout) == (1, "")
        assert "no API key" in nobody.stderr
        user = add("alice")
        assert atelier("chat", "What is 12 + 7?", env=user).stdout.strip() == "19."
        assert "needs an admin key" in atelier("status", env=user).stderr
        assert "1 modules" in atelier("status", env=admin).stdout
        url = f"http://127.0.0.1:{config['http']['port']}"
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        with grpc.insecure_channel(f"127.0.0.1:{config['grpc']['port']}") as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
            assert ask(b"", metadata=[("x-api-key", user["ATELIER_API_KEY"])], timeout=10)
            atelier("keys", "revoke", "alice", "--config", str(small_config), env=environment)
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                ask(b"", metadata=[("x-api-key", user["ATELIER_API_KEY"])], timeout=10)
        assert "does not hold" in atelier("chat", "x", env=user).stderr
    finally:
        assert atelier("down", env=environment).returncode == 0


@pytest.mark.long
def test_serve_run_works_as_well(environment: dict[str, str], small_config: Path) -> None:
    """Plain Ray Serve: its own command, its own port."""
    command = [BIN / "serve", "run", "deployments.app:build_app", f"config={small_config}"]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=listen_to_ctrl_c,
        )
        stack.callback(process.kill)  # only matters when it does not end by itself, which the next line reports
        stack.callback(process.wait, 60)
        stack.callback(process.send_signal, signal.SIGINT)
        wait_until(
            lambda: healthy("http://127.0.0.1:8000") or process.poll() is not None, "the application", START_TIMEOUT_S
        )
        body = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
        answer = httpx.post("http://127.0.0.1:8000/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "19."


@pytest.mark.long
def test_serves_own_proxy_leaves_deadlines_to_the_ingress(environment: dict[str, str], small_config: Path) -> None:
    """Serve's proxy reads the same header, and would answer in plain text, with another status."""
    config = yaml.safe_load(small_config.read_text())
    config["http"]["proxy"] = "serve"
    small_config.write_text(yaml.safe_dump(config))
    up = atelier("up", str(small_config), "--detach", env=environment)
    assert up.returncode == 0, up.stderr
    try:
        body = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
        long = body | {"max_tokens": 450, "ignore_eos": True}
        with httpx.Client(base_url=f"http://127.0.0.1:{config['http']['port']}/v1", timeout=60) as http:
            answer = http.post("/chat/completions", json=body, headers={"x-request-timeout-seconds": "30"})
            assert answer.json()["choices"][0]["message"]["content"] == "19."
            whole_s = http.post("/chat/completions", json=long).json()["timings_ms"]["total"] / 1000
            for timeout_s in (1e-6, whole_s / 8, whole_s / 3):
                headers = {"x-request-timeout-seconds": f"{timeout_s:.6f}"}
                late = http.post("/chat/completions", json=long, headers=headers)
                assert late.status_code in (429, 504), late.text  # 429: the queue knows by now how long it would take
                assert set(late.json()["error"]) == {"message", "type", "param", "code"}
    finally:
        assert atelier("down", env=environment).returncode == 0


@pytest.mark.long  # as tests/unit/deployments/cli/test_main.py says of each command, in one process
def test_a_typo_in_the_config_is_one_readable_line(environment: dict[str, str], small_config: Path) -> None:
    small_config.write_text(small_config.read_text().replace("object_store_bytes", "object_store_byte"))
    result = atelier("up", str(small_config), env=environment)
    assert result.returncode == 2
    line = next(n for n, text in enumerate(small_config.read_text().splitlines(), 1) if "object_store_byte" in text)
    assert (
        f"{small_config}:{line}: ray.object_store_byte: unknown key; did you mean 'object_store_bytes'?"
        in result.stderr
    )
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.long  # as tests/unit/deployments/cli/test_main.py says of it, in one process
def test_generate_without_a_cluster(environment: dict[str, str], tmp_path: Path) -> None:
    image = tmp_path / "seven.png"
    result = atelier(
        "generate", "a handwritten seven", "--local", "--steps", "2", "--seed", "1", "--json", "-o", str(image),
        env=environment, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["files"] == [str(image)]
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long  # `up` asks the same of the same models above
def test_the_demo_answers_right_and_ends_with_ctrl_c(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "infra/demo/run_demo.py", "--port", str(free_port())],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=listen_to_ctrl_c,
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))  # type: ignore[arg-type]
    reader.start()
    wait_until(
        lambda: any("until Ctrl-C" in line for line in lines) or process.poll() is not None,
        "the table",
        START_TIMEOUT_S,
    )
    assert process.poll() is None, "".join(lines)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    reader.join(10)
    assert not [line for line in lines if "WRONG" in line or "Traceback" in line]
    for name in ("digits", "digits-inverted", "digits-bold", "digits-sdxl"):
        assert (ROOT / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")


def listen_to_ctrl_c() -> None:
    """In a child: a test run in the background has SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def atelier(*arguments: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "atelier"), *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=START_TIMEOUT_S
    )


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        return httpx.get(f"{url}/healthz", timeout=5).json().get("status") in ("ok", "degraded")
    return False


def ray_processes() -> list[str]:
    names = ("gcs_server", "raylet")
    return [process.info["name"] for process in psutil.process_iter(["name"]) if process.info["name"] in names]


def shared_memory_files() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir() if file.is_file()}  # folders are those of tests
