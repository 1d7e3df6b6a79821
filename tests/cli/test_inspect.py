import json
import math
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from harness import GOLDENS
from safetensors.numpy import save_file
from small_models import NINE_HEADS

from dcpjax.checkpoint.weight_files import SafetensorsSource
from dcpjax.cli import main
from dcpjax.planning.inspection import inspect_model
from dcpjax.sharding.mesh import Layout

FAMILIES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
DENSE = {**NINE_HEADS, "torch_dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path):
    """A model of nothing but a config; other files are added by `write`."""

    def write(**files):
        for name, content in {"config": DENSE, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path)

    return write


def read(capsys, *arguments):
    assert main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows(capsys, *arguments):
    """The lines of the text form, by their first words."""
    assert main(["inspect", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    width = next(len(line) - len(line.removeprefix("model").lstrip()) for line in lines)
    return {line[:width].strip(): line[width:] for line in lines}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_files(family):
    source = SafetensorsSource(GOLDENS / family)
    found = inspect_model(str(GOLDENS / family))
    assert found.parameters == sum(math.prod(source.shape(name)) for name in source.names())
    assert found.stored is not None
    assert {name: (part.tensors, part.bytes) for name, part in found.stored.items()} == {
        "float32": (len(source.names()), 4 * found.parameters)
    }


@pytest.mark.parametrize(
    ("preset", "parameters", "per_token", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248, 2 * 2 * 8 * 128 * 32),
        ("qwen3-0.6b", 596_049_920, 596_049_920, 2 * 2 * 8 * 128 * 28),
        ("deepseek-v3", 671_026_419_200, 37_552_297_472, 2 * 576 * 61),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520, 2 * 2 * 4 * 128 * 94),
    ],
)
def test_published_sizes_come_out(preset, parameters, per_token, kv_bytes):
    found = inspect_model(preset)
    assert (found.parameters, found.kv_bytes_per_token, found.stored) == (parameters, kv_bytes, None)
    assert found.parameters_per_token == per_token


def test_what_one_token_meets_leaves_out_the_experts_it_is_not_routed_to():
    found = inspect_model(str(GOLDENS / "qwen3-moe"))
    config, moe = found.config, found.config.moe
    idle = (config.num_layers - len(moe.dense_layers)) * (moe.experts - moe.experts_per_token)
    assert idle > 0
    one_expert = 3 * config.hidden_size * moe.intermediate_size
    assert found.parameters - found.parameters_per_token == idle * one_expert


def test_layouts_are_the_legal_ones_with_the_copies_of_the_cache(capsys):
    layouts = read(capsys, str(GOLDENS / "qwen3-moe"), "-tp", "16")["layouts"]
    heads, kv_heads = inspect_model(str(GOLDENS / "qwen3-moe")).config.num_heads, 2
    assert {one["devices"] for one in layouts} <= {1, 2, 4, 8, 16}
    for one in layouts:
        assert (one["tp"] * one["dcp"], heads % one["tp"]) == (one["devices"], 0)
        assert one["copies"] == max(1, one["tp"] // kv_heads)


def test_a_device_holds_whole_heads_of_latent_attention():
    layouts = inspect_model(str(GOLDENS / "deepseek-v3"), [8, 16]).layouts
    assert [(layout.tp, layout.dcp) for layout in layouts[8]] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert layouts[16] == []


def test_nine_heads_on_eight_devices_have_one_layout(folder):
    assert inspect_model(folder()).layouts[8] == [Layout(tensor_parallel_size=8, decode_context_parallel_size=8)]


def test_text_says_it_line_by_line(capsys):
    shown = rows(capsys, str(GOLDENS / "deepseek-v3"), "--tensor-parallel-size", "16")
    assert shown["family"] == "deepseek_v3"
    assert shown["attention"] == "heads 8, query rank 26, latent rank 20, nope dim 12, rope dim 8, value dim 10"
    assert shown["experts"] == "9 of width 10, 4 per token and a shared one of width 10; in 1 of the layers"
    assert shown["parameters"] == "60,581, 53,381 per token"
    assert shown["weights"] == shown["float32"] == "56 tensors, 0.24 MB"
    assert shown["8"] == "8 x 1 (8x), 4 x 2 (4x), 2 x 4 (2x), 1 x 8 (1x)"
    assert shown["16"] == "none: 16 devices cannot share 8 heads evenly"


def test_dtypes_are_counted_from_the_headers_and_a_foreign_quantisation_is_named(capsys, folder, tmp_path):
    path = folder(config={**DENSE, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    tensors = {
        "a": np.zeros((2, 3), ml_dtypes.bfloat16),
        "b": np.zeros(5, ml_dtypes.bfloat16),
        "c": np.zeros(4, np.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = read(capsys, path)
    assert found["dtypes"] == {"bfloat16": {"tensors": 2, "bytes": 22}, "int32": {"tensors": 1, "bytes": 16}}
    assert found["quantisation"] == "gptq, 4 bits"


def test_block_scales_are_told_and_belong_to_the_files(capsys, folder, tmp_path):
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = folder(config={**DENSE, "text_config": {**DENSE, "quantization_config": quantised}})
    save_file(
        {"x": np.zeros((2, 2), ml_dtypes.float8_e4m3fn), "x_scale_inv": np.zeros((1, 1), np.float32)},
        tmp_path / "model.safetensors",
    )
    found = read(capsys, path)
    assert found["quantisation"] == "fp8, a scale per 128 x 128"
    assert set(found["dtypes"]) == {"float8_e4m3fn", "float32"}


def test_tokenizer_template_and_generation_defaults_are_told(capsys, folder):
    found = read(capsys, folder())
    assert (found["tokenizer"], found["chat_template"], found["generation_config"]) == (None, False, {})
    found = read(
        capsys,
        folder(
            tokenizer={
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
                "added_tokens": [{"content": "b"}, {"content": "<e>", "id": 7}],
            },
            tokenizer_config={"chat_template": "{{ messages }}", "eos_token": {"content": "<e>"}},
            generation_config={"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]},
        ),
    )
    assert found["tokenizer"] == {"kind": "BPE", "size": 3}
    assert found["chat_template"] is True
    assert found["generation_config"] == {"temperature": 0.6, "top_k": 20}
    assert found["eos_token_ids"] == [1, 2, 7]


def test_a_template_in_a_file_of_its_own_is_found_and_unigram_pieces_are_counted(capsys, folder, tmp_path):
    path = folder(tokenizer={"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}})
    (tmp_path / "chat_template.jinja").write_text("x")
    found = read(capsys, path)
    assert (found["tokenizer"], found["chat_template"]) == ({"kind": "Unigram", "size": 2}, True)


def test_a_gguf_file_tells_its_types_and_its_tokenizer(capsys, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_string("tokenizer.chat_template", "x")
    blocks = gguf.quants.quantize(np.zeros((10, 32), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read(capsys, str(tmp_path / "m.gguf"))
    assert found["dtypes"] == {"Q4_0": {"tensors": 1, "bytes": 180}, "F32": {"tensors": 1, "bytes": 128}}
    assert found["quantisation"] == "Q4_0"
    assert (found["tokenizer"], found["chat_template"]) == ({"kind": "gpt2, smollm", "size": 3}, True)


def test_of_a_hub_id_only_configs_and_headers_are_fetched(capsys, folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot(name, *, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        return folder(generation_config={"top_p": 0.9})

    tensor = SimpleNamespace(dtype="BF16", data_offsets=(10, 30))
    metadata = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"x": tensor})})
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda name: metadata)
    found = read(capsys, "org/name")
    assert asked == [("org/name", ["*.json", "*.jinja"])]
    assert found["dtypes"] == {"BF16": {"tensors": 1, "bytes": 20}}
    assert found["generation_config"] == {"top_p": 0.9}


def test_a_hub_that_does_not_answer_is_one_sentence(capsys, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_, **__):
        raise ConnectionError("no route\nat all")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    assert main(["inspect", "org/name"]) == 2
    assert capsys.readouterr().err == (
        "dcpjax: error: --model must be a local path or a model on the hub, but org/name is no path, and the hub did "
        "not give it: no route\n"
    )


def test_no_weight_is_read_and_no_backend_is_started():
    code = """
from dcpjax.cli import main
from dcpjax.checkpoint.weight_files import SafetensorsSource
SafetensorsSource.read = None
main(["inspect", "tests/goldens/llama2", "--json"])
from jax._src import xla_bridge
print(xla_bridge._backends)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=GOLDENS.parent.parent)
    assert done.stdout.splitlines()[-1:] == ["{}"], done.stderr


MISTAKES = [
    ([], "inspect must have one model, a folder, a .gguf file, a hub id or a preset such as kimi-k2, but has none"),
    (["a", "b"], "inspect must have one model, a folder, a .gguf file, a hub id or a preset such as kimi-k2, but has"),
    (["kimi-k3"], "the model must be a folder, a .gguf file, a hub id or one of smollm2-135m, deepseek-v2-lite, "),
    (["kimi-k2", "-tp", "0"], "--tensor-parallel-size must be an integer of at least 1, but is 0; use 1 or more"),
    (["kimi-k2", "-tp", "x"], "--tensor-parallel-size/-tp must be an integer, but is 'x'"),
    (["kimi-k2", "--jsn"], "unknown flag --jsn; did you mean --json?"),
    (["empty"], "the model folder empty must hold config.json, but does not; pass the folder that a model was saved"),
    (["gpt2"], "model_type must be one of deepseek_v2, "),
    (["torn"], "torn/model.safetensors must be a whole safetensors file, but is not"),
]


@pytest.mark.parametrize("python", [[], ["-O"]])
def test_mistakes_are_one_sentence_each(tmp_path, python):
    for name, config in {"empty": None, "gpt2": {"model_type": "gpt2"}, "torn": DENSE}.items():
        (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    commands = [["inspect", *words] for words, _ in MISTAKES]
    code = f"from dcpjax.cli import main; print([main(command) for command in {commands}])"
    done = subprocess.run([sys.executable, *python, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [2] * len(MISTAKES)
    for line, (_, sentence) in zip(done.stderr.splitlines(), MISTAKES, strict=True):
        assert line.startswith(f"dcpjax: error: {sentence}")
    assert "'kimi-k3', which is none; did you mean kimi-k2?" in done.stderr
