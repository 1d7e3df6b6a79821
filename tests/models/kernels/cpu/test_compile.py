"""What is compiled again, and where kernels are kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numba import njit
from numba.core import config

from dcpjax.models.kernels.cpu import (
    compile,
    paged_attention,
    tile,
    xla_call,
)


def test_every_file_of_kernels_is_part_of_the_fingerprint(tmp_path, monkeypatch):
    """Numba alone would take a kernel for current whose instructions, in another file, have changed."""
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "compile.py"))
    fingerprint = compile.fingerprint.__wrapped__
    for module in (paged_attention, tile):
        source = Path(str(module.__file__))
        (tmp_path / source.name).write_bytes(source.read_bytes())
    before = fingerprint()
    assert before == fingerprint()
    with (tmp_path / "tile.py").open("a") as file:
        file.write("\n")
    assert fingerprint() != before


def kernel(parallel: bool, message: np.ndarray) -> xla_call.Handler:
    def handler(frame: Any) -> int:
        if not xla_call.is_call(frame, message):
            return xla_call.NO_ERROR
        return xla_call.error(frame, message) if parallel else xla_call.NO_ERROR

    return handler


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The user's own folder for what Numba keeps. XLA is not told about kernels, which may be registered again."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(xla_call, "_registered", {})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    return tmp_path


def test_kernels_are_kept_there_and_functions_of_the_user_where_he_says(kept):
    def own(x: int) -> int:
        return x

    xla_call.register("dcpjax_test_kept", kernel, 1)
    assert len(list(kept.rglob("test_compile.kernel.locals.handler-*.nbi"))) == 1
    assert vars(config)["CACHE_DIR"] == str(kept)
    assert njit(own, cache=True).stats.cache_path.startswith(str(kept))


STARTS = """
import numpy as np
from numba.core import event
from dcpjax.models.kernels.cpu import attention_calls
passes = event.RecordingListener()
event.register("numba:run_pass", passes)
attention_calls._write_kernel(np.dtype(np.uint16), True)
print(len(passes.buffer))
"""


def test_a_kernel_that_is_kept_is_not_compiled_again(tmp_path):
    """Numba would link what a handler calls into it, and translate all of that, at every start."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def passes() -> int:
        run = [sys.executable, "-c", STARTS]
        return int(subprocess.run(run, check=True, timeout=300, capture_output=True, text=True, env=environment).stdout)

    assert passes() > 0
    assert passes() == 0


def test_sizes_of_workspaces_are_computed_without_compiling():
    """They are needed at every start, when kernels are only read."""
    for function in (paged_attention.chunk_size, paged_attention.round_up, paged_attention._most_tokens):
        assert not hasattr(function, "signatures")
    assert paged_attention.workspace_size(256, 3, 64) > 0


def test_variants_and_sources_of_a_kernel_are_kept_apart(kept, monkeypatch):
    """Numba finds a kernel by its code, which is the same, and by what it closes over, which has to differ."""

    def count() -> int:
        return len(list(kept.rglob("*.nbc")))

    for threads in (1, 2):
        xla_call.register("dcpjax_test_variants", kernel, threads)
        assert count() == threads
    xla_call._registered.clear()
    xla_call.register("dcpjax_test_variants", kernel, 1)
    assert count() == 2
    assert [handler.cache_hits for handler in xla_call._registered.values()] == [1]
    xla_call._registered.clear()
    monkeypatch.setattr(xla_call, "fingerprint", lambda: "of other sources")
    xla_call.register("dcpjax_test_variants", kernel, 1)
    assert count() == 3


def test_a_kernel_that_numba_mixed_up_on_disk_is_compiled_again(kept):
    """Its index is written before the code: two processes that keep two variants at once may take the same file."""
    for threads in (1, 2):
        xla_call.register("dcpjax_test_mixed", kernel, threads)
    first, second = kept.rglob("*.nbc")
    content = first.read_bytes(), second.read_bytes()
    second.write_bytes(content[0])
    first.write_bytes(content[1])
    # the first is compiled for this start alone and the index removed; then the second is kept, then the first
    for hits in ([0, 0], [0, 1], [1, 1]):
        xla_call._registered.clear()
        for threads in (1, 2):
            xla_call.register("dcpjax_test_mixed", kernel, threads)
        assert [handler.cache_hits for handler in xla_call._registered.values()] == hits
        for name, handler in xla_call._registered.items():
            assert f"CPU kernel {name} ".encode() in xla_call._message_of(handler, 100)
