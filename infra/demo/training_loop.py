"""One training loop for all diffusion demo models: AdamW, warm-up, cosine, clipping, EMA."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EMA_RATE = 0.005
CHECKPOINT_STEPS = 400
MAX_GRADIENT_NORM = 1.0


def argument_parser(description: str, steps: int, out: Path) -> argparse.ArgumentParser:
    """The command line that every training script has: --steps, --out, --seed, --threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=out, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    # One thread, because two that compete with another process for two cores wait for each other
    # at every barrier: measured 20 times slower than one.
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    return parser


def seed_everything(seed: int, threads: int) -> tuple[random.Random, torch.Generator]:
    """Fix torch's global state (initial weights) and return the generators that data draws use."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    return random.Random(seed), torch.Generator().manual_seed(seed)


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(
    label: str,
    parameters: Iterable[torch.nn.Parameter],
    loss_of_batch: Callable[[], torch.Tensor],
    steps: int,
    learning_rate: float,
    warmup: int = 200,
    checkpoint: Callable[[], None] | None = None,
) -> None:
    """Minimise `loss_of_batch()`; afterwards the parameters hold their moving average.

    `checkpoint` is called now and then, with the moving average in place.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    averages = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps, min(warmup, max(1, steps // 5)))
    )
    with _progress() as progress:
        task = progress.add_task(label, total=steps, loss=math.nan)
        smooth_loss = math.nan
        for step in range(1, steps + 1):
            loss = loss_of_batch()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
            torch._foreach_lerp_(averages, [p.detach() for p in trained], EMA_RATE)
            smooth_loss = _smooth(smooth_loss, loss.item())
            progress.update(task, advance=1, loss=smooth_loss)
            if checkpoint and step % CHECKPOINT_STEPS == 0 and step < steps:
                progress.console.print(f"{label}: checkpoint at {step}, loss {smooth_loss:.4f}")
                exchange(trained, averages)
                checkpoint()
                exchange(trained, averages)
    exchange(trained, averages)
    print(f"{label}: {steps} steps, loss {smooth_loss:.4f}")


@torch.no_grad()
def exchange(first: list[torch.nn.Parameter], second: list[torch.Tensor]) -> None:
    """Swap the values of two lists of equally shaped tensors."""
    for left, right in zip(first, second, strict=True):
        kept = left.clone()
        left.copy_(right)
        right.copy_(kept)


def _smooth(previous: float, loss: float) -> float:
    return loss if math.isnan(previous) else previous + 0.02 * (loss - previous)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
