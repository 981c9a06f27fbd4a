"""The part of `infra.bench peers` on tokens proposed from the text so far: ours, and transformers' prompt lookup.

SmolLM2-135M with its real weights (`make judge-smollm2`), in float32 on both sides: a random model repeats no prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.bench.peers.settings import OURS, PeersSettings, Took, rows_of
from infra.bench.peers.texts import OurTexts, StockTexts, TextSide

_PROPOSED: Final = 10  # tokens at most, of transformers
_OTHER: Final = 300  # the first token of the first round's prompts
_TEXT: Final = (
    "The lighthouse at Port Ellery was built in 1871 from grey granite. Its lamp burned oil until 1923, when the "
    "harbour board replaced it by an electric one. The keeper lived in a small house beside the tower with his family, "
    "and wrote down every ship that passed. His books are in the town's museum today."
)
TASKS: Final[Mapping[str, str]] = {
    "copy a text": f"Repeat this text word for word:\n\n{_TEXT}",
    "summarise it": f"Summarise this text in three sentences, with its own words:\n\n{_TEXT}",
    "write freely": "Write a story about a child who finds a map in an old library.",
}


def measure_lookup(settings: PeersSettings, folder: Path) -> list[dict[str, Any]]:
    """Write the answers with and without proposals, on both sides; no rows where the model is not installed."""
    files = sorted((settings.judges / "smollm2").rglob("*.gguf"))
    if not files:
        return []
    tokenizer = write_smollm2(files[0], folder)
    sides = lookup_sides(folder)
    return [
        row for task, text in TASKS.items() for row in compare_answers(task, chat_ids(tokenizer, text), sides, settings)
    ]


def lookup_sides(folder: Path) -> dict[str, TextSide]:
    """Open a model four times: on both sides with and without proposals."""
    return {
        OURS: OurTexts(folder),
        f"{OURS}, lookup": OurTexts(folder, prompt_lookup=True),
        "transformers": StockTexts(folder, torch.float32),
        "transformers, lookup": StockTexts(folder, torch.float32, prompt_lookup_num_tokens=_PROPOSED),
    }


def compare_answers(
    task: str, prompt: Sequence[int], sides: Mapping[str, TextSide], settings: PeersSettings
) -> list[dict[str, Any]]:
    """Let each side answer a prompt, in turn. Raises RuntimeError where ours change a token."""
    times: dict[str, list[Took]] = {name: [] for name in sides}
    ids: dict[str, Sequence[int]] = {}
    for round_ in range(settings.slow_rounds + 1):  # the first one warms up
        for name, side in sides.items():
            texts = side.write([[_OTHER + round_, *prompt[1:]]], settings.num_answer)  # no prompt is in a cache
            ids[name] = texts.ids[0]
            times[name] += [texts.took] if round_ else []
    if any(own != ids[OURS] for name, own in ids.items() if name.startswith(f"{OURS},")):
        raise RuntimeError(f"{task}: the tokens are others with proposals")
    rows = rows_of(f"{task}, {settings.num_answer} tokens", times)
    cpu_ms = {row["side"]: row["cpu_ms"] for row in rows}
    for row in rows:
        plain, comma, _ = row["side"].partition(",")
        if comma:
            same = "same tokens" if ids[plain] == ids[row["side"]] else "other tokens"
            row["beside"] = f"{cpu_ms[plain] / row['cpu_ms']:.2f} of {plain}'s speed; {same}"
    return rows


def write_smollm2(file: Path, folder: Path) -> Any:
    """Write the model of a GGUF file as a folder in float32, and return its tokenizer."""
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = {key: value for key, value in unpacked.config.to_dict().items() if key != "quantization_config"}
    plain = type(unpacked)(type(unpacked.config)(**config))  # for transformers saves no model that came from GGUF
    plain.load_state_dict(unpacked.state_dict())
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)
    return tokenizer


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    asked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return [int(token) for token in tokenizer(asked)["input_ids"]]
