"""Errors of the control plane.

ClusterError
├── ModelUnknown                 no model of that name is registered
├── WeightsUnavailable           the model is registered, but its weights cannot be used; names file and tensor
├── ModelUnservable              a checkpoint that no engine could run; names what it is and what there are engines for
├── ModelTooLarge                the model needs more memory than the config's budgets have; names both
├── ImportFailed                 the import process of a checkpoint crashed, or passed a limit
├── RegistrationRefused          the model cannot be registered or removed as asked; nothing has changed
│   └── RegistrationConflict     it conflicts with what is registered already
├── OverrideRefused              an order by hand cannot be followed; nothing has changed
│   └── NotKept                  the disk does not take what is to survive; also a RegistrationRefused
├── JobsFull                     the key, or the disk, has as many jobs as it may have
├── JobConflict                  the idempotency key is that of another request
├── FileInUse                    a batch that has not ended reads the file
├── JobsUnavailable              the folder of jobs cannot be used now; names the reason
├── KeeperFailed                 a node's keeper cannot start; names the reason
├── PeerUnavailable              another node's keeper cannot give an extent; storage or another peer may
│   ├── PeerBusy                 it has no free connection or slot now (peers/connections.py)
│   └── FetchFailed              no peer is left, and bytes are missing (peers/client.py)
├── SessionError                 the Ray session cannot be started, reached or stopped
├── RayIncompatible              this version of Ray lacks private names that Atelier needs; names them
└── ProxyUnavailable             HAProxy cannot be used here; names the reason, and Serve's own proxy takes its place
"""

from __future__ import annotations


class ClusterError(Exception):
    """Any failure of the control plane. The message is its only argument, so that it survives an actor call."""


class ModelUnknown(ClusterError):
    """No model of that name is registered. The message lists known names."""


class WeightsUnavailable(ClusterError):
    """The model is registered, but its weights cannot be used."""


class ModelUnservable(ClusterError):
    """A checkpoint is sound, and no engine could run it. Nothing of it was read but headers and configs."""


class ModelTooLarge(ClusterError):
    """The model is sound, and the budgets of this cluster have no room for it, even alone."""


class ImportFailed(ClusterError):
    """The import process of a checkpoint crashed, or took more time or memory than its limits allow."""


class RegistrationRefused(ClusterError):
    """A model cannot be registered or removed as asked. Nothing has changed.

    `field` of the entry is why, None where no field is; the message begins with its name.
    """

    def __init__(self, problem: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


class RegistrationConflict(RegistrationRefused):
    """A registration or removal conflicts with the cluster config or with what is registered already."""


class OverrideRefused(ClusterError):
    """A pin, freeze or drain names a worker or model that nobody knows, or cannot be kept. Nothing has changed."""


class NotKept(RegistrationRefused, OverrideRefused):
    """The store's disk does not take, or let go of, what is to survive a restart. The order was sound."""


class JobsFull(ClusterError):
    """A key has as many unfinished jobs as it may have, or all of them together as many bytes. Nothing was kept."""


class JobConflict(ClusterError):
    """A key has sent another request with the same idempotency key. Nothing was kept."""


class FileInUse(ClusterError):
    """A batch that has not ended reads the file. It stays."""


class JobsUnavailable(ClusterError):
    """The folder of jobs cannot be used now. What was kept there stays."""


class KeeperFailed(ClusterError):
    """A node's keeper cannot start."""


class PeerUnavailable(ClusterError):
    """Another node's keeper is gone, too slow, busy, or does not have the extent."""


class RayIncompatible(ClusterError):
    """This version of Ray lacks private names that Atelier needs."""


class SessionError(ClusterError):
    """The Ray session cannot be started, reached or stopped."""


class ProxyUnavailable(ClusterError):
    """HAProxy cannot be used on this machine. Serve's own proxy can."""
