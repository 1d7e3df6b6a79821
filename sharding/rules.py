"""The mesh axes of each logical axis, declared once.

Everything else (shardings, constraints, shard_map specs, initialisers, restore targets) is derived from this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcpjax.sharding.mesh import DCP, TP

Axes = tuple[str | None, ...]

WHOLE_POOL = (TP, DCP)
LOGICAL_AXES = MappingProxyType(
    {
        "query": WHOLE_POOL,  # features of the query projection, before the gather
        "heads": WHOLE_POOL,  # features of merged heads, and the rows of o_proj
        "ffn": WHOLE_POOL,
        "vocab": WHOLE_POOL,
        "experts": WHOLE_POOL,
        "kv_heads": (TP,),
        "kv_context": (DCP,),  # the slots of a block: this is decode context parallelism
    }
)


@dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axes. Axes named None are replicated."""

    mesh_axes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LOGICAL_AXES)

    @classmethod
    def for_attention(cls, *, replicate_q: bool) -> "Rules":
        """`replicate_q` keeps the query projection whole on every rank of a dcp group."""
        return cls(MappingProxyType({**LOGICAL_AXES, "query": (TP,) if replicate_q else WHOLE_POOL}))

    def spec(self, axes: Axes) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions have these logical names."""
        entries = [None if axis is None else self.lookup(axis) for axis in axes]
        used = [mesh_axis for entry in entries if entry is not None for mesh_axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {axes} must lie on different mesh axes, but share one of {used}")
        return PartitionSpec(*(_simplest(entry) for entry in entries))

    def lookup(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of one logical axis. Raises ValueError for an unknown one."""
        if axis not in self.mesh_axes:
            raise ValueError(f"logical axis must be one of {sorted(self.mesh_axes)}, but is {axis!r}")
        return self.mesh_axes[axis]


def _simplest(entry: tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    return entry[0] if entry is not None and len(entry) == 1 else entry


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules by which arrays are placed on it."""

    mesh: Mesh
    rules: Rules = field(default_factory=Rules)

    @property
    def tp(self) -> int:
        return self.mesh.shape[TP]

    @property
    def dcp(self) -> int:
        return self.mesh.shape[DCP]

    @property
    def single_cpu(self) -> bool:
        """Whether the only device is a CPU, so that it may use all cores."""
        return self.mesh.size == 1 and self.platform == "cpu"

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def spec(self, *axes: str | None) -> PartitionSpec:
        return self.rules.spec(axes)

    def sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.rules.spec(axes))

    def ways(self, axis: str | None) -> int:
        """The number of shards of this logical axis."""
        ways = 1
        for mesh_axis in () if axis is None else self.rules.lookup(axis):
            ways *= self.mesh.shape[mesh_axis]
        return ways

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Set the sharding of an intermediate value inside a jitted function."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))
