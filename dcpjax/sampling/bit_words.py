"""Sets of token ids as [ceil(V / 32)] uint32, as `api.bitmask` packs them: token t is bit t % 32 of word t // 32."""

import numpy as np


def num_words(vocab_size: int) -> int:
    """uint32 words that hold a bit for each token."""
    return -(-vocab_size // 32)


def to_words(packed: bytes, vocab_size: int) -> np.ndarray:
    """Packed bits as [ceil(V / 32)] uint32; words missing at the end are zero."""
    words = np.zeros(num_words(vocab_size), np.uint32)
    found = np.frombuffer(packed, "<u4")
    words[: len(found)] = found
    return words
