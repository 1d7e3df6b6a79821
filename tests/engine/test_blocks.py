import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcpjax.engine.blocks import BlockContent, BlockManager, PrefixMatch
from dcpjax.engine.prefix import extend, root

SIZE = 3  # tokens per block; the manager need not know


class Owner:
    """A request as the manager's user sees it: its tokens, and how many of them it has written and held."""

    def __init__(self, tokens: list[int], salt: str | None, done: int) -> None:
        self.tokens, self.salt, self.written, self.held = tokens, salt, done, done

    def keys(self, blocks: int) -> list[bytes]:
        return extend([root(self.salt)], self.tokens[: blocks * SIZE], SIZE)


class Pool(RuleBasedStateMachine):
    """Requests come, share, grow and go, against a model of what every block truly holds and when it was freed."""

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=10)

    @initialize(size=st.integers(1, 10))
    def make(self, size):
        self.size, self.blocks = size, BlockManager(size)
        self.owners: dict[int, Owner] = {}
        self.past: list[list[int]] = []
        self.count = self.clock = 0
        self.slots: dict[int, list[int | None]] = {block: [None] * SIZE for block in range(size)}
        # block -> (salt, tokens before, tokens); as said to the manager, the first full one of its kind only
        self.said: dict[int, tuple[str | None, tuple[int, ...], tuple[int, ...]]] = {}
        self.freed: dict[int, int] = dict.fromkeys(range(size), 0)  # free block -> when it became free

    def start(self, tokens: list[int], salt: str | None, least: int) -> None:
        """Match, check what was matched, allocate, copy: as the scheduler does."""
        request = Owner(list(tokens), salt, 0)
        last, total = len(tokens) - 1, -(-len(tokens) // SIZE)
        match = self.blocks.match(
            request.keys(last // SIZE), lambda b: tokens[b * SIZE : min(b * SIZE + SIZE, last)], least
        )
        self.check_match(match, tokens[:last], salt, least)
        revived = sum(block in self.freed for block in match.blocks)
        fits = total - len(match.blocks) <= len(self.freed) - revived
        assert self.blocks.can_allocate(self.count, total, match) == fits
        if not fits and __debug__:
            with pytest.raises(AssertionError, match=f"owner {self.count} wants {total} blocks"):
                self.blocks.allocate(self.count, total, match)
        if not fits:
            return
        for block in match.blocks:
            self.freed.pop(block, None)
        held = list(self.slots[match.source]) if match.source is not None else []
        table = list(self.blocks.allocate(self.count, total, match))
        assert table[: len(match.blocks)] == match.blocks
        assert len(table) == total
        self.note_handed_out(table[len(match.blocks) :])
        if match.source is not None:
            self.slots[table[len(match.blocks)]] = held
        request.written = request.held = len(match.blocks) * SIZE + match.copied
        self.owners[self.count] = request
        self.count += 1

    def check_match(self, match: PrefixMatch, tokens: list[int], salt: str | None, least: int) -> None:
        """It is true, and it is the longest."""
        for index, block in enumerate(match.blocks):
            assert self.slots[block] == tokens[index * SIZE : (index + 1) * SIZE]
        histories = {(mine, before + own) for mine, before, own in self.said.values() if len(own) == SIZE}
        full = 0
        while (full + 1) * SIZE <= len(tokens) and (salt, tuple(tokens[: (full + 1) * SIZE])) in histories:
            full += 1
        assert len(match.blocks) == full
        parent, rest = (salt, tuple(tokens[: full * SIZE])), tokens[full * SIZE : (full + 1) * SIZE]
        longest = max(
            (common(own, rest) for mine, before, own in self.said.values() if (mine, before) == parent), default=0
        )
        assert match.copied == (longest if longest >= least else 0)
        assert (match.source is not None) == bool(match.copied)
        if match.source is not None:
            assert self.slots[match.source][: match.copied] == rest[: match.copied]

    def note_handed_out(self, handed: list[int]) -> None:
        """Blank ones go first, then those free for longest."""
        blank = [block for block in self.freed if block not in self.said]
        oldest = sorted((block for block in self.freed if block in self.said), key=self.freed.__getitem__)
        if len(handed) <= len(blank):
            assert set(handed) <= set(blank)
        else:
            assert set(handed[: len(blank)]) == set(blank)
            assert handed[len(blank) :] == oldest[: len(handed) - len(blank)]
        for block in handed:
            del self.freed[block]
            self.said.pop(block, None)
            self.slots[block] = [None] * SIZE

    @rule(tokens=prompts, salt=st.sampled_from([None, None, "a"]), least=st.integers(1, 2))
    def admit(self, tokens, salt, least):
        self.start(tokens, salt, least)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, data, more):
        """Another that begins like one that runs."""
        other = self.draw(data)
        self.start(other.tokens[: other.written] + more or other.tokens, other.salt, 1)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def come_back(self, data):
        self.start(data.draw(st.sampled_from(self.past)), None, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 7), generated=st.lists(st.integers(0, 1), max_size=2))
    def write(self, data, count, generated):
        """The next tokens run; they go to blocks that nobody else has."""
        number = self.number(data)
        request, table = self.owners[number], self.blocks.table(number)
        for position in range(request.written, min(request.written + count, len(request.tokens))):
            block = table[position // SIZE]
            assert not any(block in self.blocks.table(other) for other in self.owners if other != number)
            self.slots[block][position % SIZE] = request.tokens[position]
            request.written = position + 1
        if request.written == len(request.tokens):
            self.grow(number, generated)

    def grow(self, number: int, generated: list[int]) -> None:
        request, before = self.owners[number], list(self.blocks.table(number))
        total = -(-(len(request.tokens) + len(generated)) // SIZE)
        assert self.blocks.can_allocate(number, total) == (total - len(before) <= len(self.freed))
        if self.blocks.can_allocate(number, total):
            table = self.blocks.allocate(number, total)
            assert table[: len(before)] == before
            self.note_handed_out(table[len(before) :])
            request.tokens += generated

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), last=st.booleans())
    def register(self, data, last):
        """Say what the blocks hold: full ones, and the partly filled one too if it is the `last` call for now."""
        number = self.number(data)
        self.say(number, last)

    def say(self, number: int, last: bool) -> None:
        request, table = self.owners[number], self.blocks.table(number)
        full, keys = request.written // SIZE, request.keys(request.written // SIZE)
        for index in range(request.held // SIZE, full):
            own, before = (
                tuple(request.tokens[index * SIZE : (index + 1) * SIZE]),
                tuple(request.tokens[: index * SIZE]),
            )
            self.blocks.register(table[index], BlockContent(keys[index], own, keys[index + 1]))
            if (request.salt, before, own) not in self.said.values():
                self.said[table[index]] = request.salt, before, own
        if last and request.written % SIZE and request.written > request.held:
            own = tuple(request.tokens[full * SIZE : request.written])
            self.blocks.register(table[full], BlockContent(keys[full], own))
            self.said[table[full]] = request.salt, tuple(request.tokens[: full * SIZE]), own
        if last or request.written // SIZE > request.held // SIZE:
            request.held = request.written

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), holds=st.booleans())
    def leave(self, data, holds):
        """Preempted or finished, what it holds said or not."""
        number = self.number(data)
        if holds:
            self.say(number, last=True)
        request, table = self.owners.pop(number), list(self.blocks.table(number))
        self.past.append(request.tokens)
        self.blocks.free(number)
        assert self.blocks.table(number) == []
        for block in reversed(table):
            if not any(block in self.blocks.table(other) for other in self.owners):
                self.clock += 1
                self.freed[block] = self.clock

    @rule()
    def forget_free(self):
        self.blocks.forget_free()
        for block in self.freed:
            self.said.pop(block, None)

    def number(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.owners)))

    def draw(self, data) -> Owner:
        return self.owners[self.number(data)]

    @invariant()
    def the_manager_agrees_with_the_model(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        assert self.blocks.num_free == len(self.freed)
        assert self.blocks.num_free + self.blocks.num_used == self.size
        assert self.blocks.num_cached == sum(block in self.said for block in self.freed)
        tables = [self.blocks.table(number) for number in self.owners]
        for block in range(self.size):
            owners = sum(block in table for table in tables)
            assert self.blocks._references[block] == owners
            assert (block in self.freed) == (owners == 0)
            content = self.blocks.content(block)
            assert (content.tokens if content else None) == (self.said[block][2] if block in self.said else None)
            if content:
                assert self.slots[block][: len(content.tokens)] == list(content.tokens)
            if owners > 1:
                assert content
                assert content.key is not None


def common(left, right) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


FULL = settings().max_examples > 40
TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=500 if FULL else 40, stateful_step_count=50 if FULL else 30)


