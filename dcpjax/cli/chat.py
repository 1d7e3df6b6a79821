"""`dcpjax chat`: a conversation on a terminal or from a pipe; each line is one message."""

import contextlib
import re
import sys
from typing import TYPE_CHECKING

import dcpjax
from dcpjax.cli.flags import Flags, Parser, names_to_flags
from dcpjax.cli.model_flags import ModelArguments, add_model_flags
from dcpjax.cli.statistics import add_stats_flag, describe_layout, statistics_line, timed
from dcpjax.cli.streaming import StreamedCompletion, print_stream
from dcpjax.cli.verbosity import print_stderr

if TYPE_CHECKING:
    from dcpjax.api.sampling_params import SamplingParams
    from dcpjax.llm import LLM

MAX_TOKENS = 1024
HELP = """/reset  forget the conversation
/exit   leave, as Ctrl-D does
/help   this list
Ctrl-C stops an answer; what it has said so far stays in the conversation."""


def add_flags(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message at the start of the conversation")
    add_stats_flag(parser, "after each answer (default: only with --verbose)")
    add_model_flags(parser, max_tokens=MAX_TOKENS)


def run(flags: Flags) -> int:
    """Exit code 0, or 1 if a turn failed."""
    if flags.positionals:
        raise ValueError(
            f"chat must have no prompt among its flags, but has {flags.positionals[0]!r}; type it once chat has "
            "started, or use dcpjax generate --chat"
        )
    arguments = ModelArguments.from_flags(flags, max_tokens=MAX_TOKENS)
    verbosity = arguments.verbosity
    llm = arguments.open()
    chat = Chat(
        llm,
        arguments.sampling_params(llm),
        system=flags.get("system"),
        statistics=flags.get("stats", verbosity.verbose),
        notes=not verbosity.quiet,
    )
    chat.check()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # line editing; Windows consoles have it built in
            import readline  # noqa: F401
        chat.note(f"dcpjax {dcpjax.__version__} | {describe_layout(llm)} | /help lists the commands")
    chat.loop()
    return int(chat.failed)


class Chat:
    """One conversation: its messages so far, and the handling of the next line."""

    def __init__(
        self, llm: "LLM", params: "SamplingParams", *, system: str | None, statistics: bool, notes: bool
    ) -> None:
        self.llm, self.params, self.statistics, self.notes = llm, params, statistics, notes
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.failed = False

    def check(self) -> None:
        """Raise ValueError if the model cannot chat, before the first line is read."""
        self._count([*self.opening, {"role": "user", "content": "Hello"}])

    def loop(self) -> None:
        while (line := read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self.opening)
            elif line == "/help":
                print_stderr(HELP)
            elif re.fullmatch(r"/\w+", line):
                print_stderr(f"{line} must be one of /reset, /exit and /help, but is none of them")
            elif line.strip():
                self.turn(line)

    def turn(self, line: str) -> None:
        """Send one message and print the answer. A message that fails, or is stopped before any text, is forgotten."""
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            tokens = self._count(messages)
            self._check_room(tokens)
        except ValueError as error:
            self._fail(str(error))
            return
        answer = self._answer(messages, tokens)
        if answer.error:
            self._fail(answer.error)
        elif answer.text or answer.finish_reason:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        if answer.finish_reason == "length":
            self.note(self._cut_off_note(tokens + answer.tokens))

    def note(self, text: str) -> None:
        """Print something that is neither an answer nor an error; not with --quiet."""
        if self.notes:
            print_stderr(text)

    def _answer(self, messages: list[dict[str, str]], tokens: int) -> StreamedCompletion:
        answer = StreamedCompletion()
        with timed(self.llm) as timing:
            try:
                print_stream(self.llm.stream_chat(messages, self.params), answer)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self.note("(stopped)")
        if self.statistics:
            print_stderr(statistics_line(self.llm, prompt_tokens=tokens, new_tokens=answer.tokens, timing=timing))
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

    def _cut_off_note(self, tokens: int) -> str:
        limit = self.llm.max_model_len
        if tokens >= limit:
            return f"(the conversation has reached --max-model-len {limit}; /reset forgets it)"
        return f"(cut off at --max-tokens {self.params.max_tokens})"

    def _fail(self, message: str) -> None:
        self.failed = True
        print_stderr(f"dcpjax: error: {names_to_flags(message)}")


def read_line() -> str | None:
    """The next line; None at the end of the input. On a terminal it prints "> ", and Ctrl-C discards the line."""
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
            print_stderr("")
        except EOFError:
            print_stderr("")
            return None


def _next_line() -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
