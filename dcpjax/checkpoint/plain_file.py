"""Files of a checkpoint that are read whole: plain files of a bounded size.

Opening a pipe waits for a writer, and a device or a sparse file may have no end.
"""

import stat
from pathlib import Path

MOST_BYTES = 2**27  # several times the largest published index or tokenizer


def check_plain_file(path: Path, most: int | None = None) -> None:
    """Raise ValueError unless `path` is a plain file, or leads to one, of at most `most` bytes. Opens nothing."""
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"{path} must be there, but is missing ({error.strerror}); fetch it again") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} must be a plain file, but is {_kind(found.st_mode)}; fetch it again")
    if most is not None and found.st_size > most:
        raise ValueError(f"{path} must have at most {most} bytes, but has {found.st_size}; fetch it again")


def read_text(path: Path) -> str:
    """UTF-8 text. Raises ValueError for anything else, and for more than `MOST_BYTES`."""
    check_plain_file(path, MOST_BYTES)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be readable text, but is not: {error}; fetch it again") from error


def _kind(mode: int) -> str:
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")
