"""`infra.bench llm-accuracy`: how far packed weights lead from the model's float32 weights, beside llama.cpp.

For each type of weights: the Kullback-Leibler divergence of the next token's distribution from that of transformers in
float32 on the weights before they were packed, and how often the best token is the same. Both engines open the same
file, which llama.cpp has written. `arithmetic` is the divergence from the packed weights themselves in float32: what
the engine adds, by rounding activations, beside what packing has lost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.sequences.block_manager import blocks_for
from deployments.engines.nn.packed_weights import Arithmetic
from deployments.records.errors import InvalidRequest
from infra.bench.command.batch_decoder import BatchDecoder, BatchToken
from infra.bench.command.peers import LlamaCpp, llama_cpp_python
from infra.bench.llm_files import write_tokenizer
from infra.offline.checkpoints import quantize_checkpoint
from weights.loading.views import mapped_tensors

FILE_TYPES: Final = {  # LLAMA_FTYPE_MOSTLY_* of llama.h, by the type of the matrices
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K": 17,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K": 15,
    "Q4_1": 3,
    "Q4_0": 2,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "Q3_K": 12,
    "Q2_K": 10,
}
_PROMPT: Final = 8  # random tokens, behind which the model writes the rest itself
_WIDTH: Final = 256
_VOCABULARY: Final = 1024


def measure_accuracy(
    model: Path | None,
    types: Sequence[str],
    *,
    num_texts: int,
    num_tokens: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Return a row for each type. Without a model, one of random weights is made (`write_model`).

    Raises InvalidRequest where llama.cpp is not there, which writes the files.
    """
    python = llama_cpp_python()
    if python is None:
        raise InvalidRequest("llama.cpp writes the files that are measured: make judge-llama")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = model or write_model(folder / "model")
        texts, reference = _reference(source, num_texts, num_tokens)
        wide = folder / "F32.gguf"
        quantize_checkpoint(source, wide, "gguf-f32")
        rows = []
        for kind in types:
            progress(kind)
            file = folder / f"{kind}.gguf"
            with LlamaCpp(python, wide) as writer:
                writer.ask("quantize", source=str(wide), target=str(file), ftype=FILE_TYPES[kind])
            with LlamaCpp(python, file, threads=torch.get_num_threads()) as judge:
                theirs = torch.cat([_theirs(judge, text, folder / "logits.npy") for text in texts])
            ours, exact = _ours(file, texts, "fast"), _ours(file, texts, "exact")
            file.unlink()
            row: dict[str, Any] = {"type": kind, "num_tokens": len(reference)}
            for name, logits in (("atelier", ours), ("llama.cpp", theirs), ("float32", exact)):
                row[name] = {"kl": divergence(reference, logits), "top_1": _agreement(reference, logits)}
            row["atelier"]["arithmetic"], row["llama.cpp"]["arithmetic"] = (
                divergence(exact, logits) for logits in (ours, theirs)
            )
            rows.append(row)
        return rows


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the mean over rows (N, vocabulary) of KL(reference || logits), in nats."""
    wanted, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def _agreement(reference: torch.Tensor, logits: torch.Tensor) -> float:
    return float((reference.argmax(-1) == logits.argmax(-1)).double().mean())


@torch.inference_mode()
def _reference(source: Path, num_texts: int, num_tokens: int) -> tuple[list[list[int]], torch.Tensor]:
    """Return texts that the model writes at temperature 1, and its logits behind each of their tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    starts = torch.randint(3, model.config.vocab_size, (num_texts, _PROMPT))
    most = {"min_new_tokens": num_tokens - _PROMPT, "max_new_tokens": num_tokens - _PROMPT}
    found = model.generate(starts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, **most)
    return found.tolist(), torch.cat([model(text[None]).logits[0] for text in found])


def _theirs(judge: LlamaCpp, text: list[int], file: Path) -> torch.Tensor:
    judge.ask("all_logits", ids=text, file=str(file))
    return torch.from_numpy(np.load(file))


def _ours(file: Path, texts: Iterable[list[int]], arithmetic: Arithmetic) -> torch.Tensor:
    described, tensors, _ = mapped_tensors(file)
    model = create_model(load_config(described), tensors, torch.device("cpu"), arithmetic=arithmetic)
    found = []
    for text in texts:
        decoder = BatchDecoder(model, num_blocks=blocks_for(len(text)) + 1)
        found.append(decoder.decode([BatchToken(token, at, 0, True) for at, token in enumerate(text)]))
    return torch.cat(found)


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a Qwen2 of random weights that are as hard to pack as a trained one's, and return its folder.

    Spectra fall by a power law and single weights have heavy tails; a few channels are much larger than the others; and
    biases give some keys elements of tens, as those of Qwen2 have.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    heads, kv_heads, wide, layers = 4, 2, 2 * _WIDTH, 3
    size = _WIDTH // heads

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        rank = min(rows, columns)
        left, right = (torch.linalg.qr(torch.randn(side, rank, generator=draw))[0] for side in (rows, columns))
        smooth = left * torch.arange(1, rank + 1).float() ** -0.35 @ right.T
        chi = torch.randn(rows, columns, 5, generator=draw).square().mean(-1).sqrt()
        tails = torch.randn(rows, columns, generator=draw) / chi  # Student's t
        return gain * (0.8 * smooth / smooth.norm() * rows**0.5 + 0.6 * tails / columns**0.5)

    large = torch.randperm(_WIDTH, generator=draw)[:4]
    tensors = {"model.embed_tokens.weight": matrix(_VOCABULARY, _WIDTH), "model.norm.weight": torch.ones(_WIDTH)}
    tensors["lm_head.weight"] = matrix(_VOCABULARY, _WIDTH, 1.5)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, rows in (("q", _WIDTH), ("k", kv_heads * size), ("v", kv_heads * size)):
            bias = 0.3 * torch.randn(rows, generator=draw)
            if part == "k":
                bias[torch.randperm(rows, generator=draw)[:6]] *= 200
            tensors[f"{name}.self_attn.{part}_proj.bias"] = bias
            tensors[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows, _WIDTH, 1.0 if part == "v" else 1.5)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(_WIDTH, _WIDTH, 0.25)
        tensors |= {f"{name}.mlp.{part}_proj.weight": matrix(wide, _WIDTH) for part in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(_WIDTH, wide, 0.25)
        tensors[f"{name}.mlp.down_proj.weight"][large] *= 4
        for part in ("input", "post_attention"):
            norm = 0.3 + 0.7 * torch.rand(_WIDTH, generator=draw)
            norm[large] *= torch.tensor([6.0, 3.0, 10.0, 0.1])
            tensors[f"{name}.{part}_layernorm.weight"] = norm
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32", "hidden_act": "silu"}
    sizes = {"hidden_size": _WIDTH, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": _VOCABULARY}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096}
    others = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config | sizes | others))
    write_tokenizer(folder, _VOCABULARY)
    return folder


def formatted_accuracy(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| type | KL, ours | llama.cpp | in float32 | top-1, ours | llama.cpp | arithmetic alone, ours | llama.cpp |"
    ]
    lines.append("|---" * 8 + "|")
    for row in rows:
        ours, theirs, exact = row["atelier"], row["llama.cpp"], row["float32"]
        numbers = [f"{one['kl']:.4f}" for one in (ours, theirs, exact)]
        numbers += [f"{one['top_1']:.1%}" for one in (ours, theirs)]
        numbers += [f"{one['arithmetic']:.4f}" for one in (ours, theirs)]
        lines.append(f"| {row['type']} | {' | '.join(numbers)} |")
    return "\n".join(lines)
