"""Where compiled functions are kept."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from dcpjax.models.kernels.cpu import (
    attention_calls,
    cache_write,
    compile,
    paged_attention,
    product_calls,
    product_on_tiles,
    tile,
    xla_call,
)


def test_every_file_of_kernels_is_part_of_the_folders_name(tmp_path, monkeypatch):
    """Numba alone would take a kernel for current whose instructions, in another file, have changed."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "compile.py"))
    folder = compile.folder.__wrapped__
    for module in (paged_attention, tile):
        source = Path(str(module.__file__))
        (tmp_path / source.name).write_bytes(source.read_bytes())
    before = folder()
    assert before == folder()
    assert before.parent == tmp_path / "__pycache__"
    with (tmp_path / "tile.py").open("a") as file:
        file.write("\n")
    assert folder() != before


def test_kernels_are_kept_there_and_functions_of_the_user_where_he_says():
    for function in (paged_attention._attend_items, product_on_tiles._multiply_share):
        assert str(compile.folder()) in function.stats.cache_path
    assert "dcpjax-" not in vars(config)["CACHE_DIR"]


STARTS_AGAIN = """
import numpy as np
from numba.core import event
from dcpjax.models.kernels.cpu import attention_calls, product_calls
passes = event.RecordingListener()
event.register("numba:run_pass", passes)
attention_calls._write_kernel(np.dtype(np.uint16), {parallel})
product_calls._target(np.dtype(np.uint16), False)
assert not passes.buffer, len(passes.buffer)
"""


@pytest.mark.parametrize("parallel", [False, True])
def test_a_kernel_that_is_kept_is_not_compiled_again(parallel):
    """Numba would link what a handler calls into it, and translate all of that, at every start."""
    attention_calls._write_kernel(np.dtype(np.uint16), parallel)
    product_calls._target(np.dtype(np.uint16), False)
    subprocess.run([sys.executable, "-c", STARTS_AGAIN.format(parallel=parallel)], check=True, timeout=120)


def test_a_kernel_is_kept_under_its_name_since_numba_ignores_whether_it_is_parallel():
    run = cache_write.kernel(np.dtype(np.uint16))
    for parallel in (False, True):
        name = xla_call.register("dcpjax_cache_write_uint16", run, parallel)
        assert len(list(compile.folder().rglob(f"cache_write.{name}-*.nbi"))) == 1
