"""Token ids to text, one token at a time, exactly as if all were decoded at once.

Each token becomes bytes by itself and UTF-8 is read as they come, so that nothing is decoded twice and no character is
cut.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
LONGEST_PART = 3  # bytes of a UTF-8 character that is not complete


class Detokenizer:
    """Text of a growing list of tokens. The parts that `append` and `finish` return add up to `decode` of all ids."""

    def __init__(self, piece: Callable[[int], bytes], leading: "Leading", hidden: Set[int] = frozenset()) -> None:
        """`piece` gives the bytes of a token; those of `hidden` tokens stay out of the text."""
        self._piece, self._leading, self._hidden = piece, leading, hidden
        self._part = b""  # the first bytes of a character whose others are still to come

    @property
    def leading(self) -> str:
        """The characters that would be stripped if the text went on with them."""
        return self._leading.character * self._leading.count

    def follow(self, token_ids: Sequence[int]) -> None:
        """Begin behind these tokens: what is appended continues their text, of which only the two ends are read."""
        for token_id in token_ids:
            if not self._leading.count:
                break
            self.append(token_id)
        self._part = self._unfinished(token_ids)

    def append(self, token_id: int) -> str:
        """The new text. A character whose last bytes are still to come is held back."""
        text, self._part = _decoded(self._part + self._added(token_id))
        return self._leading.strip(text)

    def finish(self) -> str:
        """The end of the text: U+FFFD if a character was never completed."""
        text, self._part = self._part.decode("utf-8", "replace"), b""
        return self._leading.strip(text)

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """What a token would add here, as text and as bytes, without appending it. A hidden token has its name as text
        and adds no bytes."""
        piece = self._piece(token_id)
        if token_id in self._hidden:
            return piece.decode("utf-8", "replace"), b""
        text, _ = _decoded(self._part + piece)
        if not self._leading.count:
            return text, piece
        shown = replace(self._leading).strip(text)
        stripped = text[: len(text) - len(shown)]
        return shown, piece.removeprefix(stripped.encode("utf-8"))

    def _added(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._piece(token_id)

    def _unfinished(self, token_ids: Sequence[int]) -> bytes:
        """The first bytes of a character that the tokens end within."""
        end = b""
        for token_id in reversed(token_ids):
            if len(end) >= LONGEST_PART:
                break
            end = self._added(token_id) + end
        return _decoded(end)[1]


def _decoded(data: bytes) -> tuple[str, bytes]:
    """The complete characters, and the bytes that begin one more."""
    text, size = codecs.utf_8_decode(data, "replace", False)
    return text, data[size:]


@dataclass(kw_only=True)
class Leading:
    """Strips up to `count` times `character` from the beginning of a text that arrives in parts."""

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
class DecodingRule:
    """How the tokens of a vocabulary become bytes, each without looking at its neighbours."""

    byte_level: bool = False
    byte_fallback: bool = False
    # Whether a Fuse step was met: later steps work on the whole text, not on tokens.
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
    """The bytes that the characters stand for. An added token with other characters is its own text."""
    if not BYTE_OF.keys() >= set(token):
        return token.encode("utf-8")
    return bytes(BYTE_OF[character] for character in token)


def _fallback_byte(token: str) -> int | None:
    """`<0x0A>` -> 10."""
    spelled = FALLBACK.fullmatch(token)
    return int(spelled[1], 16) if spelled else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = [chr(byte) for byte in printable] + [chr(0x100 + rank) for rank in range(len(others))]
    return dict(zip(spelled, printable + others, strict=True))


BYTE_OF = _byte_alphabet()


def decoding_rule(decoder: Any) -> DecodingRule:
    """The rule for the decoder of a tokenizer.json. Raises ValueError if tokens cannot be decoded one by one."""
    if decoder is None:
        return DecodingRule(prefix=" ", strip_count=1)  # Tokens are words, with one space between them.
    options: dict[str, Any] = {}
    for step in _decoder_steps(json.loads(decoder.__getstate__())):
        _apply_step(step, options)
    return DecodingRule(**options)


def _decoder_steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _apply_step(step: dict[str, Any], options: dict[str, Any]) -> None:
    replacements = options.get("replacements", ())
    each_token = not options.keys() & {
        "byte_level",
        "fused",
        "strip_character",
    }  # else on the whole text
    match step:
        case {"type": "ByteLevel"} if not options:
            options["byte_level"] = True
        case {"type": "ByteFallback"} if each_token:
            options["byte_fallback"] = True
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if each_token:
            options["replacements"] = (*replacements, (old, new))
        case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme} if each_token:
            options["replacements"] = (*replacements, (old, " "))
            options["strip_count"] = int(scheme != "never")
        case {"type": "Fuse"}:
            options["fused"] = True
        case {"type": "Strip", "content": character, "start": count, "stop": 0} if _strips(options):
            options |= {"strip_character": character, "strip_count": count}
        case _:
            raise ValueError(
                "the decoder in tokenizer.json must be made of ByteLevel alone, or of ByteFallback, Metaspace and "
                f"Replace of a string, then Fuse, then Strip at the start, but has {step} out of this order; use "
                "another tokenizer"
            )


def _strips(options: dict[str, Any]) -> bool:
    """Whether a Strip at this point strips the beginning of the text: it is fused and nothing was stripped before."""
    return options.get("fused", False) and not options.get("strip_count")
