import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.jobs import lines as line_reading
from dcpjax.jobs.lines import LineReader


def reader(path, data: bytes, max_line_bytes: int = 1000) -> LineReader:
    path.write_bytes(data)
    return LineReader(os.open(path, os.O_RDONLY), name="in.jsonl", max_line_bytes=max_line_bytes)


def every(lines: LineReader) -> list:
    return list(iter(lines.read, None))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\xef\xbb\xbfa\nb", [b"a", b"b"]),
        (b"\n\na\n", [b"", b"", b"a"]),
        (b"a\rb\n", [b"a\rb"]),
        (b"a\xe2\x80\xa8b\x0bc\x85\n", [b"a\xe2\x80\xa8b\x0bc\x85"]),
    ],
)
def test_lines_end_at_line_feeds_only(tmp_path, data, expected):
    assert [line.data for line in every(reader(tmp_path / "in", data))] == expected


@given(
    parts=st.lists(st.binary(max_size=12), max_size=12),
    chunk=st.integers(1, 9),
    cap=st.integers(1, 6),
)
def test_lines_do_not_depend_on_the_size_of_reads(tmp_path_factory, parts, chunk, cap):
    data = b"x" + b"\n".join(parts)  # no UTF-16
    path = tmp_path_factory.getbasetemp() / "any"
    expected = every(reader(path, data, cap))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_reading, "CHUNK", chunk)
        assert every(reader(path, data, cap)) == expected
    raw = data.split(b"\n")
    raw = raw if raw[-1] else raw[:-1]
    assert [line.size for line in expected] == [len(part) for part in raw]
    assert [line.data is None for line in expected] == [len(part) > cap for part in raw]
    assert [line.number for line in expected] == list(range(1, len(raw) + 1))


def test_equal_lines_have_equal_fingerprints_and_others_do_not(tmp_path):
    long, other = b"y" * 3000, b"y" * 2999 + b"z"
    found = [line.fingerprint for line in every(reader(tmp_path / "in", b"\n".join([b"a", long, other, b"a", long])))]
    assert found[0] == found[3]
    assert found[1] == found[4]
    assert len(set(found)) == 3


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_with_the_command_that_converts_it(tmp_path, encoding):
    with pytest.raises(ValueError, match=r"begins as UTF-16 does; use iconv -f UTF-16 -t UTF-8 in.jsonl"):
        reader(tmp_path / "in", f"\ufeff{'{}'}\n".encode(encoding)).read()


def test_a_line_over_the_cap_is_never_held(tmp_path):
    lines = reader(tmp_path / "in", b"x" * 20_000_000 + b"\n{}", 1000)
    tracemalloc.start()
    found = every(lines)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.size for line in found] == [20_000_000, 2]
    assert peak < 3 * line_reading.CHUNK


def test_a_pipe_without_a_line_yet_is_not_waited_for():
    reading, writing = os.pipe()
    lines = LineReader(reading, name="-", max_line_bytes=100)
    os.write(writing, b"one\ntw")
    first, second = lines.read(wait_seconds=0), lines.read(wait_seconds=0)
    assert first is not None
    assert (first.data, second, lines.ended) == (b"one", None, False)
    os.write(writing, b"o")
    os.close(writing)
    last = lines.read(wait_seconds=0)
    assert last is not None
    assert (last.data, lines.read(), lines.ended) == (b"two", None, True)
    os.close(reading)
