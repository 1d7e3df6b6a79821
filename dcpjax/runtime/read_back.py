"""The arrays of a step, once they are on the host, as results of its entries."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import jax
import numpy as np

from dcpjax.engine.result import StepResult, TokenScores
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.logit_rows import sampled_entries, scored_tokens
from dcpjax.sampling.sampler import Sampled
from dcpjax.sampling.scoring import Logprobs, NamedScores


def read_back(
    step: Sequence[Scheduled], finite: np.ndarray | None, sampled: Sampled | None, prompt_scores: Logprobs | None
) -> StepResult:
    """One result for each entry of the step.

    Args:
        finite: whether the hidden state of each entry is finite; None if every entry is sampled.
        sampled: a row for each entry that is sampled; None if none is.
    """
    rows = sampled_entries(step)
    tokens = np.zeros(len(step), np.int32)
    is_finite = np.ones(len(step), np.bool_) if finite is None else np.array(finite[: len(step)])
    possible = None
    if sampled is not None:
        tokens[rows], is_finite[rows] = sampled.tokens[: len(rows)], sampled.finite[: len(rows)]
        if sampled.possible is not None:
            possible = np.ones(len(step), np.bool_)
            possible[rows] = sampled.possible[: len(rows)]
    return StepResult(
        tokens=tokens.tolist(),
        finite=is_finite.tolist(),
        scores=_scores_of_samples(step, rows, sampled),
        prompt_scores=_scores_of_prompts(step, prompt_scores),
        possible=None if possible is None else possible.tolist(),
    )


def read_back_all(step: Sequence[Scheduled], sampled: Sampled) -> StepResult:
    """The same for several decode steps: `sampled` has an axis of these before that of the rows."""
    steps = range(max(entry.steps for entry in step))
    first, *following = [read_back(step, None, jax.tree.map(itemgetter(index), sampled), None) for index in steps]
    return replace(first, following=following)


def _scores_of_samples(
    step: Sequence[Scheduled], rows: Sequence[int], sampled: Sampled | None
) -> list[TokenScores | None] | None:
    if sampled is None or sampled.logprobs is None:
        return None
    found: list[TokenScores | None] = [None] * len(step)
    for index, row in enumerate(rows):
        params = step[row].request.params
        if params.scores_tokens:
            scores = _token_scores(int(sampled.tokens[index]), sampled.logprobs, index)
            named = params.logprob_token_ids
            found[row] = scores if named is None else _with_named(scores, named, sampled.named, index)
    return found


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
    listed = np.asarray(scores.top[row]) > -np.inf  # the others belong to no token
    return TokenScores(
        token,
        float(scores.chosen[row]),
        int(scores.rank[row]),
        np.asarray(scores.top_ids[row])[listed].tolist(),
        np.asarray(scores.top[row])[listed].tolist(),
    )


def _with_named(scores: TokenScores, ids: Sequence[int], named: NamedScores | None, row: int) -> TokenScores:
    """The scores with the tokens `ids` instead of the most likely ones."""
    assert named is not None
    logprobs, ranks = (np.asarray(values[row, : len(ids)]).tolist() for values in (named.logprobs, named.rank))
    return scores._replace(top_ids=ids, top_logprobs=logprobs, top_ranks=ranks)
