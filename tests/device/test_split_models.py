"""Language models larger than their device: the last layers are there, the others on the host."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from device.test_device_engines import generated as generated_at_length
from device.test_device_hosts import settles
from kit.hosting import DEMO, Host
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from deployments.engines.llm import native_decoder, split_layers
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.records.protocol import SamplingParams, TextLora, TextRequest
from deployments.modules import loading
from deployments.modules.loading import is_denoise_component
from deployments.modules.parts import HOST, beside_adapters
from deployments.records.errors import ServiceError
from infra.offline.checkpoints import quantize_checkpoint
from weights.memory.block_plan import Rates
from weights.operations.intake import import_model
from weights.records.errors import BudgetExceeded, WeightsError
from weights.storage.store import WeightStore

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


def generated(engine: LLMEngine, questions: list[str], temperature: float) -> dict[str, tuple[int, ...]]:
    """Return eight tokens for each question: a model of random weights may find that all answers end at once."""
    return generated_at_length(engine, questions, temperature, num_tokens=8, ignore_eos=True)


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
    found = WeightStore(root / "store")
    for name, path in {**made, "packed": root / "packed.gguf", "lora": Path(f"{made['plain']}-lora")}.items():
        import_model(found, name, path)
    return found


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
    """Return the engine's tokens, and its logits on the host. The requests of a step may differ from run to run."""
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


OnHost = Callable[[str], Awaitable[tuple[Any, Logits]]]


@pytest.fixture(scope="module")
def on_host(store: WeightStore) -> OnHost:
    """Return a function that gives `logged` of a model on the host, computed once for the kernels that are there."""
    known: dict[tuple[str, bool], tuple[Any, Logits]] = {}

    async def compute(model: str) -> tuple[Any, Logits]:
        key = model, native_decoder.load_kernels() is None
        if key not in known:
            known[key] = logged(await engine_of(host_of(store, "cpu"), model))
        return known[key]

    return compute


def assert_same(found: Logits, expected: Logits, device: torch.device) -> None:
    first = min(expected, key=lambda key: key[1])
    for key in expected if device.type == "sim" else [first]:  # on a card, another token may follow a near tie
        if device.type == "sim":
            assert torch.equal(found[key], expected[key]), key
        else:
            torch.testing.assert_close(found[key], expected[key], rtol=2e-2, atol=2e-2)


@pytest.mark.drawn
@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize("model", ["plain", "tied", "packed"])
async def test_a_model_at_half_of_its_device_writes_what_the_host_writes(
    store: WeightStore, on_host: OnHost, device: torch.device, module: Any, model: str
) -> None:
    expected, rows = await on_host(model)
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


@pytest.mark.drawn
@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize("wanted", [0, 2, NUM_LAYERS, r"layers\.[14]"])
async def test_each_choice_of_layers_computes_the_same(
    store: WeightStore, on_host: OnHost, device: torch.device, wanted: Any
) -> None:
    _, rows = await on_host("plain")
    engine = await engine_of(host_of(store, device, plain=wanted), "plain")
    chosen = {1, 4} if isinstance(wanted, str) else set(range(NUM_LAYERS - wanted, NUM_LAYERS))
    assert [kind != "cpu" for kind in places(engine)] == [layer in chosen for layer in range(NUM_LAYERS)]
    assert_same(logged(engine)[1], rows, device)


@pytest.mark.drawn
@pytest.mark.parametrize("model", ["plain", "tied", "packed"])
async def test_the_hosts_kernels_compute_its_layers_and_a_text_is_the_same_in_any_company(
    store: WeightStore, on_host: OnHost, device: torch.device, model: str
) -> None:
    """Kernels and torch round otherwise, so the host's logits are near, and those of the split model its own."""
    engine = await engine_of(host_of(store, device, **{model: 3}), model)
    if native_decoder.load_kernels() is not None:
        assert engine._runner._split.has_kernels
    together, rows = logged(engine)
    alone: dict[str, Any] = {}
    for question in QUESTIONS:
        alone |= generated(engine, [question], 0.0)
    if device.type == "sim":
        assert alone == together
    expected = (await on_host(model))[1]
    for question in QUESTIONS:  # behind the prompt: later tokens may follow others, where two are near
        first = min(key for key in expected if key[0] == question)
        tolerance = 1e-3 if model == "plain" else 0.1
        torch.testing.assert_close(rows[first], expected[first], rtol=tolerance, atol=tolerance)


