"""A connection that must send the headers of a request in time.

uvicorn closes a connection that is idle after an answer, but waits without end for one that has begun to send.
"""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState


class TimedConnection(H11Protocol):
    """HTTP/1.1 by h11, which also bounds the size of headers."""

    header_seconds = 30.0

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is None:  # else an idle connection, which uvicorn closes sooner
            self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_headers(self) -> None:
        """Start the timer unless it runs, or stop it if the headers have arrived."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self._header_timer = None
        self.transport.close()


def timed_connection(seconds: float) -> type[TimedConnection]:
    """The class of connections of which each has so long to send headers."""
    return type("TimedConnection", (TimedConnection,), {"header_seconds": seconds})
