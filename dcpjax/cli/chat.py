"""`dcpjax chat`: a conversation, one line a turn, from a terminal or a pipe."""

import argparse
import contextlib
import re
import sys
from typing import TYPE_CHECKING

import dcpjax
from dcpjax.cli.flags import Flags, Parser, spell
from dcpjax.cli.model import Answer, Choice, add_model_flags, describe_layout, print_stream, say, statistics, timed

if TYPE_CHECKING:
    from dcpjax.api.sampling_params import SamplingParams
    from dcpjax.llm import LLM

MAX_TOKENS = 1024
HELP = """/reset  forget the conversation
/exit   leave, as Ctrl-D does
/help   this list
Ctrl-C stops an answer; what it has said so far stays in the conversation."""


def add_flags(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message that opens the conversation")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="layout, tokens and speed on standard error after each answer; by default with --verbose",
    )
    add_model_flags(parser, max_tokens=MAX_TOKENS)


def run(flags: Flags) -> int:
    """Exit code 0, or 1 if a turn failed."""
    if flags.words:
        raise ValueError(
            f"chat must have no prompt among its flags, but has {flags.words[0]!r}; type it once chat has "
            "started, or use dcpjax generate --chat"
        )
    choice = Choice.from_flags(flags, max_tokens=MAX_TOKENS)
    quiet, verbose = choice.loudness.quiet, choice.loudness.verbose
    llm = choice.open()
    chat = Chat(
        llm, choice.params(llm), system=flags.get("system"), statistics=flags.get("stats", verbose), notes=not quiet
    )
    chat.check()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # line editing; Windows has its own
            import readline  # noqa: F401
        chat.note(f"dcpjax {dcpjax.__version__} | {describe_layout(llm)} | /help lists what is not sent to the model")
    chat.loop()
    return int(chat.failed)


class Chat:
    """One conversation: what has been said, and how the next line goes on."""

    def __init__(
        self, llm: "LLM", params: "SamplingParams", *, system: str | None, statistics: bool, notes: bool
    ) -> None:
        self.llm, self.params, self.statistics, self.notes = llm, params, statistics, notes
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.failed = False

    def check(self) -> None:
        """Raise ValueError now, not at the first line, if the model cannot chat."""
        self._count([*self.opening, {"role": "user", "content": "Hello"}])

    def loop(self) -> None:
        while (line := read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self.opening)
            elif line == "/help":
                say(HELP)
            elif re.fullmatch(r"/\w+", line):
                say(f"{line} must be one of /reset, /exit and /help, but is none")
            elif line.strip():
                self.turn(line)

    def turn(self, line: str) -> None:
        """Send one message and print the answer. A message that fails, or is stopped before any text, is not kept."""
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            tokens = self._count(asked)
            self._check_room(tokens)
        except ValueError as error:
            self._fail(str(error))
            return
        answer = self._answer(asked, tokens)
        if answer.error:
            self._fail(answer.error)
        elif answer.text or answer.finish_reason:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if answer.finish_reason == "length":
            self.note(self._cut(tokens + answer.tokens))

    def note(self, text: str) -> None:
        """What is neither an answer nor an error."""
        if self.notes:
            say(text)

    def _answer(self, asked: list[dict[str, str]], tokens: int) -> Answer:
        answer = Answer()
        with timed(self.llm) as clock:
            try:
                print_stream(self.llm.stream_chat(asked, self.params), answer)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self.note("(stopped)")
        if self.statistics:
            say(statistics(self.llm, prompt_tokens=tokens, new_tokens=answer.tokens, clock=clock))
        return answer

    def _count(self, messages: list[dict[str, str]]) -> int:
        if self.llm.tokenizer is None:
            raise ValueError("chat must have a model with a tokenizer, but this one has none; use another model")
        return len(self.llm.tokenizer.apply_chat_template(messages))

    def _check_room(self, tokens: int) -> None:
        if tokens >= self.llm.max_model_len:
            raise ValueError(
                f"the conversation must be shorter than max_model_len={self.llm.max_model_len} tokens, but has "
                f"{tokens} with this message, which was not sent; /reset forgets the conversation"
            )

    def _cut(self, tokens: int) -> str:
        limit = self.llm.max_model_len
        if tokens >= limit:
            return f"(the conversation has reached --max-model-len {limit}; /reset forgets it)"
        return f"(cut off at --max-tokens {self.params.max_tokens})"

    def _fail(self, message: str) -> None:
        self.failed = True
        say(f"dcpjax: error: {spell(message)}")


def read_line() -> str | None:
    """The next line; None at its end. Asks only on a terminal, where Ctrl-C gives up the line being typed."""
    if not sys.stdin.isatty():
        return _next_line()
    while True:
        try:
            if sys.stdout.isatty():
                return input("> ")
            sys.stderr.write("> ")
            sys.stderr.flush()
            return _next_line()
        except KeyboardInterrupt:
            say("")
        except EOFError:
            say("")
            return None


def _next_line() -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
