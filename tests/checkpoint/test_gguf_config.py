from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import HEADS, HIDDEN, KV_HEADS, embedding, random, sizes, write_gguf

from dcpjax.checkpoint.gguf_config import gguf_config
from dcpjax.checkpoint.gguf_source import GGUFSource


def test_config_has_the_form_of_hugging_face(tmp_path):
    fields = sizes() | {"llama.rope.freq_base": 5e5, "tokenizer.ggml.bos_token_id": 1}
    config = gguf_config(write_gguf(tmp_path / "m.gguf", embedding(), fields=fields))
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 64,
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_theta": 5e5,
        "rope_scaling": None,
        "vocab_size": 10,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
    }


def config_with(tmp_path: Path, tensors: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    changed = sizes() | {key.replace("__", "."): value for key, value in fields.items()}
    return gguf_config(write_gguf(tmp_path / "m.gguf", embedding(**(tensors or {})), fields=changed))


def test_key_length_is_the_head_dim(tmp_path):
    assert config_with(tmp_path, llama__attention__key_length=24)["head_dim"] == 24


def test_an_output_tensor_unties_the_embeddings(tmp_path):
    assert not config_with(tmp_path, {"output.weight": random(10, HIDDEN)})["tie_word_embeddings"]


def test_query_biases_are_attention_bias(tmp_path):
    assert config_with(tmp_path, {"blk.0.attn_q.bias": random(HIDDEN)})["attention_bias"]


@pytest.mark.parametrize(("eot", "expected"), [(None, 2), (2, 2), (7, [2, 7])])
def test_end_of_turn_is_an_end_too(tmp_path, eot, expected):
    fields: dict[str, Any] = {"tokenizer__ggml__eos_token_id": 2} | (
        {"tokenizer__ggml__eot_token_id": eot} if eot else {}
    )
    assert config_with(tmp_path, **fields)["eos_token_id"] == expected


def test_rope_scaling_is_taken_over(tmp_path):
    scaling: dict[str, Any] = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    original: dict[str, Any] = {"llama__rope__scaling__original_context_length": 16}
    assert config_with(tmp_path, **scaling, **original)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    scaling["llama__rope__scaling__type"] = "linear"
    assert config_with(tmp_path, **scaling)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_the_bounds_of_yarn_are_taken_over(tmp_path):
    fields: dict[str, Any] = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    fields |= {"llama__rope__scaling__yarn_beta_fast": 16.0, "llama__rope__scaling__yarn_beta_slow": 2.0}
    scaling = config_with(tmp_path, **fields)["rope_scaling"]
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("rope.dimension_count", 4, HIDDEN // HEADS),
        ("attention.value_length", 4, HIDDEN // HEADS),
        ("attention.sliding_window", 4096, 0),
        ("attention.scale", 0.5, 0.0),
        ("rope.scale_linear", 2.0, 1.0),
        ("rope.scaling.attn_factor", 2.0, 1.0),
        ("final_logit_softcapping", 30.0, 0.0),
        ("residual_scale", 0.2, 1.0),
    ],
)
def test_metadata_that_would_change_the_results_are_refused_by_name(tmp_path, key, value, neutral):
    config_with(tmp_path, **{f"llama.{key}": neutral})
    with pytest.raises(ValueError, match=f"llama.{key} of .* must be {neutral!r}, but is {value}"):
        config_with(tmp_path, **{f"llama.{key}": value})


def test_heads_and_tables_of_wrong_kinds_are_sentences(tmp_path):
    with pytest.raises(ValueError, match=r"num_attention_heads of .* must be one number for all layers, but is 0"):
        config_with(tmp_path, llama__attention__head_count=0)
    with pytest.raises(ValueError, match=r"hidden_size of .* must be one number for all layers, but is 'x'"):
        config_with(tmp_path, llama__embedding_length="x")
    with pytest.raises(ValueError, match=r"eos_token_id of .* must be a token id, but is \[1, 2\]"):
        config_with(tmp_path, tokenizer__ggml__eos_token_id=[1, 2])
    with pytest.raises(ValueError, match=r"its general\.alignment is 'x'"):
        config_with(tmp_path, general__alignment="x")


def test_unknown_rope_scaling_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be none, linear or yarn, but is 'spiral'"):
        config_with(tmp_path, llama__rope__scaling__type="spiral")


def test_rope_factors_come_from_their_tensor(tmp_path):
    factors = np.array([1.0, 1.5, 8.0, 8.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", embedding(**{"rope_freqs.weight": factors}))
    assert gguf_config(path)["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.5, 8.0, 8.0]}
    assert list(GGUFSource(path).names()) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("key", sorted(sizes().keys() - {"llama.attention.head_count_kv"}))
def test_a_missing_key_is_named(tmp_path, key):
    fields = {name: value for name, value in sizes().items() if name != key}
    path = write_gguf(tmp_path / "m.gguf", embedding(), fields=fields)
    with pytest.raises(ValueError, match=f"must hold the metadata key {key}"):
        gguf_config(path)


def test_missing_kv_heads_are_the_heads(tmp_path):
    fields = {name: value for name, value in sizes().items() if not name.endswith("_kv")}
    path = write_gguf(tmp_path / "m.gguf", embedding(), fields=fields)
    assert gguf_config(path)["num_key_value_heads"] == HEADS


def test_a_missing_embedding_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": random(2, 4)})
    with pytest.raises(ValueError, match=r"must hold the tensor token_embd\.weight"):
        gguf_config(path)


def test_other_architectures_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", embedding(), "mamba")
    for read in (gguf_config, GGUFSource):
        with pytest.raises(ValueError, match="must be one of llama, qwen2, qwen3, but is 'mamba'"):
            read(path)


def test_experts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a dense model"):
        config_with(tmp_path, llama__expert_count=8)


def test_heads_that_differ_by_layer_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"num_key_value_heads of .* must be one number for all layers"):
        config_with(tmp_path, llama__attention__head_count_kv=[2, 4])
