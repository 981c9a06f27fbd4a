"""A LoRA merged into private weights: the latents of stock's `fuse_lora`, and nothing of the base is written."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch

from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.nn.lora import fit_pairs, merge_pairs
from deployments.engines.records.protocol import AdapterUse, ConditionedRequest, EngineError
from weights.operations.adapters import LoraAdapter, LoraPair, load_adapter


def save_random_lora(pair, folder, seed=0):
    """Save a LoRA of every kind of layer that one can change: linear ones, convolutions, the embedding of times."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, layer in pair.ours.denoiser.named_modules():
        is_wanted = path.endswith(("to_q", "proj_in", "conv1", "net.0.proj", "proj_mlp", "linear_1", "norm1.linear"))
        if not is_wanted or not isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            continue
        kernel_A, kernel_B = ((), ()) if layer.weight.ndim == 2 else (layer.weight.shape[2:], (1, 1))
        down = torch.randn(2, layer.weight.shape[1], *kernel_A, generator=generator)
        up = torch.randn(layer.weight.shape[0], 2, *kernel_B, generator=generator)
        tensors |= {f"{path}.lora_A.weight": down * 0.4, f"{path}.lora_B.weight": up * 0.2}
    pair.stock.save_lora_weights(folder, **{f"{pair.denoiser_name}_lora_layers": tensors})
    return len(tensors) // 2


def use_of(scale=1.0):
    return {"adapters": (AdapterUse("bold", scale),), "merges_adapter": True}


@pytest.fixture
def bold(pair, tmp_path):
    save_random_lora(pair, tmp_path)
    yield load_adapter(tmp_path), tmp_path, pair
    pair.stock.unfuse_lora()
    pair.stock.unload_lora_weights()


@pytest.mark.drawn(2)
def test_equals_the_fused_stock(bold, make_request):
    adapter, folder, pair = bold
    weights = pair.ours.denoiser.state_dict()
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in weights.items()}
    pair.stock.load_lora_weights(folder, adapter_name="bold")
    pair.stock.fuse_lora(lora_scale=0.8)
    request = make_request(num_images=2, guidance_scale=2.0, true_cfg_scale=2.0, **use_of(0.8))
    conditioning = pair.conditioning(negative=True)
    merged = pair.assert_equals_stock(request, conditioning, {"bold": adapter})
    plain = pair.ours.generate(make_request(num_images=2, guidance_scale=2.0), conditioning)
    assert np.abs(merged.astype(int) - plain.astype(int)).max() > 4
    after = pair.ours.denoiser.state_dict()
    assert after.keys() == before.keys()
    for name, (tensor, place) in before.items():
        assert torch.equal(after[name], tensor)
        assert after[name].data_ptr() == place
    assert not any("forward" in vars(module) for module in pair.ours.denoiser.modules())


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_alone_and_beside_others(pair, make_request, load_pipeline, tmp_path, dtype):
    """Beside the base, the side path, another strength and another adapter, in any order and any split."""
    for seed, name in enumerate(("bold", "thin")):
        save_random_lora(pair, tmp_path / name, seed)
    ours = load_pipeline(pair.folder, type(pair.stock).__name__, pair.denoiser_name, dtype)
    known = {name: load_adapter(tmp_path / name) for name in ("bold", "thin")}
    forms = [
        use_of(),
        use_of(),
        {},
        {"adapters": use_of()["adapters"]},
        {**use_of(), "adapters": (AdapterUse("thin"),)},
    ]
    jobs = [
        ConditionedRequest(
            make_request(request_id=str(n), seed=n, num_inference_steps=1 + n % 2, **form),
            pair.conditioning(n),
            known,
        )
        for n, form in enumerate(forms)
    ]
    latents, decode = {}, ours.decode

    def noting_decode(states):
        latents.update((state.request.request_id, state.latents) for state in states)
        return decode(states)

    ours.decode = noting_decode
    for job in jobs:
        run(DiffusionEngine(ours), [job])
    alone = dict(latents)
    random.Random(str(dtype)).shuffle(jobs)
    run(DiffusionEngine(ours), jobs)
    assert all(torch.equal(latents[name], own) for name, own in alone.items())
    assert not torch.equal(alone["0"], alone["1"])


