import json

import pytest

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.jobs.lines import Line
from dcpjax.openai.request import (
    IGNORED,
    KINDS,
    NEUTRAL,
    OPTIONS,
    SAMPLING,
    BatchRequest,
    RecordError,
    parse_record,
    read_custom_id,
    read_request,
)
from dcpjax.openai.response_format import BODY_OPTIONS

MESSAGES = [{"role": "user", "content": "hi"}]


def line_of(text: str | bytes, number: int = 1) -> Line:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return Line(number=number, data=data, size=len(data), fingerprint=f"{number:016x}")


def read(record, *, number: int = 1, defaults=None, seed: int = 0) -> BatchRequest:
    return read_line(line_of(json.dumps(record), number), defaults=defaults, seed=seed)


def read_line(line: Line, *, defaults=None, seed: int = 0) -> BatchRequest:
    record = parse_record(line, max_line_bytes=10_000)
    return read_request(record, line, custom_id=read_custom_id(record), defaults=defaults or {}, seed=seed)


def chat(**options) -> BatchRequest:
    url, body = "/v1/chat/completions", {"model": "m", "messages": MESSAGES, **options}
    return read({"custom_id": "c", "method": "POST", "url": url, "body": body})


def completion(**options) -> BatchRequest:
    url, body = "/v1/completions", {"model": "m", "prompt": "hi", **options}
    return read({"custom_id": "c", "method": "POST", "url": url, "body": body})


def test_both_urls_and_both_plain_forms_are_read():
    assert (chat().kind, chat().messages, chat().prompt) == ("chat", MESSAGES, None)
    assert (completion().kind, completion().messages, completion().prompt) == ("completion", None, "hi")
    plain = read({"prompt": "hi", "id": 7, "max_tokens": 3, "top_k": 2})
    assert (plain.kind, plain.custom_id, plain.sampling.max_tokens, plain.sampling.top_k) == ("completion", "7", 3, 2)
    assert read({"messages": MESSAGES, "custom_id": "x"}).custom_id == "x"
    assert read({"prompt": [1, 2]}).prompt == [1, 2]
    assert read({"prompt": ["one"]}).prompt == "one"
    assert read({"prompt": [[1, 2]]}).prompt == [1, 2]


def test_max_tokens_default_to_sixteen_for_completions_and_the_model_length_for_chats():
    assert completion().sampling.max_tokens == 16
    assert chat().sampling.max_tokens is None
    assert chat(max_completion_tokens=5).sampling.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).sampling.max_tokens == 5
    assert completion(max_tokens=None).sampling.max_tokens == 16
    assert read({"prompt": "a"}, defaults={"max_tokens": 9}).sampling.max_tokens == 9


def test_a_line_goes_before_the_defaults():
    defaults = {"temperature": 0.5, "top_p": 0.9}
    sampling = read({"prompt": "a", "temperature": 0}, defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p) == (0, 0.9)


VALUES = {
    "temperature": 0.3,
    "top_p": 0.4,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 11,
    "stop": ("a",),
    "stop_token_ids": (3,),
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 1,
    "ignore_eos": True,
    "bad_words": ("no",),
    "allowed_token_ids": (1, 2),
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 2,
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", SAMPLING)
def test_every_sampling_option_arrives(make, name):
    value = VALUES[name]
    given = list(value) if isinstance(value, tuple) else value
    assert getattr(make(**{name: given}).sampling, name) == value != getattr(SamplingParams(), name)


@pytest.mark.parametrize("name", IGNORED)
def test_options_about_bookkeeping_are_accepted(name):
    assert chat(**{name: "anything"}) == chat()


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_null_is_as_good_as_nothing(kind):
    make = chat if kind == "chat" else completion
    names = [name for name in OPTIONS[kind] if name not in ("messages", "prompt")]
    assert make(**dict.fromkeys(names)) == make()


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_that_cannot_be_served_is_accepted_where_it_changes_nothing(name):
    assert completion(**{name: NEUTRAL[name]}) == completion()
    with pytest.raises(RecordError, match=f"^{name} must be .* in a batch, but is .*; leave it out"):
        completion(**{name: 17})


def test_log_probabilities_are_asked_for_as_each_url_has_it():
    assert chat().sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling.logprobs == 4
    assert chat(logprobs=False).sampling.logprobs is None
    assert completion(logprobs=4).sampling.logprobs == 4
    assert completion(logprobs=0).sampling.logprobs == 0


def test_logit_bias_has_token_ids_as_keys():
    assert chat(logit_bias={"17": -100}).sampling.logit_bias == {17: -100}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, {"json": {"a": 1}}),
        ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_structure_is_asked_for_in_any_of_its_names(options, expected):
    assert set(options) <= set(BODY_OPTIONS)
    found = chat(**options).sampling.structured_outputs
    assert (found and {name: getattr(found, name) for name in expected}) == expected


