import struct
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dcpjax.checkpoint import gguf_file
from dcpjax.checkpoint.gguf_file import GGUFSource, gguf_config, hf_name, read_header, unpermuted_rows

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
Q_NAME, K_NAME = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
HEADS, KV_HEADS, HIDDEN = 4, 2, 32
WHOLE = (slice(None), slice(None))


def sizes(family: str = "llama") -> dict[str, Any]:
    return {
        f"{family}.block_count": 1,
        f"{family}.context_length": 64,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": 48,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
    }


def add_field(writer: Any, key: str, value: Any) -> None:
    by_type = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    by_type[type(value)](key, value)


def write_gguf(
    path: Path, tensors: dict[str, Any], family: str = "llama", fields: dict[str, Any] | None = None
) -> Path:
    """`tensors`: an array as it is, or (bytes of rows, quantised type)."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in (sizes(family) if fields is None else fields).items():
        add_field(writer, key, value)
    for name, tensor in tensors.items():
        data, raw_type = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def random_blocks(rows: int, row_values: int, kind: Any) -> np.ndarray:
    """Bytes below 0x3C, so that every float16 among them is finite and small."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (rows, row_values // block * block_bytes)
    return np.random.default_rng(1).integers(0, 0x3C, shape).astype(np.uint8)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: within each head, halves become pairs."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def embedding(**more: Any) -> dict[str, Any]:
    return {"token_embd.weight": random(10, HIDDEN), **more}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_rows_read_as_the_package_dequantises_them(tmp_path, kind):
    rows = gguf.quants.quantize(random(6, 64), Type[kind])
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (rows, Type[kind])})
    source = GGUFSource(path)
    assert source.shape("model.layers.0.mlp.up_proj.weight") == (6, 64)
    assert source.dtype("model.layers.0.mlp.up_proj.weight") == np.float32
    read = source.read("model.layers.0.mlp.up_proj.weight", WHOLE)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(rows, Type[kind]))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_read_as_the_package_dequantises_them(tmp_path, kind):
    rows = random_blocks(4, 512, Type[kind])
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (rows, Type[kind])})
    expected = gguf.quants.dequantize(rows, Type[kind])
    assert np.isfinite(expected).all()
    read = GGUFSource(path).read("model.layers.0.mlp.up_proj.weight", (slice(1, 3), slice(256, 512)))
    np.testing.assert_array_equal(read, expected[1:3, 256:])


def test_plain_types_keep_their_dtype(tmp_path):
    values = random(4, 8)
    bfloats = values.astype(ml_dtypes.bfloat16)
    tensors = {
        "token_embd.weight": values,
        "output.weight": values.astype(np.float16),
        "blk.0.ffn_up.weight": (bfloats.view(np.uint8), Type.BF16),
    }
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tensors))
    for name, expected in [
        ("model.embed_tokens.weight", values),
        ("lm_head.weight", values.astype(np.float16)),
        ("model.layers.0.mlp.up_proj.weight", bfloats),
    ]:
        assert source.dtype(name) == expected.dtype
        read = source.read(name, (slice(1, 3), slice(2, 7)))
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected[1:3, 2:7])


@pytest.mark.parametrize(
    "index", [(), (slice(2, 5),), (slice(None), slice(8, 40)), (slice(1, 2), slice(0, 1)), (slice(0, 6, 2),)]
)
def test_any_slice_is_the_slice_of_the_whole(tmp_path, index):
    rows = gguf.quants.quantize(random(6, 64), Type.Q8_0)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {"output.weight": (rows, Type.Q8_0)}))
    whole = source.read("lm_head.weight", WHOLE)
    np.testing.assert_array_equal(source.read("lm_head.weight", index), whole[index])


def test_only_the_rows_asked_for_are_dequantised_and_only_once(tmp_path, monkeypatch):
    rows = gguf.quants.quantize(random(6, 64), Type.Q8_0)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {"output.weight": (rows, Type.Q8_0)}))
    seen: list[int] = []
    dequantize = gguf.quants.dequantize

    def counting(data: np.ndarray, kind: Any) -> np.ndarray:
        seen.append(len(data))
        return dequantize(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", counting)
    for columns in (slice(0, 32), slice(32, 64)):
        source.read("lm_head.weight", (slice(2, 4), columns))
    assert seen == [2]


def test_what_is_read_can_be_changed_without_changing_the_next_read(tmp_path):
    rows = gguf.quants.quantize(random(6, 64), Type.Q8_0)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {"output.weight": (rows, Type.Q8_0)}))
    first = source.read("lm_head.weight", WHOLE)
    first[:] = np.nan
    assert np.isfinite(source.read("lm_head.weight", WHOLE)).all()


def test_llama_query_and_key_rows_are_put_back_in_order(tmp_path):
    query, key = random(HIDDEN, HIDDEN), random(16, HIDDEN)
    bias = random(HIDDEN)
    tensors = {
        "blk.0.attn_q.weight": permuted(query, HEADS),
        "blk.0.attn_q.bias": permuted(bias, HEADS),
        "blk.0.attn_k.weight": permuted(key, KV_HEADS),
        "blk.0.attn_v.weight": key,
    }
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tensors))
    np.testing.assert_array_equal(source.read(f"{Q_NAME}.weight", WHOLE), query)
    np.testing.assert_array_equal(source.read(f"{Q_NAME}.bias", (slice(3, 9),)), bias[3:9])
    np.testing.assert_array_equal(source.read(f"{K_NAME}.weight", (slice(5, 11), slice(1, 4))), key[5:11, 1:4])
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.v_proj.weight", WHOLE), key)


