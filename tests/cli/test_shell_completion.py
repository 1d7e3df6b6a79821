import json
import shutil
import subprocess
import sys

import pytest

from dcpjax.cli.commands import COMMANDS, main, parsers

SHELLS = ("bash", "zsh", "fish")
HARNESS = """
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_dcpjax
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(capsys):
    def printed(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def bash(script, tmp_path):
    """What bash offers after these words, the last of which is being typed."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not here")
    text = script("bash")

    def offered(*words):
        done = subprocess.run(
            ["bash", "-c", text + HARNESS, "bash", "dcpjax", *words],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_bash_offers_commands_first(bash):
    assert bash("") == [*COMMANDS, "--help", "--version"]
    assert bash("ge") == ["generate"]
    assert bash("--v") == ["--version"]


def test_bash_offers_the_flags_of_the_command_alone(bash):
    assert bash("batch", "--max-in") == ["--max-in-flight"]
    assert bash("generate", "--max-in") == []
    assert bash("chat", "hello", "--no-st") == ["--no-stats"]


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_offers_every_flag(bash, command):
    assert set(bash(command, "--")) == {name for name in parsers()[command].flags if name.startswith("--")}


def test_bash_offers_the_values_of_a_flag_and_nothing_where_it_cannot_know(bash):
    assert bash("generate", "--dtype", "") == ["auto", "float32", "bfloat16"]
    assert bash("plan", "--dtype", "b") == ["bfloat16", "bf16"]
    assert bash("batch", "--fsync", "=", "al") == ["always"]
    assert bash("batch", "--fsync", "=") == ["always", "interval", "never"]
    assert bash("generate", "--top-k", "") == []
    assert bash("inspect", "kimi") == ["kimi-k2", "kimi-k2.6"]
    assert bash("completion", "z") == ["zsh"]


def test_bash_offers_files_where_files_may_stand(bash, tmp_path):
    for name in ("in.jsonl", "run.yaml", "deepseek-mine"):
        (tmp_path / name).touch()
    assert bash("batch", "in") == ["in.jsonl"]
    assert bash("batch", "-o", "in") == ["in.jsonl"]
    assert bash("generate", "--config", "run") == ["run.yaml"]
    assert bash("generate", "--model", "deepseek-m") == ["deepseek-mine"]
    assert bash("generate", "in") == []


def test_bash_is_told_which_function_completes(script):
    registered = subprocess.run(
        ["bash", "-c", script("bash") + "complete -p dcpjax"], capture_output=True, text=True, check=True
    )
    assert registered.stdout == "complete -F _dcpjax dcpjax\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_stands_in_every_script(script, shell):
    text = script(shell)
    for command, parser in parsers().items():
        assert command in text
        for flag in (name for name in parser.flags if name.startswith("--")):
            assert (f"-l {flag[2:]} " if shell == "fish" else flag) in text


def test_zsh_knows_the_file_by_its_first_line_and_each_quote_is_closed(script):
    text = script("zsh")
    assert text.startswith("#compdef dcpjax\n_dcpjax() {\n")
    assert all(line.count("'") % 2 == 0 for line in text.splitlines())
    flags = ("--dtype", "--kv-cache-dtype", "--dcp-exchange-dtype")
    cases = "|".join(f"'generate {flag}'" for flag in flags)
    assert f"{cases}) compadd -- auto float32 bfloat16; return ;;" in text


def test_fish_has_a_line_for_each_flag_and_each_quote_is_closed(script):
    lines = script("fish").splitlines()
    assert "complete -c dcpjax -n __fish_use_subcommand -a env -d " in "\n".join(lines)
    inside = "complete -c dcpjax -n '__fish_seen_subcommand_from plan'"
    assert any(line.startswith(f"{inside} -l tensor-parallel-size -o tp -l tp -x -d '") for line in lines)
    assert any(line.startswith(f"{inside} -l dcp-comm-backend -x -a 'ag_rs a2a psum' -d '") for line in lines)
    assert all(line.count("'") % 2 == 0 and line[:1] in "c#" for line in lines)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_finds_no_fault(script, tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    (tmp_path / "script").write_text(script(shell))
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


MISTAKES = [
    ([], "completion must have one of bash, zsh, fish, but has none; use bash"),
    (["tcsh"], "completion must have one of bash, zsh, fish, but has tcsh; use bash"),
    (["bash", "zsh"], "completion must have one of bash, zsh, fish, but has bash zsh; use bash"),
    (["bash", "--shell"], "unknown flag --shell; did you mean --help?"),
]


@pytest.mark.parametrize("python", [[], ["-O"]])
def test_another_shell_is_refused_with_the_known_ones(python):
    code = f"from dcpjax.cli import main; print([main(['completion', *words]) for words in {[m[0] for m in MISTAKES]}])"
    done = subprocess.run([sys.executable, *python, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2] * len(MISTAKES)
    assert done.stderr.splitlines() == [f"dcpjax: error: {sentence}" for _, sentence in MISTAKES]
