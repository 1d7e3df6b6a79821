import json
import os
import random
import tracemalloc

import pytest
from batch_mock import MockEngine
from hypothesis import given
from hypothesis import strategies as st

import dcpjax.jobs.job
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.jobs import lines as line_reading
from dcpjax.jobs.job import BatchDefaults
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputError
from dcpjax.jobs.run import BatchFiles, run_files
from dcpjax.jobs.statistics import JobStatistics

DEFAULTS = BatchDefaults(model="m", sampling={}, seed=0)


def run(
    folder, content: bytes | None = None, engine: MockEngine | None = None, *, stop=None, **options
) -> JobStatistics:
    """Run a job in a folder: in -> out."""
    if content is not None:
        (folder / "in").write_bytes(content)
    statistics, files = JobStatistics(), BatchFiles(input=folder / "in", output=folder / "out")
    mock = engine or MockEngine()
    stop = stop or (lambda: False)
    run_files(
        files, BatchOptions(**options), DEFAULTS, lambda: (mock, {}), statistics=statistics, shown=False, stop=stop
    )
    return statistics


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "out").read_bytes().splitlines()]


def numbers(folder) -> list[int]:
    return [int(record["id"].split("_")[2]) for record in records(folder)]


def lines(count: int, start: int = 1) -> bytes:
    return b"".join(b'{"prompt": "line %d", "id": %d}\n' % (n, n) for n in range(start, start + count))


def test_every_line_gives_one_record_and_the_bad_ones_hurt_nobody(tmp_path):
    content = b"\xef\xbb\xbf" + b"\r\n".join(
        [
            b'{"prompt": "one", "id": "a"}',
            b"",
            b"[1]",
            b"null",
            b'"x"',
            b"{}",
            b'{"custom_id": "d", "url": "/v1/completions", "body": []}',
            b'{"prompt": "fail", "id": "b"}',
            b'{"prompt": "refuse", "id": "c"}',
            b'{"prompt": "two", "id": "a"}',
            b'{"prompt": "a", "stream": true, "id": "e"}',
            b"   ",
            b'{"a": ' * 5000,
            b'{"prompt": "%s"}' % (b"x" * 6000),
            b'{"prompt": "last"}',
        ]
    )
    statistics = run(
        tmp_path, content.replace(b'{"a": ' * 5000, b'{"a":' * 900 + b"1"), ordered=True, max_line_bytes=5000
    )
    found = dict(zip(numbers(tmp_path), records(tmp_path), strict=True))
    assert list(found) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15]
    assert [number for number, record in found.items() if record["error"] is None] == [1, 15]
    assert (statistics.done, statistics.errors, statistics.blank, statistics.total) == (13, 11, 2, 13)
    codes = {number: record["error"]["code"] for number, record in found.items() if record["error"]}
    assert codes == {
        **dict.fromkeys([3, 4, 5, 13], "invalid_json"),
        **dict.fromkeys([6, 7, 9, 11], "invalid_request"),
        8: "engine_error",
        10: "duplicate_custom_id",
        14: "line_too_long",
    }
    assert found[10]["error"]["message"] == "custom_id must be used once, but 'a' is that of line 1 too; rename one"
    assert [found[number]["custom_id"] for number in (1, 7, 8, 9, 10)] == ["a", "d", "b", "c", "a"]


def test_a_line_nested_too_deep_is_an_error_record(tmp_path):
    run(tmp_path, b'{"a":' * 100_000 + b"\n" + lines(1))
    assert [bool(record["error"]) for record in records(tmp_path)] == [True, False]
    assert records(tmp_path)[0]["error"]["message"] == "a line must be JSON, but is nested too deep"


