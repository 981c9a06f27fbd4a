"""LoRA on the side path equals stock diffusers with PEFT, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deployments.engines.diffusion.families.prompted import PromptedSpan
from deployments.engines.nn.lora import AdaptedSpan, Batch, applied_adapters, fit_pairs
from deployments.engines.records.protocol import AdapterUse, EngineError
from weights.operations.adapters import LoraAdapter, LoraPair, load_adapter

FLUX_TARGETS = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.ff.net.0.proj",
    "single_transformer_blocks.0.proj_mlp",
)
STABLE_DIFFUSION_TARGETS = (
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
    "up_blocks.1.attentions.0.proj_in",
    "down_blocks.1.resnets.0.conv1",  # a convolution
)
SDXL_TARGETS = (
    "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
    "up_blocks.0.attentions.0.proj_in",
    "down_blocks.0.resnets.0.conv1",  # a convolution
)

STABLE_DIFFUSION_3_TARGETS = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.add_k_proj",
    "transformer_blocks.1.ff.net.0.proj",
)

TARGETS = {
    "StableDiffusion3Pipeline": STABLE_DIFFUSION_3_TARGETS,
    "FluxPipeline": FLUX_TARGETS,
    "StableDiffusionXLPipeline": SDXL_TARGETS,
    "StableDiffusionPipeline": STABLE_DIFFUSION_TARGETS,
}


def random_lora(module: torch.nn.Module, targets: tuple[str, ...], ranks: tuple[int, ...], seed: int = 0):
    """Tensors as save_lora_weights wants them: `<path>.lora_A.weight` and `.lora_B.weight`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, rank in zip(targets, ranks, strict=True):
        weight = module.get_submodule(path).weight
        kernel_A, kernel_B = ((), ()) if weight.ndim == 2 else (weight.shape[2:], (1, 1))
        shape_A, shape_B = (rank, weight.shape[1], *kernel_A), (weight.shape[0], rank, *kernel_B)
        tensors[f"{path}.lora_A.weight"] = torch.randn(shape_A, generator=generator)
        tensors[f"{path}.lora_B.weight"] = torch.randn(shape_B, generator=generator) * 0.3
    return tensors


@pytest.fixture
def bold(pair, tmp_path):
    """(folder of a saved LoRA, the pipeline pair); ranks differ, so a wrong alpha shows."""
    targets = TARGETS[pair.ours.family.class_name]
    tensors = random_lora(getattr(pair.stock, pair.denoiser_name), targets, (2, 3, 2))
    pair.stock.save_lora_weights(tmp_path, **{f"{pair.denoiser_name}_lora_layers": tensors})
    yield tmp_path, pair
    pair.stock.unload_lora_weights()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("scale", [0.6, 1.0])
def test_equals_stock(bold, make_request, scale):
    folder, pair = bold
    adapters = {"bold": load_adapter(folder)}
    pair.stock.load_lora_weights(folder, adapter_name="bold")
    pair.stock.set_adapters("bold", scale)
    conditioning = pair.conditioning(negative=True)
    plain = make_request(num_images=2, guidance_scale=2.0)
    adapted = make_request(num_images=2, guidance_scale=2.0, adapters=(AdapterUse("bold", scale),))
    ours = pair.assert_equals_stock(adapted, conditioning, adapters)
    assert np.abs(ours.astype(int) - pair.ours.generate(plain, conditioning).astype(int)).max() > 4


@pytest.mark.drawn(2)
def test_two_adapters_equal_stock(bold, make_request, tmp_path):
    folder, pair = bold
    targets = TARGETS[pair.ours.family.class_name][:1]
    thin = random_lora(pair.ours.denoiser, targets, (4,), seed=1)
    pair.stock.save_lora_weights(tmp_path / "thin", **{f"{pair.denoiser_name}_lora_layers": thin})
    paths = {"bold": folder, "thin": tmp_path / "thin"}
    for name, path in paths.items():
        pair.stock.load_lora_weights(path, adapter_name=name)
    pair.stock.set_adapters(["bold", "thin"], [0.5, -0.75])
    request = make_request(adapters=(AdapterUse("thin", -0.75), AdapterUse("bold", 0.5)))
    adapters = {name: load_adapter(path) for name, path in paths.items()}
    pair.assert_equals_stock(request, pair.conditioning(), adapters)


