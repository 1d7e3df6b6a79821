"""Which of a step's tokens meet the head: those from which a next one is chosen, and prompt tokens to be scored.

Plain lists and numpy arrays, laid out as `batch` lays out the step; knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.batch import Batch, Shapes, padded
from dcpjax.sampling.bucket_size import bucket_size
from dcpjax.sampling.sampler import SamplingBatch
from dcpjax.sampling.scoring import shared_num_logprobs

LEAST_SCORED = 32


@dataclass(frozen=True)
class Choice:
    """The tokens that next ones follow from, and how those are chosen."""

    # [C]: index into the step's tokens, 0 for padding
    indices: np.ndarray
    options: SamplingBatch

    @classmethod
    def of(cls, step: Sequence[Scheduled], batch: Batch, shapes: Shapes, vocab_size: int) -> "Choice | None":
        """None if no request is at its newest token."""
        rows = choosing_rows(step)
        if not rows:
            return None
        size = shapes.rows(len(rows))
        options = SamplingBatch.build([step[row].request for row in rows], size, vocab_size)
        return cls(padded(np.asarray(batch.last)[rows], size, fill=0), options)


@dataclass(frozen=True)
class Scoring:
    """Prompt tokens whose log-probabilities are wanted."""

    # [C]: index into the step's tokens of the token before, 0 for padding
    indices: np.ndarray
    # [C]: the token itself, -1 for padding
    targets: np.ndarray
    # how many of the most likely tokens are reported beside; -1 is all
    num_logprobs: int

    @classmethod
    def of(cls, step: Sequence[Scheduled], vocab_size: int) -> "Scoring | None":
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


def choosing_rows(step: Sequence[Scheduled]) -> list[int]:
    """Rows from whose last token the next one is chosen."""
    return [row for row, entry in enumerate(step) if entry.samples]


def scored_tokens(step: Sequence[Scheduled]) -> list[tuple[int, int, int]]:
    """(row, index into the step's tokens, position) of the prompt tokens whose successor's likelihood is wanted."""
    found, first = [], 0
    for row, entry in enumerate(step):
        if entry.request.scores_prompt:
            stop = min(entry.start + entry.count, len(entry.request.prompt_token_ids) - 1)
            found.extend((row, first + position - entry.start, position) for position in range(entry.start, stop))
        first += entry.count
    return found
