"""Progress bars on standard error that vanish when it is no terminal."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(
    iterable: Iterable[Any] | None = None, *, description: str, total: int | None = None, shown: bool = True
) -> Any:
    """A tqdm bar, cleared when done; silent when `shown` is False or standard error is no terminal."""
    return tqdm(
        iterable,
        desc=description,
        total=total,
        leave=False,
        file=sys.stderr,
        disable=None if shown else True,
        dynamic_ncols=True,
    )
