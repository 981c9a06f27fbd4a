"""Errors of the control plane.

ClusterError
├── ModelUnknown                 no model of that name is registered
├── ModelUnavailable             the model is registered, but its weights cannot be used; names file and tensor
├── ImportFailed                 the import process of a checkpoint crashed, or passed a limit
├── RegistrationRefused          the model cannot be registered or removed as asked; nothing has changed
│   └── RegistrationConflict     it conflicts with what is registered already
├── OverrideRefused              an order by hand cannot be followed; nothing has changed
├── KeeperFailed                 a node's keeper cannot start; names the reason
├── PeerUnavailable              another node's keeper cannot give an extent; storage or another peer may
│   ├── PeerBusy                 it has no free connection or slot now (peers/connections.py)
│   └── FetchFailed              no peer is left, and bytes are missing (peers/client.py)
├── SessionError                 the Ray session cannot be started, reached or stopped
└── ProxyUnavailable             HAProxy cannot be used here; names the reason, and Serve's own proxy takes its place
"""

from __future__ import annotations


class ClusterError(Exception):
    """Any failure of the control plane. The message is its only argument, so that it survives an actor call."""


class ModelUnknown(ClusterError):
    """No model of that name is registered. The message lists known names."""


class ModelUnavailable(ClusterError):
    """The model is registered, but its weights cannot be used."""


class ImportFailed(ClusterError):
    """The import process of a checkpoint crashed, or took more time or memory than its limits allow."""


class RegistrationRefused(ClusterError):
    """A model cannot be registered or removed as asked. Nothing has changed."""


class RegistrationConflict(RegistrationRefused):
    """A registration or removal conflicts with the cluster config or with what is registered already."""


class OverrideRefused(ClusterError):
    """A pin, freeze or drain names a worker or model that nobody knows, or cannot be kept. Nothing has changed."""


class KeeperFailed(ClusterError):
    """A node's keeper cannot start."""


class PeerUnavailable(ClusterError):
    """Another node's keeper is gone, too slow, busy, or does not have the extent."""


class SessionError(ClusterError):
    """The Ray session cannot be started, reached or stopped."""


class ProxyUnavailable(ClusterError):
    """HAProxy cannot be used on this machine. Serve's own proxy can."""
