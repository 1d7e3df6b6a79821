"""Flags made from the fields of option dataclasses: name, type, default and help are written once, there.

Knows argparse and dataclasses; knows nothing about models. Imports nothing heavy.
"""

import argparse
import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from dcpjax.api.checks import check_option_names
from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.planning.options import PlanOptions
from dcpjax.simulation.options import SimOptions

SHORT = {"tensor_parallel_size": "-tp", "decode_context_parallel_size": "-dcp"}  # vLLM's
LOOKS_LIKE_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=|$)")


class Parser(argparse.ArgumentParser):
    """Holds flags only. Raises ValueError instead of leaving; a flag that is not given has no attribute."""

    def __init__(self, *, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.defaults: dict[str, Any] = {}  # of flags made from dataclasses, by name
        self.described: dict[str, str] = {}  # defaults that are no single value, in words

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        """One for each flag, in the order of the help, which is left out."""
        return [action for action in self._actions if action.dest != "help"]

    def default(self, name: str) -> Any:
        """What a flag is worth when it is not given; None where only its help can tell."""
        switches_on = {action.dest for action in self.actions if action.nargs == 0 and action.const is True}
        return self.defaults.get(name, False if name in switches_on else None)

    def error(self, message: str) -> NoReturn:
        """argparse's "argument --x: must be ..." as "--x must be ..."."""
        sentence = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise ValueError(sentence.replace("expected one argument", "must have a value, but has none"))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What was typed after the command: words that are no flags, and the flags that were given."""

    words: list[str]
    given: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def options(self, kind: type) -> dict[str, Any]:
        """The given flags that are fields of this dataclass."""
        return {field.name: self.given[field.name] for field in fields(kind) if field.name in self.given}


def parse(parser: Parser, arguments: Sequence[str]) -> Flags:
    """Flags anywhere among the words; after `--` all are words. Raises ValueError for a flag that is not known."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    namespace, words = parser.parse_known_args([_kebab(parser, word) for word in arguments[:end]])
    for word in words:
        if LOOKS_LIKE_FLAG.match(word):
            raise ValueError(_unknown(parser, word.partition("=")[0]))
    return Flags(words=[*words, *arguments[end + 1 :]], given=vars(namespace))


def add_options(
    parser: Parser,
    title: str,
    kind: type,
    *,
    leave_out: Iterable[str] = (),
    explain: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """A flag for every field of a dataclass, with help from the `Args:` of its docstring.

    `explain` and `defaults` replace a field's help and what it says of the default, `values` the default itself.
    """
    helps = {**field_helps(kind), **(explain or {})}
    parser.described.update(defaults or {})
    group = parser.add_argument_group(title)
    for field in fields(kind):
        if field.name not in leave_out:
            parser.defaults[field.name] = (values or {}).get(field.name, field.default)
            default = parser.described.get(field.name, parser.defaults[field.name])
            names = [flag(field.name), *filter(None, [SHORT.get(field.name)])]
            shape = _shape(field)
            repeated = "; may be repeated" if shape.get("action") in ("append", "extend") else ""
            text = f"{spell_quoted(helps.get(field.name, ''))}{repeated} (default: {default})"
            group.add_argument(*names, help=text.replace("%", "%%"), **shape)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def field_helps(kind: type) -> dict[str, str]:
    """Field name -> its text in the docstring's `Args:`; empty under `python -OO`, which drops docstrings."""
    _, _, after = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    block = after.split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", block, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).rstrip(".") for name, text in entries}


# What ValueErrors call an option -> what was typed. A name of one plain word is one only at the start of a
# sentence or before "=": "n", "stop" and "seed" are English too.
_NAMES = [field.name for kind in (EngineConfig, SamplingParams, PlanOptions, SimOptions) for field in fields(kind)]
_LONG = "|".join(name for name in _NAMES if "_" in name)
_PLAIN = "|".join(["model", *(name for name in _NAMES if "_" not in name)])
_SPELLED = re.compile(
    rf"(?<![\w/.'\"-])(?:{_LONG})(?![\w/'\"-]|\.\w)|^(?:{_PLAIN})(?= )|(?<![\w/.'\"-])(?:{_PLAIN})(?==)"
)


def spell(sentence: str) -> str:
    """Names of options as flags: "block_size must ..." -> "--block-size must ..."."""
    return _SPELLED.sub(lambda match: flag(match[0]), sentence)


def spell_quoted(text: str) -> str:
    """The same for help, where names stand in backticks."""
    return re.sub(r"`([^`]*)`", lambda match: flag(match[1]) if match[1] in _NAMES else match[1], text)


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, but is {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, but is {text!r}") from None


def integers(text: str) -> list[int]:
    return [integer(part) for part in text.split(",")]


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, but is {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, but is {text!r}")
    return value


def structured_outputs(text: str) -> StructuredOutputsParams:
    value = json_object(text)
    try:
        check_option_names(value, [field.name for field in fields(StructuredOutputsParams)])
        return StructuredOutputsParams(**value)
    except ValueError as error:  # argparse would replace its sentence
        raise argparse.ArgumentTypeError(str(error).removeprefix("structured_outputs ")) from None


def path_or_switch(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


def _shape(field: Field[Any]) -> dict[str, Any]:
    """How argparse reads a field of this type. Values are judged by the dataclass, in its own words."""
    kind, kinds = field.type, get_args(field.type)
    if get_origin(kind) is Literal:
        return {"metavar": f"{{{','.join(kinds)}}}"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if bool in kinds:
        return {"type": path_or_switch, "metavar": "PATH"}
    if Sequence[int] in kinds:
        return {"type": integers, "action": "extend", "metavar": "ID[,ID...]"}
    if Sequence[str] in kinds:
        return {"action": "append", "metavar": "TEXT"}
    if StructuredOutputsParams in kinds:
        return {"type": structured_outputs, "metavar": "JSON"}
    if any(get_origin(one) is dict for one in kinds):
        return {"type": json_object, "metavar": "JSON"}
    plain = next((one for one in (int, float) if one is kind or one in kinds), None)
    assert plain is not None, f"no flag can be made of {field.name}: {kind}"
    read = integer if plain is int else number
    metavar = "N" if plain is int else "X"
    return {"type": _or_none(read) if NoneType in kinds else read, "metavar": metavar}


def _kebab(parser: Parser, word: str) -> str:
    """`--max_tokens`, as Python spells it, is read as `--max-tokens`."""
    name, equals, value = word.partition("=")
    kebab = name.replace("_", "-")
    return f"{kebab}{equals}{value}" if kebab in parser.flags else word


def _unknown(parser: Parser, name: str) -> str:
    """Flags are never abbreviated, but the beginning of one is a good hint."""
    kebab, known = name.replace("_", "-"), [known for known in parser.flags if known.startswith("--")]
    near = [flag for flag in known if flag.startswith(kebab)][:3]
    near = near or difflib.get_close_matches(kebab, known, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"see {parser.prog} --help"
    return f"unknown flag {name}; {hint}"
