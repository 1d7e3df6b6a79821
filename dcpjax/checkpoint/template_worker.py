"""The process that renders chat templates: reads tasks as lines of JSON, answers each with one line.

A template is third-party code, sandboxed, but free to loop or to fill the memory. Here the operating system bounds it:
a template that computes for too long ends this process, whatever it is doing.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from dcpjax.checkpoint.template_bounds import TemplateBounds

MAX_REASON = 500  # characters of an error that a template raises
STATM = Path("/proc/self/statm")  # Linux only; without it memory is not bounded


def main() -> None:
    bounds = TemplateBounds(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import transformers.utils.chat_template_utils  # noqa: F401  before memory is bounded

    _bound_memory(bounds.memory_bytes)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(line, bounds)) + "\n")
        answers.flush()


def _bound_memory(more: int) -> None:
    if STATM.exists():
        import resource  # Windows has none

        used = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def _limit_time(seconds: float) -> None:
    """End this process by SIGPROF after so much more CPU time; 0: no more. Windows has no such timer."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(line: str, bounds: TemplateBounds) -> dict[str, str]:
    """`text`, or `error` for what the template refuses, or `bound` for the bound that it broke."""
    _limit_time(bounds.seconds)
    try:
        text = rendered(**json.loads(line))
    except MemoryError:
        return {"bound": bounds.too_much_memory()}
    except Exception as error:  # A template can fail in any way.
        return {"error": str(error)[:MAX_REASON]}
    finally:
        _limit_time(0)
    return {"text": text} if len(text) <= bounds.characters else {"bound": bounds.too_long(len(text))}


def rendered(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    special_tokens: Mapping[str, str],
    added_tokens: Sequence[tuple[str, bool]],
    options: Mapping[str, Any],
    switches: Mapping[str, Any],
) -> str:
    """The conversation as text, in which control tokens that the user's texts spell are marked.

    Args:
        special_tokens: variables such as `bos_token`, which are not the user's.
        added_tokens: all added tokens of the tokenizer, and whether each is special.
        options: transformers' own; `switches`: the template's variables that the user sets.
    """
    from transformers.utils.chat_template_utils import mark_control_tokens, render_jinja_template

    control = _control_tokens(template, added_tokens)
    messages, tools, switches = (mark_control_tokens(value, control) for value in (messages, tools, switches))
    texts, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, **options, **{**special_tokens, **switches}
    )
    return texts[0]


def _control_tokens(template: str, added_tokens: Sequence[tuple[str, bool]]) -> re.Pattern[str]:
    """Special tokens, and other added tokens that the template itself writes; the longest first."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(template)
    written = [node.data for node in parsed.find_all(nodes.TemplateData)]
    written += [node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)]
    literal = "\0".join(written)
    control = [token for token, special in added_tokens if special or (token in literal and not token.isspace())]
    return re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")


class _Generation(Extension):
    """transformers' block around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


if __name__ == "__main__":
    main()
