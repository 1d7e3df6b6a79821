"""Naming what a block of tokens holds: a chain of hashes, so that equal names mean equal histories.

Works on token ids; knows nothing about blocks' owners or where they lie.
"""

import hashlib
from array import array
from collections.abc import Sequence

Key = bytes  # SHA-256: two histories of one name are not to be expected in the life of the universe


def root(salt: str | None) -> Key:
    """Where a chain begins. Requests of different salts never share a block."""
    return hashlib.sha256(b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")).digest()


def extend(keys: list[Key], tokens: Sequence[int], block_size: int) -> list[Key]:
    """Append the keys of the full blocks of `tokens` that `keys` (its root first) does not name yet."""
    for block in range(len(keys) - 1, len(tokens) // block_size):
        held = array("q", tokens[block * block_size : (block + 1) * block_size])
        keys.append(hashlib.sha256(keys[-1] + held.tobytes()).digest())
    return keys
