"""Kernels for CPUs, compiled by Numba and called by XLA. Optional: without Numba XLA does the same."""
