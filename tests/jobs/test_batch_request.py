import json

import pytest

from dcpjax.jobs.batch_request import BatchRequest, LineError, parse_line, read_batch_request, read_custom_id
from dcpjax.jobs.lines import Line
from dcpjax.openai.request import UNSUPPORTED_OPTIONS, BodyError, RequestBody

MESSAGES = [{"role": "user", "content": "hi"}]


def line_of(text: str | bytes, number: int = 1) -> Line:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return Line(number=number, data=data, size=len(data), fingerprint=f"{number:016x}")


def read(record, *, number: int = 1, defaults=None, seed: int = 0) -> BatchRequest:
    return read_line(line_of(json.dumps(record), number), defaults=defaults, seed=seed)


def read_line(line: Line, *, defaults=None, seed: int = 0) -> BatchRequest:
    entry = parse_line(line, max_line_bytes=10_000)
    return read_batch_request(entry, line, custom_id=read_custom_id(entry), defaults=defaults or {}, seed=seed)


def chat(**options) -> RequestBody:
    url, body = "/v1/chat/completions", {"model": "m", "messages": MESSAGES, **options}
    return read({"custom_id": "c", "method": "POST", "url": url, "body": body}).body


def completion(**options) -> RequestBody:
    url, body = "/v1/completions", {"model": "m", "prompt": "hi", **options}
    return read({"custom_id": "c", "method": "POST", "url": url, "body": body}).body


def test_both_urls_and_both_plain_forms_are_read():
    assert (chat().kind, chat().messages, chat().prompt) == ("chat", MESSAGES, None)
    assert (completion().kind, completion().messages, completion().prompt) == ("completion", None, "hi")
    plain = read({"prompt": "hi", "id": 7, "max_tokens": 3, "top_k": 2})
    sampling = plain.body.sampling
    assert (plain.body.kind, plain.custom_id, sampling.max_tokens, sampling.top_k) == ("completion", "7", 3, 2)
    assert read({"messages": MESSAGES, "custom_id": "x"}).custom_id == "x"
    assert read({"prompt": [1, 2]}).body.prompt == [1, 2]
    assert read({"prompt": ["one"]}).body.prompt == "one"
    assert read({"prompt": [[1, 2]]}).body.prompt == [1, 2]


def test_max_tokens_of_the_job_hold_where_a_line_does_not_say():
    assert read({"prompt": "a"}, defaults={"max_tokens": 9}).body.sampling.max_tokens == 9
    assert read({"prompt": "a", "max_tokens": 3}, defaults={"max_tokens": 9}).body.sampling.max_tokens == 3


def test_a_line_goes_before_the_defaults():
    defaults = {"temperature": 0.5, "top_p": 0.9}
    sampling = read({"prompt": "a", "temperature": 0}, defaults=defaults).body.sampling
    assert (sampling.temperature, sampling.top_p) == (0, 0.9)


@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_an_option_that_cannot_be_served_is_accepted_where_it_changes_nothing(name):
    assert completion(**{name: UNSUPPORTED_OPTIONS[name]}) == completion()
    with pytest.raises(BodyError, match=f"^{name} must be .* in a batch, but is .*; leave it out"):
        completion(**{name: 17})


def test_random_draws_follow_from_the_line_and_not_from_the_order():
    seeds = {read({"prompt": "a"}, number=number, seed=seed).body.sampling.seed for number in (1, 2) for seed in (0, 1)}
    assert len(seeds) == 4
    assert read({"prompt": "a"}, number=2).body.sampling.seed == read({"prompt": "a"}, number=2).body.sampling.seed
    assert read({"prompt": "a", "seed": 5}, seed=1).body.sampling.seed == 5


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
        parse_line(line, max_line_bytes=10**6)


def test_a_line_over_the_cap_is_refused_with_both_numbers():
    with pytest.raises(LineError, match=r"at most 1,000 bytes, but holds 1,200") as caught:
        parse_line(Line(number=1, data=None, size=1200, fingerprint="0" * 16), max_line_bytes=1000)
    assert caught.value.code == "line_too_long"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_a_line_may_have_several_prompts(prompt):
    assert completion(prompt=prompt).prompts == prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "unknown option 'temprature'; did you mean temperature?"),
        ({"temperature": -1}, r"temperature must be in \[0, 3.4e\+38\], but is -1"),
        ({"stream": True}, "stream must be false in a batch, but is true; leave it out"),
        ({"suffix": "x"}, 'suffix must be "" in a batch, but is "x"; leave it out'),
    ],
)
def test_a_mistake_in_the_body_is_a_mistake_of_the_line(options, message):
    with pytest.raises(ValueError, match=message):
        completion(**options)
