"""Asks the demo pipelines by tritonclient: python ask_triton.py HOST:PORT FOLDER, in the judges' environment.

FOLDER/questions.json has `sums`, `seeds` and `texts`; `answers.json` is put beside it, with `images` as nested lists
(null where the pipeline refused) and `labels`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from tritonclient.http import InferAsyncRequest, InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

CONCURRENCY = 4


def main() -> None:
    client = InferenceServerClient(sys.argv[1], concurrency=CONCURRENCY, network_timeout=120.0)
    folder = Path(sys.argv[2])
    questions = json.loads((folder / "questions.json").read_text())
    pending = [
        client.async_infer("sum-to-digit", [texts("prompt", [prompt]), number("seed", seed)])
        for prompt, seed in zip(questions["sums"], questions["seeds"], strict=True)
    ]
    images = [image(answer) for answer in pending]
    labels = client.infer("text-classifier", [texts("text", questions["texts"])]).as_numpy("label")
    answers = {"images": images, "labels": [label.decode() for label in labels]}
    (folder / "answers.json").write_text(json.dumps(answers))


def image(pending: InferAsyncRequest) -> list | None:
    try:
        return pending.get_result().as_numpy("image")[0].tolist()
    except InferenceServerException as error:
        if error.status() != "400":
            raise
        return None  # the adder was wrong, and its answer is no digit


def texts(name: str, values: list[str]) -> InferInput:
    data = np.array([value.encode() for value in values], dtype=np.object_)
    return InferInput(name, data.shape, "BYTES").set_data_from_numpy(data)


def number(name: str, value: int) -> InferInput:
    return InferInput(name, [1], "INT64").set_data_from_numpy(np.array([value], np.int64))


if __name__ == "__main__":
    main()