@pytest.mark.drawn(2)
def test_adapted_and_plain_requests_run_side_by_side(bold, make_request):
    folder, pair = bold
    adapters = {"bold": load_adapter(folder)}
    jobs = [make_request(), make_request(adapters=(AdapterUse("bold", 1.0),))]
    states = [pair.ours.start_request(job, pair.conditioning(), adapters) for job in jobs]
    del adapters["bold"]  # the running request keeps it
    gc.collect()
    for _ in range(3):
        pair.ours.step(states)
    together = pair.ours.decode(states)
    again = {"bold": load_adapter(folder)}
    for job, image in zip(jobs, together, strict=True):
        assert np.array_equal(image, pair.ours.generate(job, pair.conditioning(), adapters=again))


@pytest.mark.drawn(2)
def test_any_adapters_share_a_forward(bold, make_request, monkeypatch):
    """None, one, another version of it, two: each row gets its own, and what it gets alone."""
    folder, pair = bold
    old, new = load_adapter(folder), load_adapter(folder)
    thin = load_adapter(folder)
    jobs = [
        ((AdapterUse("bold", 1.0),), {"bold": old}),
        ((), {}),
        ((AdapterUse("bold", 1.0),), {"bold": new}),
        ((AdapterUse("bold", 0.3), AdapterUse("thin", -0.5)), {"bold": old, "thin": thin}),
        ((AdapterUse("bold", 1.0),), {"bold": old}),
    ]
    started = [
        (make_request(seed=seed, adapters=uses), pair.conditioning(seed), known)
        for seed, (uses, known) in enumerate(jobs)
    ]
    alone = [pair.ours.generate(job, text, adapters=known) for job, text, known in started]
    spans, forward = [], pair.ours._forward
    monkeypatch.setattr(
        pair.ours, "_forward", lambda rows, *size: spans.append([s[1:] for s in rows.adapters]) or forward(rows, *size)
    )
    states = [pair.ours.start_request(*job) for job in started]
    for _ in range(3):
        pair.ours.step(states)
    assert spans == [[(0, 2), (3, 4), (4, 5)]] * 3  # the first two and the last, without the plain one between
    for images, expected in zip(pair.ours.decode(states), alone, strict=True):
        assert np.array_equal(images, expected)


@pytest.mark.parametrize("kind", [AdaptedSpan, PromptedSpan])
def test_a_span_is_split_as_its_batch_is(kind):
    span = kind((), 2, 6)
    assert [span.part(*part) for part in ((0, 2), (0, 3), (3, 5), (5, 9), (6, 9))] == [
        None,
        kind((), 2, 3),
        kind((), 0, 2),
        kind((), 0, 1),
        None,
    ]


@pytest.mark.drawn(2)
def test_a_version_that_nobody_holds_is_forgotten(bold, make_request):
    folder, pair = bold
    state = pair.ours.start_request(
        make_request(adapters=(AdapterUse("bold"),)), pair.conditioning(), {"bold": load_adapter(folder)}
    )
    gc.collect()
    assert not pair.ours._loras._pairs
    pair.ours.step([state])  # its own weights stay with it


def test_its_shapes_are_told_by_the_paths_of_its_layers(bold, make_request):
    folder, pair = bold
    known = {"bold": load_adapter(folder)}
    ((name, shapes),) = pair.ours.adapter_shapes(make_request(adapters=(AdapterUse("bold"),)), known)
    own = known["bold"].components[pair.denoiser_name]
    assert name == "bold"
    assert {path: (one.down.shape, one.up.shape) for path, one in shapes.items()} == {
        path: (one.down.shape, one.up.shape) for path, one in own.items()
    }
    assert all(one.down.is_meta and one.up.is_meta for one in shapes.values())


