"""Clusters whose worker is several processes: answers are those of one process, and a killed one is made up for."""

from __future__ import annotations

import base64
import os
import signal
import threading
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest
from e2e.rank_kills import config_of, ranks_of, running
from integration.harness import DEMO_MODELS
from kit.seeding import seeded_random
from kit.waiting import wait_until
from PIL import Image

from configs.ranks import RanksConfig
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.local import LocalModels
from deployments.records import ImageRequest
from infra.supported.language_models import VOCABULARY, save_tiny, tiny_model
from weights.loading.views import mapped_tensors

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_TOKENS = 12


def text_of(engine: LLMEngine, prompt: list[int]) -> str:
    engine.add_request(TextRequest("one", tuple(prompt), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)))
    text = ""
    while engine.has_work:
        text += "".join(delta.text for delta in engine.step())
    return text


def complete(client: httpx.Client, prompt: list[int], model: str = "adder") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def test_a_language_model_on_two_ranks_writes_what_one_writes_and_goes_on_when_one_is_killed(tmp_path: Path) -> None:
    folder, tensors, _ = mapped_tensors(DEMO_MODELS / "adder")
    engine = LLMEngine(folder, {name: one.float() for name, one in tensors.items()}, LLMEngineConfig())
    random = seeded_random()
    prompts = [[random.randrange(4, 104) for _ in range(random.randint(3, 40))] for _ in range(6)]

    texts = [text_of(engine, prompt) for prompt in prompts]
    with running(config_of(tmp_path, {"tensor": 2}, "adder")) as client:
        found = [complete(client, prompt) for prompt in prompts]
        assert [one.json()["choices"][0]["text"] for one in found] == texts
        before = ranks_of(client)
        assert (before["tensor"], len(before["processes"])) == (2, 2)
        assert all(one["sent_bytes"] > 0 for one in before["processes"])
        victim = before["processes"][1]["process"]
        assert victim != before["processes"][0]["process"]

        answers: list[list[httpx.Response]] = [[] for _ in range(3)]
        stop = threading.Event()

        def ask(mine: list[httpx.Response]) -> None:
            number = 0
            while not stop.is_set():
                mine.append(complete(client, prompts[number % len(prompts)]))
                number += 1

        threads = [threading.Thread(target=ask, args=(mine,)) for mine in answers]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: all(answers))
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: is_whole_without(victim, client), timeout_s=120)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for mine in answers:
            for number, one in enumerate(mine):
                assert one.status_code == 200, one.text
                assert one.json()["choices"][0]["text"] == texts[number % len(prompts)]


def test_a_model_of_transformers_on_two_ranks_writes_what_one_writes(tmp_path: Path) -> None:
    """With biases of sums, which one rank adds, and experts, which each rank reads in part."""
    names = ["Starcoder2ForCausalLM", "OlmoeForCausalLM"]
    random = seeded_random()
    prompts = [[random.randrange(4, VOCABULARY) for _ in range(count)] for count in (30, 3)]
    texts = []
    for name in names:
        tensors = save_tiny(tiny_model(name), tmp_path / name)
        engine = LLMEngine(tmp_path / name, tensors, LLMEngineConfig())
        texts += [text_of(engine, prompt) for prompt in prompts]
    with running(config_of(tmp_path, {"tensor": 2}, *(str(tmp_path / name) for name in names))) as client:
        found = [complete(client, prompt, name) for name in names for prompt in prompts]
        assert [one.json()["choices"][0]["text"] for one in found] == texts
        assert all(one["sent_bytes"] > 0 for one in ranks_of(client)["processes"])


def is_whole_without(process: int, client: httpx.Client) -> bool:
    found = [one.get("process") for one in ranks_of(client).get("processes", ())]
    return len(found) == 2 and None not in found and process not in found


def test_an_image_with_guidance_on_two_ranks_has_the_bits_of_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"cfg": 2}, "digits-sdxl")
    asked = {"prompt": "a handwritten seven", "seed": 3, "num_inference_steps": 6, "width": 32, "height": 32}
    request = ImageRequest(model="digits-sdxl", guidance_scale=4.0, **asked)
    alone = config.model_copy(update={"worker": config.worker.model_copy(update={"ranks": RanksConfig()})})
    [expected] = LocalModels(alone).generate(request).images
    with running(config) as client:
        body = {"model": "digits-sdxl", "guidance_scale": 4.0, **asked}
        answer = client.post("/v1/images/generations", json=body)
        assert answer.status_code == 200, answer.text
        found = np.asarray(Image.open(BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))
        ranks = ranks_of(client)
    assert np.array_equal(found, np.asarray(expected))
    assert (ranks["cfg"], ranks["tensor"]) == (2, 1)
    assert all(one["sent_bytes"] > 0 for one in ranks["processes"])
