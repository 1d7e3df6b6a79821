"""The custom ids of the lines read so far, to find one that is used twice."""

from hashlib import blake2b

from dcpjax.jobs.batch_request import LineError


class SeenIds:
    """Hash of a custom id -> the first line that has it. About 120 bytes a line, however long the ids."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}

    def add(self, custom_id: str | None, line: int) -> None:
        """Raises LineError if an earlier line has the same id."""
        if custom_id is None:
            return
        # 64 bits: among a million ids, two share a hash with a probability below 1e-7
        key = int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest())
        first = self._lines.setdefault(key, line)
        if first != line:
            raise LineError(
                f"custom_id must be used once, but {custom_id!r:.80} is that of line {first} too; rename one",
                "duplicate_custom_id",
            )