def linear_adapter(down: torch.Tensor, up: torch.Tensor, path: str = "0") -> dict[str, LoraPair]:
    return {path: LoraPair(down, up, 0.5)}


def test_no_hook_stays_even_after_an_exception():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))
    x = torch.randn(2, 4)
    plain = module(x)
    pairs = linear_adapter(torch.randn(2, 4), torch.randn(3, 2))
    span = AdaptedSpan([(fit_pairs(module, pairs), 2.0)])
    with contextlib.suppress(KeyError), torch.no_grad(), applied_adapters([span]):
        expected = plain + 2.0 * 0.5 * (x @ pairs["0"].down.T @ pairs["0"].up.T)
        assert torch.allclose(module(x), expected, atol=1e-6)
        raise KeyError
    assert not module[0]._forward_hooks
    assert torch.equal(module(x), plain)


def test_only_the_rows_of_a_span_are_adapted():
    layer, x = torch.nn.Linear(16, 32), torch.randn(5, 7, 16)
    pairs = [LoraPair(torch.randn(2, 16), torch.randn(32, 2), 0.5) for _ in range(2)]
    spans = [AdaptedSpan([({layer: pairs[0]}, 1.0), ({layer: pairs[1]}, -0.7)], 1, 3)]
    spans += [AdaptedSpan([({layer: pairs[1]}, 0.2)], 4, 5)]
    with torch.no_grad():
        expected = layer(x)
        deltas = [x @ pair.down.T @ pair.up.T * pair.scale for pair in pairs]
        expected[1:3] += deltas[0][1:3] - 0.7 * deltas[1][1:3]
        expected[4:] += 0.2 * deltas[1][4:]
        with applied_adapters(spans):
            assert torch.allclose(layer(x), expected, atol=1e-5)


def test_a_forward_makes_nothing_for_each_layer_of_its_adapters():
    """Handles and closures of hundreds of layers cost milliseconds, when Python looks for circles among them."""
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(300))
    pairs = {str(number): LoraPair(torch.zeros(1, 2), torch.zeros(2, 1), 1.0) for number in range(300)}
    spans = [AdaptedSpan([(fit_pairs(layers, pairs), 1.0), (fit_pairs(layers, pairs), 0.5)])]
    gc.collect()
    before = len(gc.get_objects())
    with applied_adapters(spans):
        assert len(gc.get_objects()) - before < 100
        assert all(len(layer._forward_hooks) == 1 for layer in layers)
    assert not any(layer._forward_hooks for layer in layers)


@pytest.mark.parametrize("repeats", [False, True])
def test_a_layer_may_see_several_vectors_of_each_row(repeats):
    layer, (rows, each) = torch.nn.Linear(16, 32), (3, 4)
    pair, span = LoraPair(torch.randn(2, 16), torch.randn(32, 2), 0.5), (1, 2)
    x = torch.randn(each, rows, 16) if repeats else torch.randn(rows, each, 16)
    with torch.no_grad():
        expected = layer(x)
        mine = (slice(None), slice(*span)) if repeats else slice(*span)
        expected[mine] += 0.5 * x[mine] @ pair.down.T @ pair.up.T
        with applied_adapters([AdaptedSpan([({layer: pair}, 1.0)], *span)], Batch(rows, repeats)):
            assert torch.allclose(layer(x.flatten(0, 1)), expected.flatten(0, 1), atol=1e-5)
            with pytest.raises(ValueError, match="10 vectors of 3 rows"):
                layer(torch.randn(10, 16))


def test_targets_that_are_not_there_are_named():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    absent = linear_adapter(torch.zeros(2, 4), torch.zeros(3, 2), "blocks.7.to_q")
    with pytest.raises(EngineError, match=r"'blocks.7.to_q' \(1 of 1\) are not in Sequential"):
        fit_pairs(module, absent)


