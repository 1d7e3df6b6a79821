"""Kernels that fail: XLA is told, and the process lives."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import float32, prange

from dcpjax.models.kernels.cpu import xla_call
from dcpjax.models.kernels.cpu.compile import both, catching, compiled, raise_if
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, arguments, array, error, is_call, results


def _count(x: np.ndarray, y: np.ndarray) -> None:
    failed = 0
    for index in prange(x.shape[0]):
        failed += _count_one(np.int64(index), x, y)
    raise_if(failed)


@catching
@compiled
def _count_one(index: int, x: np.ndarray, y: np.ndarray) -> None:
    """Allocates x[index] bytes, which may be too many."""
    if x[index] < 0:
        raise ValueError("negative")
    y[index] = np.empty(np.int64(x[index]), np.uint8).size


_count_parallel, _count_sequential = both(_count)


def kernel(parallel: bool, message: np.ndarray) -> xla_call.Handler:
    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        x, y = array(arguments(frame)[0], 1, float32), array(results(frame)[0], 1, float32)
        try:
            if parallel:
                _count_parallel(x, y)
            else:
                _count_sequential(x, y)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler


def counted(threads: int, *numbers: float) -> np.ndarray:
    name = xla_call.register("dcpjax_test_count", kernel, threads)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((len(numbers),), jnp.float32))
    return np.asarray(jax.jit(call)(jnp.asarray(numbers, jnp.float32)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wrong", [-1.0, 2.0**62], ids=["an exception", "no memory"])
def test_a_kernel_that_fails_raises_in_python_and_the_next_call_works(threads, wrong):
    variant = "parallel" if threads > 1 else "sequential"
    message = rf"INTERNAL: CPU kernel dcpjax_test_count_{variant} \(sources [0-9a-f]+\) raised an exception"
    np.testing.assert_array_equal(counted(threads, 3.0, 5.0), [3.0, 5.0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        counted(threads, 3.0, wrong)
    np.testing.assert_array_equal(counted(threads, 3.0, 5.0), [3.0, 5.0])


FAILS_FROM_DISK = """
from test_xla_call import counted
import jax
try:
    counted(2, 1.0, -1.0)
except jax.errors.JaxRuntimeError as error:
    print(error)
from dcpjax.models.kernels.cpu import xla_call
print([handler.cache_hits for handler in xla_call._registered.values()])
"""


def test_a_kernel_read_from_disk_fails_alike():
    counted(2, 1.0)
    paths = f"import sys; sys.path.insert(0, {str(__file__.rsplit('/', 1)[0])!r})"
    run = [sys.executable, "-c", paths + FAILS_FROM_DISK]
    output = subprocess.run(run, check=True, timeout=120, capture_output=True, text=True).stdout.splitlines()
    assert output[0].startswith("INTERNAL: CPU kernel dcpjax_test_count_parallel ")
    assert output[-1] == "[1]"


def test_a_kernel_is_registered_once_however_many_threads_ask_for_it():
    def answers(parallel: bool, message: np.ndarray) -> xla_call.Handler:
        def handler(frame: Any) -> int:
            is_call(frame, message)
            return NO_ERROR

        return handler

    with ThreadPoolExecutor(4) as pool:
        for asked in [pool.submit(xla_call.register, "dcpjax_registered_once", answers, 1) for _ in range(4)]:
            assert asked.result() == "dcpjax_registered_once_sequential"
