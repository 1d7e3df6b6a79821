# %% [markdown]
# # Decode context parallelism from first principles
#
# Attention over a long context can be cut by position: every device attends to its own positions and keeps, beside its
# output, the log-sum-exp of its scores. From these few numbers the exact result follows. This notebook does it by hand
# on eight virtual devices, with the three exchanges that dcpjax has, and then shows what it saves.
#
# Letters: H query heads, K KV heads, D head dim, S positions; a *partial* is `(out, lse)`.

# %%
from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dcpjax import LLM, SamplingParams, plots
from dcpjax.models.attention.softmax import partial
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.sharding.merge import MERGES, Partial, merge
from dcpjax.sharding.mesh import Layout, make_mesh

jax.config.update("jax_num_cpu_devices", 8)

# %% [markdown]
# ## One query, two halves of the context
#
# $$\text{lse}=\log\sum_s e^{q\cdot k_s},\qquad
#   \text{out}=\sum_i e^{\text{lse}_i-\text{lse}}\,\text{out}_i,\qquad
#   \text{lse}=\log\sum_i e^{\text{lse}_i}$$
#
# for any cut of the positions into parts $i$. First all at once, then in two halves.

# %%
H, K, D, S = 8, 2, 16, 40
draw = np.random.default_rng(0)
q = jnp.asarray(draw.normal(size=(1, H, D)), jnp.float32) / D**0.5
k, v = (jnp.asarray(draw.normal(size=(S, K, D)), jnp.float32) for _ in range(2))
everything = jnp.ones((1, S), bool)

whole = partial(q, k, v, everything)
left = partial(q, k[:20], v[:20], everything[:, :20])
right = partial(q, k[20:], v[20:], everything[:, 20:])
merged = merge(left, right)
print("largest difference:", float(jnp.abs(merged.out - whole.out).max()))
np.testing.assert_allclose(merged.out, whole.out, atol=1e-6)
np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-5)

# %% [markdown]
# `whole` is what everybody computes: softmax of the scores, times the values.

