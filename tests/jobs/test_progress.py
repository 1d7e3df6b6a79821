import io
import json
import os
from pathlib import Path

import pytest

from dcpjax.api.progress import CLEAR_LINE
from dcpjax.jobs.progress import LINE_SECONDS, LOG_SECONDS, Progress, clock_time, live_line, summary_table
from dcpjax.jobs.statistics import JobStatistics
from dcpjax.jobs.status_file import StatusFile


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def statistics_of(**numbers) -> JobStatistics:
    clock = Clock()
    statistics = JobStatistics(clock=clock, **numbers)
    statistics.start()
    clock.now += 10
    return statistics


def test_the_live_line_says_how_far_how_fast_and_how_long_still():
    statistics = statistics_of(
        total=1200, resumed=200, written=250, running=8, new_errors=1, prompt_tokens=5000, new_tokens=12345
    )
    statistics.engine = {"cache_usage": 0.42}
    assert live_line(statistics) == (
        "450/1,200 (38%) lines | 8 running | 1 error | 500 prompt + 1,234 new tokens/s | cache 42% | 0:30 left"
    )


def test_the_live_line_of_a_pipe_knows_no_total():
    assert live_line(statistics_of(written=3)) == "3 lines | 0 running | 0 errors | 0 prompt + 0 new tokens/s"


def test_the_table_names_the_first_errors():
    statistics = statistics_of(total=9, resumed=2, blank=1, prompt_tokens=40, cached_tokens=30, new_tokens=20)
    statistics.state = "finished"
    for line in range(4, 9):
        statistics.written += 1
        statistics.add_error(line, "it\n broke" + "x" * 300)
    table = summary_table(statistics, "out.jsonl")
    assert table.splitlines()[:3] == [
        "state         finished",
        "lines         7 of 9 done, 2 by an earlier run, 1 blank",
        "errors        5",
    ]
    assert table.count("it broke") == 3
    assert max(map(len, table.splitlines())) < 230
    assert "prompt tokens 40, 30 of them cached\nnew tokens    20 in 0:10, 2.0 tokens/s\n" in table


def test_a_terminal_is_drawn_on_now_and_then_and_cleared_at_the_end():
    stream, clock = Terminal(), Clock()
    progress = Progress(statistics_of(written=1), stream=stream, clock=clock)
    for now in (100.0, 100.0 + LINE_SECONDS / 2, 100.0 + LINE_SECONDS):
        clock.now = now
        progress.update()
    assert stream.getvalue().count(f"{CLEAR_LINE}1 lines") == 2
    progress.finish("out")
    assert f"{CLEAR_LINE}state " in stream.getvalue()


def test_what_is_no_terminal_sees_the_table_only():
    stream = io.StringIO()
    progress = Progress(statistics_of(), stream=stream, clock=Clock())
    progress.update()
    assert stream.getvalue() == ""
    progress.finish("out")
    assert stream.getvalue().startswith("state ")


def test_a_job_that_never_began_has_no_table():
    stream = io.StringIO()
    Progress(JobStatistics(), stream=stream).finish("out")
    assert stream.getvalue() == ""


def test_json_logs_are_one_object_a_line():
    stream, clock = Terminal(), Clock()
    progress = Progress(statistics_of(total=3), json_logs=True, stream=stream, clock=clock)
    clock.now += LOG_SECONDS
    progress.update()
    progress.update()
    progress.report_error(3, "invalid_json", "no\nJSON")
    progress.finish("out")
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["progress", "error", "running"]
    assert events[1]["line"] == 3
    assert (events[2]["total"], events[2]["output"]) == (3, "out")


def test_a_stream_that_is_gone_stops_nothing():
    stream = Terminal()
    stream.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Terminal, "isatty", lambda self: True)
        progress = Progress(statistics_of(), stream=stream, clock=Clock())
        progress.update()
        progress.finish("out")


def test_the_status_file_is_whole_at_every_moment(tmp_path):
    path, replaced = tmp_path / "status.json", os.replace
    seen = []

    def replace(source, target):
        seen.append(json.loads(Path(source).read_text())["state"])
        replaced(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        progress = Progress(
            statistics_of(total=4, written=2), status_file=StatusFile(path, {"input": "in"}), shown=False
        )
        progress.update()
        progress.finish("out")
    assert seen == ["loading", "running", "running"]
    assert os.listdir(tmp_path) == ["status.json"]
    status = json.loads(path.read_text())
    assert (status["input"], status["done"], status["pid"]) == ("in", 2, os.getpid())


def test_a_status_file_that_cannot_be_written_is_refused_at_the_start_and_let_go_later(tmp_path):
    with pytest.raises(ValueError, match=r"`status_file` must be a file that can be written, but .* is not: No such"):
        StatusFile(tmp_path / "none" / "status.json", {})
    (tmp_path / "some").mkdir()
    status = StatusFile(tmp_path / "some" / "status.json", {})
    (tmp_path / "some").rename(tmp_path / "other")
    status.write({"state": "running"})


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0:00"), (61, "1:01"), (7200, "2:00:00"), (93904, "26:05:04")])
def test_time_reads_as_a_clock(seconds, expected):
    assert clock_time(seconds) == expected
