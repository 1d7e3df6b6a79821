"""Text to token ids and back, and chat messages to token ids.

Knows tokenizer.json, tokenizer_config.json and the vocabulary inside a GGUF file; knows nothing about models
or sampling. Chat templates come from the checkpoint only, and transformers' sandbox renders them, in
`_render_chat`.
"""

import codecs
import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dcpjax.gguf_file import GGUFHeader, read_header
from dcpjax.hub import read_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_TOKEN_ID = 2**32 - 1


class Tokenizer:
    """One vocabulary. Ids outside it decode to nothing."""

    def __init__(self, backend: Backend, config: Mapping[str, Any]) -> None:
        """`config` is in the form of tokenizer_config.json: names of special tokens, and `chat_template`."""
        # A stored truncation or padding belongs to training; Hugging Face drops both on every call too.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config = config
        self._rule = _text_rule(backend.decoder)
        self._pieces: dict[int, bytes] = {}
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id: int | None = self._token_id("bos_token")
        self.eos_token_id: int | None = self._token_id("eos_token")

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """tokenizer.json as it stands, the names in tokenizer_config.json, and the chat template."""
        path = folder / "tokenizer.json"
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
        return cls(_gguf_backend(header), _gguf_tokenizer_config(header))

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
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All bytes of the tokens, read as UTF-8 once; bytes that are not UTF-8 read as U+FFFD."""
        pieces = b"".join(self._piece(token_id, skip_special_tokens) for token_id in ids)
        return self._rule.leading().strip(pieces.decode("utf-8", "replace"))

    def detokenizer(self, skip_special_tokens: bool = True) -> "Detokenizer":
        """`decode`, one token at a time."""
        return Detokenizer(lambda token_id: self._piece(token_id, skip_special_tokens), self._rule.leading())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template only, messages are plain text.

        Text parts of one message are joined by newlines. Raises ValueError for what the template cannot take.
        """
        if not self._config.get("chat_template"):
            raise ValueError("chat needs a model with a chat template, but this one has none; use generate")
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt must be False when continue_final_message is True")
        checked = _checked_messages(messages)
        _check_tools(tools)
        self._check_keys([checked, tools])
        return self._render_chat(
            checked,
            tools=tools and list(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def _token_id(self, name: str) -> int | None:
        token = self._special_token(name)
        return None if token is None else self._backend.token_to_id(token)

    def _special_token(self, name: str) -> str | None:
        """tokenizer_config.json spells a token as its text, or as an object that holds it."""
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def _piece(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        if token_id not in self._pieces:
            token = self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
            self._pieces[token_id] = b"" if token is None else self._rule.piece(token)
        return self._pieces[token_id]

    def _check_keys(self, value: Any) -> None:
        """The renderer keeps control tokens out of values but not out of keys, which tool calls print."""
        tokens = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        for key in _keys(value):
            found = next((token for token in tokens if token.strip() and token in str(key)), None)
            if found:
                raise ValueError(
                    f"a key must not spell a control token, but {key!r} holds {found!r}; rename it"
                )

    def _render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The only place where a template runs: transformers' sandbox, which also keeps forged tokens out."""
        try:
            return self._chat_renderer.apply_chat_template(
                messages, tokenize=True, return_dict=False, sanitize_control_tokens=True, **options
            )
        except Exception as error:  # A template is third-party text: it can fail in any way.
            raise ValueError(
                f"messages must fit the model's chat template, but it refused them: {error}; "
                "see which roles and fields the model's page names"
            ) from error

    @cached_property
    def _chat_renderer(self) -> Any:
        with _without_torch_advice():
            from transformers import PreTrainedTokenizerFast
        names = {name: self._special_token(name) for name in TEMPLATE_TOKENS}
        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            chat_template=self._config["chat_template"],
            **{name: token for name, token in names.items() if token is not None},
        )


class Detokenizer:
    """Text of a growing list of tokens: what `append` and `finish` return adds up to `decode` of all ids."""

    def __init__(self, piece: Callable[[int], bytes], leading: "Leading") -> None:
        self._piece = piece
        self._leading = leading
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        """The text that this token completes; an unfinished character waits for its last byte."""
        return self._leading.strip(self._utf8.decode(self._piece(token_id)))

    def finish(self) -> str:
        """What was still waiting, as U+FFFD."""
        return self._leading.strip(self._utf8.decode(b"", final=True))


@dataclass(kw_only=True)
class Leading:
    """Characters still to be dropped from the very beginning of a text."""

    character: str = " "
    count: int = 0

    def strip(self, text: str) -> str:
        while text and self.count:
            if text[0] != self.character:
                self.count = 0
                break
            text, self.count = text[1:], self.count - 1
        return text


@dataclass(frozen=True, kw_only=True)
class TextRule:
    """How a vocabulary spells bytes, so that each token can be turned into bytes without its neighbours."""

    byte_level: bool = False
    byte_fallback: bool = False
    # The steps after this one see one text, not tokens.
    fused: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    strip_character: str = " "
    strip_count: int = 0

    def leading(self) -> Leading:
        return Leading(character=self.strip_character, count=self.strip_count)

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            return _byte_level_piece(token)
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes([byte])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.prefix + token).encode("utf-8")


def _byte_level_piece(token: str) -> bytes:
    """An added token may hold characters outside the alphabet: it is then spelled as it is."""
    if not BYTE_OF.keys() >= set(token):
        return token.encode("utf-8")
    return bytes(BYTE_OF[character] for character in token)


def _fallback_byte(token: str) -> int | None:
    """`<0x0A>` -> 10."""
    if len(token) != 6 or not token.startswith("<0x") or token[-1] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = [chr(byte) for byte in printable] + [chr(0x100 + rank) for rank in range(len(others))]
    return dict(zip(spelled, printable + others, strict=True))


BYTE_OF = _byte_alphabet()


def _text_rule(decoder: Any) -> TextRule:
    """The rule that a tokenizer.json decoder stands for. Raises ValueError for one that mixes neighbours."""
    if decoder is None:
        return TextRule(prefix=" ", strip_count=1)  # Tokens are words, with one space between them.
    options: dict[str, Any] = {}
    for step in _decoder_steps(json.loads(decoder.__getstate__())):
        _apply_step(step, options)
    return TextRule(**options)


def _decoder_steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _apply_step(step: dict[str, Any], options: dict[str, Any]) -> None:
    replacements = options.get("replacements", ())
    match step:
        case {"type": "ByteLevel"}:
            options["byte_level"] = True
        case {"type": "ByteFallback"}:
            options["byte_fallback"] = True
        case {"type": "Fuse"}:
            options["fused"] = True
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            options["replacements"] = (*replacements, (old, new))
        case {"type": "Strip", "content": character, "start": count, "stop": 0} if options.pop(
            "fused", False
        ):
            options |= {"strip_character": character, "strip_count": count}
        case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
            options["replacements"] = (*replacements, (old, " "))
            options["strip_count"] = int(scheme != "never")
        case _:
            raise ValueError(
                "the decoder in tokenizer.json must be made of ByteLevel, ByteFallback, Fuse, Metaspace, "
                f"Replace of a string, or Strip at the start after Fuse, but has {step}; use "
                "another tokenizer"
            )


def _folder_config(folder: Path) -> dict[str, Any]:
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(path) if path.exists() else {}
    config["chat_template"] = _named_templates(config.get("chat_template"))
    if template.exists():
        config["chat_template"] = template.read_text(encoding="utf-8")
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


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            "messages must be a list of at least one {'role': ..., 'content': ...}, "
            f"but is {_brief(messages)}"
        )
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise ValueError(f"messages[{index}] must be a dict with role and content, but is {_brief(message)}")
    if message.get("role") not in ROLES:
        raise ValueError(
            f"messages[{index}]['role'] must be one of {', '.join(ROLES)}, but is "
            f"{_brief(message.get('role'))}"
        )
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return dict(message)
    return {**message, "content": _checked_content(index, content)}


