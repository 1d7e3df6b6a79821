"""Which custom ids a job has met. Keeps a hash of each: about 120 bytes a line, however long the ids."""

from hashlib import blake2b

from dcpjax.openai.request import RecordError


class Seen:
    """Hash of a custom id -> the first line that has it."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}

    def add(self, custom_id: str | None, line: int) -> None:
        """Raises RecordError if an earlier line has it too."""
        if custom_id is None:
            return
        # 64 bits: among a million ids, two share a hash with a probability below 1e-7
        key = int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest())
        first = self._lines.setdefault(key, line)
        if first != line:
            raise RecordError(
                f"custom_id must be used once, but {custom_id!r:.80} is that of line {first} too; rename one",
                "duplicate_custom_id",
            )
