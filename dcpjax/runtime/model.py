"""A model laid out on its mesh, before any weight is read."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcpjax.api.config import EngineConfig
from dcpjax.checkpoint.hub import cache_folder
from dcpjax.checkpoint.model_config import read_model_config, resolve_dtype
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.checkpoint.weights import dummy_weights, load_weights
from dcpjax.models import decoder
from dcpjax.models.attention.work import Runtime
from dcpjax.models.config import ModelConfig
from dcpjax.models.exchange import PromptExchange, exchange_dtype
from dcpjax.models.kv_cache import CacheGeometry, storage_dtype
from dcpjax.runtime.devices import ensure_devices, keep_compiled_programs
from dcpjax.sharding import arrays
from dcpjax.sharding.arrays import is_spec
from dcpjax.sharding.link import find_link
from dcpjax.sharding.mesh import Layout, check_layout, make_mesh
from dcpjax.sharding.rules import Placement, Rules


@dataclass(frozen=True, kw_only=True)
class MeshModel:
    """A model's numbers, the mesh it lies on and the dtypes of its arrays. Declares its weights and its cache."""

    config: ModelConfig
    layout: Layout
    runtime: Runtime
    dtype: str  # of the weights
    kv_dtype: str

    @property
    def place(self) -> Placement:
        return self.runtime.place

    @property
    def platform(self) -> str:
        return self.runtime.place.platform

    @cached_property
    def prompt_exchange(self) -> PromptExchange | None:
        """Whether keys or queries of prompts are gathered; None on a mesh without dcp."""
        runtime = self.runtime
        return PromptExchange.of(
            self.config,
            self.layout,
            self.platform,
            runtime.dcp_comm_backend,
            storage_dtype(self.kv_dtype, self.platform).itemsize,
            replicate_q=runtime.dcp_replicate_q,
            value_bytes=np.dtype(jnp.dtype(runtime.dcp_exchange_dtype)).itemsize,
            link=runtime.link,
        )

    @property
    def geometry(self) -> CacheGeometry:
        return self.runtime.geometry

    def weight_specs(self) -> Any:
        """Every weight as an `ArraySpec`."""
        return decoder.weight_specs(self.config, self.layout, self.dtype)

    def cache_specs(self, num_blocks: int) -> Any:
        """The cache of `num_blocks` blocks as `ArraySpec`s."""
        dtype = storage_dtype(self.kv_dtype, self.platform)
        return decoder.cache_specs(self.config, self.layout, num_blocks, self.geometry.slots, dtype)

    def empty_cache(self, num_blocks: int) -> Any:
        specs = self.cache_specs(num_blocks)
        return jax.tree.map(lambda spec: arrays.zeros(spec, self.place), specs, is_leaf=is_spec)

    def load(self, files: ModelFiles, engine: EngineConfig, *, progress: bool) -> Any:
        """The weights on the mesh: read from `files`, or random for load_format="dummy"."""
        if engine.load_format == "dummy":
            return dummy_weights(self.weight_specs(), self.place, engine.seed)
        names = decoder.weight_names(self.config)
        return load_weights(self.config, self.weight_specs(), names, files.tensors(), self.place, progress=progress)


def lay_out(files: ModelFiles, engine: EngineConfig) -> MeshModel:
    """Read the model's config and lay it out on the devices that the user asks for.

    Raises:
        ValueError: a config that cannot be run, an illegal layout, or fewer devices than the layout needs.
    """
    config = read_model_config(files.config, engine.hf_overrides)
    layout = Layout(
        tensor_parallel_size=engine.tensor_parallel_size,
        decode_context_parallel_size=engine.decode_context_parallel_size,
    )
    check_layout(layout, config.num_heads, config.cache_heads, whole_heads=config.mla is not None)
    ensure_devices(layout.devices)
    keep_compiled_programs(engine.compilation_cache)
    dtype = resolve_dtype(engine.dtype, config)
    return MeshModel(
        config=config,
        layout=layout,
        runtime=_runtime(make_mesh(layout), engine, dtype),
        dtype=dtype,
        kv_dtype=dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
    )


def _runtime(mesh: Mesh, engine: EngineConfig, dtype: str) -> Runtime:
    place = Placement(mesh, Rules.for_attention(replicate_q=engine.dcp_replicate_q))
    if engine.attention_body == "pallas" and place.platform == "cpu":
        raise ValueError("attention_body must be 'auto' or 'loop' on CPUs, but is 'pallas'; use 'auto'")
    return Runtime(
        place=place,
        geometry=CacheGeometry(
            block_size=engine.block_size,
            dcp=engine.decode_context_parallel_size,
            interleave=engine.cp_kv_cache_interleave_size,
        ),
        dcp_comm_backend=engine.dcp_comm_backend,
        dcp_replicate_q=engine.dcp_replicate_q,
        dcp_exchange_dtype=exchange_dtype(engine.dcp_exchange_dtype, dtype, place.platform),
        dcp_overlap=engine.dcp_overlap,
        attention_body=engine.attention_body,
        link=find_link(mesh, cache_folder()),
    )
