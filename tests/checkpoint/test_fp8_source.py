import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from harness import GOLDENS, Stepper, golden
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dcpjax.checkpoint.fp8_source import Fp8Source, fp8_block
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.weight_files import SafetensorsSource
from dcpjax.checkpoint.weights import read
from dcpjax.models.checkpoint_names import HeadRows, Stack

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class ArraySource:
    """Arrays by name, noting what is read of them."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors = tensors
        self.read_entries: dict[str, int] = {}

    def names(self):
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = self.tensors[name][index]
        self.read_entries[name] = self.read_entries.get(name, 0) + part.size
        return part


def quantised(shape: tuple[int, int], block: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    scales = generator.uniform(0.001, 3, [-(-size // edge) for size, edge in zip(shape, block, strict=True)])
    return generator.normal(0, 30, shape).astype(FP8), scales.astype(np.float32)


def by_hand(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Block by block."""
    result = np.empty(values.shape, np.float32)
    for row, column in np.ndindex(*scales.shape):
        part = (
            slice(row * block[0], (row + 1) * block[0]),
            slice(column * block[1], (column + 1) * block[1]),
        )
        result[part] = values[part].astype(np.float32) * scales[row, column]
    return result


def slices(size: int) -> st.SearchStrategy[slice]:
    bounds = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: slice(min(pair), max(pair)))
    return st.one_of(bounds, st.just(slice(None)))


@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(1, 16))
def test_every_slice_equals_dequantising_the_whole_by_hand(data, rows, columns, block_rows, block_columns):
    block = (block_rows, block_columns)
    values, scales = quantised((rows, columns), block)
    source = Fp8Source(ArraySource(w=values, w_scale_inv=scales), block)
    index = (data.draw(slices(rows)), data.draw(slices(columns)))
    np.testing.assert_array_equal(source.read("w", index), by_hand(values, scales, block)[index])


@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (1, 129), (257, 1)])
@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_blocks_of_128_at_odd_edges_are_exact(shape, kind):
    values, scales = quantised(shape, (128, 128))
    source = Fp8Source(ArraySource(w=values.astype(np.float32).astype(kind), w_scale_inv=scales), (128, 128))
    assert source.shape("w") == shape
    assert source.dtype("w") == np.float32
    found = source.read("w", (slice(None), slice(None)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, by_hand(values.astype(np.float32).astype(kind), scales, (128, 128)))


def test_only_the_slice_and_the_scales_of_its_blocks_are_read():
    values, scales = quantised((400, 600), (128, 128))
    inner = ArraySource(w=values, w_scale_inv=scales)
    Fp8Source(inner, (128, 128)).read("w", (slice(120, 130), slice(256, 384)))
    assert inner.read_entries == {"w": 10 * 128, "w_scale_inv": 2 * 1}


def test_other_tensors_and_names_pass_through():
    values, scales = quantised((4, 4), (2, 2))
    plain = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    source = Fp8Source(ArraySource(w=values, w_scale_inv=scales, norm=plain), (2, 2))
    assert sorted(source.names()) == ["norm", "w"]
    assert source.dtype("norm") == plain.dtype
    assert source.shape("norm") == (6,)
    np.testing.assert_array_equal(source.read("norm", (slice(2, 5),)), plain[2:5])


def test_scales_may_be_powers_of_two_in_a_byte():
    values, _ = quantised((3, 5), (2, 2))
    scales = np.array([[1, 2, 4], [0.5, 0.25, 8]], np.float32)
    source = Fp8Source(ArraySource(w=values, w_scale_inv=scales.astype(ml_dtypes.float8_e8m0fnu)), (2, 2))
    np.testing.assert_array_equal(source.read("w", (slice(0, 3), slice(0, 5))), by_hand(values, scales, (2, 2)))


def test_rows_of_heads_are_dequantised():
    values, scales = quantised((4 * 22, 20), (16, 16))
    source = Fp8Source(ArraySource(kv=values, kv_scale_inv=scales), (16, 16))
    whole = by_hand(values, scales, (16, 16)).reshape(4, 22, 20)
    found = read(source, HeadRows("kv", 22, 12, 22), (slice(1, 3), slice(0, 10), slice(5, 20)))
    np.testing.assert_array_equal(found, whole[1:3, 12:22, 5:20])


def test_a_stack_of_experts_is_dequantised():
    experts = [quantised((10, 7), (4, 4), seed) for seed in range(5)]
    tensors = {f"e{n}": values for n, (values, _) in enumerate(experts)}
    tensors |= {f"e{n}_scale_inv": scales for n, (_, scales) in enumerate(experts)}
    whole = np.stack([by_hand(values, scales, (4, 4)) for values, scales in experts])
    index = (slice(1, 4), slice(3, 9), slice(0, 7))
    found = read(Fp8Source(ArraySource(**tensors), (4, 4)), Stack(tuple(f"e{n}" for n in range(5))), index)
    np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (None, "tensor w of float8_e4m3fn must come with w_scale_inv, but does not; fetch the checkpoint again"),
        (
            np.ones((2, 2), np.float32),
            "tensor w_scale_inv must have shape (2, 3), one scale for each block of 128 x 128 in (200, 300), "
            "but has (2, 2)",
        ),
        (
            np.ones(6, np.float32),
            "tensor w_scale_inv must have shape (2, 3), one scale for each block of 128 x 128 in (200, 300), "
            "but has (6,)",
        ),
    ],
)
def test_a_scale_that_is_missing_or_misshapen_is_named_before_anything_is_read(scale, sentence):
    inner = ArraySource(w=quantised((200, 300), (128, 128))[0], **({} if scale is None else {"w_scale_inv": scale}))
    with pytest.raises(ValueError) as refusal:
        Fp8Source(inner, (128, 128)).shape("w")
    assert str(refusal.value) == sentence
    assert not inner.read_entries


