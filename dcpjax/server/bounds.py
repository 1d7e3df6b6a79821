"""Bounds on headers and bodies in bytes, and on the time that a client takes to send a body."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcpjax.server.errors import RequestError

DRAIN_SECONDS = 10.0  # how long the rest of a body is read and dropped after its refusal


class RequestBounds:
    """An ASGI application in front of another, which it gives whole bodies."""

    def __init__(self, app: ASGIApp, *, max_header_bytes: int, max_body_bytes: int, seconds: float) -> None:
        self._app, self._max_header_bytes, self._max_body_bytes = app, max_header_bytes, max_body_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            await _late(self._seconds).response(scope, receive, send)
        except RequestError as error:
            await _refuse(error, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _with_body(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client goes away before it is whole."""
        _check("headers", _header_bytes(scope), self._max_header_bytes, 431)
        _check("a body", _announced(scope), self._max_body_bytes, 413)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            _check("a body", len(body), self._max_body_bytes, 413)
            more = message.get("more_body", False)
        return bytes(body)


def _check(what: str, size: int, most: int, status: int) -> None:
    if size > most:
        kind = what.split()[-1].removesuffix("s")
        raise RequestError(
            status,
            f"{what} must hold at most {most:,} bytes, but more were sent; send fewer, or raise the server's "
            f"--max-{kind}-bytes",
            f"{kind}_too_large",
            {"Connection": "close"},
        )


def _header_bytes(scope: Scope) -> int:
    line = len(scope["raw_path"]) + len(scope["query_string"])
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


def _announced(scope: Scope) -> int:
    """The size of the body by its header; 0 if that says nothing. The connection has checked that it is a number."""
    return max((int(value) for name, value in scope["headers"] if name == b"content-length"), default=0)


def _late(seconds: float) -> RequestError:
    message = f"a body must arrive within {seconds:g} s, but has not; send it faster"
    return RequestError(408, message, "body_timeout", {"Connection": "close", "x-should-retry": "false"})


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, and end the response when the client has stopped sending, for a while at most.

    Many clients read the answer only after they have sent all, and closing earlier would reset their connection.
    """

    async def held(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await error.response(scope, receive, held)
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while (message := await receive()).get("more_body", False):
                del message
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _with_body(body: bytes, receive: Receive) -> Receive:
    given = False

    async def with_body() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return with_body
