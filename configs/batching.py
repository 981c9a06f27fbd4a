"""Dynamic batching: the settings of `deployments/batching`, and those of the steps of language models."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.model import SpareBytes, StrictModel

MAX_PRIORITY_LEVELS = 100


class QueuePolicyConfig(StrictModel):
    """The limits of waiting at one priority. Durations are microseconds, as in Triton's model config."""

    max_queue_size: int | None = Field(None, ge=1, description="requests that may wait; None: as many as come")
    timeout_us: int | None = Field(None, ge=1, description="of waiting; None: for ever")
    timeout_action: Literal["reject", "defer"] = Field(
        "reject", description="defer: behind all requests whose time is not over, and served when there are none"
    )
    allow_timeout_override: bool = Field(True, description="a request may ask for a shorter wait")


class BatchingConfig(StrictModel):
    """The batch policy and the admission queue.

    Priorities are 1 (most urgent) to `priority_levels`; a request without one has `default_priority`.
    The strategies are explained in `deployments/batching/policy.py`.
    """

    max_batch_size: int = Field(32, ge=1, description="items in one batch")
    preferred_batch_sizes: tuple[int, ...] = Field((), description="a batch of such a size does not wait for more")
    max_queue_delay_us: int | None = Field(
        None,
        ge=0,
        description="how long a batch may wait for batch-mates when it could start; None: as long as it pays",
    )
    strategy: Literal["prefer_latency", "prefer_batch"] = Field(
        "prefer_latency",
        description="prefer_latency: wait and fill batches only as far as that lowers the mean latency, by what was "
        "measured so far; prefer_batch: wait out the delay for a preferred size even when idle",
    )
    max_batch_cost: int | None = Field(None, ge=1, description="of one batch, in the unit of its items: tokens, say")
    max_concurrent_batches: int = Field(1, ge=1, description="batches that may run at a time")
    priority_levels: int = Field(1, ge=1, le=MAX_PRIORITY_LEVELS)
    default_priority: int = Field(1, ge=1)
    max_overtakes: int = Field(64, ge=0, description="requests that may go first although they came later")
    default_queue_policy: QueuePolicyConfig = QueuePolicyConfig()
    queue_policies: dict[int, QueuePolicyConfig] = Field({}, description="by priority, where it differs")

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
        description="of each LLM; default: half of its weights' size, at least 64 MiB, never more than it can use; "
        "auto: what its weights leave of the replica's budget, which is no more than free memory then, and never more "
        "than it can use; LLMs that do not fit beside each other take turns",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="of the keys and values in the KV cache: auto, as the computation; int8, in half of bfloat16's "
        "memory, which changes answers by rounding",
    )
    max_step_tokens: int = Field(512, ge=16, description="prompt tokens and decoding sequences of one LLM step")
    max_decode_delay: float = Field(
        2.0,
        ge=1,
        allow_inf_nan=False,
        description="steps in which LLM sequences decode get as many prompt tokens as fit into so many times what the "
        "step takes without, as measured: a running stream waits no longer, and prompts beside it take longer",
    )
    max_prefill_beside_decode: int = Field(
        512, ge=1, description="prompt tokens of a step in which sequences decode, at most"
    )
    deterministic: bool = Field(
        False,
        description="on the CPU, an LLM's answer is the same bit for bit with and without a prefix cache hit: what "
        "completions have computed is not shared with later prompts",
    )
    max_num_seqs: int = Field(64, ge=1, description="LLM sequences that run at once")
    packed_arithmetic: Literal["fast", "deterministic", "exact"] = Field(
        "fast",
        description="products with packed weights (GGUF, Kuiper): fast quantizes activations to int8, deterministic "
        "on CUDA takes one kernel for any batch, so that a request gets the same tokens in each (on the CPU, fast does "
        "too), exact is float32",
    )
    decode_threads: int | None = Field(
        None, ge=1, le=1024, description="threads of LLM steps without prompts; default: num_threads"
    )
    prefill_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of LLM steps with prompts; default: num_threads. Where it is not decode_threads, "
        "prompts beside a completion may change it by rounding, unless its weights are packed",
    )
