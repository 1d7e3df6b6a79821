"""Bucketed sizes of padded arrays: few distinct shapes mean few compiled programs."""


def bucket_size(count: int, *, smallest: int) -> int:
    """0 for no entries, else the first of smallest, 4 * smallest, 16 * smallest ... that is at least `count`."""
    size = smallest if count else 0
    while size < count:
        size *= 4
    return size
