"""Protocol buffer messages of the gRPC edge, in a descriptor pool of their own.

Generated `_pb2` modules register in the one default pool of the process. Clients of the same protocol (tritonclient,
kserve) bring theirs with the same names, and the second import fails; grpcio-health-checking is the same
for `grpc.health.v1`. So the descriptors are shipped as data, and the classes are made here from a private pool.
`open_inference.proto` has the command that makes the generated files again.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message_factory import GetMessageClass


def _loaded() -> Any:
    pool = DescriptorPool()
    shipped = resources.files(__name__).joinpath("descriptors.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(shipped).file:
        pool.Add(file)
    return pool


POOL: Any = _loaded()


def names_of(path: str) -> dict[str, Any]:
    """Return the top names of a generated module of that .proto file: message classes, enums, DESCRIPTOR."""
    file = POOL.FindFileByName(path)
    messages = {name: GetMessageClass(message) for name, message in file.message_types_by_name.items()}
    enums = {name: EnumTypeWrapper(enum) for name, enum in file.enum_types_by_name.items()}
    values = {value.name: value.number for enum in file.enum_types_by_name.values() for value in enum.values}
    return {"DESCRIPTOR": file, **messages, **enums, **values}
