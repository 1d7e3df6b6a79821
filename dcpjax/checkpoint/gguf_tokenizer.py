"""The tokenizer inside a GGUF file, rebuilt from its vocabulary, merges or scores.

The metadata keys are llama.cpp's. A kind of tokenizer that cannot be rebuilt exactly is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dcpjax.checkpoint.gguf_header import GGUFHeader, read_header

# numbers of token types, as in llama.cpp
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is split before the merges. A GGUF file only holds its name, in `tokenizer.ggml.pre`."""

    # Regular expressions from the models' own tokenizer.json, each applied to the pieces of the one before.
    splits: tuple[str, ...]
    nfc: bool = False
    # A piece that is a token as a whole is not merged up from bytes.
    ignore_merges: bool = False
    # The default where the file has no `add_bos_token`.
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


def has_tokenizer(path: Path) -> bool:
    return "tokenizer.ggml.tokens" in read_header(path).fields


def gguf_backend(header: GGUFHeader) -> Backend:
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


def gguf_tokenizer_config(header: GGUFHeader) -> dict[str, Any]:
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
    _add_bos_and_eos(backend, vocabulary, add_bos=pre.add_bos)
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
    """Llama 2's tokenizer.json, rebuilt: spaces become U+2581, one is put before the text, unknown characters become
    bytes."""
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
    _add_bos_and_eos(backend, vocabulary, add_bos=True)
    return backend


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, by falling score of the token: SentencePiece joins the neighbours
    whose union has the best score first."""
    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{vocabulary.path} must give a score for each token, but does not; convert it again")
    ids = {token: token_id for token, token_id in vocabulary.ids.items() if vocabulary.types[token_id] == NORMAL}
    cuts = (
        (-scores[token_id], ids[token[:at]], ids[token[at:]])
        for token, token_id in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    )
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(cuts)]


def _add_bos_and_eos(backend: Backend, vocabulary: Vocabulary, *, add_bos: bool) -> None:
    """Add the begin and end tokens that the file asks for around every prompt."""
    bos = vocabulary.special("bos") if vocabulary.get("add_bos_token", add_bos) else None
    eos = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(ends)],
        )
