"""Dynamic batching: the settings of `deployments/batching`, and those of the steps of language models."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.model import SpareBytes, StrictModel

MAX_PRIORITY_LEVELS = 100


class QueuePolicyConfig(StrictModel):
    """The limits of waiting at one priority. Durations are microseconds, as in Triton's model config."""

    max_queue_size: int | None = Field(None, ge=1, description="maximum waiting requests; null: no limit")
    timeout_us: int | None = Field(None, ge=1, description="maximum waiting time in microseconds; null: no limit")
    timeout_action: Literal["reject", "defer"] = Field(
        "reject", description="at the timeout: reject the request, or serve it after all others (defer)"
    )
    allow_timeout_override: bool = Field(True, description="requests may name a shorter timeout")


class BatchingConfig(StrictModel):
    """The batch policy and the admission queue.

    Priorities are 1 (most urgent) to `priority_levels`; a request without one has `default_priority`.
    The strategies are explained in `deployments/batching/policy.py`.
    """

    max_batch_size: int = Field(32, ge=1, description="maximum items in a batch")
    preferred_batch_sizes: tuple[int, ...] = Field(
        (), description="a batch of one of these sizes starts without waiting for more"
    )
    max_queue_delay_us: int | None = Field(
        None,
        ge=0,
        description="maximum time that a batch waits for more requests, in microseconds; null: as long as it pays",
    )
    strategy: Literal["prefer_latency", "prefer_batch"] = Field(
        "prefer_latency",
        description="prefer_latency: wait and fill batches only as far as measurements show that it lowers the mean "
        "latency; prefer_batch: wait the whole delay for a preferred size, even when idle",
    )
    max_batch_cost: int | None = Field(
        None, ge=1, description="maximum cost of a batch, in the unit of its items (tokens of texts)"
    )
    max_concurrent_batches: int = Field(1, ge=1, description="maximum concurrent batches")
    priority_levels: int = Field(1, ge=1, le=MAX_PRIORITY_LEVELS)
    default_priority: int = Field(1, ge=1)
    max_overtakes: int = Field(64, ge=0, description="maximum later requests that start before the oldest one")
    default_queue_policy: QueuePolicyConfig = QueuePolicyConfig()
    queue_policies: dict[int, QueuePolicyConfig] = Field({}, description="limits by priority, where they differ")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.default_priority > self.priority_levels:
            raise ValueError(
                f"default_priority {self.default_priority} is beyond priority_levels {self.priority_levels}"
            )
        beyond = sorted(level for level in self.queue_policies if not 1 <= level <= self.priority_levels)
        if beyond:
            raise ValueError(f"queue_policies for unknown priorities {beyond} (known: 1 to {self.priority_levels})")
        wrong = [size for size in self.preferred_batch_sizes if not 1 <= size <= self.max_batch_size]
        if self.strategy == "prefer_batch" and self.max_queue_delay_us is None:
            raise ValueError("strategy prefer_batch needs max_queue_delay_us: how long to wait for a preferred size")
        if wrong:
            raise ValueError(f"preferred_batch_sizes {wrong} are not within 1 to max_batch_size {self.max_batch_size}")
        return self


class LanguageModelConfig(StrictModel):
    """The steps and the KV cache of each language model: a part of the worker's settings."""

    kv_cache_bytes: SpareBytes = Field(
        None,
        description="KV cache of each language model; default: half the size of its weights, at least 64 MiB; auto: "
        "what its weights leave of the replica's budget and of free memory, on each device that has layers "
        "of it; never more than it can use. Models that do not fit together take turns",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="type of the KV cache: auto is that of the computation; int8 takes half the memory of bfloat16 "
        "and changes answers by rounding",
    )
    max_step_tokens: int = Field(
        512, ge=16, description="maximum tokens of one step: prompt tokens and one per decoding sequence"
    )
    max_decode_delay: float = Field(
        2.0,
        ge=1,
        allow_inf_nan=False,
        description="how many times longer a decode step may take because of the prompts computed in it; lower values "
        "keep running streams smooth and make prompts wait longer",
    )
    max_prefill_beside_decode: int = Field(
        512, ge=1, description="maximum prompt tokens of a step in which sequences decode"
    )
    deterministic: bool = Field(
        False,
        description="on the CPU, make answers the same, bit for bit, with and without a hit in the prefix cache; keys "
        "and values of completions are then not shared with later prompts",
    )
    prompt_lookup: bool = Field(
        False,
        description="propose the tokens that stood behind the last ones before, in prompt or answer, and check several "
        "in one step: the same tokens, sooner where a text repeats itself; a draft model goes before it",
    )
    max_num_seqs: int = Field(64, ge=1, description="maximum sequences that run at once")
    packed_arithmetic: Literal["fast", "deterministic", "exact"] = Field(
        "fast",
        description="products with packed weights (GGUF, Kuiper), of denoisers too: fast rounds activations to int8; "
        "deterministic uses one kernel for any batch, so that a request gets the same in each on CUDA, too (on the "
        "CPU, fast does); exact computes in float32",
    )
    decode_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of steps without prompts; default: num_threads. More than num_cpus of any are leased from "
        "the node for each step, so that replicas take turns on its cores",
    )
    prefill_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of steps with prompts; default: num_threads. Another number than decode_threads may "
        "change a completion by rounding when prompts run beside it, unless its weights are packed",
    )
