"""The part of `infra.bench peers` on a draft model: ours, and transformers' assistant model, in float32.

The draft is SmolLM2-135M with its real weights (`make judge-smollm2`). Of no larger model of its tokens are weights at
hand: the model is the same one with more layers behind its own, which are random and change the next token now and
then. So a draft's share of right tokens is that of such a pair, and no figure for another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from infra.bench.peers.lookups import TASKS, chat_ids, compare_answers, write_smollm2
from infra.bench.peers.settings import OURS, PeersSettings
from infra.bench.peers.texts import OurTexts, StockTexts, TextSide
from weights.formats.own_draft import DRAFT

_TIMES: Final = 3  # as many layers as the draft has
_ASKED: Final = ("copy a text", "write freely")


def measure_draft(settings: PeersSettings, folder: Path) -> list[dict[str, Any]]:
    """Write the answers with and without a draft, on both sides; no rows where the model is not installed."""
    files = sorted((settings.judges / "smollm2").rglob("*.gguf"))
    if not files:
        return []
    tokenizer = write_smollm2(files[0], folder / DRAFT)
    tokenizer.save_pretrained(folder)
    write_deeper(folder)
    sides = draft_sides(folder)
    return [row for task in _ASKED for row in compare_answers(task, chat_ids(tokenizer, TASKS[task]), sides, settings)]


def write_deeper(folder: Path) -> None:
    """Write a model with more layers than the draft in its folder, and random ones behind those that it has."""
    draft = AutoModelForCausalLM.from_pretrained(folder / DRAFT, dtype=torch.float32)
    config = type(draft.config).from_dict(draft.config.to_dict())
    config.num_hidden_layers *= _TIMES
    deeper = type(draft)(config)
    deeper.load_state_dict(draft.state_dict(), strict=False)
    deeper.save_pretrained(folder)


def draft_sides(folder: Path) -> dict[str, TextSide]:
    """Open a model four times: on both sides with and without its draft."""
    assistant = AutoModelForCausalLM.from_pretrained(folder / DRAFT, dtype=torch.float32).eval()
    return {
        OURS: OurTexts(folder),
        f"{OURS}, draft": OurTexts(folder, draft=folder / DRAFT),
        "transformers": StockTexts(folder, torch.float32),
        "transformers, draft": StockTexts(folder, torch.float32, assistant_model=assistant),
    }
