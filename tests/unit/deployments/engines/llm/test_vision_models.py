"""Classes of transformers that see images over the paged cache, beside the same weights in the class itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.stock_classes import OWN_CACHE, PAGED, SEEING, SEES_ITSELF
from deployments.engines.records.prompt_images import PromptImage, PromptImages, runs_of
from deployments.engines.records.protocol import EngineError, SamplingParams, TextLora, TextRequest
from deployments.engines.servable import why_unservable
from infra.supported.language_models import MAX_ERROR, excess, run_apart
from infra.supported.vision_models import (
    BANNED,
    TINY,
    WORDS,
    difference,
    drawn_chat,
    our_answers,
    save_tiny,
    stock_answer,
    stock_inputs,
    tiny_model,
    tiny_processor,
)
from tests.kit.seeding import seeded_rng
from weights.formats.checkpoint import read_checkpoint
from weights.operations.adapters import LoraAdapter, LoraPair

GEMMA, QWEN = "Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
# Positions in images, of two kinds; rows that are added behind the first layers; images that see themselves, in all
# layers or in some; tiles with words between them; packed tiles.
CLASSES = (
    *("Qwen2_5_VLForConditionalGeneration", QWEN, GEMMA, "Gemma4ForConditionalGeneration", LLAVA),
    *("SmolVLMForConditionalGeneration", "LlavaNextForConditionalGeneration"),
)


class Seer:
    """A tiny model, its engine, and its own processor."""

    def __init__(self, class_name, folder, **settings):
        self.model, self.processor = tiny_model(class_name), tiny_processor(class_name)
        self.folder, self.tensors = folder, save_tiny(class_name, self.model, folder)
        self.engine = LLMEngine(folder, self.tensors, LLMEngineConfig(**settings))

    def read(self, chat, pixels):
        return self.engine.chats.read(chat, self.engine.chats.read_images(pixels))

    def differs(self, chats, num_tokens=8):
        """The largest difference of a log probability to stock, over all chats at once."""
        answers = our_answers(self.engine, chats, num_tokens)
        stock = [stock_answer(self.model, stock_inputs(self.processor, *chat), num_tokens) for chat in chats]
        return max(excess(answer, *one) for answer, one in zip(answers, stock, strict=True))

    def num_cached(self, chat):
        """The tokens of a chat that the cache has."""
        prompt, images = self.read(*chat)
        self.engine.add_request(TextRequest("c", prompt, SamplingParams(max_tokens=1), images=images))
        deltas = []
        while self.engine.has_work:
            deltas += self.engine.step()
        return deltas[-1].num_cached_tokens


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", CLASSES)
def test_tokens_equal_generate_beside_others(class_name):
    assert difference(class_name, seeded_rng(), 16) < MAX_ERROR


def test_sixty_four_tokens_alone(tmp_path):
    seer = Seer(QWEN, tmp_path)
    assert seer.differs([drawn_chat(seeded_rng(), 2)], 64) < MAX_ERROR


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", SEES_ITSELF)
def test_an_image_sees_itself_across_tiles_and_chunks(class_name, tmp_path):
    """Steps have fewer tokens than an image, which is never cut, and its tokens lie on both sides of a tile's end."""
    seer = Seer(class_name, tmp_path, max_num_batched_tokens=5)
    chat, images = drawn_chat(seeded_rng(), 5)
    assert seer.differs([(chat, images)]) < MAX_ERROR


def test_what_is_found_again_is_of_the_same_image(tmp_path):
    seer = Seer(QWEN, tmp_path)
    chat, (image,) = drawn_chat(seeded_rng(), 1)
    chat[0]["content"] = [{"type": "image"}, {"type": "text", "text": "w7 w8 w9"}]
    chat[0]["content"] += [{"type": "text", "text": " ".join(["w7"] * 40)}]
    assert seer.num_cached((chat, [image])) == 0
    found = seer.num_cached((chat, [image]))
    assert found >= 48
    assert seer.differs([(chat, [image])]) < MAX_ERROR  # computed behind the part that was found
    other = image ^ np.uint8(255)
    assert seer.num_cached((chat, [other])) == 0
    assert seer.differs([(chat, [other])]) < MAX_ERROR


def test_a_chat_goes_on_behind_its_images(tmp_path):
    seer = Seer(GEMMA, tmp_path)
    chat, images = drawn_chat(seeded_rng(), 1, turns=2)
    chat[0]["content"][-1]["text"] += " w7" * 20  # the image lies within whole blocks
    first = chat[:1], images[:1]
    seer.num_cached(first)
    assert seer.num_cached((chat, images)) > 16
    assert seer.differs([(chat, images)]) < MAX_ERROR


