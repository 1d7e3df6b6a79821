"""The structure that a request demands of its generated text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.api.checks import check_strings, option_names


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one kind of constraint on the generated text. Names are those of vLLM.

    Args:
        json: a JSON schema, as a mapping or as its text.
        regex: a regular expression that the whole text must match.
        choice: texts, one of which must be generated.
        grammar: a context-free grammar, in Lark's form or as GBNF.
        json_object: True for any JSON object.

    Raises:
        ValueError: none or several are given, or one has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = option_names(self)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(names)}, but has {', '.join(given) or 'none'}"
                f"; use {given[0] if given else names[0]} alone"
            )
        if self.json_object not in (None, True):
            raise ValueError(f"json_object must be True or None, but is {self.json_object!r}; use True")
        if not isinstance(self.json, str | Mapping | None):
            raise ValueError(f"json must be a schema as a mapping or its text, but is {self.json!r}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a string, but is {getattr(self, name)!r}")
        if self.choice is not None:
            check_strings("choice", self.choice)
            if not self.choice:
                raise ValueError("choice must hold at least one string, but is empty")
