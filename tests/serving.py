"""A server with a tiny model in a thread of the tests' process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from openai import OpenAI

from dcpjax.llm import LLM
from dcpjax.server.options import ServeOptions
from dcpjax.server.serve import Server, address, bind
from dcpjax.server.service import Service

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**21,
    "block_size": 16,
    "max_model_len": 200,
    "max_num_seqs": 16,
    "scheduling_policy": "priority",
    "seed": 0,
}


@dataclass
class Served:
    """A running server."""

    service: Service
    server: Server
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def raw(self, data: bytes) -> socket.socket:
        """A connection that has sent these bytes."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        made.sendall(data)
        return made


@contextmanager
def served(llm: LLM, **options: Any) -> Iterator[Served]:
    options = {"port": 0, "served_model_name": ["tiny", "small"], "max_queue": 200, **options}
    service = Service(llm, ServeOptions(**options), model="model")
    listening, started = bind(service.options), threading.Event()
    url = address(service.options, listening)
    server = Server(service, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    assert started.wait(30)
    try:
        yield Served(service, server, url)
    finally:
        server.should_exit = True
        thread.join(30)
        service.close()
        assert service.engine.join(30)
        assert not thread.is_alive()
