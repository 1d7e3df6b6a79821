"""The structure that a request demands of its generated text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.api.checks import check_bool, check_strings

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one kind of constraint on the generated text. Names are those of vLLM.

    Args:
        json: a JSON schema, as a mapping or as its text; or a pydantic class, whose schema is taken.
        regex: a regular expression that the whole text must match.
        choice: texts, one of which must be generated.
        grammar: a context-free grammar, in Lark's form or as GBNF.
        json_object: True for any JSON object.
        disable_any_whitespace: no white space between the parts of a JSON text.
        whitespace_pattern: a regular expression of the white space that may stand between the parts of a JSON text;
            None allows up to 64 characters of it.

    Raises:
        ValueError: no kind or several are given, one has the wrong type, or white space is set for what is not JSON.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, but has {', '.join(given) or 'none'}"
                f"; use {given[0] if given else KINDS[0]} alone"
            )
        if isinstance(self.json, type):
            object.__setattr__(self, "json", _schema_of(self.json))
        self._check_white_space()
        if self.json_object not in (None, True):
            raise ValueError(f"json_object must be True or None, but is {self.json_object!r}; use True")
        if not isinstance(self.json, str | Mapping | None):
            raise ValueError(
                f"json must be a schema as a mapping or its text, or a pydantic class, but is {self.json!r}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a string, but is {getattr(self, name)!r}")
        if self.choice is not None:
            check_strings("choice", self.choice)
            if not self.choice:
                raise ValueError("choice must hold at least one string, but is empty")

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _check_white_space(self) -> None:
        check_bool("disable_any_whitespace", self.disable_any_whitespace)
        if not isinstance(self.whitespace_pattern, str | None):
            raise ValueError(f"whitespace_pattern must be a string, but is {self.whitespace_pattern!r}")
        given = [name for name in ("disable_any_whitespace", "whitespace_pattern") if getattr(self, name)]
        if given and self.kind not in ("json", "json_object"):
            raise ValueError(f"{given[0]} must come with json or json_object, but comes with {self.kind}; leave it out")
        if len(given) == 2:
            raise ValueError(
                "whitespace_pattern must be None where disable_any_whitespace is True, but is "
                f"{self.whitespace_pattern!r}; leave one out"
            )


def _schema_of(kind: type) -> dict[str, Any]:
    """The JSON schema of a pydantic model or dataclass."""
    try:
        if hasattr(kind, "model_json_schema"):
            return kind.model_json_schema()
        if hasattr(kind, "__pydantic_validator__"):  # a dataclass of pydantic's
            from pydantic import TypeAdapter

            return TypeAdapter(kind).json_schema()
    except Exception as error:  # it has several of its own, for types that JSON cannot express
        raise ValueError(f"json must be a class with a JSON schema, but {kind.__name__} has none: {error}") from error
    raise ValueError(f"json must be a schema as a mapping or its text, or a pydantic class, but is {kind!r}")