def held(blocks: BlockManager, owner: int, tokens: list[int], match: PrefixMatch | None = None) -> list[int]:
    """Give the owner blocks for these tokens and say that they hold them."""
    keys, total = extend([root(None)], tokens, SIZE), -(-len(tokens) // SIZE)
    table = blocks.allocate(owner, total, match)
    for index, block in enumerate(table):
        own = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        blocks.register(block, BlockContent(keys[index], own, keys[index + 1] if len(own) == SIZE else None))
    return list(table)


def found(blocks: BlockManager, tokens: list[int], least: int = 1) -> PrefixMatch:
    keys = extend([root(None)], tokens, SIZE)
    return blocks.match(keys, lambda block: tokens[block * SIZE : (block + 1) * SIZE], least)


def test_an_unknown_owner_has_an_empty_table_and_may_be_freed():
    blocks = BlockManager(3)
    assert blocks.table(7) == []
    blocks.free(7)
    blocks.check_integrity()
    assert blocks.num_free == 3


def test_freed_blocks_are_reused_from_the_tables_start():
    blocks = BlockManager(6)
    first = list(blocks.allocate(0, 3))
    blocks.free(0)
    assert blocks.allocate(1, 3) == first


def test_of_a_freed_request_the_last_blocks_are_overwritten_first():
    blocks = BlockManager(3)
    table = held(blocks, 0, list(range(9)))
    blocks.free(0)
    blocks.allocate(1, 1)
    assert found(blocks, list(range(9))).blocks == table[:2]


def test_a_hit_makes_a_block_the_most_recently_used():
    blocks = BlockManager(2)
    (old,) = held(blocks, 0, [1, 1, 1])
    blocks.free(0)
    (young,) = held(blocks, 1, [2, 2, 2])
    blocks.free(1)
    assert blocks.allocate(2, 1, found(blocks, [1, 1, 1])) == [old]
    blocks.free(2)
    assert blocks.allocate(3, 1) == [young]


def test_a_block_that_is_handed_out_is_no_longer_found():
    blocks = BlockManager(1)
    held(blocks, 0, [1, 2, 3])
    blocks.free(0)
    assert found(blocks, [1, 2, 3]).blocks == [0]
    blocks.allocate(1, 1)
    assert found(blocks, [1, 2, 3]) == PrefixMatch()


def test_of_two_blocks_that_hold_the_same_the_first_keeps_the_name_until_it_is_overwritten():
    blocks = BlockManager(2)
    first, second = held(blocks, 0, [1, 2, 3]), held(blocks, 1, [1, 2, 3])
    assert found(blocks, [1, 2, 3]).blocks == first
    assert blocks.content(second[0]) is None


def test_the_block_that_agrees_longest_is_copied_and_of_equals_the_newest():
    blocks = BlockManager(4)
    held(blocks, 0, [1, 2])
    (longest,) = held(blocks, 1, [1, 2, 3])
    held(blocks, 2, [1, 9, 9])
    assert found(blocks, [1, 2, 4]) == PrefixMatch([], longest, 2)
    (newest,) = held(blocks, 3, [1, 2, 5])
    assert found(blocks, [1, 2, 4]) == PrefixMatch([], newest, 2)


@pytest.mark.parametrize(("least", "copied"), [(1, 2), (2, 2), (3, 0)])
def test_a_copy_of_too_few_tokens_is_not_worth_it(least, copied):
    blocks = BlockManager(1)
    held(blocks, 0, [1, 2, 3])
    match = found(blocks, [1, 2, 4], least)
    assert (match.source, match.copied) == (0 if copied else None, copied)


def test_blocks_to_be_revived_are_not_counted_as_room():
    blocks = BlockManager(4)
    held(blocks, 0, [0] * 6)
    blocks.free(0)
    match = found(blocks, [0] * 6)
    assert blocks.can_allocate(1, 4, match)
    assert not blocks.can_allocate(1, 5, match)
    blocks.allocate(2, 2)
    assert blocks.can_allocate(1, 2, match)
    assert not blocks.can_allocate(1, 3, match)


def test_what_owned_blocks_hold_is_not_forgotten_with_the_rest():
    blocks = BlockManager(4)
    held(blocks, 0, [1] * 3)
    held(blocks, 1, [2] * 3)
    blocks.free(1)
    assert blocks.num_cached == 1
    blocks.forget_free()
    assert blocks.num_cached == 0
    assert found(blocks, [1] * 3).blocks == [0]
    assert found(blocks, [2] * 3) == PrefixMatch()


CORRUPTIONS = [
    pytest.param("blocks.allocate(1, 2)[:] = list(blocks.table(0))", "references", id="two owners"),
    pytest.param("blocks.table(0).pop()", "references", id="lost"),
    pytest.param("blocks._free[0] = None", "4 blocks, but 3 are free and 2 are owned", id="free and owned"),
    pytest.param(
        "blocks.table(0)[:] = [0, 0]; blocks._references[:] = [2, 0, 0, 0]; blocks._free[1] = None",
        "a table names a block twice",
        id="twice in one table",
    ),
    pytest.param("blocks._block_of[b'x'] = 1", "a key leads to another block", id="wrong name"),
    pytest.param("blocks.allocate(1, 1, Match([1]))", "block 1 has 2 owners but may change", id="shared but not full"),
    pytest.param("blocks._children[b'x'] = {1: None}", "listed after its history", id="wrong history"),
]


@pytest.mark.parametrize(("corruption", "sentence"), CORRUPTIONS)
def test_integrity_notices_a_block(corruption, sentence):
    blocks = BlockManager(4)
    blocks.allocate(0, 2)
    blocks.check_integrity()
    exec(corruption, {"blocks": blocks, "Match": PrefixMatch})
    with pytest.raises(AssertionError, match=sentence):
        blocks.check_integrity()


def test_integrity_is_checked_without_asserts_too():
    program = """
from dcpjax.engine.blocks import BlockManager
blocks = BlockManager(4)
blocks.allocate(0, 2)
blocks._free[0] = None
try:
    blocks.check_integrity()
except AssertionError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "4 blocks, but 3 are free and 2 are owned\n"
