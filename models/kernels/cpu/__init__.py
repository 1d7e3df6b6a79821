"""Kernels for CPUs: functions that Numba compiles and XLA calls as foreign functions (FFI). Optional.

`attention_calls` and `product_calls` are what models call: they take JAX arrays and say which arrays a kernel takes.
The other files are compiled by Numba: they see pointers, plain arrays, blocks and slots, and know nothing about JAX,
requests or model families. Without Numba XLA computes the same, up to rounding, several times more slowly; `support`
says whether the kernels are in use.
"""
