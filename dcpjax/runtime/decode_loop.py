"""Several decode steps in one call: each token that is sampled feeds the next step on the device.

Host and launch are paid once for all of them. A request whose token ends it writes nothing more to the cache, and the
loop ends when no request goes on. It gives the tokens that as many calls of one step would give.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.engine.request import UNKNOWN
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models import decoder
from dcpjax.models.attention.work import Runtime, Tiles, Work
from dcpjax.models.config import ModelConfig
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.batch import Batch
from dcpjax.runtime.tiles import padded
from dcpjax.sampling.sampler import Sampled, SamplingBatch, sample
from dcpjax.sampling.sampler_arrays import padded_ids
from dcpjax.sharding import struct


@struct.dataclass
class Ahead:
    """How far each of the B rows of a step of decodes goes."""

    # [B] int32, host: tokens to generate, 0 for padding
    steps: jax.Array
    # [B, n] int32, host: tokens that end the row's request, -1 for padding
    ends: jax.Array
    # steps that the results have room for
    most: int = struct.static()

    @classmethod
    def of(cls, step: Sequence[Scheduled], rows: int, most: int) -> "Ahead":
        """For a step padded to `rows` rows."""
        ends = padded_ids([sorted(entry.request.end_token_ids) or [-1] for entry in step], rows)
        assert ends is not None  # none of the rows is empty: one program for requests with and without such tokens
        return cls(padded([entry.steps for entry in step], rows, fill=0), ends, most)  # type: ignore[arg-type]


class State(NamedTuple):
    """What one step of the loop hands to the next."""

    # [] int32: steps that have run
    done: jax.Array
    # [B] bool: rows that go on, unless they have all their tokens
    alive: jax.Array
    # [seats] int32: each seat's newest token
    latest: jax.Array
    cache: Any
    # [most, B, ...]: the tokens of each step; those of rows that do not go on mean nothing
    sampled: Sampled


def decode_steps(
    weights: Any,
    cache: Any,
    latest: jax.Array,
    batch: Batch,
    options: SamplingBatch,
    ahead: Ahead,
    *,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[Sampled, jax.Array, Any]:
    """Up to `ahead.most` decode steps -> (what they sampled [most, B, ...], `latest` and the cache brought up to date).

    The batch holds one token of each request, so row b is token b; `options` are those of the first step.
    """
    first = jnp.where(batch.tokens == UNKNOWN, latest[batch.seats], batch.tokens)
    latest = _with_tokens(latest, options.seat, first)

    def goes_on(state: State) -> jax.Array:
        return jnp.any(_running(state, ahead))

    def step(state: State) -> State:
        running = _running(state, ahead)
        tokens = jnp.where(running, state.latest[batch.seats], -1)
        work = _advanced(batch.work, state.done, running, runtime.geometry)
        # tied to the step: XLA would compute what follows from the weights alone once for all steps, and keep it
        own, _ = jax.lax.optimization_barrier((weights, state.done))
        hidden, cache = decoder.forward(own, state.cache, tokens, work, config, runtime)
        with jax.named_scope("logits"):
            logits = decoder.logits(own, hidden, config, runtime.place)
        sampled, latest = sample(logits, state.latest, _of_step(options, state.done, running))
        sampled = replace(sampled, finite=sampled.finite | ~running)
        return State(
            state.done + 1,
            state.alive & ~_ends(sampled, ahead.ends),
            latest,
            cache,
            jax.tree.map(lambda every, new: every.at[state.done].set(new), state.sampled, sampled),
        )

    start = State(jnp.int32(0), ahead.steps > 0, latest, cache, _no_results(options, ahead.most, config))
    end = jax.lax.while_loop(goes_on, step, start)
    return end.sampled, end.latest, end.cache


def _running(state: State, ahead: Ahead) -> jax.Array:
    """[B] bool: the rows that take part in the next step."""
    return state.alive & (state.done < ahead.steps)


def _advanced(work: Work, done: jax.Array, running: jax.Array, geometry: CacheGeometry) -> Work:
    """The work of the first step, `done` tokens later; rows that do not go on become padding."""
    positions = jnp.where(running, work.positions + done, -1)
    (tiles,) = work.tiles  # of one token each
    chunks = geometry.chunks(positions[tiles.start] + 1)
    tiles = Tiles(tiles.start, tiles.row, chunks, tiles.count, tiles.size)
    return replace(work, positions=positions, rows=jnp.where(running, work.rows, -1), tiles=(tiles,))


def _of_step(options: SamplingBatch, done: jax.Array, running: jax.Array) -> SamplingBatch:
    """The options of the first step, `done` tokens later: the draws go on, and rows that do not keep their token."""
    draw = options.draw and replace(options.draw, generated=options.draw.generated + done)
    return replace(options, seat=jnp.where(running, options.seat, -1), draw=draw)


def _ends(sampled: Sampled, ends: jax.Array) -> jax.Array:
    """[B] bool: whether nothing follows a row's token: it ends the request, or its logits were not finite."""
    return ~sampled.finite | jnp.any(sampled.tokens[:, None] == ends, axis=-1)


def _no_results(options: SamplingBatch, most: int, config: ModelConfig) -> Sampled:
    """Room for the results of `most` steps: zeros, and all finite."""
    logits = jax.ShapeDtypeStruct((options.seat.shape[0], config.vocab_size), jnp.float32)
    shapes = jax.eval_shape(lambda logits: sample(logits, jnp.zeros(1, jnp.int32), options)[0], logits)
    empty = jax.tree.map(lambda one: jnp.zeros((most, *one.shape), one.dtype), shapes)
    return replace(empty, finite=jnp.ones_like(empty.finite))


def _with_tokens(latest: jax.Array, seat: jax.Array, tokens: jax.Array) -> jax.Array:
    return latest.at[jnp.where(seat >= 0, seat, latest.shape[0])].set(tokens, mode="drop")
