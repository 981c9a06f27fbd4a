"""Trains the adder: python infra/demo/train_adder.py [--steps N] [--start DIR] [--out DIR]."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from adder_data import (
    ASSISTANT,
    EOS,
    MAX_POSITIONS,
    Chat,
    ChatSampler,
    build_tokenizer,
    save_tokenizer,
)

DEFAULT_OUT = Path(__file__).resolve().parent / "models" / "adder"
IGNORED = -100
WARM_UP = 100
PLAIN_SHARE = 0.5


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def starting_model(start: Path | None, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    if start is None:
        return build_model(tokenizer)
    return LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)


def encode(chats: list[Chat], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, ...]:
    """Token ids and labels. Padding is on the right: causal attention then needs no mask."""
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    ids = batch["input_ids"]
    return ids, answer_labels(ids, tokenizer)


def answer_labels(ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The labels of answers and their end tokens; the loss ignores all other tokens."""
    starts = (ids == tokenizer.convert_tokens_to_ids(ASSISTANT)).long()
    ends = (ids == tokenizer.convert_tokens_to_ids(EOS)).long()
    opened = starts.cumsum(1) - starts
    closed = ends.cumsum(1) - ends
    return torch.where((opened > closed) & (starts == 0), ids, IGNORED)


def learning_rate_factor(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def train(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(options.seed)
    model = starting_model(options.start, tokenizer).train()
    plain_steps = 0 if options.start else int(PLAIN_SHARE * options.steps)
    sampler = ChatSampler(options.seed, options.batch)
    settings = {"lr": options.lr, "betas": (0.9, 0.98), "weight_decay": 0.05}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    factor = partial(learning_rate_factor, steps=options.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    columns = (
        TextColumn("adder"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.5f}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("adder", total=options.steps, loss=math.nan)
        for step in range(options.steps):
            chats = sampler.batch(plain=step < plain_steps)
            loss = train_step(model, optimizer, *encode(chats, tokenizer))
            schedule.step()
            progress.update(task, advance=1, loss=loss)
            if (step + 1) % options.report == 0:
                progress.console.print(f"step {step + 1} loss {loss:.5f}")
    return model.eval()


def train_step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=32,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    save_tokenizer(out)
    # Safetensors writes its file for the owner only.
    (out / "model.safetensors").chmod(0o644)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the adder, a small Llama that adds.")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch", type=int, default=128, help="sums per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="1 where the cores are shared")
    parser.add_argument("--report", type=int, default=200, help="steps between printed losses")
    parser.add_argument("--start", type=Path, help="a trained adder to continue from")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    tokenizer = build_tokenizer()
    save(train(options, tokenizer), tokenizer, options.out)
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
