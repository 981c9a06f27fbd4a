"""The header of a torch.export archive, read as JSON before torch opens it: its operators, and the classes it gives.

torch.export.load says of a file that it cannot read no more than "check the warnings above".
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import torch

from weights.errors import FormatError

_MAX_HEADER_BYTES: Final = 2**28
_OPERATOR: Final = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
# Classes of outputs that a library registers with torch when it is imported.
_OUTPUT_CLASS: Final = re.compile(r'"type": "((?:transformers|diffusers)(?:\.\w+)+)\.\w+"')


def check_archive(path: Path, file: Path | io.BytesIO) -> None:
    """Import what the archive's outputs are classes of. Raises FormatError for no archive, and for a missing operator.

    Only modules of transformers and diffusers are imported, by a name that lies in them.
    """
    header = _header(path, file)
    module = header.get("graph_module")
    graph = module.get("graph") if isinstance(module, dict) else None
    if not isinstance(module, dict) or not isinstance(graph, dict) or not isinstance(graph.get("nodes"), list):
        raise FormatError(f"{path}: not a torch.export program: its header has no graph")
    targets = {str(node.get("target")) for node in graph["nodes"] if isinstance(node, dict)}
    if missing := sorted(target for target in targets if not _is_known(target)):
        version = header.get("torch_version", "an unknown torch")
        raise FormatError(
            f"{path}: operator {missing[0]!r} is missing in torch {torch.__version__} (exported with {version})"
        )
    for name in sorted(set(_OUTPUT_CLASS.findall(_specs(module)))):
        with contextlib.suppress(ImportError):  # torch will say that it does not know the class
            importlib.import_module(name)


def _header(path: Path, file: Path | io.BytesIO) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if re.fullmatch(r"[^/]+/models/[^/]+\.json", info.filename)]
            if len(infos) != 1:
                raise FormatError(f"{path}: not a torch.export program: {len(infos)} models, expected one")
            if infos[0].file_size > _MAX_HEADER_BYTES:
                raise FormatError(
                    f"{path}: a header of {infos[0].file_size} bytes, at most {_MAX_HEADER_BYTES} are read"
                )
            header = json.loads(archive.read(infos[0]))
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a torch.export program: {type(error).__name__}: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: not a torch.export program: its header is a {type(header).__name__}")
    return header


def _is_known(target: str) -> bool:
    """Return whether torch has the operator; what is none (a Python function, say) is for torch to judge."""
    found = _OPERATOR.fullmatch(target)
    if found is None:
        return True
    namespace, name, overload = found.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and (overload is None or namespace == "higher_order" or hasattr(packet, overload))


def _specs(module: dict[str, Any]) -> str:
    calls = module.get("module_call_graph")
    signatures = [call.get("signature") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return "\n".join(str(one.get("out_spec")) for one in signatures if isinstance(one, dict))