def test_an_image_under_way_is_seen_once(tmp_path, monkeypatch):
    seer = Seer(LLAVA, tmp_path)
    base, looks = seer.engine._runner._model.vision._base, []
    look = type(base).get_image_features

    def counted(*arguments, **options):
        looks.append(None)
        return look(*arguments, **options)

    monkeypatch.setattr(type(base), "get_image_features", counted)
    chat, images = drawn_chat(seeded_rng(), 1)
    other, _ = drawn_chat(seeded_rng(), 0)
    other[0]["content"].append({"type": "image"})
    requests = []
    for name, given in enumerate((chat, other)):
        prompt, shown = seer.read(given, images)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, num_logprobs=0)
        requests.append(TextRequest(str(name), prompt, sampling, n=1, images=shown))
    run_apart(seer.engine, requests)
    assert len(looks) == 1


def test_several_completions_and_preemption(tmp_path):
    """There are blocks for one of the two: the other one gives them up, and computes its image's tokens again."""
    chats = [drawn_chat(seeded_rng(), 1), drawn_chat(seeded_rng(), 1)]
    longest = max(len(Seer(QWEN, tmp_path / "0").read(*chat)[0]) for chat in chats)
    block = 2 * 2 * 2 * 8 * 4 * 16
    num_blocks = -(-(longest + 40) // 16) + 2
    seer = Seer(QWEN, tmp_path / "1", kv_cache_bytes=num_blocks * block, max_num_seqs=2)
    assert seer.differs(chats, 40) < MAX_ERROR
    assert seer.engine.stats().num_preemptions > 0
    prompt, images = seer.read(*chats[0])
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    seer.engine.add_request(TextRequest("n", prompt, sampling, n=2, images=images))
    found = [[], []]
    while seer.engine.has_work:
        for delta in seer.engine.step():
            found[delta.index] += delta.token_ids
    assert found[0] == found[1]


def test_images_are_batched_off_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr("deployments.engines.llm.models.vision_tower.computes_on_host", lambda device: False)
    seer = Seer(LLAVA, tmp_path)
    assert seer.differs([drawn_chat(seeded_rng(), 3)]) < MAX_ERROR
    _, shown = seer.read(*drawn_chat(seeded_rng(), 3))
    with torch.inference_mode():
        seer.engine._runner._model.vision.look_at(shown.images)
    assert all(image.features is not None and not image.inputs for image in shown.images)


def test_placeholders_in_texts_are_refused(tmp_path):
    seer = Seer(QWEN, tmp_path)
    chat, images = drawn_chat(seeded_rng(), 1)
    chat[0]["content"].append({"type": "text", "text": "<image>"})
    with pytest.raises(EngineError, match=r"1 images and 2 places for them.*a text has '<image>'"):
        seer.read(chat, images)
    with pytest.raises(EngineError, match="0 images and 1 places"):
        seer.read([{"role": "w4", "content": "w9 <image>"}], ())


@pytest.mark.parametrize("class_name", [QWEN, "Gemma4ForConditionalGeneration"])
def test_a_sampled_placeholder_stands_for_no_image(class_name, tmp_path):
    """A completion may draw the token. It is what it is alone, and images of others in its step stay as they are."""
    seer = Seer(class_name, tmp_path, max_num_batched_tokens=16)
    bias = ((seer.engine._runner._model.vision.token_id, 100.0),)
    prompt, _ = seer.read([{"role": "w4", "content": "w9"}], ())
    drawing = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=bias, num_logprobs=0)
    (alone,) = run_apart(seer.engine, [TextRequest("0", prompt, drawing)])
    chat = drawn_chat(seeded_rng(), 1)
    plain = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias=BANNED, num_logprobs=0)
    shown, images = seer.read(*chat)
    requests = [TextRequest("0", prompt, drawing), TextRequest("1", shown, plain, images=images)]
    beside, answer = run_apart(seer.engine, requests)
    torch.testing.assert_close(beside.logprobs, alone.logprobs, rtol=0, atol=1e-5)
    assert excess(answer, *stock_answer(seer.model, stock_inputs(seer.processor, *chat), 8)) < MAX_ERROR


def test_an_image_that_the_processor_refuses(tmp_path):
    seer = Seer(QWEN, tmp_path)
    with pytest.raises(EngineError, match="takes no image of 1x900 pixels: absolute aspect ratio"):
        seer.read([{"role": "w4", "content": [{"type": "image"}]}], [np.zeros((900, 1, 3), np.uint8)])


def test_a_template_without_images(tmp_path):
    seer = Seer(LLAVA, tmp_path)
    seer.engine.tokenizer.chat_template = "{% for message in messages %}w1{% endfor %}"
    with pytest.raises(EngineError, match="its template passes over images"):
        seer.read(*drawn_chat(seeded_rng(), 1))


