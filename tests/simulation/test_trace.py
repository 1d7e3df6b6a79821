import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.simulation.trace import TraceRequest, ideal_hit_rate, read_trace, scaled, synthesise, unique_fraction

VOCAB = 512
UNITS = st.integers(2, 5)  # tokens of a hash id
LINE = {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}


def request(input_length: int, *hash_ids: int, unit: int = 512, **options) -> TraceRequest:
    values = {"timestamp": 0, "output_length": 1, "tokens_per_hash": unit} | options
    return TraceRequest(input_length=input_length, hash_ids=hash_ids, **values)


@st.composite
def traffic(draw: st.DrawFn, units: st.SearchStrategy[int] = UNITS) -> list[TraceRequest]:
    """Few ids, so that prompts often begin alike; lengths end anywhere in their last id's tokens."""
    unit = draw(units)
    ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
    return [request(unit * len(own) - draw(st.integers(0, unit - 1)), *own, unit=unit) for own in ids]


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def shared(one: list[int], other: list[int]) -> int:
    """How many first tokens two prompts have in common."""
    return next(
        (count for count, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


# Reading.


def test_a_trace_reads_in_its_order(tmp_path):
    later = {"timestamp": 27.5, "input_length": 512, "output_length": 1, "hash_ids": [9], "model": "ignored"}
    assert read_trace(write(tmp_path, LINE, "", later, "  ", "")) == [
        TraceRequest(timestamp=0, input_length=1030, output_length=7, hash_ids=(0, 1, 2)),
        TraceRequest(timestamp=27.5, input_length=512, output_length=1, hash_ids=(9,)),
    ]
    assert read_trace(write(tmp_path)) == []


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([json.dumps(LINE).encode()] * 2) + b"\r\n")
    assert len(read_trace(path)) == 2


def test_a_limit_reads_no_further(tmp_path):
    path = write(tmp_path, LINE, LINE, "broken")
    assert len(read_trace(path, limit=2)) == 2
    assert len(read_trace(str(path), limit=1)) == 1
    with pytest.raises(ValueError, match="line 3"):
        read_trace(path, limit=3)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(tmp_path, limit):
    with pytest.raises(ValueError, match=f"limit must be at least 1, but is {limit}"):
        read_trace(write(tmp_path, LINE), limit)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "a request must be one JSON object, but is not JSON"),
        ("[" * 100_000, "a request must be one JSON object, but is not JSON"),
        ("[1]", r"a request must be one JSON object, but is \[1\]"),
        ("null", "a request must be one JSON object, but is None"),
        ({"timestamp": 0}, "a request must have timestamp, .*, but has no input_length"),
        (LINE | {"timestamp": "0"}, "timestamp must be milliseconds, 0 or more, but is '0'"),
        (LINE | {"timestamp": -1}, "timestamp must be milliseconds, 0 or more, but is -1"),
        (LINE | {"timestamp": True}, "timestamp must be milliseconds, 0 or more, but is True"),
        (LINE | {"timestamp": float("nan")}, "timestamp must be milliseconds, 0 or more, but is nan"),
        (LINE | {"timestamp": float("inf")}, "timestamp must be milliseconds, 0 or more, but is inf"),
        (LINE | {"input_length": 0, "hash_ids": []}, "input_length must be at least 1, but is 0"),
        (LINE | {"input_length": 1030.0}, r"input_length must be an integer, but is 1030\.0"),
        (LINE | {"output_length": True}, "output_length must be an integer, but is True"),
        (LINE | {"hash_ids": 3}, "hash_ids must be a list of integers, but is 3"),
        (LINE | {"hash_ids": [0, 1, "2"]}, "a hash id must be an integer, but is '2'"),
        (LINE | {"hash_ids": [0, 1, -2]}, "a hash id must be at least 0, but is -2"),
        (LINE | {"hash_ids": [0, 1, 2**32]}, "a hash id must be at most 4294967295, but is 4294967296"),
        (LINE | {"hash_ids": [0, 1]}, "one id per 512 tokens, 3 for input_length=1030, but holds 2"),
        (LINE | {"hash_ids": [0, 1, 2, 3]}, "one id per 512 tokens, 3 for input_length=1030, but holds 4"),
    ],
)
def test_a_bad_line_is_a_sentence_with_its_number(tmp_path, line, sentence):
    with pytest.raises(ValueError, match=rf"trace\.jsonl, line 3: .*{sentence}"):
        read_trace(write(tmp_path, LINE, "", line))


def test_a_long_bad_value_is_not_repeated_whole(tmp_path):
    with pytest.raises(ValueError, match="input_length must be an integer") as caught:
        read_trace(write(tmp_path, LINE | {"input_length": "x" * 100_000}))
    assert len(str(caught.value)) < 300


def test_bytes_that_are_no_text_are_a_sentence(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"{\xff}\n")
    with pytest.raises(ValueError, match="line 1: a request must be one JSON object, but is not JSON"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ValueError, match="a trace must be a readable file of JSON lines, but is not"):
            read_trace(path)


# Scaling.


