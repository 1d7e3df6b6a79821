"""What a step gives back to the host, row by row. Knows arrays that have arrived; knows nothing about devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpjax.batch import scored_tokens
from dcpjax.request import TokenScores
from dcpjax.sampling import Sampled
from dcpjax.scheduler import Scheduled
from dcpjax.scoring import Logprobs


@dataclass
class StepResult:
    """What a step gives back, in the order of its entries."""

    tokens: np.ndarray  # [R] int32
    finite: np.ndarray  # [R] bool: False where the logits held NaN or infinity
    scores: Sequence[TokenScores | None] | None = None  # of the sampled tokens, where wanted
    prompt_scores: Sequence[dict[int, TokenScores]] | None = None  # by position, where wanted


def step_result(step: Sequence[Scheduled], sampled: Sampled, prompt_scores: Logprobs | None) -> StepResult:
    """The arrays of a step, on the host, as results of its entries."""
    return StepResult(
        tokens=np.asarray(sampled.tokens),
        finite=np.asarray(sampled.finite),
        scores=_scores_of_samples(step, sampled),
        prompt_scores=_scores_of_prompts(step, prompt_scores),
    )


def _scores_of_samples(step: Sequence[Scheduled], sampled: Sampled) -> list[TokenScores | None] | None:
    if sampled.logprobs is None:
        return None
    return [
        None if entry.request.params.logprobs is None else _token_scores(int(token), sampled.logprobs, row)
        for row, (entry, token) in enumerate(zip(step, sampled.tokens, strict=False))
    ]


def _scores_of_prompts(step: Sequence[Scheduled], scores: Logprobs | None) -> list[dict[int, TokenScores]] | None:
    """For each entry, the scores of prompt tokens by position: each follows from the token before."""
    if scores is None:
        return None
    found: list[dict[int, TokenScores]] = [{} for _ in step]
    for index, (row, _, position) in enumerate(scored_tokens(step)):
        token = step[row].request.prompt_token_ids[position + 1]
        found[row][position + 1] = _token_scores(token, scores, index)
    return found


def _token_scores(token: int, scores: Logprobs, row: int) -> TokenScores:
    return TokenScores(
        token,
        float(scores.chosen[row]),
        int(scores.rank[row]),
        np.asarray(scores.top_ids[row]).tolist(),
        np.asarray(scores.top[row]).tolist(),
    )
