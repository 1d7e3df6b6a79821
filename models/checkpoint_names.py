"""How an array is found in a checkpoint when it is not one tensor read as it stands. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Tensors of equal shape, one behind the other along a new first axis: the experts of a layer."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class HeadRows:
    """Rows `start .. stop - 1` of each head of a tensor [heads * rows, I], as [heads, stop - start, I]."""

    tensor: str
    rows: int  # of one head
    start: int
    stop: int


Name = str | Stack | HeadRows
