"""Who owns which cache block, and which tokens the blocks hold.

A block has one id, whatever the layout: ids are the same on every rank. A full block whose content is registered under
a key (see `prefix`) can be shared by several owners. A free block keeps its content until it is allocated again, the
least recently used first.

    free     blocks without content, then those with content, least recently used first     references == 0
    owned    in the table of one owner, or of several if full and registered                 references == owners
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from dcpjax.engine.prefix import Key

MOST_COMPARED = 32  # blocks after one prefix that are compared token by token, the newest first


@dataclass(frozen=True)
class BlockContent:
    """The tokens in a block, after the history with key `parent`. A full block has a `key` of its own."""

    parent: Key
    tokens: tuple[int, ...]
    key: Key | None = None


@dataclass(frozen=True)
class PrefixMatch:
    """Blocks that hold the beginning of a request, and a block whose first `copied` tokens follow them."""

    blocks: list[int] = field(default_factory=list)
    source: int | None = None
    copied: int = 0


class BlockManager:
    """A pool of `num_blocks` blocks handed out to owners; an owner's blocks are in position order."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # allocated from the front
        self._references = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}
        self._contents: dict[int, BlockContent] = {}
        self._block_of: dict[Key, int] = {}
        self._children: dict[Key, OrderedDict[int, None]] = {}  # parent -> the blocks after it, newest last

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, including those whose content could be reused."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content a request could reuse."""
        return sum(block in self._contents for block in self._free)

    def table(self, owner: int) -> list[int]:
        """The owner's block ids, in position order."""
        return self._tables.get(owner, [])

    def can_allocate(self, owner: int, total: int, match: PrefixMatch | None = None) -> bool:
        """Whether the owner's table can grow to `total` blocks now, beginning with those of `match`."""
        shared = [] if match is None else match.blocks
        revived = sum(self._references[block] == 0 for block in shared)  # free, but about to be shared
        return total - len(self.table(owner)) - len(shared) <= self.num_free - revived

    def allocate(self, owner: int, total: int, match: PrefixMatch | None = None) -> list[int]:
        """Grow the owner's table to `total` blocks and return it. The caller has asked `can_allocate`."""
        assert self.can_allocate(owner, total, match), f"owner {owner} wants {total} blocks, {self.num_free} are free"
        table = self._tables.setdefault(owner, [])
        for block in match.blocks if match else ():
            self._free.pop(block, None)
            self._references[block] += 1
            table.append(block)
        while len(table) < total:
            table.append(self._pop_free())
        return table

    def free(self, owner: int) -> None:
        """Free every block of the owner. The first ones are kept longest: more prompts share them."""
        for block in reversed(self._tables.pop(owner, [])):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._contents:
                    self._free.move_to_end(block, last=False)

    def match(self, keys: Sequence[Key], tokens_of: Callable[[int], Sequence[int]], least: int) -> PrefixMatch:
        """What the pool holds of a request.

        Args:
            keys: of the request's root and of its full blocks.
            tokens_of: block number -> the request's tokens in that block.
            least: fewest tokens worth copying. After the blocks that are shared, the block that agrees with most of
                the next tokens is given as `source` if it agrees with at least so many.
        """
        blocks = [self._block_of[key] for key in takewhile(self._block_of.__contains__, keys[1:])]
        source, copied = self._best_child(keys[len(blocks)], tokens_of(len(blocks)))
        return PrefixMatch(blocks, source, copied) if copied >= least else PrefixMatch(blocks)

    def register(self, block: int, content: BlockContent) -> None:
        """Note what an owned block holds now. Of two full blocks of the same content the first keeps the key."""
        if content.key is not None and self._block_of.get(content.key, block) != block:
            return
        self._forget(block)
        self._contents[block] = content
        self._children.setdefault(content.parent, OrderedDict())[block] = None
        if content.key is not None:
            self._block_of[content.key] = block

    def content(self, block: int) -> BlockContent | None:
        return self._contents.get(block)

    def forget_free(self) -> None:
        """Forget what the free blocks hold, so that none of it is reused."""
        for block in self._free:
            self._forget(block)

    def _pop_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is None:
            return
        siblings = self._children[content.parent]
        del siblings[block]
        if not siblings:
            del self._children[content.parent]
        if content.key is not None:
            del self._block_of[content.key]

    def _best_child(self, parent: Key, tokens: Sequence[int]) -> tuple[int | None, int]:
        """(block, tokens in common) of the block after `parent` with the longest beginning in common with `tokens`."""
        best: tuple[int | None, int] = (None, 0)
        for block, _ in zip(reversed(self._children.get(parent, {})), range(MOST_COMPARED), strict=False):
            common = _common(self._contents[block].tokens, tokens)
            if common > best[1]:
                best = block, common
        return best

    def check_integrity(self) -> None:
        """Raise AssertionError, also under `-O`, unless counts, owners and keys agree."""
        counted = [0] * self.num_blocks
        for table in self._tables.values():
            for block in table:
                counted[block] += 1
        _check(counted == self._references, "a block's references are not the tables it is in")
        _check(
            sorted(self._free) == [block for block in range(self.num_blocks) if counted[block] == 0],
            f"{self.num_blocks} blocks, but {len(self._free)} are free and {sum(map(bool, counted))} are owned",
        )
        _check(all(len(set(table)) == len(table) for table in self._tables.values()), "a table names a block twice")
        named = {content.key: block for block, content in self._contents.items() if content.key is not None}
        _check(named == self._block_of, "a key leads to another block")
        for block, count in enumerate(counted):
            _check(count < 2 or block in self._block_of.values(), f"block {block} has {count} owners but may change")
        children = {(content.parent, block) for block, content in self._contents.items()}
        _check(
            children == {(parent, block) for parent, blocks in self._children.items() for block in blocks},
            "a block is not listed after its history",
        )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the beginning that both share."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
