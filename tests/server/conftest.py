"""One model and one server for all tests of a process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from serving import ENGINE, Served, served
from small_models import character_model

from dcpjax.llm import LLM


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def llm(model_path: Path) -> LLM:
    return LLM(model_path, progress=False, **ENGINE)


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as made:
        yield made


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as made:
        yield made
