"""The language models of transformers that see images and are served: every class tiny, beside its own `generate`.

    python -m infra.supported.vision_models [CLASS ...]

prints a line for each class, and what a class differs by; one that differs ends the script with status 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.stock_classes import SEEING
from deployments.engines.records.protocol import SamplingParams, TextRequest
from infra.supported.language_models import MAX_ERROR, Answer, excess, run_apart

WORDS: Final = 80
_SPECIAL: Final = (
    *("<image>", "<boi>", "<eoi>", "<|video|>", "<video>", "<fake_token_around_image>", "<global-img>"),
    *("<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>", "<end>"),
    "<imgpad>",
)
# Some of them stand for images that are not there.
BANNED: Final = tuple((token, -100.0) for token in (0, *range(WORDS, WORDS + len(_SPECIAL))))  # w0 pads: it has no text
_PARTS: Final = (
    "{% for message in messages %}w1 {{ message['role'] }} {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %} w2 {% endfor %}w3"
)
_TEXT: Final = {
    "vocab_size": WORDS + len(_SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LLAMA: Final = _TEXT | {"model_type": "llama"}
_CLIP: Final = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 16,
}
_SIGLIP: Final = _CLIP | {"model_type": "siglip_vision_model"}
_IDEFICS: Final = {key: _CLIP[key] for key in _CLIP if key not in ("model_type", "projection_dim")}
_M_ROPE: Final = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_QWEN_VISION: Final = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
_QWEN3_VISION: Final = _QWEN_VISION | {
    "intermediate_size": 24,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}
_QWEN3_TEXT: Final = _TEXT | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_GEMMA_LAYERS: Final = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_SQUARE: Final = {"size": {"height": 16, "width": 16}}
_EDGE: Final = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_QWEN_SIZES: Final = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024, "merge_size": 2, "temporal_patch_size": 2}


class _Tiny(NamedTuple):
    """The configs of a tiny model: of its parts, of the whole, of its image processor and of its processor.

    `processor` makes the processor of the image processor and the tokenizer.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    whole: Mapping[str, Any]
    image_processor: Callable[[], Any]
    processor: Callable[[Any, Any], Any]
    template_token: str = "<image>"


