"""`infra.bench split`: a language model on a device with room for half of it, beside accelerate's `device_map`.

On a simulated device, in a process of its own, because simulating one patches torch. What goes over the link for a
token is what it is anywhere: accelerate copies the weights of the other half, and here the host multiplies them where
they lie. Tokens per second are those of a simulated link: processor time, and what the transfers of a token take longer
at that rate than the host took to copy; once with the device's kernels, which the host computes here, and once as if
they took no time. All is processor time of one thread, so other work on the machine changes little.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

SHARE: Final = 0.5  # of the weights and the KV cache
_KV_BYTES: Final = 2**22
_PROMPT: Final = tuple(range(2, 34))
_NUM_TOKENS: Final = 24
_NUM_LAYERS: Final = 12
_VOCABULARY: Final = 4096
LINKS_GBPS: Final = (12.0, 1.0)  # PCIe 3 x16; as slow beside one thread as PCIe is beside the memory of a server


class _Token(NamedTuple):
    """A token, and what it took: processor time, that of its copies and of the device's kernels, and bytes moved."""

    number: int
    cpu_s: float
    copies_s: float
    kernels_s: float
    link_bytes: int

    def seconds(self, link_gbps: float, *, with_kernels: bool) -> float:
        """Return the seconds over a link of that rate, without overlap of transfers."""
        waiting_s = max(0.0, self.link_bytes / (link_gbps * 1e9) - self.copies_s)
        return self.cpu_s + waiting_s - (0.0 if with_kernels else self.kernels_s)


