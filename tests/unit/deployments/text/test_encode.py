"""Requests -> conditioning and embeddings: by stock formulas, through the real cache, the demo models' encoders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deployments.engines.records.protocol import ComputationFailed, DiffusionRequest, EngineError
from deployments.engines.text.forward_plan import EncodeCounter
from deployments.modules.encoders import KeyedEncoder, TextEncoderBuilder
from deployments.records.errors import DeadlineExceeded
from deployments.text import encode
from deployments.text.cache import Encoding, EncodingCache
from deployments.text.encode import CachedEncoders, EncodeJob, embedding_of, encode_batch
from deployments.text.tokenizing import TextItem

LONG = "a handwritten seven and a handwritten eight " * 4  # 36 tokens; CLIP of the demo has places for 14


class Calls:
    def __init__(self) -> None:
        self.made: list[list[EncodeJob]] = []
        self.terms: list[tuple[int, float | None]] = []
        self.counter = EncodeCounter()

    async def __call__(self, jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
        self.made.append(list(jobs))
        self.terms.append((priority, timeout_s))
        await asyncio.sleep(0)
        outcomes = encode_batch(jobs, counter=self.counter)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes  # type: ignore[return-value]


def service() -> tuple[CachedEncoders, Calls]:
    calls = Calls()
    return CachedEncoders(EncodingCache(10**7), calls), calls


def draw(guidance: float) -> DiffusionRequest:
    return DiffusionRequest("r", 32, 32, num_inference_steps=3, guidance_scale=guidance, seed=5)


def stock_image(demo: Any, tensors: dict[str, torch.Tensor], request: DiffusionRequest) -> np.ndarray:
    images = demo.stock(
        **tensors,
        width=32,
        height=32,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
    ).images
    return np.stack([np.asarray(image) for image in images])


# Trimmed padding


@torch.no_grad()
def masked_and_cut(demo: Any, prompt: str) -> dict[str, torch.Tensor]:
    """Flux conditioning by transformers alone: T5 under the tokenizer's own mask, then without the padding."""
    batch = demo.stock.tokenizer_2([prompt], padding="max_length", max_length=48, return_tensors="pt")
    hidden = demo.stock.text_encoder_2(batch.input_ids, attention_mask=batch.attention_mask)[0]
    clip = demo.stock.tokenizer([prompt], padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    return {
        "prompt_embeds": hidden[:, : int(batch.attention_mask.sum())],
        "pooled_prompt_embeds": demo.stock.text_encoder(clip.input_ids).pooler_output,
    }


async def test_trimmed_flux_equals_stock_with_a_mask(flux):
    encoders, calls = service()
    prompts = ["a handwritten seven", "eight", ""]
    for prompt in prompts:
        tensors, _ = await flux.condition(encoders, prompt, text_padding="trimmed")
        expected = masked_and_cut(flux, prompt)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensors[name].shape == tensor.shape
            assert torch.allclose(tensors[name], tensor, atol=1e-5)
    stats = calls.counter.encode_stats()
    assert stats.stock_padding_tokens == stats.batch_padding_tokens == 0
    small = max(job.num_tokens for jobs in calls.made for job in jobs)
    assert small < 30


async def test_an_image_of_a_trimmed_prompt_equals_stock(flux):
    encoders, _ = service()
    tensors, _ = await flux.condition(encoders, "a handwritten seven", text_padding="trimmed")
    request = draw(guidance=1.0)
    ours = flux.pipeline("transformer").generate(request, tensors)
    stock = stock_image(flux, masked_and_cut(flux, "a handwritten seven"), request)
    assert ours.std() > 10
    assert np.abs(ours.astype(int) - stock.astype(int)).max() <= 1


async def test_padding_variants_do_not_meet_in_the_cache(flux):
    encoders, calls = service()
    lengths = set()
    for options in ({}, {"text_padding": "trimmed"}, {"max_sequence_length": 32}, {}, {"text_padding": "trimmed"}):
        tensors, _ = await flux.condition(encoders, "seven", **options)
        lengths.add(tensors["prompt_embeds"].shape[1])
    assert lengths == {512, 32, calls.made[3][0].num_tokens}
    # CLIP's stock padding is the same for both T5 lengths, and the last two requests computed nothing.
    assert [len(jobs) for jobs in calls.made] == [1, 1, 1, 1, 1]


# Long texts


@torch.no_grad()
def chunked_by_hand(demo: Any, text: str, num_chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SDXL conditioning by transformers' CLIP modules, chunk by chunk."""
    rows, pooled = [], None
    for chunk in range(num_chunks):
        halves = []
        for tokenizer, module in (
            (demo.stock.tokenizer, demo.stock.text_encoder),
            (demo.stock.tokenizer_2, demo.stock.text_encoder_2),
        ):
            content = tokenizer(text, add_special_tokens=False).input_ids[chunk * 14 : chunk * 14 + 14]
            ids = [tokenizer.bos_token_id, *content, tokenizer.eos_token_id]
            ids += [tokenizer.pad_token_id] * (16 - len(ids))
            out = module(torch.tensor([ids]), output_hidden_states=True)
            halves.append(out.hidden_states[-2])
            last = out[0]
        rows.append(torch.cat(halves, dim=-1))
        pooled = last if pooled is None else pooled
    return torch.cat(rows, dim=1), pooled


async def test_chunks_equal_transformers_and_draw_what_stock_draws(sdxl):
    encoders, calls = service()
    tensors, encoded = await sdxl.condition(encoders, LONG, "eight", long_text="chunk")
    assert encoded.warnings == ()
    expected = {}
    for prefix, text in (("", LONG), ("negative_", "eight")):
        expected[f"{prefix}prompt_embeds"], expected[f"{prefix}pooled_prompt_embeds"] = chunked_by_hand(sdxl, text, 3)
    assert tensors["prompt_embeds"].shape[1] == 48
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(tensors[name], tensor, atol=1e-5), name
    request = draw(guidance=4.0)
    ours = sdxl.pipeline("unet").generate(request, tensors)
    stock = stock_image(sdxl, expected, request)
    assert np.abs(ours.astype(int) - stock.astype(int)).max() <= 1
    # A changed end changes the last chunk only; the first, and the empty ones, are in the cache.
    before = len(calls.made)
    _, again = await sdxl.condition(encoders, LONG + " nine", "eight", long_text="chunk")
    assert (again.cache.hits, again.cache.misses) == (10, 2)
    assert [len(jobs) for jobs in calls.made[before:]] == [1, 1]


async def test_a_text_that_fits_is_the_same_with_every_rule(sdxl):
    encoders, calls = service()
    results = [
        await sdxl.condition(encoders, "seven", "eight", long_text=rule) for rule in ("truncate", "chunk", "error")
    ]
    assert len(calls.made) == 2
    assert len(calls.made[0]) == 2  # prompt and negative prompt of one encoder in one call
    for tensors, _ in results[1:]:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in results[0][0].items())


async def test_long_texts_are_cut_with_a_word_or_refused(sdxl, flux):
    encoders, calls = service()
    _, encoded = await sdxl.condition(encoders, LONG, "eight")
    assert encoded.warnings == tuple(
        f"the prompt for {part} was cut to 16 tokens; 22 more were ignored"
        for part in ("text_encoder", "text_encoder_2")
    )
    computed = len(calls.made)
    cases = [
        (sdxl, {"long_text": "error"}, r"the prompt for text_encoder has 38 tokens, and at most 16 can be encoded"),
        (flux, {"long_text": "error", "max_sequence_length": 8}, "the prompt for text_encoder_2 has .* at most 8"),
        (flux, {"long_text": "chunk"}, "is for CLIP, and FluxPipeline reads prompts with T5, which takes up to 512"),
        (flux, {"long_text": "cut"}, "long_text 'cut': expected one of truncate, error, chunk"),
        (sdxl, {"text_padding": "trimmed"}, "is for T5: the UNet of StableDiffusionXLPipeline"),
        (sdxl, {"text_padding": "none"}, "text_padding 'none': expected one of stock, trimmed"),
    ]
    for demo, options, message in cases:
        with pytest.raises(EngineError, match=message):
            await demo.condition(encoders, LONG, **options)
    with pytest.raises(EngineError, match=r"a text of 360 tokens: at most 224 can be encoded in chunks of 16"):
        await sdxl.condition(encoders, LONG * 10, long_text="chunk")
    with pytest.raises(EngineError, match="the negative prompt for text_encoder has 38 tokens"):
        await sdxl.condition(encoders, "seven", LONG, long_text="error")
    assert len(calls.made) == computed  # refused before anything was computed
    _, encoded = await flux.condition(
        encoders, LONG, long_text="error"
    )  # T5 has room; CLIP's summary is cut as in stock
    assert encoded.warnings == ("the prompt for text_encoder was cut to 16 tokens; 22 more were ignored",)


# Embeddings


async def test_embeddings_of_texts_and_of_ids(sdxl):
    encoders, calls = service()
    keyed = sdxl.encoders["text_encoder"]
    [text] = keyed.encoder.tokenize(["seven"], as_embedding=True)
    encoded = await encoders.embed({"model": keyed}, ["seven", LONG, "seven", ""], priority=2, timeout_s=3.0)
    assert encoded.warnings == ("input 1 was cut to 16 tokens; 22 more were ignored",)
    assert (encoded.cache.hits, encoded.cache.misses) == (1, 3)
    assert encoded.sources == {"computed": 3, "repeated": 1}
    assert encoded.num_tokens == 2 * len(text.token_ids) + 16 + 2
    assert ([len(jobs) for jobs in calls.made], calls.terms) == ([3], [(2, 3.0)])
    by_ids = await encoders.embed({"model": keyed}, [text.token_ids])
    assert by_ids.sources == {"local": 1}
    stock = sdxl.stock.tokenizer(["seven"], padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        pooled = sdxl.stock.text_encoder(stock.input_ids).pooler_output[0]
    for encoding in (encoded.outputs[0], encoded.outputs[2], by_ids.outputs[0]):
        assert torch.allclose(embedding_of(encoding), pooled, atol=1e-5)


async def test_embeddings_that_cannot_be(sdxl, flux):
    encoders, calls = service()
    keyed = sdxl.encoders["text_encoder"]
    cases = [
        ((flux.encoders["text_encoder_2"], ["seven"]), {}, "this encoder gives hidden per token, but no embedding"),
        ((keyed, ["seven"]), {"long_text": "chunk"}, "an embedding is one vector"),
        ((keyed, ["seven", LONG]), {"long_text": "error"}, "input 1 has 38 tokens, and at most 16"),
        ((keyed, [(1, 10**6)]), {}, "token ids 1 to 1000000: expected 0 to"),
        ((keyed, [(-1,)]), {}, "token ids -1 to -1"),
        ((keyed, [()]), {}, "a text of 0 tokens"),
        ((keyed, [(1,) * 17]), {}, "a text of 17 tokens: expected 1 to 16"),
        ((keyed, ["a \udc00"]), {}, "an unpaired surrogate"),
    ]
    for (encoder, texts), options, message in cases:
        with pytest.raises(EngineError, match=message):
            await encoders.embed({"model": encoder}, texts, **options)
    with pytest.raises(EngineError, match=r"a T5EncoderModel takes a text in one piece"):
        await encoders.encode([TextItem(flux.encoders["text_encoder_2"], "seven", "it", long_text="chunk")])
    assert not calls.made


async def test_large_requests_are_tokenized_beside_the_event_loop(sdxl, calls_on_loop):
    encoders, _ = service()
    tokenized = calls_on_loop(encode, "tokenize_items")
    texts = [f"{number} {LONG}" for number in range(200)]
    encoded = await encoders.embed({"model": sdxl.encoders["text_encoder"]}, texts)
    assert len(encoded.outputs) == len(encoded.warnings) == 200
    await encoders.embed({"model": sdxl.encoders["text_encoder"]}, ["short"])
    assert tokenized == [False, True]  # for a short one a thread would cost more


# What the cache is told, and what others' terms may do


async def test_negative_and_empty_prompts_are_kept(sdxl):
    kept: dict[tuple[int, ...], bool] = {}

    class Keeping(EncodingCache):
        async def get_all(self, keys: Any, compute_many: Any, *, keep: Any = ()) -> Any:
            kept.update({key.token_ids: key in keep for key in keys})
            return await super().get_all(keys, compute_many, keep=keep)

    encoders = CachedEncoders(Keeping(10**7), Calls())
    await sdxl.condition(encoders, "seven", "eight")
    ids = {text: sdxl.encoders["text_encoder"].encoder.tokenize([text])[0].token_ids for text in ("seven", "eight", "")}
    assert kept == {ids["seven"]: False, ids["eight"]: True}
    await sdxl.condition(encoders, "", "seven")
    assert kept == {ids[""]: True, ids["seven"]: True, ids["eight"]: True}


async def test_what_is_not_finite_is_not_kept(flux, monkeypatch):
    encoder = flux.encoders["text_encoder_2"].encoder
    family = encoder._family

    def spoilt(**arguments):
        return {name: output * float("nan") for name, output in family.run(**arguments).items()}

    monkeypatch.setattr(encoder, "_family", replace(family, run=spoilt))
    cache = EncodingCache(10**7)
    encoders = CachedEncoders(cache, Calls())
    with pytest.raises(ComputationFailed, match="T5EncoderModel made numbers of the text that are not finite"):
        await flux.condition(encoders, "a handwritten five")
    await asyncio.sleep(0.01)
    assert cache.cache_stats().entries == 1, "CLIP's alone"
    monkeypatch.setattr(encoder, "_family", family)
    await flux.condition(encoders, "a handwritten five")
    assert cache.cache_stats().entries == 2


async def test_the_timeout_of_one_request_is_not_that_of_those_who_joined(sdxl):
    keyed = sdxl.encoders["text_encoder"]
    gate, terms = asyncio.Event(), []

    async def run(jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
        terms.append(timeout_s)
        await gate.wait()
        if timeout_s is not None:
            raise DeadlineExceeded("its time was over")
        return [{"embedding": torch.ones(3)} for _ in jobs]

    encoders = CachedEncoders(EncodingCache(10**6), run)
    hasty = asyncio.ensure_future(encoders.embed({"model": keyed}, ["seven"], timeout_s=0.1))
    others = [asyncio.ensure_future(encoders.embed({"model": keyed}, ["seven"])) for _ in range(5)]
    async with asyncio.timeout(5):
        while not terms:
            await asyncio.sleep(0)
        gate.set()
        found = await asyncio.gather(*others)
        with pytest.raises(DeadlineExceeded):
            await hasty
    assert terms == [0.1, None]
    assert sum(encoded.cache.misses for encoded in found) == 1
    assert keyed.num_computing == 0


async def test_a_batch_that_outlives_its_request_does_not_run_a_retired_module(sdxl):
    """By then the module may have another model's weights; who joined computes with the encoder that he holds."""
    gate, calls = asyncio.Event(), Calls()

    async def run(jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
        await gate.wait()
        return await calls(jobs, priority, timeout_s)

    encoders = CachedEncoders(EncodingCache(10**6), run)
    old, new = (KeyedEncoder("key", sdxl.encoders["text_encoder"].encoder) for _ in range(2))
    first = asyncio.ensure_future(encoders.embed({"model": old}, ["seven"]))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(encoders.embed({"model": new}, ["seven"]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    TextEncoderBuilder().retire(old)
    gate.set()
    encoded = await asyncio.wait_for(second, 5)
    assert encoded.sources == {"computed": 1}
    assert calls.counter.encode_stats().texts == 1, "the retired one's batch did not run"
    assert (old.is_retired, new.is_retired, new.num_computing) == (True, False, 0)


# Texts that are encoded alone


async def test_a_text_alone_shares_no_forward_and_no_encoding(sdxl):
    encoders, calls = service()
    asked = (encoders, "a seven", "a blur")
    (together, _), (alone, _) = await asyncio.gather(sdxl.condition(*asked), sdxl.condition(*asked, encodes_alone=True))
    assert calls.counter.encode_stats().forwards == 2 + 4  # two encoders: one forward of two texts, two of one
    again, encoded = await sdxl.condition(*asked, encodes_alone=True)
    assert encoded.cache.misses == 0
    fresh, _ = service()
    first, _ = await sdxl.condition(fresh, "a seven", "another", encodes_alone=True)
    for name, tensor in alone.items():
        assert torch.equal(again[name], tensor)
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-5)
        if not name.startswith("negative"):
            assert torch.equal(first[name], tensor)


async def test_weights_in_prompts(sdxl, flux):
    encoders, _ = service()
    plain, _ = await sdxl.condition(encoders, "seven")
    same, encoded = await sdxl.condition(encoders, "seven", prompt_syntax="weighted")
    assert encoded.cache.misses == 0
    assert all(torch.equal(same[name], plain[name]) for name in plain)
    strong, encoded = await sdxl.condition(encoders, "(seven:1.5)", prompt_syntax="weighted")
    assert (encoded.cache.misses, encoded.warnings) == (0, ())  # weights change no encoding that is kept
    assert torch.equal(strong["pooled_prompt_embeds"], plain["pooled_prompt_embeds"])
    assert not torch.allclose(strong["prompt_embeds"], plain["prompt_embeds"])
    weighed, _ = await sdxl.condition(encoders, "(seven:1.21)", "(nine:0.9)", prompt_syntax="weighted")
    marked, _ = await sdxl.condition(encoders, "seven++", "nine-", prompt_syntax="compel")
    assert all(torch.equal(marked[name], weighed[name]) for name in weighed)
    broken, _ = await sdxl.condition(encoders, "seven BREAK eight", "nine", prompt_syntax="weighted")
    assert broken["prompt_embeds"].shape == broken["negative_prompt_embeds"].shape == (1, 32, strong_width(strong))
    words, encoded = await flux.condition(encoders, "a (seven:1.5) [eight]", prompt_syntax="weighted")
    expected, _ = await flux.condition(encoders, "a seven eight")
    assert all(torch.equal(words[name], expected[name]) for name in expected)
    assert encoded.warnings == (
        "weights in the prompt had no effect: FluxPipeline reads it with encoders that take none",
    )
    literal, encoded = await sdxl.condition(encoders, "(seven:1.5)")
    assert not torch.allclose(literal["prompt_embeds"], strong["prompt_embeds"])
    with pytest.raises(EngineError, match="has weight 11"):
        await sdxl.condition(encoders, "(seven:11)", prompt_syntax="weighted")


@torch.no_grad()
def comfyui_embeds(demo: Any, chunks: Sequence[Sequence[tuple[str, float]]], skipped: int = 0) -> torch.Tensor:
    """Return SDXL's text in chunks of weighted pieces, by transformers alone: e + w (z - e), e of an empty prompt."""
    found = []
    for tokenizer, encoder in (
        (demo.stock.tokenizer, demo.stock.text_encoder),
        (demo.stock.tokenizer_2, demo.stock.text_encoder_2),
    ):

        def encode(ids: list[int], tokenizer: Any = tokenizer, encoder: Any = encoder) -> torch.Tensor:
            padded = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
            padded += [tokenizer.pad_token_id] * (tokenizer.model_max_length - len(padded))
            hidden: torch.Tensor = encoder(torch.tensor([padded]), output_hidden_states=True).hidden_states[
                -2 - skipped
            ]
            return hidden[0]

        empty, rows = encode([]), []
        for pieces in chunks:
            ids, weights = list[int](), [1.0]
            for text, weight in pieces:
                own = tokenizer(text).input_ids[1:-1]
                ids += own
                weights += [weight] * len(own)
            weights += [1.0] * (len(empty) - len(weights))
            rows.append(empty + torch.tensor(weights)[:, None] * (encode(ids) - empty))
        found.append(torch.cat(rows))
    return torch.cat(found, dim=-1)[None]


async def test_weights_of_comfyui(sdxl, flux):
    """The demo's CLIPs have places for 14 tokens."""
    encoders, _ = service()

    async def embeds(prompt: str, negative: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = (
            await sdxl.condition(encoders, prompt, negative, prompt_syntax="comfyui", **options)
        )[0]
        return found

    plain, _ = await sdxl.condition(encoders, "seven [eight] BREAK", "nine")
    same = await embeds("seven [eight] BREAK", "nine")
    assert all(torch.equal(same[name], plain[name]) for name in plain)
    found = await embeds("a (seven:1.5) and ((eight)) \\(nine\\)", "(blurry:0.5)", clip_skip=1)
    for name, pieces in [
        ("prompt_embeds", [("a ", 1.0), ("seven", 1.5), (" and ", 1.0), ("eight", 1.21), (" (nine)", 1.0)]),
        ("negative_prompt_embeds", [("blurry", 0.5)]),
    ]:
        torch.testing.assert_close(found[name], comfyui_embeds(sdxl, [pieces], 1), rtol=1e-4, atol=1e-4)
    unweighted, _ = await sdxl.condition(encoders, "seven")
    weighted_ = await embeds("(seven:1.5)")
    assert torch.equal(weighted_["pooled_prompt_embeds"], unweighted["pooled_prompt_embeds"])
    # Fewer than eight tokens are not cut between two chunks, more are: there is room for 14.
    head, tail = "seven eight nine", "seven nine"
    first, second = (len(sdxl.stock.tokenizer(text).input_ids) - 2 for text in (head, tail))
    head += " a" * (13 - first)
    assert 1 < second < 8
    long = await embeds(f"{head} ({tail}:1.2)", "seven")
    expected = comfyui_embeds(sdxl, [[(head, 1.0)], [(tail, 1.2)]])
    torch.testing.assert_close(long["prompt_embeds"], expected, rtol=1e-4, atol=1e-4)
    assert long["negative_prompt_embeds"].shape[1] == 16
    words_, encoded = await flux.condition(encoders, "a (seven:1.5)", prompt_syntax="comfyui")
    expected, _ = await flux.condition(encoders, "a seven")
    assert all(torch.equal(words_[name], expected[name]) for name in expected)
    assert "weights in the prompt had no effect" in encoded.warnings[0]


async def test_layers_that_are_left_out(sdxl, flux):
    encoders, _ = service()
    plain, _ = await sdxl.condition(encoders, "seven", "blurry")
    skipping, encoded = await sdxl.condition(encoders, "seven", "blurry", clip_skip=1)
    assert (encoded.cache.hits, encoded.cache.misses) == (2, 2)  # diffusers reads negative prompts as ever
    assert not torch.allclose(skipping["prompt_embeds"], plain["prompt_embeds"])
    assert torch.equal(skipping["negative_prompt_embeds"], plain["negative_prompt_embeds"])
    webui, _ = await sdxl.condition(encoders, "seven", "blurry", clip_skip=1, prompt_syntax="weighted")
    assert torch.equal(webui["prompt_embeds"], skipping["prompt_embeds"])
    assert not torch.allclose(webui["negative_prompt_embeds"], plain["negative_prompt_embeds"])
    other, _ = await flux.condition(encoders, "seven", clip_skip=1)
    same, _ = await flux.condition(encoders, "seven")
    assert all(torch.equal(other[name], same[name]) for name in same)


def strong_width(tensors):
    return tensors["prompt_embeds"].shape[-1]


@pytest.mark.parametrize("name", ["flux", "sdxl"])
async def test_a_second_text_goes_to_the_encoders_behind_the_first(name: str, request: pytest.FixtureRequest) -> None:
    demo, (encoders, _) = request.getfixturevalue(name), service()
    found, _ = await demo.condition(encoders, "a seven", prompt_2="eight black dots", max_sequence_length=24)
    alone, _ = await demo.condition(encoders, "a seven", max_sequence_length=24)
    if name == "flux":
        prompt, pooled, _ = demo.stock.encode_prompt("a seven", "eight black dots", max_sequence_length=24)
    else:
        prompt, _, pooled, _ = demo.stock.encode_prompt("a seven", "eight black dots", "cpu", 1, False)
    expected = {"prompt_embeds": prompt, "pooled_prompt_embeds": pooled}
    assert found.keys() == expected.keys()
    for part, tensor in expected.items():
        torch.testing.assert_close(found[part], tensor.detach(), rtol=0, atol=1e-5)
    assert (found["prompt_embeds"] != alone["prompt_embeds"]).any()
    assert torch.equal(found["pooled_prompt_embeds"], alone["pooled_prompt_embeds"]) == (name == "flux")