def _library(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


def _processor(name: str, **options: Any) -> Callable[[Any, Any], Any]:
    """Return what makes a processor. A video processor needs torchvision; images need none."""

    def make(image_processor: Any, tokenizer: Any) -> Any:
        cls: Any = getattr(transformers, name)
        cls = type(name, (cls,), {"check_argument_for_proper_class": lambda *_: None})
        parts = dict.fromkeys(cls.get_attributes()) | {"image_processor": image_processor, "tokenizer": tokenizer}
        return cls(**parts, **options)

    return make


def _token(name: str) -> int:
    return WORDS + _SPECIAL.index(name)


_QWEN_TOKENS: Final = {
    "image_token_id": _token("<image>"),
    "video_token_id": _token("<video>"),
    "vision_start_token_id": _token("<boi>"),
    "vision_end_token_id": _token("<eoi>"),
}
_LLAVA: Final = {"image_token_index": _token("<image>"), "image_token_id": _token("<image>")}
_LLAVA_SIZES: Final = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
TINY: Final[Mapping[str, _Tiny]] = {
    "Qwen2VLForConditionalGeneration": _Tiny(
        _TEXT | _M_ROPE,
        {"depth": 2, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "mlp_ratio": 2},
        _QWEN_TOKENS,
        _library("Qwen2VLImageProcessorPil", **_QWEN_SIZES),
        _processor("Qwen2VLProcessor"),
    ),
    "Qwen2_5_VLForConditionalGeneration": _Tiny(
        _TEXT | _M_ROPE,
        _QWEN_VISION | {"intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1]},
        _QWEN_TOKENS,
        _library("Qwen2VLImageProcessorPil", **_QWEN_SIZES),
        _processor("Qwen2_5_VLProcessor"),
    ),
    "Qwen3VLForConditionalGeneration": _Tiny(
        _QWEN3_TEXT,
        _QWEN3_VISION,
        _QWEN_TOKENS,
        _library("Qwen2VLImageProcessorPil", **_QWEN_SIZES),
        _processor("Qwen3VLProcessor"),
    ),
    "Qwen3VLMoeForConditionalGeneration": _Tiny(
        _QWEN3_TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        _QWEN3_VISION,
        _QWEN_TOKENS,
        _library("Qwen2VLImageProcessorPil", **_QWEN_SIZES),
        _processor("Qwen3VLProcessor"),
    ),
    "Gemma3ForConditionalGeneration": _Tiny(
        _TEXT | _GEMMA_LAYERS | {"query_pre_attn_scalar": 8},
        _SIGLIP | {"vision_use_head": False},
        {"mm_tokens_per_image": 16, "image_token_index": _token("<image>"), "image_token_id": _token("<image>")},
        _library(
            "Gemma3ImageProcessorPil",
            **_SQUARE,
            do_pan_and_scan=True,
            pan_and_scan_min_crop_size=8,
            pan_and_scan_min_ratio_to_activate=1.5,
        ),
        _processor("Gemma3Processor", image_seq_length=16),
        "<boi>",
    ),
    "Gemma4ForConditionalGeneration": _Tiny(
        _TEXT
        | _GEMMA_LAYERS
        | {
            "global_head_dim": 8,
            "vocab_size_per_layer_input": WORDS + len(_SPECIAL),
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
        },
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        {
            "audio_config": None,
            "image_token_id": _token("<image>"),
            "video_token_id": _token("<|video|>"),
            "audio_token_id": _token("<end>"),
        },
        _library("Gemma4ImageProcessorPil", patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
        _processor("Gemma4Processor", image_seq_length=70),
    ),
    "GotOcr2ForConditionalGeneration": _Tiny(
        _LLAMA | {"model_type": "qwen2"},
        {
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 4,
            "window_size": 3,
            "global_attn_indexes": [1],
            "mlp_dim": 24,
        },
        {"image_token_index": _token("<imgpad>"), "image_seq_length": 16},
        _library("GotOcr2ImageProcessorPil", size={"height": 64, "width": 64}),
        _processor("GotOcr2Processor"),
        "<imgpad>",
    ),
    "Idefics3ForConditionalGeneration": _Tiny(
        _LLAMA,
        _IDEFICS,
        {"scale_factor": 2, "image_token_id": _token("<image>")},
        _library("Idefics3ImageProcessorPil", size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        _processor("Idefics3Processor", image_seq_len=4),
    ),
    "SmolVLMForConditionalGeneration": _Tiny(
        _LLAMA,
        _IDEFICS,
        {"scale_factor": 2, "image_token_id": _token("<image>")},
        _library("SmolVLMImageProcessorPil", size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        _processor("SmolVLMProcessor", image_seq_len=4),
    ),
    "LlavaForConditionalGeneration": _Tiny(
        _LLAMA,
        _CLIP,
        _LLAVA | {"vision_feature_layer": -2, "image_seq_length": 16},
        _library("CLIPImageProcessorPil", **_EDGE),
        _processor("LlavaProcessor", **_LLAVA_SIZES),
    ),
    "LlavaNextForConditionalGeneration": _Tiny(
        _LLAMA | {"model_type": "mistral"},
        _CLIP,
        _LLAVA | {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]], "vision_feature_layer": -2},
        _library("LlavaNextImageProcessorPil", **_EDGE, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]]),
        _processor("LlavaNextProcessor", **_LLAVA_SIZES),
    ),
    "LlavaOnevisionForConditionalGeneration": _Tiny(
        _LLAMA | {"model_type": "qwen2"},
        _SIGLIP | {"vision_use_head": False},
        _LLAVA
        | {
            "video_token_index": _token("<video>"),
            "video_token_id": _token("<video>"),
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
        _library("LlavaOnevisionImageProcessorPil", **_SQUARE, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]]),
        _processor("LlavaOnevisionProcessor", num_image_tokens=16, vision_feature_select_strategy="full"),
    ),
}


