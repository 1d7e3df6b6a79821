"""API keys: every request must carry one, whatever the spelling of its path, except to a few that show no secret."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from dcpjax.server.errors import RequestError

OPEN_PATHS = ("/", "/health", "/ping", "/version", "/metrics")


class KeyCheck:
    """An ASGI application in front of another. Nothing of the request's body is read before the key is right."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._digests = app, [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (_is_open(scope) or self._has_key(scope)):
            await _refusal().response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        right = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: in constant time
        return kind.lower() == b"bearer" and any(right)


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing about theirs."""
    return sha256(key).digest()


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")


def _refusal() -> RequestError:
    return RequestError(
        401,
        "the request must carry an API key of this server as 'Authorization: Bearer KEY', but does not",
        "invalid_api_key",
        {"WWW-Authenticate": "Bearer"},
    )
