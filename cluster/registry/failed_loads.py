"""Which replicas could not load which models: a model is unavailable when none is left that might. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

MAX_REASONS: Final = 4  # of replicas, in a message
NODE_LETTERS: Final = 8  # of a node's id, in a message


class FailedLoads:
    """The failures of each model's served version, by replica. Replicas are named as Ray names their actors."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], dict[str, str]] = {}

    def note_failure(self, model: str, version: str, replica: str, node: str, error: str) -> None:
        """Take in that a replica could not load a version. What is known of other versions is forgotten."""
        self._forget_other_versions(model, version)
        where = f"{_short(replica)} on node {node[:NODE_LETTERS]}"
        self._failed.setdefault((model, version), {})[replica] = f"{where}: {error}"

    def note_load(self, model: str, version: str, replica: str) -> None:
        """Take in that a replica has loaded it."""
        failed = self._failed.get((model, version), {})
        if failed.pop(replica, None) and not failed:
            del self._failed[model, version]

    def models(self) -> list[tuple[str, str]]:
        """Return the models and versions that some replica could not load."""
        return list(self._failed)

    def forget_ended(self, running: Collection[str]) -> None:
        """Forget the failures of replicas that do not run any more."""
        for key, failed in list(self._failed.items()):
            self._failed[key] = {replica: error for replica, error in failed.items() if replica in running}
            if not self._failed[key]:
                del self._failed[key]

    def forget_model(self, model: str) -> None:
        """Forget a model that has gone, or gets a new version."""
        self._forget_other_versions(model, "")

    def why_unavailable(self, model: str, version: str, running: Collection[str]) -> str:
        """Return the reasons of all replicas of a deployment, where all have failed; "" while one may load it.

        A replica that is not among the `running` ones, because nobody has heard of it yet, is no other.
        """
        failed = self._failed.get((model, version), {})
        for deployment in sorted({_deployment(replica) for replica in failed}):
            all_ = {name for name in (*running, *failed) if _deployment(name) == deployment}
            if all_ <= failed.keys():
                errors = [failed[name] for name in sorted(all_)]
                more = [f"and {len(errors) - MAX_REASONS} more replicas"] if len(errors) > MAX_REASONS else []
                return "; ".join([*errors[:MAX_REASONS], *more])
        return ""

    def _forget_other_versions(self, model: str, version: str) -> None:
        for key in [key for key in self._failed if key[0] == model and key[1] != version]:
            del self._failed[key]


def _deployment(replica: str) -> str:
    return replica.rpartition("#")[0]


def _short(replica: str) -> str:
    """Return a replica's name as status pages have it: `worker abc` of `SERVE_REPLICA::studio#worker#abc`."""
    return " ".join(replica.split("#")[-2:])
