import jax
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.api.config import EngineConfig
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models import decoder
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.sharding.arrays import is_spec
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import Placement

ONE = Layout(tensor_parallel_size=1, decode_context_parallel_size=1)

# what the model cards and papers say, main model without the layers for multi-token prediction
PUBLISHED = {
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
    "deepseek-r1": 671e9,
    "kimi-k2": 1.03e12,
    "kimi-k2.6": 1.03e12,
    "qwen3-0.6b": 0.596e9,
    "qwen3-32b": 32.8e9,
    "qwen3-235b-a22b": 235e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
    "llama-3.1-405b": 405.9e9,
}


def config_of(name: str) -> ModelConfig:
    return from_hf(PRESETS[name])


def specs_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_spec)


def place(layout: Layout) -> Placement:
    return Placement(make_mesh(layout))


def weights(config: ModelConfig, layout: Layout = ONE):
    return specs_of(decoder.weight_specs(config, layout, "bfloat16"))


def cache_bytes_per_token(config: ModelConfig, layout: Layout = ONE) -> float:
    """Per device, for blocks of 256 tokens."""
    specs = specs_of(decoder.cache_specs(config, layout, 1, 256 // layout.dcp, "bfloat16"))
    return sum(spec.bytes_per_device(place(layout)) for spec in specs) / 256


def test_every_preset_has_a_published_total():
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_add_up_to_the_published_total(name):
    total = sum(int(np.prod(spec.checkpoint_shape)) for spec in weights(config_of(name)))
    assert total == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_bfloat16_and_name_every_weight(name):
    config = config_of(name)
    assert config.dtype == "bfloat16"
    structure = jax.tree.structure(decoder.weight_specs(config, ONE, "bfloat16"), is_leaf=is_spec)
    structure.flatten_up_to(decoder.weight_names(config))  # raises where the trees differ


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("deepseek-v3", 61 * 576 * 2),  # 70,272
        ("kimi-k2", 61 * 576 * 2),
        ("kimi-k2.6", 61 * 576 * 2),
        ("deepseek-v2-lite", 27 * 576 * 2),
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-405b", 126 * 2 * 8 * 128 * 2),
        ("qwen3-235b-a22b", 94 * 2 * 4 * 128 * 2),
    ],
)
def test_cache_bytes_per_token(name, bytes_per_token):
    assert cache_bytes_per_token(config_of(name)) == bytes_per_token


def test_a_latent_is_stored_on_every_device_unless_dcp_splits_it():
    config = config_of("kimi-k2")
    for dcp in (1, 2, 4, 8):
        layout = Layout(tensor_parallel_size=8, decode_context_parallel_size=dcp)
        assert cache_bytes_per_token(config, layout) == 70272 / dcp


@pytest.mark.parametrize("dcp", [1, 8])
def test_weights_per_device_are_an_eighth_of_the_whole_besides_what_every_device_holds(dcp):
    config = config_of("deepseek-v3")
    layout = Layout(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    per_device = sum(spec.bytes_per_device(place(layout)) for spec in weights(config, layout))
    whole = sum(spec.bytes_per_device(place(ONE)) for spec in weights(config))
    latent, query, hidden = 576, 1536, 7168
    router = 58 * 256 * (hidden + 1) * 4  # float32
    every = 61 * ((latent + query) * hidden + 512 + query + 2 * hidden) * 2 + hidden * 2 + router
    assert per_device == (whole - every) // 8 + every


# --- as a model


def test_a_preset_opens_without_weights_or_tokenizer():
    files = open_model("deepseek-v3")
    assert from_hf(files.config).num_layers == 61
    assert files.tokenizer() is None
    assert files.generation_config == {}


def test_a_preset_without_dummy_weights_is_refused():
    with pytest.raises(ValueError, match=r'qwen3-0\.6b is a preset.*load_format must be "dummy", but is "auto"'):
        LLM("qwen3-0.6b")


def test_a_folder_of_the_same_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kimi-k2").mkdir()
    with pytest.raises(ValueError, match=r"kimi-k2 must hold config\.json"):
        open_model("kimi-k2")


TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "q_lora_rank": 16,
    "vocab_size": 64,
    "first_k_dense_replace": 1,
}


def test_a_cut_preset_runs_on_dummy_weights():
    llm = LLM(
        "deepseek-v3",
        load_format="dummy",
        hf_overrides=TINY,
        tensor_parallel_size=8,
        decode_context_parallel_size=8,
        block_size=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=2**20,
        progress=False,
    )
    config = llm.runner.model.config
    assert (config.num_layers, config.mla.cached_dim, config.moe.groups) == (2, 576, 8)
    assert llm.runner.model.dtype == "bfloat16"
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 4


def test_overrides_must_be_a_mapping():
    with pytest.raises(ValueError, match=r"hf_overrides must be a dict of config\.json's entries, but is 'layers=2'"):
        EngineConfig(hf_overrides="layers=2")  # type: ignore[arg-type]