def test_options_of_the_template_and_of_the_queue_arrive():
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = chat(tools=tools, tool_choice="auto", chat_template_kwargs={"a": 1}, priority=-3, cache_salt="s")
    assert (request.tools, request.chat_template_kwargs, request.priority, request.cache_salt) == (
        tools,
        {"a": 1},
        -3,
        "s",
    )
    assert chat(tools=tools, tool_choice="none").tools is None
    assert (chat().add_generation_prompt, chat().continue_final_message) == (True, False)
    continued = chat(continue_final_message=True)
    assert (continued.add_generation_prompt, continued.continue_final_message) == (False, True)
    assert completion(echo=True).echo


def test_random_draws_follow_from_the_line_and_not_from_the_order():
    seeds = {read({"prompt": "a"}, number=number, seed=seed).sampling.seed for number in (1, 2) for seed in (0, 1)}
    assert len(seeds) == 4
    assert read({"prompt": "a"}, number=2).sampling.seed == read({"prompt": "a"}, number=2).sampling.seed
    assert read({"prompt": "a", "seed": 5}, seed=1).sampling.seed == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a line must be a JSON object, but is a list of 1"),
        ("[]", "a line must be a JSON object, but is an empty list"),
        ("null", "a line must be a JSON object, but is null"),
        ('"x"', 'a line must be a JSON object, but is "x"'),
        ("{", "a line must be a JSON object, but is not: Expecting property name .* at column 2"),
        ('{"a": "b', "a line must be a JSON object, but is not: Unterminated string starting at column 7"),
        ('{"a": NaN}', "a line must be JSON, but holds NaN"),
        ('{"a": -Infinity}', "a line must be JSON, but holds -Infinity"),
        (f'{{"a": {"9" * 5000}}}', "a line must be JSON that can be read, but is not: .*digits"),
        (b'{"a": "\xff"}', "a line must be UTF-8, but byte 8 is 0xff"),
        (b'{"a": "\xed\xa0\x80"}', "a line must be UTF-8, but byte 8 is 0xed"),
        ("{}", "a line must have prompt or messages, or custom_id, method, url and body, but has neither"),
        ('{"prompt": "a", "messages": []}', "a line must have prompt or messages, .* but has both"),
        ('{"text": "a"}', "but has neither \\('text'\\)"),
        ('{"prompt": "a", "custom_id": [1]}', "custom_id must be a string, but is a list of 1"),
        ('{"prompt": "a", "custom_id": "\\ud800"}', r"a line must be valid Unicode, but holds .*ud800.*; remove it"),
        ('{"prompt": "\\uDC00"}', r"a line must be valid Unicode, but holds the lone surrogate '\\udc00'; remove it"),
        ('{"url": "/v1/completions", "body": {}}', "custom_id must be a string, but is missing"),
        ('{"custom_id": 1, "body": {}}', "custom_id must be a string, but is 1"),
        ('{"custom_id": "a", "body": {}}', "url must be one of .*, but is missing; use /v1/chat/completions"),
        ('{"custom_id": "a", "url": 3, "body": {}}', "url must be one of .*, but is 3; use /v1/"),
        (
            '{"custom_id": "a", "url": "/v1/completion", "body": {}}',
            'url must be one of /v1/chat/completions, /v1/completions, but is "/v1/completion"; use /v1/completions',
        ),
        ('{"custom_id": "a", "url": "/v1/completions", "body": [1]}', "body must be an object, but is a list of 1"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body must be an object, but is missing"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions"}', "method must be 'POST', but is \"GET\""),
        ('{"custom_id": "a", "urll": "b", "body": {}}', "unknown key 'urll'; did you mean url?"),
    ],
)
def test_a_line_that_is_no_request_is_refused_in_one_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        read_line(line_of(text))


