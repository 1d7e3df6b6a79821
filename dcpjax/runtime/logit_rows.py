"""Which of a step's tokens meet the head: those from which a next one is sampled, and prompt tokens to be scored.

Indices count the step's tokens as `batch` lays them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.batch import Batch, ShapeBuckets
from dcpjax.runtime.tiles import padded
from dcpjax.sampling.bucket_size import bucket_size
from dcpjax.sampling.known_tokens import KnownTokens
from dcpjax.sampling.sampler import SamplingBatch
from dcpjax.sampling.scoring import shared_num_logprobs

LEAST_SCORED = 32


@dataclass(frozen=True)
class SampledRows:
    """The tokens from which next ones are sampled, and the sampling options of their requests."""

    # [B]: index into the step's tokens, 0 for padding
    indices: np.ndarray
    options: SamplingBatch

    @classmethod
    def of(
        cls,
        step: Sequence[Scheduled],
        batch: Batch,
        shapes: ShapeBuckets,
        vocab_size: int,
        known: KnownTokens | None = None,
    ) -> "SampledRows | None":
        """None if no request is at its newest token. `known`: see `SamplingBatch.build`."""
        rows = sampled_entries(step)
        if not rows:
            return None
        size = shapes.rows(len(rows))
        options = SamplingBatch.build([step[row].request for row in rows], size, vocab_size, known)
        return cls(padded(np.asarray(batch.last)[rows], size, fill=0), options)


@dataclass(frozen=True)
class ScoredTokens:
    """Prompt tokens whose log-probabilities are wanted."""

    # [n]: index into the step's tokens of the token before, 0 for padding
    indices: np.ndarray
    # [n]: the token itself, -1 for padding
    targets: np.ndarray
    # how many of the most likely tokens are reported, too; -1 is all
    num_logprobs: int

    @classmethod
    def of(cls, step: Sequence[Scheduled], vocab_size: int) -> "ScoredTokens | None":
        """None if no prompt token of the step is to be scored."""
        scored = scored_tokens(step)
        size = bucket_size(len(scored), smallest=LEAST_SCORED)
        wanted = [step[row].request.params.prompt_logprobs for row, _, _ in scored]
        count = shared_num_logprobs(wanted, vocab_size)
        if count is None:
            return None
        targets = [step[row].request.prompt_token_ids[position + 1] for row, _, position in scored]
        indices = [index for _, index, _ in scored]
        return cls(padded(indices, size, fill=0), padded(targets, size, fill=-1), count)


def sampled_entries(step: Sequence[Scheduled]) -> list[int]:
    """Numbers of the entries from whose last token the next one is sampled."""
    return [row for row, entry in enumerate(step) if entry.samples]


def scored_tokens(step: Sequence[Scheduled]) -> list[tuple[int, int, int]]:
    """(entry, index into the step's tokens, position) of the prompt tokens whose next token is to be scored."""
    found, first = [], 0
    for row, entry in enumerate(step):
        if entry.request.scores_prompt:
            stop = min(entry.start + entry.count, len(entry.request.prompt_token_ids) - 1)
            found.extend((row, first + position - entry.start, position) for position in range(entry.start, stop))
        first += entry.count
    return found
