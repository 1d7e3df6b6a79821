"""`dcpjax generate`: prompts in, one text or JSON object each out."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dcpjax.cli.flags import Flags, Parser, spell
from dcpjax.cli.model import Answer, Choice, add_model_flags, print_stream, say, statistics, timed

if TYPE_CHECKING:
    from dcpjax.api.sampling_params import SamplingParams
    from dcpjax.llm import LLM

MAX_TOKENS = 256
SHOWN = 60  # characters of a prompt in the line above its completion


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="one more prompt: the whole file, less its last line end; - is standard input. May be repeated",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a message, which the model's chat template wraps; otherwise a prompt is continued",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message before each prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object per completion and line")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print a single completion as it grows; by default on a terminal",
    )
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="layout, tokens and speed on standard error; by default on a terminal and with --verbose",
    )
    add_model_flags(parser, max_tokens=MAX_TOKENS)


def run(flags: Flags) -> int:
    """Exit code 0, or 1 if a prompt failed."""
    choice = Choice.from_flags(flags, max_tokens=MAX_TOKENS)
    single = len(flags.words) + len(flags.get("prompt_file", [])) == 1 and choice.sampling.get("n", 1) == 1
    streams = _streams(flags, single)
    if flags.get("system") is not None and not flags.get("chat"):
        raise ValueError("--system must come with --chat, but stands alone; add --chat")
    prompts = read_prompts(flags)
    llm = choice.open()
    inputs: Any = [_messages(prompt, flags.get("system")) for prompt in prompts] if flags.get("chat") else prompts
    counts = flags.get("stats", choice.loudness.wants_statistics)
    if streams:
        return _stream(llm, inputs, choice.params(llm), flags, counts)
    return _collect(llm, prompts, inputs, choice.params(llm), flags, counts)


def read_prompts(flags: Flags) -> list[str]:
    """The words, then the files. `-` among the words is standard input too."""
    prompts = [_read("-") if word == "-" else word for word in flags.words]
    prompts += [_read(name) for name in flags.get("prompt_file", [])]
    if not prompts:
        raise ValueError(
            "generate must have a prompt, but has none; "
            'use dcpjax generate "Once upon a time" ... or --prompt-file FILE (- is standard input)'
        )
    return prompts


def _read(name: str) -> str:
    """Bytes that are not UTF-8 stay what they are, so that only this prompt is refused, by the tokenizer."""
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


def _stream(llm: "LLM", inputs: list[Any], params: "SamplingParams", flags: Flags, counts: bool) -> int:
    answer = Answer()
    start = llm.stream_chat if flags.get("chat") else llm.stream
    with timed(llm) as clock:
        print_stream(start(inputs, params), answer)
    if answer.error:
        return _report_failures([answer.error])
    if counts:
        tokens = count_prompt_tokens(llm, inputs[0])
        say(statistics(llm, prompt_tokens=tokens, new_tokens=answer.tokens, clock=clock))
    return 0


def _collect(
    llm: "LLM", prompts: list[str], inputs: list[Any], params: "SamplingParams", flags: Flags, counts: bool
) -> int:
    start = llm.chat if flags.get("chat") else llm.generate
    with timed(llm) as clock:
        results = start(inputs, params)
    write = _write_json if flags.get("json") else _write_text
    write(prompts, results)
    sys.stdout.flush()
    if counts:
        new = sum(len(output.token_ids) for result in results for output in result.outputs)
        old = sum(len(result.prompt_token_ids) for result in results)
        say(statistics(llm, prompt_tokens=old, new_tokens=new, clock=clock))
    return _report_failures([result.error for result in results])


def count_prompt_tokens(llm: "LLM", given: str | Sequence[dict[str, str]]) -> int:
    """Tokens of a text, or of messages inside the model's chat template."""
    assert llm.tokenizer is not None  # a text could not have been run without
    if isinstance(given, str):
        return len(llm.tokenizer.encode(given))
    return len(llm.tokenizer.apply_chat_template(given))


def _write_text(prompts: list[str], results: list[RequestOutput]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        for output in result.outputs:
            if len(prompts) > 1 or len(result.outputs) > 1:
                print(_title(prompt, output, len(result.outputs)))
            if output.text or not output.error:
                print(output.text, end="" if output.text.endswith("\n") else "\n")


def _title(prompt: str, output: CompletionOutput, completions: int) -> str:
    line = " ".join(prompt.split())
    shown = line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."
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
        "error": output.error and spell(output.error),
        "usage": {
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
        },
        "timings": _timings(result.metrics),
    }


def _timings(metrics: RequestMetrics | None) -> dict[str, float | None]:
    """Seconds since the prompt arrived; None for what did not happen or was not measured."""
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
            say(f"dcpjax: error: {which}{spell(error)}")
    return int(any(errors))
