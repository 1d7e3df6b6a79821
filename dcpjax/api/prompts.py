"""The forms of a prompt, under vLLM's names. They are plain dicts."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text, and whose cached prompts it may share."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is the text that the result shows with them."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


KEYS = ("prompt", "prompt_token_ids", "cache_salt")
