"""Numba functions as XLA custom calls: what a handler reads of XLA's call frame.

The frame is a C struct of 8-byte words (jaxlib's `xla/ffi/api/c_api.h`); a buffer's shape travels with it, so one
handler serves every shape. Knows nothing about what is computed.

    frame      | 1 extensions | 7 how many arguments | 9 arguments | 12 how many results | 14 results |
    buffer     | 3 data | 4 rank | 5 dimensions |
    extension  | 3 metadata |                     there when a handler is registered and asked for its version
    metadata   | 3 version, two halves |
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

import ctypes
from collections.abc import Callable
from functools import cache as once
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from threading import Lock
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import carray, get_num_threads, njit, types
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.support import INTERFACE

VERSION = INTERFACE[0] | INTERFACE[1] << 32  # major and minor, two halves of a word
NO_ERROR = 0
_HANDLER = types.int64(types.CPointer(types.int64))  # an error of a call frame


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@compiled
def words(address: int, count: int) -> np.ndarray:
    """int64 [count] at an address."""
    return carray(_pointer(address), count, np.int64)


@compiled
def data(buffer: int) -> Any:
    """Pointer to the numbers of a buffer."""
    return _pointer(words(buffer, 6)[3])


@compiled
def sizes(buffer: int) -> np.ndarray:
    """int64 [rank]: the dimensions of a buffer."""
    header = words(buffer, 6)
    return words(header[5], header[4])


@njit(inline="always")
def array(buffer: int, dimensions: int, dtype: Any) -> np.ndarray:
    """What a buffer holds, an array of so many dimensions; their number is written out where it is called."""
    return carray(data(buffer), to_fixed_tuple(sizes(buffer), dimensions), dtype)


@compiled
def is_call(frame: Any) -> bool:
    """Whether results are wanted. When a handler is registered it is asked for its version, which is answered here."""
    if frame[1] != 0:
        words(words(frame[1], 4)[3], 4)[3] = VERSION
    return frame[1] == 0


@compiled
def arguments(frame: Any) -> np.ndarray:
    """Addresses of the argument buffers."""
    return words(frame[9], frame[7])


@compiled
def results(frame: Any) -> np.ndarray:
    """Addresses of the result buffers."""
    return words(frame[14], frame[12])


def register(name: str, run: Callable[[Any], int], parallel: bool) -> str:
    """Make `run`, which is given a pointer to the call frame and returns NO_ERROR, a custom call of the CPU.

    Returns its full name. It is compiled with all that it calls and kept as a whole, so that later starts only read it:
    under that name, since Numba does not compare whether it is parallel, but does compare what it closes over, which
    therefore are plain values. Once for each name, whichever thread comes first: programs are traced in several at a
    time.
    """
    name = f"{name}_{'parallel' if parallel else 'in_turn'}"
    with _registering:
        if name not in _registered:
            run.__qualname__ = name
            handler = compiled(run, parallel=parallel)
            address = types.CompileResultWAP(handler.get_compile_result(_HANDLER)).__wrapper_address__()
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")
            _registered[name] = handler  # or its code would be freed
    return name


_registered: dict[str, Any] = {}
_registering = Lock()


def threads() -> int:
    """How many a kernel may use."""
    return get_num_threads() if threads_are_safe() else 1


@once
def threads_are_safe() -> bool:
    """Whether Numba finds Intel's TBB. Its other thread pools break when two engines use them, or wait by spinning."""
    try:
        for file in files("tbb") or ():
            if file.name == "libtbb.so.12":
                ctypes.CDLL(str(file.locate()))
        import_module("numba.np.ufunc.tbbpool")
    except (PackageNotFoundError, ImportError, OSError):
        return False
    return True
