"""`dcpjax generate`: completes prompts and prints each completion as text or as a JSON object."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dcpjax.cli.flags import Flags, Parser, names_to_flags
from dcpjax.cli.model_flags import ModelArguments, add_model_flags
from dcpjax.cli.statistics import add_stats_flag, statistics_line, timed
from dcpjax.cli.streaming import StreamedCompletion, print_stream
from dcpjax.cli.verbosity import print_stderr

if TYPE_CHECKING:
    from dcpjax.api.sampling_params import SamplingParams
    from dcpjax.llm import LLM

MAX_TOKENS = 256
TITLE_CHARACTERS = 60  # characters of a prompt in the line above its completion


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="read one more prompt from this file, without its last line break; - is standard input; may be repeated",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a message, in the model's chat template; otherwise the prompt's text is continued",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before each prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion, each on a line")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print a single completion while it is generated (default: only on a terminal)",
    )
    add_stats_flag(parser, "at the end (default: only on a terminal or with --verbose)")
    add_model_flags(parser, max_tokens=MAX_TOKENS)


def run(flags: Flags) -> int:
    """Exit code 0, or 1 if a prompt failed."""
    arguments = ModelArguments.from_flags(flags, max_tokens=MAX_TOKENS)
    single = len(flags.positionals) + len(flags.get("prompt_file", [])) == 1 and arguments.sampling.get("n", 1) == 1
    streams = _streams(flags, single)
    if flags.get("system") is not None and not flags.get("chat"):
        raise ValueError("--system must come with --chat, but is given alone; add --chat")
    prompts = read_prompts(flags)
    llm = arguments.open()
    inputs: Any = [_messages(prompt, flags.get("system")) for prompt in prompts] if flags.get("chat") else prompts
    stats = flags.get("stats", arguments.verbosity.shows_statistics)
    if streams:
        return _stream(llm, inputs, arguments.sampling_params(llm), flags, stats)
    return _collect(llm, prompts, inputs, arguments.sampling_params(llm), flags, stats)


def read_prompts(flags: Flags) -> list[str]:
    """The positional prompts, then the files. `-` is standard input in either."""
    prompts = [_read("-") if prompt == "-" else prompt for prompt in flags.positionals]
    prompts += [_read(name) for name in flags.get("prompt_file", [])]
    if not prompts:
        raise ValueError(
            "generate must have a prompt, but has none; "
            'use dcpjax generate "Once upon a time" ... or --prompt-file FILE (- is standard input)'
        )
    return prompts


def _read(name: str) -> str:
    """The text of a file. Bytes that are not UTF-8 become surrogates; the tokenizer refuses only prompts with them."""
    if name == "-":
        text = sys.stdin.read()
    else:
        try:
            with open(name, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                text = file.read()
        except OSError as error:
            raise ValueError(f"--prompt-file must be a readable file, but {name} is not: {error.strerror}") from error
    return text.removesuffix("\n").removesuffix("\r")


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _streams(flags: Flags, single: bool) -> bool:
    if not flags.get("stream"):
        return "stream" not in flags.given and single and not flags.get("json") and sys.stdout.isatty()
    if flags.get("json"):
        raise ValueError("--stream must not come with --json, which prints whole completions; remove one")
    if not single:
        raise ValueError("--stream must have one prompt and --n 1, but has more; remove --stream")
    return True


def _stream(llm: "LLM", inputs: list[Any], params: "SamplingParams", flags: Flags, stats: bool) -> int:
    answer = StreamedCompletion()
    stream = llm.stream_chat if flags.get("chat") else llm.stream
    with timed(llm) as timing:
        print_stream(stream(inputs, params), answer)
    if answer.error:
        return _report_failures([answer.error])
    if stats:
        tokens = count_prompt_tokens(llm, inputs[0])
        print_stderr(statistics_line(llm, prompt_tokens=tokens, new_tokens=answer.tokens, timing=timing))
    return 0


def _collect(
    llm: "LLM", prompts: list[str], inputs: list[Any], params: "SamplingParams", flags: Flags, stats: bool
) -> int:
    complete = llm.chat if flags.get("chat") else llm.generate
    with timed(llm) as timing:
        results = complete(inputs, params)
    write = _write_json if flags.get("json") else _write_text
    write(prompts, results)
    sys.stdout.flush()
    if stats:
        new_tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
        prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
        print_stderr(statistics_line(llm, prompt_tokens=prompt_tokens, new_tokens=new_tokens, timing=timing))
    return _report_failures([result.error for result in results])


def count_prompt_tokens(llm: "LLM", prompt: str | Sequence[dict[str, str]]) -> int:
    """Number of tokens of a text, or of messages in the model's chat template."""
    assert llm.tokenizer is not None  # needed to run a text
    if isinstance(prompt, str):
        return len(llm.tokenizer.encode(prompt))
    return len(llm.tokenizer.apply_chat_template(prompt))


def _write_text(prompts: list[str], results: list[RequestOutput]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        for output in result.outputs:
            if len(prompts) > 1 or len(result.outputs) > 1:
                print(_title(prompt, output, len(result.outputs)))
            if output.text or not output.error:
                print(output.text, end="" if output.text.endswith("\n") else "\n")


def _title(prompt: str, output: CompletionOutput, completions: int) -> str:
    line = " ".join(prompt.split())
    shown = line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 3]}..."
    return f"==> {shown}{f' ({output.index + 1} of {completions})' if completions > 1 else ''} <=="


def _write_json(prompts: list[str], results: list[RequestOutput]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        for output in result.outputs:
            print(json.dumps(_record(prompt, result, output), ensure_ascii=False))


def _record(prompt: str, result: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": output.error and names_to_flags(output.error),
        "usage": {
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
        },
        "timings": _timings(result.metrics),
    }


def _timings(metrics: RequestMetrics | None) -> dict[str, float | None]:
    """Seconds since the prompt arrived; None if it did not happen or was not measured."""
    moments = {
        "scheduled": metrics and metrics.first_scheduled_time,
        "first_token": metrics and metrics.first_token_time,
        "finished": metrics and metrics.finished_time,
    }
    arrival = metrics.arrival_time if metrics else 0.0
    return {name: None if moment is None else round(moment - arrival, 6) for name, moment in moments.items()}


def _report_failures(errors: list[str | None]) -> int:
    for number, error in enumerate(errors, start=1):
        if error:
            which = f"prompt {number}: " if len(errors) > 1 else ""
            print_stderr(f"dcpjax: error: {which}{names_to_flags(error)}")
    return int(any(errors))
