"""The names of a pipeline's solvers, without torch; `solvers.py` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deployments.engines.libraries.library_classes import has_part_class
from deployments.engines.records.protocol import EngineError

EULER: Final = "FlowMatchEulerDiscreteScheduler"
FLOWS: Final = (EULER, "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler")
# Noise solvers whose steps are those of a flow's.
SAME: Final[Mapping[str, str]] = {
    "EulerDiscreteScheduler": EULER,
    "DDIMScheduler": EULER,
    "HeunDiscreteScheduler": "FlowMatchHeunDiscreteScheduler",
    "LCMScheduler": "FlowMatchLCMScheduler",
}
ANCESTRAL: Final = "EulerAncestralDiscreteScheduler"
# Classes made for noise that solve flows if their config says so.
BOTH: Final = (
    *("DEISMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"),
    "UniPCMultistepScheduler",
)
OF_FLOWS: Final = frozenset({*FLOWS, *SAME, ANCESTRAL, *BOTH})
# Solvers over a schedule of betas: each runs with the config of any other, as stock's users swap them. LCM and TCD
# are in no class's `compatibles` in diffusers, though they read the same config; EDM is in all, and reads another one.
OF_BETAS: Final = frozenset(
    {
        *("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "EulerDiscreteScheduler"),
        *("HeunDiscreteScheduler", "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler"),
        *("DPMSolverSinglestepScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"),
        *("DEISMultistepScheduler", "UniPCMultistepScheduler", "DPMSolverSDEScheduler", "LCMScheduler"),
        *("TCDScheduler", "DPMSolver2SAncestralScheduler", "DPMSolver3MSDEScheduler"),
    }
)


def solves_flows(class_name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model's own solver, with its config, solves a flow."""
    return class_name in FLOWS or bool(config.get("use_flow_sigmas"))


def solvers_for(config: Mapping[str, Any]) -> list[str]:
    """Return the classes that a request may name for a model with this solver's config; its own comes first."""
    own = config.get("_class_name")
    if not isinstance(own, str):
        return []
    others = OF_FLOWS if solves_flows(own, config) else OF_BETAS if own in OF_BETAS else frozenset[str]()
    return [own, *sorted(others - {own})]


def check_solver(folder: Path, model_index: Mapping[str, Any]) -> str:
    """Return the class of the solver that a pipeline's model_index.json names. Raises EngineError unless it can run."""
    named = model_index.get("scheduler")
    library, class_name = map(str, named[:2]) if isinstance(named, list) and len(named) > 1 else (None, None)
    is_solver = library == "diffusers" and str(class_name).endswith("Scheduler")
    if class_name is None or not is_solver or not has_part_class("diffusers", class_name):
        raise EngineError(f"{folder}: model_index.json names solver {library}.{class_name}; expected one of diffusers")
    return class_name
