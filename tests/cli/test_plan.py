import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcpjax.cli import plan as plan_command
from dcpjax.cli.commands import COMMANDS, Command, main
from dcpjax.planning.planner import plan

QWEN = str(Path(__file__).parents[1] / "goldens" / "qwen3")
FITTING = ["--tp", "8", "--dtype", "nvfp4", "--kv-cache-dtype", "fp8"]


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """The command, whether or not the program lists it."""
    command = Command("dcpjax plan MODEL [FLAGS]", "plan", plan_command.add_flags, plan_command.run)
    monkeypatch.setitem(COMMANDS, "plan", command)


def test_plan_prints_the_table_and_exits_0_where_it_fits(capsys):
    assert main(["plan", "kimi-k2", *FITTING, "--hardware", "b200"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{plan('kimi-k2', tensor_parallel_size=8, dtype='nvfp4', kv_cache_dtype='fp8')}\n"
    assert shown.err == ""


def test_plan_exits_2_where_it_does_not_fit_and_names_the_flag_that_helps(capsys):
    assert main(["plan", "kimi-k2", "--tensor-parallel-size", "8"]) == 2
    assert "use a smaller dtype or --tensor-parallel-size=16." in capsys.readouterr().out.replace("\n", " ")


def test_plan_exits_2_where_too_many_requests_are_asked_for(capsys):
    assert main(["plan", "kimi-k2", *FITTING, "--concurrency", "10"]) == 0
    assert main(["plan", "kimi-k2", *FITTING, "--concurrency", "100000"]) == 2
    assert "but must hold 100,000;" in capsys.readouterr().out.replace("\n", " ")


def test_json_is_one_object(capsys):
    assert main(["plan", QWEN, "--output-length", "16", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["model"], read["context_length"] + read["output_length"]) == (QWEN, 512)


@pytest.mark.parametrize("spelling", [["--tp", "8", "--dcp", "4"], ["-tp", "8", "-dcp", "4"]])
def test_layout_has_short_names(capsys, spelling):
    main(["plan", "kimi-k2", *spelling, "--json"])
    read = json.loads(capsys.readouterr().out)
    assert (read["tensor_parallel_size"], read["chosen_dcp"]) == (8, 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "plan must have one model, a preset such as kimi-k2"),
        (["kimi-k2", "kimi-k2.6"], "but has 'kimi-k2', 'kimi-k2.6'"),
        (["kimi-k2", "--tp", "eight"], "must be an integer, but is 'eight'"),
        (["kimi-k2", "--tp", "6"], "--tensor-parallel-size must divide the 64 heads"),
        (["kimi-k2", "--tp", "8", "--dcp", "3"], "--decode-context-parallel-size must suit --tensor-parallel-size=8"),
        (["kimi-k2", "--dtype", "int4"], "--dtype must be one of"),
        (["kimi-k2", "--hardwar", "b200"], "unknown flag --hardwar; did you mean --hardware?"),
        (["kimi-k2", "--hardware", "b2000"], "must be one of b200, h200"),
    ],
)
def test_mistakes_exit_2_with_a_sentence(capsys, arguments, sentence):
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.out == ""


def test_help_lists_every_option(capsys):
    assert main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "--hardware",
        "--context-length",
        "--unique-token-fraction",
        "--workspace-bytes",
        "--dcp-comm-backend",
    ):
        assert name in shown


def test_options_are_refused_before_jax_is_imported():
    program = """
import sys
from dcpjax.cli import plan
from dcpjax.cli.flags import Flags
try:
    plan.run(Flags(positionals=["kimi-k2"], given={"concurrency": 0}))
except ValueError as error:
    print(error, sorted({"jax", "numpy"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout == "concurrency must be an integer of at least 1, but is 0; use 1 or more []\n", run.stderr
