"""Count the product's files that an image request with a cache miss passes, on the demo cluster.

`python infra/request_path.py` starts the demo cluster with a profiler in every Python process, lets each model answer
once, records what runs with no request (heartbeats, metrics), and then what runs from a request's first byte to its
last. The difference is printed by process: files in the order in which they were entered, with their functions.
Coroutines that another file or process awaits are marked with *: they are the way of the request, which is inside of
them while it waits. Threads that Python did not start are not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "weights", "cluster", "deployments")
PORT = 18300
START_S = 300
BACKGROUND_S = 6.0
SETTLE_S = 0.5  # hooks look for the flag every 20 ms
# Runs at the start of every Python process. Functions are recorded while the flag file is there.
HOOK = """
import inspect, json, os, sys, threading, time
folder = os.environ["REQUEST_PATH"]
roots = tuple(os.path.join(os.environ["REQUEST_PATH_ROOT"], each) + os.sep for each in PACKAGES)
armed, first = "", {}

def profile(frame, event, argument):
    if armed and event == "call":
        code = frame.f_code
        if code.co_filename.startswith(roots) and code.co_name != "<module>":
            key = (armed, code.co_filename, code.co_qualname)
            if key not in first:
                first[key] = time.time(), is_entered(frame)

def is_entered(frame):
    code, back = frame.f_code, frame.f_back
    while back and not back.f_code.co_filename.startswith(roots):
        back = back.f_back
    if not code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    if back is None:  # begun by another process, or a task of its own file, which alone knows functions in functions
        is_own = code.co_name.startswith("_") or "<locals>" in code.co_qualname
        return code.co_name == "__call__" or not is_own
    return back.f_code.co_filename != code.co_filename

def watch():
    global armed
    flag = os.path.join(folder, "flag")
    while True:
        try:
            with open(flag) as file:
                armed = file.read()
        except OSError:
            if armed:
                armed = ""
                path = os.path.join(folder, f"{os.getpid()}.json")
                with open("/proc/self/cmdline") as file:
                    title = file.read().replace("\\0", " ").strip()[:80]
                with open(path + ".new", "w") as file:
                    json.dump({"title": title, "calls": [[*key, *found] for key, found in first.items()]}, file)
                os.replace(path + ".new", path)
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
""".replace("PACKAGES", repr(PACKAGES))


def main() -> None:
    """Start the cluster, ask, print; end the cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/clusters/demo.yaml")
    parser.add_argument("--warm", default="digits-flux", help="model that is asked before")
    parser.add_argument("--model", default="digits-sdxl", help="model of the request that is counted")
    parser.add_argument("--json", type=Path, help="write (process, file, function) here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="request-path-") as name:
        folder = Path(name)
        with cluster(folder, arguments.config):
            for model in (arguments.warm, arguments.model, arguments.warm):
                draw(model, f"a handwritten {model}")
            with recording(folder, "background"):
                time.sleep(BACKGROUND_S)
            with recording(folder, "request"):
                draw(arguments.model, "a handwritten nine that nobody asked for before")
            time.sleep(2 * SETTLE_S)
            functions = read_recordings(folder)
    report(functions)
    if arguments.json:
        arguments.json.write_text(json.dumps(functions, indent=1))


@contextmanager
def cluster(folder: Path, config: Path) -> Iterator[None]:
    """Run a cluster of this config with the hook in its processes; its store is in `folder`."""
    (folder / "hook").mkdir()
    (folder / "hook/sitecustomize.py").write_text(HOOK)
    values = yaml.safe_load(config.read_text().replace("../../", f"{ROOT}/"))
    values |= {"name": "request-path", "store": {"path": str(folder / "store")}}
    values["ray"] = values.get("ray", {}) | {"templates": False}  # copies would not have the hook's thread
    values["http"] = {"host": "127.0.0.1", "port": PORT}
    values["grpc"] = {"host": "127.0.0.1", "port": PORT + 1}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'hook'}:{ROOT}",
        "REQUEST_PATH": str(folder),
        "REQUEST_PATH_ROOT": str(ROOT),
    }
    command = [
        sys.executable,
        "-c",
        "from deployments.cli.main import main; main()",
        "up",
        str(folder / "cluster.yaml"),
    ]
    process = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("The cluster did not start.")
            time.sleep(1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _is_ready() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/v2/health/ready", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def draw(model: str, prompt: str) -> None:
    """Ask for one image, through HTTP."""
    body = {"model": model, "prompt": prompt, "seed": 7}
    url = f"http://127.0.0.1:{PORT}/v1/images/generations"
    httpx.post(url, json=body, timeout=120, trust_env=False).raise_for_status()


@contextmanager
def recording(folder: Path, label: str) -> Iterator[None]:
    """Record what runs in all processes under this label."""
    (folder / "flag.new").write_text(label)
    (folder / "flag.new").rename(folder / "flag")
    time.sleep(SETTLE_S)
    yield
    (folder / "flag").unlink()
    time.sleep(SETTLE_S)


def read_recordings(folder: Path) -> list[tuple[str, str, str]]:
    """Return (process, file, function) of the request, in order of first call, without what runs in the background.

    Functions on the way of the request end in *.
    """
    calls, background = [], set()
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        for label, file, function, at, is_entered in content["calls"]:
            name = str(Path(file).relative_to(ROOT))
            if label == "background":
                background.add((name, function))
            else:
                calls.append((at, f"{content['title'] or 'python'} ({path.stem})", name, function, is_entered))
    return [
        (title, file, function + "*" * is_entered)
        for _, title, file, function, is_entered in sorted(calls)
        if (file, function) not in background
    ]


def report(functions: list[tuple[str, str, str]]) -> None:
    """Print files and functions by process, and the counts."""
    for process in dict.fromkeys(title for title, _, _ in functions):
        print(f"\n{process}")
        for file in dict.fromkeys(file for title, file, _ in functions if title == process):
            names = [function for title, name, function in functions if (title, name) == (process, file)]
            print(f"  {file}: {', '.join(names)}")
    by_package = Counter(file.split("/")[0] for file in {file for _, file, _ in functions})
    packages = ", ".join(f"{package} {number}" for package, number in sorted(by_package.items()))
    processes = len({title for title, _, _ in functions})
    number = len({(file, function.rstrip("*")) for _, file, function in functions})
    way = {(file, function) for _, file, function in functions if function.endswith("*")}
    print(f"\n{sum(by_package.values())} files ({packages}), {number} functions, {processes} processes")
    print(f"on the way: {len({file for file, _ in way})} files, {len(way)} calls from file to file or process")


if __name__ == "__main__":
    main()
