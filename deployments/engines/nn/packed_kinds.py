"""The types of packed tensors that the engines compute with, told without torch; `packed_weights.py` unpacks them."""

from typing import Final

FLOAT_KINDS: Final = ("F32", "F16", "BF16")
BLOCK_KINDS: Final = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