@pytest.mark.parametrize(
    ("path", "down", "up", "message"),
    [
        ("0", torch.zeros(2, 5), torch.zeros(3, 2), r"\(in, out\) sizes \(5, 3\) do not fit a Linear of \(4, 3\)"),
        ("0", torch.zeros(2, 4, 1, 1), torch.zeros(3, 2, 1, 1), "do not fit a Linear"),
        ("1", torch.zeros(2, 3), torch.zeros(3, 2), "is a LayerNorm, expected a linear or convolution layer"),
    ],
)
def test_shapes_that_do_not_fit(path, down, up, message):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    pairs = linear_adapter(down, up, path)
    with pytest.raises(EngineError, match=message):
        fit_pairs(module, pairs)


def test_what_a_pipeline_refuses(bold, make_request):
    folder, pair = bold
    adapter = load_adapter(folder)
    foreign = LoraAdapter(adapter.path, {**adapter.components, "text_encoder_4": {}})
    with pytest.raises(EngineError, match=f"changes text_encoder_4; of a .*, {pair.denoiser_name}, .* can be adapted"):
        pair.ours.start_request(make_request(adapters=(AdapterUse("other"),)), pair.conditioning(), {"other": foreign})
    for uses, message in [
        ((AdapterUse("thin"),), r"unknown adapter 'thin' \(known: bold\)"),
        ((AdapterUse("bold", float("nan")),), "scale nan"),
        ((AdapterUse("bold"), AdapterUse("bold")), "named 2 times"),
    ]:
        with pytest.raises(EngineError, match=message):
            pair.ours.start_request(make_request(adapters=uses), pair.conditioning(), {"bold": adapter})


@pytest.fixture
def turned(pair, tmp_path):
    """(file of an OFT beside an IA3, the pipeline pair whose stock has the weights that they make)."""
    tensors, own = {}, {}
    denoiser = getattr(pair.stock, pair.denoiser_name)
    for place, path in enumerate(TARGETS[pair.ours.family.class_name]):
        weight, flat = denoiser.get_submodule(path).weight, f"lycoris_{path.replace('.', '_')}"
        own[path] = weight.detach().clone()
        if place == 1:
            gains = torch.randn(weight.shape[1])
            tensors |= {f"{flat}.weight": gains, f"{flat}.on_input": torch.tensor(1)}
            changed = own[path] * (1 + gains.view(1, -1, *[1] * (weight.ndim - 2)))
        else:
            tensors[f"{flat}.oft_blocks"] = blocks = torch.randn(len(weight) // 4, 4, 4) * 0.3
            skew, one = blocks - blocks.mT, torch.eye(4)
            turn = torch.block_diag(*((one + skew) @ torch.inverse(one - skew)).mT)
            changed = (turn @ own[path].flatten(1)).view(weight.shape)
        weight.data.copy_(changed)
    save_file(tensors, tmp_path / "turned.safetensors")
    yield tmp_path / "turned.safetensors", pair
    for path, weight in own.items():
        denoiser.get_submodule(path).weight.data.copy_(weight)


@pytest.mark.drawn(2)
def test_turned_and_plain_requests_run_side_by_side(turned, make_request):
    file, pair = turned
    adapters = {"turned": load_adapter(file)}
    use = (AdapterUse("turned", 1.0),)
    conditioning = pair.conditioning(negative=True)
    pair.assert_equals_stock(make_request(guidance_scale=2.0, adapters=use), conditioning, adapters)
    jobs = [make_request(), make_request(adapters=use), make_request(adapters=use, merges_adapter=True)]
    states = [pair.ours.start_request(job, pair.conditioning(), adapters) for job in jobs]
    for _ in range(3):
        pair.ours.step(states)
    together = pair.ours.decode(states)
    for job, image in zip(jobs, together, strict=True):
        assert np.array_equal(image, pair.ours.generate(job, pair.conditioning(), adapters=adapters))
    assert np.array_equal(together[1], together[2])
    assert np.abs(together[0].astype(int) - together[1].astype(int)).max() > 2
