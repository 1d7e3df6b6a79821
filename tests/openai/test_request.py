import pytest

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.openai.request import (
    IGNORED_OPTIONS,
    KIND_OF_URL,
    OPTIONS,
    SAMPLING_OPTIONS,
    UNSUPPORTED_OPTIONS,
    BodyError,
    RequestBody,
    read_body,
)
from dcpjax.openai.response_format import BODY_OPTIONS

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}},
    {"type": "function", "function": {"name": "g"}},
]


def chat(**options) -> RequestBody:
    return read_body("chat", {"model": "m", "messages": MESSAGES, **options}, place="in a batch")


def completion(**options) -> RequestBody:
    return read_body("completion", {"model": "m", "prompt": "hi", **options}, place="in a batch")


def named(function: str) -> dict:
    return {"type": "function", "function": {"name": function}}


def test_a_chat_has_messages_and_a_completion_has_a_prompt():
    assert (chat().kind, chat().messages, chat().prompt) == ("chat", MESSAGES, None)
    assert (completion().kind, completion().messages, completion().prompt) == ("completion", None, "hi")
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion(prompt=["one"]).prompt == "one"
    assert completion(prompt=[[1, 2]]).prompt == [1, 2]


def test_max_tokens_default_to_sixteen_for_completions_and_the_model_length_for_chats():
    assert completion().sampling.max_tokens == 16
    assert chat().sampling.max_tokens is None
    assert chat(max_completion_tokens=5).sampling.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).sampling.max_tokens == 5
    assert completion(max_tokens=None).sampling.max_tokens == 16
    assert read_body("completion", {"prompt": "a"}, defaults={"max_tokens": 9}).sampling.max_tokens == 9


def test_a_body_goes_before_the_defaults():
    defaults = {"temperature": 0.5, "top_p": 0.9}
    sampling = read_body("completion", {"prompt": "a", "temperature": 0}, defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p) == (0, 0.9)


VALUES = {
    "temperature": 0.3,
    "top_p": 0.4,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 11,
    "stop": ["a"],
    "stop_token_ids": [3],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 1,
    "ignore_eos": True,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 2,
    "logprob_token_ids": [4, 2],
    "truncate_prompt_tokens": 8,
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", SAMPLING_OPTIONS)
def test_every_sampling_option_arrives(make, name):
    value = VALUES[name]
    assert getattr(make(**{name: value}).sampling, name) == value != getattr(SamplingParams(), name)


@pytest.mark.parametrize("name", IGNORED_OPTIONS)
def test_options_about_bookkeeping_are_accepted(name):
    assert chat(**{name: "anything"}) == chat()


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_null_is_as_good_as_nothing(kind):
    make = chat if kind == "chat" else completion
    names = [name for name in OPTIONS[kind] if name not in ("messages", "prompt")]
    assert make(**dict.fromkeys(names)) == make()


@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_an_option_that_cannot_be_served_is_accepted_where_it_changes_nothing(name):
    assert completion(**{name: UNSUPPORTED_OPTIONS[name]}) == completion()
    with pytest.raises(BodyError, match=f"^{name} must be .* in a batch, but is .*; leave it out"):
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


def test_a_list_of_prompts_is_kept_and_one_alone_is_that_prompt():
    assert completion(prompt=["a", [1, 2]]).prompts == ["a", [1, 2]]
    assert completion(prompt=["a"]).prompts == completion(prompt="a").prompts == ["a"]
    assert completion(prompt=[[1, 2]]).prompts == completion(prompt=[1, 2]).prompts == [[1, 2]]


def test_effort_and_verbosity_are_variables_of_the_template():
    request = chat(reasoning_effort="low", verbosity="high", chat_template_kwargs={"enable_thinking": False})
    assert request.chat_template_kwargs == {"reasoning_effort": "low", "verbosity": "high", "enable_thinking": False}
    assert chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "x"}).chat_template_kwargs == {
        "reasoning_effort": "x"
    }


def test_an_echo_with_log_probabilities_scores_the_prompt():
    assert completion(echo=True, logprobs=2).sampling.prompt_logprobs == 2
    assert completion(logprobs=2).sampling.prompt_logprobs is None


def test_no_tokens_at_all_may_be_asked_for_of_a_completion():
    request = completion(max_tokens=0)
    assert (request.generates, request.sampling.max_tokens) == (False, 1)
    assert completion(max_tokens=1).generates


