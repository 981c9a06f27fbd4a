"""Partial images of a replica whose model has a small VAE for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from unit.deployments.services.test_merged_images import DEMO, OpenHost, Studio, collect, open_studio, request_of

from configs.cluster import WorkerConfig
from deployments.modules.loading import ComponentBuilder
from deployments.records import ImageProgress

pytestmark = pytest.mark.slow  # imports diffusers
__all__ = ["open_studio"]


async def test_a_small_vae_of_the_model_makes_its_partial_images(
    open_host: OpenHost, open_studio: Callable[..., Studio], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, decodes = tmp_path / "flux", list[Any]()
    shutil.copytree(DEMO / "digits-flux", folder)
    own = json.loads((folder / "vae" / "config.json").read_text())
    sizes = [8] * len(own["block_out_channels"])
    small = diffusers.AutoencoderTiny(
        encoder_block_out_channels=sizes,
        decoder_block_out_channels=sizes,
        num_encoder_blocks=[1] * len(sizes),
        num_decoder_blocks=[1] * len(sizes),
        latent_channels=own["latent_channels"],
    )
    small.save_pretrained(folder / "preview_vae")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"preview_vae": ["diffusers", "AutoencoderTiny"]}))
    decode = diffusers.AutoencoderTiny.decode
    monkeypatch.setattr(
        diffusers.AutoencoderTiny, "decode", lambda *given, **more: decodes.append(1) or decode(*given, **more)
    )
    studio = Studio(open_host(ComponentBuilder(WorkerConfig()), {"flux": folder}, 2**30))
    pieces = await collect(studio, request_of(3, None, partial_images=1))
    (shown,) = (piece for piece in pieces if isinstance(piece, ImageProgress) and piece.previews)
    assert decodes
    assert shown.previews[0].shape == (16, 16, 3)
    assert np.array_equal(pieces[-1].images[0], await open_studio().draw(request_of(3, None)))
