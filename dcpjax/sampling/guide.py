"""Grammar-constrained decoding (structured outputs): which tokens may come next, as a mask over the vocabulary.

The generated text then follows a JSON schema, a regular expression, one of some choices, or a grammar. The llguidance
package compiles and follows the grammar; this file gives it the bytes that `Tokenizer.decode` produces for each token.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dcpjax.api.bitmask import pack
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.sampling.bit_words import to_words

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Between the elements of a JSON text. Bounded here, because some models generate whitespace without end.
WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
COMPACT = {"whitespace_flexible": False}
MAX_BLANK = 128  # tokens of white space in a row, while nothing else can come, before a text ends
MAX_REASON = 200  # characters of llguidance's message quoted in an error
NO_EXTENSION = "NoExtension"  # begins llguidance's message if the text is incomplete and no token can extend it
COMPILED_GRAMMARS = 16  # kept, because the prompts of a batch often share a grammar


class GuideMaker:
    """Makes a `Guide` for each request of one model. Holds the vocabulary in llguidance's form."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is the width of the logits. Ids below it that the tokenizer does not have are never allowed.

        Raises ValueError if the llguidance package or an end-of-sequence token is missing.
        """
        # An id outside the logits can never be sampled.
        ends = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        if not ends:
            raise ValueError(
                "guided output must have an end-of-sequence token, but the model names none; use another model"
            )
        self._library = _llguidance()
        vocabulary = _Vocabulary(tokenizer, vocab_size, ends)
        self._vocabulary = self._library.LLTokenizer(vocabulary, eos_token=ends)
        self._leading = tokenizer.detokenizer().leading
        self._blank = to_words(pack((*vocabulary.blank(), *ends)), vocab_size)
        self._compiled = lru_cache(COMPILED_GRAMMARS)(self._compile)

    def make(self, spec: StructuredOutputsParams, leading: str | None = None) -> "Guide":
        r"""A guide at the start of the generated text.

        `leading` is what the detokenizer still strips from the start, by default as where there is no prompt. Raises
        ValueError for a spec that is invalid or that no text can follow.

        Regular expressions have the syntax of Rust's regex crate and must match the whole text; `\d` matches any
        Unicode digit.
        """
        self._check_pattern(spec.whitespace_pattern)
        compiled = self._compiled(spec.kind, self._grammar(spec, self._leading if leading is None else leading))
        return Guide(compiled.deep_copy(), self._blank, spec.kind)

    def _check_pattern(self, pattern: str | None) -> None:
        """Refuse a white space pattern that is no regular expression, by its own name."""
        matcher = self._library.LLMatcher
        if pattern and (message := matcher.validate_grammar(matcher.grammar_from_regex(pattern))):
            raise _refusal("whitespace_pattern", message)

    def _grammar(self, spec: StructuredOutputsParams, leading: str) -> str:
        """The grammar in the JSON form that llguidance reads, the same for every kind."""
        try:
            return json.dumps({"grammars": _after_leading(leading, self._rule(spec))}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(spec.kind, str(error)) from error

    def _rule(self, spec: StructuredOutputsParams) -> dict[str, Any]:
        """The user's constraint as one llguidance grammar."""
        value = getattr(spec, spec.kind)
        match spec.kind:
            case "json":
                return {"json_schema": _schema(value, spec)}
            case "json_object":
                return {"json_schema": _schema({"type": "object"}, spec)}
            case "regex":
                return json.loads(self._library.LLMatcher.grammar_from_regex(value))["grammars"][0]
            case "choice":
                return {"lark_grammar": self._library.grammar_from("choice", json.dumps(list(value)))}
            case _:
                return {"lark_grammar": self._library.grammar_from("grammar", value)}

    def _compile(self, kind: str, grammar: str) -> "LLMatcher":
        matcher = self._library.LLMatcher(self._vocabulary, grammar, log_level=0)
        matcher.compute_bitmask()  # sets the matcher's error now if no token can begin the text
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error())
        return matcher


