"""Options of a server, checked before a model is opened. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from dcpjax.api.checks import check_choice, check_integer, check_seconds, check_size, check_strings, from_options
from dcpjax.openai.parsers.choice import ReasoningParserName, ToolCallParserName


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a server listens, whom it answers and what it accepts.

    Args:
        host: address to listen on; 0.0.0.0 makes the server reachable from other machines.
        port: port to listen on; 0 takes a free one.
        served_model_name: what requests and answers call the model. None: the value of `model`.
        api_key: requests must carry this key, or one of them, as "Authorization: Bearer KEY"; the page at /, /health,
            /ping, /version and /metrics are open. None: no key is asked for.
        ssl_keyfile: private key in PEM form, for HTTPS.
        ssl_certfile: certificate in PEM form, for HTTPS.
        allowed_origins: web pages of this origin may use the server from a browser; "*" allows all. None: no page may.
        root_path: path under which a proxy shows the server, such as /llm.
        tool_call_parser: how the model writes tool calls, which become the message's tool_calls: "auto" takes what the
            chat template asks for, "none" leaves them in the text.
        reasoning_parser: how the model marks what it thinks before it answers, which becomes the message's
            reasoning_content: "auto", "none" or a name.
        max_queue: most completions that may wait while `max_num_seqs` run; requests beyond are answered with 429.
        max_body_bytes: largest body of a request.
        max_header_bytes: most bytes of a request's first line and headers.
        read_seconds: how long a client may take to send the headers of a request, and again to send its body.
        request_timeout_seconds: how long a request may take; then it is ended. None: as long as it needs.
        grace_seconds: how long requests may go on after SIGTERM or Ctrl-C; then they are ended.

    Raises:
        ValueError: a value out of its range, or two that contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] | None = None
    api_key: Sequence[str] | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: Sequence[str] | None = None
    root_path: str = ""
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    max_queue: int = 1024
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 65_536
    read_seconds: float = 30.0
    request_timeout_seconds: float | None = None
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65_535)
        for name in ("served_model_name", "api_key", "allowed_origins"):
            if getattr(self, name) is not None:
                check_strings(name, getattr(self, name))
        check_choice("tool_call_parser", self.tool_call_parser, get_args(ToolCallParserName))
        check_choice("reasoning_parser", self.reasoning_parser, get_args(ReasoningParserName))
        check_integer("max_queue", self.max_queue, 0)
        check_size("max_body_bytes", self.max_body_bytes)
        check_size("max_header_bytes", self.max_header_bytes, 1024)
        for name in ("read_seconds", "grace_seconds"):
            check_seconds(name, getattr(self, name))
        if self.request_timeout_seconds is not None:
            check_seconds("request_timeout_seconds", self.request_timeout_seconds)
        self._check_texts()

    def _check_texts(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile must come with ssl_certfile, but stands alone; add ssl_certfile")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            near = "/" + self.root_path.strip("/")
            raise ValueError(
                f"root_path must begin with a slash and not end with one, but is {self.root_path!r}; use {near!r}"
            )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "ServeOptions":
        """Build from keyword options, refusing an unknown one by name with the nearest valid one."""
        return from_options(cls, options)
