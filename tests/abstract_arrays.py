"""Arrays without values, for tracing and compiling."""

from typing import Any

import jax

from dcpjax.sharding.arrays import is_spec
from dcpjax.sharding.rules import Placement


def abstract_tree(specs: Any, place: Placement) -> Any:
    """The same tree with `jax.ShapeDtypeStruct` leaves that carry shardings."""

    def abstract(spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=spec.sharding(place))

    return jax.tree.map(abstract, specs, is_leaf=is_spec)
