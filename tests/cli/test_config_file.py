import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcpjax.cli.commands import COMMANDS, main, parsers
from dcpjax.cli.config_file import OWN_FLAGS

HEAVY = {"jax", "jaxlib", "numpy", "transformers", "tokenizers"}


@pytest.fixture
def given(monkeypatch):
    """What the last command was given; no command runs."""
    found = {}

    def note(flags):
        found.clear()
        found.update(flags.given)
        return 0

    for name, command in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, name, command._replace(run=note))
    return found


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a file into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.yaml"):
        Path(name).write_text(text)
        return ["--config", name]

    return write


def refused(capsys, *arguments):
    """The one line that a refusal prints."""
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    return shown.err.removeprefix("dcpjax: error: ").rstrip()


FORMS = [
    ("run.yaml", "model: m\ntop-k: 5\nchat: true\nstop: [a, '-b']\ngenerate: {max_tokens: null, logit_bias: {7: -1}}"),
    (
        "run.yml",
        "model: m\ntop_k: 5\nchat: yes\nstop:\n- a\n- -b\ngenerate:\n  max-tokens: none\n  logit-bias: {7: -1}",
    ),
    (
        "run.json",
        json.dumps(
            {
                "model": "m",
                "top_k": 5,
                "chat": True,
                "stop": ["a", "-b"],
                "generate": {"max_tokens": None, "logit_bias": {"7": -1}},
            }
        ),
    ),
    (
        "run.toml",
        'model = "m"\ntop_k = 5\nchat = true\nstop = ["a", "-b"]\n[generate]\nmax_tokens = "none"\n'
        "logit_bias = {7 = -1}",
    ),
]


@pytest.mark.parametrize(("name", "text"), FORMS)
def test_yaml_json_and_toml_say_the_same(given, file, name, text):
    assert main(["generate", *file(text, name)]) == 0
    assert given.pop("config") == name
    assert given == {
        "model": "m",
        "top_k": 5,
        "chat": True,
        "stop": ["a", "-b"],
        "max_tokens": None,
        "logit_bias": {"7": -1},
    }


def test_the_command_line_wins_over_the_section_and_the_section_over_the_top(given, file):
    text = "top_k: 1\ntop_p: 0.1\nmin_p: 0.1\nstop: [a]\ngenerate: {top_k: 2, top_p: 0.2}\nchat: {top_k: 9}"
    main(["generate", *file(text), "--top-k", "3", "--stop", "b"])
    assert {name: given[name] for name in ("top_k", "top_p", "min_p", "stop")} == {
        "top_k": 3,
        "top_p": 0.2,
        "min_p": 0.1,
        "stop": ["b"],
    }


def test_false_switches_off_and_the_command_line_can_switch_on_again(given, file):
    off = file("stats: false\nenable_prefix_caching: false\nchat: false\ncompilation_cache: false")
    main(["generate", *off])
    assert (given["stats"], given["enable_prefix_caching"], given["compilation_cache"]) == (False, False, False)
    assert "chat" not in given
    main(["generate", *off, "--enable-prefix-caching"])
    assert given["enable_prefix_caching"]


def test_null_is_no_limit_where_there_is_one_and_nothing_elsewhere(given, file):
    main(["generate", *file("max_tokens:\nmax_model_len:\nstop:\nseed:\nstats:\nmodel:\nstop_token_ids: []")])
    assert given == {"config": "run.yaml", "max_tokens": None}


