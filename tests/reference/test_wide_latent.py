"""Latent attention with the published C=512, R=64 against transformers, made and compared on the spot; needs torch."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.reference

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder written by transformers, and what it computes."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parent))
    from families import WIDE
    from make_goldens import make

    folder = tmp_path_factory.mktemp("wide")
    return folder, make(WIDE, folder)


@pytest.mark.parametrize(("devices", "dcp"), [(1, 1), (4, 4), (4, 2), (4, 1)])
def test_wide_latents_equal_transformers(checkpoint: Any, devices: int, dcp: int) -> None:
    from harness import Stepper

    folder, expected = checkpoint
    stepper = Stepper(
        folder,
        one_shape=True,
        tensor_parallel_size=devices,
        decode_context_parallel_size=dcp,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2**23,
    )
    prompts = [expected["prompt"], expected["short_prompt"], expected["long_prompt"]]
    first, short, long = stepper.greedy(prompts, 24)
    np.testing.assert_allclose(first.prompt_logits, expected["logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(first.tokens, expected["greedy"])
    np.testing.assert_allclose(first.logits, expected["greedy_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(short.tokens[:8], expected["short_greedy"])
    np.testing.assert_array_equal(long.tokens[:16], expected["long_greedy"])
