"""Which tokens a request has, counted as they come: what its penalties are taken from. Knows no arrays.

Counting again at every step would make each one as slow as the request is long.
"""

from array import array
from collections.abc import Sequence

from dcpjax.api.bitmask import pack


class History:
    """The tokens of one request's prompt, and how often each was generated.

    `prompt` holds bits; `tokens` and `counts` are as long as there are different generated tokens, in the order of
    their first appearance.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt = pack(prompt_token_ids)
        self.tokens, self.counts = array("i"), array("i")
        self._place: dict[int, int] = {}
        self._followed = 0

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Count what was generated since the last call; the tokens before must be the same."""
        assert len(output_token_ids) >= self._followed, "generated tokens are never taken back"
        for token in output_token_ids[self._followed :]:
            place = self._place.setdefault(token, len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0)
            self.counts[place] += 1
        self._followed = len(output_token_ids)
