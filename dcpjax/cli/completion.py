"""`dcpjax completion bash|zsh|fish`: a script that completes commands, flags and their values, made from the parsers.

Knows parsers and three shells' ways to say the same; knows nothing about what commands do.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dcpjax.checkpoint.hub import ALIASES
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.cli.flags import Flags, Parser

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": 'eval "$(dcpjax completion bash)" in ~/.bashrc',
    "zsh": "dcpjax completion zsh > a file named _dcpjax in a folder of $fpath, before compinit",
    "fish": "dcpjax completion fish > ~/.config/fish/completions/dcpjax.fish",
}


class Values(NamedTuple):
    """What may stand in one place: some words, files, or what nobody can guess."""

    words: tuple[str, ...] = ()
    files: bool = False

    @classmethod
    def of(cls, metavar: str) -> "Values":
        """`{a,b}` are words, FILE and PATH are files, MODEL is both."""
        if metavar.startswith("{"):
            return cls(tuple(metavar.strip("{}").split(",")))
        return cls((*ALIASES, *PRESETS) if metavar == "MODEL" else (), metavar in ("FILE", "PATH", "MODEL"))


class Offer(NamedTuple):
    """One flag."""

    names: tuple[str, ...]
    values: Values | None  # None: it takes no value
    summary: str


class Command(NamedTuple):
    summary: str
    offers: tuple[Offer, ...]
    words: Values  # what may stand there that is no flag

    @property
    def names(self) -> list[str]:
        return [name for offer in self.offers for name in offer.names]


def run(flags: Flags, parsers: Mapping[str, Parser], words: Mapping[str, str]) -> int:
    """Print the script. `words` is, for each command, the metavar of what it takes besides flags."""
    if len(flags.words) != 1 or flags.words[0] not in SHELLS:
        has = " ".join(flags.words) or "none"
        raise ValueError(f"completion must have one of {', '.join(SHELLS)}, but has {has}; use {SHELLS[0]}")
    commands = {
        name: Command(str(parser.description), tuple(_offers(parser)), Values.of(words[name]))
        for name, parser in parsers.items()
    }
    make = {"bash": bash, "zsh": zsh, "fish": fish}[flags.words[0]]
    print(f"{make(commands)}\n# to use it: {INSTALL[flags.words[0]]}")
    return 0


def _offers(parser: Parser) -> Iterator[Offer]:
    yield Offer(("--help",), None, "show this help")
    for action in parser.actions:
        values = None if action.nargs == 0 else Values.of(str(action.metavar or action.dest.upper()))
        summary = re.split(r" \(|[;:.](?:\s|$)", (action.help or "").replace("%%", "%"))[0]
        yield Offer(tuple(action.option_strings), values, summary)


def bash(commands: Mapping[str, Command]) -> str:
    cases = "\n".join(
        f"        {pattern}) {_bash_values(values) if values.words or values.files else 'return'} ;;"
        for pattern, values in _value_patterns(commands)
    )
    every = "\n".join(
        f"            {name}) words='{' '.join((*command.words.words, *command.names))}'"
        f"{' files=yes' if command.words.files else ''} ;;"
        for name, command in commands.items()
    )
    return f"""_dcpjax() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local words='' files=''
    COMPREPLY=()
    if [[ $previous == '=' ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if [[ $current == '=' ]]; then current=''; fi
    if ((COMP_CWORD == 1)); then command='' words='{" ".join(commands)} --help --version'; fi
    case "$command $previous" in
{cases}
        *)
            case "$command" in
{every}
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $files ]]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}}
complete -F _dcpjax dcpjax"""


def _bash_values(values: Values) -> str:
    return f"words='{' '.join(values.words)}' files={'yes' if values.files else ''}"


def zsh(commands: Mapping[str, Command]) -> str:
    listed = "\n".join(f"        {_quoted(f'{name}:{command.summary}')}" for name, command in commands.items())
    cases = "\n".join(
        f"        {pattern}) {_zsh_values(values) or ':'}; return ;;" for pattern, values in _value_patterns(commands)
    )
    every = "\n".join(
        f"        {name}) compadd -- {' '.join(command.names)}; {_zsh_values(command.words) or ':'} ;;"
        for name, command in commands.items()
    )
    return f"""#compdef dcpjax
_dcpjax() {{
    local -a commands=(
{listed}
    )
    if ((CURRENT == 2)); then _describe command commands; compadd -- --help --version; return; fi
    case "$words[2] $words[CURRENT-1]" in
{cases}
    esac
    case "$words[2]" in
{every}
    esac
}}
if [ "$funcstack[1]" = _dcpjax ]; then _dcpjax "$@"; else compdef _dcpjax dcpjax; fi"""


def _zsh_values(values: Values) -> str:
    words = f"compadd -- {' '.join(values.words)}" if values.words else ""
    return "; ".join(filter(None, [words, "_files" if values.files else ""]))


def _value_patterns(commands: Mapping[str, Command]) -> Iterator[tuple[str, Values]]:
    """A pattern of `command flag`, and what may follow; flags with equal values share one."""
    found: dict[tuple[str, Values], list[str]] = {}
    for name, command in commands.items():
        for offer in command.offers:
            if offer.values is not None:
                found.setdefault((name, offer.values), []).extend(f"'{name} {flag}'" for flag in offer.names)
    return (("|".join(patterns), values) for (_, values), patterns in found.items())


def fish(commands: Mapping[str, Command]) -> str:
    lines = ["complete -c dcpjax -f"]
    for name, command in commands.items():
        lines.append(f"complete -c dcpjax -n __fish_use_subcommand -a {name} -d {_quoted(command.summary)}")
        inside = f"complete -c dcpjax -n '__fish_seen_subcommand_from {name}'"
        if command.words.files:
            lines.append(f"{inside} -F")
        if command.words.words:
            lines.append(f"{inside} -a {_quoted(' '.join(command.words.words))}")
        lines += [f"{inside} {_fish_flag(offer)} -d {_quoted(offer.summary)}" for offer in command.offers]
    return "\n".join(lines)


def _fish_flag(offer: Offer) -> str:
    names = " ".join(_fish_name(name) for name in offer.names)
    if offer.values is None:
        return names
    words = f" -a {_quoted(' '.join(offer.values.words))}" if offer.values.words else ""
    return f"{names} {'-r -F' if offer.values.files else '-x'}{words}"


def _fish_name(name: str) -> str:
    """`--long` is -l, `-s` is -s, and `-old`, a long name behind one dash, is -o."""
    kind = "l" if name.startswith("--") else "s" if len(name) == 2 else "o"
    return f"-{kind} {name.lstrip('-')}"


def _quoted(text: str) -> str:
    """For zsh and fish alike: neither a quote nor a backslash is left inside."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"
