"""The peer of `atelier bench serve`, `switch` and `door`: stock libraries in one process, driven over stdin.

Run as a program. Each line in is a JSON object with `do`; each line out is a JSON object with `ms` and the answer.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer


class _StockModels:
    """Models as a user without a serving system keeps them in a process."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def load_model(self, model: str, path: str, drop: list[str], dtype: str = "float32", touch: bool = False) -> None:
        """Load with `from_pretrained`, after dropping the models in `drop`. Tensors may be mapped files that nobody has
        read: `touch` reads every byte of them."""
        if drop:
            self.drop_models(drop)
        if (Path(path) / "model_index.json").exists():
            pipeline = DiffusionPipeline.from_pretrained(path, torch_dtype=getattr(torch, dtype))
            pipeline.set_progress_bar_config(disable=True)
            self._loaded[model] = pipeline
            if touch:
                _touch(pipeline)
        else:
            language_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            self._loaded[model] = (language_model, AutoTokenizer.from_pretrained(path))

    def drop_models(self, models: list[str]) -> None:
        """Let go of them. Their modules are in reference cycles: the memory is free when those have been found."""
        for name in models:
            self._loaded.pop(name, None)
        gc.collect()

    def keep_weights(self, model: str) -> None:
        """Hold a loaded pipeline's weights in memory of their own, which `move_weights` copies from."""
        weights = _parameters(self._loaded[model])
        self._kept[model] = {name: parameter.data.clone() for name, parameter in weights.items()}

    def move_weights(self, model: str, away: list[str]) -> None:
        """Copy every weight of `model`, as `pipeline.to(device)` does, with the CPU as the device.

        In the peer's favour, models in `away` only lose their copies: nothing is copied back.
        """
        for name in away:
            self._point(name, copy=False)
        self._point(model, copy=True)

    def find_model(self, model: str) -> None:
        """Look the model up: a switch when everything stays resident."""
        self._loaded[model]

    def make_image(self, model: str, prompt: str, seed: int, options: dict[str, Any]) -> None:
        self._loaded[model](prompt, generator=torch.Generator("cpu").manual_seed(seed), **options)

    def answer_question(self, model: str, question: str, max_new_tokens: int = 16) -> str:
        language_model, tokenizer = self._loaded[model]
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = language_model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def embed_text(self, model: str, text: str) -> None:
        """Encode with the CLIP half of a loaded Flux pipeline."""
        pipeline = self._loaded[model]
        with torch.no_grad():
            pipeline._get_clip_prompt_embeds(text)

    def load_sentence_model(self, model: str, path: str) -> None:
        """Load with sentence-transformers."""
        from sentence_transformers import SentenceTransformer

        self._loaded[model] = SentenceTransformer(path, device="cpu")

    def embed_sentence(self, model: str, text: str) -> None:
        self._loaded[model].encode(text)

    def _point(self, model: str, copy: bool) -> None:
        kept = self._kept[model]
        for name, parameter in _parameters(self._loaded[model]).items():
            parameter.data = kept[name].clone() if copy else kept[name]


def _parameters(pipeline: Any) -> dict[str, torch.nn.Parameter]:
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{part}.{name}": value for part, module in modules.items() for name, value in module.named_parameters()}


def _touch(pipeline: Any) -> None:
    for parameter in _parameters(pipeline).values():
        np.bitwise_or.reduce(parameter.detach().reshape(-1).view(torch.uint8).numpy())


def _serve_orders() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    models = _StockModels()
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
    _serve_orders()
