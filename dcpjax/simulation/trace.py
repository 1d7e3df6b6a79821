"""Recorded traffic: arrival time and lengths of each request, and which prompts share their first tokens.

Reads the trace files of Mooncake (Qin et al., FAST 2025): one JSON object per line, whose `hash_ids` stand for 512
tokens of the prompt each. Prompts with the same first ids have the same first tokens; `synthesise` makes token ids for
which this is true.
"""

import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

MOONCAKE_TOKENS_PER_HASH = 512
HASH_IDS = 2**32  # hash ids are below this number


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    0 ............ 511 | 512 ......... 1023 | 1024 .. input_length-1     the prompt, `tokens_per_hash` = 512
    hash_ids[0]        | hash_ids[1]        | hash_ids[2], in part
    """

    timestamp: float  # milliseconds since the trace began
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: tuple[int, ...]
    tokens_per_hash: int = MOONCAKE_TOKENS_PER_HASH

    def __post_init__(self) -> None:
        _check_timestamp(self.timestamp)
        for name in ("input_length", "output_length", "tokens_per_hash"):
            _check_integer(name, getattr(self, name), 1)
        for hash_id in self.hash_ids:
            _check_integer("a hash id", hash_id, 0, HASH_IDS - 1)
        needed = math.ceil(self.input_length / self.tokens_per_hash)
        if len(self.hash_ids) != needed:
            raise ValueError(
                f"hash_ids must hold one id per {self.tokens_per_hash} tokens, {needed} for input_length="
                f"{self.input_length}, but holds {len(self.hash_ids)}"
            )


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """The requests of a Mooncake trace file in its order, the first `limit` of them. Unknown keys are ignored.

    Raises ValueError, with the number of the line, for a file or line that cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, but is {limit}; use None to read the whole trace")
    try:
        with Path(path).open("rb") as lines:
            return list(islice(_requests(path, lines), limit))
    except OSError as error:
        raise ValueError(f"a trace must be a readable file of JSON lines, but is not: {error}") from error


def scaled(requests: Sequence[TraceRequest], factor: int) -> list[TraceRequest]:
    """The same traffic with every length and `tokens_per_hash` divided by `factor`, rounded up.

    `factor` must divide `tokens_per_hash`, so that every prompt keeps its ids and its shared prefixes.
    """
    return [_scaled(request, factor) for request in requests]


def synthesise(request: TraceRequest, vocab_size: int, tokens_per_hash: int | None = None) -> list[int]:
    """A prompt of `input_length` token ids below `vocab_size`, the same at every call.

    The tokens of a hash id depend on the id alone, so the same first ids give the same first tokens. The first tokens
    of an id encode it and therefore differ between ids; the last id of a prompt may have too few tokens for that.
    `tokens_per_hash`, if given, must be that of the request.
    """
    unit = request.tokens_per_hash
    if tokens_per_hash not in (None, unit):
        raise ValueError(f"tokens_per_hash must be that of the request, {unit}, but is {tokens_per_hash}; see scaled()")
    _check_distinct(request, vocab_size)
    whole = [token for hash_id in request.hash_ids for token in _tokens(hash_id, vocab_size, unit)]
    return whole[: request.input_length]


def ideal_hit_rate(requests: Sequence[TraceRequest], block_size: int) -> float:
    """The fraction of all prompt tokens that an unlimited prefix cache of whole blocks would find.

    Requests are taken in the order given, and only prompts are cached. The last token of a prompt is always computed,
    because the first token of the answer is sampled from it. 0 if there are no requests.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, but is {block_size}; use 1")
    prefixes = _Prefixes()
    hits = 0
    for request in requests:
        shared = min(prefixes.add(request), request.input_length - 1)
        hits += shared // block_size * block_size
    total = sum(request.input_length for request in requests)
    return hits / total if total else 0.0


def unique_fraction(requests: Sequence[TraceRequest], block_size: int) -> float:
    """The smallest fraction of all prompt tokens that must be computed: 1 - `ideal_hit_rate`."""
    return 1.0 - ideal_hit_rate(requests, block_size)


class _Prefixes:
    """All prefixes seen so far, as a tree of hash ids."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int, int], int] = {}  # (parent, unit, hash id) -> node; the root is -1
        self._lengths: list[int] = []  # node -> the most tokens seen from the root to its end

    def add(self, request: TraceRequest) -> int:
        """Add a prompt; return how many of its first tokens were seen before."""
        node, shared = -1, 0
        for index, hash_id in enumerate(request.hash_ids, start=1):
            end = min(index * request.tokens_per_hash, request.input_length)
            key = (node, request.tokens_per_hash, hash_id)
            if key in self._nodes:
                node = self._nodes[key]
                shared = min(end, self._lengths[node])
                self._lengths[node] = max(end, self._lengths[node])
            else:
                node = self._nodes[key] = len(self._lengths)
                self._lengths.append(end)
        return shared


def _requests(path: str | os.PathLike[str], lines: Iterable[bytes]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _request(_json_object(line))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from error


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a request must be one JSON object, but is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a request must be one JSON object, but is {value!r:.60}")
    return value


def _request(fields: dict[str, Any]) -> TraceRequest:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"a request must have {', '.join(names)}, but has no {missing[0]}")
    timestamp, input_length, output_length, hash_ids = (fields[name] for name in names)
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids must be a list of integers, but is {hash_ids!r:.60}")
    return TraceRequest(
        timestamp=timestamp, input_length=input_length, output_length=output_length, hash_ids=tuple(hash_ids)
    )


def _check_timestamp(value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"timestamp must be milliseconds, 0 or more, but is {value!r:.60}")


def _check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, but is {value!r:.60}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {f'at least {low}' if value < low else f'at most {high}'}, but is {value}")


def _scaled(request: TraceRequest, factor: int) -> TraceRequest:
    unit = request.tokens_per_hash
    if factor < 1 or unit % factor:
        legal = [divisor for divisor in range(1, unit + 1) if unit % divisor == 0]
        nearest = min(legal, key=lambda divisor: abs(divisor - factor))
        raise ValueError(f"factor must divide the {unit} tokens of a hash id, but is {factor}; use {nearest}")
    return replace(
        request,
        input_length=math.ceil(request.input_length / factor),
        output_length=math.ceil(request.output_length / factor),
        tokens_per_hash=unit // factor,
    )


def _check_distinct(request: TraceRequest, vocab_size: int) -> None:
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be at least 2, but is {vocab_size}; use the model's")
    largest = max(request.hash_ids)
    if vocab_size**request.tokens_per_hash <= largest:
        raise ValueError(
            f"vocab_size ** tokens_per_hash must exceed every hash id, but {vocab_size} ** {request.tokens_per_hash} "
            f"does not exceed {largest}; scale the trace by a smaller factor"
        )


def _tokens(hash_id: int, vocab_size: int, count: int) -> list[int]:
    """The digits of the id in base `vocab_size`, lowest first, then random tokens seeded with the id."""
    digits = []
    rest, left = hash_id, HASH_IDS - 1  # the same number of digits for every id: none is a prefix of another
    while left and len(digits) < count:
        digits.append(rest % vocab_size)
        rest, left = rest // vocab_size, left // vocab_size
    return digits + random.Random(hash_id).choices(range(vocab_size), k=count - len(digits))
