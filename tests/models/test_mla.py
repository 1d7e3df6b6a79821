"""Latent attention: its declared weights, its compiled step, its scales, and what it refuses."""

import math
import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import MERGE_COLLECTIVES, compiled, instructions, scheduled, with_gathered_queries
from harness import GOLDENS, golden, golden_runner, loaded

from dcpjax.api.config import EngineConfig
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models import mla
from dcpjax.models.checkpoint_names import HeadRows
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.models.rotary import rope_frequencies
from dcpjax.runtime.memory import block_bytes_per_device
from dcpjax.runtime.runner import Runner, load_runner
from dcpjax.sharding.mesh import Layout, check_layout


@cache
def runner(tp: int, dcp: int, merge: str = "ag_rs", **options: Any) -> Runner:
    return golden_runner("deepseek-v3", tp, dcp, dcp_comm_backend=merge, **options)


# --- what is declared


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    specs = mla.specs(config, Layout(tensor_parallel_size=8, decode_context_parallel_size=4), "float32")
    return {name: spec.shape for name, spec in vars(specs).items() if spec is not None}


def test_weights_of_deepseek_v3_have_the_published_shapes():
    assert shapes(from_hf(PRESETS["deepseek-v3"])) == {
        "q_down": (1536, 7168),
        "q_norm": (1536,),
        "q": (128 * 192, 1536),
        "kv_down": (576, 7168),
        "kv_norm": (512,),
        "w_uk": (128, 128, 512),
        "w_uv": (128, 128, 512),
        "o": (7168, 128 * 128),
    }


def test_v2_lite_projects_its_queries_at_once():
    config = from_hf(PRESETS["deepseek-v2-lite"])
    assert shapes(config).keys() == {"q", "kv_down", "kv_norm", "w_uk", "w_uv", "o"}
    assert shapes(config)["q"] == (16 * 192, 2048)
    names = mla.names(config, "a")
    assert (names.q, names.q_down, names.q_norm) == ("a.q_proj.weight", None, None)


def test_both_halves_of_the_up_projection_are_rows_of_one_tensor():
    names = mla.names(from_hf(PRESETS["deepseek-v3"]), "a")
    assert names.w_uk == HeadRows("a.kv_b_proj.weight", 256, 0, 128)
    assert names.w_uv == HeadRows("a.kv_b_proj.weight", 256, 128, 256)
    assert (names.q_down, names.q) == ("a.q_a_proj.weight", "a.q_b_proj.weight")


def test_the_cache_holds_the_latent_and_the_rope_key_and_nothing_else():
    config, layout = from_hf(PRESETS["kimi-k2"]), Layout(tensor_parallel_size=8, decode_context_parallel_size=4)
    (leaf,) = vars(mla.cache_specs(config, layout, 10, 64, "bfloat16")).values()
    assert leaf.shape == (10, 4, 64, 512 + 64)
    assert leaf.names == (None, "kv_context", None, None)


# --- the compiled step


@cache
def program(tp: int, dcp: int, merge: str = "ag_rs", *, chunk: bool = False) -> Any:
    step = scheduled([20], count=20) if chunk else scheduled([20, 40])
    return compiled(with_gathered_queries(runner(tp, dcp, merge)), step)


PROGRAMS = [
    *((tp, dcp, merge, False) for tp, dcp in ((1, 8), (2, 4)) for merge in MERGE_COLLECTIVES),
    (1, 8, "ag_rs", True),
]


@pytest.mark.parametrize(("tp", "dcp", "merge", "chunk"), PROGRAMS)
def test_the_step_holds_the_collectives_of_other_families_and_no_more(tp, dcp, merge, chunk):
    """A layer gathers its queries and merges; experts, like a dense block, cost one all-reduce."""
    layers = runner(tp, dcp, merge).model.config.num_layers
    expected = Counter({kind: layers * count for kind, count in MERGE_COLLECTIVES[merge].items()})
    expected += Counter({"all-reduce": 2 * layers + 1})  # o_proj, MLP; embedding
    found = Counter(kind for kind, _ in instructions(program(tp, dcp, merge, chunk=chunk).as_text()))
    assert found == expected


@pytest.mark.parametrize(("tp", "dcp", "merge", "chunk"), PROGRAMS)
def test_no_collective_moves_latents_and_every_cache_byte_is_aliased(tp, dcp, merge, chunk):
    cache, step = runner(tp, dcp, merge).cache, program(tp, dcp, merge, chunk=chunk)
    shards = [array.addressable_shards[0].data for array in jax.tree.leaves(cache)]
    assert step.memory_analysis().alias_size_in_bytes == sum(shard.nbytes for shard in shards)
    for kind, result in instructions(step.as_text()):
        for dims in re.findall(r"\[([\d,]*)\]", result):
            elements = math.prod(int(size) for size in dims.split(",") if size)
            assert elements < min(shard.size for shard in shards) / 4, f"{kind} moves {result}"


