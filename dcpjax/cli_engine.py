"""What `generate` and `chat` share: flags of a model, opening it, printing a stream, the line of statistics.

Options are checked before jax is imported; the model is opened after.
"""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dcpjax.cli_flags import Flags, Parser, add_options
from dcpjax.config import EngineConfig
from dcpjax.outputs import FinishReason, StreamEvent
from dcpjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dcpjax.llm import LLM

SEED = (
    "makes random choices repeatable, whatever else runs; without it they follow from the order of the prompts. "
    "Also fills the weights of --load-format dummy"
)


def add_model_flags(parser: Parser, *, max_tokens: int) -> None:
    """Which model, and every field of `EngineConfig` and `SamplingParams`."""
    parser.add_argument(
        "--model",
        help="a folder in Hugging Face form, a .gguf file, a hub id, or smollm2-135m to try one out; required",
    )
    own = {name: f"the model's own, else {_default(name)}" for name in ("top_p", "top_k", "min_p")}
    own["temperature"] = "the model's own, else 0"
    add_options(
        parser,
        "choosing tokens",
        SamplingParams,
        explain={"seed": SEED},
        defaults={**own, "max_tokens": f"{max_tokens}; 16 in Python"},
    )
    add_options(parser, "running the model", EngineConfig, leave_out=["seed", "hf_overrides"])


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A model and its options, checked as far as they can be without it."""

    model: str
    engine: dict[str, Any]
    sampling: dict[str, Any]

    @classmethod
    def from_flags(cls, flags: Flags, *, max_tokens: int) -> "Choice":
        if not flags.get("model"):
            raise ValueError(
                "--model must name a model, but is not given; use a folder, a .gguf file, a hub id, or "
                "smollm2-135m to try one out"
            )
        engine, sampling = flags.options(EngineConfig), flags.options(SamplingParams)
        sampling = {"max_tokens": max_tokens, **sampling}
        if engine.get("seed", 0) is None:  # one flag for both seeds; only a request may be without
            del engine["seed"]
        EngineConfig.from_options(engine)
        SamplingParams.from_options(sampling)
        return cls(model=flags.get("model"), engine=engine, sampling=sampling)

    def open(self) -> "LLM":
        from dcpjax.llm import LLM

        return LLM(self.model, **self.engine)

    def params(self, llm: "LLM") -> SamplingParams:
        """What the model asks for, greedy if it asks for nothing, changed by what the user asks for."""
        params = llm.get_default_sampling_params()
        if llm.files.generation_config.get("temperature") is None:
            params = replace(params, temperature=0.0)
        return replace(params, **self.sampling)


@dataclass
class Answer:
    """One completion as its events come in."""

    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def take(self, event: StreamEvent) -> None:
        self.text += event.text
        self.tokens += len(event.token_ids)
        self.finish_reason, self.error = event.finish_reason, event.error


def print_stream(events: Generator[StreamEvent], answer: Answer) -> None:
    """Print text as it becomes certain and end its line. However this is left, the generator is closed.

    The first piece waits for the second event: the program for the second token is compiled in between, and
    the bar that says so would be drawn over it.
    """
    waiting, started = "", False  # not printed yet
    with contextlib.closing(events):
        try:
            for event in events:
                answer.take(event)
                waiting += event.text
                if started or event.finish_reason:
                    waiting = _write(waiting)
                started = True
        finally:
            _write(waiting if answer.text.endswith("\n") or _is_silent(answer) else f"{waiting}\n")


@dataclass
class Clock:
    """Seconds that passed, and those of them in which programs were compiled."""

    seconds: float = 0.0
    compiling: float = 0.0


@contextlib.contextmanager
def timed(llm: "LLM") -> Iterator[Clock]:
    """A clock that is right once the block has been left."""
    clock, started, compiled = Clock(), time.monotonic(), llm.runner.compile_seconds
    try:
        yield clock
    finally:
        clock.seconds = time.monotonic() - started
        clock.compiling = llm.runner.compile_seconds - compiled


def statistics(llm: "LLM", *, prompt_tokens: int, new_tokens: int, clock: Clock) -> str:
    """One line: the layout, the cache, tokens and speed. Time spent compiling is named and does not count as speed."""
    speed = new_tokens / max(clock.seconds - clock.compiling, 1e-9)
    compiling = f" + {clock.compiling:.1f} s compiling" if clock.compiling >= 0.05 else ""
    return (
        f"{describe_layout(llm)} | {prompt_tokens:,} prompt + {new_tokens:,} new tokens in "
        f"{clock.seconds - clock.compiling:.1f} s{compiling}, {speed:.1f} tokens/s"
    )


def describe_layout(llm: "LLM") -> str:
    runner = llm.runner
    tokens = runner.sizes.num_blocks * runner.geometry.block_size
    copies = runner.layout.duplication(runner.config.cache_heads)
    return f"tp={runner.layout.tp} x dcp={runner.layout.dcp}, cache of {tokens:,} tokens stored {copies}x"


def say(text: str) -> None:
    """Everything that is no result goes to standard error."""
    print(text, file=sys.stderr, flush=True)


def _is_silent(answer: Answer) -> bool:
    """It failed before it said anything: no line, not even an empty one."""
    return bool(answer.error) and not answer.text


def _write(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return ""


def _default(name: str) -> Any:
    return getattr(SamplingParams, name)
