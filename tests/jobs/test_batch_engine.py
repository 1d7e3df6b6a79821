"""A whole batch job with a tiny model: records equal what the library gives, whatever interrupted the job."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from small_models import character_model

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.jobs.batch_engine import BatchEngine, open_batch_engine
from dcpjax.jobs.job import BatchDefaults
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.run import BatchFiles, run_batch, run_files
from dcpjax.jobs.statistics import JobStatistics
from dcpjax.openai.parsers.formats import HERMES, Call, CallFormat
from dcpjax.openai.parsers.message import MessageFormats

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**20,
    "block_size": 16,
    "max_model_len": 100,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("model") / "tiny", top_k=7)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[BatchEngine]:
    made, own = open_batch_engine(model, OPTIONS, BatchOptions(), progress=False)
    assert own == {"top_k": 7}
    yield made
    assert made.num_unfinished == 0


def run(folder: Path, engine: BatchEngine, *lines: dict[str, Any], stop=lambda: False, **options: Any) -> JobStatistics:
    if lines:
        (folder / "in").write_text("\n".join(map(json.dumps, lines)))
    files, statistics = BatchFiles(input=folder / "in", output=folder / "out"), JobStatistics()
    defaults, batch = BatchDefaults(model="tiny", sampling={}, seed=0), BatchOptions(ordered=True, **options)
    run_files(files, batch, defaults, lambda: (engine, {}), statistics=statistics, shown=False, stop=stop)
    return statistics


def bodies(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return [record["error"] or record["response"]["body"] for record in records]


def test_records_are_what_the_library_gives(tmp_path, engine):
    greedy = {"temperature": 0, "max_tokens": 8}
    messages = [{"role": "user", "content": "hello"}]
    run(
        tmp_path,
        engine,
        {"prompt": "abc", **greedy},
        {"messages": messages, **greedy},
        {"prompt": [5, 6, 7], **greedy, "n": 2, "logprobs": 2},
    )
    params = SamplingParams(temperature=0, max_tokens=8)
    llm, (first, second, third) = engine._llm, bodies(tmp_path)
    assert first["choices"][0]["text"] == llm.generate("abc", params)[0].outputs[0].text
    assert second["choices"][0]["message"]["content"] == llm.chat(messages, params)[0].outputs[0].text
    assert third["usage"]["completion_tokens"] == 16
    scores = third["choices"][1]["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == 8
    assert all(
        len(top) == 2 and max(top.values()) == pytest.approx(chosen)
        for top, chosen in zip(scores["top_logprobs"], scores["token_logprobs"], strict=True)
    )


def test_a_list_of_prompts_gives_what_each_gives_alone(tmp_path, engine):
    greedy = {"temperature": 0, "max_tokens": 6}
    prompts = ["abc", "xyz", "hello"]
    run(tmp_path, engine, {"prompt": prompts, "n": 2, **greedy}, *({"prompt": prompt, **greedy} for prompt in prompts))
    together, *alone = bodies(tmp_path)
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [body["choices"][0]["text"] for body in alone for _ in range(2)]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert together["usage"]["prompt_tokens"] == sum(body["usage"]["prompt_tokens"] for body in alone)


def test_one_bad_prompt_of_a_list_is_named_and_nothing_of_it_runs_on(tmp_path, engine):
    run(tmp_path, engine, {"prompt": ["abc", "", "xyz"]}, {"prompt": "ok", "temperature": 0})
    refused, served = bodies(tmp_path)
    assert refused["message"] == "prompt 1: a prompt must hold at least one token, but is empty"
    assert served["object"] == "text_completion"


def test_a_list_of_which_the_engine_refuses_one_runs_none(tmp_path, engine, monkeypatch):
    add, seen = engine._llm.engine.add, []

    def refuse_second(request):
        seen.append(request)
        if len(seen) == 2:
            raise ValueError("the cache is too small")
        add(request)

    monkeypatch.setattr(engine._llm.engine, "add", refuse_second)
    run(tmp_path, engine, {"prompt": ["abc", "xyz", "hello"]})
    assert [body["message"] for body in bodies(tmp_path)] == ["the cache is too small"]
    assert not engine._llm.engine.has_work


def test_an_echo_scores_the_prompt_and_may_be_all_there_is(tmp_path, engine):
    options = {"echo": True, "logprobs": 1, "temperature": 0}
    ids = engine._llm.tokenizer.encode("hello")
    run(
        tmp_path,
        engine,
        {"prompt": "hello", "max_tokens": 2, **options},
        {"prompt": "hello", "max_tokens": 0, **options},
        {"prompt": ids, "max_tokens": 0, **options},
    )
    whole, echo, of_ids = (body["choices"][0] for body in bodies(tmp_path))
    assert echo["text"] == of_ids["text"] == "hello"
    assert echo["logprobs"] == of_ids["logprobs"]
    assert echo["logprobs"]["tokens"] == list("hello")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = engine._llm.generate("hello", params)[0].prompt_logprobs
    expected = [None, *(scores[place][token].logprob for place, token in enumerate(ids) if place)]
    assert echo["logprobs"]["token_logprobs"] == pytest.approx(expected)
    assert whole["logprobs"]["token_logprobs"][:5] == pytest.approx(expected)
    assert (len(whole["logprobs"]["tokens"]), whole["text"][:5]) == (7, "hello")


def test_calls_are_read_from_marks_that_other_answers_do_not_show(tmp_path, engine, monkeypatch):
    """The model says nothing but a special token, which begins and ends the calls of this test."""
    form = CallFormat(opening="<u>", closing="</u>", read=lambda text: Call("f", "{}") if not text else None)
    monkeypatch.setattr(engine, "formats", MessageFormats(calls=form))
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"messages": [{"role": "user", "content": "hello"}], "allowed_token_ids": [1], "max_tokens": 3}
    run(tmp_path, engine, {**chat, "tools": tools}, {**chat, "tools": tools, "tool_choice": "none"}, chat)
    called, unasked, plain = (ChatCompletion.model_validate(body).choices[0] for body in bodies(tmp_path))
    assert [call.function.name for call in called.message.tool_calls or ()] == ["f", "f", "f"]
    assert called.message.content is None
    assert [choice.message.content for choice in (unasked, plain)] == ["", ""]


def test_the_parsers_are_those_of_the_options(model):
    for name, form in {"auto": None, "hermes": HERMES}.items():
        made, _ = open_batch_engine(model, OPTIONS, BatchOptions(tool_call_parser=name), progress=False)
        assert made.formats.calls is form


def test_calls_that_are_demanded_come(tmp_path, engine):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**schema, "additionalProperties": False}}}
        for name in ("f", "g")
    ]
    line = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "temperature": 0, "max_tokens": 60}
    named = {"type": "function", "function": {"name": "g"}}
    whitespace = {"logit_bias": {str(token): -100 for token in engine._llm.tokenizer.encode(" \n")}}
    run(
        tmp_path,
        engine,
        {**line, **whitespace, "tool_choice": "required", "parallel_tool_calls": False},
        {**line, **whitespace, "tool_choice": named},
    )
    required, chosen = (ChatCompletion.model_validate(body, strict=True).choices[0] for body in bodies(tmp_path))
    (call,), (other,) = required.message.tool_calls, chosen.message.tool_calls
    assert (required.finish_reason, chosen.finish_reason) == ("tool_calls", "stop")
    assert call.function.name in ("f", "g")
    assert other.function.name == "g"
    assert all(isinstance(json.loads(one.function.arguments)["ok"], bool) for one in (call, other))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x" * 100}, "a prompt must hold at most 99 tokens"),
        ({"prompt": ""}, "a prompt must hold at least one token"),
        ({"prompt": [500]}, "token ids must be in"),
        ({"prompt": "abc", "priority": 2}, "priority must be 0 while scheduling_policy is 'fcfs', but is 2"),
        ({"messages": [{"role": "king", "content": "a"}]}, "must be one of system, developer, user"),
        ({"messages": [1]}, "must be a dict with role and content, but is 1"),
        ({"prompt": "abc", "stop_token_ids": [900]}, "stop_token_ids must"),
    ],
)
def test_what_the_model_cannot_run_is_an_error_record(tmp_path, engine, line, message):
    run(tmp_path, engine, line, {"prompt": "ok", "temperature": 0})
    refused, served = bodies(tmp_path)
    assert message in refused["message"]
    assert served["object"] == "text_completion"


def test_what_the_engine_refuses_is_an_error_record(tmp_path, engine, monkeypatch):
    def refuse(request):
        raise ValueError("the cache is too small")

    monkeypatch.setattr(engine._llm.engine, "add", refuse)
    run(tmp_path, engine, {"prompt": "abc", "n": 2})
    assert [body["message"] for body in bodies(tmp_path)] == ["the cache is too small"]


def test_nobody_watches_the_tokens_of_a_batch(tmp_path, engine, monkeypatch):
    seen, add = [], engine._llm.engine.add
    monkeypatch.setattr(engine._llm.engine, "add", lambda request: (seen.append(request.streamed), add(request)))
    run(tmp_path, engine, {"prompt": "abc", "max_tokens": 2, "n": 2})
    assert seen == [False, False]


def test_a_stop_starts_nothing_that_has_not_begun(tmp_path, engine, monkeypatch):
    """Four requests have a seat: those of two lines, and the first of two of the last line."""
    begun, launch = set[int](), engine._llm.runner.launch
    monkeypatch.setattr(
        engine._llm.runner,
        "launch",
        lambda step: (begun.update(entry.request.number for entry in step), launch(step))[1],
    )
    lines = [{"prompt": "abc", "max_tokens": 40, "n": count} for count in (2, 1, 2)]
    stopped = lambda: len(begun) == 4  # noqa: E731
    statistics = run(tmp_path, engine, *lines, stop=stopped, grace_seconds=1000)
    assert (statistics.state, statistics.written) == ("stopped", 2)
    assert len(begun) == 4
    assert engine.num_unfinished == 0
    assert engine._llm.stats().num_running == engine._llm.stats().num_waiting == 0


def test_an_interrupted_job_ends_with_the_same_texts(tmp_path, engine):
    lines = [{"prompt": f"line {number}", "temperature": 1, "max_tokens": 6} for number in range(12)]
    texts = []
    for name, stops in (("whole", False), ("cut", True)):
        folder = tmp_path / name
        folder.mkdir()
        steps = iter(range(1000))
        stop = lambda steps=steps, stops=stops: stops and next(steps) > 20  # noqa: E731
        statistics = run(folder, engine, *lines, stop=stop, grace_seconds=0, max_in_flight=3)
        assert (statistics.state == "stopped") == stops
        run(folder, engine, resume=True)
        texts.append([body["choices"][0]["text"] for body in bodies(folder)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 6


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_the_real_engine_killed_at_random_moments_answers_every_line_once_and_alike(tmp_path, model, kills):
    lines = [{"prompt": f"line {number}", "temperature": 1, "max_tokens": 60} for number in range(20 + 20 * kills)]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    flags = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    job = [sys.executable, "-m", "dcpjax", "batch", tmp_path / "in", "-o", tmp_path / "out", "--model", model, "-q"]
    dice = random.Random(kills)
    for _ in range(kills):
        with subprocess.Popen([*job, "--resume", *flags], stderr=subprocess.DEVNULL) as process:
            _wait_for_records(process, tmp_path / "out", dice.randint(1, 10))
            process.kill()
    subprocess.run([*job, "--resume", "--ordered", *flags], check=True, timeout=600)
    killed = [body["choices"][0]["text"] for body in bodies(tmp_path)]
    (tmp_path / "out").unlink()
    subprocess.run([*job, "--ordered", *flags], check=True, timeout=600)
    assert killed == [body["choices"][0]["text"] for body in bodies(tmp_path)]
    assert len(killed) == len(lines)


def _wait_for_records(process: subprocess.Popen, output: Path, more: int) -> None:
    """Until so many further lines are there, or the job is over."""
    wanted = _lines(output) + more
    while process.poll() is None and _lines(output) < wanted:
        time.sleep(0.02)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_the_function_runs_a_file_from_beginning_to_end(tmp_path, model):
    (tmp_path / "in").write_text('{"prompt": "abc"}\n{"prompt": "abc", "top_k": 1}\n')
    statistics = run_batch(tmp_path / "in", tmp_path / "out", model, progress=False, max_tokens=3, **OPTIONS)
    assert (statistics.done, statistics.errors, statistics.new_tokens) == (2, 0, 6)
    assert bodies(tmp_path)[0]["model"] == str(model)