def test_lists_and_single_values_reach_flags_that_take_several(given, file):
    main(["bench", *file("layouts: ['8,1', '1,8']\nbatch_sizes: [1, 2]")])
    assert (given["layouts"], given["batch_sizes"]) == (["8,1", "1,8"], [1, 2])
    main(["bench", *file("layouts: 8,1\nbatch_sizes: 4")])
    assert (given["layouts"], given["batch_sizes"]) == (["8,1"], [4])
    main(["generate", *file("stop_token_ids: [1, 2]\nallowed_token_ids: 3,4\nprompt_file: p")])
    assert (given["stop_token_ids"], given["allowed_token_ids"], given["prompt_file"]) == ([1, 2], [3, 4], ["p"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_file_and_prints_what_it_made_of_it(capsys, file, command):
    assert main([command, *file("# nothing"), "--print-config"]) == 0
    assert capsys.readouterr().out.startswith(f"# dcpjax {command}\n")


def test_an_empty_file_says_nothing(given, file):
    assert main(["env", *file("")]) == 0
    assert given == {"config": "run.yaml"}


MISTAKES = [
    ("generate", "run.yaml", "max_toknes: 5", "run.yaml: unknown key 'max_toknes'; did you mean 'max_tokens'?"),
    (
        "batch",
        "run.yaml",
        "batch: {max_in_fligt: 5}",
        "run.yaml: unknown key 'max_in_fligt'; did you mean 'max_in_flight'?",
    ),
    ("generate", "run.yaml", "zzz: 5", "run.yaml: unknown key 'zzz'; see dcpjax generate --help"),
    (
        "generate",
        "run.yaml",
        "max_in_flight: 5",
        "run.yaml: 'max_in_flight' must be a flag of generate, but is one of batch; put it under batch:",
    ),
    ("generate", "run.yaml", "config: a.yaml", "run.yaml: unknown key 'config'; "),
    (
        "generate",
        "run.yaml",
        "top-k: 1\ntop_k: 2",
        "run.yaml: 'top_k' must be given once, but is also given as 'top-k'; remove",
    ),
    ("generate", "run.yaml", "top_k: few", "run.yaml: --top-k must be an integer, but is 'few'"),
    ("generate", "run.yaml", "top_k: [1, 2]", "run.yaml: --top-k must be one value, but is a list of 2; remove"),
    ("generate", "run.yaml", "top_k: true", "run.yaml: --top-k must be a text or a number, but is true; put it in"),
    ("generate", "run.yaml", "stop: [yes]", "run.yaml: --stop must be a text or a number, but is true; put it in"),
    ("generate", "run.yaml", "chat: maybe", "run.yaml: --chat must be true or false, but is 'maybe'; use true"),
    ("generate", "run.yaml", "logit_bias: 5", "run.yaml: --logit-bias must be a JSON object, but is '5'"),
    ("generate", "run.yaml", "model: m\ntop_p: 7", "run.yaml: --top-p must be in (0, 1], but is 7.0; use 1"),
    ("generate", "run.yaml", "model: m\ndtype: int4", "run.yaml: --dtype must be one of auto, float32, bfloat16"),
    ("plan", "run.yaml", "concurrency: 0", "run.yaml: --concurrency must be an integer of at least 1, but is 0"),
    ("batch", "run.yaml", "fsync: of\noutput: o", "run.yaml: --fsync must be one of always, interval, never"),
    ("bench", "run.yaml", "model: m\nsteps: 0", "run.yaml: --steps must be at least 1, but is 0; use 1"),
    ("generate", "run.yaml", "- a", "--config must hold names and values, but run.yaml holds a list"),
    ("generate", "run.yaml", "a: [", "--config must be valid yaml, but run.yaml is not: while parsing a flow"),
    ("generate", "run.json", "{", "--config must be valid json, but run.json is not: Expecting property name"),
    ("generate", "run.toml", "a", "--config must be valid toml, but run.toml is not: "),
    ("generate", "run.txt", "a", "--config must be a .yaml, .yml, .json, .toml file, but is run.txt; rename it"),
]


@pytest.mark.parametrize(("command", "name", "text", "sentence"), MISTAKES)
def test_a_mistake_in_a_file_names_the_file_and_what_is_legal(capsys, file, command, name, text, sentence):
    words = {"generate": ["a"], "plan": ["kimi-k2"], "batch": ["in", "--model", "m"]}.get(command, [])
    assert refused(capsys, command, *words, *file(text, name)).startswith(sentence)


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(capsys, file):
    sentence = refused(capsys, "generate", "a", "--model", "m", "--top-p", "7", *file("top_p: 0.5\ntop_k: 3"))
    assert sentence == "--top-p must be in (0, 1], but is 7.0; use 1"


def test_a_file_that_is_not_there_is_refused(capsys):
    assert refused(capsys, "env", "--config", "/none.yaml") == (
        "--config must be a readable file, but /none.yaml is not: No such file or directory"
    )


def test_without_pyyaml_the_other_forms_are_named(capsys, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert refused(capsys, "env", *file("a: 1")).endswith(
        "YAML needs PyYAML; pip install pyyaml, or use .json or .toml"
    )
    assert main(["env", "--print-config", *file('{"json": true}', "run.json")]) == 0


def printed(capsys, *arguments):
    assert main([*arguments, "--print-config"]) == 0
    return capsys.readouterr().out


def test_print_config_tells_value_and_source(capsys, file):
    lines = printed(capsys, "generate", *file("top_k: 5\nstop: ['\"']"), "--seed", "7").splitlines()
    assert "top_k: 5  # file" in lines
    assert 'stop: ["\\""]  # file' in lines
    assert "seed: 7  # command line" in lines
    assert "block_size: 256  # default" in lines
    assert "max_tokens: 256  # default" in lines
    assert "model: null  # default" in lines
    assert "# temperature: the model's own, else 0" in lines
    assert not any(name in line for line in lines[1:] for name in ("config:", "print_config"))


def test_print_config_asks_the_models_generation_config(capsys, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "repetition_penalty": 1.1}))
    for command in ("generate", "batch"):
        lines = printed(capsys, command, "--model", str(tmp_path), "--top-p", "0.5").splitlines()
        assert "temperature: 0.6  # model" in lines
        assert "repetition_penalty: 1.1  # model" in lines
        assert "top_p: 0.5  # command line" in lines
        assert any(line.startswith("# top_k: the model's own, else 0") for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_print_config_prints_reads_back_as_the_same_flags(capsys, given, file, command):
    """Every flag that has a value keeps it; those that had none still have none, or their default."""
    first = printed(capsys, command)
    second = printed(capsys, command, *file(first, "again.yaml"))
    assert [line.partition("  # ")[0] for line in first.splitlines()] == [
        line.partition("  # ")[0] for line in second.splitlines()
    ]


ODD = {
    "generate": [
        *("--logit-bias", '{"5": -1}', "--structured-outputs", '{"choice": ["a: b", "é"]}', "--stop", "# x"),
        *("--max-tokens", "none", "--compilation-cache", "/a b", "--no-detokenize", "--top-p", "1e-05", "-v"),
    ],
    "batch": ["-o", "o:ut", "--resume", "--fsync", "never", "--no-fail-on-errors", "--grace-seconds", "0"],
    "plan": ["--hardware", "memory=1GB,bandwidth=1TB/s", "--tp", "8", "--dcp", "2", "--json"],
    "bench": ["--layouts", "8,1", "1,8", "--batch-sizes", "1,2", "--batch-sizes", "4", "--dtype", "float32"],
}


@pytest.mark.parametrize("command", ODD)
def test_odd_values_survive_the_way_through_a_file(capsys, given, file, command):
    assert main([command, *ODD[command]]) == 0
    typed = dict(given)
    path = file(printed(capsys, command, *ODD[command]), "again.yaml")
    assert main([command, *path]) == 0
    assert {name: given[name] for name in typed} == typed


def test_files_and_print_config_need_nothing_heavy(file):
    file("temperature: 1\nbatch: {max_in_flight: 64}")
    code = (
        "import sys; from dcpjax.cli import main; main(['batch', '--config', 'run.yaml', '--print-config']);"
        f"print({HEAVY} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "max_in_flight: 64  # file" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_every_key_of_every_command_belongs_to_one_flag():
    for name, parser in parsers().items():
        dests = [action.dest for action in parser.actions]
        assert len(dests) == len(set(dests)), name
        assert set(OWN_FLAGS) <= set(dests)


def test_a_refusal_rests_on_no_assert(tmp_path):
    for number, (_, name, text, _) in enumerate(MISTAKES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(text)
    words = {"generate": ["a"], "plan": ["kimi-k2"], "batch": ["in", "--model", "m"]}
    commands = [
        [command, *words.get(command, []), "--config", f"{number}/{name}"]
        for number, (command, name, _, _) in enumerate(MISTAKES)
    ]
    code = f"from dcpjax.cli import main; print([main(command) for command in {commands}])"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [2] * len(MISTAKES)
    assert done.stderr.count("\n") == len(MISTAKES)
