"""The step of a transformer whose tokens ranks share, predicted from that of one card and the link between cards.

What is computed divides by the ranks; each attention exchanges its queries, keys, values and outputs, and the output is
gathered once. It knows no more: no text encoder or VAE, which one rank runs, no kernels that are slower for fewer
heads, no exchange that overlaps with computing. Nothing was measured here: links and peers' times are published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class TokenWork:
    """A forward: rows of tokens through blocks of that width, to outputs of `out_width`; elements have `itemsize`."""

    rows: int
    tokens: int
    width: int
    num_blocks: int
    out_tokens: int
    out_width: int
    itemsize: int = 2

    def sent_bytes(self, count: int) -> int:
        """Return the bytes that each of `count` ranks sends in a forward."""
        of_attention = 4 * self.rows * self.tokens * self.width // count * (count - 1) // count * self.num_blocks
        of_output = self.rows * self.out_tokens * self.out_width // count * (count - 1)
        return self.itemsize * (of_attention + of_output)

    def num_exchanges(self, count: int) -> int:
        """Return the exchanges of a forward, each of which all ranks wait for: two for an attention, one at the end."""
        return 0 if count == 1 else 2 * self.num_blocks + 1


@dataclass(frozen=True, slots=True)
class CardLink:
    """The bytes that a card sends to others in a second, in one direction, and the seconds before the first arrives."""

    bytes_per_s: float
    latency_s: float = 20e-6


def predicted_s(alone_s: float, work: TokenWork, link: CardLink, count: int) -> float:
    """Return the seconds of a forward on `count` cards, of one that takes `alone_s` on one card."""
    sending_s = work.sent_bytes(count) / link.bytes_per_s if count > 1 else 0.0
    return alone_s / count + sending_s + work.num_exchanges(count) * link.latency_s


@dataclass(frozen=True, slots=True)
class Published:
    """A peer's figures: seconds of `num_forwards` by number of cards."""

    what: str
    work: TokenWork
    link: CardLink
    num_forwards: int
    seconds: dict[int, float]

    def rows(self) -> list[tuple[int, float, float]]:
        """Return cards, the prediction from the peer's own figure of one card, and its figure."""
        alone_s = self.seconds[1] / self.num_forwards
        return [
            (count, self.num_forwards * predicted_s(alone_s, self.work, self.link, count), found)
            for count, found in self.seconds.items()
            if count > 1
        ]


# Half of NVLink's published bandwidth, which is that of both directions: 400 GB/s of an H800, 900 of an H100. Between
# two H100, NVIDIA's own test found 380 of 450 one way (https://github.com/NVIDIA/nccl/issues/1264).
PUBLISHED: Final = (
    Published(
        "Qwen-Image, 2,048 px, 50 steps with guidance: vLLM-Omni, H800",
        TokenWork(2, 128 * 128 + 256, 3072, 60, 128 * 128, 64),
        CardLink(200e9),
        50,
        {1: 112.5, 2: 65.2, 4: 39.6, 8: 30.8},
    ),
    Published(
        "Wan 2.1 14B, 480p, 81 frames, a step with guidance: LightX2V, H100",
        TokenWork(2, 21 * 30 * 52, 5120, 40, 21 * 30 * 52, 64),
        CardLink(450e9),
        1,
        {1: 5.18, 8: 0.75},
    ),
)


def print_prediction() -> None:
    """Print the predictions beside the peers' figures."""
    table = Table("what", "cards", "predicted s", "published s", title="PREDICTION: tokens shared by several cards")
    for one in PUBLISHED:
        for count, predicted, found in one.rows():
            table.add_row(one.what, str(count), f"{predicted:.2f}", f"{found:.2f}")
    Console(width=120).print(table)
