"""What the paths of one server share: the model, its engine's thread, and who may come in."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dcpjax.llm import LLM
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.submissions import own_defaults
from dcpjax.server.engine_thread import EngineThread, Running
from dcpjax.server.errors import RequestError, shutting_down
from dcpjax.server.metrics import Metrics
from dcpjax.server.options import ServeOptions

Result = TypeVar("Result")
WORKERS = 4  # threads that tokenise and write large answers
RETRY_SECONDS = 1


class Service:
    """One model that is served. Everything except the work of `in_thread` happens in the event loop."""

    def __init__(self, llm: LLM, options: ServeOptions, *, model: str) -> None:
        """`model` is what the model is called if no `served_model_name` is given."""
        self.llm, self.options = llm, options
        parsers = {"tool_call_parser": options.tool_call_parser, "reasoning_parser": options.reasoning_parser}
        self.formats = MessageFormats.of(llm.tokenizer, **parsers)
        self.names = list(options.served_model_name or [model])
        self.created = int(time.time())
        self.defaults = own_defaults(llm)
        self.metrics = Metrics(self.names[0], lambda: self.engine.stats)
        self.engine = EngineThread(llm, self.metrics.observe)
        self.most_completions = llm.engine_config.max_num_seqs + options.max_queue
        self.is_stopping = False
        self._completions = 0  # of requests that have come in and not left
        self._running: set[Running] = set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="dcpjax-request")

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of what would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    def check_model(self, name: Any) -> None:
        """Raise RequestError for the name of another model. A request need not name one."""
        if name is not None and name not in self.names:
            listed = ", ".join(self.names)
            raise RequestError(404, f"model must be one of {listed}, but is {name!r}", "model_not_found")

    @contextlib.contextmanager
    def room_for(self, completions: int) -> Iterator[None]:
        """Take places for a request's completions. Raises RequestError if the server is full or shuts down."""
        if self.is_stopping:
            raise shutting_down()
        if completions > self.most_completions:
            raise RequestError(
                400,
                f"a request must ask for at most {self.most_completions:,} completions (--max-num-seqs plus "
                f"--max-queue), but asks for {completions:,}; use several requests",
                "too_many_completions",
            )
        if self._completions + completions > self.most_completions:
            message = f"the server must finish some of its {self._completions:,} completions first; ask again later"
            raise RequestError(429, message, "queue_full", {"Retry-After": str(RETRY_SECONDS)})
        self._completions += completions
        try:
            yield
        finally:
            self._completions -= completions

    @contextlib.contextmanager
    def run(self, running: Running) -> Iterator[Running]:
        """Run a request; whatever of it is left at the end is ended."""
        self._running.add(running)
        self.engine.submit(running)
        try:
            yield running
        finally:
            self._running.discard(running)
            self.engine.abort(running)

    async def finish(self) -> None:
        """Refuse new requests, let those that run go on for the grace period, then end them."""
        self.is_stopping = True
        end = time.monotonic() + self.options.grace_seconds
        while self._completions and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for running in self._running:
            running.events.put_nowait(None)

    def close(self) -> None:
        self.engine.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)
