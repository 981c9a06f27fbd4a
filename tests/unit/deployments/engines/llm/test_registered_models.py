"""What is registered as a language model can answer; what cannot is refused before, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.scripted_llm import BEGIN, save_scripted_llm
from safetensors.torch import load_file, save_file

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed


def with_config(**fields: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | fields
        written = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(written))

    return changed


def with_generation(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "generation_config.json").write_text(text) and None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_tensors(lambda t: t.update({"model.layers.0.self_attn.masked_bias": torch.tensor(-1e9)})), None),
        (with_tensors(lambda t: t.update({"v_head.summary.weight": torch.zeros(1, 64)})), None),
        (with_tensors(lambda t: t.pop("lm_head.weight")), "'lm_head.weight' is missing"),
        (with_tensors(lambda t: t.pop("model.norm.weight")), "'model.norm.weight' is missing"),
        (with_tensors(lambda t: t.pop("model.layers.0.self_attn.k_proj.weight")), "k_proj.weight' is missing"),
        (with_generation('{"eos_token_id": 1,'), "generation_config.json: cannot be read as JSON"),
        (with_generation('{"do_sample": false, "top_p": 0.0}'), None),
        (with_generation('{"temperature": -1, "repetition_penalty": 0, "max_new_tokens": 0}'), None),
        (with_config(pad_token_id=-1), None),
        (with_config(architectures=None), None),
    ],
)
def test_what_is_ready_answers(change: Callable[[Path], None], reason: str | None, tmp_path: Path) -> None:
    save_scripted_llm(tmp_path, ["ok"], "{{ messages }}" + BEGIN)
    change(tmp_path)
    refused = why_unservable(read_checkpoint(tmp_path))
    if reason is not None:
        assert reason in str(refused)
        return
    assert refused is None
    config = LLMEngineConfig(kv_cache_bytes=2**22)
    engine = LLMEngine(tmp_path, load_file(tmp_path / "model.safetensors"), config)
    sampling = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, **engine.generation_defaults})
    engine.add_request(TextRequest("r", engine.encode_text(BEGIN), sampling))
    text = ""
    while engine.has_work:
        text += "".join(delta.text for delta in engine.step())
    assert text == "ok"
