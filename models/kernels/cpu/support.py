"""Whether kernels for CPUs can be used here, and why not where they cannot. Imports no compiler."""

import ctypes
import logging
import platform
import re
import sys
from collections.abc import Callable
from functools import cache as once
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax

WIDEST = 16  # float32 numbers in the longest vector register of any CPU
GRAIN = 2 * WIDEST  # a block's slots and a head's dimensions must be multiples of this for attention
FFI_VERSION = (0, 3)  # major and minor version of XLA's foreign functions whose call frames `xla_call` reads
# Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), by which a process asks for AMX's tile registers
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_log = logging.getLogger(__name__)


class Support(NamedTuple):
    """Whether kernels can be used, and the reason if they cannot."""

    available: bool
    reason: str | None = None


class Target(NamedTuple):
    """A kernel that was registered with XLA."""

    name: str  # for `jax.ffi.ffi_call`
    threads: int  # that it uses
    workspace_size: Callable[..., int] = lambda *_: 0  # float32 numbers that it needs, from the sizes of a call


@once
def probe() -> Support:
    """What this installation allows. Compiles nothing and does not import Numba."""
    if find_spec("numba") is None:
        return Support(False, "numba is not installed (pip install 'dcpjax[cpu]')")
    found = ffi_version()
    if found != FFI_VERSION:
        written_for = f"they are written for {dotted(FFI_VERSION)}"
        return Support(False, f"jaxlib {version('jaxlib')} has XLA FFI {dotted(found)}, but {written_for}")
    return Support(True)


@once
def available() -> bool:
    """Whether kernels can be used. Warns once if Numba is there and they still cannot."""
    found = probe()
    if not found.available and find_spec("numba") is not None:
        _log.warning("CPU kernels are not in use, and models run several times more slowly: %s", found.reason)
    return found.available


@once
def matrix_units() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (Intel's AMX) and the system lets this process use them."""
    if not available() or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    from llvmlite.binding import get_host_cpu_features  # part of Numba

    known = get_host_cpu_features().get("amx-bf16", False)
    return known and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


@once
def threads_are_safe() -> bool:
    """Whether Numba finds Intel's TBB. Its other thread pools fail when two engines use them, or wait by spinning."""
    try:
        for file in files("tbb") or ():
            if file.name == "libtbb.so.12":
                ctypes.CDLL(str(file.locate()))
        import_module("numba.np.ufunc.tbbpool")
    except (PackageNotFoundError, ImportError, OSError):
        return False
    return True


def details() -> dict[str, Any]:
    """What kernels use here, or why they cannot be used, as plain data for a bug report. Compiles nothing."""
    found = probe()
    if not found.available:
        return {"available": False, "reason": found.reason}
    return {
        "available": True,
        "numba": version("numba"),
        "tbb": _tbb_version() if threads_are_safe() else None,
        "ffi": dotted(ffi_version()),
        "amx": matrix_units(),
    }


def ffi_version() -> tuple[int, int]:
    """Major and minor version of jaxlib's foreign functions; (-1, -1) if jaxlib does not say."""
    path = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    return declared_version(path.read_text() if path.is_file() else "")


def declared_version(header: str) -> tuple[int, int]:
    """Major and minor version that a C header of the interface declares; (-1, -1) if it declares none."""
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers.get("MAJOR", -1)), int(numbers.get("MINOR", -1))


def dotted(numbers: tuple[int, int]) -> str:
    return "of unknown version" if min(numbers) < 0 else ".".join(map(str, numbers))


def _tbb_version() -> str:
    try:
        return version("tbb")
    except PackageNotFoundError:  # not from the package index
        return "of the system"
