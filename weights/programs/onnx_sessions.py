"""Sessions of onnxruntime over weights that exist already. The package is optional.

What onnxruntime has of its own beside the weights: what `graph_for_session` leaves in the graph, and what it computes
of weights alone when it opens a session (a transposed matrix). Prepacking would copy every matrix, and is off.
While a session opens, it copies all weights, and lets go of the copy.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weights.records.errors import FormatError, WeightsError

# They make new weights of several: queries, keys and values in one matrix, a convolution and its norm in one.
_COPYING: Final = ("AttentionFusion", "ConvBNFusion", "ConvMulFusion", "MatMulBNFusion")
_NO_LOG: Final = 4  # only what is fatal: errors are raised as well


def onnxruntime() -> Any:
    """Return the package. Raises WeightsError with the extra that has it."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError:
        raise WeightsError("an ONNX model needs onnxruntime to be served: pip install 'atelier-serve[onnx]'") from None


def open_session(
    path: Path, graph: bytes, weights: Mapping[str, Any], *, num_threads: int = 1, optimized: bool = True
) -> Any:
    """Open the model `graph`, whose initializers are `weights`, OrtValues by name.

    HAZARD: the session reads their memory and does not keep it alive. Libraries of custom operators are never loaded.
    Raises FormatError for an operator or an opset that onnxruntime lacks, and for a graph that is unsound.
    """
    package = onnxruntime()
    options = package.SessionOptions()
    levels = package.GraphOptimizationLevel
    # All of them would also reorder the weights of convolutions.
    options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if optimized else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = _NO_LOG
    options.enable_mem_pattern = False  # a plan for every shape that ever came would stay
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # replicas share cores
    for name, value in weights.items():
        options.add_initializer(name, value)  # without it the next line copies
    options.add_external_initializers(list(weights), list(weights.values()))
    try:
        return package.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(_COPYING)
        )
    except Exception as error:  # its kinds of errors have no base of their own
        raise FormatError(f"{path}: onnxruntime {package.__version__} cannot run it: {error_text(error)}") from None


def run_options() -> Any:
    """Return the options of every run: its memory is one arena, without which each result costs new pages.

    At its end the arena goes back, for the largest request's would stay.
    """
    options = onnxruntime().RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def error_text(error: Exception) -> str:
    """Return onnxruntime's message in one line, without places in its source."""
    text = " ".join(str(error).split())
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+ .*?\) (?=[A-Z])", "", text)
    return (text.rpartition("Status Message: ")[2] or type(error).__name__)[:300]
