"""Asks JAX for devices and for a compilation cache, before and after its backend starts."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from dcpjax.checkpoint.hub import cache_folder
from dcpjax.runtime.program_files import remove_old_parts, write_programs_whole


def ensure_devices(count: int) -> None:
    """Make sure that JAX has `count` devices: ask for virtual CPU devices if no backend has started yet.

    Raises ValueError, with the line to run first, when a backend runs already and has too few.
    """
    if count > jax.config.values["jax_num_cpu_devices"] and count > 1:
        with contextlib.suppress(RuntimeError):  # raised once a backend has started: too late to ask
            jax.config.update("jax_num_cpu_devices", count)
    found = _devices()
    if len(found) < count:
        raise ValueError(
            f"tensor_parallel_size must be at most the {len(found)} {found[0].platform} devices that JAX sees, "
            f"but is {count}; use {len(found)}, or for virtual CPU devices {_virtual(found[0].platform, count)}"
        )


def _devices() -> list[Any]:
    try:
        return jax.devices()
    except Exception as error:  # a backend can fail in any way
        raise ValueError(f"JAX must find a device, but its backend failed: {error}; see JAX_PLATFORMS") from error


def _virtual(platform: str, count: int) -> str:
    if platform != "cpu":
        return "set JAX_PLATFORMS=cpu"
    return f'run, before anything else uses JAX: jax.config.update("jax_num_cpu_devices", {count})'


def keep_compiled_programs(choice: bool | str | os.PathLike[str]) -> None:
    """Keep compiled programs in the user's cache folder (True), in a folder of choice, or not at all (False).

    A folder that the user has already given to JAX is left as it is.
    """
    if choice is False or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = cache_folder() / "compiled" if choice is True else Path(choice)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compilation_cache must be a folder that can be written, but {folder} is not ({error.strerror}); "
            f"name another, or use False to keep no compiled programs"
        ) from error
    remove_old_parts(folder)
    write_programs_whole()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # reading a small one is quicker too
