"""How the functions of this folder are compiled, and a fingerprint of their sources.

Only whole kernels are kept on disk, by `xla_call.register`. The functions that they are made of are not: Numba takes a
kept function for current as long as the one file that defines it is unchanged, although code from other files is part
of it.
"""

from collections.abc import Callable
from functools import cache as once
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit
from numba.extending import register_jitable


def compiled(function: Callable[..., Any], *, parallel: bool = False) -> Any:
    """Decorator: compiled at its first call, divides by zero as NumPy does. `parallel` makes `prange` use threads."""
    return njit(function, error_model="numpy", nogil=True, parallel=parallel)


def catching(function: Any) -> Any:
    """Decorator of a compiled function: it returns how many exceptions it raised, 0 or 1. Numba loses an exception at
    the end of a thread, and in a function that C calls."""

    def call(*inputs: Any) -> int:
        try:
            function(*inputs)
        except Exception:
            return 1
        return 0

    return compiled(call)


def both(function: Callable[..., None]) -> tuple[Any, Any]:
    """A kernel's outermost function: with `prange` shared by threads, and on one thread."""
    return compiled(function, parallel=True), compiled(function)


@compiled
def raise_if(failed: int) -> None:
    """Raise what threads could not: `failed` of their calls had an exception."""
    if failed != 0:
        raise RuntimeError("a thread had an exception")


# Decorator: compiled where kernels call the function, plain Python where Python does
shared_with_python = register_jitable(error_model="numpy")


@once
def fingerprint() -> str:
    """Changes with every file of this folder."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return sha256(sources).hexdigest()[:16]
