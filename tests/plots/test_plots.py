import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax import LLM, SamplingParams, plan, plots
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.notebook_view import describe
from dcpjax.plots import LoadPoint
from dcpjax.plots.canvas import COLOURS, colours, text_colour
from dcpjax.runtime.memory import block_bytes_per_device
from dcpjax.simulation.result import Percentiles
from dcpjax.simulation.simulator import simulate
from dcpjax.simulation.trace import TraceRequest

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 2**18, "max_num_seqs": 2}


def load(family: str, devices: int, dcp: int, **options) -> LLM:
    layout = {"tensor_parallel_size": devices, "decode_context_parallel_size": dcp}
    return LLM(GOLDENS / family, progress=False, **SMALL, **layout, **options)


def test_without_matplotlib_the_sentence_names_the_extra_and_importing_plots_does_no_harm():
    program = """
import sys
sys.modules["matplotlib"] = None
from dcpjax import plots
try:
    plots.merge_weights([0.0, 1.0])
except ValueError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    sentence = "plots need the matplotlib package, which is not installed; pip install 'dcpjax[plots]'\n"
    assert run.stdout == sentence, run.stderr


def test_importing_plots_does_not_import_matplotlib():
    program = "import sys; from dcpjax import plots; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout == "False\n", run.stderr


# Pictures


@pytest.fixture
def drawn():
    """Takes a figure apart: it must draw something, fit its own frame and be a PNG in a notebook."""
    pytest.importorskip("matplotlib")

    def take(figure):
        png = figure._repr_png_()
        assert png.startswith(b"\x89PNG")
        assert len(png) < 100_000
        renderer = figure.canvas.get_renderer()
        frame = figure.bbox
        for axes in figure.axes:
            assert axes.has_data()
            inside = axes.get_tightbbox(renderer)
            assert frame.x0 <= inside.x0 < inside.x1 <= frame.x1
            assert frame.y0 <= inside.y0 < inside.y1 <= frame.y1
        return figure.axes

    return take


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("family", "dcp", "copies", "rows"),
    [
        ("llama-linear", 1, 2, ["rank 0, KV head 0", "rank 0, KV head 1", "rank 0, KV head 2", "rank 0, KV head 3"]),
        ("llama-linear", 2, 1, [f"rank {rank}, KV head {head}" for rank in range(2) for head in range(4)]),
        ("llama-linear", 8, 1, [f"rank {rank}, KV heads 0-3" for rank in range(8)]),
        ("deepseek-v3", 1, 4, ["latents of rank 0"]),
        ("deepseek-v3", 2, 2, ["latents of rank 0", "latents of rank 1"]),
    ],
)
def test_duplication_map_shows_what_the_shards_hold(drawn, family, dcp, copies, rows):
    devices = 4 if family == "deepseek-v3" else 8
    llm = load(family, devices, dcp)
    figure, numbers = plots.duplication_map(llm)
    assert numbers["copies"] == copies
    assert numbers["bytes_stored"] == copies * numbers["bytes_unique"]
    block = block_bytes_per_device(llm.runner.model) * llm.runner.sizes.num_blocks
    assert numbers["bytes_per_device"] == dict.fromkeys(range(devices), block)
    assert all(len(where) == copies for where in numbers["holders"].values())
    (axes,) = drawn(figure)
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert len(axes.patches) == len(rows) * devices
    held = [patch for patch in axes.patches if patch.get_facecolor()[3] > 0]
    assert len(held) == len(rows) * copies == texts(axes).count("held")


def test_devices_that_the_map_calls_equal_hold_equal_bytes_once_there_are_some():
    pytest.importorskip("matplotlib")
    llm = load("llama-linear", 8, 1, max_num_batched_tokens=32)
    llm.generate([[5, 6, 7, 8, 9]], SamplingParams(temperature=0, max_tokens=2))
    _, numbers = plots.duplication_map(llm)
    held = {shard.device.id: bytes(np.asarray(shard.data)) for shard in llm.runner.cache[0].keys.addressable_shards}
    groups = [{held[device] for device in where} for where in numbers["holders"].values()]
    assert [len(group) for group in groups] == [1] * 4
    assert len(set().union(*groups)) == 4


def test_ownership_strip_colours_each_position_by_its_rank(drawn):
    even, runs = CacheGeometry(block_size=8, dcp=4), CacheGeometry(block_size=16, dcp=2, interleave=8)
    figure, numbers = plots.ownership_strip(even, runs)
    first, second = numbers["strips"]
    assert first == {
        "name": "dcp 4, interleave 1, block of 8",
        "ranks": [0, 1, 2, 3] * 8,
        "tokens_per_rank": [8, 8, 8, 8],
    }
    assert second["ranks"] == ([0] * 8 + [1] * 8) * 2
    (axes,) = drawn(figure)
    assert np.array_equal(axes.images[0].get_array(), [first["ranks"], second["ranks"]])
    assert texts(axes) == [str(rank) for strip in numbers["strips"] for rank in strip["ranks"]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "1", "2", "3"]


@pytest.mark.parametrize(("dcp", "named"), [(8, 8), (16, 5)])
def test_a_strip_of_many_ranks_and_positions_keeps_within_its_frame(drawn, dcp, named):
    figure, _ = plots.ownership_strip(CacheGeometry(block_size=256, dcp=dcp))
    (axes,) = drawn(figure)
    assert len(axes.get_legend().get_texts()) == named
    assert texts(axes) == []


@given(
    dcp=st.sampled_from([1, 2, 4, 16]),
    interleave=st.sampled_from([1, 2, 8]),
    blocks=st.integers(1, 3),
    tokens=st.integers(1, 300),
)
def test_ranks_of_a_strip_are_counted_as_the_geometry_counts_them(dcp, interleave, blocks, tokens):
    pytest.importorskip("matplotlib")
    geometry = CacheGeometry(block_size=blocks * dcp * interleave, dcp=dcp, interleave=interleave)
    _, numbers = plots.ownership_strip(geometry, tokens=tokens)
    (strip,) = numbers["strips"]
    assert [strip["ranks"].count(rank) for rank in range(dcp)] == strip["tokens_per_rank"]


def test_strips_of_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one geometry, but has none"):
        plots.ownership_strip()
    with pytest.raises(ValueError, match="tokens must be at least 1, but is 0"):
        plots.ownership_strip(CacheGeometry(block_size=8), tokens=0)


def test_merge_weights_are_shares_of_the_whole_and_an_empty_rank_has_none(drawn):
    _, numbers = plots.merge_weights(np.log([1.0, 2.0, 5.0]) + 3)
    assert numbers["weights"] == pytest.approx([0.125, 0.25, 0.625], abs=1e-6)
    assert numbers["empty"] == []
    figure, numbers = plots.merge_weights([[0.0, 1.0], [-np.inf, -np.inf], [0.0, -np.inf]])
    assert numbers["weights"] == [[0.5, 1.0], [0.0, 0.0], [0.5, 0.0]]
    assert numbers["empty"] == [1]
    (axes,) = drawn(figure)
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert np.array_equal(np.transpose(heights), numbers["weights"])
    assert texts(axes) == ["50%", "50%", "100%", "0%", "saw no key:\nweight 0"]


def test_merge_of_nothing_but_empty_ranks_is_drawn_as_zeros(drawn):
    figure, numbers = plots.merge_weights([-np.inf, -np.inf])
    assert numbers == {"weights": [0.0, 0.0], "empty": [0, 1]}
    drawn(figure)
    with pytest.raises(ValueError, match=r"must be \[dcp\] or \[dcp, H\], but has shape \(1, 2, 3\)"):
        plots.merge_weights(np.zeros((1, 2, 3)))


def test_capacity_shows_the_plan(drawn):
    planned = plan("kimi-k2", tensor_parallel_size=8, dtype="nvfp4", kv_cache_dtype="fp8")
    figure, numbers = plots.capacity(planned)
    assert numbers == {
        "dcp": [1, 2, 4, 8],
        "tokens": [row.tokens for row in planned.rows],
        "requests": [row.requests for row in planned.rows],
        "copies": [8, 4, 2, 1],
    }
    (axes,) = drawn(figure)
    assert [bar.get_height() * 1e6 for bar in axes.containers[0]] == pytest.approx(numbers["tokens"])
    assert texts(axes)[0] == f"{numbers['requests'][0]:,} requests\nstored 8x"


def test_capacity_of_weights_that_leave_no_room_is_an_empty_picture(drawn):
    figure, numbers = plots.capacity(plan("kimi-k2", tensor_parallel_size=2))
    assert numbers["tokens"] == [0, 0]
    drawn(figure)


# Load


@dataclass(frozen=True)
class Step:
    time: float
    seconds: float
    used_blocks: int
    prefill_tokens: int
    decode_tokens: int
    preempted: int = 0


STEPS = [Step(0.0, 0.5, 4, 64, 0), Step(0.5, 0.1, 8, 60, 4), Step(0.6, 0.1, 8, 0, 8, 2), Step(0.7, 0.1, 6, 0, 6)]
RUN = SimpleNamespace(num_blocks=8, timeline=STEPS)


def test_timeline_draws_each_step_at_its_time_and_marks_who_gave_way(drawn):
    figure, numbers = plots.timeline(RUN)
    assert numbers == {
        "steps": 4,
        "seconds": pytest.approx(0.8),
        "prefill_tokens": 124,
        "decode_tokens": 18,
        "preempted": 2,
    }
    upper, lower = drawn(figure)
    assert [bar.get_height() for bar in upper.containers[0]] == [64, 60, 0, 0]
    assert [bar.get_x() for bar in lower.containers[0]] == pytest.approx([0.0, 0.5, 0.6, 0.7])
    assert [bar.get_width() for bar in lower.containers[0]] == pytest.approx([0.5, 0.1, 0.1, 0.1])
    assert [bar.get_height() for bar in lower.containers[0]] == [0, 4, 8, 6]
    (marks,) = lower.lines
    assert marks.get_xdata() == pytest.approx([0.65])
    assert marks.get_ydata()[0] > 8


def test_timeline_without_preemption_marks_none(drawn):
    figure, _ = plots.timeline(SimpleNamespace(num_blocks=8, timeline=STEPS[:1]))
    assert all(not axes.lines for axes in drawn(figure))


def test_occupancy_is_the_share_of_blocks_in_use(drawn):
    figure, numbers = plots.occupancy({"here": RUN, "short": SimpleNamespace(num_blocks=16, timeline=STEPS[:2])})
    assert numbers["here"] == {"usage": [0.5, 1.0, 1.0, 0.75], "mean": 0.8125, "max": 1.0}
    assert numbers["short"] == {"usage": [0.25, 0.5], "mean": 0.375, "max": 0.5}
    (axes,) = drawn(figure)
    here, short, whole = axes.lines
    assert list(here.get_ydata()) == numbers["here"]["usage"]
    assert list(short.get_xdata()) == [1, 2]
    assert list(whole.get_ydata()) == [1, 1]
    assert here.get_linestyle() != short.get_linestyle()


def test_load_that_holds_nothing_is_refused():
    empty = SimpleNamespace(num_blocks=8, timeline=[])
    for refused in (
        lambda: plots.timeline(empty),
        lambda: plots.occupancy({"a": empty}),
        lambda: plots.throughput({"a": []}, source="measured"),
    ):
        with pytest.raises(ValueError, match=r"must h\w+ at least one"):
            refused()


def points(*rows: tuple[int, float, float, bool]) -> list[LoadPoint]:
    names = ("concurrency", "tokens_per_second", "inter_token_seconds", "saturated")
    return [LoadPoint(**dict(zip(names, row, strict=True))) for row in rows]


def test_throughput_draws_both_panels_and_rings_where_a_curve_saturates(drawn):
    tp = points((8, 100.0, 0.02, False), (64, 90.0, 0.03, True), (128, 80.0, 0.04, True))
    dcp = points((8, 90.0, 0.03, False), (512, 900.0, 0.05, False))
    figure, numbers = plots.throughput({"tp": tp, "dcp": dcp}, source="measured")
    assert numbers["tp"]["saturates_at"] == 64
    assert numbers["dcp"]["saturates_at"] is None
    assert numbers["dcp"]["tokens_per_second"] == [90.0, 900.0]
    rates, gaps = drawn(figure)
    assert rates.get_title("left") == "measured"
    curve, ring, other = rates.lines
    assert list(curve.get_ydata()) == [100.0, 90.0, 80.0]
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (64, 90.0)
    assert list(other.get_xdata()) == [8, 512]
    assert list(gaps.lines[0].get_ydata()) == pytest.approx([20.0, 30.0, 40.0])
    assert [label.get_text() for label in rates.get_xticklabels()] == ["8", "64", "128", "512"]


def test_a_simulation_is_a_point_of_a_curve_and_a_run_of_a_timeline(drawn):
    request = TraceRequest(timestamp=0, input_length=4096, output_length=8, hash_ids=tuple(range(8)))
    overrides = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16}
    run = simulate([request] * 2, "kimi-k2", hf_overrides=overrides, arrivals="closed", concurrency=2)
    point = LoadPoint.of(run)
    assert point == LoadPoint(
        concurrency=2,
        tokens_per_second=run.throughput,
        inter_token_seconds=run.inter_token_gap.p50,
        saturated=False,
    )
    assert isinstance(run.inter_token_gap, Percentiles)
    _, numbers = plots.throughput({"dcp=1": [run]}, source="simulated floor")
    assert numbers["dcp=1"]["tokens_per_second"] == [run.throughput]
    figure, totals = plots.timeline(run)
    assert totals["seconds"] == pytest.approx(run.duration)
    drawn(figure)
    _, used = plots.occupancy({"dcp=1": run})
    assert used["dcp=1"]["max"] == run.cache_usage_max


@pytest.fixture(scope="module")
def alone() -> LLM:
    return load("llama-linear", 1, 1, max_num_batched_tokens=32)


def test_record_keeps_every_step_and_gives_what_generate_gives(alone):
    prompts, greedy = [list(range(3, 43)), [7, 8, 9]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    wanted = [result.outputs[0].token_ids for result in alone.generate(prompts, greedy)]
    alone.reset_prefix_cache()
    run = plots.record(alone, prompts, greedy)
    assert [result.outputs[0].token_ids for result in run.outputs] == wanted
    assert run.num_blocks == alone.stats().num_blocks
    assert sum(step.prefill_tokens for step in run.timeline) == 43
    assert sum(step.decode_tokens for step in run.timeline) == 6
    assert max(step.running for step in run.timeline) == 2
    assert [step.time for step in run.timeline] == sorted(step.time for step in run.timeline)
    assert alone.stats().num_used_blocks == 0


def test_record_of_a_bad_prompt_ends_and_frees_the_others(alone):
    run = plots.record(alone, [[], [7, 8, 9]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [result.outputs[0].finish_reason for result in run.outputs] == ["error", "length"]
    assert alone.stats().num_used_blocks == 0


def test_colours_stay_apart_and_their_text_can_be_read():
    pytest.importorskip("matplotlib")
    assert colours(3) == list(COLOURS[:3])
    assert len(set(colours(40))) == 40
    assert text_colour("#F0E442") == "black"
    assert text_colour("#0072B2") == "white"


# What a notebook shows of a model


def described(llm: LLM) -> str:
    return describe(llm.files.path, llm.runner)


def test_a_model_describes_its_layout_its_cache_and_its_limits():
    llm = load("llama-linear", 8, 2)
    told = described(llm)
    assert told.startswith('<table class="tex2jax_ignore mathjax_ignore">')
    for cell in (
        "tp=4 x dcp=2 on 8 cpu devices, merged by ag_rs",
        f"{llm.runner.sizes.num_blocks * 16:,} tokens in {llm.runner.sizes.num_blocks:,} blocks of 16, stored 1x",
        "float32, 0.2 MiB per device",
        "2 at once, 1,024 tokens a step",
    ):
        assert cell in told
    assert "stored 2x" in described(load("llama-linear", 8, 1))
    assert "merged" not in described(load("llama-linear", 8, 1))


def test_what_a_model_is_called_cannot_write_html():
    llm = load("llama-linear", 1, 1)
    llm.files = SimpleNamespace(path="<script>alert(1)</script>")
    assert "<script>" not in described(llm)
    assert "&lt;script&gt;" in described(llm)