def test_a_scale_of_a_tensor_that_is_not_float8_is_refused():
    inner = ArraySource(w=np.ones((2, 2), np.int8), w_scale_inv=np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="tensor w must be float8, because w_scale_inv scales it, but is int8"):
        Fp8Source(inner, (128, 128)).shape("w")


# --- config.json

FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def test_the_block_size_stands_in_the_config_or_its_text_part():
    assert fp8_block({"quantization_config": FP8_CONFIG}) == (128, 128)
    assert fp8_block({"text_config": {"quantization_config": FP8_CONFIG}}) == (128, 128)
    assert fp8_block({}) is None
    assert fp8_block({"text_config": {}}) is None
    assert fp8_block({"quantization_config": {"quant_method": "awq"}}) is None


@pytest.mark.parametrize("block", [None, 128, [128], [128, 0], ["128", "128"], [True, 1]])
def test_fp8_without_blocks_is_refused(block):
    with pytest.raises(ValueError, match="weight_block_size of an fp8 checkpoint must be two positive integers"):
        fp8_block({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}})


# --- a whole checkpoint

BLOCK = (16, 16)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """DeepSeek-V3 with its projections in float8, and the same numbers in float32."""
    tensors = load_file(GOLDENS / "deepseek-v3" / "model.safetensors")
    fp8, plain = {}, {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or "proj_with_mqa" in name:
            grid = [-(-size // edge) for size, edge in zip(tensor.shape, BLOCK, strict=True)]
            padded = np.zeros([count * edge for count, edge in zip(grid, BLOCK, strict=True)], np.float32)
            padded[: tensor.shape[0], : tensor.shape[1]] = np.abs(tensor)
            scales = padded.reshape(grid[0], BLOCK[0], grid[1], BLOCK[1]).max((1, 3)) / np.float32(448)
            wide = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[: tensor.shape[0], : tensor.shape[1]]
            fp8[name], fp8[name + "_scale_inv"] = (tensor / wide).astype(FP8), scales
            plain[name] = by_hand(fp8[name], scales, BLOCK)
        else:
            fp8[name] = plain[name] = tensor
    config = json.loads((GOLDENS / "deepseek-v3" / "config.json").read_text())
    quantisation = {"quantization_config": {**FP8_CONFIG, "weight_block_size": list(BLOCK)}}
    for name, weights, extra in (("fp8", fp8, quantisation), ("plain", plain, {})):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **extra}))
    return tmp_path / "fp8", tmp_path / "plain"


def test_a_float8_checkpoint_gives_what_its_dequantised_weights_give(folders):
    prompt = golden("deepseek-v3")["prompt"]
    options = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "one_shape": True}
    (fp8,), (plain,) = (Stepper(folder, **options).greedy([prompt], 6) for folder in folders)
    assert fp8.tokens == plain.tokens
    np.testing.assert_array_equal(fp8.prompt_logits, plain.prompt_logits)
    np.testing.assert_array_equal(fp8.logits, plain.logits)
    assert np.abs(fp8.prompt_logits - golden("deepseek-v3")["logits"]).max() > 1e-3  # float8 was used


def test_opening_a_folder_dequantises_only_where_the_config_says_so(folders):
    assert isinstance(open_model(folders[0]).tensors(), Fp8Source)
    assert isinstance(open_model(folders[1]).tensors(), SafetensorsSource)


def test_a_float8_checkpoint_without_a_scale_is_refused_by_the_tensor_name(folders, tmp_path):
    source, lost = SafetensorsSource(folders[0]), "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = [name for name in source.names() if name != f"{lost}_scale_inv"]
    tensors = {name: source.read(name, (slice(None),) * len(source.shape(name))) for name in kept}
    shutil.copytree(folders[0], tmp_path / "broken")
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {lost} of float8_e4m3fn must come with {lost}_scale_inv"):
        Stepper(tmp_path / "broken")
