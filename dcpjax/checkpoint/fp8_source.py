"""Block-scaled 8-bit tensors (DeepSeek-V3, arXiv:2412.19437, section 3.3) read as float32.

A tensor `X` of float8 comes with `X_scale_inv`, one scale for each block of rows and columns. A slice is read and
multiplied with the scales of the blocks that it overlaps.
"""

from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dcpjax.checkpoint.weight_files import TensorSource

SCALE = "_scale_inv"
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))

Block = tuple[int, int]


def fp8_block(config: Mapping[str, Any]) -> Block | None:
    """Rows and columns that share a scale, from config.json; None where the weights are not block-scaled float8."""
    text = config.get("text_config")
    quantised = config.get("quantization_config") or (isinstance(text, Mapping) and text.get("quantization_config"))
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") != "fp8":
        return None
    block = quantised.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(_is_size(size) for size in block):
        raise ValueError(
            f"config.json: weight_block_size of an fp8 checkpoint must be two positive integers, but is {block!r}; "
            "use a block-scaled or an unquantised checkpoint"
        )
    return block[0], block[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class Fp8Source:
    """The tensors of `source`: those with scales dequantised to float32, all others unchanged.

    Asking for the shape of a tensor checks its scales, before anything is read.
    """

    def __init__(self, source: TensorSource, block: Block) -> None:
        self._source, self._block = source, block
        self._names = frozenset(source.names())

    def names(self) -> Collection[str]:
        """All names but those of the scales."""
        return [name for name in self._source.names() if not self._is_scale(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        if self._is_scaled(name):
            self._check(name, shape)
        return shape

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if self._is_scaled(name) else self._source.dtype(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if not self._is_scaled(name):
            return self._source.read(name, index)
        shape = self.shape(name)
        index = (*index, *(slice(None),) * (len(shape) - len(index)))
        blocks = [
            np.arange(size)[part] // edge for size, part, edge in zip(shape, index, self._block, strict=True)
        ]  # of each row and column in the slice
        scales = self._source.read(name + SCALE, tuple(_span(along) for along in blocks)).astype(np.float32)
        for dim, along in enumerate(blocks):
            scales = np.take(scales, along - _span(along).start, axis=dim)
        return self._source.read(name, index).astype(np.float32) * scales

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self._names

    def _is_scaled(self, name: str) -> bool:
        return name + SCALE in self._names or self._source.dtype(name) in FLOAT8

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        dtype = self._source.dtype(name)
        if dtype not in FLOAT8:
            raise ValueError(f"tensor {name} must be float8, because {name}{SCALE} scales it, but is {dtype}")
        if name + SCALE not in self._names:
            raise ValueError(
                f"tensor {name} of {dtype} must come with {name}{SCALE}, but does not; fetch the checkpoint again"
            )
        if len(shape) != 2:
            raise ValueError(f"tensor {name} of {dtype} must have two dimensions, but has shape {shape}")
        found = tuple(self._source.shape(name + SCALE))
        wanted = tuple(-(-size // edge) for size, edge in zip(shape, self._block, strict=True))
        if found != wanted:
            raise ValueError(
                f"tensor {name}{SCALE} must have shape {wanted}, one scale for each block of "
                f"{self._block[0]} x {self._block[1]} in {shape}, but has {found}"
            )


def _span(blocks: np.ndarray) -> slice:
    """The scales from the first to the last block touched."""
    return slice(int(blocks.min()), int(blocks.max()) + 1) if blocks.size else slice(0, 0)
