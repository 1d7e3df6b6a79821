"""Who owns which cache block. Plain integers; knows no arrays, no positions and no text.

Block ids are the same on every rank: a block is one id whatever the layout.
"""


class BlockManager:
    """A pool of `num_blocks` blocks handed out to owners; an owner's blocks are in position order."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first, hot ids reused
        self._owned: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def table(self, owner: int) -> list[int]:
        """The owner's block ids, in position order."""
        return self._owned.get(owner, [])

    def can_allocate(self, owner: int, total: int) -> bool:
        """Whether the owner's table can grow to `total` blocks now."""
        return total - len(self.table(owner)) <= self.num_free

    def allocate(self, owner: int, total: int) -> list[int]:
        """Grow the owner's table to `total` blocks and return it. The caller has asked `can_allocate`."""
        table = self._owned.setdefault(owner, [])
        assert self.can_allocate(owner, total), f"owner {owner} wants {total} blocks, {self.num_free} are free"
        while len(table) < total:
            table.append(self._free.pop())
        return table

    def free(self, owner: int) -> None:
        """Give back every block of the owner; the last ones first, so that a table is reused from its start."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def check_integrity(self) -> None:
        """Every block is free or has exactly one owner. Raises AssertionError otherwise, also under `-O`."""
        seen = [*self._free, *(block for table in self._owned.values() for block in table)]
        if sorted(seen) != list(range(self.num_blocks)):
            raise AssertionError(
                f"{self.num_blocks} blocks, but {len(seen)} are accounted for, {len(set(seen))} of them distinct"
            )
