"""Flags made from option dataclasses, which define the name, type, default and help of each; imports nothing heavy."""

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
from dcpjax.server.options import ServeOptions
from dcpjax.simulation.options import SimOptions

SHORT = {"tensor_parallel_size": "-tp", "decode_context_parallel_size": "-dcp"}  # vLLM's
LOOKS_LIKE_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=|$)")


class Parser(argparse.ArgumentParser):
    """A parser of flags; other arguments are returned as they are, see `parse`.

    It raises ValueError instead of exiting. A flag that is not given has no attribute in the namespace.
    """

    def __init__(self, *, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.defaults: dict[str, Any] = {}  # of flags made from dataclasses, by name
        self.default_texts: dict[str, str] = {}  # name -> text for a default that is not a fixed value

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        """The actions of all flags except --help, in the order of the help text."""
        return [action for action in self._actions if action.dest != "help"]

    def default(self, name: str) -> Any:
        """The value of a flag that is not given; None if it has no fixed default."""
        switches_on = {action.dest for action in self.actions if action.nargs == 0 and action.const is True}
        return self.defaults.get(name, False if name in switches_on else None)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's "argument --x: must be ..." into "--x must be ..." and raise it."""
        sentence = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise ValueError(sentence.replace("expected one argument", "must have a value, but has none"))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The arguments of a command: positional ones, and flags by name with their values."""

    positionals: list[str]
    given: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def options(self, kind: type) -> dict[str, Any]:
        """The given flags that are fields of this dataclass."""
        return {field.name: self.given[field.name] for field in fields(kind) if field.name in self.given}


def parse(parser: Parser, arguments: Sequence[str]) -> Flags:
    """Parse flags and positional arguments in any order; after `--` all arguments are positional.

    Raises ValueError for an unknown flag.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    namespace, positionals = parser.parse_known_args([_with_hyphens(parser, text) for text in arguments[:end]])
    for text in positionals:
        if LOOKS_LIKE_FLAG.match(text):
            raise ValueError(_unknown_flag(parser, text.partition("=")[0]))
    return Flags(positionals=[*positionals, *arguments[end + 1 :]], given=vars(namespace))


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
    """Add a flag for every field of a dataclass, with help from the `Args:` of its docstring.

    By name of a field, `explain` replaces the help, `defaults` the text about the default, and `values` the default.
    """
    helps = {**field_helps(kind), **(explain or {})}
    parser.default_texts.update(defaults or {})
    group = parser.add_argument_group(title)
    for field in fields(kind):
        if field.name not in leave_out:
            parser.defaults[field.name] = (values or {}).get(field.name, field.default)
            default = parser.default_texts.get(field.name, parser.defaults[field.name])
            names = [flag(field.name), *filter(None, [SHORT.get(field.name)])]
            reading = _argparse_options(field)
            repeated = "; may be repeated" if reading.get("action") in ("append", "extend") else ""
            text = f"{_quoted_names_to_flags(helps.get(field.name, ''))}{repeated} (default: {default})"
            group.add_argument(*names, help=text.replace("%", "%%"), **reading)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def field_helps(kind: type) -> dict[str, str]:
    """Name of a field -> its text in the docstring's `Args:`; empty under `python -OO`, which removes docstrings."""
    _, _, after = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    block = after.split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", block, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).rstrip(".") for name, text in entries}


# Names of options in error messages. A name without an underscore ("n", "stop", "seed") can be an English word as well,
# so it counts only at the start of a sentence or before "=".
_NAMES = [
    field.name
    for kind in (EngineConfig, SamplingParams, PlanOptions, SimOptions, ServeOptions)
    for field in fields(kind)
]
_LONG = "|".join(name for name in _NAMES if "_" in name)
_PLAIN = "|".join(["model", *(name for name in _NAMES if "_" not in name)])
_OPTION_NAME = re.compile(
    rf"(?<![\w/.'\"-])(?:{_LONG})(?![\w/'\"-]|\.\w)|^(?:{_PLAIN})(?= )|(?<![\w/.'\"-])(?:{_PLAIN})(?==)"
)


def names_to_flags(sentence: str) -> str:
    """Replace names of options by flags: "block_size must ..." -> "--block-size must ..."."""
    return _OPTION_NAME.sub(lambda match: flag(match[0]), sentence)


def _quoted_names_to_flags(text: str) -> str:
    """The same for help texts, where names are in backticks; the backticks are removed."""
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
    except ValueError as error:  # argparse would replace its message
        raise argparse.ArgumentTypeError(str(error).removeprefix("structured_outputs ")) from None


def path_or_switch(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


def _or_words(words: Sequence[str], read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: text if text in words else read(text)


def _argparse_options(field: Field[Any]) -> dict[str, Any]:
    """How argparse reads a field of this type. The dataclass checks the value, with its own error messages."""
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
    if kind is str or str in kinds:
        return {"metavar": "NAME"}
    if StructuredOutputsParams in kinds:
        return {"type": structured_outputs, "metavar": "JSON"}
    if any(get_origin(one) is dict for one in kinds):
        return {"type": json_object, "metavar": "JSON"}
    plain = next((one for one in (int, float) if one is kind or one in kinds), None)
    assert plain is not None, f"no flag can be made of {field.name}: {kind}"
    read = integer if plain is int else number
    metavar = "N" if plain is int else "X"
    words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
    read = _or_words(words, read) if words else read
    return {"type": _or_none(read) if NoneType in kinds else read, "metavar": "|".join([metavar, *words])}


def _with_hyphens(parser: Parser, argument: str) -> str:
    """Accept `--max_tokens`, with the underscores of Python, as `--max-tokens`."""
    name, equals, value = argument.partition("=")
    hyphenated = name.replace("_", "-")
    return f"{hyphenated}{equals}{value}" if hyphenated in parser.flags else argument


def _unknown_flag(parser: Parser, name: str) -> str:
    """Abbreviated flags are not accepted, but they are used to suggest whole ones."""
    hyphenated, known = name.replace("_", "-"), [known for known in parser.flags if known.startswith("--")]
    near = [flag for flag in known if flag.startswith(hyphenated)][:3]
    near = near or difflib.get_close_matches(hyphenated, known, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"see {parser.prog} --help"
    return f"unknown flag {name}; {hint}"