def test_a_template_that_takes_parts_alone(tmp_path):
    model, processor = tiny_model(LLAVA), tiny_processor(LLAVA)
    tensors = save_tiny(LLAVA, model, tmp_path)
    source = (
        "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    engine = LLMEngine(tmp_path, tensors, LLMEngineConfig())
    expected = tuple(processor.tokenizer("w7 w8")["input_ids"])
    assert engine.chats.encode([{"role": "user", "content": "w7 w8"}]) == expected


def test_a_lora_changes_the_decoder_and_not_the_eyes(tmp_path):
    seer = Seer(LLAVA, tmp_path)
    layer = "model.language_model.layers.1.self_attn.q_proj"
    pair = LoraPair(torch.randn(2, 32), torch.randn(32, 2), 0.5)
    chat = drawn_chat(seeded_rng(), 1)
    prompt, images = seer.read(*chat)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, num_logprobs=0, logit_bias=BANNED)
    lora = TextLora("l", LoraAdapter(tmp_path, {"model": {layer: pair}}), 1.0)
    (answer,) = run_apart(seer.engine, [TextRequest("0", prompt, sampling, images=images, loras=(lora,))])
    seer.model.get_submodule(layer).weight += 0.5 * pair.up @ pair.down
    assert excess(answer, *stock_answer(seer.model, stock_inputs(seer.processor, *chat), 6)) < MAX_ERROR
    tower = "model.multi_modal_projector.linear_1"
    eyes = TextLora(
        "e", LoraAdapter(tmp_path, {"model": {tower: LoraPair(torch.randn(2, 16), torch.randn(32, 2), 1.0)}})
    )
    with pytest.raises(
        EngineError, match=r"changes 'model.multi_modal_projector.linear_1'; the vision tower is the same"
    ):
        seer.engine.add_request(TextRequest("e", prompt, sampling, images=images, loras=(eyes,)))


def test_folders_that_are_refused(tmp_path):
    tensors = save_tiny(LLAVA, tiny_model(LLAVA), tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.class_name, why_unservable(checkpoint)) == ("llm", LLAVA, None)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(EngineError, match="no image processor could be read"):
        LLMEngine(tmp_path, tensors, LLMEngineConfig())
    (tmp_path / "processor_config.json").unlink()
    assert "preprocessor_config.json is missing" in why_unservable(read_checkpoint(tmp_path))
    content = json.loads((tmp_path / "config.json").read_text())
    content["image_token_id"] = content["image_token_index"] = WORDS + 100
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(EngineError, match="the token 180 of images is not in the vocabulary"):
        LLMEngine(tmp_path, tensors, LLMEngineConfig())
    content["architectures"] = ["Gemma9ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert "the nearest is Gemma" in why_unservable(read_checkpoint(tmp_path))


def test_a_blind_model_takes_no_images(tmp_path):
    from infra.supported import language_models

    model = language_models.tiny_model("Olmo2ForCausalLM")
    engine = LLMEngine(tmp_path, language_models.save_tiny(model, tmp_path), LLMEngineConfig())
    with pytest.raises(EngineError, match="the model sees no images"):
        engine.chats.read_images([np.zeros((2, 2, 3), np.uint8)])


def test_every_class_is_in_one_table():
    assert set(TINY) == SEEING
    assert not SEEING & (PAGED | OWN_CACHE)
    assert SEES_ITSELF.keys() <= SEEING


def test_identities_and_places_of_images():
    first, second = (PromptImage(bytes([n]) * 32, "", {}, 3) for n in (1, 2))
    rows = torch.tensor([-1, 0, 1, 2, -1, -1, 3, -1, 4, 5])
    images = PromptImages((first, second), rows, spans=runs_of(rows))
    assert images.spans == ((1, 4), (6, 7), (8, 10))
    assert images.identity(4, 6) == b""
    assert images.identity(0, 2) == images.identity(3, 5) != images.identity(4, 7)
    assert images.identity(0, 10)[:32] == first.digest
    (found,) = images.among(7, 9)
    assert (found[0], found[1].tolist(), found[2].tolist()) == (second, [1], [1])
    assert not list(images.among(7, 8))  # between its rows
    assert [images.whole_end(0, end) for end in (1, 2, 4, 9)] == [1, 1, 4, 8]
    assert images.whole_end(1, 2) == images.whole_end(2, 3) == 4
    moved = torch.tensor([-1, -1, 0, 1, 2])
    assert PromptImages((first,), moved).identity(0, 5) != PromptImages((first,), moved.roll(-1)).identity(0, 5)
