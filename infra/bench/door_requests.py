"""The requests that `infra.bench door` sends: every kind, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Final

from infra.bench.command.serve import DIGITS, LOOKS, WAYS
from infra.bench.door_load import Ask
from infra.bench.encode_load import Texts, vocabulary
from infra.bench.encode_servers import minilm_folder

MINILM, ADDER, FLUX, SDXL = "minilm", "adder", "digits-flux", "digits-sdxl"
STEPS: Final = 16
NUM_CACHED: Final = 64
NUM_KINDS: Final = 4  # of a mixed load


class Requests:
    """Requests of every kind, drawn from a seed. But for the cached ones, no text comes twice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._texts = Texts(vocabulary(minilm_folder()), seed)
        self._prompts: set[str] = set()
        self._cached = self._texts.draw(NUM_CACHED, 20)
        self.makers: dict[str, Callable[[int], list[Ask]]] = {
            "empty endpoint": self._empty,
            "cached embedding": self._cached_embedding,
            "new embedding": self._embedding,
            "chat": self._chat,
            "streamed chat": partial(self._chat, stream=True),
            "image": partial(self._image, FLUX),
        }

    def draw_kinds(self, number: int) -> dict[str, list[Ask]]:
        """Return `number` requests of each kind of the mixed loads, by kind: two services, four models."""
        drawn = (self._embedding(number), self._chat(number), self._image(FLUX, number), self._image(SDXL, number))
        return {asks[0].kind: asks for asks in drawn}

    def draw_mix(self, number: int) -> list[Ask]:
        """Return `number` requests, equally many of each kind but for the remainder, in a drawn order."""
        kinds = list(self.draw_kinds(-(-number // NUM_KINDS)).values())
        self.rng.shuffle(kinds)
        drawn = [ask for turn in zip(*kinds, strict=True) for ask in turn][:number]
        self.rng.shuffle(drawn)
        return drawn

    def _empty(self, number: int) -> list[Ask]:
        return [Ask("empty endpoint", "/v2/health/live")] * number

    def _cached_embedding(self, number: int) -> list[Ask]:
        asks = [_embedding("cached embedding", text) for text in self._cached]
        return list(islice(cycle(asks), number))

    def _embedding(self, number: int) -> list[Ask]:
        return [_embedding("new embedding", text) for text in self._texts.draw(number)]

    def _chat(self, number: int, *, stream: bool = False) -> list[Ask]:
        sums = [f"What is {self.rng.randrange(100)} + {self.rng.randrange(100)}?" for _ in range(number)]
        body = {"model": ADDER, "temperature": 0, "max_tokens": 16, "stream": stream}
        return [
            Ask("chat", "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})
            for text in sums
        ]

    def _image(self, model: str, number: int) -> list[Ask]:
        body = {"model": model, "size": "32x32", "num_inference_steps": STEPS, "seed": 0}
        prompts = [self._draw_prompt() for _ in range(number)]
        return [Ask(f"image of {model}", "/v1/images/generations", body | {"prompt": prompt}) for prompt in prompts]

    def _draw_prompt(self) -> str:
        """Return a new prompt. There are a quarter of a million."""
        while True:
            looks = self.rng.choices(LOOKS, k=3)
            prompt = " ".join(["a", *looks, self.rng.choice(WAYS), self.rng.choice(DIGITS)])
            if prompt not in self._prompts:
                self._prompts.add(prompt)
                return prompt


def _embedding(kind: str, text: str) -> Ask:
    return Ask(kind, "/v1/embeddings", {"model": MINILM, "input": text})
