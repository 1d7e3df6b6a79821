"""The header of a GGUF file: its metadata and its table of tensors.

It is read here and not with the `gguf` package, which takes seconds over a large vocabulary.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcpjax.checkpoint.weight_files import missing_tensor_message

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"  # a tensor that belongs to the config

# Value types of the metadata by their number in the file; scalars as struct codes.
SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 8
# Bounds of a header, several times those of the largest published ones: a file may claim any number, and be sparse.
MAX_FIELDS, MAX_TENSORS = 2**12, 2**16
MAX_READS = 2**22  # numbers, texts and lengths of texts
MAX_BYTES = 2**27  # of one text or one array of numbers


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One entry of the tensor table."""

    name: str
    # Outermost dimension first, as in NumPy; the file has it last.
    shape: tuple[int, ...]
    # GGML's number of the data type.
    type: int
    # Bytes from the start of the file to the tensor's values.
    begin: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """Everything in a GGUF file except the values of its tensors."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def require(self, key: str) -> Any:
        if key not in self.fields:
            raise ValueError(f"{self.path} must hold the metadata key {key}, but does not; convert the model again")
        return self.fields[key]

    def tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise ValueError(missing_tensor_message(name, self.tensors, self.path))
        return self.tensors[name]

    @property
    def architecture(self) -> str:
        name = self.require("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(
                f"the architecture of {self.path} must be one of {', '.join(ARCHITECTURES)}, but is "
                f"{name!r}; use the model's safetensors instead"
            )
        return name


def read_header(path: Path) -> GGUFHeader:
    """Metadata and tensor table. Raises ValueError if the file is no GGUF file or ends too early."""
    try:
        return _HeaderReader(path).header()
    except (OSError, ValueError, KeyError, RecursionError, struct.error) as error:
        raise ValueError(f"{path} must be a whole GGUF file, but is not: {error}; fetch it again") from error


class _HeaderReader:
    """Reads the header once, from front to back. Every length is checked against the size of the file and a bound."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        self._reads = 0

    def header(self) -> GGUFHeader:
        if self._read_bytes(4) != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        if (version := self._scalar("I")) not in (2, 3):
            raise ValueError(f"its version is {version}, and only little-endian 2 and 3 are known")
        tensor_count, field_count = self._scalar("Q"), self._scalar("Q")
        if tensor_count > MAX_TENSORS or field_count > MAX_FIELDS:
            raise ValueError(f"its header counts {tensor_count} tensors and {field_count} fields")
        fields = {self._text(): self._value(self._scalar("I")) for _ in range(field_count)}
        table = [(self._text(), self._shape(), self._scalar("I"), self._scalar("Q")) for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its general.alignment is {alignment!r}")
        start = math.ceil(self._position / alignment) * alignment
        tensors = {
            name: GGUFTensor(name=name, shape=shape, type=kind, begin=start + offset)
            for name, shape, kind, offset in table
        }
        return GGUFHeader(path=self._path, fields=fields, tensors=tensors)

    def _read_bytes(self, count: int) -> bytes:
        if count > len(self._bytes) - self._position:
            raise ValueError(f"its header ends early, at byte {len(self._bytes)}")
        self._reads += 1
        if self._reads > MAX_READS or count > MAX_BYTES:
            raise ValueError(f"its header has more values than a model's, by byte {self._position}")
        self._position += count
        return self._bytes[self._position - count : self._position]

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._read_bytes(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> str:
        return self._read_bytes(self._scalar("Q")).decode("utf-8")

    def _shape(self) -> tuple[int, ...]:
        if not 1 <= (count := self._scalar("I")) <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions")
        return tuple(self._scalar("Q") for _ in range(count))[::-1]

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        return self._scalar(SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self._read_bytes(count * dtype.itemsize), dtype).tolist()
        return [self._value(kind) for _ in range(count)]