FRAGMENTS = [
    *(b'"prompt"', b'"messages"', b'"body"', b'"custom_id"', b'"url"', b'"\\ud800"', b'"\xed\xa0\x80"', b"\xff\xfe"),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 2000, b"{", b"}", b"\0", b"\xef\xbb\xbf", b"\r", b"\x85"),
    *(b"null", b"true", b"[]", b"{}", b'""', b'"stream": true, ', b'"n": 0, ', b'"echo": true, ', b"\\", b"\x7f"),
]
VALID = [
    b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", '
    b'"content": "hi"}], "temperature": 0.5, "logit_bias": {"1": 2}, "tools": [{"a": 1}], "metadata": {"k": "v"}}}',
    b'{"custom_id": "%d", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi", "stop": ["a"]}}',
    b'{"prompt": [1, 2, 3], "id": %d, "logprobs": null, "max_tokens": 4}',
    b'{"messages": [{"role": "user", "content": "hi"}], "id": "%d"}',
]


def mutated(line: bytes, source: random.Random) -> bytes:
    """A line with pieces cut out, doubled, or replaced by fragments that hurt."""
    for _ in range(source.randint(0, 4)):
        start = source.randrange(len(line) + 1)
        end = min(len(line), start + source.choice([0, 1, 5, 20]))
        piece = source.choice([b"", source.choice(FRAGMENTS), line[start:end] * 2, bytes([source.randrange(256)])])
        line = line[:start] + piece + line[end:]
    return line.replace(b"\n", b"")


@given(seed=st.integers(0, 2**32), count=st.integers(1, 100))
def test_mutated_lines_give_one_strict_record_each(tmp_path_factory, seed, count):
    source, folder = random.Random(seed), tmp_path_factory.mktemp("mutated")
    content = [b"{}", *(mutated(source.choice(VALID) % number, source) for number in range(count))]
    statistics = run(folder, b"\n".join(content))
    data = (folder / "out").read_bytes()
    assert data.endswith(b"\n")
    text = data.decode("utf-8", "strict")
    wanted = [number for number, line in enumerate(content, 1) if line.removeprefix(b"\xef\xbb\xbf").strip()]
    found = [json.loads(line, parse_constant=pytest.fail) for line in text.removesuffix("\n").split("\n")]
    assert sorted(int(record["id"].split("_")[2]) for record in found) == wanted
    assert all(letter <= "\ud7ff" or letter >= "\ue000" for record in found for letter in str(record))
    assert all((record["error"] is None) == (record["response"]["status_code"] == 200) for record in found)
    blank = len(content) - len(wanted) - (not content[-1])  # no line after the last line feed
    assert (statistics.done, statistics.blank) == (len(wanted), blank)


@pytest.mark.slow
def test_twenty_thousand_mutated_lines_give_one_record_each(tmp_path):
    source = random.Random(7)
    content = [b"{}", *(mutated(source.choice(VALID) % number, source) or b"x" for number in range(20_000))]
    statistics = run(tmp_path, b"\n".join(content), ordered=True)
    (tmp_path / "out").read_text(encoding="utf-8", errors="strict")
    assert numbers(tmp_path) == [n for n, line in enumerate(content, 1) if line.removeprefix(b"\xef\xbb\xbf").strip()]
    assert statistics.done + statistics.blank == len(content)


def test_the_window_bounds_what_is_read_ahead(tmp_path):
    engine = MockEngine()
    run(tmp_path, lines(100), engine, max_in_flight=7)
    assert engine.most == 7
    assert sorted(numbers(tmp_path)) == list(range(1, 101))


def test_long_lines_count_by_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(dcpjax.jobs.job, "MAX_BYTES_IN_FLIGHT", 3 * len(lines(1).strip()))
    engine = MockEngine()
    run(tmp_path, lines(9), engine)
    assert engine.most == 3
    assert len(records(tmp_path)) == 9


def peak_of(folder, count: int) -> int:
    with open(folder / "in", "wb") as file:
        for number in range(count):
            file.write(b'{"prompt": "%s", "id": "%d"}\n' % (b"x" * 50, number))
    engine = MockEngine()
    engine.submitted = type("Forgetful", (list,), {"append": lambda self, request: None})()
    tracemalloc.start()
    try:
        run(folder, None, engine, max_in_flight=32, overwrite=True, ordered=True, fsync="never")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("few", "many"), [(200, 1000), pytest.param(5000, 100_000, marks=pytest.mark.slow)], ids=str)
