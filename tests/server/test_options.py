"""Options of a server are checked before a model is opened, and flags are made of them."""

import socket

import pytest

from dcpjax.cli import main, serve
from dcpjax.server.options import ServeOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 70_000}, "port must be at most 65535, but is 70000; use 65535"),
        ({"max_queue": -1}, "max_queue must be at least 0"),
        ({"max_body_bytes": 0}, "max_body_bytes must be an integer of at least 1"),
        ({"grace_seconds": -1.0}, "grace_seconds must be a number of seconds"),
        ({"api_key": [""]}, "api_key must hold non-empty strings"),
        ({"ssl_keyfile": "k"}, "ssl_keyfile must come with ssl_certfile"),
        ({"root_path": "llm/"}, "use '/llm'"),
        ({"prot": 1}, "did you mean port"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        ServeOptions.from_options(options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "1"], "serve must have one model"),
        (["a", "b"], "serve must have one model"),
        (["m", "--max-queue=-1"], "--max-queue must be at least 0"),
        (["m", "-tp", "3", "-dcp", "2"], "--decode-context-parallel-size"),
        (["m", "--hots", "x"], "did you mean --host"),
    ],
)
def test_a_wrong_flag_is_named_before_the_model_is_opened(capsys, arguments, words):
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve", "m"]) == 2
    assert "pip install 'dcpjax[serve]'" in capsys.readouterr().err


def test_a_port_in_use_is_found_before_the_model_is_opened(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "m", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port must be free on 127.0.0.1" in capsys.readouterr().err
