"""The default size of the cache: what the planner says, and within what XLA has reserved."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from harness import GOLDENS, golden_runner

from dcpjax.api.config import EngineConfig
from dcpjax.engine.limits import step_limits
from dcpjax.models.exchange import ACCELERATOR_PIECE_POSITIONS
from dcpjax.planning.planner import plan
from dcpjax.runtime.memory import (
    block_bytes_per_device,
    default_cache_bytes,
    memory_limit,
    reserved_share,
)

MEMORY = 10**9


class FakePlace:
    """A mesh's placement whose first device tells another memory than a CPU's, which tells none."""

    def __init__(self, place: Any, stats: dict[str, int]) -> None:
        device = SimpleNamespace(memory_stats=lambda: stats)
        self._place, self.mesh = place, SimpleNamespace(devices=SimpleNamespace(flat=[device]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)


def default_bytes(model: Any, platform: str, **stats: int) -> int:
    config, engine = model.config, EngineConfig()
    limits = step_limits(
        config,
        platform,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=None,
        max_mixed_prefill_tokens=None,
        enable_prefix_caching=True,
    )
    fake: Any = SimpleNamespace(
        place=FakePlace(model.place, stats),
        platform=platform,
        config=config,
        layout=model.layout,
        weight_specs=model.weight_specs,
        prompt_exchange=replace(own, positions=ACCELERATOR_PIECE_POSITIONS) if (own := model.prompt_exchange) else None,
    )
    return default_cache_bytes(fake, engine, limits)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 4)])
def test_the_default_cache_holds_as_many_blocks_as_planned(tp: int, dcp: int) -> None:
    model = golden_runner("llama3", tp, dcp).model
    engine = default_bytes(model, "tpu", bytes_limit=MEMORY, bytes_in_use=0)
    planned = plan(
        str(GOLDENS / "llama3"),
        hardware=f"memory={MEMORY},bandwidth=1TB/s,link=100GB/s",
        dtype="float32",
        block_size=16,
        tensor_parallel_size=tp * dcp,
        decode_context_parallel_size=dcp,
        context_length=8,
        output_length=8,
    ).row
    assert planned.num_blocks == engine // block_bytes_per_device(model)
    assert planned.workspace_bytes > 0
    assert planned.weight_bytes + planned.workspace_bytes + engine == pytest.approx(0.9 * MEMORY, abs=1)


def test_what_others_use_is_not_given_away() -> None:
    model = golden_runner("llama3", 1, 1).model
    free, used = (default_bytes(model, "tpu", bytes_limit=MEMORY, bytes_in_use=used) for used in (0, 10**8))
    assert free - used == 10**8


def test_the_share_is_of_the_whole_memory_and_at_most_what_is_reserved() -> None:
    assert memory_limit(75, 0.9, 0.75) == 75  # of 100, which XLA has reserved 75 of
    assert memory_limit(75, 0.5, 0.75) == pytest.approx(50)
    assert memory_limit(100, 0.9, 1.0) == pytest.approx(90)


def test_a_gpus_reserved_share_is_the_users_or_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert (reserved_share("tpu"), reserved_share("gpu")) == (1.0, 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert reserved_share("gpu") == 0.5
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.92")
    assert reserved_share("gpu") == 0.92
