"""A loaded model as a small table for a notebook. Reads what is there; every cell is escaped."""

import math
from typing import TYPE_CHECKING, Any

from dcpjax.api.outputs import counted, html_table

if TYPE_CHECKING:
    from dcpjax.llm import LLM


def describe(llm: "LLM") -> str:
    """Model, layout, weights and cache with what each device holds of them, and the limits of a step."""
    runner = llm.runner
    return html_table(
        [
            ("model", f"{llm.files.path}, {counted(runner.config.num_layers, 'layer')}"),
            ("layout", _layout(llm)),
            ("weights", f"{runner.dtype}, {_per_device(runner.weights)}"),
            ("KV cache", _cache(llm)),
            ("requests", _limits(llm)),
        ]
    )


def _layout(llm: "LLM") -> str:
    runner = llm.runner
    layout, exchange = runner.layout, f", merged by {runner.runtime.dcp_comm_backend}"
    devices = counted(layout.devices, f"{runner.platform} device")
    return f"tp={layout.tp} x dcp={layout.dcp} on {devices}{exchange if layout.dcp > 1 else ''}"


def _cache(llm: "LLM") -> str:
    runner, blocks = llm.runner, llm.runner.sizes.num_blocks
    size, copies = runner.geometry.block_size, runner.layout.duplication(runner.config.cache_heads)
    tokens = f"{counted(blocks * size, 'token')} in {counted(blocks, 'block')} of {size:,}"
    return f"{tokens}, stored {copies}x, {runner.kv_dtype}, {_per_device(runner.cache)}"


def _limits(llm: "LLM") -> str:
    sizes = llm.runner.sizes
    return (
        f"up to {counted(sizes.max_model_len, 'token')} each, {sizes.limits.max_num_seqs:,} at once, "
        f"{counted(sizes.limits.max_num_batched_tokens, 'token')} a step"
    )


def _per_device(arrays: Any) -> str:
    """`12.3 MiB per device`: of the first device, all hold the same."""
    import jax

    held = sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in jax.tree.leaves(arrays)
    )
    unit, name = (2**30, "GiB") if held >= 2**30 else (2**20, "MiB")
    return f"{held / unit:,.1f} {name} per device"