def test_scaling_divides_lengths_and_the_tokens_of_an_id():
    (small,) = scaled([request(1030, 4, 5, 6, output_length=100, timestamp=8)], 64)
    assert small == request(17, 4, 5, 6, unit=8, output_length=2, timestamp=8)


def test_no_length_is_scaled_below_one():
    assert scaled([request(1, 0)], 512) == [request(1, 0, unit=1)]


@given(traffic(st.sampled_from([4, 8, 12])), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_scaling_twice_is_scaling_once(requests, first, second):
    assert scaled(scaled(requests, first), second) == scaled(requests, first * second)


@given(st.integers(1, 200_000), st.integers(0, 9))
def test_every_length_keeps_its_ids_at_every_scale(length, power):
    ids = range(-(-length // 512))
    (small,) = scaled([request(length, *ids)], 2**power)
    assert small.hash_ids == tuple(ids)
    assert small.input_length == -(-length // 2**power)


@pytest.mark.parametrize(("factor", "nearest"), [(0, 1), (-4, 1), (3, 2), (500, 512), (1024, 512)])
def test_a_factor_that_does_not_divide_names_the_nearest_that_does(factor, nearest):
    with pytest.raises(ValueError, match=f"divide the 512 tokens of a hash id, but is {factor}; use {nearest}$"):
        scaled([request(512, 0)], factor)


# Made-up tokens.


@given(traffic(), st.integers(8, VOCAB))
def test_prompts_share_exactly_the_tokens_of_their_equal_first_ids(requests, vocab_size):
    prompts = [synthesise(one, vocab_size) for one in requests]
    for one, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == one.input_length
        assert all(0 <= token < vocab_size for token in prompt)
        for other, others in zip(requests, prompts, strict=True):
            ids = shared(list(one.hash_ids), list(other.hash_ids)) * one.tokens_per_hash
            assert shared(prompt, others) == min(ids, len(prompt), len(others))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2, unique=True), st.integers(2, 9), st.integers(32, 40))
def test_different_ids_differ_however_small_the_vocabulary(ids, vocab_size, unit):
    one, other = (synthesise(request(unit, hash_id, unit=unit), vocab_size) for hash_id in ids)
    assert one != other


@pytest.mark.parametrize(("vocab_size", "unit", "count"), [(2, 3, 8), (3, 2, 9), (64, 1, 64), (16, 2, 256)])
def test_ids_differ_even_where_they_use_up_all_that_can_be_told_apart(vocab_size, unit, count):
    prompts = {tuple(synthesise(request(unit, hash_id, unit=unit), vocab_size)) for hash_id in range(count)}
    assert len(prompts) == count
    with pytest.raises(ValueError, match=rf"but {vocab_size} \*\* {unit} does not exceed {count}; scale the trace by"):
        synthesise(request(unit, count, unit=unit), vocab_size)


def test_tokens_are_the_same_in_every_process():
    assert synthesise(request(6, 1000, unit=8), VOCAB) == [488, 1, 0, 0, 398, 342]


def test_the_tokens_of_an_id_spread_over_the_vocabulary():
    assert len(set(synthesise(request(512, 7), 49152))) > 450


def test_the_unit_may_be_repeated_but_not_contradicted():
    (small,) = scaled([request(1030, 4, 5, 6)], 64)
    assert synthesise(small, VOCAB, 8) == synthesise(small, VOCAB)
    with pytest.raises(ValueError, match="tokens_per_hash must be that of the request, 8, but is 512"):
        synthesise(small, VOCAB, 512)


def test_a_vocabulary_of_one_token_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 2, but is 1"):
        synthesise(request(1, 0), 1)


# What a cache could find.


@given(traffic(), st.integers(1, 7))
def test_the_ideal_hit_rate_equals_a_search_of_all_earlier_prompts(requests, block_size):
    prompts = [synthesise(one, VOCAB) for one in requests]
    hits = 0
    for number, prompt in enumerate(prompts):
        longest = max((shared(prompt, earlier) for earlier in prompts[:number]), default=0)
        hits += min(longest, len(prompt) - 1) // block_size * block_size
    total = sum(map(len, prompts))
    assert ideal_hit_rate(requests, block_size) == (hits / total if total else 0.0)
    assert unique_fraction(requests, block_size) == 1.0 - ideal_hit_rate(requests, block_size)


def test_a_repeated_prompt_is_found_but_for_its_last_token():
    twice = [request(1024, 0, 1)] * 2
    assert ideal_hit_rate(twice, 1) == 1023 / 2048
    assert ideal_hit_rate(twice, 512) == 512 / 2048
    assert unique_fraction(twice, 2048) == 1.0


def test_an_id_behind_another_beginning_is_not_found():
    assert ideal_hit_rate([request(1024, 0, 1), request(1024, 2, 1)], 1) == 0.0


def test_a_short_prompt_does_not_hide_a_longer_one_before_it():
    assert ideal_hit_rate([request(5, 0), request(2, 0), request(5, 0)], 1) == (1 + 4) / 12


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_of_no_tokens_is_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size must be at least 1, but is {block_size}"):
        unique_fraction([], block_size)
