import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models

from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.checkpoint.weight_files import SafetensorsSource

gguf = pytest.importorskip("gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    return tmp_path


def write_gguf(path: Path, *, with_tokenizer: bool) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if with_tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges([])
    writer.add_tensor("token_embd.weight", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_config_is_data_with_every_key_kept(folder):
    config = {"model_type": "llama", "auto_map": {"AutoModel": "evil.Evil"}, "unheard_of": [1, {"a": None}]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('never run')")
    assert open_model(folder).config == config


def test_generation_config_is_optional(folder):
    assert open_model(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_model(folder).generation_config == {"eos_token_id": [1, 2]}


def test_missing_config_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"must hold config\.json, but does not; pass the folder"):
        open_model(tmp_path)


def test_a_folder_with_only_a_gguf_file_points_to_it(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"pass the file .*model\.gguf instead"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_bad_json_names_the_file(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} must"):
        open_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", ["2", 1.5, True, -1, 2**70, {}, [None], [[2]], ["2"]])
def test_token_ids_of_another_type_name_the_entry(folder, name, key, value):
    (folder / name).write_text(json.dumps({"model_type": "llama", key: value}))
    with pytest.raises(ValueError, match=f"^{name}: {key} must be a token id or a list of them, but is"):
        open_model(folder)


def test_weights_are_opened_only_on_demand(folder):
    files = open_model(folder)
    with pytest.raises(ValueError, match=r"must hold model\.safetensors"):
        files.tensors()
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    source = files.tensors()
    assert isinstance(source, SafetensorsSource)
    assert list(source.names()) == ["w"]


def test_a_folder_without_tokenizer_has_none(folder):
    assert open_model(folder).tokenizer() is None


def test_a_folder_with_tokenizer_opens_it(folder):
    Backend(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    tokenizer = open_model(folder).tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("a") == [0]


def test_a_gguf_file_gives_the_same_things(tmp_path):
    write_gguf(tmp_path / "m.gguf", with_tokenizer=True)
    files = open_model(tmp_path / "m.gguf")
    assert files.path == tmp_path / "m.gguf"
    assert files.config["hidden_size"] == 8
    assert files.generation_config == {"bos_token_id": 0, "eos_token_id": 1}
    assert list(files.tensors().names()) == ["model.embed_tokens.weight"]
    tokenizer = files.tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [0, 1]


def test_a_gguf_file_without_vocabulary_has_no_tokenizer(tmp_path):
    write_gguf(tmp_path / "m.gguf", with_tokenizer=False)
    assert open_model(tmp_path / "m.gguf").tokenizer() is None


def test_the_alias_opens_as_smollm2(smollm2_path):
    files = open_model(smollm2_path)
    assert files.config["model_type"] == "llama"
    assert files.config["num_hidden_layers"] == 30
    assert files.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
