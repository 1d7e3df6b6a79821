"""The sampling options of a step's requests as arrays with a row per request: one dataclass for each kind of option.

Each `build_*` function returns None if no request uses its option, so that the compiled program leaves it out. Rows
of requests that do not use it, and padding rows, hold values that change nothing.
"""

from collections.abc import Sequence

import jax
import numpy as np

from dcpjax.engine.request import Request
from dcpjax.sampling.bad_words import completing_tokens
from dcpjax.sampling.bit_words import num_words, to_words
from dcpjax.sampling.bucket_size import bucket_size
from dcpjax.sampling.known_tokens import KnownTokens
from dcpjax.sampling.token_counts import TokenCounts
from dcpjax.sharding import struct

MIN_TEMPERATURE = 1e-5  # below it, dividing by the temperature overflows: greedy instead, as in vLLM


@struct.dataclass
class Draw:
    """What a random draw depends on besides the logits."""

    # [B] float32, host: 0 is greedy
    temperature: jax.Array
    # [B, 2] uint32, host: the two halves of the request's seed
    seed: jax.Array
    # [B] int32, host: tokens the request has generated so far
    generated: jax.Array


@struct.dataclass
class Truncation:
    """Limits on which tokens can be drawn. A limit that no row uses is None."""

    # [B] float32, host: 0 keeps all
    min_p: jax.Array | None
    # [B] int32, host: 0 keeps all
    top_k: jax.Array | None
    # [B] float32, host: 1 keeps all
    top_p: jax.Array | None


@struct.dataclass
class Bias:
    """Values added to the logits of some tokens. Rows are padded to the same number of biases."""

    # [B, biases] int32, host: token ids, -1 for padding
    ids: jax.Array
    # [B, biases] float32, host
    values: jax.Array


@struct.dataclass
class Penalties:
    """The tokens each row already has, and its penalties. Rows are padded to the same number of distinct tokens."""

    # [B, ceil(V / 32)] uint32, host: a bit for each token of the prompt
    prompt: jax.Array
    # [B, distinct] int32, host: distinct generated tokens that the host knows, -1 for padding
    output_ids: jax.Array
    # [B, distinct] int32, host: how often each was generated
    output_counts: jax.Array
    # [B] bool, host: whether one more token was generated, which only the device knows yet
    in_flight: jax.Array
    # [B] float32, host: 1 is none
    repetition: jax.Array
    # [B] float32, host: 0 is none
    frequency: jax.Array
    # [B] float32, host: 0 is none
    presence: jax.Array


def _is_random(request: Request) -> bool:
    return request.params.temperature >= MIN_TEMPERATURE


def build_draw(requests: Sequence[Request], num_rows: int) -> Draw | None:
    random = [(row, request) for row, request in enumerate(requests) if _is_random(request)]
    if not random:
        return None
    temperature, seed, generated = [0.0] * num_rows, [(0, 0)] * num_rows, [0] * num_rows
    for row, request in random:
        temperature[row], generated[row] = request.params.temperature, request.num_generated
        seed[row] = divmod(request.seed % 2**64, 2**32)
    return Draw(
        np.array(temperature, np.float32),  # type: ignore[arg-type]
        np.array(seed, np.uint32),  # type: ignore[arg-type]
        np.array(generated, np.int32),  # type: ignore[arg-type]
    )


def build_truncation(requests: Sequence[Request], num_rows: int, vocab_size: int) -> Truncation | None:
    random = [(row, request.params) for row, request in enumerate(requests) if _is_random(request)]
    if not random:
        return None
    min_p, top_k, top_p = [0.0] * num_rows, [0] * num_rows, [1.0] * num_rows
    for row, params in random:
        min_p[row], top_p[row] = params.min_p, params.top_p
        top_k[row] = params.top_k if 0 < params.top_k < vocab_size else 0
    limits = (np.array(min_p, np.float32), 0.0), (np.array(top_k, np.int32), 0), (np.array(top_p, np.float32), 1.0)
    used = [values if (values != keeps_all).any() else None for values, keeps_all in limits]
    return None if all(values is None for values in used) else Truncation(*used)  # type: ignore[arg-type]


def build_bias(requests: Sequence[Request], num_rows: int) -> Bias | None:
    biases = [request.params.bias_arrays for request in requests]
    all_ids = padded_ids([ids for ids, _ in biases], num_rows)
    if all_ids is None:
        return None
    all_values = np.zeros(all_ids.shape, np.float32)
    for row, (_, values) in enumerate(biases):
        all_values[row, : len(values)] = values
    return Bias(all_ids, all_values)  # type: ignore[arg-type]


