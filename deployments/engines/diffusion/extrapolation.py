"""Steps without a forward: the model's output there is a Taylor polynomial of its outputs at the last computed steps.

TaylorSeer (2503.06923) on the model's whole output, like diffusers' `TaylorSeerCacheConfig(use_lite_mode=True)`,
but over the noise level instead of the number of the step: schedules are not even. It belongs to one request, so that
those with and without it share forwards, whatever their steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from configs.options import Acceleration
from deployments.engines.graph.workspace import UNBOUNDED, Workspace

_SURE: Final = 1e-9  # a share of the output's norm: the least error assumed of a prediction


class Extrapolation:
    """The outputs of a request's computed steps as factors of a polynomial: float32, of the output's shape.

    `levels` are the noise levels of its steps, falling. The factors count in `workspace`; a request that finds no room
    for them computes its steps.
    """

    def __init__(self, rule: Acceleration, levels: Sequence[float], workspace: Workspace = UNBOUNDED) -> None:
        self._rule, self._levels, self._workspace = rule, levels, workspace
        self._factors: list[torch.Tensor] = []
        self._computed = -1  # the last computed step
        self._gap = 1  # from there to the next one, where the interval adapts

    def skips(self, step: int) -> bool:
        """Return whether a step, counted from 0, takes no forward."""
        if self._rule.max_error is None:
            return bool(self._factors) and not self._rule.computes(step)
        return step >= self._rule.warmup and step - self._computed < self._gap

    def num_computed(self, step: int) -> int:
        """Return the number of forwards from this step on. An adapting interval is taken as it is now."""
        left = len(self._levels) - step
        if self._rule.max_error is None:
            return self._rule.num_computed(len(self._levels), step)
        return -(-left // self._gap)

    def note(self, step: int, output: torch.Tensor) -> None:
        """Take in the output of a computed step. A second call for the same step changes nothing."""
        found = output.to(torch.float32, copy=True)  # a view would keep the outputs of the whole batch
        if self._rule.max_error is not None and len(self._factors) > 1 and step > self._computed:
            self._gap = self._adapted(step, found, self._rule.max_error)
        distance = 0.0 if self._computed < 0 else self._levels[step] - self._levels[self._computed]
        factors, older = [found], self._factors[: self._rule.order]
        if distance:
            for factor in older:
                factors.append((factors[-1] - factor) / distance)
        else:  # a second evaluation at the same level, as second-order solvers make one
            factors += self._factors[1:]
        self._keep(factors)
        self._computed = step

    def predict(self, step: int) -> torch.Tensor:
        """Return the predicted output of a step, float32."""
        distance = self._levels[step] - self._levels[self._computed]
        found, *others = self._factors
        for power, factor in enumerate(others, 1):
            found = torch.add(found, factor, alpha=distance**power / math.factorial(power))
        return found

    def _adapted(self, step: int, found: torch.Tensor, max_error: float) -> int:
        """Return the distance to the next computed step. An error grows by a power of the distance from the last.

        Waits for the device.
        """
        error = float((self.predict(step) - found).norm() / found.norm().clamp_min(_SURE))
        if not math.isfinite(error):
            return 1
        reach = (step - self._computed) * (max_error / max(error, _SURE)) ** (1 / len(self._factors))
        return max(1, min(self._rule.interval, math.floor(reach)))

    def _keep(self, factors: list[torch.Tensor]) -> None:
        counted = {id(factor) for factor in self._factors}
        added = [factor for factor in factors if id(factor) not in counted]
        if all(self._workspace.take_unbudgeted(factor.untyped_storage(), factor.nbytes) for factor in added):
            self._factors = factors
        else:
            self._factors, self._gap = [], 1

    def save(self) -> dict[str, Any]:
        """Return the state that `restore` continues from: numbers and tensors."""
        return {"factors": list(self._factors), "computed": self._computed, "gap": self._gap}

    def restore(self, saved: dict[str, Any], device: torch.device) -> None:
        """Continue from a saved state."""
        self._computed, self._gap = saved["computed"], saved["gap"]
        self._keep([factor.to(device) for factor in saved["factors"]])


def noise_levels(solver: Any) -> list[float]:
    """Return the noise level of each timestep of a solver: its sigmas, or the timesteps if it has none."""
    timesteps = [float(one) for one in solver.timesteps.tolist()]
    sigmas = getattr(solver, "sigmas", None)
    if sigmas is None or len(sigmas) < len(timesteps):
        return timesteps
    return [float(one) for one in torch.as_tensor(sigmas).tolist()[: len(timesteps)]]
