"""Sources of tensors under Hugging Face names, read slice by slice.

Here for safetensors files; nothing is unpickled.
"""

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dcpjax.checkpoint.hub import read_json
from dcpjax.checkpoint.plain_file import check_plain_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PLAIN_NAME = re.compile(r"\w[\w.-]*\.safetensors")

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class TensorSource(Protocol):
    """Named tensors of which any slice can be read alone. An unknown name raises ValueError."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where the values of one tensor are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    # Bytes from the start of the file.
    begin: int
    end: int


class SafetensorsSource:
    """The tensors of a folder: `model.safetensors`, or the shards in `model.safetensors.index.json`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries, self._absent = _folder_entries(folder)
        self._maps: dict[Path, np.ndarray] = {}

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        entry = self._entry(name)
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"tensor {name} in {entry.file} must be one of {', '.join(DTYPES)}, but is {entry.dtype}; convert it"
            )
        return DTYPES[entry.dtype]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A copy of `tensor[index]`; only the bytes of that slice leave the disk."""
        dtype, entry = self.dtype(name), self._entry(name)
        # Sliced as plain integers: a file may place tensors at any byte, and integers copy from there.
        raw = self._map(entry.file)[entry.begin : entry.end].view(f"u{dtype.itemsize}").reshape(entry.shape)
        return np.array(raw[index], order="C").view(dtype)

    def _entry(self, name: str) -> TensorEntry:
        if name in self._absent:
            file = self._absent[name]
            raise ValueError(
                f"{INDEX_FILE} says that {file} holds the tensor {name}, but it does not; fetch {file} again"
            )
        if name not in self._entries:
            raise ValueError(missing_tensor_message(name, self._entries, self._folder))
        return self._entries[name]

    def _map(self, file: Path) -> np.ndarray:
        if file not in self._maps:
            self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
        return self._maps[file]


def missing_tensor_message(name: str, names: Collection[str], place: Path) -> str:
    """The error message for a tensor that is not there, with the most similar names."""
    nearest = difflib.get_close_matches(name, names, n=3)
    hint = f"the nearest names are {', '.join(nearest)}" if nearest else f"it holds {len(names)} other tensors"
    return f"the weights in {place} must hold the tensor {name}, but do not; {hint}"


def _folder_entries(folder: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors that are there, and the files of those that are in the index alone."""
    if (folder / SINGLE_FILE).exists():
        return _file_entries(folder / SINGLE_FILE), {}
    if (folder / INDEX_FILE).exists():
        return _sharded_entries(folder, _weight_map(folder / INDEX_FILE))
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    raise ValueError(
        f"{folder} must hold {SINGLE_FILE} or {INDEX_FILE}, but holds "
        + (", ".join(found) or "no safetensors file")
        + ("; rename it if it is the whole model" if len(found) == 1 else "")
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} must hold a weight_map from tensor to file, but does not; fetch it again")
    for file in weight_map.values():
        _check_plain_name(file, index)
    return weight_map


def _check_plain_name(file: Any, index: Path) -> None:
    """The name is checked, not its target: in a Hugging Face cache every file is a link to a blob."""
    if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
        raise ValueError(
            f"{index} must name .safetensors files of its own folder without any path, but names {file!r}; "
            "do not use this checkpoint unless you know why"
        )


def _sharded_entries(folder: Path, weight_map: dict[str, str]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Every tensor of every shard; of several of one name, that which the index means.

    A tensor that only the index knows may be one that nobody asks for, such as a head that is the embedding.
    """
    shards = {file: _file_entries(folder / file) for file in sorted(set(weight_map.values()))}
    present = {name: entry for shard in shards.values() for name, entry in shard.items()}
    indexed = {name: shards[file][name] for name, file in weight_map.items() if name in shards[file]}
    return present | indexed, {name: file for name, file in weight_map.items() if name not in present}


def _file_entries(file: Path) -> dict[str, TensorEntry]:
    check_plain_file(file)
    try:
        # The library checks the header: sizes, overlaps, gaps, and that the file is as long as it says.
        with safe_open(file, framework="numpy"):
            pass
        return _header_entries(file)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must be a whole safetensors file, but is not: {error}; fetch it again") from error


def _header_entries(file: Path) -> dict[str, TensorEntry]:
    """Format: a little-endian u64 length, that many bytes of JSON, then the data that offsets count from."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    start = 8 + length
    return {
        name: TensorEntry(
            file=file,
            dtype=fields["dtype"],
            shape=tuple(fields["shape"]),
            begin=start + fields["data_offsets"][0],
            end=start + fields["data_offsets"][1],
        )
        for name, fields in header.items()
        if name != "__metadata__"
    }
