"""Keys of cached blocks: a chain of hashes over a request's tokens, so that equal keys mean equal histories."""

import hashlib
from array import array
from collections.abc import Sequence

Key = bytes  # SHA-256 of the key before and of the block's tokens


def root(salt: str | None) -> Key:
    """The key before the first block. Requests of different salts never share a block."""
    return hashlib.sha256(b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")).digest()


def extend(keys: list[Key], tokens: Sequence[int], block_size: int) -> list[Key]:
    """Append the keys of those full blocks of `tokens` that `keys`, which begins with the root, does not have yet."""
    for block in range(len(keys) - 1, len(tokens) // block_size):
        held = array("q", tokens[block * block_size : (block + 1) * block_size])
        keys.append(hashlib.sha256(keys[-1] + held.tobytes()).digest())
    return keys
