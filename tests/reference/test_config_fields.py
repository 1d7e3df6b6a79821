"""The tables of config entries against transformers: every entry it knows is sorted, and means what it means there."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.reference
torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from families import FAMILIES, Family  # noqa: E402
from harness import Stepper  # noqa: E402

from dcpjax.models.config import from_hf  # noqa: E402
from dcpjax.models.config_fields import NEUTRAL, READ  # noqa: E402
from dcpjax.models.rotary import rope_frequencies  # noqa: E402

PROMPT = [5, 17, 3, 99, 42, 8, 61, 7, 23, 2]

# What transformers writes or reads and what changes no logits of these families.
HARMLESS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "max_window_layers",  # without use_sliding_window
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",  # how the sums of a product were split in training
    "problem_type",
    "qk_head_dim",  # the sum of its two parts, whatever is written
    "return_dict",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
}
HARMLESS_IN: dict[str, set[str]] = {  # computed from others, or not used
    "deepseek_v2": {"head_dim", "num_key_value_heads"},
    "deepseek_v3": {"head_dim", "num_key_value_heads"},
}


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"kimi-k2"}))
def test_every_entry_that_transformers_knows_is_sorted(name: str) -> None:
    written = FAMILIES[name].config.to_dict()
    family = written["model_type"]
    unsorted = written.keys() - READ[family] - NEUTRAL.keys() - HARMLESS - HARMLESS_IN.get(family, set())
    assert unsorted == set()


def test_the_norms_of_latents_have_an_epsilon_of_their_own(tmp_path: Path) -> None:
    usual = FAMILIES["deepseek-v3"]
    config = type(usual.config)(**{**usual.config.to_dict(), "rms_norm_eps": 0.3})
    model = Family(model=usual.model, config=config, seed=1).build()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    stepper = Stepper(tmp_path, one_shape=True, max_num_batched_tokens=16, kv_cache_memory_bytes=2**20)
    (found,) = stepper.greedy([PROMPT], 1)
    np.testing.assert_allclose(found.prompt_logits, expected, rtol=0, atol=2e-4)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        YARN,
        {**YARN, "factor": None},
        {**YARN, "truncate": False},
        {**YARN, "beta_fast": 1, "beta_slow": 1},
        {**YARN, "beta_fast": 1, "beta_slow": 32},
        {**YARN, "attention_factor": 1.5},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "original_max_position_embeddings": 4},
        {**YARN, "rope_theta": 2.0, "original_max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_frequencies_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(scaling))
    expected, angle_scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    rope = from_hf({**config.to_dict(), "rope_parameters": scaling}).rope
    np.testing.assert_allclose(rope_frequencies(64, rope), expected.numpy(), rtol=1e-5)
    assert rope.angle_scale == pytest.approx(angle_scale)
