"""Refusing a text of too many tokens before all of it is tokenised: a text can be any number of times too long."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PIECE = 1 << 14  # characters that are tokenised at a time: some ten milliseconds
CUT_TOKENS = 16  # a piece may have so many tokens more than its part of the whole text, because it was cut out
LIKELY_CHARACTERS = 8  # of a token: a text with fewer is tokenised at once


def check_tokens(count: int, max_model_len: int) -> None:
    """Raises ValueError for more tokens than leave room for a new one."""
    if count >= max_model_len:
        raise ValueError(f"{_must(max_model_len)}, but holds {count}")


def check_text(text: str, max_model_len: int, encode: Callable[[str], Sequence[int]]) -> None:
    """Raises ValueError once the beginning of a text holds more tokens than leave room for a new one.

    A text that passes can still be some tokens too long.
    """
    if len(text) <= max(PIECE, LIKELY_CHARACTERS * max_model_len):
        return
    tokens = 0
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        tokens += max(0, len(encode(piece)) - CUT_TOKENS)
        if tokens >= max_model_len:
            read = f"the first {start + len(piece)} of its {len(text)} characters"
            raise ValueError(f"{_must(max_model_len)}, but {read} hold at least {tokens}")


def texts_of(value: Any) -> Iterator[str]:
    """Every string in a conversation, keys aside."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            left.extend(value)


def _must(max_model_len: int) -> str:
    return (
        f"a prompt must hold at most {max_model_len - 1} tokens (max_model_len={max_model_len} leaves one to generate)"
    )
