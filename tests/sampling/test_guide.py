import json
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dcpjax.api.structured_outputs import StructuredOutputsParams as Spec
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.openai.response_format import BODY_OPTIONS, from_body, from_response_format
from dcpjax.sampling.guide import MAX_BLANK, Guide, GuideMaker

EOS, OTHER_EOS, TOOL = 0, 1, 2
SPECIAL = ["<eos>", "<end>", "<tool>"]
PADDING = 21  # ids of the logits past the tokenizer's
SEEDS = st.integers(0, 2**32 - 1)
TOKENIZERS = ["byte level", "byte fallback"]
tokenizers = pytest.mark.parametrize("name", TOKENIZERS)


def backend(model: models.Model) -> Backend:
    made = Backend(model)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def byte_level() -> Backend:
    """One token per byte and a few longer ones, some of them cut through a character."""
    merges = [("a", "b"), ("{", '"'), ('"', ":"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("Ã", "©"), ("ð", "Ł")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    made = backend(models.BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=merges))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Backend:
    """Llama 2's shape: two spellings of some bytes, a space in front of every text that decoding drops again."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'ab{}[]":,', "▁a", "▁{", "é"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    made = backend(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "{")], byte_fallback=True, unk_token="<tool>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@cache
def tokenizer(name: str = "byte level") -> Tokenizer:
    return Tokenizer({"byte level": byte_level, "byte fallback": byte_fallback}[name](), {})


@cache
def maker(name: str = "byte level") -> GuideMaker:
    pytest.importorskip("llguidance")
    return GuideMaker(tokenizer(name), tokenizer(name).vocab_size + PADDING, [EOS, OTHER_EOS])


def allowed(guide: Guide) -> list[int]:
    return np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little")).tolist()


def token(text: str, name: str = "byte level") -> int:
    return tokenizer(name).encode(text)[-1]


def walk(name: str, spec: Spec, seed: int) -> list[int]:
    """Random allowed tokens up to the end; after forty of them those that close, where they may."""
    closing = [EOS, *(token(character, name) for character in '"}]:1')]
    guide, random, ids = maker(name).make(spec), np.random.default_rng(seed), []
    while not ids or ids[-1] not in (EOS, OTHER_EOS):
        may = allowed(guide)
        close = [end for end in closing if end in may and len(ids) > 40]
        ids.append(int(random.choice(close[:1] or may)))
        guide.advance(ids[-1])
    return ids


def text_of(name: str, spec: Spec, seed: int) -> str:
    return tokenizer(name).decode(walk(name, spec, seed))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 3, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "é", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 3 <= value["age"] <= 40
        and len(value.get("tags", [])) <= 2
        and all(tag in ("red", "é", None) for tag in value.get("tags", []))
    )


@tokenizers
@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["object", "text"])
@given(seed=SEEDS)
def test_any_allowed_tokens_spell_what_the_schema_describes(name, schema, seed):
    assert is_person(json.loads(text_of(name, Spec(json=schema), seed)))


@tokenizers
@given(seed=SEEDS)
def test_any_allowed_tokens_spell_a_json_object(name, seed):
    assert isinstance(json.loads(text_of(name, Spec(json_object=True), seed)), dict)


@tokenizers
@given(seed=SEEDS)
def test_any_allowed_tokens_match_the_regular_expression(name, seed):
    pattern = r" ?(ab|[cé😀]){1,5}/[0-9]{2,}(\.[0-9]+)?"
    assert re.fullmatch(pattern, text_of(name, Spec(regex=pattern), seed))


LARK = 'start: "(" start ")" | NAME\nNAME: /[x-z]{1,3}/'
GBNF = 'root ::= "(" root ")" | [x-z] [x-z]? [x-z]?'


@tokenizers
@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
@given(seed=SEEDS)
def test_any_allowed_tokens_are_a_sentence_of_the_grammar(name, grammar, seed):
    found = re.fullmatch(r"(\(*)[x-z]{1,3}(\)*)", text_of(name, Spec(grammar=grammar), seed))
    assert found
    assert len(found[1]) == len(found[2])


# One of them begins another; characters of several bytes, a control token's name, quotes, spaces at the beginning,
# and one that normalisation would change.
CHOICES = ["a", "ab", "é", "ébc", "😀", "日本", " a", "  a", "<eos>", "<tool>b", 'say "x\\y"', "line\nline", "e\u0301"]


@tokenizers
@given(choices=st.lists(st.sampled_from(CHOICES) | st.text(min_size=1, max_size=5), min_size=1, max_size=5), seed=SEEDS)
def test_any_allowed_tokens_are_one_of_the_choices(name, choices, seed):
    assert text_of(name, Spec(choice=choices), seed) in choices


@given(seed=SEEDS)
def test_behind_a_prompt_no_space_is_dropped_and_none_is_asked_for(seed):
    real, random = tokenizer("byte fallback"), np.random.default_rng(seed)
    prompt = real.encode("a")
    guide, detokenizer = maker("byte fallback").make(Spec(choice=["ab", " a"]), ""), real.detokenizer(True, prompt)
    text = ""
    while not guide.is_finished:
        taken = int(random.choice(allowed(guide)))
        guide.advance(taken)
        text += detokenizer.append(taken)
    assert text in ("ab", " a")


@tokenizers
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_can_be_spelled(name, choice):
    texts = {text_of(name, Spec(choice=["other", choice]), seed) for seed in range(20)}
    assert texts == {"other", choice}
    assert text_of(name, Spec(choice=[choice]), 0) == choice


@pytest.mark.parametrize("spec", [Spec(choice=CHOICES), Spec(regex="(ab)*[ce]?")], ids=["choice", "regex"])
@given(seed=SEEDS)
def test_the_end_is_allowed_exactly_where_the_text_is_complete(spec, seed):
    guide = maker().make(spec)
    ids = walk("byte level", spec, seed)
    for count, taken in enumerate(ids):
        text = tokenizer().decode(ids[:count])
        complete = text in spec.choice if spec.choice else re.fullmatch(spec.regex, text) is not None
        assert [end in allowed(guide) for end in (EOS, OTHER_EOS)] == [complete, complete]
        guide.advance(taken)


@tokenizers
@given(seed=SEEDS)
def test_no_token_outside_the_tokenizer_and_no_control_token_is_ever_allowed(name, seed):
    spec = Spec(regex="(?s:.){0,20}")
    guide = maker(name).make(spec)
    for taken in walk(name, spec, seed):
        assert max(allowed(guide)) < tokenizer(name).vocab_size
        assert TOOL not in allowed(guide)
        guide.advance(taken)


def test_a_grammar_that_names_a_control_token_gets_it():
    spec = Spec(grammar='start: "a" <tool> "b"')
    assert walk("byte level", spec, 0)[:-1] == [token("a"), TOOL, token("b")]


def test_an_end_token_that_is_not_marked_as_control_is_never_text():
    letter = token("c")
    maker()  # skips without the library
    guide = GuideMaker(tokenizer(), tokenizer().vocab_size, [letter]).make(Spec(regex="[a-d]{2}"))
    assert tokenizer().decode(allowed(guide)) == "abdab"
    guide.advance(token("ab"))
    assert allowed(guide) == [letter]


@pytest.mark.parametrize("vocab_size", [100, 288, 289])
def test_the_mask_is_as_wide_as_the_logits(vocab_size):
    maker()  # skips without the library
    guide = GuideMaker(tokenizer(), vocab_size, [EOS, 10**6]).make(Spec(regex=".*"))
    assert guide.mask().shape == (-(-vocab_size // 32),)
    assert guide.mask().dtype == np.uint32
    assert max(allowed(guide)) < min(vocab_size, tokenizer().vocab_size)


def test_a_mask_stays_the_same_until_a_token_is_taken_and_keeps_its_values_after():
    guide = maker().make(Spec(regex="[ab]c"))
    before = guide.mask()
    copy = before.copy()
    assert guide.mask() is before
    guide.advance(token("a"))
    assert allowed(guide) == [token("c")]
    np.testing.assert_array_equal(before, copy)
    assert not before.flags.writeable


def test_guides_of_one_spec_go_their_own_ways():
    first, second = (maker().make(Spec(choice=["ax", "by"])) for _ in range(2))
    first.advance(token("a"))
    assert allowed(first) == [token("x")]
    assert {token("a"), token("b")} <= set(allowed(second))


def test_a_finished_guide_allows_the_ends_only_and_stays_finished():
    guide = maker().make(Spec(regex="c"))
    assert not guide.is_finished
    guide.advance(token("c"))
    for _ in range(2):
        assert guide.is_finished
        assert allowed(guide) == [EOS, OTHER_EOS]
        guide.advance(OTHER_EOS)


def test_a_text_that_may_go_on_is_finished_by_the_end_token():
    guide = maker().make(Spec(regex="c*"))
    guide.advance(token("c"))
    assert not guide.is_finished
    guide.advance(EOS)
    assert guide.is_finished
    assert allowed(guide) == [EOS, OTHER_EOS]


@pytest.mark.parametrize("wrong", [EOS, TOOL, 50, 270, 10**6])
def test_a_token_that_was_not_allowed_is_refused_and_nothing_may_follow_it(wrong):
    guide = maker().make(Spec(regex="cc"))
    with pytest.raises(ValueError, match="the text must follow regex, but cannot go on"):
        guide.advance(wrong)
    with pytest.raises(ValueError, match="cannot go on"):
        guide.mask()
    assert not guide.is_finished


def test_what_the_vocabulary_cannot_spell_is_refused_at_once_or_where_it_follows():
    maker()  # skips without the library
    tokens = {"<eos>": EOS, "a": 1, "b": 2}
    spelling = Backend(models.BPE(vocab=tokens, merges=[]))
    spelling.decoder = decoders.ByteLevel()
    small = GuideMaker(Tokenizer(spelling, {}), 3, [EOS])
    with pytest.raises(ValueError, match=r"regex must .* no token of the vocabulary can come next"):
        small.make(Spec(regex="xa"))
    guide = small.make(Spec(regex="[ax]y"))
    guide.advance(tokens["a"])
    for _ in range(2):
        with pytest.raises(ValueError, match="no token of the vocabulary can come next"):
            guide.mask()


def test_a_lost_model_cannot_pad_json_with_spaces_forever():
    guide = maker().make(Spec(json=PERSON))
    space = token(" ")
    guide.advance(token("{"))
    count = 0
    while space in allowed(guide) and count < 1000:
        guide.advance(space)
        count += 1
    assert count == 64


PAIR = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [[2]]}}, "required": ["a", "b"]}


def all_texts(spec: Spec) -> set[str]:
    return {text_of("byte level", spec, seed) for seed in range(30)}


@pytest.mark.parametrize("options", [{"disable_any_whitespace": True}, {"whitespace_pattern": ""}], ids=str)
def test_json_without_white_space_is_compact(options):
    schema = {**PAIR, "additionalProperties": False}
    assert all_texts(Spec(json=schema, **options)) == {'{"a":1,"b":[2]}'}
    guide = maker().make(Spec(json_object=True, **options))
    for part in ("{", '""', ":", "[", "1", ",", "2", "]", ","):
        for character in part:
            guide.advance(token(character))
        assert token(" ") not in allowed(guide)


def test_white_space_between_the_parts_of_json_is_that_of_the_pattern():
    schema = {**PAIR, "additionalProperties": False}
    parts = ["{", '"a"', ":", "1", ",", '"b"', ":", "[", "2", "]", "}"]
    for text in all_texts(Spec(json=schema, whitespace_pattern="[ ]?")):
        assert re.fullmatch(" ?".join(map(re.escape, parts)), text)


def test_a_pattern_of_white_space_that_is_no_regular_expression_is_refused_by_name():
    with pytest.raises(ValueError, match=r"whitespace_pattern must .* unclosed group"):
        maker().make(Spec(json_object=True, whitespace_pattern="("))


def blanks_until_the_end(spec: Spec, before: str) -> tuple[Guide, int]:
    """A guide of a vocabulary that spells only this text and spaces, and how many spaces it took."""
    maker()  # skips without the library
    tokens = {"<eos>": EOS, **{character: number for number, character in enumerate(sorted({"Ġ", *before}), 1)}}
    spelling = Backend(models.BPE(vocab=tokens, merges=[]))
    spelling.decoder = decoders.ByteLevel()
    guide = GuideMaker(Tokenizer(spelling, {}), len(tokens), [EOS]).make(spec)
    for character in before:
        guide.advance(tokens[character])
    count = 0
    while not guide.is_finished:
        assert count < 1000, "a text of white space has no end"
        guide.advance(tokens["Ġ"])
        count += 1
    return guide, count


@pytest.mark.parametrize("spec", [Spec(json_object=True, whitespace_pattern=" *"), Spec(regex=r"\{ *x")], ids=str)
def test_a_text_that_can_only_go_on_with_white_space_ends_with_an_error(spec):
    with pytest.raises(ValueError, match=f"only white space can come next, and has for {MAX_BLANK} tokens"):
        blanks_until_the_end(spec, "{")


def test_a_complete_text_that_can_only_go_on_with_white_space_ends():
    guide, count = blanks_until_the_end(Spec(regex="a *"), "a")
    assert guide.is_finished
    assert count <= MAX_BLANK


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(regex="a("), "regex must .* unclosed group"),
        (Spec(regex="a(?=b)"), "regex must .* look-around"),
        (Spec(json='{"type"'), "json must .* delimiter"),
        (Spec(json="[]"), r"json must .* a JSON schema must be an object, but is \[\]"),
        (Spec(json={"type": "banana"}), "json must .* Invalid type: banana"),
        (Spec(json={"not": {}}), "json must .* Unimplemented keys"),
        (Spec(json={"$ref": "http://example.com/schema"}), "json must .* does not fetch"),
        (Spec(json={"minimum": float("nan")}), "json must .* not JSON compliant"),
        (Spec(json={"const": {1}}), "json must .* not JSON serializable"),
        (Spec(json='{"items":' * 5000 + "{}" + "}" * 5000), "json must .* recursion"),
        (Spec(grammar="start: missing"), 'grammar must .* unknown name: "missing"'),
        (Spec(grammar="root ::= missing"), "grammar must .* Rule 'missing' not found"),
        (Spec(grammar="no grammar"), "grammar must .* Expected ::="),
    ],
    ids=lambda value: str(value)[:80],
)
@tokenizers
def test_a_spec_that_cannot_be_followed_is_refused_with_one_short_sentence(name, spec, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        maker(name).make(spec)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@given(seed=SEEDS)
def test_a_real_vocabulary_spells_what_the_schema_describes(smollm2_path, seed):
    real, make = smollm2(smollm2_path)
    random, guide, ids = np.random.default_rng(seed), make(Spec(json=PERSON)), []
    while not guide.is_finished:
        ids.append(int(random.choice(allowed(guide))))
        guide.advance(ids[-1])
    assert is_person(json.loads(real.decode(ids)))


@cache
def smollm2(path) -> tuple[Tokenizer, Callable[[Spec], Guide]]:
    pytest.importorskip("llguidance")
    real = Tokenizer.from_gguf(path)
    return real, GuideMaker(real, real.vocab_size, [2]).make


def test_without_the_package_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"llguidance.*pip install 'dcpjax\[guided\]'"):
        GuideMaker(tokenizer(), 300, [EOS])


def test_a_model_without_an_end_token_is_refused():
    with pytest.raises(ValueError, match="end-of-sequence token"):
        GuideMaker(tokenizer(), 300, [300])


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": False}}, {"json": SCHEMA}),
    ],
    ids=str,
)
def test_a_response_format_becomes_options(value, options):
    assert from_response_format(value) == options
    assert from_body({"response_format": value, "guided_json": None, "temperature": 1}) == options


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"type": "xml"}, "type must be one of text, json_object, json_schema, but is 'xml'"),
        ({}, "type must be one of text, json_object, json_schema, but is None"),
        ("json_object", "response_format must be an object"),
        ({"type": "json_schema"}, "response_format.json_schema must be an object, but is None"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema must be an object, but is None"),
    ],
    ids=str,
)
def test_an_unknown_response_format_is_refused_with_the_legal_ones(value, reason):
    with pytest.raises(ValueError, match=reason):
        from_response_format(value)


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {}),
        (dict.fromkeys(BODY_OPTIONS), {}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": LARK}, {"grammar": LARK}),
        ({"structured_outputs": {"choice": ["a"], "json": None}}, {"choice": ["a"]}),
    ],
    ids=str,
)
def test_options_of_a_body_become_options(body, options):
    assert from_body(body) == options


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "asks with guided_json and guided_regex; leave one"),
        ({"structured_outputs": {"regexp": "a"}}, "unknown option 'regexp'; did you mean regex?"),
        ({"structured_outputs": ["a"]}, "structured_outputs must be an object"),
    ],
    ids=str,
)
def test_a_body_that_asks_wrongly_is_refused(body, reason):
    with pytest.raises(ValueError, match=reason):
        from_body(body)
