"""Modulation computed ahead for the steps of a request has the bits of what each step computes for itself."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.costs.memory_limits import MemoryLimits
from deployments.engines.diffusion.modulation import MAX_PARTS, NUM_ROWS
from deployments.engines.records.protocol import AdapterUse
from weights.operations.adapters import LoraAdapter, LoraPair


@pytest.fixture(params=["flux", "stable_diffusion_3", "sdxl", "stable_diffusion"])
def modulated(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def count_calls(monkeypatch):
    """Count the rows that go through the embedding of time and text, in every call."""

    def count(pipeline):
        rows: list[int] = []
        watched = pipeline.denoiser.get_submodule(pipeline.family.network.embedding_parts[0])
        embedding_class = type(watched)
        compute = embedding_class.forward

        def counted(embedding, *inputs):
            if embedding is watched:  # SDXL has another one of its class
                rows.append(len(inputs[0]))
            return compute(embedding, *inputs)

        monkeypatch.setattr(embedding_class, "forward", counted)
        return rows

    return count


def start(pair, make_request, count, **changes):
    guided = {"guidance_scale": 2.5, "true_cfg_scale": 2.0}
    return [
        pair.ours.start_request(
            make_request(seed=seed, request_id=str(seed), **guided, **changes), pair.conditioning(seed, negative=True)
        )
        for seed in range(count)
    ]


def all_latents(pair, states):
    found = []
    while not states[0].done:
        pair.ours.step(states)
        found.append([state.latents.clone() for state in states])
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("num_states", [1, 3])
def test_has_the_bits_of_steps_that_compute_for_themselves(modulated, make_request, monkeypatch, num_states):
    changes = {"num_inference_steps": 11, "num_images": 2}
    ahead = all_latents(modulated, start(modulated, make_request, num_states, **changes))
    monkeypatch.setattr(modulated.ours._modulation, "rows_of", lambda group: ())
    expected = all_latents(modulated, start(modulated, make_request, num_states, **changes))
    assert len(ahead) == 11
    for one, other in zip(ahead, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.drawn(2)
def test_one_computation_serves_many_steps(modulated, make_request, count_calls):
    rows = count_calls(modulated.ours)
    (state,) = states = start(modulated, make_request, 1, num_inference_steps=11)
    all_latents(modulated, states)
    assert rows == [NUM_ROWS, 3 * 2]  # eight steps of two branches, and what is left
    assert len(state.ahead) == 2


@pytest.mark.drawn(2)
def test_who_joins_later_is_computed_alone_and_a_crowd_step_by_step(modulated, make_request, count_calls):
    early, late = start(modulated, make_request, 2, num_inference_steps=20)
    modulated.ours.step([early])
    rows = count_calls(modulated.ours)
    modulated.ours.step([early, late])
    assert rows == [2 * NUM_ROWS // 4]
    rows.clear()
    crowd = start(modulated, make_request, MAX_PARTS)
    modulated.ours.step(crowd)
    assert rows == [2 * MAX_PARTS]


def lora_of(pair, endings):
    """Return a LoRA of the layers whose names end so."""
    layers = {name: part for name, part in pair.ours.denoiser.named_modules() if name.endswith(endings)}
    assert layers
    pairs = {
        name: LoraPair(torch.randn(2, part.in_features), torch.randn(part.out_features, 2), 0.5)
        for name, part in layers.items()
    }
    return {"tinted": LoraAdapter("tinted", {pair.ours.family.denoiser_name: pairs})}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "endings",
    [
        ("norm1.linear", "time_emb_proj"),
        ("timestep_embedder.linear_1", "time_embedding.linear_1"),
        ("context_embedder", "attn2.to_k"),
    ],
)
def test_a_lora_of_these_layers_acts(modulated, make_request, monkeypatch, endings):
    known = lora_of(modulated, endings)
    jobs = [make_request(), make_request(adapters=(AdapterUse("tinted", 1.0),))]
    states = [modulated.ours.start_request(job, modulated.conditioning(), known) for job in jobs]
    plain, tinted = all_latents(modulated, states)[-1]
    assert (plain - tinted).abs().max() > 1e-3
    monkeypatch.setattr(modulated.ours._modulation, "rows_of", lambda group: ())
    for job, latents in zip(jobs, (plain, tinted), strict=True):
        state = modulated.ours.start_request(job, modulated.conditioning(), known)
        assert torch.equal(all_latents(modulated, [state])[-1][0], latents)


AHEAD = [("norm1.linear", "time_emb_proj"), ("context_embedder", "attn2.to_k", "attn2.to_v")]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("endings", AHEAD)
@pytest.mark.parametrize(("num_images", "guidance"), [(2, 1.0), (3, 3.0)])
def test_a_lora_adds_to_what_is_known_already_for_each_image(
    modulated, make_request, monkeypatch, endings, num_images, guidance
):
    """One row of what is known stands for all images of a request."""
    known = lora_of(modulated, endings)
    scales = {"guidance_scale": guidance, "true_cfg_scale": guidance}
    job = make_request(adapters=(AdapterUse("tinted", 1.0),), num_images=num_images, **scales)

    def run():
        text = modulated.conditioning(negative=guidance > 1)
        return all_latents(modulated, [modulated.ours.start_request(job, text, known)])

    found = run()
    monkeypatch.setattr(modulated.ours._modulation, "rows_of", lambda group: ())
    assert all(torch.equal(one, other) for (one,), (other,) in zip(found, run(), strict=True))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("endings", AHEAD)
def test_a_lora_adds_once_where_a_forward_finds_no_memory_and_goes_on_in_halves(
    modulated, make_request, monkeypatch, endings
):
    known = lora_of(modulated, endings)
    scales = {"guidance_scale": 3.0, "true_cfg_scale": 3.0}
    job = make_request(adapters=(AdapterUse("tinted", 1.0),), num_images=2, **scales)

    def run():
        state = modulated.ours.start_request(job, modulated.conditioning(negative=True), known)
        return all_latents(modulated, [state])

    expected, rows = run(), []

    def refuse(_, args):  # when all layers have run
        rows.append(len(args[0]))
        if rows[-1] > 1:
            raise MemoryError("for so many rows")

    denoiser = modulated.ours.denoiser
    monkeypatch.setattr(modulated.ours, "_memory", MemoryLimits())
    last = denoiser.conv_out if hasattr(denoiser, "conv_out") else denoiser.proj_out
    with last.register_forward_pre_hook(refuse):
        found = run()
    assert rows[:3] == [4, 2, 1]
    assert all(torch.equal(one, other) for (one,), (other,) in zip(found, expected, strict=True))


@pytest.fixture
def count_text(monkeypatch):
    """Count the texts that go through the first layer that sees nothing else, in every call."""

    def count(pipeline):
        rows: list[int] = []
        watched = pipeline._modulation._text_layers[0]
        compute = type(watched).forward

        def counted(layer, x):
            if layer is watched:
                rows.append(len(x))
            return compute(layer, x)

        monkeypatch.setattr(type(watched), "forward", counted)
        return rows

    return count


@pytest.mark.drawn(2)
def test_what_sees_the_text_alone_runs_once(modulated, make_request, count_text):
    rows = count_text(modulated.ours)
    all_latents(modulated, start(modulated, make_request, 1, num_inference_steps=11))
    assert rows == [1, 1]  # of the prompt and the negative one


@pytest.mark.drawn(2)
def test_a_large_text_is_computed_step_by_step(modulated, make_request, count_text, monkeypatch):
    changes = {"num_inference_steps": 3}
    expected = all_latents(modulated, start(modulated, make_request, 1, **changes))
    monkeypatch.setattr("deployments.engines.diffusion.modulation.MAX_TEXT_BYTES", 0)
    rows = count_text(modulated.ours)
    found = all_latents(modulated, start(modulated, make_request, 1, **changes))
    assert rows == [2] * 3
    assert all(torch.equal(one, other) for (one,), (other,) in zip(found, expected, strict=True))


def test_nothing_stays_when_a_forward_fails(modulated, make_request, monkeypatch):
    (state,) = start(modulated, make_request, 1)
    denoiser = modulated.ours.denoiser
    monkeypatch.setattr(type(denoiser), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        modulated.ours.step([state])
    assert not [name for name, part in denoiser.named_modules() if "forward" in vars(part)]
