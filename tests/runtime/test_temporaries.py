"""The planner's bound of a step's temporaries, against what XLA says of the compiled programs."""

from dataclasses import replace
from typing import Any

import pytest
from compiled_steps import compiled, compiled_choice, scheduled, with_gathered_queries
from harness import golden_runner, sample

from dcpjax.runtime.temporaries import step_temporaries
from dcpjax.sharding.mesh import Layout

LOOSEST = 4  # times what the programs need

CASES = [
    (family, tp, dcp, tokens)
    for family in ("llama3", "deepseek-v3", "qwen3-moe")
    for tp, dcp in ((1, 1), (1, 8), (2, 4), (8, 1))
    for tokens in (32, 128)
    if (family, tp) != ("qwen3-moe", 8)  # its six heads do not divide by eight
]


@pytest.mark.parametrize(
    ("family", "tp", "dcp", "tokens"),
    sample(CASES, ("llama3", 1, 8, 128), ("deepseek-v3", 1, 8, 32), ("qwen3-moe", 1, 1, 128)),
)
def test_the_bound_holds_and_is_not_far_from_what_is_needed(family: str, tp: int, dcp: int, tokens: int) -> None:
    runner = golden_runner(family, tp, dcp, max_num_batched_tokens=tokens)
    step = scheduled([tokens], count=tokens)
    needed = max(beside_weights_and_cache(program(runner, step)) for program in (compiled, compiled_choice))
    model, prompts = runner.model, runner.model.prompt_exchange
    if prompts is not None:  # a piece is never longer than the longest request
        positions = model.geometry.block_size * runner.shapes.piece_blocks(1, model.geometry)
        prompts = replace(prompts, positions=positions)
    bound = step_temporaries(model.config, model.layout, tokens=tokens, rows=1, prompts=prompts)
    with_gathered_queries(runner)
    needed = max(needed, beside_weights_and_cache(compiled(runner, step)))
    assert needed <= bound <= LOOSEST * needed


def beside_weights_and_cache(program: Any) -> int:
    sizes = program.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes


def test_more_devices_more_tokens_and_more_rows_need_what_they_should() -> None:
    config = golden_runner("llama3", 1, 1).model.config

    def bound(tp: int, tokens: int = 128, rows: int = 1) -> int:
        return step_temporaries(config, Layout(tensor_parallel_size=tp), tokens=tokens, rows=rows)

    assert bound(1) > bound(2) > bound(8)
    assert 2 * bound(1, tokens=1024) > bound(1, tokens=2048) > bound(1, tokens=1024)
    assert bound(1, rows=100_000) > 3 * 4 * 100_000 * config.vocab_size
