"""Kinds of nodes that sample, and of the noise, samplers and guiders that they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, get_args

from configs.options import SamplerName
from deployments.workflows.backend import Catalog
from deployments.workflows.kinds import MAX_SEED, Kind, Output, boolean, choice, integer, link, number
from deployments.workflows.records import Refused
from deployments.workflows.sampling import levels_of_model, sampled
from deployments.workflows.schedules import SCHEDULES, Levels, schedule
from deployments.workflows.values import Conditioning, Guider, Latent, Later, ModelValue, Noise, Plan, Sampler, Sigmas

# These schedule a step more, and leave the last level but one out.
_ONE_MORE: Final = ("dpm_2", "dpm_2_ancestral", "uni_pc", "uni_pc_bh2")
_FULL: Final = 0.9999  # from this part on, all of a schedule runs
_MAX_STEP: Final = 10_000


def _planned_sigmas(levels: Levels, sampler: str, scheduler: str, steps: int, denoise: float) -> Sigmas:
    """Return the levels of KSampler."""
    own = steps + 1 if sampler in _ONE_MORE else steps

    def of(number: int) -> Sigmas:
        found = schedule(scheduler, levels, number)
        return (*found[:-2], found[-1]) if sampler in _ONE_MORE else found

    if denoise > _FULL:
        return of(own)
    if denoise <= 0:
        return ()
    most = int(steps / denoise)
    return of(most + 1 if sampler in _ONE_MORE else most)[-(steps + 1) :]


def _ksampler(
    catalog: Catalog, seed: int, steps: int, scheduler: str, denoise: float, **given: Any
) -> tuple[Latent, ...] | Later:
    sigmas = _scheduled(catalog, given, scheduler, steps, denoise)
    return sampled(catalog, _plan(sigmas, seed, adds_noise=True, **given))


def _ksampler_advanced(
    catalog: Catalog,
    add_noise: str,
    noise_seed: int,
    steps: int,
    scheduler: str,
    start_at_step: int,
    end_at_step: int,
    return_with_leftover_noise: str,
    **given: Any,
) -> tuple[Latent, ...] | Later:
    sigmas = _scheduled(catalog, given, scheduler, steps, 1.0)
    if end_at_step < len(sigmas) - 1:
        sigmas = sigmas[: end_at_step + 1]
        if return_with_leftover_noise == "disable":
            sigmas = (*sigmas[:-1], 0.0)
    sigmas = sigmas[start_at_step:] if start_at_step < len(sigmas) - 1 else ()
    return sampled(catalog, _plan(sigmas, noise_seed, adds_noise=add_noise == "enable", **given))


def _scheduled(catalog: Catalog, given: Mapping[str, Any], scheduler: str, steps: int, denoise: float) -> Sigmas:
    return _planned_sigmas(levels_of_model(catalog, given["model"]), given["sampler_name"], scheduler, steps, denoise)


def _plan(
    sigmas: Sigmas,
    seed: int,
    *,
    adds_noise: bool,
    model: ModelValue,
    cfg: float,
    sampler_name: str,
    positive: Conditioning,
    negative: Conditioning,
    latent_image: Latent,
) -> Plan:
    """Return the plan of what both kinds of KSampler are given."""
    return Plan(model, positive, negative, cfg, Sampler(sampler_name), sigmas, seed, adds_noise, latent_image)


def _custom(
    catalog: Catalog,
    model: ModelValue,
    add_noise: bool,
    noise_seed: int,
    cfg: float,
    positive: Conditioning,
    negative: Conditioning,
    sampler: Sampler,
    sigmas: Sigmas,
    latent_image: Latent,
) -> tuple[Latent, ...] | Later:
    plan = Plan(model, positive, negative, cfg, sampler, sigmas, noise_seed, add_noise, latent_image)
    return sampled(catalog, plan, with_clean=True)


def _custom_advanced(
    catalog: Catalog, noise: Noise, guider: Guider, sampler: Sampler, sigmas: Sigmas, latent_image: Latent
) -> tuple[Latent, ...] | Later:
    if guider.kind == "dual_cfg":
        raise Refused("guidance by two prompts is not computed here", "guider")
    adds = noise.seed is not None
    plan = Plan(
        guider.model,
        guider.positive,
        guider.negative,
        guider.scale,
        sampler,
        sigmas,
        noise.seed or 0,
        adds,
        latent_image,
    )
    return sampled(catalog, plan, with_clean=True)


def _basic_guider(model: ModelValue, conditioning: Conditioning) -> tuple[Guider]:
    return (Guider("basic", model, conditioning),)


def _cfg_guider(model: ModelValue, positive: Conditioning, negative: Conditioning, cfg: float) -> tuple[Guider]:
    return (Guider("cfg", model, positive, negative, cfg),)


def _random_noise(noise_seed: int) -> tuple[Noise]:
    return (Noise(noise_seed),)


def _no_noise() -> tuple[Noise]:
    return (Noise(None),)


def _select(sampler_name: str) -> tuple[Sampler]:
    return (Sampler(sampler_name),)


def _ancestral(eta: float, s_noise: float) -> tuple[Sampler]:
    return (Sampler("euler_ancestral", (("eta", eta), ("s_noise", s_noise))),)


_MODEL: Final = link("model", "MODEL")
_POSITIVE, _NEGATIVE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING")
_LATENT: Final = replace(link("latent_image", "LATENT"), takes_videos=True)
_SAMPLER: Final = link("sampler", "SAMPLER")
_SIGMAS: Final = link("sigmas", "SIGMAS")
_STEPS: Final = integer("steps", 20, 1, _MAX_STEP)
_CFG: Final = number("cfg", 8.0, 0.0, 100.0)
_SAMPLER_NAME: Final = choice("sampler_name", get_args(SamplerName))
_SCHEDULER: Final = choice("scheduler", tuple(SCHEDULES))
_DENOISE: Final = number("denoise", 1.0, 0.0, 1.0)
_ENABLE: Final = ("enable", "disable")
_OUT_SAMPLER: Final = (Output("SAMPLER"),)
_OUT_BOTH: Final = (Output("LATENT", "output"), Output("LATENT", "denoised_output"))


def _sampling(name: str, inputs: tuple[Any, ...], outputs: tuple[Output, ...], function: Any) -> Kind:
    return Kind(name, inputs, outputs, function, is_opaque=True, reads_catalog=True, category="sampling")


SAMPLERS: Final = (
    _sampling(
        "KSampler",
        (
            *(_MODEL, integer("seed", 0, 0, MAX_SEED), _STEPS, _CFG, _SAMPLER_NAME, _SCHEDULER),
            *(_POSITIVE, _NEGATIVE, _LATENT, _DENOISE),
        ),
        (Output("LATENT"),),
        _ksampler,
    ),
    _sampling(
        "KSamplerAdvanced",
        (
            *(_MODEL, choice("add_noise", _ENABLE), integer("noise_seed", 0, 0, MAX_SEED), _STEPS, _CFG),
            *(_SAMPLER_NAME, _SCHEDULER, _POSITIVE, _NEGATIVE, _LATENT),
            *(integer("start_at_step", 0, 0, _MAX_STEP), integer("end_at_step", _MAX_STEP, 0, _MAX_STEP)),
            choice("return_with_leftover_noise", ("disable", "enable")),
        ),
        (Output("LATENT"),),
        _ksampler_advanced,
    ),
    _sampling(
        "SamplerCustom",
        (
            *(_MODEL, boolean("add_noise", True), integer("noise_seed", 0, 0, MAX_SEED), _CFG, _POSITIVE, _NEGATIVE),
            *(_SAMPLER, _SIGMAS, _LATENT),
        ),
        _OUT_BOTH,
        _custom,
    ),
    _sampling(
        "SamplerCustomAdvanced",
        (link("noise", "NOISE"), link("guider", "GUIDER"), _SAMPLER, _SIGMAS, _LATENT),
        _OUT_BOTH,
        _custom_advanced,
    ),
    Kind("BasicGuider", (_MODEL, link("conditioning", "CONDITIONING")), (Output("GUIDER"),), _basic_guider),
    Kind("CFGGuider", (_MODEL, _POSITIVE, _NEGATIVE, _CFG), (Output("GUIDER"),), _cfg_guider),
    Kind("RandomNoise", (integer("noise_seed", 0, 0, MAX_SEED),), (Output("NOISE"),), _random_noise),
    Kind("DisableNoise", (), (Output("NOISE"),), _no_noise),
    Kind("KSamplerSelect", (_SAMPLER_NAME,), _OUT_SAMPLER, _select),
    Kind(
        "SamplerEulerAncestral",
        (number("eta", 1.0, 0.0, 100.0), number("s_noise", 1.0, 0.0, 100.0)),
        _OUT_SAMPLER,
        _ancestral,
    ),
)
