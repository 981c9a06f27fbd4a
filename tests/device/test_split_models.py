"""Language models larger than their device: the last layers are there, the others on the host."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from device.hosting import DEMO, Host
from device.test_device_engines import generated
from device.test_device_hosts import settles
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from configs.cluster import WorkerConfig
from deployments.engines.llm import native_decoder, split_layers
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.nn import packed_linear
from deployments.engines.protocol import SamplingParams, TextLora, TextRequest
from deployments.errors import ServiceError
from deployments.modules import loading
from deployments.modules.loading import is_denoise_component
from weights.errors import BudgetExceeded, WeightsError
from weights.intake import import_model
from weights.memory.block_plan import Rates
from weights.memory.layer_plan import LayerPlan, decoder_sizes, layer_of, plan_layers
from weights.quantization.checkpoints import quantize_checkpoint
from weights.store import WeightStore

CACHE = 2**18
NUM_LAYERS = 6
SIZES = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
QUESTIONS = [f"What is {n} + {random.randrange(100)}?" for n in random.sample(range(100), 5)]


def make_model(folder: Path, config: Any, dtype: torch.dtype) -> Path:
    shutil.copytree(DEMO / "adder", folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(random.getrandbits(30))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(f"{folder}-lora")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    root = tmp_path_factory.mktemp("split")
    made = {
        "plain": make_model(root / "plain", LlamaConfig(**SIZES), torch.float32),
        "tied": make_model(root / "tied", Qwen3Config(**SIZES, tie_word_embeddings=True), torch.bfloat16),
    }
    quantize_checkpoint(made["plain"], root / "packed.gguf", "gguf-q8_0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        found = WeightStore(root / "store")
        for name, path in {**made, "packed": root / "packed.gguf", "lora": Path(f"{made['plain']}-lora")}.items():
            import_model(found, name, path)
    return found


@pytest.fixture
def products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes as a simulated device does, not in the compiled kernels, which round otherwise."""
    for module in (native_decoder, packed_linear):
        monkeypatch.setattr(module, "load_kernels", lambda: None)


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def whole_bytes(store: WeightStore, model: str) -> int:
    return sum(map(rounded, store.manifest(model).components["model"].bytes_by_hash.values()))


def host_of(store: WeightStore, where: Any, budget: int = 2**30, **gpu_layers: Any) -> Host:
    host = Host(store, str(where), budget, kv_cache_bytes=CACHE)
    host.planner.gpu_layers.update(gpu_layers)
    return host


async def engine_of(host: Host, model: str) -> LLMEngine:
    engine: LLMEngine = (await host.use(model)).modules["model"]
    return engine


def places(engine: LLMEngine) -> list[str]:
    return [device.type for device in engine._runner._model.layer_devices]


Logits = dict[tuple[str, int], torch.Tensor]  # by request and number of tokens


def logged(engine: LLMEngine, run: Any = generated) -> tuple[Any, Logits]:
    """Return what the engine writes, and its logits on the host. The requests of a step may differ from run to run."""
    rows: Logits = {}
    inner = engine._runner.run

    def note(chunks: Any, *step: Any) -> torch.Tensor:
        logits: torch.Tensor = inner(chunks, *step)
        last = [(chunk.sequence.request_id, chunk.end) for chunk in chunks if chunk.has_logits]
        rows.update(zip(last, logits.cpu(), strict=True))
        return logits

    engine._runner.run = note  # type: ignore[method-assign]
    try:
        return run(engine, QUESTIONS, 0.0), rows
    finally:
        del engine._runner.run


