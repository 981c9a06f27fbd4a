"""Errors of the control plane.

ClusterError
├── ModelUnknown        no model of that name is registered
├── ModelUnavailable    registered, but its weights cannot be used; says which file and tensor
├── ImportFailed        the process that was to bring a checkpoint into the store crashed, or took too much
├── RegistrationRefused a model that cannot be registered or removed as asked; nothing has changed
│   └── RegistrationConflict    because of what is registered already
├── KeeperFailed        a node's keeper cannot start; says why
├── PeerUnavailable     another node's keeper cannot give an extent; the caller turns to storage or another peer
└── SessionError        the Ray session cannot be started, reached or stopped
"""

from __future__ import annotations


class ClusterError(Exception):
    """Anything that goes wrong in the control plane. The message is one string, so it survives an actor call."""


class ModelUnknown(ClusterError):
    """No model of that name is registered."""


class ModelUnavailable(ClusterError):
    """The model is registered, but its weights cannot be used."""


class ImportFailed(ClusterError):
    """The process that was to bring a checkpoint into the store crashed, or took more time or memory than it may."""


class RegistrationRefused(ClusterError):
    """A model cannot be registered or removed as asked; nothing has changed."""


class RegistrationConflict(RegistrationRefused):
    """What is registered already stands against it."""


class KeeperFailed(ClusterError):
    """A node's keeper cannot start."""


class PeerUnavailable(ClusterError):
    """Another node's keeper is gone, too slow, or does not have the extent."""


class SessionError(ClusterError):
    """The Ray session cannot be started, reached or stopped."""
