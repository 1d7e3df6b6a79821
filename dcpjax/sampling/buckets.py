"""Widths of lists that differ by the step, rounded up so that few programs exist."""


def round_up(count: int, *, least: int) -> int:
    """0, or the first of least, 4 * least, 16 * least ... that holds `count`."""
    width = least if count else 0
    while width < count:
        width *= 4
    return width
