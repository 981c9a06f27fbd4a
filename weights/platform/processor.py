"""The element types that this machine's processor computes with: in others a model is slower by ten times and more.

Measured over torch 2.13 (oneDNN), two cores with AMX: a convolution of 128 channels takes 75 ms in float32, and 1040 ms
in float16, which the processor lacks. With its AVX-512 alone bfloat16 takes 72 ms, with AVX2 alone 1090 ms.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Final

from weights.records.dtypes import auto_without

# Any one of the flags is enough, x86's or ARM's. AVX-512BW makes bfloat16 wide as fast as it is read.
_FLAGS_OF: Final = {
    "BF16": frozenset({"avx512_bf16", "amx_bf16", "avx512bw", "bf16"}),
    "F16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


def processor_flags() -> frozenset[str]:
    """Return the names of what this machine's processor can do; none where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def processor_name() -> str:
    """Return the name of this machine's processor, or its architecture if the system has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def auto_dtype(device: str, flags: Collection[str]) -> str:
    """Return the meaning of the dtype `auto` for workers on `device`, on a processor with these flags.

    On the processor itself the types that it lacks become float32. Without any flags nothing is known, and nothing
    changes.
    """
    if device not in ("cpu", "cpu-private") or not flags:
        return "auto"
    return auto_without(name for name, enough in _FLAGS_OF.items() if enough.isdisjoint(flags))
