import errno
import json
import os
import stat

import pytest

from dcpjax.jobs import output_file
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputError, OutputFile, open_output
from dcpjax.jobs.record import encode_record, error_record

SOURCE = os.open(os.devnull, os.O_RDONLY)


def record(line: int, *, error: bool = True, text: str = "text") -> bytes:
    made = error_record(line, f"{line:016x}", None, message=text)
    return encode_record(made if error else {**made, "error": None})


def opened(path, **options):
    return open_output(path, BatchOptions(**options), source=SOURCE)


def fill(path, *records: bytes, **options) -> None:
    file, _ = opened(path, **options)
    for one in records:
        file.append(one)
    file.close()


def lines_of(file: OutputFile) -> list[int]:
    return [summary.line for summary, _ in file.records()]


def test_records_are_on_disk_as_soon_as_they_are_appended(tmp_path):
    file, answered = opened(tmp_path / "out")
    file.append(record(1))
    assert (tmp_path / "out").read_bytes() == record(1)
    assert answered.count == 0
    file.close()


def test_a_second_run_is_kept_out_while_the_first_one_writes(tmp_path):
    file, _ = opened(tmp_path / "out")
    with pytest.raises(OutputError, match="written by one run at a time, but another one writes it"):
        opened(tmp_path / "out", resume=True)
    file.close()
    opened(tmp_path / "out", resume=True)[0].close()


def test_an_output_that_holds_something_must_be_resumed_or_overwritten(tmp_path):
    fill(tmp_path / "out", record(1))
    with pytest.raises(ValueError, match=r"holds \d+ bytes; add `resume` to go on or `overwrite` to start afresh"):
        opened(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == record(1)


def test_an_empty_output_is_as_good_as_none(tmp_path):
    (tmp_path / "out").touch()
    fill(tmp_path / "out", record(1))
    assert (tmp_path / "out").read_bytes() == record(1)


def test_what_is_overwritten_stays_until_it_is_thrown_away(tmp_path):
    fill(tmp_path / "out", record(1), record(2))
    file, answered = opened(tmp_path / "out", overwrite=True)
    assert (answered.count, lines_of(file)) == (0, [1, 2])
    file.empty()
    file.append(record(3))
    assert lines_of(file) == [3]
    file.close()


@pytest.mark.parametrize("cut", range(1, len(record(2)), 7))
def test_a_torn_tail_is_cut_off(tmp_path, cut):
    (tmp_path / "out").write_bytes(record(1) + record(2)[:cut])
    file, answered = opened(tmp_path / "out", resume=True)
    assert (answered.count, answered.last_line) == (1, 1)
    file.append(record(2))
    assert lines_of(file) == [1, 2]
    file.close()


def test_zeros_that_a_power_failure_left_are_cut_off(tmp_path):
    (tmp_path / "out").write_bytes(record(1) + bytes(4096))
    file, _ = opened(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == record(1)
    file.close()


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", b'{"id": "x"}\n', record(1) + b"\n" + record(2)])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(OutputError, match=r"must hold records of dcpjax batch only, but line \d is none"):
        opened(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == content


def test_two_records_of_one_line_are_refused(tmp_path):
    (tmp_path / "out").write_bytes(record(1) + record(1))
    with pytest.raises(ValueError, match="must answer each line once, but answers line 1 twice"):
        opened(tmp_path / "out", resume=True)


def test_errors_that_are_to_be_retried_are_taken_out(tmp_path):
    fill(tmp_path / "out", record(3, error=False), record(1), record(2, error=False))
    os.chmod(tmp_path / "out", 0o640)
    file, answered = opened(tmp_path / "out", resume=True, retry_errors=True)
    assert (lines_of(file), answered.count, answered.errors) == ([3, 2], 2, 0)
    file.append(record(1))
    assert lines_of(file) == [3, 2, 1]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640
    with pytest.raises(OutputError, match="another one writes it"):  # the lock has moved along
        opened(tmp_path / "out", resume=True)
    file.close()
    assert os.listdir(tmp_path) == ["out"]


def test_records_are_ordered_in_place_of_the_file_a_link_points_to(tmp_path):
    os.symlink(tmp_path / "out", tmp_path / "link")
    fill(tmp_path / "link", *(record(line, text="x" * line) for line in (3, 10, 2, 1)))
    file, _ = opened(tmp_path / "link", resume=True)
    file.sort_by_line()
    file.append(record(11))
    assert lines_of(file) == [1, 2, 3, 10, 11]
    assert os.path.islink(tmp_path / "link")
    file.close()


def test_the_input_is_never_the_output(tmp_path):
    (tmp_path / "in").write_text("{}\n")
    os.link(tmp_path / "in", tmp_path / "hard")
    os.symlink(tmp_path / "in", tmp_path / "soft")
    with open(tmp_path / "in") as source:
        for name in ("in", "hard", "soft"):
            with pytest.raises(OutputError, match="must not be the input too, but is; use another output"):
                open_output(tmp_path / name, BatchOptions(overwrite=True), source=source.fileno())
    assert (tmp_path / "in").read_text() == "{}\n"


def test_a_full_disk_is_one_sentence():
    file, _ = opened("/dev/full")
    with pytest.raises(OutputError, match=r"^/dev/full must be .*: No space left on device; free some space"):
        file.append(record(1))
    file.close()


def test_a_disk_that_fills_up_in_the_middle_of_a_record_leaves_whole_ones(tmp_path, monkeypatch):
    file, _ = opened(tmp_path / "out")
    file.append(record(1))
    room, write = [40, 0], os.write

    def fill(handle, data):
        left = room.pop(0)
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:left])

    monkeypatch.setattr(output_file.os, "write", fill)
    with pytest.raises(OutputError, match="No space left on device"):
        file.append(record(2))
    assert (tmp_path / "out").read_bytes() == record(1)
    file.close()


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(output_file.os, "write", lambda handle, data: write(handle, data[:7]))
    fill(tmp_path / "out", record(1), record(2))
    assert (tmp_path / "out").read_bytes() == record(1) + record(2)


@pytest.mark.parametrize("name", ["resume", "ordered"])
def test_what_needs_a_file_is_refused_for_a_device(name):
    with pytest.raises(ValueError, match=f"`{name}` must come with a regular file, but /dev/null is none"):
        opened(os.devnull, **{name: True})


def test_a_folder_and_a_missing_folder_are_one_sentence(tmp_path):
    with pytest.raises(OutputError, match="Is a directory; use another output"):
        opened(tmp_path)
    with pytest.raises(OutputError, match="No such file or directory; use another output"):
        opened(tmp_path / "none" / "out")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("fsync", "expected"), [("always", [1, 2, 3, 3]), ("interval", [0, 0, 1, 2]), ("never", [0, 0, 0, 0])]
)
def test_records_are_forced_to_the_disk_as_often_as_asked(tmp_path, monkeypatch, fsync, expected):
    synced, counts, clock = [], [], Clock()
    monkeypatch.setattr(output_file.os, "fsync", synced.append)
    handle = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    file = OutputFile(handle, "out", fsync=fsync, is_regular=True, clock=clock)
    for line, now in enumerate((0.0, 0.5, output_file.SYNC_SECONDS), start=1):
        clock.now = now
        file.append(record(line))
        counts.append(len(synced))
    clock.now += output_file.SYNC_SECONDS
    file._unsynced = fsync == "interval"
    file.sync_when_due()
    assert [*counts, len(synced)] == expected
    file.close()


