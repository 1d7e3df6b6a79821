"""Chat templates rendered by a process of their own (`template_worker`), which ends whatever a template does."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from dcpjax.checkpoint.template_bounds import TemplateBounds


class TemplateProcess:
    """Renders one conversation at a time, for any thread. A process that ended is started anew."""

    def __init__(self, bounds: TemplateBounds | None = None) -> None:
        self.bounds = bounds or TemplateBounds()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process if none runs. It takes its time to be ready, so call this early."""
        with self._lock:
            self._running()

    def render(self, task: Mapping[str, Any]) -> str:
        """The rendered text. `task` holds the arguments of `template_worker.rendered`.

        Raises:
            ValueError: the template refuses the conversation or breaks a bound; the sentence says which.
        """
        try:
            line = json.dumps(task, default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages must fit into JSON, but do not: {error}; give plain values") from error
        with self._lock:
            answer = self._exchange(line)
        if "bound" in answer:
            raise ValueError(f"the model's chat template {answer['bound']}; use generate, or correct the template")
        if "error" in answer:
            raise ValueError(
                f"messages must fit the model's chat template, but it refused them: {answer['error']}; "
                "see which roles and fields the model's page names"
            )
        return answer["text"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _exchange(self, line: bytes) -> dict[str, str]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # an interrupt: the answer would be taken for that of the next task
            self.close()
            raise
        return json.loads(answer) if answer.endswith(b"\n") else self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> dict[str, str]:
        """Why the process ended instead of answering."""
        code = process.wait()
        self.close()
        if sys.platform != "win32" and code == -signal.SIGPROF:
            return {"bound": self.bounds.too_slow()}
        return {"bound": f"must render in a process of its own, but that ended with code {code}"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dcpjax.checkpoint.template_worker", json.dumps(self.bounds.as_dict())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C reaches this process only
            )
        return self._process


@cache
def template_process() -> TemplateProcess:
    """The one that all tokenizers share."""
    made = TemplateProcess()
    atexit.register(made.close)
    return made


def _plain(value: Any) -> Any:
    """What JSON lacks: other mappings, pydantic models; the rest is named by its type, as transformers does."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.model_dump() if callable(getattr(value, "model_dump", None)) else f"<{type(value).__name__}>"
