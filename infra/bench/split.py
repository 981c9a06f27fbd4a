"""`infra.bench split`: a language model on a device with room for half of it, beside accelerate's `device_map`.

On a simulated device, in a process of its own, because simulating one patches torch. The host computes for the device,
so a second says nothing of a card. What goes over the link for a token is what it is anywhere, and processor time says
what each does on the host: accelerate copies the weights of the other half for each token, and here the host multiplies
them where they lie.
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
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

SHARE: Final = 0.5  # of the weights and the KV cache
_KV_BYTES: Final = 2**22
_PROMPT: Final = tuple(range(2, 34))
_NUM_TOKENS: Final = 24
_NUM_LAYERS: Final = 12
_VOCABULARY: Final = 4096
_Token = tuple[int, float, int]  # the token, seconds of processor time, and bytes over the link for it


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
    """Print what `measure_split` found."""
    table = Table(
        "way", "bytes over the link per token", "processor ms per token", title="decode at half of its device"
    )
    for row in rows:
        table.add_row(row["way"], f"{row['link_bytes']:,.0f}", f"{row['cpu_ms']:.2f}")
    Console().print(table)


async def _measure(hidden_size: int) -> list[dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from configs.simulated import SimulatedConfig
    from weights.memory.simulated import simulate

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
    if [one for (one, _, _), _ in pairs] != [one for _, (one, _, _) in pairs]:
        raise RuntimeError("the two write other tokens")
    names = "Atelier", "accelerate, device_map"
    return [
        {
            "way": name,
            "link_bytes": statistics.median(pair[way][2] for pair in pairs),
            "cpu_ms": 1e3 * min(pair[way][1] for pair in pairs),
        }
        for way, name in enumerate(names)
    ]


async def _open(folder: Path) -> Any:
    """Return an engine on a device with room for SHARE of it, as a worker opens it."""
    from configs.cluster import WorkerConfig
    from deployments.modules.cache import ComponentFactory, ModuleBudget, ModuleCache
    from deployments.modules.loading import ComponentBuilder, is_denoise_component
    from infra.bench.llm_files import write_tokenizer
    from weights.intake import import_model
    from weights.provider import LocalExtents
    from weights.store import WeightStore

    class Extents(LocalExtents):
        def release(self, extents: Sequence[Any]) -> None: ...
        def prefetch(self, extents: Sequence[Any]) -> None: ...

    write_tokenizer(folder / "model", _VOCABULARY)
    store = WeightStore(folder / "store")
    import_model(store, "bench", folder / "model")
    manifest = store.manifest("bench")
    budget_bytes = int(SHARE * (manifest.components["model"].nbytes + _KV_BYTES))
    settings = WorkerConfig(device="sim:0", device_budget_bytes=budget_bytes, kv_cache_bytes=_KV_BYTES, num_threads=1)

    async def fetch_manifest(model: str, version: str | None) -> Any:
        return manifest

    builder = ComponentBuilder(settings)
    factory = ComponentFactory(builder, working_memory=builder.working_memory, layer_caches=builder.layer_caches)
    cache = ModuleCache(
        fetch_manifest, Extents(store.packs), store.models, ModuleBudget.of(settings, "worker"), factory
    )
    async with cache.lease("bench", is_denoise_component) as lease:
        return lease.modules["model"]


def _tokens_of_ours(link: Any, engine: Any) -> Iterator[_Token]:
    from deployments.engines.protocol import SamplingParams, TextRequest

    engine.add_request(TextRequest("one", _PROMPT, SamplingParams(_NUM_TOKENS, 0.0, ignore_eos=True)))
    while engine.has_work:
        link.reset_link()
        begin_s = time.process_time()
        (delta,) = engine.step()
        cpu_s = time.process_time() - begin_s
        yield delta.token_ids[0], cpu_s, link.uploaded_bytes + link.downloaded_bytes


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
        cpu_s = time.process_time() - begin_s
        yield int(ids), cpu_s, link.uploaded_bytes + link.downloaded_bytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(asyncio.run(_measure(int(sys.argv[1])))) + "\n")
