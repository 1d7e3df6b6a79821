"""Words that must not be generated, as sequences of token ids. Knows neither tokenizers nor arrays."""

from collections.abc import Callable, Iterator, Sequence

Word = tuple[int, ...]


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[Word, ...]:
    """Every word as it is spelled at the start of a text and after a space, each sequence once.

    A sequence that ends with another one is left out: wherever it could end, the other ends too.

    Args:
        encode: text to token ids, without special tokens.

    Raises:
        ValueError: a word that has no tokens.
    """
    found: dict[Word, None] = {}
    for word in words:
        bare = word.lstrip() or word
        spellings = [ids for text in (bare, f" {bare}") if (ids := tuple(encode(text)))]
        if not spellings:
            raise ValueError(f"bad_words must hold words of at least one token, but {word!r} has none; leave it out")
        found.update(dict.fromkeys(spellings))
    return tuple(ids for ids in found if not any(_ends_longer(ids, other) for other in found))


def _ends_longer(ids: Word, other: Word) -> bool:
    return len(ids) > len(other) and ids[-len(other) :] == other


def completing(words: Sequence[Word], output_token_ids: Sequence[int]) -> Iterator[int]:
    """Tokens that, generated next, would complete one of the words."""
    for *before, last in words:
        if not before or list(output_token_ids[-len(before) :]) == before:
            yield last
