"""The counted bytes of what attention sends over dcp, against numbers computed by hand."""

import pytest
from small_models import NINE_HEADS

from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models.config import from_hf
from dcpjax.models.exchange import PromptExchange, exchange, exchange_dtype
from dcpjax.sharding.merge_cost import CollectiveSpeed, Link
from dcpjax.sharding.mesh import Layout

KIMI, LLAMA, QWEN = (from_hf(PRESETS[name]) for name in ("kimi-k2", "llama-3.1-8b", "qwen3-235b-a22b"))
NINE = from_hf(NINE_HEADS)


def over(devices: int, dcp: int) -> Layout:
    return Layout(tensor_parallel_size=devices, decode_context_parallel_size=dcp)


def prompts(config, devices: int, dcp: int, platform: str = "gpu", key_bytes: float = 2, **options) -> PromptExchange:
    counted = PromptExchange.of(config, over(devices, dcp), platform, "ag_rs", key_bytes, **options)
    assert counted is not None
    return counted


def kinds_and_bytes(sends) -> list[tuple[str, float]]:
    return [(one.kind, one.bytes) for one in sends]


# Kimi-K2 on (1, 8): 64 heads, 576 cached values a token, of which 512 are also the value; a piece of 8,192 positions.

KIMI_PIECE = 7 * 1024 * 576  # bytes of fp8: a rank sends the positions that it holds to seven others
KIMI_TOKEN = 7 * 8 * 576 * 2 + 7 * 64 * 4 + 7 / 8 * 64 * 512 * 2  # query in bfloat16, lse in float32, output


def test_latents_are_sent_to_all_ranks_in_whole_pieces():
    kimi = prompts(KIMI, 8, 8, key_bytes=1, value_bytes=2)
    assert kinds_and_bytes(kimi.key_sends(8192, 100)) == [("all_gather", KIMI_PIECE)]
    assert kinds_and_bytes(kimi.key_sends(8193, 100)) == 2 * [("all_gather", KIMI_PIECE)]
    assert kimi.positions * kimi.position_bytes == 8192 * 576


def test_absorbed_queries_and_outputs_are_as_wide_as_the_latent_for_every_head():
    kimi = prompts(KIMI, 8, 8, key_bytes=1, value_bytes=2)
    assert kinds_and_bytes(kimi.query_sends(3)) == [
        ("all_gather", 3 * 7 * 8 * 576 * 2),
        ("all_gather", 3 * 7 * 64 * 4),
        ("reduce_scatter", 3 * 7 / 8 * 64 * 512 * 2),
    ]
    one = exchange(KIMI, over(8, 8), "ag_rs", value_bytes=2)
    assert (one.bytes, one.collectives) == (KIMI_TOKEN, 3)


def test_long_prompts_on_a_cpu_send_narrow_queries_and_the_projections():
    """Queries of 192 and outputs of 128 values a head, once W_uk and W_uv (128 x 512 each a head) are gathered."""
    kimi = prompts(KIMI, 8, 8, "cpu", key_bytes=4)
    absorbed, up_projected = kimi.query_sends(kimi.up_projected_from - 1), kimi.query_sends(kimi.up_projected_from)
    assert absorbed[0].bytes == (kimi.up_projected_from - 1) * 7 * 8 * 576 * 4
    assert kinds_and_bytes(up_projected)[0] == ("all_gather", kimi.up_projected_from * 7 * 8 * 192 * 4)
    assert up_projected[2].bytes == kimi.up_projected_from * 7 / 8 * 64 * 128 * 4
    assert kinds_and_bytes(up_projected)[3] == ("all_gather", 7 * 8 * 512 * 256 * 4)