class Guide:
    """The grammar's state after the tokens generated so far for one request.

    It advances with sampled tokens only, so it stays valid when a preempted request's cache is computed again.
    """

    def __init__(self, matcher: "LLMatcher", blank: np.ndarray, kind: str) -> None:
        """A guide at the start of a text.

        Args:
            blank: the mask of all tokens that are white space or end a sequence.
            kind: the option the user gave (json, regex ...), for errors.
        """
        self._matcher = matcher
        self._blank = blank
        self._num_blank = 0  # tokens in a row that had to be white space
        self._kind = kind
        self._mask: np.ndarray | None = None

    def mask(self) -> np.ndarray:
        """[ceil(vocab_size / 32)] uint32, read-only: bit i % 32 of word i // 32 is 1 if token i may come next.

        Raises ValueError if no token can: the vocabulary cannot spell what must follow, or the grammar exceeds
        llguidance's limits.
        """
        if self._mask is None:
            # llguidance's mask can be a word longer.
            self._mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32, len(self._blank))
            self._check()
        return self._mask

    def advance(self, token_id: int) -> None:
        """Advance by the sampled token. Raises ValueError if the mask did not allow it, or if only white space has
        been possible for long and the text is not complete.
        """
        self._num_blank = 0 if (self.mask() & ~self._blank).any() else self._num_blank + 1
        self._mask = None
        self._matcher.consume_token(token_id)
        self._check()
        if self._num_blank >= MAX_BLANK and not self.is_finished:
            raise ValueError(
                f"the text must follow {self._kind}, but only white space can come next, and has for {MAX_BLANK} "
                f"tokens; use a {self._kind} that bounds white space and that the tokenizer can spell"
            )

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete: only an end-of-sequence token may follow, or endless white space."""
        stays_blank = self._num_blank >= MAX_BLANK and self._matcher.is_accepting()
        return (self._matcher.is_stopped() or stays_blank) and not self._matcher.is_error()

    def _check(self) -> None:
        # After an error, llguidance's mask allows the end of the sequence, so it must not be used.
        if self._matcher.is_error():
            self._mask = None
            raise ValueError(
                f"the text must follow {self._kind}, but cannot go on: {_reason(self._matcher.get_error())}; "
                f"use a simpler {self._kind}"
            )


class _Vocabulary:
    """The tokenizer in the form that llguidance expects: an object with these attributes, called to encode text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.piece(token_id) for token_id in range(vocab_size)]
        # Special tokens add no text: they are allowed only where the grammar names them.
        special = tokenizer.special_ids.intersection(range(vocab_size)).union(ends)
        self.special_token_ids = sorted(special)
        self._encode = tokenizer.encode
        self._pieces = {
            token_id: piece for token_id, piece in enumerate(self.tokens) if piece and token_id not in special
        }
        self._ids = {piece: token_id for token_id, piece in self._pieces.items()}
        self._longest = max(map(len, self._ids), default=0)

    def blank(self) -> Iterator[int]:
        """The tokens that are white space."""
        return (token_id for token_id, piece in self._pieces.items() if not piece.strip())

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that the grammar forces. llguidance relies on them spelling exactly this text."""
        ids = [token_id for token_id in self._encode(text, add_special_tokens=False) if token_id in self._pieces]
        spelled = b"".join(self._pieces[token_id] for token_id in ids)
        return ids if spelled == text.encode() else self._longest_matches(text.encode())

    def _longest_matches(self, rest: bytes) -> list[int]:
        """Greedy tokenization, for texts that `encode` does not reproduce.

        These are texts that contain a control token's name, are normalised, or get a space in front.
        """
        ids: list[int] = []
        while piece := self._longest_match(rest):
            ids.append(self._ids[piece])
            rest = rest[len(piece) :]
        return ids

    def _longest_match(self, rest: bytes) -> bytes:
        sizes = range(min(len(rest), self._longest), 0, -1)
        return next((rest[:size] for size in sizes if rest[:size] in self._ids), b"")


def _after_leading(leading: str, guided: dict[str, Any]) -> list[dict[str, Any]]:
    """Put the characters that decoding strips from the start of a text (often a space) before the grammar."""
    if not leading:
        return [guided]
    return [{"lark_grammar": f"start: {json.dumps(leading)} @guided"}, guided | {"name": "guided"}]


def _schema(value: str | Mapping[str, Any], spec: StructuredOutputsParams) -> dict[str, Any]:
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object, but is {schema!r}")
    if spec.disable_any_whitespace or spec.whitespace_pattern == "":
        return {**schema, "x-guidance": COMPACT}
    if spec.whitespace_pattern is not None:
        return {**schema, "x-guidance": {"whitespace_pattern": spec.whitespace_pattern}}
    return {"x-guidance": WHITESPACE, **schema}


def _refusal(kind: str, message: str) -> ValueError:
    return ValueError(f"{kind} must be one that can be followed, but is not: {_reason(message)}; correct it")


def _reason(message: str) -> str:
    """The line of llguidance's message that says what is wrong, without the lines that show where."""
    if message.startswith(NO_EXTENSION):
        return "no token of the vocabulary can come next"
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            "guided output needs the llguidance package, which is not installed; pip install 'dcpjax[guided]'"
        ) from error
    return llguidance
