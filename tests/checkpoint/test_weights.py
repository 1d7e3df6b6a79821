"""Which tensors of a checkpoint a model reads: all of them, but for a few known ones."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GOLDENS
from safetensors.numpy import load_file, save_file

from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.weight_files import INDEX_FILE
from dcpjax.checkpoint.weights import check_tensors
from dcpjax.models import decoder
from dcpjax.models.config import from_hf
from dcpjax.sharding.mesh import Layout

ONE = Layout(tensor_parallel_size=1, decode_context_parallel_size=1)
FAMILIES = ["llama3", "smollm2", "llama-bias", "qwen2", "qwen3", "qwen3-moe", "deepseek-v2", "deepseek-v3"]
VECTOR = np.ones(4, np.float32)


def copy(family: str, folder: Path, *, more: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """A golden checkpoint with more tensors and other entries in its config.json."""
    folder.mkdir(exist_ok=True)
    config = json.loads((GOLDENS / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(load_file(GOLDENS / family / "model.safetensors") | (more or {}), folder / "model.safetensors")
    return folder


def check(folder: Path) -> None:
    files = open_model(folder)
    config = from_hf(files.config)
    specs = decoder.weight_specs(config, ONE, "float32")
    check_tensors(config, specs, decoder.weight_names(config), files.tensors())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_read(family):
    check(GOLDENS / family)


UNREAD = [
    ("llama3", "model.layers.0.self_attn.q_norm.weight"),
    ("llama3", "model.layers.0.self_attn.q_proj.bias"),
    ("llama3", "model.layers.1.mlp.gate_proj.bias"),
    ("llama3", "lm_head.bias"),
    ("llama3", "model.layers.0.self_attn.sinks"),
    ("llama3", "model.layers.0.post_feedforward_layernorm.weight"),
    ("llama3", "score.weight"),
    ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
    ("qwen3", "model.layers.0.self_attn.o_proj.bias"),
    ("qwen3-moe", "model.layers.1.mlp.shared_experts.gate_proj.weight"),
    ("qwen3-moe", "model.layers.1.mlp.experts.7.gate_proj.weight"),
    ("deepseek-v2", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("deepseek-v3", "model.layers.0.self_attn.q_a_proj.bias"),
    ("deepseek-v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale"),
    ("deepseek-v3", "model.layers.0.self_attn.indexer.wk.weight"),
    ("deepseek-v3", "model.layers.7.input_layernorm.weight"),
]


@pytest.mark.parametrize(("family", "name"), UNREAD)
def test_a_tensor_that_nothing_reads_is_named(tmp_path, family, name):
    folder = copy(family, tmp_path / "m", more={name: VECTOR})
    with pytest.raises(ValueError, match=f"but nothing reads {re.escape(name)} \\(2 layers of"):
        check(folder)


@pytest.mark.parametrize("family", ["llama3", "deepseek-v3"])
def test_a_config_of_fewer_layers_than_the_weights_is_refused(tmp_path, family):
    folder = copy(family, tmp_path / "m", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"nothing reads model\.layers\.1\..* and \d+ more \(1 layers of"):
        check(folder)


def test_without_head_norms_in_the_config_those_of_the_weights_are_named(tmp_path):
    folder = copy("qwen3", tmp_path / "m", model_type="llama")
    with pytest.raises(ValueError, match=r"nothing reads model\.layers\.0\.self_attn\.k_norm\.weight and 3 more"):
        check(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "blk.0.attn_rot_embd.weight",
    ],
)
def test_stored_constants_of_the_rotary_embedding_are_left_out(tmp_path, name):
    check(copy("llama3", tmp_path / "m", more={name: VECTOR}))


# --- a head that is the embedding


def embedding() -> np.ndarray:
    return load_file(GOLDENS / "smollm2" / "model.safetensors")["model.embed_tokens.weight"]


def test_a_stored_head_that_is_the_embedding_is_left_out(tmp_path):
    check(copy("smollm2", tmp_path / "m", more={"lm_head.weight": embedding()}))


@pytest.mark.parametrize("head", [embedding() + 1, embedding()[:-1]], ids=["values", "shape"])
def test_a_stored_head_that_is_not_the_embedding_is_refused(tmp_path, head):
    folder = copy("smollm2", tmp_path / "m", more={"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"tie_word_embeddings must be false where lm_head\.weight is not"):
        check(folder)


def test_a_tied_head_that_only_the_index_knows_loads(tmp_path):
    folder = copy("smollm2", tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = [*load_file(folder / "model-1.safetensors"), "lm_head.weight"]
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    check(folder)


def test_an_untied_head_that_only_the_index_knows_is_refused(tmp_path):
    folder = copy("smollm2", tmp_path / "m", tie_word_embeddings=False)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = [*load_file(folder / "model-1.safetensors"), "lm_head.weight"]
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    with pytest.raises(ValueError, match=r"says that model-1\.safetensors holds the tensor lm_head\.weight"):
        check(folder)
