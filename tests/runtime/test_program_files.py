import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from dcpjax.runtime.devices import keep_compiled_programs
from dcpjax.runtime.program_files import OLD_SECONDS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where JAX keeps programs, as it does for users; afterwards everything is as it was."""
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in options}
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    for name, age in (("young.1.part", 0.0), ("old.2.part", 2 * OLD_SECONDS)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    keep_compiled_programs(tmp_path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_again() -> None:
    """The same program each time, as in a new process."""

    def doubled(values: jax.Array) -> jax.Array:
        return 2 * values

    jax.jit(doubled).lower(jnp.ones(3)).compile()


def doubled_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if "doubled" in path.name]


def test_a_program_that_was_half_written_is_written_again(folder):
    compile_again()
    [path] = doubled_files(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        compile_again()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_again()


def test_a_write_that_is_cut_short_leaves_no_program(folder, monkeypatch):
    def killed(path: Path, target: Path) -> Path:
        assert path.stat().st_size > 0
        assert doubled_files(folder) == [path]
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        compile_again()
    assert doubled_files(folder) == []


def test_what_killed_processes_left_is_removed_once_it_is_old(folder):
    assert [path.name for path in folder.glob("*.part")] == ["young.1.part"]
