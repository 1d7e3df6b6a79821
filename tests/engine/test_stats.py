from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from dcpjax.engine.stats import EngineCounters, EngineStats, SchedulerCounters


def snapshot(**changes) -> EngineStats:
    values = {
        "num_running": 3,
        "num_waiting": 1,
        "num_blocks": 128,
        "num_used_blocks": 32,
        "num_cached_blocks": 20,
        "block_size": 256,
        "tokens_per_rank": (1024, 1023),
        "compile_seconds": 2.1,
    }
    scheduled = SchedulerCounters(prefix_queries=700, prefix_hits=525, prompt_tokens=900, preemptions=1, steps=30)
    done = EngineCounters(generated_tokens=240, seconds=4.0)
    return EngineStats(**(values | asdict(scheduled) | asdict(done) | changes))


def test_rates_are_fractions_of_what_they_are_named_after():
    stats = snapshot()
    assert (stats.cache_usage, stats.prefix_hit_rate, stats.tokens_per_second) == (0.25, 0.75, 60.0)


def test_rates_of_an_engine_that_did_nothing_are_zero():
    stats = snapshot(**asdict(SchedulerCounters()), **asdict(EngineCounters()), num_blocks=0)
    assert (stats.cache_usage, stats.prefix_hit_rate, stats.tokens_per_second) == (0.0, 0.0, 0.0)


def test_every_counter_is_a_field_of_the_snapshot_and_begins_at_zero():
    for counters in (SchedulerCounters, EngineCounters):
        assert {field.name for field in fields(counters)} <= {field.name for field in fields(EngineStats)}
        assert not any(asdict(counters()).values())


def test_a_snapshot_does_not_change_while_the_engine_goes_on():
    with pytest.raises(FrozenInstanceError):
        snapshot().steps = 31  # type: ignore[misc]
    assert snapshot() == snapshot()
    assert len({snapshot(), snapshot()}) == 1


def test_a_snapshot_reads_in_a_few_lines():
    assert repr(snapshot()).splitlines() == [
        "EngineStats",
        "  requests: 3 running, 1 waiting, 1 preemption",
        "  cache: 32 of 128 blocks of 256 tokens in use (25%), 20 reusable",
        "  tokens per rank: 1,024 | 1,023",
        "  prefix cache: 525 of 700 prompt tokens found (75%)",
        "  work: 900 prompt tokens, 240 generated in 30 steps, 4.0 s (60.0 tokens/s), 2.1 s compiling",
    ]


def test_what_did_not_happen_is_not_told():
    assert "preemption" not in repr(snapshot(preemptions=0))


def test_a_notebook_shows_the_same_rows_as_a_table():
    page = snapshot()._repr_html_()
    assert page.startswith("<table")
    assert page.count("<tr>") == 5
    assert all(line.split(": ", 1)[1] in page for line in repr(snapshot()).splitlines()[1:])
    assert not any(word in page for word in ("color", "background", "#", "http", "src", "url"))
