"""/v1/chat/completions and /v1/completions: a request body -> its answer, whole or as a stream of events.

A client that goes away ends its request before the engine's next step. So does the deadline.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from dcpjax.api.outputs import RequestOutput, StreamEvent
from dcpjax.openai.chunks import Chunks
from dcpjax.openai.json_text import read_object
from dcpjax.openai.request import Kind, RequestBody, read_body
from dcpjax.openai.response import response_body
from dcpjax.openai.submissions import submissions
from dcpjax.server.engine_thread import Running
from dcpjax.server.errors import RequestError, bad_request, encoded, shutting_down
from dcpjax.server.service import Service

SMALL_BODY = 65_536  # bytes that are read so fast that no thread is needed
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON_HEADERS = [(b"content-type", b"application/json")]


async def json_fields(request: Request, service: Service) -> Mapping[str, Any]:
    """The JSON object that is a request's body. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # others a web page may send to any server unasked
        raise RequestError(
            415, f"Content-Type must be application/json, but is {kind or 'missing'!r}", "unsupported_media_type"
        )
    data = await request.body()
    try:
        if len(data) <= SMALL_BODY:
            return read_object(data, "the body")
        return await service.in_thread(read_object, data, "the body")
    except ValueError as error:
        raise bad_request(str(error)) from None


class Answers:
    """An ASGI application that answers requests of one kind."""

    def __init__(self, service: Service, kind: Kind) -> None:
        self._service = service
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await json_fields(Request(scope, receive), self._service)
        self._service.check_model(fields.get("model"))
        try:
            body = read_body(self._kind, fields, defaults=self._service.defaults, place="here", may_stream=True)
        except ValueError as error:
            raise bad_request(str(error)) from None
        answer = _Answer(self._service, body, send, model=fields.get("model") or self._service.names[0])
        with self._service.room_for(len(body.prompts) * body.sampling.n):
            await _while_connected(receive, answer.give())


class _Answer:
    """One request and what is sent to its client."""

    def __init__(self, service: Service, body: RequestBody, send: Send, *, model: str) -> None:
        self._service, self._body, self._send = service, body, send
        self._names = {"name": uuid.uuid4().hex, "model": model, "created": int(time.time())}
        self._began = False  # whether the head of the response has been sent

    async def give(self) -> None:
        """Raises RequestError for what goes wrong before the response begins."""
        try:
            async with asyncio.timeout(self._service.options.request_timeout_seconds):
                await self._run()
        except TimeoutError:
            await self._fail(_late(self._service.options.request_timeout_seconds))
        except RequestError as error:
            await self._fail(error)

    async def _fail(self, error: RequestError) -> None:
        """The last events of a stream that has begun; otherwise the response is the error."""
        if not self._began:
            raise error
        await self._send_events([error.body], more=False)

    async def _run(self) -> None:
        made = await self._service.in_thread(self._submissions)
        with self._service.run(Running(made, streamed=self._body.stream)) as running:
            first = await _events(running)
            if self._body.stream:
                await self._stream(running, first)
            else:
                await self._whole(running)

    def _submissions(self) -> Any:
        try:
            return submissions(self._service.llm, 0, self._body, self._service.formats)
        except ValueError as error:
            raise bad_request(str(error)) from None

    async def _whole(self, running: Running) -> None:
        while running.unfinished > 0:
            await _events(running)
        data = await self._service.in_thread(self._encoded, [prompt.output for prompt in running.prompts])
        headers = [*JSON_HEADERS, (b"content-length", str(len(data)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})

    def _encoded(self, outputs: list[RequestOutput]) -> bytes:
        return encoded(response_body(self._body, outputs, formats=self._service.formats, **self._names))

    async def _stream(self, running: Running, events: list[tuple[int, StreamEvent]]) -> None:
        outputs = [prompt.output for prompt in running.prompts]
        chunks = Chunks(self._body, outputs, formats=self._service.formats, **self._names)
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        self._began = True
        while True:
            await self._send_events(chunk for place, event in events for chunk in chunks.of(place, event))
            if running.unfinished <= 0:
                break
            events = await _events(running)
        await self._send_events(chunks.last(), more=False)

    async def _send_events(self, bodies: Iterable[Mapping[str, Any]], *, more: bool = True) -> None:
        """Server-sent events; without `more` also the one that ends the stream."""
        data = b"".join(b"data: %s\n\n" % encoded(body) for body in bodies) + (b"" if more else b"data: [DONE]\n\n")
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _events(running: Running) -> list[tuple[int, StreamEvent]]:
    """The next events. Raises RequestError if a completion has failed or was ended."""
    events = await running.next()
    if events is None:
        raise shutting_down()
    for place, event in events:
        if event.finish_reason == "error":
            raise _failed(running, place, event)
        if event.finish_reason == "abort":
            raise RequestError(500, "the server had to end the request; its log says why", "engine_error")
    return events


def _failed(running: Running, place: int, event: StreamEvent) -> RequestError:
    """What never ran was refused, such as a prompt that can never fit the cache."""
    message = event.error or "the request failed"
    metrics = running.prompts[place].output.metrics
    if metrics is None or metrics.first_scheduled_time is None:
        return bad_request(message)
    return RequestError(500, message, "engine_error")


def _late(seconds: float | None) -> RequestError:
    message = f"the request must end within {seconds:g} s, but has not; ask for fewer tokens"
    return RequestError(504, message, "request_timeout", {"x-should-retry": "false"})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or cancel it when the client goes away."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done = tasks[0].done()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    if done:
        tasks[0].result()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
