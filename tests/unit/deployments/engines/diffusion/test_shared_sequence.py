"""Forwards whose tokens ranks share, of each class of diffusers that may, against the same forward on one rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from kit.ranks import run_ranks

from deployments.engines.diffusion.shared_sequence import SHARED_CLASSES, CannotShare, shared_sequence
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout

TEXT, ROWS = 16, 2
Case = tuple[Any, dict[str, Any]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ids(*sizes: int) -> torch.Tensor:
    return torch.cartesian_prod(*map(torch.arange, sizes)).float()


def flux() -> Case:
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=12, pooled_projection_dim=6, axes_dims_rope=(2, 2, 4), guidance_embeds=True,
    )  # fmt: skip
    return model, {
        "hidden_states": random(ROWS, 24, 16),
        "encoder_hidden_states": random(ROWS, TEXT, 12),
        "pooled_projections": random(ROWS, 6),
        "timestep": torch.tensor([0.7, 0.2]),
        "guidance": torch.tensor([3.0, 2.0]),
        "img_ids": ids(1, 4, 6),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def flux2() -> Case:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=24, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": random(ROWS, 24, 16),
        "encoder_hidden_states": random(ROWS, TEXT, 24),
        "timestep": torch.tensor([0.7, 0.2]),
        "guidance": torch.tensor([3.0, 2.0]),
        "img_ids": ids(1, 4, 6, 1)[None],
        "txt_ids": ids(1, 1, 1, TEXT)[None],
    }


def qwen_image() -> Case:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    mask = torch.ones(ROWS, TEXT, dtype=torch.bool)
    mask[1, 11:] = False
    return model, {
        "hidden_states": random(ROWS, 24, 16),
        "encoder_hidden_states": random(ROWS, TEXT, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.7, 0.2]),
        "img_shapes": [[(1, 4, 6)]] * ROWS,
    }


def of_wan(kind: Any, **own: Any) -> Case:
    model = kind(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=16, ffn_dim=16, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32, **own,
    )  # fmt: skip
    return model, {
        "hidden_states": random(ROWS, 16, 2, 4, 8),
        "encoder_hidden_states": random(ROWS, TEXT, 16),
        "timestep": torch.tensor([700, 200]),
    }


def ltx() -> Case:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4, attention_head_dim=8,
        cross_attention_dim=32, num_layers=2, caption_channels=16,
    )  # fmt: skip
    mask = torch.ones(ROWS, TEXT)
    mask[1, 11:] = 0
    return model, {
        "hidden_states": random(ROWS, 24, 8),
        "encoder_hidden_states": random(ROWS, TEXT, 16),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([700, 200]),
        **{"num_frames": 2, "height": 3, "width": 4},
    }


def ltx2(rope_type: str = "split") -> Case:
    """Its sound has a number of tokens that no ranks divide, and so may its text."""
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        audio_in_channels=6, audio_out_channels=6, audio_num_attention_heads=4, audio_attention_head_dim=4,
        audio_cross_attention_dim=16, num_layers=2, caption_channels=16, rope_type=rope_type,
        rope_double_precision=False, use_keyframes_abs_pos_embedding=True,
    )  # fmt: skip
    mask = torch.ones(ROWS, TEXT - 1)
    mask[1, 11:] = 0
    return model, {
        "hidden_states": random(ROWS, 24, 8),
        "audio_hidden_states": random(ROWS, 7, 6),
        "encoder_hidden_states": random(ROWS, TEXT - 1, 16),
        "audio_encoder_hidden_states": random(ROWS, TEXT - 1, 16),
        **{"encoder_attention_mask": mask, "audio_encoder_attention_mask": mask},
        "timestep": torch.rand(ROWS, 24) * 1000,
        "audio_timestep": torch.tensor([700.0, 200.0]),
        "video_keyframes_mask": torch.randint(0, 2, (ROWS, 24, 1)),
        **{"num_frames": 2, "height": 3, "width": 4, "audio_num_frames": 7},
    }


def helios(**own: Any) -> Case:
    """Its last frames are tokens as well, and those of long ago few."""
    model = diffusers.HeliosTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=16, ffn_dim=16, num_layers=2, rope_dim=(4, 4, 4), **own,
    )  # fmt: skip
    frames = torch.arange(4).expand(ROWS, -1)
    return model, {
        "hidden_states": random(ROWS, 16, 2, 4, 8),
        "encoder_hidden_states": random(ROWS, TEXT - 1, 16),
        "timestep": torch.tensor([700, 200]),
        "indices_hidden_states": frames[:, 2:],
        "indices_latents_history_short": frames[:, :2],
        "latents_history_short": random(ROWS, 16, 2, 4, 8),
    }


CASES: dict[str, Callable[[], Case]] = {
    "FluxTransformer2DModel": flux,
    "Flux2Transformer2DModel": flux2,
    "QwenImageTransformer2DModel": qwen_image,
    "WanTransformer3DModel": lambda: of_wan(diffusers.WanTransformer3DModel),
    "ChronoEditTransformer3DModel": lambda: of_wan(diffusers.ChronoEditTransformer3DModel),
    "LTXVideoTransformer3DModel": ltx,
    "LTX2VideoTransformer3DModel": ltx2,
    "HeliosTransformer3DModel": helios,
}
FORMS = {**CASES, "LTX-2 as it was at first": lambda: ltx2("interleaved")}
PLAN = "\n    _cp_plan = {\n"
UNSERVED = {"MiniMaxH3Transformer3DModel"}  # no pipeline class of diffusers has it


def test_each_class_that_may_share_is_judged() -> None:
    assert CASES.keys() == SHARED_CLASSES
    files = [file.read_text("utf-8") for file in Path(diffusers.__file__).parent.glob("models/**/*.py")]
    planned = {
        re.findall(r"^class (\w+)", text[: text.index(PLAN)], re.MULTILINE)[-1] for text in files if PLAN in text
    }
    assert planned == SHARED_CLASSES | UNSERVED


def made(name: str) -> Case:
    model, inputs = FORMS[name]()
    model.eval().requires_grad_(False)
    for parameter in model.parameters():  # some begin as zeros, behind which nothing is seen
        parameter += 0.1 * torch.randn_like(parameter)
    return model, inputs


def cloned(model: Any) -> Any:
    """Return another module over the same weights: ranks of a test are threads, and each has hooks of its own."""
    other = type(model).from_config(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.drawn(over="count")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_a_shared_forward_is_that_of_one_rank(name: str, count: int) -> None:
    """Attention sums the keys in another order: float32 differs by that alone."""
    model, inputs = made(name)
    expected = model(**inputs, return_dict=False)

    def rank_of(group: RankGroup) -> tuple[tuple[torch.Tensor, ...], int]:
        own = cloned(model)
        with torch.no_grad(), shared_sequence(own, group):
            found = own(**inputs, return_dict=False)
        return found, group.sent_bytes["sequence"]

    for found, sent in run_ranks(RankLayout(sequence=count), rank_of):
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())
        assert sent > 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", CASES)
def test_tokens_or_heads_that_are_no_multiple_are_told_on_each_rank(name: str) -> None:
    """All ranks find it before one waits for another, so that each may go on alone."""
    model, inputs = made(name)
    expected = model(**inputs, return_dict=False)[0]

    def rank_of(group: RankGroup) -> torch.Tensor:
        own = cloned(model)
        with torch.no_grad():
            with pytest.raises(CannotShare, match="are no multiple of 5 ranks"), shared_sequence(own, group):
                own(**inputs, return_dict=False)
            found: torch.Tensor = own(**inputs, return_dict=False)[0]
        return found

    for found in run_ranks(RankLayout(sequence=5), rank_of):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("case", "given", "said"),
    [
        (flux, {"joint_attention_kwargs": {"attention_mask": torch.zeros(1, 1, 40, 40)}}, r"a mask \[1, 1, 40, 40\]"),
        (lambda: helios(is_amplify_history=True), {}, "with is_amplify_history counts its tokens"),
    ],
)
def test_what_an_attention_needs_of_all_tokens_is_told_on_each_rank(
    case: Callable[[], Case], given: dict[str, Any], said: str
) -> None:
    model, inputs = case()
    model.requires_grad_(False)

    def rank_of(group: RankGroup) -> None:
        own = cloned(model)
        with torch.no_grad(), pytest.raises(CannotShare, match=said), shared_sequence(own, group):
            own(**inputs, **given)

    run_ranks(RankLayout(sequence=2), rank_of)