def measure_split(hidden_size: int = 768) -> list[dict[str, Any]]:
    """Measure in another process, on one thread, a decoder of that width; returns a row for each way.

    Raises RuntimeError when that fails, or the two ways write other tokens.
    """
    command = [sys.executable, "-m", "infra.bench.split", str(hidden_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_split(rows: Sequence[dict[str, Any]]) -> None:
    """Print the figures of `measure_split`."""
    speeds = list(rows[0]["tokens_per_s"])
    table = Table("way", "link bytes per token", "CPU ms", "kernels", *speeds, title="decode at half of its device")
    for row in rows:
        own = (f"{row['link_bytes']:,.0f}", f"{row['cpu_ms']:.2f}", f"{row['kernels_ms']:.2f}")
        table.add_row(row["way"], *own, *(f"{row['tokens_per_s'][name]:.1f}" for name in speeds))
    Console(width=180).print(table)


async def _measure(hidden_size: int) -> list[dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from configs.simulated import SimulatedConfig
    from infra.sim import simulate

    link = simulate(SimulatedConfig(memory_bytes=2**30)).memory_of()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="bench-split-") as folder:
        config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 8 // 3,
            num_hidden_layers=_NUM_LAYERS,
            num_attention_heads=12,
            num_key_value_heads=4,
            bos_token_id=None,
            eos_token_id=None,
        )
        stock: Any = LlamaForCausalLM(config).eval()
        stock.save_pretrained(Path(folder) / "model")
        ours = _tokens_of_ours(link, await _open(Path(folder)))
        peers = _tokens_of_accelerate(link, stock)
        pairs = list(zip(ours, peers, strict=True))[1:]  # the first are the prompt's
    if any(one.number != other.number for one, other in pairs):
        raise RuntimeError("the two write other tokens")
    names = "Atelier", "accelerate, device_map"
    return [_row(name, [pair[way] for pair in pairs]) for way, name in enumerate(names)]


def _row(name: str, tokens: Sequence[_Token]) -> dict[str, Any]:
    """Return the cost of a way's tokens: the median bytes, and the least times."""

    def fastest(gbps: float, *, with_kernels: bool) -> float:
        return 1 / min(token.seconds(gbps, with_kernels=with_kernels) for token in tokens)

    speeds = {f"tokens/s at {gbps:g} GB/s": fastest(gbps, with_kernels=True) for gbps in LINKS_GBPS}
    speeds |= {f"{gbps:g} GB/s, no kernels": fastest(gbps, with_kernels=False) for gbps in LINKS_GBPS}
    return {
        "way": name,
        "link_bytes": statistics.median(token.link_bytes for token in tokens),
        "cpu_ms": 1e3 * min(token.cpu_s for token in tokens),
        "kernels_ms": 1e3 * min(token.kernels_s for token in tokens),
        "tokens_per_s": speeds,
    }


async def _open(folder: Path) -> Any:
    """Return an engine on a device with room for SHARE of it, as a worker opens it."""
    from configs.cluster import WorkerConfig
    from deployments.modules.budget import ModuleBudget
    from deployments.modules.cache import ModuleCache
    from deployments.modules.loading import ComponentBuilder, is_denoise_component
    from infra.bench.llm_files import write_tokenizer
    from weights.loading.provider import LocalExtents
    from weights.operations.intake import import_model
    from weights.storage.store import WeightStore

    class Extents(LocalExtents):
        def release(self, extents: Sequence[Any]) -> None: ...
        def prefetch(self, extents: Sequence[Any]) -> None: ...

    class Builder(ComponentBuilder):
        def streams_layers(self, component: Any) -> bool:
            """Say no, as over the links of LINKS_GBPS: a copy to the simulated device is one within memory."""
            return False

    write_tokenizer(folder / "model", _VOCABULARY)
    store = WeightStore(folder / "store")
    import_model(store, "bench", folder / "model")
    manifest = store.manifest("bench")
    budget_bytes = int(SHARE * (manifest.components["model"].nbytes + _KV_BYTES))
    settings = WorkerConfig(device="sim:0", device_budget_bytes=budget_bytes, kv_cache_bytes=_KV_BYTES, num_threads=1)

    async def fetch_manifest(model: str, version: str | None) -> Any:
        return manifest

    builder = Builder(settings)
    cache = ModuleCache(
        fetch_manifest, Extents(store.packs), store.models, ModuleBudget.of(settings, "worker"), builder
    )
    async with cache.lease("bench", is_denoise_component) as lease:
        return lease.modules["model"]


def _tokens_of_ours(link: Any, engine: Any) -> Iterator[_Token]:
    from deployments.engines.records.protocol import SamplingParams, TextRequest

    engine.add_request(TextRequest("one", _PROMPT, SamplingParams(_NUM_TOKENS, 0.0, ignore_eos=True)))
    while engine.has_work:
        link.reset_link()
        begin_s = time.process_time()
        (delta,) = engine.step()
        yield _counted(delta.token_ids[0], link, time.process_time() - begin_s)


@torch.inference_mode()
def _tokens_of_accelerate(link: Any, model: Any) -> Iterator[_Token]:
    """The first layers are on the device, as `device_map="auto"` has it, and as many of them as there."""
    from accelerate import dispatch_model

    num_layers = round(SHARE * _NUM_LAYERS)
    places: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "sim:0")
    places |= {f"model.layers.{n}": "sim:0" if n < num_layers else "cpu" for n in range(_NUM_LAYERS)}
    dispatch_model(model, places, main_device="sim:0", force_hooks=True)
    ids, past = torch.tensor([_PROMPT]), None
    for _ in range(_NUM_TOKENS):
        link.reset_link()
        begin_s = time.process_time()
        found = model(ids.to("sim:0"), past_key_values=past, use_cache=True)
        past = found.past_key_values
        ids = found.logits[:, -1].argmax(-1, keepdim=True).cpu()
        yield _counted(int(ids), link, time.process_time() - begin_s)


def _counted(token: int, link: Any, cpu_s: float) -> _Token:
    return _Token(token, cpu_s, link.copied_s, link.computed_s, link.uploaded_bytes + link.downloaded_bytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(asyncio.run(_measure(int(sys.argv[1])))) + "\n")
