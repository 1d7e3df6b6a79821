"""What a step of the model gives back to the engine, as plain Python numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TokenScores(NamedTuple):
    """How likely the model found one token, and which it found likeliest."""

    token_id: int
    logprob: float
    rank: int
    top_ids: Sequence[int]  # most likely first, or as the user named them
    top_logprobs: Sequence[float]
    top_ranks: Sequence[int] | None = None  # None: 1, 2, 3 ...; given where the user named the tokens


@dataclass
class StepResult:
    """What a step gives back, in the order of its entries."""

    tokens: Sequence[int]  # 0 where nothing was chosen
    finite: Sequence[bool]  # False where the logits, or without a choice the hidden state, held NaN or infinity
    scores: Sequence[TokenScores | None] | None = None  # of the sampled tokens, where wanted
    prompt_scores: Sequence[dict[int, TokenScores]] | None = None  # by position, where wanted
    possible: Sequence[bool] | None = None  # False where every token was banned; None if none was
    following: Sequence["StepResult"] = ()  # of the decode steps after the first, where a call runs several
