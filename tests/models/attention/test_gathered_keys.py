"""Prompts whose keys are gathered: the same results as with gathered queries, what is sent, what memory it takes."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
from compiled_steps import compiled, instructions, scheduled
from harness import GOLDENS, Stepper, Trace, all_logits, golden_runner, sample
from hypothesis import given
from hypothesis import strategies as st

from dcpjax import LLM, SamplingParams
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.attention.gathered_keys import NEW_KEYS, own_heads
from dcpjax.models.exchange import PromptExchange
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.batch import ShapeBuckets, build
from dcpjax.runtime.programs import compile_on_demand
from dcpjax.runtime.runner import Runner
from dcpjax.runtime.temporaries import PIECE_COPIES

TOLERANCE = 2e-5


@dataclass(frozen=True)
class Choice:
    """Stands in for `PromptExchange`: keys are gathered in small pieces, for the prompts that `chosen` names."""

    chosen: Callable[[int, int], bool]
    positions: int = 32

    def keys_travel(self, cached: int, new: int) -> bool:
        return self.chosen(cached, new)


KEYS = Choice(lambda cached, new: True)
MIXED = Choice(lambda cached, new: cached < 3 * new)
LARGE = replace(KEYS, positions=4096)


# --- equal results on every layout

USUAL: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "load_format": "dummy"}
LENGTHS = [5, 17, 100, 40, 1, 33, 70]


@cache
def stepper(family: str, devices: int, dcp: int, **options: Any) -> Stepper:
    layout = {"tensor_parallel_size": devices, "decode_context_parallel_size": dcp}
    return Stepper(GOLDENS / family, **USUAL | layout | options)


def run(family: str, devices: int, dcp: int, way: Choice | None, **options: Any) -> list[Trace]:
    return greedy(stepper(family, devices, dcp, **options), way)


def greedy(own: Stepper, way: Choice | None) -> list[Trace]:
    """Prompts of several chunks, beside each other and beside decodes, in a cache full of NaN."""
    own.runner.shapes = replace(own.runner.shapes, prompt_exchange=way)
    own.poison(np.nan)
    draw = np.random.default_rng(0)
    return own.greedy([draw.integers(0, 90, length).tolist() for length in LENGTHS], 4)


def assert_same(found: list[Trace], expected: list[Trace]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.tokens == other.tokens
        np.testing.assert_allclose(own.every_logits, other.every_logits, rtol=0, atol=TOLERANCE)


LAYOUTS = [  # family, devices, dcp, options
    ("llama3", 8, 4, {}),  # 8 heads on 2 KV heads; a rank's head reads the one KV head of its group
    ("llama3", 8, 8, {}),  # of two KV heads, each rank reads one: an all-to-all
    ("llama3", 2, 2, {}),
    ("llama3", 4, 4, {"cp_kv_cache_interleave_size": 4}),
    ("llama3", 8, 8, {"dcp_replicate_q": True}),
    ("smollm2", 8, 8, {}),  # 9 heads: a rank's features are not whole heads
    ("smollm2", 3, 3, {"block_size": 18, "dcp_comm_backend": "psum"}),
    ("qwen2", 6, 3, {"block_size": 18}),
    ("qwen2", 6, 6, {"block_size": 18, "dcp_comm_backend": "a2a"}),
    ("qwen3", 8, 4, {}),
    ("deepseek-v3", 8, 8, {}),
    ("deepseek-v3", 8, 4, {"cp_kv_cache_interleave_size": 2, "dcp_comm_backend": "a2a"}),
    ("deepseek-v3", 4, 2, {"dcp_replicate_q": True}),
    ("deepseek-v2", 6, 6, {"block_size": 18}),
    ("qwen3-moe", 6, 3, {"block_size": 24}),
]
BY_DEFAULT = LAYOUTS[5], LAYOUTS[11]


@pytest.mark.parametrize(("family", "devices", "dcp", "options"), sample(LAYOUTS, *BY_DEFAULT))
def test_tokens_do_not_depend_on_what_is_gathered(family: str, devices: int, dcp: int, options: dict[str, Any]) -> None:
    expected = run(family, 1, 1, None)
    for way in (KEYS, MIXED):
        assert_same(run(family, devices, dcp, way, **options), expected)


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "devices", "dcp", "options"), LAYOUTS)
def test_tokens_are_those_of_gathered_queries_and_of_large_pieces(
    family: str, devices: int, dcp: int, options: dict[str, Any]
) -> None:
    queries = run(family, devices, dcp, None, **options)
    assert_same(run(family, devices, dcp, LARGE, **options), queries)


@pytest.mark.parametrize("body", sample(["loop", "gather"], "loop"))
def test_every_body_attends_to_gathered_keys(body: Any) -> None:
    own = Stepper(GOLDENS / "deepseek-v3", **USUAL, tensor_parallel_size=4, decode_context_parallel_size=4)
    model = own.runner.model
    runtime = replace(model.runtime, attention_body=body)
    own.step = compile_on_demand(all_logits, model.config, runtime, own.runner.cache)
    assert_same(greedy(own, KEYS), run("deepseek-v3", 1, 1, None))


@pytest.mark.parametrize("chunk", sample([32, 48, 256], 48))
def test_tokens_do_not_depend_on_the_chunks(chunk: int) -> None:
    expected = run("llama3", 1, 1, None)
    assert_same(run("llama3", 4, 4, KEYS, max_num_batched_tokens=chunk), expected)


@pytest.mark.parametrize("family", sample(["llama3", "deepseek-v3"], "llama3"))
def test_prefixes_found_in_the_cache_are_gathered(family: str) -> None:
    """Turns of a conversation, the last beside a request that decodes."""
    draw = np.random.default_rng(1)
    turns = [draw.integers(0, 90, length).tolist() for length in (70, 9, 45)]
    prompts = [list(chain(*turns[:count])) for count in (1, 2, 3)]
    other = draw.integers(0, 90, 20).tolist()

    def answers(devices: int, dcp: int, way: Choice | None) -> list[list[int]]:
        llm = LLM(
            str(GOLDENS / family),
            load_format="dummy",
            dtype="float32",
            tensor_parallel_size=devices,
            decode_context_parallel_size=dcp,
            block_size=16,
            max_num_batched_tokens=32,
            kv_cache_memory_bytes=2**20,
            progress=False,
        )
        llm.runner.shapes = replace(llm.runner.shapes, prompt_exchange=way)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        results = [*llm.generate(prompts[:2], params), *llm.generate([other, prompts[2]], params)]
        assert results[-1].num_cached_tokens >= 64
        return [list(result.outputs[0].token_ids) for result in results]

    expected = answers(1, 1, None)
    assert answers(4, 4, KEYS) == expected
    assert answers(4, 2, MIXED) == expected


# --- which heads a rank attends with

GROUPS = st.tuples(st.integers(1, 6), st.integers(1, 5), st.sampled_from([4, 6, 16]), st.integers(2, 9))


@given(GROUPS)
def test_a_rank_has_the_heads_of_its_features_and_their_kv_heads(group: tuple[int, int, int, int]) -> None:
    kv_heads, per_kv, head_dim, dcp = group
    heads = kv_heads * per_kv
    features = -(-heads * head_dim // dcp)
    own = own_heads(heads, kv_heads, head_dim, features, dcp)
    for rank in range(dcp):
        mine = range(own.first[rank], own.first[rank] + own.size)
        assert mine.start >= 0
        assert mine.stop <= heads
        used = {index // head_dim for index in range(rank * features, min((rank + 1) * features, heads * head_dim))}
        assert used <= set(mine)
        each = own.size // own.kv_heads.shape[1]
        assert [own.kv_heads[rank][index // each] for index in range(own.size)] == [head // per_kv for head in mine]
    assert own.are_whole == (features % head_dim == 0)


def test_a_head_of_llama_8b_reads_one_kv_head_on_each_of_eight_devices() -> None:
    own = own_heads(32, 8, 128, 512, 8)
    assert (own.size, own.kv_heads.tolist(), own.are_whole) == (4, [[head] for head in range(8)], True)


# --- how a step is laid out

GEOMETRY = CacheGeometry(block_size=16, dcp=4)


def built(way: Choice | None, *spans: tuple[int, int], **options: int) -> Any:
    shapes = ShapeBuckets(**{"max_rows": 8, "max_tokens": 512, "table_width": 64} | options, prompt_exchange=way)  # type: ignore[arg-type]
    step = [entry(number, *span) for number, span in enumerate(spans)]
    return build(step, shapes, GEOMETRY).work


def entry(number: int, cached: int, new: int) -> Scheduled:
    (made,) = scheduled([cached + new], count=new)
    return replace(made, block_table=list(range(64 * number, 64 * number + GEOMETRY.blocks(cached + new))))


def test_a_step_of_decodes_gathers_queries() -> None:
    assert built(KEYS, (50, 1), (3, 1)).gathered_keys is None
    assert built(MIXED, (50, 2), (30, 1)).gathered_keys is None


def test_the_first_chunk_of_a_prompt_gathers_nothing() -> None:
    keys = built(KEYS, (0, 300)).gathered_keys
    assert (keys.pieces, keys.other_work) == (0, None)
    assert keys.new_blocks[0].tolist() == [0, 1, 2, -1]  # of 128 tokens each
    assert keys.first_tokens[:3].tolist() == [0, 128, 256]


def test_cached_blocks_are_gathered_in_pieces_and_the_others_are_a_step_of_their_own() -> None:
    work = built(MIXED, (9, 1), (40, 100), (200, 3), (16, 30))  # a decode, two prompts with keys, one with queries
    keys, (tiles,) = work.gathered_keys, work.tiles
    assert keys.cached.tolist()[:4] == [0, 40, 0, 16]
    assert keys.ends.tolist()[:4] == [0, 3, 3, 4]  # blocks of 16 tokens
    assert (keys.pieces, keys.piece_blocks) == (2, 2)
    assert keys.index_in_chunk[:140].tolist() == [-1, *range(100), -1, -1, -1, *range(30), *[-1] * 6]
    assert tiles.row[: tiles.count].tolist() == [1, 1, 3]
    assert tiles.chunks[: tiles.count].tolist() == [1, 1, 1]
    other = keys.other_work
    assert keys.others[keys.others < 256].tolist() == [0, 101, 102, 103]
    assert other.positions[:5].tolist() == [9, 200, 201, 202, -1]
    assert other.rows[:5].tolist() == [0, 2, 2, 2, -1]
    single, many = other.tiles
    assert (single.start[0], single.row[0], many.start[0], many.row[0]) == (0, 0, 1, 2)


def test_only_few_tokens_are_sent_as_queries_beside_long_prompts() -> None:
    keys = built(KEYS, (30, 1), (2, 1), (0, 400)).gathered_keys
    assert len(keys.others) == 8
    assert [tiles.size for tiles in keys.other_work.tiles] == [1]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), min_size=1, max_size=8))
def test_new_keys_have_blocks_of_their_own(spans: list[tuple[int, int]]) -> None:
    work = built(KEYS, *spans)
    keys = work.gathered_keys
    if all(new == 1 for _, new in spans):
        assert keys is None
        return
    starts = np.cumsum([0, *(new for _, new in spans)])
    for row, (cached, new) in enumerate(spans):
        blocks = [block for block in keys.new_blocks[row].tolist() if block >= 0]
        wanted = list(range(starts[row], starts[row] + new, NEW_KEYS.block_size)) if new > 1 else []
        assert keys.first_tokens[blocks].tolist() == wanted
        assert keys.cached[row] == (cached if new > 1 else 0)


# --- what is sent, and the memory that it takes


@cache
def runner(family: str, dcp: int, positions: int = 32, **options: Any) -> Runner:
    own = golden_runner(family, 1, dcp, max_num_batched_tokens=64, **options)
    own.shapes = replace(own.shapes, prompt_exchange=replace(KEYS, positions=positions))
    return own


def prompt_alone(runner: Runner, cached: int) -> list[Scheduled]:
    return [replace(one, samples=False) for one in scheduled([cached + 40], count=40)]


def exchanges(runner: Runner, step: list[Scheduled]) -> list[tuple[str, str]]:
    """Those of one layer over dcp, without the all-reduces over all devices and the gather of the embedding."""
    found = [one for one in instructions(compiled(runner, step).as_text()) if one[0] != "all-reduce"]
    layers = runner.model.config.num_layers
    assert len(found) % layers == 0
    return sorted(found)[::layers]


def test_a_prompt_alone_sends_its_cached_latents_and_nothing_else() -> None:
    """[ranks, blocks of a piece, slots of a block * (latent 16 + rope 4)], once in each layer."""
    own = runner("deepseek-v3", 8)
    config = own.model.config
    assert config.mla is not None
    width = own.geometry.slots * config.mla.cached_dim
    assert exchanges(own, prompt_alone(own, 64)) == [("all-gather", f"f32[8,2,{width}]{{2,1,0}}")]


def test_a_prompt_alone_sends_each_rank_the_kv_heads_that_it_reads() -> None:
    """One of two KV heads; from each of 8 ranks [blocks of a piece, slots of a block * key and value]."""
    own = runner("llama3", 8)
    ((kind, shape),) = exchanges(own, prompt_alone(own, 64))
    width = own.geometry.slots * 2 * own.model.config.head_dim
    assert (kind, numbers(shape)) == ("all-to-all", 8 * 2 * width)


def numbers(shape: str) -> int:
    """Of a result like f32[8,2,64]{2,1,0}, or of several in brackets."""
    return sum(math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d,]+)\]", shape))


def test_what_is_sent_is_what_the_cost_model_counts() -> None:
    for family, dcp in (("llama3", 8), ("llama3", 4), ("smollm2", 8), ("deepseek-v3", 8)):
        own = runner(family, dcp)
        model = own.model
        counted = PromptExchange.of(model.config, model.layout, "cpu", "ag_rs", 4)
        assert counted is not None
        counted = replace(counted, positions=32)
        found = exchanges(own, prompt_alone(own, 64))
        sent = counted.key_sends(32, own.shapes.tokens(40))
        assert sorted(kind.replace("-", "_") for kind, _ in found) == sorted(one.kind for one in sent)
        # an all-gather and an all-to-all both send 7/8 of the numbers that a device ends up with
        assert sum(one.bytes for one in sent) == 4 * sum(numbers(shape) for _, shape in found) * (dcp - 1) / dcp


def test_beside_decodes_only_their_queries_are_sent() -> None:
    own = runner("llama3", 8)
    step = [*scheduled([30, 12]), replace(prompt_alone(own, 0)[0], block_table=list(range(40, 48)))]
    found = exchanges(own, step)
    assert [kind for kind, _ in found] == ["all-gather", "all-gather", "all-to-all", "reduce-scatter"]
    rows = own.shapes.prompt_rows(3)
    for kind, shape in found:
        assert kind == "all-to-all" or f"{rows}," in shape
    assert rows < own.shapes.tokens(42)


def test_memory_is_bounded_by_the_piece_and_not_by_the_context() -> None:
    """Bytes of a piece, as often as the plan of the memory says, whatever the longest request."""

    def temporaries(positions: int, max_model_len: int) -> int:
        own = runner("deepseek-v3", 8, positions, max_model_len=max_model_len)
        return compiled(own, prompt_alone(own, 64)).memory_analysis().temp_size_in_bytes

    small, long = temporaries(32, 128), temporaries(32, 512)
    assert long - small < 1024  # tables of block ids
    config = runner("deepseek-v3", 8).model.config
    assert config.mla is not None
    added = 480 * config.mla.cached_dim * 4
    assert 0 < temporaries(512, 512) - long <= PIECE_COPIES * added
