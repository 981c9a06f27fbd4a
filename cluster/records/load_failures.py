"""Failures to load models: which replica could not load which version, why, and for how long it is spared. Pure.

A worker has a book of its own, which it reports; a queue has one of each deployment, to give requests to other
replicas; the registry has one of the cluster, to say that a model is unavailable. A replica is tried again after a time
that doubles with each failure in a row, and at once for another version of the model. Who replaces it has another name,
and begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

LONGEST_RETRY_S: Final = 60.0
MAX_REASONS: Final = 4  # of replicas, in a message
NODE_LETTERS: Final = 8  # of a node's id, in a message


def retry_after_s(num_failures: int) -> float:
    """Return the seconds until a model is loaded again that has failed so many times in a row."""
    return min(2.0 ** (min(max(num_failures, 1), 32) - 1), LONGEST_RETRY_S)


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that failed `num` times in a row, the last time at `at_s`."""

    num: int
    at_s: float
    error: str

    @property
    def until_s(self) -> float:
        """The time from which the replica may try again."""
        return self.at_s + retry_after_s(self.num)


class LoadFailures:
    """The failures of each model's last version, by replica. Times are parameters, of one clock.

    Failures that are less than `one_load_s` apart are of one load, and count as one.
    """

    def __init__(self, one_load_s: float = 0.0) -> None:
        self._one_load_s = one_load_s
        self._failed: dict[tuple[str, str], dict[str, FailedLoad]] = {}

    def note_failure(self, model: str, version: str, replica: str, now_s: float, error: str = "") -> None:
        """Take in that a replica could not load a version. What is known of other versions is forgotten."""
        self.forget_model(model, version)
        failed = self._failed.setdefault((model, version), {})
        before = failed.get(replica)
        num = before.num + (now_s - before.at_s >= self._one_load_s) if before else 1
        failed[replica] = FailedLoad(num, now_s, error)

    def note_load(self, model: str, version: str, replica: str) -> None:
        """Take in that a replica has loaded it."""
        failed = self._failed.get((model, version))
        if failed and failed.pop(replica, None) and not failed:
            del self._failed[model, version]

    def keep_replicas(self, names: Collection[str]) -> None:
        """Forget the failures of replicas that are not there any more."""
        for key, failed in list(self._failed.items()):
            self._failed[key] = {replica: one for replica, one in failed.items() if replica in names}
            if not self._failed[key]:
                del self._failed[key]

    def forget_before(self, at_s: float) -> None:
        """Forget the failures of loads that were not tried since `at_s`."""
        for key, failed in list(self._failed.items()):
            self._failed[key] = {replica: one for replica, one in failed.items() if one.at_s >= at_s}
            if not self._failed[key]:
                del self._failed[key]

    def of_replica(self, replica: str) -> dict[tuple[str, str], FailedLoad]:
        """Return the failures of one replica, by model and version."""
        return {key: failed[replica] for key, failed in self._failed.items() if replica in failed}

    def forget_model(self, model: str, but: str | None = None) -> None:
        """Forget a model that has gone, or gets a new version, `but` one version."""
        for key in [key for key in self._failed if key[0] == model and key[1] != but]:
            del self._failed[key]

    def models(self) -> list[tuple[str, str]]:
        """Return the models and versions that some replica could not load."""
        return list(self._failed)

    def unable(self, model: str, version: str, now_s: float) -> frozenset[str]:
        """Return the replicas that are not to load it now."""
        failed = self._failed.get((model, version)) if self._failed else None
        return frozenset([replica for replica, one in failed.items() if now_s < one.until_s] if failed else ())

    def why_unavailable(self, model: str, version: str, running: Collection[str]) -> str:
        """Return the reasons of all replicas of a deployment, where all have failed; "" while one may load it.

        Replicas are named as Ray names their actors. One that is not among the `running` ones, because it was not
        reported yet, is no other.
        """
        failed = self._failed.get((model, version), {})
        for deployment in sorted({_deployment(replica) for replica in failed}):
            all_ = {name for name in (*running, *failed) if _deployment(name) == deployment}
            if all_ <= failed.keys():
                return joined_errors([failed[name].error for name in sorted(all_)], "replicas")
        return ""


def named_error(replica: str, node: str, error: str) -> str:
    """Return an error with its replica as status pages have it: `worker abc`, of `SERVE_REPLICA::studio#worker#abc`."""
    return f"{' '.join(replica.split('#')[-2:])} on node {node[:NODE_LETTERS]}: {error}"


def joined_errors(errors: Sequence[str], kind: str) -> str:
    """Return the first of these errors in a row, and how many more there are of that kind."""
    more = [f"and {len(errors) - MAX_REASONS} more {kind}"] if len(errors) > MAX_REASONS else []
    return "; ".join([*errors[:MAX_REASONS], *more])


def _deployment(replica: str) -> str:
    return replica.rpartition("#")[0]