def test_memory_grows_by_less_than_three_hundred_bytes_a_line(tmp_path, monkeypatch, few, many):
    monkeypatch.setattr(line_reading, "CHUNK", 4096)
    assert peak_of(tmp_path, many) - peak_of(tmp_path, few) < 300 * (many - few)


def test_records_stand_in_the_order_they_finish_unless_asked_otherwise(tmp_path):
    run(tmp_path, lines(50))
    assert numbers(tmp_path) != sorted(numbers(tmp_path))
    run(tmp_path, None, resume=True, ordered=True)
    assert numbers(tmp_path) == list(range(1, 51))


def test_a_resumed_job_runs_what_is_missing_and_nothing_else(tmp_path):
    run(tmp_path, lines(20), ordered=True)
    whole = (tmp_path / "out").read_bytes()
    kept = whole.splitlines(keepends=True)[::2]
    (tmp_path / "out").write_bytes(b"".join(kept) + whole[:30])
    engine = MockEngine()
    statistics = run(tmp_path, None, engine, resume=True)
    assert sorted(request.line for request in engine.submitted) == list(range(2, 21, 2))
    assert (statistics.resumed, statistics.written, statistics.done, statistics.total) == (10, 10, 20, 20)
    assert sorted(numbers(tmp_path)) == list(range(1, 21))


def test_a_job_that_is_done_opens_no_engine(tmp_path):
    run(tmp_path, lines(3) + b"[]\n")

    def refuse():
        raise AssertionError("opened")

    files, statistics = BatchFiles(input=tmp_path / "in", output=tmp_path / "out"), JobStatistics()
    run_files(files, BatchOptions(resume=True), DEFAULTS, refuse, statistics=statistics, shown=False)
    assert (statistics.state, statistics.done, statistics.errors) == ("finished", 4, 1)


def test_errors_are_run_again_when_asked(tmp_path):
    run(tmp_path, lines(3) + b'{"prompt": "fail"}\n[]\n')
    engine = MockEngine()
    run(tmp_path, None, engine, resume=True)
    assert engine.submitted == []
    statistics = run(tmp_path, None, engine, resume=True, retry_errors=True)
    assert [request.line for request in engine.submitted] == [4]
    assert (statistics.resumed, statistics.written, statistics.errors) == (3, 2, 2)
    assert sorted(numbers(tmp_path)) == [1, 2, 3, 4, 5]


def test_a_duplicate_is_one_too_when_its_first_line_was_answered_before(tmp_path):
    run(tmp_path, b'{"prompt": "a", "id": "x"}\n')
    run(tmp_path, b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', resume=True)
    assert [record["error"] and record["error"]["code"] for record in records(tmp_path)] == [
        None,
        "duplicate_custom_id",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(1) + lines(2, 7), "`resume` must be given the input that the output answers, but line 2 has changed"),
        (lines(2), "that had 3 lines or more and this one has 2"),
        (b"", "that had 3 lines or more and this one has 0"),
    ],
)
def test_another_input_is_not_resumed(tmp_path, content, message):
    run(tmp_path, lines(3))
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(ValueError, match=message):
        run(tmp_path, content, resume=True)
    assert (tmp_path / "out").read_bytes() == before


def test_lines_may_be_added_to_an_input(tmp_path):
    run(tmp_path, lines(3).removesuffix(b"\n"))
    assert run(tmp_path, lines(5), resume=True).written == 2


def test_an_interrupted_job_gives_what_an_undisturbed_one_gives(tmp_path):
    sampled = {}
    for folder, stops in ((tmp_path / "a", 0), (tmp_path / "b", 9)):
        folder.mkdir()
        engine, asked = MockEngine(), iter(range(10**6))
        stop = lambda asked=asked, stops=stops: bool(stops) and next(asked) > stops  # noqa: E731
        run(folder, lines(30), engine, stop=stop, max_in_flight=4)
        again = MockEngine(3)
        run(folder, None, again, resume=True, ordered=True)
        sampled[folder.name] = {request.line: request.body.sampling for request in engine.submitted + again.submitted}
        assert bool(again.submitted) == bool(stops)
    assert sampled["a"] == sampled["b"]
    stripped = [[{**one, "response": {**one["response"], "body": None}} for one in records(tmp_path / x)] for x in "ab"]
    assert stripped[0] == stripped[1]


