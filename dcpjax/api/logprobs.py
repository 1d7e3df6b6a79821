"""Log-probabilities in results: one dict per token, named as in vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token. `rank` 1 is the most likely token."""

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
    ranks: Sequence[int] | None = None,
) -> dict[int, Logprob]:
    """The sampled token, then the `k` most likely tokens, most likely first; each id once.

    Args:
        chosen_id, chosen, rank: the sampled token, its log-probability and rank.
        top_ids, top: ids and log-probabilities of the most likely tokens in order; there may be more than `k`.
        k: -1 takes all of them.
        decode: makes `decoded_token` from an id.
        ranks: of `top_ids`; None: they are in order, from the most likely token on.
    """
    ranked = list(zip(top_ids, top, ranks or range(1, len(top_ids) + 1), strict=True))
    entries = {int(chosen_id): (float(chosen), int(rank))}
    for token, value, place in ranked if k == -1 else ranked[:k]:
        entries[token] = (value, place)
    return {
        token: Logprob(value, place, decode(token) if decode else None) for token, (value, place) in entries.items()
    }