def tokenizer() -> Any:
    """Return a tokenizer of words, with the special tokens that the processors look for."""
    words = {f"w{number}": number for number in range(WORDS)}
    core = Tokenizer(models.WordLevel(words | {name: _token(name) for name in _SPECIAL}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(list(_SPECIAL))
    names = {"image": "<image>", "boi": "<boi>", "eoi": "<eoi>", "video": "<video>", "audio": "<end>"}
    names |= {"vision_start": "<boi>", "vision_end": "<eoi>", "boa": "<end>", "eoa": "<end>"}
    extra = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", extra_special_tokens=extra)


def tiny_model(class_name: str) -> Any:
    """Return a random model of the class, whose layers matter to what it says. Draws from torch's generator."""
    tiny, class_ = TINY[class_name], getattr(transformers, class_name)
    config = class_.config_class(text_config=dict(tiny.text), vision_config=dict(tiny.vision), **tiny.whole)
    model = class_(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
        elif parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def tiny_processor(class_name: str) -> Any:
    """Return the class's own processor, with images made small."""
    tiny = TINY[class_name]
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # it spells numbers of videos
    transformers.GotOcr2Processor.num_image_tokens = 16  # which no file says
    processor = tiny.processor(tiny.image_processor(), tokenizer())
    processor.chat_template = _PARTS.replace("IMAGE", tiny.template_token)
    return processor


def save_tiny(class_name: str, model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model's folder, as its library does; return the tensors that came to lie there."""
    model.save_pretrained(folder)
    processor = tiny_processor(class_name)
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    known = {name: value for name, value in processor.to_dict().items() if not isinstance(value, dict)}
    (folder / "processor_config.json").write_text(json.dumps(known))
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


Chat = list[dict[str, Any]]


def drawn_chat(rng: np.random.Generator, num_images: int, turns: int = 1) -> tuple[Chat, list[npt.NDArray[np.uint8]]]:
    """Return a chat with images of any sizes among its words, and their pixels in order."""
    chat: Chat = []
    images: list[npt.NDArray[np.uint8]] = []
    for turn in range(turns):
        parts: list[dict[str, Any]] = [{"type": "text", "text": _words(rng, 1 + int(rng.integers(30)))}]
        for _ in range(num_images):
            height, width = (int(side) for side in rng.integers(12, 44, 2))
            images.append(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            parts += [{"type": "image"}, {"type": "text", "text": _words(rng, 1 + int(rng.integers(12)))}]
        chat.append({"role": "w4", "content": parts})
        if turn + 1 < turns:
            chat.append({"role": "w5", "content": [{"type": "text", "text": _words(rng, 3)}]})
    return chat, images


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(f"w{number}" for number in rng.integers(6, WORDS, count))


def stock_inputs(processor: Any, chat: Chat, images: Sequence[npt.NDArray[np.uint8]]) -> Any:
    """Return what the class's own processor makes of a chat."""
    text = processor.tokenizer.apply_chat_template(
        chat, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
    )
    shown = [Image.fromarray(pixels) for pixels in images]
    if not shown and isinstance(processor, transformers.GotOcr2Processor):  # which takes no text alone
        return processor.tokenizer([text], return_tensors="pt")
    return processor(text=[text], images=shown or None, return_tensors="pt")


def stock_answer(model: Any, inputs: Any, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that the class generates, greedily, and the log probabilities (tokens, vocabulary)."""
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        suppress_tokens=[token for token, _ in BANNED],
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack([one[0].float().log_softmax(-1) for one in found.logits])
    return found.sequences[0, -num_tokens:].tolist(), logprobs


def our_answers(
    engine: LLMEngine, chats: Iterable[tuple[Chat, Sequence[npt.NDArray[np.uint8]]]], num_tokens: int
) -> list[Answer]:
    """Return what the engine generates, greedily; the chats join one after the other, two steps apart."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, num_logprobs=0, logit_bias=BANNED)
    waiting = []
    for place, (chat, pixels) in enumerate(chats):
        prompt, images = engine.chats.read(chat, engine.chats.read_images(pixels))
        waiting.append(TextRequest(str(place), prompt, sampling, images=images))
    return run_apart(engine, waiting)


def difference(class_name: str, rng: np.random.Generator, num_tokens: int, **settings: Any) -> float:
    """Return the largest difference of a log probability between ours and stock; infinite for other tokens.

    One chat has an image, one several and earlier turns, and one none.
    """
    model, processor = tiny_model(class_name), tiny_processor(class_name)
    chats = [drawn_chat(rng, 1), drawn_chat(rng, 2, turns=2), drawn_chat(rng, 0)]
    with tempfile.TemporaryDirectory() as name:
        config = LLMEngineConfig(**({"max_num_batched_tokens": 24} | settings))
        engine = LLMEngine(Path(name), save_tiny(class_name, model, Path(name)), config)
        ours = our_answers(engine, chats, num_tokens)
    worst = 0.0
    for (chat, images), answer in zip(chats, ours, strict=True):
        expected = stock_answer(model, stock_inputs(processor, chat, images), num_tokens)
        worst = max(worst, excess(answer, *expected))
    return worst


def failure(class_name: str, num_tokens: int = 64) -> str:
    """Return in which way a class is not equal to its own `generate`; empty where it is."""
    try:
        worst = difference(class_name, np.random.default_rng(torch.initial_seed() % 2**32), num_tokens)
    except Exception as error:  # of the library's many
        return f"{type(error).__name__}: {error}"
    return "" if worst < MAX_ERROR else f"a log probability differs by {worst}"


def main(names: list[str]) -> int:
    """Print a line for each of these classes, of all without any; return how many are not equal to stock."""
    num_failed = 0
    for class_name in names or sorted(SEEING):
        found = failure(class_name)
        num_failed += bool(found)
        sys.stdout.write(f"{class_name}: {f'FAILED: {found}' if found else 'paged, sees images'}\n")
    return num_failed


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(min(1, main(sys.argv[1:])))
