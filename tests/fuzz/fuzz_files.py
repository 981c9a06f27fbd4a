"""Coverage-guided fuzzing of every reader of model files, with atheris, which nothing else needs: `make fuzz`.

    python tests/fuzz/fuzz_files.py {headers,models} CORPUS -max_total_time=600 -timeout=20 -rss_limit_mb=3072

`headers` parses headers and JSON files, `models` opens language models and asks them for tokens. The folder is the
corpus; where it is empty, one valid input per parser is written into it. The first byte picks the parser, the rest is
the file. A finding is any exception but a WeightsError or an EngineError, a tensor outside of its file, an input that
takes more than -timeout seconds, or memory beyond -rss_limit_mb. libFuzzer writes the input to `crash-<sha1>`; run the
target with that file in the place of the folder to see it again. Put what was found into a unit test.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["weights", "deployments"]):
    from header_parsers import with_other_numbers

    from weights.records.errors import WeightsError

    kind = sys.argv[1]
    if kind == "headers":
        from header_parsers import PARSERS as parsers
        from header_parsers import valid_inputs

        expected: tuple[type[Exception], ...] = (WeightsError,)
    else:
        from model_parsers import MODELS as parsers
        from model_parsers import valid_models as valid_inputs

        from deployments.engines.records.protocol import EngineError

        expected = (WeightsError, EngineError)


def write_seeds(corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        inputs = valid_inputs(Path(scratch))
    for number, name in enumerate(parsers):
        (corpus / name).write_bytes(bytes([number]) + inputs[name])


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Leave some changes to libFuzzer, whose own mostly break a file's frame."""
    draw = random.Random(seed)
    return atheris.Mutate(data, max_size) if draw.random() < 0.3 else data[:1] + with_other_numbers(data[1:], draw)


def main() -> None:
    logging.getLogger("deployments").setLevel(logging.CRITICAL)  # what is odd in a million files
    corpus = Path(sys.argv[2])
    if not corpus.is_file() and not (corpus.is_dir() and any(corpus.iterdir())):
        write_seeds(corpus)
    chosen: list[Callable[[Path, bytes], None]] = list(parsers.values())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def run_one(data: bytes) -> None:
            if data:
                with contextlib.suppress(*expected):
                    chosen[data[0] % len(chosen)](folder, data[1:])

        atheris.Setup([sys.argv[0], *sys.argv[2:]], run_one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
