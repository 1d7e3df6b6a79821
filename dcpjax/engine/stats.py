"""What the engine has done, and what it holds at one moment.

The scheduler and the engine count; a user sees `EngineStats`, a snapshot that no longer changes.
"""

from dataclasses import dataclass

from dcpjax.api.outputs import counted, duration, html_table


@dataclass
class SchedulerCounters:
    """What the scheduler has done. The names are those of `EngineStats`."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    fused_steps: int = 0


@dataclass
class EngineCounters:
    """What the engine has done besides scheduling. The names are those of `EngineStats`."""

    generated_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineStats:
    """A snapshot of the engine: its queues, its cache now, and its counters since it was made."""

    num_running: int  # requests
    num_waiting: int  # requests
    num_blocks: int
    num_used_blocks: int  # held by requests
    num_cached_blocks: int  # held by no request, kept for a prompt that begins alike
    block_size: int  # tokens
    tokens_per_rank: tuple[int, ...]  # slots in use on each dcp rank
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int  # calls of the compiled programs
    fused_steps: int  # decode steps that followed another in the same call
    seconds: float  # in steps, without `compile_seconds`
    compile_seconds: float

    @property
    def cache_usage(self) -> float:
        """The fraction of the blocks that requests hold."""
        return _ratio(self.num_used_blocks, self.num_blocks)

    @property
    def prefix_hit_rate(self) -> float:
        """The fraction of the prompt tokens looked up that were found; 0 before the first look-up."""
        return _ratio(self.prefix_hits, self.prefix_queries)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second in steps."""
        return _ratio(self.generated_tokens, self.seconds)

    def __repr__(self) -> str:
        return "\n".join(["EngineStats", *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("requests", f"{self.num_running:,} running, {self.num_waiting:,} waiting{self._preempted()}"),
            ("cache", self._cache()),
            ("tokens per rank", " | ".join(f"{tokens:,}" for tokens in self.tokens_per_rank)),
            ("prefix cache", self._prefix()),
            ("work", self._work()),
        ]

    def _preempted(self) -> str:
        return f", {counted(self.preemptions, 'preemption')}" if self.preemptions else ""

    def _cache(self) -> str:
        return (
            f"{self.num_used_blocks:,} of {counted(self.num_blocks, 'block')} of "
            f"{counted(self.block_size, 'token')} in use ({self.cache_usage:.0%}), {self.num_cached_blocks:,} reusable"
        )

    def _prefix(self) -> str:
        queries = counted(self.prefix_queries, "prompt token")
        return f"{self.prefix_hits:,} of {queries} found ({self.prefix_hit_rate:.0%})"

    def _work(self) -> str:
        done = f"{counted(self.prompt_tokens, 'prompt token')}, {self.generated_tokens:,} generated"
        spent = f"{counted(self.steps, 'step')}, {duration(self.seconds)} ({self.tokens_per_second:,.1f} tokens/s)"
        return f"{done} in {spent}, {duration(self.compile_seconds)} compiling"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