def assert_same(found: Logits, expected: Logits, device: torch.device) -> None:
    first = min(expected, key=lambda key: key[1])
    for key in expected if device.type == "sim" else [first]:  # on a card, another token may follow a near tie
        if device.type == "sim":
            assert torch.equal(found[key], expected[key]), key
        else:
            torch.testing.assert_close(found[key], expected[key], rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize("model", ["plain", "tied", "packed"])
async def test_a_model_at_half_of_its_device_writes_what_the_host_writes(
    store: WeightStore, device: torch.device, module: Any, model: str
) -> None:
    expected, rows = logged(await engine_of(host_of(store, "cpu"), model))
    budget = (whole_bytes(store, model) + CACHE) // 2
    host = host_of(store, device, budget)
    before = module.memory_allocated(device)
    engine = await engine_of(host, model)
    held = module.memory_allocated(device) - before
    on = places(engine)
    assert on == ["cpu"] * on.count("cpu") + [device.type] * on.count(device.type)
    assert 0 < on.count("cpu") < NUM_LAYERS
    assert held == host.arena["resident_bytes"] == host.describe()["charged_bytes"] <= budget
    found, own_rows = logged(engine)
    assert_same(own_rows, rows, device)
    if device.type == "sim":
        assert found == expected
    del engine, own_rows
    host.evict(model)
    host.set_budget(0)
    assert await settles(lambda: module.memory_allocated(device) == before)
    assert not +host.provider.leases


@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize("wanted", [0, 2, NUM_LAYERS, r"layers\.[14]"])
async def test_each_choice_of_layers_computes_the_same(store: WeightStore, device: torch.device, wanted: Any) -> None:
    _, rows = logged(await engine_of(host_of(store, "cpu"), "plain"))
    engine = await engine_of(host_of(store, device, plain=wanted), "plain")
    chosen = {1, 4} if isinstance(wanted, str) else set(range(NUM_LAYERS - wanted, NUM_LAYERS))
    assert [kind != "cpu" for kind in places(engine)] == [layer in chosen for layer in range(NUM_LAYERS)]
    assert_same(logged(engine)[1], rows, device)


async def test_the_hosts_kernels_compute_its_layers_and_a_text_is_the_same_in_any_company(
    store: WeightStore, device: torch.device
) -> None:
    """Kernels and torch round otherwise, so the host's logits are near, and those of the split model its own."""
    for model in ("plain", "tied", "packed"):
        engine = await engine_of(host_of(store, device, **{model: 3}), model)
        if native_decoder.load_kernels() is not None:
            assert engine._runner._split.has_kernels
        together, rows = logged(engine)
        alone: dict[str, Any] = {}
        for question in QUESTIONS:
            alone |= generated(engine, [question], 0.0)
        if device.type == "sim":
            assert alone == together
        expected = logged(await engine_of(host_of(store, "cpu"), model))[1]
        for question in QUESTIONS:  # behind the prompt: later tokens may follow others, where two are near
            first = min(key for key in expected if key[0] == question)
            tolerance = 1e-3 if model == "plain" else 0.1
            torch.testing.assert_close(rows[first], expected[first], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("model", ["plain", "tied"])
async def test_a_token_moves_its_activations_over_the_link_and_nothing_else(
    store: WeightStore, device: torch.device, module: Any, monkeypatch: Any, model: str, has_kernels: bool
) -> None:
    if device.type != "sim":
        pytest.skip("only a simulated link counts")
    if not has_kernels:
        monkeypatch.setattr(native_decoder, "load_kernels", lambda: None)
    link, moved = module.memory_of(device), {}
    for wanted in (NUM_LAYERS, 2):
        engine = await engine_of(host_of(store, device, **{model: wanted}), model)
        prompt = engine.encode_chat([{"role": "user", "content": QUESTIONS[0]}])
        engine.add_request(TextRequest("one", prompt, SamplingParams(9, 0.0, ignore_eos=True)))
        steps = []
        while engine.has_work:
            before = link.uploaded_bytes, link.downloaded_bytes
            engine.step()
            steps.append((link.uploaded_bytes - before[0], link.downloaded_bytes - before[1]))
        moved[wanted] = steps[1:]
    row_multiple = engine._runner._row_multiple
    hidden = SIZES["hidden_size"] * (4 if model == "plain" else 2)
    ids, looked_up = 8 * row_multiple, hidden if model == "tied" else 0
    for whole, split in zip(moved[NUM_LAYERS], moved[2], strict=True):
        # A tied embedding lies with the head: one id goes there, and its row comes back.
        assert split[0] - whole[0] == hidden - ids + (8 if model == "tied" else 0)
        assert split[1] - whole[1] == looked_up


@pytest.mark.usefixtures("products_of_torch")
async def test_a_lora_changes_layers_wherever_they_are(store: WeightStore, device: torch.device) -> None:
    def run(engine: LLMEngine, questions: list[str], temperature: float) -> dict[str, Any]:
        for question in questions[:3]:
            prompt = engine.encode_chat([{"role": "user", "content": question}])
            loras = (TextLora("lora", adapter, 1.5),) if question != questions[1] else ()
            engine.add_request(TextRequest(question, prompt, SamplingParams(6, temperature), loras=loras))
        found: dict[str, Any] = {}
        while engine.has_work:
            for delta in engine.step():
                found[delta.request_id] = (*found.get(delta.request_id, ()), *delta.token_ids)
            assert not engine.failures
        return found

    results = []
    for host in (host_of(store, "cpu"), host_of(store, device, plain=2)):
        async with host.lease("plain", is_denoise_component, ("lora",)) as lease:
            adapter = lease.adapters["lora"]
            results.append(logged(lease.modules["model"], run))
            plain = logged(lease.modules["model"], generated)[1]
    assert_same(results[1][1], results[0][1], device)
    first = min(plain, key=lambda key: (key[0] != QUESTIONS[0], key[1]))
    assert not torch.equal(plain[first], results[1][1][first])


@pytest.mark.usefixtures("products_of_torch")
async def test_layers_leave_the_device_when_its_budget_shrinks(store: WeightStore, device: torch.device) -> None:
    whole = whole_bytes(store, "plain") + CACHE
    host = host_of(store, device, 2 * whole)
    _, rows = logged(await engine_of(host, "plain"))
    counts = []
    for share in (0.9, 0.6, 0.3):
        host.evict("plain")
        host.set_budget(int(whole * share))
        engine = await engine_of(host, "plain")
        counts.append(places(engine).count(device.type))
        assert_same(logged(engine)[1], rows, device)
        assert host.arena["resident_bytes"] <= host.arena["budget_bytes"]
        del engine
    assert NUM_LAYERS > counts[0] > counts[1] > counts[2]


@pytest.mark.usefixtures("products_of_torch")
async def test_a_cancelled_prompt_ends_before_the_next_layer_wherever_that_is(
    store: WeightStore, device: torch.device
) -> None:
    engine = await engine_of(host_of(store, device, plain=3), "plain")
    layers: Any = engine._runner._model.module.model.layers
    ran: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    for stop in (1, 4):
        prompt = engine.encode_chat([{"role": "user", "content": QUESTIONS[0] * 4}])
        engine.add_request(TextRequest("long", prompt, SamplingParams(4, 0.0)))
        handle = layers[stop].register_forward_hook(lambda *_: engine.request_cancel("long"))
        assert engine.step() == []
        handle.remove()
        assert ran == list(range(stop + 1))
        assert not engine.has_work
        ran.clear()


@pytest.mark.parametrize(
    ("wanted", "kind", "text"),
    [
        (NUM_LAYERS + 1, WeightsError, f"gpu_layers is 7, but 'plain' has {NUM_LAYERS} layers, layers.0 to layers.5"),
        ("model", WeightsError, "gpu_layers 'model' is the name of no layer: 'plain' has 6 layers"),
        (4, BudgetExceeded, "layers 2, 3, 4, 5 and lm_head.weight, model.norm.weight need .* the budget is"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_loaded(
    store: WeightStore, device: torch.device, module: Any, wanted: Any, kind: type, text: str
) -> None:
    host = host_of(store, device, whole_bytes(store, "plain") // 2, plain=wanted)
    with pytest.raises(kind, match=text):
        await host.use("plain")
    assert not +host.provider.leases
    assert host.describe()["charged_bytes"] == 0


async def test_a_budget_without_room_for_the_head_is_refused(store: WeightStore, device: torch.device) -> None:
    host = host_of(store, device, 20_000)
    with pytest.raises((BudgetExceeded, ServiceError), match=r"lm_head.weight, model.norm.weight need .* KiB on the"):
        await host.use("plain")


@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize("shares", [(0.5, 0.7), (0.3, 0.4)])
async def test_layers_on_two_devices_and_the_host_are_each_within_their_room_and_meet_once(
    store: WeightStore, device: torch.device, second_device: torch.device, module: Any, shares: tuple[float, float]
) -> None:
    """With 0.3 and 0.4 of the model's bytes the first layers are the host's."""
    host = host_of(store, "cpu")
    expected, rows = logged(await engine_of(host, "plain"))
    component, skeleton = store.manifest("plain").components["model"], host.skeleton(store.manifest("plain"))
    builder = loading.ComponentBuilder(WorkerConfig(device=str(device), kv_cache_bytes=CACHE))
    caches = builder.layer_caches(component, skeleton)
    assert caches is not None
    sizes = {name: rounded(ref.nbytes) for name, ref in component.tensors.items()}
    budgets = [int(share * (sum(sizes.values()) + caches[-1])) for share in shares]
    plan = plan_layers(decoder_sizes(sizes, NUM_LAYERS, caches), budgets, "auto", "plain")
    assert set(plan.places) == ({0, 1} if sum(shares) > 1 else {None, 0, 1})
    devices = (second_device, device)
    before = [module.memory_allocated(one) for one in devices]
    tensors = placed_by(plan, (await engine_of(host, "plain"))._runner._model.module.state_dict(), devices)
    config = LLMEngineConfig(device=device, keeps_places=True, kv_cache_bytes=CACHE)
    engine = LLMEngine(skeleton / component.folder, tensors, config)
    for one, was, budget in zip(devices, before, budgets, strict=True):
        assert 0 < module.memory_allocated(one) - was <= budget
    counted = [module.memory_of(one) for one in devices] if device.type == "sim" else []
    found, own_rows = logged(engine)
    assert_same(own_rows, rows, device)
    if counted:
        assert found == expected
        prompt = engine.encode_chat([{"role": "user", "content": "What is 2 + 2?"}])
        engine.add_request(TextRequest("one", prompt, SamplingParams(3, 0.0, ignore_eos=True)))
        engine.step()
        begin = [link.downloaded_bytes for link in counted]
        engine.step()
        assert counted[0].downloaded_bytes - begin[0] == 4 * SIZES["hidden_size"]  # one activation leaves the first one


def placed_by(plan: LayerPlan, tensors: Any, devices: tuple[torch.device, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors of a decoder where the plan has them; what is no layer's is with the last device's."""
    placed = {}
    for name, tensor in tensors.items():
        layer = layer_of(name)
        place = len(devices) - 1 if layer is None else plan.places[layer]
        is_on_host = place is None or (name.endswith("embed_tokens.weight") and None in plan.places)
        placed[name] = tensor if is_on_host or place is None else tensor.to(devices[place])
    return placed


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    link_is(monkeypatch, 1.0)
    yield
    gc.collect()


def link_is(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    """Let a link be so fast beside a host that reads 1e6 bytes and computes 1e6 operations in a second."""
    for module in (loading, split_layers):
        monkeypatch.setattr(module, "measured_rates", lambda device: Rates(bytes_per_s, 1e6, 1e6))


def counted_steps(engine: LLMEngine, link: Any) -> list[tuple[int, int]]:
    """Return a list that gets the tokens of each step, and the bytes that go up the link for it."""
    steps: list[tuple[int, int]] = []
    split: Any = engine._runner._split
    inner = split.hidden_states

    def note(step: Any) -> Any:
        begin = link.uploaded_bytes if link else 0
        hidden = inner(step)
        steps.append((step.num_rows, link.uploaded_bytes - begin if link else 0))
        return hidden

    split.hidden_states = note
    return steps


# float32: a row costs the host 2 operations a weight, 2 us, and the link 4 bytes, 4e6 / bytes_per_s us.
@pytest.mark.parametrize(("bytes_per_s", "streams_from"), [(1.0, 10**9), (2.5e5, 9), (1e9, 1)])
@pytest.mark.usefixtures("products_of_torch")
async def test_layers_of_the_host_come_to_the_device_for_steps_of_many_tokens(
    store: WeightStore, device: torch.device, module: Any, monkeypatch: Any, bytes_per_s: float, streams_from: int
) -> None:
    expected, rows = logged(await engine_of(host_of(store, "cpu"), "plain"))
    link_is(monkeypatch, bytes_per_s)
    budget = whole_bytes(store, "plain") * 9 // 10
    host = host_of(store, device, budget)
    before = module.memory_allocated(device)
    engine = await engine_of(host, "plain")
    assert module.memory_allocated(device) - before == host.arena["resident_bytes"] <= budget
    num_host, layer_bytes = places(engine).count("cpu"), 4 * 64 * (128 + 64 + 64 + 128 + 3 * 160 + 2)
    assert num_host
    link = module.memory_of(device) if device.type == "sim" else None
    steps = counted_steps(engine, link)
    found, own_rows = logged(engine)
    assert_same(own_rows, rows, device)
    if link is not None:
        assert found == expected
        streamed = {num_tokens for num_tokens, nbytes in steps if nbytes >= (num_host - 1) * layer_bytes}
        assert streamed == {num_tokens for num_tokens, _ in steps if num_tokens >= streams_from}
        assert any(num_tokens < 9 for num_tokens, _ in steps)
    del engine, own_rows
    host.evict("plain")
    host.set_budget(0)
    assert await settles(lambda: module.memory_allocated(device) == before)
    assert not +host.provider.leases
