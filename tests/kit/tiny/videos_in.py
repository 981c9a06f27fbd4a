"""Tiny random pipelines of classes that are given a video, or several images of one name."""

from __future__ import annotations

from typing import Any, Final

import diffusers
import transformers
from kit.tiny.classes import (
    AGAIN,
    BLOCKS_3D,
    IMAGE,
    T5_SIZE,
    VIDEO,
    Case,
    changed,
    clip_vision,
    control_net,
    image_processor,
    skyreels,
    small,
    wan_net,
)
from kit.tiny.clips import animate_diff, cogvideox


def animated(**own: Any) -> dict[str, Any]:
    base = animate_diff().components
    return {**base, **own}


def sparse_control_net() -> Any:
    return small(
        diffusers.SparseControlNetModel,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        attention_head_dim=4,
        conditioning_embedding_out_channels=(8, 8),
        conditioning_channels=3,
        motion_max_seq_length=8,
        motion_num_attention_heads=2,
        norm_num_groups=2,
        concat_conditioning_mask=False,
        use_simplified_condition_embedding=False,
    )


FRAMES: Final = {"height": 16, "width": 16, "num_frames": 4}
VIDEO_CASES: dict[str, Case] = {
    "AnimateDiffControlNetPipeline": Case(
        lambda: animated(controlnet=control_net(norm_num_groups=2)), FRAMES, ("conditioning_frames:4",)
    ),
    "AnimateDiffSparseControlNetPipeline": Case(
        lambda: animated(controlnet=sparse_control_net()),
        {**FRAMES, "controlnet_frame_indices": [0, 2]},
        ("conditioning_frames:2",),
    ),
    "AnimateDiffVideoToVideoControlNetPipeline": Case(
        lambda: animated(controlnet=control_net(norm_num_groups=2)),
        {"height": 16, "width": 16, **AGAIN},
        ("video:4", "conditioning_frames:4"),
    ),
    "AnimateDiffVideoToVideoPipeline": Case(animated, {"height": 16, "width": 16, **AGAIN}, ("video:4",)),
    "CogVideoXFunControlPipeline": Case(
        lambda: changed(cogvideox().components, in_channels=8),
        {"height": 16, "width": 16, "max_sequence_length": 16},
        ("control_video:9",),
    ),
    "CogVideoXVideoToVideoPipeline": Case(
        lambda: cogvideox().components,
        {"height": 16, "width": 16, "max_sequence_length": 16, **AGAIN},
        ("video:8",),
    ),
    "LucyEditPipeline": Case(
        lambda: {"transformer": wan_net(diffusers.WanTransformer3DModel, in_channels=32)},
        VIDEO,
        ("video:9",),
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": Case(skyreels, {**VIDEO, "overlap_history": 5}, ("video:9",)),
    "VideoToVideoSDPipeline": Case(
        lambda: {"unet": small(diffusers.UNet3DConditionModel, **BLOCKS_3D)}, AGAIN, ("video:3",)
    ),
    "WanAnimatePipeline": Case(
        lambda: {
            "transformer": small(
                diffusers.WanAnimateTransformer3DModel,
                attention_head_dim=12,
                in_channels=36,
                latent_channels=16,
                out_channels=16,
                image_dim=16,
                rope_max_seq_len=32,
                motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
                motion_encoder_size=16,
                motion_style_dim=8,
                motion_dim=4,
                motion_encoder_dim=16,
                face_encoder_hidden_dim=16,
                face_encoder_num_heads=2,
                inject_face_latents_blocks=1,
            ),
            "image_encoder": clip_vision(transformers.CLIPVisionModel),
            "image_processor": image_processor(),
        },
        {**T5_SIZE, "segment_frame_length": 5, "prev_segment_conditioning_frames": 1},
        (*IMAGE, "pose_video:5", "face_video:5"),
    ),
    "WanVideoToVideoPipeline": Case(
        lambda: {"transformer": wan_net(diffusers.WanTransformer3DModel)}, {**T5_SIZE, **AGAIN}, ("video:9",)
    ),
}
