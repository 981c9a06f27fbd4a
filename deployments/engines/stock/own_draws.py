"""The default random streams as a call has them: pipelines draw from them where they forget their generator.

A latent of a control image, say, is sampled so. With streams of its own a request makes the same of the same seed, in
any company.
"""

from __future__ import annotations

import torch

_State = tuple[torch.Tensor, torch.Tensor | None]


class OwnDraws:
    """The default streams of the CPU and of a call's device, put in with each of its turns and taken out after it."""

    def __init__(self, seed: int, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._own: _State = (_seeded("cpu", seed), _seeded(self._device, seed) if self._device else None)
        self._others: _State | None = None

    def take(self) -> None:
        """Go on where the call was."""
        self._others = self._states()
        self._set_states(self._own)

    def give_back(self) -> None:
        """Let the others go on where they were."""
        if self._others is not None:
            self._own = self._states()
            self._set_states(self._others)
            self._others = None

    def _states(self) -> _State:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if self._device else None

    def _set_states(self, states: _State) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None and self._device is not None:
            torch.cuda.set_rng_state(states[1], self._device)


def _seeded(device: torch.device | str, seed: int) -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()
