"""Words that must not be generated (`bad_words`), as sequences of token ids."""

from collections.abc import Callable, Iterator, Sequence

WordIds = tuple[int, ...]


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[WordIds, ...]:
    """The token ids of every word, as spelled at the start of a text and after a space. No sequence occurs twice.

    A sequence that ends with another one is left out, because banning the shorter one bans both.

    Args:
        encode: text to token ids, without special tokens.

    Raises:
        ValueError: a word that has no tokens.
    """
    found: dict[WordIds, None] = {}
    for word in words:
        bare = word.lstrip() or word
        spellings = [ids for text in (bare, f" {bare}") if (ids := tuple(encode(text)))]
        if not spellings:
            raise ValueError(f"bad_words must hold words of at least one token, but {word!r} has none; leave it out")
        found.update(dict.fromkeys(spellings))
    return tuple(ids for ids in found if not any(ids[start:] in found for start in range(1, len(ids))))


def completing_tokens(words: Sequence[WordIds], output_token_ids: Sequence[int]) -> Iterator[int]:
    """The last token of each word whose other tokens end the output: generated next, it would complete the word."""
    for *before, last in words:
        if not before or list(output_token_ids[-len(before) :]) == before:
            yield last
