"""Text to token ids and back, and chat messages to token ids.

From tokenizer.json and tokenizer_config.json, or from the vocabulary inside a GGUF file. Chat templates come from the
checkpoint or the caller, and transformers' sandbox renders them, in a process of its own (`template_process`).
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as Backend

from dcpjax.checkpoint.detokenizer import Detokenizer, Leading, decoding_rule
from dcpjax.checkpoint.gguf_header import read_header
from dcpjax.checkpoint.gguf_tokenizer import gguf_backend, gguf_tokenizer_config
from dcpjax.checkpoint.hub import read_json
from dcpjax.checkpoint.interruptible import interruptibly
from dcpjax.checkpoint.messages import (
    check_tools,
    checked_messages,
    decoded_arguments,
    nested_keys,
    with_arguments,
)
from dcpjax.checkpoint.plain_file import MOST_BYTES, check_plain_file, read_text
from dcpjax.checkpoint.template_process import TemplateProcess, template_process

TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
LARGEST_BACKEND_ID = 2**32 - 1
LONG_TEXT = 1 << 15  # characters: from here on, tokenising takes longer than some ten milliseconds
# a tool call's arguments, which show how a template takes a text
PROBE = '{"probe of arguments": "as a text"}'
# arguments of transformers' apply_chat_template, which `chat_template_kwargs` must not set
RENDER_ARGUMENTS = frozenset(
    [
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
    ]
)


class Tokenizer:
    """One vocabulary. Ids outside it decode to nothing."""

    def __init__(self, backend: Backend, config: Mapping[str, Any]) -> None:
        """`config` is in the form of tokenizer_config.json: names of special tokens, and `chat_template`."""
        # Stored truncation and padding are for training; Hugging Face ignores both on every call too.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config = config
        self._rule = decoding_rule(backend.decoder)
        self._pieces: dict[int, bytes] = {}
        self._templates: TemplateProcess = template_process()
        # held to encode a rendered chat, which sets options of the tokenizer and fails while another thread uses it
        self._encoding = Lock()
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id: int | None = self._token_id("bos_token")
        self.eos_token_id: int | None = self._token_id("eos_token")

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """tokenizer.json as it stands, the names in tokenizer_config.json, and the chat template."""
        path = folder / "tokenizer.json"
        check_plain_file(path, MOST_BYTES)
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # The library raises the bare Exception.
            raise ValueError(
                f"{path} must be a readable tokenizer.json, but is not: {error}; fetch it again"
            ) from error
        return cls(backend, _folder_config(folder))

    @classmethod
    def from_gguf(cls, path: Path) -> "Tokenizer":
        """The vocabulary inside a GGUF file. Raises ValueError for a kind that cannot be rebuilt exactly."""
        header = read_header(path)
        return cls(gguf_backend(header), gguf_tokenizer_config(header))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Control tokens spelled in the text become control tokens, as in Hugging Face."""
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, but is a {type(text).__name__}; pass token ids as such")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text must be valid Unicode, but holds a lone surrogate at position {error.start}; remove it"
            ) from error
        if len(text) <= LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        encode = partial(self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        return interruptibly(encode)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All bytes of the tokens, read as UTF-8 once; bytes that are not UTF-8 read as U+FFFD."""
        pieces = b"".join(self.piece(token_id, skip_special_tokens) for token_id in ids)
        return self.leading().strip(pieces.decode("utf-8", "replace"))

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        shown_tokens: Iterable[str] = (),
    ) -> Detokenizer:
        """`decode` for tokens that come one at a time and continue a prompt.

        The text of the prompt and the new text are together what `decode` gives for all ids at once, with the special
        tokens among `shown_tokens` even if others are skipped.
        """
        shown = map(self._backend.token_to_id, shown_tokens)
        hidden = self.special_ids.difference(shown) if skip_special_tokens else frozenset()
        made = Detokenizer(self.piece, self.leading(), hidden)
        made.follow(prompt_token_ids)
        return made

    def leading(self) -> Leading:
        """A new object that strips from the start of a text what decoding removes there."""
        return self._rule.leading()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template only, messages are plain text.

        Text parts of one message are joined by newlines. `chat_template_kwargs` are variables of the template: true,
        false, a number or a string. `chat_template` replaces the checkpoint's own. The arguments of tool calls are
        objects, or the JSON texts of OpenAI's API. Raises ValueError for what the template refuses, and for a template
        that breaks one of the `TemplateBounds`.
        """
        _check_chat_template(chat_template, self._config.get("chat_template"))
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt must be False when continue_final_message is True")
        checked = checked_messages(messages)
        check_tools(tools)
        task = self._template_task(
            checked,
            tools=tools and list(tools),
            chat_template=chat_template,
            options={
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            },
            switches=self._checked_template_kwargs(chat_template_kwargs or {}),
        )
        return self._encode_marked(self._templates.render(task))

    def chat_template(self, *, has_tools: bool) -> str | None:
        """The text of the checkpoint's own template for such conversations; None if it has none."""
        own = self._config.get("chat_template")
        if isinstance(own, Mapping):
            own = own.get("tool_use" if has_tools and "tool_use" in own else "default")
        return own if isinstance(own, str) else None

    def _template_task(
        self, messages: list[dict[str, Any]], tools: Any, chat_template: str | None, **task: Any
    ) -> dict[str, Any]:
        """What the template process is asked for."""
        self._templates.start()  # it gets ready while transformers is imported here
        template = self._chat_template(chat_template, tools)
        added = self._backend.get_added_tokens_decoder().values()
        task |= {
            "template": template,
            "tools": tools,
            "special_tokens": self.hugging_face.special_tokens_map,
            "added_tokens": [(token.content, token.special) for token in added],
        }
        # Many templates fail on null, or write it, where they would pass over a missing key.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        fitting = self._with_fitting_arguments(given, task)
        self._check_no_control_tokens([fitting, tools])
        return task | {"messages": fitting}

    def _chat_template(self, given: str | None, tools: Any) -> str:
        """The one that is given, the checkpoint's only one, or of several that with the right name."""
        try:
            return self.hugging_face.get_chat_template(given, tools)
        except Exception as error:
            raise ValueError(f"the model's chat template must be a text, but cannot be used: {error}") from error

    def _with_fitting_arguments(self, messages: list[dict[str, Any]], task: dict[str, Any]) -> list[dict[str, Any]]:
        """Arguments of tool calls that are JSON texts, as OpenAI's API gives them, in the form the template wants.

        A template that writes a text as it stands gets the text, any other (that reads entries, or uses `tojson`) the
        object that it spells.
        """
        probe = with_arguments(messages, lambda place, text: PROBE)
        if probe == messages:
            return messages
        try:
            keeps_text = PROBE in self._templates.render(task | {"messages": probe})
        except ValueError:
            keeps_text = False
        return messages if keeps_text else with_arguments(messages, decoded_arguments)

    def _checked_template_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in kwargs.items():
            if name in RENDER_ARGUMENTS:
                raise ValueError(f"chat_template_kwargs must be the template's own switches, but hold {name!r}")
            if not isinstance(value, bool | int | float | str | None):
                raise ValueError(
                    f"chat_template_kwargs must be true, false, numbers or words, but {name!r} is {value!r}"
                )
        self._check_no_control_tokens({str(value): None for value in kwargs.values()})
        return dict(kwargs)

    def _token_id(self, name: str) -> int | None:
        token = self._special_token(name)
        return None if token is None else self._backend.token_to_id(token)

    def _special_token(self, name: str) -> str | None:
        """tokenizer_config.json holds a token as its text, or as an object with its text in `content`."""
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def piece(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes a token adds to a text."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        if token_id not in self._pieces:
            token = self._backend.id_to_token(token_id) if 0 <= token_id <= LARGEST_BACKEND_ID else None
            self._pieces[token_id] = b"" if token is None else self._rule.piece(token)
        return self._pieces[token_id]

    def known_ids(self, size: int) -> list[bool]:
        """For each id below `size` whether it belongs to a token: a vocabulary can have holes."""
        token_of = self._backend.id_to_token
        return [token_of(token_id) is not None for token_id in range(size)]

    def _check_no_control_tokens(self, value: Any) -> None:
        """Refuse keys that spell a control token: the renderer escapes values, but not keys, which tool calls print."""
        tokens = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        for key in nested_keys(value):
            found = next((token for token in tokens if token.strip() and token in str(key)), None)
            if found:
                raise ValueError(f"a key must not spell a control token, but {key!r} holds {found!r}; rename it")

    def _encode_marked(self, text: str) -> list[int]:
        """Token ids of a rendered text. What is marked spells control tokens, but is the user's: it is plain text."""
        from transformers.utils.chat_template_utils import encode_marked_chat

        try:
            with self._encoding:
                return encode_marked_chat(self.hugging_face, text)
        except Exception as error:  # the tokenizer's library raises the bare Exception
            raise ValueError(f"messages must fit the model's tokenizer, but it refused them: {error}") from error

    @cached_property
    def hugging_face(self) -> Any:
        """The same vocabulary and templates as a tokenizer of transformers: for users, and to encode rendered chats."""
        with _without_torch_advice():
            from transformers import PreTrainedTokenizerFast
        names = {name: self._special_token(name) for name in TEMPLATE_TOKENS}
        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            chat_template=self._config.get("chat_template"),
            model_input_names=["input_ids", "attention_mask"],
            **{name: token for name, token in names.items() if token is not None},
        )


def _check_chat_template(given: Any, own: Any) -> None:
    if given is not None and not isinstance(given, str):
        raise ValueError(f"chat_template must be the text of a template, but is {type(given).__name__}")
    if not given and not own:
        raise ValueError(
            "chat needs a model with a chat template, but this one has none; use generate, or pass chat_template"
        )


def _folder_config(folder: Path) -> dict[str, Any]:
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(path) if path.exists() else {}
    config["chat_template"] = _named_templates(config.get("chat_template"))
    if template.exists():
        config["chat_template"] = read_text(template)
    return config


def _named_templates(template: Any) -> str | dict[str, str] | None:
    """One template, or several by name ("default", "tool_use"), which older files list as pairs."""
    if not isinstance(template, list):
        return template
    try:
        return {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise ValueError(
            "chat_template in tokenizer_config.json must be a text, or a list of objects with name and "
            f"template, but an object lacks {error}; correct the file"
        ) from error


@contextlib.contextmanager
def _without_torch_advice() -> Iterator[None]:
    """transformers advises installing PyTorch when imported without it; chat templates need none."""
    logger = logging.getLogger("transformers")

    def unrelated(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(unrelated)
    try:
        yield
    finally:
        logger.removeFilter(unrelated)
