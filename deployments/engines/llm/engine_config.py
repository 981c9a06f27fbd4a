"""The settings of an LLM engine, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deployments.engines.records.protocol import EngineError

if TYPE_CHECKING:
    import torch

    from deployments.engines.costs.node_threads import NodeThreads
    from deployments.engines.llm.sequences.kv_cache import KvDtype
    from deployments.engines.nn.packed_weights import Arithmetic

STEP_KIND: Final = "step"  # of forwards, to the workspace: one row is the largest step


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMEngineConfig:
    """The settings of an LLM engine: its batches, what it may allocate, and its arithmetic.

    `max_model_len` None means the most that the model and `kv_cache_bytes` allow. `arithmetic` is of packed weights
    (`nn/packed_linear.py`). Steps in which sequences decode take about `max_decode_delay` times as long as without
    prompts, and have at most `max_prefill_beside_decode` prompt tokens. Steps of completions alone run on
    `decode_threads` of torch's threads, others on `prefill_threads`; None leaves their number as it is. What
    the host computes leases them from `node_threads`, if given. With
    `prompt_lookup` earlier successors of the last tokens are proposed, and a step may give several tokens. With
    `keeps_devices` each layer computes where its tensors are: on `device`, which has the head, or on the host.

    Raises:
        EngineError: no sequence or no token fits into a step.
    """

    device: str | torch.device = "cpu"
    keeps_devices: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_beside_decode: int = 512
    max_decode_delay: float = 2.0
    is_deterministic: bool = False
    prompt_lookup: bool = False
    kv_cache_bytes: int = 64 * 2**20
    kv_dtype: KvDtype = "auto"
    max_model_len: int | None = None
    arithmetic: Arithmetic = "fast"
    decode_threads: int | None = None
    prefill_threads: int | None = None
    node_threads: NodeThreads | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise EngineError(
                f"max_num_seqs is {self.max_num_seqs} and max_num_batched_tokens is {self.max_num_batched_tokens}; "
                "expected at least 1"
            )

    def check_padded_threads(self) -> None:
        """Raise EngineError if results must be equal bit for bit but the numbers of threads make them differ."""
        if self.is_deterministic and self.decode_threads != self.prefill_threads:
            raise EngineError(
                f"{self.decode_threads} threads decode and {self.prefill_threads} compute prompts; expected as many "
                "where results are the same bit for bit: torch rounds products by the number of threads"
            )


@dataclass(frozen=True, slots=True)
class LLMEngineStats:
    """The present sequences and blocks of the KV cache.

    `num_waiting` have not begun to decode, or were preempted; `num_preemptions` counts since the start how often a
    sequence gave up its blocks for an older one. `num_blocks` are used and free ones.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_blocks: int
    num_free_blocks: int
