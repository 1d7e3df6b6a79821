"""The command as a process: SIGTERM under load, and the port after a kill."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import ENGINE


def start(model: Path, port: int, *flags: str) -> subprocess.Popen[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    command = [sys.executable, "-m", "dcpjax", "serve", str(model), *options, f"--port={port}", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert process.stderr is not None
    said = ""
    while "serving" not in said:
        line = process.stderr.readline()
        assert line, f"the server ended: {said}"
        said += line
    return process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def streamed(port: int, lines: list[str], begun: threading.Event) -> None:
    body = {"prompt": "a", "max_tokens": 190, "ignore_eos": True, "stream": True, "n": 8}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            begun.set()


@pytest.mark.parametrize("grace", [0, 30])
def test_sigterm_ends_every_stream_and_the_process(model_path, grace):
    port, streams = free_port(), [list[str]() for _ in range(8)]
    process = start(model_path, port, f"--grace-seconds={grace}")
    try:
        begun = [threading.Event() for _ in streams]
        threads = [
            threading.Thread(target=streamed, args=(port, lines, event))
            for lines, event in zip(streams, begun, strict=True)
        ]
        for thread in threads:
            thread.start()
        assert begun[0].wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for thread in threads:
            thread.join(10)
    finally:
        process.kill()
        process.communicate()
    for lines in filter(None, streams):
        assert [line for line in lines if line][-1] == "data: [DONE]"
        last = json.loads([line for line in lines if line][-2].removeprefix("data: "))
        assert "error" in last or last["choices"][0]["finish_reason"] == "length"
        assert grace == 0 or "error" not in last


def test_after_a_kill_the_port_is_free(model_path):
    port = free_port()
    for _ in range(2):
        process = start(model_path, port)
        httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        process.kill()
        process.communicate()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the port is still taken")
