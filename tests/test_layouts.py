"""The same tokens and logits for every legal mesh, merge, block size and interleave."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from harness import GOLDENS, Trace, loaded, sample

from dcpjax.checkpoint.model_files import open_model
from dcpjax.models.config import from_hf
from dcpjax.runtime.memory import block_bytes_per_device
from dcpjax.sharding.mesh import legal_layouts

TOLERANCE = 2e-5
EIGHT_RANKS: dict[str, Any] = {"tensor_parallel_size": 8, "decode_context_parallel_size": 8, "load_format": "dummy"}
ONE_PROGRAM: dict[str, Any] = {
    "one_shape": True,
    "load_format": "dummy",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
}
MERGES = ("ag_rs", "a2a", "psum")
# every length up to 2 * 8 + 1, then around block edges
LENGTHS = [*range(1, 18), 31, 32, 33, 47, 48, 49]


def prompts(vocab: int) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, vocab, length).tolist() for length in LENGTHS]


def run(family: str, **options: Any) -> list[Trace]:
    vocab = open_model(GOLDENS / family).config["vocab_size"]
    return loaded(family, **ONE_PROGRAM, **options).greedy(prompts(vocab), 4)


def assert_equal_to_one_device(family: str, **options: Any) -> None:
    """All lengths in one batch against the same on one device."""
    for expected, found in zip(run(family), run(family, **options), strict=True):
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.every_logits, expected.every_logits, rtol=0, atol=TOLERANCE)


def every_layout(family: str) -> list[tuple[int, int]]:
    config = from_hf(open_model(GOLDENS / family).config)
    return [
        (devices, layout.dcp)
        for devices in (1, 2, 4, 8)
        for layout in legal_layouts(devices, config.num_heads, config.cache_heads)
    ]


@pytest.mark.parametrize(("devices", "dcp"), sample(every_layout("llama3"), (1, 1), (8, 4)))
def test_eight_heads_on_two_kv_heads_on_every_layout(devices: int, dcp: int) -> None:
    for merge in MERGES if dcp > 1 else MERGES[:1]:
        assert_equal_to_one_device(
            "llama3", tensor_parallel_size=devices, decode_context_parallel_size=dcp, dcp_comm_backend=merge
        )


@pytest.mark.parametrize(("devices", "dcp"), sample(every_layout("smollm2"), (1, 1), (8, 8)))
def test_nine_heads_that_divide_by_nothing_on_every_layout(devices: int, dcp: int) -> None:
    for merge in MERGES if dcp > 1 else MERGES[:1]:
        assert_equal_to_one_device(
            "smollm2", tensor_parallel_size=devices, decode_context_parallel_size=dcp, dcp_comm_backend=merge
        )


ONE_KV_HEAD = sample([layout for layout in every_layout("qwen3") if layout[0] in (4, 8)], (8, 4))


@pytest.mark.parametrize(("devices", "dcp"), ONE_KV_HEAD)
def test_one_kv_head_with_head_norms_on_every_layout(devices: int, dcp: int) -> None:
    assert_equal_to_one_device("qwen3", tensor_parallel_size=devices, decode_context_parallel_size=dcp)


@pytest.mark.parametrize(("devices", "dcp"), sample(every_layout("deepseek-v3"), (1, 1), (8, 4)))
def test_latent_attention_on_every_layout(devices: int, dcp: int) -> None:
    """One latent for all eight heads: tensor parallelism alone stores it on every device."""
    for merge in MERGES if devices == 8 and dcp > 1 else MERGES[:1]:
        assert_equal_to_one_device(
            "deepseek-v3", tensor_parallel_size=devices, decode_context_parallel_size=dcp, dcp_comm_backend=merge
        )


@pytest.mark.parametrize(("devices", "dcp"), sample([(2, 1), (6, 3), (6, 6)], (6, 3)))
def test_seven_experts_on_two_and_six_devices(devices: int, dcp: int) -> None:
    assert_equal_to_one_device(
        "qwen3-moe", tensor_parallel_size=devices, decode_context_parallel_size=dcp, block_size=24
    )


def test_a_latent_cache_is_split_by_dcp_to_the_byte() -> None:
    sizes = {
        dcp: block_bytes_per_device(
            loaded("deepseek-v3", tensor_parallel_size=8, decode_context_parallel_size=dcp, **ONE_PROGRAM).runner.model
        )
        for dcp in (1, 2, 4, 8)
    }
    config = from_hf(open_model(GOLDENS / "deepseek-v3").config)
    assert config.mla is not None
    assert sizes[1] == 16 * config.num_layers * (config.mla.latent_rank + config.mla.rope_dim) * 4
    assert sizes == {dcp: sizes[1] // dcp for dcp in sizes}


@pytest.mark.parametrize(("devices", "dcp"), sample([(6, 2), (6, 3), (6, 6), (3, 1)], (6, 2), (3, 1)))
def test_twelve_heads_on_six_devices(devices: int, dcp: int) -> None:
    if (devices, dcp) == (6, 2):
        with pytest.raises(ValueError, match="2 KV heads neither divide into 6/2 = 3 head groups"):
            loaded("qwen2", tensor_parallel_size=devices, decode_context_parallel_size=dcp)
    elif (devices, dcp) == (3, 1):
        with pytest.raises(ValueError, match="legal decode_context_parallel_size on 3 devices: 3"):
            loaded("qwen2", tensor_parallel_size=devices, decode_context_parallel_size=dcp)
    else:
        assert_equal_to_one_device(
            "qwen2", tensor_parallel_size=devices, decode_context_parallel_size=dcp, block_size=18
        )


@pytest.mark.parametrize(
    ("block_size", "interleave"),
    sample([(8, 1), (32, 1), (32, 2), (32, 4), (64, 4), (64, 8), (256, 16), (1024, 128)], (8, 1), (64, 4)),
)
def test_block_sizes_and_interleaves_on_eight_ranks(block_size: int, interleave: int) -> None:
    assert_equal_to_one_device(
        "smollm2",
        tensor_parallel_size=8,
        decode_context_parallel_size=8,
        block_size=block_size,
        cp_kv_cache_interleave_size=interleave,
        kv_cache_memory_bytes=2**22,
    )


@pytest.mark.parametrize("merge", sample(MERGES, "a2a"))
def test_a_query_projection_kept_whole_on_every_rank(merge: str) -> None:
    assert_equal_to_one_device(
        "llama3",
        tensor_parallel_size=8,
        decode_context_parallel_size=4,
        dcp_replicate_q=True,
        dcp_comm_backend=merge,
    )


@pytest.mark.parametrize("chunk", sample([1, 7, 16, 50], 7))
def test_chunked_prefill_equals_one_chunk(chunk: int) -> None:
    """Contexts over many chunks, with extensions that do not divide by the group."""
    options: dict[str, Any] = {**EIGHT_RANKS, "max_num_seqs": 1}
    prompt = np.random.default_rng(3).integers(0, 101, 75).tolist()
    whole = loaded("smollm2", max_num_batched_tokens=128, **options).greedy([prompt], 6)
    parts = loaded("smollm2", max_num_batched_tokens=chunk, **options).greedy([prompt], 6)
    assert parts[0].tokens == whole[0].tokens
    np.testing.assert_allclose(parts[0].every_logits, whole[0].every_logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("poison", "dcp"), list(product([np.nan, 1e30, np.inf], [1, 8])))
def test_unused_slots_change_nothing(poison: float, dcp: int) -> None:
    stepper = loaded("smollm2", tensor_parallel_size=dcp, decode_context_parallel_size=dcp, **ONE_PROGRAM)
    clean = stepper.greedy(prompts(101), 4)
    stepper.poison(poison)
    poisoned = stepper.greedy(prompts(101), 4)
    for expected, found in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(found.every_logits, expected.every_logits)


def test_the_order_of_arrival_changes_nothing() -> None:
    """Short prompts behind long ones, in a program that decodes and one that does not."""
    stepper = loaded("smollm2", max_num_seqs=32, max_num_batched_tokens=256, **EIGHT_RANKS)
    expected = stepper.greedy(prompts(101), 4)
    for found, same in zip(reversed(stepper.greedy(prompts(101)[::-1], 4)), expected, strict=True):
        assert found.tokens == same.tokens


def test_batch_sizes_give_the_same_tokens() -> None:
    stepper = loaded("smollm2", max_num_seqs=32, max_num_batched_tokens=256, **EIGHT_RANKS)
    together = stepper.greedy(prompts(101), 4)
    for size in (1, 2, 4, 8):
        for first in range(0, 8, size):
            group = stepper.greedy(prompts(101)[first : first + size], 4)
            for expected, found in zip(together[first : first + size], group, strict=True):
                assert found.tokens == expected.tokens
