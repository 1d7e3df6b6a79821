"""Progress bars on standard error, for a terminal or a notebook; nothing elsewhere."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

CLEAR_LINE = "\r\033[K"


def bar(
    iterable: Iterable[Any] | None = None, *, description: str, total: int | None = None, shown: bool = True
) -> Any:
    """A tqdm bar, cleared when done; none if `shown` is False or standard error is no terminal or notebook."""
    return tqdm(
        iterable,
        desc=description,
        total=total,
        leave=False,
        file=sys.stderr,
        disable=not (shown and _is_interactive()),
        dynamic_ncols=True,
    )


@contextlib.contextmanager
def status(text: str, *, shown: bool = True) -> Iterator[None]:
    """Show one line of text while the block runs, for work without countable steps."""
    visible = shown and _is_interactive()
    if visible:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if visible:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _is_interactive() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
