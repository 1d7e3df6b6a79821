import json
import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from batch_mock import MockEngine, run_command

import dcpjax.jobs.stop
from dcpjax.cli import batch
from dcpjax.cli.commands import main
from dcpjax.cli.flags import Parser, parse
from dcpjax.jobs.run import run_batch
from dcpjax.jobs.stop import StopOnSignal

MOCK = Path(__file__).parents[1] / "batch_mock.py"
WINDOW = 8


def lines(folder: Path, count: int) -> list[str]:
    made = [json.dumps({"prompt": f"line {number}", "id": number}) for number in range(1, count + 1)]
    (folder / "in").write_text("\n".join(made))
    return ["in", "-o", "out"]


def run(folder: Path, plan: dict, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MOCK), json.dumps(plan), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, **options)


def check_stopped(ended: subprocess.CompletedProcess[str], code: int, flags: str) -> None:
    """It ended by a signal, and says how to go on."""
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1] == f"dcpjax: stopped. to go on: dcpjax batch --resume in -o out {flags}"


def done(folder: Path) -> list[int]:
    """Lines that have a record; every record is whole."""
    data = (folder / "out").read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [int(json.loads(line)["custom_id"]) for line in data.splitlines()]


def death(source: random.Random) -> dict:
    """A moment to be killed at: between steps, or with part of a record written."""
    if source.random() < 0.5:
        return {"kill_at_step": source.randint(1, 12)}
    return {"kill_at_write": source.randint(0, 15), "bytes_written": source.choice([0, 1, 17, 60, 200, 10**6])}


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_job_loses_doubles_and_tears_nothing(tmp_path, kills):
    source, killed, count = random.Random(kills), 0, 12 * kills
    arguments = [*lines(tmp_path, count), "--resume", "--max-in-flight", str(WINDOW)]
    while killed < kills:
        plan = {"seed": killed, "diary": "diary", **death(source)}
        before = whole_lines(tmp_path)
        ended = run(tmp_path, plan, *arguments)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        killed += 1
        assert whole_lines(tmp_path)[: len(before)] == before
    assert killed > kills // 2
    ended = run(tmp_path, {"seed": 1, "diary": "diary"}, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert sorted(done(tmp_path)) == list(range(1, count + 1))
    computed = Counter((tmp_path / "diary").read_text().split())
    assert len(computed) == count
    assert computed.total() - count <= WINDOW * killed


def whole_lines(folder: Path) -> list[bytes]:
    if not (folder / "out").exists():
        return []
    return [line for line in (folder / "out").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_running_requests_finish_and_tells_how_to_go_on(tmp_path, number, code, times):
    count, source, finished = 200 * times, random.Random(number), list[int]()
    arguments = [*lines(tmp_path, count), "--max-in-flight", str(WINDOW)]
    for _ in range(times):
        plan = {"signal": number, "signal_at_step": source.randint(1, 12), "diary": "diary"}
        ended = run(tmp_path, plan, *arguments, *(["--resume"] if finished else []))
        check_stopped(ended, code, f"--max-in-flight {WINDOW}")
        assert "stopping: requests that run may finish within 3 s; once more to stop at once" in ended.stderr
        before, finished = finished, done(tmp_path)
        assert finished[: len(before)] == before
        assert sorted(map(str, finished)) == sorted((tmp_path / "diary").read_text().split())
        assert len(before) + WINDOW <= len(finished) < count
    assert run(tmp_path, {}, *arguments, "--resume").returncode == 0
    assert sorted(done(tmp_path)) == list(range(1, count + 1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_the_process_at_once(tmp_path, number, code):
    plan = {"signal": number, "signal_at_step": 4, "again_at_step": 5, "stuck_at_step": 4}
    ended = run(tmp_path, plan, *lines(tmp_path, 30), "--grace-seconds", "1000")
    check_stopped(ended, code, "--grace-seconds 1000")
    assert len(done(tmp_path)) < 30


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_compilation_does_not_hold_up_the_end(tmp_path, number, code):
    plan = {"signal": number, "signal_at_step": 4, "compiles": True}
    ended = run(tmp_path, plan, *lines(tmp_path, 30), "--grace-seconds", "0.1")
    check_stopped(ended, code, "--grace-seconds 0.1")
    assert len(done(tmp_path)) < 30


def test_without_grace_running_requests_are_dropped(tmp_path):
    plan = {"signal": signal.SIGTERM, "signal_at_step": 4, "stuck_at_step": 4}
    ended = run(tmp_path, plan, *lines(tmp_path, 30), "--grace-seconds", "0", "--status-file", "status.json")
    assert ended.returncode == 143, ended.stderr
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


def test_a_signal_before_the_model_is_open_ends_the_process_at_once():
    codes = []
    stop = StopOnSignal(advice="to go on: this", leave=codes.append)
    stop._handle(signal.SIGTERM)
    assert codes == [143]
    assert not stop.requested()
    stop._handle(signal.SIGINT)
    assert (codes, stop.requested(), stop.exit_code) == ([143], True, 130)
    stop._handle(signal.SIGINT)
    assert codes == [143, 130]


def test_what_comes_after_a_stopped_job_does_not_hold_up_the_end_either():
    """As JAX may, which waits at the end of a process for the step that runs."""
    codes = queue.SimpleQueue[int]()
    with StopOnSignal(advice="", leave=codes.put) as stop:
        stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.requested():
            time.sleep(0.01)
    assert codes.get(timeout=60) == 143


def test_signals_are_given_back_when_the_job_is_over():
    before = [signal.getsignal(number) for number in dcpjax.jobs.stop.SIGNALS]
    with StopOnSignal(advice=""):
        assert [signal.getsignal(number) for number in dcpjax.jobs.stop.SIGNALS] != before
    assert [signal.getsignal(number) for number in dcpjax.jobs.stop.SIGNALS] == before


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("/dev/full", "No space left on device; free some space and go on with --resume"),
        ("in", "must not be the input too, but is; use another output"),
        ("linked", "must not be the input too, but is; use another output"),
        ("none/out", "No such file or directory; use another output"),
        ("folder", "Is a directory; use another output"),
        ("thesis", "must hold records of dcpjax batch only, but line 1 is none; use another output, or --overwrite"),
    ],
)
def test_trouble_with_the_output_is_one_sentence_and_exit_code_3(tmp_path, monkeypatch, capfd, output, sentence):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, 3)
    before = (tmp_path / "in").read_bytes()
    os.link("in", "linked")
    os.mkdir("folder")
    Path("thesis").write_text("all about batches\n")
    given = [] if output == "/dev/full" else ["--resume"]
    assert run_command(["in", "-o", output, *given], MockEngine()) == 3
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("dcpjax: error: ")]
    assert len(printed) == 1
    assert sentence in printed[0]
    assert (tmp_path / "in").read_bytes() == before


