"""Compiled programs on disk, each written whole: a process that is killed leaves none half-written.

JAX (0.10) writes a program's file in place and never replaces it: what a killed process leaves would warn in every run
to come, and another process could read what is still being written. JAX has no public way to change this.
"""

import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path

PART = ".part"  # ends the name of a file that is being written
OLD_SECONDS = 3600.0  # nobody writes one file for so long


def write_programs_whole() -> None:
    """Make JAX write through `write_whole`. Changes nothing where JAX limits the size of its cache, or has changed."""
    try:
        from jax._src import compilation_cache
        from jax._src.lru_cache import LRUCache

        usual = compilation_cache.get_file_cache
    except (ImportError, AttributeError):
        return

    def get_file_cache(path: str) -> tuple[object, str] | None:
        found = usual(path)
        if found is not None and isinstance(found[0], LRUCache) and not found[0].eviction_enabled:
            found[0].put = partial(write_whole, Path(path))  # type: ignore[method-assign]
        return found

    compilation_cache.get_file_cache = get_file_cache  # type: ignore[assignment]


def write_whole(folder: Path, key: str, value: bytes) -> None:
    """Write a program that was not found, or could not be read: the file takes its name in one step."""
    path = folder / f"{key}-cache"  # as JAX names it
    part = folder / f"{key}.{os.getpid()}.{threading.get_ident()}{PART}"
    try:
        part.write_bytes(value)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove_old_parts(folder: Path) -> None:
    """Remove what processes that were killed have left."""
    for part in folder.glob(f"*{PART}"):
        with contextlib.suppress(OSError):  # another process has just removed it
            if time.time() - part.stat().st_mtime > OLD_SECONDS:
                part.unlink()
