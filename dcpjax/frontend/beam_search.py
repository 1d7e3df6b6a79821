"""Beam search over token ids: at each token the most likely continuations of each prompt are kept.

It knows no engine: the caller gives the log-probabilities of the next token.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dcpjax.api.beam_search import BeamSearchParams, BeamSearchSequence
from dcpjax.api.logprobs import Logprob

# Token ids of several texts -> the most likely next tokens of each: 2 * beam_width, or all where there are fewer.
NextTokens = Callable[[Sequence[list[int]]], list[dict[int, Logprob]]]


class Search:
    """One prompt: the continuations that go on, and those that have ended."""

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, max_tokens: int, end_token_ids: Collection[int]
    ) -> None:
        """`max_tokens`: what the options and the model length leave."""
        self._params, self._max_tokens = params, max_tokens
        self._end_token_ids = () if params.ignore_eos else end_token_ids
        self._prompt_length = len(prompt)
        self.beams = [BeamSearchSequence(tokens=list(prompt))]
        self.ended: list[BeamSearchSequence] = []

    def advance(self, next_tokens: Sequence[dict[int, Logprob]]) -> None:
        """Continue each beam by each of its most likely next tokens, and keep the best."""
        longer = [
            _continued(beam, token, logprobs)
            for beam, logprobs in zip(self.beams, next_tokens, strict=True)
            for token in logprobs
        ]
        going_on = [beam for beam in longer if beam.tokens[-1] not in self._end_token_ids]
        self.ended += [self._end(beam) for beam in longer if beam.tokens[-1] in self._end_token_ids]
        self.beams = self._best(going_on)
        if self.beams and len(self.beams[0].logprobs) == self._max_tokens:
            self.ended += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []

    def result(self) -> list[BeamSearchSequence]:
        return self._best(self.ended)

    def _end(self, beam: BeamSearchSequence) -> BeamSearchSequence:
        end = beam.tokens[-1]
        tokens = beam.tokens if self._params.include_stop_str_in_output else beam.tokens[:-1]
        return replace(beam, tokens=tokens, finish_reason="stop", stop_reason=end)

    def _best(self, beams: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        """The end of sequence does not count as a token."""
        length = self._prompt_length + len(beam.logprobs) - (beam.finish_reason == "stop")
        return beam.cum_logprob / length**self._params.length_penalty


def run(searches: Sequence[Search], next_tokens: NextTokens) -> None:
    """Bring all searches to their end, one token of all of them at a time."""
    while running := [search for search in searches if search.beams]:
        found = iter(next_tokens([beam.tokens for search in running for beam in search.beams]))
        for search in running:
            search.advance([next(found) for _ in search.beams])


def _continued(beam: BeamSearchSequence, token: int, logprobs: dict[int, Logprob]) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=[*beam.tokens, token],
        logprobs=[*beam.logprobs, logprobs],
        cum_logprob=beam.cum_logprob + logprobs[token].logprob,
    )
