import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcpjax.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, SafetensorsSource

# Name in the file, dtype in memory.
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}


def write_raw(path: Path, header: Any, data: bytes, padding: int = 0) -> None:
    """A safetensors file by hand, for dtypes and faults that no library would write."""
    text = json.dumps(header).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_array(path: Path, name: str, dtype: str, values: np.ndarray, padding: int = 0) -> None:
    fields = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [0, values.nbytes]}
    write_raw(path, {name: fields}, values.tobytes(), padding)


def write_shards(folder: Path, **shards: dict[str, np.ndarray]) -> None:
    weight_map = {}
    for shard, tensors in shards.items():
        save_file(tensors, folder / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def matrix() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_reads_back_exactly(tmp_path, dtype):
    values = np.arange(12).reshape(3, 4).astype(DTYPES[dtype])
    write_array(tmp_path / SINGLE_FILE, "w", dtype, values)
    source = SafetensorsSource(tmp_path)
    assert source.shape("w") == (3, 4)
    assert source.dtype("w") == values.dtype
    read = source.read("w", (slice(None), slice(None)))
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)


def test_tensors_at_odd_bytes_read_back_exactly(tmp_path, matrix):
    for padding in range(1, 4):
        write_array(tmp_path / SINGLE_FILE, "w", "F32", matrix, padding)
        read = SafetensorsSource(tmp_path).read("w", (slice(1, 3),))
        np.testing.assert_array_equal(read, matrix[1:3])
        assert read.flags.aligned


@pytest.mark.parametrize("index", [(), (slice(1, 3),), (slice(None), slice(0, 2)), (slice(2, 4), slice(1, 3))])
def test_a_slice_is_what_numpy_would_slice(tmp_path, matrix, index):
    save_file({"w": matrix}, tmp_path / SINGLE_FILE)
    read = SafetensorsSource(tmp_path).read("w", index)
    np.testing.assert_array_equal(read, matrix[index])
    assert read.flags.c_contiguous
    assert not isinstance(read, np.memmap)


def test_scalars_and_empty_tensors_read_back(tmp_path):
    save_file({"s": np.array(3.5, np.float32), "e": np.zeros((0, 4), np.float32)}, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path)
    assert source.read("s", ()) == np.float32(3.5)
    assert source.read("e", (slice(None), slice(0, 2))).shape == (0, 2)


def test_shards_are_one_source(tmp_path, matrix):
    write_shards(tmp_path, a={"x": matrix}, b={"y": matrix + 1})
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == {"x", "y"}
    np.testing.assert_array_equal(source.read("y", (slice(0, 1),)), matrix[:1] + 1)


def test_shards_may_be_links_to_anywhere(tmp_path, matrix):
    """The cache of huggingface_hub links every file to a blob outside the folder."""
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    save_file({"x": matrix}, blobs / "0123abcd")
    os.symlink(blobs / "0123abcd", folder / "model-00001-of-00001.safetensors")
    write_index(folder, {"x": "model-00001-of-00001.safetensors"})
    np.testing.assert_array_equal(SafetensorsSource(folder).read("x", ()), matrix)


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/other.safetensors",
        "sub/other.safetensors",
        "sub\\other.safetensors",
        "..\\other.safetensors",
        "C:other.safetensors",
        "..",
        "",
        "model.bin",
        "other.safetensors\0",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_an_index_cannot_name_files_elsewhere(tmp_path, matrix, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": matrix}, tmp_path / "other.safetensors")
    write_index(folder, {"x": name})
    with pytest.raises(ValueError, match=r"must name \.safetensors files of its own folder without any path"):
        SafetensorsSource(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_weight_map_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match="must hold a weight_map"):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_is_named(tmp_path, matrix):
    write_shards(tmp_path, a={"x": matrix}, b={"y": matrix})
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors must be there, but is missing"):
        SafetensorsSource(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path, matrix):
    write_shards(tmp_path, a={"x": matrix})
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == {"x"}
    with pytest.raises(ValueError, match=r"a\.safetensors holds the tensor y, but it does not"):
        source.shape("y")


def test_tensors_that_the_index_leaves_out_are_there(tmp_path, matrix):
    write_shards(tmp_path, a={"x": matrix, "y": matrix + 1}, b={"z": matrix})
    write_index(tmp_path, {"x": "a.safetensors", "z": "b.safetensors"})
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == {"x", "y", "z"}
    np.testing.assert_array_equal(source.read("y", (slice(0, 1),)), matrix[:1] + 1)


def test_an_unknown_tensor_gets_the_nearest_names(tmp_path, matrix):
    save_file({"model.layers.0.q_proj.weight": matrix}, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path)
    for ask in (source.shape, source.dtype, lambda name: source.read(name, ())):
        with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.k_proj\.weight.*0\.q_proj\.weight"):
            ask("model.layers.0.k_proj.weight")


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_a_truncated_file_is_a_sentence(tmp_path, matrix, kept):
    path = tmp_path / SINGLE_FILE
    save_file({"w": matrix}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
        SafetensorsSource(tmp_path)


def fields(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        {"w": fields(shape=[3])},
        {"w": fields(offsets=[0, 12])},
        {"w": fields(offsets=[4, 12])},
        {"w": fields(offsets=[-8, 0])},
        {"w": fields(dtype="Q4")},
        {"w": {"dtype": "F32"}},
        {"a": fields(), "b": fields()},
        {"w": 3},
        [],
    ],
)
def test_a_header_that_lies_is_a_sentence(tmp_path, header):
    write_raw(tmp_path / SINGLE_FILE, header, bytes(8))
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        SafetensorsSource(tmp_path)


def test_a_dtype_that_numpy_cannot_hold_is_named(tmp_path):
    write_raw(tmp_path / SINGLE_FILE, {"w": fields(dtype="F4", shape=[16])}, bytes(8))
    with pytest.raises(ValueError, match=r"tensor w in .* must be one of .*BF16.*, but is F4"):
        SafetensorsSource(tmp_path).dtype("w")


def test_a_folder_without_weights_says_what_it_wants(tmp_path):
    with pytest.raises(ValueError, match=r"must hold model\.safetensors or .* but holds no safetensors file"):
        SafetensorsSource(tmp_path)


def test_a_differently_named_file_is_pointed_out(tmp_path, matrix):
    save_file({"w": matrix}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"but holds weights\.safetensors; rename it"):
        SafetensorsSource(tmp_path)


def test_only_the_slice_is_read(tmp_path):
    """A sparse file of 64 GiB opens and gives a row at once, which reading it whole could not."""
    rows, columns = 1 << 20, 1 << 14
    header = {"w": fields(shape=[rows, columns], offsets=[0, 4 * rows * columns])}
    write_raw(tmp_path / SINGLE_FILE, header, b"")
    size = (tmp_path / SINGLE_FILE).stat().st_size + 4 * rows * columns
    try:
        os.truncate(tmp_path / SINGLE_FILE, size)
    except OSError:
        pytest.skip("this file system has no sparse files")
    row = SafetensorsSource(tmp_path).read("w", (slice(rows - 1, rows), slice(0, 8)))
    np.testing.assert_array_equal(row, np.zeros((1, 8), np.float32))
