"""Errors of requests, as responses and as events of a stream. Their bodies are those of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dcpjax.openai.response import error_body

CODES = {404: "not_found", 405: "method_not_allowed"}


class RequestError(Exception):
    """A request that is answered with an error; `code` is for programs."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(str(self), code=self.code, status=self.status)

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def bad_request(message: str) -> RequestError:
    return RequestError(400, message, "invalid_request")


def shutting_down() -> RequestError:
    return RequestError(503, "the server is shutting down; ask again later", "shutting_down", {"Retry-After": "10"})


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: a lone surrogate, which an error may quote from a request, has no UTF-8."""
    return Response(encoded(body), status, headers, "application/json")


def encoded(body: Any) -> bytes:
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


async def answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = {
        404: "the path must be one of the server's, but is none; see /openapi.json",
        405: f"the method must be {(error.headers or {}).get('Allow', 'another')} here, but is {request.method}",
    }.get(status, error.detail)
    return RequestError(status, message, CODES.get(status, "invalid_request"), error.headers).response


async def answer_failure(request: Request, error: Exception) -> Response:
    """An error of the server's own. Its traceback is logged; what it says may be about other requests."""
    return RequestError(500, "the server failed to answer; its log says why", "server_error").response
