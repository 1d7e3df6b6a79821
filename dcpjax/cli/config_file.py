"""`--config FILE` and `--print-config` of every command: reads flags from a YAML, JSON or TOML file, and prints them.

A file's entries are turned into command-line arguments and read by the command's own parser, so that they are checked
with the same error messages. Imports nothing heavy.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from dcpjax.checkpoint.hub import HUB_ID, read_json
from dcpjax.cli.flags import Flags, Parser, names_to_flags, parse, path_or_switch
from dcpjax.cli.model_flags import MODEL_DEFAULTS

OWN_FLAGS = ("config", "print_config")  # not allowed in a file


def add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("flags from a file")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="read flags from a .yaml, .json or .toml file with entries such as temperature: 0.7, at the top level or "
        "in a section named like the command; the section overrides the top level, the command line both",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print every flag with its value and where that comes from, as YAML that --config reads, and exit",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of one command, and where its flags come from."""

    positionals: list[str]
    from_command_line: Mapping[str, Any]
    from_file: Mapping[str, Any]
    path: str

    @property
    def flags(self) -> Flags:
        return Flags(positionals=self.positionals, given={**self.from_file, **self.from_command_line})

    @contextlib.contextmanager
    def file_named_in_errors(self) -> Iterator[None]:
        """Put the file's name before an error message about a flag that was set in the file."""
        try:
            yield
        except ValueError as error:
            flag = re.match(r"--([a-z-]+)", names_to_flags(str(error)))
            name = flag[1].replace("-", "_") if flag else ""
            if name in self.from_file and name not in self.from_command_line:
                error.args = (f"{self.path}: {names_to_flags(str(error))}",)
            raise


def read_settings(flags: Flags, command: str, parsers: Callable[[], Mapping[str, Parser]]) -> Settings:
    """The given flags and those of the file that `--config` names. Raises ValueError for a mistake in the file."""
    path = flags.get("config")
    from_file = {} if path is None else _flags_from_file(path, command, parsers())
    return Settings(positionals=flags.positionals, from_command_line=flags.given, from_file=from_file, path=str(path))


def to_yaml(parser: Parser, settings: Settings) -> str:
    """One line per flag, as `--config` reads it; a comment if the value is not known yet."""
    model_values = _generation_config(settings.flags.get("model"))
    names = dict.fromkeys(action.dest for action in parser.actions if action.dest not in OWN_FLAGS)
    helps = {action.dest: action.help or "" for action in parser.actions}
    lines = [_line(parser, name, helps[name], settings, model_values) for name in names]
    return "\n".join([f"# {parser.prog}", *lines])


def _line(parser: Parser, name: str, text: str, settings: Settings, model_values: Mapping[str, Any]) -> str:
    for source, values in (("command line", settings.from_command_line), ("file", settings.from_file)):
        if name in values:
            return f"{name}: {_json(values[name])}  # {source}"
    if name in model_values and name in MODEL_DEFAULTS:
        return f"{name}: {_json(model_values[name])}  # model"
    default = parser.default(name)
    model_default = {name: f"the model's own, else {default}"} if name in MODEL_DEFAULTS else {}
    if default_text := {**model_default, **parser.default_texts}.get(name):
        return f"# {name}: {default_text}"
    in_help = re.search(r"\(default: ([^:;)]*)", text) if default is None else None
    return f"{name}: {_json(default)}  # default" + (f": {in_help[1]}" if in_help and in_help[1] != "None" else "")


def _json(value: Any) -> str:
    """A value as JSON, which is also YAML."""
    return json.dumps(value, ensure_ascii=False, default=_to_json_value)


def _to_json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: part for name, part in asdict(value).items() if part is not None}
    return str(value)


def _generation_config(model: str | None) -> Mapping[str, Any]:
    """generation_config.json of a folder, or of a hub id that was fetched before; empty if there is none."""
    if model is None:
        return {}
    path = Path(os.path.expanduser(model)) / "generation_config.json"
    if not path.is_file() and HUB_ID.fullmatch(model):
        with contextlib.suppress(ImportError):
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(model, path.name)
            path = Path(found) if isinstance(found, str) else path
    values = read_json(path) if path.is_file() else {}
    return {name: value for name, value in values.items() if value is not None}


