"""Sets of token ids as bits: token t is bit t % 32 of the little-endian 32-bit word t // 32."""

from collections.abc import Iterable


def pack(token_ids: Iterable[int]) -> bytes:
    """The words up to that of the largest id, as bytes; later words would be zero and are left out."""
    present = set(token_ids)
    words = max(present, default=-1) // 32 + 1
    bits = bytearray(4 * words)
    for token in present:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)
