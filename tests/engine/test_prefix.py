import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine.prefix import extend, root

TOKENS = st.lists(st.integers(0, 2), max_size=12)
SALTS = st.sampled_from([None, "", "a", "salt", "\udc80"])


def named(tokens: list[int], salt: str | None = None, block_size: int = 2) -> list[bytes]:
    return extend([root(salt)], tokens, block_size)


@given(TOKENS, TOKENS, SALTS, SALTS)
def test_two_names_are_equal_exactly_if_salt_and_all_tokens_before_are(left, right, left_salt, right_salt):
    pairs = zip(named(left, left_salt), named(right, right_salt), strict=False)
    for block, (one, other) in enumerate(pairs):
        alike = left_salt == right_salt and left[: 2 * block] == right[: 2 * block]
        assert (one == other) == alike


@given(TOKENS, st.integers(1, 5))
def test_only_full_blocks_are_named_after_the_root(tokens, block_size):
    assert len(named(tokens, block_size=block_size)) == 1 + len(tokens) // block_size


@given(TOKENS, st.integers(0, 12))
def test_a_chain_extended_bit_by_bit_equals_one_made_at_once(tokens, cut):
    keys = named(tokens[:cut])
    assert extend(keys, tokens, 2) is keys
    assert keys == named(tokens)


def test_one_block_twice_has_two_names():
    assert all(one != other for one, other in pairwise(named([7, 7, 7, 7, 7, 7])))


def test_tokens_count_by_their_number_and_not_by_their_spelling():
    assert named([1, 23]) != named([12, 3])
    assert named([2**31 - 1, 0]) != named([0, 2**31 - 1])


def test_names_are_the_same_in_every_process():
    held = (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    assert named([5, 6])[1] == hashlib.sha256(hashlib.sha256(b"").digest() + held).digest()
