"""The ids of the logits that belong to tokens. Others must never be sampled or listed.

A checkpoint's vocabulary is often wider than its tokenizer's (padded to a round number), and some tokenizers have
holes.
"""

from dataclasses import dataclass

import jax
import numpy as np

from dcpjax.sampling.bit_words import num_words
from dcpjax.sharding import struct

BLOCK = 64  # ids among which `argmax` searches together; measured: 256 is no faster


@struct.dataclass
class KnownIds:
    """Which of the V ids belong to a token, on the device: made once, so that no step has to send it."""

    # [V] bool
    mask: jax.Array
    # [blocks] int32: blocks of `BLOCK` ids of which some belong to tokens and some do not
    mixed: jax.Array


@dataclass(frozen=True)
class KnownTokens:
    """Which of the V ids belong to a token."""

    # [ceil(V / 32)] uint32, host: a bit for each id
    words: np.ndarray
    ids: KnownIds

    @classmethod
    def on(cls, sharding: jax.sharding.Sharding, known: np.ndarray) -> "KnownTokens":
        """`known` [V] bool, on the devices of `sharding` too."""
        padded = np.zeros(-(-len(known) // BLOCK) * BLOCK, np.bool_)
        padded[: len(known)] = known
        blocks = padded.reshape(-1, BLOCK)
        mixed = np.flatnonzero(blocks.any(axis=1) & ~blocks.all(axis=1)).astype(np.int32)
        words = np.packbits(padded, bitorder="little").view("<u4")[: num_words(len(known))]
        return cls(words, jax.device_put(KnownIds(known, mixed), sharding))  # type: ignore[arg-type]
