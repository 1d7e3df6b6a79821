"""Numba functions as XLA's foreign functions (FFI): reading a call frame, answering with an error, registering.

The call frame is a C struct of 8-byte words (jaxlib's `xla/ffi/api/c_api.h`). A buffer's shape travels with it, so one
kernel serves every shape. The words that are used, by index:

    call frame   1 extensions, 2 API, 7 number of arguments, 9 arguments, 12 number of results, 14 results
    buffer       3 data, 4 rank, 5 dimensions
    extension    3 metadata: there when XLA, at registration, asks for the kernel's version of the interface
    metadata     3 version: major and minor, 32 bits each
    API          6 function that makes an error
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, get_num_threads, njit, types
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from dcpjax.models.kernels.cpu.compile import compiled, fingerprint
from dcpjax.models.kernels.cpu.support import FFI_VERSION, threads_are_safe

NO_ERROR = 0
_VERSION_WORD = FFI_VERSION[0] | FFI_VERSION[1] << 32
_WHICH_KERNEL = 0  # as a metadata's size, which XLA never gives; then word 1 is the answer's address, 2 its bytes
_HANDLER = types.int64(types.CPointer(types.int64))  # call frame -> address of an error, or NO_ERROR
_ERROR_SIZE, _INTERNAL = 28, 13  # XLA_FFI_Error_Create_Args_STRUCT_SIZE, XLA_FFI_Error_Code_INTERNAL

Handler = Callable[[Any], int]


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _create_error(typing: Any, function: Any, message: Any) -> Any:
    """Calls XLA_FFI_Error_Create, which copies the message (address of a C string), and returns the error's address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function, message = values
        place = builder.alloca(word, 4)
        fields = (ir.Constant(word, _ERROR_SIZE), ir.Constant(word, 0), message, ir.Constant(word, _INTERNAL))
        for index, field in enumerate(fields):
            builder.store(field, builder.gep(place, [ir.Constant(ir.IntType(32), index)]))
        kind = ir.FunctionType(word, [word.as_pointer()])
        return builder.call(builder.inttoptr(function, kind.as_pointer()), [place])

    return types.int64(types.int64, types.int64), generate


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
    """A buffer as an array. The number of dimensions must be a literal."""
    return carray(data(buffer), to_fixed_tuple(sizes(buffer), dimensions), dtype)


@compiled
def is_call(frame: Any, message: np.ndarray) -> bool:
    """Whether results are wanted. If not, the question is answered: XLA's at registration, for the interface's version,
    or `_message_of`'s, for the kernel's message."""
    if frame[1] != 0:
        metadata = words(words(frame[1], 4)[3], 4)
        if metadata[0] == _WHICH_KERNEL:
            answer = carray(_pointer(metadata[1]), metadata[2], np.uint8)
            for index in range(min(answer.size, message.size)):
                answer[index] = message[index]
        else:
            metadata[3] = _VERSION_WORD
    return frame[1] == 0


@compiled
def arguments(frame: Any) -> np.ndarray:
    """Addresses of the argument buffers."""
    return words(frame[9], frame[7])


@compiled
def results(frame: Any) -> np.ndarray:
    """Addresses of the result buffers."""
    return words(frame[14], frame[12])


@compiled
def error(frame: Any, message: np.ndarray) -> int:
    """An error with this message (uint8, ends with 0), which a kernel returns to XLA."""
    return _create_error(words(frame[2], 7)[6], message.ctypes.data)


def register(name: str, kernel: Callable[[bool, np.ndarray], Handler], threads: int) -> str:
    """Make a kernel a foreign function of XLA's CPU backend. Returns its full name.

    `kernel` takes whether it is parallel and the error's message, and returns the function that XLA calls: frame ->
    NO_ERROR or an error. Each name is registered once, whichever thread comes first: programs may be traced by several
    threads at a time.
    """
    parallel = threads > 1
    name = f"{name}_{'parallel' if parallel else 'sequential'}"
    text = f"CPU kernel {name} (sources {fingerprint()}) raised an exception; the process may be out of memory"
    message = np.frombuffer(text.encode() + b"\0", np.uint8)
    with _registering:
        if name not in _registered:
            if parallel:
                get_num_threads()  # starts them, which Numba does not do for a C callback that it reads from disk
            handler = _kept(kernel(parallel, message), message)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.c_void_p(handler.address)), platform="cpu")
            _registered[name] = handler  # or its code would be freed
    return name


def _kept(function: Handler, message: np.ndarray) -> Any:
    """A handler as a C callback, which Numba keeps on disk with all that it calls, so that later starts only read it.

    Numba finds it by its code and by the values that it closes over, which must be plain ones. The message is one of
    them: it names the kernel, its variant and the fingerprint of the sources. But Numba writes its index and the code
    at two moments and without a lock. Where two processes compile two variants at once, or one is killed, the index can
    lead to the code of another variant or of older sources. So the code that was read is asked which kernel it is.
    """
    handler = cfunc(_HANDLER, cache=True, error_model="numpy")(function)
    if _message_of(handler, message.size) == message.tobytes():
        return handler
    for index in Path(njit(function, cache=True).stats.cache_path).glob("*.nbi"):
        index.unlink(missing_ok=True)  # the next start compiles again and keeps it
    return cfunc(_HANDLER, error_model="numpy")(function)


def _message_of(handler: Any, size: int) -> bytes:
    """The first `size` bytes of the message with which a handler was compiled."""
    answer = np.zeros(size, np.uint8)
    metadata = np.array([_WHICH_KERNEL, answer.ctypes.data, size, 0], np.int64)
    extension = np.array([0, 0, 0, metadata.ctypes.data], np.int64)
    frame = np.array([0, extension.ctypes.data], np.int64)
    handler.ctypes(frame.ctypes.data_as(handler.ctypes.argtypes[0]))
    return answer.tobytes()


_registered: dict[str, Any] = {}
_registering = Lock()


def threads() -> int:
    """How many a kernel may use."""
    return get_num_threads() if threads_are_safe() else 1
