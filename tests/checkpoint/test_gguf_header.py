import struct

import pytest
from gguf_files import gguf

from dcpjax.checkpoint.gguf_header import read_header


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
