"""Kernels in C++, compiled at installation or at their first use, and called through ctypes."""
