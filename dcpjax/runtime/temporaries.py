"""Bytes that a step's programs need beside weights and cache: an upper bound from the shapes, without compiling.

The compiled programs of small models need between a quarter of it and all of it (tests/runtime/test_temporaries.py).
"""

import math

from dcpjax.models.attention.up_projected import PIECE
from dcpjax.models.config import ModelConfig
from dcpjax.models.exchange import PromptExchange
from dcpjax.models.kv_cache import CHUNK_SLOTS
from dcpjax.runtime.batch import LEAST_TOKENS, PREFILL_TILE, SHORT_TILE
from dcpjax.sharding.mesh import Layout

PIECE_COPIES = 3  # of gathered keys: as they arrive, in the order of positions, and as attention reads them
FLOAT32 = 4  # bytes: activations are float32 whatever the weights are


def step_temporaries(
    config: ModelConfig, layout: Layout, *, tokens: int, rows: int, prompts: PromptExchange | None = None
) -> int:
    """Bytes on each device of a step of so many tokens, of which `rows` are sampled from.

    Sampling runs after the layers, whose hidden states are kept until then.
    """
    hidden = tokens * config.hidden_size
    layers = tokens * _numbers_per_token(config, layout) + _scores(config, layout, tokens)
    sampling = 3 * rows * config.vocab_size  # logits of the own rows, of all rows, and as the options change them
    gathered = 0 if prompts is None else math.ceil(PIECE_COPIES * prompts.piece_bytes)
    return FLOAT32 * (hidden + max(layers, sampling)) + gathered


def _numbers_per_token(config: ModelConfig, layout: Layout) -> int:
    """Of one layer: the stream before and after, queries, results and running sums of a dcp group's heads, products of
    the feed-forward block."""
    key, value = _head_widths(config)
    attention = 6 * (config.num_heads // layout.tp) * (key + value)
    dense = 4 * -(-config.intermediate_size // layout.devices)
    moe = config.moe
    experts = 2 * moe.experts_per_token * config.hidden_size + 3 * moe.experts if moe else 0
    return 4 * config.hidden_size + attention + dense + experts


def _head_widths(config: ModelConfig) -> tuple[int, int]:
    """Of a query and of a result, as attention over the cache has them."""
    if config.mla is None:
        return config.head_dim, config.head_dim
    return config.mla.cached_dim, config.mla.latent_rank


def _scores(config: ModelConfig, layout: Layout, tokens: int) -> int:
    """A tile's scores of one chunk, and their exponentials."""
    tile = SHORT_TILE if tokens <= LEAST_TOKENS else PREFILL_TILE if config.mla is None else PIECE
    return 2 * min(tokens, tile) * (config.num_heads // layout.tp) * CHUNK_SLOTS
