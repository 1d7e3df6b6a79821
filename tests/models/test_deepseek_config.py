"""DeepSeek and Kimi checkpoints as published: both forms of config.json, prefixes and layers that are not used."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from harness import GOLDENS
from safetensors.numpy import load_file, save_file

from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.checkpoint.weights import load_weights
from dcpjax.models import decoder
from dcpjax.models.config import from_hf
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import Placement

LAYOUT = Layout(tensor_parallel_size=2, decode_context_parallel_size=2)


def config_of(family: str) -> dict[str, Any]:
    return json.loads((GOLDENS / family / "config.json").read_text())


def tensors_of(family: str) -> dict[str, np.ndarray]:
    return load_file(GOLDENS / family / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def weights(folder: Path) -> list[jax.Array]:
    files = open_model(folder)
    config = from_hf(files.config)
    specs = decoder.weight_specs(config, LAYOUT, "float32")
    place = Placement(make_mesh(LAYOUT))
    return jax.tree.leaves(load_weights(config, specs, decoder.weight_names(config), files.tensors(), place))


def assert_same_weights(folder: Path, family: str) -> None:
    for found, expected in zip(weights(folder), weights(GOLDENS / family), strict=True):
        np.testing.assert_array_equal(found, expected)


# --- tensors


def mtp_layer(tensors: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """A layer for multi-token prediction behind the last one: a whole layer and its own projections."""
    last = {
        f"{prefix}{name.replace('layers.1.', 'layers.2.')}": tensor + 1
        for name, tensor in tensors.items()
        if ".layers.1." in name
    }
    own = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    return last | {f"{prefix}model.layers.2.{part}.weight": np.full((4, 4), np.nan, np.float32) for part in own}


def test_a_layer_for_multi_token_prediction_is_left_out(tmp_path):
    tensors = tensors_of("deepseek-v3")
    config = {**config_of("deepseek-v3"), "num_nextn_predict_layers": 1}
    assert_same_weights(write(tmp_path / "m", config, tensors | mtp_layer(tensors)), "deepseek-v3")


@pytest.mark.parametrize("mtp", [False, True])
def test_the_language_model_of_a_multimodal_checkpoint_is_found_by_its_prefix(tmp_path, mtp):
    tensors = tensors_of("kimi-k2")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    named |= {"vision_tower.patch_embed.proj.weight": np.ones((3, 3), np.float32)}
    named |= mtp_layer(tensors, "language_model.") if mtp else {}
    text = {**config_of("kimi-k2"), "model_type": "kimi_k2"}
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 3}}
    assert_same_weights(write(tmp_path / "m", config, named), "kimi-k2")


def test_a_missing_prefix_is_named(tmp_path):
    config = {"model_type": "kimi_k25", "text_config": config_of("kimi-k2")}
    folder = write(tmp_path / "m", config, tensors_of("kimi-k2"))
    with pytest.raises(ValueError, match=r"must hold the tensor language_model\.model\.embed_tokens\.weight"):
        weights(folder)


def test_a_missing_expert_is_named(tmp_path):
    tensors = tensors_of("deepseek-v3")
    del tensors["model.layers.1.mlp.experts.5.down_proj.weight"]
    folder = write(tmp_path / "m", config_of("deepseek-v3"), tensors)
    with pytest.raises(ValueError, match=r"must hold the tensor model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"):
        weights(folder)


# --- config.json


def legacy(config: dict[str, Any]) -> dict[str, Any]:
    """As the checkpoints were published: `rope_scaling` with a `type`, `torch_dtype`, and routing in words."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    sigmoid = config["model_type"] != "deepseek_v2"
    routing = {
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "noaux_tc" if sigmoid else config["topk_method"],
        "moe_layer_freq": 1,
        "ep_size": 1,
        "seq_aux": True,
        "aux_loss_alpha": 0.001,
    }
    return old | routing | {"rope_theta": theta, "rope_scaling": {"type": kind, **rope}, "torch_dtype": config["dtype"]}


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2"])
def test_the_published_form_equals_the_present_one(family):
    config = config_of(family)
    assert "rope_parameters" in config
    assert from_hf(legacy(config)) == from_hf(config)


def test_kimi_k2_is_read_like_deepseek_v3():
    config = config_of("kimi-k2")
    assert config["model_type"] == "deepseek_v3"
    kimi, deepseek = from_hf({**config, "model_type": "kimi_k2"}), from_hf(config)
    assert (kimi.mla, kimi.moe, kimi.rope) == (deepseek.mla, deepseek.moe, deepseek.rope)


def test_routing_of_the_published_configs():
    moe = {name: from_hf(PRESETS[name]).moe for name in ("deepseek-v2-lite", "deepseek-v3", "kimi-k2")}
    lite, v3, k2 = moe.values()
    assert (lite.scoring, lite.groups, lite.correction_bias, lite.normalise) == ("softmax", 1, False, False)
    assert (lite.experts, lite.experts_per_token, lite.shared_size) == (64, 6, 2 * 1408)
    assert lite.dense_layers == {0}
    assert (v3.scoring, v3.groups, v3.groups_per_token, v3.correction_bias) == ("sigmoid", 8, 4, True)
    assert (v3.normalise, v3.scale, v3.dense_layers) == (True, 2.5, {0, 1, 2})
    assert (k2.experts, k2.groups, k2.scale, k2.dense_layers) == (384, 1, 2.827, {0})


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"first_k_dense_replace": 2}, {0, 1}),
        ({"first_k_dense_replace": 0}, set()),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, {0, 1, 3, 5}),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 3}, {0, 1, 2, 4, 5}),
    ],
)
def test_which_layers_are_dense(changes, dense):
    config = {**legacy(config_of("deepseek-v3")), "num_hidden_layers": 6, **changes}
    assert from_hf(config).moe.dense_layers == dense


def test_fp8_weights_load_as_the_dtype_of_the_config():
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**PRESETS["deepseek-v3"], "quantization_config": quantisation}
    assert from_hf(config).dtype == "bfloat16"


def test_other_quantisations_are_refused_by_name():
    config = {**PRESETS["kimi-k2.6"], "quantization_config": {"quant_method": "compressed-tensors"}}
    with pytest.raises(ValueError, match="except block-scaled fp8, but has quant_method 'compressed-tensors'"):
        from_hf(config)
    with pytest.raises(ValueError, match="'compressed-tensors'"):
        from_hf({"model_type": "kimi_k25", "text_config": config})
