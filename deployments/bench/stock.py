"""The peer of `atelier bench serve`: stock diffusers and transformers in one process, driven over stdin.

Run as a program. Each line in is a JSON object with `do`; each line out is a JSON object with `ms` and the answer.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer


class StockModels:
    """What a user without a serving system keeps in a process."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def load(self, model: str, path: str, drop: list[str]) -> None:
        """`from_pretrained`, after letting go of the models in `drop`."""
        for name in drop:
            self._loaded.pop(name, None)
        gc.collect()
        if (Path(path) / "model_index.json").exists():
            pipeline = DiffusionPipeline.from_pretrained(path, torch_dtype=torch.float32)
            pipeline.set_progress_bar_config(disable=True)
            self._loaded[model] = pipeline
        else:
            language_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            self._loaded[model] = (language_model, AutoTokenizer.from_pretrained(path))

    def image(self, model: str, prompt: str, seed: int, options: dict[str, Any]) -> None:
        self._loaded[model](prompt, generator=torch.Generator("cpu").manual_seed(seed), **options)

    def chat(self, model: str, question: str) -> str:
        language_model, tokenizer = self._loaded[model]
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = language_model.generate(**inputs, max_new_tokens=16, do_sample=False)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def embed(self, model: str, text: str) -> None:
        """The CLIP half of a loaded Flux pipeline."""
        pipeline = self._loaded[model]
        with torch.no_grad():
            pipeline._get_clip_prompt_embeds(text)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    models = StockModels()
    sys.stdout.write(json.dumps({"ms": 0.0, "answer": "imported"}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        work = getattr(models, order.pop("do"))
        start = time.perf_counter()
        answer = work(**order)
        sys.stdout.write(json.dumps({"ms": (time.perf_counter() - start) * 1e3, "answer": answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
