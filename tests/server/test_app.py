"""The paths beside OpenAI's, the metrics and the description of the server."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcpjax.api.sampling_params import SamplingParams


def test_tokens_of_a_text_and_back(server, llm):
    with server.http() as http:
        made = http.post("/tokenize", json={"model": "tiny", "prompt": "Hi you", "return_token_strs": True}).json()
        assert made["tokens"] == llm.tokenizer.encode("Hi you")
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["max_model_len"] == llm.max_model_len
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Hi you"}


def test_tokens_of_a_conversation(server, llm):
    messages = [{"role": "user", "content": "Hi"}]
    with server.http() as http:
        made = http.post("/tokenize", json={"messages": messages}).json()
    assert made["tokens"] == llm.tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"prompt": 3}, "prompt must be a text"),
        ("/tokenize", {"promt": "a"}, "did you mean prompt"),
        ("/tokenize", {"messages": "a"}, "messages must be a list"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "must be true or false"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must be an integer"),
        ("/detokenize", {}, "tokens must be a list"),
    ],
)
def test_mistakes_about_tokens_are_named(server, path, body, words):
    with server.http() as http:
        made = http.post(path, json=body)
    assert made.status_code == 400
    assert words in made.json()["error"]["message"]


def test_health_version_and_unknown_paths(server):
    with server.http() as http:
        assert [http.get(path).status_code for path in ("/health", "/ping", "/version")] == [200] * 3
        assert http.get("/nothing").json()["error"]["code"] == "not_found"
        assert http.get("/v1/completions").status_code == 405
        assert http.get("/v1/models/").status_code == 404  # no redirect, which would lose the method


def numbers(server) -> dict[str, float]:
    with server.http() as http:
        text = http.get("/metrics").text
    return {
        ",".join([sample.name, *(sample.labels.get(name, "") for name in ("finished_reason", "rank"))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_count_what_was_done(server, client, llm):
    before = numbers(server)
    client.completions.create(model="tiny", prompt="abcdef", max_tokens=5, n=2, extra_body={"ignore_eos": True})
    after = numbers(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:generation_tokens_total,,"] == 10
    assert grown["vllm:request_success_total,length,"] == 2
    assert grown["vllm:time_to_first_token_seconds_count,,"] == 2
    assert grown["vllm:inter_token_latency_seconds_count,,"] == 8
    assert grown["vllm:e2e_request_latency_seconds_count,,"] == 2
    assert grown["vllm:request_prompt_tokens_sum,,"] == 2 * len(llm.tokenizer.encode("abcdef"))
    assert {name for name in after if name.startswith(("vllm:num_requests", "vllm:kv", "dcpjax:"))} == {
        "vllm:num_requests_running,,",
        "vllm:num_requests_waiting,,",
        "vllm:kv_cache_usage_perc,,",
        "dcpjax:kv_cache_usage_perc,,0",
    }
    assert after["vllm:kv_cache_usage_perc,,"] == after["vllm:num_requests_running,,"] == 0


def test_a_failed_step_answers_500_and_the_server_goes_on(server, client, llm, monkeypatch):
    def broken() -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch, server.http() as http:
        patch.setattr(llm, "advance", broken)
        made = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert made.status_code == 500
    text = client.completions.create(model="tiny", prompt="a", max_tokens=3, temperature=0).choices[0].text
    assert text == llm.generate("a", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text
