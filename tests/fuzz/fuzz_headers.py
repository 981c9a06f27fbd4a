"""Coverage-guided fuzzing of every header parser, with atheris (`pip install atheris`; nothing else needs it).

    python tests/fuzz/fuzz_headers.py --write-seeds out/fuzz          # one valid input per parser
    python tests/fuzz/fuzz_headers.py out/fuzz -max_total_time=600 -timeout=10 -rss_limit_mb=2048 -max_len=65536

The first byte picks the parser, the rest is the file. A finding is any exception but a WeightsError, a tensor outside
of its file, an input that takes more than -timeout seconds, or memory beyond -rss_limit_mb. libFuzzer writes the input
to `crash-<sha1>`; run the target with that file as only argument to see it again. Put what was found into
tests/unit/weights/formats as a test.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["weights"]):
    from header_parsers import PARSERS, valid_inputs

    from weights.errors import WeightsError

_PARSERS = list(PARSERS.values())


def write_seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        inputs = valid_inputs(Path(scratch))
    for number, name in enumerate(PARSERS):
        (folder / name).write_bytes(bytes([number]) + inputs[name])


def main() -> None:
    if sys.argv[1:2] == ["--write-seeds"]:
        write_seeds(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def run_one(data: bytes) -> None:
            if data:
                with contextlib.suppress(WeightsError):
                    _PARSERS[data[0] % len(_PARSERS)](folder, data[1:])

        atheris.Setup(sys.argv, run_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
