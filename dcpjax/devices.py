"""Asking JAX for devices and for a compilation cache, before and after its backend starts."""

import contextlib
import os
from pathlib import Path

import jax

from dcpjax.hub import cache_folder


def ensure_devices(count: int) -> None:
    """See to it that JAX has `count` devices, asking for virtual CPU devices if no backend has started yet.

    Raises ValueError, with the line to run first, when a backend runs already and has too few.
    """
    if count > jax.config.values["jax_num_cpu_devices"] and count > 1:
        with contextlib.suppress(RuntimeError):  # raised once a backend has started: too late to ask
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if len(found) < count:
        raise ValueError(
            f"tensor_parallel_size must be at most the {len(found)} {found[0].platform} devices that JAX sees, "
            f"but is {count}; use {len(found)}, or for virtual CPU devices run, before anything else uses JAX: "
            f'jax.config.update("jax_num_cpu_devices", {count})'
        )


def keep_compiled_programs(choice: bool | str | os.PathLike[str]) -> None:
    """Keep compiled programs in the user's cache folder (True), in a folder of choice, or not at all (False).

    A folder that the user has already given to JAX is left as it is.
    """
    if choice is False or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = cache_folder() / "compiled" if choice is True else Path(choice)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
