"""A loaded model as a small table for a notebook. Every cell is escaped."""

import math
from pathlib import Path
from typing import Any

import jax

from dcpjax.api.outputs import counted, html_table
from dcpjax.runtime.memory import Sizes
from dcpjax.runtime.model import MeshModel
from dcpjax.runtime.runner import Runner


def describe(path: Path, runner: Runner) -> str:
    """Model, layout, weights and cache with what each device holds of them, and the limits of a step."""
    model, sizes = runner.model, runner.sizes
    return html_table(
        [
            ("model", f"{path}, {counted(model.config.num_layers, 'layer')}"),
            ("layout", _layout(model)),
            ("weights", f"{model.dtype}, {_per_device(runner.weights)}"),
            ("KV cache", f"{_cache(model, sizes)}, {_per_device(runner.cache)}"),
            ("requests", _limits(sizes)),
        ]
    )


def _layout(model: MeshModel) -> str:
    layout, exchange = model.layout, f", merged by {model.runtime.dcp_comm_backend}"
    devices = counted(layout.devices, f"{model.platform} device")
    return f"tp={layout.tp} x dcp={layout.dcp} on {devices}{exchange if layout.dcp > 1 else ''}"


def _cache(model: MeshModel, sizes: Sizes) -> str:
    blocks, size = sizes.num_blocks, model.geometry.block_size
    copies = model.layout.duplication(model.config.cache_heads)
    tokens = f"{counted(blocks * size, 'token')} in {counted(blocks, 'block')} of {size:,}"
    return f"{tokens}, stored {copies}x, {model.kv_dtype}"


def _limits(sizes: Sizes) -> str:
    return (
        f"up to {counted(sizes.max_model_len, 'token')} each, {sizes.limits.max_num_seqs:,} at once, "
        f"{counted(sizes.limits.max_num_batched_tokens, 'token')} a step"
    )


def _per_device(arrays: Any) -> str:
    """`12.3 MiB per device`: every device holds as much."""
    held = sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in jax.tree.leaves(arrays)
    )
    unit, name = (2**30, "GiB") if held >= 2**30 else (2**20, "MiB")
    return f"{held / unit:,.1f} {name} per device"
