"""Functions compiled by Numba and kept from one run to the next.

Numba keeps what it made beside the function's file and takes it as long as that one file is the same, although
functions and instructions from other files are part of it. Here the folder's name changes with any of these files.
"""

# Numba fills in its settings while it is imported
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable
from functools import cache as once
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from numba import njit
from numba.core import config


def compiled(function: Callable[..., Any], *, parallel: bool = False) -> Any:
    """Decorator: compiled at its first call, without Python's lock, dividing by zero as numpy does."""
    with _choosing:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder())
        try:
            return njit(function, error_model="numpy", nogil=True, cache=True, parallel=parallel)
        finally:
            config.CACHE_DIR = before


_choosing = Lock()


@once
def folder() -> Path:
    """Where these functions are kept: in the user's NUMBA_CACHE_DIR if there is one."""
    here = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    return Path(config.CACHE_DIR or here / "__pycache__") / f"dcpjax-{sha256(sources).hexdigest()[:16]}"
