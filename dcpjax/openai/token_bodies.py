"""Bodies of /tokenize and /detokenize, which vLLM's server has beside OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from dcpjax.api.checks import check_option_names, checked_token_ids
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.openai.json_text import short_field
from dcpjax.openai.request import BodyError

MAX_TOKENS = 2**22
_TEXT = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "return_token_strs",
)


def tokenize(tokenizer: Tokenizer | None, fields: Mapping[str, Any], *, max_model_len: int) -> dict[str, Any]:
    """The token ids of a text, or of a conversation as the chat template writes it. Raises ValueError."""
    known, options = _known(tokenizer), {name: value for name, value in fields.items() if value is not None}
    chat = "messages" in options
    check_option_names(options, _CHAT if chat else _TEXT)
    _check_switches(options)
    ids = _chat_ids(known, options) if chat else _text_ids(known, options)
    spelled = {"token_strs": [known.piece(token).decode("utf-8", "replace") for token in ids]}
    wanted = spelled if options.get("return_token_strs") else {"token_strs": None}
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, **wanted}


def detokenize(tokenizer: Tokenizer | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids. Raises ValueError."""
    known = _known(tokenizer)
    check_option_names(fields, ("model", "tokens"))
    ids = checked_token_ids("tokens", fields.get("tokens"), MAX_TOKENS)
    return {"prompt": known.decode(ids, skip_special_tokens=False)}


def _known(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise BodyError("tokens need a model with a tokenizer, but this one has none; use another model")
    return tokenizer


def _check_switches(options: Mapping[str, Any]) -> None:
    for name in ("add_special_tokens", "return_token_strs", "add_generation_prompt", "continue_final_message"):
        if not isinstance(options.get(name, False), bool):
            raise BodyError(f"{name} must be true or false, but is {short_field(options, name)}")


def _text_ids(tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    text = options.get("prompt")
    if not isinstance(text, str):
        raise BodyError(f"prompt must be a text, but is {short_field(options, 'prompt')}")
    return tokenizer.encode(text, add_special_tokens=options.get("add_special_tokens", True))


def _chat_ids(tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    messages, kwargs = options["messages"], options.get("chat_template_kwargs", {})
    if not isinstance(messages, list) or not messages:
        raise BodyError(f"messages must be a list of at least one message, but is {short_field(options, 'messages')}")
    if not isinstance(kwargs, dict):
        raise BodyError(
            f"chat_template_kwargs must be an object, but is {short_field(options, 'chat_template_kwargs')}"
        )
    continues = options.get("continue_final_message", False)
    return tokenizer.apply_chat_template(
        messages,
        tools=options.get("tools"),
        add_generation_prompt=options.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        chat_template_kwargs=kwargs,
    )
