"""Modulation computed ahead for the steps of a request has the bits of what each step computes for itself."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.diffusion.modulation import MAX_PARTS, NUM_ROWS
from deployments.engines.protocol import AdapterUse
from weights.adapters import LoraAdapter, LoraPair


@pytest.fixture(params=["flux", "stable_diffusion_3"])
def modulated(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def count_calls(monkeypatch):
    """Count the rows that go through the embedding of time and text, in every call."""

    def count(pipeline):
        rows: list[int] = []
        embedding_class = type(pipeline.denoiser.time_text_embed)
        compute = embedding_class.forward

        def counted(embedding, *inputs):
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


@pytest.mark.parametrize("num_states", [1, 3])
def test_has_the_bits_of_steps_that_compute_for_themselves(modulated, make_request, monkeypatch, num_states):
    changes = {"num_inference_steps": 11, "num_images": 2}
    ahead = all_latents(modulated, start(modulated, make_request, num_states, **changes))
    monkeypatch.setattr(modulated.ours._modulation, "rows_of", lambda group: ())
    expected = all_latents(modulated, start(modulated, make_request, num_states, **changes))
    assert len(ahead) == 11
    for one, other in zip(ahead, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_one_computation_serves_many_steps(modulated, make_request, count_calls):
    rows = count_calls(modulated.ours)
    (state,) = states = start(modulated, make_request, 1, num_inference_steps=11)
    all_latents(modulated, states)
    assert rows == [NUM_ROWS, 3 * 2]  # eight steps of two branches, and what is left
    assert len(state.ahead) == 2


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


@pytest.mark.parametrize("ending", ["norm1.linear", "timestep_embedder.linear_1"])
def test_a_lora_of_these_layers_acts(modulated, make_request, monkeypatch, ending):
    layers = {name: part for name, part in modulated.ours.denoiser.named_modules() if name.endswith(ending)}
    pairs = {
        name: LoraPair(torch.randn(2, part.in_features), torch.randn(part.out_features, 2), 0.5)
        for name, part in layers.items()
    }
    known = {"tinted": LoraAdapter("tinted", {"transformer": pairs})}
    jobs = [make_request(), make_request(adapters=(AdapterUse("tinted", 1.0),))]
    states = [modulated.ours.start_request(job, modulated.conditioning(), known) for job in jobs]
    plain, tinted = all_latents(modulated, states)[-1]
    assert (plain - tinted).abs().max() > 1e-3
    monkeypatch.setattr(modulated.ours._modulation, "rows_of", lambda group: ())
    for job, latents in zip(jobs, (plain, tinted), strict=True):
        state = modulated.ours.start_request(job, modulated.conditioning(), known)
        assert torch.equal(all_latents(modulated, [state])[-1][0], latents)


def test_nothing_stays_when_a_forward_fails(modulated, make_request, monkeypatch):
    (state,) = start(modulated, make_request, 1)
    denoiser = modulated.ours.denoiser
    monkeypatch.setattr(type(denoiser), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        modulated.ours.step([state])
    assert not [name for name, part in denoiser.named_modules() if "forward" in vars(part)]