def _flags_from_file(path: str, command: str, parsers: Mapping[str, Parser]) -> dict[str, Any]:
    content = _read(path)
    sections = {key: value for key, value in content.items() if key in parsers and isinstance(value, Mapping)}
    top = {key: value for key, value in content.items() if key not in sections}
    given: dict[str, Any] = {}
    for entries in (top, sections.get(command, {})):
        try:
            arguments = _to_arguments(entries, command, parsers)
            given |= parse(parsers[command], arguments).given
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return given


def _to_arguments(entries: Mapping[str, Any], command: str, parsers: Mapping[str, Parser]) -> list[str]:
    """A file's entries as command-line arguments."""
    known, seen, arguments = _keys(parsers[command]), dict[str, str](), []
    for key, value in entries.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(_unknown_key(str(key), command, parsers))
        if known[name].dest in seen:
            raise ValueError(f"{key!r} must be given once, but is also given as {seen[known[name].dest]!r}; remove one")
        seen[known[name].dest] = str(key)
        arguments += _flag_arguments(known[name], value, parsers[command].default(known[name].dest))
    return arguments


def _keys(parser: Parser) -> dict[str, argparse.Action]:
    """Key in a file -> its flag. Keys are the long names; there are no --no-... keys, as the value can be false."""
    return {
        option.removeprefix("--").replace("-", "_"): action
        for action in parser.actions
        for option in action.option_strings
        if option.startswith("--") and not option.startswith("--no-") and action.dest not in OWN_FLAGS
    }


def _unknown_key(key: str, command: str, parsers: Mapping[str, Parser]) -> str:
    name = key.replace("-", "_")
    if owners := [other for other, parser in parsers.items() if name in _keys(parser)]:
        return f"{key!r} must be a flag of {command}, but is one of {', '.join(owners)}; put it under {owners[0]}:"
    near = difflib.get_close_matches(name, _keys(parsers[command]), n=1)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"see {parsers[command].prog} --help")


def _flag_arguments(action: argparse.Action, value: Any, default: Any) -> list[str]:
    option = next(option for option in action.option_strings if option.startswith("--"))
    if value is None:
        return [] if default is None or action.nargs == 0 else [f"{option}=none"]
    if action.nargs == 0:
        return _switch(action, option, value)
    if not isinstance(value, list):
        return [f"{option}={_text(action, option, value)}"]
    if action.nargs == "+":
        return [option, *(_text(action, option, part) for part in value)] if value else []
    if not isinstance(action, argparse._AppendAction):
        raise ValueError(f"{option} must be one value, but is a list of {len(value)}; remove the others")
    return [f"{option}={_text(action, option, part)}" for part in value]


def _switch(action: argparse.Action, option: str, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise ValueError(f"{option} must be true or false, but is {value!r}; use true")
    negative = [name for name in action.option_strings if name.startswith("--no-")]
    return [option] if value else negative


def _text(action: argparse.Action, option: str, value: Any) -> str:
    """One value as it would be typed. YAML reads yes, no, on and off without quotes as true and false."""
    if isinstance(value, bool | None):
        if action.type is not path_or_switch:
            raise ValueError(f"{option} must be a text or a number, but is {_json(value)}; put it in quotes")
        return str(value).lower()
    return _json(value) if isinstance(value, Mapping | list) else str(value)


def _read(path: str) -> Mapping[str, Any]:
    readers = {".yaml": _yaml, ".yml": _yaml, ".json": json.loads, ".toml": tomllib.loads}
    reader = readers.get(Path(path).suffix.lower())
    if reader is None:
        raise ValueError(f"--config must be a {', '.join(readers)} file, but is {path}; rename it")
    try:
        content = reader(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"--config must be a readable file, but {path} is not: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config must be valid {Path(path).suffix[1:]}, but {path} is not: {reason}") from error
    if not isinstance(content, Mapping | None):
        raise ValueError(f"--config must hold names and values, but {path} holds a {type(content).__name__}")
    return content or {}


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("YAML needs PyYAML; pip install pyyaml, or use .json or .toml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
