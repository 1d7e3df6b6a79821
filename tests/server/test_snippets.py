"""docs/serve.md: what it tells people to run is run against a server, and what Open WebUI sends is answered."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from serving import Served, served

from dcpjax.api.sampling_params import SamplingParams

TEXT = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ASKING = FENCE.findall(TEXT.partition("## Asking")[2].partition("\n## ")[0])
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def documented(llm) -> Iterator[Served]:
    """A server with the keys and the name of the model that the document has."""
    with served(llm, served_model_name=["MODEL"], api_key=["first-key", "second-key"]) as made:
        made.service.defaults = {"temperature": 0}
        yield made


@pytest.fixture(scope="module")
def answer(llm) -> str:
    made = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)[0].outputs[0].text
    assert len(made) > 3
    return made


def snippet(word: str) -> str:
    (found,) = (text for _, text in ASKING if word in text)
    return found


def run(command: Sequence[str], snippet: str, server: Served) -> str:
    """What a snippet prints whose server is this one."""
    assert "http://127.0.0.1:8000" in snippet
    text = snippet.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([*command, text], capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_snippet_is_run_here_except_a_container():
    assert [kind for kind, _ in ASKING] == ["sh", "python", "python", "sh"]
    assert len({snippet(word) for word in ("curl ", "import OpenAI", "langchain_openai", "docker run")}) == 4


def test_the_openai_snippet_prints_the_answer(documented, answer):
    assert run([sys.executable, "-c"], snippet("import OpenAI"), documented) == answer


@pytest.mark.skipif(importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_the_langchain_snippet_prints_the_answer(documented, answer):
    assert run([sys.executable, "-c"], snippet("langchain_openai"), documented) == answer


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_snippet_prints_the_events_of_the_answer(documented, answer):
    lines = [line for line in run(["sh", "-c"], snippet("curl "), documented).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answer


def test_what_open_webui_asks_is_answered(documented, answer):
    """It lists models, streams chats with their usage, and has titles written in one piece."""
    command = snippet("docker run")
    variables = dict(re.findall(r"-e (\w+)=(\S+)", command))
    assert variables["OPENAI_API_BASE_URL"] == "http://127.0.0.1:8000/v1"
    headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}", "X-Title": "Open WebUI"}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    with documented.http() as http:
        http.headers.update(headers)
        (model,) = http.get("/v1/models").raise_for_status().json()["data"]
        chat = {"model": model["id"], "messages": parts, "stream": True, "stream_options": {"include_usage": True}}
        lines = [
            line for line in http.post("/v1/chat/completions", json=chat).raise_for_status().text.split("\n") if line
        ]
        *chunks, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answer
        assert usage["usage"]["completion_tokens"] > 0
        title = {"model": model["id"], "messages": HELLO, "stream": False, "max_completion_tokens": 100}
        title |= {"temperature": 0.0, "top_p": 0.9, "frequency_penalty": 0.0, "seed": 1, "stop": ["\x00"]}
        made = http.post("/v1/chat/completions", json=title).raise_for_status().json()
        assert answer.startswith(made["choices"][0]["message"]["content"])
