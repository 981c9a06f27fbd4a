"""Simulated accelerators: torch devices `sim:0` and on, on any machine. A test instrument, for processes of their own.

They compute on the host, bit for bit as the host does, and have memories and links of their own. What only a second
memory shows is real: a tensor on the wrong device raises, memory runs out, bytes over the link are counted. Streams,
kernels and the time that ops take are not.
"""

from infra.sim.installation import VARIABLE, check_simulated, simulate

__all__ = ["VARIABLE", "check_simulated", "simulate"]