def test_an_output_that_cannot_be_opened_for_writing_is_exit_code_3(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments, real = lines(tmp_path, 3), os.open

    def read_only(path, flags, *more):
        if str(path).endswith("/out"):
            raise OSError(30, os.strerror(30))
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    assert run_command(arguments, MockEngine()) == 3
    assert (
        "must be a file that can be written, but is not: Read-only file system; use another" in capfd.readouterr().err
    )


MISTAKES = [
    ([], "batch must have one input, but has none; use dcpjax batch in.jsonl -o out.jsonl --model M"),
    (["in", "in2", "-o", "out"], "batch must have one input, but has more: in, in2; use dcpjax batch"),
    (["in"], "--output must name the file for the results, but is not given; use --output out.jsonl"),
    (["none", "-o", "out"], "INPUT must be a readable file, but none is not: No such file or directory"),
    ([".", "-o", "out"], "INPUT must be a file of lines, but . is a folder; name a file in it"),
    (
        ["wide", "-o", "out"],
        "the input must be UTF-8, but wide begins as UTF-16 does; use iconv -f UTF-16 -t UTF-8 wide",
    ),
    (["in", "-o", "old"], "add --resume to go on or --overwrite to start afresh"),
    (["in", "-o", "out", "--resume", "--overwrite"], "--resume must not come with --overwrite, .*; remove one"),
    (["in", "-o", "out", "--retry-errors"], "--retry-errors must come with --resume, but stands alone; add --resume"),
    (["in", "-o", "out", "--fsync", "often"], "--fsync must be one of always, interval, never, but is 'often'"),
    (["in", "-o", "out", "--max-in-flight", "0"], "--max-in-flight must be an integer of at least 1, but is 0; use 1"),
    (
        ["in", "-o", "out", "--max-line-bytes", "-1"],
        "--max-line-bytes must be an integer of at least 2, but is -1; use 2",
    ),
    (
        ["in", "-o", "out", "--grace-seconds", "-1"],
        "--grace-seconds must be a number of seconds, at least 0, but is -1",
    ),
    (["in", "-o", "out", "--max-in-flight", "x"], "--max-in-flight must be an integer, but is 'x'"),
    (["in", "-o", "out", "--resum"], "unknown flag --resum; did you mean --resume?"),
    (["in", "-o", "out", "--status-file", "in"], "--status-file must be a file of its own, but in is the input or the"),
    (["in", "-o", "out", "--status-file", "none/s"], "--status-file must be a file that can be written, but .*none/s"),
    (["in", "-o", "/dev/null", "--ordered"], "--ordered must come with a regular file, but /dev/null is none"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_a_mistake_is_refused_in_one_line_that_names_the_flag(tmp_path, monkeypatch, capfd, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, 3)
    Path("wide").write_text("{}\n", encoding="utf-16")
    Path("old").write_text("precious\n")
    with pytest.raises(ValueError, match=sentence) as caught:
        run_command(arguments, MockEngine())
    assert "\n" not in str(caught.value)
    assert "`" not in str(caught.value)
    assert len(capfd.readouterr().err.splitlines()) <= 6
    assert Path("old").read_text() == "precious\n"


def test_the_model_must_be_named():
    parser = Parser(prog="dcpjax batch", usage="", description="")
    batch.add_flags(parser)
    with pytest.raises(ValueError, match="--model must name a model"):
        batch.run(parse(parser, ["in", "-o", "out"]))


def test_errors_in_records_fail_the_command_only_when_asked(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text('{"prompt": "a"}\n[]\n')
    assert run_command(["in", "-o", "out"], MockEngine()) == 0
    printed = capfd.readouterr().err
    assert "errors        1\n              line 2: a line must be a JSON object, but is an empty list\n" in printed
    assert run_command(["-i", "in", "-o", "out", "--resume", "--fail-on-errors"], MockEngine()) == 1
    Path("in2").write_text('{"prompt": "a"}\n')
    assert run_command(["in2", "-o", "out2", "--fail-on-errors"], MockEngine()) == 0


def test_flags_of_sampling_hold_where_a_line_does_not_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text('{"prompt": "a"}\n{"prompt": "a", "top_k": 1, "max_tokens": 2}\n')
    engine = MockEngine()
    flags = ["--top-k", "5", "--max-tokens", "7", "--served-model-name", "mine"]
    assert run_command(["in", "-o", "out", *flags], engine) == 0
    assert [(r.body.sampling.top_k, r.body.sampling.max_tokens) for r in engine.submitted] == [(5, 7), (1, 2)]
    assert len({r.body.sampling.seed for r in engine.submitted}) == 2
    assert {json.loads(line)["response"]["body"]["model"] for line in Path("out").read_text().splitlines()} == {"mine"}


def test_standard_input_is_an_input(tmp_path):
    lines(tmp_path, 5)
    ended = run(tmp_path, {}, "-", "-o", "out", "--ordered", input=(tmp_path / "in").read_text())
    assert ended.returncode == 0, ended.stderr
    assert done(tmp_path) == [1, 2, 3, 4, 5]
    assert "lines         5 of 5 done" in ended.stderr


def test_another_run_into_the_same_output_is_kept_out(tmp_path):
    arguments = lines(tmp_path, 5)
    with subprocess.Popen(
        [sys.executable, str(MOCK), "{}", "-", "-o", "out"], cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as first:
        assert first.stdin
        first.stdin.write(b'{"prompt": "a", "id": 1}\n')
        first.stdin.flush()
        while not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size:
            assert first.poll() is None
        second = run(tmp_path, {}, *arguments, "--resume")
        first.stdin.close()
    assert (first.returncode, second.returncode) == (0, 3)
    assert "must be written by one run at a time, but another one writes it" in second.stderr


def test_help_names_every_flag_and_imports_nothing_heavy(tmp_path):
    program = (
        "import sys\nfrom dcpjax.cli import batch\nfrom dcpjax.cli.flags import Parser\n"
        "parser = Parser(prog='dcpjax batch', usage='', description='')\nbatch.add_flags(parser)\n"
        "print(parser.format_help())\nprint({'jax', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert shown.stdout.splitlines()[-1] == "set()", shown.stderr
    for name in ("--resume", "--overwrite", "--retry-errors", "--ordered", "--fsync", "--status-file", "--top-k"):
        assert name in shown.stdout


def test_what_python_is_told_is_checked_before_the_model_is_opened(tmp_path):
    (tmp_path / "in").write_text("{}\n")
    for options, message in (
        ({"ordred": True}, "unknown option 'ordred'; did you mean ordered?"),
        ({"max_in_flight": 0}, "`max_in_flight` must be an integer of at least 1"),
        ({"temperature": -1}, "temperature must be in"),
        ({"block_size": 0}, "block_size must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run_batch(tmp_path / "in", tmp_path / "out", "none", **options)
    assert not (tmp_path / "out").exists()


def test_the_shards_of_a_job_are_merged_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, 5)
    for index in (1, 2):
        assert run_command(["in", "-o", f"part{index}", "--shard", f"{index}/2", "--quiet"], MockEngine()) == 0
    assert main(["batch", "merge", "out", "part1", "part2", "--input", "in"]) == 0
    assert capsys.readouterr().err == "dcpjax: out holds 5 records of 2 parts\n"
    assert done(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["out"], 2, "batch merge must name an output and its parts, but names 1 files"),
        (["out", "in", "--model", "m"], 2, "batch merge must come without --model, which is of the job itself"),
        (["out", "in"], 3, "must hold records of dcpjax batch only, but line 1 is none"),
    ],
)
def test_a_merge_that_cannot_be_says_why(arguments, code, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, 2)
    assert main(["batch", "merge", *arguments]) == code
    assert sentence in capsys.readouterr().err
