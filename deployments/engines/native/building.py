"""Compile quantized.cpp: at installation beside it (hatch_build.py), else at first use into the user's cache.

Standard library only: the build hook runs this file by its path, before anything is installed. One library holds a
variant per instruction set, so it runs on any x86-64 processor; its name is a hash of what it was made of. It ends
with the sha256 of the bytes before: the processor faults where a library that was cut short is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("quantized.cpp")
COMPILE_TIMEOUT_S = 300
COMPILERS = ("g++", "c++", "clang++")
_DIGEST_BYTES = 32
# Without -fno-trapping-math, GCC computes AVX2's exponentials one by one; the flags of traps are read by nobody.
_BASE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-trapping-math", "-Wno-uninitialized")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# Names of the variants in the order of preference, with what the compiler needs and what the processor must have.
VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512": (_AVX512, frozenset({"avx512_vnni", "avx512vl", "avx512bw", "avx512dq"})),
    "avx2": (_AVX2, frozenset({"avx2", "fma", "f16c"})),
}


class BuildFailed(Exception):
    """There is no library: no compiler, another kind of processor, or the compiler's complaint."""


def library_name() -> str:
    """Return the file name that says what the library was compiled from."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for header in sorted(SOURCE.parent.glob("*.h")):
        digest.update(header.read_bytes())
    # HAZARD: a set's order differs from process to process, and with it the name would.
    digest.update(repr((_BASE_FLAGS, [(name, flags) for name, (flags, _) in VARIANTS.items()])).encode())
    return f"quantized-{digest.hexdigest()[:16]}.so"


def built_library(folder: Path) -> Path:
    """Return the library beside the source or in `folder`, compiling it into `folder` when neither is whole.

    Processes that start together wait for the first one. Raises BuildFailed.
    """
    installed, cached = SOURCE.with_name(library_name()), folder / library_name()
    for library in (installed, cached):
        if is_whole(library):
            return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return cached if is_whole(cached) else build_library(folder)
    except OSError as error:
        raise BuildFailed(f"{folder}: {error.strerror or error}") from None


def is_whole(library: Path) -> bool:
    """Return whether a file is there, and ends with the hash of what is before."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def build_library(folder: Path) -> Path:
    """Compile every variant and link them into `folder`. Raises BuildFailed with the compiler's last lines."""
    compiler = _compiler()
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        raise BuildFailed(f"the kernels are for x86-64 Linux, this is {platform.system()} {platform.machine()}")
    target = folder / library_name()
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = []
            for name, (flags, _) in VARIANTS.items():
                objects.append(f"{scratch}/{name}.o")
                _run_compiler([*compiler, *_BASE_FLAGS, *flags, f"-DISA={name}", "-c", str(SOURCE), "-o", objects[-1]])
            linked = Path(scratch) / target.name
            _run_compiler([*compiler, "-shared", "-fopenmp", *objects, "-o", str(linked)])
            linked.write_bytes((content := linked.read_bytes()) + hashlib.sha256(content).digest())
            linked.replace(target)
    except OSError as error:
        raise BuildFailed(f"{folder}: {error.strerror or error}") from None
    return target


def _compiler() -> list[str]:
    """Return the compiler's command. Raises BuildFailed."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]) is None:
        raise BuildFailed(f"the compiler that CXX names, {named[0]!r}, is not there or cannot be run")
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if not named and found is None:
        raise BuildFailed(f"no C++ compiler: CXX is not set, and none of {', '.join(COMPILERS)} is on the PATH")
    return named or [str(found)]


def _run_compiler(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s") from None
    except OSError as error:  # a script whose interpreter is not there, say
        raise BuildFailed(f"{command[0]} cannot be run: {error.strerror or error}") from None
    if done.returncode:
        raise BuildFailed(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
