"""The one switch for workarounds of XLA's CPU backend."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")


def on_cpu(workaround: Callable[..., Result], plain: Callable[..., Result], *operands: Any) -> Result:
    """`workaround(*operands)` in programs for CPUs, `plain(*operands)` in programs for any other platform.
    An operand is an array or a tree of arrays.

    Both compute the same values; `plain` is the usual form, `workaround` one that XLA's CPU backend compiles to
    faster code. Both are traced, and JAX keeps one of them when it lowers the program. So the choice follows the
    platform that the program is compiled for, even if another one compiles it; callers need not know the platform;
    and the compiled program holds no branch.
    """
    return jax.lax.platform_dependent(*operands, cpu=workaround, default=plain)
