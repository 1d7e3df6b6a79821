"""A line of the input -> a checked `BatchRequest`, or an error that says what is wrong with the line.

A line is a request of OpenAI's batch files (`custom_id`, `method`, `url`, `body`), or a plain object: `prompt` or
`messages` with the options beside it.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

from dcpjax.jobs.lines import Line
from dcpjax.openai.json_text import short_field, short_json
from dcpjax.openai.request import KIND_OF_URL, Kind, RequestBody, read_body

_KEYS = ("custom_id", "method", "url", "body")


class LineError(ValueError):
    """What is wrong with a line; `code` is for programs."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A checked line: its number and fingerprint, the user's name for it and what it asks for."""

    line: int
    fingerprint: str
    custom_id: str | None
    body: RequestBody


def parse_line(line: Line, *, max_line_bytes: int) -> dict[str, Any]:
    """The JSON object of a line. Raises LineError for anything else, RecursionError if it is nested too deep."""
    if line.data is None:
        raise LineError(
            f"a line must hold at most {max_line_bytes:,} bytes, but holds {line.size:,}; "
            "shorten it or raise max_line_bytes",
            "line_too_long",
        )
    try:
        entry = json.loads(line.data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise LineError(
            f"a line must be UTF-8, but byte {error.start + 1} is {line.data[error.start]:#04x}", "invalid_json"
        ) from None
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")  # some of Python's messages end with it
        raise LineError(
            f"a line must be a JSON object, but is not: {reason} at column {error.colno}", "invalid_json"
        ) from None
    except LineError:
        raise
    except ValueError as error:  # such as an integer of thousands of digits
        raise LineError(f"a line must be JSON that can be read, but is not: {error}", "invalid_json") from None
    if not isinstance(entry, dict):
        raise LineError(f"a line must be a JSON object, but is {short_json(entry)}", "invalid_json")
    return entry


def read_custom_id(entry: Mapping[str, Any]) -> str | None:
    """`custom_id`, or in a plain line also `id`; an integer becomes its digits."""
    plain = _is_plain(entry)
    name = "id" if plain and entry.get("custom_id") is None else "custom_id"
    custom_id = entry.get(name)
    if isinstance(custom_id, int) and not isinstance(custom_id, bool) and plain:
        return str(custom_id)
    if custom_id is None and plain:
        return None
    if not isinstance(custom_id, str):
        raise LineError(f"{name} must be a string, but is {short_field(entry, name)}")
    _check_unicode(custom_id)
    return custom_id


def read_batch_request(
    entry: Mapping[str, Any], line: Line, *, custom_id: str | None, defaults: Mapping[str, Any], seed: int = 0
) -> BatchRequest:
    """Check the request in a line. `defaults` are fields of SamplingParams for what the line does not say.

    A line without a seed of its own gets one from `seed`, its number and its bytes, so that an interrupted job gives
    the same results as one that was not.

    Raises:
        ValueError: an option that is unknown, out of its range or not possible in a batch.
    """
    if line.data is not None and b"\\ud" in line.data.lower():  # only an escape can be a lone surrogate
        _check_unicode(entry)
    kind, body = _kind_and_body(entry)
    body_defaults = {**defaults, "seed": _line_seed(seed, line)}
    return BatchRequest(
        line=line.number,
        fingerprint=line.fingerprint,
        custom_id=custom_id,
        body=read_body(kind, body, defaults=body_defaults, place="in a batch"),
    )


def _is_plain(entry: Mapping[str, Any]) -> bool:
    return not any(name in entry for name in ("body", "url", "method"))


def _kind_and_body(entry: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    if _is_plain(entry):
        body = {name: value for name, value in entry.items() if name not in ("custom_id", "id")}
        return _plain_kind(body), body
    for name in entry:
        if name not in _KEYS:
            near = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"put options into body (keys: {', '.join(_KEYS)})"
            raise LineError(f"unknown key {name!r}; {hint}")
    if entry.get("method", "POST") != "POST":
        raise LineError(f"method must be 'POST', but is {short_json(entry['method'])}")
    url, body = entry.get("url"), entry.get("body")
    if url not in list(KIND_OF_URL):  # a list, because `url` may be unhashable
        near = [*difflib.get_close_matches(str(url), KIND_OF_URL, n=1, cutoff=0.3), *KIND_OF_URL][0]
        raise LineError(f"url must be one of {', '.join(KIND_OF_URL)}, but is {short_field(entry, 'url')}; use {near}")
    if not isinstance(body, dict):
        raise LineError(f"body must be an object, but is {short_field(entry, 'body')}")
    return KIND_OF_URL[url], body


def _plain_kind(body: Mapping[str, Any]) -> Kind:
    given = [name for name in ("messages", "prompt") if body.get(name) is not None]
    if len(given) != 1:
        has = "both" if given else f"neither ({', '.join(map(repr, body))})" if body else "neither"
        raise LineError(f"a line must have prompt or messages, or custom_id, method, url and body, but has {has[:200]}")
    return "chat" if given == ["messages"] else "completion"


def _line_seed(seed: int, line: Line) -> int:
    digest = blake2b(f"{seed} {line.number} {line.fingerprint}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # SamplingParams takes 63 bits


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise LineError(
            f"a line must be valid Unicode, but holds the lone surrogate {error.object[error.start]!a}; remove it"
        ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise LineError(f"a line must be JSON, but holds {name}, which JSON has no number for", "invalid_json")