def test_a_job_that_is_asked_to_stop_finishes_what_runs(tmp_path):
    engine = MockEngine()
    statistics = run(tmp_path, lines(30), engine, stop=lambda: engine.steps > 2, max_in_flight=5)
    assert (statistics.state, engine.aborted) == ("stopped", 1)
    assert statistics.written == len(engine.submitted) < 30


def test_a_job_without_grace_drops_what_runs(tmp_path):
    engine = MockEngine()
    statistics = run(tmp_path, lines(30), engine, stop=lambda: engine.steps > 2, max_in_flight=5, grace_seconds=0)
    assert (statistics.state, engine.aborted) == ("stopped", 1)
    assert statistics.written < len(engine.submitted)
    assert run(tmp_path, None, resume=True).written == 30 - statistics.written


class Broken(MockEngine):
    def advance(self):
        if self.steps == 3:
            raise RuntimeError("the device is gone")
        return super().advance()


def test_an_engine_that_breaks_loses_nothing_that_was_done(tmp_path):
    engine = Broken()
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(tmp_path, lines(30), engine)
    assert engine.aborted == 1
    done = len(records(tmp_path))
    assert run(tmp_path, None, resume=True).written == 30 - done


def test_an_output_that_breaks_ends_the_job_at_once(tmp_path, monkeypatch):
    engine = MockEngine()

    def full(file, data):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match="No space left on device; free some space and go on with `resume`"):
        run(tmp_path, lines(30), engine)
    assert engine.aborted == 1


def test_a_model_that_does_not_open_leaves_an_overwritten_output_as_it_was(tmp_path):
    run(tmp_path, lines(3))
    before, files = (tmp_path / "out").read_bytes(), BatchFiles(input=tmp_path / "in", output=tmp_path / "out")

    def refuse():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        run_files(files, BatchOptions(overwrite=True), DEFAULTS, refuse, statistics=JobStatistics(), shown=False)
    assert (tmp_path / "out").read_bytes() == before


def test_what_the_model_asks_for_comes_after_the_users_and_the_lines_own(tmp_path):
    (tmp_path / "in").write_bytes(b'{"prompt": "a", "top_k": 1}')
    engine, files = MockEngine(), BatchFiles(input=tmp_path / "in", output=tmp_path / "out")
    defaults = BatchDefaults(model="m", sampling={"top_p": 0.5}, seed=0)
    own = {"top_k": 2, "top_p": 0.2, "temperature": 0.2}
    run_files(files, BatchOptions(), defaults, lambda: (engine, own), statistics=JobStatistics(), shown=False)
    sampling: SamplingParams = engine.submitted[0].body.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 0.5, 0.2)


def test_a_pipe_is_answered_while_it_is_still_open(tmp_path):
    reading, writing = os.pipe()
    engine, sent = MockEngine(), []

    def feed() -> bool:
        """The next line is sent once the last one has its record: a reader that waits for more would hang."""
        if len(sent) < 5 and len(records(tmp_path)) == len(sent):
            os.write(writing, lines(1, len(sent) + 1))
            sent.append(True)
            if len(sent) == 5:
                os.close(writing)
        return False

    files = BatchFiles(input=f"/dev/fd/{reading}", output=tmp_path / "out")
    (tmp_path / "out").touch()
    statistics = JobStatistics()
    run_files(files, BatchOptions(), DEFAULTS, lambda: (engine, {}), statistics=statistics, shown=False, stop=feed)
    os.close(reading)
    assert (numbers(tmp_path), statistics.state, statistics.total) == ([1, 2, 3, 4, 5], "finished", 5)
