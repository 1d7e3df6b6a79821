"""What rendering one conversation may cost at most: a chat template is third-party code."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class TemplateBounds:
    """Far above what any honest template needs: those of published models render in milliseconds."""

    seconds: float = 10.0  # of CPU time; not on Windows
    characters: int = 2**24  # of the rendered text
    memory_bytes: int = 2**30  # beyond what Python and its libraries take; on Linux only

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def too_slow(self) -> str:
        return f"must render a conversation in {self.seconds:g} s of CPU time, but took longer"

    def too_long(self, characters: int) -> str:
        return f"must write at most {self.characters:,} characters, but wrote {characters:,}"

    def too_much_memory(self) -> str:
        return f"must render a conversation in {self.memory_bytes:,} bytes of memory, but took more"
