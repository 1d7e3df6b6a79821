import pytest

from dcpjax.checkpoint.model_config import overridden, read_model_config, resolve_dtype
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models.config import from_hf


def test_overrides_replace_entries_and_merge_nested_ones():
    config = {"a": 1, "text_config": {"b": 2, "c": 3}, "d": {"e": 4}}
    assert overridden(config, {"a": 5, "text_config": {"b": 6}, "d": None, "f": {"g": 7}}) == {
        "a": 5,
        "text_config": {"b": 6, "c": 3},
        "d": None,
        "f": {"g": 7},
    }
    assert config == {"a": 1, "text_config": {"b": 2, "c": 3}, "d": {"e": 4}}


def test_a_model_config_has_the_changes_of_the_user():
    raw = PRESETS["llama-3.1-8b"]
    assert read_model_config(raw) == from_hf(raw)
    assert read_model_config(raw, {"num_hidden_layers": 2}).num_layers == 2


@pytest.mark.parametrize(
    ("stored", "choice", "expected"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_auto_is_the_dtype_of_the_checkpoint_or_bfloat16(stored, choice, expected):
    config = read_model_config(PRESETS["llama-3.1-8b"], {"torch_dtype": stored})
    assert resolve_dtype(choice, config) == expected
