"""The official client against a server: answers are those of `LLM`, whole and streamed, errors have their classes."""

import asyncio
import contextlib
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from dcpjax.api.sampling_params import SamplingParams

USER = [{"role": "user", "content": "Hello there"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "string", "enum": ["ab", "cd"]}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
]


def offline(llm, prompt: str, **options: Any) -> str:
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0].outputs[0].text


def test_a_completion_is_that_of_the_library(client, llm):
    made = client.completions.create(prompt="abc", max_tokens=8, **GREEDY)
    assert made.choices[0].text == offline(llm, "abc", temperature=0, max_tokens=8)
    assert made.choices[0].finish_reason == "length"
    assert (made.model, made.object, made.usage.completion_tokens) == ("tiny", "text_completion", 8)


def test_a_chat_is_that_of_the_library(client, llm):
    made = client.chat.completions.create(messages=USER, max_tokens=8, user="u", **GREEDY)
    wanted = llm.chat(USER, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    assert made.choices[0].message.content == wanted.outputs[0].text
    assert made.usage.prompt_tokens == len(wanted.prompt_token_ids)


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"n": 2, "seed": 3, "temperature": 1}, {"echo": True}])
def test_a_streamed_completion_adds_up_to_the_whole(client, options):
    asked = {**GREEDY, "prompt": "abc", "max_tokens": 9, **options}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})
    for choice in whole.choices:
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert "".join(piece.text for piece in mine) == choice.text
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        if choice.logprobs:
            for name in ("tokens", "token_logprobs", "text_offset"):
                joined = [one for piece in mine if piece.logprobs for one in getattr(piece.logprobs, name)]
                wanted = getattr(choice.logprobs, name)
                assert joined == (pytest.approx(wanted, abs=1e-4) if name == "token_logprobs" else wanted)


@pytest.mark.parametrize("options", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "seed": 3, "temperature": 1}])
def test_a_streamed_chat_adds_up_to_the_whole(client, options):
    asked = {**GREEDY, "messages": USER, "max_tokens": 9, **options}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        if choice.logprobs:
            tokens = [one.token for piece in mine if piece.logprobs for one in piece.logprobs.content]
            assert tokens == [one.token for one in choice.logprobs.content]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_demanded_calls_stream_as_they_are_answered(client, choice):
    asked = {**GREEDY, "messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 120}
    asked |= {"parallel_tool_calls": False, "logit_bias": {"3": -100, "4": -100}}  # no white space
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    (wanted,) = whole.message.tool_calls
    assert calls[0].function.name == wanted.function.name == "pick"
    assert "".join(call.function.arguments or "" for call in calls) == wanted.function.arguments
    assert chunks[-1].finish_reason == whole.finish_reason
    assert all(not chunk.delta.content for chunk in chunks)


def test_64_streams_at_once_give_the_tokens_of_the_library(server, llm):
    prompts = [f"prompt {number} " * (1 + number % 3) for number in range(64)]

    async def stream(client: AsyncOpenAI, prompt: str) -> str:
        made = await client.completions.create(prompt=prompt, max_tokens=10, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in made])

    async def all_streams() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    wanted = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert asyncio.run(all_streams()) == [result.outputs[0].text for result in wanted]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature must be"),
        ({"n": 10**6}, openai.BadRequestError, "n must be at most"),
        ({"n": 300}, openai.BadRequestError, "at most 216 completions"),
        ({"max_tokens": 500}, openai.BadRequestError, "max_tokens must be at most"),
        ({"model": "other"}, openai.NotFoundError, "model must be one of tiny, small"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "did you mean temperature"),
        ({"response_format": {"type": "x"}}, openai.BadRequestError, "response_format.type must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_raises_the_class_of_its_status(client, options, kind, words, stream):
    with pytest.raises(kind, match=words):
        client.chat.completions.create(**{**GREEDY, "messages": USER, "stream": stream, **options})


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="model must be one of"):
        client.models.retrieve("large")


def test_a_full_queue_answers_429_with_retry_after(server, client):
    with server.service.room_for(server.service.most_completions), pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(prompt="a", max_tokens=1, **GREEDY)
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    client.completions.create(prompt="a", max_tokens=1, **GREEDY)


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_disconnects_leave_no_block_in_use(server, llm):
    body = b'{"model": "tiny", "prompt": "%d", "max_tokens": 150, "ignore_eos": true, "stream": %s}'
    for number in range(100):
        data = body % (number, b"true" if number % 2 else b"false")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        whole = head + b"content-length: %d\r\n\r\n" % len(data) + data
        connection = server.raw(whole[: len(whole) - 7 * (number % 5 == 0)])
        if number % 3 == 0:
            connection.settimeout(0.02 * (number % 4) + 0.001)
            with contextlib.suppress(TimeoutError):
                connection.recv(1000)
        connection.close()
    assert wait_until(lambda: not server.server.server_state.connections and not server.service._completions)
    assert wait_until(lambda: llm.stats().num_used_blocks == 0)
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert wait_until(lambda: server.service.engine.stats.num_used_blocks == 0)
