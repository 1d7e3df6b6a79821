"""Progress bars on standard error, for a terminal or a notebook; silent elsewhere."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

CLEAR_LINE = "\r\033[K"


def bar(
    iterable: Iterable[Any] | None = None, *, description: str, total: int | None = None, shown: bool = True
) -> Any:
    """A tqdm bar, cleared when done; silent when `shown` is False or nobody watches."""
    return tqdm(
        iterable,
        desc=description,
        total=total,
        leave=False,
        file=sys.stderr,
        disable=not (shown and _is_watched()),
        dynamic_ncols=True,
    )


@contextlib.contextmanager
def status(text: str, *, shown: bool = True) -> Iterator[None]:
    """One line while something without steps goes on, cleared when done."""
    visible = shown and _is_watched()
    if visible:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if visible:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _is_watched() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