@pytest.mark.drawn
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
        prompt = engine.chats.encode([{"role": "user", "content": QUESTIONS[0]}])
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
            prompt = engine.chats.encode([{"role": "user", "content": question}])
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
async def test_layers_leave_the_device_when_its_budget_shrinks(
    store: WeightStore, on_host: OnHost, device: torch.device
) -> None:
    whole = whole_bytes(store, "plain") + CACHE
    host = host_of(store, device, 2 * whole)
    await engine_of(host, "plain")
    _, rows = await on_host("plain")
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
        prompt = engine.chats.encode([{"role": "user", "content": QUESTIONS[0] * 4}])
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


def spread_over(store: WeightStore, devices: tuple[Any, ...], budget: int, **gpu_layers: Any) -> Host:
    names = tuple(map(str, devices))
    gpus = float(sum(name.startswith("cuda") for name in names))
    host = Host(store, names[0], budget, kv_cache_bytes=CACHE, devices=names, num_gpus=gpus)
    host.planner.gpu_layers.update(gpu_layers)
    return host


def used_by(host: Host) -> list[int]:
    """Return the bytes of the replica's books on each device, whose arena may keep more, within the same budget."""
    described = host.describe()
    arenas = [described["arena"], *described["other_arenas"]]
    others = [one["charged_bytes"] for place, one in described["elsewhere"].items() if place != HOST]
    counted = [described["charged_bytes"], *others]
    for arena, nbytes in zip(arenas, counted, strict=True):
        assert nbytes <= arena["resident_bytes"] <= arena["budget_bytes"]
    return counted


@pytest.mark.drawn
@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize(("model", "share"), [("plain", 0.7), ("tied", 0.7), ("packed", 0.7), ("plain", 0.4)])
async def test_layers_on_two_devices_are_each_within_its_budget_and_write_the_same(
    store: WeightStore,
    on_host: OnHost,
    device: torch.device,
    second_device: torch.device,
    module: Any,
    model: str,
    share: float,
) -> None:
    """With 0.4 of the model's bytes each, the first layers are the host's."""
    expected, rows = await on_host(model)
    devices = (device, second_device)
    host = spread_over(store, (*devices, "cpu"), int(share * (whole_bytes(store, model) + CACHE)))
    before = [module.memory_allocated(one) for one in devices]
    engine = await engine_of(host, model)
    on = [str(place) for place in engine._runner._model.layer_devices]
    order = ["cpu", str(second_device), str(device)]
    assert on == sorted(on, key=order.index)
    assert set(on) == set(order if share < 0.5 else order[1:])
    assert used_by(host) == [module.memory_allocated(one) - was for one, was in zip(devices, before, strict=True)]
    found, own_rows = logged(engine)
    assert_same(own_rows, rows, device)
    if device.type == "sim":
        assert found == expected
    del engine, own_rows
    host.evict(model)
    assert host.describe()["elsewhere"][str(second_device)]["charged_bytes"] == 0
    host.set_budget(0)
    assert await settles(lambda: [module.memory_allocated(one) for one in devices] == before)
    assert not +host.provider.leases