def test_a_demanded_call_is_the_structure_of_the_answer():
    call = {"name": {"type": "string", "enum": ["f"]}, "parameters": {"type": "object", "properties": {"a": {}}}}
    required = chat(tools=TOOLS, tool_choice="required")
    schema = required.sampling.structured_outputs.json
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    assert schema["items"]["anyOf"][0]["properties"] == call
    assert chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).demanded_call.schema()["maxItems"] == 1
    assert chat(tools=TOOLS, tool_choice=named("f")).sampling.structured_outputs.json == call["parameters"]
    assert chat(tools=TOOLS, tool_choice=named("g")).sampling.structured_outputs.json["additionalProperties"] is False
    assert required.tools == TOOLS
    for free in (chat(tools=TOOLS), chat(tools=TOOLS, tool_choice="none")):
        assert (free.sampling.structured_outputs, free.demanded_call) == (None, None)


def test_definitions_of_several_tools_are_found_from_the_whole_schema():
    def tool(name: str, definition: dict) -> dict:
        schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    same = [tool("f", {"type": "string"}), tool("g", {"type": "string"})]
    schema = chat(tools=same, tool_choice="required").sampling.structured_outputs.json
    assert schema["$defs"] == {"X": {"type": "string"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    with pytest.raises(ValueError, match=r"tools must agree on .defs, but differ in 'X'; rename one"):
        chat(tools=[same[0], tool("g", {"type": "number"})], tool_choice="required")


def test_an_unsupported_option_is_refused_in_the_callers_words():
    with pytest.raises(BodyError, match="stream must be false here, but is true; leave it out"):
        read_body("completion", {"prompt": "a", "stream": True})


MISTAKES = [
    ({"temprature": 1}, "unknown option 'temprature'; did you mean temperature?"),
    ({"temperature": -1}, r"temperature must be in \[0, 3.4e\+38\], but is -1"),
    ({"temperature": "hot"}, "temperature must be a number, but is 'hot'"),
    ({"max_tokens": -1}, "max_tokens must be at least 1, but is -1; use 1"),
    ({"stream_options": {"include_usage": 3}}, "stream_options must hold true or false"),
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
    ({"max_tokens": 0}, "max_tokens must be at least 1, but is 0; use 1"),
    ({"reasoning_effort": "huge"}, "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, but is"),
    ({"verbosity": 3}, "verbosity must be one of low, medium, high, but is 3"),
    ({"tool_choice": "required"}, 'tool_choice must come with tools, but is "required" without any; add tools'),
    ({"tool_choice": "must", "tools": TOOLS}, "tool_choice must be 'none', 'auto', 'required' or {.*}, but is"),
    ({"tool_choice": named("h"), "tools": TOOLS}, r"tool_choice must name one of the tools \(f, g\), but names 'h'"),
    ({"tool_choice": "required", "tools": [{"name": "f"}]}, "tools must be {'type': 'function', .*}, but one is"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, but is 1"),
    (
        {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
        "tool_choice must be 'auto' or 'none' beside a structure such as response_format, but demands a call",
    ),
    ({"tools": {"a": 1}}, "tools must be a list of objects, but is an object of 1"),
    ({"tools": [1]}, "tools must be a list of objects"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens must equal max_completion_tokens=4, but is 3"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt must be false when continue_final_message is true, but is true",
    ),
]
COMPLETION_MISTAKES = [
    ({"prompt": ["a", 3]}, "prompt must be a text or a list of token ids, but is 3"),
    ({"prompt": ["a"] * 2049}, "prompt must be at most 2,048 prompts, but is a list of 2,049"),
    (
        {"prompt": ["a", "b"], "n": 16_000},
        "prompt must ask for at most 16,384 completions, but asks for 2 times n=16,000",
    ),
    ({"prompt": [1, "a"]}, "prompt must be a text or a list of token ids, but is a list of 2"),
    ({"prompt": [True]}, "prompt must be a text or a list of token ids, but is a list of 1"),
    ({"prompt": None}, "prompt must be a text or a list of token ids, but is missing"),
    ({"logprobs": True}, "logprobs must be an integer, but is true"),
    ({"echo": True, "logprob_token_ids": [1]}, "echo must not come with logprob_token_ids, but does; use logprobs"),
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
    assert set(KIND_OF_URL.values()) == set(OPTIONS)
