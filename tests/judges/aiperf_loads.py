"""A short load of one endpoint by NVIDIA's aiperf; what it says of it is the observation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from observing import Place, place, write

NUM_REQUESTS = 10
SUMS = [f"What is {number} + 7?" for number in range(NUM_REQUESTS)]
CAPTIONS = [f"a handwritten {word}" for word in ("zero", "one", "two", "three", "four", "five", "six", "seven")]
LOADS: dict[str, tuple[list[str], list[str]]] = {
    "chat_stream": (SUMS, ["-m", "adder", "--endpoint-type", "chat", "--streaming"]),
    "embeddings": (CAPTIONS, ["-m", "minilm", "--endpoint-type", "embeddings"]),
    "images": (
        CAPTIONS,
        [
            *("-m", "digits-flux", "--endpoint-type", "image-generation"),
            *("--extra-inputs", '{"size": "32x32", "num_inference_steps": 4}'),
        ],
    ),
}


def load(where: Place, name: str) -> dict[str, Any]:
    prompts, options = LOADS[name]
    folder = where.folder / f"aiperf_{name}"
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile", "--url", where.url, *options),
        *("--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--workers-max", "1", "--record-processors", "1"),
        # A folder, so nothing is fetched; the server's own counts are what is reported.
        *("--tokenizer", where.asked["tokenizer"], "--use-server-token-count"),
        *("--artifact-dir", str(folder), "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry"),
    ]
    # An address where nobody listens: whoever wants the hub fails at once.
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    exported = folder / "profile_export_aiperf.json"
    if not exported.exists():
        raise RuntimeError(f"aiperf ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    found = json.loads(exported.read_text())
    counts = {key: found.get(key, {}).get("avg", 0) for key in ("request_count", "error_request_count")}
    figures = {
        key: found[key]["avg"]
        for key in ("request_latency", "time_to_first_token", "output_token_count")
        if key in found
    }
    return counts | figures | {key: found[key] for key in ("error_summary", "is_complete", "was_cancelled")}


def observations(where: Place) -> Iterator[tuple[str, Callable[[], Any]]]:
    name = where.asked["load"]
    yield name, lambda: load(where, name)


if __name__ == "__main__":
    here = place()
    write(here, observations(here))
