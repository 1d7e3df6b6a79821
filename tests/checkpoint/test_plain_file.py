"""Pipes, devices, folders and endless files in place of each file of a checkpoint: refused before they are opened."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import embedding, write_gguf
from harness import GOLDENS
from small_models import character_model

from dcpjax.checkpoint.gguf_header import read_header
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.plain_file import MOST_BYTES, read_text

TEXTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
WEIGHTS = ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    """A tebibyte of zeros, none of them on the disk."""
    path.touch()
    try:
        os.truncate(path, 2**40)
    except OSError:
        pytest.skip("this file system has no sparse files")


ODD = [pipe, device, folder, sparse]


def read_all(path: Path) -> None:
    files = open_model(path)
    files.tokenizer()
    files.tensors()


def replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", TEXTS)
def test_odd_files_in_place_of_text_are_refused(tmp_path, name, make):
    model = character_model(tmp_path / "m")
    replaced(model / name, make)
    with pytest.raises(ValueError, match=f"{name} must (be a plain file, but is a|have at most {MOST_BYTES} bytes)"):
        read_all(model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", WEIGHTS)
def test_odd_files_in_place_of_weights_are_refused(tmp_path, name, make):
    model = shutil.copytree(GOLDENS / "llama2", tmp_path / "m")
    replaced(model / name, make)
    with pytest.raises(ValueError, match=f"{name} must "):
        read_all(model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [pipe, device, sparse])
@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_odd_files_in_place_of_a_model_are_refused(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}.*(must|but is the file)|model must be .*{name}"):
        open_model(tmp_path / name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<QQ", 0, 2**60),
        struct.pack("<QQ", 2**60, 0),
        struct.pack("<QQQ", 0, 1, 2**39),  # the length of a text
        struct.pack("<QQQBIIQ", 0, 1, 1, 65, 9, 4, 2**37),  # the length of an array of integers
    ],
    ids=["fields", "tensors", "text", "array"],
)
def test_a_sparse_file_that_claims_endless_values_is_refused(tmp_path, header):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + header)
    try:
        os.truncate(path, 2**40)
    except OSError:
        pytest.skip("this file system has no sparse files")
    with pytest.raises(
        ValueError, match=r"m\.gguf must be a whole GGUF file, but is not: its header (counts|has more)"
    ):
        read_header(path)


def test_a_model_that_was_lengthened_still_opens(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", embedding())
    os.truncate(path, path.stat().st_size + 2**20)
    assert open_model(path).config["vocab_size"] == 10


def test_links_to_plain_files_are_followed(tmp_path):
    """The cache of huggingface_hub links every file to a blob."""
    (tmp_path / "blob").write_text("é")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert read_text(tmp_path / "link") == "é"


def test_a_link_to_nothing_is_missing(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    with pytest.raises(ValueError, match=r"link must be there, but is missing"):
        read_text(tmp_path / "link")


def test_text_that_is_not_utf8_is_a_sentence(tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"t\.jinja must be readable text, but is not"):
        read_text(tmp_path / "t.jinja")
