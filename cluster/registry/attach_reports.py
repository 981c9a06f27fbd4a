"""What replicas say of the weights that they attach: a model is unusable where no replica of a deployment can. Pure.

One replica that cannot attach a model, on a node with a bad disk say, makes it unusable for nobody but itself.
"""

from __future__ import annotations

from collections.abc import Collection


class AttachReports:
    """The last word of each replica on each model, by deployment: workers and text encoders need other parts of it."""

    def __init__(self) -> None:
        self._errors: dict[str, dict[str, dict[str, str]]] = {}  # by model, deployment, replica; "" where it could

    def note(self, model: str, deployment: str, replica: str, error: str) -> None:
        """Take in that a replica could not attach the model, or, without an error, that it could."""
        self._errors.setdefault(model, {}).setdefault(deployment, {})[replica] = error

    def problem(self, model: str) -> str:
        """Return why no replica of some deployment can attach the model; "" where some can, or none has tried."""
        for by_replica in self._errors.get(model, {}).values():
            if by_replica and all(by_replica.values()):
                return list(by_replica.values())[-1]
        return ""

    def forget_model(self, model: str) -> None:
        """Forget a model that has gone, or has a new version."""
        self._errors.pop(model, None)

    def forget_replicas(self, names: Collection[str]) -> list[str]:
        """Forget replicas that have ended. Return the models that they had said something of."""
        told = []
        for model, by_deployment in self._errors.items():
            for by_replica in by_deployment.values():
                if gone := by_replica.keys() & set(names):
                    told.append(model)
                    for name in gone:
                        del by_replica[name]
        return told
