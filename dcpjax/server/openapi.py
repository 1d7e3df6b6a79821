"""A description of the server's paths in the form of OpenAPI 3.1, at /openapi.json."""

from collections.abc import Sequence
from typing import Any

import dcpjax

_TEXT, _INTEGER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "boolean"))
_NUMBER = {"type": "number"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_SAMPLING: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 0},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "n": {"type": "integer", "minimum": 1},
    "seed": _INTEGER,
    "stop": {"anyOf": [_TEXT, _TEXTS]},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
    "ignore_eos": _BOOLEAN,
    "priority": _INTEGER,
    "user": _TEXT,
    "cache_salt": _TEXT,
    "stream": _BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": _BOOLEAN}, "additionalProperties": _BOOLEAN},
    "response_format": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
        "required": ["type"],
    },
}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": _TEXT},
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "type": "object",
        "properties": {
            **_SAMPLING,
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "max_completion_tokens": {"type": "integer", "minimum": 1},
            "logprobs": _BOOLEAN,
            "top_logprobs": {"type": "integer", "minimum": 0},
            "tools": {"type": "array", "items": _TOOL},
            "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
        },
        "required": ["messages"],
    },
    "/v1/completions": {
        "type": "object",
        "properties": {
            **_SAMPLING,
            "prompt": {"anyOf": [_TEXT, _TEXTS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS, "minItems": 1}]},
            "logprobs": {"type": "integer", "minimum": 0},
            "echo": _BOOLEAN,
        },
        "required": ["prompt"],
    },
    "/tokenize": {
        "type": "object",
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        "additionalProperties": False,
        "properties": {
            "prompt": _TEXT,
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "add_special_tokens": _BOOLEAN,
            "return_token_strs": _BOOLEAN,
        },
    },
    "/detokenize": {
        "type": "object",
        "properties": {"tokens": _TOKEN_IDS},
        "required": ["tokens"],
        "additionalProperties": False,
    },
}
_SUMMARIES = {
    "/": "a page with the server's numbers and a chat",
    "/v1/models": "the names of the model",
    "/health": "200 while the engine runs",
    "/ping": "200 while the engine runs",
    "/version": "the server's version",
    "/metrics": "numbers for Prometheus",
    "/v1/chat/completions": "answer a conversation",
    "/v1/completions": "continue prompts",
    "/tokenize": "token ids of a text or a conversation",
    "/detokenize": "the text of token ids",
}
# Why a request that is well formed may be answered with an error.
_ERRORS = {
    "400": "a value is refused; the message says which",
    "401": "no API key, or a wrong one",
    "404": "no model of this name",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "the queue is full; Retry-After says when to ask again",
    "500": "the engine failed",
    "503": "the server is shutting down",
    "504": "the request took too long",
}


def description(models: Sequence[str], root_path: str = "") -> dict[str, Any]:
    """Of a server whose model has these names."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "dcpjax", "version": dcpjax.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": {path: _path(path, models) for path in _SUMMARIES},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _path(path: str, models: Sequence[str]) -> dict[str, Any]:
    errors = {status: {"description": text} for status, text in _ERRORS.items()}
    answer: dict[str, Any] = {"summary": _SUMMARIES[path], "responses": {"200": {"description": "done"}, **errors}}
    if path not in _BODIES:
        return {"get": answer}
    body = _BODIES[path]
    schema = {**body, "properties": {"model": {"enum": list(models)}, **body["properties"]}}
    return {"post": {**answer, "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}}
