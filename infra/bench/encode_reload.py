"""A load of the encoder for every request: `reload_ms` runs `python -m infra.bench.encode_reload FOLDER N`.

N torch threads. Reads a JSON list of texts from stdin, prints a JSON list of milliseconds; imports are not counted,
and neither is a first load, which imports some more.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, T5EncoderModel
from transformers.models.auto import AutoConfig, AutoModel


def reload_ms(folder: Path, texts: Sequence[str], num_threads: int) -> list[float]:
    """Return milliseconds per text when each request loads the encoder for itself, in a process of its own."""
    command = [sys.executable, "-m", "infra.bench.encode_reload", str(folder), str(num_threads)]
    done = subprocess.run(command, input=json.dumps(list(texts)), capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print_times(folder: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    texts = json.load(sys.stdin)
    times_ms = []
    for text in [texts[0], *texts]:
        start = time.perf_counter()
        _encode(folder, text)
        gc.collect()
        times_ms.append((time.perf_counter() - start) * 1e3)
    sys.stdout.write(json.dumps(times_ms[1:]) + "\n")


def _encode(folder: str, text: str) -> list[float]:
    """Return the mean over a text's tokens, as both models pool."""
    is_t5 = AutoConfig.from_pretrained(folder).model_type == "t5"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = (T5EncoderModel if is_t5 else AutoModel).from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    mean: list[float] = hidden[0].mean(dim=0).tolist()
    return mean


if __name__ == "__main__":
    _print_times(sys.argv[1], int(sys.argv[2]))
