import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.api.bitmask import pack
from dcpjax.sampling.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 300), max_size=40)


def unpacked(bits: bytes) -> set[int]:
    assert len(bits) % 4 == 0
    return {32 * word + bit for word in range(len(bits) // 4) for bit in range(32) if _word(bits, word) >> bit & 1}


def _word(bits: bytes, word: int) -> int:
    return int.from_bytes(bits[4 * word : 4 * word + 4], "little")


@given(TOKENS)
def test_packed_bits_are_the_set_and_no_word_more(tokens):
    assert unpacked(pack(tokens)) == set(tokens)
    assert len(pack(tokens)) == (4 * (max(tokens) // 32 + 1) if tokens else 0)


@given(TOKENS, st.lists(TOKENS, max_size=5))
def test_counts_are_the_same_however_often_they_are_updated(prompt, pieces):
    counts, output = TokenCounts(prompt), []
    for piece in pieces:
        output.extend(piece)
        counts.update(output)
        counts.update(output)
    assert unpacked(counts.prompt_bits) == set(prompt)
    assert list(counts.tokens) == list(dict.fromkeys(output))
    assert list(counts.counts) == [output.count(token) for token in counts.tokens]


def test_tokens_that_were_counted_cannot_be_taken_back():
    counts = TokenCounts([1])
    counts.update([1, 2])
    with pytest.raises(AssertionError):
        counts.update([1])