@pytest.mark.drawn
@pytest.mark.usefixtures("products_of_torch")
@pytest.mark.parametrize("model", ["plain", "packed"])
async def test_a_cache_that_takes_what_there_is_takes_it_of_each_device_for_the_layers_there(
    store: WeightStore, on_host: OnHost, device: torch.device, second_device: torch.device, monkeypatch: Any, model: str
) -> None:
    """The first device alone has no room for the model, and so none for a cache."""
    least = 2**16
    monkeypatch.setattr(loading, "MIN_KV_CACHE_BYTES", least)
    budget = int(0.9 * whole_bytes(store, model))
    names = tuple(map(str, (device, second_device, "cpu")))
    auto = {"kv_cache_bytes": "auto", "max_num_seqs": 10**4, "num_gpus": 2.0 if device.type == "cuda" else 0.0}
    host = Host(store, names[0], budget, devices=names, **auto)
    engine = await engine_of(host, model)
    on = [str(place) for place in engine._runner._model.layer_devices]
    assert set(on) == {str(device), str(second_device)}
    component = store.manifest(model).components["model"]
    skeleton = store.models / store.manifest(model).skeleton
    cache = host.builder.working_memory(component, skeleton)
    assert cache > whole_bytes(store, model) / 2 > 2 * least
    room = beside_adapters(budget)
    assert 0.95 * room <= max(used_by(host)) <= room
    small = Host(store, names[0], budget, devices=names, **auto | {"kv_cache_bytes": least})
    assert small.builder.working_memory(component, skeleton) < cache / 3
    _, rows = await on_host(model)
    assert_same(logged(engine)[1], rows, device)


@pytest.mark.drawn
@pytest.mark.parametrize("has_kernels", [True, False])
async def test_a_token_crosses_from_one_device_to_the_other_once(
    store: WeightStore,
    device: torch.device,
    second_device: torch.device,
    module: Any,
    monkeypatch: Any,
    has_kernels: bool,
) -> None:
    if device.type != "sim":
        pytest.skip("only a simulated link counts")
    if not has_kernels:
        monkeypatch.setattr(native_decoder, "load_kernels", lambda: None)
    first, second = module.memory_of(device), module.memory_of(second_device)
    hidden = 4 * SIZES["hidden_size"]
    for share, places in ((0.7, 2), (0.4, 3)):
        budget = int(share * (whole_bytes(store, "plain") + CACHE))
        engine = await engine_of(spread_over(store, (device, second_device, "cpu"), budget), "plain")
        assert len(set(engine._runner._model.layer_devices)) == places
        prompt = engine.chats.encode([{"role": "user", "content": QUESTIONS[0]}])
        engine.add_request(TextRequest("one", prompt, SamplingParams(5, 0.0, ignore_eos=True)))
        steps = []
        while engine.has_work:
            before = second.downloaded_bytes, first.downloaded_bytes
            engine.step()
            steps.append((second.downloaded_bytes - before[0], first.downloaded_bytes - before[1]))
        crossed = [nbytes for nbytes, _ in steps]
        logits = 4 * SIZES["vocab_size"]
        assert crossed[1:] == [hidden] * (len(steps) - 1), "one activation leaves the device of the earlier layers"
        assert crossed[0] == hidden * len(prompt)
        assert all(nbytes <= logits for _, nbytes in steps), "and none the device of the later ones"


