"""Stub."""

from typing import NamedTuple


class PromptExchange(NamedTuple):
    positions: int
    ratio: float = 1e9

    def keys_travel(self, cached: int, new: int) -> bool:
        return cached <= self.ratio * new