def run(engine, jobs):
    for job in jobs:
        engine.add_request(job)
    while engine.has_work:
        engine.step()
        assert not engine.failures


def test_requests_of_one_share_forwards_and_the_base_has_its_own(bold, make_request, monkeypatch):
    adapter, _, pair = bold
    sizes, forward = [], pair.ours._forward
    monkeypatch.setattr(
        pair.ours, "_forward", lambda rows, *size: sizes.append(len(rows.latents)) or forward(rows, *size)
    )
    forms = [use_of(), {}, use_of(), use_of(), {}]
    requests = [make_request(seed=seed, **form) for seed, form in enumerate(forms)]
    states = [
        pair.ours.start_request(one, pair.conditioning(seed), {"bold": adapter}) for seed, one in enumerate(requests)
    ]
    pair.ours.step(states)
    assert sizes == [3, 2]


def test_a_request_finds_what_was_merged_ahead(bold, make_request, monkeypatch):
    adapter, _, pair = bold
    request, conditioning = make_request(**use_of()), pair.conditioning()
    pair.ours.merge_adapter(request, {"bold": adapter})
    merged = pair.ours._loras._merged[adapter]
    assert len(merged.forwards) == len(adapter.components[pair.denoiser_name]) > 2
    monkeypatch.setattr("deployments.engines.diffusion.fitted_loras.merge_pairs", None)
    state = pair.ours.start_request(request, conditioning, {"bold": adapter})
    assert state.merged is merged
    monkeypatch.undo()
    again = pair.ours.start_request(
        make_request(**use_of(0.5)), conditioning, {"bold": adapter}
    )  # the last strength is kept
    assert again.merged is pair.ours._loras._merged[adapter] is not merged


@pytest.mark.drawn
def test_the_private_weights_go_with_the_adapter(pair, make_request, tmp_path):
    save_random_lora(pair, tmp_path)
    adapter = load_adapter(tmp_path)
    state = pair.ours.start_request(make_request(**use_of()), pair.conditioning(), {"bold": adapter})
    held = [weakref.ref(forward) for forward in state.merged.forwards.values()]
    assert len(held) > 2
    del adapter
    gc.collect()
    pair.ours.step([state])  # its own weights stay with it
    assert all(forward() for forward in held)
    del state
    gc.collect()
    assert not any(forward() for forward in held)


def test_what_has_no_weights_of_its_own_goes_on_the_side_path():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))  # of a class that may compute anything
    pairs = fit_pairs(module, {"0": LoraPair(torch.randn(2, 4), torch.randn(3, 2), 0.5)})
    merged = merge_pairs(pairs, 2.0)
    assert (merged.forwards, merged.beside, merged.strength) == ({}, pairs, 2.0)


def test_what_is_refused(pair, make_request):
    unknown = LoraAdapter("a", {pair.denoiser_name: {"nothing": LoraPair(torch.zeros(2, 4), torch.zeros(4, 2), 1.0)}})
    two = (AdapterUse("a"), AdapterUse("b"))
    for request, message in [
        (make_request(merges_adapter=True), "one adapter alone can be merged, and 0 are asked for"),
        (make_request(adapters=two, merges_adapter=True), "one adapter alone can be merged, and 2 are asked for"),
        (make_request(**use_of()), r"unknown adapter 'bold' \(known: a, b\)"),
        (make_request(adapters=two[:1], merges_adapter=True), r"'nothing' \(1 of 1\) are not in"),
    ]:
        known = {"a": unknown, "b": unknown}
        for call in (
            pair.ours.merge_adapter,
            lambda *args: pair.ours.start_request(args[0], pair.conditioning(), args[1]),
        ):
            with pytest.raises(EngineError, match=message):
                call(request, known)
