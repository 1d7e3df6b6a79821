"""Requests drawn from the server's own description: whatever they hold, the server does not fail."""

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from dcpjax.server.openapi import description

DESCRIPTION = description(["tiny", "small"])
PATHS = list(DESCRIPTION["paths"])


def bounded(path: str, body: Any) -> Any:
    """The same body, but asking for few tokens."""
    if not isinstance(body, dict) or "completions" not in path:
        return body
    n = body.get("n")
    few = {"n": n % 4 + 1} if isinstance(n, int) and 4 < n < 1000 else {}
    return {**body, "max_tokens": 3, **few}


def check(server, path: str, cases: int) -> set[int]:
    schema = schemathesis.openapi.from_dict(DESCRIPTION)
    statuses = set[int]()
    (operation,) = (schema[path][method] for method in DESCRIPTION["paths"][path])

    @settings(
        max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        case.body = bounded(path, case.body)
        case.headers.pop("Authorization", None)
        answer = case.call(base_url=server.url, session=session, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text

    with requests.Session() as session:
        ask()
    return statuses


@pytest.mark.parametrize("path", PATHS)
def test_no_request_of_the_description_makes_the_server_fail(server, path):
    (operation,) = DESCRIPTION["paths"][path].values()
    assert {str(status) for status in check(server, path, 30)} <= set(operation["responses"])


@pytest.mark.sweep
@pytest.mark.parametrize("path", PATHS)
def test_none_of_two_thousand_requests_makes_the_server_fail(server, path):
    assert 200 in check(server, path, 2000 // len(PATHS))
