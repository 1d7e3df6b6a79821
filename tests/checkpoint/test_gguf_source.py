import struct
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf_files import HEADS, HIDDEN, KV_HEADS, embedding, gguf, random, write_gguf

from dcpjax.checkpoint import gguf_source
from dcpjax.checkpoint.gguf_config import gguf_config
from dcpjax.checkpoint.gguf_header import read_header
from dcpjax.checkpoint.gguf_source import GGUFSource, hf_name, unpermuted_rows

Type = gguf.GGMLQuantizationType

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
Q_NAME, K_NAME = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
WHOLE = (slice(None), slice(None))


def random_blocks(rows: int, row_values: int, kind: Any) -> np.ndarray:
    """Bytes below 0x3C, so that every float16 among them is finite and small."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (rows, row_values // block * block_bytes)
    return np.random.default_rng(1).integers(0, 0x3C, shape).astype(np.uint8)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: within each head, halves become pairs."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


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


def test_every_truncation_is_a_sentence(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": random(1, 4)})
    content, end = path.read_bytes(), read_header(path).tensors["token_embd.weight"].begin + 16
    for kept in range(0, end, 7):
        path.write_bytes(content[:kept])
        with pytest.raises(ValueError, match=r"m\.gguf must be"):
            GGUFSource(path)


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
    assert not hasattr(gguf_source, "gguf")
