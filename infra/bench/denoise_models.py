"""The model that `infra.bench denoise` measures: stock, ours, and ours without what makes it batch-invariant."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.graph.replay import Replays
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.records.protocol import ConditionedRequest, DiffusionRequest

SIDE_PX: Final = 32
NUM_TOKENS: Final = 16
TEXT_WIDTH: Final = 64
POOLED_WIDTH: Final = 32
GUIDANCE: Final = 3.0
_TRANSFORMER: Final = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 8,
    "joint_attention_dim": TEXT_WIDTH,
    "pooled_projection_dim": POOLED_WIDTH,
    "guidance_embeds": True,
    "axes_dims_rope": (8, 12, 12),
}
_VAE: Final = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "latent_channels": 4,
    "shift_factor": 0.1,
    "scaling_factor": 0.5,
}


@dataclass(frozen=True, eq=False)
class BenchModel:
    """One pipeline three times, with equal weights. `stock` is diffusers' own, saved in `folder`."""

    folder: Path
    stock: Any
    ours: DenoisePipeline
    plain: DenoisePipeline

    def request(
        self, num_steps: int, *, seed: int, num_tokens: int = NUM_TOKENS, side_px: int = SIDE_PX, **asked: Any
    ) -> ConditionedRequest:
        """Return a request with a random text that follows from its seed; `asked` are fields of ConditionedRequest."""
        request = DiffusionRequest(str(seed), side_px, side_px, num_steps, GUIDANCE, seed)
        return ConditionedRequest(request, _text(seed, num_tokens), **asked)

    def stock_images(self, seeds: Sequence[int], num_steps: int, side_px: int = SIDE_PX) -> None:
        """Make the images of `request` with stock, those of all seeds as one batch."""
        texts = [_text(seed, NUM_TOKENS) for seed in seeds]
        self.stock(
            prompt_embeds=torch.cat([text["prompt_embeds"] for text in texts]),
            pooled_prompt_embeds=torch.cat([text["pooled_prompt_embeds"] for text in texts]),
            width=side_px,
            height=side_px,
            num_inference_steps=num_steps,
            guidance_scale=GUIDANCE,
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="np",
        )

    @contextlib.contextmanager
    def counting_forwards(self) -> Iterator[Callable[[], int]]:
        """Count the forwards of our denoiser."""
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        hook = self.ours.denoiser.register_forward_hook(note)
        try:
            yield lambda: count
        finally:
            hook.remove()


@contextlib.contextmanager
def make_model(seed: int) -> Iterator[BenchModel]:
    """Make the model, whose weights are random."""
    torch.manual_seed(seed)
    transformer = diffusers.FluxTransformer2DModel(**_TRANSFORMER).eval()
    vae = diffusers.AutoencoderKL(**_VAE).eval()
    solver = diffusers.FlowMatchEulerDiscreteScheduler()
    stock = diffusers.FluxPipeline(solver, vae, None, None, None, None, transformer)
    stock.set_progress_bar_config(disable=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock.save_pretrained(folder)

        def pipeline() -> DenoisePipeline:
            modules = {"transformer": copy.deepcopy(transformer), "vae": copy.deepcopy(vae)}
            return create_pipeline("FluxPipeline", folder, modules, replays=Replays())

        ours, plain = pipeline(), pipeline()
        _make_plain(plain.denoiser)
        yield BenchModel(folder, stock, ours, plain)


def _make_plain(module: torch.nn.Module) -> None:
    """Undo `make_batch_invariant`."""
    for part in module.modules():
        if type(part).__module__ == make_batch_invariant.__module__:
            part.__class__ = type(part).__bases__[0]


def _text(seed: int, num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(1, num_tokens, TEXT_WIDTH, generator=generator),
        "pooled_prompt_embeds": torch.randn(1, POOLED_WIDTH, generator=generator),
    }
