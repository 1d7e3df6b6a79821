"""Where compiled functions are kept."""

from pathlib import Path

from numba.core import config

from dcpjax.models import numba_compile, numba_kernel, numba_matrix, numba_tile


def test_every_file_of_kernels_is_part_of_the_folders_name(tmp_path, monkeypatch):
    """Numba alone would take a kernel for current whose instructions, in another file, have changed."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(numba_compile, "__file__", str(tmp_path / "numba_compile.py"))
    folder = numba_compile.folder.__wrapped__
    for module in (numba_kernel, numba_tile):
        source = Path(str(module.__file__))
        (tmp_path / source.name).write_bytes(source.read_bytes())
    before = folder()
    assert before == folder()
    assert before.parent == tmp_path / "__pycache__"
    with (tmp_path / "numba_tile.py").open("a") as file:
        file.write("\n")
    assert folder() != before


def test_kernels_are_kept_there_and_functions_of_the_user_where_he_says():
    for kernel in (numba_kernel.attend_in_turn, numba_matrix.multiply_in_parallel):
        assert str(numba_compile.folder()) in kernel.stats.cache_path
    assert "dcpjax-" not in vars(config)["CACHE_DIR"]
