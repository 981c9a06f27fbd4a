"""Messages of `open_inference.proto`. Their types are in the stub beside this file."""

from deployments.ingress.kserve.grpc import protos

globals().update(protos.names_of("open_inference.proto"))
