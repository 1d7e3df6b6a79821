"""Every entry of every small config.json with values of wrong types and sizes: the loader's own error, or no change."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from harness import GOLDENS, sample

from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.checkpoint.weight_files import TensorSource
from dcpjax.checkpoint.weights import check_tensors
from dcpjax.models import config_rope, decoder
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.models.config_fields import NEUTRAL, READ
from dcpjax.models.rotary import rope_frequencies
from dcpjax.sharding.mesh import Layout

ONE = Layout(tensor_parallel_size=1, decode_context_parallel_size=1)
OWN_ERROR = re.compile(r"config\.json:? |model_type must be one of |rope factors must be |tensor |the weights in ")
FOLDERS = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
KEPT = ("llama3", "qwen3-moe", "deepseek-v2", "deepseek-v3")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


WRONG: tuple[Any, ...] = (
    *(None, True, False),
    *(-1, 0, 1, 2, 10**9, 2**40, 2**70, 10**400, 10**5000),
    *(-0.5, 0.0, 1.5, 1e9, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "2", "x" * 100_000),
    *([], [1], [1.5], ["x"], [None], [[]], [2**70], ["full_attention"] * 1000, list(range(100_000)), nested(500)),
    *({}, {"x": 1}, {"rope_type": "yarn"}, {"quant_method": []}, {"full_attention": {"rope_type": "default"}}),
)


@cache
def stored(name: str) -> tuple[dict[str, Any], TensorSource | None]:
    """A config and the tensors that belong to it, if there are any."""
    if name.startswith("preset "):
        return dict(PRESETS[name.removeprefix("preset ")]), None
    files = open_model(GOLDENS / name)
    return files.config, files.tensors()


def read(config: dict[str, Any], source: TensorSource | None) -> ModelConfig:
    """What a loader does before it reads any weight."""
    parsed = from_hf(config)
    assert np.isfinite(rope_frequencies(parsed.rope_dim, parsed.rope)).all()
    if source is not None:
        specs, names = decoder.weight_specs(parsed, ONE, "float32"), decoder.weight_names(parsed)
        check_tensors(parsed, specs, names, source)
    return parsed


def mutations(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(entry, config in which it has a wrong value), for entries it has, could have or should not know."""
    fields = {*config, *READ[config["model_type"]], *NEUTRAL, "text_config", "some_future_entry"}
    for field in sorted(fields):
        yield from ((field, {**config, field: value}) for value in WRONG)
    for form in ("rope_parameters", "rope_scaling"):
        scaling = config.get(form)
        if isinstance(scaling, dict):
            for field in sorted({*scaling, *set().union(*config_rope.READ.values()), *config_rope.NEUTRAL, "x"}):
                yield from ((form, {**config, form: {**scaling, field: value}}) for value in WRONG)


def faults(name: str) -> list[str]:
    """What goes otherwise than it must, one line for each mutation."""
    config, source = stored(name)
    expected, found = read(config, source), []
    for field, mutated in mutations(config):
        try:
            parsed = read(mutated, source)
        except ValueError as error:
            if not OWN_ERROR.match(str(error)) or len(str(error)) > 500:
                found.append(f"{field}: {str(error)[:200]}")
        except Exception as error:
            found.append(f"{field}: {type(error).__name__}: {str(error)[:200]}")
        else:
            if field not in READ[config["model_type"]] and parsed != expected:
                found.append(f"{field} changes the model, but is not said to be read")
    return found


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", sample([*FOLDERS, *(f"preset {name}" for name in PRESETS)], *KEPT))
def test_a_wrong_value_is_the_loaders_own_error_or_changes_nothing(name):
    assert faults(name) == []


# --- what must not be accepted


SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
}
OPTIONAL_SIZES = {"num_key_value_heads", "head_dim", "q_lora_rank", "original_max_position_embeddings"}
COUNTS = {"num_local_experts", "n_routed_experts", "n_shared_experts", "first_k_dense_replace"}
FLAGS = {"tie_word_embeddings", "attention_bias", "norm_topk_prob", "use_sliding_window"}
POSITIVE = {"rope_theta", "routed_scaling_factor"}

NO_INTEGER: tuple[Any, ...] = (True, -1, 1.5, 1e9, 2**40, 10**400, float("nan"), "2", [], [1], {}, {"x": 1})
NO_NUMBER: tuple[Any, ...] = (True, -1, float("nan"), float("inf"), 1e300, 10**400, "2", [], [1], {})
NO_FLAG: tuple[Any, ...] = (0, 1, 1.5, "false", "true", [], [True], {})
NO_LIST: tuple[Any, ...] = (1, 1.5, "x", True, {}, [None], [1.5], [[]], [True])

REFUSED = [
    *((field, (None, 0, *NO_INTEGER)) for field in sorted(SIZES)),
    *((field, (0, *NO_INTEGER)) for field in sorted(OPTIONAL_SIZES)),
    *((field, NO_INTEGER) for field in sorted(COUNTS)),
    *((field, NO_FLAG) for field in sorted(FLAGS)),
    *((field, (None, 0, *NO_NUMBER)) for field in sorted(POSITIVE)),
    ("rms_norm_eps", (None, *NO_NUMBER)),
    ("layer_types", (*NO_LIST, [1], ["x"])),
    ("mlp_only_layers", (*NO_LIST, ["x"])),
    ("dtype", ("x", 1, [], {}, True)),
    ("topk_method", ("x", 1, [], {}, True)),
    ("rope_parameters", (1, "x", [1], True, {"x": 1}, {"rope_type": 1}, {"rope_type": ["yarn"]})),
]


def families_with(field: str) -> list[str]:
    return [name for name in FOLDERS if field in READ[stored(name)[0]["model_type"]]]


@pytest.mark.parametrize(("field", "values"), REFUSED, ids=[field for field, _ in REFUSED])
def test_a_value_of_a_wrong_type_or_size_is_refused(field, values):
    names = families_with(field)
    assert names
    for name in names:
        for value in values:
            with pytest.raises(ValueError, match=f"^config\\.json: .*{field}|rope_type must|^config.json: x must"):
                from_hf({**stored(name)[0], field: value})


def test_experts_of_very_many_layers_are_refused():
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 1024 with 256 experts in each layer"):
        from_hf({**PRESETS["deepseek-v3"], "num_hidden_layers": 4000})


def test_a_nested_text_config_is_no_way_around_the_checks():
    inner: dict[str, Any] = json.loads((GOLDENS / "kimi-k2" / "config.json").read_text())
    for _ in range(900):
        inner = {"text_config": inner}
    with pytest.raises(ValueError, match="model_type must be one of"):
        from_hf(inner)
