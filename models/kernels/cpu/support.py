"""Whether kernels compiled by Numba can be called here: it is installed, and XLA's call frames are those we know.

And whether the CPU has matrix units that they may use.
"""

import ctypes
import platform
import re
import sys
from functools import cache as once
from importlib.util import find_spec
from pathlib import Path

import jax

WIDEST = 16  # float32 numbers in the longest vector register of any CPU
GRAIN = 2 * WIDEST  # what a block's slots and a head's dimensions must be multiples of for attention
INTERFACE = (0, 3)  # of XLA's foreign functions, whose frames `numba_call` reads
ASK, TILES = (158, 0x1023), 18  # Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM), and what a process asks for


@once
def available() -> bool:
    return find_spec("numba") is not None and interface(_header()) == INTERFACE


@once
def matrix_units() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (Intel's AMX) and the system, which wants to be asked, lets it."""
    if not available() or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    from llvmlite.binding import get_host_cpu_features  # part of Numba

    return get_host_cpu_features().get("amx-bf16", False) and ctypes.CDLL(None).syscall(*ASK, TILES) == 0


def interface(header: str) -> tuple[int, int]:
    """Major and minor version that a C header of the interface declares; (-1, -1) if it declares none."""
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers.get("MAJOR", -1)), int(numbers.get("MINOR", -1))


def _header() -> str:
    path = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    return path.read_text() if path.is_file() else ""
