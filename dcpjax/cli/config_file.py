"""`--config FILE` and `--print-config`, for every command: flags from a YAML, JSON or TOML file, and back.

A file's values are typed out as flags and read by the command's own parser, so that they are judged in the same
words. Knows parsers and files; knows nothing about models but where generation_config.json lies. Imports nothing heavy.
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
from dcpjax.cli.flags import Flags, Parser, parse, path_or_switch, spell
from dcpjax.cli.model import MODELS_OWN

OWN_FLAGS = ("config", "print_config")  # never in a file


def add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("flags from a file")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a .yaml, .json or .toml file of flags by name, as temperature: 0.7, or in a section with the command's "
        "name; flags given here win over the file, and its section over its top",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print every flag, its value and where it comes from, as YAML that --config reads, and do nothing else",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of one command, and where they come from."""

    words: list[str]
    typed: Mapping[str, Any]
    filed: Mapping[str, Any]
    path: str

    @property
    def flags(self) -> Flags:
        return Flags(words=self.words, given={**self.filed, **self.typed})

    @contextlib.contextmanager
    def naming_file(self) -> Iterator[None]:
        """A sentence about a flag that stands in the file begins with the file's name."""
        try:
            yield
        except ValueError as error:
            flag = re.match(r"--([a-z-]+)", spell(str(error)))
            name = flag[1].replace("-", "_") if flag else ""
            if name in self.filed and name not in self.typed:
                error.args = (f"{self.path}: {spell(str(error))}",)
            raise


def read_settings(flags: Flags, command: str, parsers: Callable[[], Mapping[str, Parser]]) -> Settings:
    """What was typed, and the flags of the file that it names. Raises ValueError for what the file has wrong."""
    path = flags.get("config")
    filed = {} if path is None else _filed(path, command, parsers())
    return Settings(words=flags.words, typed=flags.given, filed=filed, path=str(path))


def to_yaml(parser: Parser, settings: Settings) -> str:
    """Every flag on a line, as `--config` reads it; a comment for what is decided later."""
    models = _asked_by_model(settings.flags.get("model"))
    names = dict.fromkeys(action.dest for action in parser.actions if action.dest not in OWN_FLAGS)
    helps = {action.dest: action.help or "" for action in parser.actions}
    lines = [_line(parser, name, helps[name], settings, models) for name in names]
    return "\n".join([f"# {parser.prog}", *lines])


def _line(parser: Parser, name: str, text: str, settings: Settings, models: Mapping[str, Any]) -> str:
    for source, values in (("command line", settings.typed), ("file", settings.filed)):
        if name in values:
            return f"{name}: {_json(values[name])}  # {source}"
    if name in models and name in MODELS_OWN:
        return f"{name}: {_json(models[name])}  # model"
    default = parser.default(name)
    own = {name: f"the model's own, else {default}"} if name in MODELS_OWN else {}
    if later := {**own, **parser.described}.get(name):
        return f"# {name}: {later}"
    said = re.search(r"\(default: ([^:;)]*)", text) if default is None else None
    return f"{name}: {_json(default)}  # default" + (f": {said[1]}" if said and said[1] != "None" else "")


def _json(value: Any) -> str:
    """JSON is YAML too."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: part for name, part in asdict(value).items() if part is not None}
    return str(value)


def _asked_by_model(model: str | None) -> Mapping[str, Any]:
    """generation_config.json of a folder, or of a hub id that has been fetched; empty where there is none."""
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


def _filed(path: str, command: str, parsers: Mapping[str, Parser]) -> dict[str, Any]:
    content = _read(path)
    sections = {key: value for key, value in content.items() if key in parsers and isinstance(value, Mapping)}
    top = {key: value for key, value in content.items() if key not in sections}
    given: dict[str, Any] = {}
    for entries in (top, sections.get(command, {})):
        try:
            words = _typed_out(entries, command, parsers)
            given |= parse(parsers[command], words).given
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return given


def _typed_out(entries: Mapping[str, Any], command: str, parsers: Mapping[str, Parser]) -> list[str]:
    """A file's entries as they would be typed."""
    known, seen, words = _keys(parsers[command]), dict[str, str](), []
    for key, value in entries.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(_unknown_key(str(key), command, parsers))
        if known[name].dest in seen:
            raise ValueError(f"{key!r} must stand once, but stands beside {seen[known[name].dest]!r}; remove one")
        seen[known[name].dest] = str(key)
        words += _words(known[name], value, parsers[command].default(known[name].dest))
    return words


def _keys(parser: Parser) -> dict[str, argparse.Action]:
    """Name of a key -> its flag. The long names, without --no-: the value says it."""
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


def _words(action: argparse.Action, value: Any, default: Any) -> list[str]:
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
    """What one value looks like when it is typed. YAML reads a bare yes, no, on and off as true and false."""
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
