import pytest

from dcpjax.jobs.shard import Shard


def test_every_line_is_in_one_share():
    shards = [Shard.of(f"{index}/3") for index in (1, 2, 3)]
    for line in range(1, 20):
        assert [shard.index for shard in shards if shard.has(line)] == [shards[0].owner(line)]


def test_without_a_shard_all_lines_are_taken():
    assert all(Shard.of(None).has(line) for line in range(1, 9))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("3", "`shard` must be I/N, as in 1/4, but is '3'"),
        ("-1/4", "`shard` must be I/N, as in 1/4, but is '-1/4'"),
        ("0/4", "`shard` must be I/N with I from 1 to N, but is 0/4; use 1/4"),
        ("5/4", "`shard` must be I/N with I from 1 to N, but is 5/4; use 4/4"),
        ("1/0", "`shard` must be I/N with I from 1 to N, but is 1/0; use 1/1"),
    ],
)
def test_a_share_that_cannot_be_is_refused_with_a_legal_one(text, sentence):
    with pytest.raises(ValueError) as refused:
        Shard.of(text)
    assert str(refused.value) == sentence
