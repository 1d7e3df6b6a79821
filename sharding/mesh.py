"""The `tp` x `dcp` device mesh and which layouts are legal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

TP, DCP = "tp", "dcp"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How `tensor_parallel_size` devices are split into dcp groups; `dcp` adds no devices."""

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size

    @property
    def tp(self) -> int:
        """Groups of devices with different heads: the length of mesh axis `tp`."""
        return self.tensor_parallel_size // self.decode_context_parallel_size

    @property
    def dcp(self) -> int:
        """Ranks with different token positions of the same heads: the length of mesh axis `dcp`."""
        return self.decode_context_parallel_size

    def duplication(self, kv_heads: int) -> int:
        """How many devices store each cached value."""
        return max(1, self.tp // kv_heads)


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """The first `tensor_parallel_size` devices as a mesh `(tp, dcp)`; neighbours are in one dcp group."""
    chosen = list(jax.devices() if devices is None else devices)[: layout.devices]
    assert len(chosen) == layout.devices, f"{layout.devices} devices wanted, {len(chosen)} given"
    axis_types = (AxisType.Auto, AxisType.Auto)  # stated: the default of make_mesh is Explicit
    return jax.make_mesh((layout.tp, layout.dcp), (TP, DCP), axis_types=axis_types, devices=chosen)


def is_legal(layout: Layout, heads: int, kv_heads: int) -> bool:
    """Whether `tp` divides the query heads, and either `tp` divides the KV heads or they divide `tp` (copies)."""
    if layout.tensor_parallel_size % layout.decode_context_parallel_size:
        return False
    tp = layout.tp
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def legal_layouts(tensor_parallel_size: int, heads: int, kv_heads: int) -> list[Layout]:
    """Every legal layout on this many devices, in order of `decode_context_parallel_size`."""
    candidates = (
        Layout(tensor_parallel_size=tensor_parallel_size, decode_context_parallel_size=dcp)
        for dcp in range(1, tensor_parallel_size + 1)
    )
    return [layout for layout in candidates if is_legal(layout, heads, kv_heads)]


def check_layout(layout: Layout, heads: int, kv_heads: int, *, whole_heads: bool = False) -> None:
    """Raise ValueError, listing what is legal, unless the model's heads fit the layout.

    `kv_heads` is 1 for multi-head latent attention: one latent serves every query head. `whole_heads` is True for
    it: a device holds whole heads, so their number must divide by the devices.
    """
    for flag in ("tensor_parallel_size", "decode_context_parallel_size"):
        size = getattr(layout, flag)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{flag} must be an integer of at least 1, but is {size!r}; use 1")
    devices = layout.tensor_parallel_size
    if whole_heads and heads % devices:
        divisors = (size for size in range(1, heads + 1) if heads % size == 0)
        nearest = min(divisors, key=lambda size: abs(size - devices))
        raise ValueError(
            f"tensor_parallel_size must divide the {heads} heads of this model's latent attention, but is {devices}; "
            f"use {nearest}"
        )
    if not is_legal(layout, heads, kv_heads):
        raise ValueError(_illegal_sentence(layout, heads, kv_heads))


def _illegal_sentence(layout: Layout, heads: int, kv_heads: int) -> str:
    devices, dcp = layout.tensor_parallel_size, layout.decode_context_parallel_size
    legal = ", ".join(
        f"{choice.dcp} (cache stored {choice.duplication(kv_heads)}x)"
        for choice in legal_layouts(devices, heads, kv_heads)
    )
    return (
        f"decode_context_parallel_size must suit tensor_parallel_size={devices} and this model "
        f"({heads} query heads, {kv_heads} KV heads), but is {dcp}: {_reason(layout, heads, kv_heads)}; "
        f"legal decode_context_parallel_size on {devices} devices: {legal}"
    )


def _reason(layout: Layout, heads: int, kv_heads: int) -> str:
    devices, dcp = layout.tensor_parallel_size, layout.decode_context_parallel_size
    if devices % dcp:
        return f"{devices} devices do not split into groups of {dcp}"
    groups = f"{devices}/{dcp} = {layout.tp} head groups"
    if heads % layout.tp:
        return f"{heads} query heads do not divide into {groups}"
    return f"{kv_heads} KV heads neither divide into {groups} nor divide {layout.tp}"
