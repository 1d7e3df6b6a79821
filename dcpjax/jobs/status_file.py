"""The status file: how far a job is, for other programs. It is replaced as a whole, never rewritten in place."""

import contextlib
import json
import os
import time
from typing import Any


class StatusFile:
    """One JSON object.

    Raises:
        ValueError: the first write fails. Later failures are ignored: the job goes on without its status.
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
        temporary = f"{self._path}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({**self._facts, "updated": round(time.time(), 3), **numbers}, file, indent=2)
                file.write("\n")
            os.replace(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
