"""Options and results of beam search. Names and defaults are those of vLLM."""

from dataclasses import dataclass, field

from dcpjax.api.checks import check_bool, check_number, check_size
from dcpjax.api.logprobs import Logprob


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How `LLM.beam_search` keeps and ranks continuations.

    Args:
        beam_width: continuations kept at each token, and returned.
        max_tokens: most tokens to generate.
        ignore_eos: continue after the model's end of sequence.
        temperature: 0 or 1, which are the same: continuations are ranked by the model's own log-probabilities.
        length_penalty: a continuation's score is the sum of its log-probabilities over (tokens of prompt and
            continuation) ** `length_penalty`.
        include_stop_str_in_output: keep the end of sequence in the tokens.

    Raises:
        ValueError: a value out of its range, named with the nearest legal one.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_size("beam_width", self.beam_width)
        check_size("max_tokens", self.max_tokens)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.temperature not in (0, 1):
            raise ValueError(
                f"temperature must be 0 or 1 in beam search, which ranks by the model's own log-probabilities, but is "
                f"{self.temperature!r}; use 0"
            )


@dataclass(kw_only=True)
class BeamSearchSequence:
    """One continuation.

    `tokens` and `text` begin with the prompt; `logprobs` holds one dict for each generated token, `cum_logprob` the sum
    over them.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class BeamSearchOutput:
    """The continuations of one prompt, best first; none, and an `error`, for a prompt that cannot be run."""

    sequences: list[BeamSearchSequence]
    error: str | None = None
