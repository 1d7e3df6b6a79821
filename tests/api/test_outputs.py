from dataclasses import fields
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.api.outputs import CompletionOutput, RequestMetrics, RequestOutput, duration, html_table

SCRIPT = "<script>alert(1)</script>"
LONG = "word\n" * 100_000


class Cells(HTMLParser):
    """Reads a table as a browser would: its tags, their attributes and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag in ("th", "td"):
            self.texts.append("")

    def handle_data(self, data):
        if self.texts and data.strip("\n"):
            self.texts[-1] += data


def result(text: str = "Paris.", prompt: str | None = "The capital of France is", **options) -> RequestOutput:
    completion = CompletionOutput(0, text, [7] * 24, "length")
    return RequestOutput("3", prompt, [5] * 700, [completion], True, **options)


def measured() -> RequestMetrics:
    """Arrived at 10 s, scheduled at 10.25, tokens from 11 to 13, finished at 14; five tokens."""
    return RequestMetrics(10.0, 10.25, 11.0, 14.0, 1, 13.0, 700, 512, 5)


# Metrics.


def test_durations_lie_between_the_moments_they_are_named_after():
    metrics = measured()
    assert metrics.queue_time == 0.25
    assert metrics.prefill_time == 0.75
    assert metrics.time_to_first_token == 1.0
    assert metrics.decode_time == 2.0
    assert metrics.time_per_output_token == 0.5  # four gaps between five tokens
    assert metrics.latency == 4.0


DURATIONS = ["queue_time", "prefill_time", "time_to_first_token", "decode_time", "time_per_output_token", "latency"]


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_is_none_until_it_is_known(name):
    assert getattr(RequestMetrics(0.0), name) is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_have_no_gap(tokens):
    metrics = RequestMetrics(0.0, 0.0, 1.0, last_token_time=1.0, num_generated_tokens=tokens)
    assert metrics.time_per_output_token is None


def test_a_clock_that_starts_at_zero_is_a_known_moment():
    metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, last_token_time=0.0, num_generated_tokens=2)
    assert [getattr(metrics, name) for name in DURATIONS] == [0.0] * 6


def test_new_fields_follow_the_old_so_that_positions_keep_their_meaning():
    assert [field.name for field in fields(RequestMetrics)][:5] == [
        "arrival_time",
        "first_scheduled_time",
        "first_token_time",
        "finished_time",
        "preemptions",
    ]
    assert [field.name for field in fields(CompletionOutput)][6:] == ["logprobs", "cumulative_logprob"]
    assert [field.name for field in fields(RequestOutput)][7:] == ["prompt_logprobs"]


def test_metrics_read_as_a_sentence():
    metrics = RequestMetrics(0.0, 0.1, 0.8, 2.1, 1, 2.05, 700, 512, 24)
    assert repr(metrics) == (
        "RequestMetrics(queued 0.1 s, first token after 0.8 s, 24 tokens in 1.2 s (54 ms each), "
        "512 of 700 prompt tokens cached, 1 preemption)"
    )


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (RequestMetrics(5.0), "waiting"),
        (RequestMetrics(5.0, 5.02), "queued 20 ms"),
        (RequestMetrics(5.0, num_prompt_tokens=1), "waiting, 0 of 1 prompt token cached"),
        (RequestMetrics(5.0, 5.0, 6.0, num_generated_tokens=1), "queued 0 ms, first token after 1.0 s, 1 token"),
        (RequestMetrics(5.0, preemptions=2), "waiting, 2 preemptions"),
    ],
)
def test_metrics_say_only_what_has_happened(metrics, text):
    assert repr(metrics) == f"RequestMetrics({text})"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0002, "0.2 ms"), (0.054, "54 ms"), (0.0949, "95 ms"), (0.095, "0.1 s"), (3725.04, "3725.0 s")],
)
def test_a_duration_has_a_unit_that_fits_it(seconds, text):
    assert duration(seconds) == text


# One line for people.


def test_a_completion_is_one_line_with_its_beginning_and_counts():
    assert repr(CompletionOutput(1, "Paris,\nof course.", [4, 5, 6])) == (
        "CompletionOutput(index=1, 'Paris,\\nof course.', 3 tokens)"
    )
    ended = CompletionOutput(0, "a", [4], "stop", "</s>", cumulative_logprob=-0.5)
    assert repr(ended) == (
        "CompletionOutput(index=0, 'a', 1 token, finish_reason='stop', stop_reason='</s>', cumulative_logprob=-0.5)"
    )
    failed = CompletionOutput(0, "", [], "error", error="a prompt must hold at least one token, but is empty")
    assert "error='a prompt must hold at least one token, but is empty'" in repr(failed)


def test_a_result_is_one_line_with_its_prompt_and_first_completion():
    first = "CompletionOutput(index=0, 'Paris.', 24 tokens, finish_reason='length')"
    assert repr(result()) == (
        "RequestOutput(request_id='3', prompt='The capital of France is', 700 prompt tokens, "
        f"1 output: {first}, finished)"
    )
    assert repr(result(prompt=None, num_cached_tokens=512)) == (
        f"RequestOutput(request_id='3', 700 prompt tokens, 512 cached, 1 output: {first}, finished)"
    )
    assert repr(RequestOutput("0", None, [1])) == "RequestOutput(request_id='0', 1 prompt token, 0 outputs, running)"


def test_a_long_context_does_not_make_a_long_line():
    many = [CompletionOutput(index, LONG, [1] * 30_000, logprobs=[{}] * 30_000) for index in range(50)]
    shown = repr(RequestOutput("0", LONG, [1] * 30_000, many, prompt_logprobs=[None, *({} for _ in range(30_000))]))
    assert len(shown) < 300
    assert "\n" not in shown
    assert "30,000 prompt tokens, 50 outputs: CompletionOutput(index=0" in shown


# Notebooks.


@pytest.mark.parametrize(
    "shown",
    [
        CompletionOutput(0, SCRIPT, [1]),
        CompletionOutput(0, "", [], "error", error=SCRIPT),
        RequestOutput("0", SCRIPT, [1], [CompletionOutput(0, SCRIPT, [1])], metrics=measured()),
    ],
)
def test_a_models_text_never_becomes_markup(shown):
    page = shown._repr_html_()
    assert SCRIPT not in page
    assert SCRIPT in Cells(page).texts
    assert Cells(page).tags == {"table", "tr", "th", "td"}


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40) | st.text("<>&\"'/=$", max_size=20))
def test_any_text_reads_back_from_the_table_as_it_was(text):
    cells = Cells(CompletionOutput(0, text, [1])._repr_html_())
    assert cells.texts == ["0: 1 token, running", text]
    assert cells.attributes == {"class", "style"}


def test_a_result_shows_prompt_completions_and_metrics():
    cells = Cells(result(metrics=measured())._repr_html_())
    assert cells.texts == [
        "prompt: 700 tokens",
        "The capital of France is",
        "0: 24 tokens, length",
        "Paris.",
        "metrics",
        repr(measured()),
    ]
    assert Cells(result(prompt=None)._repr_html_()).texts[:2] == ["prompt: 700 tokens", ""]


def test_a_completion_that_failed_on_its_way_shows_how_far_it_came():
    failed = CompletionOutput(0, "half", [1, 2], "error", error="the logits are not finite")
    assert Cells(failed._repr_html_()).texts == ["0: 2 tokens, error", "half\nthe logits are not finite"]


def test_the_table_has_no_colour_of_its_own_and_fetches_nothing():
    page = result(metrics=measured())._repr_html_()
    assert not any(word in page for word in ("color", "background", "#", "http", "src", "url"))


def test_mathjax_leaves_a_models_dollar_signs_alone():
    assert html_table([("a", "$x$")]).startswith('<table class="tex2jax_ignore mathjax_ignore">')


def test_the_names_of_rows_are_escaped_too():
    assert Cells(html_table([(SCRIPT, "")])).texts == [SCRIPT, ""]


def test_a_long_text_is_clipped_in_the_table():
    (_, text) = Cells(html_table([("a", "x" * 5000)])).texts
    assert text == "x" * 2000 + "... (3,000 more characters)"
    assert len(result(LONG, LONG)._repr_html_()) < 10_000


def test_logprobs_are_none_unless_given():
    assert CompletionOutput(0, "", []).logprobs is None
    assert CompletionOutput(0, "", []).cumulative_logprob is None
    assert result().prompt_logprobs is None