def test_a_line_nested_too_deep_is_refused_and_not_crashed_on():
    line = line_of('{"a": ' * 100_000)
    with pytest.raises(RecursionError):
        parse_record(line, max_line_bytes=10**6)


def test_a_line_over_the_cap_is_refused_with_both_numbers():
    with pytest.raises(RecordError, match=r"at most 1,000 bytes, but holds 1,200") as caught:
        parse_record(Line(number=1, data=None, size=1200, fingerprint="0" * 16), max_line_bytes=1000)
    assert caught.value.code == "line_too_long"


MISTAKES = [
    ({"temprature": 1}, "unknown option 'temprature'; did you mean temperature?"),
    ({"temperature": -1}, r"temperature must be in \[0, inf\), but is -1"),
    ({"temperature": "hot"}, "temperature must be a number, but is 'hot'"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, but is 0; use 1"),
    ({"n": 1.5}, "n must be an integer, but is 1.5"),
    ({"stream": True}, "stream must be false in a batch, but is true; leave it out"),
    ({"priority": 1.5}, "priority must be an integer, but is 1.5"),
    ({"priority": True}, "priority must be an integer, but is true"),
    ({"cache_salt": ""}, "cache_salt must be a text of at least one character"),
    ({"cache_salt": 3}, "cache_salt must be a text, but is 3"),
    ({"logit_bias": [1]}, "logit_bias must be an object of token ids and numbers, but is a list of 1"),
    ({"logit_bias": {"a": 1}}, 'logit_bias must have token ids as its keys, but has "a"'),
    ({"response_format": {"type": "xml"}}, "response_format.type must be one of text, json_object, json_schema"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "must ask for one structure, but asks with guided_regex and"),
]
CHAT_MISTAKES = [
    ({"messages": []}, "messages must be a list of at least one message, but is an empty list"),
    ({"messages": "hi"}, 'messages must be a list of at least one message, but is "hi"'),
    ({"prompt": "hi"}, "unknown option 'prompt'"),
    ({"logprobs": 3}, "logprobs must be true or false, but is 3"),
    ({"top_logprobs": 3}, "top_logprobs must come with logprobs, but stands alone; add logprobs: true"),
    ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none', but is \"required\"; use 'auto'"),
    ({"tools": {"a": 1}}, "tools must be a list, but is an object of 1"),
    ({"tools": [1]}, "tools must be a list of objects"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens must equal max_completion_tokens=4, but is 3"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt must be false when continue_final_message is true, but is true",
    ),
]
COMPLETION_MISTAKES = [
    ({"prompt": ["a", "b"]}, "prompt must be one prompt, but is a list of 2; give each a line"),
    ({"prompt": [1, "a"]}, "prompt must be a text or a list of token ids, but is a list of 2"),
    ({"prompt": [True]}, "prompt must be a text or a list of token ids, but is a list of 1"),
    ({"prompt": None}, "prompt must be a text or a list of token ids, but is missing"),
    ({"logprobs": True}, "logprobs must be an integer, but is true"),
    ({"echo": True, "prompt": [1]}, "echo must come with a text, but the prompt is token ids; leave it out"),
    ({"echo": True, "logprobs": 1}, "echo must not come with logprobs, but does; use prompt_logprobs"),
    ({"suffix": "x"}, 'suffix must be "" in a batch, but is "x"; leave it out'),
]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *((make, *mistake) for make in (chat, completion) for mistake in MISTAKES),
        *((chat, *mistake) for mistake in CHAT_MISTAKES),
        *((completion, *mistake) for mistake in COMPLETION_MISTAKES),
    ],
)
def test_an_option_that_is_wrong_is_refused_with_what_is_right(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_every_url_has_its_options():
    assert set(KINDS.values()) == set(OPTIONS)
