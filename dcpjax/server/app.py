"""The paths of the server, and what stands in front of them."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dcpjax
from dcpjax.openai.token_bodies import detokenize, tokenize
from dcpjax.server.answers import Answers, json_fields
from dcpjax.server.auth import KeyCheck
from dcpjax.server.bounds import RequestBounds
from dcpjax.server.errors import (
    RequestError,
    answer_failure,
    answer_http_exception,
    answer_request_error,
    bad_request,
    json_response,
)
from dcpjax.server.openapi import description
from dcpjax.server.page import page_response
from dcpjax.server.root_path import RootPath
from dcpjax.server.service import Service


def make_app(service: Service) -> Starlette:
    """An ASGI application. The service's engine must run while it answers."""
    paths = _Paths(service)
    routes = [
        Route("/", paths.page, methods=["GET"]),
        Route("/v1/models", paths.models, methods=["GET"]),
        Route("/v1/models/{name:path}", paths.model, methods=["GET"]),
        Route("/v1/completions", Answers(service, "completion"), methods=["POST"]),
        Route("/v1/chat/completions", Answers(service, "chat"), methods=["POST"]),
        Route("/tokenize", paths.tokenize, methods=["POST"]),
        Route("/detokenize", paths.detokenize, methods=["POST"]),
        Route("/health", paths.health, methods=["GET"]),
        Route("/ping", paths.health, methods=["GET", "POST"]),
        Route("/version", paths.version, methods=["GET"]),
        Route("/metrics", paths.metrics, methods=["GET"]),
        Route("/openapi.json", paths.openapi, methods=["GET"]),
    ]
    handlers = {
        RequestError: answer_request_error,
        HTTPException: answer_http_exception,
        Exception: answer_failure,
    }
    app = Starlette(routes=routes, middleware=_middleware(service), exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _middleware(service: Service) -> list[Middleware]:
    """The first comes first: nothing is read of a request without a key, and nothing done for one that is too large."""
    options = service.options
    made = [Middleware(RootPath, path=options.root_path)] if options.root_path else []
    if options.allowed_origins:
        origins = list(options.allowed_origins)
        made.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if options.api_key:
        made.append(Middleware(KeyCheck, keys=list(options.api_key)))
    sizes = {"max_header_bytes": options.max_header_bytes, "max_body_bytes": options.max_body_bytes}
    return [*made, Middleware(RequestBounds, **sizes, seconds=options.read_seconds)]


class _Paths:
    """The paths that need no engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def page(self, request: Request) -> Response:
        return page_response()

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_model(name)
        return json_response(self._card(name))

    async def tokenize(self, request: Request) -> Response:
        return await self._tokens(request, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._tokens(request, self._detokenized)

    async def health(self, request: Request) -> Response:
        alive = self._service.engine.is_alive and not self._service.is_stopping
        return Response(status_code=200 if alive else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": dcpjax.__version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return json_response(description(self._service.names, self._service.options.root_path))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "dcpjax",
            "root": str(self._service.llm.files.path),
            "parent": None,
            "max_model_len": self._service.llm.max_model_len,
        }

    async def _tokens(self, request: Request, make: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Response:
        fields = await json_fields(request, self._service)
        self._service.check_model(fields.get("model"))
        try:
            return json_response(await self._service.in_thread(make, fields))
        except ValueError as error:
            raise bad_request(str(error)) from None

    def _tokenized(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return tokenize(self._service.llm.tokenizer, fields, max_model_len=self._service.llm.max_model_len)

    def _detokenized(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return detokenize(self._service.llm.tokenizer, fields)
