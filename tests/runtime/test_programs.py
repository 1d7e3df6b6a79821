"""The compiled step: its collectives, its cache in place, and one program per shape."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import (
    MERGE_COLLECTIVES,
    collectives,
    compiled,
    compiled_choice,
    instructions,
    make_runner,
    run,
    scheduled,
    with_gathered_queries,
)
from harness import sample

from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.memory import block_bytes_per_device
from dcpjax.runtime.programs import padded_pairs


@pytest.mark.parametrize("merge", MERGE_COLLECTIVES)
@pytest.mark.parametrize(("tp", "dcp"), sample([(2, 2), (1, 8), (2, 4)], (2, 4)))
def test_the_step_holds_exactly_the_designed_collectives(tp: int, dcp: int, merge: str) -> None:
    if merge == "a2a":
        assert 8 // tp % dcp == 0, "this test is of heads that divide; those that do not gather the lse too"
    runner = with_gathered_queries(make_runner(tp, dcp, dcp_comm_backend=merge))
    layers = runner.model.config.num_layers
    expected = Counter({kind: layers * count for kind, count in MERGE_COLLECTIVES[merge].items()})
    expected["all-reduce"] += 2 * layers  # o_proj and MLP
    expected["all-reduce"] += 1  # rows of the embedding
    for step in (scheduled([20, 40]), scheduled([20], count=20)):
        assert collectives(compiled(runner, step)) == expected
        assert collectives(compiled_choice(runner, step)) == {"all-gather": 1}  # logits


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 2)])
def test_angles_are_computed_once_for_all_layers(tp: int, dcp: int) -> None:
    runner = make_runner(tp, dcp)
    assert runner.model.config.num_layers > 1
    for step in (scheduled([20, 40]), scheduled([20], count=20)):
        text = compiled(runner, step).as_text()
        assert (text.count("cosine("), text.count("sine(")) == (1, 2)  # one of each


def test_a_replicated_query_projection_saves_one_collective() -> None:
    def gathers(**options: Any) -> int:
        text = compiled(make_runner(1, 8, **options), scheduled([20])).as_text()
        return sum(kind == "all-gather" for kind, _ in instructions(text))

    assert gathers() - gathers(dcp_replicate_q=True) == 2  # one per layer


def test_tensor_parallelism_alone_merges_nothing() -> None:
    runner = make_runner(8, 1)
    assert collectives(compiled(runner, scheduled([20]))) == {"all-reduce": 2 * runner.model.config.num_layers + 1}


@pytest.mark.parametrize(("tp", "dcp"), sample([(1, 1), (1, 8), (2, 4), (8, 1)], (1, 1), (2, 4)))
def test_no_collective_moves_the_cache_and_every_cache_byte_is_aliased(tp: int, dcp: int) -> None:
    runner = with_gathered_queries(make_runner(tp, dcp))
    per_device = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(runner.cache))
    smallest = min(array.addressable_shards[0].data.size for array in jax.tree.leaves(runner.cache))
    for step in (scheduled([20, 40]), scheduled([20], count=20)):
        program = compiled(runner, step)
        assert program.memory_analysis().alias_size_in_bytes == per_device
        for kind, result in instructions(program.as_text()):
            elements = [
                int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\[([\d,]*)\]", result)
            ]
            assert max(elements) < smallest / 4, f"{kind} moves {result}"


def test_cache_bytes_per_device_fall_by_dcp_and_copies_rise_by_tp() -> None:
    def block_bytes(tp: int, dcp: int) -> int:
        return block_bytes_per_device(make_runner(tp, dcp).model)

    whole = block_bytes(1, 1)
    assert [block_bytes(1, dcp) for dcp in (2, 4, 8)] == [whole // 2, whole // 4, whole // 8]
    assert [block_bytes(tp, 1) for tp in (2, 4, 8)] == [whole // 2] * 3  # two KV heads: copied beyond tp=2
    assert block_bytes(4, 2) == whole // 4


def test_the_cache_lies_where_the_rules_say() -> None:
    runner = make_runner(2, 4)
    keys = runner.cache[0].keys
    assert keys.sharding == runner.model.place.sharding(None, "kv_context", "kv_heads", None, None)
    blocks, ranks, heads, head_dim, slots = keys.addressable_shards[0].data.shape
    assert (ranks, heads, head_dim, slots) == (1, 1, 8, 4)
    assert blocks == runner.sizes.num_blocks


def test_other_lengths_of_the_same_shape_compile_nothing() -> None:
    runner = make_runner(1, 8)
    run(runner, scheduled([5, 9, 40]))
    run(runner, scheduled([20], count=20))  # gathers keys, of which there are none
    run(runner, scheduled([29], count=20))  # gathers queries
    programs = runner.programs.forward._cache_size()
    for lengths in ([1, 2, 3], [60, 1, 17], [33, 32, 31]):
        run(runner, scheduled(lengths))
    for count in (17, 25, 32):
        run(runner, scheduled([count + 9], count=count))
        run(runner, scheduled([count], count=count))
    assert runner.programs.forward._cache_size() == programs == 3


def test_a_new_step_keeps_the_cache_on_its_devices() -> None:
    runner = make_runner(2, 4)
    before = jax.tree.leaves(runner.cache)
    run(runner, scheduled([20]))
    for old, new in zip(before, jax.tree.leaves(runner.cache), strict=True):
        assert old.is_deleted()  # donated
        assert new.sharding == runner.model.place.sharding(None, "kv_context", "kv_heads", None, None)


# --- copying blocks


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 4)])
def test_a_copied_block_equals_its_source_in_every_layer_and_the_others_stay(tp: int, dcp: int) -> None:
    runner = make_runner(tp, dcp)
    run(runner, scheduled([40, 20], count=10))
    before = [np.array(array) for array in jax.tree.leaves(runner.cache)]
    runner._copy_blocks([(1, 5), (2, 1), (9, 7)])  # block 1 is read before it is overwritten
    for old, new in zip(before, jax.tree.leaves(runner.cache), strict=True):
        expected = old.copy()
        expected[5], expected[1], expected[7] = old[1], old[2], old[9]
        np.testing.assert_array_equal(np.asarray(new), expected)


def test_copying_blocks_moves_nothing_between_devices_and_copies_in_place() -> None:
    runner = make_runner(2, 4)
    program = runner.programs.copy.lower(runner.cache, *padded_pairs([(1, 2)], runner.sizes.num_blocks)).compile()
    assert instructions(program.as_text()) == []
    per_device = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(runner.cache))
    assert program.memory_analysis().alias_size_in_bytes == per_device


# --- tokens that only the device knows


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 4)])
def test_a_token_fed_back_on_the_device_gives_what_the_same_token_from_the_host_gives(tp: int, dcp: int) -> None:
    runner = make_runner(tp, dcp)
    first = scheduled([20, 33])
    for seat, entry in enumerate(first):
        entry.request.seat = 2 - seat
    sampled = run(runner, first).tokens
    ahead, known = ([replace(entry, start=entry.start + 1) for entry in first] for _ in range(2))
    for entry in ahead:
        entry.request.num_in_flight = 1
    fed_back = run(runner, ahead).tokens[:2]
    for entry, token in zip(known, sampled[:2], strict=True):
        entry.request.num_in_flight = 0
        entry.request.output_token_ids.append(int(token))
    np.testing.assert_array_equal(fed_back, run(runner, known).tokens[:2])


def test_sampling_leaves_the_tokens_of_other_seats_alone() -> None:
    runner = make_runner(1, 1)
    step = scheduled([5])
    step[0].request.seat = 2
    before = np.array(runner.latest)
    token = run(runner, step).tokens[0]
    np.testing.assert_array_equal(np.array(runner.latest), [*before[:2], token, *before[3:]])


# --- which tokens meet the head


def silent(entry: Scheduled) -> Scheduled:
    """A chunk that is not the end of its prompt."""
    return replace(entry, samples=False)


def seated(step: list[Scheduled]) -> list[Scheduled]:
    for seat, entry in enumerate(step):
        entry.request.seat = seat
    return step


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 4)])
def test_what_is_chosen_beside_an_unfinished_prompt_is_chosen_as_without_it(tp: int, dcp: int) -> None:
    runner = make_runner(tp, dcp)
    decode, chunk, prompt = seated([*scheduled([20]), *scheduled([9, 9, 9], count=9)[1:]])
    runner.latest = runner.latest.at[:].set(99)
    together = run(runner, [decode, silent(chunk), prompt])
    latest = np.array(runner.latest).tolist()
    assert together.tokens[1] == 0
    assert latest == [together.tokens[0], 99, together.tokens[2], 99]
    assert together.tokens[0] == run(runner, [decode]).tokens[0]
    assert together.tokens[2] == run(runner, [prompt]).tokens[0]


def test_a_step_in_which_nobody_chooses_ends_after_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(1, 1)
    for program in ("gather", "sample", "score"):
        monkeypatch.setattr(runner.programs, program, None)
    before = np.array(runner.latest)
    result = run(runner, [silent(entry) for entry in scheduled([9, 9], count=9)])
    assert (result.tokens, result.finite, result.scores) == ([0, 0], [True, True], None)
    np.testing.assert_array_equal(np.array(runner.latest), before)


def test_a_step_of_many_rows_has_as_many_logits_as_it_chooses_tokens() -> None:
    """Another number of rows beside it compiles no head anew."""
    runner = make_runner(1, 1)
    decode, *chunks = scheduled([20]) + scheduled([9, 9, 9], count=9)[1:]
    for count in range(3):
        run(runner, [decode, *map(silent, chunks[:count])])
    assert runner.programs.forward._cache_size() == 2
    assert runner.programs.sample._cache_size() == 1


def test_how_many_prompt_tokens_are_scored_is_no_part_of_the_forward_program() -> None:
    runner = make_runner(1, 1)
    for params in ({}, {"prompt_logprobs": 0}, {"prompt_logprobs": 3}):
        run(runner, scheduled([20], count=20, **params))
    assert runner.programs.forward._cache_size() == runner.programs.sample._cache_size() == 1
    assert runner.programs.score._cache_size() == 2


def test_prompt_scores_come_from_the_logits_after_the_token_before() -> None:
    """Whether or not the step also chooses, and wherever in it the prompt lies."""
    runner = make_runner(2, 2)
    other, scored = *scheduled([7], count=7), scheduled([12, 12], count=12, prompt_logprobs=2)[1]
    [alone] = run(runner, [scored]).prompt_scores or []
    assert sorted(alone) == list(range(1, 12))
    for step in ([other, scored], [silent(other), silent(scored)]):
        result = run(runner, step)
        assert result.prompt_scores is not None
        assert result.prompt_scores[0] == {}
        for position, found in result.prompt_scores[1].items():
            assert found.token_id == 3
            assert (found.rank, found.top_ids) == (alone[position].rank, alone[position].top_ids)
            assert found.logprob == pytest.approx(alone[position].logprob, abs=1e-5)


def test_log_probabilities_of_a_choice_go_to_the_entry_that_chose() -> None:
    runner = make_runner(1, 1)
    chunk, decode = *scheduled([9], count=9, logprobs=1), scheduled([5, 20], logprobs=1)[1]
    result = run(runner, [silent(chunk), decode])
    assert result.scores is not None
    assert result.scores[0] is None
    assert result.scores[1] is not None
    assert result.scores[1].token_id == result.tokens[1]


@pytest.mark.parametrize("chooses", [False, True])
def test_a_row_that_is_not_finite_is_told_whether_or_not_it_chooses(chooses: bool) -> None:
    """One of the two entries reads what the poisoned block holds; the other's answer is that of a clean cache."""
    runner = make_runner(1, 1)
    sick, well = scheduled([20, 33], count=4)
    good = run(runner, [sick, well]).tokens[1]
    runner.cache = jax.tree.map(lambda array: array.at[sick.block_table[0]].set(np.nan), runner.cache)
    result = run(runner, [sick if chooses else silent(sick), well])
    assert result.finite == [False, True]
    assert result.tokens[1] == good
