"""Log-probabilities as a caller reads them, one dict per token, named as in vLLM. Knows no text and no arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model held one token. `rank` 1 is the most likely one."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def to_logprobs(
    chosen_id: int,
    chosen: float,
    rank: int,
    top_ids: Sequence[int],
    top: Sequence[float],
    k: int,
    decode: Callable[[int], str | None] | None = None,
) -> dict[int, Logprob]:
    """The chosen token, then the k most likely ones (-1: all that are given), most likely first, each id once.

    Args:
        top_ids, top: ids and log-probabilities of one token, most likely first; there may be more than k.
        decode: gives `decoded_token`.
    """
    ranked = list(zip(top_ids, top, strict=True))
    entries = {int(chosen_id): (float(chosen), int(rank))}
    for place, (token, value) in enumerate(ranked if k == -1 else ranked[:k]):
        entries[token] = (value, place + 1)
    return {
        token: Logprob(value, place, decode(token) if decode else None) for token, (value, place) in entries.items()
    }
