"""Options of a batch job, checked before any file is opened."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcpjax.api.checks import check_bool, check_choice, check_seconds, check_size, from_options
from dcpjax.jobs.shard import Shard
from dcpjax.openai.parsers.choice import ReasoningParserName, ToolCallParserName

Fsync = Literal["always", "interval", "never"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch job treats its files, and the answers that go into them.

    Args:
        resume: continue where an earlier run into the same output stopped; starts anew if there was none.
        overwrite: throw away what the output file holds.
        retry_errors: with `resume`: run again the lines whose record is an error.
        ordered: once all lines are done, sort the output by input line. Until then records are in the order
            in which requests finished.
        shard: "I/N": answer only every N-th line, from line I on, so that N jobs share one input. Each has an output of
            its own, which dcpjax batch merge joins.
        fsync: when records are forced to the disk: "always" after each one, "interval" once a second, "never"
            leaves it to the system. A killed process loses nothing either way; a power failure may lose records.
        grace_seconds: how long requests that have begun may continue after Ctrl-C or SIGTERM; 0 drops them at once.
            The command then ends about a second later, whatever it is busy with.
        max_line_bytes: longer lines become error records and are never held in memory.
        max_in_flight: most requests in the engine at once; after a crash at most these are computed again.
        tool_call_parser: how the model writes tool calls, which become the message's tool_calls: "auto" takes what the
            chat template asks for; "none" leaves calls in the text.
        reasoning_parser: how the model marks what it thinks before it answers, which becomes the message's
            reasoning_content; "auto" and "none" as for tool calls.

    Raises:
        ValueError: a value out of its range, or two that contradict each other; names are in backticks.
    """

    resume: bool = False
    overwrite: bool = False
    retry_errors: bool = False
    ordered: bool = False
    shard: str | None = None
    fsync: Fsync = "interval"
    grace_seconds: float = 3.0
    max_line_bytes: int = 100_000_000
    max_in_flight: int = 512
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"

    def __post_init__(self) -> None:
        for name in ("resume", "overwrite", "retry_errors", "ordered"):
            check_bool(f"`{name}`", getattr(self, name))
        Shard.of(self.shard)
        check_choice("`fsync`", self.fsync, get_args(Fsync))
        check_size("`max_line_bytes`", self.max_line_bytes, 2)  # an empty object
        check_size("`max_in_flight`", self.max_in_flight)
        check_seconds("`grace_seconds`", self.grace_seconds)
        check_choice("`tool_call_parser`", self.tool_call_parser, get_args(ToolCallParserName))
        check_choice("`reasoning_parser`", self.reasoning_parser, get_args(ReasoningParserName))
        if self.resume and self.overwrite:
            raise ValueError("`resume` must not come with `overwrite`, which throws away what is done; remove one")
        if self.retry_errors and not self.resume:
            raise ValueError("`retry_errors` must come with `resume`, but stands alone; add `resume`")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "BatchOptions":
        """Build from keyword options, refusing an unknown one by name with the nearest valid one."""
        return from_options(cls, options)
