import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcpjax.blocks import BlockManager


class Pool(RuleBasedStateMachine):
    """Any order of allocating and freeing, against a dictionary of the tables handed out."""

    owners = st.integers(0, 4)

    @initialize(size=st.integers(1, 12))
    def make(self, size):
        self.size, self.blocks = size, BlockManager(size)
        self.tables: dict[int, list[int]] = {}

    @rule(owner=owners, growth=st.integers(0, 6))
    def allocate(self, owner, growth):
        before = self.tables.get(owner, [])
        total = len(before) + growth
        fits = growth <= self.size - sum(map(len, self.tables.values()))
        assert self.blocks.can_allocate(owner, total) == fits
        if fits:
            table = list(self.blocks.allocate(owner, total))
            assert table[: len(before)] == before
            assert len(table) == total
            self.tables[owner] = table
        else:
            with pytest.raises(AssertionError, match=f"owner {owner} wants {total} blocks"):
                self.blocks.allocate(owner, total)

    @rule(owner=owners, total=st.integers(0, 3))
    def a_table_never_shrinks(self, owner, total):
        if total <= len(self.tables.get(owner, [])):
            assert self.blocks.can_allocate(owner, total)
            assert self.blocks.allocate(owner, total) == self.tables.get(owner, [])

    @rule(owner=owners)
    def free(self, owner):
        self.blocks.free(owner)
        self.tables.pop(owner, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_one_that_owns(self, data):
        self.free(data.draw(st.sampled_from(sorted(self.tables))))

    @invariant()
    def tables_counts_and_integrity_agree(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        used = [block for table in self.tables.values() for block in table]
        assert len(set(used)) == len(used)
        assert self.blocks.num_used == len(used)
        assert self.blocks.num_free == self.size - len(used)
        for owner in range(5):
            assert self.blocks.table(owner) == self.tables.get(owner, [])


TestPool = Pool.TestCase
TestPool.settings = settings(settings(), stateful_step_count=30)


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


CORRUPTIONS = [
    pytest.param("blocks.allocate(1, 2)[:] = list(blocks.table(0))", id="two owners"),
    pytest.param("blocks.table(0).pop()", id="lost"),
    pytest.param("blocks.table(0).append(9)", id="never existed"),
]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_integrity_notices_a_block(corruption):
    blocks = BlockManager(4)
    blocks.allocate(0, 2)
    exec(corruption, {"blocks": blocks})
    with pytest.raises(AssertionError, match="4 blocks, but"):
        blocks.check_integrity()


def test_integrity_is_checked_without_asserts_too():
    program = """
from dcpjax.blocks import BlockManager
blocks = BlockManager(4)
blocks.allocate(0, 2).pop()
try:
    blocks.check_integrity()
except AssertionError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "4 blocks, but 3 are accounted for, 3 of them distinct\n"