def build_banned(requests: Sequence[Request], num_rows: int) -> jax.Array | None:
    """The tokens that min_tokens and bad_words ban, [B, banned] int32, -1 for padding."""
    return padded_ids([_banned_tokens(request) for request in requests], num_rows)


def _banned_tokens(request: Request) -> list[int]:
    """Tokens that would end the request before min_tokens or complete a bad word."""
    too_early = request.num_generated < request.params.min_tokens
    if not too_early and not request.bad_words:
        return []
    banned = set(request.end_token_ids) if too_early and not _must_end(request) else set()
    if request.bad_words:
        assert not request.num_in_flight or all(len(word) == 1 for word in request.bad_words), "a token is unknown"
        banned.update(completing_tokens(request.bad_words, request.output_token_ids))
    return sorted(banned)


def _must_end(request: Request) -> bool:
    """Whether the grammar's text is complete: then it ends, whatever min_tokens says."""
    if request.guide is None:
        return False
    left = np.array(request.guide.mask())
    for token in request.end_token_ids:
        if token < 32 * len(left):
            left[token // 32] &= ~np.uint32(1 << token % 32)
    return not left.any()


def build_allowed(
    requests: Sequence[Request], num_rows: int, vocab_size: int, known: KnownTokens | None
) -> jax.Array | None:
    """The known tokens that allowed_token_ids and the grammar both allow, as packed bits [B, ceil(V / 32)] uint32."""
    restricted = [
        (row, request)
        for row, request in enumerate(requests)
        if request.guide is not None or request.params.allowed_token_ids is not None
    ]
    if not restricted:
        return None
    allowed = np.empty((num_rows, num_words(vocab_size)), np.uint32)
    allowed[:] = 2**32 - 1 if known is None else known.words
    for row, request in restricted:
        if request.params.allowed_token_ids is not None:
            allowed[row] &= to_words(request.params.allowed_bits, vocab_size)
        if request.guide is not None:
            assert not request.num_in_flight, "a guide must have seen every token"
            allowed[row] &= request.guide.mask()
    return allowed  # type: ignore[return-value]


def build_named(requests: Sequence[Request], num_rows: int) -> jax.Array | None:
    """The tokens of `logprob_token_ids` [B, n] int32, padded to the same number."""
    return padded_ids([request.params.logprob_token_ids or () for request in requests], num_rows)


def padded_ids(every: Sequence[Sequence[int]], num_rows: int) -> jax.Array | None:
    """Token ids of each row, [B, n] int32, padded with -1; None if there are none."""
    width = bucket_size(max(map(len, every), default=0), smallest=4)
    if not width:
        return None
    padded = np.full((num_rows, width), -1, np.int32)
    for row, ids in enumerate(every):
        padded[row, : len(ids)] = ids
    return padded  # type: ignore[return-value]


def build_penalties(requests: Sequence[Request], num_rows: int, vocab_size: int) -> Penalties | None:
    penalized = [(row, request) for row, request in enumerate(requests) if request.params.has_penalties]
    if not penalized:
        return None
    all_counts = [_updated_counts(request) for _, request in penalized]
    width = bucket_size(max(1, *(len(counts.tokens) for counts in all_counts)), smallest=64)
    prompt = np.zeros((num_rows, num_words(vocab_size)), np.uint32)
    output_ids, output_counts = np.full((num_rows, width), -1, np.int32), np.zeros((num_rows, width), np.int32)
    in_flight, repetition = np.zeros(num_rows, np.bool_), np.ones(num_rows, np.float32)
    frequency, presence = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.float32)
    for (row, request), counts in zip(penalized, all_counts, strict=True):
        params, distinct = request.params, len(counts.tokens)
        prompt[row] = to_words(counts.prompt_bits, vocab_size)
        output_ids[row, :distinct], output_counts[row, :distinct] = counts.tokens, counts.counts
        in_flight[row], repetition[row] = bool(request.num_in_flight), params.repetition_penalty
        frequency[row], presence[row] = params.frequency_penalty, params.presence_penalty
    return Penalties(prompt, output_ids, output_counts, in_flight, repetition, frequency, presence)  # type: ignore[arg-type]


def _updated_counts(request: Request) -> TokenCounts:
    """The request's own counts, made when first needed, after counting its newest tokens."""
    request.token_counts = request.token_counts or TokenCounts(request.prompt_token_ids)
    request.token_counts.update(request.output_token_ids)
    return request.token_counts
