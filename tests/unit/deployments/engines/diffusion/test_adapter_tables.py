"""Each file of the tables of adapters: what registers has an effect on a request, the rest is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.engines.records.protocol import AdapterUse
from deployments.engines.servable import why_unservable
from infra.supported.adapters import DENOISERS, KINDS, LAYOUTS, file_of, form_of
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase
from weights.operations.adapters import load_adapter


def first_step(pair: Any, request: Any, adapters: Any = None) -> torch.Tensor:
    state = pair.ours.start_request(request, pair.conditioning(negative=True), adapters)
    pair.ours.step([state])
    return state.latents


@pytest.mark.drawn(12)
@pytest.mark.parametrize("row", [*LAYOUTS, *KINDS])
def test_what_registers_answers_a_request(
    pair: Any, row: str, make_request: Callable[..., Any], tmp_path: Path
) -> None:
    class_name = pair.ours.family.class_name
    denoiser = next(one for one in DENOISERS if one.pipeline == class_name)
    tensors = file_of(denoiser, pair.ours.denoiser, *form_of(row))
    file = tmp_path / "style.safetensors"
    save_file(tensors, file)
    parts = {part.name: part for part in read_checkpoint(pair.folder).components}
    base = AdapterBase("base", "diffusion", class_name, pair.folder, parts)
    if refusal := why_unservable(read_checkpoint(file), (base,)):
        assert str(file) in refusal
        assert any(name in refusal for name in tensors), "it names the tensor"
        return
    request = make_request(guidance_scale=2.0, adapters=(AdapterUse("style", 0.8),))
    found = first_step(pair, request, {"style": load_adapter(file)})
    assert found.isfinite().all()
    assert not torch.equal(found, first_step(pair, make_request(guidance_scale=2.0)))
