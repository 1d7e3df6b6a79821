"""Log-probabilities in results: one dict per token, named as in vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token. `rank` 1 is the most likely token.

    `decoded_token` is the text that the token adds at its place, spaces included; the last token of a character gives
    it whole, those before it give "". A special token that stays out of the text has its name. `token_bytes` are the
    bytes that the token adds to the text: those of all tokens, joined, are the text's.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = field(default=None, repr=False)


def to_logprobs(
    chosen_id: int,
    chosen: float,
    rank: int,
    top_ids: Sequence[int],
    top: Sequence[float],
    k: int,
    spell: Callable[[int], tuple[str, bytes]] | None = None,
    ranks: Sequence[int] | None = None,
) -> dict[int, Logprob]:
    """The sampled token, then the `k` most likely tokens, most likely first; each id once.

    Args:
        chosen_id, chosen, rank: the sampled token, its log-probability and rank.
        top_ids, top: ids and log-probabilities of the most likely tokens in order; there may be more than `k`.
        k: -1 takes all of them.
        spell: makes `decoded_token` and `token_bytes` from an id.
        ranks: of `top_ids`; None: they are in order, from the most likely token on.
    """
    ranked = list(zip(top_ids, top, ranks or range(1, len(top_ids) + 1), strict=True))
    entries = {int(chosen_id): (float(chosen), int(rank))}
    for token, value, place in ranked if k == -1 else ranked[:k]:
        entries[token] = (value, place)
    spelled = {token: spell(token) if spell else (None, None) for token in entries}
    return {token: Logprob(value, place, *spelled[token]) for token, (value, place) in entries.items()}
