"""Names of arrays in a checkpoint: of a tensor, or of an array that is made of several tensors or of parts of one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Tensors of equal shape, stacked along a new first axis: the experts of a layer."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class HeadRows:
    """Rows `start .. stop - 1` of each head of a tensor [heads * rows, columns], as [heads, stop - start, columns]."""

    tensor: str
    rows: int  # of one head
    start: int
    stop: int


Name = str | Stack | HeadRows
