"""What commands that run a model share: its flags, opening it, printing a stream, the line of statistics.

Options are checked before jax is imported; the model is opened after.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import FinishReason, StreamEvent
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.cli.flags import Flags, Parser, add_options

if TYPE_CHECKING:
    from dcpjax.llm import LLM

MODELS_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # in generation_config.json
SEED = (
    "makes random choices repeatable, whatever else runs; without it they follow from the order of the prompts. "
    "Also fills the weights of --load-format dummy"
)


def add_model_flags(parser: Parser, *, max_tokens: int) -> None:
    """Which model, how much to say, and every field of `EngineConfig` and `SamplingParams`."""
    add_model_flag(parser)
    add_loudness_flags(parser)
    own = {name: f"the model's own, else {getattr(SamplingParams, name)}" for name in MODELS_OWN}
    own["temperature"] = "the model's own, else 0"
    values = {"max_tokens": max_tokens}
    add_options(parser, "choosing tokens", SamplingParams, explain={"seed": SEED}, defaults=own, values=values)
    add_options(parser, "running the model", EngineConfig, leave_out=["seed", "hf_overrides"])


def add_model_flag(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        help="a folder in Hugging Face form, a .gguf file, a hub id, or smollm2-135m to try one out; required",
    )


def check_model(flags: Flags) -> str:
    if not flags.get("model"):
        raise ValueError(
            "--model must name a model, but is not given; use a folder, a .gguf file, a hub id, or "
            "smollm2-135m to try one out"
        )
    return flags.get("model")


def add_loudness_flags(parser: Parser) -> None:
    switch = argparse.BooleanOptionalAction
    parser.add_argument("-q", "--quiet", action=switch, help="results and errors alone: no progress, no statistics")
    parser.add_argument("-v", "--verbose", action=switch, help="tell what was opened, how long it took, and statistics")


@dataclass(frozen=True, kw_only=True)
class Loudness:
    """How much is said on standard error besides errors."""

    quiet: bool = False
    verbose: bool = False

    @classmethod
    def from_flags(cls, flags: Flags) -> "Loudness":
        quiet, verbose = flags.get("quiet", False), flags.get("verbose", False)
        if quiet and verbose:
            raise ValueError("--quiet must not come with --verbose, but does; remove one")
        return cls(quiet=quiet, verbose=verbose)

    @property
    def wants_statistics(self) -> bool:
        """Unless a flag of their own decides."""
        return self.verbose or (sys.stderr.isatty() and not self.quiet)

    def tell(self, text: str) -> None:
        if self.verbose:
            say(text)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A model and its options, checked as far as they can be without it."""

    model: str
    engine: dict[str, Any]
    sampling: dict[str, Any]
    loudness: Loudness = Loudness()

    @classmethod
    def from_flags(cls, flags: Flags, *, max_tokens: int) -> "Choice":
        model = check_model(flags)
        engine, sampling = flags.options(EngineConfig), flags.options(SamplingParams)
        sampling = {"max_tokens": max_tokens, **sampling}
        if engine.get("seed", 0) is None:  # one flag for both seeds; only a request may be without
            del engine["seed"]
        EngineConfig.from_options(engine)
        SamplingParams.from_options(sampling)
        loudness = Loudness.from_flags(flags)
        return cls(model=model, engine=engine, sampling=sampling, loudness=loudness)

    def open(self) -> "LLM":
        from dcpjax.llm import LLM

        started = time.monotonic()
        llm = LLM(self.model, progress=not self.loudness.quiet, **self.engine)
        self.loudness.tell(f"{self.model} opened in {time.monotonic() - started:.1f} s: {describe(llm)}")
        return llm

    def params(self, llm: "LLM") -> SamplingParams:
        """What the model asks for, greedy if it asks for nothing, changed by what the user asks for."""
        params = llm.get_default_sampling_params()
        if llm.files.generation_config.get("temperature") is None:
            params = replace(params, temperature=0.0)
        params = replace(params, **self.sampling)
        self.loudness.tell(f"tokens are chosen with {_differences(params)}")
        return params


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


def describe(llm: "LLM") -> str:
    model = llm.runner.model
    return (
        f"{describe_layout(llm)}, weights {model.dtype}, cache {model.kv_dtype}, up to {llm.max_model_len:,} tokens "
        f"a request, on {model.platform}"
    )


def describe_layout(llm: "LLM") -> str:
    runner = llm.runner
    tokens = runner.sizes.num_blocks * runner.geometry.block_size
    copies = runner.model.layout.duplication(runner.model.config.cache_heads)
    return f"tp={runner.model.layout.tp} x dcp={runner.model.layout.dcp}, cache of {tokens:,} tokens stored {copies}x"


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


def _differences(params: SamplingParams) -> str:
    """What is not as `SamplingParams()` has it."""
    usual = SamplingParams()
    names = [field.name for field in fields(SamplingParams)]
    changed = [name for name in names if getattr(params, name) != getattr(usual, name)]
    return ", ".join(f"{name}={getattr(params, name)!r}" for name in changed) or "the defaults of SamplingParams"
