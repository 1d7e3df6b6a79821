import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dcpjax.checkpoint.detokenizer import DecodingRule, Detokenizer, Leading
from dcpjax.checkpoint.tokenizer import Tokenizer

EXAMPLES = 5000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 100
EMOJI = ["🙂", "👩‍👩‍👧", "🇯🇵", "👍🏽", "日本", "é", "𝔘", "ກ", " ", "a", "\n", "<|end|>", "\ufeff", "\ufffd"]
SPECIAL = ["<|end|>", "<|日|>"]
IN_ALPHABET = ["é¢", "Ġé"]  # added tokens that read as bytes, though not of UTF-8
ADDED = ["<tool>", "日本", *IN_ALPHABET]
UNFINISHED = ["", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd"]  # up to three bytes wait for a fourth


def byte_level() -> Tokenizer:
    """GPT-2's alphabet; some merges end within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂日")
    spelled = "".join(piece for piece, _ in cut)
    merges = [(spelled[0], spelled[1]), (spelled[4], spelled[5]), (spelled[0:2], spelled[2])]
    vocab = {token: number for number, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_added_tokens(backend)


def words() -> Tokenizer:
    """No decoder: tokens are words, with one space between them."""
    known = ["<unk>", "a", "b", "é", "日本語", "▁a", " "]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_added_tokens(backend)


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """SentencePiece's way: pieces, and one token per byte for all other characters."""
    pieces = ["<unk>", "▁", "a", "▁a", "▁▁", "é", "日", " ", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE(
            vocab={token: number for number, token in enumerate(pieces)},
            merges=[("▁", "a"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    return with_added_tokens(backend)


def with_added_tokens(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return Tokenizer(backend, {})


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(llama_decoder()),
    "metaspace": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "metaspace first": byte_fallback(decoders.Metaspace(prepend_scheme="first")),
    "metaspace never": byte_fallback(decoders.Metaspace(prepend_scheme="never")),
    "words": words(),
    "fused": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("a", 3, 0)])),
}


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()]


@st.composite
def id_streams(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Texts of many bytes, cut off anywhere, between ids of any kind: known, special, unknown."""
    ids: list[int] = []
    size = tokenizer._backend.get_vocab_size()
    for text in draw(st.lists(st.lists(st.sampled_from(EMOJI), max_size=4).map("".join), max_size=4)):
        encoded = tokenizer.encode(text, add_special_tokens=False)
        start, end = draw(st.integers(0, 3)), len(encoded) - draw(st.integers(0, 3))
        ids += encoded[start : max(start, end)]
        ids += draw(st.lists(st.integers(-1, size + 1), max_size=3))
    return ids


def check_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """The stream is the decoded whole, and at any time lacks no more than one character that is not complete."""
    pieces = streamed(tokenizer, ids, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)
    assert pieces[-1] in UNFINISHED
    for count, given_out in enumerate(itertools.accumulate(pieces[:-1]), start=1):
        assert tokenizer.decode(ids[:count], skip).removeprefix(given_out) in UNFINISHED


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_text_of_all_ids(name, data, skip):
    tokenizer = TOKENIZERS[name]
    check_stream(tokenizer, data.draw(id_streams(tokenizer)), skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), skip=st.booleans())
def test_the_text_of_a_prompt_and_of_what_continues_it_is_the_text_of_all_ids(name, data, skip):
    """Cut anywhere, also within a character, which then belongs to the continuation."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(id_streams(tokenizer))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, continuation = tokenizer.detokenizer(skip), tokenizer.detokenizer(skip, ids[:cut])
    before = "".join(prompt.append(token_id) for token_id in ids[:cut])
    after = "".join(continuation.append(token_id) for token_id in ids[cut:]) + continuation.finish()
    assert before + after == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), skip=st.booleans())
def test_spelled_tokens_add_up_to_the_text_and_their_bytes_to_its_bytes(name, data, skip):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(id_streams(tokenizer))
    detokenizer, shown, spelled = tokenizer.detokenizer(skip), [], []
    for token_id in ids:
        text, data_of_token = detokenizer.spell(token_id)
        spelled.append(data_of_token)
        shown.append(detokenizer.append(token_id))
        assert text == (tokenizer.piece(token_id).decode() if skip and token_id in tokenizer.special_ids else shown[-1])
    assert b"".join(spelled).decode("utf-8", "replace") == "".join(shown) + detokenizer.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["a a", "  a  a ", "a b a b", "é日本 a\n a"])
def test_a_text_cut_between_any_tokens_reads_as_the_library_decodes_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    if not name.startswith("metaspace"):  # there the library drops all spaces of the first token
        assert whole == tokenizer._backend.decode(ids)
    for cut in range(len(ids)):
        prompt, continuation = tokenizer.detokenizer(), tokenizer.detokenizer(True, ids[:cut])
        before = "".join(map(prompt.append, ids[:cut]))
        assert before + "".join(map(continuation.append, ids[cut:])) == whole


