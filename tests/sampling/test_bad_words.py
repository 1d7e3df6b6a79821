import pytest

from dcpjax.sampling.bad_words import bad_word_ids, completing_tokens


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def pieces(text: str) -> list[int]:
    """A tokenizer that has one token for each word with the space before it, and two for a long word alone."""
    known = {"cat": [1], " cat": [2], "catfish": [1, 3], " catfish": [4], " ": [5], "\n": [6], " \n": [5, 6]}
    return known.get(text, [])


def test_a_word_is_banned_with_and_without_a_space_before_it():
    assert bad_word_ids(["cat"], pieces) == ((1,), (2,))


def test_both_spellings_are_banned_though_their_lengths_differ():
    assert bad_word_ids(["catfish"], pieces) == ((1, 3), (4,))


def test_a_space_given_with_the_word_changes_nothing():
    assert bad_word_ids(["  cat"], pieces) == bad_word_ids(["cat"], pieces)


def test_no_sequence_is_given_twice():
    assert bad_word_ids(["cat", " cat", "cat"], pieces) == ((1,), (2,))


def test_a_spelling_that_only_puts_tokens_before_another_is_left_out():
    assert bad_word_ids(["ab"], letters) == ((97, 98),)


def test_white_space_can_be_banned_too():
    assert bad_word_ids(["\n"], pieces) == ((6,),)


def test_a_word_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"bad_words must hold words of at least one token, but 'dog' has none"):
        bad_word_ids(["cat", "dog"], pieces)


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], [9]), ([1], [9, 2]), ([1, 2], [9, 3]), ([2, 1], [9, 2]), ([5, 1, 2], [9, 3]), ([2], [9])],
)
def test_a_word_is_completed_by_its_last_token_after_the_others(output, expected):
    assert list(completing_tokens([(9,), (1, 2), (1, 2, 3)], output)) == expected
