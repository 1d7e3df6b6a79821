"""What the requests of a step ask of the sampler, as arrays of R rows: one part per kind of option.

A part that no row asks for is None, so that it is not in the program at all. Rows that ask for nothing hold the
values that change nothing.
"""

from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from dcpjax.engine.request import Request
from dcpjax.sampling.bad_words import completing
from dcpjax.sampling.buckets import round_up
from dcpjax.sampling.history import History

LEAST_TEMPERATURE = 1e-5  # below, dividing by it overflows: greedy, as in vLLM

Rows = Sequence[tuple[int, Request]]


@struct.dataclass
class Draw:
    """What a random choice depends on, besides the logits."""

    # [R] float32, host: 0 is greedy
    temperature: jax.Array
    # [R, 2] uint32, host: the two halves of the request's seed
    seed: jax.Array
    # [R] int32, host: tokens the request has generated so far
    generated: jax.Array


@struct.dataclass
class Bias:
    """Numbers added to the logits of few tokens; -inf bans one. B columns."""

    # [R, B] int32, host: token ids, -1 for padding
    ids: jax.Array
    # [R, B] float32, host
    values: jax.Array


@struct.dataclass
class Penalties:
    """What tokens a row already has, and what that costs them. W words of 32 bits, O different generated tokens."""

    # [R, W] uint32, host: a bit for each token of the prompt
    prompt: jax.Array
    # [R, O] int32, host: generated tokens that the host knows, -1 for padding
    output_ids: jax.Array
    # [R, O] int32, host: how often each was generated
    output_counts: jax.Array
    # [R] bool, host: one more was generated, which only the device knows yet
    in_flight: jax.Array
    # [R] float32, host: 1 is none
    repetition: jax.Array
    # [R] float32, host: 0 is none
    frequency: jax.Array
    # [R] float32, host: 0 is none
    presence: jax.Array


@struct.dataclass
class Cut:
    """Which unlikely tokens are left out. Parts that no row asks for are None."""

    # [R] float32, host: 0 keeps all
    min_p: jax.Array | None
    # [R] int32, host: 0 keeps all
    top_k: jax.Array | None
    # [R] float32, host: 1 keeps all
    top_p: jax.Array | None


def _draws(request: Request) -> bool:
    return request.params.temperature >= LEAST_TEMPERATURE


def draw_of(asking: Rows, rows: int) -> Draw | None:
    drawing = [(row, request) for row, request in asking if _draws(request)]
    if not drawing:
        return None
    temperature, seed, generated = [0.0] * rows, [(0, 0)] * rows, [0] * rows
    for row, request in drawing:
        temperature[row], generated[row] = request.params.temperature, request.num_generated
        seed[row] = divmod(request.seed % 2**64, 2**32)
    return Draw(
        np.array(temperature, np.float32),  # type: ignore[arg-type]
        np.array(seed, np.uint32),  # type: ignore[arg-type]
        np.array(generated, np.int32),  # type: ignore[arg-type]
    )


def cut_of(asking: Rows, rows: int, vocab_size: int) -> Cut | None:
    drawing = [(row, request.params) for row, request in asking if _draws(request)]
    if not drawing:
        return None
    min_p, top_k, top_p = [0.0] * rows, [0] * rows, [1.0] * rows
    for row, params in drawing:
        min_p[row], top_p[row] = params.min_p, params.top_p
        top_k[row] = params.top_k if 0 < params.top_k < vocab_size else 0
    every = (np.array(min_p, np.float32), 0.0), (np.array(top_k, np.int32), 0), (np.array(top_p, np.float32), 1.0)
    parts = [part if (part != neutral).any() else None for part, neutral in every]
    return None if all(part is None for part in parts) else Cut(*parts)  # type: ignore[arg-type]


def bias_of(asking: Rows, rows: int) -> Bias | None:
    biases = [(row, request.params.bias_arrays, _banned(request)) for row, request in asking]
    width = round_up(max((len(ids) + len(banned) for _, (ids, _), banned in biases), default=0), least=4)
    if not width:
        return None
    columns, added = np.full((rows, width), -1, np.int32), np.zeros((rows, width), np.float32)
    for row, (ids, values), banned in biases:
        count, end = len(ids), len(ids) + len(banned)
        columns[row, :count], added[row, :count] = ids, values
        columns[row, count:end], added[row, count:end] = banned, -np.inf
    return Bias(columns, added)  # type: ignore[arg-type]


def _banned(request: Request) -> list[int]:
    """Tokens that would end the request too early or complete a bad word."""
    early = request.num_generated < request.params.min_tokens
    if not early and not request.bad_words:
        return []
    banned = set(request.end_token_ids) if early else set()
    if request.bad_words:
        assert not request.num_in_flight or all(len(word) == 1 for word in request.bad_words), "a token is unknown"
        banned.update(completing(request.bad_words, request.output_token_ids))
    return sorted(banned)


def allowed_of(asking: Rows, rows: int, vocab_size: int) -> jax.Array | None:
    limited = [(row, one) for row, one in asking if one.guide is not None or one.params.allowed_token_ids is not None]
    if not limited:
        return None
    allowed = np.full((rows, _words(vocab_size)), 2**32 - 1, np.uint32)
    for row, request in limited:
        if request.params.allowed_token_ids is not None:
            allowed[row] = _bits(request.params.allowed_bits, vocab_size)
        if request.guide is not None:
            assert not request.num_in_flight, "a guide must have seen every token"
            allowed[row] &= request.guide.mask()
    return allowed  # type: ignore[return-value]


def penalties_of(asking: Rows, rows: int, vocab_size: int) -> Penalties | None:
    penalized = [(row, request) for row, request in asking if request.params.has_penalties]
    if not penalized:
        return None
    histories = [_history(request) for _, request in penalized]
    width = round_up(max(1, *(len(history.tokens) for history in histories)), least=64)
    prompt = np.zeros((rows, _words(vocab_size)), np.uint32)
    ids, counts = np.full((rows, width), -1, np.int32), np.zeros((rows, width), np.int32)
    in_flight, repetition = np.zeros(rows, np.bool_), np.ones(rows, np.float32)
    frequency, presence = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    for (row, request), history in zip(penalized, histories, strict=True):
        params, count = request.params, len(history.tokens)
        prompt[row] = _bits(history.prompt, vocab_size)
        ids[row, :count], counts[row, :count] = history.tokens, history.counts
        in_flight[row], repetition[row] = bool(request.num_in_flight), params.repetition_penalty
        frequency[row], presence[row] = params.frequency_penalty, params.presence_penalty
    return Penalties(prompt, ids, counts, in_flight, repetition, frequency, presence)  # type: ignore[arg-type]


def _history(request: Request) -> History:
    """The request's own, made when it is first needed and brought up to date."""
    request.history = request.history or History(request.prompt_token_ids)
    request.history.follow(request.output_token_ids)
    return request.history


def _words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _bits(packed: bytes, vocab_size: int) -> np.ndarray:
    """Packed bits [W] uint32; words that were left out are zero."""
    words = np.zeros(_words(vocab_size), np.uint32)
    found = np.frombuffer(packed, "<u4")
    words[: len(found)] = found
    return words
