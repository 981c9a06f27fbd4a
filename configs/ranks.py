"""One model over several processes: the ranks of a worker's replica."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from configs.model import StrictModel

MAX_RANKS: Final = 64


class RanksConfig(StrictModel):
    """The ranks of each replica: processes that compute one model together, each on a device of its own.

    num_cpus, num_gpus and the budgets of the replica are those of each rank.
    """

    cfg: int = Field(1, ge=1, le=2, description="ranks for the two branches of guidance of an image model")
    sequence: int = Field(1, ge=1, le=MAX_RANKS, description="ranks that share the tokens of an image")
    tensor: int = Field(
        1, ge=1, le=MAX_RANKS, description="ranks that share the weights of a language model, each with its heads"
    )
    strategy: Literal["STRICT_PACK", "PACK"] = Field(
        "STRICT_PACK", description="where Ray puts the ranks: on one node, or on as few nodes as it can (PACK)"
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a rank waits for the others in a step; then the replica ends and is started anew",
    )

    @model_validator(mode="after")
    def _are_few(self) -> Self:
        if self.size > MAX_RANKS:
            raise ValueError(
                f"cfg {self.cfg} x sequence {self.sequence} x tensor {self.tensor} are {self.size} ranks, "
                f"at most {MAX_RANKS} compute one model"
            )
        return self

    @property
    def size(self) -> int:
        """The processes of a replica."""
        return self.cfg * self.sequence * self.tensor