def test_quantised_query_rows_are_put_back_in_order(tmp_path):
    rows = gguf.quants.quantize(permuted(random(HIDDEN, HIDDEN), HEADS), Type.Q4_0)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (rows, Type.Q4_0)}))
    stored = gguf.quants.dequantize(rows, Type.Q4_0)
    whole = source.read(f"{Q_NAME}.weight", WHOLE)
    np.testing.assert_array_equal(permuted(whole, HEADS), stored)
    np.testing.assert_array_equal(source.read(f"{Q_NAME}.weight", (slice(2, 13),)), whole[2:13])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_rows_stay_as_they_are(tmp_path, family):
    query = random(HIDDEN, HIDDEN)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": query}, family)
    np.testing.assert_array_equal(GGUFSource(path).read(f"{Q_NAME}.weight", WHOLE), query)


def test_unpermuting_is_the_inverse_of_permuting():
    rows = np.arange(48)
    np.testing.assert_array_equal(permuted(rows, 4)[unpermuted_rows(48, 4)], rows)


def test_names_are_those_of_hugging_face():
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.12.attn_norm.weight") == "model.layers.12.input_layernorm.weight"
    assert hf_name("blk.12.ffn_norm.weight") == "model.layers.12.post_attention_layernorm.weight"
    assert hf_name("blk.0.attn_output.bias") == "model.layers.0.self_attn.o_proj.bias"
    assert hf_name("blk.3.attn_q_norm.weight") == "model.layers.3.self_attn.q_norm.weight"


def test_names_without_counterpart_stay_visible(tmp_path):
    tensors = embedding(**{"blk.0.unheard_of.weight": random(3)})
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tensors))
    assert set(source.names()) == {"model.embed_tokens.weight", "blk.0.unheard_of.weight"}


def test_an_unknown_tensor_gets_the_nearest_names(tmp_path):
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", embedding()))
    with pytest.raises(ValueError, match=r"tensor model\.embed\.weight.*nearest names are model\.embed_tokens\.weight"):
        source.shape("model.embed.weight")


def test_a_type_that_cannot_be_dequantised_is_named_with_its_tensor(tmp_path):
    rows = random_blocks(2, 64, Type.Q8_1)
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (rows, Type.Q8_1)})
    with pytest.raises(ValueError, match=r"tensor output\.weight must be of a type .* but is Q8_1"):
        GGUFSource(path)


def test_a_type_that_is_not_known_is_named_with_its_tensor(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": random(1, 4)})
    content = bytearray(path.read_bytes())
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    content[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor token_embd\.weight .* but is of type 999"):
        GGUFSource(path)


def test_without_the_gguf_package_the_extra_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", embedding())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert gguf_config(path)["vocab_size"] == 10
    with pytest.raises(ValueError, match=r"pip install 'dcpjax\[gguf\]'"):
        GGUFSource(path)


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


def test_every_truncation_is_a_sentence(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": random(1, 4)})
    content, end = path.read_bytes(), read_header(path).tensors["token_embd.weight"].begin + 16
    for kept in range(0, end, 7):
        path.write_bytes(content[:kept])
        with pytest.raises(ValueError, match=r"m\.gguf must be"):
            GGUFSource(path)


@pytest.mark.parametrize("start", [b"GGML" + bytes(40), b"GGUF" + struct.pack(">I", 3), b"GGUF" + struct.pack("<I", 1)])
def test_other_formats_are_a_sentence(tmp_path, start):
    path = tmp_path / "m.gguf"
    path.write_bytes(start + bytes(64))
    with pytest.raises(ValueError, match=r"m\.gguf must be a whole GGUF file, but is not: it"):
        read_header(path)


def test_header_reads_every_kind_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_int64("i64", -(2**40))
    writer.add_uint64("u64", 2**63)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "añ日")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("texts", ["a", "", "Ġb"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = read_header(tmp_path / "m.gguf").fields
    assert fields == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "i64": -(2**40),
        "u64": 2**63,
        "f64": 0.1,
        "yes": True,
        "text": "añ日",
        "ints": [1, -2, 3],
        "texts": ["a", "", "Ġb"],
    }


def test_smollm2_reads_as_the_package_reads_it(smollm2_path):
    source = GGUFSource(smollm2_path)
    config = gguf_config(smollm2_path)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rms_norm_eps"] == float(np.float32(1e-5))
    assert len(source.names()) == 2 + 9 * 30
    header = read_header(smollm2_path)
    stored = header.tensors["blk.7.attn_k.weight"]
    assert stored.shape == (192, 576)
    key = source.read("model.layers.7.self_attn.k_proj.weight", WHOLE)
    raw = np.fromfile(smollm2_path, np.uint8, 192 * 360, offset=stored.begin).reshape(192, 360)
    np.testing.assert_array_equal(permuted(key, 3), gguf.quants.dequantize(raw, Type.Q4_1))


def test_module_imports_without_the_gguf_package():
    assert not hasattr(gguf_file, "gguf")
