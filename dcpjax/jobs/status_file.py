"""The status file: how far a job is, for other programs. Replaced whole, so that a reader never sees half of one."""

import contextlib
import json
import os
import time
from typing import Any


class StatusFile:
    """One JSON object.

    Raises:
        ValueError: the first write fails. A later one that fails is let go: the job matters more.
    """

    def __init__(self, path: str | os.PathLike[str], facts: dict[str, Any]) -> None:
        """`facts` do not change while the job runs."""
        self._path, self._facts = os.path.realpath(path), {**facts, "pid": os.getpid()}
        try:
            self._write({"state": "loading"})
        except OSError as error:
            raise ValueError(
                f"`status_file` must be a file that can be written, but {self._path} is not: {error.strerror}"
            ) from error

    def write(self, numbers: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._write(numbers)

    def _write(self, numbers: dict[str, Any]) -> None:
        beside = f"{self._path}.{os.getpid()}"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                json.dump({**self._facts, "updated": round(time.time(), 3), **numbers}, file, indent=2)
                file.write("\n")
            os.replace(beside, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
