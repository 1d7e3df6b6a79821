"""Runs a server until a signal: binds its port, starts the engine's thread, and ends both in time."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from dcpjax.server.app import make_app
from dcpjax.server.connection import timed_connection
from dcpjax.server.options import ServeOptions
from dcpjax.server.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SPARE_SECONDS = 1.0  # after the grace period: for the last events, and for the step that runs


def bind(options: ServeOptions) -> socket.socket:
    """A socket on the server's port, which does not listen yet.

    Raises ValueError if the port cannot be taken, or if the certificate cannot be read.
    """
    _check_certificate(options)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a killed server left can be taken
        made.bind((options.host, options.port))
    except OSError as error:
        made.close()
        reason = error.strerror or error
        raise ValueError(f"port must be free on {options.host}, but {options.port} is not: {reason}") from None
    return made


def _check_certificate(options: ServeOptions) -> None:
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:  # also what is no certificate, or another one's key
        raise ValueError(
            f"ssl_certfile and ssl_keyfile must be a certificate and its key in PEM form, but {options.ssl_certfile} "
            f"and {options.ssl_keyfile} are not: {error.strerror or error}"
        ) from None


def address(options: ServeOptions, listening: socket.socket) -> str:
    """The URL of the server."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{'https' if options.ssl_certfile else 'http'}://{host}:{listening.getsockname()[1]}{options.root_path}"


def serve(service: Service, listening: socket.socket, *, started: Callable[[], object] = lambda: None) -> None:
    """Answer requests until SIGTERM or Ctrl-C.

    Whatever happens, the process ends soon after the grace period: even if the engine's thread is inside a compilation.
    """
    server = Server(service, started)
    server.run(sockets=[listening])
    service.close()
    if not service.engine.join(SPARE_SECONDS) and threading.current_thread() is threading.main_thread():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the thread is inside a step: leaving the interpreter would wait for it or crash in it


class Server(uvicorn.Server):
    """uvicorn's server, whose end gives every open stream its last events."""

    def __init__(self, service: Service, started: Callable[[], object]) -> None:
        options = service.options
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=timed_connection(options.read_seconds),
                ws="none",
                lifespan="off",
                h11_max_incomplete_event_size=options.max_header_bytes,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                timeout_graceful_shutdown=int(options.grace_seconds + SPARE_SECONDS) + 1,
                log_level="warning",
                access_log=False,
                server_header=False,
            )
        )
        self._service, self._report_start = service, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.engine.start(asyncio.get_running_loop())
        await super().startup(sockets)
        self._report_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        finishing = asyncio.create_task(self._service.finish())
        await super().shutdown(sockets)
        finishing.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal asks for the end, a second one is the end. uvicorn's own handlers end with the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True
