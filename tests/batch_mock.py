"""An engine without a model, and `dcpjax batch` with it: what the tests of batch jobs run, also as a process.

    python tests/batch_mock.py PLAN in.jsonl -o out.jsonl [FLAGS]

PLAN is JSON: which crash, signal or wait happens when, and where the lines that were computed are written down.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.cli import batch
from dcpjax.cli.flags import Parser, parse
from dcpjax.jobs import output_file
from dcpjax.jobs.batch_request import BatchRequest
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody


class MockEngine:
    """Answers a prompt with its capitals, a token a letter; up to three requests a step, in a shuffled order."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.running = random.Random(seed), {}
        self.formats = MessageFormats()
        self.submitted: list[BatchRequest] = []
        self.aborted = self.steps = self.most = 0

    def submit(self, key: int, request: BatchRequest) -> None:
        if "refuse" in text_of(request.body):
            raise ValueError("a prompt must hold at most 60 tokens, but holds 61")
        self.running[key] = request
        self.submitted.append(request)
        self.most = max(self.most, len(self.running))

    def advance(self) -> list[tuple[int, list[RequestOutput]]]:
        self.steps += 1
        keys = self.random.sample(sorted(self.running), min(len(self.running), self.random.randint(0, 3)))
        return [(key, answers(self.running.pop(key).body)) for key in keys]

    def drop_waiting(self) -> list[int]:
        return []

    def abort(self) -> None:
        self.aborted += 1
        self.running.clear()

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def stats(self) -> dict[str, float]:
        return {"cache_usage": len(self.running) / 100}


def text_of(request: RequestBody) -> str:
    if request.messages is not None:
        return str(request.messages[-1].get("content") if isinstance(request.messages[-1], dict) else None)
    return " ".join(map(prompt_text, request.prompts))


def prompt_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(map(chr, prompt or []))


def answers(request: RequestBody) -> list[RequestOutput]:
    """A result for each of the prompts."""
    if request.messages is not None:
        return [answer(request, text_of(request))]
    return [answer(request, prompt_text(prompt)) for prompt in request.prompts]


def answer(request: RequestBody, text: str) -> RequestOutput:
    error = "the logits of a step must be finite, but were not" if text == "fail" else None
    made = [
        CompletionOutput(index, text.upper(), list(range(len(text))), "error" if error else "stop", error=error)
        for index in range(request.sampling.n)
    ]
    return RequestOutput("0", None, list(range(len(text))), made, True, num_cached_tokens=len(text) // 2)


class Planned(MockEngine):
    """Also writes down what it computes, and does what the plan says."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan.get("seed", 0))
        self.plan = plan
        self.diary = os.open(plan["diary"], os.O_WRONLY | os.O_APPEND | os.O_CREAT) if "diary" in plan else None

    def advance(self) -> list[tuple[int, list[RequestOutput]]]:
        if self.steps == self.plan.get("signal_at_step"):
            os.kill(os.getpid(), self.plan["signal"])
            if self.plan.get("compiles"):
                threading.Event().wait()  # as in a compilation: only the end of the process ends this
        elif self.steps > self.plan.get("signal_at_step", self.steps):
            time.sleep(0.02)  # on a busy machine too the signal is seen before all lines are done
        if self.steps == self.plan.get("again_at_step"):
            os.kill(os.getpid(), self.plan["signal"])
            signal.pause()  # only the end of the process ends this
        finished = self._finished()
        if self.diary is not None:
            os.write(self.diary, b"".join(b"%d\n" % key for key, _ in finished))
        if self.steps == self.plan.get("kill_at_step"):
            os.kill(os.getpid(), signal.SIGKILL)
        return finished

    def _finished(self) -> list[tuple[int, list[RequestOutput]]]:
        if self.steps >= self.plan.get("stuck_at_step", 1 << 40):
            self.steps += 1
            return []
        return super().advance()


class TornWrites:
    """`os`, whose writes take a part, and which dies in the middle of one of them."""

    def __init__(self, kill_at: int, bytes_written: int) -> None:
        self.left, self.bytes_written = kill_at, bytes_written

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: Any) -> int:
        self.left -= 1
        if self.left < 0:
            os.write(file, data[: self.bytes_written])
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(file, data[: max(1, len(data) // 2)])


def run_command(arguments: list[str], engine: MockEngine) -> int:
    parser = Parser(prog="dcpjax batch", usage="", description="")
    batch.add_flags(parser)
    return batch.run(parse(parser, [*arguments, "--model", "mock"]), lambda: (engine, {}))


def main() -> int:
    plan, *arguments = sys.argv[1:]
    plan = json.loads(plan)
    sys.argv = ["dcpjax", "batch", *arguments]
    if "kill_at_write" in plan:
        output_file.os = TornWrites(plan["kill_at_write"], plan.get("bytes_written", 0))  # type: ignore
    return run_command(arguments, Planned(plan))


if __name__ == "__main__":
    sys.exit(main())


def chat_completion(name: str) -> dict:
    """OpenAI's body for the answer to a chat of the one message "abcd", made by model "m" at second 5."""
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ABCD", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
