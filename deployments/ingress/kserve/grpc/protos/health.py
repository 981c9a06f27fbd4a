"""Messages of `health.proto`. Their types are in the stub beside this file."""

from deployments.ingress.kserve.grpc import protos

globals().update(protos.names_of("health.proto"))