def _checked_content(index: int, content: Any) -> str:
    """One string, because most templates take no parts, and parts could together spell a control token."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ValueError(
            f"messages[{index}]['content'] must be a str or a list of text parts, but is {_brief(content)}"
        )
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for text, part in zip(texts, parts, strict=True):
        if not isinstance(text, str):
            raise ValueError(
                f"messages[{index}]['content'] must hold only text parts, but holds {_brief(part)}"
            )
    return "\n".join(map(str, texts))


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas (dicts), but is {_brief(tools)}")


def _keys(value: Any) -> Iterator[Any]:
    """Every key of nested dicts and lists; no recursion, since a request may nest as deep as it likes."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Mapping):
            yield from current
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# The vocabulary inside a GGUF file. Numbers of token types as in llama.cpp.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut before the merges; `tokenizer.ggml.pre` only names it."""

    # Applied one after the other, each to the pieces of the one before. From the models' own tokenizer.json.
    splits: tuple[str, ...]
    nfc: bool = False
    # A piece that is a token as a whole is not merged up from bytes.
    ignore_merges: bool = False
    # Where the file does not say.
    add_bos: bool = False


_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_PLAIN = PreTokenizer(splits=(_GPT2,))
_SINGLE_DIGITS = PreTokenizer(splits=(_DIGIT, _GPT2))
_LLAMA3 = PreTokenizer(splits=(rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(splits=(rf"{_WORD}|{_DIGIT}|{_REST}",), nfc=True)
_TEKKEN = PreTokenizer(
    splits=(rf"{_CASED}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",), ignore_merges=True, add_bos=True
)
_DEEPSEEK_CODER = PreTokenizer(
    splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT)
)
_DEEPSEEK_V3 = PreTokenizer(
    splits=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

PRE_TOKENIZERS = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The `tokenizer.ggml.*` fields of one file."""

    path: Path
    tokens: list[str]
    types: list[int]
    fields: Mapping[str, Any]
    ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {token: token_id for token_id, token in enumerate(self.tokens)})
        if len(self.types) != len(self.tokens):
            raise ValueError(
                f"{self.path} must give a type for each of its {len(self.tokens)} tokens, but gives "
                f"{len(self.types)}; convert it again"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"tokenizer.ggml.{key}", default)

    def special(self, kind: str) -> str | None:
        """The token of `bos`, `eos`, `unknown` or `padding`."""
        token_id = self.get(f"{kind}_token_id")
        return self.tokens[token_id] if token_id is not None and token_id < len(self.tokens) else None

    def added(self, *types: int) -> list[AddedToken]:
        special = USER_DEFINED not in types
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in types
        ]


def _vocabulary(header: GGUFHeader) -> Vocabulary:
    tokens = header.require("tokenizer.ggml.tokens")
    types = header.fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    return Vocabulary(path=header.path, tokens=tokens, types=types, fields=header.fields)


def _gguf_backend(header: GGUFHeader) -> Backend:
    builders = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}
    kind = header.require("tokenizer.ggml.model")
    if kind not in builders:
        raise ValueError(
            f"tokenizer.ggml.model of {header.path} must be one of {', '.join(builders)}, but is {kind!r}; "
            "use the model's tokenizer.json instead"
        )
    vocabulary = _vocabulary(header)
    try:
        backend = builders[kind](vocabulary)
    except ValueError:
        raise
    except Exception as error:  # The library raises the bare Exception.
        raise ValueError(f"the tokenizer of {header.path} must be whole, but is not: {error}") from error
    backend.add_special_tokens(vocabulary.added(UNKNOWN, CONTROL))
    backend.add_tokens(vocabulary.added(USER_DEFINED))
    return backend


def _gguf_tokenizer_config(header: GGUFHeader) -> dict[str, Any]:
    vocabulary = _vocabulary(header)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    templates = {
        name: header.fields[f"tokenizer.chat_template.{name}"]
        for name in header.fields.get("tokenizer.chat_templates", [])
        if f"tokenizer.chat_template.{name}" in header.fields
    }
    default = header.fields.get("tokenizer.chat_template")
    return {name: vocabulary.special(kind) for name, kind in names.items()} | {
        "chat_template": {"default": default} | templates if default and templates else default
    }


def _byte_level_backend(vocabulary: Vocabulary) -> Backend:
    pre = _pre_tokenizer(vocabulary)
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", [])]
    backend = Backend(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_ends(backend, vocabulary, add_bos=pre.add_bos)
    return backend


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre of {vocabulary.path} must be one of {', '.join(PRE_TOKENIZERS)}, but is "
            f"{name!r}; use the model's tokenizer.json instead, since a guess would cut words wrongly"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece_backend(vocabulary: Vocabulary) -> Backend:
    """Llama 2's tokenizer.json, rebuilt: spaces spelled U+2581, one before the text, the unknown as bytes."""
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(vocabulary),
        unk_token=vocabulary.special("unknown"),
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    backend = Backend(model)
    prefixed = vocabulary.get("add_space_prefix", True)
    spell = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spell]) if prefixed else spell
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    _add_ends(backend, vocabulary, add_bos=True)
    return backend


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every cut of every token, best first."""
    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ValueError(
            f"{vocabulary.path} must give a score for each token, but does not; convert it again"
        )
    ids = {
        token: token_id for token, token_id in vocabulary.ids.items() if vocabulary.types[token_id] == NORMAL
    }
    cuts = (
        (-scores[token_id], ids[token[:at]], ids[token[at:]])
        for token, token_id in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    )
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(cuts)]


def _add_ends(backend: Backend, vocabulary: Vocabulary, *, add_bos: bool) -> None:
    """The tokens around every prompt, where the file asks for them."""
    bos = vocabulary.special("bos") if vocabulary.get("add_bos_token", add_bos) else None
    eos = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(ends)],
        )
