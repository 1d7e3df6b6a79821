"""The cost model of the merges against the compiled program, the choice it makes, and merging in two halves."""

import re
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from compiled_steps import compiled, instructions, scheduled
from harness import GOLDENS, Stepper, golden_runner, sample
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.checkpoint.model_files import open_model
from dcpjax.models.config import from_hf
from dcpjax.models.exchange import exchange
from dcpjax.runtime import model as model_module
from dcpjax.runtime.batch import build
from dcpjax.runtime.runner import Runner
from dcpjax.sharding.link import PUBLISHED_LINKS, published
from dcpjax.sharding.merge_cost import MERGE_NAMES, CollectiveSpeed, Link, MergeSize, fastest, seconds, sends
from dcpjax.sharding.mesh import Layout

FAMILIES = ("llama3", "deepseek-v3")


make_runner = cache(golden_runner)


def merge_size(runner: Runner, rows: int) -> MergeSize:
    config, layout = runner.model.config, runner.model.layout
    heads = config.num_heads // layout.tp
    width = config.mla.latent_rank if config.mla else config.head_dim
    return MergeSize(rows, heads, width, -(-heads * width // layout.dcp) * layout.dcp, layout.dcp)


def compiled_sends(text: str, ranks: int) -> Counter[str]:
    """Bytes that each device sends for merges, by kind, from the result types of the compiled program."""
    factors = {
        "all-gather": (ranks - 1) / ranks,
        "reduce-scatter": ranks - 1,
        "all-to-all": (ranks - 1) / ranks,
        "all-reduce": 2 * (ranks - 1) / ranks,
    }
    found: Counter[str] = Counter()
    for kind, result in instructions("\n".join(line for line in text.splitlines() if "/merge/" in line)):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)
        found[kind] += sum(4 * int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes) * factors[kind]
    return found


# --- the cost model


@pytest.mark.parametrize("merge", MERGE_NAMES)
@pytest.mark.parametrize(("family", "tp", "dcp"), [("llama3", 2, 4), ("deepseek-v3", 1, 8)])
def test_the_model_counts_every_byte_that_the_compiled_merge_sends(family, tp, dcp, merge):
    runner = make_runner(family, tp, dcp, dcp_comm_backend=merge)
    expected: Counter[str] = Counter()
    for send in sends(merge, merge_size(runner, rows=4)):
        expected[send.kind.replace("_", "-")] += runner.model.config.num_layers * send.bytes
    assert compiled_sends(compiled(runner, scheduled([20, 40])).as_text(), dcp) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("merge", MERGE_NAMES)
@pytest.mark.parametrize("family", ["smollm2", "llama-bias", *FAMILIES])
def test_the_planner_and_the_cost_model_count_the_same_bytes(family, merge):
    """smollm2's nine heads and llama-bias's 60 features do not divide by eight ranks."""
    config = from_hf(open_model(GOLDENS / family).config)
    width = config.mla.latent_rank if config.mla else config.head_dim
    size = MergeSize(1, config.num_heads, width, -(-config.num_heads * width // 8) * 8, 8)
    layout = Layout(tensor_parallel_size=8, decode_context_parallel_size=8)
    planned = exchange(config, layout, merge).merge_bytes
    assert sum(send.bytes for send in sends(merge, size)) == pytest.approx(planned, rel=1e-12)


def test_a_merge_takes_the_latency_of_each_collective_and_its_bytes_over_the_bandwidth():
    size = MergeSize(rows=3, heads=8, head_dim=4, features=32, ranks=8)
    speeds = [
        CollectiveSpeed(1.0, 10.0),
        CollectiveSpeed(2.0, 20.0),
        CollectiveSpeed(4.0, 40.0),
        CollectiveSpeed(8.0, 80.0),
    ]
    link = Link(*speeds)
    lse, out, share = 3 * 8, 3 * 32, 7 / 8 * 4
    assert seconds("ag_rs", size, link) == pytest.approx(1 + 8 * share * lse / 10 + 2 + share * out / 20)
    assert seconds("a2a", size, link) == pytest.approx(4 + share * (lse + out) / 40)
    assert seconds("psum", size, link) == pytest.approx(16 + 2 * share * (2 * lse + out) / 80)
    unpacked = size._replace(heads=9, features=40)
    assert [send.kind for send in sends("a2a", unpacked)] == ["all_to_all", "all_gather"]


# --- the choice


SPEEDS = st.builds(CollectiveSpeed, st.floats(0, 1e-3), st.floats(1e6, 1e12))
SIZES = st.builds(
    lambda rows, heads, width, ranks: MergeSize(rows, heads, width, -(-heads * width // ranks) * ranks, ranks),
    st.integers(1, 4096),
    st.integers(1, 128),
    st.sampled_from([64, 128, 512]),
    st.sampled_from([2, 4, 8, 16]),
)


@given(SIZES, st.builds(Link, SPEEDS, SPEEDS, SPEEDS, SPEEDS))
def test_nothing_is_predicted_to_be_faster_than_the_choice(size, link):
    chosen = seconds(fastest(size, link), size, link)
    assert all(chosen <= seconds(merge, size, link) for merge in MERGE_NAMES)


def test_ag_rs_is_chosen_where_nothing_is_known_and_where_all_tie():
    size = MergeSize(rows=8, heads=8, head_dim=64, features=512, ranks=8)
    free = CollectiveSpeed(0.0, float("inf"))
    assert fastest(size, None) == fastest(size, Link(free, free, free, free)) == "ag_rs"


@given(SIZES, st.sampled_from(["nvlink", "pcie"]))
def test_behind_a_switch_whole_heads_always_go_by_one_all_to_all(size, name):
    if size.packs:
        assert fastest(size, published(PUBLISHED_LINKS[name], size.ranks)) == "a2a"


def test_on_a_torus_few_rows_go_by_all_to_all_and_many_by_reduce_scatter():
    link = published(PUBLISHED_LINKS["ici"], 8)
    few = MergeSize(rows=8, heads=64, head_dim=128, features=64 * 128, ranks=8)
    assert fastest(few, link) == "a2a"
    assert fastest(few._replace(rows=256), link) == "ag_rs"


def test_fast_all_reduces_make_psum_the_choice():
    slow, fast = CollectiveSpeed(20e-6, 1e11), CollectiveSpeed(2e-6, 1e12)
    size = MergeSize(rows=8, heads=64, head_dim=128, features=64 * 128, ranks=8)
    assert fastest(size, Link(slow, slow, slow, fast)) == "psum"


def kinds(runner: Runner, step: Any) -> Counter[str]:
    return Counter(kind for kind, _ in instructions(compiled(runner, step).as_text()))


def test_auto_compiles_another_merge_for_each_shape(monkeypatch):
    """An all-to-all of no latency and low bandwidth: it is chosen for few rows and not for many."""
    quick = CollectiveSpeed(1e-6, 1e9)
    link = Link(
        all_gather=quick,
        reduce_scatter=quick,
        all_to_all=CollectiveSpeed(0.0, 2e8),
        all_reduce=CollectiveSpeed(1.0, 1e9),
    )
    monkeypatch.setattr(model_module, "find_link", lambda mesh, folder: link)
    auto = make_runner.__wrapped__("llama3", 1, 8, dcp_comm_backend="auto", max_num_seqs=1)
    assert fastest(merge_size(auto, 1), link) == "a2a"
    assert fastest(merge_size(auto, 32), link) == "ag_rs"
    few, many = kinds(auto, scheduled([20])), kinds(auto, scheduled([20], count=20))
    layers = auto.model.config.num_layers
    assert (few["all-to-all"], few["reduce-scatter"]) == (layers, 0)
    assert (many["all-to-all"], many["reduce-scatter"]) == (0, layers)


def test_auto_on_cpu_is_ag_rs():
    auto, fixed = (make_runner("llama3", 1, 8, dcp_comm_backend=merge) for merge in ("auto", "ag_rs"))
    step = scheduled([20, 40])
    assert auto.model.runtime.link is None
    assert kinds(auto, step) == kinds(fixed, step)


# --- two halves


@pytest.mark.parametrize(("family", "merge"), [*(("llama3", merge) for merge in MERGE_NAMES), ("deepseek-v3", "a2a")])
def test_two_halves_run_every_collective_of_the_merge_twice(family, merge):
    """Counted in the traced program, which has layers of equal shapes once: XLA's CPU backend removes the barrier early
    and joins the all-reduces again."""
    whole, halves = traced(family, merge, False), traced(family, merge, True)
    added = {"ag_rs": {"all_gather": 1, "reduce_scatter": 1}, "a2a": {"all_to_all": 1}, "psum": {"all_reduce": 3}}
    assert halves - whole == {kind: kinds_of_layers(family) * count for kind, count in added[merge].items()}


def kinds_of_layers(family: str) -> int:
    """1 or 2: dense layers, and layers with experts."""
    config = make_runner(family, 1, 8).model.config
    return len({config.is_moe(layer) for layer in range(config.num_layers)})


def traced(family: str, merge: str, overlap: bool) -> Counter[str]:
    runner = make_runner(family, 1, 8, dcp_comm_backend=merge, dcp_overlap=overlap)
    batch = build(scheduled([20, 40]), runner.shapes, runner.geometry)
    text = runner.programs.forward.lower(runner.weights, runner.cache, runner.latest, batch).as_text()
    return Counter(re.findall(r"stablehlo\.(all_gather|all_to_all|reduce_scatter|all_reduce)\b", text))


@pytest.mark.parametrize(("family", "merge"), [("llama3", "ag_rs"), ("deepseek-v3", "a2a")])
def test_the_second_half_attends_without_waiting_for_the_first_ones_exchange(family, merge):
    program = compiled(make_runner(family, 1, 8, dcp_comm_backend=merge, dcp_overlap=True), scheduled([20, 40]))
    waits = ancestors(program.as_text())
    loops, exchanges = attention_loops(waits), merge_collectives(waits)
    layers = make_runner(family, 1, 8).model.config.num_layers
    free = {loop for loop in loops for name in exchanges if unordered(waits, loop, name)}
    assert len(loops) == 2 * layers
    assert len(free) >= layers


def test_without_halves_no_exchange_can_run_beside_attention():
    waits = ancestors(compiled(make_runner("llama3", 1, 8), scheduled([20, 40])).as_text())
    loops, exchanges = attention_loops(waits), merge_collectives(waits)
    assert loops
    assert exchanges
    assert not any(unordered(waits, loop, name) for loop in loops for name in exchanges)


class Instruction:
    """A line of a compiled program and the names of all instructions it depends on, also indirectly."""

    def __init__(self, line: str, above: frozenset[str]) -> None:
        self.line, self.above = line, above


def attention_loops(waits: dict[str, Instruction]) -> list[str]:
    return [name for name, own in waits.items() if " while(" in own.line and "/partial/" in own.line]


def merge_collectives(waits: dict[str, Instruction]) -> list[str]:
    return [name for name, own in waits.items() if "/merge/" in own.line and instructions(own.line)]


def unordered(waits: dict[str, Instruction], one: str, other: str) -> bool:
    """Whether neither depends on the other."""
    return one not in waits[other].above and other not in waits[one].above


def ancestors(text: str) -> dict[str, Instruction]:
    """Every instruction of the entry computation, in the order of the text: each after those it depends on."""
    entry = text[text.index("\nENTRY ") :]
    found: dict[str, Instruction] = {}
    for line in entry.splitlines():
        if match := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line):
            needs = [name for name in re.findall(r"%([\w.\-]+)", line[match.end() :]) if name in found]
            found[match[1]] = Instruction(line, frozenset(needs).union(*(found[name].above for name in needs)))
    return found


@pytest.mark.parametrize(
    ("family", "tp", "dcp", "merge"),
    sample(
        [("llama3", 1, 8, "ag_rs"), ("llama3", 2, 4, "psum"), ("deepseek-v3", 1, 8, "a2a")],
        ("llama3", 2, 4, "psum"),
        ("deepseek-v3", 1, 8, "a2a"),
    ),
)
def test_two_halves_give_the_same_tokens_and_logits(family, tp, dcp, merge):
    """Three requests, which is also the limit: halves of two tokens and one."""
    prompts = [[3, 5, 7], [11] * 20, list(range(3, 43))]
    options = {"tensor_parallel_size": tp * dcp, "decode_context_parallel_size": dcp, "max_num_seqs": 3}
    options |= {"dcp_comm_backend": merge, "max_num_batched_tokens": 64}
    whole, halves = (
        Stepper(GOLDENS / family, dcp_overlap=overlap, **options).greedy(prompts, 5) for overlap in (False, True)
    )
    for one, other in zip(whole, halves, strict=True):
        assert other.tokens == one.tokens
        np.testing.assert_allclose(other.logits, one.logits, rtol=0, atol=2e-5)


def test_the_cache_is_written_once_before_both_halves():
    def updates(overlap: bool) -> int:
        runner = make_runner("llama3", 1, 8, dcp_overlap=overlap)
        batch = build(scheduled([20, 40]), runner.shapes, runner.geometry)
        step = runner.programs.forward.lower(runner.weights, runner.cache, runner.latest, batch)
        return step.as_text().count('.scatter"')

    assert updates(True) == updates(False) > 0


def test_a_step_of_one_token_or_with_a_prompt_is_not_split():
    for step in (scheduled([20]), scheduled([20], count=20)):
        whole, halves = (make_runner("llama3", 1, 8, dcp_overlap=overlap) for overlap in (False, True))
        assert kinds(halves, step) == kinds(whole, step)