# %%
scores = np.einsum("hd,shd->hs", q[0], np.repeat(k, H // K, axis=1))
softmax = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
np.testing.assert_allclose(whole.out[0], np.einsum("hs,shd->hd", softmax, np.repeat(v, H // K, axis=1)), atol=1e-6)

# %% [markdown]
# ## A part without keys
#
# A short prompt leaves ranks without a single position. Such a partial is `(0, -inf)`: the merge gives it weight 0. Not
# `(0, 0)`, which would claim one key of score 0, and never NaN.

# %%
nothing = partial(q, k, v, ~everything)
assert bool((nothing.out == 0).all())
assert bool(jnp.isneginf(nothing.lse).all())
np.testing.assert_array_equal(merge(whole, nothing).out, whole.out)

# %% [markdown]
# ## Who owns which position
#
# `interleave` consecutive positions go to one rank, then the next rank has its turn. With 1 the ranks are balanced at
# every length; with a block as long as the context and `block_size / dcp` a rank holds one long run.

# %%
balanced = CacheGeometry(block_size=32, dcp=8, interleave=1)
runs = CacheGeometry(block_size=64, dcp=8, interleave=8)
figure, owned = plots.ownership_strip(balanced, runs, tokens=S)
assert owned["strips"][0]["tokens_per_rank"] == [5] * 8
assert owned["strips"][1]["tokens_per_rank"] == [8, 8, 8, 8, 8, 0, 0, 0]
figure

# %% [markdown]
# ## Eight ranks and three exchanges
#
# The second geometry, so that three ranks see no key. Each device attends to its own positions; then the partials are
# merged across the mesh axis `dcp`:
#
# | exchange | what travels |
# |---|---|
# | `ag_rs` | all-gather of the lse, then reduce-scatter of the scaled outputs |
# | `a2a` | one all-to-all of outputs and lse: each rank gets all partials of its own heads |
# | `psum` | the largest lse, then two sums: every rank gets every head, and keeps its own |
#
# Either way each rank ends with the features that its rows of the output projection need.

# %%
RANKS = 8
mesh = make_mesh(Layout(tensor_parallel_size=RANKS, decode_context_parallel_size=RANKS))
_, owner, slot = runs.locate(np.arange(S))
keys, values = (np.zeros((RANKS, runs.slots, K, D), np.float32) for _ in range(2))
mine = np.zeros((RANKS, 1, runs.slots), bool)
keys[owner, slot], values[owner, slot], mine[owner, 0, slot] = k, v, True


def attend(keys: jax.Array, values: jax.Array, mine: jax.Array) -> Partial:
    """Per device: its slots [1, P, K, D] -> its partial."""
    return partial(q, keys[0], values[0], mine[0])


def with_exchange(keys: jax.Array, values: jax.Array, mine: jax.Array, *, exchange: str) -> jax.Array:
    """Per device: its slots -> its share [1, H * D / dcp] of the merged features."""
    return MERGES[exchange](attend(keys, values, mine), H * D)


on_ranks = P("dcp")
for exchange in MERGES:
    run = jax.shard_map(
        bind(with_exchange, exchange=exchange),
        mesh=mesh,
        in_specs=(on_ranks, on_ranks, on_ranks),
        out_specs=P(None, "dcp"),
        check_vma=False,
    )
    features = jax.jit(run)(keys, values, mine)
    difference = float(np.abs(features - whole.out.reshape(1, -1)).max())
    print(f"{exchange:6} largest difference to one device: {difference:.1e}")
    assert difference < 1e-6

# %% [markdown]
# The weight of each rank in the merge, for the first two heads. Ranks 5 to 7 own no position yet.

# %%
lse = np.stack([attend(keys[[rank]], values[[rank]], mine[[rank]]).lse[0] for rank in range(RANKS)])
figure, shares = plots.merge_weights(lse[:, :2])
assert shares["empty"] == [5, 6, 7]
np.testing.assert_allclose(np.sum(shares["weights"], axis=0), 1.0, rtol=1e-5)
figure

# %% [markdown]
# ## What it saves
#
# A small model with 8 query and 2 KV heads and random weights, on eight devices. Tensor parallelism has only two KV
# heads to share out, so it stores each four times; with `dcp=8` nothing is stored twice. Both get the same bytes per
# device.

# %%
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": D,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def small_model(dcp: int, **options: str) -> LLM:
    return LLM(
        "qwen3-0.6b",
        load_format="dummy",
        hf_overrides=SHAPE,
        dtype="float32",
        tensor_parallel_size=8,
        decode_context_parallel_size=dcp,
        block_size=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2**17,
        progress=False,
        **options,
    )


prompt = draw.integers(3, 512, 50).tolist()
greedy = SamplingParams(temperature=0, max_tokens=16)
tp, dcp = small_model(1), small_model(8)
tokens = tp.generate([prompt], greedy)[0].outputs[0].token_ids
assert dcp.generate([prompt], greedy)[0].outputs[0].token_ids == tokens
print("the same tokens:", tokens)

# %%
figure, under_tp = plots.duplication_map(tp)
assert under_tp["copies"] == 4
figure

# %%
figure, under_dcp = plots.duplication_map(dcp)
assert under_dcp["copies"] == 1
assert under_dcp["bytes_per_device"] == under_tp["bytes_per_device"]
assert under_dcp["bytes_unique"] == 4 * under_tp["bytes_unique"]
figure

# %% [markdown]
# The map comes from the shards. That devices 0 to 3 hold not only equal shapes but equal bytes can be seen in them too:


# %%
def first_keys(llm: LLM) -> dict[int, bytes]:
    """What each device holds of the first layer's keys."""
    shards = llm.runner.cache[0].keys.addressable_shards
    return {shard.device.id: np.asarray(shard.data).tobytes() for shard in shards}


copied, apart = first_keys(tp), first_keys(dcp)
assert copied[0] == copied[1] == copied[2] == copied[3] != copied[4] == copied[5] == copied[6] == copied[7]
assert len(set(apart.values())) == 8
distinct = {"dcp=1": len(set(copied.values())), "dcp=8": len(set(apart.values()))}
print("distinct shards of the first layer's keys:", distinct)

# %% [markdown]
# The same bytes hold four times as many tokens:

# %%
print(tp)
print(dcp)
assert dcp.stats().num_blocks == 4 * tp.stats().num_blocks