def test_a_continuation_keeps_its_space_and_a_first_word_loses_it():
    tokenizer, space_a = TOKENIZERS["byte fallback"], 3
    end = tokenizer.encode("<|end|>", add_special_tokens=False)[-1]
    assert tokenizer.detokenizer(True, []).append(space_a) == "a"
    assert tokenizer.detokenizer(True, [end]).append(space_a) == "a"
    assert tokenizer.detokenizer(False, [end]).append(space_a) == " a"
    assert tokenizer.detokenizer(True, [space_a]).append(space_a) == " a"


def test_a_long_prompt_is_not_decoded_for_its_continuation():
    read = []

    def piece(token_id: int) -> bytes:
        read.append(token_id)
        return b" a"

    Detokenizer(piece, Leading(count=1)).follow(range(100_000))
    assert len(read) <= 10


@settings(max_examples=EXAMPLES)
@given(data=st.data(), skip=st.booleans())
def test_smollm2s_streamed_text_is_the_text_of_all_ids(smollm2, data, skip):
    check_stream(smollm2, data.draw(id_streams(smollm2)), skip)


@settings(max_examples=EXAMPLES)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_streams_are_what_the_library_decodes(data, skip):
    tokenizer = TOKENIZERS["byte level"]
    ids = [token_id for token_id in data.draw(id_streams(tokenizer)) if token_id >= 0]
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@settings(max_examples=EXAMPLES)
@given(text=st.lists(st.sampled_from([*EMOJI, *SPECIAL, "Ġ"]) | st.text(max_size=3), max_size=8).map("".join))
def test_a_valid_text_streams_back_without_a_cut_character(name, text):
    assume(not any(token in text for token in IN_ALPHABET))
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer._backend.decode(ids, skip_special_tokens=False)
    pieces = streamed(tokenizer, ids, skip=False)
    assert "".join(pieces) == expected
    assert pieces[-1] == ""
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


STEPS = {
    "ByteLevel": decoders.ByteLevel,
    "ByteFallback": decoders.ByteFallback,
    "Fuse": decoders.Fuse,
    "Replace ▁": lambda: decoders.Replace("▁", " "),
    "Replace ab": lambda: decoders.Replace("ab", "x"),
    "Metaspace": lambda: decoders.Metaspace(prepend_scheme="never"),
    "Strip": lambda: decoders.Strip(" ", 1, 0),
}
ORDERS = [order for count in (1, 2, 3, 4) for order in itertools.permutations(STEPS, count)]
LEGAL = {("ByteLevel",), ("ByteFallback", "Metaspace"), ("Replace ▁", "ByteFallback", "Fuse", "Strip")}
WORDS = ["▁a", "a", "b", "ab", "▁ab", "é", "Ġa", "ĠÃ", "©", "▁", "▁▁", "日", " ", "<0x20>", "<0x41>", "<0x0A>"]


def ordered(order: Sequence[str]) -> Backend:
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    backend.decoder = decoders.Sequence([STEPS[step]() for step in order])
    return backend


def test_a_decoder_of_any_order_is_refused_or_read_as_the_library_reads_it():
    read = set()
    for order in ORDERS:
        backend = ordered(order)
        try:
            tokenizer = Tokenizer(backend, {})
        except ValueError:
            continue
        read.add(order)
        for ids in itertools.chain.from_iterable(itertools.product(range(len(WORDS)), repeat=n) for n in (1, 2)):
            assert tokenizer.decode(ids) == backend.decode(ids), (order, [WORDS[number] for number in ids])
    assert read >= LEGAL


@pytest.mark.parametrize(
    "order",
    [
        ("ByteLevel", "ByteFallback"),
        ("Replace ▁", "ByteLevel"),
        ("Fuse", "ByteFallback"),
        ("Strip",),
        ("Fuse", "Replace ab"),
    ],
)
def test_steps_that_would_mix_neighbours_are_refused_by_name(order):
    with pytest.raises(ValueError, match=rf"must be made of ByteLevel alone, or .*{order[-1].split()[0]}.*out of this"):
        Tokenizer(ordered(order), {})


@pytest.mark.parametrize("token", ["<0x-1>", "<0x A>", "<0x１２>", "<0xA_>", "<0xG0>", "<0x0A", "<0x0A>>", "<0x00A>"])
def test_only_two_hexadecimal_digits_spell_a_byte(token):
    assert DecodingRule(byte_fallback=True).piece(token) == token.encode()


@pytest.mark.parametrize(("token", "byte"), [("<0x0A>", 10), ("<0x0a>", 10), ("<0xFF>", 255), ("<0x00>", 0)])
def test_a_spelled_byte_is_that_byte(token, byte):
    assert DecodingRule(byte_fallback=True).piece(token) == bytes([byte])
