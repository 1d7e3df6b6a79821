"""Counts of one request's tokens on the host, from which its penalties are computed.

Counts are kept from step to step: counting again at every step would make each step as slow as the request is long.
"""

from array import array
from collections.abc import Sequence

from dcpjax.api.bitmask import pack


class TokenCounts:
    """Which tokens a request's prompt has, and how often it has generated each token.

    `prompt_bits` are the tokens of the prompt as packed bits. `tokens` are the distinct generated tokens in the order
    of their first appearance, and `counts[i]` is how often `tokens[i]` was generated.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_bits = pack(prompt_token_ids)
        self.tokens, self.counts = array("i"), array("i")
        self._index: dict[int, int] = {}  # token -> its index in `tokens`
        self._num_counted = 0

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens generated since the last call. Those before must be the same as then."""
        assert len(output_token_ids) >= self._num_counted, "generated tokens are never taken back"
        for token in output_token_ids[self._num_counted :]:
            index = self._index.setdefault(token, len(self.tokens))
            if index == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0)
            self.counts[index] += 1
        self._num_counted = len(output_token_ids)