def test_the_way_of_fewer_bytes_is_taken_where_the_link_is_unknown():
    kimi = prompts(KIMI, 8, 8, key_bytes=1, value_bytes=2)
    enough = -(-KIMI_PIECE // KIMI_TOKEN)
    assert enough == 34
    assert not kimi.keys_travel(cached=8192, new=33)
    assert kimi.keys_travel(cached=8192, new=34)
    assert not kimi.keys_travel(cached=8193, new=34)
    assert kimi.keys_travel(cached=8193, new=67)


def test_the_way_of_less_time_is_taken_on_a_known_link():
    """The latencies of three collectives against that of one: keys are gathered for fewer tokens."""
    speed = CollectiveSpeed(latency=1e-6, bandwidth=900e9)
    kimi = prompts(KIMI, 8, 8, key_bytes=1, value_bytes=2, link=Link(speed, speed, speed, speed))
    enough = -(-(KIMI_PIECE - 2 * 900e3) // KIMI_TOKEN)
    assert enough == 19
    assert not kimi.keys_travel(cached=8192, new=18)
    assert kimi.keys_travel(cached=8192, new=19)


@pytest.mark.parametrize("new", [2, 5000])
def test_a_prompt_with_nothing_cached_sends_nothing(new):
    assert prompts(KIMI, 8, 8).keys_travel(cached=0, new=new)
    assert prompts(KIMI, 8, 8).key_sends(0, new) == ()


# Grouped queries: a rank needs the KV heads that its own query heads read.


@pytest.mark.parametrize(
    ("config", "devices", "dcp", "kind", "sent"),
    [
        # 4 of 32 heads on each rank read one of 8 KV heads of 2 x 128 values: each rank gets an eighth of each other
        (LLAMA, 8, 8, "all_to_all", 7 / 8 * 8192 * 256 * 2),
        # 8 of a group's 32 heads read one of its 2 KV heads
        (QWEN, 8, 4, "all_to_all", 3 / 4 * 8192 * 256 * 2),
        # 8 of a group's 16 heads read its only KV head
        (QWEN, 8, 2, "all_gather", 1 / 2 * 8192 * 256 * 2),
        # the features of a rank lie in two of nine heads, which on some ranks read two of three KV heads
        (NINE, 8, 8, "all_to_all", 7 / 8 * 8192 * 2 * 2 * NINE.head_dim * 2),
    ],
)
def test_each_rank_gets_the_kv_heads_of_its_query_heads(config, devices, dcp, kind, sent):
    piece = prompts(config, devices, dcp).piece_send
    assert (piece.kind, piece.bytes) == (kind, pytest.approx(sent))


def test_ranks_with_parts_of_heads_gather_queries_and_attend_with_each_head_that_they_share():
    nine = prompts(NINE, 8, 8)
    features = 5  # of 36 in all, padded to 40
    assert kinds_and_bytes(nine.key_sends(0, 10)) == [("all_gather", 10 * 7 * features * 4)]
    assert nine.repeated_heads == 2 * 8 / 9
    assert prompts(LLAMA, 8, 8).repeated_heads == prompts(KIMI, 8, 8).repeated_heads == 1
    assert prompts(NINE, 8, 8, replicate_q=True).key_sends(0, 10) == ()


def test_replicated_query_projections_save_the_gather_of_queries():
    assert [one.kind for one in prompts(LLAMA, 8, 8).query_sends(2)] == ["all_gather", "all_gather", "reduce_scatter"]
    assert [one.kind for one in prompts(LLAMA, 8, 8, replicate_q=True).query_sends(2)] == [
        "all_gather",
        "reduce_scatter",
    ]


def test_without_dcp_there_is_nothing_to_choose():
    assert PromptExchange.of(LLAMA, over(8, 1), "gpu", "ag_rs", 2) is None


def test_queries_are_sent_in_float32_on_cpu_and_by_float32_models():
    assert exchange_dtype("auto", "bfloat16", "gpu") == exchange_dtype("auto", "nvfp4", "gpu") == "bfloat16"
    assert exchange_dtype("auto", "float32", "gpu") == exchange_dtype("auto", "bfloat16", "cpu") == "float32"
    assert exchange_dtype("float32", "bfloat16", "gpu") == "float32"
    assert exchange_dtype("bfloat16", "float32", "cpu") == "bfloat16"