@pytest.mark.usefixtures("products_of_torch")
async def test_models_on_two_devices_take_turns_there(
    store: WeightStore, on_host: OnHost, device: torch.device, second_device: torch.device
) -> None:
    budget = int(0.7 * (whole_bytes(store, "plain") + CACHE))
    host = spread_over(store, (device, second_device), budget)
    for model in ("plain", "packed", "tied", "plain"):
        _, rows = await on_host(model)
        assert_same(logged(await engine_of(host, model))[1], rows, device)
        assert (min(used_by(host)) > 0) == (model == "plain")  # the others fit the first one
    host.set_budget(budget * 2)
    assert places(await engine_of(host, "plain")) == [device.type] * NUM_LAYERS
    await host.pin("plain", is_denoise_component)
    with pytest.raises(BudgetExceeded, match="less than the leased and pinned bytes"):
        host.set_budget(budget // 2)
    used_by(host)


@pytest.mark.parametrize(
    ("share", "devices", "wanted", "kind", "text"),
    [
        (0.3, 2, "auto", BudgetExceeded, r"gpu_layers 'auto' of 'plain': layers 0, .*, 5 and .* on each of 2 devices"),
        (0.7, 2, 3, WeightsError, "gpu_layers 3 leaves layers of 'plain' to the host, and cpu is not among the dev"),
        (0.7, 3, "block", WeightsError, "gpu_layers 'block' is the name of no layer: 'plain' has 6 layers"),
        (0.01, 3, "auto", BudgetExceeded, "need .* on the device even where all layers are elsewhere"),
    ],
)
async def test_what_has_no_room_on_its_devices_is_refused_before_anything_is_loaded(
    store: WeightStore,
    device: torch.device,
    second_device: torch.device,
    module: Any,
    share: float,
    devices: int,
    wanted: Any,
    kind: type,
    text: str,
) -> None:
    budget = int(share * (whole_bytes(store, "plain") + CACHE))
    host = spread_over(store, (device, second_device, "cpu")[:devices], budget, plain=wanted)
    with pytest.raises(kind, match=text):
        await host.use("plain")
    assert not +host.provider.leases
    assert used_by(host) == [0, 0]


async def test_a_second_device_that_fails_leaves_nothing_leased_on_the_first(
    store: WeightStore, device: torch.device, second_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise WeightsError("the second one broke")

    host = spread_over(store, (device, second_device), int(0.7 * (whole_bytes(store, "plain") + CACHE)))
    tier: Any = host._tier
    with monkeypatch.context() as patch:
        patch.setattr(tier._others[str(second_device)], "acquire", fail)
        with pytest.raises(WeightsError, match="the second one broke"):
            await host.use("plain")
    assert not +host.provider.leases
    assert host.arena["leased_bytes"] == 0
    await engine_of(host, "plain")
    assert min(used_by(host)) > 0


async def test_a_second_device_that_is_not_there_is_refused(store: WeightStore, device: torch.device) -> None:
    with pytest.raises(WeightsError, match=f"no device '{device.type}:7': 2 "):
        spread_over(store, (device, f"{device.type}:7"), 2**20)


async def test_the_kv_cache_of_the_hosts_layers_counts_there(store: WeightStore, device: torch.device) -> None:
    host = host_of(store, device, plain=2)
    engine = await engine_of(host, "plain")
    told = host.describe()["elsewhere"][HOST]
    cache: Any = engine._runner._cache
    held = [one for half in (cache._keys, cache._values) for one in half.tensors if one.device.type == "cpu"]
    assert sum(one.nbytes for one in held) <= told["charged_bytes"] <= sum(one.nbytes for one in held) + 1024
    assert told["budget_bytes"] == host.settings.resident_bytes
    del engine, held, cache
    host.evict("plain")
    assert host.describe()["elsewhere"][HOST]["charged_bytes"] == 0
    small = Host(store, str(device), kv_cache_bytes=CACHE, resident_bytes=2**12)
    small.planner.gpu_layers.update(plain=0, tied=0)
    for model in ("plain", "tied", "plain"):  # each fits alone, as on a replica without a device
        await engine_of(small, model)
        assert [module["models"] for module in small.describe()["modules"]] == [[model]]


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
@pytest.mark.drawn
@pytest.mark.parametrize(("bytes_per_s", "streams_from"), [(1.0, 10**9), (2.5e5, 9), (1e9, 1)])
@pytest.mark.usefixtures("products_of_torch")
async def test_layers_of_the_host_come_to_the_device_for_steps_of_many_tokens(
    store: WeightStore,
    on_host: OnHost,
    device: torch.device,
    module: Any,
    monkeypatch: Any,
    bytes_per_s: float,
    streams_from: int,
) -> None:
    expected, rows = await on_host("plain")
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
