"""What a server refuses: too much, too slow, without a key; and what it says then."""

import json
import shutil
import socket
import ssl
import subprocess
import time

import openai
import pytest
from serving import served

from dcpjax.server.options import ServeOptions
from dcpjax.server.serve import bind

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def guarded(llm):
    """A server with two keys, under a path, that waits for nobody long and takes small bodies only."""
    with served(
        llm,
        api_key=["first", "second"],
        root_path="/llm",
        read_seconds=0.5,
        max_body_bytes=2000,
        max_header_bytes=4096,
        allowed_origins=["https://page.example"],
    ) as made:
        yield made


def request(method: str, target: str, *headers: str, body: str = "") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: x", f"content-length: {len(body)}", "connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """(status, everything until the server closes)."""
    data = b""
    with connection:
        while piece := connection.recv(65_536):
            data += piece
    return int(data.split(b" ", 2)[1]) if data else 0, data


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "//v1/models",
        "/v1/models/",
        "/V1/models",
        "/v1/completions",
        "/v1//completions",
        "/%761/models",
        "/llm/v1/models",
        "/health/../v1/models",
        "/health/",
        "/Health",
        "//health",
        "/tokenize",
        "/openapi.json",
        "//",
        "*",
    ],
)
def test_no_spelling_of_a_path_gets_past_the_key(guarded, method, path):
    assert answer(guarded.raw(request(method, path)))[0] in (401, 400)


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/version", "/metrics"])
def test_some_paths_are_open_to_reading_alone(guarded, path):
    assert answer(guarded.raw(request("GET", path)))[0] == 200
    assert answer(guarded.raw(request("POST", path)))[0] == 401


@pytest.mark.parametrize(
    "header", ["first", "Basic first", "Bearer firs", "Bearer first second", "Bearer ", "Bearer é"]
)
def test_a_wrong_key_is_refused(guarded, header):
    data = request("GET", "/v1/models", f"authorization: {header}")
    assert answer(guarded.raw(data))[0] in (401, 400)


def test_each_key_opens_the_server_and_none_raises_the_right_class(guarded):
    for key in ("first", "second"):
        with guarded.client(api_key=key) as client:
            assert [model.id for model in client.models.list()] == ["tiny", "small"]
    with (
        guarded.client(api_key="third") as client,
        pytest.raises(openai.AuthenticationError, match="an API key"),
    ):
        client.models.list()


def test_browsers_of_the_allowed_page_alone_may_ask(guarded, server):
    asked = ("access-control-request-method: POST", "access-control-request-headers: authorization")
    allowed = request("OPTIONS", "/v1/completions", "origin: https://page.example", *asked)
    other = request("OPTIONS", "/v1/completions", "origin: https://other.example", *asked)
    assert b"access-control-allow-origin: https://page.example" in answer(guarded.raw(allowed))[1]
    assert b"access-control-allow-origin" not in answer(guarded.raw(other))[1]
    assert b"access-control" not in answer(server.raw(allowed))[1]


def test_only_json_is_read(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        data = request("POST", "/v1/completions", f"content-type: {kind}", body='{"prompt": "a"}')
        assert answer(server.raw(data))[0] == 415


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{", '{"prompt": NaN}', "[" * 100_000, '{"prompt": "\\ud800"}', '{"n": ' + "9" * 5000 + "}", "\x00"],
)
def test_what_is_no_object_is_a_bad_request(server, body):
    status, data = answer(server.raw(request("POST", "/v1/completions", "content-type: application/json", body=body)))
    assert status == 400
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the body must be")


def test_a_large_body_is_refused_before_it_is_sent(server):
    connection = server.raw(f"{HEAD}content-length: 100000000\r\n\r\n".encode())
    started = time.monotonic()
    assert b" 413 " in connection.recv(4096)  # nothing of the body has been sent
    connection.close()
    assert time.monotonic() - started < 5


def test_a_client_that_sends_all_of_a_large_body_reads_the_refusal(guarded):
    with guarded.http() as http:
        made = http.post(
            "/v1/completions",
            content=(b"x" * 65_536 for _ in range(100)),  # in chunks of unknown number
            headers={"content-type": "application/json", "authorization": "Bearer first"},
        )
    assert made.status_code == 413
    assert made.json()["error"]["code"] == "body_too_large"


def test_large_headers_are_refused(guarded):
    assert answer(guarded.raw(request("GET", "/health", "x: " + "y" * 5000)))[0] == 431
    assert answer(guarded.raw(request("GET", "/health?" + "y" * 5000)))[0] == 431


def test_slow_connections_stop_nobody_and_are_closed(guarded):
    with_key = HEAD + "authorization: Bearer first\r\n"
    slow = [guarded.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n") for _ in range(50)]
    slow += [guarded.raw(f"{with_key}content-length: 100\r\n\r\n".encode()) for _ in range(10)]
    assert answer(guarded.raw(request("GET", "/health")))[0] == 200
    statuses = [answer(connection)[0] for connection in slow]  # reads until the server closes
    assert statuses == [0] * 50 + [408] * 10


def test_a_request_that_takes_too_long_ends(llm):
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 150, "extra_body": {"ignore_eos": True}}
    with served(llm, request_timeout_seconds=0.01) as server, server.client() as client:
        with pytest.raises(openai.InternalServerError, match="must end within"):
            client.completions.create(**asked)
        with pytest.raises(openai.APIError, match="must end within"):
            list(client.completions.create(stream=True, **asked))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https_with_a_certificate(llm, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with served(llm, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        connection = context.wrap_socket(server.raw(b""), server_hostname="localhost")
        connection.sendall(request("GET", "/health"))
        assert answer(connection)[0] == 200


def test_what_is_no_certificate_is_found_before_the_model_is_opened(tmp_path):
    (tmp_path / "c").write_text("no certificate")
    for name in ("c", "missing"):
        with pytest.raises(ValueError, match="must be a certificate and its key"):
            bind(ServeOptions(ssl_certfile=str(tmp_path / name)))