class Failing:
    """`os`, whose calls that change something fail from one of them on; a write first takes a part."""

    def __init__(self, fail_at: int) -> None:
        self.calls, self.fail_at = 0, fail_at

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "ftruncate", "replace", "fchmod", "pread", "unlink"):
            return real

        def call(*arguments):
            self.calls += 1
            if self.calls < self.fail_at:
                return real(*arguments)
            if name == "write" and self.calls == self.fail_at:
                return real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return call


def session(path) -> None:
    """Everything a run does to its output: recover, retry, append, order."""
    file, _ = opened(path, resume=True, retry_errors=True, fsync="always")
    try:
        present = set(lines_of(file))
        for line in (5, 1, 4, 2, 3):
            if line not in present:
                file.append(record(line, error=False))
        file.sync()
        file.sort_by_line()
    finally:
        file.close()


def test_whichever_call_fails_the_next_run_goes_on(tmp_path, monkeypatch):
    path, failures = tmp_path / "out", 0
    while True:
        failures += 1
        path.write_bytes(record(5, error=False) + record(4) + record(3, error=False)[:40])
        failing = Failing(failures)
        monkeypatch.setattr(output_file, "os", failing)
        try:
            session(path)
            completed = True
        except OutputError:
            completed = False
        monkeypatch.setattr(output_file, "os", os)
        kept = [json.loads(line)["id"] for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        assert len(set(kept)) == len(kept)
        assert any(name.startswith("batch_req_5_") for name in kept)  # what was done stays done
        session(path)
        assert path.read_bytes() == b"".join(record(line, error=False) for line in range(1, 6))
        assert os.listdir(tmp_path) in (["out"], ["out.rewriting", "out"], ["out", "out.rewriting"])
        if completed and failing.calls < failures:
            break
    assert failures > 20