def test_tensor_parallelism_alone_merges_nothing():
    found = Counter(kind for kind, _ in instructions(program(8, 1).as_text()))
    assert found == {"all-reduce": 2 * runner(8, 1).model.config.num_layers + 1}


def test_a_replicated_query_projection_saves_one_gather_per_layer():
    replicated = compiled(runner(1, 8, dcp_replicate_q=True), scheduled([20, 40])).as_text()
    gathers = [
        sum(kind == "all-gather" for kind, _ in instructions(text)) for text in (program(1, 8).as_text(), replicated)
    ]
    assert gathers[0] - gathers[1] == 2


def test_latent_bytes_per_device_fall_by_dcp_alone():
    whole = block_bytes_per_device(runner(8, 1).model)
    assert [block_bytes_per_device(runner(tp, dcp).model) for tp, dcp in ((2, 4), (1, 8))] == [whole // 4, whole // 8]


# --- equal results


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_a_poisoned_latent_cache_changes_nothing(poison):
    options = {"tensor_parallel_size": 8, "decode_context_parallel_size": 8}
    stepper = loaded("deepseek-v3", max_num_batched_tokens=32, one_shape=True, **options)
    prompts = [golden("deepseek-v3")["prompt"], golden("deepseek-v3")["short_prompt"]]
    clean = stepper.greedy(prompts, 4)
    stepper.poison(poison)
    for expected, found in zip(clean, stepper.greedy(prompts, 4), strict=True):
        np.testing.assert_array_equal(found.every_logits, expected.every_logits)


# --- what is refused


@pytest.mark.parametrize(
    ("heads", "devices", "nearest"), [(6, 4, 3), (128, 3, 2), (64, 128, 64), (16, 32, 16), (64, 7, 8)]
)
def test_heads_that_do_not_divide_by_the_devices_are_refused(heads, devices, nearest):
    layout = Layout(tensor_parallel_size=devices, decode_context_parallel_size=devices)
    with pytest.raises(ValueError) as refusal:
        check_layout(layout, heads, 1, whole_heads=True)
    assert str(refusal.value) == (
        f"tensor_parallel_size must divide the {heads} heads of this model's latent attention, but is {devices}; "
        f"use {nearest}"
    )


def test_an_illegal_layout_is_refused_before_weights_are_read():
    """deepseek-v2's golden has six heads."""
    files = open_model(GOLDENS / "deepseek-v2")
    with pytest.raises(ValueError, match=r"must divide the 6 heads .* but is 4; use 3"):
        load_runner(files, EngineConfig(tensor_parallel_size=4, decode_context_parallel_size=2, block_size=16))


# --- scales, computed by hand


def test_v2_lite_multiplies_its_softmax_by_the_square_of_mscale():
    config = from_hf(PRESETS["deepseek-v2-lite"])
    mscale = 1 + 0.1 * 0.707 * 3.6888794541139363  # ln 40
    assert mscale == pytest.approx(1.2608037774)
    assert config.rope.softmax_mscale == pytest.approx(mscale)
    assert config.rope.angle_scale == 1.0  # both mscales are equal
    assert mla.softmax_scale(config) == pytest.approx(0.0721687836 * 1.5896261651, rel=1e-8)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3", 192**-0.5 * (1 + 0.1 * math.log(40)) ** 2),
        ("kimi-k2", 0.0721687836 * 1.3465735903**2),  # ln 32
        ("kimi-k2.6", 192**-0.5 * (1 + 0.1 * math.log(64)) ** 2),
    ],
)
def test_softmax_scales(name, scale):
    assert mla.softmax_scale(from_hf(PRESETS[name])) == pytest.approx(scale, rel=1e-8)


def test_k2_stretches_every_pair_from_the_twentieth_on():
    """Both betas are 1: pair 64 ln(4096 / 2 pi) / (2 ln 50000) = 19.16 rotates once; 0..19 are kept, 20.. scaled."""
    assert 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(50000)) == pytest.approx(19.16, abs=0.01)
    plain = 50000.0 ** (-np.arange(32) / 32)
    expected = np.where(np.arange(32) <= 19, plain, plain / 32)
    np.testing.assert_allclose(rope_frequencies(64, from_hf(PRESETS["kimi-k2"]).rope), expected, rtol=1e-6)


def test_v3_stretches_over_a_ramp():
    """Pairs up to 10 make 32 rotations within 4096 positions and are kept; from 23 on they make less than one."""
    plain = 10000.0 ** (-np.arange(32) / 32)
    stretched = np.clip((np.arange(32) - 10) / 13, 0, 1)
    expected = plain * (1 - stretched) + plain / 40 * stretched
    np.testing.assert_allclose(rope_frequencies(64, from_hf(PRESETS["deepseek-v3"]).rope), expected, rtol=1e-6)
